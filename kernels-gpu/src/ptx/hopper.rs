//! Hopper: mbarriers, TMA, wgmma, register reallocation, and the signals between blocks of a persistent launch.
//!
//! Shared addresses are 32-bit. Conditions that differ between lanes are predicates inside the asm (`_if`), so that no branch of
//! LLVM's surrounds the collectives around them; wgmma, `setmaxnreg` and `bar.sync` stand in code that is uniform for the whole
//! warpgroup.
use core::arch::asm;

use crate::config::wgmma::CLUSTER_SIZE;
use crate::params_wgmma::TensorMap;

// ---- barriers and fences -----------------------------------------------------------------------

/// `bar.sync id, threads`: named barrier.
///
/// # Safety
/// `threads` (a multiple of 32) threads in whole warps arrive, each warp converged; nobody else uses `id` meanwhile.
#[inline(always)]
pub unsafe fn named_barrier(id: u32, threads: u32) {
    // SAFETY: as the caller promises.
    unsafe { asm!("bar.sync {id}, {n};", id = in(reg32) id, n = in(reg32) threads, options(nostack)) }
}

/// `bar.arrive id, threads`: arrives at a named barrier and does not wait.
///
/// # Safety
/// As [`named_barrier`]; some of the `threads` wait.
#[inline(always)]
pub unsafe fn named_barrier_arrive(id: u32, threads: u32) {
    // SAFETY: as the caller promises.
    unsafe { asm!("bar.arrive {id}, {n};", id = in(reg32) id, n = in(reg32) threads, options(nostack)) }
}

/// `fence.mbarrier_init.release.cluster`: makes mbarrier initialisations visible to the async proxy.
///
/// # Safety
/// None.
#[inline(always)]
pub unsafe fn fence_mbarrier_init() {
    // SAFETY: orders memory, accesses none.
    unsafe { asm!("fence.mbarrier_init.release.cluster;", options(nostack)) }
}

/// `fence.proxy.async`: orders what this thread has acquired before its later bulk copies.
///
/// # Safety
/// None.
#[inline(always)]
pub unsafe fn fence_proxy_async() {
    // SAFETY: orders memory, accesses none.
    unsafe { asm!("fence.proxy.async;", options(nostack)) }
}

/// `fence.proxy.async.shared::cta`: makes this thread's shared-memory stores visible to TMA.
///
/// # Safety
/// None.
#[inline(always)]
pub unsafe fn fence_proxy_async_shared() {
    // SAFETY: orders memory, accesses none.
    unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) }
}

// ---- mbarrier ----------------------------------------------------------------------------------

/// `mbarrier.init.shared::cta.b64`.
///
/// # Safety
/// `barrier` is 8 bytes of shared memory, 8-byte aligned; nobody uses it before a barrier of the block, or of the cluster if other blocks do, after [`fence_mbarrier_init`].
#[inline(always)]
pub unsafe fn mbarrier_init(barrier: u32, arrivals: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("mbarrier.init.shared::cta.b64 [{a}], {c};", a = in(reg32) barrier, c = in(reg32) arrivals, options(nostack))
    }
}

/// `mbarrier.arrive.expect_tx.shared::cta.b64`: arrives, and adds `bytes` to what the phase waits for.
///
/// # Safety
/// `barrier` is initialised and expects this arrival in its current phase.
#[inline(always)]
pub unsafe fn mbarrier_arrive_expect_tx(barrier: u32, bytes: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{a}], {b};",
             a = in(reg32) barrier, b = in(reg32) bytes, options(nostack))
    }
}

/// `mbarrier.arrive.shared::cta.b64` where `ok`. Default semantics (release, CTA scope) on purpose: with `.release.cluster` ptxas puts a
/// MEMBAR.ALL.GPU in front (592 instead of 776 TFLOP/s).
///
/// # Safety
/// If `ok`, as [`mbarrier_arrive_expect_tx`].
#[inline(always)]
pub unsafe fn mbarrier_arrive_if(ok: bool, barrier: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; @p mbarrier.arrive.shared::cta.b64 _, [{a}]; }}",
             ok = in(reg32) ok as u32, a = in(reg32) barrier, options(nostack))
    }
}

