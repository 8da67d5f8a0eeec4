//! Operation B's conversion to scaled fp16, by the launch that multiplies: items like tiles, through the same ring.
//!
//! Formula: that of [`cross_convert`](crate::kernel::cross_convert), bit for bit (but that a zero keeps its sign). The producer loads rows of fp32
//! into a stage; a consumer warpgroup takes every second row of an item, counted from the item's first. Its publishing warp counts what is
//! done in `conversion.ready`, and whoever needs it waits there.
//! * maximum items: 16 bytes a thread at a time, any of the rows.
//! * token items: a warpgroup holds a token in registers from its one reading to its storing, thread `i` the pieces `i, i + 128, ..` (16 bytes of
//!   fp32). The stage is given back as soon as all have read.
//! * scale items: a warp takes every eighth row.
//!
//! Stage of a token item: `[tensors][num_heads][tokens][head_dim]` of gradients, one or two tensors (dK and dV), then `[tokens][hidden]`.
//!
//! **Ordering.** Results of other blocks are read after the producer has acquired them: directly (`ld.relaxed.gpu`, past L1) after the first full
//! stage of the item, since the producer's arrival follows its acquire, or by TMA after a proxy fence.
use super::Entry;
use crate::config::wgmma::{TILE_M, ready, rows_per_stage};
use crate::params_wgmma::Conversion;
use crate::schedule::item::matrix;

mod consume;
mod produce;
mod token;

pub(super) use consume::publish;
pub(super) use produce::wait_for_operands;

/// A sequence of tokens; a piece is 16 bytes of fp32 (4 elements).
struct Sequence {
    seq_len: u32,
    /// Pieces of a converted row, all and those of the first tensor.
    row_pieces: u32,
    source_pieces: u32,
    /// Heads that are summed.
    groups: u32,
    /// log2 of the pieces of a head.
    head_shift: u32,
    hidden_pieces: u32,
    /// Tokens of a stage.
    per_stage: u32,
    /// Bytes of a tensor in a stage.
    box_bytes: u32,
    /// Tensors that are loaded.
    tensors: u32,
    hidden: *const f32,
}

impl Sequence {
    /// Sequence `index`: 0 decoder, 1 encoder.
    #[inline(always)]
    fn of(c: &Conversion, index: u32) -> Self {
        let head_shift = c.head_dim.trailing_zeros() - 2;
        let (seq_len, heads, hidden, hidden_size, per_stage) = if index == 0 {
            (c.seq_len_dec, c.num_heads, c.decoder_hidden_states, c.hidden_size, c.tokens_per_stage[0])
        } else {
            (c.seq_len_enc, c.num_kv_heads, c.encoder_hidden_states, c.cross_hidden_size, c.tokens_per_stage[1])
        };
        // SAFETY: there are key/value heads, and items name tokens of sequences that have some.
        unsafe { core::hint::assert_unchecked(heads != 0 && seq_len != 0) };
        let source_pieces = heads << head_shift;
        Sequence {
            seq_len,
            row_pieces: source_pieces << index,
            source_pieces,
            groups: c.num_heads / heads,
            head_shift,
            hidden_pieces: hidden_size / 4,
            per_stage,
            box_bytes: (c.num_heads << (head_shift + 4)) * per_stage,
            tensors: 1 + index,
            hidden,
        }
    }
}

/// Walk over the tokens of an item, a stage at a time: a stage's tokens are of one batch.
struct Stages {
    row: u32,
    end: u32,
    batch: u32,
    place: u32,
    seq_len: u32,
    per_stage: u32,
}

impl Stages {
    #[inline(always)]
    fn new(sequence: &Sequence, first: u32, rows: u32) -> Self {
        let batch = first / sequence.seq_len;
        let place = first - batch * sequence.seq_len;
        let (seq_len, per_stage) = (sequence.seq_len, sequence.per_stage);
        Stages { row: first, end: first + rows, batch, place, seq_len, per_stage }
    }

    /// Tokens of the stage at hand.
    #[inline(always)]
    fn tokens(&self) -> u32 {
        self.per_stage.min(self.end - self.row).min(self.seq_len - self.place)
    }

    /// Goes past them.
    #[inline(always)]
    fn advance(&mut self, tokens: u32) {
        self.row += tokens;
        self.place += tokens;
        if self.place == self.seq_len {
            self.place = 0;
            self.batch += 1;
        }
    }
}

/// A matrix of weights or hidden states.
struct Matrix {
    source: *const f32,
    row_pieces: u32,
    /// Rows of a stage.
    per_stage: u32,
}

impl Matrix {
    /// The matrix that an item names.
    #[inline(always)]
    fn of(c: &Conversion, index: u32) -> Self {
        let source = match index {
            matrix::Q_WEIGHT => c.q_weight,
            matrix::K_WEIGHT => c.k_weight,
            matrix::V_WEIGHT => c.v_weight,
            matrix::DECODER => c.decoder_hidden_states,
            _ => c.encoder_hidden_states,
        };
        let row_pieces = if matrix::sequence(index) == 0 { c.hidden_size } else { c.cross_hidden_size } / 4;
        // SAFETY: rows are not empty.
        unsafe { core::hint::assert_unchecked(row_pieces != 0) };
        Matrix { source, row_pieces, per_stage: rows_per_stage(16 * row_pieces) }
    }
}

/// Rows of weights of a sequence.
#[inline(always)]
fn weight_rows(c: &Conversion, sequence: u32) -> u32 {
    if sequence == 0 { c.num_heads * c.head_dim } else { 2 * c.num_kv_heads * c.head_dim }
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
