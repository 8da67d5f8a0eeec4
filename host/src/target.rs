//! What a plan needs to know of the machine that will run it; no GPU is asked.
use std::fmt;

use crate::gpu::{Gpu, ModuleKind};

/// A GPU as plans see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The kernels that will run.
    pub module: ModuleKind,
    /// Streaming multiprocessors.
    pub num_sms: usize,
    /// Most shared memory that a block may have, in bytes.
    pub max_shared_bytes: usize,
}

impl Target {
    /// An H200 (132 SMs) running `module`: for plans printed where there is no GPU.
    pub fn h200(module: ModuleKind) -> Target {
        Target { module, num_sms: 132, max_shared_bytes: 227 << 10 }
    }

    /// The target that `gpu` running `module` is.
    pub fn of(gpu: &Gpu, module: ModuleKind) -> Target {
        let properties = gpu.properties();
        Target { module, num_sms: properties.num_sms as usize, max_shared_bytes: properties.max_shared_bytes }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} module, {} SMs", self.module, self.num_sms)
    }
}
