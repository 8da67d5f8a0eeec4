//! A consumer warpgroup: 64 rows of every tile.
use super::Entry;
use super::operand::Operand;
use super::output::{Output, row_exponents, scale_group, store};
use super::parts::park;
use crate::config::wgmma::{CHUNK_BYTES, GROUP_BYTES, PROMOTE_K_BLOCKS, groups_per_stage, named_barrier};
use crate::params::Major;
use crate::params_wgmma::{TensorMap, WgmmaProduct};
use crate::ptx::hopper::{named_barrier, pin, wgmma_commit, wgmma_fence, wgmma_wait};
use crate::ptx::memory::lds128;
use crate::schedule::item::{Item, item_kind};
use crate::tile::descriptor::{descriptor, k16_step};
use crate::tile::ring::Ring;

/// Its place in the ring of the products (`CLUSTER`) or of the conversion, and which thread of which warpgroup this is.
pub(super) struct Consumer<const CLUSTER: bool> {
    pub ring: Ring<CLUSTER>,
    /// 0: rows 0..64 of a tile, 1: rows 64..128.
    pub warpgroup: u32,
    /// `0..128`.
    pub thread: u32,
}

impl<const CLUSTER: bool> Consumer<CLUSTER> {
    /// At the start of the ring; `thread` of the block, of a consumer warpgroup.
    #[inline(always)]
    pub fn new(thread: u32) -> Self {
        Consumer { ring: Ring::new(), warpgroup: thread / 128 - 1, thread: thread % 128 }
    }

    /// Waits until all threads of the warpgroup have read the stage, gives it back and goes on.
    ///
    /// # Safety
    /// All threads of the warpgroup.
    #[inline(always)]
    pub(super) unsafe fn release_read_stage(&mut self) {
        // SAFETY: the barrier orders the reads before the arrivals.
        unsafe {
            named_barrier(named_barrier::WARPGROUP + self.warpgroup, 128);
            self.ring.unreleased().release(self.thread, true);
        }
        self.ring.advance();
    }
}

impl Consumer<true> {
    /// A whole tile, a part or an owner, 2R columns wide.
    ///
    /// # Safety
    /// All threads of the warpgroup, with the producer at the same item.
    #[inline(always)]
    pub unsafe fn tile<E: Entry, const R: usize>(&mut self, item: &Item) {
        let mut acc = [0f32; R];
        // SAFETY: the item's product and maps are in use; its kind is the same for all threads.
        unsafe {
            if E::CONVERTS {
                // The exponents are there when the operands are.
                self.ring.wait_full();
            }
            // Loaded now, so that the latency hides behind the multiplication.
            let exponents = row_exponents::<E>(product::<E>(item), item.m0 + self.row());
            // The rest of a tile is the same code for both: a launch fetches only so much of it ahead.
            if item.a_major == Major::K as u32 {
                self.sum::<E::Operand, 0, R>(&mut acc, item.k_blocks);
            } else {
                self.sum::<E::Operand, 1, R>(&mut acc, item.k_blocks);
            }
            if item.kind == item_kind::PART {
                park::<E, R>(item, &acc, self.warpgroup, self.thread);
            } else {
                if item.kind == item_kind::OWNER {
                    self.add_parts(item.parts, &mut acc);
                }
                for i in 0..R / 4 {
                    scale_group::<E>(&mut acc[4 * i..4 * i + 4], exponents);
                }
                let maps: *const TensorMap = (&raw const (*E::params()).maps).cast();
                let at = [item.m0 + self.warpgroup * 64, item.n0];
                store::<E::Output, R>(&self.ring, maps.add(item.c_map as usize), &acc, at, self.warpgroup, self.thread);
            }
        }
    }

    /// All k-blocks of an item; `A_MN` = 1: A is MN-major.
    ///
    /// # Safety
    /// As [`Consumer::tile`]; `k_blocks > 0`.
    #[inline(always)]
    unsafe fn sum<O: Operand, const A_MN: u32, const R: usize>(&mut self, acc: &mut [f32; R], k_blocks: u32) {
        // SAFETY: the caller's.
        unsafe {
            if O::PROMOTED {
                self.multiply_promoted::<O, A_MN, R>(acc, k_blocks);
            } else {
                self.multiply::<O, A_MN, R>(acc, k_blocks);
            }
        }
    }

