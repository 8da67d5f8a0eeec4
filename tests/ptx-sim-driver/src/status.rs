//! The driver's status codes, as far as this driver gives them.

use std::ffi::CStr;

/// `CUresult`.
pub(crate) type Status = u32;

macro_rules! statuses {
    ($($name:ident = $code:literal $text:literal;)*) => {
        $(pub(crate) const $name: Status = $code;)*

        /// The driver's name of a status, if it is one of these.
        pub(crate) fn name(status: Status) -> Option<&'static CStr> {
            match status {
                $($code => Some($text),)*
                _ => None,
            }
        }
    };
}

statuses! {
    SUCCESS = 0 c"CUDA_SUCCESS";
    INVALID_VALUE = 1 c"CUDA_ERROR_INVALID_VALUE";
    OUT_OF_MEMORY = 2 c"CUDA_ERROR_OUT_OF_MEMORY";
    INVALID_CONTEXT = 201 c"CUDA_ERROR_INVALID_CONTEXT";
    INVALID_DEVICE = 101 c"CUDA_ERROR_INVALID_DEVICE";
    INVALID_PTX = 218 c"CUDA_ERROR_INVALID_PTX";
    INVALID_HANDLE = 400 c"CUDA_ERROR_INVALID_HANDLE";
    NOT_FOUND = 500 c"CUDA_ERROR_NOT_FOUND";
    LAUNCH_FAILED = 719 c"CUDA_ERROR_LAUNCH_FAILED";
    COOPERATIVE_LAUNCH_TOO_LARGE = 720 c"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE";
    NOT_SUPPORTED = 801 c"CUDA_ERROR_NOT_SUPPORTED";
    STREAM_CAPTURE_UNSUPPORTED = 900 c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    STREAM_CAPTURE_INVALIDATED = 901 c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    STREAM_CAPTURE_IMPLICIT = 906 c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
}
