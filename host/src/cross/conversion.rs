//! The conversion as part of the launch that multiplies (`cross_wgmma_*`): which block converts what, and when.
//!
//! Either all blocks convert everything and then multiply, or all convert the weights and the first decoder tokens, and then a few go on
//! converting beside the others' products: decoder tokens, decoder hidden states, encoder tokens, encoder hidden states. The plan takes whichever
//! the cost model says is faster.
use std::ops::Range;

use attn_backward_kernels::config::wgmma::{STAGE_BYTES, TILE_M, tokens_per_stage};
use attn_backward_kernels::schedule::item::{Item, item_kind, matrix};

use super::{Precision, Shape};
use crate::gemm::hopper::Lead;

/// Most heads of a tensor-map box.
const MAX_HEADS: usize = 256;
/// Most tokens of an item, and most rows of another one. Powers of two: items do not cross row blocks.
const MAX_ITEM_TOKENS: usize = 32;
const MAX_ITEM_ROWS: usize = 64;

/// Whether the launch can convert: a stage holds the gradients and hidden states of a token.
pub(super) fn supports(shape: &Shape) -> bool {
    let stage = STAGE_BYTES as usize;
    let (dec, enc) = token_bytes(shape);
    dec <= stage && enc <= stage && shape.num_heads <= MAX_HEADS && shape.rows_dec() > 0 && shape.rows_enc() > 0
}

/// Bytes of a token's gradients and hidden states: decoder, encoder.
fn token_bytes(shape: &Shape) -> (usize, usize) {
    let q_out = shape.q_out_dim();
    (4 * (q_out + shape.hidden_size), 4 * (2 * q_out + shape.cross_hidden_size))
}

/// Tokens that a stage holds: decoder, encoder. The shape is [supported](supports).
pub(super) fn stage_tokens(shape: &Shape) -> [u32; 2] {
    let (dec, enc) = token_bytes(shape);
    [dec, enc].map(|bytes| tokens_per_stage(bytes as u32))
}

/// Memory bandwidth in bytes a ns: of all SMs together, of what is left beside products, and what one SM reads at most. Estimated from the
/// conversion kernels' 3.85 TB/s.
const ALL_BYTES_PER_NS: f64 = 3900.0;
const BESIDE_BYTES_PER_NS: f64 = 3000.0;
const SM_READ_BYTES_PER_NS: f64 = 85.0;
/// What an item costs beside its bytes.
const ITEM_NS: u64 = 200;
/// From the last store of an item until another block goes on that has waited for it.
const SIGNAL_NS: u64 = 2_000;

/// Who converts what.
#[derive(Clone, Copy, Debug)]
struct Choice {
    /// Blocks that convert beside the products of the others; all blocks: nobody multiplies before all is converted.
    converters: usize,
    /// Decoder tokens that all blocks convert at first.
    initial_rows: usize,
    /// Turns of the products.
    turns: [usize; 5],
}

/// The leads to choose from.
pub(super) fn leads(shape: &Shape, precision: Precision, num_sms: usize) -> Vec<Lead> {
    let serial = Choice { converters: num_sms, initial_rows: shape.rows_dec(), turns: [0; 5] };
    let mut choices = vec![serial];
    for share in [8, 6, 5, 4, 3] {
        let converters = num_sms / share;
        // Enough row blocks of grad_decoder_hidden_states for every other block to have a tile.
        let row_blocks = (num_sms - converters).div_ceil(shape.hidden_size.div_ceil(256));
        let initial_rows = row_blocks * TILE_M as usize;
        if converters > 0 && initial_rows < shape.rows_dec() {
            for turns in [[0, 1, 3, 2, 2], [0, 1, 2, 3, 3]] {
                choices.push(Choice { converters, initial_rows, turns });
            }
        }
    }
    choices.iter().map(|choice| Deal::new(shape, precision, num_sms).lead(choice)).collect()
}

/// Items dealt so far.
struct Deal<'a> {
    shape: &'a Shape,
    /// fp16 parts of a converted element.
    parts: usize,
    lists: Vec<Vec<Item>>,
    clock: Vec<u64>,
}

impl<'a> Deal<'a> {
    fn new(shape: &'a Shape, precision: Precision, num_sms: usize) -> Self {
        let parts = if precision == Precision::High { 2 } else { 1 };
        Deal { shape, parts, lists: vec![Vec::new(); num_sms], clock: vec![0; num_sms] }
    }

