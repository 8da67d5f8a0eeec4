//! What the simulator must refuse: each kind of fault, and the nearest program that has none.

mod common;

use common::{cause, module, run, try_run};
use ptx_sim::{Cause, Error, Memory, Module, Options, Size, Space};

/// `%r2` = the thread's word of shared memory.
const WORD: &str = "mov.u32 %r2, smem; shl.b32 %r3, %r0, 2; add.s32 %r2, %r2, %r3;\n";
/// Nobody reads `out`, so that a body that ends early is complete.
const STORE: &str = "st.global.b32 [%rd1], %r1;";

#[test]
fn a_fault_names_entry_instruction_line_and_thread() {
    let error = try_run("setp.eq.u32 %p0, %r0, 37;\n@%p0 ld.global.b32 %r2, [%rd0+4096];", &[0; 64]).unwrap_err();
    let fault = error.fault().expect("a fault");
    assert_eq!((fault.entry.as_str(), fault.warp, fault.lane), ("test", 1, Some(5)));
    assert_eq!(fault.instruction, "@%p0 ld.global.b32 %r2, [%rd0+4096];");
    assert!(matches!(fault.cause, Cause::OutOfBounds { space: Space::Global, bytes: 4, .. }));
    assert!(error.to_string().contains("thread 37 (warp 1, lane 5)"), "{error}");
}

#[test]
fn addresses_are_checked() {
    assert!(matches!(cause("ld.global.b32 %r2, [%rd0+128];", 32), Cause::OutOfBounds { .. }));
    assert!(matches!(cause("ld.global.b32 %r2, [%rd0+-4];", 32), Cause::OutOfBounds { .. }));
    assert!(matches!(cause("ld.global.b32 %r2, [0];", 32), Cause::OutOfBounds { address: 0, .. }));
    assert!(matches!(cause("ld.global.b32 %r2, [%rd0+2];", 32), Cause::Misaligned { alignment: 4, .. }));
    assert!(matches!(
        cause("st.global.v4.b32 [%rd1], {%r1, %r1, %r1, %r1};", 32),
        Cause::Misaligned { alignment: 16, .. }
    ));
    let shared = |offset: i32| cause(&format!("{WORD} st.shared.b32 [%r2+{offset}], 1;"), 32);
    assert!(matches!(shared(4096), Cause::OutOfBounds { space: Space::Shared, .. }));
    assert!(matches!(shared(-4), Cause::OutOfBounds { space: Space::Shared, .. }));
    assert!(matches!(shared(1), Cause::Misaligned { space: Space::Shared, .. }));
    assert!(matches!(cause("ld.param.b64 %rd3, [in+16];", 32), Cause::OutOfBounds { space: Space::Param, .. }));
}

#[test]
fn unwritten_memory_is_not_read() {
    assert!(matches!(cause("ld.global.b32 %r2, [%rd1];", 32), Cause::Unwritten { space: Space::Global, .. }));
    assert!(matches!(
        cause(&format!("{WORD} ld.shared.b32 %r4, [%r2];"), 32),
        Cause::Unwritten { space: Space::Shared, .. }
    ));
    assert!(matches!(
        cause(&format!("{WORD} st.shared.u16 [%r2], 1; ld.shared.b32 %r4, [%r2];"), 32),
        Cause::Unwritten { .. }
    ));
    let half = try_run("setp.lt.u32 %p0, %r0, 16; @%p0 st.global.b32 [%rd1], 1;", &[0; 32]);
    assert!(matches!(half, Err(Error::HostAccess { reason: "never written", .. })));
}

#[test]
fn a_block_that_runs_ahead_reads_what_another_has_not_yet_written() {
    // Each block counts to 1000, writes its word and reads the other one's.
    let body = "mov.u32 %r4, 0;
         $count: add.s32 %r4, %r4, 1; setp.lt.u32 %p0, %r4, 1000; @%p0 bra $count;
         mov.u32 %r5, %ctaid.x; xor.b32 %r6, %r5, 1; mul.wide.u32 %rd3, %r5, 128; add.s64 %rd3, %rd1, %rd3;
         mul.wide.u32 %rd4, %r6, 128; add.s64 %rd4, %rd1, %rd4; st.global.b32 [%rd3], %r4;";
    let wait = "$wait: ld.acquire.gpu.global.b32 %r7, [%rd4]; setp.ne.u32 %p0, %r7, 1000; @%p0 bra $wait;";
    let launch = |body: &str, zeroed: bool, ahead: u64| {
        let mut memory = Memory::new();
        let source = memory.upload(&[0u32; 32]);
        let out = if zeroed { memory.alloc_zeroed(256) } else { memory.alloc_poisoned(256) };
        let params = [source.to_le_bytes(), out.to_le_bytes()].concat();
        let options = Options { ahead: Some(ahead), ..Options::default() };
        let size = Size { grid: [2, 1, 1], block: 32, shared_bytes: 0 };
        module(body).launch_with("test", size, &params, &mut memory, options).map(|_| ())
    };
    for ahead in 0..2 {
        launch(&format!("{body} {wait}"), true, ahead).unwrap_or_else(|error| panic!("{error}"));
        let error = launch(&format!("{body} ld.global.b32 %r7, [%rd4];"), false, ahead).expect_err("a fault");
        let fault = error.fault().unwrap_or_else(|| panic!("{error}"));
        assert!(matches!(fault.cause, Cause::Unwritten { .. }) && fault.block == [ahead as u32, 0, 0], "{fault:?}");
    }
}

