//! Clusters of two blocks: ranks, barriers, each other's mbarriers and shared memory.

use ptx_sim::{Cause, Error, Memory, Module, Size};

/// What the threads of `blocks` blocks of one warp, in clusters of two, have left in `%r9`, by block. `%r0` is the thread, `%r1` the rank, `%r2` the other
/// block's; `%r5` is an mbarrier of the block that expects two arrivals in a phase, `%r6` the same of the other block.
fn run(body: &str, blocks: u32) -> Result<Vec<u32>, Error> {
    let text = format!(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n\
         .visible .entry test(.param .u64 out)\n.maxntid 32, 1, 1\n.explicitcluster\n.reqnctapercluster 2, 1, 1\n{{\n\
         .reg .pred %p<8>; .reg .b32 %r<16>; .reg .b64 %rd<8>;\n\
         mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mov.u32 %r5, smem; mov.u32 %r3, 2; mov.u32 %r9, 0;\n\
         setp.eq.u32 %p0, %r0, 0; mapa.shared::cluster.u32 %r6, %r5, %r2;\n\
         @%p0 mbarrier.init.shared::cta.b64 [%r5], %r3;\n\
         {body}\n\
         ld.param.b64 %rd0, [out]; mov.u32 %r10, %ctaid.x; mad.lo.u32 %r10, %r10, 32, %r0; mul.wide.u32 %rd1, %r10, 4;\n\
         add.s64 %rd0, %rd0, %rd1; st.global.b32 [%rd0], %r9;\nret;\n}}\n"
    );
    let module = Module::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let mut memory = Memory::new();
    let out = memory.alloc_poisoned(4 * 32 * blocks as usize);
    let size = Size { grid: [blocks, 1, 1], block: 32, shared_bytes: 4096 };
    module.launch_with("test", size, &out.to_le_bytes(), &mut memory, Default::default())?;
    memory.download(out, 32 * blocks as usize)
}

fn cause(body: &str) -> Cause {
    let error = run(body, 2).expect_err("a fault");
    error.fault().unwrap_or_else(|| panic!("{error}")).cause
}

const CLUSTER_BARRIER: &str = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;";
/// Both blocks arrive at both mbarriers.
const ARRIVE: &str =
    "@%p0 mbarrier.arrive.shared::cta.b64 _, [%r5]; @%p0 mbarrier.arrive.shared::cluster.b64 _, [%r6];";
const WAIT: &str = "$again: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r5], %r4; @!%p1 bra $again;";

#[test]
fn ranks_count_the_blocks_of_a_cluster() {
    let ranks = run("mov.u32 %r9, %cluster_ctarank;", 6).unwrap();
    assert!(ranks.chunks(32).zip([0, 1, 0, 1, 0, 1]).all(|(block, rank)| block == [rank; 32]));
}

#[test]
fn a_grid_is_of_whole_clusters() {
    assert!(matches!(run("", 3), Err(Error::LaunchSize { quantity: "grid", found: 3, .. })));
}

#[test]
fn blocks_arrive_at_each_others_mbarriers() {
    // Each block's word is written before its arrival at the other block's mbarrier, and read after the wait there. (On a GPU that takes arrivals and waits
    // of cluster scope; scopes are not modelled.)
    let handed = |wait: &str| {
        format!(
            "mov.u32 %r4, 0; add.s32 %r7, %r5, 64; add.s32 %r8, %r1, 70; @%p0 st.shared.b32 [%r7], %r8; {CLUSTER_BARRIER} {ARRIVE} {wait}
             mapa.shared::cluster.u32 %r7, %r7, %r2; ld.shared::cluster.b32 %r9, [%r7]; {CLUSTER_BARRIER}"
        )
    };
    let words = run(&handed(WAIT), 4).unwrap();
    assert!(words.chunks(32).zip([71, 70, 71, 70]).all(|(block, word)| block == [word; 32]));
}

#[test]
fn words_of_the_other_block_are_ordered_by_what_both_came_to() {
    let read = |between: &str| {
        format!(
            "add.s32 %r7, %r5, 64; @%p0 st.shared.b32 [%r7], 7; {between}
             mapa.shared::cluster.u32 %r7, %r7, %r2; ld.shared::cluster.b32 %r9, [%r7]; {CLUSTER_BARRIER}"
        )
    };
    assert_eq!(run(&read(CLUSTER_BARRIER), 2).unwrap(), [7; 64]);
    assert!(matches!(cause(&read("")), Cause::Race { .. } | Cause::Unwritten { .. }));
}

#[test]
fn mbarriers_are_initialised_before_the_other_block_arrives() {
    assert!(matches!(cause(&format!("{ARRIVE} {CLUSTER_BARRIER}")), Cause::Mbarrier { .. }));
}

#[test]
fn a_block_that_others_arrive_at_does_not_exit() {
    // The second block stays behind; the first one is gone when it arrives.
    let late = "mov.u32 %r4, 0; $wait: setp.lt.u32 %p2, %r4, 5000000; and.pred %p2, %p2, %p3; add.u32 %r4, %r4, 1; @%p2 bra $wait;";
    let body = format!("{CLUSTER_BARRIER} setp.eq.u32 %p3, %r1, 1; {late} {ARRIVE}");
    assert!(matches!(cause(&body), Cause::ExitedBlock { rank: 0, .. }));
    run(&format!("{body} {CLUSTER_BARRIER}"), 2).unwrap();
}

#[test]
fn a_barrier_of_the_cluster_waits_for_both_blocks() {
    let body = format!("setp.eq.u32 %p3, %r1, 1; @%p3 bra $end; {CLUSTER_BARRIER} $end:");
    assert!(matches!(cause(&body), Cause::BarrierNeverCompletes { expected: 64, arrived: 32, .. }));
}
