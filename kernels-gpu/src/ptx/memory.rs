//! Loads and stores of global and shared memory. Shared addresses are 32-bit (`.shared` window).
use core::arch::asm;

/// `ld.global.nc.v4.b32`, zeros where `ok` is false.
///
/// # Safety
/// If `ok`, `p` is 16-byte aligned and points to 16 readable bytes that nothing writes during the launch.
#[inline(always)]
pub unsafe fn ldg128_or_zero(p: *const u8, ok: bool) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; mov.b32 {a}, 0; mov.b32 {b}, 0; mov.b32 {c}, 0; mov.b32 {d}, 0;",
             "@p ld.global.nc.v4.b32 {{{a}, {b}, {c}, {d}}}, [{p}]; }}",
             a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d, p = in(reg64) p, ok = in(reg32) ok as u32,
             options(readonly, nostack))
    };
    [a, b, c, d]
}

/// `ld.global.cs.nc.v4.f32`, zeros where `ok` is false: data that is read once, first to leave L1 and L2.
///
/// # Safety
/// As [`ldg128_or_zero`].
#[inline(always)]
pub unsafe fn ldg128_stream_or_zero(p: *const u8, ok: bool) -> [f32; 4] {
    let (a, b, c, d): (f32, f32, f32, f32);
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; mov.b32 {a}, 0; mov.b32 {b}, 0; mov.b32 {c}, 0; mov.b32 {d}, 0;",
             "@p ld.global.cs.nc.v4.f32 {{{a}, {b}, {c}, {d}}}, [{p}]; }}",
             a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d, p = in(reg64) p, ok = in(reg32) ok as u32,
             options(readonly, nostack))
    };
    [a, b, c, d]
}

/// `ld.global.cg.nc.v4.f32`, zeros where `ok` is false: data that a later launch reads again, kept in L2 only.
///
/// # Safety
/// As [`ldg128_or_zero`].
#[inline(always)]
pub unsafe fn ldg128_l2_or_zero(p: *const u8, ok: bool) -> [f32; 4] {
    let (a, b, c, d): (f32, f32, f32, f32);
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; mov.b32 {a}, 0; mov.b32 {b}, 0; mov.b32 {c}, 0; mov.b32 {d}, 0;",
             "@p ld.global.cg.nc.v4.f32 {{{a}, {b}, {c}, {d}}}, [{p}]; }}",
             a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d, p = in(reg64) p, ok = in(reg32) ok as u32,
             options(readonly, nostack))
    };
    [a, b, c, d]
}

/// `st.global.v4.b32` where `ok`: a predicate, not a branch, for conditions that differ between lanes.
///
/// # Safety
/// If `ok`, `p` is 16-byte aligned and points to 16 bytes that no other thread accesses.
#[inline(always)]
pub unsafe fn stg128_if(ok: bool, p: *mut u8, v: [u32; 4]) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; @p st.global.v4.b32 [{p}], {{{a}, {b}, {c}, {d}}}; }}",
             ok = in(reg32) ok as u32, p = in(reg64) p, a = in(reg32) v[0], b = in(reg32) v[1], c = in(reg32) v[2], d = in(reg32) v[3],
             options(nostack))
    }
}

/// `st.global.v2.b32` where `ok`.
///
/// # Safety
/// If `ok`, `p` is 8-byte aligned and points to 8 bytes that no other thread accesses.
#[inline(always)]
pub unsafe fn stg64_if(ok: bool, p: *mut u8, x: u32, y: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; @p st.global.v2.b32 [{p}], {{{x}, {y}}}; }}",
             ok = in(reg32) ok as u32, p = in(reg64) p, x = in(reg32) x, y = in(reg32) y, options(nostack))
    }
}

/// `st.global.b32` where `ok`.
///
/// # Safety
/// If `ok`, `p` is 4-byte aligned and points to 4 bytes that no other thread accesses.
#[inline(always)]
pub unsafe fn stg32_if(ok: bool, p: *mut u8, v: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; @p st.global.b32 [{p}], {v}; }}",
             ok = in(reg32) ok as u32, p = in(reg64) p, v = in(reg32) v, options(nostack))
    }
}

/// `ld.shared.b32`.
///
/// # Safety
/// `a` is 4-byte aligned, inside the block's shared memory, and ordered after its writer by a barrier.
#[inline(always)]
pub unsafe fn lds32(a: u32) -> u32 {
    let r: u32;
    // SAFETY: as the caller promises.
    unsafe { asm!("ld.shared.b32 {r}, [{a}];", r = out(reg32) r, a = in(reg32) a, options(readonly, nostack)) };
    r
}

/// `ld.shared.v2.b32`.
///
/// # Safety
/// As [`lds32`], 8 bytes.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub unsafe fn lds64(a: u32) -> [u32; 2] {
    let (x, y): (u32, u32);
    // SAFETY: as the caller promises.
    unsafe {
        asm!("ld.shared.v2.b32 {{{x}, {y}}}, [{a}];", x = out(reg32) x, y = out(reg32) y, a = in(reg32) a, options(readonly, nostack))
    };
    [x, y]
}

