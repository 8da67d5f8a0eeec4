//! Operation A on the simulated GPU: the launches of `audio::Backward::run`.

use attn_backward::audio::{AttentionTiles, Gradients, HEAD_DIM, Inputs, Plan, Shape};
use attn_backward::gemm::{Operands, ProductTensors};
use attn_backward::gpu::ModuleKind;
use attn_backward::{CuSeqlens, Target};
use attn_backward_kernels::config::{attention as config, attention_flash as flash};
use attn_backward_kernels::params::{
    AttentionParams, AttentionTile, ColumnSumsParams, FlashParams, PartialSum, SumPartialsParams,
};
use half::bf16;
use ndarray::{Array1, Array2, Array4, Axis, concatenate, s};

use super::{Simulator, Size, gemm};

/// An H200 that runs the portable module.
pub const TARGET: Target = Target { module: ModuleKind::Portable, num_sms: 132, max_shared_bytes: 227 << 10 };

/// A machine whose blocks have too little shared memory for the short kernels.
pub const LONG_KERNELS_ONLY: Target = Target { max_shared_bytes: 0, ..TARGET };

/// A small Hopper GPU, so that blocks of the persistent kernels take several tiles.
pub const HOPPER: Target = Target { module: ModuleKind::Hopper, num_sms: 3, ..TARGET };

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
}

fn launch_attention(
    gpu: &mut Simulator,
    shape: &Shape,
    (tiles, target): (&AttentionTiles, &Target),
    tensors: AttentionTensors,
) {
    let mut launch = |entry: &str, table: &[AttentionTile], block: u32, shared_bytes: u32| {
        let words: Array1<u32> = table.iter().flat_map(|t| [t.start, t.len, t.first, t.bias_row]).collect();
        let params = AttentionParams {
            query_states: tensors.query_states as *const u8,
            key_states: tensors.key_states as *const u8,
            value_states: tensors.value_states as *const u8,
            d_attn: tensors.d_attn as *const u8,
            tiles: gpu.upload(&words) as *const AttentionTile,
            o: tensors.o as *mut u8,
            dqkv: tensors.dqkv as *mut u8,
            bias_partials: tensors.bias_partials as *mut f32,
            stats: tensors.stats as *mut f32,
            total_seq_len: shape.total_seq_len as u32,
            num_heads: shape.num_heads as u32,
            scale: shape.scale,
            reserved: 0,
        };
        let grid = [table.len() as u32, shape.num_heads as u32, 1];
        gpu.launch(entry, Size { grid, block, shared_bytes: shared_bytes as usize }, &params);
    };
    if !tiles.short.is_empty() {
        let row_tiles = tiles.short_row_tiles;
        let entry = format!("attention_short_{}", config::short_rows(row_tiles));
        launch(&entry, &tiles.short, config::short_threads(row_tiles), config::short_shared_bytes(row_tiles));
    }
    if tiles.flash {
        launch_flash(gpu, shape, (tiles, target), tensors);
    } else if !tiles.long.is_empty() {
        launch("attention_long_q", &tiles.long, config::LONG_THREADS, config::LONG_Q_SHARED_BYTES);
        launch("attention_long_k", &tiles.long, config::LONG_THREADS, config::LONG_K_SHARED_BYTES);
    }
}

