//! Commands of the program, one file each.
use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod audio;
mod bench;
mod check;
mod cross;
mod device;
mod doctor;
mod output;
mod plan;
mod report;

/// Gradients of attention blocks, on an NVIDIA GPU or on the CPU.
#[derive(Parser)]
#[command(name = "attn-backward", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Operation A: audio-encoder attention with variable-length chunks (bf16): tensors file in, gradients file out.
    Audio(audio::Args),
    /// Operation B: cross-attention QKV projection with GQA repeat (fp32): tensors file in, gradients file out.
    Cross(cross::Args),
    /// Compares both operations with the f64 reference on the public suites and on random cases; exit code 1 on any failure.
    Check(check::Args),
    /// Times the suites on a GPU; checks every result before it is timed.
    Bench(bench::Args),
    /// Prints what a run would launch, its predicted time and its extra memory; needs no GPU.
    Plan(plan::Args),
    /// Says what GPU, driver and PTX there are, and what to do about what is missing.
    Doctor(doctor::Args),
}

/// Runs the command line; exit code 0: done, 1: failed (one line on stderr says why), 2: bad usage.
pub fn run() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Audio(args) => audio::run(&args),
        Command::Cross(args) => cross::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Doctor(args) => doctor::run(&args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
