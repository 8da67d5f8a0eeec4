//! The producer thread: loads operand blocks and parts into the ring, in the order in which the consumers use them.
//!
//! Where the device limits k (`WgmmaParams::k_limit`), a k-block past the limit is loaded from outside of the tensor, which gives zeros, and
//! the one that the limit cuts from the product's copies of it, which have zeros past the limit: NaN there would survive a factor of zero.
use super::consumer::product;
use super::operand::Operand;
use super::parts::{GROUP_FLOATS, first_part};
use super::{Entry, convert, list};
use crate::config::wgmma::{CHUNK_BYTES, CLUSTER_SIZE, GROUP_BYTES, TILE_K, TILE_M, groups_per_stage};
use crate::params::Major;
use crate::params_wgmma::TensorMap;
use crate::ptx::hopper::{
    bulk_load, cluster_rank, fence_proxy_async, ld_acquire, prefetch_l1, tma_load_3d, tma_load_3d_multicast,
    tma_load_4d, tma_load_4d_multicast,
};
use crate::ptx::memory::ldg32_or;
use crate::schedule::item::{Item, item_kind};
use crate::tile::ring::{Converted, Ring};

/// What a limited k has no limit as.
const NO_LIMIT: u32 = u32::MAX;
/// A coordinate that is outside of every tensor along k: their extents are below 2^30.
const OUTSIDE: u32 = 1 << 30;

/// The producer's walk over the list, whose first item is `item`. It ends when nobody arrives at this block any more: the block must not exit before.
///
/// # Safety
/// One thread of the block; lists and maps are as the plan says.
#[inline(always)]
pub(super) unsafe fn produce_list<E: Entry>(mut item: Item) {
    // SAFETY: lists end with an item of 0 k-blocks; the consumers take the same items, so every stage is consumed.
    unsafe {
        let mut next = list::<E>();
        let loaded_limit = load_k_limit::<E>();
        if E::CONVERTS {
            let mut ring = Ring::<false>::new();
            while item.kind >= item_kind::WEIGHTS {
                next = next.add(1);
                prefetch_l1(next);
                ring.load_rows::<E>(&item);
                item = *next;
            }
            Converted::new().wait();
        }
        let mut ring = Ring::<true>::new();
        while item.k_blocks != 0 {
            next = next.add(1);
            prefetch_l1(next);
            produce_item::<E>(&mut ring, &item, loaded_limit, next);
            item = *next;
        }
        ring.wait_until_released();
    }
}

/// Streams the item before `next` in the list.
///
/// # Safety
/// As [`produce_list`].
#[inline(always)]
unsafe fn produce_item<E: Entry>(ring: &mut Ring<true>, item: &Item, loaded_limit: u32, next: *const Item) {
    // SAFETY: as the caller promises.
    unsafe {
        if item.kind == item_kind::REDUCE {
            return produce_reduce::<E>(ring, item);
        }
        if E::CONVERTS {
            convert::wait_for_operands::<E>(item);
        }
        // An owner waits for its parts before its last k-blocks, as many as the ring holds less one, so that the wait hides behind the full ring. One
        // loop, not two calls: the hardware fetches only so much of a kernel's code ahead.
        let is_owner = item.kind == item_kind::OWNER;
        let mut first = 0;
        let mut end =
            if is_owner { item.k_blocks.saturating_sub(E::Operand::RING_K_BLOCKS - 1) } else { item.k_blocks };
        loop {
            produce::<E>(ring, item, loaded_limit, next, first, end);
            if end == item.k_blocks {
                break;
            }
            wait_for_parts::<E>(item);
            first = end;
            end = item.k_blocks;
        }
        if is_owner {
            produce_parts_to_add::<E>(ring, item);
        }
    }
}

/// What the device says of k; [`limit_of`] makes the limit of it, where that is needed: the load takes a while.
///
/// # Safety
/// As [`produce_list`].
#[inline(always)]
unsafe fn load_k_limit<E: Entry>() -> u32 {
    // SAFETY: null, or readable; nothing writes it during the launch.
    unsafe {
        let limit = (*E::params()).k_limit;
        ldg32_or(limit, !limit.is_null(), NO_LIMIT)
    }
}

/// How much of k is summed where A is MN-major; [`NO_LIMIT`]: all of it.
///
/// # Safety
/// As [`produce_list`].
#[inline(always)]
unsafe fn limit_of<E: Entry>(loaded: u32) -> u32 {
    // SAFETY: a parameter.
    if loaded < unsafe { (*E::params()).k_rows } { loaded } else { NO_LIMIT }
}

/// k of block `first` of the item in B's segment, that segment's map, and k of a segment.
///
/// # Safety
/// As [`produce_list`].
#[inline(always)]
unsafe fn b_segment<E: Entry>(item: &Item, first: u32) -> (u32, *const TensorMap, u32) {
    // SAFETY: the maps of all segments that the item reaches are in use and follow each other.
    unsafe {
        let maps: *const TensorMap = (&raw const (*E::params()).maps).cast();
        let mut map = maps.add(item.b_map as usize);
        let mut k = item.k0 + first * TILE_K;
        let segment_k = (*product::<E>(item)).segment_k;
        while k >= segment_k {
            k -= segment_k;
            map = map.add(1);
        }
        (k, map, segment_k)
    }
}

