//! Sensitivity and loss of the filter, exact for the coefficients it has.

use super::engine::StateSpaceEngine;
use super::responses::Responses;
use super::{KIND, StateSpace, Step, triangle};
use crate::engine::Engine;
use crate::engine::exact::program::Program;
use crate::error::Result;
use crate::form::{Cost, EncoderColumns, Form, Representation, Rows};
use crate::linalg::gramian::{Energy, Root};
use crate::tensors::Tensors;
use crate::workload::Workload;
use faer::Mat;

impl Representation for StateSpace {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn steps(&self) -> usize {
        self.parts.direct.len()
    }

    fn coloring_rows(&self) -> Rows<'_> {
        let n = self.steps();
        let mut states = vec![0.0; self.order * n];
        let mut i = 0;
        Box::new(move |out| {
            let step = self.step(i);
            for (h, state) in step.output.iter().zip(states.chunks_exact(n)) {
                out.iter_mut().zip(state).for_each(|(o, s)| *o += h * s);
            }
            out[i] += step.direct;
            step.advance(&mut states, n);
            for (g, state) in step.input.iter().zip(states.chunks_exact_mut(n)) {
                state[i] += g;
            }
            i += 1;
        })
    }

    /// Runs the inverse filter over the unit vectors: `z = (u − hᵀs)/d`. Cost: O(n²r²).
    fn encoder(&self) -> Mat<f64> {
        let n = self.steps();
        let mut encoder = Mat::zeros(n, n);
        for j in 0..n {
            let column = encoder.col_as_slice_mut(j);
            let mut state = vec![0.0; self.order];
            for i in j..n {
                let step = self.step(i);
                let known: f64 = step.output.iter().zip(&state).map(|(h, s)| h * s).sum();
                let z = (f64::from(u8::from(i == j)) - known) / step.direct;
                column[i] = z;
                step.advance(&mut state, 1);
                state.iter_mut().zip(step.input).for_each(|(s, g)| *s += g * z);
            }
        }
        encoder
    }

    /// Guarantee: at least the exact squared norms of the columns of `C = N⁻¹` for the coefficients as they
    /// are; a backward recursion for the energy of the inverse filter, with a bound on its rounding added.
    /// Cost: O(n·r³).
    fn encoder_column_norms_sq(&self) -> Vec<f64> {
        let mut recursion = ColumnNorms::new(self.order);
        let mut norms = vec![0.0; self.steps()];
        for (i, norm) in norms.iter_mut().enumerate().rev() {
            let step = self.step(i);
            *norm = ColumnNorms::with_direct(recursion.with_unit_direct(step), step.direct);
            recursion.pull_back(step);
        }
        norms
    }

    /// Cost: O(n·r³) here, and O(n·r²) for each column.
    fn encoder_bands(&self) -> usize {
        if self.order() == 0 { 1 } else { self.steps() }
    }

    fn encoder_is_nonnegative(&self) -> bool {
        self.order() == 0
    }

    fn encoder_columns(&self) -> Box<dyn EncoderColumns + '_> {
        Box::new(Responses::new(self))
    }

    /// A forward recursion for the covariance of the filter's state and the workload's together.
    /// Cost: O(n(r + w)³), or that of the dense rows for a dense workload.
    fn decoder_row_norms_sq(&self, workload: &Workload) -> Vec<f64> {
        match workload.realisation() {
            Some(realisation) => {
                let (mut f, mut g) = (Vec::new(), Vec::new());
                self.row_norms_sq_after(realisation.states(), |i, joint| {
                    realisation.write(i, &mut f, &mut g);
                    joint.0.copy_from_slice(&f);
                    joint.1.copy_from_slice(&g);
                })
            }
            None => {
                let mut rows = self.coloring_rows();
                workload.row_norms_sq_of_product(self.noise_rows(), |_, out| rows(out))
            }
        }
    }

    fn cost(&self) -> Cost {
        let r = self.order;
        Cost::stream(r, (triangle(r) + 2 * r + 1) as f64)
    }

    fn deployed(&self) -> Result<Form> {
        Ok(Form::StateSpace(self.rounded()?))
    }

    fn engine(&self, _: usize) -> Result<Box<dyn Engine>> {
        Ok(Box::new(StateSpaceEngine::new(self)?))
    }

    fn program(&self, _: usize) -> Result<Box<dyn Program>> {
        Ok(Box::new(StateSpaceEngine::new(self)?))
    }

    fn write(&self, tensors: &mut Tensors) {
        self.write(tensors);
    }
}

