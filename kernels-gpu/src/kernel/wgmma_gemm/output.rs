//! Epilogue: from the accumulators of a warpgroup to C.
//!
//! Accumulator fragment: thread (warp `w`, lane `l`) of the warpgroup holds, for each group `j` of 8 columns, `acc[4j..4j + 2]` = row
//! `16 w + l / 4`, columns `8 j + 2 (l % 4) + {0, 1}`, and `acc[4j + 2..4j + 4]` = the same, 8 rows down.
use super::Entry;
use super::operand::Operand;
use crate::config::wgmma::{CHUNK_BYTES, OUTPUT_CHUNKS, named_barrier};
use crate::params_wgmma::{TensorMap, WgmmaProduct};
use crate::ptx::convert::bf16x2;
use crate::ptx::hopper::{
    bulk_commit_if, bulk_wait_read_if, fence_proxy_async_shared, ld_relaxed_s32, named_barrier, tma_store_2d_if,
};
use crate::ptx::matrix::stmatrix_x4;
use crate::ptx::memory::{stg32_if, stg64_if, sts64};
use crate::scale::{maximum_of_word, operand_exponent};
use crate::tile::layout::{ROW_BYTES, swizzle_128b};
use crate::tile::power_of_two::power_of_two_halves;
use crate::tile::ring::Ring;

/// Type of C: how its rows are staged, 128 bytes of 64 rows (a chunk) at a time.
pub trait Output {
    /// Bytes of an element.
    const ELEMENT_BYTES: u32;
    /// Columns of a chunk.
    const CHUNK_COLUMNS: u32 = ROW_BYTES / Self::ELEMENT_BYTES;

    /// Writes this thread's part of column chunk `chunk` of the accumulators into the swizzled chunk at shared address `to`.
    ///
    /// # Safety
    /// All threads of the warpgroup; the chunk is theirs.
    unsafe fn write_chunk<const R: usize>(to: u32, thread: u32, acc: &[f32; R], chunk: usize);

    /// Writes two neighbouring columns to global memory where `ok`.
    ///
    /// # Safety
    /// If `ok`, `to` is aligned to two elements and no other thread accesses them.
    unsafe fn write_pair_if(ok: bool, to: *mut u8, x: f32, y: f32);
}

/// bf16, rounded to nearest even.
pub struct ToBf16;
/// fp32, as accumulated.
pub struct ToF32;

impl Output for ToBf16 {
    const ELEMENT_BYTES: u32 = 2;

    #[inline(always)]
    unsafe fn write_chunk<const R: usize>(to: u32, thread: u32, acc: &[f32; R], chunk: usize) {
        let lane = thread % 32;
        let row = (thread / 32) * 16 + lane % 16; // 8x8 matrices 0 and 2: rows 0..8 of the warp's 16; 1 and 3: rows 8..16
        for q in 0..4 {
            let g = 32 * chunk + 8 * q;
            let v = [
                bf16x2(acc[g], acc[g + 1]),
                bf16x2(acc[g + 2], acc[g + 3]),
                bf16x2(acc[g + 4], acc[g + 5]),
                bf16x2(acc[g + 6], acc[g + 7]),
            ];
            // SAFETY: inside the chunk, as the caller promises.
            unsafe { stmatrix_x4(to + swizzle_128b(row, 2 * q as u32 + lane / 16), v) };
        }
    }

    #[inline(always)]
    unsafe fn write_pair_if(ok: bool, to: *mut u8, x: f32, y: f32) {
        // SAFETY: as the caller promises.
        unsafe { stg32_if(ok, to, bf16x2(x, y)) }
    }
}

impl Output for ToF32 {
    const ELEMENT_BYTES: u32 = 4;

    #[inline(always)]
    unsafe fn write_chunk<const R: usize>(to: u32, thread: u32, acc: &[f32; R], chunk: usize) {
        let lane = thread % 32;
        let row = (thread / 32) * 16 + lane / 4;
        for j in 0..4 {
            let g = 16 * chunk + 4 * j;
            let at = to + swizzle_128b(row, 2 * j as u32 + (lane % 4) / 2) + (lane % 2) * 8;
            // SAFETY: inside the chunk, as the caller promises; row + 8 has the same swizzle.
            unsafe {
                sts64(at, acc[g].to_bits(), acc[g + 1].to_bits());
                sts64(at + 8 * ROW_BYTES, acc[g + 2].to_bits(), acc[g + 3].to_bits());
            }
        }
    }

