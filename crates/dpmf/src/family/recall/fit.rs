//! The fit of a filter with recalled noise to a workload and its epochs.

use super::energy::energy;
use super::gram::Grams;
use super::grid::Grid;
use super::objective::{Multipliers, sensitivities_sq};
use super::shape::{Coefficients, Shape};
use crate::error::Result;
use crate::family::plant::Plant;
use crate::linalg::lbfgs::{Lbfgs, Point};
use crate::linalg::product::Rows;

/// Fineness of the grids that a fit goes through, and rounds of multipliers on each.
const LEVELS: [(usize, usize); 5] = [(1, 4), (2, 4), (4, 4), (8, 4), (usize::MAX, 8)];

/// Steps of the minimisation in a round.
const STEPS: usize = 60;

/// Decrease of the objective, half of that relative to the root loss, below which a round ends.
const STALLED: f64 = 1e-9;

/// Points whose curvature is remembered.
const MEMORY: usize = 30;

/// Smoothness of the maximum and of absolute values at first, and what is left of it at the end. Multipliers are poor
/// at first, and a smooth function is minimised faster; in the end corners count.
const TEMPERATURE: f64 = 0.05;
const SOFTNESS: f64 = 0.3;
const LEFT: f64 = 0.01;

/// Rate at which the fastest state forgets, and steps of an epoch times that of the slowest.
const FASTEST: f64 = 0.75;
const SLOWEST: f64 = 4.0;

/// Levels to which sensitivities of phases are scaled in the end, as parts of all that lie below, and how near below a level
/// one is raised to it.
const PARTS: [f64; 8] = [1.0, 0.99, 0.97, 0.94, 0.9, 0.8, 0.65, 0.5];
const NEAR: [f64; 5] = [1.0, 0.999, 0.98, 0.9, 0.0];

/// A fit on its way.
pub(super) struct Fit<'a> {
    plant: &'a Plant,
    shape: Shape,
    /// How often each phase occurs.
    counts: Vec<usize>,
    coefficients: Coefficients,
    multipliers: Multipliers,
    level: usize,
}

/// Told the smooth loss after every step of the minimisation; an error stops it.
pub(super) type Watch<'a> = &'a mut dyn FnMut(f64) -> Result<()>;

impl<'a> Fit<'a> {
    /// Independent epochs, in which `A N` decays about like `1/√t`, by states that forget at geometrically spread rates.
    pub fn new(shape: Shape, plant: &'a Plant) -> Self {
        let (b, epochs) = (shape.stride, shape.epochs());
        let counts = (0..b).map(|p| (0..epochs).filter(|e| shape.exists(*e, p)).count()).collect();
        let slowest = (SLOWEST / b as f64).min(FASTEST / 2.0);
        let rates: Vec<f64> = match shape.order {
            1 => vec![(FASTEST * slowest).sqrt()],
            r => (0..r).map(|k| FASTEST * (slowest / FASTEST).powf(k as f64 / (r as f64 - 1.0))).collect(),
        };
        let mut coefficients = Coefficients::zeros(shape);
        let total: f64 = rates.iter().map(|rate| rate.sqrt()).sum();
        for step in coefficients.steps.chunks_exact_mut(shape.width()) {
            step[0] = 1.0;
            for (k, rate) in rates.iter().enumerate() {
                // Unit variance, or the variables of the grid would be of unlike sizes.
                let spread = (rate * (2.0 - rate)).sqrt();
                step[shape.input(0, k)] = spread;
                step[shape.output(k)] = -rate * rate.sqrt() / (total * spread);
            }
        }
        coefficients.decay = rates.iter().map(|rate| 1.0 - rate).collect();
        let mut signs = Rows::identity(epochs);
        signs.values.iter_mut().filter(|x| **x == 0.0).for_each(|x| *x = 0.3);
        let multipliers = Multipliers {
            weights: vec![1.0 / b as f64; b],
            signs: vec![signs; b],
            temperature: TEMPERATURE,
            softness: SOFTNESS,
        };
        Self { plant, shape, counts, coefficients, multipliers, level: 0 }
    }

