//! Chooses the tiling of every product: coordinate descent over tile widths and K cuts, scored by the cost model.
//!
//! Products of equal shape are cut alike, as two halves that may differ. The effort is counted in items played, not in time, so
//! the same shapes always get the same plan.

use attn_backward_kernels::config::wgmma::{CLUSTER_M, MAX_SPLITS};

use super::Accumulation;
use super::cost::Cost;
use super::lead::Lead;
use super::schedule::{best_parting, lower_bound_ns, runs};
use super::tiling::{KSplit, TileGroup, Tiling, all_widths, widths_led_by};
use crate::gemm::ProductShape;

/// Items that a search may play, in each of the ways that parts can be dealt: 10 to 40 ms for operation A; behind a conversion, whose end all products must fit around, more.
const MAX_ITEMS_PLAYED: usize = 500_000;
const MAX_ITEMS_PLAYED_CONVERTING: usize = 1_000_000;
/// Products with more tiles than this many times the clusters are not cut along K: the workspace stays small, and balance needs no help.
const MAX_SPLIT_TILES_PER_CLUSTER: usize = 2;
/// Up to this n all ways to cut it into tile widths are tried.
const MAX_N_FOR_ALL_WIDTHS: usize = 2048;

/// Owner cuts of the deepest products that the search also starts from: a part is `k_blocks / share` deep.
const START_CUTS: [(u32, u32); 2] = [(3, 1), (4, 2)];
/// Cuts of all the deepest products that the search starts from behind a conversion.
const CONVERTING_START_CUTS: [KSplit; 3] = [KSplit::Parts(2), KSplit::Parts(3), KSplit::Parts(4)];
/// A cut along K must win this share of the makespan: it takes workspace, and real waits are longer than the model's.
const LEAST_GAIN_OF_A_CUT: u64 = 200;

/// Whether tiles may be cut along K. Parts need counters that are zero when the launch begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KCuts {
    /// Where the cost model gains by it.
    Allowed,
    /// Nowhere: the launch has no counters.
    Forbidden,
}

/// Which products a round of the descent fits first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    DeepestFirst,
    DeepestLast,
}

/// Whether `tiling` has tiles of width `widest` whose owner leaves `parts` parts of about `k_blocks / share`.
fn is_cut(tiling: &Tiling, widest: u32, k_blocks: u32, (share, parts): (u32, u32)) -> bool {
    let KSplit::Owner { part_k_blocks, parts: found } = tiling.split else { return false };
    let step = split_step(k_blocks);
    tiling.widths[0] == widest && found == parts && (k_blocks / share).abs_diff(part_k_blocks) * 2 < step + 1
}

/// The best tilings found for `products` on the clusters (at least 1) of `lead`.
pub fn search(accumulation: Accumulation, products: &[ProductShape], lead: &Lead, k_cuts: KCuts) -> Vec<Tiling> {
    let mut search = Search { accumulation, products, lead, k_cuts, played: 0 };
    let allowed = accumulation.tile_widths();
    let widest = allowed[0];
    let units = units(accumulation, products);
    let deepest_k_blocks = accumulation.k_blocks(&products[units[0][0]]);
    let options: Vec<Vec<Tiling>> = units.iter().map(|unit| search.options(&products[unit[0]])).collect();
    let led_by = |lead| -> Vec<Tiling> { products.iter().map(|p| Tiling::led_by(lead, p.n, allowed)).collect() };
    // What one step of the descent cannot reach: narrow tiles everywhere, and the deepest products cut before the others are fitted in.
    let mut starts = vec![(led_by(widest), Order::DeepestFirst)];
    for cut in &options[0] {
        if START_CUTS.iter().any(|start| is_cut(cut, widest, deepest_k_blocks, *start)) {
            let mut start = led_by(widest);
            for &product in &units[0] {
                start[product] = cut.clone();
            }
            starts.push((start, Order::DeepestLast));
        }
    }
    if lead.converts() {
        // The deepest products are ready last: cutting one of them alone gains nothing.
        let deepest = |product: &usize| products[*product] == products[units[0][0]];
        for cut in options[0].iter().filter(|cut| CONVERTING_START_CUTS.contains(&cut.split)) {
            let mut start = led_by(widest);
            for product in (0..products.len()).filter(deepest) {
                start[product] = cut.clone();
            }
            starts.push((start, Order::DeepestLast));
        }
    }
    starts.extend(allowed[1..].iter().map(|lead| (led_by(*lead), Order::DeepestFirst)));

    let mut best: Option<(u64, Vec<Tiling>)> = None;
    for (start, order) in starts {
        let Some(score) = search.score(&start, u64::MAX) else { continue };
        let found = search.descend(score, start, order, &units, &options);
        if best.as_ref().is_none_or(|(score, _)| found.0 < *score) {
            best = Some(found);
        }
    }
    best.map_or_else(|| led_by(widest), |(_, tilings)| tilings) // a start is always scored
}

/// The groups of all products.
pub fn groups(accumulation: Accumulation, products: &[ProductShape], tilings: &[Tiling]) -> Vec<TileGroup> {
    let tilings = products.iter().zip(tilings).enumerate();
    tilings.flat_map(|(index, (shape, tiling))| tiling.groups(accumulation, index, shape)).collect()
}

struct Search<'a> {
    accumulation: Accumulation,
    products: &'a [ProductShape],
    lead: &'a Lead,
    k_cuts: KCuts,
    played: usize,
}

