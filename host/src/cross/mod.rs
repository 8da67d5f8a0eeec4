//! Operation B: cross-attention QKV projection with GQA repeat, backward (fp32 in and out).
//!
//! `groups = num_heads / num_kv_heads`; row `t = b * seq_len + s`:
//! ```text
//! dQ[B * S_dec, num_heads * head_dim]        heads moved next to head_dim
//! dK, dV[B * S_enc, num_kv_heads * head_dim] query head h belongs to kv head h / groups; the heads of a group are summed
//! grad_decoder_hidden_states = dQ @ q_weight                    grad_q_weight = dQ^T @ X_dec
//! grad_encoder_hidden_states = dK @ k_weight + dV @ v_weight    grad_k_weight = dK^T @ X_enc    grad_v_weight = dV^T @ X_enc
//! ```
use ndarray::{Array2, Array3, Array4, ArrayViewD};

use crate::gpu::Stream;
use crate::{Device, Error, Target, Workspace};

mod conversion;
pub mod cpu;
mod device;
mod launch;
mod plan;
pub mod reference;
pub mod scales;

pub use device::{DeviceGradients, DeviceInputs, GradientBuffers, InputBuffers};
pub use launch::Backward;
pub use plan::Plan;

/// Sizes of operation B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Batches, may be 0.
    pub batch_size: usize,
    /// Decoder tokens of a batch, may be 0.
    pub seq_len_dec: usize,
    /// Encoder tokens of a batch, may be 0.
    pub seq_len_enc: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// 64, 128 or 256.
    pub head_dim: usize,
    /// Decoder width, a multiple of 8.
    pub hidden_size: usize,
    /// Encoder width, a multiple of 8.
    pub cross_hidden_size: usize,
}

impl Shape {
    /// Decoder rows, `batch_size * seq_len_dec`.
    pub fn rows_dec(&self) -> usize {
        self.batch_size * self.seq_len_dec
    }
    /// Encoder rows, `batch_size * seq_len_enc`.
    pub fn rows_enc(&self) -> usize {
        self.batch_size * self.seq_len_enc
    }
    /// Width of dQ, `num_heads * head_dim`.
    pub fn q_out_dim(&self) -> usize {
        self.num_heads * self.head_dim
    }
    /// Width of the reduced dK and of dV, `num_kv_heads * head_dim`.
    pub fn kv_out_dim(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }
    /// Query heads of a key/value head.
    pub fn groups(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Checks what the operation supports.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the first size that is not supported and what would be.
    pub fn check(&self) -> Result<(), Error> {
        let unsupported = |argument, value: usize, supported: String| {
            Err(Error::Unsupported { argument, value: value.to_string(), supported })
        };
        if self.num_heads == 0 {
            return unsupported("num_heads", 0, "at least 1".into());
        }
        if self.num_kv_heads == 0 || !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let rule = format!("a divisor of num_heads = {}", self.num_heads);
            return unsupported("num_kv_heads", self.num_kv_heads, rule);
        }
        if ![64, 128, 256].contains(&self.head_dim) {
            return unsupported("head_dim", self.head_dim, "64, 128 or 256".into());
        }
        for (name, value) in [("hidden_size", self.hidden_size), ("cross_hidden_size", self.cross_hidden_size)] {
            if value == 0 || !value.is_multiple_of(8) {
                return unsupported(name, value, "a positive multiple of 8".into());
            }
        }
        // Kernels count rows and columns in 32 bits; the products below must not overflow either.
        let (rows, columns) = (i32::MAX as usize, 1 << 24);
        let limits = [
            ("hidden_size", Some(self.hidden_size), columns),
            ("cross_hidden_size", Some(self.cross_hidden_size), columns),
            ("num_heads * head_dim", self.num_heads.checked_mul(self.head_dim), columns),
            ("batch_size * seq_len_dec", self.batch_size.checked_mul(self.seq_len_dec), rows),
            ("batch_size * seq_len_enc", self.batch_size.checked_mul(self.seq_len_enc), rows),
        ];
        for (argument, product, most) in limits {
            if product.is_none_or(|product| product > most) {
                let value = product.map_or("more than 2^64".into(), |product| product.to_string());
                return Err(Error::Unsupported { argument, value, supported: format!("at most {most}") });
            }
        }
        Ok(())
    }
}

/// Arithmetic of operation B on a GPU; always chosen by the caller and echoed in results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 11-bit operands (fp16 scaled by powers of two), one product, fp32 accumulation: TF32's accuracy.
    #[default]
    Fast,
    /// 22-bit operands (two scaled fp16 parts), three products, fp32 accumulation with promoted partial sums: near fp32.
    High,
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Precision::Fast => "fast",
            Precision::High => "high",
        })
    }
}

/// Inputs of operation B in host memory; all row-major.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// `[B, num_heads, S_dec, head_dim]`.
    pub grad_query_states: Array4<f32>,
    /// `[B, num_heads, S_enc, head_dim]`, after the GQA repeat.
    pub grad_key_states: Array4<f32>,
    /// `[B, num_heads, S_enc, head_dim]`, after the GQA repeat.
    pub grad_value_states: Array4<f32>,
    /// `[B, S_dec, hidden_size]`.
    pub decoder_hidden_states: Array3<f32>,
    /// `[B, S_enc, cross_hidden_size]`.
    pub encoder_hidden_states: Array3<f32>,
    /// `[num_heads * head_dim, hidden_size]`.
    pub q_weight: Array2<f32>,
    /// `[num_kv_heads * head_dim, cross_hidden_size]`.
    pub k_weight: Array2<f32>,
    /// `[num_kv_heads * head_dim, cross_hidden_size]`.
    pub v_weight: Array2<f32>,
    /// Key/value heads (the tensors alone do not tell them from head_dim).
    pub num_kv_heads: usize,
}

