//! Writing: into a temporary file beside the target, renamed over it at the end, so that nothing half-written is ever seen.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io;
use std::path::Path;

use ndarray::ArrayViewD;
use safetensors::tensor::{SafeTensorError, View};
use safetensors::{Dtype, serialize_to_file};

use super::FileError;
use super::reader::Element;

/// A tensor as the file holds it: row-major bytes.
pub(super) struct Stored<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

impl<'a> Stored<'a> {
    /// Borrows a row-major tensor, copies any other.
    pub(super) fn new<T: Element>(tensor: ArrayViewD<'a, T>) -> Self {
        let bytes = match tensor.to_slice() {
            Some(values) => Cow::Borrowed(bytemuck::cast_slice(values)),
            None => {
                let values: Vec<T> = tensor.iter().copied().collect();
                Cow::Owned(bytemuck::cast_slice(&values).to_vec())
            }
        };
        Stored { dtype: T::DTYPE, shape: tensor.shape().to_vec(), bytes }
    }
}

impl View for Stored<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Writes a file of tensors; on an error `path` is as it was before.
pub(super) fn write(
    path: &Path,
    tensors: Vec<(&'static str, Stored<'_>)>,
    metadata: HashMap<String, String>,
) -> Result<(), FileError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As for any new file: the user's umask decides, not the temporary file's privacy.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let io = |action| FileError::io(path, action);
    let temporary = builder.prefix(".attn-backward-").tempfile_in(folder).map_err(io("create"))?;
    serialize_to_file(tensors, Some(metadata), temporary.path()).map_err(|error| {
        io("write")(match error {
            SafeTensorError::IoError(error) => error,
            other => io::Error::other(other.to_string()),
        })
    })?;
    temporary.as_file().sync_all().map_err(io("write"))?;
    temporary.persist(path).map_err(|error| io("write")(error.error))?;
    Ok(())
}
