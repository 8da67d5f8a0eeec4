//! Each instruction family against results worked out by hand or by Rust's own arithmetic.

mod common;

use common::{run, warp};
use half::{bf16, f16};

/// What lane 0 gets when every lane reads `input`.
fn one(body: &str, register: &str, input: u32) -> u32 {
    warp(body, register, |_| input)[0]
}

fn pack<T>(bits: impl Fn(T) -> u16, low: T, high: T) -> u32 {
    bits(low) as u32 | (bits(high) as u32) << 16
}

#[test]
fn integer_arithmetic_wraps_and_extends() {
    assert_eq!(one("mad.lo.s32 %r2, %r1, 3, -1;", "%r2", 0x8000_0001), 0x8000_0002);
    assert_eq!(one("mul.hi.s32 %r2, %r1, -2;", "%r2", 0x8000_0000), 1);
    assert_eq!(
        one("mul.wide.s32 %rd3, %r1, %r1; shr.u64 %rd3, %rd3, 32; cvt.u32.u64 %r2, %rd3;", "%r2", (-70000i32) as u32),
        1
    );
    assert_eq!(
        one("div.s32 %r2, %r1, 2; rem.s32 %r3, %r1, 2; sub.s32 %r2, %r2, %r3;", "%r2", (-7i32) as u32) as i32,
        -2
    );
    assert_eq!(one("min.s32 %r2, %r1, 5; max.u32 %r3, %r1, 5; xor.b32 %r2, %r2, %r3;", "%r2", u32::MAX), 0);
    assert_eq!(one("cvt.u16.u32 %h0, %r1; add.s16 %h0, %h0, -1; cvt.u32.u16 %r2, %h0;", "%r2", 0), 0xffff);
    assert_eq!(one("cvt.u16.u32 %h0, %r1; shr.s16 %h0, %h0, 4; cvt.s32.s16 %r2, %h0;", "%r2", 0x8000), 0xffff_f800);
    let carry = "add.cc.u32 %r2, %r1, 1; addc.u32 %r2, 5, 0;";
    assert_eq!((one(carry, "%r2", u32::MAX), one(carry, "%r2", 1)), (6, 5));
    assert_eq!(one("sub.cc.u32 %r2, %r1, 1; subc.u32 %r2, 5, 0;", "%r2", 0), 4);
}

#[test]
fn bits_are_extracted_inserted_and_permuted() {
    assert_eq!(one("bfe.u32 %r2, %r1, 8, 12;", "%r2", 0xabcd_ef12), 0xcdef & 0xfff);
    assert_eq!(one("bfe.s32 %r2, %r1, 28, 4;", "%r2", 0xabcd_ef12), 0xffff_fffa);
    assert_eq!(one("bfi.b32 %r2, %r1, 0xffffffff, 8, 8;", "%r2", 0x12), 0xffff_12ff);
    assert_eq!(one("prmt.b32 %r2, %r1, 0x77665544, 0x40f1;", "%r2", 0x8899_aabb), 0x44bb_00aa);
    assert_eq!(one("lop3.b32 %r2, %r1, 0xff00ff00, 0x0f0f0f0f, 0xe2;", "%r2", 0x1234_5678), {
        let (a, b, c) = (0x1234_5678u32, 0xff00_ff00u32, 0x0f0f_0f0fu32);
        (b & a) | (!b & c)
    });
    assert_eq!(one("shl.b32 %r2, %r1, 40;", "%r2", 1), 0);
    assert_eq!(one("shr.s32 %r2, %r1, 40;", "%r2", 0x8000_0000), u32::MAX);
    assert_eq!(one("shf.l.wrap.b32 %r2, %r1, 0x12345678, 8;", "%r2", 0xab00_0000), 0x3456_78ab);
    assert_eq!(one("popc.b32 %r2, %r1; clz.b32 %r3, %r1; mad.lo.u32 %r2, %r2, 100, %r3;", "%r2", 0x00f0_0000), 408);
    assert_eq!(one("brev.b32 %r2, %r1;", "%r2", 3), 0xc000_0000);
}

