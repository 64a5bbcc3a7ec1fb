//! `golden/clip.json`: contributions and what clipping makes of them, for implementations in other languages.
//!
//! `DPMF_UPDATE_GOLDEN=1 cargo test -p dpmf --test clip_vectors` writes it anew.

use dpmf::Clip;
use serde::{Deserialize, Serialize};

/// Contributions of one step.
#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Case {
    about: String,
    clip: f64,
    unit: f64,
    target: f64,
    /// The bits of float32 numbers, one list for each contribution.
    contributions: Vec<Vec<u32>>,
    /// In units.
    sum: Vec<i64>,
    /// Longer than the target, or not finite.
    clipped: Vec<bool>,
}

impl Case {
    fn new(about: &str, clip: f64, contributions: &[Vec<f32>]) -> Self {
        let dimension = contributions[0].len();
        let clipping = Clip::new(clip, dimension as u64).expect("it is in range");
        let mut sum = vec![0; dimension];
        let clipped = contributions.iter().map(|contribution| clipping.add(contribution, &mut sum)).collect();
        Self {
            about: about.into(),
            clip,
            unit: clipping.unit(),
            target: clipping.target(),
            contributions: contributions.iter().map(|g| g.iter().map(|x| x.to_bits()).collect()).collect(),
            sum,
            clipped,
        }
    }
}

/// Numbers in (−1, 1) by a seed.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let next = |state: &mut u64| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..count).map(|_| next(&mut state)).collect()
}

fn scaled(scale: f32, values: Vec<f32>) -> Vec<f32> {
    values.into_iter().map(|x| scale * x).collect()
}

fn cases() -> Vec<Case> {
    // Halves of a unit: ties go to even.
    let half = 2.0_f32.powi(-33);
    vec![
        Case::new("one that is long", 1.0, &[vec![3.0, 4.0]]),
        Case::new("one that is short", 1.0, &[vec![0.25, -0.5, 0.0]]),
        Case::new("ties to even", 1.0, &[vec![half, 3.0 * half, 5.0 * half, -half, -3.0 * half]]),
        Case::new("zero", 0.5, &[vec![0.0, -0.0]]),
        Case::new("not a number", 1.0, &[vec![1.0, f32::NAN], vec![0.1, 0.2]]),
        Case::new("infinite", 1.0, &[vec![f32::INFINITY, 0.0], vec![0.0, f32::NEG_INFINITY], vec![0.1, 0.2]]),
        Case::new("the largest there is", 2.0, &[vec![f32::MAX, -f32::MAX, 1.0]]),
        Case::new("below any unit", 1.0, &[vec![f32::MIN_POSITIVE, 1e-42, -1e-30]]),
        Case::new("a small clip", 3e-7, &[numbers(1, 5), scaled(1e-8, numbers(2, 5))]),
        Case::new("a large clip", 7e9, &[scaled(1e10, numbers(3, 5)), scaled(1e3, numbers(4, 5))]),
        Case::new(
            "a batch, half of it long",
            0.3,
            &(0..16)
                .map(|i| scaled(if i % 2 == 0 { 0.01 } else { 4.0 }, numbers(10 + i, 40)))
                .collect::<Vec<_>>(),
        ),
        Case::new("many coordinates", 1.0, &[scaled(0.1, numbers(40, 700)), scaled(1e-3, numbers(41, 700))]),
    ]
}

#[test]
fn the_vectors_in_the_repository_are_those_of_the_core() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/clip.json");
    if std::env::var_os("DPMF_UPDATE_GOLDEN").is_some() {
        std::fs::write(path, serde_json::to_string(&cases()).unwrap() + "\n").unwrap();
    }
    let stored: Vec<Case> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(stored, cases());
}
