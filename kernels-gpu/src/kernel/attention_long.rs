//! The operation of `attention_short` for chunks of any length, streamed over 64-row tiles: `attention_long_q` (O, dQ and row statistics;
//! a block a query tile), then `attention_long_k` (dK, dV; a block a key tile). No atomics.
//!
//! Formula   as `attention_short`. `_q` runs over all keys twice: maximum, rowsum, O and delta by online softmax, then dQ from the final
//!           statistics. `_k` runs over all queries once, on transposed scores.
//! Grid      (max(slots, 1), num_heads), for both: the block finds the tile of its slot (`schedule::chunks`) in `cu_seqlens`, if there is one.
//!           Neighbouring blocks are tiles of one chunk and head, which read the same tensors while they are in L2. Where no short
//!           kernel runs, all blocks of `_q` together see to the padding rows.
//! Block     4 warps, 16 rows of the block's tile each. While a tile of the other side is worked on, the next one is on its way to the raw
//!           buffers (cp.async); every lane reads back only what it copied.
//! Shared    bytes from the start of the dynamic shared memory (`config::attention::LONG_*`):
//!                 0  Q, K, V, dA    4 x 8192     fp16, scaled, swizzled
//!             32768  sums           2 x 1024     fp32 column sums of dQ, or of dK and dV, for each warp
//!             34816  statistics     2 x 3 x 256  max, 1 / rowsum, delta' of 64 queries; `_k` alternates two sets, `_q` uses 1 / rowsum
//!             36352  fields         4 x 16       largest exponent field of K, V, Q, dA for each warp
//!             36416  raw            `_q`: K, V 2 x 8192; `_k`: Q 8192, dA 16384, stats 1024
//! Registers at most 255 a thread (2 blocks on an SM).
//! Preconditions
//!           as `attention_short`; `stats` between the two kernels.
//! Rounding  as `attention_short`, but every 64-row tile has its own power of two, and products of a tile are added to the fp32 total
//!           after unscaling. dS uses the smallest exponent of any V tile of the chunk (kept in `stats`), so that its bound holds for
//!           delta too.
use super::attention_math::{
    DS_EXPONENT, P_EXPONENT, add_row_sums, ds_fragment, exp_scores, logit_factor, split_scale, store_row_factors,
    tile_exponent,
};
use super::chunks::{LongTile, bias_of_no_rows, fill_bias_row, finish_padding, load_chunk, load_token_rows};
use crate::config::attention::{
    HEAD_DIM, LONG_BLOCKS_PER_SM, LONG_COMMON_BYTES, LONG_THREADS, LONG_TILE_BYTES, LONG_TILE_ROWS,
};
use crate::params::AttentionParams;
use crate::ptx::convert::{ex2, fma, rcp};
use crate::ptx::copy::{cp_async_commit, cp_async_wait, cp_async16};
use crate::ptx::memory::{lds32, lds128, stg128_if, sts32, sts32_if};
use crate::ptx::sync::{shfl_xor, warp_sync};
use crate::tile::fragment::{
    Accumulator, InputRows, Lanes, OutputRows, Pair, Pow2, ROWS_16_BYTES, Rows16Bit, ZERO, add_row_dots,
    fetch_rows_f32, fetched_rows_f32, largest_field_bf16, largest_field_f32, load_rows_bf16, load_rows_f32,
    mask_columns, mma_row_by_rows, mma_row_of_tiles, pack_a, pow2, scale_exponent, scale_rows, store_bf16,
    store_column_sums, store_rows_f16, store_rows_f32_as_f16, subtract_outer_product,
};
use crate::tile::layout::ROW_BYTES;
use cuda_std::kernel;
use cuda_std::shared::dynamic_base;
use cuda_std::thread::{block_idx_x, block_idx_y, grid_dim_x, sync_threads, thread_idx_x};

const SUMS: u32 = 4 * LONG_TILE_BYTES;
const STATISTICS: u32 = SUMS + 2 * 1024;
const STATISTICS_SET: u32 = 3 * 256;
const FIELDS: u32 = STATISTICS + 2 * STATISTICS_SET;
const RAW: u32 = FIELDS + 64;
const _: () = assert!(RAW == LONG_COMMON_BYTES && RAW % 16 == 0);

