//! The optimizer as it runs: a recursion on its own states, which divides by nothing.

use super::{Average, Optimizer};
use crate::linalg::double::Double;
use faer::Mat;

/// The states of an optimizer: the momentum `m` if there is one, the displacement `ψ`, and its average `y` if one is
/// released; the last is what is released.
///
/// Unlike `A = P⁻¹R` it needs no inverse of a step size, so rates may be zero, or so small that `P` would absorb
/// neighbouring coefficients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Realisation<'a> {
    pub(crate) optimizer: &'a Optimizer,
    pub(crate) learning_rates: &'a [f64],
    /// The rates that decoupled weight decay sees.
    pub(crate) decay_rates: &'a [f64],
}

/// One step, `s ← F s + g u`; the last state is the output.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transition<const K: usize> {
    /// `F`, each entry with an error of at most [`Transition::ERRORS`] units relative to `size`.
    pub f: [[Double<1>; K]; K],
    /// Sizes of what was summed for `F`.
    pub size: [[f64; K]; K],
    /// `g`, likewise, relative to itself.
    pub g: [Double<1>; K],
}

impl<const K: usize> Transition<K> {
    /// Operations of double-double arithmetic behind one coefficient.
    pub const ERRORS: f64 = 6.0;
}

/// Runs `$body` with the constant `$k` equal to the number of states of a [`Realisation`].
macro_rules! with_states {
    ($realisation:expr, $k:ident => $body:expr) => {{
        macro_rules! run {
            ($value:literal) => {{
                const $k: usize = $value;
                $body
            }};
        }
        match $realisation.states() {
            1 => run!(1),
            2 => run!(2),
            _ => run!(3),
        }
    }};
}
pub(crate) use with_states;

impl Realisation<'_> {
    /// Number of states: 1 to 3.
    pub fn states(&self) -> usize {
        1 + usize::from(self.optimizer.momentum > 0.0) + usize::from(self.optimizer.average != Average::None)
    }

    /// Number of steps `n`.
    pub fn steps(&self) -> usize {
        self.learning_rates.len()
    }

    /// The largest learning rate.
    pub fn largest_rate(&self) -> f64 {
        self.learning_rates.iter().copied().fold(0.0, f64::max)
    }

    /// Step `i`, with iterates in units of `scale`, a power of two.
    ///
    /// With `e = u − λψ` where weight decay is coupled and `e = u` else, the momentum becomes `βm + e`, the step is
    /// that or `e + β(βm + e)`, and `ψ` becomes `(1 − ηλ)ψ` or `ψ`, plus `η` times the step.
    pub fn step<const K: usize>(&self, i: usize, scale: f64) -> Transition<K> {
        debug_assert_eq!(K, self.states());
        let Optimizer { momentum: beta, nesterov, weight_decay: lambda, coupled, average } = *self.optimizer;
        let scalar = Double::scalar;
        let eta = self.learning_rates[i];
        // In units of `scale`: the rate, and what couples the iterate back to the gradient.
        let rate = scalar(eta / scale);
        let zero = Transition { f: [[Double::ZERO; K]; K], size: [[0.0; K]; K], g: [Double::ZERO; K] };
        let Transition { mut f, mut size, mut g } = zero;
        let psi = usize::from(beta > 0.0);

        let mut own = Double::ONE;
        if beta > 0.0 {
            let beta = scalar(beta);
            f[0][0] = beta;
            g[0] = Double::ONE;
            if coupled {
                f[0][psi] = scalar(-lambda * scale);
            }
            f[psi][0] = rate * beta;
            if nesterov {
                own = Double::ONE + beta;
                f[psi][0] = f[psi][0] * beta;
            }
        }
        let decay = match coupled {
            true => scalar(eta) * scalar(lambda) * own,
            false => scalar(self.decay_rates[i]) * scalar(lambda),
        };
        f[psi][psi] = Double::ONE - decay;
        g[psi] = rate * own;
        for a in 0..K {
            for b in 0..K {
                size[a][b] = f[a][b].to_f64().abs();
            }
        }
        size[psi][psi] = 1.0 + decay.to_f64();

        let (keep, take) = match average {
            Average::None => return Transition { f, size, g },
            Average::Ema(alpha) => (scalar(alpha), Double::ONE - scalar(alpha)),
            Average::Uniform => {
                let share = scalar(i as f64 + 1.0).reciprocal();
                (scalar(i as f64) * share, share)
            }
        };
        let last = K - 1;
        for b in 0..last {
            f[last][b] = take * f[psi][b];
            size[last][b] = take.to_f64() * size[psi][b];
        }
        f[last][last] = keep;
        size[last][last] = keep.to_f64();
        g[last] = take * g[psi];
        Transition { f, size, g }
    }
}

