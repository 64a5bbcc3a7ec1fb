//! The training loop on a problem small enough to check by hand: every user pulls the parameters to its point.
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

use dpmf::noise::{Arithmetic, NoiseKey, Output, RunId};
use dpmf::planner::silent;
use dpmf::{Optimizer, Participation, PrivateRun, Sampling};
use dpmf_train::{
    Assignment, Checkpoints, Clients, Domain, Labelled, LabelledExample, Local, Model, Plan, PlanLimits,
    Privacy, Recipe, Result, RunPlanner, Score, Secret, Settings, Steps, Training, Users,
};

const DIMENSION: usize = 70;

/// `½‖θ − x‖²`, with gradient `θ − x`.
struct Points;

impl Model for Points {
    type Domain = Labelled;
    type Workspace = ();

    fn kind(&self) -> &'static str {
        "points"
    }

    fn parameters(&self) -> usize {
        DIMENSION
    }

    fn initial(&self, seed: u64) -> Vec<f32> {
        vec![seed as f32; DIMENSION]
    }

    fn workspace(&self) {}

    fn gradient(
        &self,
        parameters: &[f32],
        batch: &[LabelledExample<'_>],
        (): &mut (),
        gradient: &mut [f32],
    ) -> Score {
        for example in batch {
            for ((g, theta), x) in gradient.iter_mut().zip(parameters).zip(example.features) {
                *g += (theta - x) / batch.len() as f32;
            }
        }
        self.score(parameters, batch, &mut ())
    }

    fn score(&self, parameters: &[f32], batch: &[LabelledExample<'_>], (): &mut ()) -> Score {
        let distance_sq = |example: &LabelledExample<'_>| -> f64 {
            parameters.iter().zip(example.features).map(|(theta, x)| f64::from(theta - x).powi(2)).sum()
        };
        let loss = batch.iter().map(|example| 0.5 * distance_sq(example)).sum();
        Score { loss, correct: 0, predictions: batch.len() as u64 }
    }
}

/// User `u` has `u % 3` points.
struct Sample {
    points: Vec<Vec<Vec<f32>>>,
}

impl Sample {
    fn new(users: usize, shift: f32) -> Self {
        let point = |u: usize, e: usize| {
            (0..DIMENSION).map(|j| ((u * 31 + e * 17 + j * 7) % 13) as f32 / 13.0 + shift).collect()
        };
        let points = (0..users).map(|u| (0..u % 3).map(|e| point(u, e)).collect()).collect();
        Self { points }
    }
}

impl Users for Sample {
    type Domain = Labelled;

    fn users(&self) -> usize {
        self.points.len()
    }

    fn examples<'a>(&'a self, user: usize, out: &mut Vec<<Labelled as Domain>::Example<'a>>) {
        out.extend(self.points[user].iter().map(|features| LabelledExample { features, label: 0 }));
    }
}

const ROUNDS: usize = 12;
const CLIENTS: usize = 5;

fn settings(mechanism: &str, local: Local) -> Settings {
    Settings {
        recipe: Recipe {
            mechanism: mechanism.parse().unwrap(),
            clients: CLIENTS,
            local,
            dropout: 0.0,
            arithmetic: Arithmetic::default(),
            seed: 1,
        },
        participation: Participation::default(),
        sampling: Sampling::default(),
        rounds: ROUNDS,
        clip: 0.5,
        optimizer: Optimizer { momentum: 0.5, ..Default::default() },
        schedule: Steps::Values((0..ROUNDS).map(|i| if i < 8 { 1.0 } else { 0.5 }).collect()),
        server_learning_rate: 0.2,
        unit: dpmf::accounting::PrivacyUnit::User,
        privacy: Privacy::Epsilon { epsilon: 8.0, delta: 1e-6 },
        beside: None,
        limits: PlanLimits::new(100),
    }
}

fn plan(settings: Settings) -> Plan {
    RunPlanner::default().plan(&settings, &mut silent).unwrap()
}

fn secret() -> Secret {
    Secret { key: NoiseKey::from_seed(4), run: RunId([0; 16]) }
}

fn private() -> Plan {
    plan(settings("state-space", SGD))
}

