//! Hopper's instructions: mbarriers, bulk copies, wgmma.

use super::{done, each2, lanes, unknown, word2};
use crate::Error;
use crate::body::{Body, Operand, Statement, integer};
use crate::hopper::{Hopper, Left, Wgmma};
use crate::op::{Address, MmaType, Op, Reg, Words};
use crate::shared::in_block;

/// Decodes one of the instructions that [`super::statement`] sends here.
pub(super) fn decode<'a>(body: &mut Body<'a, '_>, st: Statement<'a>) -> Result<(), Error> {
    let op = match (st.name, &st.modifiers[..]) {
        ("setmaxnreg", ["inc" | "dec", "sync", "aligned", "u32"]) => None,
        // Launches run one after the other here.
        ("griddepcontrol", ["launch_dependents" | "wait"]) => None,
        ("mapa", ["shared::cluster", "u32"]) => {
            operands(body, &st, 3)?;
            let (a, rank) = (body.word(&st.operands[1])?, body.word(&st.operands[2])?);
            let d = body.word_destination(&st.operands[0])?;
            body.emit(Op::Word2 { f: word2!(in_block), d, a, b: rank });
            return Ok(());
        }
        ("mbarrier", _) => Some(mbarrier(body, &st)?),
        ("cp", _) => Some(bulk_copy(body, &st)?),
        ("wgmma", ["fence", "sync", "aligned"]) => None,
        ("wgmma", ["commit_group", "sync", "aligned"]) => Some(Hopper::WgmmaCommit),
        ("wgmma", ["wait_group", "sync", "aligned"]) => {
            Some(Hopper::WgmmaWait { pending: literal(body, &st.operands[0])? })
        }
        ("wgmma", ["mma_async", "sync", "aligned", shape, "f32", "f16", "f16"]) => {
            Some(Hopper::Wgmma(wgmma(body, &st, shape, MmaType::F16)?))
        }
        ("wgmma", ["mma_async", "sync", "aligned", shape, "f32", "bf16", "bf16"]) => {
            Some(Hopper::Wgmma(wgmma(body, &st, shape, MmaType::Bf16)?))
        }
        _ => return Err(unknown(body, &st)),
    };
    body.emit(op.map_or(Op::Nop, |op| Op::Hopper(Box::new(op))));
    Ok(())
}

fn literal(body: &Body<'_, '_>, operand: &Operand<'_>) -> Result<u32, Error> {
    match *operand {
        Operand::Name { text, prefixed: false } => integer(text).map(|value| value as u32),
        _ => None,
    }
    .ok_or_else(|| body.error("expected a literal"))
}

/// Fails unless the statement has `count` operands.
fn operands(body: &Body<'_, '_>, st: &Statement<'_>, count: usize) -> Result<(), Error> {
    if st.operands.len() == count { Ok(()) } else { Err(unknown(body, st)) }
}

fn mbarrier<'a>(body: &mut Body<'a, '_>, st: &Statement<'a>) -> Result<Hopper, Error> {
    let of = &st.operands;
    Ok(match &st.modifiers[..] {
        ["init", "shared::cta", "b64"] => {
            operands(body, st, 2)?;
            Hopper::Init { barrier: body.address(&of[0])?, count: body.word(&of[1])? }
        }
        ["arrive", "shared::cta" | "shared::cluster", "b64"] => {
            operands(body, st, 2)?;
            Hopper::Arrive { barrier: body.address(&of[1])?, bytes: None }
        }
        ["arrive", "expect_tx", "shared::cta", "b64"] => {
            operands(body, st, 3)?;
            Hopper::Arrive { barrier: body.address(&of[1])?, bytes: Some(body.word(&of[2])?) }
        }
        ["try_wait", "parity", "shared::cta", "b64"] => {
            operands(body, st, 3)?;
            let d = body.predicate_destination(&of[0])?;
            Hopper::Test { d, barrier: body.address(&of[1])?, parity: body.word(&of[2])? }
        }
        _ => return Err(unknown(body, st)),
    })
}

