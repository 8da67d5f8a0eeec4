//! Builds the kernels to PTX, one module for each architecture, and writes them as constants for `gpu::ptx`.
//!
//! A machine that cannot make PTX still builds the library: the constants then hold no PTX but the reason, which the GPU path reports.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

use cuda_builder::{Arch, BuildError, CudaBuilder, PtxModule};

const KERNELS: &str = "../kernels-gpu";

fn main() {
    let out_dir = env::var("OUT_DIR").expect("cargo sets OUT_DIR for a build script");
    let builder = CudaBuilder::new(KERNELS);
    println!("cargo::rerun-if-changed=build.rs");
    for file in builder.source_files().unwrap_or_default() {
        println!("cargo::rerun-if-changed={}", file.display());
        // A folder too: a file may be added to it.
        if let Some(folder) = file.parent().filter(|folder| folder.ends_with("src")) {
            println!("cargo::rerun-if-changed={}", folder.display());
        }
    }

    let portable = builder.clone().arch(Arch::Sm80).copy_to(Path::new(&out_dir).join("portable.ptx")).build();
    let hopper = portable
        .as_ref()
        .ok()
        .map(|_| builder.clone().arch(Arch::Sm90a).copy_to(Path::new(&out_dir).join("hopper.ptx")).build());
    let (modules, missing) = match (portable, hopper) {
        (Ok(portable), Some(Ok(hopper))) => ([Some(portable), Some(hopper)], String::new()),
        (Err(error), _) | (_, Some(Err(error))) => ([None, None], why_missing(&builder, &error)),
        (Ok(_), None) => unreachable!("the Hopper module is built whenever the portable one was"),
    };
    let [portable, hopper] = modules;
    let mut text = format!(
        "/// Why a module has no PTX and what to do about it; empty if both have.\npub const MISSING: &str = {missing:?};\n"
    );
    text += &constant("PORTABLE", "For every NVIDIA GPU since Ampere.", Arch::Sm80, portable.as_ref());
    text += &constant("HOPPER", "For GPUs of compute capability 9.0.", Arch::Sm90a, hopper.as_ref());
    let path = Path::new(&out_dir).join("ptx_modules.rs");
    fs::write(&path, text).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}

/// The reason in one paragraph; warns, and watches for PTX that a later build may make.
fn why_missing(builder: &CudaBuilder, error: &BuildError) -> String {
    if let Ok(folder) = builder.ptx_dir() {
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    println!("cargo::warning=built without GPU kernels (the CPU path is complete):");
    for line in error.to_string().lines() {
        println!("cargo::warning={line}");
    }
    format!("this build carries no PTX: {error}\nthen run `cargo xtask build-ptx` and build again")
}

/// The source text of a `Module` constant.
fn constant(name: &str, doc: &str, arch: Arch, module: Option<&PtxModule>) -> String {
    let file = name.to_lowercase();
    let ptx = match module {
        Some(_) => format!("Some(include_str!(\"{file}.ptx\"))"),
        None => "None".into(),
    };
    let source_hash = module.map_or("", |module| &module.source_hash);
    let mut entries = String::new();
    for entry in module.iter().flat_map(|module| &module.entries) {
        let cuda_builder::Entry { name, param_bytes, max_threads, cluster_size, .. } = entry;
        let sizes = format!("param_bytes: {param_bytes}, max_threads: {max_threads}, cluster_size: {cluster_size}");
        writeln!(entries, "    Entry {{ name: {name:?}, {sizes} }},").expect("writing to a string cannot fail");
    }
    format!(
        "/// {doc}\npub const {name}: Module = Module {{ name: {file:?}, arch: \"{arch}\", ptx: {ptx}, \
         source_hash: {source_hash:?}, entries: &[\n{entries}] }};\n"
    )
}
