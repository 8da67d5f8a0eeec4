//! The portable grouped GEMM on the simulated GPU, in the launches that the host plans.
//!
//! Most operands are small integers: sums are then exact in any order, and results must be equal to the reference, rounded once.

use attn_backward::gemm::portable::PortablePlan;
use attn_backward::gemm::{Operands, ProductShape, ProductTensors};
use attn_backward::random;
use attn_backward_kernels::params::{Major, OutputType};
use attn_backward_tests::simulated::{Simulator, gemm, pitched_elements};
use half::{bf16, f16};
use ndarray::{Array1, Array2, ArrayView2, Axis, s};
use proptest::prelude::*;
use proptest::sample::select;
use rand::Rng;

const ENTRIES: [Operands; 3] = [Operands::Bf16, Operands::F16, Operands::F16Promoted];
const H200_SMS: u32 = 132;

/// One product: its shape, `a` and `b` of each segment as `[m, k]` and `[k, n]`, its scales, and how much farther rows are apart than
/// they are long.
#[derive(Clone, Debug)]
struct Case {
    shape: ProductShape,
    a: Vec<Array2<f32>>,
    b: Vec<Array2<f32>>,
    row_exponents: Option<Vec<i32>>,
    exponent: Option<i32>,
    /// What the device says of how much of k counts; A and B are NaN past it.
    k_limit: Option<i32>,
    gap: usize,
}

impl Case {
    /// Integers from -4 to 4.
    fn integers(seed: u64, shape: ProductShape) -> Case {
        let mut rng = random::stream(seed, 0, 0);
        let mut matrix =
            |rows, columns| Array2::from_shape_simple_fn((rows, columns), || rng.random_range(-4..=4) as f32);
        let a = (0..shape.num_segments).map(|_| matrix(shape.m, shape.k)).collect();
        let b = (0..shape.num_segments).map(|_| matrix(shape.k, shape.n)).collect();
        Case { shape, a, b, row_exponents: None, exponent: None, k_limit: None, gap: 8 }
    }

    /// k that counts: a negative limit is none.
    fn counted(&self) -> usize {
        self.k_limit.map_or(self.shape.k, |limit| self.shape.k.min(limit as u32 as usize))
    }

    /// The sums, exact for integers.
    fn sums(&self) -> Array2<f64> {
        let k = self.counted();
        let wide = |x: ArrayView2<f32>| x.mapv(f64::from);
        let products =
            self.a.iter().zip(&self.b).map(|(a, b)| wide(a.slice(s![.., ..k])).dot(&wide(b.slice(s![..k, ..]))));
        products.fold(Array2::zeros((self.shape.m, self.shape.n)), |sum, product| sum + product)
    }

    /// The sums, scaled, and rounded as C is; what f32 does not hold becomes infinite, denormal or zero.
    fn expected(&self) -> Array2<f32> {
        let mut c = self.sums();
        for (i, mut row) in c.axis_iter_mut(Axis(0)).enumerate() {
            let exponent = self.row_exponents.as_ref().map_or(0, |e| e[i]) + self.exponent.unwrap_or(0);
            row.mapv_inplace(|x| x * 2f64.powi(exponent.clamp(-252, 252)));
        }
        match self.shape.c_type {
            OutputType::F32 => c.mapv(|x| x as f32),
            OutputType::Bf16 => c.mapv(|x| bf16::from_f32(x as f32).to_f32()),
        }
    }
}

fn shape(m: usize, n: usize, k: usize, num_segments: usize, a_major: Major, c_type: OutputType) -> ProductShape {
    ProductShape { m, n, k, num_segments, a_major, c_type }
}