const SGD: Local = Local::Sgd { learning_rate: 0.1, passes: 2, batch: 1 };

fn run() -> PrivateRun {
    let (plan, key, d) = (private(), NoiseKey::from_seed(4), DIMENSION as u64);
    PrivateRun::new(plan.mechanism().unwrap(), &key, RunId([0; 16]), 0..d, d, Arithmetic::Float).unwrap()
}

fn start<'a>(data: &'a Sample, plan: &Plan, run: Option<PrivateRun>) -> Result<Training<'a, Points, Sample>> {
    Training::new(&Points, data, plan, plan.cohorts(data.users(), &secret())?, run)
}

fn all_rounds(training: &mut Training<'_, Points, Sample>) -> Result<Vec<f32>> {
    while training.advance()? {}
    Ok(training.released().to_vec())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn the_noise_of_the_iterates_is_the_workload_of_the_noise() {
    // Nobody has examples: noise alone is released.
    let empty = Sample { points: vec![Vec::new(); ROUNDS * CLIENTS] };
    let mut training = start(&empty, &private(), Some(run())).unwrap();
    let (plan, key) = (private(), NoiseKey::from_seed(4));
    let (mechanism, all) = (plan.mechanism().unwrap(), 0..DIMENSION as u64);
    let mut iterates =
        mechanism.stream(&key, RunId([0; 16]), all, Output::Iterate, Arithmetic::Float).unwrap();
    let mut largest = 0.0_f32;
    while training.advance().unwrap() {
        let mut expected = vec![0.0; DIMENSION];
        iterates.add_next(&mut expected).unwrap();
        for (theta, noise) in training.released().iter().zip(&expected) {
            let noise = noise / CLIENTS as f32;
            assert!((1.0 - theta - noise).abs() < 1e-5, "{theta} {noise}");
            largest = largest.max(noise.abs());
        }
    }
    assert!(largest > 0.01, "noise was added");
    assert_eq!(training.done(), ROUNDS);
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let data = Sample::new(100, 0.0);
    let trained = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut training = start(&data, &private(), Some(run())).unwrap();
            bits(&all_rounds(&mut training).unwrap())
        })
    };
    let one = trained(1);
    for threads in [2, 3, 5, 8] {
        assert_eq!(trained(threads), one, "{threads} threads");
    }
}

#[test]
fn training_without_noise_is_clipped_sgd() {
    let data = Sample::new(100, 0.0);
    let plan = plan(settings("none", Local::Gradient));
    let mut training = start(&data, &plan, None).unwrap();
    let assignment = plan.cohorts(100, &secret()).unwrap();
    let (mut theta, mut momentum) = (vec![1.0_f64; DIMENSION], vec![0.0_f64; DIMENSION]);
    for round in 0..ROUNDS {
        let mut mean = vec![0.0_f64; DIMENSION];
        for user in assignment.cohort(round).iter() {
            let points = &data.points[*user as usize];
            let update: Vec<f64> = (0..DIMENSION)
                .map(|j| {
                    points.iter().map(|x| theta[j] - f64::from(x[j])).sum::<f64>()
                        / points.len().max(1) as f64
                })
                .collect();
            let norm = update.iter().map(|x| x * x).sum::<f64>().sqrt();
            let scale = if norm > 0.5 { 0.5 / norm } else { 1.0 };
            mean.iter_mut().zip(&update).for_each(|(mean, x)| *mean += scale * x / CLIENTS as f64);
        }
        let rate = if round < 8 { 0.2 } else { 0.1 };
        for j in 0..DIMENSION {
            momentum[j] = 0.5 * momentum[j] + mean[j];
            theta[j] -= rate * momentum[j];
        }
        assert!(training.advance().unwrap());
        for (actual, expected) in training.released().iter().zip(&theta) {
            assert!((f64::from(*actual) - expected).abs() < 1e-5, "round {round}: {actual} {expected}");
        }
    }
    assert!(!training.advance().unwrap());
}

