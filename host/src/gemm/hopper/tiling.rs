//! How a product is cut into tiles, and its tiles into K ranges.

use attn_backward_kernels::config::wgmma::{CLUSTER_M, CLUSTER_SIZE, MAX_SPLITS, TILE_M, TILE_WIDTHS};
use std::fmt;

use super::Accumulation;
use crate::gemm::ProductShape;

/// Row blocks (of `CLUSTER_M` rows) whose tiles follow each other before the next column: their A stays in L2 while B goes by.
const RASTER_ROWS: usize = 8;

/// How the k-blocks of a tile are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KSplit {
    /// Not at all.
    Whole,
    /// `parts` parts of `part_k_blocks` each at the end of K; the block that does the beginning adds them.
    Owner {
        /// k-blocks of a part.
        part_k_blocks: u32,
        /// Number of parts.
        parts: u32,
    },
    /// Nearly equal parts, added by reduce items.
    Parts(u32),
}

/// How a product is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tiling {
    /// Widths of the tiles of a row block, from column 0; they add up to n.
    pub widths: Vec<u32>,
    /// How each tile's K is cut.
    pub split: KSplit,
    /// Last row blocks (of `CLUSTER_M` rows; an odd 128 rows behind them do not count) that are cut into tiles 128 wide instead, so that the ends of the blocks' lists lie closer together.
    pub narrow_row_blocks: usize,
}

/// What a [`Run`] of items does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Whole tiles.
    Whole,
    /// This part of each tile.
    Part(u32),
    /// The owner's range.
    Owner,
}

/// Tiles of one product and width, in raster order: those of the first blocks of clusters, the others' are where [`TileGroup::beside`] says.
#[derive(Clone, Debug)]
pub struct TileGroup {
    /// Index of the product.
    pub product: usize,
    /// Columns of a tile.
    pub width: u32,
    /// First columns.
    pub columns: Vec<u32>,
    /// Row blocks, of `CLUSTER_M` rows.
    pub rows: std::ops::Range<usize>,
    /// Where the tile of a cluster's second block is: below the first one's, with the same B, or in the same rows, so many columns further right.
    pub beside: Option<u32>,
    /// Depth of a tile.
    pub k_blocks: u32,
    /// How it is cut.
    pub split: KSplit,
}

impl KSplit {
    /// Parts that are parked in the workspace.
    pub fn parts(self) -> u32 {
        match self {
            KSplit::Whole => 0,
            KSplit::Owner { parts, .. } | KSplit::Parts(parts) => parts,
        }
    }

    /// k-block ranges of a tile of `k_blocks`, with their roles.
    pub fn ranges(self, k_blocks: u32) -> Vec<(Role, std::ops::Range<u32>)> {
        match self {
            KSplit::Whole => vec![(Role::Whole, 0..k_blocks)],
            KSplit::Parts(parts) => {
                (0..parts).map(|i| (Role::Part(i), k_blocks * i / parts..k_blocks * (i + 1) / parts)).collect()
            }
            KSplit::Owner { part_k_blocks, parts } => {
                let own = k_blocks - parts * part_k_blocks;
                let part = |i| own + i * part_k_blocks..own + (i + 1) * part_k_blocks;
                [(Role::Owner, 0..own)].into_iter().chain((0..parts).map(|i| (Role::Part(i), part(i)))).collect()
            }
        }
    }

    /// Whether each range of a tile of `k_blocks` has a k-block, and a stage holds all parts.
    pub fn fits(self, k_blocks: u32) -> bool {
        match self {
            KSplit::Whole => true,
            KSplit::Parts(parts) => (2..=MAX_SPLITS).contains(&parts) && parts <= k_blocks,
            KSplit::Owner { part_k_blocks, parts } => {
                parts > 0 && parts < MAX_SPLITS && part_k_blocks > 0 && parts * part_k_blocks < k_blocks
            }
        }
    }
}

