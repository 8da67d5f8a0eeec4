//! `attention_flash_backward`: dK and dV of one tile of 128 keys of one head, and its share of dQ.
//!
//! Formula   P^T = exp(scale K Q^T + shift)   dP^T = V dA^T   dS^T = P^T (dP^T - delta)
//!           dV = P^T dA   dK = scale dS^T Q   dQ += scale dS K
//! Grid      Any number of blocks, best one an SM. They take numbers `n` from a counter, while there are any: the key tile of slot
//!           `n / num_heads`, if it has one, and head `n % num_heads`
//! Block     384 threads. Warpgroup 0: thread 0 takes numbers and loads; lane 0 of warps 2 and 3 adds the halves of dQ (64 queries each) to
//!           `params.dq`. Warpgroups 1 and 2: consumers, 64 keys each for everything but dQ, of which each computes 64 queries from the dS
//!           of both
//! Order     The tiles of keys of a chunk and head are added to a tile of dQ one after the other, counted by `params.counters`: the result
//!           does not depend on timing. A tile waits only for those of smaller numbers, which have been taken: the smallest unfinished one
//!           waits for nothing, so that this ends however many blocks run at a time
//! Shared    bytes: 0 stages `[2]` of K and V, 32768 each; 65536 stages `[2]` of Q and dA, 32768 each; 131072 stages `[2]` of dS, `[2 halves of queries]
//!           [128 keys][64]`; 196608 halves of dQ, 2 x 16384; 229376 statistics `[2]`, 1024 each; 231424 mbarriers of Q and dA, `full[2]`,
//!           `empty[2]`; 231456 of K and V; 231488 of dS; 231520 of the halves of dQ; 231552 slot and head `[2]`. In place of dS at last: rows of dK and dV on
//!           their way out, 2048 a warp; 147456 column sums of dK and dV, 2 x 256 a warp
//! Registers 168 at launch; 40 for warpgroup 0 and 232 for the consumers after `setmaxnreg`
//! Preconditions
//!           `attention_flash_forward` has run
//! Rounding  P (2^15 times) and dS (2^(dA's + V's exponent - 22) times, which its bound allows) to fp16; dS from the unrounded P; fp32 sums;
//!           column sums before, dK and dV by rounding to bf16
use super::forward::pin_all;
use super::pipeline::Pipeline;
use super::turn::Turn;
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
use crate::ptx::memory::{lds32, lds64_f32, sts32, sts128_if};
use crate::ptx::sync::{again, tid_again};
use crate::ptx::wgmma_f16::{K_MAJOR, MN_MAJOR, wgmma_n64, wgmma_n64_from_registers, wgmma_n128};
use crate::tile::descriptor::Block;
use crate::tile::fragment::{
    Accumulator, Lanes, Pow2, ROWS_16_BYTES, ZERO, pack_a, pow2, scale_rows, store_bf16, store_column_sums,
    store_fragment,
};
use core::num::NonZero;
use cuda_std::kernel;
use cuda_std::shared::dynamic_base;
use cuda_std::thread::{sync_threads, thread_idx_x};

/// A warpgroup's 64 by 128 scores: sixteen C fragments a warp.
type Scores = [[f32; 4]; 16];
/// K and V, and the slot and head of their tile.
type KeyStages = Pipeline<{ config::KEY_STAGES }>;
/// Q, dA and their statistics.
type Stages = Pipeline<{ config::STAGES }>;

/// dS: filled by both warpgroups, read by both for the next tile of queries.
type DsStages = Pipeline<{ config::DS_STAGES }>;

/// The pipelines of the block, from the start.
#[derive(Clone, Copy)]
struct Pipelines {
    keys: KeyStages,
    queries: Stages,
}

/// Exponent of the power of two that dS is multiplied by; `e` are the exponents of the operands.
#[inline(always)]
pub(super) fn ds_unit(e: &[i32; 4]) -> i32 {
    e[Operand::DAttn as usize] + e[Operand::V as usize] + DS_EXPONENT
}

/// K and V after so many tiles of keys.
#[inline(always)]
fn key_stages(tiles: u32) -> KeyStages {
    KeyStages::at(dynamic_base() + config::KEY_BARRIERS_OFFSET, tiles)
}

/// dS of the tile before, after so many tiles of queries; one more: dS of the tile.
#[inline(always)]
fn ds_stages(tiles: u32) -> DsStages {
    DsStages::at(dynamic_base() + config::DS_BARRIERS_OFFSET, tiles)
}

