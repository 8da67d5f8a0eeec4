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
use super::attention_math::{
    DS_EXPONENT, P_EXPONENT, add_row_sums, ds_fragment, exp_scores, logit_factor, split_scale, store_row_factors,
    tile_exponent,
};
use super::chunks::{bias_of_no_rows, fill_bias_row, finish_padding, load_chunk, load_token_rows};
use crate::config::attention::{
    HEAD_DIM, SHORT_ROW_TILES, SM80_SHARED_BYTES, SM90_SHARED_BYTES, score_pitch_bytes, short_blocks_per_sm,
    short_rows, short_shared_bytes, short_threads,
};
use crate::params::AttentionParams;
use crate::ptx::convert::rcp;
use crate::ptx::copy::{cp_async_commit, cp_async_wait};
use crate::ptx::matrix::ldmatrix_x4_trans;
use crate::ptx::memory::{lds32, sts32_if};
use crate::ptx::sync::{shfl_xor, tid_again, warp_sync};
use crate::tile::fragment::{
    Accumulator, InputRows, Lanes, OutputRows, Pair, Pow2, ROWS_16_BYTES, ZERO, add_row_dots, fetch_rows_bf16,
    fetch_rows_f32, fetched_rows_bf16, fetched_rows_f32, largest_field_bf16, largest_field_f32, mask_columns,
    mma_row_by_rows, mma_row_of_tiles, mma_two_rows_of_tiles, pack_a, pow2, scale_rows, store_bf16, store_column_sums,
    store_rows_f16, store_rows_f32_as_f16, subtract_outer_product,
};
use crate::tile::lanes::right_then_down;
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

/// Shared addresses, see the file's head.
struct Shared {
    q: u32,
    k: u32,
    v: u32,
    d_attn: u32,
    p: u32,
    ds: u32,
    sums: u32,
    fields: u32,
    factors: u32,
}

