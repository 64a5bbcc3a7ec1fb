//! A factorization held as a dense lower-triangular matrix.

mod engine;

pub(super) use engine::DenseEngine;

use crate::engine::Engine;
use crate::engine::exact::program::Program;
use crate::error::{Error, Result};
use crate::form::columns::Whole;
use crate::form::{Cost, EncoderColumns, Form, Representation, Rows};
use crate::tensors::{Tensors, damaged};
use faer::linalg::triangular_inverse::invert_lower_triangular;
use faer::{Mat, MatRef, Par, Side};

pub(super) const KIND: &str = "dense";

const TRIANGLE: &str = "dense.lower_triangle";

/// `N` as a lower-triangular matrix with positive diagonal; `C = N⁻¹`.
///
/// Streaming regenerates all earlier noise rows at every step: no buffers, `(n + 1)/2` multiply-adds a step.
#[derive(Clone, Debug)]
pub struct Dense {
    coloring: Mat<f64>,
}

impl Dense {
    /// Takes `N` itself.
    ///
    /// Errors: not square, not lower triangular, not finite, or a diagonal that is not positive.
    pub fn from_coloring(coloring: Mat<f64>) -> Result<Self> {
        let (rows, columns) = coloring.shape();
        if rows == 0 || rows != columns {
            let value = format!("{rows} × {columns}");
            return Err(Error::argument("coloring matrix", value, "it must be square and not empty"));
        }
        for column in 0..columns {
            for (row, &value) in coloring.col_as_slice(column).iter().enumerate() {
                let rule = match row.cmp(&column) {
                    _ if !value.is_finite() => "it must be finite",
                    std::cmp::Ordering::Less if value != 0.0 => "the matrix must be lower triangular",
                    std::cmp::Ordering::Equal if value <= 0.0 => "the diagonal must be positive",
                    _ => continue,
                };
                return Err(Error::InvalidMatrixEntry { name: "coloring matrix", row, column, value, rule });
            }
        }
        Ok(Self { coloring })
    }

    /// The canonical factorization with `CᵀC = X`, scaled to sensitivity 1.
    ///
    /// `C` is lower triangular with positive diagonal, hence unique: with the exchange matrix `J` and the
    /// Cholesky factor `J X J = L Lᵀ`, `C = J Lᵀ J`.
    ///
    /// Errors: [`Error::Numerical`] when `X` is not positive definite.
    ///
    /// Reference: Proposition 2.2 of \[DMRST22\].
    pub fn from_primal(x: MatRef<'_, f64>) -> Result<Self> {
        let n = x.nrows();
        let flipped = Mat::from_fn(n, n, |i, j| x[(n - 1 - i, n - 1 - j)]);
        let cholesky = flipped.llt(Side::Lower).map_err(|_| Error::Numerical {
            what: "flipped Cholesky factor",
            index: 0,
            reason: "the matrix is not positive definite",
        })?;
        let l = cholesky.L();
        let encoder = Mat::from_fn(n, n, |i, j| if i >= j { l[(n - 1 - j, n - 1 - i)] } else { 0.0 });
        Ok(Self::from_encoder(encoder.as_ref())?.normalised())
    }

    /// The canonical lower-triangular form of any `B` (`n × m`) and `C` (`m × n`) with `B C` lower triangular:
    /// the mechanism `B(CG + Z)` in distribution, with a sensitivity that is not larger.
    ///
    /// With `B = L Q`, `L` lower triangular with non-negative diagonal and `Q Qᵀ = I`, the new encoder is `Q C`.
    ///
    /// Errors: shapes that do not fit, a `B` without full row rank, or a `B C` that is not lower triangular to
    /// rounding.
    ///
    /// Reference: Proposition 2.2 of \[DMRST22\].
    pub fn from_factors(b: MatRef<'_, f64>, c: MatRef<'_, f64>) -> Result<Self> {
        let (n, m) = b.shape();
        if c.shape() != (m, n) || m < n || n == 0 {
            let value = format!("{n} × {m} and {} × {}", c.nrows(), c.ncols());
            return Err(Error::argument("factors", value, "they must be n × m and m × n with m ≥ n ≥ 1"));
        }
        let qr = b.transpose().qr();
        let (q, r) = (qr.compute_thin_Q(), qr.thin_R());
        // Bᵀ = Q R, so B = Rᵀ Qᵀ; signs make the diagonal of Rᵀ positive.
        let signs: Vec<f64> = (0..n).map(|i| if r[(i, i)] < 0.0 { -1.0 } else { 1.0 }).collect();
        if let Some(index) = (0..n).find(|&i| r[(i, i)] == 0.0) {
            return Err(Error::Numerical { what: "LQ factor", index, reason: "B has no full row rank" });
        }
        let mut encoder = q.transpose() * c;
        let scale = encoder.norm_max();
        for j in 0..n {
            for i in 0..n {
                encoder[(i, j)] *= signs[i];
                if i < j {
                    if encoder[(i, j)].abs() > 1e-9 * scale {
                        return Err(Error::InvalidMatrixEntry {
                            name: "product of the factors",
                            row: i,
                            column: j,
                            value: encoder[(i, j)],
                            rule: "B C must be lower triangular",
                        });
                    }
                    encoder[(i, j)] = 0.0;
                }
            }
        }
        // The diagonal of C may be negative where that of A is; N wants a positive one.
        let flip: Vec<f64> = (0..n).map(|i| encoder[(i, i)].signum()).collect();
        let encoder = Mat::from_fn(n, n, |i, j| flip[i] * encoder[(i, j)]);
        Self::from_encoder(encoder.as_ref())
    }

