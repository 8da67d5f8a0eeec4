//! Parameters of the `attention_flash_*` kernels (operation A, long chunks on Hopper).
use super::AttentionTile;

/// Parameters of all `attention_flash_*` kernels, which run in this order: `_largest`, `_convert`, `_forward`, `_backward`, `_dq`.
///
/// A *slot* is a tile of 128 rows of one head: slot `t * num_heads + h` for entry `t` of `tiles`. The entries of a chunk follow each other.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FlashParams {
    /// bf16 `[num_heads, total_seq_len, 64]`.
    pub query_states: *const u8,
    /// bf16 `[num_heads, total_seq_len, 64]`.
    pub key_states: *const u8,
    /// bf16 `[num_heads, total_seq_len, 64]`.
    pub value_states: *const u8,
    /// fp32 `[total_seq_len, num_heads * 64]`: grad_output @ out_weight.
    pub d_attn: *const u8,
    /// `[num_tiles]`.
    pub tiles: *const AttentionTile,
    /// `[slots, 4]`: largest exponent fields of Q, K, V, dA in the slot's rows. By `_largest`.
    pub largest: *mut u32,
    /// `[slots, 4]`: exponents of the powers of two that Q, K, V, dA of the slot's chunk and head are multiplied by. By `_convert`.
    pub exponents: *mut i32,
    /// fp16 `[slots, 4, 128, 64]`: Q, K, V, dA, scaled, rows past the chunk's end zero; each tile as it lies in shared memory (128-byte
    /// rows, swizzled). By `_convert`.
    pub operands: *mut u8,
    /// fp32 `[slots, 2, 128]`: what is added to each query's logits, and -delta in the unit of dS / P. By `_forward`.
    pub statistics: *mut f32,
    /// fp32 `[slots, 2, 8, 128, 4]`: dQ in the unit of its products, as the threads of a warpgroup hold each half. By `_backward`.
    pub dq: *mut f32,
    /// `[slots, 2]`: key tiles that have been added to each half of `dq`; then one more word, the blocks of `_backward` that have begun.
    /// Zeroed by `_convert`.
    pub counters: *mut u32,
    /// Out: bf16 `[total_seq_len, num_heads * 64]`, the attention output.
    pub o: *mut u8,
    /// Out: bf16 `[total_seq_len, 3 * num_heads * 64]`: dQ | dK | dV.
    pub dqkv: *mut u8,
    /// Out: fp32 `[rows, 3 * num_heads * 64]`: column sums of the unrounded dQ | dK | dV over a tile's rows.
    pub bias_partials: *mut f32,
    /// Rows of all tensors, padding included.
    pub total_seq_len: u32,
    /// Heads.
    pub num_heads: u32,
    /// Entries of `tiles`.
    pub num_tiles: u32,
    /// Factor of the logits, usually 1 / sqrt(64); finite and > 0.
    pub scale: f32,
}
const _: () = assert!(size_of::<FlashParams>() == 128);
