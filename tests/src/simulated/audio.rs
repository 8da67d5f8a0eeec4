//! Operation A on the simulated GPU: the launches of `audio::Backward::run`.

use std::ops::Range;

use attn_backward::audio::{AttentionTiles, Capacity, Gradients, HEAD_DIM, Inputs, Plan, Shape};
use attn_backward::gemm::{Operands, ProductTensors};
use attn_backward::gpu::ModuleKind;
use attn_backward::{CuSeqlens, Target};
use attn_backward_kernels::config::{attention as config, attention_flash as flash};
use attn_backward_kernels::params::{
    AttentionParams, ColumnSumsParams, FlashParams, FlashTile, PartialSum, SumPartialsParams,
};
use attn_backward_kernels::schedule::chunks::TileSlots;
use half::bf16;
use ndarray::{Array1, Array2, Array4, Axis, concatenate, s};

use super::{Simulator, Size, gemm};

/// An H200 that runs the portable module.
pub const TARGET: Target = Target { module: ModuleKind::Portable, num_sms: 132, max_shared_bytes: 227 << 10 };

/// A machine whose blocks have too little shared memory for the short kernels.
pub const LONG_KERNELS_ONLY: Target = Target { max_shared_bytes: 0, ..TARGET };

/// An H200.
pub const HOPPER: Target = Target { module: ModuleKind::Hopper, ..TARGET };

/// Addresses of what the attention kernels read and write, as in [`AttentionParams`].
#[derive(Clone, Copy, Debug)]
struct AttentionTensors {
    query_states: u64,
    key_states: u64,
    value_states: u64,
    d_attn: u64,
    o: u64,
    dqkv: u64,
    bias_partials: u64,
    stats: u64,
    grad_output: u64,
    hidden_states: u64,
    boundary: u64,
}

/// The attention kernels that `tiles` names; `cu_seqlens` is the device's, `[num_chunks + 1]` of the capacity.
fn launch_attention(
    gpu: &mut Simulator,
    shape: &Shape,
    tiles: &AttentionTiles,
    cu_seqlens: u64,
    tensors: AttentionTensors,
) {
    let capacity = tiles.capacity();
    let params = AttentionParams {
        query_states: tensors.query_states as *const u8,
        key_states: tensors.key_states as *const u8,
        value_states: tensors.value_states as *const u8,
        d_attn: tensors.d_attn as *const u8,
        cu_seqlens: cu_seqlens as *const i32,
        o: tensors.o as *mut u8,
        dqkv: tensors.dqkv as *mut u8,
        bias_partials: tensors.bias_partials as *mut f32,
        stats: tensors.stats as *mut f32,
        grad_output: tensors.grad_output as *const u8,
        hidden_states: tensors.hidden_states as *const u8,
        boundary: tensors.boundary as *mut u8,
        total_seq_len: shape.total_seq_len as u32,
        num_heads: shape.num_heads as u32,
        num_chunks: capacity.num_chunks as u32,
        scale: shape.scale,
        max_chunk_len: capacity.max_chunk_len as u32,
        short_rows: tiles.short_rows(),
        long_slots: tiles.long_slots().unwrap_or(TileSlots::ANY),
        long_bias_row: tiles.short_blocks(),
        reserved: 0,
    };
    let mut launch = |entry: &str, blocks: u32, block: u32, shared_bytes: u32| {
        let grid = [blocks, shape.num_heads as u32, 1];
        gpu.launch(entry, Size { grid, block, shared_bytes: shared_bytes as usize }, &params);
    };
    if let Some(row_tiles) = tiles.short_row_tiles() {
        let entry = format!("attention_short_{}", config::short_rows(row_tiles));
        let (block, shared_bytes) = (config::short_threads(row_tiles), config::short_shared_bytes(row_tiles));
        launch(&entry, tiles.short_blocks(), block, shared_bytes);
    }
    if tiles.flash() {
        launch_flash(gpu, tiles, params);
    } else if tiles.long_slots().is_some() {
        for (entry, shared_bytes) in
            [("attention_long_q", config::LONG_Q_SHARED_BYTES), ("attention_long_k", config::LONG_K_SHARED_BYTES)]
        {
            launch(entry, tiles.long_blocks(), config::LONG_THREADS, shared_bytes);
        }
    }
}

