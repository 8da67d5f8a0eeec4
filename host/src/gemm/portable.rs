//! Plan of a portable grouped GEMM launch: pure, printable without a GPU.
//!
//! All products of a launch share its blocks, one per tile of 128 x 128 and range of K. Few tiles of great depth would leave most of the
//! machine idle, so K may be cut into ranges ("splits") whose fp32 sums `gemm_reduce` adds in order. How often is chosen by a model of
//! the launch: blocks in the order of the launch, each on the SM slot that is free first.
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;

use attn_backward_kernels::config::gemm::{
    BLOCKS_PER_SM, MAX_SPLITS, REDUCE_THREADS, SMEM_BYTES, THREADS, TILE_K, TILE_M, TILE_N,
};
use attn_backward_kernels::params::{GemmParams, MAX_PRODUCTS, MAX_SEGMENTS, Major, OutputType, Product};
use attn_backward_kernels::schedule::grouped;

use super::{ProductShape, ProductTensors};
use crate::Error;

/// Time of one k-block (128 x 128 x 64) on an SM that is full, in us: 430 TFLOP/s on 132 SMs. Estimated, not measured.
const K_BLOCK_US: f64 = 0.64;
/// The same with promotion: 390 TFLOP/s. Estimated, not measured.
const PROMOTED_K_BLOCK_US: f64 = 0.71;
/// Time of one k-block of a block that has an SM for two to itself, in us. Estimated, not measured.
const LONE_K_BLOCK_US: f64 = 0.80;
/// What a block takes besides its k-blocks, in us: start, first loads, epilogue. Estimated, not measured.
const BLOCK_US: f64 = 2.5;
/// What a second launch adds, in us. Estimated, not measured.
const REDUCE_US: f64 = 3.0;
/// Rate at which partials are written and read, in bytes per us: they stay in L2. Estimated, not measured.
const PARTIAL_BYTES_PER_US: f64 = 4e6;
/// Least number of k-blocks in a range.
const MIN_RANGE: u32 = 2;
/// Alignment of a product's partials in the workspace.
const WORKSPACE_ALIGN: usize = 256;

/// One product in the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedProduct {
    /// Its place among the products given to [`PortablePlan::new`].
    pub index: usize,
    /// Its sizes.
    pub shape: ProductShape,
    /// Tile rows of C.
    pub tiles_m: u32,
    /// Tile columns of C.
    pub tiles_n: u32,
    /// k-blocks of 64 of all segments together.
    pub k_blocks: u32,
    /// Ranges that the k-blocks are cut into.
    pub splits: u32,
    /// First block of the launch that works on it.
    pub first_block: u32,
    /// Where its partials start in the workspace, in bytes.
    pub partials_offset: usize,
}

impl PlannedProduct {
    fn new(index: usize, shape: ProductShape) -> PlannedProduct {
        PlannedProduct {
            index,
            shape,
            tiles_m: grouped::tiles_m(shape.m as u32),
            tiles_n: grouped::tiles_n(shape.n as u32),
            k_blocks: shape.num_segments as u32 * grouped::segment_blocks(shape.k as u32),
            splits: 1,
            first_block: 0,
            partials_offset: 0,
        }
    }

    /// Tiles of C.
    pub fn tiles(&self) -> u32 {
        self.tiles_m * self.tiles_n
    }

    /// Blocks of the launch.
    pub fn blocks(&self) -> u32 {
        self.tiles() * self.splits
    }

    /// k-blocks of the longest range.
    pub fn range(&self) -> u32 {
        self.k_blocks.div_ceil(self.splits)
    }

    /// Bytes of its partials, `splits * m * n * 4`, or 0 if it is not split.
    pub fn partials_bytes(&self) -> usize {
        if self.splits > 1 { self.splits as usize * self.shape.m * self.shape.n * 4 } else { 0 }
    }

    /// Largest number of splits: only while all blocks fit on the machine about twice, and ranges have a minimum.
    fn max_splits(&self, machine: &Machine) -> u32 {
        (2 * machine.slots() / self.tiles()).min(self.k_blocks / MIN_RANGE).clamp(1, MAX_SPLITS)
    }
}

