//! Tensor maps of a launch, as the driver's `cuTensorMapEncodeTiled` takes them, all but the addresses.
//!
//! Common to all: 128-byte swizzle, no interleave, element strides 1, L2 promotion of 256 bytes, out-of-bounds elements read as zero. Base
//! addresses and strides are multiples of 16 bytes.

use attn_backward_kernels::config::wgmma::{TILE_K, TILE_M};
use attn_backward_kernels::params::{Major, OutputType};

use super::Accumulation;
use crate::gemm::ProductShape;

/// Element type of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// `CU_TENSOR_MAP_DATA_TYPE_BFLOAT16`.
    Bf16,
    /// `CU_TENSOR_MAP_DATA_TYPE_FLOAT16`.
    F16,
    /// `CU_TENSOR_MAP_DATA_TYPE_FLOAT32`.
    F32,
}

impl ElementType {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            ElementType::Bf16 | ElementType::F16 => 2,
            ElementType::F32 => 4,
        }
    }
}

impl From<OutputType> for ElementType {
    fn from(c_type: OutputType) -> Self {
        match c_type {
            OutputType::Bf16 => ElementType::Bf16,
            OutputType::F32 => ElementType::F32,
        }
    }
}

/// Where the rows, and the parts, of a product's tensors are. All tensors of A have one row pitch, those of B too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pitches {
    /// Row pitch of A in elements.
    pub a: usize,
    /// Row pitch of B in elements.
    pub b: usize,
    /// Row pitch of C in elements.
    pub c: usize,
    /// Bytes from the high part of A to the low one, a multiple of 16 below 2^40; of no meaning if there is but one.
    pub a_part_bytes: u64,
    /// The same of B.
    pub b_part_bytes: u64,
}

/// Which tensor a map describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// A, all segments or both parts.
    A,
    /// One segment of B, or (`segment` = 0) both parts.
    B {
        /// Which one.
        segment: usize,
    },
    /// C.
    C,
}

/// Arguments of one `cuTensorMapEncodeTiled`, innermost dimension first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMapSpec {
    /// Index of the product.
    pub product: usize,
    /// Which of its tensors; the map's base is the first element of that tensor, or of its high part.
    pub role: TensorRole,
    /// Element type.
    pub element: ElementType,
    /// Extents in elements; their number is the map's rank.
    pub dims: Vec<u64>,
    /// Byte strides of all dimensions but the innermost.
    pub strides_bytes: Vec<u64>,
    /// Extents of the box that one instruction moves.
    pub box_dims: Vec<u32>,
}

impl TensorMapSpec {
    /// A: 128 rows by 64 k a box.
    pub(super) fn a(
        accumulation: Accumulation,
        product: usize,
        shape: &ProductShape,
        element: ElementType,
        pitches: &Pitches,
    ) -> Self {
        let pitch_bytes = pitches.a * element.bytes();
        let extents = |k| match shape.a_major {
            Major::K => k_major(shape.m, k, pitch_bytes, TILE_M),
            Major::Mn => mn_major(shape.m, k, pitch_bytes, TILE_M),
        };
        let (dims, strides_bytes, box_dims) = match accumulation {
            Accumulation::Plain => extents(shape.num_segments * shape.k),
            Accumulation::Promoted => two_parts(extents(shape.k), pitches.a_part_bytes),
        };
        TensorMapSpec { product, role: TensorRole::A, element, dims, strides_bytes, box_dims }
    }

    /// A segment of B, or both parts: 64 columns by 64 k a box.
    pub(super) fn b(
        accumulation: Accumulation,
        (product, segment): (usize, usize),
        shape: &ProductShape,
        element: ElementType,
        pitches: &Pitches,
    ) -> Self {
        let extents = mn_major(shape.n, shape.k, pitches.b * element.bytes(), 64);
        let (dims, strides_bytes, box_dims) = match accumulation {
            Accumulation::Plain => extents,
            Accumulation::Promoted => two_parts(extents, pitches.b_part_bytes),
        };
        TensorMapSpec { product, role: TensorRole::B { segment }, element, dims, strides_bytes, box_dims }
    }

    /// C: 64 rows by 128 bytes a box.
    pub(super) fn c(product: usize, shape: &ProductShape, pitch: usize) -> Self {
        let element = ElementType::from(shape.c_type);
        TensorMapSpec {
            product,
            role: TensorRole::C,
            element,
            dims: vec![shape.n as u64, shape.m as u64],
            strides_bytes: vec![(pitch * element.bytes()) as u64],
            box_dims: vec![128 / element.bytes() as u32, 64],
        }
    }
}

type Extents = (Vec<u64>, Vec<u64>, Vec<u32>);

/// `[mn, k]` row-major as (k, mn, 1). The last stride is never used; the driver wants one below 2^40.
fn k_major(mn: usize, k: usize, pitch_bytes: usize, tile: u32) -> Extents {
    let pitch = pitch_bytes as u64;
    let unused = pitch.saturating_mul(mn as u64).min((1 << 40) - 16);
    (vec![k as u64, mn as u64, 1], vec![pitch, unused], vec![TILE_K, tile, 1])
}

/// `[k, mn]` row-major as (64 of mn, k, mn / 64): one 128-byte row of shared memory for each k of a chunk.
fn mn_major(mn: usize, k: usize, pitch_bytes: usize, tile: u32) -> Extents {
    (vec![64, k as u64, mn as u64 / 64], vec![pitch_bytes as u64, 128], vec![64, TILE_K, tile / 64])
}

/// The high and the low part as one tensor, the part outermost; a box is of one part.
fn two_parts((mut dims, mut strides_bytes, mut box_dims): Extents, part_bytes: u64) -> Extents {
    dims.push(2);
    strides_bytes.push(part_bytes);
    box_dims.push(1);
    (dims, strides_bytes, box_dims)
}
