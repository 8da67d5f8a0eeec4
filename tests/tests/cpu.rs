//! The CPU implementations against the f64 references, and properties that need no reference.

use attn_backward::compare::compare_all;
use attn_backward::suite::{audio_inputs, cross_inputs};
use attn_backward::{CuSeqlens, Error, audio, cross, window_cu_seqlens};
use attn_backward_tests::assertions::{F32, LIKE_AUDIO_SUITE, ROUNDED_ONCE, assert_matches, bits, wide};
use attn_backward_tests::examples::{audio_of, cross_shape, fill_rows_from, one_chunk};
use attn_backward_tests::strategies::{self, cu_seqlens_of};
use half::bf16;
use ndarray::{Array2, Axis, concatenate, s};
use proptest::prelude::*;

fn audio_matches_its_reference(inputs: &audio::Inputs) {
    let (grads, reference) = (audio::cpu::backward(inputs).unwrap(), audio::reference::backward(inputs).unwrap());
    assert_matches(&grads.tensors(), &reference.tensors(), &ROUNDED_ONCE);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn audio_equals_its_reference_for_any_chunks(inputs in strategies::audio(40)) {
        audio_matches_its_reference(&inputs);
    }

    #[test]
    fn audio_chunks_of_more_than_one_query_block_equal_the_reference(inputs in strategies::audio(300)) {
        audio_matches_its_reference(&inputs);
    }

    #[test]
    fn audio_packed_run_equals_its_chunks_one_by_one(inputs in strategies::audio(30)) {
        let packed = audio::cpu::backward(&inputs).unwrap();
        let d_model = inputs.q_weight.nrows();
        let mut rows = vec![Array2::<f64>::zeros((0, d_model))];
        let mut sums = packed.tensors()[1..].iter().map(|(_, x)| x.mapv(|_| 0.0f64)).collect::<Vec<_>>();
        for chunk in inputs.cu_seqlens.chunks() {
            let alone = audio::reference::backward(&one_chunk(&inputs, chunk)).unwrap();
            for (sum, (_, part)) in sums.iter_mut().zip(&alone.tensors()[1..]) {
                *sum += part;
            }
            rows.push(alone.grad_hidden_states);
        }
        rows.push(Array2::zeros((inputs.cu_seqlens.padding().len(), d_model)));
        let rows: Vec<_> = rows.iter().map(|x| x.view()).collect();
        let mut expected = vec![("grad_hidden_states", concatenate(Axis(0), &rows).unwrap().into_dyn())];
        expected.extend(packed.tensors()[1..].iter().zip(sums).map(|((name, _), sum)| (*name, sum)));
        let expected: Vec<_> = expected.iter().map(|(name, x)| (*name, x.view())).collect();
        assert_matches(&packed.tensors(), &expected, &ROUNDED_ONCE);
    }

    #[test]
    fn audio_value_gradients_sum_to_those_of_the_attention_output(inputs in strategies::audio(40)) {
        let grads = audio::reference::backward(&inputs).unwrap();
        let expected = wide(&inputs.out_weight).t().dot(&grads.grad_out_bias);
        let norm = expected.dot(&expected).sqrt();
        let error = &expected - &grads.grad_v_bias;
        prop_assert!(error.dot(&error).sqrt() <= 1e-12 * norm);
        let error = expected - wide(&audio::cpu::backward(&inputs).unwrap().grad_v_bias);
        prop_assert!(error.dot(&error).sqrt() <= norm / 256.0);
    }

    #[test]
    fn audio_padding_rows_get_zero_and_reach_nothing(inputs in strategies::audio(20), padding in 1..70usize) {
        let total = inputs.cu_seqlens.total_seq_len() + padding;
        let cu_seqlens = CuSeqlens::new(inputs.cu_seqlens.offsets(), total).unwrap();
        let end = cu_seqlens.padding().start;
        let shape = audio::Shape { total_seq_len: total, num_heads: inputs.query_states.dim().1, scale: inputs.scale };
        let plain = audio_inputs(1, shape, cu_seqlens);
        let mut garbage = plain.clone();
        fill_rows_from(&mut garbage, end, bf16::NAN);
        let grads = audio::cpu::backward(&garbage).unwrap();
        prop_assert_eq!(bits(&grads), bits(&audio::cpu::backward(&plain).unwrap()));
        prop_assert!(grads.grad_hidden_states.slice(s![end.., ..]).iter().all(|x| x.to_bits() == 0));
        let wide = audio::reference::backward(&garbage).unwrap();
        prop_assert_eq!(&wide, &audio::reference::backward(&plain).unwrap());
        prop_assert!(wide.grad_hidden_states.slice(s![end.., ..]).iter().all(|x| *x == 0.0));
    }

    #[test]
    fn cross_equals_its_reference_for_any_shape(inputs in strategies::cross()) {
        let (grads, reference) = (cross::cpu::backward(&inputs).unwrap(), cross::reference::backward(&inputs).unwrap());
        for comparison in assert_matches(&grads.tensors(), &reference.tensors(), &F32) {
            prop_assert!(comparison.normwise_error <= 1e-6, "{comparison:?}");
        }
    }

    #[test]
    fn cross_small_integers_are_exact(shape in strategies::cross_shape(), seed in any::<u64>()) {
        let mut inputs = cross_inputs(seed, shape);
        let round = |x: f32| (x * 64.0).round().clamp(-3.0, 3.0);
        inputs.grad_query_states.mapv_inplace(round);
        inputs.grad_key_states.mapv_inplace(round);
        inputs.grad_value_states.mapv_inplace(round);
        inputs.decoder_hidden_states.mapv_inplace(round);
        inputs.encoder_hidden_states.mapv_inplace(round);
        inputs.q_weight.mapv_inplace(round);
        inputs.k_weight.mapv_inplace(round);
        inputs.v_weight.mapv_inplace(round);
        let (grads, reference) = (cross::cpu::backward(&inputs).unwrap(), cross::reference::backward(&inputs).unwrap());
        for ((name, out), (_, reference)) in grads.tensors().iter().zip(reference.tensors()) {
            prop_assert_eq!(&out.mapv(f64::from), &reference, "{}", name);
        }
    }
}

