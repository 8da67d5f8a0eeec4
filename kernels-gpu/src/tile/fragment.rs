//! mma.sync fragments of fp16 tiles with power-of-two scales: loads, products, reductions and stores of one warp's 16 rows.
//!
//! Tiles are `[rows, 64]` fp16, 128-byte rows, swizzled ([`swizzle_128b`]); the maps from lanes to elements are in
//! [`lanes`](super::lanes). Every function here that is `unsafe` is a collective of the warp unless it says otherwise.
//!
//! Scales: a tile is multiplied by `2^e`, exactly, such that its largest finite magnitude lies below 2^15. Elements down to 2^-29 of the
//! largest keep 11 bits in fp16; below that, the absolute error is 2^-40 of the largest. Infinities and NaN do not count and
//! stay what they are.
use super::lanes::{
    moved_16_bit, moved_32_bit, summed_column, swizzled_down_then_right, swizzled_narrowed, swizzled_right_then_down,
};
use super::layout::{ROW_BYTES, swizzle_128b};
use crate::config::attention::HEAD_DIM;
use crate::ptx::convert::{bf16x2, f16x2, f16x2_to_f32, fma, max_abs_bf16x2, mul_bf16x2};
use crate::ptx::copy::cp_async16;
use crate::ptx::matrix::{ldmatrix_x4, ldmatrix_x4_trans, mma_f16};
use crate::ptx::memory::{ldg128_or_zero, lds32, lds128, stg128_if, sts64, sts128};
use crate::ptx::sync::{redux_max, shfl_xor, warp_sync};

/// Bytes of 16 rows of a tile.
pub const ROWS_16_BYTES: u32 = 16 * ROW_BYTES;
/// A `[16, 64]` accumulator: eight C fragments.
pub type Accumulator = [[f32; 4]; 8];
/// No sum yet.
pub const ZERO: Accumulator = [[0.0; 4]; 8];
/// Two neighbouring C fragments, `[16, 16]`.
pub type Pair = [[f32; 4]; 2];
/// 16 rows of 16-bit elements as a warp moves them, see [`moved_16_bit`].
pub type Rows16Bit = [[u32; 4]; 4];
/// 16 rows of 32-bit elements as a warp moves them, see [`moved_32_bit`].
pub type Rows32Bit = [[u32; 4]; 8];
/// B fragment word of a column of ones: `mma(a, ONES, ONES)` gives the row sums of `a`, exactly as rounded, in every column.
pub const ONES: u32 = 0x3c00_3c00;

/// A lane's byte offsets for ldmatrix, computed once a phase.
#[derive(Clone, Copy)]
pub struct Lanes {
    /// Index in the warp.
    pub lane: u32,
    right_then_down: u32,
    down_then_right: u32,
}

impl Lanes {
    /// Offsets of `lane`.
    #[inline(always)]
    pub fn new(lane: u32) -> Self {
        Lanes { lane, right_then_down: swizzled_right_then_down(lane), down_then_right: swizzled_down_then_right(lane) }
    }
}

/// `accumulator[16, 64] += a[16, 16] * B`, B = rows `16 j .. 16 j + 16` of the `[k][64]` tile at `tile`. The XOR is applied to the lane's
/// part alone, so that `j` ends up in the instruction's immediate offset.
///
/// # Safety
/// `tile` is a 128-byte aligned tile that holds these rows, ordered after its writers.
#[inline(always)]
pub unsafe fn mma_row_of_tiles(accumulator: &mut Accumulator, a: [u32; 4], tile: u32, lanes: Lanes, j: u32) {
    for n in 0..4 {
        // SAFETY: the addresses lie in the tile that the caller names.
        unsafe {
            let b = ldmatrix_x4_trans(((tile + lanes.down_then_right) ^ ((n as u32) << 5)) + ROWS_16_BYTES * j);
            mma_f16(&mut accumulator[2 * n], a, b[0], b[1]);
            mma_f16(&mut accumulator[2 * n + 1], a, b[2], b[3]);
        }
    }
}

/// [`mma_row_of_tiles`] for two A fragments (32 rows) against one B.
///
/// # Safety
/// As [`mma_row_of_tiles`].
#[inline(always)]
pub unsafe fn mma_two_rows_of_tiles(
    accumulators: &mut [Accumulator; 2],
    a: [[u32; 4]; 2],
    tile: u32,
    lanes: Lanes,
    j: u32,
) {
    for n in 0..4 {
        // SAFETY: the addresses lie in the tile that the caller names.
        unsafe {
            let b = ldmatrix_x4_trans(((tile + lanes.down_then_right) ^ ((n as u32) << 5)) + ROWS_16_BYTES * j);
            for i in 0..2 {
                mma_f16(&mut accumulators[i][2 * n], a[i], b[0], b[1]);
                mma_f16(&mut accumulators[i][2 * n + 1], a[i], b[2], b[3]);
            }
        }
    }
}

