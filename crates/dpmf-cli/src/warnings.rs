//! Warnings about budgets that promise little. They are computed as asked for all the same.

use crate::report::note;

/// Above it, the odds of a guess about one person may change by a factor of more than e¹⁰, about twenty thousand.
const LARGE_EPSILON: f64 = 10.0;

/// From here on the promise fails outright too often, for however few people.
const LARGE_DELTA: f64 = 1e-2;

/// What is to be said of (ε, δ), one sentence each, for so many people or records where that is known.
pub fn about(epsilon: Option<f64>, delta: Option<f64>, people: Option<usize>) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some(epsilon) = epsilon.filter(|epsilon| *epsilon > LARGE_EPSILON) {
        warnings.push(format!(
            "ε = {} is a weak guarantee: the odds of a guess about one person may grow by a factor of e^ε; ε is usually at most {LARGE_EPSILON}",
            crate::report::number(epsilon)
        ));
    }
    match (delta, people) {
        (Some(delta), Some(people)) if people > 0 && delta > 1.0 / people as f64 => warnings.push(format!(
            "δ = {delta:e} is above 1/{people}: publishing the data of one of the {people} outright would satisfy it. Use a tenth of 1/{people} or less"
        )),
        (Some(delta), _) if delta >= LARGE_DELTA => warnings.push(format!(
            "δ = {delta:e} is too large: roughly, it is the chance that the guarantee fails completely. Use much less than one over the number of people"
        )),
        _ => {}
    }
    warnings
}

/// Says them on standard error.
pub fn tell(warnings: &[String]) {
    warnings.iter().for_each(|warning| note(&format!("warning: {warning}")));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_budgets_pass_without_a_word() {
        assert!(about(Some(10.0), Some(1e-6), Some(100_000)).is_empty());
        assert!(about(Some(1.0), Some(9e-3), None).is_empty());
        assert!(about(None, None, None).is_empty());
    }

    #[test]
    fn each_end_of_a_poor_budget_has_one_sentence() {
        let warned = about(Some(1e6), Some(0.9), None);
        assert_eq!(warned.len(), 2);
        assert!(warned[0].starts_with("ε = 1000000.00 is a weak guarantee"), "{warned:?}");
        assert!(warned[1].starts_with("δ = 9e-1 is too large"), "{warned:?}");
        let warned = about(Some(2.0), Some(0.5), Some(1000));
        assert_eq!(warned.len(), 1);
        assert!(warned[0].starts_with("δ = 5e-1 is above 1/1000"), "{warned:?}");
    }
}
