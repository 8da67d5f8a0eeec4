//! Chunks that the host does not know, on the simulated GPU: plans from bounds alone, padding rows full of NaN, offsets that break rules.

use attn_backward::audio::{self, AttentionTiles, Capacity, Plan};
use attn_backward::suite::audio_inputs;
use attn_backward::{CuSeqlens, Target, random};
use attn_backward_tests::assertions::{assert_audio, norm};
use attn_backward_tests::examples::fill_rows_from;
use attn_backward_tests::simulated::Simulator;
use attn_backward_tests::simulated::audio::{
    AttentionInputs, HOPPER, LONG_KERNELS_ONLY, TARGET, attention, attention_on, attention_reference, backward_on,
    bias_sums_of_offsets, tiles_for,
};
use attn_backward_tests::strategies::cu_seqlens_of;
use half::bf16;
use proptest::prelude::*;

fn attention_inputs(seed: u64, num_heads: usize, cu_seqlens: CuSeqlens) -> AttentionInputs {
    let rows = cu_seqlens.total_seq_len();
    let states = (1, num_heads, rows, audio::HEAD_DIM);
    AttentionInputs {
        query_states: random::normal(seed, 0, 1.0, states),
        key_states: random::normal(seed, 1, 1.0, states),
        value_states: random::normal(seed, 2, 1.0, states),
        d_attn: random::normal(seed, 3, 8.0, (rows, num_heads * audio::HEAD_DIM)),
        cu_seqlens,
        scale: 0.125,
    }
}

/// Lengths of chunks, some of them empty or of one row.
fn chunk_lens(longest: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![1 => Just(0), 1 => Just(1), 1 => Just(longest), 3 => 0..=longest], 0..8)
}

/// Machines with and without room for a short kernel.
fn targets() -> impl Strategy<Value = Target> {
    prop_oneof![3 => Just(TARGET), 1 => Just(LONG_KERNELS_ONLY)]
}

/// Offsets of which some break rules, for some number of rows: `[num_chunks + 1]`.
fn any_offsets() -> impl Strategy<Value = (Vec<i32>, usize)> {
    let offset = prop_oneof![6 => 0..260i32, 1 => Just(-1), 1 => Just(i32::MIN), 1 => Just(i32::MAX), 1 => Just(0)];
    (prop::collection::vec(offset, 1..8), 1..250usize, any::<bool>()).prop_map(|(mut offsets, rows, sorted)| {
        if sorted {
            offsets.sort_unstable();
        }
        (offsets, rows)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, max_shrink_iters: 32, ..ProptestConfig::default() })]

    #[test]
    fn a_plan_from_bounds_gives_the_gradients_of_any_chunks_inside_and_padding_reaches_nothing(
        (lens, seed) in prop_oneof![chunk_lens(40), chunk_lens(150)].prop_flat_map(|lens| (Just(lens), any::<u64>())),
        padding in prop_oneof![Just(0usize), 1..5usize, 60..70usize, 5..140usize],
        more_chunks in 0..4usize,
        longer in prop_oneof![Just(0usize), 0..200usize],
        num_heads in 1..=2usize,
        target in targets(),
    ) {
        let cu_seqlens = cu_seqlens_of(&lens, padding);
        let tokens = cu_seqlens.padding().start;
        let capacity = Capacity {
            num_chunks: cu_seqlens.num_chunks() + more_chunks,
            max_chunk_len: cu_seqlens.max_chunk_len() + longer,
        };
        let shape = audio::Shape { total_seq_len: cu_seqlens.total_seq_len(), num_heads, scale: 0.125 };
        let mut inputs = audio_inputs(seed, shape, cu_seqlens);
        fill_rows_from(&mut inputs, tokens, bf16::NAN);
        let plan = Plan::with_capacity(&shape, capacity, &target).unwrap();
        let Some(mut gpu) = Simulator::new() else { return Ok(()) };
        let gradients = backward_on(&mut gpu, &inputs, &plan);
        assert_audio(&gradients, &audio::reference::backward(&inputs).unwrap());
        assert_audio(&audio::cpu::backward(&inputs).unwrap(), &audio::reference::backward(&inputs).unwrap());
        let padding_rows = gradients.grad_hidden_states.outer_iter().skip(tokens);
        assert!(padding_rows.flatten().all(|x| x.to_bits() == 0));
    }

    #[test]
    fn offsets_that_break_a_rule_touch_nothing_out_of_bounds_and_give_nan(
        (offsets, rows) in any_offsets(),
        max_chunk_len in prop_oneof![Just(60usize), Just(100usize), Just(250usize)],
        target in targets(),
    ) {
        let inputs = attention_inputs(1, 2, CuSeqlens::new(&[0], rows).unwrap());
        let capacity = Capacity { num_chunks: offsets.len() - 1, max_chunk_len };
        let tiles = AttentionTiles::new(capacity, rows, [].into_iter(), 2, &target);
        let Some(mut gpu) = Simulator::new() else { return Ok(()) };
        let sums = bias_sums_of_offsets(&mut gpu, &inputs, &tiles, &offsets);
        let mut sums_of_dq = sums.columns().into_iter().take(128).map(|column| column.sum());
        let breaks_a_rule = tiles.capacity().check(&offsets, rows).is_err();
        assert!(sums_of_dq.all(|sum: f32| sum.is_nan() == breaks_a_rule), "{offsets:?} of {rows} rows");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 16, ..ProptestConfig::default() })]

    #[test]
    fn hopper_kernels_for_long_chunks_equal_the_reference_for_any_chunks(
        lens in prop::collection::vec(prop_oneof![1 => Just(0), 2 => 1..130usize, 3 => 120..400usize], 1..5),
        padding in 0..200usize,
        num_heads in 1..=2usize,
        has_short_kernel in any::<bool>(),
        num_sms in 1..6u32,
    ) {
        let inputs = attention_inputs(9, num_heads, cu_seqlens_of(&lens, padding));
        let target = if has_short_kernel { HOPPER } else { Target { max_shared_bytes: 0, ..HOPPER } };
        prop_assume!(tiles_for(&inputs.cu_seqlens, num_heads, &target).flash());
        let Some(mut gpu) = Simulator::hopper(num_sms) else { return Ok(()) };
        let found = attention(&mut gpu, &inputs, &target);
        let reference = attention_reference(&inputs, &target);
        for (found, reference) in [(found.o, reference.o), (found.dqkv, reference.dqkv)] {
            let error = norm(&reference - &found.mapv(f64::from));
            // bf16 costs 1.7e-3
            prop_assert!(error <= 2e-3 * norm(reference), "{lens:?}: error {error:e}");
        }
    }

    #[test]
    fn hopper_kernels_for_long_chunks_end_in_bounds_whatever_the_offsets_hold(
        (offsets, rows) in any_offsets(),
        has_short_kernel in any::<bool>(),
        num_sms in 1..4u32,
    ) {
        let inputs = attention_inputs(1, 2, CuSeqlens::new(&[0], rows).unwrap());
        let capacity = Capacity { num_chunks: offsets.len() - 1, max_chunk_len: 250 };
        let target = if has_short_kernel { HOPPER } else { Target { max_shared_bytes: 0, ..HOPPER } };
        let lens = [300].into_iter().chain(has_short_kernel.then_some(1));
        let tiles = AttentionTiles::new(capacity, rows, lens, 2, &target);
        prop_assume!(tiles.flash());
        let Some(mut gpu) = Simulator::hopper(num_sms) else { return Ok(()) };
        let sums = bias_sums_of_offsets(&mut gpu, &inputs, &tiles, &offsets);
        let mut sums_of_dq = sums.columns().into_iter().take(128).map(|column| column.sum());
        let breaks_a_rule = tiles.capacity().check(&offsets, rows).is_err();
        assert!(sums_of_dq.all(|sum: f32| sum.is_nan() == breaks_a_rule), "{offsets:?} of {rows} rows");
    }
}