/// `ld.shared.v4.b32`.
///
/// # Safety
/// As [`lds32`], 16 bytes.
#[inline(always)]
pub unsafe fn lds128(a: u32) -> [u32; 4] {
    let (x, y, z, w): (u32, u32, u32, u32);
    // SAFETY: as the caller promises.
    unsafe {
        asm!("ld.shared.v4.b32 {{{x}, {y}, {z}, {w}}}, [{a}];",
             x = out(reg32) x, y = out(reg32) y, z = out(reg32) z, w = out(reg32) w, a = in(reg32) a, options(readonly, nostack))
    };
    [x, y, z, w]
}

/// `st.shared.b32`.
///
/// # Safety
/// `a` is 4-byte aligned, inside the block's shared memory; no other thread accesses it before the next barrier.
#[inline(always)]
pub unsafe fn sts32(a: u32, v: u32) {
    // SAFETY: as the caller promises.
    unsafe { asm!("st.shared.b32 [{a}], {v};", a = in(reg32) a, v = in(reg32) v, options(nostack)) }
}

/// `st.shared.b32` where `ok`.
///
/// # Safety
/// As [`sts32`] if `ok`.
#[inline(always)]
pub unsafe fn sts32_if(ok: bool, a: u32, v: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; @p st.shared.b32 [{a}], {v}; }}",
             ok = in(reg32) ok as u32, a = in(reg32) a, v = in(reg32) v, options(nostack))
    }
}

/// `st.shared.v2.b32`.
///
/// # Safety
/// As [`sts32`], 8 bytes.
#[inline(always)]
pub unsafe fn sts64(a: u32, x: u32, y: u32) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("st.shared.v2.b32 [{a}], {{{x}, {y}}};", a = in(reg32) a, x = in(reg32) x, y = in(reg32) y, options(nostack))
    }
}

/// `st.shared.v4.b32` where `ok`.
///
/// # Safety
/// As [`sts128`] if `ok`.
#[inline(always)]
pub unsafe fn sts128_if(ok: bool, a: u32, v: [u32; 4]) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; @p st.shared.v4.b32 [{a}], {{{x}, {y}, {z}, {w}}}; }}",
             ok = in(reg32) ok as u32, a = in(reg32) a, x = in(reg32) v[0], y = in(reg32) v[1], z = in(reg32) v[2], w = in(reg32) v[3],
             options(nostack))
    }
}

/// `st.shared.v4.b32`.
///
/// # Safety
/// As [`sts32`], 16 bytes.
#[inline(always)]
pub unsafe fn sts128(a: u32, v: [u32; 4]) {
    // SAFETY: as the caller promises.
    unsafe {
        asm!("st.shared.v4.b32 [{a}], {{{x}, {y}, {z}, {w}}};",
             a = in(reg32) a, x = in(reg32) v[0], y = in(reg32) v[1], z = in(reg32) v[2], w = in(reg32) v[3], options(nostack))
    }
}

/// `ld.global.nc.b32` of a signed word.
///
/// # Safety
/// `p` is 4-byte aligned and points to 4 readable bytes that nothing writes during the launch.
#[inline(always)]
pub unsafe fn ldg32_s32(p: *const i32) -> i32 {
    let r: i32;
    // SAFETY: as the caller promises.
    unsafe { asm!("ld.global.nc.b32 {r}, [{p}];", r = out(reg32) r, p = in(reg64) p, options(readonly, nostack)) };
    r
}

/// `ld.global.nc.b32` where `ok`, `otherwise` elsewhere.
///
/// # Safety
/// If `ok`, as [`ldg32_s32`].
#[inline(always)]
pub unsafe fn ldg32_or(p: *const i32, ok: bool, otherwise: u32) -> u32 {
    let r: u32;
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; mov.b32 {r}, {o}; @p ld.global.nc.b32 {r}, [{p}]; }}",
             r = out(reg32) r, o = in(reg32) otherwise, p = in(reg64) p, ok = in(reg32) ok as u32, options(readonly, nostack))
    };
    r
}

/// `ld.global.v4.b32` where `ok`, zeros elsewhere: data that this launch may have written.
///
/// # Safety
/// If `ok`, `p` is 16-byte aligned and points to 16 readable bytes; every write to them is by this thread, ordered before it, or ordered after
/// it.
#[inline(always)]
pub unsafe fn ldg128_written_or_zero(p: *const u8, ok: bool) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: as the caller promises.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {ok}, 0; mov.b32 {a}, 0; mov.b32 {b}, 0; mov.b32 {c}, 0; mov.b32 {d}, 0;",
             "@p ld.global.v4.b32 {{{a}, {b}, {c}, {d}}}, [{p}]; }}",
             a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d, p = in(reg64) p, ok = in(reg32) ok as u32,
             options(nostack))
    };
    [a, b, c, d]
}

/// `ld.shared.v2.f32`.
///
/// # Safety
/// As [`lds32`], 8 bytes.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub unsafe fn lds64_f32(a: u32) -> [f32; 2] {
    let (x, y): (f32, f32);
    // SAFETY: as the caller promises.
    unsafe {
        asm!("ld.shared.v2.f32 {{{x}, {y}}}, [{a}];",
             x = out(reg32) x, y = out(reg32) y, a = in(reg32) a, options(readonly, nostack))
    };
    [x, y]
}
