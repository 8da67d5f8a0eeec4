//! `attention_flash_forward`: O and the statistics of one tile of 128 queries of one head.
//!
//! Formula   P = softmax(scale Q K^T)   O = P V   delta = rowsum(dA O)
//! Grid      Any number of blocks, best one an SM: block `b` of `B` takes slots `b`, `b + B`, .. of all heads' (the tiles of a head follow
//!           each other: those worked on at a time read the same keys, while they are in L2)
//! Block     384 threads. Warpgroup 0: thread 0 loads. Warpgroups 1 and 2: consumers, 64 queries each; while the products with V of one
//!           key tile are in flight, the exponentials of the next one are computed. The chunk's last tile comes first: it alone is masked
//! Shared    bytes: 0 stages `[2]` of Q, 16384 each; 32768 stages `[4]` of K and V, 32768 each; 163840 rows of O on their way out, 2048 a
//!           warp; 180224 mbarriers of K and V, `full[4]`, `empty[4]`; 180288 of Q
//! Registers 168 at launch; 40 for warpgroup 0 and 232 for the consumers after `setmaxnreg`
//! Preconditions
//!           `attention_flash_convert` has run
//! Rounding  p = 2^15 exp(logit - m) to fp16, m a power of two that is at most twice the running maximum of the exponentials: rescaling is
//!           exact. rowsum(p) from the unrounded fp32 values. delta from the unrounded O and dA as rounded to fp16
use super::pipeline::Pipeline;
use super::turn::Turn;
use super::{Operand, Tile, exponents, operand_tile};
use crate::config::attention_flash::{
    CONSUMER_REGISTERS, PRODUCER_REGISTERS, STATISTICS_FLOATS, THREADS, TILE_BYTES, TILE_ROWS, forward as config,
};
use crate::config::wgmma::CHUNK_BYTES;
use crate::kernel::attention_math::{DS_EXPONENT, P_EXPONENT, logit_factor, split_scale};
use crate::params::FlashParams;
use crate::ptx::convert::{ceil, ex2, f16x2_to_f32, fma, lg2, rcp, select};
use crate::ptx::hopper::{
    bulk_load, mbarrier_arrive_expect_tx, mbarrier_arrive_if, pin, setmaxnreg_dec, setmaxnreg_inc, wgmma_commit,
    wgmma_fence, wgmma_wait,
};
use crate::ptx::memory::stg32_if;
use crate::ptx::sync::shfl_xor;
use crate::ptx::wgmma_f16::{K_MAJOR, MN_MAJOR, wgmma_n64_from_registers, wgmma_n128};
use crate::tile::descriptor::Block;
use crate::tile::fragment::{Accumulator, Lanes, Pow2, ROWS_16_BYTES, ZERO, pack_a, pow2, scale_rows, store_bf16};
use crate::tile::layout::swizzle_128b;
use core::num::NonZero;
use cuda_std::kernel;
use cuda_std::shared::dynamic_base;
use cuda_std::thread::{block_idx_x, grid_dim_x, sync_threads, thread_idx_x};

/// A warpgroup's 64 by 128 scores: sixteen C fragments a warp.
type Scores = [[f32; 4]; 16];
/// K and V.
type Stages = Pipeline<{ config::STAGES }>;
/// Q.
type QueryStages = Pipeline<{ config::QUERY_STAGES }>;

/// See the file's head.
///
/// # Safety
/// As [`attention_flash_largest`](super::largest::attention_flash_largest); `attention_flash_convert` has run on the same parameters.
#[kernel(max_threads = THREADS, min_blocks_per_sm = 1, barriers = 3)]
pub unsafe fn attention_flash_forward(params: FlashParams) {
    let t = thread_idx_x();
    let stages = Stages::new(dynamic_base() + config::BARRIERS_OFFSET);
    let queries = QueryStages::new(dynamic_base() + config::QUERY_BARRIERS_OFFSET);
    // SAFETY: the roles are taken by the threads that they ask for; the mbarriers are initialised before the block barrier.
    unsafe {
        if t == 0 {
            stages.init(1, 2);
            queries.init(1, 2);
        }
        sync_threads();
        if t / 128 == 0 {
            setmaxnreg_dec::<PRODUCER_REGISTERS>();
            if t == 0 {
                let mut producer = Producer { stages, queries };
                let mut number = block_idx_x();
                while number < params.num_slots * params.attention.num_heads {
                    let tile = query_tile(&params, number);
                    if tile.len > 0 {
                        producer.produce(&params, &tile);
                    }
                    number += grid_dim_x();
                }
            }
        } else {
            setmaxnreg_inc::<CONSUMER_REGISTERS>();
            let turn = Turn::start(t - 128);
            let mut consumer = Consumer { stages, queries, turn, thread: t - 128 };
            let mut number = block_idx_x();
            while number < params.num_slots * params.attention.num_heads {
                let tile = query_tile(&params, number);
                if tile.len > 0 {
                    consumer.consume(&params, &tile);
                }
                number += grid_dim_x();
            }
        }
    }
}