    /// First of this thread's two accumulator rows, relative to the tile; the other is 8 further.
    #[inline(always)]
    fn row(&self) -> u32 {
        self.warpgroup * 64 + (self.thread / 32) * 16 + self.thread % 32 / 4
    }

    /// All k-blocks of an item of two parts, each [`PROMOTE_K_BLOCKS`] of them summed by the matrix units, the sums by fp32 additions.
    ///
    /// # Safety
    /// As [`Consumer::tile`]; `k_blocks > 0`.
    #[inline(always)]
    unsafe fn multiply_promoted<O: Operand, const A_MN: u32, const R: usize>(
        &mut self,
        total: &mut [f32; R],
        mut k_blocks: u32,
    ) {
        let mut acc = [0f32; R];
        // The second warpgroup promotes half a period later: while one adds and its wgmma have run dry, the other has the matrix units.
        let mut count = PROMOTE_K_BLOCKS >> self.warpgroup;
        loop {
            count = if count < k_blocks { count } else { k_blocks };
            // SAFETY: as the caller promises; `count` is not 0.
            unsafe { self.multiply_parts::<O, A_MN, R>(&mut acc, count) };
            for i in 0..R {
                total[i] += acc[i];
            }
            k_blocks -= count;
            if k_blocks == 0 {
                break;
            }
            count = PROMOTE_K_BLOCKS;
        }
    }

    /// `k_blocks` k-blocks of an item, from 0.
    ///
    /// # Safety
    /// As [`Consumer::tile`]; `k_blocks > 0`.
    #[inline(always)]
    unsafe fn multiply<O: Operand, const A_MN: u32, const R: usize>(&mut self, acc: &mut [f32; R], k_blocks: u32) {
        let thread = self.thread;
        let ring = &mut self.ring;
        let mut previous = ring.unreleased();
        // SAFETY: the stage is full before it is read; a stage is released when the wgmma that read it have finished; the accumulators are
        // pinned after the last wait.
        unsafe {
            for i in 0..k_blocks {
                ring.wait_full();
                let a = descriptor(ring.a() + self.warpgroup * CHUNK_BYTES);
                let b = descriptor(ring.b());
                wgmma_fence();
                multiply_k_block::<O, A_MN, R>(acc, a, b, i);
                wgmma_commit();
                // One group stays in flight: the block before it is finished, its stage can be filled again. No branch on `i`: LLVM
                // would peel the first round off, and ptxas (C7519) does not like the copies of accumulators that this makes.
                wgmma_wait::<1>();
                previous.release(thread, i > 0);
                previous = ring.unreleased();
                ring.advance();
            }
            wgmma_wait::<0>();
            previous.release(thread, true);
            for x in acc.iter_mut() {
                pin(x);
            }
        }
    }

    /// [`Consumer::multiply`] for operands of two parts. A k-block is two stages, (low A, high B) and (high A, low B), and three groups of wgmma:
    /// low A by high B, high A by high B, high A by low B.
    ///
    /// # Safety
    /// As [`Consumer::tile`]; `k_blocks > 0`.
    #[inline(always)]
    unsafe fn multiply_parts<O: Operand, const A_MN: u32, const R: usize>(
        &mut self,
        acc: &mut [f32; R],
        k_blocks: u32,
    ) {
        let thread = self.thread;
        let ring = &mut self.ring;
        let mut previous = ring.unreleased();
        // SAFETY: a stage is full before it is read; the first is released when its two groups of wgmma have finished, the second when the
        // third group has, one k-block later; the accumulators are pinned after the last wait.
        unsafe {
            for i in 0..k_blocks {
                ring.wait_full();
                let a_low = descriptor(ring.a() + self.warpgroup * CHUNK_BYTES);
                let b_high = descriptor(ring.b());
                let first = ring.unreleased();
                wgmma_fence();
                multiply_k_block::<O, A_MN, R>(acc, a_low, b_high, i);
                wgmma_commit();
                // All of the block before is finished. No branch on `i`, as in `multiply`.
                wgmma_wait::<1>();
                previous.release(thread, i > 0);
                ring.advance();
                ring.wait_full();
                let a_high = descriptor(ring.a() + self.warpgroup * CHUNK_BYTES);
                let b_low = descriptor(ring.b());
                previous = ring.unreleased();
                wgmma_fence();
                multiply_k_block::<O, A_MN, R>(acc, a_high, b_high, 1);
                wgmma_commit();
                wgmma_fence();
                multiply_k_block::<O, A_MN, R>(acc, a_high, b_low, 1);
                wgmma_commit();
                // Nothing in flight reads the first stage any more.
                wgmma_wait::<1>();
                first.release(thread, true);
                ring.advance();
            }
            wgmma_wait::<0>();
            previous.release(thread, true);
            for x in acc.iter_mut() {
                pin(x);
            }
        }
    }