#[test]
fn the_denominator_stays_when_users_drop_out() {
    // A user's contribution has norm ½ whoever else is there, so the first step says how many turned up.
    let data = Sample { points: vec![vec![vec![100.0; DIMENSION]]; 200] };
    let mut lengths = Vec::new();
    for seed in 0..40 {
        let mut settings = settings("none", Local::Gradient);
        (settings.recipe.dropout, settings.recipe.seed) = (0.4, seed);
        let plan = plan(settings);
        let mut training = start(&data, &plan, None).unwrap();
        training.advance().unwrap();
        let moved =
            training.released().iter().map(|x| f64::from(x - seed as f32).powi(2)).sum::<f64>().sqrt();
        lengths.push((moved / (0.2 * 0.5) * CLIENTS as f64 * 1e3).round() as i64);
    }
    lengths.sort_unstable();
    lengths.dedup();
    assert!(
        lengths.len() >= 4 && lengths.iter().all(|l| (l % 1000).min(1000 - l % 1000) <= 2),
        "{lengths:?}"
    );
    assert!(lengths.iter().all(|l| (0..=CLIENTS as i64).contains(&((l + 500) / 1000))), "{lengths:?}");
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn checkpoints(&self) -> Checkpoints {
        Checkpoints::new(self.0.path())
    }

    /// Begins the run, or takes it up where the newest checkpoint is.
    fn open<'a>(&self, data: &'a Sample) -> Result<Training<'a, Points, Sample>> {
        let plan = private();
        let journal = self.0.path().join("journal");
        let run = match (journal.exists(), self.checkpoints().newest()?) {
            (false, _) => run().with_journal(&journal, plan.hash())?,
            (true, None) => run().resumed(&journal, plan.hash(), None)?,
            (true, Some(_)) => run().restored(&journal, plan.hash(), self.checkpoints().noise()?)?,
        };
        let mut training = start(data, &plan, Some(run))?;
        self.checkpoints().restore_server(&mut training)?;
        Ok(training)
    }
}

#[test]
fn a_resumed_run_ends_in_the_same_bits() {
    let data = Sample::new(100, 0.0);
    let whole = all_rounds(&mut Folder::new().open(&data).unwrap()).unwrap();
    for (saved, lost) in [(0, 0), (0, 3), (4, 0), (4, 5), (11, 1), (12, 0)] {
        let folder = Folder::new();
        let mut training = folder.open(&data).unwrap();
        for _ in 0..saved {
            training.advance().unwrap();
        }
        if saved > 0 {
            folder.checkpoints().save(&training).unwrap();
        }
        // Rounds after the checkpoint are in the journal alone.
        for _ in 0..lost {
            training.advance().unwrap();
        }
        drop(training);
        let mut resumed = folder.open(&data).unwrap();
        assert_eq!(resumed.done(), saved);
        assert_eq!(bits(&all_rounds(&mut resumed).unwrap()), bits(&whole), "{saved} saved, {lost} lost");
    }
}

#[test]
fn a_changed_input_is_refused_and_can_be_burned() {
    let (data, changed) = (Sample::new(100, 0.0), Sample::new(100, 0.5));
    let folder = Folder::new();
    let mut training = folder.open(&data).unwrap();
    for _ in 0..3 {
        training.advance().unwrap();
    }
    folder.checkpoints().save(&training).unwrap();
    training.advance().unwrap();
    drop(training);

    let mut resumed = folder.open(&changed).unwrap();
    let before = bits(resumed.released());
    let error = resumed.advance().unwrap_err();
    assert_eq!(error.kind(), "step-reused", "{error}");
    assert_eq!(bits(resumed.released()), before, "nothing moved");
    assert_eq!(resumed.burn().unwrap(), 3);
    assert_eq!(all_rounds(&mut resumed).map(|theta| theta.len()).unwrap(), DIMENSION);
    assert_eq!(resumed.done(), ROUNDS);

    // The burn is remembered.
    drop(resumed);
    let mut again = folder.open(&changed).unwrap();
    all_rounds(&mut again).unwrap();
    assert_eq!(again.done(), ROUNDS);
}

