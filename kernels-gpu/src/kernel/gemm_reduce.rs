//! Second half of a split product: sums the partials of `gemm_*` in the order of the splits, scales, rounds and writes C.
//!
//! **Formula.** For every product with `splits > 1`: `C[m, n] = 2^(row_exponents[m] + exponent) * sum over s of partials[s, m, n]`, s ascending:
//! the result depends on the plan, not on timing.
//!
//! **Grid.** `schedule::grouped::reduce_blocks` of every product, one product after the other. **Block.** 256 threads, four columns each.
//! **Shared memory.** None. **Registers.** 46 (sm_80), 48 (sm_90a).
//!
//! **Preconditions.** The same [`GemmParams`] as the `gemm_*` launch before it on the stream; `m * n < 2^34`; some product is split.
//!
//! **Rounding.** fp32 additions to nearest; the scale as in `gemm_*`; bf16 output is rounded once, to nearest even.
use cuda_std::kernel;
use cuda_std::thread::{block_idx_x, thread_idx_x};

use super::gemm::Selected;
use crate::config::gemm::{REDUCE_BATCH, REDUCE_THREADS};
use crate::params::{GemmParams, OutputType};
use crate::ptx::convert::bf16x2;
use crate::ptx::memory::{ldg128_or_zero, stg64_if, stg128_if};
use crate::schedule::grouped::{quad_position, reduce_blocks};

/// Sums, scales and writes every split product of a grouped GEMM.
///
/// # Safety
/// As the head says; pointers are valid for the extents given.
#[kernel(max_threads = REDUCE_THREADS, min_blocks_per_sm = 4, barriers = 0)]
pub unsafe fn gemm_reduce(params: GemmParams) {
    let (mut first, mut index, mut index_first) = (0, 0, 0);
    for (i, product) in params.products.iter().enumerate() {
        let blocks = reduce_blocks(product.m, product.n, product.splits);
        if (i as u32) < params.num_products && block_idx_x() >= first && block_idx_x() - first < blocks {
            (index, index_first) = (i as u32, first);
        }
        first += blocks;
    }
    // SAFETY: the caller's.
    unsafe { reduce(Selected::new(&params, index), (block_idx_x() - index_first) * REDUCE_THREADS + thread_idx_x()) }
}

/// Four columns: the `quad`-th four elements of `[m, n]`.
///
/// # Safety
/// As the head says.
#[inline(always)]
unsafe fn reduce(product: Selected, quad: u32) {
    let (m, n, splits) = product.get(|p| (p.m, p.n, p.splits));
    let split_bytes = 4 * m as u64 * n as u64;
    let ok = (quad as u64) < split_bytes / 16;
    let (row, column) = quad_position(quad, n);
    let row = row.min(m - 1);
    let mut source = (product.get(|p| p.partials) as *const u8).wrapping_add(16 * quad as usize);
    let mut sum = [0f32; 4];
    let mut split = 0;
    // SAFETY: loads and stores are predicated by `ok`, loads by the number of splits too.
    unsafe {
        while split < splits {
            let mut batch = [[0u32; 4]; REDUCE_BATCH as usize];
            for (i, words) in batch.iter_mut().enumerate() {
                *words = ldg128_or_zero(source, ok && split + (i as u32) < splits);
                source = source.wrapping_add(split_bytes as usize);
            }
            for words in batch {
                for e in 0..4 {
                    sum[e] += f32::from_bits(words[e]);
                }
            }
            split += REDUCE_BATCH;
        }
        let scale = product.row_scale(row);
        let x = sum.map(|x| x * scale.0 * scale.1);
        let (c, pitch, c_type) = product.get(|p| (p.c, p.ldc, p.c_type));
        let at = row as usize * pitch as usize + column as usize;
        let bf16 = c_type == OutputType::Bf16 as u32;
        stg64_if(ok && bf16, c.wrapping_add(2 * at), bf16x2(x[0], x[1]), bf16x2(x[2], x[3]));
        stg128_if(ok && !bf16, c.wrapping_add(4 * at), x.map(f32::to_bits));
    }
}
