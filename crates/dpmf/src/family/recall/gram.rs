//! The blocks of `X = CᵀC` that several participations see, for a filter with recalled noise, and their gradients.
//!
//! Side by side, the steps of one phase in all `K` epochs are one step of a filter with `s = rK` states, which has no
//! memory beyond them: recalled noise is of the same phase. With `z_p`, `u_p` of length `K`,
//!
//! ```text
//! z_p = A_p⁻¹(u_p − H_p x_p),        x_{p+1} = Λ x_p + G_p z_p,        x_0 = S x_b,
//! ```
//!
//! where `S` hands the states of an epoch to the next. Free motions before and after a phase, and their energies, give all
//! columns of `C` of that phase, hence `X_p = C_pᵀC_p`.

use super::shape::Coefficients;
use crate::linalg::product::Rows;
use rayon::prelude::*;

/// One phase of the filter that inverts `N`.
struct Phase {
    /// `A⁻¹`, lower triangular.
    inverse: Rows,
    /// `G`.
    input: Rows,
    /// `h` of every epoch, one after the other.
    output: Vec<f64>,
    /// `−A⁻¹H`.
    feedback: Rows,
}

/// Everything that gradients need again.
pub(super) struct Grams {
    phases: Vec<Phase>,
    /// Decays, once for each epoch.
    decay: Vec<f64>,
    before: Vec<Rows>,
    before_energy: Vec<Rows>,
    after: Vec<Rows>,
    after_energy: Vec<Rows>,
    /// `(1 − SΦ)⁻¹S` with `Φ` the motion through all phases: from what an input leaves at the end to the beginning.
    closure: Rows,
    columns: Vec<Columns>,
    /// `X_p`.
    pub blocks: Vec<Rows>,
}

/// The columns of one phase.
struct Columns {
    /// What the input leaves at the end.
    left: Rows,
    /// State at the beginning.
    begun: Rows,
    /// State before the phase.
    here: Rows,
    /// Output of the phase.
    out: Rows,
    /// State after it.
    next: Rows,
}

/// Gradients by the parts of a phase.
struct PhaseSlope {
    /// By `A`.
    direct: Rows,
    /// By `G`.
    input: Rows,
    /// By `h`.
    output: Vec<f64>,
    /// By the decays.
    decay: Vec<f64>,
}

impl Phase {
    fn new(coefficients: &Coefficients, p: usize) -> Self {
        let shape = coefficients.shape;
        let (r, k) = (shape.order, shape.epochs());
        let (mut direct, mut input) = (Rows::identity(k), Rows::zeros(r * k, k));
        let mut output = vec![0.0; r * k];
        for e in (0..k).take_while(|e| shape.exists(*e, p)) {
            let step = coefficients.step(e, p);
            for j in 0..=shape.recalls.min(e) {
                *direct.at_mut(e, e - j) = step[shape.direct(j)];
                (0..r).for_each(|i| *input.at_mut(e * r + i, e - j) = step[shape.input(j, i)]);
            }
            (0..r).for_each(|i| output[e * r + i] = step[shape.output(i)]);
        }
        let mut inverse = Rows::identity(k);
        for i in 0..k {
            for c in 0..=i {
                let known: f64 = (c..i).map(|l| direct.at(i, l) * inverse.at(l, c)).sum();
                *inverse.at_mut(i, c) = (f64::from(u8::from(i == c)) - known) / direct.at(i, i);
            }
        }
        let mut feedback = Rows::zeros(k, r * k);
        for i in 0..k {
            for e in 0..=i {
                for q in e * r..(e + 1) * r {
                    *feedback.at_mut(i, q) = -inverse.at(i, e) * output[q];
                }
            }
        }
        Self { inverse, input, output, feedback }
    }

    /// `H x`.
    fn sent(&self, x: &Rows) -> Rows {
        let k = self.inverse.rows;
        let r = self.output.len() / k;
        let mut out = Rows::zeros(k, x.columns);
        for (q, h) in self.output.iter().enumerate() {
            let row = out.row_mut(q / r);
            row.iter_mut().zip(x.row(q)).for_each(|(out, x)| *out += h * x);
        }
        out
    }

