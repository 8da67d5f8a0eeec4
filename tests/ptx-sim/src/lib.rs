//! Runs PTX on the CPU.
//!
//! [`Module::parse`] reads the text of a PTX module, as rustc's NVPTX backend writes it for `sm_80`; [`Module::launch`] runs one of its
//! entries on data in a [`Memory`]. The results are those of a GPU but for the last bits of approximate functions and the order of sums
//! in `mma`. What a GPU would let pass is a [`Fault`] here, which names the instruction, its line, the block and the thread:
//!
//! * accesses out of bounds or misaligned, and reads of memory that nobody wrote;
//! * touching the destination of a `cp.async` before the wait for its group: copies land there, not when they are issued;
//! * collectives (barriers, `mma`, `ldmatrix`, `stmatrix`, `shfl`, `redux`, `vote`, `activemask`) that not all 32 lanes execute
//!   together, and block barriers that some warps never come to;
//! * two warps touching the same word of shared memory, one of them writing, with no barrier between, and a lane reading what another
//!   lane of its warp wrote, with no `bar.warp.sync` between;
//! * a bulk copy or a `wgmma` touching shared memory that threads wrote, with no `fence.proxy.async` between;
//! * reading by `ld.global.nc` what the same launch writes;
//! * endless loops.
//!
//! Not modelled: races in global memory, a lane overwriting what another lane of its warp reads, the order of weak memory, time. Not simulated: local memory,
//! calls, textures, clusters. Of Hopper's instructions there are mbarriers, bulk copies, TMA ([`TensorMap`] makes the maps) and `wgmma`. Blocks of a launch run
//! side by side, so that they may wait for each other. [`Module::parse`] refuses what it does not know.
//!
//! ```
//! use ptx_sim::{Memory, Module};
//!
//! let module = Module::parse(
//!     ".version 7.0
//!      .target sm_80
//!      .address_size 64
//!      .visible .entry double(.param .u64 values, .param .u32 count)
//!      .maxntid 64, 1, 1
//!      {
//!          .reg .pred %p<1>;
//!          .reg .b32 %r<6>;
//!          .reg .b64 %rd<3>;
//!          ld.param.u64 %rd0, [values];
//!          ld.param.u32 %r0, [count];
//!          mov.u32 %r1, %ctaid.x;
//!          mov.u32 %r2, %tid.x;
//!          mad.lo.s32 %r3, %r1, 64, %r2;
//!          setp.ge.u32 %p0, %r3, %r0;
//!          @%p0 bra $end;
//!          mul.wide.u32 %rd1, %r3, 4;
//!          add.s64 %rd2, %rd0, %rd1;
//!          ld.global.f32 %r4, [%rd2];
//!          add.f32 %r5, %r4, %r4;
//!          st.global.f32 [%rd2], %r5;
//!      $end:
//!          ret;
//!      }",
//! )?;
//! let mut memory = Memory::new();
//! let values: Vec<f32> = (0..100).map(|i| i as f32).collect();
//! let address = memory.upload(&values);
//!
//! // The parameters' bytes, as the entry's list lays them out: here a pointer and a 32-bit number.
//! let params = [&address.to_le_bytes()[..], &100u32.to_le_bytes()].concat();
//! let stats = module.launch("double", [2, 1, 1], 64, 0, &params, &mut memory)?;
//!
//! assert_eq!(memory.download::<f32>(address, 100)?[99], 198.0);
//! assert_eq!(stats.blocks, 2);
//!
//! // One more than there are: the 101st thread reads past the end.
//! let params = [&address.to_le_bytes()[..], &101u32.to_le_bytes()].concat();
//! let error = module.launch("double", [2, 1, 1], 64, 0, &params, &mut memory).unwrap_err();
//! let fault = error.fault().unwrap();
//! assert_eq!((fault.block, fault.warp, fault.lane), ([1, 0, 0], 1, Some(4)));
//! assert_eq!(fault.instruction, "ld.global.f32 %r4, [%rd2];");
//! # Ok::<(), ptx_sim::Error>(())
//! ```

mod access;
mod body;
mod convert;
mod decode;
mod error;
mod hopper;
mod launch;
mod lex;
mod memory;
mod module;
mod number;
mod op;
mod shared;
mod space;
mod tensor;
mod tensor_map;
mod warp;

pub use error::{Cause, Error, Fault, Space};
pub use launch::{Options, Size, Stats};
pub use memory::{Element, Memory};
pub use module::{Entry, Module};
pub use tensor_map::TensorMap;
