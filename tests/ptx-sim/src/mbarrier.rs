//! `mbarrier` objects of a block's shared memory, and the order that they make between warps.
use std::collections::HashMap;

use crate::error::Cause;
use crate::shared::{Clocks, MAX_WARPS};

/// One object.
#[derive(Clone, Copy)]
struct Mbarrier {
    /// Arrivals of a phase.
    count: u32,
    /// Arrivals that the phase still waits for.
    pending: u32,
    /// Bytes that the phase still waits for.
    bytes: i64,
    /// Phases completed.
    phases: u64,
    /// What those who arrived in this phase knew.
    arriving: Clocks,
    /// What those who arrived in completed phases knew.
    known: Clocks,
}

/// All objects, by shared address.
#[derive(Default)]
pub(crate) struct Mbarriers(HashMap<u64, Mbarrier>);

impl Mbarriers {
    /// `mbarrier.init`.
    pub fn init(&mut self, address: u64, count: u32) -> Result<(), Cause> {
        if count == 0 || count >= 1 << 20 {
            return Err(Cause::Mbarrier { address, rule: "a count from 1 to 2^20 - 1" });
        }
        let clocks = [0; MAX_WARPS];
        let new = Mbarrier { count, pending: count, bytes: 0, phases: 0, arriving: clocks, known: clocks };
        match self.0.insert(address, new) {
            None => Ok(()),
            Some(_) => Err(Cause::Mbarrier { address, rule: "not initialised twice" }),
        }
    }

    fn at(&mut self, address: u64) -> Result<&mut Mbarrier, Cause> {
        self.0.get_mut(&address).ok_or(Cause::Mbarrier { address, rule: "initialised" })
    }

    /// One arrival that expects `bytes` further bytes, by a warp that knows `clocks`.
    pub fn arrive(&mut self, address: u64, bytes: u32, clocks: &Clocks) -> Result<(), Cause> {
        let barrier = self.at(address)?;
        if barrier.pending == 0 {
            return Err(Cause::Mbarrier { address, rule: "expecting this arrival in its phase" });
        }
        barrier.pending -= 1;
        barrier.bytes += i64::from(bytes);
        barrier.note(clocks);
        barrier.complete();
        Ok(())
    }

    /// `bytes` bytes have arrived.
    pub fn complete_bytes(&mut self, address: u64, bytes: u32, clocks: &Clocks) -> Result<(), Cause> {
        let barrier = self.at(address)?;
        barrier.bytes -= i64::from(bytes);
        barrier.note(clocks);
        barrier.complete();
        Ok(())
    }

    /// What is known after the phase of parity `parity`, if it has completed.
    pub fn test(&mut self, address: u64, parity: u32) -> Result<Option<Clocks>, Cause> {
        if parity > 1 {
            return Err(Cause::Mbarrier { address, rule: "waited for with parity 0 or 1" });
        }
        let barrier = self.at(address)?;
        Ok((barrier.phases % 2 != u64::from(parity)).then_some(barrier.known))
    }
}

impl Mbarrier {
    fn note(&mut self, clocks: &Clocks) {
        self.arriving.iter_mut().zip(clocks).for_each(|(a, b)| *a = (*a).max(*b));
    }

    fn complete(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.phases += 1;
            self.pending = self.count;
            self.known.iter_mut().zip(&self.arriving).for_each(|(a, b)| *a = (*a).max(*b));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_waits_for_arrivals_and_bytes() -> Result<(), Cause> {
        let (mut barriers, mut clocks) = (Mbarriers::default(), [0; MAX_WARPS]);
        clocks[3] = 7;
        barriers.init(1024, 2)?;
        assert!(barriers.test(1024, 1)?.is_some() && barriers.test(1024, 0)?.is_none());
        barriers.arrive(1024, 32, &clocks)?;
        barriers.arrive(1024, 0, &clocks)?;
        assert!(barriers.test(1024, 0)?.is_none());
        barriers.complete_bytes(1024, 32, &[0; MAX_WARPS])?;
        assert_eq!(barriers.test(1024, 0)?.map(|known| known[3]), Some(7));
        assert!(barriers.test(1024, 1)?.is_none() && barriers.test(1032, 0).is_err());
        Ok(())
    }
}
