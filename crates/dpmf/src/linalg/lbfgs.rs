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

#[cfg(test)]
mod tests {
    use super::*;

    fn minimise(start: &[f64], steps: usize, evaluate: fn(&[f64]) -> (f64, Vec<f64>)) -> Point {
        let (value, gradient) = evaluate(start);
        let mut point = Point { x: start.to_vec(), value, gradient };
        let mut minimiser = Lbfgs::new(5);
        for _ in 0..steps {
            let Some(next) = minimiser.step(&point, evaluate) else { break };
            assert!(next.value <= point.value);
            point = next;
        }
        point
    }

    #[test]
    fn a_curved_valley() {
        let rosenbrock = |x: &[f64]| {
            let (a, b) = (1.0 - x[0], x[1] - x[0] * x[0]);
            (a * a + 100.0 * b * b, vec![-2.0 * a - 400.0 * x[0] * b, 200.0 * b])
        };
        let found = minimise(&[-1.2, 1.0], 60, rosenbrock);
        assert!(found.value < 1e-20 && (found.x[0] - 1.0).abs() < 1e-9, "{found:?}");
    }

    /// Values that are not finite lie beyond, as those of a logarithm.
    #[test]
    fn a_wall() {
        let barrier = |x: &[f64]| match x[0] > 0.0 {
            true => (x[0] - 0.1 * x[0].ln(), vec![1.0 - 0.1 / x[0]]),
            false => (f64::INFINITY, vec![0.0]),
        };
        assert!((minimise(&[3.0], 60, barrier).x[0] - 0.1).abs() < 1e-6);
    }

    #[test]
    fn nothing_below_a_minimum() {
        assert_eq!(
            minimise(&[0.0, 0.0], 9, |x| (x[0] * x[0] + x[1] * x[1], vec![2.0 * x[0], 2.0 * x[1]])).x,
            [0.0, 0.0]
        );
    }
}
