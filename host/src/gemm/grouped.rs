//! A planned grouped GEMM on a GPU: kernels and tables found once, parameters made for each run.
use attn_backward_kernels::config::wgmma;
use attn_backward_kernels::params::{GemmParams, MAX_PRODUCTS, MAX_SEGMENTS};
use attn_backward_kernels::params_wgmma::{Conversion, MAX_TENSOR_MAPS, Rider, TensorMap, WgmmaParams, WgmmaProduct};
use attn_backward_kernels::schedule::item::Item;

use super::hopper::{Accumulation, ElementType, HopperPlan, Pitches, TensorMapSpec, TensorRole};
use super::portable::PortablePlan;
use super::{GemmPlan, Operands, ProductTensors, Schedule, hopper_counter_bytes};
use crate::Error;
use crate::gpu::{
    Buffer, Gpu, GpuError, Kernel, Launch, LaunchConfig, ModuleKind, Stream, Swizzle, TensorMapDtype, TiledTensor,
};

/// A grouped GEMM, ready to run on one GPU.
#[derive(Debug)]
pub(crate) struct GroupedGemm {
    gpu: Gpu,
    plan: GemmPlan,
    kernels: Kernels,
}

#[derive(Debug)]
enum Kernels {
    Portable { gemm: Kernel, reduce: Kernel },
    Hopper { gemm: Kernel, items: Buffer<Item> },
}

/// What one run launches.
#[derive(Debug)]
pub(crate) enum PreparedGemm {
    Portable(Box<GemmParams>),
    Hopper {
        params: Box<WgmmaParams>,
        /// Address and size of the counters that must be zero when the kernel starts.
        counters: (u64, usize),
        /// How it follows the launch before: normally or as a dependent launch.
        launch: Launch,
    },
    Converting {
        params: Box<WgmmaParams<Conversion>>,
        /// As above.
        counters: (u64, usize),
    },
}

/// The conversion of a run and the fp32 tensors that it loads by tensor maps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConversionTensors {
    /// Parameters; `first_map` is filled in.
    pub conversion: Conversion,
    /// Addresses of grad_query_states, grad_key_states and grad_value_states.
    pub gradients: [u64; 3],
    /// Batches.
    pub batch_size: usize,
}

impl GroupedGemm {
    /// Finds the plan's kernels in `module` and uploads its tables.
    ///
    /// # Errors
    /// [`GpuError::CooperativeGrid`] if the plan is for more SMs than the GPU has and its blocks wait for each other; errors of the driver.
    pub(crate) fn new(gpu: &Gpu, module: ModuleKind, plan: &GemmPlan) -> Result<GroupedGemm, Error> {
        let gemm = || gpu.kernel(module, plan.gemm_kernel());
        let kernels = match &plan.schedule {
            Schedule::Portable(_) => Kernels::Portable { gemm: gemm()?, reduce: gpu.kernel(module, "gemm_reduce")? },
            Schedule::Hopper(hopper) => {
                check_resident(plan.gemm_kernel(), hopper, gpu.properties().num_sms)?;
                let items = Buffer::from_slice(gpu, "the items of a grouped GEMM", hopper.items())?;
                Kernels::Hopper { gemm: gemm()?, items }
            }
        };
        Ok(GroupedGemm { gpu: gpu.clone(), plan: plan.clone(), kernels })
    }

    /// The parameters of a run on `tensors`, in the plan's order, with the plan's workspace at `workspace`.
    pub(crate) fn prepare(&self, tensors: &[ProductTensors], workspace: u64) -> Result<PreparedGemm, Error> {
        match (&self.plan.schedule, &self.kernels) {
            (Schedule::Hopper(plan), Kernels::Hopper { items, .. }) => {
                let element = match self.plan.operands {
                    Operands::Bf16 => ElementType::Bf16,
                    Operands::F16 | Operands::F16Promoted => ElementType::F16,
                };
                let (counters, parts) = (workspace, workspace + hopper_counter_bytes(plan));
                let at = (items.address(), counters, parts);
                let params = wgmma_params(&self.gpu, plan, element, tensors, at, Rider::NONE)?;
                let counters = (counters, 4 * plan.num_counters());
                Ok(PreparedGemm::Hopper { params: Box::new(params), counters, launch: Launch::Normal })
            }
            (Schedule::Portable(plan), _) => Ok(PreparedGemm::Portable(Box::new(plan.params(tensors, workspace)?))),
            (Schedule::Hopper(_), Kernels::Portable { .. }) => unreachable!("kernels follow the schedule"),
        }
    }