/// The Hopper kernels for long chunks.
fn launch_flash(
    gpu: &mut Simulator,
    shape: &Shape,
    (tiles, target): (&AttentionTiles, &Target),
    tensors: AttentionTensors,
) {
    let words: Array1<u32> = tiles.long.iter().flat_map(|t| [t.start, t.len, t.first, t.bias_row]).collect();
    let (num_tiles, num_heads) = (tiles.long.len() as u32, shape.num_heads as u32);
    let slots = (num_tiles * num_heads) as usize;
    let mut slots_of = |bytes: u32| gpu.output(slots * bytes as usize);
    let params = FlashParams {
        query_states: tensors.query_states as *const u8,
        key_states: tensors.key_states as *const u8,
        value_states: tensors.value_states as *const u8,
        d_attn: tensors.d_attn as *const u8,
        largest: slots_of(16) as *mut u32,
        exponents: slots_of(16) as *mut i32,
        operands: slots_of(flash::OPERANDS * flash::TILE_BYTES) as *mut u8,
        statistics: slots_of(flash::STATISTICS_BYTES) as *mut f32,
        dq: slots_of(4 * flash::DQ_FLOATS) as *mut f32,
        counters: gpu.output(8 * slots + 4) as *mut u32,
        tiles: gpu.upload(&words) as *const AttentionTile,
        o: tensors.o as *mut u8,
        dqkv: tensors.dqkv as *mut u8,
        bias_partials: tensors.bias_partials as *mut f32,
        total_seq_len: shape.total_seq_len as u32,
        num_heads,
        num_tiles,
        scale: shape.scale,
    };
    let (a_block_a_slot, a_block_an_sm) = ([num_tiles, num_heads, 1], [slots.min(target.num_sms) as u32, 1, 1]);
    for (entry, grid, block, shared_bytes) in [
        ("attention_flash_largest", a_block_a_slot, flash::ROWS_THREADS, flash::LARGEST_SHARED_BYTES),
        ("attention_flash_convert", a_block_a_slot, flash::ROWS_THREADS, flash::LARGEST_SHARED_BYTES),
        ("attention_flash_forward", a_block_an_sm, flash::THREADS, flash::forward::SHARED_BYTES),
        ("attention_flash_backward", a_block_an_sm, flash::THREADS, flash::backward::SHARED_BYTES),
        ("attention_flash_dq", a_block_a_slot, flash::ROWS_THREADS, flash::DQ_SHARED_BYTES),
    ] {
        gpu.launch(entry, Size { grid, block, shared_bytes: shared_bytes as usize }, &params);
    }
}

