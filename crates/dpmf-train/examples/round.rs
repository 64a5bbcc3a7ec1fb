//! What one default round costs: `cargo run --release -p dpmf-train --example round`.
//!
//! 100 users, the default model, one thread, time on the processor (from the system, so that a busy machine does not
//! count). Fails if a round takes more than 0.06 s or its noise, a stream of four buffers, more than a tenth of it.

use dpmf::noise::{Arithmetic, NoiseKey, RunId};
use dpmf::planner::silent;
use dpmf::{Optimizer, Participation, Sampling};
use dpmf_train::data::names;
use dpmf_train::model::Lstm;
use dpmf_train::{
    Local, Model, PlanLimits, Privacy, Recipe, RunPlanner, Secret, Settings, Steps, Training, Users,
};
use std::error::Error;

type Failure = Box<dyn Error + Send + Sync>;

const ROUNDS: usize = 64;

fn main() -> Result<(), Failure> {
    let data = names()?;
    let vocabulary = data.vocabulary.len();
    let model = Lstm { vocabulary, embedding: 16, hidden: 64, projection: Some(32) }.checked()?;
    let settings = Settings {
        recipe: Recipe {
            mechanism: "optimal:buffers=4".parse()?,
            clients: 100,
            local: Local::Sgd { learning_rate: 2.0, passes: 1, batch: 16 },
            dropout: 0.0,
            arithmetic: Arithmetic::default(),
            seed: 0,
        },
        participation: Participation::default(),
        sampling: Sampling::default(),
        rounds: 2048,
        clip: 1.0,
        optimizer: Optimizer { momentum: 0.9, ..Default::default() },
        schedule: Steps::Schedule("cooldown:0.25:0.05".into()),
        server_learning_rate: 0.25,
        unit: dpmf::accounting::PrivacyUnit::User,
        privacy: Privacy::Epsilon { epsilon: 2.0, delta: 1e-6 },
        beside: None,
        limits: PlanLimits::new(data.split.train.users()),
    };
    let plan = RunPlanner::default().plan(&settings, &mut silent)?;
    let secret = Secret { key: NoiseKey::from_seed(0), run: RunId([0; 16]) };
    let run = || plan.private_run(&secret, model.parameters());
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build()?;
    pool.install(|| {
        let cohorts = || plan.cohorts(data.split.train.users(), &secret);
        let mut training = Training::new(&model, &data.split.train, &plan, cohorts()?, run()?)?;
        for _ in 0..4 {
            training.advance()?;
        }
        let start = processor_time()?;
        for _ in 0..ROUNDS {
            training.advance()?;
        }
        let round = (processor_time()? - start) / ROUNDS as f64;
        let mut alone = run()?.ok_or("a mechanism")?;
        alone.set_denominator(1.0)?;
        let (mut sum, mut row) = (vec![0; model.parameters()], vec![0.0_f32; model.parameters()]);
        let start = processor_time()?;
        for _ in 0..ROUNDS {
            alone.contribute(0)?;
            alone.release(&mut sum, &mut row)?;
        }
        let noise = (processor_time()? - start) / ROUNDS as f64;
        println!(
            "{} parameters: a round of 100 users {:.1} ms of processor time, its noise {:.2} ms ({:.1} %)",
            model.parameters(),
            1e3 * round,
            1e3 * noise,
            100.0 * noise / round
        );
        if round > 0.06 || noise > 0.1 * round {
            return Err("a round must take at most 60 ms, its noise at most a tenth of that".into());
        }
        Ok(())
    })
}

/// Seconds that this thread has spent on a processor.
fn processor_time() -> Result<f64, Failure> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds: f64 = text.split(' ').next().ok_or("schedstat is empty")?.parse()?;
    Ok(1e-9 * nanoseconds)
}
