//! The trivial model: what a constant prediction scores on held-out users.

use crate::data::{Corpus, Samples, Split};
use serde::Serialize;
use std::collections::BTreeMap;

/// Scores of the best constant prediction: the commonest class or token, or the mean.
///
/// The constant is that of all held-out users, none of whom trains. As their other scores, no ε covers it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Baseline {
    /// Share of test users' predictions that are right; nothing where numbers are predicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_accuracy: Option<f64>,
    /// Root of the mean squared error on test users, in the unit of the label; nothing where classes are predicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_rmse: Option<f64>,
    /// On validation users, for learning curves: the accuracy, and the loss in the units of a model's.
    #[serde(skip)]
    pub validation: (Option<f64>, f64),
}

impl Baseline {
    /// Of classes.
    pub(crate) fn of_classes(split: &Split<Samples<u16>>) -> Self {
        Self::of_symbols(split.validation.targets().iter().copied(), split.test.targets().iter().copied())
    }

    /// Of the tokens that follow others in texts.
    pub(crate) fn of_texts(split: &Split<Corpus>) -> Self {
        fn tokens(corpus: &Corpus) -> impl Iterator<Item = u16> {
            let examples = (0..corpus.len()).flat_map(|user| corpus.examples_of(user));
            examples.flat_map(|example| example.iter().skip(1).copied())
        }
        Self::of_symbols(tokens(&split.validation), tokens(&split.test))
    }

    fn of_symbols(validation: impl Iterator<Item = u16>, test: impl Iterator<Item = u16>) -> Self {
        let mut counts: BTreeMap<u16, [f64; 2]> = BTreeMap::new();
        validation.for_each(|symbol| counts.entry(symbol).or_default()[0] += 1.0);
        test.for_each(|symbol| counts.entry(symbol).or_default()[1] += 1.0);
        let totals = counts.values().fold([0.0; 2], |sum, own| [sum[0] + own[0], sum[1] + own[1]]);
        let both = |own: &[f64; 2]| own[0] + own[1];
        // The first of the commonest.
        let commonest =
            counts.values().fold([0.0; 2], |best, own| if both(own) > both(&best) { *own } else { best });
        let total = both(&totals);
        let loss = counts.values().map(|own| -own[0] * libm::log(both(own) / total)).sum::<f64>();
        let share = |set: usize| commonest[set] / totals[set].max(1.0);
        Self {
            test_accuracy: Some(share(1)),
            test_rmse: None,
            validation: (Some(share(0)), loss / totals[0].max(1.0)),
        }
    }

    /// Of numbers in the scale of training; `scale` leads to the unit of the label.
    pub(crate) fn of_numbers(split: &Split<Samples<f32>>, scale: Option<f64>) -> Self {
        let (validation, test) = (split.validation.targets(), split.test.targets());
        let all = || validation.iter().chain(test).map(|y| f64::from(*y));
        let mean = all().sum::<f64>() / (validation.len() + test.len()).max(1) as f64;
        let mean_sq = |set: &[f32]| {
            set.iter().map(|y| (f64::from(*y) - mean).powi(2)).sum::<f64>() / set.len().max(1) as f64
        };
        Self {
            test_accuracy: None,
            test_rmse: Some(scale.unwrap_or(1.0) * mean_sq(test).sqrt()),
            validation: (None, 0.5 * mean_sq(validation)),
        }
    }

    /// Whether a model with this accuracy or RMSE on test users is better.
    pub fn is_beaten_by(&self, test_accuracy: Option<f64>, test_rmse: Option<f64>) -> bool {
        let classes = matches!((self.test_accuracy, test_accuracy), (Some(own), Some(model)) if model > own);
        let numbers = matches!((self.test_rmse, test_rmse), (Some(own), Some(model)) if model < own);
        classes || numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples<T: crate::data::Target>(targets: &[T]) -> Samples<T> {
        let mut samples = Samples::new(1);
        for target in targets {
            samples.push(&[0.0], *target);
            samples.finish_user();
        }
        samples
    }

    #[test]
    fn a_constant_is_scored_by_hand() {
        // Class 1 is the commonest of the held-out, though not of the test.
        let classes =
            Split { train: samples(&[0_u16]), validation: samples(&[1, 1, 1]), test: samples(&[0, 0, 1]) };
        let baseline = Baseline::of_classes(&classes);
        assert_eq!((baseline.test_accuracy, baseline.test_rmse), (Some(1.0 / 3.0), None));
        assert_eq!(baseline.validation.0, Some(1.0));
        assert!((baseline.validation.1 - 1.5_f64.ln()).abs() < 1e-12);
        assert!(baseline.is_beaten_by(Some(0.34), None) && !baseline.is_beaten_by(Some(1.0 / 3.0), None));
        let numbers =
            Split { train: samples(&[9_f32]), validation: samples(&[0.0, 2.0]), test: samples(&[-1.0, 3.0]) };
        let baseline = Baseline::of_numbers(&numbers, Some(10.0));
        assert_eq!((baseline.test_accuracy, baseline.test_rmse), (None, Some(20.0)));
        assert_eq!(baseline.validation, (None, 0.5));
        assert!(baseline.is_beaten_by(None, Some(19.9)) && !baseline.is_beaten_by(None, Some(20.0)));
        assert!(!baseline.is_beaten_by(None, Some(f64::NAN)));
        assert_eq!(serde_json::to_string(&baseline).unwrap(), r#"{"test_rmse":20.0}"#);
    }
}
