//! The workload `A`: the linear map from clipped gradients to released iterates.
//!
//! With `ψ = θ₀ − θ`, every optimizer here computes `P ψ = R g` with lower banded `P` and `R`, so
//! `A = P⁻¹R`. `R` is the identity but for Nesterov, and then `P = A⁻¹` is the banded inverse itself.
//!
//! Factorizations are designed on `P` and `R`, which hold inverses of step sizes; so for them a step size of zero, or one
//! far below the largest, is a small one. What is said of a factorization, its loss and the lower bound, is said of the
//! optimizer itself.

pub(crate) mod realisation;
mod schedule;
pub(crate) mod spectrum;

pub use schedule::Schedule;

use crate::error::{Error, Result};
use crate::linalg::banded::LowerBanded;
use faer::Mat;
use realisation::Realisation;
use serde::{Deserialize, Serialize};
use spectrum::column_norms_sq;

/// What the optimizer does with a gradient, beside the step sizes.
///
/// The default is plain SGD. With `m_i = β m_{i−1} + g_i`:
///
/// | field | step |
/// |---|---|
/// | `momentum` β | `θ_i = θ_{i−1} − η_i m_i` |
/// | `nesterov` | `θ_i = θ_{i−1} − η_i (g_i + β m_i)` |
/// | `weight_decay` λ | `θ_i = (1 − η_i λ) θ_{i−1} − η_i m_i` |
/// | `coupled` | `λ θ_{i−1}` joins `g_i` before the momentum, as in PyTorch's SGD |
/// | `average` | the released value is an average of the iterates |
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Optimizer {
    /// Momentum β in `[0, 1)`.
    pub momentum: f64,
    /// Look-ahead form of momentum.
    pub nesterov: bool,
    /// Weight decay λ ≥ 0, with `λ η_i < 1` at every step.
    pub weight_decay: f64,
    /// Weight decay enters through the gradient instead of the iterate.
    pub coupled: bool,
    /// Averaging of the released iterates.
    pub average: Average,
}

/// Averaging of iterates before release, started from the public `θ₀`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Average {
    /// The iterates themselves.
    #[default]
    None,
    /// `y_i = (θ_1 + … + θ_i) / i`.
    Uniform,
    /// `y_i = α y_{i−1} + (1 − α) θ_i` with `y_0 = θ_0` and decay `0 ≤ α < 1`.
    Ema(f64),
}

impl std::fmt::Display for Average {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Average::None => f.write_str("none"),
            Average::Uniform => f.write_str("uniform"),
            Average::Ema(alpha) => write!(f, "ema:{alpha}"),
        }
    }
}

impl std::str::FromStr for Average {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::argument("average", text, "it must be none, uniform or ema:α with 0 ≤ α < 1");
        match text.split_once(':') {
            None if text == "none" => Ok(Average::None),
            None if text == "uniform" => Ok(Average::Uniform),
            Some(("ema", decay)) => Ok(Average::Ema(decay.parse().map_err(|_| bad())?)),
            _ => Err(bad()),
        }
    }
}

/// The lower-triangular map `A` that is to be released privately.
#[derive(Clone, Debug)]
pub struct Workload {
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Recurrence {
        optimizer: Optimizer,
        learning_rates: Vec<f64>,
        design_rates: Vec<f64>,
        recurrence: Recurrence,
    },
    Dense(Mat<f64>),
}

/// Smallest step size in a [`Recurrence`], relative to the largest.
///
/// Smaller ones would cost the coefficients of `P` more in rounding than they are worth in the iterates: there they count
/// by their size, while a coefficient beside `1/η` loses `ε/η`.
pub(crate) const SMALLEST_RATE: f64 = 1e-8;

/// `A = P⁻¹R` with lower banded `P` and `R`.
#[derive(Clone, Debug, PartialEq)]
pub struct Recurrence {
    /// `P`; equal to `A⁻¹` when there is no `R`.
    pub left: LowerBanded,
    /// `R`, or `None` for the identity.
    pub right: Option<LowerBanded>,
}

