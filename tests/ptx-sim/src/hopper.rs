//! What Hopper adds: mbarriers, bulk copies, wgmma.
//!
//! Each asynchronous operation happens at the time that leaves the least to chance: a bulk load writes shared memory and completes its
//! bytes when it is issued, so that whoever still reads the buffer is caught; a bulk store (or addition) reads shared memory and
//! a wgmma reads its operands and writes its accumulators at the wait for their group, so that whoever writes them before is.
//! Not modelled: proxies of global memory, `wgmma.fence`, the registers of `setmaxnreg`; each warp of a warpgroup multiplies by itself, but all have finished when one goes on.

use std::collections::HashMap;

use crate::error::{Cause, LaneFault, Space};
use crate::number::{Bf16, F16, Narrow};
use crate::op::{Address, FULL, MmaType, Predicate, Reg};
use crate::shared::{Clocks, NOTHING, Who, in_block};
use crate::tensor_map::{TensorMap, swizzle_128b};
use crate::warp::{Environment, Warp};

/// The barrier of the first warpgroup: its warps meet at every wait for wgmmas, which are the warpgroup's together.
pub(crate) const WARPGROUP_BARRIER: u32 = 16;

/// An instruction of Hopper's.
#[derive(Clone, Debug)]
pub(crate) enum Hopper {
    /// `mbarrier.init`.
    Init { barrier: Address, count: Reg },
    /// `mbarrier.arrive`, with `.expect_tx` if there are bytes.
    Arrive { barrier: Address, bytes: Option<Reg> },
    /// `mbarrier.try_wait.parity`.
    Test { d: Reg, barrier: Address, parity: Reg },
    /// `cp.async.bulk` from global to shared memory.
    BulkLoad { destination: Address, source: Address, bytes: Reg, barrier: Address },
    /// `cp.async.bulk` from shared to global memory or, if it adds, `cp.reduce.async.bulk.add.f32`.
    BulkStore { adds: bool, destination: Address, source: Address, bytes: Reg },
    /// `cp.async.bulk.tensor` from global to shared memory: the block's own, or that of the blocks of a mask.
    TensorLoad { destination: Address, map: Address, coordinates: Vec<Reg>, barrier: Address, blocks: Option<Reg> },
    /// `cp.async.bulk.tensor` from shared to global memory.
    TensorStore { map: Address, coordinates: Vec<Reg>, source: Address },
    /// `cp.async.bulk.commit_group`.
    BulkCommit,
    /// `cp.async.bulk.wait_group`, reads or all.
    BulkWait { pending: u32 },
    /// `wgmma.mma_async`.
    Wgmma(Wgmma),
    /// `wgmma.commit_group`.
    WgmmaCommit,
    /// `wgmma.wait_group`.
    WgmmaWait { pending: u32 },
}

/// Left operand of a wgmma.
#[derive(Clone, Debug)]
pub(crate) enum Left {
    /// A descriptor, and whether it is MN-major.
    Shared(Reg, bool),
    Registers([Reg; 4]),
}

/// `wgmma.mma_async.m64nNk16.f32` of 16-bit operands.
#[derive(Clone, Debug)]
pub(crate) struct Wgmma {
    pub operand_type: MmaType,
    /// N / 2 accumulators.
    pub d: Vec<Reg>,
    pub a: Left,
    /// A descriptor, and whether it is MN-major.
    pub b: (Reg, bool),
    /// Whether the product is added to `d`; absent: it is.
    pub accumulate: Option<Predicate>,
}

/// A wgmma that was issued: its group, and the descriptors' and the predicate's values.
pub(crate) struct IssuedWgmma {
    group: u32,
    wgmma: Wgmma,
    a: u64,
    b: u64,
    accumulate: bool,
}

/// A bulk store or addition that was issued: pieces of up to 16 bytes.
pub(crate) struct IssuedStore {
    lane: usize,
    /// Number of groups that its thread had committed when it was issued.
    group: u32,
    adds: bool,
    /// Shared address, global address, bytes.
    pieces: Vec<(u64, u64, u32)>,
}

