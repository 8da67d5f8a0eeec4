//! The GPU.

/// Placeholder.
#[derive(Debug, thiserror::Error)]
#[error("gpu")]
pub struct GpuError;
