//! Operation A: chunk boundaries, numerics, and properties that need no reference.

use attn_backward::{CuSeqlens, Error, Target, audio, window_cu_seqlens};
use attn_backward_tests::assertions::{assert_audio, assert_audio_with, assert_matches, bits, norm, wide};
use attn_backward_tests::device::{on_each_module, on_gpu};
use attn_backward_tests::examples::{amplify, audio_of, audio_with, fill_rows_from, one_chunk};
use attn_backward_tests::strategies::cu_seqlens_of;
use attn_backward_tests::{plain_bf16, sparse_queries};
use half::bf16;
use ndarray::{ArrayD, Axis, concatenate, s};

use crate::guarded::{audio_backward, audio_backward_on};

/// On every module: the gradients are those of the f64 reference.
#[track_caller]
fn assert_matches_the_reference(gpu: &attn_backward_tests::device::TestGpu, inputs: &audio::Inputs) {
    let reference = audio::reference::backward(inputs).unwrap();
    for &module in &gpu.modules {
        eprintln!("{module} module, offsets {:.60?}", inputs.cu_seqlens.offsets());
        assert_audio(&audio_backward(&gpu.gpu, module, inputs), &reference);
    }
}

#[test]
fn chunk_lengths_around_tile_sizes_equal_the_reference() {
    on_gpu(|gpu| {
        for chunk_len in [1, 15, 16, 17, 31, 33, 63, 64, 65, 80, 81, 96, 97, 100, 103, 104, 105, 127, 128, 129, 192] {
            assert_matches_the_reference(gpu, &audio_of(chunk_len as u64, 2, cu_seqlens_of(&[chunk_len], 0)));
        }
    });
}

#[test]
fn long_chunks_equal_the_reference() {
    on_gpu(|gpu| {
        for chunk_len in [1500, 4096] {
            assert_matches_the_reference(gpu, &audio_of(chunk_len as u64, 2, cu_seqlens_of(&[chunk_len], 0)));
        }
    });
}

#[test]
fn long_chunks_around_tile_sizes_beside_each_other_equal_the_reference() {
    on_gpu(|gpu| {
        for chunk_lens in [&[257][..], &[383, 129, 385], &[513, 1, 130, 384, 0, 127, 640]] {
            assert_matches_the_reference(gpu, &audio_of(5, 3, cu_seqlens_of(chunk_lens, 2)));
        }
    });
}

#[test]
fn what_all_keys_share_changes_nothing() {
    on_gpu(|gpu| {
        let mut inputs = audio_of(6, 2, cu_seqlens_of(&[100, 700], 0));
        inputs.key_states.mapv_inplace(|k| bf16::from_f32(90.0 + k.to_f32()));
        assert_matches_the_reference(gpu, &inputs);
    });
}

#[test]
fn many_tiny_chunks_equal_the_reference() {
    let chunk_lens: Vec<usize> = (0..600).map(|c| 1 + c % 3).collect();
    on_gpu(|gpu| assert_matches_the_reference(gpu, &audio_of(3, 2, cu_seqlens_of(&chunk_lens, 0))));
}

#[test]
fn short_and_long_chunks_together_equal_the_reference() {
    on_gpu(|gpu| {
        for (num_heads, chunk_lens) in
            [(1, &[1, 700, 0, 3, 128, 129, 64][..]), (3, &[300, 8, 8, 8]), (5, &[65, 66, 67])]
        {
            assert_matches_the_reference(gpu, &audio_of(4, num_heads, cu_seqlens_of(chunk_lens, 9)));
        }
    });
}

#[test]
fn more_chunks_than_tokens_and_long_among_empty_ones_equal_the_reference() {
    on_gpu(|gpu| {
        for offsets in [&[0, 0, 0, 0, 1][..], &[0, 0, 0, 1023, 1024]] {
            assert_matches_the_reference(gpu, &audio_with(6, 2, offsets));
        }
    });
}

#[test]
fn empty_chunks_change_nothing() {
    on_each_module(|gpu, module| {
        let plain = audio_with(5, 2, &[0, 5, 9]);
        let mut with_empty = plain.clone();
        with_empty.cu_seqlens = CuSeqlens::new(&[0, 0, 5, 5, 9, 9], 9).unwrap();
        let run = |inputs| bits(&audio_backward(&gpu.gpu, module, inputs));
        assert_eq!(run(&plain), run(&with_empty));
    });
}

