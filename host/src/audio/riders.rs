//! What rides along with operation A's two Hopper GEMMs, see `params_wgmma::Rider`.
use attn_backward_kernels::params_wgmma::{ColumnSum, Rider};

use super::bias_sums::qkv_sums;
use super::{DeviceGradients, DeviceInputs, Plan};
use crate::workspace::Workspace;

/// Of the grad_attention GEMM: `(address, bytes)` of the gradients GEMM's counters are zeroed.
pub(super) fn zero_counters((counters, bytes): (u64, usize)) -> Rider {
    Rider { zero: counters as *mut u32, zero_words: (bytes / 4) as u32, ..Rider::NONE }
}

/// Of the gradients GEMM: the four bias gradients. That GEMM knows the number of tokens.
pub(super) fn sum_biases(
    plan: &Plan,
    inputs: &DeviceInputs<'_>,
    gradients: &DeviceGradients<'_>,
    workspace: &Workspace,
) -> Rider {
    let column_sum = ColumnSum {
        x: inputs.grad_output.address() as *const u16,
        out: gradients.grad_out_bias.address() as *mut u16,
        rows: plan.shape().total_seq_len as u32,
        columns: plan.shape().d_model() as u32,
    };
    Rider { column_sum, partial_sums: qkv_sums(plan, gradients, workspace), ..Rider::NONE }
}
