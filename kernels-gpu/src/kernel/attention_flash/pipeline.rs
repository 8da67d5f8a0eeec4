//! mbarriers of `STAGES` buffers that go round between a filler and a reader.
use crate::ptx::hopper::{fence_mbarrier_init, mbarrier_init, mbarrier_wait};

/// Position in a ring of `STAGES` buffers. Filler and reader each keep their own and advance it once a buffer; the stage and the parity of
/// its phase live here and nowhere else.
#[derive(Clone, Copy)]
pub(super) struct Pipeline<const STAGES: u32> {
    barriers: u32,
    stage: u32,
    parity: u32,
}

impl<const STAGES: u32> Pipeline<STAGES> {
    /// The ring whose mbarriers, `full[STAGES]` and `empty[STAGES]`, are at shared address `barriers`.
    #[inline(always)]
    pub fn new(barriers: u32) -> Self {
        Pipeline { barriers, stage: 0, parity: 0 }
    }

    /// The same ring after `buffers` buffers.
    #[inline(always)]
    pub fn at(barriers: u32, buffers: u32) -> Self {
        const { assert!(STAGES.is_power_of_two()) };
        Pipeline { barriers, stage: buffers % STAGES, parity: (buffers / STAGES) & 1 }
    }

    /// Initialises the mbarriers for so many arrivals of fillers and of readers at each buffer.
    ///
    /// # Safety
    /// One thread, once, before a block barrier; the mbarriers are the ring's own shared memory.
    #[inline(always)]
    pub unsafe fn init(&self, fillers: u32, readers: u32) {
        // SAFETY: as the caller promises.
        unsafe {
            for stage in 0..STAGES {
                mbarrier_init(self.barriers + 8 * stage, fillers);
                mbarrier_init(self.barriers + 8 * (STAGES + stage), readers);
            }
            fence_mbarrier_init();
        }
    }

    /// The stage.
    #[inline(always)]
    pub fn stage(&self) -> u32 {
        self.stage
    }

    /// mbarrier that says that the buffer is full.
    #[inline(always)]
    pub fn full(&self) -> u32 {
        self.barriers + 8 * self.stage
    }

    /// mbarrier that says that the buffer is empty.
    #[inline(always)]
    pub fn empty(&self) -> u32 {
        self.barriers + 8 * (STAGES + self.stage)
    }

    /// Filler: waits until the buffer is empty. A fresh mbarrier counts as past the phase of parity 1: the first round finds all empty.
    ///
    /// # Safety
    /// After `init` and the block barrier.
    #[inline(always)]
    pub unsafe fn wait_empty(&self) {
        // SAFETY: initialised, as the caller promises.
        unsafe { mbarrier_wait(self.empty(), self.parity ^ 1) }
    }

    /// Reader: waits until the buffer is full.
    ///
    /// # Safety
    /// As [`Pipeline::wait_empty`].
    #[inline(always)]
    pub unsafe fn wait_full(&self) {
        // SAFETY: initialised, as the caller promises.
        unsafe { mbarrier_wait(self.full(), self.parity) }
    }

    /// Goes on to the next buffer.
    #[inline(always)]
    pub fn advance(&mut self) {
        self.stage += 1;
        if self.stage == STAGES {
            self.stage = 0;
            self.parity ^= 1;
        }
    }
}
