//! `cvt` between any two scalar types, one lane at a time. The common pairs have faster forms in the decoder.

use crate::number::{self, Bf16, F16, Narrow, Rounding};

/// A scalar type of PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    /// Unsigned, or without a type: bits.
    Unsigned(u32),
    /// Two's complement: bits.
    Signed(u32),
    F16,
    Bf16,
    F32,
    F64,
}

impl Type {
    /// The type of a PTX suffix.
    pub fn parse(name: &str) -> Option<Type> {
        Some(match name {
            "f16" => Type::F16,
            "bf16" => Type::Bf16,
            "f32" => Type::F32,
            "f64" => Type::F64,
            _ => {
                let bits = name.get(1..)?.parse().ok().filter(|bits| matches!(bits, 8 | 16 | 32 | 64))?;
                match name.as_bytes()[0] {
                    b'u' | b'b' => Type::Unsigned(bits),
                    b's' => Type::Signed(bits),
                    _ => return None,
                }
            }
        })
    }

    pub fn bits(self) -> u32 {
        match self {
            Type::Unsigned(bits) | Type::Signed(bits) => bits,
            Type::F16 | Type::Bf16 => 16,
            Type::F32 => 32,
            Type::F64 => 64,
        }
    }

    pub fn is_float(self) -> bool {
        !matches!(self, Type::Unsigned(_) | Type::Signed(_))
    }

    pub fn is_signed(self) -> bool {
        matches!(self, Type::Signed(_))
    }
}

/// A conversion and its modifiers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conversion {
    pub to: Type,
    pub from: Type,
    pub rounding: Rounding,
    /// Round a float to an integral float.
    pub integral: bool,
    pub flush: bool,
    pub saturate: bool,
}

