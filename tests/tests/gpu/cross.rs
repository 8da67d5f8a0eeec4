//! Operation B: the GQA map, precision modes, magnitudes, and properties that need no reference.

use attn_backward::compare::{Comparison, MaxAtol, Tolerance, compare_all};
use attn_backward::cross::{self, Precision};
use attn_backward::gpu::ModuleKind;
use attn_backward_tests::assertions::norm;
use attn_backward_tests::device::{TestGpu, on_each_module, on_gpu};
use attn_backward_tests::examples::{cross_of, cross_shape};
use ndarray::{Array2, ArrayD, Axis, s};

use crate::guarded::cross_backward;

const PRECISIONS: [Precision; 2] = [Precision::Fast, Precision::High];

/// Any element: these tests judge by the norm.
const ANY: Tolerance = Tolerance { max_atol: MaxAtol::Fixed(f64::INFINITY), max_rtol: 0.0, required_match_ratio: 0.0 };

/// The normwise error that each mode promises for normal operands: 1.1 times that of TF32 operands, and near fp32.
fn promised(precision: Precision) -> f64 {
    match precision {
        Precision::Fast => 1.1 * 3.2e-4,
        Precision::High => 3e-6,
    }
}

#[track_caller]
fn comparisons(gradients: &cross::Gradients, reference: &cross::Gradients<f64>) -> Vec<Comparison> {
    compare_all(&gradients.tensors(), &reference.tensors(), &ANY).unwrap()
}

/// On every module and in every mode: the gradients have the promised error.
#[track_caller]
fn assert_promised(gpu: &TestGpu, inputs: &cross::Inputs) {
    let reference = cross::reference::backward(inputs).unwrap();
    for &module in &gpu.modules {
        for precision in PRECISIONS {
            let gradients = cross_backward(&gpu.gpu, module, inputs, precision);
            for comparison in comparisons(&gradients, &reference) {
                assert!(
                    comparison.non_finite == 0 && comparison.normwise_error <= promised(precision),
                    "{module}, {precision}, {:?}: {comparison:#?}",
                    inputs.shape()
                );
            }
        }
    }
}

/// All gradients of the call, in both modes of every module.
fn each_mode(gpu: &TestGpu, mut body: impl FnMut(&str, Precision, &dyn Fn(&cross::Inputs) -> cross::Gradients)) {
    for &module in &gpu.modules {
        for precision in PRECISIONS {
            let run = |inputs: &cross::Inputs| cross_backward(&gpu.gpu, module, inputs, precision);
            body(&format!("{module}, {precision}"), precision, &run);
        }
    }
}

#[test]
fn all_head_counts_and_head_dims_have_the_promised_error() {
    on_gpu(|gpu| {
        for (num_heads, num_kv_heads) in [(16, 4), (8, 2), (16, 2), (4, 4), (32, 8), (3, 1)] {
            for head_dim in [64, 128, 256] {
                let shape = cross::Shape { num_heads, num_kv_heads, head_dim, ..cross_shape(2, 33, 70) };
                assert_promised(gpu, &cross_of(1, shape));
            }
        }
    });
}

#[test]
fn odd_sizes_have_the_promised_error() {
    on_gpu(|gpu| {
        for (batch_size, seq_len_dec, seq_len_enc) in [(1, 1, 1), (3, 129, 7), (1, 300, 513), (5, 1, 64), (2, 255, 256)]
        {
            for (hidden_size, cross_hidden_size) in [(8, 8), (1536, 1024), (136, 248)] {
                let shape = cross::Shape {
                    hidden_size,
                    cross_hidden_size,
                    ..cross_shape(batch_size, seq_len_dec, seq_len_enc)
                };
                assert_promised(gpu, &cross_of(2, shape));
            }
        }
    });
}

#[test]
fn products_cut_along_k_have_the_promised_error() {
    on_gpu(|gpu| {
        // Deep products of few tiles: owners and reduce items, in both layouts of A and both promoted tile widths.
        let heads = cross::Shape { num_heads: 16, num_kv_heads: 4, head_dim: 256, ..cross_shape(1, 140, 900) };
        let shape = cross::Shape { hidden_size: 192, cross_hidden_size: 320, ..heads };
        assert_promised(gpu, &cross_of(3, shape));
    });
}

