//! What a call refuses, by name and before any GPU work; what it promises of its outputs.

use attn_backward::cross::{self, Precision};
use attn_backward::gpu::{Dtype, Gpu, GpuError, Stream, TensorView, TensorViewMut};
use attn_backward::{Error, Workspace, audio};
use attn_backward_tests::device::{TestGpu, on_each_module, on_gpu, skip};
use attn_backward_tests::examples::{audio_of, cross_of, cross_shape};
use attn_backward_tests::strategies::cu_seqlens_of;
use half::bf16;

use crate::guarded::{audio_backward, audio_tensors, cross_tensors};

/// What can be wrong with a tensor.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Dtype,
    Extent,
    Rank,
    RowsApart,
    OffsetByOneElement,
    NullPointer,
    HostMemory,
    OtherDevice,
}

const FAULTS: [Fault; 8] = [
    Fault::Dtype,
    Fault::Extent,
    Fault::Rank,
    Fault::RowsApart,
    Fault::OffsetByOneElement,
    Fault::NullPointer,
    Fault::HostMemory,
    Fault::OtherDevice,
];

/// A tensor that is wrong.
struct Broken {
    address: u64,
    dtype: Dtype,
    shape: Vec<usize>,
    strides: Vec<usize>,
    device: usize,
}

impl Broken {
    fn of(view: &TensorView<'_>, fault: Fault) -> Broken {
        static HOST: [u128; 4] = [0; 4];
        let mut broken = Broken {
            address: view.address(),
            dtype: view.dtype(),
            shape: view.shape().into(),
            strides: view.strides().into(),
            device: view.device(),
        };
        let rank = broken.shape.len();
        match fault {
            Fault::Dtype if broken.dtype == Dtype::Bf16 => broken.dtype = Dtype::F32,
            Fault::Dtype => broken.dtype = Dtype::Bf16,
            Fault::Extent => broken.shape[rank - 1] -= 1,
            Fault::Rank => {
                broken.shape.push(1);
                broken.strides.push(1);
            }
            // A column slice of a wider matrix, or every other element of a longer vector.
            Fault::RowsApart if rank > 1 => broken.strides[rank - 2] += 8,
            Fault::RowsApart => broken.strides[0] = 2,
            Fault::OffsetByOneElement => broken.address += broken.dtype.size_bytes() as u64,
            Fault::NullPointer => broken.address = 0,
            Fault::HostMemory => broken.address = (&raw const HOST) as u64,
            Fault::OtherDevice => broken.device += 1,
        }
        broken
    }

    fn view(&self) -> TensorView<'static> {
        // SAFETY: it is refused: nothing reads it.
        unsafe { TensorView::foreign(self.address, self.dtype, &self.shape, &self.strides, self.device) }
    }

    fn view_mut(&self) -> TensorViewMut<'static> {
        // SAFETY: it is refused: nothing writes it.
        unsafe { TensorViewMut::foreign(self.address, self.dtype, &self.shape, &self.strides, self.device) }
    }
}

/// Fails unless `error` names the tensor, what is wrong with it and the rule.
#[track_caller]
fn assert_names(error: Error, name: &str, fault: Fault, broken: &Broken) {
    let text = error.to_string();
    let named = match (fault, error) {
        (Fault::Dtype, Error::Dtype { tensor, expected, found }) => tensor == name && expected != found,
        (Fault::Extent | Fault::Rank, Error::Shape { tensor, expected, found }) => {
            tensor == name && found == broken.shape && expected != found
        }
        (
            Fault::RowsApart | Fault::OffsetByOneElement | Fault::NullPointer | Fault::HostMemory,
            Error::Layout { tensor, rule, .. },
        ) => tensor == name && rule.contains("row-major without gaps and start on a 16-byte boundary"),
        (Fault::OtherDevice, Error::Gpu(GpuError::WrongDevice { tensor, tensor_device, plan_device })) => {
            tensor == name && tensor_device == plan_device + 1
        }
        _ => false,
    };
    assert!(named && !text.contains('\n'), "{name}, {fault:?}: {text}");
}

/// Breaks each tensor of an operation in turn in each way, asserts that the run names it and writes nothing, and that the next run works.
macro_rules! each_fault_is_named {
    ($operation:expr, $tensors:ident, $inputs:expr, $outputs:expr, $stream:expr) => {{
        let (operation, inputs, outputs, stream) = ($operation, $inputs, $outputs, $stream);
        for fault in FAULTS {
            for (name, field) in $tensors::input_fields() {
                let mut views = inputs.views();
                let broken = Broken::of(field(&mut views), fault);
                *field(&mut views) = broken.view();
                let result = operation.run(stream, &views, &mut outputs.views(), &mut outputs.workspace());
                assert_names(result.unwrap_err(), name, fault, &broken);
            }
            for (name, field) in $tensors::gradient_fields() {
                let mut views = outputs.views();
                let broken = Broken::of(field(&mut views), fault);
                *field(&mut views) = broken.view_mut();
                let result = operation.run(stream, &inputs.views(), &mut views, &mut outputs.workspace());
                assert_names(result.unwrap_err(), name, fault, &broken);
            }
        }
        stream.synchronize().unwrap();
        outputs.assert_unwritten();
        operation.run(stream, &inputs.views(), &mut outputs.views(), &mut outputs.workspace()).unwrap();
        stream.synchronize().unwrap();
        assert!(outputs.gradients().tensors().iter().all(|(_, x)| x.iter().all(|x| x.is_finite())));
    }};
}

