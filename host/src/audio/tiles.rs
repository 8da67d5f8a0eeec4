//! Which attention kernels run, and how many blocks of them: from bounds of the chunks, with lengths as a hint of what is fastest. Pure.
use std::fmt;

use attn_backward_kernels::config::attention as config;
use attn_backward_kernels::schedule::chunks::TileSlots;

use super::Capacity;
use crate::Target;
use crate::gpu::ModuleKind;

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

/// Blocks of the attention kernels, each of them once for every head. They read `cu_seqlens` themselves, so that this is right for any chunks
/// inside the capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionTiles {
    capacity: Capacity,
    total_seq_len: usize,
    /// Size of the short kernel, which takes the chunks that it can hold, in 16-row tiles: one of `SHORT_ROW_TILES`. `None`: it does not run,
    /// and the long kernels take every chunk.
    short_row_tiles: Option<u32>,
    /// Where the long kernels' tiles lie among their blocks. `None`: they do not run, as no chunk is that long.
    long_slots: Option<TileSlots>,
    /// Whether the long kernels are [`FLASH_KERNELS`], of 128-row tiles, else [`LONG_KERNELS`], of 64-row tiles.
    flash: bool,
}

impl AttentionTiles {
    /// The kernels that are fastest for chunks of these lengths on `target`, among those that are right for every chunk inside of `capacity`.
    pub fn new(
        capacity: Capacity,
        total_seq_len: usize,
        lens: impl Iterator<Item = usize> + Clone,
        num_heads: usize,
        target: &Target,
    ) -> AttentionTiles {
        let lens = lens.filter(|&len| len > 0);
        let blocks = Blocks { num_heads, num_sms: target.num_sms, max_chunk_len: capacity.max_chunk_len };
        let cheapest = config::SHORT_ROW_TILES
            .into_iter()
            .filter(|&row_tiles| config::short_shared_bytes(row_tiles) as usize <= target.max_shared_bytes)
            .map(|row_tiles| (row_tiles, blocks.cost_us(row_tiles, lens.clone())))
            .min_by(|a, b| a.1.total_cmp(&b.1));
        // Where all chunks are long, a short kernel would only cost its launch.
        let holds_some = |&row_tiles: &u32| {
            lens.clone().next().is_none() || lens.clone().any(|len| len <= config::short_rows(row_tiles) as usize)
        };
        let short_row_tiles = cheapest.map(|(row_tiles, _)| row_tiles).filter(holds_some);
        let short_rows = short_row_tiles.map_or(0, config::short_rows);
        let mut tiles = AttentionTiles { capacity, total_seq_len, short_row_tiles, long_slots: None, flash: false };
        if short_row_tiles.is_none() || capacity.max_chunk_len.min(total_seq_len) > short_rows as usize {
            let count = |slots: &TileSlots| slots.count(total_seq_len as u32, capacity.num_chunks as u32);
            let long_rows: usize = lens.clone().filter(|&len| len > short_rows as usize).sum();
            let worth_it = long_rows > FLASH_ROWS && lens.clone().any(|len| len > FLASH_CHUNK_LEN);
            tiles.flash = target.module == ModuleKind::Hopper && worth_it;
            // what the long kernels leave to the short one has no slots of the second numbering
            let (both, min_rows) = if tiles.flash {
                ([TileSlots::FLASH_ANY, TileSlots::FLASH_LONG], TileSlots::FLASH_LONG_MIN_ROWS)
            } else {
                ([TileSlots::ANY, TileSlots::LONG], TileSlots::LONG_MIN_ROWS)
            };
            let allowed = if short_rows + 1 >= min_rows { &both[..] } else { &both[..1] };
            tiles.long_slots = allowed.iter().min_by_key(|slots| count(slots)).copied();
        }
        tiles
    }

    /// The short kernel of `row_tiles` row tiles for every chunk: none is longer than it takes.
    pub(super) fn of_short_kernel(capacity: Capacity, total_seq_len: usize, row_tiles: u32) -> AttentionTiles {
        AttentionTiles { capacity, total_seq_len, short_row_tiles: Some(row_tiles), long_slots: None, flash: false }
    }

    /// Whether there is no row, and nothing to launch.
    fn is_empty(&self) -> bool {
        self.total_seq_len == 0
    }

    /// Size of the short kernel in 16-row tiles, if it runs.
    pub fn short_row_tiles(&self) -> Option<u32> {
        self.short_row_tiles.filter(|_| !self.is_empty())
    }