/// Partial column sums of the first `rows` rows of `x`, `[rows, columns]` bf16, as the host launches them; returns how many.
pub fn launch_column_sums(gpu: &mut Simulator, x: u64, rows: u32, columns: u32, partials: u64) -> u32 {
    let rows_per_block = config::column_sums_rows_per_block(rows);
    let blocks = rows.div_ceil(rows_per_block);
    if rows > 0 {
        let (x, partials) = (x as *const u16, partials as *mut f32);
        let params = ColumnSumsParams { x, partials, rows, columns, rows_per_block, reserved: 0 };
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

/// The attention kernels on `gpu`, in the blocks that `target` gives. Fails if they write a row that belongs to no chunk.
pub fn attention(gpu: &mut Simulator, inputs: &AttentionInputs, target: &Target) -> Attention<bf16, f32> {
    let shape = inputs.shape();
    let tiles = AttentionTiles::new(&inputs.cu_seqlens, shape.num_heads, target);
    let (rows, d_model) = (shape.total_seq_len, shape.d_model());
    let stats_rows = if tiles.long.is_empty() || tiles.flash { 0 } else { shape.num_heads * rows };
    let tensors = AttentionTensors {
        query_states: gpu.upload(&inputs.query_states),
        key_states: gpu.upload(&inputs.key_states),
        value_states: gpu.upload(&inputs.value_states),
        d_attn: gpu.upload(&inputs.d_attn),
        o: gpu.output(2 * rows * d_model),
        dqkv: gpu.output(6 * rows * d_model),
        bias_partials: gpu.output(12 * tiles.bias_rows * d_model),
        stats: gpu.output(16 * stats_rows),
    };
    launch_attention(gpu, &shape, (&tiles, target), tensors);
    let padding = inputs.cu_seqlens.padding();
    for (address, row_bytes) in [(tensors.o, 2 * d_model), (tensors.dqkv, 6 * d_model)] {
        gpu.assert_untouched(address + (padding.start * row_bytes) as u64, padding.len() * row_bytes);
    }
    Attention {
        o: gpu.download(tensors.o, (padding.start, d_model)),
        dqkv: gpu.download(tensors.dqkv, (padding.start, 3 * d_model)),
        sums: gpu.download(tensors.bias_partials, (tiles.bias_rows, 3 * d_model)),
    }
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
    let tiles = AttentionTiles::new(&inputs.cu_seqlens, shape.num_heads, target);
    let mut sums = Array2::zeros((tiles.bias_rows, 3 * d_model));
    let short = tiles.short.iter().map(|tile| (tile, tile.len));
    let long_rows = if tiles.flash { flash::TILE_ROWS } else { config::LONG_TILE_ROWS };
    let long = tiles.long.iter().map(|tile| (tile, long_rows));
    for (tile, rows) in short.chain(long) {
        let (first, end) = (tile.start + tile.first, tile.start + tile.len.min(tile.first + rows));
        let sum = dqkv.slice(s![first as usize..end as usize, ..]).sum_axis(Axis(0));
        sums.row_mut(tile.bias_row as usize).assign(&sum);
    }
    Attention { o, dqkv, sums }
}

/// All gradients, by the launches that the plan for `target` has.
pub fn backward(gpu: &mut Simulator, inputs: &Inputs, target: &Target) -> Gradients {
    let shape = inputs.shape().expect("inputs that fit together");
    let plan = Plan::new(&shape, &inputs.cu_seqlens, target).expect("a supported shape");
    let workspace = gpu.workspace(plan.workspace());
    let (d_model, tokens) = (shape.d_model(), inputs.cu_seqlens.padding().start);
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
    let gemm_plan = plan.d_attn_gemm().portable().expect("the portable module");
    let of = [product([grad_output, 0, 0], pitch, [out_weight, 0, 0], d_attn)];
    gemm::run(gpu, Operands::Bf16, gemm_plan, &of, workspace.at("partial sums, grad_attention"));

    let out_bias_partials = workspace.at("out bias partial sums");
    let out_bias_rows = launch_column_sums(gpu, grad_output, tokens as u32, pitch, out_bias_partials);

    let tensors = AttentionTensors {
        query_states: gpu.upload(&inputs.query_states),
        key_states: gpu.upload(&inputs.key_states),
        value_states: gpu.upload(&inputs.value_states),
        d_attn,
        o: workspace.at("attention output bf16"),
        dqkv: workspace.at("dq, dk, dv bf16"),
        bias_partials: workspace.at("bias partial sums"),
        stats: workspace.at("long chunks' statistics"),
    };
    launch_attention(gpu, &shape, (plan.tiles(), target), tensors);

    let dqkv = [0, 1, 2].map(|i| tensors.dqkv + 2 * i * d_model as u64);
    let hidden = [hidden_states, 0, 0];
    let of = [
        product(dqkv, 3 * pitch, weights, grad_hidden_states),
        product([dqkv[0], 0, 0], 3 * pitch, hidden, grad_weights[0]),
        product([dqkv[1], 0, 0], 3 * pitch, hidden, grad_weights[1]),
        product([dqkv[2], 0, 0], 3 * pitch, hidden, grad_weights[2]),
        product([grad_output, 0, 0], pitch, [tensors.o, 0, 0], grad_weights[3]),
    ];
    let gemm_plan = plan.gradients_gemm().portable().expect("the portable module");
    gemm::run(gpu, Operands::Bf16, gemm_plan, &of, workspace.at("partial sums, gradients"));

    let qkv = |i: usize| {
        let partials = tensors.bias_partials + (4 * i * d_model) as u64;
        (partials, grad_biases[i], plan.tiles().bias_rows as u32, 3 * pitch, pitch)
    };
    let out = (out_bias_partials, grad_biases[3], out_bias_rows, pitch, pitch);
    launch_sum_partials(gpu, [qkv(0), qkv(1), qkv(2), out]);

    // The host fills the rows of padding with zeros; no kernel touches them.
    let padding = inputs.cu_seqlens.padding();
    gpu.assert_untouched(grad_hidden_states + (2 * tokens * d_model) as u64, 2 * padding.len() * d_model);
    let of_tokens: Array2<bf16> = gpu.download(grad_hidden_states, (tokens, d_model));
    let zeros = Array2::from_elem((padding.len(), d_model), bf16::ZERO);
    let weight = |i: usize| gpu.download(grad_weights[i], (d_model, d_model));
    let bias = |i: usize| gpu.download(grad_biases[i], d_model);
    Gradients {
        grad_hidden_states: concatenate![Axis(0), of_tokens, zeros],
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
