//! Shared-memory tiles of the portable GEMM and the lanes' part in copying and reading them.
//!
//! A tile is 128 (m or n) x 64 (k) 16-bit elements, 16 KiB, in 128-byte rows with the 128-byte swizzle:
//! * K-major: row = m, 0..128; the 8 pieces of a row are k 8 apart.
//! * MN-major: two chunks of 64 along mn, 8 KiB each; row = k, 0..64; the 8 pieces of a row are mn 8 apart.
//!
//! Copies: consecutive threads take consecutive pieces of a row (8 of a K-major row, 16 of an MN-major row, which is contiguous in global
//! memory), and a thread's own pieces are rows apart by a multiple of 8, so that one swizzled offset plus a constant serves them all.
//!
//! Reads: one `ldmatrix.x4` delivers a 16 x 16 fragment. The lane's offset is computed once; a step along the dimension of the pieces
//! (16 elements, 2 pieces) flips address bits 5 and 6 by XOR, a step along the rows adds a constant. Requires the tile to start on a
//! 128-byte boundary.
use super::layout::{ROW_BYTES, swizzle_128b};
use crate::config::gemm::{OPERAND_BYTES, TILE_K, TILE_M};

/// Bytes of one 64-wide chunk of an MN-major tile.
pub const CHUNK_BYTES: u32 = TILE_K * ROW_BYTES;
const _: () = assert!(2 * CHUNK_BYTES == OPERAND_BYTES);
/// 16-byte pieces of a tile.
pub const PIECES: u32 = OPERAND_BYTES / 16;
/// Pieces of one K-major row (64 k).
pub const K_MAJOR_PIECES: u32 = TILE_K / 8;
/// Pieces of one MN-major row (128 m or n).
pub const MN_MAJOR_PIECES: u32 = TILE_M / 8;

/// Offset of piece `piece` (0..8, along k) of row `m` of a K-major tile.
#[inline(always)]
pub const fn k_major_offset(m: u32, piece: u32) -> u32 {
    swizzle_128b(m, piece)
}

/// Offset of piece `piece` (0..16, along mn) of row `k` of an MN-major tile.
#[inline(always)]
pub const fn mn_major_offset(k: u32, piece: u32) -> u32 {
    piece / 8 * CHUNK_BYTES + swizzle_128b(k, piece % 8)
}

/// K-major A, `ldmatrix.x4`: the lane's address of the 16 (m) x 16 (k) fragment at `m` (a multiple of 16), k = 0.
/// The fragment `16 i` further down is at `+ 16 i` rows, that `16 j` deeper in k at `^ 32 j`.
#[inline(always)]
pub const fn a_k_major_lane(lane: u32, m: u32) -> u32 {
    k_major_offset(m + lane % 16, lane / 16)
}

/// MN-major A, `ldmatrix.x4.trans`: the lane's address of the 16 (m) x 16 (k) fragment at `m` (a multiple of 64), k = 0.
/// The fragment `16 i` further along m is at `^ 32 i`, that `16 j` deeper in k at `+ 16 j` rows.
#[inline(always)]
pub const fn a_mn_major_lane(lane: u32, m: u32) -> u32 {
    mn_major_offset(lane % 8 + 8 * (lane / 16), m / 8 + lane / 8 % 2)
}

