//! The Hopper grouped GEMM: every output tile of a few products in one persistent launch.
//!
//! **Formula.** For each product, `C[m, n] = 2^(row_exponents[m] + exponent) * sum over k of A[m, k] B[k, n]`. A is one K-major
//! (`[m, k]`: dgrad) or MN-major (`[k, m]`: wgrad) tensor; B is MN-major (`[k, n]`), one tensor or several that follow each other along K.
//! Promoted: A and B are two parts each, `A = A_hi + A_lo`, and `A_lo B_hi + A_hi B_hi + A_hi B_lo` is summed over k, all three of a k-block
//! before the next. Products with MN-major A may ask the device how much of their k counts (`k_limit`).
//! `cross_wgmma_fast` makes the operands first, operation B's conversion to scaled fp16: [`convert`].
//!
//! **Grid.** Any number of clusters of two blocks, one list of [`Item`]s a block; the host makes as many blocks as there are SMs, an even number. A launch that converts must be
//! cooperative: its blocks wait for each other. In the others they wait for blocks before them alone, see [`Item`]. Deterministic: parts are added in a fixed order;
//! counts, and maxima of integers, are all that is atomic.
//!
//! **Launch.** Entries that do not convert may be dependent launches (programmatic dependent launch): until the launch before has ended they set up the ring, exchange registers
//! and load their first item, which no launch writes; then every thread has waited.
//!
//! **Clusters.** The two blocks of a cluster have lists of like items, whose tiles lie one below the other and share B: each block loads half of it into the
//! stages of both (multicast), so that L2 is read a third less. A stage is filled again when the consumers of both blocks have released it. (The last row block
//! of an odd number has two tiles side by side, which share nothing.) What a block loads for itself alone goes through the same stages: parts to add, and what
//! k_limit cuts. A launch that converts has a second ring of mbarriers in the same stages: its blocks convert by themselves, and meet at
//! `converted` before the first tile.
//!
//! **Block and roles.** 384 threads. Warpgroup 0: thread 0 is the producer (TMA loads, waits for parts), warps 2 and 3 publish the parts of
//! consumer warpgroups 0 and 1, warp 1 does the launch's small work beside the products ([`rider`]; idle if it converts), the rest of warp 0 idles. Warpgroups 1
//! and 2: consumers, 64 rows of the 128-row tile each.
//!
//! **Shared memory** (bytes; `config::wgmma`): 4 stages of 49,152 (A 16,384, B up to 32,768; a k-block takes one, promoted two: `A_lo` and `B_hi`, then
//! `A_hi` and `B_lo`) at 0; output chunks `[2 warpgroups][2]` of 8,192 at 196,608; mbarriers `full[4]`, `empty[4]` at 229,376; 229,440 in all.
//! Converting: mbarriers `full[4]`, `empty[4]` of its ring at 229,440, `converted` at 229,504; maxima of warps `[2 warpgroups][2 sets][8]` words at 229,568,
//! guesses `[2 warpgroups][2]` at 229,696; 229,712 in all.
//!
//! **Registers.** 168 at launch; 56 for warpgroup 0 and 224 for the consumers after `setmaxnreg` (128 accumulators a thread at width 256;
//! promoted: 96 and 96 totals at width 192).
//!
//! **Preconditions.** `hopper::supports` and the plan's invariants; `params.counters` are zero; tensor maps encoded as the plan says; every
//! list ends with an item of 0 k-blocks; 229,440 bytes of dynamic shared memory. Converting: the sizes of `config::wgmma::converting`; maxima and
//! `ready` are zero; 229,712 bytes of dynamic shared memory.
//!
//! **Rounding.** bf16 or fp16 operands as they are, exact products, fp32 accumulation (by the matrix units, and over the parts in order,
//! unscaled: fp16 operands cannot overflow fp32 on the way). Then one exact scaling by a power of two (exact while the result is a normal
//! fp32 number), then rounding to bf16 (nearest even) or none.
//! Matrix units truncate what they add to an accumulator, an error that grows with k. Promoted: after every
//! `config::wgmma::PROMOTE_K_BLOCKS` k-blocks of an item, each of them three products (half as many before warpgroup 1's first time), the accumulators
//! are added to fp32 totals (to nearest) and start from 0 again; parts are totals.
//! The conversion rounds as [`cross_convert`](crate::kernel::cross_convert) does.
//!
//! **Barriers.** A barrier of the cluster at the start, written down in both branches, before which nobody arrives at another block or loads into it; the producer
//! ends when all stages are released, after which nobody does. The others are named barriers of one warpgroup, or of one and its publishing warp. Their code is
//! uniform for those threads: conditions that differ between lanes are predicates inside asm. [`num_barriers`] counts them all.

