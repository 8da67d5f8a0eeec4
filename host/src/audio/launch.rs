//! Operation A on a GPU: plan and tensors -> launches on a stream.
//!
//! **Order.** Memsets (padding rows; counters, if no rider zeroes them), grad_attention GEMM, column sums, attention kernels, gradients GEMM,
//! bias sums. Where the GEMMs are wgmma kernels their riders do the small work instead: the first one zeroes the counters of the second, the second
//! sums columns and biases.
use std::sync::Arc;

use attn_backward_kernels::config::attention as config;
use attn_backward_kernels::params::{AttentionParams, AttentionTile};

use super::bias_sums::BiasSums;
use super::flash::FlashAttention;
use super::tiles::LONG_KERNELS;
use super::{DeviceGradients, DeviceInputs, Plan, riders};
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
    /// The long kernels of the Hopper module, if the plan has them.
    flash: Option<FlashAttention>,
    /// `None`: the gradients GEMM's rider sums.
    bias_sums: Option<BiasSums>,
}

/// One launch of an attention kernel: a block per tile and head.
#[derive(Debug)]
struct AttentionLaunch {
    kernel: Kernel,
    config: LaunchConfig,
    /// The table of its tiles; one serves both long kernels.
    tiles: Arc<Buffer<AttentionTile>>,
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
            flash: FlashAttention::new(gpu, &plan)?,
            bias_sums: if plan.biases_ride() { None } else { Some(BiasSums::new(gpu, &plan)?) },
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
        let mut d_attn = self.d_attn_gemm.prepare(&[d_attn], workspace.at(regions.d_attn_gemm))?;
        let products = self.gradient_products(inputs, gradients, workspace);
        let mut products = self.gradients_gemm.prepare(&products, workspace.at(regions.gradients_gemm))?;
        d_attn.take_rider(riders::zero_counters(products.counters()));
        products.take_rider(riders::sum_biases(&self.plan, inputs, gradients, workspace));

        // SAFETY: the tensors have the shape's sizes and the workspace the plan's, checked above; they outlive the work, and each launch
        // reads what those before it on the stream wrote.
        unsafe {
            self.zero_padding(stream, gradients)?;
            if !self.plan.d_attn_gemm.is_hopper() {
                products.zero_counters(stream)?;
            }
            self.d_attn_gemm.launch(stream, &d_attn)?;
            if let Some(bias_sums) = &self.bias_sums {
                bias_sums.launch_column_sums(stream, &self.plan, inputs, workspace)?;
            }
            for launch in &self.attention {
                let params = self.attention_params(launch, inputs, workspace);
                launch.kernel.launch(stream, &launch.config, &params)?;
            }
            if let Some(flash) = &self.flash {
                flash.launch(stream, &self.plan, inputs, workspace)?;
            }
            self.gradients_gemm.launch_zeroed(stream, &products)?;
            if let Some(bias_sums) = &self.bias_sums {
                bias_sums.launch_sum_partials(stream, &self.plan, gradients, workspace)?;
            }
        }
        Ok(())
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
        Ok(Arc::new(Buffer::from_slice(gpu, "the table of attention tiles", tiles)?))
    };
    let launch = |name: &str, table: &Arc<Buffer<AttentionTile>>, block, shared_bytes| -> Result<_, Error> {
        let grid = [table.len() as u32, heads, 1];
        let config = LaunchConfig { grid, block, shared_bytes, launch: Launch::Normal };
        Ok(AttentionLaunch { kernel: gpu.kernel(module, name)?, config, tiles: table.clone() })
    };
    let mut launches = Vec::new();
    if !tiles.short.is_empty() {
        let row_tiles = tiles.short_row_tiles;
        let (block, shared_bytes) = (config::short_threads(row_tiles), config::short_shared_bytes(row_tiles));
        launches.push(launch(&tiles.short_kernel(), &table(&tiles.short)?, block, shared_bytes)?);
    }
    if !tiles.long.is_empty() && !tiles.flash {
        let table = table(&tiles.long)?;
        for (name, shared_bytes) in
            LONG_KERNELS.into_iter().zip([config::LONG_Q_SHARED_BYTES, config::LONG_K_SHARED_BYTES])
        {
            launches.push(launch(name, &table, config::LONG_THREADS, shared_bytes)?);
        }
    }
    Ok(launches)
}
