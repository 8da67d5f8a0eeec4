//! `attention_flash_backward`: dK and dV of one tile of 128 keys of one head, and its share of dQ.
//!
//! Formula   P^T = exp(scale K Q^T + shift)   dP^T = V dA^T   dS^T = P^T (dP^T - delta)
//!           dV = P^T dA   dK = scale dS^T Q   dQ += scale dS K
//! Grid      Any number of blocks, best one an SM. They take numbers `n` from a counter, while there are any: key tile `n / num_heads` of the
//!           table and head `n % num_heads`
//! Block     384 threads. Warpgroup 0: thread 0 takes numbers and loads; lane 0 of warps 2 and 3 adds the halves of dQ (64 queries each) to
//!           `params.dq`. Warpgroups 1 and 2: consumers, 64 keys each for everything but dQ, of which each computes 64 queries from the dS
//!           of both
//! Order     The tiles of keys of a chunk and head are added to a tile of dQ one after the other, counted by `params.counters`: the result
//!           does not depend on timing. A tile waits only for those of smaller numbers, which have been taken: the smallest unfinished one
//!           waits for nothing, so that this ends however many blocks run at a time
//! Shared    bytes: 0 stages `[2]` of K and V, 32768 each; 65536 stages `[2]` of Q and dA, 32768 each; 131072 dS `[2][2 halves of queries]
//!           [128 keys][64]`; 196608 halves of dQ, 2 x 16384; 229376 statistics `[2]`, 1024 each; 231424 mbarriers of Q and dA, `full[2]`,
//!           `empty[2]`; 231456 of K and V; 231488 of the halves of dQ; 231520 numbers `[2]`. In place of dS at last: rows of dK and dV on
//!           their way out, 2048 a warp; 147456 column sums of dK and dV, 2 x 256 a warp
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
/// K and V, and the number of their tile.
type KeyStages = Pipeline<{ config::KEY_STAGES }>;
/// Q, dA and their statistics.
type Stages = Pipeline<{ config::STAGES }>;

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

/// The mbarriers of a half of dQ.
#[inline(always)]
fn dq_half(half: u32) -> Pipeline<1> {
    Pipeline::new(dynamic_base() + config::DQ_BARRIERS_OFFSET + 16 * half)
}

/// See the file's head.
///
/// # Safety
/// As [`attention_flash_largest`](super::largest::attention_flash_largest); `attention_flash_forward` has run on the same parameters.
#[kernel(max_threads = THREADS, min_blocks_per_sm = 1, barriers = 5)]
pub unsafe fn attention_flash_backward(params: FlashParams) {
    let t = thread_idx_x();
    let pipelines = Pipelines {
        keys: KeyStages::new(dynamic_base() + config::KEY_BARRIERS_OFFSET),
        queries: Stages::new(dynamic_base() + config::BARRIERS_OFFSET),
    };
    // SAFETY: the roles are taken by the threads that they ask for; the mbarriers are initialised before the block barrier.
    unsafe {
        if t == 0 {
            pipelines.keys.init(1, 2);
            pipelines.queries.init(1, 2);
            dq_half(0).init(128, 1);
            dq_half(1).init(128, 1);
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
            let mut consumer = Consumer { pipelines, thread: t - 128, dq: dq_half(t / 128 - 1) };
            while let Some(tile) = key_tile(&params, &consumer.pipelines.keys) {
                consumer.consume(&params, &tile);
            }
        }
    }
}

/// Shared address of the number of the stage's tile.
#[inline(always)]
fn number(keys: &KeyStages) -> u32 {
    dynamic_base() + config::NUMBERS_OFFSET + 4 * keys.stage()
}

/// Waits for K and V of the block's next tile; `None`: there is no more.
///
/// # Safety
/// After the block barrier.
#[inline(always)]
unsafe fn key_tile(params: &FlashParams, keys: &KeyStages) -> Option<Tile> {
    // SAFETY: the number is stored before the mbarrier's phase completes.
    unsafe {
        keys.wait_full();
        tile_of_number(params, lds32(number(keys)))
    }
}

