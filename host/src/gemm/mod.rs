//! Grouped GEMM: several products `C = A B` in one launch, planned without a GPU.
//!
//! Both operations spend nearly all of their arithmetic here. A product comes in the two forms of a linear layer's backward pass:
//! *dgrad* (`dX = dY W`: A K-major) and *wgrad* (`dW = dY^T X`: A MN-major); B is always MN-major.
use std::fmt;

use attn_backward_kernels::params::{MAX_SEGMENTS, Major, OutputType};

use crate::Target;
use crate::gpu::ModuleKind;

mod grouped;
pub mod hopper;
pub mod portable;

pub(crate) use grouped::{GroupedGemm, PreparedGemm};

/// Sizes and layout of one product: `C[m, n] = sum over segments of A_s[m, k] B_s[k, n]`.
//! Grouped GEMM plans.

use attn_backward_kernels::params::{Major, OutputType};

pub mod hopper;

/// Sizes and layouts of one product of a grouped GEMM, `C[m, n] = sum over segments s of A_s[m, k] B_s[k, n]`.
///
/// B is always MN-major (`[k, n]` row-major). dgrad has a K-major A, wgrad an MN-major one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductShape {
    /// Rows of C.
    pub m: usize,
    /// Columns of C, a multiple of 8.
    pub n: usize,
    /// Depth of a segment.
    pub k: usize,
    /// Segments, 1 to 3.
    /// Columns of C.
    pub n: usize,
    /// Depth of one segment.
    pub k: usize,
    /// Segments that K is made of.
    pub num_segments: usize,
    /// Layout of A.
    pub a_major: Major,
    /// Element type of C.
    pub c_type: OutputType,
}

impl ProductShape {
    /// Floating-point operations of the product.
    pub fn flops(&self) -> u64 {
        2 * (self.m * self.n) as u64 * (self.k * self.num_segments) as u64
    }
}

/// Where a product's tensors are: device addresses, and row pitches in elements.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProductTensors {
    /// A of each segment.
    pub a: [u64; MAX_SEGMENTS],
    /// B of each segment.
    pub b: [u64; MAX_SEGMENTS],
    /// C.
    pub c: u64,
    /// 0, or the exponents of the power of two that each row of C is multiplied by (i32 `[m]`).
    pub row_exponents: u64,
    /// 0, or one exponent for all of C (i32), added to the row's.
    pub exponent: u64,
    /// Row pitch of A.
    pub lda: usize,
    /// Row pitch of B.
    pub ldb: usize,
    /// Row pitch of C.
    pub ldc: usize,
}

/// Arithmetic of a grouped GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operands {
    /// bf16 operands, fp32 accumulation.
    Bf16,
    /// fp16 operands, fp32 accumulation.
    F16,
    /// fp16 operands, fp32 accumulation, partial sums promoted to a second fp32 accumulator.
    F16Promoted,
}

/// Which kernel computes a group of products, and how the work is cut.
#[derive(Clone, Debug)]
pub struct GemmPlan {
    operands: Operands,
    products: Vec<ProductShape>,
    schedule: Schedule,
}

#[derive(Clone, Debug)]
enum Schedule {
    Portable(portable::PortablePlan),
    Hopper(hopper::HopperPlan),
}

impl GemmPlan {
    /// Plans `products` for `target`: the wgmma kernels where the module has them for these products, else the mma.sync ones.
    pub fn new(target: &Target, operands: Operands, products: &[ProductShape]) -> GemmPlan {
        let wgmma = target.module == ModuleKind::Hopper
            && operands != Operands::F16Promoted
            && products.iter().all(hopper::supports);
        let schedule = if wgmma {
            Schedule::Hopper(hopper::HopperPlan::new(products, target.num_sms))
        } else {
            let promoted = operands == Operands::F16Promoted;
            Schedule::Portable(portable::PortablePlan::new(products, target.num_sms, promoted))
        };
        GemmPlan { operands, products: products.into(), schedule }
    }

    /// Scratch memory that a run needs, in bytes: partial sums of split K ranges.
    pub fn workspace_bytes(&self) -> u64 {
        match &self.schedule {
            Schedule::Portable(plan) => plan.workspace_bytes(),
            Schedule::Hopper(plan) => plan.workspace_bytes(),
        }
    }

    /// Floating-point operations of all products.
    pub fn flops(&self) -> u64 {
        self.products.iter().map(ProductShape::flops).sum()
    }
}

impl fmt::Display for GemmPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.schedule {
            Schedule::Portable(plan) => plan.fmt(f),
            Schedule::Hopper(plan) => plan.fmt(f),
        }
    }
}
