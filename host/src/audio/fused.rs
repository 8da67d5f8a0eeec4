//! The fused attention kernels: grad_attention is multiplied by the blocks that need it. On Hopper, where no chunk is longer than the short kernel takes.
use std::fmt;

use attn_backward_kernels::config::{attention, attention_fused as config};
use attn_backward_kernels::params::AttentionParams;
use attn_backward_kernels::params_wgmma::AttentionFusedParams;

use super::{Capacity, DeviceInputs, Plan};
use crate::gpu::{Gpu, Kernel, Launch, LaunchConfig, ModuleKind, Stream, Swizzle, TensorMapDtype, TiledTensor};
use crate::{Error, Target};

/// The fused kernel multiplies every chunk as if it were as long as it takes: that pays if it makes the product no more than this many times as large
/// and a multiprocessor has no more than `MOST_BLOCKS_AN_SM` blocks in all (H200, us for all of operation A, fused and not: 1280 tokens in chunks of
/// 32 89.2 and 79.5; in chunks of 64, 2048 tokens 106.3 and 104.8, 4096 198.2 and 185.2; 4096 in chunks of 128 207.6 and 213.4),
const MOST_TIMES_THE_ROWS: usize = 2;
/// See `MOST_TIMES_THE_ROWS`.
const MOST_BLOCKS_AN_SM: usize = 5;
/// or if it has no more blocks than this, whatever their chunks (640 tokens in chunks of 16, 7 blocks an SM: 72.6 and 63.5). Estimated.
const FEW_BLOCKS_AN_SM: usize = 2;

/// How the fused kernel runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FusedPlan {
    /// Size of the kernel in 16-row tiles.
    pub row_tiles: u32,
    /// Stages of its ring: as many as leave room for the blocks that an SM gets.
    pub stages: u32,
}

impl FusedPlan {
    /// The smallest kernel that holds every chunk inside of `capacity`. `None` where grad_attention is a product of its own: without rows, with chunks
    /// too long for it or much shorter, or in the portable module.
    pub fn new(capacity: Capacity, rows: usize, num_heads: usize, target: &Target) -> Option<FusedPlan> {
        let longest = capacity.max_chunk_len.min(rows);
        let row_tiles =
            attention::SHORT_ROW_TILES.into_iter().find(|&t| longest <= attention::short_rows(t) as usize)?;
        let chunks = capacity.num_chunks.max(1);
        let blocks_per_sm = chunks.saturating_mul(num_heads).div_ceil(target.num_sms.max(1));
        let multiplied = chunks.saturating_mul(attention::short_rows(row_tiles) as usize);
        let pays = blocks_per_sm <= FEW_BLOCKS_AN_SM
            || blocks_per_sm <= MOST_BLOCKS_AN_SM && multiplied <= MOST_TIMES_THE_ROWS.saturating_mul(rows);
        if target.module != ModuleKind::Hopper || rows == 0 || !pays {
            return None;
        }
        let most = config::blocks_per_sm(row_tiles);
        let stages = config::stages(row_tiles, most.min(blocks_per_sm.try_into().unwrap_or(most)));
        let fits = config::shared_bytes(row_tiles, stages) as usize <= target.max_shared_bytes;
        (fits && chunks <= config::MAX_CHUNKS).then_some(FusedPlan { row_tiles, stages })
    }

    /// Name of the kernel.
    pub fn kernel(&self) -> String {
        format!("attention_fused_{}", attention::short_rows(self.row_tiles))
    }
}

impl fmt::Display for FusedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (grad_attention inside, {} stages of {} k)", self.kernel(), self.stages, config::STAGE_K)
    }
}

/// The kernel on a GPU.
#[derive(Debug)]
pub(super) struct FusedAttention {
    gpu: Gpu,
    plan: FusedPlan,
    kernel: Kernel,
    config: LaunchConfig,
}

impl FusedAttention {
    /// Finds the kernel.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(gpu: &Gpu, plan: &Plan, fused: FusedPlan) -> Result<FusedAttention, Error> {
        let config = LaunchConfig {
            grid: [plan.tiles.short_blocks(), plan.shape().num_heads as u32, 1],
            block: config::threads(fused.row_tiles),
            shared_bytes: config::shared_bytes(fused.row_tiles, fused.stages),
            launch: Launch::Normal,
        };
        let kernel = gpu.kernel(plan.target().module, &fused.kernel())?;
        Ok(FusedAttention { gpu: gpu.clone(), plan: fused, kernel, config })
    }

    /// Parameters of a run: those of the other attention kernels, and the counters `(address, bytes)` to be zeroed.
    ///
    /// # Errors
    /// The driver's, for tensors that no tensor map describes.
    pub fn prepare(
        &self,
        inputs: &DeviceInputs<'_>,
        attention: AttentionParams,
        (zero, zero_bytes): (u64, usize),
    ) -> Result<AttentionFusedParams, Error> {
        let d_model = u64::from(attention.num_heads * attention::HEAD_DIM);
        let map = |name, address, rows: u32, box_dims: [u32; 2]| {
            let tensor = TiledTensor {
                address,
                dtype: TensorMapDtype::Bf16,
                dims: &[d_model, rows.into()],
                outer_strides_bytes: &[2 * d_model],
                box_dims: &box_dims,
                swizzle: Swizzle::Bytes128,
            };
            tensor.encode(&self.gpu, name)
        };
        let rows = attention::short_rows(self.plan.row_tiles);
        let (weight, grad_output) = (inputs.out_weight.address(), inputs.grad_output.address());
        Ok(AttentionFusedParams {
            out_weight: map("out_weight", weight, d_model as u32, [attention::HEAD_DIM, config::STAGE_K])?,
            grad_output: map("grad_output", grad_output, attention.total_seq_len, [config::STAGE_K, rows])?,
            attention,
            zero: zero as *mut u32,
            zero_words: (zero_bytes / 4) as u32,
            stages: self.plan.stages,
            reserved: [0; 2],
        })
    }

    /// Enqueues a prepared run.
    ///
    /// # Safety
    /// As [`Kernel::launch`].
    pub unsafe fn launch(&self, stream: &Stream, params: &AttentionFusedParams) -> Result<(), Error> {
        // SAFETY: the caller's.
        unsafe { Ok(self.kernel.launch(stream, &self.config, params)?) }
    }
}
