//! One unit of work of the Hopper grouped GEMM. The host writes a list of them for every block of the launch.

/// What an [`Item`] is, in the order of a list.
pub mod item_kind {
    /// A K range of a tile: its sums are parked in the workspace.
    pub const PART: u32 = 0;
    /// A whole output tile.
    pub const WHOLE: u32 = 1;
    /// The first K range of a tile: keeps its sums in registers, adds the tile's parts when they are there, writes the tile.
    pub const OWNER: u32 = 2;
    /// Some columns of a tile whose K ranges are all parts: adds them in order and writes the columns.
    pub const REDUCE: u32 = 3;
    /// Conversion: some rows of weights to fp16 by their guessed exponent, and their largest element (`product`: one of [`matrix`](super::matrix)).
    pub const WEIGHTS: u32 = 4;
    /// Conversion: gradients of some tokens to fp16, their row exponents and maxima (`product` 0: decoder, 1: encoder).
    pub const TOKENS: u32 = 5;
    /// Conversion: some rows of hidden states to fp16; or of weights, again, if their exponent was guessed too low (`product`: one of
    /// [`matrix`](super::matrix)).
    pub const SCALE: u32 = 6;
}

/// The matrices that conversion items name.
pub mod matrix {
    /// q_weight.
    pub const Q_WEIGHT: u32 = 0;
    /// k_weight.
    pub const K_WEIGHT: u32 = 1;
    /// v_weight.
    pub const V_WEIGHT: u32 = 2;
    /// decoder_hidden_states.
    pub const DECODER: u32 = 3;
    /// encoder_hidden_states.
    pub const ENCODER: u32 = 4;

    /// The sequence that it belongs to: 0 decoder, 1 encoder.
    #[inline(always)]
    pub const fn sequence(matrix: u32) -> u32 {
        (matrix != Q_WEIGHT && matrix != DECODER) as u32
    }

    /// Whether it has a row for each token.
    #[inline(always)]
    pub const fn is_hidden(matrix: u32) -> bool {
        matrix >= DECODER
    }
}

/// One unit of work, 64 bytes.
///
/// The lists of a cluster's blocks have the same product items one after the other, but for the place of the tile, its slot and its counter: the blocks
/// multiply in step.
///
/// In each list parts come first, then whole tiles, owners, reduce items (if products have turns: in this order turn by turn, each turn behind
/// whole tiles of later ones that are done before it can begin, but for reduce items, which are last). Parts wait for no other product. What waits for them stands in lists behind theirs, or in the same: a block that waits keeps its SM, and where
/// two such launches on different streams each hold some SMs, blocks that have not started find none. The GPU starts clusters in the order of their numbers (CUDA does
/// not promise it, but look-back scans rely on it too), so the blocks that a block waits for have started, and their parts get done.
///
/// Conversion items (`m0`: first row, `k_blocks`: number of rows, not 0) come before all others of a list. Weights and tokens wait for nothing,
/// scales for weights and tokens, products for all of these; in a list no item stands before one that it waits for. Blocks wait for any others, so such
/// a launch must be cooperative.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Item {
    /// See [`item_kind`].
    pub kind: u32,
    /// Index into `WgmmaParams::products`; conversion: see [`item_kind`].
    pub product: u32,
    /// Layout of A (`Major as u32`); B is always MN-major.
    pub a_major: u32,
    /// Columns of the tile.
    pub width: u32,
    /// First row of the tile; conversion: first row.
    pub m0: u32,
    /// First column of the tile.
    pub n0: u32,
    /// First k, over all segments (promoted: of each part), a multiple of 64. Reduce: the first 8-column group, relative to the tile.
    pub k0: u32,
    /// 64-deep k-blocks (promoted: all three products of each). Reduce: 8-column groups, a multiple of `groups_per_stage(splits)`. Conversion: rows. 0 ends a list.
    pub k_blocks: u32,
    /// 1: all tiles of the cluster have the same columns, and each block loads a part of B for all of them. 0: each block loads its own.
    pub shares_b: u32,
    /// Tensor map of A.
    pub a_map: u32,
    /// Tensor map of B's first segment; those of the other segments follow (promoted: one map has both parts).
    pub b_map: u32,
    /// Tensor map of C.
    pub c_map: u32,
    /// Parts of this tile that are parked in the workspace (an owner's own range is not one).
    pub parts: u32,
    /// Workspace slot of part 0, in units of `SLOT_FLOATS`; the other parts follow, `width / 64` units each.
    pub slot: u32,
    /// Part: which one this is.
    pub part: u32,
    /// Part, owner, reduce: counter of the tile; each warpgroup of each part adds 1.
    pub counter: u32,
}
const _: () = assert!(size_of::<Item>() == 64);

impl Item {
    /// Ends a list.
    pub const END: Item = Item {
        kind: 0,
        product: 0,
        a_major: 0,
        width: 0,
        m0: 0,
        n0: 0,
        k0: 0,
        k_blocks: 0,
        shares_b: 0,
        a_map: 0,
        b_map: 0,
        c_map: 0,
        parts: 0,
        slot: 0,
        part: 0,
        counter: 0,
    };
}
