//! Global memory: separate allocations, so that a stray address does not hit a neighbour.
//!
//! Every word is an atomic, read and written with relaxed ordering: blocks run on several threads, and a race between them is then a
//! wrong value, as on a GPU, and nothing worse. No `unsafe` is needed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering::Relaxed};

use crate::Error;
use crate::error::{Cause, Space};

/// Allocation `i` starts at `(i + 1) << ALLOCATION_SHIFT`, plus [`ALLOCATION_OFFSET`].
const ALLOCATION_SHIFT: u32 = 36;
/// Keeps an allocation's alignment at 256 bytes, which is all that a driver promises.
const ALLOCATION_OFFSET: u64 = 256;

/// A type that the host can copy to and from device memory.
pub trait Element: Copy {
    /// Size in bytes.
    const BYTES: usize;
    /// Writes the value's bytes, little-endian.
    fn store(self, bytes: &mut [u8]);
    /// The value of little-endian bytes.
    fn load(bytes: &[u8]) -> Self;
}

macro_rules! elements {
    ($($t:ty),*) => { $(
        impl Element for $t {
            const BYTES: usize = size_of::<$t>();
            fn store(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }
            fn load(bytes: &[u8]) -> Self {
                let mut array = [0; size_of::<$t>()];
                array.copy_from_slice(bytes);
                <$t>::from_le_bytes(array)
            }
        }
    )* };
}
elements!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, half::f16, half::bf16);

struct Allocation {
    /// Address of the first byte.
    address: u64,
    bytes: u64,
    words: Vec<AtomicU32>,
    /// Of each word: [`WRITTEN`], [`STORED`], [`READ_ONLY`].
    flags: Vec<AtomicU8>,
}

/// One bit for each byte of a word that was written.
const WRITTEN: u8 = 0xf;
/// This launch has written the word.
const STORED: u8 = 0x10;
/// This launch has read the word as data that no thread of it writes (`ld.global.nc`).
const READ_ONLY: u8 = 0x20;

impl Allocation {
    /// Notes that bytes of words `word..word + words` were stored: `written` of each.
    #[inline]
    fn note_store(&self, word: usize, words: usize, written: u8) -> Result<(), Cause> {
        for (i, flags) in self.flags[word..word + words].iter().enumerate() {
            if flags.fetch_or(STORED | written, Relaxed) & READ_ONLY != 0 {
                return Err(Cause::NotReadOnly { address: self.address + 4 * (word + i) as u64 });
            }
        }
        Ok(())
    }
}

/// The device's global memory: allocations that live as long as this value.
///
/// Addresses are 256-byte aligned, never null, and far apart: an access that leaves its allocation is a fault. Words are little-endian.
#[derive(Default)]
pub struct Memory {
    allocations: Vec<Allocation>,
    /// Held by 64-bit atomic operations, which are two words here.
    pair: Mutex<()>,
}

impl Memory {
    /// Memory without allocations.
    pub fn new() -> Self {
        Self::default()
    }

    fn allocate(&mut self, bytes: usize, fill: u32, written: bool) -> u64 {
        let words = bytes.div_ceil(4);
        let address = ((self.allocations.len() as u64 + 1) << ALLOCATION_SHIFT) + ALLOCATION_OFFSET;
        self.allocations.push(Allocation {
            address,
            bytes: bytes as u64,
            words: (0..words).map(|_| AtomicU32::new(fill)).collect(),
            flags: (0..words).map(|_| AtomicU8::new(if written { WRITTEN } else { 0 })).collect(),
        });
        address
    }

    /// Allocates `bytes` bytes that nobody has written: a kernel or host that reads one before it is written fails. They hold a NaN
    /// in every format.
    pub fn alloc_poisoned(&mut self, bytes: usize) -> u64 {
        self.allocate(bytes, u32::MAX, false)
    }

    /// Allocates `bytes` zero bytes.
    pub fn alloc_zeroed(&mut self, bytes: usize) -> u64 {
        self.allocate(bytes, 0, true)
    }