#[test]
fn audio_chunk_lengths_around_tile_sizes_equal_the_reference() {
    for chunk_len in [1, 15, 16, 17, 31, 33, 63, 64, 65, 100, 103, 104, 105, 127, 128, 129, 192, 1500, 4096] {
        audio_matches_its_reference(&audio_of(chunk_len as u64, 1, cu_seqlens_of(&[chunk_len], 0)));
    }
}

#[test]
fn audio_many_tiny_chunks_equal_the_reference() {
    let chunk_lens: Vec<usize> = (0..600).map(|c| 1 + c % 3).collect();
    audio_matches_its_reference(&audio_of(3, 2, cu_seqlens_of(&chunk_lens, 0)));
}

#[test]
fn audio_empty_chunks_change_nothing() {
    let plain = audio_of(5, 2, CuSeqlens::new(&[0, 5, 9], 9).unwrap());
    let mut with_empty = plain.clone();
    with_empty.cu_seqlens = CuSeqlens::new(&[0, 0, 5, 5, 9, 9], 9).unwrap();
    assert_eq!(bits(&audio::cpu::backward(&plain).unwrap()), bits(&audio::cpu::backward(&with_empty).unwrap()));
    for offsets in [&[0, 0, 0, 0, 1][..], &[0, 0, 0, 1023, 1024]] {
        let total = *offsets.last().unwrap() as usize;
        audio_matches_its_reference(&audio_of(6, 2, CuSeqlens::new(offsets, total).unwrap()));
    }
}

#[test]
fn audio_without_chunks_or_rows_gives_zeros() {
    for (offsets, total) in [(&[0][..], 0), (&[0, 0], 0), (&[0], 4), (&[0, 0, 0], 3)] {
        let grads = audio::cpu::backward(&audio_of(7, 2, CuSeqlens::new(offsets, total).unwrap())).unwrap();
        assert_eq!(grads.grad_hidden_states.dim(), (total, 128));
        assert!(bits(&grads).iter().flatten().all(|bits| *bits == 0));
    }
}

#[test]
fn audio_gradient_stays_in_the_chunk_it_comes_from() {
    let cu_seqlens = CuSeqlens::new(&[0, 104, 208, 312, 390], 390).unwrap();
    let inputs = audio_of(8, 2, cu_seqlens.clone());
    for chunk in cu_seqlens.chunks() {
        let mut one = inputs.clone();
        one.grad_output.fill(bf16::ZERO);
        one.grad_output.slice_mut(s![chunk.clone(), ..]).assign(&inputs.grad_output.slice(s![chunk.clone(), ..]));
        let grads = audio::cpu::backward(&one).unwrap();
        for (row, values) in grads.grad_hidden_states.outer_iter().enumerate() {
            let zero = values.iter().all(|x| *x == bf16::ZERO);
            assert_eq!(zero, !chunk.contains(&row), "row {row}, chunk {chunk:?}");
        }
    }
}

