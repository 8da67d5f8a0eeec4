//! Conversion of operation B: fp32 inputs to the scaled fp16 operands of its grouped GEMM.
//!
//! Formula, with `e` and `R` as in [`scale`](crate::scale):
//! ```text
//! gradients: dq[t, h * head_dim + j] = grad_query_states[b, h, s, j] * 2^-row_exponents_dec[t]            t = b * seq_len + s
//!            dkv[t, ..] = (dK | dV)[t, ..] * 2^-row_exponents_enc[t]      dK, dV: sums over the query heads of a kv head
//!            maxima[0] = max over t of row_exponents_dec[t] + exponent(max |x_dec[t]|)      [1]: the same of the encoder
//!            maxima[4] = exponent(max |sample of q_weight|) + HEADROOM                      [5]: of k_weight and v_weight
//!            maxima[2] = max(exponent(max |q_weight|), maxima[4])                           [3]: likewise
//!            wq' = q_weight * 2^(14 - maxima[4])                          wkv' = (k_weight over v_weight) * 2^(14 - maxima[5])
//! operands:  exponents[i] = R_i = maxima[i] - 14
//!            x_dec'[t] = x_dec[t] * 2^(row_exponents_dec[t] - R_0)        x_enc'[t] = x_enc[t] * 2^(row_exponents_enc[t] - R_1)
//!            wq' = q_weight * 2^-R_2 if maxima[2] > maxima[4]             wkv' = (k_weight over v_weight) * 2^-R_3 if maxima[3] > maxima[5]
//! ```
//! The row exponents of the gradients thereby leave the weight gradients' sums over tokens and are undone in one factor `2^R`.
//! `cross_wgmma_fast` makes the same in the launch that multiplies, for long sequences of the model's sizes on Hopper.
//! Two launches, because `R` needs the maxima of everything. So that weights are read once, the first one takes their maxima for a guess from a fixed
//! sample; where that is too low the second one converts them again. Every block of the first leaves its maxima, every block of the second reads
//! them all: nothing has to be zeroed before.
//!
//! On Hopper operands may be a dependent launch, and the launch behind it too: either kernel allows that when it has nothing left to load. Before it waits,
//! operands loads the first hidden states of each warp, which no launch writes.
//!
//! Grid: `config::cross_convert::{gradients,operands}_blocks`, any size is right. Block: 256 threads.
//! * gradients: a block takes a token at a time (gradient row and row of hidden states), encoder tokens first, then decoder tokens,
//!   then weight tiles of 32 KiB; every block looks at the same sample before its first. Thread `i` holds pieces `i, i + 256, ..` (16 bytes in, 8 bytes out) of a row between finding the
//!   maximum and storing; what a row has beyond 512 (encoder) or 1024 (decoder) pieces is read again, from L2.
//! * operands: a warp takes a strip of a row at a time, 512 elements.
//!
//! Shared memory (dynamic). gradients, `config::cross_convert::GRADIENTS_SMEM_BYTES`: two sets, used in turn, of
//! ```text
//!  0..32  largest gradient magnitude of each warp        32..64  largest hidden-state magnitude of each warp
//! ```
//! operands, `OPERANDS_SMEM_BYTES`: the maxima, `[6][8 warps]` words.
//! Registers: at most 80 a thread (gradients), 48 (operands).
//!
//! Preconditions: as [`CrossConvertParams`] says; operands is the launch after gradients.
//!
//! Rounding: sums over a group's heads in fp32, heads in order, from 0. `_fast`: scaled values to fp16, nearest even. `_high`: part
//! 0 as `_fast`, part 1 the fp16 nearest to what part 0 leaves (0 where part 0 is not finite). Infinities and NaN stay what they are.
mod gradients;
mod operands;
pub(super) mod parts;

use crate::config::cross_convert::{GRADIENTS_BLOCKS_PER_SM, OPERANDS_BLOCKS_PER_SM, THREADS};
use crate::params::CrossConvertParams;
use crate::ptx::memory::{lds128, sts32_if};
use crate::ptx::sync::redux_max;
use core::array::from_fn;
use cuda_std::{kernel, thread};

/// Warps of a block.
const WARPS: u32 = THREADS / 32;

/// Maxima over the block, in all threads.
///
/// # Safety
/// All threads arrive. `smem` has room for `[N][WARPS]` words, on a 16-byte boundary; its last readers passed a barrier since.
#[inline(always)]
unsafe fn block_max<const N: usize>(smem: u32, values: [u32; N]) -> [u32; N] {
    let thread = thread::thread_idx_x();
    // SAFETY: as the caller promises; the barrier orders the warps' stores before the loads.
    unsafe {
        for (i, value) in values.into_iter().enumerate() {
            let largest = redux_max(value);
            sts32_if(thread % 32 == 0, smem + (i as u32 * WARPS + thread / 32) * 4, largest);
        }
        thread::sync_threads();
        from_fn(|i| {
            let at = smem + i as u32 * WARPS * 4;
            let (x, y) = (lds128(at), lds128(at + 16));
            x[0].max(x[1]).max(x[2].max(x[3])).max(y[0].max(y[1]).max(y[2].max(y[3])))
        })
    }
}
const _: () = assert!(WARPS == 8);

/// dQ, dK, dV and weights to fp16, row exponents and maxima.
///
/// # Safety
/// As the file head says.
#[kernel(max_threads = THREADS, min_blocks_per_sm = GRADIENTS_BLOCKS_PER_SM, barriers = 4)]
pub unsafe fn cross_convert_gradients_fast(params: CrossConvertParams) {
    // SAFETY: the caller's.
    unsafe { gradients::convert::<1>(&params) }
}

/// dQ, dK, dV and weights to two fp16 parts, row exponents and maxima.
///
/// # Safety
/// As the file head says.
#[kernel(max_threads = THREADS, min_blocks_per_sm = GRADIENTS_BLOCKS_PER_SM, barriers = 4)]
pub unsafe fn cross_convert_gradients_high(params: CrossConvertParams) {
    // SAFETY: the caller's.
    unsafe { gradients::convert::<2>(&params) }
}

/// Hidden states to fp16, weights again where they must be, and the exponents.
///
/// # Safety
/// As the file head says.
#[kernel(max_threads = THREADS, min_blocks_per_sm = OPERANDS_BLOCKS_PER_SM, barriers = 1)]
pub unsafe fn cross_convert_operands_fast(params: CrossConvertParams) {
    // SAFETY: the caller's.
    unsafe { operands::convert::<1>(&params) }
}

/// Hidden states to two fp16 parts, weights again where they must be, and the exponents.
///
/// # Safety
/// As the file head says.
#[kernel(max_threads = THREADS, min_blocks_per_sm = OPERANDS_BLOCKS_PER_SM, barriers = 1)]
pub unsafe fn cross_convert_operands_high(params: CrossConvertParams) {
    // SAFETY: the caller's.
    unsafe { operands::convert::<2>(&params) }
}
