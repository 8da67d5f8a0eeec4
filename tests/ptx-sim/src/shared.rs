//! The shared memory of the blocks of a cluster, and what their warps know of each other's accesses.
//!
//! Per word: which bytes were written, whether a `cp.async` into it is under way, and who read and wrote it last. Order between warps
//! is a vector clock: every warp has a time, which barriers (and releases) advance; an access by warp `r` at its time `t` happened
//! before warp `w`'s present if `w` has learned of a time of `r` later than `t`. `bar.warp.sync` advances
//! the warp's own time too: what another lane wrote at the present time must not be read.
//!
//! What threads wrote, asynchronous operations (bulk copies, wgmma) may touch only if a `fence.proxy.async` lies between, in whichever warp on
//! the way: a second clock holds the times that are known and fenced. The other direction needs no fence: the waits for those operations
//! are fences. Nor does the asynchronous overwriting of what threads have read: no thread's write is passed on.
//!
//! Kept small, so that it can be always on: concurrent readers of a word share one time, the earliest (a race may be missed where warps
//! synchronise in groups, none is invented); reads by strong accesses (atomics, volatile, relaxed, acquire) are not recorded; accesses
//! narrower than a word conflict only with those of a whole word.

use std::collections::HashMap;

use crate::error::{Cause, Space};
use crate::hopper::Mbarriers;

/// Shared addresses start here: the first KiB belongs to the system on recent GPUs, and a null address should fault.
pub(crate) const SHARED_BASE: u64 = 1024;
/// Bytes from the shared addresses of a block to those of the next one of its cluster. A descriptor's 18 bits are then the same in all.
pub(crate) const BLOCK_BYTES: u64 = 1 << 18;
/// Most warps of the blocks of a cluster.
pub(crate) const MAX_WARPS: usize = 32;

/// Shared address in block `rank` that corresponds to `address`, of whichever block (`mapa`).
#[inline]
pub(crate) fn in_block(address: u32, rank: u32) -> u32 {
    let offset = u64::from(address).wrapping_sub(SHARED_BASE) % BLOCK_BYTES;
    (SHARED_BASE + u64::from(rank) * BLOCK_BYTES + offset) as u32
}

/// What a warp knows of every warp's time, then what of it a `fence.proxy.async` has made known to asynchronous operations.
pub(crate) type Clocks = [u32; 2 * MAX_WARPS];

/// Nothing is known.
pub(crate) const NOTHING: Clocks = [0; 2 * MAX_WARPS];

const WRITTEN: u8 = 0xf;
const PENDING: u8 = 0x10;
const STRONG_WRITE: u8 = 0x20;
const ASYNC_WRITE: u8 = 0x40;

/// Who accesses, and how.
#[derive(Clone, Copy)]
pub(crate) struct Who {
    pub warp: usize,
    /// [`COLLECTIVE`] for a store by the whole warp together.
    pub lane: u32,
    /// An atomic, volatile, relaxed, acquire or release access.
    pub strong: bool,
    /// An asynchronous operation's access, which the warp started.
    pub asynchronous: bool,
}

/// A lane that no lane is.
pub(crate) const COLLECTIVE: u32 = 32;

/// Who touched a word: masks of warps, and the earliest of their times.
#[derive(Clone, Copy, Default)]
struct History {
    /// Lane of the last write, of use while there is one writer.
    writer_lane: u32,
    writers: u32,
    write_time: u32,
    readers: u32,
    read_time: u32,
}

/// Shared memory of the blocks of a cluster.
pub(crate) struct Shared {
    words: Vec<u32>,
    flags: Vec<u8>,
    history: Vec<History>,
    /// Bytes of a block.
    bytes: u64,
    /// Blocks that have exited.
    exited: Vec<bool>,
    detect_races: bool,
    detect_unwritten: bool,
    time: u32,
    clocks: Vec<Clocks>,
    /// What releases at a word made known.
    released: HashMap<u32, Clocks>,
    pub mbarriers: Mbarriers,
}

fn join(into: &mut Clocks, from: &Clocks) {
    into.iter_mut().zip(from).for_each(|(a, b)| *a = (*a).max(*b));
}

impl Shared {
    pub fn new(bytes: usize, blocks: usize, detect_races: bool, detect_unwritten: bool, warps: usize) -> Self {
        let words = bytes.div_ceil(4) * blocks;
        Shared {
            words: vec![u32::MAX; words],
            flags: vec![0; words],
            history: vec![History::default(); if detect_races { words } else { 0 }],
            bytes: bytes as u64,
            exited: vec![false; blocks],
            detect_races,
            detect_unwritten,
            time: 0,
            clocks: vec![NOTHING; warps],
            released: HashMap::new(),
            mbarriers: Mbarriers::default(),
        }
    }

    /// All warps of block `rank` have exited.
    pub fn exit(&mut self, rank: usize) {
        self.exited[rank] = true;
    }

