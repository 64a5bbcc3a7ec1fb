use super::*;
use crate::factorize::quiet;
use crate::mechanism::Conditions;
use crate::noise::Output;
use crate::{Problem, Workload};

fn mechanism(steps: usize, sampling: &str) -> Mechanism {
    let sampling: Sampling = sampling.parse().unwrap();
    let participation = sampling.participation(steps).unwrap().unwrap_or_default();
    let problem = Problem::new(Workload::prefix_sum(steps).unwrap(), participation).unwrap();
    let mechanism = problem.mechanism("independent".parse().unwrap(), &mut quiet).unwrap();
    let mechanism =
        if sampling == Sampling::None { mechanism } else { mechanism.with_sampling(sampling).unwrap() };
    mechanism.calibrated(8.0, 1e-6, 0.5, Conditions::default()).unwrap()
}

fn unordered(steps: usize) -> PrivateRun {
    let (key, id) = (NoiseKey::from_seed(1), RunId::from_label("test"));
    PrivateRun::new(&mechanism(steps, "none"), &key, id, 0..3, 3, Arithmetic::Exact).unwrap()
}

fn order(name: &str, by_step: bool) -> Order {
    Order { name: name.into(), by_step, sampled: false }
}

fn run(steps: usize, by_step: bool) -> PrivateRun {
    let mut run = unordered(steps);
    run.follow(order("test", by_step)).unwrap();
    run.set_denominator(4.0).unwrap();
    run
}

fn refusal<T: std::fmt::Debug>(result: Result<T>) -> &'static str {
    match result {
        Err(Error::Refused { refusal }) => refusal.name(),
        other => panic!("{other:?}"),
    }
}

fn release(run: &mut PrivateRun) -> Result<usize> {
    run.release(&mut [1, 2, 3], &mut [0.0; 3])
}

#[test]
fn a_step_is_drawn_summed_and_released() {
    let mut run = run(2, true);
    for step in 0..2 {
        assert_eq!(run.next_step(), step);
        run.hand_out(step, Some(4)).unwrap();
        run.contribute(1).unwrap();
        run.contribute(3).unwrap();
        assert_eq!(run.contributions(), Some(4));
        assert_eq!(release(&mut run).unwrap(), step);
        assert_eq!(run.contributions(), None);
    }
    assert!(matches!(run.contribute(1), Err(Error::Exhausted { steps: 2 })));
    assert!(matches!(run.check_release(), Err(Error::Exhausted { steps: 2 })));
}

#[test]
fn a_unit_counts_once_whatever_the_program_does() {
    for by_step in [true, false] {
        let mut run = run(4, by_step);
        assert_eq!(refusal(run.contribute(1)), "no-batch");
        assert_eq!(refusal(release(&mut run)), "nothing");
        run.hand_out(0, Some(4)).unwrap();
        assert_eq!(refusal(run.contribute(5)), "too-many");
        run.contribute(4).unwrap();
        assert_eq!(refusal(run.contribute(1)), "too-many");
        // Forgotten contributions may come again.
        run.clear();
        assert_eq!(refusal(release(&mut run)), "nothing");
        run.contribute(3).unwrap();
        release(&mut run).unwrap();
        // The batch has had its step, though one of its members did not contribute.
        assert_eq!(refusal(run.contribute(1)), "no-batch");
        run.clear();
        assert_eq!(refusal(run.contribute(1)), "no-batch");
        // The size of a batch whose members nobody knows is not checked.
        run.hand_out(1, None).unwrap();
        run.contribute(100).unwrap();
        release(&mut run).unwrap();
        // Nobody took part: noise alone, without a batch.
        run.contribute(0).unwrap();
        release(&mut run).unwrap();
        run.hand_out(3, Some(0)).unwrap();
        assert_eq!(refusal(run.contribute(1)), "too-many");
    }
}

