//! Operation A on a GPU: plan and tensors -> launches on a stream.
use attn_backward_kernels::config::attention as config;
use attn_backward_kernels::params::{AttentionParams, AttentionTile, ColumnSumsParams, PartialSum, SumPartialsParams};

use super::{DeviceGradients, DeviceInputs, Plan};
use crate::Error;
use crate::gemm::{GroupedGemm, ProductTensors};
use crate::gpu::{Buffer, Gpu, Kernel, Launch, LaunchConfig, Stream, TensorViewMut};
use crate::workspace::Workspace;

/// Operation A, ready to run on one GPU for one shape and one cut into chunks. Runs on several streams and threads may overlap, each with
/// a workspace of its own.
#[derive(Debug)]
pub struct Backward {
    gpu: Gpu,
    plan: Plan,
    d_attn_gemm: GroupedGemm,
    gradients_gemm: GroupedGemm,
    attention: Vec<AttentionLaunch>,
    column_sums: Kernel,
    sum_partials: Kernel,
}

/// One launch of an attention kernel: a block per tile and head.
#[derive(Debug)]
struct AttentionLaunch {
    kernel: Kernel,
    config: LaunchConfig,
    /// Address of the tiles, which `Tables` keeps.
    tiles: std::sync::Arc<Buffer<AttentionTile>>,
}

