//! Bits, shifts, comparisons and selection.

use super::{done, each1, each2, each3, lanes, long1, long2, unknown, word1, word2, word3};
use crate::Error;
use crate::body::{Body, Operand, Statement};
use crate::convert::Type;
use crate::number::{Bf16, F16, Narrow, flush};
use crate::op::{Logic, Longs, Op, Words};

/// A mask of the lanes where `f` holds.
#[inline(always)]
fn mask<T: Copy>(a: &[T; 32], b: &[T; 32], f: impl Fn(T, T) -> bool) -> u32 {
    (0..32).fold(0, |mask, i| mask | (f(a[i], b[i]) as u32) << i)
}

macro_rules! compare {
    ($t:ty, $f:expr) => {{
        fn all(a: &$t, b: &$t) -> u32 {
            mask(a, b, $f)
        }
        all as fn(&$t, &$t) -> u32
    }};
}

/// The function of a comparison, after a conversion of both operands.
macro_rules! comparisons {
    ($t:ty, $operator:expr, $value:expr) => {
        match $operator {
            "eq" => Some(compare!($t, |a, b| $value(a) == $value(b))),
            "ne" => Some(compare!($t, |a, b| $value(a) != $value(b))),
            "lt" | "lo" => Some(compare!($t, |a, b| $value(a) < $value(b))),
            "le" | "ls" => Some(compare!($t, |a, b| $value(a) <= $value(b))),
            "gt" | "hi" => Some(compare!($t, |a, b| $value(a) > $value(b))),
            "ge" | "hs" => Some(compare!($t, |a, b| $value(a) >= $value(b))),
            _ => None,
        }
    };
}
macro_rules! float_comparisons {
    ($t:ty, $operator:expr, $value:expr) => {
        match $operator {
            // `ne` is false for NaN, unlike Rust's `!=`; `neu` is true.
            "ne" => Some(compare!($t, |a, b| $value(a) < $value(b) || $value(a) > $value(b))),
            "neu" => Some(compare!($t, |a, b| $value(a) != $value(b))),
            "equ" => Some(compare!($t, |a, b| !($value(a) < $value(b) || $value(a) > $value(b)))),
            "ltu" => Some(compare!($t, |a, b| $value(a) < $value(b) || $value(a).is_nan() || $value(b).is_nan())),
            "leu" => Some(compare!($t, |a, b| $value(a) <= $value(b) || $value(a).is_nan() || $value(b).is_nan())),
            "gtu" => Some(compare!($t, |a, b| $value(a) > $value(b) || $value(a).is_nan() || $value(b).is_nan())),
            "geu" => Some(compare!($t, |a, b| $value(a) >= $value(b) || $value(a).is_nan() || $value(b).is_nan())),
            "num" => Some(compare!($t, |a, b| !$value(a).is_nan() && !$value(b).is_nan())),
            "nan" => Some(compare!($t, |a, b| $value(a).is_nan() || $value(b).is_nan())),
            other => comparisons!($t, other, $value),
        }
    };
}

fn word_comparison(operator: &str, ty: Type, ftz: bool) -> Option<fn(&Words, &Words) -> u32> {
    match ty {
        Type::Unsigned(16) => comparisons!(Words, operator, |a: u32| a as u16),
        Type::Signed(16) => comparisons!(Words, operator, |a: u32| a as i16),
        Type::Unsigned(32) => comparisons!(Words, operator, |a: u32| a),
        Type::Signed(32) => comparisons!(Words, operator, |a: u32| a as i32),
        Type::F32 if ftz => float_comparisons!(Words, operator, |a| flush(f32::from_bits(a))),
        Type::F32 => float_comparisons!(Words, operator, f32::from_bits),
        Type::F16 => float_comparisons!(Words, operator, |a: u32| F16::widen(a as u16)),
        Type::Bf16 => float_comparisons!(Words, operator, |a: u32| Bf16::widen(a as u16)),
        _ => None,
    }
}

fn long_comparison(operator: &str, ty: Type) -> Option<fn(&Longs, &Longs) -> u32> {
    match ty {
        Type::Unsigned(64) => comparisons!(Longs, operator, |a: u64| a),
        Type::Signed(64) => comparisons!(Longs, operator, |a: u64| a as i64),
        Type::F64 => float_comparisons!(Longs, operator, f64::from_bits),
        _ => None,
    }
}

