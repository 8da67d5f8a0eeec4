//! The attn-backward program.
fn main() {}