impl Backward {
    /// Finds the plan's kernels on `gpu`; may compile the PTX, allocates tables, waits for the device.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn new(gpu: &Gpu, plan: Plan) -> Result<Backward, Error> {
        let module = plan.target().module;
        Ok(Backward {
            gpu: gpu.clone(),
            d_attn_gemm: GroupedGemm::new(gpu, module, &plan.d_attn_gemm)?,
            gradients_gemm: GroupedGemm::new(gpu, module, &plan.gradients_gemm)?,
            attention: attention_launches(gpu, &plan)?,
            column_sums: gpu.kernel(module, "column_sums_bf16")?,
            sum_partials: gpu.kernel(module, "sum_partials")?,
            plan,
        })
    }

    /// The plan that it runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Enqueues the operation on `stream`: no allocation, no waiting, may be captured into a CUDA graph. Every element of `gradients`
    /// is overwritten. `inputs`, `gradients` and `workspace` must outlive the work enqueued.
    ///
    /// # Errors
    /// [`Error::Dtype`], [`Error::Shape`], [`Error::Layout`], a wrong device or too small a workspace, before anything is launched;
    /// [`Error::Gpu`] if a launch fails.
    pub fn run(
        &self,
        stream: &Stream,
        inputs: &DeviceInputs<'_>,
        gradients: &mut DeviceGradients<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        let (shape, regions) = (self.plan.shape(), &self.plan.regions);
        inputs.check(&self.gpu, shape)?;
        gradients.check(&self.gpu, shape)?;
        workspace.check(&self.gpu, self.plan.workspace())?;
        let d_attn = self.d_attn_product(inputs, workspace);
        let d_attn = self.d_attn_gemm.prepare(&[d_attn], workspace.at(regions.d_attn_gemm))?;
        let products = self.gradient_products(inputs, gradients, workspace);
        let products = self.gradients_gemm.prepare(&products, workspace.at(regions.gradients_gemm))?;

        // SAFETY: the tensors have the shape's sizes and the workspace the plan's, checked above; they outlive the
        // work, and each launch reads what those before it on the stream wrote.
        unsafe {
            self.d_attn_gemm.launch(stream, &d_attn)?;
            self.launch_column_sums(stream, inputs, workspace)?;
            for launch in &self.attention {
                let params = self.attention_params(launch, inputs, workspace);
                launch.kernel.launch(stream, &launch.config, &params)?;
            }
            self.gradients_gemm.launch(stream, &products)?;
            self.launch_bias_sums(stream, gradients, workspace)?;
            self.zero_padding(stream, gradients)
        }
    }

    fn tokens(&self) -> usize {
        self.plan.cu_seqlens().padding().start
    }

    fn d_attn_product(&self, inputs: &DeviceInputs<'_>, workspace: &Workspace) -> ProductTensors {
        let d_model = self.plan.shape().d_model() as u32;
        ProductTensors {
            a: [inputs.grad_output.address(), 0, 0],
            b: [inputs.out_weight.address(), 0, 0],
            c: workspace.at(self.plan.regions.d_attn),
            lda: d_model,
            ldb: d_model,
            ldc: d_model,
            ..Default::default()
        }
    }

    /// The tensors of the plan's gradient products, in its order.
    fn gradient_products(
        &self,
        inputs: &DeviceInputs<'_>,
        gradients: &DeviceGradients<'_>,
        workspace: &Workspace,
    ) -> [ProductTensors; 5] {
        let d_model = self.plan.shape().d_model() as u32;
        let regions = &self.plan.regions;
        // dQ | dK | dV stand side by side in rows of 3 d_model.
        let dqkv = [0, 1, 2].map(|i| workspace.at(regions.dqkv) + i * 2 * u64::from(d_model));
        let weights = [&inputs.q_weight, &inputs.k_weight, &inputs.v_weight].map(|w| w.address());
        let product = |a, lda, b, c: &TensorViewMut<'_>| ProductTensors {
            a,
            b,
            c: c.address(),
            lda,
            ldb: d_model,
            ldc: d_model,
            ..Default::default()
        };
        let hidden = [inputs.hidden_states.address(), 0, 0];
        [
            product(dqkv, 3 * d_model, weights, &gradients.grad_hidden_states),
            product([dqkv[0], 0, 0], 3 * d_model, hidden, &gradients.grad_q_weight),
            product([dqkv[1], 0, 0], 3 * d_model, hidden, &gradients.grad_k_weight),
            product([dqkv[2], 0, 0], 3 * d_model, hidden, &gradients.grad_v_weight),
            product(
                [inputs.grad_output.address(), 0, 0],
                d_model,
                [workspace.at(regions.o), 0, 0],
                &gradients.grad_out_weight,
            ),
        ]
    }

    fn attention_params(
        &self,
        launch: &AttentionLaunch,
        inputs: &DeviceInputs<'_>,
        workspace: &Workspace,
    ) -> AttentionParams {
        let (shape, regions) = (self.plan.shape(), &self.plan.regions);
        AttentionParams {
            query_states: inputs.query_states.address() as *const u8,
            key_states: inputs.key_states.address() as *const u8,
            value_states: inputs.value_states.address() as *const u8,
            d_attn: workspace.at(regions.d_attn) as *const u8,
            tiles: launch.tiles.address() as *const AttentionTile,
            o: workspace.at(regions.o) as *mut u8,
            dqkv: workspace.at(regions.dqkv) as *mut u8,
            bias_partials: workspace.at(regions.bias_partials) as *mut f32,
            stats: workspace.at(regions.stats) as *mut f32,
            total_seq_len: shape.total_seq_len as u32,
            num_heads: shape.num_heads as u32,
            scale: shape.scale,
            reserved: 0,
        }
    }

    /// # Safety
    /// As [`Kernel::launch`].
    unsafe fn launch_column_sums(
        &self,
        stream: &Stream,
        inputs: &DeviceInputs<'_>,
        workspace: &Workspace,
    ) -> Result<(), Error> {
        let (rows, columns) = (self.tokens() as u32, self.plan.shape().d_model() as u32);
        if rows == 0 {
            return Ok(());
        }
        let rows_per_block = config::column_sums_rows_per_block(rows);
        let params = ColumnSumsParams {
            x: inputs.grad_output.address() as *const u16,
            partials: workspace.at(self.plan.regions.out_bias_partials) as *mut f32,
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

    /// # Safety
    /// As [`Kernel::launch`].
    unsafe fn launch_bias_sums(
        &self,
        stream: &Stream,
        gradients: &DeviceGradients<'_>,
        workspace: &Workspace,
    ) -> Result<(), Error> {
        let regions = &self.plan.regions;
        let columns = self.plan.shape().d_model() as u32;
        let blocks = columns.div_ceil(config::SUM_PARTIALS_COLUMNS);
        let tokens = self.tokens() as u32;
        let column_sum_rows = tokens.div_ceil(config::column_sums_rows_per_block(tokens));
        let qkv = |index: u32, out: &TensorViewMut<'_>| PartialSum {
            partials: (workspace.at(regions.bias_partials) + u64::from(4 * index * columns)) as *const f32,
            out: out.address() as *mut u16,
            rows: self.plan.tiles.bias_rows as u32,
            pitch: 3 * columns,
            columns,
            first_block: index * blocks,
        };
        let params = SumPartialsParams {
            sums: [
                qkv(0, &gradients.grad_q_bias),
                qkv(1, &gradients.grad_k_bias),
                qkv(2, &gradients.grad_v_bias),
                PartialSum {
                    partials: workspace.at(regions.out_bias_partials) as *const f32,
                    out: gradients.grad_out_bias.address() as *mut u16,
                    rows: column_sum_rows,
                    pitch: columns,
                    columns,
                    first_block: 3 * blocks,
                },
            ],
        };
        let config = LaunchConfig {
            grid: [4 * blocks, 1, 1],
            block: config::SUM_PARTIALS_THREADS,
            shared_bytes: config::SUM_PARTIALS_SHARED_BYTES,
            launch: Launch::Normal,
        };
        // SAFETY: the caller's.
        unsafe { Ok(self.sum_partials.launch(stream, &config, &params)?) }
    }

    /// Zeros in the rows of grad_hidden_states that belong to no chunk.
    ///
    /// # Safety
    /// The gradients were checked.
    unsafe fn zero_padding(&self, stream: &Stream, gradients: &DeviceGradients<'_>) -> Result<(), Error> {
        let row_bytes = 2 * self.plan.shape().d_model();
        let padding = self.plan.cu_seqlens().padding();
        let first = gradients.grad_hidden_states.address() + (padding.start * row_bytes) as u64;
        // SAFETY: the rows lie in grad_hidden_states.
        unsafe { Ok(stream.fill(first, 0, padding.len() * row_bytes)?) }
    }
}

