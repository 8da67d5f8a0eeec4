//! Power-of-two scales of operation B's fp16 operands: pure, shared by the `cross_convert_*` kernels and the host's emulation.
//!
//! An element's *magnitude* is its bits without the sign, or 0 if it is not finite: magnitudes order like absolute values, and
//! their maximum is over the finite elements.

/// Exponent that the largest element of a scaled row or tensor gets: it lies in `[2^TOP, 2^(TOP + 1))`, one binade below fp16's
/// end, so that rounding cannot overflow.
pub const TOP: i32 = 14;

/// Exponent of a gradient row without a finite element other than zero. So small that the factor of its row of hidden states is
/// the least there is, whatever the other rows need: what meets the zeros stays finite.
pub const ZERO_ROW: i32 = -600;

/// Added to a maximum where the kernels find it together, so that zeroed memory is a maximum of nothing. Exponents are far above -1024.
const MAXIMUM_BIAS: i32 = 1024;

/// The word that stands for a maximum in memory; 0 for `i32::MIN`, the maximum of nothing. Words order like their maxima.
#[inline(always)]
pub const fn maximum_word(maximum: i32) -> i32 {
    if maximum == i32::MIN { 0 } else { maximum + MAXIMUM_BIAS }
}

/// The maximum that a [`maximum_word`] stands for.
#[inline(always)]
pub const fn maximum_of_word(word: i32) -> i32 {
    if word == 0 { i32::MIN } else { word - MAXIMUM_BIAS }
}

/// Magnitude of `x`.
#[inline(always)]
pub const fn magnitude(x: f32) -> u32 {
    let bits = x.to_bits() & 0x7fff_ffff;
    if bits < 0x7f80_0000 { bits } else { 0 }
}

/// A word that orders finite elements like their magnitudes, and before them all that are not finite: two instructions an element where
/// [`magnitude`] takes four.
#[inline(always)]
pub const fn order(x: f32) -> u32 {
    // Twice the bits drop the sign; those of infinities and NaN, 0xff00_0000 and more, wrap around.
    (x.to_bits() << 1).wrapping_add(FINITE_ORDER)
}

/// The largest magnitude of some elements, from their largest [`order`].
#[inline(always)]
pub const fn magnitude_of_order(order: u32) -> u32 {
    order.saturating_sub(FINITE_ORDER) >> 1
}

/// Order of 0: one more than any word that is not of a finite element.
const FINITE_ORDER: u32 = 0x0100_0000;

/// `floor(log2 |x|)` of a finite `x != 0` with this magnitude, denormal or not: `-149..=127`.
#[inline(always)]
pub const fn exponent(magnitude: u32) -> i32 {
    if magnitude < 0x0080_0000 { -118 - magnitude.leading_zeros() as i32 } else { (magnitude >> 23) as i32 - 127 }
}

/// Exponent `e` of a gradient row whose largest magnitude this is: the row is stored times `2^-e`.
#[inline(always)]
pub const fn row_exponent(largest: u32) -> i32 {
    if largest == 0 { ZERO_ROW } else { exponent(largest) - TOP }
}

/// What a token adds to the maximum that its weight gradient's exponent follows from: the exponent of its hidden states' largest
/// magnitude, plus its row exponent; nothing if either row is zero.
#[inline(always)]
pub const fn token_exponent(largest_gradient: u32, largest_hidden: u32) -> i32 {
    if largest_gradient == 0 || largest_hidden == 0 {
        i32::MIN
    } else {
        row_exponent(largest_gradient) + exponent(largest_hidden)
    }
}

/// Binades by which the largest element of a weight tensor may exceed that of its sample before the tensor is converted a second time.
pub const HEADROOM: i32 = 6;

/// The maximum that a weight tensor's exponent follows from if the largest magnitude of its sample is this and the exponent of the tensor's own is at
/// most `HEADROOM` more, or else what it is taken for while the tensor's own is found. Of nothing but zeros: none.
#[inline(always)]
pub const fn guessed_maximum(largest: u32) -> i32 {
    if largest == 0 { i32::MIN } else { exponent(largest) + HEADROOM }
}

/// Piece (four elements) `index` of a sample of `samples` (not 0) of a tensor's `pieces` (at most `2^32 * samples`): evenly spread, and over the
/// columns too. It is past the tensor's end for some `index` if the tensor has less than `samples`.
#[inline(always)]
pub const fn sample_piece(index: u32, pieces: u64, samples: u32) -> u64 {
    const STRIDE: u32 = 37;
    let step = (pieces / samples as u64) as u32;
    if step == 0 { index as u64 } else { index as u64 * step as u64 + (index * STRIDE % step) as u64 }
}

/// What a weight tensor's largest magnitude adds to the maximum that its exponent follows from.
#[inline(always)]
pub const fn weight_exponent(largest: u32) -> i32 {
    if largest == 0 { i32::MIN } else { exponent(largest) }
}

