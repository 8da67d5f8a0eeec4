//! What a block does with its (chunk, head), phase by phase: common to the `attention_short_*` kernels and to `attention_fused_*`.
//!
//! Formula, rounding and the roles of the warps are in `attention_short.rs`; each kernel's head has its own map of shared memory. Every
//! phase is a collective of the warps with rows: warp w owns queries 16 w .. 16 w + 16.
use super::attention_math::{
    DS_EXPONENT, P_EXPONENT, add_row_sums, ds_fragment, exp_scores, split_scale, store_row_factors, tile_exponent,
};
use crate::config::attention::{HEAD_DIM, score_pitch_bytes, short_threads};
use crate::params::AttentionParams;
use crate::ptx::convert::rcp;
use crate::ptx::matrix::ldmatrix_x4_trans;
use crate::ptx::memory::{lds32, sts32_if};
use crate::ptx::sync::{shfl_xor, tid_again, warp_sync};
use crate::tile::fragment::{
    Accumulator, Lanes, OutputRows, Pair, Pow2, ROWS_16_BYTES, ZERO, add_row_dots, fetched_rows_bf16,
    largest_field_bf16, mask_columns, mma_row_by_rows, mma_row_of_tiles, mma_two_rows_of_tiles, pack_a, pow2,
    scale_rows, store_bf16, store_column_sums, store_rows_f16, subtract_outer_product,
};
use crate::tile::lanes::right_then_down;
use cuda_std::thread::sync_threads;

/// What a block works on.
#[derive(Clone, Copy)]
pub(super) struct Work {
    /// First row of the chunk.
    pub start: u32,
    /// Rows of the chunk, at least 1.
    pub len: u32,
    /// Row of `bias_partials` for its column sums.
    pub bias_row: u32,
    /// The head.
    pub head: u32,
}

/// Shared addresses: tiles of R = 16 ROW_TILES rows.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    /// fp16 `[R, 64]`, scaled, swizzled.
    pub q: u32,
    /// The same of K.
    pub k: u32,
    /// The same of V; from dQ on the stores' stage, 2 KiB a warp.
    pub v: u32,
    /// The same of dA.
    pub d_attn: u32,
    /// fp16 `[query][key]`, rows of `score_pitch_bytes`.
    pub p: u32,
    /// The same of dS.
    pub ds: u32,
    /// fp32 `[3, ROW_TILES, 64]`: column sums of dQ, dK, dV for each 16 rows.
    pub sums: u32,
    /// u32 `[4, ROW_TILES]`: largest exponent field of Q, K, V, dA for each warp.
    pub fields: u32,
    /// fp32 `[R]`: 1 / rowsum of every query.
    pub factors: u32,
}

/// Exponents of the scales of Q, K, V and dA.
#[derive(Clone, Copy)]
pub(super) struct Exponents {
    pub q: i32,
    pub k: i32,
    pub v: i32,
    pub d_attn: i32,
}

/// P of a warp's 16 queries as A fragments, and 1 / rowsum of rows `g` and `g + 8`.
pub(super) struct Probabilities<const ROW_TILES: usize> {
    pub p: [[u32; 4]; ROW_TILES],
    pub inverse: [f32; 2],
}

/// This thread's warp and lane, made anew each time rather than kept in registers that 5 row tiles do not have.
#[inline(always)]
pub(super) fn warp_and_lane() -> (u32, u32) {
    let tid = tid_again();
    (tid >> 5, tid & 31)
}

/// Q and K, fetched by this warp's lanes themselves, become scaled fp16 tiles in place. Returns the exponents of their scales.
///
/// # Safety
/// All threads of the block's `ROW_TILES` warps; the copies of this thread's own pieces have been waited for.
#[inline(always)]
pub(super) unsafe fn scale_queries_and_keys<const ROW_TILES: usize>(shared: &Shared) -> (i32, i32) {
    let steps = ROW_TILES as u32;
    let (warp, lane) = warp_and_lane();
    let own = ROWS_16_BYTES * warp;
    // SAFETY: a warp reads and writes its own rows; the fields pass a barrier.
    unsafe {
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
        (q_exponent, k_exponent)
    }
}

/// P = 2^15 exp(S - max), rows g and g + 8 of a lane; 1 / rowsum goes to the row factors, too.
///
/// # Safety
/// All threads of the block's `ROW_TILES` warps, after [`scale_queries_and_keys`].
#[inline(always)]
pub(super) unsafe fn probabilities<const ROW_TILES: usize>(
    shared: &Shared,
    len: u32,
    to_logits: f32,
) -> Probabilities<ROW_TILES> {
    let (warp, lane) = warp_and_lane();
    let own = ROWS_16_BYTES * warp;
    // SAFETY: the tiles are ordered after their writers; a warp writes its own row factors.
    unsafe {
        let lanes = Lanes::new(lane);
        let mut scores: [Pair; ROW_TILES] = [[[0.0; 4]; 2]; ROW_TILES];
        mma_row_by_rows(&mut scores, shared.q + own, shared.k, lanes);
        mask_columns(&mut scores, len, lane);
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
        Probabilities { p, inverse }
    }
}

