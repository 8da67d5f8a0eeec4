//! Per-kernel constants: tile sizes, threads, stages, shared memory. Device code and the host's plans read the same ones.
