//! Operation B on the simulated GPU, by the one launch that converts and multiplies (`cross_wgmma_fast`), as `cross::Backward::run` does it.

use attn_backward::Target;
use attn_backward::cross::scales::Operands;
use attn_backward::cross::{Gradients, Inputs, Plan, Precision, Shape};
use attn_backward::gemm::hopper::ElementType;
use attn_backward_kernels::config::{cross_convert, wgmma};
use attn_backward_kernels::params_wgmma::{Conversion, TensorMap};
use attn_backward_kernels::scale::operand_exponent;
use ndarray::Array1;

use super::cross::{GradientAddresses, prepare_convert};
use super::hopper::wgmma_params;
use super::{Options, Simulator, Size};

/// Tokens that a stage holds: decoder, encoder.
fn stage_tokens(shape: &Shape) -> [u32; 2] {
    let q_out = shape.q_out_dim();
    let token_elements = [q_out + shape.hidden_size, 2 * q_out + shape.cross_hidden_size];
    token_elements.map(|elements| wgmma::tokens_per_stage(4 * elements as u32))
}

/// Map of a gradient, fp32 `[batch_size, num_heads, seq_len, head_dim]`: boxes of all heads of `tokens` tokens.
fn gradient_map(address: u64, shape: &Shape, seq_len: usize, tokens: u32) -> TensorMap {
    let row_bytes = 4 * shape.head_dim as u64;
    let map = ptx_sim::TensorMap {
        address,
        element_bytes: 4,
        dims: [shape.head_dim, seq_len, shape.batch_size * shape.num_heads].map(|extent| extent as u64).into(),
        outer_strides_bytes: vec![row_bytes, seq_len as u64 * row_bytes],
        box_dims: vec![shape.head_dim as u32, tokens, shape.num_heads as u32],
        swizzled: false,
    };
    TensorMap(map.encode())
}

/// Who runs at another pace than the others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// Block that, with its cluster, runs ahead of the others, if there is one.
    pub ahead: Option<u64>,
    /// Rank of the block that is behind the other one of its cluster, in all clusters, if there is one.
    pub late_rank: Option<usize>,
    /// Warp that is behind the others of its block, in all blocks, if there is one.
    pub late_warp: Option<usize>,
}

/// All gradients, and the operands that the launch made on its way.
///
/// # Panics
/// If the plan for `target` is another one than a launch that converts, or the kernel does what it must not.
pub fn backward(gpu: &mut Simulator, inputs: &Inputs, target: &Target, pace: Pace) -> (Gradients, Operands) {
    let precision = Precision::Fast;
    let shape = inputs.shape().expect("inputs that fit together");
    let plan = Plan::new(&shape, precision, target).expect("a supported shape");
    assert!(plan.gemm().converts(), "{plan}");
    let hopper = plan.gemm().hopper().expect("only wgmma kernels convert");
    let workspace = gpu.workspace(plan.workspace());
    let maxima = (gpu.upload(&Array1::from_elem(cross_convert::MAXIMA, 0i32)), 1);
    let (converted, of) = prepare_convert(gpu, inputs, &shape, precision, &workspace, maxima);
    let gradients = GradientAddresses::new(gpu, &shape);
    let ready = vec![0u32; wgmma::ready::counters(of.rows_dec, of.rows_enc) as usize];

    // The products' exponents are maxima here, which the kernel turns into exponents itself.
    let products = converted.products(&shape, precision, converted.maxima, &gradients);
    let [tokens_dec, tokens_enc] = stage_tokens(&shape);
    let conversion = Conversion {
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
        maxima: converted.maxima as *mut i32,
        ready: gpu.upload(&Array1::from(ready)) as *mut u32,
        rows_dec: of.rows_dec,
        rows_enc: of.rows_enc,
        seq_len_dec: of.seq_len_dec,
        seq_len_enc: of.seq_len_enc,
        num_heads: of.num_heads,
        num_kv_heads: of.num_kv_heads,
        head_dim: of.head_dim,
        hidden_size: of.hidden_size,
        cross_hidden_size: of.cross_hidden_size,
        first_map: 0, // set below
        tokens_per_stage: [tokens_dec, tokens_enc],
    };
    let mut params = wgmma_params(gpu, hopper, ElementType::F16, &products, true, conversion);
    params.beside.first_map = params.num_maps;
    let maps = [
        (of.grad_query_states, shape.seq_len_dec, tokens_dec),
        (of.grad_key_states, shape.seq_len_enc, tokens_enc),
        (of.grad_value_states, shape.seq_len_enc, tokens_enc),
    ];
    for (address, seq_len, tokens) in maps {
        params.maps[params.num_maps as usize] = gradient_map(address as u64, &shape, seq_len, tokens);
        params.num_maps += 1;
    }

    let size = Size {
        grid: [hopper.num_blocks() as u32, 1, 1],
        block: wgmma::THREADS,
        shared_bytes: wgmma::CONVERTING_SMEM_BYTES as usize,
    };
    // A block that waits for what never comes is found soon.
    let Pace { ahead, late_rank, late_warp } = pace;
    let options = Options { max_warp_instructions: 200_000_000, ahead, late_rank, late_warp, ..Options::default() };
    gpu.launch_with("cross_wgmma_fast", size, &params, options);

    let exponent = |maximum: Option<i32>| operand_exponent(maximum.unwrap_or(i32::MIN));
    let operands = converted.download(gpu, &shape, precision, |maxima| maxima.map(exponent));
    (gradients.download(gpu, &shape), operands)
}