impl Shared {
    #[inline(always)]
    fn new<const ROW_TILES: usize>() -> Self {
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
}
const _: () = assert!(short_shared_bytes(4) == 4 * 64 * ROW_BYTES + 2 * 64 * 144 + 3 * 1024 + 64 + 256);

/// A thread's warp and lane, made anew in each phase rather than kept in registers that 5 row tiles do not have.
#[inline(always)]
fn warp_and_lane() -> (u32, u32) {
    let tid = tid_again();
    (tid >> 5, tid & 31)
}

#[inline(always)]
unsafe fn attention_short<const ROW_TILES: usize>(params: &AttentionParams) {
    let pitch = score_pitch_bytes(ROW_TILES as u32);
    let steps = ROW_TILES as u32;
    let shared = Shared::new::<ROW_TILES>();
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
        let (q, k) = (fetched_rows_bf16(shared.q + own, lane), fetched_rows_bf16(shared.k + own, lane));
        let fields = [largest_field_bf16(&q), largest_field_bf16(&k)];
        sts32_if(lane == 0, shared.fields + 4 * warp, fields[0]);
        sts32_if(lane == 0, shared.fields + 4 * (steps + warp), fields[1]);
        sync_threads();
        let q_exponent = tile_exponent::<ROW_TILES>(shared.fields);
        let k_exponent = tile_exponent::<ROW_TILES>(shared.fields + 4 * steps);
        store_rows_f16(&q, q_exponent, shared.q + own, lane);
        store_rows_f16(&k, k_exponent, shared.k + own, lane);
        sync_threads();

        // --- S = Q K^T and P, rows g and g + 8 of a lane.
        let lanes = Lanes::new(lane);
        let mut scores: [Pair; ROW_TILES] = [[[0.0; 4]; 2]; ROW_TILES];
        mma_row_by_rows(&mut scores, shared.q + own, shared.k, lanes);
        mask_columns(&mut scores, len, lane);
        let to_logits = logit_factor(params.scale, q_exponent + k_exponent);
        let mut shift = [0f32; 2];
        for r in 0..2 {
            let mut max = f32::NEG_INFINITY;
            for s in &scores {
                max = max.max(s[0][2 * r]).max(s[0][2 * r + 1]).max(s[1][2 * r]).max(s[1][2 * r + 1]);
            }
            max = max.max(shfl_xor::<1>(max));
            max = max.max(shfl_xor::<2>(max));
            shift[r] = P_EXPONENT as f32 - max * to_logits;
        }
        let mut p = [[0u32; 4]; ROW_TILES];
        let mut row_sums = [0f32; 4];
        for j in 0..ROW_TILES {
            exp_scores(&mut scores[j], to_logits, shift);
            p[j] = pack_a(&scores[j]);
            add_row_sums(&mut row_sums, p[j]);
        }
        let inverse = [rcp(row_sums[0]), rcp(row_sums[2])];
        store_row_factors(shared.factors + 64 * warp, lane >> 2, inverse);

        // --- V and dA become scaled fp16 tiles; P goes to shared memory, over the raw dA.
        cp_async_wait::<0>();
        let (warp, lane) = warp_and_lane();
        let own = ROWS_16_BYTES * warp;
        let own_scores = 16 * pitch * warp;
        let lanes = Lanes::new(lane);
        let v = fetched_rows_bf16(shared.v + own, lane);
        let d_attn = fetched_rows_f32(shared.p + 4096 * warp, lane);
        let fields = [largest_field_bf16(&v), largest_field_f32(&d_attn)];
        sts32_if(lane == 0, shared.fields + 4 * (2 * steps + warp), fields[0]);
        sts32_if(lane == 0, shared.fields + 4 * (3 * steps + warp), fields[1]);
        sync_threads();
        let v_exponent = tile_exponent::<ROW_TILES>(shared.fields + 8 * steps);
        let d_attn_exponent = tile_exponent::<ROW_TILES>(shared.fields + 12 * steps);
        store_rows_f16(&v, v_exponent, shared.v + own, lane);
        store_rows_f32_as_f16(&d_attn, pow2(d_attn_exponent), shared.factors + 64 * warp, shared.d_attn + own, lane);
        store_scores(&p, shared.p + own_scores, pitch, lane);
        sync_threads();

        // --- O = P V, staged in the warp's own rows of dS.
        let mut o = ZERO;
        for j in 0..ROW_TILES {
            mma_row_of_tiles(&mut o, p[j], shared.v, lanes, j as u32);
        }
        scale_rows(&mut o, inverse[0], inverse[1]);
        let o_rows = OutputRows {
            first: params
                .o
                .wrapping_add((start + 16 * warp) as usize * 2 * d_model as usize + (head * HEAD_DIM * 2) as usize),
            pitch: 2 * d_model,
            rows: len.saturating_sub(16 * warp),
        };
        store_bf16(&o, Pow2::new(-v_exponent), (shared.ds + own_scores + 127) & !127, lanes, o_rows);

        // --- dP = dA V^T, delta = rowsum(P dP), dS.
        let (warp, lane) = warp_and_lane();
        let own = ROWS_16_BYTES * warp;
        let own_scores = 16 * pitch * warp;
        let lanes = Lanes::new(lane);
        let mut dp: [Pair; ROW_TILES] = [[[0.0; 4]; 2]; ROW_TILES];
        mma_row_by_rows(&mut dp, shared.d_attn + own, shared.v, lanes);
        let mut delta = [0f32; 2];
        for j in 0..ROW_TILES {
            add_row_dots(&p[j], &dp[j], &mut delta);
        }
        let (mantissa, scale_exponent) = split_scale(params.scale);
        let unit = pow2(DS_EXPONENT - P_EXPONENT) * mantissa;
        for r in 0..2 {
            delta[r] += shfl_xor::<1>(delta[r]);
            delta[r] += shfl_xor::<2>(delta[r]);
            shift[r] = -(delta[r] * inverse[r]) * unit;
        }
        let mut ds = [[0u32; 4]; ROW_TILES];
        for j in 0..ROW_TILES {
            ds[j] = ds_fragment(&p[j], &dp[j], unit, shift);
        }
        warp_sync();
        store_scores(&ds, shared.ds + own_scores, pitch, lane);
        sync_threads();

        // --- dQ = scale dS K. Nobody reads V any more: the warp's own rows of it stage the stores from here on.
        let stage = shared.v + own;
        let row_bytes = 6 * d_model;
        let gradients = params.dqkv.wrapping_add(start as usize * row_bytes as usize + (head * HEAD_DIM * 2) as usize);
        let ds_to_real = scale_exponent - DS_EXPONENT - d_attn_exponent - v_exponent;
        let mut dq = ZERO;
        let mut row_sums = [0f32; 4];
        for j in 0..ROW_TILES {
            mma_row_of_tiles(&mut dq, ds[j], shared.k, lanes, j as u32);
            add_row_sums(&mut row_sums, ds[j]);
        }
        subtract_outer_product(&mut dq, &row_sums, rcp(len.min(16) as f32), shared.k, lanes);
        let factor = Pow2::new(ds_to_real - k_exponent);
        store_column_sums(&dq, factor, shared.sums + 256 * warp, lane);
        let dq_rows = OutputRows {
            first: gradients.wrapping_add((16 * warp * row_bytes) as usize),
            pitch: row_bytes,
            rows: len.saturating_sub(16 * warp),
        };
        store_bf16(&dq, factor, stage, lanes, dq_rows);

        // --- dV = P^T dA and dK = scale dS^T Q over all queries: jobs 2 w and 2 w + 1 of dV 0 .., dK 0 .. With an odd number of
        // tiles the middle warp has one of each.
        let (warp, lane) = warp_and_lane();
        let lanes = Lanes::new(lane);
        let stage = shared.v + ROWS_16_BYTES * warp;
        let jobs = [2 * warp, 2 * warp + 1];
        let is_dk = jobs.map(|job| job >= steps);
        let key_tiles = jobs.map(|job| if job >= steps { job - steps } else { job });
        let mut sums = [ZERO; 2];
        if is_dk[0] == is_dk[1] {
            let (x, y) = if is_dk[0] { (shared.ds, shared.q) } else { (shared.p, shared.d_attn) };
            mma_transposed_two(&mut sums, (x, pitch), key_tiles[0], y, lanes, steps);
        } else {
            mma_transposed(&mut sums[0], (shared.p, pitch), key_tiles[0], shared.d_attn, lanes, steps);
            mma_transposed(&mut sums[1], (shared.ds, pitch), key_tiles[1], shared.q, lanes, steps);
        }
        let dv_factor = Pow2::new(-P_EXPONENT - d_attn_exponent);
        let dk_factor = Pow2::new(ds_to_real - q_exponent);
        for i in 0..2 {
            let (factor, which) = if is_dk[i] { (dk_factor, 1) } else { (dv_factor, 2) };
            store_column_sums(&sums[i], factor, shared.sums + 256 * (which * steps + key_tiles[i]), lane);
            let rows = OutputRows {
                first: gradients.wrapping_add((which * 2 * d_model + 16 * key_tiles[i] * row_bytes) as usize),
                pitch: row_bytes,
                rows: len.saturating_sub(16 * key_tiles[i]),
            };
            store_bf16(&sums[i], factor, stage, lanes, rows);
        }

        // --- The chunk's column sums, 16 rows after 16 rows.
        sync_threads();
        let partials = params.bias_partials.wrapping_add(block_idx_x() as usize * 3 * d_model as usize);
        let mut i = tid_again();
        while i < 3 * HEAD_DIM {
            let (which, column) = (i / HEAD_DIM, i % HEAD_DIM);
            let mut sum = 0f32;
            for w in 0..steps {
                sum += f32::from_bits(lds32(shared.sums + 256 * (which * steps + w) + 4 * column));
            }
            *partials.wrapping_add((which * d_model + head * HEAD_DIM + column) as usize) = sum;
            i += short_threads(steps);
        }
    }
}