/// Shift amounts beyond the width give what an endless shift gives.
fn shift_left(a: u32, n: u32) -> u32 {
    a.checked_shl(n).unwrap_or(0)
}
fn field(a: u64, position: u32, length: u32, width: u32, signed: bool) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    let top = (position + length).min(width); // bit after the field
    let sign = signed && length > 0 && a >> (top - 1).min(width - 1) & 1 == 1;
    let bits = if position >= width { 0 } else { a >> position };
    let kept = top.saturating_sub(position);
    let mask = if kept >= 64 { u64::MAX } else { (1u64 << kept) - 1 };
    if sign { bits & mask | !mask } else { bits & mask }
}
fn insert(a: u64, b: u64, position: u32, length: u32, width: u32) -> u64 {
    let (position, length) = (position & 0xff, (length & 0xff).min(width));
    if position >= width {
        return b;
    }
    let mask = (if length >= 64 { u64::MAX } else { (1u64 << length) - 1 }) << position;
    b & !mask | a << position & mask
}
fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = (b as u64) << 32 | a as u64;
    (0..4).fold(0, |out, i| {
        let pick = selector >> (4 * i);
        let byte = (bytes >> (8 * (pick & 7))) as u8;
        let byte = if pick & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 };
        out | (byte as u32) << (8 * i)
    })
}
fn lop3(a: u32, b: u32, c: u32, table: u32) -> u32 {
    (0..8u32).filter(|i| table >> i & 1 == 1).fold(0, |out, i| {
        let term = |x: u32, bit: u32| if i >> bit & 1 == 1 { x } else { !x };
        out | term(a, 2) & term(b, 1) & term(c, 0)
    })
}

