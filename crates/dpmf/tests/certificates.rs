//! Certificates are inequalities: no bound above the optimum, no loss below it, whatever the workload.

mod reference;
mod several_epochs;

use dpmf::factorize::{Dual, Options, Progress, Solver, Target, lower_bound_at, optimal};
use dpmf::{
    Average, Error, Form, Mechanism, Optimizer, Participation, Problem, Representation, Workload, family,
    format,
};
use reference::{Columns, Real, dot, matrix, truth};
use std::ops::ControlFlow;

/// A workload as given, and as the reference sees it.
struct Case {
    rates: Vec<f64>,
    optimizer: Optimizer,
}

impl Case {
    fn new(rates: &[f64], optimizer: Optimizer) -> Self {
        Self { rates: rates.to_vec(), optimizer }
    }

    fn workload(&self) -> Workload {
        Workload::sgd(self.rates.clone(), self.optimizer).expect("a workload")
    }

    fn matrix(&self) -> Columns {
        matrix(&self.rates, &self.optimizer)
    }
}

/// How a solver may end.
#[derive(Default, Debug)]
struct Ends {
    certified: usize,
    /// With a sentence and a gap that was proved.
    stopped: usize,
    /// Largest `bound(v)/true bound(v) − 1`, below zero.
    closest: f64,
    /// Least of the same: what proving costs.
    loosest: f64,
    widest_gap: f64,
    /// What was said where there is no certificate.
    sentences: Vec<String>,
    /// What did not hold.
    wrong: Vec<String>,
}

impl Ends {
    fn new() -> Self {
        Self { closest: -1.0, ..Self::default() }
    }

    /// Solves, and holds the end against the reference.
    fn judge(&mut self, case: &Case, solver: Solver) {
        if let Err(complaint) = self.hold(case, solver) {
            self.wrong.push(format!("{solver:?} {:?} {:?}: {complaint}", case.optimizer, case.rates));
        }
    }

    fn hold(&mut self, case: &Case, solver: Solver) -> Result<(), String> {
        let workload = case.workload();
        let found = optimal(&workload, solver, &Options::default(), &mut quiet);
        let v = match &found {
            Ok(optimum) => optimum.dual.v().to_vec(),
            Err(error @ Error::NotConverged { dual, gap, .. }) if gap.is_finite() => {
                self.widest_gap = self.widest_gap.max(*gap);
                self.sentences.push(format!("{solver:?} {:?} {:?}: {error}", case.optimizer, case.rates));
                dual.v.clone()
            }
            Err(error) => return Err(error.to_string()),
        };
        let truth = truth(&case.matrix(), &v);
        let bound = Dual::single(v.clone()).and_then(|dual| lower_bound_at(&workload, &dual));
        let bound = bound.map_err(|error| error.to_string())?;
        let slack = (Real::from(bound) / truth.bound - Real::ONE).0;
        if slack > 0.0 || slack.is_nan() {
            return Err(format!("the bound is {slack:e} above that of its v"));
        }
        (self.closest, self.loosest) = (self.closest.max(slack), self.loosest.min(slack));
        let Ok(optimum) = found else {
            self.stopped += 1;
            return Ok(());
        };
        let certificate = optimum.certificate;
        if certificate.lower_bound != bound || !(0.0..=1e-6).contains(&certificate.gap) {
            return Err(format!("{certificate:?}, but its v proves {bound:e}"));
        }
        // An optimum in its dual form is measured in f64.
        let short = (Real::from(certificate.loss) / truth.loss - Real::ONE).0;
        if Real::from(certificate.loss).less(truth.bound) || short < -1e-9 {
            return Err(format!("the loss is off by {short:e}"));
        }
        self.certified += 1;
        Ok(())
    }

    /// Prints the counts; all must hold, and all but a few be certified.
    fn conclude(self, allowed: usize) {
        println!("{self:#?}");
        assert!(self.wrong.is_empty() && self.stopped <= allowed);
    }
}

fn heavy(momentum: f64) -> Optimizer {
    Optimizer { momentum, ..Optimizer::default() }
}

fn nesterov(momentum: f64) -> Optimizer {
    Optimizer { nesterov: true, ..heavy(momentum) }
}

fn with_spike(n: usize, at: usize, rate: f64) -> Vec<f64> {
    (0..n).map(|i| if i == at { rate } else { 1.0 }).collect()
}

