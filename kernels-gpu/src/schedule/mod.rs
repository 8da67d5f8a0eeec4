//! Which tile next: block index -> work, pure and tested on the CPU.
pub mod grouped;
pub mod item;
