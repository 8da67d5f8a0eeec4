//! Operation B in f64, line by line as its formulas stand: what implementations are checked against.

use ndarray::parallel::prelude::*;
use ndarray::{Array, Array2, Array4, Dimension, s};

use super::{Gradients, Inputs};
use crate::Error;
use crate::linalg::matmul;

/// All gradients of operation B, computed in f64 from the f32 inputs and left unrounded.
///
/// # Errors
/// As [`Inputs::shape`].
pub fn backward(inputs: &Inputs) -> Result<Gradients<f64>, Error> {
    let shape = inputs.shape()?;
    let dq = summed_groups(&inputs.grad_query_states, shape.num_heads);
    let dk = summed_groups(&inputs.grad_key_states, shape.num_kv_heads);
    let dv = summed_groups(&inputs.grad_value_states, shape.num_kv_heads);
    let x_dec = to_f64(&inputs.decoder_hidden_states);
    let x_enc = to_f64(&inputs.encoder_hidden_states);
    let [q_weight, k_weight, v_weight] = [&inputs.q_weight, &inputs.k_weight, &inputs.v_weight].map(to_f64);

    let grad_dec = matmul(&dq, &q_weight);
    let grad_enc = matmul(&dk, &k_weight) + matmul(&dv, &v_weight);
    let (x_dec, x_enc) = (
        reshaped(x_dec, (shape.rows_dec(), shape.hidden_size)),
        reshaped(x_enc, (shape.rows_enc(), shape.cross_hidden_size)),
    );
    Ok(Gradients {
        grad_decoder_hidden_states: reshaped(grad_dec, inputs.decoder_hidden_states.dim()),
        grad_encoder_hidden_states: reshaped(grad_enc, inputs.encoder_hidden_states.dim()),
        grad_q_weight: matmul(&dq.t(), &x_dec),
        grad_k_weight: matmul(&dk.t(), &x_enc),
        grad_v_weight: matmul(&dv.t(), &x_enc),
    })
}

/// `[B, num_heads, S, head_dim] -> [B * S, kv_heads * head_dim]`: query head `h` is added to head `h / (num_heads / kv_heads)`.
fn summed_groups(grad: &Array4<f32>, kv_heads: usize) -> Array2<f64> {
    let (batch_size, num_heads, seq_len, head_dim) = grad.dim();
    let groups = num_heads / kv_heads;
    let mut sums = Array2::zeros((batch_size * seq_len, kv_heads * head_dim));
    sums.outer_iter_mut().into_par_iter().enumerate().for_each(|(row, mut sums)| {
        let (b, s) = (row / seq_len, row % seq_len);
        for h in 0..num_heads {
            let first = h / groups * head_dim;
            sums.slice_mut(s![first..first + head_dim])
                .zip_mut_with(&grad.slice(s![b, h, s, ..]), |sum, &x| *sum += f64::from(x));
        }
    });
    sums
}

fn to_f64<D: Dimension>(x: &Array<f32, D>) -> Array<f64, D> {
    let mut wide = Array::zeros(x.raw_dim());
    ndarray::Zip::from(&mut wide).and(x).par_for_each(|wide, &x| *wide = f64::from(x));
    wide
}

/// The same elements in row-major order under other extents.
fn reshaped<D: Dimension, S: ndarray::IntoDimension>(x: Array<f64, D>, shape: S) -> Array<f64, S::Dim> {
    x.into_shape_with_order(shape).expect("extents were checked, and fresh arrays are row-major")
}
