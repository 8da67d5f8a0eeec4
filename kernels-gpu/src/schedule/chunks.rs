//! From offsets of chunks in device memory to the work of a block: which rows a chunk has, and which 64-row tile of which chunk a block of
//! the long attention kernels takes. Nobody need know the lengths beforehand, and nothing is out of bounds whatever the offsets hold.

use crate::config::attention::LONG_TILE_ROWS;
use crate::config::attention_flash::TILE_ROWS as FLASH_TILE_ROWS;

/// Rows of one chunk of the packed tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRows {
    /// First row.
    pub start: u32,
    /// Number of rows, 0 if the offsets break a rule.
    pub len: u32,
    /// The offsets decrease, lie outside of `0..=total_seq_len`, do not start at 0, or are more than `max_chunk_len` apart.
    pub breaks_a_rule: bool,
}

/// Rows of chunk `index` between the offsets `start` and `end`. What it returns lies inside `total_seq_len` rows, for any offsets.
#[inline(always)]
pub const fn chunk_rows(index: u32, start: i32, end: i32, total_seq_len: u32, max_chunk_len: u32) -> ChunkRows {
    // A negative offset is one past every total_seq_len.
    let (start, end) = (start as u32, end as u32);
    let ordered = start <= end && end <= total_seq_len && (index > 0 || start == 0);
    let len = end.wrapping_sub(start);
    if ordered && len <= max_chunk_len {
        ChunkRows { start, len, breaks_a_rule: false }
    } else {
        ChunkRows { start: 0, len: 0, breaks_a_rule: true }
    }
}

/// Rows that belong to a chunk, of `total_seq_len` in all, if `last` is the last offset.
#[inline(always)]
pub const fn token_rows(last: i32, total_seq_len: u32) -> u32 {
    if (last as u32) < total_seq_len { last as u32 } else { total_seq_len }
}

/// A numbering of the 64-row tiles of chunks that follows from the offset of each chunk alone: those of the chunk that starts at row `s` with
/// index `c` have the slots from `(s >> row_shift) + per_chunk * c` on. Slots that this leaves between chunks have no tile.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileSlots {
    /// Binary logarithm of the rows of a slot.
    pub row_shift: u32,
    /// Slots that every chunk has besides.
    pub per_chunk: u32,
}

impl TileSlots {
    /// For chunks of any length: `s / 64 + c`. A chunk of `l` rows needs `ceil(l / 64) <= (s + l) / 64 + 1 - s / 64` slots.
    pub const ANY: TileSlots = TileSlots { row_shift: LONG_TILE_ROWS.ilog2(), per_chunk: 1 };
    /// For chunks of at least 32 rows, among any number of shorter ones that have no tiles: `s / 32`. A chunk of `l >= 32` rows needs
    /// `ceil(l / 64) <= l / 32 <= (s + l) / 32 - s / 32` slots.
    pub const LONG: TileSlots = TileSlots { row_shift: LONG_TILE_ROWS.ilog2() - 1, per_chunk: 0 };
    /// Least length of a chunk that [`TileSlots::LONG`] has slots for.
    pub const LONG_MIN_ROWS: u32 = 1 << TileSlots::LONG.row_shift;
    /// [`TileSlots::ANY`] for the 128-row tiles of the Hopper kernels for long chunks: `s / 128 + c`.
    pub const FLASH_ANY: TileSlots = TileSlots { row_shift: FLASH_TILE_ROWS.ilog2(), per_chunk: 1 };
    /// [`TileSlots::LONG`] for them: `s / 64`.
    pub const FLASH_LONG: TileSlots = TileSlots { row_shift: FLASH_TILE_ROWS.ilog2() - 1, per_chunk: 0 };
    /// Least length of a chunk that [`TileSlots::FLASH_LONG`] has slots for.
    pub const FLASH_LONG_MIN_ROWS: u32 = 1 << TileSlots::FLASH_LONG.row_shift;