/// Tile of place number `number`, the heads one after the other; it may have none.
///
/// # Safety
/// There are so many.
#[inline(always)]
unsafe fn query_tile(params: &FlashParams, number: u32) -> Tile {
    // SAFETY: as the caller promises.
    unsafe {
        let num_slots = NonZero::new_unchecked(params.num_slots);
        Tile::load(params, number % num_slots, number / num_slots)
    }
}

/// Key tile number `i` in the order of the loop: the chunk's last, then 0, 1, ..
#[inline(always)]
fn key_tile(tile: &Tile, i: u32) -> u32 {
    if i == 0 { tile.tiles_in_chunk() - 1 } else { i - 1 }
}

/// The loading thread.
struct Producer {
    stages: Stages,
    queries: QueryStages,
}

impl Producer {
    /// Loads Q, then every tile of K and V of the chunk.
    ///
    /// # Safety
    /// One thread; the operands are complete.
    #[inline(always)]
    unsafe fn produce(&mut self, params: &FlashParams, tile: &Tile) {
        let (queries, stages) = (&mut self.queries, &mut self.stages);
        // SAFETY: the buffers are empty when they are filled, and as large as what is announced and loaded.
        unsafe {
            queries.wait_empty();
            mbarrier_arrive_expect_tx(queries.full(), TILE_BYTES);
            let q = operand_tile(params, tile.place(params, tile.index), Operand::Q);
            bulk_load(dynamic_base() + queries.stage() * TILE_BYTES, q.cast(), TILE_BYTES, queries.full());
            queries.advance();
            for i in 0..tile.tiles_in_chunk() {
                let place = tile.place(params, key_tile(tile, i));
                stages.wait_empty();
                mbarrier_arrive_expect_tx(stages.full(), 2 * TILE_BYTES);
                bulk_load(keys(stages), operand_tile(params, place, Operand::K).cast(), TILE_BYTES, stages.full());
                bulk_load(values(stages), operand_tile(params, place, Operand::V).cast(), TILE_BYTES, stages.full());
                stages.advance();
            }
        }
    }
}

/// Shared address of K in the stage.
#[inline(always)]
fn keys(stages: &Stages) -> u32 {
    dynamic_base() + config::STAGES_OFFSET + stages.stage() * 2 * TILE_BYTES
}

/// Shared address of V in the stage.
#[inline(always)]
fn values(stages: &Stages) -> u32 {
    keys(stages) + TILE_BYTES
}

/// Running maximum (an integer, in base 2) and this lane's share of rowsum(p), of rows `g` and `g + 8`.
struct Softmax {
    max: [f32; 2],
    sum: [f32; 2],
    to_logits: f32,
}

impl Softmax {
    /// Scores become p; what was accumulated before is to be multiplied by the result, row by row.
    ///
    /// # Safety
    /// All lanes of the warp arrive.
    #[inline(always)]
    unsafe fn update(&mut self, scores: &mut Scores) -> [f32; 2] {
        let mut alpha = [0f32; 2];
        for r in 0..2 {
            let mut tops = [f32::NEG_INFINITY; 2];
            for s in scores.iter() {
                tops[0] = tops[0].max(s[2 * r]);
                tops[1] = tops[1].max(s[2 * r + 1]);
            }
            let mut top = tops[0].max(tops[1]);
            // SAFETY: as the caller promises.
            unsafe {
                top = top.max(shfl_xor::<1>(top));
                top = top.max(shfl_xor::<2>(top));
            }
            let max = self.max[r].max(ceil(top * self.to_logits));
            alpha[r] = ex2(self.max[r] - max);
            self.max[r] = max;
            let shift = P_EXPONENT as f32 - max;
            let mut sums = [0f32; 2];
            for s in scores.iter_mut() {
                for c in 0..2 {
                    s[2 * r + c] = ex2(fma(s[2 * r + c], self.to_logits, shift));
                    sums[c] += s[2 * r + c];
                }
            }
            self.sum[r] = fma(self.sum[r], alpha[r], sums[0] + sums[1]);
        }
        alpha
    }

