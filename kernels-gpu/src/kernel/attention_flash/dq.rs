//! `attention_flash_dq`: dQ in bf16, and its column sums; those of slots without a tile.
//!
//! Formula   dQ = scale 2^(unit of dS and K) * the sums in `params.dq`
//! Grid      (num_slots, num_heads)
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
use crate::kernel::chunks::{bias_of_no_rows, fill_bias_row, load_chunk};
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
    // SAFETY: the place is the block's own; rows past the chunk's end are predicated off; a barrier orders the sums and their readers.
    unsafe {
        let (slot, head) = (block_idx_x(), block_idx_y());
        let tile = Tile::load(&params, slot, head);
        if tile.len == 0 {
            let row = (params.attention.long_bias_row + slot, head);
            fill_bias_row(&params.attention, row, 0..1, complaint(&params, slot), (t, ROWS_THREADS));
            return fill_bias_row(&params.attention, row, 1..3, 0.0, (t, ROWS_THREADS));
        }
        let place = tile.place(&params, tile.index);
        let e = exponents(&params, place);
        let half = place * DQ_FLOATS as usize + (t / 128 * (DQ_FLOATS / 2)) as usize;
        let from = params.dq.wrapping_add(half + 4 * (t % 128) as usize) as *const u8;
        let mut dq = ZERO;
        for j in 0..8 {
            dq[j] = ldg128_or_zero(from.wrapping_add(2048 * j), true).map(f32::from_bits);
        }
        let unscale_k = pow2(-e[Operand::K as usize]);
        scale_rows(&mut dq, unscale_k, unscale_k);
        let factor = Pow2::new(split_scale(params.attention.scale).1 - ds_unit(&e));
        store_column_sums(&dq, factor, sums + 256 * warp, lane);
        let stage = dynamic_base() + ROWS_16_BYTES * warp;
        store_bf16(&dq, factor, stage, Lanes::new(lane), tile.gradient_rows(&params, 0, 16 * warp));
        sync_threads();
        if t < HEAD_DIM {
            let mut sum = complaint(&params, slot);
            for w in 0..WARPS {
                sum += f32::from_bits(lds32(sums + 256 * w + 4 * t));
            }
            *tile.bias_partial(&params, 0, t) = sum;
        }
    }
}

/// NaN where no short kernel runs, which would tell, and the chunk that has the slot's number breaks a rule; else 0.
///
/// # Safety
/// The parameters are valid.
#[inline(always)]
unsafe fn complaint(params: &FlashParams, slot: u32) -> f32 {
    if params.attention.short_rows > 0 {
        return 0.0;
    }
    // SAFETY: as the caller promises.
    bias_of_no_rows(unsafe { load_chunk(&params.attention, slot) })
}
