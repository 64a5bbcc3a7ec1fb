//! Dense kernels for matrices of a few rows, stored by rows, where the call itself would cost more than the work.

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

/// Cholesky factor of a positive semidefinite matrix, in the lower triangle of `a`.
///
/// A pivot below `threshold` times its diagonal entry counts as dependent on those before: its row and column of
/// the factor become zero. Entries above the diagonal are left alone.
pub(crate) fn cholesky(a: &mut [f64], n: usize, threshold: f64) {
    for k in 0..n {
        let diagonal = a[k * n + k];
        let pivot = diagonal - a[k * n..k * n + k].iter().map(|x| x * x).sum::<f64>();
        if !(pivot > threshold * diagonal) {
            a[k * n..=k * n + k].fill(0.0);
            (k + 1..n).for_each(|i| a[i * n + k] = 0.0);
            continue;
        }
        let root = pivot.sqrt();
        a[k * n + k] = root;
        let (head, tail) = a.split_at_mut((k + 1) * n);
        let pivot_row = &head[k * n..k * n + k];
        for row in tail.chunks_exact_mut(n) {
            let known: f64 = row[..k].iter().zip(pivot_row).map(|(a, b)| a * b).sum();
            row[k] = (row[k] - known) / root;
        }
    }
}

/// `X ← X L⁻ᵀ` for `X` of `n` columns and a factor from [`cholesky`]; columns of zero pivots become zero.
pub(crate) fn solve_right_transposed(l: &[f64], n: usize, x: &mut [f64]) {
    for row in x.chunks_exact_mut(n.max(1)) {
        for k in 0..n {
            let pivot = l[k * n + k];
            let known: f64 = row[..k].iter().zip(&l[k * n..]).map(|(x, l)| x * l).sum();
            row[k] = if pivot > 0.0 { (row[k] - known) / pivot } else { 0.0 };
        }
    }
}

/// Eigenvectors of a positive semidefinite matrix by Jacobi's method: the columns of `u`, sorted by falling
/// eigenvalue; the eigenvalues are left on the diagonal of `a`.
///
/// Stops when every off-diagonal entry is below `tolerance` times the geometric mean of its two diagonals, so small
/// eigenvalues of a graded matrix keep their relative accuracy. A matrix that is almost diagonal costs one sweep.
pub(crate) fn jacobi(a: &mut [f64], u: &mut [f64], n: usize, tolerance: f64) {
    const SWEEPS: usize = 30;
    u.fill(0.0);
    u.iter_mut().step_by(n + 1).for_each(|d| *d = 1.0);
    for _ in 0..SWEEPS {
        let mut rotated = false;
        for p in 0..n {
            for q in p + 1..n {
                let (app, aqq, apq) = (a[p * n + p], a[q * n + q], a[p * n + q]);
                if apq == 0.0 || apq * apq <= tolerance * tolerance * (app * aqq).abs() {
                    continue;
                }
                rotated = true;
                let theta = (aqq - app) / (2.0 * apq);
                let t = theta.signum() / (theta.abs() + theta.hypot(1.0));
                let c = 1.0 / t.hypot(1.0);
                let s = t * c;
                for k in 0..n {
                    let (x, y) = (a[p * n + k], a[q * n + k]);
                    a[p * n + k] = c * x - s * y;
                    a[q * n + k] = s * x + c * y;
                }
                for k in 0..n {
                    let (x, y) = (a[k * n + p], a[k * n + q]);
                    a[k * n + p] = c * x - s * y;
                    a[k * n + q] = s * x + c * y;
                    let (x, y) = (u[k * n + p], u[k * n + q]);
                    u[k * n + p] = c * x - s * y;
                    u[k * n + q] = s * x + c * y;
                }
                a[p * n + q] = 0.0;
                a[q * n + p] = 0.0;
                a[p * n + p] = app - t * apq;
                a[q * n + q] = aqq + t * apq;
            }
        }
        if !rotated {
            break;
        }
    }
    // Selection sort: almost always in order already.
    for p in 0..n {
        let best = (p..n).fold(p, |b, q| if a[q * n + q] > a[b * n + b] { q } else { b });
        if best != p {
            a.swap(p * n + p, best * n + best);
            u.chunks_exact_mut(n).for_each(|row| row.swap(p, best));
        }
    }
}

/// Columns `z_1, z_2, …` with `Σ z zᵀ = G` for a positive semidefinite `G`, largest diagonal first, until all that
/// remains of the diagonal is below `threshold` times its first maximum. Stored one after the other.
pub(crate) fn pivoted_cholesky(g: &[f64], n: usize, threshold: f64) -> Vec<f64> {
    let mut rest: Vec<f64> = g.iter().copied().step_by(n + 1).take(n).collect();
    let mut factor: Vec<f64> = Vec::new();
    let first = rest.iter().copied().fold(0.0, f64::max);
    for _ in 0..n {
        let pivot = (0..n).fold(0, |b, i| if rest[i] > rest[b] { i } else { b });
        if !(rest[pivot] > threshold * first) {
            break;
        }
        let root = rest[pivot].sqrt();
        let mut column: Vec<f64> = g[pivot * n..][..n].to_vec();
        for z in factor.chunks_exact(n) {
            let x = z[pivot];
            column.iter_mut().zip(z).for_each(|(c, z)| *c -= x * z);
        }
        for (c, r) in column.iter_mut().zip(&mut rest) {
            // A negative remainder marks a pivot that is done, or rounding.
            *c = if *r > 0.0 { *c / root } else { 0.0 };
            *r -= *c * *c;
        }
        rest[pivot] = -1.0;
        factor.extend_from_slice(&column);
    }
    factor
}
