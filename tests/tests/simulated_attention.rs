//! The attention kernels and the column sums of operation A on the simulated GPU, and all of operation A's launches together.

use attn_backward::compare::{MaxAtol, Tolerance};
use attn_backward::gpu::ModuleKind;
use attn_backward::suite::audio_inputs;
use attn_backward::{CuSeqlens, Target, audio, random};
use attn_backward_kernels::config::attention as config;
use attn_backward_tests::assertions::{LIKE_AUDIO_SUITE, assert_matches, bits};
use attn_backward_tests::simulated::audio::{
    Attention, AttentionInputs, HOPPER, LONG_KERNELS_ONLY, TARGET, attention, attention_reference, backward,
    blocks_of_chunks, launch_column_sums, launch_sum_partials, tiles_for,
};
use attn_backward_tests::simulated::{Simulator, columns};
use attn_backward_tests::strategies::{self, cu_seqlens_of};
use half::bf16;
use ndarray::{Array2, ArrayViewD, Axis, concatenate, s};
use proptest::prelude::*;

/// Around 16 rows of a warp, 64 of a tile, and the short kernels' sizes.
const CHUNK_LENS: [usize; 17] = [1, 15, 16, 17, 31, 33, 63, 64, 65, 100, 103, 104, 105, 127, 128, 129, 192];

fn inputs(seed: u64, num_heads: usize, cu_seqlens: CuSeqlens) -> AttentionInputs {
    let rows = cu_seqlens.total_seq_len();
    let states = (1, num_heads, rows, audio::HEAD_DIM);
    AttentionInputs {
        query_states: random::normal(seed, 0, 1.0, states),
        key_states: random::normal(seed, 1, 1.0, states),
        value_states: random::normal(seed, 2, 1.0, states),
        d_attn: random::normal(seed, 3, 8.0, (rows, num_heads * audio::HEAD_DIM)),
        cu_seqlens,
        scale: 0.125,
    }
}

fn run(inputs: &AttentionInputs, target: &Target) -> Option<Attention<bf16, f32>> {
    // so few SMs that a block of the persistent kernels takes several tiles
    let gpu = if target.module == ModuleKind::Hopper { Simulator::hopper(3) } else { Simulator::new() };
    gpu.map(|mut gpu| attention(&mut gpu, inputs, target))
}

/// The output of the chunks alone, and their column sums, are those of `chunks` of `outputs`' chunks, in this order.
fn rows_of(outputs: &Attention<bf16, f32>, chunks: &[std::ops::Range<usize>], sums: &[usize]) -> Attention<bf16, f32> {
    let rows: Vec<usize> = chunks.iter().cloned().flatten().collect();
    Attention {
        o: outputs.o.select(Axis(0), &rows),
        dqkv: outputs.dqkv.select(Axis(0), &rows),
        sums: outputs.sums.select(Axis(0), sums),
    }
}

/// Equal bit for bit; NaN equals NaN.
#[track_caller]
fn assert_same(a: &Attention<bf16, f32>, b: &Attention<bf16, f32>) {
    let wide = |x: &Attention<bf16, f32>| {
        [&x.o, &x.dqkv].map(|x| x.mapv(f32::from)).into_iter().chain([x.sums.clone()]).collect::<Vec<_>>()
    };
    let bits = |x: &f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    for ((a, b), name) in wide(a).iter().zip(&wide(b)).zip(["o", "dqkv", "sums"]) {
        assert_eq!(a.dim(), b.dim());
        let wrong = a.indexed_iter().zip(b).find(|((_, a), b)| bits(a) != bits(b));
        assert!(wrong.is_none(), "{name}: {wrong:?}");
    }
}

/// The plan for these chunks is the short kernel of `rows` rows alone.
#[track_caller]
fn assert_short_kernel(inputs: &AttentionInputs, rows: usize) {
    let tiles = tiles_for(&inputs.cu_seqlens, inputs.query_states.dim().1, &TARGET);
    assert_eq!((tiles.short_rows() as usize, tiles.long_slots()), (rows, None));
}

