//! Parameters of the Hopper grouped GEMM, by value: the tensor maps are inside, so a launch needs no copy for them.

use crate::params::{CrossConvertParams, MAX_PRODUCTS, PartialSum};
use crate::schedule::item::Item;

/// Tensor maps that one launch can hold.
pub const MAX_TENSOR_MAPS: usize = 28;

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
    /// Null, or one exponent for all of C, added to the row's. fp16 operands only. `cross_wgmma_*`: the maximum (as a word of
    /// [`scale`](crate::scale)) that it follows from.
    pub exponent: *const i32,
    /// Row pitch of C in bytes.
    pub c_pitch_bytes: u32,
    /// Rows of C.
    pub rows: u32,
}
const _: () = assert!(size_of::<WgmmaProduct>() == 32);

/// Column sums of a bf16 matrix: `out[c] = bf16(sum over r of x[r, c])`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ColumnSum {
    /// bf16 `[rows, columns]`, on a 16-byte boundary.
    pub x: *const u16,
    /// bf16 `[columns]`, on a 16-byte boundary.
    pub out: *mut u16,
    /// Rows; 0 gives zeros.
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

/// Operation B's conversion to fp16, done by the launch that multiplies what it makes: `cross_wgmma_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Conversion {
    /// The tensors. `exponents` is not used: the products read `maxima`.
    pub tensors: CrossConvertParams,
    /// `[config::wgmma::ready::counters(..)]`, all zero when the launch begins: how many rows of what are done.
    pub ready: *mut u32,
    /// Tensor map of grad_query_states; those of grad_key_states and grad_value_states follow.
    pub first_map: u32,
    /// Tokens whose gradients and hidden states a stage holds: decoder, encoder.
    pub tokens_per_stage: [u32; 2],
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<Conversion>() == 256);

/// Parameters of the `wgmma_*` kernels, and (`B` = [`Conversion`]) of the `cross_wgmma_*` kernels.
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
    /// What else the launch does.
    pub beside: B,
}
// what a kernel takes at most, on any driver
const _: () = assert!(size_of::<WgmmaParams>() == 3920 && size_of::<WgmmaParams>() <= 4096);
const _: () = assert!(size_of::<WgmmaParams<Conversion>>() == 4032);
const _: () = assert!(core::mem::offset_of!(WgmmaParams, maps) == 0);