/// An mbarrier.
struct Mbarrier {
    count: u32,
    pending: u32,
    bytes: i64,
    parity: u32,
    /// What those who arrived in this phase, and in those before, knew.
    gathered: Clocks,
    /// The same of the last complete phase.
    known: Clocks,
}

/// A cluster's mbarriers, by address.
#[derive(Default)]
pub(crate) struct Mbarriers(HashMap<u64, Mbarrier>);

impl Mbarriers {
    fn get(&mut self, address: u64) -> Result<&mut Mbarrier, Cause> {
        self.0.get_mut(&address).ok_or(Cause::Mbarrier { address, rule: "initialised before it is used" })
    }
}

impl Mbarrier {
    fn arrive(&mut self, clocks: &Clocks, arrivals: u32, bytes: i64) {
        self.gathered.iter_mut().zip(clocks).for_each(|(a, b)| *a = (*a).max(*b));
        self.bytes += bytes;
        self.pending -= arrivals;
        if self.pending == 0 && self.bytes == 0 {
            self.parity ^= 1;
            self.pending = self.count;
            self.known = self.gathered;
        }
    }
}

impl Warp {
    /// Executes an instruction of Hopper's. False: it waits for others.
    pub(crate) fn hopper(&mut self, env: &mut Environment, op: &Hopper, mask: u32) -> Result<bool, LaneFault> {
        let lanes = (0..32usize).filter(|lane| mask >> lane & 1 == 1);
        match op {
            Hopper::Init { barrier, count } => {
                let (barriers, counts) = (self.addresses(barrier), self.words[*count as usize]);
                for lane in lanes {
                    let count = counts[lane];
                    let none = NOTHING;
                    let new = Mbarrier { count, pending: count, bytes: 0, parity: 0, gathered: none, known: none };
                    env.shared.mbarriers.0.insert(barriers[lane], new);
                }
            }
            Hopper::Arrive { barrier, bytes } => {
                let barriers = self.addresses(barrier);
                let bytes = bytes.map_or([0; 32], |bytes| self.words[bytes as usize]);
                for lane in lanes {
                    let clocks = env.shared.publish(self.index);
                    let address = barriers[lane];
                    env.shared.check_running(address).map_err(|cause| cause.on(lane))?;
                    let barrier = env.shared.mbarriers.get(address).map_err(|cause| cause.on(lane))?;
                    if barrier.pending == 0 {
                        let rule = "arrived at no more often than it expects in a phase";
                        return Err(Cause::Mbarrier { address, rule }.on(lane));
                    }
                    barrier.arrive(&clocks, 1, i64::from(bytes[lane]));
                }
            }
            Hopper::Test { d, barrier, parity } => {
                let (barriers, parities) = (self.addresses(barrier), self.words[*parity as usize]);
                let mut complete = 0;
                for lane in lanes {
                    let barrier = env.shared.mbarriers.get(barriers[lane]).map_err(|cause| cause.on(lane))?;
                    if barrier.parity != parities[lane] & 1 {
                        complete |= 1 << lane;
                        let known = barrier.known;
                        env.shared.learn(self.index, &known);
                    }
                }
                self.put_predicate(*d, complete, mask);
                return Ok(complete == mask);
            }
            Hopper::BulkLoad { destination, source, bytes, barrier } => {
                let (to, from) = (self.addresses(destination), self.addresses(source));
                let (sizes, barriers) = (self.words[*bytes as usize], self.addresses(barrier));
                for lane in lanes {
                    self.bulk_load(env, to[lane], from[lane], sizes[lane]).map_err(|cause| cause.on(lane))?;
                    let clocks = env.shared.publish(self.index);
                    let barrier = env.shared.mbarriers.get(barriers[lane]).map_err(|cause| cause.on(lane))?;
                    barrier.arrive(&clocks, 0, -i64::from(sizes[lane]));
                }
            }
            Hopper::BulkStore { adds, destination, source, bytes } => {
                let (to, from) = (self.addresses(destination), self.addresses(source));
                let sizes = self.words[*bytes as usize];
                for lane in lanes {
                    let piece = |offset| (from[lane] + offset, to[lane] + offset, 16);
                    let pieces = (0..u64::from(sizes[lane])).step_by(16).map(piece).collect();
                    let group = self.store_groups[lane];
                    self.stores.push(IssuedStore { lane, group, adds: *adds, pieces });
                }
            }
            Hopper::TensorLoad { destination, map, coordinates, barrier, blocks } => {
                let (to, maps, barriers) = (self.addresses(destination), self.addresses(map), self.addresses(barrier));
                let blocks = blocks.map(|blocks| self.words[blocks as usize]);
                for lane in lanes {
                    let (bytes, pieces) = self
                        .tensor_pieces(env, maps[lane], to[lane], coordinates, lane)
                        .map_err(|cause| cause.on(lane))?;
                    let who = self.who_asynchronous();
                    let blocks: Vec<Option<u32>> = match blocks {
                        None => vec![None],
                        Some(mask) => (0..16).filter(|rank| mask[lane] >> rank & 1 == 1).map(Some).collect(),
                    };
                    // An address in each of the blocks.
                    let of = |address: u64, block: Option<u32>| {
                        block.map_or(address, |rank| u64::from(in_block(address as u32, rank)))
                    };
                    for (shared, global, valid) in pieces {
                        let words = env.read_part(global, valid).map_err(|cause| cause.on(lane))?;
                        for block in &blocks {
                            env.shared.write(who, of(shared, *block), 16, &words).map_err(|cause| cause.on(lane))?;
                        }
                    }
                    for block in blocks {
                        let clocks = env.shared.publish(self.index);
                        let barrier = env.shared.mbarriers.get(of(barriers[lane], block));
                        barrier.map_err(|cause| cause.on(lane))?.arrive(&clocks, 0, -i64::from(bytes));
                    }
                }
            }
            Hopper::TensorStore { map, coordinates, source } => {
                let (from, maps) = (self.addresses(source), self.addresses(map));
                for lane in lanes {
                    let (_, mut pieces) = self
                        .tensor_pieces(env, maps[lane], from[lane], coordinates, lane)
                        .map_err(|cause| cause.on(lane))?;
                    pieces.retain(|(_, _, valid)| *valid > 0);
                    let group = self.store_groups[lane];
                    self.stores.push(IssuedStore { lane, group, adds: false, pieces });
                }
            }
            Hopper::BulkCommit => lanes.for_each(|lane| self.store_groups[lane] += 1),
            Hopper::BulkWait { pending } => {
                let complete = |s: &IssuedStore| s.group + pending < self.store_groups[s.lane];
                let stores = std::mem::take(&mut self.stores).into_iter();
                let (now, later) = stores.partition(|s| mask >> s.lane & 1 == 1 && complete(s));
                self.stores = later;
                for store in now {
                    self.bulk_store(env, &store).map_err(|cause| cause.on(store.lane))?;
                }
            }
            Hopper::Wgmma(wgmma) => {
                let uniform = |register: Reg| -> Result<u64, LaneFault> {
                    let values = &self.longs[register as usize];
                    if values.iter().any(|value| *value != values[0]) {
                        return Err(Cause::CollectiveOperand { operand: 1, rule: "the same in all lanes" }.into());
                    }
                    Ok(values[0])
                };
                let a = match wgmma.a {
                    Left::Shared(register, _) => uniform(register)?,
                    Left::Registers(_) => 0,
                };
                let b = uniform(wgmma.b.0)?;
                let accumulate = match wgmma.accumulate.map_or(FULL, |p| self.predicate(p)) {
                    0 => false,
                    FULL => true,
                    _ => return Err(Cause::CollectiveOperand { operand: 3, rule: "the same in all lanes" }.into()),
                };
                let wgmma = wgmma.clone();
                self.wgmmas.push(IssuedWgmma { group: self.wgmma_groups, wgmma, a, b, accumulate });
            }
            Hopper::WgmmaCommit => self.wgmma_groups += 1,
            Hopper::WgmmaWait { pending } => {
                let complete = self.wgmma_groups.saturating_sub(*pending);
                let (now, later) = std::mem::take(&mut self.wgmmas).into_iter().partition(|w| w.group < complete);
                self.wgmmas = later;
                for issued in now {
                    self.wgmma(env, &issued)?;
                }
            }
        }
        Ok(true)
    }

