//! `check`: the public suites and random cases against the f64 reference.
use std::process::ExitCode;

use attn_backward::compare::compare_all;
use attn_backward::cross::Precision;
use attn_backward::gpu::ModuleKind;
use attn_backward::suite::{self, AudioCase, CrossCase};
use attn_backward::{Device, DeviceName, Error, audio, cross};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};

use super::device::{self, Module};
use super::output;
use super::report::{self, CaseReport};

/// Normwise error that `High` promises for every gradient of operation B.
const MAX_HIGH_ERROR: f64 = 3e-6;

/// Which operations to check or time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// Operation A.
    Audio,
    /// Operation B.
    Cross,
    /// Both.
    All,
}

impl Suite {
    pub fn has(self, operation: Suite) -> bool {
        self == Suite::All || self == operation
    }
}

/// `--precision` values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PrecisionName {
    /// 11-bit operands, TF32's accuracy.
    Fast,
    /// 22-bit operands, near fp32.
    High,
}

impl From<PrecisionName> for Precision {
    fn from(name: PrecisionName) -> Precision {
        match name {
            PrecisionName::Fast => Precision::Fast,
            PrecisionName::High => Precision::High,
        }
    }
}

/// Options of `check`.
#[derive(clap::Args)]
pub struct Args {
    /// Operations to check.
    #[arg(long, value_enum, default_value = "all")]
    suite: Suite,
    /// cpu or cuda:N; by default the first GPU, or the CPU where there is none.
    #[arg(long)]
    device: Option<DeviceName>,
    /// Kernel modules to check on a GPU, separated by commas; by default every one that runs on it.
    #[arg(long, value_enum, value_delimiter = ',')]
    module: Vec<Module>,
    /// Precision modes of operation B to check on a GPU, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "fast,high")]
    precision: Vec<PrecisionName>,
    /// Seed of the inputs.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Random cases of each operation beside the suite's.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16))]
    random: u16,
    /// Cases of each suite to check by position from 0, separated by commas; by default all.
    #[arg(long, value_delimiter = ',')]
    cases: Option<Vec<usize>>,
}

impl Args {
    /// The suite's cases that were asked for.
    fn chosen<Case: Clone>(&self, suite: Vec<Case>) -> Result<Vec<Case>, Error> {
        let Some(positions) = &self.cases else { return Ok(suite) };
        let case = |&position: &usize| {
            suite.get(position).cloned().ok_or_else(|| Error::Unsupported {
                argument: "cases",
                value: position.to_string(),
                supported: format!("positions below {}", suite.len()),
            })
        };
        positions.iter().map(case).collect()
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let devices = open_devices(device::choose(args.device), &args.module)?;
    let mut passed = true;
    if args.suite.has(Suite::Audio) {
        let mut cases = args.chosen(suite::audio_cases())?;
        cases.extend(suite::random_audio_cases(args.seed, args.random.into()));
        let progress = progress_bar("operation A", cases.len());
        let mut reports = Vec::new();
        for case in &cases {
            reports.extend(check_audio(case, args.seed, &devices)?);
            progress.inc(1);
        }
        progress.finish_and_clear();
        passed &= print("operation A, audio-encoder attention", &reports)?;
    }
    if args.suite.has(Suite::Cross) {
        let mut cases = args.chosen(suite::cross_cases())?;
        cases.extend(suite::random_cross_cases(args.seed, args.random.into()));
        let progress = progress_bar("operation B", cases.len());
        let mut reports = Vec::new();
        for case in &cases {
            reports.extend(check_cross(case, args.seed, &devices, &args.precision)?);
            progress.inc(1);
        }
        progress.finish_and_clear();
        passed &= print("operation B, cross-attention QKV projection", &reports)?;
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The device once for each module.
fn open_devices(name: DeviceName, modules: &[Module]) -> Result<Vec<Device>, Error> {
    if !modules.is_empty() {
        return modules.iter().map(|&module| Device::open(name, Some(module.into()))).collect();
    }
    let best = Device::open(name, None)?;
    let mut devices = Vec::new();
    if let Device::Gpu { module: ModuleKind::Hopper, .. } = best {
        devices.push(Device::open(name, Some(ModuleKind::Portable))?);
    }
    devices.push(best);
    Ok(devices)
}

fn check_audio(case: &AudioCase, seed: u64, devices: &[Device]) -> Result<Vec<CaseReport>, Error> {
    let inputs = case.inputs(seed);
    let reference = audio::reference::backward(&inputs)?;
    let one = |device: &Device| {
        let gradients = audio::backward(device, &inputs)?;
        Ok(CaseReport {
            case: case.name.clone(),
            backend: backend(device, None),
            comparisons: compare_all(&gradients.tensors(), &reference.tensors(), &case.tolerance)?,
            required_match_ratio: case.tolerance.required_match_ratio,
            max_normwise_error: None,
        })
    };
    devices.iter().map(one).collect()
}

fn check_cross(
    case: &CrossCase,
    seed: u64,
    devices: &[Device],
    precisions: &[PrecisionName],
) -> Result<Vec<CaseReport>, Error> {
    let inputs = case.inputs(seed);
    let reference = cross::reference::backward(&inputs)?;
    let mut reports = Vec::new();
    for device in devices {
        // The CPU has one arithmetic for both modes.
        let modes: Vec<Precision> = match device {
            Device::Cpu => vec![Precision::High],
            Device::Gpu { .. } => precisions.iter().map(|&p| p.into()).collect(),
        };
        for precision in modes {
            let gradients = cross::backward(device, &inputs, precision)?;
            reports.push(CaseReport {
                case: case.name.clone(),
                backend: backend(device, Some(precision)),
                comparisons: compare_all(&gradients.tensors(), &reference.tensors(), &case.tolerance)?,
                required_match_ratio: case.tolerance.required_match_ratio,
                max_normwise_error: (precision == Precision::High).then_some(MAX_HIGH_ERROR),
            });
        }
    }
    Ok(reports)
}

/// Short name of what computes, for tables.
pub fn backend(device: &Device, precision: Option<Precision>) -> String {
    match (device, precision) {
        (Device::Cpu, _) => "cpu".into(),
        (Device::Gpu { module, .. }, None) => module.to_string(),
        (Device::Gpu { module, .. }, Some(precision)) => format!("{module}, {precision}"),
    }
}

fn print(title: &str, reports: &[CaseReport]) -> Result<bool, Error> {
    output::line(format_args!(
        "{title}: share of elements inside the suite's tolerance, worst absolute error, ||out - ref|| / ||ref|| of each gradient"
    ))?;
    output::line(report::table(reports))?;
    output::line(report::extremes(reports))?;
    let failures: Vec<String> = reports.iter().flat_map(CaseReport::failures).collect();
    for failure in &failures {
        output::line(format_args!("FAIL {failure}"))?;
    }
    let failed = reports.iter().filter(|r| !r.passes()).count();
    output::line(format_args!("{title}: {} passed, {failed} failed\n", reports.len() - failed))?;
    Ok(failures.is_empty())
}

/// A progress bar on stderr, hidden where that is not a terminal.
pub fn progress_bar(label: &'static str, len: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} {bar:40} {pos}/{len} {elapsed} {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(len as u64).with_style(style).with_prefix(label)
}