impl Tiling {
    /// As many tiles of width `lead` as possible, K whole.
    pub fn led_by(lead: u32, n: usize, allowed: &[u32]) -> Self {
        Tiling { widths: widths_led_by(lead, n, allowed), split: KSplit::Whole, narrow_row_blocks: 0 }
    }

    /// The product's tiles by width.
    pub fn groups(&self, accumulation: Accumulation, product: usize, shape: &ProductShape) -> Vec<TileGroup> {
        let row_blocks = shape.m.div_ceil(CLUSTER_M as usize);
        // The last row block of an odd number: both tiles of a cluster in it, if its columns can be halved.
        let is_odd = shape.m.div_ceil(TILE_M as usize) % CLUSTER_SIZE as usize == 1;
        let halves = is_odd && shape.n.is_multiple_of(128) && shape.n >= 256;
        let last = row_blocks - usize::from(halves);
        let narrow = self.narrow_row_blocks.min(last);
        let k_blocks = accumulation.k_blocks(shape);
        let mut groups = Vec::new();
        let mut add = |widths: &[u32], rows: std::ops::Range<usize>, beside: Option<u32>| {
            for width in TILE_WIDTHS {
                let mut n0 = 0;
                let mut columns = Vec::new();
                for &w in widths {
                    if w == width {
                        columns.push(n0);
                    }
                    n0 += w;
                }
                if !columns.is_empty() && !rows.is_empty() {
                    let (rows, split) = (rows.clone(), self.split);
                    groups.push(TileGroup { product, width, columns, rows, beside, k_blocks, split });
                }
            }
        };
        add(&self.widths, 0..last - narrow, None);
        // 128, and at most one 192: every kernel has these.
        add(&widths_led_by(128, shape.n, &TILE_WIDTHS), last - narrow..last, None);
        if halves {
            let widest = if self.narrow_row_blocks > 0 { 128 } else { self.widths[0] };
            let half = shape.n / 2;
            add(&widths_led_by(widest, half, accumulation.tile_widths()), last..row_blocks, Some(half as u32));
        }
        groups
    }
}

impl TileGroup {
    /// Number of tiles of a cluster.
    pub fn len(&self) -> usize {
        self.columns.len() * self.rows.len()
    }

    /// Row block of a tile, by its place in raster order.
    pub fn row_block(&self, tile: usize) -> usize {
        let band = tile / (RASTER_ROWS * self.columns.len());
        let first = self.rows.start + band * RASTER_ROWS;
        first + (tile - band * RASTER_ROWS * self.columns.len()) % RASTER_ROWS.min(self.rows.end - first)
    }

    /// First row and column of every tile, in raster order.
    pub fn tiles(&self) -> Vec<[u32; 2]> {
        let mut tiles = Vec::with_capacity(self.len());
        for first in self.rows.clone().step_by(RASTER_ROWS) {
            for &n0 in &self.columns {
                for row in first..(first + RASTER_ROWS).min(self.rows.end) {
                    tiles.push([row as u32 * CLUSTER_M, n0]);
                }
            }
        }
        tiles
    }
}

/// Widths of `allowed` (192, 128 and maybe 256) that add up to `n` (a multiple of 64, at least 128): as many of `width` as leave something
/// that the others can fill.
pub fn widths_led_by(width: u32, n: usize, allowed: &[u32]) -> Vec<u32> {
    let mut count = n / width as usize;
    loop {
        let rest = n - count * width as usize;
        // What is left: nothing, 128, 192, 256, or a few of them.
        let filler: Option<&[u32]> = match rest {
            0 => Some(&[]),
            128 => Some(&[128]),
            192 => Some(&[192]),
            256 if allowed.contains(&256) => Some(&[256]),
            256 => Some(&[128, 128]),
            320 => Some(&[192, 128]),
            _ => None,
        };
        if let Some(filler) = filler {
            let mut widths = vec![width; count];
            widths.extend(filler);
            widths.sort_unstable_by_key(|w| std::cmp::Reverse(*w));
            return widths;
        }
        count -= 1;
    }
}

