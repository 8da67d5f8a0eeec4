//! The Hopper grouped GEMM (`wgmma_*`).

/// Rows of an output tile: two consumer warpgroups of 64 rows.
pub const TILE_M: u32 = 128;
/// Depth of a stage, and of the unit that K is counted in (a k-block).
pub const TILE_K: u32 = 64;
/// Widths of an output tile. Wide tiles read shared memory least: 256 takes 0.63 us a k-block, 128 takes 0.39 and not half.
pub const TILE_WIDTHS: [u32; 3] = [256, 192, 128];
/// Widths of the promoted kernel, which holds two sets of accumulators: 2 x 96 registers a thread at 192.
pub const PROMOTED_TILE_WIDTHS: [u32; 2] = [192, 128];
/// k-blocks, of three products each, whose sum the matrix units accumulate before it is promoted to an fp32 total: 3 * 6 * 64 = 1152 of multiplied k.
/// They truncate: 1024 cost 1.2e-6, normwise, and the error grows in proportion.
pub const PROMOTE_K_BLOCKS: u32 = 6;
/// Segments of a promoted product. Only the portable kernel goes through k once for each; for the Hopper kernel they name the tensors of a product.
pub const PROMOTED_SEGMENTS: u32 = 3;

/// Part (0: high, 1: low) of A and of B in a segment of a promoted product: low x high, high x low, high x high. The portable kernel sums them in this
/// order, the small products first.
#[inline(always)]
pub const fn segment_parts(segment: u32) -> [u32; 2] {
    [(segment == 0) as u32, (segment == 1) as u32]
}

/// Blocks of a cluster, which multiply in step: a tile each, one below the other, that share B. Each block loads a part of B for both.
pub const CLUSTER_SIZE: u32 = 2;
/// Rows of the tiles of a cluster.
pub const CLUSTER_M: u32 = CLUSTER_SIZE * TILE_M;

/// Stages of the ring.
pub const STAGES: u32 = 4;
/// Consumer warpgroups.
pub const CONSUMERS: u32 = 2;
/// A producer warpgroup and two consumer warpgroups.
pub const THREADS: u32 = 3 * 128;
/// One block an SM: shared memory leaves no room for a second one.
pub const MIN_BLOCKS_PER_SM: u32 = 1;
/// Registers of a producer thread after `setmaxnreg`.
pub const PRODUCER_REGISTERS: u32 = 56;
/// Registers of a consumer thread after `setmaxnreg`: 128 of them hold the accumulators of a 64 x 256 tile.
pub const CONSUMER_REGISTERS: u32 = 224;
// A launch gets what `.maxntid`/`.minnctapersm` allow, 168 a thread; asking for more than that in all hangs.
const _: () = assert!(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS <= 3 * 168);

/// Bytes of a chunk: 64 rows of 128 bytes. 64 m (or n) by 64 k of a 16-bit operand in either major, or 64 rows of an output.
pub const CHUNK_BYTES: u32 = 64 * 128;
/// A of a stage: 128 x 64.
pub const A_BYTES: u32 = 2 * CHUNK_BYTES;
/// A stage: A and up to 256 columns of B.
pub const STAGE_BYTES: u32 = A_BYTES + 4 * CHUNK_BYTES;
/// Output chunks that a warpgroup stages before each TMA store.
pub const OUTPUT_CHUNKS: u32 = 2;
/// Offset of the output chunks `[2 warpgroups][OUTPUT_CHUNKS]`.
pub const OUTPUT_OFFSET: u32 = STAGES * STAGE_BYTES;
/// Offset of the `full` mbarriers, one a stage.
pub const FULL_OFFSET: u32 = OUTPUT_OFFSET + 2 * OUTPUT_CHUNKS * CHUNK_BYTES;
/// Offset of the `empty` mbarriers, one a stage.
pub const EMPTY_OFFSET: u32 = FULL_OFFSET + 8 * STAGES;
/// Dynamic shared memory of a launch.
pub const SMEM_BYTES: u32 = EMPTY_OFFSET + 8 * STAGES;
/// Bytes of the mbarriers of a ring.
pub const RING_BARRIER_BYTES: u32 = SMEM_BYTES - FULL_OFFSET;
const _: () = assert!(SMEM_BYTES <= 232_448, "more than an SM gives to one block");
// TMA and wgmma with 128-byte swizzle want blocks on 1024-byte boundaries; mbarriers want 8.
const _: () =
    assert!(STAGE_BYTES.is_multiple_of(1024) && OUTPUT_OFFSET.is_multiple_of(1024) && FULL_OFFSET.is_multiple_of(8));

/// K ranges that a tile can be cut into: a stage holds one 8-column group (2 x 2 KiB) of each.
pub const MAX_SPLITS: u32 = 12;
/// Bytes of an 8-column group of a warpgroup's accumulators: 128 threads of 4 floats.
pub const GROUP_BYTES: u32 = 128 * 16;
/// Floats of a 128 x 64 part of a tile, the unit of workspace slots.
pub const SLOT_FLOATS: u32 = 128 * 64;
const _: () = assert!(MAX_SPLITS * 2 * GROUP_BYTES <= STAGE_BYTES);

/// 8-column groups of all `splits` parts of a tile that one stage holds: the step of a reduce item.
#[inline(always)]
pub const fn groups_per_stage(splits: u32) -> u32 {
    match splits {
        0..=3 => 4,
        4..=6 => 2,
        _ => 1,
    }
}