impl Workload {
    /// Running sums, `A = S`: SGD with unit step size.
    pub fn prefix_sum(steps: usize) -> Result<Self> {
        Self::sgd(vec![1.0; steps], Optimizer::default())
    }

    /// The iterates of SGD with the given step sizes η.
    ///
    /// Step sizes may be zero: a warm-up from 0, a decay to 0, a pause.
    ///
    /// Errors: no steps, all η zero, an η that is neither 0 nor between 1e-50 and 1e50, β outside `[0, 1)`, λ < 0 or
    /// `λ η_i ≥ 1`, an averaging decay outside `[0, 1)`, `coupled` without weight decay, `nesterov` without momentum.
    ///
    /// Reference: Proposition 4.2 of \[DMRST22\] for momentum with a schedule.
    pub fn sgd(learning_rates: Vec<f64>, optimizer: Optimizer) -> Result<Self> {
        check_optimizer(&learning_rates, &optimizer)?;
        let design_rates = raised(&learning_rates);
        let recurrence = Recurrence::new(&design_rates, &learning_rates, &optimizer)?;
        Ok(Self { kind: Kind::Recurrence { optimizer, learning_rates, design_rates, recurrence } })
    }

    /// Any lower-triangular matrix with a non-zero diagonal.
    pub fn dense(a: Mat<f64>) -> Result<Self> {
        check_dense(&a)?;
        Ok(Self { kind: Kind::Dense(a) })
    }

    /// Number of steps `n`.
    pub fn steps(&self) -> usize {
        match &self.kind {
            Kind::Recurrence { learning_rates, .. } => learning_rates.len(),
            Kind::Dense(a) => a.nrows(),
        }
    }

    /// The banded form that factorizations are designed for, unless the workload is a dense matrix.
    ///
    /// It is the workload itself, but for step sizes below 1e-8 of the largest, zero among them: it has that instead.
    pub fn recurrence(&self) -> Option<&Recurrence> {
        match &self.kind {
            Kind::Recurrence { recurrence, .. } => Some(recurrence),
            Kind::Dense(_) => None,
        }
    }