fn bulk_copy<'a>(body: &mut Body<'a, '_>, st: &Statement<'a>) -> Result<Hopper, Error> {
    let of = &st.operands;
    Ok(match &st.modifiers[..] {
        ["async", "bulk", "shared::cluster", "global", "mbarrier::complete_tx::bytes"] => {
            operands(body, st, 4)?;
            let (destination, source) = (body.address(&of[0])?, body.address(&of[1])?);
            Hopper::BulkLoad { destination, source, bytes: body.word(&of[2])?, barrier: body.address(&of[3])? }
        }
        ["async", "bulk", "global", "shared::cta", "bulk_group"] => {
            operands(body, st, 3)?;
            let (destination, source) = (body.address(&of[0])?, body.address(&of[1])?);
            Hopper::BulkStore { adds: false, destination, source, bytes: body.word(&of[2])? }
        }
        ["reduce", "async", "bulk", "global", "shared::cta", "bulk_group", "add", "f32"] => {
            operands(body, st, 3)?;
            let (destination, source) = (body.address(&of[0])?, body.address(&of[1])?);
            Hopper::BulkStore { adds: true, destination, source, bytes: body.word(&of[2])? }
        }
        // A cache hint, if any, is the last operand and does nothing.
        [
            "async",
            "bulk",
            "tensor",
            "2d" | "3d" | "4d",
            "shared::cluster",
            "global",
            "mbarrier::complete_tx::bytes",
            hints @ ..,
        ] if hints.is_empty() || hints == ["L2::cache_hint"] => {
            operands(body, st, 3 + hints.len())?;
            let (map, coordinates) = tensor(body, &of[1])?;
            let (destination, barrier) = (body.address(&of[0])?, body.address(&of[2])?);
            Hopper::TensorLoad { destination, map, coordinates, barrier, blocks: None }
        }
        [
            "async",
            "bulk",
            "tensor",
            "2d" | "3d" | "4d",
            "shared::cluster",
            "global",
            "mbarrier::complete_tx::bytes",
            "multicast::cluster",
        ] => {
            operands(body, st, 4)?;
            let (map, coordinates) = tensor(body, &of[1])?;
            let (destination, barrier) = (body.address(&of[0])?, body.address(&of[2])?);
            Hopper::TensorLoad { destination, map, coordinates, barrier, blocks: Some(body.word(&of[3])?) }
        }
        ["async", "bulk", "tensor", "2d", "global", "shared::cta", "bulk_group"] => {
            operands(body, st, 2)?;
            let (map, coordinates) = tensor(body, &of[0])?;
            Hopper::TensorStore { map, coordinates, source: body.address(&of[1])? }
        }
        ["async", "bulk", "commit_group"] => Hopper::BulkCommit,
        ["async", "bulk", "wait_group"] | ["async", "bulk", "wait_group", "read"] => {
            Hopper::BulkWait { pending: literal(body, &of[0])? }
        }
        _ => return Err(unknown(body, st)),
    })
}

/// A tensor map's address and the coordinates of a box.
fn tensor<'a>(body: &mut Body<'a, '_>, operand: &Operand<'a>) -> Result<(Address, Vec<Reg>), Error> {
    let Operand::Tensor { base, coordinates } = operand else {
        return Err(body.error("expected a tensor map and coordinates"));
    };
    let map = body.address(&Operand::Address { base, offset: 0 })?;
    let coordinates = coordinates.iter().map(|c| body.word(c)).collect::<Result<_, _>>()?;
    Ok((map, coordinates))
}

fn wgmma<'a>(body: &mut Body<'a, '_>, st: &Statement<'a>, shape: &str, operand_type: MmaType) -> Result<Wgmma, Error> {
    let columns = shape.strip_prefix("m64n").and_then(|rest| rest.strip_suffix("k16")?.parse::<usize>().ok());
    let (Some(columns), Operand::List(d)) = (columns, &st.operands[0]) else { return Err(unknown(body, st)) };
    let d = d.iter().map(|operand| body.word_destination(operand)).collect::<Result<Vec<Reg>, _>>()?;
    if 2 * d.len() != columns {
        return Err(body.error("wrong number of accumulators for this shape of wgmma"));
    }
    let (a, majors) = match &st.operands[1] {
        Operand::List(list) if list.len() == 4 => {
            operands(body, st, 7)?;
            let mut registers = [0; 4];
            for (place, operand) in registers.iter_mut().zip(list) {
                *place = body.word(operand)?;
            }
            (Left::Registers(registers), 6..7)
        }
        name => {
            operands(body, st, 8)?;
            (Left::Shared(body.long(name)?, literal(body, &st.operands[6])? == 1), 7..8)
        }
    };
    if literal(body, &st.operands[4])? != 1 || literal(body, &st.operands[5])? != 1 {
        return Err(unknown(body, st));
    }
    let b = (body.long(&st.operands[2])?, literal(body, &st.operands[majors.start])? == 1);
    let accumulate = match &st.operands[3] {
        Operand::Name { text: "1", .. } => None,
        predicate => Some(body.predicate(predicate)?),
    };
    Ok(Wgmma { operand_type, d, a, b, accumulate })
}

/// `fence.proxy` and `fence.mbarrier_init`; the latter orders nothing that is not ordered here anyway.
pub(super) fn fence<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let op = match &st.modifiers[..] {
        ["proxy", "async"] | ["proxy", "async", "shared::cta"] => Op::FenceProxy,
        ["mbarrier_init", "release", "cluster"] => Op::Fence,
        _ => return Err(unknown(body, &st)),
    };
    st.modifiers.clear();
    done(body, &st, 0)?;
    body.emit(op);
    Ok(())
}
