//! Portable grouped GEMM: mma.sync m16n8k16 on ldmatrix fragments, fed by a cp.async ring.
//!
//! **Formula.** For every product of [`GemmParams`]: `C[m, n] = 2^(row_exponents[m] + exponent) * sum over segments s of A_s[m, k] B_s[k, n]`.
//! A is K-major (dgrad) or MN-major (wgrad), B is MN-major. `k = 0` gives zeros. A product may ask the device how much of its k counts
//! (`k_limit`): the number of tokens, in operation A's weight gradients, whose padding rows may hold anything. With `splits > 1` the blocks of a split write their
//! unscaled sums to `partials` instead, and `gemm_reduce` finishes C.
//!
//! **Entries.** `gemm_bf16`, `gemm_f16`: 16-bit operands, sums in the matrix unit's fp32 accumulators. `gemm_f16_promoted`: every
//! [`PROMOTE_K`] of k the accumulators are added (fp32, to nearest) to totals and cleared. Matrix units truncate when they accumulate, an
//! error that grows with the number of additions; here at most `PROMOTE_K / 16` truncating additions meet in one sum. The totals are kept
//! in C itself (or in `partials`), unscaled until the last addition: a second set of registers would halve the warp tiles, which was
//! measured at 0.6 of the rate. Segments are summed in order.
//!
//! **Grid.** One block per (product, split, tile of 128 x 128), products in the order of the parameters; `schedule::grouped` maps block index to work.
//! **Block.** 128 threads, 2 x 2 warps of 64 x 64, all of which copy and multiply; two blocks per SM.
//!
//! **Shared memory** (dynamic, `SMEM_BYTES` = 98,304, within the 99 KiB that every device since compute capability 8.0 grants):
//! ```text
//! stage s = 0..3 at 32,768 s: A tile   0 .. 16,384   (128 m x 64 k)
//!                             B tile 16,384 .. 32,768   (64 k x 128 n)      layouts: tile::gemm_tile
//! ```
//! **Ring.** k-block `i` lives in stage `i % 3`. One barrier a k-block, placed before the last of its four k-steps: behind it, the next stage
//! has arrived for all threads, and all fragments of the current stage are in registers, so the next copy may overwrite the stage before. The
//! fragments of a k-step are read one k-step ahead, across k-blocks too. Barriers in PTX: two for each layout of A.
//!
//! **Registers** (ptxas 13.0, no spills, no stack), accumulators and the two buffers of fragments among them:
//! ```text
//!                        sm_80  sm_90a  accumulators  fragments
//! gemm_bf16, gemm_f16      254     229           128     2 x 32
//! gemm_f16_promoted        255     232           128     2 x 32
//! ```
//!
//! **Preconditions.** `lda`, `ldb`, `ldc`, `n` are multiples of 8; `k` (K-major A) or `m` (MN-major A) is a multiple of 8; A, B, C and `partials`
//! are 16-byte aligned; `m, n > 0`; `num_segments <= 3`; blocks of the launch = the sum of the products' blocks. Elements beyond the given
//! extents are neither read nor written, so m and n may end inside a tile, k inside a k-block (filled up with zeros).
//!
//! **Rounding.** Products are exact; sums as above. The scale is applied in fp32 as two powers of two, so that nothing over- or underflows
//! that the result would not. bf16 output is rounded once, to nearest even.
use cuda_std::kernel;
use cuda_std::shared::dynamic_base;
use cuda_std::thread::{block_idx_x, sync_threads, thread_idx_x};

