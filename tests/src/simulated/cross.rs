//! Operation B on the simulated GPU: the launches of `cross::Backward::run`.

use attn_backward::Target;
use attn_backward::cross::scales::{Operand, Operands};
use attn_backward::cross::{Gradients, Inputs, Plan, Precision, Shape};
use attn_backward::gemm::{self as host_gemm, ProductTensors};
use attn_backward_kernels::config::cross_convert as config;
use attn_backward_kernels::params::CrossConvertParams;
use attn_backward_kernels::scale::maximum_of_word;
use half::f16;
use ndarray::{Array2, Array3};

use super::{Simulator, Size, Workspace, gemm};

/// Addresses of what the conversion writes: fp16 parts, exponents.
pub(super) struct Converted {
    pub dq: [u64; 2],
    pub dkv: [u64; 2],
    pub x_dec: [u64; 2],
    pub x_enc: [u64; 2],
    pub wq: [u64; 2],
    pub wkv: [u64; 2],
    pub row_exponents_dec: u64,
    pub row_exponents_enc: u64,
    pub maxima: u64,
    /// How many sets of them there are: of one, or of each block.
    pub maxima_sets: usize,
    pub exponents: u64,
}

impl Converted {
    /// Copies it to the host, in the form of the host's emulation of the conversion. `exponents`: what a launch makes of the maxima.
    pub fn download(
        &self,
        gpu: &Simulator,
        shape: &Shape,
        precision: Precision,
        exponents: impl FnOnce([Option<i32>; 4]) -> [i32; 4],
    ) -> Operands {
        let operand = |parts: [u64; 2], rows: usize, columns: usize| Operand {
            hi: gpu.download::<f16, _>(parts[0], (rows, columns)),
            lo: (precision == Precision::High).then(|| gpu.download(parts[1], (rows, columns))),
        };
        let (rows_dec, rows_enc, kv) = (shape.rows_dec(), shape.rows_enc(), 2 * shape.kv_out_dim());
        let words: Array2<i32> = gpu.download(self.maxima, (config::MAXIMA, self.maxima_sets));
        let maxima: [Option<i32>; 4] = std::array::from_fn(|i| {
            let maximum = words.row(i).iter().copied().map(maximum_of_word).max().unwrap_or(i32::MIN);
            (maximum != i32::MIN).then_some(maximum)
        });
        Operands {
            dq: operand(self.dq, rows_dec, shape.q_out_dim()),
            dkv: operand(self.dkv, rows_enc, kv),
            x_dec: operand(self.x_dec, rows_dec, shape.hidden_size),
            x_enc: operand(self.x_enc, rows_enc, shape.cross_hidden_size),
            wq: operand(self.wq, shape.q_out_dim(), shape.hidden_size),
            wkv: operand(self.wkv, kv, shape.cross_hidden_size),
            row_exponents_dec: gpu.download(self.row_exponents_dec, rows_dec).to_vec(),
            row_exponents_enc: gpu.download(self.row_exponents_enc, rows_enc).to_vec(),
            maxima,
            exponents: exponents(maxima),
        }
    }

    /// The five products of the operation, in the plan's order; their exponents from address `exponents` on.
    pub fn products(
        &self,
        shape: &Shape,
        precision: Precision,
        exponents: u64,
        gradients: &GradientAddresses,
    ) -> [ProductTensors; 5] {
        let (q_out, kv_out) = (shape.q_out_dim(), shape.kv_out_dim());
        let (hidden, cross) = (shape.hidden_size, shape.cross_hidden_size);
        let product = |a: [u64; 2], b: [u64; 2], c: u64, lda: usize, n: usize, row_exponents: u64, exponent: u64| {
            // High: low times high, high times low, high times high.
            let (a, b) = match precision {
                Precision::Fast => ([a[0], 0, 0], [b[0], 0, 0]),
                Precision::High => ([a[1], a[0], a[0]], [b[0], b[1], b[0]]),
            };
            let exponent = exponents + 4 * exponent;
            ProductTensors {
                a,
                b,
                c,
                row_exponents,
                exponent,
                lda: lda as u32,
                ldb: n as u32,
                ldc: n as u32,
                ..Default::default()
            }
        };
        let Converted { dq, dkv, x_dec, x_enc, wq, wkv, row_exponents_dec, row_exponents_enc, .. } = *self;
        let dv = dkv.map(|address| address + 2 * kv_out as u64);
        let [grad_dec, grad_enc, grad_q, grad_k, grad_v] = gradients.0;
        [
            product(dq, wq, grad_dec, q_out, hidden, row_exponents_dec, 2),
            product(dq, x_dec, grad_q, q_out, hidden, 0, 0),
            product(dkv, wkv, grad_enc, 2 * kv_out, cross, row_exponents_enc, 3),
            product(dkv, x_enc, grad_k, 2 * kv_out, cross, 0, 1),
            product(dv, x_enc, grad_v, 2 * kv_out, cross, 0, 1),
        ]
    }
}