/// Workloads that once had bounds above the optimum, or ended in words about the solver's insides.
fn once_wrong() -> Vec<(Case, Solver)> {
    let ema = |alpha, optimizer| Optimizer { average: Average::Ema(alpha), ..optimizer };
    let coupled = |weight_decay, optimizer| Optimizer { weight_decay, coupled: true, ..optimizer };
    let decayed = |weight_decay, optimizer| Optimizer { weight_decay, ..optimizer };
    let dips = [
        7.202352969943009e-15,
        7.202352969943009e-15,
        7.202352969943009e-15,
        7.202352969943009e-15,
        1.0,
        7.202352969943009e-15,
    ];
    let tiny: Vec<f64> = (0..42).map(|i| if i / 14 == 1 { 1e-10 } else { 1.0 }).collect();
    let saw = [1.0, 4010.6657205558736, 1.0, 4010.6657205558736, 1.0];
    let linear = [
        Case::new(&[1.0, 0.0027879377595452738, 1.0, 1.0], ema(0.9, coupled(0.1, nesterov(0.9)))),
        Case::new(&[1.0, 1.0, 1e8, 1.0], nesterov(0.9)),
        Case::new(&with_spike(34, 17, 35312176.6697416), nesterov(0.9)),
        Case::new(&saw, heavy(0.9)),
        Case::new(&[1.0, 5311.349736604793, 5311.349736604793], ema(0.9, heavy(0.9))),
        Case::new(&[1e-10, 1.0], heavy(0.99)),
    ];
    let dense = [
        Case::new(&[1.0, 1e-10, 1.0], ema(0.999, decayed(0.09999990000010002, nesterov(0.5)))),
        Case::new(&dips, Optimizer::default()),
        Case::new(&tiny, ema(0.9, Optimizer::default())),
        Case::new(&with_spike(7, 2, 1e6), ema(0.9, nesterov(0.9))),
    ];
    let both = linear.into_iter().map(|case| (case, Solver::Linear));
    both.chain(dense.into_iter().map(|case| (case, Solver::Dense))).collect()
}

#[test]
fn bounds_that_were_once_false_hold() {
    let mut ends = Ends::new();
    for (case, solver) in once_wrong() {
        for solver in [solver, Solver::Linear, Solver::Dense] {
            ends.judge(&case, solver);
        }
    }
    assert!(ends.loosest > -1e-11, "{ends:?}");
    ends.conclude(0);
}

