//! `attention_fused_*` (operation A on sm_90a): the short attention kernels with their share of the grad_attention product inside.
use super::attention::{HEAD_DIM, SHORT_ROW_TILES, SM90_SHARED_BYTES, score_pitch_bytes, short_rows};

/// Depth in k of a stage: rows of 128 bytes. (32 k were slower: 52.2 us instead of 50.8 for all of operation A.)
pub const STAGE_K: u32 = 64;
/// Most stages: what the whole shared memory of an SM holds of the smallest.
pub const MAX_STAGES: u32 = 12;

/// Most chunks of a launch: the kernel counts the threads of all its blocks in 32 bits.
pub const MAX_CHUNKS: usize = 1 << 24;

/// Warps that multiply: one warpgroup, or two of 64 tokens each.
pub const fn multiplying_warps(row_tiles: u32) -> u32 {
    if row_tiles == 8 { 8 } else { 4 }
}

/// Threads of a block: a warp for each 16 rows; the one after those that multiply fills the ring.
pub const fn threads(row_tiles: u32) -> u32 {
    let with_producer = multiplying_warps(row_tiles) + 1;
    32 * if row_tiles > with_producer { row_tiles } else { with_producer }
}

/// Bytes of a stage: out_weight `[STAGE_K, 64]` and grad_output `[rows, STAGE_K]`, bf16.
pub const fn stage_bytes(row_tiles: u32) -> u32 {
    2 * STAGE_K * (HEAD_DIM + short_rows(row_tiles))
}

/// Bytes of Q and K, in front of the stages.
pub const fn queries_and_keys_bytes(row_tiles: u32) -> u32 {
    2 * short_rows(row_tiles) * 2 * HEAD_DIM
}

/// Bytes of what takes the stages' place: V, dA, P, dS and column sums.
pub const fn tiles_bytes(row_tiles: u32) -> u32 {
    let rows = short_rows(row_tiles);
    2 * rows * 2 * HEAD_DIM + 2 * rows * score_pitch_bytes(row_tiles) + 3 * row_tiles * 4 * HEAD_DIM
}

/// Dynamic shared memory of a block with `stages` stages; the map is in `kernel/attention_fused.rs`.
pub const fn shared_bytes(row_tiles: u32, stages: u32) -> u32 {
    let (ring, tiles) = (stages * stage_bytes(row_tiles), tiles_bytes(row_tiles));
    let small = 4 * row_tiles * 4 + 4 * short_rows(row_tiles) + 16 * stages;
    queries_and_keys_bytes(row_tiles) + (if ring > tiles { ring } else { tiles }) + small
}

/// Most stages, up to `MAX_STAGES`, with which an SM of sm_90 holds `blocks` blocks, each of which takes 1 KiB more than it asks for.
pub const fn stages(row_tiles: u32, blocks: u32) -> u32 {
    let mut stages = MAX_STAGES;
    while stages > 2 && blocks * (shared_bytes(row_tiles, stages) + 1024) > SM90_SHARED_BYTES {
        stages -= 1;
    }
    stages
}

/// Blocks on an SM of sm_90 at most: 3, 3, 2, 1, what registers and shared memory allow.
pub const fn blocks_per_sm(row_tiles: u32) -> u32 {
    512 / threads(row_tiles)
}

const _: () = {
    let mut i = 0;
    while i < SHORT_ROW_TILES.len() {
        let row_tiles = SHORT_ROW_TILES[i];
        let blocks = blocks_per_sm(row_tiles);
        assert!(stages(row_tiles, blocks) >= 2 && stage_bytes(row_tiles).is_multiple_of(1024));
        assert!(blocks * (shared_bytes(row_tiles, stages(row_tiles, blocks)) + 1024) <= SM90_SHARED_BYTES);
        i += 1;
    }
};
