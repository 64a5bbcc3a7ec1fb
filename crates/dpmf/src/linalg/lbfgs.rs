//! Minimisation of smooth functions of many variables.

use std::collections::VecDeque;

/// Minimises by the limited-memory BFGS method, keeping all between calls: curvature survives where the function changes
/// little.
///
/// Reference: Nocedal, "Updating quasi-Newton matrices with limited storage", Math. Comp. 35 (1980); the line search is
/// that of Lewis and Overton, "Nonsmooth optimization via quasi-Newton methods", Math. Program. 141 (2013).
pub(crate) struct Lbfgs {
    memory: usize,
    /// Differences of points and gradients, and the inverse of their products.
    pairs: VecDeque<(Vec<f64>, Vec<f64>, f64)>,
}

/// A point with the value and gradient there.
#[derive(Clone, Debug)]
pub(crate) struct Point {
    pub x: Vec<f64>,
    pub value: f64,
    pub gradient: Vec<f64>,
}

/// Evaluations that one line search may take.
const TRIALS: usize = 20;

impl Lbfgs {
    pub fn new(memory: usize) -> Self {
        Self { memory, pairs: VecDeque::new() }
    }

    /// Forgets curvature.
    pub fn restart(&mut self) {
        self.pairs.clear();
    }

    /// One step from a point; `None` if no step decreases the value.
    ///
    /// `evaluate` gives value and gradient; a value that is not finite is a step too far.
    pub fn step(
        &mut self,
        from: &Point,
        mut evaluate: impl FnMut(&[f64]) -> (f64, Vec<f64>),
    ) -> Option<Point> {
        loop {
            let fresh = self.pairs.is_empty();
            let direction = self.direction(&from.gradient);
            let slope = dot(&direction, &from.gradient);
            if slope < 0.0
                && let Some(point) = search(from, &direction, slope, &mut evaluate)
            {
                let s: Vec<f64> = point.x.iter().zip(&from.x).map(|(a, b)| a - b).collect();
                let y: Vec<f64> = point.gradient.iter().zip(&from.gradient).map(|(a, b)| a - b).collect();
                let product = dot(&s, &y);
                if product > 1e-12 * (dot(&s, &s) * dot(&y, &y)).sqrt() {
                    self.pairs.push_back((s, y, 1.0 / product));
                    if self.pairs.len() > self.memory {
                        self.pairs.pop_front();
                    }
                }
                return Some(point);
            }
            if fresh {
                return None;
            }
            self.restart();
        }
    }

    fn direction(&self, gradient: &[f64]) -> Vec<f64> {
        let mut q: Vec<f64> = gradient.iter().map(|g| -g).collect();
        let mut weights = Vec::with_capacity(self.pairs.len());
        for (s, y, inverse) in self.pairs.iter().rev() {
            let weight = inverse * dot(s, &q);
            q.iter_mut().zip(y).for_each(|(q, y)| *q -= weight * y);
            weights.push(weight);
        }
        let scale = match self.pairs.back() {
            Some((_, y, inverse)) => 1.0 / (inverse * dot(y, y)),
            // The first step moves no coordinate by more than a hundredth.
            None => 0.01 / gradient.iter().fold(1e-300, |most: f64, g| most.max(g.abs())),
        };
        q.iter_mut().for_each(|q| *q *= scale);
        for ((s, y, inverse), weight) in self.pairs.iter().zip(weights.into_iter().rev()) {
            let difference = weight - inverse * dot(y, &q);
            q.iter_mut().zip(s).for_each(|(q, s)| *q += difference * s);
        }
        q
    }
}

/// A step that decreases the value enough, and flattens the slope if the trials suffice.
fn search(
    from: &Point,
    direction: &[f64],
    slope: f64,
    evaluate: &mut impl FnMut(&[f64]) -> (f64, Vec<f64>),
) -> Option<Point> {
    let (mut low, mut high, mut length) = (0.0_f64, f64::INFINITY, 1.0_f64);
    let mut best: Option<Point> = None;
    for _ in 0..TRIALS {
        let x: Vec<f64> = from.x.iter().zip(direction).map(|(x, d)| x + length * d).collect();
        let (value, gradient) = evaluate(&x);
        if !value.is_finite() || value > from.value + 1e-4 * length * slope {
            high = length;
        } else {
            let flat = dot(&gradient, direction) >= 0.9 * slope;
            if best.as_ref().is_none_or(|best| value < best.value) {
                best = Some(Point { x, value, gradient });
            }
            if flat {
                break;
            }
            low = length;
        }
        length = if high.is_finite() { 0.5 * (low + high) } else { 2.0 * low };
    }
    best
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