#[test]
fn hopper_kernels_for_more_and_longer_chunks_give_the_same_rows() {
    let inputs = attention_inputs(4, 1, cu_seqlens_of(&[260, 0, 64, 1, 130], 70));
    let Some(mut gpu) = Simulator::hopper(2) else { return };
    let expected = attention(&mut gpu, &inputs, &HOPPER);
    for (num_chunks, max_chunk_len) in [(5, 260), (40, 400)] {
        let capacity = Capacity { num_chunks, max_chunk_len };
        let tiles = AttentionTiles::new(capacity, 525, inputs.cu_seqlens.chunk_lens(), 1, &HOPPER);
        assert!(tiles.flash());
        assert_eq!(attention_on(&mut gpu, &inputs, &tiles), expected);
    }
}

#[test]
fn kernels_for_more_and_longer_chunks_give_the_same_rows() {
    let lens = [5, 0, 64, 1, 130];
    let inputs = attention_inputs(2, 2, cu_seqlens_of(&lens, 70));
    for target in [TARGET, LONG_KERNELS_ONLY] {
        let Some(mut gpu) = Simulator::new() else { return };
        let expected = attention(&mut gpu, &inputs, &target);
        for (num_chunks, max_chunk_len) in [(5, 130), (9, 130), (40, 200)] {
            let capacity = Capacity { num_chunks, max_chunk_len };
            let tiles = AttentionTiles::new(capacity, 270, inputs.cu_seqlens.chunk_lens(), 2, &target);
            assert_eq!(tiles.short_rows(), tiles_for(&inputs.cu_seqlens, 2, &target).short_rows());
            assert_eq!(attention_on(&mut gpu, &inputs, &tiles), expected);
        }
    }
}

#[test]
fn a_search_among_thousands_of_chunks_finds_the_long_one() {
    // two rounds of the search by lanes, and a third
    for short in [100, 2000] {
        let mut lens = vec![0; short];
        lens[short / 3] = 130;
        lens[short - 1] = 1;
        lens.extend([70, 0]);
        let inputs = attention_inputs(3, 1, cu_seqlens_of(&lens, 0));
        let packed = AttentionInputs { cu_seqlens: cu_seqlens_of(&[130, 1, 70], 0), ..inputs.clone() };
        let Some(mut gpu) = Simulator::new() else { return };
        let tiles = tiles_for(&inputs.cu_seqlens, 1, &TARGET);
        assert!(tiles.long_slots().is_some() && tiles.short_rows() > 0);
        assert_eq!(attention(&mut gpu, &inputs, &TARGET), attention(&mut gpu, &packed, &TARGET));
    }
}
