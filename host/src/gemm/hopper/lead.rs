//! What the blocks of a launch do before its products, and when that makes the products' operands ready.

use attn_backward_kernels::schedule::item::Item;

use super::tiling::TileGroup;

/// Conversion items of a launch, and what the cost model says of them.
#[derive(Clone, Debug)]
pub struct Lead {
    /// The items that each block's list begins with.
    pub lists: Vec<Vec<Item>>,
    /// When each block has done them, in ns from the start.
    pub done_ns: Vec<u64>,
    /// The turn of each product: tiles of a lower turn come first in all lists. Missing: 0.
    pub turns: Vec<usize>,
    /// When the operands of each product are ready: for each row block, or for all of them at once. Missing: at the start.
    pub ready_ns: Vec<Vec<u64>>,
}

impl Lead {
    /// Nothing: all operands are there when the launch begins.
    pub fn none(num_blocks: usize) -> Lead {
        Lead {
            lists: vec![Vec::new(); num_blocks],
            done_ns: vec![0; num_blocks],
            turns: Vec::new(),
            ready_ns: Vec::new(),
        }
    }

    /// Whether there is anything to do.
    pub fn converts(&self) -> bool {
        self.lists.iter().any(|list| !list.is_empty())
    }

    /// The turn of a product.
    pub(super) fn turn(&self, product: usize) -> usize {
        self.turns.get(product).copied().unwrap_or(0)
    }

    /// When tile `tile` of a group can begin.
    pub(super) fn ready(&self, group: &TileGroup, tile: usize) -> u64 {
        match self.ready_ns.get(group.product).map_or(&[][..], Vec::as_slice) {
            [] => 0,
            [all] => *all,
            row_blocks => row_blocks[group.row_block(tile)],
        }
    }
}