#[test]
fn a_copy_needs_its_wait() {
    let copy = format!("{WORD} cp.async.ca.shared.global [%r2], [%rd0], 4; cp.async.commit_group;");
    let load = "ld.shared.b32 %r4, [%r2]; st.global.b32 [%rd1], %r4;";
    assert!(matches!(cause(&format!("{copy} {load}"), 32), Cause::PendingCopy { .. }));
    assert!(matches!(cause(&format!("{copy} cp.async.wait_group 1; {load}"), 32), Cause::PendingCopy { .. }));
    assert_eq!(run(&format!("{copy} cp.async.wait_group 0; {load}"), &[6; 32]), [6; 32]);
    // A wait covers the thread's own copies only, and only committed ones.
    let uncommitted = copy.replace("cp.async.commit_group;", "");
    assert!(matches!(cause(&format!("{uncommitted} cp.async.wait_group 0; {load}"), 32), Cause::PendingCopy { .. }));
    let other_warp =
        format!("{copy} setp.lt.u32 %p0, %r0, 32; @%p0 bra $on; cp.async.wait_all; $on: bar.sync 0; {load}");
    assert!(matches!(cause(&other_warp, 64), Cause::PendingCopy { .. }));
    assert!(matches!(cause(&format!("{copy} st.shared.b32 [%r2], 1;"), 32), Cause::PendingCopy { .. }));
    assert!(matches!(
        cause(&format!("{WORD} cp.async.cg.shared.global [%r2], [%rd0], 16;"), 32),
        Cause::Misaligned { alignment: 16, .. }
    ));
}

#[test]
fn collectives_need_the_whole_warp() {
    let split = |collective: &str| format!("setp.lt.u32 %p0, %r0, 7; @%p0 bra $end; {collective} $end: {STORE}");
    for collective in [
        "bar.sync 0;",
        "barrier.sync 0;",
        "bar.warp.sync 0xffffffff;",
        "shfl.sync.bfly.b32 %r2, %r1, 1, 31, 0xffffffff;",
        "redux.sync.max.u32 %r2, %r1, 0xffffffff;",
        "vote.sync.ballot.b32 %r2, %p0, 0xffffffff;",
        "activemask.b32 %r2;",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];",
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r2, %r3, %r4, %r5}, {%r1, %r1}, {%r1}, {%r1, %r1, %r1, %r1};",
    ] {
        assert_eq!(cause(&split(collective), 32), Cause::Diverged { lanes: 0xffff_ff80 }, "{collective}");
    }
    assert_eq!(cause("setp.lt.u32 %p0, %r0, 7; @%p0 bar.sync 0;", 32), Cause::Diverged { lanes: 0x7f });
    // A collective copied into both sides of a branch: what a compiler that does not know better makes.
    let copied = "setp.lt.u32 %p0, %r0, 7; @%p0 bra $low; bar.sync 0; bra $end; $low: bar.sync 0; $end:";
    assert!(matches!(cause(copied, 32), Cause::Diverged { .. }));
    // A branch that the whole warp takes is fine, and so is a guard that no lane passes.
    assert_eq!(
        run(&format!("setp.lt.u32 %p0, %r0, 32; @%p0 bra $end; bar.warp.sync 0xffffffff; $end: {STORE}"), &[1; 64]),
        [1; 64]
    );
    assert_eq!(run(&format!("setp.gt.u32 %p0, %r0, 99; @%p0 bar.sync 0; {STORE}"), &[1; 64]), [1; 64]);
    assert!(matches!(cause("bar.warp.sync 0xff;", 32), Cause::CollectiveOperand { .. }));
}

