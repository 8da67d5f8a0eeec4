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

#[cfg(test)]
mod tests {
    use super::*;

    /// The hash of a crate whose folder holds the files `(name, text)`, with this builder's sources left out.
    fn hash_of(name: &str, crate_files: &[(&str, &str)]) -> String {
        let root = std::env::temp_dir().join(format!("cuda-builder-{name}-{}", std::process::id()));
        for (file, text) in crate_files {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let mut found = files(&root).unwrap();
        found.retain(|name, _| name.starts_with("crate/"));
        let hash = hash(&found, "rustc 1.96.0").unwrap();
        fs::remove_dir_all(root).unwrap();
        hash
    }

    #[test]
    fn hash_follows_sources_and_nothing_else() {
        let crate_files = [("Cargo.toml", "[package]"), ("src/lib.rs", "mod a;"), ("src/a.rs", "")];
        let hash = hash_of("same", &crate_files);
        assert_eq!(hash.len(), 64);
        assert_eq!(hash_of("elsewhere", &crate_files), hash);
        let with = |file, text| hash_of("other", &[&crate_files[..], &[(file, text)]].concat());
        assert_ne!(with("src/a.rs", "fn f() {}"), hash, "edited");
        assert_ne!(with("src/b.rs", ""), hash, "added");
        assert_ne!(with("Cargo.toml", "[lib]"), hash, "manifest");
        assert_eq!(with("README.md", "text"), hash, "no source");
        assert_eq!(with("tests/t.rs", "text"), hash, "test");
        assert_eq!(with("target/debug/x.rs", "text"), hash, "build output");
    }

    #[test]
    fn builder_and_device_library_are_sources() {
        let found = files(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixture").as_path()).unwrap();
        for name in
            ["crate/src/kernel.rs", "cuda_builder/src/ptx.rs", "cuda_std/src/shared.rs", "cuda_std_macros/src/lib.rs"]
        {
            assert!(found.contains_key(name), "{name}: {found:?}");
        }
    }
}
