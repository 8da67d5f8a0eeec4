//! The scaled fp16 operands of operation B, exactly as the `cross_convert_*` kernels make them, and what that costs.
//!
//! # Scheme
//! All scales are powers of two, so scaling is exact. `TOP = 14`.
//! * A row of dQ, or of dK | dV together, is stored times `2^-e[t]`, its largest finite element in `[2^14, 2^15)`.
//! * A row of hidden states is stored times `2^(e[t] - R)`: the row exponents leave the sum over tokens of a weight gradient, which
//!   is then multiplied by one `2^R`. `R` is the least that keeps all elements below `2^15`.
//! * A weight tensor (k_weight and v_weight: both together) is stored times `2^-R`, its largest element in `[2^8, 2^15)`. `R` follows from a fixed sample of
//!   the tensor, so that it can be converted while it is read the first time: it gives the sample's largest element an exponent of 8, 6
//!   less than there is room for. If an element of the tensor needs more, or the sample is zero and the tensor is not, `R` follows from the largest, to which it gives an exponent of 14.
//!
//! `Fast` stores `hi = fp16(y)` of a scaled element `y`. `High` stores `lo = fp16(y - hi)` too and multiplies
//! `hi hi + hi lo + lo hi`.
//!
//! # Error bound
//! With `u = 2^-11` (`Fast`) or `2^-22` (`High`), exact products and sums, and finite inputs of any magnitude, denormals included:
//! ```text
//! |error of dX[t, j]| <= (2u + u^2) sum_k |dQ[t, k]| |W[k, j]|
//!                        + (1 + u) (2^-39 max_k |dQ[t, k]| sum_k |W[k, j]|  +  2^-33 max |W| sum_k |dQ[t, k]|) + K 2^-72 max_k |dQ[t, k]| max |W|
//! |error of dW[i, j]| <= (2u + u^2) sum_t |dQ[t, i]| |X[t, j]|
//!                        + (1 + u) 2^-39 sum_t max_i |dQ[t, i]| |X[t, j]|  +  N (1 + u) 2^-38 G + N 2^-78 G,   G = max_t (max_i |dQ[t, i]| max_j |X[t, j]|)
//! ```
//! (K elements of a gradient row, N tokens; dX of the encoder: K runs over dK | dV and W is k_weight over v_weight.) To this an
//! implementation adds the rounding of its fp32 sums, as any fp32 product does, and for dK and dV that of the sum over a group's heads.
//!
//! Why: fp16 has 11 significant bits down to `2^-14` and an absolute error of `2^-25` below, so `|y - hi| <= max(2^-11 |y|, 2^-25)`.
//! `y - hi` is exact in fp32, so `|y - hi - lo| <= max(2^-23 |y|, 2^-25)`; the product left out is `|lo lo'| <= 2^-22 |y y'|`, together
//! `2u + u^2`. The other terms are the `2^-25` of either factor (and of both), relative to a largest element of at least `2^14`, a weight of at least
//! `2^8`: `2^-39` and `2^-33` of it; for hidden states relative to `G`, since `2^R <= 2^-28 G` and every `|dQ'| < 2^15`.
//!
//! # What `High` keeps
//! 22 bits hold for elements of at least `2^-3` after scaling: those down to `2^-17` of the largest of their row (of a gradient), to `2^-11` of the largest of
//! their tensor (of a weight), to `2^-17` of `G` (of a hidden state times its gradient row's largest). An element of at most 22 significant bits
//! there is stored exactly: integers up to `2^22`, 1024.5, 4097. A product is exact where, beside that, one of the factors has at most 11
//! bits (its `lo` is 0, nothing is left out).
//!
//! # Infinities and NaN
//! They do not count for the scales and stay what they are (`lo` is then 0), so that exactly those outputs become infinite or NaN
//! that depend on them. A gradient row without a finite element other than zero has the exponent
//! [`ZERO_ROW`](attn_backward_kernels::scale::ZERO_ROW) and takes no part in `R`.

use attn_backward_kernels::config::cross_convert::SAMPLES;
use attn_backward_kernels::scale;
use attn_backward_kernels::tile::power_of_two::power_of_two_halves;
use half::f16;
use ndarray::{Array2, Array3, Array4, ArrayView2, Axis, concatenate};

use super::{Gradients, Inputs, Precision};
use crate::Error;
use crate::linalg::matmul;

/// A converted matrix; its parts are in standard layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand {
    /// The nearest fp16 of each scaled element.
    pub hi: Array2<f16>,
    /// The nearest fp16 of what `hi` leaves, [`Precision::High`] only.
    pub lo: Option<Array2<f16>>,
}