/// The chunks of B (64 columns of a k-block) that this block loads, and for which blocks of the cluster.
struct BChunks {
    first: u32,
    step: u32,
    end: u32,
    /// The first column of the tile, in chunks.
    column: u32,
    /// Mask of blocks.
    blocks: u16,
}

impl BChunks {
    /// If the cluster shares B, every second chunk for both blocks, else all of them for this one.
    #[inline(always)]
    fn of(item: &Item) -> Self {
        let rank = cluster_rank();
        let (first, step, blocks) =
            if item.shares_b != 0 { (rank, CLUSTER_SIZE, (1 << CLUSTER_SIZE) - 1) } else { (0, 1, 1 << rank) };
        BChunks { first, step, end: item.width / 64, column: item.n0 / 64, blocks }
    }
}

/// Streams k-blocks `first..end` of the item, the one before `next` in the list; `loaded_limit` as [`load_k_limit`] gives it.
///
/// # Safety
/// As [`produce_list`].
#[inline(always)]
unsafe fn produce<E: Entry>(
    ring: &mut Ring<true>,
    item: &Item,
    loaded_limit: u32,
    next: *const Item,
    first: u32,
    end: u32,
) {
    if E::Operand::PROMOTED {
        // SAFETY: as the caller promises.
        unsafe { return produce_parts::<E>(ring, item, first, end) };
    }
    let bytes = (TILE_M + item.width) * TILE_K * 2;
    let a_mn_major = item.a_major == Major::Mn as u32;
    // The limit is made where it is needed: the load takes a while.
    let whole = if a_mn_major {
        // SAFETY: as the caller promises.
        let limit = unsafe { limit_of::<E>(loaded_limit) };
        end.min((limit / TILE_K).saturating_sub(item.k0 / TILE_K).max(first))
    } else {
        end
    };
    let mut k = item.k0 + first * TILE_K;
    // SAFETY: the maps are in use.
    unsafe {
        let maps: *const TensorMap = (&raw const (*E::params()).maps).cast();
        let a_map = maps.add(item.a_map as usize);
        let (mut b_k, mut b_map, segment_k) = b_segment::<E>(item, first);
        let b = BChunks::of(item);
        for _ in first..whole {
            ring.acquire(bytes);
            // 3-D coordinates: K-major (k, m, 0), MN-major (0, k, m / 64).
            let a = if a_mn_major { [0, k, item.m0 / 64] } else { [k, item.m0, 0] };
            tma_load_3d(ring.a(), a_map, a, ring.full());
            let mut chunk = b.first;
            while chunk < b.end {
                let to = ring.b() + chunk * CHUNK_BYTES;
                tma_load_3d_multicast(to, b_map, [0, b_k, b.column + chunk], ring.full(), b.blocks);
                chunk += b.step;
            }
            ring.advance();
            k += TILE_K;
            b_k += TILE_K;
            if b_k == segment_k {
                b_k = 0;
                b_map = b_map.wrapping_add(1);
            }
        }
        for block in whole..end {
            ring.acquire(bytes);
            load_limited::<E>(ring, next.wrapping_sub(1), block);
            ring.advance();
        }
    }
}

/// Loads a k-block of MN-major operands that reaches past the limit. What the loads before it do not need is read anew: registers are few.
///
/// # Safety
/// As [`produce_list`], into a stage that was acquired for both operands.
#[inline(always)]
unsafe fn load_limited<E: Entry>(ring: &Ring<true>, item: *const Item, block: u32) {
    // SAFETY: as the caller promises.
    let (k, limit) = unsafe { ((*item).k0 + block * TILE_K, limit_of::<E>(load_k_limit::<E>())) };
    let is_cut = k < limit;
    let at = if is_cut { k } else { OUTSIDE };
    let load = |to: u32, map: u32, box_chunks: u32, boundary: *const u8, first: u32, columns: u32| {
        let chunk = first / 64;
        // SAFETY: the map is in use; a boundary has a tile for each 64 columns of the operand.
        unsafe {
            if is_cut && !boundary.is_null() {
                let from = boundary.wrapping_add((chunk * CHUNK_BYTES) as usize);
                bulk_load(to, from.cast(), columns / 64 * CHUNK_BYTES, ring.full());
            } else {
                let maps: *const TensorMap = (&raw const (*E::params()).maps).cast();
                let map = maps.add(map as usize);
                let mut done = 0;
                while done < columns / 64 {
                    tma_load_3d(to + done * CHUNK_BYTES, map, [0, at, chunk + done], ring.full());
                    done += box_chunks;
                }
            }
        }
    };
    // SAFETY: the item's product.
    unsafe {
        let product = || product::<E>(&*item);
        // The second tile of a cluster may be past the last row, where A has no boundary.
        let a_boundary = if (*item).m0 < (*product()).rows { (*product()).a_boundary } else { core::ptr::null() };
        load(ring.a(), (*item).a_map, TILE_M / 64, a_boundary, (*item).m0, TILE_M);
        load(ring.b(), (*item).b_map, 1, (*product()).b_boundary, (*item).n0, (*item).width);
    }
}