/// The Hopper kernels for long chunks.
fn launch_flash(gpu: &mut Simulator, tiles: &AttentionTiles, attention: AttentionParams) {
    let (num_slots, num_heads) = (tiles.long_blocks(), attention.num_heads);
    let places = (num_slots * num_heads) as usize;
    let mut of_places = |bytes: u32| gpu.output(places * bytes as usize);
    let params = FlashParams {
        attention,
        largest: of_places(16) as *mut u32,
        exponents: of_places(16) as *mut i32,
        operands: of_places(flash::OPERANDS * flash::TILE_BYTES) as *mut u8,
        statistics: of_places(flash::STATISTICS_BYTES) as *mut f32,
        dq: of_places(4 * flash::DQ_FLOATS) as *mut f32,
        counters: gpu.output(8 * places + 4) as *mut u32,
        found_tiles: gpu.output(16 * num_slots as usize) as *mut FlashTile,
        tiles: gpu.output(16 * num_slots as usize) as *mut FlashTile,
        num_slots,
        reserved: 0,
    };
    let a_block_a_place = [num_slots, num_heads, 1];
    let a_block_an_sm = [(num_slots * num_heads).min(gpu.num_sms()), 1, 1];
    for (entry, grid, block, shared_bytes) in [
        ("attention_flash_largest", a_block_a_place, flash::ROWS_THREADS, flash::LARGEST_SHARED_BYTES),
        ("attention_flash_convert", a_block_a_place, flash::ROWS_THREADS, flash::CONVERT_SHARED_BYTES),
        ("attention_flash_forward", a_block_an_sm, flash::THREADS, flash::forward::SHARED_BYTES),
        ("attention_flash_backward", a_block_an_sm, flash::THREADS, flash::backward::SHARED_BYTES),
        ("attention_flash_dq", a_block_a_place, flash::ROWS_THREADS, flash::DQ_SHARED_BYTES),
    ] {
        gpu.launch(entry, Size { grid, block, shared_bytes: shared_bytes as usize }, &params);
    }
}

/// Rows of a tile of the long kernels.
fn long_tile_rows(tiles: &AttentionTiles) -> usize {
    (if tiles.flash() { flash::TILE_ROWS } else { config::LONG_TILE_ROWS }) as usize
}

/// Rows of `bias_partials` of each chunk, one for each block that works on it.
fn bias_rows(tiles: &AttentionTiles, cu_seqlens: &CuSeqlens) -> Vec<Vec<usize>> {
    let rows = |(c, chunk): (usize, Range<usize>)| {
        if chunk.is_empty() {
            return Vec::new();
        }
        if chunk.len() <= tiles.short_rows() as usize {
            return vec![c];
        }
        let slots = tiles.long_slots().expect("a kernel for every chunk");
        let first = tiles.short_blocks() + slots.first(chunk.start as u32, c as u32);
        let tiles = chunk.len().div_ceil(long_tile_rows(tiles));
        (0..tiles).map(|tile| first as usize + tile).collect()
    };
    cu_seqlens.chunks().enumerate().map(rows).collect()
}

/// Rows of the packed tensors of each block that has some, in order.
fn blocks(tiles: &AttentionTiles, cu_seqlens: &CuSeqlens) -> Vec<Range<usize>> {
    let of_chunk = |chunk: Range<usize>| {
        let is_short = chunk.len() <= tiles.short_rows() as usize;
        let step = if is_short { chunk.len().max(1) } else { long_tile_rows(tiles) };
        chunk.clone().step_by(step).map(move |first| first..chunk.end.min(first + step))
    };
    cu_seqlens.chunks().flat_map(of_chunk).collect()
}

