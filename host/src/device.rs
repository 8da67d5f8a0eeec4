//! Where an operation runs.
use std::fmt;
use std::str::FromStr;

use crate::Error;
use crate::gpu::{Gpu, ModuleKind};

/// A device by name, as options spell it: `cpu` or `cuda:N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// The host's processor.
    Cpu,
    /// CUDA device `N`.
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let cuda = |index: &str| index.parse().ok().map(DeviceName::Cuda);
        match name {
            "cpu" => Some(DeviceName::Cpu),
            "cuda" => Some(DeviceName::Cuda(0)),
            _ => name.strip_prefix("cuda:").and_then(cuda),
        }
        .ok_or_else(|| format!("`{name}` is not a device: expected cpu or cuda:N"))
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Cpu => f.write_str("cpu"),
            DeviceName::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// An opened device.
#[derive(Clone, Debug)]
pub enum Device {
    /// The CPU implementation.
    Cpu,
    /// A GPU, and the PTX module whose kernels run on it.
    Gpu {
        /// The device.
        gpu: Gpu,
        /// Which kernels.
        module: ModuleKind,
    },
}

impl Device {
    /// Opens a device by name; `module` `None` takes the best module for the GPU.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: a module for the CPU; [`Error::Gpu`]: no driver, no such device, compute capability below 8.0, or no PTX for `module`.
    pub fn open(name: DeviceName, module: Option<ModuleKind>) -> Result<Device, Error> {
        match name {
            DeviceName::Cpu => match module {
                None => Ok(Device::Cpu),
                Some(module) => Err(Error::Unsupported {
                    argument: "module",
                    value: module.to_string(),
                    supported: "kernel modules run on a GPU, not on the CPU".into(),
                }),
            },
            DeviceName::Cuda(index) => {
                let gpu = Gpu::open(index)?;
                let module = match module {
                    Some(module) => module,
                    None => gpu.best_module()?,
                };
                gpu.load(module)?;
                Ok(Device::Gpu { gpu, module })
            }
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Gpu { gpu, module } => {
                write!(f, "cuda:{} ({}, {module} module)", gpu.index(), gpu.properties().name)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_others_are_refused() {
        for name in ["cpu", "cuda:0", "cuda:3"] {
            assert_eq!(name.parse::<DeviceName>().unwrap().to_string(), name);
        }
        for name in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
            assert!(name.parse::<DeviceName>().unwrap_err().contains("expected cpu or cuda:N"));
        }
    }
}