    /// Goes on to the end of level `last`, and returns the smooth loss there: about what the family can reach,
    /// from below. Nothing if no level came to its end.
    pub fn advance(&mut self, last: usize, watch: Watch<'_>) -> Result<Option<f64>> {
        let total: usize = LEVELS.iter().map(|(_, rounds)| rounds).sum();
        let mut value = None;
        while self.level <= last && self.level < LEVELS.len() {
            let (fineness, rounds) = LEVELS[self.level];
            let grid = Grid::new(self.shape, fineness);
            let begun: usize = LEVELS[..self.level].iter().map(|(_, rounds)| rounds).sum();
            self.level += 1;
            // On few phases the next grid may be the same, and its rounds belong to this one.
            if LEVELS.get(self.level).is_some_and(|(finer, _)| Grid::new(self.shape, *finer) == grid) {
                continue;
            }
            let mut minimiser = Lbfgs::new(MEMORY);
            for round in begun..begun + rounds {
                let part = round as f64 / (total - 1) as f64;
                self.multipliers.temperature = TEMPERATURE * LEFT.powf(part * part);
                self.multipliers.softness = SOFTNESS * LEFT.powf(part * part);
                value = Some(self.round(&grid, &mut minimiser, watch)?);
            }
        }
        Ok(value.map(f64::exp))
    }

    /// Minimises on a grid with the multipliers at hand, then takes those it ended with.
    fn round(&mut self, grid: &Grid, minimiser: &mut Lbfgs, watch: Watch<'_>) -> Result<f64> {
        let Self { plant, shape, counts, coefficients, multipliers, .. } = self;
        let mut evaluate = |x: &[f64]| {
            let Some((coefficients, smooth)) = grid.decode(x) else {
                return (f64::INFINITY, vec![0.0; x.len()]);
            };
            let mut gradient = Coefficients::zeros(*shape);
            let grams = Grams::new(&coefficients);
            let smoothed = multipliers.smoothed(&grams.blocks, counts);
            grams.pull_back(&smoothed.slopes, &mut gradient);
            let energy = energy(&coefficients, plant, |energy| 1.0 / energy, &mut gradient);
            (energy.ln() + smoothed.value, grid.pull_back(&coefficients, &smooth, gradient))
        };
        let x = grid.encode(coefficients);
        let (value, gradient) = evaluate(&x);
        let mut point = Point { x, value, gradient };
        for _ in 0..STEPS {
            let Some(next) = minimiser.step(&point, &mut evaluate) else { break };
            let decrease = point.value - next.value;
            point = next;
            watch(point.value.exp())?;
            if decrease < STALLED {
                break;
            }
        }
        if let Some((found, _)) = grid.decode(&point.x) {
            let smoothed = multipliers.smoothed(&Grams::new(&found).blocks, counts);
            (multipliers.weights, multipliers.signs) = (smoothed.weights, smoothed.signs);
            *coefficients = found;
        }
        Ok(point.value)
    }

    /// The coefficients with a sensitivity of 1, and their loss.
    ///
    /// Rows of `N` of one phase may be scaled together, which scales the columns of its users alone. What stands out is
    /// scaled down to a level, and what is near below it up to it, unless it is far below: then the constraint is slack, and
    /// the loss wants it so. Of some levels the best is taken.
    pub fn finish(&self) -> (Coefficients, f64) {
        let sums = sensitivities_sq(&Grams::new(&self.coefficients).blocks, &self.counts);
        let mut sorted = sums.clone();
        sorted.sort_by(f64::total_cmp);
        let mut unused = Coefficients::zeros(self.shape);
        let mut best: Option<(Coefficients, f64)> = None;
        for (part, near) in PARTS.iter().flat_map(|part| NEAR.iter().map(move |near| (part, near))) {
            let level = sorted[(part * (sorted.len() - 1) as f64).round() as usize];
            let mut scaled = self.coefficients.clone();
            // γ becomes 1 at the level.
            let factor = |p: usize| if sums[p] >= near * level { sums[p].sqrt() } else { level.sqrt() };
            self.scale_phases(&mut scaled, factor);
            let loss = energy(&scaled, self.plant, |_| 0.0, &mut unused);
            if best.as_ref().is_none_or(|(_, least)| loss < *least) {
                best = Some((scaled, loss));
            }
        }
        best.unwrap_or_else(|| (self.coefficients.clone(), f64::INFINITY))
    }

    /// Multiplies rows of `N`.
    fn scale_phases(&self, coefficients: &mut Coefficients, factor: impl Fn(usize) -> f64) {
        let shape = self.shape;
        for (t, step) in coefficients.steps.chunks_exact_mut(shape.width()).enumerate() {
            let factor = factor(t % shape.stride);
            step[..1 + shape.recalls + shape.order].iter_mut().for_each(|x| *x *= factor);
        }
    }
}
