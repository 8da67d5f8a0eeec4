//! Operation B's conversion to scaled fp16, by the launch that multiplies: items like tiles, through the same ring.
//!
//! Formula: that of [`cross_convert`](crate::kernel::cross_convert), bit for bit (but that a zero keeps its sign). The producer loads rows of fp32
//! into a stage; a consumer warpgroup takes every second row of an item, counted from the item's first. Its publishing warp counts what is
//! done in `conversion.ready`, and whoever needs it waits there.
//! * weights items: 16 bytes a thread at a time, any of the rows; by exponents that each warpgroup guesses when it begins.
//! * token items: a warpgroup holds a token in registers from its one reading to its storing, thread `i` the pieces `i, i + 128, ..` (16 bytes of
//!   fp32). The stage is given back as soon as all have read.
//! * scale items: a warp takes every eighth row. Those of weights begin with an empty stage, after which the producer and the consumers see whether there is
//!   more to do.
//!
//! Stage of a token item: `[tensors][num_heads][tokens][head_dim]` of gradients, one or two tensors (dK and dV), then `[tokens][hidden]`.
//!
//! **Ordering.** Results of other blocks are read after the producer has acquired them: directly (`ld.relaxed.gpu`, past L1) after the first full
//! stage of the item, since the producer's arrival follows its acquire, or by TMA after a proxy fence.
use super::Entry;
use crate::config::cross_convert::maxima;
use crate::config::wgmma::{TILE_M, ready, rows_per_stage};
use crate::params_wgmma::Conversion;
use crate::ptx::hopper::ld_relaxed_s32;
use crate::schedule::convert::{StageLayout, Stages};
use crate::schedule::item::{Item, matrix};

mod consume;
mod produce;
mod token;

pub(super) use consume::publish;
pub(super) use produce::wait_for_operands;

/// A sequence of tokens; a piece is 16 bytes of fp32 (4 elements).
struct Sequence {
    layout: StageLayout,
    seq_len: u32,
    /// Pieces of a converted row.
    row_pieces: u32,
    hidden_pieces: u32,
    hidden: *const f32,
}

impl Sequence {
    /// Sequence `index`: 0 decoder, 1 encoder.
    #[inline(always)]
    fn of(c: &Conversion, index: u32) -> Self {
        let head_shift = c.head_dim.trailing_zeros() - 2;
        let (seq_len, heads, hidden, hidden_size, tokens) = if index == 0 {
            (c.seq_len_dec, c.num_heads, c.decoder_hidden_states, c.hidden_size, c.tokens_per_stage[0])
        } else {
            (c.seq_len_enc, c.num_kv_heads, c.encoder_hidden_states, c.cross_hidden_size, c.tokens_per_stage[1])
        };
        let (tensors, num_heads) = (1 + index, c.num_heads);
        // SAFETY: there are key/value heads, each of some query heads, and items name tokens of sequences that have some.
        let groups = unsafe {
            core::hint::assert_unchecked(heads != 0);
            core::hint::assert_unchecked(seq_len != 0);
            let groups = num_heads / heads;
            core::hint::assert_unchecked(groups != 0);
            groups
        };
        Sequence {
            layout: StageLayout { tensors, num_heads, groups, head_shift, tokens },
            seq_len,
            row_pieces: (heads << head_shift) << index,
            hidden_pieces: hidden_size / 4,
            hidden,
        }
    }

    /// Walk over an item's tokens.
    #[inline(always)]
    fn stages(&self, item: &Item) -> Stages {
        // SAFETY: items name tokens of sequences that have some.
        unsafe { core::hint::assert_unchecked(self.seq_len != 0) };
        Stages::new(self.seq_len, self.layout.tokens, item.m0, item.k_blocks)
    }

    /// Bytes of the gradients in a stage; hidden states follow.
    #[inline(always)]
    fn gradient_bytes(&self) -> u32 {
        self.layout.tensors * self.layout.box_bytes()
    }
}

/// A matrix of weights or hidden states.
struct Matrix {
    source: *const f32,
    /// Parts of the converted one.
    out: [*mut u16; 2],
    row_pieces: u32,
    /// Rows of a stage.
    per_stage: u32,
}

impl Matrix {
    /// The matrix that an item names.
    #[inline(always)]
    fn of(c: &Conversion, index: u32) -> Self {
        let below = (c.num_kv_heads * c.head_dim) as usize * c.cross_hidden_size as usize;
        let (source, out) = match index {
            matrix::Q_WEIGHT => (c.q_weight, c.wq),
            matrix::K_WEIGHT => (c.k_weight, c.wkv),
            matrix::V_WEIGHT => (c.v_weight, c.wkv.map(|part| part.wrapping_add(below))),
            matrix::DECODER => (c.decoder_hidden_states, c.x_dec),
            _ => (c.encoder_hidden_states, c.x_enc),
        };
        let row_pieces = if matrix::sequence(index) == 0 { c.hidden_size } else { c.cross_hidden_size } / 4;
        let row_bytes = 16 * row_pieces;
        // SAFETY: rows are not empty, and shorter than 4 GiB.
        unsafe { core::hint::assert_unchecked(row_bytes != 0) };
        Matrix { source, out, row_pieces, per_stage: rows_per_stage(row_bytes) }
    }
}

/// Rows of weights of a sequence.
#[inline(always)]
fn weight_rows(c: &Conversion, sequence: u32) -> u32 {
    if sequence == 0 { c.num_heads * c.head_dim } else { 2 * c.num_kv_heads * c.head_dim }
}

/// Whether the guess of the exponent of the weights of a sequence holds, once all their maxima are there.
///
/// # Safety
/// All items of these weights have been acquired.
#[inline(always)]
unsafe fn guess_holds(c: &Conversion, sequence: u32) -> bool {
    // SAFETY: there are `MAXIMA` words.
    unsafe {
        let word = |first: usize| ld_relaxed_s32(c.maxima.wrapping_add(first + sequence as usize));
        word(maxima::WEIGHTS) == word(maxima::GUESSES)
    }
}

/// Tokens of a sequence.
#[inline(always)]
fn tokens(c: &Conversion, sequence: u32) -> u32 {
    if sequence == 0 { c.rows_dec } else { c.rows_enc }
}

/// Counter of the row block of a token, and the tokens of the block.
#[inline(always)]
fn row_block(c: &Conversion, sequence: u32, row: u32) -> (u32, u32) {
    let left = tokens(c, sequence) - row / TILE_M * TILE_M;
    (ready::row_block(sequence, row, c.rows_dec), if left < TILE_M { left } else { TILE_M })
}

/// The conversion of a launch.
///
/// # Safety
/// The entry converts.
#[inline(always)]
unsafe fn conversion<E: Entry>() -> &'static Conversion {
    // SAFETY: the parameters live as long as the launch; the entry converts, so this is what stands there.
    unsafe { &*(&raw const (*E::params()).beside).cast::<Conversion>() }
}
