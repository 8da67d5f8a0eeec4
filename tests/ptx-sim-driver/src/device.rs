//! The GPU behind the driver: memory, modules, streams, graphs.
//!
//! Work is done when it is enqueued, so everything is always synchronised; an order of streams that only events could give is not checked.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Instant;

use ptx_sim::{Memory, Module, Options, Size};

use crate::status::*;

/// Bytes of memory that the GPU says it has; the host needs somewhat more for them.
pub(crate) const TOTAL_MEMORY: usize = 4 << 30;
/// Dynamic shared memory that a kernel may use without `cuFuncSetAttribute`.
const SHARED_BYTES_WITHOUT_ASKING: usize = 48 << 10;
/// Handles up to this are those of the default streams.
const LAST_DEFAULT_STREAM: usize = 2;
/// Where a driver gives handles.
const FIRST_HANDLE: usize = 0x1000;
/// How many SMs the GPU has.
const NUM_SMS: &str = "PTX_SIM_NUM_SMS";
const DEFAULT_NUM_SMS: usize = 8;

/// SMs of the GPU: `PTX_SIM_NUM_SMS`, or 8.
pub(crate) fn num_sms() -> usize {
    std::env::var(NUM_SMS).ok().and_then(|number| number.parse().ok()).unwrap_or(DEFAULT_NUM_SMS)
}

/// Work of a stream.
#[derive(Clone)]
pub(crate) enum Work {
    Launch(Launch),
    /// Address, value, bytes.
    Fill(u64, u8, usize),
    /// Destination, source, bytes, all on the GPU.
    Copy(u64, u64, usize),
}

/// A launch of a kernel.
#[derive(Clone)]
pub(crate) struct Launch {
    pub module: Arc<Module>,
    pub entry: String,
    pub size: Size,
    pub params: Vec<u8>,
}

/// A kernel that the host has looked up.
#[derive(Clone)]
pub(crate) struct Function {
    pub module: Arc<Module>,
    pub entry: String,
    /// Dynamic shared memory that a launch may ask for.
    max_shared_bytes: usize,
}

/// What a stream captures.
struct Capture {
    by: ThreadId,
    work: Vec<Work>,
    /// Something was called that must not be called during a capture.
    invalid: bool,
}

/// A stream.
struct Stream {
    /// Whether it waits for the default stream, and that for it.
    blocking: bool,
    capture: Option<Capture>,
}

/// The GPU.
pub(crate) struct Device {
    pub memory: Memory,
    /// Bytes of every allocation, by address.
    allocations: HashMap<u64, usize>,
    modules: HashMap<usize, Arc<Module>>,
    functions: HashMap<usize, Function>,
    streams: HashMap<usize, Stream>,
    events: HashMap<usize, Option<Instant>>,
    graphs: HashMap<usize, Vec<Work>>,
    next_handle: usize,
    /// A kernel has faulted: nothing works any more.
    fault: Option<Status>,
}

static DEVICE: LazyLock<Mutex<Device>> = LazyLock::new(|| {
    Mutex::new(Device {
        memory: Memory::new(),
        allocations: HashMap::new(),
        modules: HashMap::new(),
        functions: HashMap::new(),
        streams: HashMap::new(),
        events: HashMap::new(),
        graphs: HashMap::new(),
        next_handle: FIRST_HANDLE,
        fault: None,
    })
});

/// The GPU, for this thread alone.
pub(crate) fn device() -> MutexGuard<'static, Device> {
    DEVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says on stderr why a call fails: more than its status can.
pub(crate) fn refuse<T>(status: Status, why: impl std::fmt::Display) -> Result<T, Status> {
    eprintln!("ptx-sim-driver: {why}");
    Err(status)
}

impl Device {
    fn handle(&mut self) -> usize {
        self.next_handle += 1;
        self.next_handle
    }

    /// Fails after a fault.
    pub fn works(&self) -> Result<(), Status> {
        self.fault.map_or(Ok(()), Err)
    }

    /// For calls that must not come from a thread that captures: fails, and the capture with it.
    fn not_while_capturing(&mut self, call: &str) -> Result<(), Status> {
        self.works()?;
        let me = thread::current().id();
        let captures = self.streams.values_mut().filter_map(|stream| stream.capture.as_mut());
        match captures.filter(|capture| capture.by == me).map(|capture| capture.invalid = true).count() {
            0 => Ok(()),
            _ => refuse(STREAM_CAPTURE_UNSUPPORTED, format_args!("{call} in a thread that captures a stream")),
        }
    }

    pub fn synchronize(&mut self) -> Result<(), Status> {
        self.not_while_capturing("cuCtxSynchronize")
    }

    // --- Memory.

