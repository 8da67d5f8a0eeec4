//! A `libcuda.so.1` without a GPU: the CUDA driver API, as far as attn-backward calls it, on [`ptx_sim`].
//!
//! With this library in the loader's path the host code runs unchanged: it finds one GPU of compute capability 9.0, whose kernels run on the
//! CPU with all checks of the simulator. Allocations hold nothing that may be read, what was freed may not be touched, a capture allows what
//! the driver allows, and why a call fails stands on stderr. `cargo xtask gpu-test --simulated` runs the GPU tests so.
//!
//! Signatures and codes are those of `cuda.h`. Every function is called as that header says, so pointers to results point to a place for
//! them, and those to inputs to as much as is asked for.
#![allow(non_snake_case)] // the driver's names
#![allow(clippy::missing_safety_doc)] // said once, above
#![allow(clippy::undocumented_unsafe_blocks)] // each dereferences what the caller of the driver passes, see above
#![allow(missing_docs)] // the driver's functions are documented there

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use ptx_sim::{Size, TensorMap};

mod device;
mod status;

use device::{TOTAL_MEMORY, Work, device, num_sms, refuse};
use status::*;

/// Any handle of the driver.
type Handle = *mut c_void;

const DRIVER_VERSION: c_int = 13_000;
const NAME: &[u8] = b"ptx-sim";
/// The one context.
const CONTEXT: usize = 1;

