//! A token of a stage: its gradients summed, looked at, scaled and stored, by the 128 threads of a warpgroup.
use core::array::from_fn;

use super::Sequence;
use super::consume::{THREADS, largest};
use crate::kernel::cross_convert::parts::store;
use crate::kernel::wgmma_gemm::Entry;
use crate::ptx::memory::lds128;
use crate::tile::power_of_two::{power_of_two, power_of_two_halves};

/// Four elements.
type Piece = [f32; 4];

/// Multiplication by a power of two; by a second one only where fp32 cannot hold the first alone.
#[derive(Clone, Copy)]
pub(super) struct Factors(f32, f32);

impl Factors {
    /// Of `2^exponent`. For what becomes fp16, one factor and two halves come to the same.
    #[inline(always)]
    pub fn new(exponent: i32) -> Self {
        let (first, second) = power_of_two_halves(exponent);
        if exponent >= -126 && exponent <= 127 { Factors(power_of_two(exponent), 1.0) } else { Factors(first, second) }
    }

    /// The pieces times the power of two.
    #[inline(always)]
    pub fn times<const N: usize>(self, mut v: [Piece; N]) -> [Piece; N] {
        if self.1 != 1.0 {
            v = v.map(|piece| piece.map(|x| x * self.1));
        }
        v.map(|piece| piece.map(|x| x * self.0))
    }
}

/// Stores a scaled piece in the one part that the launch multiplies, `at` bytes behind `out`.
///
/// # Safety
/// As [`store`].
#[inline(always)]
pub(super) unsafe fn store_scaled(out: [*mut u8; 2], at: usize, v: Piece) {
    // SAFETY: as the caller promises.
    unsafe { store::<1>(true, out.map(|part| part.cast()), at as u64, v, (1.0, 1.0)) }
}

/// Where a thread finds its part of any token of `GRADIENT * 128` pieces of gradients and `HIDDEN * 128` of hidden states. `GROUPED`: heads are
/// summed.
pub(super) struct Token<const GRADIENT: usize, const HIDDEN: usize, const GROUPED: bool> {
    places: [u32; GRADIENT],
    thread: u32,
}

impl<const GRADIENT: usize, const HIDDEN: usize, const GROUPED: bool> Token<GRADIENT, HIDDEN, GROUPED> {
    /// For a thread of the warpgroup.
    #[inline(always)]
    pub fn new(s: &Sequence, thread: u32) -> Self {
        Token { places: from_fn(|i| s.layout.piece_bytes(thread + i as u32 * THREADS)), thread }
    }

    /// Its pieces of the token in `slot` of the stage, summed over the heads of a group in order, and the largest orders of its gradients and
    /// hidden states.
    ///
    /// # Safety
    /// The stage is full and holds the slot.
    #[inline(always)]
    pub unsafe fn load(&self, s: &Sequence, stage: u32, slot: u32) -> ([Piece; GRADIENT], u32, u32) {
        let mut base = stage + s.layout.slot_bytes(slot);
        let hidden = stage + s.gradient_bytes() + (slot * s.hidden_pieces + self.thread) * 16;
        // SAFETY: all pieces are in the stage, as the caller promises.
        unsafe {
            let mut sum: [Piece; GRADIENT] = from_fn(|i| lds128(base + self.places[i]).map(f32::from_bits));
            let x: [Piece; HIDDEN] = from_fn(|i| lds128(hidden + i as u32 * THREADS * 16).map(f32::from_bits));
            if GROUPED {
                let mut group = 1;
                while group < s.layout.groups {
                    base += s.layout.head_bytes();
                    let v: [Piece; GRADIENT] = from_fn(|i| lds128(base + self.places[i]).map(f32::from_bits));
                    for (sum, v) in sum.iter_mut().zip(&v) {
                        for (sum, v) in sum.iter_mut().zip(v) {
                            *sum += *v;
                        }
                    }
                    group += 1;
                }
            }
            let (gradient, state) = (largest(&sum, 0), largest(&x, 0));
            (sum, gradient, state)
        }
    }

    /// Scales and stores the pieces of the row that begins at `out` in each part.
    ///
    /// # Safety
    /// The row is this warpgroup's to write.
    #[inline(always)]
    pub unsafe fn store<E: Entry>(&self, pieces: [Piece; GRADIENT], out: [*mut u8; 2], by: Factors) {
        let out = out.map(|part| part.wrapping_add(self.thread as usize * 8));
        for (i, v) in by.times(pieces).iter().enumerate() {
            // SAFETY: a whole row has the pieces, which are this thread's.
            unsafe { store_scaled(out, i * THREADS as usize * 8, *v) };
        }
    }
}
