//! Integer and floating-point arithmetic.
//!
//! 16-bit integers use the low half of a word and leave the high half zero. NaN results carry the host's payload. The `approx`
//! functions are as exact as the host's: better than the GPU's.

use super::{done, each1, each2, each3, lanes, long1, long2, long3, unknown, word1, word2, word3};
use crate::Error;
use crate::body::{Body, Statement};
use crate::number::{self, Bf16, F16, Narrow, flush};
use crate::op::{Carry, Longs, Op, Words};

#[inline(always)]
fn f1(f: impl Fn(f32) -> f32) -> impl Fn(u32) -> u32 {
    move |a| f(f32::from_bits(a)).to_bits()
}
#[inline(always)]
fn f2(f: impl Fn(f32, f32) -> f32) -> impl Fn(u32, u32) -> u32 {
    move |a, b| f(f32::from_bits(a), f32::from_bits(b)).to_bits()
}
#[inline(always)]
fn f3(f: impl Fn(f32, f32, f32) -> f32) -> impl Fn(u32, u32, u32) -> u32 {
    move |a, b, c| f(f32::from_bits(a), f32::from_bits(b), f32::from_bits(c)).to_bits()
}
#[inline(always)]
fn d1(f: impl Fn(f64) -> f64) -> impl Fn(u64) -> u64 {
    move |a| f(f64::from_bits(a)).to_bits()
}
#[inline(always)]
fn d2(f: impl Fn(f64, f64) -> f64) -> impl Fn(u64, u64) -> u64 {
    move |a, b| f(f64::from_bits(a), f64::from_bits(b)).to_bits()
}

/// The value of half `i` of a packed pair.
#[inline(always)]
fn half<N: Narrow>(x: u32, i: u32) -> f64 {
    N::widen((x >> (16 * i)) as u16) as f64
}
/// A 16-bit result; `f` returns the exact value, or one rounded to odd.
#[inline(always)]
fn h2<N: Narrow>(f: impl Fn(f64, f64) -> f64) -> impl Fn(u32, u32) -> u32 {
    move |a, b| number::narrow::<N>(f(half::<N>(a, 0), half::<N>(b, 0)))
}
#[inline(always)]
fn h3<N: Narrow>(f: impl Fn(f64, f64, f64) -> f64) -> impl Fn(u32, u32, u32) -> u32 {
    move |a, b, c| number::narrow::<N>(f(half::<N>(a, 0), half::<N>(b, 0), half::<N>(c, 0)))
}
#[inline(always)]
fn p2<N: Narrow>(f: impl Fn(f64, f64) -> f64) -> impl Fn(u32, u32) -> u32 {
    move |a, b| {
        let [low, high] = [0, 1].map(|i| number::narrow::<N>(f(half::<N>(a, i), half::<N>(b, i))));
        low | high << 16
    }
}
#[inline(always)]
fn p3<N: Narrow>(f: impl Fn(f64, f64, f64) -> f64) -> impl Fn(u32, u32, u32) -> u32 {
    move |a, b, c| {
        let [low, high] = [0, 1].map(|i| number::narrow::<N>(f(half::<N>(a, i), half::<N>(b, i), half::<N>(c, i))));
        low | high << 16
    }
}

/// A single-precision operation, flushing subnormal inputs and results or not.
macro_rules! float1 {
    ($body:ident, $st:ident, $ftz:ident, $f:expr) => {
        $body.emit_word1(&$st, if $ftz { word1!(f1(|a| flush($f(flush(a))))) } else { word1!(f1($f)) })
    };
}
macro_rules! float2 {
    ($body:ident, $st:ident, $ftz:ident, $f:expr) => {
        $body.emit_word2(&$st, if $ftz { word2!(f2(|a, b| flush($f(flush(a), flush(b))))) } else { word2!(f2($f)) })
    };
}
macro_rules! float3 {
    ($body:ident, $st:ident, $ftz:ident, $f:expr) => {
        $body.emit_word3(
            &$st,
            if $ftz { word3!(f3(|a, b, c| flush($f(flush(a), flush(b), flush(c))))) } else { word3!(f3($f)) },
        )
    };
}
/// An operation on the four 16-bit floating-point types.
macro_rules! halves2 {
    ($body:ident, $st:ident, $ty:expr, $f:expr) => {
        match $ty {
            "f16" => $body.emit_word2(&$st, word2!(h2::<F16>($f))),
            "bf16" => $body.emit_word2(&$st, word2!(h2::<Bf16>($f))),
            "f16x2" => $body.emit_word2(&$st, word2!(p2::<F16>($f))),
            _ => $body.emit_word2(&$st, word2!(p2::<Bf16>($f))),
        }
    };
}
macro_rules! halves3 {
    ($body:ident, $st:ident, $ty:expr, $f:expr) => {
        match $ty {
            "f16" => $body.emit_word3(&$st, word3!(h3::<F16>($f))),
            "bf16" => $body.emit_word3(&$st, word3!(h3::<Bf16>($f))),
            "f16x2" => $body.emit_word3(&$st, word3!(p3::<F16>($f))),
            _ => $body.emit_word3(&$st, word3!(p3::<Bf16>($f))),
        }
    };
}