/// What the model needs to know of the GPU and the kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Machine {
    num_sms: u32,
    blocks_per_sm: u32,
    k_block_us: f64,
    lone_k_block_us: f64,
}

impl Machine {
    fn new(num_sms: u32, promoted: bool) -> Machine {
        // No GPU has more, and products with it must not overflow.
        let num_sms = num_sms.clamp(1, 1 << 16);
        let k_block_us = if promoted { PROMOTED_K_BLOCK_US } else { K_BLOCK_US };
        Machine { num_sms, blocks_per_sm: BLOCKS_PER_SM, k_block_us, lone_k_block_us: LONE_K_BLOCK_US }
    }

    /// Blocks that run at one time.
    fn slots(&self) -> u32 {
        self.num_sms * self.blocks_per_sm
    }

    /// Predicted time of the launch and its reduction.
    fn predicted_us(&self, products: &[PlannedProduct]) -> f64 {
        let mut order: Vec<&PlannedProduct> = products.iter().collect();
        order.sort_by_key(|p| Reverse(p.range()));
        let blocks: u64 = products.iter().map(|p| u64::from(p.blocks())).sum();
        let k_block_us = if blocks <= u64::from(self.num_sms) {
            self.lone_k_block_us
        } else {
            self.k_block_us * f64::from(self.blocks_per_sm)
        };
        let time = |p: &PlannedProduct| ((BLOCK_US + f64::from(p.range()) * k_block_us) * 1e3) as u64;
        // Slots by the time, in ns, at which they are free; whole rounds of equal blocks move all of them alike.
        let mut rounds = 0;
        let mut free: BinaryHeap<Reverse<u64>> = (0..self.slots()).map(|_| Reverse(0)).collect();
        for product in order {
            rounds += u64::from(product.blocks() / self.slots()) * time(product);
            for _ in 0..product.blocks() % self.slots() {
                if let Some(Reverse(at)) = free.pop() {
                    free.push(Reverse(at + time(product)));
                }
            }
        }
        let last = free.into_iter().map(|Reverse(at)| at).max().unwrap_or(0);
        let partials: usize = products.iter().map(PlannedProduct::partials_bytes).sum();
        let reduce_us = if partials > 0 { REDUCE_US + 2.0 * partials as f64 / PARTIAL_BYTES_PER_US } else { 0.0 };
        (rounds + last) as f64 / 1e3 + reduce_us
    }

    /// Chooses the splits of all products: the best of those that give all of them ranges of about one length, then each by itself.
    fn choose_splits(&self, products: &mut [PlannedProduct]) {
        let mut lengths: Vec<u32> =
            products.iter().flat_map(|p| (1..=p.max_splits(self)).map(|splits| p.k_blocks.div_ceil(splits))).collect();
        lengths.sort_unstable_by_key(|&length| Reverse(length));
        lengths.dedup();
        let mut best = self.predicted_us(products);
        let mut trial = products.to_vec();
        for length in lengths {
            for product in &mut trial {
                product.splits = product.k_blocks.div_ceil(length.max(1)).clamp(1, product.max_splits(self));
            }
            let us = self.predicted_us(&trial);
            if us < best {
                best = us;
                products.copy_from_slice(&trial);
            }
        }
        for i in 0..products.len() {
            let mut chosen = products[i].splits;
            for splits in 1..=products[i].max_splits(self) {
                products[i].splits = splits;
                let us = self.predicted_us(products);
                if us < best {
                    (best, chosen) = (us, splits);
                }
            }
            products[i].splits = chosen;
        }
    }
}

/// Plan of one launch of `gemm_bf16`, `gemm_f16` or `gemm_f16_promoted`, and of `gemm_reduce` after it.
#[derive(Clone, Debug, PartialEq)]
pub struct PortablePlan {
    machine: Machine,
    promoted: bool,
    num_products: usize,
    products: Vec<PlannedProduct>,
    workspace_bytes: usize,
}