#[test]
fn audio_gradient_of_one_row_reaches_its_window_and_no_further() {
    let mut inputs = audio_of(9, 2, window_cu_seqlens(104, 208).unwrap());
    inputs.grad_output.slice_mut(s![1.., ..]).fill(bf16::ZERO);
    let grads = audio::cpu::backward(&inputs).unwrap();
    let is_zero = |row: usize| grads.grad_hidden_states.row(row).iter().all(|x| *x == bf16::ZERO);
    assert!(!is_zero(103) && is_zero(104));
}

#[test]
fn audio_is_not_causal() {
    let mut inputs = audio_of(10, 2, CuSeqlens::new(&[0, 2], 2).unwrap());
    inputs.grad_output.row_mut(1).fill(bf16::ZERO);
    // With only the second row's hidden states left, the weight gradient holds only that row's value gradient.
    inputs.hidden_states.row_mut(0).fill(bf16::ZERO);
    let grads = audio::cpu::backward(&inputs).unwrap();
    assert!(grads.grad_v_weight.iter().any(|x| *x != bf16::ZERO));
}

#[test]
fn audio_one_token_chunks_have_no_query_or_key_gradient() {
    let inputs = audio_of(11, 2, cu_seqlens_of(&[1; 7], 0));
    let grads = audio::cpu::backward(&inputs).unwrap();
    for (name, tensor) in grads.tensors() {
        let of_query_or_key = name.starts_with("grad_q_") || name.starts_with("grad_k_");
        let largest = tensor.iter().fold(0.0f32, |a, x| a.max(x.to_f32().abs()));
        assert_eq!(largest < 1e-4, of_query_or_key, "{name}: largest {largest}");
    }
    let d_attn = wide(&inputs.grad_output).dot(&wide(&inputs.out_weight));
    let expected = d_attn.dot(&wide(&inputs.v_weight)).into_dyn();
    let out = [("grad_hidden_states", grads.grad_hidden_states.view().into_dyn())];
    assert_matches(&out, &[("grad_hidden_states", expected.view())], &ROUNDED_ONCE);
}

#[test]
fn audio_bias_sums_do_not_stop_at_256() {
    let mut inputs = audio_of(12, 1, window_cu_seqlens(64, 4096).unwrap());
    inputs.grad_output.fill(bf16::ONE);
    let grads = audio::cpu::backward(&inputs).unwrap();
    assert!(grads.grad_out_bias.iter().all(|x| x.to_f32() == 4096.0));
}

#[test]
fn audio_finite_input_gives_finite_gradients() {
    let one_large_token = |inputs: &mut audio::Inputs| {
        inputs.query_states.slice_mut(s![.., .., 0, ..]).mapv_inplace(|x| x * bf16::from_f32(3.0));
        inputs.key_states.slice_mut(s![.., .., 0, ..]).mapv_inplace(|x| x * bf16::from_f32(3.0));
    };
    for offsets in [&[0, 76, 110, 256][..], &[0, 137, 486], &[0, 64, 124]] {
        let total = *offsets.last().unwrap() as usize;
        let mut inputs = audio_of(13, 2, CuSeqlens::new(offsets, total).unwrap());
        one_large_token(&mut inputs);
        audio_matches_its_reference(&inputs);
    }
}

#[test]
fn audio_long_chunk_is_as_good_as_bf16_allows() {
    for factor in [1.0, 10.0] {
        let mut inputs = audio_of(14, 1, cu_seqlens_of(&[4096], 0));
        inputs.grad_output.row_mut(1000).mapv_inplace(|x| x * bf16::from_f32(factor));
        let grads = audio::cpu::backward(&inputs).unwrap();
        let reference = audio::reference::backward(&inputs).unwrap();
        for comparison in assert_matches(&grads.tensors(), &reference.tensors(), &ROUNDED_ONCE) {
            // Rounding to bf16 alone costs about 2^-9 / sqrt(3) = 1.1e-3 of a tensor's norm.
            assert!(comparison.normwise_error < 2.5e-3 || comparison.name == "grad_k_bias", "{comparison:?}");
        }
    }
}