/// A tensor whose exponent fields the warps share.
#[derive(Clone, Copy)]
enum Operand {
    K = 0,
    V = 1,
    Q = 2,
    DAttn = 3,
}

/// One block's tile, addresses and ids.
struct Block<'a> {
    params: &'a AttentionParams,
    tile: LongTile,
    tid: u32,
    warp: u32,
    lane: u32,
    head: u32,
    q: u32,
    k: u32,
    v: u32,
    d_attn: u32,
}

impl Block<'_> {
    #[inline(always)]
    unsafe fn new(params: &AttentionParams) -> Block<'_> {
        let tid = thread_idx_x();
        let q = dynamic_base();
        Block {
            params,
            // SAFETY: all lanes arrive; the slot is the block's.
            tile: unsafe { LongTile::load::<LONG_TILE_ROWS>(params, block_idx_x(), tid & 31) },
            tid,
            warp: tid >> 5,
            lane: tid & 31,
            head: block_idx_y(),
            q,
            k: q + LONG_TILE_BYTES,
            v: q + 2 * LONG_TILE_BYTES,
            d_attn: q + 3 * LONG_TILE_BYTES,
        }
    }

    #[inline(always)]
    fn d_model(&self) -> u32 {
        self.params.num_heads * HEAD_DIM
    }

    /// Rows of this warp that exist in the tile that starts at row `first` of the chunk.
    #[inline(always)]
    fn rows(&self, first: u32) -> u32 {
        self.tile.len.saturating_sub(first + 16 * self.warp)
    }

    /// This warp's 16 rows of a tile.
    #[inline(always)]
    fn own(&self, tile: u32) -> u32 {
        tile + ROWS_16_BYTES * self.warp
    }

    /// This warp's first row, in the packed tensors, of the tile that starts at row `first` of the chunk.
    #[inline(always)]
    fn row(&self, first: u32) -> usize {
        (self.tile.start + first + 16 * self.warp) as usize
    }

    /// Where row `row` of this head starts in `[num_heads, total_seq_len, ..]`, in rows.
    #[inline(always)]
    fn head_row(&self, row: usize) -> usize {
        self.head as usize * self.params.total_seq_len as usize + row
    }

    /// This warp's rows of `states`, as [`load_rows_bf16`] takes them.
    #[inline(always)]
    fn states(&self, states: *const u8, first: u32) -> *const u8 {
        states.wrapping_add(self.head_row(self.row(first)) * ROW_BYTES as usize)
    }

    #[inline(always)]
    unsafe fn load_states(&self, states: *const u8, first: u32) -> Rows16Bit {
        // SAFETY: rows past the chunk's end are predicated off.
        unsafe { load_rows_bf16(self.states(states, first), self.rows(first), self.lane) }
    }

    #[inline(always)]
    fn d_attn_rows(&self, first: u32) -> InputRows {
        let offset = (self.row(first) * self.d_model() as usize + (self.head * HEAD_DIM) as usize) * 4;
        InputRows { first: self.params.d_attn.wrapping_add(offset), pitch: 4 * self.d_model(), rows: self.rows(first) }
    }

    /// This lane's slot for step 0 of raw buffer `index` of 8192 bytes; step i lies 512 i further.
    #[inline(always)]
    fn raw(&self, index: u32) -> u32 {
        self.q + RAW + LONG_TILE_BYTES * index + 2048 * self.warp + 16 * self.lane
    }

    /// Starts the copy of this warp's rows of `states` to raw buffer `index`.
    #[inline(always)]
    unsafe fn fetch_states(&self, index: u32, states: *const u8, first: u32) {
        let from = self.states(states, first).wrapping_add(16 * self.lane as usize);
        for step in 0..4u32 {
            let exists = 4 * step + (self.lane >> 3) < self.rows(first);
            // SAFETY: the lane's own slot; rows past the chunk's end are predicated off.
            unsafe { cp_async16(self.raw(index) + 512 * step, from.wrapping_add(512 * step as usize), exists) };
        }
    }

    /// What [`Block::fetch_states`] copied.
    #[inline(always)]
    unsafe fn fetched_states(&self, index: u32) -> Rows16Bit {
        // SAFETY: the lane's own slots; the copies have been waited for.
        [0, 512, 1024, 1536].map(|offset| unsafe { lds128(self.raw(index) + offset) })
    }

    /// This warp's rows of the raw dA.
    #[inline(always)]
    fn raw_d_attn(&self) -> u32 {
        self.q + RAW + LONG_TILE_BYTES + 4096 * self.warp
    }

    /// Publishes this warp's exponent field of an operand; [`Block::exponent`] reads it after a barrier.
    #[inline(always)]
    unsafe fn store_field(&self, operand: Operand, field: u32) {
        // SAFETY: the warp's own word.
        unsafe { sts32_if(self.lane == 0, self.q + FIELDS + 16 * operand as u32 + 4 * self.warp, field) }
    }

    #[inline(always)]
    unsafe fn exponent(&self, operand: Operand) -> i32 {
        // SAFETY: a barrier follows every `store_field`.
        unsafe { tile_exponent::<4>(self.q + FIELDS + 16 * operand as u32) }
    }

    /// Starts the copy of the keys and values from row `first` of the chunk on.
    #[inline(always)]
    unsafe fn fetch_keys(&self, first: u32) {
        // SAFETY: as `fetch_states`.
        unsafe {
            self.fetch_states(0, self.params.key_states, first);
            self.fetch_states(1, self.params.value_states, first);
            cp_async_commit();
        }
    }

    /// Makes K and V tiles of what was fetched, starts the next copy, and returns the tiles' exponents.
    #[inline(always)]
    unsafe fn convert_keys(&self, next: u32) -> (i32, i32) {
        // SAFETY: the first barrier also says that every warp has finished with the previous tiles.
        unsafe {
            cp_async_wait::<0>();
            let (k, v) = (self.fetched_states(0), self.fetched_states(1));
            self.store_field(Operand::K, largest_field_bf16(&k));
            self.store_field(Operand::V, largest_field_bf16(&v));
            sync_threads();
            let exponents = (self.exponent(Operand::K), self.exponent(Operand::V));
            store_rows_f16(&k, exponents.0, self.own(self.k), self.lane);
            store_rows_f16(&v, exponents.1, self.own(self.v), self.lane);
            self.fetch_keys(next);
            sync_threads();
            exponents
        }
    }

    /// Q K^T of this warp's queries, columns from `left` on -inf.
    #[inline(always)]
    unsafe fn scores(&self, lanes: Lanes, left: u32) -> [Pair; 4] {
        let mut scores = [[[0f32; 4]; 2]; 4];
        // SAFETY: both tiles are complete.
        unsafe { mma_row_by_rows(&mut scores, self.own(self.q), self.k, lanes) };
        mask_columns(&mut scores, left, self.lane);
        scores
    }

    /// dA V^T of this warp's queries.
    #[inline(always)]
    unsafe fn dp(&self, lanes: Lanes) -> [Pair; 4] {
        let mut dp = [[[0f32; 4]; 2]; 4];
        // SAFETY: both tiles are complete.
        unsafe { mma_row_by_rows(&mut dp, self.own(self.d_attn), self.v, lanes) };
        dp
    }

    /// This warp's rows of gradient `which` (dQ, dK, dV) of the block's tile.
    #[inline(always)]
    fn gradient_rows(&self, which: u32) -> OutputRows {
        let d_model = self.d_model() as usize;
        let column = which as usize * d_model + (self.head * HEAD_DIM) as usize;
        OutputRows {
            first: self.params.dqkv.wrapping_add((self.row(self.tile.first) * 3 * d_model + column) * 2),
            pitch: 6 * self.d_model(),
            rows: self.rows(self.tile.first),
        }
    }

    /// The block's row of the bias partial sums.
    #[inline(always)]
    fn bias_row(&self) -> u32 {
        self.params.long_bias_row + block_idx_x()
    }

    /// Where this warp leaves its column sums in slot `slot`.
    #[inline(always)]
    fn own_sums(&self, slot: u32) -> u32 {
        self.q + SUMS + 1024 * slot + 256 * self.warp
    }

    /// This block's share of the padding rows.
    #[inline(always)]
    unsafe fn finish_padding(&self) {
        const WARPS: u32 = LONG_THREADS / 32;
        // SAFETY: all warps of all blocks have their own share.
        unsafe {
            let tokens = load_token_rows(self.params);
            if tokens < self.params.total_seq_len {
                let share = (block_idx_x() * WARPS + self.warp, grid_dim_x() * WARPS);
                finish_padding(self.params, tokens, self.head, share, self.lane);
            }
        }
    }

    /// NaN where no short kernel runs, which would tell, and the chunk that has the block's number breaks a rule; else 0.
    #[inline(always)]
    unsafe fn complaint(&self) -> f32 {
        if self.params.short_rows > 0 {
            return 0.0;
        }
        // SAFETY: the parameters are valid.
        bias_of_no_rows(unsafe { load_chunk(self.params, block_idx_x()) })
    }

    /// Adds the four warps' column sums of slot `slot`, and `first`, and writes them as gradient `which` (dQ, dK, dV).
    #[inline(always)]
    unsafe fn write_column_sums(&self, slot: u32, which: u32, first: f32) {
        if self.tid < HEAD_DIM {
            let mut sum = first;
            for w in 0..4 {
                // SAFETY: a barrier follows the warps' stores.
                sum += f32::from_bits(unsafe { lds32(self.q + SUMS + 1024 * slot + 256 * w + 4 * self.tid) });
            }
            let column = (which * self.d_model() + self.head * HEAD_DIM + self.tid) as usize;
            let index = self.bias_row() as usize * 3 * self.d_model() as usize + column;
            // SAFETY: the tile's own row, the head's own columns.
            unsafe { *self.params.bias_partials.wrapping_add(index) = sum };
        }
    }
}

