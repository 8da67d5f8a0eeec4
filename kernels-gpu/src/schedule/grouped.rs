//! Blocks of the grouped GEMM: block index -> (product, split, tile), and split -> k-blocks.
//!
//! The blocks of a launch are the products' one after the other. Of a product, splits come one after the other, and within a split the
//! tiles in groups of [`GROUP_TILES_M`] tile rows: down the rows of the group, then on to the next tile column. The blocks that run at
//! one time then cover a patch of C, whose A rows and B columns stay in L2.
use crate::config::gemm::{GROUP_TILES_M, REDUCE_ELEMS, TILE_K, TILE_M, TILE_N};

/// What a block works on within its product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Range of the k-blocks, `0..splits`.
    pub split: u32,
    /// Tile row of C.
    pub tile_m: u32,
    /// Tile column of C.
    pub tile_n: u32,
}

/// Tile rows of C.
pub const fn tiles_m(m: u32) -> u32 {
    m.div_ceil(TILE_M)
}

/// Tile columns of C.
pub const fn tiles_n(n: u32) -> u32 {
    n.div_ceil(TILE_N)
}

/// k-blocks of one segment; a segment's last k-block is filled up with zeros.
pub const fn segment_blocks(k: u32) -> u32 {
    k.div_ceil(TILE_K)
}

/// `a / b`; 0 for `b = 0`, which no launch has: a kernel cannot panic.
const fn divide(a: u32, b: u32) -> u32 {
    match a.checked_div(b) {
        Some(quotient) => quotient,
        None => 0,
    }
}

/// The work of block `index` of a product of `tiles_m x tiles_n` tiles, `index < splits * tiles_m * tiles_n`.
pub const fn tile_of_block(index: u32, tiles_m: u32, tiles_n: u32) -> Tile {
    let tiles = tiles_m * tiles_n;
    let split = divide(index, tiles);
    let within = index - split * tiles;
    let first = divide(within, GROUP_TILES_M * tiles_n) * GROUP_TILES_M;
    let within_group = within - first * tiles_n;
    let left = tiles_m - first;
    let rows = if left < GROUP_TILES_M { left } else { GROUP_TILES_M };
    let tile_n = divide(within_group, rows);
    Tile { split, tile_m: first + within_group - tile_n * rows, tile_n }
}

/// First k-block of range `split` of `splits`; the range ends where the next one starts. Ranges differ by one block at most.
///
/// `blocks * splits` must fit in 32 bits.
pub const fn split_start(split: u32, splits: u32, blocks: u32) -> u32 {
    divide(split * blocks, splits)
}

/// Segment of k-block `block` of all segments together, and its place within the segment.
pub const fn segment_of_block(block: u32, segment_blocks: u32) -> (u32, u32) {
    let segment = divide(block, segment_blocks);
    (segment, block - segment * segment_blocks)
}

/// Row and column of the `quad`-th four elements of a row-major matrix of `n` columns, a multiple of 4.
pub const fn quad_position(quad: u32, n: u32) -> (u32, u32) {
    let row = divide(quad, n / 4);
    (row, (quad - row * (n / 4)) * 4)
}

/// Blocks of `gemm_reduce` for a product: those of C's elements if K is split, else none.
pub const fn reduce_blocks(m: u32, n: u32, splits: u32) -> u32 {
    if splits > 1 { (m as u64 * n as u64).div_ceil(REDUCE_ELEMS as u64) as u32 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_tile_of_every_split_has_one_block() {
        for tiles_m in [1, 2, 7, 8, 9, 16, 31, 136] {
            for tiles_n in [1, 2, 10, 12, 33] {
                for splits in [1, 2, 5, 16] {
                    let blocks = splits * tiles_m * tiles_n;
                    let seen: HashSet<Tile> = (0..blocks).map(|b| tile_of_block(b, tiles_m, tiles_n)).collect();
                    assert_eq!(seen.len() as u32, blocks);
                    assert!(seen.iter().all(|t| t.split < splits && t.tile_m < tiles_m && t.tile_n < tiles_n));
                }
            }
        }
    }

    #[test]
    fn tiles_of_one_split_follow_each_other() {
        let (tiles_m, tiles_n) = (11, 3);
        for block in 0..4 * tiles_m * tiles_n {
            assert_eq!(tile_of_block(block, tiles_m, tiles_n).split, block / (tiles_m * tiles_n));
        }
    }

    #[test]
    fn blocks_that_run_together_cover_a_patch() {
        // 64 blocks in a row from a group's start touch 8 tile rows and 8 tile columns, not 64 of one of them.
        let patch: Vec<Tile> = (0..64).map(|b| tile_of_block(b, 64, 64)).collect();
        assert_eq!(patch.iter().map(|t| t.tile_m).collect::<HashSet<_>>().len(), 8);
        assert_eq!(patch.iter().map(|t| t.tile_n).collect::<HashSet<_>>().len(), 8);
    }

    #[test]
    fn splits_cover_all_k_blocks_once_and_evenly() {
        for blocks in [0, 1, 2, 15, 16, 60, 813] {
            for splits in 1..=16 {
                assert_eq!(split_start(0, splits, blocks), 0);
                assert_eq!(split_start(splits, splits, blocks), blocks);
                for s in 0..splits {
                    let len = split_start(s + 1, splits, blocks) - split_start(s, splits, blocks);
                    assert!(len == blocks / splits || len == blocks / splits + 1);
                }
            }
        }
    }

    #[test]
    fn only_split_products_are_reduced() {
        assert_eq!(reduce_blocks(128, 1280, 1), 0);
        assert_eq!(reduce_blocks(128, 1280, 2), 160);
        assert_eq!(reduce_blocks(1, 8, 2), 1);
    }
}
