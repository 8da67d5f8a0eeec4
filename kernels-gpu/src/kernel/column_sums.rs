//! Column sums in fp32: of a bf16 matrix in ranges of rows (`column_sums_bf16`), and of such partial sums (`sum_partials`).
//!
//! Formula   column_sums_bf16  partials[b, c] = sum of x[r, c] over rows_per_block b <= r < min(rows, rows_per_block (b + 1))
//!           sum_partials      out[c] = sum over r of partials[r, c], for each entry of `sums`
//! Grid      column_sums_bf16  (ceil(columns / 256), ceil(rows / rows_per_block))
//!           sum_partials      (blocks of 32 columns of all sums, one sum after the other, 1)
//! Block     column_sums_bf16  8 warps; a lane has 8 columns, warp w rows w, w + 8, ..
//!           sum_partials      16 warps; a lane has a column, warp w rows w, w + 16, ..
//! Shared    one float for each warp and column
//! Registers few; nothing is bounded
//! Needs     columns and row pitch of x a multiple of 8, 16-byte aligned x, partials
//! Rounding  fp32 sums in an order that depends on the shape alone: a warp's rows in order, then the warps in order. `out` is rounded to
//!           bf16 once.
use crate::config::attention::{COLUMN_SUMS_COLUMNS, COLUMN_SUMS_THREADS, SUM_PARTIALS_COLUMNS, SUM_PARTIALS_THREADS};
use crate::params::{ColumnSumsParams, PartialSum, SumPartialsParams};
use crate::ptx::convert::{bf16x2, bf16x2_to_f32};
use crate::ptx::memory::{ldg128_or_zero, lds32, sts32, sts128};
use cuda_std::kernel;
use cuda_std::shared::dynamic_base;
use cuda_std::thread::{block_idx_x, block_idx_y, sync_threads, thread_idx_x};

/// Loads that a thread has under way.
const IN_FLIGHT: u32 = 4;

/// Column sums of ranges of rows of a bf16 matrix.
///
/// # Safety
/// The launch is as the file's head says and `params` as [`ColumnSumsParams`] does, with valid device pointers.
#[kernel(max_threads = COLUMN_SUMS_THREADS, min_blocks_per_sm = 4, barriers = 1)]
pub unsafe fn column_sums_bf16(params: ColumnSumsParams) {
    const WARPS: u32 = COLUMN_SUMS_THREADS / 32;
    let tid = thread_idx_x();
    let (warp, lane) = (tid >> 5, tid & 31);
    let first_column = block_idx_x() * COLUMN_SUMS_COLUMNS;
    let columns = params.columns;
    let column = first_column + 8 * lane;
    let begin = block_idx_y() * params.rows_per_block;
    let end = params.rows.min(begin.saturating_add(params.rows_per_block));

    let mut sums = [0f32; 8];
    let mut row = begin + warp;
    while row < end {
        let mut x = [[0u32; 4]; IN_FLIGHT as usize];
        for i in 0..IN_FLIGHT {
            let at = row + WARPS * i;
            let from = params.x.wrapping_add(at as usize * columns as usize + column as usize);
            // SAFETY: inside x, or predicated off.
            x[i as usize] = unsafe { ldg128_or_zero(from as *const u8, at < end && column < columns) };
        }
        for word in x.as_flattened().iter().enumerate() {
            let (low, high) = bf16x2_to_f32(*word.1);
            sums[2 * (word.0 % 4)] += low;
            sums[2 * (word.0 % 4) + 1] += high;
        }
        row += WARPS * IN_FLIGHT;
    }

    let shared = dynamic_base();
    let own = shared + 4 * (warp * COLUMN_SUMS_COLUMNS + 8 * lane);
    let bits = sums.map(f32::to_bits);
    // SAFETY: the thread's own words; read after the barrier, which all threads reach.
    unsafe {
        sts128(own, [bits[0], bits[1], bits[2], bits[3]]);
        sts128(own + 16, [bits[4], bits[5], bits[6], bits[7]]);
        sync_threads();
    }
    let mut sum = 0f32;
    for w in 0..WARPS {
        // SAFETY: written before the barrier.
        sum += f32::from_bits(unsafe { lds32(shared + 4 * (w * COLUMN_SUMS_COLUMNS + tid)) });
    }
    if first_column + tid < columns {
        let at = block_idx_y() as usize * columns as usize + (first_column + tid) as usize;
        // SAFETY: inside partials, this block's row and column.
        unsafe { *params.partials.wrapping_add(at) = sum };
    }
}
const _: () = assert!(COLUMN_SUMS_COLUMNS == 8 * 32 && COLUMN_SUMS_COLUMNS == COLUMN_SUMS_THREADS);

/// Sums of partial sums, rounded to bf16.
///
/// # Safety
/// The launch is as the file's head says and `params` as [`SumPartialsParams`] does, with valid device pointers.
#[kernel(max_threads = SUM_PARTIALS_THREADS, min_blocks_per_sm = 2, barriers = 1)]
pub unsafe fn sum_partials(params: SumPartialsParams) {
    const WARPS: u32 = SUM_PARTIALS_THREADS / 32;
    let tid = thread_idx_x();
    let (warp, lane) = (tid >> 5, tid & 31);
    let block = block_idx_x();
    let mut sum = params.sums[0];
    for i in 1..params.sums.len() {
        sum = later(sum, params.sums[i], block);
    }
    let column = (block - sum.first_block) * SUM_PARTIALS_COLUMNS + lane;
    let exists = column < sum.columns;

    let mut total = 0f32;
    let mut row = warp;
    while row < sum.rows {
        let mut x = [0f32; IN_FLIGHT as usize];
        for i in 0..IN_FLIGHT {
            let at = row + WARPS * i;
            if at < sum.rows && exists {
                // SAFETY: inside partials.
                x[i as usize] =
                    unsafe { *sum.partials.wrapping_add(at as usize * sum.pitch as usize + column as usize) };
            }
        }
        for value in x {
            total += value;
        }
        row += WARPS * IN_FLIGHT;
    }

    let shared = dynamic_base();
    // SAFETY: the thread's own word; read after the barrier, which all threads reach.
    unsafe {
        sts32(shared + 4 * tid, total.to_bits());
        sync_threads();
    }
    if warp == 0 && exists {
        let mut total = 0f32;
        for w in 0..WARPS {
            // SAFETY: written before the barrier.
            total += f32::from_bits(unsafe { lds32(shared + 4 * (32 * w + lane)) });
        }
        // SAFETY: inside out, this block's column.
        unsafe { *sum.out.wrapping_add(column as usize) = bf16x2(total, total) as u16 };
    }
}

/// `next` if `block` works on it, else `sum`: a choice between values, so that the parameters need no copy in memory.
#[inline(always)]
fn later(sum: PartialSum, next: PartialSum, block: u32) -> PartialSum {
    if block >= next.first_block { next } else { sum }
}
