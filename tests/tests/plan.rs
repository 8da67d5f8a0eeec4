//! Plans: memory that grows with the tokens and no faster, and a text that says so. No GPU is asked.

use std::time::Instant;

use attn_backward::cross::{self, Precision};
use attn_backward::gpu::ModuleKind;
use attn_backward::suite::balanced_cu_seqlens;
use attn_backward::{CuSeqlens, Target, audio, window_cu_seqlens};
use attn_backward_tests::examples::cross_shape;
use attn_backward_tests::strategies::cu_seqlens_of;

const MODULES: [ModuleKind; 2] = [ModuleKind::Portable, ModuleKind::Hopper];

/// What a plan may need for partial sums and tables, whatever the number of tokens.
const FIXED_BYTES: u64 = 192 << 20;

/// Bytes of a token and column of operation A. dA in fp32, O, dQ, dK, dV in bf16: 12; bias sums of each chunk and statistics of long ones below 4
/// more. The Hopper kernels for long chunks have four fp16 operands, dQ in fp32 and statistics, 12.2 a column, for each 128-row tile, of which
/// there may be two for each 128 rows.
fn audio_bytes_of_a_column(module: ModuleKind) -> u64 {
    match module {
        ModuleKind::Portable => 16,
        ModuleKind::Hopper => 16 + 25,
    }
}

fn audio_bytes(module: ModuleKind, num_heads: usize, cu_seqlens: &CuSeqlens) -> u64 {
    let shape = audio::Shape { total_seq_len: cu_seqlens.total_seq_len(), num_heads, scale: 0.125 };
    audio::Plan::new(&shape, cu_seqlens, &Target::h200(module)).unwrap().workspace().bytes()
}

#[test]
fn memory_of_operation_a_is_linear_in_the_tokens_even_for_one_chunk() {
    for module in MODULES {
        for num_heads in [1, 20] {
            let d_model = 64 * num_heads as u64;
            for total in [1usize, 1000, 32_769, 262_144] {
                let bound = audio_bytes_of_a_column(module) * d_model * total as u64 + FIXED_BYTES;
                for cu_seqlens in [CuSeqlens::new(&[0, total as i32], total), window_cu_seqlens(104, total)] {
                    let bytes = audio_bytes(module, num_heads, &cu_seqlens.unwrap());
                    assert!(bytes <= bound, "{module}, {num_heads} heads, {total} rows: {bytes} above {bound}");
                }
            }
        }
    }
}

#[test]
fn memory_of_operation_a_is_linear_in_tokens_and_chunks_whatever_the_cut() {
    let ones = |count: usize| vec![1; count];
    let with_ones = |len: usize, count: usize| [vec![len], ones(count)].concat();
    for module in MODULES {
        for chunk_lens in [ones(70_000), with_ones(16_384, 16_384), vec![100; 8_400], with_ones(838_000, 2_000)] {
            let cu_seqlens = cu_seqlens_of(&chunk_lens, 0);
            let (tokens, chunks) = (cu_seqlens.total_seq_len() as u64, chunk_lens.len() as u64);
            // As above, and a row of fp32 sums of dQ, dK and dV for each chunk.
            let bound = 1280 * (audio_bytes_of_a_column(module) * tokens + 12 * chunks) + FIXED_BYTES;
            let bytes = audio_bytes(module, 20, &cu_seqlens);
            assert!(bytes <= bound, "{module}, {tokens} tokens in {chunks} chunks: {bytes} above {bound}");
        }
    }
}

#[test]
fn memory_of_operation_b_holds_reduced_gradients_and_never_the_repeated_ones() {
    for module in MODULES {
        for (precision, parts) in [(Precision::Fast, 1), (Precision::High, 2)] {
            let shape = |tokens| cross::Shape {
                num_heads: 16,
                num_kv_heads: 4,
                head_dim: 256,
                hidden_size: 1536,
                cross_hidden_size: 1024,
                ..cross_shape(4, 16, tokens)
            };
            let bytes = |tokens: usize| {
                let plan = cross::Plan::new(&shape(tokens), precision, &Target::h200(module)).unwrap();
                plan.workspace().bytes()
            };
            let (few, many) = (4096, 65_536);
            let rows = 4 * (many - few) as u64;
            let growth = bytes(many).saturating_sub(bytes(few));
            // 16-bit operands: dK | dV of the key/value heads, hidden states; and an exponent.
            let reduced = rows * (parts * 2 * (2 * 1024 + 1024) + 4);
            assert!(growth <= reduced + FIXED_BYTES, "{module}, {precision}: {growth}, reduced buffers {reduced}");
            let one_repeated = 2 * rows * 4096;
            assert!(parts == 2 || growth < one_repeated, "{module}, {precision}: {growth} holds a repeated gradient");
        }
    }
}

#[test]
fn plans_print_their_memory_mode_and_machine() {
    for module in MODULES {
        let cu_seqlens = balanced_cu_seqlens(390, 4).unwrap();
        let shape = audio::Shape { total_seq_len: 390, num_heads: 20, scale: 0.125 };
        let text = audio::Plan::new(&shape, &cu_seqlens, &Target::h200(module)).unwrap().to_string();
        for part in ["operation A", &module.to_string(), "390 rows", "4 chunks", "GFLOP", "workspace"] {
            assert!(text.contains(part), "no `{part}` in\n{text}");
        }
        for precision in [Precision::Fast, Precision::High] {
            let plan = cross::Plan::new(&cross_shape(1, 2, 3), precision, &Target::h200(module)).unwrap();
            let text = plan.to_string();
            for part in ["operation B", &format!("{precision} precision"), &module.to_string(), "workspace"] {
                assert!(text.contains(part), "no `{part}` in\n{text}");
            }
        }
    }
}

#[test]
fn plans_of_sixteen_million_rows_are_made_in_time() {
    let total = (1 << 24) + 300;
    let cu_seqlens = window_cu_seqlens(128, total).unwrap();
    for module in MODULES {
        let start = Instant::now();
        let bytes = audio_bytes(module, 2, &cu_seqlens);
        assert!(bytes < 40 << 30, "{module}: {bytes}");
        assert!(start.elapsed().as_secs() < 20, "{module}: {:?}", start.elapsed());
    }
}
