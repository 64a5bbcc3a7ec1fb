use super::elementary::{Length, Tables};
use super::engine::{ExactEngine, Packet, Rounding, replay};
use super::field::ExactField;
use super::fixed::Ball;
use super::program::{OUTPUT, Place, Program, analyse};
use crate::engine::{Shard, Sink, Value};
use crate::factorize::quiet;
use crate::form::{Form, Representation};
use crate::identity::Identity;
use crate::noise::{Arithmetic, NoiseKey, NoiseStream, Output, RunId, StreamKey};
use crate::{Optimizer, Participation, Problem, Workload, family, simd};
use std::ops::Range;

fn key() -> StreamKey {
    NoiseKey::from_seed(11).stream(Identity([4; 32]), RunId([6; 16]))
}

fn deployed(workload: Workload, name: &str) -> Form {
    let problem = Problem::new(workload, Participation::default()).unwrap();
    problem.mechanism(name.parse().unwrap(), &mut quiet).unwrap().form().clone()
}

/// Every family for the prefix sum, and some for a workload with momentum.
fn forms(steps: usize) -> Vec<(String, Form)> {
    let epochs = |name: &str| {
        let participation = Participation::Epochs { times: 3 };
        let problem = Problem::new(Workload::prefix_sum(steps).unwrap(), participation).unwrap();
        let mechanism = problem.mechanism(name.parse().unwrap(), &mut quiet).unwrap();
        (format!("{name} for three epochs"), mechanism.form().clone())
    };
    let prefix = |name: &str| (name.to_string(), deployed(Workload::prefix_sum(steps).unwrap(), name));
    let momentum = |name: &str| {
        let optimizer = Optimizer { momentum: 0.9, nesterov: true, ..Default::default() };
        let rates = (0..steps).map(|i| 1.0 / (1.0 + 0.1 * i as f64)).collect();
        (format!("{name} with momentum"), deployed(Workload::sgd(rates, optimizer).unwrap(), name))
    };
    let mut forms: Vec<_> = family::all().map(|selector| prefix(selector.name())).collect();
    forms.push(prefix("optimal:dense"));
    forms.extend(["recall", "banded", "banded-inverse", "blt"].map(epochs));
    forms.extend(["optimal", "structured", "state-space:buffers=12"].map(momentum));
    forms
}

/// The noise of a coordinate at every step, from sixty digits and more.
fn reference<const L: usize>(program: &dyn Program, field: &ExactField, coordinate: u64) -> Vec<Ball<L>>
where
    Tables<L>: Length,
{
    let mut buffers = vec![Ball::<L>::ZERO; program.buffers()];
    let mut scratch = vec![Ball::<L>::ZERO; program.scratch()];
    let step = |t: usize| {
        let step = program.step(t);
        let draws: Vec<Ball<L>> = step.draws.iter().map(|d| field.row(d.row).number(coordinate)).collect();
        for assignment in &step.assignments {
            let terms = assignment.terms.iter().map(|(place, weight)| {
                weight.ball().times(match *place {
                    Place::Draw(k) => &draws[k],
                    Place::Buffer(k) => &buffers[k],
                    Place::Scratch(k) => &scratch[k],
                })
            });
            let sum = terms.fold(Ball::ZERO, |sum, term| sum.plus(&term));
            match assignment.to {
                Place::Buffer(k) => buffers[k] = sum,
                Place::Scratch(k) => scratch[k] = sum,
                Place::Draw(_) => panic!("a draw is assigned to"),
            }
        }
        scratch[0]
    };
    (0..program.steps()).map(step).collect()
}

/// [`replay`] with its gain.
fn again<const L: usize>(program: &dyn Program, field: &ExactField, t: usize, j: u64) -> Ball<L>
where
    Tables<L>: Length,
{
    replay(program, field, analyse(program).unwrap()[t].gain, t, j)
}

/// The finest grid on which a program may still be run: ties are near for about one number in a hundred.
fn finest(program: &dyn Program, scale: f32) -> Rounding {
    let worst = analyse(program).unwrap().iter().map(|bound| bound.error).fold(0.0, f64::max);
    let exponent = (200.0 * worst * f64::from(scale)).log2().ceil() as i32;
    Rounding { scale, exponent }
}

