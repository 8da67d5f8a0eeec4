//! The conversion of operation B on the simulated GPU, bit for bit as the host emulates it, and all of operation B's launches together.

use attn_backward::compare::{MaxAtol, Tolerance};
use attn_backward::cross::scales::Operands;
use attn_backward::cross::{Inputs, Precision, Shape, reference};
use attn_backward::suite::cross_inputs;
use attn_backward::{Target, random};
use attn_backward_kernels::scale::ZERO_ROW;
use attn_backward_tests::assertions::{assert_emulated_operands, assert_matches};
use attn_backward_tests::simulated::Simulator;
use attn_backward_tests::simulated::audio::TARGET;
use attn_backward_tests::simulated::cross::{backward, convert};
use ndarray::s;
use proptest::prelude::*;
use proptest::sample::select;
use rand::Rng;

const PRECISIONS: [Precision; 2] = [Precision::Fast, Precision::High];
/// Few blocks: each has many rows.
const ONE_SM: Target = Target { num_sms: 1, ..TARGET };

/// Finite, and not all zero.
const ANY: Tolerance = Tolerance { max_atol: MaxAtol::Fixed(0.0), max_rtol: 0.0, required_match_ratio: 0.0 };

const SMALL: Shape = Shape {
    batch_size: 2,
    seq_len_dec: 5,
    seq_len_enc: 3,
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 64,
    hidden_size: 24,
    cross_hidden_size: 8,
};

/// The kernels' conversion of `inputs` is that of the emulation.
#[track_caller]
fn assert_emulated(inputs: &Inputs, target: &Target) {
    for precision in PRECISIONS {
        let Some(mut gpu) = Simulator::new() else { return };
        let (found, expected) =
            (convert(&mut gpu, inputs, precision, target), Operands::new(inputs, precision).unwrap());
        assert_emulated_operands(&found, &expected, true);
    }
}

#[test]
fn conversion_is_the_emulated_one_for_any_heads_and_head_dim() {
    for (num_heads, num_kv_heads) in [(8, 2), (16, 2), (4, 4), (32, 8), (3, 1)] {
        for head_dim in [64, 128, 256] {
            let shape = Shape { num_heads, num_kv_heads, head_dim, ..SMALL };
            let seed = (num_heads * head_dim) as u64;
            assert_emulated(&cross_inputs(seed, shape), if head_dim == 128 { &ONE_SM } else { &TARGET });
        }
    }
}

#[test]
fn conversion_is_the_emulated_one_for_any_width_and_number_of_rows() {
    let wide = Shape { hidden_size: 2056, cross_hidden_size: 4104, num_heads: 1, num_kv_heads: 1, ..SMALL };
    let many = Shape { batch_size: 3, seq_len_dec: 67, seq_len_enc: 41, ..SMALL };
    for shape in [
        wide,
        many,
        Shape { batch_size: 0, ..SMALL },
        Shape { seq_len_dec: 0, ..SMALL },
        Shape { seq_len_enc: 0, ..SMALL },
        Shape { batch_size: 1, seq_len_dec: 1, seq_len_enc: 1, hidden_size: 8, ..SMALL },
    ] {
        assert_emulated(&cross_inputs(1, shape), &ONE_SM);
        assert_emulated(&cross_inputs(2, shape), &TARGET);
    }
}

