//! Backward passes of attention blocks, exact and fast, on NVIDIA GPUs and on the CPU.
//!
//! * [`audio`]: variable-length, chunked audio-encoder attention (bf16, `cu_seqlens`).
//! * [`cross`]: cross-attention QKV projection with GQA repeat (fp32).
//!
//! One direction for both: validated inputs -> [`audio::Plan`] / [`cross::Plan`] (pure, printable without a GPU) -> workspace ->
//! launches -> gradients.
pub mod audio;
pub mod compare;
pub mod cross;
mod cu_seqlens;
mod device;
mod device_tensors;
mod error;
pub mod file;
pub mod gemm;
pub mod gpu;
mod linalg;
pub mod random;
pub mod suite;
mod target;
mod workspace;

pub use cu_seqlens::{CuSeqlens, window_cu_seqlens};
pub use device::{Device, DeviceName};
pub use error::Error;
pub use target::Target;
pub use workspace::{Region, Workspace, WorkspaceLayout};

/// The README's examples are compiled and run with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
