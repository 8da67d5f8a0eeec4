//! Test support: random shapes and inputs, tolerances, assertions, the GPU.

pub mod assertions;
pub mod device;
pub mod examples;
pub mod plain_bf16;
pub mod simulated;
pub mod sparse_queries;
pub mod strategies;
