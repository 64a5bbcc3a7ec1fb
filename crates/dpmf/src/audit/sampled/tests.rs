//! Samplers that keep to their scheme keep their promise; those that do not are caught.

use super::super::tests::inverse;
use super::*;
use crate::accounting::{Accountant, Allocation, Phase, PrivacyCurve};
use crate::audit::game::{play, rng};
use crate::family::Selector;
use crate::mechanism::{Conditions, Mechanism};
use crate::participation::Participation;
use crate::problem::{Goal, Problem};
use crate::workload::Workload;
use faer::Mat;

/// Where the promised curves are tested.
const EPSILONS: [f64; 6] = [0.25, 0.5, 1.0, 1.5, 2.0, 3.0];

fn curve(delta_at: impl Fn(f64) -> Result<f64>) -> Vec<CurvePoint> {
    EPSILONS.into_iter().map(|epsilon| CurvePoint { epsilon, delta: delta_at(epsilon).unwrap() }).collect()
}

/// Two rounds of a Poisson-sampled Gaussian of unit sensitivity.
fn poisson_twice(rate: f64, s: f64) -> Vec<CurvePoint> {
    let phase = Phase { noise_multiplier: s, rate, rounds: 2 };
    let exact = PrivacyCurve::poisson(&[phase], Adjacency::default()).unwrap();
    curve(|epsilon| exact.delta(epsilon))
}