    /// Allocates a copy of `values` and returns its address.
    pub fn upload<T: Element>(&mut self, values: &[T]) -> u64 {
        let mut bytes = vec![0; size_of_val(values).next_multiple_of(4)];
        for (value, place) in values.iter().zip(bytes.chunks_exact_mut(T::BYTES)) {
            value.store(place);
        }
        let address = self.allocate(size_of_val(values), 0, true);
        let allocation = self.allocations.last_mut().expect("just allocated");
        for (word, bytes) in allocation.words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word.get_mut() = u32::load(bytes);
        }
        address
    }

    /// Ends an allocation: whoever touches it afterwards, host or kernel, is out of bounds.
    ///
    /// # Errors
    /// [`Error::HostAccess`] if no allocation that has not ended starts at `address`.
    pub fn free(&mut self, address: u64) -> Result<(), Error> {
        let index = (address >> ALLOCATION_SHIFT).wrapping_sub(1) as usize;
        let allocation = self.allocations.get_mut(index).filter(|found| found.address == address && found.bytes > 0);
        let nothing = Error::HostAccess { address, bytes: 0, reason: "no allocation starts there" };
        *allocation.ok_or(nothing)? = Allocation { address, bytes: 0, words: Vec::new(), flags: Vec::new() };
        Ok(())
    }

    /// Whether `bytes` bytes at `address` lie in one allocation.
    pub fn contains(&self, address: u64, bytes: usize) -> bool {
        self.find(address, bytes as u64).is_some()
    }

    /// Copies bytes from the host to `address` (any alignment).
    ///
    /// # Errors
    /// [`Error::HostAccess`] if they are not inside one allocation.
    pub fn write_bytes(&mut self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        let (allocation, start) = self.host_range(address, bytes.len())?;
        for (offset, byte) in (start..).zip(bytes) {
            let (word, shift) = (&allocation.words[offset / 4], 8 * (offset % 4));
            word.store(word.load(Relaxed) & !(0xff << shift) | u32::from(*byte) << shift, Relaxed);
            allocation.flags[offset / 4].fetch_or(1 << (offset % 4), Relaxed);
        }
        Ok(())
    }

    /// The allocation and byte offset of a range.
    #[inline]
    fn find(&self, address: u64, bytes: u64) -> Option<(&Allocation, u64)> {
        let index = (address >> ALLOCATION_SHIFT).wrapping_sub(1);
        let allocation = self.allocations.get(index as usize)?;
        let offset = (address & ((1 << ALLOCATION_SHIFT) - 1)).wrapping_sub(ALLOCATION_OFFSET);
        (offset < allocation.bytes && allocation.bytes - offset >= bytes).then_some((allocation, offset))
    }

    fn host_range(&self, address: u64, bytes: usize) -> Result<(&Allocation, usize), Error> {
        let outside = Error::HostAccess { address, bytes, reason: "not inside one allocation" };
        if bytes == 0 {
            // The end of an allocation, and an empty one, are places too.
            let index = (address >> ALLOCATION_SHIFT).wrapping_sub(1) as usize;
            return self.allocations.get(index).map(|allocation| (allocation, 0)).ok_or(outside);
        }
        self.find(address, bytes as u64).map(|(allocation, offset)| (allocation, offset as usize)).ok_or(outside)
    }

    /// Copies `count` values from `address` (any alignment) to the host.
    ///
    /// # Errors
    /// [`Error::HostAccess`] if they are not inside one allocation, or if one of their bytes was never written.
    pub fn download<T: Element>(&self, address: u64, count: usize) -> Result<Vec<T>, Error> {
        let bytes = count * T::BYTES;
        let (allocation, start) = self.host_range(address, bytes)?;
        let mut raw = Vec::with_capacity(bytes);
        for offset in start..start + bytes {
            if allocation.flags[offset / 4].load(Relaxed) >> (offset % 4) & 1 == 0 {
                let address = address + (offset - start) as u64;
                return Err(Error::HostAccess { address, bytes, reason: "never written" });
            }
            raw.push((allocation.words[offset / 4].load(Relaxed) >> (8 * (offset % 4))) as u8);
        }
        Ok(raw.chunks_exact(T::BYTES).map(T::load).collect())
    }

    /// How many of `bytes` bytes at `address` were written (all of them, unless the allocation is a poisoned one).
    ///
    /// # Errors
    /// [`Error::HostAccess`] if they are not inside one allocation.
    pub fn written_bytes(&self, address: u64, bytes: usize) -> Result<usize, Error> {
        let (allocation, start) = self.host_range(address, bytes)?;
        let written = |offset: &usize| allocation.flags[offset / 4].load(Relaxed) >> (offset % 4) & 1 == 1;
        Ok((start..start + bytes).filter(written).count())
    }

    /// A launch begins: what others stored or read as read-only no longer counts.
    pub(crate) fn begin_launch(&mut self) {
        for flags in self.allocations.iter_mut().flat_map(|allocation| &mut allocation.flags) {
            *flags.get_mut() &= WRITTEN;
        }
    }

    /// Up to 16 bytes are about to be read as data that no thread of the launch writes.
    pub(crate) fn read_only(&self, address: u64, bytes: u32) -> Result<(), Cause> {
        let (allocation, offset) = self.checked(address, bytes)?;
        let word = offset as usize / 4;
        for (i, flags) in allocation.flags[word..word + bytes.div_ceil(4) as usize].iter().enumerate() {
            if flags.fetch_or(READ_ONLY, Relaxed) & STORED != 0 {
                return Err(Cause::NotReadOnly { address: (address & !3) + 4 * i as u64 });
            }
        }
        Ok(())
    }

    /// Reads up to 16 bytes, a power of two of them, into words; fewer than four into the low end of the first.
    #[inline]
    pub(crate) fn read(&self, address: u64, bytes: u32, out: &mut [u32; 4]) -> Result<(), Cause> {
        let (allocation, offset) = self.checked(address, bytes)?;
        let word = offset as usize / 4;
        let need = if bytes < 4 { ((1 << bytes) - 1) << (offset % 4) } else { WRITTEN };
        for (i, flags) in allocation.flags[word..word + bytes.div_ceil(4) as usize].iter().enumerate() {
            if flags.load(Relaxed) & need != need {
                return Err(Cause::Unwritten { space: Space::Global, address: (address & !3) + 4 * i as u64 });
            }
        }
        if bytes < 4 {
            let value = allocation.words[word].load(Relaxed) >> (8 * (offset % 4));
            out[0] = value & ((1 << (8 * bytes)) - 1);
        } else {
            for (value, place) in out.iter_mut().zip(&allocation.words[word..word + bytes as usize / 4]) {
                *value = place.load(Relaxed);
            }
        }
        Ok(())
    }

    /// Writes up to 16 bytes, laid out as in [`Memory::read`].
    #[inline]
    pub(crate) fn write(&self, address: u64, bytes: u32, values: &[u32; 4]) -> Result<(), Cause> {
        let (allocation, offset) = self.checked(address, bytes)?;
        let word = offset as usize / 4;
        if bytes < 4 {
            let shift = 8 * (offset % 4) as u32;
            let mask = ((1u32 << (8 * bytes)) - 1) << shift;
            // The closure always returns a value, so the update cannot fail.
            let _ = allocation.words[word]
                .fetch_update(Relaxed, Relaxed, |old| Some(old & !mask | values[0] << shift & mask));
            return allocation.note_store(word, 1, ((1u8 << bytes) - 1) << (offset % 4));
        }
        for (value, place) in values.iter().zip(&allocation.words[word..word + bytes as usize / 4]) {
            place.store(*value, Relaxed);
        }
        allocation.note_store(word, bytes as usize / 4, WRITTEN)
    }

    /// Replaces a 4- or 8-byte value by what `f` makes of it, atomically; returns the old value.
    pub(crate) fn update(&self, address: u64, bytes: u32, f: impl Fn(u64) -> u64) -> Result<u64, Cause> {
        let mut out = [0; 4];
        self.read(address, bytes, &mut out)?;
        if bytes == 4 {
            let (allocation, offset) = self.checked(address, bytes)?;
            let word = offset as usize / 4;
            allocation.note_store(word, 1, WRITTEN)?;
            let old = allocation.words[word].fetch_update(Relaxed, Relaxed, |old| Some(f(old as u64) as u32));
            return Ok(old.unwrap_or_default() as u64);
        }
        let _guard = self.pair.lock();
        self.read(address, bytes, &mut out)?;
        let old = out[0] as u64 | (out[1] as u64) << 32;
        let new = f(old);
        self.write(address, bytes, &[new as u32, (new >> 32) as u32, 0, 0])?;
        Ok(old)
    }

    /// The allocation and offset of an aligned range.
    #[inline]
    fn checked(&self, address: u64, bytes: u32) -> Result<(&Allocation, u64), Cause> {
        if !address.is_multiple_of(bytes as u64) {
            return Err(Cause::Misaligned { space: Space::Global, address, alignment: bytes });
        }
        self.find(address, bytes as u64).ok_or(Cause::OutOfBounds { space: Space::Global, address, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_uploaded_is_downloaded() -> Result<(), Error> {
        let mut memory = Memory::new();
        let bytes = memory.upload(&[1u8, 2, 3, 4, 5]);
        let floats = memory.upload(&[1.5f32, -2.0]);
        assert_eq!(memory.download::<u8>(bytes, 5)?, [1, 2, 3, 4, 5]);
        assert_eq!(memory.download::<u8>(bytes + 3, 2)?, [4, 5]);
        assert_eq!(memory.download::<f32>(floats + 4, 1)?, [-2.0]);
        assert!(memory.download::<u8>(bytes, 6).is_err() && memory.download::<u8>(bytes - 1, 1).is_err());
        assert!(bytes.is_multiple_of(256));
        Ok(())
    }

    #[test]
    fn memory_that_was_freed_is_nobodys() -> Result<(), Error> {
        let mut memory = Memory::new();
        let (first, second) = (memory.alloc_zeroed(8), memory.alloc_zeroed(8));
        assert!(memory.free(first + 4).is_err());
        memory.free(first)?;
        assert!(memory.free(first).is_err() && memory.download::<u8>(first, 1).is_err() && !memory.contains(first, 1));
        assert!(memory.read(first, 4, &mut [0; 4]).is_err());
        memory.write_bytes(second + 3, &[1, 2])?;
        assert_eq!(memory.download::<u8>(second, 8)?, [0, 0, 0, 1, 2, 0, 0, 0]);
        assert!(memory.write_bytes(second + 7, &[1, 2]).is_err() && memory.contains(second, 8));
        Ok(())
    }

    #[test]
    fn poison_is_tracked_by_byte() -> Result<(), Error> {
        let mut memory = Memory::new();
        let address = memory.alloc_poisoned(8);
        let mut out = [0; 4];
        assert_eq!(memory.read(address, 4, &mut out), Err(Cause::Unwritten { space: Space::Global, address }));
        memory.write(address + 2, 2, &[0xabcd, 0, 0, 0]).map_err(|_| ()).expect("in bounds");
        assert_eq!(memory.read(address + 2, 2, &mut out), Ok(()));
        assert_eq!(out[0], 0xabcd);
        assert!(memory.read(address, 4, &mut out).is_err());
        assert_eq!(memory.written_bytes(address, 8)?, 2);
        let first = Error::HostAccess { address, bytes: 4, reason: "never written" };
        assert_eq!(memory.download::<u16>(address, 2), Err(first));
        Ok(())
    }
}
