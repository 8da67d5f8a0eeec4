//! Development commands: `cargo xtask --help`.
mod build_ptx;
mod check_ptx;
mod ci;
mod gpu_test;
mod process;
mod ptxas;
mod setup;
mod simulated_gpu;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use build_ptx::Demands;

/// Commands that set up, build and check this project.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Get what this machine lacks to build the kernels and to check them; says what it did. Safe to run again.
    Setup,
    /// Build both PTX modules, compile them with ptxas and print each kernel's registers.
    BuildPtx {
        /// Fail if there is no ptxas, instead of skipping its checks.
        #[arg(long)]
        require_ptxas: bool,
    },
    /// `build-ptx --require-ptxas`, and fail if rustc warns or if kernels or registers differ from kernels-gpu/registers.txt.
    CheckPtx {
        /// Write the table instead of comparing with it.
        #[arg(long)]
        bless: bool,
    },
    /// Check what the style asks for and neither rustfmt nor clippy knows.
    Tidy,
    /// Everything that a change must pass: fmt, tidy, check-ptx, clippy, doc, tests, GPU tests on the simulated GPU.
    Ci,
    /// Run the GPU tests, on a GPU or on the simulated one.
    GpuTest(gpu_test::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Setup => setup::run(),
        Command::BuildPtx { require_ptxas } => {
            build_ptx::run(Demands { ptxas: require_ptxas, no_warnings: false }).map(drop)
        }
        Command::CheckPtx { bless } => check_ptx::run(bless),
        Command::Tidy => tidy::run(),
        Command::Ci => ci::run(),
        Command::GpuTest(arguments) => gpu_test::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
