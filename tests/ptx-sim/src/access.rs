//! Loads, stores, atomics and asynchronous copies of a warp.
//!
//! A `cp.async` is checked when it is issued and lands when its thread waits for its group: until then its destination may not be
//! touched. Groups are counted by thread, as on a GPU.

use std::sync::atomic::{Ordering, fence};

use crate::error::{Cause, LaneFault, Space};
use crate::module::CONSTANT_BASE;
use crate::op::{Access, Address, AsyncCopy, Atomic, AtomicOp, Data, Longs, Words};
use crate::shared::{COLLECTIVE, Who};
use crate::space::{PARAM_WINDOW, SHARED_WINDOW, WINDOW_BYTES};
use crate::warp::{Environment, Warp};

/// A copy that has not landed.
pub(crate) struct Copy {
    lane: u32,
    /// Number of groups that its thread had committed when it was issued.
    group: u32,
    destination: u64,
    source: u64,
    bytes: u32,
    source_bytes: u32,
}

fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| mask >> lane & 1 == 1)
}

/// The space of a generic address, and the address in it.
#[inline]
fn resolve(space: Space, address: u64) -> (Space, u64) {
    match space {
        Space::Generic if address.wrapping_sub(SHARED_WINDOW) < WINDOW_BYTES => {
            (Space::Shared, address - SHARED_WINDOW)
        }
        Space::Generic if address.wrapping_sub(PARAM_WINDOW) < WINDOW_BYTES => (Space::Param, address - PARAM_WINDOW),
        Space::Generic => (Space::Global, address),
        space => (space, address),
    }
}

/// Reads from bytes that never change.
fn read_bytes(from: &[u8], space: Space, base: u64, address: u64, bytes: u32, out: &mut [u32; 4]) -> Result<(), Cause> {
    if !address.is_multiple_of(bytes as u64) {
        return Err(Cause::Misaligned { space, address, alignment: bytes });
    }
    let start = address.wrapping_sub(base) as usize;
    let end = start.saturating_add(bytes as usize);
    let range = from.get(start..end).ok_or(Cause::OutOfBounds { space, address, bytes })?;
    *out = [0; 4];
    for (i, byte) in range.iter().enumerate() {
        out[i / 4] |= (*byte as u32) << (8 * (i % 4));
    }
    Ok(())
}

fn read(
    env: &mut Environment,
    who: Who,
    space: Space,
    address: u64,
    bytes: u32,
    out: &mut [u32; 4],
) -> Result<(), Cause> {
    match resolve(space, address) {
        (Space::Shared, address) => {
            if who.strong {
                env.shared.acquire(who.warp, address);
            }
            env.shared.read(who, address, bytes, out)
        }
        (Space::Param, address) => read_bytes(env.params, Space::Param, 0, address, bytes, out),
        (_, address) if address.wrapping_sub(CONSTANT_BASE) < env.constants.len() as u64 => {
            read_bytes(env.constants, Space::Global, CONSTANT_BASE, address, bytes, out)
        }
        (_, address) => {
            env.stats.global_read_bytes += bytes as u64;
            env.memory.read(address, bytes, out)
        }
    }
}

fn write(
    env: &mut Environment,
    who: Who,
    space: Space,
    address: u64,
    bytes: u32,
    values: &[u32; 4],
) -> Result<(), Cause> {
    match resolve(space, address) {
        (Space::Shared, address) => {
            env.shared.write(who, address, bytes, values)?;
            if who.strong {
                env.shared.release(who.warp, address);
            }
            Ok(())
        }
        (Space::Param, address) => Err(Cause::ReadOnly { space: Space::Param, address }),
        (_, address) if address.wrapping_sub(CONSTANT_BASE) < env.constants.len() as u64 => {
            Err(Cause::ReadOnly { space: Space::Global, address })
        }
        (_, address) => {
            env.stats.global_write_bytes += bytes as u64;
            env.memory.write(address, bytes, values)
        }
    }
}

