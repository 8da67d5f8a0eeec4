//! The conversion as part of the launch that multiplies (`cross_wgmma_fast`): which block converts what, and when.
//!
//! All blocks convert the weights and the first decoder tokens; then a few go on converting beside the others' products: decoder tokens, decoder
//! hidden states, encoder tokens, encoder hidden states. They join the products when they are done. Short sequences are left to launches of their
//! own (`cross_convert_*`): with nothing to convert beside, those are faster.
use std::ops::Range;

use attn_backward_kernels::config::wgmma::{CLUSTER_SIZE, TILE_M, converting, tokens_per_stage};
use attn_backward_kernels::schedule::item::{Item, item_kind, matrix};

use super::Shape;
use crate::gemm::hopper::Lead;

/// Most tokens of an item, and most rows of another one. Powers of two: items do not cross row blocks.
const MAX_ITEM_TOKENS: usize = 32;
const MAX_ITEM_ROWS: usize = 64;
const _: () = assert!(MAX_ITEM_ROWS <= converting::MAX_SCALE_ROWS as usize);

/// Whether a launch can convert: it has code for the model's sizes alone, whatever the numbers of tokens.
fn supports(shape: &Shape) -> bool {
    let sizes = [shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.hidden_size, shape.cross_hidden_size];
    let model = [
        converting::NUM_HEADS,
        converting::NUM_KV_HEADS,
        converting::HEAD_DIM,
        converting::HIDDEN_SIZE,
        converting::CROSS_HIDDEN_SIZE,
    ];
    sizes == model.map(|size| size as usize) && shape.rows_dec() > 0 && shape.rows_enc() > 0
}

/// Whether there are too few tokens to convert anything beside the products. Then launches follow each other early, which gains 1 to 2 us (longer ones lose as much).
pub(super) fn is_short(shape: &Shape, num_sms: usize) -> bool {
    shape.rows_dec() < LEAST_TOKENS_PER_SM * num_sms
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

/// Bytes a ns: of all SMs together, of those that convert beside products, and what one SM reads at most. Measured on an H200: 16 SMs read 71
/// bytes a ns each, 33 read 57 (and write 9); here a ninth more, as the products beside them run a ninth slower than their cost model has it.
const ALL_BYTES_PER_NS: f64 = 3900.0;
const BESIDE_BYTES_PER_NS: f64 = 2450.0;
const SM_READ_BYTES_PER_NS: f64 = 78.0;
/// One of so many blocks goes on converting. More lower each other's rate (44 SMs of 132 convert no more than 33), fewer lose (22 and 26 SMs: 3 to 18 %).
const SHARE: usize = 4;
/// Turns of the products: those of the decoder, whose tokens come first; grad_encoder_hidden_states last, whose many short tiles fill the ends.
const TURNS: [usize; 5] = [0, 1, 3, 2, 2];
/// With fewer decoder tokens than this for each SM, the products are too short to convert anything beside them (measured: 2, 5 and 7.75 lose).
const LEAST_TOKENS_PER_SM: usize = 8;
/// With more tokens than this the lists would get long, and there are more tiles than the wgmma kernels take.
const MOST_TOKENS: usize = 1 << 21;
/// What an item costs beside its bytes.
const ITEM_NS: u64 = 200;
/// From the last store of an item until another block goes on that has waited for it.
const SIGNAL_NS: u64 = 2_000;

/// Who converts what.
#[derive(Clone, Copy, Debug)]
struct Choice {
    /// Blocks that convert beside the products of the others.
    converters: usize,
    /// Decoder tokens that all blocks convert at first: whole row blocks, or all.
    initial_rows: usize,
}

/// The conversion as a lead of the products; `None` where these are too small for a conversion beside them.
pub(super) fn lead(shape: &Shape, num_sms: usize) -> Option<Lead> {
    let clusters = num_sms / CLUSTER_SIZE as usize;
    let num_sms = clusters * CLUSTER_SIZE as usize;
    let converters = (num_sms / SHARE).next_multiple_of(CLUSTER_SIZE as usize);
    let few_enough = shape.rows_dec().saturating_add(shape.rows_enc()) <= MOST_TOKENS;
    if converters == 0 || !supports(shape) || is_short(shape, num_sms) || !few_enough {
        return None;
    }
    // Enough row blocks of grad_decoder_hidden_states for every other block to have a tile.
    let row_blocks = (num_sms - converters).div_ceil(shape.hidden_size.div_ceil(256));
    let initial_rows = (row_blocks * TILE_M as usize).min(shape.rows_dec());
    Some(Deal::new(shape, num_sms).lead(&Choice { converters, initial_rows }))
}

/// Items dealt so far.
struct Deal<'a> {
    shape: &'a Shape,
    lists: Vec<Vec<Item>>,
    clock: Vec<u64>,
}

