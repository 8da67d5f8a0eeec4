//! Plan of operation A: shapes and bounds of the chunks -> launches and workspace, without a GPU.
use std::fmt;

use attn_backward_kernels::config::{attention as config, wgmma};
use attn_backward_kernels::params::{Major, OutputType};

use super::fused::FusedPlan;
use super::tiles::AttentionTiles;
use super::{Capacity, DeviceInputs, HEAD_DIM, Shape, flash};
use crate::gemm::hopper::KCuts;
use crate::gemm::{GemmPlan, Operands, ProductShape};
use crate::{CuSeqlens, Error, Region, Target, WorkspaceLayout};

/// How operation A runs for one shape and any chunks inside of a [`Capacity`].
#[derive(Clone, Debug)]
pub struct Plan {
    shape: Shape,
    flops: f64,
    target: Target,
    pub(super) tiles: AttentionTiles,
    /// The attention kernel that multiplies grad_attention itself, if it is the one that runs.
    pub(super) fused: Option<FusedPlan>,
    /// grad_output @ out_weight; `None` with `fused`.
    pub(super) d_attn_gemm: Option<GemmPlan>,
    /// grad_hidden_states and the four weight gradients.
    pub(super) gradients_gemm: GemmPlan,
    layout: WorkspaceLayout,
    pub(super) regions: Regions,
}

/// Places in the workspace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Regions {
    pub d_attn: Region,
    pub o: Region,
    pub dqkv: Region,
    pub bias_partials: Region,
    pub out_bias_partials: Region,
    pub stats: Region,
    pub flash: flash::Regions,
    pub boundary: Region,
    pub d_attn_gemm: Region,
    pub gradients_gemm: Region,
}

impl Plan {
    /// Plans the operation for chunks of these lengths: right for all others inside of their [`Capacity`], too, and fastest for these.
    ///
    /// # Errors
    /// As [`Plan::with_capacity`]; [`Error::Shape`] if `cu_seqlens` was made for another number of rows.
    pub fn new(shape: &Shape, cu_seqlens: &CuSeqlens, target: &Target) -> Result<Plan, Error> {
        shape.check_rows_of(cu_seqlens)?;
        Plan::with_lens(shape, Capacity::of(cu_seqlens), cu_seqlens.chunk_lens(), target)
    }

    /// Plans the operation for chunks of which nothing but bounds is known; kernels are chosen as for chunks of equal length.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there are no heads or too many, too many rows or chunks, or the scale is not finite and positive.
    pub fn with_capacity(shape: &Shape, capacity: Capacity, target: &Target) -> Result<Plan, Error> {
        let equal = shape.total_seq_len.div_ceil(capacity.num_chunks.max(1)).min(capacity.max_chunk_len);
        Plan::with_lens(shape, capacity, std::iter::repeat_n(equal, capacity.num_chunks), target)
    }

