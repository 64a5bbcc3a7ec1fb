//! The distribution of a sum of losses, tilted, by the fast Fourier transform, and the curve read off it.
//!
//! The tilt puts the mass where δ is decided, so that the transform's error, which is small against the largest entry,
//! is small against δ, however small δ is. What is left out is bounded and counted:
//! - the transform and the powers, in the 2-norm: `‖fl(Fx) − Fx‖ ≤ O(u log N) ‖Fx‖`, times the number of rounds, which a
//!   product of coefficients of modulus at most 1 adds up;
//! - the tilted mass outside the window, which wraps around: Chernoff's bound on the very atoms;
//! - rounding of sums, normalisations and exponents, relatively.
//!
//! Reference: Theorem 24.2 of \[Hig02\] for the first.

use super::Bracket;
use super::round::{Atoms, UNIT};
use rustfft::FftPlanner;
use rustfft::num_complex::Complex64;
use std::cell::RefCell;

thread_local! {
    /// Twiddle factors, kept from one question to the next.
    static PLANNER: RefCell<FftPlanner<f64>> = RefCell::new(FftPlanner::new());
}

/// The tail of one composed measure on the window, in units of `e^{scale − θs}`.
struct Tail {
    /// `B_j = Σ_{k ≥ j} e^{−(θ+1)(s_k − s_j)} G_k`.
    geometric: Vec<f64>,
    /// `C_j = Σ_{k ≥ j} (1 − e^{−(s_k − s_j)}) e^{−θ(s_k − s_j)} G_k`.
    hockey: Vec<f64>,
    /// `ln E e^{θS}`.
    scale: f64,
    /// Bound on the error of the sums, in the same units.
    error: f64,
    /// What lies outside: added to, or taken from, every δ.
    outside: f64,
}

/// A composition, seen from above and from below.
pub(super) struct Composition {
    theta: f64,
    h: f64,
    /// The loss of entry 0.
    start: f64,
    upper: Tail,
    lower: Tail,
    /// Bound on the relative error of everything that is multiplied.
    relative: f64,
    /// Bound on the error of a loss.
    loss_error: f64,
}

/// A sum of positive terms to two units in the last place.
fn compensated(terms: &[f64]) -> f64 {
    let (mut sum, mut lost) = (0.0_f64, 0.0);
    for &term in terms {
        let next = sum + term;
        lost += if sum >= term { (sum - next) + term } else { (term - next) + sum };
        sum = next;
    }
    sum + lost
}

/// `x^n` by repeated squaring.
fn power(mut x: Complex64, mut n: u64) -> Complex64 {
    let mut product = Complex64::new(1.0, 0.0);
    loop {
        if n & 1 == 1 {
            product *= x;
        }
        n >>= 1;
        if n == 0 {
            return product;
        }
        x = x * x;
    }
}

/// The same, zero where it is below 1e-43.
fn power_or_zero(x: Complex64, n: u64) -> Complex64 {
    if n as f64 * libm::log(x.norm_sqr()) < -200.0 { Complex64::new(0.0, 0.0) } else { power(x, n) }
}

/// Bound on the mass at or beyond `limit`, an index, of the sum of the given atoms; `guess` is a good exponent.
fn chernoff(phases: &[(Atoms, u64)], masses: &[Vec<f64>], limit: f64, guess: f64) -> f64 {
    let bound = |t: f64| {
        let mut exponent = -t * limit;
        for ((atoms, rounds), mass) in phases.iter().zip(masses) {
            let sum: f64 = atoms.index.iter().zip(mass).map(|(&i, &m)| m * libm::exp(t * i as f64)).sum();
            exponent += *rounds as f64 * libm::log(sum);
        }
        exponent
    };
    let end = |atoms: &Atoms| {
        let ends = (atoms.index.first().copied().unwrap_or(0), atoms.index.last().copied().unwrap_or(0));
        if guess > 0.0 { ends.0.max(ends.1) } else { ends.0.min(ends.1) }
    };
    let furthest: f64 = phases.iter().map(|(atoms, n)| end(atoms) as f64 * *n as f64).sum();
    if (limit - furthest) * guess > 0.0 {
        return 0.0;
    }
    let best = [0.8, 1.0, 1.25].into_iter().map(|f| bound(f * guess)).filter(|b| !b.is_nan());
    (libm::exp(best.fold(f64::INFINITY, f64::min)) * 1.01).min(1.0)
}

