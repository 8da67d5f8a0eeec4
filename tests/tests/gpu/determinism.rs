//! The same inputs give the same bits: in every run, beside other work, in a graph, in another process.

use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;

use attn_backward::cross::{self, Precision};
use attn_backward::gpu::{Graph, ModuleKind, Stream};
use attn_backward::{Workspace, audio};
use attn_backward_tests::device::{TestGpu, on_each_module, on_gpu};
use attn_backward_tests::examples::{audio_of, cross_of, cross_shape};
use attn_backward_tests::strategies::cu_seqlens_of;

use crate::child;
use crate::guarded::{audio_tensors, cross_tensors};

/// Operation A; [`Audio::new`]: T = 4000 in chunks of mixed lengths.
struct Audio {
    operation: audio::Backward,
    tensors: audio_tensors::Inputs,
    outputs: audio_tensors::Outputs,
}

impl Audio {
    fn new(gpu: &TestGpu, module: ModuleKind) -> Audio {
        let chunk_lens = [104, 1, 0, 333, 64, 1500, 17, 128, 3, 500, 104, 104, 129, 90, 8, 915];
        let inputs = audio_of(1, 4, cu_seqlens_of(&chunk_lens, 0));
        let shape = inputs.shape().unwrap();
        assert_eq!(shape.total_seq_len, 4000);
        Audio::of(gpu, &inputs, audio::Plan::new(&shape, &inputs.cu_seqlens, &gpu.target(module)).unwrap())
    }

    fn of(gpu: &TestGpu, inputs: &audio::Inputs, plan: audio::Plan) -> Audio {
        let operation = audio::Backward::new(&gpu.gpu, plan).unwrap();
        let bytes = operation.plan().workspace().bytes();
        let outputs = audio_tensors::Outputs::new(&gpu.gpu, operation.plan().shape(), bytes);
        Audio { operation, tensors: audio_tensors::Inputs::upload(&gpu.gpu, inputs), outputs }
    }

    fn run(&self, stream: &Stream) {
        let (views, workspace) = (self.tensors.views(), &mut self.outputs.workspace());
        self.operation.run(stream, &views, &mut self.outputs.views(), workspace).unwrap();
    }

    fn bits(&self, stream: &Stream) -> Vec<u8> {
        stream.synchronize().unwrap();
        audio_tensors::bits(&self.outputs.gradients())
    }
}

/// Operation B.
struct Cross {
    operation: cross::Backward,
    tensors: cross_tensors::Inputs,
    outputs: cross_tensors::Outputs,
}

impl Cross {
    fn new(gpu: &TestGpu, module: ModuleKind, precision: Precision) -> Cross {
        let shape = cross::Shape { num_heads: 8, head_dim: 128, ..cross_shape(3, 500, 333) };
        let inputs = cross_of(2, shape);
        let plan = cross::Plan::new(&shape, precision, &gpu.target(module)).unwrap();
        let operation = cross::Backward::new(&gpu.gpu, plan).unwrap();
        let outputs = cross_tensors::Outputs::new(&gpu.gpu, &shape, operation.plan().workspace().bytes());
        Cross { operation, tensors: cross_tensors::Inputs::upload(&gpu.gpu, &inputs), outputs }
    }

    fn run(&self, stream: &Stream) {
        let (views, workspace) = (self.tensors.views(), &mut self.outputs.workspace());
        self.operation.run(stream, &views, &mut self.outputs.views(), workspace).unwrap();
    }

    fn bits(&self, stream: &Stream) -> Vec<u8> {
        stream.synchronize().unwrap();
        cross_tensors::bits(&self.outputs.gradients())
    }
}

#[test]
fn a_hundred_runs_of_operation_a_give_the_same_bits() {
    on_each_module(|gpu, module| {
        let (audio, stream) = (Audio::new(gpu, module), Stream::new(&gpu.gpu).unwrap());
        audio.run(&stream);
        let first = audio.bits(&stream);
        for run in 1..100 {
            audio.run(&stream);
            assert!(audio.bits(&stream) == first, "run {run} differs");
        }
    });
}

#[test]
fn a_hundred_runs_of_operation_b_give_the_same_bits() {
    on_each_module(|gpu, module| {
        for precision in [Precision::Fast, Precision::High] {
            let (cross, stream) = (Cross::new(gpu, module, precision), Stream::new(&gpu.gpu).unwrap());
            cross.run(&stream);
            let first = cross.bits(&stream);
            for run in 1..100 {
                cross.run(&stream);
                assert!(cross.bits(&stream) == first, "{precision}: run {run} differs");
            }
        }
    });
}

#[test]
fn other_kernels_on_another_stream_change_no_bit() {
    on_each_module(|gpu, module| {
        let (stream, busy) = (Stream::new(&gpu.gpu).unwrap(), Stream::new(&gpu.gpu).unwrap());
        let (audio, cross) = (Audio::new(gpu, module), Cross::new(gpu, module, Precision::Fast));
        let (other_audio, other_cross) = (Audio::new(gpu, module), Cross::new(gpu, module, Precision::High));
        audio.run(&stream);
        cross.run(&stream);
        let (idle_audio, idle_cross) = (audio.bits(&stream), cross.bits(&stream));
        for run in 0..10 {
            for _ in 0..5 {
                other_audio.run(&busy);
                other_cross.run(&busy);
            }
            audio.run(&stream);
            cross.run(&stream);
            assert!(audio.bits(&stream) == idle_audio, "operation A, run {run} differs");
            assert!(cross.bits(&stream) == idle_cross, "operation B, run {run} differs");
        }
        busy.synchronize().unwrap();
    });
}

