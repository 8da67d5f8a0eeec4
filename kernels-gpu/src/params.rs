//! Every struct that crosses the boundary between host and kernels: `repr(C)`, sizes checked where they are defined.
//!
//! Pointers are device addresses. A kernel takes exactly one of these by value.

#[path = "params_cross.rs"]
mod cross;
#[path = "params_flash.rs"]
mod flash;
pub use cross::CrossConvertParams;
pub use flash::{FlashParams, FlashTile};

use crate::schedule::chunks::TileSlots;

/// Products that one grouped GEMM launch can hold.
pub const MAX_PRODUCTS: usize = 5;
/// Segments that the K dimension of a product can be cut into.
pub const MAX_SEGMENTS: usize = 3;

/// How an operand of a product lies in memory.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Major {
    /// `k` is contiguous: A is `[m, k]` row-major.
    K = 0,
    /// `m` (or `n`) is contiguous: A is `[k, m]` row-major, B is `[k, n]` row-major.
    Mn = 1,
}

/// Element type of a product's output.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputType {
    /// Rounded to nearest even.
    Bf16 = 0,
    /// As accumulated.
    F32 = 1,
}

/// One product of a grouped GEMM: `C[m, n] = 2^(row_exponents[m] + exponent) * sum over segments s of A_s[m, k] B_s[k, n]`.
///
/// A is K-major or MN-major, B is always MN-major (`[k, n]` row-major): dgrad is (K, Mn), wgrad is (Mn, Mn). 16-bit operands.
/// `m`, `n` > 0. 16-byte alignment throughout: `a`, `b`, `c` and `partials` are multiples of 16; `lda`, `ldb`, `ldc`, `n`, and
/// `k` (K-major A) or `m` (MN-major A) are multiples of 8. No element past these extents is read or written.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// A of each segment; null past the last.
    pub a: [*const u16; MAX_SEGMENTS],
    /// B of each segment; null past the last.
    pub b: [*const u16; MAX_SEGMENTS],
    /// C, bf16 or f32, row pitch `ldc` elements; every element of `[m, n]` is written.
    pub c: *mut u8,
    /// Null, or `[m]`: exponents of the power of two that each row of C is multiplied by.
    pub row_exponents: *const i32,
    /// Null, or one exponent for all of C, added to the row's. The sum is clamped to -252..=252.
    pub exponent: *const i32,
    /// Null, or, if A is MN-major, where the device says how much of `k` is summed: `min(k, *k_limit)` of each segment (a negative limit is
    /// none). A and B may hold anything past it.
    pub k_limit: *const i32,
    /// `splits > 1`: fp32 `[splits, m, n]`, the unscaled sums of each K range; C is then written by `gemm_reduce`.
    pub partials: *mut f32,
    /// Rows of C.
    pub m: u32,
    /// Columns of C.
    pub n: u32,
    /// Depth of one segment; 0: C is zero.
    pub k: u32,
    /// Row pitch of A in elements.
    pub lda: u32,
    /// Row pitch of B in elements.
    pub ldb: u32,
    /// Row pitch of C in elements.
    pub ldc: u32,
    /// Layout of A (`Major as u32`).
    pub a_major: u32,
    /// `OutputType as u32`.
    pub c_type: u32,
    /// Segments in use, 1..=MAX_SEGMENTS, summed in order.
    pub num_segments: u32,
    /// Ranges that the k-blocks of all segments, one after the other, are cut into; 1: C is written directly.
    pub splits: u32,
    /// First block of the launch that works on this product; its blocks are `splits * tiles_m * tiles_n`, and tiles of one
    /// split follow each other.
    pub first_block: u32,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<Product>() == 136);

impl Product {
    /// A product that no block works on: what unused entries of [`GemmParams`] hold.
    pub const EMPTY: Product = Product {
        a: [core::ptr::null(); MAX_SEGMENTS],
        b: [core::ptr::null(); MAX_SEGMENTS],
        c: core::ptr::null_mut(),
        row_exponents: core::ptr::null(),
        exponent: core::ptr::null(),
        k_limit: core::ptr::null(),
        partials: core::ptr::null_mut(),
        m: 0,
        n: 0,
        k: 0,
        lda: 0,
        ldb: 0,
        ldc: 0,
        a_major: Major::K as u32,
        c_type: OutputType::F32 as u32,
        num_segments: 0,
        splits: 1,
        first_block: 0,
        reserved: 0,
    };
}

/// Parameters of the portable `gemm_*` kernels and of `gemm_reduce`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GemmParams {
    /// The products, in the order of their blocks; [`Product::EMPTY`] past the last.
    pub products: [Product; MAX_PRODUCTS],
    /// How many of them are in use.
    pub num_products: u32,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<GemmParams>() == 688);

