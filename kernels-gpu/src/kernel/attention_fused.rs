//! Attention backward of one (chunk, head) in one block, its share of the grad_attention product included: `attention_fused_{64,80,96,128}`.
//!
//! Formula   dA[chunk, head's 64] = grad_output[chunk, :] out_weight[:, head's 64]; then as `attention_short.rs`.
//!           No two blocks compute the same element of dA, and none but this one needs it: it never leaves the SM.
//! Grid      (max(num_chunks, 1), num_heads), as `attention_short.rs`.
//! Block     ROW_TILES warps, with the roles of `attention_short.rs`. Warps 0..4 (ROW_TILES = 8: two warpgroups, 64 tokens each) multiply
//!           dA^T = out_weight^T grad_output^T with wgmma, so that the tokens are wgmma's n, which comes in eights. The warp after them fills the
//!           ring meanwhile: one of the ROW_TILES, or (4 and 8 row tiles) one that does nothing else.
//! Shared    R = 16 ROW_TILES rows, PITCH = `score_pitch_bytes`, in this order:
//!             Q, K          2 x 128 R          as in `attention_short.rs`
//!             stages        `stages` x (8192 + 128 R): out_weight `[64 k, 64]`, grad_output `[R, 64 k]`; when all have been multiplied,
//!                           V, dA (2 x 128 R), P, dS (2 x PITCH R) and column sums (3 x 256 ROW_TILES) take their place
//!             fields        16 ROW_TILES       as in `attention_short.rs`
//!             factors       64 ROW_TILES       as in `attention_short.rs`
//!             mbarriers     16 `stages`        full, empty of each stage
//! Barriers  A producer warp without rows meets the others at `bar.sync` of its own, which counts warps, not places in the program;
//!           compute-sanitizer's synccheck calls that divergent.
//! Launches  Allows a dependent launch behind it when all blocks have come to dV and dK.
//! Registers at most 128 a thread for 4 and 5 row tiles (3 blocks on an SM).
//! Preconditions
//!           As `attention_short.rs`, at most `MAX_CHUNKS` chunks, and no chunk is longer than R (one that is counts as breaking a rule, see `chunks.rs`); maps and `stages` as
//!           `params_wgmma::AttentionFusedParams` says.
//! Order     Everything is fetched first; S and P are computed while the stages arrive; then dA; then as `attention_short.rs`. V waits in
//!           registers for its place.
//! Rounding  dA: bf16 operands, fp32 accumulation; the rest as `attention_short.rs`.
use core::arch::asm;

use cuda_std::kernel;
use cuda_std::shared::dynamic_base;
use cuda_std::thread::{block_idx_x, block_idx_y, grid_dim_x, sync_threads, thread_idx_x};

use super::attention_chunk::{
    Exponents, Shared, Work, gradients, probabilities, scale_queries_and_keys, store_scores, warp_and_lane,
};
use super::attention_math::{logit_factor, tile_exponent};
use super::chunks::{bias_of_no_rows, fill_bias_row, finish_padding, load_chunk, load_token_rows};
use crate::config::attention::{HEAD_DIM, SHORT_ROW_TILES, score_pitch_bytes, short_rows, short_threads};
use crate::config::attention_fused::{
    STAGE_K, blocks_per_sm, multiplying_warps, queries_and_keys_bytes, stage_bytes, threads, tiles_bytes,
};
use crate::params_wgmma::{AttentionFusedParams, TensorMap};
use crate::ptx::convert::{f16x2, select};
use crate::ptx::copy::{cp_async_commit, cp_async_wait};
use crate::ptx::hopper::{
    fence_mbarrier_init, mbarrier_arrive_expect_tx_if, mbarrier_arrive_if, mbarrier_init, mbarrier_wait, pin,
    tma_load_2d_if, wgmma_bf16_n64_k_major, wgmma_bf16_n80_k_major, wgmma_bf16_n96_k_major, wgmma_commit, wgmma_fence,
    wgmma_wait,
};
use crate::ptx::matrix::stmatrix_x4_trans;
use crate::ptx::memory::{lds64, stg32_if, sts32_if};
use crate::ptx::sync::tid_again;
use crate::tile::descriptor::{descriptor, k16_step};
use crate::tile::fragment::{
    ROWS_16_BYTES, fetch_rows_bf16, largest_field_bf16, largest_field_f32, load_rows_bf16, pow2, store_rows_f16,
};
use crate::tile::layout::{ROW_BYTES, swizzle_128b};

