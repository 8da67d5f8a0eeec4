//! A team of warps and its (chunk, head) items.
//!
//! Team      ROW_TILES warps with the roles of `attention_short.rs`. Warps 0..4 (ROW_TILES = 8: two warpgroups, 64 tokens each) also multiply
//!           dA^T = out_weight^T grad_output^T with wgmma, so that the tokens are wgmma's n, which comes in eights. The warp after them fills the
//!           ring meanwhile: one of the ROW_TILES, or (4 and 8 row tiles) one that does nothing else. Warps of a block that belong to no
//!           team go on at once.
//! Items     Number i is chunk i % num_chunks of head i / num_chunks; teams take them in turn.
//! Shared    R = 16 ROW_TILES rows, PITCH = `score_pitch_bytes`, in this order:
//!             Q, K          2 x 128 R          as in `attention_short.rs`
//!             stages        `stages` x (8192 + 128 R): out_weight `[64 k, 64]`, grad_output `[R, 64 k]`; when all have been multiplied,
//!                           V, dA (2 x 128 R), P, dS (2 x PITCH R) and column sums (3 x 256 ROW_TILES) take their place
//!             and at the end of the team's memory
//!             fields        16 ROW_TILES       as in `attention_short.rs`
//!             factors       64 ROW_TILES       as in `attention_short.rs`
//!             mbarriers     16 `stages`        full, empty of each stage
//! Order     Everything is fetched first; S and P are computed while the stages arrive; then dA; then as `attention_short.rs`. V waits in
//!           registers for its place.
//! Rounding  dA: bf16 operands, fp32 accumulation; the rest as `attention_short.rs`.
use cuda_std::shared::dynamic_base;
use cuda_std::thread::grid_dim_x;

use super::AudioEntry;
use super::ring::Ring;
use crate::config::attention::{HEAD_DIM, score_pitch_bytes, short_rows};
use crate::config::audio_backward::{
    HALF_WARPS, STAGE_K, most_teams, multiplying_warps, queries_and_keys_bytes, small_bytes, stages, team_bytes,
    team_warps,
};
use crate::config::wgmma::named_barrier;
use crate::kernel::attention_chunk::{
    Exponents, Shared, Team, Work, gradients, probabilities, scale_queries_and_keys, store_scores,
};
use crate::kernel::attention_math::{logit_factor, tile_exponent};
use crate::kernel::chunks::{bias_of_no_rows, fill_bias_row, finish_padding, load_chunk, load_token_rows};
use crate::params::AttentionParams;
use crate::params_wgmma::AudioBeside;
use crate::ptx::convert::{f16x2, select};
use crate::ptx::copy::{cp_async_commit, cp_async_wait};
use crate::ptx::hopper::{ctaid_again, fence_proxy_async_shared, named_barrier};
use crate::ptx::matrix::stmatrix_x4_trans;
use crate::ptx::memory::{lds64, sts32_if};
use crate::ptx::sync::tid_again;
use crate::schedule::chunks::ChunkRows;
use crate::tile::fragment::{
    ROWS_16_BYTES, fetch_rows_bf16, largest_field_bf16, largest_field_f32, load_rows_bf16, pow2, store_rows_f16,
};
use crate::tile::layout::{ROW_BYTES, swizzle_128b};

/// A chunk and a head.
#[derive(Clone, Copy)]
pub(super) struct Item {
    /// First row of the chunk.
    pub start: u32,
    /// The head.
    pub head: u32,
}

/// The team that this thread belongs to, in a block of teams with `ROW_TILES` row tiles.
struct RowTiles<const ROW_TILES: usize>;

impl<const ROW_TILES: usize> RowTiles<ROW_TILES> {
    const ROW_TILES: u32 = ROW_TILES as u32;
    const TWO: bool = most_teams(ROW_TILES as u32) == 2;