fn mask(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

/// `bits` of `from`, as an integer.
fn integer(bits: u64, from: Type) -> i128 {
    let shift = 64 - from.bits();
    if from.is_signed() { ((bits << shift) as i64 >> shift) as i128 } else { (bits & mask(from.bits())) as i128 }
}

impl Conversion {
    fn float_of(&self, bits: u64) -> f64 {
        match self.from {
            Type::F16 => F16::widen(bits as u16) as f64,
            Type::Bf16 => Bf16::widen(bits as u16) as f64,
            Type::F32 => {
                let x = f32::from_bits(bits as u32);
                (if self.flush { number::flush(x) } else { x }) as f64
            }
            Type::F64 => f64::from_bits(bits),
            Type::Unsigned(_) | Type::Signed(_) => number::odd_f64(integer(bits, self.from)),
        }
    }

    /// The converted bits, zero-extended from the destination's width (for a signed destination: sign-extended to 64 bits).
    pub fn apply(&self, bits: u64) -> u64 {
        match self.to {
            Type::Unsigned(width) | Type::Signed(width) => {
                let (low, high) = match self.to.is_signed() {
                    true => (-(1i128 << (width - 1)), (1i128 << (width - 1)) - 1),
                    false => (0, (1i128 << width) - 1),
                };
                let value = if self.from.is_float() {
                    let x = self.float_of(bits);
                    // Floats always saturate; `as` does, and makes NaN zero.
                    (number::integral(x, self.rounding) as i128).clamp(low, high)
                } else {
                    let value = integer(bits, self.from);
                    if self.saturate { value.clamp(low, high) } else { value }
                };
                // Narrower results are extended by the destination's sign.
                integer(value as u64, self.to) as u64
            }
            _ => {
                let mut x = self.float_of(bits);
                if self.integral {
                    x = number::integral(x, self.rounding);
                }
                if self.saturate {
                    x = if x > 0.0 { x.min(1.0) } else { 0.0 };
                }
                let narrow = number::odd_f32(x);
                match self.to {
                    Type::F16 => number::round_narrow::<F16>(narrow, self.rounding) as u64,
                    Type::Bf16 => number::round_narrow::<Bf16>(narrow, self.rounding) as u64,
                    Type::F32 => {
                        let x = number::round_f32(x, self.rounding);
                        (if self.flush { number::flush(x) } else { x }).to_bits() as u64
                    }
                    _ if self.from.is_float() || self.saturate => x.to_bits(),
                    _ => number::round_f64(integer(bits, self.from), self.rounding).to_bits(),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert(name: &str, bits: u64) -> u64 {
        let mut rounding = Rounding::Nearest;
        let (mut saturate, mut integral) = (false, false);
        let mut types = Vec::new();
        for part in name.split('.') {
            match part {
                "rz" | "rzi" => rounding = Rounding::Zero,
                "rm" | "rmi" => rounding = Rounding::Down,
                "rp" | "rpi" => rounding = Rounding::Up,
                "sat" => saturate = true,
                _ => types.extend(Type::parse(part)),
            }
            integral |= part.ends_with('i');
        }
        Conversion { to: types[0], from: types[1], rounding, integral, flush: false, saturate }.apply(bits)
    }

    #[test]
    fn floats_become_integers_with_saturation() {
        let float = |x: f32| x.to_bits() as u64;
        assert_eq!(convert("rzi.s32.f32", float(-2.7)) as i32, -2);
        assert_eq!(convert("rmi.s32.f32", float(-2.2)) as i32, -3);
        assert_eq!(convert("rpi.s32.f32", float(2.2)) as i32, 3);
        assert_eq!(convert("rni.s32.f32", float(2.5)) as i32, 2);
        assert_eq!(convert("rzi.u8.f32", float(300.0)), 255);
        assert_eq!(convert("rzi.u32.f32", float(-1.0)), 0);
        assert_eq!(convert("rzi.s64.f32", float(1e30)) as i64, i64::MAX);
        assert_eq!(convert("rzi.s32.f32", float(f32::NAN)), 0);
    }

    #[test]
    fn integers_become_floats_in_the_asked_direction() {
        let odd = (1u64 << 24) + 1;
        assert_eq!(convert("rn.f32.u64", odd), (16777216f32).to_bits() as u64);
        assert_eq!(convert("rp.f32.u64", odd), (16777218f32).to_bits() as u64);
        assert_eq!(convert("rn.f32.u64", (1 << 63) + (1 << 39) + 1), (9223373136366403584f32).to_bits() as u64);
        assert_eq!(convert("rm.f32.s32", (-(odd as i64)) as u64), (-16777218f32).to_bits() as u64);
        assert_eq!(convert("rz.f64.u64", u64::MAX), 18446744073709549568f64.to_bits());
        assert_eq!(convert("rn.f16.u32", 65519), 0x7bff);
        assert_eq!(convert("rn.f16.u32", 65520), 0x7c00);
    }

    #[test]
    fn integers_extend_truncate_and_saturate() {
        assert_eq!(convert("s32.s8", 0x80) as i32, -128);
        assert_eq!(convert("u32.u8", 0x1ff), 0xff);
        assert_eq!(convert("sat.s8.s32", 200) as i8, 127);
        assert_eq!(convert("sat.u16.s32", (-5i64) as u64), 0);
        assert_eq!(convert("u16.u32", 0x12345), 0x2345);
    }

    #[test]
    fn floats_are_rounded_once() {
        // Rounding to f32 first would tie to even and lose the excess.
        let x = 1.0f64 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(convert("rn.f16.f64", x.to_bits()), 0x3c01);
        assert_eq!(convert("rz.f16.f64", x.to_bits()), 0x3c00);
        assert_eq!(convert("rn.bf16.f32", 0x3f80_8000), 0x3f80);
        assert_eq!(convert("rz.f32.f64", 1e300f64.to_bits()), f32::MAX.to_bits() as u64);
        assert_eq!(convert("sat.f32.f32", 3f32.to_bits() as u64), 1f32.to_bits() as u64);
        assert_eq!(convert("rmi.f32.f32", (-0.5f32).to_bits() as u64), (-1f32).to_bits() as u64);
    }
}
