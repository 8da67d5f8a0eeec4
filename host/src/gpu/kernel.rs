//! Kernels, and launches that are checked before they reach the driver.

use std::ffi::c_void;
use std::ptr;

use cust::function::FunctionAttribute;
use cust::sys::CUfunction;

use super::driver::{self, LaunchAttribute, RawLaunchConfig, check_cust, check_kernel};
use super::{Gpu, GpuError, KernelParams, ModuleKind, Stream, ptx};

/// Largest extents of a grid, on every GPU that this library supports.
const GRID_LIMITS: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// When the blocks of a grid may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launch {
    /// Each (of a kernel with clusters: each cluster) as soon as there is room for it, in the order of their numbers. A block may wait for those before it and
    /// of its own cluster, not for others.
    Normal,
    /// As `Normal`, while the launch before still runs, once all of its blocks allow that or have ended: programmatic dependent launch. The kernel waits
    /// itself for what that launch does (`griddepcontrol.wait`). Compute capability 9.0, a driver of CUDA 11.8 or newer; captured into a graph, 12.3.
    Dependent,
    /// All together, when there is room for the whole grid: blocks may wait for each other, whatever runs on other streams. Needs a driver
    /// of CUDA 11.8 or newer; the driver refuses a grid that the GPU could never hold at once.
    Cooperative,
}

/// Sizes of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads per block, along x.
    pub block: u32,
    /// Dynamic shared memory per block.
    pub shared_bytes: u32,
    /// When the blocks may start.
    pub launch: Launch,
}

impl LaunchConfig {
    /// Whether `kernel` can run with these sizes.
    fn check(&self, kernel: &'static str, attributes: &KernelAttributes) -> Result<(), GpuError> {
        let grid = self.grid;
        if grid.iter().zip(GRID_LIMITS).any(|(&extent, limit)| extent == 0 || extent > limit) {
            return Err(GpuError::Grid { kernel, grid, limits: GRID_LIMITS });
        }
        let cluster_size = attributes.cluster_size;
        if !grid[0].is_multiple_of(cluster_size) {
            return Err(GpuError::ClusterGrid { kernel, blocks: grid[0], cluster_size });
        }
        if self.block == 0 || self.block > attributes.max_threads {
            return Err(GpuError::Threads { kernel, needed: self.block, available: attributes.max_threads });
        }
        let needed = attributes.static_shared_bytes + self.shared_bytes as usize;
        if needed > attributes.max_shared_bytes {
            return Err(GpuError::SharedMemory { kernel, needed, available: attributes.max_shared_bytes });
        }
        Ok(())
    }
}

/// What the driver's compiler made of a kernel, and what limits its launches on this GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelAttributes {
    /// Registers per thread.
    pub registers: u32,
    /// Local memory per thread: spilled registers and indexed arrays.
    pub local_bytes: usize,
    /// Shared memory per block that the kernel declares itself.
    pub static_shared_bytes: usize,
    /// Most threads that a block may have.
    pub max_threads: u32,
    /// Blocks of a cluster, along x; 1: it has no clusters.
    pub cluster_size: u32,
    /// Most shared memory that a block may have, static and dynamic.
    pub max_shared_bytes: usize,
}

/// A kernel of a module, ready to launch on one GPU.
#[derive(Clone, Debug)]
pub struct Kernel {
    function: CUfunction,
    entry: &'static ptx::Entry,
    attributes: KernelAttributes,
    /// Keeps the module loaded.
    gpu: Gpu,
}

// SAFETY: the handle is an address that any thread may pass to the driver, which synchronises itself.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Gpu {
    /// The kernel `name` of the module `kind`. The first kernel of a module makes the driver compile it, which can take seconds; the
    /// driver caches the result on disk.
    ///
    /// # Errors
    /// As [`Gpu::load`]; [`GpuError::KernelMissing`].
    pub fn kernel(&self, kind: ModuleKind, name: &str) -> Result<Kernel, GpuError> {
        let module = self.module(kind)?;
        let description = module.description;
        let missing = || GpuError::KernelMissing { kernel: name.into(), module: description.name };
        let entry = description.entries.iter().find(|entry| entry.name == name).ok_or_else(missing)?;

        let _current = self.make_current()?;
        let function = check_cust("cuModuleGetFunction", module.module.get_function(name))?;
        let attribute = |attribute| -> Result<u32, GpuError> {
            let value = check_cust("cuFuncGetAttribute", function.get_attribute(attribute))?;
            Ok(value.try_into().unwrap_or(0))
        };
        let attributes = KernelAttributes {
            registers: attribute(FunctionAttribute::NumRegisters)?,
            local_bytes: attribute(FunctionAttribute::LocalSizeBytes)? as usize,
            static_shared_bytes: attribute(FunctionAttribute::SharedMemorySizeBytes)? as usize,
            max_threads: attribute(FunctionAttribute::MaxThreadsPerBlock)?.min(entry.max_threads),
            cluster_size: entry.cluster_size,
            max_shared_bytes: self.properties().max_shared_bytes,
        };
        // Without this a block gets 48 KiB. It is a limit only: what a launch does not ask for stays L1 cache.
        let max_dynamic = attributes.max_shared_bytes.saturating_sub(attributes.static_shared_bytes);
        let (function, attribute) = (function.to_raw(), driver::FUNCTION_MAX_DYNAMIC_SHARED_BYTES);
        // SAFETY: the function was looked up in a module of the current context.
        let status =
            unsafe { driver::cuFuncSetAttribute(function, attribute, max_dynamic.try_into().unwrap_or(i32::MAX)) };
        check_kernel("cuFuncSetAttribute", Some(entry.name), status)?;
        Ok(Kernel { function, entry, attributes, gpu: self.clone() })
    }
}

