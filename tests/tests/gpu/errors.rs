//! Launches that cannot succeed, and faults of the device.

use attn_backward::gpu::{Gpu, GpuError, Launch, LaunchConfig, ModuleKind, Stream};
use attn_backward::{Error, Target, Workspace, audio, cross};
use attn_backward_kernels::params::{ColumnSumsParams, PartialSum, SumPartialsParams};
use attn_backward_tests::device::{on_each_module, on_gpu};
use attn_backward_tests::examples::audio_of;
use attn_backward_tests::strategies::cu_seqlens_of;

use crate::guarded::audio_tensors;
use crate::{child, converting};

const CONFIG: LaunchConfig = LaunchConfig { grid: [1, 1, 1], block: 32, shared_bytes: 0, launch: Launch::Normal };

#[test]
fn launches_that_cannot_succeed_name_kernel_and_configuration() {
    on_each_module(|gpu, module| {
        let kernel = gpu.gpu.kernel(module, "sum_partials").unwrap();
        let stream = Stream::new(&gpu.gpu).unwrap();
        let sum = PartialSum {
            partials: std::ptr::null(),
            out: std::ptr::null_mut(),
            rows: 0,
            pitch: 0,
            columns: 0,
            first_block: 0,
        };
        let params = SumPartialsParams { sums: [sum; 4] };
        let refused = |config: LaunchConfig| {
            // SAFETY: it is refused: nothing runs.
            let error = unsafe { kernel.launch(&stream, &config, &params) }.unwrap_err();
            let text = error.to_string();
            assert!(text.contains("kernel sum_partials") && !text.contains('\n'), "{text}");
            error
        };
        let available = kernel.attributes().max_shared_bytes;
        let error = refused(LaunchConfig { shared_bytes: available as u32 + 1, ..CONFIG });
        assert!(matches!(error, GpuError::SharedMemory { needed, .. } if needed > available), "{error}");
        for block in [0, kernel.attributes().max_threads + 1, 1025] {
            let error = refused(LaunchConfig { block, ..CONFIG });
            assert!(matches!(error, GpuError::Threads { needed, .. } if needed == block), "{error}");
        }
        for grid in [[0, 1, 1], [1, 65_536, 1]] {
            let error = refused(LaunchConfig { grid, ..CONFIG });
            assert!(matches!(error, GpuError::Grid { grid: found, .. } if found == grid), "{error}");
        }
        let other = ColumnSumsParams {
            x: std::ptr::null(),
            partials: std::ptr::null_mut(),
            row_limit: std::ptr::null(),
            rows: 0,
            columns: 0,
            rows_per_block: 1,
            reserved: 0,
        };
        // SAFETY: as above.
        let error = unsafe { kernel.launch(&stream, &CONFIG, &other) }.unwrap_err();
        let sizes = (size_of::<SumPartialsParams>(), size_of::<ColumnSumsParams>());
        assert!(
            matches!(error, GpuError::ParameterSize { expected, found, .. } if (expected, found) == sizes),
            "{error}"
        );
        stream.synchronize().unwrap();
    });
}

#[test]
fn a_kernel_that_is_not_there_is_named() {
    on_each_module(|gpu, module| {
        let error = gpu.gpu.kernel(module, "no_such_kernel").unwrap_err();
        assert_eq!(error.to_string(), format!("the {module} module has no kernel no_such_kernel"));
    });
}

#[test]
fn every_kernel_keeps_its_values_in_registers() {
    on_each_module(|gpu, module| {
        for entry in module.description().entries {
            let kernel = gpu.gpu.kernel(module, entry.name).unwrap();
            kernel.check_no_local_memory().unwrap();
            assert!(kernel.attributes().max_threads == entry.max_threads, "{}: registers limit its block", entry.name);
        }
    });
}

#[test]
fn a_plan_whose_blocks_wait_for_more_sms_than_there_are_is_refused() {
    on_gpu(|gpu| {
        if !gpu.modules.contains(&ModuleKind::Hopper) {
            return;
        }
        let num_sms = gpu.gpu.properties().num_sms as usize;
        let target = Target { num_sms: num_sms + 2, ..gpu.target(ModuleKind::Hopper) };
        // More SMs convert beside the products of more tokens.
        let shape = cross::Shape { seq_len_dec: 600, ..converting::shape() };
        let plan = cross::Plan::new(&shape, cross::Precision::Fast, &target).unwrap();
        assert!(plan.gemm().converts(), "{plan}");
        let error = cross::Backward::new(&gpu.gpu, plan).unwrap_err();
        let Error::Gpu(GpuError::CooperativeGrid { blocks, available, .. }) = error else { panic!("{error}") };
        assert_eq!((blocks, available), (num_sms + 2, num_sms));
    });
}

#[test]
fn memory_that_the_gpu_does_not_have_is_named() {
    on_gpu(|gpu| {
        let bytes = 2 * gpu.gpu.properties().total_memory_bytes as u64;
        let error = Workspace::allocate(&gpu.gpu, bytes).unwrap_err();
        assert!(matches!(&error, Error::Gpu(GpuError::OutOfMemory { what, .. }) if what == "the workspace"), "{error}");
    });
}

#[test]
fn a_fault_of_the_device_is_an_error_and_the_process_ends_normally() {
    on_each_module(|_, module| {
        let output = child::run(&format!("errors::child_faults_in_the_{module}_module"));
        let printed = child::printed(&output);
        assert!(output.status.success() && !printed.contains("panicked"), "{printed}");
        for line in ["reported: ", "a kernel faulted", "everything is dropped"] {
            assert!(printed.contains(line), "no `{line}` in\n{printed}");
        }
    });
}

#[test]
fn child_faults_in_the_portable_module() {
    fault_in(ModuleKind::Portable);
}

#[test]
fn child_faults_in_the_hopper_module() {
    fault_in(ModuleKind::Hopper);
}

/// Lets a kernel write where nothing is allocated. The process can use the GPU no more after that.
fn fault_in(module: ModuleKind) {
    if !child::is_child() {
        return;
    }
    // Not the GPU of the other tests: this one is dropped.
    let gpu = Gpu::open(0).unwrap();
    let inputs = audio_of(1, 2, cu_seqlens_of(&[100, 200], 0));
    let shape = inputs.shape().unwrap();
    let plan = audio::Plan::new(&shape, &inputs.cu_seqlens, &Target::of(&gpu, module)).unwrap();
    let operation = audio::Backward::new(&gpu, plan).unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let tensors = audio_tensors::Inputs::upload(&gpu, &inputs);
    let outputs = audio_tensors::Outputs::new(&gpu, &shape, 0);
    // SAFETY: there is no such memory, which is what this is about: the fault ends this process's use of the GPU.
    let mut nowhere = unsafe { Workspace::foreign(1 << 16, operation.plan().workspace().bytes(), 0) };
    let mut run = || -> Result<(), Error> {
        operation.run(&stream, &tensors.views(), &mut outputs.views(), &mut nowhere)?;
        Ok(stream.synchronize()?)
    };
    println!("reported: {}", run().unwrap_err());
    println!("and again: {}", run().unwrap_err());
    println!("and by a new operation: {}", Stream::new(&gpu).map(|_| ()).unwrap_err());
    drop((operation, stream, tensors, outputs, gpu));
    println!("everything is dropped");
}
