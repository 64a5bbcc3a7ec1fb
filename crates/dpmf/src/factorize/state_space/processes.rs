//! `(A D Aᵀ)^{1/2}` as the covariance of a sum of independent autoregressive processes.
//!
//! With `K = (A D Aᵀ)⁻¹`, `(A D Aᵀ)^{1/2} = K^{-1/2} ≈ Σ_q ω_q (K + t_q)⁻¹`. The density of
//! `y ~ N(0, (K + t)⁻¹)` is `exp(−½ Σ_i (u_i²/v_i + t·y_i²))` with `y = A u`: the cost of a
//! linear-quadratic control problem, whose plant is the workload and whose control is the gradient noise
//! `u`. So the process is the optimally controlled plant, `u_i = −κ_iᵀa_i + spread_i·e_i` with white `e`,
//! and a backward Riccati recursion yields `κ` and `spread`. The recursion runs on square roots (an
//! orthogonalisation a step), which squares no condition number.

use super::modes::Modes;
use super::plant::{Plant, PlantStep};
use crate::error::Result;
use crate::linalg::rational::InverseSqrt;

pub(super) struct Processes<'a> {
    pub plant: Plant<'a>,
    v: &'a [f64],
    sqrt_nodes: Vec<f64>,
    pub sqrt_weights: Vec<f64>,
}

/// Square roots `W` (upper triangular, one a process) of the cost `‖W a‖²` that a plant state has yet to pay.
#[derive(Clone, Debug)]
pub(super) struct CostToGo {
    factors: Vec<f64>,
}

/// Control law of one step for all processes.
#[derive(Clone, Copy)]
pub(super) struct Law<'b> {
    /// `κ`, process after process.
    pub gains: &'b [f64],
    /// Standard deviation of what is not fed back, `spread[q]`.
    pub spread: &'b [f64],
}

/// Work space of [`Processes::step_back`].
pub(super) struct Workspace {
    /// Row-major `(m + 2) × (m + 1)` matrices, `Q` lanes an entry.
    array: Vec<f64>,
    /// Norms and products, `Q` each.
    lanes: Vec<f64>,
}

impl<'a> Processes<'a> {
    /// Processes whose summed covariance has relative error at most `tolerance`.
    ///
    /// Errors: a tolerance outside `(0, 1)`.
    pub fn new(plant: Plant<'a>, v: &'a [f64], tolerance: f64) -> Result<Self> {
        let (min, max) = plant.spectrum(v);
        let root = InverseSqrt::on(1.0 / max, 1.0 / min, tolerance)?;
        Ok(Self {
            plant,
            v,
            sqrt_nodes: root.nodes.iter().map(|t| t.sqrt()).collect(),
            sqrt_weights: root.weights.iter().map(|w| w.sqrt()).collect(),
        })
    }

    /// Number of processes `Q`.
    pub fn len(&self) -> usize {
        self.sqrt_nodes.len()
    }

    /// Number of states of all processes together.
    pub fn states(&self) -> usize {
        self.len() * self.plant.order()
    }

    /// Number of states of the workload and all processes together.
    pub fn joint_states(&self) -> usize {
        self.states() + self.plant.order()
    }

    /// The cost after the last step: none.
    pub fn terminal_cost(&self) -> CostToGo {
        CostToGo { factors: vec![0.0; self.plant.order() * self.plant.order() * self.len()] }
    }

    pub fn workspace(&self) -> Workspace {
        let m = self.plant.order();
        Workspace { array: vec![0.0; (m + 2) * (m + 1) * self.len()], lanes: vec![0.0; 2 * self.len()] }
    }

