//! A run in a directory, put through schedules of faults and power losses.
//!
//! Whatever happens, no row of noise is released with two sums; every release moves the server as the sum plus the row of
//! an uninterrupted stream would, bit for bit; and a run that was begun is there until it has ended.

use super::tests::{CLIENTS, PACE, Points, SEED, Sample, data, plan};
use super::*;
use crate::{Clients, Server};
use dpmf::Clip;
use dpmf::disk::simulated::{Simulated, Trials, schedule};
use dpmf::noise::Output;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// What is the same in all schedules.
struct Setting {
    model: Points,
    data: Split<Sample>,
    plan: Plan,
    /// Threads that make noise ahead.
    ahead: usize,
}

impl Setting {
    fn new(ahead: usize) -> Self {
        Self { model: Points::default(), data: data(), plan: plan(), ahead }
    }

    /// What a round releases for a sum, from a stream of its own, as [`PrivateRun::release`] gives it.
    fn release(&self, round: usize, sum: &[f64]) -> Vec<f32> {
        let secret = self.secret();
        let (mechanism, arithmetic) = (self.plan.mechanism().unwrap(), self.plan.recipe().arithmetic);
        let coordinates = 0..self.model.parameters() as u64;
        let stream = mechanism.stream(&secret.key, secret.run, coordinates, Output::Gradient, arithmetic);
        let (mut stream, mut noisy) = (stream.unwrap(), sum.to_vec());
        stream.skip_to(round).unwrap();
        stream.add_next(&mut noisy).unwrap();
        noisy.iter().map(|x| *x as f32).collect()
    }

    fn secret(&self) -> Secret {
        SEED.secret(&DiskPath::from("."), &self.plan, &digest(&self.data.train), &self.model).unwrap()
    }

    /// The clipped sum of a round.
    fn sum(&self, server: &Server, round: usize) -> Vec<f64> {
        let recipe = self.plan.recipe();
        let clip = Clip::new(self.plan.clip(), self.model.parameters() as u64).unwrap();
        let clients = Clients::new(&self.model, &self.data.train, recipe.local, clip).unwrap();
        let cohort =
            self.plan.cohorts(self.data.train.users(), &self.secret()).unwrap().cohort(round).to_vec();
        let sum = clients.sum(server.parameters(), &cohort);
        sum.iter().map(|whole| *whole as f64 * clip.unit()).collect()
    }
}

/// What a run has shown, over all its lives.
#[derive(Default)]
struct Watch {
    seed: u64,
    begun: bool,
    shifts: BTreeMap<usize, u32>,
    sums: BTreeMap<usize, Vec<f64>>,
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

impl Watch {
    fn random(&mut self, bound: u32) -> u32 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 33) as u32 % bound
    }

    /// What a round is trained with: what it was before, or now and then something else.
    fn shift(&mut self, round: usize) -> u32 {
        let fresh = self.random(3) == 0;
        let shift = if fresh { 1 + self.random(1000) } else { self.shifts.get(&round).copied().unwrap_or(0) };
        self.shifts.insert(round, shift);
        shift
    }

    /// What is wrong with what one call of [`Run::advance`] did to the server.
    fn see(&mut self, setting: &Setting, before: &Server, after: &Server, round: usize) -> Option<String> {
        let mut expected = before.clone();
        while expected.step() < round.min(after.step()) {
            expected.idle();
        }
        if after.step() > round {
            let sum = setting.sum(&expected, round);
            if *self.sums.entry(round).or_insert_with(|| sum.clone()) != sum {
                return Some(format!("round {round} was released with two sums"));
            }
            expected.apply(&setting.release(round, &sum), 1.0 / CLIENTS as f32);
        }
        let same = expected.buffers().map(|(_, x)| bits(x)) == after.buffers().map(|(_, x)| bits(x));
        (!same).then(|| format!("round {round} moved the server by something else"))
    }
}

