//! The one comparison of an output with its reference.

use ndarray::ArrayViewD;
use num_traits::AsPrimitive;
use rayon::prelude::*;
use serde::Serialize;

use crate::Error;

/// A reference whose elements are all within this share of `max_atol` is zero up to its own rounding: grad_k_bias in f64.
const ZERO_SHARE: f64 = 1e-6;

/// Elements that one task compares.
const BLOCK_ELEMS: usize = 1 << 16;

/// Absolute part of an element's tolerance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum MaxAtol {
    /// This value.
    Fixed(f64),
    /// This share of the reference's root mean square: the output's own, or the operation's first output's if that is larger
    /// (grad_k_bias is zero in real arithmetic).
    OfRms(f64),
}

/// When an output passes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tolerance {
    /// Absolute part of an element's tolerance.
    pub max_atol: MaxAtol,
    /// Part relative to the reference's magnitude.
    pub max_rtol: f64,
    /// Share of elements that must be inside, 0 to 1.
    pub required_match_ratio: f64,
}

/// How one output differs from its reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Public name of the output.
    pub name: String,
    /// Elements compared.
    pub elements: usize,
    /// Elements with `|out - reference| <= max_atol + max_rtol * |reference|`.
    pub matched: usize,
    /// `matched / elements`, 1 if there are none.
    pub matched_ratio: f64,
    /// Largest `|out - reference|` among finite pairs.
    pub worst_abs_error: f64,
    /// Flat row-major index of the worst error, `None` without finite pairs.
    pub worst_index: Option<usize>,
    /// `||out - reference|| / ||reference||` over finite pairs; 0 if both vanish, infinite if only the reference does.
    pub normwise_error: f64,
    /// NaN and infinite elements of the output where the reference is finite.
    pub non_finite: usize,
    /// Flat row-major index of the first of them.
    pub first_non_finite: Option<usize>,
    /// The output is zero everywhere although the reference is not: some element is beyond 1e-6 of the absolute tolerance.
    pub all_zero: bool,
}

impl Comparison {
    /// Whether enough elements match, none is NaN or infinite without reason, and the output is not zero without reason.
    pub fn passes(&self, required_match_ratio: f64) -> bool {
        self.matched_ratio >= required_match_ratio && self.non_finite == 0 && !self.all_zero
    }
}

/// Compares an output with its reference, element by element: `|out - reference| <= max_atol + max_rtol * |reference|`.
///
/// Where the reference itself is NaN or infinite, as it is when the inputs are, the element matches if the output is not finite
/// either.
///
/// # Errors
/// [`Error::Shape`] if the lengths differ.
pub fn compare<T>(name: &str, out: &[T], reference: &[f64], max_atol: f64, max_rtol: f64) -> Result<Comparison, Error>
where
    T: AsPrimitive<f64> + Sync,
{
    Error::check_shape(name, &[reference.len()], &[out.len()])?;
    // Collected in order: sums are the same for any number of threads.
    let blocks: Vec<Block> = out
        .par_chunks(BLOCK_ELEMS)
        .zip(reference.par_chunks(BLOCK_ELEMS))
        .enumerate()
        .map(|(block, (out, reference))| Block::new(block * BLOCK_ELEMS, out, reference, max_atol, max_rtol))
        .collect();
    let total = blocks.into_iter().fold(Block::default(), Block::then);
    Ok(Comparison {
        name: name.into(),
        elements: out.len(),
        matched: total.matched,
        matched_ratio: if out.is_empty() { 1.0 } else { total.matched as f64 / out.len() as f64 },
        worst_abs_error: total.worst.map_or(0.0, |(error, _)| error),
        worst_index: total.worst.map(|(_, index)| index),
        normwise_error: if total.error_squared == 0.0 {
            0.0
        } else {
            // Squares that overflow leave no number.
            let ratio = (total.error_squared / total.reference_squared).sqrt();
            if ratio.is_nan() { f64::INFINITY } else { ratio }
        },
        non_finite: total.non_finite,
        first_non_finite: total.first_non_finite,
        all_zero: total.reference_is_not_zero && !total.out_is_not_zero,
    })
}

/// Compares every gradient of an operation with its reference, both as their `tensors()` list them.
///
/// # Errors
/// [`Error::Shape`] for the first gradient whose extents differ from its reference's.
pub fn compare_all<T>(
    outputs: &[(&'static str, ArrayViewD<'_, T>)],
    references: &[(&'static str, ArrayViewD<'_, f64>)],
    tolerance: &Tolerance,
) -> Result<Vec<Comparison>, Error>
where
    T: AsPrimitive<f64> + Sync,
{
    Error::check_shape("list of gradients", &[references.len()], &[outputs.len()])?;
    let first_rms = || references.first().map_or(0.0, |(_, reference)| rms(reference));
    let pairs = outputs.iter().zip(references);
    pairs
        .map(|((name, out), (_, view))| {
            Error::check_shape(name, view.shape(), out.shape())?;
            let (out, reference) = (out.as_standard_layout(), view.as_standard_layout());
            let (out, reference) = (out.as_slice().unwrap_or_default(), reference.as_slice().unwrap_or_default());
            let max_atol = match tolerance.max_atol {
                MaxAtol::Fixed(max_atol) => max_atol,
                MaxAtol::OfRms(share) => share * rms(view).max(first_rms()),
            };
            compare(name, out, reference, max_atol, tolerance.max_rtol)
        })
        .collect()
}

