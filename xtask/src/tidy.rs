//! `tidy`: the style that neither rustfmt nor clippy knows.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use walkdir::WalkDir;

use crate::process::root;

/// A source file with more lines has more than one job.
const MAX_LINES: usize = 700;

/// What the head of a kernel's file states, in this order, under these words.
const KERNEL_HEAD: [&str; 7] = ["Formula", "Grid", "Block", "Shared", "Registers", "Preconditions", "Rounding"];

/// Leftovers, in two halves so that this file has none.
const LEFTOVERS: [(&str, &str); 7] = [
    ("TO", "DO"),
    ("FIX", "ME"),
    ("db", "g!("),
    ("to", "do!("),
    ("unimpl", "emented!("),
    ("#[ign", "ore"),
    ("```ign", "ore"),
];

/// Where only this or that machine has something.
const MACHINE_PATHS: [(&str, &str); 5] = [("/wo", "rk/"), ("/ro", "ot/"), ("/ho", "me/"), ("/op", "t/"), ("/tm", "p/")];

/// Checks every text file of the project.
pub fn run() -> anyhow::Result<()> {
    let mut problems = Vec::new();
    let mut count = 0;
    let walk = WalkDir::new(root()).sort_by_file_name().into_iter().filter_entry(|entry| {
        let name = entry.file_name();
        name != "target" && name != ".git" && name != "Cargo.lock"
    });
    for entry in walk {
        let entry = entry?;
        if !entry.file_type().is_file() {
            continue;
        }
        let bytes = fs::read(entry.path()).with_context(|| format!("cannot read {}", entry.path().display()))?;
        let Ok(text) = String::from_utf8(bytes) else { continue };
        let path = entry.path().strip_prefix(root()).expect("walkdir yields paths below its root");
        count += 1;
        problems.extend(check(path, &text).into_iter().map(|problem| format!("{}{problem}", path.display())));
    }
    if !problems.is_empty() {
        bail!("{} problems of style:\n{}", problems.len(), problems.join("\n"));
    }
    println!("{count} files are tidy");
    Ok(())
}

/// What is wrong with the file: `:line: reason`, or `: reason`.
fn check(path: &Path, text: &str) -> Vec<String> {
    let is_rust = path.extension().is_some_and(|extension| extension == "rs");
    let mut problems = Vec::new();
    if text.contains('\r') {
        problems.push(": carriage returns; lines end with LF".to_owned());
    }
    for (line, index) in text.lines().zip(1..) {
        let mut problem = |reason: &str| problems.push(format!(":{index}: {reason}"));
        if line.ends_with([' ', '\t']) {
            problem("space at the end");
        }
        if let Some((first, second)) =
            MACHINE_PATHS.iter().find(|(first, second)| has_path(line, &format!("{first}{second}")))
        {
            problem(&format!("{first}{second} is a path of one machine"));
        }
        if is_rust {
            if let Some((first, second)) =
                LEFTOVERS.iter().find(|(first, second)| line.contains(&format!("{first}{second}")))
            {
                problem(&format!("{first}{second} is left over"));
            }
            if is_code_in_comment(line) {
                problem("commented-out code");
            }
        }
    }
    if is_rust {
        let lines = text.lines().count();
        if lines > MAX_LINES {
            problems.push(format!(": {lines} lines, at most {MAX_LINES}"));
        }
        if path.starts_with("kernels-gpu/src/kernel")
            && text.lines().any(|line| line.trim_start().starts_with("#[kernel("))
        {
            problems.extend(kernel_head_problem(text));
        }
    }
    problems
}

/// Whether `line` names something below the folder `path`.
fn has_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(start, _)| {
        let before = line[..start].chars().next_back();
        before.is_none_or(|before| !before.is_alphanumeric() && !"._-/~*}".contains(before))
    })
}

/// Whether a comment on a line of its own reads as a statement.
fn is_code_in_comment(line: &str) -> bool {
    let Some(text) = line.trim_start().strip_prefix("// ") else { return false };
    let text = text.trim();
    let is_statement =
        text.ends_with(';') && (text.contains(" = ") || text.ends_with(");") || text.starts_with("use "));
    let opens_block = text.ends_with('{')
        && ["if ", "for ", "while ", "fn ", "pub ", "let ", "match ", "impl "]
            .iter()
            .any(|word| text.starts_with(word));
    is_statement || opens_block || ["}", "})", "});", "};"].contains(&text)
}

/// The first section that the head of a kernel's file lacks or has out of order.
fn kernel_head_problem(text: &str) -> Option<String> {
    let head: String = text.lines().map_while(|line| line.strip_prefix("//!")).collect::<Vec<_>>().join("\n");
    let mut rest = head.as_str();
    for section in KERNEL_HEAD {
        let Some((_, after)) = rest.split_once(section) else {
            let order = KERNEL_HEAD.join(", ");
            return Some(format!(": the file head has no `{section}` in its place; it states, in this order: {order}"));
        };
        rest = after;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(path: &str, text: &str) -> Vec<String> {
        check(Path::new(path), text)
    }

    #[test]
    fn clean_file_has_no_problem() {
        assert!(problems("host/src/lib.rs", "//! Fine.\n\n// A reason; another one.\nfn f() {}\n").is_empty());
        assert!(problems("README.md", "See [docs](docs/home/index.md), `/usr/bin/rustc`.\n").is_empty());
    }

    #[test]
    fn each_leftover_is_found() {
        let leftovers = LEFTOVERS.iter().map(|(first, second)| format!("{first}{second}"));
        let paths = MACHINE_PATHS.iter().map(|(first, second)| format!("\"{first}{second}x\""));
        let others = ["// let x = 3;", "// f(x);", "// if x {", "// }", "let x = 3; "].map(String::from);
        for line in leftovers.chain(paths).chain(others) {
            assert_eq!(problems("a.rs", &format!("{line}\n")).len(), 1, "{line}");
        }
        assert_eq!(problems("a.txt", "a\r\n").len(), 1);
        assert_eq!(problems("a.rs", &"//\n".repeat(MAX_LINES + 1)).len(), 1);
    }

    #[test]
    fn kernel_head_needs_every_section_in_order() {
        let head =
            |sections: &[&str]| sections.iter().map(|section| format!("//! **{section}.** ..\n")).collect::<String>();
        let kernel = "#[kernel(max_threads = 32, min_blocks_per_sm = 1, barriers = 0)]\n";
        let path = "kernels-gpu/src/kernel/fill.rs";
        assert!(problems(path, &(head(&KERNEL_HEAD) + kernel)).is_empty());
        assert_eq!(problems(path, &(head(&KERNEL_HEAD[1..]) + kernel)).len(), 1);
        let mut swapped = KERNEL_HEAD;
        swapped.swap(1, 2);
        assert_eq!(problems(path, &(head(&swapped) + kernel)).len(), 1);
        // No kernel, no head.
        assert!(problems(path, &head(&[])).is_empty());
    }
}
