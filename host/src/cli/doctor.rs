//! `doctor`: what there is to compute with, and what to do about what is missing.
use std::process::ExitCode;

use super::output;
use attn_backward::Error;
use attn_backward::gpu::{Gpu, ModuleKind, driver_version, missing_driver_functions, newest_ptx_isa, ptx};
use comfy_table::{Table, presets::UTF8_BORDERS_ONLY};

/// Options of `doctor`.
#[derive(clap::Args)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: &Args) -> Result<ExitCode, Error> {
    let mut table = Table::new();
    table.load_preset(UTF8_BORDERS_ONLY);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    table.add_row(["cpu".to_string(), format!("{threads} threads; both operations run on it")]);
    for module in [&ptx::PORTABLE, &ptx::HOPPER] {
        let state = match module.ptx {
            Some(text) => format!(
                "{} kernels for {}, {} KiB of PTX, sources {}",
                module.entries.len(),
                module.arch,
                text.len() / 1024,
                module.source_hash.get(..12).unwrap_or(module.source_hash)
            ),
            None => format!("not built: {}", ptx::MISSING),
        };
        table.add_row([format!("{} module", module.name), state]);
    }
    let count = match (driver_version(), Gpu::count()) {
        (Ok(version), Ok(count)) => {
            let (major, minor) = version;
            let isa = newest_ptx_isa(version);
            table.add_row(["driver".to_string(), format!("CUDA {major}.{minor}, PTX up to {}.{}", isa.0, isa.1)]);
            let missing = missing_driver_functions();
            if !missing.is_empty() {
                table.add_row(["driver lacks".to_string(), missing.join(" ")]);
            }
            if count == 0 {
                table.add_row([
                    "gpu".to_string(),
                    "the driver sees none: check nvidia-smi and CUDA_VISIBLE_DEVICES".into(),
                ]);
            }
            count
        }
        (Err(error), _) | (_, Err(error)) => {
            table.add_row(["driver".to_string(), error.to_string()]);
            0
        }
    };
    for index in 0..count {
        table.add_row([format!("cuda:{index}"), describe(index)]);
    }
    output::line(table)?;
    Ok(ExitCode::SUCCESS)
}

/// A GPU in one line: what it is, and the module that it runs or why none.
fn describe(index: usize) -> String {
    let gpu = match Gpu::open(index) {
        Ok(gpu) => gpu,
        Err(error) => return error.to_string(),
    };
    let p = gpu.properties();
    let (major, minor) = p.compute_capability;
    let memory = p.total_memory_bytes >> 30;
    let runs = match gpu.best_module().and_then(|module: ModuleKind| gpu.load(module).map(|()| module)) {
        Ok(module) => format!("runs the {module} module"),
        Err(error) => error.to_string(),
    };
    format!("{}, compute capability {major}.{minor}, {} SMs, {memory} GiB: {runs}", p.name, p.num_sms)
}
