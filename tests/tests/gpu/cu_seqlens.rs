//! Chunks that the host does not know when it enqueues: one captured graph whose offsets change, offsets that break rules, and cuts into chunks
//! of extreme numbers and lengths.

use attn_backward::audio::{self, Backward, Capacity, Plan};
use attn_backward::gpu::{Graph, ModuleKind, Stream};
use attn_backward::{CuSeqlens, Error, Workspace};
use attn_backward_tests::assertions::assert_audio;
use attn_backward_tests::device::{TestGpu, on_each_module, on_gpu};
use attn_backward_tests::examples::{audio_of, fill_rows_from, one_chunk};
use attn_backward_tests::sparse_queries;
use attn_backward_tests::strategies::cu_seqlens_of;
use half::bf16;
use ndarray::{Axis, concatenate};

use crate::guarded::{audio_backward, audio_tensors};

/// Rows of the packed tensors, not a multiple of a tile or k-block.
const ROWS: usize = 300;

/// Offsets of chunks of these lengths in [`ROWS`] rows.
fn offsets(chunk_lens: &[usize]) -> CuSeqlens {
    cu_seqlens_of(chunk_lens, ROWS - chunk_lens.iter().sum::<usize>())
}

/// Inputs whose padding rows are NaN.
fn inputs(seed: u64, num_heads: usize, cu_seqlens: CuSeqlens) -> audio::Inputs {
    let tokens = cu_seqlens.padding().start;
    let mut inputs = audio_of(seed, num_heads, cu_seqlens);
    fill_rows_from(&mut inputs, tokens, bf16::NAN);
    inputs
}

/// An operation with tensors at fixed addresses.
struct Fixed {
    operation: Backward,
    tensors: audio_tensors::Inputs,
    outputs: audio_tensors::Outputs,
    stream: Stream,
}

impl Fixed {
    fn new(gpu: &TestGpu, plan: Plan) -> Fixed {
        let (shape, num_chunks) = (*plan.shape(), plan.capacity().num_chunks);
        let outputs = audio_tensors::Outputs::new(&gpu.gpu, &shape, plan.workspace().bytes());
        let placeholder = audio_of(0, shape.num_heads, cu_seqlens_of(&vec![0; num_chunks], shape.total_seq_len));
        Fixed {
            operation: Backward::new(&gpu.gpu, plan).unwrap(),
            tensors: audio_tensors::Inputs::upload(&gpu.gpu, &placeholder),
            outputs,
            stream: Stream::new(&gpu.gpu).unwrap(),
        }
    }

    /// Replaces the content of every tensor with a row for each token, of the weights, and of the offsets.
    fn write(&mut self, inputs: &audio::Inputs) {
        let tensors = &mut self.tensors;
        tensors.grad_output.write(inputs.grad_output.as_slice().unwrap());
        tensors.hidden_states.write(inputs.hidden_states.as_slice().unwrap());
        tensors.query_states.write(inputs.query_states.as_slice().unwrap());
        tensors.key_states.write(inputs.key_states.as_slice().unwrap());
        tensors.value_states.write(inputs.value_states.as_slice().unwrap());
        tensors.q_weight.write(inputs.q_weight.as_slice().unwrap());
        tensors.k_weight.write(inputs.k_weight.as_slice().unwrap());
        tensors.v_weight.write(inputs.v_weight.as_slice().unwrap());
        tensors.out_weight.write(inputs.out_weight.as_slice().unwrap());
        let num_chunks = self.operation.plan().capacity().num_chunks;
        tensors.cu_seqlens.write(inputs.cu_seqlens.padded(num_chunks).unwrap().offsets());
    }

    fn enqueue(&self) -> Result<(), Error> {
        self.operation.run(
            &self.stream,
            &self.tensors.views(),
            &mut self.outputs.views(),
            &mut self.outputs.workspace(),
        )
    }

    fn check(&self) -> Result<(), Error> {
        self.operation.check_cu_seqlens(&self.stream, &self.tensors.views().cu_seqlens)
    }
}

