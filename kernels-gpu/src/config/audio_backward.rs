//! `audio_backward_*` (operation A on sm_90a): teams of warps that work on a (chunk, head) each, ahead of the products.
use super::attention::{HEAD_DIM, score_pitch_bytes, short_rows};
use super::wgmma::FULL_OFFSET;

/// Sizes of a team in 16-row tiles. (Six would not fit the registers.)
pub const TEAM_ROW_TILES: [u32; 3] = [4, 5, 8];
/// Depth in k of a stage of a team's ring: rows of 128 bytes.
pub const STAGE_K: u32 = 64;
/// Warps of half a block.
pub const HALF_WARPS: u32 = 6;

/// Teams of a block at most: two of `HALF_WARPS` warps at most, or one.
pub const fn most_teams(row_tiles: u32) -> u32 {
    if row_tiles <= HALF_WARPS { 2 } else { 1 }
}

/// Teams of a block that `items` (chunk, head) items need on `blocks` blocks.
pub const fn teams(row_tiles: u32, items: u64, blocks: u32) -> u32 {
    if items <= blocks as u64 { 1 } else { most_teams(row_tiles) }
}

/// Warps of a team that multiply: one warpgroup, or two of 64 tokens each.
pub const fn multiplying_warps(row_tiles: u32) -> u32 {
    if row_tiles == 8 { 8 } else { 4 }
}

/// Warps of a team: one for each 16 rows; the one after those that multiply fills the ring.
pub const fn team_warps(row_tiles: u32) -> u32 {
    let with_producer = multiplying_warps(row_tiles) + 1;
    if row_tiles > with_producer { row_tiles } else { with_producer }
}

/// Shared memory of each of a block's `teams` teams in bytes.
pub const fn team_bytes(teams: u32) -> u32 {
    FULL_OFFSET / teams
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

/// Bytes of exponent fields, row factors and the mbarriers of `stages` stages, at the end of a team's shared memory.
pub const fn small_bytes(row_tiles: u32, stages: u32) -> u32 {
    4 * row_tiles * 4 + 4 * short_rows(row_tiles) + 16 * stages
}

/// Stages of the ring of each of a block's `teams` teams: as many as fit.
pub const fn stages(row_tiles: u32, teams: u32) -> u32 {
    let room = team_bytes(teams) - queries_and_keys_bytes(row_tiles);
    let mut stages = 1;
    while (stages + 1) * stage_bytes(row_tiles) + small_bytes(row_tiles, stages + 1) <= room {
        stages += 1;
    }
    stages
}

const _: () = {
    let mut i = 0;
    while i < TEAM_ROW_TILES.len() {
        let row_tiles = TEAM_ROW_TILES[i];
        let mut teams = 1;
        while teams <= most_teams(row_tiles) {
            let stages = stages(row_tiles, teams);
            let after = team_bytes(teams) - queries_and_keys_bytes(row_tiles) - small_bytes(row_tiles, stages);
            assert!(stages >= 4 && tiles_bytes(row_tiles) <= after);
            assert!(team_bytes(teams).is_multiple_of(1024) && stage_bytes(row_tiles).is_multiple_of(1024));
            assert!(team_warps(row_tiles) * teams <= 2 * HALF_WARPS);
            teams += 1;
        }
        i += 1;
    }
};
