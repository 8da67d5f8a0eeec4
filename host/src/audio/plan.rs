//! Plan of operation A: shapes and chunk offsets -> launches and workspace, without a GPU.
use std::fmt;

use attn_backward_kernels::config::attention as config;
use attn_backward_kernels::params::{Major, OutputType};

use super::tiles::AttentionTiles;
use super::{HEAD_DIM, Shape, flash};
use crate::gemm::hopper::KCuts;
use crate::gemm::{GemmPlan, Operands, ProductShape};
use crate::{CuSeqlens, Error, Region, Target, WorkspaceLayout};

/// How operation A runs for one shape and one cut into chunks.
#[derive(Clone, Debug)]
pub struct Plan {
    shape: Shape,
    cu_seqlens: CuSeqlens,
    target: Target,
    pub(super) tiles: AttentionTiles,
    /// grad_output @ out_weight; `None` without tokens.
    pub(super) d_attn_gemm: GemmPlan,
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
    pub d_attn_gemm: Region,
    pub gradients_gemm: Region,
}

impl Plan {
    /// Plans the operation.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there are no heads or too many, or the scale is not finite and positive; [`Error::Shape`] if
    /// `cu_seqlens` was made for another number of rows.
    pub fn new(shape: &Shape, cu_seqlens: &CuSeqlens, target: &Target) -> Result<Plan, Error> {
        shape.check(cu_seqlens)?;
        let most = config::MAX_HEADS as usize;
        if shape.num_heads > most {
            let supported = format!("at most {most} on a GPU");
            return Err(Error::Unsupported { argument: "num_heads", value: shape.num_heads.to_string(), supported });
        }
        let tokens = cu_seqlens.padding().start;
        let d_model = shape.d_model();
        let tiles = AttentionTiles::new(cu_seqlens, shape.num_heads, target);
        // Counters would have to be zeroed ahead of the first kernel: a memset costs more than cuts along K gain.
        let d_attn = [d_attn_product(tokens, d_model)];
        let d_attn_gemm = GemmPlan::with_k_cuts(target, Operands::Bf16, &d_attn, KCuts::Forbidden)?;
        let gradients_gemm = GemmPlan::new(target, Operands::Bf16, &gradient_products(tokens, d_model))?;

        let mut layout = WorkspaceLayout::default();
        let matrix = (tokens * d_model) as u64;
        let column_sum_rows = match gradients_gemm.is_hopper() {
            true => 0, // the rider sums whole columns
            false => tokens.div_ceil(config::column_sums_rows_per_block(tokens as u32) as usize),
        };
        let streamed = !tiles.long.is_empty() && !tiles.flash;
        let stats_rows = if streamed { (shape.num_heads * shape.total_seq_len) as u64 } else { 0 };
        let slots = if tiles.flash { tiles.long.len() * shape.num_heads } else { 0 };
        let regions = Regions {
            d_attn: layout.add("grad_attention fp32", 4 * matrix),
            o: layout.add("attention output bf16", 2 * matrix),
            dqkv: layout.add("dq, dk, dv bf16", 6 * matrix),
            bias_partials: layout.add("bias partial sums", 12 * (tiles.bias_rows * d_model) as u64),
            out_bias_partials: layout.add("out bias partial sums", 4 * (column_sum_rows * d_model) as u64),
            stats: layout.add("long chunks' statistics", 16 * stats_rows),
            flash: flash::Regions::new(&mut layout, slots as u64),
            d_attn_gemm: layout.add("partial sums, grad_attention", d_attn_gemm.workspace_bytes()),
            gradients_gemm: layout.add("partial sums, gradients", gradients_gemm.workspace_bytes()),
        };
        Ok(Plan {
            shape: *shape,
            cu_seqlens: cu_seqlens.clone(),
            target: *target,
            tiles,
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

    /// Chunk offsets that it is for.
    pub fn cu_seqlens(&self) -> &CuSeqlens {
        &self.cu_seqlens
    }

    /// Machine that it is for.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Blocks of the attention kernels.
    pub fn tiles(&self) -> &AttentionTiles {
        &self.tiles
    }

    /// The product grad_output @ out_weight.
    pub fn d_attn_gemm(&self) -> &GemmPlan {
        &self.d_attn_gemm
    }

    /// The products that are grad_hidden_states and the gradients of q_weight, k_weight, v_weight and out_weight, in this order.
    pub fn gradients_gemm(&self) -> &GemmPlan {
        &self.gradients_gemm
    }

    /// Rows that belong to a chunk.
    pub(super) fn tokens(&self) -> usize {
        self.cu_seqlens.padding().start
    }

    /// Whether the gradients GEMM sums the biases' gradients, too; else kernels of their own do.
    pub(super) fn biases_ride(&self) -> bool {
        self.gradients_gemm.is_hopper()
    }

    /// Every launch of a run, in order, and what is particular about it.
    fn launches(&self) -> Vec<String> {
        let mut launches = Vec::new();
        if !self.cu_seqlens.padding().is_empty() {
            launches.push("memset of padding rows".into());
        }
        launches.extend(self.d_attn_gemm.kernels().into_iter().map(String::from));
        if !self.biases_ride() && self.tokens() > 0 {
            launches.push("column_sums_bf16".into());
        }
        launches.extend(self.tiles.kernels());
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
fn d_attn_product(tokens: usize, d_model: usize) -> ProductShape {
    ProductShape { m: tokens, n: d_model, k: d_model, num_segments: 1, a_major: Major::K, c_type: OutputType::F32 }
}

/// grad_hidden_states, then the gradients of q_weight, k_weight, v_weight and out_weight. Padding rows take part in none of them:
/// they are outside of m, and outside of k.
fn gradient_products(tokens: usize, d_model: usize) -> [ProductShape; 5] {
    let c_type = OutputType::Bf16;
    let dgrad = ProductShape { m: tokens, n: d_model, k: d_model, num_segments: 3, a_major: Major::K, c_type };
    let wgrad = ProductShape { m: d_model, n: d_model, k: tokens, num_segments: 1, a_major: Major::Mn, c_type };
    [dgrad, wgrad, wgrad, wgrad, wgrad]
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shape, cu) = (&self.shape, &self.cu_seqlens);
        writeln!(
            f,
            "operation A, {}: {} rows ({} padding) in {} chunks of at most {}, {} heads of {HEAD_DIM}",
            self.target,
            shape.total_seq_len,
            cu.padding().len(),
            cu.num_chunks(),
            cu.max_chunk_len(),
            shape.num_heads
        )?;
        let (flops, bytes) = (super::flops(shape, cu) / 1e9, super::bytes(shape) / 1e6);
        writeln!(f, "{flops:.2} GFLOP, {bytes:.1} MB at least")?;
        writeln!(f, "grad_attention: {}", self.d_attn_gemm)?;
        writeln!(f, "attention: {}", self.tiles)?;
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
    fn a_hopper_run_is_three_kernels_and_no_memset() {
        for tokens in [128, 373, 997, 1280] {
            let launches = plan(ModuleKind::Hopper, tokens, 64, 0).launches();
            let names: Vec<&str> = launches.iter().filter_map(|l| l.split(' ').next()).collect();
            assert_eq!(names, ["wgmma_bf16_f32", "attention_short_64", "wgmma_bf16_bf16"], "{tokens}");
        }
    }

    #[test]
    fn padding_rows_are_zeroed_ahead_of_the_first_kernel() {
        let launches = plan(ModuleKind::Hopper, 300, 150, 20).launches();
        assert_eq!((launches.len(), launches[0].as_str()), (5, "memset of padding rows"));
        assert!(launches[2].starts_with("attention_long_q") && launches[3].starts_with("attention_long_k"));
    }

    #[test]
    fn long_chunks_take_the_hopper_kernels_where_there_is_enough_to_do() {
        for (tokens, len, flash) in [(300, 150, false), (250, 250, false), (520, 260, true), (4096, 200, true)] {
            let launches = plan(ModuleKind::Hopper, tokens, len, 0).launches();
            let expected = if flash { &FLASH_KERNELS[..] } else { &["attention_long_q", "attention_long_k"] };
            assert_eq!(launches[1..launches.len() - 1], *expected, "{tokens} in chunks of {len}");
        }
        let portable = plan(ModuleKind::Portable, 4096, 4096, 0);
        assert!(!portable.tiles().flash && portable.launches().contains(&"attention_long_q".into()));
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
