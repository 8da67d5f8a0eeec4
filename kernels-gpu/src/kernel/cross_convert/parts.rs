//! Storing scaled values as one or two fp16 parts.
use crate::ptx::convert::{f16x2, f16x2_to_f32};
use crate::ptx::memory::stg64_if;

/// Stores `v * factors.0 * factors.1`, four elements, where `ok`: 8 bytes at `at` bytes of each part.
///
/// # Safety
/// If `ok`, `out[part] + at` is 8-byte aligned and points to 8 bytes that no other thread accesses, for `part < PARTS`.
#[inline(always)]
pub unsafe fn store<const PARTS: usize>(ok: bool, out: [*mut u16; 2], at: u64, v: [f32; 4], factors: (f32, f32)) {
    let y: [f32; 4] = core::array::from_fn(|i| v[i] * factors.0 * factors.1);
    let hi = [f16x2(y[0], y[1]), f16x2(y[2], y[3])];
    // SAFETY: as the caller promises.
    unsafe {
        stg64_if(ok, out[0].cast::<u8>().wrapping_add(at as usize), hi[0], hi[1]);
        if PARTS == 2 {
            let (h0, h1) = f16x2_to_f32(hi[0]);
            let (h2, h3) = f16x2_to_f32(hi[1]);
            let lo = [f16x2(rest(y[0], h0), rest(y[1], h1)), f16x2(rest(y[2], h2), rest(y[3], h3))];
            stg64_if(ok, out[1].cast::<u8>().wrapping_add(at as usize), lo[0], lo[1]);
        }
    }
}

/// `y - hi`, which fp32 holds exactly; 0 where `hi` is not finite.
#[inline(always)]
fn rest(y: f32, hi: f32) -> f32 {
    let rest = y - hi;
    if rest.is_nan() { 0.0 } else { rest }
}
