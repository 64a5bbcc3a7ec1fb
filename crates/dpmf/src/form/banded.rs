//! Factorizations whose encoder `C` is banded: noise by substitution, over the last few rows of itself.

mod engine;

use super::{Cost, EncoderColumns, Form, Products, Representation, Rows};
use crate::engine::Engine;
use crate::engine::exact::program::Program;
use crate::error::{Error, Result};
use crate::tensors::{Tensors, damaged};
use crate::workload::Workload;
use crate::workload::realisation::Realisation;
use faer::Mat;

pub(super) const KIND: &str = "banded";

const FEEDBACK: &str = "banded.feedback";
const SCALE: &str = "banded.scale";

/// `C` with entries within `G` places of the diagonal, held by the recursion that makes the noise:
///
/// ```text
/// y_t = q_t z_t + Σ_{k=1}^{G−1} w_{t,k} y_{t−k},        u_t = s_t y_t,
/// ```
///
/// so `C = diag(1/q)(I − W)diag(1/s)`. Coefficients `q` and `w` that are the same at every step are held once: then `C` is
/// a Toeplitz matrix with scaled columns.
///
/// ```
/// use dpmf::form::Banded;
/// use dpmf::Representation;
///
/// // C has ones on its diagonal and halves below it.
/// let banded = Banded::toeplitz(&[1.0, 0.5], vec![1.0; 3])?;
/// assert_eq!((banded.encoder()[(1, 0)], banded.encoder()[(2, 0)]), (0.5, 0.0));
/// assert_eq!(banded.coloring()[(2, 0)], 0.25);
/// # Ok::<(), dpmf::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Banded {
    bands: usize,
    /// `q_t, w_{t,1}, …`, `G` numbers a step, or once for all.
    feedback: Vec<f64>,
    scale: Vec<f64>,
}

impl Banded {
    /// The factorization with the coefficients `q_t, w_{t,1}, …, w_{t,G−1}` of every step, or of one step for all, and
    /// `s_t`.
    ///
    /// Errors: no steps or no bands, lengths that do not fit, entries that are not finite, `q_t` or `s_t` not positive.
    pub fn new(bands: usize, feedback: Vec<f64>, scale: Vec<f64>) -> Result<Self> {
        let n = scale.len();
        if n == 0 {
            return Err(Error::argument("steps", 0, "at least one step is needed"));
        }
        if bands == 0 {
            return Err(Error::argument("bands", 0, "at least the diagonal is needed"));
        }
        let (actual, expected) = (feedback.len(), n.saturating_mul(bands));
        if actual != expected && actual != bands {
            return Err(Error::WrongLength { name: "feedback coefficients", actual, expected });
        }
        for (name, values, bands) in [("feedback coefficients", &feedback, bands), ("scales", &scale, 1)] {
            for (index, &value) in values.iter().enumerate() {
                let rule = match index % bands {
                    _ if !value.is_finite() => "it must be finite",
                    0 if value <= 0.0 => "it must be positive",
                    _ => continue,
                };
                return Err(Error::InvalidEntry { name, index, value, rule });
            }
        }
        Ok(Self { bands, feedback, scale })
    }

    /// The factorization with `C_ij = c_{i−j} e_j` for a few coefficients `c` and column scales `e`.
    ///
    /// Errors: those of [`Banded::new`].
    pub fn toeplitz(coefficients: &[f64], columns: Vec<f64>) -> Result<Self> {
        let first = coefficients.first().copied().unwrap_or(1.0);
        let feedback =
            coefficients.iter().enumerate().map(|(k, c)| if k == 0 { 1.0 / c } else { -c / first });
        let scale = columns.into_iter().map(|e| 1.0 / e).collect();
        Self::new(coefficients.len(), feedback.collect(), scale)
    }

    /// The factorization with `C_{t,t−k} = entry(t, k)` for `k < G`.
    ///
    /// Errors: those of [`Banded::new`].
    pub fn from_encoder(steps: usize, bands: usize, entry: impl Fn(usize, usize) -> f64) -> Result<Self> {
        let mut feedback = Vec::with_capacity(steps * bands);
        for t in 0..steps {
            let diagonal = entry(t, 0);
            feedback.push(1.0 / diagonal);
            feedback.extend((1..bands).map(|k| if k <= t { -entry(t, k) / diagonal } else { 0.0 }));
        }
        Self::new(bands, feedback, vec![1.0; steps])
    }

    /// Number of diagonals `G` of `C`.
    pub fn bands(&self) -> usize {
        self.bands
    }

    /// Whether `q` and `w` are the same at every step.
    fn is_constant(&self) -> bool {
        self.feedback.len() == self.bands
    }