/// C of every product of one launch. Between the rows of operands lies NaN; between the rows of C nothing may be written.
fn run(gpu: &mut Simulator, operands: Operands, plan: &PortablePlan, cases: &[Case]) -> Vec<Array2<f32>> {
    let bits = |x: f32| match operands {
        Operands::Bf16 => bf16::from_f32(x).to_bits(),
        Operands::F16 | Operands::F16Promoted => f16::from_f32(x).to_bits(),
    };
    let mut tensors = Vec::new();
    for case in cases {
        let Case { shape, a, b, row_exponents, exponent, k_limit, gap } = case;
        let (lda, ldb) = (if shape.a_major == Major::K { shape.k } else { shape.m } + gap, shape.n + gap);
        let ldc = shape.n + gap;
        let mut of = ProductTensors { lda: lda as u32, ldb: ldb as u32, ldc: ldc as u32, ..Default::default() };
        for (segment, (a, b)) in a.iter().zip(b).enumerate() {
            let (mut a, mut b) = (a.mapv(bits), b.mapv(bits));
            a.slice_mut(s![.., case.counted()..]).fill(bits(f32::NAN));
            b.slice_mut(s![case.counted().., ..]).fill(bits(f32::NAN));
            let a = if shape.a_major == Major::K { a } else { a.reversed_axes().as_standard_layout().into_owned() };
            of.a[segment] = gpu.upload_pitched(&a, lda, bits(f32::NAN));
            of.b[segment] = gpu.upload_pitched(&b, ldb, bits(f32::NAN));
        }
        let elem_bytes = if shape.c_type == OutputType::Bf16 { 2 } else { 4 };
        of.c = gpu.output(elem_bytes * pitched_elements(shape.m, shape.n, ldc));
        of.row_exponents = row_exponents.as_ref().map_or(0, |e| gpu.upload(&Array1::from(e.clone())));
        of.k_limit = k_limit.map_or(0, |limit| gpu.upload(&Array1::from(vec![limit])));
        of.exponent = exponent.map_or(0, |e| gpu.upload(&Array1::from(vec![e])));
        tensors.push(of);
    }
    let workspace = gpu.output(plan.workspace_bytes());
    gemm::run(gpu, operands, plan, &tensors, workspace);
    let download = |(Case { shape, .. }, of): (&Case, &ProductTensors)| {
        let (extents, pitch) = ((shape.m, shape.n), of.ldc as usize);
        match shape.c_type {
            OutputType::F32 => gpu.download_pitched::<f32>(of.c, extents, pitch),
            OutputType::Bf16 => gpu.download_pitched::<bf16>(of.c, extents, pitch).mapv(f32::from),
        }
    };
    cases.iter().zip(&tensors).map(download).collect()
}

fn plan(operands: Operands, cases: &[Case], num_sms: u32) -> PortablePlan {
    let shapes: Vec<ProductShape> = cases.iter().map(|case| case.shape).collect();
    PortablePlan::new(&shapes, num_sms, operands == Operands::F16Promoted).unwrap()
}

#[track_caller]
fn assert_exact(operands: Operands, cases: &[Case], num_sms: u32) {
    let Some(mut gpu) = Simulator::new() else { return };
    let plan = plan(operands, cases, num_sms);
    for (case, c) in cases.iter().zip(run(&mut gpu, operands, &plan, cases)) {
        let expected = case.expected();
        let wrong = c.indexed_iter().find(|(at, x)| **x != expected[*at]);
        assert!(wrong.is_none(), "{operands:?} {:?}: {wrong:?} in\n{plan}", case.shape);
    }
}

/// The output types of an entry: the promoted one has f32 alone.
fn c_types(operands: Operands) -> &'static [OutputType] {
    if operands == Operands::F16Promoted { &[OutputType::F32] } else { &[OutputType::F32, OutputType::Bf16] }
}

#[test]
fn extents_around_a_tile_are_right_in_m_n_and_k() {
    let k_major = [(1, 8, 8), (7, 24, 56), (127, 120, 64), (128, 128, 72), (129, 136, 136), (257, 8, 200)];
    let mn_major = [(8, 8, 1), (8, 136, 63), (120, 120, 64), (128, 128, 65), (136, 8, 129), (264, 24, 200)];
    for operands in ENTRIES {
        let c_types = c_types(operands);
        let k = k_major.map(|(m, n, k)| (m, n, k, Major::K));
        let mn = mn_major.map(|(m, n, k)| (m, n, k, Major::Mn));
        let cases: Vec<Case> = k
            .into_iter()
            .chain(mn)
            .enumerate()
            .map(|(i, (m, n, k, major))| {
                Case::integers(i as u64, shape(m, n, k, 1 + i % 3, major, c_types[i % c_types.len()]))
            })
            .collect();
        for launch in cases.chunks(5) {
            assert_exact(operands, launch, H200_SMS);
        }
    }
}