    /// Teams of the block that have items.
    #[inline(always)]
    fn teams(beside: &AudioBeside) -> u32 {
        if Self::TWO { beside.teams } else { 1 }
    }

    /// Stages of a team's ring.
    #[inline(always)]
    fn stages(beside: &AudioBeside) -> u32 {
        if Self::TWO { beside.stages } else { stages(ROW_TILES as u32, 1) }
    }

    /// Which team. The second one has the last six warps, and so the third warpgroup, whose warps come first in it.
    #[inline(always)]
    fn team() -> u32 {
        (Self::TWO && tid_again() >= 32 * HALF_WARPS) as u32
    }
}

impl<const ROW_TILES: usize> Team for RowTiles<ROW_TILES> {
    #[inline(always)]
    fn thread() -> u32 {
        const SECOND: u32 = 32 * HALF_WARPS;
        let tid = tid_again();
        if !Self::TWO || tid < SECOND {
            tid
        } else if tid < 256 {
            tid - SECOND + 128
        } else {
            tid - 256
        }
    }

    #[inline(always)]
    unsafe fn sync() {
        // SAFETY: as the caller promises; nobody else uses the team's barrier.
        unsafe { named_barrier(named_barrier::TEAM + Self::team(), 32 * team_warps(Self::ROW_TILES)) }
    }
}

/// Where everything is, see the file's head.
#[inline(always)]
fn shared_map<const ROW_TILES: usize>(beside: &AudioBeside, stage: u32, parity: u32) -> (Shared, Ring<ROW_TILES>) {
    let row_tiles = ROW_TILES as u32;
    let tile = short_rows(row_tiles) * ROW_BYTES;
    let scores = short_rows(row_tiles) * score_pitch_bytes(row_tiles);
    let (teams, stages) = (RowTiles::<ROW_TILES>::teams(beside), RowTiles::<ROW_TILES>::stages(beside));
    let q = dynamic_base() + RowTiles::<ROW_TILES>::team() * team_bytes(2);
    let v = q + queries_and_keys_bytes(row_tiles);
    let p = v + 2 * tile;
    let end =
        dynamic_base() + if teams == 1 { team_bytes(1) } else { (RowTiles::<ROW_TILES>::team() + 1) * team_bytes(2) };
    let fields = end - small_bytes(row_tiles, stages);
    let factors = fields + 16 * row_tiles;
    let (sums, d_attn) = (p + 2 * scores, v + tile);
    let shared = Shared { q, k: q + tile, v, d_attn, p, ds: p + scores, sums, fields, factors };
    (shared, Ring { first: v, barriers: factors + 64 * row_tiles, stages, stage, parity })
}