/// `(name, kernel's, reference's)`; those of one list are judged by the scale of the first: the sums of dK vanish in real arithmetic.
type Part = (&'static str, Array2<f32>, Array2<f64>);

fn parts(outputs: &Attention<bf16, f32>, reference: &Attention<f64, f64>) -> [Vec<Part>; 5] {
    let d_model = reference.o.ncols();
    let dqkv = |name, i: usize| -> Part {
        let out = columns(&outputs.dqkv, i * d_model, d_model);
        (name, out.mapv(f32::from), columns(&reference.dqkv, i * d_model, d_model))
    };
    let sums = |name, i: usize| -> Part {
        (name, columns(&outputs.sums, i * d_model, d_model), columns(&reference.sums, i * d_model, d_model))
    };
    [
        vec![("o", outputs.o.mapv(f32::from), reference.o.clone())],
        vec![dqkv("dq", 0), dqkv("dk", 1)],
        vec![dqkv("dv", 2)],
        vec![sums("sums of dq", 0), sums("sums of dk", 1)],
        vec![sums("sums of dv", 2)],
    ]
}

/// How far the kernels may be from the reference: what they round to fp16 costs some 2^-11 of each term, dQ, dK, dV and O are rounded
/// to bf16 in the end (1.7e-3 of the norm), and sums are not.
const ELEMENT: f64 = 5e-3;
const NORM: f64 = 2e-3;
const NORM_OF_SUMS: f64 = 5e-4;

#[track_caller]
fn assert_accurate(outputs: &Attention<bf16, f32>, inputs: &AttentionInputs, target: &Target) {
    for list in parts(outputs, &attention_reference(inputs, target)) {
        let is_sum = list[0].0.starts_with("sums");
        let (max_rtol, norm) = if is_sum { (0.0, NORM_OF_SUMS) } else { (1.0 / 256.0, NORM) };
        let tolerance = Tolerance { max_atol: MaxAtol::OfRms(ELEMENT), max_rtol, required_match_ratio: 1.0 };
        let outputs: Vec<_> = list.iter().map(|(name, out, _)| (*name, out.view().into_dyn())).collect();
        let references: Vec<_> = list.iter().map(|(name, _, reference)| (*name, reference.view().into_dyn())).collect();
        assert_matches(&outputs, &references, &tolerance);
        for (name, error) in errors(&list) {
            assert!(error <= norm, "{name}: error {error:e} of the norm");
        }
    }
}

/// Norm of the error of each part, in the norm of the first's reference.
fn errors(list: &[Part]) -> Vec<(&'static str, f64)> {
    let norm = |x: &Array2<f64>| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let error = |(name, out, reference): &Part| (*name, norm(&(out.mapv(f64::from) - reference)) / norm(&list[0].2));
    list.iter().map(error).collect()
}

#[test]
fn short_kernels_equal_the_reference_for_chunk_lengths_around_tiles() {
    for rows in [64, 80, 96, 128] {
        let chunk_lens: Vec<usize> = CHUNK_LENS.into_iter().filter(|&len| len <= rows).chain([rows]).collect();
        let mut inputs = inputs(rows as u64, 2, cu_seqlens_of(&chunk_lens, 3));
        assert_short_kernel(&inputs, rows);
        for scale in [0.125, 0.25] {
            inputs.scale = scale;
            let Some(outputs) = run(&inputs, &TARGET) else { return };
            assert_accurate(&outputs, &inputs, &TARGET);
        }
    }
}

#[test]
fn hopper_kernels_for_long_chunks_equal_the_reference() {
    let no_short_kernel = Target { max_shared_bytes: 0, ..HOPPER };
    for (seed, num_heads, chunk_lens, scale, target) in [
        (2, 1, &[300][..], 0.125, HOPPER),
        (3, 2, &[129, 257, 40, 384, 128], 0.125, HOPPER),
        (4, 1, &[200, 1, 513], 0.125, no_short_kernel),
        (5, 1, &[257], 0.25, HOPPER),
    ] {
        let mut inputs = inputs(seed, num_heads, cu_seqlens_of(chunk_lens, 3));
        inputs.scale = scale;
        assert!(tiles_for(&inputs.cu_seqlens, num_heads, &target).flash());
        let Some(outputs) = run(&inputs, &target) else { return };
        assert_accurate(&outputs, &inputs, &target);
    }
}

#[test]
fn hopper_kernels_for_long_chunks_do_not_depend_on_the_number_of_blocks() {
    let inputs = inputs(6, 2, cu_seqlens_of(&[260, 130], 1));
    let on = |num_sms| Simulator::hopper(num_sms).map(|mut gpu| attention(&mut gpu, &inputs, &HOPPER));
    let (Some(one), Some(many)) = (on(1), on(132)) else { return };
    assert_same(&one, &many);
}

#[test]
fn hopper_kernels_for_long_chunks_lose_nothing_to_what_all_keys_share() {
    let mut inputs = inputs(7, 1, cu_seqlens_of(&[270], 0));
    inputs.key_states.mapv_inplace(|k| bf16::from_f32(90.0 + k.to_f32()));
    let Some(outputs) = run(&inputs, &HOPPER) else { return };
    assert_accurate(&outputs, &inputs, &HOPPER);
}

#[test]
fn long_kernels_equal_the_reference_for_chunk_lengths_around_tiles() {
    let mut inputs = inputs(1, 2, cu_seqlens_of(&CHUNK_LENS, 3));
    for (target, scale) in [(LONG_KERNELS_ONLY, 0.125), (LONG_KERNELS_ONLY, 0.25), (TARGET, 0.125)] {
        let tiles = tiles_for(&inputs.cu_seqlens, 2, &target);
        assert_eq!((tiles.short_rows() == 0, tiles.long_slots().is_some()), (target == LONG_KERNELS_ONLY, true));
        inputs.scale = scale;
        let Some(outputs) = run(&inputs, &target) else { return };
        assert_accurate(&outputs, &inputs, &target);
    }
}

#[test]
fn saturated_probabilities_are_as_good_as_the_suite_asks() {
    let mut inputs = inputs(2, 2, cu_seqlens_of(&CHUNK_LENS, 3));
    let rows = inputs.cu_seqlens.total_seq_len();
    inputs.map_rows(0..rows, |x| 30.0 * x);
    for target in [TARGET, LONG_KERNELS_ONLY] {
        let Some(outputs) = run(&inputs, &target) else { return };
        for list in parts(&outputs, &attention_reference(&inputs, &target)) {
            for (name, out, reference) in &list {
                let (out, reference) = (out.view().into_dyn(), reference.view().into_dyn());
                // A few rows make up the sums, of which the suite sees only what the rows' rounding leaves: they are judged by their norm.
                if !name.starts_with("sums") {
                    assert_matches(&[(*name, out)], &[(*name, reference)], &LIKE_AUDIO_SUITE);
                }
            }
            for (name, error) in errors(&list) {
                assert!(error <= 4e-3, "{name}: error {error:e} of the norm");
            }
        }
    }
}

#[test]
fn gradient_and_value_scale_by_powers_of_two_exactly() {
    let plain = inputs(3, 1, cu_seqlens_of(&[17, 100, 150], 0));
    for target in [TARGET, LONG_KERNELS_ONLY] {
        let Some(expected) = run(&plain, &target) else { return };
        for (of_gradient, of_value) in [(60, 0), (-60, 0), (0, 40), (-30, -40)] {
            let [gradient, value] = [of_gradient, of_value].map(|e| 2f32.powi(e));
            let mut inputs = plain.clone();
            inputs.d_attn.mapv_inplace(|x| x * gradient);
            inputs.value_states.mapv_inplace(|x| bf16::from_f32(x.to_f32() * value));
            let mut outputs = run(&inputs, &target).expect("there was a simulator before");
            outputs.o.mapv_inplace(|x| bf16::from_f32(x.to_f32() / value));
            let unscale = |column: usize| if column < 2 * 64 { gradient * value } else { gradient };
            for (column, mut x) in outputs.dqkv.axis_iter_mut(Axis(1)).enumerate() {
                x.mapv_inplace(|x| bf16::from_f32(x.to_f32() / unscale(column)));
            }
            for (column, mut x) in outputs.sums.axis_iter_mut(Axis(1)).enumerate() {
                x.mapv_inplace(|x| x / unscale(column));
            }
            assert_same(&outputs, &expected);
        }
    }
}

#[test]
fn empty_chunks_change_nothing() {
    let plain = inputs(4, 2, cu_seqlens_of(&[5, 4, 140], 2));
    let mut with_empty = plain.clone();
    with_empty.cu_seqlens = cu_seqlens_of(&[0, 0, 5, 0, 4, 140, 0], 2);
    for target in [TARGET, LONG_KERNELS_ONLY] {
        let (Some(a), Some(b)) = (run(&plain, &target), run(&with_empty, &target)) else { return };
        assert_same(&a, &b);
    }
}

#[test]
fn result_is_independent_of_chunk_order_and_repeatable() {
    let chunk_lens = [31, 130, 1, 64, 17];
    let order = [3, 0, 4, 2, 1];
    let plain = inputs(5, 2, cu_seqlens_of(&chunk_lens, 0));
    let chunks: Vec<_> = plain.cu_seqlens.chunks().collect();
    let rows: Vec<usize> = order.iter().flat_map(|&c| chunks[c].clone()).collect();
    let mut permuted = plain.clone();
    for states in [&mut permuted.query_states, &mut permuted.key_states, &mut permuted.value_states] {
        *states = states.select(Axis(2), &rows);
    }
    permuted.d_attn = plain.d_attn.select(Axis(0), &rows);
    permuted.cu_seqlens = cu_seqlens_of(&order.map(|c| chunk_lens[c]), 0);
    for target in [TARGET, LONG_KERNELS_ONLY] {
        let Some(outputs) = run(&plain, &target) else { return };
        assert_same(&outputs, &run(&plain, &target).expect("there was a simulator before"));
        // Blocks of the chunks, in the order of their rows.
        let mut next = 0;
        let blocks = chunk_lens.map(|len| {
            let blocks = if target == TARGET && len <= 64 { 1 } else { len.div_ceil(64) };
            next += blocks;
            next - blocks..next
        });
        let sums: Vec<usize> = order.iter().flat_map(|&c| blocks[c].clone()).collect();
        let expected = rows_of(&outputs, &order.map(|c| chunks[c].clone()), &sums);
        assert_same(&run(&permuted, &target).expect("there was a simulator before"), &expected);
    }
}

#[test]
fn one_token_chunks_have_no_query_or_key_gradient_and_their_own_value_gradient() {
    let mut inputs = inputs(6, 2, cu_seqlens_of(&[1; 9], 0));
    // Numbers that bf16 and fp16 hold.
    inputs.d_attn = inputs.d_attn.mapv(|x| x.round());
    for target in [TARGET, LONG_KERNELS_ONLY] {
        let Some(outputs) = run(&inputs, &target) else { return };
        assert_eq!(columns(&outputs.dqkv, 256, 128).mapv(f32::from), inputs.d_attn);
        assert!(columns(&outputs.dqkv, 0, 256).iter().all(|x| x.to_f32().abs() < 1e-5));
        let value_states = inputs.value_states.index_axis(Axis(0), 0);
        let heads: Vec<_> = value_states.outer_iter().collect();
        assert_eq!(outputs.o, concatenate(Axis(1), &heads).unwrap());
        assert_eq!(columns(&outputs.sums, 256, 128), inputs.d_attn);
    }
}

#[test]
fn padding_rows_are_not_read_and_become_zero() {
    let plain = inputs(7, 2, cu_seqlens_of(&[3, 70, 130], 40));
    let mut garbage = plain.clone();
    garbage.map_rows(203..243, |_| f32::NAN);
    for target in [TARGET, LONG_KERNELS_ONLY] {
        // That they become zero is checked by every run.
        let (Some(a), Some(b)) = (run(&plain, &target), run(&garbage, &target)) else { return };
        assert_same(&a, &b);
    }
}

#[test]
fn what_a_chunk_holds_stays_in_it() {
    let plain = inputs(8, 1, cu_seqlens_of(&[30, 60, 130, 20], 0));
    let chunks: Vec<_> = plain.cu_seqlens.chunks().collect();
    for target in [TARGET, LONG_KERNELS_ONLY] {
        let blocks = blocks_of_chunks(&plain.cu_seqlens, 1, &target);
        let Some(expected) = run(&plain, &target) else { return };
        for (i, chunk) in chunks.iter().enumerate() {
            let others: Vec<_> = chunks.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, c)| c.clone()).collect();
            let sums: Vec<usize> =
                blocks.iter().enumerate().filter(|(j, _)| *j != i).flat_map(|(_, blocks)| blocks.clone()).collect();
            for value in [f32::NAN, f32::INFINITY, 1e30] {
                let mut changed = plain.clone();
                changed.map_rows(chunk.clone(), |_| value);
                let outputs = run(&changed, &target).expect("there was a simulator before");
                assert_same(&rows_of(&outputs, &others, &sums), &rows_of(&expected, &others, &sums));
                let own = outputs.dqkv.slice(s![chunk.clone(), ..]);
                assert!(own.iter().all(|x| x.is_nan()) || value == 1e30, "{value} is not computed through");
            }
            let mut zero = plain.clone();
            zero.d_attn.slice_mut(s![..chunk.start, ..]).fill(0.0);
            zero.d_attn.slice_mut(s![chunk.end.., ..]).fill(0.0);
            let outputs = run(&zero, &target).expect("there was a simulator before");
            for (row, values) in outputs.dqkv.outer_iter().enumerate() {
                assert_eq!(
                    values.iter().all(|x| *x == bf16::ZERO),
                    !chunk.contains(&row),
                    "row {row}, chunk {chunk:?}"
                );
            }
        }
    }
}

