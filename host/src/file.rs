//! Safetensors files of both operations: inputs in, gradients out.
//!
//! Tensors have the names of [`audio::Inputs`], [`cross::Inputs`] and their gradients; other tensors of an input file are ignored.
//! Scalars come from the caller's options or else from the file's metadata (strings): `scale` for operation A, `num_kv_heads` (or
//! `num_key_value_heads`) for operation B. Every refusal is one line naming the file, the tensor, what was expected and what was
//! found.

use std::collections::HashMap;
use std::fmt;
use std::io::Write;
use std::path::Path;

use half::bf16;
use ndarray::{Array1, ArrayViewD};
use num_traits::Float;

use crate::cross::Precision;
use crate::{CuSeqlens, Error, audio, cross};

mod error;
mod reader;
mod writer;

pub use error::FileError;
use reader::TensorFile;
use writer::{Replacement, Stored, write};

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian and are read and written as they lie in memory");

/// Names of operation A's inputs.
const AUDIO_NAMES: &[&str] = &[
    "grad_output",
    "hidden_states",
    "query_states",
    "key_states",
    "value_states",
    "cu_seqlens",
    "q_weight",
    "k_weight",
    "v_weight",
    "out_weight",
];

/// Names of operation B's inputs.
const CROSS_NAMES: &[&str] = &[
    "grad_query_states",
    "grad_key_states",
    "grad_value_states",
    "decoder_hidden_states",
    "encoder_hidden_states",
    "q_weight",
    "k_weight",
    "v_weight",
];

/// Scalars of operation A that a file may lack; they take precedence over the file's metadata.
#[derive(Clone, Copy, Debug, Default)]
pub struct AudioOptions {
    /// Factor of the logits; without it metadata `scale`, and without that `1 / sqrt(64)`.
    pub scale: Option<f32>,
}

/// Scalars of operation B that a file may lack; they take precedence over the file's metadata.
#[derive(Clone, Copy, Debug, Default)]
pub struct CrossOptions {
    /// Key/value heads; without it metadata `num_kv_heads` or `num_key_value_heads`, and without these the rows of `k_weight`
    /// divided by head_dim.
    pub num_kv_heads: Option<usize>,
}

/// How gradients were computed, echoed in their file's metadata.
#[derive(Clone, Debug)]
pub struct Provenance {
    /// The device, such as `cpu` or `cuda:0 NVIDIA H200`.
    pub device: String,
    /// Precision of operation B on a GPU; elsewhere there is no choice.
    pub precision: Option<Precision>,
}

/// Reads the inputs of operation A: bf16 tensors and `cu_seqlens` as I32.
///
/// # Errors
/// [`FileError`].
pub fn read_audio(path: &Path, options: &AudioOptions) -> Result<audio::Inputs, FileError> {
    let mut file = TensorFile::open(path)?;
    const TOKENS: &str = "[total_seq_len, d_model]";
    const STATES: &str = "[1, num_heads, total_seq_len, 64]";
    const WEIGHT: &str = "[d_model, d_model]";
    let grad_output = file.tensor("grad_output", TOKENS)?;
    let hidden_states = file.tensor("hidden_states", TOKENS)?;
    let query_states: ndarray::Array4<bf16> = file.tensor("query_states", STATES)?;
    let key_states = file.tensor("key_states", STATES)?;
    let value_states = file.tensor("value_states", STATES)?;
    let offsets: Array1<i32> = file.tensor("cu_seqlens", "[num_chunks + 1]")?;
    let q_weight = file.tensor("q_weight", WEIGHT)?;
    let k_weight = file.tensor("k_weight", WEIGHT)?;
    let v_weight = file.tensor("v_weight", WEIGHT)?;
    let out_weight = file.tensor("out_weight", WEIGHT)?;
    let scale = match options.scale {
        Some(scale) => scale,
        None => file.scalar("scale", "a number")?.unwrap_or(1.0 / (audio::HEAD_DIM as f32).sqrt()),
    };
    let refused = |source: Error| FileError::inputs(path, source);
    let cu_seqlens = CuSeqlens::new(&offsets.to_vec(), query_states.dim().2).map_err(refused)?;
    let inputs = audio::Inputs {
        grad_output,
        hidden_states,
        query_states,
        key_states,
        value_states,
        cu_seqlens,
        q_weight,
        k_weight,
        v_weight,
        out_weight,
        scale,
    };
    inputs.shape().map_err(refused)?;
    Ok(inputs)
}

