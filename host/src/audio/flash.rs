//! The Hopper kernels for long chunks: their workspace and launches.
use attn_backward_kernels::config::attention_flash as config;
use attn_backward_kernels::params::{AttentionParams, FlashParams, FlashTile};

use super::Plan;
use super::tiles::FLASH_KERNELS;
use crate::gpu::{Gpu, Kernel, Launch, LaunchConfig, Stream};
use crate::workspace::Workspace;
use crate::{Error, Region, WorkspaceLayout};

/// Places in the workspace, all empty if the kernels do not run. See [`FlashParams`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Regions {
    found_tiles: Region,
    tiles: Region,
    largest: Region,
    exponents: Region,
    operands: Region,
    statistics: Region,
    dq: Region,
    counters: Region,
}

impl Regions {
    /// Adds the regions of so many slots of each head to `layout`.
    pub fn new(layout: &mut WorkspaceLayout, slots: u32, num_heads: usize) -> Regions {
        let table = u64::from(slots) * size_of::<FlashTile>() as u64;
        let places = u64::from(slots) * num_heads as u64;
        let operands = u64::from(config::OPERANDS);
        let counters = if places == 0 { 0 } else { 2 * places + 1 };
        Regions {
            found_tiles: layout.add("long chunks' tiles, as found", table),
            tiles: layout.add("long chunks' tiles", table),
            largest: layout.add("long chunks' largest exponents", 4 * operands * places),
            exponents: layout.add("long chunks' scale exponents", 4 * operands * places),
            operands: layout.add("long chunks' operands fp16", u64::from(config::TILE_BYTES) * operands * places),
            statistics: layout.add("long chunks' row statistics", u64::from(config::STATISTICS_BYTES) * places),
            dq: layout.add("long chunks' dq fp32", 4 * u64::from(config::DQ_FLOATS) * places),
            counters: layout.add("long chunks' counters", 4 * counters),
        }
    }
}

/// The five kernels, ready to run.
#[derive(Debug)]
pub(super) struct FlashAttention {
    launches: [(Kernel, LaunchConfig); FLASH_KERNELS.len()],
}

impl FlashAttention {
    /// Finds the kernels if the plan has them.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn new(gpu: &Gpu, plan: &Plan) -> Result<Option<FlashAttention>, Error> {
        if !plan.tiles.flash() {
            return Ok(None);
        }
        let (slots, num_heads) = (plan.tiles.long_blocks(), plan.shape().num_heads as u32);
        let a_block_a_place = [slots, num_heads, 1];
        let places = u64::from(slots) * u64::from(num_heads);
        let a_block_an_sm = [places.min(plan.target().num_sms.max(1) as u64) as u32, 1, 1];
        let launch = |name, grid, block, shared_bytes| -> Result<_, Error> {
            let kernel = gpu.kernel(plan.target().module, name)?;
            Ok((kernel, LaunchConfig { grid, block, shared_bytes, launch: Launch::Normal }))
        };
        let [largest, convert, forward, backward, dq] = FLASH_KERNELS;
        Ok(Some(FlashAttention {
            launches: [
                launch(largest, a_block_a_place, config::ROWS_THREADS, config::LARGEST_SHARED_BYTES)?,
                launch(convert, a_block_a_place, config::ROWS_THREADS, config::CONVERT_SHARED_BYTES)?,
                launch(forward, a_block_an_sm, config::THREADS, config::forward::SHARED_BYTES)?,
                launch(backward, a_block_an_sm, config::THREADS, config::backward::SHARED_BYTES)?,
                launch(dq, a_block_a_place, config::ROWS_THREADS, config::DQ_SHARED_BYTES)?,
            ],
        }))
    }

    /// Enqueues the kernels.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    ///
    /// # Safety
    /// `attention` and `workspace` are those of `plan`, valid until the work is done; grad_attention has been enqueued.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        plan: &Plan,
        attention: AttentionParams,
        workspace: &Workspace,
    ) -> Result<(), Error> {
        let regions = &plan.regions.flash;
        let params = FlashParams {
            attention,
            found_tiles: workspace.at(regions.found_tiles) as *mut FlashTile,
            tiles: workspace.at(regions.tiles) as *mut FlashTile,
            largest: workspace.at(regions.largest) as *mut u32,
            exponents: workspace.at(regions.exponents) as *mut i32,
            operands: workspace.at(regions.operands) as *mut u8,
            statistics: workspace.at(regions.statistics) as *mut f32,
            dq: workspace.at(regions.dq) as *mut f32,
            counters: workspace.at(regions.counters) as *mut u32,
            num_slots: plan.tiles.long_blocks(),
            reserved: 0,
        };
        for (kernel, config) in &self.launches {
            // SAFETY: as the caller promises; each kernel reads what those before it wrote.
            unsafe { kernel.launch(stream, config, &params)? };
        }
        Ok(())
    }
}
