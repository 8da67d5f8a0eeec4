//! An operation's tensors in device memory: views that a run takes, and buffers that own them.
use ndarray::{Array, ArrayBase, Data, Dimension, ShapeBuilder};

use crate::Error;
use crate::gpu::{Buffer, Gpu, Stream, TensorElement, TensorView};

/// Checks a view's dtype, extents, layout and device.
pub(crate) fn check<T: TensorElement>(
    gpu: &Gpu,
    name: &str,
    tensor: &TensorView<'_>,
    shape: &[usize],
) -> Result<(), Error> {
    tensor.check(name, T::DTYPE, shape)?;
    tensor.check_device(name, gpu)
}

/// A device buffer with the elements of `array` in row-major order.
pub(crate) fn upload<T, S, D>(gpu: &Gpu, name: &str, array: &ArrayBase<S, D>) -> Result<Buffer<T>, Error>
where
    T: TensorElement,
    S: Data<Elem = T>,
    D: Dimension,
{
    let array = array.as_standard_layout();
    Ok(Buffer::from_slice(gpu, name, array.as_slice().unwrap_or_default())?)
}

/// A device buffer of `shape`, every byte 0xFF (NaN) until something overwrites it.
pub(crate) fn poisoned<T: TensorElement>(
    gpu: &Gpu,
    stream: &Stream,
    name: &str,
    shape: &[usize],
) -> Result<Buffer<T>, Error> {
    let mut buffer = Buffer::uninit(gpu, name, shape.iter().product())?;
    buffer.fill_bytes(stream, 0xFF)?;
    Ok(buffer)
}

/// The elements of `buffer` as a row-major array, after the work of `stream`.
pub(crate) fn download<T, Sh>(stream: &Stream, buffer: &Buffer<T>, shape: Sh) -> Result<Array<T, Sh::Dim>, Error>
where
    T: TensorElement + Default,
    Sh: ShapeBuilder,
{
    let mut array = Array::from_elem(shape, T::default());
    if let Some(values) = array.as_slice_mut() {
        buffer.copy_to_slice(stream, values)?;
    }
    Ok(array)
}

