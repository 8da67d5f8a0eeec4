//! A token of a stage: its gradients summed, looked at, scaled and stored, by the 128 threads of a warpgroup.
use core::array::from_fn;

use super::Sequence;
use super::consume::{AT_ONCE, THREADS, largest, stage_pieces};
use crate::kernel::cross_convert::parts::store;
use crate::kernel::wgmma_gemm::Entry;
use crate::kernel::wgmma_gemm::operand::Operand;
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

/// Stores a scaled piece in the parts that the entry multiplies, `at` bytes behind `out`.
///
/// # Safety
/// As [`store`].
#[inline(always)]
pub(super) unsafe fn store_scaled<E: Entry>(ok: bool, out: [*mut u8; 2], at: usize, v: Piece) {
    let out = out.map(|part| part.cast());
    // SAFETY: as the caller promises.
    unsafe {
        if E::Operand::PROMOTED {
            store::<2>(ok, out, at as u64, v, (1.0, 1.0));
        } else {
            store::<1>(ok, out, at as u64, v, (1.0, 1.0));
        }
    }
}

/// A way to convert a token.
pub(super) trait Token: Sized {
    /// What stays in registers between the two looks at the token.
    type Pieces;
    /// Whether that is all of it: the stage is then not read again.
    const HOLDS_ALL: bool;
    /// For a thread of the warpgroup.
    fn new(s: &Sequence, thread: u32) -> Self;
    /// Pieces of the token in `slot` of the stage, summed over the heads of a group in order, and the largest orders of the thread's gradients
    /// and hidden states.
    ///
    /// # Safety
    /// The stage is full and holds the slot.
    unsafe fn load(&self, s: &Sequence, stage: u32, slot: u32) -> (Self::Pieces, u32, u32);
    /// Scales and stores the row, which begins at `out` in each part.
    ///
    /// # Safety
    /// As [`Token::load`]; the row is this warpgroup's to write.
    unsafe fn store<E: Entry>(&self, s: &Sequence, stage: u32, slot: u32, held: &Self::Pieces, out: [*mut u8; 2], by: Factors);
}

/// Shared address of a piece of the converted row in a stage: of the first head of its group, slot 0, relative to the stage.
#[inline(always)]
fn place(s: &Sequence, piece: u32) -> u32 {
    let second = piece >= s.source_pieces;
    let piece = piece - if second { s.source_pieces } else { 0 };
    let head = (piece >> s.head_shift) * s.groups;
    let inside = piece & ((1 << s.head_shift) - 1);
    (if second { s.box_bytes } else { 0 }) + head * head_bytes(s) + inside * 16
}

/// Bytes of a head in a stage: of all its tokens.
#[inline(always)]
fn head_bytes(s: &Sequence) -> u32 {
    s.per_stage << (s.head_shift + 4)
}

/// Exactly `GRADIENT * 128` pieces of gradients and `HIDDEN * 128` of hidden states; `GROUPED`: heads are summed.
pub(super) struct Held<const GRADIENT: usize, const HIDDEN: usize, const GROUPED: bool> {
    places: [u32; GRADIENT],
    thread: u32,
}

impl<const GRADIENT: usize, const HIDDEN: usize, const GROUPED: bool> Token for Held<GRADIENT, HIDDEN, GROUPED> {
    type Pieces = [Piece; GRADIENT];
    const HOLDS_ALL: bool = true;

    #[inline(always)]
    fn new(s: &Sequence, thread: u32) -> Self {
        Held { places: from_fn(|i| place(s, thread + i as u32 * THREADS)), thread }
    }