/// The window of a composition: how much of it lies below the mean, and exponents for what lies above and below it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub size: usize,
    pub below: f64,
    pub exponents: (f64, f64),
}

impl Composition {
    /// Composes `rounds` of each phase on a window.
    pub fn new(phases: &[(Atoms, u64)], theta: f64, h: f64, window: Window) -> Self {
        let Window { size, below, exponents } = window;
        let rounds: f64 = phases.iter().map(|&(_, n)| n as f64).sum();
        let (mut uppers, mut lowers) = (Vec::new(), Vec::new());
        // Of the upper and of the lower measure: ln of the mass; of the upper, the mean in steps.
        let (mut scale, mut mean) = ([0.0; 2], 0.0);
        for (atoms, n) in phases {
            let n = *n as f64;
            for (k, (given, list)) in
                [(&atoms.upper, &mut uppers), (&atoms.lower, &mut lowers)].into_iter().enumerate()
            {
                let total = compensated(given);
                let mass: Vec<f64> = if total > 0.0 {
                    given.iter().map(|m| m / total).collect()
                } else {
                    vec![0.0; given.len()]
                };
                scale[k] += n * (libm::log(total.max(1e-300)) + atoms.shift);
                if k == 0 {
                    mean += n * mass.iter().zip(&atoms.index).map(|(m, &i)| m * i as f64).sum::<f64>();
                }
                list.push(mass);
            }
        }
        let first = (mean - below * size as f64).floor();
        let end = first + size as f64;
        let centre: f64 = phases.iter().map(|(a, n)| a.centre * *n as f64).sum();
        let centre_size: f64 = phases.iter().map(|(a, n)| a.centre.abs() * *n as f64).sum();

        let (values, norms) = convolved(phases, [&uppers, &lowers], size);
        let transform = 16.0 * UNIT * (size as f64).log2();
        let mut noise = 0.0;
        let mut growth = 0.0;
        for ((_, n), norm) in phases.iter().zip(&norms) {
            noise += *n as f64 * transform * norm;
            // One coefficient is off by no more than so much of the sum of all entries, which is at most 2.
            growth += *n as f64 * transform * 2.0;
        }
        let norm = values.iter().map(Complex64::norm_sqr).sum::<f64>().sqrt();
        let noise = noise * libm::exp(growth) + (16.0 * rounds * UNIT + 2.0 * transform) * norm + 1e-30;

        let kernel = largest(theta);
        let kernel_norm = {
            let area = (0.5 / theta).min(0.25 / (theta * theta * theta));
            (area / h + 2.0 * kernel * kernel).min(size as f64 * kernel * kernel).sqrt()
        };
        let start = centre + first * h;
        let top = start + size as f64 * h;
        let infinite: f64 = phases.iter().map(|(a, n)| a.infinite * *n as f64).sum();
        let excess: f64 = phases.iter().map(|(a, n)| a.excess * *n as f64).sum();
        let tail = |k: usize, masses: &[Vec<f64>]| {
            let beyond = chernoff(phases, masses, end, exponents.0 * h);
            let under = chernoff(phases, masses, first - 1.0, exponents.1 * h);
            let (d, e) = (libm::exp(-theta * h), -libm::expm1(-h));
            let (mut geometric, mut hockey) = (vec![0.0; size], vec![0.0; size]);
            let (mut b, mut c) = (0.0, 0.0);
            for j in (0..size).rev() {
                let index = (first as i64 + j as i64).rem_euclid(size as i64) as usize;
                let value = if k == 0 { values[index].re } else { values[index].im };
                c = d * (c + e * b);
                b = value + d * (1.0 - e) * b;
                (geometric[j], hockey[j]) = (b, c);
            }
            // Above the window δ grows by no more than the mass there; what wraps in only adds to an upper end.
            let (wrapped, outside) = if k == 0 {
                (0.0, infinite + libm::exp(scale[k] - theta * top) * beyond)
            } else {
                ((beyond + under) * kernel, excess)
            };
            Tail { geometric, hockey, scale: scale[k], error: noise * kernel_norm + wrapped, outside }
        };
        let (upper, lower) = (tail(0, &uppers), tail(1, &lowers));
        let exponent = upper.scale.abs() + theta * (start.abs() + top.abs());
        let relative = 64.0 * rounds * UNIT + 16.0 * UNIT * (1.0 + exponent) + 8.0 * size as f64 * UNIT;
        let loss_error = 8.0 * UNIT * (centre_size + start.abs() + top.abs());
        Self { theta, h, start, upper, lower, relative, loss_error }
    }

