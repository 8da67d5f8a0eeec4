//! What may cross the boundary between host and kernels by value.

use attn_backward_kernels::params::{
    AttentionParams, ColumnSumsParams, CrossConvertParams, FlashParams, GemmParams, SumPartialsParams,
};
use attn_backward_kernels::params_wgmma::{AttentionFusedParams, Conversion, WgmmaParams};
use attn_backward_kernels::schedule::item::Item;
use half::{bf16, f16};

/// The parameter struct of a kernel.
///
/// # Safety
/// The type is `repr(C)` and is what the kernels launched with it declare as their one parameter.
pub unsafe trait KernelParams: Copy {}

// SAFETY: `repr(C)`, and shared with the kernels by the crate that defines both.
unsafe impl KernelParams for GemmParams {}
// SAFETY: as above.
unsafe impl KernelParams for WgmmaParams {}
// SAFETY: as above.
unsafe impl KernelParams for WgmmaParams<Conversion> {}
// SAFETY: as above.
unsafe impl KernelParams for AttentionFusedParams {}
// SAFETY: as above.
unsafe impl KernelParams for CrossConvertParams {}
// SAFETY: as above.
unsafe impl KernelParams for AttentionParams {}
// SAFETY: `repr(C)` in the kernel crate.
unsafe impl KernelParams for FlashParams {}
// SAFETY: as above.
unsafe impl KernelParams for ColumnSumsParams {}
// SAFETY: as above.
unsafe impl KernelParams for SumPartialsParams {}

/// An element of device memory.
///
/// # Safety
/// The type has no padding, and every pattern of bits is a value of it.
pub unsafe trait DeviceValue: Copy + 'static {}

macro_rules! device_values {
    ($($value:ty)*) => {
        $(
            // SAFETY: a number, or a `repr(C)` struct of numbers without gaps.
            unsafe impl DeviceValue for $value {}
        )*
    };
}

device_values!(u8 u16 u32 u64 i32 i64 f32 f64 bf16 f16 Item);
