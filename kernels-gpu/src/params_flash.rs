//! Parameters of the `attention_flash_*` kernels (operation A, long chunks on Hopper).
use super::AttentionParams;

/// A tile of 128 rows of a chunk.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashTile {
    /// First row of the chunk.
    pub start: u32,
    /// Rows of the chunk; 0: there is no tile.
    pub len: u32,
    /// First row of the tile, relative to `start`, below `len`.
    pub first: u32,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<FlashTile>() == 16);

/// Parameters of all `attention_flash_*` kernels, which run in this order: `_largest`, `_convert`, `_forward`, `_backward`, `_dq`.
///
/// The tiles are those of the slots of `attention.long_slots`; the slots of a chunk follow each other. A *place* is a slot of one head:
/// place `s * num_heads + h` for slot `s`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FlashParams {
    /// Inputs, outputs and chunks; `stats` is not used.
    pub attention: AttentionParams,
    /// `[num_slots]`: the tile that each slot has by itself. By `_largest`.
    pub found_tiles: *mut FlashTile,
    /// `[num_slots]`: the same, without those of chunks that do not have all of their slots (the offsets break a rule, then). By `_convert`.
    pub tiles: *mut FlashTile,
    /// `[places, 4]`: largest exponent fields of Q, K, V, dA in the tile's rows. By `_largest`.
    pub largest: *mut u32,
    /// `[places, 4]`: exponents of the powers of two that Q, K, V, dA of the tile's chunk and head are multiplied by. By `_convert`.
    pub exponents: *mut i32,
    /// fp16 `[places, 4, 128, 64]`: Q, K, V, dA, scaled, rows past the chunk's end zero; each tile as it lies in shared memory (128-byte
    /// rows, swizzled). By `_convert`.
    pub operands: *mut u8,
    /// fp32 `[places, 2, 128]`: what is added to each query's logits, and -delta in the unit of dS / P. By `_forward`.
    pub statistics: *mut f32,
    /// fp32 `[places, 2, 8, 128, 4]`: dQ in the unit of its products, as the threads of a warpgroup hold each half. By `_backward`.
    pub dq: *mut f32,
    /// `[places, 2]`: key tiles that have been added to each half of `dq`; then one more word, the places that `_backward` has begun. Zeroed
    /// by `_convert`.
    pub counters: *mut u32,
    /// Slots, at least 1.
    pub num_slots: u32,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<FlashParams>() == 208);
