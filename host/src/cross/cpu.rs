//! Operation B on the CPU: f32 arithmetic, deterministic for any number of threads.

use ndarray::{Array2, Array3, Array4, CowArray, Ix2};
use rayon::prelude::*;

use super::{Gradients, Inputs};
use crate::Error;
use crate::linalg::matmul;

/// All gradients of operation B.
///
/// Beside inputs and outputs it holds `[B * S_dec, num_heads * head_dim]`, two `[B * S_enc, num_kv_heads * head_dim]` and one
/// `[B * S_enc, cross_hidden_size]`, never a copy of the gradients before the GQA reduction.
///
/// # Errors
/// As [`Inputs::shape`].
pub fn backward(inputs: &Inputs) -> Result<Gradients, Error> {
    let shape = inputs.shape()?;
    let x_dec = tokens(&inputs.decoder_hidden_states);
    let x_enc = tokens(&inputs.encoder_hidden_states);

    let dq = token_rows(&inputs.grad_query_states, 1);
    let grad_q_weight = matmul(&dq.t(), &x_dec);
    let grad_dec = matmul(&dq, &inputs.q_weight);
    drop(dq);

    let dk = token_rows(&inputs.grad_key_states, shape.groups());
    let grad_k_weight = matmul(&dk.t(), &x_enc);
    let grad_enc = matmul(&dk, &inputs.k_weight);
    drop(dk);

    let dv = token_rows(&inputs.grad_value_states, shape.groups());
    let grad_v_weight = matmul(&dv.t(), &x_enc);
    let grad_enc = grad_enc + matmul(&dv, &inputs.v_weight);

    Ok(Gradients {
        grad_decoder_hidden_states: batches(grad_dec, &inputs.decoder_hidden_states),
        grad_encoder_hidden_states: batches(grad_enc, &inputs.encoder_hidden_states),
        grad_q_weight,
        grad_k_weight,
        grad_v_weight,
    })
}

/// `[B, num_heads, S, head_dim]` as token rows `[B * S, num_heads / groups * head_dim]`, each run of `groups` heads summed.
fn token_rows(grad: &Array4<f32>, groups: usize) -> Array2<f32> {
    let (batch_size, num_heads, seq_len, head_dim) = grad.dim();
    let width = num_heads / groups * head_dim;
    let mut rows = Array2::zeros((batch_size * seq_len, width));
    if rows.is_empty() {
        return rows;
    }
    let grad = grad.as_standard_layout();
    let heads: &[f32] = grad.as_slice().unwrap_or_default();
    let head_of = |b: usize, h: usize, s: usize| &heads[((b * num_heads + h) * seq_len + s) * head_dim..][..head_dim];
    let rows_flat = rows.as_slice_mut().unwrap_or_default();
    rows_flat.par_chunks_exact_mut(width).enumerate().for_each(|(t, row)| {
        let (b, s) = (t / seq_len, t % seq_len);
        for (kv_head, sum) in row.chunks_exact_mut(head_dim).enumerate() {
            sum.copy_from_slice(head_of(b, kv_head * groups, s));
            for h in kv_head * groups + 1..(kv_head + 1) * groups {
                sum.iter_mut().zip(head_of(b, h, s)).for_each(|(sum, x)| *sum += x);
            }
        }
    });
    rows
}

/// `[B, S, width]` as token rows `[B * S, width]`.
fn tokens(x: &Array3<f32>) -> CowArray<'_, f32, Ix2> {
    let (batch_size, seq_len, width) = x.dim();
    x.to_shape((batch_size * seq_len, width)).expect("the same number of elements")
}

/// Token rows `[B * S, width]` under the extents of `like`, `[B, S, width]`.
fn batches(rows: Array2<f32>, like: &Array3<f32>) -> Array3<f32> {
    rows.into_shape_with_order(like.dim()).expect("the same number of elements")
}
