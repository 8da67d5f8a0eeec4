//! The ring of shared-memory stages between the producer and the consumers of the Hopper GEMM.
//!
//! `full[stage]` completes a phase when the producer has arrived and the bytes that it announced are there; `empty[stage]`
//! when every consumer warpgroup has released the stage. Producer and consumers each keep their own [`Ring`] and advance it once a stage:
//! the stage and the parity of its phase live here and nowhere else.
//!
//! In products (`CLUSTER`) a producer also loads into the stage of the other blocks of its cluster: a stage is empty when the consumers of all of them have
//! released it. The conversion's ring is the block's own, with mbarriers of its own in the same stages: the blocks of a cluster convert at
//! their own pace.
use cuda_std::shared;

use crate::config::wgmma::{
    A_BYTES, CHUNK_BYTES, CLUSTER_SIZE, CONSUMERS, CONVERSION_BARRIERS_OFFSET, CONVERTED_OFFSET, EMPTY_OFFSET,
    FULL_OFFSET, OUTPUT_CHUNKS, OUTPUT_OFFSET, STAGE_BYTES, STAGES,
};
use crate::ptx::hopper::{
    mbarrier_arrive_at_if, mbarrier_arrive_expect_tx, mbarrier_arrive_if, mbarrier_init, mbarrier_wait,
    mbarrier_wait_if,
};

/// Position in the ring.
#[derive(Clone, Copy)]
pub(crate) struct Ring<const CLUSTER: bool> {
    base: u32,
    stage: u32,
    parity: u32,
}

/// A stage that a consumer has still to release.
#[derive(Clone, Copy)]
pub(crate) struct Unreleased<const CLUSTER: bool> {
    empty: u32,
}

impl<const CLUSTER: bool> Ring<CLUSTER> {
    /// From the place of a mbarrier of the products' ring to that of this one's.
    const BARRIERS: u32 = if CLUSTER { 0 } else { CONVERSION_BARRIERS_OFFSET - FULL_OFFSET };

    /// The start of the ring, which is the start of the block's dynamic shared memory.
    #[inline(always)]
    pub fn new() -> Self {
        Ring { base: shared::dynamic_base(), stage: 0, parity: 0 }
    }

    /// Initialises the mbarriers.
    ///
    /// # Safety
    /// One thread, once, before a `fence_mbarrier_init` and a barrier of the cluster.
    #[inline(always)]
    pub unsafe fn init(&self) {
        let blocks = if CLUSTER { CLUSTER_SIZE } else { 1 };
        // SAFETY: the offsets lie in the shared memory of the launch, 8-byte aligned (config.rs); the caller's barrier follows.
        unsafe {
            for stage in 0..STAGES {
                mbarrier_init(self.base + Self::BARRIERS + FULL_OFFSET + 8 * stage, 1);
                mbarrier_init(self.base + Self::BARRIERS + EMPTY_OFFSET + 8 * stage, blocks * CONSUMERS);
            }
        }
    }

    /// Goes on to the next stage.
    #[inline(always)]
    pub fn advance(&mut self) {
        self.stage += 1;
        if self.stage == STAGES {
            self.stage = 0;
            self.parity ^= 1;
        }
    }

    /// Shared address of the stage, and of A in it.
    #[inline(always)]
    pub fn a(&self) -> u32 {
        self.base + self.stage * STAGE_BYTES
    }

    /// Shared address of B in the stage.
    #[inline(always)]
    pub fn b(&self) -> u32 {
        self.a() + A_BYTES
    }

    /// mbarrier that the loads into this stage complete on.
    #[inline(always)]
    pub fn full(&self) -> u32 {
        self.base + Self::BARRIERS + FULL_OFFSET + 8 * self.stage
    }

    /// mbarrier that the consumers release this stage at.
    #[inline(always)]
    fn empty(&self) -> u32 {
        self.base + Self::BARRIERS + EMPTY_OFFSET + 8 * self.stage
    }

    /// Producer: waits until the stage is free, then announces `bytes` of loads into it.
    ///
    /// # Safety
    /// The producer thread, after `init` and the barrier behind it; it then issues loads of exactly `bytes`, and advances.
    #[inline(always)]
    pub unsafe fn acquire(&self, bytes: u32) {
        // SAFETY: initialised, as the caller promises. A fresh barrier counts as past the phase of parity 1: the first round finds all free.
        unsafe {
            mbarrier_wait(self.empty(), self.parity ^ 1);
            mbarrier_arrive_expect_tx(self.full(), bytes);
        }
    }