use crate::config::gemm::*;
use crate::params::{GemmParams, MAX_SEGMENTS, Major, OutputType, Product};
use crate::ptx::convert::{bf16x2, select};
use crate::ptx::copy::{cp_async_commit, cp_async_wait, cp_async16};
use crate::ptx::matrix::{ldmatrix_x4, ldmatrix_x4_trans, mma_bf16, mma_f16};
use crate::ptx::memory::{ldg32_or, ldg32_s32, ldg128_written_or_zero, stg64_if, stg128_if};
use crate::ptx::sync::{shfl_xor, tid_again};
use crate::schedule::grouped::{Tile, segment_blocks, segment_of_block, split_start, tile_of_block, tiles_m, tiles_n};
use crate::tile::gemm_tile::{
    K_MAJOR_PIECES, MN_MAJOR_PIECES, PIECES, a_k_major_lane, a_mn_major_lane, b_mn_major_lane, k_major_offset,
    mn_major_offset,
};
use crate::tile::layout::ROW_BYTES;
use crate::tile::power_of_two::power_of_two_halves;

/// k-steps of a k-block.
const K_STEPS: usize = TILE_K as usize / 16;
const _: () = assert!(K_STEPS.is_multiple_of(2), "fragments alternate between two buffers across k-blocks");

/// k-blocks between promotions.
const PROMOTE_BLOCKS: u32 = PROMOTE_K / TILE_K;

/// bf16 operands, fp32 accumulators.
///
/// # Safety
/// As the head says; pointers are valid for the extents given.
#[kernel(max_threads = THREADS, min_blocks_per_sm = BLOCKS_PER_SM, barriers = 4)]
pub unsafe fn gemm_bf16(params: GemmParams) {
    // SAFETY: the caller's.
    unsafe { gemm::<Bf16, false>(&params) }
}

/// f16 operands, fp32 accumulators.
///
/// # Safety
/// As the head says; pointers are valid for the extents given.
#[kernel(max_threads = THREADS, min_blocks_per_sm = BLOCKS_PER_SM, barriers = 4)]
pub unsafe fn gemm_f16(params: GemmParams) {
    // SAFETY: the caller's.
    unsafe { gemm::<F16, false>(&params) }
}

/// f16 operands, accumulators promoted to fp32 totals in C every [`PROMOTE_K`] of k; C is fp32.
///
/// # Safety
/// As the head says; pointers are valid for the extents given.
#[kernel(max_threads = THREADS, min_blocks_per_sm = BLOCKS_PER_SM, barriers = 4)]
pub unsafe fn gemm_f16_promoted(params: GemmParams) {
    // SAFETY: the caller's.
    unsafe { gemm::<F16, true>(&params) }
}

/// Operand type of the matrix unit.
trait Operand {
    /// `d += a * b`, m16n8k16.
    ///
    /// # Safety
    /// All lanes of the warp arrive.
    unsafe fn mma(d: &mut [f32; 4], a: [u32; 4], b0: u32, b1: u32);
}

struct Bf16;
impl Operand for Bf16 {
    #[inline(always)]
    unsafe fn mma(d: &mut [f32; 4], a: [u32; 4], b0: u32, b1: u32) {
        // SAFETY: the caller's.
        unsafe { mma_bf16(d, a, b0, b1) }
    }
}

struct F16;
impl Operand for F16 {
    #[inline(always)]
    unsafe fn mma(d: &mut [f32; 4], a: [u32; 4], b0: u32, b1: u32) {
        // SAFETY: the caller's.
        unsafe { mma_f16(d, a, b0, b1) }
    }
}

/// 16-column pairs of a warp's 64 x 64 of C.
const PAIRS: usize = 4;
const _: () = assert!(THREADS == 4 * 32 && TILE_M == 2 * 64 && TILE_N == 2 * 16 * PAIRS as u32);

/// A warp's 64 x 64 of C: 16-row tile, 16-column pair, 8-column tile of the pair, registers of m16n8.
type Accumulators = [[[[f32; 4]; 2]; PAIRS]; 4];
const ZERO: Accumulators = [[[[0.0; 4]; 2]; PAIRS]; 4];

/// A thread's place: its warp's corner in the tile, and its lane.
#[derive(Clone, Copy)]
struct Place {
    thread: u32,
    lane: u32,
    m: u32,
    n: u32,
}

