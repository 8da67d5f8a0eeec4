//! Parameters of the `cross_convert_*` kernels; re-exported by [`params`](crate::params).

/// Parameters of `cross_convert_gradients_*` and of `cross_convert_operands_*`, which run in this order with the same values.
///
/// Every pointer is 16-byte aligned, every tensor is contiguous and row-major. Decoder row `t = b * seq_len_dec + s`, encoder row
/// `t = b * seq_len_enc + s`; `q_out_dim = num_heads * head_dim`, `kv_out_dim = num_kv_heads * head_dim`.
/// An output is an array of its fp16 parts: the second is written by the `_high` entries only and may be null for `_fast`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CrossConvertParams {
    /// fp32 `[batch_size, num_heads, seq_len_dec, head_dim]`.
    pub grad_query_states: *const f32,
    /// fp32 `[batch_size, num_heads, seq_len_enc, head_dim]`.
    pub grad_key_states: *const f32,
    /// fp32 `[batch_size, num_heads, seq_len_enc, head_dim]`.
    pub grad_value_states: *const f32,
    /// fp32 `[rows_dec, hidden_size]`.
    pub decoder_hidden_states: *const f32,
    /// fp32 `[rows_enc, cross_hidden_size]`.
    pub encoder_hidden_states: *const f32,
    /// fp32 `[q_out_dim, hidden_size]`.
    pub q_weight: *const f32,
    /// fp32 `[kv_out_dim, cross_hidden_size]`.
    pub k_weight: *const f32,
    /// fp32 `[kv_out_dim, cross_hidden_size]`.
    pub v_weight: *const f32,
    /// Out, by gradients: fp16 `[rows_dec, q_out_dim]`, row `t` of dQ times `2^-row_exponents_dec[t]`.
    pub dq: [*mut u16; 2],
    /// Out, by gradients: fp16 `[rows_enc, 2 * kv_out_dim]`, row `t` of dK | dV times `2^-row_exponents_enc[t]`.
    pub dkv: [*mut u16; 2],
    /// Out, by operands: fp16 `[rows_dec, hidden_size]`, row `t` times `2^(row_exponents_dec[t] - exponents[0])`.
    pub x_dec: [*mut u16; 2],
    /// Out, by operands: fp16 `[rows_enc, cross_hidden_size]`, row `t` times `2^(row_exponents_enc[t] - exponents[1])`.
    pub x_enc: [*mut u16; 2],
    /// Out, by gradients, and anew by operands if the guess was too low: fp16 `[q_out_dim, hidden_size]`, times `2^-exponents[2]`.
    pub wq: [*mut u16; 2],
    /// Out, likewise: fp16 `[2 * kv_out_dim, cross_hidden_size]`, k_weight over v_weight, times `2^-exponents[3]`.
    pub wkv: [*mut u16; 2],
    /// Out, by gradients: `[rows_dec]`.
    pub row_exponents_dec: *mut i32,
    /// Out, by gradients: `[rows_enc]`.
    pub row_exponents_enc: *mut i32,
    /// Out, by gradients: `[6, gradients_blocks]`, what each of its blocks found: the largest exponent of decoder tokens, encoder tokens,
    /// q_weight, and k_weight with v_weight, those of weights at least what they were guessed to be; then the guesses of q_weight, and of
    /// k_weight with v_weight. All as [`maximum_word`](crate::scale::maximum_word) says.
    pub block_maxima: *mut i32,
    /// Out, by operands: `[4]`, the exponents of grad_q_weight, of grad_k_weight and grad_v_weight, of q_weight, and of k_weight with
    /// v_weight.
    pub exponents: *mut i32,
    /// Out, by gradients: u32 `[zero_words]`, set to 0: counters of the launch after operands.
    pub zero: *mut u32,
    /// See `zero`.
    pub zero_words: u32,
    /// Blocks of gradients.
    pub gradients_blocks: u32,
    /// `batch_size * seq_len_dec`, below 2^31, may be 0.
    pub rows_dec: u32,
    /// `batch_size * seq_len_enc`, below 2^31, may be 0.
    pub rows_enc: u32,
    /// Tokens of a decoder sequence.
    pub seq_len_dec: u32,
    /// Tokens of an encoder sequence.
    pub seq_len_enc: u32,
    /// Query heads.
    pub num_heads: u32,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: u32,
    /// 64, 128 or 256.
    pub head_dim: u32,
    /// Decoder width, a multiple of 8.
    pub hidden_size: u32,
    /// Encoder width, a multiple of 8.
    pub cross_hidden_size: u32,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<CrossConvertParams>() == 248);