/// Bytes of a stage's block of out_weight, `[STAGE_K, 64]`.
const WEIGHT_BYTES: u32 = STAGE_K * ROW_BYTES;

/// An entry point.
trait Entry {
    /// Generic address of the entry's parameters, which begin with the tensor maps of out_weight and grad_output.
    fn maps() -> *const TensorMap;
}

macro_rules! kernels {
    ($($name:ident, $marker:ident, $row_tiles:literal, $accumulators:literal;)*) => { $(
        #[doc = concat!("[`", stringify!($name), "`].")]
        struct $marker;

        impl Entry for $marker {
            #[inline(always)]
            fn maps() -> *const TensorMap {
                let maps: *const TensorMap;
                // SAFETY: takes the address of the only parameter of the entry that this type belongs to.
                unsafe {
                    asm!(concat!("{{ .reg .b64 t; mov.b64 t, ", stringify!($name), "_param_0; cvta.param.u64 {p}, t; }}"),
                         p = out(reg64) maps, options(nomem, nostack))
                };
                maps
            }
        }

        /// The fused kernel for chunks of at most 16 times this many rows.
        ///
        /// # Safety
        /// The launch is as the file's head says and `params` as [`AttentionFusedParams`] does, with valid device pointers.
        #[kernel(
            max_threads = threads($row_tiles),
            min_blocks_per_sm = blocks_per_sm($row_tiles),
            barriers = if $row_tiles % 4 == 0 { 12 } else { 6 }
        )]
        pub unsafe fn $name(params: AttentionFusedParams) {
            // SAFETY: the caller's.
            unsafe { attention_fused::<$marker, $row_tiles, $accumulators>(&params) }
        }
    )* };
}
kernels! {
    attention_fused_64, AttentionFused64, 4, 32;
    attention_fused_80, AttentionFused80, 5, 40;
    attention_fused_96, AttentionFused96, 6, 48;
    attention_fused_128, AttentionFused128, 8, 32;
}
const _: () = assert!(matches!(SHORT_ROW_TILES, [4, 5, 6, 8]));

/// The ring of stages that all k-blocks of a block's dA go through: `full` of a stage completes when its bytes have arrived, `empty` when every
/// multiplying warp has released it.
#[derive(Clone, Copy)]
struct Ring<const ROW_TILES: usize> {
    /// Shared address of the first stage.
    first: u32,
    /// Shared address of the mbarriers.
    barriers: u32,
    /// Stages.
    count: u32,
    /// k-blocks.
    k_blocks: u32,
}

impl<const ROW_TILES: usize> Ring<ROW_TILES> {
    const STAGE_BYTES: u32 = stage_bytes(ROW_TILES as u32);

    #[inline(always)]
    fn full(&self, stage: u32) -> u32 {
        self.barriers + 16 * stage
    }

    #[inline(always)]
    fn empty(&self, stage: u32) -> u32 {
        self.barriers + 16 * stage + 8
    }

    /// Starts to fill `stage` with k-block `block`: the first lane does it, by predicates, since a branch of one lane may make LLVM copy the
    /// barriers around it.
    ///
    /// # Safety
    /// One warp; the stage is free, its mbarriers are initialised.
    #[inline(always)]
    unsafe fn fill<E: Entry>(&self, stage: u32, block: u32, work: Work) {
        let fills = tid_again() % 32 == 0;
        let k = block * STAGE_K;
        let (at, full) = (self.first + stage * Self::STAGE_BYTES, self.full(stage));
        // SAFETY: both boxes lie in the stage and have its bytes together.
        unsafe {
            let maps = E::maps();
            mbarrier_arrive_expect_tx_if(fills, full, Self::STAGE_BYTES);
            tma_load_2d_if(fills, at, maps, [work.head * HEAD_DIM, k], full);
            tma_load_2d_if(fills, at + WEIGHT_BYTES, maps.wrapping_add(1), [k, work.start], full);
        }
    }

    /// Initialises the mbarriers and starts to fill every stage.
    ///
    /// # Safety
    /// One warp; a barrier of the block comes before any other use of the ring.
    #[inline(always)]
    unsafe fn start<E: Entry>(&self, work: Work) {
        // SAFETY: the mbarriers lie in shared memory, on 8-byte boundaries, and one lane initialises them and fills; each stage is filled once.
        unsafe {
            if tid_again() % 32 == 0 {
                for stage in 0..self.count {
                    mbarrier_init(self.full(stage), 1);
                    mbarrier_init(self.empty(stage), multiplying_warps(ROW_TILES as u32));
                }
                fence_mbarrier_init();
            }
            for stage in 0..self.count.min(self.k_blocks) {
                self.fill::<E>(stage, stage, work);
            }
        }
    }

