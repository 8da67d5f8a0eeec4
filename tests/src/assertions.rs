//! Assertions on gradients, and the tolerances that tests use.

use attn_backward::audio;
use attn_backward::compare::{Comparison, MaxAtol, Tolerance, compare_all};
use attn_backward::cross::scales::{Operand, Operands};
use half::{bf16, f16};
use ndarray::{Array, Array2, ArrayViewD, Dimension};
use num_traits::AsPrimitive;

/// f32 arithmetic rounded once to bf16: half a bf16 step, which is at most 2^-8 of the value, and some f32 noise; every element.
pub const ROUNDED_ONCE: Tolerance =
    Tolerance { max_atol: MaxAtol::OfRms(2e-5), max_rtol: 1.0 / 256.0, required_match_ratio: 1.0 };

/// f32 arithmetic; every element.
pub const F32: Tolerance = Tolerance { max_atol: MaxAtol::OfRms(1e-5), max_rtol: 1e-5, required_match_ratio: 1.0 };

/// f64 arithmetic; every element.
pub const F64: Tolerance = Tolerance { max_atol: MaxAtol::OfRms(1e-12), max_rtol: 1e-12, required_match_ratio: 1.0 };

/// The suite of operation A, with its absolute tolerance as a share of the reference's magnitude.
pub const LIKE_AUDIO_SUITE: Tolerance =
    Tolerance { max_atol: MaxAtol::OfRms(0.0015), max_rtol: 0.05, required_match_ratio: 0.98 };

/// Fails unless every gradient passes; returns the comparisons.
#[track_caller]
pub fn assert_matches<T>(
    outputs: &[(&'static str, ArrayViewD<'_, T>)],
    references: &[(&'static str, ArrayViewD<'_, f64>)],
    tolerance: &Tolerance,
) -> Vec<Comparison>
where
    T: AsPrimitive<f64> + Sync,
{
    let comparisons = compare_all(outputs, references, tolerance).expect("equal extents");
    for comparison in &comparisons {
        assert!(comparison.passes(tolerance.required_match_ratio), "{comparison:#?}");
    }
    comparisons
}

/// `values` as f64.
pub fn wide<T: AsPrimitive<f64>, D: Dimension>(values: &Array<T, D>) -> Array<f64, D> {
    values.mapv(AsPrimitive::as_)
}

/// Bit patterns of all gradients: equal exactly if the gradients are, NaN and the sign of zero included.
pub fn bits(gradients: &audio::Gradients) -> Vec<Vec<u16>> {
    gradients.tensors().iter().map(|(_, tensor)| tensor.iter().map(|x| bf16::to_bits(*x)).collect()).collect()
}

/// Fails unless operation B's conversion made what the host's emulation of it makes, bit for bit. NaN is NaN; zeros of either sign are the same
/// unless their signs count.
#[track_caller]
pub fn assert_emulated_operands(found: &Operands, expected: &Operands, zero_signs_count: bool) {
    assert_eq!(found.maxima, expected.maxima);
    assert_eq!(found.exponents, expected.exponents);
    assert_eq!(found.row_exponents_dec, expected.row_exponents_dec);
    assert_eq!(found.row_exponents_enc, expected.row_exponents_enc);
    let bits = |x: &f16| match *x {
        x if x.is_nan() => f16::NAN.to_bits(),
        x if x == f16::ZERO && !zero_signs_count => 0,
        x => x.to_bits(),
    };
    let operands = |of: &Operands| -> [(&str, Operand); 6] {
        let Operands { dq, dkv, x_dec, x_enc, wq, wkv, .. } = of.clone();
        [("dq", dq), ("dkv", dkv), ("x_dec", x_dec), ("x_enc", x_enc), ("wq", wq), ("wkv", wkv)]
    };
    for ((name, found), (_, expected)) in operands(found).into_iter().zip(operands(expected)) {
        assert_eq!(found.lo.is_some(), expected.lo.is_some(), "{name}");
        let parts: [Option<(Array2<f16>, Array2<f16>)>; 2] = [Some((found.hi, expected.hi)), found.lo.zip(expected.lo)];
        for (part, (found, expected)) in parts.into_iter().flatten().enumerate() {
            assert_eq!(found.dim(), expected.dim());
            let wrong =
                found.indexed_iter().zip(&expected).find(|((_, found), expected)| bits(found) != bits(expected));
            assert!(wrong.is_none(), "{name}, part {part}: {wrong:?}");
        }
    }
}