impl Environment<'_> {
    /// 16 bytes at a generic address that is not in shared memory.
    pub(crate) fn read_generic(&mut self, address: u64) -> Result<[u32; 4], Cause> {
        let mut out = [0; 4];
        let who = Who { warp: 0, lane: 0, strong: false, asynchronous: false };
        read(self, who, Space::Generic, address, 16, &mut out)?;
        Ok(out)
    }

    /// The first `bytes` (an even number, at most 16) at an address of global memory, zeros after them.
    pub(crate) fn read_part(&mut self, address: u64, bytes: u32) -> Result<[u32; 4], Cause> {
        let mut out = [0; 4];
        self.stats.global_read_bytes += u64::from(bytes);
        if bytes == 16 {
            self.memory.read(address, 16, &mut out)?;
            return Ok(out);
        }
        for half in 0..bytes / 2 {
            let mut word = [0; 4];
            self.memory.read(address + 2 * u64::from(half), 2, &mut word)?;
            out[half as usize / 2] |= word[0] << (16 * (half % 2));
        }
        Ok(out)
    }

    /// The first `bytes` (an even number, at most 16) of four words to global memory.
    pub(crate) fn write_part(&mut self, address: u64, bytes: u32, words: &[u32; 4]) -> Result<(), Cause> {
        self.stats.global_write_bytes += u64::from(bytes);
        if bytes == 16 {
            return self.memory.write(address, 16, words);
        }
        for half in 0..bytes / 2 {
            let value = words[half as usize / 2] >> (16 * (half % 2)) & 0xffff;
            self.memory.write(address + 2 * u64::from(half), 2, &[value, 0, 0, 0])?;
        }
        Ok(())
    }
}

impl Atomic {
    /// The new value.
    fn apply(&self, old: u64, operand: u64, swap: u64) -> u64 {
        let signed = |x: u64| if self.bytes == 4 { x as i32 as i64 } else { x as i64 };
        let (f, d) = (|x: u64| f32::from_bits(x as u32), f64::from_bits);
        match self.op {
            AtomicOp::AddInt => old.wrapping_add(operand),
            AtomicOp::AddF32 => (f(old) + f(operand)).to_bits() as u64,
            AtomicOp::AddF64 => (d(old) + d(operand)).to_bits(),
            AtomicOp::MinUnsigned => old.min(operand),
            AtomicOp::MaxUnsigned => old.max(operand),
            AtomicOp::MinSigned => {
                if signed(old) < signed(operand) {
                    old
                } else {
                    operand
                }
            }
            AtomicOp::MaxSigned => {
                if signed(old) > signed(operand) {
                    old
                } else {
                    operand
                }
            }
            AtomicOp::And => old & operand,
            AtomicOp::Or => old | operand,
            AtomicOp::Xor => old ^ operand,
            AtomicOp::Increment => {
                if old >= operand {
                    0
                } else {
                    old + 1
                }
            }
            AtomicOp::Decrement => {
                if old == 0 || old > operand {
                    operand
                } else {
                    old - 1
                }
            }
            AtomicOp::Exchange => operand,
            AtomicOp::CompareSwap => {
                if old == operand {
                    swap
                } else {
                    old
                }
            }
        }
    }
}

impl Warp {
    pub(crate) fn who(&self, lane: usize, strong: bool) -> Who {
        Who { warp: self.index, lane: lane as u32, strong, asynchronous: false }
    }

    /// The warp's asynchronous operations.
    pub(crate) fn who_asynchronous(&self) -> Who {
        Who { warp: self.index, lane: COLLECTIVE, strong: false, asynchronous: true }
    }

    #[inline]
    pub(crate) fn addresses(&self, address: &Address) -> Longs {
        let offset = address.offset as u64;
        match address.base {
            Data::Word(register) => self.words[register as usize].map(|base| (base as u64).wrapping_add(offset)),
            Data::Long(register) => self.longs[register as usize].map(|base| base.wrapping_add(offset)),
        }
    }