#[test]
fn audio_check_neither_flakes_nor_misses_a_fault_of_one_percent() {
    let mut checked = 0;
    for seed in 0..200 {
        let amplitude = [0.01, 1.0, 30.0][seed as usize % 3];
        let mut inputs = audio_of(seed, 1, cu_seqlens_of(&[5, 0, 1, 17], 1));
        let factor = bf16::from_f32(amplitude);
        let tokens = [&mut inputs.grad_output, &mut inputs.hidden_states].map(|x| x.view_mut().into_dyn());
        let states = [&mut inputs.query_states, &mut inputs.key_states, &mut inputs.value_states];
        for mut tensor in tokens.into_iter().chain(states.map(|x| x.view_mut().into_dyn())) {
            tensor.mapv_inplace(|x| x * factor);
        }
        let reference = audio::reference::backward(&inputs).unwrap();
        let mut grads = audio::cpu::backward(&inputs).unwrap();
        assert_matches(&grads.tensors(), &reference.tensors(), &LIKE_AUDIO_SUITE);

        // At amplitude 30 most rows are saturated, some so much that f32 has no number as small as the key gradient.
        let norm = |x: &Array2<f64>| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        if norm(&reference.grad_k_weight) < 1e-6 * norm(&reference.grad_v_weight) {
            continue;
        }
        checked += 1;
        let normwise = |grads: &audio::Gradients| {
            let comparisons = compare_all(&grads.tensors(), &reference.tensors(), &LIKE_AUDIO_SUITE).unwrap();
            comparisons.iter().find(|c| c.name == "grad_k_weight").unwrap().normwise_error
        };
        assert!(normwise(&grads) < 4e-3, "seed {seed}: {:e}", normwise(&grads));
        grads.grad_k_weight.mapv_inplace(|x| bf16::from_f32(1.01 * x.to_f32()));
        assert!(normwise(&grads) > 8e-3, "seed {seed}: {:e}", normwise(&grads));
    }
    assert!(checked > 150, "{checked} seeds with a key gradient");
}

#[test]
fn audio_scale_changes_gradients_as_in_the_reference() {
    let mut inputs = audio_of(15, 2, cu_seqlens_of(&[20, 30], 0));
    let before = audio::cpu::backward(&inputs).unwrap();
    inputs.scale = 0.25;
    audio_matches_its_reference(&inputs);
    assert_ne!(before, audio::cpu::backward(&inputs).unwrap());
}

