//! Plans of the Hopper grouped GEMM (`wgmma_*`): which block does which tiles, in which order.
//!
//! Pure: made from shapes and the number of SMs alone. The launch fills in addresses: it encodes [`HopperPlan::tensor_maps`], copies
//! [`HopperPlan::items`] to the device once, and for each run zeroes `num_counters` counters (before the kernel: any content of the
//! workspace is then fine, even after a launch that was cut off, and the kernel need not clean up) and launches `num_blocks` blocks of
//! `config::wgmma::THREADS` threads with `config::wgmma::SMEM_BYTES` of dynamic shared memory (`CONVERTING_SMEM_BYTES` and cooperatively behind a
//! [`Lead`], see [`Item`]). Tensors, items and workspace start on
//! 16-byte boundaries (items on 64).

use attn_backward_kernels::config::wgmma::{CLUSTER_SIZE, SLOT_FLOATS, TILE_K, TILE_M};
use attn_backward_kernels::params::{MAX_PRODUCTS, MAX_SEGMENTS, Major, OutputType};
use attn_backward_kernels::params_wgmma::MAX_TENSOR_MAPS;
use attn_backward_kernels::schedule::item::{Item, item_kind};
use std::fmt;

use crate::gemm::ProductShape;

mod accumulation;
mod cost;
mod lead;
mod schedule;
mod search;
mod tensor_map;
#[cfg(test)]
mod tests;
mod tiling;

pub use accumulation::Accumulation;
pub use lead::Lead;
pub use search::KCuts;
pub use tensor_map::{ElementType, Pitches, TensorMapSpec, TensorRole};
pub use tiling::{KSplit, Tiling};

use cost::Cost;
use schedule::{Run, Scheduled, Times};
use tiling::{Role, TileGroup};

/// Whether the Hopper kernel takes this product; the portable one takes all.
///
/// It wants something to compute, n a multiple of 64 and at least 128, m a multiple of 64 if A is MN-major, and extents below 2^31. Plain:
/// segments of a multiple of 64 k if there are several; promoted: three segments.
pub fn supports(accumulation: Accumulation, shape: &ProductShape) -> bool {
    let most = i32::MAX as usize - TILE_K as usize;
    let small = [shape.m, shape.n, shape.k].iter().all(|extent| (1..=most / MAX_SEGMENTS).contains(extent));
    let columns = shape.n.is_multiple_of(64) && shape.n >= 128;
    let rows = shape.a_major == Major::K || shape.m.is_multiple_of(64);
    small && columns && rows && accumulation.supports_segments(shape)
}

/// Whether the Hopper kernel takes these row pitches: each row starts on a 16-byte boundary, given that the first one does.
pub fn supports_pitches(pitches: &Pitches, c_type: OutputType) -> bool {
    let c_bytes = pitches.c * ElementType::from(c_type).bytes();
    let most = 1 << 39;
    [2 * pitches.a, 2 * pitches.b, c_bytes].iter().all(|bytes| bytes.is_multiple_of(16) && *bytes < most)
}

/// Tensor maps of a launch that are not the products': what a conversion takes at most.
pub const LEAD_TENSOR_MAPS: usize = 3;

/// Most tiles, 128 wide, of a plan: a list of 16 MiB, which takes a second to make.
const MAX_TILES: usize = 1 << 18;

/// A schedule of one launch.
#[derive(Clone, Debug)]
pub struct HopperPlan {
    accumulation: Accumulation,
    products: Vec<ProductShape>,
    tilings: Vec<Tiling>,
    num_blocks: usize,
    items: Vec<Item>,
    workspace_floats: usize,
    num_counters: usize,
    converts: bool,
    times: Times,
}

impl HopperPlan {
    /// The best schedule that the search finds for `products` (each of them [supported](supports), at most `MAX_PRODUCTS`) on `num_sms` SMs.
    ///
    /// `None` if there are less than two SMs, the kernel does not take them, or they need more tensor maps than a launch holds, or lists of more than 2^18 tiles.
    pub fn new(accumulation: Accumulation, products: &[ProductShape], num_sms: usize, k_cuts: KCuts) -> Option<Self> {
        Self::after(accumulation, products, &Lead::none(num_sms), k_cuts)
    }

    /// As [`HopperPlan::new`], for a launch that first does what `lead` says on the blocks that it is for.
    pub fn after(accumulation: Accumulation, products: &[ProductShape], lead: &Lead, k_cuts: KCuts) -> Option<Self> {
        let num_clusters = lead.done_ns.len();
        let all = products.iter().all(|shape| supports(accumulation, shape));
        let supported = !products.is_empty() && products.len() <= MAX_PRODUCTS && all;
        let tiles = |p: &ProductShape| p.m.div_ceil(TILE_M as usize).saturating_mul(p.n.div_ceil(128));
        let tiles = products.iter().fold(0usize, |sum, p| sum.saturating_add(tiles(p)));
        let maps: usize = products.iter().map(|shape| num_tensor_maps(accumulation, shape)).sum();
        let fits = tiles <= MAX_TILES && maps <= MAX_TENSOR_MAPS - LEAD_TENSOR_MAPS;
        if !supported || num_clusters == 0 || !fits {
            return None;
        }
        let tilings = search::search(accumulation, products, lead, k_cuts);
        Some(Self::with_tilings(accumulation, products, tilings, lead))
    }