/// The blocks of each chunk, among all of a plan for exactly these chunks.
pub fn blocks_of_chunks(cu_seqlens: &CuSeqlens, num_heads: usize, target: &Target) -> Vec<Range<usize>> {
    let mut end = 0;
    let rows = bias_rows(&tiles_for(cu_seqlens, num_heads, target), cu_seqlens);
    rows.iter()
        .map(|rows| {
            end += rows.len();
            end - rows.len()..end
        })
        .collect()
}

/// The kernels for exactly these chunks.
pub fn tiles_for(cu_seqlens: &CuSeqlens, num_heads: usize, target: &Target) -> AttentionTiles {
    let (capacity, rows) = (Capacity::of(cu_seqlens), cu_seqlens.total_seq_len());
    AttentionTiles::new(capacity, rows, cu_seqlens.chunk_lens(), num_heads, target)
}

/// Partial column sums of the first rows of `x`, `[rows, columns]` bf16, as the host launches them; returns how many. `row_limit` is 0, or where
/// the number of these rows is.
pub fn launch_column_sums(
    gpu: &mut Simulator,
    x: u64,
    (rows, columns): (u32, u32),
    row_limit: u64,
    partials: u64,
) -> u32 {
    let rows_per_block = config::column_sums_rows_per_block(rows);
    let blocks = rows.div_ceil(rows_per_block);
    if rows > 0 {
        let (x, partials, row_limit) = (x as *const u16, partials as *mut f32, row_limit as *const i32);
        let params = ColumnSumsParams { x, partials, row_limit, rows, columns, rows_per_block, reserved: 0 };
        let grid = [columns.div_ceil(config::COLUMN_SUMS_COLUMNS), blocks, 1];
        let shared_bytes = config::COLUMN_SUMS_SHARED_BYTES as usize;
        gpu.launch("column_sums_bf16", Size { grid, block: config::COLUMN_SUMS_THREADS, shared_bytes }, &params);
    }
    blocks
}

/// `(partials, out, rows, pitch, columns)` of four sums, as in [`PartialSum`].
pub fn launch_sum_partials(gpu: &mut Simulator, sums: [(u64, u64, u32, u32, u32); 4]) {
    let mut blocks = 0;
    let sums = sums.map(|(partials, out, rows, pitch, columns)| {
        let first_block = blocks;
        blocks += columns.div_ceil(config::SUM_PARTIALS_COLUMNS);
        PartialSum { partials: partials as *const f32, out: out as *mut u16, rows, pitch, columns, first_block }
    });
    let (block, shared_bytes) = (config::SUM_PARTIALS_THREADS, config::SUM_PARTIALS_SHARED_BYTES as usize);
    gpu.launch("sum_partials", Size { grid: [blocks, 1, 1], block, shared_bytes }, &SumPartialsParams { sums });
}

/// Inputs of the attention kernels, per head; rows past the last chunk are padding.
#[derive(Clone, Debug)]
pub struct AttentionInputs {
    /// `[1, num_heads, total_seq_len, 64]`.
    pub query_states: Array4<bf16>,
    /// `[1, num_heads, total_seq_len, 64]`.
    pub key_states: Array4<bf16>,
    /// `[1, num_heads, total_seq_len, 64]`.
    pub value_states: Array4<bf16>,
    /// `[total_seq_len, num_heads * 64]`.
    pub d_attn: Array2<f32>,
    /// The chunks.
    pub cu_seqlens: CuSeqlens,
    /// Factor of the logits.
    pub scale: f32,
}

impl AttentionInputs {
    fn shape(&self) -> Shape {
        let (_, num_heads, total_seq_len, _) = self.query_states.dim();
        Shape { total_seq_len, num_heads, scale: self.scale }
    }

    /// A tensor of each, query, key and value states, and the gradient, changed in the rows `rows` of all heads.
    pub fn map_rows(&mut self, rows: std::ops::Range<usize>, mut f: impl FnMut(f32) -> f32) {
        for states in [&mut self.query_states, &mut self.key_states, &mut self.value_states] {
            states.slice_mut(s![.., .., rows.clone(), ..]).mapv_inplace(|x| bf16::from_f32(f(x.to_f32())));
        }
        self.d_attn.slice_mut(s![rows, ..]).mapv_inplace(f);
    }
}

