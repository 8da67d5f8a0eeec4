//! `check-ptx`: no kernel appears, vanishes or takes more registers unnoticed.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, bail, ensure};

use crate::build_ptx::{self, Demands, Kernel};
use crate::process;
use crate::ptxas::{PINNED_VERSION, Ptxas};

const TABLE: &str = "kernels-gpu/registers.txt";

/// Registers by `module gpu entry`.
type Registers = BTreeMap<String, u32>;

/// Compares with the committed table, or writes it.
pub fn run(bless: bool) -> anyhow::Result<()> {
    let kernels = build_ptx::run(Demands { ptxas: true, no_warnings: true })?;
    let pinned = Ptxas::find().is_some_and(|ptxas| ptxas.is_pinned());
    ensure!(pinned, "{TABLE} belongs to ptxas {PINNED_VERSION}; `cargo xtask setup` gets it");
    let found: Registers = kernels
        .iter()
        .map(|Kernel { module, gpu, usage }| (format!("{module} {gpu} {}", usage.entry), usage.registers))
        .collect();
    let path = process::root().join(TABLE);
    if bless {
        fs::write(&path, format(&found)).with_context(|| format!("cannot write {TABLE}"))?;
        println!("{TABLE}: {} kernels written", found.len());
        return Ok(());
    }
    let text = fs::read_to_string(&path)
        .with_context(|| format!("cannot read {TABLE}; `cargo xtask check-ptx --bless` writes it"))?;
    let expected = parse(&text)?;
    let problems = compare(&expected, &found);
    if !problems.is_empty() {
        bail!(
            "kernels differ from {TABLE}:\n  {}\nif that is meant: `cargo xtask check-ptx --bless`",
            problems.join("\n  ")
        );
    }
    println!("{TABLE}: {} kernels, none with more registers", found.len());
    Ok(())
}

fn format(registers: &Registers) -> String {
    let mut text = format!(
        "# Registers of a thread by ptxas {PINNED_VERSION}: module, GPU, kernel, registers. Written by `cargo xtask check-ptx --bless`.\n"
    );
    for (kernel, count) in registers {
        text += &format!("{kernel} {count}\n");
    }
    text
}

fn parse(text: &str) -> anyhow::Result<Registers> {
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let entry = |line: &str| {
        let (kernel, count) = line.rsplit_once(' ')?;
        Some((kernel.to_owned(), count.parse().ok()?))
    };
    lines
        .map(|line| entry(line).with_context(|| format!("{TABLE}: {line:?} is not `module gpu kernel registers`")))
        .collect()
}

fn compare(expected: &Registers, found: &Registers) -> Vec<String> {
    let missing =
        expected.keys().filter(|kernel| !found.contains_key(*kernel)).map(|kernel| format!("{kernel}: missing"));
    let changed = found.iter().filter_map(|(kernel, count)| match expected.get(kernel) {
        None => Some(format!("{kernel}: new, {count} registers")),
        Some(old) if count > old => Some(format!("{kernel}: {count} registers, {old} before")),
        Some(_) => None,
    });
    missing.chain(changed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers(entries: &[(&str, u32)]) -> Registers {
        entries.iter().map(|(kernel, count)| ((*kernel).to_owned(), *count)).collect()
    }

    #[test]
    fn table_survives_a_round_trip() {
        let table = registers(&[("hopper sm_90a gemm", 168), ("portable sm_80 gemm", 254)]);
        assert_eq!(parse(&format(&table)).unwrap(), table);
        assert!(parse("portable sm_80 gemm many\n").is_err());
    }

    #[test]
    fn missing_new_and_growing_kernels_are_problems() {
        let expected = registers(&[("a", 10), ("b", 10), ("c", 10), ("d", 10)]);
        let found = registers(&[("a", 10), ("b", 9), ("c", 11), ("e", 1)]);
        assert_eq!(compare(&expected, &found), ["d: missing", "c: 11 registers, 10 before", "e: new, 1 registers"]);
        assert!(compare(&expected, &expected).is_empty());
    }
}