    fn from_encoder(encoder: MatRef<'_, f64>) -> Result<Self> {
        Self::from_coloring(inverse(encoder))
    }

    /// Scales `N` so that the sensitivity of `C` is 1, to rounding.
    pub fn normalised(&self) -> Self {
        let encoder = self.encoder();
        let gamma = (0..self.steps()).map(|j| encoder.col(j).norm_l2()).fold(0.0, f64::max);
        Self { coloring: Mat::from_fn(self.steps(), self.steps(), |i, j| self.coloring[(i, j)] * gamma) }
    }

    /// The matrix `N`.
    pub fn coloring(&self) -> MatRef<'_, f64> {
        self.coloring.as_ref()
    }

    /// Every entry rounded to the nearest f32.
    ///
    /// Errors: a diagonal that vanishes or an entry that overflows in f32.
    pub fn rounded(&self) -> Result<Self> {
        let n = self.steps();
        Self::from_coloring(Mat::from_fn(n, n, |i, j| f64::from(self.coloring[(i, j)] as f32)))
    }

    fn inverted(&self) -> Whole {
        Whole::inverse(self.coloring.as_ref(), self.encoder())
    }

    pub(super) fn read(n: usize, tensors: &mut Tensors) -> Result<Self> {
        let length = n.checked_mul(n + 1).ok_or_else(|| damaged(format!("{n} steps are too many")))? / 2;
        let (_, lower) = tensors.take(TRIANGLE, &[Some(length)])?;
        Self::from_coloring(Mat::from_fn(n, n, |i, j| if j <= i { lower[i * (i + 1) / 2 + j] } else { 0.0 }))
    }
}

impl Representation for Dense {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn steps(&self) -> usize {
        self.coloring.nrows()
    }

    fn coloring_rows(&self) -> Rows<'_> {
        let mut i = 0;
        Box::new(move |out| {
            for (j, out) in out.iter_mut().enumerate().take(i + 1) {
                *out = self.coloring[(i, j)];
            }
            i += 1;
        })
    }

    fn encoder(&self) -> Mat<f64> {
        inverse(self.coloring.as_ref())
    }

    /// Column norms of the computed inverse, raised by what its rounding may hide.
    ///
    /// Guarantee: ≥ the exact values, for any coefficients; infinite where the inverse is too far off, and nothing is
    /// known.
    /// Cost: four products of n × n matrices.
    fn encoder_column_norms_sq(&self) -> Vec<f64> {
        self.inverted().norms_sq()
    }

    /// Cost: four products of n × n matrices, and a copy for each column.
    fn encoder_columns(&self) -> Box<dyn EncoderColumns + '_> {
        Box::new(self.inverted())
    }

    fn cost(&self) -> Cost {
        Cost::dense((self.steps() as f64 + 1.0) / 2.0)
    }

    fn deployed(&self) -> Result<Form> {
        Ok(Form::Dense(self.rounded()?))
    }

    fn engine(&self, ahead: usize) -> Result<Box<dyn Engine>> {
        Ok(Box::new(DenseEngine::new(self, ahead)?))
    }

    fn program(&self, ahead: usize) -> Result<Box<dyn Program>> {
        Ok(Box::new(DenseEngine::new(self, ahead)?))
    }

    fn write(&self, tensors: &mut Tensors) {
        let n = self.steps();
        let lower = (0..n).flat_map(|i| (0..=i).map(move |j| self.coloring[(i, j)]));
        tensors.put_f32(TRIANGLE, &[n * (n + 1) / 2], lower);
    }
}

