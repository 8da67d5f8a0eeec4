//! What the short and the long attention kernels compute alike, on one warp's fragments.
use crate::ptx::convert::{ex2, f16x2, f16x2_to_f32, fma};
use crate::ptx::matrix::mma_f16;
use crate::ptx::memory::{lds32, sts32};
use crate::tile::fragment::{ONES, Pair, pow2, scale_exponent};
use core::f32::consts::LOG2_E;

/// P is kept as `P * 2^15`, unnormalised.
pub const P_EXPONENT: i32 = 15;
/// dS is kept as `dS * 2^(dA's + V's exponent - 22)`: `|P (dP - delta)| <= 2 * 64 * 2^15 * 2^15 = 2^37` in the units of the tiles.
pub const DS_EXPONENT: i32 = -22;

/// `scores * factor` = logits in base 2, for products of tiles scaled by `2^e` together. The clamp keeps the factor normal (a smaller
/// one would give logits of 0 just the same).
#[inline(always)]
pub fn logit_factor(scale: f32, e: i32) -> f32 {
    scale * LOG2_E * pow2((-e).clamp(-100, 120))
}

/// `scale` as mantissa in [0.5, 1) and exponent: the mantissa goes into dS, the exponent into the outputs' power of two.
#[inline(always)]
pub fn split_scale(scale: f32) -> (f32, i32) {
    let e = ((scale.to_bits() >> 23) & 0xff) as i32 - 126;
    (scale * pow2(-e), e)
}

/// Scale exponent of a tile from the exponent fields that its `WARPS` warps left at `fields`.
///
/// # Safety
/// The fields are ordered after their writers.
#[inline(always)]
pub unsafe fn tile_exponent<const WARPS: usize>(fields: u32) -> i32 {
    let mut largest = 0;
    for w in 0..WARPS as u32 {
        // SAFETY: as the caller promises.
        largest = largest.max(unsafe { lds32(fields + 4 * w) });
    }
    scale_exponent(largest)
}

/// `s = 2^(s * factor + shift of its row)`.
#[inline(always)]
pub fn exp_scores(scores: &mut Pair, factor: f32, shift: [f32; 2]) {
    for half in scores {
        for i in 0..4 {
            half[i] = ex2(fma(half[i], factor, shift[i >> 1]));
        }
    }
}

/// Adds the row sums of an A fragment, exactly as rounded: elements 0 and 2 are those of rows `g` and `g + 8`.
///
/// # Safety
/// All lanes of the warp arrive.
#[inline(always)]
pub unsafe fn add_row_sums(sums: &mut [f32; 4], a: [u32; 4]) {
    // SAFETY: the caller's.
    unsafe { mma_f16(sums, a, ONES, ONES) };
}

/// `dS = P (dP * unit + shift of its row)`, as an A fragment.
#[inline(always)]
pub fn ds_fragment(p: &[u32; 4], dp: &Pair, unit: f32, shift: [f32; 2]) -> [u32; 4] {
    let mut ds = [0u32; 4];
    for i in 0..4 {
        let (x, y) = f16x2_to_f32(p[i]);
        let (half, r) = (i >> 1, i & 1);
        ds[i] = f16x2(x * fma(dp[half][2 * r], unit, shift[r]), y * fma(dp[half][2 * r + 1], unit, shift[r]));
    }
    ds
}

/// `1 / rowsum(P)` of rows `g` and `g + 8` to the 16 row factors at `factors`; `inverse` has it for the unnormalised P. The lanes of one
/// quad store the same.
///
/// # Safety
/// No other warp accesses the factors before the next barrier.
#[inline(always)]
pub unsafe fn store_row_factors(factors: u32, g: u32, inverse: [f32; 2]) {
    // SAFETY: as the caller promises.
    unsafe {
        sts32(factors + 4 * g, (inverse[0] * pow2(P_EXPONENT)).to_bits());
        sts32(factors + 4 * g + 32, (inverse[1] * pow2(P_EXPONENT)).to_bits());
    }
}
