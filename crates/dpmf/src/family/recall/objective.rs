//! What a fit minimises: `log ‖A N‖_F² + log γ²`, made smooth around an estimate of its multipliers.
//!
//! With `γ² = max_p Σ_{ij} |X_{p,ij}|`, both the maximum and the absolute values have corners, and the optimum sits in
//! them: `X_p` is diagonal there for the prefix sum, and `γ_p` the same for all phases. They are maxima over weights
//! `w_p ≥ 0`, `Σ w_p = 1`, and signs `|σ_{p,ij}| ≤ 1`, which at the optimum are the dual variable, `w_p σ_p ∝ D_p`. To keep
//! the weights and signs near an estimate, by a penalty, makes the maximum smooth and leaves the optimum where it is once
//! the estimate is right: each round of a fit takes those it ended with.

use crate::linalg::product::Rows;

/// Weights of the phases and signs within them.
pub(super) struct Multipliers {
    pub weights: Vec<f64>,
    pub signs: Vec<Rows>,
    /// Smoothness of the maximum over phases: the factor of the relative entropy.
    pub temperature: f64,
    /// Smoothness of absolute values, relative to the mean of the diagonal.
    pub softness: f64,
}

/// The logarithm of the smooth `γ²`.
pub(super) struct Smoothed {
    pub value: f64,
    /// Its gradient by `X_p`.
    pub slopes: Vec<Rows>,
    /// Where the maximum is attained.
    pub weights: Vec<f64>,
    pub signs: Vec<Rows>,
}

impl Multipliers {
    /// `counts[p]`: how often phase `p` occurs.
    pub fn smoothed(&self, blocks: &[Rows], counts: &[usize]) -> Smoothed {
        let mut signs = Vec::with_capacity(blocks.len());
        let mut slopes = Vec::with_capacity(blocks.len());
        let mut sums = Vec::with_capacity(blocks.len());
        for ((block, prior), &count) in blocks.iter().zip(&self.signs).zip(counts) {
            let mean = (0..count).map(|i| block.at(i, i)).sum::<f64>() / count as f64;
            let width = self.softness * mean;
            let (mut sum, mut penalty) = (mean * count as f64, 0.0);
            let mut sign = Rows::zeros(block.rows, block.columns);
            for i in 0..count {
                for j in (0..count).filter(|j| *j != i) {
                    let (x, s0) = (block.at(i, j), prior.at(i, j));
                    let s = (s0 + x / width).clamp(-1.0, 1.0);
                    *sign.at_mut(i, j) = s;
                    sum += s * x;
                    penalty += 0.5 * (s - s0) * (s - s0);
                }
            }
            sums.push(sum - width * penalty);
            let mut slope = sign.clone();
            let own = 1.0 - self.softness / count as f64 * penalty;
            (0..count).for_each(|i| *slope.at_mut(i, i) = own);
            signs.push(sign);
            slopes.push(slope);
        }
        let largest = sums.iter().copied().fold(0.0, f64::max);
        let powers =
            sums.iter().zip(&self.weights).map(|(sum, w)| w * (sum / largest).powf(1.0 / self.temperature));
        let mut weights: Vec<f64> = powers.collect();
        let total: f64 = weights.iter().sum();
        for ((weight, slope), sum) in weights.iter_mut().zip(&mut slopes).zip(&sums) {
            *weight /= total;
            slope.values.iter_mut().for_each(|x| *x *= *weight / sum);
        }
        Smoothed { value: largest.ln() + self.temperature * total.ln(), slopes, weights, signs }
    }
}

/// `Σ_{ij} |X_{p,ij}|` of every phase.
pub(super) fn sensitivities_sq(blocks: &[Rows], counts: &[usize]) -> Vec<f64> {
    let of = |(block, &count): (&Rows, &usize)| {
        let row = |i: usize| block.row(i)[..count].iter().map(|x| x.abs()).sum::<f64>();
        (0..count).map(row).sum::<f64>()
    };
    blocks.iter().zip(counts).map(of).collect()
}
