//! Statistics of the Gaussian field, with fixed keys.
//!
//! Every test has size α = 1e-6 and must reject what it is there to find: a scale wrong by 5 %, a correlation
//! of 0.05. `cargo test --test noise_field -- --ignored` draws 10⁸ numbers instead of 2·10⁶.
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

use dpmf::form::StateSpace;
use dpmf::noise::{Arithmetic, Field, NoiseKey, Output, RunId};
use dpmf::{Form, Mechanism, Participation, Workload};
use rayon::prelude::*;

const ALPHA: f64 = 1e-6;
/// Two-sided normal quantile of [`ALPHA`].
const QUANTILE: f64 = 4.8916;
const BINS: usize = 1 << 16;
const REACH: f64 = 16.0;

fn field(seed: u64) -> Field {
    let form = Form::StateSpace(StateSpace::independent(1).unwrap());
    let workload = Workload::prefix_sum(1).unwrap();
    let mechanism = Mechanism::new(workload, &form, Participation::default()).unwrap();
    let key = NoiseKey::from_seed(seed);
    Field::new(
        mechanism.unit_stream(&key, RunId([0; 16]), 0..1, Output::Gradient, Arithmetic::Float).unwrap().key(),
    )
}

/// `P(Z > x)`, by the series of the error function or the continued fraction of its complement.
fn upper_tail(x: f64) -> f64 {
    let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    if x < 0.0 {
        1.0 - upper_tail(-x)
    } else if x < 4.0 {
        let (mut term, mut sum, mut k) = (x, x, 1.0);
        while term > 1e-18 * sum {
            k += 2.0;
            term *= x * x / k;
            sum += term;
        }
        0.5 - density * sum
    } else {
        density / (1..200).rev().fold(x, |fraction, k| x + f64::from(k) / fraction)
    }
}

struct Sample {
    count: f64,
    powers: [f64; 4],
    bins: Vec<u64>,
    largest: f64,
}

impl Sample {
    fn empty() -> Self {
        Self { count: 0.0, powers: [0.0; 4], bins: vec![0; BINS], largest: 0.0 }
    }

    fn push(&mut self, values: &[f32], scale: f64) {
        for &value in values {
            let x = f64::from(value) * scale;
            self.powers[0] += x;
            self.powers[1] += x * x;
            self.powers[2] += x * x * x;
            self.powers[3] += x * x * x * x;
            self.bins[((x + REACH) * (BINS as f64 / (2.0 * REACH))) as usize] += 1;
            self.largest = self.largest.max(x.abs());
        }
        self.count += values.len() as f64;
    }

    fn merge(mut self, other: Self) -> Self {
        self.count += other.count;
        self.powers.iter_mut().zip(other.powers).for_each(|(a, b)| *a += b);
        self.bins.iter_mut().zip(other.bins).for_each(|(a, b)| *a += b);
        self.largest = self.largest.max(other.largest);
        self
    }

    fn draw(count: usize, scale: f64) -> Self {
        let (field, chunk) = (field(11), 1 << 16);
        (0..count / chunk)
            .into_par_iter()
            .fold(Self::empty, |mut sample, i| {
                let mut z = vec![0.0; chunk];
                // Rows of 2²⁰ coordinates, so that both addresses vary.
                field.row((i / 16) as u64).fill(((i % 16) * chunk) as u64, &mut z);
                sample.push(&z, scale);
                sample
            })
            .reduce(Self::empty, Self::merge)
    }

    fn edge(bin: usize) -> f64 {
        bin as f64 * (2.0 * REACH / BINS as f64) - REACH
    }

    /// Each statistic over its critical value: above 1 rejects.
    fn statistics(&self) -> Vec<(String, f64)> {
        let n = self.count;
        // Variances of x, x², x³, x⁴ are 1, 2, 15, 96.
        let moments = [(0.0, 1.0), (1.0, 2.0), (0.0, 15.0), (3.0, 96.0)];
        let mut all: Vec<_> = (0..4)
            .map(|k| {
                let (mean, variance): (f64, f64) = moments[k];
                let score = (self.powers[k] / n - mean) / (variance / n).sqrt();
                (format!("moment {}", k + 1), score.abs() / QUANTILE)
            })
            .collect();

        // On the edges of the bins the distance is at most the full one, so the size is at most α.
        let (mut below, mut distance) = (0.0, 0.0_f64);
        for bin in 0..BINS {
            below += self.bins[bin] as f64;
            distance = distance.max((below / n - (1.0 - upper_tail(Self::edge(bin + 1)))).abs());
        }
        all.push(("Kolmogorov-Smirnov".into(), distance * n.sqrt() / (-0.5 * (ALPHA / 2.0).ln()).sqrt()));

        // χ² over 512 cells on [−4, 4], normal approximation.
        let (low, high, cell) = ((12 * BINS) / 32, (20 * BINS) / 32, 32);
        let mut chi = -1.0;
        for first in (low..high).step_by(cell) {
            let observed = self.bins[first..first + cell].iter().sum::<u64>() as f64;
            let expected = n * (upper_tail(Self::edge(first)) - upper_tail(Self::edge(first + cell)));
            chi += (observed - expected).powi(2) / expected - 1.0;
        }
        all.push(("chi-squared".into(), chi / (2.0 * 512.0_f64).sqrt() / QUANTILE));

        for threshold in [2.0, 3.0, 4.0, 5.0] {
            let expected = 2.0 * n * upper_tail(threshold);
            let outer = ((REACH + threshold) * BINS as f64 / (2.0 * REACH)) as usize;
            let observed: u64 = self.bins[outer..].iter().chain(&self.bins[..BINS - outer]).sum();
            if expected > 30.0 {
                let score = (observed as f64 - expected).abs() / expected.sqrt();
                all.push((format!("beyond {threshold}"), score / QUANTILE));
            }
        }
        all
    }

