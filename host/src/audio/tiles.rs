//! Chunk offsets -> blocks of the attention kernels: which chunks go to the short kernel, which to the long ones, and where each
//! block's column sums go. Pure.
use std::fmt;

use attn_backward_kernels::config::{attention as config, attention_flash};
use attn_backward_kernels::params::AttentionTile;

use crate::gpu::ModuleKind;
use crate::{CuSeqlens, Target};

/// The long kernels, in order.
pub const LONG_KERNELS: [&str; 2] = ["attention_long_q", "attention_long_k"];
/// The long kernels of the Hopper module, in order.
pub const FLASH_KERNELS: [&str; 5] = [
    "attention_flash_largest",
    "attention_flash_convert",
    "attention_flash_forward",
    "attention_flash_backward",
    "attention_flash_dq",
];
/// The Hopper module's five long kernels, of 128-row tiles, are worth it if a chunk is longer than this, .. (H200: 16,384 tokens in chunks of
/// 160 take 1379 us with them and 1351 without, in chunks of 256 1193 and 1374)
const FLASH_CHUNK_LEN: usize = 192;
/// .. and the chunks that are too long for the short kernel have more rows than this, which make up for their launches (one chunk of 256:
/// 59.9 and 58.2 us, one of 512: 81.5 and 101.2).
const FLASH_ROWS: usize = 256;

/// Tables of the attention kernels' blocks; each entry runs once for every head.
///
/// Every row of every chunk belongs to exactly one entry. Padding rows belong to none, nor do empty chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionTiles {
    /// Size of the short kernel in 16-row tiles, one of `SHORT_ROW_TILES`.
    pub short_row_tiles: u32,
    /// Whole chunks of the short kernel, in order.
    pub short: Vec<AttentionTile>,
    /// Tiles of the long kernels, those of the longest chunks first so that none of them starts late; a chunk's follow each other.
    pub long: Vec<AttentionTile>,
    /// Whether [`FLASH_KERNELS`] run on them, else [`LONG_KERNELS`].
    pub flash: bool,
    /// Rows of `bias_partials`: one for each entry of both tables, in the order of the packed rows.
    pub bias_rows: usize,
}

impl AttentionTiles {
    /// Cuts the chunks for the short kernel that makes them cheapest on `target`, and the long kernels for what is longer.
    pub fn new(cu_seqlens: &CuSeqlens, num_heads: usize, target: &Target) -> AttentionTiles {
        let lens = || cu_seqlens.chunks().map(|c| c.len()).filter(|&len| len > 0);
        let blocks = Blocks { num_heads, num_sms: target.num_sms };
        let cheapest = config::SHORT_ROW_TILES
            .into_iter()
            .filter(|&row_tiles| config::short_shared_bytes(row_tiles) as usize <= target.max_shared_bytes)
            .map(|row_tiles| (row_tiles, blocks.cost_us(row_tiles, lens())))
            .min_by(|a, b| a.1.total_cmp(&b.1));
        // with no short kernel at all, every chunk is long
        let (short_row_tiles, short_rows) = match cheapest {
            Some((row_tiles, _)) => (row_tiles, config::short_rows(row_tiles)),
            None => (config::SHORT_ROW_TILES[0], 0),
        };
        let long_rows: usize = lens().filter(|&len| len > short_rows as usize).sum();
        let worth_it = cu_seqlens.max_chunk_len() > FLASH_CHUNK_LEN && long_rows > FLASH_ROWS;
        let flash = target.module == ModuleKind::Hopper && worth_it;
        let long_step = if flash { attention_flash::TILE_ROWS } else { config::LONG_TILE_ROWS };
        let mut tiles = AttentionTiles { short_row_tiles, short: Vec::new(), long: Vec::new(), flash, bias_rows: 0 };
        for chunk in cu_seqlens.chunks() {
            // offsets are at most i32::MAX
            let (start, len) = (chunk.start as u32, chunk.len() as u32);
            let (table, step) = if len <= short_rows {
                (&mut tiles.short, config::short_rows(short_row_tiles))
            } else {
                (&mut tiles.long, long_step)
            };
            for first in (0..len).step_by(step as usize) {
                table.push(AttentionTile { start, len, first, bias_row: tiles.bias_rows as u32 });
                tiles.bias_rows += 1;
            }
        }
        tiles.long.sort_by_key(|tile| std::cmp::Reverse(tile.len));
        tiles
    }

