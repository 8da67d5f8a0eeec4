//! The rider: warp 1 of every block, which the products leave idle, does the small work of `params.beside` beside them.
//!
//! * Zeroes the counters of a later launch.
//! * Sums columns: of a bf16 matrix, 16 columns a warp (lane l has 8 of them in rows l / 2, l / 2 + 16, ..), and of fp32 partial sums, 32
//!   columns a warp as in `sum_partials`. A warp sums all rows of its columns, so no block waits for another.
//!
//! **Registers.** Few enough for `config::wgmma::PRODUCER_REGISTERS`: 16 of loads under way and 8 of sums.
//! **Ordering.** Nothing here is read or written by the rest of the launch, but inputs, which all only read.
//! **Rounding.** As `column_sums.rs`: fp32 sums in an order that depends on the shape alone, rounded to bf16 once.
use cuda_std::thread::grid_dim_x;

use super::Entry;
use crate::config::attention::SUM_PARTIALS_COLUMNS;
use crate::config::wgmma::RIDER_COLUMN_SUM_COLUMNS;
use crate::kernel::column_sums::{LaneRows, PARTIAL_ROWS_A_WARP, sum_partial_rows, sum_rows_bf16};
use crate::params::PartialSum;
use crate::params_wgmma::{ColumnSum, Rider};
use crate::ptx::convert::bf16x2;
use crate::ptx::hopper::ctaid_again;
use crate::ptx::memory::{ldg32_or, stg32_if, stg64_if, stg128_if};
use crate::ptx::sync::shfl_xor;

/// Everything that the parameters ask for.
///
/// # Safety
/// All lanes of one warp of every block; the entry has a [`Rider`], which is as it says.
#[inline(always)]
pub(super) unsafe fn ride<E: Entry>(lane: u32) {
    // SAFETY: the caller's. Conditions of branches are the same for all lanes.
    unsafe {
        let rider: *const Rider = (&raw const (*E::params()).beside).cast();
        zero((*rider).zero, (*rider).zero_words, lane);
        sum_columns::<E>(&(*rider).column_sum, lane);
        sum_partials(rider, lane);
    }
}

/// Zeroes `words` words.
///
/// # Safety
/// As [`ride`].
#[inline(always)]
unsafe fn zero(at: *mut u32, words: u32, lane: u32) {
    let mut first = 32 * ctaid_again();
    while first < words {
        let word = first + lane;
        // SAFETY: inside the range, or predicated off.
        unsafe { stg32_if(word < words, at.wrapping_add(word as usize).cast(), 0) };
        first += 32 * grid_dim_x();
    }
}

/// Column sums of the matrix.
///
/// # Safety
/// As [`ride`].
#[inline(always)]
unsafe fn sum_columns<E: Entry>(sum: &ColumnSum, lane: u32) {
    const LANES_A_ROW: u32 = RIDER_COLUMN_SUM_COLUMNS / 8;
    const ROWS: u32 = 32 / LANES_A_ROW;
    const { assert!(LANES_A_ROW == 2) }; // the shuffles below add lanes of equal parity
    let jobs = sum.columns.div_ceil(RIDER_COLUMN_SUM_COLUMNS);
    // SAFETY: the limit is null, or readable; a negative one is a large one.
    let end = unsafe {
        let limit = (*E::params()).k_limit;
        sum.rows.min(ldg32_or(limit, !limit.is_null(), sum.rows))
    };
    let mut job = ctaid_again();
    while job < jobs {
        let column = job * RIDER_COLUMN_SUM_COLUMNS + lane % LANES_A_ROW * 8;
        let exists = column < sum.columns;
        let rows = LaneRows { first: 0, offset: lane / LANES_A_ROW, step: ROWS, end };
        // SAFETY: columns come in eights, so those that exist lie in the matrix; the job is the same for all lanes.
        unsafe {
            let mut total = sum_rows_bf16(sum.x, sum.columns, rows, column, exists);
            for value in &mut total {
                *value += shfl_xor::<2>(*value);
                *value += shfl_xor::<4>(*value);
                *value += shfl_xor::<8>(*value);
                *value += shfl_xor::<16>(*value);
            }
            let packed = [0, 2, 4, 6].map(|i: usize| bf16x2(total[i], total[i + 1]));
            stg128_if(lane < LANES_A_ROW && exists, sum.out.wrapping_add(column as usize).cast(), packed);
        }
        job += grid_dim_x();
    }
}

/// Sums of partial sums. Jobs go to the last blocks first: the first ones have a matrix's columns already.
///
/// # Safety
/// As [`ride`].
#[inline(always)]
unsafe fn sum_partials(rider: *const Rider, lane: u32) {
    // SAFETY: as the caller promises; the job is the same for all lanes.
    unsafe {
        let sums: *const PartialSum = (&raw const (*rider).partial_sums).cast();
        let last = sums.add(2);
        let jobs = (*last).first_block + (*last).columns.div_ceil(SUM_PARTIALS_COLUMNS);
        let mut job = grid_dim_x() - 1 - ctaid_again();
        while job < jobs {
            let second = (job >= (*sums.add(1)).first_block) as usize;
            let sum = sums.add(second + (job >= (*last).first_block) as usize);
            let first_column = (job - (*sum).first_block) * SUM_PARTIALS_COLUMNS;
            let total = sum_partial_rows(&*sum, 0, PARTIAL_ROWS_A_WARP, first_column, lane);
            let column = first_column + 4 * lane;
            let packed = [bf16x2(total[0], total[1]), bf16x2(total[2], total[3])];
            let to = (*sum).out.wrapping_add(column as usize).cast();
            stg64_if(lane < 8 && column < (*sum).columns, to, packed[0], packed[1]);
            job += grid_dim_x();
        }
    }
}
