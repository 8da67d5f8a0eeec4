//! The `attention_*` kernels, `column_sums_bf16` and `sum_partials` (operation A).

/// The one head_dim that the kernels take.
pub const HEAD_DIM: u32 = 64;
/// Most heads of a launch: blockIdx.y counts them.
pub const MAX_HEADS: u32 = 65_535;
/// Most chunks of a launch: blockIdx.x counts them, and row numbers count steps of eight rows a chunk.
pub const MAX_CHUNKS: u32 = 1 << 27;

/// The short kernels' sizes, in 16-row tiles of queries and keys: `attention_short_64`, `_80`, `_96` and `_128`.
pub const SHORT_ROW_TILES: [u32; 4] = [4, 5, 6, 8];

/// Longest chunk that the short kernel with `row_tiles` 16-row tiles takes; also the number in its name.
pub const fn short_rows(row_tiles: u32) -> u32 {
    16 * row_tiles
}

/// Threads of a block of the short kernel: a warp for each 16 rows.
pub const fn short_threads(row_tiles: u32) -> u32 {
    32 * row_tiles
}

/// Row pitch in bytes of the short kernel's P and dS tiles (`[query][key]`, 16 bits): an odd number of 16-byte pieces, so that eight
/// rows of one column of pieces lie in different banks.
pub const fn score_pitch_bytes(row_tiles: u32) -> u32 {
    32 * row_tiles + 16
}

/// Dynamic shared memory of a block of the short kernel; the map is in `kernel/attention_short.rs`.
pub const fn short_shared_bytes(row_tiles: u32) -> u32 {
    let rows = short_rows(row_tiles);
    let tiles = 4 * rows * 2 * HEAD_DIM + 2 * rows * score_pitch_bytes(row_tiles);
    let column_sums = 3 * row_tiles * 4 * HEAD_DIM;
    let exponent_fields = 4 * row_tiles * 4;
    let row_factors = 4 * rows;
    tiles + column_sums + exponent_fields + row_factors
}

/// Blocks of the short kernel that an SM with `shared_bytes_per_sm` bytes of shared memory holds, 0 if not even one: each block takes
/// 1 KiB more than it asks for, and `short_min_blocks` bounds the registers.
pub const fn short_blocks_per_sm(row_tiles: u32, shared_bytes_per_sm: u32) -> u32 {
    let by_shared = shared_bytes_per_sm / (short_shared_bytes(row_tiles) + 1024);
    // 4, 3, 2, 1 blocks: what the register limits of the launch bounds were chosen for
    let by_registers = 16 / row_tiles - (row_tiles == 8) as u32;
    if by_shared < by_registers { by_shared } else { by_registers }
}

/// Shared memory of an SM of compute capability 8.0, which the portable module's launch bounds assume, and of 9.0.
pub const SM80_SHARED_BYTES: u32 = 164 * 1024;
/// See [`SM80_SHARED_BYTES`].
pub const SM90_SHARED_BYTES: u32 = 228 * 1024;

/// Rows of a tile of the long kernels.
pub const LONG_TILE_ROWS: u32 = 64;
/// Threads of a block of the long kernels: a warp for each 16 rows of the tile.
pub const LONG_THREADS: u32 = 128;
/// Blocks of the long kernels on an SM; leaves 255 registers a thread.
pub const LONG_BLOCKS_PER_SM: u32 = 2;
/// Dynamic shared memory of `attention_long_q`; the map is in `kernel/attention_long.rs`.
pub const LONG_Q_SHARED_BYTES: u32 = LONG_COMMON_BYTES + 2 * LONG_TILE_BYTES;
/// Dynamic shared memory of `attention_long_k`.
pub const LONG_K_SHARED_BYTES: u32 = LONG_COMMON_BYTES + 3 * LONG_TILE_BYTES + 16 * LONG_TILE_ROWS;
/// Bytes of a 64 x 64 tile of 16-bit elements.
pub const LONG_TILE_BYTES: u32 = LONG_TILE_ROWS * 2 * HEAD_DIM;
/// What both long kernels have: four fp16 tiles, column sums of two gradients, two sets of three row statistics, exponent fields.
pub const LONG_COMMON_BYTES: u32 = 4 * LONG_TILE_BYTES + 2 * 1024 + 2 * 3 * 4 * LONG_TILE_ROWS + 64;
const _: () = assert!(LONG_BLOCKS_PER_SM * (LONG_K_SHARED_BYTES + 1024) <= SM80_SHARED_BYTES);

/// Columns that a block of `column_sums_bf16` sums: 8 a lane.
pub const COLUMN_SUMS_COLUMNS: u32 = 256;
/// Threads of a block of `column_sums_bf16`: 8 warps, each every eighth row.
pub const COLUMN_SUMS_THREADS: u32 = 256;
/// Dynamic shared memory of `column_sums_bf16`: fp32 sums `[8 warps, 256 columns]`.
pub const COLUMN_SUMS_SHARED_BYTES: u32 = COLUMN_SUMS_THREADS / 32 * COLUMN_SUMS_COLUMNS * 4;
/// Rows that a block of `column_sums_bf16` sums for `rows` rows in all: 32, or as many as leave 1024 partial rows.
pub const fn column_sums_rows_per_block(rows: u32) -> u32 {
    let enough = rows.div_ceil(1024).next_multiple_of(8);
    if enough > 32 { enough } else { 32 }
}

/// Columns that a block of `sum_partials` sums.
pub const SUM_PARTIALS_COLUMNS: u32 = 32;
/// Threads of a block of `sum_partials`: 16 warps, each 4 of every 64 rows.
pub const SUM_PARTIALS_THREADS: u32 = 512;
/// Dynamic shared memory of `sum_partials`: fp32 sums `[16 warps, 32 columns]`.
pub const SUM_PARTIALS_SHARED_BYTES: u32 = SUM_PARTIALS_THREADS * 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_per_sm_follow_the_shared_memory() {
        let blocks = |bytes| SHORT_ROW_TILES.map(|t| short_blocks_per_sm(t, bytes));
        assert_eq!(blocks(SM90_SHARED_BYTES), [4, 3, 2, 1]);
        assert_eq!(blocks(SM80_SHARED_BYTES), [3, 2, 1, 1]);
        assert_eq!(blocks(100 * 1024), [1, 1, 1, 0]);
    }

    #[test]
    fn column_sums_have_at_most_1024_partial_rows() {
        for rows in [0, 1, 31, 32, 33, 1280, 32_768, 32_769, 840_000, i32::MAX as u32] {
            let step = column_sums_rows_per_block(rows);
            assert!(step >= 32 && step.is_multiple_of(8) && rows.div_ceil(step) <= 1024, "{rows}");
        }
    }
}
