//! `gpu-test --simulated`: the GPU tests on the simulated GPU of `tests/ptx-sim-driver`.

use std::path::PathBuf;
use std::{env, fs};

use anyhow::Context;

use crate::process::{command, run as run_command};

/// What is left out unless a filter asks for it: parts of tests' names, and why.
const LEFT_OUT: [(&str, &str); 18] = [
    ("large::", "tensors of gigabytes"),
    ("converting::", "the model's sizes"),
    ("suite::", "whole suites"),
    ("properties::", "many random cases"),
    ("determinism::a_", "many runs of middle-sized shapes"),
    ("determinism::other_kernels", "many runs of middle-sized shapes"),
    ("determinism::thousands_of_replays", "many runs"),
    ("streams::streams_of_one_thread", "many runs of middle-sized shapes"),
    ("streams::threads_that_share", "many runs of middle-sized shapes"),
    ("audio::a_long_chunk_is_at_least", "a long chunk"),
    ("audio::long_chunks_equal", "long chunks"),
    ("audio::one_chunk_of_32769_rows", "a long chunk"),
    ("cross::all_head_counts", "many shapes"),
    ("cross::more_than_a_million_token_rows", "a million tokens"),
    ("cross::odd_sizes", "many shapes"),
    ("cu_seqlens::one_captured_graph", "many launches"),
    ("cu_seqlens::one_chunk_of_16384", "a long chunk"),
    ("cu_seqlens::seventy_thousand_chunks", "many chunks"),
];

/// Runs the tests whose name holds `filter`; without one, all but those [`LEFT_OUT`].
///
/// In the dev profile and for the whole workspace, so that what `cargo test --workspace` has built is not built again.
pub fn run(filter: &str) -> anyhow::Result<()> {
    let mut paths = vec![place_driver()?];
    paths.extend(env::var_os("LD_LIBRARY_PATH").iter().flat_map(env::split_paths));

    let mut tests = command("cargo", "test --workspace --locked --test gpu");
    tests.env("LD_LIBRARY_PATH", env::join_paths(paths)?);
    tests.env("ATTN_BACKWARD_REQUIRE_GPU", "1");
    // The tests' own limit is meant for runs at full speed.
    tests.env("ATTN_BACKWARD_HANG_AFTER_SECONDS", "3600");
    tests.args([filter, "--", "--test-threads", "1"]);
    if filter.is_empty() {
        for (name, why) in LEFT_OUT {
            println!("left out: {name} ({why})");
            tests.args(["--skip", name]);
        }
    }
    run_command(&mut tests)
}

/// Builds the driver and puts it into a folder of its own, under the name that programs look for; returns the folder.
fn place_driver() -> anyhow::Result<PathBuf> {
    run_command(&mut command("cargo", "build --workspace --lib --locked"))?;
    // Cargo puts libraries beside programs, this one among them.
    let program = env::current_exe().context("the path of this program")?;
    let built = program.with_file_name("libptx_sim_driver.so");
    let folder = program.ancestors().nth(2).context("the target folder")?.join("ptx-sim-driver");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    fs::copy(&built, folder.join("libcuda.so.1")).with_context(|| format!("cannot copy {}", built.display()))?;
    Ok(folder)
}
