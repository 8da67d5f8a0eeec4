//! Seeded random tensors, the same for any number of threads.
//!
//! A tensor is cut into blocks; each block is drawn from its own ChaCha8 stream, numbered by tensor and block.

use ndarray::{Array, ShapeBuilder};
use num_traits::AsPrimitive;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;

/// Elements drawn from one stream.
const BLOCK_ELEMS: usize = 1 << 15;

/// A row-major tensor of normally distributed values with mean 0, drawn in f32 and rounded to `T` (`bf16` or `f32`).
///
/// The values depend on `seed`, on `tensor` (different numbers give independent tensors) and on the number of elements before
/// each, on nothing else.
pub fn normal<T, Sh>(seed: u64, tensor: u32, std_dev: f32, shape: Sh) -> Array<T, Sh::Dim>
where
    f32: AsPrimitive<T>,
    T: Copy + Default + Send + 'static,
    Sh: ShapeBuilder,
{
    let mut values = Array::from_elem(shape, T::default());
    if let Some(values) = values.as_slice_memory_order_mut() {
        values.par_chunks_mut(BLOCK_ELEMS).enumerate().for_each(|(block, values)| {
            let mut rng = stream(seed, tensor, block as u32);
            for value in values {
                *value = (std_dev * rng.sample::<f32, _>(StandardNormal)).as_();
            }
        });
    }
    values
}

/// The random numbers of one block of one tensor.
pub fn stream(seed: u64, tensor: u32, block: u32) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream((u64::from(tensor) << 32) | u64::from(block));
    rng
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use ndarray::{Array1, Array2};

    #[test]
    fn values_do_not_depend_on_the_number_of_threads() {
        let draw = || normal::<f32, _>(7, 3, 1.0, (5, BLOCK_ELEMS));
        let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let one: Array2<f32> = pool(1).install(draw);
        assert_eq!(one, pool(3).install(draw));
    }

    #[test]
    fn seeds_tensors_and_blocks_are_independent() {
        let draw = |seed, tensor| -> Array1<f32> { normal(seed, tensor, 1.0, 2 * BLOCK_ELEMS) };
        let (a, b, c) = (draw(1, 0), draw(2, 0), draw(1, 1));
        let correlation = |x: ndarray::ArrayView1<f32>, y: ndarray::ArrayView1<f32>| x.dot(&y) / x.len() as f32;
        assert!(correlation(a.view(), b.view()).abs() < 0.02);
        assert!(correlation(a.view(), c.view()).abs() < 0.02);
        let (first, second) = a.view().split_at(ndarray::Axis(0), BLOCK_ELEMS);
        assert!(correlation(first, second).abs() < 0.03);
    }

    #[test]
    fn moments_are_those_of_the_normal_distribution() {
        let x: Array1<bf16> = normal(11, 0, 0.5, 1 << 20);
        let x = x.mapv(f64::from) / 0.5;
        assert!(x.mean().unwrap().abs() < 0.005);
        assert!((x.mapv(|x| x * x).mean().unwrap() - 1.0).abs() < 0.01);
        assert!((x.mapv(|x| x.powi(4)).mean().unwrap() - 3.0).abs() < 0.1);
    }
}
