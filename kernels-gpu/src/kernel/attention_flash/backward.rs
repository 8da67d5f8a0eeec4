//! `attention_flash_backward`: dK and dV of one tile of 128 keys of one head, and its share of dQ.
//!
//! Formula   P^T = exp(scale K Q^T + shift)   dP^T = V dA^T   dS^T = P^T (dP^T - delta)
//!           dV = P^T dA   dK = scale dS^T Q   dQ += scale dS K
//! Grid      num_tiles * num_heads. Block number `b` to begin takes key tile `b / num_heads` of the table and head `b % num_heads`
//! Block     384 threads. Warpgroup 0: thread 0 loads; lane 0 of warps 2 and 3 adds the halves of dQ (64 queries each) to `params.dq`.
//!           Warpgroups 1 and 2: consumers, 64 keys each for everything but dQ, of which each computes 64 queries from the dS of both
//! Order     The tiles of keys of a chunk and head are added to a tile of dQ one after the other, counted by `params.counters`: the result
//!           does not depend on timing. A block waits only for blocks that began before it, so that this ends whatever runs at a time
//! Shared    bytes: 0 K, V 2 x 16384; 32768 stages `[2]` of Q and dA, 32768 each; 98304 dS `[2][2 halves of queries][128 keys][64]`;
//!           163840 halves of dQ, 2 x 16384; 196608 statistics `[2]`, 1024 each; 198656 column sums of dK and dV, 2 x 256 a warp;
//!           202752 mbarriers `full[2]`, `empty[2]`, of K and V, of dQ twice; the block's number. The warps' parts of dS stage the stores
//! Registers 168 at launch; 40 for warpgroup 0 and 232 for the consumers after `setmaxnreg`
//! Preconditions
//!           `attention_flash_forward` has run
//! Rounding  P (2^15 times) and dS (2^(dA's + V's exponent - 22) times, which its bound allows) to fp16; dS from the unrounded P; fp32 sums;
//!           column sums before, dK and dV by rounding to bf16
use super::forward::pin_all;
use super::pipeline::Pipeline;
use super::{Operand, Tile, exponents, operand_tile};
use crate::config::attention::HEAD_DIM;
use crate::config::attention_flash::{
    CONSUMER_REGISTERS, DQ_FLOATS, DQ_HALF_BYTES, PRODUCER_REGISTERS, STATISTICS_BYTES, STATISTICS_FLOATS, THREADS,
    TILE_BYTES, TILE_ROWS, backward as config, named_barrier,
};
use crate::config::wgmma::CHUNK_BYTES;
use crate::kernel::attention_math::{DS_EXPONENT, P_EXPONENT, logit_factor, split_scale};
use crate::params::FlashParams;
use crate::ptx::convert::{ex2, fma, select};
use crate::ptx::hopper::{
    atomic_add, bulk_add, bulk_commit_if, bulk_load, bulk_store, bulk_wait, bulk_wait_read_if, fence_proxy_async,
    fence_proxy_async_shared, ld_acquire, mbarrier_arrive_expect_tx, mbarrier_arrive_if, named_barrier,
    red_add_release_if, setmaxnreg_dec, setmaxnreg_inc, wgmma_commit, wgmma_fence, wgmma_wait,
};
use crate::ptx::memory::{lds32, lds64_f32, sts32, sts128};
use crate::ptx::wgmma_f16::{K_MAJOR, MN_MAJOR, wgmma_n64, wgmma_n64_from_registers, wgmma_n128};
use crate::tile::descriptor::{descriptor, k16_step};
use crate::tile::fragment::{
    Accumulator, Lanes, Pow2, ROWS_16_BYTES, ZERO, pack_a, pow2, scale_rows, store_bf16, store_column_sums,
    store_fragment,
};
use cuda_std::kernel;
use cuda_std::shared::dynamic_base;
use cuda_std::thread::{sync_threads, thread_idx_x};

/// A warpgroup's 64 by 128 scores: sixteen C fragments a warp.
type Scores = [[f32; 4]; 16];
/// Q, dA and their statistics.
type Stages = Pipeline<{ config::STAGES }>;

/// Exponent of the power of two that dS is multiplied by; `e` are the exponents of the operands.
#[inline(always)]
pub(super) fn ds_unit(e: &[i32; 4]) -> i32 {
    e[Operand::DAttn as usize] + e[Operand::V as usize] + DS_EXPONENT
}