/// A fragments to 16 rows of a pitched `[query][key]` tile.
///
/// # Safety
/// The rows at `rows` are shared memory that no other warp accesses before the next barrier; all lanes of the warp arrive.
#[inline(always)]
unsafe fn store_scores<const N: usize>(x: &[[u32; 4]; N], rows: u32, pitch: u32, lane: u32) {
    // SAFETY: as the caller promises.
    #[cfg(target_feature = "sm_90a")]
    unsafe {
        let (row, piece) = crate::tile::lanes::down_then_right(lane);
        for j in 0..N {
            crate::ptx::matrix::stmatrix_x4(rows + row * pitch + (2 * j as u32 + piece) * 16, x[j]);
        }
    }
    // SAFETY: as the caller promises.
    #[cfg(not(target_feature = "sm_90a"))]
    unsafe {
        use crate::ptx::memory::sts32;
        let first = rows + (lane >> 2) * pitch + (lane & 3) * 4;
        for j in 0..N {
            let at = first + 32 * j as u32;
            sts32(at, x[j][0]);
            sts32(at + 8 * pitch, x[j][1]);
            sts32(at + 16, x[j][2]);
            sts32(at + 8 * pitch + 16, x[j][3]);
        }
    }
}

/// `accumulator += X^T Y` for 16 keys: X = columns `16 key_tile ..` of the pitched `[query][key]` tile `(address, pitch)`, Y = the
/// `[query][64]` tile at `y`, over `16 steps` queries.
///
/// # Safety
/// Both tiles are ordered after their writers; all lanes of the warp arrive.
#[inline(always)]
unsafe fn mma_transposed(
    accumulator: &mut Accumulator,
    (x, pitch): (u32, u32),
    key_tile: u32,
    y: u32,
    lanes: Lanes,
    steps: u32,
) {
    let (row, piece) = right_then_down(lanes.lane);
    let first = x + row * pitch + (2 * key_tile + piece) * 16;
    for j in 0..steps {
        // SAFETY: inside the tiles that the caller names.
        unsafe { mma_row_of_tiles(accumulator, ldmatrix_x4_trans(first + 16 * pitch * j), y, lanes, j) };
    }
}

/// [`mma_transposed`] for 32 keys.
///
/// # Safety
/// As [`mma_transposed`].
#[inline(always)]
unsafe fn mma_transposed_two(
    accumulators: &mut [Accumulator; 2],
    (x, pitch): (u32, u32),
    key_tile: u32,
    y: u32,
    lanes: Lanes,
    steps: u32,
) {
    let (row, piece) = right_then_down(lanes.lane);
    let first = x + row * pitch + (2 * key_tile + piece) * 16;
    for j in 0..steps {
        let at = first + 16 * pitch * j;
        // SAFETY: inside the tiles that the caller names.
        unsafe {
            let a = [ldmatrix_x4_trans(at), ldmatrix_x4_trans(at + 32)];
            mma_two_rows_of_tiles(accumulators, a, y, lanes, j);
        }
    }
}
