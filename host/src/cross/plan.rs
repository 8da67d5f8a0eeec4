//! Plan of operation B: shapes -> launches and workspace, without a GPU.
use std::fmt;

use attn_backward_kernels::config::cross_convert;
use attn_backward_kernels::config::wgmma::ready;
use attn_backward_kernels::params::{Major, OutputType};

use super::{Precision, Shape, conversion};
use crate::gemm::{GemmPlan, Operands, ProductShape};
use crate::gpu::ModuleKind;
use crate::{Error, Region, Target, WorkspaceLayout};

/// The two fp16 parts of an operand; `Fast` has the first only (the second is empty).
pub(super) type Parts = [Region; 2];

/// How operation B runs for one shape.
#[derive(Clone, Debug)]
pub struct Plan {
    shape: Shape,
    precision: Precision,
    target: Target,
    pub(super) gemm: GemmPlan,
    layout: WorkspaceLayout,
    pub(super) regions: Regions,
}

/// Places in the workspace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Regions {
    pub dq: Parts,
    pub dkv: Parts,
    pub x_dec: Parts,
    pub x_enc: Parts,
    pub wq: Parts,
    pub wkv: Parts,
    pub row_exponents_dec: Region,
    pub row_exponents_enc: Region,
    pub exponents: Region,
    /// Of the one launch: from here to the end of the GEMM's counters, which its region begins with, all is zeroed before a run. Else of each block of
    /// `cross_convert_gradients_*`.
    pub maxima: Region,
    pub ready: Region,
    pub gemm: Region,
}

impl Plan {
    /// Plans the operation.
    ///
    /// # Errors
    /// As [`Shape::check`].
    pub fn new(shape: &Shape, precision: Precision, target: &Target) -> Result<Plan, Error> {
        shape.check()?;
        let (operands, segments) = match precision {
            Precision::Fast => (Operands::F16, 1),
            Precision::High => (Operands::F16Promoted, 3),
        };
        let products = products(shape, segments);
        // With three products to one conversion there is too little to hide (`High`: 915 us with one launch, 849 to 862 with separate ones).
        let one_launch = target.module == ModuleKind::Hopper && precision == Precision::Fast;
        let lead = if one_launch { conversion::lead(shape, target.num_sms) } else { None };
        let converting = lead.and_then(|lead| GemmPlan::converting(target, &products, &lead));
        let gemm = match converting {
            Some(gemm) => gemm,
            None => GemmPlan::new(target, operands, &products)?,
        };

        let maxima_sets = if gemm.converts() { 1 } else { u64::from(gradients_blocks(shape, target)) };
        let mut layout = WorkspaceLayout::default();
        let mut parts = |names: [&'static str; 2], rows: usize, columns: usize| {
            let bytes = 2 * (rows * columns) as u64;
            let second = if precision == Precision::High { bytes } else { 0 };
            [layout.add(names[0], bytes), layout.add(names[1], second)]
        };
        let (rows_dec, rows_enc) = (shape.rows_dec(), shape.rows_enc());
        let kv = 2 * shape.kv_out_dim();
        let dq = parts(["dq fp16", "dq fp16 low"], rows_dec, shape.q_out_dim());
        let dkv = parts(["dk, dv fp16", "dk, dv fp16 low"], rows_enc, kv);
        let x_dec = parts(["decoder fp16", "decoder fp16 low"], rows_dec, shape.hidden_size);
        let x_enc = parts(["encoder fp16", "encoder fp16 low"], rows_enc, shape.cross_hidden_size);
        let wq = parts(["q_weight fp16", "q_weight fp16 low"], shape.q_out_dim(), shape.hidden_size);
        let wkv = parts(["kv weights fp16", "kv weights fp16 low"], kv, shape.cross_hidden_size);
        let regions = Regions {
            dq,
            dkv,
            x_dec,
            x_enc,
            wq,
            wkv,
            row_exponents_dec: layout.add("decoder row exponents", 4 * rows_dec as u64),
            row_exponents_enc: layout.add("encoder row exponents", 4 * rows_enc as u64),
            exponents: layout.add("exponents", 16),
            maxima: layout.add("maxima", 4 * cross_convert::MAXIMA as u64 * maxima_sets),
            ready: layout.add("rows converted", 4 * ready_counters(&gemm, rows_dec, rows_enc)),
            gemm: layout.add("partial sums", gemm.workspace_bytes()),
        };
        Ok(Plan { shape: *shape, precision, target: *target, gemm, layout, regions })
    }

    /// Sizes that it is for.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Arithmetic that it is for.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Machine that it is for.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The five products, in the order of the gradients but for grad_q_weight, which follows grad_decoder_hidden_states.
    pub fn gemm(&self) -> &GemmPlan {
        &self.gemm
    }

