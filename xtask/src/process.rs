//! Running other programs, and where things are.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};

/// The workspace's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a folder of the workspace")
}

/// The kernel crate.
pub fn kernels() -> PathBuf {
    root().join("kernels-gpu")
}

/// `program arguments..` in the workspace's root; `arguments` are separated by spaces.
pub fn command(program: &str, arguments: &str) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).args(arguments.split_whitespace()).stdin(Stdio::null());
    command
}

/// Runs `command`, its output shown.
pub fn run(command: &mut Command) -> anyhow::Result<()> {
    let shown = show(command);
    println!("$ {shown}");
    let status = command.status().with_context(|| format!("cannot run `{shown}`"))?;
    ensure!(status.success(), "`{shown}` failed ({status})");
    Ok(())
}

/// Whether `command` runs and succeeds; its output is dropped.
pub fn succeeds(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// The first `program` on PATH.
pub fn on_path(program: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// A CUDA toolkit's programs: `bin` of CUDA_HOME, CUDA_PATH or /usr/local/cuda.
pub fn in_toolkit(program: &str) -> Option<PathBuf> {
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    homes
        .chain([PathBuf::from("/usr/local/cuda")])
        .map(|home| home.join("bin").join(program))
        .find(|path| path.is_file())
}

fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
