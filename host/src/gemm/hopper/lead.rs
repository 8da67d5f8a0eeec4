//! What the blocks of a launch do before its products, and when that makes the products' operands ready.

use attn_backward_kernels::config::wgmma::CLUSTER_SIZE;
use attn_backward_kernels::schedule::item::Item;

use super::tiling::TileGroup;

/// Conversion items of a launch, and what the cost model says of them.
#[derive(Clone, Debug)]
pub struct Lead {
    /// The items that each block's list begins with.
    pub lists: Vec<Vec<Item>>,
    /// When all blocks of each cluster have done them, in ns from the start: of blocks `CLUSTER_SIZE * i ..`.
    pub done_ns: Vec<u64>,
    /// The turn of each product: tiles of a lower turn come first in all lists. Missing: 0.
    pub turns: Vec<usize>,
    /// When the operands of each product are ready: for each row block, or for all of them at once. Missing: at the start.
    pub ready_ns: Vec<Vec<u64>>,
}

impl Lead {
    /// Nothing: all operands are there when the launch begins.
    pub fn none(num_sms: usize) -> Lead {
        let clusters = num_sms / CLUSTER_SIZE as usize;
        Lead {
            lists: vec![Vec::new(); clusters * CLUSTER_SIZE as usize],
            done_ns: vec![0; clusters],
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
            row_blocks => {
                let first = group.row_block(tile) * CLUSTER_SIZE as usize;
                let of_cluster = row_blocks[first..].iter().take(CLUSTER_SIZE as usize);
                of_cluster.copied().max().unwrap_or(0)
            }
        }
    }
}
