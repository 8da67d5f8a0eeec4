//! Moves, packing, conversions and address spaces.

use super::{done, each1, each2, lanes, long1, unknown, word1, word2};
use crate::Error;
use crate::body::{Body, Operand, Statement};
use crate::convert::{Conversion, Type};
use crate::number::{Bf16, F16, Narrow, Rounding};
use crate::op::{Data, Logic, Longs, Op, Words};
use crate::space::{PARAM_WINDOW, SHARED_WINDOW, WINDOW_BYTES};

/// Decodes one of the instructions that [`super::statement`] sends here.
pub(super) fn decode<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    match st.name {
        "mov" => moves(body, st),
        "cvta" => addresses(body, st),
        "isspacep" => {
            let space = st.take_last();
            done(body, &st, 2)?;
            let (d, a) = (body.predicate_destination(&st.operands[0])?, body.long(&st.operands[1])?);
            fn in_window(a: &Longs, window: u64) -> u32 {
                (0..32).fold(0, |mask, i| mask | ((a[i].wrapping_sub(window) < WINDOW_BYTES) as u32) << i)
            }
            let f: fn(&Longs, &Longs) -> u32 = match space {
                "shared" | "shared::cta" => |a, _| in_window(a, SHARED_WINDOW),
                "param" => |a, _| in_window(a, PARAM_WINDOW),
                "global" => |a, _| !(in_window(a, SHARED_WINDOW) | in_window(a, PARAM_WINDOW)),
                _ => return Err(unknown(body, &st)),
            };
            body.emit(Op::CompareLongs { f, d, a, b: a, with: None });
            Ok(())
        }
        _ => convert(body, st),
    }
}

/// `mov`, whose operand may be a list to pack or to unpack.
fn moves<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let ty = st.take_last();
    done(body, &st, 2)?;
    if ty == "pred" {
        let d = body.predicate_destination(&st.operands[0])?;
        let a = body.predicate(&st.operands[1])?;
        body.emit(Op::Predicates { logic: Logic::And, d, a, b: a });
        return Ok(());
    }
    let Some(bits) = Type::parse(ty).map(Type::bits) else { return Err(unknown(body, &st)) };
    match (&st.operands[0], &st.operands[1]) {
        (Operand::List(parts), whole) => unpack(body, parts, whole, bits),
        (whole, Operand::List(parts)) => pack(body, whole, parts, bits),
        (d, Operand::Name { text, .. }) if text.starts_with("%clock") || text.starts_with("%globaltimer") => {
            let d = body.destination(d, bits)?.0;
            body.emit(Op::Clock { d });
            Ok(())
        }
        (_, _) if bits == 64 => body.emit_long1(&st, long1!(|a| a)),
        (_, _) if bits == 16 => body.emit_word1(&st, word1!(|a: u32| a & 0xffff)),
        (_, _) => body.emit_word1(&st, word1!(|a| a)),
    }
}

fn unpack<'a>(body: &mut Body<'a, '_>, parts: &[Operand<'a>], whole: &Operand<'a>, bits: u32) -> Result<(), Error> {
    let whole = body.data(whole, bits)?;
    for (i, part) in parts.iter().enumerate() {
        if matches!(part, Operand::Name { text: "_", .. }) {
            continue;
        }
        let d = body.word_destination(part)?;
        body.emit(match (whole, parts.len(), i) {
            (Data::Word(a), 2, 0) => Op::Word1 { f: word1!(|a: u32| a & 0xffff), d, a },
            (Data::Word(a), 2, 1) => Op::Word1 { f: word1!(|a: u32| a >> 16), d, a },
            (Data::Word(a), 4, _) => {
                let f = match i {
                    0 => word1!(|a: u32| a & 0xff) as fn(&Words, &mut Words),
                    1 => word1!(|a: u32| a >> 8 & 0xff),
                    2 => word1!(|a: u32| a >> 16 & 0xff),
                    _ => word1!(|a: u32| a >> 24),
                };
                Op::Word1 { f, d, a }
            }
            (Data::Long(a), 2, 0) => Op::WordOfLong { f: lanes!(|a: u64| a as u32; a: Longs => Words; each1), d, a },
            (Data::Long(a), 2, 1) => {
                Op::WordOfLong { f: lanes!(|a: u64| (a >> 32) as u32; a: Longs => Words; each1), d, a }
            }
            (Data::Long(a), 4, _) => {
                let f = match i {
                    0 => lanes!(|a: u64| a as u16 as u32; a: Longs => Words; each1) as fn(&Longs, &mut Words),
                    1 => lanes!(|a: u64| (a >> 16) as u16 as u32; a: Longs => Words; each1),
                    2 => lanes!(|a: u64| (a >> 32) as u16 as u32; a: Longs => Words; each1),
                    _ => lanes!(|a: u64| (a >> 48) as u16 as u32; a: Longs => Words; each1),
                };
                Op::WordOfLong { f, d, a }
            }
            _ => return Err(body.error("this unpacking is not simulated")),
        });
    }
    Ok(())
}