/// The mbarriers of K and V.
#[inline(always)]
fn keys_and_values() -> Pipeline<1> {
    Pipeline::new(dynamic_base() + config::KEYS_BARRIERS_OFFSET)
}

/// The mbarriers of a half of dQ.
#[inline(always)]
fn dq_half(half: u32) -> Pipeline<1> {
    Pipeline::new(dynamic_base() + config::DQ_BARRIERS_OFFSET + 16 * half)
}

/// See the file's head.
///
/// # Safety
/// As [`attention_flash_largest`](super::largest::attention_flash_largest); `attention_flash_forward` has run on the same parameters.
#[kernel(max_threads = THREADS, min_blocks_per_sm = 1, barriers = 3)]
pub unsafe fn attention_flash_backward(params: FlashParams) {
    let t = thread_idx_x();
    let stages = Stages::new(dynamic_base() + config::BARRIERS_OFFSET);
    // SAFETY: the roles are taken by the threads that they ask for; the mbarriers are initialised, and the block's number is stored, before
    // the block barrier.
    unsafe {
        if t == 0 {
            stages.init(1, 2);
            keys_and_values().init(1, 1);
            dq_half(0).init(128, 1);
            dq_half(1).init(128, 1);
            let slots = params.num_tiles as usize * params.num_heads as usize;
            let number = atomic_add(params.counters.wrapping_add(2 * slots), 1);
            sts32(dynamic_base() + config::TICKET_OFFSET, number);
        }
        sync_threads();
        let number = lds32(dynamic_base() + config::TICKET_OFFSET);
        let tile = Tile::load(&params, number / params.num_heads, number % params.num_heads);
        if t / 128 == 0 {
            setmaxnreg_dec::<PRODUCER_REGISTERS>();
            if t == 0 {
                produce(&params, &tile, stages);
            } else if t % 32 == 0 && t >= 64 {
                add_dq(&params, &tile, t / 32 - 2);
            }
        } else {
            setmaxnreg_inc::<CONSUMER_REGISTERS>();
            consume(&params, &tile, stages, t - 128);
        }
    }
}

/// Loads K and V, then every tile of Q and dA.
///
/// # Safety
/// One thread; operands and statistics are complete.
#[inline(always)]
unsafe fn produce(params: &FlashParams, tile: &Tile, mut stages: Stages) {
    // SAFETY: the buffers are empty when they are filled, and as large as what is announced and loaded.
    unsafe {
        let (base, full) = (dynamic_base(), keys_and_values().full());
        let slot = tile.slot(params, tile.index);
        mbarrier_arrive_expect_tx(full, 2 * TILE_BYTES);
        bulk_load(base, operand_tile(params, slot, Operand::K).cast(), TILE_BYTES, full);
        bulk_load(base + TILE_BYTES, operand_tile(params, slot, Operand::V).cast(), TILE_BYTES, full);
        for i in 0..tile.tiles_in_chunk() {
            let slot = tile.slot(params, i);
            let q = base + config::STAGES_OFFSET + stages.stage() * 2 * TILE_BYTES;
            let to = base + config::STATISTICS_OFFSET + stages.stage() * STATISTICS_BYTES;
            let statistics = params.statistics.wrapping_add(slot * STATISTICS_FLOATS as usize);
            stages.wait_empty();
            mbarrier_arrive_expect_tx(stages.full(), 2 * TILE_BYTES + STATISTICS_BYTES);
            bulk_load(q, operand_tile(params, slot, Operand::Q).cast(), TILE_BYTES, stages.full());
            bulk_load(to, statistics, STATISTICS_BYTES, stages.full());
            bulk_load(q + TILE_BYTES, operand_tile(params, slot, Operand::DAttn).cast(), TILE_BYTES, stages.full());
            stages.advance();
        }
    }
}