/// Two bins, by the Gram matrix of what a unit of either adds up to.
fn two_bins(c: &Mat<f64>, s: f64) -> Vec<CurvePoint> {
    let sum = |phase: usize| -> Vec<f64> {
        let n = c.ncols();
        (0..n).map(|row| (phase..n).step_by(2).map(|column| c[(row, column)]).sum()).collect()
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    let (first, second) = (sum(0), sum(1));
    let across = dot(&first, &second);
    let bins = Allocation::new(2, vec![dot(&first, &first), across, across, dot(&second, &second)]).unwrap();
    curve(|epsilon| bins.delta(s, epsilon))
}

/// A lower-triangular matrix by its columns from the diagonal on, each scaled to norm 1.
fn columns<const N: usize>(columns: [&[f64]; N]) -> Mat<f64> {
    Mat::from_fn(N, N, |i, j| {
        let norm = columns[j].iter().map(|x| x * x).sum::<f64>().sqrt();
        i.checked_sub(j).and_then(|lag| columns[j].get(lag)).map_or(0.0, |x| x / norm)
    })
}

/// Two bands, of which those of steps 1 and 2 almost coincide: steps that no unit of one of two parts has both of.
fn two_bands() -> Mat<f64> {
    columns([&[1.0, 0.2], &[0.2, 1.0], &[1.0, 0.2], &[1.0]])
}

/// Planted: the part, or bin, of a unit is drawn anew in every epoch.
struct Redrawn {
    parts: usize,
    steps: usize,
    rate: f64,
    public: bool,
}

impl Lottery for Redrawn {
    fn draw(&self, rng: &mut AuditRng) -> Result<Draw> {
        let epochs = (0..self.steps).step_by(self.parts);
        let drawn: Vec<usize> = epochs.map(|start| start + rng.next_u32() as usize % self.parts).collect();
        let possible = if self.public { drawn.clone() } else { (0..self.steps).collect() };
        let takes = |_: &usize| f64::from(rng.next_u32()) < self.rate * 2.0_f64.powi(32);
        Ok(Draw { possible, turns: drawn.into_iter().filter(takes).collect() })
    }
}

/// What the adversary believes in: a sampling, or patterns.
enum Knowledge {
    Believes(&'static str),
    Knows(Vec<Vec<usize>>),
}

/// Plays 2·10⁵ games with a clip of 1.
fn report(
    c: &Mat<f64>,
    s: f64,
    lottery: &dyn Lottery,
    who: Knowledge,
    promise: &[CurvePoint],
) -> SampledReport {
    let mechanism = MatrixMechanism::new(inverse(c), s, 1).unwrap();
    let model = mechanism.noise_model().unwrap();
    let neighbours = Neighbours::drawn(c.ncols(), Adjacency::default(), 1.0).unwrap();
    let adversary = match who {
        Knowledge::Believes(sampling) => {
            SampledAdversary::of(sampling.parse().unwrap(), &model, &neighbours).unwrap()
        }
        Knowledge::Knows(patterns) => SampledAdversary::over(patterns, &model, &neighbours),
    };
    let options = AuditOptions { trials: 200_000, seed: 20_261_117, ..Default::default() };
    audit_sampled(&mechanism, &adversary, &neighbours, lottery, promise, options).unwrap()
}

fn deployed(sampling: &str, steps: usize) -> Deployed {
    Deployed::new(sampling.parse().unwrap(), steps).unwrap()
}

/// Not refuted, and so close that a bug would show: at some point nine tenths of the promised δ are seen.
fn assert_kept(report: &SampledReport) {
    assert!(!report.refuted(), "{report:?}");
    let seen = |row: &SampledRow| row.delta_lower / row.promise.delta;
    assert!(report.rows.iter().map(seen).fold(0.0, f64::max) > 0.9, "{report:?}");
}

#[test]
fn certain_coins_and_one_bin_are_the_plain_gaussian() {
    // Everybody in both of two steps: μ = √2/s.
    let (c, s) = (Mat::identity(2, 2), 1.5);
    let promise = |mu: f64| -> Vec<CurvePoint> {
        let curve = PrivacyCurve::gaussian(mu, Accountant::Exact).unwrap();
        promised_points(2.0, |epsilon| curve.delta(epsilon)).unwrap()
    };
    let mu = 2.0_f64.sqrt() / s;
    for sampling in ["cyclic-poisson:1:1", "balls-in-bins:1"] {
        let lottery = deployed(sampling, 2);
        assert_kept(&report(&c, s, &lottery, Knowledge::Believes(sampling), &promise(mu)));
        assert!(report(&c, s, &lottery, Knowledge::Believes(sampling), &promise(0.95 * mu)).refuted());
    }
}

#[test]
fn scores_are_likelihood_ratios() {
    // E exp(L) = 1 without the unit, E exp(−L) = 1 with it. Six deviations, α = 2e-9 a case.
    let c = two_bands();
    let neighbours = Neighbours::drawn(4, Adjacency::default(), 0.5).unwrap();
    let mechanism = MatrixMechanism::new(inverse(&c), 0.8, 2).unwrap();
    let model = mechanism.noise_model().unwrap();
    // Deviations of both means, for an adversary who believes in one sampling while another is played.
    let off = |believed: &str, played: &str| {
        let adversary = SampledAdversary::of(believed.parse().unwrap(), &model, &neighbours).unwrap();
        let lottery = deployed(played, 4);
        let games =
            play(&mechanism, &adversary, &neighbours, Some(&lottery), 40_000, &mut rng(3, 0)).unwrap();
        [false, true].map(|second| {
            let sign = if second { -1.0 } else { 1.0 };
            let ratios: Vec<f64> =
                games.iter().filter(|g| g.second == second).map(|g| (sign * g.score).exp()).collect();
            let count = ratios.len() as f64;
            let mean = ratios.iter().sum::<f64>() / count;
            let variance = ratios.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / count;
            (mean - 1.0) / (variance / count).sqrt()
        })
    };
    for (sampling, other) in [
        ("cyclic-poisson:2:0.4", "cyclic-poisson:2:0.8"),
        ("balls-in-bins:2", "balls-in-bins:1"),
        ("balls-in-bins:3", "balls-in-bins:1"),
        ("balls-in-bins:9", "balls-in-bins:3"),
    ] {
        let [without, with] = off(sampling, sampling);
        assert!(without.abs() < 6.0 && with.abs() < 6.0, "{sampling}: {without} {with}");
        // Power: it is no likelihood ratio where units take part more often.
        let [_, with] = off(sampling, other);
        assert!(with.abs() > 6.0, "{sampling}, played {other}: {with}");
    }
}

#[test]
fn twice_the_rate_is_caught() {
    let (c, s) = (two_bands(), 0.8);
    let promise = poisson_twice(0.3, s);
    let who = || Knowledge::Believes("cyclic-poisson:2:0.3");
    assert_kept(&report(&c, s, &deployed("cyclic-poisson:2:0.3", 4), who(), &promise));
    assert!(report(&c, s, &deployed("cyclic-poisson:2:0.6", 4), who(), &promise).refuted());
    // Power: one eighth more shows too.
    assert!(report(&c, s, &deployed("cyclic-poisson:2:0.3375", 4), who(), &promise).refuted());
}

#[test]
fn parts_redrawn_in_every_epoch_are_caught() {
    let (c, s) = (two_bands(), 0.8);
    let promise = poisson_twice(0.9, s);
    let who = || Knowledge::Believes("cyclic-poisson:2:0.9");
    assert_kept(&report(&c, s, &deployed("cyclic-poisson:2:0.9", 4), who(), &promise));
    let redrawn = Redrawn { parts: 2, steps: 4, rate: 0.9, public: true };
    assert!(report(&c, s, &redrawn, who(), &promise).refuted());
    // Where there is nothing to overlap, it does not matter.
    let independent = Mat::identity(4, 4);
    assert_kept(&report(&independent, s, &redrawn, who(), &promise));
}

#[test]
fn bins_redrawn_in_every_epoch_are_caught_where_they_are_worse() {
    // Steps 1 and 2 almost coincide, as do 0 and 3: a unit of one bin has one of each pair.
    let c = columns([&[0.2, 0.0, 0.0, 1.0], &[0.2, 1.0], &[1.0], &[1.0]]);
    let s = 0.7;
    let promise = two_bins(&c, s);
    let believes = || Knowledge::Believes("balls-in-bins:2");
    assert_kept(&report(&c, s, &deployed("balls-in-bins:2", 4), believes(), &promise));
    let patterns = vec![vec![0, 2], vec![0, 3], vec![1, 2], vec![1, 3]];
    let redrawn = Redrawn { parts: 2, steps: 4, rate: 1.0, public: false };
    assert!(report(&c, s, &redrawn, Knowledge::Knows(patterns.clone()), &promise).refuted());
    // Whoever knows what is not so learns nothing more of the honest sampler.
    assert!(!report(&c, s, &deployed("balls-in-bins:2", 4), Knowledge::Knows(patterns), &promise).refuted());
}

#[test]
fn a_band_too_many_is_caught() {
    let s = 0.8;
    let promise = poisson_twice(0.5, s);
    let who = || Knowledge::Believes("cyclic-poisson:2:0.5");
    let lottery = deployed("cyclic-poisson:2:0.5", 4);
    assert_kept(&report(&two_bands(), s, &lottery, who(), &promise));
    let three = columns([&[1.0, 1.0, 1.0], &[1.0, 1.0, 1.0], &[1.0, 0.2], &[1.0]]);
    assert!(report(&three, s, &lottery, who(), &promise).refuted());
}

/// A mechanism as a plan has it, for 24 steps at ε = 2: its form, noise, and points of its promise.
fn planned(name: &str, sampling: &str) -> (Mechanism, f64, Vec<CurvePoint>) {
    let (selector, sampling): (Selector, Sampling) = (name.parse().unwrap(), sampling.parse().unwrap());
    let (workload, participation) =
        (Workload::prefix_sum(24).unwrap(), sampling.participation(24).unwrap().unwrap());
    let problem = match sampling {
        Sampling::BallsInBins { .. } => {
            Problem::sampled(workload, Goal { sampling, epsilon: 2.0, delta: 1e-5 })
        }
        _ => Problem::new(workload, Participation::Single),
    };
    let problem = problem.unwrap();
    let form = selector.family().fit(&problem, &selector.budget(), &mut crate::factorize::quiet).unwrap();
    let made = Mechanism::sampled(problem.workload().clone(), &form, participation, sampling).unwrap();
    let made = made.calibrated(2.0, 1e-5, 0.5, Conditions::default()).unwrap();
    let calibration = made.privacy().unwrap().calibration();
    let points = promised_points(2.0, |epsilon| calibration.curve().delta(epsilon)).unwrap();
    let noise = calibration.noise_std();
    (made, noise, points)
}

#[test]
fn calibrated_mechanisms_keep_their_promise_and_cheaper_ones_do_not() {
    let options = AuditOptions { trials: 200_000, seed: 20_261_117, ..Default::default() };
    for (name, sampling, doubled) in [
        ("banded-toeplitz:bands=3", "cyclic-poisson:3:0.25", "cyclic-poisson:3:0.5"),
        ("independent", "cyclic-poisson:1:0.1", "cyclic-poisson:1:0.2"),
        ("blt:buffers=2", "balls-in-bins:6", "balls-in-bins:3"),
        ("banded-inverse:bands=2", "balls-in-bins:8", "balls-in-bins:4"),
    ] {
        let (mechanism, noise, points) = planned(name, sampling);
        let (sampling, adjacency) = (mechanism.sampling(), Adjacency::default());
        let audit = |noise| {
            audit_sampled_form(mechanism.form(), noise, sampling, adjacency, 0.5, &points, options).unwrap()
        };
        let kept = audit(noise);
        assert!(!kept.refuted(), "{name}: {kept:?}");
        assert!(audit(0.7 * noise).refuted(), "{name}");
        // Twice the rate, or half the bins: twice as often as was counted on.
        let subject = MatrixMechanism::of(mechanism.form(), noise, 1).unwrap();
        let model = subject.noise_model().unwrap();
        let neighbours = Neighbours::drawn(24, adjacency, 0.5).unwrap();
        let adversary = SampledAdversary::of(doubled.parse().unwrap(), &model, &neighbours).unwrap();
        let lottery = deployed(doubled, 24);
        let caught = audit_sampled(&subject, &adversary, &neighbours, &lottery, &points, options).unwrap();
        assert!(caught.refuted(), "{name}: {caught:?}");
    }
}

#[test]
fn the_sampled_audit_does_not_depend_on_threads() {
    let form = crate::form::StateSpace::independent(4).unwrap();
    let promise = [CurvePoint { epsilon: 1.0, delta: 1e-3 }];
    let options = AuditOptions { trials: 10_001, ..Default::default() };
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let sampling = "cyclic-poisson:2:0.5".parse().unwrap();
        pool.install(|| {
            audit_sampled_form(&form, 1.0, sampling, Adjacency::default(), 1.0, &promise, options).unwrap()
        })
    };
    let (one, three) = (run(1), run(3));
    assert_eq!(one, three);
    assert_eq!(one.rows[0].present.first_games + one.rows[0].present.second_games, 10_001);
}

#[test]
fn bad_input_is_named() {
    let form = crate::form::StateSpace::independent(4).unwrap();
    let message = |sampling: Sampling, promise: &[CurvePoint]| {
        let options = AuditOptions { trials: 10, ..Default::default() };
        audit_sampled_form(&form, 1.0, sampling, Adjacency::default(), 1.0, promise, options)
            .unwrap_err()
            .to_string()
    };
    let (bins, point) = (Sampling::BallsInBins { bins: 2 }, CurvePoint { epsilon: 1.0, delta: 0.1 });
    assert!(message(Sampling::None, &[point]).starts_with("sampling is none"));
    assert!(message(bins, &[]).starts_with("number of points is 0"));
    assert!(message(bins, &[point; 9]).starts_with("number of points is 9"));
    assert!(message(bins, &[CurvePoint { epsilon: f64::NAN, ..point }]).starts_with("epsilon is NaN"));
    assert!(message(bins, &[CurvePoint { delta: 1.5, ..point }]).starts_with("delta is 1.5"));
}

/// Planted: bins that are meant to be drawn anew, and are not.
enum Planted {
    /// As it should be, by other coins than those of the sampler.
    Anew,
    /// Every second epoch has the last bins where the one before had the first, and the other way round, so that steps meet.
    Correlated,
    /// A new bin at every step of an epoch until one is hit, so that a unit may come twice, or not at all.
    WithinAnEpoch,
    /// Twice in every epoch.
    Twice,
}

impl Planted {
    fn lottery(self, bins: usize, steps: usize) -> impl Lottery {
        PlantedBins { how: self, bins, steps }
    }
}

struct PlantedBins {
    how: Planted,
    bins: usize,
    steps: usize,
}

impl Lottery for PlantedBins {
    fn draw(&self, rng: &mut AuditRng) -> Result<Draw> {
        let b = self.bins;
        let mut turns = Vec::new();
        let mut last = 0;
        for (epoch, start) in (0..self.steps).step_by(b).enumerate() {
            let bin = rng.next_u32() as usize % b;
            match self.how {
                Planted::Anew => turns.push(start + bin),
                Planted::Correlated => turns.push(start + if epoch % 2 == 1 { b - 1 - last } else { bin }),
                Planted::WithinAnEpoch => {
                    turns.extend((start..start + b).filter(|_| (rng.next_u32() as usize).is_multiple_of(b)));
                }
                Planted::Twice => {
                    let other = (bin + 1 + rng.next_u32() as usize % (b - 1)) % b;
                    turns.extend([start + bin.min(other), start + bin.max(other)]);
                }
            }
            last = bin;
        }
        Ok(Draw { possible: (0..self.steps).collect(), turns })
    }
}

/// The promise for three bins that are drawn anew in each of two epochs, over an encoder whose last steps of an epoch reach into
/// the first of the next.
fn three_bins_anew(c: &Mat<f64>, s: f64) -> Vec<CurvePoint> {
    let mut column = |step: usize, out: &mut [f64]| {
        (0..c.nrows()).for_each(|row| out[row] = c[(row, step)]);
        0.0
    };
    let hidden = crate::accounting::Reshuffled::new(3, c.ncols(), &mut column).unwrap();
    curve(|epsilon| hidden.delta(s, epsilon))
}

#[test]
fn bins_that_are_not_drawn_anew_are_caught() {
    let c = columns([&[1.0, 0.3], &[1.0, 0.3], &[0.2, 1.0], &[1.0, 0.3], &[1.0, 0.3], &[1.0]]);
    let s = 0.9;
    let promise = three_bins_anew(&c, s);
    let believes = || Knowledge::Believes("reshuffled-bins:3");
    assert_kept(&report(&c, s, &deployed("reshuffled-bins:3", 6), believes(), &promise));
    assert_kept(&report(&c, s, &Planted::Anew.lottery(3, 6), believes(), &promise));
    // Whoever knows of the bug looks for what it does.
    let correlated = vec![vec![0, 5], vec![1, 4], vec![2, 3]];
    let lottery = Planted::Correlated.lottery(3, 6);
    assert!(report(&c, s, &lottery, Knowledge::Knows(correlated), &promise).refuted());
    let within: Vec<Vec<usize>> = (0..64).map(|set| (0..6).filter(|t| set >> t & 1 == 1).collect()).collect();
    // Each set as often as it comes: every step with probability 1/3, so 2^(steps missed) of 3^6.
    let within = within.into_iter().flat_map(|set| vec![set.clone(); 1 << (6 - set.len())]).collect();
    let lottery = Planted::WithinAnEpoch.lottery(3, 6);
    assert!(report(&c, s, &lottery, Knowledge::Knows(within), &promise).refuted());
    let pairs = [[0, 1], [0, 2], [1, 2]];
    let twice = (0..9).map(|k| [pairs[k / 3], pairs[k % 3].map(|p| p + 3)].concat()).collect();
    assert!(report(&c, s, &Planted::Twice.lottery(3, 6), Knowledge::Knows(twice), &promise).refuted());
    // A bin too many in the statement: three that count as four.
    let four = columns([&[1.0], &[1.0], &[1.0], &[1.0], &[1.0], &[1.0], &[1.0], &[1.0]]);
    let mut column = |step: usize, out: &mut [f64]| {
        out[step] = 1.0;
        0.0
    };
    let hidden = crate::accounting::Reshuffled::new(4, 8, &mut column).unwrap();
    let promise = curve(|epsilon| hidden.delta(s, epsilon));
    let six: Mat<f64> = Mat::identity(6, 6);
    assert!(report(&six, s, &deployed("reshuffled-bins:3", 6), believes(), &promise).refuted());
    assert_kept(&report(
        &four,
        s,
        &deployed("reshuffled-bins:4", 8),
        Knowledge::Believes("reshuffled-bins:4"),
        &promise,
    ));
}

#[test]
fn a_chain_is_the_sum_over_its_patterns() {
    // Two bands and three bins: only neighbouring epochs meet, and a chain over 3⁸ patterns is what they add up to.
    let c = Mat::from_fn(24, 24, |i, j| {
        if i == j {
            1.0
        } else if i == j + 1 {
            0.5
        } else {
            0.0
        }
    });
    let neighbours = Neighbours::drawn(24, Adjacency::default(), 0.5).unwrap();
    let mechanism = MatrixMechanism::new(inverse(&c), 0.8, 1).unwrap();
    let model = mechanism.noise_model().unwrap();
    let chain = SampledAdversary::of("reshuffled-bins:3".parse().unwrap(), &model, &neighbours).unwrap();
    assert!(matches!(chain.belief, Belief::Chain { bins: 3 }));
    let pattern = |mut k: usize| {
        let steps: Vec<usize> = (0..24).step_by(3).map(|start| (start + k % 3, k /= 3).0).collect();
        steps
    };
    let all = SampledAdversary::over((0..6561).map(pattern).collect(), &model, &neighbours);
    let lottery = deployed("reshuffled-bins:3", 24);
    let scores = |adversary: &SampledAdversary<'_>| -> Vec<f64> {
        let games = play(&mechanism, adversary, &neighbours, Some(&lottery), 8, &mut rng(3, 0)).unwrap();
        games.iter().map(|game| game.score).collect()
    };
    for (chain, all) in scores(&chain).into_iter().zip(scores(&all)) {
        assert!((chain - all).abs() < 1e-9, "{chain} {all}");
    }
}
