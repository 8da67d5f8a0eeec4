//! The portable grouped GEMM (`gemm_bf16`, `gemm_f16`, `gemm_f16_promoted`) and its reduction (`gemm_reduce`).

/// Rows of C of one block.
pub const TILE_M: u32 = 128;
/// Columns of C of one block.
pub const TILE_N: u32 = 128;
/// Depth of one stage: 128 bytes of a 16-bit K-major row.
pub const TILE_K: u32 = 64;
/// Stages of the cp.async ring. Three of 32 KiB: two blocks fit on an SM of compute capability 9.0, one on every other since 8.0.
pub const STAGES: u32 = 3;
/// Bytes of one operand's tile of a stage (both operands are 128 wide).
pub const OPERAND_BYTES: u32 = TILE_M * TILE_K * 2;
/// Bytes of a stage: A, then B.
pub const STAGE_BYTES: u32 = 2 * OPERAND_BYTES;
/// Dynamic shared memory of a block.
pub const SMEM_BYTES: u32 = STAGES * STAGE_BYTES;

/// Threads: 2 x 2 warps of 64 x 64. A 64 x 64 warp tile reads 4 KiB of shared memory for 16 of k, a 64 x 32 one 3 KiB for half of the
/// products: the larger one leaves room for the copies.
pub const THREADS: u32 = 128;
/// Blocks per SM that the registers allow (255 a thread).
pub const BLOCKS_PER_SM: u32 = 2;
/// Depth after which `gemm_f16_promoted` adds the matrix unit's sums to its fp32 totals: 96 truncating additions at most. Measured on an
/// H200: a normwise error of 1.25e-6 with 1024, growing in proportion; a promotion costs about as much as two k-blocks.
pub const PROMOTE_K: u32 = 1536;

/// Tile rows that the rasterisation walks down before it moves on by a column, so that blocks that run together share B's
/// columns and A's rows in L2.
pub const GROUP_TILES_M: u32 = 8;
/// Largest number of ranges that K is cut into.
pub const MAX_SPLITS: u32 = 16;

/// Threads of `gemm_reduce`.
pub const REDUCE_THREADS: u32 = 256;
/// Elements of C that one block of `gemm_reduce` writes: four columns a thread.
pub const REDUCE_ELEMS: u32 = 4 * REDUCE_THREADS;
/// Partials that `gemm_reduce` has in flight per thread.
pub const REDUCE_BATCH: u32 = 4;

const _: () = assert!(TILE_M == TILE_N && TILE_M.is_multiple_of(64));
const _: () = assert!(TILE_K * 2 == crate::tile::layout::ROW_BYTES);
const _: () = assert!(PROMOTE_K.is_multiple_of(TILE_K));
const _: () = assert!(SMEM_BYTES <= 99 * 1024, "the least that compute capability 8.0 and later grants a block");
const _: () =
    assert!(BLOCKS_PER_SM * (SMEM_BYTES + 1024) <= 228 * 1024, "two blocks fit on an SM of compute capability 9.0");
const _: () = assert!(BLOCKS_PER_SM * THREADS * 256 <= 65536);
