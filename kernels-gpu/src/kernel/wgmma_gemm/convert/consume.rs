//! What a consumer warpgroup and its publishing warp do for the conversion.
use core::array::from_fn;

use super::token::{Factors, Token, store_scaled};
use super::{Matrix, Sequence, conversion, guess_holds, row_block};
use crate::config::cross_convert::{SAMPLES, maxima};
use crate::config::wgmma::converting::{CROSS_HIDDEN_SIZE, HIDDEN_SIZE, KV_OUT_DIM, Q_OUT_DIM, ROUND_ROWS};
use crate::config::wgmma::{EXCHANGE_BYTES, EXCHANGE_OFFSET, GUESS_OFFSET, named_barrier, ready};
use crate::kernel::wgmma_gemm::consumer::Consumer;
use crate::kernel::wgmma_gemm::{Entry, list};
use crate::params_wgmma::Conversion;
use crate::ptx::hopper::{ld_relaxed_s32, named_barrier, prefetch_l1, red_add_release_if, red_max_s32_if, shfl_from};
use crate::ptx::memory::{ldg128_l2_or_zero, lds32, lds128, stg32_if, sts32_if};
use crate::ptx::sync::redux_max;
use crate::scale;
use crate::schedule::convert::{first_slot, rows_of};
use crate::schedule::item::{Item, item_kind, matrix};
use crate::tile::ring::Converted;
use cuda_std::shared;

/// Pieces that a thread has under way at once where rows are streamed.
const AT_ONCE: usize = 4;
/// Threads of a warpgroup.
pub(super) const THREADS: u32 = 128;
/// Pieces that each of them has of a token: converted gradients and hidden states, decoder and encoder.
const DECODER_PIECES: usize = (Q_OUT_DIM / 4 / THREADS) as usize;
const DECODER_HIDDEN_PIECES: usize = (HIDDEN_SIZE / 4 / THREADS) as usize;
const ENCODER_PIECES: usize = (2 * KV_OUT_DIM / 4 / THREADS) as usize;
const ENCODER_HIDDEN_PIECES: usize = (CROSS_HIDDEN_SIZE / 4 / THREADS) as usize;
/// Pieces that each of them has of the samples of q_weight, of k_weight and of v_weight.
const Q_SAMPLES: usize = (SAMPLES[0] / THREADS) as usize;
const KV_SAMPLES: usize = (SAMPLES[1] / THREADS) as usize;
const _: () = assert!(SAMPLES[1] == SAMPLES[2] && KV_OUT_DIM * CROSS_HIDDEN_SIZE / 4 >= SAMPLES[1]);
// No piece is left over. Rows are whole rounds of a warp (scale), eight of them whole rounds of both warpgroups (maximum).
const _: () = assert!(Q_OUT_DIM.is_multiple_of(4 * THREADS) && KV_OUT_DIM.is_multiple_of(2 * THREADS));
const _: () = assert!(HIDDEN_SIZE.is_multiple_of(4 * THREADS) && CROSS_HIDDEN_SIZE.is_multiple_of(4 * THREADS));
const _: () = assert!(AT_ONCE == 4 && ROUND_ROWS == 8);

/// Largest order (as [`scale::order`] says) of some elements and `other`.
#[inline(always)]
pub(super) fn largest<const N: usize>(v: &[[f32; 4]; N], other: u32) -> u32 {
    let mut m = [other, 0, 0, 0];
    for v in v {
        for (m, x) in m.iter_mut().zip(v) {
            *m = scale::order(*x).max(*m);
        }
    }
    m[0].max(m[1]).max(m[2].max(m[3]))
}

/// Pieces `first, first + step, ..` of those from shared address `base`.
///
/// # Safety
/// The stage is full and holds them.
#[inline(always)]
unsafe fn stage_pieces(base: u32, first: u32, step: u32) -> [[f32; 4]; AT_ONCE] {
    // SAFETY: as the caller promises.
    from_fn(|i| unsafe { lds128(base + (first + i as u32 * step) * 16) }.map(f32::from_bits))
}

impl Consumer<false> {
    /// All conversion items of a list, whose first one is `item`; the first item behind them.
    ///
    /// # Safety
    /// All threads of the warpgroup, with the producer at the same item; the entry converts.
    #[inline(always)]
    pub(in crate::kernel::wgmma_gemm) unsafe fn convert_all<E: Entry>(&mut self, mut item: Item) -> *const Item {
        // SAFETY: as the caller promises; behind the last item's barrier no thread of the warpgroup reads a stage any more.
        unsafe {
            self.guess_exponents::<E>();
            let mut next = list::<E>();
            while item.kind >= item_kind::WEIGHTS {
                next = next.add(1);
                prefetch_l1(next);
                self.convert::<E>(&item);
                item = *next;
            }
            Converted::new().arrive(self.thread);
            next
        }
    }

