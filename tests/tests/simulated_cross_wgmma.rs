//! Operation B in one launch, `cross_wgmma_fast`, on the simulated GPU: what converts and multiplies at the model's sizes, the only ones that it takes.

use attn_backward::Target;
use attn_backward::compare::{MaxAtol, Tolerance, compare_all};
use attn_backward::cross::scales::Operands;
use attn_backward::cross::{Gradients, Inputs, Precision, Shape, reference};
use attn_backward::gpu::ModuleKind;
use attn_backward_tests::assertions::assert_emulated_operands;
use attn_backward_tests::examples::cross_of;
use attn_backward_tests::simulated::Simulator;
use attn_backward_tests::simulated::hopper_cross::{self, Pace};
use ndarray::{Array3, Axis, s};

/// Any element: these tests judge by the norm.
const ANY: Tolerance = Tolerance { max_atol: MaxAtol::Fixed(f64::INFINITY), max_rtol: 0.0, required_match_ratio: 0.0 };

/// The fewest SMs of which some, the two of a cluster, go on converting beside the products of the others. They want 32 decoder tokens.
const NUM_SMS: usize = 4;

/// The model's sizes. A stage holds two decoder tokens, or one encoder token.
fn shape(batch_size: usize, seq_len_dec: usize, seq_len_enc: usize) -> Shape {
    Shape {
        batch_size,
        seq_len_dec,
        seq_len_enc,
        num_heads: 16,
        num_kv_heads: 4,
        head_dim: 256,
        hidden_size: 1536,
        cross_hidden_size: 1024,
    }
}

/// The gradients, by a launch whose operands are those of the host's emulation; `None` without PTX. Blocks 0 and 1
/// convert beside the others' products.
#[track_caller]
fn run(inputs: &Inputs, pace: Pace) -> Option<Gradients> {
    let mut gpu = Simulator::hopper(NUM_SMS as u32)?;
    let target = Target { num_sms: NUM_SMS, ..Target::h200(ModuleKind::Hopper) };
    let (gradients, operands) = hopper_cross::backward(&mut gpu, inputs, &target, pace);
    assert_emulated_operands(&operands, &Operands::new(inputs, Precision::Fast).unwrap(), false);
    Some(gradients)
}

/// Normwise error that the mode promises.
const PROMISED: f64 = 1.1 * 3.2e-4;

/// The normwise error of each gradient is what the mode promises; of each token's gradients by themselves, too.
#[track_caller]
fn assert_promised(inputs: &Inputs, pace: Pace) {
    let Some(gradients) = run(inputs, pace) else { return };
    let expected = reference::backward(inputs).unwrap();
    for comparison in compare_all(&gradients.tensors(), &expected.tensors(), &ANY).unwrap() {
        assert!(comparison.non_finite == 0 && comparison.normwise_error <= PROMISED, "{comparison:#?}");
    }
    assert_each_token(&gradients.grad_decoder_hidden_states, &expected.grad_decoder_hidden_states, PROMISED);
    assert_each_token(&gradients.grad_encoder_hidden_states, &expected.grad_encoder_hidden_states, PROMISED);
}

/// The normwise error of each token's row is at most `limit`.
#[track_caller]
fn assert_each_token(found: &Array3<f32>, expected: &Array3<f64>, limit: f64) {
    let rows = found.lanes(Axis(2)).into_iter().zip(expected.lanes(Axis(2)));
    for (token, (found, expected)) in rows.enumerate() {
        let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
        let error = found.iter().zip(expected).map(|(x, y)| (f64::from(*x) - y).powi(2)).sum::<f64>().sqrt();
        assert!(error <= limit * norm, "token {token}: error {error}, norm {norm}");
    }
}

/// The last rows of each weight times `2^exponent`: what they are scaled by depends on what is found last.
fn scale_last_weights(inputs: &mut Inputs, exponent: i32) {
    for weight in [&mut inputs.q_weight, &mut inputs.k_weight, &mut inputs.v_weight] {
        weight.slice_mut(s![-3.., ..]).mapv_inplace(|x| x * 2f32.powi(exponent));
    }
}

/// Gradients of token `token` of every sequence times `2^exponent`.
fn scale_token(inputs: &mut Inputs, token: usize, exponent: i32) {
    for gradient in [&mut inputs.grad_query_states, &mut inputs.grad_key_states, &mut inputs.grad_value_states] {
        gradient.index_axis_mut(Axis(2), token).mapv_inplace(|x| x * 2f32.powi(exponent));
    }
}

#[test]
fn fast_has_the_promised_error() {
    // The sample of k_weight and v_weight misses their largest element: they are converted again, q_weight is not.
    let mut inputs = cross_of(1, shape(1, 33, 23));
    inputs.v_weight[[0, 5]] = 1000.0;
    assert_eq!(Operands::new(&inputs, Precision::Fast).unwrap().exponents[3], 9 - 14);
    assert_promised(&inputs, Pace::default());
}

#[test]
fn fast_has_the_promised_error_for_rows_of_very_different_sizes_in_two_row_blocks() {
    // Stages and items end early at the sequences' odd ends; the second row block is converted beside the products.
    let mut inputs = cross_of(2, shape(2, 67, 11));
    scale_token(&mut inputs, 4, 40);
    scale_token(&mut inputs, 10, -20);
    assert_promised(&inputs, Pace { ahead: Some(3), ..Pace::default() });
}

#[test]
fn a_warp_that_is_late_finds_the_stages_that_it_waits_for() {
    // The last warp of the second consumer warpgroup, which reads every second encoder token: a stage each.
    assert_promised(&cross_of(3, shape(1, 32, 40)), Pace { late_warp: Some(11), ..Pace::default() });
}

#[test]
fn a_block_that_is_behind_its_cluster_gets_what_is_its_own() {
    // Three row blocks of decoder tokens: tiles one below the other, which share B, and two side by side, which do not.
    for late_rank in [Some(0), Some(1)] {
        assert_promised(&cross_of(4, shape(1, 300, 16)), Pace { late_rank, ..Pace::default() });
    }
}

#[test]
fn infinities_and_nan_reach_exactly_what_depends_on_them() {
    // Sequences end where stages do.
    let mut inputs = cross_of(4, shape(2, 16, 12));
    scale_last_weights(&mut inputs, 7);
    inputs.grad_query_states[[0, 2, 15, 5]] = f32::INFINITY;
    inputs.grad_value_states[[1, 15, 11, 255]] = f32::NAN;
    inputs.decoder_hidden_states[[1, 0, 1535]] = f32::NEG_INFINITY;
    inputs.encoder_hidden_states[[0, 0, 17]] = f32::NAN;
    let Some(gradients) = run(&inputs, Pace { ahead: Some(0), ..Pace::default() }) else { return };
    let expected = reference::backward(&inputs).unwrap();
    for ((name, found), (_, expected)) in gradients.tensors().iter().zip(expected.tensors()) {
        assert_eq!(found.mapv(f32::is_finite), expected.mapv(f64::is_finite), "{name}");
    }
}