    /// Fails if the block that the address is of has exited.
    pub fn check_running(&self, address: u64) -> Result<(), Cause> {
        let rank = address.wrapping_sub(SHARED_BASE) / BLOCK_BYTES;
        match self.exited.get(rank as usize) {
            Some(true) => Err(Cause::ExitedBlock { address, rank: rank as u32 }),
            _ => Ok(()),
        }
    }

    /// `warp` comes to a barrier (or releases): what it did so far will be known to all who get the returned clocks.
    pub fn publish(&mut self, warp: usize) -> Clocks {
        self.time += 1;
        self.clocks[warp][warp] = self.time;
        self.clocks[warp]
    }

    /// The lanes of `warp` learn of each other's accesses.
    pub fn synchronise_lanes(&mut self, warp: usize) {
        self.publish(warp);
    }

    /// `fence.proxy.async`: what `warp` knows of is known to its asynchronous operations too, and to those of whom it tells.
    pub fn fence_proxy(&mut self, warp: usize) {
        self.publish(warp);
        self.clocks[warp].copy_within(..MAX_WARPS, MAX_WARPS);
    }

    /// `warp` learns of `clocks`.
    pub fn learn(&mut self, warp: usize, clocks: &Clocks) {
        join(&mut self.clocks[warp], clocks);
    }

    /// A strong store or atomic at `address`: later strong loads there will know of what `warp` did.
    pub fn release(&mut self, warp: usize, address: u64) {
        if self.detect_races {
            let clocks = self.publish(warp);
            join(self.released.entry((address / 4) as u32).or_insert(NOTHING), &clocks);
        }
    }

    /// A strong load or atomic at `address`.
    pub fn acquire(&mut self, warp: usize, address: u64) {
        if let Some(clocks) = self.released.get(&((address / 4) as u32)) {
            join(&mut self.clocks[warp], clocks);
        }
    }

    /// Word index of an aligned range.
    #[inline]
    fn find(&self, address: u64, bytes: u32) -> Result<usize, Cause> {
        if !address.is_multiple_of(bytes as u64) {
            return Err(Cause::Misaligned { space: Space::Shared, address, alignment: bytes });
        }
        let from_base = address.wrapping_sub(SHARED_BASE);
        let (rank, offset) = ((from_base / BLOCK_BYTES) as usize, from_base % BLOCK_BYTES);
        if rank >= self.exited.len() || offset >= self.bytes || self.bytes - offset < bytes as u64 {
            return Err(Cause::OutOfBounds { space: Space::Shared, address, bytes });
        }
        self.check_running(address)?;
        Ok(rank * self.block_words() + offset as usize / 4)
    }

    fn block_words(&self) -> usize {
        self.words.len() / self.exited.len()
    }

    fn address(&self, word: usize) -> u64 {
        let (rank, word) = (word / self.block_words(), word % self.block_words());
        SHARED_BASE + rank as u64 * BLOCK_BYTES + 4 * word as u64
    }

    /// A warp of `mask` (not `warp`) whose access at `time` is not known to `warp`.
    #[inline]
    fn unordered(&self, warp: usize, mask: u32, time: u32) -> Option<u32> {
        let mut others = mask & !(1 << warp);
        while others != 0 {
            let other = others.trailing_zeros();
            if self.clocks[warp][other as usize] <= time {
                return Some(other);
            }
            others &= others - 1;
        }
        None
    }

    /// Fails if threads wrote the word last, and no fence makes that known to `warp`'s asynchronous operations.
    #[inline]
    fn check_proxy(&self, warp: usize, word: usize) -> Result<(), Cause> {
        let History { writers, write_time, .. } = self.history[word];
        let fenced = &self.clocks[warp][MAX_WARPS..];
        match (0..MAX_WARPS).find(|&w| writers >> w & 1 == 1 && fenced[w] <= write_time) {
            Some(writer) if self.flags[word] & ASYNC_WRITE == 0 => {
                Err(Cause::ProxyFence { address: self.address(word), writer: writer as u32 })
            }
            _ => Ok(()),
        }
    }

    #[inline]
    fn note_read(&mut self, Who { warp, lane, strong, asynchronous }: Who, word: usize) -> Result<(), Cause> {
        let History { writer_lane, writers, write_time, readers, read_time } = self.history[word];
        if !(strong && self.flags[word] & STRONG_WRITE != 0)
            && let Some(other) = self.unordered(warp, writers, write_time)
        {
            return Err(Cause::Race { address: self.address(word), write: false, other, other_wrote: true });
        }
        if strong {
            return Ok(());
        }
        let now = self.clocks[warp][warp];
        let me = 1 << warp;
        if writers == me && write_time == now && writer_lane != lane && self.flags[word] & STRONG_WRITE == 0 {
            return Err(Cause::LaneRace { address: self.address(word), other: writer_lane });
        }
        if asynchronous {
            self.check_proxy(warp, word)?;
        }
        let history = &mut self.history[word];
        if readers & !me == 0 {
            (history.readers, history.read_time) = (me, now);
        } else {
            // Readers known to this one need no place: whoever is ordered after this read is ordered after theirs.
            let clocks = &self.clocks[warp];
            let known = (0..32).filter(|&r| readers >> r & 1 == 1 && clocks[r] > read_time).fold(0, |m, r| m | 1 << r);
            let left = readers & !known & !me;
            history.readers = left | me;
            history.read_time = if left == 0 { now } else { read_time.min(now) };
        }
        Ok(())
    }

