//! Operation A as it is usually composed of bf16 products: what its accuracy is measured against.
//!
//! Products take bf16 operands and accumulate in f32. The gradient at the attention output, O, P, dS, dQ, dK and dV are rounded to bf16
//! where they are stored or become an operand; rowsum(P * dP) is taken as rowsum(dO * O) from the rounded tensors, and bias sums from the
//! rounded dQ, dK, dV.

use attn_backward::audio;
use half::bf16;
use ndarray::{Array, Array1, Array2, ArrayBase, Axis, Data, Dimension, s};

/// Query rows whose probabilities are held at once.
const QUERY_BLOCK: usize = 512;

/// All gradients.
///
/// # Panics
/// If the inputs do not fit each other.
pub fn backward(inputs: &audio::Inputs) -> audio::Gradients {
    let shape = inputs.shape().expect("inputs that fit");
    let end = inputs.cu_seqlens.padding().start;
    let grad_output = f32_of(&inputs.grad_output.slice(s![..end, ..]));
    let hidden_states = f32_of(&inputs.hidden_states.slice(s![..end, ..]));
    let [q_weight, k_weight, v_weight, out_weight] =
        [&inputs.q_weight, &inputs.k_weight, &inputs.v_weight, &inputs.out_weight].map(f32_of);
    let d_attn = rounded(grad_output.dot(&out_weight));
    let [mut o, mut dq, mut dk, mut dv] = [(); 4].map(|()| Array2::<f32>::zeros((end, shape.d_model())));
    for head in 0..shape.num_heads {
        let columns = head * audio::HEAD_DIM..(head + 1) * audio::HEAD_DIM;
        for chunk in inputs.cu_seqlens.chunks() {
            let [k, v]: [Array2<f32>; 2] = [&inputs.key_states, &inputs.value_states]
                .map(|states| f32_of(&states.slice(s![0, head, chunk.clone(), ..])));
            for first in chunk.clone().step_by(QUERY_BLOCK) {
                let queries = first..chunk.end.min(first + QUERY_BLOCK);
                let q: Array2<f32> = f32_of(&inputs.query_states.slice(s![0, head, queries.clone(), ..]));
                let da = d_attn.slice(s![queries.clone(), columns.clone()]);
                let p = softmax(q.dot(&k.t()) * shape.scale);
                let p_operand = rounded(p.clone());
                let o_block = rounded(p_operand.dot(&v));
                let delta = (&da * &o_block).sum_axis(Axis(1)).insert_axis(Axis(1));
                let ds = rounded(&p * &(da.dot(&v.t()) - delta));
                o.slice_mut(s![queries.clone(), columns.clone()]).assign(&o_block);
                dq.slice_mut(s![queries.clone(), columns.clone()]).assign(&(ds.dot(&k) * shape.scale));
                dk.slice_mut(s![chunk.clone(), columns.clone()]).scaled_add(shape.scale, &ds.t().dot(&q));
                dv.slice_mut(s![chunk.clone(), columns.clone()]).scaled_add(1.0, &p_operand.t().dot(&da));
            }
        }
    }
    let [dq, dk, dv] = [dq, dk, dv].map(rounded);
    let mut grad_hidden_states = Array2::from_elem((shape.total_seq_len, shape.d_model()), bf16::ZERO);
    let grad_hidden = dq.dot(&q_weight) + dk.dot(&k_weight) + dv.dot(&v_weight);
    grad_hidden_states.slice_mut(s![..end, ..]).assign(&grad_hidden.mapv(bf16::from_f32));
    let weight = |d: &Array2<f32>, x: &Array2<f32>| d.t().dot(x).mapv(bf16::from_f32);
    audio::Gradients {
        grad_hidden_states,
        grad_q_weight: weight(&dq, &hidden_states),
        grad_q_bias: column_sums(&dq),
        grad_k_weight: weight(&dk, &hidden_states),
        grad_k_bias: column_sums(&dk),
        grad_v_weight: weight(&dv, &hidden_states),
        grad_v_bias: column_sums(&dv),
        grad_out_weight: weight(&grad_output, &o),
        grad_out_bias: column_sums(&grad_output),
    }
}

fn f32_of<S: Data<Elem = bf16>, D: Dimension>(x: &ArrayBase<S, D>) -> Array<f32, D> {
    x.mapv(f32::from)
}

/// Rounded to bf16, still as f32.
fn rounded(x: Array2<f32>) -> Array2<f32> {
    x.mapv_into(|x| bf16::from_f32(x).to_f32())
}

fn column_sums(x: &Array2<f32>) -> Array1<bf16> {
    x.sum_axis(Axis(0)).mapv(bf16::from_f32)
}

fn softmax(logits: Array2<f32>) -> Array2<f32> {
    let max = logits.fold_axis(Axis(1), f32::NEG_INFINITY, |a, b| a.max(*b)).insert_axis(Axis(1));
    let exp = (logits - max).mapv_into(f32::exp);
    let sum = exp.sum_axis(Axis(1)).insert_axis(Axis(1));
    exp / sum
}