#[test]
fn what_a_head_holds_stays_in_it() {
    let plain = inputs(9, 3, cu_seqlens_of(&[30, 130], 0));
    let mut changed = plain.clone();
    changed.value_states.slice_mut(s![.., 1, 7, 3]).fill(bf16::NAN);
    changed.key_states.slice_mut(s![.., 1, 40, 3]).fill(bf16::INFINITY);
    changed.d_attn[[50, 64]] = f32::NAN;
    for target in [TARGET, LONG_KERNELS_ONLY] {
        let (Some(a), Some(b)) = (run(&plain, &target), run(&changed, &target)) else { return };
        for head in [0, 2] {
            assert_eq!(columns(&a.o, 64 * head, 64), columns(&b.o, 64 * head, 64));
            for gradient in 0..3 {
                let first = 192 * gradient + 64 * head;
                assert_eq!(columns(&a.dqkv, first, 64), columns(&b.dqkv, first, 64));
                assert_eq!(columns(&a.sums, first, 64), columns(&b.sums, first, 64));
            }
        }
        assert!(columns(&b.dqkv, 64, 64).iter().any(|x| x.is_nan()));
    }
}

#[test]
fn column_sums_are_exact_where_fp32_is() {
    for (rows, column_count) in [(0, 64), (1, 8), (31, 264), (33, 1280), (257, 520), (4096, 64)] {
        let Some(mut gpu) = Simulator::new() else { return };
        let integer = |row: usize, column: usize| ((row * 7 + column * 13) % 17) as f32 - 8.0;
        // 4096 ones: sums in bf16 would stop at 256.
        let x = Array2::from_shape_fn(
            (rows, column_count),
            |(row, column)| if rows == 4096 { 1.0 } else { integer(row, column) },
        );
        let at = gpu.upload(&x.mapv(bf16::from_f32));
        let partials_bytes = 4 * rows.div_ceil(config::column_sums_rows_per_block(rows as u32) as usize) * column_count;
        let partials = gpu.output(partials_bytes);
        let partial_rows = launch_column_sums(&mut gpu, at, (rows as u32, column_count as u32), 0, partials);
        // Beside it: other partial sums, whose rows are farther apart, and a sum of no rows.
        let other = Array2::from_shape_fn((37, 40), |(row, column)| integer(row, column));
        let others = gpu.upload_pitched(&other, 120, f32::NAN);
        let outs: [u64; 4] = [column_count, 40, 24, 36].map(|columns| gpu.output(2 * columns));
        let sums = [
            (partials, outs[0], partial_rows, column_count as u32, column_count as u32),
            (others, outs[1], 37, 120, 40),
            (others, outs[2], 0, 120, 24),
            (others + 16, outs[3], 20, 120, 36),
        ];
        launch_sum_partials(&mut gpu, sums);
        let rounded = |x: Array2<f32>| x.sum_axis(Axis(0)).mapv(bf16::from_f32);
        // Rows past a limit of the device may hold anything.
        for limit in
            [0, rows / 3, rows, rows + 1, usize::MAX].map(|limit| limit.min(i32::MAX as usize + 1) as u32 as i32)
        {
            let counted = (limit as u32 as usize).min(rows);
            let mut limited = x.mapv(bf16::from_f32);
            limited.slice_mut(s![counted.., ..]).fill(bf16::NAN);
            let (at, limit) = (gpu.upload(&limited), gpu.upload(&ndarray::arr1(&[limit])));
            let (partials, out) = (gpu.output(partials_bytes), gpu.output(2 * column_count));
            let partial_rows = launch_column_sums(&mut gpu, at, (rows as u32, column_count as u32), limit, partials);
            let sum = (partials, out, partial_rows, column_count as u32, column_count as u32);
            let nothing = (0, 0, 0, 0, 0);
            launch_sum_partials(&mut gpu, [sum, nothing, nothing, nothing]);
            let expected = rounded(x.slice(s![..counted, ..]).to_owned());
            assert_eq!(gpu.download::<bf16, _>(out, column_count), expected, "{counted} of {rows} rows");
        }
        assert_eq!(gpu.download::<bf16, _>(outs[0], column_count), rounded(x), "{rows} x {column_count}");
        assert_eq!(gpu.download::<bf16, _>(outs[1], 40), rounded(other.clone()));
        assert_eq!(gpu.download::<bf16, _>(outs[2], 24), ndarray::Array1::from_elem(24, bf16::ZERO));
        assert_eq!(gpu.download::<bf16, _>(outs[3], 36), rounded(other.slice(s![..20, 4..40]).to_owned()));
    }
}