impl Place {
    #[inline(always)]
    fn new(thread: u32) -> Place {
        let warp = thread / 32;
        Place { thread, lane: thread % 32, m: 64 * (warp % 2), n: 64 * (warp / 2) }
    }
}

/// One operand's copies by one thread, of any k-block: rows of the tile that are `step_rows` apart, one 16-byte piece of each.
#[derive(Clone, Copy)]
struct Copies {
    /// Offset of the first piece in the operand's tile.
    offset: u32,
    /// Rows between two pieces.
    step_rows: u32,
    /// Bytes in global memory between two pieces.
    step_bytes: u64,
    /// Bytes in global memory between two k-blocks.
    block_bytes: u64,
    /// Bytes from the operand's first element to the first piece of k-block 0.
    first_bytes: u64,
}

impl Copies {
    /// Starts the copies of one k-block into the tile at `tile`: those pieces `i` with `i * step_rows < limit`, zeros elsewhere.
    ///
    /// # Safety
    /// The tile is free and the pieces within the limit are readable.
    #[inline(always)]
    unsafe fn start(&self, tile: u32, source: *const u8, limit: u32) {
        let mut source = source;
        for i in 0..PIECES / THREADS {
            // SAFETY: the caller's; sources past the limit are not read.
            unsafe {
                cp_async16(tile + self.offset + i * self.step_rows * ROW_BYTES, source, i * self.step_rows < limit)
            };
            source = source.wrapping_add(self.step_bytes as usize);
        }
    }

    /// Of an MN-major operand, whose pitch is `pitch` elements and whose tile starts at column `first`.
    #[inline(always)]
    fn mn_major(place: Place, pitch: u32, first: u32) -> Copies {
        let (k, piece) = (place.thread / MN_MAJOR_PIECES, place.thread % MN_MAJOR_PIECES);
        let step_rows = THREADS / MN_MAJOR_PIECES;
        Copies {
            offset: mn_major_offset(k, piece),
            step_rows,
            step_bytes: 2 * step_rows as u64 * pitch as u64,
            block_bytes: 2 * TILE_K as u64 * pitch as u64,
            first_bytes: 2 * (k as u64 * pitch as u64 + (first + 8 * piece) as u64),
        }
    }

    /// Rows of k that [`Copies::mn_major`]'s pieces reach into `left` of k, none if the piece's column is past `extent`.
    #[inline(always)]
    fn mn_major_limit(place: Place, first: u32, extent: u32, left: u32) -> u32 {
        let (k, piece) = (place.thread / MN_MAJOR_PIECES, place.thread % MN_MAJOR_PIECES);
        if first + 8 * piece < extent { left.saturating_sub(k) } else { 0 }
    }
}

/// How A lies in memory.
trait LayoutA {
    /// A thread's copies of a tile whose first row of C is `first`.
    fn copies(place: Place, pitch: u32, first: u32) -> Copies;
    /// Limit of its copies where `left` of k are left in the segment.
    fn limit(place: Place, first: u32, m: u32, left: u32) -> u32;
    /// The lane's offset for reading the warp's fragments.
    fn lane_offset(place: Place) -> u32;
    /// The four 16 x 16 fragments of k-step `step`, `at` = address of the tile + lane's offset.
    ///
    /// # Safety
    /// All lanes of the warp arrive; the stage has been waited for.
    unsafe fn fragments(at: u32, step: u32) -> [[u32; 4]; 4];
}