#[test]
fn audio_non_finite_values_are_computed_through() {
    let mut inputs = audio_of(16, 2, cu_seqlens_of(&[4, 6], 0));
    inputs.grad_output[[2, 5]] = bf16::NAN;
    inputs.value_states[[0, 1, 7, 3]] = bf16::INFINITY;
    let (grads, reference) = (audio::cpu::backward(&inputs).unwrap(), audio::reference::backward(&inputs).unwrap());
    let is_nan = |row: usize| grads.grad_hidden_states.row(row).iter().all(|x| x.is_nan());
    assert!(is_nan(0) && is_nan(9) && grads.grad_out_bias[5].is_nan() && grads.grad_out_bias[6].is_finite());
    for ((name, out), (_, reference)) in grads.tensors().iter().zip(reference.tensors()) {
        assert!(out.iter().zip(reference).all(|(out, reference)| out.is_finite() == reference.is_finite()), "{name}");
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let audio = audio_of(17, 3, cu_seqlens_of(&[300, 0, 1, 70], 3));
    let run = || bits(&audio::cpu::backward(&audio).unwrap());
    assert_eq!(pool(1).install(run), pool(3).install(run));
    let shape = cross_shape(2, 150, 130);
    let cross = cross_inputs(18, shape);
    let run = || cross::cpu::backward(&cross).unwrap();
    assert_eq!(pool(1).install(run), pool(3).install(run));
}

#[test]
fn inputs_of_any_memory_order_give_the_same_gradients() {
    let plain = audio_of(26, 2, cu_seqlens_of(&[9, 20], 2));
    let mut other = plain.clone();
    other.grad_output = column_major(&plain.grad_output);
    other.query_states = column_major(&plain.query_states);
    other.key_states = column_major(&plain.key_states);
    other.out_weight = column_major(&plain.out_weight);
    let before = audio::cpu::backward(&plain).unwrap();
    assert_eq!(bits(&before), bits(&audio::cpu::backward(&other).unwrap()));
    assert!(before.tensors().iter().all(|(_, tensor)| tensor.is_standard_layout()));

    let plain = cross_inputs(27, cross_shape(2, 5, 7));
    let mut other = plain.clone();
    other.grad_query_states = column_major(&plain.grad_query_states);
    other.grad_key_states = column_major(&plain.grad_key_states);
    other.decoder_hidden_states = column_major(&plain.decoder_hidden_states);
    other.encoder_hidden_states = column_major(&plain.encoder_hidden_states);
    other.q_weight = column_major(&plain.q_weight);
    let before = cross::cpu::backward(&plain).unwrap();
    assert_eq!(before, cross::cpu::backward(&other).unwrap());
    assert!(before.tensors().iter().all(|(_, tensor)| tensor.is_standard_layout()));
    let close = cross::reference::backward(&other).unwrap();
    assert_matches(&before.tensors(), &close.tensors(), &F32);
}

/// The same values, the first index running fastest in memory.
fn column_major<T: Copy, D: ndarray::Dimension>(x: &ndarray::Array<T, D>) -> ndarray::Array<T, D> {
    x.t().as_standard_layout().into_owned().reversed_axes()
}

/// A pool of its own.
fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

#[test]
fn cross_all_ones_reduce_to_the_number_of_groups() {
    for (num_heads, num_kv_heads) in [(16, 4), (8, 2), (16, 2), (4, 4)] {
        // Encoder hidden states of the unit matrix make the weight gradients the transposed dK and dV.
        let shape = cross::Shape { num_heads, num_kv_heads, ..cross_shape(1, 3, 128) };
        let mut inputs = cross_inputs(19, shape);
        inputs.grad_key_states.fill(1.0);
        inputs.grad_value_states.fill(1.0);
        inputs.encoder_hidden_states = Array2::eye(128).insert_axis(Axis(0));
        let grads = cross::cpu::backward(&inputs).unwrap();
        let groups = (num_heads / num_kv_heads) as f32;
        assert!(grads.grad_k_weight.iter().chain(&grads.grad_v_weight).all(|x| *x == groups));
    }
}

#[test]
fn cross_query_heads_belong_to_consecutive_kv_heads() {
    for (num_heads, num_kv_heads) in [(8, 2), (16, 2), (4, 4)] {
        let shape = cross::Shape { num_heads, num_kv_heads, ..cross_shape(1, 1, 8) };
        let groups = num_heads / num_kv_heads;
        for head in 0..num_heads {
            let mut inputs = cross_inputs(20, shape);
            inputs.grad_key_states.fill(0.0);
            inputs.grad_key_states.slice_mut(s![.., head, .., ..]).fill(1.0);
            let grads = cross::cpu::backward(&inputs).unwrap();
            let used = |kv_head: usize| {
                grads.grad_k_weight.slice(s![kv_head * 64..(kv_head + 1) * 64, ..]).iter().any(|x| *x != 0.0)
            };
            let expected: Vec<bool> = (0..num_kv_heads).map(|kv_head| kv_head == head / groups).collect();
            assert_eq!(
                (0..num_kv_heads).map(used).collect::<Vec<_>>(),
                expected,
                "head {head} of {num_heads}/{num_kv_heads}"
            );
        }
    }
}

#[test]
fn cross_one_decoder_token_gives_a_rank_one_weight_gradient() {
    let inputs = cross_inputs(21, cross_shape(1, 1, 128));
    let grads = cross::cpu::backward(&inputs).unwrap();
    for ((row, column), value) in grads.grad_q_weight.indexed_iter() {
        let expected =
            inputs.grad_query_states[[0, row / 64, 0, row % 64]] * inputs.decoder_hidden_states[[0, 0, column]];
        assert_eq!(*value, expected);
    }
}

#[test]
fn cross_without_tokens_gives_zeros() {
    for (batch_size, seq_len_dec, seq_len_enc) in [(0, 3, 4), (2, 0, 0), (1, 0, 5), (1, 5, 0)] {
        let inputs = cross_inputs(22, cross_shape(batch_size, seq_len_dec, seq_len_enc));
        let grads = cross::cpu::backward(&inputs).unwrap();
        assert_eq!(grads.grad_decoder_hidden_states.dim(), (batch_size, seq_len_dec, 96));
        assert_eq!(grads.grad_q_weight.iter().all(|x| *x == 0.0), batch_size * seq_len_dec == 0);
        assert_eq!(grads.grad_k_weight.iter().all(|x| *x == 0.0), batch_size * seq_len_enc == 0);
    }
}

/// Replaces one tensor by one with an extent less in the last dimension and returns the operation's error.
macro_rules! with_a_column_less {
    ($inputs:expr, $operation:ident, $tensor:ident) => {{
        let mut inputs = $inputs.clone();
        let last = Axis(inputs.$tensor.ndim() - 1);
        inputs.$tensor.slice_axis_inplace(last, (..-1).into());
        let found = inputs.$tensor.shape().to_vec();
        for error in
            [$operation::cpu::backward(&inputs).unwrap_err(), $operation::reference::backward(&inputs).unwrap_err()]
        {
            match error {
                Error::Shape { tensor, expected, found: named } => {
                    assert_eq!((tensor.as_str(), &named), (stringify!($tensor), &found));
                    assert_ne!(expected, found);
                }
                other => panic!("{}: {other}", stringify!($tensor)),
            }
        }
    }};
}

#[test]
fn audio_shape_errors_name_the_tensor_for_each_input() {
    let inputs = audio_of(23, 2, cu_seqlens_of(&[3, 2], 0));
    with_a_column_less!(inputs, audio, grad_output);
    with_a_column_less!(inputs, audio, hidden_states);
    with_a_column_less!(inputs, audio, key_states);
    with_a_column_less!(inputs, audio, value_states);
    with_a_column_less!(inputs, audio, q_weight);
    with_a_column_less!(inputs, audio, k_weight);
    with_a_column_less!(inputs, audio, v_weight);
    with_a_column_less!(inputs, audio, out_weight);
    let mut narrow = inputs.clone();
    narrow.query_states.slice_axis_inplace(Axis(3), (..-1).into());
    assert_eq!(audio::cpu::backward(&narrow).unwrap_err().to_string(), "head_dim = 63 is not supported: 64");
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let error = audio::cpu::backward(&audio::Inputs { scale, ..inputs.clone() }).unwrap_err();
        assert!(matches!(error, Error::Unsupported { argument: "scale", .. }), "{error}");
    }
}

