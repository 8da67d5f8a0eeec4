//! The ring of stages between a team's producer warp and the warps that multiply dA^T = out_weight^T grad_output^T.
use cuda_std::thread::thread_idx_x;

use super::AudioEntry;
use super::team::Item;
use crate::config::attention::HEAD_DIM;
use crate::config::audio_backward::{STAGE_K, multiplying_warps, stage_bytes};
use crate::ptx::hopper::{
    fence_mbarrier_init, mbarrier_arrive_expect_tx_if, mbarrier_arrive_if, mbarrier_init, mbarrier_wait, pin,
    tma_load_2d_if, wgmma_bf16_n64_k_major, wgmma_bf16_n80_k_major, wgmma_commit, wgmma_fence, wgmma_wait,
};
use crate::ptx::sync::warp_sync;
use crate::tile::descriptor::{descriptor, k16_step};
use crate::tile::layout::ROW_BYTES;

/// Bytes of a stage's block of out_weight, `[STAGE_K, 64]`.
const WEIGHT_BYTES: u32 = STAGE_K * ROW_BYTES;

/// Position in the ring of a team with `ROW_TILES` row tiles. `full` of a stage completes when its bytes have arrived, `empty` when every
/// multiplying warp has released it. Producer and multiplying warps each keep their own position, from item to item.
#[derive(Clone, Copy)]
pub(super) struct Ring<const ROW_TILES: usize> {
    /// Shared address of the first stage.
    pub first: u32,
    /// Shared address of the mbarriers.
    pub barriers: u32,
    /// Stages of the ring.
    pub stages: u32,
    /// Next stage.
    pub stage: u32,
    /// Parity of its phase.
    pub parity: u32,
}

impl<const ROW_TILES: usize> Ring<ROW_TILES> {
    const STAGE_BYTES: u32 = stage_bytes(ROW_TILES as u32);

    #[inline(always)]
    fn at(&self) -> u32 {
        self.first + self.stage * Self::STAGE_BYTES
    }

    #[inline(always)]
    fn full(&self) -> u32 {
        self.barriers + 16 * self.stage
    }

    #[inline(always)]
    fn empty(&self) -> u32 {
        self.barriers + 16 * self.stage + 8
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.stage += 1;
        if self.stage == self.stages {
            self.stage = 0;
            self.parity ^= 1;
        }
    }

    /// Initialises the mbarriers.
    ///
    /// # Safety
    /// One thread, once; a barrier of the team comes before any multiplying warp uses the ring.
    #[inline(always)]
    pub unsafe fn init(&self) {
        // SAFETY: the mbarriers lie in shared memory, on 8-byte boundaries.
        unsafe {
            for stage in 0..self.stages {
                mbarrier_init(self.barriers + 16 * stage, 1);
                mbarrier_init(self.barriers + 16 * stage + 8, multiplying_warps(ROW_TILES as u32));
            }
            fence_mbarrier_init();
        }
    }

    /// Fills stages with the item's k-blocks `first..end`. Its first lane does it, by predicates: a branch of one lane may make LLVM copy the barriers
    /// around it.
    ///
    /// # Safety
    /// One warp, after [`Ring::init`]; the stages are multiplied in the same order. Nobody else uses the stages' memory.
    #[inline(always)]
    pub unsafe fn fill<E: AudioEntry>(&mut self, item: Item, first: u32, end: u32) {
        let maps = E::maps();
        let fills = thread_idx_x() % 32 == 0;
        // SAFETY: the whole warp is here. The other lanes come after the one that may have initialised the mbarriers.
        unsafe { warp_sync() };
        for block in first..end {
            let k = block * STAGE_K;
            let (at, full) = (self.at(), self.full());
            // SAFETY: a fresh mbarrier counts as past the phase of parity 1; both boxes lie in the stage and have its bytes together.
            unsafe {
                mbarrier_wait(self.empty(), self.parity ^ 1);
                mbarrier_arrive_expect_tx_if(fills, full, Self::STAGE_BYTES);
                tma_load_2d_if(fills, at, maps, [item.head * HEAD_DIM, k], full);
                tma_load_2d_if(fills, at + WEIGHT_BYTES, maps.wrapping_add(1), [k, item.start], full);
            }
            self.advance();
        }
    }

    /// Multiplies `k_blocks` k-blocks: `acc = dA^T[64, tokens of this warpgroup]`, acc[4 j + e] is row 16 warp + g (e < 2) or 8 further, token
    /// 8 j + 2 t + e % 2. `first_token` is that of the warpgroup.
    ///
    /// # Safety
    /// All threads of the multiplying warps, after [`Ring::init`] and a barrier of the team.
    #[inline(always)]
    pub unsafe fn multiply<const R: usize>(&mut self, acc: &mut [f32; R], k_blocks: u32, first_token: u32) {
        let leader = thread_idx_x() % 32 == 0;
        let mut previous = self.empty();
        // SAFETY: a stage is full before it is read, and released when the wgmma that read it have finished; the accumulators are pinned after
        // the last wait.
        unsafe {
            for i in 0..k_blocks {
                mbarrier_wait(self.full(), self.parity);
                let a = descriptor(self.at());
                let b = descriptor(self.at() + WEIGHT_BYTES + first_token * ROW_BYTES);
                wgmma_fence();
                multiply(acc, a, b, i);
                for step in 1..STAGE_K as u64 / 16 {
                    multiply(acc, a + step * k16_step(true), b + step * k16_step(false), 1);
                }
                wgmma_commit();
                // One group stays in flight; the stage before it can be filled again.
                wgmma_wait::<1>();
                mbarrier_arrive_if(leader & (i > 0), previous);
                previous = self.empty();
                self.advance();
            }
            wgmma_wait::<0>();
            mbarrier_arrive_if(leader, previous);
            for x in acc.iter_mut() {
                pin(x);
            }
        }
    }
}

/// `acc[64, 2 R] = a[64, 16] b[16, 2 R] (+ acc unless accumulate is 0)`, a MN-major, b K-major.
///
/// # Safety
/// As the wgmma functions.
#[inline(always)]
unsafe fn multiply<const R: usize>(acc: &mut [f32; R], a: u64, b: u64, accumulate: u32) {
    const { assert!(R == 32 || R == 40) };
    let acc: *mut [f32; R] = acc;
    // SAFETY: the arm of this R is taken, so the cast does not change the type; else as the caller promises.
    unsafe {
        match R {
            32 => wgmma_bf16_n64_k_major::<1>(&mut *acc.cast(), a, b, accumulate),
            _ => wgmma_bf16_n80_k_major::<1>(&mut *acc.cast(), a, b, accumulate),
        }
    }
}
