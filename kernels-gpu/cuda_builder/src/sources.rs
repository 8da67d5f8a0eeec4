//! What a PTX module is made from, and its hash.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use sha2::{Digest, Sha256};
use walkdir::WalkDir;

/// The files that decide a kernel crate's PTX: every `*.rs` and `Cargo.toml` of the crate, of `cuda_std`, `cuda_std_macros` and of this
/// builder, by a name that is the same on every machine.
///
/// Not part of it: the lock file and the workspace's manifest (the kernels depend on no registry crate but through the attribute's
/// expansion, and the build sets its own profile), tests.
pub(crate) fn files(crate_path: &Path) -> io::Result<BTreeMap<String, PathBuf>> {
    let builder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let roots = [
        ("crate", crate_path.to_owned()),
        ("cuda_builder", builder.to_owned()),
        ("cuda_std", builder.join("../cuda_std")),
        ("cuda_std_macros", builder.join("../cuda_std_macros")),
    ];
    let mut names: BTreeMap<PathBuf, String> = BTreeMap::new();
    for (label, root) in roots {
        let walk = WalkDir::new(&root).into_iter().filter_entry(|entry| {
            let name = entry.file_name().to_string_lossy();
            let skipped = ["target", "tests", "benches", "examples"].contains(&&*name) || name.starts_with('.');
            entry.depth() == 0 || !entry.file_type().is_dir() || !skipped
        });
        for entry in walk {
            let entry = entry?;
            let is_source = entry.path().extension().is_some_and(|extension| extension == "rs");
            if entry.file_type().is_file() && (is_source || entry.file_name() == "Cargo.toml") {
                let below = entry.path().strip_prefix(&root).expect("walkdir yields paths below its root");
                // A crate inside another keeps the outer one's name.
                names.entry(entry.path().canonicalize()?).or_insert_with(|| format!("{label}/{}", below.display()));
            }
        }
    }
    Ok(names.into_iter().map(|(path, name)| (name, path)).collect())
}

/// SHA-256 over names and contents of `files` and over `toolchain`, as 64 hexadecimal digits.
pub(crate) fn hash(files: &BTreeMap<String, PathBuf>, toolchain: &str) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut add = |bytes: &[u8]| {
        hasher.update((bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    add(toolchain.as_bytes());
    for (name, path) in files {
        add(name.as_bytes());
        add(&fs::read(path)?);
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
