//! Noise of the last few steps, regenerated: a banded `N`, and no buffers at all.

use super::nested::{least, sizes};
use super::observed_fit::Watched;
use super::toeplitz::{Measure, inverse, inverse_pull_back, square_root};
use super::{Budget, Family, Knob, bins_fit};
use crate::error::{Error, Result};
use crate::factorize::Observer;
use crate::form::recall::Parts;
use crate::form::{Form, Recall};
use crate::participation::Sampling;
use crate::problem::Problem;

/// The best Toeplitz `N` with a few diagonals. With two it is DP-λCGD.
///
/// Reference: Kalinin, McKenna, Upadhyay, Lampert, "Back to square roots", 2025, for the banded inverse.
pub(super) struct BandedInverse;

/// Diagonals where nothing is chosen.
const BANDS: usize = 4;

/// Steps of the minimisation.
const STEPS: usize = 1000;

impl Family for BandedInverse {
    fn name(&self) -> &'static str {
        "banded-inverse"
    }

    fn about(&self) -> &'static str {
        "the noise of the last few steps, regenerated; no buffers"
    }

    fn knobs(&self) -> &'static [Knob] {
        &[Knob::Bands]
    }

    fn fit(&self, problem: &Problem, budget: &Budget, observe: Observer<'_>) -> Result<Form> {
        let problem = problem.streamable()?;
        let n = problem.steps();
        let bands = budget.bands.unwrap_or(BANDS).min(n);
        if let Some(goal) = problem.goal()
            && let Sampling::BallsInBins { bins } | Sampling::ReshuffledBins { bins } = goal.sampling
        {
            if bands != 2 && budget.bands.is_some() {
                let rule = "under bins it must be 2: only the noise of the last step is regenerated";
                return Err(Error::argument("bands", bands, rule));
            }
            return Ok(Form::Recall(bins_fit::recalled(problem, bins, goal, observe)?));
        }
        let lower_bound = problem.optimum(observe)?.certificate.lower_bound;
        let mut watched = Watched::new(lower_bound, observe);
        let measure = Measure::new(problem)?;
        let with_first = |x: &[f64]| [&[1.0], x].concat();
        let start = |bands: usize| square_root(1.0, bands)[1..].to_vec();
        let found = watched.nested(&sizes(bands), STEPS, start, |x| {
            let short = with_first(x);
            let encoder = inverse(&short, n);
            let mut coloring = short.clone();
            coloring.resize(n, 0.0);
            let (value, [by_coloring, by_encoder]) = measure.objective(&coloring, &encoder);
            let mut slope = inverse_pull_back(&short, &encoder, &by_encoder);
            slope.iter_mut().zip(&by_coloring).for_each(|(a, b)| *a += b);
            (value, slope[1..].to_vec())
        })?;
        let form = |x: &Vec<f64>| -> Result<Form> {
            let short = with_first(x);
            let gamma = measure.sensitivity_sq(&inverse(&short, n)).0.sqrt();
            let recalled = (0..n).flat_map(|t| {
                let short = &short;
                (1..short.len()).map(move |j| if j <= t { gamma * short[j] } else { 0.0 })
            });
            let parts = Parts { direct: vec![gamma; n], recalled: recalled.collect(), ..Parts::default() };
            Ok(Form::Recall(Recall::from_parts(1, 0, x.len(), parts)?))
        };
        least(problem, found.iter().map(form).collect::<Result<_>>()?)
    }
}
