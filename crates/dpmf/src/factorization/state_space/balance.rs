//! Balanced bases: which directions of the state are worth keeping.

use crate::linalg::small;
use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};

/// Directions of state space, dominant first: columns of `V` and `W` with `WᵀV = 1`, stored by rows.
///
/// With the controllability Gramian `Π` and the observability Gramian `Ω`, the columns of `V` are eigenvectors of
/// `ΠΩ` scaled to `WᵀΠW = 1`, so that every reduced state has unit variance; `VᵀΩV = diag(σ²)` holds the squared Hankel
/// singular values. Directions that do not exist (fewer past or future steps than columns) are columns of zeros.
pub(super) struct Balance {
    states: usize,
    columns: usize,
    pub v: Vec<f64>,
    pub w: Vec<f64>,
    /// `σ²`, falling.
    pub hankel_sq: Vec<f64>,
    image: Vec<f64>,
    small: Vec<f64>,
    gram: Vec<f64>,
    rotation: Vec<f64>,
}

/// Directions weaker than this, relative to the strongest and in squares, are rounding.
const NEGLIGIBLE: f64 = 1e-15;

impl Balance {
    pub fn new(states: usize, columns: usize) -> Self {
        let columns = columns.min(states);
        let tall = vec![0.0; states * columns];
        let square = vec![0.0; columns * columns];
        Self {
            states,
            columns,
            v: tall.clone(),
            w: tall.clone(),
            hankel_sq: vec![0.0; columns],
            image: tall,
            small: square.clone(),
            gram: square.clone(),
            rotation: square,
        }
    }

    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The basis from nothing, by an eigendecomposition. Cost: O(states³).
    pub fn find(&mut self, controllability: &[f64], observability: &[f64]) {
        let n = self.states;
        self.v.fill(0.0);
        // In units of the output: a state counts by what it does to the iterates.
        let unit: Vec<f64> = (0..n).map(|a| observability[a * n + a].max(0.0).sqrt()).collect();
        let scaled: Vec<f64> = (0..n * n).map(|k| controllability[k] * (unit[k / n] * unit[k % n])).collect();
        let mut factor = small::pivoted_cholesky(&scaled, n, NEGLIGIBLE);
        let rank = factor.len() / n.max(1);
        for column in factor.chunks_exact_mut(n.max(1)) {
            column.iter_mut().zip(&unit).for_each(|(z, u)| *z = if *u > 0.0 { *z / u } else { 0.0 });
        }
        // ZᵀΩZ, whose eigenvalues are the σ².
        let z = MatRef::from_column_major_slice(&factor, n, rank);
        let mut image = vec![0.0; n * rank];
        let mut form = vec![0.0; rank * rank];
        multiply(&mut image, MatRef::from_row_major_slice(observability, n, n), z);
        multiply(&mut form, z.transpose(), MatRef::from_row_major_slice(&image, n, rank));
        let mut vectors = vec![0.0; rank * rank];
        small::jacobi(&mut form, &mut vectors, rank, 1e-12);
        for k in 0..rank.min(self.columns) {
            for (l, column) in factor.chunks_exact(n).enumerate() {
                let x = vectors[l * rank + k];
                for a in 0..n {
                    self.v[a * self.columns + k] += x * column[a];
                }
            }
        }
        self.refine(controllability, observability);
    }

    /// Improves the basis by one step of subspace iteration, or moves it along with slowly changing Gramians.
    ///
    /// An error in the span falls by `(σ_{k+1}/σ_k)²`, to a tenth or less, `k` the number of columns. Cost:
    /// O(states²·columns).
    pub fn refine(&mut self, controllability: &[f64], observability: &[f64]) {
        let (n, k) = (self.states, self.columns);
        if k == 0 {
            return;
        }
        let Self { v, w, image, small: form, gram, rotation, .. } = self;
        // Rayleigh–Ritz for ΠΩ, symmetric in the inner product of Ω, on the span of V.
        multiply(w, by_rows(observability, n), by_rows(v, n));
        multiply(gram, by_rows(v, n).transpose(), by_rows(w, n));
        multiply(image, by_rows(controllability, n), by_rows(w, n));
        multiply(form, by_rows(w, n).transpose(), by_rows(image, n));

        small::cholesky(gram, k, 1e-13);
        small::solve_right_transposed(gram, k, form);
        super::transpose(form, k);
        small::solve_right_transposed(gram, k, form);
        small::jacobi(form, rotation, k, 1e-9);
        let first = form[0];
        for l in 0..k {
            let value = form[l * k + l];
            let keep = value > NEGLIGIBLE * first && value > 0.0;
            self.hankel_sq[l] = if keep { value } else { 0.0 };
            let scale = if keep { value.sqrt().recip() } else { 0.0 };
            rotation.chunks_exact_mut(k).for_each(|row| row[l] *= scale);
        }
        small::solve_right_transposed(gram, k, w);
        small::solve_right_transposed(gram, k, image);
        multiply(v, by_rows(image, n), MatRef::from_row_major_slice(rotation, k, k));
        image.copy_from_slice(w);
        multiply(w, by_rows(image, n), MatRef::from_row_major_slice(rotation, k, k));
    }
}

/// A matrix of `rows` rows stored by rows.
pub(super) fn by_rows(x: &[f64], rows: usize) -> MatRef<'_, f64> {
    MatRef::from_row_major_slice(x, rows, x.len() / rows)
}

/// `out = a b`, all by rows, on one thread.
pub(super) fn multiply(out: &mut [f64], a: MatRef<'_, f64>, b: MatRef<'_, f64>) {
    let out = MatMut::from_row_major_slice_mut(out, a.nrows(), b.ncols());
    matmul(out, Accum::Replace, a, b, 1.0, Par::Seq);
}