/// Adds half `half` of every tile of dQ to what the chunk's earlier key tiles have added; the first one stores it.
///
/// # Safety
/// One thread.
#[inline(always)]
unsafe fn add_dq(params: &FlashParams, tile: &Tile, half: u32) {
    let mut dq = dq_half(half);
    let from = dynamic_base() + config::DQ_OFFSET + half * DQ_HALF_BYTES;
    // SAFETY: the half is full when it is read. The blocks of the chunk's earlier key tiles have begun, so that the wait ends; it orders their
    // additions before this one, and this one before the count.
    unsafe {
        for i in 0..tile.tiles_in_chunk() {
            let slot = tile.slot(params, i);
            let counter = params.counters.wrapping_add(2 * slot + half as usize);
            let to = params.dq.wrapping_add(slot * DQ_FLOATS as usize + (half * DQ_FLOATS / 2) as usize);
            dq.wait_full();
            while ld_acquire(counter) != tile.index {}
            fence_proxy_async();
            if tile.index == 0 {
                bulk_store(to, from, DQ_HALF_BYTES);
            } else {
                bulk_add(to, from, DQ_HALF_BYTES);
            }
            bulk_commit_if(true);
            bulk_wait_read_if(true);
            mbarrier_arrive_if(true, dq.empty());
            bulk_wait();
            fence_proxy_async();
            red_add_release_if(true, counter, 1);
            dq.advance();
        }
    }
}

/// `scores = A B^T (+ scores if accumulate is 1)`, A 64 rows and B 128 rows of 64, in flight.
///
/// # Safety
/// All threads of the warpgroup; both tiles are complete.
#[inline(always)]
unsafe fn multiply_rows(scores: &mut Scores, a: u32, b: u32, accumulate: u32) {
    let (a, b, step) = (descriptor(a), descriptor(b), k16_step(false));
    // SAFETY: the descriptors stay inside the tiles.
    unsafe {
        wgmma_n128::<K_MAJOR, K_MAJOR>(scores, a, b, accumulate);
        for i in 1..4 {
            wgmma_n128::<K_MAJOR, K_MAJOR>(scores, a + i * step, b + i * step, 1);
        }
        wgmma_commit();
    }
}

/// `sum += A B`, A from registers, B 128 rows of 64, in flight.
///
/// # Safety
/// As [`multiply_rows`].
#[inline(always)]
unsafe fn multiply_columns(sum: &mut Accumulator, a: &[[u32; 4]; 8], b: u32) {
    let b = descriptor(b);
    // SAFETY: the descriptors stay inside the tile.
    unsafe {
        for i in 0..8 {
            wgmma_n64_from_registers::<MN_MAJOR>(sum, a[i], b + i as u64 * k16_step(true));
        }
    }
}