    #[inline]
    fn note_write(&mut self, Who { warp, lane, strong, asynchronous }: Who, word: usize) -> Result<(), Cause> {
        let History { writers, write_time, readers, read_time, .. } = self.history[word];
        let strong_before = self.flags[word] & STRONG_WRITE != 0;
        let address = self.address(word);
        if let Some(other) = self.unordered(warp, readers, read_time) {
            return Err(Cause::Race { address, write: true, other, other_wrote: false });
        }
        let write_race = self.unordered(warp, writers, write_time);
        let now = self.clocks[warp][warp];
        let me = 1 << warp;
        let (writers, write_time) = match write_race {
            Some(other) if !(strong && strong_before) => {
                return Err(Cause::Race { address, write: true, other, other_wrote: true });
            }
            Some(_) => (writers | me, write_time.min(now)),
            None => (me, now),
        };
        if asynchronous {
            self.check_proxy(warp, word)?;
        }
        self.history[word] = History { writer_lane: lane, writers, write_time, readers: 0, read_time: 0 };
        let kind = if strong { STRONG_WRITE } else { 0 } | if asynchronous { ASYNC_WRITE } else { 0 };
        self.flags[word] = self.flags[word] & !(STRONG_WRITE | ASYNC_WRITE) | kind;
        Ok(())
    }

    /// Reads as [`crate::Memory`] does.
    #[inline]
    pub fn read(&mut self, who: Who, address: u64, bytes: u32, out: &mut [u32; 4]) -> Result<(), Cause> {
        let word = self.find(address, bytes)?;
        let need = if bytes < 4 { ((1u8 << bytes) - 1) << (address % 4) } else { WRITTEN };
        for word in word..word + bytes.div_ceil(4) as usize {
            let flags = self.flags[word];
            if flags & PENDING != 0 {
                return Err(Cause::PendingCopy { address: self.address(word) });
            }
            if flags & need != need && self.detect_unwritten {
                return Err(Cause::Unwritten { space: Space::Shared, address: self.address(word) });
            }
            if self.detect_races {
                self.note_read(Who { strong: who.strong || bytes < 4, ..who }, word)?;
            }
        }
        if bytes < 4 {
            out[0] = self.words[word] >> (8 * (address % 4)) & ((1 << (8 * bytes)) - 1);
        } else {
            let words = bytes as usize / 4;
            out[..words].copy_from_slice(&self.words[word..word + words]);
        }
        Ok(())
    }

    /// Writes as [`crate::Memory`] does.
    #[inline]
    pub fn write(&mut self, who: Who, address: u64, bytes: u32, values: &[u32; 4]) -> Result<(), Cause> {
        let word = self.find(address, bytes)?;
        let set = if bytes < 4 { ((1u8 << bytes) - 1) << (address % 4) } else { WRITTEN };
        for word in word..word + bytes.div_ceil(4) as usize {
            if self.flags[word] & PENDING != 0 {
                return Err(Cause::PendingCopy { address: self.address(word) });
            }
            if self.detect_races {
                self.note_write(Who { strong: who.strong || bytes < 4, ..who }, word)?;
            }
            self.flags[word] |= set;
        }
        if bytes < 4 {
            let shift = 8 * (address % 4) as u32;
            let mask = ((1u32 << (8 * bytes)) - 1) << shift;
            self.words[word] = self.words[word] & !mask | values[0] << shift & mask;
        } else {
            let words = bytes as usize / 4;
            self.words[word..word + words].copy_from_slice(&values[..words]);
        }
        Ok(())
    }

    /// A `cp.async` into `bytes` bytes begins: until it lands, nobody may touch them.
    pub fn begin_copy(&mut self, who: Who, address: u64, bytes: u32) -> Result<(), Cause> {
        self.write(who, address, bytes, &[u32::MAX; 4])?;
        let word = self.find(address, bytes)?;
        self.flags[word..word + bytes as usize / 4].iter_mut().for_each(|flags| *flags = *flags & !WRITTEN | PENDING);
        Ok(())
    }

    /// The copy lands: its thread waited for it.
    pub fn land_copy(&mut self, who: Who, address: u64, bytes: u32, values: &[u32; 4]) -> Result<(), Cause> {
        let word = self.find(address, bytes)?;
        self.flags[word..word + bytes as usize / 4].iter_mut().for_each(|flags| *flags &= !PENDING);
        self.write(who, address, bytes, values)
    }
}
