//! The families of others, fitted for the same participation.

use super::*;
use crate::factorize::quiet;
use crate::form::Representation;
use crate::participation::Participation;
use crate::workload::Workload;

/// Root loss as deployed.
fn root_loss(selector: &str, problem: &Problem) -> (f64, Form) {
    let selector: Selector = selector.parse().unwrap();
    let form = selector.family().fit(problem, &selector.budget(), &mut quiet).unwrap().deployed().unwrap();
    let gamma = problem.participation().sensitivity(&form).unwrap().gamma;
    let loss: f64 = form.decoder_row_norms_sq(problem.workload()).iter().sum();
    (gamma * loss.sqrt(), form)
}

#[test]
fn print_ratios() {
    for (n, separation, times) in [(64, 16, 4), (256, 64, 4), (256, 64, 2), (512, 32, 8)] {
        let problem = Problem::new(
            Workload::prefix_sum(n).unwrap(),
            Participation::MinSeparation { separation, times: Some(times) },
        )
        .unwrap();
        for selector in [
            "blt:buffers=2",
            "blt:buffers=3",
            "banded-toeplitz",
            "banded",
            "banded-inverse:bands=2",
            "banded-inverse",
            "recall:buffers=1:recalls=1",
            "recall:buffers=2:recalls=1",
            "recall:buffers=2:recalls=3",
            "recall:buffers=3:recalls=3",
        ] {
            let clock = std::time::Instant::now();
            let (loss, form) = root_loss(selector, &problem);
            println!(
                "{n} {separation} {times} {selector}: {:.5} {:?} {:.2}s",
                loss,
                form.cost().buffers,
                clock.elapsed().as_secs_f64()
            );
        }
    }
}