/// One life of a run: begun or resumed, to its end.
fn live(setting: &Setting, disk: &Simulated, watch: &mut Watch, trials: &mut Trials) -> Result<()> {
    let Setting { model, data, plan, .. } = setting;
    let folder = disk.at("/runs/first");
    let mut run = if exists(&folder)? {
        Run::resume(&folder, model, data)?
    } else if watch.begun {
        return Err(Error::Run {
            path: folder.path().into(),
            message: "a run that was begun is gone".into(),
        });
    } else {
        Run::begin(&folder, model, data, plan, PACE, &SEED)?
    };
    watch.begun = true;
    run.training = run.training.noise_ahead(setting.ahead);
    loop {
        let before = run.training.server().clone();
        let round = run.training.private_run().expect("the plan has a mechanism").next_step();
        model.shift.store(watch.shift(round), Ordering::Relaxed);
        let advanced = run.advance();
        trials.wrong.extend(watch.see(setting, &before, run.training.server(), round));
        match advanced {
            Ok(true) => {}
            Ok(false) => break,
            Err(error @ Error::Dpmf(dpmf::Error::StepReused { .. })) => {
                trials.refuse(&error.to_string());
                run.burn()?;
            }
            Err(error) => return Err(error),
        }
    }
    run.finish(Purpose::Report, None)?;
    if outcome(&folder)?.is_none() {
        trials.wrong.push("the outcome of a run that has ended is not there".into());
    }
    Ok(())
}

fn put_through(ahead: usize, schedules: u64, setup: impl Fn(&Simulated)) -> Trials {
    let setting = Setting::new(ahead);
    let mut trials = Trials::default();
    let calm = Simulated::new(0);
    live(&setting, &calm, &mut Watch::default(), &mut trials).unwrap();
    for index in 0..schedules {
        // Ten thousand schedules are the first so many; a few hundred, as many among them.
        let index = index * (10_000 / schedules);
        let disk = schedule(index, calm.operations());
        setup(&disk);
        let mut watch = Watch { seed: index, ..Default::default() };
        trials.run(&disk, |trials| live(&setting, &disk, &mut watch, trials).map_err(|e| e.to_string()));
    }
    trials
}

fn check(ahead: usize, schedules: u64) {
    let trials = put_through(ahead, schedules, |_| {});
    println!("{trials}");
    assert!(trials.lost.is_empty(), "{:?}", trials.lost);
    assert!(trials.wrong.is_empty(), "{:?}", trials.wrong);
    for event in ["folder sync error", "full disk", "kill", "power loss", "rename error", "sync error"] {
        assert!(trials.events.contains_key(event), "{event}: {:?}", trials.events);
    }
    assert!(trials.resumed > schedules / 2, "{trials}");
}

#[test]
fn no_schedule_releases_a_row_twice_or_loses_the_run() {
    check(0, 1000);
}

#[test]
fn no_schedule_with_noise_in_flight_releases_a_row_twice_or_loses_the_run() {
    check(1, 250);
}

#[test]
#[ignore = "ten thousand schedules with threads"]
fn ten_thousand_schedules_with_noise_in_flight_release_no_row_twice_and_lose_no_run() {
    check(2, 10_000);
}

#[test]
#[ignore = "ten thousand schedules"]
fn ten_thousand_schedules_release_no_row_twice_and_lose_no_run() {
    check(0, 10_000);
}

/// The watch sees what there is to see: a drive that does not keep what it has synced.
#[test]
fn a_lying_drive_is_caught() {
    for (name, reuse) in [("journal.partial", true), ("run.json.partial", false), ("key", false)] {
        let trials = put_through(0, 600, |disk| disk.ignore_syncs_of(name));
        println!("{name}: {} wrong, {} lost", trials.wrong.len(), trials.lost.len());
        assert_eq!(!trials.wrong.is_empty(), reuse, "{name}: {:?}", trials.wrong);
        assert!(reuse || !trials.lost.is_empty(), "{name}");
    }
}
