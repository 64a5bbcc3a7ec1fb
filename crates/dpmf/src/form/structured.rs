//! The paper's streaming approximation of a dense factorization: a few diagonals and a masked low-rank part.

mod engine;

use super::{Cost, EncoderColumns, Form, Representation, Rows};
use crate::engine::Engine;
use crate::engine::exact::program::Program;
use crate::error::{Error, Result};
use crate::linalg::banded::LowerBanded;
use crate::tensors::{Tensors, damaged};
use crate::workload::{Recurrence, RowRecurrence, Workload};
use faer::Mat;
use rayon::prelude::*;

pub(super) const KIND: &str = "structured";

const LEFT: &str = "structured.left";
const RIGHT: &str = "structured.right";
const BAND: &str = "structured.band";
const RECURRENCE_LEFT: &str = "structured.recurrence.left";
const RECURRENCE_RIGHT: &str = "structured.recurrence.right";

/// `B̂ = D + (U Vᵀ) ∘ mask`: the first `h` diagonals `D`, and rank `r` strictly below them.
///
/// With the recurrence `A = P⁻¹R` it was made for, `N = A⁻¹B̂ = R⁻¹P B̂` and `C = B̂⁻¹A`.
///
/// Reference: Appendix H of \[DMRST22\].
#[derive(Clone, Debug, PartialEq)]
pub struct Structured {
    /// `D`, bandwidth `h − 1`.
    band: LowerBanded,
    rank: usize,
    /// Rows `h …` of `U`, `rank` numbers each.
    left: Vec<f64>,
    /// Rows `0 … n − h` of `V`, `rank` numbers each.
    right: Vec<f64>,
    /// `P⁻¹R = A`.
    recurrence: Recurrence,
    /// `R⁻¹P = A⁻¹`.
    inverse: Recurrence,
    encoder_column_norms_sq: Vec<f64>,
    /// Bounds on the distances of the computed columns of `C` from the exact ones.
    encoder_distances: Vec<f64>,
}

impl Structured {
    /// The factorization with given parts: `left` holds rows `h, h + 1, …` of `U` and `right` rows
    /// `0, 1, …, n − h − 1` of `V`, one after the other, `rank` numbers each.
    ///
    /// Cost: O(n²(h + r + w)) time for the column norms of `C`, which are computed here, once.
    ///
    /// Errors: sizes that do not fit, entries that are not finite, a diagonal of `D`, `P` or `R` that is not
    /// positive, a `B̂` so close to singular that no bound on `C` can be proved.
    pub fn new(
        band: LowerBanded,
        rank: usize,
        left: Vec<f64>,
        right: Vec<f64>,
        recurrence: Recurrence,
    ) -> Result<Self> {
        let n = band.n();
        check_shape(n, band.bandwidth() + 1, rank)?;
        band.check("band of the decoder")?;
        recurrence.left.check("left factor of the recurrence")?;
        if let Some(factor) = &recurrence.right {
            factor.check("right factor of the recurrence")?;
        }
        let below = (n - band.bandwidth() - 1) * rank;
        for (name, actual, expected) in [
            ("left low-rank factor", left.len(), below),
            ("right low-rank factor", right.len(), below),
            ("left factor of the recurrence", recurrence.left.n(), n),
            ("right factor of the recurrence", recurrence.right.as_ref().map_or(n, LowerBanded::n), n),
        ] {
            if actual != expected {
                return Err(Error::WrongLength { name, actual, expected });
            }
        }
        for (name, values) in [("left low-rank factor", &left), ("right low-rank factor", &right)] {
            if let Some(index) = values.iter().position(|x| !x.is_finite()) {
                let rule = "it must be finite";
                return Err(Error::InvalidEntry { name, index, value: values[index], rule });
            }
        }

        // R⁻¹P is a recurrence too, with the roles exchanged.
        let inverse_left = recurrence.right.clone().unwrap_or_else(|| LowerBanded::identity(n));
        let inverse = Recurrence { left: inverse_left, right: Some(recurrence.left.clone()) };
        let (encoder_column_norms_sq, encoder_distances) = (Vec::new(), Vec::new());
        let mut result =
            Self { band, rank, left, right, recurrence, inverse, encoder_column_norms_sq, encoder_distances };
        let measure = |x: &mut Vec<f64>, j: usize| {
            x.fill(0.0);
            result.encoder_column(j, x);
            (norm(&x[j..]), result.residual(j, x))
        };
        let columns: Vec<(f64, f64)> = (0..n).into_par_iter().map_init(|| vec![0.0; n], measure).collect();
        let (norms, residuals): (Vec<f64>, Vec<f64>) = columns.into_iter().unzip();
        // C − Ĉ = −C E with the columns of E as residuals, so ‖C‖(1 − ‖E‖) ≤ ‖Ĉ‖.
        let room = 1.0 + (2 * n + 8) as f64 * f64::EPSILON;
        let size = norm(&norms) * room / (1.0 - norm(&residuals) * room);
        if !(size > 0.0 && size.is_finite()) {
            let index =
                norms.iter().zip(&residuals).position(|(x, e)| !(x.is_finite() && *e < 0.5)).unwrap_or(0);
            let reason = "the structured decoder is too close to singular for a bound on the sensitivity";
            return Err(Error::Numerical { what: "encoder column", index, reason });
        }
        let raised = |(x, e): (&f64, &f64)| ((x + size * e) * room).powi(2);
        result.encoder_column_norms_sq = norms.iter().zip(&residuals).map(raised).collect();
        result.encoder_distances = residuals.iter().map(|e| size * e * room).collect();
        Ok(result)
    }

