//! Every mechanism of the registry streams what its matrix says, in f32 rounding.
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

use dpmf::factorize::quiet;
use dpmf::noise::exact::field::ExactField;
use dpmf::noise::{Arithmetic, Field, NoiseKey, Output, RunId};
use dpmf::{Optimizer, Participation, Problem, Representation, Selector, Workload, family};
use std::ops::Range;

const COORDINATES: usize = 150;

#[test]
fn every_mechanism_streams_its_matrix_times_the_field() {
    let momentum = Optimizer { momentum: 0.9, ..Default::default() };
    let workloads = [
        Workload::prefix_sum(1).unwrap(),
        Workload::prefix_sum(21).unwrap(),
        Workload::sgd(vec![0.3; 32], momentum).unwrap(),
    ];
    // A fixed order, so that the kernel under test is known.
    let more = ["optimal:dense", "state-space:buffers=3"].map(|text| text.parse::<Selector>().unwrap());
    let problems = workloads.into_iter().flat_map(|workload| {
        let several = Participation::Epochs { times: workload.steps().min(3) };
        [Participation::default(), several].map(|who| Problem::new(workload.clone(), who).unwrap())
    });
    for problem in problems {
        for selector in family::all().chain(more) {
            let mechanism = match problem.mechanism(selector, &mut quiet) {
                // Some optima are no streams of a few states.
                Err(dpmf::Error::Unsupported { .. }) => continue,
                made => made.unwrap(),
            };
            let (key, run) = (NoiseKey::from_seed(8), RunId([1; 16]));
            let mut stream = mechanism
                .unit_stream(&key, run, 0..COORDINATES as u64, Output::Gradient, Arithmetic::Float)
                .unwrap();
            let exact = |range: Range<u64>| {
                mechanism.unit_stream(&key, run, range, Output::Gradient, Arithmetic::Exact).unwrap()
            };
            let mut whole = exact(0..COORDINATES as u64);
            let form = mechanism.form();
            let m = form.noise_rows();
            let field = Field::new(stream.key());
            let z: Vec<Vec<f32>> = (0..m as u64)
                .map(|t| {
                    let mut z = vec![0.0; COORDINATES];
                    field.row(t).fill(0, &mut z);
                    z
                })
                .collect();
            let exact_field = ExactField::new(whole.key());
            let exact_z: Vec<Vec<f64>> = (0..m as u64)
                .map(|t| {
                    let mut z = vec![0.0; COORDINATES];
                    exact_field.row(t).fill(0, &mut z);
                    z
                })
                .collect();
            let mut rows = form.coloring_rows();
            for i in 0..problem.steps() {
                let mut weights = vec![0.0; m];
                rows(&mut weights);
                let mut exact_noise = vec![0.0_f64; COORDINATES];
                whole.add_next(&mut exact_noise).unwrap();
                let grid = whole.grid().unwrap();
                let mut noise = vec![0.0_f32; COORDINATES];
                stream.add_next(&mut noise).unwrap();
                for j in 0..COORDINATES {
                    let terms = weights.iter().zip(&z).map(|(w, z)| w * f64::from(z[j]));
                    let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                    let error = (f64::from(noise[j]) - sum).abs();
                    assert!(error < 4e-6 * (1.0 + size), "{selector}, step {i}: {} {sum}", noise[j]);
                    let sum: f64 = weights.iter().zip(&exact_z).map(|(w, z)| w * z[j]).sum();
                    let error = (exact_noise[j] - sum).abs();
                    assert!(error < grid * 0.5 + 1e-9, "{selector}, step {i}: {} {sum}", exact_noise[j]);
                }
            }
        }
    }
}
