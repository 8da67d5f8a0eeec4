//! Floating-point formats and roundings that Rust does not have.
//!
//! Narrow results are rounded once. Where a sum does not fit f64, it is *rounded to odd* first: the last bit is set if anything was
//! cut off, so that a second rounding to fewer bits (by two or more) gives what one rounding of the exact value gives.

/// A rounding mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// To nearest, ties to even.
    Nearest,
    /// Towards zero.
    Zero,
    /// Towards minus infinity.
    Down,
    /// Towards plus infinity.
    Up,
}

/// A 16-bit format.
pub(crate) trait Narrow {
    /// Exact value of the bits.
    fn widen(bits: u16) -> f32;
    /// The nearest bits, ties to even; NaN becomes 0x7fff.
    fn nearest(x: f32) -> u16;
}

/// IEEE binary16.
pub(crate) struct F16;
/// bfloat16.
pub(crate) struct Bf16;

impl Narrow for F16 {
    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        let bits = bits as u32;
        // The exponent is moved by a product with 2^112, which also makes subnormals right.
        let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
        let special = if magnitude >= 65536.0 { 0x7f80_0000 } else { 0 };
        f32::from_bits(magnitude.to_bits() | special | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn nearest(x: f32) -> u16 {
        if x.is_nan() { 0x7fff } else { half::f16::from_f32(x).to_bits() }
    }
}

impl Narrow for Bf16 {
    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        f32::from_bits((bits as u32) << 16)
    }

    #[inline(always)]
    fn nearest(x: f32) -> u16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        if x.is_nan() { 0x7fff } else { rounded as u16 }
    }
}

/// `a + b`, rounded to odd.
#[inline(always)]
pub(crate) fn add_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let part = sum - a;
    let lost = (a - (sum - part)) + (b - part);
    let bits = sum.to_bits();
    // Nearest rounding went past the exact sum if what it lost points back towards zero.
    let truncated = bits.wrapping_sub(((lost > 0.0) == (sum < 0.0)) as u64);
    f64::from_bits(if lost.abs() > 0.0 { truncated | 1 } else { bits })
}

/// `x`, rounded to odd.
#[inline(always)]
pub(crate) fn odd_f32(x: f64) -> f32 {
    let nearest = x as f32;
    let back = nearest as f64;
    let bits = nearest.to_bits();
    let truncated = bits.wrapping_sub((back.abs() > x.abs()) as u32);
    f32::from_bits(if back == x || x.is_nan() { bits } else { truncated | 1 })
}

/// `x`, rounded to odd.
pub(crate) fn odd_f64(x: i128) -> f64 {
    let nearest = x as f64;
    let back = nearest as i128;
    let bits = nearest.to_bits() - (back.unsigned_abs() > x.unsigned_abs()) as u64;
    f64::from_bits(if back == x { bits } else { bits | 1 })
}

/// `a * b + c`, rounded once.
#[inline(always)]
pub(crate) fn fma_f32(a: f32, b: f32, c: f32) -> f32 {
    add_odd(a as f64 * b as f64, c as f64) as f32 // the product is exact in f64
}

/// The nearest bits of a 16-bit format.
#[inline(always)]
pub(crate) fn narrow<N: Narrow>(x: f64) -> u32 {
    N::nearest(odd_f32(x)) as u32
}

/// The bits of a 16-bit format nearest in the direction of `rounding`.
pub(crate) fn round_narrow<N: Narrow>(x: f32, rounding: Rounding) -> u16 {
    let nearest = N::nearest(x);
    let back = N::widen(nearest);
    let towards_zero = if nearest & 0x7fff == 0 { nearest } else { nearest - 1 };
    match rounding {
        Rounding::Zero if back.abs() > x.abs() => towards_zero,
        Rounding::Down if back > x => match nearest {
            0 | 0x8000 => 0x8001,
            n if n & 0x8000 == 0 => n - 1,
            n => n + 1,
        },
        Rounding::Up if back < x => match nearest {
            0 | 0x8000 => 1,
            n if n & 0x8000 == 0 => n + 1,
            n => n - 1,
        },
        _ => nearest,
    }
}

/// The f32 nearest in the direction of `rounding`.
pub(crate) fn round_f32(x: f64, rounding: Rounding) -> f32 {
    let nearest = x as f32;
    let back = nearest as f64;
    match rounding {
        Rounding::Zero if back.abs() > x.abs() => f32::from_bits(nearest.to_bits() - 1),
        Rounding::Down if back > x => nearest.next_down(),
        Rounding::Up if back < x => nearest.next_up(),
        _ => nearest,
    }
}

