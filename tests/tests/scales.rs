//! The scaled fp16 operands of operation B: the documented bound, exactness, and the way of infinities and NaN.
use attn_backward::cross::scales::{Operand, Operands};
use attn_backward::cross::{Gradients, Inputs, Precision, reference};
use attn_backward::random;
use ndarray::{Array2, Array3, Array4, ArrayD, Axis, concatenate};
use proptest::prelude::*;
use rand::Rng;

const PRECISIONS: [Precision; 2] = [Precision::Fast, Precision::High];

/// How the elements of one tensor are spread.
#[derive(Clone, Copy, Debug)]
struct Spread {
    /// Exponent of the whole tensor.
    global: i32,
    /// Rows (along the last axis) get exponents in `-rows..=rows`, and one in five is zero if this is not 0.
    rows: i32,
    /// One element gets this exponent on top, if not 0.
    outlier: i32,
}

fn spread() -> impl Strategy<Value = Spread> {
    (-100..=100i32, prop_oneof![Just(0), 0..=40i32], prop_oneof![Just(0), -30..=30i32])
        .prop_map(|(global, rows, outlier)| Spread { global, rows, outlier })
}

/// Finite elements of a tensor: `[rows, width]`, zeros, denormals and numbers near the end of fp32 included.
fn elements(seed: u64, tensor: u32, spread: Spread, rows: usize, width: usize) -> Vec<f32> {
    let mut rng = random::stream(seed, tensor, 0);
    let mut values = Vec::with_capacity(rows * width);
    for _ in 0..rows {
        let row = rng.random_range(-spread.rows..=spread.rows);
        let zero = spread.rows != 0 && rng.random_range(0..5) == 0;
        for _ in 0..width {
            let exponent = spread.global + row - rng.random_range(0..14);
            let x = rng.random_range(-2.0..2.0) * 2f64.powi(exponent);
            let x = if zero || rng.random_range(0..9) == 0 { 0.0 } else { x };
            values.push((x as f32).clamp(f32::MIN, f32::MAX));
        }
    }
    if spread.outlier != 0 && !values.is_empty() {
        let at = rng.random_range(0..values.len());
        values[at] = (2f64.powi(spread.global + spread.outlier) as f32).min(f32::MAX);
    }
    values
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch_size: usize,
    seq_len_dec: usize,
    seq_len_enc: usize,
    num_heads: usize,
    num_kv_heads: usize,
    hidden_size: usize,
    cross_hidden_size: usize,
}

const HEAD_DIM: usize = 64;

fn sizes() -> impl Strategy<Value = Sizes> {
    (1..=2usize, 0..=4usize, 0..=4usize, 1..=2usize, 1..=2usize, 1..=2usize).prop_map(
        |(batch, dec, enc, heads, w, cw)| Sizes {
            batch_size: batch,
            seq_len_dec: dec,
            seq_len_enc: enc,
            num_heads: heads,
            num_kv_heads: heads,
            hidden_size: 8 * w,
            cross_hidden_size: 8 * cw,
        },
    )
}

/// Inputs of these sizes; `element(tensor, rows, width)` gives the elements of each tensor.
fn inputs(sizes: Sizes, mut element: impl FnMut(u32, usize, usize) -> Vec<f32>) -> Inputs {
    let Sizes { batch_size, seq_len_dec, seq_len_enc, num_heads, num_kv_heads, hidden_size, cross_hidden_size } = sizes;
    let mut gradient = |tensor, seq_len| {
        let values = element(tensor, batch_size * num_heads * seq_len, HEAD_DIM);
        Array4::from_shape_vec((batch_size, num_heads, seq_len, HEAD_DIM), values).unwrap()
    };
    let (grad_query_states, grad_key_states, grad_value_states) =
        (gradient(0, seq_len_dec), gradient(1, seq_len_enc), gradient(2, seq_len_enc));
    let mut hidden = |tensor, seq_len, width| {
        Array3::from_shape_vec((batch_size, seq_len, width), element(tensor, batch_size * seq_len, width)).unwrap()
    };
    let (decoder_hidden_states, encoder_hidden_states) =
        (hidden(3, seq_len_dec, hidden_size), hidden(4, seq_len_enc, cross_hidden_size));
    let mut weight = |tensor, heads: usize, width| {
        Array2::from_shape_vec((heads * HEAD_DIM, width), element(tensor, heads * HEAD_DIM, width)).unwrap()
    };
    let (q_weight, k_weight, v_weight) = (
        weight(5, num_heads, hidden_size),
        weight(6, num_kv_heads, cross_hidden_size),
        weight(7, num_kv_heads, cross_hidden_size),
    );
    Inputs {
        grad_query_states,
        grad_key_states,
        grad_value_states,
        decoder_hidden_states,
        encoder_hidden_states,
        q_weight,
        k_weight,
        v_weight,
        num_kv_heads,
    }
}

