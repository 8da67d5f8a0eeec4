//! Instructions that a whole warp, or a whole block, executes together.

use super::{done, unknown};
use crate::Error;
use crate::body::{Body, Operand, Statement};
use crate::op::{Matrix, Mma, MmaType, Op, Reg, Shuffle, ShuffleMode, VoteMode, Words};

/// Decodes one of the instructions that [`super::statement`] sends here.
pub(super) fn decode<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    // Here every collective needs the whole warp, aligned or not.
    st.take("aligned");
    let sync = st.take("sync");
    let name = st.name;
    match name {
        "bar" | "barrier" => barrier(body, st, sync),
        "shfl" if sync => shuffle(body, st),
        "redux" if sync => reduce(body, st),
        "vote" if sync => vote(body, st),
        "activemask" if st.take("b32") => {
            done(body, &st, 1)?;
            let d = body.word_destination(&st.operands[0])?;
            body.emit(Op::ActiveMask { d });
            Ok(())
        }
        "ldmatrix" | "stmatrix" if sync => matrix(body, st),
        "movmatrix" if sync && st.take("m8n8") && st.take("trans") && st.take("b16") => {
            done(body, &st, 2)?;
            let (d, a) = (body.word_destination(&st.operands[0])?, body.word(&st.operands[1])?);
            body.emit(Op::MoveMatrix { d, a });
            Ok(())
        }
        "mma" if sync => mma(body, st),
        _ => Err(unknown(body, &st)),
    }
}

fn barrier<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>, sync: bool) -> Result<(), Error> {
    if st.take("warp") {
        done(body, &st, 1)?;
        let members = body.word(&st.operands[0])?;
        body.emit(Op::WarpBarrier { members });
        return Ok(());
    }
    if st.take("cluster") {
        return cluster_barrier(body, st);
    }
    st.take("cta");
    if !sync && !st.take("arrive") {
        return Err(unknown(body, &st));
    }
    let counted = st.operands.len() == 2;
    done(body, &st, if counted { 2 } else { 1 })?;
    let id = body.word(&st.operands[0])?;
    let threads = if counted { Some(body.word(&st.operands[1])?) } else { None };
    body.emit(Op::BlockBarrier { id, threads, wait: sync });
    Ok(())
}

/// An arrival with the wait right behind it. That a relaxed one orders nothing but mbarrier initialisations is not modelled.
fn cluster_barrier<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    if st.take("arrive") && (st.take("release") || st.take("relaxed")) {
        done(body, &st, 0)?;
        body.emit(Op::ClusterBarrier);
        return Ok(());
    }
    if st.take("wait") && st.take("acquire") && matches!(body.last(), Some(Op::ClusterBarrier)) {
        return done(body, &st, 0);
    }
    Err(unknown(body, &st))
}

fn shuffle<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let mode = match st.take_one_of(&["up", "down", "bfly", "idx"]) {
        Some("up") => ShuffleMode::Up,
        Some("down") => ShuffleMode::Down,
        Some("bfly") => ShuffleMode::Butterfly,
        Some(_) => ShuffleMode::Index,
        None => return Err(unknown(body, &st)),
    };
    if !st.take("b32") {
        return Err(unknown(body, &st));
    }
    done(body, &st, 5)?;
    let (d, in_range) = match st.operands[0] {
        Operand::Pair(d, p) => {
            (body.word_destination(&Operand::Name { text: d, prefixed: false })?, Some(body.predicate_named(p)?))
        }
        ref d => (body.word_destination(d)?, None),
    };
    let [a, b, c, members] = words(body, &st.operands[1..])?;
    body.emit(Op::Shuffle(Box::new(Shuffle { mode, d, in_range, a, b, c, members })));
    Ok(())
}

fn words<'a, const N: usize>(body: &mut Body<'a, '_>, operands: &[Operand<'a>]) -> Result<[Reg; N], Error> {
    let mut out = [0; N];
    if operands.len() != N {
        return Err(body.error(format!("expected {N} operands or registers, found {}", operands.len())));
    }
    for (place, operand) in out.iter_mut().zip(operands) {
        *place = body.word(operand)?;
    }
    Ok(out)
}