    /// `h`, the number of diagonals that are held exactly.
    pub fn diagonals(&self) -> usize {
        self.band.bandwidth() + 1
    }

    /// `r`, the rank of the rest.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The diagonals of `B̂`.
    pub fn band(&self) -> &LowerBanded {
        &self.band
    }

    /// Rows `h, h + 1, …` of `U`, one after the other.
    pub fn left(&self) -> &[f64] {
        &self.left
    }

    /// Rows `0, 1, …, n − h − 1` of `V`, one after the other.
    pub fn right(&self) -> &[f64] {
        &self.right
    }

    /// The recurrence whose inverse turns `B̂` into `N`.
    pub fn recurrence(&self) -> &Recurrence {
        &self.recurrence
    }

    /// The factorization with every coefficient, those of the recurrence too, on the `f32` grid.
    ///
    /// Cost: that of [`Structured::new`].
    ///
    /// Errors: a coefficient that overflows, or a diagonal that underflows, in `f32`.
    pub fn rounded(&self) -> Result<Self> {
        let round = |x: f64| f64::from(x as f32);
        let all = |values: &[f64]| values.iter().map(|&x| round(x)).collect();
        let band = self.band.map(round);
        Self::new(band, self.rank, all(&self.left), all(&self.right), self.recurrence.map(round))
    }

    pub(super) fn read(n: usize, tensors: &mut Tensors) -> Result<Self> {
        let (shape, left) = tensors.take(LEFT, &[None, None])?;
        let rank = shape[1];
        let (_, right) = tensors.take(RIGHT, &[None, Some(rank)])?;
        let band = take_banded(tensors, BAND, n)?;
        let right_factor = tensors.contains(RECURRENCE_RIGHT);
        let recurrence = Recurrence {
            left: take_banded(tensors, RECURRENCE_LEFT, n)?,
            right: right_factor.then(|| take_banded(tensors, RECURRENCE_RIGHT, n)).transpose()?,
        };
        Self::new(band, rank, left, right, recurrence)
    }

    /// Row `i` of `B̂`, into zeros.
    fn decoder_row(&self, i: usize, out: &mut [f64]) {
        for (k, &x) in self.band.row(i).iter().enumerate().take(i + 1) {
            out[i - k] = x;
        }
        let (h, r) = (self.diagonals(), self.rank);
        if r > 0 && i >= h {
            let u = &self.left[(i - h) * r..][..r];
            let rows = self.right.chunks_exact(r).take(i - h + 1);
            out.iter_mut().zip(rows).for_each(|(out, v)| *out = dot(u, v));
        }
    }

    /// `C e_j = B̂⁻¹A e_j` by forward substitution, into zeros. Cost: O(n(h + r + w)).
    fn encoder_column(&self, j: usize, x: &mut [f64]) {
        let (n, h, r) = (self.band.n(), self.diagonals(), self.rank);
        x[j] = 1.0;
        self.recurrence.apply(x);
        let mut accumulators = vec![0.0; r];
        for i in j..n {
            let band = self.band.row(i);
            let mut known: f64 = (1..h.min(i - j + 1)).map(|k| band[k] * x[i - k]).sum();
            if i >= j + h {
                let leaving = i - h;
                let v = &self.right[leaving * r..][..r];
                accumulators.iter_mut().zip(v).for_each(|(sum, v)| *sum += v * x[leaving]);
                known += dot(&self.left[leaving * r..][..r], &accumulators);
            }
            x[i] = (x[i] - known) / band[0];
        }
    }