    /// A conversion item.
    ///
    /// # Safety
    /// All threads of the warpgroup, with the producer at the same item; the entry converts.
    #[inline(always)]
    unsafe fn convert<E: Entry>(&mut self, item: &Item) {
        // SAFETY: as the caller promises; the item is the same for all threads.
        unsafe {
            let c = conversion::<E>();
            match (item.kind, item.product) {
                (item_kind::TOKENS, 0) => self.tokens::<E, DECODER_PIECES, DECODER_HIDDEN_PIECES, false>(c, item),
                (item_kind::TOKENS, _) => self.tokens::<E, ENCODER_PIECES, ENCODER_HIDDEN_PIECES, true>(c, item),
                (item_kind::WEIGHTS, _) => self.weights(c, item),
                (_, matrix::DECODER | matrix::ENCODER) => self.scale::<E>(c, item),
                _ => self.weights_again::<E>(c, item),
            }
            named_barrier(named_barrier::PART_STORED + self.warpgroup, THREADS + 32);
        }
    }

    /// Converts gradients, each token of `GRADIENT * 128` and `HIDDEN * 128` pieces.
    ///
    /// # Safety
    /// As [`Consumer::convert`].
    #[inline(always)]
    unsafe fn tokens<E: Entry, const GRADIENT: usize, const HIDDEN: usize, const GROUPED: bool>(
        &mut self,
        c: &Conversion,
        item: &Item,
    ) {
        let s = &Sequence::of(c, item.product);
        let (out, row_exponents) =
            if item.product == 0 { (c.dq, c.row_exponents_dec) } else { (c.dkv, c.row_exponents_enc) };
        let mut exchange = shared::dynamic_base() + EXCHANGE_OFFSET + self.warpgroup * EXCHANGE_BYTES;
        let mut top = i32::MIN;
        let mut stages = s.stages(item);
        let mut index = 0;
        let token = Token::<GRADIENT, HIDDEN, GROUPED>::new(s, self.thread);
        // SAFETY: the stage is full; each piece and each exponent has one writer; a set of maxima is written again two barriers later.
        // The stage is given back after a barrier behind its last read by the warpgroup.
        unsafe {
            while stages.row < stages.end {
                let row = stages.row;
                let count = stages.tokens();
                let mut slot = first_slot(index, self.warpgroup);
                if slot < count {
                    self.ring.wait_full();
                } else {
                    self.ring.release_unread(self.thread);
                }
                let stage = self.ring.a();
                let unreleased = self.ring.unreleased();
                self.ring.advance();
                while slot < count {
                    let last = slot + 2 >= count;
                    let (pieces, gradient, state) = token.load(s, stage, slot);
                    let (gradient, state) = self.warpgroup_max(exchange, gradient, state);
                    exchange ^= EXCHANGE_BYTES / 2;
                    unreleased.release(self.thread, last);
                    let e = scale::row_exponent(gradient);
                    top = top.max(scale::token_exponent(gradient, state));
                    let row = row + slot;
                    stg32_if(self.thread == 0, row_exponents.wrapping_add(row as usize).cast(), e as u32);
                    let start = row as usize * s.row_pieces as usize * 8;
                    let out = out.map(|part| part.cast::<u8>().wrapping_add(start));
                    token.store::<E>(pieces, out, Factors::new(-e));
                    slot += 2;
                }
                stages.advance(count);
                index += count;
            }
            let maximum = c.maxima.wrapping_add(maxima::TOKENS + item.product as usize);
            red_max_s32_if(self.thread == 0, maximum, scale::maximum_word(top));
        }
    }

    /// Largest magnitudes over the warpgroup, from the threads' largest orders.
    ///
    /// # Safety
    /// All threads of the warpgroup. `exchange` is a set whose last readers passed a barrier since.
    #[inline(always)]
    unsafe fn warpgroup_max(&self, exchange: u32, a: u32, b: u32) -> (u32, u32) {
        // SAFETY: as the caller promises; the barrier orders the warps' stores before the loads.
        unsafe {
            let (a, b) = (redux_max(a), redux_max(b));
            let warp = self.thread / 32;
            sts32_if(self.thread % 32 == 0, exchange + warp * 4, a);
            sts32_if(self.thread % 32 == 0, exchange + 16 + warp * 4, b);
            named_barrier(named_barrier::WARPGROUP + self.warpgroup, THREADS);
            let (a, b) = (lds128(exchange), lds128(exchange + 16));
            let max = |v: [u32; 4]| scale::magnitude_of_order(v[0].max(v[1]).max(v[2].max(v[3])));
            (max(a), max(b))
        }
    }

