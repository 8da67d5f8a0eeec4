//! Proptest strategies: chunk lengths, shapes, and the operations' inputs from a seed.

use attn_backward::suite::{audio_inputs, cross_inputs};
use attn_backward::{CuSeqlens, audio, cross};
use proptest::prelude::*;
use proptest::sample::select;

/// Offsets of the given chunk lengths, followed by `padding` rows.
pub fn cu_seqlens_of(chunk_lens: &[usize], padding: usize) -> CuSeqlens {
    let mut offsets = vec![0i32];
    let mut end = 0;
    for chunk_len in chunk_lens {
        end += chunk_len;
        offsets.push(end as i32);
    }
    CuSeqlens::new(&offsets, end + padding).expect("offsets only grow")
}

/// Up to 8 chunks, empty and one-token ones among them, and up to 5 padding rows; possibly no rows at all.
pub fn cu_seqlens(longest: usize) -> impl Strategy<Value = CuSeqlens> {
    let chunk_len = prop_oneof![1 => Just(0), 1 => Just(1), 1 => Just(longest), 3 => 0..=longest];
    let padding = prop_oneof![Just(0), 0..=5usize];
    (prop::collection::vec(chunk_len, 0..8), padding).prop_map(|(lens, padding)| cu_seqlens_of(&lens, padding))
}

/// Standard normal inputs of operation A with 1 to 3 heads and an arbitrary scale.
pub fn audio(longest: usize) -> impl Strategy<Value = audio::Inputs> {
    (cu_seqlens(longest), 1..=3usize, prop_oneof![Just(0.125f32), 0.01..1.0f32], any::<u64>()).prop_map(
        |(cu_seqlens, num_heads, scale, seed)| {
            let shape = audio::Shape { total_seq_len: cu_seqlens.total_seq_len(), num_heads, scale };
            audio_inputs(seed, shape, cu_seqlens)
        },
    )
}

/// Sizes of operation B: any head counts that divide, all head_dims, no tokens or batches included.
pub fn cross_shape() -> impl Strategy<Value = cross::Shape> {
    let heads = (select(vec![1usize, 2, 4, 8]), select(vec![1usize, 2, 4]));
    (0..=3usize, 0..=40usize, 0..=40usize, heads, select(vec![64usize, 128, 256]), 1..=5usize, 1..=5usize).prop_map(
        |(batch_size, seq_len_dec, seq_len_enc, (num_kv_heads, groups), head_dim, hidden, cross_hidden)| cross::Shape {
            batch_size,
            seq_len_dec,
            seq_len_enc,
            num_heads: num_kv_heads * groups,
            num_kv_heads,
            head_dim,
            hidden_size: 8 * hidden,
            cross_hidden_size: 8 * cross_hidden,
        },
    )
}

/// Normal inputs of operation B.
pub fn cross() -> impl Strategy<Value = cross::Inputs> {
    (cross_shape(), any::<u64>()).prop_map(|(shape, seed)| cross_inputs(seed, shape))
}
