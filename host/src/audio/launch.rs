//! Operation A on a GPU: plan and tensors -> launches on a stream.
//!
//! **Order.** On Hopper, where no chunk is longer than the short kernel takes: the fused attention kernel, gradients GEMM (a dependent launch). Else: memset (counters, if no rider
//! zeroes them), grad_attention GEMM, column sums, attention kernels, gradients GEMM, bias sums. Where those GEMMs are wgmma kernels their riders
//! do the small work instead: the first one zeroes the counters of the second (so does the fused kernel), the second sums columns and biases.
//!
//! **Chunks.** The kernels read `cu_seqlens` on the device; nothing here depends on what it holds. Rows past the last chunk: grad_attention is
//! whatever it is there, the attention kernels write zeros to O, dQ, dK and dV, and sums over tokens end where the device says.
use attn_backward_kernels::config::attention as config;
use attn_backward_kernels::params::AttentionParams;
use attn_backward_kernels::schedule::chunks::TileSlots;

use super::bias_sums::BiasSums;
use super::flash::FlashAttention;
use super::fused::FusedAttention;
use super::tiles::{LONG_KERNELS, short_kernel};
use super::{DeviceGradients, DeviceInputs, Plan, riders};
use crate::Error;
use crate::device_tensors;
use crate::gemm::{GroupedGemm, PreparedGemm, ProductTensors};
use crate::gpu::{Gpu, Kernel, Launch, LaunchConfig, Stream, TensorView, TensorViewMut};
use crate::workspace::Workspace;

/// Operation A, ready to run on one GPU for one shape and any chunks inside of the plan's capacity. Runs on several streams and threads may overlap, each with
/// a workspace of its own.
#[derive(Debug)]
pub struct Backward {
    gpu: Gpu,
    plan: Plan,
    gradients_gemm: GroupedGemm,
    attention: Attention,
    /// `None`: the gradients GEMM's rider sums.
    bias_sums: Option<BiasSums>,
}

/// The way to O, dQ, dK and dV.
#[derive(Debug)]
enum Attention {
    /// A kernel that multiplies grad_attention itself.
    Fused(FusedAttention),
    /// The product, then kernels that read it.
    Separate(Box<SeparateAttention>),
}

/// The product grad_attention, then kernels that read it.
#[derive(Debug)]
struct SeparateAttention {
    d_attn_gemm: GroupedGemm,
    kernels: Vec<(Kernel, LaunchConfig)>,
    /// The long kernels of the Hopper module, if the plan has them.
    flash: Option<FlashAttention>,
}

