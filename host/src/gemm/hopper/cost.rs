//! Cost model of the wgmma kernel, in nanoseconds on an H200 (measured, cold caches).
//!
//! A k-block of a tile costs by its width: 256 columns run at 94 % of the matrix units, narrow tiles wait for shared memory. The rest of
//! a tile (first fill of the ring, epilogue) depends on the output type, the rest of a part on the width that it parks.

use attn_backward_kernels::config::wgmma::PROMOTE_K_BLOCKS;
use attn_backward_kernels::params::OutputType;

use super::Accumulation;

/// From the launch to the first finished k-block, and the launch itself as events see it.
pub const START_NS: u64 = 4_900;
/// From a part's last store until the block that adds it can see it.
pub const PUBLISH_NS: u64 = 1_000;
/// Memory bandwidth in bytes a microsecond.
pub const BYTES_PER_US: f64 = 4.3e6;

/// What a promotion adds to a k-block's time: the matrix units run dry only if both warpgroups promote at a time. Estimated, not measured.
const PROMOTION_NS: u64 = 160;

/// Costs of tiles of one width.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// A 64-deep k-block.
    pub k_block: u64,
    /// The rest of a tile that is written to C.
    pub tile: u64,
    /// The rest of a part that is parked.
    pub part: u64,
    /// Adding one part to an owner's registers.
    pub add: u64,
}

impl Cost {
    /// Of tiles `width` columns wide.
    pub fn of(accumulation: Accumulation, width: u32, c_type: OutputType) -> Self {
        let bf16 = c_type == OutputType::Bf16;
        let mut cost = match width {
            256 => Cost { k_block: 635, tile: if bf16 { 1100 } else { 2300 }, part: 1900, add: 1000 },
            192 => Cost { k_block: 490, tile: if bf16 { 950 } else { 1800 }, part: 1500, add: 750 },
            _ => Cost { k_block: 385, tile: if bf16 { 600 } else { 1300 }, part: 1000, add: 500 },
        };
        if accumulation == Accumulation::Promoted {
            cost.k_block += PROMOTION_NS / u64::from(PROMOTE_K_BLOCKS);
        }
        cost
    }
}

/// A reduce item of `groups` 8-column groups of `parts` parts, once they are there.
pub fn reduce_ns(groups: u32, parts: u32) -> u64 {
    500 + 40 * u64::from(groups) * u64::from(parts)
}