    fn bulk_load(&self, env: &mut Environment, to: u64, from: u64, bytes: u32) -> Result<(), Cause> {
        for offset in (0..u64::from(bytes)).step_by(16) {
            let mut words = [0; 4];
            env.memory.read(from + offset, 16, &mut words)?;
            env.shared.write(self.who_asynchronous(), to + offset, 16, &words)?;
        }
        Ok(())
    }

    /// Bytes of the box at `coordinates` of a tensor, and its pieces: shared address, global address, bytes inside the tensor.
    #[allow(clippy::type_complexity)] // three numbers a piece
    fn tensor_pieces(
        &self,
        env: &mut Environment,
        map: u64,
        shared: u64,
        coordinates: &[Reg],
        lane: usize,
    ) -> Result<(u32, Vec<(u64, u64, u32)>), Cause> {
        if !map.is_multiple_of(64) {
            return Err(Cause::Misaligned { space: Space::Generic, address: map, alignment: 64 });
        }
        let mut words = [0u64; 16];
        for (i, pair) in words.chunks_exact_mut(2).enumerate() {
            let v = env.read_generic(map + 16 * i as u64)?;
            pair[0] = u64::from(v[0]) | u64::from(v[1]) << 32;
            pair[1] = u64::from(v[2]) | u64::from(v[3]) << 32;
        }
        let wrong = Cause::TensorMap { address: map };
        let tensor = TensorMap::decode(&words).filter(|tensor| tensor.dims.len() == coordinates.len()).ok_or(wrong)?;
        let alignment = if tensor.swizzled { 1024 } else { 128 };
        if !shared.is_multiple_of(alignment) {
            return Err(Cause::Misaligned { space: Space::Shared, address: shared, alignment: alignment as u32 });
        }
        let at: Vec<i32> = coordinates.iter().map(|register| self.words[*register as usize][lane] as i32).collect();
        let place = |offset: u32| {
            let linear = shared + u64::from(offset);
            if tensor.swizzled { swizzle_128b(linear) } else { linear }
        };
        let pieces = tensor.pieces(&at).into_iter().map(|(offset, address, valid)| (place(offset), address, valid));
        Ok((tensor.box_bytes(), pieces.collect()))
    }

