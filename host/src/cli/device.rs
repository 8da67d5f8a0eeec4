//! The options that choose a device, shared by the commands.
use attn_backward::gpu::{Gpu, ModuleKind};
use attn_backward::{Device, DeviceName, Error};
use clap::ValueEnum;

/// `--module`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Module {
    /// mma.sync kernels, any NVIDIA GPU since Ampere.
    Portable,
    /// wgmma kernels, compute capability 9.0.
    Hopper,
}

impl From<Module> for ModuleKind {
    fn from(module: Module) -> ModuleKind {
        match module {
            Module::Portable => ModuleKind::Portable,
            Module::Hopper => ModuleKind::Hopper,
        }
    }
}

/// The device named, or the first GPU if there is one, else the CPU (and a line on stderr that says why).
pub fn choose(name: Option<DeviceName>) -> DeviceName {
    name.unwrap_or_else(|| match Gpu::count() {
        Ok(1..) => DeviceName::Cuda(0),
        Ok(0) => {
            eprintln!("note: no CUDA device, running on the CPU");
            DeviceName::Cpu
        }
        Err(error) => {
            eprintln!("note: running on the CPU: {error}");
            DeviceName::Cpu
        }
    })
}

/// Opens the device that the options name; `None`s choose the best.
pub fn open(name: Option<DeviceName>, module: Option<Module>) -> Result<Device, Error> {
    Device::open(choose(name), module.map(Into::into))
}