/// Reads the inputs of operation B: f32 tensors.
///
/// # Errors
/// [`FileError`].
pub fn read_cross(path: &Path, options: &CrossOptions) -> Result<cross::Inputs, FileError> {
    let mut file = TensorFile::open(path)?;
    let grad_query_states: ndarray::Array4<f32> =
        file.tensor("grad_query_states", "[batch_size, num_heads, seq_len_dec, head_dim]")?;
    const ENC_HEADS: &str = "[batch_size, num_heads, seq_len_enc, head_dim]";
    const KV_WEIGHT: &str = "[num_kv_heads * head_dim, cross_hidden_size]";
    let grad_key_states = file.tensor("grad_key_states", ENC_HEADS)?;
    let grad_value_states = file.tensor("grad_value_states", ENC_HEADS)?;
    let decoder_hidden_states = file.tensor("decoder_hidden_states", "[batch_size, seq_len_dec, hidden_size]")?;
    let encoder_hidden_states = file.tensor("encoder_hidden_states", "[batch_size, seq_len_enc, cross_hidden_size]")?;
    let q_weight = file.tensor("q_weight", "[num_heads * head_dim, hidden_size]")?;
    let k_weight: ndarray::Array2<f32> = file.tensor("k_weight", KV_WEIGHT)?;
    let v_weight = file.tensor("v_weight", KV_WEIGHT)?;
    let num_kv_heads = match options.num_kv_heads {
        Some(num_kv_heads) => num_kv_heads,
        None => stored_num_kv_heads(path, &file, k_weight.nrows(), grad_query_states.dim().3)?,
    };
    let inputs = cross::Inputs {
        grad_query_states,
        grad_key_states,
        grad_value_states,
        decoder_hidden_states,
        encoder_hidden_states,
        q_weight,
        k_weight,
        v_weight,
        num_kv_heads,
    };
    inputs.shape().map_err(|source| FileError::inputs(path, source))?;
    Ok(inputs)
}

/// The number of key/value heads that a file's metadata name, or that follows from its `k_weight`.
fn stored_num_kv_heads(path: &Path, file: &TensorFile, kv_out_dim: usize, head_dim: usize) -> Result<usize, FileError> {
    for key in ["num_kv_heads", "num_key_value_heads"] {
        if let Some(value) = file.scalar(key, "a whole number")? {
            return Ok(value);
        }
    }
    if head_dim == 0 || !kv_out_dim.is_multiple_of(head_dim) {
        return Err(FileError::KeyValueRows { path: path.into(), tensor: "k_weight", rows: kv_out_dim, head_dim });
    }
    Ok(kv_out_dim / head_dim)
}

/// Writes the inputs of operation A, as [`read_audio`] reads them.
///
/// # Errors
/// [`FileError::Io`], [`FileError::NotRegular`]; `path` is then as it was before.
pub fn write_audio_inputs(path: &Path, inputs: &audio::Inputs) -> Result<(), FileError> {
    let offsets = ndarray::ArrayView1::from(inputs.cu_seqlens.offsets());
    let mut tensors = vec![("cu_seqlens", Stored::new(offsets.into_dyn()))];
    tensors.extend(audio_tensors(inputs).into_iter().map(|(name, tensor)| (name, Stored::new(tensor))));
    write(path, tensors, HashMap::from([("scale".into(), inputs.scale.to_string())]))
}

/// Writes the inputs of operation B, as [`read_cross`] reads them.
///
/// # Errors
/// [`FileError::Io`], [`FileError::NotRegular`]; `path` is then as it was before.
pub fn write_cross_inputs(path: &Path, inputs: &cross::Inputs) -> Result<(), FileError> {
    let tensors = cross_tensors(inputs).into_iter().map(|(name, tensor)| (name, Stored::new(tensor))).collect();
    write(path, tensors, HashMap::from([("num_kv_heads".into(), inputs.num_kv_heads.to_string())]))
}

/// Writes the gradients of operation A, bf16, with how they were computed as metadata.
///
/// # Errors
/// [`FileError::Io`], [`FileError::NotRegular`]; `path` is then as it was before.
pub fn write_audio_gradients(path: &Path, grads: &audio::Gradients, how: &Provenance) -> Result<(), FileError> {
    let tensors = grads.tensors().into_iter().map(|(name, tensor)| (name, Stored::new(tensor))).collect();
    write(path, tensors, how.metadata("audio"))
}

/// Writes the gradients of operation B, f32, with how they were computed as metadata.
///
/// # Errors
/// [`FileError::Io`], [`FileError::NotRegular`]; `path` is then as it was before.
pub fn write_cross_gradients(path: &Path, grads: &cross::Gradients, how: &Provenance) -> Result<(), FileError> {
    let tensors = grads.tensors().into_iter().map(|(name, tensor)| (name, Stored::new(tensor))).collect();
    write(path, tensors, how.metadata("cross"))
}

