//! What can be wrong with a tensor file.

use std::io;
use std::path::{Path, PathBuf};

use crate::Error;

/// Why a tensor file could not be read or written; each is one line that names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The file's header is not that of a safetensors file.
    #[error("{}: not a safetensors file: {reason}", path.display())]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with the header.
        reason: String,
    },
    /// The file's length is not the one its header promises.
    #[error("{}: {}: expected {expected} bytes by its header, found {found}", path.display(),
        if found < expected { "truncated" } else { "too long" })]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes that the header promises, at least.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// A tensor is missing or has another name.
    #[error("{}: tensor {tensor} is missing; {}", path.display(), match nearest {
        Some(nearest) => format!("did you mean to rename {nearest}?"),
        None => format!("found {}", if found.is_empty() { "none".into() } else { found.join(", ") }),
    })]
    Missing {
        /// The file.
        path: PathBuf,
        /// Expected name.
        tensor: String,
        /// The unexpected name of the file that is most like it, if one is like it at all.
        nearest: Option<String>,
        /// Names of the file's tensors.
        found: Vec<String>,
    },
    /// A tensor has another element type.
    #[error("{}: tensor {tensor}: expected dtype {expected}, found {found}; convert it before saving", path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Expected element type, as safetensors names it.
        expected: String,
        /// Element type in the file.
        found: String,
    },
    /// A tensor has another number of extents, or extents whose product overflows.
    #[error("{}: tensor {tensor}: expected shape {expected}, found {found:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Expected extents, by name.
        expected: String,
        /// Extents in the file.
        found: Vec<usize>,
    },
    /// A scalar in the file's metadata cannot be read.
    #[error("{}: metadata {name}: expected {expected}, found {found:?}", path.display())]
    Scalar {
        /// The file.
        path: PathBuf,
        /// Key in the metadata.
        name: String,
        /// What its value must be.
        expected: &'static str,
        /// Its value.
        found: String,
    },
    /// A scalar is neither in the file's metadata nor among the options.
    #[error("{}: metadata {name} is missing; add it to the file or give it as an option", path.display())]
    MissingScalar {
        /// The file.
        path: PathBuf,
        /// Key in the metadata.
        name: String,
    },
    /// The tensors do not fit each other, or the operation does not support them.
    #[error("{}: {source}", path.display())]
    Inputs {
        /// The file.
        path: PathBuf,
        /// What the operation says.
        source: Box<Error>,
    },
}

impl FileError {
    pub(super) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> FileError {
        move |source| FileError::Io { path: path.into(), action, source }
    }

    pub(super) fn inputs(path: &Path, source: Error) -> FileError {
        FileError::Inputs { path: path.into(), source: Box::new(source) }
    }
}
