//! The public suites as the library holds them, and their smallest cases on the CPU.

use attn_backward::compare::{MaxAtol, compare_all};
use attn_backward::suite::{self, balanced_cu_seqlens};
use attn_backward::{audio, cross};
use attn_backward_tests::assertions::assert_matches;
use half::bf16;

#[test]
fn suites_hold_the_sixteen_public_cases_of_each_operation() {
    let (audio, cross) = (suite::audio_cases(), suite::cross_cases());
    assert_eq!((audio.len(), cross.len()), (16, 16));
    let sum: usize = audio.iter().map(|case| case.shape.total_seq_len).sum();
    assert_eq!(sum, 11690);
    for case in &audio {
        assert_eq!((case.shape.d_model(), case.shape.scale), (1280, 0.125));
        assert_eq!((case.tolerance.max_rtol, case.tolerance.required_match_ratio), (0.05, 0.98));
        assert_eq!(case.cu_seqlens.padding().len(), 0);
    }
    assert_eq!(audio[0].tolerance.max_atol, MaxAtol::Fixed(0.64));
    for case in &cross {
        assert_eq!((case.shape.q_out_dim(), case.shape.kv_out_dim(), case.shape.groups()), (4096, 1024, 4));
        assert_eq!((case.tolerance.max_rtol, case.tolerance.required_match_ratio), (1e-3, 0.99));
    }
    let mean = cross.iter().map(|case| cross::flops(&case.shape)).sum::<f64>() / 16.0;
    assert_eq!((mean / 1e9).round(), 158.0);
}

#[test]
fn chunk_rule_gives_the_first_chunks_one_row_more() {
    assert_eq!(balanced_cu_seqlens(373, 5).unwrap().offsets(), [0, 75, 150, 225, 299, 373]);
    assert_eq!(balanced_cu_seqlens(2, 3).unwrap().offsets(), [0, 1, 2, 2]);
    assert!(balanced_cu_seqlens(2, 0).is_err());
}

#[test]
fn inputs_repeat_for_a_seed_and_have_the_suites_scale() {
    let case = &suite::cross_cases()[3];
    let (a, b, other) = (case.inputs(1), case.inputs(1), case.inputs(2));
    assert_eq!(a.q_weight, b.q_weight);
    assert_ne!(a.q_weight, other.q_weight);
    assert_ne!(a.k_weight, a.v_weight);
    let std = |x: &ndarray::ArrayViewD<f32>| (x.iter().map(|x| f64::from(x * x)).sum::<f64>() / x.len() as f64).sqrt();
    let expected = [
        (std(&a.grad_query_states.view().into_dyn()), 64.0),
        (std(&a.grad_key_states.view().into_dyn()), 64.0),
        (std(&a.grad_value_states.view().into_dyn()), 64.0),
        (std(&a.decoder_hidden_states.view().into_dyn()), 1536f64.sqrt()),
        (std(&a.encoder_hidden_states.view().into_dyn()), 32.0),
        (std(&a.q_weight.view().into_dyn()), 1536f64.sqrt()),
        (std(&a.k_weight.view().into_dyn()), 32.0),
        (std(&a.v_weight.view().into_dyn()), 32.0),
    ];
    for (std, divisor) in expected {
        assert!((std * divisor - 1.0).abs() < 0.01);
    }
}

#[test]
fn cpu_passes_the_smallest_public_cases() {
    let audio = suite::audio_cases();
    for case in audio.iter().filter(|case| case.shape.total_seq_len < 250) {
        let inputs = case.inputs(0);
        let (grads, reference) = (audio::cpu::backward(&inputs).unwrap(), audio::reference::backward(&inputs).unwrap());
        assert_matches(&grads.tensors(), &reference.tensors(), &case.tolerance);
    }
    for case in suite::cross_cases().iter().filter(|case| cross::flops(&case.shape) < 10e9) {
        let inputs = case.inputs(0);
        let (grads, reference) = (cross::cpu::backward(&inputs).unwrap(), cross::reference::backward(&inputs).unwrap());
        for comparison in assert_matches(&grads.tensors(), &reference.tensors(), &case.tolerance) {
            assert!(comparison.normwise_error < 3e-6, "{comparison:?}");
        }
    }
}

#[test]
fn cpu_passes_random_cases() {
    for case in suite::random_audio_cases(5, 6) {
        let inputs = case.inputs(5);
        let (grads, reference) = (audio::cpu::backward(&inputs).unwrap(), audio::reference::backward(&inputs).unwrap());
        assert_matches(&grads.tensors(), &reference.tensors(), &case.tolerance);
    }
    for case in suite::random_cross_cases(5, 4) {
        let inputs = case.inputs(5);
        let (grads, reference) = (cross::cpu::backward(&inputs).unwrap(), cross::reference::backward(&inputs).unwrap());
        assert_matches(&grads.tensors(), &reference.tensors(), &case.tolerance);
    }
}

#[test]
fn tolerances_refuse_wrong_gradients() {
    let case = &suite::random_audio_cases(6, 1)[0];
    let inputs = case.inputs(6);
    let reference = audio::reference::backward(&inputs).unwrap();
    let right = audio::cpu::backward(&inputs).unwrap();
    let fails = |grads: &audio::Gradients| -> Vec<&str> {
        let comparisons = compare_all(&grads.tensors(), &reference.tensors(), &case.tolerance).unwrap();
        let failed = comparisons.iter().map(|c| !c.passes(case.tolerance.required_match_ratio));
        grads.tensors().iter().zip(failed).filter(|(_, failed)| *failed).map(|((name, _), _)| *name).collect()
    };
    assert!(fails(&right).is_empty());
    let mut wrong = right.clone();
    wrong.grad_v_weight.mapv_inplace(|x| bf16::from_f32(1.1 * x.to_f32()));
    wrong.grad_q_bias.fill(bf16::ZERO);
    wrong.grad_out_weight[[3, 4]] = bf16::NAN;
    assert_eq!(fails(&wrong), ["grad_q_bias", "grad_v_weight", "grad_out_weight"]);
}
