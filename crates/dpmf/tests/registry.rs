//! Properties that every mechanism in the registry must have: a new family is covered by joining `family::ALL`.
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

use dpmf::factorize::{Options, Solver, quiet};
use dpmf::{
    Average, Optimizer, Participation, Problem, Representation, Schedule, Selector, Workload, family, format,
};
use faer::{Mat, MatRef};
use proptest::prelude::*;

/// Every family, and the other forms that some of them take.
fn selectors() -> impl Iterator<Item = Selector> {
    let more = [
        "optimal:dense",
        "optimal-prefix:dense",
        "state-space:buffers=2",
        "structured:diagonals=1:rank=0",
        "recall:buffers=1:recalls=1",
        "recall:buffers=0:recalls=2",
        "blt:buffers=1",
        "banded:bands=2",
        "banded-inverse:bands=2",
    ];
    family::all().chain(more.map(|text| text.parse().unwrap()))
}

fn workload(n: usize, optimizer: Optimizer, schedule: &str) -> Workload {
    Workload::sgd(schedule.parse::<Schedule>().unwrap().values(n), optimizer).unwrap()
}

/// One workload of every kind.
fn workloads(n: usize) -> Vec<(&'static str, Workload)> {
    let momentum = Optimizer { momentum: 0.9, ..Default::default() };
    let nesterov = Optimizer { nesterov: true, ..momentum };
    let decoupled = Optimizer { weight_decay: 0.2, ..momentum };
    let coupled = Optimizer { coupled: true, ..decoupled };
    let uniform = Optimizer { average: Average::Uniform, ..Default::default() };
    let ema = Optimizer { average: Average::Ema(0.7), ..momentum };
    let matrix = Mat::from_fn(n, n, |i, j| if i >= j { 1.0 / (1.0 + (i - j) as f64).sqrt() } else { 0.0 });
    vec![
        ("prefix sum", Workload::prefix_sum(n).unwrap()),
        ("schedule", workload(n, Optimizer::default(), "warmup:4+cosine:0.1")),
        ("momentum", workload(n, momentum, "constant")),
        ("cooldown", workload(n, momentum, "cooldown:0.25:0.05")),
        ("nesterov", workload(n, nesterov, "decay:0.25:0.15")),
        ("decoupled decay", workload(n, decoupled, "constant")),
        ("coupled decay", workload(n, coupled, "exp:0.95")),
        ("uniform average", workload(n, uniform, "constant")),
        ("exponential average", workload(n, ema, "constant")),
        ("matrix", Workload::dense(matrix).unwrap()),
    ]
}

fn problem(workload: Workload) -> Problem {
    let options = Options { gap: 1e-7, ..Options::default() };
    Problem::with_solver(workload, Participation::default(), Solver::Auto, options).unwrap()
}

/// The largest `Σ_{i,j∈π} |X_ij|` over all patterns, by trying them.
fn squared_sensitivity(encoder: &Mat<f64>, participation: Participation) -> f64 {
    let (n, x) = (encoder.ncols(), encoder.transpose() * encoder);
    let pattern = participation.pattern(n).unwrap();
    let separation = pattern.separation.unwrap_or(n);
    let sum =
        |steps: &[usize]| steps.iter().flat_map(|i| steps.iter().map(|j| x[(*i, *j)].abs())).sum::<f64>();
    match participation {
        Participation::MinSeparation { .. } => {
            let (mut largest, mut chains) = (0.0_f64, vec![vec![]]);
            while let Some(chain) = chains.pop() {
                largest = largest.max(sum(&chain));
                let next = chain.last().map_or(0, |last| last + separation);
                if chain.len() < pattern.times {
                    chains.extend((next..n).map(|step| [&chain[..], &[step]].concat()));
                }
            }
            largest
        }
        _ => {
            (0..separation).map(|p| sum(&(p..n).step_by(separation).collect::<Vec<_>>())).fold(0.0, f64::max)
        }
    }
}

