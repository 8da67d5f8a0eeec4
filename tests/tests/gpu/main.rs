//! The tests that need a GPU, in one program: `cargo test -p attn-backward-tests --test gpu`. It needs nothing but the driver to run, so that it
//! can be built on one machine and run on another.
//!
//! Without a GPU every test says `SKIPPED (no GPU)` on stderr; with `ATTN_BACKWARD_REQUIRE_GPU=1` it fails instead.

mod api;
mod audio;
mod child;
mod cross;
mod cu_seqlens;
mod determinism;
mod driver;
mod errors;
mod guarded;
mod large;
mod properties;
mod streams;
mod suite;
