//! What the producer thread does for the conversion: loads, and waits for what is converted.
use super::{Matrix, Sequence, conversion, guess_holds, row_block, tokens, weight_rows};
use crate::config::wgmma::ready;
use crate::kernel::wgmma_gemm::Entry;
use crate::params::Major;
use crate::params_wgmma::{Conversion, TensorMap};
use crate::ptx::hopper::{bulk_load, evict_first, fence_proxy_async, ld_acquire, tma_load_3d_hinted};
use crate::schedule::item::{Item, item_kind, matrix};
use crate::tile::ring::Ring;

impl Ring<false> {
    /// Loads the rows of a conversion item.
    ///
    /// # Safety
    /// One thread of the block, in step with the consumers; the entry converts.
    #[inline(always)]
    pub(in crate::kernel::wgmma_gemm) unsafe fn load_rows<E: Entry>(&mut self, item: &Item) {
        // SAFETY: as the caller promises.
        unsafe {
            let c = conversion::<E>();
            match item.kind {
                item_kind::TOKENS => self.load_tokens::<E>(c, item),
                item_kind::SCALE => {
                    let sequence = matrix::sequence(item.product);
                    if matrix::is_hidden(item.product) {
                        wait_for(c, ready::TOKENS + sequence, tokens(c, sequence));
                    } else {
                        wait_for(c, ready::WEIGHT_MAXIMA + sequence, weight_rows(c, sequence));
                        self.acquire(0);
                        self.advance();
                        if guess_holds(c, sequence) {
                            return;
                        }
                    }
                    self.load_matrix(c, item);
                }
                _ => self.load_matrix(c, item),
            }
        }
    }

    /// Gradients and hidden states of an item's tokens.
    ///
    /// # Safety
    /// As [`Ring::load_rows`].
    #[inline(always)]
    unsafe fn load_tokens<E: Entry>(&mut self, c: &Conversion, item: &Item) {
        let s = Sequence::of(c, item.product);
        let mut stages = s.stages(item);
        let hidden_bytes = 16 * s.hidden_pieces;
        let policy = evict_first(); // hidden states are read again, gradients are not
        // SAFETY: the maps are encoded, their boxes have the layout's bytes; the hidden states of the tokens exist.
        unsafe {
            let maps: *const TensorMap = (&raw const (*E::params()).maps).cast();
            let map = maps.add((c.first_map + item.product) as usize);
            while stages.row < stages.end {
                let tokens = stages.tokens();
                self.acquire(s.gradient_bytes() + tokens * hidden_bytes);
                let at = [0, stages.place, stages.batch * c.num_heads];
                tma_load_3d_hinted(self.a(), map, at, self.full(), policy);
                let mut to = self.a() + s.layout.box_bytes();
                if item.product != 0 {
                    tma_load_3d_hinted(to, map.add(1), at, self.full(), policy);
                    to += s.layout.box_bytes();
                }
                let from = s.hidden.cast::<u8>().wrapping_add(stages.row as usize * hidden_bytes as usize);
                bulk_load(to, from.cast(), tokens * hidden_bytes, self.full());
                self.advance();
                stages.advance(tokens);
            }
        }
    }

    /// Rows of a matrix.
    ///
    /// # Safety
    /// As [`Ring::load_rows`].
    #[inline(always)]
    unsafe fn load_matrix(&mut self, c: &Conversion, item: &Item) {
        let m = Matrix::of(c, item.product);
        let row_bytes = 16 * m.row_pieces;
        let mut from = m.source.cast::<u8>().wrapping_add(item.m0 as usize * row_bytes as usize);
        let mut left = item.k_blocks;
        while left > 0 {
            let bytes = m.per_stage.min(left) * row_bytes;
            // SAFETY: the rows exist, and a stage holds them.
            unsafe {
                self.acquire(bytes);
                bulk_load(self.a(), from.cast(), bytes, self.full());
            }
            self.advance();
            from = from.wrapping_add(bytes as usize);
            left -= m.per_stage.min(left);
        }
    }
}

/// Waits until the operands of an item of a product are converted, and makes them visible to TMA loads.
///
/// # Safety
/// As [`Ring::load_rows`]. Conversion items come first in every list, and wait for none of a product, so this ends.
#[inline(always)]
pub(in crate::kernel::wgmma_gemm) unsafe fn wait_for_operands<E: Entry>(item: &Item) {
    // SAFETY: as the caller promises.
    unsafe {
        let c = conversion::<E>();
        // Decoder: products 0 and 1, encoder: 2 to 4.
        let sequence = (item.product >= 2) as u32;
        if item.a_major == Major::Mn as u32 {
            // Hidden states are converted when all gradients of their sequence are.
            wait_for(c, ready::HIDDEN + sequence, tokens(c, sequence));
        } else {
            let (counter, rows) = row_block(c, sequence, item.m0);
            wait_for(c, counter, rows);
            wait_for(c, ready::WEIGHTS + sequence, weight_rows(c, sequence));
        }
        fence_proxy_async();
    }
}

/// Waits until `rows` rows are counted.
///
/// # Safety
/// The counter is one of the launch's, and gets there.
#[inline(always)]
unsafe fn wait_for(c: &Conversion, counter: u32, rows: u32) {
    // SAFETY: as the caller promises.
    unsafe { while ld_acquire(c.ready.wrapping_add(counter as usize)) < rows {} }
}
