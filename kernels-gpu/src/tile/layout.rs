//! Shared-memory layouts of 16-bit tiles with 128-byte rows, as `const fn` proven below.

/// Bytes of a row of a 16-bit tile 64 elements wide.
pub const ROW_BYTES: u32 = 128;

/// Byte offset of 16-byte piece `piece` (0..8) of row `row` in a tile of 128-byte rows with the 128-byte swizzle: the piece is XORed
/// with `row % 8`. Eight rows of one column of pieces then lie in eight different groups of banks (ldmatrix), and so do the
/// eight pieces of one row. TMA's `SWIZZLE_128B` is the same map in tiles that start on a 1024-byte boundary.
#[inline(always)]
pub const fn swizzle_128b(row: u32, piece: u32) -> u32 {
    row * ROW_BYTES + ((piece ^ (row & 7)) << 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn swizzle_is_a_bijection_onto_the_tile() {
        let offsets: HashSet<u32> = (0..64).flat_map(|r| (0..8).map(move |p| swizzle_128b(r, p))).collect();
        assert_eq!(offsets.len(), 64 * 8);
        assert!(offsets.iter().all(|o| o % 16 == 0 && *o < 64 * ROW_BYTES));
    }

    #[test]
    fn swizzle_is_its_own_inverse_within_a_row() {
        for row in 0..64 {
            for piece in 0..8 {
                let at = (swizzle_128b(row, piece) - row * ROW_BYTES) >> 4;
                assert_eq!(swizzle_128b(row, at), row * ROW_BYTES + (piece << 4));
            }
        }
    }

    #[test]
    fn eight_rows_of_a_piece_column_hit_all_banks_once() {
        for first in (0..64).step_by(8) {
            for piece in 0..8 {
                let groups: HashSet<u32> = (first..first + 8).map(|r| swizzle_128b(r, piece) / 16 % 8).collect();
                assert_eq!(groups.len(), 8);
            }
        }
    }
}
