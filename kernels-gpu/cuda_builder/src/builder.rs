//! The build itself: cache, inner cargo, output.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::{io, process};

use crate::toolchain::Toolchain;
use crate::{Arch, BuildError, Entry, ptx, sources};

/// Unrolls plain `for` loops over accumulator arrays, which otherwise land in local memory.
const LLVM_FLAGS: &str = "-C llvm-args=-unroll-threshold=100000 -C llvm-args=-unroll-runtime=false";

/// A build of a kernel crate.
#[derive(Clone, Debug)]
pub struct CudaBuilder {
    path: PathBuf,
    arch: Arch,
    copy_to: Option<PathBuf>,
    target_dir: Option<PathBuf>,
}

/// A PTX module and what a host needs to launch it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PtxModule {
    /// What it was built for.
    pub arch: Arch,
    /// The module; its first lines are comments with `source_hash` and `toolchain`.
    pub ptx: String,
    /// File of the module.
    pub path: PathBuf,
    /// SHA-256 over the sources and `toolchain`, in hexadecimal.
    pub source_hash: String,
    /// First line of `rustc -vV`.
    pub toolchain: String,
    /// Its kernels, in the order of the PTX.
    pub entries: Vec<Entry>,
    /// What rustc printed about the kernel crate's code; empty if it had nothing to say.
    pub warnings: String,
}