impl Search<'_> {
    /// Makespan of a choice; `None` if it is certainly not below `limit`, or the effort is spent.
    fn score(&mut self, tilings: &[Tiling], limit: u64) -> Option<u64> {
        let groups = groups(self.accumulation, self.products, tilings);
        let cost = |group: &TileGroup| Cost::of(self.accumulation, group.width, &self.products[group.product]);
        let (runs, items) = runs(&groups, self.lead, cost);
        let hopeless = lower_bound_ns(&runs, self.lead) >= limit;
        let most = if self.lead.converts() { MAX_ITEMS_PLAYED_CONVERTING } else { MAX_ITEMS_PLAYED };
        let spent = limit != u64::MAX && self.played + items > most;
        if hopeless || spent {
            return None;
        }
        self.played += items;
        Some(best_parting(&groups, (&runs, items), self.lead, cost).1)
    }

    /// Improves one unit after the other until none gets better.
    fn descend(
        &mut self,
        mut score: u64,
        mut tilings: Vec<Tiling>,
        order: Order,
        units: &[Vec<usize>],
        options: &[Vec<Tiling>],
    ) -> (u64, Vec<Tiling>) {
        loop {
            let before = score;
            for i in 0..units.len() {
                let i = if order == Order::DeepestFirst { i } else { units.len() - 1 - i };
                let (unit, options) = (&units[i], &options[i]);
                for option in options {
                    let mut next = tilings.clone();
                    for &product in unit {
                        next[product] = option.clone();
                    }
                    let least_gain = if option.split == KSplit::Whole { 0 } else { score / LEAST_GAIN_OF_A_CUT };
                    if let Some(found) = self.score(&next, score - least_gain)
                        && found < score - least_gain
                    {
                        (score, tilings) = (found, next);
                    }
                }
            }
            if score == before {
                return (score, tilings);
            }
        }
    }

    /// Ways to cut a product, the simple ones first.
    fn options(&self, shape: &ProductShape) -> Vec<Tiling> {
        let allowed = self.accumulation.tile_widths();
        let mut leads: Vec<Vec<u32>> = allowed.iter().map(|lead| widths_led_by(*lead, shape.n, allowed)).collect();
        leads.dedup();
        let all = if shape.n <= MAX_N_FOR_ALL_WIDTHS { all_widths(shape.n, allowed) } else { leads.clone() };
        let whole = |widths, narrow_row_blocks| Tiling { widths, split: KSplit::Whole, narrow_row_blocks };
        let mut options: Vec<Tiling> = all.into_iter().map(|widths| whole(widths, 0)).collect();
        let row_blocks = shape.m.div_ceil(CLUSTER_M as usize);
        if shape.n.is_multiple_of(128) {
            let tails = [1, 2, 4, 8, 16].into_iter().filter(|tail| 2 * tail <= row_blocks);
            options.extend(tails.map(|tail| whole(leads[0].clone(), tail)));
        }
        let k_blocks = self.accumulation.k_blocks(shape);
        for widths in leads.into_iter().filter(|_| self.k_cuts == KCuts::Allowed) {
            if row_blocks * widths.len() <= MAX_SPLIT_TILES_PER_CLUSTER * self.lead.done_ns.len() {
                let splits = splits(k_blocks).into_iter();
                options.extend(splits.map(|split| Tiling { widths: widths.clone(), split, narrow_row_blocks: 0 }));
            }
        }
        options
    }
}

/// Ways to cut `k_blocks`: an owner with up to four parts, or up to 12 parts and reduce items.
fn splits(k_blocks: u32) -> Vec<KSplit> {
    let step = split_step(k_blocks);
    let mut splits = Vec::new();
    for parts in 1..=4 {
        // A part costs 2 us whatever its depth; the owner's own range is at least about as long.
        let longest = k_blocks / (parts + 1) + step;
        splits.extend((4..=longest).step_by(step as usize).map(|part_k_blocks| KSplit::Owner { part_k_blocks, parts }));
    }
    splits.extend(
        [2, 3, 4, 5, 6, 8, 10, MAX_SPLITS].into_iter().filter(|parts| 2 * parts <= k_blocks).map(KSplit::Parts),
    );
    splits.retain(|split| split.fits(k_blocks));
    splits
}

/// Difference of depth between the parts that are tried.
fn split_step(k_blocks: u32) -> u32 {
    k_blocks.div_ceil(30).max(1)
}

/// Indices of products that are cut alike: those of equal shape, in two halves; the deepest first.
fn units(accumulation: Accumulation, products: &[ProductShape]) -> Vec<Vec<usize>> {
    let mut units: Vec<Vec<usize>> = Vec::new();
    for (index, shape) in products.iter().enumerate() {
        match units.iter_mut().find(|unit| products[unit[0]] == *shape) {
            Some(unit) => unit.push(index),
            None => units.push(vec![index]),
        }
    }
    let halves = |unit: Vec<usize>| {
        let (first, second) = unit.split_at(unit.len().div_ceil(2));
        [first.to_vec(), second.to_vec()]
    };
    let mut units: Vec<Vec<usize>> = units.into_iter().flat_map(halves).filter(|unit| !unit.is_empty()).collect();
    units.sort_by_key(|unit| std::cmp::Reverse(accumulation.k_blocks(&products[unit[0]])));
    units
}