#[test]
fn nothing_past_the_devices_limit_of_k_reaches_a_product() {
    for operands in ENTRIES {
        let c_type = *c_types(operands).last().unwrap();
        // whole and split products; the limit in, at the end of, and between k-blocks
        let mut cases = [(0, 200), (1, 200), (64, 200), (100, 1000), (511, 1537)].map(|(limit, k)| {
            let shape = shape(136, 72, k, 1, Major::Mn, c_type);
            Case { k_limit: Some(limit), ..Case::integers(k as u64, shape) }
        });
        assert_exact(operands, &cases, H200_SMS);
        for (case, limit) in cases.iter_mut().zip([200, 201, -1, i32::MAX, i32::MIN]) {
            case.k_limit = Some(limit);
        }
        assert_exact(operands, &cases, H200_SMS);
    }
}

#[test]
fn products_without_rows_columns_or_depth_are_empty_or_zero() {
    for operands in ENTRIES {
        let f32 = OutputType::F32;
        let shapes = [
            shape(0, 16, 64, 1, Major::K, f32),
            shape(24, 0, 64, 2, Major::Mn, f32),
            shape(130, 16, 0, 3, Major::K, f32),
            shape(16, 136, 0, 1, Major::Mn, f32),
            shape(9, 8, 8, 1, Major::K, f32),
        ];
        assert_exact(operands, &shapes.map(|shape| Case::integers(1, shape)), H200_SMS);
        assert_exact(
            operands,
            &shapes[..2].iter().map(|shape| Case::integers(1, *shape)).collect::<Vec<_>>(),
            H200_SMS,
        );
    }
}

#[test]
fn split_products_equal_whole_ones() {
    for operands in ENTRIES {
        let c_type = *c_types(operands).last().unwrap();
        let mut cases = [
            Case::integers(1, shape(130, 72, 1000, 2, Major::K, OutputType::F32)),
            Case::integers(2, shape(72, 136, 1537, 1, Major::Mn, c_type)),
            Case::integers(3, shape(40, 40, 64, 1, Major::Mn, OutputType::F32)),
        ];
        cases[0].row_exponents = Some((0..130).map(|row| row - 60).collect());
        cases[1].exponent = Some(-3);
        let splits: Vec<u32> = plan(operands, &cases, H200_SMS).products().iter().map(|p| p.splits).collect();
        assert!(splits.iter().filter(|splits| **splits > 1).count() == 2, "{splits:?}");
        assert_exact(operands, &cases, H200_SMS);
        let plan = plan(operands, &cases, 1);
        assert!(plan.products().iter().all(|p| p.splits <= 2), "one multiprocessor gains nothing from splits");
        assert_exact(operands, &cases, 1);
    }
}

#[test]
fn scales_are_exact_up_to_the_ends_of_f32_and_clamped_beyond() {
    for (operands, c_type) in ENTRIES.into_iter().flat_map(|o| c_types(o).iter().map(move |c_type| (o, *c_type))) {
        for splits in [false, true] {
            let k = if splits { 2048 } else { 72 };
            let mut case = Case::integers(4, shape(67, 24, k, 1, Major::K, c_type));
            assert_eq!(plan(operands, std::slice::from_ref(&case), H200_SMS).products()[0].splits > 1, splits);
            case.row_exponents = Some((0..67).map(|row| 8 * (row - 33)).collect());
            for exponent in [None, Some(0), Some(-100), Some(90), Some(1000), Some(-1000)] {
                case.exponent = exponent;
                assert_exact(operands, std::slice::from_ref(&case), H200_SMS);
            }
            case.row_exponents = None;
            case.exponent = Some(-140);
            assert_exact(operands, &[case], H200_SMS);
        }
    }
}

#[test]
fn bf16_output_is_rounded_once_to_nearest_even() {
    for operands in [Operands::Bf16, Operands::F16] {
        // 257 and 259 lie halfway between bf16 numbers: 256, 258, 260.
        let mut case = Case::integers(5, shape(8, 8, 8, 1, Major::K, OutputType::Bf16));
        case.a[0].fill(0.0);
        case.b[0].fill(0.0);
        for row in 0..8 {
            case.a[0][[row, 0]] = 128.0;
            case.a[0][[row, 1]] = (row + 1) as f32;
        }
        case.b[0].row_mut(0).fill(2.0);
        case.b[0].row_mut(1).fill(1.0);
        let Some(mut gpu) = Simulator::new() else { return };
        let plan = plan(operands, std::slice::from_ref(&case), H200_SMS);
        let c = run(&mut gpu, operands, &plan, &[case]).remove(0);
        assert_eq!(c.column(7).to_vec(), [256.0, 258.0, 260.0, 260.0, 260.0, 262.0, 264.0, 264.0]);
    }
}

