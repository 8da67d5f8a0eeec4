//! The GPU: devices, streams, memory, modules and kernels, on `cust` and the CUDA driver.
//!
//! `cust` finds devices, retains the primary context, loads modules and owns memory. What it lacks is here: the functions of CUDA 12, streams
//! that belong to somebody else (PyTorch, candle, cudarc), graphs, launches that are checked before they reach the driver, and errors
//! that name the call and the kernel. The driver is opened at run time by `cuda-driver-shim`: a machine without one gets
//! [`GpuError::NoDriver`].
//!
//! A [`Gpu`] may be used from any thread. Every call makes the GPU's primary context current for its own duration and then restores what
//! was current before, so that other CUDA users of the process notice nothing.

mod buffer;
mod context;
mod device;
mod driver;
mod error;
mod event;
mod graph;
mod kernel;
mod module;
mod params;
pub mod ptx;
mod stream;
mod tensor;
mod tensor_map;
mod timing;

pub use buffer::Buffer;
pub use context::CurrentContext;
pub use device::{DeviceProperties, Gpu, driver_version, missing_driver_functions, newest_ptx_isa};
pub use error::{GpuError, PtxRejection};
pub use event::Event;
pub use graph::Graph;
pub use kernel::{Kernel, KernelAttributes, Launch, LaunchConfig};
pub use module::ModuleKind;
pub use params::{DeviceValue, KernelParams};
pub use stream::Stream;
pub use tensor::{Dtype, TensorElement, TensorView, TensorViewMut};
pub use tensor_map::{Swizzle, TensorMapDtype, TiledTensor};
pub use timing::{L2Flush, time_us};
