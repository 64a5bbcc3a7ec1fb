//! How often a unit of privacy takes part, and how it is sampled. The sensitivity, the statement, the audit's neighbours and the
//! batches of training follow from these two.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The steps in which one unit may take part: what a sensitivity covers.
///
/// In text `single`, `epochs:K`, `min-separation:B` or `min-separation:B:K`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Participation {
    /// Every unit contributes to one step at most; neighbouring streams differ in one row.
    #[default]
    Single,
    /// Every unit contributes once in each of several passes over the data in the same order: with `b = ⌈n/K⌉`, one
    /// of phase `p` takes part at steps `p, p + b, p + 2b, …` below `n`.
    Epochs {
        /// Number of passes `K`.
        times: usize,
    },
    /// Any two contributions of a unit are `separation` steps apart or more.
    MinSeparation {
        /// Least distance `B` of two contributions, in steps.
        separation: usize,
        /// Most contributions; as many as fit if not given.
        times: Option<usize>,
    },
}

/// A participation for a given number of steps: how often, and how far apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Pattern {
    /// `single`, `epochs` or `min-separation`.
    pub kind: &'static str,
    /// Most contributions of one unit.
    pub times: usize,
    /// Least distance of two of them, in steps; nothing where there is only one.
    pub separation: Option<usize>,
}

/// An upper bound on what one unit can change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sensitivity {
    /// `γ` with `‖C(G − H)‖_F ≤ γζ` for all neighbouring streams whose rows differ by at most `ζ`.
    pub gamma: f64,
    /// Whether neighbouring streams attain it, up to rounding.
    pub exact: bool,
}

impl Participation {
    /// How often, and how far apart, within `steps`.
    ///
    /// Errors: no contributions, a distance of zero, more passes than steps.
    pub fn pattern(self, steps: usize) -> Result<Pattern> {
        let kind = match self {
            Participation::Single => "single",
            Participation::Epochs { .. } => "epochs",
            Participation::MinSeparation { .. } => "min-separation",
        };
        let positive = |name: &'static str, value: usize| match value {
            0 => Err(Error::argument(name, 0, "it must be at least 1")),
            _ => Ok(value),
        };
        let (times, separation) = match self {
            Participation::Single => (1, steps),
            Participation::Epochs { times } if times > steps => {
                return Err(Error::argument("epochs", times, "each epoch needs at least one step"));
            }
            Participation::Epochs { times } => (positive("epochs", times)?, steps.div_ceil(times.max(1))),
            Participation::MinSeparation { separation, times } => {
                let fit = steps.div_ceil(positive("separation", separation)?);
                (times.map_or(Ok(fit), |times| positive("participations", times))?.min(fit), separation)
            }
        };
        Ok(Pattern { kind, times, separation: (times > 1).then_some(separation) })
    }

    /// Distance `b` of units that take part at even distances, `p, p + b, …` below `steps`, and are allowed to: the users of
    /// epochs, for a separation those that take part as often as it allows; `steps` for one participation.
    ///
    /// Errors: those of [`Participation::pattern`].
    pub fn spacing(self, steps: usize) -> Result<usize> {
        let pattern = self.pattern(steps)?;
        Ok(pattern.separation.map_or(steps, |separation| separation.max(steps.div_ceil(pattern.times))))
    }

    /// Whether units that take part every `separation` steps, from any on, are allowed to.
    ///
    /// Errors: those of [`Participation::pattern`].
    pub fn allows(self, separation: usize, steps: usize) -> Result<bool> {
        let least = self.spacing(steps)?;
        Ok(separation >= steps
            || match self {
                Participation::Single => false,
                Participation::Epochs { .. } => separation.is_multiple_of(least),
                Participation::MinSeparation { .. } => separation >= least,
            })
    }

    /// In words that complete "each user takes part …".
    pub fn words(self, steps: usize) -> String {
        match self.pattern(steps) {
            Ok(Pattern { times, separation: Some(separation), .. }) => {
                format!("in at most {times} steps, any two of them at least {separation} apart")
            }
            _ => "in at most one step".into(),
        }
    }

    /// Its number, the times and the separation, zero where there is none: what stands for it in an identity.
    pub(crate) fn code(self) -> (u8, [usize; 2]) {
        match self {
            Participation::Single => (0, [0, 0]),
            Participation::Epochs { times } => (1, [times, 0]),
            Participation::MinSeparation { separation, times } => (2, [times.unwrap_or(0), separation]),
        }
    }
}

impl fmt::Display for Participation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Participation::Single => f.write_str("single"),
            Participation::Epochs { times } => write!(f, "epochs:{times}"),
            Participation::MinSeparation { separation, times: None } => {
                write!(f, "min-separation:{separation}")
            }
            Participation::MinSeparation { separation, times: Some(times) } => {
                write!(f, "min-separation:{separation}:{times}")
            }
        }
    }
}