/// Q, dA and their statistics after so many tiles of queries.
#[inline(always)]
fn query_stages(tiles: u32) -> Stages {
    Stages::at(dynamic_base() + config::BARRIERS_OFFSET, tiles)
}

/// A half of dQ after so many tiles of queries.
#[inline(always)]
fn dq_half(half: u32, tiles: u32) -> Pipeline<1> {
    Pipeline::at(dynamic_base() + config::DQ_BARRIERS_OFFSET + 16 * half, tiles)
}

/// See the file's head.
///
/// # Safety
/// As [`attention_flash_largest`](super::largest::attention_flash_largest); `attention_flash_forward` has run on the same parameters.
#[kernel(max_threads = THREADS, min_blocks_per_sm = 1, barriers = 5)]
pub unsafe fn attention_flash_backward(params: FlashParams) {
    let t = thread_idx_x();
    let pipelines = Pipelines { keys: key_stages(0), queries: query_stages(0) };
    // SAFETY: the roles are taken by the threads that they ask for; the mbarriers are initialised before the block barrier.
    unsafe {
        if t == 0 {
            pipelines.keys.init(1, 4); // read by the threads that add dQ, too
            pipelines.queries.init(1, 2);
            ds_stages(0).init(THREADS - 128, 2);
            dq_half(0, 0).init(128, 1);
            dq_half(1, 0).init(128, 1);
        }
        sync_threads();
        if t / 128 == 0 {
            setmaxnreg_dec::<PRODUCER_REGISTERS>();
            if t == 0 {
                produce(&params, pipelines);
            } else if t % 32 == 0 && t >= 64 {
                add_dq(&params, pipelines.keys, t / 32 - 2);
            }
        } else {
            setmaxnreg_inc::<CONSUMER_REGISTERS>();
            fill_first_ds(t - 128);
            let mut consumer = Consumer { key_tiles: 0, tiles: 0, turn: Turn::start(t - 128) };
            while wait_for_tile(&params, &consumer.keys()) {
                let gradients = consumer.consume(&params);
                consumer.store(&params, gradients);
            }
        }
    }
}

/// Fills the first buffer of dS with zeros: the first round takes them for the dS of a tile before.
///
/// # Safety
/// All threads of both consumer warpgroups, counted by `thread`, before anything else.
#[inline(always)]
unsafe fn fill_first_ds(thread: u32) {
    let first = ds_stages(0);
    // SAFETY: the threads' pieces are different ones of the buffer, which is empty.
    unsafe {
        for i in 0..config::DS_BYTES / (16 * (THREADS - 128)) {
            sts128_if(true, ds_buffer(&first) + 16 * (thread + i * (THREADS - 128)), [0; 4]);
        }
        fence_proxy_async_shared();
        mbarrier_arrive_if(true, first.full());
    }
}

/// Shared address of the slot and head of the stage's tile.
#[inline(always)]
fn tile_words(keys: &KeyStages) -> u32 {
    dynamic_base() + config::TILES_OFFSET + 8 * keys.stage()
}

/// Waits for K and V of the block's next tile; false: there is no more.
///
/// # Safety
/// After the block barrier.
#[inline(always)]
unsafe fn wait_for_tile(params: &FlashParams, keys: &KeyStages) -> bool {
    // SAFETY: the words are stored before the mbarrier's phase completes.
    unsafe {
        keys.wait_full();
        lds32(tile_words(keys)) < params.num_slots
    }
}

/// The stage's tile.
///
/// # Safety
/// After [`wait_for_tile`], before the stage is released.
#[inline(always)]
unsafe fn key_tile(params: &FlashParams, keys: &KeyStages) -> Tile {
    // SAFETY: the slot exists.
    unsafe { Tile::load(params, lds32(tile_words(keys)), lds32(tile_words(keys) + 4)) }
}