/// The f64 nearest in the direction of `rounding`.
pub(crate) fn round_f64(x: i128, rounding: Rounding) -> f64 {
    let nearest = x as f64;
    let back = nearest as i128;
    match rounding {
        Rounding::Zero if back.unsigned_abs() > x.unsigned_abs() => f64::from_bits(nearest.to_bits() - 1),
        Rounding::Down if back > x => nearest.next_down(),
        Rounding::Up if back < x => nearest.next_up(),
        _ => nearest,
    }
}

/// The integral value nearest in the direction of `rounding`.
pub(crate) fn integral(x: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => x.round_ties_even(),
        Rounding::Zero => x.trunc(),
        Rounding::Down => x.floor(),
        Rounding::Up => x.ceil(),
    }
}

/// A subnormal becomes a zero of its sign.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

/// The larger (`max`) or the smaller: a number is preferred to a NaN unless `nan`, and -0 is less than +0.
macro_rules! extremes {
    ($max:ident, $min:ident, $float:ty, $canonical:expr) => {
        /// The larger: a number rather than a NaN, and +0 rather than -0.
        #[inline(always)]
        pub(crate) fn $max(a: $float, b: $float) -> $float {
            let both_zero = <$float>::from_bits(a.to_bits() & b.to_bits());
            let number = if a > b {
                a
            } else if b > a {
                b
            } else {
                both_zero
            };
            if a.is_nan() {
                if b.is_nan() { $canonical } else { b }
            } else if b.is_nan() {
                a
            } else {
                number
            }
        }
        /// The smaller: a number rather than a NaN, and -0 rather than +0.
        #[inline(always)]
        pub(crate) fn $min(a: $float, b: $float) -> $float {
            let both_zero = <$float>::from_bits(a.to_bits() | b.to_bits());
            let number = if a < b {
                a
            } else if b < a {
                b
            } else {
                both_zero
            };
            if a.is_nan() {
                if b.is_nan() { $canonical } else { b }
            } else if b.is_nan() {
                a
            } else {
                number
            }
        }
    };
}
extremes!(max_f32, min_f32, f32, f32::from_bits(0x7fff_ffff));
extremes!(max_f64, min_f64, f64, f64::from_bits(0x7fff_ffff_ffff_ffff));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_widens_as_the_half_crate_does() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (F16::widen(bits), half::f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn narrow_formats_round_trip_and_round_in_the_asked_direction() {
        fn check<N: Narrow>() {
            for bits in 0..=0x7fffu16 {
                let x = N::widen(bits);
                let next = N::widen(bits + 1);
                if !next.is_finite() || bits == 0x7fff {
                    break;
                }
                assert_eq!(N::nearest(x), bits);
                let between = x + (next - x) * 0.25;
                for sign in [1.0f32, -1.0] {
                    let down = |b: u16| if sign < 0.0 { b | 0x8000 } else { b };
                    let (low, high) = (down(bits), down(bits + 1));
                    assert_eq!(round_narrow::<N>(sign * between, Rounding::Nearest), low);
                    assert_eq!(round_narrow::<N>(sign * between, Rounding::Zero), low);
                    let (floor, ceil) = if sign < 0.0 { (high, low) } else { (low, high) };
                    assert_eq!(round_narrow::<N>(sign * between, Rounding::Down), floor, "{between} {sign}");
                    assert_eq!(round_narrow::<N>(sign * between, Rounding::Up), ceil, "{between} {sign}");
                }
            }
        }
        check::<F16>();
        check::<Bf16>();
    }

    #[test]
    fn fma_rounds_once() {
        // A small generator of bit patterns, so that exponents differ widely.
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            f32::from_bits((state >> 32) as u32)
        };
        let mut double_rounding = 0;
        for _ in 0..300_000 {
            let (a, b) = (next(), next());
            // c near the product, or half a unit of it away, where double rounding goes wrong.
            let product = a as f64 * b as f64;
            for c in [next(), product as f32 * 3e7, -(product as f32), product as f32 * f32::EPSILON] {
                let (ours, exact) = (fma_f32(a, b, c), a.mul_add(b, c));
                assert!(ours.to_bits() == exact.to_bits() || ours.is_nan() && exact.is_nan(), "{a} * {b} + {c}");
                double_rounding += ((product + c as f64) as f32 != exact) as u32;
            }
        }
        assert!(double_rounding > 0, "the cases do not tell one rounding from two");
    }

    #[test]
    fn zeros_and_nans_order_as_in_ptx() {
        assert!(max_f32(-0.0, 0.0).is_sign_positive() && min_f32(0.0, -0.0).is_sign_negative());
        assert_eq!((max_f32(f32::NAN, 1.0), min_f32(1.0, f32::NAN)), (1.0, 1.0));
        assert_eq!(max_f32(f32::NAN, f32::NAN).to_bits(), 0x7fff_ffff);
        assert_eq!(flush(-1e-40).to_bits(), 0x8000_0000);
    }
}
