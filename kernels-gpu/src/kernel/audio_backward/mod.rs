//! Operation A in one persistent launch on Hopper, for chunks of at most 128 rows: `audio_backward_{64,80,128}`.
//!
//! **Formula.** First, for every (chunk, head), by a team of warps: `dA[chunk, head's 64] = grad_output[chunk, :] out_weight[:, head's 64]`, then O,
//! dQ, dK, dV as in `attention_short.rs`. No two teams compute the same element of dA, and no other needs it: it never leaves the SM. Then,
//! when all teams are done, the products of `wgmma_gemm`: grad_hidden_states and the weights' gradients, and the biases' beside them.
//!
//! **Grid.** As many blocks as SMs, all resident (a cooperative launch): they wait for each other.
//!
//! **Block.** 384 threads: two teams (128 rows: one), see [`team`]; then the roles of `wgmma_gemm`.
//!
//! **Shared memory.** Two teams of 114,688 bytes or one of 229,376 (map in [`team`]), then that of `wgmma_gemm`, whose mbarriers come after the
//! teams' memory.
//!
//! **Registers.** 168 at launch, and for the teams; then those of `wgmma_gemm`.
//!
//! **Preconditions.** Those of `wgmma_gemm`, but its counters need not be zero; [`AudioBeside`]; head_dim 64; no chunk longer than `16
//! row_tiles` rows (one that is counts as breaking a rule, see `chunks.rs`).
//!
//! **Rounding.** dA: bf16 operands, fp32 accumulation, then as `attention_short.rs`; the products as `wgmma_gemm`.
//!
//! **Ordering.** A block's threads meet, one of them counts the block as done (release); the producer and the rider of every block wait for all
//! blocks (acquire) before they read what teams have written. The last of these waits sets both words of `done` back to zero.
use core::arch::asm;

use cuda_std::kernel;
use cuda_std::thread::{grid_dim_x, sync_threads, thread_idx_x};

use super::wgmma_gemm::{Bf16, Entry, ToBf16, num_barriers, roles, start};
use crate::config::audio_backward::{TEAM_ROW_TILES, team_warps};
use crate::config::wgmma as config;
use crate::params_wgmma::{AudioBeside, FIRST_AUDIO_MAP, OUT_WEIGHT_PRODUCT, TensorMap, WgmmaParams};
use crate::ptx::hopper::{
    atomic_add, ctaid_again, fence_proxy_async, fence_proxy_async_shared, ld_acquire, prefetch_tensormap_if,
    red_add_release_if,
};
use crate::ptx::memory::stg32_if;
use crate::schedule::item::Item;

mod ring;
mod team;

/// `bar.sync` instructions of a team: seven an item, and as many again where a warp without rows meets the others.
const fn team_barriers(row_tiles: u32) -> u32 {
    if team_warps(row_tiles) == row_tiles { 7 } else { 14 }
}

/// What the entries are beside [`Entry`].
trait AudioEntry: Entry<Beside = AudioBeside> {
    /// The tensor maps of out_weight and grad_output.
    #[inline(always)]
    fn maps() -> *const TensorMap {
        // SAFETY: inside the parameters.
        unsafe { (&raw const (*Self::params()).maps).cast::<TensorMap>().add(FIRST_AUDIO_MAP) }
    }
}

macro_rules! kernels {
    ($($name:ident, $marker:ident, $row_tiles:literal, $accumulators:literal;)*) => { $(
        #[doc = concat!("[`", stringify!($name), "`].")]
        struct $marker;

        impl AudioEntry for $marker {}

        impl Entry for $marker {
            type Operand = Bf16;
            type Output = ToBf16;
            type Beside = AudioBeside;
            const LOADS_B_AHEAD: bool = true;

            #[inline(always)]
            fn b_is_input(item: &Item) -> bool {
                item.product != OUT_WEIGHT_PRODUCT
            }

            #[inline(always)]
            fn params() -> *const WgmmaParams<AudioBeside> {
                let params: *const WgmmaParams<AudioBeside>;
                // SAFETY: takes the address of the only parameter of the entry that this type belongs to.
                unsafe {
                    asm!(concat!("{{ .reg .b64 t; mov.b64 t, ", stringify!($name), "_param_0; cvta.param.u64 {p}, t; }}"),
                         p = out(reg64) params, options(nomem, nostack))
                };
                params
            }

            #[inline(always)]
            unsafe fn wait_for_operands() {
                // SAFETY: the word only counts up until all have waited.
                unsafe {
                    let done = (*Self::params()).beside.done;
                    while ld_acquire(done) < grid_dim_x() {}
                    fence_proxy_async();
                }
            }

            #[inline(always)]
            unsafe fn has_waited(counts: bool) {
                // SAFETY: the last of the two waits of each block is the last access to the words.
                unsafe {
                    let done = (*Self::params()).beside.done;
                    if counts && atomic_add(done.wrapping_add(1), 1) == 2 * grid_dim_x() - 1 {
                        stg32_if(true, done.cast(), 0);
                        stg32_if(true, done.wrapping_add(1).cast(), 0);
                    }
                }
            }
        }

        #[doc = concat!("Operation A for chunks of at most 16 * ", stringify!($row_tiles), " rows.")]
        ///
        /// # Safety
        /// The launch is as the file's head says and `params` as [`AudioBeside`] does, with valid device pointers; outputs overlap neither each
        /// other nor inputs.
        #[kernel(max_threads = config::THREADS, min_blocks_per_sm = config::MIN_BLOCKS_PER_SM,
            barriers = num_barriers(64, &config::TILE_WIDTHS, false) + team_barriers($row_tiles))]
        pub unsafe fn $name(params: WgmmaParams<AudioBeside>) {
            // SAFETY: the caller's.
            unsafe { run::<$marker, $row_tiles, $accumulators>(&params) }
        }
    )* };
}
kernels! {
    audio_backward_64, AudioBackward64, 4, 32;
    audio_backward_80, AudioBackward80, 5, 40;
    audio_backward_128, AudioBackward128, 8, 32;
}
const _: () = assert!(matches!(TEAM_ROW_TILES, [4, 5, 8]));

/// A kernel: the teams, then the roles of the products.
///
/// # Safety
/// As the entries.
#[inline(always)]
unsafe fn run<E: AudioEntry, const ROW_TILES: usize, const R: usize>(params: &WgmmaParams<AudioBeside>) {
    // SAFETY: the caller's; the branches are the same for the whole block.
    unsafe {
        prefetch_tensormap_if(thread_idx_x() < 2, E::maps().wrapping_add(thread_idx_x() as usize));
        start::<E>();
        zero_counters(params);
        team::work::<E, ROW_TILES, R>(&params.beside);
        // The teams' shared memory becomes the ring's.
        fence_proxy_async_shared();
        sync_threads();
        red_add_release_if(thread_idx_x() == 0, params.beside.done, 1);
        roles::<E>();
    }
}

/// Zeroes this block's share of the products' counters.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn zero_counters(params: &WgmmaParams<AudioBeside>) {
    let mut word = ctaid_again() * config::THREADS + thread_idx_x();
    while word < params.beside.num_counters {
        // SAFETY: inside the range.
        unsafe { stg32_if(true, params.counters.wrapping_add(word as usize).cast(), 0) };
        word += grid_dim_x() * config::THREADS;
    }
}
