//! `attention_flash_largest`: finds the tiles, and the largest exponent field of each operand in each of them. Where no short kernel runs,
//! all blocks together see to the padding rows.
//!
//! Formula   largest[place] = max over the tile's rows and 64 columns of the exponent fields of Q, K, V, dA (finite elements)
//! Grid      (num_slots, num_heads)
//! Block     8 warps, 16 rows each
//! Shared    4 words a warp
//! Registers at most 128 a thread (2 blocks on an SM)
//! Preconditions
//!           as `params::FlashParams` says; 16-byte aligned tensors
//! Rounding  none. Whatever `cu_seqlens` holds, nothing is out of bounds
use super::Tile;
use crate::config::attention::HEAD_DIM;
use crate::config::attention_flash::{LARGEST_BLOCKS_PER_SM, ROWS_THREADS, TILE_ROWS};
use crate::kernel::chunks::{LongTile, finish_padding, load_token_rows};
use crate::params::{FlashParams, FlashTile};
use crate::ptx::memory::{lds32, stg32_if, stg128_if, sts32_if};
use crate::tile::fragment::{InputRows, largest_field_bf16, largest_field_f32, load_rows_bf16, load_rows_f32};
use cuda_std::kernel;
use cuda_std::shared::dynamic_base;
use cuda_std::thread::{block_idx_x, block_idx_y, grid_dim_x, sync_threads, thread_idx_x};

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
        let (slot, head) = (block_idx_x(), block_idx_y());
        let LongTile { start, len, first } = LongTile::load::<TILE_ROWS>(&params.attention, slot, lane);
        let found = params.found_tiles.wrapping_add(slot as usize);
        stg128_if(t == 0 && head == 0, found.cast(), [start, len, first, 0]);
        if params.attention.short_rows == 0 {
            let tokens = load_token_rows(&params.attention);
            if tokens < params.attention.total_seq_len {
                let share = (slot * (ROWS_THREADS / 32) + warp, grid_dim_x() * (ROWS_THREADS / 32));
                finish_padding(&params.attention, tokens, head, share, lane);
            }
        }
        if len == 0 {
            return;
        }
        let tile = Tile::new(FlashTile { start, len, first, reserved: 0 }, slot, head);
        let (first, rows) = (16 * warp, tile.rows_from(16 * warp));
        let states = tile.states_offset(&params, first);
        let q = load_rows_bf16(params.attention.query_states.wrapping_add(states), rows, lane);
        let k = load_rows_bf16(params.attention.key_states.wrapping_add(states), rows, lane);
        let v = load_rows_bf16(params.attention.value_states.wrapping_add(states), rows, lane);
        let d_attn = load_rows_f32(d_attn_rows(&params, &tile, first), lane);
        let fields = [
            largest_field_bf16(&q),
            largest_field_bf16(&k),
            largest_field_bf16(&v),
            largest_field_f32(d_attn.as_flattened()),
        ];
        for i in 0..4 {
            sts32_if(lane == 0, dynamic_base() + 16 * warp + 4 * i as u32, fields[i]);
        }
        sync_threads();
        let mut largest = 0;
        for w in 0..ROWS_THREADS / 32 {
            largest = largest.max(lds32(dynamic_base() + 16 * w + 4 * (t & 3)));
        }
        let place = tile.place(&params, tile.index);
        stg32_if(t < 4, params.largest.wrapping_add(4 * place + (t & 3) as usize).cast(), largest);
    }
}

/// The 16 rows of dA from row `first` of the tile on.
#[inline(always)]
pub(super) fn d_attn_rows(params: &FlashParams, tile: &Tile, first: u32) -> InputRows {
    let pitch = 4 * params.attention.num_heads * HEAD_DIM;
    let offset = tile.packed_row(first) * pitch as usize + (tile.head * HEAD_DIM * 4) as usize;
    InputRows { first: params.attention.d_attn.wrapping_add(offset), pitch, rows: tile.rows_from(first) }
}
