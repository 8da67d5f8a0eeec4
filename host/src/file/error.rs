//! What can be wrong with a tensor file.

use std::io;
use std::path::{Path, PathBuf};

use crate::Error;

/// Characters of a name from a file that a message shows.
const MAX_NAME: usize = 80;
/// Characters of a parser's message that a message shows; it may quote the file.
const MAX_REASON: usize = 240;
/// Entries of a list from a file that a message shows.
const MAX_LISTED: usize = 20;

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
    #[error("{}: not a safetensors file: {}", path.display(), shown(reason, MAX_REASON))]
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
        Some(nearest) => format!("did you mean to rename {}?", shown(nearest, MAX_NAME)),
        None if found.is_empty() => "found none".into(),
        None => format!("found {}", listed(found.iter().map(|name| shown(name, MAX_NAME)))),
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
    #[error("{}: tensor {tensor}: expected shape {expected}, found [{}]", path.display(), listed(found))]
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
    #[error("{}: metadata {name}: expected {expected}, found \"{}\"", path.display(), shown(found, MAX_NAME))]
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
    /// No number of key/value heads is given, and it does not follow from the rows of a weight.
    #[error("{}: {tensor}: {rows} rows are not a multiple of head_dim = {head_dim}", path.display())]
    KeyValueRows {
        /// The file.
        path: PathBuf,
        /// Name of the weight.
        tensor: &'static str,
        /// Its rows.
        rows: usize,
        /// Elements of a head, by the gradients.
        head_dim: usize,
    },
    /// A file to be written exists and is not a regular one, which renaming a new file over it would destroy.
    #[error("{}: expected a regular file or a new name, found {found}", path.display())]
    NotRegular {
        /// The file, behind its symbolic links if these lead to nothing yet.
        path: PathBuf,
        /// What it is, with an article.
        found: &'static str,
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

/// Text from a file as one line: control characters escaped, and cut after `max` characters.
fn shown(text: &str, max: usize) -> String {
    let mut line = String::new();
    for (position, character) in text.chars().enumerate() {
        if position == max {
            line.push_str("...");
            break;
        }
        match character {
            // Messages quote with these, and they do no harm.
            '"' | '\'' => line.push(character),
            other => line.extend(other.escape_debug()),
        }
    }
    line
}

/// Entries separated by commas; of a long list the first ones and how many more there are.
fn listed<T: ToString>(entries: impl IntoIterator<Item = T>) -> String {
    let mut entries = entries.into_iter();
    let first: Vec<String> = entries.by_ref().take(MAX_LISTED).map(|entry| entry.to_string()).collect();
    let more = match entries.count() {
        0 => String::new(),
        count => format!(" and {count} more"),
    };
    first.join(", ") + &more
}