impl Kernel {
    /// Name of the entry point.
    pub fn name(&self) -> &'static str {
        self.entry.name
    }

    /// Registers, memory and limits.
    pub fn attributes(&self) -> &KernelAttributes {
        &self.attributes
    }

    /// `Ok` if the driver's compiler kept all of the kernel's values in registers. It is a matter of speed, not of results.
    ///
    /// # Errors
    /// [`GpuError::LocalMemory`].
    pub fn check_no_local_memory(&self) -> Result<(), GpuError> {
        match self.attributes.local_bytes {
            0 => Ok(()),
            bytes => Err(GpuError::LocalMemory { kernel: self.name(), bytes }),
        }
    }

    /// Enqueues the kernel on `stream`; nothing waits.
    ///
    /// # Errors
    /// [`GpuError::ParameterSize`], [`GpuError::Grid`], [`GpuError::ClusterGrid`], [`GpuError::Threads`] or [`GpuError::SharedMemory`] before anything is enqueued;
    /// [`GpuError::Driver`].
    ///
    /// # Safety
    /// `params` meets the kernel's preconditions for this grid: every pointer in it is a device address whose memory, of the size that
    /// the kernel documents, stays allocated until the kernel has ended and is not written by other work meanwhile.
    pub unsafe fn launch<P: KernelParams>(
        &self,
        stream: &Stream,
        config: &LaunchConfig,
        params: &P,
    ) -> Result<(), GpuError> {
        let kernel = self.name();
        let (expected, found) = (self.entry.param_bytes, size_of::<P>());
        if expected != found {
            return Err(GpuError::ParameterSize { kernel, expected, found });
        }
        config.check(kernel, &self.attributes)?;

        let _current = self.gpu.make_current()?;
        let mut parameters = [ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let LaunchConfig { grid: [x, y, z], block, shared_bytes, launch } = *config;
        let (function, stream, parameters) = (self.function, stream.as_raw(), parameters.as_mut_ptr());
        let attribute = match launch {
            Launch::Normal => None,
            Launch::Dependent => Some(LaunchAttribute::programmatic_stream_serialization()),
            Launch::Cooperative => Some(LaunchAttribute::cooperative()),
        };
        if let Some(attribute) = attribute {
            let config = RawLaunchConfig {
                grid: config.grid,
                block: [block, 1, 1],
                shared_bytes,
                stream,
                attributes: &attribute,
                num_attributes: 1,
            };
            // SAFETY: the driver copies config, attribute and parameters, which are of the size that the kernel declares, before it
            // returns; the caller answers for what they point to.
            let status = unsafe { driver::cuLaunchKernelEx(&config, function, parameters, ptr::null_mut()) };
            check_kernel("cuLaunchKernelEx", Some(kernel), status)
        } else {
            // SAFETY: as above.
            let status = unsafe {
                driver::cuLaunchKernel(
                    function,
                    x,
                    y,
                    z,
                    block,
                    1,
                    1,
                    shared_bytes,
                    stream,
                    parameters,
                    ptr::null_mut(),
                )
            };
            check_kernel("cuLaunchKernel", Some(kernel), status)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTRIBUTES: KernelAttributes = KernelAttributes {
        registers: 128,
        local_bytes: 0,
        static_shared_bytes: 1024,
        max_threads: 256,
        cluster_size: 2,
        max_shared_bytes: 101_376,
    };
    const CONFIG: LaunchConfig =
        LaunchConfig { grid: [132, 1, 1], block: 256, shared_bytes: 100_352, launch: Launch::Normal };

    fn check(config: LaunchConfig) -> Result<(), GpuError> {
        config.check("gemm", &ATTRIBUTES)
    }

    #[test]
    fn a_launch_at_its_limits_is_accepted() {
        check(CONFIG).unwrap();
        let [x, y, z] = GRID_LIMITS;
        check(LaunchConfig { grid: [x - 1, y, z], ..CONFIG }).unwrap();
    }

    #[test]
    fn empty_and_oversized_grids_are_refused() {
        for grid in [[0, 1, 1], [2, 0, 1], [2, 1, 0], [2, 65_536, 1], [2, 1, 65_536], [1 << 31, 1, 1]] {
            let error = check(LaunchConfig { grid, ..CONFIG }).unwrap_err();
            assert!(matches!(error, GpuError::Grid { kernel: "gemm", grid: found, .. } if found == grid), "{error}");
        }
    }

    #[test]
    fn clusters_must_be_whole() {
        let error = check(LaunchConfig { grid: [131, 1, 1], ..CONFIG }).unwrap_err();
        assert!(matches!(error, GpuError::ClusterGrid { blocks: 131, cluster_size: 2, .. }), "{error}");
    }

    #[test]
    fn thread_counts_outside_the_kernels_range_are_refused() {
        for block in [0, 257] {
            let error = check(LaunchConfig { block, ..CONFIG }).unwrap_err();
            assert!(matches!(error, GpuError::Threads { needed, available: 256, .. } if needed == block), "{error}");
        }
    }

    #[test]
    fn static_and_dynamic_shared_memory_together_are_limited() {
        let error = check(LaunchConfig { shared_bytes: 100_353, ..CONFIG }).unwrap_err();
        assert!(matches!(error, GpuError::SharedMemory { needed: 101_377, available: 101_376, .. }), "{error}");
    }
}