    /// The optimizer's own recursion, unless the workload is a dense matrix.
    pub(crate) fn realisation(&self) -> Option<Realisation<'_>> {
        match &self.kind {
            Kind::Recurrence { optimizer, learning_rates, .. } => {
                Some(Realisation { optimizer, learning_rates, decay_rates: learning_rates })
            }
            Kind::Dense(_) => None,
        }
    }

    /// The same for the step sizes of [`Workload::recurrence`].
    pub(crate) fn design_realisation(&self) -> Option<Realisation<'_>> {
        match &self.kind {
            Kind::Recurrence { optimizer, learning_rates, design_rates, .. } => {
                Some(Realisation { optimizer, learning_rates: design_rates, decay_rates: learning_rates })
            }
            Kind::Dense(_) => None,
        }
    }

    /// The optimizer and its step sizes, unless the workload is a dense matrix.
    pub fn optimizer(&self) -> Option<(&Optimizer, &[f64])> {
        match &self.kind {
            Kind::Recurrence { optimizer, learning_rates, .. } => Some((optimizer, learning_rates)),
            Kind::Dense(_) => None,
        }
    }

    /// Whether `A` is the prefix sum `S` itself.
    pub fn is_prefix_sum(&self) -> bool {
        match &self.kind {
            Kind::Recurrence { optimizer, learning_rates, .. } => {
                *optimizer == Optimizer::default() && learning_rates.iter().all(|&eta| eta == 1.0)
            }
            Kind::Dense(a) => (0..a.nrows()).all(|i| (0..=i).all(|j| a[(i, j)] == 1.0)),
        }
    }

    /// The smallest step size, relative to the largest; 1 for a dense matrix.
    pub(crate) fn smallest_rate(&self) -> f64 {
        let rates = self.optimizer().map_or(&[1.0][..], |(_, rates)| rates);
        let (smallest, largest) = rates
            .iter()
            .fold((f64::INFINITY, 0.0_f64), |(least, most), &eta| (least.min(eta), most.max(eta)));
        smallest / largest
    }

    /// Whether [`Workload::recurrence`] is the workload to rounding, with no step size raised.
    pub(crate) fn is_invertible(&self) -> bool {
        match &self.kind {
            Kind::Recurrence { learning_rates, design_rates, .. } => learning_rates == design_rates,
            Kind::Dense(_) => true,
        }
    }

    /// `A` as a dense matrix. Cost: O(n² w) time, n² numbers.
    pub fn to_dense(&self) -> Mat<f64> {
        match &self.kind {
            Kind::Recurrence { .. } => by_columns(self.steps(), |column| self.apply(column)),
            Kind::Dense(a) => a.clone(),
        }
    }

    /// The matrix that factorizations are designed for: that of [`Workload::recurrence`], or `A`.
    pub(crate) fn design_matrix(&self) -> Mat<f64> {
        match (&self.kind, self.design_realisation()) {
            (Kind::Dense(a), _) => a.clone(),
            (_, realisation) => {
                by_columns(self.steps(), |column| realisation.iter().for_each(|design| design.apply(column)))
            }
        }
    }

    /// `A x`, in place: the optimizer run on scalar gradients `x`.
    pub fn apply(&self, x: &mut [f64]) {
        assert_eq!(x.len(), self.steps());
        match &self.kind {
            Kind::Recurrence { optimizer, learning_rates, .. } => {
                Realisation { optimizer, learning_rates, decay_rates: learning_rates }.apply(x);
            }
            Kind::Dense(a) => {
                for i in (0..x.len()).rev() {
                    x[i] = (0..=i).map(|j| a[(i, j)] * x[j]).sum();
                }
            }
        }
    }

    /// `A M`, column by column for a recurrence.
    pub fn times(&self, mut matrix: Mat<f64>) -> Mat<f64> {
        if self.recurrence().is_none() {
            return self.to_dense() * matrix;
        }
        (0..matrix.ncols()).for_each(|j| self.apply(matrix.col_as_slice_mut(j)));
        matrix
    }

    /// Squared column norms `‖A e_j‖²`, of [`Workload::recurrence`] if there is one: none is zero.
    ///
    /// Cost: O(n w²), or O(n²) for a dense matrix.
    ///
    /// Errors: a recurrence wider than the array algorithms serve.
    pub fn column_norms_sq(&self) -> Result<Vec<f64>> {
        match &self.kind {
            Kind::Recurrence { recurrence, .. } => column_norms_sq(recurrence),
            Kind::Dense(a) => Ok((0..a.ncols()).map(|j| a.col(j).squared_norm_l2()).collect()),
        }
    }

    /// Squared row norms of `A N`, where `row(i, out)` writes row `i` of an `n × columns` matrix `N`.
    ///
    /// Cost: O(n · columns · w) time and `w` rows of memory; O(n² · columns) for a dense workload.
    pub fn row_norms_sq_of_product(
        &self,
        columns: usize,
        mut row: impl FnMut(usize, &mut [f64]),
    ) -> Vec<f64> {
        let n = self.steps();
        match &self.kind {
            Kind::Recurrence { optimizer, learning_rates, .. } => {
                let realisation = Realisation { optimizer, learning_rates, decay_rates: learning_rates };
                realisation.row_norms_sq(columns, row)
            }
            Kind::Dense(a) => {
                // Column-major N transposed: each row of N is one contiguous column here.
                let mut nt = Mat::<f64>::zeros(columns, n);
                for i in 0..n {
                    row(i, nt.col_as_slice_mut(i));
                }
                let bt = &nt * a.transpose();
                (0..n).map(|i| bt.col(i).squared_norm_l2()).collect()
            }
        }
    }
}

/// The matrix whose columns `apply` makes of unit vectors, in place.
fn by_columns(n: usize, apply: impl Fn(&mut [f64])) -> Mat<f64> {
    let mut a = Mat::zeros(n, n);
    for j in 0..n {
        let column = a.col_as_slice_mut(j);
        column[j] = 1.0;
        apply(column);
    }
    a
}

/// Step sizes, none below [`SMALLEST_RATE`] of the largest.
fn raised(learning_rates: &[f64]) -> Vec<f64> {
    let smallest = SMALLEST_RATE * learning_rates.iter().copied().fold(0.0, f64::max);
    learning_rates.iter().map(|eta| eta.max(smallest)).collect()
}