use core::arch::asm;

use cuda_std::{kernel, thread};

use crate::config::wgmma as config;
use crate::params_wgmma::{Conversion, Rider, WgmmaParams};
use crate::ptx::hopper::{
    bulk_wait_read_if, cluster_barrier, ctaid_again, fence_mbarrier_init, prefetch_l1, setmaxnreg_dec, setmaxnreg_inc,
    wait_for_launch_before,
};
use crate::ptx::sync::tid_again;
use crate::schedule::item::{Item, item_kind};
use crate::tile::ring::{Converted, Ring};

mod consumer;
mod convert;
mod operand;
mod output;
mod parts;
mod producer;
mod rider;

use consumer::Consumer;
use operand::{Bf16, F16, F16Promoted, Operand};
use output::{Output, ToBf16, ToF32};

/// What a launch does beside its products.
pub trait Beside {
    /// Whether it makes the products' operands: a [`Conversion`], not a [`Rider`].
    const CONVERTS: bool;
}

impl Beside for Rider {
    const CONVERTS: bool = false;
}

impl Beside for Conversion {
    const CONVERTS: bool = true;
}

/// An entry point: its types and its parameters.
trait Entry {
    /// Type of A and B.
    type Operand: Operand;
    /// Type of C.
    type Output: Output;
    /// What it does beside the products.
    type Beside: Beside;
    /// Whether it converts.
    const CONVERTS: bool = Self::Beside::CONVERTS;
    /// Generic address of the entry's parameters. Not `pure`: taken again in each role, it stays in no register across the roles.
    fn params() -> *const WgmmaParams<Self::Beside>;
}

/// `bar.sync` instructions of an entry whose output chunks have `chunk_columns` columns: for each tile width, two a round
/// of the epilogue, one where a part is parked and one a stage of an added part; and one each in reduce items and the publisher.
const fn num_barriers(chunk_columns: u32, widths: &[u32], converts: bool) -> u32 {
    let mut tiles = 0;
    let mut i = 0;
    while i < widths.len() {
        let width = widths[i];
        tiles += 2 * (width / chunk_columns).div_ceil(config::OUTPUT_CHUNKS) + 1 + width / 64;
        i += 1;
    }
    // The conversion: two for the guesses, one a token of either sequence, one a stage of weights, of weights again, and of scale items (which are
    // there for both), one an item, the publisher's.
    tiles + 2 + if converts { 10 } else { 0 }
}

/// Widths of the tiles that an entry takes.
const fn tile_widths<O: Operand>() -> &'static [u32] {
    if O::PROMOTED { &config::PROMOTED_TILE_WIDTHS } else { &config::TILE_WIDTHS }
}

/// Declares an entry point. Its parameters are reached by the name that rustc gives them in PTX, never by the Rust value, so there is no
/// local copy of them and the tensor maps have the address that TMA needs.
macro_rules! entry {
    ($(#[$doc:meta])* $name:ident, $marker:ident, $operand:ty, $output:ty, $beside:ty) => {
        #[doc = concat!("[`", stringify!($name), "`].")]
        struct $marker;

        impl Entry for $marker {
            type Operand = $operand;
            type Output = $output;
            type Beside = $beside;
            #[inline(always)]
            fn params() -> *const WgmmaParams<$beside> {
                let params: *const WgmmaParams<$beside>;
                // SAFETY: takes the address of the only parameter of the entry that this type belongs to.
                unsafe {
                    asm!(concat!("{{ .reg .b64 t; mov.b64 t, ", stringify!($name), "_param_0; cvta.param.u64 {p}, t; }}"),
                         p = out(reg64) params, options(nomem, nostack))
                };
                params
            }
        }

        $(#[$doc])*
        ///
        /// # Safety
        /// The preconditions of the module; pointers and maps name device memory of the extents that the items use; outputs overlap
        /// neither each other nor inputs.
        #[kernel(max_threads = config::THREADS, min_blocks_per_sm = config::MIN_BLOCKS_PER_SM,
            cluster_size = config::CLUSTER_SIZE, barriers = num_barriers(<$output as Output>::CHUNK_COLUMNS, tile_widths::<$operand>(), <$beside as Beside>::CONVERTS))]
        pub unsafe fn $name(_params: WgmmaParams<$beside>) {
            // SAFETY: as the caller promises.
            unsafe { run::<$marker>() }
        }
    };
}

