//! Events: points in a stream, with their times.

use std::ptr;

use cust::sys::CUevent;

use super::driver::{self, check};
use super::{Gpu, GpuError, Stream};

/// A point in the work of a stream, which the host and other streams can wait for. (`cust`'s type records on `cust`'s streams only.)
#[derive(Debug)]
pub struct Event {
    raw: CUevent,
    gpu: Gpu,
}

// SAFETY: the handle is an address that any thread may pass to the driver, which synchronises itself.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A new event, not recorded yet.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn new(gpu: &Gpu) -> Result<Event, GpuError> {
        let _current = gpu.make_current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the driver stores a handle in the place passed.
        check("cuEventCreate", unsafe { driver::cuEventCreate(&mut raw, 0) })?;
        Ok(Event { raw, gpu: gpu.clone() })
    }

    pub(super) fn as_raw(&self) -> CUevent {
        self.raw
    }

    /// Puts the event behind the work that is in `stream` now.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn record(&self, stream: &Stream) -> Result<(), GpuError> {
        let _current = self.gpu.make_current()?;
        // SAFETY: event and stream live as long as the references.
        check("cuEventRecord", unsafe { driver::cuEventRecord(self.raw, stream.as_raw()) })
    }

    /// Waits until the event, as last recorded, has happened.
    ///
    /// # Errors
    /// [`GpuError::Driver`], also for a fault of the work before it.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let _current = self.gpu.make_current()?;
        // SAFETY: the event lives as long as `self`.
        check("cuEventSynchronize", unsafe { driver::cuEventSynchronize(self.raw) })
    }

    /// Microseconds from `start` to this event; both have happened.
    ///
    /// # Errors
    /// [`GpuError::Driver`], `CUDA_ERROR_NOT_READY` if one of them has not happened yet.
    pub fn elapsed_us(&self, start: &Event) -> Result<f32, GpuError> {
        let _current = self.gpu.make_current()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events live; the driver stores a number in the place passed.
        let status = unsafe { driver::cuEventElapsedTime(&mut milliseconds, start.raw, self.raw) };
        check("cuEventElapsedTime", status)?;
        Ok(milliseconds * 1000.0)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _current = self.gpu.make_current();
        // SAFETY: created by us and used by nobody any more. After a fault of the GPU this fails, and nothing is lost by that.
        unsafe { driver::cuEventDestroy_v2(self.raw) };
    }
}
