//! Tables of comparisons.
use attn_backward::compare::Comparison;
use comfy_table::{CellAlignment, Table, presets::UTF8_BORDERS_ONLY};

/// The comparisons of one run of one case.
pub struct CaseReport {
    /// Name of the case.
    pub case: String,
    /// What computed it.
    pub backend: String,
    /// One per gradient.
    pub comparisons: Vec<Comparison>,
    /// Smallest matched ratio that passes.
    pub required_match_ratio: f64,
    /// Largest normwise error that passes, where one is promised.
    pub max_normwise_error: Option<f64>,
}

impl CaseReport {
    /// Whether every gradient passes.
    pub fn passes(&self) -> bool {
        self.comparisons.iter().all(|c| self.comparison_passes(c))
    }

    fn comparison_passes(&self, comparison: &Comparison) -> bool {
        comparison.passes(self.required_match_ratio)
            && self.max_normwise_error.is_none_or(|most| comparison.normwise_error <= most)
    }

    /// One line for each gradient that fails.
    pub fn failures(&self) -> Vec<String> {
        let failed = self.comparisons.iter().filter(|c| !self.comparison_passes(c));
        failed.map(|c| format!("{} on {}: {}", self.case, self.backend, describe(self, c))).collect()
    }
}

/// What is wrong with a gradient, in one line.
fn describe(report: &CaseReport, c: &Comparison) -> String {
    if c.non_finite > 0 {
        let first = c.first_non_finite.unwrap_or(0);
        return format!("{}: {} elements are not finite, the first at flat index {first}", c.name, c.non_finite);
    }
    if c.all_zero {
        return format!("{}: zero everywhere, and the reference is not", c.name);
    }
    if c.matched_ratio < report.required_match_ratio {
        let (ratio, needed) = (c.matched_ratio, report.required_match_ratio);
        return format!("{}: {ratio:.4} of the elements match, {needed} needed", c.name);
    }
    let most = report.max_normwise_error.unwrap_or(f64::INFINITY);
    format!("{}: normwise error {:.2e}, at most {most:.1e} allowed", c.name, c.normwise_error)
}

/// A normwise error, `-` where the reference is zero up to rounding and a ratio to it means nothing (grad_k_bias).
fn normwise(error: f64) -> String {
    if error > 1e3 { "-".into() } else { format!("{error:.2e}") }
}

/// A table with a row per case and run, and for each gradient its matched ratio, worst absolute error and normwise error.
pub fn table(reports: &[CaseReport]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_BORDERS_ONLY);
    let Some(first) = reports.first() else { return table };
    let outputs = first.comparisons.iter().map(|c| c.name.trim_start_matches("grad_").replace('_', "\n"));
    let header = ["case".to_string(), "on".to_string(), "".to_string()];
    let header = header.into_iter().chain(outputs).chain(["".to_string()]);
    table.set_header(header.collect::<Vec<_>>());
    for report in reports {
        let cells = report
            .comparisons
            .iter()
            .map(|c| format!("{:.4}\n{:.1e}\n{:.1e}", c.matched_ratio, c.worst_abs_error, c.normwise_error));
        let verdict = if report.passes() { "ok" } else { "FAIL" };
        let labels = "matched\nworst abs\nnormwise".to_string();
        let row =
            [report.case.clone(), report.backend.clone(), labels].into_iter().chain(cells).chain([verdict.to_string()]);
        table.add_row(row.collect::<Vec<_>>());
    }
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// One line per backend and gradient: the lowest matched ratio and the largest normwise error over the cases.
pub fn extremes(reports: &[CaseReport]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_BORDERS_ONLY);
    table.set_header(["on", "gradient", "lowest matched", "largest normwise error"]);
    let mut backends: Vec<&str> = reports.iter().map(|r| r.backend.as_str()).collect();
    backends.dedup();
    backends.sort_unstable();
    backends.dedup();
    for backend in backends {
        let of_backend = || reports.iter().filter(|r| r.backend == backend);
        let Some(first) = of_backend().next() else { continue };
        for (index, comparison) in first.comparisons.iter().enumerate() {
            let each = || of_backend().map(|r| &r.comparisons[index]);
            let lowest = each().map(|c| c.matched_ratio).fold(1.0, f64::min);
            let largest = each().map(|c| c.normwise_error).fold(0.0, f64::max);
            table.add_row([backend.to_string(), comparison.name.clone(), format!("{lowest:.4}"), normwise(largest)]);
        }
    }
    table
}
