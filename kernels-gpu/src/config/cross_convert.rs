//! `cross_convert_*`: operation B's conversion to scaled fp16.

/// Threads of a block, all entries.
pub const THREADS: u32 = 256;
/// Blocks per SM of `cross_convert_gradients_*`: at most 80 registers a thread, 6 (decoder) or 10 (encoder) loads of 16
/// bytes in flight each. With 4 blocks and 64 registers sm_90a spills.
pub const GRADIENTS_BLOCKS_PER_SM: u32 = 3;
/// Blocks per SM of `cross_convert_operands_*`: at most 48 registers a thread, 4 loads of 16 bytes in flight each.
pub const OPERANDS_BLOCKS_PER_SM: u32 = 5;
/// 16-byte pieces of a weight tensor that a block of `cross_convert_gradients_*` takes at once.
pub const WEIGHT_TILE_PIECES: u32 = 8 * THREADS;
/// 16-byte pieces of q_weight, of k_weight and of v_weight that the weights' exponents are guessed from.
pub const SAMPLES: [u32; 3] = [4 * THREADS, 2 * THREADS, 2 * THREADS];
/// Dynamic shared memory of `cross_convert_gradients_*`: two sets of two maxima of each warp.
pub const GRADIENTS_SMEM_BYTES: u32 = 2 * 2 * (THREADS / 32) * 4;
/// Maxima that a conversion finds; [`maxima`] says which.
pub const MAXIMA: usize = 6;
/// Dynamic shared memory of `cross_convert_operands_*`: the maxima of each warp.
pub const OPERANDS_SMEM_BYTES: u32 = MAXIMA as u32 * (THREADS / 32) * 4;

/// Indices of the maxima. + sequence: 0 for the decoder and q_weight, 1 for the encoder, k_weight and v_weight.
pub mod maxima {
    /// + sequence: of the tokens' exponents.
    pub const TOKENS: usize = 0;
    /// + sequence: of the weights' exponents, at least what was guessed.
    pub const WEIGHTS: usize = 2;
    /// + sequence: what those of the weights were guessed to be.
    pub const GUESSES: usize = 4;
}

/// Blocks of `cross_convert_gradients_*`: a block per token or weight tile, up to what the device holds at once.
pub const fn gradients_blocks(rows_dec: u32, rows_enc: u32, weight_elements: u64, multiprocessors: u32) -> u32 {
    let weight_tiles = weight_elements.div_ceil(4 * WEIGHT_TILE_PIECES as u64);
    at_most(rows_dec as u64 + rows_enc as u64 + weight_tiles, multiprocessors * GRADIENTS_BLOCKS_PER_SM)
}

/// Blocks of `cross_convert_operands_*`: a warp per row of hidden states or weights, up to what the device holds at once.
pub const fn operands_blocks(rows_dec: u32, rows_enc: u32, weight_rows: u64, multiprocessors: u32) -> u32 {
    let rows = rows_dec as u64 + rows_enc as u64 + weight_rows;
    at_most(rows.div_ceil(THREADS as u64 / 32), multiprocessors * OPERANDS_BLOCKS_PER_SM)
}

/// `work` blocks, but no more than `resident` and at least one.
const fn at_most(work: u64, resident: u32) -> u32 {
    if work == 0 {
        1
    } else if work < resident as u64 {
        work as u32
    } else {
        resident
    }
}
