//! Runs of both operations whose outputs and workspace lie in one block of 0xFF bytes with canaries around each: what is not written is
//! NaN, and what is written outside is found. Inputs, outputs, workspace and stream are all foreign to the library.

use attn_backward::cross::Precision;
use attn_backward::gpu::{Dtype, Gpu, ModuleKind, Stream, TensorElement, TensorView, TensorViewMut};
use attn_backward::{Error, Target, Workspace, audio, cross};
use half::bf16;
use ndarray::{Array, ArrayBase, Data, Dimension, IntoDimension};

use crate::driver::{ForeignStream, Memory};

/// Bytes between neighbours, and before the first and after the last; more than any kernel's tile row.
const GUARD_BYTES: usize = 4096;
/// What every byte holds before a run: NaN in bf16 and in f32.
const CANARY: u8 = 0xFF;
/// Alignment of every place: what a workspace asks for.
const ALIGN_BYTES: usize = 256;

/// Device memory for several tensors with canaries around each.
pub struct Guarded {
    memory: Memory<u8>,
    places: Vec<(usize, usize)>,
}

impl Guarded {
    /// Places of these sizes in bytes, in order.
    pub fn new(gpu: &Gpu, sizes: &[usize]) -> Guarded {
        let mut end = 0;
        let mut places = Vec::new();
        for &bytes in sizes {
            let start = (end + GUARD_BYTES).next_multiple_of(ALIGN_BYTES);
            places.push((start, bytes));
            end = start + bytes;
        }
        Guarded { memory: Memory::filled(gpu, end + GUARD_BYTES, CANARY), places }
    }

    /// Device address of place `index`.
    pub fn address(&self, index: usize) -> u64 {
        self.memory.address() + self.places[index].0 as u64
    }

    /// Size of place `index`.
    pub fn bytes(&self, index: usize) -> usize {
        self.places[index].1
    }

    /// Values at place `index`.
    pub fn values<T: bytemuck::Pod>(&self, index: usize) -> Vec<T> {
        let (start, bytes) = self.places[index];
        let bytes = self.memory.read(start..start + bytes);
        bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    /// Replaces the values at place `index`.
    pub fn write<T: bytemuck::Pod>(&mut self, index: usize, values: &[T]) {
        assert_eq!(size_of_val(values), self.places[index].1);
        self.memory.write(self.places[index].0, bytemuck::cast_slice(values));
    }

    /// Fails if a byte outside of the places has changed.
    #[track_caller]
    pub fn assert_canaries(&self) {
        let mut end = 0;
        for &(start, bytes) in &self.places {
            self.assert_untouched(end..start);
            end = start + bytes;
        }
        self.assert_untouched(end..end + GUARD_BYTES);
    }

    /// Fails if a byte of place `index` has changed.
    #[track_caller]
    pub fn assert_unwritten(&self, index: usize) {
        let (start, bytes) = self.places[index];
        self.assert_untouched(start..start + bytes);
    }

    #[track_caller]
    fn assert_untouched(&self, range: std::ops::Range<usize>) {
        let at = self.memory.read(range.clone()).iter().position(|byte| *byte != CANARY);
        assert_eq!(at, None, "written in guarded bytes {range:?} (places {:?})", self.places);
    }
}

/// Row-major strides.
pub fn strides(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect()
}

/// A tensor of the library's in foreign memory.
pub struct Input {
    memory: Memory<u8>,
    dtype: Dtype,
    shape: Vec<usize>,
    device: usize,
}

impl Input {
    pub fn of<T, S, D>(gpu: &Gpu, values: &ArrayBase<S, D>) -> Input
    where
        T: TensorElement + bytemuck::Pod,
        S: Data<Elem = T>,
        D: Dimension,
    {
        let values = values.as_standard_layout();
        let bytes = bytemuck::cast_slice(values.as_slice().expect("row-major"));
        Input { memory: Memory::of(gpu, bytes), dtype: T::DTYPE, shape: values.shape().into(), device: gpu.index() }
    }

    /// Replaces the values; as many as there are.
    pub fn write<T: bytemuck::Pod>(&mut self, values: &[T]) {
        assert_eq!(size_of_val(values), self.dtype.size_bytes() * self.shape.iter().product::<usize>());
        self.memory.write(0, bytemuck::cast_slice(values));
    }

    /// Every byte of the tensor.
    pub fn bytes(&self) -> Vec<u8> {
        self.memory.read(0..self.dtype.size_bytes() * self.shape.iter().product::<usize>())
    }