    #[inline(always)]
    unsafe fn write_pair_if(ok: bool, to: *mut u8, x: f32, y: f32) {
        // SAFETY: as the caller promises.
        unsafe { stg64_if(ok, to, x.to_bits(), y.to_bits()) }
    }
}

/// Exponents of the power of two that each of a thread's two rows, `row` and `row + 8`, is multiplied by.
///
/// # Safety
/// `product` is in use; its exponents were written before the launch or, by other blocks, before what the caller has waited for.
#[inline(always)]
pub(super) unsafe fn row_exponents<E: Entry>(product: *const WgmmaProduct, row: u32) -> [i32; 2] {
    if !E::Operand::SCALED {
        return [0; 2];
    }
    // SAFETY: non-null pointers are valid, as the caller promises; rows past the last one (of a partial tile, never stored) read the last.
    unsafe {
        let all = (*product).exponent;
        let rows = (*product).row_exponents;
        let last = (*product).rows - 1;
        let read = |p: *const i32| if E::CONVERTS { ld_relaxed_s32(p) } else { *p };
        let common = if all.is_null() {
            0
        } else if E::CONVERTS {
            operand_exponent(maximum_of_word(read(all)))
        } else {
            read(all)
        };
        let of =
            |row: u32| if rows.is_null() { 0 } else { read(rows.add(if row < last { row } else { last } as usize)) };
        [common + of(row), common + of(row + 8)]
    }
}

/// Multiplies one 8-column group of a thread's accumulators by its rows' powers of two.
#[inline(always)]
pub(super) fn scale_group<E: Entry>(group: &mut [f32], exponents: [i32; 2]) {
    if E::Operand::SCALED {
        let (first, second) = (power_of_two_halves(exponents[0]), power_of_two_halves(exponents[1]));
        group[0] = group[0] * first.0 * first.1;
        group[1] = group[1] * first.0 * first.1;
        group[2] = group[2] * second.0 * second.1;
        group[3] = group[3] * second.0 * second.1;
    }
}

/// Converts and stores 64 rows x 2R columns whose first element is (`m0`, `n0`), two chunks at a time, through the swizzled output chunks
/// and TMA stores, which clip at the tensor's edge: partial tiles need no predicates.
///
/// # Safety
/// All threads of the warpgroup; `c_map` is the encoded map of C.
#[inline(always)]
pub(super) unsafe fn store<O: Output, const R: usize>(
    ring: &Ring<true>,
    c_map: *const TensorMap,
    acc: &[f32; R],
    [m0, n0]: [u32; 2],
    warpgroup: u32,
    thread: u32,
) {
    const { assert!(OUTPUT_CHUNKS == 2 && CHUNK_BYTES == 64 * ROW_BYTES) };
    let leader = thread == 0;
    let chunks = R * 2 / O::CHUNK_COLUMNS as usize;
    for first in (0..chunks.div_ceil(2)).map(|i| 2 * i) {
        let in_tile = |i: usize| first + i < chunks;
        // SAFETY: the output chunks are this warpgroup's; the leader's wait and the barriers order the reads of the stores before,
        // the writes, and the new stores.
        unsafe {
            bulk_wait_read_if(leader);
            named_barrier(named_barrier::WARPGROUP + warpgroup, 128);
            for i in 0..2 {
                if in_tile(i) {
                    O::write_chunk::<R>(ring.output(warpgroup, i as u32), thread, acc, first + i);
                }
            }
            fence_proxy_async_shared();
            named_barrier(named_barrier::WARPGROUP + warpgroup, 128);
            for i in 0..2 {
                if in_tile(i) {
                    let column = n0 + (first + i) as u32 * O::CHUNK_COLUMNS;
                    tma_store_2d_if(leader, c_map, column, m0, ring.output(warpgroup, i as u32));
                }
            }
            bulk_commit_if(leader);
        }
    }
}