#[test]
fn batches_that_belong_to_steps_serve_no_other() {
    let mut steps = run(3, true);
    steps.hand_out(1, Some(2)).unwrap();
    assert_eq!(refusal(steps.contribute(1)), "other-step");
    steps.hand_out(0, Some(2)).unwrap();
    steps.contribute(2).unwrap();
    // The next batch may be fetched before the step is taken.
    steps.hand_out(1, Some(2)).unwrap();
    assert_eq!(refusal(steps.contribute(1)), "other-step");
    release(&mut steps).unwrap();
    steps.contribute(2).unwrap();
    release(&mut steps).unwrap();
    // After a burned step its batch is of no use.
    steps.hand_out(2, Some(2)).unwrap();
    steps.burn().unwrap();
    assert!(matches!(steps.contribute(1), Err(Error::Exhausted { .. })));

    // Where each unit comes once in all, a batch may serve any step, one of them.
    let mut once = run(3, false);
    once.hand_out(7, Some(2)).unwrap();
    once.contribute(2).unwrap();
    release(&mut once).unwrap();
    assert_eq!(refusal(once.contribute(1)), "no-batch");
}

#[test]
fn two_batches_of_one_step_are_counted_each_by_itself() {
    let mut run = run(3, false);
    run.hand_out(0, Some(4)).unwrap();
    run.hand_out(0, Some(4)).unwrap();
    // Twice the second in place of the first.
    assert_eq!(refusal(run.contribute(8)), "too-many");
    run.contribute(4).unwrap();
    run.hand_out(0, Some(4)).unwrap();
    run.contribute(4).unwrap();
    assert_eq!(run.contributions(), Some(8));
    release(&mut run).unwrap();
}

#[test]
fn an_order_is_kept() {
    let mut run = run(3, true);
    run.follow(order("test", true)).unwrap();
    assert_eq!(refusal(run.follow(order("another", true))), "other-order");
    assert_eq!(run.order().unwrap().name, "test");
    assert!(unordered(2).hand_out(0, None).is_err());
    // Nobody said how batches come, and the guarantee does not count on it.
    unordered(2).contribute(9).unwrap();
}

#[test]
fn sampling_that_is_counted_on_must_be_seen() {
    let (key, id) = (NoiseKey::from_seed(1), RunId::from_label("test"));
    let mechanism = mechanism(4, "cyclic-poisson:1:0.1");
    let mut run = PrivateRun::new(&mechanism, &key, id, 0..3, 3, Arithmetic::Exact).unwrap();
    run.set_denominator(1.0).unwrap();
    assert_eq!(refusal(run.contribute(1)), "not-sampled");
    assert_eq!(refusal(run.follow(order("test", true))), "not-sampled");
    run.contribute(0).unwrap();
    assert_eq!(refusal(release(&mut run)), "not-sampled");
    run.follow(Order { sampled: true, ..order("test", true) }).unwrap();
    release(&mut run).unwrap();

    let mut sampler = crate::Sampler::new(&key, id, mechanism.sampling(), 10, 4).unwrap();
    let other = RunId::from_label("another");
    sampler.bind(id).unwrap();
    sampler.bind(id).unwrap();
    assert_eq!(refusal(sampler.bind(other)), "sampler-in-use");
}

#[test]
fn a_denominator_is_fixed_by_the_first_release() {
    let mut run = unordered(3);
    run.contribute(1).unwrap();
    assert_eq!(refusal(release(&mut run)), "no-denominator");
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert_eq!(run.set_denominator(bad).unwrap_err().kind(), "invalid-argument");
    }
    run.set_denominator(4.0).unwrap();
    run.set_denominator(5.0).unwrap();
    release(&mut run).unwrap();
    run.set_denominator(5.0).unwrap();
    assert_eq!(refusal(run.set_denominator(6.0)), "other-denominator");
    assert_eq!(run.denominator(), Some(5.0));
}

