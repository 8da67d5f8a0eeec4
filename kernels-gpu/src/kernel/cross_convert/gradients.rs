//! `cross_convert_gradients_*`: gradient rows, weights by guessed exponents, and the maxima that all exponents but the rows' follow from.
use core::array::from_fn;

use super::parts::store;
use super::{WARPS, block_max};
use crate::config::cross_convert::{SAMPLES, THREADS, WEIGHT_TILE_PIECES};
use crate::params::CrossConvertParams;
use crate::ptx::memory::{ldg128_l2_or_zero, ldg128_stream_or_zero, stg32_if};
use crate::scale;
use crate::tile::power_of_two::power_of_two_halves;
use cuda_std::{shared, thread};

/// Loads of hidden states that are in flight together with a token's first gradient loads.
const HIDDEN_LOADS: usize = 2;

/// A sequence of tokens, encoder or decoder; a piece is 16 bytes of fp32 (4 elements).
struct Tokens {
    /// `[batch_size, num_heads, seq_len, head_dim]`, one or two tensors (then dK and dV).
    sources: [*const f32; 2],
    /// `[rows, hidden_pieces]`.
    hidden: *const f32,
    /// Parts of `[rows, row_pieces]`.
    out: [*mut u16; 2],
    row_exponents: *mut i32,
    rows: u32,
    seq_len: u32,
    num_heads: u32,
    /// Heads that are summed.
    groups: u32,
    /// log2 of the pieces of a head.
    head_shift: u32,
    /// Pieces of a converted row that come from one source, and all of them.
    source_pieces: u32,
    row_pieces: u32,
    hidden_pieces: u32,
}

/// A token's place in the sources.
struct Token<'a> {
    tokens: &'a Tokens,
    /// Piece of head 0, element 0.
    first_piece: u64,
}

impl Token<'_> {
    /// Pieces `first, first + THREADS, ..` of the row, summed over the heads of a group in order; zeros past the row's end.
    /// `HELD * AT_ONCE` loads are in flight.
    #[inline(always)]
    unsafe fn load<const HELD: usize, const AT_ONCE: usize>(&self, first: u32) -> [[f32; 4]; HELD] {
        let t = self.tokens;
        let head_bytes = (t.seq_len as u64) << (t.head_shift + 4);
        let piece = |i: usize| first + i as u32 * THREADS;
        let mut at: [*const u8; HELD] = from_fn(|i| {
            let second = piece(i) >= t.source_pieces;
            let piece = piece(i) - if second { t.source_pieces } else { 0 };
            let head = (piece >> t.head_shift) * t.groups;
            let inside = piece & ((1 << t.head_shift) - 1);
            let offset = (self.first_piece + inside as u64) * 16 + head as u64 * head_bytes;
            if second { t.sources[1] } else { t.sources[0] }.cast::<u8>().wrapping_add(offset as usize)
        });
        let mut sum = [[0f32; 4]; HELD];
        let mut group = 0;
        while group < t.groups {
            // SAFETY: a piece below `row_pieces` and a head of the group exist in the source; both are 16-byte aligned.
            let v: [[[f32; 4]; HELD]; AT_ONCE] = from_fn(|g| {
                from_fn(|i| unsafe {
                    let ok = piece(i) < t.row_pieces && group + (g as u32) < t.groups;
                    ldg128_stream_or_zero(at[i].wrapping_add(g * head_bytes as usize), ok)
                })
            });
            for v in &v {
                for (sum, v) in sum.iter_mut().zip(v) {
                    for (sum, v) in sum.iter_mut().zip(v) {
                        *sum += *v;
                    }
                }
            }
            at = at.map(|p| p.wrapping_add(AT_ONCE * head_bytes as usize));
            group += AT_ONCE as u32;
        }
        sum
    }
}

