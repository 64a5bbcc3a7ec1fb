//! What the noise is bound to: everything that decides it, and nothing else.
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

use dpmf::accounting::{Accountant, Adjacency, PrivacyUnit};
use dpmf::factorize::Dual;
use dpmf::form::StateSpace;
use dpmf::form::state_space::Parts;
use dpmf::mechanism::{Bound, Conditions};
use dpmf::noise::{Arithmetic, NoiseKey, Output, RunId};
use dpmf::{Average, Form, Mechanism, Optimizer, Participation, Workload, format};

const STEPS: usize = 4;

/// A change of a case.
type Change = fn(&mut Case);

#[derive(Clone)]
struct Case {
    rates: Vec<f64>,
    optimizer: Optimizer,
    output: f64,
    noise_multiplier: f64,
    delta: f64,
    clip: f64,
    conditions: Conditions,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            rates: vec![1.0, 1.0, 0.5, 0.25],
            optimizer: Optimizer { momentum: 0.5, ..Default::default() },
            output: -0.25,
            noise_multiplier: 1.5,
            delta: 1e-6,
            clip: 0.5,
            conditions: Conditions::default(),
        }
    }
}

impl Case {
    fn uncalibrated(&self) -> Mechanism {
        let parts = Parts {
            direct: vec![1.0; STEPS],
            output: vec![self.output; STEPS],
            input: vec![0.5; STEPS],
            increment: vec![-0.125; STEPS],
        };
        let workload = Workload::sgd(self.rates.clone(), self.optimizer).unwrap();
        let form = Form::StateSpace(StateSpace::from_parts(1, parts).unwrap());
        Mechanism::new(workload, &form, Participation::default()).unwrap()
    }

    fn mechanism(&self) -> Mechanism {
        self.uncalibrated().with_noise(self.noise_multiplier, self.delta, self.clip, self.conditions).unwrap()
    }
}

fn bits(mechanism: &Mechanism) -> Vec<u32> {
    [Arithmetic::Float, Arithmetic::Exact].map(|arithmetic| bits_in(mechanism, arithmetic)).concat()
}

fn bits_in(mechanism: &Mechanism, arithmetic: Arithmetic) -> Vec<u32> {
    let (key, run) = (NoiseKey::from_seed(2022), RunId::from_label("pinned"));
    let mut stream = mechanism.stream(&key, run, 3..6, Output::Gradient, arithmetic).unwrap();
    let mut all = Vec::new();
    for _ in 0..2 {
        let mut row = [0.0_f32; 3];
        stream.add_next(&mut row).unwrap();
        all.extend(row.map(f32::to_bits));
    }
    all
}

/// One stream from a mechanism to its bits: whoever changes any of them changes the version of a format.
#[test]
fn one_stream_is_pinned_end_to_end() {
    let mechanism = Case::default().mechanism();
    assert_eq!(
        mechanism.identity().to_string(),
        "ec03e4306c6d16bfe23a19d25f0c0990f22bb0f33822fe8f34032eb3382b44a6"
    );
    assert_eq!(
        bits_in(&mechanism, Arithmetic::Float),
        [1_066_775_402, 3_206_846_662, 1_062_933_082, 1_058_245_802, 1_040_396_076, 3_212_358_933]
    );
    // A second implementation in Python (AES from `cryptography`, mpmath) has all six real numbers within 2⁻⁷, half the
    // grid, of these, for a scale of 0.768.
    assert_eq!(
        bits_in(&mechanism, Arithmetic::Exact),
        [1_070_727_168, 1_065_615_360, 1_065_746_432, 3_215_458_304, 3_213_230_080, 1_033_895_936]
    );
    // A file keeps both.
    let back = format::from_bytes(&format::to_bytes(&mechanism).unwrap()).unwrap();
    assert_eq!((back.identity(), bits(&back)), (mechanism.identity(), bits(&mechanism)));
}

