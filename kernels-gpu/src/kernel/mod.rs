//! The entry points, one kernel or family of kernels a file.
mod attention_chunk;
#[cfg(target_feature = "sm_90a")]
mod attention_flash;
#[cfg(target_feature = "sm_90a")]
mod attention_fused;
mod attention_long;
mod attention_math;
mod attention_short;
mod chunks;
mod column_sums;
mod cross_convert;
mod gemm;
mod gemm_reduce;
#[cfg(target_feature = "sm_90a")]
mod wgmma_gemm;