/// `mbarrier.try_wait.parity.shared::cta.b64` until the phase of this parity has completed. The loop is inside the asm, so that LLVM sees
/// no branch that differs between lanes.
///
/// # Safety
/// `barrier` is initialised.
#[inline(always)]
#[allow(named_asm_labels)] // local to the braces
pub unsafe fn mbarrier_wait(barrier: u32, parity: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [{a}], {ph}; @!p bra AGAIN; }}",
             a = in(reg32) barrier, ph = in(reg32) parity, options(nostack))
    }
}

/// [`mbarrier_wait`] where `ok`.
///
/// # Safety
/// If `ok`, as [`mbarrier_wait`].
#[inline(always)]
#[allow(named_asm_labels)] // local to the braces
pub unsafe fn mbarrier_wait_if(ok: bool, barrier: u32, parity: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; .reg .pred q; setp.ne.u32 q, {ok}, 0; @!q bra DONE;",
             "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [{a}], {ph}; @!p bra AGAIN; DONE: }}",
             ok = in(reg32) ok as u32, a = in(reg32) barrier, ph = in(reg32) parity, options(nostack))
    }
}

/// [`mbarrier_arrive_expect_tx`] where `ok`.
///
/// # Safety
/// If `ok`, as [`mbarrier_arrive_expect_tx`].
#[inline(always)]
pub unsafe fn mbarrier_arrive_expect_tx_if(ok: bool, barrier: u32, bytes: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [{a}], {b}; }}",
             ok = in(reg32) ok as u32, a = in(reg32) barrier, b = in(reg32) bytes, options(nostack))
    }
}

/// `mbarrier.arrive` at the barrier at the same address of block `rank` of the cluster, where `ok`. Default semantics (release, CTA scope), as
/// [`mbarrier_arrive_if`]: it may say that this block has read something, not that it has written what the cluster must see.
///
/// # Safety
/// If `ok`, as [`mbarrier_arrive_if`] for that block, which has not exited.
#[inline(always)]
pub unsafe fn mbarrier_arrive_at_if(ok: bool, barrier: u32, rank: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        // Ranks of threads that do not arrive are made ones that there are.
        asm!("{{ .reg .pred p; .reg .b32 t; setp.ne.u32 p, {ok}, 0; and.b32 t, {r}, {last}; mapa.shared::cluster.u32 t, {a}, t;",
             "@p mbarrier.arrive.shared::cluster.b64 _, [t]; }}",
             ok = in(reg32) ok as u32, a = in(reg32) barrier, r = in(reg32) rank, last = const CLUSTER_SIZE - 1, options(nostack))
    }
}

// ---- clusters ----------------------------------------------------------------------------------

/// `%cluster_ctarank`: rank of the block in its cluster.
#[inline(always)]
pub fn cluster_rank() -> u32 {
    let rank: u32;
    // SAFETY: reads a special register.
    unsafe { asm!("mov.u32 {r}, %cluster_ctarank;", r = out(reg32) rank, options(pure, nomem, nostack)) };
    rank
}

/// `barrier.cluster.arrive.relaxed` and `barrier.cluster.wait.acquire`: all threads of all blocks of the cluster. It orders mbarrier initialisations behind a
/// [`fence_mbarrier_init`], and no other accesses: with `.release` ptxas puts a MEMBAR.ALL.GPU in front.
///
/// # Safety
/// All threads of the cluster that have not exited come to as many of them.
#[inline(always)]
pub unsafe fn cluster_barrier() {
    // SAFETY: as the caller promises.
    unsafe { asm!("barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;", options(nostack)) }
}