    /// Fills the stages again, until all k-blocks are under way.
    ///
    /// # Safety
    /// One warp, after [`Ring::start`] and a barrier of the block.
    #[inline(always)]
    unsafe fn produce<E: Entry>(&self, work: Work) {
        let (mut stage, mut parity) = (0, 0);
        for block in self.count..self.k_blocks {
            // SAFETY: the stage is free when all multiplying warps have released it.
            unsafe {
                mbarrier_wait(self.empty(stage), parity);
                self.fill::<E>(stage, block, work);
            }
            stage += 1;
            if stage == self.count {
                stage = 0;
                parity ^= 1;
            }
        }
    }

    /// `acc = dA^T[64, tokens of this warpgroup]`: acc[4 j + e] is row 16 warp + g (e < 2) or 8 further, token 8 j + 2 t + e % 2.
    ///
    /// # Safety
    /// All threads of the multiplying warps, after [`Ring::start`] and a barrier of the block.
    #[inline(always)]
    unsafe fn multiply<const R: usize>(&self, acc: &mut [f32; R]) {
        let leader = tid_again() % 32 == 0;
        let first_token = tid_again() / 128 * 64;
        let (mut stage, mut parity) = (0, 0);
        let mut previous = self.empty(0);
        // SAFETY: a stage is full before it is read, and released when the wgmma that read it have finished; the accumulators are pinned after
        // the last wait.
        unsafe {
            for i in 0..self.k_blocks {
                mbarrier_wait(self.full(stage), parity);
                let at = self.first + stage * Self::STAGE_BYTES;
                let a = descriptor(at);
                let b = descriptor(at + WEIGHT_BYTES + first_token * ROW_BYTES);
                wgmma_fence();
                multiply(acc, a, b, i);
                for step in 1..STAGE_K as u64 / 16 {
                    multiply(acc, a + step * k16_step(true), b + step * k16_step(false), 1);
                }
                wgmma_commit();
                // One group stays in flight; the stage before it can be filled again.
                wgmma_wait::<1>();
                mbarrier_arrive_if(leader & (i > 0), previous);
                previous = self.empty(stage);
                stage += 1;
                if stage == self.count {
                    stage = 0;
                    parity ^= 1;
                }
            }
            wgmma_wait::<0>();
            for x in acc.iter_mut() {
                pin(x);
            }
        }
    }
}

/// Where everything is, see the file's head.
#[inline(always)]
fn shared_map<const ROW_TILES: usize>(params: &AttentionFusedParams) -> (Shared, Ring<ROW_TILES>) {
    let row_tiles = ROW_TILES as u32;
    let tile = short_rows(row_tiles) * ROW_BYTES;
    let scores = short_rows(row_tiles) * score_pitch_bytes(row_tiles);
    let q = dynamic_base();
    let v = q + queries_and_keys_bytes(row_tiles);
    let p = v + 2 * tile;
    let fields = v + (params.stages * stage_bytes(row_tiles)).max(tiles_bytes(row_tiles));
    let factors = fields + 16 * row_tiles;
    let (sums, d_attn) = (p + 2 * scores, v + tile);
    let shared = Shared { q, k: q + tile, v, d_attn, p, ds: p + scores, sums, fields, factors };
    let k_blocks = params.attention.num_heads * (HEAD_DIM / STAGE_K);
    (shared, Ring { first: v, barriers: factors + 64 * row_tiles, count: params.stages, k_blocks })
}

