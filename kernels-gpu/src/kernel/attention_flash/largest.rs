//! `attention_flash_largest`: largest exponent field of each operand in each tile of rows and head.
//!
//! Formula   largest[slot] = max over the tile's rows and 64 columns of the exponent fields of Q, K, V, dA (finite elements)
//! Grid      (num_tiles, num_heads)
//! Block     8 warps, 16 rows each
//! Shared    4 words a warp
//! Registers at most 128 a thread (2 blocks on an SM)
//! Preconditions
//!           as `params::FlashParams` says; 16-byte aligned tensors
//! Rounding  none
use super::Tile;
use crate::config::attention::HEAD_DIM;
use crate::config::attention_flash::{LARGEST_BLOCKS_PER_SM, ROWS_THREADS};
use crate::params::FlashParams;
use crate::ptx::memory::{lds32, stg32_if, sts32_if};
use crate::tile::fragment::{InputRows, largest_field_bf16, largest_field_f32, load_rows_bf16, load_rows_f32};
use cuda_std::kernel;
use cuda_std::shared::dynamic_base;
use cuda_std::thread::{block_idx_x, block_idx_y, sync_threads, thread_idx_x};

/// See the file's head.
///
/// # Safety
/// The launch is as the file's head says and `params` as [`FlashParams`] does, with valid device pointers.
#[kernel(max_threads = ROWS_THREADS, min_blocks_per_sm = LARGEST_BLOCKS_PER_SM, barriers = 1)]
pub unsafe fn attention_flash_largest(params: FlashParams) {
    let t = thread_idx_x();
    let (warp, lane) = (t / 32, t % 32);
    // SAFETY: rows past the chunk's end are predicated off; a barrier orders the warps' words and their readers.
    unsafe {
        let tile = Tile::load(&params, block_idx_x(), block_idx_y());
        let (first, rows) = (16 * warp, tile.rows_from(16 * warp));
        let states = tile.states_offset(&params, first);
        let q = load_rows_bf16(params.query_states.wrapping_add(states), rows, lane);
        let k = load_rows_bf16(params.key_states.wrapping_add(states), rows, lane);
        let v = load_rows_bf16(params.value_states.wrapping_add(states), rows, lane);
        let d_attn = load_rows_f32(d_attn_rows(&params, &tile, first), lane);
        let fields =
            [largest_field_bf16(&q), largest_field_bf16(&k), largest_field_bf16(&v), largest_field_f32(&d_attn)];
        for i in 0..4 {
            sts32_if(lane == 0, dynamic_base() + 16 * warp + 4 * i as u32, fields[i]);
        }
        sync_threads();
        let mut largest = 0;
        for w in 0..ROWS_THREADS / 32 {
            largest = largest.max(lds32(dynamic_base() + 16 * w + 4 * (t & 3)));
        }
        let slot = tile.slot(&params, tile.index);
        stg32_if(t < 4, params.largest.wrapping_add(4 * slot + (t & 3) as usize).cast(), largest);
    }
}

/// The 16 rows of dA from row `first` of the tile on.
#[inline(always)]
pub(super) fn d_attn_rows(params: &FlashParams, tile: &Tile, first: u32) -> InputRows {
    let pitch = 4 * params.num_heads * HEAD_DIM;
    let offset = tile.packed_row(first) * pitch as usize + (tile.head * HEAD_DIM * 4) as usize;
    InputRows { first: params.d_attn.wrapping_add(offset), pitch, rows: tile.rows_from(first) }
}