struct KMajor;
impl LayoutA for KMajor {
    #[inline(always)]
    fn copies(place: Place, pitch: u32, first: u32) -> Copies {
        let (row, piece) = (place.thread / K_MAJOR_PIECES, place.thread % K_MAJOR_PIECES);
        let step_rows = THREADS / K_MAJOR_PIECES;
        Copies {
            offset: k_major_offset(row, piece),
            step_rows,
            step_bytes: 2 * step_rows as u64 * pitch as u64,
            block_bytes: 2 * TILE_K as u64,
            first_bytes: 2 * ((first + row) as u64 * pitch as u64 + 8 * piece as u64),
        }
    }
    #[inline(always)]
    fn limit(place: Place, first: u32, m: u32, left: u32) -> u32 {
        let (row, piece) = (place.thread / K_MAJOR_PIECES, place.thread % K_MAJOR_PIECES);
        if 8 * piece < left { m.saturating_sub(first + row) } else { 0 }
    }
    #[inline(always)]
    fn lane_offset(place: Place) -> u32 {
        a_k_major_lane(place.lane, place.m)
    }
    #[inline(always)]
    unsafe fn fragments(at: u32, step: u32) -> [[u32; 4]; 4] {
        let mut a = [[0; 4]; 4];
        for (i, a) in a.iter_mut().enumerate() {
            // SAFETY: the caller's.
            *a = unsafe { ldmatrix_x4((at ^ (32 * step)) + 16 * i as u32 * ROW_BYTES) };
        }
        a
    }
}

struct MnMajor;
impl LayoutA for MnMajor {
    #[inline(always)]
    fn copies(place: Place, pitch: u32, first: u32) -> Copies {
        Copies::mn_major(place, pitch, first)
    }
    #[inline(always)]
    fn limit(place: Place, first: u32, m: u32, left: u32) -> u32 {
        Copies::mn_major_limit(place, first, m, left)
    }
    #[inline(always)]
    fn lane_offset(place: Place) -> u32 {
        a_mn_major_lane(place.lane, place.m)
    }
    #[inline(always)]
    unsafe fn fragments(at: u32, step: u32) -> [[u32; 4]; 4] {
        let mut a = [[0; 4]; 4];
        for (i, a) in a.iter_mut().enumerate() {
            // SAFETY: the caller's.
            *a = unsafe { ldmatrix_x4_trans((at ^ (32 * i as u32)) + 16 * step * ROW_BYTES) };
        }
        a
    }
}

/// The 16 x 16 fragments of B of k-step `step`, `at` = address of the tile + lane's offset.
///
/// # Safety
/// All lanes of the warp arrive; the stage has been waited for.
#[inline(always)]
unsafe fn fragments_b(at: u32, step: u32) -> [[u32; 4]; PAIRS] {
    let mut b = [[0; 4]; PAIRS];
    for (j, b) in b.iter_mut().enumerate() {
        // SAFETY: the caller's.
        *b = unsafe { ldmatrix_x4_trans((at ^ (32 * j as u32)) + 16 * step * ROW_BYTES) };
    }
    b
}

/// One product of the parameters.
///
/// rustc hands the parameters over as plain values: an index known only at run time would copy all of them to local memory. So a field is
/// selected among all products' by comparisons, where it is needed: ptxas reads them from the constant bank, and none occupies a register for long.
#[derive(Clone, Copy)]
pub(super) struct Selected<'a> {
    params: &'a GemmParams,
    index: u32,
}