    /// As [`GroupedGemm::prepare`], for a plan that converts.
    pub(crate) fn prepare_converting(
        &self,
        tensors: &[ProductTensors],
        from: &ConversionTensors,
        workspace: u64,
    ) -> Result<PreparedGemm, Error> {
        let (Schedule::Hopper(plan), Kernels::Hopper { items, .. }) = (&self.plan.schedule, &self.kernels) else {
            unreachable!("only wgmma kernels convert")
        };
        let (counters, parts) = (workspace, workspace + hopper_counter_bytes(plan));
        let at = (items.address(), counters, parts);
        let mut params = wgmma_params(&self.gpu, plan, ElementType::F16, tensors, at, from.conversion)?;
        params.beside.first_map = params.num_maps;
        for map in conversion_maps(&self.gpu, from)? {
            params.maps[params.num_maps as usize] = map;
            params.num_maps += 1;
        }
        Ok(PreparedGemm::Converting { params: Box::new(params), counters: (counters, 4 * plan.num_counters()) })
    }

    /// Enqueues a prepared run.
    ///
    /// # Safety
    /// The tensors and the workspace that it was prepared for are of the plan's sizes and live until the work has ended.
    pub(crate) unsafe fn launch(&self, stream: &Stream, prepared: &PreparedGemm) -> Result<(), Error> {
        // SAFETY: the caller's.
        unsafe {
            prepared.zero_counters(stream)?;
            self.launch_zeroed(stream, prepared)
        }
    }

    /// As [`GroupedGemm::launch`], with counters that earlier work of the stream has zeroed.
    ///
    /// # Safety
    /// As [`GroupedGemm::launch`].
    pub(crate) unsafe fn launch_zeroed(&self, stream: &Stream, prepared: &PreparedGemm) -> Result<(), Error> {
        match (&self.plan.schedule, &self.kernels, prepared) {
            (Schedule::Portable(plan), Kernels::Portable { gemm, reduce }, PreparedGemm::Portable(params)) => {
                let launches = [
                    (gemm, plan.blocks(), plan.threads(), plan.smem_bytes()),
                    (reduce, plan.reduce_blocks(), PortablePlan::REDUCE_THREADS, 0),
                ];
                for (kernel, blocks, block, shared_bytes) in launches {
                    if blocks > 0 {
                        let grid = [blocks, 1, 1];
                        let config = LaunchConfig { grid, block, shared_bytes, launch: Launch::Normal };
                        // SAFETY: the caller's.
                        unsafe { kernel.launch(stream, &config, &**params)? };
                    }
                }
                Ok(())
            }
            (Schedule::Hopper(plan), Kernels::Hopper { gemm, .. }, PreparedGemm::Hopper { params, launch, .. }) => {
                let (grid, block) = ([plan.num_blocks() as u32, 1, 1], wgmma::THREADS);
                let config = LaunchConfig { grid, block, shared_bytes: wgmma::SMEM_BYTES, launch: *launch };
                // SAFETY: the caller's.
                unsafe { Ok(gemm.launch(stream, &config, &**params)?) }
            }
            (Schedule::Hopper(plan), Kernels::Hopper { gemm, .. }, PreparedGemm::Converting { params, .. }) => {
                let (grid, block) = ([plan.num_blocks() as u32, 1, 1], wgmma::THREADS);
                let shared_bytes = wgmma::CONVERTING_SMEM_BYTES;
                let config = LaunchConfig { grid, block, shared_bytes, launch: Launch::Cooperative };
                // SAFETY: the caller's.
                unsafe { Ok(gemm.launch(stream, &config, &**params)?) }
            }
            _ => unreachable!("a run is prepared by the GEMM that launches it"),
        }
    }
}

impl PreparedGemm {
    /// Lets `rider` ride along; a portable GEMM takes none and leaves its work to the caller.
    pub(crate) fn take_rider(&mut self, rider: Rider) {
        if let PreparedGemm::Hopper { params, .. } = self {
            params.beside = rider;
        }
    }

    /// Makes it a dependent launch (see [`Launch::Dependent`]), whose wgmma kernels wait unless they convert. A portable GEMM stays a normal one.
    pub(crate) fn follow_early(&mut self) {
        if let PreparedGemm::Hopper { launch, .. } = self {
            *launch = Launch::Dependent;
        }
    }

    /// Address of the counters that must be zero when the kernel starts, and their bytes.
    pub(crate) fn counters(&self) -> (u64, usize) {
        match self {
            PreparedGemm::Portable(_) => (0, 0),
            PreparedGemm::Hopper { counters, .. } | PreparedGemm::Converting { counters, .. } => *counters,
        }
    }

