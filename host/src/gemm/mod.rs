//! Grouped GEMM plans.