fn signed16(a: u32) -> i32 {
    a as i16 as i32
}

/// Half of a product of two 64-bit numbers.
fn high64(a: u64, b: u64) -> u64 {
    ((a as u128 * b as u128) >> 64) as u64
}
fn high64_signed(a: u64, b: u64) -> u64 {
    ((a as i64 as i128 * b as i64 as i128) >> 64) as u64
}
fn high32(a: u32, b: u32) -> u32 {
    ((a as u64 * b as u64) >> 32) as u32
}
fn high32_signed(a: u32, b: u32) -> u32 {
    ((a as i32 as i64 * b as i32 as i64) >> 32) as u32
}
fn wide(a: u32, b: u32) -> u64 {
    a as u64 * b as u64
}
fn wide_signed(a: u32, b: u32) -> u64 {
    (a as i32 as i64).wrapping_mul(b as i32 as i64) as u64
}

/// Decodes one of the instructions that [`super::statement`] sends here.
pub(super) fn decode<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let ty = st.take_last();
    let float = matches!(ty, "f32" | "f64" | "f16" | "bf16" | "f16x2" | "bf16x2");
    if matches!(st.name, "addc" | "subc") || st.modifiers.contains(&"cc") {
        return carry(body, st, ty);
    }
    if float {
        return floating(body, st, ty);
    }
    match (st.name, ty) {
        ("add", "u16" | "s16") => body.emit_word2(&st, word2!(|a, b| a.wrapping_add(b) & 0xffff)),
        ("sub", "u16" | "s16") => body.emit_word2(&st, word2!(|a, b| a.wrapping_sub(b) & 0xffff)),
        ("add", "s32") if st.take("sat") => {
            body.emit_word2(&st, word2!(|a, b| (a as i32).saturating_add(b as i32) as u32))
        }
        ("sub", "s32") if st.take("sat") => {
            body.emit_word2(&st, word2!(|a, b| (a as i32).saturating_sub(b as i32) as u32))
        }
        ("add", "u32" | "s32") => body.emit_word2(&st, word2!(u32::wrapping_add)),
        ("sub", "u32" | "s32") => body.emit_word2(&st, word2!(u32::wrapping_sub)),
        ("add", "u64" | "s64") => body.emit_long2(&st, long2!(u64::wrapping_add)),
        ("sub", "u64" | "s64") => body.emit_long2(&st, long2!(u64::wrapping_sub)),
        ("mul" | "mad", _) => products(body, st, ty),
        // PTX leaves division by zero open; GPUs return all ones, and the dividend as the remainder.
        ("div", "u16" | "u32") => body.emit_word2(&st, word2!(|a: u32, b| a.checked_div(b).unwrap_or(u32::MAX))),
        ("rem", "u16" | "u32") => body.emit_word2(&st, word2!(|a: u32, b| a.checked_rem(b).unwrap_or(a))),
        ("div", "s32") => body
            .emit_word2(&st, word2!(|a, b| if b == 0 { u32::MAX } else { (a as i32).wrapping_div(b as i32) as u32 })),
        ("rem", "s32") => {
            body.emit_word2(&st, word2!(|a, b| if b == 0 { a } else { (a as i32).wrapping_rem(b as i32) as u32 }))
        }
        ("div", "u64") => body.emit_long2(&st, long2!(|a: u64, b| a.checked_div(b).unwrap_or(u64::MAX))),
        ("rem", "u64") => body.emit_long2(&st, long2!(|a: u64, b| a.checked_rem(b).unwrap_or(a))),
        ("div", "s64") => body
            .emit_long2(&st, long2!(|a, b| if b == 0 { u64::MAX } else { (a as i64).wrapping_div(b as i64) as u64 })),
        ("rem", "s64") => {
            body.emit_long2(&st, long2!(|a, b| if b == 0 { a } else { (a as i64).wrapping_rem(b as i64) as u64 }))
        }
        ("abs", "s16") => body.emit_word1(&st, word1!(|a| signed16(a).unsigned_abs() & 0xffff)),
        ("abs", "s32") => body.emit_word1(&st, word1!(|a| (a as i32).unsigned_abs())),
        ("abs", "s64") => body.emit_long1(&st, long1!(|a| (a as i64).unsigned_abs())),
        ("neg", "s16") => body.emit_word1(&st, word1!(|a: u32| a.wrapping_neg() & 0xffff)),
        ("neg", "s32") => body.emit_word1(&st, word1!(u32::wrapping_neg)),
        ("neg", "s64") => body.emit_long1(&st, long1!(u64::wrapping_neg)),
        ("min", "u16" | "u32") => body.emit_word2(&st, word2!(u32::min)),
        ("max", "u16" | "u32") => body.emit_word2(&st, word2!(u32::max)),
        ("min", "s16") => body.emit_word2(&st, word2!(|a, b| signed16(a).min(signed16(b)) as u32 & 0xffff)),
        ("max", "s16") => body.emit_word2(&st, word2!(|a, b| signed16(a).max(signed16(b)) as u32 & 0xffff)),
        ("min", "s32") => body.emit_word2(&st, word2!(|a, b| (a as i32).min(b as i32) as u32)),
        ("max", "s32") => body.emit_word2(&st, word2!(|a, b| (a as i32).max(b as i32) as u32)),
        ("min", "u64") => body.emit_long2(&st, long2!(u64::min)),
        ("max", "u64") => body.emit_long2(&st, long2!(u64::max)),
        ("min", "s64") => body.emit_long2(&st, long2!(|a, b| (a as i64).min(b as i64) as u64)),
        ("max", "s64") => body.emit_long2(&st, long2!(|a, b| (a as i64).max(b as i64) as u64)),
        ("sad", "u32") => body.emit_word3(&st, word3!(|a: u32, b, c: u32| c.wrapping_add(a.abs_diff(b)))),
        ("sad", "s32") => body.emit_word3(&st, word3!(|a, b, c: u32| c.wrapping_add((a as i32).abs_diff(b as i32)))),
        _ => {
            st.modifiers.push(ty);
            Err(unknown(body, &st))
        }
    }
}

