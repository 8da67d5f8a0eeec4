//! The operation of `attention_short` for long chunks on Hopper: five kernels, matrix products by wgmma.
//!
//! * [`largest`], [`convert`]: tiles of 128 rows are found in `cu_seqlens`, and Q, K, V, dA become fp16 there, scaled by one power of two for
//!   each chunk, head and tensor
//! * [`forward`]: O, and the statistics of each query
//! * [`backward`]: dK, dV, and dQ in fp32, key tiles added in order
//! * [`dq`]: dQ in bf16 and its column sums
//!
//! **Rounding.** fp16 (11 bits) of Q, K - c, V, dA, P and dS, in that order of appearance; sums in fp32; O, dQ, dK, dV to bf16. `c` is about
//! the mean of the chunk's first 16 keys: softmax and dQ do not change when all keys move together, but what rounding leaves of rowsum(dS)
//! would reach dQ times what all keys share. It is a multiple of the last place of the largest of these keys: keys about zero stay
//! as they are, and K - c is exact but for elements much smaller than c.
//! An element keeps 11 bits down to 2^-29 of the chunk's largest; below that, the absolute error is 2^-40 of the largest.
use crate::config::attention::HEAD_DIM;
use crate::config::attention_flash::{OPERANDS, TILE_BYTES, TILE_ROWS};
use crate::params::{FlashParams, FlashTile};
use crate::ptx::memory::ldg128_or_zero;
use crate::tile::fragment::{OutputRows, ROWS_16_BYTES};
use crate::tile::layout::ROW_BYTES;

mod backward;
mod convert;
mod dq;
mod forward;
mod largest;
mod pipeline;
mod turn;

/// An operand tile of a place.
#[derive(Clone, Copy)]
enum Operand {
    Q = 0,
    K = 1,
    V = 2,
    DAttn = 3,
}

/// A tile of rows of one head, and its chunk.
#[derive(Clone, Copy)]
struct Tile {
    /// First row of the chunk, in the packed tensors.
    start: u32,
    /// Rows of the chunk; 0: there is no tile.
    len: u32,
    /// The tile's index in the chunk.
    index: u32,
    /// The slot of the chunk's first tile.
    first_slot: u32,
    head: u32,
}

impl Tile {
    /// The tile of slot `slot` for one head.
    #[inline(always)]
    fn new(FlashTile { start, len, first, .. }: FlashTile, slot: u32, head: u32) -> Tile {
        let index = first / TILE_ROWS;
        Tile { start, len, index, first_slot: slot.wrapping_sub(index), head }
    }

    /// Entry `slot` of a table.
    ///
    /// # Safety
    /// The table has that entry, and nothing writes it during the launch.
    #[inline(always)]
    unsafe fn load_from(tiles: *const FlashTile, slot: u32, head: u32) -> Tile {
        // SAFETY: as the caller promises; entries are 16-byte aligned.
        let words = unsafe { ldg128_or_zero(tiles.wrapping_add(slot as usize).cast(), true) };
        let [start, len, first, reserved] = words;
        Tile::new(FlashTile { start, len, first, reserved }, slot, head)
    }

    /// Which rows slot `slot` stands for.
    ///
    /// # Safety
    /// There is that slot; `attention_flash_convert` has run.
    #[inline(always)]
    unsafe fn load(params: &FlashParams, slot: u32, head: u32) -> Tile {
        // SAFETY: as the caller promises.
        unsafe { Tile::load_from(params.tiles, slot, head) }
    }

    /// Tiles of the chunk.
    #[inline(always)]
    fn tiles_in_chunk(&self) -> u32 {
        self.len.div_ceil(TILE_ROWS)
    }

    /// Place of tile `index` of the chunk.
    #[inline(always)]
    fn place(&self, params: &FlashParams, index: u32) -> usize {
        (self.first_slot + index) as usize * params.attention.num_heads as usize + self.head as usize
    }

    /// Rows of the chunk from row `row` of the tile on.
    #[inline(always)]
    fn rows_from(&self, row: u32) -> u32 {
        self.len.saturating_sub(self.index * TILE_ROWS + row)
    }

    /// Row `row` of the tile in the packed tensors.
    #[inline(always)]
    fn packed_row(&self, row: u32) -> usize {
        (self.start + self.index * TILE_ROWS + row) as usize
    }

    /// Bytes from the start of a bf16 `[num_heads, total_seq_len, 64]` tensor to row `row` of the tile.
    #[inline(always)]
    fn states_offset(&self, params: &FlashParams, row: u32) -> usize {
        (self.head as usize * params.attention.total_seq_len as usize + self.packed_row(row)) * ROW_BYTES as usize
    }

    /// The 16 rows of `o` from row `row` of the tile on.
    #[inline(always)]
    fn o_rows(&self, params: &FlashParams, row: u32) -> OutputRows {
        let pitch = 2 * params.attention.num_heads * HEAD_DIM;
        let offset = self.packed_row(row) * pitch as usize + (self.head * HEAD_DIM * 2) as usize;
        OutputRows { first: params.attention.o.wrapping_add(offset), pitch, rows: self.rows_from(row) }
    }

    /// The 16 rows of gradient `which` (dQ, dK, dV) from row `row` of the tile on.
    #[inline(always)]
    fn gradient_rows(&self, params: &FlashParams, which: u32, row: u32) -> OutputRows {
        let d_model = params.attention.num_heads * HEAD_DIM;
        let column = which * d_model + self.head * HEAD_DIM;
        let offset = self.packed_row(row) * 6 * d_model as usize + (2 * column) as usize;
        OutputRows { first: params.attention.dqkv.wrapping_add(offset), pitch: 6 * d_model, rows: self.rows_from(row) }
    }

    /// Where the sum of column `column` of gradient `which` goes.
    #[inline(always)]
    fn bias_partial(&self, params: &FlashParams, which: u32, column: u32) -> *mut f32 {
        let d_model = params.attention.num_heads * HEAD_DIM;
        let column = (which * d_model + self.head * HEAD_DIM + column) as usize;
        let row = params.attention.long_bias_row + self.first_slot + self.index;
        params.attention.bias_partials.wrapping_add(row as usize * 3 * d_model as usize + column)
    }
}

/// Operand tile `operand` of a place.
#[inline(always)]
fn operand_tile(params: &FlashParams, place: usize, operand: Operand) -> *mut u8 {
    params.operands.wrapping_add((place * OPERANDS as usize + operand as usize) * TILE_BYTES as usize)
}

/// Exponents of a place, in the order of [`Operand`].
///
/// # Safety
/// `attention_flash_convert` has run.
#[inline(always)]
unsafe fn exponents(params: &FlashParams, place: usize) -> [i32; 4] {
    // SAFETY: the place is one of the launch's; 16-byte aligned.
    unsafe { *params.exponents.wrapping_add(4 * place).cast::<[i32; 4]>() }
}

const _: () = assert!(TILE_BYTES == 8 * ROWS_16_BYTES);