/// For each tile that the block takes: loads K and V, then every tile of Q and dA of the chunk.
///
/// # Safety
/// One thread; operands and statistics are complete.
#[inline(always)]
unsafe fn produce(params: &FlashParams, Pipelines { mut keys, mut queries }: Pipelines) {
    let base = dynamic_base();
    let places = params.num_slots as usize * params.attention.num_heads as usize;
    // SAFETY: the buffers are empty when they are filled, and as large as what is announced and loaded.
    unsafe {
        loop {
            let number = atomic_add(params.counters.wrapping_add(2 * places), 1);
            let num_heads = NonZero::new_unchecked(params.attention.num_heads);
            let (slot, head) = (number / num_heads, number % num_heads);
            let is_last = slot >= params.num_slots;
            if !is_last && Tile::load(params, slot, head).len == 0 {
                continue;
            }
            keys.wait_empty();
            sts32(tile_words(&keys), slot);
            sts32(tile_words(&keys) + 4, head);
            if is_last {
                break;
            }
            let tile = Tile::load(params, slot, head);
            let (place, to) = (tile.place(params, tile.index), base + keys.stage() * 2 * TILE_BYTES);
            mbarrier_arrive_expect_tx(keys.full(), 2 * TILE_BYTES);
            bulk_load(to, operand_tile(params, place, Operand::K).cast(), TILE_BYTES, keys.full());
            bulk_load(to + TILE_BYTES, operand_tile(params, place, Operand::V).cast(), TILE_BYTES, keys.full());
            keys.advance();
            for i in 0..tile.tiles_in_chunk() {
                let place = tile.place(params, i);
                let q = base + config::STAGES_OFFSET + queries.stage() * 2 * TILE_BYTES;
                let to = base + config::STATISTICS_OFFSET + queries.stage() * STATISTICS_BYTES;
                let statistics = params.statistics.wrapping_add(place * STATISTICS_FLOATS as usize);
                queries.wait_empty();
                mbarrier_arrive_expect_tx(queries.full(), 2 * TILE_BYTES + STATISTICS_BYTES);
                bulk_load(q, operand_tile(params, place, Operand::Q).cast(), TILE_BYTES, queries.full());
                bulk_load(to, statistics, STATISTICS_BYTES, queries.full());
                let d_attn = operand_tile(params, place, Operand::DAttn);
                bulk_load(q + TILE_BYTES, d_attn.cast(), TILE_BYTES, queries.full());
                queries.advance();
            }
        }
        mbarrier_arrive_if(true, keys.full());
    }
}

