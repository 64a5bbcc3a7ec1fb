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
        let allocation = ring(bins, overlap);
        let sampler = Sampler::new(&allocation, sigma, epsilon, Purpose::Search).unwrap();
        // The smallest possible range is that of the largest value seen, and the mean is below it.
        let joining = sampler.joining(1 << 14, 1, &mut unwatched).unwrap();
        assert!(joining.mean <= joining.range && joining.range < 1.0, "{joining:?}");
        let leaving = sampler.leaving(1 << 14, 1, 0.0, &mut unwatched).unwrap();
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
    let stopped = allocation.watched_noise_multiplier(1.0, 1e-5, None, &mut watch);
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

/// δ of two bins beside a Gaussian release, by quadrature of the pair itself: no sampler and no Gram matrix has a part in it.
fn quadrature(shift: f64, mu: f64, epsilon: f64) -> [f64; 2] {
    const STEPS: i32 = 64;
    let (width, reach) = (0.2, 6.4);
    let at = |k: i32| f64::from(k) * width - reach;
    let density = |x: f64| (-0.5 * x * x).exp() * width / std::f64::consts::TAU.sqrt();
    let mut deltas = [0.0, 0.0];
    for (i, j) in (0..=STEPS).flat_map(|i| (0..=STEPS).map(move |j| (i, j))) {
        let (x, y) = (at(i), at(j));
        let first = shift * x - 0.5 * shift * shift;
        let second = shift * y - 0.5 * shift * shift;
        let bins = (0.5 * (first.exp() + second.exp())).ln();
        for k in 0..=STEPS {
            let z = at(k);
            let loss = bins + mu * z - 0.5 * mu * mu;
            let mass = density(x) * density(y) * density(z);
            deltas[0] += mass * (loss.exp() - epsilon.exp()).max(0.0);
            deltas[1] += mass * (1.0 - (epsilon + loss).exp()).max(0.0);
        }
    }
    deltas
}

#[test]
fn a_gaussian_beside_bins_is_a_larger_gram_matrix() {
    let bins = Allocation::new(2, vec![1.0, 0.0, 0.0, 1.0]).unwrap();
    let (sigma, mu, epsilon) = (0.8, 0.7, 1.0);
    let exact = quadrature(1.0 / sigma, mu, epsilon);
    let estimates = bins.beside(mu).unwrap().estimate(sigma, epsilon).unwrap();
    for (estimate, exact) in estimates.iter().zip(exact) {
        assert!((estimate.mean / exact - 1.0).abs() < 0.02, "{estimate:?} {exact}");
        assert!(estimate.upper > exact && estimate.upper < 1.15 * exact, "{estimate:?} {exact}");
    }
    // Without it, less is told; and the same test tells the two apart.
    assert!(bins.estimate(sigma, epsilon).unwrap()[0].upper < 0.9 * exact[0]);
    assert!(bins.beside(f64::INFINITY).is_err() && bins.beside(0.0).is_err());
    // One bin hides nothing: μ² add up.
    let open = Allocation::new(1, vec![1.0]).unwrap().beside(0.3).unwrap();
    let total = gaussian::delta((1.0_f64 / 4.0 + 0.09).sqrt(), 1.0).unwrap();
    let bound = open.delta(2.0, 1.0).unwrap();
    assert!(bound >= total && bound < 1.1 * total, "{bound} {total}");
}