    /// `q_t, w_{t,1}, …`, as far as there are earlier steps.
    fn row(&self, t: usize) -> &[f64] {
        let start = if self.is_constant() { 0 } else { t * self.bands };
        &self.feedback[start..][..self.bands.min(t + 1)]
    }

    /// `C_{t,t−k}`, with two roundings.
    fn entry(&self, t: usize, k: usize) -> f64 {
        let row = self.row(t);
        let open = if k == 0 { 1.0 } else { -row[k] };
        open / row[0] / self.scale[t - k]
    }

    /// Every coefficient rounded to the nearest f32.
    ///
    /// Errors: a coefficient that overflows, or a `q` or `s` that vanishes, in f32.
    pub fn rounded(&self) -> Result<Self> {
        let round = |values: &[f64]| values.iter().map(|&x| f64::from(x as f32)).collect();
        Self::new(self.bands, round(&self.feedback), round(&self.scale))
    }

    pub(super) fn read(n: usize, tensors: &mut Tensors) -> Result<Self> {
        let (shape, feedback) = tensors.take(FEEDBACK, &[None, None])?;
        if shape[0] != n && shape[0] != 1 {
            return Err(damaged(format!("tensor {FEEDBACK} has {} rows, not 1 or {n}", shape[0])));
        }
        Self::new(shape[1], feedback, tensors.take(SCALE, &[Some(n)])?.1)
    }

    /// Squared row norms of `A N`: the covariance of the last `G − 1` rows of `y` and the optimizer's states together.
    ///
    /// Cost: O(n(G + w)²).
    fn row_norms_sq_after(&self, workload: Realisation<'_>) -> Vec<f64> {
        let (ring, states) = (self.bands - 1, workload.states());
        let m = ring + states;
        let mut p = vec![0.0; m * m];
        let (mut f, mut g) = (Vec::new(), Vec::new());
        let mut norms = Vec::with_capacity(self.steps());
        for t in 0..self.steps() {
            workload.write(t, &mut f, &mut g);
            let (row, s) = (self.row(t), self.scale[t]);
            // Covariances of y_t with what is held, and its variance.
            let mut y = vec![0.0; m];
            for (k, w) in row.iter().enumerate().skip(1) {
                let slot = (t - k) % ring;
                y.iter_mut().zip(&p[slot * m..]).for_each(|(y, p)| *y += w * p);
            }
            let past: f64 = row.iter().enumerate().skip(1).map(|(k, w)| w * y[(t - k) % ring]).sum();
            let variance = row[0] * row[0] + past;
            // The optimizer takes u = s y.
            let advance = |x: &[f64], u: f64, out: &mut [f64]| {
                for (k, out) in out.iter_mut().enumerate() {
                    *out =
                        g[k] * u + f[k * states..][..states].iter().zip(x).map(|(f, x)| f * x).sum::<f64>();
                }
            };
            let mut moved = vec![0.0; states];
            for a in 0..m {
                let line = &mut p[a * m + ring..(a + 1) * m];
                advance(line, s * y[a], &mut moved);
                line.copy_from_slice(&moved);
            }
            advance(&y[ring..], s * variance, &mut moved);
            let cross = moved.clone();
            for a in 0..m {
                let column: Vec<f64> = (0..states).map(|k| p[(ring + k) * m + a]).collect();
                let with_y = if a < ring { y[a] } else { cross[a - ring] };
                advance(&column, s * with_y, &mut moved);
                (0..states).for_each(|k| p[(ring + k) * m + a] = moved[k]);
            }
            if ring > 0 {
                let slot = t % ring;
                for a in 0..m {
                    let value = if a < ring { y[a] } else { cross[a - ring] };
                    (p[slot * m + a], p[a * m + slot]) = (value, value);
                }
                p[slot * m + slot] = variance;
            }
            norms.push(p[m * m - 1]);
        }
        norms
    }
}

impl Representation for Banded {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn steps(&self) -> usize {
        self.scale.len()
    }

