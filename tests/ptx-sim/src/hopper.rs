//! What sm_90a adds: `mbarrier`, bulk copies and TMA, `wgmma`.
//!
//! A bulk copy takes place at once, on account of the thread that issues it, and its bytes then complete on the mbarrier: whoever touches them
//! without having waited is unordered with that thread, which is a race. A `wgmma` is executed at once, too, by each warp for its own 16
//! rows; the wait for it is a barrier of the warpgroup. That an accumulator is touched before the wait is not seen. Nor is the order between proxies (`fence.proxy`).
use crate::error::{Cause, LaneFault, Space};
use crate::number::{Bf16, F16, Narrow};
use crate::op::{BulkCopy, Data, FULL, MbarrierOp, MmaType, TensorCopy, Wgmma};
use crate::shared::{COLLECTIVE, Who};
use crate::tensor_map::{TensorMap, swizzle};
use crate::warp::{Environment, Warp};

fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| mask >> lane & 1 == 1)
}

impl Warp {
    /// Init, arrive, or (returning the mask of lanes whose phase has completed) test.
    pub(crate) fn mbarrier(&mut self, env: &mut Environment, op: &MbarrierOp, mask: u32) -> Result<u32, LaneFault> {
        let addresses = self.addresses(&op.address);
        let operand = op.operand.map_or([0; 32], |register| self.words[register as usize]);
        let mut completed = 0;
        for lane in lanes(mask) {
            let (address, operand) = (addresses[lane], operand[lane]);
            let result = if !address.is_multiple_of(8) {
                Err(Cause::Misaligned { space: Space::Shared, address, alignment: 8 })
            } else if op.test.is_some() {
                env.shared.mbarriers.test(address, operand).map(|known| {
                    if let Some(known) = known {
                        env.shared.learn(self.index, &known);
                        completed |= 1 << lane;
                    }
                })
            } else if op.init {
                env.shared.mbarriers.init(address, operand)
            } else {
                let clocks = env.shared.publish(self.index);
                env.shared.mbarriers.arrive(address, operand, &clocks)
            };
            result.map_err(|cause| cause.on(lane))?;
        }
        Ok(completed)
    }

    /// The tensor map at a generic address.
    fn tensor_map(env: &mut Environment, address: u64) -> Result<TensorMap, Cause> {
        if !address.is_multiple_of(64) {
            return Err(Cause::Misaligned { space: Space::Generic, address, alignment: 64 });
        }
        let mut words = [0u64; 16];
        for (i, pair) in words.chunks_exact_mut(2).enumerate() {
            let v = env.read_generic(address + 16 * i as u64)?;
            pair[0] = u64::from(v[0]) | u64::from(v[1]) << 32;
            pair[1] = u64::from(v[2]) | u64::from(v[3]) << 32;
        }
        TensorMap::decode(&words).ok_or(Cause::TensorMap { address })
    }

    /// `cp.async.bulk.tensor`, either way.
    pub(crate) fn tensor_copy(&mut self, env: &mut Environment, op: &TensorCopy, mask: u32) -> Result<(), LaneFault> {
        let (shared, maps) = (self.addresses(&op.shared), self.addresses(&op.map));
        let barriers = op.mbarrier.as_ref().map(|barrier| self.addresses(barrier));
        for lane in lanes(mask) {
            let coordinates: Vec<i32> = op.coordinates.iter().map(|c| self.words[*c as usize][lane] as i32).collect();
            let mut copy = || -> Result<(), Cause> {
                let map = Self::tensor_map(env, maps[lane])?;
                if map.dims.len() != coordinates.len() {
                    return Err(Cause::TensorMap { address: maps[lane] });
                }
                if !shared[lane].is_multiple_of(1024) {
                    return Err(Cause::Misaligned { space: Space::Shared, address: shared[lane], alignment: 1024 });
                }
                let who = Who { warp: self.index, lane: COLLECTIVE, strong: false };
                for (offset, address, valid) in map.pieces(&coordinates) {
                    let at = swizzle(shared[lane] + u64::from(offset));
                    let mut words = [0; 4];
                    if barriers.is_some() {
                        for (i, word) in words.iter_mut().enumerate().take(valid as usize / 4) {
                            *word = env.read_global_word(address + 4 * i as u64)?;
                        }
                        if valid % 4 != 0 {
                            let last = address + u64::from(valid / 4 * 4);
                            words[valid as usize / 4] = env.read_global_half(last)?;
                        }
                        env.shared.write(who, at, 16, &words)?;
                    } else if valid > 0 {
                        env.shared.read(who, at, 16, &mut words)?;
                        env.write_global(address, valid, &words)?;
                    }
                }
                if let Some(barriers) = &barriers {
                    let clocks = env.shared.publish(self.index);
                    env.shared.mbarriers.complete_bytes(barriers[lane], map.box_bytes(), &clocks)?;
                }
                Ok(())
            };
            copy().map_err(|cause| cause.on(lane))?;
        }
        Ok(())
    }