    /// Names of the kernels that run, in order.
    pub fn kernels(&self) -> impl Iterator<Item = String> {
        let short = (!self.short.is_empty()).then(|| self.short_kernel());
        let long = match (self.long.is_empty(), self.flash) {
            (true, _) => &[][..],
            (false, true) => &FLASH_KERNELS,
            (false, false) => &LONG_KERNELS,
        };
        short.into_iter().chain(long.iter().copied().map(String::from))
    }

    /// Name of the short kernel.
    pub fn short_kernel(&self) -> String {
        format!("attention_short_{}", config::short_rows(self.short_row_tiles))
    }
}

/// How many blocks an entry makes, and what runs them.
struct Blocks {
    num_heads: usize,
    num_sms: usize,
}

impl Blocks {
    /// What an SM needs for the blocks that it holds at a time, whatever the size of the short kernel (10 to 14 us measured on an H200).
    const SHORT_WAVE_US: f64 = 12.0;
    /// What an SM needs for one query tile and one key tile in both long kernels (4 us measured on an H200 before prefetching).
    const LONG_PAIR_US: f64 = 3.0;
    /// What both long kernels take however little they do. One chunk of 128: 18.9 us on an H200, with 3.8 that any one kernel takes and 1.8 for its
    /// four pairs.
    const LONG_LAUNCHES_US: f64 = 13.3;

    /// Rough time of chunks of these lengths if the short kernel has `row_tiles` tiles.
    fn cost_us(&self, row_tiles: u32, lens: impl Iterator<Item = usize>) -> f64 {
        let blocks_per_sm = config::short_blocks_per_sm(row_tiles, config::SM90_SHARED_BYTES);
        let (mut short, mut long_pairs) = (0usize, 0f64);
        for len in lens {
            if len <= config::short_rows(row_tiles) as usize {
                short += 1;
            } else {
                long_pairs += (len.div_ceil(config::LONG_TILE_ROWS as usize) as f64).powi(2);
            }
        }
        let entries_per_sm = self.num_heads as f64 / self.num_sms.max(1) as f64;
        let waves = short as f64 * entries_per_sm / f64::from(blocks_per_sm);
        let short_us = if short == 0 { 0.0 } else { Self::SHORT_WAVE_US * waves.max(1.0) };
        let long_us = Self::LONG_PAIR_US * long_pairs * entries_per_sm;
        short_us + if long_pairs == 0.0 { 0.0 } else { Self::LONG_LAUNCHES_US + long_us }
    }
}