impl CudaBuilder {
    /// A build of the kernel crate in the folder `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        CudaBuilder { path: path.into(), arch: Arch::Sm80, copy_to: None, target_dir: None }
    }

    /// Sets the target ([`Arch::Sm80`] if never called).
    pub fn arch(mut self, arch: Arch) -> Self {
        self.arch = arch;
        self
    }

    /// Also writes the PTX to the file `path`.
    pub fn copy_to(mut self, path: impl Into<PathBuf>) -> Self {
        self.copy_to = Some(path.into());
        self
    }

    /// Keeps the build and its cache in `path` (`target/cuda-builder` of the crate's workspace if never called).
    pub fn target_dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.target_dir = Some(path.into());
        self
    }

    /// The files that the PTX is made from, for `cargo:rerun-if-changed`.
    ///
    /// # Errors
    /// [`BuildError::NoCrate`], [`BuildError::Io`].
    pub fn source_files(&self) -> Result<Vec<PathBuf>, BuildError> {
        Ok(sources::files(&self.crate_path()?)
            .map_err(io_error("read the sources of", &self.path))?
            .into_values()
            .collect())
    }

    /// The folder that holds finished modules. It changes when a build makes new PTX: what a host that had to do without PTX watches.
    ///
    /// # Errors
    /// [`BuildError::NoCrate`], [`BuildError::Io`].
    pub fn ptx_dir(&self) -> Result<PathBuf, BuildError> {
        let folder = self.build_dir(&self.crate_path()?).join("ptx");
        fs::create_dir_all(&folder).map_err(io_error("create", &folder))?;
        Ok(folder)
    }

    /// Builds the module, or takes it from the cache.
    ///
    /// # Errors
    /// Every [`BuildError`].
    pub fn build(&self) -> Result<PtxModule, BuildError> {
        let path = self.crate_path()?;
        let toolchain = Toolchain::find(&path).map_err(|rejected| BuildError::NoToolchain { rejected })?;
        let files = sources::files(&path).map_err(io_error("read the sources of", &path))?;
        let hash = sources::hash(&files, &toolchain.version).map_err(io_error("read the sources of", &path))?;
        let (ptx_dir, target_dir) = (self.ptx_dir()?, self.build_dir(&path));

        // Build scripts of several packages, and several cargos, may be here at once.
        let lock_path = target_dir.join("lock");
        let lock = File::create(&lock_path).map_err(io_error("create", &lock_path))?;
        lock.lock().map_err(io_error("lock", &lock_path))?;

        let crate_name = path.file_name().unwrap_or_default().to_string_lossy();
        let output = ptx_dir.join(format!("{crate_name}-{}.ptx", self.arch));
        let header = format!(
            "// Made by cuda_builder from {crate_name}; do not edit.\n// arch: {}\n// source_hash: {hash}\n// toolchain: {}\n",
            self.arch, toolchain.version
        );
        let module = match self.cached(&output, &header, &hash, &toolchain) {
            Some(module) => module,
            None => {
                let (raw, warnings) = self.compile(&path, &toolchain, &target_dir)?;
                let (ptx, entries) =
                    ptx::process(&(header + &raw)).map_err(|rule| BuildError::Ptx { arch: self.arch, rule })?;
                let log = output.with_extension("log");
                write_atomically(&log, &warnings)?;
                write_atomically(&output, &ptx)?;
                let (arch, toolchain) = (self.arch, toolchain.version);
                PtxModule { arch, ptx, path: output, source_hash: hash, toolchain, entries, warnings }
            }
        };
        if let Some(copy) = &self.copy_to {
            write_atomically(copy, &module.ptx)?;
        }
        Ok(module)
    }

    /// The folder that holds the inner cargo's output, the lock and the finished modules.
    fn build_dir(&self, crate_path: &Path) -> PathBuf {
        match &self.target_dir {
            Some(path) => path.clone(),
            None => workspace_root(crate_path).join("target/cuda-builder"),
        }
    }

    /// The crate's folder, absolute.
    fn crate_path(&self) -> Result<PathBuf, BuildError> {
        let missing = || BuildError::NoCrate { path: self.path.clone() };
        let path = self.path.canonicalize().map_err(|_| missing())?;
        if path.join("Cargo.toml").is_file() { Ok(path) } else { Err(missing()) }
    }

    /// The module in the file `output`, if it is the one that `header` describes.
    fn cached(&self, output: &Path, header: &str, hash: &str, toolchain: &Toolchain) -> Option<PtxModule> {
        let ptx = fs::read_to_string(output).ok()?;
        let warnings = fs::read_to_string(output.with_extension("log")).ok()?;
        if !ptx.starts_with(header) {
            return None;
        }
        let (ptx, entries) = ptx::process(&ptx).ok()?;
        let (arch, path, source_hash, toolchain) = (self.arch, output.into(), hash.into(), toolchain.version.clone());
        Some(PtxModule { arch, ptx, path, source_hash, toolchain, entries, warnings })
    }

    /// LLVM's PTX of the whole program, and rustc's warnings.
    fn compile(&self, path: &Path, toolchain: &Toolchain, target_dir: &Path) -> Result<(String, String), BuildError> {
        // A new name each time: cargo then never takes a file for fresh that is no longer there.
        let raw_path = target_dir.join(format!("raw-{}-{}.s", self.arch, process::id()));
        let mut emit = std::ffi::OsString::from("--emit=asm=");
        emit.push(&raw_path);
        let mut cargo = toolchain.cargo();
        cargo
            .current_dir(path)
            .args(["rustc", "--quiet", "--release", "--locked", "--lib", "--crate-type", "cdylib"])
            .args(["--target", "nvptx64-nvidia-cuda", "-Zbuild-std=core", "--target-dir"])
            .arg(target_dir.join("cargo"))
            .arg("--")
            .arg(emit)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", format!("-C target-cpu={} -C linker=true {LLVM_FLAGS}", self.arch))
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3")
            .env("CARGO_PROFILE_RELEASE_LTO", "fat")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
            .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
            .env("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "false")
            .env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "false")
            .env("CARGO_PROFILE_RELEASE_INCREMENTAL", "false")
            .env("CARGO_TERM_COLOR", "never")
            .stdin(Stdio::null());
        let result = cargo.output().map_err(io_error("run", &toolchain.sysroot.join("bin/cargo")))?;
        let log = String::from_utf8_lossy(&result.stderr).trim().to_owned();
        if !result.status.success() {
            return Err(BuildError::Compile { path: path.into(), arch: self.arch, log });
        }
        let raw = fs::read_to_string(&raw_path).map_err(io_error("read", &raw_path))?;
        fs::remove_file(&raw_path).map_err(io_error("remove", &raw_path))?;
        Ok((raw, log))
    }
}

/// The nearest folder above `path` whose manifest is a workspace's, else `path` itself.
fn workspace_root(path: &Path) -> &Path {
    let is_workspace = |folder: &&Path| {
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap_or_default();
        manifest.lines().any(|line| line.trim() == "[workspace]")
    };
    path.ancestors().find(is_workspace).unwrap_or(path)
}

/// Writes `text` to `path` unless it says so already; a reader sees the old file or the new one, never half of it.
fn write_atomically(path: &Path, text: &str) -> Result<(), BuildError> {
    if fs::read(path).is_ok_and(|old| old == text.as_bytes()) {
        return Ok(());
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.tmp", process::id()));
    let temporary = PathBuf::from(temporary);
    fs::write(&temporary, text).map_err(io_error("write", &temporary))?;
    fs::rename(&temporary, path).map_err(io_error("write", path))
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BuildError {
    let path = path.to_owned();
    move |error| BuildError::Io { action, path, error }
}