    /// Producer: waits until all stages are free, after the last one that it filled and the advance behind it.
    ///
    /// # Safety
    /// As [`Ring::acquire`]; the producer then fills none.
    #[inline(always)]
    pub unsafe fn wait_until_released(mut self) {
        for _ in 0..STAGES {
            // SAFETY: initialised; a stage that was never filled counts as free, as in `acquire`.
            unsafe { mbarrier_wait(self.empty(), self.parity ^ 1) };
            self.advance();
        }
    }

    /// Consumer: waits until the stage is filled.
    ///
    /// # Safety
    /// After `init` and the barrier behind it.
    #[inline(always)]
    pub unsafe fn wait_full(&self) {
        // SAFETY: initialised, as the caller promises.
        unsafe { mbarrier_wait(self.full(), self.parity) }
    }

    /// Consumer: gives back a stage that the warpgroup does not read, when it is filled; by its thread 0. The others must not wait for it: the
    /// stage may be filled again before the last of them looks, and a parity says nothing of a phase two ahead. A barrier with that one comes before they
    /// wait for the stage in the next round.
    ///
    /// # Safety
    /// As [`Ring::wait_full`]; once a stage and round.
    #[inline(always)]
    pub unsafe fn release_unread(&self, thread: u32) {
        // SAFETY: initialised, as the caller promises. The stage is filled: all have released it in the round before, so this arrival counts for this one.
        unsafe {
            mbarrier_wait_if(thread == 0, self.full(), self.parity);
            self.unreleased().release(thread, true);
        }
    }

    /// Consumer: what to [`release`](Unreleased::release) when the stage has been read.
    #[inline(always)]
    pub fn unreleased(&self) -> Unreleased<CLUSTER> {
        Unreleased { empty: self.empty() }
    }

    /// Shared address of output chunk `chunk` (`0..OUTPUT_CHUNKS`) of a consumer warpgroup.
    #[inline(always)]
    pub fn output(&self, warpgroup: u32, chunk: u32) -> u32 {
        self.base + OUTPUT_OFFSET + (warpgroup * OUTPUT_CHUNKS + chunk) * CHUNK_BYTES
    }
}

impl<const CLUSTER: bool> Unreleased<CLUSTER> {
    /// Where `ok`, gives the stage back to all producers that load into it: the warpgroup's first threads arrive, thread `i` at block `i` of the cluster, or
    /// thread 0 at its own block.
    ///
    /// # Safety
    /// If `ok`, all threads of the warpgroup have waited for the stage, all their reads of it are complete and ordered before these arrivals; once a stage and
    /// round.
    #[inline(always)]
    pub unsafe fn release(self, thread: u32, ok: bool) {
        // SAFETY: `empty` expects one arrival of each warpgroup a round, as the caller promises.
        unsafe {
            if CLUSTER {
                mbarrier_arrive_at_if(ok & (thread < CLUSTER_SIZE), self.empty, thread);
            } else {
                mbarrier_arrive_if(ok & (thread == 0), self.empty);
            }
        }
    }
}

/// The end of a cluster's conversion: from then on its producers load into each other's stages.
#[derive(Clone, Copy)]
pub(crate) struct Converted {
    barrier: u32,
}

impl Converted {
    /// In the block's dynamic shared memory.
    #[inline(always)]
    pub fn new() -> Self {
        Converted { barrier: shared::dynamic_base() + CONVERTED_OFFSET }
    }

    /// Initialises the mbarrier.
    ///
    /// # Safety
    /// As [`Ring::init`].
    #[inline(always)]
    pub unsafe fn init(self) {
        // SAFETY: inside the shared memory of the launch, 8-byte aligned (config.rs); the caller's barrier follows.
        unsafe { mbarrier_init(self.barrier, CLUSTER_SIZE * CONSUMERS) }
    }

    /// A consumer warpgroup has read all that it will of what its block alone has loaded.
    ///
    /// # Safety
    /// All threads of the warpgroup, whose reads are ordered before, once; the blocks of the cluster have not exited.
    #[inline(always)]
    pub unsafe fn arrive(self, thread: u32) {
        // SAFETY: initialised; the caller's.
        unsafe { mbarrier_arrive_at_if(thread < CLUSTER_SIZE, self.barrier, thread) }
    }

    /// Producer: waits until all blocks of the cluster have converted.
    ///
    /// # Safety
    /// Initialised.
    #[inline(always)]
    pub unsafe fn wait(self) {
        // SAFETY: the caller's.
        unsafe { mbarrier_wait(self.barrier, 0) }
    }
}
