//! Encoders of a few exponentials, rows and columns scaled: a stream of a few buffers whose `C` is non-negative by sight.

mod engine;

use super::{Cost, EncoderColumns, Form, Representation, Rows};
use crate::engine::Engine;
use crate::engine::exact::program::Program;
use crate::error::{Error, Result};
use crate::linalg::exponentials::Exponentials;
use crate::tensors::Tensors;
use crate::workload::Workload;
use crate::workload::realisation::Realisation;
use faer::Mat;

pub(super) const KIND: &str = "blt";

/// Steps from which on column norms come from a recursion.
pub(crate) const LONG: usize = 8192;

const WEIGHTS: &str = "blt.weights";
const DECAYS: &str = "blt.decays";
const DIRECT: &str = "blt.direct";
const SCALE: &str = "blt.scale";

/// `C = diag(1/q) T diag(1/s)` with the Toeplitz matrix `T` of `1, Σω_i, Σω_iθ_i, Σω_iθ_i², …`, held by the recursion that makes
/// the noise:
///
/// ```text
/// y_t = q_t z_t − Σ_i ω_i x_{i,t},        u_t = s_t y_t,        x_{i,t+1} = θ_i x_{i,t} + y_t,        x_0 = 0.
/// ```
///
/// With `ω ≥ 0` and `θ ≥ 0` no entry of `C` is negative, whatever the rounding of the coefficients.
///
/// ```
/// use dpmf::form::Blt;
/// use dpmf::Representation;
///
/// let blt = Blt::new(vec![0.5], vec![0.25], vec![1.0; 3], vec![1.0; 3])?;
/// assert_eq!((blt.encoder()[(1, 0)], blt.encoder()[(2, 0)]), (0.5, 0.125));
/// assert!(blt.encoder_is_nonnegative());
/// assert_eq!(blt.cost().buffers, Some(1));
/// # Ok::<(), dpmf::Error>(())
/// ```
///
/// Reference: McMahan, Xu, Zhang, "A hassle-free algorithm for private learning in practice", 2024, for constant scales.
#[derive(Clone, Debug, PartialEq)]
pub struct Blt {
    weights: Vec<f64>,
    decays: Vec<f64>,
    direct: Vec<f64>,
    scale: Vec<f64>,
}

impl Blt {
    /// The factorization with weights `ω`, decays `θ`, and `q_t` and `s_t` of every step.
    ///
    /// Errors: no steps, lengths that do not fit, `ω` not finite or negative, `θ` outside [0, 1), `q_t` or `s_t` not positive and
    /// finite.
    pub fn new(weights: Vec<f64>, decays: Vec<f64>, direct: Vec<f64>, scale: Vec<f64>) -> Result<Self> {
        let n = direct.len();
        if n == 0 {
            return Err(Error::argument("steps", 0, "at least one step is needed"));
        }
        for (name, actual, expected) in
            [("decays", decays.len(), weights.len()), ("scales", scale.len(), direct.len())]
        {
            if actual != expected {
                return Err(Error::WrongLength { name, actual, expected });
            }
        }
        type Fits = fn(f64) -> bool;
        let checks: [(&'static str, &[f64], Fits, &'static str); 4] = [
            ("weights", &weights, |x| x >= 0.0 && x.is_finite(), "it must be finite and not negative"),
            ("decays", &decays, |x| (0.0..1.0).contains(&x), "it must be in [0, 1)"),
            ("direct coefficients", &direct, |x| x > 0.0 && x.is_finite(), "it must be positive and finite"),
            ("scales", &scale, |x| x > 0.0 && x.is_finite(), "it must be positive and finite"),
        ];
        for (name, values, fits, rule) in checks {
            if let Some((index, &value)) = values.iter().enumerate().find(|(_, x)| !fits(**x)) {
                return Err(Error::InvalidEntry { name, index, value, rule });
            }
        }
        Ok(Self { weights, decays, direct, scale })
    }

    /// Number of exponentials.
    pub fn order(&self) -> usize {
        self.weights.len()
    }

    /// Weights `ω` and decays `θ`.
    pub fn exponentials(&self) -> (&[f64], &[f64]) {
        (&self.weights, &self.decays)
    }

    /// `s_t`.
    pub fn scales(&self) -> &[f64] {
        &self.scale
    }