/// Integer products: low, high or full, with or without a sum.
fn products<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>, ty: &'a str) -> Result<(), Error> {
    let part = st.take_one_of(&["lo", "hi", "wide"]).unwrap_or("");
    if part == "wide" && matches!(ty, "u32" | "s32") {
        let sum = st.name == "mad";
        done(body, &st, if sum { 4 } else { 3 })?;
        let d = body.long_destination(&st.operands[0])?;
        let (a, b) = (body.word(&st.operands[1])?, body.word(&st.operands[2])?);
        let op = if sum {
            let c = body.long(&st.operands[3])?;
            let f = match ty {
                "u32" => {
                    lanes!(|a, b, c: u64| c.wrapping_add(wide(a, b)); a: Words, b: Words, c: Longs => Longs; each3)
                }
                _ => {
                    lanes!(|a, b, c: u64| c.wrapping_add(wide_signed(a, b)); a: Words, b: Words, c: Longs => Longs; each3)
                }
            };
            Op::LongOfWordsLong { f, d, a, b, c }
        } else {
            let f = match ty {
                "u32" => lanes!(wide; a: Words, b: Words => Longs; each2),
                _ => lanes!(wide_signed; a: Words, b: Words => Longs; each2),
            };
            Op::LongOfWords { f, d, a, b }
        };
        body.emit(op);
        return Ok(());
    }
    match (st.name, part, ty) {
        ("mul", "lo", "u16" | "s16") => body.emit_word2(&st, word2!(|a: u32, b| a.wrapping_mul(b) & 0xffff)),
        ("mul", "hi", "u16") => body.emit_word2(&st, word2!(|a: u32, b: u32| ((a & 0xffff) * (b & 0xffff)) >> 16)),
        ("mul", "hi", "s16") => {
            body.emit_word2(&st, word2!(|a, b| ((signed16(a) * signed16(b)) >> 16) as u32 & 0xffff))
        }
        ("mul", "wide", "u16") => body.emit_word2(&st, word2!(|a: u32, b: u32| (a & 0xffff) * (b & 0xffff))),
        ("mul", "wide", "s16") => body.emit_word2(&st, word2!(|a, b| (signed16(a) * signed16(b)) as u32)),
        ("mul", "lo", "u32" | "s32") => body.emit_word2(&st, word2!(u32::wrapping_mul)),
        ("mul", "hi", "u32") => body.emit_word2(&st, word2!(high32)),
        ("mul", "hi", "s32") => body.emit_word2(&st, word2!(high32_signed)),
        ("mul", "lo", "u64" | "s64") => body.emit_long2(&st, long2!(u64::wrapping_mul)),
        ("mul", "hi", "u64") => body.emit_long2(&st, long2!(high64)),
        ("mul", "hi", "s64") => body.emit_long2(&st, long2!(high64_signed)),
        ("mad", "lo", "u16" | "s16") => {
            body.emit_word3(&st, word3!(|a: u32, b, c| a.wrapping_mul(b).wrapping_add(c) & 0xffff))
        }
        ("mad", "wide", "u16") => {
            body.emit_word3(&st, word3!(|a: u32, b: u32, c| ((a & 0xffff) * (b & 0xffff)).wrapping_add(c)))
        }
        ("mad", "wide", "s16") => {
            body.emit_word3(&st, word3!(|a, b, c| ((signed16(a) * signed16(b)) as u32).wrapping_add(c)))
        }
        ("mad", "lo", "u32" | "s32") => body.emit_word3(&st, word3!(|a: u32, b, c| a.wrapping_mul(b).wrapping_add(c))),
        ("mad", "hi", "u32") => body.emit_word3(&st, word3!(|a, b, c| high32(a, b).wrapping_add(c))),
        ("mad", "hi", "s32") => body.emit_word3(&st, word3!(|a, b, c| high32_signed(a, b).wrapping_add(c))),
        ("mad", "lo", "u64" | "s64") => body.emit_long3(&st, long3!(|a: u64, b, c| a.wrapping_mul(b).wrapping_add(c))),
        ("mad", "hi", "u64") => body.emit_long3(&st, long3!(|a, b, c| high64(a, b).wrapping_add(c))),
        ("mad", "hi", "s64") => body.emit_long3(&st, long3!(|a, b, c| high64_signed(a, b).wrapping_add(c))),
        _ => {
            st.modifiers.extend([part, ty]);
            Err(unknown(body, &st))
        }
    }
}

