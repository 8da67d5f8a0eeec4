//! Grouped GEMM plans.

use attn_backward_kernels::params::{Major, OutputType};

pub mod hopper;

/// Sizes and layouts of one product of a grouped GEMM, `C[m, n] = sum over segments s of A_s[m, k] B_s[k, n]`.
///
/// B is always MN-major (`[k, n]` row-major). dgrad has a K-major A, wgrad an MN-major one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductShape {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Depth of one segment.
    pub k: usize,
    /// Segments that K is made of.
    pub num_segments: usize,
    /// Layout of A.
    pub a_major: Major,
    /// Element type of C.
    pub c_type: OutputType,
}
