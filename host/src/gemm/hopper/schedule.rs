//! Deals the items of a tiling to the clusters, longest first, and plays the lists on the cost model.
//!
//! Parts go to the first clusters, what waits for them to the others (see [`Item`](attn_backward_kernels::schedule::item::Item)), whole tiles to either.
//! Behind a conversion everything goes to all of them: there clusters wait for each other anyway.
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

/// An item of a cluster's list.
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
    /// End of the last cluster.
    pub makespan_ns: u64,
    /// Mean over the clusters, waits included.
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
pub fn lower_bound_ns(runs: &[Run], lead: &Lead) -> u64 {
    let work: u64 = runs.iter().map(|run| run.ns * run.count as u64).sum();
    let longest = runs.iter().map(|run| run.ns).max().unwrap_or(0);
    ((work + lead.done_ns.iter().sum::<u64>()) / lead.done_ns.len() as u64).max(longest)
}

/// How many of the clusters, the first ones, take parts. Choices: what the parts fill and these shares, in percent, of what whole tiles fill, if all work is spread
/// evenly; the one that ends first. (The suite of operation A, mean of predictions in us: 20 29.9, 33 29.6, 50 29.7, 100 29.8; the better of the two
/// here 29.6; parts anywhere, which would take a cooperative launch, 29.5.)
const SHARES_OF_WHOLE_TILES: [u64; 2] = [33, 100];

/// The choices of how many clusters take parts, each once: at least one, and at least one does not. 0, all clusters take anything, if nothing waits, or behind a
/// conversion.
fn parting_clusters(groups: &[TileGroup], runs: &[Run], lead: &Lead) -> Vec<usize> {
    let clusters = lead.done_ns.len();
    let of = |role: fn(Role) -> bool| runs.iter().filter(|r| role(r.role)).map(|r| r.ns * r.count as u64).sum::<u64>();
    let parts = of(|role| matches!(role, Role::Part(_)));
    let wholes = of(|role| role == Role::Whole);
    let owners = of(|role| role == Role::Owner);
    let reduced = groups.iter().filter(|group| matches!(group.split, KSplit::Parts(_)));
    let reduces: u64 = reduced.map(|g| g.len() as u64 * reduce_ns(g.width / 8, g.split.parts())).sum();
    if parts == 0 || clusters < 2 || lead.converts() {
        return vec![0];
    }
    let all = 100 * (parts + wholes + owners + reduces);
    let choice = |share: u64| (clusters as u64 * (100 * parts + share * wholes) / all) as usize;
    let mut choices: Vec<usize> = SHARES_OF_WHOLE_TILES.map(choice).map(|n| n.clamp(1, clusters - 1)).into();
    choices.dedup();
    choices
}

/// Which clusters may take an item.
#[derive(Clone, Copy)]
enum Side {
    /// Those that take parts.
    Parting,
    /// Those that wait for parts.
    Waiting,
    /// All.
    Either,
}

/// Loads of the clusters of either side: smallest first, then the smallest cluster number.
struct Loads {
    parting: BinaryHeap<Reverse<(u64, usize)>>,
    waiting: BinaryHeap<Reverse<(u64, usize)>>,
}

impl Loads {
    /// The first `parting` clusters take parts; 0: all of them, and all wait.
    fn new(loads: &[u64], parting: usize) -> Self {
        let mut clusters = loads.iter().enumerate().map(|(cluster, load)| Reverse((*load, cluster)));
        Loads { parting: clusters.by_ref().take(parting).collect(), waiting: clusters.collect() }
    }

    /// The least load of all clusters.
    fn least(&self) -> u64 {
        let least = |heap: &BinaryHeap<Reverse<(u64, usize)>>| heap.peek().map_or(u64::MAX, |Reverse((load, _))| *load);
        least(&self.parting).min(least(&self.waiting))
    }

    /// The least loaded cluster of a side, which does `ns` of work from `ready` at the earliest.
    fn take(&mut self, side: Side, ready: u64, ns: u64) -> usize {
        let is_parting = match (side, self.parting.peek(), self.waiting.peek()) {
            (_, None, _) | (Side::Waiting, ..) => false,
            (_, _, None) | (Side::Parting, ..) => true,
            (Side::Either, Some(parting), Some(waiting)) => parting > waiting, // of `Reverse`: the smaller load
        };
        let heap = if is_parting { &mut self.parting } else { &mut self.waiting };
        let Some(mut least) = heap.peek_mut() else { return 0 };
        let Reverse((load, cluster)) = *least;
        *least = Reverse((load.max(ready) + ns, cluster)); // sinks to its place when the guard drops
        cluster
    }
}

/// How many of the clusters take parts so that the last one ends first, and when it ends in ns.
pub fn best_parting(
    groups: &[TileGroup],
    runs: (&[Run], usize),
    lead: &Lead,
    cost: impl Fn(&TileGroup) -> Cost,
) -> (usize, u64) {
    let choices = parting_clusters(groups, runs.0, lead).into_iter();
    let ends = choices.map(|parting| (parting, play(groups, runs, lead, parting, &cost, |_, _| {}).makespan_ns));
    ends.min_by_key(|(_, makespan_ns)| *makespan_ns).unwrap_or((0, 0)) // there is a choice
}

