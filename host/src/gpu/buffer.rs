//! Device memory that this library owns.

use std::marker::PhantomData;

use cust::error::CudaError;
use cust::memory::{DeviceBuffer, mem_get_info};

use super::driver::{self, check, check_cust};
use super::{DeviceValue, Gpu, GpuError, Stream, TensorElement, TensorView, TensorViewMut};

/// `len` values of type `T` in the memory of a GPU, on a 256-byte boundary. Dropping it waits for work on the GPU that may use it.
#[derive(Debug)]
pub struct Buffer<T: DeviceValue> {
    /// `None` in an empty buffer, for which the driver has no address.
    memory: Option<DeviceBuffer<u8>>,
    len: usize,
    gpu: Gpu,
    _values: PhantomData<T>,
}

impl<T: DeviceValue> Buffer<T> {
    /// Memory for `len` values with whatever it held before. `what` names it in errors.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`], [`GpuError::Driver`].
    pub fn uninit(gpu: &Gpu, what: &str, len: usize) -> Result<Self, GpuError> {
        let memory = match len.saturating_mul(size_of::<T>()) {
            0 => None,
            bytes => Some(allocate(gpu, what, bytes)?),
        };
        Ok(Buffer { memory, len, gpu: gpu.clone(), _values: PhantomData })
    }

    /// Memory for `len` values, every byte 0 when this returns.
    ///
    /// # Errors
    /// As [`Buffer::uninit`].
    pub fn zeroed(gpu: &Gpu, what: &str, len: usize) -> Result<Self, GpuError> {
        let mut buffer = Buffer::uninit(gpu, what, len)?;
        // The host would not wait for the driver's synchronous memset either, and non-blocking streams never wait for it.
        let stream = Stream::legacy_default(gpu);
        buffer.fill_bytes(&stream, 0)?;
        stream.synchronize()?;
        Ok(buffer)
    }

    /// Memory that holds a copy of `values` when this returns.
    ///
    /// # Errors
    /// As [`Buffer::uninit`].
    pub fn from_slice(gpu: &Gpu, what: &str, values: &[T]) -> Result<Self, GpuError> {
        let mut buffer = Buffer::uninit(gpu, what, values.len())?;
        buffer.copy_from_slice(&Stream::legacy_default(gpu), values)?;
        Ok(buffer)
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no value.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes.
    pub fn size_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Device address of the first value; 0 if there is none.
    pub fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.as_device_ptr().as_raw())
    }

    /// The GPU it lies on.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Replaces all values once the work that is in `stream` now has ended; done when this returns.
    ///
    /// # Errors
    /// [`GpuError::CopyLength`] unless `values` is as long as the buffer; [`GpuError::Driver`].
    pub fn copy_from_slice(&mut self, stream: &Stream, values: &[T]) -> Result<(), GpuError> {
        // SAFETY: `values` is borrowed until the copy has ended.
        unsafe { self.copy_from_slice_async(stream, values) }?;
        stream.synchronize()
    }

    /// Copies all values to `values` once the work that is in `stream` now has ended; done when this returns.
    ///
    /// # Errors
    /// [`GpuError::CopyLength`] unless `values` is as long as the buffer; [`GpuError::Driver`].
    pub fn copy_to_slice(&self, stream: &Stream, values: &mut [T]) -> Result<(), GpuError> {
        // SAFETY: `values` is borrowed until the copy has ended.
        unsafe { self.copy_to_slice_async(stream, values) }?;
        stream.synchronize()
    }

    /// All values, once the work that is in `stream` now has ended.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<T>, GpuError> {
        let mut values = Vec::with_capacity(self.len);
        // SAFETY: the vector has room for `len` values and is borrowed until the copy has ended; then they are all initialised, and any
        // bits are a value.
        unsafe {
            self.copy_to_host(stream, values.as_mut_ptr())?;
            stream.synchronize()?;
            values.set_len(self.len);
        }
        Ok(values)
    }

    /// Enqueues the replacement of all values.
    ///
    /// # Errors
    /// [`GpuError::CopyLength`] unless `values` is as long as the buffer; [`GpuError::Driver`].
    ///
    /// # Safety
    /// `values` is neither freed nor changed until the copy has ended.
    pub unsafe fn copy_from_slice_async(&mut self, stream: &Stream, values: &[T]) -> Result<(), GpuError> {
        self.check_len(values.len(), self.len)?;
        if self.size_bytes() == 0 {
            return Ok(());
        }
        let _current = self.gpu.make_current()?;
        let (to, from) = (self.address(), values.as_ptr().cast());
        // SAFETY: both sides hold `size_bytes`; the caller keeps the host's side alive, and freeing the device's side waits.
        check("cuMemcpyHtoDAsync", unsafe {
            driver::cuMemcpyHtoDAsync_v2(to, from, self.size_bytes(), stream.as_raw())
        })
    }

    /// Enqueues a copy of all values to `values`.
    ///
    /// # Errors
    /// [`GpuError::CopyLength`] unless `values` is as long as the buffer; [`GpuError::Driver`].
    ///
    /// # Safety
    /// `values` is neither freed nor looked at until the copy has ended.
    pub unsafe fn copy_to_slice_async(&self, stream: &Stream, values: &mut [T]) -> Result<(), GpuError> {
        self.check_len(self.len, values.len())?;
        // SAFETY: `values` has room for `len` values, and the caller keeps it alive.
        unsafe { self.copy_to_host(stream, values.as_mut_ptr()) }
    }

    /// Enqueues a copy of all values to `values`, which has room for them until the copy has ended.
    unsafe fn copy_to_host(&self, stream: &Stream, values: *mut T) -> Result<(), GpuError> {
        if self.size_bytes() == 0 {
            return Ok(());
        }
        let _current = self.gpu.make_current()?;
        // SAFETY: both sides hold `size_bytes`; the caller keeps the host's side alive, and freeing the device's side waits.
        check("cuMemcpyDtoHAsync", unsafe {
            driver::cuMemcpyDtoHAsync_v2(values.cast(), self.address(), self.size_bytes(), stream.as_raw())
        })
    }

    /// Enqueues the replacement of all values by those of `source`.
    ///
    /// # Errors
    /// [`GpuError::CopyLength`] unless `source` is as long as the buffer; [`GpuError::Driver`].
    pub fn copy_from_buffer(&mut self, stream: &Stream, source: &Buffer<T>) -> Result<(), GpuError> {
        self.check_len(source.len, self.len)?;
        if self.size_bytes() == 0 {
            return Ok(());
        }
        let _current = self.gpu.make_current()?;
        // SAFETY: both sides hold `size_bytes`, and freeing either waits.
        check("cuMemcpyDtoDAsync", unsafe {
            driver::cuMemcpyDtoDAsync_v2(self.address(), source.address(), self.size_bytes(), stream.as_raw())
        })
    }

    /// Enqueues setting every byte to `value`; 0xFF makes every floating-point value a NaN.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn fill_bytes(&mut self, stream: &Stream, value: u8) -> Result<(), GpuError> {
        // SAFETY: the buffer holds `size_bytes`, any bits are values, and freeing it waits.
        unsafe { stream.fill(self.address(), value, self.size_bytes()) }
    }

    fn check_len(&self, source_len: usize, destination_len: usize) -> Result<(), GpuError> {
        if source_len == destination_len { Ok(()) } else { Err(GpuError::CopyLength { source_len, destination_len }) }
    }
}

