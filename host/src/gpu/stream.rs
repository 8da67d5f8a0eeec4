//! Streams, our own and other people's.

use std::ffi::c_void;
use std::ptr;

use cust::sys::CUstream;

use super::driver::{self, check};
use super::{DeviceValue, Event, Gpu, GpuError};

/// A stream: work enqueued on it runs in order. (`cust`'s type can neither wrap a foreign stream nor be non-blocking.)
#[derive(Debug)]
pub struct Stream {
    raw: CUstream,
    owner: Owner,
    gpu: Gpu,
}

#[derive(Debug, PartialEq, Eq)]
enum Owner {
    ThisLibrary,
    SomebodyElse,
}

// SAFETY: the handle is an address that any thread may pass to the driver, which synchronises itself.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream, which does not wait for the default stream (`CU_STREAM_NON_BLOCKING`) and is destroyed when dropped; work still in
    /// it is completed.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn new(gpu: &Gpu) -> Result<Stream, GpuError> {
        let _current = gpu.make_current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the driver stores a handle in the place passed.
        check("cuStreamCreate", unsafe { driver::cuStreamCreate(&mut raw, driver::STREAM_NON_BLOCKING) })?;
        Ok(Stream { raw, owner: Owner::ThisLibrary, gpu: gpu.clone() })
    }

    /// A stream of somebody else (`CUstream`, `cudaStream_t`, PyTorch's `cuda_stream`), which is not destroyed when this is dropped.
    ///
    /// # Safety
    /// `raw` is a stream of `gpu`'s primary context, null for its default stream, and lives until this is dropped.
    pub unsafe fn foreign(gpu: &Gpu, raw: *mut c_void) -> Stream {
        Stream { raw: raw.cast(), owner: Owner::SomebodyElse, gpu: gpu.clone() }
    }

    /// The legacy default stream, which waits for all blocking streams of the GPU and they for it.
    pub fn legacy_default(gpu: &Gpu) -> Stream {
        Stream { raw: ptr::null_mut(), owner: Owner::SomebodyElse, gpu: gpu.clone() }
    }

    /// The GPU it belongs to.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(super) fn as_raw(&self) -> CUstream {
        self.raw
    }

    /// Enqueues setting `bytes` bytes from device address `address` on to `value`.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    ///
    /// # Safety
    /// The bytes are allocated on the stream's GPU and used by no other work until this has ended.
    pub unsafe fn fill(&self, address: u64, value: u8, bytes: usize) -> Result<(), GpuError> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.gpu.make_current()?;
        // SAFETY: the caller's.
        check("cuMemsetD8Async", unsafe { driver::cuMemsetD8Async(address, value, bytes, self.raw) })
    }

    /// Copies the values at device address `address` to `values` once the work that is in the stream now has ended; done when this returns.
    ///
    /// # Errors
    /// [`GpuError::Driver`], also for a fault of that work.
    ///
    /// # Safety
    /// As many values are allocated there on the stream's GPU, and no other work writes them meanwhile.
    pub(crate) unsafe fn copy_to_host<T: DeviceValue>(&self, address: u64, values: &mut [T]) -> Result<(), GpuError> {
        if values.is_empty() {
            return Ok(());
        }
        let _current = self.gpu.make_current()?;
        let (to, bytes) = (values.as_mut_ptr().cast(), size_of_val(values));
        // SAFETY: both sides hold the bytes, the host's until the copy has ended; any bits are a value.
        check("cuMemcpyDtoHAsync", unsafe { driver::cuMemcpyDtoHAsync_v2(to, address, bytes, self.raw) })?;
        self.synchronize()
    }

    /// Waits until all work in the stream has ended.
    ///
    /// # Errors
    /// [`GpuError::Driver`], also for a fault of that work.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let _current = self.gpu.make_current()?;
        // SAFETY: the stream lives as long as `self`.
        check("cuStreamSynchronize", unsafe { driver::cuStreamSynchronize(self.raw) })
    }

    /// Makes work enqueued from now on wait until `event`, as last recorded, has happened.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn wait(&self, event: &Event) -> Result<(), GpuError> {
        let _current = self.gpu.make_current()?;
        // SAFETY: stream and event live as long as the references; the driver keeps what it needs of the event.
        check("cuStreamWaitEvent", unsafe { driver::cuStreamWaitEvent(self.raw, event.as_raw(), 0) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owner == Owner::SomebodyElse {
            return;
        }
        let _current = self.gpu.make_current();
        // SAFETY: created by us and used by nobody any more. After a fault of the GPU this fails, and nothing is lost by that.
        unsafe { driver::cuStreamDestroy_v2(self.raw) };
    }
}
