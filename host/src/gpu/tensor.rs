//! Tensors in device memory, ours or somebody else's, and what the kernels ask of them.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use half::bf16;

use super::driver::{self, check};
use super::{Buffer, DeviceValue, Gpu, GpuError};
use crate::Error;

/// What the kernels take: stated in every [`Error::Layout`].
const LAYOUT_RULE: &str =
    "tensors are row-major without gaps and start on a 16-byte boundary of device memory: make a contiguous copy";

const ALIGNMENT_BYTES: u64 = 16;

/// Element type of a device tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
    /// 32-bit signed integer.
    I32,
}

impl Dtype {
    /// Size of an element.
    pub fn size_bytes(self) -> usize {
        match self {
            Dtype::Bf16 => 2,
            Dtype::F32 | Dtype::I32 => 4,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::Bf16 => "bf16",
            Dtype::F32 => "f32",
            Dtype::I32 => "i32",
        })
    }
}

/// A host type with a [`Dtype`].
pub trait TensorElement: DeviceValue {
    /// Its element type.
    const DTYPE: Dtype;
}

impl TensorElement for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}

impl TensorElement for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

impl TensorElement for i32 {
    const DTYPE: Dtype = Dtype::I32;
}

/// A tensor in device memory to read from: address, element type, extents and strides.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    address: u64,
    dtype: Dtype,
    shape: Vec<usize>,
    strides: Vec<usize>,
    device: usize,
    _memory: PhantomData<&'a ()>,
}

/// A tensor in device memory to write to.
#[derive(Debug)]
pub struct TensorViewMut<'a> {
    view: TensorView<'a>,
}

impl<'a> TensorView<'a> {
    /// A tensor in memory of somebody else, such as PyTorch (`data_ptr()`), candle or cudarc. `strides` are in elements; `device` is the
    /// GPU's index as the driver counts. It may have any layout here: operations refuse those they do not take.
    ///
    /// # Safety
    /// `address` is a device address on `device`, and the elements that shape and strides reach are allocated, and not written by other
    /// work, until the work that reads the view has ended (which is later than the call that enqueues it).
    pub unsafe fn foreign(address: u64, dtype: Dtype, shape: &[usize], strides: &[usize], device: usize) -> Self {
        TensorView { address, dtype, shape: shape.into(), strides: strides.into(), device, _memory: PhantomData }
    }

    pub(super) fn of_buffer<T: TensorElement>(buffer: &'a Buffer<T>, shape: &[usize]) -> Self {
        TensorView {
            address: buffer.address(),
            dtype: T::DTYPE,
            shape: shape.into(),
            strides: row_major_strides(shape),
            device: buffer.gpu().index(),
            _memory: PhantomData,
        }
    }

    /// Device address of the first element.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Extents.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Index of the GPU that it is said to lie on.
    pub fn device(&self) -> usize {
        self.device
    }

    /// Checks what can be told without a GPU: element type, extents and layout. `tensor` is its public name.
    ///
    /// # Errors
    /// [`Error::Dtype`], [`Error::Shape`]; [`Error::Layout`] unless the elements are row-major without gaps (strides of extents of 1 do
    /// not matter) and start on a 16-byte boundary. Tensors without elements have any layout.
    pub fn check(&self, tensor: &str, dtype: Dtype, shape: &[usize]) -> Result<(), Error> {
        if self.dtype != dtype {
            let (expected, found) = (dtype.to_string(), self.dtype.to_string());
            return Err(Error::Dtype { tensor: tensor.into(), expected, found });
        }
        Error::check_shape(tensor, shape, &self.shape)?;
        if self.is_empty() {
            return Ok(());
        }
        let layout = |found: String| Err(Error::Layout { tensor: tensor.into(), found, rule: LAYOUT_RULE });
        let expected = row_major_strides(shape);
        let same = |((&extent, found), expected): ((&usize, &usize), &usize)| extent == 1 || found == expected;
        if self.strides.len() != shape.len() || !shape.iter().zip(&self.strides).zip(&expected).all(same) {
            return layout(format!("strides {:?} of shape {shape:?}, row-major is {expected:?}", self.strides));
        }
        if self.address == 0 {
            return layout("a null pointer".into());
        }
        match self.address % ALIGNMENT_BYTES {
            0 => Ok(()),
            past => layout(format!("starts {past} bytes past a {ALIGNMENT_BYTES}-byte boundary")),
        }
    }

