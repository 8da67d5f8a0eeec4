//! Tensors of operation A in device memory (bf16).
use half::bf16;

use super::{Gradients, HEAD_DIM, Inputs, Shape};
use crate::Error;
use crate::device_tensors::device_tensors;

device_tensors! {
    element bf16;
    inputs {
        /// `[T, D]`.
        grad_output = |s| (s.total_seq_len, s.d_model());
        /// `[T, D]`.
        hidden_states = |s| (s.total_seq_len, s.d_model());
        /// `[1, H, T, 64]`.
        query_states = |s| (1, s.num_heads, s.total_seq_len, HEAD_DIM);
        /// `[1, H, T, 64]`.
        key_states = |s| (1, s.num_heads, s.total_seq_len, HEAD_DIM);
        /// `[1, H, T, 64]`.
        value_states = |s| (1, s.num_heads, s.total_seq_len, HEAD_DIM);
        /// `[D, D]` (out, in).
        q_weight = |s| (s.d_model(), s.d_model());
        /// `[D, D]` (out, in).
        k_weight = |s| (s.d_model(), s.d_model());
        /// `[D, D]` (out, in).
        v_weight = |s| (s.d_model(), s.d_model());
        /// `[D, D]` (out, in).
        out_weight = |s| (s.d_model(), s.d_model());
    }
    gradients {
        /// `[T, D]`.
        grad_hidden_states = |s| (s.total_seq_len, s.d_model());
        /// `[D, D]`.
        grad_q_weight = |s| (s.d_model(), s.d_model());
        /// `[D]`.
        grad_q_bias = |s| s.d_model();
        /// `[D, D]`.
        grad_k_weight = |s| (s.d_model(), s.d_model());
        /// `[D]`.
        grad_k_bias = |s| s.d_model();
        /// `[D, D]`.
        grad_v_weight = |s| (s.d_model(), s.d_model());
        /// `[D]`.
        grad_v_bias = |s| s.d_model();
        /// `[D, D]`.
        grad_out_weight = |s| (s.d_model(), s.d_model());
        /// `[D]`.
        grad_out_bias = |s| s.d_model();
    }
}