#[test]
fn the_release_is_that_of_the_stream() {
    let (key, id) = (NoiseKey::from_seed(1), RunId::from_label("test"));
    for arithmetic in [Arithmetic::Exact, Arithmetic::Float] {
        let mechanism = mechanism(2, "none");
        let mut run = PrivateRun::new(&mechanism, &key, id, 0..3, 3, arithmetic).unwrap();
        run.set_denominator(1.0).unwrap();
        let mut stream = mechanism.stream(&key, id, 0..3, Output::Gradient, arithmetic).unwrap();
        for _ in 0..2 {
            let mut sum = [1 << 52, -12_345, 0];
            let mut expected = sum.map(|whole| whole as f64 * run.clip().unit());
            stream.add_next(&mut expected).unwrap();
            run.contribute(1).unwrap();
            let mut released = [0.0; 3];
            run.release(&mut sum, &mut released).unwrap();
            assert_eq!((sum, released), ([0; 3], expected.map(|value| value as f32)));
        }
    }
}

#[test]
fn what_is_refused_leaves_the_sum_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let begin = || unordered(2).with_journal(folder.path().join("journal"), [7; 32]).unwrap();
    let mut first = begin();
    first.set_denominator(1.0).unwrap();
    first.contribute(1).unwrap();
    assert!(first.release(&mut [1 << 54, 0, 0], &mut [0.0; 3]).is_err());
    assert!(first.release(&mut [0; 2], &mut [0.0; 3]).is_err());
    first.release(&mut [5, -6, 7], &mut [0.0; 3]).unwrap();
    drop(first);

    let mut again = unordered(2).resumed(folder.path().join("journal"), [7; 32], None).unwrap();
    assert_eq!((again.next_step(), again.recorded_steps()), (0, 1));
    again.set_denominator(1.0).unwrap();
    again.contribute(1).unwrap();
    let mut sum = [5, -6, (1 << 53) - 1];
    let mut released = [0.0; 3];
    assert!(matches!(again.release(&mut sum, &mut released), Err(Error::StepReused { step: 0 })));
    assert_eq!((sum, released, again.contributions()), ([5, -6, (1 << 53) - 1], [0.0; 3], Some(1)));
    again.release(&mut [5, -6, 7], &mut released).unwrap();
    assert_eq!(again.next_step(), 1);
    again.burn().unwrap();
    assert_eq!(again.burned(), [1]);
}

#[test]
fn ranks_share_what_a_sum_holds() {
    let mut run = unordered(2).with_ranks(2).unwrap();
    assert_eq!(refusal(run.contribute(MOST_CONTRIBUTIONS / 2 + 1)), "overflow");
    run.contribute(MOST_CONTRIBUTIONS / 2).unwrap();
    assert!(unordered(2).with_ranks(0).is_err());
}

/// A run whose rows are handed over, with a journal or without.
fn handed(steps: usize) -> PrivateRun {
    let (key, id) = (NoiseKey::from_seed(1), RunId::from_label("test"));
    let mechanism = mechanism(steps, "none");
    let mut run = PrivateRun::over(&mechanism, &key, id, &[0..2, 2..3], 3, Arithmetic::Exact).unwrap();
    run.set_denominator(1.0).unwrap();
    run
}

fn settle(run: &mut PrivateRun, step: usize, mark: u8) -> crate::Result<()> {
    run.contribute(1).unwrap();
    let settled = run.settle(step, [mark; 16]);
    run.clear();
    settled
}

#[test]
fn a_row_leaves_once_and_its_step_is_settled_in_order() {
    let mut run = handed(4);
    assert!(matches!(settle(&mut run, 0, 1), Err(Error::InvalidArgument { .. })));
    assert_eq!((run.hand_over().unwrap(), run.hand_over().unwrap()), ((0, None), (1, None)));
    assert_eq!((run.next_step(), run.outstanding().collect::<Vec<_>>()), (2, vec![0, 1]));
    // A sum cannot be released past rows that are out.
    run.contribute(1).unwrap();
    assert!(matches!(release(&mut run), Err(Error::InvalidArgument { .. })));
    run.clear();
    assert!(matches!(settle(&mut run, 1, 1), Err(Error::InvalidArgument { .. })));
    assert_eq!(refusal(run.settle(0, [1; 16])), "nothing");
    settle(&mut run, 0, 1).unwrap();
    settle(&mut run, 0, 1).unwrap();
    assert_eq!(run.give_up().unwrap(), 1);
    assert!(matches!(run.give_up(), Err(Error::InvalidArgument { .. })));
    assert_eq!(run.hand_over().unwrap(), (2, None));
    settle(&mut run, 2, 1).unwrap();
    // What was used with two sums ends the run.
    assert!(matches!(settle(&mut run, 2, 2), Err(Error::StepReused { step: 2 })));
    assert!(matches!(run.hand_over(), Err(Error::Halted { .. })));
}