#[test]
fn without_chunks_or_rows_all_gradients_are_zero() {
    on_each_module(|gpu, module| {
        for (offsets, total) in [(&[0][..], 0), (&[0, 0], 0), (&[0], 4), (&[0, 0, 0], 3)] {
            let inputs = audio_of(7, 2, CuSeqlens::new(offsets, total).unwrap());
            let gradients = audio_backward(&gpu.gpu, module, &inputs);
            assert_eq!(gradients.grad_hidden_states.dim(), (total, 128));
            assert!(bits(&gradients).iter().flatten().all(|bits| *bits == 0), "{offsets:?} of {total} rows");
        }
    });
}

#[test]
fn padding_rows_get_zero_and_reach_nothing_whatever_they_hold() {
    on_each_module(|gpu, module| {
        for (chunk_lens, padding) in [(&[5, 0, 17][..], 1), (&[64, 64], 63), (&[200, 3], 70), (&[104], 1000)] {
            let plain = audio_of(1, 2, cu_seqlens_of(chunk_lens, padding));
            let end = plain.cu_seqlens.padding().start;
            let expected = audio_backward(&gpu.gpu, module, &plain);
            assert!(expected.grad_hidden_states.slice(s![end.., ..]).iter().all(|x| x.to_bits() == 0));
            for garbage in [bf16::NAN, bf16::INFINITY, bf16::MAX] {
                let mut inputs = plain.clone();
                fill_rows_from(&mut inputs, end, garbage);
                assert_eq!(
                    bits(&audio_backward(&gpu.gpu, module, &inputs)),
                    bits(&expected),
                    "{chunk_lens:?}, {garbage}"
                );
            }
            // Without padding rows K may be cut elsewhere: equal up to rounding.
            let without = one_padding_less(&plain, end);
            let reference = audio::reference::backward(&plain).unwrap();
            assert_audio(&expected, &reference);
            let alone = audio_backward(&gpu.gpu, module, &without);
            let rows = reference.grad_hidden_states.slice(s![..end, ..]).to_owned();
            assert_audio(&alone, &audio::Gradients { grad_hidden_states: rows, ..reference });
        }
    });
}

/// The inputs cut after row `end`, where the last chunk ends.
fn one_padding_less(inputs: &audio::Inputs, end: usize) -> audio::Inputs {
    let mut cut = one_chunk(inputs, 0..end);
    cut.cu_seqlens = CuSeqlens::new(inputs.cu_seqlens.offsets(), end).unwrap();
    cut
}

#[test]
fn value_gradients_sum_to_those_of_the_attention_output() {
    on_each_module(|gpu, module| {
        for chunk_lens in [&[1, 2, 3, 0, 40][..], &[104, 104, 78], &[700]] {
            let inputs = audio_of(2, 2, cu_seqlens_of(chunk_lens, 3));
            let end = inputs.cu_seqlens.padding().start;
            let out_bias = wide(&inputs.grad_output).slice(s![..end, ..]).sum_axis(Axis(0));
            let expected = wide(&inputs.out_weight).t().dot(&out_bias);
            let found = wide(&audio_backward(&gpu.gpu, module, &inputs).grad_v_bias);
            assert!(norm(&expected - &found) <= norm(expected) / 256.0, "{chunk_lens:?}");
        }
    });
}

#[test]
fn a_gradient_stays_in_the_chunk_it_comes_from() {
    on_each_module(|gpu, module| {
        let inputs = audio_with(8, 2, &[0, 104, 208, 312, 390]);
        for chunk in inputs.cu_seqlens.chunks() {
            let mut one = inputs.clone();
            one.grad_output.fill(bf16::ZERO);
            one.grad_output.slice_mut(s![chunk.clone(), ..]).assign(&inputs.grad_output.slice(s![chunk.clone(), ..]));
            let gradients = audio_backward(&gpu.gpu, module, &one);
            for (row, values) in gradients.grad_hidden_states.outer_iter().enumerate() {
                let zero = values.iter().all(|x| *x == bf16::ZERO);
                assert_eq!(zero, !chunk.contains(&row), "row {row}, chunk {chunk:?}");
            }
        }
    });
}