#[test]
fn all_ones_reduce_to_the_number_of_groups() {
    on_gpu(|gpu| {
        for (num_heads, num_kv_heads) in [(16, 4), (8, 2), (16, 2), (4, 4), (32, 8)] {
            // Encoder hidden states of the unit matrix make the weight gradients the transposed dK and dV.
            let shape = cross::Shape { num_heads, num_kv_heads, ..cross_shape(1, 3, 128) };
            let mut inputs = cross_of(19, shape);
            inputs.grad_key_states.fill(1.0);
            inputs.grad_value_states.fill(1.0);
            inputs.encoder_hidden_states = Array2::eye(128).insert_axis(Axis(0));
            let groups = (num_heads / num_kv_heads) as f32;
            each_mode(gpu, |mode, _, run| {
                let gradients = run(&inputs);
                assert!(gradients.grad_k_weight.iter().chain(&gradients.grad_v_weight).all(|x| *x == groups), "{mode}");
            });
        }
    });
}

#[test]
fn query_heads_belong_to_consecutive_kv_heads() {
    on_gpu(|gpu| {
        for (num_heads, num_kv_heads) in [(8, 2), (16, 2), (4, 4)] {
            let shape = cross::Shape { num_heads, num_kv_heads, ..cross_shape(1, 1, 8) };
            for head in 0..num_heads {
                let mut inputs = cross_of(20, shape);
                inputs.grad_key_states.fill(0.0);
                inputs.grad_key_states.slice_mut(s![.., head, .., ..]).fill(1.0);
                each_mode(gpu, |mode, _, run| {
                    let gradients = run(&inputs);
                    for kv_head in 0..num_kv_heads {
                        let rows = gradients.grad_k_weight.slice(s![kv_head * 64..(kv_head + 1) * 64, ..]);
                        let (used, expected) =
                            (rows.iter().any(|x| *x != 0.0), kv_head == head * num_kv_heads / num_heads);
                        assert_eq!(
                            used, expected,
                            "{mode}: head {head} of {num_heads}, kv head {kv_head} of {num_kv_heads}"
                        );
                    }
                });
            }
        }
    });
}

#[test]
fn one_decoder_token_gives_a_rank_one_weight_gradient() {
    on_gpu(|gpu| {
        let inputs = cross_of(21, cross_shape(1, 1, 128));
        let column = inputs.grad_query_states.to_shape((256, 1)).unwrap().mapv(f64::from);
        let row = inputs.decoder_hidden_states.to_shape((1, 96)).unwrap().mapv(f64::from);
        let expected = column.dot(&row);
        each_mode(gpu, |mode, precision, run| {
            let found = run(&inputs).grad_q_weight.mapv(f64::from);
            assert!(norm(&expected - &found) <= promised(precision) * norm(expected.iter().copied()), "{mode}");
            // A product of two rounded numbers still has rank one: 2x2 minors vanish but for the last bits of four fp32 sums of three.
            for (i, j) in [(0, 0), (7, 50), (254, 93)] {
                let minor = found[[i, j]] * found[[i + 1, j + 1]] - found[[i, j + 1]] * found[[i + 1, j]];
                assert!(minor.abs() <= 4e-6 * (found[[i, j]] * found[[i + 1, j + 1]]).abs(), "{mode}");
            }
        });
    });
}

#[test]
fn without_tokens_all_gradients_are_zero() {
    on_gpu(|gpu| {
        for (batch_size, seq_len_dec, seq_len_enc) in [(0, 3, 4), (2, 0, 0), (1, 0, 5), (1, 5, 0)] {
            let inputs = cross_of(22, cross_shape(batch_size, seq_len_dec, seq_len_enc));
            each_mode(gpu, |mode, _, run| {
                let gradients = run(&inputs);
                assert_eq!(gradients.grad_decoder_hidden_states.dim(), (batch_size, seq_len_dec, 96));
                let zero = |x: &Array2<f32>| x.iter().all(|x| *x == 0.0);
                assert_eq!(zero(&gradients.grad_q_weight), batch_size * seq_len_dec == 0, "{mode}");
                assert_eq!(zero(&gradients.grad_k_weight), batch_size * seq_len_enc == 0, "{mode}");
                assert_eq!(zero(&gradients.grad_v_weight), batch_size * seq_len_enc == 0, "{mode}");
            });
        }
    });
}

