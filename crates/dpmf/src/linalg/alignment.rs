//! How large a quadratic form of unit vectors can be.

use faer::{Mat, Side};

/// Vectors up to which the largest form is looked for: a look is a decomposition, and sweeps cost as much each.
pub(crate) const MOST: usize = 256;

/// Sweeps over the vectors, where they are looked for.
const SWEEPS: usize = 100;

/// Bounds `max Σ_ij X_ij⟨u_i, u_j⟩` over unit vectors `u_i` of any directions, for a symmetric matrix `X`, from vectors `y_i` that
/// nearly attain it; returns the bound and about what they attain.
///
/// For a diagonal matrix `Λ ⪰ X` the form is at most `Σ λ_i`. With `λ_i = Σ_j X_ij⟨y_i, y_j⟩` the two agree at the maximum, where
/// `Λ − X` is positive semi-definite; elsewhere its diagonal is raised until it is. The plain bound `Σ|X_ij|` is exact where no
/// entry is negative, and the better of both is taken.
///
/// Guarantee: not below the exact maximum, for the matrix as given. Cost: O(k³).
///
/// Reference: Goemans and Williamson, "Improved approximation algorithms for maximum cut", 1995, for the duality.
pub(crate) fn largest(x: &[f64], y: &[f64]) -> (f64, f64) {
    let k = x.len().isqrt();
    let plain: f64 = x.iter().map(|x| x.abs()).sum();
    if x.iter().all(|x| *x >= 0.0) || !plain.is_finite() {
        return (plain, plain);
    }
    let width = y.len() / k;
    let product = |i: usize, j: usize| -> f64 {
        y[i * width..][..width].iter().zip(&y[j * width..][..width]).map(|(a, b)| a * b).sum()
    };
    let lambda: Vec<f64> = (0..k).map(|i| (0..k).map(|j| x[i * k + j] * product(i, j)).sum()).collect();
    let attained: f64 = lambda.iter().sum();
    let top = |entry: &dyn Fn(usize, usize) -> f64| {
        let matrix = Mat::from_fn(k, k, |i, j| entry(i.max(j), i.min(j)));
        matrix.self_adjoint_eigenvalues(Side::Lower).ok().and_then(|values| values.last().copied())
    };
    // A computed eigenvalue is off by a few k units of the norm: allowed for many times over.
    let room = 64.0 * k as f64 * f64::EPSILON;
    let shifted = top(&|i, j| x[i * k + j] - if i == j { lambda[i] } else { 0.0 })
        .map(|over| attained + k as f64 * (over.max(0.0) + room * plain));
    // The same in proportion, where the λ differ much.
    let least = 1e-9 * lambda.iter().copied().fold(0.0, f64::max);
    let raised: Vec<f64> = lambda.iter().map(|l| l.max(least)).collect();
    let relative = |i: usize, j: usize| x[i * k + j] / (raised[i] * raised[j]).sqrt();
    let size: f64 = (0..k * k).map(|at| relative(at / k, at % k).abs()).sum();
    let scaled = top(&relative)
        .filter(|_| least > 0.0)
        .map(|over| raised.iter().sum::<f64>() * (over.max(1.0) + room * size));
    let bound = [shifted, scaled].into_iter().flatten().filter(|x| x.is_finite()).fold(plain, f64::min);
    (bound, attained)
}

/// [`largest`] with vectors that are looked for: each in turn is the best beside the others.
pub(crate) fn largest_of(x: &[f64]) -> (f64, f64) {
    let k = x.len().isqrt();
    let negative = x.iter().any(|x| *x < 0.0);
    let mut y = vec![0.0; k * k];
    for i in 0..k {
        // A common part, with the sign that the first vector wants, and one of its own.
        y[i * k] = if x[i] < 0.0 { -0.8 } else { 0.8 };
        y[i * k + i] += 0.6;
        normalise(&mut y[i * k..][..k]);
    }
    if !negative || k > MOST {
        let plain = x.iter().map(|x| x.abs()).sum();
        return (plain, plain);
    }
    let (mut last, mut moved) = (f64::NEG_INFINITY, vec![0.0; k]);
    for _ in 0..SWEEPS {
        let mut total = 0.0;
        for i in 0..k {
            moved.fill(0.0);
            for j in (0..k).filter(|j| *j != i) {
                moved.iter_mut().zip(&y[j * k..][..k]).for_each(|(m, y)| *m += x[i * k + j] * y);
            }
            total += x[i * k + i] + normalise(&mut moved);
            if moved.iter().any(|m| *m != 0.0) {
                y[i * k..][..k].copy_from_slice(&moved);
            }
        }
        if total - last <= 1e-13 * total.abs() {
            break;
        }
        last = total;
    }
    largest(x, &y)
}

/// Scales to norm one, and tells the norm before.
fn normalise(x: &mut [f64]) -> f64 {
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
    if norm > 0.0 && norm.is_finite() {
        x.iter_mut().for_each(|x| *x /= norm);
    }
    norm
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn three_vectors_that_repel_each_other() {
        // 1 on the diagonal, −a beside it: the best are 120° apart, 3 + 6a/2, where signs would attain 3 + 2a at most.
        for a in [0.1, 0.5, 2.0] {
            let x: Vec<f64> = (0..9).map(|k| if k % 4 == 0 { 1.0 } else { -a }).collect();
            let (bound, attained) = largest_of(&x);
            assert!(
                (bound - (3.0 + 3.0 * a)).abs() < 1e-9 && (attained - bound).abs() < 1e-9,
                "{bound} {attained}"
            );
        }
    }

    proptest! {
        #[test]
        fn no_vectors_exceed_it(entries in prop::collection::vec(-1.0..1.0_f64, 15), places in prop::collection::vec(-1.0..1.0_f64, 25)) {
            let entry = |i: usize, j: usize| entries[i.max(j) * (i.max(j) + 1) / 2 + i.min(j)];
            let x: Vec<f64> = (0..25).map(|k| entry(k / 5, k % 5)).collect();
            let mut u = places;
            u.chunks_exact_mut(5).for_each(|u| { normalise(u); });
            let value: f64 = (0..25)
                .map(|k| x[k] * (0..5).map(|l| u[k / 5 * 5 + l] * u[k % 5 * 5 + l]).sum::<f64>())
                .sum();
            let (bound, attained) = largest_of(&x);
            prop_assert!(value <= bound && attained <= bound * (1.0 + 1e-12) + 1e-12, "{value} {attained} {bound}");
            // From the vectors at hand the bound holds too, if less tightly.
            prop_assert!(largest(&x, &u).0 >= attained - 1e-9);
            prop_assert!(bound <= x.iter().map(|x| x.abs()).sum::<f64>());
        }
    }
}
