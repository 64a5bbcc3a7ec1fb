//! Balanced bases: which directions of the state are worth keeping.

use crate::error::{Error, Result};
use crate::linalg::small;
use faer::diag::Diag;
use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::matmul::matmul;
use faer::linalg::solvers::SvdError;
use faer::linalg::svd::{ComputeSvdVectors, svd, svd_scratch};
use faer::{Accum, Mat, MatMut, MatRef, Par};

/// Directions of state space, dominant first: columns of `V` and `W` with `WᵀV = 1`, stored by rows.
///
/// With the controllability Gramian `Π = RᵀR`, the observability Gramian `Ω = SᵀS` and the singular value
/// decomposition `S Rᵀ = P Σ Qᵀ`, they are the first columns of `V = RᵀQ` and `W = SᵀPΣ⁻¹`. Every reduced
/// state has unit variance, and `σ²` is its share of energy in the output. Directions that do not exist
/// (fewer past or future steps than columns), or that drown in rounding, are columns of zeros.
///
/// Only the roots are used, never the Gramians: a direction is then known as well as its `σ` permits, not
/// its `σ²`.
pub(super) struct Balance {
    states: usize,
    columns: usize,
    pub v: Vec<f64>,
    pub w: Vec<f64>,
    /// `σ`, falling.
    pub hankel: Vec<f64>,
    /// `P`, by columns.
    left: Vec<f64>,
    /// `Q`, by columns.
    right: Vec<f64>,
    image: Vec<f64>,
    rotation: Vec<f64>,
    /// Singular values below this are rounding; from the last time the basis was found.
    noise: f64,
}

/// The two roots at one step.
#[derive(Clone, Copy)]
pub(super) struct Roots<'b> {
    /// `R`, with `states` columns.
    pub controllability: MatRef<'b, f64>,
    /// `S`, with `states` columns.
    pub observability: MatRef<'b, f64>,
}

impl Roots<'_> {
    /// Size of the rounding errors in `S Rᵀ`, with room: `Σ_a ‖S e_a‖‖R e_a‖` bounds the sizes of the terms
    /// summed.
    fn noise(&self) -> f64 {
        let (r, s) = (self.controllability, self.observability);
        let terms = (0..r.ncols()).map(|a| r.col(a).norm_l2() * s.col(a).norm_l2());
        64.0 * f64::EPSILON * terms.sum::<f64>()
    }
}

impl Balance {
    pub fn new(states: usize, columns: usize, outputs: usize) -> Self {
        let columns = columns.min(states);
        let tall = vec![0.0; states * columns];
        Self {
            states,
            columns,
            v: tall.clone(),
            w: tall.clone(),
            hankel: vec![0.0; columns],
            left: vec![0.0; outputs * columns],
            right: tall.clone(),
            image: tall,
            rotation: vec![0.0; columns * columns],
            noise: 0.0,
        }
    }

    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The basis from nothing, by a singular value decomposition of `S Rᵀ`. Cost: O(states³).
    ///
    /// Errors: [`Error::Numerical`] at `step` when the decomposition does not converge.
    pub fn find(&mut self, roots: Roots<'_>, step: usize) -> Result<()> {
        let columns = self.columns;
        if columns == 0 {
            return Ok(());
        }
        let (r, s) = (roots.controllability, roots.observability);
        let right = right_singular_vectors(s, r).map_err(|_| Error::Numerical {
            what: "balanced truncation",
            index: step,
            reason: "the singular value decomposition did not converge",
        })?;
        multiply(&mut self.v, r.transpose(), right.as_ref().get(.., ..columns));
        self.noise = roots.noise();
        self.refine(roots);
        Ok(())
    }

    /// Improves the basis by one step of subspace iteration, or moves it along with slowly changing Gramians.
    ///
    /// The error in the span of the first `l` of `k` columns falls by `(σ_{k+1}/σ_l)²`.
    /// Cost: O(states²·columns).
    pub fn refine(&mut self, roots: Roots<'_>) {
        let (n, k) = (self.states, self.columns);
        if k == 0 {
            return;
        }
        let Self { v, w, hankel, left, right, image, rotation, noise, .. } = self;
        let (r, s) = (roots.controllability, roots.observability);
        let outputs = s.nrows();
        multiply_to_columns(left, s, by_rows(v, n));
        small::orthonormalise(left, outputs, *noise);
        let p = MatRef::from_column_major_slice(left, outputs, k);
        multiply(image, s.transpose(), p);
        // R SᵀP = Q Σ Xᵀ, with P X the improved left vectors.
        multiply_to_columns(right, r, by_rows(image, n));
        small::orthogonalise_pairs(right, n, rotation, 1e-10);
        for (l, column) in right.chunks_exact_mut(n).enumerate() {
            let norm = column.iter().map(|x| x * x).sum::<f64>().sqrt();
            let inverse = if norm > *noise { 1.0 / norm } else { 0.0 };
            hankel[l] = if norm > *noise { norm } else { 0.0 };
            column.iter_mut().for_each(|x| *x *= inverse);
            rotation[l * k..][..k].iter_mut().for_each(|x| *x *= inverse);
        }
        multiply(v, r.transpose(), MatRef::from_column_major_slice(right, n, k));
        multiply(w, by_rows(image, n), MatRef::from_column_major_slice(rotation, k, k));
    }
}

/// `Q` of `S Rᵀ = P Σ Qᵀ`, on one thread: many are sought at once, and the bits shall not depend on how many.
fn right_singular_vectors(s: MatRef<'_, f64>, r: MatRef<'_, f64>) -> Result<Mat<f64>, SvdError> {
    let (outputs, states) = (s.nrows(), r.nrows());
    let mut hankel = Mat::zeros(outputs, states);
    matmul(&mut hankel, Accum::Replace, s, r.transpose(), 1.0, Par::Seq);
    let size = outputs.min(states);
    let (mut values, mut vectors) = (Diag::zeros(size), Mat::zeros(states, size));
    let (none, thin) = (ComputeSvdVectors::No, ComputeSvdVectors::Thin);
    let scratch = svd_scratch::<f64>(outputs, states, none, thin, Par::Seq, Default::default());
    svd(
        hankel.as_ref(),
        values.as_mut(),
        None,
        Some(vectors.as_mut()),
        Par::Seq,
        MemStack::new(&mut MemBuffer::new(scratch)),
        Default::default(),
    )?;
    Ok(vectors)
}

/// A matrix of `rows` rows stored by rows.
pub(super) fn by_rows(x: &[f64], rows: usize) -> MatRef<'_, f64> {
    MatRef::from_row_major_slice(x, rows, x.len() / rows.max(1))
}

/// `out = a b`, stored by rows, on one thread.
pub(super) fn multiply(out: &mut [f64], a: MatRef<'_, f64>, b: MatRef<'_, f64>) {
    let out = MatMut::from_row_major_slice_mut(out, a.nrows(), b.ncols());
    matmul(out, Accum::Replace, a, b, 1.0, Par::Seq);
}

/// `out = a b`, stored by columns, on one thread.
fn multiply_to_columns(out: &mut [f64], a: MatRef<'_, f64>, b: MatRef<'_, f64>) {
    let out = MatMut::from_column_major_slice_mut(out, a.nrows(), b.ncols());
    matmul(out, Accum::Replace, a, b, 1.0, Par::Seq);
}