    /// From the cost after step `i` to the cost before it, writing the law of step `i`.
    pub fn step_back(
        &self,
        i: usize,
        step: &PlantStep,
        cost: &mut CostToGo,
        gains: &mut [f64],
        spread: &mut [f64],
        work: &mut Workspace,
    ) {
        let (m, q) = (self.plant.order(), self.len());
        let columns = m + 1;
        let Workspace { array, lanes } = work;
        array.fill(0.0);
        // Unknowns (u, a): rows √t·y, u/√v and W·(next state).
        let sqrt_precision = self.v[i].sqrt().recip();
        for l in 0..q {
            array[l] = self.sqrt_nodes[l] * step.direct;
            for (k, read) in step.read.iter().enumerate() {
                array[(k + 1) * q + l] = self.sqrt_nodes[l] * read;
            }
            array[columns * q + l] = sqrt_precision;
        }
        for r in 0..m {
            let row = &mut array[(r + 2) * columns * q..][..columns * q];
            for c in r..m {
                let factor = &cost.factors[(r * m + c) * q..][..q];
                let mut add = |column: usize, x: f64| {
                    row[column * q..][..q].iter_mut().zip(factor).for_each(|(o, f)| *o += f * x);
                };
                add(0, step.input[c]);
                for (k, &f) in step.transition[c * m..][..m].iter().enumerate() {
                    if f != 0.0 {
                        add(k + 1, f);
                    }
                }
            }
        }

        // Modified Gram–Schmidt; column 0 gives the law, the others the new factor.
        orthogonalise(array, lanes, (m + 2, columns), 0, |j, l, pivot, product| {
            if j == 0 {
                spread[l] = pivot.recip();
            } else {
                gains[l * m + j - 1] = product / pivot;
            }
        });
        for k in 1..=m {
            orthogonalise(array, lanes, (m + 2, columns), k, |j, l, pivot, product| {
                cost.factors[((k - 1) * m + j - 1) * q + l] = if j == k { pivot } else { product };
            });
        }
    }

    /// The closed loops `Φ − Γκᵀ` of all processes.
    pub fn transition(&self, step: &PlantStep, law: Law<'_>, out: &mut Modes) {
        let m = self.plant.order();
        for (block, gains) in out.blocks_mut().zip(law.gains.chunks_exact(m.max(1))) {
            for (c, row) in block.chunks_exact_mut(m).enumerate() {
                for ((f, gain), open) in row.iter_mut().zip(gains).zip(&step.transition[c * m..]) {
                    *f = open - step.input[c] * gain;
                }
            }
        }
    }

    /// The row `h` by which the stacked state enters the gradient noise `u = Σ_q √ω_q u^{(q)}`.
    pub fn output(&self, law: Law<'_>, out: &mut [f64]) {
        let m = self.plant.order().max(1);
        let gains = law.gains.chunks_exact(m);
        for ((out, gains), weight) in out.chunks_exact_mut(m).zip(gains).zip(&self.sqrt_weights) {
            out.iter_mut().zip(gains).for_each(|(o, gain)| *o = -weight * gain);
        }
    }
}

/// Removes the direction of column `k` from the columns right of it, in every lane; reports the norm of
/// column `k` (`j = k`) and the products of its unit vector with the others as
/// `write(j, lane, norm, product)`.
fn orthogonalise(
    array: &mut [f64],
    lanes: &mut [f64],
    (rows, columns): (usize, usize),
    k: usize,
    mut write: impl FnMut(usize, usize, f64, f64),
) {
    let q = lanes.len() / 2;
    let (norms, products) = lanes.split_at_mut(q);
    let at = |row: usize, column: usize| (row * columns + column) * q;
    norms.fill(0.0);
    for r in 0..rows {
        norms.iter_mut().zip(&array[at(r, k)..]).for_each(|(n, x)| *n += x * x);
    }
    for (l, n) in norms.iter_mut().enumerate() {
        *n = n.sqrt();
        write(k, l, *n, 0.0);
    }
    for j in k + 1..columns {
        products.fill(0.0);
        for r in 0..rows {
            let (a, b) = (&array[at(r, k)..][..q], &array[at(r, j)..][..q]);
            products.iter_mut().zip(a).zip(b).for_each(|((p, a), b)| *p += a * b);
        }
        for (l, (p, &n)) in products.iter_mut().zip(norms.iter()).enumerate() {
            // A zero column has nothing to remove.
            let unit = if n > 0.0 { *p / n } else { 0.0 };
            write(j, l, n, unit);
            *p = if n > 0.0 { unit / n } else { 0.0 };
        }
        for r in 0..rows {
            let (head, tail) = array.split_at_mut(at(r, j));
            let (a, b) = (&head[at(r, k)..][..q], &mut tail[..q]);
            b.iter_mut().zip(a).zip(products.iter()).for_each(|((b, a), p)| *b -= a * p);
        }
    }
}
