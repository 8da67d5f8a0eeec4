//! From LLVM's PTX to the PTX that is loaded: launch bounds, parameter alignment, checks.

use std::collections::BTreeSet;

use crate::PtxError;

/// An entry point of a PTX module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name to look the function up by.
    pub name: String,
    /// Size of its one parameter.
    pub param_bytes: u32,
    /// Threads of the largest block (`.maxntid`).
    pub max_threads: u32,
    /// Blocks that fit on one SM (`.minnctapersm`).
    pub min_blocks_per_sm: u32,
    /// Block-wide barrier instructions.
    pub barriers: u32,
    /// Blocks of a cluster (`.reqnctapercluster`); 1: the entry has no clusters.
    pub cluster_size: u32,
}

/// Parameters larger than this may hold tensor maps.
const LARGE_PARAM_BYTES: u32 = 128;
/// Alignment of a `CUtensorMap`; rustc gives a by-value struct at most 16.
const TENSOR_MAP_ALIGN: u32 = 64;
/// Start of the comment that `#[kernel]` leaves.
const MARKER: &str = "// kernel max_threads=";

/// Launch bounds as `#[kernel]` states them.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Marker<'a> {
    text: &'a str,
    max_threads: u32,
    min_blocks_per_sm: u32,
    barriers: u32,
    cluster_size: u32,
}

/// `text` with `.maxntid`, `.minnctapersm` and, where there are clusters, `.reqnctapercluster` after each entry's parameter list and with large parameters aligned for tensor maps, and the
/// entries. Processing the result again changes nothing.
pub(crate) fn process(text: &str) -> Result<(String, Vec<Entry>), PtxError> {
    let lines: Vec<&str> = text.lines().collect();
    let mut out = String::with_capacity(text.len() + 4096);
    let mut entries = Vec::new();
    let mut names = BTreeSet::new();
    let mut next = 0;
    while next < lines.len() {
        let first = next;
        let is_entry = code(lines[first]).starts_with(".visible .entry ");
        let is_function = !is_entry && code(lines[first]).split_whitespace().any(|word| word == ".func");
        if !is_entry && !is_function {
            out += lines[first];
            out.push('\n');
            next += 1;
            continue;
        }
        let (body, end) = extent(&lines, first)?;
        next = end;
        let barriers = lines[body..end].iter().map(|line| barriers_in_line(line)).sum();
        if is_entry {
            let entry = write_entry(&lines, first, body, end, barriers, &mut out)?;
            if !names.insert(entry.name.clone()) {
                return Err(PtxError::DuplicateEntry { entry: entry.name });
            }
            entries.push(entry);
        } else if barriers > 0 {
            return Err(PtxError::BarrierInFunction { function: code(lines[first]).into() });
        } else {
            for line in &lines[first..end] {
                out += line;
                out.push('\n');
            }
        }
    }
    if entries.is_empty() {
        return Err(PtxError::NoEntry);
    }
    Ok((out, entries))
}

/// Block-wide barriers (`bar.sync`, `barrier.sync`, their `.cta` and `.red` forms) in PTX text.
pub fn count_barriers(text: &str) -> u32 {
    text.lines().map(barriers_in_line).sum()
}

fn barriers_in_line(line: &str) -> u32 {
    let is_barrier = |statement: &str| {
        // A label and a predicate may stand before the instruction.
        let mut words =
            statement.split_whitespace().skip_while(|word| word.starts_with(['@', '{']) || word.ends_with(':'));
        let Some((name, operation)) = words.next().and_then(|opcode| opcode.split_once('.')) else { return false };
        let operation = operation.strip_prefix("cta.").unwrap_or(operation);
        ["bar", "barrier"].contains(&name) && ["sync", "red"].iter().any(|known| operation.starts_with(known))
    };
    code(line).split(';').filter(|statement| is_barrier(statement)).count() as u32
}

/// `line` without its comment and surrounding space.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default().trim()
}