    /// Zeroes the counters by a memset.
    ///
    /// # Safety
    /// As [`GroupedGemm::launch`].
    pub(crate) unsafe fn zero_counters(&self, stream: &Stream) -> Result<(), Error> {
        let (address, bytes) = self.counters();
        // SAFETY: the counters lie in the workspace.
        unsafe { Ok(stream.fill(address, 0, bytes)?) }
    }
}

/// `Ok` if a GPU of `num_sms` SMs, each of which holds one block, can hold all blocks of `plan` at once, or need not. Blocks that convert wait for any others and
/// keep their SMs meanwhile: launched normally, two such grids on different streams could each hold some SMs and wait for blocks that never find one.
fn check_resident(kernel: &'static str, plan: &HopperPlan, num_sms: u32) -> Result<(), GpuError> {
    let (blocks, available) = (plan.num_blocks(), num_sms as usize);
    if plan.converts() && blocks > available {
        return Err(GpuError::CooperativeGrid { kernel, blocks, available });
    }
    Ok(())
}

/// Parameters of a `wgmma_*` or `cross_wgmma_fast` launch; `(items, counters, parts)` are device addresses.
fn wgmma_params<B>(
    gpu: &Gpu,
    plan: &HopperPlan,
    element: ElementType,
    tensors: &[ProductTensors],
    (items, counters, parts): (u64, u64, u64),
    beside: B,
) -> Result<WgmmaParams<B>, Error> {
    let pitches: Vec<Pitches> = tensors.iter().map(pitches).collect();
    let specs = plan.tensor_maps(element, &pitches);
    let mut maps = [TensorMap([0; 16]); MAX_TENSOR_MAPS];
    for (map, spec) in maps.iter_mut().zip(&specs) {
        *map = encode(gpu, plan.accumulation(), spec, &tensors[spec.product])?;
    }
    let unused = WgmmaProduct {
        c: std::ptr::null_mut(),
        row_exponents: std::ptr::null(),
        exponent: std::ptr::null(),
        a_boundary: std::ptr::null(),
        b_boundary: std::ptr::null(),
        c_pitch_bytes: 0,
        rows: 0,
        segment_k: 0,
        reserved: 0,
    };
    let mut products = [unused; MAX_PRODUCTS];
    for ((product, of), shape) in products.iter_mut().zip(tensors).zip(plan.products()) {
        *product = WgmmaProduct {
            c: of.c as *mut u8,
            row_exponents: of.row_exponents as *const i32,
            exponent: of.exponent as *const i32,
            a_boundary: of.a_boundary as *const u8,
            b_boundary: of.b_boundary as *const u8,
            c_pitch_bytes: of.ldc * ElementType::from(shape.c_type).bytes() as u32,
            rows: shape.m as u32,
            segment_k: shape.k.next_multiple_of(wgmma::TILE_K as usize) as u32,
            reserved: 0,
        };
    }
    let limited = tensors.iter().zip(plan.products()).find(|(of, _)| of.k_limit != 0);
    Ok(WgmmaParams {
        maps,
        products,
        items: items as *const Item,
        workspace: parts as *mut f32,
        counters: counters as *mut u32,
        items_per_block: plan.items_per_block() as u32,
        num_maps: specs.len() as u32,
        k_limit: limited.map_or(0, |(of, _)| of.k_limit) as *const i32,
        k_rows: limited.map_or(0, |(_, shape)| shape.k as u32),
        reserved: 0,
        beside,
    })
}

/// Pitches of a product's tensors. The distances of the parts mean something for promoted products only.
fn pitches(tensors: &ProductTensors) -> Pitches {
    // A low part in front of the high one gives a distance that the driver refuses.
    let distance = |[high, low]: [u64; 2]| low.wrapping_sub(high);
    Pitches {
        a: tensors.lda as usize,
        b: tensors.ldb as usize,
        c: tensors.ldc as usize,
        a_part_bytes: distance(parts(0, &tensors.a)),
        b_part_bytes: distance(parts(1, &tensors.b)),
    }
}

/// Addresses of the high and the low part of A (`operand` 0) or B (1) of a promoted product.
fn parts(operand: usize, segments: &[u64; MAX_SEGMENTS]) -> [u64; 2] {
    let mut parts = [0; 2];
    for (segment, address) in segments.iter().enumerate() {
        parts[wgmma::segment_parts(segment as u32)[operand] as usize] = *address;
    }
    parts
}