    /// `cp.async.bulk` from global to shared memory.
    pub(crate) fn bulk_copy(&mut self, env: &mut Environment, op: &BulkCopy, mask: u32) -> Result<(), LaneFault> {
        let (shared, global, barriers) =
            (self.addresses(&op.shared), self.addresses(&op.global), self.addresses(&op.mbarrier));
        for lane in lanes(mask) {
            let bytes = self.words[op.bytes as usize][lane];
            let mut copy = || -> Result<(), Cause> {
                if bytes % 16 != 0 || bytes == 0 {
                    return Err(Cause::CollectiveOperand { operand: 2, rule: "a multiple of 16 bytes" });
                }
                for offset in (0..u64::from(bytes)).step_by(16) {
                    let words = env.read_generic(global[lane] + offset)?;
                    let who = Who { warp: self.index, lane: COLLECTIVE, strong: false };
                    env.shared.write(who, shared[lane] + offset, 16, &words)?;
                }
                let clocks = env.shared.publish(self.index);
                env.shared.mbarriers.complete_bytes(barriers[lane], bytes, &clocks)
            };
            copy().map_err(|cause| cause.on(lane))?;
        }
        Ok(())
    }

    /// This warp's rows of a `wgmma`.
    pub(crate) fn wgmma(&mut self, env: &mut Environment, op: &Wgmma, accumulates: u32) -> Result<(), LaneFault> {
        match op.operand_type {
            MmaType::F16 => self.wgmma_of::<F16>(env, op, accumulates),
            MmaType::Bf16 => self.wgmma_of::<Bf16>(env, op, accumulates),
        }
    }

    fn wgmma_of<N: Narrow>(&mut self, env: &mut Environment, op: &Wgmma, accumulates: u32) -> Result<(), LaneFault> {
        let n = 2 * op.d.len();
        let first_row = 16 * (self.index as u32 % 4);
        if accumulates != 0 && accumulates != FULL {
            return Err(Cause::CollectiveOperand { operand: 3, rule: "the same in all lanes" }.into());
        }
        let a = match op.a {
            Data::Long(register) => {
                let descriptor = self.uniform_long(register, 1)?;
                self.operand::<N>(env, descriptor, op.a_mn_major, first_row, 16)?
            }
            Data::Word(_) => return Err(Cause::CollectiveOperand { operand: 1, rule: "a descriptor" }.into()),
        };
        let descriptor = self.uniform_long(op.b, 2)?;
        let b = self.operand::<N>(env, descriptor, op.b_mn_major, 0, n as u32)?;
        for (i, &register) in op.d.iter().enumerate() {
            let old = self.words[register as usize];
            let values = std::array::from_fn(|lane| {
                // C fragments of 16 x 8, one after the other along n.
                let row = lane / 4 + 8 * (i >> 1 & 1);
                let column = 8 * (i / 4) + 2 * (lane % 4) + (i & 1);
                let product: f64 = a[row].iter().zip(&b[column]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                let old = if accumulates == FULL { f64::from(f32::from_bits(old[lane])) } else { 0.0 };
                ((product + old) as f32).to_bits()
            });
            self.put_word(register, &values, FULL);
        }
        Ok(())
    }

    /// `count` rows (of m or n) from `first` on, 16 k each, of the operand that a descriptor names: the 128-byte swizzle only.
    fn operand<N: Narrow>(
        &self,
        env: &mut Environment,
        descriptor: u64,
        mn_major: bool,
        first: u32,
        count: u32,
    ) -> Result<Vec<[f32; 16]>, LaneFault> {
        let field = |bit: u32| u64::from((descriptor >> bit) as u32 & 0x3fff) << 4;
        let (start, leading, stride) = (field(0), field(16), field(32));
        if descriptor >> 62 != 1 {
            return Err(Cause::CollectiveOperand { operand: 1, rule: "a descriptor with the 128-byte swizzle" }.into());
        }
        let mut rows = vec![[0f32; 16]; count as usize];
        let who = self.who(COLLECTIVE as usize, false);
        let mut piece = |linear: u64| -> Result<[f32; 8], Cause> {
            let mut words = [0; 4];
            env.shared.read(who, swizzle(linear), 16, &mut words)?;
            Ok(std::array::from_fn(|e| N::widen((words[e / 2] >> (16 * (e % 2))) as u16)))
        };
        for mn in (0..count).step_by(if mn_major { 8 } else { 1 }) {
            let at = u64::from(first + mn);
            if mn_major {
                for k in 0..16u64 {
                    let values = piece(start + at / 64 * leading + k / 8 * stride + k % 8 * 128 + at % 64 * 2)?;
                    for (e, value) in values.into_iter().enumerate() {
                        rows[mn as usize + e][k as usize] = value;
                    }
                }
            } else {
                for half in 0..2u64 {
                    let values = piece(start + at / 8 * stride + at % 8 * 128 + 16 * half)?;
                    rows[mn as usize][8 * half as usize..8 * half as usize + 8].copy_from_slice(&values);
                }
            }
        }
        Ok(rows)
    }
}