impl Operand {
    /// Row `t` of `rows` times `2^-shift(t)`, in one or two parts.
    fn new(rows: ArrayView2<'_, f32>, precision: Precision, shift: impl Fn(usize) -> i32) -> Self {
        let mut scaled = rows.as_standard_layout().into_owned();
        for (t, mut row) in scaled.outer_iter_mut().enumerate() {
            let (f, g) = power_of_two_halves(-shift(t));
            row.mapv_inplace(|x| x * f * g);
        }
        let hi = scaled.mapv(f16::from_f32);
        let lo = (precision == Precision::High).then(|| {
            let mut lo = hi.clone();
            lo.zip_mut_with(&scaled, |part, &y| {
                *part = if part.is_finite() { f16::from_f32(y - part.to_f32()) } else { f16::ZERO };
            });
            lo
        });
        Operand { hi, lo }
    }

    /// `self^T @ other` or `self @ other` in f64, from the products that the GEMM makes of the parts.
    fn product(&self, other: &Operand, transposed: bool) -> Array2<f64> {
        let wide = |part: &Array2<f16>| part.mapv(f64::from);
        let left = |part: &Array2<f16>| if transposed { wide(part).reversed_axes() } else { wide(part) };
        let mut product = matmul(&left(&self.hi), &wide(&other.hi));
        if let (Some(lo), Some(other_lo)) = (&self.lo, &other.lo) {
            product = product + matmul(&left(&self.hi), &wide(other_lo)) + matmul(&left(lo), &wide(&other.hi));
        }
        product
    }
}

/// Everything that the conversion of one call of operation B writes.
#[derive(Clone, Debug, PartialEq)]
pub struct Operands {
    /// `[rows_dec, q_out_dim]`.
    pub dq: Operand,
    /// `[rows_enc, 2 * kv_out_dim]`, dK | dV.
    pub dkv: Operand,
    /// `[rows_dec, hidden_size]`.
    pub x_dec: Operand,
    /// `[rows_enc, cross_hidden_size]`.
    pub x_enc: Operand,
    /// `[q_out_dim, hidden_size]`.
    pub wq: Operand,
    /// `[2 * kv_out_dim, cross_hidden_size]`, k_weight over v_weight.
    pub wkv: Operand,
    /// `[rows_dec]`, exponents of dQ's rows.
    pub row_exponents_dec: Vec<i32>,
    /// `[rows_enc]`, exponents of the rows of dK | dV.
    pub row_exponents_enc: Vec<i32>,
    /// Largest exponents of decoder tokens, encoder tokens, q_weight, k_weight with v_weight, those of weights at least what they were guessed to be;
    /// `None` where all is zero.
    pub maxima: [Option<i32>; 4],
    /// Exponents of grad_q_weight, grad_k_weight and grad_v_weight, q_weight, k_weight with v_weight.
    pub exponents: [i32; 4],
}

impl Operands {
    /// Converts the inputs.
    ///
    /// # Errors
    /// As [`Inputs::shape`].
    pub fn new(inputs: &Inputs, precision: Precision) -> Result<Self, Error> {
        let shape = inputs.shape()?;
        let dq = token_rows(&inputs.grad_query_states, 1);
        let dk = token_rows(&inputs.grad_key_states, shape.groups());
        let dv = token_rows(&inputs.grad_value_states, shape.groups());
        let dkv = side_by_side(Axis(1), &dk, &dv);
        let wkv = side_by_side(Axis(0), &inputs.k_weight, &inputs.v_weight);
        let x_dec = hidden_rows(&inputs.decoder_hidden_states);
        let x_enc = hidden_rows(&inputs.encoder_hidden_states);

        let maxima = [
            tokens_maximum(dq.view(), x_dec.view()),
            tokens_maximum(dkv.view(), x_enc.view()),
            weights_maximum(&[&inputs.q_weight], &[SAMPLES[0]]),
            weights_maximum(&[&inputs.k_weight, &inputs.v_weight], &SAMPLES[1..]),
        ];
        let exponents = maxima.map(scale::operand_exponent);
        let exponents_of = |rows: &Array2<f32>| -> Vec<i32> {
            rows.outer_iter().map(|row| scale::row_exponent(largest(row))).collect()
        };
        let (e_dec, e_enc) = (exponents_of(&dq), exponents_of(&dkv));
        Ok(Operands {
            dq: Operand::new(dq.view(), precision, |t| e_dec[t]),
            dkv: Operand::new(dkv.view(), precision, |t| e_enc[t]),
            x_dec: Operand::new(x_dec.view(), precision, |t| exponents[0] - e_dec[t]),
            x_enc: Operand::new(x_enc.view(), precision, |t| exponents[1] - e_enc[t]),
            wq: Operand::new(inputs.q_weight.view(), precision, |_| exponents[2]),
            wkv: Operand::new(wkv.view(), precision, |_| exponents[3]),
            row_exponents_dec: e_dec,
            row_exponents_enc: e_enc,
            maxima: maxima.map(|maximum| (maximum != i32::MIN).then_some(maximum)),
            exponents,
        })
    }

