//! Public and random cases against the reference; `attn-backward check` runs all of them.

use attn_backward::compare::Tolerance;
use attn_backward::cross::{self, Precision};
use attn_backward::{audio, suite};
use attn_backward_tests::assertions::assert_matches;
use attn_backward_tests::device::on_gpu;

use crate::guarded::{audio_backward, cross_backward};

#[test]
fn random_and_small_public_cases_of_operation_a_pass() {
    on_gpu(|gpu| {
        let public = suite::audio_cases().into_iter().filter(|case| case.shape.total_seq_len < 400);
        for case in public.chain(suite::random_audio_cases(1, 24)) {
            let inputs = case.inputs(1);
            let reference = audio::reference::backward(&inputs).unwrap();
            for &module in &gpu.modules {
                eprintln!("{module} module, {}", case.name);
                let gradients = audio_backward(&gpu.gpu, module, &inputs);
                for comparison in assert_matches(&gradients.tensors(), &reference.tensors(), &case.tolerance) {
                    // More than the suite asks for: it is what the kernels' roundings cost.
                    let needed = if comparison.name == "grad_k_bias" { 0.999 } else { 0.99 };
                    let few = comparison.elements < 4096;
                    assert!(few || comparison.matched_ratio >= needed, "{comparison:#?}");
                }
            }
        }
    });
}

#[test]
fn random_and_small_public_cases_of_operation_b_pass() {
    on_gpu(|gpu| {
        let public = suite::cross_cases().into_iter().filter(|case| cross::flops(&case.shape) < 12e9);
        for case in public.chain(suite::random_cross_cases(1, 16)) {
            let inputs = case.inputs(1);
            let reference = cross::reference::backward(&inputs).unwrap();
            for &module in &gpu.modules {
                for (precision, promised) in [(Precision::Fast, 1.1 * 3.2e-4), (Precision::High, 3e-6)] {
                    eprintln!("{module} module, {precision}, {}", case.name);
                    let gradients = cross_backward(&gpu.gpu, module, &inputs, precision);
                    let tolerance = Tolerance { required_match_ratio: 0.99, ..case.tolerance };
                    for comparison in assert_matches(&gradients.tensors(), &reference.tensors(), &tolerance) {
                        assert!(comparison.normwise_error <= promised, "{comparison:#?}");
                    }
                }
            }
        }
    });
}
