//! Dual points: what proves a lower bound, and what an optimum is found by.

use crate::error::{DualPoint, Error, Result};

/// `D = ⊕_p D_p`, a block for the users of every phase, `D_p = v_p Y_p Y_pᵀ` with rows of `Y_p` of norm one.
///
/// A user of phase `p` takes part at the steps `p, p + b, p + 2b, …` below `n`, and `D_p/v_p` is the Gram matrix of one way to
/// do so: the vectors `y_i` are the directions of its contributions. One participation is `b = n`: the blocks are numbers, and
/// `D = diag(v)`.
///
/// `Y_p` is lower triangular: row `i` of phase `p` and epoch `e` has entries `0 … e`, and zeros up to `K`.
#[derive(Clone, Debug, PartialEq)]
pub struct Dual {
    pub(super) steps: usize,
    pub(super) separation: usize,
    pub(super) v: Vec<f64>,
    /// The rows of all `Y_p`, step after step, `K` numbers each; none for one participation.
    pub(super) directions: Vec<f64>,
}

impl Dual {
    /// The dual variable `v` of one participation, `D = diag(v)`.
    ///
    /// Errors: entries that are not positive and finite; none.
    pub fn single(v: Vec<f64>) -> Result<Self> {
        let steps = v.len();
        Self::new(steps, steps, v, Vec::new())
    }

    /// Blocks for users who take part every `separation` steps. Directions are scaled to norm one, and an empty list stands
    /// for those of one participation.
    ///
    /// Errors: sizes that do not fit, `v` not positive and finite, a direction that is not finite, is zero or does not belong
    /// to a lower triangular matrix.
    pub fn new(steps: usize, separation: usize, v: Vec<f64>, directions: Vec<f64>) -> Result<Self> {
        if separation == 0 || separation > steps {
            return Err(Error::argument(
                "separation",
                separation,
                "it must lie between 1 and the number of steps",
            ));
        }
        if v.len() != separation {
            return Err(Error::WrongLength { name: "dual variable", actual: v.len(), expected: separation });
        }
        if let Some(index) = v.iter().position(|v| !(v.is_finite() && *v > 0.0)) {
            let rule = "it must be positive and finite";
            return Err(Error::InvalidEntry { name: "dual variable", index, value: v[index], rule });
        }
        let times = steps.div_ceil(separation);
        let expected = if times > 1 { steps * times } else { 0 };
        if directions.len() != expected {
            return Err(Error::WrongLength { name: "directions", actual: directions.len(), expected });
        }
        for (i, y) in directions.chunks_exact(times).enumerate() {
            let outside =
                y.iter().enumerate().position(|(k, y)| !y.is_finite() || k > i / separation && *y != 0.0);
            let norm_sq: f64 = y.iter().map(|y| y * y).sum();
            if outside.is_some() || !(norm_sq > f64::MIN_POSITIVE && norm_sq.is_finite()) {
                let k = outside.unwrap_or(0);
                let rule = "directions must be finite rows, not zero, of a lower triangular matrix";
                return Err(Error::InvalidEntry {
                    name: "directions",
                    index: i * times + k,
                    value: y[k],
                    rule,
                });
            }
        }
        let mut dual = Self { steps, separation, v, directions };
        dual.normalise();
        Ok(dual)
    }

    /// Number of steps `n`.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Distance `b` of two participations of one user, which is the number of phases; `n` for one participation.
    pub fn separation(&self) -> usize {
        self.separation
    }

    /// Number of participations `K = ⌈n/b⌉`.
    pub fn times(&self) -> usize {
        self.steps.div_ceil(self.separation)
    }

    /// `v_p`, one for each phase; for one participation, one for each step.
    pub fn v(&self) -> &[f64] {
        &self.v
    }

    /// The rows of all `Y_p`, step after step, `K` numbers each; none for one participation.
    pub fn directions(&self) -> &[f64] {
        &self.directions
    }

    /// The steps of a phase.
    pub fn phase(&self, p: usize) -> impl ExactSizeIterator<Item = usize> + Clone {
        (p..self.steps).step_by(self.separation)
    }

    /// `D_ij` for two steps: zero unless they are of one phase.
    pub fn at(&self, i: usize, j: usize) -> f64 {
        let b = self.separation;
        match (i % b == j % b, i == j) {
            (false, _) => 0.0,
            (true, true) => self.v[i % b],
            (true, false) => {
                let k = self.times();
                let (y, z) = (&self.directions[i * k..][..k], &self.directions[j * k..][..k]);
                self.v[i % b] * y.iter().zip(z).map(|(y, z)| y * z).sum::<f64>()
            }
        }
    }

    /// Entry `k` of row `i` of the factor `√v_p Y_p`.
    pub(super) fn factor(&self, i: usize, k: usize) -> f64 {
        let root = self.v[i % self.separation].sqrt();
        if self.directions.is_empty() { root } else { root * self.directions[i * self.times() + k] }
    }

    /// The blocks `D_p⁻¹`, as those of `X` in [`Blocks::x`](super::Blocks::x).
    pub(super) fn inverse_blocks(&self) -> Vec<f64> {
        let (n, times) = (self.steps, self.times());
        let mut out = vec![0.0; n * times];
        for p in 0..self.separation {
            let steps: Vec<usize> = self.phase(p).collect();
            let k = steps.len();
            // Z = G⁻¹ by columns; D⁻¹ = ZᵀZ.
            let mut z = vec![0.0; k * k];
            for c in 0..k {
                for e in c..k {
                    let unit = if e == c { 1.0 } else { 0.0 };
                    let known: f64 = (c..e).map(|f| self.factor(steps[e], f) * z[f * k + c]).sum();
                    z[e * k + c] = (unit - known) / self.factor(steps[e], e);
                }
            }
            for (e, i) in steps.iter().enumerate() {
                for f in 0..k {
                    out[i * times + f] = (e.max(f)..k).map(|g| z[g * k + e] * z[g * k + f]).sum();
                }
            }
        }
        out
    }

