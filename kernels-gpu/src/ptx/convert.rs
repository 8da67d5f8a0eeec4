//! Conversions and arithmetic on packed 16-bit pairs: plain functions of their arguments, so `pure` and safe.
use core::arch::asm;

/// `cvt.rn.bf16x2.f32`: `lo` in bits 0..16.
#[inline(always)]
pub fn bf16x2(lo: f32, hi: f32) -> u32 {
    let r: u32;
    // SAFETY: register arithmetic.
    unsafe {
        asm!("cvt.rn.bf16x2.f32 {r}, {h}, {l};", r = out(reg32) r, h = in(reg32) hi, l = in(reg32) lo, options(pure, nomem, nostack))
    };
    r
}

/// `cvt.rn.f16x2.f32`: `lo` in bits 0..16. Out of range becomes an infinity.
#[inline(always)]
pub fn f16x2(lo: f32, hi: f32) -> u32 {
    let r: u32;
    // SAFETY: register arithmetic.
    unsafe {
        asm!("cvt.rn.f16x2.f32 {r}, {h}, {l};", r = out(reg32) r, h = in(reg32) hi, l = in(reg32) lo, options(pure, nomem, nostack))
    };
    r
}

/// `cvt.f32.f16` of both halves: `(bits 0..16, bits 16..32)`.
#[inline(always)]
pub fn f16x2_to_f32(x: u32) -> (f32, f32) {
    let (l, h): (f32, f32);
    // SAFETY: register arithmetic.
    unsafe {
        asm!("{{ .reg .b16 a, b; mov.b32 {{a, b}}, {x}; cvt.f32.f16 {l}, a; cvt.f32.f16 {h}, b; }}",
             l = out(reg32) l, h = out(reg32) h, x = in(reg32) x, options(pure, nomem, nostack))
    };
    (l, h)
}

/// Both halves of a bf16 pair: `(bits 0..16, bits 16..32)`. Exact.
#[inline(always)]
pub fn bf16x2_to_f32(x: u32) -> (f32, f32) {
    (f32::from_bits(x << 16), f32::from_bits(x & 0xffff_0000))
}

/// `fma.rn.bf16x2` with addend -0.0: an exact product when one factor is a power of two and the result is normal.
#[inline(always)]
pub fn mul_bf16x2(a: u32, b: u32) -> u32 {
    let r: u32;
    // SAFETY: register arithmetic.
    unsafe {
        asm!("fma.rn.bf16x2 {r}, {a}, {b}, {z};",
             r = out(reg32) r, a = in(reg32) a, b = in(reg32) b, z = in(reg32) 0x8000_8000u32, options(pure, nomem, nostack))
    };
    r
}

/// `max(a, |b|)` of two bf16 pairs (`abs.bf16x2`, `max.bf16x2`: one instruction in SASS).
#[inline(always)]
pub fn max_abs_bf16x2(a: u32, b: u32) -> u32 {
    let r: u32;
    // SAFETY: register arithmetic.
    unsafe {
        asm!("{{ .reg .b32 t; abs.bf16x2 t, {b}; max.bf16x2 {r}, {a}, t; }}",
             r = out(reg32) r, a = in(reg32) a, b = in(reg32) b, options(pure, nomem, nostack))
    };
    r
}

/// `ex2.approx.ftz.f32`.
#[inline(always)]
pub fn ex2(x: f32) -> f32 {
    let r: f32;
    // SAFETY: register arithmetic.
    unsafe { asm!("ex2.approx.ftz.f32 {r}, {x};", r = out(reg32) r, x = in(reg32) x, options(pure, nomem, nostack)) };
    r
}

/// `rcp.approx.ftz.f32`.
#[inline(always)]
pub fn rcp(x: f32) -> f32 {
    let r: f32;
    // SAFETY: register arithmetic.
    unsafe { asm!("rcp.approx.ftz.f32 {r}, {x};", r = out(reg32) r, x = in(reg32) x, options(pure, nomem, nostack)) };
    r
}

/// `fma.rn.f32`: rustc never contracts `a * b + c` by itself.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    let r: f32;
    // SAFETY: register arithmetic.
    unsafe {
        asm!("fma.rn.f32 {r}, {a}, {b}, {c};",
             r = out(reg32) r, a = in(reg32) a, b = in(reg32) b, c = in(reg32) c, options(pure, nomem, nostack))
    };
    r
}

/// `selp.b32`: `a` where `first`, else `b`. A choice that differs between lanes, next to a collective: written as `if`, LLVM may make
/// a branch of it and copy the collective into both sides.
#[inline(always)]
pub fn select(first: bool, a: u32, b: u32) -> u32 {
    let r: u32;
    // SAFETY: register arithmetic.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {f}, 0; selp.b32 {r}, {a}, {b}, p; }}",
             r = out(reg32) r, f = in(reg32) first as u32, a = in(reg32) a, b = in(reg32) b, options(pure, nomem, nostack))
    };
    r
}

/// `lg2.approx.ftz.f32`.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub fn lg2(x: f32) -> f32 {
    let r: f32;
    // SAFETY: register arithmetic.
    unsafe { asm!("lg2.approx.ftz.f32 {r}, {x};", r = out(reg32) r, x = in(reg32) x, options(pure, nomem, nostack)) };
    r
}

/// `cvt.rpi.ftz.f32.f32`: rounds up to an integer.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub fn ceil(x: f32) -> f32 {
    let r: f32;
    // SAFETY: register arithmetic.
    unsafe { asm!("cvt.rpi.ftz.f32.f32 {r}, {x};", r = out(reg32) r, x = in(reg32) x, options(pure, nomem, nostack)) };
    r
}
