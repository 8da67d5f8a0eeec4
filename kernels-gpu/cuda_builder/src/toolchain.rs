//! Finding a rustc that can compile to PTX.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Arch;

/// The oldest release that the kernels compile with.
pub const MINIMUM_RELEASE: (u32, u32) = (1, 95);

/// A matched rustc and cargo with the source of `core` and the NVPTX backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain {
    /// Folder that holds `bin/rustc`, `bin/cargo` and `lib/rustlib`.
    pub sysroot: PathBuf,
    /// First line of `rustc -vV`.
    pub version: String,
}

/// A toolchain that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// Where it is.
    pub sysroot: PathBuf,
    /// What it lacks and how to get that, a sentence each.
    pub missing: Vec<String>,
}

impl Toolchain {
    /// The first toolchain that has everything: the one that `rustc` is in `directory` (rustup's, as `rust-toolchain.toml` pins it), then the
    /// distribution's in `/usr`.
    ///
    /// # Errors
    /// What each of them lacks.
    pub fn find(directory: &Path) -> Result<Toolchain, Vec<Rejected>> {
        let mut rejected: Vec<Rejected> = Vec::new();
        let pinned = output(clean_command("rustc").current_dir(directory).args(["--print", "sysroot"]));
        for sysroot in pinned.map(|path| PathBuf::from(path.trim())).into_iter().chain([PathBuf::from("/usr")]) {
            if rejected.iter().any(|known| known.sysroot == sysroot) {
                continue;
            }
            match Toolchain::inspect(sysroot) {
                Ok(toolchain) => return Ok(toolchain),
                Err(missing) => rejected.push(missing),
            }
        }
        Err(rejected)
    }

    /// The toolchain in `sysroot`.
    ///
    /// # Errors
    /// What it lacks.
    pub fn inspect(sysroot: PathBuf) -> Result<Toolchain, Rejected> {
        let mut missing = Vec::new();
        let rustc = sysroot.join("bin/rustc");
        let version = output(clean_command(&rustc).arg("-vV")).and_then(|text| Some(text.lines().next()?.to_owned()));
        match &version {
            None => missing.push("no bin/rustc that runs (Debian, Ubuntu: apt-get install rustc-web)".to_owned()),
            Some(version) => {
                let (major, minor) = MINIMUM_RELEASE;
                if release(version).is_none_or(|found| found < MINIMUM_RELEASE) {
                    missing.push(format!("{version} is too old, {major}.{minor} or later is needed"));
                }
                let cpus =
                    output(clean_command(&rustc).args(["--print", "target-cpus", "--target", "nvptx64-nvidia-cuda"]));
                let cpus = cpus.unwrap_or_default();
                for arch in Arch::ALL {
                    if !cpus.split_whitespace().any(|cpu| cpu == arch.name()) {
                        missing.push(format!("its LLVM does not know {arch}"));
                    }
                }
            }
        }
        if output(clean_command(sysroot.join("bin/cargo")).arg("-V")).is_none() {
            missing.push("no bin/cargo that runs (Debian, Ubuntu: apt-get install cargo-web)".to_owned());
        }
        if !sysroot.join("lib/rustlib/src/rust/library/core/Cargo.toml").is_file() {
            let how = "rustup component add rust-src; Debian, Ubuntu: apt-get install rust-web-src";
            missing.push(format!("no source of `core` in lib/rustlib/src ({how})"));
        }
        match version {
            Some(version) if missing.is_empty() => Ok(Toolchain { sysroot, version }),
            _ => Err(Rejected { sysroot, missing }),
        }
    }

    /// This toolchain's cargo, for a build that nothing in the environment of a build script or of the user's shell disturbs.
    pub(crate) fn cargo(&self) -> Command {
        let bin = self.sysroot.join("bin");
        let mut path = bin.clone().into_os_string();
        if let Some(rest) = std::env::var_os("PATH") {
            path.push(":");
            path.push(rest);
        }
        let mut command = clean_command(bin.join("cargo"));
        // Empty: no wrapper, whatever a cargo configuration file says.
        command
            .env("PATH", path)
            .env("RUSTC", bin.join("rustc"))
            .env("RUSTC_WRAPPER", "")
            .env("RUSTC_WORKSPACE_WRAPPER", "");
        command
    }
}

/// `program` without the variables that cargo, rustup and a build script's cargo set: an inner cargo would take an outer build's flags,
/// target or compiler from them.
fn clean_command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    /// Prefixes of cargo's variables that say where packages come from, and the outer build's jobserver.
    const KEPT: [&str; 8] = [
        "CARGO_HOME",
        "CARGO_HTTP_",
        "CARGO_NET_",
        "CARGO_REGISTRY_",
        "CARGO_REGISTRIES_",
        "CARGO_SOURCE_",
        "CARGO_MAKEFLAGS",
        "RUSTUP_HOME",
    ];
    const DROPPED: [&str; 6] = ["CARGO", "RUSTC", "RUSTDOC", "RUSTFLAGS", "RUSTUP_TOOLCHAIN", "DEP_"];
    const DROPPED_EXACTLY: [&str; 6] = ["TARGET", "HOST", "PROFILE", "OPT_LEVEL", "DEBUG", "OUT_DIR"];
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let Some(text) = name.to_str() else { continue };
        let kept = KEPT.iter().any(|prefix| text.starts_with(prefix));
        let dropped = DROPPED.iter().any(|prefix| text.starts_with(prefix)) || DROPPED_EXACTLY.contains(&text);
        if dropped && !kept {
            command.env_remove(name);
        }
    }
    command
}

/// What `command` printed, if it ran and succeeded.
fn output(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// `(1, 96)` of `rustc 1.96.0 (ac68faa20 2026-05-25)`.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split_whitespace().nth(1)?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_is_major_and_minor() {
        assert_eq!(release("rustc 1.96.0 (ac68faa20 2026-05-25) (built from a source tarball)"), Some((1, 96)));
        assert_eq!(release("rustc 1.100.0-nightly"), Some((1, 100)));
        assert_eq!(release("clang version"), None);
    }

    #[test]
    fn empty_folder_lacks_every_piece() {
        let folder = std::env::temp_dir();
        let rejected = Toolchain::inspect(folder.clone()).unwrap_err();
        assert_eq!(rejected.sysroot, folder);
        assert_eq!(rejected.missing.len(), 3);
        for piece in ["rustc", "cargo", "core"] {
            assert!(rejected.missing.iter().any(|text| text.contains(piece)), "{piece}");
        }
    }
}