/// All of operation A, and how it must compare with the reference: every output by its norm. What has a query's or key's gradient is
/// judged by that of the query too, since the bias of the keys has none in real arithmetic, and by that of the value: chunks of one
/// token have neither.
fn operation_a_matches_its_reference(inputs: &audio::Inputs, target: &Target) {
    let Some(mut gpu) = Simulator::new() else { return };
    let (outputs, reference) = (backward(&mut gpu, inputs, target), audio::reference::backward(inputs).unwrap());
    let norm = |x: &ArrayViewD<'_, f64>| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let references = reference.tensors();
    let norm_of = |name: &str| norm(&references.iter().find(|(other, _)| *other == name).unwrap().1);
    for ((name, out), (_, expected)) in outputs.tensors().iter().zip(&references) {
        let error = norm(&(out.mapv(f64::from) - expected).view());
        let mut scale = norm(expected);
        for letter in ["_q_", "_k_"] {
            if name.contains(letter) {
                scale = scale.max(norm_of(&name.replace(letter, "_q_"))) + 1e-2 * norm_of(&name.replace(letter, "_v_"));
            }
        }
        // Two roundings to bf16, of dQ, dK, dV or O and of the result: 2.4e-3.
        assert!(error <= 4e-3 * scale, "{name}: error {error:e}, norm {scale:e}");
    }
}