/// Normwise error that two roundings to bf16 explain: of an operand (dQ, dK, dV or O) and of the result, 1.7e-3 each and 2.4e-3 together,
/// with room for small tensors (2.65e-3 seen with exact arithmetic otherwise).
const TWICE_ROUNDED: f64 = 3.3e-3;

/// Noise that fp32 arithmetic and split bf16 operands leave where the reference cancels, as a share of the rms of grad_hidden_states.
const CANCELLATION: f64 = 2e-4;

/// grad_k_bias is zero in real arithmetic (softmax ignores a shift that all keys share): what is left are the roundings of dS, 2^-12 of its
/// elements each. The same sum with dS itself in place of its roundings is a column of dK, whose norm over tokens is the rms of
/// grad_k_weight over that of hidden_states. A dS in bf16 leaves 2^-9, eight times as much.
const KEY_BIAS_NOISE: f64 = 6e-4;

/// Chunks that take the long kernels add to that: rowsum(P * dP) and dS come from two roundings of dA, to 11 bits each, so a row of dS sums to
/// the product of their difference and O. O is at most as large as V, and dA's norm over tokens is that of dV, found from grad_v_weight as above.
const KEY_BIAS_NOISE_OF_LONG_CHUNKS: f64 = 3e-4;

/// Amplitude of the saved states above which softmax is one-hot: logits differ by tens.
const ONE_HOT_ABOVE: f64 = 10.0;

/// [`assert_audio_with`] for hidden_states and saved states of standard normals.
#[track_caller]
pub fn assert_audio(gradients: &audio::Gradients, reference: &audio::Gradients<f64>) {
    assert_audio_with(1.0, gradients, reference);
}

/// Fails unless operation A's gradients are those of bf16 operands and fp32 sums: the suite's tolerance for every tensor that is large
/// enough for its ratio to mean something, a bound on the noise of grad_k_bias, a normwise bound for all others. `amplitude`: rms
/// of hidden_states and of the saved states.
#[track_caller]
pub fn assert_audio_with(amplitude: f64, gradients: &audio::Gradients, reference: &audio::Gradients<f64>) {
    const LARGE: usize = 4096;
    let rms = |tensor: &ArrayViewD<'_, f64>| norm(tensor.iter().copied()) / (tensor.len().max(1) as f64).sqrt();
    let references = reference.tensors();
    let first_rms = rms(&references[0].1);
    let key_rms = rms(&reference.grad_k_weight.view().into_dyn()) / amplitude;
    let value_rms = rms(&reference.grad_v_weight.view().into_dyn()) / amplitude;
    let comparisons = compare_all(&gradients.tensors(), &references, &LIKE_AUDIO_SUITE).expect("equal extents");
    for ((comparison, (name, out)), (_, reference)) in comparisons.iter().zip(gradients.tensors()).zip(&references) {
        assert!(comparison.non_finite == 0 && !comparison.all_zero, "{comparison:#?}");
        // The suite's absolute tolerance is a share of the whole tensor's rms: it means something while rows are of like size, and not where
        // softmax is one-hot and most rows of dQ and dK vanish.
        if comparison.elements >= LARGE && amplitude <= ONE_HOT_ABOVE {
            assert!(comparison.passes(LIKE_AUDIO_SUITE.required_match_ratio), "{comparison:#?}");
        }
        let error = norm(out.iter().zip(reference).map(|(out, reference)| f64::from(*out) - reference));
        let noise = if name == "grad_k_bias" {
            KEY_BIAS_NOISE * key_rms + KEY_BIAS_NOISE_OF_LONG_CHUNKS * amplitude.powi(2) * value_rms + 1e-6 * first_rms
        } else {
            CANCELLATION * first_rms
        };
        let bound = TWICE_ROUNDED * norm(reference.iter().copied()) + noise * (comparison.elements as f64).sqrt();
        assert!(error <= bound, "error {error:e} above {bound:e}: {comparison:#?}");
    }
}

/// Euclidean norm.
pub fn norm(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().map(|x| x * x).sum::<f64>().sqrt()
}
