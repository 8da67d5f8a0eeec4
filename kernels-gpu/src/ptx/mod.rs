//! One inline function, one PTX instruction (or the shortest idiom that has a name). No loops, no state, no `if`.
//!
//! rustc does not mark `asm!` convergent: LLVM may copy a collective (`bar.sync`, `redux`, `shfl`, `mma`) written as asm into both
//! sides of a nearby branch. So block barriers go through the intrinsic, conditions that differ between lanes are predicates inside
//! the asm, and nothing that other lanes take part in, or that reads memory, is `pure`.
pub mod convert;
pub mod copy;
#[cfg(target_feature = "sm_90a")]
pub mod hopper;
pub mod matrix;
pub mod memory;
pub mod sync;
#[cfg(target_feature = "sm_90a")]
pub mod wgmma_f16;
