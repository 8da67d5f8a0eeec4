//! A simulated GPU with the project's kernels, for tests where there is none.
//!
//! The PTX is the text that the library carries; [`ptx_sim`] runs it, and a kernel that races, diverges, or touches what it must not is
//! a panic that names the instruction. Every tensor is an allocation of its own and of its exact size, so that any access beyond it is
//! such a fault; outputs start as NaN that nobody has written, and reading what nobody has written is a fault too.

pub mod audio;
pub mod cross;
pub mod gemm;
pub mod hopper;
pub mod hopper_cross;

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::{LazyLock, Mutex};

use attn_backward::gpu::{KernelParams, ModuleKind, ptx};
use attn_backward::{Region, WorkspaceLayout};
use ndarray::{Array, Array2, Dimension, IntoDimension, s};
use ptx_sim::{Element, Memory, Module, Stats};
pub use ptx_sim::{Options, Size};

static PORTABLE: LazyLock<Option<Module>> = LazyLock::new(|| parse(&ptx::PORTABLE));
static HOPPER: LazyLock<Option<Module>> = LazyLock::new(|| parse(&ptx::HOPPER));

fn parse(description: &ptx::Module) -> Option<Module> {
    let text = description.ptx?;
    Some(Module::parse(text).unwrap_or_else(|error| panic!("the {} module: {error}", description.name)))
}

/// Tests of this process that found no PTX, by name.
static SKIPPED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// A GPU with one module and no data. A panic tells of everything that goes wrong in it.
pub struct Simulator {
    module: &'static Module,
    num_sms: u32,
    memory: Memory,
}

impl Simulator {
    /// With the portable module. `None` if this build carries no PTX: the test is then counted as skipped, on stderr even when the harness captures
    /// output.
    pub fn new() -> Option<Simulator> {
        Simulator::with(ModuleKind::Portable, 132)
    }

    /// As [`Simulator::new`], with the Hopper module, on so many SMs.
    pub fn hopper(num_sms: u32) -> Option<Simulator> {
        Simulator::with(ModuleKind::Hopper, num_sms)
    }

    /// SMs, for kernels that launch a block on each.
    pub fn num_sms(&self) -> u32 {
        self.num_sms
    }

    fn with(module: ModuleKind, num_sms: u32) -> Option<Simulator> {
        let module = match module {
            ModuleKind::Portable => &PORTABLE,
            ModuleKind::Hopper => &HOPPER,
        };
        if let Some(module) = module.as_ref() {
            return Some(Simulator { module, num_sms, memory: Memory::new() });
        }
        let test = std::thread::current().name().unwrap_or("a test").to_owned();
        let mut skipped = SKIPPED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if skipped.insert(test.clone()) {
            // If stderr is closed there is nobody to tell.
            _ = writeln!(std::io::stderr(), "SKIPPED {test}, test {} without PTX: {}", skipped.len(), ptx::MISSING);
        }
        None
    }

    /// Runs an entry with all checks.
    #[track_caller]
    pub fn launch<P: KernelParams>(&mut self, entry: &str, size: Size, params: &P) -> Stats {
        self.launch_with(entry, size, params, Options::default())
    }

    /// Runs an entry.
    #[track_caller]
    pub fn launch_with<P: KernelParams>(&mut self, entry: &str, size: Size, params: &P, options: Options) -> Stats {
        let first = std::ptr::from_ref(params).cast::<u8>();
        // SAFETY: the bytes of a live value; a parameter struct has no padding, its `reserved` fields are where it would be.
        let bytes = unsafe { std::slice::from_raw_parts(first, size_of::<P>()) };
        self.module
            .launch_with(entry, size, bytes, &mut self.memory, options)
            .unwrap_or_else(|error| panic!("{entry}: {error}"))
    }

    /// Copies a tensor to the GPU, row-major.
    pub fn upload<T: Element, D: Dimension>(&mut self, tensor: &Array<T, D>) -> u64 {
        let values: Vec<T> = tensor.iter().copied().collect();
        self.memory.upload(&values)
    }

    /// Copies a matrix to the GPU with rows that are `pitch` elements apart. What lies between them is `gap`.
    pub fn upload_pitched<T: Element>(&mut self, matrix: &Array2<T>, pitch: usize, gap: T) -> u64 {
        let (rows, columns) = matrix.dim();
        let mut values = vec![gap; pitched_elements(rows, columns, pitch)];
        for (row, values) in matrix.outer_iter().zip(values.chunks_mut(pitch.max(1))) {
            row.iter().zip(values).for_each(|(x, value)| *value = *x);
        }
        self.memory.upload(&values)
    }

    /// Memory of `bytes` bytes for an output.
    pub fn output(&mut self, bytes: usize) -> u64 {
        self.memory.alloc_poisoned(bytes)
    }

    /// Memory for each region of a workspace, an allocation of its own.
    pub fn workspace(&mut self, layout: &WorkspaceLayout) -> Workspace {
        let allocate = |(name, region): &(&'static str, Region)| (*name, self.output(region.bytes as usize));
        Workspace(layout.regions().iter().map(allocate).collect())
    }

    /// Copies an output to the host; every element must have been written.
    #[track_caller]
    pub fn download<T: Element, Sh: IntoDimension>(&self, address: u64, shape: Sh) -> Array<T, Sh::Dim> {
        let shape = shape.into_dimension();
        let values = self.memory.download(address, shape.size()).unwrap_or_else(|error| panic!("{error}"));
        Array::from_shape_vec(shape, values).expect("as many as the shape has")
    }

    /// Copies an output whose rows are `pitch` elements apart; every element must have been written, and nothing between the rows.
    #[track_caller]
    pub fn download_pitched<T: Element>(
        &self,
        address: u64,
        (rows, columns): (usize, usize),
        pitch: usize,
    ) -> Array2<T> {
        let mut matrix = Vec::with_capacity(rows * columns);
        for row in 0..rows {
            let start = address + (row * pitch * T::BYTES) as u64;
            matrix
                .extend(self.memory.download::<T>(start, columns).unwrap_or_else(|error| panic!("row {row}: {error}")));
            if row + 1 < rows {
                let gap = start + (columns * T::BYTES) as u64;
                self.assert_untouched(gap, (pitch - columns) * T::BYTES);
            }
        }
        Array2::from_shape_vec((rows, columns), matrix).expect("rows of columns")
    }

    /// Fails if a byte of a range of an output was written.
    #[track_caller]
    pub fn assert_untouched(&self, address: u64, bytes: usize) {
        let written = self.memory.written_bytes(address, bytes).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(written, 0, "bytes written at {address:#x} .. + {bytes}");
    }
}

/// Addresses of a workspace's regions.
pub struct Workspace(Vec<(&'static str, u64)>);

impl Workspace {
    /// Address of the region that the plan calls `name`.
    #[track_caller]
    pub fn at(&self, name: &str) -> u64 {
        let found = self.0.iter().find(|(region, _)| *region == name);
        found.unwrap_or_else(|| panic!("no region {name:?} among {:?}", self.0)).1
    }
}

/// Elements from the first of a matrix to its last, with rows `pitch` elements apart.
pub fn pitched_elements(rows: usize, columns: usize, pitch: usize) -> usize {
    if rows == 0 { 0 } else { (rows - 1) * pitch + columns }
}

/// Columns `first .. first + columns` of a matrix.
pub fn columns<T: Copy>(matrix: &Array2<T>, first: usize, columns: usize) -> Array2<T> {
    matrix.slice(s![.., first..first + columns]).to_owned()
}
