//! The CUDA driver as another user of the process sees it: memory and streams that the library did not make, and copies of parts.

use std::ffi::c_void;
use std::marker::PhantomData;

use attn_backward::gpu::{CurrentContext, Gpu, Stream};

unsafe extern "C" {
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32;
    fn cuMemFree_v2(address: u64) -> u32;
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> u32;
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> u32;
    fn cuMemsetD8_v2(address: u64, value: u8, count: usize) -> u32;
    fn cuStreamCreate(stream: *mut *mut c_void, flags: u32) -> u32;
    fn cuStreamDestroy_v2(stream: *mut c_void) -> u32;
}

#[track_caller]
fn check(status: u32) {
    assert_eq!(status, 0, "the driver's status");
}

fn current(gpu: &Gpu) -> CurrentContext {
    gpu.make_current().unwrap()
}

/// Waits for the default stream, on which the driver's own copies and fills may still run when the call returns. Not for the whole context:
/// another test may be capturing one of its streams.
fn wait(gpu: &Gpu) {
    Stream::legacy_default(gpu).synchronize().unwrap();
}

/// Values of type `T` in memory that the library knows nothing of, every byte the same at first.
pub struct Memory<T> {
    address: u64,
    len: usize,
    gpu: Gpu,
    _values: PhantomData<T>,
}

impl<T: bytemuck::Pod> Memory<T> {
    pub fn filled(gpu: &Gpu, len: usize, byte: u8) -> Memory<T> {
        let _current = current(gpu);
        let mut address = 0;
        let bytes = len * size_of::<T>();
        // SAFETY: the driver stores an address in the place passed, and the memory set is what it allocated.
        unsafe {
            check(cuMemAlloc_v2(&mut address, bytes.max(1)));
            check(cuMemsetD8_v2(address, byte, bytes.max(1)));
        }
        wait(gpu);
        Memory { address, len, gpu: gpu.clone(), _values: PhantomData }
    }

    pub fn of(gpu: &Gpu, values: &[T]) -> Memory<T> {
        let mut memory = Memory::filled(gpu, values.len(), 0);
        memory.write(0, values);
        memory
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    /// Replaces the values from index `first` on.
    pub fn write(&mut self, first: usize, values: &[T]) {
        assert!(first + values.len() <= self.len);
        if values.is_empty() {
            return;
        }
        let _current = current(&self.gpu);
        let to = self.address + (first * size_of::<T>()) as u64;
        // SAFETY: both sides hold the bytes.
        check(unsafe { cuMemcpyHtoD_v2(to, values.as_ptr().cast(), size_of_val(values)) });
        wait(&self.gpu);
    }

    /// The values in `range`.
    pub fn read(&self, range: std::ops::Range<usize>) -> Vec<T> {
        assert!(range.end <= self.len);
        let _current = current(&self.gpu);
        let mut values = vec![T::zeroed(); range.len()];
        if values.is_empty() {
            return values;
        }
        let from = self.address + (range.start * size_of::<T>()) as u64;
        // SAFETY: both sides hold the bytes, and any bits are a value.
        check(unsafe { cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), from, size_of_val(values.as_slice())) });
        values
    }
}

impl<T> Drop for Memory<T> {
    fn drop(&mut self) {
        let _current = self.gpu.make_current();
        // SAFETY: allocated by `filled`; freeing waits for work that uses it. After a fault it fails, which does not matter here.
        unsafe { cuMemFree_v2(self.address) };
    }
}

/// A stream that the library did not make.
pub struct ForeignStream {
    raw: *mut c_void,
    gpu: Gpu,
}

impl ForeignStream {
    pub fn new(gpu: &Gpu) -> ForeignStream {
        let _current = current(gpu);
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver stores a handle in the place passed.
        check(unsafe { cuStreamCreate(&mut raw, 0) });
        ForeignStream { raw, gpu: gpu.clone() }
    }

    pub fn raw(&self) -> *mut c_void {
        self.raw
    }
}

impl Drop for ForeignStream {
    fn drop(&mut self) {
        let _current = self.gpu.make_current();
        // SAFETY: created by `new`.
        unsafe { cuStreamDestroy_v2(self.raw) };
    }
}