/// An engine with the state of a range.
struct Whole {
    engine: ExactEngine,
    shard: Shard,
    state: Vec<Packet>,
}

impl Whole {
    /// The noise of a step in double precision.
    fn keep(&mut self, t: usize, row: &mut [f64]) {
        let (step, sink) = (self.engine.step(t), Sink::<&mut [f64], f64>::Keep(row));
        self.engine.advance(&step, &self.shard, &mut self.state, sink).unwrap();
    }

    fn advance<V: Value>(&mut self, t: usize, values: Option<&mut [V]>) {
        let step = self.engine.step(t);
        let sink = values.map_or(Sink::Skip, Sink::Add);
        self.engine.advance(&step, &self.shard, &mut self.state, sink).unwrap();
    }
}

fn engine(form: &Form, coordinates: Range<u64>, rounding: Rounding, ahead: usize) -> Whole {
    let shard = Shard::new(coordinates).unwrap();
    let program = form.program(ahead).unwrap();
    let state = shard.allocate(program.buffers()).unwrap();
    Whole { engine: ExactEngine::new(program, ExactField::new(&key()), rounding).unwrap(), shard, state }
}

/// In f64, which shows all digits of the finest grid; f32 would hide them.
fn inputs(count: usize, step: usize) -> Vec<f64> {
    (0..count).map(|j| ((j * 7 + step * 13) % 101) as f64 * 0.01 - 0.5).collect()
}

/// All rows from an engine, and how many numbers were resolved.
fn rows(
    form: &Form,
    coordinates: Range<u64>,
    rounding: Rounding,
    ahead: usize,
    planted: f64,
) -> (Vec<Vec<f64>>, u64) {
    let mut whole = engine(form, coordinates, rounding, ahead);
    whole.engine.planted = planted;
    let rows = (0..form.steps())
        .map(|t| {
            let mut row = inputs(whole.shard.len(), t);
            whole.advance(t, Some(&mut row));
            row
        })
        .collect();
    (rows, whole.engine.resolved())
}

/// Numbers among `rows` that are not the correctly rounded ones.
fn wrong<const L: usize>(form: &Form, first: u64, rounding: Rounding, rows: &[Vec<f64>]) -> usize
where
    Tables<L>: Length,
{
    let (program, field) = (form.program(1).unwrap(), ExactField::new(&key()));
    let grid = Ball::<L>::whole(1).times_power_of_two(rounding.exponent);
    let mut wrong = 0;
    for j in 0..rows[0].len() {
        for (t, noise) in reference::<L>(&*program, &field, first + j as u64).iter().enumerate() {
            let sum = Ball::from_f64(f64::from(rounding.scale))
                .times(noise)
                .plus(&Ball::from_f64(inputs(rows[0].len(), t)[j]));
            let whole = sum.times_power_of_two(-rounding.exponent).nearest().unwrap();
            let expected = whole as f64 * grid.middle.approximate();
            wrong += usize::from(rows[t][j] != expected);
        }
    }
    wrong
}

#[test]
fn programs_compute_the_coloring() {
    for (name, form) in forms(19) {
        let coloring = form.coloring();
        let field = ExactField::new(&key());
        for ahead in [1, 4] {
            let program = form.program(ahead).unwrap();
            for j in [0, 70] {
                let z: Vec<f64> = (0..form.noise_rows())
                    .map(|t| field.row(t as u64).number::<3>(j).middle.approximate())
                    .collect();
                for t in 0..form.steps() {
                    let expected: f64 = z.iter().enumerate().map(|(s, z)| coloring[(t, s)] * z).sum();
                    let actual = again::<3>(&*program, &field, t, j).middle.approximate();
                    assert!((actual - expected).abs() < 1e-12, "{name} {t}: {actual} {expected}");
                }
            }
        }
    }
}