/// `[B, heads, S, head_dim]` as token rows, in f64; no groups.
fn rows_of_heads(x: &Array4<f32>) -> Array2<f64> {
    let (_, heads, seq_len, head_dim) = x.dim();
    let rows = x.dim().0 * seq_len;
    Array2::from_shape_fn((rows, heads * head_dim), |(t, c)| {
        f64::from(x[(t / seq_len, c / head_dim, t % seq_len, c % head_dim)])
    })
}

fn rows_of_hidden(x: &Array3<f32>) -> Array2<f64> {
    let (batch_size, seq_len, width) = x.dim();
    Array2::from_shape_fn((batch_size * seq_len, width), |(t, j)| f64::from(x[(t / seq_len, t % seq_len, j)]))
}

fn largest<'a>(x: impl IntoIterator<Item = &'a f64>) -> f64 {
    x.into_iter().fold(0.0, |max, x| max.max(x.abs()))
}

/// The documented bound of a data gradient, plus what f64 sums may lose: `[rows, width]`.
fn dgrad_bound(dy: &Array2<f64>, weight: &Array2<f64>, u: f64) -> Array2<f64> {
    let (floor, w_floor, depth, w_max) = (2f64.powi(-39), 2f64.powi(-33), dy.ncols() as f64, largest(weight));
    let (dy_abs, w_abs) = (dy.mapv(f64::abs), weight.mapv(f64::abs));
    let sums = dy_abs.dot(&w_abs);
    Array2::from_shape_fn(sums.dim(), |(t, j)| {
        let (dy, w) = (dy_abs.row(t), w_abs.column(j));
        let dy_max = largest(dy);
        (2.0 * u + u * u) * sums[(t, j)]
            + (1.0 + u) * (floor * dy_max * w.sum() + w_floor * w_max * dy.sum())
            + depth * floor * w_floor * dy_max * w_max
            + 4.0 * depth * f64::EPSILON * sums[(t, j)]
    })
}

/// The documented bound of a weight gradient, plus what f64 sums may lose: `[width of dy, width of x]`.
fn wgrad_bound(dy: &Array2<f64>, x: &Array2<f64>, u: f64) -> Array2<f64> {
    let (floor, tokens) = (2f64.powi(-39), dy.nrows() as f64);
    let (dy_abs, x_abs) = (dy.mapv(f64::abs), x.mapv(f64::abs));
    let row_max: Vec<f64> = dy.outer_iter().map(largest).collect();
    let top = row_max.iter().zip(x.outer_iter()).fold(0.0, |top: f64, (dy, x)| top.max(dy * largest(x)));
    let sums = dy_abs.t().dot(&x_abs);
    Array2::from_shape_fn(sums.dim(), |(i, j)| {
        let weighted: f64 = row_max.iter().zip(x_abs.column(j)).map(|(dy, x)| dy * x).sum();
        (2.0 * u + u * u) * sums[(i, j)]
            + (1.0 + u) * floor * weighted
            + tokens * (1.0 + u) * 2.0 * floor * top
            + tokens * floor * floor * top
            + 4.0 * tokens * f64::EPSILON * sums[(i, j)]
    })
}

/// The bound of every gradient, flattened to rows, in the operation's order.
fn bounds(inputs: &Inputs, precision: Precision) -> [Array2<f64>; 5] {
    let u = match precision {
        Precision::Fast => 2f64.powi(-11),
        Precision::High => 2f64.powi(-22),
    };
    let dq = rows_of_heads(&inputs.grad_query_states);
    let (dk, dv) = (rows_of_heads(&inputs.grad_key_states), rows_of_heads(&inputs.grad_value_states));
    let dkv = concatenate(Axis(1), &[dk.view(), dv.view()]).unwrap();
    let (x_dec, x_enc) = (rows_of_hidden(&inputs.decoder_hidden_states), rows_of_hidden(&inputs.encoder_hidden_states));
    let [wq, wk, wv] = [&inputs.q_weight, &inputs.k_weight, &inputs.v_weight].map(|w| w.mapv(f64::from));
    let wkv = concatenate(Axis(0), &[wk.view(), wv.view()]).unwrap();
    let grad_kv = wgrad_bound(&dkv, &x_enc, u);
    let (grad_k, grad_v) = grad_kv.view().split_at(Axis(0), dk.ncols());
    [
        dgrad_bound(&dq, &wq, u),
        dgrad_bound(&dkv, &wkv, u),
        wgrad_bound(&dq, &x_dec, u),
        grad_k.to_owned(),
        grad_v.to_owned(),
    ]
}