fn quiet(_: &Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// What is deployed says of itself what is true of it, and where 32-bit coefficients cost much, the loss shows it.
#[test]
fn deployed_losses_and_sensitivities_are_true() {
    for (case, solver) in once_wrong() {
        let workload = case.workload();
        let optimum = optimal(&workload, solver, &Options::default(), &mut quiet).unwrap();
        let dense = Form::Dense(optimum.to_dense(&workload).unwrap().0);
        let stream = optimum.to_state_space(&workload, Target::Buffers(4), &mut quiet).map(Form::StateSpace);
        for factorization in [Ok(dense), stream] {
            let mechanism = factorization.and_then(|factorization| {
                Mechanism::new(workload.clone(), &factorization, Participation::default())
            });
            let mechanism = match mechanism {
                Ok(mechanism) => mechanism,
                Err(error) => panic!("{:?} {:?}: {error}", case.optimizer, case.rates),
            };
            let (sensitivity, loss, encoder) = measured(&case, mechanism.form());
            for separation in 1..case.rates.len() {
                let truth = even_sums(&encoder, separation).fold(Real::ZERO, Real::max).sqrt();
                let times = None;
                let participation = Participation::MinSeparation { separation, times };
                let stated = participation.sensitivity(mechanism.form()).unwrap().gamma;
                assert!(Real::from(stated).0 >= truth.0, "{participation}: {stated} {}", truth.0);
                let times = case.rates.len().div_ceil(separation);
                if case.rates.len().div_ceil(times) == separation {
                    let epochs = Participation::Epochs { times }.sensitivity(mechanism.form()).unwrap().gamma;
                    assert!(
                        epochs >= truth.0 && epochs <= truth.0 * (1.0 + 1e-9),
                        "{times}: {epochs} {}",
                        truth.0
                    );
                }
            }
            let stated = mechanism.loss();
            assert!(stated.sensitivity() >= sensitivity, "{} {sensitivity}", stated.sensitivity());
            assert!(stated.total() >= loss * (1.0 - 1e-9), "{} {loss}", stated.total());
            let ratio = (loss / optimum.certificate.lower_bound).sqrt();
            assert!(ratio < 1.0 + 1e-5, "{:?} {:?}: {ratio}", case.optimizer, case.rates);
        }
    }
}

/// Sensitivity and loss of a factorization from its coefficients, in 106 bits, and the columns of its encoder.
fn measured(case: &Case, factorization: &Form) -> (f64, f64, Columns) {
    let n = case.rates.len();
    let mut rows = factorization.coloring_rows();
    let mut coloring = vec![vec![Real::ZERO; n]; n];
    for i in 0..n {
        let mut row = vec![0.0; n];
        rows(&mut row);
        (0..n).for_each(|j| coloring[j][i] = Real::from(row[j]));
    }
    let (a, encoder) = (case.matrix(), inverse(&coloring));
    let (mut largest, mut energy) = (Real::ZERO, Real::ZERO);
    for j in 0..n {
        largest = largest.max(dot(&encoder[j], &encoder[j]));
        for i in 0..n {
            let b: Real = (0..n).map(|k| a[k][i] * coloring[j][k]).sum();
            energy = energy + b * b;
        }
    }
    (largest.sqrt().0, (largest * energy).0, encoder)
}

/// The columns of the inverse of a lower triangular matrix, by substitution.
fn inverse(lower: &Columns) -> Columns {
    let n = lower.len();
    let column = |j: usize| {
        let mut column = vec![Real::ZERO; n];
        for i in j..n {
            let unit = if i == j { Real::ONE } else { Real::ZERO };
            let known: Real = (j..i).map(|k| lower[k][i] * column[k]).sum();
            column[i] = (unit - known) / lower[i][i];
        }
        column
    };
    (0..n).map(column).collect()
}

/// `Σ|X_ij|` over the steps of a unit, for every one that takes part at even distances.
fn even_sums(encoder: &Columns, separation: usize) -> impl Iterator<Item = Real> {
    let n = encoder.len();
    (0..separation.min(n)).map(move |p| {
        let steps = (p..n).step_by(separation);
        let pairs = steps.clone().flat_map(|i| steps.clone().map(move |j| (i, j)));
        pairs.map(|(i, j)| dot(&encoder[i], &encoder[j]).abs()).sum()
    })
}

/// SplitMix64: any fixed sequence will do.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn optimizer(&mut self, largest_rate: f64) -> Optimizer {
        let momentum = self.pick(&[0.0, 0.0, 0.5, 0.9, 0.99]);
        // Below what the largest step size allows.
        let weight_decay = self.pick(&[0.0, 0.0, 0.001, 0.1, 0.9]) / largest_rate;
        let average = self.pick(&[
            Average::None,
            Average::None,
            Average::Uniform,
            Average::Ema(0.9),
            Average::Ema(0.999),
        ]);
        Optimizer {
            momentum,
            nesterov: momentum > 0.0 && self.below(2) == 0,
            weight_decay,
            coupled: weight_decay > 0.0 && self.below(2) == 0,
            average,
        }
    }

    /// Rates that are smooth, rough over 12 decades, or spiked; sometimes with zeros.
    fn rates(&mut self, n: usize) -> Vec<f64> {
        let kind = self.below(4);
        let spike = 10f64.powf(12.0 * self.unit() - 6.0);
        let mut rates: Vec<f64> = (0..n)
            .map(|i| match kind {
                0 => 10f64.powf(12.0 * self.unit() - 6.0),
                1 => {
                    if self.below(4) == 0 {
                        spike
                    } else {
                        1.0
                    }
                }
                2 => (1.0 + (std::f64::consts::PI * i as f64 / n as f64).cos()) / 2.0,
                _ => {
                    if i == n / 2 {
                        spike
                    } else {
                        1.0
                    }
                }
            })
            .collect();
        if self.below(3) == 0 {
            // A warm-up from zero, a decay to zero, and a pause anywhere.
            let (from, to) = (self.below(n), self.below(n));
            let zero = self.pick(&[(0, 1), (n - 1, n), (from.min(to), from.max(to))]);
            rates[zero.0..zero.1].fill(0.0);
            if rates.iter().all(|&eta| eta == 0.0) {
                rates[n / 2] = 1.0;
            }
        }
        rates
    }

    fn case(&mut self, n: usize) -> Case {
        let rates = self.rates(n);
        let optimizer = self.optimizer(rates.iter().copied().fold(0.0, f64::max));
        Case { rates, optimizer }
    }
}

