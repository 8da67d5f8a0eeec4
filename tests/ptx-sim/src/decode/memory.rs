//! Loads, stores, atomics, asynchronous copies and fences.
//!
//! Cache operators and hints do nothing here. Orders and scopes only tell strong accesses from weak ones.

use super::{done, unknown};
use crate::Error;
use crate::body::{Body, Operand, Statement};
use crate::convert::Type;
use crate::error::Space;
use crate::op::{Access, AsyncCopy, Atomic, AtomicOp, Element, Op};

const CACHE_HINTS: [&str; 23] = [
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::evict_normal",
    "L2::evict_first",
    "L2::evict_last",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::cache_hint",
    "unified",
    "weak",
    "entry",
    "noftz",
];
const ORDERS: [&str; 6] = ["volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"];
const SCOPES: [&str; 4] = ["cta", "cluster", "gpu", "sys"];

fn space(st: &mut Statement<'_>) -> Space {
    match st.take_one_of(&["global", "shared", "shared::cta", "shared::cluster", "param", "param::entry", "const"]) {
        Some("global" | "const") => Space::Global,
        Some("shared" | "shared::cta" | "shared::cluster") => Space::Shared,
        Some(_) => Space::Param,
        None => Space::Generic,
    }
}

/// Takes what changes only speed, the operand of a cache hint (the last one) included.
fn take_hints(st: &mut Statement<'_>) {
    if st.modifiers.contains(&"L2::cache_hint") {
        st.operands.pop();
    }
    while st.take_one_of(&CACHE_HINTS).is_some() {}
}

/// Decodes one of the instructions that [`super::statement`] sends here.
pub(super) fn decode<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let name = st.name;
    match name {
        "ld" | "ldu" | "st" => access(body, st),
        "atom" | "red" => atomic(body, st),
        "cp" if st.take("async") => copy(body, st),
        "membar" | "fence" if !st.modifiers.iter().any(|m| m.starts_with("mbarrier") || *m == "proxy") => {
            body.emit(Op::Fence);
            Ok(())
        }
        _ => Err(unknown(body, &st)),
    }
}

fn access<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let store = st.name == "st";
    let ty = st.take_last();
    let space = space(&mut st);
    take_hints(&mut st);
    let read_only = st.take("nc");
    let acquires = st.modifiers.contains(&"acquire");
    let strong = st.take_one_of(&ORDERS).is_some();
    st.take_one_of(&SCOPES);
    let count = match st.take_one_of(&["v2", "v4"]) {
        Some("v2") => 2,
        Some(_) => 4,
        None => 1,
    };
    let Some(ty) = Type::parse(ty) else { return Err(unknown(body, &st)) };
    done(body, &st, 2)?;
    let (values, address) = if store { (1, 0) } else { (0, 1) };
    let list = match &st.operands[values] {
        Operand::List(list) => list.clone(),
        one => vec![one.clone()],
    };
    if list.len() != count || count as u32 * ty.bits() > 128 {
        return Err(body.error(format!("expected {count} registers of at most 128 bits in all, found {}", list.len())));
    }
    let mut registers = Vec::new();
    for operand in &list {
        registers.push(if store {
            (body.data_of_either(operand, ty.bits())?, 0)
        } else {
            body.destination(operand, ty.bits())?
        });
    }
    if !store && registers.iter().any(|(_, bits)| *bits < ty.bits()) {
        return Err(body.error("destination narrower than its type"));
    }
    let address = body.address(&st.operands[address])?;
    let element = Element { bytes: ty.bits() / 8, signed: ty.is_signed() };
    body.emit(Op::Access(Box::new((store, Access { space, element, registers, address, strong, read_only }))));
    if acquires {
        // Probably one of a loop that waits for others.
        body.emit(Op::Yield);
    }
    Ok(())
}

fn atomic<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let returns = st.name == "atom";
    let ty = st.take_last();
    let space = space(&mut st);
    take_hints(&mut st);
    st.take_one_of(&ORDERS);
    st.take_one_of(&SCOPES);
    let operation = st.take_last();
    let op = match (operation, ty) {
        ("add", "u32" | "s32" | "u64" | "s64") => AtomicOp::AddInt,
        ("add", "f32") => AtomicOp::AddF32,
        ("add", "f64") => AtomicOp::AddF64,
        ("min", "u32" | "u64") => AtomicOp::MinUnsigned,
        ("min", "s32" | "s64") => AtomicOp::MinSigned,
        ("max", "u32" | "u64") => AtomicOp::MaxUnsigned,
        ("max", "s32" | "s64") => AtomicOp::MaxSigned,
        ("and", "b32" | "b64") => AtomicOp::And,
        ("or", "b32" | "b64") => AtomicOp::Or,
        ("xor", "b32" | "b64") => AtomicOp::Xor,
        ("inc", "u32") => AtomicOp::Increment,
        ("dec", "u32") => AtomicOp::Decrement,
        ("exch", "b32" | "b64") if returns => AtomicOp::Exchange,
        ("cas", "b32" | "b64") if returns => AtomicOp::CompareSwap,
        _ => return Err(body.error(format!("atomic not simulated: `{operation}.{ty}`"))),
    };
    let bits = if ty.ends_with("64") { 64 } else { 32 };
    let swaps = matches!(op, AtomicOp::CompareSwap);
    done(body, &st, 2 + returns as usize + swaps as usize)?;
    let destination = if returns { Some(body.destination(&st.operands[0], bits)?.0) } else { None };
    let first = returns as usize;
    let address = body.address(&st.operands[first])?;
    let operand = body.data(&st.operands[first + 1], bits)?;
    let swap = if swaps { Some(body.data(&st.operands[first + 2], bits)?) } else { None };
    body.emit(Op::Atomic(Box::new(Atomic { space, op, bytes: bits / 8, destination, address, operand, swap })));
    Ok(())
}

/// `cp.async`, its groups and its waits.
fn copy<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    if st.take("commit_group") {
        done(body, &st, 0)?;
        body.emit(Op::AsyncCommit);
        return Ok(());
    }
    if st.take("wait_all") {
        done(body, &st, 0)?;
        body.emit(Op::AsyncWaitAll);
        return Ok(());
    }
    if st.take("wait_group") {
        done(body, &st, 1)?;
        let pending = match st.operands[0] {
            Operand::Name { text, prefixed: false } => crate::body::integer(text),
            _ => None,
        };
        let pending = pending.ok_or_else(|| body.error("cp.async.wait_group takes a literal"))? as u32;
        body.emit(Op::AsyncWait { pending });
        return Ok(());
    }
    take_hints(&mut st);
    if !(st.take("shared") || st.take("shared::cta")) || !st.take("global") {
        return Err(unknown(body, &st));
    }
    let with_source_bytes = st.operands.len() == 4;
    done(body, &st, if with_source_bytes { 4 } else { 3 })?;
    let bytes = match st.operands[2] {
        Operand::Name { text, .. } => crate::body::integer(text),
        _ => None,
    };
    let Some(bytes @ (4 | 8 | 16)) = bytes else { return Err(body.error("cp.async copies 4, 8 or 16 bytes")) };
    let (destination, source) = (body.address(&st.operands[0])?, body.address(&st.operands[1])?);
    let source_bytes = if with_source_bytes { Some(body.word(&st.operands[3])?) } else { None };
    body.emit(Op::AsyncCopy(Box::new(AsyncCopy { destination, source, bytes: bytes as u32, source_bytes })));
    Ok(())
}