    /// Completes the sums; returns their inverses.
    ///
    /// # Safety
    /// As [`Softmax::update`].
    #[inline(always)]
    unsafe fn finish(&mut self) -> [f32; 2] {
        let mut inverse = [0f32; 2];
        for r in 0..2 {
            // SAFETY: as the caller promises.
            unsafe {
                self.sum[r] += shfl_xor::<1>(self.sum[r]);
                self.sum[r] += shfl_xor::<2>(self.sum[r]);
            }
            inverse[r] = rcp(self.sum[r]);
        }
        inverse
    }
}

/// `scores = Q K^T (+ scores if accumulate is 1)`, in flight.
///
/// # Safety
/// All threads of the warpgroup; both tiles are complete.
#[inline(always)]
unsafe fn multiply_keys(scores: &mut Scores, q: u32, k: u32, accumulate: u32) {
    // SAFETY: the blocks lie in the tiles.
    unsafe {
        for i in 0..4 {
            let accumulate = accumulate | (i > 0) as u32;
            wgmma_n128::<K_MAJOR, K_MAJOR>(scores, Block::new(q, false, i), Block::new(k, false, i), accumulate);
        }
        wgmma_commit();
    }
}

/// `o += p V`, in flight.
///
/// # Safety
/// As [`multiply_keys`].
#[inline(always)]
unsafe fn multiply_values(o: &mut Accumulator, p: &[[u32; 4]; 8], v: u32) {
    // SAFETY: the blocks lie in the tile.
    unsafe {
        for i in 0..8 {
            wgmma_n64_from_registers::<MN_MAJOR>(o, p[i], Block::new(v, true, i as u32));
        }
        wgmma_commit();
    }
}

/// No instruction, see [`pin`]: the fragments are read and written only after this point.
///
/// # Safety
/// None.
#[inline(always)]
pub(super) unsafe fn pin_all<const N: usize>(fragments: &mut [[f32; 4]; N]) {
    for x in fragments.as_flattened_mut() {
        // SAFETY: emits a comment.
        unsafe { pin(x) }
    }
}

/// p as A fragments.
#[inline(always)]
fn pack(scores: &Scores) -> [[u32; 4]; 8] {
    let mut p = [[0u32; 4]; 8];
    for i in 0..8 {
        p[i] = pack_a(&[scores[2 * i], scores[2 * i + 1]]);
    }
    p
}

/// A thread of a consumer warpgroup.
struct Consumer {
    stages: Stages,
    queries: QueryStages,
    turn: Turn,
    /// Counts those of both warpgroups.
    thread: u32,
}

impl Consumer {
    /// The warpgroup's 64 queries of a tile.
    ///
    /// # Safety
    /// All threads of the warpgroup, with the producer at the same tile.
    #[inline(always)]
    unsafe fn consume(&mut self, params: &FlashParams, tile: &Tile) {
        let (warpgroup, warp, lane) = (self.turn.warpgroup(), self.thread / 32, self.thread % 32);
        let leader = self.thread % 128 == 0;
        let (queries, stages) = (&mut self.queries, &mut self.stages);
        let turn = self.turn;
        let place = tile.place(params, tile.index);
        let q = dynamic_base() + queries.stage() * TILE_BYTES + warpgroup * CHUNK_BYTES;
        // SAFETY: buffers are full when they are read and released when the products that read them are complete; accumulators are pinned
        // after each wait; each warp stages its own rows.
        unsafe {
            let e = exponents(params, place);
            let to_logits = logit_factor(params.attention.scale, e[Operand::Q as usize] + e[Operand::K as usize]);
            let mut softmax = Softmax { max: [f32::NEG_INFINITY; 2], sum: [0.0; 2], to_logits };
            let mut o = ZERO;
            let mut scores = column_mask(tile.len - key_tile(tile, 0) * TILE_ROWS, lane);
            queries.wait_full();
            stages.wait_full();
            turn.wait();
            wgmma_fence();
            multiply_keys(&mut scores, q, keys(stages), 1);
            turn.pass();
            wgmma_wait::<0>();
            pin_all(&mut scores);
            softmax.update(&mut scores);
            let mut p = pack(&scores);
            let mut previous = *stages;
            stages.advance();
            for _ in 1..tile.tiles_in_chunk() {
                stages.wait_full();
                turn.wait();
                wgmma_fence();
                multiply_keys(&mut scores, q, keys(stages), 0);
                multiply_values(&mut o, &p, values(&previous));
                turn.pass();
                wgmma_wait::<1>();
                pin_all(&mut scores);
                let alpha = softmax.update(&mut scores);
                wgmma_wait::<0>();
                pin_all(&mut o);
                mbarrier_arrive_if(leader, previous.empty());
                scale_rows(&mut o, alpha[0], alpha[1]);
                p = pack(&scores);
                previous = *stages;
                stages.advance();
            }
            mbarrier_arrive_if(leader, queries.empty());
            queries.advance();
            wgmma_fence();
            multiply_values(&mut o, &p, values(&previous));
            wgmma_wait::<0>();
            pin_all(&mut o);
            mbarrier_arrive_if(leader, previous.empty());

            let inverse = softmax.finish();
            scale_rows(&mut o, inverse[0], inverse[1]);
            store_statistics(params, tile, &o, &softmax, warp, lane);
            let stage = dynamic_base() + config::O_OFFSET + ROWS_16_BYTES * warp;
            let factor = Pow2::new(-e[Operand::V as usize]);
            store_bf16(&o, factor, stage, Lanes::new(lane), tile.o_rows(params, 16 * warp));
        }
    }
}