/// The attention kernels that the plan's chunks need, in order.
fn attention_launches(gpu: &Gpu, plan: &Plan) -> Result<Vec<AttentionLaunch>, Error> {
    let (tiles, module) = (&plan.tiles, plan.target().module);
    let heads = plan.shape().num_heads as u32;
    let table = |tiles: &[AttentionTile]| -> Result<_, Error> {
        Ok(std::sync::Arc::new(Buffer::from_slice(gpu, "the table of attention tiles", tiles)?))
    };
    let launch = |name: &str, table: &std::sync::Arc<Buffer<AttentionTile>>, block, shared_bytes| -> Result<_, Error> {
        let grid = [table.len() as u32, heads, 1];
        let config = LaunchConfig { grid, block, shared_bytes, launch: Launch::Normal };
        Ok(AttentionLaunch { kernel: gpu.kernel(module, name)?, config, tiles: table.clone() })
    };
    let mut launches = Vec::new();
    if !tiles.short.is_empty() {
        let row_tiles = tiles.short_row_tiles;
        let name = format!("attention_short_{}", config::short_rows(row_tiles));
        let (block, shared_bytes) = (config::short_threads(row_tiles), config::short_shared_bytes(row_tiles));
        launches.push(launch(&name, &table(&tiles.short)?, block, shared_bytes)?);
    }
    if !tiles.long.is_empty() {
        let table = table(&tiles.long)?;
        launches.push(launch("attention_long_q", &table, config::LONG_THREADS, config::LONG_Q_SHARED_BYTES)?);
        launches.push(launch("attention_long_k", &table, config::LONG_THREADS, config::LONG_K_SHARED_BYTES)?);
    }
    Ok(launches)
}
