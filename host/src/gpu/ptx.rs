//! The PTX modules that this build carries.

/// One PTX module of the kernel crate.
#[derive(Debug)]
pub struct Module {
    /// `portable` or `hopper`.
    pub name: &'static str,
    /// Target that it was compiled for, such as `sm_80`.
    pub arch: &'static str,
    /// Its text; `None` if it was not built.
    pub ptx: Option<&'static str>,
    /// Hash of the kernel crate's sources that it was built from.
    pub source_hash: &'static str,
    /// Its kernels.
    pub entries: &'static [Entry],
}

/// One kernel of a [`Module`].
#[derive(Debug)]
pub struct Entry {
    /// Name of the entry point.
    pub name: &'static str,
    /// Size of its parameter struct.
    pub param_bytes: usize,
    /// Most threads a block may have (`.maxntid`).
    pub max_threads: u32,
}

/// For every NVIDIA GPU since Ampere.
pub const PORTABLE: Module = Module { name: "portable", arch: "sm_80", ptx: None, source_hash: "", entries: &[] };

/// For GPUs of compute capability 9.0.
pub const HOPPER: Module = Module { name: "hopper", arch: "sm_90a", ptx: None, source_hash: "", entries: &[] };

/// Why a module has no PTX and what to do about it.
pub const MISSING: &str = "this build carries no PTX: run `cargo xtask build-ptx` and build again";