/// Plans of each mix of attention kernels, and lengths of chunks inside their capacity.
fn plans(gpu: &TestGpu, module: ModuleKind, num_heads: usize) -> [(Plan, Vec<Vec<usize>>); 3] {
    let shape = audio::Shape { total_seq_len: ROWS, num_heads, scale: 0.125 };
    let target = gpu.target(module);
    let of = |num_chunks, max_chunk_len| {
        Plan::with_capacity(&shape, Capacity { num_chunks, max_chunk_len }, &target).unwrap()
    };
    let (short, both) = (of(12, 64), of(12, ROWS));
    let long = Plan::new(&shape, &cu_seqlens_of(&[150, 150], 0), &target).unwrap();
    let kernels = |plan: &Plan| (plan.tiles().short_rows() > 0, plan.tiles().long_slots().is_some());
    assert_eq!([&short, &both, &long].map(kernels), [(true, false), (true, true), (false, true)]);
    let short_lens = [&[60; 5][..], &[64; 4], &[1; 12], &[], &[30, 0, 64, 64, 63, 64, 2], &[64, 64, 64, 64, 43], &[5]];
    let both_lens = [&[300][..], &[100, 1, 64, 65, 0, 69], &[25; 12], &[130], &[7], &[], &[64, 0, 65, 129, 1]];
    let long_lens = [&[150, 150][..], &[299, 0], &[1, 2], &[0, 0], &[64, 129]];
    let owned = |lens: &[&[usize]]| lens.iter().map(|lens| lens.to_vec()).collect();
    [(short, owned(&short_lens)), (both, owned(&both_lens)), (long, owned(&long_lens))]
}

#[test]
fn one_captured_graph_follows_offsets_that_change_between_its_launches() {
    on_each_module(|gpu, module| {
        // an odd number of heads leaves half a tile of the weights' gradients empty
        for num_heads in [2, 3] {
            for (plan, all_lens) in plans(gpu, module, num_heads) {
                let mut fixed = Fixed::new(gpu, plan);
                let mut graph = Graph::capture(&fixed.stream, || fixed.enqueue()).unwrap();
                let mut first_bits = Vec::new();
                for (turn, lens) in all_lens.iter().chain(&all_lens).enumerate() {
                    let inputs = inputs((turn % all_lens.len()) as u64, num_heads, offsets(lens));
                    fixed.write(&inputs);
                    // SAFETY: inputs, outputs and workspace are those of the capture, and nothing else uses them.
                    unsafe { graph.launch(&fixed.stream) }.unwrap();
                    fixed.stream.synchronize().unwrap();
                    let gradients = fixed.outputs.gradients();
                    if turn < all_lens.len() {
                        eprintln!("{num_heads} heads, chunks {lens:?}: {}", fixed.operation.plan().tiles());
                        assert_audio(&gradients, &audio::reference::backward(&inputs).unwrap());
                        let padding = gradients.grad_hidden_states.outer_iter().skip(lens.iter().sum());
                        assert!(padding.flatten().all(|x| x.to_bits() == 0), "padding rows are not zero");
                        fixed.check().unwrap();
                        first_bits.push(audio_tensors::bits(&gradients));
                    } else {
                        assert!(audio_tensors::bits(&gradients) == first_bits[turn - all_lens.len()], "{lens:?}");
                    }
                }
            }
        }
    });
}

#[test]
fn offsets_that_break_a_rule_are_told_and_harm_nothing() {
    on_each_module(|gpu, module| {
        for (plan, all_lens) in plans(gpu, module, 2) {
            let num_chunks = plan.capacity().num_chunks;
            let mut fixed = Fixed::new(gpu, plan);
            let good = inputs(1, 2, offsets(&all_lens[0]));
            let valid = good.cu_seqlens.padded(num_chunks).unwrap().offsets().to_vec();
            let with = |index: usize, value: i32| {
                let mut offsets = valid.clone();
                offsets[index] = value;
                offsets
            };
            let garbage = [
                (0, with(0, 1)),
                (1, with(1, -7)),
                (1, with(1, i32::MAX)),
                (1, with(1, i32::MIN)),
                (num_chunks, with(num_chunks, ROWS as i32 + 1)),
                (num_chunks, with(num_chunks, 0)),
                (0, vec![-1; num_chunks + 1]),
                (0, (0..=num_chunks as i32).map(|i| 1_000_003 * (i + 1) % 977 - 300).collect()),
            ];
            for (index, offsets) in garbage {
                fixed.write(&good);
                fixed.tensors.cu_seqlens.write(&offsets);
                fixed.enqueue().unwrap();
                let error = fixed.check().unwrap_err();
                assert!(matches!(error, Error::CuSeqlens { index: at, .. } if at == index), "{error}, {offsets:?}");
                let gradients = fixed.outputs.gradients();
                assert!(gradients.grad_q_bias.iter().all(|x| x.is_nan()), "{offsets:?}");
            }
            fixed.write(&good);
            fixed.enqueue().unwrap();
            fixed.check().unwrap();
            assert_audio(&fixed.outputs.gradients(), &audio::reference::backward(&good).unwrap());
        }
    });
}

