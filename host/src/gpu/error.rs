//! What can go wrong between this library and a GPU.

use super::driver;

/// Why the GPU, its driver or a kernel could not be used: one line each, saying what to do where that is known.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The driver's library could not be opened.
    #[error("no CUDA driver found ({cause}); install NVIDIA's driver, or choose the cpu device")]
    NoDriver {
        /// What the dynamic loader said.
        cause: String,
    },
    /// The GPU asked for is not there.
    #[error("there is no GPU {index}: the driver sees {count} (nvidia-smi and CUDA_VISIBLE_DEVICES tell which)")]
    NoDevice {
        /// Index asked for.
        index: usize,
        /// GPUs that the driver sees.
        count: usize,
    },
    /// The GPU cannot run the kernels of a module.
    #[error("{device} has compute capability {}.{}, and the {module} kernels need {needed}", .found.0, .found.1)]
    ComputeCapability {
        /// Name of the GPU.
        device: String,
        /// Its compute capability (major, minor).
        found: (u32, u32),
        /// Name of the module.
        module: &'static str,
        /// What the module needs.
        needed: &'static str,
    },
    /// A call of the driver failed.
    #[error("{call}{} failed: {name} ({code}){}", in_kernel(.kernel), advice(*.code))]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The kernel concerned, where there is one. A fault inside a kernel surfaces at a later call, which does not know it.
        kernel: Option<&'static str>,
        /// The driver's status (`CUresult`).
        code: u32,
        /// The status's name, such as `CUDA_ERROR_ILLEGAL_ADDRESS`.
        name: String,
    },
    /// The library was built without this PTX module.
    #[error("the {module} kernels are missing: {advice}")]
    PtxMissing {
        /// Name of the module.
        module: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// The driver refused a PTX module.
    #[error(transparent)]
    PtxRejected(Box<PtxRejection>),
    /// A module has no kernel of this name.
    #[error("the {module} module has no kernel {kernel}")]
    KernelMissing {
        /// Name of the kernel.
        kernel: String,
        /// Name of the module.
        module: &'static str,
    },
    /// A kernel was launched with a parameter struct of another size than its PTX declares.
    #[error(
        "kernel {kernel} takes {expected} bytes of parameters, found {found}: library and PTX differ, run `cargo xtask build-ptx`"
    )]
    ParameterSize {
        /// Name of the kernel.
        kernel: &'static str,
        /// Bytes that the PTX entry declares.
        expected: usize,
        /// Bytes of the struct.
        found: usize,
    },
    /// A launch's grid is empty or too large.
    #[error("kernel {kernel}: grid {grid:?} has an extent outside 1..={limits:?}")]
    Grid {
        /// Name of the kernel.
        kernel: &'static str,
        /// The grid.
        grid: [u32; 3],
        /// Largest extents.
        limits: [u32; 3],
    },
    /// The blocks of a launch are not whole clusters.
    #[error("kernel {kernel}: {blocks} blocks are not whole clusters of {cluster_size}")]
    ClusterGrid {
        /// Name of the kernel.
        kernel: &'static str,
        /// Blocks along x.
        blocks: u32,
        /// Blocks of a cluster.
        cluster_size: u32,
    },
    /// The blocks of a grid wait for each other, and the GPU cannot hold all of them at once.
    #[error(
        "kernel {kernel}: {blocks} blocks wait for each other, and this GPU holds {available} at once; plan for its number of SMs"
    )]
    CooperativeGrid {
        /// Name of the kernel.
        kernel: &'static str,
        /// Blocks of the grid.
        blocks: usize,
        /// Blocks that the GPU can hold.
        available: usize,
    },
    /// A block needs more shared memory than the GPU has.
    #[error("kernel {kernel} needs {needed} bytes of shared memory per block, this GPU allows {available}")]
    SharedMemory {
        /// Name of the kernel.
        kernel: &'static str,
        /// Bytes needed, static and dynamic.
        needed: usize,
        /// Bytes a block may have.
        available: usize,
    },
    /// A block has no thread, or more than the kernel can have.
    #[error("kernel {kernel} cannot run with {needed} threads per block: from 1 to {available} are possible")]
    Threads {
        /// Name of the kernel.
        kernel: &'static str,
        /// Threads asked for.
        needed: u32,
        /// Threads a block may have.
        available: u32,
    },
    /// The driver's compiler put registers of a kernel into memory.
    #[error("kernel {kernel} uses {bytes} bytes of local memory per thread on this GPU, expected none")]
    LocalMemory {
        /// Name of the kernel.
        kernel: &'static str,
        /// Bytes per thread.
        bytes: usize,
    },
    /// A tensor lies on another GPU than the one that would work on it.
    #[error("{tensor} lies on GPU {tensor_device}, the work is planned for GPU {plan_device}: move one of them")]
    WrongDevice {
        /// Public name of the tensor.
        tensor: String,
        /// Index of the tensor's GPU.
        tensor_device: usize,
        /// Index of the GPU that would work on it.
        plan_device: usize,
    },
    /// The driver refused a tensor map.
    #[error("{tensor}: no tensor map for {layout} ({}): {TENSOR_MAP_RULE}", driver::error_name(*.code))]
    TensorMap {
        /// Name of the tensor.
        tensor: String,
        /// What was asked for.
        layout: String,
        /// The driver's status (`CUresult`).
        code: u32,
    },
    /// The GPU's memory is exhausted.
    #[error("out of GPU memory: {what} needs {bytes} bytes, {free} are free")]
    OutOfMemory {
        /// What the memory is for.
        what: String,
        /// Bytes asked for.
        bytes: usize,
        /// Bytes that were free.
        free: usize,
    },
    /// A copy's two sides differ in length.
    #[error("cannot copy {source_len} elements into {destination_len}")]
    CopyLength {
        /// Elements of the source.
        source_len: usize,
        /// Elements of the destination.
        destination_len: usize,
    },
}