#[test]
fn floats_follow_ieee_and_ptx() {
    let f = f32::to_bits;
    assert_eq!(
        one("fma.rn.f32 %r2, %r1, %r1, 0fBF800000;", "%r2", f(1.0 + f32::EPSILON)),
        f((1.0 + f32::EPSILON).mul_add(1.0 + f32::EPSILON, -1.0))
    );
    assert_eq!(one("max.f32 %r2, %r1, 0f3F800000;", "%r2", f(f32::NAN)), f(1.0));
    assert_eq!(one("ex2.approx.ftz.f32 %r2, %r1;", "%r2", f(-3.0)), f(0.125));
    assert_eq!(one("lg2.approx.f32 %r2, %r1;", "%r2", f(8.0)), f(3.0));
    assert_eq!(one("rcp.approx.ftz.f32 %r2, %r1;", "%r2", f(4.0)), f(0.25));
    assert_eq!(one("mul.rn.ftz.f32 %r2, %r1, 0f3F000000;", "%r2", f(f32::MIN_POSITIVE)), 0);
    assert_eq!(one("mul.rn.f32 %r2, %r1, 0f3F000000;", "%r2", f(f32::MIN_POSITIVE)), 0x0040_0000);
    assert_eq!(one("copysign.f32 %r2, 0fBF800000, %r1;", "%r2", f(2.5)), f(-2.5));
    assert_eq!(one("sqrt.rn.f32 %r2, %r1; div.rn.f32 %r2, %r2, 0f40400000;", "%r2", f(2.0)), f(2f32.sqrt() / 3.0));
    let double = "cvt.f64.f32 %rd3, %r1; fma.rn.f64 %rd3, %rd3, %rd3, 0dBFF0000000000000; cvt.rn.f32.f64 %r2, %rd3;";
    assert_eq!(one(double, "%r2", f(1.5)), f(1.25));
}

#[test]
fn packed_halves_round_once() {
    let (h, b) = (f16::to_bits, bf16::to_bits);
    let input = pack(h, f16::from_f32(1.5), f16::from_f32(-2.0));
    assert_eq!(one("mul.rn.f16x2 %r2, %r1, %r1;", "%r2", input), pack(h, f16::from_f32(2.25), f16::from_f32(4.0)));
    let input = pack(b, bf16::from_f32(1.5), bf16::from_f32(-2.0));
    assert_eq!(
        one("abs.bf16x2 %r2, %r1; max.bf16x2 %r2, %r2, %r1;", "%r2", input),
        pack(b, bf16::from_f32(1.5), bf16::from_f32(2.0))
    );
    assert_eq!(
        one("fma.rn.bf16x2 %r2, %r1, %r1, %r1;", "%r2", input),
        pack(b, bf16::from_f32(3.75), bf16::from_f32(2.0))
    );
    // The first source is the high half.
    let convert = "cvt.rn.f16x2.f32 %r2, %r1, 0f3F800000;";
    assert_eq!(one(convert, "%r2", 2.5f32.to_bits()), pack(h, f16::ONE, f16::from_f32(2.5)));
    let unpack = "{ .reg .b16 a, b; mov.b32 {a, b}, %r1; cvt.f32.f16 %r2, b; }";
    assert_eq!(one(unpack, "%r2", pack(h, f16::ONE, f16::from_f32(2.5))), 2.5f32.to_bits());
}

#[test]
fn comparisons_know_signs_and_nans() {
    let select =
        |compare: &str, input| one(&format!("setp.{compare} %p0, %r1, 1; selp.b32 %r2, 7, 9, %p0;"), "%r2", input);
    assert_eq!((select("lt.s32", u32::MAX), select("lt.u32", u32::MAX)), (7, 9));
    assert_eq!((select("lo.u32", 0), select("hs.u32", 0)), (7, 9));
    let nan = f32::NAN.to_bits();
    let float =
        |compare: &str| one(&format!("setp.{compare}.f32 %p0, %r1, 0f3F800000; selp.b32 %r2, 7, 9, %p0;"), "%r2", nan);
    assert_eq!(["lt", "ltu", "ne", "neu", "equ", "num", "nan"].map(float), [9, 7, 9, 7, 7, 9, 7]);
    let both = "setp.gt.u32 %p0, %r1, 3; setp.lt.and.u32 %p1, %r1, 6, !%p0; selp.b32 %r2, 7, 9, %p1;";
    assert_eq!([2, 5].map(|input| one(both, "%r2", input)), [7, 9]);
}

#[test]
fn names_in_an_inner_scope_hide_outer_ones() {
    let body = "{ .reg .b32 t; mov.b32 t, 5; { .reg .b32 t; mov.b32 t, 6; add.s32 %r2, %r1, t; } add.s32 %r2, %r2, t; }\n\
                { .reg .pred p; setp.eq.u32 p, %r1, 1; @p bra skip; add.s32 %r2, %r2, 100; skip: }\n\
                { .reg .pred p; setp.eq.u32 p, %r1, 2; @p bra skip; add.s32 %r2, %r2, 1000; skip: }";
    assert_eq!([0, 1, 2].map(|input| one(body, "%r2", input)), [1111, 1012, 113]);
}