/// `N C = I` (so `B C = A`), norms equal those of the dense matrices, loss is not below the bound, and files
/// round-trip, for what is designed and for what is deployed.
fn check(name: &str, problem: &Problem, selector: Selector) {
    let n = problem.steps();
    let label = format!("{selector} for {name}, n = {n}");
    let designed = selector.family().fit(problem, &selector.budget(), &mut quiet).unwrap();
    let mechanism = problem.mechanism(selector, &mut quiet).unwrap();
    let a = problem.workload().to_dense();
    for form in [&designed, mechanism.form()] {
        let (coloring, encoder) = (form.coloring(), form.encoder());
        let identity = &coloring * &encoder;
        let distance = (identity - Mat::<f64>::identity(n, n)).norm_max();
        assert!(distance < 1e-8, "{label}: N C is off the identity by {distance:e}");

        let decoder = &a * &coloring;
        let decoder_norms = form.decoder_row_norms_sq(problem.workload());
        let encoder_norms = form.encoder_column_norms_sq();
        for i in 0..n {
            let exact = decoder.row(i).squared_norm_l2();
            assert!((decoder_norms[i] - exact).abs() <= 1e-8 * exact, "{label}: row {i}");
            let exact = encoder.col(i).squared_norm_l2();
            assert!((encoder_norms[i] - exact).abs() <= 1e-8 * exact, "{label}: column {i}");
        }
        let sensitivity = problem.participation().sensitivity(form).unwrap().gamma;
        let square = squared_sensitivity(&encoder, problem.participation());
        assert!(
            square.sqrt() <= sensitivity,
            "{label}: {} exceeds the sensitivity {sensitivity}",
            square.sqrt()
        );
        several_participations(form, encoder.as_ref(), &label);
    }

    let certificate = mechanism.certificate().unwrap();
    assert!(certificate.gap > -1e-12, "{label}: the loss beats its lower bound by {}", -certificate.gap);
    let bytes = format::to_bytes(&mechanism).unwrap();
    let back = format::from_bytes(&bytes).unwrap();
    assert_eq!(back.loss(), mechanism.loss(), "{label}");
    assert_eq!(back.certificate(), mechanism.certificate(), "{label}");
    assert_eq!(back.identity(), mechanism.identity(), "{label}");
    assert_eq!(format::to_bytes(&back).unwrap(), bytes, "{label}");
    let recomputed = mechanism.recompute_bound().unwrap().unwrap();
    assert!(certificate.lower_bound <= recomputed * (1.0 + 1e-6), "{label}");
}

/// Sensitivities for several participations are those of the dense encoder, rounded up.
fn several_participations(form: &dyn Representation, encoder: MatRef<'_, f64>, label: &str) {
    let n = form.steps();
    let x = encoder.transpose() * encoder;
    let gamma = |text: String| {
        text.parse::<Participation>().unwrap().sensitivity(form).unwrap_or_else(|e| panic!("{label}: {e}"))
    };
    assert_eq!(gamma("epochs:1".into()), gamma("single".into()), "{label}");
    assert_eq!(gamma(format!("min-separation:{n}")), gamma("single".into()), "{label}");
    for times in (2..=4).filter(|times| *times <= n) {
        let separation = n.div_ceil(times);
        let total = |p: usize| -> f64 {
            let steps: Vec<usize> = (p..n).step_by(separation).collect();
            steps.iter().flat_map(|i| steps.iter().map(|j| x[(*i, *j)].abs())).sum()
        };
        let exact = (0..separation).map(total).fold(0.0, f64::max);
        let epochs = gamma(format!("epochs:{times}")).gamma;
        assert!(epochs * epochs >= exact * (1.0 - 1e-13), "{label}: {epochs} {exact}");
        assert!(epochs * epochs <= exact * (1.0 + 1e-8), "{label}: {epochs} {exact}");
        let separated = gamma(format!("min-separation:{separation}")).gamma;
        assert!(separated >= epochs * (1.0 - 1e-12), "{label}: {separated} {epochs}");
        let fewer = gamma(format!("min-separation:{separation}:{}", times - 1)).gamma;
        assert!(fewer <= separated * (1.0 + 1e-12), "{label}: {fewer} {separated}");
    }
}