/// Exponent `R` of an operand: its rows are stored times `2^(row exponent - R)`, its largest element below `2^(TOP + 1)`.
/// 0 if there was nothing to take a maximum of.
#[inline(always)]
pub const fn operand_exponent(maximum: i32) -> i32 {
    if maximum < ZERO_ROW { 0 } else { maximum - TOP }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile::power_of_two::power_of_two_halves;

    #[test]
    fn exponent_is_the_floor_of_the_logarithm_from_the_least_denormal_to_the_largest_number() {
        for e in -149..=127 {
            let x = 2f64.powi(e) as f32;
            assert_eq!(exponent(magnitude(-x)), e);
            let next_binade = if e == 127 { f32::INFINITY } else { 2f64.powi(e + 1) as f32 };
            assert_eq!(exponent(magnitude(next_binade.next_down())), e);
        }
    }

    #[test]
    fn non_finite_elements_have_no_magnitude() {
        assert_eq!([f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, 0.0, -0.0].map(magnitude), [0; 6]);
    }

    #[test]
    fn scaled_row_ends_just_below_the_end_of_fp16() {
        for bits in [1u32, 2, 3, 0x007f_ffff, 0x0080_0000, 0x3f80_0000, 0x3fff_ffff, 0x7f7f_ffff] {
            let (f, g) = power_of_two_halves(-row_exponent(bits));
            let scaled = f32::from_bits(bits) * f * g;
            assert!((16384.0..32768.0).contains(&scaled), "{bits:#x} becomes {scaled}");
        }
    }

    #[test]
    fn hidden_states_that_meet_a_zero_row_stay_finite() {
        let least = operand_exponent(token_exponent(1, 1));
        let (f, g) = power_of_two_halves(row_exponent(0) - least);
        assert_eq!(f32::MAX * f * g, f32::MAX * 2f32.powi(-126) * 2f32.powi(-126));
        assert_eq!(token_exponent(0, 1), i32::MIN);
        assert_eq!(token_exponent(1, 0), i32::MIN);
    }

    #[test]
    fn a_sample_names_pieces_of_the_tensor_once_each_and_all_if_they_are_few() {
        for pieces in [1u64, 5, 1024, 1536, 393_216, 1_572_864, 1 << 40] {
            let sampled: Vec<u64> =
                (0..1024).map(|i| sample_piece(i, pieces, 1024)).filter(|piece| *piece < pieces).collect();
            assert!(sampled.is_sorted_by(|a, b| a < b));
            assert_eq!(sampled.len() as u64, pieces.min(1024));
        }
        let columns: std::collections::BTreeSet<u64> =
            (0..1024).map(|i| sample_piece(i, 4096 * 384, 1024) % 384).collect();
        assert!(columns.len() > 256, "{} columns", columns.len());
    }

    #[test]
    fn what_a_guess_admits_stays_inside_fp16() {
        for largest in [1u32, 0x0080_0000, 0x3f80_0000, 0x3fff_ffff, 0x7080_0000] {
            let guess = guessed_maximum(largest);
            let (f, g) = power_of_two_halves(-operand_exponent(guess));
            let scaled = |magnitude: u32| f32::from_bits(magnitude) * f * g;
            let least = 2f32.powi(TOP - HEADROOM);
            assert!((least..2.0 * least).contains(&scaled(largest)));
            let most = f32::from_bits(largest) as f64 * 2f64.powi(HEADROOM);
            assert!(weight_exponent((most as f32).to_bits()) <= guess && scaled((most as f32).to_bits()) < 32768.0);
        }
        assert_eq!(guessed_maximum(0), i32::MIN);
    }

    #[test]
    fn no_maximum_gives_exponent_zero() {
        assert_eq!(operand_exponent(maximum_of_word(0)), 0);
        assert_eq!(maximum_word(i32::MIN), 0);
    }

    #[test]
    fn words_of_maxima_are_positive_and_stand_for_them() {
        let least = token_exponent(1, 1);
        let largest = token_exponent(0x7f7f_ffff, 0x7f7f_ffff);
        for maximum in least..=largest {
            assert!(maximum_word(maximum) > 0);
            assert_eq!(maximum_of_word(maximum_word(maximum)), maximum);
        }
    }

    #[test]
    fn orders_lead_to_the_same_maxima_as_magnitudes() {
        let values =
            [0.0, -0.0, 1e-45, -1e-45, 1e-38, -1.5, 3.0e38, f32::MAX, f32::MIN, f32::INFINITY, -f32::NAN, f32::NAN];
        for a in values {
            for b in values {
                let expected = magnitude(a).max(magnitude(b));
                assert_eq!(magnitude_of_order(order(a).max(order(b))), expected, "{a} {b}");
            }
        }
    }
}
