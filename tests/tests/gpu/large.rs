//! Tensors with more than 2^31 elements: nearly all of them zero, so that a small reference says what the others must give.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use attn_backward::compare::{MaxAtol, Tolerance, compare_all};
use attn_backward::cross::Precision;
use attn_backward::gpu::{Dtype, Stream, TensorView, TensorViewMut};
use attn_backward::{Target, Workspace, audio, cross, window_cu_seqlens};
use attn_backward_tests::assertions::assert_audio;
use attn_backward_tests::device::{TestGpu, on_gpu, skip};
use attn_backward_tests::examples::audio_of;
use attn_backward_tests::strategies::cu_seqlens_of;
use half::bf16;
use ndarray::{Array, Array1, Array2, Array3, s};

use crate::driver::Memory;
use crate::guarded::strides;

/// Device memory that these tests need, one at a time.
const NEEDED_BYTES: usize = 64 << 30;

/// Keeps the others out; `None` if the GPU is too small.
fn alone(gpu: &TestGpu, test: &str) -> Option<MutexGuard<'static, ()>> {
    static ONE: Mutex<()> = Mutex::new(());
    if gpu.gpu.properties().total_memory_bytes < NEEDED_BYTES {
        skip(test, "less than 64 GiB of GPU memory");
        return None;
    }
    // A test that failed in there has left nothing behind that matters.
    Some(ONE.lock().unwrap_or_else(PoisonError::into_inner))
}

fn view<T>(memory: &Memory<T>, dtype: Dtype, shape: &[usize]) -> TensorView<'static>
where
    T: bytemuck::Pod,
{
    // SAFETY: the callers keep the memory, which holds as much, until the work has ended.
    unsafe { TensorView::foreign(memory.address(), dtype, shape, &strides(shape), 0) }
}

fn view_mut<T: bytemuck::Pod>(memory: &Memory<T>, dtype: Dtype, shape: &[usize]) -> TensorViewMut<'static> {
    // SAFETY: as above, and nothing else uses the memory meanwhile.
    unsafe { TensorViewMut::foreign(memory.address(), dtype, shape, &strides(shape), 0) }
}

/// Where the rows with values lie among the zeros, and which rows of the packed inputs they are.
struct Placed {
    rows: Range<usize>,
    first_packed: usize,
}