/// What exact products of the converted operands give, and the f64 reference.
fn converted_and_reference(inputs: &Inputs, precision: Precision) -> [Gradients<f64>; 2] {
    let operands = Operands::new(inputs, precision).unwrap();
    [operands.gradients(inputs).unwrap(), reference::backward(inputs).unwrap()]
}

fn flat(tensor: ndarray::ArrayViewD<'_, f64>) -> Vec<f64> {
    tensor.iter().copied().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn error_is_within_the_documented_bound_for_any_magnitude(
        seed in any::<u64>(), sizes in sizes(), spreads in prop::array::uniform8(spread())
    ) {
        let inputs = inputs(sizes, |tensor, rows, width| elements(seed, tensor, spreads[tensor as usize], rows, width));
        for precision in PRECISIONS {
            let [found, expected] = converted_and_reference(&inputs, precision);
            let tensors = found.tensors().into_iter().zip(expected.tensors()).zip(bounds(&inputs, precision));
            for (((name, found), (_, expected)), bound) in tensors {
                for ((found, expected), bound) in found.iter().zip(expected.iter()).zip(&bound) {
                    let error = (found - expected).abs();
                    prop_assert!(error <= *bound, "{precision} {name}: {found} for {expected}, error {error:e} above {bound:e}");
                }
            }
        }
    }

    #[test]
    fn operands_of_finite_inputs_are_finite_and_below_two_to_the_15(
        seed in any::<u64>(), sizes in sizes(), spreads in prop::array::uniform8(spread())
    ) {
        let inputs = inputs(sizes, |tensor, rows, width| elements(seed, tensor, spreads[tensor as usize], rows, width));
        let o = Operands::new(&inputs, Precision::High).unwrap();
        for Operand { hi, lo } in [&o.dq, &o.dkv, &o.x_dec, &o.x_enc, &o.wq, &o.wkv] {
            prop_assert!(hi.iter().all(|x| x.to_f32().abs() <= 32768.0));
            prop_assert!(lo.as_ref().unwrap().iter().all(|x| x.to_f32().abs() <= 16.0));
        }
    }

    #[test]
    fn infinities_and_nan_reach_exactly_the_outputs_that_depend_on_them(
        seed in any::<u64>(), sizes in sizes(), spreads in prop::array::uniform8(spread()), wrong in 0..8u32,
        value in prop::sample::select(vec![f32::INFINITY, f32::NEG_INFINITY, f32::NAN]), place in any::<prop::sample::Index>(),
    ) {
        let inputs = inputs(sizes, |tensor, rows, width| {
            let mut values = elements(seed, tensor, spreads[tensor as usize], rows, width);
            if tensor == wrong && !values.is_empty() {
                let at = place.index(values.len());
                values[at] = value;
            }
            values
        });
        for precision in PRECISIONS {
            let [found, expected] = converted_and_reference(&inputs, precision);
            for ((name, found), (_, expected)) in found.tensors().into_iter().zip(expected.tensors()) {
                let finite = |x: ndarray::ArrayViewD<'_, f64>| -> ArrayD<bool> { x.mapv(f64::is_finite) };
                prop_assert_eq!(finite(found), finite(expected), "{} {}", precision, name);
            }
        }
    }
}

const SMALL: Sizes = Sizes {
    batch_size: 2,
    seq_len_dec: 3,
    seq_len_enc: 5,
    num_heads: 4,
    num_kv_heads: 1,
    hidden_size: 16,
    cross_hidden_size: 24,
};

#[test]
fn high_is_exact_for_13_bit_gradients_and_small_integers() {
    let mut next = 0;
    let inputs = inputs(SMALL, |tensor, rows, width| {
        let mut element = || {
            next += 1;
            if tensor < 3 { [1024.5, 4097.0, -3.0, 0.0, 7.0, -2049.0][next % 6] } else { (next % 23) as f32 - 11.0 }
        };
        (0..rows * width).map(|_| element()).collect()
    });
    let [found, expected] = converted_and_reference(&inputs, Precision::High);
    assert_eq!(found, expected);
    let [found, _] = converted_and_reference(&inputs, Precision::Fast);
    assert_ne!(found, expected, "11 bits do not hold 1024.5 and 4097");
}

#[test]
fn gradient_of_ones_sums_to_groups() {
    let inputs = inputs(SMALL, |tensor, rows, width| vec![if tensor < 3 { 1.0 } else { 0.5 }; rows * width]);
    for precision in PRECISIONS {
        let operands = Operands::new(&inputs, precision).unwrap();
        assert_eq!(operands.dkv.hi.dim(), (10, 128));
        for (row, e) in operands.dkv.hi.outer_iter().zip(&operands.row_exponents_enc) {
            assert!(row.iter().all(|x| x.to_f32() * 2f32.powi(*e) == 4.0));
        }
        let [found, expected] = converted_and_reference(&inputs, precision);
        assert_eq!(found, expected);
    }
}

