//! cuda_builder.