    /// Guesses the exponents of the weights from their samples, and leaves them to the items that convert weights.
    ///
    /// # Safety
    /// All threads of the warpgroup, before their first item; the entry converts.
    #[inline(always)]
    unsafe fn guess_exponents<E: Entry>(&self) {
        // SAFETY: as the caller promises; the barrier orders the guesses before those who read them.
        unsafe {
            let c = conversion::<E>();
            let q = sample::<Q_SAMPLES>(c, matrix::Q_WEIGHT, self.thread);
            let k = sample::<KV_SAMPLES>(c, matrix::K_WEIGHT, self.thread);
            let v = sample::<KV_SAMPLES>(c, matrix::V_WEIGHT, self.thread);
            let exchange = shared::dynamic_base() + EXCHANGE_OFFSET + self.warpgroup * EXCHANGE_BYTES;
            // The second set: the first item's first maximum takes the first one, no barrier later.
            let (q, kv) =
                self.warpgroup_max(exchange + EXCHANGE_BYTES / 2, largest(&q, 0), largest(&k, largest(&v, 0)));
            for (sequence, largest) in [q, kv].into_iter().enumerate() {
                let guess = scale::maximum_word(scale::guessed_maximum(largest));
                sts32_if(self.thread == 0, self.guess(sequence as u32), guess as u32);
                red_max_s32_if(self.thread == 0, c.maxima.wrapping_add(maxima::WEIGHTS + sequence), guess);
                red_max_s32_if(self.thread == 0, c.maxima.wrapping_add(maxima::GUESSES + sequence), guess);
            }
            named_barrier(named_barrier::WARPGROUP + self.warpgroup, THREADS);
        }
    }

    /// Shared address of the warpgroup's guess, a word, of the weights of a sequence.
    #[inline(always)]
    fn guess(&self, sequence: u32) -> u32 {
        shared::dynamic_base() + GUESS_OFFSET + (self.warpgroup * 2 + sequence) * 4
    }

    /// Converts rows of weights by their guessed exponent and finds their largest element.
    ///
    /// # Safety
    /// As [`Consumer::convert`].
    #[inline(always)]
    unsafe fn weights(&mut self, c: &Conversion, item: &Item) {
        let m = Matrix::of(c, item.product);
        let row_bytes = m.row_pieces as usize * 8;
        let mut out = m.out.map(|part| part.cast::<u8>().wrapping_add(item.m0 as usize * row_bytes));
        let mut left = item.k_blocks;
        let mut order = 0;
        // SAFETY: the stage is full; each piece has one writer; maxima are reduced only.
        unsafe {
            let guess = lds32(self.guess(matrix::sequence(item.product))) as i32;
            let factors = Factors::new(-scale::operand_exponent(scale::maximum_of_word(guess)));
            while left > 0 {
                let rows = m.per_stage.min(left);
                let pieces = rows * m.row_pieces;
                self.ring.wait_full();
                let mut first = 0;
                while first < pieces {
                    let mine = first + self.warpgroup * THREADS + self.thread;
                    let v = stage_pieces(self.ring.a(), mine, 2 * THREADS);
                    order = largest(&v, order);
                    for (i, v) in factors.times(v).iter().enumerate() {
                        store_scaled(out, (mine as usize + i * 2 * THREADS as usize) * 8, *v);
                    }
                    first += AT_ONCE as u32 * 2 * THREADS;
                }
                self.release_read_stage();
                out = out.map(|part| part.wrapping_add(rows as usize * row_bytes));
                left -= rows;
            }
            let top = scale::weight_exponent(scale::magnitude_of_order(redux_max(order)));
            let maximum = c.maxima.wrapping_add(maxima::WEIGHTS + matrix::sequence(item.product) as usize);
            red_max_s32_if(self.thread % 32 == 0, maximum, scale::maximum_word(top));
        }
    }

    /// Converts rows of weights again, if their exponent was guessed too low.
    ///
    /// # Safety
    /// As [`Consumer::convert`].
    #[inline(always)]
    unsafe fn weights_again<E: Entry>(&mut self, c: &Conversion, item: &Item) {
        // SAFETY: the producer has acquired the maxima before it filled the stage, which is empty.
        unsafe {
            self.ring.wait_full();
            let holds = guess_holds(c, matrix::sequence(item.product));
            self.release_read_stage();
            if !holds {
                self.scale::<E>(c, item);
            }
        }
    }

