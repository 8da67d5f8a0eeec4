//! Operation B on a GPU: plan and tensors -> launches on a stream.
use attn_backward_kernels::config::cross_convert as config;
use attn_backward_kernels::config::wgmma::segment_parts;
use attn_backward_kernels::params::{CrossConvertParams, MAX_SEGMENTS};
use attn_backward_kernels::params_wgmma::Conversion;

use super::plan::{Parts, gradients_blocks};
use super::{DeviceGradients, DeviceInputs, Plan, Precision, conversion};
use crate::gemm::{ConversionTensors, GroupedGemm, PreparedGemm, ProductTensors};
use crate::gpu::{Gpu, Kernel, Launch, LaunchConfig, ModuleKind, Stream, TensorViewMut};
use crate::workspace::Workspace;
use crate::{Error, Region};

/// Operation B, ready to run on one GPU for one shape. Runs on several streams and threads may overlap, each with a workspace of its own.
#[derive(Debug)]
pub struct Backward {
    gpu: Gpu,
    plan: Plan,
    gradients: Kernel,
    operands: Kernel,
    gemm: GroupedGemm,
}

impl Backward {
    /// Finds the plan's kernels on `gpu`; may compile the PTX, allocates tables, waits for the device.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn new(gpu: &Gpu, plan: Plan) -> Result<Backward, Error> {
        let module = plan.target().module;
        let (gradients, operands) = match plan.precision() {
            Precision::Fast => ("cross_convert_gradients_fast", "cross_convert_operands_fast"),
            Precision::High => ("cross_convert_gradients_high", "cross_convert_operands_high"),
        };
        Ok(Backward {
            gpu: gpu.clone(),
            gradients: gpu.kernel(module, gradients)?,
            operands: gpu.kernel(module, operands)?,
            gemm: GroupedGemm::new(gpu, module, &plan.gemm)?,
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
        let shape = self.plan.shape();
        inputs.check(&self.gpu, shape)?;
        gradients.check(&self.gpu, shape)?;
        workspace.check(&self.gpu, self.plan.workspace())?;
        let regions = &self.plan.regions;
        let scratch = workspace.at(regions.gemm);
        let products = self.products(gradients, workspace);
        let params = self.convert_params(inputs, workspace);
        if self.plan.gemm().converts() {
            let gradients = [params.grad_query_states, params.grad_key_states, params.grad_value_states];
            let from = ConversionTensors {
                conversion: self.conversion(&params, workspace),
                gradients: gradients.map(|tensor| tensor as u64),
                batch_size: shape.batch_size,
            };
            let gemm = self.gemm.prepare_converting(&products, &from, scratch)?;
            let zeroed = regions.gemm.offset - regions.maxima.offset + gemm.counters().1 as u64;
            // SAFETY: maxima, ready and the GEMM's counters follow each other in the workspace, which was checked. The tensors have the shape's sizes
            // (checked above), the workspace the plan's; they outlive the work.
            return unsafe {
                stream.fill(workspace.at(regions.maxima), 0, zeroed as usize)?;
                self.gemm.launch_zeroed(stream, &gemm)
            };
        }
        let gemm = self.gemm.prepare(&products, scratch)?;
        self.launch_separate(stream, params, gemm)
    }

    /// Conversion and products in launches of their own.
    fn launch_separate(
        &self,
        stream: &Stream,
        mut params: CrossConvertParams,
        mut gemm: PreparedGemm,
    ) -> Result<(), Error> {
        let (shape, target) = (self.plan.shape(), self.plan.target());
        let counters = gemm.counters();
        params.zero = counters.0 as *mut u32;
        params.zero_words = (counters.1 / 4) as u32;
        let weight_rows = (shape.q_out_dim() + 2 * shape.kv_out_dim()) as u64;
        let operands_blocks =
            config::operands_blocks(params.rows_dec, params.rows_enc, weight_rows, target.num_sms as u32);
        let early = target.module == ModuleKind::Hopper && conversion::is_short(shape, target.num_sms);
        let behind = if early { Launch::Dependent } else { Launch::Normal };
        let launches = [
            (&self.gradients, params.gradients_blocks, config::GRADIENTS_SMEM_BYTES, Launch::Normal),
            (&self.operands, operands_blocks, config::OPERANDS_SMEM_BYTES, behind),
        ];
        for (kernel, blocks, shared_bytes, launch) in launches {
            let config = LaunchConfig { grid: [blocks, 1, 1], block: config::THREADS, shared_bytes, launch };
            // SAFETY: the tensors have the shape's sizes and the workspace the plan's, which the caller has checked; they outlive the work.
            unsafe { kernel.launch(stream, &config, &params)? };
        }
        if early {
            gemm.follow_early();
        }
        // SAFETY: as above; the operands are written, the counters zeroed by the launches before, on the same stream.
        unsafe { self.gemm.launch_zeroed(stream, &gemm) }
    }

    /// What a launch that converts gets of the conversion's parameters.
    fn conversion(&self, of: &CrossConvertParams, workspace: &Workspace) -> Conversion {
        Conversion {
            decoder_hidden_states: of.decoder_hidden_states,
            encoder_hidden_states: of.encoder_hidden_states,
            q_weight: of.q_weight,
            k_weight: of.k_weight,
            v_weight: of.v_weight,
            dq: of.dq,
            dkv: of.dkv,
            x_dec: of.x_dec,
            x_enc: of.x_enc,
            wq: of.wq,
            wkv: of.wkv,
            row_exponents_dec: of.row_exponents_dec,
            row_exponents_enc: of.row_exponents_enc,
            maxima: workspace.at(self.plan.regions.maxima) as *mut i32,
            ready: workspace.at(self.plan.regions.ready) as *mut u32,
            rows_dec: of.rows_dec,
            rows_enc: of.rows_enc,
            seq_len_dec: of.seq_len_dec,
            seq_len_enc: of.seq_len_enc,
            num_heads: of.num_heads,
            num_kv_heads: of.num_kv_heads,
            head_dim: of.head_dim,
            hidden_size: of.hidden_size,
            cross_hidden_size: of.cross_hidden_size,
            first_map: 0,
            tokens_per_stage: conversion::stage_tokens(self.plan.shape()),
        }
    }

    fn convert_params(&self, inputs: &DeviceInputs<'_>, workspace: &Workspace) -> CrossConvertParams {
        let (shape, regions) = (self.plan.shape(), &self.plan.regions);
        let parts = |parts: Parts| parts.map(|region| workspace.at(region) as *mut u16);
        let ints = |region: Region| workspace.at(region) as *mut i32;
        CrossConvertParams {
            grad_query_states: inputs.grad_query_states.address() as *const f32,
            grad_key_states: inputs.grad_key_states.address() as *const f32,
            grad_value_states: inputs.grad_value_states.address() as *const f32,
            decoder_hidden_states: inputs.decoder_hidden_states.address() as *const f32,
            encoder_hidden_states: inputs.encoder_hidden_states.address() as *const f32,
            q_weight: inputs.q_weight.address() as *const f32,
            k_weight: inputs.k_weight.address() as *const f32,
            v_weight: inputs.v_weight.address() as *const f32,
            dq: parts(regions.dq),
            dkv: parts(regions.dkv),
            x_dec: parts(regions.x_dec),
            x_enc: parts(regions.x_enc),
            wq: parts(regions.wq),
            wkv: parts(regions.wkv),
            row_exponents_dec: ints(regions.row_exponents_dec),
            row_exponents_enc: ints(regions.row_exponents_enc),
            block_maxima: ints(regions.maxima),
            exponents: ints(regions.exponents),
            zero: std::ptr::null_mut(),
            zero_words: 0,
            gradients_blocks: gradients_blocks(shape, self.plan.target()),
            rows_dec: shape.rows_dec() as u32,
            rows_enc: shape.rows_enc() as u32,
            seq_len_dec: shape.seq_len_dec as u32,
            seq_len_enc: shape.seq_len_enc as u32,
            num_heads: shape.num_heads as u32,
            num_kv_heads: shape.num_kv_heads as u32,
            head_dim: shape.head_dim as u32,
            hidden_size: shape.hidden_size as u32,
            cross_hidden_size: shape.cross_hidden_size as u32,
            reserved: 0,
        }
    }

    /// The products' tensors, in the plan's order.
    fn products(&self, gradients: &DeviceGradients<'_>, workspace: &Workspace) -> [ProductTensors; 5] {
        let (shape, regions) = (self.plan.shape(), &self.plan.regions);
        let exponents = if self.plan.gemm().converts() { regions.maxima } else { regions.exponents };
        let exponent = |index: u64| workspace.at(exponents) + 4 * index;
        let high = self.plan.precision() == Precision::High;
        let segments = |a: Parts, a_offset: u64, b: Parts| {
            let [a, b] = [a, b].map(|parts| parts.map(|region| workspace.at(region)));
            let a = a.map(|address| address + a_offset);
            if high { high_segments(a, b) } else { ([a[0], 0, 0], [b[0], 0, 0]) }
        };
        let product = |(a, b), c: &TensorViewMut<'_>, lda, n, row_exponents, exponent| ProductTensors {
            a,
            b,
            c: c.address(),
            row_exponents,
            exponent,
            lda,
            ldb: n,
            ldc: n,
            ..Default::default()
        };
        let (q_out, kv_out) = (shape.q_out_dim() as u32, shape.kv_out_dim() as u32);
        let (hidden, cross) = (shape.hidden_size as u32, shape.cross_hidden_size as u32);
        let dec_rows = workspace.at(regions.row_exponents_dec);
        let enc_rows = workspace.at(regions.row_exponents_enc);
        let grads = gradients;
        [
            product(
                segments(regions.dq, 0, regions.wq),
                &grads.grad_decoder_hidden_states,
                q_out,
                hidden,
                dec_rows,
                exponent(2),
            ),
            product(segments(regions.dq, 0, regions.x_dec), &grads.grad_q_weight, q_out, hidden, 0, exponent(0)),
            product(
                segments(regions.dkv, 0, regions.wkv),
                &grads.grad_encoder_hidden_states,
                2 * kv_out,
                cross,
                enc_rows,
                exponent(3),
            ),
            product(segments(regions.dkv, 0, regions.x_enc), &grads.grad_k_weight, 2 * kv_out, cross, 0, exponent(1)),
            // dV stands beside dK in the same rows.
            product(
                segments(regions.dkv, 2 * u64::from(kv_out), regions.x_enc),
                &grads.grad_v_weight,
                2 * kv_out,
                cross,
                0,
                exponent(1),
            ),
        ]
    }
}

/// A and B of the three products of High, from the addresses of their high and low parts.
fn high_segments(a: [u64; 2], b: [u64; 2]) -> ([u64; MAX_SEGMENTS], [u64; MAX_SEGMENTS]) {
    let segment = |s: usize| segment_parts(s as u32).map(|part| part as usize);
    (std::array::from_fn(|s| a[segment(s)[0]]), std::array::from_fn(|s| b[segment(s)[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn high_multiplies_all_pairs_of_parts_but_the_two_low_ones() {
        let ([a_high, a_low], [b_high, b_low]) = ([10, 11], [20, 21]);
        let (a, b) = high_segments([a_high, a_low], [b_high, b_low]);
        assert_eq!(a, [a_low, a_high, a_high]);
        assert_eq!(b, [b_high, b_low, b_high]);
    }
}