/// Four words.
fn four(gpu: &Simulator, address: u64) -> [i32; 4] {
    gpu.download::<i32, _>(address, 4).to_vec().try_into().expect("four elements")
}

/// Addresses of the gradients, in their order.
pub(super) struct GradientAddresses([u64; 5]);

impl GradientAddresses {
    pub fn new(gpu: &mut Simulator, shape: &Shape) -> Self {
        let (rows_dec, rows_enc) = (shape.rows_dec(), shape.rows_enc());
        let (q_out, kv_out) = (shape.q_out_dim(), shape.kv_out_dim());
        let (hidden, cross) = (shape.hidden_size, shape.cross_hidden_size);
        let elements = [rows_dec * hidden, rows_enc * cross, q_out * hidden, kv_out * cross, kv_out * cross];
        GradientAddresses(elements.map(|elements| gpu.output(4 * elements)))
    }

    pub fn download(&self, gpu: &Simulator, shape: &Shape) -> Gradients {
        let (q_out, kv_out) = (shape.q_out_dim(), shape.kv_out_dim());
        let (hidden, cross) = (shape.hidden_size, shape.cross_hidden_size);
        let [grad_dec, grad_enc, grad_q, grad_k, grad_v] = self.0;
        let batches = |address: u64, seq_len: usize, width: usize| -> Array3<f32> {
            gpu.download(address, (shape.batch_size, seq_len, width))
        };
        Gradients {
            grad_decoder_hidden_states: batches(grad_dec, shape.seq_len_dec, hidden),
            grad_encoder_hidden_states: batches(grad_enc, shape.seq_len_enc, cross),
            grad_q_weight: gpu.download(grad_q, (q_out, hidden)),
            grad_k_weight: gpu.download(grad_k, (kv_out, cross)),
            grad_v_weight: gpu.download(grad_v, (kv_out, cross)),
        }
    }
}

/// Uploads the inputs: what a conversion into `workspace` reads and writes, with `maxima_sets` sets of maxima at `maxima`.
pub(super) fn prepare_convert(
    gpu: &mut Simulator,
    inputs: &Inputs,
    shape: &Shape,
    precision: Precision,
    workspace: &Workspace,
    (maxima, maxima_sets): (u64, usize),
) -> (Converted, CrossConvertParams) {
    let parts = |name: &str| match precision {
        // The entries of Fast never use the second part; a kernel that did would access address 0.
        Precision::Fast => [workspace.at(name), 0],
        Precision::High => [workspace.at(name), workspace.at(&format!("{name} low"))],
    };
    let converted = Converted {
        dq: parts("dq fp16"),
        dkv: parts("dk, dv fp16"),
        x_dec: parts("decoder fp16"),
        x_enc: parts("encoder fp16"),
        wq: parts("q_weight fp16"),
        wkv: parts("kv weights fp16"),
        row_exponents_dec: workspace.at("decoder row exponents"),
        row_exponents_enc: workspace.at("encoder row exponents"),
        maxima,
        maxima_sets,
        exponents: workspace.at("exponents"),
    };
    let params = CrossConvertParams {
        grad_query_states: gpu.upload(&inputs.grad_query_states) as *const f32,
        grad_key_states: gpu.upload(&inputs.grad_key_states) as *const f32,
        grad_value_states: gpu.upload(&inputs.grad_value_states) as *const f32,
        decoder_hidden_states: gpu.upload(&inputs.decoder_hidden_states) as *const f32,
        encoder_hidden_states: gpu.upload(&inputs.encoder_hidden_states) as *const f32,
        q_weight: gpu.upload(&inputs.q_weight) as *const f32,
        k_weight: gpu.upload(&inputs.k_weight) as *const f32,
        v_weight: gpu.upload(&inputs.v_weight) as *const f32,
        dq: converted.dq.map(|address| address as *mut u16),
        dkv: converted.dkv.map(|address| address as *mut u16),
        x_dec: converted.x_dec.map(|address| address as *mut u16),
        x_enc: converted.x_enc.map(|address| address as *mut u16),
        wq: converted.wq.map(|address| address as *mut u16),
        wkv: converted.wkv.map(|address| address as *mut u16),
        row_exponents_dec: converted.row_exponents_dec as *mut i32,
        row_exponents_enc: converted.row_exponents_enc as *mut i32,
        block_maxima: converted.maxima as *mut i32,
        exponents: converted.exponents as *mut i32,
        zero: std::ptr::null_mut(),
        zero_words: 0,
        gradients_blocks: converted.maxima_sets as u32,
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
    };
    (converted, params)
}

