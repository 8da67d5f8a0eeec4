//! `attention_flash_dq`: dQ in bf16, and its column sums.
//!
//! Formula   dQ = scale 2^(unit of dS and K) * the sums in `params.dq`
//! Grid      (num_tiles, num_heads)
//! Block     8 warps, 16 rows each
//! Shared    bytes: 0 rows on their way out, 2048 a warp; 16384 column sums, 256 a warp
//! Registers at most 64 a thread (4 blocks on an SM)
//! Preconditions
//!           `attention_flash_backward` has run
//! Rounding  column sums before, dQ by rounding to bf16
use super::backward::ds_unit;
use super::{Operand, Tile, exponents};
use crate::config::attention::HEAD_DIM;
use crate::config::attention_flash::{DQ_FLOATS, ROWS_BLOCKS_PER_SM, ROWS_THREADS};
use crate::kernel::attention_math::split_scale;
use crate::params::FlashParams;
use crate::ptx::memory::{ldg128_or_zero, lds32};
use crate::tile::fragment::{Lanes, Pow2, ROWS_16_BYTES, ZERO, pow2, scale_rows, store_bf16, store_column_sums};
use cuda_std::kernel;
use cuda_std::shared::dynamic_base;
use cuda_std::thread::{block_idx_x, block_idx_y, sync_threads, thread_idx_x};

const WARPS: u32 = ROWS_THREADS / 32;

/// See the file's head.
///
/// # Safety
/// As [`attention_flash_largest`](super::largest::attention_flash_largest); `attention_flash_backward` has run on the same parameters.
#[kernel(max_threads = ROWS_THREADS, min_blocks_per_sm = ROWS_BLOCKS_PER_SM, barriers = 1)]
pub unsafe fn attention_flash_dq(params: FlashParams) {
    let t = thread_idx_x();
    let (warp, lane) = (t / 32, t % 32);
    let sums = dynamic_base() + WARPS * ROWS_16_BYTES;
    // SAFETY: the slot is the block's own; rows past the chunk's end are predicated off; a barrier orders the sums and their readers.
    unsafe {
        let tile = Tile::load(&params, block_idx_x(), block_idx_y());
        let slot = tile.slot(&params, tile.index);
        let e = exponents(&params, slot);
        let half = slot * DQ_FLOATS as usize + (t / 128 * (DQ_FLOATS / 2)) as usize;
        let from = params.dq.wrapping_add(half + 4 * (t % 128) as usize) as *const u8;
        let mut dq = ZERO;
        for j in 0..8 {
            dq[j] = ldg128_or_zero(from.wrapping_add(2048 * j), true).map(f32::from_bits);
        }
        let unscale_k = pow2(-e[Operand::K as usize]);
        scale_rows(&mut dq, unscale_k, unscale_k);
        let factor = Pow2::new(split_scale(params.scale).1 - ds_unit(&e));
        store_column_sums(&dq, factor, sums + 256 * warp, lane);
        let stage = dynamic_base() + ROWS_16_BYTES * warp;
        store_bf16(&dq, factor, stage, Lanes::new(lane), tile.gradient_rows(&params, 0, 16 * warp));
        sync_threads();
        if t < HEAD_DIM {
            let mut sum = 0f32;
            for w in 0..WARPS {
                sum += f32::from_bits(lds32(sums + 256 * w + 4 * t));
            }
            *tile.bias_partial(&params, 0, t) = sum;
        }
    }
}
