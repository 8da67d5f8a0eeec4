//! `build-ptx`: both PTX modules, compiled by ptxas for the GPUs that they run on.

use std::thread;

use anyhow::{bail, ensure};
use comfy_table::{CellAlignment, Table, presets};
use cuda_builder::{Arch, CudaBuilder, PtxModule};

use crate::process;
use crate::ptxas::{PINNED_VERSION, Ptxas, Usage};

/// The module's name in the library, and the GPUs that ptxas compiles it for.
fn targets(arch: Arch) -> (&'static str, &'static [&'static str]) {
    match arch {
        Arch::Sm80 => ("portable", &["sm_80", "sm_90", "sm_120"]),
        Arch::Sm90a => ("hopper", &["sm_90a"]),
    }
}

/// One kernel of one module on one GPU.
pub struct Kernel {
    /// `portable` or `hopper`.
    pub module: &'static str,
    /// As given to ptxas.
    pub gpu: &'static str,
    /// What ptxas says.
    pub usage: Usage,
}

/// What fails a build that would otherwise only say so.
pub struct Demands {
    /// ptxas must be there.
    pub ptxas: bool,
    /// rustc must have nothing to say about the kernel crate.
    pub no_warnings: bool,
}

/// Modules as ptxas sees them.
pub struct Report {
    /// The kernels in the order of module, GPU, entry; none if there is no ptxas.
    pub kernels: Vec<Kernel>,
    /// The compilers, which register counts depend on: `rustc 1.96.0, ptxas 13.0.88`.
    pub compilers: String,
}

/// Builds and checks the modules.
pub fn run(demands: Demands) -> anyhow::Result<Report> {
    let ptxas = Ptxas::find();
    let mut modules = Vec::new();
    for arch in Arch::ALL {
        let module = CudaBuilder::new(process::kernels()).arch(arch).build()?;
        let (name, _) = targets(arch);
        println!("{name}: {} kernels, {}", module.entries.len(), module.path.display());
        println!("  source hash {}, {}", module.source_hash, module.toolchain);
        if !module.warnings.is_empty() {
            println!("{}", module.warnings);
            ensure!(!demands.no_warnings, "rustc warns about the {name} module");
        }
        modules.push(module);
    }
    let Some(ptxas) = ptxas else {
        let how = format!("`cargo xtask setup` gets it (PyPI: nvidia-cuda-nvcc=={PINNED_VERSION})");
        ensure!(!demands.ptxas, "no ptxas in target/ptxas-venv, on PATH or in CUDA_HOME: {how}");
        eprintln!("SKIPPED: the PTX was not checked for spills, local memory and warnings, there is no ptxas; {how}");
        return Ok(Report { kernels: Vec::new(), compilers: String::new() });
    };
    println!("ptxas {} ({})", ptxas.version, ptxas.path.display());

    let compiled: Vec<anyhow::Result<Vec<Kernel>>> = thread::scope(|scope| {
        let jobs: Vec<_> = modules
            .iter()
            .flat_map(|module| targets(module.arch).1.iter().map(move |gpu| (module, *gpu)))
            .map(|(module, gpu)| scope.spawn(|| compile(&ptxas, module, gpu)))
            .collect();
        jobs.into_iter().map(|job| job.join().expect("compiling does not panic")).collect()
    });
    let kernels: Vec<Kernel> =
        compiled.into_iter().collect::<anyhow::Result<Vec<_>>>()?.into_iter().flatten().collect();
    println!("{}", table(&kernels, &modules));
    let slow: Vec<String> = kernels.iter().filter_map(local_memory).collect();
    ensure!(slow.is_empty(), "local memory:\n{}", slow.join("\n"));
    let rustc: Vec<&str> = modules[0].toolchain.split_whitespace().take(2).collect();
    Ok(Report { kernels, compilers: format!("{}, ptxas {}", rustc.join(" "), ptxas.version) })
}

fn compile(ptxas: &Ptxas, module: &PtxModule, gpu: &'static str) -> anyhow::Result<Vec<Kernel>> {
    let (name, _) = targets(module.arch);
    let mut usages = ptxas.compile(&module.path, gpu)?;
    usages.sort_by(|a, b| a.entry.cmp(&b.entry));
    let mut expected: Vec<&str> = module.entries.iter().map(|entry| entry.name.as_str()).collect();
    expected.sort_unstable();
    let found: Vec<&str> = usages.iter().map(|usage| usage.entry.as_str()).collect();
    if expected != found {
        bail!("{name} for {gpu}: the PTX has the kernels {expected:?}, ptxas compiled {found:?}");
    }
    Ok(usages.into_iter().map(|usage| Kernel { module: name, gpu, usage }).collect())
}

/// What is wrong with a kernel that uses local memory.
fn local_memory(kernel: &Kernel) -> Option<String> {
    let Usage { entry, stack_bytes, spill_bytes, .. } = &kernel.usage;
    (stack_bytes + spill_bytes > 0).then(|| {
        format!(
            "  {} for {}: {entry}: {stack_bytes} bytes of stack, {spill_bytes} of spills",
            kernel.module, kernel.gpu
        )
    })
}

fn table(kernels: &[Kernel], modules: &[PtxModule]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY);
    table.set_header([
        "module",
        "GPU",
        "kernel",
        "threads",
        "blocks/SM",
        "registers",
        "static smem",
        "stack",
        "spills",
        "barriers",
        "named",
    ]);
    for Kernel { module, gpu, usage } in kernels {
        let entry = modules
            .iter()
            .find(|candidate| targets(candidate.arch).0 == *module)
            .and_then(|found| found.entries.iter().find(|entry| entry.name == usage.entry))
            .expect("the kernels were compared with the entries");
        let numbers = [
            entry.max_threads,
            entry.min_blocks_per_sm,
            usage.registers,
            usage.static_smem_bytes,
            usage.stack_bytes,
            usage.spill_bytes,
            entry.barriers,
            usage.named_barriers,
        ];
        let names = [module, gpu, usage.entry.as_str()].map(str::to_owned);
        table.add_row(names.into_iter().chain(numbers.map(|number| number.to_string())));
    }
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
