//! Encoders with a few diagonals: what is far enough apart does not meet, and sensitivities of several participations add.

mod fit;

use super::plant::Plant;
use super::toeplitz::{Measure, inverse, inverse_pull_back, square_root};
use super::watched::Watched;
use super::{Budget, Family, Knob};
use crate::error::{Error, Result};
use crate::factorize::Observer;
use crate::form::{self, Form, Representation};
use crate::participation::Participation;
use crate::problem::Problem;
use fit::Bands;

/// The best Toeplitz `C` with a few diagonals, its columns scaled to the same norm where that is better.
///
/// Reference: Choquette-Choo et al., "(Amplified) banded matrix factorization", 2023; McKenna, "Scaling up the banded matrix
/// factorization mechanism", 2024.
pub(super) struct BandedToeplitz;

/// The best `C` with a few diagonals, columns of each user scaled to the same total.
pub(super) struct Banded;

/// Most diagonals where nothing is chosen, fewer where participations are closer; and for one participation, which has no
/// need of them.
const BANDS: usize = 64;
const SINGLE: usize = 16;

/// Steps of the minimisation over Toeplitz matrices.
const STEPS: usize = 1000;

impl Family for BandedToeplitz {
    fn name(&self) -> &'static str {
        "banded-toeplitz"
    }

    fn about(&self) -> &'static str {
        "a Toeplitz encoder of a few diagonals, columns scaled to the same norm"
    }

    fn knobs(&self) -> &'static [Knob] {
        &[Knob::Bands]
    }

    fn fit(&self, problem: &Problem, budget: &Budget, observe: Observer<'_>) -> Result<Form> {
        let problem = problem.streamable()?;
        let lower_bound = problem.optimum(observe)?.certificate.lower_bound;
        let mut watched = Watched::new(lower_bound, observe);
        let measure = Measure::new(problem)?;
        let bands = budget.bands.unwrap_or(default_bands(&measure)).min(problem.steps());
        let coefficients = toeplitz(&measure, problem.steps(), bands, &mut watched)?;
        let norms: Vec<f64> =
            (0..problem.steps()).map(|j| tail_norm(&coefficients, problem.steps() - j)).collect();
        let loss = |form: &form::Banded| -> Result<f64> {
            // Columns of one user do not meet unless there are more diagonals than steps between them.
            let gamma = match bands > measure.separation {
                true => problem.participation().sensitivity(form)?.gamma,
                false => 1.0,
            };
            Ok(gamma * gamma * form.decoder_row_norms_sq(problem.workload()).iter().sum::<f64>())
        };
        let plain = form::Banded::toeplitz(&coefficients, vec![1.0; problem.steps()])?;
        let even = form::Banded::toeplitz(&coefficients, norms.iter().map(|norm| 1.0 / norm).collect())?;
        Ok(Form::Banded(if loss(&even)? < loss(&plain)? { even } else { plain }))
    }
}

impl Family for Banded {
    fn name(&self) -> &'static str {
        "banded"
    }

    fn about(&self) -> &'static str {
        "an encoder of a few diagonals, each entry for itself"
    }

    fn knobs(&self) -> &'static [Knob] {
        &[Knob::Bands]
    }

    fn fit(&self, problem: &Problem, budget: &Budget, observe: Observer<'_>) -> Result<Form> {
        let problem = problem.streamable()?;
        let n = problem.steps();
        let lower_bound = problem.optimum(observe)?.certificate.lower_bound;
        let mut watched = Watched::new(lower_bound, observe);
        let measure = Measure::new(problem)?;
        let bands = budget.bands.unwrap_or(default_bands(&measure)).min(n);
        if bands > measure.separation {
            let rule =
                "it must not exceed the distance of participations, for columns of one user not to meet";
            return Err(Error::argument("bands", bands, rule));
        }
        let coefficients = toeplitz(&measure, n, bands, &mut watched)?;
        // Whose squared norms add up: the columns of a phase, or each for itself where patterns are free.
        let groups = match problem.participation() {
            Participation::Epochs { .. } => measure.separation,
            Participation::Single | Participation::MinSeparation { .. } => n,
        };
        let plant = Plant::new(problem.workload())?;
        let fit = Bands { plant: &plant, steps: n, bands, groups };
        let found = fit.minimise(&coefficients, &mut watched)?;
        Ok(Form::Banded(form::Banded::from_encoder(n, bands, |t, k| found[fit.place(t, k)])?))
    }
}

fn default_bands(measure: &Measure<'_>) -> usize {
    if measure.times > 1 { BANDS.min(measure.separation) } else { SINGLE }
}

/// The coefficients of the best banded Toeplitz encoder, with a norm of 1.
fn toeplitz(measure: &Measure<'_>, n: usize, bands: usize, watched: &mut Watched<'_>) -> Result<Vec<f64>> {
    let with_first = |x: &[f64]| [&[1.0], x].concat();
    let found = watched.minimise(square_root(-1.0, bands)[1..].to_vec(), STEPS, |x| {
        let short = with_first(x);
        let coloring = inverse(&short, n);
        let mut encoder = short.clone();
        encoder.resize(n, 0.0);
        let (value, [by_coloring, by_encoder]) = measure.objective(&coloring, &encoder);
        let mut slope = inverse_pull_back(&short, &coloring, &by_coloring);
        slope.iter_mut().zip(&by_encoder).for_each(|(a, b)| *a += b);
        (value, slope[1..].to_vec())
    })?;
    let coefficients = with_first(&found.x);
    let norm = tail_norm(&coefficients, n);
    Ok(coefficients.into_iter().map(|c| c / norm).collect())
}

/// The norm of the first terms.
fn tail_norm(coefficients: &[f64], terms: usize) -> f64 {
    coefficients.iter().take(terms).map(|c| c * c).sum::<f64>().sqrt()
}