    /// First slot of the chunk `index` that starts at row `start`.
    #[inline(always)]
    pub const fn first(self, start: u32, index: u32) -> u32 {
        (start >> self.row_shift).wrapping_add(self.per_chunk.wrapping_mul(index))
    }

    /// Slots in all: every tile's is below.
    pub const fn count(self, total_seq_len: u32, num_chunks: u32) -> u32 {
        (total_seq_len >> self.row_shift) + self.per_chunk * num_chunks
    }
}

/// A search by the 32 lanes of a warp for the last chunk whose first slot is at most a given one: of 32 chunks that are equally far apart the
/// lanes say which are, and the next round searches between two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSearch {
    /// The chunk is this one or one of the `len - 1` that follow.
    pub first: u32,
    /// See `first`; 1: found.
    pub len: u32,
}

impl ChunkSearch {
    const LANES: u32 = 32;

    /// Among `num_chunks` chunks.
    #[inline(always)]
    pub const fn new(num_chunks: u32) -> ChunkSearch {
        ChunkSearch { first: 0, len: num_chunks }
    }

    #[inline(always)]
    const fn step(self) -> u32 {
        self.len.div_ceil(Self::LANES)
    }

    /// The chunk that lane `lane` looks at in this round; one past the search if the lane has none.
    #[inline(always)]
    pub const fn probe(self, lane: u32) -> u32 {
        self.first + if lane * self.step() < self.len { lane * self.step() } else { self.len }
    }

    /// Whether a lane looks at `probe`.
    #[inline(always)]
    pub const fn has(self, probe: u32) -> bool {
        probe - self.first < self.len
    }

    /// The next round, if the chunks of the first `count` lanes have first slots that are at most the given one.
    #[inline(always)]
    pub const fn narrow(self, count: u32) -> ChunkSearch {
        // Lane 0 always counts if the offsets keep the rules.
        let skipped = count.saturating_sub(1) * self.step();
        let (step, left) = (self.step(), self.len - skipped);
        ChunkSearch { first: self.first + skipped, len: if step < left { step } else { left } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numberings, the least length of a chunk, rows of a tile.
    const NUMBERINGS: [(TileSlots, u32, u32); 4] = [
        (TileSlots::ANY, 1, LONG_TILE_ROWS),
        (TileSlots::LONG, TileSlots::LONG_MIN_ROWS, LONG_TILE_ROWS),
        (TileSlots::FLASH_ANY, 1, FLASH_TILE_ROWS),
        (TileSlots::FLASH_LONG, TileSlots::FLASH_LONG_MIN_ROWS, FLASH_TILE_ROWS),
    ];

    /// Numbers that look random.
    fn numbers(seed: u64) -> impl FnMut(u64) -> u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        move |below| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        }
    }

    /// What the warp finds.
    fn find(offsets: &[i32], slots: TileSlots, slot: u32) -> u32 {
        let mut search = ChunkSearch::new(offsets.len() as u32 - 1);
        let mut rounds = 0;
        while search.len > 1 {
            let is_below = |lane| {
                let probe = search.probe(lane);
                search.has(probe) && slots.first(offsets[probe as usize] as u32, probe) <= slot
            };
            search = search.narrow((0..32).filter(|&lane| is_below(lane)).count() as u32);
            rounds += 1;
            assert!(rounds <= 7);
        }
        search.first
    }

    /// The tile of each slot, as blocks find it: chunk and first row, relative to the chunk's.
    fn tiles(
        offsets: &[i32],
        total: u32,
        (slots, min_rows, tile_rows): (TileSlots, u32, u32),
    ) -> Vec<Option<(u32, u32)>> {
        let num_chunks = offsets.len() as u32 - 1;
        let tile = |slot| {
            let c = find(offsets, slots, slot);
            let rows = chunk_rows(c, offsets[c as usize], offsets[c as usize + 1], total, total);
            let first = tile_rows.wrapping_mul(slot.wrapping_sub(slots.first(rows.start, c)));
            (rows.len >= min_rows && first < rows.len).then_some((c, first))
        };
        (0..slots.count(total, num_chunks)).map(tile).collect()
    }

