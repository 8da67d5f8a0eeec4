//! Which CUDA context is current on the calling thread.

use std::marker::PhantomData;
use std::ptr;

use cust::sys::CUcontext;

use super::{GpuError, driver};

/// While it lives, a GPU's primary context is current on this thread; dropping it restores the context that was current before.
#[must_use = "the context is current only as long as this lives"]
#[derive(Debug)]
pub struct CurrentContext {
    // A context is current for one thread: neither Send nor Sync.
    _thread: PhantomData<*const ()>,
}

impl CurrentContext {
    /// Pushes `context`, which outlives the result.
    pub(super) fn push(context: CUcontext) -> Result<Self, GpuError> {
        // SAFETY: a context handle goes in; the driver refuses those that it does not know.
        driver::check("cuCtxPushCurrent", unsafe { driver::cuCtxPushCurrent_v2(context) })?;
        Ok(CurrentContext { _thread: PhantomData })
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        let mut context = ptr::null_mut();
        // SAFETY: pops what `push` pushed on this thread. A destructor has nobody to report a failure to.
        unsafe { driver::cuCtxPopCurrent_v2(&mut context) };
    }
}

/// Runs `work`, then makes the context current again that was current before it.
pub(super) fn preserving_current<T>(work: impl FnOnce() -> Result<T, GpuError>) -> Result<T, GpuError> {
    let mut previous = ptr::null_mut();
    // SAFETY: the driver stores the handle of the current context, or null, in the place passed.
    driver::check("cuCtxGetCurrent", unsafe { driver::cuCtxGetCurrent(&mut previous) })?;
    let result = work();
    // SAFETY: `previous` was current on this thread a moment ago.
    driver::check("cuCtxSetCurrent", unsafe { driver::cuCtxSetCurrent(previous) })?;
    result
}
