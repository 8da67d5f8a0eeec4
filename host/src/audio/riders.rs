//! What rides along with operation A's two Hopper GEMMs, see `params_wgmma::Rider`.
use attn_backward_kernels::params_wgmma::{ColumnSum, MAX_PREFETCHES, Prefetch, Rider};

use super::bias_sums::qkv_sums;
use super::{DeviceGradients, DeviceInputs, Plan, Shape};
use crate::workspace::Workspace;

/// Most bytes that are brought into L2 ahead of their use: what is written meanwhile, and out_weight and grad_output, find room beside them in
/// the 50 MB of an H200.
const MAX_PREFETCHED_BYTES: u64 = 28 << 20;

/// Bytes brought into L2 of query, key and value states, the q, k and v weights and hidden_states, in this order, which is that of their use;
/// 0 for those that find no room.
pub(super) fn prefetched_bytes(shape: &Shape) -> [u64; MAX_PREFETCHES] {
    let d_model = shape.d_model() as u64;
    let (rows, weight) = (2 * shape.total_seq_len as u64 * d_model, 2 * d_model * d_model);
    let mut left = MAX_PREFETCHED_BYTES;
    [rows, rows, rows, weight, weight, weight, rows].map(|bytes| {
        let taken = if bytes <= left { bytes } else { 0 };
        left -= taken;
        taken
    })
}

/// Of the grad_attention GEMM: inputs of the launches behind it come into L2, and `(address, bytes)` of the gradients GEMM's counters are zeroed.
pub(super) fn prepare(plan: &Plan, inputs: &DeviceInputs<'_>, (counters, bytes): (u64, usize)) -> Rider {
    let tensors = [
        inputs.query_states.address(),
        inputs.key_states.address(),
        inputs.value_states.address(),
        inputs.q_weight.address(),
        inputs.k_weight.address(),
        inputs.v_weight.address(),
        inputs.hidden_states.address(),
    ];
    let mut prefetch = Rider::NONE.prefetch;
    for ((range, address), bytes) in prefetch.iter_mut().zip(tensors).zip(prefetched_bytes(plan.shape())) {
        *range = Prefetch { address: address as *const u8, bytes: bytes as u32, reserved: 0 };
    }
    Rider { prefetch, zero: counters as *mut u32, zero_words: (bytes / 4) as u32, ..Rider::NONE }
}

/// Of the gradients GEMM: the four bias gradients.
pub(super) fn sum_biases(
    plan: &Plan,
    inputs: &DeviceInputs<'_>,
    gradients: &DeviceGradients<'_>,
    workspace: &Workspace,
) -> Rider {
    let column_sum = ColumnSum {
        x: inputs.grad_output.address() as *const u16,
        out: gradients.grad_out_bias.address() as *mut u16,
        rows: plan.tokens() as u32,
        columns: plan.shape().d_model() as u32,
    };
    Rider { column_sum, partial_sums: qkv_sums(plan, gradients, workspace), ..Rider::NONE }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(total_seq_len: usize) -> [u64; MAX_PREFETCHES] {
        prefetched_bytes(&Shape { total_seq_len, num_heads: 20, scale: 0.125 })
    }

    #[test]
    fn short_sequences_are_prefetched_whole() {
        let (rows, weight) = (1280 * 1280 * 2, 1280 * 1280 * 2);
        assert_eq!(bytes(1280), [rows, rows, rows, weight, weight, weight, rows]);
    }

    #[test]
    fn prefetches_leave_room_in_l2_and_end_on_16_bytes() {
        for total_seq_len in [0, 1, 373, 1280, 2000, 3000, 5000, 16_384, 840_000] {
            let bytes = bytes(total_seq_len);
            assert!(bytes.iter().sum::<u64>() <= MAX_PREFETCHED_BYTES && bytes.iter().all(|b| b % 16 == 0));
        }
        assert_eq!(bytes(840_000)[0], 0);
    }
}
