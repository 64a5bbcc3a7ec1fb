//! An adversary who looks at bits: at the grid that a release lies on, at its lowest bits, at its size.
//!
//! Every coordinate of a release is a game of its own: in one half the input is zero, in the other one unit's contribution
//! of the largest norm stands in that coordinate alone. What is counted are properties of the released f32 numbers that a
//! real number does not have. The event that tells the halves apart best is chosen on a part of the games and judged on the
//! others, so the bound is valid however many events were looked at.
//!
//! Noise that is made and added in floating point falls at once: small noise has many digits behind the point, and a sum with
//! something large has few. Exact noise must not.

use super::binomial::upper_limit;
use super::game::AuditRng;
use crate::accounting::Arithmetic;
use crate::error::{Error, Result};
use crate::mechanism::Mechanism;
use crate::noise::{NoiseKey, Output, RunId};
use rand::{Rng, SeedableRng};
use rayon::prelude::*;
use serde::Serialize;

/// Releases of one stream.
const WIDTH: usize = 1 << 18;

/// Values of a property.
const BINS: usize = 512;

/// What is looked at: a name, what values mean, and the value of a number.
type Property = (&'static str, fn(f32) -> usize);

const PROPERTIES: [Property; 5] = [
    ("the finest power of two that it is a multiple of", granularity),
    ("its binary exponent", |y| (y.abs().to_bits() >> 23) as usize),
    ("its eight lowest bits", |y| (y.to_bits() & 0xff) as usize),
    ("the number of its lowest bits that are zero", |y| y.to_bits().trailing_zeros() as usize),
    ("the grid of the difference from the larger input", |y| granularity(y - 1.0)),
];

/// 200 more than `k` for the largest `2^k` that a number is a multiple of; 511 for zero.
fn granularity(y: f32) -> usize {
    let bits = y.abs().to_bits();
    if bits == 0 {
        return BINS - 1;
    }
    let (exponent, mantissa) = ((bits >> 23) as i32, bits & 0x7f_ffff);
    let (lowest, digits) =
        if exponent == 0 { (-149, mantissa) } else { (exponent - 150, mantissa | 1 << 23) };
    (200 + lowest + digits.trailing_zeros() as i32) as usize
}

/// What an audit of bits found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BitsReport {
    /// The numbers that the noise was made in.
    pub arithmetic: Arithmetic,
    /// Numbers that were released, half of them with each input.
    pub releases: u64,
    /// ε of the promise.
    pub epsilon: f64,
    /// δ of the promise.
    pub delta: f64,
    /// The event that tells the inputs apart best, in words.
    pub event: String,
    /// Its frequency under the input that it speaks for.
    pub frequency: f64,
    /// Its frequency under the other.
    pub other_frequency: f64,
    /// A lower bound on the δ that holds at ε.
    pub delta_lower: f64,
    /// Confidence of the bound.
    pub confidence: f64,
}

impl BitsReport {
    /// Whether the promise cannot hold.
    pub fn refuted(&self) -> bool {
        self.delta_lower > self.delta
    }
}

/// Counts of every value of every property, for both inputs.
#[derive(Clone)]
struct Counts {
    values: Vec<[[u64; BINS]; 2]>,
    games: [u64; 2],
}

impl Counts {
    fn new() -> Self {
        Self { values: vec![[[0; BINS]; 2]; PROPERTIES.len()], games: [0; 2] }
    }

    fn take(&mut self, side: usize, y: f32, unit: f32) {
        self.games[side] += 1;
        // The properties are of numbers in units of the clip, a power of two.
        let y = y / unit;
        for ((_, value), counts) in PROPERTIES.iter().zip(&mut self.values) {
            counts[side][value(y).min(BINS - 1)] += 1;
        }
    }

    fn join(mut self, other: Self) -> Self {
        for side in 0..2 {
            for (mine, theirs) in self.values.iter_mut().zip(&other.values) {
                mine[side].iter_mut().zip(&theirs[side]).for_each(|(a, b)| *a += b);
            }
            self.games[side] += other.games[side];
        }
        self
    }

    /// How often the values of an event came, for both inputs.
    fn of(&self, event: &Event) -> [u64; 2] {
        let counts = &self.values[event.property];
        [0, 1].map(|side| event.values().map(|value| counts[side][value]).sum())
    }
}

/// That a property has a certain value, or one up to it, or one from it on.
#[derive(Clone, Copy, Debug)]
struct Event {
    property: usize,
    first: usize,
    last: usize,
    /// The input that it speaks for.
    side: usize,
}

