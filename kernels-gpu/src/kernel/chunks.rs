//! What the attention kernels do with `cu_seqlens`, which they read on the device: rows of a chunk, the tile of a block, and what is to be
//! done about rows past the last chunk. See `schedule::chunks` for the rules.
//!
//! Nothing here trusts the offsets: whatever they hold, no row outside of the tensors is touched. A chunk whose offsets break a rule is
//! worked on by nobody, and its row of `bias_partials` becomes NaN, so that grad_q_bias tells.
use crate::config::attention::HEAD_DIM;
use crate::params::AttentionParams;
use crate::ptx::memory::{ldg32_s32, ldg128_or_zero, stg128_if};
use crate::ptx::sync::ballot;
use crate::schedule::chunks::{ChunkRows, ChunkSearch, chunk_rows, token_rows};
use crate::tile::layout::{ROW_BYTES, swizzle_128b};

/// Rows of the block of the inputs that the end of the tokens cuts: a k-block of the gradients GEMM.
const BOUNDARY_ROWS: u32 = crate::config::wgmma::TILE_K;
const _: () = assert!(BOUNDARY_ROWS * ROW_BYTES == crate::config::wgmma::CHUNK_BYTES);

/// Rows of chunk `index`; those past the last chunk have none.
///
/// # Safety
/// `params` as [`AttentionParams`] says.
#[inline(always)]
pub unsafe fn load_chunk(params: &AttentionParams, index: u32) -> ChunkRows {
    let at = |index: u32| params.cu_seqlens.wrapping_add(index.min(params.num_chunks) as usize);
    // SAFETY: the offsets are num_chunks + 1, and nothing writes them during the launch.
    let (start, end) = unsafe { (ldg32_s32(at(index)), ldg32_s32(at(index + 1))) };
    chunk_rows(index, start, end, params.total_seq_len, params.max_chunk_len)
}

/// Rows that belong to a chunk; the others are padding.
///
/// # Safety
/// As [`load_chunk`].
#[inline(always)]
pub unsafe fn load_token_rows(params: &AttentionParams) -> u32 {
    // SAFETY: the last offset.
    let last = unsafe { ldg32_s32(params.cu_seqlens.wrapping_add(params.num_chunks as usize)) };
    token_rows(last, params.total_seq_len)
}

/// One tile of a chunk, the work of a block of the long kernels.
#[derive(Clone, Copy)]
pub struct LongTile {
    /// First row of the chunk.
    pub start: u32,
    /// Rows of the chunk; 0: the block has no tile.
    pub len: u32,
    /// First row of the tile, relative to `start`, below `len`.
    pub first: u32,
}

impl LongTile {
    /// The tile, of `TILE_ROWS` rows, of slot `slot` of `params.long_slots`, if it is one of a chunk that the long kernels take.
    ///
    /// # Safety
    /// As [`load_chunk`]; all lanes of the warp arrive, with one `slot`.
    #[inline(always)]
    pub unsafe fn load<const TILE_ROWS: u32>(params: &AttentionParams, slot: u32, lane: u32) -> LongTile {
        let slots = params.long_slots;
        let mut search = ChunkSearch::new(params.num_chunks);
        // SAFETY: probes are at most num_chunks; the search goes on for the whole warp or for none of it.
        let rows = unsafe {
            while search.len > 1 {
                let probe = search.probe(lane);
                let start = ldg32_s32(params.cu_seqlens.wrapping_add(probe as usize)) as u32;
                let is_below = search.has(probe) && slots.first(start, probe) <= slot;
                search = search.narrow(ballot(is_below).count_ones());
            }
            load_chunk(params, search.first)
        };
        let first = TILE_ROWS.wrapping_mul(slot.wrapping_sub(slots.first(rows.start, search.first)));
        let is_tile = rows.len > params.short_rows && first < rows.len;
        LongTile { start: rows.start, len: if is_tile { rows.len } else { 0 }, first }
    }
}