    /// Every coefficient rounded to an f32, decays not up to 1.
    ///
    /// Errors: a coefficient that overflows, or a `q` or `s` that vanishes, in f32.
    pub fn rounded(&self) -> Result<Self> {
        let round = |values: &[f64]| values.iter().map(|&x| f64::from(x as f32)).collect();
        let decays = self.decays.iter().map(|&x| f64::from((x as f32).min(1.0_f32.next_down()))).collect();
        Self::new(round(&self.weights), decays, round(&self.direct), round(&self.scale))
    }

    pub(super) fn read(n: usize, tensors: &mut Tensors) -> Result<Self> {
        let (shape, weights) = tensors.take(WEIGHTS, &[None])?;
        let decays = tensors.take(DECAYS, &[Some(shape[0])])?.1;
        let direct = tensors.take(DIRECT, &[Some(n)])?.1;
        Self::new(weights, decays, direct, tensors.take(SCALE, &[Some(n)])?.1)
    }

    /// The first column of `T`. Every term is positive and a product of few, so each is off by at most `(k + r + 4)ε` of itself.
    fn series(&self) -> Vec<f64> {
        let mut powers = self.weights.clone();
        let mut out = Vec::with_capacity(self.steps());
        out.push(1.0);
        for _ in 1..self.steps() {
            out.push(powers.iter().sum());
            powers.iter_mut().zip(&self.decays).for_each(|(power, decay)| *power *= decay);
        }
        out
    }

    /// What an entry that [`Blt::series`] and two scales make up may be off by, relative to itself.
    fn rounding(&self) -> f64 {
        (self.steps() + self.order() + 8) as f64 * f64::EPSILON
    }

    /// Squared row norms of `A N`: the covariance of the exponentials and the optimizer's states together.
    ///
    /// Cost: O(n(r + w)²).
    fn row_norms_sq_after(&self, workload: Realisation<'_>) -> Vec<f64> {
        let (r, states) = (self.order(), workload.states());
        let m = r + states;
        let mut p = vec![0.0; m * m];
        let (mut f, mut g) = (Vec::new(), Vec::new());
        let mut norms = Vec::with_capacity(self.steps());
        for t in 0..self.steps() {
            workload.write(t, &mut f, &mut g);
            let (q, s) = (self.direct[t], self.scale[t]);
            // x' = Θx + y and o' = F o + g s y, with y = q z − ωᵀx.
            let advance = |x: &[f64], z: f64, out: &mut [f64]| {
                let y = z - self.weights.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
                for k in 0..r {
                    out[k] = self.decays[k] * x[k] + y;
                }
                for k in 0..states {
                    let own: f64 = f[k * states..][..states].iter().zip(&x[r..]).map(|(f, x)| f * x).sum();
                    out[r + k] = own + g[k] * s * y;
                }
            };
            let mut moved = vec![0.0; m];
            let mut half = vec![0.0; m * m];
            for a in 0..m {
                advance(&p[a * m..][..m], 0.0, &mut moved);
                (0..m).for_each(|b| half[b * m + a] = moved[b]);
            }
            for b in 0..m {
                advance(&half[b * m..][..m], 0.0, &mut moved);
                p[b * m..][..m].copy_from_slice(&moved);
            }
            let mut input = vec![0.0; m];
            advance(&vec![0.0; m], q, &mut input);
            for a in 0..m {
                for b in 0..m {
                    p[a * m + b] += input[a] * input[b];
                }
            }
            norms.push(p[m * m - 1]);
        }
        norms
    }
}

impl Representation for Blt {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn steps(&self) -> usize {
        self.direct.len()
    }