    /// Owner: adds the parts in order, 64 columns a stage, `[warpgroup][8 groups]`.
    ///
    /// # Safety
    /// As [`Consumer::tile`].
    #[inline(always)]
    unsafe fn add_parts<const R: usize>(&mut self, parts: u32, acc: &mut [f32; R]) {
        for _ in 0..parts {
            for q in 0..R / 32 {
                // SAFETY: the stage is full, with 2 x 8 groups.
                unsafe {
                    self.ring.wait_full();
                    for g in 0..8 {
                        let from = self.ring.a() + (self.warpgroup * 8 + g as u32) * GROUP_BYTES + self.thread * 16;
                        let v = lds128(from);
                        for e in 0..4 {
                            acc[32 * q + 4 * g + e] += f32::from_bits(v[e]);
                        }
                    }
                    self.release_read_stage();
                }
            }
        }
    }

    /// A reduce item: adds all parts of some columns in order, scales and writes them.
    ///
    /// # Safety
    /// As [`Consumer::tile`].
    #[inline(always)]
    pub unsafe fn reduce<E: Entry>(&mut self, item: &Item) {
        let step = groups_per_stage(item.parts);
        let row = item.m0 + self.row();
        let column = item.n0 + item.k0 * 8 + (self.thread % 4) * 2;
        // SAFETY: the stage holds `[part][warpgroup][step groups]`; stores are inside C's rows, and tiles cover its columns exactly.
        unsafe {
            if E::CONVERTS {
                // The exponents are there when the parts are.
                self.ring.wait_full();
            }
            let product = product::<E>(item);
            let exponents = row_exponents::<E>(product, row);
            let pitch = (*product).c_pitch_bytes as usize;
            let rows = (*product).rows;
            let mut to = (*product).c.wrapping_add(row as usize * pitch + (column * E::Output::ELEMENT_BYTES) as usize);
            let mut done = 0;
            while done < item.k_blocks {
                self.ring.wait_full();
                for g in 0..step {
                    let mut from = self.ring.a() + (self.warpgroup * step + g) * GROUP_BYTES + self.thread * 16;
                    let mut sum = lds128(from).map(f32::from_bits);
                    for _ in 1..item.parts {
                        from += 2 * step * GROUP_BYTES;
                        let v = lds128(from);
                        for e in 0..4 {
                            sum[e] += f32::from_bits(v[e]);
                        }
                    }
                    scale_group::<E>(&mut sum, exponents);
                    E::Output::write_pair_if(row < rows, to, sum[0], sum[1]);
                    E::Output::write_pair_if(row + 8 < rows, to.wrapping_add(8 * pitch), sum[2], sum[3]);
                    to = to.wrapping_add(8 * E::Output::ELEMENT_BYTES as usize);
                }
                self.release_read_stage();
                done += step;
            }
        }
    }
}

/// The wgmma of a k-block: `acc = a[64, 64] b[64, 2 R] (+ acc unless accumulate is 0)`.
///
/// # Safety
/// As the wgmma functions.
#[inline(always)]
unsafe fn multiply_k_block<O: Operand, const A_MN: u32, const R: usize>(
    acc: &mut [f32; R],
    a: u64,
    b: u64,
    accumulate: u32,
) {
    let step_a = k16_step(A_MN == 1);
    let step_b = k16_step(true);
    // SAFETY: the caller's.
    unsafe {
        O::multiply::<A_MN, R>(acc, a, b, accumulate);
        O::multiply::<A_MN, R>(acc, a + step_a, b + step_b, 1);
        O::multiply::<A_MN, R>(acc, a + 2 * step_a, b + 2 * step_b, 1);
        O::multiply::<A_MN, R>(acc, a + 3 * step_a, b + 3 * step_b, 1);
    }
}

/// The item's product.
///
/// # Safety
/// The item's product is in use.
#[inline(always)]
pub(super) unsafe fn product<E: Entry>(item: &Item) -> *const WgmmaProduct {
    let products: *const WgmmaProduct = {
        // SAFETY: takes an address.
        unsafe { (&raw const (*E::params()).products).cast() }
    };
    products.wrapping_add(item.product as usize)
}
