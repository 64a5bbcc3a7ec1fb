use super::*;
use crate::factorize::quiet;
use crate::mechanism::Conditions;
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

fn in_parts(steps: usize) -> PrivateRun {
    let (key, id) = (NoiseKey::from_seed(1), RunId::from_label("test"));
    let mechanism = mechanism(steps, "none");
    let mut run = PrivateRun::in_parts(&mechanism, &key, id, &[2..3, 0..2], 3, Arithmetic::Exact, 0).unwrap();
    run.set_denominator(1.0).unwrap();
    run
}

#[test]
fn parts_are_released_with_the_noise_of_the_whole() {
    let (mut whole, mut parts) = (run(3, false), in_parts(3));
    for step in 0..3 {
        whole.hand_out(step, None).unwrap();
        for run in [&mut whole, &mut parts] {
            run.contribute(1).unwrap();
        }
        let unit = whole.clip().unit() as f32;
        let mut released = [0.0; 3];
        whole.release(&mut [1 << 20, 2 << 20, 3 << 20], &mut released).unwrap();
        assert_eq!(parts.commit(&[step as f32; MARKS]).unwrap(), step);
        if step == 1 {
            continue; // a part may lag behind, and misses a row if nobody asks for it
        }
        let scale = f32::from(1_u16 << 15) * 32.0 * unit;
        let (mut last, mut first) = ([3.0 * scale], [scale, 2.0 * scale]);
        parts.release_part(1, step, &mut first).unwrap();
        parts.release_part(0, step, &mut last).unwrap();
        assert_eq!([first[0], first[1], last[0]], released);
    }
}

#[test]
fn a_part_is_released_once_and_after_its_step_was_committed() {
    let mut run = in_parts(3);
    assert!(matches!(run.release_part(0, 0, &mut [0.0]), Err(Error::StepReused { step: 0 })));
    assert_eq!(refusal(run.commit(&[0.0; MARKS])), "nothing");
    for step in 0..2 {
        run.contribute(1).unwrap();
        assert_eq!(run.commit(&[0.0; MARKS]).unwrap(), step);
    }
    run.release_part(0, 0, &mut [0.0]).unwrap();
    assert!(matches!(run.release_part(0, 0, &mut [0.0]), Err(Error::StepReused { step: 0 })));
    run.release_part(0, 1, &mut [0.0]).unwrap();
    assert!(matches!(run.release_part(0, 2, &mut [0.0]), Err(Error::StepReused { step: 2 })));
    // A step that was given up is not released.
    run.contribute(1).unwrap();
    run.burn().unwrap();
    assert!(matches!(run.release_part(0, 2, &mut [0.0]), Err(Error::StepReused { step: 2 })));
    // The other part is still to come, and comes without the row that it did not ask for.
    run.release_part(1, 1, &mut [0.0; 2]).unwrap();
    assert!(run.release_part(2, 1, &mut [0.0]).is_err());
    assert!(release(&mut run).is_err());
    assert_eq!(unordered(3).parts().count(), 0);
    assert!(super::PrivateRun::commit(&mut unordered(3), &[0.0; MARKS]).is_err());
}

#[test]
fn a_committed_step_comes_again_for_the_same_mark_only() {
    let directory = tempfile::tempdir().unwrap();
    let journal = directory.path().join("journal");
    let mut run = in_parts(3).with_journal(&journal, [7; 32]).unwrap();
    for step in 0..2 {
        run.contribute(1).unwrap();
        run.commit(&[step as f32; MARKS]).unwrap();
    }
    drop(run);
    let mut run = in_parts(3).resumed_at(&journal, [7; 32], 1).unwrap();
    assert_eq!(run.next_step(), 1);
    // What was committed before the restart is not committed again by that.
    assert!(matches!(run.release_part(0, 0, &mut [0.0]), Err(Error::StepReused { step: 0 })));
    run.contribute(1).unwrap();
    assert!(matches!(run.commit(&[5.0; MARKS]), Err(Error::StepReused { step: 1 })));
    assert_eq!(run.commit(&[1.0; MARKS]).unwrap(), 1);
    run.release_part(1, 1, &mut [0.0; 2]).unwrap();
}

#[test]
fn salts_differ_between_runs_and_keys() {
    let salt = |seed, label| {
        let (key, id) = (NoiseKey::from_seed(seed), RunId::from_label(label));
        let parts = [std::ops::Range { start: 0, end: 1 }];
        PrivateRun::in_parts(&mechanism(2, "none"), &key, id, &parts, 1, Arithmetic::Exact, 0)
            .unwrap()
            .mark_salt()
    };
    assert_eq!(salt(1, "a"), salt(1, "a"));
    assert_ne!(salt(1, "a"), salt(1, "b"));
    assert_ne!(salt(1, "a"), salt(2, "a"));
}