    /// Cost: O(n r) a row.
    fn coloring_rows(&self) -> Rows<'_> {
        let (n, r) = (self.steps(), self.order());
        let mut states = vec![0.0; r * n];
        let mut t = 0;
        Box::new(move |out| {
            for (k, w) in self.weights.iter().enumerate() {
                out.iter_mut().zip(&states[k * n..][..t]).for_each(|(y, x)| *y -= w * x);
            }
            out[t] += self.direct[t];
            for (k, decay) in self.decays.iter().enumerate() {
                states[k * n..][..=t].iter_mut().zip(&*out).for_each(|(x, y)| *x = decay * *x + y);
            }
            out[..=t].iter_mut().for_each(|x| *x *= self.scale[t]);
            t += 1;
        })
    }

    fn encoder(&self) -> Mat<f64> {
        let (n, series) = (self.steps(), self.series());
        let entry = |i: usize, j: usize| series[i - j] / self.direct[i] / self.scale[j];
        Mat::from_fn(n, n, |i, j| if j <= i { entry(i, j) } else { 0.0 })
    }

    /// Guarantee: ≥ the exact values.
    /// Cost: O(n²), O(n r²) for long ones.
    fn encoder_column_norms_sq(&self) -> Vec<f64> {
        if let Some(filter) = self.as_exponentials().filter(|_| self.steps() > LONG) {
            let room = 1.0 + filter.rounding();
            let raised = |sum: f64| if sum.is_nan() { f64::INFINITY } else { sum * room };
            return filter.products().squares.into_iter().map(raised).collect();
        }
        let (n, series) = (self.steps(), self.series());
        let room = 1.0 + 2.0 * self.rounding() + (n + 8) as f64 * f64::EPSILON;
        let norm_sq = |j: usize| {
            let terms = series.iter().zip(&self.direct[j..]).map(|(c, q)| (c / q).powi(2));
            let sum = terms.sum::<f64>() / (self.scale[j] * self.scale[j]);
            if sum.is_nan() { f64::INFINITY } else { sum * room * room }
        };
        (0..n).map(norm_sq).collect()
    }

    /// Cost: O(n) for each column.
    fn encoder_columns(&self) -> Box<dyn EncoderColumns + '_> {
        Box::new(Columns { blt: self, series: self.series() })
    }

    fn encoder_bands(&self) -> usize {
        if self.weights.iter().all(|w| *w == 0.0) { 1 } else { self.steps() }
    }

    fn as_exponentials(&self) -> Option<Exponentials> {
        let over = |values: &[f64]| values.iter().map(|x| 1.0 / x).collect();
        (self.order() <= Exponentials::MOST).then(|| Exponentials {
            weights: self.weights.clone(),
            decays: self.decays.clone(),
            rows: over(&self.direct),
            columns: over(&self.scale),
        })
    }

    /// By the signs of what it is made of.
    fn encoder_is_nonnegative(&self) -> bool {
        true
    }

    /// Cost: O(n(r + w)²); that of the dense rows for a dense workload.
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
        Cost::stream(self.order(), (2 * self.order() + 2) as f64)
    }

    fn deployed(&self) -> Result<Form> {
        Ok(Form::Blt(self.rounded()?))
    }

    fn engine(&self, _: usize) -> Result<Box<dyn Engine>> {
        Ok(Box::new(engine::BltEngine::new(self)?))
    }

    fn program(&self, _: usize) -> Result<Box<dyn Program>> {
        Ok(Box::new(engine::BltEngine::new(self)?))
    }

    fn write(&self, tensors: &mut Tensors) {
        tensors.put_f32(WEIGHTS, &[self.order()], self.weights.iter().copied());
        tensors.put_f32(DECAYS, &[self.order()], self.decays.iter().copied());
        tensors.put_f32(DIRECT, &[self.steps()], self.direct.iter().copied());
        tensors.put_f32(SCALE, &[self.steps()], self.scale.iter().copied());
    }
}

struct Columns<'a> {
    blt: &'a Blt,
    series: Vec<f64>,
}

impl EncoderColumns for Columns<'_> {
    fn write(&self, steps: &[usize], out: &mut [f64]) -> Vec<f64> {
        let Self { blt, series } = self;
        let write = |(&j, column): (&usize, &mut [f64])| {
            let mut norm_sq = 0.0;
            for (x, (c, q)) in column[j..].iter_mut().zip(series.iter().zip(&blt.direct[j..])) {
                *x = c / q / blt.scale[j];
                norm_sq += *x * *x;
            }
            let room = 1.0 + (blt.steps() + 8) as f64 * f64::EPSILON;
            norm_sq.sqrt() * blt.rounding() * room
        };
        steps.iter().zip(out.chunks_exact_mut(blt.steps())).map(write).collect()
    }
}

#[cfg(test)]
mod tests;