fn campaign(seed: u64, sizes: impl Iterator<Item = usize>) -> Ends {
    let (mut random, mut ends) = (Random(seed), Ends::new());
    for n in sizes {
        let case = random.case(n);
        let solver = random.pick(&[Solver::Auto, Solver::Linear, Solver::Dense]);
        ends.judge(&case, solver);
    }
    ends
}

#[test]
fn certificates_of_random_workloads_hold() {
    let ends = campaign(1, (0..400).map(|i| 1 + i % 8).chain([20, 33, 47]));
    ends.conclude(4);
}

#[test]
#[ignore = "ten thousand workloads against 106-bit arithmetic: minutes"]
fn certificates_of_ten_thousand_workloads_hold() {
    let small = (0..9_700).map(|i| 1 + i % 8);
    let medium = (0..295).map(|i| 9 + i % 40);
    let ends = campaign(2, small.chain(medium).chain([100, 120, 150, 180, 200]));
    ends.conclude(20);
}

/// Whoever writes a file chooses `v`.
#[test]
fn no_dual_variable_fools_the_bound() {
    let mut random = Random(3);
    let mut loosest = 0.0_f64;
    for i in 0..300 {
        let n = 1 + i % 6;
        let case = random.case(n);
        let decades = random.pick(&[1.0, 10.0, 100.0, 600.0]);
        let v: Vec<f64> = (0..n).map(|_| 10f64.powf(decades * (random.unit() - 0.5))).collect();
        let bound = lower_bound_at(&case.workload(), &Dual::single(v.clone()).unwrap()).unwrap();
        // The reference wants v in its range; any other v has a bound below the optimum all the same.
        let largest = v.iter().copied().fold(0.0, f64::max);
        let tame: Vec<f64> = v.iter().map(|v| (v / largest).max(1e-40)).collect();
        let optimum = optimal(&case.workload(), Solver::Linear, &Options::default(), &mut quiet);
        if let Ok(optimum) = &optimum {
            assert!(bound <= optimum.certificate.loss, "{:?} {v:?}", case.rates);
        }
        if decades <= 10.0 {
            let exact = truth(&case.matrix(), &tame).bound;
            let slack = (Real::from(bound) / exact - Real::ONE).0;
            assert!(slack <= 1e-15, "{:?} {v:?}: {slack:e}", case.rates);
            loosest = loosest.min(slack);
        }
    }
    assert!(loosest > -1e-10, "{loosest:e}");
}

/// Blocks for several epochs, with directions of any kind: never above what is true at that point, and close to it where step
/// sizes are not wild.
#[test]
fn no_dual_point_of_several_epochs_fools_the_bound() {
    let mut random = Random(11);
    let mut loosest = 0.0_f64;
    for i in 0..400 {
        let n = 2 + i % 8;
        let (case, separation) = (random.case(n), 1 + random.below(n - 1));
        let times = n.div_ceil(separation);
        let decades = random.pick(&[1.0, 10.0, 60.0]);
        let v: Vec<f64> = (0..separation).map(|_| 10f64.powf(decades * (random.unit() - 0.5))).collect();
        let flat = random.pick(&[1.0, 1.0, 1e-3, 1e-9]);
        let mut directions = vec![0.0; n * times];
        for (step, row) in directions.chunks_exact_mut(times).enumerate() {
            let own = step / separation;
            row[..own].iter_mut().for_each(|y| *y = 2.0 * random.unit() - 1.0);
            row[own] = flat * (0.1 + random.unit());
        }
        let dual = Dual::new(n, separation, v, directions).unwrap();
        let bound = match lower_bound_at(&case.workload(), &dual) {
            Ok(bound) => bound,
            Err(error) => panic!("{:?} {:?}: {error}", case.optimizer, case.rates),
        };
        // What is smaller than 2⁻¹⁰⁰ of the largest is raised to it.
        let largest = dual.v().iter().copied().fold(0.0, f64::max);
        let floor = 2f64.powi(largest.log2().floor() as i32 - 100);
        let v = dual.v().iter().map(|v| v.max(floor)).collect();
        let raised = Dual::new(n, separation, v, dual.directions().to_vec()).unwrap();
        let exact = block_truth(&case.matrix(), &raised);
        let slack = (Real::from(bound) / exact - Real::ONE).0;
        // The factor of D is rounded to f64, which is another point with a bound of its own.
        assert!(slack <= 1e-14, "{:?} {:?} {dual:?}: {slack:e}", case.optimizer, case.rates);
        if decades <= 10.0 && flat == 1.0 {
            loosest = loosest.min(slack);
        }
    }
    // Rates over eight decades cost digits: P holds their inverses.
    assert!(loosest > -1e-6, "{loosest:e}");
}