    /// What users of every phase can change at most, squared, `Σ|X_p|` for the blocks that an oracle gives for this point.
    pub(super) fn changes(&self, x: &[f64]) -> Vec<f64> {
        let mut sums = vec![0.0; self.separation];
        for (i, row) in x.chunks_exact(self.times()).enumerate() {
            sums[i % self.separation] += row.iter().map(|x| x.abs()).sum::<f64>();
        }
        sums
    }

    /// The largest of [`Dual::changes`].
    pub(super) fn largest_change(&self, x: &[f64]) -> f64 {
        self.changes(x).into_iter().fold(0.0, f64::max)
    }

    /// Where `log v` and the directions stand: what an iteration moves.
    pub(super) fn coordinates(&self) -> Vec<f64> {
        self.v.iter().map(|v| v.ln()).chain(self.directions.iter().copied()).collect()
    }

    /// The point with other coordinates, its directions scaled to norm one.
    pub(super) fn with_coordinates(&self, coordinates: &[f64]) -> Self {
        let (log_v, directions) = coordinates.split_at(self.separation);
        let v = log_v.iter().map(|u| u.exp()).collect();
        let mut moved = Self { v, directions: directions.to_vec(), ..*self };
        moved.normalise();
        moved
    }

    /// Scales directions to norm one, none of them closer than [`LEAST_ANGLE`] to those of the epochs before.
    fn normalise(&mut self) {
        let (times, b) = (self.times(), self.separation);
        for (i, y) in self.directions.chunks_exact_mut(times).enumerate() {
            // What has norm one to rounding stays as it is: a point that is stored and read is the same.
            let scale = |y: &mut [f64]| {
                let norm_sq = y.iter().map(|y| y * y).sum::<f64>();
                if (norm_sq - 1.0).abs() > 64.0 * f64::EPSILON {
                    y.iter_mut().for_each(|y| *y /= norm_sq.sqrt());
                }
            };
            let own = i / b;
            scale(y);
            if y[own].abs() < 0.5 * LEAST_ANGLE {
                y[own] = LEAST_ANGLE.copysign(y[own]);
                scale(y);
            }
        }
    }
}

impl From<&Dual> for DualPoint {
    fn from(dual: &Dual) -> Self {
        let Dual { steps, separation, v, directions } = dual.clone();
        Self { steps, separation, v, directions }
    }
}

impl TryFrom<DualPoint> for Dual {
    type Error = Error;

    fn try_from(point: DualPoint) -> Result<Self> {
        Self::new(point.steps, point.separation, point.v, point.directions)
    }
}

/// Sine of the least angle between a direction and the span of those of the epochs before: blocks stay positive definite, and
/// that costs nothing that a gap of 1e-9 would show.
const LEAST_ANGLE: f64 = 1e-5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_checked_and_scaled() {
        let rows = |last: [f64; 2]| [[2.0, 0.0], [1.0, 0.0], last].concat();
        let dual = Dual::new(3, 2, vec![4.0, 1.0], rows([3.0, 4.0])).unwrap();
        assert_eq!((dual.steps(), dual.separation(), dual.times()), (3, 2, 2));
        assert!((dual.at(2, 0) - 2.4).abs() < 1e-15 && dual.at(0, 1) == 0.0 && dual.at(2, 2) == 4.0);
        let again = Dual::new(3, 2, dual.v().to_vec(), dual.directions().to_vec()).unwrap();
        assert_eq!(again, dual);
        // Directions that coincide are kept apart.
        let flat = Dual::new(3, 2, vec![1.0; 2], rows([1.0, 0.0])).unwrap();
        assert!(flat.directions()[5] > 0.0 && flat.directions()[4] <= 1.0);
        assert_eq!(Dual::new(3, 2, vec![1.0; 2], flat.directions().to_vec()).unwrap(), flat);

        let kind = |result: Result<Dual>| result.unwrap_err().kind();
        assert_eq!(kind(Dual::single(Vec::new())), "invalid-argument");
        assert_eq!(kind(Dual::single(vec![1.0, 0.0])), "invalid-argument");
        assert_eq!(kind(Dual::new(3, 2, vec![1.0; 3], rows([1.0, 1.0]))), "wrong-length");
        assert_eq!(kind(Dual::new(3, 2, vec![1.0; 2], vec![1.0; 3])), "wrong-length");
        assert_eq!(kind(Dual::new(3, 3, vec![1.0; 3], vec![1.0; 3])), "wrong-length");
        for bad in [[0.0, 0.0], [f64::NAN, 1.0], [f64::INFINITY, 1.0]] {
            assert_eq!(kind(Dual::new(3, 2, vec![1.0; 2], rows(bad))), "invalid-argument", "{bad:?}");
        }
        let above = [[1.0, 0.5], [1.0, 0.0], [1.0, 1.0]].concat();
        assert_eq!(kind(Dual::new(3, 2, vec![1.0; 2], above)), "invalid-argument");
    }
}
