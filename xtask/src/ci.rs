//! `ci`: everything that a change must pass.

use std::time::Instant;

use crate::process::{command, run as run_command};
use crate::{check_ptx, simulated_gpu, tidy};

/// One step of it.
type Step = (&'static str, fn() -> anyhow::Result<()>);

/// Quick checks first. clippy, doc and tests share the dev profile (optimised in this workspace), so that dependencies compile once for
/// checking and once for running.
const STEPS: [Step; 8] = [
    ("fmt", || run_command(&mut command("cargo", "fmt --all --check"))),
    ("fmt of the fixture", || {
        run_command(&mut command(
            "cargo",
            "fmt --check --manifest-path kernels-gpu/cuda_builder/tests/fixture/Cargo.toml",
        ))
    }),
    ("tidy", tidy::run),
    ("check-ptx", || check_ptx::run(false)),
    ("clippy", || run_command(&mut command("cargo", "clippy --workspace --all-targets --locked -- -D warnings"))),
    ("doc", || {
        let mut doc = command("cargo", "doc --workspace --no-deps --locked");
        run_command(doc.env("RUSTDOCFLAGS", "-D warnings"))
    }),
    ("test", || run_command(&mut command("cargo", "test --workspace --locked"))),
    ("GPU tests on the simulated GPU", || simulated_gpu::run("")),
];

/// Stops at the first step that fails.
pub fn run() -> anyhow::Result<()> {
    let start = Instant::now();
    for (name, step) in STEPS {
        let step_start = Instant::now();
        println!("== {name}");
        step()?;
        println!("== {name}: passed in {:.0} s", step_start.elapsed().as_secs_f64());
    }
    println!("== all steps passed in {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}