/// On a grid so fine that one number in a hundred is close to a tie, every row of every family is what 256 digits give.
#[test]
fn rows_are_correctly_rounded() {
    for (name, form) in forms(17) {
        let rounding = finest(&*form.program(1).unwrap(), 0.7);
        let (rows, resolved) = rows(&form, 40..240, rounding, 4, 0.0);
        assert!((2..200).contains(&resolved), "{name}: {resolved} of 3400");
        assert_eq!(wrong::<5>(&form, 40, rounding, &rows), 0, "{name}");
    }
}

/// The comparison with more digits would see an error of the fast path that is beyond its bound.
#[test]
fn a_planted_error_is_caught() {
    let form = deployed(Workload::prefix_sum(17).unwrap(), "optimal");
    let rounding = finest(&*form.program(1).unwrap(), 0.7);
    // The bound is some hundredth of the grid here.
    let (rows, _) = rows(&form, 40..440, rounding, 1, 0.03);
    assert!(wrong::<5>(&form, 40, rounding, &rows) > 0);
}

/// Split rows on a grid so fine that double precision leaves one number in a hundred in doubt: all of them are what 256 digits
/// give, also where the noise that is handed in is off by as much as its bound allows, and not where it is off by more.
#[test]
fn split_rows_are_the_floor_of_the_noise() {
    for (name, form) in forms(9) {
        let unit = finest(&*form.program(1).unwrap(), 0.7);
        let mut whole = engine(&form, 40..240, Rounding { exponent: unit.exponent + 24, ..unit }, 1);
        let split = whole.engine.split(unit.exponent).unwrap();
        let program = form.program(1).unwrap();
        let reference: Vec<_> =
            (40..240).map(|j| reference::<5>(&*program, &ExactField::new(&key()), j)).collect();
        for t in 0..form.steps() {
            let mut noise = vec![0.0; 200];
            whole.keep(t, &mut noise);
            let bound = analyse(&*program).unwrap()[t].error;
            let quarter = 0.25 * 2.0_f64.powi(unit.exponent) / f64::from(unit.scale);
            for (error, right) in [(0.0, true), (0.4 * bound, true), (-0.4 * bound, true), (quarter, false)] {
                let given: Vec<f64> = noise.iter().map(|u| u + error).collect();
                let (mut a, mut r) = (vec![0; 200], vec![0; 200]);
                whole.engine.ship_split(&split, t, 40, &given, &mut a, &mut r).unwrap();
                let wrong = (0..200).filter(|&j| {
                    let scaled = Ball::from_f64(f64::from(unit.scale)).times(&reference[j][t]);
                    let below = scaled.times_power_of_two(-unit.exponent).plus(&Ball::from_f64(-0.5));
                    (i64::from(a[j]) << split.shift) + i64::from(r[j]) != below.nearest().unwrap()
                });
                assert_eq!(wrong.count() == 0, right, "{name} {t} {error}");
            }
        }
        assert!(whole.engine.resolved() > 0, "{name}");
    }
}

/// Ten million roundings, more than ten thousand of them resolved, against 256 digits; and a planted error of one unit in
/// the last place of double precision beyond the bound.
#[test]
#[ignore = "minutes; scripts/slow"]
fn ten_million_roundings() {
    let form = deployed(Workload::prefix_sum(8).unwrap(), "state-space:buffers=3");
    let rounding = finest(&*form.program(1).unwrap(), 0.7);
    let count = 1_250_000;
    use rayon::prelude::*;
    let results: Vec<(usize, u64, usize)> = (0..250_u64)
        .into_par_iter()
        .map(|part| {
            let first = part * (count / 250);
            let range = first..first + count / 250;
            let (honest, resolved) = rows(&form, range.clone(), rounding, 1, 0.0);
            let (planted, _) = rows(&form, range, rounding, 1, 0.03);
            let differing =
                honest.iter().flatten().zip(planted.iter().flatten()).filter(|(a, b)| a != b).count();
            (wrong::<5>(&form, first, rounding, &honest), resolved, differing)
        })
        .collect();
    let sum = |pick: fn(&(usize, u64, usize)) -> u64| results.iter().map(pick).sum::<u64>();
    let (wrong, resolved, planted) = (sum(|r| r.0 as u64), sum(|r| r.1), sum(|r| r.2 as u64));
    println!("10000000 roundings, {resolved} resolved, {wrong} wrong; planted error: {planted} wrong");
    assert_eq!(wrong, 0);
    assert!(resolved >= 10_000, "{resolved}");
    assert!(planted > 1000, "{planted}");
}

