//! The PTX that the library carries fits the host: parameters, entries, targets, and the hash of its sources.

use attn_backward::gpu::ModuleKind;
use attn_backward::gpu::ptx::{HOPPER, Module, PORTABLE};
use attn_backward_kernels::params::{
    AttentionParams, ColumnSumsParams, CrossConvertParams, FlashParams, GemmParams, SumPartialsParams,
};
use attn_backward_kernels::params_wgmma::{AttentionFusedParams, Conversion, WgmmaParams};

/// The modules of this build with their text; none, with a line on stderr, where PTX could not be made.
fn modules() -> Vec<(&'static Module, &'static str)> {
    let built = |module: &'static Module| match module.ptx {
        Some(text) => Some((module, text)),
        None => {
            eprintln!("SKIPPED (no PTX): the {} module was not built", module.name);
            None
        }
    };
    [&PORTABLE, &HOPPER].into_iter().filter_map(built).collect()
}

/// Size of the struct that the host passes to an entry.
fn host_bytes(entry: &str) -> usize {
    match entry {
        "column_sums_bf16" => size_of::<ColumnSumsParams>(),
        "sum_partials" => size_of::<SumPartialsParams>(),
        name if name.starts_with("gemm_") => size_of::<GemmParams>(),
        name if name.starts_with("wgmma_") => size_of::<WgmmaParams>(),
        name if name.starts_with("attention_fused_") => size_of::<AttentionFusedParams>(),
        name if name.starts_with("attention_flash_") => size_of::<FlashParams>(),
        name if name.starts_with("attention_") => size_of::<AttentionParams>(),
        name if name.starts_with("cross_wgmma_") => size_of::<WgmmaParams<Conversion>>(),
        name if name.starts_with("cross_convert_") => size_of::<CrossConvertParams>(),
        name => panic!("no host struct is known for entry {name}"),
    }
}

/// What the PTX itself says from an entry's name to its body.
fn declaration<'a>(text: &'a str, entry: &str) -> &'a str {
    let start = text.find(&format!(".entry {entry}(")).unwrap_or_else(|| panic!("no entry {entry}"));
    let body = text[start..].find("\n{").unwrap_or_else(|| panic!("entry {entry} has no body"));
    &text[start..start + body]
}

#[test]
fn every_entrys_parameter_has_the_size_of_the_hosts_struct() {
    for (module, text) in modules() {
        assert!(!module.entries.is_empty());
        for entry in module.entries {
            assert_eq!(entry.param_bytes, host_bytes(entry.name), "{} of the {} module", entry.name, module.name);
            let declared = format!("{}_param_0[{}]", entry.name, entry.param_bytes);
            let declaration = declaration(text, entry.name);
            assert!(declaration.contains(&declared), "{declaration}");
            assert_eq!(declaration.matches(".param").count(), 1, "{declaration}");
        }
    }
}

#[test]
fn every_entry_states_its_launch_bounds() {
    for (module, text) in modules() {
        for entry in module.entries {
            let declaration = declaration(text, entry.name);
            assert!(declaration.contains(&format!(".maxntid {}", entry.max_threads)), "{declaration}");
            assert!((32..=1024).contains(&entry.max_threads), "{}", entry.name);
        }
        assert_eq!(text.matches(".entry ").count(), module.entries.len(), "{} module", module.name);
    }
}

#[test]
fn the_hopper_module_has_every_portable_entry_and_the_wgmma_ones() {
    let [(portable, _), (hopper, _)] = modules()[..] else { return };
    let names = |module: &Module| module.entries.iter().map(|entry| entry.name).collect::<Vec<_>>();
    assert!(names(portable).iter().all(|name| names(hopper).contains(name)));
    assert!(names(hopper).iter().any(|name| name.starts_with("wgmma_")));
    assert!(!names(portable).iter().any(|name| name.starts_with("wgmma_")));
}

#[test]
fn modules_are_built_for_the_oldest_gpu_and_driver_that_will_do() {
    for (module, text) in modules() {
        let directive = |name: &str| text.lines().find_map(|line| line.trim().strip_prefix(name)).unwrap().trim();
        let (target, newest) = if module.name == "portable" { ("sm_80", 70) } else { ("sm_90a", 80) };
        assert_eq!((module.arch, directive(".target ")), (target, target));
        let (major, minor) = directive(".version ").split_once('.').unwrap();
        let version = 10 * major.parse::<u32>().unwrap() + minor.parse::<u32>().unwrap();
        assert!(version <= newest, "{} module: PTX {version}", module.name);
    }
}

#[test]
fn modules_carry_the_hash_of_the_sources_they_were_made_from() {
    let modules = modules();
    for (module, text) in &modules {
        assert_eq!(module.source_hash.len(), 64);
        assert!(text.lines().take(8).any(|line| line == format!("// source_hash: {}", module.source_hash)));
    }
    // One source, two targets: a hash that differs means that one of them is stale.
    assert!(modules.windows(2).all(|pair| pair[0].0.source_hash == pair[1].0.source_hash));
}

#[test]
fn module_names_are_those_of_the_options() {
    assert_eq!(
        (ModuleKind::Portable.to_string(), ModuleKind::Hopper.to_string()),
        ("portable".into(), "hopper".into())
    );
}
