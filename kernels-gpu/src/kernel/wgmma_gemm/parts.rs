//! K-splits: parking a part of a tile in the workspace, announcing it, and where it lies.
//!
//! A part is the accumulator fragments as they are, `[2 warpgroups][width / 8 groups][128 threads]` of 4 floats, so every access is whole
//! lines; a group of 8 columns of a warpgroup is 2 KiB. Either one block owns the tile and adds the parts to its registers (few parts: no
//! tail), or reduce items come later in some blocks' lists (many parts: the reading is spread). In both the producer streams the parts
//! through the ring, so that their latency hides behind the work before, and the consumers add them in part order: the result does not
//! depend on timing.
use super::{Entry, convert, list};
use crate::config::wgmma::{SLOT_FLOATS, named_barrier};
use crate::ptx::hopper::{named_barrier, red_add_release_if, stg128_cg};
use crate::schedule::item::{Item, item_kind};

/// Floats of an 8-column group of a warpgroup.
pub(super) const GROUP_FLOATS: usize = 128 * 4;

/// First float of part 0 of the item's tile.
///
/// # Safety
/// The workspace holds the item's slots.
#[inline(always)]
pub(super) unsafe fn first_part<E: Entry>(item: &Item) -> *mut f32 {
    // SAFETY: inside the workspace, as the caller promises.
    unsafe { (*E::params()).workspace.add(item.slot as usize * SLOT_FLOATS as usize) }
}

/// Consumer: parks a part. The release that publishes it takes about a microsecond, so another warp does it ([`publish_list`]).
///
/// # Safety
/// All threads of the warpgroup; `item` is a part of width 2R.
#[inline(always)]
pub(super) unsafe fn park<E: Entry, const R: usize>(item: &Item, acc: &[f32; R], warpgroup: u32, thread: u32) {
    // SAFETY: each thread's floats of each group are its own, inside the part's slot. The barrier waits only while the publisher is still
    // busy with the part before.
    unsafe {
        let mine = first_part::<E>(item)
            .add((item.part as usize * 2 + warpgroup as usize) * (R / 4) * GROUP_FLOATS + thread as usize * 4);
        for i in 0..R / 4 {
            stg128_cg(mine.add(i * GROUP_FLOATS), [acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]]);
        }
        named_barrier(named_barrier::PART_STORED + warpgroup, 128 + 32);
    }
}

/// Publishing warp of a consumer warpgroup: counts its parts as arrived, once their stores are visible.
///
/// # Safety
/// All lanes of one warp; no other warp publishes for this warpgroup.
#[inline(always)]
pub(super) unsafe fn publish_list<E: Entry>(warpgroup: u32, lane: u32) {
    // SAFETY: the list ends with 0 k-blocks and is the same for all lanes; the warpgroup arrives once for each part (`park`) and conversion item.
    unsafe {
        let mut item = list::<E>();
        while (*item).k_blocks != 0 {
            if E::CONVERTS && (*item).kind >= item_kind::WEIGHTS {
                convert::publish::<E>(&*item, warpgroup, lane);
            } else if (*item).kind == item_kind::PART {
                named_barrier(named_barrier::PART_STORED + warpgroup, 128 + 32);
                red_add_release_if(lane == 0, (*E::params()).counters.add((*item).counter as usize), 1);
            }
            item = item.add(1);
        }
    }
}
