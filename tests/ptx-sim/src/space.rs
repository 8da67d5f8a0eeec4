//! Where the memories lie among generic addresses.

/// Bytes of a window.
pub(crate) const WINDOW_BYTES: u64 = 1 << 24;
/// Generic address of shared address 0.
pub(crate) const SHARED_WINDOW: u64 = 0x7fff_0000_0000;
/// Generic address of the first parameter.
pub(crate) const PARAM_WINDOW: u64 = 0x7ffe_0000_0000;
