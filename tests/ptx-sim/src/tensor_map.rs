//! Tensor maps: what TMA instructions move.
//!
//! A real map is 128 bytes that only the driver can write and only the GPU can read; these are 128 bytes of our own that say the same.

/// What the first word of a map holds.
const MAGIC: u64 = 0x70616d2d6d69732e;
/// Most dimensions.
const MAX_RANK: usize = 4;

/// A tensor of 1 to 4 dimensions and the box of it that one instruction moves; dimension 0 is the contiguous one. Elements outside of the tensor read
/// as zero and are not written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// Bytes of an element: 2 or 4.
    pub element_bytes: u32,
    /// Extents in elements.
    pub dims: Vec<u64>,
    /// Bytes from an element to the next along each dimension but the first: multiples of 16.
    pub outer_strides_bytes: Vec<u64>,
    /// Extents of the box in elements, at most 256 each; along dimension 0 a multiple of 16 bytes.
    pub box_dims: Vec<u32>,
    /// Whether the box lies in shared memory with the 128-byte swizzle, its rows 128 bytes long; else row after row.
    pub swizzled: bool,
}

impl TensorMap {
    /// The rule that the map breaks, if it breaks one.
    pub fn broken_rule(&self) -> Option<&'static str> {
        let rank = self.dims.len();
        if !(1..=MAX_RANK).contains(&rank) || self.box_dims.len() != rank || self.outer_strides_bytes.len() + 1 != rank
        {
            return Some("the same 1 to 4 dimensions in all arrays");
        }
        let strides = &self.outer_strides_bytes;
        let rules = [
            (matches!(self.element_bytes, 2 | 4), "elements of 2 or 4 bytes"),
            (self.dims.iter().all(|extent| (1..=1 << 32).contains(extent)), "extents from 1 to 2^32"),
            (strides.iter().all(|bytes| *bytes < 1 << 40), "strides below 2^40 bytes"),
            (strides.iter().chain([&self.address]).all(|bytes| bytes.is_multiple_of(16)), "multiples of 16 bytes"),
            (self.box_dims.iter().all(|extent| (1..=256).contains(extent)), "box extents from 1 to 256"),
            (self.row_bytes().is_multiple_of(16), "box rows of a multiple of 16 bytes"),
            (!self.swizzled || self.row_bytes() == 128, "box rows of 128 bytes where they are swizzled"),
        ];
        rules.into_iter().find(|(kept, _)| !kept).map(|(_, rule)| rule)
    }

    /// The map as a kernel gets it.
    ///
    /// # Panics
    /// If there is a [`TensorMap::broken_rule`].
    pub fn encode(&self) -> [u64; 16] {
        let rank = self.dims.len();
        assert_eq!(self.broken_rule(), None, "{self:?}");
        let mut words = [0; 16];
        words[..3].copy_from_slice(&[MAGIC, self.address, rank as u64 | u64::from(self.element_bytes) << 32]);
        words[3..3 + rank].copy_from_slice(&self.dims);
        words[7..6 + rank].copy_from_slice(&self.outer_strides_bytes);
        for (word, extent) in words[10..].iter_mut().zip(&self.box_dims) {
            *word = u64::from(*extent);
        }
        words[14] = self.swizzled.into();
        words
    }

    /// The map that a kernel names, if it is one.
    pub(crate) fn decode(words: &[u64; 16]) -> Option<TensorMap> {
        let rank = words[2] as u32 as usize;
        (words[0] == MAGIC && (1..=MAX_RANK).contains(&rank)).then(|| TensorMap {
            address: words[1],
            element_bytes: (words[2] >> 32) as u32,
            dims: words[3..3 + rank].to_vec(),
            outer_strides_bytes: words[7..6 + rank].to_vec(),
            box_dims: words[10..10 + rank].iter().map(|extent| *extent as u32).collect(),
            swizzled: words[14] == 1,
        })
    }

    /// Bytes of a row of the box.
    fn row_bytes(&self) -> u32 {
        self.box_dims[0] * self.element_bytes
    }

    /// Bytes of a box.
    pub(crate) fn box_bytes(&self) -> u32 {
        self.box_dims.iter().product::<u32>() * self.element_bytes
    }

    /// Every 16-byte piece of the box at `coordinates`: its byte offset in the box, its address, and how many of its bytes lie in the tensor.
    pub(crate) fn pieces(&self, coordinates: &[i32]) -> Vec<(u32, u64, u32)> {
        let mut pieces = Vec::new();
        let rows = self.box_dims[1..].iter().product::<u32>();
        for row in 0..rows {
            let (mut rest, mut address, mut inside) = (row, self.address as i64, true);
            let outer = self.dims[1..].iter().zip(&self.box_dims[1..]).zip(&self.outer_strides_bytes);
            for (((extent, box_extent), stride), first) in outer.zip(&coordinates[1..]) {
                let at = i64::from(*first) + i64::from(rest % box_extent);
                rest /= box_extent;
                inside &= at >= 0 && at < *extent as i64;
                address += at * *stride as i64;
            }
            for piece in 0..self.row_bytes() / 16 {
                let bytes = i64::from(self.element_bytes);
                let first = i64::from(coordinates[0]) * bytes + 16 * i64::from(piece);
                let left = (self.dims[0] as i64 * bytes - first).clamp(0, 16);
                let valid = if inside && first >= 0 { left as u32 } else { 0 };
                pieces.push((self.row_bytes() * row + 16 * piece, (address + first) as u64, valid));
            }
        }
        pieces
    }
}

/// The 128-byte swizzle of a shared address: bits 4 to 6 are XORed with bits 7 to 9.
pub(crate) fn swizzle_128b(address: u64) -> u64 {
    address ^ (address >> 7 & 7) << 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_are_clipped_at_the_tensors_edges() {
        let map = TensorMap {
            address: 4096,
            element_bytes: 2,
            dims: vec![72, 3],
            outer_strides_bytes: vec![160],
            box_dims: vec![64, 2],
            swizzled: true,
        };
        assert_eq!(TensorMap::decode(&map.encode()), Some(map.clone()));
        assert_eq!(map.box_bytes(), 256);
        let pieces = map.pieces(&[64, 2]);
        assert_eq!(pieces.len(), 16);
        // 8 of the 64 columns exist, and one of the two rows
        assert_eq!(pieces[0], (0, 4096 + 2 * 160 + 128, 16));
        assert!(pieces[1..].iter().all(|(_, _, valid)| *valid == 0));
        assert!(map.pieces(&[0, -1])[..8].iter().all(|(_, _, valid)| *valid == 0));
        assert_eq!(map.pieces(&[0, -1])[8], (128, 4096, 16));
    }
}