/// A consumer warpgroup; `t` counts the threads of both.
///
/// # Safety
/// All threads of the warpgroup, with the others at the same tile.
#[inline(always)]
unsafe fn consume(params: &FlashParams, tile: &Tile, mut stages: Stages, t: u32) {
    let (warpgroup, warp, lane) = (t / 128, t / 32, t % 32);
    let leader = t % 128 == 0;
    let base = dynamic_base();
    let lanes = Lanes::new(lane);
    let row = 16 * warp;
    let (k, v) = (base, base + TILE_BYTES);
    let own = warpgroup * CHUNK_BYTES;
    // SAFETY: buffers are full when they are read and released when the products that read them are complete; accumulators are pinned
    // after each wait; rows past the chunk's end are predicated off. A buffer of dS is written again after the next tile's barrier,
    // when both warpgroups have finished the products that read it.
    unsafe {
        let e = exponents(params, tile.slot(params, tile.index));
        let to_logits = logit_factor(params.scale, e[Operand::Q as usize] + e[Operand::K as usize]);
        let (mantissa, scale_exponent) = split_scale(params.scale);
        let unit = pow2(DS_EXPONENT - P_EXPONENT) * mantissa;
        let mask = [0, 8].map(|below| {
            let exists = row + lane / 4 + below < tile.len - tile.index * TILE_ROWS;
            f32::from_bits(select(exists, 0, f32::NEG_INFINITY.to_bits()))
        });
        let mut dq_out = dq_half(warpgroup);
        let dq_at = base + config::DQ_OFFSET + warpgroup * DQ_HALF_BYTES + 16 * (t % 128);
        let (mut dk, mut dv) = (ZERO, ZERO);
        let mut ds = base + config::DS_OFFSET;
        keys_and_values().wait_full();
        for _ in 0..tile.tiles_in_chunk() {
            let q = base + config::STAGES_OFFSET + stages.stage() * 2 * TILE_BYTES;
            let d_attn = q + TILE_BYTES;
            let statistics = base + config::STATISTICS_OFFSET + stages.stage() * STATISTICS_BYTES + 8 * (lane % 4);
            let mut scores = [[mask[0], mask[0], mask[1], mask[1]]; 16];
            let mut dp = [[0f32; 4]; 16];
            stages.wait_full();
            wgmma_fence();
            multiply_rows(&mut scores, k + own, q, 1);
            multiply_rows(&mut dp, v + own, d_attn, 0);
            wgmma_wait::<1>();
            pin_all(&mut scores);
            for j in 0..16 {
                let shift = lds64_f32(statistics + 32 * j as u32);
                for i in 0..4 {
                    scores[j][i] = ex2(fma(scores[j][i], to_logits, shift[i & 1]));
                }
            }
            wgmma_wait::<0>();
            pin_all(&mut dp);
            let (mut p, mut ds_fragments) = ([[0u32; 4]; 8], [[0u32; 4]; 8]);
            for i in 0..8 {
                for j in [2 * i, 2 * i + 1] {
                    let delta = lds64_f32(statistics + 4 * TILE_ROWS + 32 * j as u32);
                    for c in 0..4 {
                        dp[j][c] = scores[j][c] * fma(dp[j][c], unit, -delta[c & 1]);
                    }
                }
                p[i] = pack_a(&[scores[2 * i], scores[2 * i + 1]]);
                ds_fragments[i] = pack_a(&[dp[2 * i], dp[2 * i + 1]]);
                let rows = ds + (i as u32 / 4) * TILE_BYTES + ROWS_16_BYTES * warp;
                store_fragment(rows, i as u32 % 4, ds_fragments[i], lanes);
            }
            wgmma_fence();
            multiply_columns(&mut dv, &p, d_attn);
            multiply_columns(&mut dk, &ds_fragments, q);
            wgmma_commit();
            fence_proxy_async_shared();
            named_barrier(named_barrier::CONSUMERS, THREADS - 128);
            let mut dq = ZERO;
            wgmma_fence();
            let (a, b) = (descriptor(ds + warpgroup * TILE_BYTES), descriptor(k));
            for i in 0..8 {
                let step = i as u64 * k16_step(true);
                wgmma_n64::<MN_MAJOR, MN_MAJOR>(&mut dq, a + step, b + step, (i > 0) as u32);
            }
            wgmma_commit();
            wgmma_wait::<1>();
            mbarrier_arrive_if(leader, stages.empty());
            stages.advance();
            dq_out.wait_empty();
            wgmma_wait::<0>();
            pin_all(&mut dq);
            for j in 0..8 {
                sts128(dq_at + 2048 * j as u32, dq[j].map(f32::to_bits));
            }
            fence_proxy_async_shared();
            mbarrier_arrive_if(true, dq_out.full());
            dq_out.advance();
            ds = 2 * (base + config::DS_OFFSET) + config::DS_BYTES - ds;
        }
        pin_all(&mut dk);
        pin_all(&mut dv);

        let unscale_q = pow2(-e[Operand::Q as usize]);
        scale_rows(&mut dk, unscale_q, unscale_q);
        let dk_factor = Pow2::new(scale_exponent - ds_unit(&e));
        let dv_factor = Pow2::new(-P_EXPONENT - e[Operand::DAttn as usize]);
        let sums = base + config::SUMS_OFFSET;
        store_column_sums(&dk, dk_factor, sums + 256 * warp, lane);
        store_column_sums(&dv, dv_factor, sums + 2048 + 256 * warp, lane);
        // also: nobody reads dS any more
        named_barrier(named_barrier::CONSUMERS, THREADS - 128);
        let stage = base + config::DS_OFFSET + ROWS_16_BYTES * warp;
        store_bf16(&dk, dk_factor, stage, lanes, tile.gradient_rows(params, 1, row));
        store_bf16(&dv, dv_factor, stage, lanes, tile.gradient_rows(params, 2, row));
        if t < 2 * HEAD_DIM {
            let (which, column) = (t / HEAD_DIM, t % HEAD_DIM);
            let mut sum = 0f32;
            for w in 0..8 {
                sum += f32::from_bits(lds32(sums + 2048 * which + 256 * w + 4 * column));
            }
            *tile.bias_partial(params, 1 + which, column) = sum;
        }
    }
}
