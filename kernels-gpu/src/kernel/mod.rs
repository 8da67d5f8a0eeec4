//! The entry points, one kernel or family of kernels a file.
mod attention_chunk;
#[cfg(target_feature = "sm_90a")]
mod attention_flash;
mod attention_long;
mod attention_math;
mod attention_short;
#[cfg(target_feature = "sm_90a")]
mod audio_backward;
mod chunks;
mod column_sums;
mod cross_convert;
mod gemm;
mod gemm_reduce;
#[cfg(target_feature = "sm_90a")]
mod wgmma_gemm;
