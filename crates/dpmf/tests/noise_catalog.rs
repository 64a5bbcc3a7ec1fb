//! Every mechanism of the catalogue streams what its matrix says, in f32 rounding.
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

use dpmf::factorize::{Options, Progress, Solver, Target};
use dpmf::noise::{Field, NoiseKey, NoiseStream, Output, RunId, StreamKey, engines};
use dpmf::{Catalog, Method, Optimizer, Representation, Workload};
use std::ops::ControlFlow;

const COORDINATES: usize = 150;

fn key() -> StreamKey {
    NoiseKey::from_seed(8).stream([1; 32], RunId([1; 16]))
}

#[test]
fn every_mechanism_streams_its_matrix_times_the_field() {
    let momentum = Optimizer { momentum: 0.9, ..Default::default() };
    let workloads = [
        Workload::prefix_sum(1).unwrap(),
        Workload::prefix_sum(21).unwrap(),
        Workload::sgd(vec![0.3; 32], momentum).unwrap(),
    ];
    for workload in workloads {
        let steps = workload.steps();
        let catalog = Catalog::new(workload, Solver::Auto, Options::default());
        for method in Method::ALL {
            let mut observe = |_: &Progress| ControlFlow::Continue(());
            let factorization = match method {
                // A fixed order, so that the kernel under test is known.
                Method::StateSpace => catalog.state_space(Target::Buffers(3), &mut observe),
                other => catalog.factorization(other, &mut observe),
            };
            let factorization = factorization.unwrap().deployed().unwrap();
            let m = factorization.noise_rows();
            let field = Field::new(&key());
            let z: Vec<Vec<f32>> = (0..m as u64)
                .map(|t| {
                    let mut z = vec![0.0; COORDINATES];
                    field.row(t).fill(0, &mut z);
                    z
                })
                .collect();
            let engine = engines::engine(&factorization).unwrap();
            assert_eq!(engine.buffers(), factorization.cost().buffers, "{}", method.name());
            let mut stream =
                NoiseStream::new(engine, key(), 0..COORDINATES as u64, 1.0, Output::Gradient).unwrap();
            let mut rows = factorization.coloring_rows();
            for i in 0..steps {
                let mut weights = vec![0.0; m];
                rows(&mut weights);
                let mut noise = vec![0.0; COORDINATES];
                stream.add_next(&mut noise).unwrap();
                for j in 0..COORDINATES {
                    let terms = weights.iter().zip(&z).map(|(w, z)| w * f64::from(z[j]));
                    let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                    let error = (f64::from(noise[j]) - sum).abs();
                    assert!(error < 4e-6 * (1.0 + size), "{}, step {i}: {} {sum}", method.name(), noise[j]);
                }
            }
        }
    }
}