/// `total = total * alpha(row) + part * factor`.
#[inline(always)]
fn accumulate(total: &mut Accumulator, part: &Accumulator, alpha: [f32; 2], factor: f32) {
    for j in 0..8 {
        for i in 0..4 {
            total[j][i] = fma(part[j][i], factor, total[j][i] * alpha[i >> 1]);
        }
    }
}

/// O, dQ and row statistics of one 64-row tile of queries.
///
/// # Safety
/// The launch is as the file's head says and `params` as [`AttentionParams`] does, with valid device pointers.
#[kernel(max_threads = LONG_THREADS, min_blocks_per_sm = LONG_BLOCKS_PER_SM, barriers = 7)]
pub unsafe fn attention_long_q(params: AttentionParams) {
    // SAFETY: every address is inside a tensor of `params` (rows past the chunk's end are predicated off) or the block's shared
    // memory as the file's head maps it; warps touch their own rows only, or pass a barrier; all branches around collectives
    // are the same for a whole warp, those around barriers for the whole block.
    unsafe {
        let block = Block::new(&params);
        let (tile, lane) = (block.tile, block.lane);
        if params.short_rows == 0 {
            block.finish_padding();
        }
        if tile.len == 0 {
            let row = (block.bias_row(), block.head);
            return fill_bias_row(&params, row, 0..1, block.complaint(), (block.tid, LONG_THREADS));
        }
        let lanes = Lanes::new(lane);
        let rows = block.rows(tile.first);
        let g = lane >> 2;
        let factors = block.q + STATISTICS + 256 + 64 * block.warp;

        block.fetch_keys(0);
        let q = block.load_states(params.query_states, tile.first);
        let d_attn = load_rows_f32(block.d_attn_rows(tile.first), lane);
        block.store_field(Operand::Q, largest_field_bf16(&q));
        block.store_field(Operand::DAttn, largest_field_f32(d_attn.as_flattened()));
        store_row_factors(factors, g, [pow2(-P_EXPONENT); 2]);
        sync_threads();
        let (q_exponent, d_attn_exponent) = (block.exponent(Operand::Q), block.exponent(Operand::DAttn));
        store_rows_f16(&q, q_exponent, block.own(block.q), lane);
        store_rows_f32_as_f16(&d_attn, pow2(d_attn_exponent), factors, block.own(block.d_attn), lane);

        // --- Pass 1: running maximum, rowsum, O and rowsum(P dP).
        let (mut max, mut sum, mut delta) = ([f32::NEG_INFINITY; 2], [0f32; 2], [0f32; 2]);
        let mut o = ZERO;
        let mut v_exponent_min = 126;
        let mut first = 0;
        while first < tile.len {
            // the last tile is followed by the first one, for pass 2
            let next = if first + LONG_TILE_ROWS < tile.len { first + LONG_TILE_ROWS } else { 0 };
            let (k_exponent, v_exponent) = block.convert_keys(next);
            v_exponent_min = v_exponent_min.min(v_exponent);
            let mut scores = block.scores(lanes, tile.len - first);
            let to_logits = logit_factor(params.scale, q_exponent + k_exponent);
            let (mut alpha, mut shift) = ([0f32; 2], [0f32; 2]);
            for r in 0..2 {
                let mut top = max[r];
                for s in &scores {
                    for half in s {
                        top = top.max(half[2 * r] * to_logits).max(half[2 * r + 1] * to_logits);
                    }
                }
                top = top.max(shfl_xor::<1>(top));
                top = top.max(shfl_xor::<2>(top));
                alpha[r] = ex2(max[r] - top);
                max[r] = top;
                shift[r] = P_EXPONENT as f32 - top;
            }
            let dp = block.dp(lanes);
            let (mut part, mut part_sum, mut dots) = (ZERO, [0f32; 4], [0f32; 2]);
            for j in 0..4 {
                exp_scores(&mut scores[j], to_logits, shift);
                let p = pack_a(&scores[j]);
                add_row_sums(&mut part_sum, p);
                mma_row_of_tiles(&mut part, p, block.v, lanes, j as u32);
                add_row_dots(&p, &dp[j], &mut dots);
            }
            let unscale = pow2(-v_exponent);
            accumulate(&mut o, &part, alpha, unscale);
            for r in 0..2 {
                sum[r] = sum[r] * alpha[r] + part_sum[2 * r];
                delta[r] = fma(dots[r], unscale, delta[r] * alpha[r]);
            }
            first += LONG_TILE_ROWS;
        }
        let inverse = [rcp(sum[0]), rcp(sum[1])];
        for r in 0..2 {
            delta[r] += shfl_xor::<1>(delta[r]);
            delta[r] += shfl_xor::<2>(delta[r]);
            delta[r] *= inverse[r] * (inverse[r] * pow2(P_EXPONENT));
            let row = g + 8 * r as u32;
            let at = block.head_row(block.row(tile.first) + row as usize);
            let stats = params.stats.wrapping_add(4 * at) as *mut u8;
            let values = [max[r].to_bits(), inverse[r].to_bits(), delta[r].to_bits(), v_exponent_min as u32];
            stg128_if(lane & 3 == 0 && row < rows, stats, values);
        }
        scale_rows(&mut o, inverse[0], inverse[1]);
        // the warp's rows of V stage the stores: every warp must be past its last product with V
        sync_threads();
        let o_offset = block.row(tile.first) * 2 * block.d_model() as usize + (block.head * HEAD_DIM * 2) as usize;
        let o_rows = OutputRows { first: params.o.wrapping_add(o_offset), pitch: 2 * block.d_model(), rows };
        store_bf16(&o, Pow2::new(0), block.own(block.v), lanes, o_rows);

        // --- Pass 2: dS from the final statistics, dQ.
        store_row_factors(factors, g, inverse);
        warp_sync();
        let d_attn = load_rows_f32(block.d_attn_rows(tile.first), lane);
        store_rows_f32_as_f16(&d_attn, pow2(d_attn_exponent), factors, block.own(block.d_attn), lane);
        let p_shift = [P_EXPONENT as f32 - max[0], P_EXPONENT as f32 - max[1]];
        let (mantissa, scale_exp) = split_scale(params.scale);
        let delta_unit = pow2((v_exponent_min + DS_EXPONENT - P_EXPONENT).max(-126)) * mantissa;
        let ds_shift = [-delta[0] * delta_unit, -delta[1] * delta_unit];
        let (mut dq, mut row_sums) = (ZERO, [0f32; 4]);
        let (mut last, mut k_exponent) = (0, 0);
        first = 0;
        while first < tile.len {
            let v_exponent;
            (k_exponent, v_exponent) = block.convert_keys(first + LONG_TILE_ROWS);
            let mut scores = block.scores(lanes, tile.len - first);
            let to_logits = logit_factor(params.scale, q_exponent + k_exponent);
            let dp = block.dp(lanes);
            let unit = pow2((v_exponent_min - v_exponent + DS_EXPONENT - P_EXPONENT).max(-126)) * mantissa;
            let mut part = ZERO;
            for j in 0..4 {
                exp_scores(&mut scores[j], to_logits, p_shift);
                let ds = ds_fragment(&pack_a(&scores[j]), &dp[j], unit, ds_shift);
                mma_row_of_tiles(&mut part, ds, block.k, lanes, j as u32);
                add_row_sums(&mut row_sums, ds);
            }
            accumulate(&mut dq, &part, [1.0; 2], pow2(-k_exponent));
            last = first;
            first += LONG_TILE_ROWS;
        }
        // the K tile is still the last one: its first keys stand for all, as in `attention_short`
        let keys = (tile.len - last).min(16) as f32;
        subtract_outer_product(&mut dq, &row_sums, rcp(keys) * pow2(-k_exponent), block.k, lanes);
        let factor = Pow2::new(scale_exp - DS_EXPONENT - d_attn_exponent - v_exponent_min);
        store_column_sums(&dq, factor, block.own_sums(0), lane);
        sync_threads();
        store_bf16(&dq, factor, block.own(block.v), lanes, block.gradient_rows(0));
        block.write_column_sums(0, 0, block.complaint());
    }
}