fn audio_operation(gpu: &TestGpu, module: attn_backward::gpu::ModuleKind, inputs: &audio::Inputs) -> audio::Backward {
    let plan = audio::Plan::new(&inputs.shape().unwrap(), &inputs.cu_seqlens, &gpu.target(module)).unwrap();
    audio::Backward::new(&gpu.gpu, plan).unwrap()
}

#[test]
fn operation_a_names_each_tensor_that_is_wrong_before_any_work() {
    on_each_module(|gpu, module| {
        let inputs = audio_of(1, 2, cu_seqlens_of(&[20, 9], 2));
        let operation = audio_operation(gpu, module, &inputs);
        let stream = Stream::new(&gpu.gpu).unwrap();
        let tensors = audio_tensors::Inputs::upload(&gpu.gpu, &inputs);
        let bytes = operation.plan().workspace().bytes();
        let outputs = audio_tensors::Outputs::new(&gpu.gpu, operation.plan().shape(), bytes);
        each_fault_is_named!(&operation, audio_tensors, &tensors, &outputs, &stream);
    });
}

#[test]
fn operation_b_names_each_tensor_that_is_wrong_before_any_work() {
    on_each_module(|gpu, module| {
        let shape = cross_shape(2, 7, 9);
        let plan = cross::Plan::new(&shape, Precision::High, &gpu.target(module)).unwrap();
        let operation = cross::Backward::new(&gpu.gpu, plan).unwrap();
        let stream = Stream::new(&gpu.gpu).unwrap();
        let tensors = cross_tensors::Inputs::upload(&gpu.gpu, &cross_of(1, shape));
        let outputs = cross_tensors::Outputs::new(&gpu.gpu, &shape, operation.plan().workspace().bytes());
        each_fault_is_named!(&operation, cross_tensors, &tensors, &outputs, &stream);
    });
}

#[test]
fn a_workspace_that_does_not_do_is_named_with_what_is_needed() {
    on_each_module(|gpu, module| {
        let inputs = audio_of(2, 2, cu_seqlens_of(&[20, 200], 0));
        let operation = audio_operation(gpu, module, &inputs);
        let stream = Stream::new(&gpu.gpu).unwrap();
        let tensors = audio_tensors::Inputs::upload(&gpu.gpu, &inputs);
        let bytes = operation.plan().workspace().bytes();
        let outputs = audio_tensors::Outputs::new(&gpu.gpu, operation.plan().shape(), bytes);
        let (address, device) = (outputs.guarded.address(9), gpu.gpu.index());
        for (address, bytes_found, device) in [
            (address, bytes - 1, device),
            (address, 0, device),
            (address + 16, bytes, device),
            (address, bytes, device + 1),
        ] {
            // SAFETY: it is refused: nothing writes it.
            let mut workspace = unsafe { Workspace::foreign(address, bytes_found, device) };
            let error = operation.run(&stream, &tensors.views(), &mut outputs.views(), &mut workspace).unwrap_err();
            let text = error.to_string();
            assert!(matches!(&error, Error::Layout { tensor, .. } if tensor == "workspace"), "{text}");
            assert!(
                text.contains(&format!("{bytes_found} bytes")) && text.contains(&format!("{bytes} needed")),
                "{text}"
            );
        }
        stream.synchronize().unwrap();
        outputs.assert_unwritten();
    });
}

#[test]
fn outputs_are_overwritten() {
    on_each_module(|gpu, module| {
        let inputs = audio_of(3, 2, cu_seqlens_of(&[20, 0, 150], 6));
        let operation = audio_operation(gpu, module, &inputs);
        let stream = Stream::new(&gpu.gpu).unwrap();
        let tensors = audio_tensors::Inputs::upload(&gpu.gpu, &inputs);
        let bytes = operation.plan().workspace().bytes();
        let mut outputs = audio_tensors::Outputs::new(&gpu.gpu, operation.plan().shape(), bytes);
        for index in 0..9 {
            let seven = vec![bf16::from_f32(7.0); outputs.guarded.bytes(index) / 2];
            outputs.guarded.write(index, &seven);
        }
        let expected = audio_tensors::bits(&audio_backward(&gpu.gpu, module, &inputs));
        for _ in 0..2 {
            operation.run(&stream, &tensors.views(), &mut outputs.views(), &mut outputs.workspace()).unwrap();
            stream.synchronize().unwrap();
            assert!(audio_tensors::bits(&outputs.gradients()) == expected);
        }
    });
}