/// Writes `value` to row `row` of the bias partial sums, columns of gradients `gradients` (0: dQ, 1: dK, 2: dV) of one head, by a block of
/// `threads` threads, a multiple of 64.
///
/// # Safety
/// No other block writes them; `row` is one of the rows.
#[inline(always)]
pub unsafe fn fill_bias_row(
    params: &AttentionParams,
    (row, head): (u32, u32),
    gradients: core::ops::Range<u32>,
    value: f32,
    (tid, threads): (u32, u32),
) {
    let d_model = params.num_heads * HEAD_DIM;
    let partials = params.bias_partials.wrapping_add(row as usize * 3 * d_model as usize + (head * HEAD_DIM) as usize);
    let mut i = gradients.start * HEAD_DIM + tid;
    while i < gradients.end * HEAD_DIM {
        // SAFETY: the row's own columns.
        unsafe { *partials.wrapping_add((i / HEAD_DIM * d_model + i % HEAD_DIM) as usize) = value };
        i += threads;
    }
}

/// What goes into the bias partial sums of a chunk without rows.
#[inline(always)]
pub fn bias_of_no_rows(chunk: ChunkRows) -> f32 {
    if chunk.breaks_a_rule { f32::NAN } else { 0.0 }
}

/// A warp's share of the rows past the last chunk: number `index` of `count` warps that share one head's.
///
/// * O and dQ, dK, dV become zero there, so that grad_hidden_states does, and weights' gradients take nothing from there.
/// * If `params.boundary` is given and the end of the tokens cuts a block of 64 rows: that block of grad_output and of hidden_states is copied
///   there, with zeros past the end.
///
/// # Safety
/// As [`load_chunk`]; all warps of the head's `count` call it with `tokens` as [`load_token_rows`] gives it, and no other thread accesses
/// these rows during the launch.
#[inline(always)]
pub unsafe fn finish_padding(params: &AttentionParams, tokens: u32, head: u32, (index, count): (u32, u32), lane: u32) {
    let d_model = params.num_heads * HEAD_DIM;
    let (part, piece) = (lane / 8, lane % 8);
    // --- Lanes 8 i .. of a warp have the head's 128 bytes of a row of O (i = 0), dQ, dK, dV.
    let pitch = if part == 0 { 2 * d_model } else { 6 * d_model } as usize;
    let column = (part.saturating_sub(1) * 2 * d_model + head * ROW_BYTES + 16 * piece) as usize;
    let first = if part == 0 { params.o } else { params.dqkv }.wrapping_add(column);
    let mut row = tokens + index;
    while row < params.total_seq_len {
        // SAFETY: rows of the tensors that belong to no chunk.
        unsafe { stg128_if(true, first.wrapping_add(row as usize * pitch), [0; 4]) };
        row += count;
    }
    // --- Four rows of the boundary block a warp, grad_output's first.
    let cut = tokens % BOUNDARY_ROWS;
    if params.boundary.is_null() || cut == 0 {
        return;
    }
    const GROUPS: u32 = BOUNDARY_ROWS / 4;
    let mut unit = index;
    while unit < 2 * GROUPS {
        let (tensor, row) = (unit / GROUPS, unit % GROUPS * 4 + part);
        let source = if tensor == 0 { params.grad_output } else { params.hidden_states };
        let at = (tokens - cut + row) as usize * 2 * d_model as usize + (head * ROW_BYTES + 16 * piece) as usize;
        let tile = (tensor * params.num_heads + head) as usize * (BOUNDARY_ROWS * ROW_BYTES) as usize;
        let to = params.boundary.wrapping_add(tile + swizzle_128b(row, piece) as usize);
        // SAFETY: rows below `tokens` are inside the inputs; the pieces are this warp's.
        unsafe { stg128_if(true, to, ldg128_or_zero(source.wrapping_add(at), row < cut)) };
        unit += count;
    }
}