#[test]
fn modes_differ_as_documented() {
    on_each_module(|gpu, module| {
        let inputs = cross_of(23, cross_shape(2, 64, 128));
        let reference = cross::reference::backward(&inputs).unwrap();
        let errors = |precision| {
            let gradients = cross_backward(&gpu.gpu, module, &inputs, precision);
            comparisons(&gradients, &reference).into_iter().map(|c| c.normwise_error).collect::<Vec<_>>()
        };
        for (fast, high) in errors(Precision::Fast).into_iter().zip(errors(Precision::High)) {
            assert!(fast > 1e-4 && high < fast / 50.0, "fast {fast:e}, high {high:e}");
        }
    });
}

/// Inputs whose every element is an integer times a half, by tensor and flat position.
fn halves(shape: cross::Shape, mut element: impl FnMut(bool) -> f32) -> cross::Inputs {
    let mut inputs = cross_of(0, shape);
    for gradient in [&mut inputs.grad_query_states, &mut inputs.grad_key_states, &mut inputs.grad_value_states] {
        gradient.mapv_inplace(|_| element(true));
    }
    for hidden in [&mut inputs.decoder_hidden_states, &mut inputs.encoder_hidden_states] {
        hidden.mapv_inplace(|_| element(false));
    }
    for weight in [&mut inputs.q_weight, &mut inputs.k_weight, &mut inputs.v_weight] {
        weight.mapv_inplace(|_| element(false));
    }
    inputs
}

#[track_caller]
fn assert_exact(gradients: &cross::Gradients, reference: &cross::Gradients<f64>, mode: &str) {
    for ((name, found), (_, reference)) in gradients.tensors().iter().zip(reference.tensors()) {
        assert_eq!(found.mapv(f64::from), reference, "{mode}, {name}");
    }
}

#[test]
fn small_integers_are_exact_in_both_modes() {
    on_gpu(|gpu| {
        let mut next = 0;
        let inputs = halves(cross_shape(2, 130, 70), |_| {
            next += 1;
            (next % 7) as f32 - 3.0
        });
        let reference = cross::reference::backward(&inputs).unwrap();
        each_mode(gpu, |mode, _, run| assert_exact(&run(&inputs), &reference, mode));
    });
}

#[test]
fn high_is_exact_for_13_bit_gradients_and_small_integers() {
    on_each_module(|gpu, module| {
        let mut next = 0;
        let shape = cross::Shape { num_kv_heads: 1, hidden_size: 16, cross_hidden_size: 24, ..cross_shape(2, 3, 5) };
        let inputs = halves(shape, |of_gradient| {
            next += 1;
            if of_gradient { [1024.5, 4097.0, -3.0, 0.0, 7.0, -2049.0][next % 6] } else { (next % 23) as f32 - 11.0 }
        });
        let reference = cross::reference::backward(&inputs).unwrap();
        assert_exact(&cross_backward(&gpu.gpu, module, &inputs, Precision::High), &reference, "high");
    });
}

#[test]
fn any_magnitude_has_the_promised_error() {
    on_gpu(|gpu| {
        let plain = cross_of(24, cross_shape(1, 70, 90));
        let times = |x: f32, exponent: i32| (f64::from(x) * 2f64.powi(exponent)) as f32;
        for exponent in [-100, -50, 50, 100] {
            for others in [0, -exponent] {
                let mut inputs = plain.clone();
                for gradient in
                    [&mut inputs.grad_query_states, &mut inputs.grad_key_states, &mut inputs.grad_value_states]
                {
                    gradient.mapv_inplace(|x| times(x, exponent));
                }
                for hidden in [&mut inputs.decoder_hidden_states, &mut inputs.encoder_hidden_states] {
                    hidden.mapv_inplace(|x| times(x, others));
                }
                for weight in [&mut inputs.q_weight, &mut inputs.k_weight, &mut inputs.v_weight] {
                    weight.mapv_inplace(|x| times(x, others));
                }
                eprintln!("gradients 2^{exponent}, others 2^{others}");
                assert_promised(gpu, &inputs);
            }
        }
    });
}

#[test]
fn weights_whose_sample_misses_the_largest_have_the_promised_error() {
    on_gpu(|gpu| {
        // More pieces than are sampled of each weight; the second piece is not.
        let sizes = cross_shape(1, 33, 47);
        let shape = cross::Shape { num_heads: 8, num_kv_heads: 4, hidden_size: 128, cross_hidden_size: 128, ..sizes };
        for weight in 0..3 {
            for exponent in [12, 120] {
                let mut inputs = cross_of(27, shape);
                let of = [&mut inputs.q_weight, &mut inputs.k_weight, &mut inputs.v_weight];
                of[weight][[0, 5]] = 2f32.powi(exponent);
                assert_promised(gpu, &inputs);
            }
        }
    });
}

