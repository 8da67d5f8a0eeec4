//! Assertions on gradients, and the tolerances that tests use.

use attn_backward::audio;
use attn_backward::compare::{Comparison, MaxAtol, Tolerance, compare_all};
use half::bf16;
use ndarray::{Array, ArrayViewD, Dimension};
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
