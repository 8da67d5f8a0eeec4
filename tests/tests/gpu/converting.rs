//! Operation B at the model's sizes with enough tokens for the launch that converts and multiplies (`cross_wgmma_fast`).
use attn_backward::compare::{MaxAtol, Tolerance, compare_all};
use attn_backward::cross::{self, Precision};
use attn_backward::gpu::{ModuleKind, Stream};
use attn_backward_tests::device::{TestGpu, on_gpu};
use attn_backward_tests::examples::cross_of;
use ndarray::Axis;

use crate::guarded::{cross_backward, cross_tensors};

/// Any element: these tests judge by the norm.
const ANY: Tolerance = Tolerance { max_atol: MaxAtol::Fixed(f64::INFINITY), max_rtol: 0.0, required_match_ratio: 0.0 };

/// The model's sizes. Odd lengths end stages, row blocks and items early; together there are more decoder tokens than the plan asks for.
pub fn shape() -> cross::Shape {
    cross::Shape {
        batch_size: 2,
        seq_len_dec: 531,
        seq_len_enc: 611,
        num_heads: 16,
        num_kv_heads: 4,
        head_dim: 256,
        hidden_size: 1536,
        cross_hidden_size: 1024,
    }
}

/// Where the GPU has such a launch.
fn on_a_converting_gpu(body: impl Fn(&TestGpu)) {
    on_gpu(|gpu| {
        if gpu.modules.contains(&ModuleKind::Hopper) {
            let plan = cross::Plan::new(&shape(), Precision::Fast, &gpu.target(ModuleKind::Hopper)).unwrap();
            assert!(plan.gemm().converts(), "{plan}");
            body(gpu);
        }
    });
}

/// The normwise error of each gradient is what the mode promises.
#[track_caller]
fn assert_promised(gpu: &TestGpu, inputs: &cross::Inputs) {
    let promised = 1.1 * 3.2e-4;
    let reference = cross::reference::backward(inputs).unwrap();
    let gradients = cross_backward(&gpu.gpu, ModuleKind::Hopper, inputs, Precision::Fast);
    for comparison in compare_all(&gradients.tensors(), &reference.tensors(), &ANY).unwrap() {
        assert!(comparison.non_finite == 0 && comparison.normwise_error <= promised, "{comparison:#?}");
    }
}

#[test]
fn converting_launch_has_the_promised_error() {
    on_a_converting_gpu(|gpu| assert_promised(gpu, &cross_of(31, shape())));
}

#[test]
fn converting_launch_has_the_promised_error_for_rows_of_very_different_sizes() {
    on_a_converting_gpu(|gpu| {
        let mut inputs = cross_of(32, shape());
        for gradient in [&mut inputs.grad_query_states, &mut inputs.grad_key_states, &mut inputs.grad_value_states] {
            for (token, mut rows) in gradient.axis_iter_mut(Axis(2)).enumerate() {
                // Every 41st token is padding.
                let size = if token % 41 == 40 { 0.0 } else { 2f32.powi(token as i32 % 41 - 20) };
                rows.mapv_inplace(|x| x * size);
            }
        }
        assert_promised(gpu, &inputs);
    });
}

#[test]
fn converting_launch_has_the_promised_error_far_from_one() {
    on_a_converting_gpu(|gpu| {
        let mut inputs = cross_of(33, shape());
        for gradient in [&mut inputs.grad_query_states, &mut inputs.grad_key_states, &mut inputs.grad_value_states] {
            gradient.mapv_inplace(|x| (f64::from(x) * 2f64.powi(-100)) as f32);
        }
        for hidden in [&mut inputs.decoder_hidden_states, &mut inputs.encoder_hidden_states] {
            hidden.mapv_inplace(|x| x * 2f32.powi(60));
        }
        for weight in [&mut inputs.q_weight, &mut inputs.k_weight, &mut inputs.v_weight] {
            weight.mapv_inplace(|x| x * 2f32.powi(90));
        }
        assert_promised(gpu, &inputs);
    });
}

#[test]
fn converting_launch_passes_infinities_and_nan_to_exactly_what_depends_on_them() {
    on_a_converting_gpu(|gpu| {
        let mut inputs = cross_of(34, shape());
        inputs.grad_query_states[[1, 2, 518, 5]] = f32::INFINITY;
        inputs.grad_value_states[[0, 15, 610, 255]] = f32::NAN;
        inputs.decoder_hidden_states[[0, 130, 1535]] = f32::NEG_INFINITY;
        inputs.encoder_hidden_states[[1, 0, 17]] = f32::NAN;
        let reference = cross::reference::backward(&inputs).unwrap();
        let gradients = cross_backward(&gpu.gpu, ModuleKind::Hopper, &inputs, Precision::Fast);
        for ((name, found), (_, expected)) in gradients.tensors().iter().zip(reference.tensors()) {
            assert_eq!(found.mapv(f32::is_finite), expected.mapv(f64::is_finite), "{name}");
        }
    });
}

#[test]
fn converting_launch_gives_the_same_bits_each_time() {
    on_a_converting_gpu(|gpu| {
        let plan = cross::Plan::new(&shape(), Precision::Fast, &gpu.target(ModuleKind::Hopper)).unwrap();
        let operation = cross::Backward::new(&gpu.gpu, plan).unwrap();
        let outputs = cross_tensors::Outputs::new(&gpu.gpu, &shape(), operation.plan().workspace().bytes());
        let tensors = cross_tensors::Inputs::upload(&gpu.gpu, &cross_of(35, shape()));
        let stream = Stream::new(&gpu.gpu).unwrap();
        let bits = || {
            operation.run(&stream, &tensors.views(), &mut outputs.views(), &mut outputs.workspace()).unwrap();
            stream.synchronize().unwrap();
            cross_tensors::bits(&outputs.gradients())
        };
        let first = bits();
        for run in 1..20 {
            assert!(bits() == first, "run {run} differs");
        }
    });
}