/// Largest magnitude.
#[inline(always)]
fn largest<const N: usize>(v: &[[f32; 4]; N]) -> u32 {
    let mut m = [0; 4];
    for v in v {
        for (m, x) in m.iter_mut().zip(v) {
            *m = scale::order(*x).max(*m);
        }
    }
    scale::magnitude_of_order(m[0].max(m[1]).max(m[2].max(m[3])))
}

/// Bytes of a set of shared memory: two maxima of each warp.
const SET_BYTES: u32 = 2 * WARPS * 4;
const _: () = assert!(2 * SET_BYTES == crate::config::cross_convert::GRADIENTS_SMEM_BYTES);

/// Converts tokens `first, first + blocks, ..`; returns the largest token exponent and the first index of the next kind of work.
/// `set` is the shared-memory set of the next maximum.
///
/// # Safety
/// All threads arrive, with tensors as in [`CrossConvertParams`].
#[inline(always)]
unsafe fn convert_tokens<const HELD: usize, const AT_ONCE: usize, const PARTS: usize>(
    tokens: &Tokens,
    first: u32,
    set: &mut u32,
) -> (i32, u32) {
    let thread = thread::thread_idx_x();
    let mut maximum = i32::MIN;
    let mut row = first;
    // SAFETY: `row < rows` exists in all tensors, pieces past a row's end are neither loaded nor stored, each piece belongs to one
    // thread, and the barrier in `block_max` is reached by all threads, since `row` is the block's.
    unsafe {
        while row < tokens.rows {
            core::hint::assert_unchecked(tokens.seq_len != 0);
            let batch = row / tokens.seq_len;
            let place = row - batch * tokens.seq_len;
            let before = batch as u64 * tokens.num_heads as u64 * tokens.seq_len as u64;
            let token = Token { tokens, first_piece: (before + place as u64) << tokens.head_shift };

            let hidden = tokens.hidden.cast::<u8>().wrapping_add(row as usize * tokens.hidden_pieces as usize * 16);
            let load_hidden = |first: u32| -> [[f32; 4]; HIDDEN_LOADS] {
                from_fn(|i| {
                    let piece = first + i as u32 * THREADS;
                    ldg128_l2_or_zero(hidden.wrapping_add(piece as usize * 16), piece < tokens.hidden_pieces)
                })
            };
            let x = load_hidden(thread);
            let held = token.load::<HELD, AT_ONCE>(thread);
            let mut largest_hidden = largest(&x);
            let mut piece = thread + HIDDEN_LOADS as u32 * THREADS;
            while piece < tokens.hidden_pieces {
                largest_hidden = largest_hidden.max(largest(&load_hidden(piece)));
                piece += HIDDEN_LOADS as u32 * THREADS;
            }
            let mut largest_gradient = largest(&held);
            let mut piece = thread + HELD as u32 * THREADS;
            while piece < tokens.row_pieces {
                largest_gradient = largest_gradient.max(largest(&token.load::<HELD, AT_ONCE>(piece)));
                piece += HELD as u32 * THREADS;
            }

            let [largest_gradient, largest_hidden] =
                block_max(shared::dynamic_base() + *set, [largest_gradient, largest_hidden]);
            *set ^= SET_BYTES;
            let e = scale::row_exponent(largest_gradient);
            maximum = maximum.max(scale::token_exponent(largest_gradient, largest_hidden));
            stg32_if(thread == 0, tokens.row_exponents.wrapping_add(row as usize).cast(), e as u32);

            let factors = power_of_two_halves(-e);
            let out = row as u64 * tokens.row_pieces as u64 * 8;
            let store_pieces = |first: u32, v: &[[f32; 4]; HELD]| {
                for (i, v) in v.iter().enumerate() {
                    let piece = first + i as u32 * THREADS;
                    store::<PARTS>(piece < tokens.row_pieces, tokens.out, out + piece as u64 * 8, *v, factors);
                }
            };
            store_pieces(thread, &held);
            let mut piece = thread + HELD as u32 * THREADS;
            while piece < tokens.row_pieces {
                store_pieces(piece, &token.load::<HELD, AT_ONCE>(piece));
                piece += HELD as u32 * THREADS;
            }
            row += thread::grid_dim_x();
        }
    }
    (maximum, row - tokens.rows)
}