#[test]
fn inputs_are_not_written() {
    on_each_module(|gpu, module| {
        let inputs = audio_of(4, 2, cu_seqlens_of(&[20, 150], 6));
        let operation = audio_operation(gpu, module, &inputs);
        let stream = Stream::new(&gpu.gpu).unwrap();
        let tensors = audio_tensors::Inputs::upload(&gpu.gpu, &inputs);
        let bytes = operation.plan().workspace().bytes();
        let outputs = audio_tensors::Outputs::new(&gpu.gpu, operation.plan().shape(), bytes);
        let before = tensors.bytes();
        operation.run(&stream, &tensors.views(), &mut outputs.views(), &mut outputs.workspace()).unwrap();
        stream.synchronize().unwrap();
        assert!(tensors.bytes() == before);

        let shape = cross_shape(1, 20, 30);
        let plan = cross::Plan::new(&shape, Precision::High, &gpu.target(module)).unwrap();
        let operation = cross::Backward::new(&gpu.gpu, plan).unwrap();
        let tensors = cross_tensors::Inputs::upload(&gpu.gpu, &cross_of(4, shape));
        let outputs = cross_tensors::Outputs::new(&gpu.gpu, &shape, operation.plan().workspace().bytes());
        let before = tensors.bytes();
        operation.run(&stream, &tensors.views(), &mut outputs.views(), &mut outputs.workspace()).unwrap();
        stream.synchronize().unwrap();
        assert!(tensors.bytes() == before);
    });
}

#[test]
fn the_legacy_default_stream_works_as_well() {
    on_each_module(|gpu, module| {
        let inputs = audio_of(5, 1, cu_seqlens_of(&[33], 0));
        let operation = audio_operation(gpu, module, &inputs);
        let stream = Stream::legacy_default(&gpu.gpu);
        let tensors = audio_tensors::Inputs::upload(&gpu.gpu, &inputs);
        let bytes = operation.plan().workspace().bytes();
        let outputs = audio_tensors::Outputs::new(&gpu.gpu, operation.plan().shape(), bytes);
        operation.run(&stream, &tensors.views(), &mut outputs.views(), &mut outputs.workspace()).unwrap();
        stream.synchronize().unwrap();
        let expected = audio_backward(&gpu.gpu, module, &inputs);
        assert!(audio_tensors::bits(&outputs.gradients()) == audio_tensors::bits(&expected));
    });
}

#[test]
fn data_on_another_gpu_is_named_and_a_run_beside_its_context_is_right() {
    on_gpu(|gpu| {
        if Gpu::count().unwrap() < 2 {
            return skip("api::data_on_another_gpu_is_named_and_a_run_beside_its_context_is_right", "one GPU only");
        }
        let other = Gpu::open(1).unwrap();
        let inputs = audio_of(6, 2, cu_seqlens_of(&[20, 9], 0));
        let module = gpu.modules[0];
        let operation = audio_operation(gpu, module, &inputs);
        let stream = Stream::new(&gpu.gpu).unwrap();
        let (here, there) =
            (audio_tensors::Inputs::upload(&gpu.gpu, &inputs), audio_tensors::Inputs::upload(&other, &inputs));
        let bytes = operation.plan().workspace().bytes();
        let outputs = audio_tensors::Outputs::new(&gpu.gpu, operation.plan().shape(), bytes);
        for claimed in [0, 1] {
            let mut views = here.views();
            let view = there.views().key_states;
            // SAFETY: it is refused: nothing reads it.
            views.key_states =
                unsafe { TensorView::foreign(view.address(), view.dtype(), view.shape(), view.strides(), claimed) };
            let result = operation.run(&stream, &views, &mut outputs.views(), &mut outputs.workspace());
            assert!(
                matches!(
                    &result,
                    Err(Error::Gpu(GpuError::WrongDevice { tensor, tensor_device: 1, plan_device: 0 })) if tensor == "key_states"
                ),
                "{result:?}"
            );
        }
        let _current = other.make_current().unwrap();
        operation.run(&stream, &here.views(), &mut outputs.views(), &mut outputs.workspace()).unwrap();
        stream.synchronize().unwrap();
        let expected = audio_backward(&gpu.gpu, module, &inputs);
        assert!(audio_tensors::bits(&outputs.gradients()) == audio_tensors::bits(&expected));
        // And all of it on the other GPU.
        let found = audio_backward(&other, module, &inputs);
        assert!(audio_tensors::bits(&found) == audio_tensors::bits(&expected));
    });
}
