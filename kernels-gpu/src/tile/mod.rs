//! Shared-memory layouts, fragments and descriptors. Layout maps are `const fn`, proven on the CPU by this crate's tests.
#[cfg(target_arch = "nvptx64")]
pub(crate) mod fragment;
pub mod layout;
#[cfg(target_feature = "sm_90a")]
pub(crate) mod ring;
