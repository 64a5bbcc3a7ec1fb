//! From any realisation of the filter to the triangular one.

use super::sweep::FullStep;
use crate::error::Result;
use crate::form::StateSpace;
use crate::form::state_space::{Parts, triangle};
use crate::linalg::small;

/// Takes steps with full transitions and turns the basis of each, by an orthogonal matrix, so that all
/// transitions become upper triangular: `F_i Q_i = Q_{i+1} R_i`.
///
/// Orthogonal, so the states keep their scale and the coefficients their precision.
pub(super) struct Assembly {
    order: usize,
    parts: Parts,
    basis: Vec<f64>,
    next: Vec<f64>,
    moved: Vec<f64>,
}

impl Assembly {
    pub fn new(steps: usize, order: usize) -> Self {
        let mut basis = vec![0.0; order * order];
        basis.iter_mut().step_by(order + 1).for_each(|d| *d = 1.0);
        Self {
            order,
            parts: Parts {
                direct: Vec::with_capacity(steps),
                output: Vec::with_capacity(steps * order),
                input: Vec::with_capacity(steps * order),
                increment: Vec::with_capacity(steps * triangle(order)),
            },
            next: basis.clone(),
            moved: basis.clone(),
            basis,
        }
    }

    /// Appends a step.
    pub fn push(&mut self, step: &FullStep<'_>) {
        let r = self.order;
        let Self { parts, basis, next, moved, .. } = self;
        let column = |q: &[f64], x: &[f64], k: usize| (0..r).map(|l| x[l] * q[l * r + k]).sum::<f64>();
        parts.direct.push(step.direct);
        parts.output.extend((0..r).map(|k| column(basis, step.output, k)));
        moved.fill(0.0);
        for a in 0..r {
            let target = &mut moved[a * r..][..r];
            for b in 0..r {
                target
                    .iter_mut()
                    .zip(&basis[b * r..])
                    .for_each(|(t, q)| *t += step.transition[a * r + b] * q);
            }
        }
        small::qr(moved, next, r);
        for k in 0..r {
            parts.increment.push(moved[k * r + k] - 1.0);
            parts.increment.extend_from_slice(&moved[k * r + k + 1..(k + 1) * r]);
        }
        parts.input.extend((0..r).map(|k| column(next, step.input, k)));
        std::mem::swap(basis, next);
    }

    pub fn finish(self) -> Result<StateSpace> {
        StateSpace::from_parts(self.order, self.parts)
    }
}