    /// Extra device memory of a run, by region.
    pub fn workspace(&self) -> &WorkspaceLayout {
        &self.layout
    }
}

/// Blocks of `cross_convert_gradients_*`.
pub(super) fn gradients_blocks(shape: &Shape, target: &Target) -> u32 {
    let weight_elements = shape.q_out_dim() * shape.hidden_size + 2 * shape.kv_out_dim() * shape.cross_hidden_size;
    let (dec, enc) = (shape.rows_dec() as u32, shape.rows_enc() as u32);
    cross_convert::gradients_blocks(dec, enc, weight_elements as u64, target.num_sms as u32)
}

/// Counters of a launch that converts.
fn ready_counters(gemm: &GemmPlan, rows_dec: usize, rows_enc: usize) -> u64 {
    if gemm.converts() { u64::from(ready::counters(rows_dec as u32, rows_enc as u32)) } else { 0 }
}

/// The products, in the order of [`super::launch`]: dgrad and wgrad of the decoder, then dgrad and the two wgrads of the encoder.
pub(super) fn products(shape: &Shape, segments: usize) -> [ProductShape; 5] {
    let product = |m, n, k, a_major| ProductShape { m, n, k, num_segments: segments, a_major, c_type: OutputType::F32 };
    let (rows_dec, rows_enc) = (shape.rows_dec(), shape.rows_enc());
    let (hidden, cross) = (shape.hidden_size, shape.cross_hidden_size);
    [
        product(rows_dec, hidden, shape.q_out_dim(), Major::K),
        product(shape.q_out_dim(), hidden, rows_dec, Major::Mn),
        product(rows_enc, cross, 2 * shape.kv_out_dim(), Major::K),
        product(shape.kv_out_dim(), cross, rows_enc, Major::Mn),
        product(shape.kv_out_dim(), cross, rows_enc, Major::Mn),
    ]
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape {
            batch_size,
            seq_len_dec,
            seq_len_enc,
            num_heads,
            num_kv_heads,
            head_dim,
            hidden_size,
            cross_hidden_size,
        } = self.shape;
        writeln!(
            f,
            "operation B, {} precision, {}: batch {batch_size}, {seq_len_dec} decoder and {seq_len_enc} encoder tokens, {num_heads} heads \
             on {num_kv_heads}, head_dim {head_dim}, hidden {hidden_size}, cross {cross_hidden_size}",
            self.precision, self.target
        )?;
        let (flops, bytes) = (super::flops(&self.shape) / 1e9, super::bytes(&self.shape) / 1e6);
        writeln!(f, "{flops:.2} GFLOP, {bytes:.1} MB at least")?;
        if self.gemm.converts() {
            writeln!(f, "launches: memset, {} (converts, then multiplies):", self.gemm.gemm_kernel())?;
        } else {
            writeln!(f, "launches: cross_convert_gradients, cross_convert_operands, then")?;
        }
        writeln!(f, "{}", self.gemm)?;
        write!(f, "{}", self.layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(seq_len_dec: usize, seq_len_enc: usize) -> Shape {
        Shape {
            batch_size: 3,
            seq_len_dec,
            seq_len_enc,
            num_heads: 16,
            num_kv_heads: 4,
            head_dim: 256,
            hidden_size: 1536,
            cross_hidden_size: 1024,
        }
    }

    #[test]
    fn low_parts_lie_behind_the_high_ones_where_one_tensor_map_covers_both() {
        for (dec, enc) in [(1, 1), (211, 373), (100_003, 349_527)] {
            let plan = Plan::new(&shape(dec, enc), Precision::High, &Target::h200(ModuleKind::Hopper)).unwrap();
            let Regions { dq, dkv, x_dec, x_enc, wq, wkv, .. } = plan.regions;
            for [high, low] in [dq, dkv, x_dec, x_enc, wq, wkv] {
                let distance = low.offset - high.offset;
                assert!(distance >= high.bytes && distance.is_multiple_of(16) && distance < 1 << 40);
                assert_eq!(low.bytes, high.bytes);
            }
        }
    }

    #[test]
    fn fast_has_no_low_parts() {
        let plan = Plan::new(&shape(211, 373), Precision::Fast, &Target::h200(ModuleKind::Hopper)).unwrap();
        let Regions { dq, dkv, x_dec, x_enc, wq, wkv, .. } = plan.regions;
        assert!([dq, dkv, x_dec, x_enc, wq, wkv].iter().all(|[high, low]| high.bytes > 0 && low.bytes == 0));
    }
}
