//! An audit of the schema's release: neighbours are told apart no better than is promised, and by mistakes that are planted, better.
//!
//! The adversary knows both data sets and which way the sums move. It guesses which of them a release is of, by a threshold that is
//! fixed beforehand. Both of its error rates are bounded from above ([CP34], α = 10⁻³ each), and a μ-Gaussian release allows no pair
//! of rates below its trade-off curve. Seeds are fixed; a mistake must be refuted by the same test, which is its power.

use super::noise::mechanism;
use super::reading::Released;
use super::survey::{Survey, Wanted, Weights};
use super::*;
use dpmf::PrivateRun;
use dpmf::accounting::Arithmetic;
use dpmf::audit::binomial::upper_limit;
use dpmf::noise::{NoiseKey, RunId};

const ALPHA: f64 = 1e-3;
const TRIALS: u64 = 1000;
const WANTED: [Wanted; 4] = [Wanted::Feature, Wanted::Feature, Wanted::Feature, Wanted::Label];
const SHARES: [f64; 5] = [1.0, 1.0, 1.0, 2.0, 0.2];
const MU: f64 = 1.0;

/// A release by the engine that `find` uses, without its journal.
fn released(mechanism: &dpmf::Mechanism, seed: u64, mut sum: Vec<i64>) -> Vec<f32> {
    let (key, dimension) = (NoiseKey::from_seed(seed), sum.len() as u64);
    let run = RunId::from_label("audit");
    let mut run = PrivateRun::new(mechanism, &key, run, 0..dimension, dimension, Arithmetic::Exact).unwrap();
    run.set_denominator(1.0).unwrap();
    run.contribute(1).unwrap();
    let mut released = vec![0.0; sum.len()];
    run.release(&mut sum, &mut released).unwrap();
    released
}

fn row(age: f64, class: &str) -> Vec<Field> {
    vec![Field::Number(age), Field::Number(2.0 * age), Field::Word("Bonn".into()), Field::Word(class.into())]
}

/// The sums of some users, one of whom a mistake may count several times.
fn sums(weights: &Weights, users: usize, one: usize) -> Vec<i64> {
    let mut survey = Survey::new(&WANTED, weights, 1);
    (0..users).for_each(|user| survey.add(&row(20.0 + user as f64, "yes")));
    // The word of every column is known without the user too.
    (0..one).for_each(|_| survey.add(&row(33.0, "yes")));
    survey.finish(50).0
}

/// Whether a μ-Gaussian release is refuted by an adversary who adds up the release along the way that the sums move.
fn refuted(without: &[i64], with: &[i64]) -> bool {
    let noise = mechanism(MU, PrivacyUnit::User).unwrap();
    let way: Vec<f64> = with.iter().zip(without).map(|(a, b)| (a - b) as f64 / Weights::UNITS).collect();
    let length = way.iter().map(|x| x * x).sum::<f64>().sqrt();
    let along = |seed: u64, sum: &[i64]| {
        let values = released(&noise, seed, sum.to_vec());
        let moved =
            values.iter().zip(without).map(|(value, base)| f64::from(*value) - *base as f64 / Weights::UNITS);
        moved.zip(&way).map(|(x, way)| x * way).sum::<f64>() / length
    };
    let threshold = 0.5 * length;
    let wrong = |sum: &[i64], first: u64, high: bool| {
        (first..first + TRIALS).filter(|seed| (along(*seed, sum) > threshold) == high).count() as u64
    };
    let [positives, negatives] =
        [wrong(without, 0, true), wrong(with, TRIALS, false)].map(|wrong| upper_limit(wrong, TRIALS, ALPHA));
    gaussian::tail_deviations(positives).unwrap() + gaussian::tail_deviations(negatives).unwrap() > MU
}

#[test]
fn the_first_look_keeps_its_promise_and_planted_mistakes_do_not() {
    let weights = Weights::new(&SHARES).unwrap();
    let without = sums(&weights, 30, 0);
    assert!(!refuted(&without, &sums(&weights, 30, 1)));
    // One user counted twice in every column.
    assert!(refuted(&without, &sums(&weights, 30, 2)));
    // Norms that are not clipped over the columns: each has a weight of 1.
    let whole = Weights(vec![Weights::UNITS as i64; 5]);
    assert!(refuted(&sums(&whole, 30, 0), &sums(&whole, 30, 1)));
}

/// How often a word that one user alone has is revealed.
fn revealed(threshold: f64) -> u64 {
    let weights = Weights::new(&SHARES).unwrap();
    let noise = mechanism(MU, PrivacyUnit::User).unwrap();
    let mut survey = Survey::new(&WANTED, &weights, 3);
    (0..30).for_each(|user| survey.add(&row(20.0 + f64::from(user), "yes")));
    survey.add(&row(40.0, "Zanzibar"));
    let (sum, words) = survey.finish(31);
    let deviation = noise.privacy().unwrap().calibration().noise_std();
    let seeds = 0..TRIALS;
    let is_revealed = |seed: &u64| {
        let values = released(&noise, *seed, sum.clone());
        let released = Released {
            wanted: &WANTED,
            weights: &weights,
            values: &values,
            words: &words,
            deviation,
            threshold: (threshold, 1.0),
            users: 31.0,
            width: 3,
        };
        released.column(3).revealed().iter().any(|(word, _)| word == "Zanzibar")
    };
    seeds.filter(is_revealed).count() as u64
}

#[test]
fn a_word_of_one_user_is_revealed_as_rarely_as_promised_and_a_low_threshold_is_found_out() {
    // Without the user it is never revealed: its probability is a δ at every ε.
    let delta = 0.02;
    let least = |revealed: u64| 1.0 - upper_limit(TRIALS - revealed, TRIALS, ALPHA);
    let promised = revealed(gaussian::tail_deviations(delta).unwrap());
    assert!(promised > 0 && least(promised) <= delta, "{promised}");
    let low = revealed(gaussian::tail_deviations(3.0 * delta).unwrap());
    assert!(least(low) > delta, "{low}");
}

#[test]
fn moments_of_a_user_stay_within_the_weights() {
    let range = Range { from: -3.0, to: 9.0, middle: 3.0, spread: 2.0, users: 10.0 };
    for value in [-1e300, -3.0, 0.0, 2.9, 3.0, 8.0, 1e300] {
        let [a, b] = moments(&Field::Number(value), &range);
        // Sums take 10⁻¹² of it away before they round towards zero.
        let kept = 1.0 - 1e-12;
        let norm_sq = a * a + b * b;
        assert!(kept * kept * norm_sq < 1.0, "{value}: {a} {b}");
        // (4u² − 3u + 1)/2 at u = along² has its minimum, 7/32, at u = 3/8: no user is scaled down.
        assert!(norm_sq >= 7.0 / 32.0, "{value}: {a} {b}");
        if !(range.from..=range.to).contains(&value) {
            assert!(norm_sq > 1.0 - 1e-12, "{value}: {a} {b}");
        }
    }
}
