//! Deals the items of a tiling to the blocks, longest first, and plays the lists on the cost model.
//!
//! The search and the plan use the same function, so a plan's prediction is that of the lists it was chosen for.

use attn_backward_kernels::config::wgmma::groups_per_stage;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::cost::{Cost, PUBLISH_NS, reduce_ns};
use super::lead::Lead;
use super::tiling::{KSplit, Role, TileGroup};

/// One item a tile of a group, all of the same cost.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Index of the group.
    pub group: usize,
    /// What the items do.
    pub role: Role,
    /// First and last + 1 k-block.
    pub k_blocks: (u32, u32),
    /// Cost of an item.
    ns: u64,
    /// First of the run's items among all.
    first: usize,
    /// Number of items.
    count: usize,
    /// Turn of the product.
    turn: usize,
}

/// An item of a block's list.
#[derive(Clone, Copy, Debug)]
pub enum Scheduled {
    /// Tile `tile` of a run's group.
    Tile {
        /// The run.
        run: Run,
        /// Index of the tile in its group.
        tile: usize,
    },
    /// Adds the parts of some 8-column groups of a tile.
    Reduce {
        /// Index of the group.
        group: usize,
        /// Index of the tile in its group.
        tile: usize,
        /// First 8-column group.
        first: u32,
        /// 8-column groups.
        count: u32,
    },
}

/// What the cost model says of the lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// End of the last block.
    pub makespan_ns: u64,
    /// Mean over the blocks, waits included.
    pub mean_ns: u64,
}

/// The runs of all groups, turn by turn, longest items first, and the number of items.
pub fn runs(groups: &[TileGroup], lead: &Lead, cost: impl Fn(&TileGroup) -> Cost) -> (Vec<Run>, usize) {
    let mut runs = Vec::new();
    for (index, group) in groups.iter().enumerate() {
        let cost = cost(group);
        for (role, range) in group.split.ranges(group.k_blocks) {
            let rest = match role {
                Role::Whole => cost.tile,
                Role::Part(_) => cost.part,
                Role::Owner => cost.tile + u64::from(group.split.parts()) * cost.add,
            };
            let ns = u64::from(range.end - range.start) * cost.k_block + rest;
            let k_blocks = (range.start, range.end);
            let turn = lead.turn(group.product);
            runs.push(Run { group: index, role, k_blocks, ns, first: 0, count: group.len(), turn });
        }
    }
    runs.sort_by_key(|run| (run.turn, Reverse(run.ns))); // stable: equal costs keep the products' order
    let mut items = 0;
    for run in &mut runs {
        run.first = items;
        items += run.count;
    }
    (runs, items)
}

/// Work of all runs and of `lead` (without waits and reduce items), and the longest item.
pub fn lower_bound_ns(runs: &[Run], lead: &Lead, blocks: usize) -> u64 {
    let work: u64 = runs.iter().map(|run| run.ns * run.count as u64).sum();
    let longest = runs.iter().map(|run| run.ns).max().unwrap_or(0);
    ((work + lead.done_ns.iter().sum::<u64>()) / blocks as u64).max(longest)
}

/// Smallest load first, then the smallest block number.
struct Loads(BinaryHeap<Reverse<(u64, usize)>>);

impl Loads {
    fn new(loads: impl Iterator<Item = u64>) -> Self {
        Loads(loads.enumerate().map(|(block, load)| Reverse((load, block))).collect())
    }

    /// The least loaded block, which does `ns` of work from `ready` at the earliest.
    fn take(&mut self, ready: u64, ns: u64) -> usize {
        let Some(mut least) = self.0.peek_mut() else { return 0 };
        let Reverse((load, block)) = *least;
        *least = Reverse((load.max(ready) + ns, block)); // sinks to its place when the guard drops
        block
    }
}

/// Deals the runs to the blocks of `lead` (at least 1) and calls `emit(block, item)` in an order in which each block's items are its list: turn by
/// turn parts, whole tiles, owners; then reduce items.
pub fn play(
    groups: &[TileGroup],
    (runs, items): (&[Run], usize),
    lead: &Lead,
    cost: impl Fn(&TileGroup) -> Cost,
    mut emit: impl FnMut(usize, Scheduled),
) -> Times {
    let mut clock = lead.done_ns.clone();
    let blocks = clock.len();
    let mut block_of = Vec::with_capacity(items);
    // When the last part of each tile is done.
    let mut parts_done: Vec<Vec<u64>> =
        groups.iter().map(|g| if g.split.parts() > 0 { vec![0; g.len()] } else { Vec::new() }).collect();
    for runs in runs.chunk_by(|a, b| a.turn == b.turn) {
        let mut loads = Loads::new(clock.iter().copied());
        for run in runs {
            let group = &groups[run.group];
            block_of.extend((0..run.count).map(|tile| loads.take(lead.ready(group, tile), run.ns)));
        }
        for run in runs.iter().filter(|run| matches!(run.role, Role::Part(_))) {
            for tile in 0..run.count {
                let block = block_of[run.first + tile];
                clock[block] = clock[block].max(lead.ready(&groups[run.group], tile)) + run.ns;
                let done = &mut parts_done[run.group][tile];
                *done = clock[block].max(*done);
                emit(block, Scheduled::Tile { run: *run, tile });
            }
        }
        for run in runs.iter().filter(|run| run.role == Role::Whole) {
            for tile in 0..run.count {
                let block = block_of[run.first + tile];
                clock[block] = clock[block].max(lead.ready(&groups[run.group], tile)) + run.ns;
                emit(block, Scheduled::Tile { run: *run, tile });
            }
        }
        for run in runs.iter().filter(|run| run.role == Role::Owner) {
            let group = &groups[run.group];
            let cost = cost(group);
            let after_wait = cost.tile + u64::from(group.split.parts()) * cost.add;
            for tile in 0..run.count {
                let block = block_of[run.first + tile];
                let multiplied = clock[block].max(lead.ready(group, tile)) + run.ns - after_wait;
                clock[block] = multiplied.max(parts_done[run.group][tile] + PUBLISH_NS) + after_wait;
                emit(block, Scheduled::Tile { run: *run, tile });
            }
        }
    }
    reduce(groups, &parts_done, &mut clock, &mut emit);
    let makespan_ns = clock.iter().copied().max().unwrap_or(0);
    Times { makespan_ns, mean_ns: clock.iter().sum::<u64>() / blocks as u64 }
}

/// Deals the reduce items of all groups that need them, about one for each block.
fn reduce(groups: &[TileGroup], parts_done: &[Vec<u64>], clock: &mut [u64], emit: &mut impl FnMut(usize, Scheduled)) {
    let reduced = |group: &&TileGroup| matches!(group.split, KSplit::Parts(_));
    let total: usize = groups.iter().filter(reduced).map(|g| g.len() * (g.width / 8) as usize).sum();
    if total == 0 {
        return;
    }
    let fair = total.div_ceil(clock.len()) as u32;
    let mut loads = Loads::new(clock.iter().copied());
    for (index, group) in groups.iter().enumerate().filter(|(_, g)| reduced(g)) {
        let parts = group.split.parts();
        let all = group.width / 8;
        let step = fair.next_multiple_of(groups_per_stage(parts)).min(all);
        for (tile, done) in parts_done[index].iter().enumerate() {
            for first in (0..all).step_by(step as usize) {
                let count = step.min(all - first);
                let ns = reduce_ns(count, parts);
                let block = loads.take(0, ns);
                clock[block] = clock[block].max(done + PUBLISH_NS) + ns;
                emit(block, Scheduled::Reduce { group: index, tile, first, count });
            }
        }
    }
}
