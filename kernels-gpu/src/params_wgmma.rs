//! Parameters of the Hopper grouped GEMM, by value: the tensor maps are inside, so a launch needs no copy for them.

use crate::params::{AttentionParams, MAX_PRODUCTS, PartialSum};
use crate::schedule::item::Item;

/// Tensor maps that one launch can hold.
pub const MAX_TENSOR_MAPS: usize = 27;

/// A `CUtensorMap`: 128 bytes that the driver encodes.
///
/// The hardware wants it on a 64-byte boundary. rustc 1.96 fails on by-value parameters of more than 16-byte alignment, so the type has 16
/// and cuda_builder raises the alignment of the parameter to 64 in the PTX; the maps come first in [`WgmmaParams`].
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap(pub [u64; 16]);
const _: () = assert!(size_of::<TensorMap>() == 128);

/// What the kernel needs of a product besides its tensor maps.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct WgmmaProduct {
    /// C, for reduce items (whole tiles go through its tensor map).
    pub c: *mut u8,
    /// Null, or `[rows]`: exponents of the power of two that each row of C is multiplied by. fp16 operands only.
    pub row_exponents: *const i32,
    /// Null, or one exponent for all of C, added to the row's. fp16 operands only. `cross_wgmma_fast`: the maximum (as a word of
    /// [`scale`](crate::scale)) that it follows from.
    pub exponent: *const i32,
    /// Null, or what to multiply for A in the k-block that `WgmmaParams::k_limit` cuts: its 64 rows of k with zeros past the limit,
    /// `[m / 64, 64 of k, 64 of m]`, each 64 x 64 tile as `layout::swizzle_128b` has it and on a 16-byte boundary. If `m / 64` is odd, one more
    /// tile is readable. Null where A holds zeros past the limit, or is K-major.
    pub a_boundary: *const u8,
    /// The same of B, `[n / 64, 64 of k, 64 of n]`.
    pub b_boundary: *const u8,
    /// Row pitch of C in bytes.
    pub c_pitch_bytes: u32,
    /// Rows of C.
    pub rows: u32,
    /// k of a segment, rounded up to a multiple of 64: after it B goes on in its next tensor. Promoted: not used.
    pub segment_k: u32,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<WgmmaProduct>() == 56);

/// Column sums of a bf16 matrix: `out[c] = bf16(sum over r of x[r, c])`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ColumnSum {
    /// bf16 `[rows, columns]`, on a 16-byte boundary.
    pub x: *const u16,
    /// bf16 `[columns]`, on a 16-byte boundary.
    pub out: *mut u16,
    /// Rows; 0 gives zeros. Those from `*WgmmaParams::k_limit` on are not summed.
    pub rows: u32,
    /// Columns, a multiple of 8; 0: nothing to do.
    pub columns: u32,
}
const _: () = assert!(size_of::<ColumnSum>() == 24);

/// Small work that has nothing to do with the products and rides along with them: an idle warp of each block does it. It touches nothing
/// that the launch computes or reads otherwise, but inputs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Rider {
    /// u32 `[zero_words]`, set to 0: counters of a later launch.
    pub zero: *mut u32,
    /// A column sum of a matrix.
    pub column_sum: ColumnSum,
    /// Sums of partial sums, in the order of their `first_block`, which here counts jobs of 32 columns; partials and outputs on 16-byte
    /// boundaries, columns a multiple of 4; 0 columns: nothing to do.
    pub partial_sums: [PartialSum; 3],
    /// See `zero`.
    pub zero_words: u32,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<Rider>() == 136);

impl Rider {
    /// Nothing to do.
    pub const NONE: Rider = Rider {
        zero: core::ptr::null_mut(),
        column_sum: ColumnSum { x: core::ptr::null(), out: core::ptr::null_mut(), rows: 0, columns: 0 },
        partial_sums: [PartialSum::NONE; 3],
        zero_words: 0,
        reserved: 0,
    };
}