/// What the attention kernels make of the rows of chunks, or what they should make of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention<T, S> {
    /// `[tokens, num_heads * 64]`.
    pub o: Array2<T>,
    /// `[tokens, 3 * num_heads * 64]`: dQ | dK | dV.
    pub dqkv: Array2<T>,
    /// `[blocks, 3 * num_heads * 64]`: column sums of the rows of each block, before rounding.
    pub sums: Array2<S>,
}

/// The attention kernels on `gpu`, in the blocks that `target` gives for exactly these chunks. Fails unless rows that belong to no chunk, and the
/// sums of blocks without rows, are zero.
pub fn attention(gpu: &mut Simulator, inputs: &AttentionInputs, target: &Target) -> Attention<bf16, f32> {
    let tiles = tiles_for(&inputs.cu_seqlens, inputs.shape().num_heads, target);
    attention_on(gpu, inputs, &tiles)
}

/// As [`attention`], with kernels for more chunks and longer ones, as may be.
pub fn attention_on(gpu: &mut Simulator, inputs: &AttentionInputs, tiles: &AttentionTiles) -> Attention<bf16, f32> {
    let (cu_seqlens, d_model) = (&inputs.cu_seqlens, inputs.shape().d_model());
    let padded = cu_seqlens.padded(tiles.capacity().num_chunks).expect("inside of the capacity");
    let tensors = attention_of_offsets(gpu, inputs, tiles, padded.offsets());
    let rows = cu_seqlens.total_seq_len();
    let (o, dqkv) = (gpu.download(tensors.o, (rows, d_model)), gpu.download(tensors.dqkv, (rows, 3 * d_model)));
    let padding = s![cu_seqlens.padding(), ..];
    for padding in [o.slice(padding), dqkv.slice(padding)] {
        assert!(padding.iter().all(|x: &bf16| x.to_bits() == 0), "padding rows are not zero");
    }
    let partials: Array2<f32> = gpu.download(tensors.bias_partials, (tiles.bias_rows(), 3 * d_model));
    let used = bias_rows(tiles, cu_seqlens).concat();
    for (row, sums) in partials.outer_iter().enumerate().filter(|(row, _)| !used.contains(row)) {
        assert!(sums.iter().all(|x| *x == 0.0), "sums of no rows in row {row}");
    }
    let tokens = s![..cu_seqlens.padding().start, ..];
    Attention {
        o: o.slice(tokens).to_owned(),
        dqkv: dqkv.slice(tokens).to_owned(),
        sums: partials.select(Axis(0), &used),
    }
}

/// Bias partial sums `[bias_rows, 3 * d_model]` of the attention kernels for any offsets, such as those that break rules. The simulator fails if
/// a kernel reads or writes beyond a tensor.
pub fn bias_sums_of_offsets(
    gpu: &mut Simulator,
    inputs: &AttentionInputs,
    tiles: &AttentionTiles,
    offsets: &[i32],
) -> Array2<f32> {
    let tensors = attention_of_offsets(gpu, inputs, tiles, offsets);
    gpu.download(tensors.bias_partials, (tiles.bias_rows(), 3 * inputs.shape().d_model()))
}

