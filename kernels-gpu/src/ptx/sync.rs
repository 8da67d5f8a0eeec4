//! Barriers and reductions within a block or warp, and between dependent launches.
use core::arch::asm;

/// `bar.warp.sync` over all 32 lanes; orders their shared-memory accesses.
///
/// # Safety
/// All lanes of the warp arrive.
#[inline(always)]
pub unsafe fn warp_sync() {
    // SAFETY: as the caller promises.
    unsafe { asm!("bar.warp.sync 0xffffffff;", options(nostack)) }
}

/// `shfl.sync.bfly.b32` over the whole warp: the value of lane `lane ^ M`.
///
/// # Safety
/// All lanes of the warp arrive.
#[inline(always)]
pub unsafe fn shfl_xor<const M: u32>(v: f32) -> f32 {
    let r: f32;
    // SAFETY: as the caller promises.
    unsafe {
        asm!("shfl.sync.bfly.b32 {r}, {v}, {m}, 31, 0xffffffff;", r = out(reg32) r, v = in(reg32) v, m = const M, options(nomem, nostack))
    };
    r
}

/// `redux.sync.max.u32` over the whole warp.
///
/// # Safety
/// All lanes of the warp arrive.
#[inline(always)]
pub unsafe fn redux_max(v: u32) -> u32 {
    let r: u32;
    // SAFETY: as the caller promises.
    unsafe {
        asm!("redux.sync.max.u32 {r}, {v}, 0xffffffff;", r = out(reg32) r, v = in(reg32) v, options(nomem, nostack))
    };
    r
}

/// `griddepcontrol.launch_dependents`: once every block of this launch has executed it or ended, the blocks of the next launch of the stream
/// may start where there is room, if that is a dependent one. Says nothing about results. No instruction in the portable module.
///
/// # Safety
/// The next launch, if dependent, executes [`wait_for_launches_before`].
#[inline(always)]
pub unsafe fn launch_dependents() {
    // SAFETY: accesses no memory.
    #[cfg(target_feature = "sm_90a")]
    unsafe {
        asm!("griddepcontrol.launch_dependents;", options(nostack))
    }
}

/// `griddepcontrol.wait`: the launch before this one has ended and what it wrote is visible; so has everything before that launch, if that
/// executed this too or was a normal launch. At once in a normal launch. No instruction in the portable module, whose launches are normal.
///
/// Every thread executes it, in every dependent kernel, even one that needs nothing of what came before: the launch after relies on it.
/// What is read after it by `ld.global.nc` was not written by a launch before: ptxas may move such loads across.
///
/// # Safety
/// None.
#[inline(always)]
pub unsafe fn wait_for_launches_before() {
    // SAFETY: accesses no memory.
    #[cfg(target_feature = "sm_90a")]
    unsafe {
        asm!("griddepcontrol.wait;", options(nostack))
    }
}

/// `%tid.x`, read anew: a value derived from it need not stay in a register since the last time.
#[inline(always)]
pub fn tid_again() -> u32 {
    let r: u32;
    // SAFETY: reads a special register.
    unsafe { asm!("mov.u32 {r}, %tid.x;", r = out(reg32) r, options(nostack)) };
    r
}