impl fmt::Display for AttentionTiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = config::short_rows(self.short_row_tiles);
        let name = if self.flash { "attention_flash" } else { "attention_long" };
        match (self.short.len(), self.long.len()) {
            (0, 0) => write!(f, "no chunk"),
            (short, 0) => write!(f, "attention_short_{rows} on {short} chunks"),
            (0, long) => write!(f, "{name} on {long} tiles"),
            (short, long) => write!(f, "attention_short_{rows} on {short} chunks, {name} on {long} tiles"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::ModuleKind;
    use proptest::prelude::*;

    /// Offsets of chunks of these lengths and `padding` rows after them.
    fn cu_seqlens(lens: &[usize], padding: usize) -> CuSeqlens {
        let mut offsets = vec![0i32];
        for len in lens {
            offsets.push(offsets[offsets.len() - 1] + *len as i32);
        }
        CuSeqlens::new(&offsets, offsets[lens.len()] as usize + padding).unwrap()
    }

    fn target() -> Target {
        Target::h200(ModuleKind::Portable)
    }

    fn tiles(lens: &[usize]) -> AttentionTiles {
        AttentionTiles::new(&cu_seqlens(lens, 0), 20, &target())
    }

    /// Rows of the packed tensors that an entry stands for, in a table with tiles of `step` rows.
    fn rows(tile: &AttentionTile, step: u32) -> std::ops::Range<usize> {
        assert!(tile.len > 0 && tile.first < tile.len);
        (tile.start + tile.first) as usize..(tile.start + tile.len.min(tile.first + step)) as usize
    }

    fn assert_covers(cu: &CuSeqlens, tiles: &AttentionTiles) {
        let short_rows = config::short_rows(tiles.short_row_tiles);
        let mut owner = vec![None; cu.total_seq_len()];
        let short = tiles.short.iter().map(|t| (t, short_rows));
        let long_step = if tiles.flash { attention_flash::TILE_ROWS } else { config::LONG_TILE_ROWS };
        let long = tiles.long.iter().map(|t| (t, long_step));
        for (tile, step) in short.chain(long) {
            let chunk = tile.start as usize..(tile.start + tile.len) as usize;
            assert!(cu.chunks().any(|c| c == chunk), "{tile:?} is of no chunk");
            for row in rows(tile, step) {
                assert_eq!(owner[row].replace(tile.bias_row), None, "row {row} twice");
            }
        }
        let covered = cu.padding().start;
        assert!(owner[..covered].iter().all(Option::is_some) && owner[covered..].iter().all(Option::is_none));
        // the rows of sums are 0, 1, .. in the order of the packed rows
        let mut sums: Vec<u32> = owner[..covered].iter().flatten().copied().collect();
        assert!(sums.is_sorted());
        sums.dedup();
        assert_eq!(sums, (0..tiles.bias_rows as u32).collect::<Vec<_>>());
        assert!(tiles.short.iter().all(|t| t.len <= short_rows && t.first == 0));
    }

    proptest! {
        #[test]
        fn every_row_of_every_chunk_is_covered_once_and_padding_never(
            lens in prop::collection::vec(prop_oneof![4 => 0usize..200, 1 => 200usize..2000], 0..40),
            padding in 0usize..100,
            num_heads in 1usize..40,
            max_shared_bytes in prop::sample::select(vec![48 << 10, 99 << 10, 163 << 10, 227 << 10]),
        ) {
            let cu = cu_seqlens(&lens, padding);
            let target = Target { max_shared_bytes, ..target() };
            let tiles = AttentionTiles::new(&cu, num_heads, &target);
            assert_covers(&cu, &tiles);
            if !tiles.short.is_empty() {
                prop_assert!(config::short_shared_bytes(tiles.short_row_tiles) as usize <= max_shared_bytes);
            }
        }
    }

    #[test]
    fn more_entries_than_a_16_bit_grid_holds() {
        let cu = cu_seqlens(&vec![1; 70_000], 3);
        let tiles = AttentionTiles::new(&cu, 20, &target());
        assert_eq!((tiles.short.len(), tiles.long.len(), tiles.bias_rows), (70_000, 0, 70_000));
        assert_eq!(tiles.short[69_999], AttentionTile { start: 69_999, len: 1, first: 0, bias_row: 69_999 });
    }

    #[test]
    fn equal_chunks_take_the_smallest_kernel_that_holds_them() {
        for (len, row_tiles) in [(1, 4), (64, 4), (65, 5), (80, 5), (81, 6), (96, 6), (97, 8), (128, 8)] {
            let tiles = tiles(&[len; 16]);
            assert_eq!((tiles.short_row_tiles, tiles.short.len(), tiles.long.len()), (row_tiles, 16, 0), "{len}");
        }
        assert!(tiles(&[129; 16]).short.is_empty());
        let one = tiles(&[128]);
        assert_eq!((one.short_row_tiles, one.short.len(), one.long.len()), (8, 1, 0));
    }

    #[test]
    fn one_longer_chunk_does_not_slow_a_thousand_short_ones() {
        let mut lens = vec![8; 1000];
        lens.push(100);
        let tiles = tiles(&lens);
        assert_eq!((tiles.short_row_tiles, tiles.short.len(), tiles.long.len()), (4, 1000, 2));
    }

    #[test]
    fn no_chunk_has_no_entry() {
        for lens in [&[][..], &[0, 0, 0]] {
            let tiles = tiles(lens);
            assert!(tiles.short.is_empty() && tiles.long.is_empty());
            assert_eq!((tiles.bias_rows, tiles.to_string()), (0, "no chunk".into()));
        }
    }

    #[test]
    fn tiles_of_the_longest_chunks_come_first() {
        let tiles = tiles(&[200, 8, 4096, 300]);
        let lens: Vec<u32> = tiles.long.iter().map(|t| t.len).collect();
        assert_eq!((lens[0], lens[64], lens[69]), (4096, 300, 200));
        assert!(lens.is_sorted_by(|a, b| a >= b));
    }
}