    /// Gradients by `A`, `H` and `x`, given that by `z = A⁻¹(u − H x)`.
    fn pull_back(&self, slope: &Rows, z: &Rows, x: Option<(&Rows, &mut Rows)>, out: &mut PhaseSlope) {
        let by_input = self.inverse.transposed_times(slope);
        out.direct.add_product_transposed(-1.0, &by_input, z);
        let Some((x, by_x)) = x else { return };
        let r = self.output.len() / self.inverse.rows;
        for (q, h) in self.output.iter().enumerate() {
            let y = by_input.row(q / r);
            out.output[q] -= dot(y, x.row(q));
            by_x.row_mut(q).iter_mut().zip(y).for_each(|(x, y)| *x -= h * y);
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `Λ x`.
fn decayed(decay: &[f64], x: &Rows) -> Rows {
    let mut out = x.clone();
    decay.iter().enumerate().for_each(|(i, f)| out.row_mut(i).iter_mut().for_each(|x| *x *= f));
    out
}

/// `x Λ`.
fn decayed_columns(decay: &[f64], x: &Rows) -> Rows {
    let mut out = x.clone();
    (0..x.rows).for_each(|i| out.row_mut(i).iter_mut().zip(decay).for_each(|(x, f)| *x *= f));
    out
}

impl Grams {
    /// Cost: O(n K²r²), as many numbers of memory as 4n K r².
    pub fn new(coefficients: &Coefficients) -> Self {
        let shape = coefficients.shape;
        let (b, r, k) = (shape.stride, shape.order, shape.epochs());
        let s = r * k;
        let decay = coefficients.decay.repeat(k);
        let phases: Vec<Phase> = (0..b).map(|p| Phase::new(coefficients, p)).collect();
        let forward = || {
            let (mut before, mut energy) = (vec![Rows::identity(s)], vec![Rows::zeros(s, s)]);
            for (p, phase) in phases.iter().enumerate() {
                let out = phase.feedback.times(&before[p]);
                let mut next = decayed(&decay, &before[p]);
                next.add_product(1.0, &phase.input, &out);
                let mut sum = energy[p].clone();
                sum.add_transposed_product(1.0, &out, &out);
                before.push(next);
                energy.push(sum);
            }
            (before, energy)
        };
        let backward = || {
            let (mut after, mut energy) = (vec![Rows::identity(s)], vec![Rows::zeros(s, s)]);
            for (q, phase) in phases.iter().rev().enumerate() {
                let mut map = decayed_columns(&decay, &after[q]);
                map.add_product(1.0, &after[q].times(&phase.input), &phase.feedback);
                // V ← H̃ᵀH̃ + FᵀV F with F = Λ + G H̃.
                let moved = energy[q].times(&phase.input);
                let mut middle = Rows::identity(k);
                middle.add_transposed_product(1.0, &phase.input, &moved);
                let cross = decayed(&decay, &moved).times(&phase.feedback);
                let mut sum = decayed_columns(&decay, &decayed(&decay, &energy[q]));
                sum.add(1.0, &cross);
                sum.add(1.0, &cross.transpose());
                sum.add_transposed_product(1.0, &phase.feedback, &middle.times(&phase.feedback));
                after.push(map);
                energy.push(sum);
            }
            after.reverse();
            energy.reverse();
            (after, energy)
        };
        let ((before, before_energy), (after, after_energy)) = rayon::join(forward, backward);
        let closure = closure(&after[0], r, k);
        let columns = |p: usize| {
            let phase = &phases[p];
            let left = after[p + 1].times(&phase.input.times(&phase.inverse));
            let begun = closure.times(&left);
            let here = before[p].times(&begun);
            let mut given = Rows::identity(k);
            given.add(-1.0, &phase.sent(&here));
            let out = phase.inverse.times(&given);
            let mut next = decayed(&decay, &here);
            next.add_product(1.0, &phase.input, &out);
            let mut block = begun.transposed_times(&before_energy[p].times(&begun));
            block.add_transposed_product(1.0, &out, &out);
            block.add_transposed_product(1.0, &next, &after_energy[p + 1].times(&next));
            (Columns { left, begun, here, out, next }, block)
        };
        let (columns, blocks) = (0..b).into_par_iter().map(columns).unzip();
        Self { phases, decay, before, before_energy, after, after_energy, closure, columns, blocks }
    }

    /// Adds the gradient of `Σ_p ⟨S_p, X_p⟩` for symmetric `S_p`.
    pub fn pull_back(&self, weights: &[Rows], gradient: &mut Coefficients) {
        let shape = gradient.shape;
        let (b, r, k) = (shape.stride, shape.order, shape.epochs());
        let s = r * k;
        struct Slopes {
            phase: PhaseSlope,
            before: Rows,
            before_energy: Rows,
            after: Rows,
            after_energy: Rows,
            closure: Rows,
        }
        let of_phase = |p: usize| {
            let (phase, columns, weight) = (&self.phases[p], &self.columns[p], &weights[p]);
            let mut slope = PhaseSlope {
                direct: Rows::zeros(k, k),
                input: Rows::zeros(s, k),
                output: vec![0.0; s],
                decay: vec![0.0; s],
            };
            let begun_weight = columns.begun.times(weight);
            let before_energy = begun_weight.times_transposed(&columns.begun);
            let next_weight = columns.next.times(weight);
            let after_energy = next_weight.times_transposed(&columns.next);
            let mut by_begun = Rows::zeros(s, k);
            by_begun.add_product(2.0, &self.before_energy[p], &begun_weight);
            let mut by_next = Rows::zeros(s, k);
            by_next.add_product(2.0, &self.after_energy[p + 1], &next_weight);
            let mut by_out = phase.input.transposed_times(&by_next);
            by_out.add_product(2.0, &columns.out, weight);
            slope.input.add_product_transposed(1.0, &by_next, &columns.out);
            (0..s).for_each(|i| slope.decay[i] += dot(by_next.row(i), columns.here.row(i)));
            let mut by_here = decayed(&self.decay, &by_next);
            phase.pull_back(&by_out, &columns.out, Some((&columns.here, &mut by_here)), &mut slope);
            let before = by_here.times_transposed(&columns.begun);
            by_begun.add_transposed_product(1.0, &self.before[p], &by_here);
            let closure = by_begun.times_transposed(&columns.left);
            let by_left = self.closure.transposed_times(&by_begun);
            let after = by_left.times_transposed(&phase.input.times(&phase.inverse));
            let by_kick = self.after[p + 1].transposed_times(&by_left);
            slope.input.add_product_transposed(1.0, &by_kick, &phase.inverse);
            phase.pull_back(&phase.input.transposed_times(&by_kick), &phase.inverse, None, &mut slope);
            Slopes { phase: slope, before, before_energy, after, after_energy, closure }
        };
        let mut slopes: Vec<Slopes> = (0..b).into_par_iter().map(of_phase).collect();
        let mut by_closure = Rows::zeros(s, s);
        slopes.iter().for_each(|slope| by_closure.add(1.0, &slope.closure));
        let closed = self.closure.transpose();
        let mut by_map = closed.times(&by_closure).times(&closed);

        // Backward over the motions before each phase, forward over those after.
        let (mut by_before, mut by_energy) = (Rows::zeros(s, s), Rows::zeros(s, s));
        for p in (0..b).rev() {
            let (phase, slope) = (&self.phases[p], &mut slopes[p]);
            let out = phase.feedback.times(&self.before[p]);
            let mut by_out = phase.input.transposed_times(&by_before);
            by_out.add_product(2.0, &out, &by_energy);
            (0..s).for_each(|i| slope.phase.decay[i] += dot(by_before.row(i), self.before[p].row(i)));
            slope.phase.input.add_product_transposed(1.0, &by_before, &out);
            by_before = decayed(&self.decay, &by_before);
            phase.pull_back(&by_out, &out, Some((&self.before[p], &mut by_before)), &mut slope.phase);
            by_before.add(1.0, &slope.before);
            by_energy.add(1.0, &slope.before_energy);
        }
        let mut by_energy = Rows::zeros(s, s);
        for p in 0..b {
            // At this point both are gradients by what held before phase p.
            let (phase, slope) = (&self.phases[p], &mut slopes[p]);
            let (map, energy) = (&self.after[p + 1], &self.after_energy[p + 1]);
            let mut moved = decayed(&self.decay, &by_energy);
            let fed = phase.feedback.times(&by_energy);
            moved.add_product(1.0, &phase.input, &fed);
            // F̄ = 2V F V̄ + Φᵀ Φ̄, only its products with G, H̃ and its diagonal.
            let mut by_feedback = energy.times(&phase.input).transposed_times(&moved);
            by_feedback.values.iter_mut().for_each(|x| *x *= 2.0);
            by_feedback.add_transposed_product(1.0, &map.times(&phase.input), &by_map);
            by_feedback.add(2.0, &fed);
            let feedback_transposed = phase.feedback.transpose();
            slope.phase.input.add_product(2.0, energy, &moved.times(&feedback_transposed));
            let narrow = by_map.times(&feedback_transposed);
            slope.phase.input.add_transposed_product(1.0, map, &narrow);
            for i in 0..s {
                let column =
                    |m: &Rows, other: &Rows| (0..s).map(|l| m.at(l, i) * other.at(l, i)).sum::<f64>();
                slope.phase.decay[i] += 2.0 * column(energy, &moved) + column(map, &by_map);
            }
            let mut unused = Rows::zeros(s, s);
            // H̃ = −A⁻¹H is the response of z to the states.
            phase.pull_back(
                &by_feedback,
                &phase.feedback,
                Some((&Rows::identity(s), &mut unused)),
                &mut slope.phase,
            );
            let mut next = decayed_columns(&self.decay, &moved);
            next.add_product_transposed(1.0, &moved.times(&feedback_transposed), &phase.input);
            by_energy = next;
            by_energy.add(1.0, &slope.after_energy);
            let mut next = decayed_columns(&self.decay, &by_map);
            next.add_product_transposed(1.0, &narrow, &phase.input);
            by_map = next;
            by_map.add(1.0, &slope.after);
        }
        for (p, Slopes { phase: slope, .. }) in slopes.iter().enumerate() {
            (0..s).for_each(|i| gradient.decay[i % r] += slope.decay[i]);
            for e in (0..k).take_while(|e| shape.exists(*e, p)) {
                let step = gradient.step_mut(e, p);
                for j in 0..=shape.recalls.min(e) {
                    step[shape.direct(j)] += slope.direct.at(e, e - j);
                    (0..r).for_each(|i| step[shape.input(j, i)] += slope.input.at(e * r + i, e - j));
                }
                (0..r).for_each(|i| step[shape.output(i)] += slope.output[e * r + i]);
            }
        }
    }
}

/// `(1 − SΦ)⁻¹S`, epoch by epoch.
fn closure(map: &Rows, r: usize, k: usize) -> Rows {
    let s = r * k;
    let mut out = Rows::zeros(s, s);
    // Row block e of the result is that of e − 1 of (1 + Φ·result).
    for e in 1..k {
        let mut block = Rows::zeros(r, s);
        for i in 0..r {
            let row = (e - 1) * r + i;
            *block.at_mut(i, row) = 1.0;
            for l in 0..s {
                let factor = map.at(row, l);
                if factor != 0.0 {
                    let source = out.row(l).to_vec();
                    block.row_mut(i).iter_mut().zip(&source).for_each(|(x, y)| *x += factor * y);
                }
            }
        }
        out.values[e * r * s..][..r * s].copy_from_slice(&block.values);
    }
    out
}