/// What the other kernels need of each of the warp's 16 queries.
///
/// # Safety
/// All lanes of the warp; `softmax` is finished, and `o` divided by its sums.
#[inline(always)]
unsafe fn store_statistics(
    params: &FlashParams,
    tile: &Tile,
    o: &Accumulator,
    softmax: &Softmax,
    warp: u32,
    lane: u32,
) {
    let place = tile.place(params, tile.index);
    let d_attn = operand_tile(params, place, Operand::DAttn).wrapping_add((ROWS_16_BYTES * warp) as usize);
    let statistics = params.statistics.wrapping_add(place * STATISTICS_FLOATS as usize);
    let delta_unit = -pow2(DS_EXPONENT - P_EXPONENT) * split_scale(params.attention.scale).0;
    // SAFETY: the rows of the place are the warp's own.
    unsafe {
        let delta = delta(o, d_attn, lane);
        for r in 0..2 {
            let row = 16 * warp + lane / 4 + 8 * r as u32;
            let exists = row < tile.rows_from(0);
            let shift = (2 * P_EXPONENT) as f32 - softmax.max[r] - lg2(softmax.sum[r]);
            let at = statistics.wrapping_add(row as usize) as *mut u8;
            let writes = lane % 4 == 0;
            stg32_if(writes, at, select(exists, shift.to_bits(), f32::NEG_INFINITY.to_bits()));
            let minus_delta = select(exists, (delta[r] * delta_unit).to_bits(), 0);
            stg32_if(writes, at.wrapping_add(4 * TILE_ROWS as usize), minus_delta);
        }
    }
}

/// Scores to start from: -inf in columns from `len` on, else 0.
#[inline(always)]
fn column_mask(len: u32, lane: u32) -> Scores {
    let mut scores = [[0f32; 4]; 16];
    for j in 0..16 {
        for c in 0..2 {
            let masked = 8 * j as u32 + 2 * (lane % 4) + c as u32 >= len;
            let start = f32::from_bits(select(masked, f32::NEG_INFINITY.to_bits(), 0));
            scores[j][c] = start;
            scores[j][c + 2] = start;
        }
    }
    scores
}

/// `rowsum(dA o)` of rows `g` and `g + 8` of the warp's 16 rows of dA at `d_attn`, in every lane of the row.
///
/// # Safety
/// All lanes of the warp; the operand tiles are complete.
#[inline(always)]
unsafe fn delta(o: &Accumulator, d_attn: *const u8, lane: u32) -> [f32; 2] {
    let mut delta = [0f32; 2];
    // SAFETY: inside the tile, as the caller promises.
    unsafe {
        for r in 0..2 {
            let row = lane / 4 + 8 * r as u32;
            for j in 0..8 {
                let at = d_attn.wrapping_add((swizzle_128b(row, j as u32) + 4 * (lane % 4)) as usize);
                let (low, high) = f16x2_to_f32(*at.cast::<u32>());
                delta[r] = fma(low, o[j][2 * r], fma(high, o[j][2 * r + 1], delta[r]));
            }
            delta[r] += shfl_xor::<1>(delta[r]);
            delta[r] += shfl_xor::<2>(delta[r]);
        }
    }
    delta
}