    fn with_lens(
        shape: &Shape,
        capacity: Capacity,
        lens: impl Iterator<Item = usize> + Clone,
        target: &Target,
    ) -> Result<Plan, Error> {
        shape.check()?;
        let at_most = |argument, value: usize, most: u32| {
            let (value, supported) = (value.to_string(), format!("at most {most} on a GPU"));
            Error::Unsupported { argument, value, supported }
        };
        if shape.num_heads > config::MAX_HEADS as usize {
            return Err(at_most("num_heads", shape.num_heads, config::MAX_HEADS));
        }
        if capacity.num_chunks > config::MAX_CHUNKS as usize {
            return Err(at_most("num_chunks", capacity.num_chunks, config::MAX_CHUNKS));
        }
        let (rows, d_model) = (shape.total_seq_len, shape.d_model());
        let gradients_gemm = GemmPlan::new(target, Operands::Bf16, &gradient_products(rows, d_model))?;
        let fused = FusedPlan::new(capacity, rows, shape.num_heads, target).filter(|_| gradients_gemm.is_hopper());
        let tiles = match fused {
            Some(fused) => AttentionTiles::of_short_kernel(capacity, rows, fused.row_tiles),
            None => AttentionTiles::new(capacity, rows, lens.clone(), shape.num_heads, target),
        };
        // Counters would have to be zeroed ahead of the first kernel: a memset costs more than cuts along K gain.
        let d_attn = [d_attn_product(rows, d_model)];
        let d_attn_gemm = match fused {
            Some(_) => None,
            None => Some(GemmPlan::with_k_cuts(target, Operands::Bf16, &d_attn, KCuts::Forbidden)?),
        };
        let d_attn_bytes = d_attn_gemm.as_ref().map_or(0, |_| 4 * (rows * d_model) as u64);
        let d_attn_gemm_bytes = d_attn_gemm.as_ref().map_or(0, GemmPlan::workspace_bytes);

        let mut layout = WorkspaceLayout::default();
        let matrix = (rows * d_model) as u64;
        let (column_sum_rows, boundary_rows) = match gradients_gemm.is_hopper() {
            true => (0, 2 * wgmma::TILE_K as usize), // the rider sums whole columns
            false => (rows.div_ceil(config::column_sums_rows_per_block(rows as u32) as usize), 0),
        };
        let streamed = tiles.long_slots().is_some() && !tiles.flash();
        let stats_rows = if streamed { (shape.num_heads * rows) as u64 } else { 0 };
        let flash_slots = if tiles.flash() { tiles.long_blocks() } else { 0 };
        let regions = Regions {
            d_attn: layout.add("grad_attention fp32", d_attn_bytes),
            o: layout.add("attention output bf16", 2 * matrix),
            dqkv: layout.add("dq, dk, dv bf16", 6 * matrix),
            bias_partials: layout.add("bias partial sums", 12 * (tiles.bias_rows() * d_model) as u64),
            out_bias_partials: layout.add("out bias partial sums", 4 * (column_sum_rows * d_model) as u64),
            stats: layout.add("long chunks' statistics", 16 * stats_rows),
            flash: flash::Regions::new(&mut layout, flash_slots, shape.num_heads),
            boundary: layout.add("rows where tokens end", 2 * (boundary_rows * d_model) as u64),
            d_attn_gemm: layout.add("partial sums, grad_attention", d_attn_gemm_bytes),
            gradients_gemm: layout.add("partial sums, gradients", gradients_gemm.workspace_bytes()),
        };
        Ok(Plan {
            shape: *shape,
            flops: super::flops(shape, lens),
            target: *target,
            tiles,
            fused,
            d_attn_gemm,
            gradients_gemm,
            layout,
            regions,
        })
    }

    /// Sizes that it is for.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Bounds of the chunks that it takes, which are not below those that it was made for.
    pub fn capacity(&self) -> Capacity {
        self.tiles.capacity()
    }

    /// Machine that it is for.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Blocks of the attention kernels.
    pub fn tiles(&self) -> &AttentionTiles {
        &self.tiles
    }

    /// The product grad_output @ out_weight, if it is one of its own.
    pub fn d_attn_gemm(&self) -> Option<&GemmPlan> {
        self.d_attn_gemm.as_ref()
    }

    /// Row tiles and stages of the attention kernel that multiplies grad_attention itself, if it is the one that runs.
    pub fn fused(&self) -> Option<(u32, u32)> {
        self.fused.map(|fused| (fused.row_tiles, fused.stages))
    }

    /// The products that are grad_hidden_states and the gradients of q_weight, k_weight, v_weight and out_weight, in this order.
    pub fn gradients_gemm(&self) -> &GemmPlan {
        &self.gradients_gemm
    }

    /// Device address of the number of rows that belong to a chunk: the last offset.
    pub(super) fn token_count(&self, inputs: &DeviceInputs<'_>) -> u64 {
        inputs.cu_seqlens.address() + 4 * self.capacity().num_chunks as u64
    }

