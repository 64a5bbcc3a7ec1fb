//! `diag X(v)` for any workload, by dense decompositions: O(n³) an evaluation.

use crate::error::{Error, Result};
use crate::factorize::dual::{Diagonal, Oracle};
use faer::{Mat, Side};

/// The dense oracle.
///
/// With `A D^{1/2} = U Σ Vᵀ`, `(D^{1/2}AᵀA D^{1/2})^{1/2} = V Σ Vᵀ`. The singular values come from the symmetric
/// eigenproblem of `D^{1/2}AᵀA D^{1/2}` while its rounding error, `ε λ_max / 2σ_min`, is below the tolerance, and
/// from the singular value decomposition, which squares no condition number but costs three times as much,
/// after that.
pub struct Dense {
    a: Mat<f64>,
    gram: Mat<f64>,
    /// Once the eigenproblem has been too inexact it will be again: the gap only shrinks.
    svd: bool,
}

/// Spectral form of `D^{1/2} AᵀA D^{1/2} = V Σ² Vᵀ`.
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

    fn spectrum(&self, v: &[f64]) -> Result<Spectrum> {
        let n = v.len();
        let root: Vec<f64> = v.iter().map(|v| v.sqrt()).collect();
        let failed =
            || Error::Numerical { what: "dense decomposition", index: 0, reason: "it did not converge" };
        if self.svd {
            let scaled = Mat::from_fn(n, n, |i, j| self.a[(i, j)] * root[j]);
            let svd = scaled.svd().map_err(|_| failed())?;
            let sigma: Vec<f64> = svd.S().column_vector().iter().copied().collect();
            let error = f64::EPSILON * sigma[0];
            Ok(Spectrum { sigma, vectors: svd.V().to_owned(), error })
        } else {
            let scaled = Mat::from_fn(n, n, |i, j| root[i] * self.gram[(i, j)] * root[j]);
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

    /// The spectrum at `v`, from the eigenproblem if it is exact enough.
    fn spectrum_within(&mut self, v: &[f64], tolerance: f64) -> Result<Spectrum> {
        let spectrum = self.spectrum(v)?;
        let smallest =
            v.iter().copied().fold(f64::INFINITY, f64::min) / v.iter().sum::<f64>() * v.len() as f64;
        if self.svd || spectrum.relative_error() <= tolerance * smallest.min(1.0) {
            return Ok(spectrum);
        }
        self.svd = true;
        self.spectrum(v)
    }

    /// `X(v)` as a matrix.
    pub fn primal(&mut self, v: &[f64], tolerance: f64) -> Result<Mat<f64>> {
        let Spectrum { sigma, vectors, .. } = self.spectrum_within(v, tolerance)?;
        let n = v.len();
        let scaled = Mat::from_fn(n, n, |i, k| vectors[(i, k)] * (sigma[k] / v[i]).sqrt());
        Ok(&scaled * scaled.transpose())
    }
}

impl Oracle for Dense {
    fn steps(&self) -> usize {
        self.a.nrows()
    }

    fn diagonal(&mut self, v: &[f64], tolerance: f64) -> Result<Diagonal> {
        let spectrum = self.spectrum_within(v, tolerance)?;
        let mut phi = vec![0.0; v.len()];
        for (k, s) in spectrum.sigma.iter().enumerate() {
            for (phi, u) in phi.iter_mut().zip(spectrum.vectors.col_as_slice(k)) {
                *phi += s * u * u;
            }
        }
        let x: Vec<f64> = phi.iter().zip(v).map(|(phi, v)| phi / v).collect();
        // What counts is the largest entry: how far above it another might be.
        let largest = x.iter().copied().fold(0.0, f64::max);
        let possible = x.iter().zip(v).map(|(x, v)| x + spectrum.error / v).fold(0.0, f64::max);
        Ok(Diagonal { x, relative_error: spectrum.relative_error().max(possible / largest - 1.0) })
    }
}

impl Spectrum {
    /// The error against the mean of `φ = diag(VΣVᵀ)`, whose sum is that of the singular values.
    fn relative_error(&self) -> f64 {
        self.error * self.sigma.len() as f64 / self.sigma.iter().sum::<f64>()
    }
}