#[test]
fn a_gradient_of_one_row_reaches_its_window_and_no_further() {
    on_each_module(|gpu, module| {
        let mut inputs = audio_of(9, 2, window_cu_seqlens(104, 208).unwrap());
        inputs.grad_output.slice_mut(s![1.., ..]).fill(bf16::ZERO);
        let gradients = audio_backward(&gpu.gpu, module, &inputs);
        let is_zero = |row: usize| gradients.grad_hidden_states.row(row).iter().all(|x| *x == bf16::ZERO);
        assert!(!is_zero(103) && is_zero(104));
    });
}

#[test]
fn attention_is_not_causal() {
    on_each_module(|gpu, module| {
        let mut inputs = audio_with(10, 2, &[0, 2]);
        inputs.grad_output.row_mut(1).fill(bf16::ZERO);
        // With only the second row's hidden states left, the weight gradient holds only that row's value gradient.
        inputs.hidden_states.row_mut(0).fill(bf16::ZERO);
        let gradients = audio_backward(&gpu.gpu, module, &inputs);
        assert!(gradients.grad_v_weight.iter().any(|x| *x != bf16::ZERO));
    });
}

#[test]
fn one_token_chunks_have_no_query_or_key_gradient() {
    on_each_module(|gpu, module| {
        let inputs = audio_of(11, 2, cu_seqlens_of(&[1; 7], 0));
        let gradients = audio_backward(&gpu.gpu, module, &inputs);
        let rms = |x: &ndarray::ArrayViewD<'_, bf16>| norm(x.iter().map(|x| f64::from(*x))) / (x.len() as f64).sqrt();
        let tensors = gradients.tensors();
        let first = rms(&tensors[0].1);
        for (name, tensor) in &tensors {
            let of_query_or_key = name.starts_with("grad_q_") || name.starts_with("grad_k_");
            assert_eq!(rms(tensor) < 1e-4 * first, of_query_or_key, "{name}: rms {:e}", rms(tensor));
        }
        // dV = dA: the hidden states' gradient is dA @ v_weight, with dA rounded once.
        let d_attn = wide(&inputs.grad_output).dot(&wide(&inputs.out_weight));
        let expected = d_attn.dot(&wide(&inputs.v_weight));
        let error = norm(&expected - &wide(&gradients.grad_hidden_states));
        assert!(error <= 3.3e-3 * norm(expected), "error {error:e}");
    });
}

#[test]
fn a_packed_run_equals_its_chunks_one_by_one() {
    on_each_module(|gpu, module| {
        for chunk_lens in [&[3, 0, 30, 1][..], &[104, 64, 128, 17], &[200, 9, 300]] {
            let inputs = audio_of(12, 2, cu_seqlens_of(chunk_lens, 0));
            let packed = audio_backward(&gpu.gpu, module, &inputs);
            let mut rows = Vec::new();
            let mut sums: Vec<ArrayD<f64>> = packed.tensors()[1..].iter().map(|(_, x)| x.mapv(|_| 0.0)).collect();
            for chunk in inputs.cu_seqlens.chunks() {
                let alone = audio_backward(&gpu.gpu, module, &one_chunk(&inputs, chunk));
                for (sum, (_, part)) in sums.iter_mut().zip(&alone.tensors()[1..]) {
                    *sum += &part.mapv(f64::from);
                }
                rows.push(wide(&alone.grad_hidden_states));
            }
            let rows: Vec<_> = rows.iter().map(|x| x.view()).collect();
            let expected = [vec![concatenate(Axis(0), &rows).unwrap().into_dyn()], sums].concat();
            for ((name, packed), expected) in packed.tensors().iter().zip(expected) {
                // grad_k_bias is the rounding noise of either.
                if *name != "grad_k_bias" {
                    let error = norm(&expected - &packed.mapv(f64::from));
                    assert!(error <= 4e-3 * norm(expected), "{name}, {chunk_lens:?}: error {error:e}");
                }
            }
        }
    });
}

#[test]
fn finite_input_gives_finite_and_right_gradients() {
    on_gpu(|gpu| {
        for offsets in [&[0, 76, 110, 256][..], &[0, 137, 486], &[0, 64, 124]] {
            let mut inputs = audio_with(13, 2, offsets);
            for states in [&mut inputs.query_states, &mut inputs.key_states] {
                states.slice_mut(s![.., .., 0, ..]).mapv_inplace(|x| x * bf16::from_f32(3.0));
            }
            assert_matches_the_reference(gpu, &inputs);
        }
    });
}

