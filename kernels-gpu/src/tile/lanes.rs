//! Which element of a tile each lane of a warp holds or addresses, as `const fn` proven below.
//!
//! Fragments of mma m16n8k16 with 16-bit operands and fp32 accumulators (`g = lane / 4`, `t = lane % 4`):
//! * C, D `[16, 8]`: registers 0, 1 are row `g`, columns `2t, 2t + 1`; registers 2, 3 are row `g + 8`, the same columns
//! * A `[16 m, 16 k]`: pairs along k; registers 0..4 are `(g, 2t..)`, `(g + 8, 2t..)`, `(g, 2t + 8..)`, `(g + 8, 2t + 8..)`
//! * B `[16 k, 8 n]`: pairs along k; registers 0, 1 are `(2t.., g)`, `(2t + 8.., g)`
//!
//! So two neighbouring C tiles, rounded to 16 bits and packed in pairs, are one A fragment.
//!
//! `ldmatrix.x4` takes the address of row `r` of matrix `i` from lane `8 i + r`.
use super::layout::{ROW_BYTES, swizzle_128b};

/// Row (of 16) and column (of 8) of register `register` (0..4) of a C fragment.
#[inline(always)]
pub const fn accumulator_element(lane: u32, register: u32) -> (u32, u32) {
    ((lane >> 2) + 8 * (register >> 1), 2 * (lane & 3) + (register & 1))
}

/// Row (of 16) and first column (of 16) of the pair in register `register` (0..4) of an A fragment.
#[inline(always)]
pub const fn a_pair(lane: u32, register: u32) -> (u32, u32) {
    ((lane >> 2) + 8 * (register & 1), 2 * (lane & 3) + 8 * (register >> 1))
}

/// First k (of 16) and the n (of 8) of the pair in register `register` (0..2) of a B fragment.
#[inline(always)]
pub const fn b_pair(lane: u32, register: u32) -> (u32, u32) {
    (2 * (lane & 3) + 8 * register, lane >> 2)
}

/// Row and 16-byte piece that a lane addresses in a `[16, 16]` tile whose four matrices go down first, then right: rows 0..8 then 8..16
/// of piece 0, then of piece 1. Plain: an A fragment of an `[m][k]` tile. Transposed: two B fragments (n 0..8, n 8..16) of a `[k][n]` tile.
#[inline(always)]
pub const fn down_then_right(lane: u32) -> (u32, u32) {
    (lane & 15, lane >> 4)
}