    /// The schedule of given tilings.
    fn with_tilings(accumulation: Accumulation, products: &[ProductShape], tilings: Vec<Tiling>, lead: &Lead) -> Self {
        let groups = search::groups(accumulation, products, &tilings);
        let cost = |group: &TileGroup| Cost::of(accumulation, group.width, &products[group.product]);
        let (runs, num_items) = schedule::runs(&groups, lead, cost);
        let mut lists = Lists::new(accumulation, products, &groups, lead);
        let (parting, _) = schedule::best_parting(&groups, (&runs, num_items), lead, cost);
        let push = |block, item| lists.push(block, item);
        let times = schedule::play(&groups, (&runs, num_items), lead, parting, cost, push);
        let num_blocks = lead.lists.len();
        let Lists { lists, places, .. } = lists;
        let items_per_block = 1 + lists.iter().map(Vec::len).max().unwrap_or(0);
        let mut items = vec![Item::END; num_blocks * items_per_block];
        for (row, list) in items.chunks_exact_mut(items_per_block).zip(&lists) {
            row[..list.len()].copy_from_slice(list);
        }
        HopperPlan {
            accumulation,
            products: products.to_vec(),
            tilings,
            num_blocks,
            items,
            workspace_floats: places.slots * SLOT_FLOATS as usize,
            num_counters: places.counters,
            converts: lead.converts(),
            times,
        }
    }

    /// How it sums.
    pub fn accumulation(&self) -> Accumulation {
        self.accumulation
    }

    /// The products, as given.
    pub fn products(&self) -> &[ProductShape] {
        &self.products
    }

    /// Blocks of the launch.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// `[num_blocks, items_per_block]`, each row ended by an item of 0 k-blocks.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// Items of each block's list, its end included.
    pub fn items_per_block(&self) -> usize {
        self.items.len() / self.num_blocks
    }

    /// fp32 elements of the workspace for parts.
    pub fn workspace_floats(&self) -> usize {
        self.workspace_floats
    }

    /// `u32` counters, to be zeroed before each launch.
    pub fn num_counters(&self) -> usize {
        self.num_counters
    }

    /// Whether the launch makes the operands that it multiplies.
    pub fn converts(&self) -> bool {
        self.converts
    }

    /// Time of a launch with cold caches on an H200, as the cost model has it, in microseconds.
    pub fn predicted_us(&self) -> f64 {
        let memory_us = self.bytes() as f64 / cost::BYTES_PER_US;
        cost::START_NS as f64 / 1e3 + (self.times.makespan_ns as f64 / 1e3).max(memory_us)
    }

    /// Mean over the blocks of the time until a block is done, start excluded, in microseconds.
    pub fn mean_load_us(&self) -> f64 {
        self.times.mean_ns as f64 / 1e3
    }

    /// How each product is cut.
    pub fn tilings(&self) -> &[Tiling] {
        &self.tilings
    }

    /// Every tensor map of the launch, in the order of `WgmmaParams::maps`: of each product A, C, then B: segment
    /// by segment, or both parts in one map. `operand` is the type of A and B; `pitches` has an entry for each product.
    pub fn tensor_maps(&self, operand: ElementType, pitches: &[Pitches]) -> Vec<TensorMapSpec> {
        let mut maps = Vec::new();
        for (product, (shape, pitches)) in self.products.iter().zip(pitches).enumerate() {
            maps.push(TensorMapSpec::a(self.accumulation, product, shape, operand, pitches));
            maps.push(TensorMapSpec::c(product, shape, pitches.c));
            let of = |s| TensorMapSpec::b(self.accumulation, (product, s), shape, operand, pitches);
            maps.extend((0..self.accumulation.num_b_maps(shape)).map(of));
        }
        maps
    }

    /// Bytes of all operands and outputs, each once. Operands that products share count for each of them.
    fn bytes(&self) -> usize {
        let of = |p: &ProductShape| {
            let k = p.k * self.accumulation.num_tensors(p);
            2 * k * (p.m + p.n) + p.m * p.n * ElementType::from(p.c_type).bytes()
        };
        self.products.iter().map(of).sum()
    }
}

/// Workspace slots and counters given out so far.
#[derive(Default)]
struct Places {
    slots: usize,
    counters: usize,
}

