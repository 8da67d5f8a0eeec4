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
/// Pieces of a row that a warp takes at a time: a strip.
const STRIP_PIECES: u32 = 32 * LOADS as u32;

/// A matrix to convert; a piece is 16 bytes of fp32 (4 elements).
#[derive(Clone, Copy)]
struct Matrix {
    /// `[rows, row_pieces]`.
    source: *const f32,
    /// Parts of `[rows, row_pieces]`.
    out: [*mut u16; 2],
    rows: u32,
    row_pieces: u32,
    /// Row `t` is stored times `2^(row_exponents[t] - R)`; null: times `2^-R`.
    row_exponents: *const i32,
}

impl Matrix {
    /// Strips of a row; 1 at least.
    #[inline(always)]
    fn row_strips(&self) -> u32 {
        self.row_pieces.div_ceil(STRIP_PIECES)
    }

    /// Strips of all rows.
    #[inline(always)]
    fn strips(&self) -> u32 {
        self.rows * self.row_strips()
    }

    /// Strip `index`.
    #[inline(always)]
    fn strip(&self, index: u32) -> Strip {
        // SAFETY: rows are not empty.
        unsafe { core::hint::assert_unchecked(self.row_strips() != 0) };
        let row = index / self.row_strips();
        let piece = (index - row * self.row_strips()) * STRIP_PIECES + warp::lane_id();
        Strip { row, piece }
    }

    /// This thread's pieces of a strip.
    ///
    /// # Safety
    /// The strip is one of `source`.
    #[inline(always)]
    unsafe fn load(&self, strip: Strip) -> [[f32; 4]; LOADS] {
        let source = self.source.cast::<u8>().wrapping_add(self.first(strip) * 16);
        // SAFETY: pieces past the row's end are not loaded.
        from_fn(|i| unsafe { ldg128_stream_or_zero(source.wrapping_add(i * 32 * 16), self.holds(strip, i)) })
    }

    /// The exponent of a strip's row.
    ///
    /// # Safety
    /// The row exists, and its exponent is written.
    #[inline(always)]
    unsafe fn row_exponent(&self, strip: Strip) -> i32 {
        // SAFETY: as the caller promises.
        unsafe {
            if self.row_exponents.is_null() { 0 } else { self.row_exponents.wrapping_add(strip.row as usize).read() }
        }
    }

    /// Stores a strip times `2^exponent`.
    ///
    /// # Safety
    /// `out` has it, which is accessed by nobody else.
    #[inline(always)]
    unsafe fn store<const PARTS: usize>(&self, strip: Strip, v: &[[f32; 4]; LOADS], exponent: i32) {
        let factors = power_of_two_halves(exponent);
        let out = self.out.map(|part| part.wrapping_add(self.first(strip) * 4));
        for (i, v) in v.iter().enumerate() {
            // SAFETY: pieces past the row's end are not stored; each piece belongs to one thread.
            unsafe { store::<PARTS>(self.holds(strip, i), out, i as u64 * 32 * 8, *v, factors) };
        }
    }

    /// Index of the thread's first piece in the matrix.
    #[inline(always)]
    fn first(&self, strip: Strip) -> usize {
        strip.row as usize * self.row_pieces as usize + strip.piece as usize
    }

    /// Whether the thread's piece `i` of a strip is inside the row.
    #[inline(always)]
    fn holds(&self, strip: Strip, i: usize) -> bool {
        strip.piece + i as u32 * 32 < self.row_pieces
    }
}

/// A strip of a matrix.
#[derive(Clone, Copy)]
struct Strip {
    row: u32,
    /// This thread's first piece of the row; the others are 32, 64, 96 further.
    piece: u32,
}

/// Converts strips `first, first + warps of the grid, ..`, times `2^-exponent`; returns the first index of the next matrix.
///
/// # Safety
/// The matrix is as described, `out` is accessed by nobody else.
#[inline(always)]
unsafe fn convert_strips<const PARTS: usize>(m: &Matrix, exponent: i32, first: u32) -> u32 {
    let mut index = first;
    // SAFETY: the strip exists.
    unsafe {
        while index < m.strips() {
            let strip = m.strip(index);
            let e = m.row_exponent(strip);
            let v = m.load(strip);
            m.store::<PARTS>(strip, &v, e - exponent);
            index += thread::grid_dim_x() * WARPS;
        }
    }
    index - m.strips()
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
    let dec = Matrix {
        source: p.decoder_hidden_states,
        out: p.x_dec,
        rows: p.rows_dec,
        row_pieces: pieces,
        row_exponents: p.row_exponents_dec,
    };
    let enc = Matrix {
        source: p.encoder_hidden_states,
        out: p.x_enc,
        rows: p.rows_enc,
        row_pieces: cross_pieces,
        row_exponents: p.row_exponents_enc,
    };
    // SAFETY: the tensors are as in `CrossConvertParams`; what gradients writes is read when it has ended.
    unsafe {
        // The first strip of this warp, of either sequence, is loaded before gradients has ended, which only reads hidden states.
        let first = thread::block_idx_x() * WARPS + thread::thread_idx_x() / 32;
        let is_dec = first < dec.strips();
        let is_enc = !is_dec && first - dec.strips() < enc.strips();
        let mut strip = Strip { row: 0, piece: 0 };
        let mut v = [[0f32; 4]; LOADS];
        if is_dec {
            strip = dec.strip(first);
            v = dec.load(strip);
        } else if is_enc {
            strip = enc.strip(first - dec.strips());
            v = enc.load(strip);
        }
        #[cfg(target_feature = "sm_90a")]
        crate::ptx::hopper::wait_for_launch_before();
        let words = block_maxima(p);
        let exponents: [i32; 4] = from_fn(|i| scale::operand_exponent(scale::maximum_of_word(words[i])));
        let first_thread = thread::block_idx_x() == 0 && thread::thread_idx_x() == 0;
        for (i, exponent) in exponents.into_iter().enumerate() {
            stg32_if(first_thread, p.exponents.wrapping_add(i).cast(), exponent as u32);
        }
        if is_dec {
            dec.store::<PARTS>(strip, &v, dec.row_exponent(strip) - exponents[0]);
        } else if is_enc {
            enc.store::<PARTS>(strip, &v, enc.row_exponent(strip) - exponents[1]);
        }

        // No rows of weights whose guess holds.
        let again = |sequence: usize, rows| {
            if words[maxima::WEIGHTS + sequence] == words[maxima::GUESSES + sequence] { 0 } else { rows }
        };
        let weights =
            |source, out, rows, row_pieces| Matrix { source, out, rows, row_pieces, row_exponents: core::ptr::null() };
        let q = weights(p.q_weight, p.wq, again(0, q_out_dim), pieces);
        let k = weights(p.k_weight, p.wkv, again(1, kv_out_dim), cross_pieces);
        let below = kv_out_dim as usize * p.cross_hidden_size as usize;
        let v = Matrix { source: p.v_weight, out: p.wkv.map(|part| part.wrapping_add(below)), ..k };
        let next = if is_dec | is_enc { first + thread::grid_dim_x() * WARPS } else { first };
        let next = convert_strips::<PARTS>(&dec, exponents[0], next);
        let next = convert_strips::<PARTS>(&enc, exponents[1], next);
        let next = convert_strips::<PARTS>(&q, exponents[2], next);
        let next = convert_strips::<PARTS>(&k, exponents[3], next);
        convert_strips::<PARTS>(&v, exponents[3], next);
        #[cfg(target_feature = "sm_90a")]
        crate::ptx::hopper::launch_dependents();
    }
}
