//! A process that trains with a durable stream, killed at random points, over and over.
//!
//! The child is this very test binary, started again. It writes down every release it sees, after the fact,
//! like a server that answers clients; the parent kills it without warning and at the end checks what was
//! written down: no step was released with two inputs, and every release is its input plus the row of an
//! uninterrupted stream, bit for bit. A child now and then trains differently than before the crash, meets
//! the refusal and burns the step.
//!
//! `cargo test --test noise_crash -- --ignored` kills thousands of times instead of forty times.

#![allow(clippy::unwrap_used)] // helpers of tests

use dpmf::form::{Tree, tree::Decoder};
use dpmf::noise::{Arithmetic, DurableStream, NoiseKey, NoiseStream, Output, RunId};
use dpmf::{Error, Form, Mechanism, Participation, Workload};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const WIDTH: usize = 70;
const FOLDER: &str = "DPMF_CRASH_FOLDER";
const VARIANT: &str = "DPMF_CRASH_VARIANT";
const STEPS: &str = "DPMF_CRASH_STEPS";
/// A release as it is written down: step, variant of the input, input plus noise.
const ENTRY: usize = 8 + 8 + 4 * WIDTH;

/// The test that a child runs; it knows by the folder that it is one.
const CHILD: &str = "forty_kills_never_release_a_step_twice";

const PLAN: [u8; 32] = [4; 32];

fn stream(steps: usize) -> NoiseStream {
    let tree = Form::Tree(Tree::new(steps, Decoder::HonakerOnline).unwrap());
    let mechanism =
        Mechanism::new(Workload::prefix_sum(steps).unwrap(), &tree, Participation::default()).unwrap();
    let (key, run) = (NoiseKey::from_seed(1), RunId([3; 16]));
    mechanism.unit_stream(&key, run, 10..10 + WIDTH as u64, Output::Gradient, Arithmetic::Exact).unwrap()
}

fn input(step: usize, variant: u64) -> Vec<f32> {
    (0..WIDTH).map(|j| (step as f32).sin() + j as f32 + 1000.0 * variant as f32).collect()
}

/// Trains until it is killed. `variant` is what the first new input after a start depends on beside the step.
fn train(folder: &Path, variant: u64, steps: usize) {
    let (journal, checkpoint) = (folder.join("journal"), folder.join("checkpoint"));
    let mut durable = match (journal.exists(), checkpoint.exists()) {
        (false, _) => DurableStream::create(stream(steps), &journal, PLAN).unwrap(),
        (true, false) => DurableStream::open(stream(steps), &journal, PLAN).unwrap(),
        (true, true) => {
            DurableStream::open(stream(steps).restore(&checkpoint).unwrap(), &journal, PLAN).unwrap()
        }
    };
    let mut releases = OpenOptions::new().append(true).create(true).open(folder.join("releases")).unwrap();
    // The kill may have torn the last entry.
    let length = releases.metadata().unwrap().len();
    releases.set_len(length - length % ENTRY as u64).unwrap();
    let mut variants = durable_variants(folder);
    let mut first = true;
    for turn in 1_usize.. {
        let step = durable.next_step();
        // Deterministic training repeats what it did; a different variant is training that does not.
        let known = variants.get(&step).copied();
        let variant = if first && variant != 0 { variant } else { known.unwrap_or(0) };
        first = false;
        let mut row = input(step, variant);
        match durable.release(&mut row) {
            Ok(released) => {
                assert_eq!(released, step);
                let mut entry = Vec::with_capacity(ENTRY);
                entry.extend((step as u64).to_le_bytes());
                entry.extend(variant.to_le_bytes());
                row.iter().for_each(|x| entry.extend(x.to_le_bytes()));
                releases.write_all(&entry).unwrap();
            }
            Err(Error::StepReused { step: refused }) => {
                assert_eq!(refused, step);
                assert!(row == input(step, variant), "a refused input was changed");
                assert_eq!(durable.burn().unwrap(), step);
            }
            Err(other) => panic!("{other}"),
        }
        variants.remove(&step);
        if turn % 3 == 0 {
            durable.checkpoint(&checkpoint).unwrap();
        }
    }
}