/// Root mean square of the finite elements, 0 if there are none.
fn rms(x: &ArrayViewD<'_, f64>) -> f64 {
    let (count, sum) =
        x.iter().filter(|x| x.is_finite()).fold((0usize, 0.0), |(count, sum), x| (count + 1, sum + x * x));
    (sum / count.max(1) as f64).sqrt()
}

/// What is known of a run of elements.
#[derive(Default)]
struct Block {
    matched: usize,
    worst: Option<(f64, usize)>,
    error_squared: f64,
    reference_squared: f64,
    non_finite: usize,
    first_non_finite: Option<usize>,
    out_is_not_zero: bool,
    reference_is_not_zero: bool,
}

impl Block {
    fn new<T: AsPrimitive<f64>>(first: usize, out: &[T], reference: &[f64], max_atol: f64, max_rtol: f64) -> Block {
        let mut block = Block::default();
        for (i, (&out, &reference)) in out.iter().zip(reference).enumerate() {
            let out: f64 = out.as_();
            block.out_is_not_zero |= out != 0.0;
            block.reference_is_not_zero |= reference.abs() > ZERO_SHARE * max_atol;
            match (out.is_finite(), reference.is_finite()) {
                (true, true) => {
                    let error = (out - reference).abs();
                    block.matched += usize::from(error <= max_atol + max_rtol * reference.abs());
                    block.error_squared += error * error;
                    block.reference_squared += reference * reference;
                    if block.worst.is_none_or(|(worst, _)| error > worst) {
                        block.worst = Some((error, first + i));
                    }
                }
                (false, true) => {
                    block.non_finite += 1;
                    block.first_non_finite.get_or_insert(first + i);
                }
                (false, false) => block.matched += 1,
                (true, false) => {}
            }
        }
        block
    }

    /// This run, followed by `next`.
    fn then(self, next: Block) -> Block {
        let worst = match (self.worst, next.worst) {
            (Some(a), Some(b)) => Some(if b.0 > a.0 { b } else { a }),
            (a, b) => a.or(b),
        };
        Block {
            matched: self.matched + next.matched,
            worst,
            error_squared: self.error_squared + next.error_squared,
            reference_squared: self.reference_squared + next.reference_squared,
            non_finite: self.non_finite + next.non_finite,
            first_non_finite: self.first_non_finite.or(next.first_non_finite),
            out_is_not_zero: self.out_is_not_zero | next.out_is_not_zero,
            reference_is_not_zero: self.reference_is_not_zero | next.reference_is_not_zero,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn against(out: &[f32], reference: &[f64]) -> Comparison {
        compare("grad", out, reference, 0.1, 0.01).unwrap()
    }

    #[test]
    fn tolerance_is_absolute_plus_relative() {
        let comparison = against(&[0.09, 0.11, 101.0, 101.2, 1.0], &[0.0, 0.0, 100.0, 100.0, 1.0]);
        assert_eq!((comparison.matched, comparison.elements, comparison.worst_index), (3, 5, Some(3)));
        assert!((comparison.worst_abs_error - 1.2).abs() < 1e-5);
        assert!(comparison.passes(0.6) && !comparison.passes(0.61));
    }

    #[test]
    fn one_nan_or_infinity_fails_whatever_the_ratio() {
        let mut out = vec![1.0f32; 200_000];
        let reference = vec![1.0f64; 200_000];
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            out[150_000] = bad;
            let comparison = against(&out, &reference);
            assert_eq!((comparison.non_finite, comparison.first_non_finite), (1, Some(150_000)));
            assert!(comparison.matched_ratio > 0.9999 && !comparison.passes(0.5));
        }
    }

    #[test]
    fn zero_output_passes_only_against_a_zero_reference() {
        assert!(!against(&[0.0; 4], &[0.0, 0.0, 1e-6, 0.0]).passes(0.9));
        assert!(against(&[0.0; 4], &[0.0, 0.0, 1e-9, 0.0]).passes(0.9));
        assert!(against(&[0.0; 4], &[0.0; 4]).passes(1.0));
        assert!(against(&[], &[]).passes(1.0));
    }

    #[test]
    fn non_finite_reference_asks_for_a_non_finite_output() {
        let comparison = against(&[f32::NAN, f32::INFINITY, 1.0], &[f64::NAN, f64::NAN, 1.0]);
        assert!(comparison.passes(1.0));
        assert!(!against(&[3.0, 1.0, 1.0], &[f64::INFINITY, 1.0, 1.0]).passes(0.9));
    }

    #[test]
    fn normwise_error_is_the_ratio_of_euclidean_norms() {
        assert!((against(&[3.0, 4.4], &[3.0, 4.0]).normwise_error - 0.08).abs() < 1e-6);
        assert_eq!(against(&[0.0], &[0.0]).normwise_error, 0.0);
        assert_eq!(against(&[1.0], &[0.0]).normwise_error, f64::INFINITY);
    }

    #[test]
    fn lengths_must_agree() {
        let error = compare("grad_q_bias", &[1.0f32], &[1.0, 2.0], 0.1, 0.1).unwrap_err();
        assert_eq!(error.to_string(), "grad_q_bias: expected shape [2], found [1]");
    }
}
