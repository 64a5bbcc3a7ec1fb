use super::*;
use crate::accounting::gaussian;
use crate::audit::game::rng;
use rand_distr::{Distribution, StandardNormal};

/// Bins whose vectors meet their neighbours, on a ring: `⟨m_p, m_q⟩` is a power of `overlap`.
fn ring(bins: usize, overlap: f64) -> Allocation {
    let entry = |p: usize, q: usize| {
        let distance = p.abs_diff(q).min(bins - p.abs_diff(q));
        overlap.powi(distance as i32)
    };
    Allocation::new(bins, (0..bins * bins).map(|k| entry(k / bins, k % bins)).collect()).unwrap()
}

/// δ of joining and of leaving from samples of the pair itself, with standard errors.
fn plain(allocation: &Allocation, sigma: f64, epsilon: f64, samples: usize, seed: u64) -> [[f64; 2]; 2] {
    let (b, root) = (allocation.bins(), allocation.root(sigma).unwrap());
    let mut rng = rng(seed, 0);
    let mut sums = [[0.0; 2]; 2];
    for sample in 0..samples {
        let z: Vec<f64> = (0..b).map(|_| StandardNormal.sample(&mut rng)).collect();
        for (direction, sums) in sums.iter_mut().enumerate() {
            let bin = sample % b;
            let u = |p: usize| {
                let shift = if direction == 0 { allocation.gram(p, bin) } else { 0.0 };
                let scaled = (shift - 0.5 * allocation.gram(p, p)) / (sigma * sigma);
                scaled + (0..=p).map(|k| root[(p, k)] * z[k]).sum::<f64>()
            };
            let loss = ((0..b).map(|p| u(p).exp()).sum::<f64>() / b as f64).ln();
            let over = if direction == 0 { epsilon - loss } else { epsilon + loss };
            let value = (-over.exp_m1()).max(0.0);
            sums[0] += value;
            sums[1] += value * value;
        }
    }
    let n = samples as f64;
    sums.map(|[sum, squares]| [sum / n, ((squares / n - (sum / n).powi(2)) / n).sqrt()])
}

#[test]
fn one_bin_is_the_gaussian_mechanism() {
    let alone = Allocation::new(1, vec![1.0]).unwrap();
    for (sigma, epsilon) in [(0.5, 8.0), (1.0, 3.0), (2.0, 1.0), (4.0, 1.0)] {
        let exact = gaussian::delta(1.0 / sigma, epsilon).unwrap();
        let [joining, leaving] = alone.estimate(sigma, epsilon).unwrap();
        assert!((joining.mean / exact - 1.0).abs() < 0.05, "{sigma}: {joining:?} {exact}");
        assert!((leaving.mean / exact - 1.0).abs() < 0.15, "{sigma}: {leaving:?} {exact}");
        for estimate in [joining, leaving] {
            assert!(estimate.upper >= exact && estimate.upper < 2.0 * exact, "{estimate:?} {exact}");
        }
    }
}

#[test]
fn bounds_are_above_long_plain_runs() {
    for (bins, overlap, sigma, epsilon) in [(7, 0.0, 0.6, 2.0), (7, 0.7, 0.7, 2.0), (12, 0.9, 0.8, 1.0)] {
        let allocation = ring(bins, overlap);
        let estimates = allocation.estimate(sigma, epsilon).unwrap();
        let plain = plain(&allocation, sigma, epsilon, 400_000, 11);
        for (estimate, [mean, error]) in estimates.iter().zip(plain) {
            // Half of what the bound adds is more than three of the estimate's own standard errors: α below 1e-3 for each.
            let own = 0.5 * (estimate.upper - estimate.mean);
            assert!((estimate.mean - mean).abs() < 5.0 * error + own, "{estimate:?} {mean} {error}");
            assert!(estimate.upper >= mean, "{estimate:?} {mean}");
        }
    }
}

#[test]
fn a_sample_that_is_worth_too_little_would_be_seen() {
    // The power of the test above: at σ larger by 5 %, δ is another by far more than its tolerance.
    let allocation = ring(7, 0.7);
    let [[mean, error], _] = plain(&allocation, 0.7, 2.0, 400_000, 11);
    let [off, _] = allocation.estimate(0.7 * 1.05, 2.0).unwrap();
    let own = 0.5 * (off.upper - off.mean);
    assert!((off.mean - mean).abs() > 5.0 * error + own, "{off:?} {mean} {error}");
}