#[test]
fn only_the_newest_checkpoint_stays() {
    let data = Sample::new(100, 0.0);
    let folder = Folder::new();
    let mut training = folder.open(&data).unwrap();
    for round in 1..=3 {
        training.advance().unwrap();
        folder.checkpoints().save(&training).unwrap();
        assert_eq!(folder.checkpoints().newest().unwrap(), Some(round));
        // The journal with its lock, the stream and the server.
        assert_eq!(std::fs::read_dir(folder.0.path()).unwrap().count(), 4);
    }
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let data = Sample::new(100, 0.0);
    let schedule = Steps::Values(vec![1.0; ROUNDS + 1]);
    let longer = plan(Settings { rounds: ROUNDS + 1, schedule, ..settings("none", SGD) });
    let error = start(&data, &longer, Some(run())).err().unwrap();
    assert_eq!(error.kind(), "wrong-length");
    let refused = |settings: Settings| start(&data, &plan(settings), None).err().unwrap().kind();
    let base = || settings("none", SGD);
    let with = |recipe: Recipe| Settings { recipe, ..base() };
    assert_eq!(refused(with(Recipe { clients: 10, ..base().recipe })), "too-few-users");
    assert_eq!(refused(with(Recipe { dropout: 1.0, ..base().recipe })), "invalid-argument");
    assert_eq!(refused(Settings { clip: 0.0, ..base() }), "invalid-argument");
    for local in [
        Local::Sgd { learning_rate: 0.0, passes: 1, batch: 1 },
        Local::Sgd { learning_rate: 0.1, passes: 0, batch: 1 },
        Local::Sgd { learning_rate: 0.1, passes: 1, batch: 0 },
    ] {
        assert_eq!(refused(settings("none", local)), "invalid-argument");
    }
}

/// Whatever the recipe calls its clients, a sampled sum is divided by what the sampler draws on average.
#[test]
fn a_sampled_sum_is_divided_by_the_expected_batch() {
    let data = Sample::new(100, 0.0);
    let sampling: Sampling = "balls-in-bins:3".parse().unwrap();
    let participation = sampling.participation(ROUNDS).unwrap().unwrap();
    let plan = plan(Settings { sampling, participation, ..settings("blt:buffers=1", Local::Gradient) });
    let secret = secret();
    let run = || plan.private_run(&secret, DIMENSION).unwrap().unwrap();
    let cohorts = || plan.cohorts(100, &secret).unwrap();
    let mut training = Training::new(&Points, &data, &plan, cohorts(), Some(run())).unwrap();
    training.advance().unwrap();

    let mut run = run();
    let clients = Clients::new(&Points, &data, Local::Gradient, *run.clip()).unwrap();
    let start = Points.initial(plan.recipe().seed);
    let mut counts = clients.sum(&start, &cohorts().cohort(0));
    run.follow(cohorts().bind(secret.run).unwrap()).unwrap();
    run.set_denominator(1.0).unwrap();
    run.contribute(0).unwrap();
    let mut sum = vec![0.0; DIMENSION];
    run.release(&mut counts, &mut sum).unwrap();
    let rate = plan.workload().optimizer().unwrap().1[0];
    for ((theta, start), sum) in training.released().iter().zip(&start).zip(&sum) {
        let step = rate * f64::from(*sum) / (100.0 / 3.0);
        assert!((f64::from(*theta) - (f64::from(*start) - step)).abs() < 1e-5, "{theta} {start} {step}");
        assert!(step.abs() > 1e-4, "something moved");
    }
    let refused = Training::new(&Points, &data, &plan, cohorts(), None).err().unwrap();
    assert!(refused.to_string().contains("its private run"), "{refused}");

    // Cohorts by a seed where the guarantee relies on sampling, and cohorts that another run draws.
    let listed = Assignment::new(participation, 100, ROUNDS, CLIENTS, 1).unwrap();
    let run = || Some(plan.private_run(&secret, DIMENSION).unwrap().unwrap());
    let refused = Training::new(&Points, &data, &plan, listed, run()).err().unwrap();
    assert!(refused.to_string().contains("relies on sampling balls-in-bins:3"), "{refused}");
    let mut taken = cohorts();
    taken.bind(RunId([1; 16])).unwrap();
    let refused = Training::new(&Points, &data, &plan, taken, run()).err().unwrap();
    assert!(refused.to_string().contains("a sampler of its own"), "{refused}");
}