/// `(Σσ)²/Σv`, `σ` the singular values of `A G`.
fn block_truth(a: &Columns, dual: &Dual) -> Real {
    let (n, b, times) = (dual.steps(), dual.separation(), dual.times());
    let column = |j: usize| {
        let mut column = vec![Real::ZERO; n];
        for i in dual.phase(j % b).filter(|i| *i >= j) {
            let g = Real::from(dual.v()[i % b]).sqrt() * Real::from(dual.directions()[i * times + j / b]);
            column.iter_mut().zip(&a[i]).for_each(|(x, a)| *x = *x + *a * g);
        }
        column
    };
    let product: Columns = (0..n).map(column).collect();
    let (sigma, _) = reference::svd(&product, &vec![1.0; n]);
    let nuclear: Real = sigma.into_iter().sum();
    nuclear * nuclear / dual.v().iter().map(|v| Real::from(*v)).sum::<Real>()
}

/// The dual variable of a forged file, whose bound was computed as 12,413.9 where the optimum is 3.8.
#[test]
fn a_forged_dual_variable_proves_no_more_than_it_should() {
    let rates = [0.00101827, 0.00570028, 0.03191031, 0.17863457, 1.0];
    let workload = Workload::sgd(rates.to_vec(), nesterov(0.9)).unwrap();
    let v = [2.68351962e31, 2.89199245e6, 1.54456491e30, 8.33962490e18, 1.75290550e-43];
    let optimum = optimal(&workload, Solver::Auto, &Options::default(), &mut quiet).unwrap();
    let bound = lower_bound_at(&workload, &Dual::single(v.to_vec()).unwrap()).unwrap();
    assert!(bound > 0.0 && bound <= optimum.certificate.loss, "{bound} {:?}", optimum.certificate);
    assert!((1.9..2.0).contains(&optimum.certificate.loss.sqrt()), "{:?}", optimum.certificate);
}

/// Spikes and teeth in a schedule turn the state at once; streams follow, and more buffers are never worse.
#[test]
fn rough_schedules_stream_well() {
    let spikes = (0..300)
        .map(|i| if [12, 70, 104, 151, 156, 222].contains(&i) { 1e6 } else { 1.0 })
        .collect::<Vec<_>>();
    let teeth = (0..300).map(|i| 1.0 - f64::from(i % 40) / 41.0).collect::<Vec<_>>();
    let averaged = Optimizer { average: Average::Ema(0.999), ..nesterov(0.99) };
    let cases = [
        (Case::new(&spikes, heavy(0.9)), 8, 1e-5),
        (Case::new(&teeth, heavy(0.9)), 12, 1e-6),
        (Case::new(&[1.0, 173.77632307470486, 1.0, 1.0, 1.0, 1.0], averaged), 3, 1e-4),
    ];
    for (case, most, limit) in cases {
        let workload = case.workload();
        let optimum = optimal(&workload, Solver::Auto, &Options::default(), &mut quiet).unwrap();
        let excess = |stream| {
            let stream = Form::StateSpace(stream);
            let mechanism = Mechanism::new(workload.clone(), &stream, Participation::default()).unwrap();
            (mechanism.loss().total() / optimum.certificate.lower_bound).sqrt() - 1.0
        };
        let mut last = f64::INFINITY;
        for buffers in 0..=most {
            let now =
                excess(optimum.to_state_space(&workload, Target::Buffers(buffers), &mut quiet).unwrap());
            assert!(now <= last * (1.0 + 1e-3) + 1e-7, "{buffers} buffers: {now:e} after {last:e}");
            last = now.min(last);
        }
        assert!(last < limit, "{:?}: {last:e}", case.optimizer);
        assert!(
            excess(optimum.to_state_space(&workload, Target::Tolerance(1e-4), &mut quiet).unwrap()) <= 1e-4
        );
    }
}

