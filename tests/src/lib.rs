//! Test support: random shapes and inputs, tolerances, assertions.

pub mod assertions;
pub mod simulated;
pub mod strategies;