#[inline(always)]
unsafe fn attention_fused<E: Entry, const ROW_TILES: usize, const R: usize>(params: &AttentionFusedParams) {
    let steps = ROW_TILES as u32;
    let (shared, ring) = shared_map::<ROW_TILES>(params);
    let attention = &params.attention;
    // SAFETY: the addresses below are inside a tensor of `params` or the block's shared memory as the file's head maps it; the branches
    // are the same for a whole warp, and both sides meet at the same barriers.
    unsafe {
        let chunk = load_chunk(attention, block_idx_x());
        let tokens = load_token_rows(attention);
        let work = Work { start: chunk.start, len: chunk.len, bias_row: block_idx_x(), head: block_idx_y() };
        if chunk.len == 0 || chunk.len > short_rows(steps) {
            zero_counters(params);
            finish_share_of_padding(params, tokens, steps);
            let value = bias_of_no_rows(chunk);
            let share = (thread_idx_x(), short_threads(steps));
            if thread_idx_x() < short_threads(steps) {
                fill_bias_row(attention, (block_idx_x(), block_idx_y()), 0..3, value, share);
            }
            return;
        }
        let warp = thread_idx_x() / 32;
        if threads(steps) == short_threads(steps) || warp < steps {
            attend::<E, ROW_TILES, R>(params, (work, tokens), &shared, ring);
        } else {
            ring.start::<E>(work);
            for _ in 0..2 {
                sync_threads();
            }
            ring.produce::<E>(work);
            for _ in 0..4 {
                sync_threads();
            }
        }
    }
}

/// What the warps with rows do.
///
/// # Safety
/// As [`attention_fused`]; all threads of the first `ROW_TILES` warps.
#[inline(always)]
unsafe fn attend<E: Entry, const ROW_TILES: usize, const R: usize>(
    params: &AttentionFusedParams,
    (work, tokens): (Work, u32),
    shared: &Shared,
    ring: Ring<ROW_TILES>,
) {
    let steps = ROW_TILES as u32;
    let pitch = score_pitch_bytes(steps);
    let producer = multiplying_warps(steps);
    let attention = &params.attention;
    // SAFETY: rows past the chunk's end are predicated off; warps touch their own rows only, or pass a barrier; all branches around
    // collectives are the same for a whole warp, those around barriers for the whole block.
    unsafe {
        // --- Loads: each warp its own 16 rows of Q, K, V, zeros past the chunk's end.
        let (warp, lane) = warp_and_lane();
        let rows = work.len.saturating_sub(16 * warp);
        let own = ROWS_16_BYTES * warp;
        let first_row = (work.start + 16 * warp) as usize;
        let states = (work.head as usize * attention.total_seq_len as usize + first_row) * ROW_BYTES as usize;
        fetch_rows_bf16(shared.q + own, attention.query_states.wrapping_add(states), rows, lane);
        fetch_rows_bf16(shared.k + own, attention.key_states.wrapping_add(states), rows, lane);
        cp_async_commit();
        if warp == producer {
            ring.start::<E>(work);
        }
        zero_counters(params);
        finish_share_of_padding(params, tokens, steps);

        cp_async_wait::<0>();
        let (q_exponent, k_exponent) = scale_queries_and_keys::<ROW_TILES>(shared);
        let to_logits = logit_factor(attention.scale, q_exponent + k_exponent);
        let probabilities = probabilities::<ROW_TILES>(shared, work.len, to_logits);

        // --- dA^T, in the registers of the multiplying warps. V arrives meanwhile.
        let (warp, lane) = warp_and_lane();
        let own = ROWS_16_BYTES * warp;
        let rows = work.len.saturating_sub(16 * warp);
        let v = load_rows_bf16(attention.value_states.wrapping_add(states), rows, lane);
        let mut d_attn = [0f32; R];
        let mut d_attn_field = 0;
        if warp < multiplying_warps(steps) {
            ring.multiply(&mut d_attn);
            mask_tokens(&mut d_attn, work.len, first_token());
            d_attn_field = largest_field_f32(&d_attn.map(f32::to_bits));
        } else if warp == producer {
            ring.produce::<E>(work);
        }

        // --- V, dA and P go where the stages were.
        sts32_if(lane == 0, shared.fields + 4 * (2 * steps + warp), largest_field_bf16(&v));
        sts32_if(lane == 0, shared.fields + 4 * (3 * steps + warp), d_attn_field);
        sync_threads();
        let v_exponent = tile_exponent::<ROW_TILES>(shared.fields + 8 * steps);
        let d_attn_exponent = tile_exponent::<ROW_TILES>(shared.fields + 12 * steps);
        store_rows_f16(&v, v_exponent, shared.v + own, lane);
        if warp < multiplying_warps(steps) {
            store_d_attn(&d_attn, pow2(d_attn_exponent), shared);
        }
        store_scores(&probabilities.p, shared.p + 16 * pitch * warp, pitch, lane);
        sync_threads();

        let exponents = Exponents { q: q_exponent, k: k_exponent, v: v_exponent, d_attn: d_attn_exponent };
        gradients::<ROW_TILES>(attention, work, shared, &probabilities, exponents);
    }
}

