//! wgmma_gemm
