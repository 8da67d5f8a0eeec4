//! Operation A in f64, line by line as its formulas stand: what implementations are checked against.

use half::bf16;
use ndarray::parallel::prelude::*;
use ndarray::{Array, Array1, Array2, ArrayBase, Axis, Data, Dimension, s};

use super::{Gradients, HEAD_DIM, Inputs};
use crate::Error;
use crate::linalg::matmul;

/// Query rows whose probabilities are held at once, so that a long chunk needs O(chunk_len) memory.
const QUERY_BLOCK: usize = 512;

/// All gradients of operation A, computed in f64 from the bf16 inputs and left unrounded.
///
/// # Errors
/// As [`Inputs::shape`].
pub fn backward(inputs: &Inputs) -> Result<Gradients<f64>, Error> {
    let shape = inputs.shape()?;
    let (d_model, scale) = (shape.d_model(), f64::from(shape.scale));
    // Rows from `end` on are padding: they take no part.
    let end = inputs.cu_seqlens.padding().start;

    let grad_output = to_f64(&inputs.grad_output.slice(s![..end, ..]));
    let hidden_states = to_f64(&inputs.hidden_states.slice(s![..end, ..]));
    let [q_weight, k_weight, v_weight, out_weight] =
        [&inputs.q_weight, &inputs.k_weight, &inputs.v_weight, &inputs.out_weight].map(to_f64);

    let d_attn = matmul(&grad_output, &out_weight);
    let [mut o, mut dq, mut dk, mut dv] = std::array::from_fn(|_| Array2::<f64>::zeros((end, d_model)));
    (
        o.axis_chunks_iter_mut(Axis(1), HEAD_DIM),
        dq.axis_chunks_iter_mut(Axis(1), HEAD_DIM),
        dk.axis_chunks_iter_mut(Axis(1), HEAD_DIM),
        dv.axis_chunks_iter_mut(Axis(1), HEAD_DIM),
        d_attn.axis_chunks_iter(Axis(1), HEAD_DIM),
    )
        .into_par_iter()
        .enumerate()
        .for_each(|(head, (mut o, mut dq, mut dk, mut dv, d_attn))| {
            for chunk in inputs.cu_seqlens.chunks() {
                let k: Array2<f64> = to_f64(&inputs.key_states.slice(s![0, head, chunk.clone(), ..]));
                let v: Array2<f64> = to_f64(&inputs.value_states.slice(s![0, head, chunk.clone(), ..]));
                for first in chunk.clone().step_by(QUERY_BLOCK) {
                    let queries = first..chunk.end.min(first + QUERY_BLOCK);
                    let q: Array2<f64> = to_f64(&inputs.query_states.slice(s![0, head, queries.clone(), ..]));
                    let da = d_attn.slice(s![queries.clone(), ..]);

                    let p = softmax(scale * q.dot(&k.t()));
                    let dp = da.dot(&v.t());
                    let ds = &p * (&dp - (&p * &dp).sum_axis(Axis(1)).insert_axis(Axis(1)));

                    o.slice_mut(s![queries.clone(), ..]).assign(&p.dot(&v));
                    dq.slice_mut(s![queries.clone(), ..]).assign(&(scale * ds.dot(&k)));
                    // The rows of a chunk's keys and values collect a sum over its queries.
                    dk.slice_mut(s![chunk.clone(), ..]).scaled_add(scale, &ds.t().dot(&q));
                    dv.slice_mut(s![chunk.clone(), ..]).scaled_add(1.0, &p.t().dot(&da));
                }
            }
        });

    let mut grad_hidden_states = Array2::zeros((shape.total_seq_len, d_model));
    grad_hidden_states
        .slice_mut(s![..end, ..])
        .assign(&(matmul(&dq, &q_weight) + matmul(&dk, &k_weight) + matmul(&dv, &v_weight)));
    Ok(Gradients {
        grad_hidden_states,
        grad_q_weight: matmul(&dq.t(), &hidden_states),
        grad_q_bias: column_sums(&dq),
        grad_k_weight: matmul(&dk.t(), &hidden_states),
        grad_k_bias: column_sums(&dk),
        grad_v_weight: matmul(&dv.t(), &hidden_states),
        grad_v_bias: column_sums(&dv),
        grad_out_weight: matmul(&grad_output.t(), &o),
        grad_out_bias: column_sums(&grad_output),
    })
}

fn to_f64<S: Data<Elem = bf16>, D: Dimension>(x: &ArrayBase<S, D>) -> Array<f64, D> {
    x.mapv(f64::from)
}

fn column_sums(x: &Array2<f64>) -> Array1<f64> {
    x.sum_axis(Axis(0))
}

/// Softmax of every row.
fn softmax(logits: Array2<f64>) -> Array2<f64> {
    let max = logits.fold_axis(Axis(1), f64::NEG_INFINITY, |a, b| a.max(*b)).insert_axis(Axis(1));
    let exp = (logits - max).mapv_into(f64::exp);
    let sum = exp.sum_axis(Axis(1)).insert_axis(Axis(1));
    exp / sum
}