#[test]
fn non_finite_elements_reach_their_row_or_column_alone() {
    for operands in ENTRIES {
        for major in [Major::K, Major::Mn] {
            let mut case = Case::integers(6, shape(136, 136, 136, 2, major, OutputType::F32));
            let expected = case.expected();
            case.a[1][[130, 135]] = f32::NAN;
            case.b[0][[135, 3]] = f32::INFINITY;
            let Some(mut gpu) = Simulator::new() else { return };
            let plan = plan(operands, std::slice::from_ref(&case), H200_SMS);
            let c = run(&mut gpu, operands, &plan, std::slice::from_ref(&case)).remove(0);
            for ((row, column), x) in c.indexed_iter() {
                match (row, column) {
                    (130, _) => assert!(x.is_nan()),
                    // 0 * infinity is NaN.
                    (row, 3) => assert_eq!(x.is_nan(), case.a[0][[row, 135]] == 0.0, "{x}"),
                    at => assert_eq!(*x, expected[at]),
                }
                assert!(x.is_finite() == (row != 130 && column != 3));
            }
        }
    }
}

#[test]
fn sums_of_normal_numbers_have_the_error_of_fp32_sums() {
    for operands in ENTRIES {
        let round = |x: f32| match operands {
            Operands::Bf16 => bf16::from_f32(x).to_f32(),
            Operands::F16 | Operands::F16Promoted => f16::from_f32(x).to_f32(),
        };
        let mut case = Case::integers(7, shape(64, 40, 1000, 1, Major::K, OutputType::F32));
        case.a[0] = random::normal::<f32, _>(7, 0, 1.0, (64, 1000)).mapv(round);
        case.b[0] = random::normal::<f32, _>(7, 1, 1.0, (1000, 40)).mapv(round);
        let magnitudes = case.a[0].mapv(|x| f64::from(x.abs())).dot(&case.b[0].mapv(|x| f64::from(x.abs())));
        for num_sms in [1, H200_SMS] {
            let Some(mut gpu) = Simulator::new() else { return };
            let plan = plan(operands, std::slice::from_ref(&case), num_sms);
            let c = run(&mut gpu, operands, &plan, std::slice::from_ref(&case)).remove(0);
            // One rounding for every 16 of k at most, and some for what is added up in the end.
            let bound = magnitudes.mapv(|x| x * (1000.0 / 16.0 + 20.0) * 2f64.powi(-24));
            let errors = (c.mapv(f64::from) - case.sums()).mapv(f64::abs);
            assert!(errors.iter().zip(&bound).all(|(error, bound)| error <= bound));
        }
    }
}

fn shapes() -> impl Strategy<Value = Vec<ProductShape>> {
    let extent = || prop_oneof![3 => 1..=12usize, 1 => 13..=36usize];
    let k_major = (1..=150usize, extent(), extent()).prop_map(|(m, n, k)| (m, 8 * n, 8 * k, Major::K));
    let mn_major = (extent(), extent(), 0..=300usize).prop_map(|(m, n, k)| (8 * m, 8 * n, k, Major::Mn));
    let types = select(vec![OutputType::F32, OutputType::Bf16]);
    let product = (prop_oneof![k_major, mn_major], 1..=3usize, types)
        .prop_map(|((m, n, k, major), segments, c_type)| shape(m, n, k, segments, major, c_type));
    prop::collection::vec(product, 1..=5)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, max_shrink_iters: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_group_of_products_is_exact(
        shapes in shapes(),
        operands in select(ENTRIES.to_vec()),
        num_sms in select(vec![1, 16, H200_SMS]),
        gap in select(vec![0, 8, 24]),
        seed in any::<u64>(),
        exponents in (-20..=20i32, prop::bool::ANY, prop::bool::ANY),
    ) {
        let cases: Vec<Case> = shapes
            .into_iter()
            .enumerate()
            .map(|(i, mut shape)| {
                if operands == Operands::F16Promoted {
                    shape.c_type = OutputType::F32;
                }
                let mut case = Case::integers(seed.wrapping_add(i as u64), shape);
                let (exponent, whole, rows) = exponents;
                case.gap = gap;
                case.exponent = whole.then_some(exponent);
                case.row_exponents = rows.then(|| (0..shape.m as i32).map(|row| row % 9 - exponent).collect());
                case
            })
            .collect();
        assert_exact(operands, &cases, num_sms);
    }
}