#[test]
fn lanes_diverge_and_meet_again() {
    // Each lane loops as often as its number says; then the warp shuffles as one.
    let body = "mov.u32 %r2, 0; mov.u32 %r3, 0;\n\
                $loop: setp.ge.u32 %p0, %r3, %r1; @%p0 bra $done;\n\
                add.s32 %r2, %r2, %r3; add.s32 %r3, %r3, 1; bra.uni $loop;\n\
                $done: shfl.sync.bfly.b32 %r4, %r2, 1, 31, 0xffffffff;";
    let triangle = |n: u32| n * n.saturating_sub(1) / 2;
    assert_eq!(warp(body, "%r4", |lane| lane), (0..32).map(|lane| triangle(lane ^ 1)).collect::<Vec<_>>());
    // The place where they meet lies before one of the sides.
    let body = "setp.lt.u32 %p0, %r1, 9; @%p0 bra $low; mov.u32 %r2, 1; bra $join;\n\
                $join: redux.sync.add.u32 %r3, %r2, 0xffffffff; bra $end;\n\
                $low: mov.u32 %r2, 100; bra $join;\n\
                $end:";
    assert_eq!(warp(body, "%r3", |lane| lane), [923; 32]);
    let table = "bra $go; $cases: .branchtargets $a, $b, $c;\n\
                 $go: rem.u32 %r2, %r1, 3; brx.idx %r2, $cases;\n\
                 $a: mov.u32 %r3, 10; bra $end; $b: mov.u32 %r3, 20; bra $end; $c: mov.u32 %r3, 30; $end:";
    assert_eq!(warp(table, "%r3", |lane| lane), (0..32).map(|lane| 10 * (lane % 3 + 1)).collect::<Vec<_>>());
}

#[test]
fn warps_exchange_values() {
    let lanes = || 0..32u32;
    let shuffle =
        |mode: &str| warp(&format!("shfl.sync.{mode}, 0xffffffff; @!%p0 add.s32 %r2, %r2, 100;"), "%r2", |lane| lane);
    assert_eq!(
        shuffle("up.b32 %r2|%p0, %r1, 1, 0"),
        lanes().map(|i| if i == 0 { 100 } else { i - 1 }).collect::<Vec<_>>()
    );
    assert_eq!(
        shuffle("down.b32 %r2|%p0, %r1, 2, 31"),
        lanes().map(|i| if i > 29 { i + 100 } else { i + 2 }).collect::<Vec<_>>()
    );
    // Segments of eight lanes: c = (32 - 8) << 8 | 31.
    assert_eq!(shuffle("idx.b32 %r2|%p0, %r1, 3, 0x181f"), lanes().map(|i| i / 8 * 8 + 3).collect::<Vec<_>>());
    assert_eq!(warp("redux.sync.min.s32 %r2, %r1, 0xffffffff;", "%r2", |i| i.wrapping_sub(5))[9] as i32, -5);
    assert_eq!(
        warp("setp.gt.u32 %p0, %r1, 29; vote.sync.ballot.b32 %r2, %p0, 0xffffffff;", "%r2", |i| i)[0],
        0xc000_0000
    );
    assert_eq!(
        warp(
            "setp.gt.u32 %p0, %r1, 29; vote.sync.any.pred %p1, %p0, 0xffffffff; selp.b32 %r2, 1, 0, %p1;",
            "%r2",
            |i| i
        ),
        [1; 32]
    );
}

#[test]
fn memory_accesses_have_every_width() {
    let body = "mov.u32 %r2, smem; shl.b32 %r3, %r0, 4; add.s32 %r2, %r2, %r3;\n\
                st.shared.v4.b32 [%r2], {%r1, 2, 3, 4}; st.shared.u8 [%r2+5], 0xab; ld.shared.v2.b32 {%r4, %r5}, [%r2];\n\
                ld.shared.s8 %r6, [%r2+5]; ld.shared.u16 %h0, [%r2+4]; cvt.u32.u16 %r7, %h0;\n\
                ld.shared.b64 %rd3, [%r2+8]; shr.u64 %rd3, %rd3, 32; cvt.u32.u64 %r8, %rd3;\n\
                add.s32 %r9, %r4, %r5; add.s32 %r9, %r9, %r6; add.s32 %r9, %r9, %r7; add.s32 %r9, %r9, %r8;";
    let expected = 7 + 0xab02 + 0xffff_ffabu32.wrapping_add(0xab02) + 4;
    assert_eq!(warp(body, "%r9", |_| 7), [expected; 32]);
    // The same through generic pointers.
    let body = "cvta.to.global.u64 %rd3, %rd0; ld.b32 %r2, [%rd3]; mov.u64 %rd4, smem; cvta.shared.u64 %rd4, %rd4;\n\
                mul.wide.u32 %rd5, %r0, 4; add.s64 %rd4, %rd4, %rd5; st.b32 [%rd4], %r2; ld.relaxed.gpu.global.u32 %r3, [%rd0];\n\
                ld.b32 %r2, [%rd4]; add.s32 %r2, %r2, %r3;";
    assert_eq!(warp(body, "%r2", |i| i), (0..32).map(|i| 2 * i).collect::<Vec<_>>());
}