impl PortablePlan {
    /// Plans `products` (at most [`MAX_PRODUCTS`]) for a GPU of `num_sms` multiprocessors; `promoted`: for `gemm_f16_promoted`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for extents that the kernels do not take.
    pub fn new(products: &[ProductShape], num_sms: u32, promoted: bool) -> Result<PortablePlan, Error> {
        if products.len() > MAX_PRODUCTS {
            return Err(unsupported("products", products.len(), format!("at most {MAX_PRODUCTS} in one launch")));
        }
        products.iter().try_for_each(|shape| check(shape, promoted))?;
        let machine = Machine::new(num_sms, promoted);
        let filled = products.iter().enumerate().filter(|(_, shape)| shape.m > 0 && shape.n > 0);
        let mut planned: Vec<PlannedProduct> =
            filled.map(|(index, shape)| PlannedProduct::new(index, *shape)).collect();
        machine.choose_splits(&mut planned);
        // The longest blocks first: the short ones fill the gaps at the end.
        planned.sort_by_key(|p| Reverse(p.range()));
        let (mut blocks, mut workspace_bytes) = (0u64, 0);
        for product in &mut planned {
            product.first_block = blocks as u32;
            product.partials_offset = workspace_bytes;
            blocks += u64::from(product.blocks());
            workspace_bytes += product.partials_bytes().next_multiple_of(WORKSPACE_ALIGN);
        }
        if blocks > i32::MAX as u64 {
            return Err(unsupported("tiles of all products", blocks, format!("at most {}", i32::MAX)));
        }
        Ok(PortablePlan { machine, promoted, num_products: products.len(), products: planned, workspace_bytes })
    }

    /// Products in the order of the launch; those without elements are left out.
    pub fn products(&self) -> &[PlannedProduct] {
        &self.products
    }

    /// Blocks of the `gemm_*` launch; 0: there is nothing to launch.
    pub fn blocks(&self) -> u32 {
        self.products.iter().map(PlannedProduct::blocks).sum()
    }

    /// Threads of a block of the `gemm_*` launch.
    pub fn threads(&self) -> u32 {
        THREADS
    }

    /// Threads of a block of the `gemm_reduce` launch.
    pub const REDUCE_THREADS: u32 = REDUCE_THREADS;

    /// Dynamic shared memory of a block of the `gemm_*` launch.
    pub fn smem_bytes(&self) -> u32 {
        SMEM_BYTES
    }

    /// Blocks of the `gemm_reduce` launch, with the same parameters; 0: there is nothing to launch.
    pub fn reduce_blocks(&self) -> u32 {
        self.products.iter().map(|p| grouped::reduce_blocks(p.shape.m as u32, p.shape.n as u32, p.splits)).sum()
    }

    /// Bytes of workspace (multiple-of-256 address) for the partials of split products. A product is split only while its tiles and splits
    /// make at most twice the blocks that run at one time, so that this is at most `MAX_PRODUCTS * 2 * slots * 64 KiB`.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Times that the launch fills the machine.
    pub fn waves(&self) -> f64 {
        f64::from(self.blocks()) / f64::from(self.machine.slots())
    }

    /// Predicted time of both launches, in us. A model of an H200, for choosing between plans.
    pub fn predicted_us(&self) -> f64 {
        self.machine.predicted_us(&self.products)
    }

    /// The kernels' parameters: `operands` in the order of the products given to [`PortablePlan::new`], `workspace` a device address.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there are not as many operands as products.
    pub fn params(&self, operands: &[ProductTensors], workspace: u64) -> Result<GemmParams, Error> {
        if operands.len() != self.num_products {
            return Err(unsupported(
                "operands",
                operands.len(),
                format!("one for each of {} products", self.num_products),
            ));
        }
        let mut params = GemmParams {
            products: [Product::EMPTY; MAX_PRODUCTS],
            num_products: self.products.len() as u32,
            reserved: 0,
        };
        for (product, planned) in params.products.iter_mut().zip(&self.products) {
            let (shape, of) = (&planned.shape, &operands[planned.index]);
            let partials = if planned.splits > 1 { workspace + planned.partials_offset as u64 } else { 0 };
            *product = Product {
                a: of.a.map(|address| address as *const u16),
                b: of.b.map(|address| address as *const u16),
                c: of.c as *mut u8,
                row_exponents: of.row_exponents as *const i32,
                exponent: of.exponent as *const i32,
                k_limit: of.k_limit as *const i32,
                partials: partials as *mut f32,
                m: shape.m as u32,
                n: shape.n as u32,
                k: shape.k as u32,
                lda: of.lda,
                ldb: of.ldb,
                ldc: of.ldc,
                a_major: shape.a_major as u32,
                c_type: shape.c_type as u32,
                num_segments: shape.num_segments as u32,
                splits: planned.splits,
                first_block: planned.first_block,
                reserved: 0,
            };
        }
        Ok(params)
    }
}

