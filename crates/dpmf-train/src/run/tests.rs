use super::*;
use crate::{Labelled, LabelledExample, Local, PlanLimits, Privacy, Recipe, RunPlanner, Settings, Steps};
use dpmf::accounting::Arithmetic;
use dpmf::disk::Simulated;
use dpmf::planner::silent;
use dpmf::{Optimizer, Participation, Sampling};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

pub(super) const ROUNDS: usize = 6;
pub(super) const CLIENTS: usize = 2;
pub(super) const DIMENSION: usize = 3;

/// `½‖θ − x − shift‖²`; another shift is training that does not repeat itself.
#[derive(Default)]
pub(super) struct Points {
    pub(super) shift: AtomicU32,
}

impl Model for Points {
    type Domain = Labelled;
    type Workspace = ();

    fn kind(&self) -> &'static str {
        "points"
    }

    fn parameters(&self) -> usize {
        DIMENSION
    }

    fn initial(&self, _: u64) -> Vec<f32> {
        vec![1.0; DIMENSION]
    }

    fn workspace(&self) {}

    fn gradient(
        &self,
        parameters: &[f32],
        batch: &[LabelledExample<'_>],
        (): &mut (),
        gradient: &mut [f32],
    ) -> Score {
        let shift = self.shift.load(Ordering::Relaxed) as f32;
        for example in batch {
            for ((g, theta), x) in gradient.iter_mut().zip(parameters).zip(example.features) {
                *g += 0.01 * (theta - x - shift);
            }
        }
        self.score(parameters, batch, &mut ())
    }

    fn score(&self, parameters: &[f32], batch: &[LabelledExample<'_>], (): &mut ()) -> Score {
        let loss = f64::from(parameters.iter().sum::<f32>());
        Score { loss, correct: 0, predictions: batch.len() as u64 }
    }
}

/// Users with a point each.
pub(super) struct Sample(Vec<[f32; DIMENSION]>);

impl Users for Sample {
    type Domain = Labelled;

    fn users(&self) -> usize {
        self.0.len()
    }

    fn examples<'a>(&'a self, user: usize, out: &mut Vec<LabelledExample<'a>>) {
        out.push(LabelledExample { features: &self.0[user], label: 0 });
    }
}

pub(super) fn data() -> Split<Sample> {
    let sample =
        |users: usize| Sample((0..users).map(|u| [0, 1, 2].map(|j| (u * 3 + j) as f32 / 7.0)).collect());
    Split { train: sample(ROUNDS * CLIENTS), validation: sample(2), test: sample(2) }
}

fn settings() -> Settings {
    Settings {
        recipe: Recipe {
            mechanism: "tree".parse().unwrap(),
            clients: CLIENTS,
            local: Local::Gradient,
            dropout: 0.0,
            arithmetic: Arithmetic::default(),
            seed: 1,
        },
        participation: Participation::default(),
        sampling: Sampling::default(),
        rounds: ROUNDS,
        clip: 0.5,
        optimizer: Optimizer { momentum: 0.5, ..Default::default() },
        schedule: Steps::Values(vec![1.0; ROUNDS]),
        server_learning_rate: 0.2,
        unit: dpmf::accounting::PrivacyUnit::Record,
        privacy: Privacy::Epsilon { epsilon: 8.0, delta: 1e-6 },
        beside: None,
        limits: PlanLimits { epochs: Some(3), pull: 0.0, ..PlanLimits::new(12) },
    }
}

pub(super) fn plan() -> Plan {
    RunPlanner::default().plan(&settings(), &mut silent).unwrap()
}

pub(super) const PACE: Pace = Pace { points: 2, users: 1, checkpoint: 2 };
pub(super) const SEED: KeySource = KeySource::Seed(7);

fn begin<'a>(folder: &Path, model: &'a Points, data: &'a Split<Sample>) -> Result<Run<'a, Points, Sample>> {
    Run::begin(folder, model, data, &plan(), PACE, &SEED)
}

fn refusal(run: Result<Run<'_, Points, Sample>>) -> String {
    run.err().expect("it should be refused").to_string()
}

/// All files with their content.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

#[test]
fn only_what_an_unfinished_start_left_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data, key) = (Points::default(), data(), folder.path().join(KEY));
    fs::write(&key, "of somebody else").unwrap();
    assert!(refusal(begin(folder.path(), &model, &data)).contains("another directory"));
    assert!(key.exists());
    save_plan(folder.path(), &plan()).unwrap();
    let mut run = begin(folder.path(), &model, &data).unwrap();
    assert!(NoiseKey::read_file(&key).is_ok());
    run.advance().unwrap();
    drop(run);

    // The manifest of a run that has released something: the rest stays, since another start would repeat the noise.
    assert!(refusal(begin(folder.path(), &model, &data)).contains("resume it"));
    fs::remove_file(folder.path().join(MANIFEST)).unwrap();
    let before = files(folder.path());
    assert!(refusal(begin(folder.path(), &model, &data)).contains("with a new key"));
    fs::remove_file(folder.path().join(JOURNAL)).unwrap();
    fs::rename(
        folder.path().join("server-00000000.safetensors"),
        folder.path().join("server-00000002.safetensors"),
    )
    .unwrap();
    assert!(refusal(begin(folder.path(), &model, &data)).contains("with a new key"));
    assert_eq!(files(folder.path()).len(), before.len() - 1);
}

