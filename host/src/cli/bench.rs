//! `bench`: times of the suites on a GPU.
use std::path::PathBuf;
use std::process::ExitCode;

use attn_backward::compare::{Tolerance, compare_all};
use attn_backward::cross::Precision;
use attn_backward::gpu::{Gpu, Graph, L2Flush, ModuleKind, Stream, time_us};
use attn_backward::{Device, DeviceName, Error, Target, Workspace, audio, cross, file, suite};
use comfy_table::{CellAlignment, Table, presets::UTF8_BORDERS_ONLY};
use serde::Serialize;

use super::check::{PrecisionName, Suite, backend, progress_bar};
use super::device::Module;
use super::output;

/// Ceilings of one H200 that floors are computed from (measured: dense 16-bit matrix rate, memory bandwidth).
const MATRIX_FLOPS: f64 = 800e12;
const MEMORY_BYTES: f64 = 4.3e12;

/// Options of `bench`.
#[derive(clap::Args)]
pub struct Args {
    /// Operations to time.
    #[arg(long, value_enum, default_value = "all")]
    suite: Suite,
    /// Only the cases whose name contains this, say `T=1280`.
    #[arg(long, default_value = "")]
    case: String,
    /// cuda:N.
    #[arg(long)]
    device: Option<DeviceName>,
    /// Kernel module; by default the best one for the GPU.
    #[arg(long, value_enum)]
    module: Option<Module>,
    /// Precision modes of operation B, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "fast")]
    precision: Vec<PrecisionName>,
    /// Timed runs of each case; the median is reported.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Sets of different inputs that the runs take in turn.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    input_sets: u64,
    /// Time operation A on long chunks instead of the suites' cases; results are checked against the portable module's.
    #[arg(long)]
    long_chunks: bool,
    /// Write the rows as JSON to this file, or to stdout if it is `-`.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// One timed case.
#[derive(Serialize)]
struct Row {
    operation: &'static str,
    case: String,
    module: String,
    precision: Option<Precision>,
    median_us: f64,
    fastest_us: f64,
    tflop_per_s: f64,
    gb_per_s: f64,
    floor_us: f64,
    percent_of_floor: f64,
    /// The rate exceeds the ceiling that the floor is computed from: the time cannot be right on an H200.
    above_ceiling: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let json_file = args.json.as_deref().filter(|path| path.as_os_str() != "-");
    if let Some(path) = json_file {
        file::check_writable(path)?;
    }
    let name = match args.device {
        Some(DeviceName::Cpu) => {
            let message = "times are those of a GPU; `check --device cpu` runs the CPU implementation";
            return Err(Error::Unsupported { argument: "device", value: "cpu".into(), supported: message.into() });
        }
        Some(name) => name,
        None => match Gpu::count() {
            Ok(1..) => DeviceName::Cuda(0),
            Ok(0) => return Ok(needs_gpu("no CUDA device")),
            Err(error) => return Ok(needs_gpu(error)),
        },
    };
    let device = Device::open(name, args.module.map(Into::into))?;
    let mut rows = Vec::new();
    if args.suite.has(Suite::Audio) {
        rows.extend(bench_audio(args, &device)?);
    }
    if args.suite.has(Suite::Cross) && !args.long_chunks {
        for &precision in &args.precision {
            rows.extend(bench_cross(args, &device, precision.into())?);
        }
    }
    output::line(format_args!("{device}: {} runs, cold L2, CUDA graph, time between events", args.runs))?;
    output::line(table(&rows))?;
    if args.json.is_some() {
        let json = serde_json::to_string_pretty(&rows).expect("rows are strings and numbers");
        match json_file {
            Some(path) => file::write_text(path, &json)?,
            None => output::line(json)?,
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Says why there is nothing to time on.
fn needs_gpu(reason: impl std::fmt::Display) -> ExitCode {
    eprintln!("error: bench needs a GPU: {reason}");
    ExitCode::FAILURE
}

fn bench_audio(args: &Args, device: &Device) -> Result<Vec<Row>, Error> {
    let Device::Gpu { gpu, module } = device else { return Ok(Vec::new()) };
    let mut cases = if args.long_chunks { suite::audio_long_cases() } else { suite::audio_cases() };
    cases.retain(|case| case.name.contains(&args.case));
    let progress = progress_bar("operation A", cases.len());
    let stream = Stream::new(gpu)?;
    let mut l2 = L2Flush::new(gpu)?;
    let mut rows = Vec::new();
    for case in &cases {
        let plan = audio::Plan::new(&case.shape, &case.cu_seqlens, &Target::of(gpu, *module))?;
        let operation = audio::Backward::new(gpu, plan)?;
        let mut gradients = audio::GradientBuffers::allocate(gpu, &stream, &case.shape)?;
        let mut workspace = Workspace::allocate(gpu, operation.plan().workspace().bytes())?;
        let mut sets = Vec::new();
        for seed in 0..args.input_sets {
            let inputs = case.inputs(seed);
            let buffers = audio::InputBuffers::upload(gpu, &inputs)?;
            operation.run(&stream, &buffers.views()?, &mut gradients.views()?, &mut workspace)?;
            let found = gradients.download(&stream)?;
            if args.long_chunks {
                let portable = portable_gradients(gpu, &stream, case, &buffers)?;
                let portable = portable.tensors().map(|(name, tensor)| (name, tensor.mapv(f64::from)));
                let (mut found, mut reference) = (
                    Vec::from(found.tensors()),
                    Vec::from(portable.each_ref().map(|(name, tensor)| (*name, tensor.view()))),
                );
                // it is the rounding noise of either
                found.retain(|(name, _)| *name != "grad_k_bias");
                reference.retain(|(name, _)| *name != "grad_k_bias");
                require(&case.name, &found, &reference, &case.tolerance)?;
            } else {
                let reference = audio::reference::backward(&inputs)?;
                require(&case.name, &found.tensors(), &reference.tensors(), &case.tolerance)?;
            }
            let (inputs, mut outputs) = (buffers.views()?, gradients.views()?);
            let graph = Graph::capture(&stream, || operation.run(&stream, &inputs, &mut outputs, &mut workspace))?;
            sets.push((buffers, graph));
        }
        let times = time_sets(&stream, args.runs, &mut l2, &mut sets)?;
        let flops = audio::flops(&case.shape, case.cu_seqlens.chunk_lens());
        rows.push(row("A", &case.name, device, None, &times, flops, audio::bytes(&case.shape)));
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(rows)
}

/// What the portable module makes of a case: the f64 reference would take minutes.
fn portable_gradients(
    gpu: &Gpu,
    stream: &Stream,
    case: &suite::AudioCase,
    inputs: &audio::InputBuffers,
) -> Result<audio::Gradients, Error> {
    let plan = audio::Plan::new(&case.shape, &case.cu_seqlens, &Target::of(gpu, ModuleKind::Portable))?;
    let operation = audio::Backward::new(gpu, plan)?;
    let mut gradients = audio::GradientBuffers::allocate(gpu, stream, &case.shape)?;
    let mut workspace = Workspace::allocate(gpu, operation.plan().workspace().bytes())?;
    operation.run(stream, &inputs.views()?, &mut gradients.views()?, &mut workspace)?;
    gradients.download(stream)
}

fn bench_cross(args: &Args, device: &Device, precision: Precision) -> Result<Vec<Row>, Error> {
    let Device::Gpu { gpu, module } = device else { return Ok(Vec::new()) };
    let mut cases = suite::cross_cases();
    cases.retain(|case| case.name.contains(&args.case));
    let progress = progress_bar("operation B", cases.len());
    let stream = Stream::new(gpu)?;
    let mut l2 = L2Flush::new(gpu)?;
    let mut rows = Vec::new();
    for case in &cases {
        let operation =
            cross::Backward::new(gpu, cross::Plan::new(&case.shape, precision, &Target::of(gpu, *module))?)?;
        let mut gradients = cross::GradientBuffers::allocate(gpu, &stream, &case.shape)?;
        let mut workspace = Workspace::allocate(gpu, operation.plan().workspace().bytes())?;
        let mut sets = Vec::new();
        for seed in 0..args.input_sets {
            let inputs = case.inputs(seed);
            let buffers = cross::InputBuffers::upload(gpu, &inputs)?;
            operation.run(&stream, &buffers.views()?, &mut gradients.views()?, &mut workspace)?;
            let found = gradients.download(&stream)?;
            let reference = cross::reference::backward(&inputs)?;
            require(&case.name, &found.tensors(), &reference.tensors(), &case.tolerance)?;
            let (inputs, mut outputs) = (buffers.views()?, gradients.views()?);
            let graph = Graph::capture(&stream, || operation.run(&stream, &inputs, &mut outputs, &mut workspace))?;
            sets.push((buffers, graph));
        }
        let times = time_sets(&stream, args.runs, &mut l2, &mut sets)?;
        let (flops, bytes) = (cross::flops(&case.shape), cross::bytes(&case.shape));
        rows.push(row("B", &case.name, device, Some(precision), &times, flops, bytes));
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(rows)
}

/// Refuses to time a wrong result.
fn require<T: num_traits::AsPrimitive<f64> + Sync>(
    case: &str,
    found: &[(&'static str, ndarray::ArrayViewD<'_, T>)],
    reference: &[(&'static str, ndarray::ArrayViewD<'_, f64>)],
    tolerance: &Tolerance,
) -> Result<(), Error> {
    for comparison in compare_all(found, reference, tolerance)? {
        if !comparison.passes(tolerance.required_match_ratio) {
            return Err(Error::WrongResult {
                case: case.into(),
                gradient: comparison.name,
                matched_ratio: comparison.matched_ratio,
                needed: tolerance.required_match_ratio,
            });
        }
    }
    Ok(())
}

/// Times of the sets' graphs, launched in turn; a few more runs warm up.
fn time_sets<B>(stream: &Stream, runs: u32, l2: &mut L2Flush, sets: &mut [(B, Graph)]) -> Result<Vec<f32>, Error> {
    const WARM_UP: usize = 3;
    let mut next = 0;
    let times = time_us(stream, WARM_UP + runs as usize, l2, || {
        let index = next % sets.len();
        next += 1;
        // SAFETY: the set's inputs, the gradients and the workspace are alive, and nothing else uses them.
        unsafe { sets[index].1.launch(stream) }
    })?;
    Ok(times[WARM_UP..].to_vec())
}

fn row(
    operation: &'static str,
    case: &str,
    device: &Device,
    precision: Option<Precision>,
    times: &[f32],
    flops: f64,
    bytes: f64,
) -> Row {
    let median_us = median(times);
    let seconds = median_us * 1e-6;
    let floor_us = (flops / MATRIX_FLOPS).max(bytes / MEMORY_BYTES) * 1e6;
    Row {
        operation,
        case: case.into(),
        module: backend(device, None),
        precision,
        median_us,
        fastest_us: times.iter().fold(f64::INFINITY, |a, &b| a.min(f64::from(b))),
        tflop_per_s: flops / seconds / 1e12,
        gb_per_s: bytes / seconds / 1e9,
        floor_us,
        percent_of_floor: 100.0 * floor_us / median_us,
        above_ceiling: median_us < floor_us,
    }
}

fn median(times: &[f32]) -> f64 {
    let mut sorted: Vec<f64> = times.iter().map(|&t| f64::from(t)).collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) { (sorted[middle - 1] + sorted[middle]) / 2.0 } else { sorted[middle] }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_BORDERS_ONLY);
    table.set_header(["op", "case", "module", "us", "fastest", "floor", "% of floor", "TFLOP/s", "GB/s", ""]);
    let mode = |row: &Row| row.precision.map_or(row.module.clone(), |p| format!("{}, {p}", row.module));
    for row in rows {
        table.add_row([
            row.operation.to_string(),
            row.case.clone(),
            mode(row),
            format!("{:.1}", row.median_us),
            format!("{:.1}", row.fastest_us),
            format!("{:.1}", row.floor_us),
            format!("{:.0}", row.percent_of_floor),
            format!("{:.0}", row.tflop_per_s),
            format!("{:.0}", row.gb_per_s),
            if row.above_ceiling { "ABOVE THE CEILING".into() } else { String::new() },
        ]);
    }
    let mut modes: Vec<(&str, String)> = rows.iter().map(|r| (r.operation, mode(r))).collect();
    modes.dedup();
    for (operation, name) in modes {
        let chosen: Vec<&Row> = rows.iter().filter(|r| r.operation == operation && mode(r) == name).collect();
        let mean = |f: fn(&Row) -> f64| chosen.iter().map(|r| f(r)).sum::<f64>() / chosen.len() as f64;
        let (us, floor) = (mean(|r| r.median_us), mean(|r| r.floor_us));
        table.add_row([
            operation.to_string(),
            format!("mean of {}", chosen.len()),
            name,
            format!("{us:.1}"),
            format!("{:.1}", mean(|r| r.fastest_us)),
            format!("{floor:.1}"),
            format!("{:.0}", 100.0 * floor / us),
            String::new(),
            String::new(),
            String::new(),
        ]);
    }
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