#[test]
fn a_graphs_replay_gives_the_bits_of_a_direct_run() {
    on_each_module(|gpu, module| {
        let stream = Stream::new(&gpu.gpu).unwrap();
        let (audio, cross) = (Audio::new(gpu, module), Cross::new(gpu, module, Precision::High));
        audio.run(&stream);
        cross.run(&stream);
        let direct = (audio.bits(&stream), cross.bits(&stream));

        // Other outputs, so that a replay that does nothing does not pass.
        let (audio, cross) = (Audio::new(gpu, module), Cross::new(gpu, module, Precision::High));
        let mut graph = Graph::capture(&stream, || {
            audio.run(&stream);
            cross.run(&stream);
            Ok::<(), attn_backward::Error>(())
        })
        .unwrap();
        stream.synchronize().unwrap();
        audio.outputs.assert_unwritten();
        for replay in 0..5 {
            // SAFETY: all that the captured work uses is alive, and used by nothing else.
            unsafe { graph.launch(&stream) }.unwrap();
            assert!((audio.bits(&stream), cross.bits(&stream)) == direct, "replay {replay} differs");
        }
    });
}

#[test]
fn thousands_of_replays_of_short_chunks_give_the_same_bits() {
    on_each_module(|gpu, module| {
        let stream = Stream::new(&gpu.gpu).unwrap();
        // Operation A in two launches on Hopper, the first of which zeroes the counters of the second.
        let inputs = audio_of(3, 4, cu_seqlens_of(&[104, 1, 0, 33, 64, 128], 0));
        let plan = audio::Plan::new(&inputs.shape().unwrap(), &inputs.cu_seqlens, &gpu.target(module)).unwrap();
        assert_eq!(plan.fused().is_some(), module == ModuleKind::Hopper);
        let audio = Audio::of(gpu, &inputs, plan);
        audio.run(&stream);
        let direct = audio.bits(&stream);
        let bytes = audio.operation.plan().workspace().bytes();
        let mut workspace = Workspace::allocate(&gpu.gpu, bytes).unwrap();
        for foreign in [true, false] {
            let workspace = if foreign { &mut audio.outputs.workspace() } else { &mut workspace };
            let (inputs, mut gradients) = (audio.tensors.views(), audio.outputs.views());
            let run = || audio.operation.run(&stream, &inputs, &mut gradients, workspace);
            let mut graph = Graph::capture(&stream, run).unwrap();
            for replay in 0..2000 {
                // SAFETY: all that the captured work uses is alive, and used by nothing else.
                unsafe { graph.launch(&stream) }.unwrap();
                if replay % 100 == 99 {
                    assert!(audio.bits(&stream) == direct, "foreign workspace: {foreign}, replay {replay} differs");
                }
            }
        }
    });
}

/// One line for each module and operation with a hash of the bits.
fn hashes(gpu: &TestGpu) -> Vec<String> {
    let hash = |bits: &[u8]| {
        let mut hasher = DefaultHasher::new();
        hasher.write(bits);
        hasher.finish()
    };
    let mut lines = Vec::new();
    for &module in &gpu.modules {
        let stream = Stream::new(&gpu.gpu).unwrap();
        let audio = Audio::new(gpu, module);
        audio.run(&stream);
        lines.push(format!("{module} audio {:016x}", hash(&audio.bits(&stream))));
        for precision in [Precision::Fast, Precision::High] {
            let cross = Cross::new(gpu, module, precision);
            cross.run(&stream);
            lines.push(format!("{module} cross {precision} {:016x}", hash(&cross.bits(&stream))));
        }
    }
    lines
}

#[test]
fn a_fresh_process_gives_the_same_bits() {
    on_gpu(|gpu| {
        let output = child::run("determinism::child_prints_hashes");
        let printed = child::printed(&output);
        assert!(output.status.success(), "{printed}");
        for line in hashes(gpu) {
            assert!(printed.contains(&line), "no line {line} in\n{printed}");
        }
    });
}

#[test]
fn child_prints_hashes() {
    if child::is_child() {
        on_gpu(|gpu| hashes(gpu).iter().for_each(|line| println!("{line}")));
    }
}

#[test]
fn a_library_allocated_workspace_gives_the_bits_of_a_foreign_one() {
    on_each_module(|gpu, module| {
        let (audio, stream) = (Audio::new(gpu, module), Stream::new(&gpu.gpu).unwrap());
        audio.run(&stream);
        let foreign = audio.bits(&stream);
        let mut workspace = Workspace::allocate(&gpu.gpu, audio.operation.plan().workspace().bytes()).unwrap();
        audio.operation.run(&stream, &audio.tensors.views(), &mut audio.outputs.views(), &mut workspace).unwrap();
        assert!(audio.bits(&stream) == foreign);
    });
}
