//! The f64 references against formulas worked by hand, element by element, on inputs small enough to follow.

use attn_backward::suite::{audio_inputs, cross_inputs};
use attn_backward::{CuSeqlens, audio, cross};
use attn_backward_tests::assertions::{F64, assert_matches, wide};
use attn_backward_tests::strategies;
use ndarray::{Array2, s};
use proptest::prelude::*;

/// dQ, dK, dV and O of one head and chunk, from the formulas with an index for every letter.
fn attention_by_index(
    inputs: &audio::Inputs,
    da: &Array2<f64>,
    head: usize,
    rows: std::ops::Range<usize>,
) -> [Array2<f64>; 4] {
    let scale = f64::from(inputs.scale);
    let at = |states: &ndarray::Array4<half::bf16>, row: usize, j: usize| f64::from(states[[0, head, row, j]]);
    let dot = |a: &dyn Fn(usize) -> f64, b: &dyn Fn(usize) -> f64| (0..64).map(|j| a(j) * b(j)).sum::<f64>();
    let (start, len) = (rows.start, rows.len());
    let da = |i: usize, j: usize| da[[start + i, 64 * head + j]];
    let q = |i: usize, j: usize| at(&inputs.query_states, start + i, j);
    let k = |i: usize, j: usize| at(&inputs.key_states, start + i, j);
    let v = |i: usize, j: usize| at(&inputs.value_states, start + i, j);
    let exp = Array2::from_shape_fn((len, len), |(m, n)| (scale * dot(&|j| q(m, j), &|j| k(n, j))).exp());
    let p = Array2::from_shape_fn((len, len), |(m, n)| exp[[m, n]] / exp.row(m).sum());
    let dp = Array2::from_shape_fn((len, len), |(m, n)| dot(&|j| da(m, j), &|j| v(n, j)));
    let delta = |m: usize| (0..len).map(|n| p[[m, n]] * dp[[m, n]]).sum::<f64>();
    let ds = Array2::from_shape_fn((len, len), |(m, n)| p[[m, n]] * (dp[[m, n]] - delta(m)));
    let collect = |element: &dyn Fn(usize, usize, usize) -> f64| {
        Array2::from_shape_fn((len, 64), |(i, j)| (0..len).map(|n| element(i, j, n)).sum::<f64>())
    };
    [
        collect(&|m, j, n| scale * ds[[m, n]] * k(n, j)),
        collect(&|n, j, m| scale * ds[[m, n]] * q(m, j)),
        collect(&|n, j, m| p[[m, n]] * da(m, j)),
        collect(&|m, j, n| p[[m, n]] * v(n, j)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn audio_equals_the_formulas_element_by_element(inputs in strategies::audio(12)) {
        let d_model = inputs.q_weight.nrows();
        let end = inputs.cu_seqlens.padding().start;
        let total = inputs.cu_seqlens.total_seq_len();
        let grad_output = wide(&inputs.grad_output).slice(s![..end, ..]).to_owned();
        let x = wide(&inputs.hidden_states).slice(s![..end, ..]).to_owned();
        let da = grad_output.dot(&wide(&inputs.out_weight));
        let [mut dq, mut dk, mut dv, mut o] = std::array::from_fn(|_| Array2::<f64>::zeros((end, d_model)));
        for chunk in inputs.cu_seqlens.chunks() {
            for head in 0..d_model / 64 {
                let parts = attention_by_index(&inputs, &da, head, chunk.clone());
                for (all, part) in [&mut dq, &mut dk, &mut dv, &mut o].into_iter().zip(parts) {
                    all.slice_mut(s![chunk.clone(), head * 64..(head + 1) * 64]).assign(&part);
                }
            }
        }
        let sums = |x: &Array2<f64>| x.sum_axis(ndarray::Axis(0));
        let mut hidden = Array2::zeros((total, d_model));
        let dx = dq.dot(&wide(&inputs.q_weight)) + dk.dot(&wide(&inputs.k_weight)) + dv.dot(&wide(&inputs.v_weight));
        hidden.slice_mut(s![..end, ..]).assign(&dx);
        let expected = audio::Gradients {
            grad_hidden_states: hidden,
            grad_q_weight: dq.t().dot(&x),
            grad_q_bias: sums(&dq),
            grad_k_weight: dk.t().dot(&x),
            grad_k_bias: sums(&dk),
            grad_v_weight: dv.t().dot(&x),
            grad_v_bias: sums(&dv),
            grad_out_weight: grad_output.t().dot(&o),
            grad_out_bias: sums(&grad_output),
        };
        let reference = audio::reference::backward(&inputs).unwrap();
        assert_matches(&reference.tensors(), &expected.tensors(), &F64);
    }

    #[test]
    fn cross_equals_the_formulas_element_by_element(shape in strategies::cross_shape(), seed in any::<u64>()) {
        let inputs = cross_inputs(seed, shape);
        let reference = cross::reference::backward(&inputs).unwrap();
        let at = |x: f32| f64::from(x);
        // One column of every output is enough: columns do not mix.
        let column = seed as usize % shape.hidden_size.min(shape.cross_hidden_size);
        let close = |out: f64, expected: f64| (out - expected).abs() <= 1e-12 * (1.0 + expected.abs());
        for b in 0..shape.batch_size {
            for s in 0..shape.seq_len_dec {
                let expected: f64 = (0..shape.q_out_dim())
                    .map(|o| at(inputs.grad_query_states[[b, o / shape.head_dim, s, o % shape.head_dim]]) * at(inputs.q_weight[[o, column]]))
                    .sum();
                prop_assert!(close(reference.grad_decoder_hidden_states[[b, s, column]], expected));
            }
            for s in 0..shape.seq_len_enc {
                // Over query heads: each meets the weight of its kv head.
                let expected: f64 = (0..shape.q_out_dim())
                    .map(|o| {
                        let (h, j) = (o / shape.head_dim, o % shape.head_dim);
                        let row = h / shape.groups() * shape.head_dim + j;
                        at(inputs.grad_key_states[[b, h, s, j]]) * at(inputs.k_weight[[row, column]])
                            + at(inputs.grad_value_states[[b, h, s, j]]) * at(inputs.v_weight[[row, column]])
                    })
                    .sum();
                prop_assert!(close(reference.grad_encoder_hidden_states[[b, s, column]], expected));
            }
        }
        for row in (0..shape.kv_out_dim()).step_by(7) {
            let (kv_head, j) = (row / shape.head_dim, row % shape.head_dim);
            let mut expected = [0.0; 2];
            for (expected, grad) in expected.iter_mut().zip([&inputs.grad_key_states, &inputs.grad_value_states]) {
                for ((b, h, s, jj), x) in grad.indexed_iter() {
                    if h / shape.groups() == kv_head && jj == j {
                        *expected += at(*x) * at(inputs.encoder_hidden_states[[b, s, column]]);
                    }
                }
            }
            prop_assert!(close(reference.grad_k_weight[[row, column]], expected[0]));
            prop_assert!(close(reference.grad_v_weight[[row, column]], expected[1]));
        }
    }
}

#[test]
fn audio_key_bias_gradient_vanishes() {
    // Softmax ignores a shift shared by all keys.
    let cu_seqlens = CuSeqlens::new(&[0, 60, 61, 700], 700).unwrap();
    let shape = audio::Shape { total_seq_len: 700, num_heads: 2, scale: 0.125 };
    let grads = audio::reference::backward(&audio_inputs(3, shape, cu_seqlens)).unwrap();
    let largest = |x: &ndarray::Array1<f64>| x.iter().fold(0.0f64, |a, x| a.max(x.abs()));
    assert!(largest(&grads.grad_k_bias) < 1e-12 * largest(&grads.grad_q_bias));
}