    fn rejected(&self) -> Vec<String> {
        let all = self.statistics();
        all.iter()
            .filter(|(_, ratio)| *ratio > 1.0)
            .map(|(name, ratio)| format!("{name}: {ratio:.2}"))
            .collect()
    }
}

#[test]
fn the_reference_tail_is_right() {
    let tabulated = [(0.0, 0.5), (1.0, 0.158_655_253_931_457), (6.0, 9.865_876_450_376_98e-10)];
    for (x, p) in tabulated.into_iter().chain([(8.5, 9.479_534_822_203_3e-18)]) {
        assert!((upper_tail(x) / p - 1.0).abs() < 1e-10, "{x}: {}", upper_tail(x));
    }
    // The two formulas meet.
    assert!((upper_tail(4.0 - 1e-12) / upper_tail(4.0) - 1.0).abs() < 1e-9);
}

#[test]
fn two_million_numbers_are_standard_normal() {
    let sample = Sample::draw(1 << 21, 1.0);
    assert_eq!(sample.rejected(), Vec::<String>::new(), "{:?}", sample.statistics());
}

#[test]
fn the_tests_have_power_against_a_scale_of_1_05() {
    let rejected = Sample::draw(1 << 21, 1.05).rejected();
    for name in ["moment 2", "moment 4", "Kolmogorov", "chi", "beyond 2", "beyond 3"] {
        assert!(rejected.iter().any(|r| r.starts_with(name)), "{name} does not reject: {rejected:?}");
    }
}

#[test]
#[ignore = "10⁸ draws: some seconds"]
fn a_hundred_million_numbers_are_standard_normal() {
    let sample = Sample::draw(100_000_000, 1.0);
    println!("{:?}, largest {}", sample.statistics(), sample.largest);
    assert_eq!(sample.rejected(), Vec::<String>::new(), "{:?}", sample.statistics());
    // The largest of 10⁸ lies below 5.2 with probability e⁻²⁰ and above 7.5 with 6e-6.
    assert!(sample.largest > 5.2 && sample.largest < 7.5, "{}", sample.largest);
}

/// Correlations of `f(x)` and `g(y)` for f, g ∈ {x, x²}, scaled to unit variance, over their critical value.
fn dependence(x: &[f32], y: &[f32]) -> f64 {
    let mut sums = [0.0; 4];
    for (&x, &y) in x.iter().zip(y) {
        let (x, y) = (f64::from(x), f64::from(y));
        let (p, q) = ((x * x - 1.0) / 2.0_f64.sqrt(), (y * y - 1.0) / 2.0_f64.sqrt());
        sums.iter_mut().zip([x * y, p * q, x * q, p * y]).for_each(|(s, v)| *s += v);
    }
    sums.iter().map(|s| s.abs() / (x.len() as f64).sqrt() / QUANTILE).fold(0.0, f64::max)
}

#[test]
fn rows_coordinates_and_keys_are_independent() {
    let n = 1 << 18;
    let fill = |seed: u64, t: u64| {
        let mut z = vec![0.0; n];
        field(seed).row(t).fill(0, &mut z);
        z
    };
    let base = fill(1, 0);
    // 1: neighbours; 16: the partner of a pair; 32: the next group; 480: the next batch of the cipher.
    for lag in [1, 2, 8, 15, 16, 17, 31, 32, 64, 480, 960] {
        assert!(dependence(&base[lag..], &base) < 1.0, "lag {lag}: {}", dependence(&base[lag..], &base));
    }
    let partners = |z: &[f32], half: usize| -> Vec<f32> {
        z.as_chunks::<32>().0.iter().flat_map(|group| group[16 * half..][..16].to_vec()).collect()
    };
    let (cosines, sines) = (partners(&base, 0), partners(&base, 1));
    assert!(dependence(&cosines, &sines) < 1.0);
    for t in [1, 2, 256, 1 << 32] {
        assert!(dependence(&fill(1, t), &base) < 1.0, "row {t}");
    }
    assert!(dependence(&fill(2, 0), &base) < 1.0);

    let other = fill(3, 0);
    let mixed: Vec<f32> = base.iter().zip(&other).map(|(x, y)| 0.9975_f32.sqrt() * y + 0.05 * x).collect();
    assert!(dependence(&mixed, &base) > 1.0, "no power");
    // Signs apart, magnitudes shared: what two pairs with one radius would look like.
    let signed: Vec<f32> = base.iter().zip(&other).map(|(x, y)| x.copysign(*y)).collect();
    assert!(dependence(&signed, &base) > 1.0, "no power");
}