/// Checks that `path` can be written, before long work whose result goes there; nothing is left behind.
///
/// # Errors
/// [`FileError::Io`], [`FileError::NotRegular`].
pub fn check_writable(path: &Path) -> Result<(), FileError> {
    Replacement::create(path).map(drop)
}

/// Writes text as the tensor files are written: into a temporary file, renamed over `path` at the end.
///
/// # Errors
/// [`FileError::Io`], [`FileError::NotRegular`]; `path` is then as it was before.
pub fn write_text(path: &Path, text: &str) -> Result<(), FileError> {
    Replacement::create(path)?.finish(|file| file.write_all(text.as_bytes()))
}

impl Provenance {
    fn metadata(&self, operation: &str) -> HashMap<String, String> {
        let mut metadata =
            HashMap::from([("operation".into(), operation.into()), ("device".into(), self.device.clone())]);
        if let Some(precision) = self.precision {
            metadata.insert("precision".into(), precision.to_string());
        }
        metadata
    }
}

/// NaN and infinite values of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// How many there are.
    pub count: usize,
    /// Index of the first row with one: all extents but the last.
    pub first_row: Vec<usize>,
}

impl fmt::Display for NonFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.count == 1 { "" } else { "s" };
        write!(f, "{} non-finite value{plural}, the first in row {:?}", self.count, self.first_row)
    }
}

/// The NaN and infinite values of a tensor, `None` if there are none.
pub fn non_finite<T: Float>(tensor: ArrayViewD<'_, T>) -> Option<NonFinite> {
    let mut count = 0;
    let mut first_row = None;
    for (row, values) in tensor.rows().into_iter().enumerate() {
        let bad = values.iter().filter(|x| !x.is_finite()).count();
        if bad > 0 {
            first_row.get_or_insert(row);
        }
        count += bad;
    }
    let extents = &tensor.shape()[..tensor.ndim().saturating_sub(1)];
    first_row.map(|row| NonFinite { count, first_row: index_of(row, extents) })
}

/// The index that flat row-major position `flat` has under `extents`.
fn index_of(mut flat: usize, extents: &[usize]) -> Vec<usize> {
    let mut index = vec![0; extents.len()];
    for (position, extent) in index.iter_mut().zip(extents).rev() {
        *position = flat % extent;
        flat /= extent;
    }
    index
}

/// Name and non-finite values of every input of operation A that has some.
pub fn non_finite_audio(inputs: &audio::Inputs) -> Vec<(&'static str, NonFinite)> {
    audio_tensors(inputs).into_iter().filter_map(|(name, tensor)| Some((name, non_finite(tensor)?))).collect()
}

/// Name and non-finite values of every input of operation B that has some.
pub fn non_finite_cross(inputs: &cross::Inputs) -> Vec<(&'static str, NonFinite)> {
    cross_tensors(inputs).into_iter().filter_map(|(name, tensor)| Some((name, non_finite(tensor)?))).collect()
}

/// Name and values of every bf16 input of operation A.
fn audio_tensors(inputs: &audio::Inputs) -> [(&'static str, ArrayViewD<'_, bf16>); 9] {
    [
        ("grad_output", inputs.grad_output.view().into_dyn()),
        ("hidden_states", inputs.hidden_states.view().into_dyn()),
        ("query_states", inputs.query_states.view().into_dyn()),
        ("key_states", inputs.key_states.view().into_dyn()),
        ("value_states", inputs.value_states.view().into_dyn()),
        ("q_weight", inputs.q_weight.view().into_dyn()),
        ("k_weight", inputs.k_weight.view().into_dyn()),
        ("v_weight", inputs.v_weight.view().into_dyn()),
        ("out_weight", inputs.out_weight.view().into_dyn()),
    ]
}

/// Name and values of every input of operation B.
fn cross_tensors(inputs: &cross::Inputs) -> [(&'static str, ArrayViewD<'_, f32>); 8] {
    [
        ("grad_query_states", inputs.grad_query_states.view().into_dyn()),
        ("grad_key_states", inputs.grad_key_states.view().into_dyn()),
        ("grad_value_states", inputs.grad_value_states.view().into_dyn()),
        ("decoder_hidden_states", inputs.decoder_hidden_states.view().into_dyn()),
        ("encoder_hidden_states", inputs.encoder_hidden_states.view().into_dyn()),
        ("q_weight", inputs.q_weight.view().into_dyn()),
        ("k_weight", inputs.k_weight.view().into_dyn()),
        ("v_weight", inputs.v_weight.view().into_dyn()),
    ]
}