/// A warm-up from zero, a pause and a decay to zero: every mechanism is made, measured, written, read and verified.
#[test]
fn schedules_with_zeros_go_all_the_way() {
    let n = 24;
    let rates: Vec<f64> = (0..n)
        .map(|i| match i {
            0..4 => i as f64 / 4.0,
            10 | 11 => 0.0,
            _ => (n - 1 - i) as f64 / (n - 5) as f64,
        })
        .collect();
    let decayed = Optimizer { weight_decay: 0.1, ..nesterov(0.9) };
    let averaged = Optimizer { average: Average::Uniform, weight_decay: 0.1, coupled: true, ..heavy(0.9) };
    for optimizer in [Optimizer::default(), heavy(0.9), decayed, averaged] {
        let case = Case::new(&rates, optimizer);
        let problem = Problem::new(case.workload(), Participation::default()).unwrap();
        for selector in family::table(&[], &[4]) {
            let mechanism = problem
                .mechanism(selector, &mut quiet)
                .unwrap_or_else(|error| panic!("{selector} {optimizer:?}: {error}"));
            let loss = if mechanism.form().noise_rows() == n {
                measured(&case, mechanism.form()).1
            } else {
                mechanism.loss().total()
            };
            assert!(mechanism.loss().total() >= loss * (1.0 - 1e-9), "{selector} {optimizer:?}");
            let read = format::from_bytes(&format::to_bytes(&mechanism).unwrap()).unwrap();
            let certificate = read.certificate().unwrap();
            assert!(certificate.gap >= 0.0, "{selector} {optimizer:?}: {certificate:?}");
            let proved = read.recompute_bound().unwrap().unwrap();
            assert!(certificate.lower_bound <= proved && proved < certificate.lower_bound * (1.0 + 1e-11));
            if ["optimal", "state-space"].contains(&selector.name()) {
                assert!(certificate.ratio_to_bound() < 1.001, "{selector} {optimizer:?}: {certificate:?}");
            }
        }
    }
}

/// Step sizes of zero make the workload singular, which ended the solver for several epochs with an error.
#[test]
fn several_epochs_with_step_sizes_of_zero_have_a_mechanism_and_a_bound() {
    let warm_up: Vec<f64> = (0..24).map(|i| f64::from(i.min(8)) / 8.0).collect();
    let pause: Vec<f64> = (0..18).map(|i| if (6..9).contains(&i) { 0.0 } else { 1.0 }).collect();
    let decayed: Vec<f64> = (0..20).map(|i| 1.0 - f64::from(i) / 19.0).collect();
    for (rates, times) in
        [(&warm_up, 3), (&warm_up, 4), (&pause, 2), (&pause, 3), (&decayed, 2), (&decayed, 5)]
    {
        for optimizer in [heavy(0.0), heavy(0.9), nesterov(0.5)] {
            let case = Case::new(rates, optimizer);
            let problem = Problem::new(case.workload(), Participation::Epochs { times }).unwrap();
            let optimum = problem.optimum(&mut quiet).unwrap();
            let certificate = &optimum.certificate;
            assert!(certificate.lower_bound > 0.0 && certificate.gap >= 0.0, "{rates:?}: {certificate:?}");
            let certified = certificate.gap <= 1e-6 && optimum.stopped.is_none();
            assert!(certified, "{rates:?} {times} {optimizer:?}: {certificate:?} {:?}", optimum.stopped);
            let mechanism = problem.mechanism("optimal".parse().unwrap(), &mut quiet).unwrap();
            let deployed = mechanism.loss().total();
            assert!(deployed >= certificate.lower_bound, "{rates:?}: {deployed} {certificate:?}");
        }
    }
    // Golden: a plain ascent on the dual, in NumPy, finds 180.364.
    let problem = Problem::new(
        Workload::sgd(vec![1.0, 1.0, 1.0, 1.0, 1.0, 0.0], heavy(0.9)).unwrap(),
        Participation::Epochs { times: 3 },
    );
    let certificate = problem.unwrap().optimum(&mut quiet).unwrap().certificate;
    assert!((certificate.loss - 180.364).abs() < 1e-3 && certificate.gap < 1e-6, "{certificate:?}");
}
