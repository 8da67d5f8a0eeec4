//! Inputs of fixed shapes.

use std::ops::Range;

use attn_backward::suite::{audio_inputs, cross_inputs};
use attn_backward::{CuSeqlens, audio, cross};
use half::bf16;
use ndarray::s;

/// Standard normal inputs of operation A with these chunks.
pub fn audio_of(seed: u64, num_heads: usize, cu_seqlens: CuSeqlens) -> audio::Inputs {
    let shape = audio::Shape { total_seq_len: cu_seqlens.total_seq_len(), num_heads, scale: 0.125 };
    audio_inputs(seed, shape, cu_seqlens)
}

/// As [`audio_of`], with these offsets and no padding rows.
///
/// # Panics
/// If the offsets break a rule.
pub fn audio_with(seed: u64, num_heads: usize, offsets: &[i32]) -> audio::Inputs {
    let total_seq_len = offsets.last().map_or(0, |&last| last as usize);
    audio_of(seed, num_heads, CuSeqlens::new(offsets, total_seq_len).expect("valid offsets"))
}

/// The inputs' rows `rows` as one chunk.
///
/// # Panics
/// If there are no such rows.
pub fn one_chunk(inputs: &audio::Inputs, rows: Range<usize>) -> audio::Inputs {
    let mut part = inputs.clone();
    part.grad_output = inputs.grad_output.slice(s![rows.clone(), ..]).to_owned();
    part.hidden_states = inputs.hidden_states.slice(s![rows.clone(), ..]).to_owned();
    part.query_states = inputs.query_states.slice(s![.., .., rows.clone(), ..]).to_owned();
    part.key_states = inputs.key_states.slice(s![.., .., rows.clone(), ..]).to_owned();
    part.value_states = inputs.value_states.slice(s![.., .., rows.clone(), ..]).to_owned();
    part.cu_seqlens = CuSeqlens::new(&[0, rows.len() as i32], rows.len()).expect("one chunk");
    part
}

/// Every row from `first` on set to `value`, in all five tensors with a row for each token.
pub fn fill_rows_from(inputs: &mut audio::Inputs, first: usize, value: bf16) {
    inputs.grad_output.slice_mut(s![first.., ..]).fill(value);
    inputs.hidden_states.slice_mut(s![first.., ..]).fill(value);
    for states in [&mut inputs.query_states, &mut inputs.key_states, &mut inputs.value_states] {
        states.slice_mut(s![.., .., first.., ..]).fill(value);
    }
}

/// The tensors with a row for each token, times `factor`.
pub fn amplify(inputs: &mut audio::Inputs, factor: f32) {
    let scaled = |x: &bf16| bf16::from_f32(x.to_f32() * factor);
    for tokens in [&mut inputs.grad_output, &mut inputs.hidden_states] {
        tokens.mapv_inplace(|x| scaled(&x));
    }
    for states in [&mut inputs.query_states, &mut inputs.key_states, &mut inputs.value_states] {
        states.mapv_inplace(|x| scaled(&x));
    }
}

/// A small shape of operation B: 4 query heads on 2 key/value heads of 64.
pub fn cross_shape(batch_size: usize, seq_len_dec: usize, seq_len_enc: usize) -> cross::Shape {
    cross::Shape {
        batch_size,
        seq_len_dec,
        seq_len_enc,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        hidden_size: 96,
        cross_hidden_size: 128,
    }
}

/// Normal inputs of operation B of this shape.
pub fn cross_of(seed: u64, shape: cross::Shape) -> cross::Inputs {
    cross_inputs(seed, shape)
}
