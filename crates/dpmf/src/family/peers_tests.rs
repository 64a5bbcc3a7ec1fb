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
    for (n, times, bound) in [(64, 4, 35.262_827_082), (256, 4, 83.391_114_4), (512, 16, 316.102_306)] {
        let problem =
            Problem::new(Workload::prefix_sum(n).unwrap(), Participation::Epochs { times }).unwrap();
        for selector in [
            "blt:buffers=1",
            "blt:buffers=2",
            "blt:buffers=3",
            "blt:buffers=4",
            "blt:buffers=5",
            "banded-toeplitz",
            "banded",
            "banded-inverse:bands=2",
            "banded-inverse:bands=3",
            "banded-inverse",
            "banded-inverse:bands=8",
        ] {
            let clock = std::time::Instant::now();
            let (loss, form) = root_loss(selector, &problem);
            println!(
                "{n} {times} {selector}: {:.5} {:?} {:.2}s",
                loss / bound,
                form.cost().buffers,
                clock.elapsed().as_secs_f64()
            );
        }
    }
}