    #[test]
    fn every_tile_has_one_slot_in_order() {
        for seed in 0..300 {
            let mut below = numbers(seed);
            let mut offsets = vec![0i32];
            for _ in 0..1 + below(80) {
                let len = match below(6) {
                    0 => 0,
                    1 => 1,
                    2 => 30 + below(6),
                    3 => 60 + below(10),
                    4 => 120 + below(20),
                    _ => below(1500),
                };
                offsets.push(offsets[offsets.len() - 1] + len as i32);
            }
            let total = *offsets.last().unwrap() as u32 + below(70) as u32;
            for numbering @ (slots, min_rows, tile_rows) in NUMBERINGS {
                let expected: Vec<(u32, u32)> = (0u32..)
                    .zip(offsets.windows(2))
                    .map(|(c, w)| (c, (w[1] - w[0]) as u32))
                    .filter(|(_, len)| *len >= min_rows)
                    .flat_map(|(c, len)| (0..len).step_by(tile_rows as usize).map(move |first| (c, first)))
                    .collect();
                let found: Vec<_> = tiles(&offsets, total, numbering).into_iter().flatten().collect();
                assert_eq!(found, expected, "{slots:?}, {offsets:?}");
            }
        }
    }

    #[test]
    fn seventy_thousand_chunks_take_four_rounds() {
        let mut search = ChunkSearch::new(70_000);
        for rounds in 1.. {
            search = search.narrow(32.min(search.len.div_ceil(search.step())));
            if search.len == 1 {
                assert_eq!((search.first, rounds), (69_999, 4));
                return;
            }
        }
    }

    #[test]
    fn any_offsets_give_rows_inside_and_tiles_that_nobody_else_has() {
        for seed in 0..300 {
            let mut below = numbers(1000 + seed);
            let num_chunks = 1 + below(60) as u32;
            let total = 1 + below(2000) as u32;
            let garbage = |x: u64| match x % 5 {
                0 => i32::MIN,
                1 => i32::MAX,
                2 => -1,
                _ => (x % 3000) as i32,
            };
            let offsets: Vec<i32> = (0..=num_chunks).map(|_| garbage(below(1 << 20))).collect();
            for (slots, _, tile_rows) in NUMBERINGS {
                let mut found: Vec<_> = tiles(&offsets, total, (slots, 1, tile_rows)).into_iter().flatten().collect();
                for (c, first) in &found {
                    let rows = chunk_rows(*c, offsets[*c as usize], offsets[*c as usize + 1], total, total);
                    assert!(*c < num_chunks && *first < rows.len && rows.start + rows.len <= total);
                }
                let count = found.len();
                found.sort_unstable();
                found.dedup();
                assert_eq!(found.len(), count);
            }
            assert!(token_rows(offsets[num_chunks as usize], total) <= total);
        }
    }

    #[test]
    fn offsets_that_break_a_rule_are_told_apart() {
        let ok = |start, len| ChunkRows { start, len, breaks_a_rule: false };
        assert_eq!(chunk_rows(0, 0, 5, 9, 5), ok(0, 5));
        assert_eq!(chunk_rows(3, 5, 5, 9, 5), ok(5, 0));
        assert_eq!(chunk_rows(3, 9, 9, 9, 0), ok(9, 0));
        for (index, start, end) in [(0, 1, 5), (1, 5, 4), (1, 5, 10), (1, -1, 3), (1, 3, -1), (1, 0, 6), (1, -5, -3)] {
            let rows = chunk_rows(index, start, end, 9, 5);
            assert!(rows.breaks_a_rule && rows.len == 0, "{index} {start} {end}");
        }
    }
}