    /// The gradients that exact arithmetic makes of the converted operands: what is left is the error of the conversion.
    ///
    /// # Errors
    /// As [`Inputs::shape`], for the inputs that were converted.
    pub fn gradients(&self, inputs: &Inputs) -> Result<Gradients<f64>, Error> {
        let shape = inputs.shape()?;
        let dgrad = |gradient: &Operand, weight: &Operand, row_exponents: &[i32], exponent: i32| {
            let mut dx = gradient.product(weight, false);
            for (mut row, e) in dx.outer_iter_mut().zip(row_exponents) {
                row.mapv_inplace(|x| x * 2f64.powi(e + exponent));
            }
            dx
        };
        let wgrad =
            |gradient: &Operand, hidden: &Operand, exponent: i32| gradient.product(hidden, true) * 2f64.powi(exponent);
        let dx_dec = dgrad(&self.dq, &self.wq, &self.row_exponents_dec, self.exponents[2]);
        let dx_enc = dgrad(&self.dkv, &self.wkv, &self.row_exponents_enc, self.exponents[3]);
        let grad_kv_weight = wgrad(&self.dkv, &self.x_enc, self.exponents[1]);
        let (grad_k_weight, grad_v_weight) = grad_kv_weight.view().split_at(Axis(0), shape.kv_out_dim());
        let batches = |rows: Array2<f64>, seq_len: usize| {
            let extents = (shape.batch_size, seq_len, rows.ncols());
            Array3::from_shape_fn(extents, |(b, s, j)| rows[(b * seq_len + s, j)])
        };
        Ok(Gradients {
            grad_decoder_hidden_states: batches(dx_dec, shape.seq_len_dec),
            grad_encoder_hidden_states: batches(dx_enc, shape.seq_len_enc),
            grad_q_weight: wgrad(&self.dq, &self.x_dec, self.exponents[0]),
            grad_k_weight: grad_k_weight.to_owned(),
            grad_v_weight: grad_v_weight.to_owned(),
        })
    }
}

/// `[B, num_heads, S, head_dim]` as token rows, each run of `groups` heads summed in f32, heads in order, from 0.
fn token_rows(gradient: &Array4<f32>, groups: usize) -> Array2<f32> {
    let (batch_size, num_heads, seq_len, head_dim) = gradient.dim();
    Array2::from_shape_fn((batch_size * seq_len, num_heads / groups * head_dim), |(t, column)| {
        let (b, s, kv_head, j) = (t / seq_len, t % seq_len, column / head_dim, column % head_dim);
        (0..groups).fold(0.0, |sum, g| sum + gradient[(b, kv_head * groups + g, s, j)])
    })
}

/// `[B, S, width]` as `[B * S, width]`.
fn hidden_rows(hidden: &Array3<f32>) -> Array2<f32> {
    let (batch_size, seq_len, width) = hidden.dim();
    Array2::from_shape_fn((batch_size * seq_len, width), |(t, j)| hidden[(t / seq_len, t % seq_len, j)])
}

/// `a` and `b` one after the other along `axis`; along the other axis they are equally long.
fn side_by_side(axis: Axis, a: &Array2<f32>, b: &Array2<f32>) -> Array2<f32> {
    concatenate(axis, &[a.view(), b.view()]).expect("equally long along the other axis: Inputs::shape has checked it")
}

/// Largest magnitude.
fn largest<'a>(values: impl IntoIterator<Item = &'a f32>) -> u32 {
    values.into_iter().map(|x| scale::magnitude(*x)).max().unwrap_or(0)
}

/// The maximum that the exponent of `weights`, which share it, follows from: their own, or what their `samples` pieces promise if that is more.
fn weights_maximum(weights: &[&Array2<f32>], samples: &[u32]) -> i32 {
    let sampled = weights.iter().zip(samples).map(|(weights, samples)| {
        let weights = weights.as_standard_layout();
        let pieces: Vec<&[f32]> = weights.as_slice().expect("in standard layout").chunks(4).collect();
        let piece = |i| pieces.get(scale::sample_piece(i, pieces.len() as u64, *samples) as usize);
        largest((0..*samples).filter_map(piece).copied().flatten())
    });
    let guess = scale::guessed_maximum(sampled.max().unwrap_or(0));
    scale::weight_exponent(largest(weights.iter().copied().flatten())).max(guess)
}

/// The maximum over tokens that a weight gradient's exponent follows from.
fn tokens_maximum(gradient: ArrayView2<'_, f32>, hidden: ArrayView2<'_, f32>) -> i32 {
    let tokens = gradient.outer_iter().zip(hidden.outer_iter());
    tokens.map(|(dq, x)| scale::token_exponent(largest(dq), largest(x))).max().unwrap_or(i32::MIN)
}
