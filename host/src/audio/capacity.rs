//! What a plan takes of chunks, whatever the device's `cu_seqlens` holds when the kernels run.
use crate::{CuSeqlens, Error};

/// Bounds of the chunks that a plan is for. Lengths may be any within them, and others in each run: the kernels read them on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Chunks, empty ones included: `cu_seqlens` has one offset more. Where there are fewer, the rest repeats the last offset.
    pub num_chunks: usize,
    /// Longest chunk in rows.
    pub max_chunk_len: usize,
}

impl Capacity {
    /// What these chunks need.
    pub fn of(cu_seqlens: &CuSeqlens) -> Capacity {
        Capacity { num_chunks: cu_seqlens.num_chunks(), max_chunk_len: cu_seqlens.max_chunk_len() }
    }

    /// Checks offsets, such as those that a device holds, against the rules of [`CuSeqlens`] for `total_seq_len` rows and this capacity.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of offsets; as [`CuSeqlens::new`]; [`Error::CuSeqlens`] for the first chunk that is too long.
    pub fn check(&self, offsets: &[i32], total_seq_len: usize) -> Result<(), Error> {
        Error::check_shape("cu_seqlens", &[self.num_chunks + 1], &[offsets.len()])?;
        let chunks = CuSeqlens::new(offsets, total_seq_len)?;
        let max_chunk_len = self.max_chunk_len;
        match chunks.chunks().enumerate().find(|(_, rows)| rows.len() > max_chunk_len) {
            None => Ok(()),
            Some((chunk, rows)) => {
                let rule = format!(
                    "the plan takes chunks of at most {max_chunk_len} rows, and the offset before is {}",
                    rows.start
                );
                Err(Error::CuSeqlens { index: chunk + 1, value: rows.end as i64, rule })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_offset_that_does_not_fit_is_named() {
        let capacity = Capacity { num_chunks: 3, max_chunk_len: 5 };
        capacity.check(&[0, 5, 5, 9], 9).unwrap();
        let error = |offsets: &[i32]| capacity.check(offsets, 9).unwrap_err().to_string();
        assert_eq!(error(&[0, 5, 9]), "cu_seqlens: expected shape [4], found [3]");
        assert_eq!(error(&[0, 5, 4, 9]), "cu_seqlens[2] = 4: offsets do not decrease, and the one before is 5");
        assert_eq!(
            error(&[0, 3, 9, 9]),
            "cu_seqlens[2] = 9: the plan takes chunks of at most 5 rows, and the offset before is 3"
        );
        assert_eq!(
            Capacity::of(&CuSeqlens::new(&[0, 0, 7, 9], 12).unwrap()),
            Capacity { num_chunks: 3, max_chunk_len: 7 }
        );
    }
}