#[test]
fn infinities_nan_denormals_and_zero_rows_are_converted_as_emulated() {
    let plain = cross_inputs(3, SMALL);
    assert_emulated(&plain.clone(), &TARGET);
    let mut inputs = plain.clone();
    // A row of each kind: zeros; denormals; infinity and NaN among numbers; nothing finite but zero.
    inputs.grad_query_states.slice_mut(s![0, .., 0, ..]).fill(0.0);
    inputs.grad_query_states.slice_mut(s![0, .., 1, ..]).mapv_inplace(|x| x * 2f32.powi(-130));
    inputs.grad_query_states[[0, 1, 2, 3]] = f32::NEG_INFINITY;
    inputs.grad_query_states[[0, 1, 2, 4]] = f32::NAN;
    inputs.grad_query_states.slice_mut(s![0, .., 3, ..]).fill(0.0);
    inputs.grad_query_states[[0, 2, 3, 9]] = f32::INFINITY;
    inputs.grad_query_states.slice_mut(s![0, .., 4, ..]).fill(-0.0);
    inputs.grad_key_states.slice_mut(s![1, .., 0, ..]).fill(f32::from_bits(1));
    inputs.grad_value_states.slice_mut(s![1, .., 0, ..]).fill(0.0);
    // Sums over a group's heads that overflow, and that are NaN.
    inputs.grad_value_states.slice_mut(s![1, 0..2, 1, 7]).fill(f32::MAX);
    inputs.grad_value_states[[1, 2, 1, 8]] = f32::INFINITY;
    inputs.grad_value_states[[1, 3, 1, 8]] = f32::NEG_INFINITY;
    inputs.decoder_hidden_states.slice_mut(s![0, 0, ..]).fill(f32::MAX);
    inputs.decoder_hidden_states.slice_mut(s![1, 1, ..]).fill(0.0);
    inputs.decoder_hidden_states.slice_mut(s![1, 2, ..]).mapv_inplace(|x| x * 2f32.powi(-140));
    inputs.decoder_hidden_states[[1, 3, 5]] = f32::NAN;
    inputs.encoder_hidden_states[[0, 1, 2]] = f32::INFINITY;
    inputs.q_weight[[17, 3]] = f32::NAN;
    inputs.k_weight[[0, 0]] = f32::NEG_INFINITY;
    inputs.v_weight[[0, 0]] = f32::MAX;
    let operands = Operands::new(&inputs, Precision::Fast).unwrap();
    assert_eq!([0, 3, 4].map(|t| operands.row_exponents_dec[t]), [ZERO_ROW; 3]);
    assert_emulated(&inputs, &TARGET);
    assert_emulated(&inputs, &ONE_SM);

    let mut zeros = plain;
    zeros.grad_query_states.fill(0.0);
    zeros.encoder_hidden_states.fill(0.0);
    zeros.q_weight.fill(0.0);
    zeros.k_weight.fill(0.0);
    zeros.v_weight.fill(f32::from_bits(3));
    assert_emulated(&zeros, &TARGET);
    zeros.v_weight.fill(0.0);
    zeros.grad_key_states.fill(0.0);
    zeros.grad_value_states.fill(0.0);
    assert_emulated(&zeros, &ONE_SM);
}

#[test]
fn weights_whose_sample_misses_the_largest_are_converted_again() {
    // More pieces than are sampled, of each weight.
    let shape = Shape { hidden_size: 48, cross_hidden_size: 32, ..SMALL };
    for (weight, exponent) in [(0, 9), (1, 30), (2, -20), (2, 125)] {
        let mut inputs = cross_inputs(5, shape);
        let of = [&mut inputs.q_weight, &mut inputs.k_weight, &mut inputs.v_weight];
        // Of the second piece, which is not sampled.
        of[weight][[0, 5]] = 2f32.powi(exponent);
        assert_emulated(&inputs, &TARGET);
        assert_emulated(&inputs, &ONE_SM);
        let largest = Operands::new(&inputs, Precision::Fast).unwrap().maxima[if weight == 0 { 2 } else { 3 }];
        assert_eq!(largest == Some(exponent), exponent > 0, "{largest:?}");
    }
    // All that is sampled is zero, or not finite.
    for value in [0.0, f32::NAN, f32::INFINITY] {
        let mut inputs = cross_inputs(6, shape);
        for weight in [&mut inputs.q_weight, &mut inputs.k_weight, &mut inputs.v_weight] {
            let rest = weight[[0, 5]];
            weight.fill(value);
            weight[[0, 5]] = rest;
        }
        assert_emulated(&inputs, &TARGET);
    }
}

#[test]
fn gradient_of_ones_is_converted_to_groups() {
    let shape = Shape { num_heads: 32, num_kv_heads: 8, ..SMALL };
    let mut inputs = cross_inputs(4, shape);
    inputs.grad_key_states.fill(1.0);
    inputs.grad_value_states.fill(1.0);
    let Some(mut gpu) = Simulator::new() else { return };
    let operands = convert(&mut gpu, &inputs, Precision::Fast, &TARGET);
    for (row, e) in operands.dkv.hi.outer_iter().zip(&operands.row_exponents_enc) {
        assert!(row.iter().all(|x| x.to_f32() * 2f32.powi(*e) == 4.0));
    }
}

/// Every element times its own power of two, from `-spread` to `spread`, and some of them zero.
fn spread_out(inputs: &mut Inputs, seed: u64, spread: i32) {
    let mut rng = random::stream(seed, 100, 0);
    let mut spread_out = |x: f32| {
        let factor = 2f32.powi(rng.random_range(-spread..=spread));
        if rng.random_range(0..20) == 0 { 0.0 } else { x * factor }
    };
    inputs.grad_query_states.mapv_inplace(&mut spread_out);
    inputs.grad_key_states.mapv_inplace(&mut spread_out);
    inputs.grad_value_states.mapv_inplace(&mut spread_out);
    inputs.decoder_hidden_states.mapv_inplace(&mut spread_out);
    inputs.encoder_hidden_states.mapv_inplace(&mut spread_out);
    inputs.q_weight.mapv_inplace(&mut spread_out);
    inputs.k_weight.mapv_inplace(&mut spread_out);
    inputs.v_weight.mapv_inplace(&mut spread_out);
}

