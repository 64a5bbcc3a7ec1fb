//! Dense kernels for matrices of a few rows, stored by rows, where the call itself would cost more than the
//! work.

/// `X = Q R` of a square matrix, with `R` upper triangular and its diagonal not negative.
///
/// On return `x` holds `R` and `q` holds `Q`. Cost: 8/3 n³.
pub(crate) fn qr(x: &mut [f64], q: &mut [f64], n: usize) {
    q.fill(0.0);
    q.iter_mut().step_by(n + 1).for_each(|d| *d = 1.0);
    let mut reflector = vec![0.0; n];
    for k in 0..n {
        let norm = (k..n).map(|i| x[i * n + k] * x[i * n + k]).sum::<f64>().sqrt();
        let head = x[k * n + k];
        if norm == 0.0 || norm == head {
            continue;
        }
        // v = column + sign(head)·norm·e_k maps the column to −sign(head)·norm·e_k.
        let signed = norm.copysign(head);
        for i in k..n {
            reflector[i] = x[i * n + k];
        }
        reflector[k] += signed;
        let scale = 1.0 / (signed * reflector[k]);
        let v = &reflector[k..];
        for j in k..n {
            let product: f64 = v.iter().zip(k..).map(|(v, i)| v * x[i * n + j]).sum();
            v.iter().zip(k..).for_each(|(v, i)| x[i * n + j] -= scale * product * v);
        }
        for row in q.chunks_exact_mut(n) {
            let product: f64 = v.iter().zip(&row[k..]).map(|(v, q)| v * q).sum();
            row[k..].iter_mut().zip(v).for_each(|(q, v)| *q -= scale * product * v);
        }
        for i in k + 1..n {
            x[i * n + k] = 0.0;
        }
    }
    for k in 0..n {
        if x[k * n + k] < 0.0 {
            x[k * n + k..(k + 1) * n].iter_mut().for_each(|r| *r = -*r);
            q.chunks_exact_mut(n).for_each(|row| row[k] = -row[k]);
        }
    }
}

/// Makes columns of length `n`, stored one after the other, orthonormal, each against those before it; a
/// column of which no more than `noise` remains becomes zero.
pub(crate) fn orthonormalise(x: &mut [f64], n: usize, noise: f64) {
    for k in 0..x.len() / n {
        let (head, tail) = x.split_at_mut(k * n);
        let column = &mut tail[..n];
        // Twice is enough: the second pass removes what rounding left of the first.
        for _ in 0..2 {
            for q in head.chunks_exact(n) {
                let product = dot(q, column);
                column.iter_mut().zip(q).for_each(|(x, q)| *x -= product * q);
            }
        }
        let norm = dot(column, column).sqrt();
        let inverse = if norm > noise { 1.0 / norm } else { 0.0 };
        column.iter_mut().for_each(|x| *x *= inverse);
    }
}

/// Jacobi's method from one side: rotates columns of length `n`, stored one after the other, until all are
/// orthogonal, and sorts them by falling norm; `rotation` receives the orthogonal matrix, by columns.
///
/// Stops when the cosine of every angle is below `tolerance`. Small columns keep their relative accuracy;
/// columns that are almost orthogonal cost one sweep.
pub(crate) fn orthogonalise_pairs(x: &mut [f64], n: usize, rotation: &mut [f64], tolerance: f64) {
    const SWEEPS: usize = 30;
    let k = x.len() / n;
    rotation.fill(0.0);
    rotation.iter_mut().step_by(k + 1).for_each(|d| *d = 1.0);
    let mut norms_sq: Vec<f64> = x.chunks_exact(n).map(|c| dot(c, c)).collect();
    for _ in 0..SWEEPS {
        let mut rotated = false;
        for p in 0..k {
            for q in p + 1..k {
                let (left, right) = x.split_at_mut(q * n);
                let (a, b) = (&mut left[p * n..][..n], &mut right[..n]);
                let product = dot(a, b);
                if product == 0.0 || product * product <= tolerance * tolerance * (norms_sq[p] * norms_sq[q])
                {
                    continue;
                }
                rotated = true;
                let theta = (norms_sq[q] - norms_sq[p]) / (2.0 * product);
                let t = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
                let c = 1.0 / (t * t + 1.0).sqrt();
                turn(a, b, c, t * c);
                (norms_sq[p], norms_sq[q]) = (dot(a, a), dot(b, b));
                let (left, right) = rotation.split_at_mut(q * k);
                turn(&mut left[p * k..][..k], &mut right[..k], c, t * c);
            }
        }
        if !rotated {
            break;
        }
    }
    // Selection sort: almost always in order already.
    for p in 0..k {
        let best = (p..k).fold(p, |b, q| if norms_sq[q] > norms_sq[b] { q } else { b });
        if best != p {
            norms_sq.swap(p, best);
            (0..n).for_each(|i| x.swap(p * n + i, best * n + i));
            (0..k).for_each(|i| rotation.swap(p * k + i, best * k + i));
        }
    }
}