/// `add.cc`, `addc`, `sub.cc`, `subc`.
fn carry<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>, ty: &'a str) -> Result<(), Error> {
    let carry_out = st.take("cc");
    let (subtract, carry_in) = match st.name {
        "add" => (false, false),
        "addc" => (false, true),
        "sub" => (true, false),
        "subc" => (true, true),
        _ => return Err(unknown(body, &st)),
    };
    let bits = match ty {
        "u32" | "s32" => 32,
        "u64" | "s64" => 64,
        _ => return Err(unknown(body, &st)),
    };
    done(body, &st, 3)?;
    let d = body.destination(&st.operands[0], bits)?.0;
    let (a, b) = (body.data(&st.operands[1], bits)?, body.data(&st.operands[2], bits)?);
    body.emit(Op::Carry(Box::new(Carry { subtract, carry_in, carry_out, d, a, b })));
    Ok(())
}

/// Floating-point arithmetic.
fn floating<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>, ty: &'a str) -> Result<(), Error> {
    // All results are rounded to nearest; other rounding modes stay and are refused.
    st.take_one_of(&["rn", "approx", "full"]);
    let ftz = ty == "f32" && st.take("ftz");
    let nan = st.take("NaN");
    let packed = matches!(ty, "f16x2" | "bf16x2");
    match (st.name, ty) {
        ("max" | "min", _) if nan => {
            st.modifiers.push("NaN");
            Err(unknown(body, &st))
        }
        ("add", "f32") if st.take("sat") => {
            float2!(body, st, ftz, |a: f32, b: f32| number::min_f32(number::max_f32(a + b, 0.0), 1.0))
        }
        ("mul", "f32") if st.take("sat") => {
            float2!(body, st, ftz, |a: f32, b: f32| number::min_f32(number::max_f32(a * b, 0.0), 1.0))
        }
        ("fma", "f32") if st.take("sat") => float3!(body, st, ftz, |a: f32, b: f32, c: f32| number::min_f32(
            number::max_f32(number::fma_f32(a, b, c), 0.0),
            1.0
        )),
        ("add", "f32") => float2!(body, st, ftz, |a: f32, b: f32| a + b),
        ("sub", "f32") => float2!(body, st, ftz, |a: f32, b: f32| a - b),
        ("mul", "f32") => float2!(body, st, ftz, |a: f32, b: f32| a * b),
        ("div", "f32") => float2!(body, st, ftz, |a: f32, b: f32| a / b),
        ("max", "f32") => float2!(body, st, ftz, number::max_f32),
        ("min", "f32") => float2!(body, st, ftz, number::min_f32),
        ("fma" | "mad", "f32") => float3!(body, st, ftz, number::fma_f32),
        ("neg", "f32") => float1!(body, st, ftz, |a: f32| -a),
        ("abs", "f32") => float1!(body, st, ftz, f32::abs),
        ("sqrt", "f32") => float1!(body, st, ftz, f32::sqrt),
        ("rsqrt", "f32") => float1!(body, st, ftz, |a: f32| (1.0 / (a as f64).sqrt()) as f32),
        ("rcp", "f32") => float1!(body, st, ftz, |a: f32| 1.0 / a),
        ("ex2", "f32") => float1!(body, st, ftz, f32::exp2),
        ("lg2", "f32") => float1!(body, st, ftz, f32::log2),
        ("sin", "f32") => float1!(body, st, ftz, f32::sin),
        ("cos", "f32") => float1!(body, st, ftz, f32::cos),
        ("tanh", "f32") => float1!(body, st, ftz, f32::tanh),
        // The sign of the first operand, the magnitude of the second.
        ("copysign", "f32") => body.emit_word2(&st, word2!(|a, b| a & 0x8000_0000 | b & 0x7fff_ffff)),
        ("copysign", "f64") => body.emit_long2(&st, long2!(|a, b| a & 1 << 63 | b & !(1 << 63))),
        ("add", "f64") => body.emit_long2(&st, long2!(d2(|a, b| a + b))),
        ("sub", "f64") => body.emit_long2(&st, long2!(d2(|a, b| a - b))),
        ("mul", "f64") => body.emit_long2(&st, long2!(d2(|a, b| a * b))),
        ("div", "f64") => body.emit_long2(&st, long2!(d2(|a, b| a / b))),
        ("max", "f64") => body.emit_long2(&st, long2!(d2(number::max_f64))),
        ("min", "f64") => body.emit_long2(&st, long2!(d2(number::min_f64))),
        ("neg", "f64") => body.emit_long1(&st, long1!(d1(|a| -a))),
        ("abs", "f64") => body.emit_long1(&st, long1!(d1(f64::abs))),
        ("sqrt", "f64") => body.emit_long1(&st, long1!(d1(f64::sqrt))),
        ("rcp", "f64") => body.emit_long1(&st, long1!(d1(|a| 1.0 / a))),
        ("fma" | "mad", "f64") => body.emit_long3(
            &st,
            long3!(|a, b, c| f64::from_bits(a).mul_add(f64::from_bits(b), f64::from_bits(c)).to_bits()),
        ),
        ("add", _) => halves2!(body, st, ty, number::add_odd),
        ("sub", _) => halves2!(body, st, ty, |a: f64, b: f64| number::add_odd(a, -b)),
        ("mul", _) => halves2!(body, st, ty, |a: f64, b: f64| a * b),
        ("max", _) => halves2!(body, st, ty, number::max_f64),
        ("min", _) => halves2!(body, st, ty, number::min_f64),
        ("fma", _) => halves3!(body, st, ty, |a: f64, b: f64, c: f64| number::add_odd(a * b, c)),
        ("neg", _) if packed => body.emit_word1(&st, word1!(|a| a ^ 0x8000_8000)),
        ("neg", _) => body.emit_word1(&st, word1!(|a| (a ^ 0x8000) & 0xffff)),
        ("abs", _) if packed => body.emit_word1(&st, word1!(|a| a & 0x7fff_7fff)),
        ("abs", _) => body.emit_word1(&st, word1!(|a| a & 0x7fff)),
        _ => {
            st.modifiers.push(ty);
            Err(unknown(body, &st))
        }
    }
}
