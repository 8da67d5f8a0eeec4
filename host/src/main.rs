//! The `attn-backward` program.
use std::process::ExitCode;

mod cli;

fn main() -> ExitCode {
    cli::run()
}