/// Decodes one of the instructions that [`super::statement`] sends here.
pub(super) fn decode<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    if st.name == "setp" {
        return compare(body, st);
    }
    let ty = st.take_last();
    match (st.name, ty) {
        ("and" | "or" | "xor" | "not", "pred") => {
            let not = st.name == "not";
            done(body, &st, if not { 2 } else { 3 })?;
            let d = body.predicate_destination(&st.operands[0])?;
            let mut a = body.predicate(&st.operands[1])?;
            a.negated ^= not;
            let b = if not { a } else { body.predicate(&st.operands[2])? };
            let logic = match st.name {
                "or" => Logic::Or,
                "xor" => Logic::Xor,
                _ => Logic::And,
            };
            body.emit(Op::Predicates { logic, d, a, b });
            Ok(())
        }
        ("and", "b16" | "b32") => body.emit_word2(&st, word2!(|a, b| a & b)),
        ("or", "b32") => body.emit_word2(&st, word2!(|a, b| a | b)),
        ("or", "b16") => body.emit_word2(&st, word2!(|a, b| (a | b) & 0xffff)),
        ("xor", "b32") => body.emit_word2(&st, word2!(|a, b| a ^ b)),
        ("xor", "b16") => body.emit_word2(&st, word2!(|a, b| (a ^ b) & 0xffff)),
        ("not", "b32") => body.emit_word1(&st, word1!(|a: u32| !a)),
        ("not", "b16") => body.emit_word1(&st, word1!(|a: u32| !a & 0xffff)),
        ("cnot", "b32") => body.emit_word1(&st, word1!(|a| (a == 0) as u32)),
        ("and", "b64") => body.emit_long2(&st, long2!(|a, b| a & b)),
        ("or", "b64") => body.emit_long2(&st, long2!(|a, b| a | b)),
        ("xor", "b64") => body.emit_long2(&st, long2!(|a, b| a ^ b)),
        ("not", "b64") => body.emit_long1(&st, long1!(|a: u64| !a)),
        ("shl", "b16") => body.emit_word2(&st, word2!(|a, n| shift_left(a, n) & 0xffff)),
        ("shl", "b32") => body.emit_word2(&st, word2!(shift_left)),
        ("shr", "b16" | "u16") => body.emit_word2(&st, word2!(|a: u32, n| (a & 0xffff).checked_shr(n).unwrap_or(0))),
        ("shr", "s16") => body.emit_word2(&st, word2!(|a, n: u32| (a as i16 as i32 >> n.min(31)) as u32 & 0xffff)),
        ("shr", "b32" | "u32") => body.emit_word2(&st, word2!(|a: u32, n| a.checked_shr(n).unwrap_or(0))),
        ("shr", "s32") => body.emit_word2(&st, word2!(|a, n: u32| (a as i32 >> n.min(31)) as u32)),
        ("shl" | "shr", "b64" | "u64" | "s64") => {
            done(body, &st, 3)?;
            let (d, a) = (body.long_destination(&st.operands[0])?, body.long(&st.operands[1])?);
            let b = body.word(&st.operands[2])?;
            let f = match (st.name, ty) {
                ("shl", _) => lanes!(|a: u64, n| a.checked_shl(n).unwrap_or(0); a: Longs, b: Words => Longs; each2),
                (_, "s64") => lanes!(|a, n: u32| (a as i64 >> n.min(63)) as u64; a: Longs, b: Words => Longs; each2),
                _ => lanes!(|a: u64, n| a.checked_shr(n).unwrap_or(0); a: Longs, b: Words => Longs; each2),
            };
            body.emit(Op::LongShift { f, d, a, b });
            Ok(())
        }
        ("shf", "b32") => {
            let (left, wrap) = (st.take("l"), st.take("wrap"));
            if !left && !st.take("r") || !wrap && !st.take("clamp") {
                return Err(unknown(body, &st));
            }
            body.emit_word3(
                &st,
                match (left, wrap) {
                    (true, true) => word3!(|a, b, n: u32| (long_of(a, b) << (n & 31) >> 32) as u32),
                    (true, false) => word3!(|a, b, n: u32| (long_of(a, b) << n.min(32) >> 32) as u32),
                    (false, true) => word3!(|a, b, n: u32| (long_of(a, b) >> (n & 31)) as u32),
                    (false, false) => word3!(|a, b, n: u32| (long_of(a, b) >> n.min(32)) as u32),
                },
            )
        }
        ("bfe", "u32") => body.emit_word3(&st, word3!(|a, p, n| field(a as u64, p, n, 32, false) as u32)),
        ("bfe", "s32") => body.emit_word3(&st, word3!(|a, p, n| field(a as u64, p, n, 32, true) as u32)),
        ("bfe", "u64" | "s64") => {
            done(body, &st, 4)?;
            let (d, a) = (body.long_destination(&st.operands[0])?, body.long(&st.operands[1])?);
            let (b, c) = (body.word(&st.operands[2])?, body.word(&st.operands[3])?);
            let f = match ty {
                "u64" => lanes!(|a, p, n| field(a, p, n, 64, false); a: Longs, b: Words, c: Words => Longs; each3),
                _ => lanes!(|a, p, n| field(a, p, n, 64, true); a: Longs, b: Words, c: Words => Longs; each3),
            };
            body.emit(Op::LongField { f, d, a, b, c });
            Ok(())
        }
        ("bfi", "b32") => body.emit_word4(&st, |s, d| {
            for i in 0..32 {
                d[i] = insert(s[0][i] as u64, s[1][i] as u64, s[2][i], s[3][i], 32) as u32;
            }
        }),
        ("lop3", "b32") => body.emit_word4(&st, |s, d| {
            for i in 0..32 {
                d[i] = lop3(s[0][i], s[1][i], s[2][i], s[3][i]);
            }
        }),
        ("bfind", "u32") => body.emit_word1(&st, word1!(|a: u32| 31u32.wrapping_sub(a.leading_zeros()))),
        ("popc", "b32") => body.emit_word1(&st, word1!(u32::count_ones)),
        ("clz", "b32") => body.emit_word1(&st, word1!(u32::leading_zeros)),
        ("brev", "b32") => body.emit_word1(&st, word1!(u32::reverse_bits)),
        ("brev", "b64") => body.emit_long1(&st, long1!(u64::reverse_bits)),
        ("popc" | "clz", "b64") => {
            done(body, &st, 2)?;
            let (d, a) = (body.word_destination(&st.operands[0])?, body.long(&st.operands[1])?);
            let f = match st.name {
                "popc" => lanes!(u64::count_ones; a: Longs => Words; each1),
                _ => lanes!(u64::leading_zeros; a: Longs => Words; each1),
            };
            body.emit(Op::WordOfLong { f, d, a });
            Ok(())
        }
        ("prmt", "b32") => body.emit_word3(&st, word3!(permute)),
        ("slct", _) => select_by_sign(body, st, ty),
        ("selp", _) => {
            let bits = Type::parse(ty).map_or(0, Type::bits);
            done(body, &st, 4)?;
            let p = body.predicate(&st.operands[3])?;
            let op = match bits {
                16 | 32 => Op::SelectWord {
                    d: body.word_destination(&st.operands[0])?,
                    a: body.word(&st.operands[1])?,
                    b: body.word(&st.operands[2])?,
                    p,
                },
                64 => Op::SelectLong {
                    d: body.long_destination(&st.operands[0])?,
                    a: body.long(&st.operands[1])?,
                    b: body.long(&st.operands[2])?,
                    p,
                },
                _ => return Err(unknown(body, &st)),
            };
            body.emit(op);
            Ok(())
        }
        ("testp", "f32") => {
            let test = st.take_last();
            done(body, &st, 2)?;
            let (d, a) = (body.predicate_destination(&st.operands[0])?, body.word(&st.operands[1])?);
            let f = match test {
                "finite" => compare!(Words, |a, _| f32::from_bits(a).is_finite()),
                "infinite" => compare!(Words, |a, _| f32::from_bits(a).is_infinite()),
                "number" => compare!(Words, |a, _| !f32::from_bits(a).is_nan()),
                "notanumber" => compare!(Words, |a, _| f32::from_bits(a).is_nan()),
                "normal" => compare!(Words, |a, _| f32::from_bits(a).is_normal()),
                "subnormal" => compare!(Words, |a, _| f32::from_bits(a).is_subnormal()),
                _ => return Err(unknown(body, &st)),
            };
            body.emit(Op::CompareWords { f, d, a, b: a, with: None });
            Ok(())
        }
        _ => {
            st.modifiers.push(ty);
            Err(unknown(body, &st))
        }
    }
}