/// Both kernels of the conversion, in as many blocks as `num_sms` multiprocessors get.
fn launch_convert(
    gpu: &mut Simulator,
    inputs: &Inputs,
    shape: &Shape,
    precision: Precision,
    num_sms: u32,
    workspace: &Workspace,
) -> Converted {
    let weight_rows = (shape.q_out_dim() + 2 * shape.kv_out_dim()) as u64;
    let weight_elements =
        (shape.q_out_dim() * shape.hidden_size + 2 * shape.kv_out_dim() * shape.cross_hidden_size) as u64;
    let (rows_dec, rows_enc) = (shape.rows_dec() as u32, shape.rows_enc() as u32);
    let gradients_blocks = config::gradients_blocks(rows_dec, rows_enc, weight_elements, num_sms);
    let maxima = (workspace.at("maxima"), gradients_blocks as usize);
    let (converted, params) = prepare_convert(gpu, inputs, shape, precision, workspace, maxima);
    let operands_blocks = config::operands_blocks(rows_dec, rows_enc, weight_rows, num_sms);
    let launches = [
        ("gradients", gradients_blocks, config::GRADIENTS_SMEM_BYTES as usize),
        ("operands", operands_blocks, config::OPERANDS_SMEM_BYTES as usize),
    ];
    for (kernel, blocks, shared_bytes) in launches {
        let entry = format!("cross_convert_{kernel}_{precision}");
        gpu.launch(&entry, Size { grid: [blocks, 1, 1], block: config::THREADS, shared_bytes }, &params);
    }
    converted
}

/// What the kernels of the conversion make of `inputs`, in the form of the host's emulation of them.
pub fn convert(gpu: &mut Simulator, inputs: &Inputs, precision: Precision, target: &Target) -> Operands {
    let shape = inputs.shape().expect("inputs that fit together");
    let plan = Plan::new(&shape, precision, target).expect("a supported shape");
    let workspace = gpu.workspace(plan.workspace());
    let converted = launch_convert(gpu, inputs, &shape, precision, target.num_sms as u32, &workspace);
    converted.download(gpu, &shape, precision, |_| four(gpu, converted.exponents))
}

/// All gradients, by the launches that the plan for `target` has.
pub fn backward(gpu: &mut Simulator, inputs: &Inputs, precision: Precision, target: &Target) -> Gradients {
    let shape = inputs.shape().expect("inputs that fit together");
    let plan = Plan::new(&shape, precision, target).expect("a supported shape");
    let workspace = gpu.workspace(plan.workspace());
    let converted = launch_convert(gpu, inputs, &shape, precision, target.num_sms as u32, &workspace);
    let gradients = GradientAddresses::new(gpu, &shape);
    let operands = match precision {
        Precision::Fast => host_gemm::Operands::F16,
        Precision::High => host_gemm::Operands::F16Promoted,
    };
    let of = converted.products(&shape, precision, converted.exponents, &gradients);
    let gemm_plan = plan.gemm().portable().expect("the portable module");
    gemm::run(gpu, operands, gemm_plan, &of, workspace.at("partial sums"));
    gradients.download(gpu, &shape)
}