    fn lead(mut self, choice: &Choice) -> Lead {
        let shape = self.shape;
        let num_sms = self.lists.len();
        let rows = [shape.rows_dec(), shape.rows_enc()];
        let mut blocks_done = rows.map(|rows| vec![0; rows.div_ceil(TILE_M as usize)]);
        let [dec_blocks, enc_blocks] = &mut blocks_done;
        let beside = choice.converters < num_sms;
        let initial = choice.initial_rows.min(rows[0]);

        let maxima = [matrix::Q_WEIGHT, matrix::K_WEIGHT, matrix::V_WEIGHT]
            .map(|weight| self.matrix(item_kind::MAXIMUM, weight, num_sms, 0));
        self.tokens(0, 0..initial, num_sms, dec_blocks);
        if !beside {
            self.tokens(1, 0..rows[1], num_sms, enc_blocks);
        }
        let after = [maxima[0], maxima[1].max(maxima[2])];
        let [q, k, v] = [matrix::Q_WEIGHT, matrix::K_WEIGHT, matrix::V_WEIGHT]
            .map(|weight| self.matrix(item_kind::SCALE, weight, num_sms, after[matrix::sequence(weight) as usize]));
        self.tokens(0, initial..rows[0], choice.converters, dec_blocks);
        let last = |blocks: &[u64]| blocks.iter().copied().max().unwrap_or(0);
        let dec = self.matrix(item_kind::SCALE, matrix::DECODER, choice.converters, last(dec_blocks));
        if beside {
            self.tokens(1, 0..rows[1], choice.converters, enc_blocks);
        }
        let enc = self.matrix(item_kind::SCALE, matrix::ENCODER, choice.converters, last(enc_blocks));

        let with_weights = |blocks: &[u64], weights: u64| blocks.iter().map(|done| *done.max(&weights)).collect();
        Lead {
            lists: self.lists,
            done_ns: self.clock,
            turns: choice.turns.into(),
            ready_ns: vec![
                with_weights(dec_blocks, q),
                vec![dec],
                with_weights(enc_blocks, k.max(v)),
                vec![enc],
                vec![enc],
            ],
        }
    }

    /// Tokens of a sequence, by the first `converters` blocks; `done` is by row block.
    fn tokens(&mut self, sequence: u32, tokens: Range<usize>, converters: usize, done: &mut [u64]) {
        let (dec, enc) = token_bytes(self.shape);
        let read = if sequence == 0 { dec } else { enc };
        let width = if sequence == 0 { self.shape.q_out_dim() } else { 2 * self.shape.kv_out_dim() };
        let written = 2 * self.parts * width;
        // About four items a block, two tokens at least: one for each warpgroup.
        let step = (tokens.len() / (4 * converters)).clamp(2, MAX_ITEM_TOKENS);
        let step = 1 << step.ilog2();
        for first in tokens.clone().step_by(step) {
            let rows = step.min(tokens.end - first);
            let item = Item { kind: item_kind::TOKENS, product: sequence, ..rows_item(first, rows) };
            let end = self.deal(item, converters, (rows * read, rows * written), 0);
            let block = &mut done[first / TILE_M as usize];
            *block = end.max(*block);
        }
    }

    /// All rows of a matrix, by the first `converters` blocks, not before `after`; when all is done.
    fn matrix(&mut self, kind: u32, index: u32, converters: usize, after: u64) -> u64 {
        let shape = self.shape;
        let (rows, columns) = match index {
            matrix::Q_WEIGHT => (shape.q_out_dim(), shape.hidden_size),
            matrix::K_WEIGHT | matrix::V_WEIGHT => (shape.kv_out_dim(), shape.cross_hidden_size),
            matrix::DECODER => (shape.rows_dec(), shape.hidden_size),
            _ => (shape.rows_enc(), shape.cross_hidden_size),
        };
        let written = if kind == item_kind::SCALE { 2 * self.parts * columns } else { 0 };
        let step = rows.div_ceil(converters).next_multiple_of(8).min(MAX_ITEM_ROWS);
        let deal = |first| {
            let count = step.min(rows - first);
            let item = Item { kind, product: index, ..rows_item(first, count) };
            self.deal(item, converters, (4 * count * columns, count * written), after)
        };
        (0..rows).step_by(step).map(deal).max().unwrap_or(0)
    }

    /// Gives an item to the least loaded of the first `converters` blocks; when it is done, as others see it.
    fn deal(&mut self, item: Item, converters: usize, (read, written): (usize, usize), after: u64) -> u64 {
        let all = if converters < self.lists.len() { BESIDE_BYTES_PER_NS } else { ALL_BYTES_PER_NS };
        let share = all / converters as f64;
        let ns = ((read + written) as f64 / share).max(read as f64 / SM_READ_BYTES_PER_NS) as u64 + ITEM_NS;
        let block = (0..converters).min_by_key(|block| self.clock[*block]).unwrap_or(0);
        self.clock[block] = self.clock[block].max(after) + ns;
        self.lists[block].push(item);
        self.clock[block] + SIGNAL_NS
    }
}

/// An item of `rows` rows from `first`.
fn rows_item(first: usize, rows: usize) -> Item {
    Item { m0: first as u32, k_blocks: rows as u32, ..Item::END }
}
