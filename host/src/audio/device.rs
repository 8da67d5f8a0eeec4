//! Tensors of operation A in device memory (bf16).
use half::bf16;

use super::{Gradients, HEAD_DIM, Inputs, Shape};
use crate::CuSeqlens;
use crate::Error;
use crate::device_tensors::device_tensors;
use crate::gpu::Stream;

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
    vectors {
        /// `[num_chunks + 1]` of the plan, int32: chunk offsets, read by the kernels and not before. They follow the rules of
        /// [`CuSeqlens`](crate::CuSeqlens) and stay inside the plan's [`Capacity`](super::Capacity): where there are fewer chunks, the rest repeats
        /// the last offset (empty chunks).
        cu_seqlens: i32 = |inputs| inputs.cu_seqlens.offsets();
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

impl InputBuffers {
    /// Replaces the chunk offsets once the work that is in `stream` now has ended; done when this returns. Work that was captured with these
    /// buffers reads the new ones from then on. `cu_seqlens` may have fewer chunks than the buffers were made with: the others are empty.
    ///
    /// # Errors
    /// [`Error::Shape`] if it has more chunks, or is for another number of rows; [`Error::Gpu`].
    pub fn set_cu_seqlens(&mut self, stream: &Stream, cu_seqlens: &CuSeqlens) -> Result<(), Error> {
        self.shape.check_rows_of(cu_seqlens)?;
        let cu_seqlens = cu_seqlens.padded(self.cu_seqlens.len() - 1)?;
        Ok(self.cu_seqlens.copy_from_slice(stream, cu_seqlens.offsets())?)
    }
}
