//! ptxas, the judge of every kernel: where it is and what it says.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

use crate::process;

/// Version of the PyPI package `nvidia-cuda-nvcc` that `cargo xtask setup` installs.
pub const PINNED_VERSION: &str = "13.0.88";

/// A ptxas program.
pub struct Ptxas {
    /// The program.
    pub path: PathBuf,
    /// As in `V13.0.88`.
    pub version: String,
}

/// What ptxas says about one kernel.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Name of the entry.
    pub entry: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Static shared memory of a block.
    pub static_smem_bytes: u32,
    /// Stack frame of a thread: local memory.
    pub stack_bytes: u32,
    /// Stores and loads of spilled registers.
    pub spill_bytes: u32,
    /// Named barriers in use (indices, not instructions).
    pub named_barriers: u32,
}

/// Where `cargo xtask setup` puts ptxas.
pub fn venv() -> PathBuf {
    process::root().join("target/ptxas-venv")
}

impl Ptxas {
    /// The pinned one if it is installed, so that register counts are comparable, else PATH's, else a CUDA toolkit's.
    pub fn find() -> Option<Ptxas> {
        let pinned = std::fs::read_dir(venv().join("lib")).ok().and_then(|versions| {
            let program = |python: PathBuf| python.join("site-packages/nvidia/cu13/bin/ptxas");
            versions.flatten().map(|python| program(python.path())).find(|path| path.is_file())
        });
        let path = pinned.or_else(|| process::on_path("ptxas")).or_else(|| process::in_toolkit("ptxas"))?;
        let output = std::process::Command::new(&path).arg("--version").output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text.split_whitespace().find_map(|word| word.strip_prefix('V'))?.to_owned();
        Some(Ptxas { path, version })
    }

    /// Whether register counts can be compared with the committed table.
    pub fn is_pinned(&self) -> bool {
        self.version == PINNED_VERSION
    }

    /// Compiles `ptx` for `arch`.
    ///
    /// # Errors
    /// ptxas refuses the module, or warns: of wgmma instructions that run one after another, of a directive that it ignores (C75xx).
    pub fn compile(&self, ptx: &Path, arch: &str) -> anyhow::Result<Vec<Usage>> {
        let mut command = std::process::Command::new(&self.path);
        command.arg("-v").arg(format!("-arch={arch}")).arg(ptx).args(["-o", "/dev/null"]);
        let output = command.output().with_context(|| format!("cannot run {}", self.path.display()))?;
        let log = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "ptxas refuses {} for {arch}:\n{}", ptx.display(), log.trim());
        let warnings: Vec<&str> = log.lines().filter(|line| is_warning(line)).collect();
        if !warnings.is_empty() {
            bail!("ptxas warns about {} for {arch}:\n{}", ptx.display(), warnings.join("\n"));
        }
        parse(&log).with_context(|| format!("the output of ptxas is not understood:\n{log}"))
    }
}

/// Performance warnings are `info` lines with a number of their own.
fn is_warning(line: &str) -> bool {
    line.contains("(C7") || line.to_lowercase().contains("warning")
}

/// The kernels that `ptxas -v` reports.
fn parse(log: &str) -> Option<Vec<Usage>> {
    let mut kernels: Vec<Usage> = Vec::new();
    let mut function = "";
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernels.push(Usage { entry: rest.split_once('\'')?.0.into(), ..Usage::default() });
        } else if let Some((_, name)) = line.split_once("Function properties for ") {
            function = name.trim();
        } else if line.contains("bytes stack frame") {
            // functions that kernels call have properties, too
            let kernel = kernels.last_mut()?;
            if kernel.entry != function {
                continue;
            }
            kernel.stack_bytes = number_before(line, "bytes stack frame")?;
            kernel.spill_bytes = number_before(line, "bytes spill stores")? + number_before(line, "bytes spill loads")?;
        } else if line.contains(": Used ") {
            let kernel = kernels.last_mut()?;
            kernel.registers = number_before(line, "registers")?;
            kernel.named_barriers = number_before(line, "barriers").unwrap_or(0);
            kernel.static_smem_bytes = number_before(line, "bytes smem").unwrap_or(0);
        }
    }
    Some(kernels)
}

/// `72` of `Used 72 registers`, for `unit` = `registers`.
fn number_before(line: &str, unit: &str) -> Option<u32> {
    line[..line.find(unit)?].split_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gemm' for 'sm_90a'
ptxas info    : Function properties for gemm
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 16 bytes cumulative stack size, 128 bytes smem
ptxas info    : Compile time = 76.1 ms
ptxas info    : Compiling entry function 'fill' for 'sm_90a'
ptxas info    : Function properties for fill
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
ptxas info    : Function properties for panic_fmt
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
";

    #[test]
    fn each_kernel_is_read_from_the_log() {
        let gemm = Usage {
            entry: "gemm".into(),
            registers: 168,
            static_smem_bytes: 128,
            stack_bytes: 16,
            spill_bytes: 20,
            named_barriers: 16,
        };
        let fill = Usage { entry: "fill".into(), registers: 12, ..Usage::default() };
        assert_eq!(parse(LOG).unwrap(), [gemm, fill]);
    }

    #[test]
    fn performance_notes_are_warnings() {
        assert!(is_warning(
            "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
        ));
        assert!(is_warning("ptxas warning : Value of threads per SM for entry gemm is out of range."));
        assert!(!LOG.lines().any(is_warning));
    }
}