thread_local! {
    /// Contexts that this thread has made current, the last one now.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

fn status(result: Result<(), Status>) -> Status {
    result.err().unwrap_or(SUCCESS)
}

/// Stores a result where the caller wants it.
unsafe fn give<T>(place: *mut T, result: Result<T, Status>) -> Status {
    match result {
        Ok(value) => {
            unsafe { place.write(value) };
            SUCCESS
        }
        Err(status) => status,
    }
}

/// A new handle.
unsafe fn give_handle(place: *mut Handle, result: Result<usize, Status>) -> Status {
    unsafe { give(place, result.map(std::ptr::without_provenance_mut)) }
}

/// Fails unless a context is current.
fn in_context() -> Result<(), Status> {
    CURRENT.with_borrow(|current| match current.last() {
        Some(&CONTEXT) => Ok(()),
        _ => refuse(INVALID_CONTEXT, "no context is current"),
    })
}

// --- The driver and its devices.

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Status {
    unsafe { give(version, Ok(DRIVER_VERSION)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: Status, text: *mut *const c_char) -> Status {
    unsafe { give(text, name(error).map(CStr::as_ptr).ok_or(INVALID_VALUE)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: Status, text: *mut *const c_char) -> Status {
    unsafe { cuGetErrorName(error, text) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Status {
    unsafe { give(count, Ok(1)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Status {
    unsafe { give(device, if ordinal == 0 { Ok(0) } else { Err(INVALID_DEVICE) }) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: c_int) -> Status {
    let bytes = NAME.iter().copied().take((len - 1) as usize).chain([0]);
    for (i, byte) in bytes.enumerate() {
        unsafe { name.add(i).write(byte as c_char) };
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> Status {
    unsafe { give(bytes, Ok(TOTAL_MEMORY)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, _device: c_int) -> Status {
    let found = match attribute {
        1 => 1024,              // MAX_THREADS_PER_BLOCK
        16 => num_sms() as i32, // MULTIPROCESSOR_COUNT
        38 => 50 << 20,         // L2_CACHE_SIZE
        75 => 9,                // COMPUTE_CAPABILITY_MAJOR
        76 => 0,                // COMPUTE_CAPABILITY_MINOR
        95 => 1,                // COOPERATIVE_LAUNCH
        97 => 232_448,          // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        _ => return status(refuse(NOT_SUPPORTED, format_args!("device attribute {attribute}"))),
    };
    unsafe { give(value, Ok(found)) }
}

// --- Contexts.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Handle, _device: c_int) -> Status {
    unsafe { give_handle(context, Ok(CONTEXT)) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut Handle) -> Status {
    let current = CURRENT.with_borrow(|current| current.last().copied().unwrap_or(0));
    unsafe { give_handle(context, Ok(current)) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: Handle) -> Status {
    CURRENT.with_borrow_mut(|current| {
        current.pop();
        if !context.is_null() {
            current.push(context.addr());
        }
    });
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: Handle) -> Status {
    CURRENT.with_borrow_mut(|current| current.push(context.addr()));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut Handle) -> Status {
    let popped = CURRENT.with_borrow_mut(|current| current.pop()).ok_or(INVALID_CONTEXT);
    unsafe { give_handle(context, popped) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Status {
    status(in_context().and_then(|()| device().synchronize()))
}

// --- Memory.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
    unsafe { total.write(TOTAL_MEMORY) };
    unsafe { give(free, in_context().map(|()| device().free_memory())) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> Status {
    unsafe { give(address, in_context().and_then(|()| device().allocate(bytes))) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> Status {
    status(in_context().and_then(|()| device().free(address)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(value: *mut c_void, attribute: c_uint, address: u64) -> Status {
    const DEVICE_ORDINAL: c_uint = 9;
    if attribute != DEVICE_ORDINAL {
        return status(refuse(NOT_SUPPORTED, format_args!("pointer attribute {attribute}")));
    }
    let found = if device().memory.contains(address, 1) { Ok(0) } else { Err(INVALID_VALUE) };
    unsafe { give(value.cast::<c_int>(), found) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Handle) -> Status {
    let data = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
    status(in_context().and_then(|()| device().write(stream.addr(), to, data)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> Status {
    unsafe { cuMemcpyHtoDAsync_v2(to, from, bytes, std::ptr::null_mut()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Handle) -> Status {
    let copied = in_context().and_then(|()| device().read(stream.addr(), from, bytes));
    status(copied.map(|data| unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to.cast(), bytes) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> Status {
    unsafe { cuMemcpyDtoHAsync_v2(to, from, bytes, std::ptr::null_mut()) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) -> Status {
    status(in_context().and_then(|()| device().enqueue(stream.addr(), Work::Copy(to, from, bytes))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: Handle) -> Status {
    status(in_context().and_then(|()| device().enqueue(stream.addr(), Work::Fill(address, value, bytes))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(address: u64, value: u8, bytes: usize) -> Status {
    cuMemsetD8Async(address, value, bytes, std::ptr::null_mut())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: *mut [u64; 16],
    dtype: c_uint,
    rank: c_uint,
    address: u64,
    dims: *const u64,
    strides_bytes: *const u64,
    box_dims: *const c_uint,
    element_strides: *const c_uint,
    interleave: c_uint,
    swizzle: c_uint,
    _l2_promotion: c_uint,
    out_of_bounds_fill: c_uint,
) -> Status {
    let rank = rank as usize;
    let element_bytes = match dtype {
        6 | 9 => 2, // FLOAT16, BFLOAT16
        7 => 4,     // FLOAT32
        _ => return status(refuse(NOT_SUPPORTED, format_args!("tensor maps of data type {dtype}"))),
    };
    let tensor = unsafe {
        if std::slice::from_raw_parts(element_strides, rank).iter().any(|stride| *stride != 1) {
            return status(refuse(NOT_SUPPORTED, "tensor maps with strides between elements"));
        }
        TensorMap {
            address,
            element_bytes,
            dims: std::slice::from_raw_parts(dims, rank).to_vec(),
            outer_strides_bytes: std::slice::from_raw_parts(strides_bytes, rank.saturating_sub(1)).to_vec(),
            box_dims: std::slice::from_raw_parts(box_dims, rank).to_vec(),
            swizzled: swizzle == 3,
        }
    };
    if !matches!(swizzle, 0 | 3) || interleave != 0 || out_of_bounds_fill != 0 || !map.addr().is_multiple_of(64) {
        return status(refuse(NOT_SUPPORTED, "tensor maps of this swizzle, interleaving, fill or alignment"));
    }
    match tensor.broken_rule() {
        Some(rule) => status(refuse(INVALID_VALUE, format_args!("{tensor:?} must have {rule}"))),
        None => unsafe { give(map, Ok(tensor.encode())) },
    }
}

// --- Modules and kernels.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut Handle,
    image: *const c_void,
    num_options: c_uint,
    options: *mut c_uint,
    values: *mut *mut c_void,
) -> Status {
    const ERROR_LOG: c_uint = 5;
    const ERROR_LOG_BYTES: c_uint = 6;
    let Ok(text) = (unsafe { CStr::from_ptr(image.cast()) }).to_str() else { return INVALID_PTX };
    let loaded = in_context().map_err(|status| (status, String::new())).and_then(|()| device().load_module(text));
    if let Err((_, why)) = &loaded {
        let option = |wanted| {
            (0..num_options as usize)
                .find(|&i| unsafe { options.add(i).read() } == wanted)
                .map(|i| unsafe { values.add(i).read() })
        };
        if let (Some(log), Some(bytes)) = (option(ERROR_LOG), option(ERROR_LOG_BYTES)) {
            let text = why.bytes().take(bytes.addr().saturating_sub(1)).chain([0]);
            text.enumerate().for_each(|(i, byte)| unsafe { log.cast::<u8>().add(i).write(byte) });
        }
    }
    unsafe { give_handle(module, loaded.map_err(|(status, _)| status)) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: Handle) -> Status {
    status(in_context().and_then(|()| device().unload_module(module.addr())))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) -> Status {
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    unsafe { give_handle(function, in_context().and_then(|()| device().find_function(module.addr(), &name))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, attribute: c_uint, function: Handle) -> Status {
    let device = device();
    let found = device.function(function.addr()).and_then(|function| {
        let entry = function.module.entry(&function.entry).map_err(|_| NOT_FOUND)?;
        match attribute {
            0 => Ok(entry.max_threads().unwrap_or(1024) as c_int), // MAX_THREADS_PER_BLOCK
            1 => Ok(entry.static_shared_bytes() as c_int),         // SHARED_SIZE_BYTES
            3 | 4 => Ok(0),                                        // LOCAL_SIZE_BYTES, NUM_REGS: not known here
            _ => refuse(NOT_SUPPORTED, format_args!("function attribute {attribute}")),
        }
    });
    unsafe { give(value, found) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(function: Handle, attribute: c_uint, value: c_int) -> Status {
    const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_uint = 8;
    if attribute != MAX_DYNAMIC_SHARED_SIZE_BYTES {
        return status(refuse(NOT_SUPPORTED, format_args!("function attribute {attribute}")));
    }
    status(device().allow_shared_bytes(function.addr(), value as usize))
}

/// Enqueues a kernel, whose parameters are one struct.
unsafe fn launch(
    function: Handle,
    size: Size,
    cooperative: bool,
    stream: Handle,
    parameters: *mut *mut c_void,
) -> Result<(), Status> {
    in_context()?;
    let mut device = device();
    let found = device.function(function.addr())?;
    let bytes = found.module.entry(&found.entry).map_err(|_| NOT_FOUND)?.parameter_bytes();
    let params = unsafe { std::slice::from_raw_parts(parameters.read().cast::<u8>(), bytes) }.to_vec();
    let launch = device.launch(function.addr(), size, cooperative, params)?;
    device.enqueue(stream.addr(), Work::Launch(launch))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: Handle,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Status {
    if (block_y, block_z) != (1, 1) {
        return status(refuse(NOT_SUPPORTED, "blocks of more than one dimension"));
    }
    let size = Size { grid: [grid_x, grid_y, grid_z], block: block_x, shared_bytes: shared_bytes as usize };
    status(unsafe { launch(function, size, false, stream, parameters) })
}

/// `CUlaunchConfig`.
#[repr(C)]
pub struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Handle,
    attributes: *const LaunchAttribute,
    num_attributes: c_uint,
}

/// `CUlaunchAttribute`.
#[repr(C, align(8))]
pub struct LaunchAttribute {
    id: c_uint,
    padding: c_uint,
    value: [c_int; 16],
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernelEx(
    config: *const LaunchConfig,
    function: Handle,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Status {
    const COOPERATIVE: c_uint = 2;
    // Launches run one after the other here.
    const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;
    let config = unsafe { &*config };
    let attributes = match config.num_attributes {
        0 => &[],
        number => unsafe { std::slice::from_raw_parts(config.attributes, number as usize) },
    };
    if config.block[1..] != [1, 1]
        || attributes.iter().any(|attribute| ![COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION].contains(&attribute.id))
    {
        return status(refuse(NOT_SUPPORTED, "launches of these attributes"));
    }
    let cooperative = attributes.iter().any(|attribute| attribute.id == COOPERATIVE && attribute.value[0] != 0);
    let size = Size { grid: config.grid, block: config.block[0], shared_bytes: config.shared_bytes as usize };
    status(unsafe { launch(function, size, cooperative, config.stream, parameters) })
}

// --- Streams.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut Handle, flags: c_uint) -> Status {
    unsafe { give_handle(stream, in_context().and_then(|()| device().create_stream(flags & 1 == 0))) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: Handle) -> Status {
    status(device().destroy_stream(stream.addr()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: Handle) -> Status {
    status(in_context().and_then(|()| device().synchronize_stream(stream.addr())))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(_stream: Handle, event: Handle, _flags: c_uint) -> Status {
    status(in_context().and_then(|()| device().wait_for_event(event.addr())))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: Handle, mode: c_uint) -> Status {
    const THREAD_LOCAL: c_uint = 1;
    if mode != THREAD_LOCAL {
        return status(refuse(NOT_SUPPORTED, "captures of other modes than thread-local"));
    }
    status(in_context().and_then(|()| device().begin_capture(stream.addr())))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) -> Status {
    unsafe { give_handle(graph, in_context().and_then(|()| device().end_capture(stream.addr()))) }
}

// --- Graphs.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, _flags: u64) -> Status {
    unsafe { give_handle(executable, in_context().and_then(|()| device().instantiate(graph.addr()))) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(executable: Handle, stream: Handle) -> Status {
    status(in_context().and_then(|()| device().launch_graph(executable.addr(), stream.addr())))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: Handle) -> Status {
    status(device().destroy_graph(graph.addr()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(executable: Handle) -> Status {
    status(device().destroy_graph(executable.addr()))
}

// --- Events.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut Handle, _flags: c_uint) -> Status {
    unsafe { give_handle(event, in_context().and_then(|()| device().create_event())) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: Handle) -> Status {
    status(device().destroy_event(event.addr()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> Status {
    status(in_context().and_then(|()| device().record_event(event.addr(), stream.addr())))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: Handle) -> Status {
    status(in_context().and_then(|()| device().wait_for_event(event.addr())))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) -> Status {
    unsafe { give(milliseconds, device().elapsed(start.addr(), end.addr())) }
}
