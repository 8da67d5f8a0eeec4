//! Several streams and threads, at once and in turn.

use attn_backward::cross::{self, Precision};
use attn_backward::gpu::{Event, Stream};
use attn_backward::{Device, Workspace, audio};
use attn_backward_tests::device::on_each_module;
use attn_backward_tests::examples::{audio_of, cross_of, cross_shape};
use attn_backward_tests::strategies::cu_seqlens_of;

use crate::guarded::{audio_backward, audio_tensors, cross_backward, cross_tensors};

const CHUNK_LENS: [usize; 5] = [104, 0, 250, 64, 1];

#[test]
fn threads_that_share_an_operation_do_not_disturb_each_other() {
    on_each_module(|gpu, module| {
        let inputs: Vec<_> = (0..4).map(|seed| audio_of(seed, 2, cu_seqlens_of(&CHUNK_LENS, 5))).collect();
        let expected: Vec<_> =
            inputs.iter().map(|inputs| audio_tensors::bits(&audio_backward(&gpu.gpu, module, inputs))).collect();
        let shape = inputs[0].shape().unwrap();
        let plan = audio::Plan::new(&shape, &inputs[0].cu_seqlens, &gpu.target(module)).unwrap();
        let operation = &audio::Backward::new(&gpu.gpu, plan).unwrap();
        std::thread::scope(|scope| {
            for (inputs, expected) in inputs.iter().zip(&expected) {
                scope.spawn(move || {
                    let stream = Stream::new(&gpu.gpu).unwrap();
                    let tensors = audio_tensors::Inputs::upload(&gpu.gpu, inputs);
                    let outputs = audio_tensors::Outputs::new(&gpu.gpu, &shape, operation.plan().workspace().bytes());
                    for _ in 0..20 {
                        let workspace = &mut outputs.workspace();
                        operation.run(&stream, &tensors.views(), &mut outputs.views(), workspace).unwrap();
                    }
                    stream.synchronize().unwrap();
                    assert!(audio_tensors::bits(&outputs.gradients()) == *expected);
                });
            }
        });
    });
}

#[test]
fn streams_of_one_thread_do_not_disturb_each_other() {
    on_each_module(|gpu, module| {
        let shape = cross_shape(2, 150, 170);
        let plan = cross::Plan::new(&shape, Precision::Fast, &gpu.target(module)).unwrap();
        let operation = cross::Backward::new(&gpu.gpu, plan).unwrap();
        let bytes = operation.plan().workspace().bytes();
        let runs: Vec<_> = (0..4)
            .map(|seed| {
                let inputs = cross_of(seed, shape);
                let expected = cross_tensors::bits(&cross_backward(&gpu.gpu, module, &inputs, Precision::Fast));
                let tensors = cross_tensors::Inputs::upload(&gpu.gpu, &inputs);
                let outputs = cross_tensors::Outputs::new(&gpu.gpu, &shape, bytes);
                (Stream::new(&gpu.gpu).unwrap(), tensors, outputs, expected)
            })
            .collect();
        for _ in 0..20 {
            for (stream, tensors, outputs, _) in &runs {
                operation.run(stream, &tensors.views(), &mut outputs.views(), &mut outputs.workspace()).unwrap();
            }
        }
        for (stream, _, outputs, expected) in &runs {
            stream.synchronize().unwrap();
            assert!(cross_tensors::bits(&outputs.gradients()) == *expected);
        }
    });
}

#[test]
fn runs_on_one_stream_may_share_a_workspace() {
    on_each_module(|gpu, module| {
        let stream = Stream::new(&gpu.gpu).unwrap();
        let runs: Vec<_> = [&CHUNK_LENS[..], &[5, 9], &[300], &[64; 20]]
            .iter()
            .enumerate()
            .map(|(seed, chunk_lens)| {
                let inputs = audio_of(seed as u64, 2, cu_seqlens_of(chunk_lens, 1));
                let shape = inputs.shape().unwrap();
                let plan = audio::Plan::new(&shape, &inputs.cu_seqlens, &gpu.target(module)).unwrap();
                let operation = audio::Backward::new(&gpu.gpu, plan).unwrap();
                let tensors = audio_tensors::Inputs::upload(&gpu.gpu, &inputs);
                (inputs, operation, tensors, audio_tensors::Outputs::new(&gpu.gpu, &shape, 0))
            })
            .collect();
        let bytes = runs.iter().map(|(_, operation, ..)| operation.plan().workspace().bytes()).max().unwrap();
        let mut workspace = Workspace::allocate(&gpu.gpu, bytes).unwrap();
        for (_, operation, tensors, outputs) in &runs {
            operation.run(&stream, &tensors.views(), &mut outputs.views(), &mut workspace).unwrap();
        }
        stream.synchronize().unwrap();
        for (inputs, _, _, outputs) in &runs {
            let expected = audio_backward(&gpu.gpu, module, inputs);
            assert!(audio_tensors::bits(&outputs.gradients()) == audio_tensors::bits(&expected));
        }
    });
}

#[test]
fn a_stream_that_waits_for_an_event_sees_the_work_before_it() {
    on_each_module(|gpu, module| {
        let inputs = audio_of(1, 2, cu_seqlens_of(&CHUNK_LENS, 0));
        let shape = inputs.shape().unwrap();
        let plan = audio::Plan::new(&shape, &inputs.cu_seqlens, &gpu.target(module)).unwrap();
        let operation = audio::Backward::new(&gpu.gpu, plan).unwrap();
        let (first, second) = (Stream::new(&gpu.gpu).unwrap(), Stream::new(&gpu.gpu).unwrap());
        let buffers = audio::InputBuffers::upload(&gpu.gpu, &inputs).unwrap();
        let mut gradients = audio::GradientBuffers::allocate(&gpu.gpu, &first, &shape).unwrap();
        let mut workspace = Workspace::allocate(&gpu.gpu, operation.plan().workspace().bytes()).unwrap();
        operation.run(&first, &buffers.views().unwrap(), &mut gradients.views().unwrap(), &mut workspace).unwrap();
        let event = Event::new(&gpu.gpu).unwrap();
        event.record(&first).unwrap();
        second.wait(&event).unwrap();
        let found = gradients.download(&second).unwrap();
        assert!(audio_tensors::bits(&found) == audio_tensors::bits(&audio_backward(&gpu.gpu, module, &inputs)));
    });
}

#[test]
fn the_call_from_host_to_host_gives_the_same_bits() {
    on_each_module(|gpu, module| {
        let device = Device::Gpu { gpu: gpu.gpu.clone(), module };
        let inputs = audio_of(2, 2, cu_seqlens_of(&CHUNK_LENS, 3));
        let found = audio::backward(&device, &inputs).unwrap();
        assert!(audio_tensors::bits(&found) == audio_tensors::bits(&audio_backward(&gpu.gpu, module, &inputs)));
        let inputs = cross_of(2, cross_shape(2, 33, 44));
        let found = cross::backward(&device, &inputs, Precision::High).unwrap();
        let expected = cross_backward(&gpu.gpu, module, &inputs, Precision::High);
        assert!(cross_tensors::bits(&found) == cross_tensors::bits(&expected));
    });
}
