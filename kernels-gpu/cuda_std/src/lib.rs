//! The device-side standard library of the kernels: the part of Rust-CUDA's `cuda_std` that this project uses, with its names, on
//! rustc's own NVPTX backend.
//!
//! * [`kernel`]: the attribute that makes a function an entry point of the PTX module
//! * `thread`: indices, dimensions, the block-wide barrier
//! * `shared`: dynamic shared memory
//! * `warp`: the lane index
//!
//! The modules exist for `nvptx64` only; on a host the crate offers the attribute alone, which then drops the function, so that a
//! kernel crate also compiles as an ordinary library. A kernel crate needs the features `abi_ptx` and `asm_experimental_arch`.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch, stdarch_nvptx))]

pub use cuda_std_macros::kernel;

#[cfg(target_arch = "nvptx64")]
pub mod shared;
#[cfg(target_arch = "nvptx64")]
pub mod thread;
#[cfg(target_arch = "nvptx64")]
pub mod warp;