    /// A bound on `‖R⁻¹(P B̂ x − R e_j)‖` for a computed column `x` of `C`, which would be zero for the exact one.
    ///
    /// Every entry of `P B̂ x − R e_j` is a sum of products; the sizes of all of them, times their number and ε, bound its
    /// rounding. `|R⁻¹|` is at most the inverse of the comparison matrix of `R`. Cost: O(n(h + r + w)).
    fn residual(&self, j: usize, x: &[f64]) -> f64 {
        let (n, h, r) = (self.band.n(), self.diagonals(), self.rank);
        let Recurrence { left, right } = &self.recurrence;
        let (mut decoded, mut sizes) = (vec![0.0; n], vec![0.0; n]);
        let (mut sums, mut sum_sizes) = (vec![0.0; r], vec![0.0; r]);
        let mut residual = vec![0.0; n];
        for i in j..n {
            for (k, b) in self.band.row(i).iter().enumerate().take(h.min(i - j + 1)) {
                decoded[i] += b * x[i - k];
                sizes[i] += (b * x[i - k]).abs();
            }
            if i >= j + h {
                let (u, v, x) = (&self.left[(i - h) * r..][..r], &self.right[(i - h) * r..][..r], x[i - h]);
                for q in 0..r {
                    sums[q] += v[q] * x;
                    sum_sizes[q] += (v[q] * x).abs();
                    decoded[i] += u[q] * sums[q];
                    sizes[i] += u[q].abs() * sum_sizes[q];
                }
            }
            let (mut value, mut size) = (0.0, 0.0);
            for (k, p) in left.row(i).iter().enumerate().take(i - j + 1) {
                value += p * decoded[i - k];
                size += p.abs() * sizes[i - k];
            }
            let given = match right {
                None => f64::from(u8::from(i == j)),
                Some(right) => right.at(i, j),
            };
            let terms = (i - j + h + r + left.bandwidth() + 8) as f64;
            residual[i] = (value - given).abs() + terms * f64::EPSILON * (size + given.abs());
        }
        if let Some(right) = right {
            for i in j..n {
                let row = right.row(i);
                let reach = row.len().min(i - j + 1);
                let known: f64 = (1..reach).map(|k| row[k].abs() * residual[i - k]).sum();
                residual[i] = (residual[i] + known) / row[0] * (1.0 + 16.0 * f64::EPSILON);
            }
        }
        norm(&residual[j..]) * (1.0 + (n + 8) as f64 * f64::EPSILON)
    }

    /// Squared row norms of `B̂`.
    fn row_norms_sq(&self) -> Vec<f64> {
        let n = self.band.n();
        let norm_sq = |out: &mut Vec<f64>, i: usize| {
            out.fill(0.0);
            self.decoder_row(i, out);
            out[..=i].iter().map(|x| x * x).sum()
        };
        (0..n).into_par_iter().map_init(|| vec![0.0; n], norm_sq).collect()
    }

    /// `γ²(Ĉ)‖B̂‖_F²`.
    pub(crate) fn loss(&self) -> f64 {
        let sensitivity_sq = self.encoder_column_norms_sq.iter().copied().fold(0.0, f64::max);
        sensitivity_sq * self.row_norms_sq().iter().sum::<f64>()
    }
}

impl Representation for Structured {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn steps(&self) -> usize {
        self.band.n()
    }

