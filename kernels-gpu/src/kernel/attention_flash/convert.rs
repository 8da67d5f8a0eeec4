//! `attention_flash_convert`: Q, K, V, dA as scaled fp16 tiles, laid out as the other kernels read them into shared memory.
//!
//! Formula   operands[place] = fp16(2^e x), e for each chunk, head and tensor; K less the keys' common part first (see `super`)
//! Grid      (num_slots, num_heads)
//! Block     8 warps, 16 rows each
//! Shared    8 words a warp: largest fields of the chunk, whether it is whole
//! Registers at most 64 a thread (4 blocks on an SM)
//! Preconditions
//!           `attention_flash_largest` has run
//! Rounding  to nearest fp16. Also zeroes the counters of `attention_flash_backward`
use super::largest::d_attn_rows;
use super::{Operand, Tile, operand_tile};
use crate::config::attention_flash::{ROWS_BLOCKS_PER_SM, ROWS_THREADS, TILE_ROWS};
use crate::params::FlashParams;
use crate::ptx::convert::{bf16x2_to_f32, f16x2, select};
use crate::ptx::memory::{ldg128_or_zero, lds32, stg32_if, stg64_if, stg128_if, sts32_if};
use crate::ptx::sync::{redux_max, shfl_xor};
use crate::tile::fragment::{
    InputRows, ROWS_16_BYTES, Rows16Bit, largest_field_bf16, load_rows_bf16, load_rows_f32, pow2, scale_exponent,
};
use crate::tile::lanes::{moved_16_bit, moved_32_bit, swizzled_narrowed};
use crate::tile::layout::swizzle_128b;
use cuda_std::kernel;
use cuda_std::shared::dynamic_base;
use cuda_std::thread::{block_idx_x, block_idx_y, sync_threads, thread_idx_x};

/// See the file's head.
///
/// # Safety
/// As [`attention_flash_largest`](super::largest::attention_flash_largest), which has run on the same parameters.
#[kernel(max_threads = ROWS_THREADS, min_blocks_per_sm = ROWS_BLOCKS_PER_SM, barriers = 1)]
pub unsafe fn attention_flash_convert(params: FlashParams) {
    let t = thread_idx_x();
    let (warp, lane) = (t / 32, t % 32);
    // SAFETY: rows past the chunk's end are predicated off when read and zero when written; places and counters are the block's own;
    // a barrier orders the warps' words and their readers.
    unsafe {
        let (slot, head) = (block_idx_x(), block_idx_y());
        let num_heads = params.attention.num_heads as usize;
        let place = slot as usize * num_heads + head as usize;
        let counters = params.counters.wrapping_add(2 * place + (t & 1) as usize);
        stg32_if(t < 2, counters.cast(), 0);
        let places = params.num_slots as usize * num_heads;
        stg32_if(t == 2 && place == 0, params.counters.wrapping_add(2 * places).cast(), 0);

        let mut tile = Tile::load_from(params.found_tiles, slot, head);
        let mut e = [0; 4];
        if tile.len > 0 {
            let is_whole;
            (e, is_whole) = chunk_exponents(&params, &tile, t);
            if !is_whole {
                tile.len = 0;
            }
        }
        let words = [tile.start, tile.len, tile.index * TILE_ROWS, 0];
        stg128_if(t == 0 && head == 0, params.tiles.wrapping_add(slot as usize).cast(), words);
        if tile.len == 0 {
            return;
        }
        let e_of_lane = select(
            t & 1 == 0,
            select(t & 2 == 0, e[0] as u32, e[2] as u32),
            select(t & 2 == 0, e[1] as u32, e[3] as u32),
        );
        stg32_if(t < 4, params.exponents.wrapping_add(4 * place + (t & 3) as usize).cast(), e_of_lane);

        let (first, rows) = (16 * warp, tile.rows_from(16 * warp));
        let states = tile.states_offset(&params, first);
        let to = |operand| operand_tile(&params, place, operand).wrapping_add((ROWS_16_BYTES * warp) as usize);
        let q = load_rows_bf16(params.attention.query_states.wrapping_add(states), rows, lane);
        store_rows(&q, &[0.0; 8], rows, e[0], to(Operand::Q), lane);
        let k = load_rows_bf16(params.attention.key_states.wrapping_add(states), rows, lane);
        let common = common_part(&params, &tile, lane);
        store_rows(&k, &common, rows, e[1], to(Operand::K), lane);
        let v = load_rows_bf16(params.attention.value_states.wrapping_add(states), rows, lane);
        store_rows(&v, &[0.0; 8], rows, e[2], to(Operand::V), lane);
        store_d_attn(d_attn_rows(&params, &tile, first), pow2(e[3]), to(Operand::DAttn), lane);
    }
}

