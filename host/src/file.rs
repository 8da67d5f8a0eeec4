//! file

/// Placeholder.
#[derive(Debug, thiserror::Error)]
#[error("file")]
pub struct FileError;