impl Inputs {
    /// Checks every tensor against the shape that `grad_query_states`, the hidden states and `num_kv_heads` imply, and returns it.
    ///
    /// # Errors
    /// As [`Shape::check`], and [`Error::Shape`] naming the first tensor that differs.
    pub fn shape(&self) -> Result<Shape, Error> {
        let (batch_size, num_heads, seq_len_dec, head_dim) = self.grad_query_states.dim();
        let shape = Shape {
            batch_size,
            seq_len_dec,
            seq_len_enc: self.encoder_hidden_states.dim().1,
            num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim,
            hidden_size: self.decoder_hidden_states.dim().2,
            cross_hidden_size: self.encoder_hidden_states.dim().2,
        };
        shape.check()?;
        let enc_heads = [batch_size, num_heads, shape.seq_len_enc, head_dim];
        let kv_weight = [shape.kv_out_dim(), shape.cross_hidden_size];
        let check = Error::check_shape;
        check("grad_key_states", &enc_heads, self.grad_key_states.shape())?;
        check("grad_value_states", &enc_heads, self.grad_value_states.shape())?;
        let dec = [batch_size, seq_len_dec, shape.hidden_size];
        check("decoder_hidden_states", &dec, self.decoder_hidden_states.shape())?;
        let enc = [batch_size, shape.seq_len_enc, shape.cross_hidden_size];
        check("encoder_hidden_states", &enc, self.encoder_hidden_states.shape())?;
        check("q_weight", &[shape.q_out_dim(), shape.hidden_size], self.q_weight.shape())?;
        check("k_weight", &kv_weight, self.k_weight.shape())?;
        check("v_weight", &kv_weight, self.v_weight.shape())?;
        Ok(shape)
    }
}

/// Gradients of operation B in host memory, in the operation's order: f32 from an implementation, f64 from the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<T = f32> {
    /// `[B, S_dec, hidden_size]`.
    pub grad_decoder_hidden_states: Array3<T>,
    /// `[B, S_enc, cross_hidden_size]`.
    pub grad_encoder_hidden_states: Array3<T>,
    /// `[num_heads * head_dim, hidden_size]`.
    pub grad_q_weight: Array2<T>,
    /// `[num_kv_heads * head_dim, cross_hidden_size]`.
    pub grad_k_weight: Array2<T>,
    /// `[num_kv_heads * head_dim, cross_hidden_size]`.
    pub grad_v_weight: Array2<T>,
}

impl<T> Gradients<T> {
    /// Name and values of every gradient, in the operation's order.
    pub fn tensors(&self) -> [(&'static str, ArrayViewD<'_, T>); 5] {
        [
            ("grad_decoder_hidden_states", self.grad_decoder_hidden_states.view().into_dyn()),
            ("grad_encoder_hidden_states", self.grad_encoder_hidden_states.view().into_dyn()),
            ("grad_q_weight", self.grad_q_weight.view().into_dyn()),
            ("grad_k_weight", self.grad_k_weight.view().into_dyn()),
            ("grad_v_weight", self.grad_v_weight.view().into_dyn()),
        ]
    }
}

/// Floating-point operations of the backward pass: two products of each projection.
pub fn flops(shape: &Shape) -> f64 {
    let product = |rows: usize, columns: usize, depth: usize| rows as f64 * columns as f64 * depth as f64;
    let dec = product(shape.rows_dec(), shape.q_out_dim(), shape.hidden_size);
    let enc = product(shape.rows_enc(), 2 * shape.kv_out_dim(), shape.cross_hidden_size);
    4.0 * (dec + enc)
}

/// Bytes that must move through device memory at least: every input read once, every output written once.
pub fn bytes(shape: &Shape) -> f64 {
    let dec = shape.rows_dec() as f64 * (shape.q_out_dim() + 2 * shape.hidden_size) as f64;
    let enc = shape.rows_enc() as f64 * (2 * (shape.q_out_dim() + shape.cross_hidden_size)) as f64;
    let weights = shape.q_out_dim() as f64 * shape.hidden_size as f64
        + 2.0 * shape.kv_out_dim() as f64 * shape.cross_hidden_size as f64;
    4.0 * (dec + enc + 2.0 * weights)
}

/// All gradients of operation B, on any device, from host memory to host memory.
///
/// The CPU computes in f32 whatever `precision` says, which is within the error bound of both.
///
/// # Errors
/// As [`Inputs::shape`]; [`Error::Gpu`].
pub fn backward(device: &Device, inputs: &Inputs, precision: Precision) -> Result<Gradients, Error> {
    let Device::Gpu { gpu, module } = device else { return cpu::backward(inputs) };
    let shape = inputs.shape()?;
    let operation = Backward::new(gpu, Plan::new(&shape, precision, &Target::of(gpu, *module))?)?;
    let stream = Stream::new(gpu)?;
    let buffers = InputBuffers::upload(gpu, inputs)?;
    let mut gradients = GradientBuffers::allocate(gpu, &stream, &shape)?;
    let mut workspace = Workspace::allocate(gpu, operation.plan().workspace().bytes())?;
    operation.run(&stream, &buffers.views()?, &mut gradients.views()?, &mut workspace)?;
    gradients.download(&stream)
}
