//! A family, added as CONTRIBUTING.md describes: this file, and one line in the registry.

use super::{Budget, Family, Knob};
use crate::error::Result;
use crate::factorize::{Observer, quiet};
use crate::form::state_space::Parts;
use crate::form::{Form, Representation, StateSpace};
use crate::problem::Problem;
use crate::{Participation, Selector, Workload, format};

/// `N = I − shift/2`: each step takes back half of the noise of the step before.
pub(super) struct Toy;

impl Family for Toy {
    fn name(&self) -> &'static str {
        "toy"
    }

    fn about(&self) -> &'static str {
        "each step takes back half of the noise of the step before"
    }

    fn knobs(&self) -> &'static [Knob] {
        &[Knob::Rank]
    }

    fn fit(&self, problem: &Problem, budget: &Budget, _: Observer<'_>) -> Result<Form> {
        let n = problem.steps();
        let share = 0.5 / budget.rank.unwrap_or(1) as f64;
        let parts = Parts {
            direct: vec![1.0; n],
            output: vec![-share; n],
            input: vec![1.0; n],
            increment: vec![-1.0; n],
        };
        Ok(Form::StateSpace(StateSpace::from_parts(1, parts)?))
    }
}

/// Its own file and a line in the registry are enough for names, mechanisms, files and streams.
#[test]
fn a_family_needs_its_file_and_a_line_in_the_registry() {
    use crate::noise::{Arithmetic, NoiseKey, Output, RunId};
    let selector: Selector = "toy:rank=2".parse().unwrap();
    let problem = Problem::new(Workload::prefix_sum(4).unwrap(), Participation::default()).unwrap();
    let mechanism = problem.mechanism(selector, &mut quiet).unwrap();
    // N = I − shift/4, so C has powers of ¼ below the diagonal, and its first column is the longest.
    let expected = [1.0, 0.25, 0.0625, 0.015625].iter().map(|c: &f64| c * c).sum::<f64>().sqrt();
    assert!((mechanism.sensitivity() - expected).abs() < 1e-9);
    assert_eq!(mechanism.form().cost().buffers, Some(1));

    let mechanism = mechanism.calibrated(1.0, 1e-6, 1.0, Default::default()).unwrap();
    let back = format::from_bytes(&format::to_bytes(&mechanism).unwrap()).unwrap();
    assert_eq!((back.family(), back.identity()), (Some(selector), mechanism.identity()));
    let (key, run) = (NoiseKey::from_seed(1), RunId::from_label("toy"));
    let mut row = [0.0_f32; 3];
    back.stream(&key, run, 0..3, Output::Gradient, Arithmetic::Exact).unwrap().add_next(&mut row).unwrap();
    assert!(row.iter().all(|x| *x != 0.0));

    let comparison = problem.compare(&[selector], &mut quiet).unwrap();
    assert_eq!((comparison.rows[0].mechanism.as_str(), comparison.rows[0].buffers), ("toy", Some(1)));
}