#[test]
fn no_value_exceeds_its_range() {
    for (bins, overlap, sigma, epsilon) in [(5, 0.3, 0.5, 4.0), (30, 0.8, 1.2, 0.5), (3, 0.0, 0.3, 10.0)] {
        let sampler = Sampler::new(&ring(bins, overlap), sigma, epsilon, Purpose::Search).unwrap();
        // The smallest possible range is that of the largest value seen, and the mean is below it.
        let joining = sampler.joining(1 << 14, 1, &mut unwatched).unwrap();
        assert!(joining.mean <= joining.range && joining.range < 1.0, "{joining:?}");
        let leaving = sampler.leaving(1 << 14, 1, &mut unwatched).unwrap();
        assert!(leaving.mean <= leaving.range, "{leaving:?}");
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let allocation = ring(9, 0.5);
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let three = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let bits = |pool: &rayon::ThreadPool| {
        let estimates = pool.install(|| allocation.estimate(0.9, 1.0)).unwrap();
        estimates.map(|estimate| [estimate.mean.to_bits(), estimate.upper.to_bits()])
    };
    assert_eq!(bits(&one), bits(&three));
}

#[test]
fn calibration_is_seen_to_hold() {
    let allocation = ring(20, 0.6);
    for (epsilon, delta) in [(0.5, 1e-5), (2.0, 1e-5), (8.0, 1e-7)] {
        let sigma = allocation.noise_multiplier(epsilon, delta).unwrap();
        assert!(allocation.delta(sigma, epsilon).unwrap() <= delta);
        assert!(allocation.delta(0.98 * sigma, epsilon).unwrap() > delta);
        let back = allocation.epsilon(sigma, delta).unwrap();
        assert!((back / epsilon - 1.0).abs() < 0.01, "{back} {epsilon}");
        // Less noise than without any secret, by far.
        assert!(sigma < 0.9 / gaussian::mu(epsilon, delta).unwrap());
    }
}

#[test]
fn rounding_up_costs_privacy_and_never_gains() {
    // Kahane: larger entries, larger δ; the same random numbers, those of a search, see it.
    let mean = |allocation: &Allocation| {
        allocation.estimate_for(0.8, 1.0, Purpose::Search, 1, &mut unwatched).unwrap()[0].mean
    };
    let base = ring(10, 0.5);
    let raised =
        |by: f64| Allocation::new(10, (0..100).map(|k| base.gram(k / 10, k % 10) + by).collect()).unwrap();
    assert!(mean(&raised(0.05)) > mean(&base) && mean(&raised(0.1)) > mean(&raised(0.05)));
}

#[test]
fn what_is_no_gram_matrix_is_refused() {
    let message = |bins, gram| Allocation::new(bins, gram).unwrap_err().to_string();
    assert!(message(0, vec![]).contains("at least one"));
    assert!(message(2, vec![1.0; 3]).contains("Gram matrix"));
    assert!(message(1, vec![f64::NAN]).contains("finite"));
    assert!(message(2, vec![1.0, -0.1, -0.1, 1.0]).contains("negative"));
    assert!(message(2, vec![1.0, 2.0, 2.0, 1.0]).contains("semi-definite"));
}

#[test]
fn a_proof_has_random_numbers_of_its_own() {
    let allocation = ring(6, 0.5);
    let mean = |allocation: &Allocation, sigma: f64| allocation.estimate(sigma, 1.0).unwrap()[0].mean;
    assert_eq!(mean(&allocation, 0.8), mean(&allocation.clone(), 0.8));
    // The same matrix from other coefficients, and hardly other noise: all numbers are others.
    let others = [allocation.clone().about([1; 32]), allocation.clone().about([2; 32])];
    let [first, second] = others.each_ref().map(|other| mean(other, 0.8));
    assert!(first != second && first != mean(&allocation, 0.8));
    let near = mean(&allocation, 0.8 * (1.0 + 1e-15)) / mean(&allocation, 0.8) - 1.0;
    assert!(near.abs() > 1e-6, "{near}");
}

#[test]
fn a_proof_ends_when_nobody_watches() {
    let allocation = ring(6, 0.5);
    let mut left = 5;
    let mut watch = |share: f64| {
        assert!((0.0..1.0).contains(&share));
        left -= 1;
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let stopped = allocation.watched_noise_multiplier(1.0, 1e-5, &mut watch);
    assert!(matches!(stopped, Err(Error::Interrupted { .. })) && left == 0);
}

#[test]
fn a_root_is_found_where_little_is_seen() {
    // A wall of nothing, as few samples see it, beside a slope: a secant would creep along it.
    let calls = std::cell::Cell::new(0);
    for start in [-3.0, 0.0, 1.9, 5.0] {
        calls.set(0);
        let wall = |x: f64| {
            calls.set(calls.get() + 1);
            Ok(if x < 2.0 { 20.0 * (2.0 - x) } else { -680.0 })
        };
        let found = solve(start, wall).unwrap().unwrap();
        assert!((found - 2.0).abs() < 2e-4 && calls.get() < 40, "{start}: {found} {}", calls.get());
    }
    assert_eq!(solve(0.0, |_| Ok(1.0)).unwrap(), None);
}