#[test]
fn contributions_are_counted_for_the_step_that_is_settled_next() {
    let mut run = handed(3);
    run.follow(Order { name: "by step".into(), by_step: true, sampled: false }).unwrap();
    run.hand_over().unwrap();
    run.hand_over().unwrap();
    run.hand_out(1, Some(1)).unwrap();
    assert_eq!(refusal(run.contribute(1)), "other-step");
    run.hand_out(0, Some(1)).unwrap();
    assert_eq!(refusal(run.contribute(2)), "too-many");
    run.contribute(1).unwrap();
    run.settle(0, [0; 16]).unwrap();
    run.hand_out(1, Some(1)).unwrap();
    run.contribute(1).unwrap();
    run.settle(1, [0; 16]).unwrap();
}

#[test]
fn after_a_restart_a_settled_step_asks_for_its_sum_and_one_that_was_not_is_burned() {
    let directory = tempfile::tempdir().unwrap();
    let journal = directory.path().join("journal");
    let mut run = handed(6).with_journal(&journal, [7; 32]).unwrap();
    for step in 0..4 {
        assert_eq!(run.hand_over().unwrap(), (step, None));
        if step < 2 {
            settle(&mut run, step, 10 + step as u8).unwrap();
        }
    }
    drop(run);
    let mut run = handed(6).resumed_at(&journal, [7; 32], 1).unwrap();
    assert_eq!((run.next_step(), run.burned()), (1, vec![2, 3]));
    assert_eq!(run.hand_over().unwrap(), (1, Some([11; 16])));
    assert!(matches!(settle(&mut run, 1, 5), Err(Error::StepReused { step: 1 })));
    settle(&mut run, 1, 11).unwrap();
    // A settled step may be given up as well.
    assert_eq!(run.hand_over().unwrap(), (4, None));
    settle(&mut run, 4, 14).unwrap();
    drop(run);
    let mut run = handed(6).resumed_at(&journal, [7; 32], 4).unwrap();
    assert_eq!(run.hand_over().unwrap(), (4, Some([14; 16])));
    assert_eq!(run.give_up().unwrap(), 4);
    assert_eq!(run.hand_over().unwrap(), (5, None));
    drop(run);
    let run = handed(6).resumed_at(&journal, [7; 32], 4).unwrap();
    assert_eq!((run.next_step(), run.burned()), (6, vec![2, 3, 4, 5]));
    // The mark is not in the clear.
    let bytes = std::fs::read(&journal).unwrap();
    assert!(!bytes.windows(16).any(|window| window == [14; 16] || window == [11; 16]));
}