/// Adds half `half` of every tile of dQ to what the chunk's earlier key tiles have added; the first one stores it.
///
/// # Safety
/// One thread.
#[inline(always)]
unsafe fn add_dq(params: &FlashParams, mut keys: KeyStages, half: u32) {
    let mut dq = dq_half(half, 0);
    let from = dynamic_base() + config::DQ_OFFSET + half * DQ_HALF_BYTES;
    // SAFETY: the half is full when it is read. The earlier key tiles have been taken, so that the wait ends; it orders their
    // additions before this one, and this one before the count.
    unsafe {
        while wait_for_tile(params, &keys) {
            let tile = key_tile(params, &keys);
            mbarrier_arrive_if(true, keys.empty());
            for i in 0..tile.tiles_in_chunk() {
                let place = tile.place(params, i);
                let counter = params.counters.wrapping_add(2 * place + half as usize);
                let to = params.dq.wrapping_add(place * DQ_FLOATS as usize + (half * DQ_FLOATS / 2) as usize);
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
            keys.advance();
        }
    }
}

/// `scores = A B^T (+ scores if accumulate is 1)`, A 64 rows and B 128 rows of 64, once the group is complete.
///
/// # Safety
/// All threads of the warpgroup; both tiles are complete.
#[inline(always)]
unsafe fn multiply_rows(scores: &mut Scores, a: u32, b: u32, accumulate: u32) {
    // SAFETY: the blocks lie in the tiles.
    unsafe {
        for i in 0..4 {
            let accumulate = accumulate | (i > 0) as u32;
            wgmma_n128::<K_MAJOR, K_MAJOR>(scores, Block::new(a, false, i), Block::new(b, false, i), accumulate);
        }
    }
}

/// `sum += A B`, A from registers, B 128 rows of 64, once the group is complete.
///
/// # Safety
/// As [`multiply_rows`].
#[inline(always)]
unsafe fn multiply_columns(sum: &mut Accumulator, a: &[[u32; 4]; 8], b: u32) {
    // SAFETY: the blocks lie in the tile.
    unsafe {
        for i in 0..8 {
            wgmma_n64_from_registers::<MN_MAJOR>(sum, a[i], Block::new(b, true, i as u32));
        }
    }
}

/// A thread of a consumer warpgroup.
struct Consumer {
    /// Tiles of keys so far.
    key_tiles: u32,
    /// Tiles of queries so far.
    tiles: u32,
    turn: Turn,
}

impl Consumer {
    #[inline(always)]
    fn keys(&self) -> KeyStages {
        key_stages(again(self.key_tiles))
    }

    /// The warpgroup's 64 keys of a tile, which is the stage's: dK and dV in the units of their products.
    ///
    /// # Safety
    /// All threads of the warpgroup, with the others at the same tile.
    #[inline(always)]
    unsafe fn consume(&mut self, params: &FlashParams) -> [Accumulator; 2] {
        let thread = tid_again() - 128;
        let (warp, lane) = (thread / 32, thread % 32);
        let (base, lanes) = (dynamic_base(), Lanes::new(lane));
        let k = base + self.keys().stage() * 2 * TILE_BYTES;
        let own_k = k + self.turn.warpgroup() * CHUNK_BYTES;
        let own_v = own_k + TILE_BYTES;
        // SAFETY: buffers are full when they are read and released when the products that read them are complete, that of the queries
        // after the warpgroup's reads of the statistics; accumulators are pinned after each wait.
        unsafe {
            let tile = key_tile(params, &self.keys());
            let e = exponents(params, tile.place(params, tile.index));
            let to_logits = logit_factor(params.attention.scale, e[Operand::Q as usize] + e[Operand::K as usize]);
            let unit = pow2(DS_EXPONENT - P_EXPONENT) * split_scale(params.attention.scale).0;
            let start = [0, 8].map(|below| {
                let exists = 16 * warp + lane / 4 + below < tile.rows_from(0);
                f32::from_bits(select(exists, 0, f32::NEG_INFINITY.to_bits()))
            });
            let (mut dk, mut dv) = (ZERO, ZERO);
            for i in 0..tile.tiles_in_chunk() {
                let queries = query_stages(self.tiles);
                let q = query_rows(&queries);
                let d_attn = q + TILE_BYTES;
                let statistics = base + config::STATISTICS_OFFSET + queries.stage() * STATISTICS_BYTES + 8 * (lane % 4);
                let mut scores = [[start[0], start[0], start[1], start[1]]; 16];
                let mut dp = [[0f32; 4]; 16];
                queries.wait_full();
                wgmma_fence();
                multiply_rows(&mut scores, own_k, q, 1);
                wgmma_commit();
                multiply_rows(&mut dp, own_v, d_attn, 0);
                wgmma_commit();
                wgmma_wait::<0>();
                pin_all(&mut scores);
                pin_all(&mut dp);
                let ds_stage = ds_stages(self.tiles + 1);
                ds_stage.wait_empty();
                let rows = ds_buffer(&ds_stage) + ROWS_16_BYTES * warp;
                let (mut p, mut ds) = ([[0u32; 4]; 8], [[0u32; 4]; 8]);
                for i in 0..8 {
                    for j in [2 * i, 2 * i + 1] {
                        let shift = lds64_f32(statistics + 32 * j as u32);
                        let minus_delta = lds64_f32(statistics + 4 * TILE_ROWS + 32 * j as u32);
                        for c in 0..4 {
                            scores[j][c] = ex2(fma(scores[j][c], to_logits, shift[c & 1]));
                            dp[j][c] = scores[j][c] * fma(dp[j][c], unit, minus_delta[c & 1]);
                        }
                    }
                    p[i] = pack_a(&[scores[2 * i], scores[2 * i + 1]]);
                    ds[i] = pack_a(&[dp[2 * i], dp[2 * i + 1]]);
                    store_fragment(rows + (i as u32 / 4) * TILE_BYTES, i as u32 % 4, ds[i], lanes);
                }
                fence_proxy_async_shared();
                mbarrier_arrive_if(true, ds_stage.full());

                // dQ of the tile before: by now the other warpgroup has its dS, too. In the first round it is of no use, and releases
                // the buffer that was read after the last one.
                let mut dq = ZERO;
                self.turn.wait();
                self.multiply_dq(&mut dq, k);
                multiply_columns(&mut dv, &p, d_attn);
                multiply_columns(&mut dk, &ds, q);
                wgmma_commit();
                self.turn.pass();
                wgmma_wait::<1>();
                mbarrier_arrive_if(leads(), ds_stages(self.tiles).empty());
                self.hand_over_dq(i > 0, &mut dq);
                wgmma_wait::<0>();
                mbarrier_arrive_if(leads(), queries.empty());
                self.tiles += 1;
            }
            pin_all(&mut dk);
            pin_all(&mut dv);
            let mut dq = ZERO;
            self.multiply_dq(&mut dq, k);
            wgmma_wait::<0>();
            self.hand_over_dq(true, &mut dq);
            [dk, dv]
        }
    }

    /// `dq = dS K` of the warpgroup's 64 queries of the tile before, once the group is complete.
    ///
    /// # Safety
    /// All threads of the warpgroup; K is complete.
    #[inline(always)]
    unsafe fn multiply_dq(&self, dq: &mut Accumulator, k: u32) {
        let ds = ds_stages(self.tiles);
        let own = ds_buffer(&ds) + self.turn.warpgroup() * TILE_BYTES;
        // SAFETY: dS is full; the blocks lie in the tiles.
        unsafe {
            ds.wait_full();
            wgmma_fence();
            for i in 0..8 {
                let accumulate = (i > 0) as u32;
                wgmma_n64::<MN_MAJOR, MN_MAJOR>(dq, Block::new(own, true, i), Block::new(k, true, i), accumulate);
            }
            wgmma_commit();
        }
    }

    /// Where `ok`: leaves `dq` for the thread that adds it.
    ///
    /// # Safety
    /// All threads of the warpgroup; the products of `dq` are complete.
    #[inline(always)]
    unsafe fn hand_over_dq(&self, ok: bool, dq: &mut Accumulator) {
        let half = dq_half(self.turn.warpgroup(), self.tiles - ok as u32);
        let at = dynamic_base() + config::DQ_OFFSET + self.turn.warpgroup() * DQ_HALF_BYTES + 16 * (tid_again() % 128);
        // SAFETY: the half is empty.
        unsafe {
            pin_all(dq);
            half.wait_empty();
            for j in 0..8 {
                sts128_if(ok, at + 2048 * j as u32, dq[j].map(f32::to_bits));
            }
            fence_proxy_async_shared();
            mbarrier_arrive_if(ok, half.full());
        }
    }

    /// Writes dK and dV and their column sums, and releases K and V. What it needs is read anew: the loop before has no registers for it.
    ///
    /// # Safety
    /// As [`Consumer::consume`], after it.
    #[inline(always)]
    unsafe fn store(&mut self, params: &FlashParams, [mut dk, dv]: [Accumulator; 2]) {
        let thread = tid_again() - 128;
        let (warp, lane) = (thread / 32, thread % 32);
        let base = dynamic_base();
        // SAFETY: the stage still holds the tile's number; rows past the chunk's end are predicated off. Both warpgroups have finished the
        // products that read dS at the first barrier, and write dS again after the last one.
        unsafe {
            let tile = key_tile(params, &self.keys());
            let e = exponents(params, tile.place(params, tile.index));
            let unscale_q = pow2(-e[Operand::Q as usize]);
            scale_rows(&mut dk, unscale_q, unscale_q);
            let dk_factor = Pow2::new(split_scale(params.attention.scale).1 - ds_unit(&e));
            let dv_factor = Pow2::new(-P_EXPONENT - e[Operand::DAttn as usize]);
            named_barrier(named_barrier::CONSUMERS, THREADS - 128);
            mbarrier_arrive_if(leads(), self.keys().empty());
            self.key_tiles += 1;
            let sums = base + config::SUMS_OFFSET;
            store_column_sums(&dk, dk_factor, sums + 256 * warp, lane);
            store_column_sums(&dv, dv_factor, sums + 2048 + 256 * warp, lane);
            let (stage, lanes) = (base + config::DS_OFFSET + ROWS_16_BYTES * warp, Lanes::new(lane));
            store_bf16(&dk, dk_factor, stage, lanes, tile.gradient_rows(params, 1, 16 * warp));
            store_bf16(&dv, dv_factor, stage, lanes, tile.gradient_rows(params, 2, 16 * warp));
            named_barrier(named_barrier::CONSUMERS, THREADS - 128);
            if thread < 2 * HEAD_DIM {
                let (which, column) = (thread / HEAD_DIM, thread % HEAD_DIM);
                let mut sum = 0f32;
                for w in 0..8 {
                    sum += f32::from_bits(lds32(sums + 2048 * which + 256 * w + 4 * column));
                }
                *tile.bias_partial(params, 1 + which, column) = sum;
            }
            named_barrier(named_barrier::CONSUMERS, THREADS - 128);
        }
    }
}

/// Whether this thread arrives for its warpgroup.
#[inline(always)]
fn leads() -> bool {
    tid_again() % 128 == 0
}

/// Shared address of dS in the stage.
#[inline(always)]
fn ds_buffer(ds: &DsStages) -> u32 {
    dynamic_base() + config::DS_OFFSET + ds.stage() * config::DS_BYTES
}

/// Shared address of Q in the stage; dA is the next tile.
#[inline(always)]
fn query_rows(queries: &Stages) -> u32 {
    dynamic_base() + config::STAGES_OFFSET + queries.stage() * 2 * TILE_BYTES
}