/// Squared column norms of the encoder, last to first.
pub(super) struct ColumnNorms {
    energy: Energy,
    transition: Vec<f64>,
    size: Vec<f64>,
    output: Vec<f64>,
}

impl ColumnNorms {
    pub fn new(order: usize) -> Self {
        Self {
            energy: Energy::new(order),
            transition: vec![0.0; order * order],
            size: vec![0.0; order * order],
            output: vec![0.0; order],
        }
    }

    /// Squared norm of the column of this step if its `d` were 1, not rounded down.
    pub fn with_unit_direct(&self, step: Step<'_>) -> f64 {
        let energy = self.energy.of(step.input);
        match energy {
            // Something overflowed, and what it met is lost.
            _ if energy.is_nan() => f64::INFINITY,
            _ if energy > 0.0 => (1.0 + energy).next_up(),
            _ => 1.0,
        }
    }

    /// Squared norm of a column for the direct coefficient `d`, given that for 1; not rounded down.
    pub fn with_direct(unit: f64, d: f64) -> f64 {
        // The rounding errors of the square and, through its remainder, of the quotient are known exactly.
        let square = d * d;
        let square = if d.mul_add(d, -square) < 0.0 { square.next_down() } else { square };
        let quotient = unit / square;
        if quotient.mul_add(square, -unit) < 0.0 { quotient.next_up() } else { quotient }
    }

    /// Bounds on what a unit change of each state does to the steps ahead, in norm.
    pub fn reaches(&self) -> &[f64] {
        self.energy.roots()
    }

    /// Moves to before the step.
    pub fn pull_back(&mut self, step: Step<'_>) {
        step.inverse_transition(&mut self.transition, &mut self.size);
        self.output.iter_mut().zip(step.output).for_each(|(h, o)| *h = o / step.direct);
        self.energy.pull_back(&self.transition, &self.size, &self.output);
    }
}

impl StateSpace {
    /// Squared row norms of `A N` for an `A` with `m` states: `step(i, (F, g))` writes its step `a ← F a + g u`, and the
    /// last state is the output.
    ///
    /// Carries the root of the covariance of `(s, a)`, the states of the filter and the workload: `A N` is
    /// small where `A` and `N` are not, and the covariance itself would lose it. With the filter's states
    /// last to first, transposed transitions are upper triangular.
    pub(crate) fn row_norms_sq_after(
        &self,
        m: usize,
        mut workload: impl FnMut(usize, (&mut [f64], &mut [f64])),
    ) -> Vec<f64> {
        let r = self.order();
        let mut covariance = Root::new(r + m);
        let (mut f, mut g, mut old) = (vec![0.0; m * m], vec![0.0; m], vec![0.0; m]);
        let mut row = vec![0.0; r + m];
        let mut norms = vec![0.0; self.steps()];
        for (i, norm) in norms.iter_mut().enumerate() {
            let step = self.step(i);
            workload(i, (&mut f, &mut g));
            covariance.transform(r, m, |_, row| {
                let (s, a) = row.split_at_mut(r);
                let u: f64 = s.iter().rev().zip(step.output).map(|(s, h)| s * h).sum();
                s.reverse();
                step.advance(s, 1);
                s.reverse();
                old.copy_from_slice(a);
                for (k, a) in a.iter_mut().enumerate() {
                    *a = g[k] * u + f[k * m..][..m].iter().zip(&old).map(|(f, a)| f * a).sum::<f64>();
                }
            });
            row[..r].iter_mut().zip(step.input.iter().rev()).for_each(|(x, g)| *x = *g);
            row[r..].iter_mut().zip(&g).for_each(|(x, g)| *x = g * step.direct);
            covariance.append(&mut row);
            row.fill(0.0);
            row[r + m - 1] = 1.0;
            *norm = covariance.quadratic(&row);
        }
        norms
    }
}
