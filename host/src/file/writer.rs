//! Writing: into a temporary file beside the target, renamed over it at the end, so that nothing half-written is ever seen.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File, FileType, Permissions};
use std::io;
use std::path::{Path, PathBuf};

use ndarray::ArrayViewD;
use safetensors::tensor::{SafeTensorError, View};
use safetensors::{Dtype, serialize_to_file};
use tempfile::NamedTempFile;

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
    Replacement::create(path)?.finish(|temporary| {
        serialize_to_file(tensors, Some(metadata), temporary.path()).map_err(|error| match error {
            SafeTensorError::IoError(error) => error,
            other => io::Error::other(other.to_string()),
        })
    })
}

/// A temporary file beside a target; dropped unfinished, it is removed and the target is as it was before.
pub(super) struct Replacement {
    /// The target itself, behind any symbolic links.
    target: PathBuf,
    /// Those of the file to be replaced, if there is one.
    permissions: Option<Permissions>,
    temporary: NamedTempFile,
}

impl Replacement {
    /// Creates the temporary file; a target that exists must be a regular file.
    pub(super) fn create(path: &Path) -> Result<Self, FileError> {
        let (target, permissions) = resolve(path)?;
        let folder = folder_of(&target);
        // Opened as any new file is, so that the user's umask decides on its permissions.
        let temporary = tempfile::Builder::new()
            .prefix(".attn-backward-")
            .make_in(folder, |path| File::create_new(path))
            .map_err(FileError::io(folder, "create a file in this folder"))?;
        Ok(Replacement { target, permissions, temporary })
    }

    /// Lets `write` fill the temporary file, and renames it over the target.
    pub(super) fn finish(self, write: impl FnOnce(&mut NamedTempFile) -> io::Result<()>) -> Result<(), FileError> {
        let Replacement { target, permissions, mut temporary } = self;
        let filled = write(&mut temporary)
            .and_then(|()| permissions.map_or(Ok(()), |permissions| temporary.as_file().set_permissions(permissions)))
            .and_then(|()| temporary.as_file().sync_all())
            .and_then(|()| temporary.persist(&target).map_err(|error| error.error));
        filled.map(drop).map_err(FileError::io(&target, "write"))
    }
}

/// The path behind the symbolic links of `path`, which may lead to a file that does not exist yet, and the permissions of the
/// file that is there.
fn resolve(path: &Path) -> Result<(PathBuf, Option<Permissions>), FileError> {
    match fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => {
            Err(FileError::NotRegular { path: path.into(), found: kind(metadata.file_type()) })
        }
        Ok(metadata) => {
            let target = fs::canonicalize(path).map_err(FileError::io(path, "open"))?;
            Ok((target, Some(metadata.permissions())))
        }
        // A cycle of links is another error, so this ends.
        Err(error) if error.kind() == io::ErrorKind::NotFound => match fs::read_link(path) {
            Ok(link) => resolve(&folder_of(path).join(link)),
            Err(_) => Ok((path.into(), None)),
        },
        Err(error) => Err(FileError::io(path, "open")(error)),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// What a file that is not a regular one is.
fn kind(file_type: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if file_type.is_char_device() {
            return "a character device";
        }
        if file_type.is_block_device() {
            return "a block device";
        }
        if file_type.is_fifo() {
            return "a FIFO";
        }
        if file_type.is_socket() {
            return "a socket";
        }
    }
    if file_type.is_dir() { "a directory" } else { "a special file" }
}
