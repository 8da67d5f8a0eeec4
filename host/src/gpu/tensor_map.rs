//! Tensor maps: how the copy engine of compute capability 9.0 (TMA) finds its tiles.

use std::fmt;
use std::mem::MaybeUninit;

use super::driver::{self, Status};
use super::{Gpu, GpuError};

/// A `CUtensorMap`; kernels take it inside their parameters.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct TensorMap([u64; 16]);

const _: () = assert!(size_of::<TensorMap>() == 128 && align_of::<TensorMap>() == 64);

/// Element type of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorMapDtype {
    /// IEEE half precision.
    F16 = 6,
    /// IEEE single precision.
    F32 = 7,
    /// bfloat16.
    Bf16 = 9,
}

/// A tensor of up to 3 dimensions and the box of it that one copy moves. Dimension 0 is the contiguous one.
#[derive(Clone, Copy, Debug)]
pub struct TiledTensor<const RANK: usize> {
    /// Device address of the first element, a multiple of 16.
    pub address: u64,
    /// Element type.
    pub dtype: TensorMapDtype,
    /// Extents in elements.
    pub dims: [u64; RANK],
    /// Bytes from an element to the next along each dimension: the element's size, then multiples of 16.
    pub strides_bytes: [u64; RANK],
    /// Extents of the box in elements, at most 256 each; along dimension 0 at most 128 bytes.
    pub box_dims: [u32; RANK],
}

impl<const RANK: usize> TiledTensor<RANK> {
    /// The tensor's map: boxes arrive in shared memory with the 128-byte swizzle, elements outside the tensor as zeros; L2 fetches 256
    /// bytes at a time. `name` names the tensor in errors; `_gpu` proves that the driver runs.
    ///
    /// # Errors
    /// [`GpuError::TensorMap`].
    pub fn encode(&self, _gpu: &Gpu, name: &str) -> Result<TensorMap, GpuError> {
        const { assert!(1 <= RANK && RANK <= 3) };
        const INTERLEAVE_NONE: u32 = 0;
        const SWIZZLE_128B: u32 = 3;
        const L2_PROMOTION_256B: u32 = 3;
        const FILL_ZEROS: u32 = 0;

        let refused = |code: Status| GpuError::TensorMap { tensor: name.into(), layout: self.to_string(), code };
        if !self.contiguous_along_dimension_0() {
            return Err(refused(driver::ERROR_INVALID_VALUE));
        }
        let mut map = MaybeUninit::uninit();
        // SAFETY: every array has RANK entries, of which the driver reads as many, and one less of the strides; it writes 128 bytes to
        // the map. The address is only encoded.
        let status = unsafe {
            driver::cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                self.dtype as u32,
                RANK as u32,
                self.address,
                self.dims.as_ptr(),
                self.strides_bytes[1..].as_ptr(),
                self.box_dims.as_ptr(),
                [1u32; RANK].as_ptr(),
                INTERLEAVE_NONE,
                SWIZZLE_128B,
                L2_PROMOTION_256B,
                FILL_ZEROS,
            )
        };
        match status {
            // SAFETY: the driver has written all of it.
            driver::SUCCESS => Ok(unsafe { map.assume_init() }),
            code => Err(refused(code)),
        }
    }

    /// The driver takes it for granted and is not told the stride of dimension 0.
    fn contiguous_along_dimension_0(&self) -> bool {
        let element_bytes = match self.dtype {
            TensorMapDtype::F16 | TensorMapDtype::Bf16 => 2,
            TensorMapDtype::F32 => 4,
        };
        self.strides_bytes[0] == element_bytes
    }
}

impl<const RANK: usize> fmt::Display for TiledTensor<RANK> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TiledTensor { address, dtype, dims, strides_bytes, box_dims } = self;
        write!(f, "{dtype:?} {dims:?} at {address:#x}, strides {strides_bytes:?} bytes, boxes {box_dims:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimension_0_must_be_contiguous() {
        let tensor = |dtype, stride| TiledTensor {
            address: 0x1000,
            dtype,
            dims: [64, 8],
            strides_bytes: [stride, 512],
            box_dims: [32, 8],
        };
        assert!(tensor(TensorMapDtype::Bf16, 2).contiguous_along_dimension_0());
        assert!(tensor(TensorMapDtype::F32, 4).contiguous_along_dimension_0());
        assert!(!tensor(TensorMapDtype::F16, 4).contiguous_along_dimension_0());
    }
}
