//! Which tile next: block index -> work, pure and tested on the CPU.
pub mod chunks;
pub mod grouped;
pub mod item;