/// How the driver refused a PTX module.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the {module} kernels are built for {built_for}, which {found} refuses ({name}{}): {hint}", first_line(.log))]
pub struct PtxRejection {
    /// Name of the module.
    pub module: &'static str,
    /// Target and PTX version of the module.
    pub built_for: String,
    /// GPU and driver that refused it.
    pub found: String,
    /// Name of the driver's status.
    pub name: String,
    /// Everything that the driver's PTX compiler printed.
    pub log: String,
    /// What to do.
    pub hint: String,
}

const TENSOR_MAP_RULE: &str = "it needs a driver of CUDA 12 or newer, 16-byte aligned address and strides, box extents up to 256, box rows up to 128 bytes";

fn in_kernel(kernel: &Option<&'static str>) -> String {
    kernel.map_or(String::new(), |kernel| format!(" of kernel {kernel}"))
}

/// The first line of a compiler's log that holds something, as an appendix to a message.
fn first_line(log: &str) -> String {
    log.lines().map(str::trim).find(|line| !line.is_empty()).map_or(String::new(), |line| format!(": {line}"))
}

/// What to do about a driver status, as an appendix to a message.
fn advice(code: u32) -> &'static str {
    match code {
        34 => "; the library found is a stub of the CUDA toolkit, not a driver",
        46 => "; another process uses this GPU exclusively",
        500 => "; the driver lacks this function: update it",
        700 | 702 | 710 | 714..=719 => {
            "; a kernel faulted, and this process can use the GPU no more: start a new one (compute-sanitizer finds the fault)"
        }
        720 => "; fewer SMs are free to this process than the plan is for (MPS can limit them)",
        802 => "; NVIDIA's fabric manager or driver is still starting",
        803 => "; the driver's library and its kernel module are of different versions: reboot",
        804 => "; the CUDA compatibility package does not support this GPU: use the driver's own libcuda",
        900..=908 => "; the stream is being captured into a graph, which this work does not allow",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<GpuError> {
        vec![
            GpuError::NoDriver { cause: "libcuda.so.1: cannot open shared object file".into() },
            GpuError::NoDevice { index: 3, count: 1 },
            GpuError::ComputeCapability {
                device: "NVIDIA T4".into(),
                found: (7, 5),
                module: "portable",
                needed: "at least 8.0",
            },
            driver_error(Some("gemm"), 1),
            GpuError::PtxMissing { module: "hopper", advice: "run `cargo xtask build-ptx`" },
            rejected("\n  ptxas error: Unsupported .version 9.9\nmore\n"),
            GpuError::KernelMissing { kernel: "gemm".into(), module: "hopper" },
            GpuError::ParameterSize { kernel: "gemm", expected: 648, found: 640 },
            GpuError::Grid { kernel: "gemm", grid: [0, 1, 1], limits: [7, 7, 7] },
            GpuError::ClusterGrid { kernel: "gemm", blocks: 131, cluster_size: 2 },
            GpuError::CooperativeGrid { kernel: "gemm", blocks: 132, available: 114 },
            GpuError::SharedMemory { kernel: "gemm", needed: 231_000, available: 101_376 },
            GpuError::Threads { kernel: "gemm", needed: 512, available: 256 },
            GpuError::LocalMemory { kernel: "gemm", bytes: 16 },
            GpuError::WrongDevice { tensor: "q_weight".into(), tensor_device: 1, plan_device: 0 },
            GpuError::TensorMap { tensor: "q_weight".into(), layout: "bf16 [512, 256]".into(), code: 1 },
            GpuError::OutOfMemory { what: "workspace".into(), bytes: 1 << 40, free: 7 },
            GpuError::CopyLength { source_len: 3, destination_len: 4 },
        ]
    }

    fn driver_error(kernel: Option<&'static str>, code: u32) -> GpuError {
        GpuError::Driver { call: "cuLaunchKernel", kernel, code, name: "CUDA_ERROR_SOMETHING".into() }
    }

    fn rejected(log: &str) -> GpuError {
        GpuError::PtxRejected(Box::new(PtxRejection {
            module: "portable",
            built_for: "sm_80, PTX 9.9".into(),
            found: "a driver of CUDA 12.4".into(),
            name: "CUDA_ERROR_UNSUPPORTED_PTX_VERSION".into(),
            log: log.into(),
            hint: "update the driver".into(),
        }))
    }

    #[test]
    fn every_message_is_one_line() {
        for error in all() {
            let text = error.to_string();
            assert!(!text.contains('\n') && text.len() > 20, "{text}");
        }
    }

    #[test]
    fn driver_errors_name_call_kernel_status_and_remedy() {
        assert_eq!(
            driver_error(Some("gemm"), 1).to_string(),
            "cuLaunchKernel of kernel gemm failed: CUDA_ERROR_SOMETHING (1)"
        );
        assert!(driver_error(None, 700).to_string().contains("(700); a kernel faulted"));
        assert!(driver_error(None, 500).to_string().ends_with("update it"));
    }

    #[test]
    fn launch_errors_carry_kernel_need_and_limit() {
        let text = GpuError::SharedMemory { kernel: "gemm", needed: 231_000, available: 101_376 }.to_string();
        assert!(["gemm", "231000", "101376"].iter().all(|part| text.contains(part)), "{text}");
        let text = GpuError::Threads { kernel: "gemm", needed: 512, available: 256 }.to_string();
        assert!(["gemm", "512", "256"].iter().all(|part| text.contains(part)), "{text}");
        let text = GpuError::CooperativeGrid { kernel: "gemm", blocks: 132, available: 114 }.to_string();
        assert!(["gemm", "132", "114"].iter().all(|part| text.contains(part)), "{text}");
    }

    #[test]
    fn refused_ptx_quotes_the_compiler() {
        assert_eq!(
            rejected("\n  ptxas error: bad\nmore\n").to_string(),
            "the portable kernels are built for sm_80, PTX 9.9, which a driver of CUDA 12.4 refuses \
             (CUDA_ERROR_UNSUPPORTED_PTX_VERSION: ptxas error: bad): update the driver"
        );
        assert!(rejected("").to_string().contains("(CUDA_ERROR_UNSUPPORTED_PTX_VERSION):"));
    }
}
