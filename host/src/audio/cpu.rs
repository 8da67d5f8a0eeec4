//! Operation A on the CPU: f32 arithmetic from bf16 inputs, rounded to bf16 once, at the end; deterministic for any number of
//! threads.
//!
//! Chunks and heads are worked on independently. A block of query rows holds its probabilities against all keys of the chunk,
//! so memory is O(total_seq_len), and its part of dK and dV is added before the next block's.

use half::bf16;
use ndarray::linalg::general_mat_mul;
use ndarray::parallel::prelude::*;
use ndarray::{Array, Array1, Array2, ArrayBase, ArrayView2, ArrayViewMut1, Data, Dimension, Ix2, s};

use super::{Gradients, HEAD_DIM, Inputs};
use crate::Error;
use crate::linalg::matmul;

/// Query rows of one block; 128 rows of f32 probabilities for a chunk of 16384 are 8 MiB.
const QUERY_BLOCK: usize = 128;

/// All gradients of operation A.
///
/// # Errors
/// As [`Inputs::shape`].
pub fn backward(inputs: &Inputs) -> Result<Gradients, Error> {
    let shape = inputs.shape()?;
    let end = inputs.cu_seqlens.padding().start;
    let grad_output = to_f32(&inputs.grad_output.slice(s![..end, ..]));
    let d_attn = matmul(&grad_output, &to_f32(&inputs.out_weight));
    let Attention { o, dq, dk, dv } = attention(inputs, &d_attn);
    drop(d_attn);

    let grad_hidden = matmul(&dq, &to_f32(&inputs.q_weight))
        + matmul(&dk, &to_f32(&inputs.k_weight))
        + matmul(&dv, &to_f32(&inputs.v_weight));
    let mut grad_hidden_states = Array2::from_elem((shape.total_seq_len, shape.d_model()), bf16::ZERO);
    grad_hidden_states.slice_mut(s![..end, ..]).assign(&to_bf16(&grad_hidden));

    let hidden_states = to_f32(&inputs.hidden_states.slice(s![..end, ..]));
    let weight = |d: &Array2<f32>, x: &Array2<f32>| to_bf16(&matmul(&d.t(), x));
    Ok(Gradients {
        grad_hidden_states,
        grad_q_weight: weight(&dq, &hidden_states),
        grad_q_bias: column_sums(&dq),
        grad_k_weight: weight(&dk, &hidden_states),
        grad_k_bias: column_sums(&dk),
        grad_v_weight: weight(&dv, &hidden_states),
        grad_v_bias: column_sums(&dv),
        grad_out_weight: weight(&grad_output, &o),
        grad_out_bias: column_sums(&grad_output),
    })
}

/// Per-token results of the attention, heads side by side: `[rows, d_model]` each.
struct Attention {
    o: Array2<f32>,
    dq: Array2<f32>,
    dk: Array2<f32>,
    dv: Array2<f32>,
}

impl Attention {
    fn zeros(rows: usize, columns: usize) -> Self {
        let [o, dq, dk, dv] = std::array::from_fn(|_| Array2::zeros((rows, columns)));
        Attention { o, dq, dk, dv }
    }
}

/// Forward and backward pass of every chunk and head, given the gradient at the attention output.
fn attention(inputs: &Inputs, d_attn: &Array2<f32>) -> Attention {
    let num_heads = inputs.query_states.dim().1;
    let chunks: Vec<_> = inputs.cu_seqlens.chunks().filter(|chunk| !chunk.is_empty()).collect();
    let parts: Vec<Attention> = (0..chunks.len() * num_heads)
        .into_par_iter()
        .map(|item| {
            let (chunk, head) = (chunks[item / num_heads].clone(), item % num_heads);
            let states = s![0, head, chunk.clone(), ..];
            attention_of_one(
                to_f32(&inputs.query_states.slice(states)),
                to_f32(&inputs.key_states.slice(states)),
                to_f32(&inputs.value_states.slice(states)),
                d_attn.slice(s![chunk, head * HEAD_DIM..(head + 1) * HEAD_DIM]),
                inputs.scale,
            )
        })
        .collect();
    let mut all = Attention::zeros(d_attn.nrows(), d_attn.ncols());
    for (item, part) in parts.into_iter().enumerate() {
        let (chunk, head) = (chunks[item / num_heads].clone(), item % num_heads);
        let place = s![chunk, head * HEAD_DIM..(head + 1) * HEAD_DIM];
        all.o.slice_mut(place).assign(&part.o);
        all.dq.slice_mut(place).assign(&part.dq);
        all.dk.slice_mut(place).assign(&part.dk);
        all.dv.slice_mut(place).assign(&part.dv);
    }
    all
}