#[test]
fn barriers_need_their_warps() {
    let left = format!("setp.lt.u32 %p0, %r0, 32; @%p0 bra $end; bar.sync 0; $end: {STORE}");
    let expected = Cause::BarrierNeverCompletes { barrier: 0, expected: 96, arrived: 64, exited: 1 };
    assert_eq!(cause(&left, 96), expected);
    let counted = left.replace("bar.sync 0;", "bar.sync 1, 64;");
    assert_eq!(run(&counted, &[4; 96]), [4; 96]);
    assert!(matches!(cause("bar.sync 0, 128;", 64), Cause::BarrierCount { found: 128, .. }));
    assert!(matches!(cause("bar.sync 16;", 64), Cause::BarrierCount { barrier: 16, .. }));
    let disagree = "setp.lt.u32 %p0, %r0, 32; @%p0 bra $one; bar.sync 1, 64; bra $end; $one: bar.sync 1, 96; $end:";
    assert!(matches!(cause(disagree, 96), Cause::BarrierCount { .. }));
}

#[test]
fn warps_race_unless_a_barrier_orders_them() {
    // Each thread writes its word and reads that of the other warp.
    let exchange = |between: &str| {
        format!(
            "{WORD} st.shared.b32 [%r2], %r0; {between} mov.u32 %r4, smem; xor.b32 %r5, %r0, 32; shl.b32 %r5, %r5, 2;\n\
             add.s32 %r4, %r4, %r5; ld.shared.b32 %r6, [%r4]; st.global.b32 [%rd1], %r6;"
        )
    };
    assert_eq!(run(&exchange("bar.sync 0;"), &[0; 64]), (0..64).map(|i| i ^ 32).collect::<Vec<u32>>());
    // Without the barrier the first warp reads what is not there yet; written before, it is a race.
    assert!(matches!(cause(&exchange(""), 64), Cause::Unwritten { .. }));
    // Warp 0 overwrites what warp 1 has yet to read; warp 1 what warp 0 has read.
    for (writer, write) in [("lt", false), ("ge", true)] {
        let overwrite = format!("setp.{writer}.u32 %p0, %r0, 32; @%p0 st.shared.b32 [%r2], 9;");
        let race = cause(&format!("{} {overwrite}", exchange("bar.sync 0;")), 64);
        assert!(
            matches!(race, Cause::Race { write: w, other: 0, other_wrote, .. } if w == write && other_wrote != write)
        );
        assert_eq!(run(&format!("{} bar.sync 0; {overwrite}", exchange("bar.sync 0;")), &[0; 64]).len(), 64);
    }
    let all = format!("mov.u32 %r2, smem; st.shared.b32 [%r2], 1; {STORE}");
    assert!(matches!(cause(&all, 64), Cause::Race { write: true, other: 0, other_wrote: true, .. }));
    assert_eq!(run(&all, &[1; 32]), [1; 32]);
}

#[test]
fn partial_barriers_order_only_their_warps() {
    // Warp 0 writes, warps 0 and 1 meet at barrier 1; then warp 1 may read, warp 2 may not.
    let reader = |warp: u32| {
        format!(
            "mov.u32 %r2, smem; shr.u32 %r3, %r0, 5; setp.eq.u32 %p0, %r3, 0; setp.eq.u32 %p1, %r3, {warp}; setp.eq.u32 %p2, %r3, 2;\n\
             @%p0 st.shared.b32 [%r2], 5; @%p2 bra $on; bar.sync 1, 64; $on: @%p1 ld.shared.b32 %r4, [%r2]; {STORE}"
        )
    };
    assert_eq!(run(&reader(1), &[1; 96]), [1; 96]);
    assert!(matches!(cause(&reader(2), 96), Cause::Race { write: false, other: 0, .. }));
    // A producer that only arrives is known to those who wait.
    let arrive = "mov.u32 %r2, smem; setp.lt.u32 %p0, %r0, 32; @!%p0 bra $wait; st.shared.b32 [%r2], 5; bar.arrive 2, 64; bra $end;\n\
                  $wait: bar.sync 2, 64; ld.shared.b32 %r1, [%r2]; $end: st.global.b32 [%rd1], %r1;";
    assert_eq!(run(arrive, &[5; 64]), [5; 64]);
}

