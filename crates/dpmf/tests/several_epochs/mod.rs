//! Random workloads of several epochs: what is certified, and that larger families are not worse than smaller ones.

use super::{Case, Random, block_truth, heavy, nesterov, quiet};
use crate::reference::Real;
use dpmf::factorize::Optimum;
use dpmf::{Average, Optimizer, Participation, Problem};

/// Up to 60 steps in at least two epochs: zeros anywhere, warm-ups from zero, pauses, decays, and rates over up to six decades.
pub fn random_case(random: &mut Random, most: usize) -> (Case, usize) {
    let n = 2 + random.below(most - 1);
    let times = 2 + random.below(n - 1);
    let part = |i: usize, n: usize| i as f64 / n.max(1) as f64;
    let mut rates: Vec<f64> = match random.below(7) {
        0 => {
            let share = 0.05 + 0.65 * random.unit();
            (0..n).map(|_| if random.unit() < share { 0.0 } else { 0.05 + 0.95 * random.unit() }).collect()
        }
        1 => {
            let warm_up = 1 + random.below(n);
            (0..n).map(|i| part(i, warm_up).min(1.0)).collect()
        }
        2 => {
            let peak = 1 + random.below(n);
            (0..n).map(|i| if i < peak { part(i, peak) } else { part(n - i, n - peak) }).collect()
        }
        3 => {
            let decades = 1.0 + 5.0 * random.unit();
            (0..n).map(|_| 10f64.powf(-decades * random.unit())).collect()
        }
        4 => {
            let (a, b) = (random.below(n + 1), random.below(n + 1));
            (0..n).map(|i| if (a.min(b)..a.max(b)).contains(&i) { 0.0 } else { 1.0 }).collect()
        }
        5 => (0..n).map(|i| 0.5 * (1.0 + (std::f64::consts::PI * part(i, n - 1)).cos())).collect(),
        _ => (0..n).map(|_| 0.1 + 0.9 * random.unit()).collect(),
    };
    if rates.iter().all(|&eta| eta == 0.0) {
        rates[0] = 1.0;
    }
    let any = 0.99 * random.unit();
    let momentum = random.pick(&[0.0, 0.0, 0.5, 0.9, 0.95, 0.99, any]);
    let weight_decay = random.pick(&[0.0, 0.0, 0.0, 1e-3, 0.1, 0.5]);
    let average = random.pick(&[
        Average::None,
        Average::None,
        Average::None,
        Average::Uniform,
        Average::Ema(0.5),
        Average::Ema(0.9),
        Average::Ema(0.99),
    ]);
    let optimizer = Optimizer {
        momentum,
        nesterov: momentum > 0.0 && random.below(3) == 0,
        weight_decay,
        coupled: weight_decay > 0.0 && random.below(3) == 0,
        average,
    };
    (Case { rates, optimizer }, times)
}

/// Holds an optimum against the bound of its dual point in 106-bit arithmetic, and against the factorization that it stands for.
fn sound(case: &Case, optimum: &Optimum) -> Result<(), String> {
    let certificate = &optimum.certificate;
    let exact = block_truth(&case.matrix(), &optimum.dual);
    let slack = (Real::from(certificate.lower_bound) / exact - Real::ONE).0;
    // The factor of D is rounded to f64, which is another point with a bound of its own.
    if slack > 1e-14 || slack.is_nan() {
        return Err(format!("the bound is {slack:e} above that of its dual point"));
    }
    if (certificate.gap <= 1e-6) != optimum.stopped.is_none() {
        return Err(format!("a gap of {:e} with {:?}", certificate.gap, optimum.stopped));
    }
    let (_, dense) = optimum.to_dense(&case.workload()).map_err(|error| format!("dense: {error}"))?;
    // The matrix itself is measured with all its rounding; it must not be far above what was said, nor below the bound. Where step
    // sizes are zero or differ much it is the one that is best in single precision, which costs some of its loss in double.
    let largest = case.rates.iter().copied().fold(0.0, f64::max);
    let rough = case.rates.iter().any(|rate| *rate < 1e-3 * largest);
    let excess = dense.loss / certificate.loss - 1.0;
    if dense.loss < certificate.lower_bound || excess > if rough { 5e-3 } else { 1e-4 } || excess.is_nan() {
        return Err(format!("its matrix has a loss that is {excess:e} off, gap {:e}", certificate.gap));
    }
    Ok(())
}

