//! Multiplication by powers of two that fp32 itself may not hold.

/// `(a, b)` with `a * b = 2^exponent`, both normal: `x * a * b` then over- or underflows only if `x * 2^exponent` does, because the
/// intermediate lies between `x` and the result. Exponents are clamped to -252..=252: beyond, the product of any `x` with
/// 2^-124 <= |x| < 2^102 is infinite or zero either way.
#[inline(always)]
pub const fn power_of_two_halves(exponent: i32) -> (f32, f32) {
    let exponent = if exponent < -252 {
        -252
    } else if exponent > 252 {
        252
    } else {
        exponent
    };
    let low = exponent >> 1;
    (power_of_two(low), power_of_two(exponent - low))
}

/// `2^exponent` for -126..=127.
#[inline(always)]
pub const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_multiply_to_the_power_and_are_normal() {
        for exponent in -252..=252 {
            let (a, b) = power_of_two_halves(exponent);
            assert!(a.is_normal() && b.is_normal());
            assert_eq!(f64::from(a) * f64::from(b), 2f64.powi(exponent));
        }
    }

    #[test]
    fn scaling_equals_the_rounded_exact_product() {
        for x in [1.0f32, -1.5, 3.0e-5, 1.2345e4, 65504.0 * 4096.0, 5.9604645e-8] {
            for exponent in -400..=400 {
                let (a, b) = power_of_two_halves(exponent);
                let exact = (f64::from(x) * 2f64.powi(exponent)) as f32;
                let got = x * a * b;
                assert!(got == exact, "{x} * 2^{exponent}: {got} {exact}");
            }
        }
    }
}