fn reduce<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let ty = st.take_last();
    let f: fn(&Words) -> u32 = match (st.take_last(), ty) {
        ("add", "u32" | "s32") => |a| a.iter().fold(0, |sum: u32, x| sum.wrapping_add(*x)),
        ("min", "u32") => |a| a.iter().copied().fold(u32::MAX, u32::min),
        ("max", "u32") => |a| a.iter().copied().fold(0, u32::max),
        ("min", "s32") => |a| a.iter().map(|x| *x as i32).fold(i32::MAX, i32::min) as u32,
        ("max", "s32") => |a| a.iter().map(|x| *x as i32).fold(i32::MIN, i32::max) as u32,
        ("and", "b32") => |a| a.iter().fold(u32::MAX, |x, y| x & y),
        ("or", "b32") => |a| a.iter().fold(0, |x, y| x | y),
        ("xor", "b32") => |a| a.iter().fold(0, |x, y| x ^ y),
        _ => return Err(body.error(format!("redux of `{ty}` is not simulated"))),
    };
    done(body, &st, 3)?;
    let d = body.word_destination(&st.operands[0])?;
    let [a, members] = words(body, &st.operands[1..])?;
    body.emit(Op::Reduce { f, d, a, members });
    Ok(())
}

fn vote<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let ty = st.take_last();
    let mode = st.take_last();
    done(body, &st, 3)?;
    let a = body.predicate(&st.operands[1])?;
    let members = body.word(&st.operands[2])?;
    let mode = match (mode, ty) {
        ("ballot", "b32") => {
            let d = body.word_destination(&st.operands[0])?;
            body.emit(Op::Ballot { d, a, members });
            return Ok(());
        }
        ("all", "pred") => VoteMode::All,
        ("any", "pred") => VoteMode::Any,
        ("uni", "pred") => VoteMode::Uniform,
        _ => return Err(body.error(format!("vote.{mode}.{ty} is not simulated"))),
    };
    let d = body.predicate_destination(&st.operands[0])?;
    body.emit(Op::Vote { mode, d, a, members });
    Ok(())
}

fn matrix<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let store = st.name == "stmatrix";
    let shape = st.take("m8n8") && st.take("b16") && (st.take("shared") || st.take("shared::cta"));
    let transposed = st.take("trans");
    let count = match st.take_one_of(&["x1", "x2", "x4"]) {
        Some("x1") => 1,
        Some("x2") => 2,
        Some(_) if shape => 4,
        _ => return Err(unknown(body, &st)),
    };
    done(body, &st, 2)?;
    let (values, address) = if store { (1, 0) } else { (0, 1) };
    let list = match &st.operands[values] {
        Operand::List(list) => list.clone(),
        one => vec![one.clone()],
    };
    if list.len() != count || !shape {
        return Err(unknown(body, &st));
    }
    let mut registers = Vec::new();
    for operand in &list {
        registers.push(if store { body.word(operand)? } else { body.word_destination(operand)? });
    }
    let address = body.address(&st.operands[address])?;
    body.emit(Op::Matrix(Box::new(Matrix { store, transposed, registers, address })));
    Ok(())
}

fn mma<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let operand_type = match st.modifiers[..] {
        ["m16n8k16" | "m16n8k8", "row", "col", "f32", "f16", "f16", "f32"] => MmaType::F16,
        ["m16n8k16" | "m16n8k8", "row", "col", "f32", "bf16", "bf16", "f32"] => MmaType::Bf16,
        _ => return Err(unknown(body, &st)),
    };
    let halves = if st.modifiers[0] == "m16n8k16" { 2 } else { 1 };
    st.modifiers.clear();
    done(body, &st, 4)?;
    let mut lists = Vec::new();
    for operand in &st.operands {
        lists.push(match operand {
            Operand::List(list) => list.clone(),
            one => vec![one.clone()],
        });
    }
    if lists[0].len() != 4 || lists[1].len() != 2 * halves || lists[2].len() != halves {
        return Err(body.error("wrong number of registers for this shape of mma"));
    }
    let mut d = [0; 4];
    for (place, operand) in d.iter_mut().zip(&lists[0]) {
        *place = body.word_destination(operand)?;
    }
    let mut registers =
        |list: &[Operand<'a>]| list.iter().map(|operand| body.word(operand)).collect::<Result<Vec<_>, _>>();
    let (a, b) = (registers(&lists[1])?, registers(&lists[2])?);
    let c = words(body, &lists[3])?;
    body.emit(Op::Mma(Box::new(Mma { operand_type, d, a, b, c })));
    Ok(())
}
