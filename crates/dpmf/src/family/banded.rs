//! Encoders with a few diagonals: what is far enough apart does not meet, and sensitivities of several participations add.

mod fit;

use super::nested::{least, sizes};
use super::observed_fit::Watched;
use super::plant::Plant;
use super::toeplitz::{Measure, inverse, inverse_pull_back, square_root};
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
        let fits = toeplitz(&measure, problem.steps(), bands, &mut watched)?;
        let mut forms = Vec::new();
        for coefficients in &fits {
            let norm = |j: usize| 1.0 / tail_norm(coefficients, problem.steps() - j);
            let even = (0..problem.steps()).map(norm).collect();
            forms.push(Form::Banded(form::Banded::toeplitz(coefficients, vec![1.0; problem.steps()])?));
            forms.push(Form::Banded(form::Banded::toeplitz(coefficients, even)?));
        }
        // The better of the two largest for itself: their columns do not meet unless there are more diagonals than steps between.
        let loss = |form: &Form| -> Result<f64> {
            let gamma = match bands > measure.separation {
                true => problem.participation().sensitivity(form)?.gamma,
                false => 1.0,
            };
            Ok(gamma * gamma * form.decoder_row_norms_sq(problem.workload()).iter().sum::<f64>())
        };
        let [plain, even] = [forms.len() - 2, forms.len() - 1];
        if loss(&forms[plain])? <= loss(&forms[even])? {
            forms.swap(plain, even);
        }
        least(problem, forms)
    }
}

impl Family for Banded {
    fn name(&self) -> &'static str {
        "banded"
    }

    fn about(&self) -> &'static str {
        "an encoder of a few diagonals, with every entry chosen on its own"
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
            let rule = "it must not exceed the distance between participations, so that the columns of one user do not overlap";
            return Err(Error::argument("bands", bands, rule));
        }
        let fits = toeplitz(&measure, n, bands, &mut watched)?;
        // Whose squared norms add up: the columns of a phase, or each for itself where patterns are free.
        let groups = match problem.participation() {
            Participation::Epochs { .. } => measure.separation,
            Participation::Single | Participation::MinSeparation { .. } => n,
        };
        let plant = Plant::new(problem.workload())?;
        let mut found: Option<(Bands<'_>, Vec<f64>)> = None;
        for coefficients in &fits {
            let fit = Bands { plant: &plant, steps: n, bands: coefficients.len(), groups };
            let mut starts = vec![fit.toeplitz(coefficients, |_| 1.0)];
            starts.push(fit.toeplitz(coefficients, |j| 1.0 / tail_norm(coefficients, n - j)));
            starts.extend(found.map(|(smaller, entries)| fit.widened(&smaller, &entries)));
            let entries = fit.minimise(starts, &mut watched)?;
            found = Some((fit, entries));
        }
        let (fit, entries) = found.expect("there is at least one size");
        Ok(Form::Banded(form::Banded::from_encoder(n, bands, |t, k| entries[fit.place(t, k)])?))
    }
}

fn default_bands(measure: &Measure<'_>) -> usize {
    if measure.times > 1 { BANDS.min(measure.separation) } else { SINGLE }
}

/// The coefficients of the best banded Toeplitz encoders of some numbers of diagonals, the last as many as asked for; with norms of
/// 1. None is worse than those of fewer, as far as the measure tells.
fn toeplitz(
    measure: &Measure<'_>,
    n: usize,
    bands: usize,
    watched: &mut Watched<'_>,
) -> Result<Vec<Vec<f64>>> {
    let with_first = |x: &[f64]| [&[1.0], x].concat();
    let evaluate = |x: &[f64]| {
        let short = with_first(x);
        let coloring = inverse(&short, n);
        let mut encoder = short.clone();
        encoder.resize(n, 0.0);
        let (value, [by_coloring, by_encoder]) = measure.objective(&coloring, &encoder);
        let mut slope = inverse_pull_back(&short, &coloring, &by_coloring);
        slope.iter_mut().zip(&by_encoder).for_each(|(a, b)| *a += b);
        (value, slope[1..].to_vec())
    };
    let scaled = |x: &Vec<f64>| {
        let coefficients = with_first(x);
        let norm = tail_norm(&coefficients, n);
        coefficients.into_iter().map(|c| c / norm).collect()
    };
    let start = |bands: usize| square_root(-1.0, bands)[1..].to_vec();
    Ok(watched.nested(&sizes(bands), STEPS, start, evaluate)?.iter().map(scaled).collect())
}

/// The norm of the first terms.
fn tail_norm(coefficients: &[f64], terms: usize) -> f64 {
    coefficients.iter().take(terms).map(|c| c * c).sum::<f64>().sqrt()
}