impl Recurrence {
    /// For the step sizes `eta`, where decoupled weight decay sees `decay_rates`.
    fn new(eta: &[f64], decay_rates: &[f64], optimizer: &Optimizer) -> Result<Self> {
        let n = eta.len();
        let Optimizer { momentum: beta, weight_decay: lambda, coupled, nesterov, average } = *optimizer;
        let bidiagonal = |diagonal: f64, below: f64| {
            LowerBanded::from_fn(n, 1, move |_, k| if k == 0 { diagonal } else { below })
        };

        // diag(1/η) times the inverse of the (decayed) running sum, then the inverse of the momentum.
        let decay = if coupled { 0.0 } else { lambda };
        let mut left = LowerBanded::from_fn(n, 1, |i, k| {
            if k == 0 { 1.0 / eta[i] } else { -(1.0 - decay_rates[i] * decay) / eta[i] }
        });
        if beta > 0.0 {
            left = bidiagonal(1.0, -beta).product(&left);
        }
        let right = (nesterov && beta > 0.0).then(|| bidiagonal(1.0 + beta, -beta));

        if coupled {
            // λθ_{i−1} enters where g does: R(g − λNψ) = Pψ with N the shift, so λRN joins P.
            let shift = bidiagonal(0.0, lambda);
            left = left.sum(&right.as_ref().map_or(shift.clone(), |r| r.product(&shift)));
        }

        // An average y = Eψ of the iterates replaces P by P E⁻¹.
        left =
            match average {
                Average::None => left,
                Average::Uniform => left.product(&LowerBanded::from_fn(n, 1, |i, k| {
                    if k == 0 { i as f64 + 1.0 } else { -(i as f64) }
                })),
                Average::Ema(alpha) => left.product(&bidiagonal(1.0 / (1.0 - alpha), -alpha / (1.0 - alpha))),
            };
        left.check("inverse of the workload")?;
        Ok(Self { left, right })
    }

    /// `A x = P⁻¹ R x`, in place.
    pub fn apply(&self, x: &mut [f64]) {
        if let Some(right) = &self.right {
            right.multiply(x);
        }
        self.left.solve(x);
    }

    /// `Aᵀ x = Rᵀ P⁻ᵀ x`, in place.
    pub fn apply_transposed(&self, x: &mut [f64]) {
        self.left.solve_transposed(x);
        if let Some(right) = &self.right {
            right.multiply_transposed(x);
        }
    }

    /// Whether `P` and `R`, and so `A`, are Toeplitz.
    pub fn is_constant(&self) -> bool {
        let constant = |band: &LowerBanded| {
            let last = band.row(band.n() - 1);
            (0..band.n()).all(|i| band.row(i).iter().zip(last).take(i + 1).all(|(a, b)| a == b))
        };
        constant(&self.left) && self.right.as_ref().is_none_or(constant)
    }

    /// `A⁻¹ x = R⁻¹ P x`, in place.
    pub fn apply_inverse(&self, x: &mut [f64]) {
        self.left.multiply(x);
        if let Some(right) = &self.right {
            right.solve(x);
        }
    }

    /// The recurrence with every coefficient replaced by `f(coefficient)`.
    pub fn map(&self, f: impl Fn(f64) -> f64 + Copy) -> Self {
        Self { left: self.left.map(f), right: self.right.as_ref().map(|r| r.map(f)) }
    }
}

/// Runs `A = P⁻¹R` over matrix rows that arrive one at a time, keeping only what the bands reach.
pub(crate) struct RowRecurrence<'a> {
    recurrence: &'a Recurrence,
    step: usize,
    /// `outputs[i % len]` is output row `i`.
    outputs: Vec<Vec<f64>>,
    inputs: Vec<Vec<f64>>,
}

