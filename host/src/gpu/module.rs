//! PTX modules: which one a GPU runs, and loading it through the driver's compiler.

use std::ffi::{CString, c_void};
use std::fmt;
use std::ptr;

use super::driver::{self, Status, check_cust};
use super::{DeviceProperties, GpuError, PtxRejection, driver_version, newest_ptx_isa, ptx};

/// The PTX modules of the kernel crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleKind {
    /// For every NVIDIA GPU since Ampere (compute capability 8.0).
    Portable = 0,
    /// For compute capability 9.0: all of the portable kernels and the wgmma ones.
    Hopper = 1,
}

impl ModuleKind {
    /// The module as this build carries it.
    pub fn description(self) -> &'static ptx::Module {
        match self {
            ModuleKind::Portable => &ptx::PORTABLE,
            ModuleKind::Hopper => &ptx::HOPPER,
        }
    }

    /// [`GpuError::ComputeCapability`] if a GPU with `properties` cannot run it.
    fn check_device(self, properties: &DeviceProperties) -> Result<(), GpuError> {
        let found = properties.compute_capability;
        let (runs, needed) = match self {
            ModuleKind::Portable => (found >= (8, 0), "at least 8.0"),
            // sm_90a code is for that architecture alone.
            ModuleKind::Hopper => (found == (9, 0), "exactly 9.0"),
        };
        if runs {
            return Ok(());
        }
        let module = self.description().name;
        Err(GpuError::ComputeCapability { device: properties.name.clone(), found, module, needed })
    }
}

impl fmt::Display for ModuleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.description().name)
    }
}

/// The fastest module for a GPU with `properties` among those that are `built`.
pub(super) fn best_for(
    properties: &DeviceProperties,
    built: impl Fn(ModuleKind) -> bool,
) -> Result<ModuleKind, GpuError> {
    if built(ModuleKind::Hopper) && ModuleKind::Hopper.check_device(properties).is_ok() {
        return Ok(ModuleKind::Hopper);
    }
    ModuleKind::Portable.check_device(properties)?;
    if !built(ModuleKind::Portable) {
        return Err(GpuError::PtxMissing { module: ModuleKind::Portable.description().name, advice: ptx::MISSING });
    }
    Ok(ModuleKind::Portable)
}

/// A module in the memory of a GPU.
#[derive(Debug)]
pub(super) struct LoadedModule {
    pub(super) module: cust::module::Module,
    pub(super) description: &'static ptx::Module,
}

impl LoadedModule {
    /// Compiles and loads `kind` into the current context, that of a GPU with `properties`.
    pub(super) fn load(kind: ModuleKind, properties: &DeviceProperties) -> Result<Self, GpuError> {
        kind.check_device(properties)?;
        let description = kind.description();
        let missing = GpuError::PtxMissing { module: description.name, advice: ptx::MISSING };
        let text = description.ptx.ok_or(missing)?;
        let module = load_ptx(description.name, text, properties)?;
        Ok(LoadedModule { module, description })
    }
}

fn load_ptx(name: &'static str, text: &str, properties: &DeviceProperties) -> Result<cust::module::Module, GpuError> {
    let rejected = |status: Status, log: String| {
        let driver = driver_version().unwrap_or((0, 0));
        rejection(name, text, properties, driver, status, log)
    };
    let Ok(image) = CString::new(text) else {
        return Err(rejected(driver::ERROR_INVALID_IMAGE, "the text holds a NUL character".into()));
    };
    cust::module::Module::from_ptx_cstr(&image, &[]).or_else(|error| match compile_for_log(&image) {
        (status, log) if hint(status).is_some() => Err(rejected(status, log)),
        _ => check_cust("cuModuleLoadDataEx", Err(error)),
    })
}

/// Compiles a module that was refused once more, for the true status and the compiler's log, neither of which `cust` returns.
fn compile_for_log(image: &CString) -> (Status, String) {
    const LOG_BYTES: usize = 8192;
    let mut log = vec![0u8; LOG_BYTES];
    let mut options = [driver::JIT_ERROR_LOG_BUFFER, driver::JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // The driver takes options by value: the size is passed as if it were a pointer.
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(LOG_BYTES)];
    let mut module = ptr::null_mut();
    // SAFETY: the image ends with a NUL, the options and their values are two each, and the log is as long as it says.
    let status = unsafe {
        let image = image.as_ptr().cast::<c_void>();
        driver::cuModuleLoadDataEx(&mut module, image, 2, options.as_mut_ptr(), values.as_mut_ptr())
    };
    if status == driver::SUCCESS {
        // SAFETY: loaded the line before, and used by nobody.
        unsafe { driver::cuModuleUnload(module) };
    }
    let text = log.split(|&byte| byte == 0).next().unwrap_or_default();
    (status, String::from_utf8_lossy(text).into_owned())
}

