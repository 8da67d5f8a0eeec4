//! How a launch sums: which kernels, operands and tile widths that means.

use attn_backward_kernels::config::wgmma::{PROMOTED_SEGMENTS, PROMOTED_TILE_WIDTHS, TILE_K, TILE_WIDTHS};
use attn_backward_kernels::params::MAX_SEGMENTS;

use crate::gemm::ProductShape;

/// How the products of a launch are summed over k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulation {
    /// By the matrix units alone. A's segments lie side by side in one tensor, B's are tensors of their own.
    Plain,
    /// By the matrix units for `config::wgmma::PROMOTE_K_BLOCKS` k-blocks at a time, then in fp32. A and B are two parts each; the three segments of a
    /// product, `config::wgmma::segment_parts`, are multiplied k-block by k-block.
    Promoted,
}

impl Accumulation {
    /// Tile widths of its kernels, wide ones first.
    pub fn tile_widths(self) -> &'static [u32] {
        match self {
            Accumulation::Plain => &TILE_WIDTHS,
            Accumulation::Promoted => &PROMOTED_TILE_WIDTHS,
        }
    }

    /// k-blocks of a tile of whole K: those of all segments, or, promoted, of one part.
    pub(super) fn k_blocks(self, shape: &ProductShape) -> u32 {
        let passes = match self {
            Accumulation::Plain => shape.num_segments,
            Accumulation::Promoted => 1,
        };
        (passes * shape.k.div_ceil(TILE_K as usize)) as u32
    }

    /// Tensor maps of a product's B.
    pub(super) fn num_b_maps(self, shape: &ProductShape) -> usize {
        match self {
            Accumulation::Plain => shape.num_segments,
            Accumulation::Promoted => 1,
        }
    }

    /// Tensors of `shape.k` of k that A, and B, consist of.
    pub(super) fn num_tensors(self, shape: &ProductShape) -> usize {
        match self {
            Accumulation::Plain => shape.num_segments,
            Accumulation::Promoted => 2,
        }
    }

    /// Whether it has products of this many segments of its depth.
    pub(super) fn supports_segments(self, shape: &ProductShape) -> bool {
        match (self, shape.num_segments) {
            (Accumulation::Plain, 1) => true,
            // The end of a segment of A would run into the next.
            (Accumulation::Plain, segments) => {
                (2..=MAX_SEGMENTS).contains(&segments) && shape.k.is_multiple_of(TILE_K as usize)
            }
            (Accumulation::Promoted, segments) => segments == PROMOTED_SEGMENTS as usize,
        }
    }
}