impl<'a> Selected<'a> {
    /// Product `index` of `params`.
    #[inline(always)]
    pub(super) fn new(params: &'a GemmParams, index: u32) -> Selected<'a> {
        Selected { params, index }
    }

    /// The product whose blocks hold `block`.
    #[inline(always)]
    fn of_block(params: &'a GemmParams, block: u32) -> Selected<'a> {
        let mut index = 0;
        for (i, product) in params.products.iter().enumerate().skip(1) {
            if (i as u32) < params.num_products && block >= product.first_block {
                index = i as u32;
            }
        }
        Selected { params, index }
    }

    /// A field, or a value made of fields.
    #[inline(always)]
    pub(super) fn get<T: Copy>(self, field: impl Fn(&Product) -> T) -> T {
        let mut value = field(&self.params.products[0]);
        for (i, product) in self.params.products.iter().enumerate().skip(1) {
            if i as u32 == self.index {
                value = field(product);
            }
        }
        value
    }

    /// k of a segment, as far as the device lets it be summed.
    ///
    /// # Safety
    /// The limit, where given, is readable, and nothing writes it during the launch.
    #[inline(always)]
    unsafe fn limited_k(self) -> u32 {
        let (k, limit) = self.get(|p| (p.k, p.k_limit));
        // SAFETY: the caller's. A negative limit is a large one.
        k.min(unsafe { ldg32_or(limit, !limit.is_null(), k) })
    }

    /// A and B of a segment; those of some other one past the last. One comparison of (product, segment) each: the choice of a product
    /// alone would be hoisted out of the main loop and hold a register for each pointer.
    #[inline(always)]
    fn operands(self, segment: u32) -> (*const u8, *const u8) {
        let key = self.index * MAX_SEGMENTS as u32 + segment;
        let (mut a, mut b) = (self.params.products[0].a[0], self.params.products[0].b[0]);
        for (i, product) in self.params.products.iter().enumerate() {
            for s in 0..MAX_SEGMENTS {
                if key == (i * MAX_SEGMENTS + s) as u32 {
                    (a, b) = (product.a[s], product.b[s]);
                }
            }
        }
        (a as *const u8, b as *const u8)
    }

    /// `2^(row_exponents[row] + exponent)` as two factors.
    ///
    /// # Safety
    /// `row < m`.
    #[inline(always)]
    pub(super) unsafe fn row_scale(self, row: u32) -> (f32, f32) {
        let (row_exponents, all) = self.get(|p| (p.row_exponents, p.exponent));
        let mut exponent = 0i32;
        // SAFETY: the arrays, where given, hold `m` and one elements.
        unsafe {
            if !row_exponents.is_null() {
                exponent = ldg32_s32(row_exponents.wrapping_add(row as usize));
            }
            if !all.is_null() {
                exponent = exponent.wrapping_add(ldg32_s32(all));
            }
        }
        power_of_two_halves(exponent)
    }
}

/// Both operands' copies of a range of k-blocks, in order.
struct Loader<'a> {
    product: Selected<'a>,
    /// Extents of the product.
    m: u32,
    n: u32,
    k: u32,
    place: Place,
    /// First row and column of the tile in C.
    first: (u32, u32),
    a: Copies,
    b: Copies,
    /// Of the next k-block: its segment, what is left of the segment's k, and the thread's first pieces.
    segment: u32,
    left: u32,
    a_source: *const u8,
    b_source: *const u8,
}

impl<'a> Loader<'a> {
    /// Starts at k-block `block` of all segments of depth `k` together.
    #[inline(always)]
    fn new<A: LayoutA>(product: Selected<'a>, place: Place, first: (u32, u32), k: u32, block: u32) -> Loader<'a> {
        let (m, n) = product.get(|p| (p.m, p.n));
        let a = A::copies(place, product.get(|p| p.lda), first.0);
        let b = Copies::mn_major(place, product.get(|p| p.ldb), first.1);
        let (segment, within) = segment_of_block(block, segment_blocks(k));
        let (a_source, b_source) = (core::ptr::null(), core::ptr::null());
        let mut loader = Loader { product, m, n, k, place, first, a, b, segment, left: 0, a_source, b_source };
        loader.enter_segment();
        loader.left = k - within * TILE_K;
        loader.a_source = loader.a_source.wrapping_add((within as u64 * a.block_bytes) as usize);
        loader.b_source = loader.b_source.wrapping_add((within as u64 * b.block_bytes) as usize);
        loader
    }

    /// Points to the first k-block of `self.segment`.
    #[inline(always)]
    fn enter_segment(&mut self) {
        let (a, b) = self.product.operands(self.segment);
        self.left = self.k;
        self.a_source = a.wrapping_add(self.a.first_bytes as usize);
        self.b_source = b.wrapping_add(self.b.first_bytes as usize);
    }

    /// Starts the copies of the next k-block into the stage at `stage`.
    ///
    /// # Safety
    /// There is such a k-block, and the stage is free.
    #[inline(always)]
    unsafe fn start<A: LayoutA>(&mut self, stage: u32) {
        let a_limit = A::limit(self.place, self.first.0, self.m, self.left);
        let b_limit = Copies::mn_major_limit(self.place, self.first.1, self.n, self.left);
        // SAFETY: the limits hold the copies inside the operands.
        unsafe {
            self.a.start(stage, self.a_source, a_limit);
            self.b.start(stage + OPERAND_BYTES, self.b_source, b_limit);
        }
        if self.left > TILE_K {
            self.left -= TILE_K;
            self.a_source = self.a_source.wrapping_add(self.a.block_bytes as usize);
            self.b_source = self.b_source.wrapping_add(self.b.block_bytes as usize);
        } else {
            self.segment += 1;
            self.enter_segment();
        }
    }
}

/// The stage after the one at `stage`, of a ring from `first` to `last`.
#[inline(always)]
fn next_stage(stage: u32, first: u32, last: u32) -> u32 {
    if stage == last { first } else { stage + STAGE_BYTES }
}

/// The block's sums over k-blocks `blocks.0 .. blocks.1` of segments of depth `k`, this warp's part. Promoted: of the last [`PROMOTE_BLOCKS`] at most; if there
/// are more, the sums of those before are in the output.
///
/// # Safety
/// All threads of the block arrive; the head's preconditions.
#[inline(always)]
unsafe fn multiply<O: Operand, A: LayoutA, const PROMOTED: bool>(
    product: Selected,
    place: Place,
    tile: Tile,
    k: u32,
    blocks: (u32, u32),
) -> Accumulators {
    let mut sums = ZERO;
    let count = blocks.1 - blocks.0;
    let ring = dynamic_base();
    let ring_end = ring + (STAGES - 1) * STAGE_BYTES;
    // After its last k-block a block reads fragments of a next one, which it does not use. Few k-blocks use few stages: it reads one of those.
    let last_filled = ring + (count.clamp(1, STAGES) - 1) * STAGE_BYTES;
    let mut loader = Loader::new::<A>(product, place, first_of(tile), k, blocks.0);
    let (a_lane, b_lane) = (A::lane_offset(place), OPERAND_BYTES + b_mn_major_lane(place.lane, place.n));
    // SAFETY: a stage is overwritten after the barrier behind which nobody reads it, and read after the barrier that all threads
    // reach when their copies to it have arrived. Every thread runs the same number of k-blocks.
    unsafe {
        if PROMOTED && count == 0 {
            // Zeros for the first fragments, which are read in any case: a condition of the outer loop would cost spills.
            loader.a.start(ring, core::ptr::null(), 0);
            loader.b.start(ring + OPERAND_BYTES, core::ptr::null(), 0);
        }
        let mut write = ring;
        let mut loaded = 0;
        while loaded < STAGES - 1 {
            if loaded < count {
                loader.start::<A>(write);
            }
            cp_async_commit();
            write = next_stage(write, ring, ring_end);
            loaded += 1;
        }
        cp_async_wait::<{ STAGES - 2 }>();
        sync_threads();
        let mut read = ring;
        let mut done = 0;
        while PROMOTED || count > 0 {
            // Read here, not carried over: a promotion then has the fragments' registers for itself.
            let mut a = [A::fragments(read + a_lane, 0), [[0; 4]; 4]];
            let mut b = [fragments_b(read + b_lane, 0), [[0; 4]; PAIRS]];
            while done < count {
                for step in 0..K_STEPS {
                    if step == K_STEPS - 1 {
                        cp_async_wait::<{ STAGES - 2 }>();
                        sync_threads();
                        read = next_stage(read, ring, last_filled);
                    }
                    let (now, next, next_step) = (step % 2, (step + 1) % 2, ((step + 1) % K_STEPS) as u32);
                    a[next] = A::fragments(read + a_lane, next_step);
                    b[next] = fragments_b(read + b_lane, next_step);
                    if step == 0 {
                        if done + (STAGES - 1) < count {
                            loader.start::<A>(write);
                        }
                        cp_async_commit();
                        write = next_stage(write, ring, ring_end);
                    }
                    for i in 0..4 {
                        for j in 0..PAIRS {
                            O::mma(&mut sums[i][j][0], a[now][i], b[now][j][0], b[now][j][1]);
                            O::mma(&mut sums[i][j][1], a[now][i], b[now][j][2], b[now][j][3]);
                        }
                    }
                }
                done += 1;
                if PROMOTED && done % PROMOTE_BLOCKS == 0 {
                    break;
                }
            }
            if !PROMOTED || done >= count {
                break;
            }
            let output = Output { scaled: false, ..Output::new(product, tile.split) };
            store::<false, PROMOTED>(product, &output, place, tile, &sums, done > PROMOTE_BLOCKS);
            sums = ZERO;
        }
    }
    sums
}

/// Where and how a block writes its tile.
struct Output {
    /// First element.
    c: *mut u8,
    /// Rows and columns.
    m: u32,
    n: u32,
    /// Row pitch in elements.
    pitch: u32,
    /// bf16, else fp32.
    bf16: bool,
    /// Scaled: sums of all of K.
    scaled: bool,
}

impl Output {
    /// C, or `split`'s partials.
    #[inline(always)]
    fn new(product: Selected, split: u32) -> Output {
        let (m, n) = product.get(|p| (p.m, p.n));
        if product.get(|p| p.splits) > 1 {
            let first = split as u64 * m as u64 * n as u64;
            let c = (product.get(|p| p.partials) as *mut u8).wrapping_add(4 * first as usize);
            return Output { c, m, n, pitch: n, bf16: false, scaled: false };
        }
        let (c, pitch) = product.get(|p| (p.c, p.ldc));
        Output { c, m, n, pitch, bf16: product.get(|p| p.c_type) == OutputType::Bf16 as u32, scaled: true }
    }
}

/// Between neighbouring lanes: the even lane ends with both lanes' `even`, the odd one with both lanes' `odd`, the even lane's first.
///
/// # Safety
/// All lanes of the warp arrive.
#[inline(always)]
unsafe fn exchange(is_odd: bool, even: u32, odd: u32) -> [u32; 2] {
    let (kept, sent) = (select(is_odd, odd, even), select(is_odd, even, odd));
    // SAFETY: the caller's.
    let got = unsafe { shfl_xor::<1>(f32::from_bits(sent)) }.to_bits();
    [select(is_odd, got, kept), select(is_odd, kept, got)]
}

/// Scales, rounds and writes the warp's part of the tile. Neighbouring lanes exchange halves of a 16-column pair, so that each lane
/// writes four columns in a row and a warp full 32-byte sectors. Promoted: what the lane wrote there before is added first, if it did.
///
/// # Safety
/// All lanes of the warp arrive; C as the head says.
#[inline(always)]
unsafe fn store<const BF16: bool, const PROMOTED: bool>(
    product: Selected,
    output: &Output,
    place: Place,
    tile: Tile,
    sums: &Accumulators,
    promoted: bool,
) {
    // Read anew: addresses that follow from it are then not kept in registers since the last promotion.
    let place = if PROMOTED { Place::new(tid_again()) } else { place };
    let first = first_of(tile);
    let is_odd = place.lane % 2 == 1;
    let column = first.1 + place.n + 8 * (place.lane % 2) + 4 * (place.lane % 4 / 2);
    for (i, sums) in sums.iter().enumerate() {
        let row = |h: usize| first.0 + place.m + (16 * i + 8 * h) as u32 + place.lane / 4;
        let inside = |h: usize, j: usize| row(h) < output.m && column + 16 * (j as u32) < output.n;
        let at = |h: usize, j: usize| row(h) as u64 * output.pitch as u64 + (column + 16 * j as u32) as u64;
        // SAFETY: the row is held inside C for the exponent; loads and stores are predicated by row and column, and no other thread
        // writes these elements.
        unsafe {
            for h in 0..2 {
                let mut before = [[0u32; 4]; PAIRS];
                for (j, before) in before.iter_mut().enumerate().filter(|_| PROMOTED) {
                    let source = output.c.wrapping_add(4 * at(h, j) as usize);
                    *before = ldg128_written_or_zero(source, promoted && inside(h, j));
                }
                let scale = if output.scaled { product.row_scale(row(h).min(output.m - 1)) } else { (1.0, 1.0) };
                for (j, pair) in sums.iter().enumerate() {
                    let x = pair.map(|tile| [tile[2 * h], tile[2 * h + 1]]);
                    if BF16 {
                        let [even, odd] = x.map(|x| {
                            let [a, b] = x.map(|x| x * scale.0 * scale.1);
                            bf16x2(a, b)
                        });
                        let [low, high] = exchange(is_odd, even, odd);
                        stg64_if(inside(h, j), output.c.wrapping_add(2 * at(h, j) as usize), low, high);
                    } else {
                        let [even, odd] = x.map(|x| x.map(f32::to_bits));
                        let (one, two) = (exchange(is_odd, even[0], odd[0]), exchange(is_odd, even[1], odd[1]));
                        let own = [one[0], two[0], one[1], two[1]];
                        let mut words = [0; 4];
                        for e in 0..4 {
                            let own = f32::from_bits(own[e]);
                            let sum = if PROMOTED { own + f32::from_bits(before[j][e]) } else { own };
                            words[e] = (sum * scale.0 * scale.1).to_bits();
                        }
                        let c = output.c.wrapping_add(4 * at(h, j) as usize);
                        stg128_if(inside(h, j), c, words);
                    }
                }
            }
        }
    }
}

/// First row and column of a tile in C.
#[inline(always)]
fn first_of(tile: Tile) -> (u32, u32) {
    (tile.tile_m * TILE_M, tile.tile_n * TILE_N)
}

/// One block.
///
/// # Safety
/// As the head says.
#[inline(always)]
unsafe fn gemm<O: Operand, const PROMOTED: bool>(params: &GemmParams) {
    let product = Selected::of_block(params, block_idx_x());
    let (m, n, splits, first_block) = product.get(|p| (p.m, p.n, p.splits, p.first_block));
    let tile = tile_of_block(block_idx_x() - first_block, tiles_m(m), tiles_n(n));
    // SAFETY: the caller's.
    let k = unsafe { product.limited_k() };
    let all_blocks = product.get(|p| p.num_segments) * segment_blocks(k);
    let blocks = (split_start(tile.split, splits, all_blocks), split_start(tile.split + 1, splits, all_blocks));
    let place = Place::new(thread_idx_x());
    // SAFETY: all conditions are the same in the whole block.
    unsafe {
        let sums = if product.get(|p| p.a_major) == Major::K as u32 {
            multiply::<O, KMajor, PROMOTED>(product, place, tile, k, blocks)
        } else {
            multiply::<O, MnMajor, PROMOTED>(product, place, tile, k, blocks)
        };
        let output = Output::new(product, tile.split);
        if !PROMOTED && output.bf16 {
            store::<true, false>(product, &output, place, tile, &sums, false);
        } else {
            store::<false, PROMOTED>(product, &output, place, tile, &sums, blocks.1 - blocks.0 > PROMOTE_BLOCKS);
        }
    }
}
