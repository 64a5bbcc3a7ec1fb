//! `‖A N‖_F²` of a filter with recalled noise, and its gradient, in time linear in the steps.
//!
//! With the filter's states and the optimizer's in one vector `y`, column `s` of `A N` is a free motion of `y` between
//! kicks at `s, s + b, s + 2b, …`. From phase `p` of an epoch to the end of it, and from the beginning of an epoch to
//! phase `p`, free motions are a matrix and their energy a quadratic form, the same for all columns: two recursions give
//! them, and each column is a product of a few of them.

use super::shape::{Coefficients, Shape};
use crate::family::plant::Plant;
use crate::linalg::product::Rows;

/// Free motions in an epoch.
struct Motion {
    /// `before[p]`: from the beginning of the epoch to before phase `p`.
    before: Vec<Rows>,
    /// Energy of the steps before phase `p`, by the state at the beginning.
    before_energy: Vec<Rows>,
    /// `after[p]`: from after phase `p` to the end.
    after: Vec<Rows>,
    /// Energy of phase `p` and those after it, by the state after phase `p`.
    after_energy: Vec<Rows>,
}

/// `y ← F y + Σ_j k_j z_{t−jb}` at a step.
fn transition(coefficients: &Coefficients, plant: &Plant, t: usize) -> Rows {
    let (shape, w) = (coefficients.shape, plant.states);
    let (r, m) = (shape.order, shape.order + w);
    let step = &coefficients.steps[t * shape.width()..][..shape.width()];
    let mut f = Rows::zeros(m, m);
    for k in 0..r {
        *f.at_mut(k, k) = coefficients.decay[k];
    }
    for i in 0..w {
        let g = plant.input[t * w + i];
        for k in 0..r {
            *f.at_mut(r + i, k) = g * step[shape.output(k)];
        }
        f.row_mut(r + i)[r..].copy_from_slice(&plant.transition[(t * w + i) * w..][..w]);
    }
    f
}

fn kick(coefficients: &Coefficients, plant: &Plant, t: usize, j: usize, out: &mut [f64]) {
    let (shape, w) = (coefficients.shape, plant.states);
    let step = &coefficients.steps[t * shape.width()..][..shape.width()];
    let r = shape.order;
    for k in 0..r {
        out[k] += step[shape.input(j, k)];
    }
    for i in 0..w {
        out[r + i] += plant.input[t * w + i] * step[shape.direct(j)];
    }
}

fn motion(coefficients: &Coefficients, plant: &Plant, e: usize) -> Motion {
    let shape = coefficients.shape;
    let (b, m) = (shape.stride, shape.order + plant.states);
    let length = b.min(shape.steps - e * b);
    let transitions: Vec<Rows> = (0..length).map(|p| transition(coefficients, plant, e * b + p)).collect();
    let (mut before, mut before_energy) = (vec![Rows::identity(m)], vec![Rows::zeros(m, m)]);
    for f in &transitions {
        let next = f.times(&before[before.len() - 1]);
        let mut energy = before_energy[before_energy.len() - 1].clone();
        add_square(&mut energy, next.row(m - 1));
        before.push(next);
        before_energy.push(energy);
    }
    let (mut after, mut after_energy) = (Vec::with_capacity(length), Vec::with_capacity(length));
    let (mut map, mut energy) = (Rows::identity(m), Rows::zeros(m, m));
    for p in (0..length).rev() {
        if p + 1 < length {
            let f = &transitions[p + 1];
            map = map.times(f);
            energy = f.transposed_times(&energy.times(f));
        }
        *energy.at_mut(m - 1, m - 1) += 1.0;
        after.push(map.clone());
        after_energy.push(energy.clone());
    }
    after.reverse();
    after_energy.reverse();
    Motion { before, before_energy, after, after_energy }
}

fn add_square(out: &mut Rows, x: &[f64]) {
    for (i, a) in x.iter().enumerate() {
        out.row_mut(i).iter_mut().zip(x).for_each(|(out, b)| *out += a * b);
    }
}