/// What a device does with the two words, against the stream: sums on either side of every tie, and far from it.
#[test]
fn split_rows_decide_every_tie_before_the_sum_is_known() {
    let ranges = [5..3000, 4000..4100];
    let (key, id) = (NoiseKey::from_seed(5), RunId([3; 16]));
    for offset in -2..=2_i64 {
        let mut run = PrivateRun::over(&calibrated(), &key, id, &ranges, 90_000, Arithmetic::Exact).unwrap();
        let split = run.split_row().unwrap();
        let mut stream = calibrated().stream_over(&key, id, &ranges, Arithmetic::Exact).unwrap();
        let (half, mask) = (1_i64 << (split.shift - 1), (1_i64 << split.shift) - 1);
        let (unit, grid) = (2.0_f64.powi(split.exponent), stream.grid().unwrap());
        for step in 0..3 {
            let row = run.coming_row().unwrap().on_threads(1 + step);
            let (mut whole, mut rest) = (vec![0; 3095], vec![0; 3095]);
            // In two pieces, of which the second crosses from range to range.
            let (left, right) = (whole.split_at_mut(900), rest.split_at_mut(900));
            row.ship_split(0, left.0, right.0).unwrap();
            row.ship_split(900, left.1, right.1).unwrap();
            // The sum at which the rounding changes, from a few units below to a few above, and in other periods.
            let sum = |j: usize| half - i64::from(rest[j]) + offset + ((j as i64 % 7 - 3) << split.shift);
            let mut expected: Vec<f64> = (0..3095).map(|j| sum(j) as f64 * unit).collect();
            assert_eq!(stream.add_next(&mut expected).unwrap(), step);
            for j in 0..3095 {
                let (s, w) = (sum(j), i64::from(whole[j]));
                let near = (s + half) >> split.shift;
                let fraction = s - (near << split.shift);
                let released = w + near + i64::from(fraction + i64::from(rest[j]) >= half);
                assert_eq!(released, (s + (w << split.shift) + i64::from(rest[j]) + half) >> split.shift);
                assert!(i64::from(rest[j]) <= mask);
                assert_eq!(released as f64 * grid, expected[j], "{step} {j} {offset}");
            }
            run.hand_over().unwrap();
        }
    }
}

#[test]
fn salts_differ_between_runs_and_keys() {
    let salt = |seed, label| {
        let (key, id) = (NoiseKey::from_seed(seed), RunId::from_label(label));
        PrivateRun::new(&mechanism(2, "none"), &key, id, 0..1, 1, Arithmetic::Exact).unwrap().mark_salt()
    };
    assert_eq!(salt(1, "a"), salt(1, "a"));
    assert_ne!(salt(1, "a"), salt(1, "b"));
    assert_ne!(salt(1, "a"), salt(2, "a"));
}

/// A run over some ranges, with what a device does in its stead.
fn ranged(arithmetic: Arithmetic, ranges: &[Range<u64>], threads: usize) -> PrivateRun {
    let (key, id) = (NoiseKey::from_seed(5), RunId([3; 16]));
    let made = PrivateRun::over(&calibrated(), &key, id, ranges, 90_000, arithmetic).unwrap();
    let mut made = made.noise_ahead(threads);
    made.set_denominator(1.0).unwrap();
    made
}

fn calibrated() -> Mechanism {
    let problem =
        crate::Problem::new(crate::Workload::prefix_sum(STEPS).unwrap(), Default::default()).unwrap();
    let mechanism = problem.mechanism("optimal".parse().unwrap(), &mut crate::factorize::quiet).unwrap();
    mechanism.calibrated(2.0, 1e-6, 1.0, Default::default()).unwrap()
}

const STEPS: usize = 7;

fn some_sum(length: usize, step: usize) -> Vec<i64> {
    let mix = |j: usize| ((j + 77 * step) as i64).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64) >> 27;
    (0..length).map(mix).collect()
}

fn whole_release(run: &mut PrivateRun, sum: &[i64]) -> Vec<u32> {
    let (mut sum, mut released) = (sum.to_vec(), vec![0.0; sum.len()]);
    run.contribute(0).unwrap();
    run.release(&mut sum, &mut released).unwrap();
    assert!(sum.iter().all(|whole| *whole == 0));
    released.iter().map(|y| y.to_bits()).collect()
}

/// What a device does with integers alone; returns the bits and how many coordinates were in doubt.
fn elsewhere(run: &mut PrivateRun, ranges: &[Range<u64>], sum: &[i64], row: &[i64]) -> (Vec<u32>, usize) {
    let FixedRow { lift, shift, doubt, grid } = run.fixed_row().unwrap();
    let half = 1_i64 << (shift - 1);
    let moved: Vec<i64> = sum.iter().zip(row).map(|(s, w)| (s << lift) + w + half).collect();
    let near = |t: &i64| (t + doubt) & (2 * half - 1) <= 2 * doubt;
    let coordinates: Vec<u64> = ranges.iter().cloned().flatten().collect();
    let places: Vec<usize> = (0..sum.len()).filter(|j| near(&moved[*j])).collect();
    let doubtful: Vec<(u64, i64)> = places.iter().map(|j| (coordinates[*j], sum[*j])).collect();
    let mut whole: Vec<i64> = moved.iter().map(|t| t >> shift).collect();
    run.contribute(0).unwrap();
    let (_, resolved) = run.release_elsewhere(Some(run.digest(sum)), &doubtful).unwrap();
    places.iter().zip(resolved).for_each(|(j, resolved)| whole[*j] = resolved);
    (whole.iter().map(|k| ((*k as f64 * grid) as f32).to_bits()).collect(), doubtful.len())
}

