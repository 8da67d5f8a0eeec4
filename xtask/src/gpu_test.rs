//! `gpu-test`: the tests that need a GPU: on one, alone or under compute-sanitizer, or on a simulated one.

use anyhow::Context;
use clap::ValueEnum;

use crate::{process, simulated_gpu};

/// Options of `gpu-test`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Run under compute-sanitizer; any finding is a failure. Slow: name the tests to run.
    #[arg(long, value_name = "TOOL")]
    sanitize: Option<Tool>,
    /// Run without a GPU, on the simulated one of `tests/ptx-sim-driver`. Slow: without a filter, the larger tests are left out.
    #[arg(long, conflicts_with = "sanitize")]
    simulated: bool,
    /// Runs the tests whose name holds this text; all by default.
    #[arg(default_value = "")]
    filter: String,
}

/// A tool of compute-sanitizer.
#[derive(Clone, Copy, ValueEnum)]
enum Tool {
    /// Accesses out of bounds, misaligned, leaked.
    Memcheck,
    /// Races in shared memory.
    Racecheck,
    /// Barriers that not every thread reaches.
    Synccheck,
}

/// Runs the tests one after another: they share one GPU.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.simulated {
        return simulated_gpu::run(&arguments.filter);
    }
    let mut command = process::command("cargo", "test --release -p attn-backward-tests --test gpu");
    if let Some(tool) = arguments.sanitize {
        let program = process::on_path("compute-sanitizer")
            .or_else(|| process::in_toolkit("compute-sanitizer"))
            .context("no compute-sanitizer on PATH or in CUDA_HOME: it comes with the CUDA toolkit (PyPI: nvidia-cuda-sanitizer-api)")?;
        let tool = tool.to_possible_value().expect("no tool is hidden");
        let runner = [&program.to_string_lossy(), "--tool", tool.get_name(), "--error-exitcode", "1"];
        // The tests' own limit is meant for runs at full speed.
        command.env("ATTN_BACKWARD_HANG_AFTER_SECONDS", "3600");
        command.arg("--config").arg(format!("target.'cfg(all())'.runner = {runner:?}"));
    }
    process::run(command.args([&arguments.filter, "--", "--nocapture", "--test-threads", "1"]))
}
