//! wgmma's shared-memory matrix descriptors for the layouts that TMA writes with the 128-byte swizzle, proven below.
//!
//! An operand block is 64 deep in K and starts on a 1024-byte boundary:
//! * K-major (K contiguous in global memory): one 128-byte row of 64 k for each m or n. Eight rows are 1024 bytes, 64 rows are a chunk of
//!   8192 bytes.
//! * MN-major (M or N contiguous): chunks of 64 m or n; inside a chunk one 128-byte row of 64 m or n for each k. Eight k are
//!   1024 bytes; the next 64 m or n are 8192 bytes away.

use crate::config::wgmma::CHUNK_BYTES;

/// Bytes between two groups of eight 128-byte rows: 8 m or n (K-major), 8 k (MN-major).
const STRIDE_BYTES: u32 = 1024;

/// Descriptor of the operand that starts at `address` in the shared window: 128-byte swizzle (bit 62), stride byte offset 1024 (bits
/// 32..46), leading byte offset 8192 (bits 16..30; MN-major: the next 64 m or n; ignored for K-major), start address (bits 0..14). All in
/// units of 16 bytes, so adding `bytes >> 4` moves the start.
#[inline(always)]
pub const fn descriptor(address: u32) -> u64 {
    const FIXED: u64 = (1 << 62) | ((STRIDE_BYTES as u64 >> 4) << 32) | ((CHUNK_BYTES as u64 >> 4) << 16);
    FIXED | ((address & 0x3ffff) >> 4) as u64
}

/// High word of every [`descriptor`].
pub const HIGH_WORD: u32 = (descriptor(0) >> 32) as u32;

/// A 16-deep block of an operand: the descriptor whose low word is the sum, modulo 2^32, of these two.
#[derive(Clone, Copy)]
pub struct Block {
    /// Low word of the [`descriptor`] of the operand.
    pub low_word: u32,
    /// What is added to it.
    pub offset: u32,
}

impl Block {
    /// Block `i` (0..) along K of the operand that starts at `address`.
    #[inline(always)]
    pub const fn new(address: u32, mn_major: bool, i: u32) -> Block {
        Block { low_word: descriptor(address) as u32, offset: i * k16_step(mn_major) as u32 }
    }
}

/// What to add to a descriptor for 16 further k: 32 bytes of a row (K-major), 16 rows (MN-major).
#[inline(always)]
pub const fn k16_step(mn_major: bool) -> u64 {
    if mn_major { 2048 >> 4 } else { 32 >> 4 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile::layout::swizzle_128b;

    /// Start, leading and stride byte offsets and swizzle mode, unpacked by the PTX manual's bit positions.
    fn unpack(d: u64) -> (u32, u32, u32, u64) {
        let field = |bit: u64| ((d >> bit) as u32 & 0x3fff) << 4;
        (field(0), field(16), field(32), d >> 62)
    }

    /// Byte address that the hardware reads element `(mn, k)` of a 16-deep operand at: the canonical layout of the PTX manual, with address
    /// bits 4..7 XORed by bits 7..10.
    fn read_address(d: u64, mn_major: bool, mn: u32, k: u32) -> u32 {
        let (start, leading, stride, swizzle) = unpack(d);
        assert_eq!(swizzle, 1, "128-byte swizzle");
        let linear = if mn_major {
            start + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2
        } else {
            start + mn / 8 * stride + mn % 8 * 128 + k * 2
        };
        linear ^ (linear >> 7 & 7) << 4
    }

    /// Byte address that TMA puts element `(mn, k)` of a 64-deep block at.
    fn written_address(base: u32, mn_major: bool, mn: u32, k: u32) -> u32 {
        let (row, column) = if mn_major { (k, mn % 64) } else { (mn, k) };
        let chunk = if mn_major { mn / 64 * CHUNK_BYTES } else { 0 };
        base + chunk + swizzle_128b(row, column / 8) + column % 8 * 2
    }

    #[test]
    fn every_k16_step_reads_what_tma_wrote() {
        for base in [0, 1024, 49152, 196_608] {
            for (mn_major, extent) in [(false, 64), (true, 64), (true, 128), (true, 192), (true, 256)] {
                for step in 0..4 {
                    let d = descriptor(base) + step * k16_step(mn_major);
                    for mn in 0..extent {
                        for k in 0..16 {
                            let written = written_address(base, mn_major, mn, 16 * step as u32 + k);
                            assert_eq!(read_address(d, mn_major, mn, k), written, "{mn_major} {mn} {k} step {step}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn blocks_are_descriptors_with_steps_added() {
        for base in [0, 1024, 196_608] {
            for (mn_major, steps) in [(false, 4), (true, 8)] {
                for i in 0..steps {
                    let Block { low_word, offset } = Block::new(base, mn_major, i);
                    let d = u64::from(HIGH_WORD) << 32 | u64::from(low_word + offset);
                    assert_eq!(d, descriptor(base) + u64::from(i) * k16_step(mn_major));
                }
            }
        }
    }

    #[test]
    fn the_second_warpgroup_starts_one_chunk_later() {
        for mn_major in [false, true] {
            for (mn, k) in [(0, 0), (5, 17), (63, 63)] {
                let second = written_address(0, mn_major, 64 + mn, k);
                assert_eq!(second, written_address(CHUNK_BYTES, mn_major, mn, k));
            }
        }
    }

    #[test]
    fn fields_do_not_overlap() {
        let d = descriptor(0x3fff0);
        assert_eq!(unpack(d), (0x3fff0, 8192, 1024, 1));
        assert_eq!(d & !(1 << 62 | 0x3fff << 32 | 0x3fff << 16 | 0x3fff), 0);
        // The last stage's last step still fits the 14-bit start field.
        const { assert!(crate::config::wgmma::SMEM_BYTES + 1024 < 1 << 18) };
    }
}