/// Operation A on `total` rows in chunks of `chunk_len`, zeros but for the chunks whose indices are `filled`, the last of all among them.
fn audio_matches_its_reference(test: &str, (total, chunk_len): (usize, usize), num_heads: usize, filled: &[usize]) {
    let d_model = 64 * num_heads;
    let cu_seqlens = window_cu_seqlens(chunk_len, total).unwrap();
    assert_eq!(filled.last(), Some(&(cu_seqlens.num_chunks() - 1)));
    let mut tokens = 0;
    let placed: Vec<Placed> = filled
        .iter()
        .map(|chunk| {
            let rows = chunk * chunk_len..total.min((chunk + 1) * chunk_len);
            let first_packed = tokens;
            tokens += rows.len();
            Placed { rows, first_packed }
        })
        .collect();
    on_gpu(|gpu| {
        let Some(_alone) = alone(gpu, test) else { return };
        let lens: Vec<usize> = placed.iter().map(|placed| placed.rows.len()).collect();
        let packed = audio_of(1, num_heads, cu_seqlens_of(&lens, 0));
        let reference = audio::reference::backward(&packed).unwrap();

        let elements = total * d_model;
        let tokens_tensor = |values: &Array2<bf16>| {
            let mut memory = Memory::<bf16>::filled(&gpu.gpu, elements, 0);
            for Placed { rows, first_packed } in &placed {
                let values = values.slice(s![*first_packed..first_packed + rows.len(), ..]);
                memory.write(rows.start * d_model, values.to_owned().as_slice().unwrap());
            }
            memory
        };
        let states = |values: &Array<bf16, ndarray::Ix4>| {
            let mut memory = Memory::<bf16>::filled(&gpu.gpu, elements, 0);
            for head in 0..num_heads {
                for Placed { rows, first_packed } in &placed {
                    let values = values.slice(s![0, head, *first_packed..first_packed + rows.len(), ..]);
                    memory.write((head * total + rows.start) * 64, values.to_owned().as_slice().unwrap());
                }
            }
            memory
        };
        let (grad_output, hidden_states) = (tokens_tensor(&packed.grad_output), tokens_tensor(&packed.hidden_states));
        let (query, key, value) =
            (states(&packed.query_states), states(&packed.key_states), states(&packed.value_states));
        let weights = [&packed.q_weight, &packed.k_weight, &packed.v_weight, &packed.out_weight]
            .map(|weight| Memory::of(&gpu.gpu, weight.as_slice().unwrap()));
        let weight = |index: usize| view(&weights[index], Dtype::Bf16, &[d_model, d_model]);
        let offsets = Memory::of(&gpu.gpu, cu_seqlens.offsets());
        let of_head = [1, num_heads, total, 64];
        let inputs = audio::DeviceInputs {
            grad_output: view(&grad_output, Dtype::Bf16, &[total, d_model]),
            hidden_states: view(&hidden_states, Dtype::Bf16, &[total, d_model]),
            query_states: view(&query, Dtype::Bf16, &of_head),
            key_states: view(&key, Dtype::Bf16, &of_head),
            value_states: view(&value, Dtype::Bf16, &of_head),
            q_weight: weight(0),
            k_weight: weight(1),
            v_weight: weight(2),
            out_weight: weight(3),
            cu_seqlens: view(&offsets, Dtype::I32, &[cu_seqlens.num_chunks() + 1]),
        };
        for &module in &gpu.modules {
            eprintln!("{module} module");
            let shape = audio::Shape { total_seq_len: total, num_heads, scale: 0.125 };
            let plan = audio::Plan::new(&shape, &cu_seqlens, &Target::of(&gpu.gpu, module)).unwrap();
            let operation = audio::Backward::new(&gpu.gpu, plan).unwrap();
            let stream = Stream::new(&gpu.gpu).unwrap();
            let mut workspace = Workspace::allocate(&gpu.gpu, operation.plan().workspace().bytes()).unwrap();
            let grad_hidden = Memory::<bf16>::filled(&gpu.gpu, elements, 0xFF);
            let matrices = [(); 4].map(|()| Memory::<bf16>::filled(&gpu.gpu, d_model * d_model, 0xFF));
            let biases = [(); 4].map(|()| Memory::<bf16>::filled(&gpu.gpu, d_model, 0xFF));
            let matrix = |index: usize| view_mut(&matrices[index], Dtype::Bf16, &[d_model, d_model]);
            let bias = |index: usize| view_mut(&biases[index], Dtype::Bf16, &[d_model]);
            let mut gradients = audio::DeviceGradients {
                grad_hidden_states: view_mut(&grad_hidden, Dtype::Bf16, &[total, d_model]),
                grad_q_weight: matrix(0),
                grad_q_bias: bias(0),
                grad_k_weight: matrix(1),
                grad_k_bias: bias(1),
                grad_v_weight: matrix(2),
                grad_v_bias: bias(2),
                grad_out_weight: matrix(3),
                grad_out_bias: bias(3),
            };
            operation.run(&stream, &inputs, &mut gradients, &mut workspace).unwrap();
            stream.synchronize().unwrap();

            let mut rows = Vec::new();
            for Placed { rows: Range { start, end }, .. } in &placed {
                rows.extend(grad_hidden.read(start * d_model..end * d_model));
            }
            let matrix = |index: usize| {
                Array2::from_shape_vec((d_model, d_model), matrices[index].read(0..d_model * d_model)).unwrap()
            };
            let bias = |index: usize| Array1::from_vec(biases[index].read(0..d_model));
            let found = audio::Gradients {
                grad_hidden_states: Array2::from_shape_vec((tokens, d_model), rows).unwrap(),
                grad_q_weight: matrix(0),
                grad_q_bias: bias(0),
                grad_k_weight: matrix(1),
                grad_k_bias: bias(1),
                grad_v_weight: matrix(2),
                grad_v_bias: bias(2),
                grad_out_weight: matrix(3),
                grad_out_bias: bias(3),
            };
            assert_audio(&found, &reference);
            for between in placed.windows(2) {
                assert_zero(&grad_hidden, between[0].rows.end * d_model..between[1].rows.start * d_model);
            }
        }
    });
}

