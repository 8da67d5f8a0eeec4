//! The producer thread: loads operand blocks and parts into the ring, in the order in which the consumers use them.
use super::operand::Operand;
use super::parts::{GROUP_FLOATS, first_part};
use super::{Entry, convert, list};
use crate::config::wgmma::{GROUP_BYTES, STAGES, TILE_K, TILE_M, groups_per_stage, segment_parts};
use crate::params::Major;
use crate::params_wgmma::TensorMap;
use crate::ptx::hopper::{bulk_load, fence_proxy_async, ld_acquire, prefetch_l1, tma_load_3d, tma_load_4d};
use crate::schedule::item::{Item, item_kind};
use crate::tile::ring::Ring;

/// The producer's walk over the list.
///
/// # Safety
/// One thread of the block; lists and maps are as the plan says.
#[inline(always)]
pub(super) unsafe fn produce_list<E: Entry>(mut ring: Ring) {
    // SAFETY: lists end with an item of 0 k-blocks; the consumers take the same items, so every stage is consumed.
    unsafe {
        let mut next = list::<E>();
        loop {
            let item = *next;
            if item.k_blocks == 0 {
                break;
            }
            next = next.add(1);
            prefetch_l1(next);
            if E::CONVERTS && item.kind >= item_kind::MAXIMUM {
                ring.load_rows::<E>(&item);
                continue;
            }
            if E::CONVERTS && item.kind != item_kind::REDUCE {
                convert::wait_for_operands::<E>(&item);
            }
            match item.kind {
                item_kind::REDUCE => produce_reduce::<E>(&mut ring, &item),
                item_kind::OWNER => produce_owner::<E>(&mut ring, &item),
                _ => produce::<E>(&mut ring, &item, 0, item.k_blocks),
            }
        }
    }
}

/// Streams k-blocks `first..end` of the item.
///
/// # Safety
/// As [`produce_list`].
#[inline(always)]
unsafe fn produce<E: Entry>(ring: &mut Ring, item: &Item, first: u32, end: u32) {
    if E::Operand::PROMOTED {
        // SAFETY: as the caller promises.
        unsafe { return produce_parts::<E>(ring, item, first, end) };
    }
    let bytes = (TILE_M + item.width) * TILE_K * 2;
    let a_mn_major = item.a_major == Major::Mn as u32;
    let mut k = item.k0 + first * TILE_K;
    // k in B's segment, and the segment's map.
    let mut b_k = k;
    // SAFETY: the maps of all segments that the item reaches are in use and follow each other.
    unsafe {
        let maps: *const TensorMap = (&raw const (*E::params()).maps).cast();
        let a_map = maps.add(item.a_map as usize);
        let mut b_map = maps.add(item.b_map as usize);
        while b_k >= item.segment_k {
            b_k -= item.segment_k;
            b_map = b_map.add(1);
        }
        for _ in first..end {
            ring.acquire(bytes);
            // 3-D coordinates: K-major (k, m, 0), MN-major (0, k, m / 64).
            let a = if a_mn_major { [0, k, item.m0 / 64] } else { [k, item.m0, 0] };
            tma_load_3d(ring.a(), a_map, a, ring.full());
            tma_load_3d(ring.b(), b_map, [0, b_k, item.n0 / 64], ring.full());
            ring.advance();
            k += TILE_K;
            b_k += TILE_K;
            if b_k == item.segment_k {
                b_k = 0;
                b_map = b_map.wrapping_add(1);
            }
        }
    }
}

/// [`produce`] for operands of two parts: one map covers both, and each segment multiplies a part of A with a part of B.
///
/// # Safety
/// As [`produce_list`].
#[inline(always)]
unsafe fn produce_parts<E: Entry>(ring: &mut Ring, item: &Item, first: u32, end: u32) {
    let bytes = (TILE_M + item.width) * TILE_K * 2;
    let a_mn_major = item.a_major == Major::Mn as u32;
    let mut segment = 0;
    let mut k = item.k0 + first * TILE_K; // in the segment
    // SAFETY: both maps are in use.
    unsafe {
        let maps: *const TensorMap = (&raw const (*E::params()).maps).cast();
        let a_map = maps.add(item.a_map as usize);
        let b_map = maps.add(item.b_map as usize);
        while k >= item.segment_k {
            k -= item.segment_k;
            segment += 1;
        }
        for _ in first..end {
            ring.acquire(bytes);
            let [a_part, b_part] = segment_parts(segment);
            // 4-D coordinates: K-major (k, mn, 0, part), MN-major (0, k, mn / 64, part).
            let a = if a_mn_major { [0, k, item.m0 / 64, a_part] } else { [k, item.m0, 0, a_part] };
            tma_load_4d(ring.a(), a_map, a, ring.full());
            tma_load_4d(ring.b(), b_map, [0, k, item.n0 / 64, b_part], ring.full());
            ring.advance();
            k += TILE_K;
            if k == item.segment_k {
                k = 0;
                segment += 1;
            }
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

/// Owner: its k-blocks, then the parts, 64 columns of one part a stage.
///
/// # Safety
/// As [`produce_list`].
#[inline(always)]
unsafe fn produce_owner<E: Entry>(ring: &mut Ring, item: &Item) {
    const GROUPS: usize = 8;
    // SAFETY: the parts of both warpgroups have arrived; a stage holds 2 x 8 groups.
    unsafe {
        // The wait goes before the last k-blocks, so that its latency hides behind the full ring.
        let tail = item.k_blocks.saturating_sub(STAGES - 1);
        produce::<E>(ring, item, 0, tail);
        wait_for_parts::<E>(item);
        produce::<E>(ring, item, tail, item.k_blocks);
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
unsafe fn produce_reduce<E: Entry>(ring: &mut Ring, item: &Item) {
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
