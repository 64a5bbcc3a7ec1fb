//! The server's optimizer: the workload itself, run on one noisy gradient after the other.

use crate::error::{Error, Result};
use dpmf::{Average, Optimizer, Workload};

/// Parameters and the memory of the optimizer.
///
/// From the public `θ₀`, `θ₀ − θ` is `A g` for the workload `A` and the gradients `g` it was given.
#[derive(Debug, Clone)]
pub struct Server {
    optimizer: Optimizer,
    learning_rates: Vec<f64>,
    step: usize,
    parameters: Vec<f32>,
    momentum: Vec<f32>,
    average: Vec<f32>,
}

impl Server {
    /// The optimizer of a workload, at its first step.
    ///
    /// Errors: a workload that is a matrix: it says what is released, not how to compute it step by step.
    pub fn new(workload: &Workload, parameters: Vec<f32>) -> Result<Self> {
        let Some((optimizer, learning_rates)) = workload.optimizer() else {
            let rule = "training needs an optimizer: momentum, weight decay and a schedule";
            return Err(Error::argument("workload", "a matrix", rule));
        };
        let buffer = |needed: bool| if needed { vec![0.0; parameters.len()] } else { Vec::new() };
        let momentum = buffer(optimizer.momentum > 0.0);
        let average = if optimizer.average == Average::None { Vec::new() } else { parameters.clone() };
        Ok(Self {
            optimizer: *optimizer,
            learning_rates: learning_rates.to_vec(),
            step: 0,
            parameters,
            momentum,
            average,
        })
    }

    /// Steps in all.
    pub fn steps(&self) -> usize {
        self.learning_rates.len()
    }

    /// Steps taken.
    pub fn step(&self) -> usize {
        self.step
    }

    /// The iterate, on which the next gradients are taken.
    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// What is released: the iterate, or its average.
    pub fn released(&self) -> &[f32] {
        if self.average.is_empty() { &self.parameters } else { &self.average }
    }

    /// Takes one step with the gradient `scale · gradient`.
    ///
    /// # Panics
    /// Past the last step of the workload, or with a gradient of another length.
    pub fn apply(&mut self, gradient: &[f32], scale: f32) {
        assert_eq!(gradient.len(), self.parameters.len(), "one entry for each parameter");
        let Optimizer { momentum: beta, nesterov, weight_decay, coupled, average } = self.optimizer;
        let rate = self.learning_rates[self.step] as f32;
        let beta = beta as f32;
        let (join, keep) = match coupled {
            true => (weight_decay as f32, 1.0),
            false => (0.0, (1.0 - self.learning_rates[self.step] * weight_decay) as f32),
        };
        let theta = self.parameters.iter_mut().zip(gradient);
        if self.momentum.is_empty() {
            theta.for_each(|(theta, g)| *theta = keep * *theta - rate * (scale * g + join * *theta));
        } else {
            for ((theta, g), m) in theta.zip(&mut self.momentum) {
                let g = scale * g + join * *theta;
                *m = beta * *m + g;
                let direction = if nesterov { g + beta * *m } else { *m };
                *theta = keep * *theta - rate * direction;
            }
        }
        self.step += 1;
        let weight = match average {
            Average::None => return,
            Average::Uniform => 1.0 / self.step as f32,
            Average::Ema(alpha) => (1.0 - alpha) as f32,
        };
        self.average.iter_mut().zip(&self.parameters).for_each(|(y, theta)| *y += weight * (theta - *y));
    }

    /// Takes a step without a gradient, for a round whose noise was burned.
    ///
    /// # Panics
    /// Past the last step of the workload.
    pub fn idle(&mut self) {
        self.apply(&vec![0.0; self.parameters.len()], 1.0);
    }

    /// The state by name.
    pub(crate) fn buffers(&self) -> [(&'static str, &[f32]); 3] {
        [("parameters", &self.parameters), ("momentum", &self.momentum), ("average", &self.average)]
    }

    /// Takes up a state that [`Server::buffers`] gave; `false` if the lengths differ.
    pub(crate) fn restore(&mut self, step: usize, buffers: [Vec<f32>; 3]) -> bool {
        let lengths = self.buffers().map(|(_, buffer)| buffer.len());
        if buffers.each_ref().map(Vec::len) != lengths || step > self.learning_rates.len() {
            return false;
        }
        [self.parameters, self.momentum, self.average] = buffers;
        self.step = step;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn optimizers() -> Vec<Optimizer> {
        let base = Optimizer::default();
        vec![
            base,
            Optimizer { momentum: 0.9, ..base },
            Optimizer { momentum: 0.9, nesterov: true, ..base },
            Optimizer { momentum: 0.9, weight_decay: 0.2, ..base },
            Optimizer { momentum: 0.9, weight_decay: 0.2, coupled: true, ..base },
            Optimizer { momentum: 0.5, nesterov: true, weight_decay: 0.2, coupled: true, ..base },
            Optimizer { weight_decay: 0.3, average: Average::Uniform, ..base },
            Optimizer { momentum: 0.8, average: Average::Ema(0.7), ..base },
        ]
    }

    #[test]
    fn the_server_computes_the_workload() {
        let steps = 9;
        let rates: Vec<f64> = (0..steps).map(|i| 0.5 + 0.1 * (i % 4) as f64).collect();
        for optimizer in optimizers() {
            let workload = Workload::sgd(rates.clone(), optimizer).unwrap();
            let a = workload.to_dense();
            // From θ₀ = 0, coordinate j sees a unit gradient at step j alone.
            let mut server = Server::new(&workload, vec![0.0; steps]).unwrap();
            for i in 0..steps {
                let gradient: Vec<f32> = (0..steps).map(|j| if i == j { 2.0 } else { 0.0 }).collect();
                server.apply(&gradient, 0.5);
                for j in 0..steps {
                    let (expected, actual) = (-a[(i, j)], f64::from(server.released()[j]));
                    assert!(
                        (actual - expected).abs() < 2e-6,
                        "{optimizer:?} ({i}, {j}): {actual} {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn weight_decay_pulls_the_start_to_zero_and_nothing_else_moves_it() {
        for optimizer in optimizers() {
            let workload = Workload::sgd(vec![0.5; 4], optimizer).unwrap();
            let mut server = Server::new(&workload, vec![1.0]).unwrap();
            (0..4).for_each(|_| server.idle());
            let theta = server.parameters()[0];
            assert!(if optimizer.weight_decay > 0.0 { theta < 1.0 } else { theta == 1.0 }, "{optimizer:?}");
        }
    }

    #[test]
    fn a_matrix_is_no_optimizer() {
        let dense = Workload::dense(Workload::prefix_sum(3).unwrap().to_dense()).unwrap();
        assert_eq!(Server::new(&dense, vec![0.0]).unwrap_err().kind(), "invalid-argument");
    }
}