impl FromStr for Participation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let rule = "it must be single, epochs:K, min-separation:B or min-separation:B:K, with whole numbers from 1 on";
        let bad = || Error::argument("participation", text, rule);
        let mut numbers = text.split(':').skip(1).map(|number| match number.parse::<usize>() {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(bad()),
        });
        let read = match text.split(':').next().unwrap_or_default() {
            "single" => Participation::Single,
            "epochs" => Participation::Epochs { times: numbers.next().ok_or_else(bad)?? },
            "min-separation" => Participation::MinSeparation {
                separation: numbers.next().ok_or_else(bad)??,
                times: numbers.next().transpose()?,
            },
            _ => return Err(bad()),
        };
        if numbers.next().is_some() { Err(bad()) } else { Ok(read) }
    }
}

/// By what chance units come into steps: what a privacy curve may count on beyond the sensitivity.
///
/// In text `none`, `cyclic-poisson:G:Q`, `balls-in-bins:B` or `reshuffled-bins:B`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Sampling {
    /// No sampling that the guarantee relies on: it may be public which units take part in which step.
    #[default]
    None,
    /// The data is cut into `bands` parts that take turns, and a unit of the part whose turn it is takes part with
    /// probability `rate`.
    CyclicPoisson {
        /// Number of parts `G`.
        bands: usize,
        /// Probability `Q`.
        rate: f64,
    },
    /// Every unit is thrown into one of `bins` bins, in secret, and takes part when its bin's turn comes.
    BallsInBins {
        /// Number of bins `B`.
        bins: usize,
    },
    /// Every unit picks one of `bins` bins anew in every epoch, in secret, as with a loader that reshuffles the data.
    ReshuffledBins {
        /// Number of bins `B`.
        bins: usize,
    },
}

impl Sampling {
    /// In words that complete "Sampling: …".
    pub fn words(self) -> String {
        match self {
            Sampling::None => "none; who takes part in which step may be public".into(),
            Sampling::CyclicPoisson { bands, rate } => {
                let when = match bands {
                    1 => "in every step".into(),
                    bands => format!("in every step of its part; {bands} parts take turns"),
                };
                format!("in secret, each with probability {rate} {when}")
            }
            Sampling::BallsInBins { bins } => {
                format!("in secret, each put into one of {bins} batches, for all epochs")
            }
            Sampling::ReshuffledBins { bins } => {
                format!("in secret, each put into one of {bins} batches, anew in every epoch")
            }
        }
    }

    /// Its number and parameters: what stands for it in an identity.
    pub(crate) fn code(self) -> (u8, usize, f64) {
        match self {
            Sampling::None => (0, 0, 0.0),
            Sampling::CyclicPoisson { bands, rate } => (1, bands, rate),
            Sampling::BallsInBins { bins } => (2, bins, 0.0),
            Sampling::ReshuffledBins { bins } => (3, bins, 0.0),
        }
    }

    /// The participation that the scheme means: where a unit can take part at all.
    ///
    /// Parts that take turns let their units come every `G` steps; bins that are dealt once let theirs come every `B` steps, and
    /// bins that are drawn anew once in every `B` steps, which may be two steps in a row. `None` without sampling.
    ///
    /// Errors: more bins than steps, or a number of them that is not ⌈n/K⌉ for the `K` turns of a bin, so that no number of
    /// epochs describes them.
    pub fn participation(self, steps: usize) -> Result<Option<Participation>> {
        match self {
            Sampling::None => Ok(None),
            Sampling::CyclicPoisson { bands, .. } => {
                Ok(Some(Participation::MinSeparation { separation: bands, times: None }))
            }
            Sampling::BallsInBins { bins } | Sampling::ReshuffledBins { bins } => {
                let times = steps.div_ceil(bins.max(1));
                if bins == 0 || bins > steps || steps.div_ceil(times) != bins {
                    let rule = "it must be the number of steps in an epoch: all steps divided by the number of epochs, rounded up";
                    return Err(Error::argument("bins", bins, rule));
                }
                Ok(Some(match (times, self) {
                    (1, _) => Participation::Single,
                    (times, Sampling::ReshuffledBins { .. }) => {
                        Participation::MinSeparation { separation: 1, times: Some(times) }
                    }
                    (times, _) => Participation::Epochs { times },
                }))
            }
        }
    }
}