impl<'a> Deal<'a> {
    fn new(shape: &'a Shape, num_sms: usize) -> Self {
        Deal { shape, lists: vec![Vec::new(); num_sms], clock: vec![0; num_sms] }
    }

    fn lead(mut self, choice: &Choice) -> Lead {
        let shape = self.shape;
        let num_sms = self.lists.len();
        let rows = [shape.rows_dec(), shape.rows_enc()];
        let mut blocks_done = rows.map(|rows| vec![0; rows.div_ceil(TILE_M as usize)]);
        let [dec_blocks, enc_blocks] = &mut blocks_done;
        let initial = choice.initial_rows;

        // The encoder's weights wait until some blocks go on alone, if there are decoder tokens left for these.
        let weights = [matrix::Q_WEIGHT, matrix::K_WEIGHT, matrix::V_WEIGHT];
        let (early, late) = weights.split_at(if initial < rows[0] { 1 } else { weights.len() });
        let (all, few) = (num_sms, choice.converters);
        let last = |blocks: &[u64]| blocks.iter().copied().max().unwrap_or(0);

        let guessed = self.matrices(item_kind::WEIGHTS, early, all, 0);
        self.tokens(0, 0..initial, all, dec_blocks);
        let early_weights = self.matrices(item_kind::SCALE, early, all, guessed);
        self.tokens(0, initial..rows[0], few, dec_blocks);
        let dec = self.matrices(item_kind::SCALE, &[matrix::DECODER], few, last(dec_blocks));
        let guessed = self.matrices(item_kind::WEIGHTS, late, few, 0);
        // Tokens for each block, so that none waits for weights that others have.
        let between = if late.is_empty() { 0 } else { (few * MAX_ITEM_TOKENS).min(rows[1]) / TILE_M as usize };
        let between = between * TILE_M as usize;
        self.tokens(1, 0..between, few, enc_blocks);
        let late_weights = self.matrices(item_kind::SCALE, late, few, guessed);
        self.tokens(1, between..rows[1], few, enc_blocks);
        let enc = self.matrices(item_kind::SCALE, &[matrix::ENCODER], few, last(enc_blocks));

        let with_weights = |blocks: &[u64], weights: u64| blocks.iter().map(|done| *done.max(&weights)).collect();
        Lead {
            lists: self.lists,
            done_ns: self.clock.chunks(CLUSTER_SIZE as usize).map(last).collect(),
            turns: TURNS.into(),
            ready_ns: vec![
                with_weights(dec_blocks, early_weights),
                vec![dec],
                with_weights(enc_blocks, early_weights.max(late_weights)),
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
        let written = 2 * width;
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

    /// All rows of some matrices, by the first `converters` blocks, not before `after`; when all is done.
    fn matrices(&mut self, kind: u32, matrices: &[u32], converters: usize, after: u64) -> u64 {
        matrices.iter().map(|index| self.matrix(kind, *index, converters, after)).max().unwrap_or(0)
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
        // Weights are converted when they are read the first time; scaling them again is not expected.
        let (read, written) =
            if kind == item_kind::SCALE && !matrix::is_hidden(index) { (0, 0) } else { (4 * columns, 2 * columns) };
        let round = converting::ROUND_ROWS as usize;
        let step = rows.div_ceil(converters).next_multiple_of(round).min(MAX_ITEM_ROWS);
        let deal = |first| {
            let count = step.min(rows - first);
            let item = Item { kind, product: index, ..rows_item(first, count) };
            self.deal(item, converters, (count * read, count * written), after)
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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use attn_backward_kernels::config::wgmma::ready;
    use attn_backward_kernels::params::Major;
    use proptest::prelude::*;

    use super::*;
    use crate::gemm::hopper::{Accumulation, HopperPlan, KCuts};

    fn shape(batch_size: usize, seq_len_dec: usize, seq_len_enc: usize) -> Shape {
        let (num_heads, num_kv_heads, head_dim) = (16, 4, 256);
        let (hidden_size, cross_hidden_size) = (1536, 1024);
        Shape {
            batch_size,
            seq_len_dec,
            seq_len_enc,
            num_heads,
            num_kv_heads,
            head_dim,
            hidden_size,
            cross_hidden_size,
        }
    }

    /// What an item waits for, and what it counts: counters and their values. Part counters follow those of the conversion.
    struct Effects {
        waits: Vec<(u32, usize)>,
        counts: Vec<(u32, usize)>,
    }

    fn effects(shape: &Shape, item: &Item) -> Effects {
        let rows = [shape.rows_dec(), shape.rows_enc()];
        let weight_rows = [shape.q_out_dim(), 2 * shape.kv_out_dim()];
        let [dec, enc] = rows.map(|rows| rows as u32);
        let part = ready::counters(dec, enc) + item.counter;
        let count = item.k_blocks as usize;
        let of_matrix = matrix::sequence(item.product);
        if item.kind == item_kind::WEIGHTS {
            assert!(item.k_blocks.is_multiple_of(converting::ROUND_ROWS), "whole rounds");
        }
        let sequence = of_matrix as usize;
        let (mut waits, counts) = match item.kind {
            item_kind::WEIGHTS => (vec![], vec![(ready::WEIGHT_MAXIMA + of_matrix, count)]),
            item_kind::TOKENS => {
                assert_eq!(item.m0 / TILE_M, (item.m0 + item.k_blocks - 1) / TILE_M, "inside a row block");
                let block = ready::row_block(item.product, item.m0, dec);
                (vec![], vec![(ready::TOKENS + item.product, count), (block, count)])
            }
            item_kind::SCALE if matrix::is_hidden(item.product) => {
                (vec![(ready::TOKENS + of_matrix, rows[sequence])], vec![(ready::HIDDEN + of_matrix, count)])
            }
            item_kind::SCALE => {
                let maxima = (ready::WEIGHT_MAXIMA + of_matrix, weight_rows[sequence]);
                (vec![maxima], vec![(ready::WEIGHTS + of_matrix, count)])
            }
            item_kind::PART => (vec![], vec![(part, 1)]),
            item_kind::OWNER | item_kind::REDUCE => (vec![(part, item.parts as usize)], vec![]),
            _ => (vec![], vec![]),
        };
        if item.kind < item_kind::REDUCE {
            let sequence = (item.product >= 2) as u32;
            let rows = rows[sequence as usize];
            if item.a_major == Major::Mn as u32 {
                waits.push((ready::HIDDEN + sequence, rows));
            } else {
                let in_block = (rows - item.m0 as usize).min(TILE_M as usize);
                waits.push((ready::row_block(sequence, item.m0, dec), in_block));
                waits.push((ready::WEIGHTS + sequence, weight_rows[sequence as usize]));
            }
        }
        Effects { waits, counts }
    }

    /// Runs the lists of all blocks; panics if none can go on, or something is converted twice.
    fn run(shape: &Shape, plan: &HopperPlan) {
        let mut lists: Vec<&[Item]> = plan.items().chunks_exact(plan.items_per_block()).collect();
        let mut counters: HashMap<u32, usize> = HashMap::new();
        let mut converted: HashMap<(u32, u32), Vec<(u32, u32)>> = HashMap::new();
        loop {
            let mut progress = false;
            for list in &mut lists {
                while list[0].k_blocks > 0 {
                    let item = &list[0];
                    let Effects { waits, counts } = effects(shape, item);
                    if waits.iter().any(|(counter, value)| counters.get(counter).is_none_or(|found| found < value)) {
                        break;
                    }
                    for (counter, count) in counts {
                        *counters.entry(counter).or_default() += count;
                    }
                    if item.kind >= item_kind::WEIGHTS {
                        converted.entry((item.kind, item.product)).or_default().push((item.m0, item.k_blocks));
                    }
                    *list = &list[1..];
                    progress = true;
                }
            }
            if !progress {
                break;
            }
        }
        assert!(lists.iter().all(|list| list[0].k_blocks == 0), "a list waits for what never comes");
        let (q, kv) = (shape.q_out_dim(), shape.kv_out_dim());
        let weights = [q, kv, kv];
        let expected = [
            (item_kind::WEIGHTS, &weights[..]),
            (item_kind::TOKENS, &[shape.rows_dec(), shape.rows_enc()]),
            (item_kind::SCALE, &[q, kv, kv, shape.rows_dec(), shape.rows_enc()]),
        ];
        for (kind, rows) in expected {
            for (product, rows) in rows.iter().enumerate() {
                let ranges = converted.get_mut(&(kind, product as u32)).expect("items of each kind");
                ranges.sort_unstable();
                let end = ranges.iter().fold(0, |end, (first, count)| {
                    assert_eq!(*first, end, "kind {kind} of {product}: each row once");
                    end + count
                });
                assert_eq!(end as usize, *rows);
            }
        }
    }

    fn check(shape: &Shape, num_sms: usize) {
        assert!(supports(shape));
        let choices =
            [(num_sms.div_ceil(4), shape.rows_dec()), (1, 0), (num_sms, shape.rows_dec().min(TILE_M as usize))];
        let choices = choices.map(|(converters, initial_rows)| Choice { converters, initial_rows });
        let leads = choices.iter().map(|choice| Deal::new(shape, num_sms).lead(choice));
        for lead in leads.chain(super::lead(shape, num_sms)).chain(super::lead(shape, num_sms + 1)) {
            let products = super::super::plan::products(shape, 1);
            run(shape, &HopperPlan::after(Accumulation::Plain, &products, &lead, KCuts::Allowed).unwrap());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn no_list_waits_forever_and_each_row_is_converted_once(
            batch_size in 1usize..9,
            seq_len_dec in 1usize..600,
            seq_len_enc in 1usize..600,
            num_sms in prop::sample::select(vec![2usize, 6, 78, 114, 132]),
        ) {
            check(&shape(batch_size, seq_len_dec, seq_len_enc), num_sms);
        }
    }

    #[test]
    fn long_sequences_are_converted_beside_their_products() {
        for (batch_size, dec, enc) in [(4, 2048, 4096), (64, 256, 256), (1, 613, 691), (2, 128, 128)] {
            check(&shape(batch_size, dec, enc), 132);
        }
    }

    #[test]
    fn other_sizes_and_short_sequences_are_left_to_launches_of_their_own() {
        let model = shape(8, 1024, 1024);
        assert!(lead(&model, 132).is_some());
        assert_eq!(stage_tokens(&model), [2, 1]);
        for other in [
            Shape { num_heads: 8, num_kv_heads: 2, ..model },
            Shape { num_heads: 32, num_kv_heads: 8, head_dim: 128, ..model },
            Shape { hidden_size: 1024, ..model },
            Shape { batch_size: 0, ..model },
            Shape { seq_len_enc: 0, ..model },
            Shape { batch_size: 1, seq_len_dec: 900, ..model },
            Shape { batch_size: 1 << 20, seq_len_dec: 2047, ..model },
        ] {
            assert!(lead(&other, 132).is_none(), "{other:?}");
        }
    }
}