entry!(
    /// bf16 operands, bf16 outputs.
    wgmma_bf16_bf16, WgmmaBf16Bf16, Bf16, ToBf16, Rider
);
entry!(
    /// bf16 operands, fp32 outputs.
    wgmma_bf16_f32, WgmmaBf16F32, Bf16, ToF32, Rider
);
entry!(
    /// fp16 operands, scaled fp32 outputs.
    wgmma_f16_f32, WgmmaF16F32, F16, ToF32, Rider
);
entry!(
    /// Operands of two fp16 parts, sums promoted to fp32 totals, scaled fp32 outputs.
    wgmma_f16_f32_promoted, WgmmaF16F32Promoted, F16Promoted, ToF32, Rider
);

entry!(
    /// Operation B in `Fast`: converts, then multiplies as `wgmma_f16_f32`.
    cross_wgmma_fast, CrossWgmmaFast, F16, ToF32, Conversion
);

/// The list of this block.
///
/// # Safety
/// `params.items` holds one list for every block of the grid.
#[inline(always)]
unsafe fn list<E: Entry>() -> *const Item {
    let params = E::params();
    // SAFETY: inside the table, as the caller promises.
    unsafe { (*params).items.add((ctaid_again() * (*params).items_per_block) as usize) }
}

/// The kernel: initialises the ring, then the roles.
///
/// Registers are exchanged and the first item is loaded before the cluster's barrier, all at a time. Nothing is prefetched: tensor maps made the other
/// loads wait 0.4 us, and a load waits 1.5 us for a prefetch of its line.
///
/// # Safety
/// As the entries.
#[inline(always)]
unsafe fn run<E: Entry>() {
    let t = thread::thread_idx_x();
    // SAFETY: each role below is taken by the threads that its function asks for: `t / 128` and `t / 32` are uniform for a warpgroup and a
    // warp. All threads of the cluster meet at one barrier, in either branch.
    unsafe {
        // Converting, not by `t`: LLVM would see that the producer is this thread, and copy the cluster's barrier into both branches.
        if (if E::CONVERTS { tid_again() } else { t }) == 0 {
            Ring::<true>::new().init();
            if E::CONVERTS {
                Ring::<false>::new().init();
                Converted::new().init();
            }
            fence_mbarrier_init();
        }
        if t / 128 == 0 {
            setmaxnreg_dec::<{ config::PRODUCER_REGISTERS }>();
            let first = *list::<E>();
            cluster_barrier();
            if !E::CONVERTS {
                wait_for_launch_before();
            }
            if t == 0 {
                producer::produce_list::<E>(first);
            } else if t >= 64 {
                parts::publish_list::<E>(t / 32 - 2, t % 32);
            } else if t >= 32 && !E::CONVERTS {
                rider::ride::<E>(t % 32);
            }
        } else {
            setmaxnreg_inc::<{ config::CONSUMER_REGISTERS }>();
            let first = *list::<E>();
            cluster_barrier();
            if !E::CONVERTS {
                wait_for_launch_before();
            }
            consume_list::<E>(t, first);
        }
    }
}

/// A consumer warpgroup's walk over the list, whose first item is `item`.
///
/// # Safety
/// As [`run`]; all threads of the warpgroup.
#[inline(always)]
unsafe fn consume_list<E: Entry>(thread: u32, mut item: Item) {
    // SAFETY: lists end with an item of 0 k-blocks; the item is the same for the whole warpgroup, so all of it takes the same arm.
    unsafe {
        let mut next = list::<E>();
        if E::CONVERTS {
            next = Consumer::<false>::new(thread).convert_all::<E>(item);
            item = *next;
        }
        let mut consumer = Consumer::<true>::new(thread);
        while item.k_blocks != 0 {
            next = next.add(1);
            prefetch_l1(next);
            if item.kind == item_kind::REDUCE {
                consumer.reduce::<E>(&item);
            } else {
                match item.width {
                    256 if !E::Operand::PROMOTED => consumer.tile::<E, 128>(&item),
                    192 => consumer.tile::<E, 96>(&item),
                    _ => consumer.tile::<E, 64>(&item),
                }
            }
            item = *next;
        }
        // Shared memory must outlive the last stores' reads.
        bulk_wait_read_if(consumer.thread == 0);
    }
}