#[test]
fn a_row_that_is_shipped_gives_the_bits_of_a_release_near_ties_too() {
    let ranges = [3..40_000, 40_100..40_101, 50_000..90_000];
    let mut here = ranged(Arithmetic::Exact, &ranges, 0);
    let mut there = ranged(Arithmetic::Exact, &ranges, 2);
    let length = there.stream().len();
    let mut in_doubt = 0;
    for step in 0..STEPS {
        let mut row = vec![0; length];
        // In pieces of any size, while others make it.
        let coming = there.coming_row().unwrap();
        let coming = if step == 0 { coming } else { coming.on_threads(step - 1) };
        for (place, piece) in row.chunks_mut(13_001).enumerate() {
            coming.ship_fixed(13_001 * place, piece).unwrap();
        }
        let FixedRow { lift, shift, .. } = there.fixed_row().unwrap();
        let mut sum = some_sum(length, step);
        // Every second sum is put as near to a tie as the row allows.
        for (sum, w) in sum.iter_mut().zip(&row).step_by(2) {
            let tie = (*sum << lift >> shift << shift) + (1 << (shift - 1));
            *sum = (tie - w + (1 << (lift - 1))) >> lift;
        }
        let expected = whole_release(&mut here, &sum);
        let (found, doubtful) = elsewhere(&mut there, &ranges, &sum, &row);
        assert!(matches!(coming.ship_fixed(0, &mut row), Err(Error::StepReused { .. })));
        assert_eq!(found, expected, "step {step}");
        in_doubt += doubtful;
    }
    // One in a hundred of the planted ones, of which there are 280,000: the slow path has run thousands of times.
    assert!((500..20_000).contains(&in_doubt), "{in_doubt}");
    assert_eq!(there.next_step(), STEPS);
    assert!(matches!(there.fixed_row(), Err(Error::Exhausted { .. })));
}

#[test]
fn a_row_of_single_precision_is_shipped_as_it_is() {
    let ranges = [0..70_000];
    let (mut here, there) = (ranged(Arithmetic::Float, &ranges, 0), ranged(Arithmetic::Float, &ranges, 1));
    let (sum, mut row) = (some_sum(70_000, 0), vec![0.0_f32; 70_000]);
    let coming = there.coming_row().unwrap();
    coming.ship_float(0, &mut row).unwrap();
    let (unit, scale) = (there.clip().unit(), f64::from(there.stream().scale()));
    let moved = |(s, w): (&i64, &f32)| ((*s as f64 * unit + scale * f64::from(*w)) as f32).to_bits();
    assert_eq!(sum.iter().zip(&row).map(moved).collect::<Vec<_>>(), whole_release(&mut here, &sum));
    assert_eq!(there.fixed_row().unwrap_err().kind(), "unsupported");
    assert!(coming.ship_fixed(0, &mut [0]).is_err() && coming.ship_float(69_999, &mut [0.0; 2]).is_err());
}

