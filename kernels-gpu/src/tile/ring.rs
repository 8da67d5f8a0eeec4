//! The ring of shared-memory stages between the producer and the consumers of the Hopper GEMM.
//!
//! `full[stage]` completes a phase when the producer has arrived and the bytes that it announced are there; `empty[stage]`
//! when every consumer warpgroup has released the stage. Producer and consumers each keep their own [`Ring`] and advance it once a stage:
//! the stage and the parity of its phase live here and nowhere else.
use cuda_std::shared;

use crate::config::wgmma::{
    A_BYTES, CHUNK_BYTES, EMPTY_OFFSET, FULL_OFFSET, OUTPUT_CHUNKS, OUTPUT_OFFSET, STAGE_BYTES, STAGES,
};
use crate::ptx::hopper::{
    fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_arrive_if, mbarrier_init, mbarrier_wait, mbarrier_wait_if,
};

/// Position in the ring.
#[derive(Clone, Copy)]
pub(crate) struct Ring {
    base: u32,
    stage: u32,
    parity: u32,
}

/// A stage that a consumer has still to release.
#[derive(Clone, Copy)]
pub(crate) struct Unreleased {
    empty: u32,
}

impl Ring {
    /// The start of the ring, which is the start of the block's dynamic shared memory.
    #[inline(always)]
    pub fn new() -> Self {
        Ring { base: shared::dynamic_base(), stage: 0, parity: 0 }
    }

    /// Initialises the mbarriers.
    ///
    /// # Safety
    /// One thread, once, before a block barrier.
    #[inline(always)]
    pub unsafe fn init(&self, consumers: u32) {
        // SAFETY: the offsets lie in the shared memory of the launch, 8-byte aligned (config.rs); the caller's barrier follows.
        unsafe {
            for stage in 0..STAGES {
                mbarrier_init(self.base + FULL_OFFSET + 8 * stage, 1);
                mbarrier_init(self.base + EMPTY_OFFSET + 8 * stage, consumers);
            }
            fence_mbarrier_init();
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
        self.base + FULL_OFFSET + 8 * self.stage
    }

    /// Producer: waits until the stage is free, then announces `bytes` of loads into it.
    ///
    /// # Safety
    /// The producer thread, after `init` and the block barrier; it then issues loads of exactly `bytes`, and advances.
    #[inline(always)]
    pub unsafe fn acquire(&self, bytes: u32) {
        // SAFETY: initialised, as the caller promises. A fresh barrier counts as past the phase of parity 1: the first round finds all free.
        unsafe {
            mbarrier_wait(self.base + EMPTY_OFFSET + 8 * self.stage, self.parity ^ 1);
            mbarrier_arrive_expect_tx(self.full(), bytes);
        }
    }

    /// Consumer: waits until the stage is filled.
    ///
    /// # Safety
    /// After `init` and the block barrier.
    #[inline(always)]
    pub unsafe fn wait_full(&self) {
        // SAFETY: initialised, as the caller promises.
        unsafe { mbarrier_wait(self.full(), self.parity) }
    }

    /// Consumer: gives back a stage that the warpgroup does not read, when it is filled; by its one `leader`. The others must not wait for it: the
    /// stage may be filled again before the last of them looks, and a parity says nothing of a phase two ahead. A barrier with the leader comes before they
    /// wait for the stage in the next round.
    ///
    /// # Safety
    /// As [`Ring::wait_full`]; once a stage and round.
    #[inline(always)]
    pub unsafe fn release_unread(&self, leader: bool) {
        // SAFETY: initialised, as the caller promises. The stage is filled: all have released it in the round before, so this arrival counts for this one.
        unsafe {
            mbarrier_wait_if(leader, self.full(), self.parity);
            self.unreleased().release(leader);
        }
    }

    /// Consumer: what to [`release`](Unreleased::release) when the stage has been read.
    #[inline(always)]
    pub fn unreleased(&self) -> Unreleased {
        Unreleased { empty: self.base + EMPTY_OFFSET + 8 * self.stage }
    }

    /// Shared address of output chunk `chunk` (`0..OUTPUT_CHUNKS`) of a consumer warpgroup.
    #[inline(always)]
    pub fn output(&self, warpgroup: u32, chunk: u32) -> u32 {
        self.base + OUTPUT_OFFSET + (warpgroup * OUTPUT_CHUNKS + chunk) * CHUNK_BYTES
    }
}

impl Unreleased {
    /// Gives the stage back to the producer, for the warpgroup whose one `leader` arrives.
    ///
    /// # Safety
    /// All threads of the warpgroup have waited for the stage, all their reads of it are complete and ordered before the leader's arrival; once a stage and
    /// round.
    #[inline(always)]
    pub unsafe fn release(self, leader: bool) {
        // SAFETY: `empty` expects one arrival of each warpgroup a round, as the caller promises.
        unsafe { mbarrier_arrive_if(leader, self.empty) }
    }
}
