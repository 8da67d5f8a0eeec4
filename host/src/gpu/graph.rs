//! Work captured once and launched many times.

use std::ptr;

use cust::sys::{CUgraph, CUgraphExec};

use super::driver::{self, check};
use super::{Gpu, GpuError, Stream};

/// The work of a stream as one launch (a CUDA graph).
#[derive(Debug)]
pub struct Graph {
    executable: CUgraphExec,
    gpu: Gpu,
}

// SAFETY: the handle is an address that any thread may pass to the driver. Launches take `&mut self`: the driver does not allow two
// threads at once in one graph.
unsafe impl Send for Graph {}
// SAFETY: as above; nothing can be done with a shared reference.
unsafe impl Sync for Graph {}

impl Graph {
    /// Records what `work` enqueues on `stream`, without running it. `stream` is not a default stream, and `work` does not wait for it.
    ///
    /// # Errors
    /// What `work` returns; [`GpuError::Driver`] if it does something that cannot be captured.
    pub fn capture<E: From<GpuError>>(stream: &Stream, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let gpu = stream.gpu().clone();
        let _current = gpu.make_current()?;
        let capture = Capture::begin(stream)?;
        let worked = work();
        let captured = capture.end();
        worked?;
        let captured = captured?;
        let mut executable = ptr::null_mut();
        // SAFETY: the captured graph is alive; the driver stores a handle in the place passed.
        let status = unsafe { driver::cuGraphInstantiateWithFlags(&mut executable, captured.0, 0) };
        check("cuGraphInstantiateWithFlags", status)?;
        Ok(Graph { executable, gpu })
    }

    /// Enqueues the captured work on `stream`.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    ///
    /// # Safety
    /// What held for the captured work holds now: memory that it reads and writes is still allocated, and is not written by other work
    /// until it has ended. So two graphs, or two launches of one on two streams, that share a workspace follow each other.
    pub unsafe fn launch(&mut self, stream: &Stream) -> Result<(), GpuError> {
        let _current = self.gpu.make_current()?;
        // SAFETY: graph and stream are alive, and `&mut self` keeps other threads out; the caller answers for the memory.
        check("cuGraphLaunch", unsafe { driver::cuGraphLaunch(self.executable, stream.as_raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _current = self.gpu.make_current();
        // SAFETY: created by us and used by nobody any more; the driver lets a running launch end. Failures have nobody to go to.
        unsafe { driver::cuGraphExecDestroy(self.executable) };
    }
}

/// A stream in capture mode, taken out of it on every path, a panic of the captured work included.
struct Capture<'a> {
    stream: &'a Stream,
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, GpuError> {
        let mode = driver::STREAM_CAPTURE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as the reference.
        let status = unsafe { driver::cuStreamBeginCapture_v2(stream.as_raw(), mode) };
        check("cuStreamBeginCapture", status)?;
        Ok(Capture { stream })
    }

    fn end(self) -> Result<CapturedGraph, GpuError> {
        let (status, graph) = self.end_capture();
        std::mem::forget(self);
        check("cuStreamEndCapture", status)?;
        Ok(graph)
    }

    fn end_capture(&self) -> (driver::Status, CapturedGraph) {
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is in capture mode; the driver stores a handle, null on failure, in the place passed.
        let status = unsafe { driver::cuStreamEndCapture(self.stream.as_raw(), &mut graph) };
        (status, CapturedGraph(graph))
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        self.end_capture();
    }
}

/// A graph before it is made executable.
struct CapturedGraph(CUgraph);

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: returned by the driver for us to destroy, and an executable graph does not need it.
            unsafe { driver::cuGraphDestroy(self.0) };
        }
    }
}
