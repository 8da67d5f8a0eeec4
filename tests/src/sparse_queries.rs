//! Operation A in f64 where grad_output is zero in all rows but a few: a reference of a long chunk that costs O(chunk_len).

use attn_backward::audio;
use half::bf16;
use ndarray::{Array, Array1, Array2, ArrayBase, Axis, Data, Dimension, s};

/// All gradients of one chunk that holds all rows. Rows of grad_output other than `rows` are zero, so that dS and the gradient at the
/// attention output are zero in them, and only these rows' probabilities are needed.
///
/// # Panics
/// If the inputs do not fit each other or have another row with a gradient.
pub fn backward(inputs: &audio::Inputs, rows: &[usize]) -> audio::Gradients<f64> {
    let shape = inputs.shape().expect("inputs that fit");
    assert_eq!(inputs.cu_seqlens.offsets(), [0, shape.total_seq_len as i32]);
    let silent = |row: usize| inputs.grad_output.row(row).iter().all(|x| *x == bf16::ZERO);
    assert!((0..shape.total_seq_len).all(|row| rows.contains(&row) || silent(row)));

    let scale = f64::from(shape.scale);
    let grad_output = f64_of(&inputs.grad_output.select(Axis(0), rows));
    let d_attn = grad_output.dot(&f64_of(&inputs.out_weight));
    let mut o = Array2::<f64>::zeros((rows.len(), shape.d_model()));
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| Array2::<f64>::zeros((shape.total_seq_len, shape.d_model())));
    for head in 0..shape.num_heads {
        let columns = head * audio::HEAD_DIM..(head + 1) * audio::HEAD_DIM;
        let [q, k, v]: [Array2<f64>; 3] = [&inputs.query_states, &inputs.key_states, &inputs.value_states]
            .map(|states| f64_of(&states.slice(s![0, head, .., ..])));
        for (index, &row) in rows.iter().enumerate() {
            let (q, da) = (q.row(row), d_attn.slice(s![index, columns.clone()]));
            let logits = k.dot(&q) * scale;
            let max = logits.fold(f64::NEG_INFINITY, |a, &b| a.max(b));
            let exp = logits.mapv(|logit| (logit - max).exp());
            let p = &exp / exp.sum();
            let dp = v.dot(&da);
            let ds = &p * &(&dp - p.dot(&dp));
            o.slice_mut(s![index, columns.clone()]).assign(&p.dot(&v));
            dq.slice_mut(s![row, columns.clone()]).assign(&(ds.dot(&k) * scale));
            dk.slice_mut(s![.., columns.clone()]).scaled_add(scale, &outer(&ds, &q.to_owned()));
            dv.slice_mut(s![.., columns.clone()]).scaled_add(1.0, &outer(&p, &da.to_owned()));
        }
    }
    let hidden_states = f64_of(&inputs.hidden_states);
    let [q_weight, k_weight, v_weight] = [&inputs.q_weight, &inputs.k_weight, &inputs.v_weight].map(f64_of);
    let sum = |x: &Array2<f64>| x.sum_axis(Axis(0));
    audio::Gradients {
        grad_hidden_states: dq.dot(&q_weight) + dk.dot(&k_weight) + dv.dot(&v_weight),
        grad_q_weight: dq.t().dot(&hidden_states),
        grad_q_bias: sum(&dq),
        grad_k_weight: dk.t().dot(&hidden_states),
        grad_k_bias: sum(&dk),
        grad_v_weight: dv.t().dot(&hidden_states),
        grad_v_bias: sum(&dv),
        grad_out_weight: grad_output.t().dot(&o),
        grad_out_bias: sum(&grad_output),
    }
}

fn outer(column: &Array1<f64>, row: &Array1<f64>) -> Array2<f64> {
    column.view().insert_axis(Axis(1)).dot(&row.view().insert_axis(Axis(0)))
}

fn f64_of<S: Data<Elem = bf16>, D: Dimension>(x: &ArrayBase<S, D>) -> Array<f64, D> {
    x.mapv(f64::from)
}