/// The pair of a low and a high half.
fn long_of(a: u32, b: u32) -> u64 {
    (b as u64) << 32 | a as u64
}

/// `slct`: the first operand where the third is not negative.
fn select_by_sign<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>, ty: &'a str) -> Result<(), Error> {
    let data = Type::parse(st.take_last());
    if data.map(Type::bits) != Some(32) {
        return Err(unknown(body, &st));
    }
    match ty {
        "s32" => body.emit_word3(&st, word3!(|a, b, c: u32| if c as i32 >= 0 { a } else { b })),
        "f32" => body.emit_word3(&st, word3!(|a, b, c| if f32::from_bits(c) >= 0.0 { a } else { b })),
        _ => Err(unknown(body, &st)),
    }
}

/// `setp`, with an optional predicate to combine with.
fn compare<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let ty = Type::parse(st.take_last());
    let ftz = st.take("ftz");
    let logic = st.take_one_of(&["and", "or", "xor"]);
    let operator = st.take_last();
    done(body, &st, if logic.is_some() { 4 } else { 3 })?;
    let Operand::Name { .. } = st.operands[0] else {
        return Err(body.error("setp with two destinations is not simulated"));
    };
    let d = body.predicate_destination(&st.operands[0])?;
    let with = match logic {
        None => None,
        Some(logic) => {
            let logic = match logic {
                "and" => Logic::And,
                "or" => Logic::Or,
                _ => Logic::Xor,
            };
            Some((logic, body.predicate(&st.operands[3])?))
        }
    };
    let not_simulated = || format!("setp.{operator} of this type is not simulated");
    let Some(ty) = ty else { return Err(body.error(not_simulated())) };
    if ty.bits() == 64 {
        let f = long_comparison(operator, ty).ok_or_else(|| body.error(not_simulated()))?;
        let (a, b) = (body.long(&st.operands[1])?, body.long(&st.operands[2])?);
        body.emit(Op::CompareLongs { f, d, a, b, with });
    } else {
        let f = word_comparison(operator, ty, ftz).ok_or_else(|| body.error(not_simulated()))?;
        let (a, b) = (body.word(&st.operands[1])?, body.word(&st.operands[2])?);
        body.emit(Op::CompareWords { f, d, a, b, with });
    }
    Ok(())
}