#[test]
fn rows_of_very_different_sizes_each_have_the_promised_error() {
    on_gpu(|gpu| {
        let mut inputs = cross_of(25, cross_shape(1, 64, 96));
        for gradient in [&mut inputs.grad_query_states, &mut inputs.grad_key_states, &mut inputs.grad_value_states] {
            for (token, mut rows) in gradient.axis_iter_mut(Axis(2)).enumerate() {
                rows.mapv_inplace(|x| x * 2f32.powi(token as i32 % 41 - 20));
            }
        }
        assert_promised(gpu, &inputs);
        let reference = cross::reference::backward(&inputs).unwrap();
        each_mode(gpu, |mode, precision, run| {
            let gradients = run(&inputs);
            let found = [&gradients.grad_decoder_hidden_states, &gradients.grad_encoder_hidden_states];
            let expected = [&reference.grad_decoder_hidden_states, &reference.grad_encoder_hidden_states];
            for (found, expected) in found.into_iter().zip(expected) {
                for (token, (found, expected)) in found.axis_iter(Axis(1)).zip(expected.axis_iter(Axis(1))).enumerate()
                {
                    let error = norm(&found.mapv(f64::from) - &expected) / norm(expected.iter().copied());
                    // A single row has no large number of errors to average over: half as much again.
                    assert!(error <= 1.5 * promised(precision), "{mode}, token {token}: {error:e}");
                }
            }
        });
    });
}

#[test]
fn infinities_and_nan_reach_exactly_the_outputs_that_depend_on_them() {
    on_gpu(|gpu| {
        let plain = cross_of(26, cross_shape(2, 40, 70));
        let finite = |x: ndarray::ArrayViewD<'_, f64>| -> ArrayD<bool> { x.mapv(f64::is_finite) };
        for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            for wrong in 0..8 {
                let mut inputs = plain.clone();
                match wrong {
                    0 => inputs.grad_query_states[[1, 2, 30, 5]] = value,
                    1 => inputs.grad_key_states[[0, 3, 69, 63]] = value,
                    2 => inputs.grad_value_states[[1, 0, 0, 0]] = value,
                    3 => inputs.decoder_hidden_states[[0, 39, 95]] = value,
                    4 => inputs.encoder_hidden_states[[1, 1, 17]] = value,
                    5 => inputs.q_weight[[255, 3]] = value,
                    6 => inputs.k_weight[[64, 127]] = value,
                    _ => inputs.v_weight[[0, 64]] = value,
                }
                let reference = cross::reference::backward(&inputs).unwrap();
                each_mode(gpu, |mode, _, run| {
                    for ((name, found), (_, expected)) in run(&inputs).tensors().iter().zip(reference.tensors()) {
                        let found = finite(found.mapv(f64::from).view());
                        assert_eq!(found, finite(expected), "{mode}, {value} in input {wrong}: {name}");
                    }
                });
            }
        }
    });
}

#[test]
fn more_than_a_million_token_rows_have_the_promised_error() {
    // More rows than 2^20, and more tiles along them than a 16-bit grid holds.
    on_gpu(|gpu| {
        let shape = cross::Shape {
            batch_size: 1,
            seq_len_dec: 1_048_577,
            seq_len_enc: 1_048_577,
            num_heads: 1,
            num_kv_heads: 1,
            head_dim: 64,
            hidden_size: 8,
            cross_hidden_size: 8,
        };
        assert_promised(gpu, &cross_of(27, shape));
    });
}

#[test]
fn the_mode_is_the_callers_and_is_echoed() {
    on_each_module(|gpu, module: ModuleKind| {
        for precision in PRECISIONS {
            let plan = cross::Plan::new(&cross_shape(1, 2, 3), precision, &gpu.target(module)).unwrap();
            assert_eq!(plan.precision(), precision);
            let text = plan.to_string();
            assert!(text.contains(&format!("{precision} precision")) && text.contains(&module.to_string()), "{text}");
            assert_eq!(cross::Backward::new(&gpu.gpu, plan).unwrap().plan().precision(), precision);
        }
    });
}