/// The block's share of the padding rows, by its warps with rows.
///
/// # Safety
/// As [`attention_fused`]; the condition is the same for a whole warp.
#[inline(always)]
unsafe fn finish_share_of_padding(params: &AttentionFusedParams, tokens: u32, steps: u32) {
    let attention = &params.attention;
    // SAFETY: the caller's.
    unsafe {
        let (warp, lane) = warp_and_lane();
        if tokens < attention.total_seq_len && warp < steps {
            let share = (block_idx_x() * steps + warp, grid_dim_x() * steps);
            finish_padding(attention, tokens, block_idx_y(), share, lane);
        }
    }
}

/// Zeroes this block's share of the counters, if it is of the first head, by its first warps.
///
/// # Safety
/// They are writable, and nobody else accesses them during the launch.
#[inline(always)]
unsafe fn zero_counters(params: &AttentionFusedParams) {
    const THREADS: u32 = 128; // that every block has, whatever its warps do
    if block_idx_y() == 0 && thread_idx_x() < THREADS {
        let mut word = block_idx_x() * THREADS + thread_idx_x();
        while word < params.zero_words {
            // SAFETY: inside the range.
            unsafe { stg32_if(true, params.zero.wrapping_add(word as usize).cast(), 0) };
            word += grid_dim_x() * THREADS;
        }
    }
}

/// `acc[64, 2 R] = a[64, 16] b[16, 2 R] (+ acc unless accumulate is 0)`, a MN-major, b K-major.
///
/// # Safety
/// As the wgmma functions.
#[inline(always)]
unsafe fn multiply<const R: usize>(acc: &mut [f32; R], a: u64, b: u64, accumulate: u32) {
    const { assert!(R == 32 || R == 40 || R == 48) };
    let acc: *mut [f32; R] = acc;
    // SAFETY: the arm of this R is taken, so the cast does not change the type; else as the caller promises.
    unsafe {
        match R {
            32 => wgmma_bf16_n64_k_major::<1>(&mut *acc.cast(), a, b, accumulate),
            40 => wgmma_bf16_n80_k_major::<1>(&mut *acc.cast(), a, b, accumulate),
            _ => wgmma_bf16_n96_k_major::<1>(&mut *acc.cast(), a, b, accumulate),
        }
    }
}

/// First token of accumulator 0 of this thread.
#[inline(always)]
fn first_token() -> u32 {
    let thread = tid_again();
    thread / 128 * 64 + 2 * (thread & 3)
}

/// Zeros for the tokens past the chunk's end: what the box read there belongs to others, or is NaN.
#[inline(always)]
fn mask_tokens<const R: usize>(acc: &mut [f32; R], len: u32, first_token: u32) {
    for j in 0..R / 4 {
        for e in 0..4 {
            let exists = first_token + 8 * j as u32 + (e as u32 & 1) < len;
            let x = &mut acc[4 * j + e];
            *x = f32::from_bits(select(exists, x.to_bits(), 0));
        }
    }
}

/// Multiplies by `factor` and each token's row factor, rounds to fp16 and stores the `[token, 64]` tile.
///
/// # Safety
/// All threads of the multiplying warps; the row factors are ordered after their writers, nobody else accesses the tile before the next
/// barrier.
#[inline(always)]
unsafe fn store_d_attn<const R: usize>(acc: &[f32; R], factor: f32, shared: &Shared) {
    let (warp, lane) = warp_and_lane();
    let token = first_token();
    // stmatrix: matrices 0, 1 are tokens 8 j .., d 16 warp .. and 8 further; matrices 2, 3 the next eight tokens.
    let row = token - 2 * (lane & 3) + (lane & 7) + ((lane >> 4) << 3);
    let at = shared.d_attn + swizzle_128b(row, 2 * (warp & 3) + ((lane >> 3) & 1));
    // SAFETY: as the caller promises.
    unsafe {
        for pair in 0..R / 8 {
            let mut v = [0u32; 4];
            for half in 0..2 {
                let j = 2 * pair + half;
                let [low, high] =
                    lds64(shared.factors + 4 * (token + 8 * j as u32)).map(|x| factor * f32::from_bits(x));
                v[2 * half] = f16x2(acc[4 * j] * low, acc[4 * j + 1] * high);
                v[2 * half + 1] = f16x2(acc[4 * j + 2] * low, acc[4 * j + 3] * high);
            }
            stmatrix_x4_trans(at + ROWS_16_BYTES * pair as u32, v);
        }
    }
}