fn inverse(lower: MatRef<'_, f64>) -> Mat<f64> {
    let mut out = Mat::zeros(lower.nrows(), lower.ncols());
    invert_lower_triangular(out.as_mut(), lower, Par::rayon(0));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lower(n: usize, seed: &[f64]) -> Mat<f64> {
        Mat::from_fn(n, n, |i, j| match i.cmp(&j) {
            std::cmp::Ordering::Less => 0.0,
            std::cmp::Ordering::Equal => 1.0 + seed[(i * n + j) % seed.len()].abs(),
            std::cmp::Ordering::Greater => seed[(i * n + j) % seed.len()],
        })
    }

    fn distance(a: MatRef<'_, f64>, b: MatRef<'_, f64>) -> f64 {
        (a - b).norm_max()
    }

    #[test]
    fn flipped_cholesky_in_closed_form() {
        // X = [[1, 1/2], [1/2, 1]] = CᵀC with C = [[√3/2, 0], [1/2, 1]].
        let x = Mat::from_fn(2, 2, |i, j| if i == j { 1.0 } else { 0.5 });
        let c = Dense::from_primal(x.as_ref()).unwrap().encoder();
        assert!((c[(0, 0)] - 0.75_f64.sqrt()).abs() < 1e-15);
        assert!((c[(1, 0)] - 0.5).abs() < 1e-15 && (c[(1, 1)] - 1.0).abs() < 1e-15 && c[(0, 1)] == 0.0);
    }

    proptest! {
        #[test]
        fn canonical_forms_agree(
            n in 1..7_usize,
            seed in prop::collection::vec(-1.0..1.0_f64, 13),
            turn in prop::collection::vec(-1.0..1.0_f64, 17),
            extra in 0..3_usize,
        ) {
            // B = L_B Q, C = Qᵀ L_C with random orthonormal rows Q: LQ must recover L_C⁻¹ exactly.
            let (b, c) = (lower(n, &seed), lower(n, &turn));
            let m = n + extra;
            let q = Mat::from_fn(m, m, |i, j| turn[(3 * i + 5 * j) % 17] + f64::from(u8::from(i == j)) * 3.0).qr().compute_Q();
            let q = q.as_ref().subrows(0, n);
            let canonical = Dense::from_factors((&b * q).as_ref(), (q.transpose() * &c).as_ref()).unwrap();
            prop_assert!(distance(canonical.encoder().as_ref(), c.as_ref()) < 1e-9);
            // The same C from X = CᵀC, up to the scale of sensitivity 1.
            let x = c.transpose() * &c;
            let from_x = Dense::from_primal(x.as_ref()).unwrap();
            let gamma = canonical.encoder_column_norms_sq().into_iter().fold(0.0, f64::max).sqrt();
            let scaled = Mat::from_fn(n, n, |i, j| canonical.coloring[(i, j)] * gamma);
            prop_assert!(distance(from_x.coloring(), scaled.as_ref()) < 1e-8 * scaled.norm_max());
        }

        #[test]
        fn column_norms_are_upper_bounds(n in 1..9_usize, seed in prop::collection::vec(-1.0..1.0_f64, 29)) {
            let dense = Dense::from_coloring(lower(n, &seed)).unwrap().rounded().unwrap();
            let identity = dense.coloring() * dense.encoder();
            prop_assert!(distance(identity.as_ref(), Mat::identity(n, n).as_ref()) < 1e-10);
            for (j, bound) in dense.encoder_column_norms_sq().into_iter().enumerate() {
                let exact = dense.encoder().col(j).squared_norm_l2();
                prop_assert!(bound >= exact && bound < exact * (1.0 + 1e-9));
            }
        }
    }

    /// In f64 the third row hides 2²⁰ behind 2⁸⁰: the computed inverse has columns of norm 1.7.
    #[test]
    fn no_sensitivity_hides_in_rounding() {
        let (a, b) = (2f64.powi(40), 2f64.powi(80));
        let rows = [[1.0, 0.0, 0.0, 0.0], [-a, a, 0.0, 0.0], [-b, 0.0, b, 0.0], [-b, 2f64.powi(20), b, 1.0]];
        let dense = Dense::from_coloring(Mat::from_fn(4, 4, |i, j| rows[i][j])).unwrap();
        assert!(dense.encoder().col(0).norm_l2() < 2.0);
        assert!(dense.encoder_column_norms_sq()[0] >= a);
    }

    #[test]
    fn bad_matrices_are_refused() {
        let refuse = |m: Mat<f64>| Dense::from_coloring(m).unwrap_err().to_string();
        assert!(refuse(Mat::zeros(0, 0)).contains("0 × 0"));
        assert!(refuse(Mat::zeros(2, 2)).contains("[0, 0] is 0, but the diagonal must be positive"));
        assert!(refuse(Mat::from_fn(2, 2, |_, _| 1.0)).contains("[0, 1] is 1"));
        assert!(refuse(Mat::from_fn(1, 1, |_, _| f64::NAN)).contains("NaN"));
        let upper = Mat::from_fn(2, 2, |i, j| if i <= j { 1.0 } else { 0.0 });
        let message =
            Dense::from_factors(upper.as_ref(), Mat::identity(2, 2).as_ref()).unwrap_err().to_string();
        assert!(message.contains("lower triangular"), "{message}");
        let singular = Mat::from_fn(2, 2, |_, _| 1.0);
        assert!(Dense::from_primal(singular.as_ref()).is_err());
    }
}