/// δ of joining and of leaving by summing over a grid of the pair's Gaussian numbers.
fn integrated(allocation: &Allocation, sigma: f64, epsilon: f64, points: usize) -> [f64; 2] {
    let (b, root) = (allocation.bins(), allocation.root(sigma).unwrap());
    let width = 18.0 / points as f64;
    let mut sums = [0.0; 2];
    for index in 0..points.pow(b as u32) {
        // A grid of the whole space, shifted towards the means.
        let place = |k: usize| (index / points.pow(k as u32) % points) as f64;
        let z: Vec<f64> = (0..b).map(|k| -7.0 + width * (place(k) + 0.5)).collect();
        let density =
            z.iter().map(|z| width * (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt()).product::<f64>();
        let y = |p: usize| (0..=p).map(|k| root[(p, k)] * z[k]).sum::<f64>();
        let u = |p: usize| y(p) - 0.5 * allocation.gram(p, p) / (sigma * sigma);
        let ratio = (0..b).map(|p| u(p).exp()).sum::<f64>() / b as f64;
        sums[0] += density * (ratio - epsilon.exp()).max(0.0);
        sums[1] += density * (1.0 - epsilon.exp() * ratio).max(0.0);
    }
    sums
}

#[test]
fn two_and_three_bins_are_as_integrals_say() {
    for (bins, overlap, sigma, epsilon, points) in
        [(2, 0.0, 0.7, 1.5, 900), (2, 0.6, 0.9, 1.0, 900), (3, 0.4, 0.8, 1.2, 130)]
    {
        let allocation = ring(bins, overlap);
        let exact = integrated(&allocation, sigma, epsilon, points);
        // The grid itself is right to a few thousandths: one half as fine agrees.
        let coarse = integrated(&allocation, sigma, epsilon, points / 2);
        let estimates = allocation.estimate(sigma, epsilon).unwrap();
        for ((estimate, exact), coarse) in estimates.iter().zip(exact).zip(coarse) {
            assert!((coarse / exact - 1.0).abs() < 0.01, "{coarse} {exact}");
            // Seven standard errors make up what a bound adds; three of them for the mean.
            assert!(estimate.upper > 0.999 * exact, "{estimate:?} {exact}");
            let own = 0.5 * (estimate.upper - estimate.mean);
            assert!((estimate.mean - exact).abs() < own + 0.003 * exact, "{estimate:?} {exact}");
        }
    }
}

/// Exponentials over a few epochs, as a stream and as the Gram matrix of the sums of its columns.
fn both_ways(bins: usize, epochs: usize, seed: u64) -> [Allocation; 2] {
    use rand::RngExt;
    let n = bins * epochs;
    let mut rng = rng(seed, 0);
    let mut number = |low: f64, high: f64| low + (high - low) * rng.random::<f64>();
    let filter = Exponentials {
        weights: vec![number(0.1, 0.3), number(0.1, 0.5)],
        decays: vec![number(0.85, 0.98), number(0.2, 0.6)],
        rows: (0..n).map(|_| number(0.9, 1.1)).collect(),
        columns: (0..n).map(|_| number(0.4, 0.6)).collect(),
    };
    let mut gram = vec![0.0; bins * bins];
    let sums: Vec<Vec<f64>> = (0..bins)
        .map(|p| {
            let mut x: Vec<f64> = (0..n).map(|t| if t % bins == p { 1.0 } else { 0.0 }).collect();
            filter.apply(&mut x);
            x
        })
        .collect();
    for (k, entry) in gram.iter_mut().enumerate() {
        let (p, q) = ((k / bins).max(k % bins), (k / bins).min(k % bins));
        *entry = sums[p].iter().zip(&sums[q]).map(|(a, b)| a * b).sum();
    }
    [Allocation::new(bins, gram).unwrap(), Allocation::streamed(filter, bins).unwrap()]
}

#[test]
fn a_stream_is_its_gram_matrix() {
    for (bins, epochs, seed) in [(40, 1, 1), (24, 3, 2), (7, 5, 3)] {
        let [table, stream] = both_ways(bins, epochs, seed);
        for p in 0..bins {
            for q in 0..bins {
                let [a, b] = [table.gram(p, q), stream.gram(p, q)];
                assert!((a - b).abs() < 1e-12 * a.max(1.0), "{p} {q}: {a} {b}");
            }
        }
        let samplers = [&table, &stream].map(|a| Sampler::new(a, 1.6, 1.0, Purpose::Search).unwrap());
        let toward = samplers.each_ref().map(|sampler| sampler.away().toward);
        assert!(toward[0].iter().zip(&toward[1]).all(|(a, b)| (a - b).abs() < 1e-12));
        // The bound of the values is that of larger rows, and of not much larger ones.
        let [[of_table, table_range], [of_stream, stream_range]] =
            samplers.each_ref().map(|sampler| sampler.joined()).map(|(k, range)| [k as f64, range]);
        assert!(stream_range >= table_range - 1e-6, "{stream_range} {table_range}");
        assert!(stream_range < table_range + 1.0, "{of_table} {table_range} {of_stream} {stream_range}");
    }
}

#[test]
fn samples_of_a_stream_are_those_of_its_gram_matrix() {
    for (bins, epochs, seed, sigma) in [(40, 1, 1, 0.9), (24, 3, 2, 1.6)] {
        let [table, stream] = both_ways(bins, epochs, seed);
        let [a, b] = [&table, &stream].map(|allocation| allocation.estimate(sigma, 1.0).unwrap());
        let [off, _] = stream.estimate(1.05 * sigma, 1.0).unwrap();
        for (a, b) in a.iter().zip(&b) {
            // What a bound adds is six standard errors or more: the means differ by less than half of it, α below 1e-3.
            let own = 0.5 * (a.upper - a.mean).hypot(b.upper - b.mean);
            assert!((a.mean - b.mean).abs() < own, "{a:?} {b:?}");
        }
        // The power of it: 5 % of noise are seen.
        let own = 0.5 * (a[0].upper - a[0].mean).hypot(off.upper - off.mean);
        assert!((off.mean - a[0].mean).abs() > own, "{off:?} {:?}", a[0]);
    }
}

#[test]
#[ignore = "minutes: twenty long plain runs"]
fn twenty_mechanisms_keep_what_is_stated_in_runs_ten_times_as_long() {
    for seed in 0..20 {
        let (bins, epochs) = (3 + seed as usize % 9, 1 + seed as usize % 3);
        let [table, stream] = both_ways(bins, epochs, seed);
        let (epsilon, delta) = (0.5 + 0.1 * seed as f64, 1e-3);
        for allocation in [&table, &stream] {
            let sigma = allocation.noise_multiplier(epsilon, delta).unwrap();
            for [mean, error] in plain(&table, sigma, epsilon, 4_000_000, seed) {
                assert!(mean < delta + 4.0 * error, "{seed}: {mean} {error}");
            }
            // The power of it: 3 % less noise are seen.
            let [joining, leaving] = plain(&table, 0.97 * sigma, epsilon, 4_000_000, seed);
            assert!(joining[0].max(leaving[0]) > delta, "{seed}: {joining:?} {leaving:?}");
        }
    }
}
