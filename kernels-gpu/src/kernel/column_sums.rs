//! Column sums in fp32: of a bf16 matrix in ranges of rows (`column_sums_bf16`), and of such partial sums (`sum_partials`). The `wgmma_*`
//! kernels' riders sum the same way.
//!
//! Formula   column_sums_bf16  partials[b, c] = sum of x[r, c] over rows_per_block b <= r < min(rows, *row_limit, rows_per_block (b + 1))
//!           sum_partials      out[c] = sum over r of partials[r, c], for each entry of `sums`
//! Grid      column_sums_bf16  (ceil(columns / 256), ceil(rows / rows_per_block))
//!           sum_partials      (blocks of 32 columns of all sums, one sum after the other, 1)
//! Block     column_sums_bf16  8 warps; a lane has 8 columns, warp w rows w, w + 8, ..
//!           sum_partials      16 warps; a lane has 4 columns, lanes 8 i .. of warp w have rows 4 w + i, 4 w + i + 64, ..
//! Shared    one float for each warp and column
//! Registers few; nothing is bounded
//! Preconditions
//!           columns and row pitch of x a multiple of 8, of partials of 4; 16-byte aligned x, partials
//! Rounding  fp32 sums in an order that depends on the shape alone: a lane's rows in order, then the lanes as a tree, then the warps in
//!           order. `out` is rounded to bf16 once.
use crate::config::attention::{COLUMN_SUMS_COLUMNS, COLUMN_SUMS_THREADS, SUM_PARTIALS_COLUMNS, SUM_PARTIALS_THREADS};
use crate::params::{ColumnSumsParams, PartialSum, SumPartialsParams};
use crate::ptx::convert::{bf16x2, bf16x2_to_f32};
use crate::ptx::memory::{ldg32_or, ldg128_or_zero, lds32, sts128, sts128_if};
use crate::ptx::sync::shfl_xor;
use cuda_std::kernel;
use cuda_std::shared::dynamic_base;
use cuda_std::thread::{block_idx_x, block_idx_y, sync_threads, thread_idx_x};

/// Loads that a thread has under way.
const IN_FLIGHT: u32 = 4;
/// Rows of partial sums that a warp loads at a time: 8 lanes of 4 columns have one row.
pub(super) const PARTIAL_ROWS_A_WARP: u32 = 4;
const _: () = assert!(32 / PARTIAL_ROWS_A_WARP * 4 == SUM_PARTIALS_COLUMNS);

/// Rows of a matrix that a lane sums: `first + offset`, then every `step`th, below `end`. `offset` alone may differ between lanes.
#[derive(Clone, Copy)]
pub(super) struct LaneRows {
    /// First row of the warp.
    pub first: u32,
    /// The lane's first row, relative to the warp's.
    pub offset: u32,
    /// Distance of a lane's rows.
    pub step: u32,
    /// Rows from here on are not summed.
    pub end: u32,
}

/// Sums of 8 columns of bf16 `x[.., pitch]` from `column` on over a lane's rows, in order; zeros where `exists` is false.
///
/// # Safety
/// If `exists`, the columns lie in the rows of x, which nothing writes during the launch.
#[inline(always)]
pub(super) unsafe fn sum_rows_bf16(x: *const u16, pitch: u32, rows: LaneRows, column: u32, exists: bool) -> [f32; 8] {
    let mut sums = [0f32; 8];
    let mut row = rows.first;
    while row < rows.end {
        let mut loaded = [[0u32; 4]; IN_FLIGHT as usize];
        for i in 0..IN_FLIGHT {
            let at = row + rows.offset + rows.step * i;
            let from = x.wrapping_add(at as usize * pitch as usize + column as usize);
            // SAFETY: inside x, or predicated off.
            loaded[i as usize] = unsafe { ldg128_or_zero(from as *const u8, exists && at < rows.end) };
        }
        for word in loaded.as_flattened().iter().enumerate() {
            let (low, high) = bf16x2_to_f32(*word.1);
            sums[2 * (word.0 % 4)] += low;
            sums[2 * (word.0 % 4) + 1] += high;
        }
        row += rows.step * IN_FLIGHT;
    }
    sums
}

/// Sums of 32 columns of `sum.partials`, the first of which is `column`, over a warp's rows: lane l has columns 4 (l % 8) .., the same in all
/// lanes of equal l % 8; zeros past the last column. `first` and `step` are the warp's.
///
/// # Safety
/// All lanes of the warp arrive; the partials are as [`PartialSum`] says, and nothing writes them during the launch.
#[inline(always)]
pub(super) unsafe fn sum_partial_rows(sum: &PartialSum, first: u32, step: u32, column: u32, lane: u32) -> [f32; 4] {
    // read once: to the compiler the loads below might change them
    let PartialSum { partials, rows, pitch, columns, .. } = *sum;
    let mut total = [0f32; 4];
    let column = column + lane % 8 * 4;
    let mut row = first;
    while row < rows {
        let mut loaded = [[0u32; 4]; IN_FLIGHT as usize];
        for i in 0..IN_FLIGHT {
            let at = row + lane / 8 + step * i;
            let from = partials.wrapping_add(at as usize * pitch as usize + column as usize);
            // SAFETY: inside the partials, or predicated off.
            loaded[i as usize] = unsafe { ldg128_or_zero(from as *const u8, at < rows && column < columns) };
        }
        for values in loaded {
            for e in 0..4 {
                total[e] += f32::from_bits(values[e]);
            }
        }
        row += step * IN_FLIGHT;
    }
    for value in &mut total {
        // SAFETY: as the caller promises.
        unsafe {
            *value += shfl_xor::<8>(*value);
            *value += shfl_xor::<16>(*value);
        }
    }
    total
}

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
    // SAFETY: as the caller promises.
    let limit = unsafe { ldg32_or(params.row_limit, !params.row_limit.is_null(), params.rows) };
    let end = params.rows.min(limit).min(begin.saturating_add(params.rows_per_block));
    let rows = LaneRows { first: begin + warp, offset: 0, step: WARPS, end };
    // SAFETY: as the caller promises.
    let bits = unsafe { sum_rows_bf16(params.x, columns, rows, column, column < columns) }.map(f32::to_bits);

    let shared = dynamic_base();
    let own = shared + 4 * (warp * COLUMN_SUMS_COLUMNS + 8 * lane);
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
    let column = (block - sum.first_block) * SUM_PARTIALS_COLUMNS;
    let first = PARTIAL_ROWS_A_WARP * warp;
    // SAFETY: as the caller promises.
    let total = unsafe { sum_partial_rows(&sum, first, PARTIAL_ROWS_A_WARP * WARPS, column, lane) };

    let shared = dynamic_base();
    // SAFETY: the thread's own words; read after the barrier, which all threads reach.
    unsafe {
        sts128_if(lane < 8, shared + 4 * (32 * warp + 4 * lane), total.map(f32::to_bits));
        sync_threads();
    }
    if warp == 0 && column + lane < sum.columns {
        let mut total = 0f32;
        for w in 0..WARPS {
            // SAFETY: written before the barrier.
            total += f32::from_bits(unsafe { lds32(shared + 4 * (32 * w + lane)) });
        }
        // SAFETY: inside out, this block's column.
        unsafe { *sum.out.wrapping_add((column + lane) as usize) = bf16x2(total, total) as u16 };
    }
}

/// `next` if `block` works on it, else `sum`: a choice between values, so that the parameters need no copy in memory.
#[inline(always)]
fn later(sum: PartialSum, next: PartialSum, block: u32) -> PartialSum {
    if block >= next.first_block { next } else { sum }
}
