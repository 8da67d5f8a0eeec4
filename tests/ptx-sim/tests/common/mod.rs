//! Runs short pieces of PTX: one block, one word in and out for each thread.

use ptx_sim::{Cause, Error, Memory, Module};

/// A module with one entry, `test`, that has a pointer `in` and a pointer `out`. Registers: `%r0` is the thread, `%rd0` and `%rd1` its
/// places (4 bytes a thread) in `in` and `out`, `%r1` the word read from `in`; `%r2..`, `%rd2..`, `%p0..` and `%h0..` (16 bits) are free.
pub fn module(body: &str) -> Module {
    let text = format!(
        ".version 7.0\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 smem[];\n\
         .visible .entry test(.param .u64 in, .param .u64 out)\n{{\n\
         .reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %rd<32>;\n\
         ld.param.b64 %rd0, [in]; ld.param.b64 %rd1, [out]; mov.u32 %r0, %tid.x;\n\
         mul.wide.u32 %rd2, %r0, 4; add.s64 %rd0, %rd0, %rd2; add.s64 %rd1, %rd1, %rd2;\n\
         ld.global.b32 %r1, [%rd0];\n{body}\nret;\n}}\n"
    );
    Module::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Runs `body` for `input.len()` threads with 4 KiB of dynamic shared memory and returns what is at `out`: a word for each thread.
pub fn try_run(body: &str, input: &[u32]) -> Result<Vec<u32>, Error> {
    let module = module(body);
    let mut memory = Memory::new();
    let (source, destination) = (memory.upload(input), memory.alloc_poisoned(4 * input.len()));
    let params = [source.to_le_bytes(), destination.to_le_bytes()].concat();
    module.launch("test", [1, 1, 1], input.len() as u32, 4096, &params, &mut memory)?;
    memory.download(destination, input.len())
}

/// As [`try_run`], for a body that must not fail.
#[allow(dead_code, reason = "each test program uses a part of this module")]
pub fn run(body: &str, input: &[u32]) -> Vec<u32> {
    try_run(body, input).unwrap_or_else(|error| panic!("{error}"))
}

/// Stores `register` after `body`, for one warp whose lane `i` reads `input(i)`.
#[allow(dead_code, reason = "each test program uses a part of this module")]
pub fn warp(body: &str, register: &str, input: impl Fn(u32) -> u32) -> Vec<u32> {
    let input: Vec<u32> = (0..32).map(input).collect();
    run(&format!("{body}\nst.global.b32 [%rd1], {register};"), &input)
}

/// The cause of the fault that `body` must have, run by `threads` threads that read zeros.
#[allow(dead_code, reason = "each test program uses a part of this module")]
pub fn cause(body: &str, threads: usize) -> Cause {
    let error = try_run(body, &vec![0; threads]).expect_err("a fault");
    error.fault().unwrap_or_else(|| panic!("{error}")).cause
}
