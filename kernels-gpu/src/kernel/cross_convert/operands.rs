//! `cross_convert_operands_*`: hidden states once the maxima are known, and weights whose exponents were guessed too low.
use core::array::from_fn;

use super::parts::store;
use super::{WARPS, block_max};
use crate::config::cross_convert::{MAXIMA, THREADS, maxima};
use crate::params::CrossConvertParams;
use crate::ptx::memory::{ldg128_stream_or_zero, stg32_if};
use crate::scale;
use crate::tile::power_of_two::power_of_two_halves;
use cuda_std::{shared, thread, warp};

/// Loads that a thread has in flight; 8 run out of predicates, and ptxas then waits between them.
const LOADS: usize = 4;

/// A matrix to convert; a piece is 16 bytes of fp32 (4 elements).
struct Matrix {
    /// `[rows, row_pieces]`.
    source: *const f32,
    /// Parts of `[rows, row_pieces]`.
    out: [*mut u16; 2],
    rows: u32,
    row_pieces: u32,
    /// Row `t` is stored times `2^(row_exponents[t] - exponent)`; none: 0.
    row_exponents: Option<*const i32>,
    exponent: i32,
}

/// Converts rows `first, first + warps of the grid, ..`; returns the first index of the next matrix.
///
/// # Safety
/// The matrix is as described, `out` is accessed by nobody else.
#[inline(always)]
unsafe fn convert_rows<const PARTS: usize>(m: &Matrix, first: u32) -> u32 {
    let lane = warp::lane_id();
    let mut row = first;
    // SAFETY: `row < rows` exists, pieces past a row's end are neither loaded nor stored, each piece belongs to one thread.
    unsafe {
        while row < m.rows {
            let e = m.row_exponents.map_or(0, |e| e.wrapping_add(row as usize).read());
            let factors = power_of_two_halves(e - m.exponent);
            // One address for each tensor and constant steps from it: addresses that ptxas cannot fold would cost loads in flight.
            let mut at = row as usize * m.row_pieces as usize + lane as usize;
            let mut piece = lane;
            while piece - lane < m.row_pieces {
                let source = m.source.cast::<u8>().wrapping_add(at * 16);
                let out = m.out.map(|part| part.wrapping_add(at * 4));
                let inside = |i: usize| piece + i as u32 * 32 < m.row_pieces;
                let v: [[f32; 4]; LOADS] =
                    from_fn(|i| ldg128_stream_or_zero(source.wrapping_add(i * 32 * 16), inside(i)));
                for (i, v) in v.iter().enumerate() {
                    store::<PARTS>(inside(i), out, i as u64 * 32 * 8, *v, factors);
                }
                at += LOADS * 32;
                piece += LOADS as u32 * 32;
            }
            row += thread::grid_dim_x() * WARPS;
        }
    }
    row - m.rows
}

/// The maxima of all blocks of gradients, as words.
///
/// # Safety
/// All threads of the block; shared memory as the file head of [`super`] says.
#[inline(always)]
unsafe fn block_maxima(p: &CrossConvertParams) -> [i32; MAXIMA] {
    // SAFETY: words below `gradients_blocks` exist.
    unsafe {
        let mut words = [0; MAXIMA];
        let mut block = thread::thread_idx_x();
        while block < p.gradients_blocks {
            let found: [i32; MAXIMA] =
                from_fn(|i| p.block_maxima.wrapping_add(i * p.gradients_blocks as usize + block as usize).read());
            words = from_fn(|i| found[i].max(words[i]));
            block += THREADS;
        }
        // As words they are not negative.
        block_max(shared::dynamic_base(), words.map(|word| word as u32)).map(|word| word as i32)
    }
}
const _: () = assert!(MAXIMA as u32 * WARPS * 4 == crate::config::cross_convert::OPERANDS_SMEM_BYTES);

/// The kernel.
///
/// # Safety
/// As the file head of [`super`] says.
#[inline(always)]
pub unsafe fn convert<const PARTS: usize>(p: &CrossConvertParams) {
    let q_out_dim = p.num_heads * p.head_dim;
    let kv_out_dim = p.num_kv_heads * p.head_dim;
    let (pieces, cross_pieces) = (p.hidden_size / 4, p.cross_hidden_size / 4);
    // SAFETY: the tensors are as in `CrossConvertParams`; what gradients writes is read when it has ended.
    unsafe {
        #[cfg(target_feature = "sm_90a")]
        crate::ptx::hopper::wait_for_launch_before();
        let words = block_maxima(p);
        let exponents: [i32; 4] = from_fn(|i| scale::operand_exponent(scale::maximum_of_word(words[i])));
        let first_thread = thread::block_idx_x() == 0 && thread::thread_idx_x() == 0;
        for (i, exponent) in exponents.into_iter().enumerate() {
            stg32_if(first_thread, p.exponents.wrapping_add(i).cast(), exponent as u32);
        }
        // No rows of weights whose guess holds.
        let again = |sequence: usize, rows| {
            if words[maxima::WEIGHTS + sequence] == words[maxima::GUESSES + sequence] { 0 } else { rows }
        };
        let (source, out, rows, exponent) = (p.q_weight, p.wq, again(0, q_out_dim), exponents[2]);
        let q = Matrix { source, out, rows, row_pieces: pieces, row_exponents: None, exponent };
        let (source, out, rows, exponent) = (p.k_weight, p.wkv, again(1, kv_out_dim), exponents[3]);
        let k = Matrix { source, out, rows, row_pieces: cross_pieces, row_exponents: None, exponent };
        let below = kv_out_dim as usize * p.cross_hidden_size as usize;
        let v = Matrix { source: p.v_weight, out: p.wkv.map(|part| part.wrapping_add(below)), ..k };
        let (source, out, row_exponents) = (p.encoder_hidden_states, p.x_enc, Some(p.row_exponents_enc.cast_const()));
        let enc =
            Matrix { source, out, rows: p.rows_enc, row_pieces: cross_pieces, row_exponents, exponent: exponents[1] };
        let (source, out, row_exponents) = (p.decoder_hidden_states, p.x_dec, Some(p.row_exponents_dec.cast_const()));
        let dec = Matrix { source, out, rows: p.rows_dec, row_pieces: pieces, row_exponents, exponent: exponents[0] };
        let next = convert_rows::<PARTS>(&dec, thread::block_idx_x() * WARPS + thread::thread_idx_x() / 32);
        let next = convert_rows::<PARTS>(&enc, next);
        let next = convert_rows::<PARTS>(&q, next);
        let next = convert_rows::<PARTS>(&k, next);
        convert_rows::<PARTS>(&v, next);
        #[cfg(target_feature = "sm_90a")]
        crate::ptx::hopper::launch_dependents();
    }
}