/// MN-major B, `ldmatrix.x4.trans`: the lane's address of the 16 (k) x 16 (n) fragment at k = 0, `n` (a multiple of 32).
/// Registers 0 and 1 are `b0, b1` of columns 0..8, registers 2 and 3 those of columns 8..16. Steps as for A.
#[inline(always)]
pub const fn b_mn_major_lane(lane: u32, n: u32) -> u32 {
    mn_major_offset(lane % 16, n / 8 + lane / 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Tile of 16-bit elements as (row, column) tags by offset / 2; pieces hold 8 neighbours.
    fn tile(rows: u32, pieces: u32, offset: fn(u32, u32) -> u32) -> Vec<(u32, u32)> {
        let mut tile = vec![(u32::MAX, u32::MAX); OPERAND_BYTES as usize / 2];
        for row in 0..rows {
            for piece in 0..pieces {
                for e in 0..8 {
                    let at = &mut tile[offset(row, piece) as usize / 2 + e];
                    assert_eq!(*at, (u32::MAX, u32::MAX), "two pieces in one place");
                    *at = (row, 8 * piece + e as u32);
                }
            }
        }
        tile
    }

    /// `ldmatrix.x4(.trans)` as the PTX manual defines it: register i of a lane, its two elements.
    fn ldmatrix(tile: &[(u32, u32)], address: impl Fn(u32) -> u32, trans: bool) -> Vec<[[(u32, u32); 2]; 4]> {
        (0..32)
            .map(|lane| {
                std::array::from_fn(|i| {
                    std::array::from_fn(|e| {
                        let (row, column) = (lane / 4, 2 * (lane % 4) + e as u32);
                        let (row, column) = if trans { (column, row) } else { (row, column) };
                        tile[(address(8 * i as u32 + row) / 2 + column) as usize]
                    })
                })
            })
            .collect()
    }

    /// The eight addresses of each 8x8 matrix lie in eight different groups of four banks.
    fn assert_conflict_free(address: impl Fn(u32) -> u32) {
        for i in 0..4 {
            assert_eq!((8 * i..8 * i + 8).map(|l| address(l) / 16 % 8).collect::<HashSet<_>>().len(), 8);
        }
    }

    #[test]
    fn tiles_are_filled_once() {
        assert!(tile(TILE_M, K_MAJOR_PIECES, k_major_offset).iter().all(|t| t.0 != u32::MAX));
        assert!(tile(TILE_K, MN_MAJOR_PIECES, mn_major_offset).iter().all(|t| t.0 != u32::MAX));
    }

    #[test]
    fn copies_of_eight_threads_hit_all_banks_and_step_by_a_constant() {
        for threads in [128, 256] {
            for t in (0..threads).step_by(8) {
                let k: HashSet<u32> = (t..t + 8).map(|t| k_major_offset(t / 8, t % 8) / 16 % 8).collect();
                let mn: HashSet<u32> = (t..t + 8).map(|t| mn_major_offset(t / 16, t % 16) / 16 % 8).collect();
                assert_eq!((k.len(), mn.len()), (8, 8));
            }
            for t in 0..threads {
                for i in 0..PIECES / threads {
                    let (rk, rm) = (threads / 8, threads / 16);
                    assert_eq!(
                        k_major_offset(t / 8 + i * rk, t % 8),
                        k_major_offset(t / 8, t % 8) + i * rk * ROW_BYTES
                    );
                    let (got, first) = (mn_major_offset(t / 16 + i * rm, t % 16), mn_major_offset(t / 16, t % 16));
                    assert_eq!(got, first + i * rm * ROW_BYTES);
                }
            }
        }
    }

    #[test]
    fn k_major_a_fragments_are_those_of_mma_m16n8k16() {
        let tile = tile(TILE_M, K_MAJOR_PIECES, k_major_offset);
        for m in (0..TILE_M).step_by(64) {
            for (i, j) in (0..4).flat_map(|i| (0..4).map(move |j| (i, j))) {
                let address = |lane| (a_k_major_lane(lane, m) ^ (32 * j)) + 16 * i * ROW_BYTES;
                assert_conflict_free(address);
                for (lane, a) in ldmatrix(&tile, address, false).iter().enumerate() {
                    let (g, t) = (lane as u32 / 4, lane as u32 % 4);
                    for r in 0..4u32 {
                        for e in 0..2u32 {
                            let (row, k) = (g + 8 * (r % 2), 2 * t + e + 8 * (r / 2));
                            assert_eq!(a[r as usize][e as usize], (m + 16 * i + row, 16 * j + k));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn mn_major_a_fragments_are_those_of_mma_m16n8k16() {
        let tile = tile(TILE_K, MN_MAJOR_PIECES, mn_major_offset);
        for m in (0..TILE_M).step_by(64) {
            for (i, j) in (0..4).flat_map(|i| (0..4).map(move |j| (i, j))) {
                let address = |lane| (a_mn_major_lane(lane, m) ^ (32 * i)) + 16 * j * ROW_BYTES;
                assert_conflict_free(address);
                for (lane, a) in ldmatrix(&tile, address, true).iter().enumerate() {
                    let (g, t) = (lane as u32 / 4, lane as u32 % 4);
                    for r in 0..4u32 {
                        for e in 0..2u32 {
                            let (row, k) = (g + 8 * (r % 2), 2 * t + e + 8 * (r / 2));
                            assert_eq!(a[r as usize][e as usize], (16 * j + k, m + 16 * i + row));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn b_fragments_are_those_of_mma_m16n8k16() {
        let tile = tile(TILE_K, MN_MAJOR_PIECES, mn_major_offset);
        for width in [32, 64] {
            for n in (0..128).step_by(width as usize) {
                for (i, j) in (0..width / 16).flat_map(|i| (0..4).map(move |j| (i, j))) {
                    let address = |lane| (b_mn_major_lane(lane, n) ^ (32 * i)) + 16 * j * ROW_BYTES;
                    assert_conflict_free(address);
                    for (lane, b) in ldmatrix(&tile, address, true).iter().enumerate() {
                        let (g, t) = (lane as u32 / 4, lane as u32 % 4);
                        for r in 0..4u32 {
                            for e in 0..2u32 {
                                let (k, column) = (2 * t + e + 8 * (r % 2), g + 8 * (r / 2));
                                assert_eq!(b[r as usize][e as usize], (16 * j + k, n + 16 * i + column));
                            }
                        }
                    }
                }
            }
        }
    }
}