    fn loss(&self, entry: usize) -> f64 {
        self.start + entry as f64 * self.h
    }

    /// δ at an ε of the cell below `entry`, from above.
    fn delta_above(&self, entry: usize, epsilon: f64) -> f64 {
        let tail = &self.upper;
        let u = (self.loss(entry) - epsilon).max(0.0);
        let error = tail.error * libm::exp(self.theta * u);
        let sum = tail.hockey[entry] - libm::expm1(-u) * tail.geometric[entry] + error;
        let delta = libm::exp(tail.scale - self.theta * self.loss(entry)) * sum * (1.0 + self.relative)
            + tail.outside;
        // What is not a number proves nothing; a negative sum only says that the error was overestimated.
        if delta.is_nan() { f64::INFINITY } else { delta.max(tail.outside) }
    }

    /// The same from below.
    fn delta_below(&self, entry: usize, epsilon: f64) -> f64 {
        let tail = &self.lower;
        let u = (self.loss(entry) - epsilon).max(0.0);
        let error = tail.error * libm::exp(self.theta * u);
        let sum = tail.hockey[entry] - libm::expm1(-u) * tail.geometric[entry] - error;
        (libm::exp(tail.scale - self.theta * self.loss(entry)) * sum.max(0.0) * (1.0 - self.relative)
            - tail.outside)
            .max(0.0)
    }

    /// δ at ε.
    pub fn delta(&self, epsilon: f64) -> Bracket {
        let entry = |epsilon: f64| ((epsilon - self.start) / self.h).ceil();
        let last = (self.upper.hockey.len() - 1) as f64;
        let (low, high) = (epsilon + self.loss_error, epsilon - self.loss_error);
        // Below the window nothing is proved from above; beyond it only what is outside counts.
        let (entry_above, entry_below) = (entry(high), entry(low));
        let upper = if entry_above < 1.0 {
            1.0
        } else {
            self.delta_above(entry_above.min(last) as usize, high.min(self.loss(last as usize)))
        };
        let lower =
            if entry_below > last { 0.0 } else { self.delta_below(entry_below.max(0.0) as usize, low) };
        Bracket { lower: lower.min(1.0), upper: upper.min(1.0) }
    }

