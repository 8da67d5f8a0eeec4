//! Instructions of sm_90a.

use super::{done, unknown};
use crate::Error;
use crate::body::{Body, Operand, Statement};
use crate::op::{BulkCopy, Data, MbarrierOp, MmaType, Op, TensorCopy, Wgmma};

/// Decodes `mbarrier`, `wgmma` or `setmaxnreg`.
pub(super) fn decode<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    match st.name {
        "mbarrier" => mbarrier(body, st),
        "wgmma" => wgmma(body, st),
        _ => {
            // How many registers a thread may use is of no weight here.
            if !(st.take("sync") && st.take("aligned") && st.take("u32")) || !(st.take("inc") || st.take("dec")) {
                return Err(unknown(body, &st));
            }
            done(body, &st, 1)?;
            body.emit(Op::WarpgroupNop);
            Ok(())
        }
    }
}

fn mbarrier<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    let b64 = st.modifiers.iter().position(|m| *m == "b64").map(|at| st.modifiers.remove(at)).is_some();
    let shared = st.take("shared::cta") || st.take("shared");
    let tests = st.take("try_wait") || st.take("test_wait");
    if !shared || !(b64 || tests) {
        return Err(unknown(body, &st));
    }
    let op = if tests && st.take("parity") {
        done(body, &st, 3)?;
        let p = body.predicate_destination(&st.operands[0])?;
        let (address, parity) = (body.address(&st.operands[1])?, body.word(&st.operands[2])?);
        MbarrierOp { init: false, test: Some(p), address, operand: Some(parity) }
    } else if st.take("init") {
        done(body, &st, 2)?;
        let (address, count) = (body.address(&st.operands[0])?, body.word(&st.operands[1])?);
        MbarrierOp { init: true, test: None, address, operand: Some(count) }
    } else if st.take("arrive") {
        let bytes = st.take("expect_tx");
        done(body, &st, if bytes { 3 } else { 2 })?;
        let address = body.address(&st.operands[1])?;
        let operand = if bytes { Some(body.word(&st.operands[2])?) } else { None };
        MbarrierOp { init: false, test: None, address, operand }
    } else {
        return Err(unknown(body, &st));
    };
    body.emit(Op::Mbarrier(Box::new(op)));
    Ok(())
}

/// `cp.async.bulk`, its modifiers up to `bulk` taken.
pub(super) fn bulk<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    // Stores read shared memory when they are issued; hints do nothing.
    if st.take("commit_group") {
        done(body, &st, 0)?;
        body.emit(Op::Nop);
        return Ok(());
    }
    if st.take("wait_group") {
        st.take("read");
        done(body, &st, 1)?;
        body.emit(Op::Nop);
        return Ok(());
    }
    if st.take("prefetch") {
        body.emit(Op::Nop);
        return Ok(());
    }
    let tensor = st.take("tensor");
    let rank = st.take_one_of(&["1d", "2d", "3d", "4d"]).map_or(0, |rank| rank.as_bytes()[0] as usize - b'0' as usize);
    let load = st.modifiers[..] == ["shared::cluster", "global", "mbarrier::complete_tx::bytes"];
    let store = st.modifiers[..] == ["global", "shared::cta", "bulk_group"];
    if !load && !store || !tensor && store {
        return Err(unknown(body, &st));
    }
    st.modifiers.clear();
    if !tensor {
        done(body, &st, 4)?;
        let (shared, global) = (body.address(&st.operands[0])?, body.address(&st.operands[1])?);
        let (bytes, mbarrier) = (body.word(&st.operands[2])?, body.address(&st.operands[3])?);
        body.emit(Op::BulkCopy(Box::new(BulkCopy { shared, global, bytes, mbarrier })));
        return Ok(());
    }
    done(body, &st, if load { 3 } else { 2 })?;
    let (shared, tensor) = if load { (0, 1) } else { (1, 0) };
    let Operand::Tensor { base, ref coordinates } = st.operands[tensor] else {
        return Err(body.error("expected a tensor map and coordinates"));
    };
    let map = body.address(&Operand::Address { base, offset: 0 })?;
    let coordinates = coordinates.iter().map(|c| body.word(c)).collect::<Result<Vec<_>, _>>()?;
    if coordinates.len() != rank {
        return Err(body.error(format!("expected {rank} coordinates, found {}", coordinates.len())));
    }
    let shared = body.address(&st.operands[shared])?;
    let mbarrier = if load { Some(body.address(&st.operands[2])?) } else { None };
    body.emit(Op::TensorCopy(Box::new(TensorCopy { shared, map, coordinates, mbarrier })));
    Ok(())
}

fn wgmma<'a>(body: &mut Body<'a, '_>, mut st: Statement<'a>) -> Result<(), Error> {
    if !(st.take("sync") && st.take("aligned")) {
        return Err(unknown(body, &st));
    }
    if st.take("fence") || st.take("commit_group") {
        done(body, &st, 0)?;
        body.emit(Op::WarpgroupNop);
        return Ok(());
    }
    if st.take("wait_group") {
        done(body, &st, 1)?;
        body.emit(Op::WarpgroupWait);
        return Ok(());
    }
    if !st.take("mma_async") {
        return Err(unknown(body, &st));
    }
    let operand_type = match st.modifiers[..] {
        [_, "f32", "f16", "f16"] => MmaType::F16,
        [_, "f32", "bf16", "bf16"] => MmaType::Bf16,
        _ => return Err(unknown(body, &st)),
    };
    let n = st.modifiers[0].strip_prefix("m64n").and_then(|rest| rest.strip_suffix("k16")).and_then(|n| n.parse().ok());
    st.modifiers.clear();
    done(body, &st, 8)?;
    let Operand::List(list) = &st.operands[0] else { return Err(body.error("expected a list of accumulators")) };
    if n != Some(2 * list.len()) {
        return Err(body.error(format!("{} accumulators do not fit the shape", list.len())));
    }
    let list = list.clone();
    let d = list.iter().map(|operand| body.word_destination(operand)).collect::<Result<Vec<_>, _>>()?;
    let a = Data::Long(body.long(&st.operands[1])?);
    let b = body.long(&st.operands[2])?;
    let accumulate = body.predicate(&st.operands[3])?;
    let mut flags = [0; 4];
    for (flag, operand) in flags.iter_mut().zip(&st.operands[4..]) {
        let Operand::Name { text, prefixed: false } = *operand else { return Err(body.error("expected a literal")) };
        *flag = crate::body::integer(text).ok_or_else(|| body.error("expected a literal"))?;
    }
    let [1, 1, a_mn @ (0 | 1), b_mn @ (0 | 1)] = flags else { return Err(body.error("scales other than 1")) };
    let (a_mn_major, b_mn_major) = (a_mn == 1, b_mn == 1);
    body.emit(Op::Wgmma(Box::new(Wgmma { operand_type, d, a, b, accumulate, a_mn_major, b_mn_major })));
    Ok(())
}