/// Parameters of the `attention_*` kernels (operation A, per chunk and head).
///
/// `cu_seqlens` is read on the device. Chunk `c` is rows `cu_seqlens[c] .. cu_seqlens[c + 1]`; rows from the last offset on are padding. Whatever
/// it holds, nothing out of bounds is accessed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttentionParams {
    /// bf16 `[num_heads, total_seq_len, 64]`.
    pub query_states: *const u8,
    /// bf16 `[num_heads, total_seq_len, 64]`.
    pub key_states: *const u8,
    /// bf16 `[num_heads, total_seq_len, 64]`.
    pub value_states: *const u8,
    /// fp32 `[total_seq_len, num_heads * 64]`: grad_output @ out_weight; any content in padding rows.
    pub d_attn: *const u8,
    /// `[num_chunks + 1]`.
    pub cu_seqlens: *const i32,
    /// Out: bf16 `[total_seq_len, num_heads * 64]`, the attention output; zeros in padding rows.
    pub o: *mut u8,
    /// Out: bf16 `[total_seq_len, 3 * num_heads * 64]`: dQ | dK | dV; zeros in padding rows.
    pub dqkv: *mut u8,
    /// Out: fp32 `[rows, 3 * num_heads * 64]`: column sums of the unrounded dQ | dK | dV over the rows of a block. If the short kernel runs
    /// (`short_rows > 0`), row `c` is that of chunk `c`; the long kernels' tile of slot `i` has row `long_bias_row + i`. All rows are
    /// written: zeros where a block has nothing to do, NaN in the columns of dQ where chunk `c` breaks a rule of `schedule::chunks`.
    pub bias_partials: *mut f32,
    /// fp32 `[num_heads, total_seq_len, 4]`, long chunks only: written by `attention_long_q`, read by `attention_long_k`.
    pub stats: *mut f32,
    /// bf16 `[total_seq_len, num_heads * 64]`, read for `boundary` only.
    pub grad_output: *const u8,
    /// bf16 `[total_seq_len, num_heads * 64]`, read for `boundary` only.
    pub hidden_states: *const u8,
    /// Null, or out, if `tokens = cu_seqlens[num_chunks]` is not a multiple of 64: rows `tokens / 64 * 64 ..+ 64` of grad_output, then of
    /// hidden_states, zeros from row `tokens` on. bf16 `[2, num_heads, 64 rows, 64 columns]`, each 64 x 64 tile as `layout::swizzle_128b` has it.
    pub boundary: *mut u8,
    /// Rows of all tensors, padding included; at most `i32::MAX`.
    pub total_seq_len: u32,
    /// Heads.
    pub num_heads: u32,
    /// Chunks, empty ones included; at most `config::attention::MAX_CHUNKS`.
    pub num_chunks: u32,
    /// Factor of the logits, usually 1 / sqrt(64); finite and > 0.
    pub scale: f32,
    /// Longest chunk that the launched kernels take; a longer one breaks a rule.
    pub max_chunk_len: u32,
    /// Chunks of at most this many rows are the short kernel's, longer ones the long kernels'; 0: no short kernel runs.
    pub short_rows: u32,
    /// Where the long kernels' tiles lie among their blocks.
    pub long_slots: TileSlots,
    /// First row of `bias_partials` that the long kernels write.
    pub long_bias_row: u32,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<AttentionParams>() == 136);

/// Parameters of `column_sums_bf16`: `partials[r, c] = sum of x[r * rows_per_block .., c]` over `rows_per_block` rows, without those from
/// `*row_limit` on.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ColumnSumsParams {
    /// bf16 `[rows, columns]`.
    pub x: *const u16,
    /// fp32 `[ceil(rows / rows_per_block), columns]`.
    pub partials: *mut f32,
    /// Null, or where the device says how many rows are summed (a negative limit is none).
    pub row_limit: *const i32,
    /// Rows of `x`.
    pub rows: u32,
    /// Columns of `x`, a multiple of 8.
    pub columns: u32,
    /// Rows that one block sums.
    pub rows_per_block: u32,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<ColumnSumsParams>() == 40);

/// One output of `sum_partials`: `out[c] = bf16(sum over r of partials[r, c])`, rows in order.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PartialSum {
    /// fp32 `[rows, pitch]` on a 16-byte boundary; columns `0..columns` of it are summed.
    pub partials: *const f32,
    /// bf16 `[columns]`.
    pub out: *mut u16,
    /// Rows to sum; 0 gives zeros.
    pub rows: u32,
    /// Row pitch of `partials` in elements, a multiple of 4.
    pub pitch: u32,
    /// Columns, a multiple of 4.
    pub columns: u32,
    /// First block (of 32 columns each) that works on this sum.
    pub first_block: u32,
}
const _: () = assert!(size_of::<PartialSum>() == 32);

impl PartialSum {
    /// A sum without columns.
    pub const NONE: PartialSum = PartialSum {
        partials: core::ptr::null(),
        out: core::ptr::null_mut(),
        rows: 0,
        pitch: 0,
        columns: 0,
        first_block: 0,
    };
}

/// Parameters of `sum_partials`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SumPartialsParams {
    /// grad_q_bias, grad_k_bias, grad_v_bias, grad_out_bias.
    pub sums: [PartialSum; 4],
}
const _: () = assert!(size_of::<SumPartialsParams>() == 128);