    pub fn view(&self) -> TensorView<'_> {
        // SAFETY: the memory holds the tensor and lives as long as the view; tests wait for their work.
        unsafe {
            TensorView::foreign(self.memory.address(), self.dtype, &self.shape, &strides(&self.shape), self.device)
        }
    }
}

/// Defines for an operation: `Inputs` and `Outputs` in device memory, and `download`.
macro_rules! operation {
    ($name:ident of $operation:ident, $element:ty, inputs: $($input:ident)*; vectors { $($vector:ident |$vi:ident| $values:expr;)* } gradients: $($gradient:ident = $index:literal |$s:ident| $shape:expr;)*) => {
        #[doc = concat!("Tensors of `", stringify!($operation), "` in foreign memory.")]
        pub mod $name {
            use super::*;
            use attn_backward::$operation::{DeviceGradients, DeviceInputs, Gradients, Inputs as HostInputs, Shape};

            /// The inputs in foreign memory.
            pub struct Inputs { $(pub $input: Input,)* $(pub $vector: Input,)* }

            impl Inputs {
                pub fn upload(gpu: &Gpu, inputs: &HostInputs) -> Inputs {
                    $(let $vector = {
                        let $vi = inputs;
                        Input::of(gpu, &ndarray::aview1($values))
                    };)*
                    Inputs { $($input: Input::of(gpu, &inputs.$input),)* $($vector,)* }
                }

                /// Every byte of the tensors.
                pub fn bytes(&self) -> Vec<u8> {
                    [$(self.$input.bytes(),)* $(self.$vector.bytes(),)*].concat()
                }

                pub fn views(&self) -> DeviceInputs<'_> {
                    DeviceInputs { $($input: self.$input.view(),)* $($vector: self.$vector.view(),)* }
                }
            }

            /// A way to one tensor of a set of views.
            pub type Field<Views, View> = (&'static str, fn(&mut Views) -> &mut View);

            /// Every input by name.
            pub fn input_fields<'a>() -> Vec<Field<DeviceInputs<'a>, TensorView<'a>>> {
                vec![
                    $((stringify!($input), |views| &mut views.$input),)*
                    $((stringify!($vector), |views| &mut views.$vector),)*
                ]
            }

            /// Every gradient by name.
            pub fn gradient_fields<'a>() -> Vec<Field<DeviceGradients<'a>, TensorViewMut<'a>>> {
                vec![$((stringify!($gradient), |views| &mut views.$gradient),)*]
            }

            /// The gradients, and the workspace behind them.
            pub struct Outputs {
                pub guarded: Guarded,
                shape: Shape,
                device: usize,
            }

            impl Outputs {
                pub fn new(gpu: &Gpu, shape: &Shape, workspace_bytes: u64) -> Outputs {
                    let mut sizes = vec![$({
                        let $s = shape;
                        ($shape).into_dimension().size() * size_of::<$element>()
                    },)*];
                    sizes.push(workspace_bytes as usize);
                    Outputs { guarded: Guarded::new(gpu, &sizes), shape: *shape, device: gpu.index() }
                }

                pub fn views(&self) -> DeviceGradients<'_> {
                    DeviceGradients { $($gradient: {
                        let $s = &self.shape;
                        let shape = ($shape).into_dimension();
                        let dtype = <$element as TensorElement>::DTYPE;
                        // SAFETY: the place holds the tensor, nothing else uses it, and tests wait for their work.
                        unsafe {
                            let address = self.guarded.address($index);
                            TensorViewMut::foreign(address, dtype, shape.slice(), &strides(shape.slice()), self.device)
                        }
                    },)* }
                }

                pub fn workspace(&self) -> Workspace {
                    let index = [$($index),*].len();
                    // SAFETY: the place is the workspace's alone.
                    unsafe {
                        let (address, bytes) = (self.guarded.address(index), self.guarded.bytes(index) as u64);
                        Workspace::foreign(address, bytes, self.device)
                    }
                }

                /// The gradients, after all work; fails if a canary has changed.
                #[track_caller]
                pub fn gradients(&self) -> Gradients {
                    self.guarded.assert_canaries();
                    Gradients { $($gradient: {
                        let $s = &self.shape;
                        Array::from_shape_vec($shape, self.guarded.values($index)).expect("a place's size")
                    },)* }
                }

                /// Fails if a gradient or the workspace was written.
                #[track_caller]
                pub fn assert_unwritten(&self) {
                    for index in 0..=[$($index),*].len() {
                        self.guarded.assert_unwritten(index);
                    }
                }
            }

            /// The bits of all gradients.
            pub fn bits(gradients: &Gradients) -> Vec<u8> {
                let tensors = gradients.tensors();
                let values = tensors.iter().flat_map(|(_, tensor)| tensor.as_slice().expect("row-major"));
                values.flat_map(|x| x.to_le_bytes()).collect()
            }
        }
    };
}