/// What to do about a status that means "this PTX, not with this driver and GPU"; `None` for other statuses.
fn hint(status: Status) -> Option<&'static str> {
    match status {
        driver::ERROR_UNSUPPORTED_PTX_VERSION => Some("update the driver"),
        driver::ERROR_INVALID_IMAGE | driver::ERROR_INVALID_PTX => {
            Some("the PTX is damaged or wrong: run `cargo xtask build-ptx`")
        }
        driver::ERROR_NO_BINARY_FOR_GPU => Some("it is for another GPU: use the portable kernels"),
        driver::ERROR_JIT_COMPILER_NOT_FOUND => {
            Some("the driver's PTX compiler is not installed (libnvidia-ptxjitcompiler.so.1): install the whole driver")
        }
        driver::ERROR_JIT_COMPILATION_DISABLED => Some("unset CUDA_DISABLE_PTX_JIT"),
        _ => None,
    }
}

/// The error for a module that the driver refused.
fn rejection(
    module: &'static str,
    text: &str,
    properties: &DeviceProperties,
    driver: (u32, u32),
    status: Status,
    log: String,
) -> GpuError {
    let directive = |name: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name)).unwrap_or("an unknown version");
        line.trim().to_owned()
    };
    let (target, version) = (directive(".target"), directive(".version"));
    let (cuda, isa) = (format!("CUDA {}.{}", driver.0, driver.1), newest_ptx_isa(driver));
    let mut hint = hint(status).unwrap_or_default().to_owned();
    if status == driver::ERROR_UNSUPPORTED_PTX_VERSION {
        let supported = format!("PTX {version} is newer than a driver of {cuda} supports (PTX {}.{})", isa.0, isa.1);
        hint = format!("{supported}: {hint}");
    }
    let (major, minor) = properties.compute_capability;
    GpuError::PtxRejected(Box::new(PtxRejection {
        module,
        built_for: format!("{target}, PTX {version}"),
        found: format!("{} (compute capability {major}.{minor}, driver of {cuda})", properties.name),
        name: driver::error_name(status),
        log,
        hint,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(compute_capability: (u32, u32)) -> DeviceProperties {
        DeviceProperties {
            index: 0,
            name: "a GPU".into(),
            compute_capability,
            num_sms: 132,
            l2_bytes: 50 << 20,
            max_shared_bytes: 232_448,
            max_threads: 1024,
            total_memory_bytes: 1 << 37,
        }
    }

    #[test]
    fn hopper_gpus_get_the_hopper_module_and_others_the_portable_one() {
        let best = |compute_capability| best_for(&gpu(compute_capability), |_| true).unwrap();
        assert_eq!(best((9, 0)), ModuleKind::Hopper);
        for other in [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)] {
            assert_eq!(best(other), ModuleKind::Portable);
        }
        assert_eq!(best_for(&gpu((9, 0)), |kind| kind == ModuleKind::Portable).unwrap(), ModuleKind::Portable);
    }

    #[test]
    fn gpus_before_ampere_are_refused_by_name() {
        let error = best_for(&gpu((7, 5)), |_| true).unwrap_err().to_string();
        assert_eq!(error, "a GPU has compute capability 7.5, and the portable kernels need at least 8.0");
        let error = ModuleKind::Hopper.check_device(&gpu((8, 0))).unwrap_err().to_string();
        assert_eq!(error, "a GPU has compute capability 8.0, and the hopper kernels need exactly 9.0");
    }

    #[test]
    fn a_build_without_ptx_says_how_to_make_it() {
        let error = best_for(&gpu((9, 0)), |_| false).unwrap_err();
        assert!(matches!(error, GpuError::PtxMissing { module: "portable", .. }), "{error}");
    }

    #[test]
    fn ptx_newer_than_the_driver_says_so() {
        let text = "// comment\n.version 8.6\n.target sm_90a\n.address_size 64\n";
        let error =
            rejection("hopper", text, &gpu((9, 0)), (12, 2), driver::ERROR_UNSUPPORTED_PTX_VERSION, String::new());
        let text = error.to_string();
        assert!(
            text.starts_with("the hopper kernels are built for sm_90a, PTX 8.6, which a GPU (compute capability 9.0, "),
            "{text}"
        );
        assert!(
            text.ends_with("PTX 8.6 is newer than a driver of CUDA 12.2 supports (PTX 8.2): update the driver"),
            "{text}"
        );
    }

    #[test]
    fn damaged_ptx_is_told_from_ptx_that_is_too_new() {
        let text = ".version 7.0\n.target sm_80\n";
        let error =
            rejection("portable", text, &gpu((9, 0)), (12, 2), driver::ERROR_INVALID_PTX, "line 7: syntax".into());
        let text = error.to_string();
        assert!(text.contains(": line 7: syntax)") && text.ends_with("run `cargo xtask build-ptx`"), "{text}");
    }
}