    /// Where the long kernels' tiles lie among their blocks, if they run.
    pub fn long_slots(&self) -> Option<TileSlots> {
        self.long_slots.filter(|_| !self.is_empty())
    }

    /// Whether the Hopper module's long kernels are those that run.
    pub fn flash(&self) -> bool {
        self.flash && self.long_slots().is_some()
    }

    /// Chunks of at most this many rows are the short kernel's; 0: it does not run.
    pub fn short_rows(&self) -> u32 {
        self.short_row_tiles().map_or(0, config::short_rows)
    }

    /// Bounds of the chunks that the kernels take, which are not below those that were asked for.
    pub fn capacity(&self) -> Capacity {
        let short_rows = self.short_row_tiles.map_or(0, config::short_rows) as usize;
        let longest = if self.long_slots.is_some() { self.total_seq_len } else { short_rows.min(self.total_seq_len) };
        Capacity { max_chunk_len: longest, ..self.capacity }
    }

    /// Blocks of the short kernel for each head: one a chunk, and one at least, since padding rows are its work too.
    pub fn short_blocks(&self) -> u32 {
        self.short_row_tiles().map_or(0, |_| (self.capacity.num_chunks as u32).max(1))
    }

    /// Blocks of each long kernel for each head: one a slot.
    pub fn long_blocks(&self) -> u32 {
        let count = |slots: TileSlots| slots.count(self.total_seq_len as u32, self.capacity.num_chunks as u32);
        self.long_slots().map_or(0, |slots| count(slots).max(1))
    }

    /// Rows of `bias_partials`: one for each block of the short kernel, then one for each of a long one.
    pub fn bias_rows(&self) -> usize {
        self.short_blocks() as usize + self.long_blocks() as usize
    }

    /// Names of the kernels that run, in order.
    pub fn kernels(&self) -> impl Iterator<Item = String> {
        let short = self.short_row_tiles().map(short_kernel);
        let long = match (self.long_slots(), self.flash) {
            (None, _) => &[][..],
            (Some(_), true) => &FLASH_KERNELS,
            (Some(_), false) => &LONG_KERNELS,
        };
        short.into_iter().chain(long.iter().copied().map(String::from))
    }
}

/// Name of the short kernel of this size.
pub fn short_kernel(row_tiles: u32) -> String {
    format!("attention_short_{}", config::short_rows(row_tiles))
}

/// How many blocks an entry makes, and what runs them.
struct Blocks {
    num_heads: usize,
    num_sms: usize,
    max_chunk_len: usize,
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
        let short_rows = config::short_rows(row_tiles) as usize;
        let (mut short, mut long_pairs) = (0usize, 0f64);
        for len in lens {
            if len <= short_rows {
                short += 1;
            } else {
                long_pairs += (len.div_ceil(config::LONG_TILE_ROWS as usize) as f64).powi(2);
            }
        }
        let entries_per_sm = self.num_heads as f64 / self.num_sms.max(1) as f64;
        let waves = short as f64 * entries_per_sm / f64::from(blocks_per_sm);
        let short_us = if short == 0 { 0.0 } else { Self::SHORT_WAVE_US * waves.max(1.0) };
        let long_us = Self::LONG_PAIR_US * long_pairs * entries_per_sm;
        short_us + if self.max_chunk_len > short_rows { Self::LONG_LAUNCHES_US + long_us } else { 0.0 }
    }
}