fn campaign(seed: u64, count: usize, most: usize, allowed: usize) {
    let mut random = Random(seed);
    let (mut open, mut wrong) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let (case, times) = random_case(&mut random, most);
        let told = format!("{times} epochs {:?} {:?}", case.optimizer, case.rates);
        let problem = Problem::new(case.workload(), Participation::Epochs { times }).expect("a problem");
        match problem.optimum(&mut quiet) {
            Err(error) => wrong.push(format!("{told}: {error}")),
            Ok(optimum) => {
                if let Err(complaint) = sound(&case, optimum) {
                    wrong.push(format!("{told}: {complaint}"));
                }
                if let Some(reason) = optimum.stopped {
                    open.push(format!("{told}: gap {:e}, {reason}", optimum.certificate.gap));
                }
            }
        }
    }
    println!("{} of {count} certified\n{}", count - open.len(), open.join("\n"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(open.len() <= allowed, "{} of {count} are open", open.len());
}

#[test]
fn random_workloads_of_several_epochs_are_certified() {
    campaign(21, 60, 20, 1);
}

#[test]
#[ignore = "five hundred workloads of up to 60 steps: minutes"]
fn five_hundred_workloads_of_several_epochs_are_certified() {
    campaign(22, 500, 60, 10);
}

/// Random workloads, and in each the families by size: the next size is not worse.
fn nested(seed: u64, count: usize, most: usize) {
    const CHAINS: [&[&str]; 5] = [
        &[
            "banded-toeplitz:bands=1",
            "banded-toeplitz:bands=2",
            "banded-toeplitz:bands=4",
            "banded-toeplitz:bands=8",
        ],
        &["banded-inverse:bands=1", "banded-inverse:bands=2", "banded-inverse:bands=4"],
        &["blt:buffers=1", "blt:buffers=2", "blt:buffers=3"],
        &["banded:bands=1", "banded:bands=2", "banded:bands=4"],
        &["recall:buffers=1:recalls=1", "recall:buffers=2:recalls=2"],
    ];
    let (mut random, mut worse, mut pairs) = (Random(seed), Vec::new(), 0);
    for _ in 0..count {
        let (case, times) = random_case(&mut random, most);
        let problem = Problem::new(case.workload(), Participation::Epochs { times }).expect("a problem");
        for chain in CHAINS {
            let mut least: Option<f64> = None;
            for name in chain {
                // More diagonals than steps between participations are an error.
                let Ok(mechanism) = problem.mechanism(name.parse().expect("a selector"), &mut quiet) else {
                    continue;
                };
                let loss = mechanism.loss().sqrt_total();
                if let Some(least) = least {
                    pairs += 1;
                    if loss > least * (1.0 + 1e-6) {
                        let told = format!("{times} epochs {:?} {:?}", case.optimizer, case.rates);
                        worse.push(format!("{name}: {least} becomes {loss}: {told}"));
                    }
                }
                least = Some(least.map_or(loss, |least| least.min(loss)));
            }
        }
    }
    println!("{pairs} pairs");
    assert!(pairs >= 6 * count, "{pairs}");
    assert!(worse.is_empty(), "{} of {pairs}:\n{}", worse.len(), worse.join("\n"));
}

#[test]
fn larger_families_are_not_worse() {
    nested(31, 4, 16);
}

#[test]
#[ignore = "two hundred workloads in all families: minutes"]
fn larger_families_are_not_worse_in_two_hundred_workloads() {
    nested(32, 200, 60);
}

/// Step sizes that once left a gap of 5 % open, with a sentence that blamed rounding; and some with zeros.
#[test]
fn step_sizes_that_once_stopped_the_solver() {
    let early = [
        0.21224617296135392,
        0.00024536680571147763,
        0.0033483156881431637,
        0.686_188_022_225_903_1,
        0.034_448_836_653_876_58,
        0.0019510520903745412,
    ];
    let averaged = Optimizer { average: Average::Ema(0.99), ..nesterov(0.5999) };
    let warm_up: Vec<f64> = (0..24).map(|i| f64::from(i.min(8)) / 8.0).collect();
    for (rates, optimizer, times) in [
        (&early[..], averaged, 3),
        (&[1.0, 1.0, 1.0, 1.0, 1.0, 0.0][..], heavy(0.9), 3),
        (&warm_up[..], heavy(0.9), 3),
    ] {
        let case = Case::new(rates, optimizer);
        let problem = Problem::new(case.workload(), Participation::Epochs { times }).expect("a problem");
        let optimum = problem.optimum(&mut quiet).unwrap();
        assert!(optimum.stopped.is_none() && optimum.certificate.gap <= 1e-6, "{rates:?}: {optimum:?}");
        sound(&case, optimum).unwrap();
    }
}

/// Optima whose matrices once lost a part of what was found, or all of it, in single precision.
#[test]
fn matrices_keep_what_was_found() {
    let cosine = |n: usize| -> Vec<f64> {
        (0..n).map(|i| 0.5 * (1.0 + (std::f64::consts::PI * i as f64 / (n - 1) as f64).cos())).collect()
    };
    let pause: Vec<f64> = (0..46).map(|i| if (5..45).contains(&i) { 0.0 } else { 1.0 }).collect();
    let late = [0.0, 0.0, 0.0, 0.0, 0.41922511026816256, 0.958_878_860_088_083_3, 0.0, 0.0];
    let averaged = Optimizer { average: Average::Ema(0.99), ..Optimizer::default() };
    for (rates, optimizer, times) in [
        (pause, Optimizer { weight_decay: 1e-3, ..nesterov(0.790_131_911_619_994_4) }, 9),
        (cosine(17), Optimizer { weight_decay: 1e-3, ..averaged }, 17),
        (late.to_vec(), Optimizer { weight_decay: 0.5, ..averaged }, 6),
        (cosine(41), heavy(0.95), 41),
        (cosine(60), heavy(0.5), 2),
    ] {
        let case = Case::new(&rates, optimizer);
        let problem = Problem::new(case.workload(), Participation::Epochs { times }).expect("a problem");
        let optimum = problem.optimum(&mut quiet).unwrap();
        assert!(optimum.stopped.is_none(), "{times} epochs {rates:?}: {optimum:?}");
        sound(&case, optimum).unwrap_or_else(|complaint| panic!("{times} epochs {rates:?}: {complaint}"));
    }
}