#[test]
fn small_and_large_amplitudes_keep_their_accuracy() {
    on_gpu(|gpu| {
        for amplitude in [0.01, 3.0, 30.0] {
            let mut inputs = audio_of(14, 2, cu_seqlens_of(&[100, 33, 250, 1], 0));
            amplify(&mut inputs, amplitude);
            let reference = audio::reference::backward(&inputs).unwrap();
            for &module in &gpu.modules {
                eprintln!("{module} module, amplitude {amplitude}");
                let gradients = audio_backward(&gpu.gpu, module, &inputs);
                assert_audio_with(f64::from(amplitude), &gradients, &reference);
            }
        }
    });
}

#[test]
fn bias_sums_do_not_stop_at_256() {
    on_each_module(|gpu, module| {
        let mut inputs = audio_of(15, 1, window_cu_seqlens(64, 4096).unwrap());
        inputs.grad_output.fill(bf16::ONE);
        let gradients = audio_backward(&gpu.gpu, module, &inputs);
        assert!(gradients.grad_out_bias.iter().all(|x| x.to_f32() == 4096.0));
    });
}

#[test]
fn a_long_chunk_is_at_least_half_as_exact_as_plain_bf16() {
    on_gpu(|gpu| {
        for factor in [1.0, 10.0] {
            let mut inputs = audio_of(16, 1, cu_seqlens_of(&[4096], 0));
            inputs.grad_output.row_mut(1000).mapv_inplace(|x| x * bf16::from_f32(factor));
            let reference = audio::reference::backward(&inputs).unwrap();
            let plain = plain_bf16::backward(&inputs);
            for &module in &gpu.modules {
                let gradients = audio_backward(&gpu.gpu, module, &inputs);
                let found = gradients.tensors();
                for (((name, found), (_, plain)), (_, reference)) in
                    found.iter().zip(plain.tensors()).zip(reference.tensors())
                {
                    let error = |x: &ndarray::ArrayViewD<'_, bf16>| norm(&x.mapv(f64::from) - &reference);
                    let (found, plain) = (error(found), error(&plain));
                    assert!(found <= 2.0 * plain, "{module}, row x{factor}, {name}: {found:e}, plain bf16 {plain:e}");
                }
            }
        }
    });
}

#[test]
fn one_chunk_of_32769_rows_equals_the_reference() {
    // Longer than 2^15 rows: a 16-bit row number would not do. Few rows have a gradient, so that f64 can follow.
    let rows = [0, 1, 63, 20_000, 32_767, 32_768];
    on_gpu(|gpu| {
        let mut inputs = audio_with(17, 1, &[0, 32_769]);
        let kept = inputs.grad_output.select(Axis(0), &rows);
        inputs.grad_output.fill(bf16::ZERO);
        for (row, values) in rows.iter().zip(kept.outer_iter()) {
            inputs.grad_output.row_mut(*row).assign(&values);
        }
        let reference = sparse_queries::backward(&inputs, &rows);
        for &module in &gpu.modules {
            eprintln!("{module} module");
            assert_audio(&audio_backward(&gpu.gpu, module, &inputs), &reference);
        }
    });
}

#[test]
fn the_sparse_reference_is_the_reference() {
    let rows = [0, 5, 39];
    let mut inputs = audio_with(18, 2, &[0, 40]);
    for row in (0..40).filter(|row| !rows.contains(row)) {
        inputs.grad_output.row_mut(row).fill(bf16::ZERO);
    }
    let (sparse, reference) = (sparse_queries::backward(&inputs, &rows), audio::reference::backward(&inputs).unwrap());
    assert_matches(&sparse.tensors(), &reference.tensors(), &attn_backward_tests::assertions::F64);
}

#[test]
fn plain_bf16_is_near_the_reference_and_rounds_more_than_the_result() {
    let inputs = audio_with(19, 2, &[0, 100, 160]);
    let (plain, reference) = (plain_bf16::backward(&inputs), audio::reference::backward(&inputs).unwrap());
    let error = |name: &str| {
        let (plain, reference) = (plain.tensors(), reference.tensors());
        let index = plain.iter().position(|(found, _)| *found == name).unwrap();
        norm(&plain[index].1.mapv(f64::from) - &reference[index].1) / norm(reference[index].1.iter().copied())
    };
    for name in ["grad_hidden_states", "grad_q_weight", "grad_k_weight", "grad_v_weight", "grad_out_weight"] {
        assert!((1.5e-3..1e-2).contains(&error(name)), "{name}: {:e}", error(name));
    }
}

