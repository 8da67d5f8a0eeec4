//! fp16 wgmma in the forms that attention takes: accumulators as C fragments (`tile::fragment`), either order of each operand, A from
//! registers. Operand blocks by descriptor are those of `tile::descriptor`.
//!
//! A descriptor is given as the low word of its block's, and what to add to it: all have one high word, and sums that LLVM does not see take
//! no register across a loop.
use core::arch::asm;

use crate::tile::descriptor::{Block, HIGH_WORD};

/// Order of an operand in shared memory: its K dimension contiguous.
pub const K_MAJOR: u32 = 0;
/// Its M or N dimension contiguous.
pub const MN_MAJOR: u32 = 1;

/// Defines `$name::<A, B>`, both operands by descriptor.
macro_rules! wgmma {
    ($name:ident, $n:literal, $groups:literal, $r:literal, [$($i:literal)*]) => {
        #[doc = concat!("`wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.f16.f16`: `d[64, ", $n, "] = a[64, 16] b[16, ", $n,
                        "] (+ d` unless `accumulate` is 0`)`, operands by descriptor, in the orders `A` and `B`.")]
        ///
        /// # Safety
        /// All threads of the warpgroup arrive, after a `wgmma_fence`; the descriptors name readable shared memory that is not
        /// written, and `d` is not touched, before the `wgmma_wait`.
        #[inline(always)]
        pub unsafe fn $name<const A: u32, const B: u32>(d: &mut [[f32; 4]; $groups], a: Block, b: Block, accumulate: u32) {
            // SAFETY: the same floats; else as the caller promises.
            unsafe {
                let d = &mut *core::ptr::from_mut(d).cast::<[f32; $r]>();
                asm!(
                    "{{ .reg .pred p; .reg .b32 x, y; .reg .b64 a, b; setp.ne.b32 p, {acc}, 0;",
                    "add.u32 x, {al}, {ao}; add.u32 y, {bl}, {bo}; mov.b64 a, {{x, {h}}}; mov.b64 b, {{y, {h}}};",
                    concat!("wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.f16.f16",
                            " {{{0}", $(", {", $i, "}",)* "}}, a, b, p, 1, 1, {ta}, {tb}; }}"),
                    inout(reg32) d[0], $(inout(reg32) d[$i],)*
                    acc = in(reg32) accumulate, al = in(reg32) a.low_word, ao = in(reg32) a.offset,
                    bl = in(reg32) b.low_word, bo = in(reg32) b.offset, h = const HIGH_WORD, ta = const A, tb = const B,
                    options(nostack)
                )
            }
        }
    };
}
wgmma!(wgmma_n64, "64", 8, 32, [
    1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
]);
wgmma!(wgmma_n128, "128", 16, 64, [
    1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
    40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
]);

/// Defines `$name::<B>`, A from registers.
macro_rules! wgmma_from_registers {
    ($name:ident, $n:literal, [$($i:literal)*]) => {
        #[doc = concat!("`wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.f16.f16`: `d[64, ", $n, "] += a[64, 16] b[16, ", $n,
                        "]`, `a` as A fragments from registers (a warp's 16 rows), `b` by descriptor in the order `B`.")]
        ///
        /// # Safety
        /// As [`wgmma_n64`].
        #[inline(always)]
        pub unsafe fn $name<const B: u32>(d: &mut [[f32; 4]; 8], a: [u32; 4], b: Block) {
            // SAFETY: the same floats; else as the caller promises.
            unsafe {
                let d = &mut *core::ptr::from_mut(d).cast::<[f32; 32]>();
                asm!(
                    "{{ .reg .b32 y; .reg .b64 b; add.u32 y, {bl}, {bo}; mov.b64 b, {{y, {h}}};",
                    concat!("wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.f16.f16",
                            " {{{0}", $(", {", $i, "}",)* "}}, {{{a0}, {a1}, {a2}, {a3}}}, b, 1, 1, 1, {tb}; }}"),
                    inout(reg32) d[0], $(inout(reg32) d[$i],)*
                    a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                    bl = in(reg32) b.low_word, bo = in(reg32) b.offset, h = const HIGH_WORD, tb = const B,
                    options(nostack)
                )
            }
        }
    };
}
wgmma_from_registers!(wgmma_n64_from_registers, "64", [
    1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
]);