impl fmt::Display for AttentionTiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (short, long) = (self.short_blocks(), self.long_blocks());
        let rows = self.short_rows();
        let name = if self.flash { "attention_flash" } else { "attention_long" };
        match (short, long) {
            (0, 0) => write!(f, "no row"),
            (short, 0) => write!(f, "attention_short_{rows}, {short} blocks a head"),
            (0, long) => write!(f, "{name}, {long} blocks a head"),
            (short, long) => {
                write!(f, "attention_short_{rows} on chunks of at most {rows} rows, {short} blocks a head; ")?;
                write!(f, "{name} on longer ones, {long} blocks a head")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn target() -> Target {
        Target::h200(ModuleKind::Portable)
    }

    /// For chunks of these lengths, known beforehand.
    fn tiles_on(lens: &[usize], num_heads: usize, target: &Target) -> AttentionTiles {
        let capacity = Capacity { num_chunks: lens.len(), max_chunk_len: lens.iter().copied().max().unwrap_or(0) };
        AttentionTiles::new(capacity, lens.iter().sum(), lens.iter().copied(), num_heads, target)
    }

    fn tiles(lens: &[usize]) -> AttentionTiles {
        tiles_on(lens, 20, &target())
    }

    /// Rows of the short kernel, blocks of it, blocks of the long kernels.
    fn blocks(tiles: &AttentionTiles) -> (u32, u32, u32) {
        (tiles.short_rows(), tiles.short_blocks(), tiles.long_blocks())
    }

    proptest! {
        #[test]
        fn every_chunk_inside_the_capacity_has_a_kernel_that_has_slots_for_it(
            num_chunks in 0usize..300,
            max_chunk_len in 0usize..4000,
            total_seq_len in 1usize..100_000,
            lens in prop::collection::vec(prop_oneof![4 => 0usize..200, 1 => 200usize..2000], 0..40),
            num_heads in 1usize..40,
            max_shared_bytes in prop::sample::select(vec![0, 48 << 10, 99 << 10, 163 << 10, 227 << 10]),
            module in prop::sample::select(vec![ModuleKind::Portable, ModuleKind::Hopper]),
        ) {
            let capacity = Capacity { num_chunks, max_chunk_len };
            let target = Target { max_shared_bytes, module, ..target() };
            let lens = lens.into_iter().map(|len| len.min(max_chunk_len));
            let tiles = AttentionTiles::new(capacity, total_seq_len, lens, num_heads, &target);
            let taken = tiles.capacity();
            prop_assert!(taken.num_chunks == num_chunks && taken.max_chunk_len >= max_chunk_len.min(total_seq_len));
            if let Some(row_tiles) = tiles.short_row_tiles() {
                prop_assert!(config::short_shared_bytes(row_tiles) as usize <= max_shared_bytes);
                prop_assert!(tiles.short_blocks() as usize >= num_chunks && tiles.short_blocks() > 0);
            } else {
                // blocks of the long kernels look at each chunk, then
                let any = if tiles.flash() { TileSlots::FLASH_ANY } else { TileSlots::ANY };
                prop_assert!(tiles.long_slots() == Some(any) && tiles.long_blocks() as usize >= num_chunks);
            }
            if let Some(slots) = tiles.long_slots() {
                prop_assert!(slots.per_chunk == 1 || tiles.short_rows() + 1 >= 1 << slots.row_shift);
                prop_assert!(tiles.long_blocks() >= slots.count(total_seq_len as u32, num_chunks as u32));
                prop_assert!(tiles.long_blocks() as usize <= total_seq_len / 32 + 1 || tiles.short_rows() == 0);
            }
        }
    }

    #[test]
    fn more_entries_than_a_16_bit_grid_holds() {
        let tiles = tiles(&vec![1; 70_000]);
        assert_eq!((blocks(&tiles), tiles.bias_rows()), ((64, 70_000, 0), 70_000));
    }

    #[test]
    fn equal_chunks_take_the_smallest_kernel_that_holds_them() {
        for (len, rows) in [(1, 64), (64, 64), (65, 80), (80, 80), (81, 96), (96, 96), (97, 128), (128, 128)] {
            assert_eq!(blocks(&tiles(&[len; 16])), (rows, 16, 0), "{len}");
        }
        assert_eq!(blocks(&tiles(&[129; 16])), (0, 0, 129 * 16 / 64 + 16));
        assert_eq!(blocks(&tiles(&[128])), (128, 1, 0));
    }

    #[test]
    fn one_longer_chunk_does_not_slow_a_thousand_short_ones() {
        let mut lens = vec![8; 1000];
        lens.push(100);
        assert_eq!(blocks(&tiles(&lens)), (64, 1001, 8100 / 32));
    }

    #[test]
    fn many_short_chunks_do_not_multiply_the_blocks_of_a_long_one() {
        let mut lens = vec![1; 16_384];
        lens.push(16_384);
        assert_eq!(blocks(&tiles(&lens)), (64, 16_385, 1024));
    }

    #[test]
    fn no_row_has_no_block_and_no_chunk_has_one_for_the_padding() {
        for lens in [&[][..], &[0, 0, 0]] {
            let tiles = tiles(lens);
            assert_eq!((tiles.bias_rows(), tiles.kernels().count(), tiles.to_string()), (0, 0, "no row".into()));
        }
        let none = Capacity { num_chunks: 0, max_chunk_len: 0 };
        let tiles = AttentionTiles::new(none, 5, [].into_iter(), 20, &target());
        assert_eq!((tiles.short_blocks(), tiles.long_blocks()), (1, 0));
    }
}