    fn bulk_store(&self, env: &mut Environment, store: &IssuedStore) -> Result<(), Cause> {
        for &(shared, global, bytes) in &store.pieces {
            let mut words = [0; 4];
            env.shared.read(self.who_asynchronous(), shared, 16, &mut words)?;
            if store.adds {
                let mut old = [0; 4];
                env.memory.read(global, 16, &mut old)?;
                words = std::array::from_fn(|i| (f32::from_bits(words[i]) + f32::from_bits(old[i])).to_bits());
            }
            env.write_part(global, bytes, &words)?;
        }
        Ok(())
    }

    /// The warp's 16 rows of a wgmma.
    fn wgmma(&mut self, env: &mut Environment, issued: &IssuedWgmma) -> Result<(), LaneFault> {
        match issued.wgmma.operand_type {
            MmaType::F16 => self.wgmma_of::<F16>(env, issued),
            MmaType::Bf16 => self.wgmma_of::<Bf16>(env, issued),
        }
    }

    fn wgmma_of<N: Narrow>(&mut self, env: &mut Environment, issued: &IssuedWgmma) -> Result<(), LaneFault> {
        let IssuedWgmma { wgmma, a, b, accumulate, .. } = issued;
        let who = self.who_asynchronous();
        let first_row = 16 * (self.index as u32 % 4);
        let mut rows = [[0f64; 16]; 16];
        match wgmma.a {
            Left::Shared(_, mn_major) => {
                shared_operand::<N>(env, who, self.own_block, *a, mn_major, first_row, &mut rows)?;
            }
            Left::Registers(registers) => {
                for (i, register) in registers.into_iter().enumerate() {
                    for (lane, word) in self.words[register as usize].iter().enumerate() {
                        for e in 0..2 {
                            let (row, k) = (lane / 4 + 8 * (i & 1), 2 * (lane % 4) + 8 * (i >> 1) + e);
                            rows[row][k] = N::widen((word >> (16 * e)) as u16) as f64;
                        }
                    }
                }
            }
        }
        let columns = 2 * wgmma.d.len();
        let mut b_columns = vec![[0f64; 16]; columns];
        shared_operand::<N>(env, who, self.own_block, *b, wgmma.b.1, 0, &mut b_columns)?;
        // Sums in the order of k, all rows of a column at once.
        let a_columns: [[f64; 16]; 16] = std::array::from_fn(|k| rows.map(|row| row[k]));
        for column in &mut b_columns {
            let mut products = [0f64; 16];
            for (a, b) in a_columns.iter().zip(&*column) {
                products.iter_mut().zip(a).for_each(|(product, a)| *product += a * b);
            }
            *column = products;
        }
        for (i, &register) in wgmma.d.iter().enumerate() {
            let old = self.words[register as usize];
            let values = std::array::from_fn(|lane| {
                let row = lane / 4 + 8 * (i >> 1 & 1);
                let column = 8 * (i >> 2) + 2 * (lane % 4) + (i & 1);
                let product = b_columns[column][row];
                let start = if *accumulate { f32::from_bits(old[lane]) as f64 } else { 0.0 };
                ((start + product) as f32).to_bits()
            });
            self.put_word(register, &values, FULL);
        }
        Ok(())
    }
}