/// O, dQ, dK, dV and their column sums, from tiles of Q, K, V, dA and P in shared memory.
///
/// # Safety
/// All threads of the block's `ROW_TILES` warps, after the barrier that follows the tiles' writers; the rows of the outputs are nobody else's.
#[inline(always)]
pub(super) unsafe fn gradients<const ROW_TILES: usize>(
    params: &AttentionParams,
    work: Work,
    shared: &Shared,
    Probabilities { p, inverse }: &Probabilities<ROW_TILES>,
    exponents: Exponents,
) {
    let pitch = score_pitch_bytes(ROW_TILES as u32);
    let steps = ROW_TILES as u32;
    let d_model = params.num_heads * HEAD_DIM;
    let Work { start, len, bias_row, head } = work;
    let lanes = Lanes::new(warp_and_lane().1);
    // SAFETY: every address below is inside a tensor of `params` (rows past the chunk's end are predicated off) or the block's shared
    // memory; warps touch their own rows only, or pass a barrier; all branches around collectives are the same for a whole warp, those
    // around barriers for the whole block.
    unsafe {
        // --- O = P V, staged in the warp's own rows of dS.
        let mut o = ZERO;
        for j in 0..ROW_TILES {
            mma_row_of_tiles(&mut o, p[j], shared.v, lanes, j as u32);
        }
        scale_rows(&mut o, inverse[0], inverse[1]);
        let (warp, lane) = warp_and_lane();
        let own_scores = 16 * pitch * warp;
        let lanes = Lanes::new(lane);
        let o_rows = OutputRows {
            first: params
                .o
                .wrapping_add((start + 16 * warp) as usize * 2 * d_model as usize + (head * HEAD_DIM * 2) as usize),
            pitch: 2 * d_model,
            rows: len.saturating_sub(16 * warp),
        };
        store_bf16(&o, Pow2::new(-exponents.v), (shared.ds + own_scores + 127) & !127, lanes, o_rows);

        // --- dP = dA V^T, delta = rowsum(P dP), dS.
        let (warp, lane) = warp_and_lane();
        let own = ROWS_16_BYTES * warp;
        let own_scores = 16 * pitch * warp;
        let lanes = Lanes::new(lane);
        let mut dp: [Pair; ROW_TILES] = [[[0.0; 4]; 2]; ROW_TILES];
        mma_row_by_rows(&mut dp, shared.d_attn + own, shared.v, lanes);
        let (mut delta, mut shift) = ([0f32; 2], [0f32; 2]);
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
        let (warp, lane) = warp_and_lane();
        let lanes = Lanes::new(lane);
        let stage = shared.v + ROWS_16_BYTES * warp;
        let row_bytes = 6 * d_model;
        let gradients = params.dqkv.wrapping_add(start as usize * row_bytes as usize + (head * HEAD_DIM * 2) as usize);
        let ds_to_real = scale_exponent - DS_EXPONENT - exponents.d_attn - exponents.v;
        let mut dq = ZERO;
        let mut row_sums = [0f32; 4];
        for j in 0..ROW_TILES {
            mma_row_of_tiles(&mut dq, ds[j], shared.k, lanes, j as u32);
            add_row_sums(&mut row_sums, ds[j]);
        }
        subtract_outer_product(&mut dq, &row_sums, rcp(len.min(16) as f32), shared.k, lanes);
        let factor = Pow2::new(ds_to_real - exponents.k);
        store_column_sums(&dq, factor, shared.sums + 256 * warp, lane);
        let dq_rows = OutputRows {
            first: gradients.wrapping_add((16 * warp * row_bytes) as usize),
            pitch: row_bytes,
            rows: len.saturating_sub(16 * warp),
        };
        store_bf16(&dq, factor, stage, lanes, dq_rows);

        // The launch behind may start. Earlier, its start slows this one down, on all SMs (H200): its code seems to take the place of ours.
        #[cfg(target_feature = "sm_90a")]
        crate::ptx::hopper::launch_dependents();

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
        let dv_factor = Pow2::new(-P_EXPONENT - exponents.d_attn);
        let dk_factor = Pow2::new(ds_to_real - exponents.q);
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
        let partials = params.bias_partials.wrapping_add(bias_row as usize * 3 * d_model as usize);
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
pub(super) unsafe fn store_scores<const N: usize>(x: &[[u32; 4]; N], rows: u32, pitch: u32, lane: u32) {
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
