//! What certificates are judged by: optimizers run, and singular values found, in 106-bit arithmetic that shares no line
//! with the library.

use dpmf::{Average, Optimizer};
use std::ops::{Add, Div, Mul, Neg, Sub};

/// `0 + 1`: an unevaluated sum.
#[derive(Clone, Copy, Debug)]
pub struct Real(pub f64, pub f64);

impl Real {
    pub const ZERO: Self = Self(0.0, 0.0);
    pub const ONE: Self = Self(1.0, 0.0);

    fn renormalised(a: f64, b: f64) -> Self {
        let sum = a + b;
        let part = sum - a;
        Self(sum, (a - (sum - part)) + (b - part))
    }

    pub fn sqrt(self) -> Self {
        if self.0 <= 0.0 {
            return Self::ZERO;
        }
        let mut root = Self(self.0.sqrt(), 0.0);
        for _ in 0..2 {
            root = (root + self / root) * Self(0.5, 0.0);
        }
        root
    }

    pub fn abs(self) -> Self {
        if self.0 < 0.0 { -self } else { self }
    }

    pub fn less(self, other: Self) -> bool {
        (self - other).0 < 0.0
    }

    pub fn max(self, other: Self) -> Self {
        if self.less(other) { other } else { self }
    }
}

impl From<f64> for Real {
    fn from(x: f64) -> Self {
        Self(x, 0.0)
    }
}

impl Neg for Real {
    type Output = Self;

    fn neg(self) -> Self {
        Self(-self.0, -self.1)
    }
}

impl Add for Real {
    type Output = Self;

    fn add(self, y: Self) -> Self {
        let (high, low) = (Self::renormalised(self.0, y.0), Self::renormalised(self.1, y.1));
        let sum = Self::renormalised(high.0, high.1 + low.0);
        Self::renormalised(sum.0, sum.1 + low.1)
    }
}

impl Sub for Real {
    type Output = Self;

    fn sub(self, y: Self) -> Self {
        self + -y
    }
}

impl Mul for Real {
    type Output = Self;

    fn mul(self, y: Self) -> Self {
        let product = self.0 * y.0;
        let error = self.0.mul_add(y.0, -product);
        Self::renormalised(product, error + (self.0 * y.1 + self.1 * y.0))
    }
}

impl Div for Real {
    type Output = Self;

    fn div(self, y: Self) -> Self {
        let first = Self(self.0 / y.0, 0.0);
        let second = Self((self - first * y).0 / y.0, 0.0);
        let third = Self((self - first * y - second * y).0 / y.0, 0.0);
        first + second + third
    }
}

impl std::iter::Sum for Real {
    fn sum<I: Iterator<Item = Self>>(terms: I) -> Self {
        terms.fold(Self::ZERO, Add::add)
    }
}

/// A matrix by columns.
pub type Columns = Vec<Vec<Real>>;

pub fn dot(a: &[Real], b: &[Real]) -> Real {
    a.iter().zip(b).map(|(a, b)| *a * *b).sum()
}

/// `A`, one column for each step: the optimizer, as its documentation defines it, run on a unit gradient.
pub fn matrix(rates: &[f64], optimizer: &Optimizer) -> Columns {
    let Optimizer { momentum, nesterov, weight_decay, coupled, average } = *optimizer;
    let (beta, lambda) = (Real::from(momentum), Real::from(weight_decay));
    let column = |j: usize| {
        let (mut m, mut psi, mut mean) = (Real::ZERO, Real::ZERO, Real::ZERO);
        (0..rates.len())
            .map(|i| {
                let unit = if i == j { Real::ONE } else { Real::ZERO };
                let g = if coupled { unit - lambda * psi } else { unit };
                m = beta * m + g;
                let step = if nesterov { g + beta * m } else { m };
                let keep = if coupled { Real::ONE } else { Real::ONE - Real::from(rates[i]) * lambda };
                psi = keep * psi + Real::from(rates[i]) * step;
                match average {
                    Average::None => psi,
                    Average::Uniform => {
                        mean = mean + (psi - mean) / Real::from(i as f64 + 1.0);
                        mean
                    }
                    Average::Ema(alpha) => {
                        mean = Real::from(alpha) * mean + (Real::ONE - Real::from(alpha)) * psi;
                        mean
                    }
                }
            })
            .collect()
    };
    (0..rates.len()).map(column).collect()
}

/// Singular values and right singular vectors (by columns) of `A D^{1/2}`, by one-sided Jacobi rotations.
pub fn svd(a: &Columns, v: &[f64]) -> (Vec<Real>, Columns) {
    let n = v.len();
    let scale = |(column, v): (&Vec<Real>, &f64)| {
        let root = Real::from(*v).sqrt();
        column.iter().map(|x| *x * root).collect::<Vec<_>>()
    };
    let mut g: Columns = a.iter().zip(v).map(scale).collect();
    let unit = |i: usize, j: usize| if i == j { Real::ONE } else { Real::ZERO };
    let mut w: Columns = (0..n).map(|j| (0..n).map(|i| unit(i, j)).collect()).collect();
    // Columns this small are what rounding left of parallel ones.
    let nothing = 1e-62 * g.iter().map(|column| dot(column, column).0).fold(0.0, f64::max);
    for _ in 0..60 {
        let mut rotated = false;
        for p in 0..n {
            for q in p + 1..n {
                let (a, b, c) = (dot(&g[p], &g[p]), dot(&g[q], &g[q]), dot(&g[p], &g[q]));
                if a.0.min(b.0) <= nothing || c.0.abs() <= 1e-29 * (a.0.sqrt() * b.0.sqrt()) {
                    continue;
                }
                rotated = true;
                let zeta = (b - a) / (c + c);
                let sign = if zeta.0 < 0.0 { -Real::ONE } else { Real::ONE };
                let t = sign / (zeta.abs() + (Real::ONE + zeta * zeta).sqrt());
                let cosine = Real::ONE / (Real::ONE + t * t).sqrt();
                let sine = cosine * t;
                for columns in [&mut g, &mut w] {
                    let (left, right) = columns.split_at_mut(q);
                    for (x, y) in left[p].iter_mut().zip(&mut right[0]) {
                        (*x, *y) = (cosine * *x - sine * *y, sine * *x + cosine * *y);
                    }
                }
            }
        }
        if !rotated {
            break;
        }
    }
    (g.iter().map(|column| dot(column, column).sqrt()).collect(), w)
}

/// What is true at a dual variable.
pub struct Truth {
    /// `(Σφ)²/Σv`.
    pub bound: Real,
    /// `max x · Σφ`: the loss of `X(v)/max x`, or what factorizations come close to where `X(v)` is singular.
    pub loss: Real,
}

/// Both at `v`, for the workload `a`.
pub fn truth(a: &Columns, v: &[f64]) -> Truth {
    let n = v.len();
    let sum: Real = v.iter().map(|&v| Real::from(v)).sum();
    let (sigma, w) = svd(a, v);
    let x = |i: usize| (0..n).map(|k| w[k][i] * w[k][i] * sigma[k]).sum::<Real>() / Real::from(v[i]);
    let largest = (0..n).map(x).fold(Real::ZERO, Real::max);
    let nuclear: Real = sigma.iter().copied().sum();
    Truth { bound: nuclear * nuclear / sum, loss: largest * nuclear }
}