#[test]
fn atomics_add_up_and_return_the_old_value() {
    let body = "mov.u32 %r2, smem; setp.eq.u32 %p0, %r0, 0; @%p0 st.shared.b32 [%r2], 10; bar.sync 0;\n\
                atom.shared.add.u32 %r3, [%r2], %r1; red.shared.max.u32 [%r2+0], 1000; bar.sync 0; ld.shared.b32 %r4, [%r2];\n\
                st.global.b32 [%rd1], %r4;";
    assert_eq!(run(body, &[2; 64]), [1064; 64]);
    let cas =
        "atom.global.cas.b32 %r2, [%rd0], 5, 6; atom.global.exch.b32 %r3, [%rd0], 9; mad.lo.u32 %r2, %r2, 10, %r3;";
    assert_eq!([5, 4].map(|input| one(cas, "%r2", input)), [56, 44]);
    let float = "red.global.add.f32 [%rd0], 0f3F800000; ld.global.f32 %r2, [%rd0];";
    assert_eq!(one(float, "%r2", 1.5f32.to_bits()), 2.5f32.to_bits());
}

#[test]
fn asynchronous_copies_land_at_the_wait() {
    let body = "mov.u32 %r2, smem; shl.b32 %r3, %r0, 2; add.s32 %r2, %r2, %r3; st.shared.b32 [%r2+512], 3;\n\
                cp.async.ca.shared.global [%r2], [%rd0], 4; cp.async.commit_group;\n\
                cp.async.ca.shared.global [%r2+256], [%rd0], 4, 0; cp.async.commit_group;\n\
                cp.async.wait_group 1; ld.shared.b32 %r4, [%r2]; cp.async.wait_all; ld.shared.b32 %r5, [%r2+256];\n\
                add.s32 %r4, %r4, %r5;";
    assert_eq!(warp(body, "%r4", |i| i + 1), (1..33).collect::<Vec<_>>());
}

/// Fills 512 bytes of shared memory with an 8x8 matrix of 16-bit numbers `256 * row + column` for each of four matrices.
const FOUR_MATRICES: &str = "mov.u32 %r2, smem; shl.b32 %r3, %r0, 4; add.s32 %r2, %r2, %r3; and.b32 %r4, %r0, 7; shl.b32 %r4, %r4, 8;\n\
     shr.u32 %r5, %r0, 3; shl.b32 %r5, %r5, 12; or.b32 %r4, %r4, %r5;\n\
     mul.lo.u32 %r4, %r4, 0x10001; add.s32 %r5, %r4, 0x10000; add.s32 %r6, %r5, 0x20002; add.s32 %r7, %r6, 0x20002; add.s32 %r8, %r7, 0x20002;\n\
     st.shared.v4.b32 [%r2], {%r5, %r6, %r7, %r8}; bar.warp.sync 0xffffffff;\n";

#[test]
fn matrices_are_loaded_and_stored_by_fragment() {
    let element = |matrix: u32, row: u32, column: u32| matrix << 12 | row << 8 | column;
    let load = format!("{FOUR_MATRICES} ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r2];");
    let expected = |lane: u32| element(2, lane / 4, 2 * (lane % 4)) | element(2, lane / 4, 2 * (lane % 4) + 1) << 16;
    assert_eq!(warp(&load, "%r12", |_| 0), (0..32).map(expected).collect::<Vec<_>>());
    let load = format!("{FOUR_MATRICES} ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{%r10, %r11}}, [%r2];");
    let expected = |lane: u32| element(1, 2 * (lane % 4), lane / 4) | element(1, 2 * (lane % 4) + 1, lane / 4) << 16;
    assert_eq!(warp(&load, "%r11", |_| 0), (0..32).map(expected).collect::<Vec<_>>());
    let moved = format!("{load} movmatrix.sync.aligned.m8n8.trans.b16 %r12, %r11;");
    let expected = |lane: u32| element(1, lane / 4, 2 * (lane % 4)) | element(1, lane / 4, 2 * (lane % 4) + 1) << 16;
    assert_eq!(warp(&moved, "%r12", |_| 0), (0..32).map(expected).collect::<Vec<_>>());
    // What is loaded transposed and stored transposed is as before.
    let round = format!(
        "{FOUR_MATRICES} ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r2];\n\
         stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r2+512], {{%r10, %r11, %r12, %r13}}; bar.warp.sync 0xffffffff;\n\
         ld.shared.b32 %r14, [%r2+524];"
    );
    let expected = |lane: u32| element(lane / 8, lane % 8, 6) | element(lane / 8, lane % 8, 7) << 16;
    assert_eq!(warp(&round, "%r14", |_| 0), (0..32).map(expected).collect::<Vec<_>>());
}

