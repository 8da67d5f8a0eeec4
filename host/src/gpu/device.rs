//! GPUs of this machine: finding one, its properties, its modules.

use std::sync::{Arc, Mutex, PoisonError};

use cust::context::Context;
use cust::device::{Device, DeviceAttribute};

use super::GpuError;
use super::context::{CurrentContext, preserving_current};
use super::driver::{self, check, check_cust};
use super::module::{self, LoadedModule, ModuleKind};

/// What a GPU is and has.
#[derive(Clone, Debug)]
pub struct DeviceProperties {
    /// Position among the GPUs that the driver sees.
    pub index: usize,
    /// Name of the product.
    pub name: String,
    /// Compute capability (major, minor).
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub num_sms: u32,
    /// Size of the L2 cache.
    pub l2_bytes: usize,
    /// Most shared memory that a block may have, static and dynamic.
    pub max_shared_bytes: usize,
    /// Most threads that a block may have.
    pub max_threads: u32,
    /// Size of the device memory.
    pub total_memory_bytes: usize,
}

/// An open GPU: its primary context, retained, and the modules loaded into it. Clones share both.
#[derive(Clone, Debug)]
pub struct Gpu(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    properties: DeviceProperties,
    modules: [Mutex<Option<Arc<LoadedModule>>>; 2],
    context: Context,
}

impl Gpu {
    /// How many GPUs the driver sees; they are indexed from 0.
    ///
    /// # Errors
    /// [`GpuError::NoDriver`], or [`GpuError::Driver`] if the driver does not start.
    pub fn count() -> Result<usize, GpuError> {
        load_driver()?;
        // SAFETY: may be called at any time, and again. `cust::init` would lose the codes of newer drivers.
        match unsafe { driver::cuInit(0) } {
            driver::ERROR_NO_DEVICE => return Ok(0),
            status => check("cuInit", status)?,
        }
        let mut count = 0;
        // SAFETY: the driver stores a number in the place passed.
        check("cuDeviceGetCount", unsafe { driver::cuDeviceGetCount(&mut count) })?;
        Ok(count.try_into().unwrap_or(0))
    }

    /// Opens GPU `index`. The context that is current on this thread stays current.
    ///
    /// # Errors
    /// [`GpuError::NoDriver`], [`GpuError::NoDevice`], or [`GpuError::Driver`] if the GPU does not start.
    pub fn open(index: usize) -> Result<Gpu, GpuError> {
        let count = Gpu::count()?;
        let ordinal = u32::try_from(index).ok().filter(|_| index < count).ok_or(GpuError::NoDevice { index, count })?;
        let device = check_cust("cuDeviceGet", Device::get_device(ordinal))?;
        let context = preserving_current(|| check_cust("cuDevicePrimaryCtxRetain", Context::new(device)))?;
        let properties = read_properties(index, device)?;
        Ok(Gpu(Arc::new(Shared { properties, modules: [Mutex::new(None), Mutex::new(None)], context })))
    }

    /// What this GPU is and has.
    pub fn properties(&self) -> &DeviceProperties {
        &self.0.properties
    }

    /// Position among the GPUs that the driver sees.
    pub fn index(&self) -> usize {
        self.0.properties.index
    }

    /// Makes the GPU's primary context current on this thread until the result is dropped. The methods of this library do so
    /// themselves; this is for callers that also call the driver.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn make_current(&self) -> Result<CurrentContext, GpuError> {
        CurrentContext::push(self.0.context.as_raw())
    }

    /// The fastest module that this GPU can run: Hopper on compute capability 9.0 if this build carries it, else portable.
    ///
    /// # Errors
    /// [`GpuError::ComputeCapability`] below 8.0; [`GpuError::PtxMissing`] if this build carries no module for this GPU.
    pub fn best_module(&self) -> Result<ModuleKind, GpuError> {
        module::best_for(self.properties(), |kind| kind.description().ptx.is_some())
    }

    /// The module `kind`, compiled by the driver at the first call for it.
    ///
    /// # Errors
    /// As [`Gpu::kernel`], but for kernels.
    pub(super) fn module(&self, kind: ModuleKind) -> Result<Arc<LoadedModule>, GpuError> {
        // A panic of another thread leaves the slot as it was: empty or loaded.
        let mut slot = self.0.modules[kind as usize].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = &*slot {
            return Ok(module.clone());
        }
        let _current = self.make_current()?;
        let module = Arc::new(LoadedModule::load(kind, self.properties())?);
        Ok(slot.insert(module).clone())
    }

    /// Compiles and loads a module unless it is loaded already, as the first kernel looked up in it would.
    ///
    /// # Errors
    /// [`GpuError::ComputeCapability`], [`GpuError::PtxMissing`], [`GpuError::PtxRejected`] or [`GpuError::Driver`].
    pub fn load(&self, kind: ModuleKind) -> Result<(), GpuError> {
        self.module(kind).map(|_| ())
    }

    /// Waits for all work on this GPU's primary context, this library's and others'.
    ///
    /// # Errors
    /// [`GpuError::Driver`], also for a fault of work enqueued earlier.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let _current = self.make_current()?;
        // SAFETY: waits for the current context, which is ours.
        check("cuCtxSynchronize", unsafe { driver::cuCtxSynchronize() })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Modules are unloaded from the current context, and not while their kernels run. Failures have nobody to go to.
        let current = CurrentContext::push(self.context.as_raw());
        if current.is_ok()
            && self.modules.iter_mut().any(|module| module.get_mut().is_ok_and(|module| module.is_some()))
        {
            // SAFETY: waits for the current context, which is ours.
            unsafe { driver::cuCtxSynchronize() };
        }
        self.modules = [Mutex::new(None), Mutex::new(None)];
    }
}

