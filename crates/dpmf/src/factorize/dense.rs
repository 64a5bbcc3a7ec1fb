//! The blocks of `X(D)` for any workload, by dense decompositions: O(n³) an evaluation.

use crate::error::{Error, Result};
use crate::factorize::dual::{Blocks, Oracle};
use crate::factorize::point::Dual;
use faer::{Mat, MatRef, Side};

/// The dense oracle.
///
/// With `D = G Gᵀ` and `A G = U Σ Vᵀ`, `X(D) = G⁻ᵀ V Σ Vᵀ G⁻¹`. The singular values come from the symmetric eigenproblem
/// of `GᵀAᵀA G` while its rounding error, `ε λ_max / 2σ_min`, is below the tolerance, and
/// from the singular value decomposition, which squares no condition number but costs three times as much,
/// after that.
pub struct Dense {
    a: Mat<f64>,
    gram: Mat<f64>,
    /// Once the eigenproblem has been too inexact it will be again: the gap only shrinks.
    svd: bool,
}

/// Spectral form of `Gᵀ AᵀA G = V Σ² Vᵀ`.
struct Spectrum {
    sigma: Vec<f64>,
    vectors: Mat<f64>,
    /// Size of the error of `VΣVᵀ` in the spectral norm, by the usual backward error of a decomposition.
    error: f64,
}

impl Dense {
    /// Prepares `AᵀA`.
    pub fn new(a: Mat<f64>) -> Self {
        let gram = a.transpose() * &a;
        Self { a, gram, svd: false }
    }

    fn spectrum(&self, dual: &Dual) -> Result<Spectrum> {
        let n = dual.steps();
        let failed =
            || Error::Numerical { what: "dense decomposition", index: 0, reason: "it did not converge" };
        if self.svd {
            let svd = times_factor(self.a.as_ref(), dual).svd().map_err(|_| failed())?;
            let sigma: Vec<f64> = svd.S().column_vector().iter().copied().collect();
            let error = f64::EPSILON * sigma[0];
            Ok(Spectrum { sigma, vectors: svd.V().to_owned(), error })
        } else {
            let half = times_factor(self.gram.as_ref(), dual);
            let scaled = times_factor(half.transpose(), dual);
            let eigen = scaled.self_adjoint_eigen(Side::Lower).map_err(|_| failed())?;
            let lambda: Vec<f64> = eigen.S().column_vector().iter().copied().collect();
            let (smallest, largest) = (lambda[0], lambda[n - 1]);
            let error = if smallest > 0.0 {
                f64::EPSILON * (n as f64).sqrt() * largest / (2.0 * smallest.sqrt())
            } else {
                f64::INFINITY
            };
            let sigma = lambda.iter().map(|l| l.max(0.0).sqrt()).collect();
            Ok(Spectrum { sigma, vectors: eigen.U().to_owned(), error })
        }
    }

    /// The spectrum at a dual point, from the eigenproblem if it is exact enough.
    fn spectrum_within(&mut self, dual: &Dual, tolerance: f64) -> Result<Spectrum> {
        let spectrum = self.spectrum(dual)?;
        let v = dual.v();
        let smallest =
            v.iter().copied().fold(f64::INFINITY, f64::min) / v.iter().sum::<f64>() * v.len() as f64;
        if self.svd || spectrum.relative_error() <= tolerance * smallest.min(1.0) {
            return Ok(spectrum);
        }
        self.svd = true;
        self.spectrum(dual)
    }

    /// The singular value decomposition at a dual point.
    pub(super) fn decomposed(&self, dual: &Dual) -> Result<Decomposed> {
        let svd = times_factor(self.a.as_ref(), dual).svd().map_err(|_| Error::Numerical {
            what: "dense decomposition",
            index: 0,
            reason: "it did not converge",
        })?;
        let sigma = svd.S().column_vector().iter().copied().collect();
        Ok(Decomposed { sigma, u: svd.U().to_owned(), v: svd.V().to_owned() })
    }

    /// `X(D)` as a matrix.
    pub fn primal(&mut self, dual: &Dual, tolerance: f64) -> Result<Mat<f64>> {
        let Spectrum { sigma, vectors, .. } = self.spectrum_within(dual, tolerance)?;
        let n = dual.steps();
        let mut scaled = Mat::from_fn(n, n, |i, k| vectors[(i, k)] * sigma[k].sqrt());
        (0..n).for_each(|k| solve_factor_transposed(dual, scaled.col_as_slice_mut(k)));
        Ok(&scaled * scaled.transpose())
    }

    /// `X(D) + μ ⊕_p D_p⁻¹` as a matrix.
    pub(super) fn primal_with(&self, dual: &Dual, mu: f64) -> Result<Mat<f64>> {
        let (n, b, times) = (dual.steps(), dual.separation(), dual.times());
        let parts = self.decomposed(dual)?;
        let mut w = parts.directions(dual);
        for (k, sigma) in parts.sigma.iter().enumerate() {
            w.col_as_slice_mut(k).iter_mut().for_each(|x| *x *= sigma.sqrt());
        }
        let (mut x, inverse) = (&w * w.transpose(), dual.inverse_blocks());
        for i in 0..n {
            for j in dual.phase(i % b) {
                x[(i, j)] += mu * inverse[i * times + j / b];
            }
        }
        Ok(x)
    }
}

