//! Shared-memory layouts, fragments and descriptors. Layout maps are `const fn`, proven on the CPU by this crate's tests.
pub mod descriptor;
#[cfg(target_arch = "nvptx64")]
pub(crate) mod fragment;
pub mod gemm_tile;
pub mod lanes;
pub mod layout;
pub mod power_of_two;
#[cfg(target_feature = "sm_90a")]
pub(crate) mod ring;
