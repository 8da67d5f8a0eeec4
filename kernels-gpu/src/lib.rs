//! GPU kernels of the backward pass of attention blocks.
//!
//! Built twice: by [`cuda_builder`](../cuda_builder/index.html) for `nvptx64-nvidia-cuda`, as the PTX that the host loads, and as an
//! ordinary library for the host, which shares [`params`], [`config`], [`tile::layout`] and [`schedule`] with the kernels.
//!
//! Two PTX modules come from this crate: **portable** (`sm_80`: mma.sync, ldmatrix, cp.async) and **Hopper** (`sm_90a`: all of the
//! portable entries, recompiled, and the `wgmma_*` and `attention_flash_*` kernels). What belongs to Hopper alone is behind `cfg(target_feature = "sm_90a")`.
//!
//! * [`params`], [`params_wgmma`]: the structs that cross the boundary
//! * [`config`]: per-kernel constants, read by device code and by the host's plans
//! * `ptx`: one inline function, one instruction
//! * [`tile`]: shared-memory layouts, fragments, descriptors
//! * [`schedule`]: which tile next; pure, tested on the CPU
//! * [`scale`]: power-of-two scales of fp16 operands; pure, shared with the host's emulation
//! * `kernel`: one entry point (or one family of them) a file
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

pub mod config;
pub mod params;

pub mod params_wgmma;
pub mod scale;
pub mod schedule;
pub mod tile;

#[cfg(target_arch = "nvptx64")]
mod kernel;
#[cfg(target_arch = "nvptx64")]
mod ptx;

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}
