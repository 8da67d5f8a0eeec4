//! Operation A: variable-length, chunked audio-encoder attention, backward (bf16).
//!
//! With `D = num_heads * 64` and `T = total_seq_len` tokens cut into chunks by `cu_seqlens`, per chunk and head:
//! ```text
//! dA = grad_output @ out_weight       P  = softmax(scale * Q K^T)       O  = P V
//! dV = P^T dA      dP = dA V^T        dS = P * (dP - rowsum(P * dP))    dQ = scale * dS K      dK = scale * dS^T Q
//! grad_hidden_states = dQ @ q_weight + dK @ k_weight + dV @ v_weight
//! grad_{q,k,v}_weight = d{Q,K,V}^T @ hidden_states                      grad_out_weight = grad_output^T @ O
//! grad_{q,k,v}_bias = colsum(d{Q,K,V})                                  grad_out_bias = colsum(grad_output)
//! ```
use half::bf16;
use ndarray::{Array1, Array2, Array4, ArrayViewD};

use crate::cu_seqlens::check_total_seq_len;
use crate::gpu::Stream;
use crate::{CuSeqlens, Device, Error, Target, Workspace};

mod bias_sums;
mod capacity;
pub mod cpu;
mod device;
mod flash;
mod fused;
mod launch;
mod plan;
pub mod reference;
mod riders;
mod tiles;

pub use capacity::Capacity;
pub use device::{DeviceGradients, DeviceInputs, GradientBuffers, InputBuffers};
pub use launch::Backward;
pub use plan::Plan;
pub use tiles::AttentionTiles;

/// The one head_dim that operation A supports.
pub const HEAD_DIM: usize = 64;

/// Sizes of operation A.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Rows of the packed tensors, padding included.
    pub total_seq_len: usize,
    /// Heads; `d_model = num_heads * 64`.
    pub num_heads: usize,
    /// Factor of the logits, usually `1 / sqrt(head_dim)`; finite and greater than 0.
    pub scale: f32,
}

impl Shape {
    /// Model width, `num_heads * 64`.
    pub fn d_model(&self) -> usize {
        self.num_heads * HEAD_DIM
    }

    /// Checks what the operation supports.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for no heads, a scale that is not finite and positive, or more rows than `i32::MAX`.
    pub fn check(&self) -> Result<(), Error> {
        let unsupported = |argument, value: String, supported: &str| {
            Err(Error::Unsupported { argument, value, supported: supported.into() })
        };
        if self.num_heads == 0 {
            return unsupported("num_heads", "0".into(), "at least 1");
        }
        if !(self.scale.is_finite() && self.scale > 0.0) {
            return unsupported("scale", self.scale.to_string(), "finite and greater than 0");
        }
        check_total_seq_len(self.total_seq_len)
    }

    /// [`Error::Shape`] unless `cu_seqlens` was made for as many rows.
    pub(crate) fn check_rows_of(&self, cu_seqlens: &CuSeqlens) -> Result<(), Error> {
        Error::check_shape("rows that cu_seqlens was made for", &[self.total_seq_len], &[cu_seqlens.total_seq_len()])
    }
}

/// Inputs of operation A in host memory; all row-major.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// `[T, D]`, gradient of the block's output.
    pub grad_output: Array2<bf16>,
    /// `[T, D]`, input of the q, k, v projections.
    pub hidden_states: Array2<bf16>,
    /// `[1, H, T, 64]`, saved by the forward pass, bias included.
    pub query_states: Array4<bf16>,
    /// `[1, H, T, 64]`, saved by the forward pass, bias included.
    pub key_states: Array4<bf16>,
    /// `[1, H, T, 64]`, saved by the forward pass, bias included.
    pub value_states: Array4<bf16>,
    /// Chunk offsets.
    pub cu_seqlens: CuSeqlens,
    /// `[D, D]` (out, in).
    pub q_weight: Array2<bf16>,
    /// `[D, D]` (out, in).
    pub k_weight: Array2<bf16>,
    /// `[D, D]` (out, in).
    pub v_weight: Array2<bf16>,
    /// `[D, D]` (out, in).
    pub out_weight: Array2<bf16>,
    /// Factor of the logits, usually `1 / sqrt(64)`; finite and greater than 0.
    pub scale: f32,
}