    fn coloring_rows(&self) -> Rows<'_> {
        let n = self.steps();
        let mut coloring = RowRecurrence::new(&self.inverse, n);
        let mut steps = 0..n;
        Box::new(move |out| {
            if let Some(i) = steps.next() {
                out.copy_from_slice(coloring.push(|row| self.decoder_row(i, row)));
            }
        })
    }

    fn encoder(&self) -> Mat<f64> {
        let n = self.steps();
        let mut c = Mat::zeros(n, n);
        (0..n).for_each(|j| self.encoder_column(j, c.col_as_slice_mut(j)));
        c
    }

    /// Guarantee: ≥ the exact values, for any coefficients: a verified residual bounds what rounding hides.
    fn encoder_column_norms_sq(&self) -> Vec<f64> {
        self.encoder_column_norms_sq.clone()
    }

    /// Cost: O(n(h + r + w)) for each column.
    fn encoder_columns(&self) -> Box<dyn EncoderColumns + '_> {
        Box::new(self)
    }

    /// Cost: O(n²(h + r)) for the recurrence it holds, O(n²(r + w)) for another.
    fn decoder_row_norms_sq(&self, workload: &Workload) -> Vec<f64> {
        assert_eq!(workload.steps(), self.steps(), "the workload and the factorization differ in length");
        if workload.is_invertible() && workload.recurrence() == Some(&self.recurrence) {
            return self.row_norms_sq();
        }
        let mut rows = self.coloring_rows();
        workload.row_norms_sq_of_product(self.steps(), |_, out| rows(out))
    }

    /// Kept: the last `h − 1` rows of noise, `r` accumulators, and the past values that `P` and `R` reach.
    fn cost(&self) -> Cost {
        let n = self.steps();
        let (h, r) = (self.diagonals(), self.rank);
        let left = self.recurrence.left.bandwidth();
        let right = self.recurrence.right.as_ref().map_or(0, LowerBanded::bandwidth);
        // Sum over steps i of min(i + 1, width).
        let band = |width: usize| width * n - width * width.saturating_sub(1) / 2;
        let accumulate = 2 * r * (n - h);
        let inverse = band((left + 1).min(n)) + band((right + 1).min(n)) - n;
        let work = (band(h) + accumulate + inverse) as f64 / n as f64;
        Cost::stream(h - 1 + r + left + right, work)
    }

    fn deployed(&self) -> Result<Form> {
        Ok(Form::Structured(self.rounded()?))
    }

    fn engine(&self, _: usize) -> Result<Box<dyn Engine>> {
        Ok(Box::new(engine::StructuredEngine::new(self)?))
    }

    fn program(&self, _: usize) -> Result<Box<dyn Program>> {
        Ok(Box::new(engine::StructuredEngine::new(self)?))
    }

    fn write(&self, tensors: &mut Tensors) {
        let below = self.steps() - self.diagonals();
        tensors.put_f32(LEFT, &[below, self.rank], self.left.iter().copied());
        tensors.put_f32(RIGHT, &[below, self.rank], self.right.iter().copied());
        put_banded(tensors, BAND, &self.band);
        put_banded(tensors, RECURRENCE_LEFT, &self.recurrence.left);
        if let Some(right) = &self.recurrence.right {
            put_banded(tensors, RECURRENCE_RIGHT, right);
        }
    }
}

impl EncoderColumns for &Structured {
    fn write(&self, steps: &[usize], out: &mut [f64]) -> Vec<f64> {
        for (&j, column) in steps.iter().zip(out.chunks_exact_mut(self.steps())) {
            self.encoder_column(j, column);
        }
        steps.iter().map(|&j| self.encoder_distances[j]).collect()
    }
}

/// Rows from the diagonal leftwards, as the type itself holds them.
fn put_banded(tensors: &mut Tensors, name: &str, matrix: &LowerBanded) {
    let rows = (0..matrix.n()).flat_map(|i| matrix.row(i).iter().copied());
    tensors.put_f32(name, &[matrix.n(), matrix.bandwidth() + 1], rows);
}

fn take_banded(tensors: &mut Tensors, name: &str, n: usize) -> Result<LowerBanded> {
    let (shape, values) = tensors.take(name, &[Some(n), None])?;
    let width = shape[1];
    if width == 0 {
        return Err(damaged(format!("tensor {name} has no diagonal")));
    }
    Ok(LowerBanded::from_fn(n, width - 1, |i, k| values[i * width + k]))
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(crate) fn check_shape(n: usize, diagonals: usize, rank: usize) -> Result<()> {
    if n == 0 {
        return Err(Error::argument("steps", 0, "at least one step is needed"));
    }
    if !(1..=n).contains(&diagonals) {
        return Err(Error::argument("diagonals", diagonals, "it must lie between 1 and the number of steps"));
    }
    if rank > n - diagonals {
        let rule = "rank and diagonals together must not exceed the number of steps";
        return Err(Error::argument("rank", rank, rule));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