// ---- TMA ---------------------------------------------------------------------------------------

/// `prefetch.global.L1`: starts fetching the line at `p`. A load of it that comes soon after waits longer than without (H200).
///
/// # Safety
/// `p` points to global memory.
#[inline(always)]
pub unsafe fn prefetch_l1<T>(p: *const T) {
    // SAFETY: as the caller promises.
    unsafe { asm!("prefetch.global.L1 [{p}];", p = in(reg64) p, options(nostack)) }
}

/// `cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes`: the map's box at `coordinates` (innermost first). What
/// lies outside the tensor arrives as zeros and counts as bytes.
///
/// # Safety
/// One thread; `map` is an encoded 3-D tensor map on a 64-byte boundary; `dst` is a block of shared memory, 1024-byte aligned, that nobody
/// accesses until `barrier`, which expects the box's bytes, completes its phase.
#[inline(always)]
pub unsafe fn tma_load_3d(dst: u32, map: *const TensorMap, coordinates: [u32; 3], barrier: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [{d}], [{m}, {{{x}, {y}, {z}}}], [{b}];",
             d = in(reg32) dst, m = in(reg64) map, x = in(reg32) coordinates[0], y = in(reg32) coordinates[1],
             z = in(reg32) coordinates[2], b = in(reg32) barrier, options(nostack))
    }
}

/// [`tma_load_3d`] into the same place of each block of the cluster whose rank is in the mask `blocks`, where its barrier at the same address counts the
/// bytes.
///
/// # Safety
/// As [`tma_load_3d`], in each of these blocks; the cluster has them, and none has exited.
#[inline(always)]
pub unsafe fn tma_load_3d_multicast(dst: u32, map: *const TensorMap, coordinates: [u32; 3], barrier: u32, blocks: u16) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster",
             "[{d}], [{m}, {{{x}, {y}, {z}}}], [{b}], {k};",
             d = in(reg32) dst, m = in(reg64) map, x = in(reg32) coordinates[0], y = in(reg32) coordinates[1],
             z = in(reg32) coordinates[2], b = in(reg32) barrier, k = in(reg16) blocks, options(nostack))
    }
}

/// [`tma_load_3d_multicast`] for a 4-D map.
///
/// # Safety
/// As [`tma_load_3d_multicast`], but for the rank.
#[inline(always)]
pub unsafe fn tma_load_4d_multicast(dst: u32, map: *const TensorMap, coordinates: [u32; 4], barrier: u32, blocks: u16) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster",
             "[{d}], [{m}, {{{x}, {y}, {z}, {w}}}], [{b}], {k};",
             d = in(reg32) dst, m = in(reg64) map, x = in(reg32) coordinates[0], y = in(reg32) coordinates[1],
             z = in(reg32) coordinates[2], w = in(reg32) coordinates[3], b = in(reg32) barrier,
             k = in(reg16) blocks, options(nostack))
    }
}

/// [`tma_load_3d`] for a 2-D map, where `ok`.
///
/// # Safety
/// If `ok`, as [`tma_load_3d`], but for the rank.
#[inline(always)]
pub unsafe fn tma_load_2d_if(ok: bool, dst: u32, map: *const TensorMap, coordinates: [u32; 2], barrier: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0;",
             "@p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [{d}], [{m}, {{{x}, {y}}}], [{b}]; }}",
             ok = in(reg32) ok as u32, d = in(reg32) dst, m = in(reg64) map, x = in(reg32) coordinates[0],
             y = in(reg32) coordinates[1], b = in(reg32) barrier, options(nostack))
    }
}

/// `createpolicy.fractional.L2::evict_first.b64`: the policy of data that is read once.
#[inline(always)]
pub fn evict_first() -> u64 {
    let policy: u64;
    // SAFETY: register arithmetic.
    unsafe {
        asm!("createpolicy.fractional.L2::evict_first.b64 {p}, 1.0;", p = out(reg64) policy, options(pure, nomem, nostack))
    };
    policy
}