/// What the items of a group's tiles have in common.
struct GroupItems {
    /// Product, layout, width, maps, number of parts.
    common: Item,
    /// See [`TileGroup::beside`].
    beside: Option<u32>,
    /// First row and column of each tile of a cluster's first block.
    tiles: Vec<[u32; 2]>,
    first_slot: usize,
    first_counter: usize,
}

/// The lists as they grow.
struct Lists {
    groups: Vec<GroupItems>,
    lists: Vec<Vec<Item>>,
    places: Places,
}

impl Lists {
    fn new(accumulation: Accumulation, products: &[ProductShape], groups: &[TileGroup], lead: &Lead) -> Self {
        let mut places = Places::default();
        let first_maps = first_maps(accumulation, products);
        let group_items = groups.iter().map(|group| {
            let shape = &products[group.product];
            let a_map = first_maps[group.product];
            let parts = group.split.parts();
            let common = Item {
                product: group.product as u32,
                a_major: shape.a_major as u32,
                width: group.width,
                shares_b: u32::from(group.beside.is_none()),
                a_map: a_map as u32,
                c_map: a_map as u32 + 1,
                b_map: a_map as u32 + 2,
                parts,
                ..Item::END
            };
            let items = GroupItems {
                common,
                beside: group.beside,
                tiles: group.tiles(),
                first_slot: places.slots,
                first_counter: places.counters,
            };
            if parts > 0 {
                places.slots += group.len() * CLUSTER_SIZE as usize * slots_per_tile(&common);
                places.counters += group.len() * CLUSTER_SIZE as usize;
            }
            items
        });
        Lists { groups: group_items.collect(), lists: lead.lists.clone(), places }
    }

    /// Adds an item for each block of a cluster.
    fn push(&mut self, cluster: usize, scheduled: Scheduled) {
        for rank in 0..CLUSTER_SIZE as usize {
            self.push_to_block(cluster, rank, scheduled);
        }
    }

    fn push_to_block(&mut self, cluster: usize, rank: usize, scheduled: Scheduled) {
        let (group, tile) = match scheduled {
            Scheduled::Tile { run, tile } => (run.group, tile),
            Scheduled::Reduce { group, tile, .. } => (group, tile),
        };
        let group = &self.groups[group];
        let [m0, n0] = group.tiles[tile];
        let (down, right) = match group.beside {
            None => (rank as u32 * TILE_M, 0),
            Some(distance) => (0, rank as u32 * distance),
        };
        let mut item = Item { m0: m0 + down, n0: n0 + right, ..group.common };
        let tile = CLUSTER_SIZE as usize * tile + rank;
        if item.parts > 0 {
            item.slot = (group.first_slot + tile * slots_per_tile(&group.common)) as u32;
            item.counter = (group.first_counter + tile) as u32;
        }
        match scheduled {
            Scheduled::Tile { run: Run { role, k_blocks: (first, end), .. }, .. } => {
                (item.kind, item.part) = match role {
                    Role::Whole => (item_kind::WHOLE, 0),
                    Role::Part(part) => (item_kind::PART, part),
                    Role::Owner => (item_kind::OWNER, 0),
                };
                item.k0 = first * TILE_K;
                item.k_blocks = end - first;
            }
            Scheduled::Reduce { first, count, .. } => {
                item.kind = item_kind::REDUCE;
                item.k0 = first;
                item.k_blocks = count;
            }
        }
        self.lists[CLUSTER_SIZE as usize * cluster + rank].push(item);
    }
}

/// Workspace slots of the parts of one tile.
fn slots_per_tile(item: &Item) -> usize {
    (item.parts * (item.width / 64) * (TILE_M * 64 / SLOT_FLOATS)) as usize
}

/// Index of the first tensor map of each product.
fn first_maps(accumulation: Accumulation, products: &[ProductShape]) -> Vec<usize> {
    let first = |next: &mut usize, shape| {
        let first = *next;
        *next += num_tensor_maps(accumulation, shape);
        Some(first)
    };
    products.iter().scan(0, first).collect()
}

/// Tensor maps of a product: A, C and those of B.
fn num_tensor_maps(accumulation: Accumulation, shape: &ProductShape) -> usize {
    2 + accumulation.num_b_maps(shape)
}

impl fmt::Display for HopperPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shape, tiling) in self.products.iter().zip(&self.tilings) {
            let ProductShape { m, n, k, num_segments, a_major, .. } = shape;
            let form = if *a_major == Major::K { "dgrad" } else { "wgrad" };
            writeln!(f, "  {form} {m} x {n} x {num_segments} * {k}: {tiling}")?;
        }
        let items = self.items.iter().filter(|item| item.k_blocks > 0).count();
        write!(
            f,
            "  {items} items on {} blocks, workspace {:.1} MiB, predicted {:.1} us (mean load {:.1} us)",
            self.num_blocks,
            self.workspace_floats as f64 / f64::from(1 << 18),
            self.predicted_us(),
            self.mean_load_us()
        )
    }
}