/// Every multiset of widths of `allowed` (192, 128 and maybe 256) that adds up to `n`, wide tiles first.
pub fn all_widths(n: usize, allowed: &[u32]) -> Vec<Vec<u32>> {
    let units = n / 64;
    let most_wide = if allowed.contains(&256) { units / 4 } else { 0 };
    let mut all = Vec::new();
    for wide in (0..=most_wide).rev() {
        for middle in (0..=(units - 4 * wide) / 3).rev() {
            let rest = units - 4 * wide - 3 * middle;
            if rest.is_multiple_of(2) {
                let mut widths = vec![256; wide];
                widths.resize(wide + middle, 192);
                widths.resize(wide + middle + rest / 2, 128);
                all.push(widths);
            }
        }
    }
    all
}

impl fmt::Display for KSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KSplit::Whole => f.write_str("K whole"),
            KSplit::Owner { part_k_blocks, parts } => {
                write!(f, "K cut into the owner's range and {parts} x {part_k_blocks} k-blocks")
            }
            KSplit::Parts(parts) => write!(f, "K cut into {parts} parts"),
        }
    }
}

impl fmt::Display for Tiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for width in TILE_WIDTHS {
            let count = self.widths.iter().filter(|w| **w == width).count();
            if count > 0 {
                write!(f, "{separator}{count} x {width}")?;
                separator = " + ";
            }
        }
        if self.narrow_row_blocks > 0 {
            write!(f, " (last {} x {CLUSTER_M} rows 128 wide)", self.narrow_row_blocks)?;
        }
        write!(f, ", {}", self.split)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_backward_kernels::config::wgmma::PROMOTED_TILE_WIDTHS;

    #[test]
    fn widths_cover_every_supported_n_exactly() {
        for allowed in [&TILE_WIDTHS[..], &PROMOTED_TILE_WIDTHS] {
            let covers = |widths: &[u32], n: usize| {
                widths.iter().sum::<u32>() as usize == n && widths.iter().all(|w| allowed.contains(w))
            };
            for n in (128..=4096).step_by(64) {
                assert!(allowed.iter().all(|lead| covers(&widths_led_by(*lead, n, allowed), n)), "{n}");
            }
            for n in [128, 192, 320, 1280, 1536] {
                assert!(all_widths(n, allowed).iter().all(|widths| covers(widths, n)), "{n}");
            }
        }
        assert_eq!(all_widths(1280, &TILE_WIDTHS).len(), 14);
        assert_eq!(all_widths(1280, &PROMOTED_TILE_WIDTHS).len(), 4);
    }

    #[test]
    fn row_blocks_are_those_of_the_tiles() {
        for (rows, columns) in [(0..1, 1), (0..16, 2), (3..40, 3), (5..37, 6)] {
            let columns = (0..columns).map(|i| 256 * i).collect();
            let group =
                TileGroup { product: 0, width: 256, columns, rows, beside: None, k_blocks: 1, split: KSplit::Whole };
            for (tile, [m0, _]) in group.tiles().into_iter().enumerate() {
                assert_eq!(group.row_block(tile) as u32 * CLUSTER_M, m0);
            }
        }
    }

    #[test]
    fn ranges_cover_k_once_in_order() {
        for k_blocks in 1..70 {
            let owners = (1..5).flat_map(|parts| (1..20).map(move |b| KSplit::Owner { part_k_blocks: b, parts }));
            for split in [KSplit::Whole].into_iter().chain((2..=12).map(KSplit::Parts)).chain(owners) {
                if split.fits(k_blocks) {
                    let mut at = 0;
                    for (_, range) in split.ranges(k_blocks) {
                        assert!(range.start == at && range.end > at);
                        at = range.end;
                    }
                    assert_eq!(at, k_blocks);
                }
            }
        }
    }
}