/// [`tma_load_3d`] with an L2 policy (`.L2::cache_hint`).
///
/// # Safety
/// As [`tma_load_3d`].
#[inline(always)]
pub unsafe fn tma_load_3d_hinted(dst: u32, map: *const TensorMap, coordinates: [u32; 3], barrier: u32, policy: u64) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint",
             "[{d}], [{m}, {{{x}, {y}, {z}}}], [{b}], {p};",
             d = in(reg32) dst, m = in(reg64) map, x = in(reg32) coordinates[0], y = in(reg32) coordinates[1],
             z = in(reg32) coordinates[2], b = in(reg32) barrier, p = in(reg64) policy, options(nostack))
    }
}

/// [`tma_load_3d`] for a 4-D map.
///
/// # Safety
/// As [`tma_load_3d`], but for the rank.
#[inline(always)]
pub unsafe fn tma_load_4d(dst: u32, map: *const TensorMap, coordinates: [u32; 4], barrier: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [{d}], [{m}, {{{x}, {y}, {z}, {w}}}], [{b}];",
             d = in(reg32) dst, m = in(reg64) map, x = in(reg32) coordinates[0], y = in(reg32) coordinates[1],
             z = in(reg32) coordinates[2], w = in(reg32) coordinates[3], b = in(reg32) barrier, options(nostack))
    }
}

/// `cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes`: contiguous bytes, no tensor map.
///
/// # Safety
/// As [`tma_load_3d`]; `src` and `bytes` are multiples of 16, and the source was written before the launch, or acquired
/// and followed by [`fence_proxy_async`].
#[inline(always)]
pub unsafe fn bulk_load(dst: u32, src: *const f32, bytes: u32, barrier: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{d}], [{s}], {n}, [{b}];",
             d = in(reg32) dst, s = in(reg64) src, n = in(reg32) bytes, b = in(reg32) barrier, options(nostack))
    }
}

/// `cp.async.bulk.tensor.2d.global.shared::cta.bulk_group` where `ok`: stores the map's box at column `x`, row `y`, clipped at the tensor's
/// edge.
///
/// # Safety
/// If `ok`: one thread; `map` is an encoded 2-D tensor map on a 64-byte boundary; `src` is a 1024-byte aligned block of shared memory, written before
/// a [`fence_proxy_async_shared`] of its writers and a barrier, and not written again before [`bulk_wait_read_if`].
#[inline(always)]
pub unsafe fn tma_store_2d_if(ok: bool, map: *const TensorMap, x: u32, y: u32, src: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0;",
             "@p cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [{m}, {{{x}, {y}}}], [{s}]; }}",
             ok = in(reg32) ok as u32, m = in(reg64) map, x = in(reg32) x, y = in(reg32) y, s = in(reg32) src, options(nostack))
    }
}

/// `cp.async.bulk.commit_group` where `ok`: this thread's bulk stores since the last one are a group.
///
/// # Safety
/// None.
#[inline(always)]
pub unsafe fn bulk_commit_if(ok: bool) {
    // SAFETY: accesses no memory.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; @p cp.async.bulk.commit_group; }}",
             ok = in(reg32) ok as u32, options(nostack))
    }
}

/// `cp.async.bulk.wait_group.read 0` where `ok`: all of this thread's bulk stores have read shared memory.
///
/// # Safety
/// None.
#[inline(always)]
pub unsafe fn bulk_wait_read_if(ok: bool) {
    // SAFETY: accesses no memory.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; @p cp.async.bulk.wait_group.read 0; }}",
             ok = in(reg32) ok as u32, options(nostack))
    }
}

// ---- warpgroup matrix multiply -----------------------------------------------------------------