/// The tile with this number; `None`: there are not so many.
///
/// # Safety
/// The table is that of the launch.
#[inline(always)]
unsafe fn tile_of_number(params: &FlashParams, number: u32) -> Option<Tile> {
    if number >= params.num_tiles * params.num_heads {
        return None;
    }
    // SAFETY: the entry exists.
    Some(unsafe { Tile::load(params, number / params.num_heads, number % params.num_heads) })
}

/// For each tile that the block takes: loads K and V, then every tile of Q and dA of the chunk.
///
/// # Safety
/// One thread; operands and statistics are complete.
#[inline(always)]
unsafe fn produce(params: &FlashParams, Pipelines { mut keys, mut queries }: Pipelines) {
    let base = dynamic_base();
    let slots = params.num_tiles as usize * params.num_heads as usize;
    // SAFETY: the buffers are empty when they are filled, and as large as what is announced and loaded.
    unsafe {
        loop {
            let taken = atomic_add(params.counters.wrapping_add(2 * slots), 1);
            keys.wait_empty();
            sts32(number(&keys), taken);
            let Some(tile) = tile_of_number(params, taken) else { break };
            let (slot, to) = (tile.slot(params, tile.index), base + keys.stage() * 2 * TILE_BYTES);
            mbarrier_arrive_expect_tx(keys.full(), 2 * TILE_BYTES);
            bulk_load(to, operand_tile(params, slot, Operand::K).cast(), TILE_BYTES, keys.full());
            bulk_load(to + TILE_BYTES, operand_tile(params, slot, Operand::V).cast(), TILE_BYTES, keys.full());
            keys.advance();
            for i in 0..tile.tiles_in_chunk() {
                let slot = tile.slot(params, i);
                let q = base + config::STAGES_OFFSET + queries.stage() * 2 * TILE_BYTES;
                let to = base + config::STATISTICS_OFFSET + queries.stage() * STATISTICS_BYTES;
                let statistics = params.statistics.wrapping_add(slot * STATISTICS_FLOATS as usize);
                queries.wait_empty();
                mbarrier_arrive_expect_tx(queries.full(), 2 * TILE_BYTES + STATISTICS_BYTES);
                bulk_load(q, operand_tile(params, slot, Operand::Q).cast(), TILE_BYTES, queries.full());
                bulk_load(to, statistics, STATISTICS_BYTES, queries.full());
                let d_attn = operand_tile(params, slot, Operand::DAttn);
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
    let mut dq = dq_half(half);
    let from = dynamic_base() + config::DQ_OFFSET + half * DQ_HALF_BYTES;
    // SAFETY: the half is full when it is read. The earlier key tiles have been taken, so that the wait ends; it orders their
    // additions before this one, and this one before the count. The number is read before the consumers can be done with the stage.
    unsafe {
        while let Some(tile) = key_tile(params, &keys) {
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
    let (a, b, step) = (descriptor(a), descriptor(b), k16_step(false));
    // SAFETY: the descriptors stay inside the tiles.
    unsafe {
        wgmma_n128::<K_MAJOR, K_MAJOR>(scores, a, b, accumulate);
        for i in 1..4 {
            wgmma_n128::<K_MAJOR, K_MAJOR>(scores, a + i * step, b + i * step, 1);
        }
    }
}

/// `sum += A B`, A from registers, B 128 rows of 64, once the group is complete.
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

/// A thread of a consumer warpgroup.
struct Consumer {
    pipelines: Pipelines,
    /// Its warpgroup's half.
    dq: Pipeline<1>,
    /// Counts those of both warpgroups.
    thread: u32,
}

/// What a consumer keeps of its tile of keys.
struct Keys {
    /// Shared addresses of K, and of the warpgroup's rows of K and V.
    all_k: u32,
    k: u32,
    v: u32,
    /// Shared address of the buffer of dS.
    ds: u32,
    /// Scores to start from in rows `g` and `g + 8`: 0, or -inf where there is no key.
    start: [f32; 2],
    to_logits: f32,
    /// Factor of dP in dS.
    unit: f32,
    dk: Accumulator,
    dv: Accumulator,
}

impl Keys {
    /// Scores to start from.
    #[inline(always)]
    fn start(&self) -> Scores {
        [[self.start[0], self.start[0], self.start[1], self.start[1]]; 16]
    }
}

impl Consumer {
    #[inline(always)]
    fn warpgroup(&self) -> u32 {
        self.thread / 128
    }

    #[inline(always)]
    fn warp(&self) -> u32 {
        self.thread / 32
    }

    #[inline(always)]
    fn lane(&self) -> u32 {
        self.thread % 32
    }

    /// Whether it arrives for its warpgroup.
    #[inline(always)]
    fn leads(&self) -> bool {
        self.thread % 128 == 0
    }

    /// The warpgroup's 64 keys of a tile, which is the stage's.
    ///
    /// # Safety
    /// All threads of the warpgroup, with the others at the same tile.
    #[inline(always)]
    unsafe fn consume(&mut self, params: &FlashParams, tile: &Tile) {
        let base = dynamic_base();
        let row = 16 * self.warp();
        // SAFETY: buffers are full when they are read and released when the products that read them are complete; rows past the
        // chunk's end are predicated off.
        unsafe {
            let e = exponents(params, tile.slot(params, tile.index));
            let (mantissa, scale_exponent) = split_scale(params.scale);
            let all_k = base + self.pipelines.keys.stage() * 2 * TILE_BYTES;
            let k = all_k + self.warpgroup() * CHUNK_BYTES;
            let mut keys = Keys {
                all_k,
                k,
                v: k + TILE_BYTES,
                ds: base + config::DS_OFFSET,
                start: [0, 8].map(|below| {
                    let exists = row + self.lane() / 4 + below < tile.rows_from(0);
                    f32::from_bits(select(exists, 0, f32::NEG_INFINITY.to_bits()))
                }),
                to_logits: logit_factor(params.scale, e[Operand::Q as usize] + e[Operand::K as usize]),
                unit: pow2(DS_EXPONENT - P_EXPONENT) * mantissa,
                dk: ZERO,
                dv: ZERO,
            };
            let mut scores = keys.start();
            self.pipelines.queries.wait_full();
            wgmma_fence();
            multiply_rows(&mut scores, keys.k, query_rows(&self.pipelines.queries), 1);
            wgmma_commit();
            wgmma_wait::<0>();
            pin_all(&mut scores);
            for _ in 1..tile.tiles_in_chunk() {
                self.step::<false>(&mut keys, &mut scores);
            }
            self.step::<true>(&mut keys, &mut scores);
            let Keys { mut dk, mut dv, .. } = keys;
            pin_all(&mut dk);
            pin_all(&mut dv);
            mbarrier_arrive_if(self.leads(), self.pipelines.keys.empty());
            self.pipelines.keys.advance();

            let unscale_q = pow2(-e[Operand::Q as usize]);
            scale_rows(&mut dk, unscale_q, unscale_q);
            let dk_factor = Pow2::new(scale_exponent - ds_unit(&e));
            let dv_factor = Pow2::new(-P_EXPONENT - e[Operand::DAttn as usize]);
            // both warpgroups have finished the products that read dS
            named_barrier(named_barrier::CONSUMERS, THREADS - 128);
            let sums = base + config::SUMS_OFFSET;
            store_column_sums(&dk, dk_factor, sums + 256 * self.warp(), self.lane());
            store_column_sums(&dv, dv_factor, sums + 2048 + 256 * self.warp(), self.lane());
            let (stage, lanes) = (base + config::DS_OFFSET + ROWS_16_BYTES * self.warp(), Lanes::new(self.lane()));
            store_bf16(&dk, dk_factor, stage, lanes, tile.gradient_rows(params, 1, row));
            store_bf16(&dv, dv_factor, stage, lanes, tile.gradient_rows(params, 2, row));
            named_barrier(named_barrier::CONSUMERS, THREADS - 128);
            if self.thread < 2 * HEAD_DIM {
                let (which, column) = (self.thread / HEAD_DIM, self.thread % HEAD_DIM);
                let mut sum = 0f32;
                for w in 0..8 {
                    sum += f32::from_bits(lds32(sums + 2048 * which + 256 * w + 4 * column));
                }
                *tile.bias_partial(params, 1 + which, column) = sum;
            }
        }
    }

    /// One tile of queries, that of the stage, whose products with K are `scores`; then those of the next tile are, unless this is the last
    /// one.
    ///
    /// # Safety
    /// As [`Consumer::consume`].
    #[inline(always)]
    unsafe fn step<const LAST: bool>(&mut self, keys: &mut Keys, scores: &mut Scores) {
        let queries = self.pipelines.queries;
        let lanes = Lanes::new(self.lane());
        let base = dynamic_base();
        let q = query_rows(&queries);
        let d_attn = q + TILE_BYTES;
        let statistics = base + config::STATISTICS_OFFSET + queries.stage() * STATISTICS_BYTES + 8 * (self.lane() % 4);
        // SAFETY: accumulators are pinned after each wait. The stage is released when the products that read it are complete, and after the
        // barrier that follows all reads of the statistics. A buffer of dS is written again after the next tile's barrier, when
        // both warpgroups have finished the products that read it.
        unsafe {
            let mut dp = [[0f32; 4]; 16];
            wgmma_fence();
            multiply_rows(&mut dp, keys.v, d_attn, 0);
            wgmma_commit();
            for j in 0..16 {
                let shift = lds64_f32(statistics + 32 * j as u32);
                for i in 0..4 {
                    scores[j][i] = ex2(fma(scores[j][i], keys.to_logits, shift[i & 1]));
                }
            }
            wgmma_wait::<0>();
            pin_all(&mut dp);
            let (mut p, mut ds) = ([[0u32; 4]; 8], [[0u32; 4]; 8]);
            for i in 0..8 {
                for j in [2 * i, 2 * i + 1] {
                    let delta = lds64_f32(statistics + 4 * TILE_ROWS + 32 * j as u32);
                    for c in 0..4 {
                        dp[j][c] = scores[j][c] * fma(dp[j][c], keys.unit, -delta[c & 1]);
                    }
                }
                p[i] = pack_a(&[scores[2 * i], scores[2 * i + 1]]);
                ds[i] = pack_a(&[dp[2 * i], dp[2 * i + 1]]);
                let rows = keys.ds + (i as u32 / 4) * TILE_BYTES + ROWS_16_BYTES * self.warp();
                store_fragment(rows, i as u32 % 4, ds[i], lanes);
            }
            wgmma_fence();
            multiply_columns(&mut keys.dv, &p, d_attn);
            multiply_columns(&mut keys.dk, &ds, q);
            wgmma_commit();
            fence_proxy_async_shared();
            named_barrier(named_barrier::CONSUMERS, THREADS - 128);
            let mut dq = ZERO;
            wgmma_fence();
            let (a, b) = (descriptor(keys.ds + self.warpgroup() * TILE_BYTES), descriptor(keys.all_k));
            for i in 0..8 {
                let step = i as u64 * k16_step(true);
                wgmma_n64::<MN_MAJOR, MN_MAJOR>(&mut dq, a + step, b + step, (i > 0) as u32);
            }
            wgmma_commit();
            wgmma_wait::<1>();
            mbarrier_arrive_if(self.leads(), queries.empty());
            self.pipelines.queries.advance();
            if LAST {
                wgmma_wait::<0>();
            } else {
                *scores = keys.start();
                self.pipelines.queries.wait_full();
                wgmma_fence();
                multiply_rows(scores, keys.k, query_rows(&self.pipelines.queries), 1);
                wgmma_commit();
                wgmma_wait::<1>();
            }
            pin_all(&mut dq);
            self.dq.wait_empty();
            let at = base + config::DQ_OFFSET + self.warpgroup() * DQ_HALF_BYTES + 16 * (self.thread % 128);
            for j in 0..8 {
                sts128(at + 2048 * j as u32, dq[j].map(f32::to_bits));
            }
            fence_proxy_async_shared();
            mbarrier_arrive_if(true, self.dq.full());
            self.dq.advance();
            if !LAST {
                wgmma_wait::<0>();
                pin_all(scores);
            }
            keys.ds = 2 * (base + config::DS_OFFSET) + config::DS_BYTES - keys.ds;
        }
    }
}

/// Shared address of Q in the stage; dA is the next tile.
#[inline(always)]
fn query_rows(queries: &Stages) -> u32 {
    dynamic_base() + config::STAGES_OFFSET + queries.stage() * 2 * TILE_BYTES
}