#[test]
fn mma_multiplies_fragments() {
    // Small integers, different in every place, as f16 or bf16: A 16 x 16, B 16 x 8, C 16 x 8.
    let a = |row: usize, k: usize| ((3 * row + 5 * k) % 17) as f32 - 8.0;
    let b = |k: usize, column: usize| ((7 * k + 2 * column) % 13) as f32 - 6.0;
    let c = |row: usize, column: usize| (row * 8 + column) as f32;
    let fragment = |lane: usize, bits: &dyn Fn(f32) -> u16| {
        let (g, t) = (lane / 4, 2 * (lane % 4));
        let pair = |x: f32, y: f32| bits(x) as u32 | (bits(y) as u32) << 16;
        let at = |i: usize| pair(a(g + 8 * (i & 1), t + 8 * (i >> 1)), a(g + 8 * (i & 1), t + 8 * (i >> 1) + 1));
        let bt = |i: usize| pair(b(t + 8 * i, g), b(t + 8 * i + 1, g));
        [at(0), at(1), at(2), at(3), bt(0), bt(1)]
    };
    type Bits<'a> = &'a dyn Fn(f32) -> u16;
    let formats: [(&str, Bits); 2] =
        [("f16", &|x| f16::from_f32(x).to_bits()), ("bf16", &|x| bf16::from_f32(x).to_bits())];
    for (name, bits) in formats {
        for (shape, depth) in [("m16n8k16", 16), ("m16n8k8", 8)] {
            let mut body = String::new();
            for lane in 0..32 {
                let registers = fragment(lane, bits);
                body += &format!("setp.eq.u32 %p0, %r0, {lane};\n");
                for (i, value) in registers.iter().enumerate() {
                    body += &format!("@%p0 mov.b32 %r{}, {value};\n", 10 + i);
                }
                for i in 0..4 {
                    let value = c(lane / 4 + 8 * (i >> 1), 2 * (lane % 4) + (i & 1)).to_bits();
                    body += &format!("@%p0 mov.b32 %r{}, {value};\n", 20 + i);
                }
            }
            let (a_list, b_list) =
                if depth == 16 { ("%r10, %r11, %r12, %r13", "%r14, %r15") } else { ("%r10, %r11", "%r14") };
            body += &format!(
                "mma.sync.aligned.{shape}.row.col.f32.{name}.{name}.f32 {{%r20, %r21, %r22, %r23}}, {{{a_list}}}, {{{b_list}}}, \
                 {{%r20, %r21, %r22, %r23}};"
            );
            for i in 0..4 {
                let result = warp(&body, &format!("%r{}", 20 + i), |_| 0);
                for (lane, bits) in result.into_iter().enumerate() {
                    let (row, column) = (lane / 4 + 8 * (i >> 1), 2 * (lane % 4) + (i & 1));
                    let exact = (0..depth).map(|k| a(row, k) * b(k, column)).sum::<f32>() + c(row, column);
                    assert_eq!(f32::from_bits(bits), exact, "{name} {shape} {row} {column}");
                }
            }
        }
    }
}

#[test]
fn special_registers_tell_the_place() {
    let body = "mov.u32 %r2, %laneid; mov.u32 %r3, %warpid; mov.u32 %r4, %ntid.x; mov.u32 %r5, %nctaid.x; mov.u32 %r6, %lanemask_lt;\n\
                popc.b32 %r6, %r6; mad.lo.u32 %r2, %r3, 32, %r2; mad.lo.u32 %r2, %r4, 1000, %r2; mad.lo.u32 %r2, %r5, 1000000, %r2;\n\
                add.s32 %r2, %r2, %r6; st.global.b32 [%rd1], %r2;";
    let expected: Vec<u32> = (0..64).map(|thread| 1_064_000 + thread + thread % 32).collect();
    assert_eq!(run(body, &[0; 64]), expected);
}
