//! Position of the thread in its warp.

use core::arch::asm;

/// Threads of a warp.
pub const WARP_SIZE: u32 = 32;

/// `%laneid`: index of the thread in its warp, `0..32`.
#[inline(always)]
pub fn lane_id() -> u32 {
    let lane: u32;
    // SAFETY: reading the register has no precondition; the result is the same for a thread's whole life.
    unsafe { asm!("mov.u32 {}, %laneid;", out(reg32) lane, options(pure, nomem, nostack, preserves_flags)) };
    lane
}