/// `setmaxnreg.dec.sync.aligned.u32`.
///
/// # Safety
/// All threads of the warpgroup arrive; `N` is a multiple of 8 in 24..=256, at most what they hold.
#[inline(always)]
pub unsafe fn setmaxnreg_dec<const N: u32>() {
    // SAFETY: as the caller promises.
    unsafe { asm!("setmaxnreg.dec.sync.aligned.u32 {n};", n = const N, options(nostack)) }
}

/// `setmaxnreg.inc.sync.aligned.u32`: waits until the block's pool has the registers.
///
/// # Safety
/// As [`setmaxnreg_dec`], `N` at least what they hold, and the pool gets enough back from others' `dec`.
#[inline(always)]
pub unsafe fn setmaxnreg_inc<const N: u32>() {
    // SAFETY: as the caller promises.
    unsafe { asm!("setmaxnreg.inc.sync.aligned.u32 {n};", n = const N, options(nostack)) }
}

/// `wgmma.fence.sync.aligned`: orders register accesses before the next wgmma.
///
/// # Safety
/// All threads of the warpgroup arrive.
#[inline(always)]
pub unsafe fn wgmma_fence() {
    // SAFETY: as the caller promises.
    unsafe { asm!("wgmma.fence.sync.aligned;", options(nostack)) }
}

/// `wgmma.commit_group.sync.aligned`.
///
/// # Safety
/// All threads of the warpgroup arrive.
#[inline(always)]
pub unsafe fn wgmma_commit() {
    // SAFETY: as the caller promises.
    unsafe { asm!("wgmma.commit_group.sync.aligned;", options(nostack)) }
}

/// `wgmma.wait_group.sync.aligned`: at most `N` groups stay in flight.
///
/// # Safety
/// All threads of the warpgroup arrive.
#[inline(always)]
pub unsafe fn wgmma_wait<const N: u32>() {
    // SAFETY: as the caller promises.
    unsafe { asm!("wgmma.wait_group.sync.aligned {n};", n = const N, options(nostack)) }
}

/// No instruction: pins a value at this point of the program. To LLVM accumulators are ready when the wgmma's `asm!` returns; pinned after
/// the wait, no read of them moves above it.
///
/// # Safety
/// None.
#[inline(always)]
pub unsafe fn pin(x: &mut f32) {
    // SAFETY: emits a comment.
    unsafe { asm!("// {0}", inout(reg32) * x, options(nostack)) }
}

/// Defines `$name::<A_MN>`, A_MN = 1 for an MN-major A, 0 for a K-major one. `$tb`: the same for B.
macro_rules! wgmma {
    ($name:ident, $ty:literal, $n:literal, $r:literal, $tb:literal, [$($i:literal)*]) => {
        #[doc = concat!("`wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.", $ty, ".", $ty, "`: `d[64, ", $n, "] = a[64, 16] b[16, ", $n,
                        "] (+ d` unless `accumulate` is 0`)`, both operands by descriptor.")]
        ///
        /// # Safety
        /// All threads of the warpgroup arrive, after [`wgmma_fence`]; the descriptors name readable shared memory that is not
        /// written, and `d` is not touched, before [`wgmma_wait`].
        #[inline(always)]
        pub unsafe fn $name<const A_MN: u32>(d: &mut [f32; $r], a: u64, b: u64, accumulate: u32) {
            // SAFETY: as the caller promises.
            unsafe {
                asm!(
                    "{{ .reg .pred p; setp.ne.b32 p, {acc}, 0;",
                    concat!("wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.", $ty, ".", $ty,
                            " {{{0}", $(", {", $i, "}",)* "}}, {a}, {b}, p, 1, 1, {ta}, ", $tb, "; }}"),
                    inout(reg32) d[0], $(inout(reg32) d[$i],)*
                    acc = in(reg32) accumulate, a = in(reg64) a, b = in(reg64) b, ta = const A_MN, options(nostack)
                )
            }
        }
    };
}
macro_rules! wgmma_widths {
    ($ty:literal, $n128:ident, $n192:ident, $n256:ident) => {
        wgmma!($n128, $ty, "128", 64, "1", [
            1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38
            39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
        ]);
        wgmma!($n192, $ty, "192", 96, "1", [
            1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38
            39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73
            74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95
        ]);
        wgmma!($n256, $ty, "256", 128, "1", [
            1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38
            39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73
            74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106
            107 108 109 110 111 112 113 114 115 116 117 118 119 120 121 122 123 124 125 126 127
        ]);
    };
}
wgmma_widths!("bf16", wgmma_bf16_n128, wgmma_bf16_n192, wgmma_bf16_n256);
wgmma_widths!("f16", wgmma_f16_n128, wgmma_f16_n192, wgmma_f16_n256);

