//! Test support: random shapes and inputs, tolerances, assertions.

pub mod assertions;
pub mod strategies;
