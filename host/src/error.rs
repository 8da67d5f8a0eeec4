//! The library's error type: every variant names the argument, its value and what was expected.

use crate::gpu::GpuError;

/// Why an operation could not be planned or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An entry of `cu_seqlens` breaks a rule.
    #[error("cu_seqlens[{index}] = {value}: {rule}")]
    CuSeqlens {
        /// Position of the entry.
        index: usize,
        /// Its value.
        value: i64,
        /// The rule it breaks.
        rule: String,
    },
    /// `cu_seqlens` has no entry.
    #[error("cu_seqlens is empty: expected num_chunks + 1 offsets, the first of them 0")]
    EmptyCuSeqlens,
    /// A tensor's shape differs from what the other arguments ask for.
    #[error("{tensor}: expected shape {expected:?}, found {found:?}")]
    Shape {
        /// Public name of the tensor.
        tensor: String,
        /// Expected extents.
        expected: Vec<usize>,
        /// Extents of the argument.
        found: Vec<usize>,
    },
    /// A tensor's element type differs from what the operation takes.
    #[error("{tensor}: expected dtype {expected}, found {found}")]
    Dtype {
        /// Public name of the tensor.
        tensor: String,
        /// Expected element type.
        expected: String,
        /// Element type of the argument.
        found: String,
    },
    /// A device tensor's layout is not one that the kernels take.
    #[error("{tensor}: {found}; {rule}")]
    Layout {
        /// Public name of the tensor.
        tensor: String,
        /// What the argument is.
        found: String,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// A value that the operation does not support.
    #[error("{argument} = {value} is not supported: {supported}")]
    Unsupported {
        /// Name of the argument.
        argument: &'static str,
        /// Its value.
        value: String,
        /// What is supported.
        supported: String,
    },
    /// A result that was to be timed differs from the reference.
    #[error(
        "{case}: {gradient} is wrong ({matched_ratio:.4} of its elements match, {needed} needed), and wrong results are not timed"
    )]
    WrongResult {
        /// Name of the case.
        case: String,
        /// Public name of the gradient.
        gradient: String,
        /// Share of its elements inside the tolerance.
        matched_ratio: f64,
        /// Share that is needed.
        needed: f64,
    },
    /// The GPU, its driver or a kernel.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// A tensor file.
    #[error(transparent)]
    File(#[from] crate::file::FileError),
}

impl Error {
    /// `Ok` if `found` equals `expected`, else [`Error::Shape`].
    pub(crate) fn check_shape(tensor: &str, expected: &[usize], found: &[usize]) -> Result<(), Error> {
        if expected == found {
            return Ok(());
        }
        Err(Error::Shape { tensor: tensor.into(), expected: expected.into(), found: found.into() })
    }
}