fn attention_of_offsets(
    gpu: &mut Simulator,
    inputs: &AttentionInputs,
    tiles: &AttentionTiles,
    offsets: &[i32],
) -> AttentionTensors {
    let shape = inputs.shape();
    assert_eq!(offsets.len(), tiles.capacity().num_chunks + 1);
    let (rows, d_model) = (shape.total_seq_len, shape.d_model());
    let streamed = tiles.long_slots().is_some() && !tiles.flash();
    let stats_rows = if streamed { shape.num_heads * rows } else { 0 };
    // Offsets that break rules may name rows that no block of the query kernel has.
    let stats = Array1::<f32>::zeros(4 * stats_rows);
    let tensors = AttentionTensors {
        query_states: gpu.upload(&inputs.query_states),
        key_states: gpu.upload(&inputs.key_states),
        value_states: gpu.upload(&inputs.value_states),
        d_attn: gpu.upload(&inputs.d_attn),
        o: gpu.output(2 * rows * d_model),
        dqkv: gpu.output(6 * rows * d_model),
        bias_partials: gpu.output(12 * tiles.bias_rows() * d_model),
        stats: if is_valid(offsets, rows) { gpu.output(16 * stats_rows) } else { gpu.upload(&stats) },
        grad_output: 0,
        hidden_states: 0,
        boundary: 0,
    };
    let cu_seqlens = gpu.upload(&Array1::from(offsets.to_vec()));
    launch_attention(gpu, &shape, tiles, cu_seqlens, tensors);
    tensors
}

fn is_valid(offsets: &[i32], rows: usize) -> bool {
    CuSeqlens::new(offsets, rows).is_ok()
}

/// What [`attention`] should give, in f64, straight from the formulas.
pub fn attention_reference(inputs: &AttentionInputs, target: &Target) -> Attention<f64, f64> {
    let shape = inputs.shape();
    let (tokens, d_model) = (inputs.cu_seqlens.padding().start, shape.d_model());
    let scale = f64::from(inputs.scale);
    let [mut o, mut dq, mut dk, mut dv] = std::array::from_fn(|_| Array2::<f64>::zeros((tokens, d_model)));
    for chunk in inputs.cu_seqlens.chunks() {
        for head in 0..shape.num_heads {
            let columns = head * HEAD_DIM..(head + 1) * HEAD_DIM;
            let states = |x: &Array4<bf16>| -> Array2<f64> { x.slice(s![0, head, chunk.clone(), ..]).mapv(f64::from) };
            let [q, k, v] = [&inputs.query_states, &inputs.key_states, &inputs.value_states].map(states);
            let da: Array2<f64> = inputs.d_attn.slice(s![chunk.clone(), columns.clone()]).mapv(f64::from);
            let mut p = scale * q.dot(&k.t());
            for mut row in p.outer_iter_mut() {
                let max = row.fold(f64::NEG_INFINITY, |a, b| a.max(*b));
                row.mapv_inplace(|x| (x - max).exp());
                let sum = row.sum();
                row /= sum;
            }
            let dp = da.dot(&v.t());
            let delta = (&p * &dp).sum_axis(Axis(1)).insert_axis(Axis(1));
            let ds = &p * &(dp - delta);
            let place = s![chunk.clone(), columns];
            o.slice_mut(place).assign(&p.dot(&v));
            dq.slice_mut(place).assign(&(scale * ds.dot(&k)));
            dk.slice_mut(place).assign(&(scale * ds.t().dot(&q)));
            dv.slice_mut(place).assign(&p.t().dot(&da));
        }
    }
    let dqkv = concatenate![Axis(1), dq, dk, dv];
    let blocks = blocks(&tiles_for(&inputs.cu_seqlens, shape.num_heads, target), &inputs.cu_seqlens);
    let mut sums = Array2::zeros((blocks.len(), 3 * d_model));
    for (mut sums, rows) in sums.outer_iter_mut().zip(blocks) {
        sums.assign(&dqkv.slice(s![rows, ..]).sum_axis(Axis(0)));
    }
    Attention { o, dqkv, sums }
}

/// All gradients, by the launches that the plan for `target` and exactly these chunks has.
pub fn backward(gpu: &mut Simulator, inputs: &Inputs, target: &Target) -> Gradients {
    let shape = inputs.shape().expect("inputs that fit together");
    let plan = Plan::new(&shape, &inputs.cu_seqlens, target).expect("a supported shape");
    backward_on(gpu, inputs, &plan)
}

