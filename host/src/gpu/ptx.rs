//! The PTX modules that this build carries, as `build.rs` made them.

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
    /// Blocks of a cluster (`.reqnctapercluster`); 1: it has no clusters.
    pub cluster_size: u32,
}

include!(concat!(env!("OUT_DIR"), "/ptx_modules.rs"));