fn add_outer(out: &mut Rows, factor: f64, x: &[f64], y: &[f64]) {
    for (i, a) in x.iter().enumerate() {
        let a = factor * a;
        out.row_mut(i).iter_mut().zip(y).for_each(|(out, b)| *out += a * b);
    }
}

fn apply(matrix: &Rows, x: &[f64], out: &mut [f64]) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = matrix.row(i).iter().zip(x).map(|(a, x)| a * x).sum();
    }
}

fn apply_transposed(matrix: &Rows, x: &[f64], out: &mut [f64]) {
    out.fill(0.0);
    for (i, x) in x.iter().enumerate() {
        out.iter_mut().zip(matrix.row(i)).for_each(|(out, a)| *out += a * x);
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `‖A N‖_F²`, and its gradient times `weight(‖A N‖_F²)` added to `gradient`.
///
/// Cost: O(n(K + m)m²) for `m` states of filter and optimizer together; as many numbers of memory as n·4m².
pub(super) fn energy(
    coefficients: &Coefficients,
    plant: &Plant,
    weight: impl Fn(f64) -> f64,
    gradient: &mut Coefficients,
) -> f64 {
    let shape = coefficients.shape;
    let Shape { stride: b, order: r, recalls, .. } = shape;
    let (epochs, m) = (shape.epochs(), shape.order + plant.states);
    let motions: Vec<Motion> = (0..epochs).map(|e| motion(coefficients, plant, e)).collect();
    let zeros = |motion: &Motion| {
        let of = |matrices: &[Rows]| vec![Rows::zeros(m, m); matrices.len()];
        Motion {
            before: of(&motion.before),
            before_energy: of(&motion.before_energy),
            after: of(&motion.after),
            after_energy: of(&motion.after_energy),
        }
    };
    // Gradients by the matrices, then by what they were made of. They are those of the energy itself; the factor comes last.
    let mut adjoint: Vec<Motion> = motions.iter().map(zeros).collect();
    let mut kicks = vec![0.0; shape.steps * (recalls + 1) * m];
    let mut total = 0.0;
    let (mut kicked, mut begun) = (vec![vec![0.0; m]; epochs], vec![vec![0.0; m]; epochs]);
    let (mut slope, mut back) = (vec![0.0; m], vec![0.0; m]);
    for e0 in 0..epochs {
        for p in (0..b).take_while(|p| shape.exists(e0, *p)) {
            let last = (e0..epochs).take_while(|e| shape.exists(*e, p)).last().unwrap_or(e0);
            // A short last epoch may end before the phase.
            let tail = (last + 1 < epochs).then(|| motions[last + 1].before.len() - 1);
            kicked[e0].fill(0.0);
            kick(coefficients, plant, e0 * b + p, 0, &mut kicked[e0]);
            for e in e0..=last {
                apply(&motions[e].after_energy[p], &kicked[e], &mut slope);
                total += dot(&slope, &kicked[e]);
                if e < last {
                    let next = &motions[e + 1];
                    apply(&motions[e].after[p], &kicked[e], &mut begun[e + 1]);
                    apply(&next.before_energy[p], &begun[e + 1], &mut slope);
                    total += dot(&slope, &begun[e + 1]);
                    let (_, rest) = kicked.split_at_mut(e + 1);
                    apply(&next.before[p + 1], &begun[e + 1], &mut rest[0]);
                    if e + 1 - e0 <= recalls {
                        kick(coefficients, plant, (e + 1) * b + p, e + 1 - e0, &mut rest[0]);
                    }
                }
            }
            slope.fill(0.0);
            if let Some(length) = tail {
                let next = &motions[last + 1];
                apply(&motions[last].after[p], &kicked[last], &mut begun[last + 1]);
                apply(&next.before_energy[length], &begun[last + 1], &mut back);
                total += dot(&back, &begun[last + 1]);
                add_square(&mut adjoint[last + 1].before_energy[length], &begun[last + 1]);
                back.iter_mut().for_each(|x| *x *= 2.0);
                add_outer(&mut adjoint[last].after[p], 1.0, &back, &kicked[last]);
                apply_transposed(&motions[last].after[p], &back, &mut slope);
            }
            // `slope` is the gradient by the state after the kick of epoch e.
            for e in (e0..=last).rev() {
                apply(&motions[e].after_energy[p], &kicked[e], &mut back);
                slope.iter_mut().zip(&back).for_each(|(s, x)| *s += 2.0 * x);
                add_square(&mut adjoint[e].after_energy[p], &kicked[e]);
                if e - e0 <= recalls {
                    let at = ((e * b + p) * (recalls + 1) + e - e0) * m;
                    kicks[at..][..m].iter_mut().zip(&slope).for_each(|(k, s)| *k += s);
                }
                if e > e0 {
                    add_outer(&mut adjoint[e].before[p + 1], 1.0, &slope, &begun[e]);
                    apply_transposed(&motions[e].before[p + 1], &slope, &mut back);
                    apply(&motions[e].before_energy[p], &begun[e], &mut slope);
                    back.iter_mut().zip(&slope).for_each(|(b, x)| *b += 2.0 * x);
                    add_square(&mut adjoint[e].before_energy[p], &begun[e]);
                    add_outer(&mut adjoint[e - 1].after[p], 1.0, &back, &kicked[e - 1]);
                    apply_transposed(&motions[e - 1].after[p], &back, &mut slope);
                }
            }
        }
    }
    let factor = weight(total);
    let w = plant.states;
    for (e, (motion, mut adjoint)) in motions.iter().zip(adjoint).enumerate() {
        let length = motion.after.len();
        let mut slopes = vec![Rows::zeros(m, m); length];
        for p in 0..length - 1 {
            let f = transition(coefficients, plant, e * b + p + 1);
            let (head, tail) = adjoint.after_energy.split_at_mut(p + 1);
            // Both are symmetric.
            let moved = f.times(&head[p]);
            tail[0].add_product_transposed(1.0, &moved, &f);
            slopes[p + 1].add_product(2.0, &motion.after_energy[p + 1], &moved);
            // The energy of a step itself is no part of what the transition moves.
            let (head, tail) = adjoint.after.split_at_mut(p + 1);
            tail[0].add_product_transposed(1.0, &head[p], &f);
            slopes[p + 1].add_transposed_product(1.0, &motion.after[p + 1], &head[p]);
        }
        for p in (0..length).rev() {
            let f = transition(coefficients, plant, e * b + p);
            let (head, tail) = adjoint.before_energy.split_at_mut(p + 1);
            let row = Rows { rows: 1, columns: m, values: motion.before[p + 1].row(m - 1).to_vec() };
            let slope = row.times(&tail[0]);
            let line = adjoint.before[p + 1].row_mut(m - 1);
            line.iter_mut().zip(&slope.values).for_each(|(x, s)| *x += 2.0 * s);
            head[p].add(1.0, &tail[0]);
            let (head, tail) = adjoint.before.split_at_mut(p + 1);
            head[p].add_transposed_product(1.0, &f, &tail[0]);
            slopes[p].add_product_transposed(1.0, &tail[0], &motion.before[p]);
        }
        for (p, slopes) in slopes.iter().enumerate() {
            let t = e * b + p;
            (0..r).for_each(|k| gradient.decay[k] += factor * slopes.at(k, k));
            let step = gradient.step_mut(e, p);
            for i in 0..w {
                let g = factor * plant.input[t * w + i];
                (0..r).for_each(|k| step[shape.output(k)] += g * slopes.at(r + i, k));
            }
            for j in 0..=recalls.min(e) {
                let kicks = &kicks[(t * (recalls + 1) + j) * m..][..m];
                (0..r).for_each(|k| step[shape.input(j, k)] += factor * kicks[k]);
                for i in 0..w {
                    step[shape.direct(j)] += factor * plant.input[t * w + i] * kicks[r + i];
                }
            }
        }
    }
    total
}
