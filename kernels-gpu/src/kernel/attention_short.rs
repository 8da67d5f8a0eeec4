//! Attention forward and backward of one (chunk, head) in one block, chunk_len <= 16 ROW_TILES: `attention_short_{64,80,96,128}`.
//!
//! Formula   P = softmax(scale Q K^T)   O = P V   dP = dA V^T   dS = P (dP - rowsum(P dP))
//!           dQ = scale dS K   dK = scale dS^T Q   dV = P^T dA
//! Grid      (max(num_chunks, 1), num_heads): blockIdx.x is the chunk, whose rows the block reads from `cu_seqlens`. Neighbouring blocks are
//!           neighbouring chunks of one head: their Q, K, V rows follow each other. All blocks together see to the padding rows.
//! Block     ROW_TILES warps. Warp w loads rows 16 w .. 16 w + 16 of everything and owns these queries for S, P, O, dP, dS, dQ. Then the
//!           2 ROW_TILES jobs of 16 keys (first dV, then dK) go two to a warp; two of one product share their B fragments.
//! Shared    R = 16 ROW_TILES rows, PITCH = `score_pitch_bytes`, in this order:
//!             Q, K, V, dA   4 x 128 R          fp16, scaled, swizzled; raw bf16 first, in place
//!             P, dS         2 x PITCH R        fp16 [query][key]; before that the raw fp32 dA (256 R bytes) while it arrives
//!             sums          3 x 256 ROW_TILES  fp32 column sums of dQ, dK, dV for each 16 rows
//!             fields        16 ROW_TILES       largest exponent field of Q, K, V, dA for each warp
//!             factors       64 ROW_TILES       1 / rowsum of every query
//!           Stores are staged in the warp's own rows: O in dS (not yet written), dQ, dV, dK in V (no longer read).
//! Registers at most 128 a thread for 4 and 5 row tiles (4 and 3 blocks on an SM of sm_90).
//! Preconditions
//!           head_dim 64; 16-byte aligned pointers. Chunks longer than the kernel takes are left to the long kernels.
//! Rounding  Q, K, V exactly, dA to 11 bits: fp16 with a power of two for each tile (see `tile::fragment`). P to fp16:
//!           p = 2^15 exp(logit - max), not normalised; rowsum(p) is that of p as rounded. 1 / rowsum goes into dA's rows (so
//!           dP' = dP / rowsum and dS = p (dP' - delta') need no other factor) and into O. Hence rowsum(dS) = 0 up to dS's own rounding
//!           to fp16, in the unit that makes its bound 2^15. What is left of rowsum(dS) would reach dQ times the offset that all keys
//!           share (keys of 90 +- 1 cost dQ all accuracy), so rowsum(dS) times the mean of the first 16 keys is taken off: nothing in
//!           exact arithmetic. Sums in fp32; column sums before, and O, dQ, dK, dV by rounding to bf16.
use super::attention_chunk::{
    Exponents, Shared, Work, gradients, probabilities, scale_queries_and_keys, store_scores, warp_and_lane,
};
use super::attention_math::{logit_factor, tile_exponent};
use super::chunks::{bias_of_no_rows, fill_bias_row, finish_padding, load_chunk, load_token_rows};
use crate::config::attention::{
    HEAD_DIM, SHORT_ROW_TILES, SM80_SHARED_BYTES, SM90_SHARED_BYTES, score_pitch_bytes, short_blocks_per_sm,
    short_rows, short_shared_bytes, short_threads,
};
use crate::params::AttentionParams;
use crate::ptx::copy::{cp_async_commit, cp_async_wait};
use crate::ptx::memory::sts32_if;
use crate::tile::fragment::{
    InputRows, ROWS_16_BYTES, fetch_rows_bf16, fetch_rows_f32, fetched_rows_bf16, fetched_rows_f32, largest_field_bf16,
    largest_field_f32, pow2, store_rows_f16, store_rows_f32_as_f16,
};
use crate::tile::layout::ROW_BYTES;
use cuda_std::kernel;
use cuda_std::shared::dynamic_base;
use cuda_std::thread::{block_idx_x, block_idx_y, grid_dim_x, sync_threads, thread_idx_x};

const SM_SHARED_BYTES: u32 = if cfg!(target_feature = "sm_90a") { SM90_SHARED_BYTES } else { SM80_SHARED_BYTES };

macro_rules! kernels {
    ($($name:ident = $row_tiles:literal;)*) => { $(
        const _: () = assert!(short_blocks_per_sm($row_tiles, SM_SHARED_BYTES) >= 1);

        /// The short kernel for chunks of at most 16 times this many rows.
        ///
        /// # Safety
        /// The launch is as the file's head says and `params` as [`AttentionParams`] does, with valid device pointers.
        #[kernel(
            max_threads = short_threads($row_tiles),
            min_blocks_per_sm = short_blocks_per_sm($row_tiles, SM_SHARED_BYTES),
            barriers = 6
        )]
        pub unsafe fn $name(params: AttentionParams) {
            // SAFETY: the caller's.
            unsafe { attention_short::<$row_tiles>(&params) }
        }
    )* };
}
kernels! {
    attention_short_64 = 4;
    attention_short_80 = 5;
    attention_short_96 = 6;
    attention_short_128 = 8;
}
const _: () = assert!(matches!(SHORT_ROW_TILES, [4, 5, 6, 8]));