impl Realisation<'_> {
    /// `A x`, in place: the optimizer run on scalar gradients.
    pub fn apply(&self, x: &mut [f64]) {
        with_states!(self, K => {
            let mut states = [0.0; K];
            for (i, x) in x.iter_mut().enumerate() {
                Coefficients::new(&self.step::<K>(i, 1.0)).advance(&mut states, *x);
                *x = states[K - 1];
            }
        });
    }

    /// The columns of `A`, and bounds on how far each entry is off.
    ///
    /// The optimizer runs on unit gradients in double-double arithmetic, beside a recursion for what its rounding comes to: `e`
    /// becomes `|F| e` and the units of the step. Cost: O(n²) double-double operations.
    pub fn enclosed(&self) -> (Mat<f64>, Mat<f64>) {
        let n = self.learning_rates.len();
        let (mut a, mut errors) = (Mat::zeros(n, n), Mat::zeros(n, n));
        with_states!(self, K => {
            // Products with coefficients that carry ERRORS units, and sums of K + 1 of them.
            let unit = (Transition::<K>::ERRORS + K as f64 + 4.0) * Double::<1>::UNIT;
            for j in 0..n {
                let (mut s, mut e) = ([Double::ZERO; K], [0.0_f64; K]);
                for i in j..n {
                    let Transition { f, size, g } = self.step::<K>(i, 1.0);
                    let (old, old_e) = (s, e);
                    for a in 0..K {
                        let own = if i == j { g[a] } else { Double::ZERO };
                        let mut sizes = own.to_f64().abs();
                        (s[a], e[a]) = (own, 0.0);
                        for b in 0..K {
                            s[a] = s[a] + f[a][b] * old[b];
                            sizes += size[a][b] * old[b].to_f64().abs();
                            e[a] += size[a][b] * old_e[b];
                        }
                        e[a] = (e[a] + unit * sizes) * (1.0 + 1e-14);
                    }
                    let entry = s[K - 1].to_f64();
                    a[(i, j)] = entry;
                    errors[(i, j)] = (e[K - 1] + f64::EPSILON * entry.abs()) * (1.0 + 1e-14);
                }
            }
        });
        (a, errors)
    }

    /// Squared row norms of `A N`, where `row(i, out)` writes row `i` of `N` into zeros.
    pub fn row_norms_sq(&self, columns: usize, mut row: impl FnMut(usize, &mut [f64])) -> Vec<f64> {
        with_states!(self, K => {
            let (mut states, mut input) = (vec![[0.0; K]; columns], vec![0.0; columns]);
            let steps = 0..self.learning_rates.len();
            steps
                .map(|i| {
                    input.fill(0.0);
                    row(i, &mut input);
                    let coefficients = Coefficients::new(&self.step::<K>(i, 1.0));
                    states.iter_mut().zip(&input).for_each(|(s, u)| coefficients.advance(s, *u));
                    states.iter().map(|s| s[K - 1] * s[K - 1]).sum()
                })
                .collect()
        })
    }

    /// Writes `F` by rows, and `g`, of step `i`.
    pub fn write(&self, i: usize, f: &mut Vec<f64>, g: &mut Vec<f64>) {
        with_states!(self, K => {
            let coefficients = Coefficients::new(&self.step::<K>(i, 1.0));
            f.clear();
            f.extend(coefficients.f.as_flattened());
            g.clear();
            g.extend(coefficients.g);
        });
    }
}

/// A [`Transition`] rounded to f64.
struct Coefficients<const K: usize> {
    f: [[f64; K]; K],
    g: [f64; K],
}

impl<const K: usize> Coefficients<K> {
    fn new(transition: &Transition<K>) -> Self {
        Self { f: transition.f.map(|row| row.map(Double::to_f64)), g: transition.g.map(Double::to_f64) }
    }

    fn advance(&self, states: &mut [f64; K], u: f64) {
        let old = *states;
        for (a, state) in states.iter_mut().enumerate() {
            *state = self.g[a] * u + self.f[a].iter().zip(&old).map(|(f, s)| f * s).sum::<f64>();
        }
    }
}