impl Event {
    fn values(&self) -> std::ops::RangeInclusive<usize> {
        self.first..=self.last
    }

    fn all() -> impl Iterator<Item = Event> {
        (0..PROPERTIES.len()).flat_map(|property| {
            (0..BINS).flat_map(move |value| {
                [(value, value), (0, value), (value, BINS - 1)]
                    .into_iter()
                    .flat_map(move |(first, last)| [0, 1].map(|side| Event { property, first, last, side }))
            })
        })
    }

    fn words(&self) -> String {
        let name = PROPERTIES[self.property].0;
        let value = |bin: usize| match self.property {
            0 | 4 if bin == BINS - 1 => "zero".into(),
            0 | 4 => format!("2^{} clips", bin as i64 - 200),
            1 => format!("{}", bin as i64 - 127),
            _ => bin.to_string(),
        };
        let input = ["zero", "one contribution"][self.side];
        let range = match (self.first, self.last) {
            (first, last) if first == last => format!("is {}", value(first)),
            (0, last) => format!("is at most {}", value(last)),
            (first, _) => format!("is at least {}", value(first)),
        };
        format!("{name} {range}, which indicates an input of {input}")
    }
}

/// Looks for an event of bits that refutes the promise of a calibrated mechanism at one of its steps.
///
/// Guarantee: a promise that holds is refuted with probability at most `1 − confidence`.
/// Cost: that of so many releases, some ten nanoseconds each.
/// Errors: [`Error::Unsupported`] for a mechanism that is not calibrated or whose clip leaves the range of f32; fewer than
/// a thousand releases, a step beyond the last; those of [`Mechanism::stream`].
pub fn audit_bits(
    mechanism: &Mechanism,
    arithmetic: Arithmetic,
    step: usize,
    releases: u64,
    confidence: f64,
    seed: u64,
) -> Result<BitsReport> {
    let Some(statement) = mechanism.privacy() else {
        return Err(Error::Unsupported {
            what: "auditing an uncalibrated mechanism".into(),
            hint: "it has no guarantee yet: calibrate it first",
        });
    };
    if releases < 1000 {
        return Err(Error::argument("releases", releases, "at least a thousand are needed"));
    }
    if step >= mechanism.workload().steps() {
        return Err(Error::argument("step", step, "it must be below the number of steps of the mechanism"));
    }
    if !(confidence > 0.0 && confidence < 1.0) {
        return Err(Error::argument("confidence", confidence, "it must lie between 0 and 1"));
    }
    let calibration = statement.calibration();
    let (epsilon, delta, clip) = (calibration.epsilon(), calibration.delta(), calibration.terms().clip);
    // The largest power of two within the clip: an input that f32 holds, and neighbours may have.
    let unit = 2.0_f64.powi(clip.log2().floor() as i32) as f32;
    if !unit.is_normal() {
        return Err(Error::argument("clip", clip, "it must be within the range of f32"));
    }
    let mut rng = AuditRng::seed_from_u64(seed);
    let seeds: Vec<u64> = (0..releases.div_ceil(WIDTH as u64)).map(|_| rng.next_u64()).collect();
    let batch = |(index, seed): (usize, &u64)| -> Result<[Counts; 2]> {
        let width = (releases - index as u64 * WIDTH as u64).min(WIDTH as u64);
        let (key, run) = (NoiseKey::from_seed(*seed), RunId([0; 16]));
        let mut stream = mechanism.stream(&key, run, 0..width, Output::Gradient, arithmetic)?;
        stream.skip_to(step)?;
        // Neighbouring coordinates come from different pairs of draws, whatever their inputs.
        let side = |j: usize| j / 2 % 2;
        let mut row: Vec<f32> = (0..width as usize).map(|j| side(j) as f32 * unit).collect();
        stream.add_next(&mut row)?;
        let mut counts = [Counts::new(), Counts::new()];
        for (j, y) in row.into_iter().enumerate() {
            counts[j % 2].take(side(j), y, unit);
        }
        Ok(counts)
    };
    let empty = || [Counts::new(), Counts::new()];
    let join = |[a, b]: [Counts; 2], [c, d]: [Counts; 2]| Ok([a.join(c), b.join(d)]);
    let [chosen_on, judged_on] = seeds.par_iter().enumerate().map(batch).try_reduce(empty, join)?;

    let advantage = |event: &Event| {
        let hits = chosen_on.of(event);
        let frequency = |side: usize| hits[side] as f64 / chosen_on.games[side].max(1) as f64;
        frequency(event.side) - epsilon.exp() * frequency(1 - event.side)
    };
    let mut best = Event { property: 0, first: 0, last: 0, side: 0 };
    for event in Event::all() {
        if advantage(&event) > advantage(&best) {
            best = event;
        }
    }
    let (hits, games) = (judged_on.of(&best), judged_on.games);
    let (own, other) = (best.side, 1 - best.side);
    let tail = 0.5 * (1.0 - confidence);
    let at_least = 1.0 - upper_limit(games[own] - hits[own], games[own], tail);
    let at_most = upper_limit(hits[other], games[other], tail);
    Ok(BitsReport {
        arithmetic,
        releases,
        epsilon,
        delta,
        event: if advantage(&best) > 0.0 {
            best.words()
        } else {
            "no event tells the inputs apart beyond ε".into()
        },
        frequency: hits[own] as f64 / games[own].max(1) as f64,
        other_frequency: hits[other] as f64 / games[other].max(1) as f64,
        delta_lower: (at_least - epsilon.exp() * at_most).max(0.0),
        confidence,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::factorize::quiet;
    use crate::{Participation, Problem, Workload};

    fn mechanism(name: &str, epsilon: f64, clip: f64) -> Mechanism {
        let problem = Problem::new(Workload::prefix_sum(5).unwrap(), Participation::default()).unwrap();
        let mechanism = problem.mechanism(name.parse().unwrap(), &mut quiet).unwrap();
        mechanism.calibrated(epsilon, 1e-6, clip, Default::default()).unwrap()
    }

    #[test]
    fn granularities() {
        for (y, k) in [(1.0, 0), (0.5, -1), (-6.0, 1), (1.0 + f32::EPSILON, -23), (f32::from_bits(1), -149)] {
            assert_eq!(granularity(y) as i64 - 200, k, "{y}");
        }
        assert_eq!(granularity(0.0), BINS - 1);
    }

    /// The attack of one coordinate, clip 1 and (2, 1e-6): the sum of something large has few digits.
    #[test]
    fn float_noise_falls_and_exact_noise_stands() {
        for (name, clip, step) in [("independent", 1.0, 0), ("optimal", 0.3, 3), ("honaker-online", 7.0, 2)] {
            let mechanism = mechanism(name, 2.0, clip);
            let report = |arithmetic| audit_bits(&mechanism, arithmetic, step, 400_000, 0.999, 1).unwrap();
            let float = report(Arithmetic::Float);
            assert!(float.refuted() && float.delta_lower > 0.02, "{name}: {float:?}");
            let exact = report(Arithmetic::Exact);
            assert!(!exact.refuted(), "{name}: {exact:?}");
        }
    }

    /// The chosen event may be the best of thousands; it is judged on other games. Power: the same with a grid that gives
    /// one input away, however little.
    #[test]
    fn the_bound_is_valid_after_choosing() {
        let loose = mechanism("independent", 0.01, 1.0);
        let refuted = (0..40)
            .filter(|&seed| audit_bits(&loose, Arithmetic::Exact, 0, 2000, 0.9, seed).unwrap().refuted())
            .count();
        // At most a tenth are expected; 12 of 40 have a probability below 1e-3.
        assert!(refuted < 12, "{refuted}");
    }

    /// On 10⁸ releases.
    #[test]
    #[ignore = "a minute; scripts/slow"]
    fn a_hundred_million_releases() {
        let mechanism = mechanism("optimal", 2.0, 1.0);
        for arithmetic in [Arithmetic::Float, Arithmetic::Exact] {
            let report = audit_bits(&mechanism, arithmetic, 0, 100_000_000, 0.999, 0).unwrap();
            println!("{report:?}");
            assert_eq!(report.refuted(), arithmetic == Arithmetic::Float);
        }
    }

    #[test]
    fn bad_input_is_refused() {
        let mechanism = mechanism("tree", 2.0, 1.0);
        let audit = |step, releases, confidence| {
            audit_bits(&mechanism, Arithmetic::Exact, step, releases, confidence, 0).unwrap_err().kind()
        };
        assert_eq!(audit(5, 10_000, 0.9), "invalid-argument");
        assert_eq!(audit(0, 10, 0.9), "invalid-argument");
        assert_eq!(audit(0, 10_000, 1.0), "invalid-argument");
    }
}