wgmma!(wgmma_bf16_n64_k_major, "bf16", "64", 32, "0", [
    1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
]);
wgmma!(wgmma_bf16_n80_k_major, "bf16", "80", 40, "0", [
    1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
]);
wgmma!(wgmma_bf16_n96_k_major, "bf16", "96", 48, "0", [
    1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41
    42 43 44 45 46 47
]);

// ---- signals and data between blocks -------------------------------------------------------------

/// `st.global.cg.v4.f32`: past L1, for another block of this launch.
///
/// # Safety
/// `p` is 16-byte aligned and points to 16 bytes that nobody accesses before a release of this thread's stores.
#[inline(always)]
pub unsafe fn stg128_cg(p: *mut f32, v: [f32; 4]) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("st.global.cg.v4.f32 [{p}], {{{0}, {1}, {2}, {3}}};",
             in(reg32) v[0], in(reg32) v[1], in(reg32) v[2], in(reg32) v[3], p = in(reg64) p, options(nostack))
    }
}

/// `red.release.gpu.global.add.u32` where `ok`.
///
/// # Safety
/// If `ok`, `p` is 4-byte aligned, writable, and accessed atomically only.
#[inline(always)]
pub unsafe fn red_add_release_if(ok: bool, p: *mut u32, v: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; @p red.release.gpu.global.add.u32 [{p}], {v}; }}",
             ok = in(reg32) ok as u32, p = in(reg64) p, v = in(reg32) v, options(nostack))
    }
}

/// `atom.relaxed.gpu.global.add.u32`: the value before.
///
/// # Safety
/// `p` is 4-byte aligned, writable, and accessed atomically only.
#[inline(always)]
pub unsafe fn atomic_add(p: *mut u32, v: u32) -> u32 {
    let r: u32;
    // SAFETY: as the caller promises.
    unsafe {
        asm!("atom.relaxed.gpu.global.add.u32 {r}, [{p}], {v};", p = in(reg64) p, v = in(reg32) v, r = out(reg32) r, options(nostack))
    };
    r
}

/// `ld.acquire.gpu.global.u32`.
///
/// # Safety
/// `p` is 4-byte aligned, readable, and accessed atomically only.
#[inline(always)]
pub unsafe fn ld_acquire(p: *const u32) -> u32 {
    let r: u32;
    // SAFETY: as the caller promises.
    unsafe { asm!("ld.acquire.gpu.global.u32 {r}, [{p}];", p = in(reg64) p, r = out(reg32) r, options(nostack)) };
    r
}

/// `ld.relaxed.gpu.global.s32`: from L2, what another block of this launch may have written.
///
/// # Safety
/// `p` is 4-byte aligned and readable; the write that matters happens before this read.
#[inline(always)]
pub unsafe fn ld_relaxed_s32(p: *const i32) -> i32 {
    let r: i32;
    // SAFETY: as the caller promises.
    unsafe { asm!("ld.relaxed.gpu.global.s32 {r}, [{p}];", p = in(reg64) p, r = out(reg32) r, options(nostack)) };
    r
}

