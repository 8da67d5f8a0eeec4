//! The Hopper kernels on the simulated GPU, as the host launches them.
use attn_backward::audio::{Gradients, Inputs, Plan};
use attn_backward::gemm::ProductTensors;
use attn_backward::gemm::hopper::{Accumulation, ElementType, HopperPlan, Pitches, TensorMapSpec, TensorRole};
use attn_backward_kernels::config::{attention, attention_fused, wgmma};
use attn_backward_kernels::params::{AttentionParams, MAX_PRODUCTS, MAX_SEGMENTS, PartialSum};
use attn_backward_kernels::params_wgmma::{
    AttentionFusedParams, ColumnSum, MAX_TENSOR_MAPS, Rider, TensorMap, WgmmaParams, WgmmaProduct,
};
use attn_backward_kernels::schedule::chunks::TileSlots;
use ndarray::Array1;

use super::{Options, Simulator, Size};

/// Bytes of a value that kernels read.
fn bytes_of<T: Copy>(values: &[T]) -> Vec<u8> {
    // SAFETY: the bytes of live values; the parameter and item structs that this is called with have no padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }.to_vec()
}

/// Pitches of a product's tensors, and how far their low parts are behind the high ones, if they have parts.
fn pitches(tensors: &ProductTensors) -> Pitches {
    let [a, b, c] = [tensors.lda, tensors.ldb, tensors.ldc].map(|pitch| pitch as usize);
    let distance = |[high, low]: [u64; 2]| low.wrapping_sub(high);
    let [a_part_bytes, b_part_bytes] = [parts(0, &tensors.a), parts(1, &tensors.b)].map(distance);
    Pitches { a, b, c, a_part_bytes, b_part_bytes }
}

/// Addresses of the high and the low part of A (`operand` 0) or B (1) of a promoted product.
fn parts(operand: usize, segments: &[u64; MAX_SEGMENTS]) -> [u64; 2] {
    let mut parts = [0; 2];
    for (segment, address) in segments.iter().enumerate() {
        parts[wgmma::segment_parts(segment as u32)[operand] as usize] = *address;
    }
    parts
}

fn encode(accumulation: Accumulation, spec: &TensorMapSpec, tensors: &ProductTensors) -> TensorMap {
    let address = match (accumulation, spec.role) {
        (_, TensorRole::C) => tensors.c,
        (Accumulation::Plain, TensorRole::A) => tensors.a[0],
        (Accumulation::Plain, TensorRole::B { segment }) => tensors.b[segment],
        (Accumulation::Promoted, TensorRole::A) => parts(0, &tensors.a)[0],
        (Accumulation::Promoted, TensorRole::B { .. }) => parts(1, &tensors.b)[0],
    };
    let map = ptx_sim::TensorMap {
        address,
        element_bytes: spec.element.bytes() as u32,
        dims: spec.dims.clone(),
        outer_strides_bytes: spec.strides_bytes.clone(),
        box_dims: spec.box_dims.clone(),
        swizzled: true,
    };
    TensorMap(map.encode())
}

/// Parameters of a launch of a plan's products, with A and B of type `element`, and of what it does `beside` them. Counters are poisoned unless
/// `zeroed`.
pub(super) fn wgmma_params<B>(
    gpu: &mut Simulator,
    plan: &HopperPlan,
    element: ElementType,
    tensors: &[ProductTensors],
    zeroed: bool,
    beside: B,
) -> WgmmaParams<B> {
    let pitches: Vec<Pitches> = tensors.iter().map(pitches).collect();
    let specs = plan.tensor_maps(element, &pitches);
    let mut maps = [TensorMap([0; 16]); MAX_TENSOR_MAPS];
    for (map, spec) in maps.iter_mut().zip(&specs) {
        *map = encode(plan.accumulation(), spec, &tensors[spec.product]);
    }
    let product = |of: &ProductTensors, c_pitch_bytes: usize, rows: usize, k: usize| WgmmaProduct {
        c: of.c as *mut u8,
        row_exponents: of.row_exponents as *const i32,
        exponent: of.exponent as *const i32,
        a_boundary: of.a_boundary as *const u8,
        b_boundary: of.b_boundary as *const u8,
        c_pitch_bytes: c_pitch_bytes as u32,
        rows: rows as u32,
        segment_k: k.next_multiple_of(wgmma::TILE_K as usize) as u32,
        reserved: 0,
    };
    let mut products = [product(&ProductTensors::default(), 0, 0, 0); MAX_PRODUCTS];
    for ((place, of), shape) in products.iter_mut().zip(tensors).zip(plan.products()) {
        *place = product(of, of.ldc as usize * ElementType::from(shape.c_type).bytes(), shape.m, shape.k);
    }
    let limited = tensors.iter().zip(plan.products()).find(|(of, _)| of.k_limit != 0);
    let items = gpu.memory.upload(&bytes_of(plan.items()));
    let counters = match zeroed {
        true => gpu.memory.upload(&vec![0u32; plan.num_counters().max(1)]),
        false => gpu.output(4 * plan.num_counters().max(1)),
    };
    WgmmaParams {
        maps,
        products,
        items: items as *const _,
        workspace: gpu.output(4 * plan.workspace_floats().max(1)) as *mut f32,
        counters: counters as *mut u32,
        items_per_block: plan.items_per_block() as u32,
        num_maps: specs.len() as u32,
        k_limit: limited.map_or(0, |(of, _)| of.k_limit) as *const i32,
        k_rows: limited.map_or(0, |(_, shape)| shape.k as u32),
        reserved: 0,
        beside,
    }
}

