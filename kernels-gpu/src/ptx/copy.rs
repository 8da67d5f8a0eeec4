//! Asynchronous copies from global to shared memory (`cp.async`, sm_80).
use core::arch::asm;

/// `cp.async.cg` of 16 bytes, zeros where `ok` is false (the source is then not read).
///
/// # Safety
/// `dst` and `src` are 16-byte aligned; `dst` lies in the block's shared memory and nobody else accesses it until the copy has
/// been waited for; `src` is readable if `ok`.
#[inline(always)]
pub unsafe fn cp_async16(dst: u32, src: *const u8, ok: bool) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("cp.async.cg.shared.global [{d}], [{s}], 16, {n};",
             d = in(reg32) dst, s = in(reg64) src, n = in(reg32) if ok { 16u32 } else { 0 }, options(nostack))
    }
}

/// `cp.async.commit_group`: the copies since the last one are a group.
///
/// # Safety
/// None beyond the copies' own.
#[inline(always)]
pub unsafe fn cp_async_commit() {
    // SAFETY: no memory is accessed.
    unsafe { asm!("cp.async.commit_group;", options(nostack)) }
}

/// `cp.async.wait_group`: waits for all but the newest `N` groups of this thread.
///
/// # Safety
/// None; other threads' copies need a barrier after it.
#[inline(always)]
pub unsafe fn cp_async_wait<const N: u32>() {
    // SAFETY: no memory is accessed.
    unsafe { asm!("cp.async.wait_group {n};", n = const N, options(nostack)) }
}