/// Rows `first..` of the 16-deep operand that a descriptor with the 128-byte swizzle names, 16 bytes at a time; descriptors hold the 18 low bits of
/// an address, `own_block` is the rest.
fn shared_operand<N: Narrow>(
    env: &mut Environment,
    who: Who,
    own_block: u64,
    descriptor: u64,
    mn_major: bool,
    first: u32,
    rows: &mut [[f64; 16]],
) -> Result<(), LaneFault> {
    let field = |bit: u64| ((descriptor >> bit) & 0x3fff) << 4;
    let (start, leading, stride) = (own_block + field(0), field(16), field(32));
    if descriptor >> 62 != 1 {
        return Err(Cause::CollectiveOperand { operand: 1, rule: "a descriptor with the 128-byte swizzle" }.into());
    }
    let mut eight = |linear: u64| -> Result<[f64; 8], LaneFault> {
        let mut words = [0; 4];
        env.shared.read(who, swizzle_128b(linear), 16, &mut words)?;
        Ok(std::array::from_fn(|i| N::widen((words[i / 2] >> (16 * (i % 2))) as u16) as f64))
    };
    if mn_major {
        for (group, rows) in rows.chunks_exact_mut(8).enumerate() {
            let mn = u64::from(first) + 8 * group as u64;
            for k in 0..16 {
                let linear = start + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2;
                rows.iter_mut().zip(eight(linear)?).for_each(|(row, value)| row[k as usize] = value);
            }
        }
    } else {
        for (mn, row) in (u64::from(first)..).zip(rows) {
            let linear = start + mn / 8 * stride + mn % 8 * 128;
            row[..8].copy_from_slice(&eight(linear)?);
            row[8..].copy_from_slice(&eight(linear + 16)?);
        }
    }
    Ok(())
}