impl Inputs {
    /// Checks every tensor against the shape that `query_states` and `cu_seqlens` imply, and returns it.
    ///
    /// # Errors
    /// [`Error::Shape`] naming the first tensor that differs; [`Error::Unsupported`] for a head_dim other than 64, a batch
    /// other than 1, no heads, or a scale that is not finite and positive.
    pub fn shape(&self) -> Result<Shape, Error> {
        let (one, num_heads, total_seq_len, head_dim) = self.query_states.dim();
        if one != 1 {
            let supported = "1, sequences are packed along the tokens".into();
            return Err(Error::Unsupported { argument: "batch of query_states", value: one.to_string(), supported });
        }
        if head_dim != HEAD_DIM {
            let supported = HEAD_DIM.to_string();
            return Err(Error::Unsupported { argument: "head_dim", value: head_dim.to_string(), supported });
        }
        let shape = Shape { total_seq_len, num_heads, scale: self.scale };
        shape.check()?;
        shape.check_rows_of(&self.cu_seqlens)?;
        let d_model = shape.d_model();
        let heads = [1, num_heads, total_seq_len, HEAD_DIM];
        Error::check_shape("key_states", &heads, self.key_states.shape())?;
        Error::check_shape("value_states", &heads, self.value_states.shape())?;
        for (name, tensor) in [("grad_output", &self.grad_output), ("hidden_states", &self.hidden_states)] {
            Error::check_shape(name, &[total_seq_len, d_model], tensor.shape())?;
        }
        let weights = [
            ("q_weight", &self.q_weight),
            ("k_weight", &self.k_weight),
            ("v_weight", &self.v_weight),
            ("out_weight", &self.out_weight),
        ];
        for (name, tensor) in weights {
            Error::check_shape(name, &[d_model, d_model], tensor.shape())?;
        }
        Ok(shape)
    }
}

/// Gradients of operation A in host memory, in the operation's order: bf16 from an implementation, f64 from the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<T = bf16> {
    /// `[T, D]`.
    pub grad_hidden_states: Array2<T>,
    /// `[D, D]`.
    pub grad_q_weight: Array2<T>,
    /// `[D]`.
    pub grad_q_bias: Array1<T>,
    /// `[D, D]`.
    pub grad_k_weight: Array2<T>,
    /// `[D]`.
    pub grad_k_bias: Array1<T>,
    /// `[D, D]`.
    pub grad_v_weight: Array2<T>,
    /// `[D]`.
    pub grad_v_bias: Array1<T>,
    /// `[D, D]`.
    pub grad_out_weight: Array2<T>,
    /// `[D]`.
    pub grad_out_bias: Array1<T>,
}

impl<T> Gradients<T> {
    /// Name and values of every gradient, in the operation's order.
    pub fn tensors(&self) -> [(&'static str, ArrayViewD<'_, T>); 9] {
        [
            ("grad_hidden_states", self.grad_hidden_states.view().into_dyn()),
            ("grad_q_weight", self.grad_q_weight.view().into_dyn()),
            ("grad_q_bias", self.grad_q_bias.view().into_dyn()),
            ("grad_k_weight", self.grad_k_weight.view().into_dyn()),
            ("grad_k_bias", self.grad_k_bias.view().into_dyn()),
            ("grad_v_weight", self.grad_v_weight.view().into_dyn()),
            ("grad_v_bias", self.grad_v_bias.view().into_dyn()),
            ("grad_out_weight", self.grad_out_weight.view().into_dyn()),
            ("grad_out_bias", self.grad_out_bias.view().into_dyn()),
        ]
    }
}

/// All gradients of operation A, on any device, from host memory to host memory.
///
/// # Errors
/// As [`Inputs::shape`]; [`Error::Gpu`].
pub fn backward(device: &Device, inputs: &Inputs) -> Result<Gradients, Error> {
    let Device::Gpu { gpu, module } = device else { return cpu::backward(inputs) };
    let shape = inputs.shape()?;
    let plan = Plan::new(&shape, &inputs.cu_seqlens, &Target::of(gpu, *module))?;
    let operation = Backward::new(gpu, plan)?;
    let stream = Stream::new(gpu)?;
    let buffers = InputBuffers::upload(gpu, inputs)?;
    let mut gradients = GradientBuffers::allocate(gpu, &stream, &shape)?;
    let mut workspace = Workspace::allocate(gpu, operation.plan().workspace().bytes())?;
    operation.run(&stream, &buffers.views()?, &mut gradients.views()?, &mut workspace)?;
    gradients.download(&stream)
}

/// Floating-point operations of the backward pass: `16 T D^2` for the projections and `14 L^2 D` for a chunk of `L` rows.
pub fn flops(shape: &Shape, chunk_lens: impl Iterator<Item = usize>) -> f64 {
    let d_model = shape.d_model() as f64;
    let attention: f64 = chunk_lens.map(|len| 14.0 * (len as f64).powi(2) * d_model).sum();
    16.0 * shape.total_seq_len as f64 * d_model * d_model + attention
}

/// Bytes that must move through device memory at least: every input read once, every output written once.
pub fn bytes(shape: &Shape) -> f64 {
    let d_model = shape.d_model() as f64;
    2.0 * (8.0 * d_model * d_model + 6.0 * shape.total_seq_len as f64 * d_model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flops_follow_the_true_chunk_lengths() {
        let shape = Shape { total_seq_len: 390, num_heads: 20, scale: 0.125 };
        let cu = CuSeqlens::new(&[0, 104, 208, 312, 390], 390).unwrap();
        assert_eq!(flops(&shape, cu.chunk_lens()), 690_493_440.0 + 10_223_616_000.0);
    }
}