#[test]
fn every_mechanism_for_every_workload() {
    for n in [1, 2, 3, 12, 33] {
        for (name, workload) in workloads(n) {
            let problem = problem(workload);
            for selector in selectors() {
                check(name, &problem, selector);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn random_optimizers(
        rates in prop::collection::vec(0.05..1.5_f64, 1..14),
        momentum in prop_oneof![Just(0.0), 0.1..0.98_f64],
        weight_decay in prop_oneof![Just(0.0), 0.01..0.5_f64],
    ) {
        let optimizer = Optimizer { momentum, weight_decay, ..Default::default() };
        let problem = problem(Workload::sgd(rates, optimizer).unwrap());
        for selector in selectors() {
            check("a random optimizer", &problem, selector);
        }
    }
}

/// The same under several participations; families that have no answer there say so.
#[test]
fn every_mechanism_for_several_epochs() {
    for (name, workload) in workloads(12) {
        for text in ["epochs:3", "min-separation:5", "min-separation:4:2"] {
            let (participation, options) =
                (text.parse().unwrap(), Options { gap: 1e-5, ..Options::default() });
            let problem =
                Problem::with_solver(workload.clone(), participation, Solver::Auto, options).unwrap();
            let mut answered = 0;
            for selector in selectors() {
                match problem.mechanism(selector, &mut quiet) {
                    Ok(_) => check(&format!("{name} {text}"), &problem, selector),
                    Err(error) => {
                        assert_eq!(
                            (selector.name(), error.kind()),
                            ("state-space", "unsupported"),
                            "{error}"
                        );
                        continue;
                    }
                }
                answered += 1;
            }
            assert!(answered >= 9);
        }
    }
}

/// The optimum is the best of all mechanisms, on every workload.
#[test]
fn nothing_beats_the_optimum() {
    for (name, workload) in workloads(32) {
        let problem = problem(workload.clone());
        let best = problem.mechanism("optimal:dense".parse().unwrap(), &mut quiet).unwrap().loss().total();
        for selector in selectors() {
            let loss = problem.mechanism(selector, &mut quiet).unwrap().loss().total();
            assert!(loss >= best * (1.0 - 1e-6), "{selector} for {name}: {loss} < {best}");
        }
        let options = Options { gap: 1e-6, ..Options::default() };
        let participation = Participation::Epochs { times: 4 };
        let problem = Problem::with_solver(workload, participation, Solver::Auto, options).unwrap();
        let best = problem.mechanism("optimal:dense".parse().unwrap(), &mut quiet).unwrap().loss().total();
        for selector in selectors().filter(|selector| selector.name() != "state-space") {
            let loss = problem.mechanism(selector, &mut quiet).unwrap().loss().total();
            assert!(loss >= best * (1.0 - 2e-6), "{selector} for {name}, four epochs: {loss} < {best}");
        }
    }
}

/// At one and the same dual variable, the dense and the linear oracle agree.
#[test]
fn dense_and_linear_oracles_agree() {
    use dpmf::factorize::{DenseOracle, LinearOracle, Oracle};
    for (name, workload) in workloads(40) {
        let Some(recurrence) = workload.recurrence() else { continue };
        let v: Vec<f64> = (0..40).map(|i| 1.0 + (7.0 * i as f64).sin().abs() * 5.0).collect();
        let sum = |oracle: &mut dyn Oracle| -> f64 {
            oracle.diagonal(&v, 1e-13).unwrap().x.iter().zip(&v).map(|(x, v)| x * v).sum()
        };
        let dense = sum(&mut DenseOracle::new(workload.to_dense()));
        let linear = sum(&mut LinearOracle::new(recurrence).unwrap());
        assert!((dense / linear - 1.0).abs() < 1e-9, "{name}: {dense} {linear}");
    }
}