    #[inline(always)]
    unsafe fn load(&self, s: &Sequence, stage: u32, slot: u32) -> (Self::Pieces, u32, u32) {
        let mut base = stage + (slot << (s.head_shift + 4));
        let hidden = stage + s.tensors * s.box_bytes + (slot * s.hidden_pieces + self.thread) * 16;
        // SAFETY: all pieces are in the stage, as the caller promises.
        unsafe {
            let mut sum: [Piece; GRADIENT] = from_fn(|i| lds128(base + self.places[i]).map(f32::from_bits));
            let x: [Piece; HIDDEN] = from_fn(|i| lds128(hidden + i as u32 * THREADS * 16).map(f32::from_bits));
            if GROUPED {
                let mut group = 1;
                while group < s.groups {
                    base += head_bytes(s);
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

    #[inline(always)]
    unsafe fn store<E: Entry>(&self, _: &Sequence, _: u32, _: u32, held: &Self::Pieces, out: [*mut u8; 2], by: Factors) {
        let out = out.map(|part| part.wrapping_add(self.thread as usize * 8));
        for (i, v) in by.times(*held).iter().enumerate() {
            // SAFETY: a whole row has the pieces, which are this thread's.
            unsafe { store_scaled::<E>(true, out, i * THREADS as usize * 8, *v) };
        }
    }
}

/// Any number of pieces: streamed twice.
pub(super) struct Streamed {
    thread: u32,
}

impl Streamed {
    /// Pieces `first, first + 128, ..` of the converted row; past the row's end its last one.
    ///
    /// # Safety
    /// As [`Token::load`].
    #[inline(always)]
    unsafe fn pieces(s: &Sequence, stage: u32, slot: u32, first: u32) -> [Piece; AT_ONCE] {
        let base = stage + (slot << (s.head_shift + 4));
        let places: [u32; AT_ONCE] = from_fn(|i| place(s, (first + i as u32 * THREADS).min(s.row_pieces - 1)));
        let mut sum = [[0f32; 4]; AT_ONCE];
        let mut group = 0;
        while group < s.groups {
            // SAFETY: the heads of the group are in the stage, which is full.
            let v: [Piece; AT_ONCE] =
                from_fn(|i| unsafe { lds128(base + places[i] + group * head_bytes(s)) }.map(f32::from_bits));
            for (sum, v) in sum.iter_mut().zip(&v) {
                for (sum, v) in sum.iter_mut().zip(v) {
                    *sum += *v;
                }
            }
            group += 1;
        }
        sum
    }
}

impl Token for Streamed {
    type Pieces = ();
    const HOLDS_ALL: bool = false;

    #[inline(always)]
    fn new(_: &Sequence, thread: u32) -> Self {
        Streamed { thread }
    }

    #[inline(always)]
    unsafe fn load(&self, s: &Sequence, stage: u32, slot: u32) -> ((), u32, u32) {
        let (mut gradient, mut state) = (0, 0);
        let hidden = stage + s.tensors * s.box_bytes + slot * s.hidden_pieces * 16;
        // SAFETY: as the caller promises.
        unsafe {
            let mut first = 0;
            while first < s.row_pieces {
                gradient = largest(&Self::pieces(s, stage, slot, first + self.thread), gradient);
                first += AT_ONCE as u32 * THREADS;
            }
            let mut first = 0;
            while first < s.hidden_pieces {
                let v = stage_pieces(hidden, first + self.thread, THREADS, s.hidden_pieces - 1);
                state = largest(&v, state);
                first += AT_ONCE as u32 * THREADS;
            }
        }
        ((), gradient, state)
    }

    #[inline(always)]
    unsafe fn store<E: Entry>(&self, s: &Sequence, stage: u32, slot: u32, _: &(), out: [*mut u8; 2], by: Factors) {
        let mut first = 0;
        while first < s.row_pieces {
            // SAFETY: pieces inside the row are this thread's; the stage is still full.
            unsafe {
                let v = by.times(Self::pieces(s, stage, slot, first + self.thread));
                for (i, v) in v.iter().enumerate() {
                    let piece = first + self.thread + i as u32 * THREADS;
                    store_scaled::<E>(piece < s.row_pieces, out, piece as usize * 8, *v);
                }
            }
            first += AT_ONCE as u32 * THREADS;
        }
    }
}