    /// ε at δ.
    pub fn epsilon(&self, delta: f64) -> Bracket {
        let size = self.upper.hockey.len();
        // The first entry whose δ from above is small enough: it was seen to be, even if rounding is not monotone.
        let (mut no, mut yes) = (0, size);
        while yes - no > 1 {
            let middle = usize::midpoint(no, yes);
            if self.delta_above(middle, self.loss(middle)) <= delta {
                yes = middle;
            } else {
                no = middle;
            }
        }
        let upper = if yes == size {
            f64::INFINITY
        } else {
            self.within(yes, |epsilon| self.delta_above(yes, epsilon) <= delta) + self.loss_error
        };
        // From there down, ever faster, to an entry whose δ from below is still large enough: far below, where there is no
        // tilted mass, errors hide it.
        let mut no = yes;
        let mut stride = 1;
        let mut yes = no.saturating_sub(stride);
        while yes > 0 && self.delta_below(yes, self.loss(yes)) < delta {
            no = yes;
            stride *= 2;
            yes = no.saturating_sub(stride);
        }
        while no - yes > 1 {
            let middle = usize::midpoint(no, yes);
            if self.delta_below(middle, self.loss(middle)) >= delta {
                yes = middle;
            } else {
                no = middle;
            }
        }
        let lower = if yes == 0 || no == size {
            f64::NEG_INFINITY
        } else {
            let loss = self.within(no, |epsilon| self.delta_below(no, epsilon) < delta);
            // The bisection ends where the δ is seen to be too small; one part in 2²⁰ of a cell below it was not.
            let below = (loss - self.h / 1_048_576.0).max(self.loss(yes));
            if self.delta_below(no, below) >= delta {
                below - self.loss_error
            } else {
                self.loss(yes) - self.loss_error
            }
        };
        Bracket { lower: lower.max(0.0), upper: if upper.is_nan() { f64::INFINITY } else { upper.max(0.0) } }
    }

    /// The least ε in the cell below `entry` seen to satisfy a condition that its upper end satisfies.
    fn within(&self, entry: usize, holds: impl Fn(f64) -> bool) -> f64 {
        let (mut no, mut yes) = (self.loss(entry) - self.h, self.loss(entry));
        for _ in 0..20 {
            let middle = 0.5 * (no + yes);
            if holds(middle) {
                yes = middle;
            } else {
                no = middle;
            }
        }
        yes
    }
}

/// Bound on `(1 − e^{−u}) e^{−θu}`.
fn largest(theta: f64) -> f64 {
    1.0 / (1.0 + theta)
}

/// The composed measures, upper as real and lower as imaginary part, and for every phase the 2-norm of its own pair.
fn convolved(phases: &[(Atoms, u64)], masses: [&[Vec<f64>]; 2], size: usize) -> (Vec<Complex64>, Vec<f64>) {
    let (forward, inverse) =
        PLANNER.with_borrow_mut(|p| (p.plan_fft_forward(size), p.plan_fft_inverse(size)));
    let mut scratch =
        vec![Complex64::default(); forward.get_inplace_scratch_len().max(inverse.get_inplace_scratch_len())];
    let mut spectrum: Vec<(Complex64, Complex64)> = Vec::new();
    let mut norms = Vec::with_capacity(phases.len());
    let mut buffer = vec![Complex64::default(); size];
    let half = Complex64::new(0.5, 0.0);
    for (k, (atoms, rounds)) in phases.iter().enumerate() {
        buffer.fill(Complex64::default());
        for ((&index, &upper), &lower) in atoms.index.iter().zip(&masses[0][k]).zip(&masses[1][k]) {
            buffer[index.rem_euclid(size as i64) as usize] += Complex64::new(upper, lower);
        }
        norms.push(buffer.iter().map(Complex64::norm_sqr).sum::<f64>().sqrt());
        forward.process_with_scratch(&mut buffer, &mut scratch);
        for j in 0..=size / 2 {
            let (a, b) = (buffer[j], buffer[(size - j) % size].conj());
            // The transforms of the real and of the imaginary part.
            let real = power_or_zero((a + b) * half, *rounds);
            let imaginary = power_or_zero((a - b) * Complex64::new(0.0, -0.5), *rounds);
            if k == 0 {
                spectrum.push((real, imaginary));
            } else {
                spectrum[j].0 *= real;
                spectrum[j].1 *= imaginary;
            }
        }
    }
    let i = Complex64::new(0.0, 1.0);
    let over = 1.0 / size as f64;
    for (j, &(real, imaginary)) in spectrum.iter().enumerate() {
        buffer[j] = (real + i * imaginary) * over;
        if j > 0 {
            buffer[size - j] = (real.conj() + i * imaginary.conj()) * over;
        }
    }
    inverse.process_with_scratch(&mut buffer, &mut scratch);
    (buffer, norms)
}