/// [`produce`] for operands of two parts, both of them in one map: a k-block is a stage of low A and high B, then one of high A and low B.
///
/// # Safety
/// As [`produce_list`].
#[inline(always)]
unsafe fn produce_parts<E: Entry>(ring: &mut Ring<true>, item: &Item, first: u32, end: u32) {
    let bytes = (TILE_M + item.width) * TILE_K * 2;
    let a_mn_major = item.a_major == Major::Mn as u32;
    let mut k = item.k0 + first * TILE_K;
    // SAFETY: both maps are in use.
    unsafe {
        let maps: *const TensorMap = (&raw const (*E::params()).maps).cast();
        let a_map = maps.add(item.a_map as usize);
        let b_map = maps.add(item.b_map as usize);
        let b = BChunks::of(item);
        for stage in 2 * first..2 * end {
            ring.acquire(bytes);
            let b_part = stage % 2; // 0: high, 1: low
            let a_part = 1 - b_part;
            // 4-D coordinates: K-major (k, mn, 0, part), MN-major (0, k, mn / 64, part).
            let a = if a_mn_major { [0, k, item.m0 / 64, a_part] } else { [k, item.m0, 0, a_part] };
            tma_load_4d(ring.a(), a_map, a, ring.full());
            let mut chunk = b.first;
            while chunk < b.end {
                let to = ring.b() + chunk * CHUNK_BYTES;
                tma_load_4d_multicast(to, b_map, [0, k, b.column + chunk, b_part], ring.full(), b.blocks);
                chunk += b.step;
            }
            ring.advance();
            k += b_part * TILE_K;
        }
    }
}

/// Waits until all parts of the item's tile are there, and makes them visible to bulk loads.
///
/// # Safety
/// As [`produce_list`]. The parts wait for nothing and come first in every list, so this ends.
#[inline(always)]
unsafe fn wait_for_parts<E: Entry>(item: &Item) {
    // SAFETY: the counter is the tile's own and only counts.
    unsafe {
        let counter = (*E::params()).counters.add(item.counter as usize);
        while ld_acquire(counter) < 2 * item.parts {}
        fence_proxy_async();
    }
}

/// The parts that an owner adds, 64 columns of one part a stage.
///
/// # Safety
/// As [`produce_list`], after [`wait_for_parts`].
#[inline(always)]
unsafe fn produce_parts_to_add<E: Entry>(ring: &mut Ring<true>, item: &Item) {
    const GROUPS: usize = 8;
    // SAFETY: the parts of both warpgroups have arrived; a stage holds 2 x 8 groups.
    unsafe {
        let groups = item.width as usize / 8;
        let mut from = first_part::<E>(item).cast_const();
        for _ in 0..item.parts {
            for _ in 0..groups / GROUPS {
                ring.acquire(2 * GROUPS as u32 * GROUP_BYTES);
                let second = from.add(groups * GROUP_FLOATS);
                bulk_load(ring.a(), from, GROUPS as u32 * GROUP_BYTES, ring.full());
                bulk_load(ring.a() + GROUPS as u32 * GROUP_BYTES, second, GROUPS as u32 * GROUP_BYTES, ring.full());
                from = from.add(GROUPS * GROUP_FLOATS);
                ring.advance();
            }
            from = from.add(groups * GROUP_FLOATS); // past the second warpgroup's half
        }
    }
}

/// Reduce: `groups_per_stage` groups of all parts a stage, `[part][warpgroup][group]`.
///
/// # Safety
/// As [`produce_list`].
#[inline(always)]
unsafe fn produce_reduce<E: Entry>(ring: &mut Ring<true>, item: &Item) {
    let step = groups_per_stage(item.parts);
    // SAFETY: all parts have arrived; a stage holds the groups of all of them (config.rs).
    unsafe {
        wait_for_parts::<E>(item);
        let half = item.width as usize / 8 * GROUP_FLOATS; // a part's floats of one warpgroup
        let mut from = first_part::<E>(item).cast_const().add(item.k0 as usize * GROUP_FLOATS);
        let mut done = 0;
        while done < item.k_blocks {
            ring.acquire(item.parts * 2 * step * GROUP_BYTES);
            let mut to = ring.a();
            for i in 0..item.parts * 2 {
                bulk_load(to, from.add(i as usize * half), step * GROUP_BYTES, ring.full());
                to += step * GROUP_BYTES;
            }
            from = from.add(step as usize * GROUP_FLOATS);
            ring.advance();
            done += step;
        }
    }
}