    pub(crate) fn load(&mut self, env: &mut Environment, access: &Access, mask: u32) -> Result<(), LaneFault> {
        let addresses = self.addresses(&access.address);
        let element = access.element;
        let bytes = element.bytes * access.registers.len() as u32;
        let mut values = [[0; 4]; 32];
        for lane in lanes(mask) {
            if access.read_only {
                env.memory.read_only(addresses[lane], bytes).map_err(|cause| cause.on(lane))?;
            }
            read(env, self.who(lane, access.strong), access.space, addresses[lane], bytes, &mut values[lane])
                .map_err(|cause| cause.on(lane))?;
        }
        if access.strong {
            fence(Ordering::Acquire);
        }
        for (i, &(register, width)) in access.registers.iter().enumerate() {
            match (register, element.bytes) {
                (Data::Word(register), 4) => {
                    let column: Words = std::array::from_fn(|lane| values[lane][i]);
                    self.put_word(register, &column, mask);
                }
                (_, 8) => {
                    let column =
                        std::array::from_fn(|lane| values[lane][2 * i] as u64 | (values[lane][2 * i + 1] as u64) << 32);
                    self.put_data(register, &column, mask);
                }
                _ => {
                    let bit = 8 * element.bytes as usize * i;
                    let shift = 64 - 8 * element.bytes;
                    let column = std::array::from_fn(|lane| {
                        let top = ((values[lane][bit / 32] >> (bit % 32)) as u64) << shift;
                        let value = if element.signed { (top as i64 >> shift) as u64 } else { top >> shift };
                        value & (u64::MAX >> (64 - width))
                    });
                    self.put_data(register, &column, mask);
                }
            }
        }
        Ok(())
    }

    pub(crate) fn store(&mut self, env: &mut Environment, access: &Access, mask: u32) -> Result<(), LaneFault> {
        let addresses = self.addresses(&access.address);
        let element = access.element;
        let bytes = element.bytes * access.registers.len() as u32;
        let mut values = [[0u32; 4]; 32];
        for (i, &(register, _)) in access.registers.iter().enumerate() {
            match (register, element.bytes) {
                (Data::Word(register), 4) => {
                    let column = &self.words[register as usize];
                    (0..32).for_each(|lane| values[lane][i] = column[lane]);
                }
                (_, 8) => {
                    let column = self.data(register);
                    for lane in 0..32 {
                        values[lane][2 * i] = column[lane] as u32;
                        values[lane][2 * i + 1] = (column[lane] >> 32) as u32;
                    }
                }
                _ => {
                    let column = self.data(register);
                    let bit = 8 * element.bytes as usize * i;
                    let keep = u32::MAX >> (32 - 8 * element.bytes);
                    (0..32).for_each(|lane| values[lane][bit / 32] |= (column[lane] as u32 & keep) << (bit % 32));
                }
            }
        }
        if access.strong {
            fence(Ordering::Release);
        }
        for lane in lanes(mask) {
            write(env, self.who(lane, access.strong), access.space, addresses[lane], bytes, &values[lane])
                .map_err(|cause| cause.on(lane))?;
        }
        Ok(())
    }

