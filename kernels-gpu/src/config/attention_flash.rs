//! The Hopper kernels for long chunks (`attention_flash_*`).
use super::attention::HEAD_DIM;

/// Rows of a tile of queries or keys: two consumer warpgroups of 64.
pub const TILE_ROWS: u32 = 128;
/// Bytes of a tile of fp16 operands.
pub const TILE_BYTES: u32 = TILE_ROWS * 2 * HEAD_DIM;
/// Operand tiles of a tile of rows and a head: Q, K, V, dA.
pub const OPERANDS: u32 = 4;
/// Floats of a tile's statistics: for each query what is added to its logits, and delta.
pub const STATISTICS_FLOATS: u32 = 2 * TILE_ROWS;
/// Bytes of a tile's statistics.
pub const STATISTICS_BYTES: u32 = 4 * STATISTICS_FLOATS;
/// Floats of a tile of dQ.
pub const DQ_FLOATS: u32 = TILE_ROWS * HEAD_DIM;
/// Bytes of a warpgroup's half of a tile of dQ.
pub const DQ_HALF_BYTES: u32 = 2 * DQ_FLOATS;

/// Threads of a block of the kernels that only move rows: a warp for each 16 rows of the tile.
pub const ROWS_THREADS: u32 = 2 * TILE_ROWS;
/// Blocks of these kernels that fit on an SM.
pub const ROWS_BLOCKS_PER_SM: u32 = 4;
/// Blocks of `attention_flash_largest`, which holds its rows of all four operands at a time.
pub const LARGEST_BLOCKS_PER_SM: u32 = 2;
/// Dynamic shared memory of `attention_flash_largest`: four words for each warp.
pub const LARGEST_SHARED_BYTES: u32 = ROWS_THREADS / 32 * 16;
/// Dynamic shared memory of `attention_flash_convert`: eight words for each warp.
pub const CONVERT_SHARED_BYTES: u32 = ROWS_THREADS / 32 * 32;
/// Dynamic shared memory of `attention_flash_dq`: 2 KiB of rows and 256 bytes of sums for each warp.
pub const DQ_SHARED_BYTES: u32 = ROWS_THREADS / 32 * (2048 + 256);

/// A producer warpgroup and two consumer warpgroups.
pub const THREADS: u32 = 3 * 128;
/// Registers of a producer thread after `setmaxnreg`.
pub const PRODUCER_REGISTERS: u32 = 40;
/// Registers of a consumer thread after `setmaxnreg`.
pub const CONSUMER_REGISTERS: u32 = 232;
// A launch gets what `.maxntid`/`.minnctapersm` allow, 168 a thread; asking for more than that in all hangs.
const _: () = assert!(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS <= 3 * 168);

/// Shared memory of `attention_flash_forward`; the map is in its file.
pub mod forward {
    use super::TILE_BYTES;

    /// Stages of Q.
    pub const QUERY_STAGES: u32 = 2;
    /// Stages of K and V.
    pub const STAGES: u32 = 4;
    /// First stage of K and V, after Q.
    pub const STAGES_OFFSET: u32 = QUERY_STAGES * TILE_BYTES;
    /// Rows of O on their way out.
    pub const O_OFFSET: u32 = STAGES_OFFSET + STAGES * 2 * TILE_BYTES;
    /// mbarriers of K and V.
    pub const BARRIERS_OFFSET: u32 = O_OFFSET + TILE_BYTES;
    /// mbarriers of Q.
    pub const QUERY_BARRIERS_OFFSET: u32 = BARRIERS_OFFSET + 16 * STAGES;
    /// Dynamic shared memory of a launch.
    pub const SHARED_BYTES: u32 = QUERY_BARRIERS_OFFSET + 16 * QUERY_STAGES;
    const _: () = assert!(SHARED_BYTES <= 232_448);
}

/// Shared memory of `attention_flash_backward`; the map is in its file.
pub mod backward {
    use super::{DQ_HALF_BYTES, STATISTICS_BYTES, TILE_BYTES};

    /// Stages of K and V.
    pub const KEY_STAGES: u32 = 2;
    /// Stages of Q, dA and their statistics.
    pub const STAGES: u32 = 2;
    /// First stage of Q and dA, after K and V.
    pub const STAGES_OFFSET: u32 = KEY_STAGES * 2 * TILE_BYTES;
    /// Stages of dS.
    pub const DS_STAGES: u32 = 2;
    /// First stage of dS.
    pub const DS_OFFSET: u32 = STAGES_OFFSET + STAGES * 2 * TILE_BYTES;
    /// Bytes of a tile of dS: 128 keys by 128 queries.
    pub const DS_BYTES: u32 = 2 * TILE_BYTES;
    /// Column sums of dK and dV for each consumer warp, in place of dS, after the rows on their way out.
    pub const SUMS_OFFSET: u32 = DS_OFFSET + TILE_BYTES;
    /// Both warpgroups' halves of dQ on their way out.
    pub const DQ_OFFSET: u32 = DS_OFFSET + DS_STAGES * DS_BYTES;
    /// Stages of statistics.
    pub const STATISTICS_OFFSET: u32 = DQ_OFFSET + 2 * DQ_HALF_BYTES;
    /// mbarriers of Q and dA.
    pub const BARRIERS_OFFSET: u32 = STATISTICS_OFFSET + STAGES * STATISTICS_BYTES;
    /// mbarriers of K and V.
    pub const KEY_BARRIERS_OFFSET: u32 = BARRIERS_OFFSET + 16 * STAGES;
    /// mbarriers of dS.
    pub const DS_BARRIERS_OFFSET: u32 = KEY_BARRIERS_OFFSET + 16 * KEY_STAGES;
    /// mbarriers of the halves of dQ.
    pub const DQ_BARRIERS_OFFSET: u32 = DS_BARRIERS_OFFSET + 16 * DS_STAGES;
    /// For each stage of K and V, the entry and head of its tile.
    pub const TILES_OFFSET: u32 = DQ_BARRIERS_OFFSET + 2 * 16;
    /// Dynamic shared memory of a launch.
    pub const SHARED_BYTES: u32 = TILES_OFFSET + 8 * KEY_STAGES;
    const _: () = assert!(SHARED_BYTES <= 232_448);
    const _: () = assert!(DS_OFFSET.is_multiple_of(1024) && STATISTICS_OFFSET.is_multiple_of(16));
}

/// Named barriers (`bar.sync id`); 0 is the whole block's.
pub mod named_barrier {
    /// Both consumer warpgroups.
    pub const CONSUMERS: u32 = 1;
    /// + warpgroup: it is this consumer warpgroup's turn to issue its products.
    pub const TURN: u32 = 2;
}