#[test]
fn operation_a_passes_as_the_suite_asks() {
    for (target, chunk_lens) in
        [(TARGET, [1, 0, 33, 60, 140]), (TARGET, [71, 72, 71, 0, 20]), (LONG_KERNELS_ONLY, [1, 0, 33, 60, 140])]
    {
        let cu_seqlens = cu_seqlens_of(&chunk_lens, 6);
        let shape = audio::Shape { total_seq_len: cu_seqlens.total_seq_len(), num_heads: 2, scale: 0.125 };
        let inputs = audio_inputs(3, shape, cu_seqlens);
        let Some(mut gpu) = Simulator::new() else { return };
        let outputs = backward(&mut gpu, &inputs, &target);
        let reference = audio::reference::backward(&inputs).unwrap();
        assert_matches(&outputs.tensors(), &reference.tensors(), &LIKE_AUDIO_SUITE);
        operation_a_matches_its_reference(&inputs, &target);
        let again = backward(&mut Simulator::new().expect("there was one before"), &inputs, &target);
        assert_eq!(bits(&outputs), bits(&again));
    }
}

#[test]
fn operation_a_follows_the_scale_as_the_cpu_does() {
    let cu_seqlens = cu_seqlens_of(&[20, 30], 0);
    let shape = audio::Shape { total_seq_len: 50, num_heads: 2, scale: 0.125 };
    let mut inputs = audio_inputs(4, shape, cu_seqlens);
    let grads = [0.125, 0.25].map(|scale| {
        inputs.scale = scale;
        Simulator::new().map(|mut gpu| (backward(&mut gpu, &inputs, &TARGET), audio::cpu::backward(&inputs).unwrap()))
    });
    let [Some((before, _)), Some((after, cpu))] = grads else { return };
    assert_ne!(before.grad_q_weight, after.grad_q_weight);
    let cpu = cpu.tensors().map(|(name, x)| (name, x.mapv(f64::from)));
    let cpu: Vec<_> = cpu.iter().map(|(name, x)| (*name, x.view())).collect();
    assert_matches(&after.tensors(), &cpu, &LIKE_AUDIO_SUITE);
}

#[test]
fn operation_a_without_tokens_gives_zeros() {
    for (offsets, total) in [(&[0][..], 0), (&[0, 0, 0], 3)] {
        let shape = audio::Shape { total_seq_len: total, num_heads: 1, scale: 0.125 };
        let inputs = audio_inputs(5, shape, CuSeqlens::new(offsets, total).unwrap());
        let Some(mut gpu) = Simulator::new() else { return };
        let outputs = backward(&mut gpu, &inputs, &TARGET);
        assert!(bits(&outputs).iter().flatten().all(|bits| *bits == 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 64, ..ProptestConfig::default() })]

    #[test]
    fn operation_a_equals_its_reference_for_any_chunks(
        inputs in prop_oneof![strategies::audio(40), strategies::audio(150)],
        long in prop::bool::weighted(0.3),
    ) {
        operation_a_matches_its_reference(&inputs, if long { &LONG_KERNELS_ONLY } else { &TARGET });
    }
}
