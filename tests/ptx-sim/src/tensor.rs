//! Matrix instructions: `ldmatrix`, `stmatrix`, `movmatrix`, `mma`.
//!
//! `mma`: products are exact, their sum with the accumulator is taken in f64 in the order of k, and rounded to f32 once. The order and
//! the truncation of a tensor core's own sums are not modelled.

use crate::error::LaneFault;
use crate::number::{Bf16, F16, Narrow};
use crate::op::{FULL, Matrix, Mma, MmaType, Reg, Words};
use crate::shared::COLLECTIVE;
use crate::warp::{Environment, Warp};

/// Row and first column of a lane's elements in an 8x8 matrix of 16-bit elements, two in a row a lane.
fn place(lane: usize) -> (usize, usize) {
    (lane / 4, 2 * (lane % 4))
}

/// The transpose of an 8x8 matrix spread over a warp.
fn transpose(x: &Words) -> Words {
    let at = |row: usize, column: usize| x[4 * row + column / 2] >> (16 * (column % 2)) & 0xffff;
    std::array::from_fn(|lane| {
        let (row, column) = place(lane);
        at(column, row) | at(column + 1, row) << 16
    })
}

impl Warp {
    pub(crate) fn matrix(&mut self, env: &mut Environment, op: &Matrix) -> Result<(), LaneFault> {
        let addresses = self.addresses(&op.address);
        // Lanes 8i to 8i + 7 hold the row addresses of matrix i.
        for (i, &register) in op.registers.iter().enumerate() {
            let mut fragment = self.words[register as usize];
            if op.store {
                if op.transposed {
                    fragment = transpose(&fragment);
                }
                for row in 0..8 {
                    let lane = 8 * i + row;
                    let words = [0, 1, 2, 3].map(|j| fragment[4 * row + j]);
                    env.shared
                        .write(self.who(COLLECTIVE as usize, false), addresses[lane], 16, &words)
                        .map_err(|cause| cause.on(lane))?;
                }
                continue;
            }
            for row in 0..8 {
                let lane = 8 * i + row;
                let mut words = [0; 4];
                env.shared
                    .read(self.who(lane, false), addresses[lane], 16, &mut words)
                    .map_err(|cause| cause.on(lane))?;
                fragment[4 * row..4 * row + 4].copy_from_slice(&words);
            }
            if op.transposed {
                fragment = transpose(&fragment);
            }
            self.put_word(register, &fragment, FULL);
        }
        Ok(())
    }

    pub(crate) fn move_matrix(&mut self, d: Reg, a: Reg) {
        let moved = transpose(&self.words[a as usize]);
        self.put_word(d, &moved, FULL);
    }

    pub(crate) fn mma(&mut self, op: &Mma) {
        match op.operand_type {
            MmaType::F16 => self.mma_of::<F16>(op),
            MmaType::Bf16 => self.mma_of::<Bf16>(op),
        }
    }

    fn mma_of<N: Narrow>(&mut self, op: &Mma) {
        let (mut a, mut b) = ([[0f64; 16]; 16], [[0f64; 8]; 16]);
        for (i, &register) in op.a.iter().enumerate() {
            let words = &self.words[register as usize];
            for (lane, word) in words.iter().enumerate() {
                let (row, column) = place(lane);
                for e in 0..2 {
                    a[row + 8 * (i & 1)][column + 8 * (i >> 1) + e] = N::widen((word >> (16 * e)) as u16) as f64;
                }
            }
        }
        for (i, &register) in op.b.iter().enumerate() {
            let words = &self.words[register as usize];
            for (lane, word) in words.iter().enumerate() {
                let (column, k) = place(lane);
                for e in 0..2 {
                    b[k + 8 * i + e][column] = N::widen((word >> (16 * e)) as u16) as f64;
                }
            }
        }
        let mut d = [[0f64; 8]; 16];
        for (a, d) in a.iter().zip(&mut d) {
            for (&a, b) in a.iter().zip(&b).take(8 * op.b.len()) {
                for (d, b) in d.iter_mut().zip(b) {
                    *d += a * b;
                }
            }
        }
        let c = op.c.map(|register| self.words[register as usize]);
        for (i, &register) in op.d.iter().enumerate() {
            let values = std::array::from_fn(|lane| {
                let (row, column) = place(lane);
                let product = d[row + 8 * (i >> 1)][column + (i & 1)];
                ((product + f32::from_bits(c[i][lane]) as f64) as f32).to_bits()
            });
            self.put_word(register, &values, FULL);
        }
    }
}
