//! Families within families: what is fitted with more coefficients is not worse than what fewer of them give.

use crate::error::Result;
use crate::form::{Form, Representation};
use crate::participation::Participation;
use crate::problem::Problem;

/// Steps up to which forms are measured as deployed, which takes some n² multiply-adds, or `n³/6` where only a separation is known.
const MEASURED: usize = 4096;
const SEPARATED: usize = 1024;

/// Sizes that are fitted one after the other, each from the one before: halves, rounded down, from 1 to `size`.
pub(super) fn sizes(size: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> =
        std::iter::successors(Some(size), |size| Some(size / 2)).take_while(|size| *size > 0).collect();
    sizes.reverse();
    sizes
}

/// Of some forms for a problem the one of least loss as it would be deployed; where that is too long to measure, the last.
///
/// Errors: those of measuring the last; another form that cannot be measured is left out.
pub(super) fn least(problem: &Problem, mut forms: Vec<Form>) -> Result<Form> {
    let last = forms.pop().expect("there is a form to choose");
    let most = match problem.participation() {
        Participation::MinSeparation { .. } => SEPARATED,
        _ => MEASURED,
    };
    if problem.steps() > most || forms.is_empty() {
        return Ok(last);
    }
    let loss = |form: &Form| -> Result<f64> {
        let form = form.deployed()?;
        let gamma = problem.participation().sensitivity(&form)?.gamma;
        Ok(gamma * gamma * form.decoder_row_norms_sq(problem.workload()).iter().sum::<f64>())
    };
    let mut best = (loss(&last).unwrap_or(f64::INFINITY), last);
    for form in forms.into_iter().rev() {
        if let Ok(loss) = loss(&form)
            && loss < best.0
        {
            best = (loss, form);
        }
    }
    Ok(best.1)
}

#[cfg(test)]
mod tests {
    use super::sizes;

    #[test]
    fn sizes_are_halves() {
        assert_eq!((sizes(1), sizes(5), sizes(8)), (vec![1], vec![1, 2, 5], vec![1, 2, 4, 8]));
    }
}