fn unsupported(argument: &'static str, value: impl fmt::Display, supported: String) -> Error {
    Error::Unsupported { argument, value: value.to_string(), supported }
}

/// The extents are those that the kernels take.
fn check(shape: &ProductShape, promoted: bool) -> Result<(), Error> {
    let k_contiguous = shape.a_major == Major::K;
    for (argument, value, multiple) in [
        ("m", shape.m, if k_contiguous { 1 } else { 8 }),
        ("n", shape.n, 8),
        ("k", shape.k, if k_contiguous { 8 } else { 1 }),
    ] {
        if !value.is_multiple_of(multiple) {
            return Err(unsupported(
                argument,
                value,
                format!("a multiple of {multiple} with {:?}-major A", shape.a_major),
            ));
        }
        if value > i32::MAX as usize {
            return Err(unsupported(argument, value, format!("at most {}", i32::MAX)));
        }
    }
    let tiles = shape.m.div_ceil(TILE_M as usize) as u64 * shape.n.div_ceil(TILE_N as usize) as u64;
    if tiles > i32::MAX as u64 {
        return Err(unsupported("tiles of a product", tiles, format!("at most {}", i32::MAX)));
    }
    if promoted && shape.c_type != OutputType::F32 {
        return Err(unsupported("c_type", format!("{:?}", shape.c_type), "F32, where promoted totals are kept".into()));
    }
    if !(1..=MAX_SEGMENTS).contains(&shape.num_segments) {
        return Err(unsupported("num_segments", shape.num_segments, format!("1 to {MAX_SEGMENTS}")));
    }
    Ok(())
}

