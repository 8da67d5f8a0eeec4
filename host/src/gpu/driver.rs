//! The driver's functions that this library calls itself, and the one place that turns their status into errors.
//!
//! `cust_raw` declares most of these too, but as returning a Rust enum of CUDA 11.4's codes, and newer drivers return codes that are
//! not values of it. Here a status is the integer that it is. The symbols come from `cuda-driver-shim`.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use cust::error::{CudaError, CudaResult};
use cust::sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream};

use super::GpuError;
use super::tensor_map::AlignedMap;

/// `CUresult`.
pub(super) type Status = c_uint;

pub(super) const SUCCESS: Status = 0;
pub(super) const ERROR_INVALID_VALUE: Status = 1;
pub(super) const ERROR_NO_DEVICE: Status = 100;
pub(super) const ERROR_INVALID_IMAGE: Status = 200;
pub(super) const ERROR_NO_BINARY_FOR_GPU: Status = 209;
pub(super) const ERROR_INVALID_PTX: Status = 218;
pub(super) const ERROR_JIT_COMPILER_NOT_FOUND: Status = 221;
pub(super) const ERROR_UNSUPPORTED_PTX_VERSION: Status = 222;
pub(super) const ERROR_JIT_COMPILATION_DISABLED: Status = 223;

pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const STREAM_CAPTURE_THREAD_LOCAL: c_uint = 1;
pub(super) const JIT_ERROR_LOG_BUFFER: c_uint = 5;
pub(super) const JIT_ERROR_LOG_BUFFER_SIZE_BYTES: c_uint = 6;
pub(super) const POINTER_DEVICE_ORDINAL: c_uint = 9;
pub(super) const FUNCTION_MAX_DYNAMIC_SHARED_BYTES: c_uint = 8;
pub(super) const DEVICE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_uint = 97;

/// The functions below that the oldest driver which takes the portable module (CUDA 11.0) does not have.
pub(super) const NEWER_THAN_CUDA_11_0: [&str; 3] =
    ["cuGraphInstantiateWithFlags", "cuLaunchKernelEx", "cuTensorMapEncodeTiled"];

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct RawLaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) stream: CUstream,
    pub(super) attributes: *const LaunchAttribute,
    pub(super) num_attributes: c_uint,
}

/// `CUlaunchAttribute`.
#[repr(C, align(8))]
pub(super) struct LaunchAttribute {
    id: c_uint,
    padding: u32,
    value: [c_int; 16],
}

const _: () = assert!(size_of::<RawLaunchConfig>() == 56 && size_of::<LaunchAttribute>() == 72);

impl LaunchAttribute {
    /// The kernel starts when all of its blocks can be resident together.
    pub(super) fn cooperative() -> Self {
        const COOPERATIVE: c_uint = 2;
        let mut value = [0; 16];
        value[0] = 1;
        LaunchAttribute { id: COOPERATIVE, padding: 0, value }
    }

    /// The kernel starts when the blocks of the launch before have all allowed it.
    pub(super) fn programmatic_stream_serialization() -> Self {
        const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;
        let mut value = [0; 16];
        value[0] = 1;
        LaunchAttribute { id: PROGRAMMATIC_STREAM_SERIALIZATION, padding: 0, value }
    }
}

unsafe extern "C" {
    pub(super) fn cuInit(flags: c_uint) -> Status;
    pub(super) fn cuDriverGetVersion(version: *mut c_int) -> Status;
    pub(super) fn cuGetErrorName(error: Status, name: *mut *const c_char) -> Status;
    pub(super) fn cuDeviceGetCount(count: *mut c_int) -> Status;
    pub(super) fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: CUdevice) -> Status;

    pub(super) fn cuCtxGetCurrent(context: *mut CUcontext) -> Status;
    pub(super) fn cuCtxSetCurrent(context: CUcontext) -> Status;
    pub(super) fn cuCtxPushCurrent_v2(context: CUcontext) -> Status;
    pub(super) fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> Status;
    pub(super) fn cuCtxSynchronize() -> Status;

    pub(super) fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        num_options: c_uint,
        options: *mut c_uint,
        option_values: *mut *mut c_void,
    ) -> Status;
    pub(super) fn cuModuleUnload(module: CUmodule) -> Status;
    pub(super) fn cuFuncSetAttribute(function: CUfunction, attribute: c_uint, value: c_int) -> Status;
    pub(super) fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Status;
    pub(super) fn cuLaunchKernelEx(
        config: *const RawLaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Status;

    pub(super) fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> Status;
    pub(super) fn cuStreamDestroy_v2(stream: CUstream) -> Status;
    pub(super) fn cuStreamSynchronize(stream: CUstream) -> Status;
    pub(super) fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) -> Status;
    pub(super) fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint) -> Status;
    pub(super) fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> Status;
    pub(super) fn cuGraphDestroy(graph: CUgraph) -> Status;
    pub(super) fn cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: u64) -> Status;
    pub(super) fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) -> Status;
    pub(super) fn cuGraphExecDestroy(executable: CUgraphExec) -> Status;

    pub(super) fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> Status;
    pub(super) fn cuEventDestroy_v2(event: CUevent) -> Status;
    pub(super) fn cuEventRecord(event: CUevent, stream: CUstream) -> Status;
    pub(super) fn cuEventSynchronize(event: CUevent) -> Status;
    pub(super) fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) -> Status;

    pub(super) fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) -> Status;
    pub(super) fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) -> Status;
    pub(super) fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) -> Status;
    pub(super) fn cuMemsetD8Async(address: CUdeviceptr, value: u8, count: usize, stream: CUstream) -> Status;
    pub(super) fn cuPointerGetAttribute(value: *mut c_void, attribute: c_uint, address: CUdeviceptr) -> Status;

    pub(super) fn cuTensorMapEncodeTiled(
        map: *mut AlignedMap,
        dtype: c_uint,
        rank: c_uint,
        address: CUdeviceptr,
        dims: *const u64,
        strides_bytes: *const u64,
        box_dims: *const c_uint,
        element_strides: *const c_uint,
        interleave: c_uint,
        swizzle: c_uint,
        l2_promotion: c_uint,
        out_of_bounds_fill: c_uint,
    ) -> Status;
}

/// `Ok` for success, else [`GpuError::Driver`] naming `call`.
pub(super) fn check(call: &'static str, status: Status) -> Result<(), GpuError> {
    check_kernel(call, None, status)
}

/// As [`check`], naming the kernel concerned.
pub(super) fn check_kernel(call: &'static str, kernel: Option<&'static str>, status: Status) -> Result<(), GpuError> {
    match status {
        SUCCESS => Ok(()),
        code => Err(GpuError::Driver { call, kernel, code, name: error_name(code) }),
    }
}

/// The result of a function of `cust` that makes the driver call `call`.
pub(super) fn check_cust<T>(call: &'static str, result: CudaResult<T>) -> Result<T, GpuError> {
    result.map_err(|error: CudaError| {
        let code = error as Status;
        GpuError::Driver { call, kernel: None, code, name: error_name(code) }
    })
}

/// The driver's name of a status.
pub(super) fn error_name(code: Status) -> String {
    let mut name = std::ptr::null();
    // SAFETY: the driver, or the shim where there is none, stores a static string for codes that it knows, else null.
    unsafe {
        if cuGetErrorName(code, &mut name) != SUCCESS || name.is_null() {
            return "an unknown error".into();
        }
        CStr::from_ptr(name).to_string_lossy().into_owned()
    }
}
