//! The f64 references against central differences of forward passes that are written here as plain loops.
//!
//! The loss is `sum(upstream gradient * forward output)`, so its derivative by any argument of the forward pass is the gradient that
//! the operation returns for it.

use attn_backward::{CuSeqlens, audio, cross, suite};
use attn_backward_tests::assertions::wide;
use ndarray::{Array1, Array2, ArrayD, s};

/// Central differences of `loss` by every `stride`-th element of `arguments[which]`, with the indices of these elements.
fn central_differences(
    arguments: &[ArrayD<f64>],
    which: usize,
    stride: usize,
    loss: impl Fn(&[ArrayD<f64>]) -> f64,
) -> (Vec<usize>, Vec<f64>) {
    const STEP: f64 = 1e-4;
    let indices: Vec<usize> = (0..arguments[which].len()).step_by(stride).collect();
    let differences = indices.iter().map(|&index| {
        let moved = |by: f64| {
            let mut arguments = arguments.to_vec();
            arguments[which].as_slice_mut().expect("row-major")[index] += by;
            loss(&arguments)
        };
        (moved(STEP) - moved(-STEP)) / (2.0 * STEP)
    });
    (indices.clone(), differences.collect())
}

/// `||differences - gradient|| / norm`, over the sampled elements; `norm` is the gradient's own without another.
fn relative_error(gradient: &ArrayD<f64>, (indices, differences): &(Vec<usize>, Vec<f64>), norm: Option<f64>) -> f64 {
    let gradient: Vec<f64> = indices.iter().map(|&index| gradient.as_slice().expect("row-major")[index]).collect();
    let error: f64 = gradient.iter().zip(differences).map(|(g, d)| (g - d).powi(2)).sum();
    error.sqrt() / norm.unwrap_or_else(|| norm_of(&gradient))
}