/// All gradients, by the launches of `plan`, whose capacity holds the chunks of `inputs`.
pub fn backward_on(gpu: &mut Simulator, inputs: &Inputs, plan: &Plan) -> Gradients {
    let shape = *plan.shape();
    let num_chunks = plan.capacity().num_chunks;
    let padded = inputs.cu_seqlens.padded(num_chunks).expect("inside of the capacity");
    let cu_seqlens = gpu.upload(&Array1::from(padded.offsets().to_vec()));
    let token_count = cu_seqlens + 4 * num_chunks as u64;
    let workspace = gpu.workspace(plan.workspace());
    let (d_model, rows) = (shape.d_model(), shape.total_seq_len);
    let pitch = d_model as u32;

    let grad_output = gpu.upload(&inputs.grad_output);
    let hidden_states = gpu.upload(&inputs.hidden_states);
    let weights = [&inputs.q_weight, &inputs.k_weight, &inputs.v_weight].map(|weight| gpu.upload(weight));
    let [q_weight, k_weight, v_weight, out_weight] = std::array::from_fn(|_| gpu.output(2 * d_model * d_model));
    let grad_weights = [q_weight, k_weight, v_weight, out_weight];
    let grad_biases: [u64; 4] = std::array::from_fn(|_| gpu.output(2 * d_model));
    let grad_hidden_states = gpu.output(2 * shape.total_seq_len * d_model);

    let product = |a: [u64; 3], lda: u32, b: [u64; 3], c: u64| ProductTensors {
        a,
        b,
        c,
        lda,
        ldb: pitch,
        ldc: pitch,
        ..Default::default()
    };
    let d_attn = workspace.at("grad_attention fp32");
    let out_weight = gpu.upload(&inputs.out_weight);
    let gemm_plan = plan.d_attn_gemm().and_then(|gemm| gemm.portable()).expect("the portable module");
    let of = [product([grad_output, 0, 0], pitch, [out_weight, 0, 0], d_attn)];
    gemm::run(gpu, Operands::Bf16, gemm_plan, &of, workspace.at("partial sums, grad_attention"));

    let out_bias_partials = workspace.at("out bias partial sums");
    let out_bias_rows = launch_column_sums(gpu, grad_output, (rows as u32, pitch), token_count, out_bias_partials);

    let tensors = AttentionTensors {
        query_states: gpu.upload(&inputs.query_states),
        key_states: gpu.upload(&inputs.key_states),
        value_states: gpu.upload(&inputs.value_states),
        d_attn,
        o: workspace.at("attention output bf16"),
        dqkv: workspace.at("dq, dk, dv bf16"),
        bias_partials: workspace.at("bias partial sums"),
        stats: workspace.at("long chunks' statistics"),
        grad_output,
        hidden_states,
        boundary: 0, // for wgmma kernels
    };
    launch_attention(gpu, &shape, plan.tiles(), cu_seqlens, tensors);

    let dqkv = [0, 1, 2].map(|i| tensors.dqkv + 2 * i * d_model as u64);
    let hidden = [hidden_states, 0, 0];
    let wgrad = |a, lda, b: [u64; 3], c| ProductTensors { k_limit: token_count, ..product([a, 0, 0], lda, b, c) };
    let of = [
        product(dqkv, 3 * pitch, weights, grad_hidden_states),
        wgrad(dqkv[0], 3 * pitch, hidden, grad_weights[0]),
        wgrad(dqkv[1], 3 * pitch, hidden, grad_weights[1]),
        wgrad(dqkv[2], 3 * pitch, hidden, grad_weights[2]),
        wgrad(grad_output, pitch, [tensors.o, 0, 0], grad_weights[3]),
    ];
    let gemm_plan = plan.gradients_gemm().portable().expect("the portable module");
    gemm::run(gpu, Operands::Bf16, gemm_plan, &of, workspace.at("partial sums, gradients"));

    let qkv = |i: usize| {
        let partials = tensors.bias_partials + (4 * i * d_model) as u64;
        (partials, grad_biases[i], plan.tiles().bias_rows() as u32, 3 * pitch, pitch)
    };
    let out = (out_bias_partials, grad_biases[3], out_bias_rows, pitch, pitch);
    launch_sum_partials(gpu, [qkv(0), qkv(1), qkv(2), out]);

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