fn turn(a: &mut [f64], b: &mut [f64], c: f64, s: f64) {
    for (a, b) in a.iter_mut().zip(b) {
        let (x, y) = (*a, *b);
        *a = c * x - s * y;
        *b = s * x + c * y;
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use faer::{Mat, MatRef};
    use proptest::prelude::*;

    fn deviation(actual: &Mat<f64>, expected: MatRef<'_, f64>) -> f64 {
        (actual - expected).norm_max()
    }

    proptest! {
        #[test]
        fn qr_is_orthogonal_times_triangular(
            (n, entries) in
                (1..7_usize).prop_flat_map(|n| (Just(n), prop::collection::vec(-1.0..1.0_f64, n * n))),
            zeroed in 0..7_usize,
        ) {
            let mut x = entries;
            // A column of zeros, now and then.
            (0..n).filter(|_| zeroed < n).for_each(|i| x[i * n + zeroed] = 0.0);
            let (mut r, mut q) = (x.clone(), vec![0.0; n * n]);
            qr(&mut r, &mut q, n);
            let by_rows = |x| MatRef::from_row_major_slice(x, n, n);
            prop_assert!(deviation(&(by_rows(&q) * by_rows(&r)), by_rows(&x)) < 1e-14);
            let gram = by_rows(&q).transpose() * by_rows(&q);
            prop_assert!(deviation(&gram, Mat::identity(n, n).as_ref()) < 1e-14);
            for i in 0..n {
                prop_assert!(r[i * n + i] >= 0.0);
                prop_assert!(r[i * n..i * n + i].iter().all(|&x| x == 0.0));
            }
        }

        #[test]
        fn pairs_become_orthogonal_and_sorted(
            (n, k, entries) in (1..6_usize, 0..6_usize).prop_flat_map(|(k, more)| {
                (Just(k + more), Just(k), prop::collection::vec(-1.0..1.0_f64, (k + more) * k))
            }),
            grading in 0.0..6.0_f64,
        ) {
            // Columns that differ by many orders of magnitude.
            let x: Vec<f64> =
                entries.iter().enumerate().map(|(i, x)| x * 10_f64.powf(-grading * (i / n) as f64)).collect();
            let (mut y, mut rotation) = (x.clone(), vec![0.0; k * k]);
            orthogonalise_pairs(&mut y, n, &mut rotation, 1e-12);
            let (before, after) =
                (MatRef::from_column_major_slice(&x, n, k), MatRef::from_column_major_slice(&y, n, k));
            let rotation = MatRef::from_column_major_slice(&rotation, k, k);
            prop_assert!(deviation(&(before * rotation), after) < 1e-14);
            prop_assert!(deviation(&(rotation.transpose() * rotation), Mat::identity(k, k).as_ref()) < 1e-14);
            for p in 0..k {
                for q in p + 1..k {
                    let (a, b) = (&y[p * n..][..n], &y[q * n..][..n]);
                    prop_assert!(dot(a, a) >= dot(b, b));
                    prop_assert!(dot(a, b).abs() <= 1.1e-12 * (dot(a, a) * dot(b, b)).sqrt());
                }
            }
        }
    }

    #[test]
    fn what_drowns_in_noise_becomes_zero() {
        let mut x = [3.0, 4.0, 0.0, 6.0, 8.0, 1e-9, 0.0, 0.0, 2.0];
        orthonormalise(&mut x, 3, 1e-8);
        for (x, expected) in x.into_iter().zip([0.6, 0.8, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]) {
            assert!((x - expected).abs() < 1e-15);
        }
        assert_eq!(x[3..6], [0.0; 3]);
    }
}
