//! Properties of random chunks and shapes (proptest), the same ones in every run.

use attn_backward::cross::scales::Operands;
use attn_backward::cross::{self, Precision};
use attn_backward::{audio, gpu::ModuleKind};
use attn_backward_tests::assertions::{assert_audio, norm};
use attn_backward_tests::device::{TestGpu, on_gpu};
use attn_backward_tests::strategies;
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::guarded::{audio_backward, cross_backward};

/// Runs `property` on `cases` values of `strategy`; a failure is shrunk and printed.
fn check<S: Strategy>(cases: u32, strategy: S, property: impl Fn(&S::Value)) {
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let result = runner.run(&strategy, |value| {
        property(&value);
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}

fn each_module(gpu: &TestGpu, mut body: impl FnMut(ModuleKind)) {
    for &module in &gpu.modules {
        eprintln!("{module} module");
        body(module);
    }
}

#[test]
fn operation_a_equals_its_reference_for_any_chunks() {
    on_gpu(|gpu| {
        for longest in [40, 300] {
            check(40, strategies::audio(longest), |inputs| {
                let reference = audio::reference::backward(inputs).unwrap();
                each_module(gpu, |module| assert_audio(&audio_backward(&gpu.gpu, module, inputs), &reference));
            });
        }
    });
}

#[test]
fn operation_b_is_as_exact_as_its_converted_operands_for_any_shape() {
    on_gpu(|gpu| {
        check(40, strategies::cross(), |inputs| {
            let reference = cross::reference::backward(inputs).unwrap();
            for precision in [Precision::Fast, Precision::High] {
                let converted = Operands::new(inputs, precision).unwrap().gradients(inputs).unwrap();
                each_module(gpu, |module| {
                    let found = cross_backward(&gpu.gpu, module, inputs, precision);
                    let tensors = found.tensors().into_iter().zip(converted.tensors()).zip(reference.tensors());
                    for (((name, found), (_, converted)), (_, reference)) in tensors {
                        let error = norm(found.mapv(f64::from) - &reference);
                        // What fp32 sums add to the operands' rounding.
                        let bound = 1.1 * norm(&converted - &reference) + 2.7e-6 * norm(reference.iter().copied());
                        assert!(error <= bound, "{precision}, {name}: {error:e} above {bound:e}");
                    }
                });
            }
        });
    });
}