    pub(crate) fn atomic(&mut self, env: &mut Environment, op: &Atomic, mask: u32) -> Result<(), LaneFault> {
        let addresses = self.addresses(&op.address);
        let operand = self.data(op.operand);
        let swap = op.swap.map_or([0; 32], |swap| self.data(swap));
        let mut old = [0; 32];
        fence(Ordering::SeqCst);
        for lane in lanes(mask) {
            let update = |old| op.apply(old, operand[lane], swap[lane]);
            old[lane] = match resolve(op.space, addresses[lane]) {
                (Space::Shared, address) => {
                    let mut words = [0; 4];
                    read(env, self.who(lane, true), Space::Shared, address, op.bytes, &mut words)
                        .map_err(|c| c.on(lane))?;
                    let old = words[0] as u64 | if op.bytes == 8 { (words[1] as u64) << 32 } else { 0 };
                    let new = update(old);
                    let words = [new as u32, (new >> 32) as u32, 0, 0];
                    write(env, self.who(lane, true), Space::Shared, address, op.bytes, &words)
                        .map_err(|c| c.on(lane))?;
                    old
                }
                (Space::Global, address) => {
                    env.stats.global_write_bytes += op.bytes as u64;
                    env.memory.update(address, op.bytes, update).map_err(|cause| cause.on(lane))?
                }
                (space, address) => return Err(Cause::ReadOnly { space, address }.on(lane)),
            };
        }
        fence(Ordering::SeqCst);
        if let Some(destination) = op.destination {
            self.put_data(destination, &old, mask);
        }
        Ok(())
    }

    pub(crate) fn copy(&mut self, env: &mut Environment, op: &AsyncCopy, mask: u32) -> Result<(), LaneFault> {
        let (destinations, sources) = (self.addresses(&op.destination), self.addresses(&op.source));
        for lane in lanes(mask) {
            let given = op.source_bytes.map_or(op.bytes, |register| self.words[register as usize][lane]);
            if given > op.bytes {
                return Err(Cause::CollectiveOperand { operand: 3, rule: "at most the bytes of the copy" }.on(lane));
            }
            let (destination, source) = (destinations[lane], sources[lane]);
            let mut check = || {
                env.shared.begin_copy(self.who(lane, false), destination, op.bytes)?;
                if given == 0 {
                    return Ok(());
                }
                if !source.is_multiple_of(op.bytes as u64) {
                    return Err(Cause::Misaligned { space: Space::Global, address: source, alignment: op.bytes });
                }
                source_words(env, source, given).map(|_| ())
            };
            check().map_err(|cause| cause.on(lane))?;
            env.stats.global_read_bytes += given as u64;
            let group = self.commits[lane];
            let (bytes, lane) = (op.bytes, lane as u32);
            self.copies.push(Copy { lane, group, destination, source, bytes, source_bytes: given });
        }
        Ok(())
    }

    pub(crate) fn commit(&mut self, mask: u32) {
        lanes(mask).for_each(|lane| self.commits[lane] += 1);
    }

    /// The copies of the lanes of `mask` land, but for their `pending` newest groups.
    pub(crate) fn wait(&mut self, env: &mut Environment, pending: u32, mask: u32) -> Result<(), LaneFault> {
        let mut fault = None;
        let (commits, warp) = (self.commits, self.index);
        self.copies.retain(|copy| {
            let lane = copy.lane as usize;
            let committed = commits[lane];
            if mask >> lane & 1 == 0 || copy.group >= committed || copy.group + pending >= committed {
                return true;
            }
            let landed = source_words(env, copy.source, copy.source_bytes).and_then(|words| {
                env.shared.land_copy(
                    Who { warp, lane: copy.lane, strong: false, asynchronous: false },
                    copy.destination,
                    copy.bytes,
                    &words,
                )
            });
            if let Err(cause) = landed {
                fault = fault.or(Some(cause.on(lane)));
            }
            false
        });
        fault.map_or(Ok(()), Err)
    }
}

/// The first `bytes` bytes at a global address that is aligned for more, zeros after them.
fn source_words(env: &Environment, source: u64, bytes: u32) -> Result<[u32; 4], Cause> {
    let mut words = [0; 4];
    if matches!(bytes, 4 | 8 | 16) {
        env.memory.read(source, bytes, &mut words)?;
        return Ok(words);
    }
    for i in 0..bytes {
        let mut byte = [0; 4];
        env.memory.read(source + i as u64, 1, &mut byte)?;
        words[i as usize / 4] |= byte[0] << (8 * (i % 4));
    }
    Ok(words)
}