#[test]
fn the_bits_are_those_of_any_shard_thread_vector_width_and_number_of_rows_ahead() {
    for (name, form) in forms(13) {
        let rounding = finest(&*form.program(1).unwrap(), 1.3);
        let (whole, _) = rows(&form, 0..9000, rounding, 1, 0.0);
        let cut = |range: Range<u64>, rows: &[Vec<f64>]| -> Vec<Vec<f64>> {
            rows.iter().map(|row| row[range.start as usize..range.end as usize].to_vec()).collect()
        };
        // The inputs are by place, so shards are compared on the places that see the same ones: whole periods apart.
        for (range, ahead) in [(101..303_u64, 1), (0..9000, 3), (4141..4343, 5)] {
            let (part, _) = rows(&form, range.clone(), rounding, ahead, 0.0);
            assert_eq!(part, cut(range, &whole), "{name} ahead {ahead}");
        }
        let single = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert_eq!(single.install(|| rows(&form, 0..9000, rounding, 1, 0.0)).0, whole, "{name}");
        simd::baseline_only(true);
        let (portable, _) = rows(&form, 0..9000, rounding, 1, 0.0);
        simd::baseline_only(false);
        assert_eq!(portable, whole, "{name}");
    }
}

#[test]
fn bounds_hold_for_what_is_computed_and_are_not_idle() {
    for (name, form) in forms(60) {
        let program = form.program(1).unwrap();
        let field = ExactField::new(&key());
        let bounds = analyse(&*program).unwrap();
        let coarse = Rounding { scale: 1.0, exponent: -24 };
        let mut engine = engine(&form, 0..64, coarse, 1);
        let mut worst = 0.0_f64;
        for (t, bound) in bounds.iter().enumerate() {
            // A row shows the numbers to half the grid.
            let mut row = vec![0.0_f64; 64];
            engine.advance(t, Some(&mut row));
            for (j, y) in row.iter().enumerate().step_by(16) {
                let exact = again::<3>(&*program, &field, t, j as u64);
                let off = exact.minus(&Ball::from_f64(*y)).size();
                assert!(off <= 2.0_f64.powi(-25) * 1.001, "{name} {t}: {off:e}");
                assert!(exact.size() <= bound.size, "{name}");
                worst = worst.max(exact.size() / bound.size);
            }
        }
        assert!(worst > 0.02, "{name}: sizes are overestimated {worst}");
        assert!(bounds.iter().all(|bound| bound.error < 1e-9), "{name}");
    }
}

/// The states in double precision stay within what [`analyse`] says of the output, also after many steps near a pole at 1.
#[test]
fn long_streams_stay_within_their_bounds() {
    let form = deployed(Workload::prefix_sum(3000).unwrap(), "optimal");
    let program = form.program(1).unwrap();
    let bounds = analyse(&*program).unwrap();
    let worst = bounds.iter().map(|bound| bound.error).fold(0.0, f64::max);
    assert!(worst < 1e-9, "{worst:e}");
    // A grid on which the rounding shows errors of double precision: within the bound of the last step.
    let rounding = Rounding { scale: 1.0, exponent: (64.0 * 2.0 * worst).log2().ceil() as i32 };
    let mut engine = engine(&form, 0..64, rounding, 1);
    for t in 0..2999 {
        engine.advance(t, None::<&mut [f32]>);
    }
    let mut row = vec![0.0_f64; 64];
    engine.advance(2999, Some(&mut row));
    let field = ExactField::new(&key());
    for (j, y) in row.iter().enumerate() {
        let exact = again::<3>(&*program, &field, 2999, j as u64);
        let nearest = exact.times_power_of_two(-rounding.exponent).nearest().unwrap();
        assert_eq!(*y, nearest as f64 * 2.0_f64.powi(rounding.exponent), "{j}");
    }
}

