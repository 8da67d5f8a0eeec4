//! Tensor maps: how the copy engine of compute capability 9.0 (TMA) finds its tiles.

use std::fmt;

use attn_backward_kernels::params_wgmma::TensorMap;

use super::driver::{self, Status};
use super::{Gpu, GpuError};

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

/// A tensor of 1 to 4 dimensions and the box of it that one copy moves. Dimension 0 is the contiguous one.
#[derive(Clone, Copy, Debug)]
pub struct TiledTensor<'a> {
    /// Device address of the first element, a multiple of 16.
    pub address: u64,
    /// Element type.
    pub dtype: TensorMapDtype,
    /// Extents in elements.
    pub dims: &'a [u64],
    /// Bytes from an element to the next along each dimension but the first: multiples of 16.
    pub outer_strides_bytes: &'a [u64],
    /// Extents of the box in elements, at most 256 each; along dimension 0 at most 128 bytes if swizzled, a multiple of 16 bytes otherwise.
    pub box_dims: &'a [u32],
    /// Order of the box in shared memory.
    pub swizzle: Swizzle,
}

/// How a box lies in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    /// Row-major.
    None = 0,
    /// Rows of 128 bytes, their 16-byte pieces permuted as the matrix units read them.
    Bytes128 = 3,
}

/// Most dimensions of a tensor.
const MAX_RANK: usize = 4;

/// Where the driver wants to write a map.
#[repr(C, align(64))]
pub(super) struct AlignedMap([u64; 16]);

impl TiledTensor<'_> {
    /// The tensor's map: elements outside the tensor arrive as zeros; L2 fetches 256 bytes at a time. `name` names the tensor in errors.
    ///
    /// # Errors
    /// [`GpuError::TensorMap`], [`GpuError::Driver`].
    pub fn encode(&self, gpu: &Gpu, name: &str) -> Result<TensorMap, GpuError> {
        const INTERLEAVE_NONE: u32 = 0;
        const L2_PROMOTION_256B: u32 = 3;
        const FILL_ZEROS: u32 = 0;

        let refused = |code: Status| GpuError::TensorMap { tensor: name.into(), layout: self.to_string(), code };
        if !self.ranks_agree() {
            return Err(refused(driver::ERROR_INVALID_VALUE));
        }
        // The driver asks for a current context, though it only encodes an address.
        let _current = gpu.make_current()?;
        let mut map = AlignedMap([0; 16]);
        // SAFETY: every array has an entry for each dimension, the strides one less; the driver writes 128 bytes to the map. The address
        // is only encoded.
        let status = unsafe {
            driver::cuTensorMapEncodeTiled(
                &mut map,
                self.dtype as u32,
                self.dims.len() as u32,
                self.address,
                self.dims.as_ptr(),
                self.outer_strides_bytes.as_ptr(),
                self.box_dims.as_ptr(),
                [1u32; MAX_RANK].as_ptr(),
                INTERLEAVE_NONE,
                self.swizzle as u32,
                L2_PROMOTION_256B,
                FILL_ZEROS,
            )
        };
        if status == driver::SUCCESS { Ok(TensorMap(map.0)) } else { Err(refused(status)) }
    }

    /// Whether the arrays speak of the same 1 to 4 dimensions.
    fn ranks_agree(&self) -> bool {
        let rank = self.dims.len();
        (1..=MAX_RANK).contains(&rank) && self.outer_strides_bytes.len() + 1 == rank && self.box_dims.len() == rank
    }
}

impl fmt::Display for TiledTensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TiledTensor { address, dtype, dims, outer_strides_bytes, box_dims, .. } = self;
        write!(f, "{dtype:?} {dims:?} at {address:#x}, outer strides {outer_strides_bytes:?} bytes, boxes {box_dims:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_must_agree_on_the_rank() {
        let dtype = TensorMapDtype::Bf16;
        let tensor = |dims, outer_strides_bytes, box_dims| TiledTensor {
            address: 0,
            dtype,
            dims,
            outer_strides_bytes,
            box_dims,
            swizzle: Swizzle::Bytes128,
        };
        assert!(tensor(&[64, 8, 2], &[512, 64], &[64, 8, 1]).ranks_agree());
        assert!(tensor(&[64], &[], &[64]).ranks_agree());
        assert!(!tensor(&[64, 8], &[], &[64, 8]).ranks_agree());
        assert!(!tensor(&[64, 8], &[128], &[64]).ranks_agree());
        assert!(!tensor(&[], &[], &[]).ranks_agree());
    }
}