/// Encodes a map of the plan for a product's tensors.
fn encode(
    gpu: &Gpu,
    accumulation: Accumulation,
    spec: &TensorMapSpec,
    tensors: &ProductTensors,
) -> Result<TensorMap, Error> {
    let product = spec.product;
    let (name, address) = match (accumulation, spec.role) {
        (_, TensorRole::C) => (format!("C of product {product}"), tensors.c),
        (Accumulation::Plain, TensorRole::A) => (format!("A of product {product}"), tensors.a[0]),
        (Accumulation::Plain, TensorRole::B { segment }) => {
            (format!("B {segment} of product {product}"), tensors.b[segment])
        }
        (Accumulation::Promoted, TensorRole::A) => (format!("A of product {product}"), parts(0, &tensors.a)[0]),
        (Accumulation::Promoted, TensorRole::B { .. }) => (format!("B of product {product}"), parts(1, &tensors.b)[0]),
    };
    let dtype = match spec.element {
        ElementType::Bf16 => TensorMapDtype::Bf16,
        ElementType::F16 => TensorMapDtype::F16,
        ElementType::F32 => TensorMapDtype::F32,
    };
    let tiled = TiledTensor {
        address,
        dtype,
        dims: &spec.dims,
        outer_strides_bytes: &spec.strides_bytes,
        box_dims: &spec.box_dims,
        swizzle: Swizzle::Bytes128,
    };
    Ok(tiled.encode(gpu, &name)?)
}

/// Maps of grad_query_states, grad_key_states and grad_value_states: boxes of all heads of a stage's tokens.
fn conversion_maps(gpu: &Gpu, from: &ConversionTensors) -> Result<[TensorMap; 3], Error> {
    let Conversion { num_heads, head_dim, seq_len_dec, seq_len_enc, tokens_per_stage: [dec, enc], .. } =
        from.conversion;
    let map = |name, address, seq_len: u32, tokens| {
        let row_bytes = 4 * u64::from(head_dim);
        let tiled = TiledTensor {
            address,
            dtype: TensorMapDtype::F32,
            dims: &[u64::from(head_dim), u64::from(seq_len), from.batch_size as u64 * u64::from(num_heads)],
            outer_strides_bytes: &[row_bytes, u64::from(seq_len) * row_bytes],
            box_dims: &[head_dim, tokens, num_heads],
            swizzle: Swizzle::None,
        };
        tiled.encode(gpu, name)
    };
    let [query, key, value] = from.gradients;
    Ok([
        map("grad_query_states", query, seq_len_dec, dec)?,
        map("grad_key_states", key, seq_len_enc, enc)?,
        map("grad_value_states", value, seq_len_enc, enc)?,
    ])
}

#[cfg(test)]
mod tests {
    use attn_backward_kernels::params::{Major, OutputType};

    use super::*;
    use crate::gemm::ProductShape;
    use crate::gemm::hopper::{KCuts, Lead};

    #[test]
    fn blocks_that_wait_for_any_others_must_all_fit_on_the_gpu() {
        let (a_major, c_type) = (Major::Mn, OutputType::F32);
        let product = ProductShape { m: 1280, n: 1280, k: 65_536, num_segments: 1, a_major, c_type };
        let plan = |lead: &Lead| HopperPlan::after(Accumulation::Plain, &[product], lead, KCuts::Allowed).unwrap();
        let converting = Lead { lists: vec![vec![Item { k_blocks: 1, ..Item::END }]; 132], ..Lead::none(132) };
        check_resident("wgmma", &plan(&converting), 132).unwrap();
        let error = check_resident("wgmma", &plan(&converting), 131).unwrap_err();
        assert!(matches!(error, GpuError::CooperativeGrid { kernel: "wgmma", blocks: 132, available: 131 }), "{error}");
        // These wait for blocks before them alone.
        let waiting = plan(&Lead::none(132));
        assert!(waiting.num_counters() > 0);
        check_resident("wgmma", &waiting, 131).unwrap();
    }

    #[test]
    fn parts_of_promoted_products_are_found_in_their_segments() {
        let tensors = ProductTensors { a: [4096, 256, 256], b: [512, 8192, 512], ..ProductTensors::default() };
        assert_eq!(parts(0, &tensors.a), [256, 4096]);
        assert_eq!(parts(1, &tensors.b), [512, 8192]);
        let pitches = pitches(&tensors);
        assert_eq!((pitches.a_part_bytes, pitches.b_part_bytes), (3840, 7680));
    }
}
