//! The GPU.
pub mod ptx;

/// Placeholder.
#[derive(Debug, thiserror::Error)]
#[error("gpu")]
pub struct GpuError;