/// All items of this thread's team.
///
/// # Safety
/// All threads of the block, with `params` as [`crate::params_wgmma::AudioBeside`] says.
#[inline(always)]
pub(super) unsafe fn work<E: AudioEntry, const ROW_TILES: usize, const R: usize>(beside: &AudioBeside) {
    let steps = ROW_TILES as u32;
    let params = &beside.attention;
    let (warp, team) = (RowTiles::<ROW_TILES>::thread() / 32, RowTiles::<ROW_TILES>::team());
    if warp >= team_warps(steps) || team >= RowTiles::<ROW_TILES>::teams(beside) {
        return;
    }
    let num_chunks = params.num_chunks.max(1);
    // SAFETY: branches are the same for a whole warp, and all warps of the team meet at the same barriers.
    unsafe {
        if RowTiles::<ROW_TILES>::thread() == 32 * multiplying_warps(steps) {
            shared_map::<ROW_TILES>(beside, 0, 0).1.init();
        }
        let first = || RowTiles::<ROW_TILES>::team() * grid_dim_x() + ctaid_again();
        let step = || RowTiles::<ROW_TILES>::teams(beside) * grid_dim_x();
        let is_item = |chunk: ChunkRows| chunk.len != 0 && chunk.len <= short_rows(steps);
        let mut number = first();
        // Twice the items that went through the ring, and 1 if there were others: registers are few.
        let mut taken = 0;
        while number < num_chunks * params.num_heads {
            let (head, index) = (number / num_chunks, number % num_chunks);
            let chunk = load_chunk(params, index);
            if is_item(chunk) {
                // Everything is made anew for each item: registers are few.
                let filled = taken / 2 * k_blocks(params);
                let stages = RowTiles::<ROW_TILES>::stages(beside).max(1);
                let (stage, round) = (filled % stages, filled / stages);
                let (shared, mut ring) = shared_map::<ROW_TILES>(beside, stage, round & 1);
                let work = Work { start: chunk.start, len: chunk.len, bias_row: index, head };
                if team_warps(steps) == steps || RowTiles::<ROW_TILES>::thread() / 32 < steps {
                    attend::<E, ROW_TILES, R>(params, work, &shared, &mut ring);
                } else {
                    pass::<E, ROW_TILES>(params, work, &mut ring);
                }
                taken += 2;
            } else {
                taken |= 1;
            }
            number += step();
        }
        if taken % 2 == 1 {
            let thread = RowTiles::<ROW_TILES>::thread();
            let mut number = first();
            while number < num_chunks * params.num_heads {
                let (head, index) = (number / num_chunks, number % num_chunks);
                let chunk = load_chunk(params, index);
                if !is_item(chunk) && thread < 64 {
                    fill_bias_row(params, (index, head), 0..3, bias_of_no_rows(chunk), (thread, 64));
                }
                number += step();
            }
        }
        let tokens = load_token_rows(params);
        let warp = RowTiles::<ROW_TILES>::thread() / 32;
        if tokens < params.total_seq_len && warp < steps {
            for head in 0..params.num_heads {
                finish_padding(params, tokens, head, (first() * steps + warp, step() * steps), tid_again() % 32);
            }
        }
    }
}

/// Byte offset of a warp's rows in Q, K and V.
#[inline(always)]
fn states_offset(params: &AttentionParams, work: Work, warp: u32) -> usize {
    (work.head as usize * params.total_seq_len as usize + (work.start + 16 * warp) as usize) * ROW_BYTES as usize
}

/// k-blocks of an item.
#[inline(always)]
fn k_blocks(params: &AttentionParams) -> u32 {
    params.num_heads * (HEAD_DIM / STAGE_K)
}

/// What a producer warp without rows does for an item: the ring, and the barriers that the others meet at.
///
/// # Safety
/// As [`work`]; all threads of the warp.
#[inline(always)]
unsafe fn pass<E: AudioEntry, const ROW_TILES: usize>(
    params: &AttentionParams,
    work: Work,
    ring: &mut Ring<ROW_TILES>,
) {
    // SAFETY: one thread fills; the barriers are those of `attend`.
    unsafe {
        let item = Item { start: work.start, head: work.head };
        let first = ring.stages.min(k_blocks(params));
        fence_proxy_async_shared();
        ring.fill::<E>(item, 0, first);
        // The others multiply after the first two barriers only.
        for _ in 0..2 {
            RowTiles::<ROW_TILES>::sync();
        }
        ring.fill::<E>(item, first, k_blocks(params));
        for _ in 0..5 {
            RowTiles::<ROW_TILES>::sync();
        }
    }
}