fn load_driver() -> Result<(), GpuError> {
    cuda_driver_shim::load().map_err(|error| GpuError::NoDriver { cause: error.to_string() })
}

fn read_properties(index: usize, device: Device) -> Result<DeviceProperties, GpuError> {
    let attribute = |attribute| -> Result<u32, GpuError> {
        let value = check_cust("cuDeviceGetAttribute", device.get_attribute(attribute))?;
        Ok(value.try_into().unwrap_or(0))
    };
    let mut max_shared_bytes = 0;
    // SAFETY: the driver stores a number in the place passed. `cust` does not know this attribute.
    check("cuDeviceGetAttribute", unsafe {
        driver::cuDeviceGetAttribute(
            &mut max_shared_bytes,
            driver::DEVICE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            device.as_raw(),
        )
    })?;
    Ok(DeviceProperties {
        index,
        name: check_cust("cuDeviceGetName", device.name())?,
        compute_capability: (
            attribute(DeviceAttribute::ComputeCapabilityMajor)?,
            attribute(DeviceAttribute::ComputeCapabilityMinor)?,
        ),
        num_sms: attribute(DeviceAttribute::MultiprocessorCount)?,
        l2_bytes: attribute(DeviceAttribute::L2CacheSize)? as usize,
        max_shared_bytes: max_shared_bytes.try_into().unwrap_or(0),
        max_threads: attribute(DeviceAttribute::MaxThreadsPerBlock)?,
        total_memory_bytes: check_cust("cuDeviceTotalMem", device.total_memory())?,
    })
}

/// The newest CUDA version (major, minor) that the driver supports.
///
/// # Errors
/// [`GpuError::NoDriver`], [`GpuError::Driver`].
pub fn driver_version() -> Result<(u32, u32), GpuError> {
    load_driver()?;
    let mut version = 0;
    // SAFETY: the driver stores a number in the place passed; it needs no initialisation.
    check("cuDriverGetVersion", unsafe { driver::cuDriverGetVersion(&mut version) })?;
    let version = u32::try_from(version).unwrap_or(0);
    Ok((version / 1000, version % 1000 / 10))
}

/// The functions that this library may call and the loaded driver is too old to have; empty before a driver is loaded.
pub fn missing_driver_functions() -> Vec<&'static str> {
    let missing = cuda_driver_shim::missing_functions().filter_map(|name| name.to_str().ok());
    missing.filter(|name| driver::NEWER_THAN_CUDA_11_0.contains(name)).collect()
}

/// The newest PTX version that a driver of the given CUDA version compiles, from NVIDIA's list; for versions past its end, the last of it.
pub fn newest_ptx_isa((major, minor): (u32, u32)) -> (u32, u32) {
    match (major, minor) {
        (11, minor) => (7, minor.min(8)),
        (12, minor @ ..=5) => (8, minor),
        (12, 6) => (8, 5),
        (12, minor) => (8, minor.min(9) - 1),
        (13, minor) => (9, minor.min(1)),
        (14.., _) => (9, 1),
        _ => (6, 5),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_everything_is_a_typed_error() {
        let results = [Gpu::count().map(|_| ()), Gpu::open(0).map(|_| ()), driver_version().map(|_| ())];
        if results[0].is_ok() {
            return;
        }
        for result in results {
            let error = result.unwrap_err();
            assert!(matches!(error, GpuError::NoDriver { .. }), "{error}");
            assert!(error.to_string().starts_with("no CUDA driver found (libcuda.so.1: "), "{error}");
        }
    }

    #[test]
    fn an_index_past_the_last_gpu_is_named() {
        if let Ok(count) = Gpu::count() {
            let error = Gpu::open(count).unwrap_err().to_string();
            assert!(error.starts_with(&format!("there is no GPU {count}: the driver sees {count}")), "{error}");
        }
    }

    #[test]
    fn ptx_versions_follow_the_cuda_versions() {
        let pairs = [
            ((11, 0), (7, 0)),
            ((11, 8), (7, 8)),
            ((12, 0), (8, 0)),
            ((12, 4), (8, 4)),
            ((12, 5), (8, 5)),
            ((12, 6), (8, 5)),
        ];
        let newer = [
            ((12, 7), (8, 6)),
            ((12, 8), (8, 7)),
            ((12, 9), (8, 8)),
            ((13, 0), (9, 0)),
            ((13, 1), (9, 1)),
            ((15, 2), (9, 1)),
        ];
        for (cuda, isa) in pairs.into_iter().chain(newer) {
            assert_eq!(newest_ptx_isa(cuda), isa, "CUDA {cuda:?}");
        }
    }
}