fn pack<'a>(body: &mut Body<'a, '_>, whole: &Operand<'a>, parts: &[Operand<'a>], bits: u32) -> Result<(), Error> {
    let mut s = Vec::new();
    for part in parts {
        s.push(body.word(part)?);
    }
    let pair = word2!(|a: u32, b: u32| a & 0xffff | b << 16);
    let join = lanes!(|a, b| (b as u64) << 32 | a as u64; a: Words, b: Words => Longs; each2);
    match (bits, s[..].len()) {
        (32, 2) => {
            let d = body.word_destination(whole)?;
            body.emit(Op::Word2 { f: pair, d, a: s[0], b: s[1] });
        }
        (32, 4) => {
            let d = body.word_destination(whole)?;
            let f = |s: [&Words; 4], d: &mut Words| {
                for i in 0..32 {
                    let byte = |j: usize| (s[j][i] & 0xff) << (8 * j);
                    d[i] = byte(0) | byte(1) | byte(2) | byte(3);
                }
            };
            body.emit(Op::Word4 { f, d, s: [s[0], s[1], s[2], s[3]] });
        }
        (64, 2) => {
            let d = body.long_destination(whole)?;
            body.emit(Op::LongOfWords { f: join, d, a: s[0], b: s[1] });
        }
        (64, 4) => {
            let d = body.long_destination(whole)?;
            let scratch = Operand::Name { text: "_", prefixed: false };
            let (low, high) = (body.word_destination(&scratch)?, body.word_destination(&scratch)?);
            body.emit(Op::Word2 { f: pair, d: low, a: s[0], b: s[1] });
            body.emit(Op::Word2 { f: pair, d: high, a: s[2], b: s[3] });
            body.emit(Op::LongOfWords { f: join, d, a: low, b: high });
        }
        _ => return Err(body.error("this packing is not simulated")),
    }
    Ok(())
}

/// `cvta`: shared and parameter memory are windows of the generic addresses; global memory is the rest.
fn addresses<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let ty = st.take_last();
    let to = st.take("to");
    let space = st.take_one_of(&["global", "shared::cta", "shared", "const", "param::entry", "param"]).unwrap_or("");
    if ty != "u64" {
        return Err(unknown(body, &st));
    }
    body.emit_long1(
        &st,
        match (space, to) {
            ("global" | "const", _) => long1!(|a| a),
            ("shared::cta" | "shared", false) => long1!(|a: u64| a.wrapping_add(SHARED_WINDOW)),
            ("shared::cta" | "shared", true) => long1!(|a: u64| a.wrapping_sub(SHARED_WINDOW)),
            ("param" | "param::entry", false) => long1!(|a: u64| a.wrapping_add(PARAM_WINDOW)),
            ("param" | "param::entry", true) => long1!(|a: u64| a.wrapping_sub(PARAM_WINDOW)),
            _ => return Err(unknown(body, &st)),
        },
    )
}

