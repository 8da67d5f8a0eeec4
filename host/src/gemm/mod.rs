//! Grouped GEMM: several products `C = A B` in one launch, planned without a GPU.
//!
//! Both operations spend nearly all of their arithmetic here. A product comes in the two forms of a linear layer's backward pass:
//! *dgrad* (`dX = dY W`: A K-major) and *wgrad* (`dW = dY^T X`: A MN-major); B is always MN-major.
use std::fmt;

use attn_backward_kernels::params::{MAX_SEGMENTS, Major, OutputType};

use crate::gpu::ModuleKind;
use crate::{Error, Target};

mod grouped;
pub mod hopper;
pub mod portable;

pub(crate) use grouped::{ConversionTensors, GroupedGemm, PreparedGemm};
use hopper::{Accumulation, HopperPlan, KCuts, Lead};

/// Sizes and layout of one product: `C[m, n] = sum over segments of A_s[m, k] B_s[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductShape {
    /// Rows of C.
    pub m: usize,
    /// Columns of C, a multiple of 8.
    pub n: usize,
    /// Depth of a segment.
    pub k: usize,
    /// Segments, 1 to 3.
    pub num_segments: usize,
    /// Layout of A.
    pub a_major: Major,
    /// Element type of C.
    pub c_type: OutputType,
}

/// Where a product's tensors are: device addresses, and row pitches in elements.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProductTensors {
    /// A of each segment. [`Operands::F16Promoted`]: the part that `config::wgmma::segment_parts` names, the low part behind the high one.
    pub a: [u64; MAX_SEGMENTS],
    /// B of each segment, likewise.
    pub b: [u64; MAX_SEGMENTS],
    /// C.
    pub c: u64,
    /// 0, or the exponents of the power of two that each row of C is multiplied by (i32 `[m]`).
    pub row_exponents: u64,
    /// 0, or one exponent for all of C (i32), added to the row's.
    pub exponent: u64,
    /// 0, or where the device says how much of k is summed (i32): MN-major A, one segment; the same for all such products. A and B may hold
    /// anything past it, in `wgmma_*` kernels if they are zero there or have a `boundary`.
    pub k_limit: u64,
    /// 0, or A's k-block that the limit cuts, as `WgmmaProduct::a_boundary` says; `wgmma_*` kernels only.
    pub a_boundary: u64,
    /// The same of B.
    pub b_boundary: u64,
    /// Row pitch of A.
    pub lda: u32,
    /// Row pitch of B.
    pub ldb: u32,
    /// Row pitch of C.
    pub ldc: u32,
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
    Hopper(HopperPlan),
}

impl GemmPlan {
    /// Plans `products` for `target`: the wgmma kernels where the module has them for these products, else the mma.sync ones.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for extents that the kernels do not take.
    pub fn new(target: &Target, operands: Operands, products: &[ProductShape]) -> Result<GemmPlan, Error> {
        GemmPlan::with_k_cuts(target, operands, products, KCuts::Allowed)
    }

    /// As [`GemmPlan::new`], but the wgmma kernels cut nothing along K unless `k_cuts` allows it: a launch that has no counters needs no memset
    /// before it.
    ///
    /// # Errors
    /// As [`GemmPlan::new`].
    pub fn with_k_cuts(
        target: &Target,
        operands: Operands,
        products: &[ProductShape],
        k_cuts: KCuts,
    ) -> Result<GemmPlan, Error> {
        let promoted = operands == Operands::F16Promoted;
        let accumulation = if promoted { Accumulation::Promoted } else { Accumulation::Plain };
        let wgmma = match target.module {
            ModuleKind::Hopper => HopperPlan::new(accumulation, products, target.num_sms, k_cuts),
            ModuleKind::Portable => None,
        };
        let schedule = match wgmma {
            Some(plan) => Schedule::Hopper(plan),
            None => Schedule::Portable(portable::PortablePlan::new(
                products,
                u32::try_from(target.num_sms).unwrap_or(u32::MAX),
                promoted,
            )?),
        };
        Ok(GemmPlan { operands, products: products.into(), schedule })
    }