/// Where everything is, see the file's head.
#[inline(always)]
fn shared_map<const ROW_TILES: usize>() -> Shared {
    let row_tiles = ROW_TILES as u32;
    let tile = short_rows(row_tiles) * ROW_BYTES;
    let scores = short_rows(row_tiles) * score_pitch_bytes(row_tiles);
    let q = dynamic_base();
    let p = q + 4 * tile;
    let sums = p + 2 * scores;
    let fields = sums + 3 * 256 * row_tiles;
    let factors = fields + 16 * row_tiles;
    Shared { q, k: q + tile, v: q + 2 * tile, d_attn: q + 3 * tile, p, ds: p + scores, sums, fields, factors }
}
const _: () = assert!(short_shared_bytes(4) == 4 * 64 * ROW_BYTES + 2 * 64 * 144 + 3 * 1024 + 64 + 256);

#[inline(always)]
unsafe fn attention_short<const ROW_TILES: usize>(params: &AttentionParams) {
    let pitch = score_pitch_bytes(ROW_TILES as u32);
    let steps = ROW_TILES as u32;
    let shared = shared_map::<ROW_TILES>();
    let d_model = params.num_heads * HEAD_DIM;
    let head = block_idx_y();
    // SAFETY: every address below is inside a tensor of `params` (rows past the chunk's end are predicated off) or the block's shared
    // memory as the file's head maps it; warps touch their own rows only, or pass a barrier; all branches around collectives
    // are the same for a whole warp, those around barriers for the whole block.
    unsafe {
        let chunk = load_chunk(params, block_idx_x());
        let tokens = load_token_rows(params);
        let (start, len) = (chunk.start, chunk.len);
        let is_taken = len > 0 && len <= short_rows(steps);

        // --- Loads: each warp its own 16 rows of everything, zeros past the chunk's end. Every lane reads back only what it copied.
        let tid = thread_idx_x();
        let (warp, lane) = (tid >> 5, tid & 31);
        let own = ROWS_16_BYTES * warp;
        if is_taken {
            let rows = len.saturating_sub(16 * warp);
            let first_row = (start + 16 * warp) as usize;
            let states = (head as usize * params.total_seq_len as usize + first_row) * ROW_BYTES as usize;
            fetch_rows_bf16(shared.q + own, params.query_states.wrapping_add(states), rows, lane);
            fetch_rows_bf16(shared.k + own, params.key_states.wrapping_add(states), rows, lane);
            cp_async_commit();
            fetch_rows_bf16(shared.v + own, params.value_states.wrapping_add(states), rows, lane);
            cp_async_commit();
            let d_attn_offset = (first_row * d_model as usize + (head * HEAD_DIM) as usize) * 4;
            let d_attn = InputRows { first: params.d_attn.wrapping_add(d_attn_offset), pitch: 4 * d_model, rows };
            fetch_rows_f32(shared.p + 4096 * warp, d_attn, lane);
            cp_async_commit();
        }

        // --- While they are on their way: the block's share of the padding rows.
        if tokens < params.total_seq_len {
            let share = (block_idx_x() * steps + warp, grid_dim_x() * steps);
            finish_padding(params, tokens, head, share, lane);
        }
        if !is_taken {
            let value = bias_of_no_rows(chunk);
            return fill_bias_row(params, (block_idx_x(), head), 0..3, value, (tid, short_threads(steps)));
        }

        // --- Q and K become scaled fp16 tiles in place.
        cp_async_wait::<2>();
        let (q_exponent, k_exponent) = scale_queries_and_keys::<ROW_TILES>(&shared);
        let to_logits = logit_factor(params.scale, q_exponent + k_exponent);
        let probabilities = probabilities::<ROW_TILES>(&shared, len, to_logits);

        // --- V and dA become scaled fp16 tiles; P goes to shared memory, over the raw dA.
        cp_async_wait::<0>();
        let (warp, lane) = warp_and_lane();
        let own = ROWS_16_BYTES * warp;
        let v = fetched_rows_bf16(shared.v + own, lane);
        let d_attn = fetched_rows_f32(shared.p + 4096 * warp, lane);
        let fields = [largest_field_bf16(&v), largest_field_f32(d_attn.as_flattened())];
        sts32_if(lane == 0, shared.fields + 4 * (2 * steps + warp), fields[0]);
        sts32_if(lane == 0, shared.fields + 4 * (3 * steps + warp), fields[1]);
        sync_threads();
        let v_exponent = tile_exponent::<ROW_TILES>(shared.fields + 8 * steps);
        let d_attn_exponent = tile_exponent::<ROW_TILES>(shared.fields + 12 * steps);
        store_rows_f16(&v, v_exponent, shared.v + own, lane);
        store_rows_f32_as_f16(&d_attn, pow2(d_attn_exponent), shared.factors + 64 * warp, shared.d_attn + own, lane);
        store_scores(&probabilities.p, shared.p + 16 * pitch * warp, pitch, lane);
        sync_threads();

        let exponents = Exponents { q: q_exponent, k: k_exponent, v: v_exponent, d_attn: d_attn_exponent };
        let work = Work { start, len, bias_row: block_idx_x(), head };
        gradients::<ROW_TILES>(params, work, &shared, &probabilities, exponents);
    }
}