/// Deals the runs to the clusters of `lead` (at least 1), parts to the first `parting` of them and what waits for parts to the others (0: anything to
/// all), and calls `emit(cluster, item)` in an order in which each cluster's items are its list: turn by turn whole tiles of later turns that fit in before it,
/// parts, whole tiles, owners; then reduce items.
pub fn play(
    groups: &[TileGroup],
    (runs, items): (&[Run], usize),
    lead: &Lead,
    parting: usize,
    cost: impl Fn(&TileGroup) -> Cost,
    mut emit: impl FnMut(usize, Scheduled),
) -> Times {
    let mut clock = lead.done_ns.clone();
    let clusters = clock.len();
    let mut cluster_of = vec![0; items];
    // Tiles of each run that were dealt before its turn, the first ones.
    let mut early = vec![0; runs.len()];
    // When the last part of each tile is done.
    let mut parts_done: Vec<Vec<u64>> =
        groups.iter().map(|g| if g.split.parts() > 0 { vec![0; g.len()] } else { Vec::new() }).collect();
    let mut next_run = 0;
    for turn in runs.chunk_by(|a, b| a.turn == b.turn) {
        let first_run = next_run;
        next_run += turn.len();
        if lead.converts() {
            // Tiles of later turns that are ready, and done before this one can begin.
            let begin = turn.iter().map(|run| lead.ready(&groups[run.group], 0)).min().unwrap_or(0);
            let mut loads = Loads::new(&clock, parting);
            let later = runs.iter().zip(&mut early).skip(next_run);
            for (run, early) in later.filter(|(run, _)| run.role == Role::Whole) {
                while *early < run.count {
                    let ready = lead.ready(&groups[run.group], *early);
                    if loads.least().max(ready) + run.ns > begin {
                        break;
                    }
                    let cluster = loads.take(Side::Either, ready, run.ns);
                    clock[cluster] = clock[cluster].max(ready) + run.ns;
                    emit(cluster, Scheduled::Tile { run: *run, tile: *early });
                    *early += 1;
                }
            }
        }
        let runs = || turn.iter().zip(&early[first_run..]);
        let mut loads = Loads::new(&clock, parting);
        for (run, early) in runs() {
            let group = &groups[run.group];
            let side = match run.role {
                Role::Part(_) => Side::Parting,
                Role::Owner => Side::Waiting,
                Role::Whole => Side::Either,
            };
            for tile in *early..run.count {
                cluster_of[run.first + tile] = loads.take(side, lead.ready(group, tile), run.ns);
            }
        }
        for run in turn.iter().filter(|run| matches!(run.role, Role::Part(_))) {
            for tile in 0..run.count {
                let cluster = cluster_of[run.first + tile];
                clock[cluster] = clock[cluster].max(lead.ready(&groups[run.group], tile)) + run.ns;
                let done = &mut parts_done[run.group][tile];
                *done = clock[cluster].max(*done);
                emit(cluster, Scheduled::Tile { run: *run, tile });
            }
        }
        for (run, early) in runs().filter(|(run, _)| run.role == Role::Whole) {
            for tile in *early..run.count {
                let cluster = cluster_of[run.first + tile];
                clock[cluster] = clock[cluster].max(lead.ready(&groups[run.group], tile)) + run.ns;
                emit(cluster, Scheduled::Tile { run: *run, tile });
            }
        }
        for run in turn.iter().filter(|run| run.role == Role::Owner) {
            let group = &groups[run.group];
            let cost = cost(group);
            let after_wait = cost.tile + u64::from(group.split.parts()) * cost.add;
            for tile in 0..run.count {
                let cluster = cluster_of[run.first + tile];
                let multiplied = clock[cluster].max(lead.ready(group, tile)) + run.ns - after_wait;
                clock[cluster] = multiplied.max(parts_done[run.group][tile] + PUBLISH_NS) + after_wait;
                emit(cluster, Scheduled::Tile { run: *run, tile });
            }
        }
    }
    reduce(groups, &parts_done, &mut clock, parting, &mut emit);
    let makespan_ns = clock.iter().copied().max().unwrap_or(0);
    Times { makespan_ns, mean_ns: clock.iter().sum::<u64>() / clusters as u64 }
}

/// Deals the reduce items of all groups that need them, about one for each cluster behind the first `parting`.
fn reduce(
    groups: &[TileGroup],
    parts_done: &[Vec<u64>],
    clock: &mut [u64],
    parting: usize,
    emit: &mut impl FnMut(usize, Scheduled),
) {
    let reduced = |group: &&TileGroup| matches!(group.split, KSplit::Parts(_));
    let total: usize = groups.iter().filter(reduced).map(|g| g.len() * (g.width / 8) as usize).sum();
    if total == 0 {
        return;
    }
    let fair = total.div_ceil(clock.len() - parting) as u32;
    let mut loads = Loads::new(clock, parting);
    for (index, group) in groups.iter().enumerate().filter(|(_, g)| reduced(g)) {
        let parts = group.split.parts();
        let all = group.width / 8;
        let step = fair.next_multiple_of(groups_per_stage(parts)).min(all);
        for (tile, done) in parts_done[index].iter().enumerate() {
            for first in (0..all).step_by(step as usize) {
                let count = step.min(all - first);
                let ns = reduce_ns(count, parts);
                let cluster = loads.take(Side::Waiting, 0, ns);
                clock[cluster] = clock[cluster].max(done + PUBLISH_NS) + ns;
                emit(cluster, Scheduled::Reduce { group: index, tile, first, count });
            }
        }
    }
}