/// For the function whose first line is `first`: the line of its opening brace and the line after its end. For a declaration, which has no
/// body, both are the line after its `;`.
fn extent(lines: &[&str], first: usize) -> Result<(usize, usize), PtxError> {
    let mut depth = 0_i32;
    let mut body = None;
    for (index, line) in lines.iter().enumerate().skip(first) {
        let code = code(line);
        if body.is_none() && !code.contains('{') && code.ends_with(';') {
            return Ok((index + 1, index + 1));
        }
        if code.contains('{') {
            body.get_or_insert(index);
        }
        depth += code.matches('{').count() as i32 - code.matches('}').count() as i32;
        if let (Some(body), 0) = (body, depth) {
            return Ok((body, index + 1));
        }
    }
    Err(malformed(lines, first, "the function has no end"))
}

fn malformed(lines: &[&str], index: usize, reason: &'static str) -> PtxError {
    PtxError::Malformed { line: index + 1, text: lines[index].into(), reason }
}

/// Writes the entry of lines `first..end`, whose body begins at `body`.
fn write_entry(
    lines: &[&str],
    first: usize,
    body: usize,
    end: usize,
    found_barriers: u32,
    out: &mut String,
) -> Result<Entry, PtxError> {
    let rest = code(lines[first]).trim_start_matches(".visible .entry ");
    let Some((name, _)) = rest.split_once('(') else {
        return Err(malformed(lines, first, "expected `name(`"));
    };
    let name = name.trim().to_owned();

    let mut params = Vec::new();
    for (index, line) in lines.iter().enumerate().take(body).skip(first) {
        let code = code(line);
        if code.starts_with(".param") {
            let (line, bytes) =
                param(line).ok_or_else(|| malformed(lines, index, "not a parameter that is understood"))?;
            out.push_str(&line);
            params.push(bytes);
        } else if [".maxntid", ".minnctapersm", ".explicitcluster", ".reqnctapercluster"]
            .iter()
            .any(|d| code.starts_with(d))
        {
            continue;
        } else {
            out.push_str(line);
        }
        out.push('\n');
    }
    let &[param_bytes] = params.as_slice() else {
        return Err(PtxError::Parameters { entry: name, found: params.len() });
    };

    if let Some(call) = lines[body..end].iter().map(|line| code(line)).find(|code| code.starts_with("call")) {
        return Err(PtxError::Call { entry: name, call: call.into() });
    }

    let mut marker: Option<Marker> = None;
    for (index, line) in lines.iter().enumerate().take(end).skip(body) {
        let Some(found) = line.find(MARKER).map(|start| line[start..].trim_end()) else { continue };
        let found = parse_marker(found).ok_or_else(|| malformed(lines, index, "not a marker of #[kernel]"))?;
        match marker {
            None => marker = Some(found),
            Some(first) if first == found => {}
            Some(first) => {
                return Err(PtxError::MarkersDiffer {
                    entry: name,
                    first: first.text.into(),
                    second: found.text.into(),
                });
            }
        }
    }
    let Some(Marker { max_threads, min_blocks_per_sm, barriers, cluster_size, .. }) = marker else {
        return Err(PtxError::NoMarker { entry: name });
    };
    if barriers != found_barriers {
        return Err(PtxError::Barriers { entry: name, declared: barriers, found: found_barriers });
    }

    out.push_str(&format!(".maxntid {max_threads}, 1, 1\n.minnctapersm {min_blocks_per_sm}\n"));
    if cluster_size > 1 {
        out.push_str(&format!(".explicitcluster\n.reqnctapercluster {cluster_size}, 1, 1\n"));
    }
    for line in &lines[body..end] {
        out.push_str(line);
        out.push('\n');
    }
    Ok(Entry { name, param_bytes, max_threads, min_blocks_per_sm, barriers, cluster_size })
}