#[test]
fn audio_offsets_made_for_other_rows_are_refused_and_the_next_call_works() {
    let inputs = audio_of(24, 1, cu_seqlens_of(&[3, 6], 0));
    let mut wrong = inputs.clone();
    wrong.cu_seqlens = CuSeqlens::new(&[0, 5, 12], 12).unwrap();
    let error = audio::cpu::backward(&wrong).unwrap_err();
    assert_eq!(error.to_string(), "rows that cu_seqlens was made for: expected shape [9], found [12]");
    audio_matches_its_reference(&inputs);
}

#[test]
fn cross_shape_errors_name_the_tensor_for_each_input() {
    let inputs = cross_inputs(25, cross_shape(2, 3, 4));
    with_a_column_less!(inputs, cross, grad_key_states);
    with_a_column_less!(inputs, cross, grad_value_states);
    with_a_column_less!(inputs, cross, q_weight);
    with_a_column_less!(inputs, cross, k_weight);
    with_a_column_less!(inputs, cross, v_weight);
    let refused = |change: &dyn Fn(&mut cross::Inputs)| {
        let mut inputs = inputs.clone();
        change(&mut inputs);
        cross::cpu::backward(&inputs).unwrap_err().to_string()
    };
    let one_less = |axis: usize| (Axis(axis), ndarray::Slice::from(..-1));
    let (axis, slice) = one_less(1);
    assert_eq!(
        refused(&|inputs| inputs.decoder_hidden_states.slice_axis_inplace(axis, slice)),
        "decoder_hidden_states: expected shape [2, 3, 96], found [2, 2, 96]"
    );
    let (axis, slice) = one_less(0);
    assert_eq!(
        refused(&|inputs| inputs.encoder_hidden_states.slice_axis_inplace(axis, slice)),
        "encoder_hidden_states: expected shape [2, 4, 128], found [1, 4, 128]"
    );
    let (axis, slice) = one_less(3);
    assert_eq!(
        refused(&|inputs| inputs.grad_query_states.slice_axis_inplace(axis, slice)),
        "head_dim = 63 is not supported: 64, 128 or 256"
    );
    assert_eq!(
        refused(&|inputs| inputs.num_kv_heads = 3),
        "num_kv_heads = 3 is not supported: a divisor of num_heads = 4"
    );
}