    /// Checks that the tensor lies in the memory of `gpu`: by what the view says, then by what the driver knows of the address.
    ///
    /// # Errors
    /// [`GpuError::WrongDevice`]; [`Error::Layout`] if the driver does not know the address, as of ordinary host memory;
    /// [`GpuError::Driver`].
    pub fn check_device(&self, tensor: &str, gpu: &Gpu) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        let plan_device = gpu.index();
        let on = |tensor_device: usize| match tensor_device == plan_device {
            true => Ok(()),
            false => Err(Error::Gpu(GpuError::WrongDevice { tensor: tensor.into(), tensor_device, plan_device })),
        };
        on(self.device)?;
        let _current = gpu.make_current()?;
        let mut ordinal = 0i32;
        let place = (&raw mut ordinal).cast();
        // SAFETY: this attribute is an int, which the driver stores in the place passed; the address is only looked up.
        match unsafe { driver::cuPointerGetAttribute(place, driver::POINTER_DEVICE_ORDINAL, self.address) } {
            driver::ERROR_INVALID_VALUE => {
                let found = format!("address {:#x} is not known to the CUDA driver", self.address);
                return Err(Error::Layout { tensor: tensor.into(), found, rule: LAYOUT_RULE });
            }
            status => check("cuPointerGetAttribute", status)?,
        }
        // Negative for memory of no device in particular, such as pinned host memory, which kernels can reach.
        usize::try_from(ordinal).map_or(Ok(()), on)
    }

    fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }
}

impl<'a> TensorViewMut<'a> {
    pub(super) fn new(view: TensorView<'a>) -> Self {
        TensorViewMut { view }
    }

    /// As [`TensorView::foreign`], to write to.
    ///
    /// # Safety
    /// As [`TensorView::foreign`], and nothing else reads or writes the elements until the work that writes them has ended.
    pub unsafe fn foreign(address: u64, dtype: Dtype, shape: &[usize], strides: &[usize], device: usize) -> Self {
        // SAFETY: the caller owes at least as much here.
        TensorViewMut::new(unsafe { TensorView::foreign(address, dtype, shape, strides, device) })
    }
}

impl<'a> Deref for TensorViewMut<'a> {
    type Target = TensorView<'a>;

    fn deref(&self) -> &TensorView<'a> {
        &self.view
    }
}

/// Strides in elements of a row-major tensor without gaps.
fn row_major_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(address: u64, dtype: Dtype, shape: &[usize], strides: &[usize]) -> TensorView<'static> {
        // SAFETY: nothing reads the memory.
        unsafe { TensorView::foreign(address, dtype, shape, strides, 0) }
    }

    fn check(view: &TensorView<'_>) -> Result<(), String> {
        view.check("q_weight", Dtype::Bf16, &[6, 8]).map_err(|error| error.to_string())
    }

    #[test]
    fn row_major_aligned_tensors_are_accepted() {
        check(&view(0x1000, Dtype::Bf16, &[6, 8], &[8, 1])).unwrap();
        assert_eq!(row_major_strides(&[2, 3, 4]), [12, 4, 1]);
        assert_eq!(row_major_strides(&[]), [0usize; 0]);
    }

    #[test]
    fn dtype_and_shape_errors_name_tensor_expected_and_found() {
        let error = check(&view(0x1000, Dtype::F32, &[6, 8], &[8, 1])).unwrap_err();
        assert_eq!(error, "q_weight: expected dtype bf16, found f32");
        let error = check(&view(0x1000, Dtype::Bf16, &[8, 6], &[6, 1])).unwrap_err();
        assert_eq!(error, "q_weight: expected shape [6, 8], found [8, 6]");
        let error = check(&view(0x1000, Dtype::Bf16, &[48], &[1])).unwrap_err();
        assert_eq!(error, "q_weight: expected shape [6, 8], found [48]");
    }

    #[test]
    fn other_layouts_are_refused_with_the_rule() {
        let column_slice = view(0x1000, Dtype::Bf16, &[6, 8], &[16, 1]);
        let transposed = view(0x1000, Dtype::Bf16, &[6, 8], &[1, 6]);
        let broadcast = view(0x1000, Dtype::Bf16, &[6, 8], &[0, 1]);
        let too_few_strides = view(0x1000, Dtype::Bf16, &[6, 8], &[1]);
        for other in [column_slice, transposed, broadcast, too_few_strides] {
            let error = check(&other).unwrap_err();
            assert!(error.starts_with("q_weight: strides ") && error.ends_with(LAYOUT_RULE), "{error}");
            assert!(error.contains("row-major is [8, 1]"), "{error}");
        }
    }

    #[test]
    fn an_offset_of_one_element_is_refused() {
        let error = check(&view(0x1002, Dtype::Bf16, &[6, 8], &[8, 1])).unwrap_err();
        assert!(error.starts_with("q_weight: starts 2 bytes past a 16-byte boundary; "), "{error}");
        let error = check(&view(0, Dtype::Bf16, &[6, 8], &[8, 1])).unwrap_err();
        assert!(error.starts_with("q_weight: a null pointer; "), "{error}");
    }

    #[test]
    fn strides_of_single_extents_do_not_matter() {
        let one_head = view(0x1000, Dtype::F32, &[1, 4, 1, 8], &[7, 8, 99, 1]);
        one_head.check("x", Dtype::F32, &[1, 4, 1, 8]).unwrap();
    }

    #[test]
    fn tensors_without_elements_need_no_memory() {
        view(0, Dtype::I32, &[0, 8], &[3, 5]).check("x", Dtype::I32, &[0, 8]).unwrap();
    }
}