#[test]
fn audio_offsets_past_two_to_the_31_elements() {
    const CHUNK: usize = 128;
    // The last two chunks begin past element 2^31 of [T, 128]; so do the second head's rows of [1, 2, T, 64] from row 2^24 on.
    let total = (1 << 24) + 2 * CHUNK + 44;
    let last = (1 << 17) + 2;
    assert!(total * 128 > 1 << 31);
    let test = "large::audio_offsets_past_two_to_the_31_elements";
    audio_matches_its_reference(test, (total, CHUNK), 2, &[0, last - 1, last]);
}

#[test]
fn audio_of_840_000_rows_of_the_models_width() {
    // dQ | dK | dV have 3.2e9 elements: chunks around their elements 2^30, 2^31 and 3e9 have values.
    let chunk_of_element = |element: usize| element / (3 * 1280) / 100;
    let filled = [0, chunk_of_element(1 << 30), chunk_of_element(1 << 31), chunk_of_element(3_000_000_000), 8399];
    audio_matches_its_reference("large::audio_of_840_000_rows_of_the_models_width", (840_000, 100), 20, &filled);
}

#[test]
fn cross_offsets_past_two_to_the_31_elements() {
    let (head_dim, num_heads, hidden, ends) = (256, 16, 8, 100);
    let seq_len = (1 << 19) + ends;
    on_gpu(|gpu| {
        let Some(_alone) = alone(gpu, "large::cross_offsets_past_two_to_the_31_elements") else { return };
        let packed_shape = cross::Shape {
            batch_size: 1,
            seq_len_dec: 2 * ends,
            seq_len_enc: 64,
            num_heads,
            num_kv_heads: 4,
            head_dim,
            hidden_size: hidden,
            cross_hidden_size: 8,
        };
        let packed = attn_backward::suite::cross_inputs(2, packed_shape);
        let reference = cross::reference::backward(&packed).unwrap();
        let shape = cross::Shape { seq_len_dec: seq_len, ..packed_shape };

        // Zeros but for the first and the last tokens.
        let elements = num_heads * seq_len * head_dim;
        assert!(elements > 1 << 31);
        let mut grad_query = Memory::<f32>::filled(&gpu.gpu, elements, 0);
        for head in 0..num_heads {
            for (token, from) in [(0, 0), (seq_len - ends, ends)] {
                let values = packed.grad_query_states.slice(s![0, head, from..from + ends, ..]).to_owned();
                grad_query.write((head * seq_len + token) * head_dim, values.as_slice().unwrap());
            }
        }
        let mut decoder = Memory::<f32>::filled(&gpu.gpu, seq_len * hidden, 0);
        let flat = packed.decoder_hidden_states.as_slice().unwrap();
        decoder.write(0, &flat[..ends * hidden]);
        decoder.write((seq_len - ends) * hidden, &flat[ends * hidden..]);
        let others = [
            packed.grad_key_states.as_slice(),
            packed.grad_value_states.as_slice(),
            packed.encoder_hidden_states.as_slice(),
            packed.q_weight.as_slice(),
            packed.k_weight.as_slice(),
            packed.v_weight.as_slice(),
        ]
        .map(|values| Memory::of(&gpu.gpu, values.unwrap()));
        let enc_heads = [1, num_heads, 64, head_dim];
        let kv_weight = [packed_shape.kv_out_dim(), 8];
        let inputs = cross::DeviceInputs {
            grad_query_states: view(&grad_query, Dtype::F32, &[1, num_heads, seq_len, head_dim]),
            grad_key_states: view(&others[0], Dtype::F32, &enc_heads),
            grad_value_states: view(&others[1], Dtype::F32, &enc_heads),
            decoder_hidden_states: view(&decoder, Dtype::F32, &[1, seq_len, hidden]),
            encoder_hidden_states: view(&others[2], Dtype::F32, &[1, 64, 8]),
            q_weight: view(&others[3], Dtype::F32, &[packed_shape.q_out_dim(), hidden]),
            k_weight: view(&others[4], Dtype::F32, &kv_weight),
            v_weight: view(&others[5], Dtype::F32, &kv_weight),
        };
        for &module in &gpu.modules {
            for (precision, promised) in [(Precision::Fast, 1.1 * 3.2e-4), (Precision::High, 3e-6)] {
                eprintln!("{module} module, {precision}");
                let plan = cross::Plan::new(&shape, precision, &Target::of(&gpu.gpu, module)).unwrap();
                let operation = cross::Backward::new(&gpu.gpu, plan).unwrap();
                let stream = Stream::new(&gpu.gpu).unwrap();
                let mut workspace = Workspace::allocate(&gpu.gpu, operation.plan().workspace().bytes()).unwrap();
                let output = |len: usize| Memory::<f32>::filled(&gpu.gpu, len, 0xFF);
                let (grad_dec, grad_enc) = (output(seq_len * hidden), output(64 * 8));
                let grad_q = output(packed_shape.q_out_dim() * hidden);
                let grad_kv = [(); 2].map(|()| output(packed_shape.kv_out_dim() * 8));
                let mut gradients = cross::DeviceGradients {
                    grad_decoder_hidden_states: view_mut(&grad_dec, Dtype::F32, &[1, seq_len, hidden]),
                    grad_encoder_hidden_states: view_mut(&grad_enc, Dtype::F32, &[1, 64, 8]),
                    grad_q_weight: view_mut(&grad_q, Dtype::F32, &[packed_shape.q_out_dim(), hidden]),
                    grad_k_weight: view_mut(&grad_kv[0], Dtype::F32, &kv_weight),
                    grad_v_weight: view_mut(&grad_kv[1], Dtype::F32, &kv_weight),
                };
                operation.run(&stream, &inputs, &mut gradients, &mut workspace).unwrap();
                stream.synchronize().unwrap();

                let mut rows = grad_dec.read(0..ends * hidden);
                rows.extend(grad_dec.read((seq_len - ends) * hidden..seq_len * hidden));
                let matrix = |memory: &Memory<f32>, rows: usize| {
                    Array2::from_shape_vec((rows, 8), memory.read(0..rows * 8)).unwrap()
                };
                let found = cross::Gradients {
                    grad_decoder_hidden_states: Array3::from_shape_vec((1, 2 * ends, hidden), rows).unwrap(),
                    grad_encoder_hidden_states: Array3::from_shape_vec((1, 64, 8), grad_enc.read(0..64 * 8)).unwrap(),
                    grad_q_weight: matrix(&grad_q, packed_shape.q_out_dim()),
                    grad_k_weight: matrix(&grad_kv[0], packed_shape.kv_out_dim()),
                    grad_v_weight: matrix(&grad_kv[1], packed_shape.kv_out_dim()),
                };
                let any =
                    Tolerance { max_atol: MaxAtol::Fixed(f64::INFINITY), max_rtol: 0.0, required_match_ratio: 0.0 };
                for comparison in compare_all(&found.tensors(), &reference.tensors(), &any).unwrap() {
                    assert!(comparison.non_finite == 0 && comparison.normwise_error <= promised, "{comparison:#?}");
                }
                assert_zero(&grad_dec, ends * hidden..(seq_len - ends) * hidden);
            }
        }
    });
}

/// Fails if a value in `range` is not zero (of either sign).
#[track_caller]
fn assert_zero<T: bytemuck::Pod + num_traits::Zero>(memory: &Memory<T>, range: Range<usize>) {
    const BLOCK: usize = 1 << 26;
    for first in range.clone().step_by(BLOCK) {
        let values = memory.read(first..range.end.min(first + BLOCK));
        let at = values.iter().position(|x| !x.is_zero());
        assert_eq!(at.map(|at| first + at), None, "an element that must be zero");
    }
}
