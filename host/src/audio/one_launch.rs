//! Operation A in one launch, `audio_backward_*`: on Hopper, where no chunk is longer than a short kernel takes.
use attn_backward_kernels::config::{attention, audio_backward as config, wgmma};
use attn_backward_kernels::params::AttentionParams;
use attn_backward_kernels::params_wgmma::{AudioBeside, FIRST_AUDIO_MAP, WgmmaParams};

use super::{Capacity, DeviceInputs, Plan};
use crate::gpu::{
    Gpu, GpuError, Kernel, Launch, LaunchConfig, ModuleKind, Stream, Swizzle, TensorMapDtype, TiledTensor,
};
use crate::{Error, Target};

/// Name of the kernel for teams of `row_tiles` row tiles, one of `TEAM_ROW_TILES`.
pub(super) fn kernel_name(row_tiles: u32) -> &'static str {
    const { assert!(matches!(config::TEAM_ROW_TILES, [4, 5, 8])) };
    match row_tiles {
        4 => "audio_backward_64",
        5 => "audio_backward_80",
        _ => "audio_backward_128",
    }
}

/// (chunk, head) items that a team takes at most: with more of them the attention kernel of its own, which has more blocks on an SM, saves more than
/// the launches cost. Estimated, not measured.
const MOST_ITEMS_A_TEAM: usize = 6;

/// Row tiles of the teams, if one launch is the way: the fewest that hold the longest chunk. `None` in the portable module, without rows, and where
/// chunks are too long or too many.
pub(super) fn team_row_tiles(capacity: Capacity, rows: usize, num_heads: usize, target: &Target) -> Option<u32> {
    let longest = capacity.max_chunk_len.min(rows);
    let row_tiles = config::TEAM_ROW_TILES.into_iter().find(|&t| longest <= attention::short_rows(t) as usize)?;
    let teams = target.num_sms * config::most_teams(row_tiles) as usize;
    let items = capacity.num_chunks.max(1).saturating_mul(num_heads);
    let fits = target.module == ModuleKind::Hopper && rows > 0 && items <= MOST_ITEMS_A_TEAM * teams;
    fits.then_some(row_tiles)
}

/// The kernel on a GPU.
#[derive(Debug)]
pub(super) struct OneLaunch {
    gpu: Gpu,
    kernel: Kernel,
    config: LaunchConfig,
    row_tiles: u32,
    teams: u32,
}

impl OneLaunch {
    /// Finds the kernel, for teams of `row_tiles` row tiles.
    ///
    /// # Errors
    /// [`GpuError::CooperativeGrid`] if the plan is for more SMs than the GPU has; errors of the driver.
    pub fn new(gpu: &Gpu, plan: &Plan, row_tiles: u32) -> Result<OneLaunch, Error> {
        let name = kernel_name(row_tiles);
        let (blocks, available) = (plan.target().num_sms, gpu.properties().num_sms as usize);
        if blocks > available {
            return Err(GpuError::CooperativeGrid { kernel: name, blocks, available }.into());
        }
        let config = LaunchConfig {
            grid: [blocks as u32, 1, 1],
            block: wgmma::THREADS,
            shared_bytes: wgmma::SMEM_BYTES,
            launch: Launch::Cooperative,
        };
        let kernel = gpu.kernel(plan.target().module, name)?;
        let items = plan.capacity().num_chunks as u64 * plan.shape().num_heads as u64;
        let teams = config::teams(row_tiles, items, blocks as u32);
        Ok(OneLaunch { gpu: gpu.clone(), kernel, config, row_tiles, teams })
    }

    /// Parameters of a run: those of the products, with `counter_bytes` of counters, those of the attention kernels, and the address of two words
    /// that are zero between runs.
    ///
    /// # Errors
    /// The driver's, for tensors that no tensor map describes.
    pub fn prepare(
        &self,
        inputs: &DeviceInputs<'_>,
        (gemm, counter_bytes): (&WgmmaParams, usize),
        attention: AttentionParams,
        done: u64,
    ) -> Result<Box<WgmmaParams<AudioBeside>>, Error> {
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
        let (weight, grad_output) = (inputs.out_weight.address(), inputs.grad_output.address());
        let rows = attention::short_rows(self.row_tiles);
        let beside = AudioBeside {
            rider: gemm.beside,
            attention,
            done: done as *mut u32,
            num_counters: (counter_bytes / 4) as u32,
            teams: self.teams,
            stages: config::stages(self.row_tiles, self.teams),
            reserved: 0,
        };
        let mut params = gemm.with_beside(beside);
        params.maps[FIRST_AUDIO_MAP] =
            map("out_weight", weight, d_model as u32, [attention::HEAD_DIM, config::STAGE_K])?;
        let boxes = [config::STAGE_K, rows];
        params.maps[FIRST_AUDIO_MAP + 1] = map("grad_output", grad_output, attention.total_seq_len, boxes)?;
        Ok(Box::new(params))
    }

    /// Enqueues a prepared run.
    ///
    /// # Safety
    /// As [`Kernel::launch`].
    pub unsafe fn launch(&self, stream: &Stream, params: &WgmmaParams<AudioBeside>) -> Result<(), Error> {
        // SAFETY: the caller's.
        unsafe { Ok(self.kernel.launch(stream, &self.config, params)?) }
    }
}
