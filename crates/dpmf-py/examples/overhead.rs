//! The Rust half of `bench/python_overhead.py`: does one piece of work for every line it is given and prints its time.
//!
//! Arguments: coordinates of the stream, steps of the factorization. Lines: `noise` or `factorize`. Answers: seconds,
//! and a number that depends on the result.

use dpmf::factorize::{Options, Solver, optimal, quiet};
use dpmf::noise::{Arithmetic, NoiseKey, Output, RunId};
use dpmf::{Error, Optimizer, Participation, Problem, Workload};
use std::io::Write;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<usize> =
        std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let [dimension, steps] = arguments[..] else { return Err("give the dimension and the steps".into()) };

    let optimizer = Optimizer { momentum: 0.9, ..Default::default() };
    let small = Workload::sgd(vec![1.0; 1024], optimizer)?;
    let problem = Problem::new(small, Participation::default())?;
    let mechanism = problem.mechanism("optimal:buffers=4".parse()?, &mut quiet)?;
    let (key, run) = (NoiseKey::from_seed(0), RunId::from_label("bench"));
    let mut stream =
        mechanism.unit_stream(&key, run, 0..dimension as u64, Output::Gradient, Arithmetic::Exact)?;
    let mut values = vec![0.0_f32; dimension];

    for line in std::io::stdin().lines() {
        let clock;
        let result = match line?.as_str() {
            "noise" => {
                clock = Instant::now();
                stream.add_next(&mut values)? as f64
            }
            "factorize" => {
                let workload = Workload::sgd(vec![1.0; steps], optimizer)?;
                clock = Instant::now();
                optimal(&workload, Solver::Auto, &Options::default(), &mut quiet)?.certificate.loss
            }
            other => {
                return Err(
                    Error::InvalidArgument { name: "line", value: other.into(), rule: "unknown" }.into()
                );
            }
        };
        println!("{} {result}", clock.elapsed().as_secs_f64());
        std::io::stdout().flush()?;
    }
    Ok(())
}
