//! `setup`: what a machine with a Rust toolchain lacks to build the kernels and to check them.

use std::path::PathBuf;
use std::process::Command;

use anyhow::bail;
use cuda_builder::{BuildError, Rejected, Toolchain};

use crate::process::{self, command, kernels, on_path, succeeds};
use crate::ptxas::{self, PINNED_VERSION, Ptxas};

/// Debian's matched rustc and cargo with the NVPTX backend, and the source of `core`.
const DEBIAN_TOOLCHAIN: &str = "rustc-web cargo-web rust-web-src";

/// Gets the PTX toolchain, then ptxas; only the first is an error if it cannot be had.
pub fn run() -> anyhow::Result<()> {
    let toolchain = match Toolchain::find(&kernels()) {
        Ok(toolchain) => toolchain,
        Err(rejected) => install_toolchain(rejected)?,
    };
    println!("PTX toolchain: {} in {}", toolchain.version, toolchain.sysroot.display());
    match Ptxas::find() {
        Some(ptxas) if ptxas.is_pinned() => {}
        _ => {
            if let Err(error) = install_ptxas() {
                eprintln!("ptxas {PINNED_VERSION} cannot be had: {error:#}");
            }
        }
    }
    match Ptxas::find() {
        Some(Ptxas { path, version }) => println!("ptxas: {version} in {}", path.display()),
        None => eprintln!("ptxas: MISSING; `cargo xtask build-ptx` works but cannot check for spills and warnings"),
    }
    Ok(())
}

/// Tries rustup, then Debian's packages.
fn install_toolchain(rejected: Vec<Rejected>) -> anyhow::Result<Toolchain> {
    for Rejected { sysroot, missing } in &rejected {
        for piece in missing {
            println!("{}: {piece}", sysroot.display());
        }
    }
    // A rustup that cannot download must not hold up what can.
    if on_path("rustup").is_some() && succeeds(&mut command("timeout", "120 rustup component add rust-src")) {
        println!("rustup: rust-src added");
        if let Ok(toolchain) = Toolchain::find(&kernels()) {
            return Ok(toolchain);
        }
    }
    println!("rustup cannot add rust-src here; trying the distribution's packages");
    if let Err(error) = apt_install(DEBIAN_TOOLCHAIN) {
        eprintln!("{error:#}");
    }
    match Toolchain::find(&kernels()) {
        Ok(toolchain) => Ok(toolchain),
        Err(rejected) => bail!(BuildError::NoToolchain { rejected }),
    }
}

/// Into a virtual environment of the project's own.
fn install_ptxas() -> anyhow::Result<()> {
    let venv = ptxas::venv();
    let create = |python: &PathBuf| Command::new(python).args(["-m", "venv", "--clear"]).arg(&venv).output();
    let creates = |python: &PathBuf| create(python).is_ok_and(|output| output.status.success());
    // Debian's python3 has no venv module until python3-venv is installed.
    if !on_path("python3").as_ref().is_some_and(creates) {
        apt_install("python3 python3-venv")?;
        let Some(python) = on_path("python3").filter(creates) else {
            bail!("python3 cannot make a virtual environment in {}", venv.display());
        };
        println!("python3: {}", python.display());
    }
    let package = format!("nvidia-cuda-nvcc=={PINNED_VERSION}");
    process::run(Command::new(venv.join("bin/python")).args(["-m", "pip", "install", "--quiet", "--no-deps", &package]))
}

/// `apt-get install`, with fresh package lists: old ones may offer a toolchain that is too old.
fn apt_install(packages: &str) -> anyhow::Result<()> {
    if on_path("apt-get").is_none() {
        bail!("no apt-get here; install by hand: {packages}");
    }
    let is_root = command("id", "-u").output().is_ok_and(|output| output.stdout == b"0\n");
    let apt_get = |arguments: &str| {
        let mut command =
            if is_root { command("apt-get", arguments) } else { command("sudo", &format!("apt-get {arguments}")) };
        command.env("DEBIAN_FRONTEND", "noninteractive");
        process::run(&mut command)
    };
    apt_get("-qq update")?;
    apt_get(&format!("-qq install -y --no-install-recommends {packages}"))
}