fn norm_of(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

const D_MODEL: usize = 128;
const NUM_HEADS: usize = 2;
const HEAD_DIM: usize = 64;

/// Loss of operation A's block. `arguments`: hidden_states, then weight and bias of q, k, v, out. `residuals` are what the saved
/// states have beyond the projections, so that the block's queries, keys and values are the saved ones.
fn audio_loss(inputs: &audio::Inputs, residuals: &[Array2<f64>; 3], arguments: &[ArrayD<f64>]) -> f64 {
    let (x, end) = (&arguments[0], inputs.cu_seqlens.padding().start);
    let project = |which: usize, row: usize, column: usize| -> f64 {
        let (weight, bias) = (&arguments[1 + 2 * which], &arguments[2 + 2 * which]);
        let product: f64 = (0..D_MODEL).map(|i| x[[row, i]] * weight[[column, i]]).sum();
        product + bias[[column]] + residuals[which][[row, column]]
    };
    let [q, k, v] =
        [0, 1, 2].map(|which| Array2::from_shape_fn((end, D_MODEL), |(row, column)| project(which, row, column)));
    let mut attended = Array2::<f64>::zeros((end, D_MODEL));
    for chunk in inputs.cu_seqlens.chunks() {
        for head in 0..NUM_HEADS {
            let columns = head * HEAD_DIM..(head + 1) * HEAD_DIM;
            for i in chunk.clone() {
                let logit =
                    |j: usize| f64::from(inputs.scale) * columns.clone().map(|c| q[[i, c]] * k[[j, c]]).sum::<f64>();
                let exps: Vec<f64> = chunk.clone().map(|j| logit(j).exp()).collect();
                let sum: f64 = exps.iter().sum();
                for c in columns.clone() {
                    attended[[i, c]] = chunk.clone().zip(&exps).map(|(j, exp)| exp / sum * v[[j, c]]).sum();
                }
            }
        }
    }
    let (weight, bias) = (&arguments[7], &arguments[8]);
    let mut loss = 0.0;
    for row in 0..end {
        for column in 0..D_MODEL {
            let product: f64 = (0..D_MODEL).map(|i| attended[[row, i]] * weight[[column, i]]).sum();
            loss += f64::from(inputs.grad_output[[row, column]]) * (product + bias[[column]]);
        }
    }
    loss
}

#[test]
fn audio_reference_equals_finite_differences_for_every_gradient() {
    // An empty chunk, one of three tokens, one of one token, and a padding row.
    let cu_seqlens = CuSeqlens::new(&[0, 0, 3, 4], 5).unwrap();
    let shape = audio::Shape { total_seq_len: 5, num_heads: NUM_HEADS, scale: 0.125 };
    let inputs = suite::audio_inputs(17, shape, cu_seqlens);
    let grads = audio::reference::backward(&inputs).unwrap();

    let x = wide(&inputs.hidden_states);
    let weights = [&inputs.q_weight, &inputs.k_weight, &inputs.v_weight, &inputs.out_weight].map(wide);
    let states = [&inputs.query_states, &inputs.key_states, &inputs.value_states].map(wide);
    let residuals = std::array::from_fn(|which| {
        let saved = &states[which];
        let projected = x.dot(&weights[which].t());
        Array2::from_shape_fn((5, D_MODEL), |(t, c)| saved[[0, c / HEAD_DIM, t, c % HEAD_DIM]] - projected[[t, c]])
    });
    let mut arguments = vec![x.into_dyn()];
    for weight in weights {
        arguments.extend([weight.into_dyn(), Array1::zeros(D_MODEL).into_dyn()]);
    }
    // The gradients' order is that of the arguments.
    let q_bias_norm = norm_of(grads.grad_q_bias.as_slice().unwrap());
    for (which, (name, gradient)) in grads.tensors().into_iter().enumerate() {
        let stride = gradient.len().div_ceil(48).next_multiple_of(2) + 1;
        let differences = central_differences(&arguments, which, stride, |a| audio_loss(&inputs, &residuals, a));
        // grad_k_bias is zero in real arithmetic: its error is measured against grad_q_bias.
        let norm = (name == "grad_k_bias").then_some(q_bias_norm);
        let error = relative_error(&gradient.to_owned(), &differences, norm);
        assert!(error < 1e-5, "{name}: relative error {error:e}");
    }
    assert!(grads.grad_hidden_states.slice(s![4.., ..]).iter().all(|x| *x == 0.0));
}

/// Loss of operation B's projections. `arguments`: decoder and encoder hidden states, q, k and v weight.
fn cross_loss(inputs: &cross::Inputs, shape: &cross::Shape, arguments: &[ArrayD<f64>]) -> f64 {
    let [x_dec, x_enc, q_weight, k_weight, v_weight] = arguments else { panic!("five arguments") };
    let project = |x: &ArrayD<f64>, weight: &ArrayD<f64>, b: usize, s: usize, out: usize| -> f64 {
        (0..x.shape()[2]).map(|i| x[[b, s, i]] * weight[[out, i]]).sum()
    };
    let mut loss = 0.0;
    for ((b, h, s, j), &grad) in inputs.grad_query_states.indexed_iter() {
        loss += f64::from(grad) * project(x_dec, q_weight, b, s, h * shape.head_dim + j);
    }
    for (grad, weight) in [(&inputs.grad_key_states, k_weight), (&inputs.grad_value_states, v_weight)] {
        for ((b, h, s, j), &grad) in grad.indexed_iter() {
            loss += f64::from(grad) * project(x_enc, weight, b, s, h / shape.groups() * shape.head_dim + j);
        }
    }
    loss
}

#[test]
fn cross_reference_equals_finite_differences_for_every_gradient() {
    let shape = cross::Shape {
        batch_size: 2,
        seq_len_dec: 3,
        seq_len_enc: 4,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        hidden_size: 8,
        cross_hidden_size: 16,
    };
    let inputs = suite::cross_inputs(23, shape);
    let grads = cross::reference::backward(&inputs).unwrap();
    let arguments = [
        wide(&inputs.decoder_hidden_states).into_dyn(),
        wide(&inputs.encoder_hidden_states).into_dyn(),
        wide(&inputs.q_weight).into_dyn(),
        wide(&inputs.k_weight).into_dyn(),
        wide(&inputs.v_weight).into_dyn(),
    ];
    for (which, (name, gradient)) in grads.tensors().into_iter().enumerate() {
        let stride = gradient.len().div_ceil(64) | 1;
        let differences = central_differences(&arguments, which, stride, |a| cross_loss(&inputs, &shape, a));
        let error = relative_error(&gradient.to_owned(), &differences, None);
        assert!(error < 1e-5, "{name}: relative error {error:e}");
    }
}