    /// Plans `products` of fp16 operands for one launch of a kernel that converts them first, as `lead` says. `None` if there is no such kernel for `target`
    /// or these products.
    pub(crate) fn converting(target: &Target, products: &[ProductShape], lead: &Lead) -> Option<GemmPlan> {
        if target.module != ModuleKind::Hopper {
            return None;
        }
        let plan = HopperPlan::after(Accumulation::Plain, products, lead, KCuts::Allowed)?;
        Some(GemmPlan { operands: Operands::F16, products: products.into(), schedule: Schedule::Hopper(plan) })
    }

    /// Whether it is one launch that converts its operands first.
    pub fn converts(&self) -> bool {
        matches!(&self.schedule, Schedule::Hopper(plan) if plan.converts())
    }

    /// The launches of the mma.sync kernels; `None` if the wgmma ones run.
    pub fn portable(&self) -> Option<&portable::PortablePlan> {
        match &self.schedule {
            Schedule::Portable(plan) => Some(plan),
            Schedule::Hopper(_) => None,
        }
    }

    /// The launch of a wgmma kernel; `None` if the mma.sync ones run.
    pub fn hopper(&self) -> Option<&HopperPlan> {
        match &self.schedule {
            Schedule::Portable(_) => None,
            Schedule::Hopper(plan) => Some(plan),
        }
    }

    /// Scratch memory that a run needs, in bytes: partial sums of split K ranges.
    pub fn workspace_bytes(&self) -> u64 {
        match &self.schedule {
            Schedule::Portable(plan) => plan.workspace_bytes() as u64,
            Schedule::Hopper(plan) => hopper_counter_bytes(plan) + 4 * plan.workspace_floats() as u64,
        }
    }

    /// Whether it is one launch of a wgmma kernel, which takes a rider.
    pub fn is_hopper(&self) -> bool {
        matches!(self.schedule, Schedule::Hopper(_))
    }

    /// Name of the kernel that multiplies.
    pub(crate) fn gemm_kernel(&self) -> &'static str {
        match (&self.schedule, self.operands, self.products.first().map(|product| product.c_type)) {
            (Schedule::Portable(_), Operands::Bf16, _) => "gemm_bf16",
            (Schedule::Portable(_), Operands::F16, _) => "gemm_f16",
            (Schedule::Portable(_), Operands::F16Promoted, _) => "gemm_f16_promoted",
            (Schedule::Hopper(_), Operands::Bf16, Some(OutputType::Bf16)) => "wgmma_bf16_bf16",
            (Schedule::Hopper(_), Operands::Bf16, _) => "wgmma_bf16_f32",
            (Schedule::Hopper(plan), Operands::F16, _) if plan.converts() => "cross_wgmma_fast",
            (Schedule::Hopper(_), Operands::F16, _) => "wgmma_f16_f32",
            (Schedule::Hopper(_), Operands::F16Promoted, _) => "wgmma_f16_f32_promoted",
        }
    }

    /// Names of the kernels that a run launches, in order.
    pub fn kernels(&self) -> Vec<&'static str> {
        let (gemm, reduce) = match &self.schedule {
            Schedule::Portable(plan) => (plan.blocks() > 0, plan.reduce_blocks() > 0),
            Schedule::Hopper(_) => (true, false),
        };
        let launches = [(gemm, self.gemm_kernel()), (reduce, "gemm_reduce")];
        launches.into_iter().filter(|(launched, _)| *launched).map(|(_, name)| name).collect()
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

/// Bytes at the start of a Hopper plan's workspace that its counters take; what follows is aligned for TMA.
fn hopper_counter_bytes(plan: &HopperPlan) -> u64 {
    (4 * plan.num_counters() as u64).next_multiple_of(256)
}
