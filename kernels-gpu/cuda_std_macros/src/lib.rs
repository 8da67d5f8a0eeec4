//! Macros of cuda_std.