#[test]
fn flags_order_what_was_written_before_them() {
    // Warp 1 waits for warp 0's flag, which runs later: turns are taken.
    let flag = |order: &str| {
        format!(
            "mov.u32 %r2, smem; setp.ge.u32 %p0, %r0, 32; mov.u32 %r5, %tid.x; setp.eq.u32 %p1, %r5, 0; @%p1 st.shared.b32 [%r2+4], 0;\n\
             bar.sync 0; @!%p0 bra $wait; @%p0 st.shared.b32 [%r2], 77; membar.cta; st.{order}.shared.b32 [%r2+4], 1; bra $end;\n\
             $wait: ld.{order}.shared.b32 %r4, [%r2+4]; setp.eq.u32 %p2, %r4, 0; @%p2 bra $wait; ld.shared.b32 %r1, [%r2];\n\
             $end: st.global.b32 [%rd1], %r1;"
        )
    };
    let result = run(&flag("volatile"), &[0; 64]);
    assert_eq!((result[0], result[31]), (77, 77));
    let atomics = format!("mov.u32 %r2, smem; st.shared.b32 [%r2+64], 1; red.shared.add.u32 [%r2+64], 1; {STORE}");
    assert!(matches!(cause(&atomics, 64), Cause::Race { .. }));
}

#[test]
fn lanes_race_unless_the_warp_synchronises() {
    let neighbour = |between: &str| {
        format!(
            "{WORD} st.shared.b32 [%r2], %r0; {between} xor.b32 %r5, %r3, 4; mov.u32 %r4, smem; add.s32 %r4, %r4, %r5;\n\
             ld.shared.b32 %r6, [%r4]; st.global.b32 [%rd1], %r6;"
        )
    };
    assert_eq!(run(&neighbour("bar.warp.sync 0xffffffff;"), &[0; 32]), (0..32).map(|i| i ^ 1).collect::<Vec<u32>>());
    assert!(matches!(cause(&neighbour(""), 32), Cause::LaneRace { other: 1, .. }));
}

#[test]
fn endless_loops_and_traps_end() {
    let module = module("$loop: bra $loop;");
    let mut memory = Memory::new();
    let values = memory.upload(&[0u32; 32]);
    let params = [values.to_le_bytes(), values.to_le_bytes()].concat();
    let size = Size { grid: [1, 1, 1], block: 32, shared_bytes: 0 };
    let options = Options { max_warp_instructions: 100_000, ..Options::default() };
    let error = module.launch_with("test", size, &params, &mut memory, options).unwrap_err();
    assert_eq!(error.fault().map(|fault| fault.cause), Some(Cause::TooLong { limit: 100_000 }));
    assert_eq!(cause("trap;", 32), Cause::Trap);
}

#[test]
fn blocks_that_wait_for_later_blocks_make_progress() -> Result<(), Error> {
    // Block i waits for block i + 1 of eight, the last for nobody.
    let module = module(
        "mov.u32 %r2, %ctaid.x; ld.param.b64 %rd3, [out]; mul.wide.u32 %rd4, %r2, 4; add.s64 %rd3, %rd3, %rd4; setp.eq.u32 %p0, %r2, 7;\n\
         @%p0 bra $go; $wait: ld.acquire.gpu.global.u32 %r3, [%rd3+4]; setp.eq.u32 %p1, %r3, 0; @%p1 bra $wait;\n\
         $go: st.release.gpu.global.u32 [%rd3], 1;",
    );
    let mut memory = Memory::new();
    let (source, flags) = (memory.upload(&[0u32; 32]), memory.upload(&[0u32; 8]));
    let params = [source.to_le_bytes(), flags.to_le_bytes()].concat();
    module.launch("test", [8, 1, 1], 32, 0, &params, &mut memory)?;
    assert_eq!(memory.download::<u32>(flags, 8)?, [1; 8]);
    Ok(())
}

/// The mbarrier at shared address `%r5`, which warp 0 initialises for one arrival of a phase; the threads' words are 64 bytes further on.
const MBARRIER: &str = "mov.u32 %r5, smem; mov.u32 %r6, 1; setp.eq.u32 %p2, %r0, 0;
    @%p2 mbarrier.init.shared::cta.b64 [%r5], %r6; bar.sync 0; add.s32 %r2, %r5, 64; setp.lt.u32 %p0, %r0, 32;\n";

#[test]
fn mbarriers_order_those_who_wait_after_those_who_arrive() {
    // Lane 0 writes a word, arrives, and warp 1 reads the word.
    let handed = |wait: &str| {
        format!(
            "{MBARRIER} mov.u32 %r7, 0; @!%p0 bra $reader; @%p2 st.shared.b32 [%r2], 7; @%p2 mbarrier.arrive.shared::cta.b64 _, [%r5];
             bra $end; $reader: {wait} ld.shared.b32 %r7, [%r2]; $end: st.global.b32 [%rd1], %r7;"
        )
    };
    let wait = "$again: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r5], %r7; @!%p1 bra $again;";
    assert_eq!(run(&handed(wait), &[0; 64])[32..], [7; 32]);
    assert!(matches!(cause(&handed(""), 64), Cause::Race { .. } | Cause::Unwritten { .. }));
}

