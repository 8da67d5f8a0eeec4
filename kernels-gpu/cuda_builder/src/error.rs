//! Why there is no PTX.

use std::io;
use std::path::PathBuf;

use crate::{Arch, Rejected};

/// Why a kernel crate was not built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The path holds no crate.
    #[error("{path}: no Cargo.toml there; expected the folder of a kernel crate", path = path.display())]
    NoCrate {
        /// The path given to [`CudaBuilder::new`](crate::CudaBuilder::new).
        path: PathBuf,
    },
    /// No toolchain can compile to PTX.
    #[error("{}", no_toolchain(rejected))]
    NoToolchain {
        /// What was looked at, and what each lacks.
        rejected: Vec<Rejected>,
    },
    /// rustc refused the crate.
    #[error("{path} does not compile for {arch}:\n{log}", path = path.display())]
    Compile {
        /// Folder of the crate.
        path: PathBuf,
        /// Target of the build.
        arch: Arch,
        /// What cargo and rustc printed.
        log: String,
    },
    /// The PTX breaks a rule.
    #[error("PTX for {arch}: {rule}")]
    Ptx {
        /// Target of the build.
        arch: Arch,
        /// The rule.
        rule: PtxError,
    },
    /// A file or a program.
    #[error("cannot {action} {path}: {error}", path = path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        error: io::Error,
    },
}

/// A rule that every PTX module keeps.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PtxError {
    /// There is nothing to launch.
    #[error("no entry; is a function marked #[kernel] and its module part of the crate for nvptx64?")]
    NoEntry,
    /// Two entries share a name.
    #[error("{entry}: defined twice")]
    DuplicateEntry {
        /// Name of the entry.
        entry: String,
    },
    /// An entry without launch bounds.
    #[error("{entry}: no launch bounds; make it an entry with #[kernel(..)], not by hand")]
    NoMarker {
        /// Name of the entry.
        entry: String,
    },
    /// Launch bounds that contradict each other.
    #[error("{entry}: two different launch bounds, `{first}` and `{second}`; does one kernel call another?")]
    MarkersDiffer {
        /// Name of the entry.
        entry: String,
        /// One marker.
        first: String,
        /// The other.
        second: String,
    },
    /// A kernel takes one struct by value.
    #[error("{entry}: expected 1 parameter, found {found}")]
    Parameters {
        /// Name of the entry.
        entry: String,
        /// Parameters in the PTX.
        found: usize,
    },
    /// LLVM copied or dropped a barrier, or the declaration is out of date.
    #[error(
        "{entry}: #[kernel] declares {declared} block-wide barriers, the PTX has {found}; \
         a barrier that LLVM copied into both sides of a branch hangs (asm! is not convergent)"
    )]
    Barriers {
        /// Name of the entry.
        entry: String,
        /// As `barriers = ..` says.
        declared: u32,
        /// In the PTX.
        found: u32,
    },
    /// A kernel calls a function: it can panic, or something was not inlined.
    #[error("{entry}: `{call}`; a kernel has nothing to call, and a panic (a division, an index) would hang or trap")]
    Call {
        /// Name of the entry.
        entry: String,
        /// The instruction.
        call: String,
    },
    /// A barrier that belongs to no entry and cannot be counted.
    #[error("{function}: a block-wide barrier in a function that was not inlined; mark the function #[inline(always)]")]
    BarrierInFunction {
        /// Name of the function.
        function: String,
    },
    /// Text that this crate does not understand.
    #[error("line {line}: {text:?}: {reason}")]
    Malformed {
        /// Line, from 1.
        line: usize,
        /// The line.
        text: String,
        /// What was expected.
        reason: &'static str,
    },
}

fn no_toolchain(rejected: &[Rejected]) -> String {
    let mut text = String::from("no Rust toolchain here can compile kernels to PTX:");
    for Rejected { sysroot, missing } in rejected {
        for piece in missing {
            text += &format!("\n  {}: {piece}", sysroot.display());
        }
    }
    text + "\n`cargo xtask setup` gets what is missing"
}