impl Backward {
    /// Finds the plan's kernels on `gpu`; may compile the PTX, allocates tables, waits for the device.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn new(gpu: &Gpu, plan: Plan) -> Result<Backward, Error> {
        let module = plan.target().module;
        let attention = match (plan.fused, &plan.d_attn_gemm) {
            (Some(fused), _) => Attention::Fused(FusedAttention::new(gpu, &plan, fused)?),
            (None, Some(d_attn_gemm)) => Attention::Separate(Box::new(SeparateAttention {
                d_attn_gemm: GroupedGemm::new(gpu, module, d_attn_gemm)?,
                kernels: attention_launches(gpu, &plan)?,
                flash: FlashAttention::new(gpu, &plan)?,
            })),
            (None, None) => unreachable!("a plan without the product has a kernel that multiplies it"),
        };
        Ok(Backward {
            gpu: gpu.clone(),
            gradients_gemm: GroupedGemm::new(gpu, module, &plan.gradients_gemm)?,
            attention,
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
    /// The kernels read `inputs.cu_seqlens` when they run, so that its content may change between launches of a graph, inside of the plan's
    /// [`Capacity`](super::Capacity). Offsets that break a rule never make a kernel read or write out of bounds: grad_q_bias is then NaN
    /// throughout and the other gradients are unspecified. [`Backward::check_cu_seqlens`] says what is wrong.
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
        let offsets = [self.plan.capacity().num_chunks + 1];
        device_tensors::check::<i32>(&self.gpu, "cu_seqlens", &inputs.cu_seqlens, &offsets)?;
        workspace.check(&self.gpu, self.plan.workspace())?;
        let products = self.gradient_products(inputs, gradients, workspace);
        let mut products = self.gradients_gemm.prepare(&products, workspace.at(regions.gradients_gemm))?;
        products.take_rider(riders::sum_biases(&self.plan, inputs, gradients, workspace));
        let attention = self.attention_params(inputs, workspace);
        // SAFETY: the tensors have the shape's sizes and the workspace the plan's, checked above; they outlive the work. Each launch reads what
        // those before it on the stream wrote.
        unsafe {
            match &self.attention {
                Attention::Fused(fused) => {
                    let attention = fused.prepare(inputs, attention, products.counters())?;
                    fused.launch(stream, &attention)?;
                    products.follow_early();
                }
                Attention::Separate(separate) => {
                    self.launch_separate(stream, separate, inputs, workspace, attention, &products)?;
                }
            }
            self.gradients_gemm.launch_zeroed(stream, &products)?;
            if let Some(bias_sums) = &self.bias_sums {
                bias_sums.launch_sum_partials(stream, &self.plan, gradients, workspace)?;
            }
        }
        Ok(())
    }

    /// Enqueues grad_attention and the kernels that read it; zeroes the counters of `products`.
    ///
    /// # Safety
    /// As in [`Backward::run`], after its checks.
    unsafe fn launch_separate(
        &self,
        stream: &Stream,
        separate: &SeparateAttention,
        inputs: &DeviceInputs<'_>,
        workspace: &Workspace,
        attention: AttentionParams,
        products: &PreparedGemm,
    ) -> Result<(), Error> {
        let SeparateAttention { d_attn_gemm, kernels, flash } = separate;
        let d_attn = [self.d_attn_product(inputs, workspace)];
        let mut d_attn = d_attn_gemm.prepare(&d_attn, workspace.at(self.plan.regions.d_attn_gemm))?;
        d_attn.take_rider(riders::zero_counters(products.counters()));
        // SAFETY: the caller's.
        unsafe {
            if matches!(d_attn, PreparedGemm::Portable(_)) {
                products.zero_counters(stream)?;
            }
            d_attn_gemm.launch(stream, &d_attn)?;
            if let Some(bias_sums) = &self.bias_sums {
                bias_sums.launch_column_sums(stream, &self.plan, inputs, workspace)?;
            }
            for (kernel, config) in kernels {
                kernel.launch(stream, config, &attention)?;
            }
            if let Some(flash) = flash {
                flash.launch(stream, &self.plan, attention, workspace)?;
            }
        }
        Ok(())
    }

    /// Waits for the work that is in `stream`, and checks the content of `cu_seqlens` then: optional, for those who do not trust it. Costs a copy
    /// to the host.
    ///
    /// # Errors
    /// As [`Capacity::check`](super::Capacity::check), naming the first offset that is wrong; as [`Backward::run`] for the tensor itself.
    pub fn check_cu_seqlens(&self, stream: &Stream, cu_seqlens: &TensorView<'_>) -> Result<(), Error> {
        let capacity = self.plan.capacity();
        device_tensors::check::<i32>(&self.gpu, "cu_seqlens", cu_seqlens, &[capacity.num_chunks + 1])?;
        let mut offsets = vec![0i32; capacity.num_chunks + 1];
        // SAFETY: the view is of as many offsets, and whoever made it answers for the memory.
        unsafe { stream.copy_to_host(cu_seqlens.address(), &mut offsets)? };
        capacity.check(&offsets, self.plan.shape().total_seq_len)
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
        let [grad_output_boundary, hidden_boundary] = self.boundaries(workspace);
        let wgrad = |a, lda, b, c, [a_boundary, b_boundary]: [u64; 2]| ProductTensors {
            k_limit: self.plan.token_count(inputs),
            a_boundary,
            b_boundary,
            ..product([a, 0, 0], lda, [b, 0, 0], c)
        };
        let of_hidden =
            |i: usize, c| wgrad(dqkv[i], 3 * d_model, inputs.hidden_states.address(), c, [0, hidden_boundary]);
        let (grad_output, o) = (inputs.grad_output.address(), workspace.at(regions.o));
        [
            product(dqkv, 3 * d_model, weights, &gradients.grad_hidden_states),
            of_hidden(0, &gradients.grad_q_weight),
            of_hidden(1, &gradients.grad_k_weight),
            of_hidden(2, &gradients.grad_v_weight),
            wgrad(grad_output, d_model, o, &gradients.grad_out_weight, [grad_output_boundary, 0]),
        ]
    }

    /// Where the attention kernels leave grad_output's and hidden_states' rows around the last token; 0 if the gradients GEMM needs none.
    fn boundaries(&self, workspace: &Workspace) -> [u64; 2] {
        let region = self.plan.regions.boundary;
        let first = workspace.at(region);
        if region.bytes == 0 { [0, 0] } else { [first, first + region.bytes / 2] }
    }

    fn attention_params(&self, inputs: &DeviceInputs<'_>, workspace: &Workspace) -> AttentionParams {
        let (shape, tiles, regions) = (self.plan.shape(), &self.plan.tiles, &self.plan.regions);
        let capacity = self.plan.capacity();
        AttentionParams {
            query_states: inputs.query_states.address() as *const u8,
            key_states: inputs.key_states.address() as *const u8,
            value_states: inputs.value_states.address() as *const u8,
            d_attn: workspace.at(regions.d_attn) as *const u8,
            cu_seqlens: inputs.cu_seqlens.address() as *const i32,
            o: workspace.at(regions.o) as *mut u8,
            dqkv: workspace.at(regions.dqkv) as *mut u8,
            bias_partials: workspace.at(regions.bias_partials) as *mut f32,
            stats: workspace.at(regions.stats) as *mut f32,
            grad_output: inputs.grad_output.address() as *const u8,
            hidden_states: inputs.hidden_states.address() as *const u8,
            boundary: self.boundaries(workspace)[0] as *mut u8,
            total_seq_len: shape.total_seq_len as u32,
            num_heads: shape.num_heads as u32,
            num_chunks: capacity.num_chunks as u32,
            scale: shape.scale,
            max_chunk_len: capacity.max_chunk_len as u32,
            short_rows: tiles.short_rows(),
            long_slots: tiles.long_slots().unwrap_or(TileSlots::ANY),
            long_bias_row: tiles.short_blocks(),
            reserved: 0,
        }
    }
}

/// The attention kernels that the plan needs, in order.
fn attention_launches(gpu: &Gpu, plan: &Plan) -> Result<Vec<(Kernel, LaunchConfig)>, Error> {
    let (tiles, module) = (&plan.tiles, plan.target().module);
    let heads = plan.shape().num_heads as u32;
    let launch = |name: &str, blocks, block, shared_bytes| -> Result<_, Error> {
        let config = LaunchConfig { grid: [blocks, heads, 1], block, shared_bytes, launch: Launch::Normal };
        Ok((gpu.kernel(module, name)?, config))
    };
    let mut launches = Vec::new();
    if let Some(row_tiles) = tiles.short_row_tiles() {
        let (block, shared_bytes) = (config::short_threads(row_tiles), config::short_shared_bytes(row_tiles));
        launches.push(launch(&short_kernel(row_tiles), tiles.short_blocks(), block, shared_bytes)?);
    }
    if tiles.long_slots().is_some() && !tiles.flash() {
        let shared_bytes = [config::LONG_Q_SHARED_BYTES, config::LONG_K_SHARED_BYTES];
        for (name, shared_bytes) in LONG_KERNELS.into_iter().zip(shared_bytes) {
            launches.push(launch(name, tiles.long_blocks(), config::LONG_THREADS, shared_bytes)?);
        }
    }
    Ok(launches)
}