#[test]
fn a_lost_or_damaged_file_is_refused_and_nothing_is_touched() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (Points::default(), data());
    let mut run = begin(folder.path(), &model, &data).unwrap();
    (0..5).for_each(|_| assert!(run.advance().unwrap()));
    drop(run);
    let whole = files(folder.path());
    let restore = || {
        fs::read_dir(folder.path())
            .unwrap()
            .for_each(|entry| fs::remove_file(entry.unwrap().path()).unwrap());
        whole.iter().for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
        #[cfg(unix)]
        fs::set_permissions(folder.path().join(KEY), std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
    };
    let resume = || Run::resume(folder.path(), &model, &data);
    for (name, gone) in [
        (MANIFEST, "no run here"),
        (PLAN, "the plan of the run is gone"),
        (KEY, "the key of the run is gone"),
        (JOURNAL, "the journal of the run is gone"),
        ("server-00000004.safetensors", "the checkpoint of the run is gone"),
        ("stream-00000004.checkpoint", "the checkpoint of the noise of the run is gone"),
        (CURVE, "the learning curve of the run is gone"),
    ] {
        let path = folder.path().join(name);
        let bytes = whole.get(&path).unwrap_or_else(|| panic!("{name} of {:?}", whole.keys()));
        fs::remove_file(&path).unwrap();
        let before = files(folder.path());
        let message = refusal(resume());
        assert!(message.contains(gone), "{name}: {message}");
        assert!(name == MANIFEST || message.contains("begin a new run with a new key"), "{name}: {message}");
        assert_eq!(files(folder.path()), before, "{name}");
        for cut in [0, 1, bytes.len() / 2, bytes.len() - 1] {
            // The journal may end anywhere behind its header, but not before the checkpoint.
            fs::write(&path, &bytes[..cut]).unwrap();
            if !(name == JOURNAL && cut == bytes.len() - 1) {
                let before = files(folder.path());
                assert!(resume().is_err(), "{name} cut to {cut}");
                assert_eq!(files(folder.path()), before, "{name} cut to {cut}");
            }
        }
        restore();
    }
    // Two records of five, and a checkpoint after the fourth.
    let journal = folder.path().join(JOURNAL);
    fs::write(&journal, &whole[&journal][..256 + 2 * 64]).unwrap();
    let message = refusal(resume());
    assert!(message.contains("records 2 steps, but the stream has passed 4"), "{message}");
    assert!(message.contains("with a new key"), "{message}");
    restore();
    let mut run = resume().unwrap();
    while run.advance().unwrap() {}
    assert_eq!(run.done(), ROUNDS);
}

#[test]
fn a_directory_is_held_before_anything_in_it_is_read_or_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (Points::default(), data());
    let run = begin(folder.path(), &model, &data).unwrap();
    // As if the first process had not come to its manifest yet: the second must not take its key for a remainder.
    fs::remove_file(folder.path().join(MANIFEST)).unwrap();
    let before = files(folder.path());
    let refusals = [
        refusal(begin(folder.path(), &model, &data)),
        refusal(Run::resume(folder.path(), &model, &data)),
        save_plan(folder.path(), &plan()).unwrap_err().to_string(),
    ];
    for message in refusals {
        assert!(message.contains("is locked"), "{message}");
    }
    assert_eq!(files(folder.path()), before);
    drop(run);
    begin(folder.path(), &model, &data).map(drop).unwrap();

    // A disk whose lock fails is asked nothing else.
    let disk = Simulated::new(0);
    let place = disk.at("/run");
    place.create_folders().unwrap();
    let held = place.join("lock").lock().unwrap();
    let before = disk.operations();
    assert!(refusal(Run::resume(&place, &model, &data)).contains("is locked"));
    assert_eq!(disk.operations(), before + 1);
    drop(held);
}

#[test]
fn checkpoints_leave_no_remains_of_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (Points::default(), data());
    let mut run = begin(folder.path(), &model, &data).unwrap();
    let remains = ["stream-00000001.checkpoint", "server-00000001.safetensors.partial", "server-notes.txt"];
    remains.iter().for_each(|name| fs::write(folder.path().join(name), "").unwrap());
    (0..2).for_each(|_| assert!(run.advance().unwrap()));
    assert_eq!(remains.map(|name| folder.path().join(name).exists()), [false, false, true]);
}

