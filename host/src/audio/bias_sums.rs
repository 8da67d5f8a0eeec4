//! The two kernels that sum biases' gradients where no GEMM takes them along: `column_sums_bf16` and `sum_partials`.
use attn_backward_kernels::config::attention as config;
use attn_backward_kernels::params::{ColumnSumsParams, PartialSum, SumPartialsParams};

use super::{DeviceGradients, DeviceInputs, Plan};
use crate::Error;
use crate::gpu::{Gpu, Kernel, Launch, LaunchConfig, Stream};
use crate::workspace::Workspace;

/// Both kernels.
#[derive(Debug)]
pub(super) struct BiasSums {
    column_sums: Kernel,
    sum_partials: Kernel,
}

impl BiasSums {
    /// Finds the kernels in the plan's module.
    pub(super) fn new(gpu: &Gpu, plan: &Plan) -> Result<BiasSums, Error> {
        let module = plan.target().module;
        Ok(BiasSums {
            column_sums: gpu.kernel(module, "column_sums_bf16")?,
            sum_partials: gpu.kernel(module, "sum_partials")?,
        })
    }

    /// Partial sums of grad_output's columns.
    ///
    /// # Safety
    /// As [`Kernel::launch`].
    pub(super) unsafe fn launch_column_sums(
        &self,
        stream: &Stream,
        plan: &Plan,
        inputs: &DeviceInputs<'_>,
        workspace: &Workspace,
    ) -> Result<(), Error> {
        let (rows, columns) = (plan.shape().total_seq_len as u32, plan.shape().d_model() as u32);
        if rows == 0 {
            return Ok(());
        }
        let rows_per_block = config::column_sums_rows_per_block(rows);
        let params = ColumnSumsParams {
            x: inputs.grad_output.address() as *const u16,
            partials: workspace.at(plan.regions.out_bias_partials) as *mut f32,
            row_limit: plan.token_count(inputs) as *const i32,
            rows,
            columns,
            rows_per_block,
            reserved: 0,
        };
        let config = LaunchConfig {
            grid: [columns.div_ceil(config::COLUMN_SUMS_COLUMNS), rows.div_ceil(rows_per_block), 1],
            block: config::COLUMN_SUMS_THREADS,
            shared_bytes: config::COLUMN_SUMS_SHARED_BYTES,
            launch: Launch::Normal,
        };
        // SAFETY: the caller's.
        unsafe { Ok(self.column_sums.launch(stream, &config, &params)?) }
    }

    /// The four bias gradients from partial sums.
    ///
    /// # Safety
    /// As [`Kernel::launch`].
    pub(super) unsafe fn launch_sum_partials(
        &self,
        stream: &Stream,
        plan: &Plan,
        gradients: &DeviceGradients<'_>,
        workspace: &Workspace,
    ) -> Result<(), Error> {
        let columns = plan.shape().d_model() as u32;
        let blocks = columns.div_ceil(config::SUM_PARTIALS_COLUMNS);
        let total_seq_len = plan.shape().total_seq_len as u32;
        let [q, k, v] = qkv_sums(plan, gradients, workspace);
        let out = PartialSum {
            partials: workspace.at(plan.regions.out_bias_partials) as *const f32,
            out: gradients.grad_out_bias.address() as *mut u16,
            rows: total_seq_len.div_ceil(config::column_sums_rows_per_block(total_seq_len)),
            pitch: columns,
            columns,
            first_block: 3 * blocks,
        };
        let config = LaunchConfig {
            grid: [4 * blocks, 1, 1],
            block: config::SUM_PARTIALS_THREADS,
            shared_bytes: config::SUM_PARTIALS_SHARED_BYTES,
            launch: Launch::Normal,
        };
        // SAFETY: the caller's.
        unsafe { Ok(self.sum_partials.launch(stream, &config, &SumPartialsParams { sums: [q, k, v, out] })?) }
    }
}

/// The sums that make grad_q_bias, grad_k_bias and grad_v_bias of what the attention kernels leave.
pub(super) fn qkv_sums(plan: &Plan, gradients: &DeviceGradients<'_>, workspace: &Workspace) -> [PartialSum; 3] {
    let columns = plan.shape().d_model() as u32;
    let outputs = [&gradients.grad_q_bias, &gradients.grad_k_bias, &gradients.grad_v_bias];
    [0, 1, 2].map(|index: u32| PartialSum {
        partials: (workspace.at(plan.regions.bias_partials) + u64::from(4 * index * columns)) as *const f32,
        out: outputs[index as usize].address() as *mut u16,
        rows: plan.tiles.bias_rows() as u32,
        pitch: 3 * columns,
        columns,
        first_block: index * columns.div_ceil(config::SUM_PARTIALS_COLUMNS),
    })
}