    /// Whether the gradients GEMM sums the biases' gradients, too; else kernels of their own do.
    pub(super) fn biases_ride(&self) -> bool {
        self.gradients_gemm.is_hopper()
    }

    /// Every launch of a run, in order, and what is particular about it.
    fn launches(&self) -> Vec<String> {
        let mut launches = Vec::new();
        launches.extend(self.d_attn_gemm.iter().flat_map(GemmPlan::kernels).map(String::from));
        if !self.biases_ride() && self.shape.total_seq_len > 0 {
            launches.push("column_sums_bf16".into());
        }
        match &self.fused {
            Some(fused) => launches.push(fused.kernel()),
            None => launches.extend(self.tiles.kernels()),
        }
        let rides = if self.biases_ride() { " (sums the biases)" } else { "" };
        launches.extend(self.gradients_gemm.kernels().into_iter().map(|name| format!("{name}{rides}")));
        if !self.biases_ride() {
            launches.push("sum_partials".into());
        }
        launches
    }

    /// Extra device memory of a run, by region.
    pub fn workspace(&self) -> &WorkspaceLayout {
        &self.layout
    }
}

/// grad_output @ out_weight, in fp32: rounding it to bf16 would cost grad_hidden_states its accuracy.
fn d_attn_product(rows: usize, d_model: usize) -> ProductShape {
    ProductShape { m: rows, n: d_model, k: d_model, num_segments: 1, a_major: Major::K, c_type: OutputType::F32 }
}

