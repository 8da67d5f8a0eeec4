//! ldmatrix, stmatrix and mma.sync: collectives of a warp, so never `pure`, and all 32 lanes must arrive.
use core::arch::asm;

/// `ldmatrix.sync.aligned.m8n8.x4.shared.b16`: lane `8 i + r` gives the address of row `r` of 8x8 matrix `i`.
///
/// # Safety
/// All lanes of the warp arrive; each address is 16-byte aligned and readable shared memory, ordered after its writers.
#[inline(always)]
pub unsafe fn ldmatrix_x4(a: u32) -> [u32; 4] {
    let (x, y, z, w): (u32, u32, u32, u32);
    // SAFETY: as the caller promises.
    unsafe {
        asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{x}, {y}, {z}, {w}}}, [{a}];",
             x = out(reg32) x, y = out(reg32) y, z = out(reg32) z, w = out(reg32) w, a = in(reg32) a, options(readonly, nostack))
    };
    [x, y, z, w]
}

/// `ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16`: each 8x8 matrix arrives transposed.
///
/// # Safety
/// As [`ldmatrix_x4`].
#[inline(always)]
pub unsafe fn ldmatrix_x4_trans(a: u32) -> [u32; 4] {
    let (x, y, z, w): (u32, u32, u32, u32);
    // SAFETY: as the caller promises.
    unsafe {
        asm!("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{x}, {y}, {z}, {w}}}, [{a}];",
             x = out(reg32) x, y = out(reg32) y, z = out(reg32) z, w = out(reg32) w, a = in(reg32) a, options(readonly, nostack))
    };
    [x, y, z, w]
}

/// `stmatrix.sync.aligned.m8n8.x4.shared.b16` (sm_90): the inverse of [`ldmatrix_x4`].
///
/// # Safety
/// All lanes of the warp arrive; each address is 16-byte aligned shared memory that no other warp accesses before the next barrier.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub unsafe fn stmatrix_x4(a: u32, v: [u32; 4]) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("stmatrix.sync.aligned.m8n8.x4.shared.b16 [{a}], {{{x}, {y}, {z}, {w}}};",
             a = in(reg32) a, x = in(reg32) v[0], y = in(reg32) v[1], z = in(reg32) v[2], w = in(reg32) v[3], options(nostack))
    }
}

/// `stmatrix.sync.aligned.m8n8.x4.trans.shared.b16` (sm_90): the inverse of [`ldmatrix_x4_trans`], each 8x8 matrix is stored transposed.
///
/// # Safety
/// All lanes of the warp arrive; each address is 16-byte aligned shared memory that no other warp accesses before the next barrier.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub unsafe fn stmatrix_x4_trans(a: u32, v: [u32; 4]) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{a}], {{{x}, {y}, {z}, {w}}};",
             a = in(reg32) a, x = in(reg32) v[0], y = in(reg32) v[1], z = in(reg32) v[2], w = in(reg32) v[3], options(nostack))
    }
}

macro_rules! mma {
    ($(#[$doc:meta])* $name:ident, $ty:literal) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// All lanes of the warp arrive.
        #[inline(always)]
        pub unsafe fn $name(d: &mut [f32; 4], a: [u32; 4], b0: u32, b1: u32) {
            // SAFETY: register arithmetic across the warp.
            unsafe {
                asm!(concat!("mma.sync.aligned.m16n8k16.row.col.f32.", $ty, ".", $ty,
                             ".f32 {{{d0}, {d1}, {d2}, {d3}}}, {{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, {{{d0}, {d1}, {d2}, {d3}}};"),
                     d0 = inout(reg32) d[0], d1 = inout(reg32) d[1], d2 = inout(reg32) d[2], d3 = inout(reg32) d[3],
                     a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                     b0 = in(reg32) b0, b1 = in(reg32) b1, options(nomem, nostack))
            }
        }
    };
}
mma!(
    /// `mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32`, `d += a * b`.
    mma_f16,
    "f16"
);
mma!(
    /// `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`, `d += a * b`.
    mma_bf16,
    "bf16"
);