/// One chunk and head: `q, k, v, da` are `[chunk_len, 64]`.
fn attention_of_one(q: Array2<f32>, k: Array2<f32>, v: Array2<f32>, da: ArrayView2<f32>, scale: f32) -> Attention {
    let chunk_len = q.nrows();
    let mut out = Attention::zeros(chunk_len, HEAD_DIM);
    // Folding the factor into the keys gives the logits and dQ theirs; dK takes it from the scaled queries.
    let scaled_k = &k * scale;
    let scaled_q = &q * scale;
    let mut p = Array2::zeros((QUERY_BLOCK.min(chunk_len), chunk_len));
    let mut ds = p.clone();
    for first in (0..chunk_len).step_by(QUERY_BLOCK) {
        let rows = first..chunk_len.min(first + QUERY_BLOCK);
        let da = da.slice(s![rows.clone(), ..]);
        let mut p = p.slice_mut(s![..rows.len(), ..]);
        let mut ds = ds.slice_mut(s![..rows.len(), ..]);

        general_mat_mul(1.0, &q.slice(s![rows.clone(), ..]), &scaled_k.t(), 0.0, &mut p);
        general_mat_mul(1.0, &da, &v.t(), 0.0, &mut ds);
        for (p, ds) in p.outer_iter_mut().zip(ds.outer_iter_mut()) {
            softmax_backward(p, ds);
        }
        general_mat_mul(1.0, &p, &v, 0.0, &mut out.o.slice_mut(s![rows.clone(), ..]));
        general_mat_mul(1.0, &ds, &scaled_k, 0.0, &mut out.dq.slice_mut(s![rows.clone(), ..]));
        general_mat_mul(1.0, &ds.t(), &scaled_q.slice(s![rows, ..]), 1.0, &mut out.dk);
        general_mat_mul(1.0, &p.t(), &da, 1.0, &mut out.dv);
    }
    out
}

/// Logits to probabilities `P`, and `dP` to `dS = P * (dP - sum(P * dP))`, of one query row.
///
/// The sum is taken away twice: what rounding leaves of it after the first time is as large as the result in a saturated row, where
/// one probability is near 1 and `dP` equals its weighted sum up to the others. A constant of the row changes nothing else.
fn softmax_backward(mut p: ArrayViewMut1<f32>, mut ds: ArrayViewMut1<f32>) {
    let max = p.fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    p.mapv_inplace(|logit| (logit - max).exp());
    let inverse_sum = 1.0 / p.sum();
    p *= inverse_sum;
    for _ in 0..2 {
        let row_sum: f32 = p.dot(&ds);
        ds -= row_sum;
    }
    ds *= &p;
}

/// Sums of the columns, formed in f64 and rounded once.
fn column_sums(x: &Array2<f32>) -> Array1<bf16> {
    let mut sums = Array1::<f64>::zeros(x.ncols());
    for row in x.outer_iter() {
        sums.zip_mut_with(&row, |sum, &x| *sum += f64::from(x));
    }
    sums.mapv(bf16::from_f64)
}

fn to_f32<S: Data<Elem = bf16>, D: Dimension>(x: &ArrayBase<S, D>) -> Array<f32, D> {
    x.mapv(f32::from)
}

fn to_bf16(x: &ArrayBase<impl Data<Elem = f32>, Ix2>) -> Array2<bf16> {
    x.mapv(bf16::from_f32)
}