/// Operation B's conversion to fp16, done by the launch that multiplies what it makes: `cross_wgmma_fast`. The gradients are loaded by tensor maps; all
/// else is as in [`CrossConvertParams`](crate::params::CrossConvertParams).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Conversion {
    /// fp32 `[rows_dec, hidden_size]`.
    pub decoder_hidden_states: *const f32,
    /// fp32 `[rows_enc, cross_hidden_size]`.
    pub encoder_hidden_states: *const f32,
    /// fp32 `[q_out_dim, hidden_size]`.
    pub q_weight: *const f32,
    /// fp32 `[kv_out_dim, cross_hidden_size]`.
    pub k_weight: *const f32,
    /// fp32 `[kv_out_dim, cross_hidden_size]`.
    pub v_weight: *const f32,
    /// Out: fp16 parts of `[rows_dec, q_out_dim]`.
    pub dq: [*mut u16; 2],
    /// Out: fp16 parts of `[rows_enc, 2 * kv_out_dim]`.
    pub dkv: [*mut u16; 2],
    /// Out: fp16 parts of `[rows_dec, hidden_size]`.
    pub x_dec: [*mut u16; 2],
    /// Out: fp16 parts of `[rows_enc, cross_hidden_size]`.
    pub x_enc: [*mut u16; 2],
    /// Out: fp16 parts of `[q_out_dim, hidden_size]`.
    pub wq: [*mut u16; 2],
    /// Out: fp16 parts of `[2 * kv_out_dim, cross_hidden_size]`.
    pub wkv: [*mut u16; 2],
    /// Out: `[rows_dec]`.
    pub row_exponents_dec: *mut i32,
    /// Out: `[rows_enc]`.
    pub row_exponents_enc: *mut i32,
    /// `[6]` as [`CrossConvertParams`](crate::params::CrossConvertParams) says, zero when the launch begins.
    pub maxima: *mut i32,
    /// `[config::wgmma::ready::counters(..)]`, all zero when the launch begins: how many rows of what are done.
    pub ready: *mut u32,
    /// Decoder tokens, not 0.
    pub rows_dec: u32,
    /// Encoder tokens, not 0.
    pub rows_enc: u32,
    /// Tokens of a decoder sequence.
    pub seq_len_dec: u32,
    /// Tokens of an encoder sequence.
    pub seq_len_enc: u32,
    /// Sizes as in `config::wgmma::converting`.
    pub num_heads: u32,
    /// Key/value heads.
    pub num_kv_heads: u32,
    /// Columns of a head.
    pub head_dim: u32,
    /// Decoder width.
    pub hidden_size: u32,
    /// Encoder width.
    pub cross_hidden_size: u32,
    /// Tensor map of grad_query_states; those of grad_key_states and grad_value_states follow.
    pub first_map: u32,
    /// Tokens whose gradients and hidden states a stage holds: decoder, encoder.
    pub tokens_per_stage: [u32; 2],
}
const _: () = assert!(size_of::<Conversion>() == 216);

/// Parameters of the `attention_fused_*` kernels.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug)]
pub struct AttentionFusedParams {
    /// out_weight, bf16 `[d_model, d_model]`: boxes of 64 columns by `config::attention_fused::STAGE_K` rows, 128-byte swizzle.
    pub out_weight: TensorMap,
    /// grad_output, bf16 `[total_seq_len, d_model]`: boxes of `STAGE_K` columns by the kernel's rows, 128-byte swizzle.
    pub grad_output: TensorMap,
    /// The rest; `d_attn` and `stats` are not used.
    pub attention: AttentionParams,
    /// u32 `[zero_words]`, set to 0: counters of a later launch.
    pub zero: *mut u32,
    /// See `zero`.
    pub zero_words: u32,
    /// Stages of the ring, 2..=`MAX_STAGES`; the launch's shared memory has room for them.
    pub stages: u32,
    /// Zero.
    pub reserved: [u32; 2],
}
const _: () = assert!(size_of::<AttentionFusedParams>() == 416); // without padding
const _: () = assert!(core::mem::offset_of!(AttentionFusedParams, grad_output) == size_of::<TensorMap>());

/// Parameters of the `wgmma_*` kernels, and (`B` = [`Conversion`]) of the `cross_wgmma_fast` kernel.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug)]
pub struct WgmmaParams<B = Rider> {
    /// Encoded maps, in the plan's order.
    pub maps: [TensorMap; MAX_TENSOR_MAPS],
    /// The products, in the plan's order.
    pub products: [WgmmaProduct; MAX_PRODUCTS],
    /// `[gridDim.x, items_per_block]`: the list of each block, ended by an item of 0 k-blocks.
    pub items: *const Item,
    /// fp32 `[workspace_floats]`: parked parts; any content.
    pub workspace: *mut f32,
    /// `[num_counters]`, all zero when the launch begins; not reset by it.
    pub counters: *mut u32,
    /// Items of each list, its end included.
    pub items_per_block: u32,
    /// Maps in use.
    pub num_maps: u32,
    /// Null, or where the device says how much of k is summed in products with MN-major A, whose k is `k_rows`: the number of tokens, in
    /// operation A's weight gradients. Operands may hold anything past it in whole k-blocks, and in the k-block that it cuts if they
    /// have a `boundary`. A value that is negative or at least `k_rows` is no limit. Not for promoted operands.
    pub k_limit: *const i32,
    /// See `k_limit`.
    pub k_rows: u32,
    /// Zero.
    pub reserved: u32,
    /// What else the launch does.
    pub beside: B,
}
// what a kernel takes at most, on any driver
const _: () = assert!(size_of::<WgmmaParams>() == 3920 && size_of::<WgmmaParams<Conversion>>() == 4000);
const _: () = assert!(core::mem::offset_of!(WgmmaParams, maps) == 0);