    pub fn allocate(&mut self, bytes: usize) -> Result<u64, Status> {
        self.not_while_capturing("cuMemAlloc")?;
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if bytes > self.free_memory() {
            return Err(OUT_OF_MEMORY);
        }
        let address = self.memory.alloc_poisoned(bytes);
        self.allocations.insert(address, bytes);
        Ok(address)
    }

    pub fn free(&mut self, address: u64) -> Result<(), Status> {
        self.not_while_capturing("cuMemFree")?;
        self.allocations.remove(&address);
        self.memory.free(address).or_else(|error| refuse(INVALID_VALUE, error))
    }

    pub fn free_memory(&self) -> usize {
        TOTAL_MEMORY - self.allocations.values().sum::<usize>().min(TOTAL_MEMORY)
    }

    /// Copies from the host, in a stream that does not capture.
    pub fn write(&mut self, stream: usize, to: u64, bytes: &[u8]) -> Result<(), Status> {
        self.not_captured(stream)?;
        self.memory.write_bytes(to, bytes).or_else(|error| refuse(INVALID_VALUE, error))
    }

    /// Copies to the host, in a stream that does not capture.
    pub fn read(&mut self, stream: usize, from: u64, bytes: usize) -> Result<Vec<u8>, Status> {
        self.not_captured(stream)?;
        self.memory.download(from, bytes).or_else(|error| refuse(INVALID_VALUE, error))
    }

    // --- Modules and kernels.

    pub fn load_module(&mut self, text: &str) -> Result<usize, (Status, String)> {
        self.works().map_err(|status| (status, String::new()))?;
        let module = Module::parse(text).map_err(|error| (INVALID_PTX, error.to_string()))?;
        let handle = self.handle();
        self.modules.insert(handle, Arc::new(module));
        Ok(handle)
    }

    pub fn unload_module(&mut self, module: usize) -> Result<(), Status> {
        self.modules.remove(&module).map(|_| ()).ok_or(INVALID_HANDLE)
    }

    pub fn find_function(&mut self, module: usize, entry: &str) -> Result<usize, Status> {
        let module = self.modules.get(&module).ok_or(INVALID_HANDLE)?.clone();
        module.entry(entry).or_else(|error| refuse(NOT_FOUND, error))?;
        let handle = self.handle();
        let function = Function { module, entry: entry.into(), max_shared_bytes: SHARED_BYTES_WITHOUT_ASKING };
        self.functions.insert(handle, function);
        Ok(handle)
    }

    pub fn function(&self, function: usize) -> Result<&Function, Status> {
        self.functions.get(&function).ok_or(INVALID_HANDLE)
    }

    pub fn allow_shared_bytes(&mut self, function: usize, bytes: usize) -> Result<(), Status> {
        self.functions.get_mut(&function).ok_or(INVALID_HANDLE)?.max_shared_bytes = bytes;
        Ok(())
    }

    /// The launch of a kernel, if the GPU can do it.
    pub fn launch(&self, function: usize, size: Size, cooperative: bool, params: Vec<u8>) -> Result<Launch, Status> {
        let Function { module, entry, max_shared_bytes } = self.function(function)?.clone();
        if size.shared_bytes > max_shared_bytes {
            let asked = size.shared_bytes;
            return refuse(
                INVALID_VALUE,
                format_args!("{entry}: {asked} bytes of shared memory, {max_shared_bytes} allowed"),
            );
        }
        let blocks = size.grid.iter().map(|&extent| extent as usize).product::<usize>();
        // Kernels that are launched so have a whole SM for a block.
        if cooperative && blocks > num_sms() {
            return refuse(COOPERATIVE_LAUNCH_TOO_LARGE, format_args!("{entry}: {blocks} blocks on {} SMs", num_sms()));
        }
        Ok(Launch { module, entry, size, params })
    }

    // --- Streams, events, graphs.

    pub fn create_stream(&mut self, blocking: bool) -> Result<usize, Status> {
        self.works()?;
        let handle = self.handle();
        self.streams.insert(handle, Stream { blocking, capture: None });
        Ok(handle)
    }

    pub fn destroy_stream(&mut self, stream: usize) -> Result<(), Status> {
        self.streams.remove(&stream).map(|_| ()).ok_or(INVALID_HANDLE)
    }

    /// Fails if the stream captures, or is not one.
    fn not_captured(&mut self, stream: usize) -> Result<(), Status> {
        self.works()?;
        if stream <= LAST_DEFAULT_STREAM {
            let blocking = self.streams.values_mut().filter(|stream| stream.blocking);
            return match blocking.filter_map(|stream| stream.capture.as_mut()).map(|c| c.invalid = true).count() {
                0 => Ok(()),
                _ => {
                    refuse(STREAM_CAPTURE_IMPLICIT, "work in the default stream beside a blocking stream that captures")
                }
            };
        }
        match &mut self.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?.capture {
            None => Ok(()),
            Some(capture) => {
                capture.invalid = true;
                refuse(STREAM_CAPTURE_UNSUPPORTED, "this call on a stream that captures")
            }
        }
    }

