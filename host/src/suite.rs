//! The public suites' cases, random cases beside them, and their inputs.
//!
//! The suite files are part of the library: `host/suites/audio_varlen_attention.json` and `host/suites/cross_attention_qkv.json`.

use rand::Rng;
use rand::seq::IndexedRandom;
use serde::Deserialize;

use crate::compare::{MaxAtol, Tolerance};
use crate::cu_seqlens::check_total_seq_len;
use crate::random::{normal, stream};
use crate::{CuSeqlens, Error, audio, cross, window_cu_seqlens};

const AUDIO_SUITE: &str = include_str!("../suites/audio_varlen_attention.json");
const CROSS_SUITE: &str = include_str!("../suites/cross_attention_qkv.json");

#[derive(Deserialize)]
struct Suite<Constants, Case> {
    constants: Constants,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct SuiteTolerance {
    max_atol: f64,
    max_rtol: f64,
    required_match_ratio: f64,
}

impl From<SuiteTolerance> for Tolerance {
    fn from(suite: SuiteTolerance) -> Self {
        let SuiteTolerance { max_atol, max_rtol, required_match_ratio } = suite;
        Tolerance { max_atol: MaxAtol::Fixed(max_atol), max_rtol, required_match_ratio }
    }
}

#[derive(Deserialize)]
struct AudioConstants {
    num_heads: usize,
    head_dim: usize,
}

#[derive(Deserialize)]
struct AudioSuiteCase {
    total_seq_len: usize,
    num_chunks: usize,
    #[serde(flatten)]
    tolerance: SuiteTolerance,
}

#[derive(Deserialize)]
struct CrossConstants {
    hidden_size: usize,
    cross_hidden_size: usize,
    num_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
}

#[derive(Deserialize)]
struct CrossSuiteCase {
    batch_size: usize,
    seq_len_dec: usize,
    seq_len_enc: usize,
    #[serde(flatten)]
    tolerance: SuiteTolerance,
}

/// A case of operation A.
#[derive(Clone, Debug)]
pub struct AudioCase {
    /// What tells it from the others, for tables.
    pub name: String,
    /// Sizes.
    pub shape: audio::Shape,
    /// Chunk offsets.
    pub cu_seqlens: CuSeqlens,
    /// When its outputs pass.
    pub tolerance: Tolerance,
}

impl AudioCase {
    /// Standard normal inputs.
    pub fn inputs(&self, seed: u64) -> audio::Inputs {
        audio_inputs(seed, self.shape, self.cu_seqlens.clone())
    }
}

/// A case of operation B.
#[derive(Clone, Debug)]
pub struct CrossCase {
    /// What tells it from the others, for tables.
    pub name: String,
    /// Sizes.
    pub shape: cross::Shape,
    /// When its outputs pass.
    pub tolerance: Tolerance,
}

impl CrossCase {
    /// Normal inputs of the suite's scale, see [`cross_inputs`].
    pub fn inputs(&self, seed: u64) -> cross::Inputs {
        cross_inputs(seed, self.shape)
    }
}

/// The 16 public cases of operation A, in the suite's order.
pub fn audio_cases() -> Vec<AudioCase> {
    let suite: Suite<AudioConstants, AudioSuiteCase> =
        serde_json::from_str(AUDIO_SUITE).expect("the embedded suite is well formed, a test reads it");
    let AudioConstants { num_heads, head_dim } = suite.constants;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let case = |case: AudioSuiteCase| AudioCase {
        name: format!("T={} chunks={}", case.total_seq_len, case.num_chunks),
        shape: audio::Shape { total_seq_len: case.total_seq_len, num_heads, scale },
        cu_seqlens: balanced_cu_seqlens(case.total_seq_len, case.num_chunks)
            .expect("the embedded suite's sizes are valid"),
        tolerance: case.tolerance.into(),
    };
    suite.cases.into_iter().map(case).collect()
}

/// Cases of operation A whose time is that of attention over long chunks: 16,384 tokens of the suite's model in chunks of 1500, and in one.
/// Their tolerance is that of random cases.
pub fn audio_long_cases() -> Vec<AudioCase> {
    const TOTAL_SEQ_LEN: usize = 16_384;
    let (num_heads, scale) = (20, 1.0 / (audio::HEAD_DIM as f32).sqrt());
    let case = |chunk_len: usize| AudioCase {
        name: format!("T={TOTAL_SEQ_LEN} chunks of {chunk_len}"),
        shape: audio::Shape { total_seq_len: TOTAL_SEQ_LEN, num_heads, scale },
        cu_seqlens: window_cu_seqlens(chunk_len, TOTAL_SEQ_LEN).expect("the sizes are valid"),
        tolerance: RANDOM_AUDIO,
    };
    [256, 512, 1500, 4096, TOTAL_SEQ_LEN].map(case).into()
}

/// The 16 public cases of operation B, in the suite's order.
pub fn cross_cases() -> Vec<CrossCase> {
    let suite: Suite<CrossConstants, CrossSuiteCase> =
        serde_json::from_str(CROSS_SUITE).expect("the embedded suite is well formed, a test reads it");
    let constants = suite.constants;
    let case = |case: CrossSuiteCase| CrossCase {
        name: format!("B={} S_dec={} S_enc={}", case.batch_size, case.seq_len_dec, case.seq_len_enc),
        shape: cross::Shape {
            batch_size: case.batch_size,
            seq_len_dec: case.seq_len_dec,
            seq_len_enc: case.seq_len_enc,
            num_heads: constants.num_heads,
            num_kv_heads: constants.num_key_value_heads,
            head_dim: constants.head_dim,
            hidden_size: constants.hidden_size,
            cross_hidden_size: constants.cross_hidden_size,
        },
        tolerance: case.tolerance.into(),
    };
    suite.cases.into_iter().map(case).collect()
}

/// Tolerance of random cases of operation A. The suite's `max_atol` is 0.0012 to 0.0020 of the rms of grad_hidden_states.
const RANDOM_AUDIO: Tolerance =
    Tolerance { max_atol: MaxAtol::OfRms(0.0015), max_rtol: 0.05, required_match_ratio: 0.98 };
/// Tolerance of random cases of operation B. The suite's `max_atol` is 0.0018 or more of the largest rms of a case's outputs.
const RANDOM_CROSS: Tolerance =
    Tolerance { max_atol: MaxAtol::OfRms(0.0018), max_rtol: 0.001, required_match_ratio: 0.99 };

/// Random cases of operation A: 1 to 4 heads; empty, one-token, short and long chunks; padding rows.
///
/// The tensors are large enough for a match ratio of 0.98 to mean something: 256 rows at least.
pub fn random_audio_cases(seed: u64, count: usize) -> Vec<AudioCase> {
    let case = |index: usize| {
        let mut rng = stream(seed, u32::MAX, index as u32);
        let longest = *[1, 16, 128, 200, 600].choose(&mut rng).unwrap_or(&128);
        let mut offsets = vec![0i32];
        let mut end = 0;
        while end < 256 {
            // Half of the chunks are of any length, the others empty, of one token, or of the longest length.
            let chunk_len = match rng.random_range(0..8) {
                0 => 0,
                1 => 1,
                2 | 3 => longest,
                _ => rng.random_range(0..=longest),
            };
            end += chunk_len;
            offsets.push(end);
        }
        let padding = if rng.random_bool(0.5) { rng.random_range(1..=40) } else { 0 };
        let total_seq_len = end as usize + padding;
        let shape = audio::Shape { total_seq_len, num_heads: rng.random_range(1..=4), scale: 0.125 };
        let cu_seqlens = CuSeqlens::new(&offsets, total_seq_len).expect("offsets only grow, up to total_seq_len");
        AudioCase {
            name: format!("random {index}: T={total_seq_len} chunks={} heads={}", offsets.len() - 1, shape.num_heads),
            shape,
            cu_seqlens,
            tolerance: RANDOM_AUDIO,
        }
    };
    (0..count).map(case).collect()
}

/// Random cases of operation B: head counts with 1 to 8 query heads a key/value head, all head_dims, odd sequence lengths.
pub fn random_cross_cases(seed: u64, count: usize) -> Vec<CrossCase> {
    let case = |index: usize| {
        let mut rng = stream(seed, u32::MAX - 1, index as u32);
        let heads = [(1, 1), (4, 4), (6, 3), (8, 2), (8, 1), (16, 4)];
        let (num_heads, num_kv_heads) = *heads.choose(&mut rng).unwrap_or(&(16, 4));
        let shape = cross::Shape {
            batch_size: rng.random_range(1..=3),
            seq_len_dec: rng.random_range(1..=200),
            seq_len_enc: rng.random_range(1..=200),
            num_heads,
            num_kv_heads,
            head_dim: *[64, 128, 256].choose(&mut rng).unwrap_or(&256),
            hidden_size: 8 * rng.random_range(8..=40),
            cross_hidden_size: 8 * rng.random_range(8..=40),
        };
        let cross::Shape { batch_size, seq_len_dec, seq_len_enc, head_dim, .. } = shape;
        CrossCase {
            name: format!(
                "random {index}: B={batch_size} S_dec={seq_len_dec} S_enc={seq_len_enc} heads={num_heads}/{num_kv_heads}x{head_dim}"
            ),
            shape,
            tolerance: RANDOM_CROSS,
        }
    };
    (0..count).map(case).collect()
}

/// The suite's chunk rule: `num_chunks` chunks of `total_seq_len / num_chunks` rows, the first `total_seq_len % num_chunks` of them
/// one row longer.
///
/// # Errors
/// [`Error::Unsupported`] if `num_chunks` is 0 or above 2^26, or if `total_seq_len` exceeds `i32::MAX`.
pub fn balanced_cu_seqlens(total_seq_len: usize, num_chunks: usize) -> Result<CuSeqlens, Error> {
    /// More chunks than any GPU's memory holds rows for.
    const MOST: usize = 1 << 26;
    if !(1..=MOST).contains(&num_chunks) {
        let supported = format!("1 to {MOST}");
        return Err(Error::Unsupported { argument: "num_chunks", value: num_chunks.to_string(), supported });
    }
    check_total_seq_len(total_seq_len)?;
    let (base, remainder) = (total_seq_len / num_chunks, total_seq_len % num_chunks);
    let offsets: Vec<i32> = (0..=num_chunks).map(|c| (c * base + c.min(remainder)) as i32).collect();
    CuSeqlens::new(&offsets, total_seq_len)
}

/// Inputs of operation A as the suite draws them: standard normal, every tensor.
pub fn audio_inputs(seed: u64, shape: audio::Shape, cu_seqlens: CuSeqlens) -> audio::Inputs {
    let d_model = shape.d_model();
    let tokens = (shape.total_seq_len, d_model);
    let states = (1, shape.num_heads, shape.total_seq_len, audio::HEAD_DIM);
    let weight = (d_model, d_model);
    audio::Inputs {
        grad_output: normal(seed, 0, 1.0, tokens),
        hidden_states: normal(seed, 1, 1.0, tokens),
        query_states: normal(seed, 2, 1.0, states),
        key_states: normal(seed, 3, 1.0, states),
        value_states: normal(seed, 4, 1.0, states),
        cu_seqlens,
        q_weight: normal(seed, 5, 1.0, weight),
        k_weight: normal(seed, 6, 1.0, weight),
        v_weight: normal(seed, 7, 1.0, weight),
        out_weight: normal(seed, 8, 1.0, weight),
        scale: shape.scale,
    }
}

/// Inputs of operation B as the suite draws them: standard normal, the gradients divided by `sqrt(q_out_dim)`, hidden states and
/// weights by the square root of their last extent.
pub fn cross_inputs(seed: u64, shape: cross::Shape) -> cross::Inputs {
    let inverse_sqrt = |n: usize| 1.0 / (n as f32).sqrt();
    let grad = inverse_sqrt(shape.q_out_dim());
    let dec = inverse_sqrt(shape.hidden_size);
    let enc = inverse_sqrt(shape.cross_hidden_size);
    let cross::Shape { batch_size, num_heads, head_dim, seq_len_dec, seq_len_enc, .. } = shape;
    let kv_weight = (shape.kv_out_dim(), shape.cross_hidden_size);
    cross::Inputs {
        grad_query_states: normal(seed, 0, grad, (batch_size, num_heads, seq_len_dec, head_dim)),
        grad_key_states: normal(seed, 1, grad, (batch_size, num_heads, seq_len_enc, head_dim)),
        grad_value_states: normal(seed, 2, grad, (batch_size, num_heads, seq_len_enc, head_dim)),
        decoder_hidden_states: normal(seed, 3, dec, (batch_size, seq_len_dec, shape.hidden_size)),
        encoder_hidden_states: normal(seed, 4, enc, (batch_size, seq_len_enc, shape.cross_hidden_size)),
        q_weight: normal(seed, 5, dec, (shape.q_out_dim(), shape.hidden_size)),
        k_weight: normal(seed, 6, enc, kv_weight),
        v_weight: normal(seed, 7, enc, kv_weight),
        num_kv_heads: shape.num_kv_heads,
    }
}