/// grad_hidden_states, then the gradients of q_weight, k_weight, v_weight and out_weight. Padding rows are zero in dQ, dK, dV and O, and the
/// device limits k to the rows before them.
fn gradient_products(rows: usize, d_model: usize) -> [ProductShape; 5] {
    let c_type = OutputType::Bf16;
    let dgrad = ProductShape { m: rows, n: d_model, k: d_model, num_segments: 3, a_major: Major::K, c_type };
    let wgrad = ProductShape { m: d_model, n: d_model, k: rows, num_segments: 1, a_major: Major::Mn, c_type };
    [dgrad, wgrad, wgrad, wgrad, wgrad]
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shape, Capacity { num_chunks, max_chunk_len }) = (&self.shape, self.capacity());
        writeln!(
            f,
            "operation A, {}: {} rows in at most {num_chunks} chunks of at most {max_chunk_len}, {} heads of {HEAD_DIM}",
            self.target, shape.total_seq_len, shape.num_heads
        )?;
        let (flops, bytes) = (self.flops / 1e9, super::bytes(shape) / 1e6);
        writeln!(f, "{flops:.2} GFLOP for the lengths that it was made for, {bytes:.1} MB at least")?;
        if let Some(gemm) = &self.d_attn_gemm {
            writeln!(f, "grad_attention: {gemm}")?;
        }
        match &self.fused {
            Some(fused) => writeln!(f, "attention: {fused}, {} blocks a head", self.tiles.short_blocks())?,
            None => writeln!(f, "attention: {}", self.tiles)?,
        }
        writeln!(f, "gradients: {}", self.gradients_gemm)?;
        writeln!(f, "launches: {}", self.launches().join(", "))?;
        write!(f, "{}", self.layout)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tiles::FLASH_KERNELS;
    use super::*;
    use crate::gpu::ModuleKind;

    /// Chunks of `len`, the last one shorter, and `padding` rows.
    fn plan(module: ModuleKind, tokens: usize, len: usize, padding: usize) -> Plan {
        let offsets: Vec<i32> = (0..=tokens.div_ceil(len)).map(|i| (len * i).min(tokens) as i32).collect();
        let cu = CuSeqlens::new(&offsets, tokens + padding).unwrap();
        let shape = Shape { total_seq_len: tokens + padding, num_heads: 20, scale: 0.125 };
        Plan::new(&shape, &cu, &Target::h200(module)).unwrap()
    }

    #[test]
    fn a_hopper_run_of_short_chunks_is_two_launches_and_no_memset() {
        for (tokens, len, kernel) in
            [(1280, 64, "attention_fused_64"), (373, 75, "attention_fused_80"), (128, 128, "attention_fused_128")]
        {
            let launches = plan(ModuleKind::Hopper, tokens, len, 0).launches();
            let names: Vec<&str> = launches.iter().filter_map(|l| l.split(' ').next()).collect();
            assert_eq!(names, [kernel, "wgmma_bf16_bf16"]);
        }
    }

    #[test]
    fn padding_rows_need_no_launch_of_their_own() {
        let launches = plan(ModuleKind::Hopper, 300, 150, 20).launches();
        assert_eq!(launches.len(), 4);
        assert!(launches[1].starts_with("attention_long_q") && launches[2].starts_with("attention_long_k"));
    }

    #[test]
    fn a_capacity_alone_gives_the_plan_of_equal_chunks() {
        let shape = Shape { total_seq_len: 1280, num_heads: 20, scale: 0.125 };
        let capacity = Capacity { num_chunks: 20, max_chunk_len: 64 };
        let target = Target::h200(ModuleKind::Hopper);
        let from_capacity = Plan::with_capacity(&shape, capacity, &target).unwrap();
        assert_eq!(from_capacity.to_string(), plan(ModuleKind::Hopper, 1280, 64, 0).to_string());
        // any longer chunk needs the long kernels, however few there may be
        let longer = Plan::with_capacity(&shape, Capacity { max_chunk_len: 129, ..capacity }, &target).unwrap();
        assert!(longer.launches().contains(&"attention_long_q".into()));
        assert_eq!(longer.capacity(), Capacity { num_chunks: 20, max_chunk_len: 1280 });
    }

    #[test]
    fn long_chunks_take_the_hopper_kernels_where_there_is_enough_to_do() {
        for (tokens, len, flash) in [(300, 150, false), (250, 250, false), (520, 260, true), (4096, 200, true)] {
            let launches = plan(ModuleKind::Hopper, tokens, len, 0).launches();
            let expected = if flash { &FLASH_KERNELS[..] } else { &["attention_long_q", "attention_long_k"] };
            assert_eq!(launches[1..launches.len() - 1], *expected, "{tokens} in chunks of {len}");
        }
        let portable = plan(ModuleKind::Portable, 4096, 4096, 0);
        assert!(!portable.tiles().flash() && portable.launches().contains(&"attention_long_q".into()));
    }

    #[test]
    fn what_no_launch_holds_is_named() {
        let shape = Shape { total_seq_len: 10, num_heads: 20, scale: 0.125 };
        let message = |shape: Shape, num_chunks| {
            let capacity = Capacity { num_chunks, max_chunk_len: 1 };
            Plan::with_capacity(&shape, capacity, &Target::h200(ModuleKind::Hopper)).unwrap_err().to_string()
        };
        assert!(message(shape, (1 << 27) + 1).starts_with("num_chunks = 134217729 is not supported: at most"));
        assert!(message(Shape { num_heads: 65_536, ..shape }, 1).starts_with("num_heads = 65536 is not supported"));
        assert!(message(Shape { total_seq_len: 1 << 31, ..shape }, 1).starts_with("total_seq_len = 2147483648"));
    }

    #[test]
    fn kernels_of_their_own_sum_the_biases_where_nothing_rides() {
        let launches = plan(ModuleKind::Portable, 1280, 64, 0).launches();
        assert_eq!(launches[0], "gemm_bf16");
        assert!(launches.contains(&"column_sums_bf16".into()) && launches.contains(&"sum_partials".into()));
        // no products for the Hopper kernels, no columns to sum
        assert_eq!(plan(ModuleKind::Hopper, 0, 64, 0).launches().last().unwrap(), "sum_partials");
    }
}