/// What a run under every new mechanism and sampler is made of.
fn several_epochs() -> Vec<Plan> {
    let mut base = Settings {
        rounds: 12,
        schedule: Steps::Values(vec![1.0; 12]),
        participation: Participation::Epochs { times: 3 },
        ..settings()
    };
    base.recipe.clients = 3;
    let by = |mechanism: &str, participation: &str, sampling: &str| {
        let sampling: Sampling = sampling.parse().unwrap();
        let meant = sampling.participation(12).unwrap();
        let participation = meant.unwrap_or_else(|| participation.parse().unwrap());
        let mut settings = Settings { participation, sampling, ..base.clone() };
        settings.recipe.mechanism = mechanism.parse().unwrap();
        RunPlanner::default().plan(&settings, &mut silent).unwrap()
    };
    vec![
        by("independent", "", "cyclic-poisson:1:0.25"),
        by("banded-toeplitz:bands=3", "", "cyclic-poisson:3:0.75"),
        by("banded:bands=2", "", "cyclic-poisson:2:0.5"),
        by("blt:buffers=2", "", "balls-in-bins:4"),
        by("banded-inverse:bands=2", "", "balls-in-bins:4"),
        by("recall:buffers=2:recalls=1", "epochs:3", "none"),
        by("optimal:dense", "epochs:3", "none"),
        by("blt:buffers=2", "epochs:3", "none"),
        by("banded-inverse", "min-separation:3:4", "none"),
        by("planned", "epochs:3", "none"),
        by("none", "epochs:3", "none"),
    ]
}

#[test]
fn runs_of_several_epochs_and_all_samplers_resume_with_the_same_bits() {
    let (model, data) = (Points::default(), data());
    let mut ends = Vec::new();
    for plan in several_epochs() {
        let label = format!("{} {}", plan.label(), plan.sampling());
        let bits = |run: &Run<'_, Points, Sample>| -> Vec<u32> {
            run.released().iter().map(|x| x.to_bits()).collect()
        };
        let mut whole = Run::in_memory(&model, &data, &digest(&data.train), &plan, PACE, &SEED).unwrap();
        while whole.advance().unwrap() {}
        // Killed after every round, between checkpoints too: nothing of the process is left.
        let folder = tempfile::tempdir().unwrap();
        let mut run = Run::begin(folder.path(), &model, &data, &plan, PACE, &SEED).unwrap();
        for round in 0..12 {
            assert!(run.advance().unwrap(), "{label} in round {round}");
            if round % 5 != 4 {
                drop(run);
                run = Run::resume(folder.path(), &model, &data).unwrap();
                // What was released after the last checkpoint is computed again, to the same bits, or refused.
                while run.done() <= round {
                    assert!(run.advance().unwrap(), "{label} after round {round}");
                }
            }
        }
        assert!(!run.advance().unwrap());
        assert_eq!(bits(&run), bits(&whole), "{label}");
        ends.push(bits(&run));
        // Another key draws other noise and, where cohorts are secret, other cohorts.
        let other = KeySource::Seed(8);
        let mut other = Run::in_memory(&model, &data, &digest(&data.train), &plan, PACE, &other).unwrap();
        while other.advance().unwrap() {}
        assert_eq!(bits(&other) != bits(&whole), plan.mechanism().is_some(), "{label}");
    }
    let count = ends.len();
    ends.sort();
    ends.dedup();
    assert_eq!(ends.len(), count);
}

/// Whoever reads the files of a run without its key learns nothing of who is in the data: no file holds a hash that can be computed
/// from the data alone, or that stays the same from run to run.
#[test]
fn no_file_holds_an_unkeyed_hash_of_the_data() {
    let (model, data) = (Points::default(), data());
    let mut plain = settings();
    plain.recipe.mechanism = crate::MechanismChoice::None;
    for plan in [plan(), RunPlanner::default().plan(&plain, &mut silent).unwrap()] {
        let mut marks = Vec::new();
        for folder in [0, 1].map(|_| tempfile::tempdir().unwrap()) {
            Run::begin(folder.path(), &model, &data, &plan, PACE, &KeySource::System).map(drop).unwrap();
            let manifest: Manifest = read_json(&DiskPath::from(folder.path().join(MANIFEST))).unwrap();
            marks.push(manifest.binding.data);
            let unkeyed = digest(&data.train).0;
            for (path, bytes) in files(folder.path()) {
                let text = String::from_utf8_lossy(&bytes);
                assert!(!bytes.windows(32).any(|part| part == unkeyed), "{path:?}");
                assert!(!text.contains(&hex_of(&unkeyed)), "{path:?}");
                #[cfg(unix)]
                if ![PLAN, "lock", "journal.lock"].iter().any(|name| path.ends_with(name)) {
                    let permissions = fs::metadata(&path).unwrap().permissions();
                    let mode = std::os::unix::fs::PermissionsExt::mode(&permissions);
                    assert_eq!(mode & 0o077, 0, "{path:?} is for its owner alone");
                }
            }
            Run::resume(folder.path(), &model, &data).map(drop).unwrap();
            let mut other = self::data();
            other.train.0[0][0] += 1.0;
            let message = refusal(Run::resume(folder.path(), &model, &other));
            assert!(message.contains("training data differs from what the run began with"), "{message}");
        }
        assert_ne!(marks[0], marks[1]);
    }
}