/// The variant each step was last released with, so that a child can repeat its predecessor.
fn durable_variants(folder: &Path) -> BTreeMap<usize, u64> {
    read_releases(folder).into_iter().map(|(step, variant, _)| (step, variant)).collect()
}

fn read_releases(folder: &Path) -> Vec<(usize, u64, Vec<f32>)> {
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(folder.join("releases")) {
        file.read_to_end(&mut bytes).unwrap();
    }
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let entry = |entry: &[u8]| {
        let row = entry[16..].chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
        (number(&entry[..8]) as usize, number(&entry[8..16]), row)
    };
    bytes.chunks_exact(ENTRY).map(entry).collect()
}

/// Kills at least so often, and until kills have fallen between journal and checkpoint and a step was burned: without that the
/// test means nothing, and how soon it happens depends on the machine.
///
/// A mechanism of `steps` is made at every start of the child: no more of them than it can use up between kills.
fn kill_repeatedly(kills: u64, steps: usize) {
    let folder = tempfile::tempdir().unwrap();
    let mut seed = 7_u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let mut progress = 0;
    for kill in 1..=kills.max(4000) {
        if kill > kills && kill % 20 == 1 && check(folder.path(), kill - 1, steps) {
            return;
        }
        // One start in four trains differently; variants are never repeated.
        let variant = if random(4) == 0 { kill } else { 0 };
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([CHILD, "--exact", "--nocapture", "--test-threads", "1"])
            .env(FOLDER, folder.path())
            .env(VARIANT, variant.to_string())
            .env(STEPS, steps.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // From within the start of the process to some steps into training.
        let journal = folder.path().join("journal");
        let begun = std::time::Instant::now();
        let grown = || std::fs::metadata(&journal).map_or(0, |m| m.len());
        let early = random(16) == 0;
        while !early && grown() <= progress && begun.elapsed() < Duration::from_secs(120) {
            std::thread::sleep(Duration::from_micros(200 + random(2000)));
        }
        std::thread::sleep(Duration::from_micros(random(6000)));
        progress = grown();
        let ended = child.try_wait().unwrap();
        if ended.is_some() {
            let mut message = String::new();
            child.stderr.take().unwrap().read_to_string(&mut message).unwrap();
            panic!("the child stopped by itself: {message}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(check(folder.path(), kills.max(4000), steps), "no kill fell where it matters");
}

/// Checks every release so far; whether some were repeated and some steps burned.
fn check(folder: &Path, kills: u64, steps: usize) -> bool {
    let releases = read_releases(folder);
    let mut by_step: BTreeMap<usize, Vec<(u64, Vec<f32>)>> = BTreeMap::new();
    for (step, variant, row) in releases {
        by_step.entry(step).or_default().push((variant, row));
    }
    let last = *by_step.keys().last().unwrap();
    let mut uninterrupted = stream(steps);
    let mut repeated = 0;
    for (step, releases) in &by_step {
        uninterrupted.skip_to(*step).unwrap();
        let variant = releases[0].0;
        assert!(releases.iter().all(|(v, _)| *v == variant), "step {step} was released with two inputs");
        let mut expected = input(*step, variant);
        uninterrupted.add_next(&mut expected).unwrap();
        for (_, row) in releases {
            assert!(row.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "step {step}");
        }
        repeated += releases.len() - 1;
    }
    let durable = DurableStream::open(stream(steps), folder.join("journal"), PLAN).unwrap();
    let burned = durable.burned().count();
    println!("{kills} kills, {last} steps, {repeated} repeated, {burned} burned");
    last as u64 > kills / 4 && repeated > 0 && burned > 0
}

#[test]
fn forty_kills_never_release_a_step_twice() {
    match std::env::var_os(FOLDER) {
        None => kill_repeatedly(40, 1 << 13),
        Some(folder) => {
            let number = |name: &str| std::env::var(name).unwrap().parse().unwrap();
            train(Path::new(&folder), number(VARIANT), number(STEPS) as usize);
        }
    }
}

#[test]
#[ignore = "thousands of kills: minutes"]
fn thousands_of_kills_never_release_a_step_twice() {
    kill_repeatedly(2000, 1 << 15);
}