/// `scores[j] += A * B^T`, A = the 16 rows of 64 at `a`, B = rows `16 j .. 16 j + 16` of the tile at `b`.
///
/// # Safety
/// Both are 128-byte aligned tiles, ordered after their writers; `b` has `16 N` rows.
#[inline(always)]
pub unsafe fn mma_row_by_rows<const N: usize>(scores: &mut [Pair; N], a: u32, b: u32, lanes: Lanes) {
    for step in 0..4u32 {
        // SAFETY: the addresses lie in the tiles that the caller names.
        unsafe {
            let left = ldmatrix_x4((a + lanes.down_then_right) ^ (step << 5));
            for j in 0..N {
                let right = ldmatrix_x4(((b + lanes.right_then_down) ^ (step << 5)) + ROWS_16_BYTES * j as u32);
                mma_f16(&mut scores[j][0], left, right[0], right[1]);
                mma_f16(&mut scores[j][1], left, right[2], right[3]);
            }
        }
    }
}

/// `2^e`, `-126 <= e <= 127`.
#[inline(always)]
pub fn pow2(e: i32) -> f32 {
    f32::from_bits(((e + 127) as u32) << 23)
}

/// Exponent `e` of the scale of a tile whose largest finite magnitude has the exponent field `field` (of bf16 or fp32), see above.
#[inline(always)]
pub fn scale_exponent(field: u32) -> i32 {
    (141 - field as i32).min(126)
}

/// A factor `2^e` for any `|e| <= 252`, as a product of two powers of two; the second is nearly always 1.
#[derive(Clone, Copy)]
pub struct Pow2 {
    /// First factor.
    pub a: f32,
    /// Second factor.
    pub b: f32,
}

impl Pow2 {
    /// `2^e`.
    #[inline(always)]
    pub fn new(e: i32) -> Self {
        let half = e.clamp(-126, 126);
        Pow2 { a: pow2(half), b: pow2((e - half).clamp(-126, 126)) }
    }
}

/// Multiplies rows `g` by `low` and rows `g + 8` by `high`.
#[inline(always)]
pub fn scale_rows(accumulator: &mut Accumulator, low: f32, high: f32) {
    for c in accumulator {
        c[0] *= low;
        c[1] *= low;
        c[2] *= high;
        c[3] *= high;
    }
}

/// `accumulator -= sums * factor * (sum of the 16 tile rows at rows)`, an outer product; `sums` = a C fragment with the same value in
/// every column.
///
/// # Safety
/// `rows` is a 128-byte aligned tile of 16 rows, ordered after its writers.
#[inline(always)]
pub unsafe fn subtract_outer_product(
    accumulator: &mut Accumulator,
    sums: &[f32; 4],
    factor: f32,
    rows: u32,
    lanes: Lanes,
) {
    let (low, high) = (-sums[0] * factor, -sums[2] * factor);
    for n in 0..4 {
        // SAFETY: the addresses lie in the tile that the caller names.
        unsafe {
            let b = ldmatrix_x4_trans((rows + lanes.down_then_right) ^ ((n as u32) << 5));
            for half in 0..2 {
                let mut column_sums = [0f32; 4];
                mma_f16(&mut column_sums, [ONES; 4], b[2 * half], b[2 * half + 1]);
                let c = &mut accumulator[2 * n + half];
                c[0] = fma(low, column_sums[0], c[0]);
                c[1] = fma(low, column_sums[1], c[1]);
                c[2] = fma(high, column_sums[2], c[2]);
                c[3] = fma(high, column_sums[3], c[3]);
            }
        }
    }
}

/// Rounds two C fragments to one fp16 A fragment.
#[inline(always)]
pub fn pack_a(s: &Pair) -> [u32; 4] {
    [f16x2(s[0][0], s[0][1]), f16x2(s[0][2], s[0][3]), f16x2(s[1][0], s[1][1]), f16x2(s[1][2], s[1][3])]
}

/// `sums[r] +=` this lane's share of the dot products of rows `g + 8 r` of `p` (an A fragment) and `t`.
#[inline(always)]
pub fn add_row_dots(p: &[u32; 4], t: &Pair, sums: &mut [f32; 2]) {
    for i in 0..4 {
        let (x, y) = f16x2_to_f32(p[i]);
        let (half, r) = (i >> 1, i & 1);
        sums[r] = fma(x, t[half][2 * r], fma(y, t[half][2 * r + 1], sums[r]));
    }
}

