//! Position of the thread in its block and grid, and the block-wide barrier.

use core::arch::nvptx;

/// Defines a function that reads one special register of the thread.
macro_rules! special_register {
    ($($(#[$doc:meta])* $name:ident = $intrinsic:ident;)*) => { $(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name() -> u32 {
            // SAFETY: reading the register has no precondition.
            unsafe { nvptx::$intrinsic() as u32 }
        }
    )* };
}

special_register! {
    /// `%tid.x`: index of the thread in its block.
    thread_idx_x = _thread_idx_x;
    /// `%tid.y`.
    thread_idx_y = _thread_idx_y;
    /// `%tid.z`.
    thread_idx_z = _thread_idx_z;
    /// `%ntid.x`: threads of a block along x.
    block_dim_x = _block_dim_x;
    /// `%ntid.y`.
    block_dim_y = _block_dim_y;
    /// `%ntid.z`.
    block_dim_z = _block_dim_z;
    /// `%ctaid.x`: index of the block in the grid.
    block_idx_x = _block_idx_x;
    /// `%ctaid.y`.
    block_idx_y = _block_idx_y;
    /// `%ctaid.z`.
    block_idx_z = _block_idx_z;
    /// `%nctaid.x`: blocks of the grid along x.
    grid_dim_x = _grid_dim_x;
    /// `%nctaid.y`.
    grid_dim_y = _grid_dim_y;
    /// `%nctaid.z`.
    grid_dim_z = _grid_dim_z;
}

/// `barrier.sync 0`: waits for all threads of the block and orders their accesses to shared and global memory.
///
/// The intrinsic, not `asm!`: LLVM knows it as convergent and never copies it into both sides of a branch.
///
/// # Safety
/// Every thread of the block must reach the same call (a thread that has exited counts as arrived).
#[inline(always)]
pub unsafe fn sync_threads() {
    // SAFETY: the caller's.
    unsafe { nvptx::_syncthreads() }
}
