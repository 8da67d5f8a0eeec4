//! Builds the kernel crate in `tests/fixture` with the toolchain of this machine.

use std::path::{Path, PathBuf};
use std::thread;

use cuda_builder::{Arch, BuildError, CudaBuilder, Entry, Toolchain};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixture")
}

fn entry(name: &str, param_bytes: u32, max_threads: u32, min_blocks_per_sm: u32, barriers: u32) -> Entry {
    Entry { name: name.into(), param_bytes, max_threads, min_blocks_per_sm, barriers, cluster_size: 1 }
}

/// Whether the test can run; says so loudly if not.
fn toolchain_is_here() -> bool {
    match Toolchain::find(&fixture()) {
        Ok(_) => true,
        Err(rejected) => {
            eprintln!("SKIPPED: {}", BuildError::NoToolchain { rejected });
            false
        }
    }
}

#[test]
fn fixture_compiles_for_each_arch_and_comes_from_the_cache_the_second_time() {
    if !toolchain_is_here() {
        return;
    }
    // The project's own, so that `core` is there already; the fixture's modules of an earlier run are not wanted.
    let target_dir = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("cuda-builder");
    for (arch, version) in [(Arch::Sm80, "7.0"), (Arch::Sm90a, "8.0")] {
        let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{arch}.ptx"));
        let builder = CudaBuilder::new(fixture()).arch(arch).target_dir(&target_dir).copy_to(&copy);
        let _ = std::fs::remove_file(target_dir.join(format!("ptx/fixture-{arch}.ptx")));
        // Two at once must not disturb each other.
        let (first, second) = thread::scope(|scope| {
            let other = scope.spawn(|| builder.build());
            (builder.build().unwrap(), other.join().unwrap().unwrap())
        });
        assert_eq!(first, second);
        assert_eq!(first.entries, [entry("fill", 168, 32, 1, 0), entry("reverse", 16, 128, 4, 1)]);
        assert_eq!(first.warnings, "");
        for line in [
            format!("// source_hash: {}", first.source_hash),
            format!(".version {version}"),
            format!(".target {arch}"),
            ".extern .shared .align 1024 .b8 dyn_smem[];".into(),
            ".maxntid 128, 1, 1".into(),
            ".minnctapersm 4".into(),
            "\t.param .align 64 .b8 fill_param_0[168]".into(),
        ] {
            assert_eq!(first.ptx.lines().filter(|&found| found == line).count(), 1, "{line}\n{}", first.ptx);
        }
        assert_eq!(std::fs::read_to_string(&copy).unwrap(), first.ptx);
        assert_eq!(std::fs::read_to_string(&first.path).unwrap(), first.ptx);

        let modified = std::fs::metadata(&first.path).unwrap().modified().unwrap();
        assert_eq!(builder.build().unwrap(), first);
        assert_eq!(std::fs::metadata(&first.path).unwrap().modified().unwrap(), modified);
    }
}

#[test]
fn folder_without_a_crate_is_named() {
    let path = fixture().join("src");
    let error = CudaBuilder::new(&path).build().unwrap_err();
    assert!(matches!(&error, BuildError::NoCrate { path: found } if *found == path), "{error}");
}