/// Columns from `len` on of a lane's scores become -inf.
#[inline(always)]
pub fn mask_columns<const N: usize>(scores: &mut [Pair; N], len: u32, lane: u32) {
    let first = 2 * (lane & 3);
    for j in 0..N {
        if len < 16 * (j as u32 + 1) {
            for half in 0..2 {
                for i in 0..4 {
                    if 16 * j as u32 + 8 * half as u32 + first + (i as u32 & 1) >= len {
                        scores[j][half][i] = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

/// Stores one A fragment (`[16, 16]`, 16 bits) to columns `16 n ..` of the 16 tile rows at `rows`.
///
/// # Safety
/// `rows` is 128-byte aligned shared memory that no other warp accesses before the next barrier.
#[inline(always)]
pub unsafe fn store_fragment(rows: u32, n: u32, v: [u32; 4], lanes: Lanes) {
    // SAFETY: as the caller promises.
    #[cfg(target_feature = "sm_90a")]
    unsafe {
        crate::ptx::matrix::stmatrix_x4((rows + lanes.down_then_right) ^ (n << 5), v);
    }
    // SAFETY: as the caller promises.
    #[cfg(not(target_feature = "sm_90a"))]
    unsafe {
        use crate::ptx::memory::sts32;
        let at = (rows + super::lanes::swizzled_accumulator(lanes.lane)) ^ (n << 5);
        sts32(at, v[0]);
        sts32(at + 8 * ROW_BYTES, v[1]);
        sts32(at ^ 16, v[2]);
        sts32((at ^ 16) + 8 * ROW_BYTES, v[3]);
    }
}

/// Where a warp's rows of an output go in global memory.
#[derive(Clone, Copy)]
pub struct OutputRows {
    /// First row's 64 columns.
    pub first: *mut u8,
    /// Row pitch in bytes, at most 2^28.
    pub pitch: u32,
    /// Rows that exist; more than 16 are 16.
    pub rows: u32,
}

/// Rounds an accumulator to bf16, multiplies by a power of two (exact in the normal range) and writes it as 128-byte rows: through the
/// warp's own 2 KiB of shared memory at `stage`, then 16 bytes a lane.
///
/// # Safety
/// `stage` is as in [`store_fragment`]; the rows of `out` that exist are writable, 16-byte aligned, and nobody else's.
#[inline(always)]
pub unsafe fn store_bf16(accumulator: &Accumulator, factor: Pow2, stage: u32, lanes: Lanes, out: OutputRows) {
    let a = bf16x2(factor.a, factor.a);
    // SAFETY: as the caller promises; the warp is synchronised before it writes the stage and before it reads it.
    unsafe {
        warp_sync();
        for n in 0..4 {
            let (x, y) = (&accumulator[2 * n], &accumulator[2 * n + 1]);
            let mut v = [bf16x2(x[0], x[1]), bf16x2(x[2], x[3]), bf16x2(y[0], y[1]), bf16x2(y[2], y[3])];
            for word in &mut v {
                *word = mul_bf16x2(*word, a);
            }
            if factor.b != 1.0 {
                let b = bf16x2(factor.b, factor.b);
                for word in &mut v {
                    *word = mul_bf16x2(*word, b);
                }
            }
            store_fragment(stage, n as u32, v, lanes);
        }
        warp_sync();
        let (row, piece) = moved_16_bit(lanes.lane, 0);
        let first = out.first.wrapping_add((row * out.pitch + piece * 16) as usize);
        for step in 0..4 {
            let (row, piece) = moved_16_bit(lanes.lane, step);
            let v = lds128(stage + swizzle_128b(row, piece));
            stg128_if(row < out.rows, first.wrapping_add((4 * step * out.pitch) as usize), v);
        }
    }
}

/// Column sums of an accumulator over its 16 rows, in a fixed order, times a power of two, to 64 floats at `sums`.
///
/// # Safety
/// `sums` is 8-byte aligned shared memory that no other warp accesses before the next barrier.
#[inline(always)]
pub unsafe fn store_column_sums(accumulator: &Accumulator, factor: Pow2, sums: u32, lane: u32) {
    let [far, middle, near] = [16, 8, 4].map(|bit| lane & bit != 0);
    // SAFETY: as the caller promises; all lanes take part in every exchange.
    unsafe {
        let mut of_4 = [[0f32; 2]; 4];
        for j in 0..4 {
            for c in 0..2 {
                let low = accumulator[j][c] + accumulator[j][c + 2];
                let high = accumulator[j + 4][c] + accumulator[j + 4][c + 2];
                let (keep, send) = if far { (high, low) } else { (low, high) };
                of_4[j][c] = keep + shfl_xor::<16>(send);
            }
        }
        let mut of_2 = [[0f32; 2]; 2];
        for j in 0..2 {
            for c in 0..2 {
                let (low, high) = (of_4[j][c], of_4[j + 2][c]);
                let (keep, send) = if middle { (high, low) } else { (low, high) };
                of_2[j][c] = keep + shfl_xor::<8>(send);
            }
        }
        let mut of_1 = [0f32; 2];
        for c in 0..2 {
            let (low, high) = (of_2[0][c], of_2[1][c]);
            let (keep, send) = if near { (high, low) } else { (low, high) };
            of_1[c] = (keep + shfl_xor::<4>(send)) * factor.b * factor.a;
        }
        sts64(sums + 4 * summed_column(lane), of_1[0].to_bits(), of_1[1].to_bits());
    }
}

/// 16 rows of a bf16 `[rows, 64]` tensor, 2 KiB in one piece from `src` on; rows from `rows` on are zero. Not a collective.
///
/// # Safety
/// The rows that exist are readable, 16-byte aligned, and written by nobody during the launch.
#[inline(always)]
pub unsafe fn load_rows_bf16(src: *const u8, rows: u32, lane: u32) -> Rows16Bit {
    let mut x = [[0u32; 4]; 4];
    for step in 0..4u32 {
        let (row, _) = moved_16_bit(lane, step);
        // SAFETY: as the caller promises.
        x[step as usize] = unsafe { ldg128_or_zero(src.wrapping_add((lane * 16 + step * 512) as usize), row < rows) };
    }
    x
}

/// `cp.async` of the 16 rows of [`load_rows_bf16`] to their places in a swizzled tile. Not a collective.
///
/// # Safety
/// As [`load_rows_bf16`]; the 16 tile rows at `tile` are accessed by nobody else until the copies have been waited for.
#[inline(always)]
pub unsafe fn fetch_rows_bf16(tile: u32, src: *const u8, rows: u32, lane: u32) {
    for step in 0..4u32 {
        let (row, piece) = moved_16_bit(lane, step);
        let from = src.wrapping_add((lane * 16 + step * 512) as usize);
        // SAFETY: as the caller promises.
        unsafe { cp_async16(tile + swizzle_128b(row, piece), from, row < rows) };
    }
}

/// What this lane fetched by [`fetch_rows_bf16`] itself.
///
/// # Safety
/// The copies have been waited for.
#[inline(always)]
pub unsafe fn fetched_rows_bf16(tile: u32, lane: u32) -> Rows16Bit {
    let mut x = [[0u32; 4]; 4];
    for step in 0..4u32 {
        let (row, piece) = moved_16_bit(lane, step);
        // SAFETY: as the caller promises.
        x[step as usize] = unsafe { lds128(tile + swizzle_128b(row, piece)) };
    }
    x
}

/// 16 rows of 64 columns of an fp32 tensor.
#[derive(Clone, Copy)]
pub struct InputRows {
    /// First row's 64 columns.
    pub first: *const u8,
    /// Row pitch in bytes, at most 2^28.
    pub pitch: u32,
    /// Rows that exist, the others are zero.
    pub rows: u32,
}

impl InputRows {
    /// Where a lane's piece of step `step` is, and whether its row exists.
    #[inline(always)]
    fn piece(&self, lane: u32, step: u32) -> (*const u8, bool) {
        let (row, piece) = moved_32_bit(lane, 0);
        let first = self.first.wrapping_add((row * self.pitch + piece * 16) as usize);
        (first.wrapping_add((2 * step * self.pitch) as usize), moved_32_bit(lane, step).0 < self.rows)
    }
}

/// The 16 rows. Not a collective.
///
/// # Safety
/// The rows that exist are readable, 16-byte aligned, and written by nobody during the launch.
#[inline(always)]
pub unsafe fn load_rows_f32(src: InputRows, lane: u32) -> Rows32Bit {
    let mut x = [[0u32; 4]; 8];
    for step in 0..8u32 {
        let (from, exists) = src.piece(lane, step);
        // SAFETY: as the caller promises.
        x[step as usize] = unsafe { ldg128_or_zero(from, exists) };
    }
    x
}

/// `cp.async` of the 16 rows to the warp's own 4 KiB at `raw`, as each lane reads them back. Not a collective.
///
/// # Safety
/// As [`load_rows_f32`]; `raw` is 16-byte aligned and accessed by nobody else until the copies have been waited for.
#[inline(always)]
pub unsafe fn fetch_rows_f32(raw: u32, src: InputRows, lane: u32) {
    for step in 0..8u32 {
        let (from, exists) = src.piece(lane, step);
        // SAFETY: as the caller promises.
        unsafe { cp_async16(raw + step * 512 + lane * 16, from, exists) };
    }
}

/// What this lane fetched by [`fetch_rows_f32`] itself.
///
/// # Safety
/// The copies have been waited for.
#[inline(always)]
pub unsafe fn fetched_rows_f32(raw: u32, lane: u32) -> Rows32Bit {
    let mut x = [[0u32; 4]; 8];
    for step in 0..8u32 {
        // SAFETY: as the caller promises.
        x[step as usize] = unsafe { lds128(raw + step * 512 + lane * 16) };
    }
    x
}

/// Largest exponent field of the finite elements of 16 bf16 rows, 0..255.
///
/// # Safety
/// All lanes of the warp arrive.
#[inline(always)]
pub unsafe fn largest_field_bf16(x: &Rows16Bit) -> u32 {
    let mut largest = 0;
    for word in x.as_flattened() {
        largest = max_abs_bf16x2(largest, *word);
    }
    // SAFETY: the caller's; the branch is the same for the whole warp.
    let field = unsafe { redux_max((largest >> 16).max(largest & 0xffff)) } >> 7;
    if field < 255 {
        return field;
    }
    // There is an infinity (NaN never wins a maximum): once more, with infinities made NaN by x * 0.
    largest = 0;
    for word in x.as_flattened() {
        largest = max_abs_bf16x2(largest, *word | mul_bf16x2(*word, 0));
    }
    // SAFETY: as above.
    unsafe { redux_max((largest >> 16).max(largest & 0xffff)) >> 7 }
}

/// Largest exponent field of the finite ones of a warp's fp32 values, 0..255.
///
/// # Safety
/// All lanes of the warp arrive.
#[inline(always)]
pub unsafe fn largest_field_f32(x: &[u32]) -> u32 {
    let mut largest = 0f32;
    for word in x {
        largest = largest.max(f32::from_bits(word & 0x7fff_ffff));
    }
    // SAFETY: the caller's; the branch is the same for the whole warp.
    let field = unsafe { redux_max(largest.to_bits()) } >> 23;
    if field < 255 {
        return field;
    }
    // There is an infinity (NaN never wins a maximum): once more, with infinities made NaN by x * 0 + x.
    largest = 0.0;
    for word in x {
        let value = f32::from_bits(*word);
        largest = largest.max(fma(value, 0.0, value).abs());
    }
    // SAFETY: as above.
    unsafe { redux_max(largest.to_bits()) >> 23 }
}

/// Scales 16 bf16 rows by `2^e`, converts them to fp16 (exact within the range of the scale, see above) and stores them at `tile`.
/// Not a collective.
///
/// # Safety
/// The 16 tile rows at `tile` are 16-byte aligned shared memory that no other warp accesses before the next barrier.
#[inline(always)]
pub unsafe fn store_rows_f16(x: &Rows16Bit, e: i32, tile: u32, lane: u32) {
    let factor = ((e + 127) as u32) << 7;
    let factor = factor | (factor << 16);
    for step in 0..4u32 {
        let y = x[step as usize].map(|word| {
            let scaled = mul_bf16x2(word, factor);
            f16x2(f32::from_bits(scaled << 16), f32::from_bits(scaled & 0xffff_0000))
        });
        let (row, piece) = moved_16_bit(lane, step);
        // SAFETY: as the caller promises.
        unsafe { sts128(tile + swizzle_128b(row, piece), y) };
    }
}

/// Multiplies 16 fp32 rows by `factor` and by the row's own factor (16 floats at `row_factors`), rounds to fp16 and stores them at
/// `tile`. Not a collective.
///
/// # Safety
/// As [`store_rows_f16`]; `row_factors` is ordered after its writers.
#[inline(always)]
pub unsafe fn store_rows_f32_as_f16(x: &Rows32Bit, factor: f32, row_factors: u32, tile: u32, lane: u32) {
    for step in 0..8u32 {
        let (row, piece) = moved_32_bit(lane, step);
        // SAFETY: as the caller promises.
        unsafe {
            let factor = factor * f32::from_bits(lds32(row_factors + 4 * row));
            let y = x[step as usize].map(|word| f32::from_bits(word) * factor);
            sts64(tile + swizzled_narrowed(row, piece), f16x2(y[0], y[1]), f16x2(y[2], y[3]));
        }
    }
}

const _: () = assert!(2 * HEAD_DIM == ROW_BYTES);
