//! Dynamic shared memory: the bytes that a launch asks for.

use core::arch::{asm, global_asm};

// The one declaration in a module. 1024 bytes is the strictest alignment that an instruction asks for (TMA and wgmma with 128-byte
// swizzle).
global_asm!(".extern .shared .align 1024 .b8 dyn_smem[];");

/// Address of the block's dynamic shared memory in the shared window (32 bits, as `ld.shared` and its like take it), a multiple of 1024.
#[inline(always)]
pub fn dynamic_base() -> u32 {
    let address: u32;
    // SAFETY: takes the address of a variable of the module; no memory is touched.
    unsafe { asm!("mov.u32 {}, dyn_smem;", out(reg32) address, options(pure, nomem, nostack, preserves_flags)) };
    address
}
