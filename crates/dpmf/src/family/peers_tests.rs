//! The families of others, fitted for the same participation.

use super::*;
use crate::factorize::quiet;
use crate::form::Representation;
use crate::participation::Participation;
use crate::workload::Workload;

/// Root loss as deployed.
fn root_loss(selector: &str, problem: &Problem) -> (f64, Form) {
    let selector: Selector = selector.parse().unwrap();
    let form = selector.family().fit(problem, &selector.budget(), &mut quiet).unwrap().deployed().unwrap();
    let gamma = problem.participation().sensitivity(&form).unwrap().gamma;
    let loss: f64 = form.decoder_row_norms_sq(problem.workload()).iter().sum();
    (gamma * loss.sqrt(), form)
}

/// Ratios of root losses, for the prefix sum, to the bounds of `golden/PROVENANCE.md`; the limits are those of
/// jax-privacy's own optimizers for the same, in f64 (see `golden/PROVENANCE.md`).
#[test]
fn no_fit_is_worse_than_that_of_jax_privacy() {
    for (n, bound, limits) in [
        (
            64,
            35.262_827_082,
            [
                ("blt:buffers=1", 1.115_473),
                ("blt:buffers=4", 1.115_428),
                ("banded-toeplitz", 1.056_790),
                ("banded", 1.015_468),
            ],
        ),
        (
            256,
            83.391_114_392,
            [
                ("blt:buffers=1", 1.126_376),
                ("blt:buffers=2", 1.110_771),
                ("banded-toeplitz", 1.058_061),
                ("banded", 1.020_580),
            ],
        ),
    ] {
        let problem =
            Problem::new(Workload::prefix_sum(n).unwrap(), Participation::Epochs { times: 4 }).unwrap();
        for (selector, limit) in limits {
            let ratio = root_loss(selector, &problem).0 / bound;
            assert!(ratio < limit + 1e-6 && ratio > 1.0, "{n} steps, {selector}: {ratio}, not {limit}");
        }
    }
}

/// Two diagonals are `z_t − λ z_{t−1}`, and no other λ is better.
#[test]
fn two_diagonals_of_the_inverse() {
    let problem =
        Problem::new(Workload::prefix_sum(40).unwrap(), Participation::Epochs { times: 4 }).unwrap();
    let (found, form) = root_loss("banded-inverse:bands=2", &problem);
    assert_eq!((form.cost().buffers, form.cost().recalls), (Some(0), Some(1)));
    let loss = |lambda: f64| {
        let recalled = (0..40).map(|t| if t > 0 { -lambda } else { 0.0 }).collect();
        let parts = crate::form::recall::Parts { direct: vec![1.0; 40], recalled, ..Default::default() };
        let form = crate::form::Recall::from_parts(1, 0, 1, parts).unwrap();
        let gamma = problem.participation().sensitivity(&form).unwrap().gamma;
        gamma * form.decoder_row_norms_sq(problem.workload()).iter().sum::<f64>().sqrt()
    };
    let best = (0..100).map(|i| loss(f64::from(i) / 100.0)).fold(f64::INFINITY, f64::min);
    assert!(found < best * (1.0 + 1e-6) && found > 0.999 * best, "{found} {best}");
}

/// Where distances are free, a filter with recalled noise is between exponentials with as many buffers and a banded encoder
/// with many.
#[test]
fn free_distances() {
    let participation = Participation::MinSeparation { separation: 64, times: Some(4) };
    let problem = Problem::new(Workload::prefix_sum(256).unwrap(), participation).unwrap();
    let loss = |selector: &str| root_loss(selector, &problem).0;
    let (blt, recall) = (loss("blt:buffers=2"), loss("recall:buffers=2:recalls=3"));
    let (toeplitz, banded) = (loss("banded-toeplitz"), loss("banded"));
    assert!(
        blt < 92.63 && recall < 89.6 && toeplitz < 88.24 && banded < 86.8,
        "{blt} {recall} {toeplitz} {banded}"
    );
    assert!(banded < toeplitz && toeplitz < recall && recall < blt);
}

#[test]
fn columns_that_meet_are_refused() {
    let problem =
        Problem::new(Workload::prefix_sum(12).unwrap(), Participation::Epochs { times: 3 }).unwrap();
    let selector: Selector = "banded:bands=5".parse().unwrap();
    let error = selector.family().fit(&problem, &selector.budget(), &mut quiet).unwrap_err().to_string();
    assert!(error.contains("bands") && error.contains("distance between participations"), "{error}");
}

/// Larger sizes, with what they took; run by `scripts/slow`.
#[test]
#[ignore = "minutes"]
fn large_fits() {
    let cosine: crate::workload::Schedule = "cosine:0.05".parse().unwrap();
    let momentum = crate::workload::Optimizer { momentum: 0.9, ..Default::default() };
    let heavy = Workload::sgd(cosine.values(1024), momentum).unwrap();
    for (workload, times, selector, limit) in [
        (Workload::prefix_sum(256).unwrap(), 4, "recall:buffers=2:recalls=3", 1.001),
        (Workload::prefix_sum(256).unwrap(), 4, "recall:buffers=2:recalls=1", 1.016),
        (Workload::prefix_sum(512).unwrap(), 16, "recall:buffers=2:recalls=3", 1.025),
        (Workload::prefix_sum(2048).unwrap(), 8, "recall:buffers=3:recalls=7", 1.005),
        (heavy, 4, "recall:buffers=3:recalls=3", 1.01),
    ] {
        let (n, clock) = (workload.steps(), std::time::Instant::now());
        let problem = Problem::new(workload, Participation::Epochs { times }).unwrap();
        let ratio = problem
            .mechanism(selector.parse().unwrap(), &mut quiet)
            .unwrap()
            .certificate()
            .unwrap()
            .ratio_to_bound();
        println!(
            "{n} steps, {times} epochs, {selector}: {ratio:.6} in {:.1} s",
            clock.elapsed().as_secs_f64()
        );
        assert!(ratio < limit);
    }
}
