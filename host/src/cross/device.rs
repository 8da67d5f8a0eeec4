//! Tensors of operation B in device memory (fp32).
use super::{Gradients, Inputs, Shape};
use crate::Error;
use crate::device_tensors::device_tensors;

device_tensors! {
    element f32;
    inputs {
        /// `[B, num_heads, S_dec, head_dim]`.
        grad_query_states = |s| (s.batch_size, s.num_heads, s.seq_len_dec, s.head_dim);
        /// `[B, num_heads, S_enc, head_dim]`.
        grad_key_states = |s| (s.batch_size, s.num_heads, s.seq_len_enc, s.head_dim);
        /// `[B, num_heads, S_enc, head_dim]`.
        grad_value_states = |s| (s.batch_size, s.num_heads, s.seq_len_enc, s.head_dim);
        /// `[B, S_dec, hidden_size]`.
        decoder_hidden_states = |s| (s.batch_size, s.seq_len_dec, s.hidden_size);
        /// `[B, S_enc, cross_hidden_size]`.
        encoder_hidden_states = |s| (s.batch_size, s.seq_len_enc, s.cross_hidden_size);
        /// `[num_heads * head_dim, hidden_size]`.
        q_weight = |s| (s.q_out_dim(), s.hidden_size);
        /// `[num_kv_heads * head_dim, cross_hidden_size]`.
        k_weight = |s| (s.kv_out_dim(), s.cross_hidden_size);
        /// `[num_kv_heads * head_dim, cross_hidden_size]`.
        v_weight = |s| (s.kv_out_dim(), s.cross_hidden_size);
    }
    vectors {}
    gradients {
        /// `[B, S_dec, hidden_size]`.
        grad_decoder_hidden_states = |s| (s.batch_size, s.seq_len_dec, s.hidden_size);
        /// `[B, S_enc, cross_hidden_size]`.
        grad_encoder_hidden_states = |s| (s.batch_size, s.seq_len_enc, s.cross_hidden_size);
        /// `[num_heads * head_dim, hidden_size]`.
        grad_q_weight = |s| (s.q_out_dim(), s.hidden_size);
        /// `[num_kv_heads * head_dim, cross_hidden_size]`.
        grad_k_weight = |s| (s.kv_out_dim(), s.cross_hidden_size);
        /// `[num_kv_heads * head_dim, cross_hidden_size]`.
        grad_v_weight = |s| (s.kv_out_dim(), s.cross_hidden_size);
    }
}