operation! {
    audio_tensors of audio, bf16,
    inputs: grad_output hidden_states query_states key_states value_states q_weight k_weight v_weight out_weight;
    vectors { cu_seqlens |inputs| inputs.cu_seqlens.offsets(); }
    gradients:
        grad_hidden_states = 0 |s| (s.total_seq_len, s.d_model());
        grad_q_weight = 1 |s| (s.d_model(), s.d_model());
        grad_q_bias = 2 |s| s.d_model();
        grad_k_weight = 3 |s| (s.d_model(), s.d_model());
        grad_k_bias = 4 |s| s.d_model();
        grad_v_weight = 5 |s| (s.d_model(), s.d_model());
        grad_v_bias = 6 |s| s.d_model();
        grad_out_weight = 7 |s| (s.d_model(), s.d_model());
        grad_out_bias = 8 |s| s.d_model();
}

operation! {
    cross_tensors of cross, f32,
    inputs: grad_query_states grad_key_states grad_value_states decoder_hidden_states encoder_hidden_states q_weight k_weight v_weight;
    vectors {}
    gradients:
        grad_decoder_hidden_states = 0 |s| (s.batch_size, s.seq_len_dec, s.hidden_size);
        grad_encoder_hidden_states = 1 |s| (s.batch_size, s.seq_len_enc, s.cross_hidden_size);
        grad_q_weight = 2 |s| (s.q_out_dim(), s.hidden_size);
        grad_k_weight = 3 |s| (s.kv_out_dim(), s.cross_hidden_size);
        grad_v_weight = 4 |s| (s.kv_out_dim(), s.cross_hidden_size);
}

/// Gradients of operation A.
#[track_caller]
pub fn audio_backward(gpu: &Gpu, module: ModuleKind, inputs: &audio::Inputs) -> audio::Gradients {
    audio_backward_on(gpu, &Target::of(gpu, module), inputs).expect("a run")
}

/// Gradients of operation A with a plan for `target`.
#[track_caller]
pub fn audio_backward_on(gpu: &Gpu, target: &Target, inputs: &audio::Inputs) -> Result<audio::Gradients, Error> {
    let shape = inputs.shape()?;
    let operation = audio::Backward::new(gpu, audio::Plan::new(&shape, &inputs.cu_seqlens, target)?)?;
    let tensors = audio_tensors::Inputs::upload(gpu, inputs);
    let outputs = audio_tensors::Outputs::new(gpu, &shape, operation.plan().workspace().bytes());
    on_a_foreign_stream(gpu, |stream| {
        operation.run(stream, &tensors.views(), &mut outputs.views(), &mut outputs.workspace())
    })?;
    Ok(outputs.gradients())
}

/// Gradients of operation B.
#[track_caller]
pub fn cross_backward(gpu: &Gpu, module: ModuleKind, inputs: &cross::Inputs, precision: Precision) -> cross::Gradients {
    let shape = inputs.shape().expect("inputs that fit");
    let plan = cross::Plan::new(&shape, precision, &Target::of(gpu, module)).expect("a plan");
    assert_eq!(plan.precision(), precision);
    let operation = cross::Backward::new(gpu, plan).expect("kernels");
    let tensors = cross_tensors::Inputs::upload(gpu, inputs);
    let outputs = cross_tensors::Outputs::new(gpu, &shape, operation.plan().workspace().bytes());
    on_a_foreign_stream(gpu, |stream| {
        operation.run(stream, &tensors.views(), &mut outputs.views(), &mut outputs.workspace())
    })
    .expect("a run");
    outputs.gradients()
}

/// Enqueues `work` on a stream that the library did not make, and waits for it.
fn on_a_foreign_stream(gpu: &Gpu, work: impl FnOnce(&Stream) -> Result<(), Error>) -> Result<(), Error> {
    let foreign = ForeignStream::new(gpu);
    // SAFETY: it is a stream of the primary context, and is dropped after this.
    let stream = unsafe { Stream::foreign(gpu, foreign.raw()) };
    work(&stream)?;
    Ok(stream.synchronize()?)
}