#[test]
fn what_decides_the_noise_changes_the_identity() {
    let base = Case::default();
    let changes: [(&str, Change); 9] = [
        ("a coefficient", |case| case.output = case.output.next_up() as f32 as f64 + 1e-7),
        ("σ", |case| case.noise_multiplier = case.noise_multiplier.next_up()),
        ("the clip", |case| case.clip = case.clip.next_up()),
        ("a step size", |case| case.rates[3] = case.rates[3].next_up()),
        ("momentum", |case| case.optimizer.momentum = 0.6),
        ("Nesterov", |case| case.optimizer.nesterov = true),
        ("weight decay", |case| case.optimizer.weight_decay = 0.1),
        ("the average", |case| case.optimizer.average = Average::Uniform),
        ("its parameter", |case| case.optimizer.average = Average::Ema(0.5)),
    ];
    let mut seen = vec![base.mechanism().identity(), base.uncalibrated().identity()];
    for (what, change) in changes {
        let mut case = base.clone();
        change(&mut case);
        let identity = case.mechanism().identity();
        assert!(!seen.contains(&identity), "{what} does not change the identity");
        assert_ne!(bits(&case.mechanism()), bits(&base.mechanism()), "{what} does not change the noise");
        seen.push(identity);
    }
    // The same coefficients for a matrix: another workload.
    let matrix = Workload::dense(Workload::prefix_sum(STEPS).unwrap().to_dense()).unwrap();
    let form = base.uncalibrated().form().clone();
    let of = |workload| Mechanism::new(workload, &form, Participation::default()).unwrap().identity();
    assert_ne!(of(matrix), of(Workload::prefix_sum(STEPS).unwrap()));
}

/// The words of the statement follow from unit, adjacency, accountant and ε; the noise does not.
#[test]
fn words_and_proofs_change_no_bit() {
    let base = Case::default().mechanism();
    let others = [
        Case { delta: 1e-5, ..Default::default() },
        Case {
            conditions: Conditions { unit: PrivacyUnit::Record, ..Default::default() },
            ..Default::default()
        },
        Case {
            conditions: Conditions { adjacency: Adjacency::ReplaceOne, ..Default::default() },
            ..Default::default()
        },
        Case {
            conditions: Conditions { accountant: Accountant::Rdp, ..Default::default() },
            ..Default::default()
        },
    ];
    for case in others {
        let mechanism = case.mechanism();
        assert_ne!(mechanism.privacy().unwrap().to_string(), base.privacy().unwrap().to_string());
        assert_eq!((mechanism.identity(), bits(&mechanism)), (base.identity(), bits(&base)));
    }
    let bound = Bound { dual: Dual::single(vec![1.0; STEPS]).unwrap(), lower_bound: 1e-3, iterations: 1 };
    let with_bound = base.clone().with_bound(bound).unwrap().with_family("optimal".parse().unwrap());
    assert_eq!(bits(&with_bound), bits(&base));
}

#[test]
fn unit_noise_is_asked_for_by_name_and_is_other_noise() {
    let (key, run) = (NoiseKey::from_seed(1), RunId([0; 16]));
    let case = Case::default();
    let error =
        case.uncalibrated().stream(&key, run, 0..8, Output::Gradient, Arithmetic::Exact).err().unwrap();
    assert!(error.to_string().contains("not calibrated"), "{error}");
    let row = |stream: dpmf::Result<dpmf::noise::NoiseStream>| {
        let (mut stream, mut row) = (stream.unwrap(), [0.0_f32; 8]);
        stream.add_next(&mut row).unwrap();
        (stream.scale(), row)
    };
    let unit = row(case.mechanism().unit_stream(&key, run, 0..8, Output::Gradient, Arithmetic::Exact));
    assert_eq!(
        unit,
        row(case.uncalibrated().unit_stream(&key, run, 0..8, Output::Gradient, Arithmetic::Exact))
    );
    assert_eq!(unit.0, 1.0);
    let scaled = row(case.mechanism().stream(&key, run, 0..8, Output::Gradient, Arithmetic::Exact));
    assert!(scaled.1.iter().zip(&unit.1).all(|(a, b)| *a != scaled.0 * b));
}