/// Defines an operation's `DeviceInputs`, `InputBuffers`, `DeviceGradients` and `GradientBuffers` from its tensors: name, documented
/// extents, and the extents as a function of the operation's `Shape`. Vectors are inputs whose length is no matter of the shape: element type,
/// and the values of the host's `Inputs`.
macro_rules! device_tensors {
    (
        element $element:ty;
        inputs { $($(#[$input_doc:meta])* $input:ident = |$is:ident| $input_shape:expr;)* }
        vectors { $($(#[$vector_doc:meta])* $vector:ident: $vector_element:ty = |$vi:ident| $values:expr;)* }
        gradients { $($(#[$gradient_doc:meta])* $gradient:ident = |$gs:ident| $gradient_shape:expr;)* }
    ) => {
        /// The operation's inputs in device memory: row-major without gaps, on 16-byte boundaries.
        #[derive(Clone, Debug)]
        pub struct DeviceInputs<'a> {
            $($(#[$input_doc])* pub $input: $crate::gpu::TensorView<'a>,)*
            $($(#[$vector_doc])* pub $vector: $crate::gpu::TensorView<'a>,)*
        }

        impl DeviceInputs<'_> {
            /// Checks dtype, extents, layout and device of every tensor whose extents follow from `shape`.
            ///
            /// # Errors
            /// [`Error::Dtype`], [`Error::Shape`], [`Error::Layout`] or a wrong device, naming the first tensor that differs.
            pub fn check(&self, gpu: &$crate::gpu::Gpu, shape: &Shape) -> Result<(), Error> {
                use ndarray::{Dimension, IntoDimension};
                $(
                    let $is = shape;
                    let extents = ($input_shape).into_dimension();
                    $crate::device_tensors::check::<$element>(gpu, stringify!($input), &self.$input, extents.slice())?;
                )*
                Ok(())
            }
        }

        /// The operation's inputs in buffers of this library.
        #[derive(Debug)]
        pub struct InputBuffers {
            shape: Shape,
            $($input: $crate::gpu::Buffer<$element>,)*
            $($vector: $crate::gpu::Buffer<$vector_element>,)*
        }

        impl InputBuffers {
            /// Copies `inputs` to `gpu`.
            ///
            /// # Errors
            /// As [`Inputs::shape`]; [`Error::Gpu`].
            pub fn upload(gpu: &$crate::gpu::Gpu, inputs: &Inputs) -> Result<Self, Error> {
                let shape = inputs.shape()?;
                $(let $input = $crate::device_tensors::upload(gpu, stringify!($input), &inputs.$input)?;)*
                $(let $vector = {
                    let $vi = inputs;
                    $crate::gpu::Buffer::from_slice(gpu, stringify!($vector), $values)?
                };)*
                Ok(InputBuffers { shape, $($input,)* $($vector,)* })
            }

            /// Views of the tensors.
            ///
            /// # Errors
            /// [`Error::Gpu`] if a buffer had another size than its view, which `upload` rules out.
            pub fn views(&self) -> Result<DeviceInputs<'_>, Error> {
                use ndarray::{Dimension, IntoDimension};
                Ok(DeviceInputs { $($input: {
                    let $is = &self.shape;
                    self.$input.view(($input_shape).into_dimension().slice())?
                },)* $($vector: self.$vector.view(&[self.$vector.len()])?,)* })
            }
        }

        /// The operation's gradients in device memory, overwritten by a run: row-major without gaps, on 16-byte boundaries.
        #[derive(Debug)]
        pub struct DeviceGradients<'a> { $($(#[$gradient_doc])* pub $gradient: $crate::gpu::TensorViewMut<'a>,)* }

        impl DeviceGradients<'_> {
            /// Checks every tensor's dtype, extents, layout and device.
            ///
            /// # Errors
            /// As [`DeviceInputs::check`].
            pub fn check(&self, gpu: &$crate::gpu::Gpu, shape: &Shape) -> Result<(), Error> {
                use ndarray::{Dimension, IntoDimension};
                $(
                    let $gs = shape;
                    let extents = ($gradient_shape).into_dimension();
                    $crate::device_tensors::check::<$element>(gpu, stringify!($gradient), &self.$gradient, extents.slice())?;
                )*
                Ok(())
            }
        }

        /// The operation's gradients in buffers of this library.
        #[derive(Debug)]
        pub struct GradientBuffers { shape: Shape, $($gradient: $crate::gpu::Buffer<$element>,)* }

        impl GradientBuffers {
            /// Allocates the gradients; every byte is 0xFF (NaN) until a run on `stream` overwrites it.
            ///
            /// # Errors
            /// [`Error::Gpu`].
            pub fn allocate(gpu: &$crate::gpu::Gpu, stream: &$crate::gpu::Stream, shape: &Shape) -> Result<Self, Error> {
                use ndarray::{Dimension, IntoDimension};
                $(
                    let $gs = shape;
                    let extents = ($gradient_shape).into_dimension();
                    let $gradient = $crate::device_tensors::poisoned(gpu, stream, stringify!($gradient), extents.slice())?;
                )*
                Ok(GradientBuffers { shape: *shape, $($gradient,)* })
            }

            /// Views of the tensors.
            ///
            /// # Errors
            /// As [`InputBuffers::views`].
            pub fn views(&mut self) -> Result<DeviceGradients<'_>, Error> {
                use ndarray::{Dimension, IntoDimension};
                Ok(DeviceGradients { $($gradient: {
                    let $gs = &self.shape;
                    self.$gradient.view_mut(($gradient_shape).into_dimension().slice())?
                },)* })
            }

            /// Copies the gradients to the host, after the work of `stream`.
            ///
            /// # Errors
            /// [`Error::Gpu`], also for a fault of the work before.
            pub fn download(&self, stream: &$crate::gpu::Stream) -> Result<Gradients, Error> {
                Ok(Gradients { $($gradient: {
                    let $gs = &self.shape;
                    $crate::device_tensors::download(stream, &self.$gradient, $gradient_shape)?
                },)* })
            }
        }
    };
}
pub(crate) use device_tensors;
