//! Grouped GEMM plans.
pub mod portable;