#[test]
fn mbarriers_are_initialised_and_arrived_at_as_often_as_they_expect() {
    let uninitialised = format!("mov.u32 %r5, smem; mbarrier.arrive.shared::cta.b64 _, [%r5]; {STORE}");
    assert!(matches!(cause(&uninitialised, 32), Cause::Mbarrier { .. }));
    // the bytes that were announced never come: the phase lasts, and takes no further arrival
    let too_often = format!(
        "{MBARRIER} mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], %r6;
         mbarrier.arrive.shared::cta.b64 _, [%r5]; {STORE}"
    );
    assert!(matches!(cause(&too_often, 32), Cause::Mbarrier { .. }));
}

#[test]
fn bulk_additions_read_shared_memory_until_the_wait() {
    let add = |fence: &str, change: &str| {
        format!(
            "{WORD} st.shared.b32 [%r2], 0f40000000; st.global.b32 [%rd1], 0f3F800000; {fence} setp.eq.u32 %p0, %r0, 0;
             mov.u32 %r4, smem; mov.u32 %r5, 128;
             @%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r4], %r5;
             @%p0 cp.async.bulk.commit_group; {change} @%p0 cp.async.bulk.wait_group 0;"
        )
    };
    // the fence may be the writer's or the one's who starts the addition
    for fence in ["fence.proxy.async; bar.sync 0;", "bar.sync 0; fence.proxy.async;"] {
        assert_eq!(run(&add(fence, ""), &[0; 32]), [3f32.to_bits(); 32]);
        // what has yet to be read must not be overwritten
        let overwrite = "@%p0 st.shared.b32 [%r2], 0f40800000;";
        assert!(matches!(cause(&add(fence, overwrite), 32), Cause::LaneRace { .. }));
        // nor behind a wait that leaves one group pending
        let wait = |pending| format!("@%p0 cp.async.bulk.wait_group.read {pending}; {overwrite}");
        assert!(matches!(cause(&add(fence, &wait(1)), 32), Cause::LaneRace { .. }));
        assert_eq!(run(&add(fence, &wait(0)), &[0; 32]), [3f32.to_bits(); 32]);
    }
    assert!(matches!(cause(&add("bar.sync 0;", ""), 32), Cause::ProxyFence { writer: 0, .. }));
}

#[test]
fn read_only_data_is_not_written_in_the_same_launch() {
    let written = "st.global.b32 [%rd0], %r1;";
    assert!(matches!(cause(&format!("{written} ld.global.nc.b32 %r2, [%rd0];"), 32), Cause::NotReadOnly { .. }));
    assert!(matches!(cause(&format!("ld.global.nc.b32 %r2, [%rd0]; {written}"), 32), Cause::NotReadOnly { .. }));
    assert!(matches!(
        cause("ld.global.nc.b32 %r2, [%rd0]; atom.global.add.u32 %r3, [%rd0], 1;", 32),
        Cause::NotReadOnly { .. }
    ));
    assert_eq!(run("ld.global.nc.b32 %r2, [%rd0]; st.global.b32 [%rd1], %r2;", &[5; 32]), [5; 32]);
}

#[test]
fn what_is_not_known_is_refused_with_its_line() {
    let parse = |statement: &str| {
        let text = format!(".version 7.0\n.entry e()\n{{\n.reg .b32 %r<4>;\n{statement}\nret;\n}}");
        Module::parse(&text).map(|_| ()).expect_err("an error")
    };
    for statement in [
        "tcgen05.fence::before_thread_sync;",
        "add.rz.f32 %r0, %r1, %r2;",
        "frobnicate.b32 %r0, %r1;",
        "mov.b32 %r0, %r9;",
        "add.s32 %r0, %r1;",
        "bra $nowhere;",
        "call f, ();",
    ] {
        assert!(matches!(parse(statement), Error::Parse { line: 5, .. }), "{statement}: {:?}", parse(statement));
    }
}

#[test]
fn launches_are_checked() {
    let module = module(STORE);
    let mut memory = Memory::new();
    let mut launch = |entry: &str, block, params: usize| {
        module.launch(entry, [1, 1, 1], block, 0, &vec![0; params], &mut memory).expect_err("an error")
    };
    assert_eq!(launch("test", 32, 12), Error::ParameterBytes { entry: "test".into(), expected: 16, found: 12 });
    assert!(matches!(launch("test", 48, 16), Error::LaunchSize { quantity: "block", found: 48, .. }));
    assert!(matches!(launch("other", 32, 16), Error::UnknownEntry { .. }));
}
