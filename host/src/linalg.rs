//! Matrix products on the CPU, shared by the implementations and the references.

use ndarray::linalg::general_mat_mul;
use ndarray::parallel::prelude::*;
use ndarray::{Array2, ArrayBase, ArrayView2, Axis, Data, Ix2, LinalgScalar};

/// Rows of the result that one task computes: enough to pay for packing `b` again, few enough to share work among threads.
const ROW_BLOCK: usize = 128;

/// `a @ b`: `[m, k] @ [k, n] -> [m, n]`, row blocks in parallel; transposed views are taken as they are.
///
/// Every sum is formed in the same order whatever the number of threads.
///
/// # Panics
/// If the inner extents differ.
pub(crate) fn matmul<T, A, B>(a: &ArrayBase<A, Ix2>, b: &ArrayBase<B, Ix2>) -> Array2<T>
where
    T: LinalgScalar + Send + Sync,
    A: Data<Elem = T>,
    B: Data<Elem = T>,
{
    let (a, b): (ArrayView2<T>, ArrayView2<T>) = (a.view(), b.view());
    assert_eq!(a.ncols(), b.nrows(), "inner extents of a matrix product");
    let mut c = Array2::from_elem((a.nrows(), b.ncols()), T::zero());
    c.axis_chunks_iter_mut(Axis(0), ROW_BLOCK)
        .into_par_iter()
        .zip(a.axis_chunks_iter(Axis(0), ROW_BLOCK))
        .for_each(|(mut c, a)| general_mat_mul(T::one(), &a, &b, T::zero(), &mut c));
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(a: ArrayView2<f64>, b: ArrayView2<f64>) -> Array2<f64> {
        Array2::from_shape_fn((a.nrows(), b.ncols()), |(i, j)| (0..a.ncols()).map(|k| a[[i, k]] * b[[k, j]]).sum())
    }

    #[test]
    fn product_equals_the_triple_loop_for_any_extents_and_either_order() {
        for (m, k, n) in [(1, 1, 1), (0, 3, 2), (3, 0, 2), (3, 2, 0), (7, 300, 5), (129, 17, 33), (257, 64, 9)] {
            let a = Array2::from_shape_fn((m, k), |(i, j)| ((i * 31 + j * 17) % 23) as f64 - 11.0);
            let b = Array2::from_shape_fn((k, n), |(i, j)| ((i * 13 + j * 29) % 19) as f64 - 9.0);
            // Small integers: every sum is exact, in any order.
            assert_eq!(matmul(&a, &b), naive(a.view(), b.view()));
            let (a_t, b_t) = (a.t().to_owned(), b.t().to_owned());
            assert_eq!(matmul(&a_t.t(), &b_t.t()), naive(a.view(), b.view()));
        }
    }
}
