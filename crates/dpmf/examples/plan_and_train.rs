//! Plan a run, train with it, and print what is guaranteed.
//!
//!     cargo run --release -p dpmf --example plan_and_train

use dpmf::accounting::PrivacyUnit;
use dpmf::noise::{Arithmetic, NoiseKey, RunId};
use dpmf::planner::{Planner, Request, silent};
use dpmf::run::{Order, PrivateRun};
use dpmf::{Optimizer, Sampler, Workload};

const EXAMPLES: usize = 4000;
const FEATURES: usize = 10;
const MOMENTUM: f32 = 0.9;

fn main() -> dpmf::Result<()> {
    let accuracy = train(&NoiseKey::generate()?)?;
    println!("accuracy on new data: {accuracy:.2}");
    Ok(())
}

fn train(key: &NoiseKey) -> dpmf::Result<f64> {
    // What you know: 4 epochs of batches of 400, SGD with momentum, and the budget. The plan finds the noise and the sampler.
    let steps = Request::steps(EXAMPLES as u64, 400, 4)?;
    let optimizer = Optimizer { momentum: MOMENTUM.into(), ..Optimizer::default() };
    let mut request =
        Request::new(Workload::sgd(vec![1.0; steps], optimizer)?, EXAMPLES as u64, 400, 4, 4.0, 1e-5)?;
    request.conditions.unit = PrivacyUnit::Record;
    let plan = Planner::default().plan(&request, &mut silent)?;
    let mechanism = plan.chosen().mechanism();
    println!("{}", plan.chosen().words());
    println!("{:.2} times the error of DP-SGD\n", plan.chosen().rmse() / plan.dp_sgd().rmse());

    // One run: its sampler draws the batches, and its clip, noise and denominator make every release private.
    let id = RunId::generate()?;
    let sampler = Sampler::new(key, id, mechanism.sampling(), EXAMPLES, steps)?;
    let mut run =
        PrivateRun::new(mechanism, key, id, 0..FEATURES as u64, FEATURES as u64, Arithmetic::Exact)?;
    run.follow(Order { name: sampler.sampling().to_string(), by_step: true, sampled: true })?;
    run.set_denominator(sampler.expected_batch())?;

    let (mut weights, mut velocity) = ([0.0; FEATURES], [0.0; FEATURES]);
    for step in 0..steps {
        let batch = sampler.members(step)?;
        run.hand_out(step, Some(batch.len()))?;
        run.contribute(batch.len())?;
        let (mut sum, mut noisy) = ([0; FEATURES], [0.0; FEATURES]);
        for &example in &batch {
            run.clip().add(&gradient(&weights, example as usize), &mut sum);
        }
        run.release(&mut sum, &mut noisy)?;
        for ((weight, velocity), noisy) in weights.iter_mut().zip(&mut velocity).zip(noisy) {
            *velocity = MOMENTUM * *velocity + noisy / sampler.expected_batch() as f32;
            *weight -= *velocity;
        }
    }
    println!("{}", run.privacy());
    let right = (EXAMPLES..2 * EXAMPLES).filter(|&i| (score(&weights, &features(i)) > 0.0) == label(i));
    Ok(right.count() as f64 / EXAMPLES as f64)
}

/// The gradient of the logistic loss of one example.
fn gradient(weights: &[f32; FEATURES], example: usize) -> [f32; FEATURES] {
    let features = features(example);
    let probability = 1.0 / (1.0 + (-score(weights, &features)).exp());
    features.map(|x| (probability - f32::from(u8::from(label(example)))) * x)
}

fn score(weights: &[f32; FEATURES], features: &[f32; FEATURES]) -> f32 {
    weights.iter().zip(features).map(|(w, x)| w * x).sum()
}

/// Made-up data: the label is whether a linear function of the features is positive.
fn features(example: usize) -> [f32; FEATURES] {
    std::array::from_fn(|j| ((example * (j * j + 3)) as f32 * 0.7).sin())
}

fn label(example: usize) -> bool {
    score(&std::array::from_fn(|j| j as f32 - 4.0), &features(example)) > 0.0
}

#[test]
fn a_private_model_is_nearly_as_good_as_its_data() {
    let accuracy = train(&NoiseKey::from_seed(1)).unwrap();
    assert!(accuracy > 0.9, "{accuracy}");
}
