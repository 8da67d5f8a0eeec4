//! Reading: the header is checked against the file's length first, then every tensor is read straight into its own array.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use bytemuck::Pod;
use half::bf16;
use ndarray::{Array, Dimension, IxDyn};
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::{AUDIO_NAMES, CROSS_NAMES, FileError};

/// Bytes of the field before the header, which holds the header's length.
const LENGTH_BYTES: u64 = 8;
/// The format's limit of a header's length.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Element types of the operations.
pub(super) trait Element: Pod {
    /// Name of the type in the format.
    const DTYPE: Dtype;
}
impl Element for bf16 {
    const DTYPE: Dtype = Dtype::BF16;
}
impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}
impl Element for i32 {
    const DTYPE: Dtype = Dtype::I32;
}

/// An open file whose header is valid and whose length is what the header says.
pub(super) struct TensorFile {
    path: PathBuf,
    file: File,
    header: Metadata,
    /// Byte at which the tensors' offsets start to count.
    data_start: u64,
}

impl TensorFile {
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        let mut file = File::open(path).map_err(FileError::io(path, "open"))?;
        let found = file.metadata().map_err(FileError::io(path, "read"))?.len();
        let invalid = |reason: String| FileError::NotSafetensors { path: path.into(), reason };
        let mut length = [0; LENGTH_BYTES as usize];
        if found < LENGTH_BYTES {
            return Err(invalid(format!("expected at least {LENGTH_BYTES} bytes, found {found}")));
        }
        file.read_exact(&mut length).map_err(FileError::io(path, "read"))?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES {
            return Err(invalid(format!(
                "expected a header of at most {MAX_HEADER_BYTES} bytes, found {header_bytes}"
            )));
        }
        let data_start = LENGTH_BYTES + header_bytes;
        if data_start > found {
            return Err(FileError::Length { path: path.into(), expected: data_start, found });
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header).map_err(FileError::io(path, "read"))?;
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|error| invalid(format!("expected a valid header, found: {error}")))?;
        let expected = data_start + header.data_len() as u64;
        if expected != found {
            return Err(FileError::Length { path: path.into(), expected, found });
        }
        Ok(TensorFile { path: path.into(), file, header, data_start })
    }

    /// Reads a tensor; `extents` says what its shape must be, for the error.
    pub(super) fn tensor<T: Element, D: Dimension>(
        &mut self,
        name: &str,
        extents: &str,
    ) -> Result<Array<T, D>, FileError> {
        let Some(info) = self.header.info(name) else {
            return Err(self.missing(name));
        };
        if info.dtype != T::DTYPE {
            return Err(FileError::Dtype {
                path: self.path.clone(),
                tensor: name.into(),
                expected: T::DTYPE.to_string(),
                found: info.dtype.to_string(),
            });
        }
        let wrong_shape = || FileError::Shape {
            path: self.path.clone(),
            tensor: name.into(),
            expected: extents.into(),
            found: info.shape.clone(),
        };
        if D::NDIM != Some(info.shape.len()) {
            return Err(wrong_shape());
        }
        let mut values = zeros::<T>(info.shape.iter().product(), name).map_err(FileError::io(&self.path, "read"))?;
        let start = self.data_start + info.data_offsets.0 as u64;
        self.file.seek(SeekFrom::Start(start)).map_err(FileError::io(&self.path, "read"))?;
        self.file.read_exact(bytemuck::cast_slice_mut(&mut values)).map_err(FileError::io(&self.path, "read"))?;
        let tensor = Array::from_shape_vec(IxDyn(&info.shape), values).map_err(|_| wrong_shape())?;
        tensor.into_dimensionality().map_err(|_| wrong_shape())
    }

    /// A scalar of the file's metadata, `None` if it has none of that name.
    pub(super) fn scalar<T: FromStr>(&self, name: &str, expected: &'static str) -> Result<Option<T>, FileError> {
        let Some(value) = self.header.metadata().as_ref().and_then(|metadata| metadata.get(name)) else {
            return Ok(None);
        };
        let invalid =
            |_| FileError::Scalar { path: self.path.clone(), name: name.into(), expected, found: value.clone() };
        value.trim().parse().map(Some).map_err(invalid)
    }

    fn missing(&self, tensor: &str) -> FileError {
        let mut found = self.header.offset_keys();
        found.sort_unstable();
        let nearest = found
            .iter()
            // A tensor that has a name of its own, of either operation, is not a misspelt one.
            .filter(|name| !AUDIO_NAMES.contains(&name.as_str()) && !CROSS_NAMES.contains(&name.as_str()))
            .map(|name| (edit_distance(name, tensor), name))
            // Beyond half of the letters two names have nothing to do with each other.
            .filter(|(distance, name)| 2 * distance <= name.len().max(tensor.len()))
            .min();
        let nearest = nearest.map(|(_, name)| name.clone());
        FileError::Missing { path: self.path.clone(), tensor: tensor.into(), nearest, found }
    }
}

/// A tensor's elements, zero; an error, where `vec!` would end the process, if there is no memory for them.
fn zeros<T: Element>(len: usize, tensor: &str) -> io::Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| {
        let message = format!("no memory for the {len} elements of tensor {tensor}");
        io::Error::new(io::ErrorKind::OutOfMemory, message)
    })?;
    values.resize(len, T::zeroed());
    Ok(values)
}

/// Insertions, deletions and replacements that turn one string into the other.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, a) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &b) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::{edit_distance, zeros};

    #[test]
    fn edit_distance_counts_single_letter_changes() {
        let known = [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("k_weight", "key_weight", 2)];
        for (a, b, distance) in known {
            assert_eq!((edit_distance(a, b), edit_distance(b, a)), (distance, distance));
        }
    }

    #[test]
    fn tensors_beyond_memory_are_an_error_that_names_them() {
        let error = zeros::<f32>(usize::MAX / 4, "k_weight").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert_eq!(error.to_string(), format!("no memory for the {} elements of tensor k_weight", usize::MAX / 4));
        assert_eq!(zeros::<f32>(3, "k_weight").unwrap(), [0.0; 3]);
    }
}