#[test]
fn inputs_of_any_size_are_taken_as_they_are() {
    let form = deployed(Workload::prefix_sum(2).unwrap(), "independent");
    let rounding = Rounding { scale: 1.0, exponent: -10 };
    let run = |values: [f64; 6]| {
        let mut engine = engine(&form, 0..6, rounding, 1);
        let mut row = values;
        engine.advance(0, Some(&mut row[..]));
        row
    };
    let noise = run([0.0; 6]);
    let grid = 2.0_f64.powi(-10);
    // On the grid, an input moves the release by itself.
    let on_grid = [1.0, -3.5, 1024.0, 2.0_f64.powi(35), -2.0_f64.powi(39), 5.0 * grid];
    for (moved, (still, by)) in run(on_grid).iter().zip(noise.iter().zip(on_grid)) {
        assert_eq!(*moved, still + by);
    }
    // Off the grid, what is released is on it all the same.
    for y in run([1e-9, 0.1, -0.3, 12_345.678, -1e7 / 3.0, 1e300]) {
        assert_eq!((y / grid).fract(), 0.0, "{y}");
    }
    // Beyond 2⁵⁰ of the grid, inputs are pulled back.
    assert!(run([1e300; 6]).iter().all(|y| (y - 2.0_f64.powi(40)).abs() < 10.0));
    let mut largest = [f32::MAX, -f32::MAX];
    let mut engine = engine(&form, 0..2, Rounding { scale: 1e30, exponent: 90 }, 1);
    engine.advance(0, Some(&mut largest[..]));
    assert!(largest.iter().all(|y| y.is_finite()));
}

#[test]
fn grids_that_double_precision_does_not_serve_are_refused() {
    let form = deployed(Workload::prefix_sum(9).unwrap(), "optimal");
    let fine = Rounding { scale: 1.0, exponent: -50 };
    let error = ExactEngine::new(form.program(1).unwrap(), ExactField::new(&key()), fine).err().unwrap();
    assert_eq!(error.kind(), "unsupported");
    assert!(error.to_string().contains("float arithmetic"), "{error}");
    assert_eq!(OUTPUT, Place::Scratch(0));
}

/// What a person gets: the grid costs next to nothing, few numbers are resolved, and both arithmetics have the same law.
#[test]
fn streams_of_mechanisms_have_a_grid_that_costs_little() {
    let problem = Problem::new(Workload::prefix_sum(512).unwrap(), Participation::default()).unwrap();
    let mechanism = problem.mechanism("optimal".parse().unwrap(), &mut quiet).unwrap();
    let mechanism = mechanism.calibrated(2.0, 1e-6, 1.0, Default::default()).unwrap();
    let (key, run) = (NoiseKey::from_seed(2), RunId([9; 16]));
    let mut stream = mechanism.stream(&key, run, 0..50_000, Output::Gradient, Arithmetic::Exact).unwrap();
    let grid = stream.grid().unwrap();
    assert!(
        grid < f64::from(stream.scale()) / 100.0 && grid > f64::from(stream.scale()) / 10_000.0,
        "{grid}"
    );
    assert!((0..512).all(|t| stream.expected_resolved(t) < 1e-6));
    let mut float = mechanism.stream(&key, run, 0..50_000, Output::Gradient, Arithmetic::Float).unwrap();
    assert_eq!((float.grid(), float.resolved()), (None, 0));
    let variance = |stream: &mut NoiseStream| {
        let mut row = vec![0.0_f32; 50_000];
        (0..20).for_each(|_| _ = stream.add_next(&mut row).unwrap());
        row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 50_000.0
    };
    let ratio = variance(&mut stream) / variance(&mut float);
    // Two independent estimates of one variance: a standard deviation of 0.9 %.
    assert!((ratio - 1.0).abs() < 0.05, "{ratio}");
    let iterate = mechanism.stream(&key, run, 0..8, Output::Iterate, Arithmetic::Exact);
    assert_eq!(iterate.err().unwrap().kind(), "unsupported");
}