/// All gradients of operation A, by the two launches of `plan`, whose capacity holds the chunks of `inputs`; `runs` times, so that what a run leaves
/// behind meets another. Block `ahead` of the products runs ahead of the others, if one is given.
pub fn audio_backward(gpu: &mut Simulator, inputs: &Inputs, plan: &Plan, runs: usize, ahead: Option<u64>) -> Gradients {
    let (_, stages) = plan.fused().expect("a plan with a fused kernel");
    audio_backward_with_stages(gpu, inputs, plan, stages, runs, ahead)
}

/// [`audio_backward`] with so many stages in the fused kernel's ring, not those of the plan.
pub fn audio_backward_with_stages(
    gpu: &mut Simulator,
    inputs: &Inputs,
    plan: &Plan,
    stages: u32,
    runs: usize,
    ahead: Option<u64>,
) -> Gradients {
    let shape = *plan.shape();
    let (row_tiles, _) = plan.fused().expect("a plan with a fused kernel");
    let num_chunks = plan.capacity().num_chunks;
    let padded = inputs.cu_seqlens.padded(num_chunks).expect("inside of the capacity");
    let cu_seqlens = gpu.upload(&Array1::from(padded.offsets().to_vec()));
    let k_limit = cu_seqlens + 4 * num_chunks as u64;
    let (d_model, rows) = (shape.d_model(), shape.total_seq_len);
    let pitch = d_model as u32;

    let grad_output = gpu.upload(&inputs.grad_output);
    let hidden_states = gpu.upload(&inputs.hidden_states);
    let weights = [&inputs.q_weight, &inputs.k_weight, &inputs.v_weight].map(|weight| gpu.upload(weight));
    let out_weight = gpu.upload(&inputs.out_weight);
    let grad_weights: [u64; 4] = std::array::from_fn(|_| gpu.output(2 * d_model * d_model));
    let grad_biases: [u64; 4] = std::array::from_fn(|_| gpu.output(2 * d_model));
    let grad_hidden_states = gpu.output(2 * rows * d_model);
    let (o, dqkv) = (gpu.output(2 * rows * d_model), gpu.output(6 * rows * d_model));
    let bias_partials = gpu.output(12 * plan.tiles().bias_rows() * d_model);
    let boundary_bytes = 2 * wgmma::TILE_K as u64 * d_model as u64;
    let boundary = gpu.output(2 * boundary_bytes as usize);
    let attention = AttentionParams {
        query_states: gpu.upload(&inputs.query_states) as *const u8,
        key_states: gpu.upload(&inputs.key_states) as *const u8,
        value_states: gpu.upload(&inputs.value_states) as *const u8,
        d_attn: std::ptr::null(),
        cu_seqlens: cu_seqlens as *const i32,
        o: o as *mut u8,
        dqkv: dqkv as *mut u8,
        bias_partials: bias_partials as *mut f32,
        stats: std::ptr::null_mut(),
        grad_output: grad_output as *const u8,
        hidden_states: hidden_states as *const u8,
        boundary: boundary as *mut u8,
        total_seq_len: rows as u32,
        num_heads: shape.num_heads as u32,
        num_chunks: num_chunks as u32,
        scale: shape.scale,
        max_chunk_len: plan.capacity().max_chunk_len as u32,
        short_rows: plan.tiles().short_rows(),
        long_slots: TileSlots::ANY,
        long_bias_row: plan.tiles().short_blocks(),
        reserved: 0,
    };

    let parts = [0, 1, 2].map(|i| dqkv + 2 * i * d_model as u64);
    let product = |a, lda, b, c| ProductTensors { a, b, c, lda, ldb: pitch, ldc: pitch, ..Default::default() };
    let wgrad = |a, lda, b, c, [a_boundary, b_boundary]: [u64; 2]| ProductTensors {
        k_limit,
        a_boundary,
        b_boundary,
        ..product([a, 0, 0], lda, [b, 0, 0], c)
    };
    let of_hidden =
        |i: usize| wgrad(parts[i], 3 * pitch, hidden_states, grad_weights[i], [0, boundary + boundary_bytes]);
    let tensors = [
        product(parts, 3 * pitch, weights, grad_hidden_states),
        of_hidden(0),
        of_hidden(1),
        of_hidden(2),
        wgrad(grad_output, pitch, o, grad_weights[3], [boundary, 0]),
    ];
    let hopper = plan.gradients_gemm().hopper().expect("the Hopper module");
    let sum = |i: u32| PartialSum {
        partials: (bias_partials + u64::from(4 * i * pitch)) as *const f32,
        out: grad_biases[i as usize] as *mut u16,
        rows: plan.tiles().bias_rows() as u32,
        pitch: 3 * pitch,
        columns: pitch,
        first_block: i * pitch.div_ceil(attention::SUM_PARTIALS_COLUMNS),
    };
    let column_sum =
        ColumnSum { x: grad_output as *const u16, out: grad_biases[3] as *mut u16, rows: rows as u32, columns: pitch };
    let rider = Rider { column_sum, partial_sums: [0, 1, 2].map(sum), ..Rider::NONE };
    let gemm = wgmma_params(gpu, hopper, ElementType::Bf16, &tensors, false, rider);

    let map = |address, rows: u32, box_dims: [u32; 2]| {
        let map = ptx_sim::TensorMap {
            address,
            element_bytes: 2,
            dims: vec![d_model as u64, rows.into()],
            outer_strides_bytes: vec![2 * d_model as u64],
            box_dims: box_dims.to_vec(),
            swizzled: true,
        };
        TensorMap(map.encode())
    };
    let stage_k = attention_fused::STAGE_K;
    let fused = AttentionFusedParams {
        out_weight: map(out_weight, pitch, [attention::HEAD_DIM, stage_k]),
        grad_output: map(grad_output, rows as u32, [stage_k, attention::short_rows(row_tiles)]),
        attention,
        zero: gemm.counters,
        zero_words: hopper.num_counters() as u32,
        stages,
        reserved: [0; 2],
    };
    let fused_size = Size {
        grid: [plan.tiles().short_blocks(), shape.num_heads as u32, 1],
        block: attention_fused::threads(row_tiles),
        shared_bytes: attention_fused::shared_bytes(row_tiles, stages) as usize,
    };
    let size = Size {
        grid: [hopper.num_blocks() as u32, 1, 1],
        block: wgmma::THREADS,
        shared_bytes: wgmma::SMEM_BYTES as usize,
    };
    // A block that waits for what never comes is found soon.
    let options = |ahead| Options { max_warp_instructions: 200_000_000, ahead, ..Options::default() };
    for _ in 0..runs {
        let name = format!("attention_fused_{}", attention::short_rows(row_tiles));
        gpu.launch_with(&name, fused_size, &fused, options(None));
        gpu.launch_with("wgmma_bf16_bf16", size, &gemm, options(ahead));
    }

    let weight = |i: usize| gpu.download(grad_weights[i], (d_model, d_model));
    let bias = |i: usize| gpu.download(grad_biases[i], d_model);
    Gradients {
        grad_hidden_states: gpu.download(grad_hidden_states, (rows, d_model)),
        grad_q_weight: weight(0),
        grad_q_bias: bias(0),
        grad_k_weight: weight(1),
        grad_k_bias: bias(1),
        grad_v_weight: weight(2),
        grad_v_bias: bias(2),
        grad_out_weight: weight(3),
        grad_out_bias: bias(3),
    }
}