impl Block<'_> {
    /// Starts the copy of the queries, dA and statistics from row `first` of the chunk on.
    #[inline(always)]
    unsafe fn fetch_queries(&self, first: u32) {
        // SAFETY: as `fetch_states`; the raw statistics of a query are its thread's own.
        unsafe {
            self.fetch_states(0, self.params.query_states, first);
            fetch_rows_f32(self.raw_d_attn(), self.d_attn_rows(first), self.lane);
            let row = first + self.tid;
            let at = self.head_row((self.tile.start + row) as usize);
            let from = self.params.stats.wrapping_add(4 * at) as *const u8;
            if self.tid < LONG_TILE_ROWS {
                cp_async16(self.raw_statistics(), from, row < self.tile.len);
            }
            cp_async_commit();
        }
    }

    /// The raw statistics of query `tid`.
    #[inline(always)]
    fn raw_statistics(&self) -> u32 {
        self.q + RAW + 3 * LONG_TILE_BYTES + 16 * self.tid
    }
}

/// dK and dV of one 64-row tile of keys.
///
/// # Safety
/// As [`attention_long_q`], which has run on the same parameters.
#[kernel(max_threads = LONG_THREADS, min_blocks_per_sm = LONG_BLOCKS_PER_SM, barriers = 3)]
pub unsafe fn attention_long_k(params: AttentionParams) {
    // SAFETY: as in `attention_long_q`.
    unsafe {
        let block = Block::new(&params);
        let (tile, lane) = (block.tile, block.lane);
        if tile.len == 0 {
            return fill_bias_row(&params, (block.bias_row(), block.head), 1..3, 0.0, (block.tid, LONG_THREADS));
        }
        let lanes = Lanes::new(lane);
        let rows = block.rows(tile.first);
        let g = lane >> 2;
        let exists = [g < rows, g + 8 < rows];

        // this warp's 16 keys are A operands only, so the exponents are the warp's own
        block.fetch_queries(0);
        let k = block.load_states(params.key_states, tile.first);
        let v = block.load_states(params.value_states, tile.first);
        let k_exponent = scale_exponent(largest_field_bf16(&k));
        let v_exponent = scale_exponent(largest_field_bf16(&v));
        store_rows_f16(&k, k_exponent, block.own(block.k), lane);
        store_rows_f16(&v, v_exponent, block.own(block.v), lane);
        let v_exponent_min = *params.stats.wrapping_add(4 * block.head_row(tile.start as usize) + 3);
        let v_exponent_min = v_exponent_min.to_bits() as i32;
        let (mantissa, scale_exp) = split_scale(params.scale);
        let unit = pow2((v_exponent_min - v_exponent + DS_EXPONENT - P_EXPONENT).max(-126)) * mantissa;
        let minus_delta_unit = -pow2((v_exponent_min + DS_EXPONENT - P_EXPONENT).max(-126)) * mantissa;

        let (mut dk, mut dv) = (ZERO, ZERO);
        let mut statistics = block.q + STATISTICS;
        let mut first = 0;
        while first < tile.len {
            // --- Q and dA tiles and the queries' statistics; the copies of the next ones start.
            cp_async_wait::<0>();
            let q = block.fetched_states(0);
            let d_attn = fetched_rows_f32(block.raw_d_attn(), lane);
            block.store_field(Operand::Q, largest_field_bf16(&q));
            block.store_field(Operand::DAttn, largest_field_f32(d_attn.as_flattened()));
            if block.tid < LONG_TILE_ROWS {
                let [max, inverse, delta, _] = lds128(block.raw_statistics());
                let at = statistics + 4 * block.tid;
                sts32(at, max);
                sts32(at + 256, (f32::from_bits(inverse) * pow2(P_EXPONENT)).to_bits());
                sts32(at + 512, delta);
            }
            sync_threads(); // also: every warp has finished with the previous tiles
            let (q_exponent, d_attn_exponent) = (block.exponent(Operand::Q), block.exponent(Operand::DAttn));
            store_rows_f16(&q, q_exponent, block.own(block.q), lane);
            let factors = statistics + 256 + 64 * block.warp;
            store_rows_f32_as_f16(&d_attn, pow2(d_attn_exponent), factors, block.own(block.d_attn), lane);
            block.fetch_queries(first + LONG_TILE_ROWS);
            sync_threads();

            // --- S^T, P^T, dP^T, dS^T: rows are keys, columns queries.
            let mut scores = [[[0f32; 4]; 2]; 4];
            mma_row_by_rows(&mut scores, block.own(block.k), block.q, lanes);
            mask_columns(&mut scores, tile.len - first, lane);
            let to_logits = logit_factor(params.scale, q_exponent + k_exponent);
            let mut dp = [[[0f32; 4]; 2]; 4];
            mma_row_by_rows(&mut dp, block.own(block.v), block.d_attn, lanes);
            let (mut dv_part, mut dk_part) = (ZERO, ZERO);
            for j in 0..4 {
                for half in 0..2 {
                    for i in 0..4 {
                        let query = 16 * j as u32 + 8 * half as u32 + 2 * (lane & 3) + (i as u32 & 1);
                        let max = f32::from_bits(lds32(statistics + 4 * query));
                        let delta = f32::from_bits(lds32(statistics + 512 + 4 * query));
                        let p = ex2(fma(scores[j][half][i], to_logits, P_EXPONENT as f32 - max));
                        scores[j][half][i] = if exists[i >> 1] { p } else { 0.0 };
                        dp[j][half][i] = fma(dp[j][half][i], unit, delta * minus_delta_unit);
                    }
                }
                let p = pack_a(&scores[j]);
                let ds = ds_fragment(&p, &dp[j], 1.0, [0.0; 2]);
                mma_row_of_tiles(&mut dv_part, p, block.d_attn, lanes, j as u32);
                mma_row_of_tiles(&mut dk_part, ds, block.q, lanes, j as u32);
            }
            accumulate(&mut dv, &dv_part, [1.0; 2], pow2(-d_attn_exponent));
            let unscale = Pow2::new(-d_attn_exponent - q_exponent);
            if unscale.b != 1.0 {
                scale_rows(&mut dk_part, unscale.b, unscale.b);
            }
            accumulate(&mut dk, &dk_part, [1.0; 2], unscale.a);
            first += LONG_TILE_ROWS;
            statistics = 2 * (block.q + STATISTICS) + STATISTICS_SET - statistics;
        }
        let dv_factor = Pow2::new(-P_EXPONENT);
        let dk_factor = Pow2::new(scale_exp - DS_EXPONENT - v_exponent_min);
        store_column_sums(&dk, dk_factor, block.own_sums(0), lane);
        store_column_sums(&dv, dv_factor, block.own_sums(1), lane);
        sync_threads();
        store_bf16(&dk, dk_factor, block.own(block.k), lanes, block.gradient_rows(1));
        store_bf16(&dv, dv_factor, block.own(block.v), lanes, block.gradient_rows(2));
        block.write_column_sums(0, 1, 0.0);
        block.write_column_sums(1, 2, 0.0);
    }
}