    /// Converts rows of weights or hidden states.
    ///
    /// # Safety
    /// As [`Consumer::convert`].
    #[inline(always)]
    unsafe fn scale<E: Entry>(&mut self, c: &Conversion, item: &Item) {
        let m = Matrix::of(c, item.product);
        let sequence = matrix::sequence(item.product);
        let (row_exponents, maximum) = if !matrix::is_hidden(item.product) {
            (core::ptr::null_mut(), maxima::WEIGHTS + sequence as usize)
        } else {
            (if sequence == 0 { c.row_exponents_dec } else { c.row_exponents_enc }, maxima::TOKENS + sequence as usize)
        };
        // This warp's rows of the item: `class`, `class + 8`, ..; every second one is of this warpgroup. Lane `l` has the exponent of the `l`th.
        let class = self.warpgroup + self.thread / 32 * 2;
        let lane = self.thread % 32;
        let last = item.k_blocks - 1;
        let mut first = 0; // row of the item that the stage begins with
        // SAFETY: the stage is full; exponents and maxima are final, which the producer has acquired; each piece has one writer.
        unsafe {
            self.ring.wait_full();
            let word = ld_relaxed_s32(c.maxima.wrapping_add(maximum));
            let mine = (class + 8 * lane).min(last);
            let mut exponents = 0;
            if !row_exponents.is_null() {
                exponents = ld_relaxed_s32(row_exponents.wrapping_add((item.m0 + mine) as usize));
            }
            exponents -= scale::operand_exponent(scale::maximum_of_word(word));
            while first <= last {
                let rows = m.per_stage.min(last + 1 - first);
                self.ring.wait_full();
                let mut row = (class.wrapping_sub(first)) & 7;
                while row < rows {
                    let exponent = shfl_from(exponents as u32, (first + row) / 8) as i32;
                    let factors = Factors::new(exponent);
                    let base = self.ring.a() + row * m.row_pieces * 16;
                    let start = (item.m0 + first + row) as usize * m.row_pieces as usize * 8;
                    let mut piece = lane;
                    while piece - lane < m.row_pieces {
                        let v = stage_pieces(base, piece, 32);
                        let at = start + piece as usize * 8;
                        let out = m.out.map(|part| part.cast::<u8>().wrapping_add(at));
                        for (i, v) in factors.times(v).iter().enumerate() {
                            store_scaled(out, i * 32 * 8, *v);
                        }
                        piece += AT_ONCE as u32 * 32;
                    }
                    row += 8;
                }
                self.release_read_stage();
                first += rows;
            }
        }
    }
}

/// A thread's `N` pieces of the sample of `N * THREADS` of a weight tensor.
///
/// # Safety
/// The tensor has more pieces.
#[inline(always)]
unsafe fn sample<const N: usize>(c: &Conversion, weights: u32, thread: u32) -> [[f32; 4]; N] {
    let m = Matrix::of(c, weights);
    let pieces = m.row_pieces as u64 * if weights == matrix::Q_WEIGHT { Q_OUT_DIM } else { KV_OUT_DIM } as u64;
    from_fn(|i| {
        let piece = scale::sample_piece(thread + i as u32 * THREADS, pieces, N as u32 * THREADS);
        // SAFETY: inside the tensor.
        unsafe { ldg128_l2_or_zero(m.source.cast::<u8>().wrapping_add(piece as usize * 16), true) }
    })
}

/// Publishing warp of a consumer warpgroup: counts its rows of a conversion item as done.
///
/// # Safety
/// All lanes of one warp, for each conversion item once; the entry converts.
#[inline(always)]
pub(in crate::kernel::wgmma_gemm) unsafe fn publish<E: Entry>(item: &Item, warpgroup: u32, lane: u32) {
    // SAFETY: the warpgroup arrives after its last store of the item (`Consumer::convert`); counters are the launch's.
    unsafe {
        named_barrier(named_barrier::PART_STORED + warpgroup, THREADS + 32);
        let c = conversion::<E>();
        let rows = rows_of(item.k_blocks, warpgroup);
        let sequence = if item.kind == item_kind::TOKENS { item.product } else { matrix::sequence(item.product) };
        let counter = sequence
            + match item.kind {
                item_kind::TOKENS => ready::TOKENS,
                item_kind::WEIGHTS => ready::WEIGHT_MAXIMA,
                _ if matrix::is_hidden(item.product) => ready::HIDDEN,
                _ => ready::WEIGHTS,
            };
        let (block, _) = row_block(c, sequence, item.m0);
        let tokens = item.kind == item_kind::TOKENS;
        red_add_release_if((lane == 0) & tokens, c.ready.wrapping_add(block as usize), rows);
        red_add_release_if(lane == 0, c.ready.wrapping_add(counter as usize), rows);
    }
}
