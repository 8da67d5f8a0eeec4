//! Powers of two that fp32 may not hold.

/// `2^exponent` as a product of two normal fp32 powers of two, `exponent` clamped to `-252..=252`.
///
/// `x * halves.0 * halves.1` neither overflows nor underflows on the way unless the result does.
#[inline(always)]
pub const fn power_of_two_halves(exponent: i32) -> (f32, f32) {
    let clamped = if exponent < -252 {
        -252
    } else if exponent > 252 {
        252
    } else {
        exponent
    };
    let first = clamped >> 1;
    (power_of_two(first), power_of_two(clamped - first))
}

/// `2^exponent` for `-126..=127`.
#[inline(always)]
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_multiply_to_the_power() {
        for exponent in -300..=300 {
            let (a, b) = power_of_two_halves(exponent);
            assert!(a.is_normal() && b.is_normal());
            assert_eq!(f64::from(a) * f64::from(b), f64::powi(2.0, exponent.clamp(-252, 252)));
        }
    }

    #[test]
    fn products_are_exact_while_the_result_is_normal() {
        for (x, exponent) in [(1.5f32 * 2f32.powi(-100), 220), (1.25 * 2f32.powi(120), -240), (-1.75, 127), (1.0, -126)]
        {
            let (a, b) = power_of_two_halves(exponent);
            assert_eq!(f64::from(x * a * b), f64::from(x) * f64::powi(2.0, exponent));
        }
    }
}