/// A weight tensor.
struct Weights {
    source: *const f32,
    /// Parts of the converted tensor.
    out: [*mut u16; 2],
    pieces: u64,
    /// It is stored times `2^-exponent`.
    exponent: i32,
}

impl Weights {
    /// Tiles of `WEIGHT_TILE_PIECES`.
    #[inline(always)]
    fn tiles(&self) -> u32 {
        self.pieces.div_ceil(WEIGHT_TILE_PIECES as u64) as u32
    }

    /// Largest magnitude of this thread's `N` pieces of the sample of `N * THREADS`.
    ///
    /// # Safety
    /// `source` has `pieces` readable pieces.
    #[inline(always)]
    unsafe fn sample<const N: usize>(&self) -> u32 {
        let v: [[f32; 4]; N] = from_fn(|i| {
            let index = thread::thread_idx_x() + i as u32 * THREADS;
            let piece = scale::sample_piece(index, self.pieces, N as u32 * THREADS);
            // SAFETY: only pieces below `pieces` are read.
            unsafe {
                ldg128_l2_or_zero(self.source.cast::<u8>().wrapping_add(piece as usize * 16), piece < self.pieces)
            }
        });
        largest(&v)
    }

    /// Converts tiles `first, first + blocks, ..`; returns the largest magnitude among this thread's elements and the first index of the next
    /// kind of work.
    ///
    /// # Safety
    /// `source` has `pieces` readable pieces, each part of `out` room for them, which nobody else accesses.
    #[inline(always)]
    unsafe fn convert<const PARTS: usize>(&self, first: u32) -> (u32, u32) {
        let tiles = self.tiles();
        let factors = power_of_two_halves(-self.exponent);
        let mut tile = first;
        let mut max = 0;
        while tile < tiles {
            let start = tile as u64 * WEIGHT_TILE_PIECES as u64 + thread::thread_idx_x() as u64;
            let inside = |i: usize| start + i as u64 * (THREADS as u64) < self.pieces;
            let source = self.source.cast::<u8>().wrapping_add(start as usize * 16);
            // SAFETY: only pieces below `pieces` are read and written, each by one thread.
            unsafe {
                let v: [[f32; 4]; (WEIGHT_TILE_PIECES / THREADS) as usize] =
                    from_fn(|i| ldg128_stream_or_zero(source.wrapping_add(i * THREADS as usize * 16), inside(i)));
                max = largest(&v).max(max);
                for (i, v) in v.iter().enumerate() {
                    store::<PARTS>(inside(i), self.out, (start + i as u64 * THREADS as u64) * 8, *v, factors);
                }
            }
            tile += thread::grid_dim_x();
        }
        (max, tile - tiles)
    }
}