impl fmt::Display for PortablePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "grouped GEMM{}: {} blocks of {TILE_M} x {TILE_N}, {:.2} waves on {} SMs x {}, {:.1} us predicted, {} bytes of partials",
            if self.promoted { " (promoted)" } else { "" },
            self.blocks(),
            self.waves(),
            self.machine.num_sms,
            self.machine.blocks_per_sm,
            self.predicted_us(),
            self.workspace_bytes,
        )?;
        for p in &self.products {
            let ProductShape { m, n, k, num_segments, a_major, c_type } = p.shape;
            write!(
                f,
                "\n  product {}: {c_type:?} [{m}, {n}] = {num_segments} x ([{m}, {k}] @ [{k}, {n}]), {a_major:?}-major A, {} x {} tiles, \
                 {} k-blocks of {TILE_K}, {} splits",
                p.index, p.tiles_m, p.tiles_n, p.k_blocks, p.splits,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// The five products of operation A's last phase.
    fn audio(total_seq_len: usize, d_model: usize) -> Vec<ProductShape> {
        let wgrad = ProductShape {
            m: d_model,
            n: d_model,
            k: total_seq_len,
            num_segments: 1,
            a_major: Major::Mn,
            c_type: OutputType::Bf16,
        };
        let dgrad = ProductShape { m: total_seq_len, k: d_model, num_segments: 3, a_major: Major::K, ..wgrad };
        vec![wgrad, wgrad, wgrad, wgrad, dgrad]
    }

    fn shapes() -> impl Strategy<Value = Vec<ProductShape>> {
        let shape = (0usize..60, 0usize..60, 0usize..300, 1usize..=3, any::<bool>(), any::<bool>()).prop_map(
            |(m, n, k, num_segments, mn_major, bf16)| ProductShape {
                m: 40 * m,
                n: 40 * n,
                k: 8 * k,
                num_segments,
                a_major: if mn_major { Major::Mn } else { Major::K },
                c_type: if bf16 { OutputType::Bf16 } else { OutputType::F32 },
            },
        );
        prop::collection::vec(shape, 0..=MAX_PRODUCTS)
    }

    /// Promoted products keep their totals in an fp32 C.
    fn for_kernel(mut shapes: Vec<ProductShape>, promoted: bool) -> Vec<ProductShape> {
        shapes.iter_mut().filter(|_| promoted).for_each(|shape| shape.c_type = OutputType::F32);
        shapes
    }

    /// Operands whose addresses say which product they belong to.
    fn operands(count: usize) -> Vec<ProductTensors> {
        (0..count as u64).map(|i| ProductTensors { c: 4096 * (i + 1), ..Default::default() }).collect()
    }

    proptest! {
        #[test]
        fn every_k_block_of_every_tile_is_covered_once(shapes in shapes(), promoted in any::<bool>()) {
            let shapes = for_kernel(shapes, promoted);
            let plan = PortablePlan::new(&shapes, 132, promoted).unwrap();
            let params = plan.params(&operands(shapes.len()), 1 << 20).unwrap();
            let mut covered: HashMap<(u64, u32, u32), u64> = HashMap::new();
            for block in 0..plan.blocks() {
                // As the kernel does.
                let found = (1..params.num_products as usize).filter(|&i| block >= params.products[i].first_block).max();
                let p = &params.products[found.unwrap_or(0)];
                let tile = grouped::tile_of_block(block - p.first_block, grouped::tiles_m(p.m), grouped::tiles_n(p.n));
                prop_assert!(tile.split < p.splits);
                let blocks = p.num_segments * grouped::segment_blocks(p.k);
                let range = grouped::split_start(tile.split, p.splits, blocks)..grouped::split_start(tile.split + 1, p.splits, blocks);
                // Ranges of a tile are told apart by their starts: the sum of all k-blocks' numbers + 1 is that of 1..=blocks.
                *covered.entry((p.c as u64, tile.tile_m, tile.tile_n)).or_default() += range.map(|b| u64::from(b) + 1).sum::<u64>();
            }
            let mut tiles = 0;
            for (i, s) in shapes.iter().enumerate().filter(|(_, s)| s.m > 0 && s.n > 0) {
                let blocks = (s.num_segments * s.k.div_ceil(64)) as u64;
                for m in 0..s.m.div_ceil(128) as u32 {
                    for n in 0..s.n.div_ceil(128) as u32 {
                        prop_assert_eq!(covered.get(&(4096 * (i as u64 + 1), m, n)), Some(&(blocks * (blocks + 1) / 2)));
                        tiles += 1;
                    }
                }
            }
            prop_assert_eq!(covered.len(), tiles);
        }

        #[test]
        fn partials_are_bounded_and_disjoint(shapes in shapes(), promoted in any::<bool>()) {
            let shapes = for_kernel(shapes, promoted);
            let plan = PortablePlan::new(&shapes, 132, promoted).unwrap();
            let slots = 132 * 2;
            let mut end = 0;
            for p in plan.products() {
                prop_assert!(p.splits <= MAX_SPLITS && (p.splits == 1 || p.tiles() * p.splits <= 2 * slots));
                prop_assert!(p.splits == 1 || p.k_blocks >= 2 * p.splits);
                prop_assert!(p.partials_offset >= end && p.partials_offset.is_multiple_of(256));
                end = p.partials_offset + p.partials_bytes();
                prop_assert!(p.partials_bytes() <= 2 * slots as usize * 128 * 128 * 4);
            }
            prop_assert!(end <= plan.workspace_bytes());
            prop_assert!((plan.workspace_bytes() == 0) == (plan.reduce_blocks() == 0));
        }

        #[test]
        fn longest_blocks_come_first(shapes in shapes()) {
            let plan = PortablePlan::new(&shapes, 132, false).unwrap();
            prop_assert!(plan.products().windows(2).all(|w| w[0].range() >= w[1].range() && w[0].first_block < w[1].first_block));
        }
    }

    #[test]
    fn few_deep_tiles_are_split_until_they_fill_the_machine() {
        let dgrad = audio(128, 1280)[4];
        let plan = PortablePlan::new(&[dgrad], 132, false).unwrap();
        assert!(plan.products()[0].splits >= 8, "{plan}");
        let unsplit = PlannedProduct { splits: 1, ..plan.products()[0] };
        assert!(plan.predicted_us() < 0.5 * plan.machine.predicted_us(&[unsplit]));
    }

    #[test]
    fn several_deep_products_are_split_together() {
        // Each of the four tiles alone would leave the others as long as they were.
        let plan = PortablePlan::new(&audio(8192, 128), 132, false).unwrap();
        assert!(plan.products().iter().filter(|p| p.shape.k == 8192).all(|p| p.splits >= 8), "{plan}");
    }

    #[test]
    fn large_products_are_not_split() {
        let shape =
            ProductShape { m: 8192, n: 1536, k: 4096, num_segments: 1, a_major: Major::K, c_type: OutputType::F32 };
        let plan = PortablePlan::new(&[shape], 132, false).unwrap();
        assert_eq!((plan.workspace_bytes(), plan.reduce_blocks(), plan.blocks()), (0, 0, 64 * 12));
    }

    #[test]
    fn empty_products_have_no_blocks() {
        let mut shapes = audio(0, 128);
        let plan = PortablePlan::new(&shapes, 132, false).unwrap();
        // k = 0: the weight gradients are written as zeros; grad_hidden_states has no rows.
        assert_eq!((plan.blocks(), plan.products().len(), plan.workspace_bytes()), (4, 4, 0));
        shapes.iter_mut().for_each(|s| s.n = 0);
        assert_eq!(PortablePlan::new(&shapes, 132, false).unwrap().blocks(), 0);
        assert_eq!(PortablePlan::new(&[], 132, false).unwrap().blocks(), 0);
    }

    #[test]
    fn extents_that_the_kernel_does_not_take_are_named() {
        let shape = audio(128, 128)[0];
        let message = |s: ProductShape| PortablePlan::new(&[s], 132, false).unwrap_err().to_string();
        assert_eq!(
            message(ProductShape { n: 12, ..shape }),
            "n = 12 is not supported: a multiple of 8 with Mn-major A"
        );
        assert_eq!(message(ProductShape { m: 3, ..shape }), "m = 3 is not supported: a multiple of 8 with Mn-major A");
        assert_eq!(
            message(ProductShape { k: 3, a_major: Major::K, ..shape }),
            "k = 3 is not supported: a multiple of 8 with K-major A"
        );
        assert_eq!(message(ProductShape { num_segments: 4, ..shape }), "num_segments = 4 is not supported: 1 to 3");
        assert!(PortablePlan::new(&[ProductShape { k: 3, ..shape }], 132, false).is_ok());
        assert_eq!(
            PortablePlan::new(&[shape], 132, true).unwrap_err().to_string(),
            "c_type = Bf16 is not supported: F32, where promoted totals are kept"
        );
        assert_eq!(
            PortablePlan::new(&[shape; 6], 132, false).unwrap_err().to_string(),
            "products = 6 is not supported: at most 5 in one launch"
        );
        let plan = PortablePlan::new(&[shape; 2], 132, false).unwrap();
        assert_eq!(
            plan.params(&[], 0).unwrap_err().to_string(),
            "operands = 0 is not supported: one for each of 2 products"
        );
    }

    #[test]
    fn plan_prints_tiles_splits_waves_and_time() {
        let text = PortablePlan::new(&audio(1280, 1280), 132, false).unwrap().to_string();
        assert!(text.starts_with("grouped GEMM: "), "{text}");
        assert!(
            text.contains("waves on 132 SMs x 2")
                && text.contains("us predicted")
                && text.contains("bytes of partials"),
            "{text}"
        );
        let dgrad = "  product 4: Bf16 [1280, 1280] = 3 x ([1280, 1280] @ [1280, 1280]), K-major A, 10 x 10 tiles, 60 k-blocks of 64";
        assert!(text.lines().nth(1).is_some_and(|line| line.starts_with(dgrad)), "{text}");
        assert_eq!(text.lines().count(), 6);
    }
}
