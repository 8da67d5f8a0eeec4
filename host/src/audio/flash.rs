//! The Hopper kernels for long chunks: their workspace and launches.
use attn_backward_kernels::config::attention_flash as config;
use attn_backward_kernels::params::{AttentionTile, FlashParams};

use super::tiles::FLASH_KERNELS;
use super::{DeviceInputs, Plan};
use crate::gpu::{Buffer, Gpu, Kernel, Launch, LaunchConfig, Stream};
use crate::workspace::Workspace;
use crate::{Error, Region, WorkspaceLayout};

/// Places in the workspace, all empty if the kernels do not run. See [`FlashParams`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Regions {
    largest: Region,
    exponents: Region,
    operands: Region,
    statistics: Region,
    dq: Region,
    counters: Region,
}

impl Regions {
    /// Adds the regions of so many slots (tiles of one head) to `layout`.
    pub fn new(layout: &mut WorkspaceLayout, slots: u64) -> Regions {
        let operands = u64::from(config::OPERANDS);
        let counters = if slots == 0 { 0 } else { 2 * slots + 1 };
        Regions {
            largest: layout.add("long chunks' largest exponents", 4 * operands * slots),
            exponents: layout.add("long chunks' scale exponents", 4 * operands * slots),
            operands: layout.add("long chunks' operands fp16", u64::from(config::TILE_BYTES) * operands * slots),
            statistics: layout.add("long chunks' row statistics", u64::from(config::STATISTICS_BYTES) * slots),
            dq: layout.add("long chunks' dq fp32", 4 * u64::from(config::DQ_FLOATS) * slots),
            counters: layout.add("long chunks' counters", 4 * counters),
        }
    }
}

/// The five kernels, ready to run.
#[derive(Debug)]
pub(super) struct FlashAttention {
    launches: [(Kernel, LaunchConfig); FLASH_KERNELS.len()],
    tiles: Buffer<AttentionTile>,
}

impl FlashAttention {
    /// Finds the kernels if the plan has them.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn new(gpu: &Gpu, plan: &Plan) -> Result<Option<FlashAttention>, Error> {
        if plan.tiles.long.is_empty() || !plan.tiles.flash {
            return Ok(None);
        }
        let tiles = Buffer::from_slice(gpu, "the table of long chunks' tiles", &plan.tiles.long)?;
        let (num_tiles, num_heads) = (plan.tiles.long.len() as u32, plan.shape().num_heads as u32);
        let a_block_a_slot = [num_tiles, num_heads, 1];
        let slots = num_tiles * num_heads;
        let a_block_an_sm = [slots.min(plan.target().num_sms.max(1) as u32), 1, 1];
        let launch = |name, grid, block, shared_bytes| -> Result<_, Error> {
            let kernel = gpu.kernel(plan.target().module, name)?;
            Ok((kernel, LaunchConfig { grid, block, shared_bytes, launch: Launch::Normal }))
        };
        let [largest, convert, forward, backward, dq] = FLASH_KERNELS;
        let launches = [
            launch(largest, a_block_a_slot, config::ROWS_THREADS, config::LARGEST_SHARED_BYTES)?,
            launch(convert, a_block_a_slot, config::ROWS_THREADS, config::LARGEST_SHARED_BYTES)?,
            launch(forward, a_block_an_sm, config::THREADS, config::forward::SHARED_BYTES)?,
            launch(backward, a_block_an_sm, config::THREADS, config::backward::SHARED_BYTES)?,
            launch(dq, a_block_a_slot, config::ROWS_THREADS, config::DQ_SHARED_BYTES)?,
        ];
        Ok(Some(FlashAttention { launches, tiles }))
    }

    /// Enqueues the kernels.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    ///
    /// # Safety
    /// `inputs` and `workspace` are those of `plan`, checked, and outlive the work; grad_attention has been enqueued.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        plan: &Plan,
        inputs: &DeviceInputs<'_>,
        workspace: &Workspace,
    ) -> Result<(), Error> {
        let params = self.params(plan, inputs, workspace);
        for (kernel, config) in &self.launches {
            // SAFETY: as the caller promises; each kernel reads what those before it wrote.
            unsafe { kernel.launch(stream, config, &params)? };
        }
        Ok(())
    }

    fn params(&self, plan: &Plan, inputs: &DeviceInputs<'_>, workspace: &Workspace) -> FlashParams {
        let (shape, regions) = (plan.shape(), &plan.regions);
        FlashParams {
            query_states: inputs.query_states.address() as *const u8,
            key_states: inputs.key_states.address() as *const u8,
            value_states: inputs.value_states.address() as *const u8,
            d_attn: workspace.at(regions.d_attn) as *const u8,
            tiles: self.tiles.address() as *const AttentionTile,
            largest: workspace.at(regions.flash.largest) as *mut u32,
            exponents: workspace.at(regions.flash.exponents) as *mut i32,
            operands: workspace.at(regions.flash.operands) as *mut u8,
            statistics: workspace.at(regions.flash.statistics) as *mut f32,
            dq: workspace.at(regions.flash.dq) as *mut f32,
            counters: workspace.at(regions.flash.counters) as *mut u32,
            o: workspace.at(regions.o) as *mut u8,
            dqkv: workspace.at(regions.dqkv) as *mut u8,
            bias_partials: workspace.at(regions.bias_partials) as *mut f32,
            total_seq_len: shape.total_seq_len as u32,
            num_heads: shape.num_heads as u32,
            num_tiles: self.tiles.len() as u32,
            scale: shape.scale,
        }
    }
}
