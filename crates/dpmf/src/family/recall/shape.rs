//! The coefficients of a filter with recalled noise as a fit sees them: by epoch and phase.

use crate::form::recall::Parts;

/// Sizes of a filter whose recalled rows are an epoch apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// `n`.
    pub steps: usize,
    /// `b`, steps of an epoch.
    pub stride: usize,
    /// `r`.
    pub order: usize,
    /// `J`.
    pub recalls: usize,
}

impl Shape {
    /// `K`, epochs, of which the last may be short.
    pub fn epochs(&self) -> usize {
        self.steps.div_ceil(self.stride)
    }

    /// Whether phase `p` occurs in epoch `e`.
    pub fn exists(&self, e: usize, p: usize) -> bool {
        e * self.stride + p < self.steps
    }

    /// Numbers a step: `d, a_1, …, a_J, h, g_0, …, g_J`.
    pub fn width(&self) -> usize {
        (1 + self.recalls) * (1 + self.order) + self.order
    }

    /// Where `a_j` stands among them, `a_0 = d`.
    pub fn direct(&self, j: usize) -> usize {
        j
    }

    /// Where `h_k` stands among them.
    pub fn output(&self, k: usize) -> usize {
        1 + self.recalls + k
    }

    /// Where `g_{j,k}` stands among them.
    pub fn input(&self, j: usize, k: usize) -> usize {
        1 + self.recalls + self.order * (1 + j) + k
    }
}

/// Coefficients, or their gradient: [`Shape::width`] numbers a step, and a decay for each state.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Coefficients {
    pub shape: Shape,
    pub steps: Vec<f64>,
    pub decay: Vec<f64>,
}

impl Coefficients {
    pub fn zeros(shape: Shape) -> Self {
        Self { shape, steps: vec![0.0; shape.steps * shape.width()], decay: vec![0.0; shape.order] }
    }

    /// Those of phase `p` in epoch `e`.
    pub fn step(&self, e: usize, p: usize) -> &[f64] {
        let width = self.shape.width();
        &self.steps[(e * self.shape.stride + p) * width..][..width]
    }

    pub fn step_mut(&mut self, e: usize, p: usize) -> &mut [f64] {
        let width = self.shape.width();
        &mut self.steps[(e * self.shape.stride + p) * width..][..width]
    }

    /// As they are stored.
    pub fn parts(&self) -> Parts {
        let Shape { stride, order, recalls, .. } = self.shape;
        let mut parts = Parts { increment: self.decay.iter().map(|x| x - 1.0).collect(), ..Parts::default() };
        for (t, step) in self.steps.chunks_exact(self.shape.width()).enumerate() {
            let known = recalls.min(t / stride);
            let or_zero = |j: usize, x: f64| if j <= known { x } else { 0.0 };
            parts.direct.push(step[0]);
            parts.recalled.extend((1..=recalls).map(|j| or_zero(j, step[j])));
            parts.output.extend(&step[1 + recalls..][..order]);
            let inputs = &step[1 + recalls + order..];
            parts.input.extend(inputs.iter().enumerate().map(|(i, &x)| or_zero(i / order, x)));
        }
        parts
    }
}