#[test]
fn a_journal_knows_a_sum_wherever_it_is_released() {
    let folder = tempfile::tempdir().unwrap();
    let (journal, plan) = (folder.path().join("journal"), [7; 32]);
    let ranges = [0..20_000, 30_000..60_000];
    let begin = || ranged(Arithmetic::Exact, &ranges, 1);
    let mut run = begin().with_journal(&journal, plan).unwrap();
    let sum = some_sum(50_000, 0);
    let first = whole_release(&mut run, &sum);
    drop(run);
    // Released by the run itself, then by a device; another sum is neither.
    let mut run = begin().resumed(&journal, plan, None).unwrap();
    run.contribute(0).unwrap();
    let mut other = sum.clone();
    other[49_999] += 1;
    let digest = run.digest(&other);
    assert!(matches!(run.release_elsewhere(Some(digest), &[]), Err(Error::StepReused { step: 0 })));
    assert!(matches!(run.release_elsewhere(None, &[]), Err(Error::InvalidArgument { .. })));
    run.clear();
    let mut row = vec![0; 50_000];
    run.coming_row().unwrap().ship_fixed(0, &mut row).unwrap();
    assert_eq!(elsewhere(&mut run, &ranges, &sum, &row).0, first);
    assert_eq!((run.next_step(), run.recorded_steps()), (1, 1));
    drop(run);
    // The journal is that of these ranges only.
    let other = ranged(Arithmetic::Exact, &[0..19_999, 29_999..60_000], 0).resumed(&journal, plan, None);
    assert!(matches!(other.err(), Some(Error::Binding { what: "plan", .. })));
}

#[test]
fn the_journal_of_a_part_opens_for_the_model_however_it_is_cut() {
    let folder = tempfile::tempdir().unwrap();
    let (journals, plan) = ([folder.path().join("a"), folder.path().join("b")], [7; 32]);
    let cuts = [vec![0..10_000, 30_000..60_000], vec![10_000..30_000, 60_000..90_000]];
    let part = |ranges: &[Range<u64>]| ranged(Arithmetic::Exact, ranges, 1).part_of(90_000).unwrap();
    let whole_sum = |step| some_sum(90_000, step);
    let of = |ranges: &[Range<u64>], sum: &[i64]| -> Vec<i64> {
        ranges.iter().flat_map(|range| &sum[range.start as usize..range.end as usize]).copied().collect()
    };
    let mut ranks: Vec<PrivateRun> =
        cuts.iter().zip(&journals).map(|(cut, at)| part(cut).with_journal(at, plan).unwrap()).collect();
    let mut alone = ranged(Arithmetic::Exact, &[0..90_000], 0);
    for step in 0..3 {
        let sum = whole_sum(step);
        let expected = whole_release(&mut alone, &sum);
        let parts: Vec<Vec<i64>> = cuts.iter().map(|cut| of(cut, &sum)).collect();
        let digests = [ranks[0].digest(&parts[0]), ranks[1].digest(&parts[1])];
        let digest = std::array::from_fn(|h| (digests[0][h] + digests[1][h]) % ((1 << 61) - 1));
        for ((rank, cut), mut part) in ranks.iter_mut().zip(&cuts).zip(parts) {
            let mut released = vec![0.0; part.len()];
            rank.contribute(0).unwrap();
            rank.release_together(&mut part, &mut released, Some(digest)).unwrap();
            let places = cut.iter().flat_map(|range| &expected[range.start as usize..range.end as usize]);
            assert!(released.iter().map(|y| y.to_bits()).eq(places.copied()));
        }
    }
    let saved = ranks[0].stream().checkpoint_bytes().unwrap();
    drop(ranks);
    // On one rank, from the first journal or the second: the third step again, then a new one.
    for journal in &journals {
        let mut whole = part(&[0..90_000]).resumed_at(journal, plan, 2).unwrap();
        whole.contribute(0).unwrap();
        let (mut other, mut released) = (whole_sum(4), vec![0.0; 90_000]);
        assert!(matches!(whole.release(&mut other, &mut released), Err(Error::StepReused { step: 2 })));
        whole.clear();
        let mut again = ranged(Arithmetic::Exact, &[0..90_000], 0);
        for step in 0..4 {
            let expected = whole_release(&mut again, &whole_sum(step));
            if step >= 2 {
                assert_eq!(whole_release(&mut whole, &whole_sum(step)), expected, "step {step}");
            }
        }
    }
    // States are of their ranges.
    assert!(part(&cuts[1]).resumed(&journals[1], plan, Some(&saved)).is_err());
    assert!(part(&cuts[0]).resumed(&journals[0], plan, Some(&saved)).is_ok());
}