    /// Cost: O(n G) a row.
    fn coloring_rows(&self) -> Rows<'_> {
        let (n, ring) = (self.steps(), self.bands - 1);
        let mut rows = vec![0.0; n * ring.max(1)];
        let mut t = 0;
        Box::new(move |out| {
            let row = self.row(t);
            for (k, w) in row.iter().enumerate().skip(1) {
                let y = &rows[(t - k) % ring * n..][..t];
                out.iter_mut().zip(y).for_each(|(out, y)| *out += w * y);
            }
            out[t] = row[0];
            if ring > 0 {
                rows[t % ring * n..][..n].copy_from_slice(out);
            }
            out[..=t].iter_mut().for_each(|x| *x *= self.scale[t]);
            t += 1;
        })
    }

    fn encoder(&self) -> Mat<f64> {
        let n = self.steps();
        Mat::from_fn(n, n, |i, j| if j <= i && i - j < self.bands { self.entry(i, i - j) } else { 0.0 })
    }

    /// Guarantee: ≥ the exact values; entries and sums are raised by what their rounding may hide.
    /// Cost: O(n G).
    fn encoder_column_norms_sq(&self) -> Vec<f64> {
        let n = self.steps();
        let room = 1.0 + (self.bands + 16) as f64 * f64::EPSILON;
        let norm_sq = |j: usize| {
            let sum: f64 = (j..n.min(j + self.bands)).map(|t| self.entry(t, t - j).powi(2)).sum();
            if sum.is_nan() { f64::INFINITY } else { sum * room }
        };
        (0..n).map(norm_sq).collect()
    }

    /// Cost: O(G) for each column.
    fn encoder_columns(&self) -> Box<dyn EncoderColumns + '_> {
        Box::new(self)
    }

    fn encoder_bands(&self) -> usize {
        self.bands.min(self.steps())
    }

    /// `C = diag(1/q)(I − W)diag(1/s)` with positive `q` and `s`.
    fn encoder_is_nonnegative(&self) -> bool {
        self.feedback.chunks_exact(self.bands).all(|row| row[1..].iter().all(|w| *w <= 0.0))
    }

    /// Cost: O(n(G + w)²); that of the dense rows for a dense workload.
    fn decoder_row_norms_sq(&self, workload: &Workload) -> Vec<f64> {
        match workload.realisation() {
            Some(realisation) => self.row_norms_sq_after(realisation),
            None => {
                let mut rows = self.coloring_rows();
                workload.row_norms_sq_of_product(self.steps(), |_, out| rows(out))
            }
        }
    }

    fn cost(&self) -> Cost {
        let (n, g) = (self.steps(), self.bands.min(self.steps()));
        let terms = g * n - g * (g - 1) / 2;
        Cost::stream(self.bands - 1, (terms + n) as f64 / n as f64)
    }

    fn deployed(&self) -> Result<Form> {
        Ok(Form::Banded(self.rounded()?))
    }

    fn engine(&self, _: usize) -> Result<Box<dyn Engine>> {
        Ok(Box::new(engine::BandedEngine::new(self)?))
    }

    fn program(&self, _: usize) -> Result<Box<dyn Program>> {
        Ok(Box::new(engine::BandedEngine::new(self)?))
    }

    fn write(&self, tensors: &mut Tensors) {
        let rows = self.feedback.len() / self.bands;
        tensors.put_f32(FEEDBACK, &[rows, self.bands], self.feedback.iter().copied());
        tensors.put_f32(SCALE, &[self.steps()], self.scale.iter().copied());
    }
}

impl Banded {
    /// A bound on the distance of a computed column of `C` from the exact one, given its norm: two quotients an entry.
    fn distance(&self, norm: f64) -> f64 {
        norm * 4.0 * f64::EPSILON * (1.0 + self.bands as f64 * f64::EPSILON)
    }
}

impl EncoderColumns for &Banded {
    fn write(&self, steps: &[usize], out: &mut [f64]) -> Vec<f64> {
        let n = self.steps();
        let write = |(&j, column): (&usize, &mut [f64])| {
            let mut norm_sq = 0.0;
            for t in j..n.min(j + self.bands) {
                column[t] = self.entry(t, t - j);
                norm_sq += column[t] * column[t];
            }
            self.distance(norm_sq.sqrt())
        };
        steps.iter().zip(out.chunks_exact_mut(n)).map(write).collect()
    }

    /// Columns farther apart than the bands do not meet. Cost: O(n G²).
    fn products(&self) -> Option<Products<'_>> {
        let (form, n) = (*self, self.steps());
        let mut left = n;
        let rows = move |out: &mut [f64]| {
            let Some(i) = left.checked_sub(1) else { return };
            left = i;
            out.fill(0.0);
            let end = n.min(i + form.bands);
            let column: Vec<f64> = (i..end).map(|t| form.entry(t, t - i)).collect();
            for (j, out) in (i..end).zip(out) {
                *out = (j..end).map(|t| column[t - i] * form.entry(t, t - j)).sum();
            }
        };
        let norms: Vec<f64> = self
            .encoder_column_norms_sq()
            .iter()
            .map(|norm_sq| norm_sq.sqrt() * (1.0 + f64::EPSILON))
            .collect();
        let distances = norms.iter().map(|&norm| self.distance(norm)).collect();
        Some(Products { norms, distances, rows: Box::new(rows) })
    }
}

#[cfg(test)]
mod tests;
