//! Ragged offsets of the chunks of a packed sequence.

use crate::Error;

/// Validated `cu_seqlens`: chunk `c` is rows `offsets[c] .. offsets[c + 1]` of the packed tensors.
///
/// The offsets start at 0, never decrease and end at or before `total_seq_len`. Rows past the last offset are padding: they get
/// zero gradients and reach nothing else. Empty chunks are allowed and contribute nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CuSeqlens {
    offsets: Vec<i32>,
    total_seq_len: usize,
}

impl CuSeqlens {
    /// Checks `offsets` (`[num_chunks + 1]`) against `total_seq_len` rows.
    ///
    /// # Errors
    /// [`Error::EmptyCuSeqlens`], or [`Error::CuSeqlens`] for the first offset that is negative, not 0 at the start, smaller than
    /// the one before it or past `total_seq_len`; [`Error::Unsupported`] if `total_seq_len` exceeds `i32::MAX`.
    pub fn new(offsets: &[i32], total_seq_len: usize) -> Result<Self, Error> {
        check_total_seq_len(total_seq_len)?;
        if offsets.is_empty() {
            return Err(Error::EmptyCuSeqlens);
        }
        let mut previous = 0;
        for (index, &value) in offsets.iter().enumerate() {
            let rule = if value < 0 {
                "offsets are not negative".into()
            } else if index == 0 && value != 0 {
                "the first offset is 0".into()
            } else if value < previous {
                format!("offsets do not decrease, and the one before is {previous}")
            } else if value as usize > total_seq_len {
                format!("offsets do not exceed total_seq_len = {total_seq_len}")
            } else {
                previous = value;
                continue;
            };
            return Err(Error::CuSeqlens { index, value: value.into(), rule });
        }
        Ok(CuSeqlens { offsets: offsets.into(), total_seq_len })
    }

    /// The offsets, `[num_chunks + 1]`.
    pub fn offsets(&self) -> &[i32] {
        &self.offsets
    }

    /// The same chunks, followed by as many empty ones as make `num_chunks`: what a plan for that many takes.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are more chunks than `num_chunks`.
    pub fn padded(&self, num_chunks: usize) -> Result<CuSeqlens, Error> {
        if self.num_chunks() > num_chunks {
            let (expected, found) = (vec![num_chunks + 1], vec![self.offsets.len()]);
            return Err(Error::Shape { tensor: "cu_seqlens".into(), expected, found });
        }
        let mut padded = self.clone();
        padded.offsets.resize(num_chunks + 1, self.offsets[self.offsets.len() - 1]);
        Ok(padded)
    }

    /// Rows of the packed tensors, padding included.
    pub fn total_seq_len(&self) -> usize {
        self.total_seq_len
    }

    /// Number of chunks, empty ones included.
    pub fn num_chunks(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Row range of each chunk, in order.
    pub fn chunks(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.offsets.windows(2).map(|w| w[0] as usize..w[1] as usize)
    }

    /// Rows of each chunk, in order.
    pub fn chunk_lens(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        self.offsets.windows(2).map(|w| (w[1] - w[0]) as usize)
    }

    /// Length of the longest chunk, 0 if there is none.
    pub fn max_chunk_len(&self) -> usize {
        self.chunk_lens().max().unwrap_or(0)
    }

    /// The rows after the last chunk.
    pub fn padding(&self) -> std::ops::Range<usize> {
        self.offsets[self.offsets.len() - 1] as usize..self.total_seq_len
    }
}

/// [`Error::Unsupported`] if an i32 offset cannot reach the end of so many rows.
pub(crate) fn check_total_seq_len(total_seq_len: usize) -> Result<(), Error> {
    if total_seq_len <= i32::MAX as usize {
        return Ok(());
    }
    let supported = format!("at most {}, the largest offset an i32 holds", i32::MAX);
    Err(Error::Unsupported { argument: "total_seq_len", value: total_seq_len.to_string(), supported })
}

/// Offsets that cut `total_seq_len` rows into windows of `chunk_len` rows, the last one shorter if it must be.
///
/// The last offset is always `total_seq_len`, and no chunk is empty: `total_seq_len = 0` gives `[0]`.
///
/// # Errors
/// [`Error::Unsupported`] if `chunk_len` is 0 or `total_seq_len` exceeds `i32::MAX`.
pub fn window_cu_seqlens(chunk_len: usize, total_seq_len: usize) -> Result<CuSeqlens, Error> {
    if chunk_len == 0 {
        return Err(Error::Unsupported { argument: "chunk_len", value: "0".into(), supported: "at least 1".into() });
    }
    check_total_seq_len(total_seq_len)?;
    let starts = (0..total_seq_len).step_by(chunk_len).chain([total_seq_len]);
    let offsets: Vec<i32> = starts.map(|x| x as i32).collect();
    CuSeqlens::new(&offsets, total_seq_len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_end_at_the_last_row_without_an_empty_tail() {
        for (total, expected) in
            [(103, vec![0, 103]), (104, vec![0, 104]), (105, vec![0, 104, 105]), (208, vec![0, 104, 208])]
        {
            assert_eq!(window_cu_seqlens(104, total).unwrap().offsets(), expected);
        }
        assert_eq!(window_cu_seqlens(104, 0).unwrap().num_chunks(), 0);
        assert!(window_cu_seqlens(0, 5).is_err());
    }

    #[test]
    fn bad_offsets_are_named_with_index_value_and_rule() {
        let error = |offsets: &[i32], total| CuSeqlens::new(offsets, total).unwrap_err().to_string();
        assert_eq!(error(&[2, 5, 9], 9), "cu_seqlens[0] = 2: the first offset is 0");
        assert_eq!(error(&[0, 7, 5, 9], 9), "cu_seqlens[2] = 5: offsets do not decrease, and the one before is 7");
        assert_eq!(error(&[0, 5, 12], 9), "cu_seqlens[2] = 12: offsets do not exceed total_seq_len = 9");
        assert_eq!(error(&[0, -1], 9), "cu_seqlens[1] = -1: offsets are not negative");
        assert!(error(&[], 9).starts_with("cu_seqlens is empty"));
    }

    #[test]
    fn fewer_chunks_than_planned_are_followed_by_empty_ones() {
        let cu = CuSeqlens::new(&[0, 3, 7], 9).unwrap();
        assert_eq!(cu.padded(2).unwrap().offsets(), [0, 3, 7]);
        assert_eq!(cu.padded(5).unwrap().offsets(), [0, 3, 7, 7, 7, 7]);
        assert_eq!(cu.padded(1).unwrap_err().to_string(), "cu_seqlens: expected shape [2], found [3]");
    }

    #[test]
    fn empty_chunks_and_padding_are_allowed() {
        let cu = CuSeqlens::new(&[0, 0, 5, 5, 9, 9], 12).unwrap();
        assert_eq!((cu.num_chunks(), cu.max_chunk_len(), cu.padding()), (5, 5, 9..12));
    }
}
