//! Per-kernel constants: tile sizes, threads, stages, shared memory. Device code and the host's plans read the same ones.
pub mod attention;
pub mod attention_flash;
pub mod attention_fused;
pub mod cross_convert;
pub mod gemm;
pub mod wgmma;
