//! Cost model of the wgmma kernel, in nanoseconds on an H200 (measured, cold caches).
//!
//! A k-block of a tile costs by its width: 256 columns run at 94 % of the matrix units, narrow tiles wait for shared memory. The rest of
//! a tile (first fill of the ring, epilogue) depends on the output type, the rest of a part on the width that it parks.

use attn_backward_kernels::config::wgmma::{PROMOTE_K_BLOCKS, PROMOTED_SEGMENTS};
use attn_backward_kernels::params::{Major, OutputType};

use super::Accumulation;
use crate::gemm::ProductShape;

/// From the launch to the first finished k-block, and the launch itself as events see it.
pub const START_NS: u64 = 4_900;
/// From a part's last store until the block that adds it can see it.
pub const PUBLISH_NS: u64 = 1_800;
/// Memory bandwidth in bytes a microsecond.
pub const BYTES_PER_US: f64 = 4.3e6;

/// What a promotion adds to the time of its k-blocks: the matrix units run dry only if both warpgroups promote at a time. Estimated, not measured.
const PROMOTION_NS: u64 = 160;

/// Costs of tiles of one width.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// A 64-deep k-block; promoted: its three products, and its share of a promotion.
    pub k_block: u64,
    /// The rest of a tile that is written to C.
    pub tile: u64,
    /// The rest of a part that is parked.
    pub part: u64,
    /// Adding one part to an owner's registers.
    pub add: u64,
}

impl Cost {
    /// Of tiles of `product` that are `width` columns wide: they depend on the layout of A and the type of C.
    ///
    /// bf16: medians of whole launches of operation A's suite; MN-major A from tiles whose ring was full when they began, K-major A from deep ones.
    pub fn of(accumulation: Accumulation, width: u32, product: &ProductShape) -> Self {
        let mut cost = match (product.c_type, product.a_major, width) {
            (OutputType::Bf16, Major::Mn, 256) => Cost { k_block: 620, tile: 1400, part: 3000, add: 1100 },
            (OutputType::Bf16, Major::Mn, 192) => Cost { k_block: 458, tile: 1290, part: 2900, add: 800 },
            (OutputType::Bf16, Major::Mn, _) => Cost { k_block: 345, tile: 830, part: 1900, add: 500 },
            (OutputType::Bf16, Major::K, 256) => Cost { k_block: 630, tile: 1400, part: 3000, add: 1100 },
            (OutputType::Bf16, Major::K, 192) => Cost { k_block: 482, tile: 1290, part: 2900, add: 800 },
            (OutputType::Bf16, Major::K, _) => Cost { k_block: 368, tile: 830, part: 1900, add: 500 },
            (OutputType::F32, _, 256) => Cost { k_block: 635, tile: 2300, part: 1900, add: 1000 },
            (OutputType::F32, _, 192) => Cost { k_block: 490, tile: 1800, part: 1500, add: 750 },
            (OutputType::F32, _, _) => Cost { k_block: 385, tile: 1300, part: 1000, add: 500 },
        };
        if accumulation == Accumulation::Promoted {
            cost.k_block *= u64::from(PROMOTED_SEGMENTS);
            cost.k_block += PROMOTION_NS / u64::from(PROMOTE_K_BLOCKS);
        }
        cost
    }
}

/// A reduce item of `groups` 8-column groups of `parts` parts, once they are there.
pub fn reduce_ns(groups: u32, parts: u32) -> u64 {
    500 + 40 * u64::from(groups) * u64::from(parts)
}
