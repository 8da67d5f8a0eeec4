//! Compiles a kernel crate to PTX: Rust-CUDA's `cuda_builder` API on rustc's own NVPTX backend.
//!
//! ```no_run
//! use cuda_builder::{Arch, CudaBuilder};
//!
//! let module = CudaBuilder::new("../kernels-gpu").arch(Arch::Sm80).copy_to("kernels.ptx").build()?;
//! for entry in &module.entries {
//!     println!("{}: {} threads, {} parameter bytes", entry.name, entry.max_threads, entry.param_bytes);
//! }
//! # Ok::<(), cuda_builder::BuildError>(())
//! ```
//!
//! What a build does:
//! 1. finds a [`Toolchain`]: a matched rustc and cargo with the source of `core`;
//! 2. hashes the sources. If the PTX of that hash is there already, it is done (`target/cuda-builder` is the cache, safe to share between
//!    builds that run at the same time);
//! 3. compiles the crate as a `cdylib` for `nvptx64-nvidia-cuda` with fat LTO and `core` from source. `--emit=asm` writes the whole program
//!    as PTX before any linker runs, so the linker is `true`, the program that does nothing;
//! 4. turns the comments that [`#[kernel]`](../cuda_std/attr.kernel.html) leaves in each entry into launch bounds and checks the entries
//!    ([`PtxError`] says which rules).
mod arch;
mod builder;
mod error;
mod ptx;
mod sources;
mod toolchain;

pub use arch::Arch;
pub use builder::{CudaBuilder, PtxModule};
pub use error::{BuildError, PtxError};
pub use ptx::{Entry, count_barriers};
pub use toolchain::{MINIMUM_RELEASE, Rejected, Toolchain};
