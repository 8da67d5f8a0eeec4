//! Operand types: which wgmma multiplies them, and whether their products are scaled.
use crate::config::wgmma::STAGES;
use crate::ptx::hopper::{
    wgmma_bf16_n128, wgmma_bf16_n192, wgmma_bf16_n256, wgmma_f16_n128, wgmma_f16_n192, wgmma_f16_n256,
};

/// Type of A and B.
pub trait Operand {
    /// Whether outputs are multiplied by the product's powers of two.
    const SCALED: bool;
    /// Whether operands are two parts, all of whose products but low by low are summed, and sums are promoted.
    const PROMOTED: bool;
    /// k-blocks that the ring holds. Promoted, a k-block takes two stages: both operands have two parts.
    const RING_K_BLOCKS: u32 = STAGES / if Self::PROMOTED { 2 } else { 1 };

    /// `acc[64, 2 R] = a[64, 16] b[16, 2 R] (+ acc unless accumulate is 0)`; `A_MN` = 1: A is MN-major.
    ///
    /// # Safety
    /// As the wgmma functions.
    unsafe fn multiply<const A_MN: u32, const R: usize>(acc: &mut [f32; R], a: u64, b: u64, accumulate: u32);
}

/// bf16.
pub struct Bf16;
/// fp16, scaled into its range by the host or the kernels before.
pub struct F16;
/// Two parts of fp16, scaled; sums are promoted.
pub struct F16Promoted;

macro_rules! operand {
    ($t:ty, $scaled:literal, $promoted:literal, $n128:ident, $n192:ident, $n256:ident) => {
        impl Operand for $t {
            const SCALED: bool = $scaled;
            const PROMOTED: bool = $promoted;

            #[inline(always)]
            unsafe fn multiply<const A_MN: u32, const R: usize>(acc: &mut [f32; R], a: u64, b: u64, accumulate: u32) {
                const { assert!(R == 64 || R == 96 || R == 128) };
                let acc: *mut [f32; R] = acc;
                // SAFETY: the arm of this R is taken, so the cast does not change the type; else as the caller promises.
                unsafe {
                    match R {
                        64 => $n128::<A_MN>(&mut *acc.cast(), a, b, accumulate),
                        96 => $n192::<A_MN>(&mut *acc.cast(), a, b, accumulate),
                        _ => $n256::<A_MN>(&mut *acc.cast(), a, b, accumulate),
                    }
                }
            }
        }
    };
}
operand!(Bf16, false, false, wgmma_bf16_n128, wgmma_bf16_n192, wgmma_bf16_n256);
operand!(F16, true, false, wgmma_f16_n128, wgmma_f16_n192, wgmma_f16_n256);
operand!(F16Promoted, true, true, wgmma_f16_n128, wgmma_f16_n192, wgmma_f16_n256);
