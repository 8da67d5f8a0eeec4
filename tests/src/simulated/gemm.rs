//! Grouped GEMMs on the simulated GPU, as the host launches them.

use attn_backward::gemm::portable::PortablePlan;
use attn_backward::gemm::{Operands, ProductTensors};

use super::{Simulator, Size};

/// The entry that computes a group of products.
pub fn entry(operands: Operands) -> &'static str {
    match operands {
        Operands::Bf16 => "gemm_bf16",
        Operands::F16 => "gemm_f16",
        Operands::F16Promoted => "gemm_f16_promoted",
    }
}

/// The launches of a plan: the products, then the sums of those that are split.
#[track_caller]
pub fn run(gpu: &mut Simulator, operands: Operands, plan: &PortablePlan, tensors: &[ProductTensors], workspace: u64) {
    let params = plan.params(tensors, workspace).expect("tensors of every product");
    let launches = [
        (entry(operands), plan.blocks(), plan.threads(), plan.smem_bytes()),
        ("gemm_reduce", plan.reduce_blocks(), PortablePlan::REDUCE_THREADS, 0),
    ];
    for (entry, blocks, block, shared_bytes) in launches {
        if blocks > 0 {
            let size = Size { grid: [blocks, 1, 1], block, shared_bytes: shared_bytes as usize };
            gpu.launch(entry, size, &params);
        }
    }
}