/// The kernel.
///
/// # Safety
/// As the file head of [`super`] says.
#[inline(always)]
pub unsafe fn convert<const PARTS: usize>(p: &CrossConvertParams) {
    let head_shift = p.head_dim.trailing_zeros() - 2;
    let q_pieces = p.num_heads << head_shift;
    let kv_pieces = p.num_kv_heads << head_shift;
    // SAFETY: num_kv_heads divides num_heads and is not 0.
    unsafe { core::hint::assert_unchecked(p.num_kv_heads != 0) };
    let encoder = Tokens {
        sources: [p.grad_key_states, p.grad_value_states],
        hidden: p.encoder_hidden_states,
        out: p.dkv,
        row_exponents: p.row_exponents_enc,
        rows: p.rows_enc,
        seq_len: p.seq_len_enc,
        num_heads: p.num_heads,
        groups: p.num_heads / p.num_kv_heads,
        head_shift,
        source_pieces: kv_pieces,
        row_pieces: 2 * kv_pieces,
        hidden_pieces: p.cross_hidden_size / 4,
    };
    let decoder = Tokens {
        sources: [p.grad_query_states; 2],
        hidden: p.decoder_hidden_states,
        out: p.dq,
        row_exponents: p.row_exponents_dec,
        rows: p.rows_dec,
        seq_len: p.seq_len_dec,
        num_heads: p.num_heads,
        groups: 1,
        head_shift,
        source_pieces: q_pieces,
        row_pieces: q_pieces,
        hidden_pieces: p.hidden_size / 4,
    };
    let kv_weight_pieces = kv_pieces as u64 * p.cross_hidden_size as u64;
    let weights = |source, out, pieces| Weights { source, out, pieces, exponent: 0 };
    let mut q = weights(p.q_weight, p.wq, q_pieces as u64 * p.hidden_size as u64);
    let mut k = weights(p.k_weight, p.wkv, kv_weight_pieces);
    let mut v =
        weights(p.v_weight, p.wkv.map(|part| part.wrapping_add(kv_weight_pieces as usize * 4)), kv_weight_pieces);
    let mut set = 0;
    let mut word = thread::block_idx_x() * THREADS + thread::thread_idx_x();
    while word < p.zero_words {
        // SAFETY: inside the range.
        unsafe { stg32_if(true, p.zero.wrapping_add(word as usize).cast(), 0) };
        word += thread::grid_dim_x() * THREADS;
    }
    // SAFETY: the tensors are as in `CrossConvertParams`; the two sets of shared memory are used in turn, so a barrier lies between
    // the readers of one and its next writers.
    unsafe {
        let (top_enc, next) = convert_tokens::<2, 4, PARTS>(&encoder, thread::block_idx_x(), &mut set);
        let (top_dec, next) = convert_tokens::<4, 1, PARTS>(&decoder, next, &mut set);
        let (mut guess_q, mut guess_kv, mut top_q, mut top_kv) = (i32::MIN, i32::MIN, i32::MIN, i32::MIN);
        if next < q.tiles() + k.tiles() + v.tiles() {
            let sample_q = q.sample::<{ (SAMPLES[0] / THREADS) as usize }>();
            let sample_k = k.sample::<{ (SAMPLES[1] / THREADS) as usize }>();
            let sample_v = v.sample::<{ (SAMPLES[2] / THREADS) as usize }>();
            let samples = block_max(shared::dynamic_base() + set, [sample_q, sample_k.max(sample_v)]);
            set ^= SET_BYTES;
            [guess_q, guess_kv] = samples.map(|largest| scale::guessed_maximum(largest));
            q.exponent = scale::operand_exponent(guess_q);
            k.exponent = scale::operand_exponent(guess_kv);
            v.exponent = k.exponent;
            let (max_q, next) = q.convert::<PARTS>(next);
            let (max_k, next) = k.convert::<PARTS>(next);
            let (max_v, _) = v.convert::<PARTS>(next);
            let [max_q, max_kv] = block_max(shared::dynamic_base() + set, [max_q, max_k.max(max_v)]);
            (top_q, top_kv) =
                (scale::weight_exponent(max_q).max(guess_q), scale::weight_exponent(max_kv).max(guess_kv));
        }
        // The launch behind may start: there is nothing left to fetch that its code could delay.
        #[cfg(target_feature = "sm_90a")]
        crate::ptx::hopper::launch_dependents();
        let mut to = p.block_maxima.wrapping_add(thread::block_idx_x() as usize);
        for top in [top_dec, top_enc, top_q, top_kv, guess_q, guess_kv] {
            stg32_if(thread::thread_idx_x() == 0, to.cast(), scale::maximum_word(top) as u32);
            to = to.wrapping_add(thread::grid_dim_x() as usize);
        }
    }
}
