//! gemm_reduce