/// Columns that a warp of the rider sums of a 16-bit matrix: 32 bytes of each row.
pub const RIDER_COLUMN_SUM_COLUMNS: u32 = 16;

/// Offset of the mbarriers of the conversion's ring, which has the same stages.
pub const CONVERSION_BARRIERS_OFFSET: u32 = SMEM_BYTES;
/// Offset of the mbarrier at which all consumer warpgroups of a cluster arrive when they have converted.
pub const CONVERTED_OFFSET: u32 = CONVERSION_BARRIERS_OFFSET + RING_BARRIER_BYTES;
/// Offset of the maxima that the warps of a consumer warpgroup exchange while they convert tokens: `[2 warpgroups][2 sets][8]` words.
pub const EXCHANGE_OFFSET: u32 = (CONVERTED_OFFSET + 8).next_multiple_of(EXCHANGE_BYTES);
/// Bytes of a warpgroup's sets, which lie on a multiple of them.
pub const EXCHANGE_BYTES: u32 = 2 * 8 * 4;
/// Offset of the guessed maxima of the weights, `[2 warpgroups][2 sequences]` words.
pub const GUESS_OFFSET: u32 = EXCHANGE_OFFSET + 2 * EXCHANGE_BYTES;
/// Dynamic shared memory of a launch that converts.
pub const CONVERTING_SMEM_BYTES: u32 = GUESS_OFFSET + 2 * 2 * 4;
const _: () = assert!(CONVERTING_SMEM_BYTES <= 232_448, "more than an SM gives to one block");

/// Sizes of the operation that a launch can convert: it has code for these alone, which holds a token in registers.
pub mod converting {
    /// Query heads.
    pub const NUM_HEADS: u32 = 16;
    /// Key/value heads.
    pub const NUM_KV_HEADS: u32 = 4;
    /// Columns of a head.
    pub const HEAD_DIM: u32 = 256;
    /// Columns of dQ.
    pub const Q_OUT_DIM: u32 = NUM_HEADS * HEAD_DIM;
    /// Columns of dK and of dV.
    pub const KV_OUT_DIM: u32 = NUM_KV_HEADS * HEAD_DIM;
    /// Columns of decoder hidden states.
    pub const HIDDEN_SIZE: u32 = 1536;
    /// Columns of encoder hidden states.
    pub const CROSS_HIDDEN_SIZE: u32 = 1024;
    /// Rows of weights or hidden states that the warps of a block take at a time; items of weights have a multiple of them.
    pub const ROUND_ROWS: u32 = 8;
    /// Most rows of a scale item: a lane has the exponent of one of its warp's rows.
    pub const MAX_SCALE_ROWS: u32 = 32 * ROUND_ROWS;
}

/// Indices of the counters of a launch that converts: rows that are done. `+ sequence` is 0 for the decoder and q_weight, 1 for the encoder,
/// k_weight and v_weight.
pub mod ready {
    /// + sequence: rows of weights that are converted by a guessed exponent, and whose largest element is in the maxima.
    pub const WEIGHT_MAXIMA: u32 = 0;
    /// + sequence: rows of weights that are converted for good.
    pub const WEIGHTS: u32 = 2;
    /// + sequence: tokens whose gradients are converted and whose exponents are in the maxima.
    pub const TOKENS: u32 = 4;
    /// + sequence: rows of hidden states that are converted.
    pub const HIDDEN: u32 = 6;
    /// First of the row blocks of `TILE_M` tokens, decoder before encoder: tokens of it whose gradients are converted.
    pub const ROW_BLOCKS: u32 = 8;

    /// Counter of the row block of `row` of a sequence.
    #[inline(always)]
    pub const fn row_block(sequence: u32, row: u32, rows_dec: u32) -> u32 {
        ROW_BLOCKS + if sequence == 0 { 0 } else { rows_dec.div_ceil(super::TILE_M) } + row / super::TILE_M
    }

    /// Number of counters.
    pub const fn counters(rows_dec: u32, rows_enc: u32) -> u32 {
        ROW_BLOCKS + rows_dec.div_ceil(super::TILE_M) + rows_enc.div_ceil(super::TILE_M)
    }
}

/// Rows that a stage holds, of a matrix with rows of `row_bytes` (at most `STAGE_BYTES`): eight for each round of the consumer warps if
/// there is room.
#[inline(always)]
pub const fn rows_per_stage(row_bytes: u32) -> u32 {
    let rows = STAGE_BYTES / row_bytes;
    if rows < 8 { rows } else { rows & !7 }
}

/// Tokens whose gradients and hidden states, `token_bytes` in all (at most `STAGE_BYTES`), a stage holds.
#[inline(always)]
pub const fn tokens_per_stage(token_bytes: u32) -> u32 {
    let tokens = STAGE_BYTES / token_bytes;
    if tokens < MAX_TOKENS_PER_STAGE { tokens } else { MAX_TOKENS_PER_STAGE }
}

/// Most tokens of a stage.
const MAX_TOKENS_PER_STAGE: u32 = 8;

/// Named barriers (`bar.sync id`).
pub mod named_barrier {
    /// + warpgroup: the 128 threads of a consumer warpgroup.
    pub const WARPGROUP: u32 = 1;
    /// + warpgroup: a consumer warpgroup and the warp that publishes its parts, 160 threads.
    pub const PART_STORED: u32 = 3;
}