/// `shfl.sync.idx.b32` over the whole warp: the value of lane `lane`.
///
/// # Safety
/// All lanes of the warp arrive.
#[inline(always)]
pub unsafe fn shfl_from(v: u32, lane: u32) -> u32 {
    let r: u32;
    // SAFETY: as the caller promises.
    unsafe {
        asm!("shfl.sync.idx.b32 {r}, {v}, {l}, 31, 0xffffffff;", r = out(reg32) r, v = in(reg32) v, l = in(reg32) lane, options(nomem, nostack))
    };
    r
}

/// `%ctaid.x`, read anew each time: what derives from it is computed again in each role instead of being kept in (or spilled from)
/// registers across the whole kernel.
#[inline(always)]
pub fn ctaid_again() -> u32 {
    let r: u32;
    // SAFETY: reads a special register.
    unsafe { asm!("mov.u32 {r}, %ctaid.x;", r = out(reg32) r, options(nomem, nostack)) };
    r
}

// ---- ordered additions to global memory ----------------------------------------------------------

/// `cp.async.bulk.global.shared::cta.bulk_group`: contiguous bytes to global memory.
///
/// # Safety
/// `dst`, `src` and `bytes` are multiples of 16; the source was written before a [`fence_proxy_async_shared`] of its writers and a barrier,
/// and is not written again before [`bulk_wait_read_if`]; nobody else accesses the destination before [`bulk_wait`].
#[inline(always)]
pub unsafe fn bulk_store(dst: *mut f32, src: u32, bytes: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("cp.async.bulk.global.shared::cta.bulk_group [{d}], [{s}], {n};",
             d = in(reg64) dst, s = in(reg32) src, n = in(reg32) bytes, options(nostack))
    }
}

/// `cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32`: adds contiguous floats to those in global memory.
///
/// # Safety
/// As [`bulk_store`].
#[inline(always)]
pub unsafe fn bulk_add(dst: *mut f32, src: u32, bytes: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{d}], [{s}], {n};",
             d = in(reg64) dst, s = in(reg32) src, n = in(reg32) bytes, options(nostack))
    }
}

/// `cp.async.bulk.wait_group 0`: all of this thread's bulk stores and additions are complete, and visible to it.
///
/// # Safety
/// None.
#[inline(always)]
pub unsafe fn bulk_wait() {
    // SAFETY: accesses no memory.
    unsafe { asm!("cp.async.bulk.wait_group 0;", options(nostack)) }
}

/// `griddepcontrol.launch_dependents`: once every block of this launch has executed it or ended, the blocks of the next launch of the stream
/// may start where there is room, if that is a dependent one. Says nothing about results.
///
/// # Safety
/// The next launch, if dependent, executes [`wait_for_launch_before`] before it touches what this one writes, or writes what this one reads.
#[inline(always)]
pub unsafe fn launch_dependents() {
    // SAFETY: accesses no memory.
    unsafe { asm!("griddepcontrol.launch_dependents;", options(nostack)) }
}

/// `griddepcontrol.wait`: the launch before this one has ended and what it wrote is visible. At once in a launch that is not dependent.
#[inline(always)]
pub fn wait_for_launch_before() {
    // SAFETY: accesses no memory; no load or store moves across it.
    unsafe { asm!("griddepcontrol.wait;", options(nostack)) }
}

/// `red.relaxed.gpu.global.max.s32` where `ok`: an unordered maximum, so its result does not depend on timing.
///
/// # Safety
/// If `ok`, `p` is 4-byte aligned, writable, and accessed by such reductions only during the launch.
#[inline(always)]
pub unsafe fn red_max_s32_if(ok: bool, p: *mut i32, v: i32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; @p red.relaxed.gpu.global.max.s32 [{p}], {v}; }}",
             ok = in(reg32) ok as u32, p = in(reg64) p, v = in(reg32) v, options(nostack))
    }
}
