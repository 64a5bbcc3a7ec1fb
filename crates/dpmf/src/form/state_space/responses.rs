//! Columns of the encoder by simulation, several side by side, with a bound on what rounding did to them.

use super::StateSpace;
use super::measure::ColumnNorms;
use crate::form::{EncoderColumns, Representation};
use crate::linalg::lanes::Lanes;
use crate::simd::dispatch;

/// Columns in one pass.
const LANES: usize = 8;

/// Responses of the inverse filter, `z = (u − hᵀs)/d`, to unit impulses.
///
/// A simulated response is the exact one to an input and to states that are off, at every step, by the rounding of that
/// step. What is off in the input of step `i` by `ρ` changes the response by `ρ C e_i`, and what is off in a state is
/// carried into the steps ahead: the norms of both are known from the recursion for the column norms.
pub(super) struct Responses<'a> {
    filter: &'a StateSpace,
    /// Bounds on the column norms of `C`.
    norms: Vec<f64>,
    /// Bounds on what a unit change of each state does after each step, in norm.
    reaches: Vec<f64>,
}

impl<'a> Responses<'a> {
    pub fn new(filter: &'a StateSpace) -> Self {
        let (n, r) = (filter.steps(), filter.order());
        let mut recursion = ColumnNorms::new(r);
        let (mut norms, mut reaches) = (vec![0.0; n], vec![0.0; n * r]);
        for i in (0..n).rev() {
            let step = filter.step(i);
            let norm_sq = ColumnNorms::with_direct(recursion.with_unit_direct(step), step.direct);
            norms[i] = norm_sq.sqrt() * (1.0 + f64::EPSILON);
            reaches[i * r..][..r].copy_from_slice(recursion.reaches());
            recursion.pull_back(step);
        }
        Self { filter, norms, reaches }
    }
}

impl EncoderColumns for Responses<'_> {
    fn write(&self, steps: &[usize], out: &mut [f64]) -> Vec<f64> {
        let n = self.filter.steps();
        // Impulses close to each other share a pass: little of it is spent before the first.
        let mut order: Vec<usize> = (0..steps.len()).collect();
        order.sort_unstable_by_key(|&k| steps[k]);
        let mut distances = vec![0.0; steps.len()];
        let mut rows = vec![Lanes::ZERO; n];
        for group in order.chunks(LANES) {
            let impulses = std::array::from_fn(|l| steps[group[l.min(group.len() - 1)]]);
            let first = impulses[0];
            let found = simulate(self, impulses, &mut rows[first..]);
            for (l, &k) in group.iter().enumerate() {
                distances[k] = found[l];
                let column = &mut out[k * n..][..n];
                column[first..].iter_mut().zip(&rows[first..]).for_each(|(x, row)| *x = row.0[l]);
            }
        }
        distances
    }
}

#[inline(always)]
fn simulate_any(
    responses: &Responses<'_>,
    impulses: [usize; LANES],
    rows: &mut [Lanes<LANES>],
) -> [f64; LANES] {
    let (filter, r) = (responses.filter, responses.filter.order());
    let size = |x: Lanes<LANES>| Lanes(x.0.map(f64::abs));
    let mut state = vec![Lanes::<LANES>::ZERO; r];
    let mut hidden = Lanes::<LANES>::ZERO;
    for (i, row) in (impulses[0]..).zip(rows.iter_mut()) {
        let step = filter.step(i);
        let mut u = Lanes(impulses.map(|j| if j == i { 1.0 } else { 0.0 }));
        let mut sizes = Lanes::ZERO;
        for (&h, &s) in step.output.iter().zip(&state) {
            let term = Lanes::splat(h) * s;
            u = u - term;
            sizes += size(term);
        }
        let z = Lanes(u.0.map(|u| u / step.direct));
        *row = z;
        hidden += (sizes + size(u) + size(u)) * Lanes::splat(responses.norms[i]);

        let mut increments = step.increment;
        let reaches = &responses.reaches[i * r..][..r];
        for a in 0..r {
            let (own, rest) = increments.split_at(r - a);
            increments = rest;
            let mut change = Lanes::splat(step.input[a]) * z;
            let mut sizes = size(change) + size(state[a]);
            for (&e, &s) in own.iter().zip(&state[a..]) {
                let term = Lanes::splat(e) * s;
                change += term;
                sizes += size(term);
            }
            state[a] += change;
            hidden += sizes * Lanes::splat(reaches[a]);
        }
    }
    // At most r + 4 roundings lie between a product and the number it ends up in; sums of positive terms lose little.
    let unit = (r + 4) as f64 * f64::EPSILON * (1.0 + (rows.len() * (r + 1)) as f64 * f64::EPSILON);
    hidden.0.map(|hidden| hidden * unit)
}

dispatch! {
    fn simulate / simulate_portable / simulate_avx2 = simulate_any(
        responses: &Responses<'_>, impulses: [usize; LANES], rows: &mut [Lanes<LANES>]
    ) -> [f64; LANES];
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::state_space::Parts;
    use crate::linalg::double::Double;

    #[test]
    fn distances_hold() {
        let n = 40;
        let wave = |i: usize, size: f64| f64::from((size * (1.0 + (i as f64).sin())) as f32);
        let parts = Parts {
            direct: (0..n).map(|i| 1.0 + wave(i, 0.1)).collect(),
            output: (0..2 * n).map(|i| -wave(i, 0.2)).collect(),
            input: (0..2 * n).map(|i| wave(i + 7, 0.5)).collect(),
            increment: (0..3 * n).map(|i| -wave(i + 3, 0.3)).collect(),
        };
        let filter = StateSpace::from_parts(2, parts).unwrap();
        let double = Double::scalar;
        let exact = |j: usize| {
            let (mut s, mut column) = ([Double::ZERO; 2], vec![Double::ZERO; n]);
            for (i, z) in column.iter_mut().enumerate().skip(j) {
                let step = filter.step(i);
                let u = double(f64::from(u8::from(i == j)));
                let known = double(step.output[0]) * s[0] + double(step.output[1]) * s[1];
                *z = (u - known) * double(step.direct).reciprocal();
                let e = [0, 1, 2].map(|k| double(step.increment[k]));
                let g = [0, 1].map(|k| double(step.input[k]));
                s = [s[0] + e[0] * s[0] + e[1] * s[1] + g[0] * *z, s[1] + e[2] * s[1] + g[1] * *z];
            }
            column
        };
        let steps = [5, 0, 11, 3, 3, 7, 1, 2, 39];
        let mut out = vec![0.0; n * steps.len()];
        let distances = filter.encoder_columns().write(&steps, &mut out);
        for ((&j, column), bound) in steps.iter().zip(out.chunks(n)).zip(distances) {
            let off = column.iter().zip(exact(j)).map(|(a, b)| (double(*a) - b).to_f64().powi(2));
            let distance = off.sum::<f64>().sqrt();
            assert!(distance > 0.0 && distance <= bound && bound < 1e-13, "{j}: {distance:e} {bound:e}");
        }
    }
}