/// The line of a parameter, realigned if it may hold tensor maps, and its size in bytes.
fn param(line: &str) -> Option<(String, u32)> {
    let code = code(line);
    let words: Vec<&str> = code.split_whitespace().collect();
    let [".param", rest @ ..] = words.as_slice() else { return None };
    match rest {
        [".align", align, ".b8", array] => {
            let bytes = array.split_once('[')?.1.split_once(']')?.0.parse().ok()?;
            let align: u32 = align.parse().ok()?;
            if bytes <= LARGE_PARAM_BYTES || align >= TENSOR_MAP_ALIGN {
                return Some((line.into(), bytes));
            }
            Some((format!("\t.param .align {TENSOR_MAP_ALIGN} .b8 {array}"), bytes))
        }
        [scalar, _] => {
            let bits: u32 = scalar.trim_start_matches(['.', 'b', 'u', 's', 'f']).parse().ok()?;
            Some((line.into(), bits / 8))
        }
        _ => None,
    }
}

fn parse_marker(text: &str) -> Option<Marker<'_>> {
    let mut values = text.strip_prefix("// kernel ")?.split(' ');
    let mut value = |name: &str| values.next()?.strip_prefix(name)?.strip_prefix('=')?.parse().ok();
    let max_threads = value("max_threads")?;
    let min_blocks_per_sm = value("min_blocks_per_sm")?;
    let barriers = value("barriers")?;
    let cluster_size = value("cluster_size")?;
    Some(Marker { text, max_threads, min_blocks_per_sm, barriers, cluster_size })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A module with one entry that has `param` and `body`.
    fn module(param: &str, body: &str) -> String {
        format!(
            "//\n// Generated by LLVM NVPTX Back-End\n//\n\n.version 7.0\n.target sm_80\n.address_size 64\n\n\
             .extern .func  (.param .b32 func_retval0) vprintf\n(\n\t.param .b64 vprintf_param_0,\n\t.param .b64 vprintf_param_1\n)\n;\n\
             \t// .globl\tadd                     // -- Begin function add\n.visible .entry add(\n{param}\n)\n{{\n\t.reg .b32 \t%r<5>;\n\
             {body}\n\tret;\n}}\n"
        )
    }

    const PARAM: &str = "\t.param .align 8 .b8 add_param_0[24]";
    const MARK: &str = "\t// begin inline asm\n\t// kernel max_threads=256 min_blocks_per_sm=2 barriers=1 cluster_size=1\n\t// end inline asm";

    #[test]
    fn launch_bounds_follow_the_parameter_list() {
        let (ptx, entries) = process(&module(PARAM, &format!("{MARK}\n\tbarrier.sync 0;"))).unwrap();
        assert!(ptx.contains("add_param_0[24]\n)\n.maxntid 256, 1, 1\n.minnctapersm 2\n{\n"), "{ptx}");
        let name = "add".to_owned();
        let add = Entry { name, param_bytes: 24, max_threads: 256, min_blocks_per_sm: 2, barriers: 1, cluster_size: 1 };
        assert_eq!(entries, [add]);
    }

    #[test]
    fn entries_have_the_clusters_of_their_markers() {
        let mark = MARK.replace("cluster_size=1", "cluster_size=2");
        let (ptx, entries) = process(&module(PARAM, &format!("{mark}\n\tbarrier.sync 0;"))).unwrap();
        let directives = ".maxntid 256, 1, 1\n.minnctapersm 2\n.explicitcluster\n.reqnctapercluster 2, 1, 1\n{\n";
        assert!(ptx.contains(directives), "{ptx}");
        assert_eq!(entries[0].cluster_size, 2);
        assert_eq!(process(&ptx).unwrap(), (ptx, entries));
    }

    #[test]
    fn processing_again_changes_nothing() {
        let large = "\t.param .align 16 .b8 add_param_0[648]";
        let once = process(&module(large, &format!("{MARK}\n{MARK}\n\tbar.sync \t0;"))).unwrap();
        assert_eq!(process(&once.0).unwrap(), once);
    }

    #[test]
    fn only_large_parameters_are_realigned() {
        for (param, expected, bytes) in [
            ("\t.param .align 16 .b8 add_param_0[648]", "\t.param .align 64 .b8 add_param_0[648]\n", 648),
            ("\t.param .align 16 .b8 add_param_0[128]", "\t.param .align 16 .b8 add_param_0[128]\n", 128),
            ("\t.param .align 128 .b8 add_param_0[256]", "\t.param .align 128 .b8 add_param_0[256]\n", 256),
            ("\t.param .b64 add_param_0", "\t.param .b64 add_param_0\n", 8),
        ] {
            let (ptx, entries) = process(&module(param, &format!("{MARK}\n\tbar.sync 0;"))).unwrap();
            assert!(ptx.contains(expected), "{ptx}");
            assert_eq!(entries[0].param_bytes, bytes);
        }
    }

    #[test]
    fn each_broken_rule_is_named() {
        let entry = || "add".to_owned();
        let bar = format!("{MARK}\n\tbar.sync 0;");
        let error = |param: &str, body: &str| process(&module(param, body)).unwrap_err();
        assert_eq!(error(PARAM, "\tbar.sync 0;"), PtxError::NoMarker { entry: entry() });
        assert_eq!(error("", &bar), PtxError::Parameters { entry: entry(), found: 0 });
        assert_eq!(
            error(&format!("{PARAM},\n\t.param .b32 add_param_1"), &bar),
            PtxError::Parameters { entry: entry(), found: 2 }
        );
        assert_eq!(error(PARAM, MARK), PtxError::Barriers { entry: entry(), declared: 1, found: 0 });
        let copied = PtxError::Barriers { entry: entry(), declared: 1, found: 2 };
        assert_eq!(error(PARAM, &format!("{bar}\n@%p1 bra $L1;\n\tbar.sync 0;")), copied);
        let panics = format!("{bar}\n\tcall.uni panic, ();");
        assert_eq!(error(PARAM, &panics), PtxError::Call { entry: entry(), call: "call.uni panic, ();".into() });
        let other = MARK.replace("256", "128");
        assert!(matches!(error(PARAM, &format!("{bar}\n{other}")), PtxError::MarkersDiffer { .. }));
        assert!(matches!(error(PARAM, &bar.replace("barriers=1", "barriers=")), PtxError::Malformed { .. }));
        assert_eq!(process(".version 7.0\n").unwrap_err(), PtxError::NoEntry);
        let twice = module(PARAM, &bar).repeat(2);
        assert_eq!(process(&twice).unwrap_err(), PtxError::DuplicateEntry { entry: entry() });
        let function = ".func helper(\n\t.param .b32 helper_param_0\n)\n{\n\tbar.sync 0;\n\tret;\n}\n";
        let with_function = module(PARAM, &bar) + function;
        assert!(matches!(process(&with_function).unwrap_err(), PtxError::BarrierInFunction { .. }));
    }

    #[test]
    fn barriers_are_counted_in_every_spelling() {
        let text = "\tbar.sync 0;\n\tbarrier.sync 1, 128;\n@%p1 bar.cta.sync 0;\n\tbarrier.cta.red.popc.u32 %r1, 0, %p1;\n\
                    { .reg .b32 t; bar.sync 2; }\n\tbar.warp.sync 0xffffffff;\n\tbar.arrive 1, 128;\n\tmbarrier.init.shared.b64 [%r1], 1;\n\
                    // bar.sync 0;\n";
        assert_eq!(count_barriers(text), 5);
    }

    #[test]
    fn braces_in_a_body_do_not_end_it() {
        let body =
            format!("{MARK}\n\t{{ .reg .b32 t;\n\tmov.b32 t, 0;\n}}\n\tmov.b64 {{%r1, %r2}}, %rd1;\n\tbar.sync 0;");
        assert_eq!(process(&module(PARAM, &body)).unwrap().1[0].barriers, 1);
    }
}