/// The same with the matrices going right first, then down. Plain: two B fragments of an `[n][k]` tile. Transposed: an A fragment of a
/// `[k][m]` tile.
#[inline(always)]
pub const fn right_then_down(lane: u32) -> (u32, u32) {
    ((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)
}

/// [`down_then_right`] as byte offset in a swizzled tile. Piece `p + 2 i` is this offset XOR `i << 5`.
#[inline(always)]
pub const fn swizzled_down_then_right(lane: u32) -> u32 {
    let (row, piece) = down_then_right(lane);
    swizzle_128b(row, piece)
}

/// [`right_then_down`] as byte offset in a swizzled tile. Piece `p + 2 i` is this offset XOR `i << 5`.
#[inline(always)]
pub const fn swizzled_right_then_down(lane: u32) -> u32 {
    let (row, piece) = right_then_down(lane);
    swizzle_128b(row, piece)
}

/// Byte offset of a C fragment's registers 0 and 1, packed, in a swizzled tile; piece `p` is this offset XOR `p << 4`, and registers 2
/// and 3 lie `8 * ROW_BYTES` further.
#[inline(always)]
pub const fn swizzled_accumulator(lane: u32) -> u32 {
    swizzle_128b(lane >> 2, 0) + 4 * (lane & 3)
}

/// Row (of 16) and 16-byte piece (of 8) that a lane moves in step `step` (0..4) of a `[16, 64]` tile of 16-bit elements.
#[inline(always)]
pub const fn moved_16_bit(lane: u32, step: u32) -> (u32, u32) {
    (4 * step + (lane >> 3), lane & 7)
}

/// Row (of 16) and 16-byte piece (of 16) that a lane moves in step `step` (0..8) of a `[16, 64]` tile of 32-bit elements.
#[inline(always)]
pub const fn moved_32_bit(lane: u32, step: u32) -> (u32, u32) {
    (2 * step + (lane >> 4), lane & 15)
}

/// Byte offset in a swizzled 16-bit tile of the four elements that piece `piece` (of 16) of row `row` has in 32 bits.
#[inline(always)]
pub const fn swizzled_narrowed(row: u32, piece: u32) -> u32 {
    swizzle_128b(row, piece >> 1) + ((piece & 1) << 3)
}

/// First of the two neighbouring columns whose sums a lane ends up with when 64 columns are summed over 16 rows by halving: each of
/// three exchanges (with lanes 16, 8, 4 apart) leaves a lane half of its columns.
#[inline(always)]
pub const fn summed_column(lane: u32) -> u32 {
    ((lane >> 4) & 1) * 32 + ((lane >> 3) & 1) * 16 + ((lane >> 2) & 1) * 8 + 2 * (lane & 3)
}

// Eight rows further is another half of a fragment: the swizzle repeats there.
const _: () = assert!(swizzle_128b(8, 3) == 8 * ROW_BYTES + swizzle_128b(0, 3));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::attention::{SHORT_ROW_TILES, score_pitch_bytes};
    use std::collections::HashSet;

    /// All of `items` differ.
    fn distinct<T: std::hash::Hash + Eq>(items: impl IntoIterator<Item = T>) -> usize {
        let mut seen = HashSet::new();
        for item in items {
            assert!(seen.insert(item));
        }
        seen.len()
    }

    /// Accesses of `bytes` bytes at these offsets, by lanes in order, touch every bank at most once in each 128-byte phase.
    fn assert_conflict_free(offsets: &[u32], bytes: u32) {
        for phase in offsets.chunks((128 / bytes) as usize) {
            distinct(phase.iter().flat_map(|o| (0..bytes / 4).map(move |w| (o / 4 + w) % 32)));
        }
    }

    #[test]
    fn fragments_are_bijections() {
        let lanes = || 0..32u32;
        assert_eq!(distinct(lanes().flat_map(|l| (0..4).map(move |r| accumulator_element(l, r)))), 16 * 8);
        assert_eq!(distinct(lanes().flat_map(|l| (0..4).map(move |r| a_pair(l, r)))), 16 * 16 / 2);
        assert_eq!(distinct(lanes().flat_map(|l| (0..2).map(move |r| b_pair(l, r)))), 16 * 8 / 2);
    }

    #[test]
    fn two_accumulator_tiles_are_one_a_fragment() {
        for lane in 0..32 {
            for register in 0..4 {
                let (row, column) = accumulator_element(lane, 2 * (register & 1));
                assert_eq!(a_pair(lane, register), (row, column + 8 * (register >> 1)));
            }
        }
    }

    /// What lane `lane` gets in register `register` of `ldmatrix.x4` from a tile whose element is its (row, column), if lane l addresses
    /// (row, piece) `address(l)`: the pair's two elements.
    fn loaded(address: fn(u32) -> (u32, u32), transposed: bool, lane: u32, register: u32) -> [(u32, u32); 2] {
        [0, 1].map(|e| {
            let (mut row, mut column) = (lane / 4, 2 * (lane % 4) + e);
            if transposed {
                (row, column) = (column, row);
            }
            let (first_row, piece) = address(8 * register + row);
            (first_row, 8 * piece + column)
        })
    }

    #[test]
    fn ldmatrix_gives_the_fragments_that_the_maps_promise() {
        for lane in 0..32 {
            for register in 0..4 {
                let (m, k) = a_pair(lane, register);
                assert_eq!(loaded(down_then_right, false, lane, register), [(m, k), (m, k + 1)]);
                assert_eq!(loaded(right_then_down, true, lane, register), [(k, m), (k + 1, m)]);
                // two B fragments, registers 0, 1 for n 0..8 and 2, 3 for n 8..16
                let (k, n) = b_pair(lane, register & 1);
                let n = n + 8 * (register >> 1);
                assert_eq!(loaded(right_then_down, false, lane, register), [(n, k), (n, k + 1)]);
                assert_eq!(loaded(down_then_right, true, lane, register), [(k, n), (k + 1, n)]);
            }
        }
    }

    #[test]
    fn a_step_along_the_row_is_an_xor() {
        for lane in 0..32 {
            for step in 0..4 {
                let (row, piece) = down_then_right(lane);
                assert_eq!(swizzled_down_then_right(lane) ^ (step << 5), swizzle_128b(row, piece + 2 * step));
                let (row, piece) = right_then_down(lane);
                assert_eq!(swizzled_right_then_down(lane) ^ (step << 5), swizzle_128b(row, piece + 2 * step));
            }
            for piece in 0..8 {
                let expected = swizzle_128b(lane >> 2, piece) + 4 * (lane & 3);
                assert_eq!(swizzled_accumulator(lane) ^ (piece << 4), expected);
            }
        }
    }

    #[test]
    fn swizzled_accesses_are_free_of_bank_conflicts() {
        let offsets = |map: &dyn Fn(u32) -> u32| (0..32).map(map).collect::<Vec<_>>();
        for step in 0..4 {
            assert_conflict_free(&offsets(&|l| swizzled_down_then_right(l) ^ (step << 5)), 16);
            assert_conflict_free(&offsets(&|l| swizzled_right_then_down(l) ^ (step << 5)), 16);
            assert_conflict_free(&offsets(&|l| swizzle_128b(moved_16_bit(l, step).0, moved_16_bit(l, step).1)), 16);
        }
        for step in 0..8 {
            assert_conflict_free(&offsets(&|l| swizzled_narrowed(moved_32_bit(l, step).0, moved_32_bit(l, step).1)), 8);
            assert_conflict_free(&offsets(&|l| swizzled_accumulator(l) ^ (step << 4)), 4);
        }
    }

    #[test]
    fn pitched_accesses_are_free_of_bank_conflicts() {
        for row_tiles in SHORT_ROW_TILES {
            let pitch = score_pitch_bytes(row_tiles);
            for map in [down_then_right, right_then_down] {
                let offsets: Vec<u32> = (0..32).map(|l| map(l).0 * pitch + map(l).1 * 16).collect();
                assert_conflict_free(&offsets, 16);
            }
            let words: Vec<u32> = (0..32).map(|l| (l >> 2) * pitch + (l & 3) * 4).collect();
            assert_conflict_free(&words, 4);
        }
    }

    #[test]
    fn moves_cover_a_tile_once() {
        assert_eq!(distinct((0..32).flat_map(|l| (0..4).map(move |s| moved_16_bit(l, s)))), 16 * 8);
        assert_eq!(distinct((0..32).flat_map(|l| (0..8).map(move |s| moved_32_bit(l, s)))), 16 * 16);
        assert_eq!(distinct((0..16).flat_map(|r| (0..16).map(move |p| swizzled_narrowed(r, p)))), 16 * 16);
    }

    #[test]
    fn summed_columns_are_all_columns_once() {
        assert_eq!(distinct((0..32).flat_map(|l| [summed_column(l), summed_column(l) + 1])), 64);
    }
}
