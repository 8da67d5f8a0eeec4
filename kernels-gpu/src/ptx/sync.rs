//! Barriers and reductions within a block or warp.
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

/// `shfl.sync.idx.b32` over the whole warp: the value of lane 0, which ptxas then knows to be the same for all lanes.
///
/// # Safety
/// All lanes of the warp arrive.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub unsafe fn shfl_first(v: u32) -> u32 {
    let r: u32;
    // SAFETY: as the caller promises.
    unsafe {
        asm!("shfl.sync.idx.b32 {r}, {v}, 0, 31, 0xffffffff;", r = out(reg32) r, v = in(reg32) v, options(nomem, nostack))
    };
    r
}

/// `vote.sync.ballot.b32` over the whole warp: bit `l` is lane `l`'s `value`.
///
/// # Safety
/// All lanes of the warp arrive.
#[inline(always)]
pub unsafe fn ballot(value: bool) -> u32 {
    let r: u32;
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {v}, 0; vote.sync.ballot.b32 {r}, p, 0xffffffff; }}",
             r = out(reg32) r, v = in(reg32) value as u32, options(nomem, nostack))
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

/// `%tid.x`, read anew: a value derived from it need not stay in a register since the last time.
#[inline(always)]
pub fn tid_again() -> u32 {
    let r: u32;
    // SAFETY: reads a special register.
    unsafe { asm!("mov.u32 {r}, %tid.x;", r = out(reg32) r, options(nostack)) };
    r
}

/// `mov.b32`: `v`, of which LLVM does not know that it is. What derives from it is computed again instead of being kept in a register.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub fn again(v: u32) -> u32 {
    let r: u32;
    // SAFETY: copies a register.
    unsafe { asm!("mov.b32 {r}, {v};", r = out(reg32) r, v = in(reg32) v, options(nostack)) };
    r
}
