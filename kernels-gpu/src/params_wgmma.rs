//! Parameters of the Hopper grouped GEMM, by value: the tensor maps are inside, so a launch needs no copy for them.

use crate::params::MAX_PRODUCTS;
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
    /// Null, or one exponent for all of C, added to the row's. fp16 operands only.
    pub exponent: *const i32,
    /// Row pitch of C in bytes.
    pub c_pitch_bytes: u32,
    /// Rows of C.
    pub rows: u32,
}
const _: () = assert!(size_of::<WgmmaProduct>() == 32);

/// Parameters of the `wgmma_*` kernels.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug)]
pub struct WgmmaParams {
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
}
const _: () = assert!(size_of::<WgmmaParams>() == 3776 && size_of::<WgmmaParams>() <= 4000);
const _: () = assert!(core::mem::offset_of!(WgmmaParams, maps) == 0);