/// All of operation B: TF32's error in `Fast`, nearly fp32's in `High`.
#[track_caller]
fn operation_b_matches_its_reference(inputs: &Inputs, target: &Target) {
    let expected = reference::backward(inputs).unwrap();
    for (precision, limit) in [(Precision::Fast, 5e-4), (Precision::High, 1e-6)] {
        let Some(mut gpu) = Simulator::new() else { return };
        let found = backward(&mut gpu, inputs, precision, target);
        for comparison in assert_matches(&found.tensors(), &expected.tensors(), &ANY) {
            assert!(comparison.normwise_error <= limit, "{precision}: {comparison:?}");
        }
    }
}

/// All of operation B, element by element: the error of a sum is at most this share of the sum of its terms' magnitudes. `2u + u^2` of
/// `cross::scales` with `u = 2^-11` or `2^-22`, a little for what it adds relative to the largest terms, and as much again in `High` for
/// the fp32 sums.
#[track_caller]
fn operation_b_keeps_the_bound_of_every_element(inputs: &Inputs, target: &Target) {
    let expected = reference::backward(inputs).unwrap();
    let mut magnitudes = inputs.clone();
    magnitudes.grad_query_states.mapv_inplace(f32::abs);
    magnitudes.grad_key_states.mapv_inplace(f32::abs);
    magnitudes.grad_value_states.mapv_inplace(f32::abs);
    magnitudes.decoder_hidden_states.mapv_inplace(f32::abs);
    magnitudes.encoder_hidden_states.mapv_inplace(f32::abs);
    magnitudes.q_weight.mapv_inplace(f32::abs);
    magnitudes.k_weight.mapv_inplace(f32::abs);
    magnitudes.v_weight.mapv_inplace(f32::abs);
    let magnitudes = reference::backward(&magnitudes).unwrap();
    for (precision, share) in [(Precision::Fast, 1.01 * 2f64.powi(-10)), (Precision::High, 2f64.powi(-20))] {
        let Some(mut gpu) = Simulator::new() else { return };
        let found = backward(&mut gpu, inputs, precision, target);
        let tensors = found.tensors().into_iter().zip(expected.tensors()).zip(magnitudes.tensors());
        for (((name, found), (_, expected)), (_, magnitudes)) in tensors {
            for ((found, expected), magnitude) in found.iter().zip(expected).zip(magnitudes) {
                let error = (f64::from(*found) - expected).abs();
                assert!(
                    error <= share * magnitude,
                    "{precision}, {name}: {found} for {expected}, magnitude {magnitude}"
                );
            }
        }
    }
}

#[test]
fn operation_b_equals_its_reference_for_gqa_maps_and_head_dims() {
    for (num_heads, num_kv_heads, head_dim) in [(8, 2, 64), (16, 2, 64), (4, 4, 128), (4, 1, 256)] {
        let shape = Shape { num_heads, num_kv_heads, head_dim, seq_len_dec: 37, seq_len_enc: 70, ..SMALL };
        operation_b_matches_its_reference(&cross_inputs(5, shape), &TARGET);
    }
}

#[test]
fn operation_b_is_right_for_any_magnitude() {
    let plain = cross_inputs(6, SMALL);
    // Of gradients, and of hidden states and weights; products lie within fp32.
    for (gradient, other) in [(-90, 60), (90, -60), (-40, -50), (60, 50)] {
        let [gradient, other] = [gradient, other].map(|e| 2f32.powi(e));
        let mut inputs = plain.clone();
        inputs.grad_query_states.mapv_inplace(|x| x * gradient);
        inputs.grad_key_states.mapv_inplace(|x| x * gradient);
        inputs.grad_value_states.mapv_inplace(|x| x * gradient);
        inputs.decoder_hidden_states.mapv_inplace(|x| x * other);
        inputs.encoder_hidden_states.mapv_inplace(|x| x * other);
        inputs.q_weight.mapv_inplace(|x| x * other);
        inputs.k_weight.mapv_inplace(|x| x * other);
        inputs.v_weight.mapv_inplace(|x| x * other);
        operation_b_matches_its_reference(&inputs, &TARGET);
    }
}