/// Scale exponents of Q, K, V, dA in the tile's chunk and head, and whether the chunk has all of its slots. K has one binade in reserve: less
/// the common part it can be twice as large.
///
/// # Safety
/// All threads of the block; `largest` and `found_tiles` are complete.
#[inline(always)]
unsafe fn chunk_exponents(params: &FlashParams, tile: &Tile, t: u32) -> ([i32; 4], bool) {
    // the largest fields, and whether a slot is another chunk's
    let mut words = [0u32; 5];
    let mut i = t;
    // SAFETY: the places are the chunk's; a barrier orders the words and their readers.
    unsafe {
        while i < tile.tiles_in_chunk() {
            let other = Tile::load_from(params.found_tiles, tile.first_slot + i, tile.head);
            let is_of_chunk = other.start == tile.start && other.len == tile.len && other.index == i;
            words[4] |= !is_of_chunk as u32;
            let largest = params.largest.wrapping_add(4 * tile.place(params, i));
            let of_tile = ldg128_or_zero(largest.cast(), is_of_chunk);
            for i in 0..4 {
                words[i] = words[i].max(of_tile[i]);
            }
            i += ROWS_THREADS;
        }
        for i in 0..5 {
            let word = redux_max(words[i]);
            sts32_if(t % 32 == 0, dynamic_base() + t / 32 * 32 + 4 * i as u32, word);
        }
        sync_threads();
        for i in 0..5 {
            words[i] = 0;
            for w in 0..ROWS_THREADS / 32 {
                words[i] = words[i].max(lds32(dynamic_base() + 32 * w + 4 * i as u32));
            }
        }
    }
    let [q, k, v, d_attn, broken] = words;
    ([scale_exponent(q), scale_exponent(k) - 1, scale_exponent(v), scale_exponent(d_attn)], broken == 0)
}

/// About the mean of the chunk's first 16 keys in this lane's eight columns: a multiple of the last place of the largest of them; zero
/// if it is not finite.
///
/// # Safety
/// All lanes of the warp arrive.
#[inline(always)]
unsafe fn common_part(params: &FlashParams, tile: &Tile, lane: u32) -> [f32; 8] {
    let head_row = tile.head as usize * params.attention.total_seq_len as usize + tile.start as usize;
    let mut sums = [0f32; 8];
    // SAFETY: rows past the chunk's end are predicated off.
    unsafe {
        let keys = load_rows_bf16(params.attention.key_states.wrapping_add(head_row * 128), tile.len, lane);
        let field = largest_field_bf16(&keys);
        for words in &keys {
            for i in 0..4 {
                let (low, high) = bf16x2_to_f32(words[i]);
                sums[2 * i] += low;
                sums[2 * i + 1] += high;
            }
        }
        // 1.5 * 2^23: what is added to it is rounded to an integer
        const ROUND: f32 = 12_582_912.0;
        let last_place = (field as i32 - 134).max(-126);
        let count = tile.len.min(16) as f32;
        for sum in &mut sums {
            *sum += shfl_xor::<8>(*sum);
            *sum += shfl_xor::<16>(*sum);
            let units = *sum / count * pow2(-last_place);
            let rounded = ((units + ROUND) - ROUND) * pow2(last_place);
            *sum = f32::from_bits(select(sum.abs() < f32::INFINITY, rounded.to_bits(), 0));
        }
    }
    sums
}

/// Writes `2^e (x - common)` of 16 bf16 rows as rows of a swizzled fp16 tile in global memory; rows from `rows` on are zero.
///
/// # Safety
/// The 16 tile rows at `to` are the warp's own.
#[inline(always)]
unsafe fn store_rows(x: &Rows16Bit, common: &[f32; 8], rows: u32, e: i32, to: *mut u8, lane: u32) {
    let factor = pow2(e);
    for step in 0..4u32 {
        let (row, piece) = moved_16_bit(lane, step);
        let mut y = [0u32; 4];
        for i in 0..4 {
            let (low, high) = bf16x2_to_f32(x[step as usize][i]);
            let scaled = f16x2((low - common[2 * i]) * factor, (high - common[2 * i + 1]) * factor);
            y[i] = select(row < rows, scaled, 0);
        }
        // SAFETY: as the caller promises.
        unsafe { stg128_if(true, to.wrapping_add(swizzle_128b(row, piece) as usize), y) };
    }
}

/// The same for `factor x` of 16 fp32 rows, which are zero where they do not exist.
///
/// # Safety
/// As [`store_rows`].
#[inline(always)]
unsafe fn store_d_attn(from: InputRows, factor: f32, to: *mut u8, lane: u32) {
    // SAFETY: as the caller promises; rows past the chunk's end are predicated off.
    unsafe {
        let x = load_rows_f32(from, lane);
        for step in 0..8u32 {
            let (row, piece) = moved_32_bit(lane, step);
            let y = x[step as usize].map(|word| f32::from_bits(word) * factor);
            let at = to.wrapping_add(swizzled_narrowed(row, piece) as usize);
            stg64_if(true, at, f16x2(y[0], y[1]), f16x2(y[2], y[3]));
        }
    }
}