/// What the warps with rows do for an item.
///
/// # Safety
/// As [`work`]; all threads of the first `ROW_TILES` warps of the team. The shared memory is nobody else's.
#[inline(always)]
unsafe fn attend<E: AudioEntry, const ROW_TILES: usize, const R: usize>(
    params: &AttentionParams,
    work: Work,
    shared: &Shared,
    ring: &mut Ring<ROW_TILES>,
) {
    let steps = ROW_TILES as u32;
    let pitch = score_pitch_bytes(steps);
    let producer = multiplying_warps(steps);
    let item = Item { start: work.start, head: work.head };
    // SAFETY: rows past the chunk's end are predicated off; warps touch their own rows only, or pass a barrier; all branches around
    // collectives are the same for a whole warp, those around barriers for the whole team.
    unsafe {
        // --- Loads: each warp its own 16 rows of Q, K, V, zeros past the chunk's end.
        let (warp, lane) = RowTiles::<ROW_TILES>::warp_and_lane();
        let rows = work.len.saturating_sub(16 * warp);
        let own = ROWS_16_BYTES * warp;
        let states = states_offset(params, work, warp);
        fetch_rows_bf16(shared.q + own, params.query_states.wrapping_add(states), rows, lane);
        fetch_rows_bf16(shared.k + own, params.key_states.wrapping_add(states), rows, lane);
        cp_async_commit();
        let first = ring.stages.min(k_blocks(params));
        if warp == producer {
            fence_proxy_async_shared();
            ring.fill::<E>(item, 0, first);
        }

        cp_async_wait::<0>();
        let (q_exponent, k_exponent) = scale_queries_and_keys::<RowTiles<ROW_TILES>, ROW_TILES>(shared);
        let to_logits = logit_factor(params.scale, q_exponent + k_exponent);
        let probabilities = probabilities::<RowTiles<ROW_TILES>, ROW_TILES>(shared, work.len, to_logits);

        // --- dA^T, in the registers of the multiplying warps. V arrives meanwhile.
        let (warp, lane) = RowTiles::<ROW_TILES>::warp_and_lane();
        let own = ROWS_16_BYTES * warp;
        let rows = work.len.saturating_sub(16 * warp);
        let v = load_rows_bf16(params.value_states.wrapping_add(states_offset(params, work, warp)), rows, lane);
        let mut d_attn = [0f32; R];
        let mut d_attn_field = 0;
        if warp < multiplying_warps(steps) {
            ring.multiply(&mut d_attn, k_blocks(params), warp / 4 * 64);
            mask_tokens(&mut d_attn, work.len, first_token::<ROW_TILES>());
            d_attn_field = largest_field_f32(&d_attn.map(f32::to_bits));
        } else if warp == producer {
            ring.fill::<E>(item, first, k_blocks(params));
        }

        // --- V, dA and P go where the stages were.
        sts32_if(lane == 0, shared.fields + 4 * (2 * steps + warp), largest_field_bf16(&v));
        sts32_if(lane == 0, shared.fields + 4 * (3 * steps + warp), d_attn_field);
        RowTiles::<ROW_TILES>::sync();
        let v_exponent = tile_exponent::<ROW_TILES>(shared.fields + 8 * steps);
        let d_attn_exponent = tile_exponent::<ROW_TILES>(shared.fields + 12 * steps);
        store_rows_f16(&v, v_exponent, shared.v + own, lane);
        if warp < multiplying_warps(steps) {
            store_d_attn::<ROW_TILES, R>(&d_attn, pow2(d_attn_exponent), shared);
        }
        store_scores(&probabilities.p, shared.p + 16 * pitch * warp, pitch, lane);
        RowTiles::<ROW_TILES>::sync();

        let exponents = Exponents { q: q_exponent, k: k_exponent, v: v_exponent, d_attn: d_attn_exponent };
        gradients::<RowTiles<ROW_TILES>, ROW_TILES>(params, work, shared, &probabilities, exponents);
        // The column sums have been read: the next item's stages may come.
        RowTiles::<ROW_TILES>::sync();
    }
}

/// First token of accumulator 0 of this thread.
#[inline(always)]
fn first_token<const ROW_TILES: usize>() -> u32 {
    let thread = RowTiles::<ROW_TILES>::thread();
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
unsafe fn store_d_attn<const ROW_TILES: usize, const R: usize>(acc: &[f32; R], factor: f32, shared: &Shared) {
    let (warp, lane) = RowTiles::<ROW_TILES>::warp_and_lane();
    let token = first_token::<ROW_TILES>();
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