impl fmt::Display for Sampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sampling::None => f.write_str("none"),
            Sampling::CyclicPoisson { bands, rate } => write!(f, "cyclic-poisson:{bands}:{rate}"),
            Sampling::BallsInBins { bins } => write!(f, "balls-in-bins:{bins}"),
            Sampling::ReshuffledBins { bins } => write!(f, "reshuffled-bins:{bins}"),
        }
    }
}

impl FromStr for Sampling {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let rule = "it must be none, cyclic-poisson:G:Q, balls-in-bins:B or reshuffled-bins:B, with whole numbers from 1 on \
                    and a probability Q in (0, 1]";
        let bad = || Error::argument("sampling", text, rule);
        let count = |text: &str| text.parse().ok().filter(|count: &usize| *count > 0).ok_or_else(bad);
        let parts: Vec<&str> = text.split(':').collect();
        Ok(match parts[..] {
            ["none"] => Sampling::None,
            ["cyclic-poisson", bands, rate] => {
                let rate =
                    rate.parse().ok().filter(|rate: &f64| *rate > 0.0 && *rate <= 1.0).ok_or_else(bad)?;
                Sampling::CyclicPoisson { bands: count(bands)?, rate }
            }
            ["balls-in-bins", bins] => Sampling::BallsInBins { bins: count(bins)? },
            ["reshuffled-bins", bins] => Sampling::ReshuffledBins { bins: count(bins)? },
            _ => return Err(bad()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::StateSpace;

    #[test]
    fn patterns() {
        let pattern = |text: &str, steps| {
            let pattern = text.parse::<Participation>().unwrap().pattern(steps).unwrap();
            (pattern.kind, pattern.times, pattern.separation)
        };
        assert_eq!(pattern("single", 10), ("single", 1, None));
        assert_eq!(pattern("epochs:4", 10), ("epochs", 4, Some(3)));
        assert_eq!(pattern("epochs:1", 10), ("epochs", 1, None));
        assert_eq!(pattern("min-separation:3", 10), ("min-separation", 4, Some(3)));
        assert_eq!(pattern("min-separation:3:2", 10), ("min-separation", 2, Some(3)));
        assert_eq!(pattern("min-separation:3:9", 10), ("min-separation", 4, Some(3)));
        assert_eq!(pattern("min-separation:10", 10), ("min-separation", 1, None));
        assert!("epochs:11".parse::<Participation>().unwrap().pattern(10).is_err());
    }

    #[test]
    fn text_and_json_round_trip() {
        for text in ["single", "epochs:4", "min-separation:3", "min-separation:3:2"] {
            let participation: Participation = text.parse().unwrap();
            assert_eq!(participation.to_string(), text);
            let json = serde_json::to_string(&participation).unwrap();
            assert_eq!(serde_json::from_str::<Participation>(&json).unwrap(), participation, "{json}");
        }
        for text in
            ["", "twice", "single:1", "epochs", "epochs:0", "epochs:-1", "epochs:2:3", "min-separation:a"]
        {
            assert_eq!(text.parse::<Participation>().unwrap_err().kind(), "invalid-argument", "{text}");
        }
        for text in ["none", "cyclic-poisson:4:0.01", "balls-in-bins:100", "reshuffled-bins:100"] {
            let sampling: Sampling = text.parse().unwrap();
            assert_eq!(sampling.to_string(), text);
            let json = serde_json::to_string(&sampling).unwrap();
            assert_eq!(serde_json::from_str::<Sampling>(&json).unwrap(), sampling, "{json}");
        }
        for text in [
            "",
            "poisson",
            "cyclic-poisson:4",
            "cyclic-poisson:0:0.1",
            "cyclic-poisson:1:1.5",
            "balls-in-bins:0",
            "reshuffled-bins",
            "reshuffled-bins:0",
        ] {
            assert_eq!(text.parse::<Sampling>().unwrap_err().kind(), "invalid-argument", "{text}");
        }
        assert!(serde_json::from_str::<Participation>(r#"{"kind":"every-step"}"#).is_err());
    }

    #[test]
    fn what_is_not_covered_is_refused_in_one_sentence() {
        let bins = |bins: usize| Sampling::BallsInBins { bins }.participation(10);
        assert_eq!(bins(5).unwrap(), Some(Participation::Epochs { times: 2 }));
        assert_eq!(bins(4).unwrap(), Some(Participation::Epochs { times: 3 }));
        assert_eq!(bins(10).unwrap(), Some(Participation::Single));
        assert!(
            bins(6)
                .unwrap_err()
                .to_string()
                .contains("bins is 6, but it must be the number of steps in an epoch")
        );
        assert!(bins(11).is_err());
        let form = StateSpace::independent(8).unwrap();
        let too_many: Participation = "epochs:9".parse().unwrap();
        assert_eq!(too_many.sensitivity(&form).unwrap_err().kind(), "invalid-argument");
    }
}