#[test]
fn small_integers_are_exact() {
    let mut inputs = cross_inputs(7, Shape { seq_len_dec: 40, seq_len_enc: 33, ..SMALL });
    let mut rng = random::stream(7, 100, 0);
    let mut integer = |_: f32| rng.random_range(-3..=3) as f32;
    inputs.grad_query_states.mapv_inplace(&mut integer);
    inputs.grad_key_states.mapv_inplace(&mut integer);
    inputs.grad_value_states.mapv_inplace(&mut integer);
    inputs.decoder_hidden_states.mapv_inplace(&mut integer);
    inputs.encoder_hidden_states.mapv_inplace(&mut integer);
    inputs.q_weight.mapv_inplace(&mut integer);
    inputs.k_weight.mapv_inplace(&mut integer);
    inputs.v_weight.mapv_inplace(&mut integer);
    let expected = reference::backward(&inputs).unwrap();
    for precision in PRECISIONS {
        let Some(mut gpu) = Simulator::new() else { return };
        let found = backward(&mut gpu, &inputs, precision, &TARGET);
        for ((name, found), (_, expected)) in found.tensors().into_iter().zip(expected.tensors()) {
            assert_eq!(found.mapv(f64::from), expected, "{precision}, {name}");
        }
    }
}

#[test]
fn one_decoder_token_gives_an_outer_product() {
    let inputs = cross_inputs(8, Shape { batch_size: 1, seq_len_dec: 1, seq_len_enc: 128, ..SMALL });
    operation_b_matches_its_reference(&inputs, &TARGET);
    let Some(mut gpu) = Simulator::new() else { return };
    let found = backward(&mut gpu, &inputs, Precision::High, &TARGET).grad_q_weight;
    let x = inputs.decoder_hidden_states.slice(s![0, 0, ..]).to_owned();
    for (i, row) in found.outer_iter().enumerate() {
        let gradient = inputs.grad_query_states[[0, i / 64, 0, i % 64]];
        for (found, x) in row.iter().zip(&x) {
            assert!((found - gradient * x).abs() <= 1e-6 * (gradient * x).abs(), "{found} {gradient} {x}");
        }
    }
}

#[test]
fn non_finite_values_reach_the_gradients_that_depend_on_them_alone() {
    let plain = cross_inputs(9, SMALL);
    let mut inputs = plain.clone();
    inputs.grad_query_states[[1, 2, 3, 4]] = f32::NAN;
    inputs.encoder_hidden_states[[0, 1, 5]] = f32::INFINITY;
    for precision in PRECISIONS {
        let Some(mut gpu) = Simulator::new() else { return };
        let found = backward(&mut gpu, &inputs, precision, &TARGET);
        for ((b, t, _), x) in found.grad_decoder_hidden_states.indexed_iter() {
            assert_eq!(x.is_finite(), (b, t) != (1, 3));
        }
        for ((row, _), x) in found.grad_q_weight.indexed_iter() {
            assert_eq!(x.is_finite(), row != 2 * 64 + 4);
        }
        assert!(found.grad_encoder_hidden_states.iter().all(|x| x.is_finite()));
        for weight in [&found.grad_k_weight, &found.grad_v_weight] {
            assert!(weight.indexed_iter().all(|((_, column), x)| x.is_finite() == (column != 5)));
        }
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let heads = select(vec![(1, 1), (2, 1), (4, 2), (8, 2), (4, 4)]);
    let sizes = (0..=2usize, 0..=20usize, 0..=20usize, 1..=5usize, 1..=5usize);
    (sizes, heads, select(vec![64usize, 128, 256])).prop_map(
        |((batch_size, seq_len_dec, seq_len_enc, hidden, cross), (num_heads, num_kv_heads), head_dim)| Shape {
            batch_size,
            seq_len_dec,
            seq_len_enc,
            num_heads,
            num_kv_heads,
            head_dim,
            hidden_size: 8 * hidden,
            cross_hidden_size: 8 * cross,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, max_shrink_iters: 64, ..ProptestConfig::default() })]

    #[test]
    fn conversion_is_the_emulated_one_for_any_input(
        shape in shapes(), seed in any::<u64>(), spread in select(vec![0, 10, 60]), one_sm in prop::bool::ANY,
    ) {
        let mut inputs = cross_inputs(seed, shape);
        spread_out(&mut inputs, seed, spread);
        assert_emulated(&inputs, if one_sm { &ONE_SM } else { &TARGET });
    }

    #[test]
    fn operation_b_equals_its_reference_for_any_shape(shape in shapes(), seed in any::<u64>()) {
        operation_b_keeps_the_bound_of_every_element(&cross_inputs(seed, shape), &TARGET);
    }
}