#[test]
fn the_scale_changes_gradients_as_in_the_reference() {
    on_gpu(|gpu| {
        let mut inputs = audio_of(20, 2, cu_seqlens_of(&[20, 30, 150], 0));
        inputs.scale = 0.25;
        assert_matches_the_reference(gpu, &inputs);
    });
}

#[test]
fn non_finite_values_reach_only_what_depends_on_them() {
    on_gpu(|gpu| {
        let mut inputs = audio_of(21, 2, cu_seqlens_of(&[4, 6, 150], 0));
        inputs.grad_output[[2, 5]] = bf16::NAN;
        inputs.value_states[[0, 1, 7, 3]] = bf16::INFINITY;
        let reference = audio::reference::backward(&inputs).unwrap();
        for &module in &gpu.modules {
            let gradients = audio_backward(&gpu.gpu, module, &inputs);
            for ((name, out), (_, reference)) in gradients.tensors().iter().zip(reference.tensors()) {
                let same = |(out, reference): (&bf16, &f64)| out.is_finite() == reference.is_finite();
                assert!(out.iter().zip(&reference).all(same), "{module}, {name}");
            }
        }
    });
}

#[test]
fn a_gpu_with_little_shared_memory_gets_right_gradients_or_a_named_error() {
    on_each_module(|gpu, module| {
        let inputs = audio_of(22, 2, cu_seqlens_of(&[128, 5, 300], 0));
        let reference = audio::reference::backward(&inputs).unwrap();
        for max_shared_bytes in [48 << 10, 99 << 10] {
            let target = Target { max_shared_bytes, ..gpu.target(module) };
            match audio_backward_on(&gpu.gpu, &target, &inputs) {
                Ok(gradients) => assert_audio(&gradients, &reference),
                Err(error) => assert!(error.to_string().contains("shared memory"), "{error}"),
            }
        }
    });
}

#[test]
fn bad_offsets_are_named_and_the_next_call_works() {
    on_gpu(|gpu| {
        for (offsets, index) in [(&[2, 5, 9][..], 0), (&[0, 7, 5, 9], 2), (&[0, 5, 12], 2), (&[0, -1, 9], 1)] {
            let error = CuSeqlens::new(offsets, 9).unwrap_err();
            let value = i64::from(offsets[index]);
            assert!(
                matches!(error, Error::CuSeqlens { index: at, value: found, .. } if (at, found) == (index, value)),
                "{error}"
            );
        }
        assert!(matches!(CuSeqlens::new(&[], 9), Err(Error::EmptyCuSeqlens)));
        let inputs = audio_with(23, 1, &[0, 5, 9]);
        let shape = audio::Shape { total_seq_len: 10, ..inputs.shape().unwrap() };
        let error = audio::Plan::new(&shape, &inputs.cu_seqlens, &gpu.target(gpu.modules[0])).unwrap_err();
        assert!(matches!(error, Error::Shape { .. }), "{error}");
        assert_matches_the_reference(gpu, &inputs);
    });
}

/// What the CPU gives, which is nearer to the reference than a GPU need be, with every element of grad_k_weight times `factor`.
fn gradients_with_a_fault(factor: f32) -> (audio::Gradients, audio::Gradients<f64>) {
    let inputs = audio_of(24, 2, cu_seqlens_of(&[20, 0, 100, 1], 3));
    let mut gradients = audio::cpu::backward(&inputs).unwrap();
    gradients.grad_k_weight.mapv_inplace(|x| bf16::from_f32(factor * x.to_f32()));
    (gradients, audio::reference::backward(&inputs).unwrap())
}

#[test]
fn the_comparison_accepts_what_is_right() {
    let (gradients, reference) = gradients_with_a_fault(1.0);
    assert_audio(&gradients, &reference);
}

#[test]
#[should_panic(expected = "grad_k_weight")]
fn the_comparison_refuses_a_fault_of_one_percent() {
    let (gradients, reference) = gradients_with_a_fault(1.01);
    assert_audio(&gradients, &reference);
}