impl<'a> RowRecurrence<'a> {
    pub(crate) fn new(recurrence: &'a Recurrence, columns: usize) -> Self {
        let reach = recurrence.right.as_ref().map_or(0, LowerBanded::bandwidth);
        Self {
            recurrence,
            step: 0,
            outputs: vec![vec![0.0; columns]; recurrence.left.bandwidth() + 1],
            inputs: vec![vec![0.0; columns]; reach + 1],
        }
    }

    /// Takes the next input row from `fill` (given zeros) and returns the output row.
    pub(crate) fn push(&mut self, fill: impl FnOnce(&mut [f64])) -> &[f64] {
        let i = self.step;
        self.step += 1;
        let (inputs, outputs) = (&mut self.inputs, &mut self.outputs);
        let slot = i % inputs.len();
        inputs[slot].fill(0.0);
        fill(&mut inputs[slot]);

        let slot = i % outputs.len();
        let mut out = std::mem::take(&mut outputs[slot]);
        match &self.recurrence.right {
            None => out.copy_from_slice(&inputs[0]),
            Some(right) => {
                out.fill(0.0);
                for (k, &r) in right.row(i).iter().enumerate().take(i + 1) {
                    accumulate(&mut out, r, &inputs[(i - k) % inputs.len()]);
                }
            }
        }
        let row = self.recurrence.left.row(i);
        for k in 1..row.len().min(i + 1) {
            accumulate(&mut out, -row[k], &outputs[(i - k) % outputs.len()]);
        }
        out.iter_mut().for_each(|x| *x /= row[0]);
        outputs[slot] = out;
        &outputs[slot]
    }
}

fn accumulate(out: &mut [f64], factor: f64, x: &[f64]) {
    out.iter_mut().zip(x).for_each(|(o, x)| *o += factor * x);
}

fn check_optimizer(eta: &[f64], optimizer: &Optimizer) -> Result<()> {
    let Optimizer { momentum, nesterov, weight_decay, coupled, average } = *optimizer;
    if eta.is_empty() {
        return Err(Error::argument("steps", 0, "at least one step is needed"));
    }
    if !(0.0..1.0).contains(&momentum) {
        return Err(Error::argument("momentum", momentum, "it must lie in [0, 1)"));
    }
    if nesterov && momentum == 0.0 {
        return Err(Error::argument("nesterov", true, "it needs a momentum above 0"));
    }
    if !(weight_decay >= 0.0 && weight_decay.is_finite()) {
        return Err(Error::argument("weight decay", weight_decay, "it must be finite and not negative"));
    }
    if coupled && weight_decay == 0.0 {
        return Err(Error::argument("coupled", true, "it needs a weight decay above 0"));
    }
    if let Average::Ema(alpha) = average
        && !(0.0..1.0).contains(&alpha)
    {
        return Err(Error::argument("average decay", alpha, "it must lie in [0, 1)"));
    }
    if eta.iter().all(|&eta| eta == 0.0) {
        return Err(Error::argument(
            "learning rate",
            0,
            "it must not be 0 at every step: nothing would be learned",
        ));
    }
    for (index, &value) in eta.iter().enumerate() {
        let rule = if value != 0.0 && !(1e-50..=1e50).contains(&value) {
            "it must be 0 or lie between 1e-50 and 1e50"
        } else if weight_decay * value >= 1.0 {
            "step size times weight decay must stay below 1"
        } else {
            continue;
        };
        return Err(Error::InvalidEntry { name: "learning rate", index, value, rule });
    }
    Ok(())
}

fn check_dense(a: &Mat<f64>) -> Result<()> {
    let (rows, columns) = a.shape();
    if rows == 0 {
        return Err(Error::argument("steps", 0, "at least one step is needed"));
    }
    if rows != columns {
        return Err(Error::argument("workload matrix", format!("{rows} × {columns}"), "it must be square"));
    }
    for row in 0..rows {
        for column in 0..columns {
            let value = a[(row, column)];
            let rule = if !value.is_finite() {
                "it must be finite"
            } else if column > row && value != 0.0 {
                "a workload must be lower triangular"
            } else if column == row && value == 0.0 {
                "a zero on the diagonal makes the workload singular"
            } else {
                continue;
            };
            return Err(Error::InvalidMatrixEntry { name: "workload matrix", row, column, value, rule });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