/// `A G = U Σ Vᵀ` at a dual point.
pub(super) struct Decomposed {
    pub sigma: Vec<f64>,
    u: Mat<f64>,
    v: Mat<f64>,
}

impl Decomposed {
    /// `W = G⁻ᵀV`, so that `X = W Σ Wᵀ`.
    pub fn directions(&self, dual: &Dual) -> Mat<f64> {
        let mut w = self.v.clone();
        (0..w.ncols()).for_each(|k| solve_factor_transposed(dual, w.col_as_slice_mut(k)));
        w
    }

    /// The blocks `X_p = M_pG_p⁻¹` with `M = X G = AᵀUVᵀ` by the polar factor of `A G`.
    ///
    /// No singular value is divided by, so that step sizes may be zero: vectors that `A` maps to nothing add nothing. Blocks
    /// are symmetric but for rounding, and by how much they are not tells what rounding did.
    pub fn blocks(&self, oracle: &Dense, dual: &Dual) -> Result<Blocks> {
        let (n, b, times) = (dual.steps(), dual.separation(), dual.times());
        let m = oracle.a.transpose() * (&self.u * self.v.transpose());
        let mut x = vec![0.0; n * times];
        for i in 0..n {
            let steps: Vec<usize> = dual.phase(i % b).collect();
            for (k, j) in steps.iter().enumerate().rev() {
                let later = steps.iter().enumerate().skip(k + 1);
                let known: f64 = later.map(|(l, at)| x[i * times + l] * dual.factor(*at, k)).sum();
                x[i * times + k] = (m[(i, *j)] - known) / dual.factor(*j, k);
            }
        }
        let (mut skew, mut size) = (0.0_f64, 0.0_f64);
        for p in 0..b {
            let (mut off, mut all) = (0.0, 0.0);
            for i in dual.phase(p) {
                for j in dual.phase(p) {
                    let (here, there) = (i * times + j / b, j * times + i / b);
                    off += 0.5 * (x[here] - x[there]).abs();
                    all += x[here].abs();
                    if i < j {
                        let mean = 0.5 * (x[here] + x[there]);
                        (x[here], x[there]) = (mean, mean);
                    }
                }
            }
            (skew, size) = (skew.max(off), size.max(all));
        }
        let relative_error = skew / size + n as f64 * f64::EPSILON;
        if !relative_error.is_finite() {
            return Err(Error::Numerical { what: "X(D)", index: 0, reason: "an entry is not finite" });
        }
        Ok(Blocks { x, relative_error })
    }
}

/// `M G`, with `D = G Gᵀ` and `G` lower triangular within the phases.
fn times_factor(matrix: MatRef<'_, f64>, dual: &Dual) -> Mat<f64> {
    let b = dual.separation();
    let mut product = Mat::zeros(matrix.nrows(), matrix.ncols());
    for j in 0..dual.steps() {
        let target = product.col_as_slice_mut(j);
        for i in dual.phase(j % b).filter(|i| *i >= j) {
            let factor = dual.factor(i, j / b);
            target.iter_mut().enumerate().for_each(|(row, x)| *x += matrix[(row, i)] * factor);
        }
    }
    product
}

/// `G⁻ᵀ x`, in place.
fn solve_factor_transposed(dual: &Dual, x: &mut [f64]) {
    let b = dual.separation();
    for j in (0..dual.steps()).rev() {
        let later = dual.phase(j % b).filter(|i| *i > j);
        let known: f64 = later.map(|i| dual.factor(i, j / b) * x[i]).sum();
        x[j] = (x[j] - known) / dual.factor(j, j / b);
    }
}

impl Oracle for Dense {
    fn steps(&self) -> usize {
        self.a.nrows()
    }

    fn blocks(&mut self, dual: &Dual, tolerance: f64) -> Result<Blocks> {
        if dual.times() > 1 {
            return self.decomposed(dual)?.blocks(self, dual);
        }
        let spectrum = self.spectrum_within(dual, tolerance)?;
        let n = dual.steps();
        let mut x = vec![0.0; n];
        for (k, s) in spectrum.sigma.iter().enumerate() {
            for (i, vector) in spectrum.vectors.col_as_slice(k).iter().enumerate() {
                x[i] += s * vector * vector / dual.v()[i];
            }
        }
        // What counts is the largest entry: how far above it another might be.
        let largest = x.iter().copied().fold(0.0, f64::max);
        let possible = x.iter().zip(dual.v()).map(|(x, v)| x + spectrum.error / v).fold(0.0, f64::max);
        let relative_error = spectrum.relative_error().max(possible / largest - 1.0);
        Ok(Blocks { x, relative_error })
    }
}

impl Spectrum {
    /// The error against the mean of `φ = diag(VΣVᵀ)`, whose sum is that of the singular values.
    fn relative_error(&self) -> f64 {
        self.error * self.sigma.len() as f64 / self.sigma.iter().sum::<f64>()
    }
}
