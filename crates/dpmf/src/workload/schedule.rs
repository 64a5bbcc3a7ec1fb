//! Step-size schedules.

use crate::error::{Error, Result};

/// A step-size schedule: a product of factors, written `name:argument…` and joined by `+`.
///
/// With `m = round(f·n)` last steps and `k = 1…m` within them, step `i = 1…n` gets
///
/// | factor | value |
/// |---|---|
/// | `constant` | 1 |
/// | `cooldown:f:e` | `1 − (1 − e)(k − 1)/(m − 1)` in the last `m` steps, 1 before |
/// | `decay:f:c` | `c` in the last `m` steps, 1 before |
/// | `cosine:e` | `e + (1 − e)(1 + cos(π(i − 1)/n))/2` |
/// | `warmup:s` | `min(i/s, 1)` |
/// | `exp:r` | `r^{i − 1}` |
///
/// ```
/// let schedule: dpmf::Schedule = "warmup:2+cooldown:0.5:0.5".parse()?;
/// assert_eq!(schedule.values(4), [0.5, 1.0, 1.0, 0.5]);
/// # Ok::<(), dpmf::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Schedule {
    factors: Vec<Factor>,
}

#[derive(Clone, Debug, PartialEq)]
enum Factor {
    Constant,
    Cooldown { fraction: f64, end: f64 },
    Decay { fraction: f64, value: f64 },
    Cosine { end: f64 },
    Warmup { steps: f64 },
    Exponential { rate: f64 },
}

impl Schedule {
    /// The step sizes of an `n`-step run.
    pub fn values(&self, n: usize) -> Vec<f64> {
        (0..n).map(|i| self.factors.iter().map(|factor| factor.at(i, n)).product()).collect()
    }
}

impl Factor {
    fn at(&self, i: usize, n: usize) -> f64 {
        // Position within the last round(f·n) steps, or None before them.
        let within = |fraction: f64| {
            let m = (fraction * n as f64).round() as usize;
            (i + m >= n).then(|| (i + m - n, m))
        };
        match *self {
            Factor::Constant => 1.0,
            Factor::Cooldown { fraction, end } => within(fraction)
                .map_or(1.0, |(k, m)| 1.0 - (1.0 - end) * k as f64 / (m.saturating_sub(1).max(1)) as f64),
            Factor::Decay { fraction, value } => within(fraction).map_or(1.0, |_| value),
            Factor::Cosine { end } => {
                end + (1.0 - end) * (1.0 + (std::f64::consts::PI * i as f64 / n as f64).cos()) / 2.0
            }
            Factor::Warmup { steps } => ((i as f64 + 1.0) / steps).min(1.0),
            Factor::Exponential { rate } => rate.powf(i as f64),
        }
    }

    fn parse(text: &str) -> Result<Self> {
        let bad = |rule| Error::argument("schedule", text, rule);
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let arguments: Vec<f64> = parts
            .map(|part| part.parse().map_err(|_| bad("its arguments must be numbers")))
            .collect::<Result<_>>()?;
        let positive = |x: f64| x > 0.0 && x.is_finite();
        let not_negative = |x: f64| x >= 0.0 && x.is_finite();
        let fraction_in_range = |f: f64| f > 0.0 && f <= 1.0;
        match (name, arguments.as_slice()) {
            ("constant", []) => Ok(Factor::Constant),
            ("cooldown", &[fraction, end]) if fraction_in_range(fraction) && not_negative(end) => {
                Ok(Factor::Cooldown { fraction, end })
            }
            ("decay", &[fraction, value]) if fraction_in_range(fraction) && not_negative(value) => {
                Ok(Factor::Decay { fraction, value })
            }
            ("cosine", &[end]) if not_negative(end) => Ok(Factor::Cosine { end }),
            ("warmup", &[steps]) if steps >= 1.0 && steps.is_finite() => Ok(Factor::Warmup { steps }),
            ("exp", &[rate]) if positive(rate) => Ok(Factor::Exponential { rate }),
            ("cooldown" | "decay", &[_, _]) => {
                Err(bad("the fraction must lie in (0, 1] and the value must not be negative"))
            }
            ("cosine", &[_]) => Err(bad("the argument must be finite and not negative")),
            ("exp", &[_]) => Err(bad("the argument must be positive and finite")),
            ("warmup", &[_]) => Err(bad("warm-up needs at least one step")),
            ("constant" | "cooldown" | "decay" | "cosine" | "warmup" | "exp", _) => {
                Err(bad("it has the wrong number of arguments"))
            }
            _ => {
                Err(bad("known factors are constant, cooldown:f:e, decay:f:c, cosine:e, warmup:s and exp:r"))
            }
        }
    }
}

impl std::str::FromStr for Schedule {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(Self { factors: text.split('+').map(|part| Factor::parse(part.trim())).collect::<Result<_>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(text: &str, n: usize) -> Vec<f64> {
        text.parse::<Schedule>().unwrap().values(n)
    }

    #[test]
    fn factors_follow_their_formulas() {
        assert_eq!(values("constant", 3), [1.0; 3]);
        assert_eq!(values("cooldown:0.5:0.05", 4), [1.0, 1.0, 1.0, 0.050000000000000044]);
        assert_eq!(values("decay:0.25:0.15", 8), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.15, 0.15]);
        assert_eq!(values("warmup:4", 5), [0.25, 0.5, 0.75, 1.0, 1.0]);
        assert_eq!(values("exp:0.5", 4), [1.0, 0.5, 0.25, 0.125]);
        let cosine = values("cosine:0.2", 4);
        assert!((cosine[2] - 0.6).abs() < 1e-15 && cosine[0] == 1.0);
    }

    #[test]
    fn a_fraction_that_rounds_to_no_steps_changes_nothing() {
        assert_eq!(values("cooldown:0.1:0.05", 3), [1.0; 3]);
        assert_eq!(values("cooldown:1:0.5", 1), [1.0]);
    }

    #[test]
    fn schedules_may_end_at_zero() {
        assert_eq!(values("cooldown:1:0", 3), [1.0, 0.5, 0.0]);
        assert_eq!(values("decay:0.5:0", 2), [1.0, 0.0]);
        assert!(values("cosine:0", 4)[3] > 0.0);
    }

    #[test]
    fn products_and_bad_text() {
        assert_eq!(values("warmup:2+decay:0.5:0.1", 2), [0.5, 0.1]);
        for text in [
            "",
            "linear",
            "cooldown:0.5",
            "cooldown:0:0.1",
            "decay:0.5:-1",
            "exp:x",
            "warmup:0",
            "cosine:nan",
        ] {
            let message = text.parse::<Schedule>().unwrap_err().to_string();
            assert!(message.contains("schedule is"), "{message}");
        }
    }
}
