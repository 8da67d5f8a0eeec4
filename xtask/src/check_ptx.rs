//! `check-ptx`: no kernel appears, vanishes or takes more registers unnoticed.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, bail};

use crate::build_ptx::{self, Demands, Kernel, Report};
use crate::process;

const TABLE: &str = "kernels-gpu/registers.txt";

/// Registers by `module gpu entry`.
type Registers = BTreeMap<String, u32>;

/// Compares with the committed table, or writes it.
///
/// Counts of other compilers than the table's are not comparable: more registers are then reported and no failure. A kernel that is
/// missing or new is one whatever the compilers.
pub fn run(bless: bool) -> anyhow::Result<()> {
    let Report { kernels, compilers } = build_ptx::run(Demands { ptxas: true, no_warnings: true })?;
    let registers = kernels
        .iter()
        .map(|Kernel { module, gpu, usage }| (format!("{module} {gpu} {}", usage.entry), usage.registers))
        .collect();
    let found = Baseline { compilers, registers };
    let path = process::root().join(TABLE);
    if bless {
        fs::write(&path, found.format()).with_context(|| format!("cannot write {TABLE}"))?;
        println!("{TABLE}: {} kernels written", found.registers.len());
        return Ok(());
    }
    let text = fs::read_to_string(&path)
        .with_context(|| format!("cannot read {TABLE}; `cargo xtask check-ptx --bless` writes it"))?;
    let expected = Baseline::parse(&text)?;
    let mut problems = different_kernels(&expected.registers, &found.registers);
    let growth = growth(&expected.registers, &found.registers);
    if expected.compilers == found.compilers {
        problems.extend(growth);
    } else {
        eprintln!(
            "SKIPPED: {TABLE} is of {}, these kernels are of {}; register growth fails nothing",
            expected.compilers, found.compilers
        );
        growth.iter().for_each(|line| eprintln!("  {line}"));
    }
    if !problems.is_empty() {
        bail!(
            "kernels differ from {TABLE}:\n  {}\nif that is meant: `cargo xtask check-ptx --bless`",
            problems.join("\n  ")
        );
    }
    println!("{TABLE}: {} kernels agree", found.registers.len());
    Ok(())
}

/// The contents of the table.
#[derive(Debug, PartialEq, Eq)]
struct Baseline {
    compilers: String,
    registers: Registers,
}

const NOTE: &str = "# Registers of a thread: module, GPU, kernel, registers. Written by `cargo xtask check-ptx --bless`.\n# Compilers: ";

impl Baseline {
    fn format(&self) -> String {
        let mut text = format!("{NOTE}{}\n", self.compilers);
        for (kernel, count) in &self.registers {
            text += &format!("{kernel} {count}\n");
        }
        text
    }

    fn parse(text: &str) -> anyhow::Result<Baseline> {
        let (compilers, lines) = text
            .strip_prefix(NOTE)
            .and_then(|rest| rest.split_once('\n'))
            .with_context(|| format!("{TABLE} does not start as `check-ptx --bless` writes it"))?;
        let entry = |line: &str| {
            let (kernel, count) = line.rsplit_once(' ')?;
            Some((kernel.to_owned(), count.parse().ok()?))
        };
        let entries = lines
            .lines()
            .map(|line| entry(line).with_context(|| format!("{TABLE}: {line:?} is not `module gpu kernel registers`")));
        Ok(Baseline { compilers: compilers.into(), registers: entries.collect::<anyhow::Result<_>>()? })
    }
}

/// Kernels that only one of the two has.
fn different_kernels(expected: &Registers, found: &Registers) -> Vec<String> {
    let missing =
        expected.keys().filter(|kernel| !found.contains_key(*kernel)).map(|kernel| format!("{kernel}: missing"));
    let new = found.keys().filter(|kernel| !expected.contains_key(*kernel)).map(|kernel| format!("{kernel}: new"));
    missing.chain(new).collect()
}

/// Kernels with more registers than expected.
fn growth(expected: &Registers, found: &Registers) -> Vec<String> {
    let grown = found.iter().filter_map(|(kernel, count)| {
        let old = expected.get(kernel).filter(|old| count > old)?;
        Some(format!("{kernel}: {count} registers, {old} before"))
    });
    grown.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers(entries: &[(&str, u32)]) -> Registers {
        entries.iter().map(|(kernel, count)| ((*kernel).to_owned(), *count)).collect()
    }

    #[test]
    fn table_survives_a_round_trip() {
        let registers = registers(&[("hopper sm_90a gemm", 168), ("portable sm_80 gemm", 254)]);
        let table = Baseline { compilers: "rustc 1.96.0, ptxas 13.0.88".into(), registers };
        assert_eq!(Baseline::parse(&table.format()).unwrap(), table);
        assert!(Baseline::parse(&(table.format() + "portable sm_80 gemm many\n")).is_err());
        assert!(Baseline::parse("portable sm_80 gemm 254\n").is_err());
    }

    #[test]
    fn missing_new_and_growing_kernels_are_found() {
        let expected = registers(&[("a", 10), ("b", 10), ("c", 10), ("d", 10)]);
        let found = registers(&[("a", 10), ("b", 9), ("c", 11), ("e", 1)]);
        assert_eq!(different_kernels(&expected, &found), ["d: missing", "e: new"]);
        assert_eq!(growth(&expected, &found), ["c: 11 registers, 10 before"]);
    }
}
