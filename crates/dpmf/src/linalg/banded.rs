//! Lower-triangular banded matrices, stored by rows.

use crate::error::{Error, Result};
use faer::Mat;

/// Lower-triangular `n × n` matrix whose entries lie within `bandwidth` places of the diagonal.
///
/// Row `i` holds the entries `(i, i), (i, i − 1), …, (i, i − bandwidth)`, in this order; entries left of
/// column 0 are stored as zeros.
#[derive(Clone, Debug, PartialEq)]
pub struct LowerBanded {
    n: usize,
    bandwidth: usize,
    rows: Vec<f64>,
}

impl LowerBanded {
    /// Builds the matrix from `entry(i, k)`, the value at row `i`, `k` places left of the diagonal.
    pub fn from_fn(n: usize, bandwidth: usize, mut entry: impl FnMut(usize, usize) -> f64) -> Self {
        let mut rows = vec![0.0; n * (bandwidth + 1)];
        for (i, row) in rows.chunks_exact_mut(bandwidth + 1).enumerate() {
            for (k, value) in row.iter_mut().enumerate().take(i + 1) {
                *value = entry(i, k);
            }
        }
        Self { n, bandwidth, rows }
    }

    /// The identity.
    pub fn identity(n: usize) -> Self {
        Self { n, bandwidth: 0, rows: vec![1.0; n] }
    }

    /// Number of rows and columns.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Number of sub-diagonals that may be non-zero.
    pub fn bandwidth(&self) -> usize {
        self.bandwidth
    }

    /// Row `i` from the diagonal leftwards: `row(i)[k]` is the entry `(i, i − k)`.
    pub fn row(&self, i: usize) -> &[f64] {
        &self.rows[i * (self.bandwidth + 1)..][..self.bandwidth + 1]
    }

    /// Column `j` from the diagonal down, in `N` places: zeros below the band and below the last row.
    pub(crate) fn column<const N: usize>(&self, j: usize) -> [f64; N] {
        std::array::from_fn(|k| if k <= self.bandwidth && j + k < self.n { self.row(j + k)[k] } else { 0.0 })
    }

    /// The entry `(i, j)`, zero outside the band.
    pub fn at(&self, i: usize, j: usize) -> f64 {
        if j > i || i - j > self.bandwidth { 0.0 } else { self.row(i)[i - j] }
    }

    /// The product of two lower banded matrices; bandwidths add.
    pub fn product(&self, right: &Self) -> Self {
        assert_eq!(self.n, right.n);
        Self::from_fn(self.n, self.bandwidth + right.bandwidth, |i, k| {
            let first = k.saturating_sub(right.bandwidth);
            (first..=k.min(self.bandwidth)).map(|a| self.row(i)[a] * right.row(i - a)[k - a]).sum()
        })
    }

    /// The sum of two lower banded matrices.
    pub fn sum(&self, other: &Self) -> Self {
        assert_eq!(self.n, other.n);
        let pick = |m: &Self, i: usize, k: usize| if k <= m.bandwidth { m.row(i)[k] } else { 0.0 };
        Self::from_fn(self.n, self.bandwidth.max(other.bandwidth), |i, k| {
            pick(self, i, k) + pick(other, i, k)
        })
    }

    /// Applies `f` to every stored entry.
    pub fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Self { rows: self.rows.iter().copied().map(f).collect(), ..*self }
    }

    /// `M x`, in place.
    pub fn multiply(&self, x: &mut [f64]) {
        assert_eq!(x.len(), self.n);
        for i in (0..self.n).rev() {
            x[i] = self.row(i).iter().take(i + 1).enumerate().map(|(k, m)| m * x[i - k]).sum();
        }
    }

    /// `M⁻¹ x`, in place, by forward substitution.
    pub fn solve(&self, x: &mut [f64]) {
        assert_eq!(x.len(), self.n);
        for i in 0..self.n {
            let row = self.row(i);
            let known: f64 = (1..=self.bandwidth.min(i)).map(|k| row[k] * x[i - k]).sum();
            x[i] = (x[i] - known) / row[0];
        }
    }

    /// `Mᵀ x`, in place.
    pub fn multiply_transposed(&self, x: &mut [f64]) {
        assert_eq!(x.len(), self.n);
        for j in 0..self.n {
            let reach = self.bandwidth.min(self.n - 1 - j);
            x[j] = (0..=reach).map(|k| self.row(j + k)[k] * x[j + k]).sum();
        }
    }

    /// `M⁻ᵀ x`, in place, by backward substitution.
    pub fn solve_transposed(&self, x: &mut [f64]) {
        assert_eq!(x.len(), self.n);
        for j in (0..self.n).rev() {
            let reach = self.bandwidth.min(self.n - 1 - j);
            let known: f64 = (1..=reach).map(|k| self.row(j + k)[k] * x[j + k]).sum();
            x[j] = (x[j] - known) / self.row(j)[0];
        }
    }

    /// Dense copy.
    pub fn to_dense(&self) -> Mat<f64> {
        Mat::from_fn(self.n, self.n, |i, j| self.at(i, j))
    }

    /// Refuses entries that are not finite and diagonals that are not positive.
    ///
    /// Errors: [`Error::InvalidMatrixEntry`] with the first bad place.
    pub fn check(&self, name: &'static str) -> Result<()> {
        for i in 0..self.n {
            for (k, &value) in self.row(i).iter().enumerate().take(i + 1) {
                let rule = match k {
                    _ if !value.is_finite() => "it must be finite",
                    0 if value <= 0.0 => "the diagonal must be positive",
                    _ => continue,
                };
                return Err(Error::InvalidMatrixEntry { name, row: i, column: i - k, value, rule });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn products_and_solves_are_those_of_the_dense_matrix(
            n in 1..9_usize,
            bandwidth in 0..4_usize,
            entries in prop::collection::vec(-1.0..1.0_f64, 36),
            x in prop::collection::vec(-1.0..1.0_f64, 9),
        ) {
            let m = LowerBanded::from_fn(n, bandwidth, |i, k| {
                if k == 0 { 0.5 + entries[4 * i].abs() } else { entries[4 * i + k] }
            });
            let x = &x[..n];
            let dense = m.to_dense();
            let close = |a: &[f64], exact: &dyn Fn(usize) -> f64| {
                a.iter().enumerate().all(|(i, a)| (a - exact(i)).abs() < 1e-12 * (1.0 + a.abs()))
            };
            let mut y = x.to_vec();
            m.multiply(&mut y);
            prop_assert!(close(&y, &|i| (0..n).map(|j| dense[(i, j)] * x[j]).sum()));
            m.solve(&mut y);
            prop_assert!(y.iter().zip(x).all(|(a, b)| (a - b).abs() < 1e-8));
            let mut y = x.to_vec();
            m.multiply_transposed(&mut y);
            prop_assert!(close(&y, &|j| (0..n).map(|i| dense[(i, j)] * x[i]).sum()));
            m.solve_transposed(&mut y);
            prop_assert!(y.iter().zip(x).all(|(a, b)| (a - b).abs() < 1e-8));
        }
    }
}