fn convert<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let (from, to) = (st.take_last(), st.take_last());
    if to == "tf32" && st.take("rna") {
        // Ten bits of mantissa, ties away from zero.
        return body.emit_word1(
            &st,
            word1!(|a| if f32::from_bits(a).is_finite() { a.wrapping_add(0x1000) & !0x1fff } else { a }),
        );
    }
    let pair = |to: &str| matches!(to, "f16x2" | "bf16x2");
    if pair(to) && from == "f32" && st.take("rn") {
        // The first source becomes the high half.
        return body.emit_word2(
            &st,
            match to {
                "f16x2" => word2!(packed::<F16>),
                _ => word2!(packed::<Bf16>),
            },
        );
    }
    let (Some(from), Some(to)) = (Type::parse(from), Type::parse(to)) else {
        st.modifiers.extend([to, from]);
        return Err(unknown(body, &st));
    };
    let (flush, saturate) = (st.take("ftz"), st.take("sat"));
    let mode = st.take_one_of(&["rni", "rzi", "rmi", "rpi", "rn", "rz", "rm", "rp"]).unwrap_or("rn");
    let rounding = match &mode[..2] {
        "rz" => Rounding::Zero,
        "rm" => Rounding::Down,
        "rp" => Rounding::Up,
        _ => Rounding::Nearest,
    };
    let integral = mode.ends_with('i') && to.is_float();
    if !flush && !saturate && !integral {
        match (to, from, rounding) {
            (Type::F32, Type::F16, _) => return body.emit_word1(&st, word1!(|a| F16::widen(a as u16).to_bits())),
            (Type::F32, Type::Bf16, _) => return body.emit_word1(&st, word1!(|a| Bf16::widen(a as u16).to_bits())),
            (Type::F16, Type::F32, Rounding::Nearest) => {
                return body.emit_word1(&st, word1!(|a| F16::nearest(f32::from_bits(a)) as u32));
            }
            (Type::Bf16, Type::F32, Rounding::Nearest) => {
                return body.emit_word1(&st, word1!(|a| Bf16::nearest(f32::from_bits(a)) as u32));
            }
            (Type::F32, Type::Signed(32), Rounding::Nearest) => {
                return body.emit_word1(&st, word1!(|a| (a as i32 as f32).to_bits()));
            }
            (Type::F32, Type::Unsigned(32), Rounding::Nearest) => {
                return body.emit_word1(&st, word1!(|a| (a as f32).to_bits()));
            }
            _ => {}
        }
    }
    done(body, &st, 2)?;
    let (d, width) = body.destination(&st.operands[0], to.bits())?;
    let a = body.data(&st.operands[1], from.bits())?;
    let plain = !flush && !saturate;
    match (d, a, to, from) {
        (Data::Long(d), Data::Word(a), Type::Unsigned(64) | Type::Signed(64), Type::Unsigned(32)) if plain => {
            body.emit(Op::LongOfWord { f: lanes!(|a| a as u64; a: Words => Longs; each1), d, a });
        }
        (Data::Long(d), Data::Word(a), Type::Unsigned(64) | Type::Signed(64), Type::Signed(32)) if plain => {
            body.emit(Op::LongOfWord { f: lanes!(|a| a as i32 as u64; a: Words => Longs; each1), d, a });
        }
        (
            Data::Word(d),
            Data::Long(a),
            Type::Unsigned(32) | Type::Signed(32),
            Type::Unsigned(64) | Type::Signed(64),
        ) if plain => {
            body.emit(Op::WordOfLong { f: lanes!(|a: u64| a as u32; a: Longs => Words; each1), d, a });
        }
        _ => {
            if width < to.bits() {
                return Err(body.error("destination narrower than its type"));
            }
            let conversion = Conversion { to, from, rounding, integral, flush, saturate };
            body.emit(Op::Convert { conversion, d, width, a });
        }
    }
    Ok(())
}

#[inline(always)]
fn packed<N: Narrow>(high: u32, low: u32) -> u32 {
    (N::nearest(f32::from_bits(high)) as u32) << 16 | N::nearest(f32::from_bits(low)) as u32
}