impl<T: TensorElement> Buffer<T> {
    /// The buffer as a row-major tensor; the first `product of shape` values of it.
    ///
    /// # Errors
    /// [`GpuError::CopyLength`] if the buffer is shorter than that.
    pub fn view(&self, shape: &[usize]) -> Result<TensorView<'_>, GpuError> {
        self.check_holds(shape)?;
        Ok(TensorView::of_buffer(self, shape))
    }

    /// As [`Buffer::view`], to write to.
    ///
    /// # Errors
    /// As [`Buffer::view`].
    pub fn view_mut(&mut self, shape: &[usize]) -> Result<TensorViewMut<'_>, GpuError> {
        self.check_holds(shape)?;
        Ok(TensorViewMut::new(TensorView::of_buffer(self, shape)))
    }

    fn check_holds(&self, shape: &[usize]) -> Result<(), GpuError> {
        let values = shape.iter().fold(1, |product: usize, &extent| product.saturating_mul(extent));
        if values <= self.len {
            return Ok(());
        }
        Err(GpuError::CopyLength { source_len: values, destination_len: self.len })
    }
}

impl<T: DeviceValue> Drop for Buffer<T> {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            let _current = self.gpu.make_current();
            // Frees it. After a fault of the GPU that fails, silently, and the memory goes with the process.
            drop(memory);
        }
    }
}

fn allocate(gpu: &Gpu, what: &str, bytes: usize) -> Result<DeviceBuffer<u8>, GpuError> {
    let _current = gpu.make_current()?;
    // SAFETY: nothing reads it as anything but bytes or `DeviceValue`s, for which any bits will do.
    match unsafe { DeviceBuffer::uninitialized(bytes) } {
        Err(CudaError::OutOfMemory) => {
            let (free, _) = check_cust("cuMemGetInfo", mem_get_info())?;
            Err(GpuError::OutOfMemory { what: what.into(), bytes, free })
        }
        result => check_cust("cuMemAlloc", result),
    }
}