#[test]
fn the_librarys_buffers_take_new_offsets_in_place() {
    on_each_module(|gpu, module| {
        let first = inputs(3, 2, offsets(&[60, 64, 3]));
        let shape = first.shape().unwrap();
        let plan =
            Plan::with_capacity(&shape, Capacity { num_chunks: 3, max_chunk_len: 64 }, &gpu.target(module)).unwrap();
        let operation = Backward::new(&gpu.gpu, plan).unwrap();
        let stream = Stream::new(&gpu.gpu).unwrap();
        let mut buffers = audio::InputBuffers::upload(&gpu.gpu, &first).unwrap();
        let mut gradients = audio::GradientBuffers::allocate(&gpu.gpu, &stream, &shape).unwrap();
        let mut workspace = Workspace::allocate(&gpu.gpu, operation.plan().workspace().bytes()).unwrap();
        let mut graph = {
            let (views, mut outputs) = (buffers.views().unwrap(), gradients.views().unwrap());
            Graph::capture(&stream, || operation.run(&stream, &views, &mut outputs, &mut workspace)).unwrap()
        };
        for lens in [&[60, 64, 3][..], &[33, 1], &[]] {
            let cu_seqlens = offsets(lens);
            buffers.set_cu_seqlens(&stream, &cu_seqlens).unwrap();
            // SAFETY: buffers and workspace are those of the capture, and nothing else uses them.
            unsafe { graph.launch(&stream) }.unwrap();
            let inputs = audio::Inputs { cu_seqlens, ..first.clone() };
            let found = gradients.download(&stream).unwrap();
            assert_audio(&found, &audio::reference::backward(&inputs).unwrap());
        }
        let error = buffers.set_cu_seqlens(&stream, &offsets(&[1; 4])).unwrap_err();
        assert_eq!(error.to_string(), "cu_seqlens: expected shape [4], found [5]");
        let error = buffers.set_cu_seqlens(&stream, &cu_seqlens_of(&[1], 0)).unwrap_err();
        assert!(matches!(error, Error::Shape { .. }), "{error}");
    });
}

#[test]
fn seventy_thousand_chunks_of_one_token_equal_the_reference() {
    on_gpu(|gpu| {
        let inputs = audio_of(5, 2, cu_seqlens_of(&vec![1; 70_000], 0));
        let reference = audio::reference::backward(&inputs).unwrap();
        for &module in &gpu.modules {
            eprintln!("{module} module");
            assert_audio(&audio_backward(&gpu.gpu, module, &inputs), &reference);
        }
    });
}

#[test]
fn one_chunk_of_16384_among_as_many_of_one_token_equals_the_reference() {
    const LONG: usize = 16_384;
    const BEFORE: usize = 10_000;
    // Few rows of the long chunk have a gradient, so that f64 can follow.
    let rows = [0, 63, 64, 5_000, 16_383];
    on_gpu(|gpu| {
        let mut lens = vec![1; BEFORE];
        lens.push(LONG);
        lens.extend(vec![1; LONG - BEFORE]);
        let mut inputs = audio_of(6, 2, cu_seqlens_of(&lens, 0));
        for row in (0..LONG).filter(|row| !rows.contains(row)) {
            inputs.grad_output.row_mut(BEFORE + row).fill(bf16::ZERO);
        }
        let long = sparse_queries::backward(&one_chunk(&inputs, BEFORE..BEFORE + LONG), &rows);
        let ones = |rows: std::ops::Range<usize>| {
            let cu_seqlens = cu_seqlens_of(&vec![1; rows.len()], 0);
            audio::reference::backward(&audio::Inputs { cu_seqlens, ..one_chunk(&inputs, rows) }).unwrap()
        };
        let (before, after) = (ones(0..BEFORE), ones(BEFORE + LONG..2 * LONG));
        let hidden = [&before, &long, &after].map(|part| part.grad_hidden_states.view());
        let reference = audio::Gradients {
            grad_hidden_states: concatenate(Axis(0), &hidden).unwrap(),
            grad_q_weight: before.grad_q_weight + long.grad_q_weight + after.grad_q_weight,
            grad_q_bias: before.grad_q_bias + long.grad_q_bias + after.grad_q_bias,
            grad_k_weight: before.grad_k_weight + long.grad_k_weight + after.grad_k_weight,
            grad_k_bias: before.grad_k_bias + long.grad_k_bias + after.grad_k_bias,
            grad_v_weight: before.grad_v_weight + long.grad_v_weight + after.grad_v_weight,
            grad_v_bias: before.grad_v_bias + long.grad_v_bias + after.grad_v_bias,
            grad_out_weight: before.grad_out_weight + long.grad_out_weight + after.grad_out_weight,
            grad_out_bias: before.grad_out_bias + long.grad_out_bias + after.grad_out_bias,
        };
        for &module in &gpu.modules {
            eprintln!("{module} module");
            assert_audio(&audio_backward(&gpu.gpu, module, &inputs), &reference);
        }
    });
}