#[test]
fn weights_are_scaled_by_their_sample_as_long_as_it_leaves_room() {
    // 3072 pieces of q_weight, of which 1024 are sampled; 2048 of k_weight and of v_weight, 512 each.
    let sizes = Sizes { hidden_size: 48, cross_hidden_size: 32, num_kv_heads: 4, ..SMALL };
    for exponent in 0..=12 {
        let inputs = inputs(sizes, |tensor, rows, width| {
            let mut ones = vec![1.0; rows * width];
            // Of the second piece: the sample has the first of each few.
            if tensor == 5 || tensor == 7 {
                ones[4] = 2f32.powi(exponent);
            }
            ones
        });
        let operands = Operands::new(&inputs, Precision::Fast).unwrap();
        // 1 becomes 2^8, until 2^7 would be 2^15.
        let expected = if exponent <= 6 { -8 } else { exponent - 14 };
        assert_eq!(operands.exponents[2..], [expected; 2], "2^{exponent}");
        for w in [&operands.wq.hi, &operands.wkv.hi] {
            let largest = w.iter().fold(0f32, |max, x| max.max(x.to_f32()));
            assert_eq!(largest, 2f32.powi(if exponent <= 6 { 8 + exponent } else { 14 }));
        }
    }
}

#[test]
fn zeros_give_zeros() {
    let inputs = inputs(SMALL, |_, rows, width| vec![0.0; rows * width]);
    for precision in PRECISIONS {
        let operands = Operands::new(&inputs, precision).unwrap();
        assert_eq!((operands.maxima, operands.exponents), ([None; 4], [0; 4]));
        let [found, expected] = converted_and_reference(&inputs, precision);
        assert_eq!(found, expected);
    }
}

#[test]
fn a_zero_gradient_row_hides_its_hidden_states_however_large() {
    let inputs = inputs(Sizes { num_kv_heads: 4, ..SMALL }, |tensor, rows, width| {
        let value = |row: usize| match (tensor, row) {
            (0..=2, row) if row % 3 == 0 => 0.0, // row = (batch * heads + head) * seq_len + s, seq_len_dec = 3
            (0..=2, _) => 2f32.powi(-140),
            (3, row) if row % 3 == 0 => f32::MAX,
            (3, _) => 2f32.powi(-140),
            _ => 1.0,
        };
        (0..rows * width).map(|i| value(i / width)).collect()
    });
    for precision in PRECISIONS {
        let [found, expected] = converted_and_reference(&inputs, precision);
        assert_eq!(found.grad_q_weight, expected.grad_q_weight);
        assert!(expected.grad_q_weight.iter().all(|x| *x == 4.0 * 2f64.powi(-280)));
    }
}

/// `x` with 11 significant bits, ties to even: TF32.
fn tf32(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x0fff + (bits >> 13 & 1)) & !0x1fff)
}

#[test]
fn error_is_tf32s_in_fast_and_near_fp32s_in_high() {
    let sizes = Sizes { batch_size: 1, seq_len_dec: 64, seq_len_enc: 96, num_kv_heads: 4, ..SMALL };
    let normal =
        |tensor, rows, width| random::normal::<f32, _>(11, tensor, 1.0, rows * width).into_raw_vec_and_offset().0;
    let inputs_exact = inputs(sizes, normal);
    let inputs_tf32 = inputs(sizes, |tensor, rows, width| normal(tensor, rows, width).into_iter().map(tf32).collect());
    let [fast, expected] = converted_and_reference(&inputs_exact, Precision::Fast);
    let [high, _] = converted_and_reference(&inputs_exact, Precision::High);
    let tf32 = reference::backward(&inputs_tf32).unwrap();
    let errors = |found: &Gradients<f64>| -> Vec<f64> {
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let tensors = found.tensors().into_iter().zip(expected.tensors());
        let error = |((_, found), (_, expected)): ((_, _), (_, _))| {
            let (found, expected) = (flat(found), flat(expected));
            let difference: Vec<f64> = found.iter().zip(&expected).map(|(a, b)| a - b).collect();
            norm(&difference) / norm(&expected)
        };
        tensors.map(error).collect()
    };
    let (fast, high, tf32) = (errors(&fast), errors(&high), errors(&tf32));
    for ((fast, high), tf32) in fast.into_iter().zip(high).zip(tf32) {
        assert!((2.5e-4..3.5e-4).contains(&tf32), "TF32 itself: {tf32:e}");
        assert!((fast / tf32 - 1.0).abs() < 1e-3, "fast {fast:e}, TF32 {tf32:e}");
        assert!((1e-8..3e-7).contains(&high), "high {high:e}");
    }
}