    pub fn synchronize_stream(&mut self, stream: usize) -> Result<(), Status> {
        self.not_captured(stream)
    }

    /// Does the work, or adds it to what the stream captures.
    pub fn enqueue(&mut self, stream: usize, work: Work) -> Result<(), Status> {
        if let Some(Stream { capture: Some(capture), .. }) = self.streams.get_mut(&stream) {
            capture.work.push(work);
            return Ok(());
        }
        self.not_captured(stream)?;
        self.execute(&work)
    }

    fn execute(&mut self, work: &Work) -> Result<(), Status> {
        self.works()?;
        let done = match work {
            Work::Fill(to, value, bytes) => self.memory.write_bytes(*to, &vec![*value; *bytes]),
            Work::Copy(to, from, bytes) => {
                self.memory.download::<u8>(*from, *bytes).and_then(|data| self.memory.write_bytes(*to, &data))
            }
            Work::Launch(Launch { module, entry, size, params }) => {
                // The portable GEMM reads fragments of a k-block after its last one, which it does not use, from a stage that may never have been filled.
                let detect_unwritten_shared = !entry.starts_with("gemm_");
                let options = Options { detect_unwritten_shared, ..Options::default() };
                let launched = module.launch_with(entry, *size, params, &mut self.memory, options);
                if launched.as_ref().is_err_and(|error| error.fault().is_some()) {
                    self.fault = Some(LAUNCH_FAILED);
                }
                launched.map(|_| ())
            }
        };
        done.or_else(|error| refuse(self.fault.unwrap_or(INVALID_VALUE), error))
    }

    pub fn begin_capture(&mut self, stream: usize) -> Result<(), Status> {
        self.not_captured(stream)?;
        let stream = self.streams.get_mut(&stream).ok_or(STREAM_CAPTURE_UNSUPPORTED)?;
        stream.capture = Some(Capture { by: thread::current().id(), work: Vec::new(), invalid: false });
        Ok(())
    }

    /// The captured graph.
    pub fn end_capture(&mut self, stream: usize) -> Result<usize, Status> {
        let capture = self.streams.get_mut(&stream).and_then(|stream| stream.capture.take()).ok_or(INVALID_VALUE)?;
        if capture.invalid {
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        let handle = self.handle();
        self.graphs.insert(handle, capture.work);
        Ok(handle)
    }

    /// A graph made executable; it shares nothing with the other.
    pub fn instantiate(&mut self, graph: usize) -> Result<usize, Status> {
        let work = self.graphs.get(&graph).ok_or(INVALID_HANDLE)?.clone();
        let handle = self.handle();
        self.graphs.insert(handle, work);
        Ok(handle)
    }

    pub fn launch_graph(&mut self, graph: usize, stream: usize) -> Result<(), Status> {
        self.not_captured(stream)?;
        let work = self.graphs.get(&graph).ok_or(INVALID_HANDLE)?.clone();
        work.iter().try_for_each(|work| self.execute(work))
    }

    pub fn destroy_graph(&mut self, graph: usize) -> Result<(), Status> {
        self.graphs.remove(&graph).map(|_| ()).ok_or(INVALID_HANDLE)
    }

    pub fn create_event(&mut self) -> Result<usize, Status> {
        self.works()?;
        let handle = self.handle();
        self.events.insert(handle, None);
        Ok(handle)
    }

    pub fn destroy_event(&mut self, event: usize) -> Result<(), Status> {
        self.events.remove(&event).map(|_| ()).ok_or(INVALID_HANDLE)
    }

    pub fn record_event(&mut self, event: usize, stream: usize) -> Result<(), Status> {
        self.not_captured(stream)?;
        *self.events.get_mut(&event).ok_or(INVALID_HANDLE)? = Some(Instant::now());
        Ok(())
    }

    /// The event has happened, as has everything.
    pub fn wait_for_event(&mut self, event: usize) -> Result<(), Status> {
        self.works()?;
        self.events.get(&event).map(|_| ()).ok_or(INVALID_HANDLE)
    }

    /// Milliseconds between two events.
    pub fn elapsed(&self, start: usize, end: usize) -> Result<f32, Status> {
        self.works()?;
        let time = |event: usize| self.events.get(&event).copied().flatten().ok_or(INVALID_HANDLE);
        Ok(time(end)?.saturating_duration_since(time(start)?).as_secs_f32() * 1e3)
    }
}
