//! Turns of the two consumer warpgroups at the matrix units: while the products of one are worked on, the other computes exponentials.
use crate::config::attention_flash::{THREADS, named_barrier::TURN};
use crate::ptx::hopper::{named_barrier, named_barrier_arrive};
use crate::ptx::sync::shfl_first;

/// A warpgroup's place at the table.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    warpgroup: u32,
}

impl Turn {
    /// Gives warpgroup 0 the first turn.
    ///
    /// # Safety
    /// All threads of the warpgroup, before anything else; `thread` counts those of both.
    #[inline(always)]
    pub unsafe fn start(thread: u32) -> Turn {
        // SAFETY: as the caller promises.
        unsafe {
            let turn = Turn { warpgroup: shfl_first(thread / 128) };
            if turn.warpgroup == 1 {
                turn.pass();
            }
            turn
        }
    }

    /// The warpgroup; the compiler can see that it is the same for a whole warp.
    #[inline(always)]
    pub fn warpgroup(&self) -> u32 {
        self.warpgroup
    }

    /// Waits for the warpgroup's turn.
    ///
    /// # Safety
    /// All threads of the warpgroup; both warpgroups take as many turns.
    #[inline(always)]
    pub unsafe fn wait(&self) {
        // SAFETY: as the caller promises.
        unsafe { named_barrier(TURN + self.warpgroup, THREADS - 128) }
    }

    /// Gives the turn to the other warpgroup.
    ///
    /// # Safety
    /// All threads of the warpgroup, after [`Turn::wait`].
    #[inline(always)]
    pub unsafe fn pass(&self) {
        // SAFETY: as the caller promises.
        unsafe { named_barrier_arrive(TURN + (1 - self.warpgroup), THREADS - 128) }
    }
}
