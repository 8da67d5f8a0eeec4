//! Timing of work on a GPU with cold caches.

use super::{Buffer, Event, Gpu, GpuError, Stream};

/// A buffer so large that writing it leaves nothing else in the L2 cache.
#[derive(Debug)]
pub struct L2Flush {
    buffer: Buffer<u8>,
}

impl L2Flush {
    /// Writing four times the cache drives out the rest of it, whatever its replacement policy; 256 MiB at least.
    const MIN_BYTES: usize = 256 << 20;

    /// Allocates the buffer.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`], [`GpuError::Driver`].
    pub fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let bytes = (4 * gpu.properties().l2_bytes).max(Self::MIN_BYTES);
        Ok(L2Flush { buffer: Buffer::uninit(gpu, "the buffer that flushes L2", bytes)? })
    }

    /// Enqueues the flush.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn flush(&mut self, stream: &Stream) -> Result<(), GpuError> {
        self.buffer.fill_bytes(stream, 0)
    }
}

/// Microseconds that the work enqueued by `work` takes in `stream`, for each of `runs` runs; each starts with a flushed L2 cache.
///
/// The time is that between two events around the work. The host enqueues it while the flush still runs (some 60 us), so that its own
/// overhead is not in it unless it is longer than that. An empty kernel measures about 4 us on an H200.
///
/// # Errors
/// What `work` returns; [`GpuError::Driver`], also for a fault of the work.
pub fn time_us<E: From<GpuError>>(
    stream: &Stream,
    runs: usize,
    l2: &mut L2Flush,
    mut work: impl FnMut() -> Result<(), E>,
) -> Result<Vec<f32>, E> {
    let (start, end) = (Event::new(stream.gpu())?, Event::new(stream.gpu())?);
    let mut times_us = Vec::with_capacity(runs);
    for _ in 0..runs {
        l2.flush(stream)?;
        start.record(stream)?;
        work()?;
        end.record(stream)?;
        end.synchronize()?;
        times_us.push(end.elapsed_us(&start)?);
    }
    Ok(times_us)
}
