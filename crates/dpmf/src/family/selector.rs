//! A mechanism by name: the one type for flags, recipes, files and Python.

use super::{ALL, Family};
use crate::error::{Error, Result};
use crate::factorize::Target;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The resources that a form may use, if its family leaves a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Budget {
    /// Dense rows in place of a stream of few buffers.
    pub dense: bool,
    /// Model-sized buffers of a stream.
    pub buffers: Option<usize>,
    /// Earlier rows of noise that a stream draws again at each step.
    pub recalls: Option<usize>,
    /// Diagonals of a banded matrix.
    pub bands: Option<usize>,
    /// As few buffers as keep the root loss within this relative excess over the lower bound; 1e-4 if nothing is
    /// given.
    pub tolerance: Option<f64>,
    /// Diagonals that the paper's structured form holds exactly.
    pub diagonals: Option<usize>,
    /// Rank of what the paper's structured form keeps of the rest.
    pub rank: Option<usize>,
}

impl Budget {
    /// How small a stream should be.
    pub fn target(&self) -> Target {
        match (self.buffers, self.tolerance) {
            (Some(buffers), _) => Target::Buffers(buffers),
            (None, Some(tolerance)) => Target::Tolerance(tolerance),
            (None, None) => Target::default(),
        }
    }

    /// The choices that were made, as they stand in text.
    fn made(&self) -> impl Iterator<Item = (Knob, String)> {
        let Self { dense, buffers, recalls, bands, tolerance, diagonals, rank } = *self;
        let number = |x: usize| format!("={x}");
        [
            (Knob::Dense, dense.then(String::new)),
            (Knob::Buffers, buffers.map(number)),
            (Knob::Recalls, recalls.map(number)),
            (Knob::Bands, bands.map(number)),
            (Knob::Tolerance, tolerance.map(|x| format!("={x:?}"))),
            (Knob::Diagonals, diagonals.map(number)),
            (Knob::Rank, rank.map(number)),
        ]
        .into_iter()
        .filter_map(|(knob, value)| Some((knob, value?)))
    }
}

/// A choice that a family may leave to a [`Budget`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knob {
    /// [`Budget::dense`].
    Dense,
    /// [`Budget::buffers`].
    Buffers,
    /// [`Budget::recalls`].
    Recalls,
    /// [`Budget::bands`].
    Bands,
    /// [`Budget::tolerance`].
    Tolerance,
    /// [`Budget::diagonals`].
    Diagonals,
    /// [`Budget::rank`].
    Rank,
}

impl Knob {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Knob::Dense => "dense",
            Knob::Buffers => "buffers",
            Knob::Recalls => "recalls",
            Knob::Bands => "bands",
            Knob::Tolerance => "tolerance",
            Knob::Diagonals => "diagonals",
            Knob::Rank => "rank",
        }
    }
}

/// A family with what was chosen of it, in text `NAME` or `NAME:CHOICE:…`, such as `optimal`, `optimal:dense`,
/// `state-space:buffers=4`, `recall:buffers=2:recalls=3`, `structured:diagonals=5:rank=4`.
///
/// ```
/// use dpmf::family::Selector;
///
/// let four: Selector = "state-space:buffers=4".parse()?;
/// assert_eq!((four.name(), four.budget().buffers), ("state-space", Some(4)));
/// assert!("tree:buffers=4".parse::<Selector>().unwrap_err().to_string().contains("tree takes no options"));
/// # Ok::<(), dpmf::Error>(())
/// ```
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Selector {
    family: &'static dyn Family,
    budget: Budget,
}

impl Selector {
    /// A family with nothing chosen.
    pub(super) fn plain(family: &'static dyn Family) -> Self {
        Self { family, budget: Budget::default() }
    }

    /// The same family with other choices.
    ///
    /// Errors: a choice that the family does not leave, or one that is no positive number.
    pub fn with(self, budget: Budget) -> Result<Self> {
        if let Some((knob, _)) = budget.made().find(|(knob, _)| !self.family.knobs().contains(knob)) {
            let names: Vec<&str> = self.family.knobs().iter().map(|knob| knob.name()).collect();
            let takes =
                if names.is_empty() { "no options".into() } else { format!("only {}", names.join(", ")) };
            let value = format!("{}:{}", self.name(), knob.name());
            return Err(Error::Selector {
                value,
                reason: format!("does not exist: {} takes {takes}", self.name()),
            });
        }
        if budget.tolerance.is_some_and(|tolerance| !(tolerance > 0.0 && tolerance.is_finite())) {
            let value = budget.tolerance.unwrap_or_default();
            return Err(Error::argument("tolerance", value, "it must be positive and finite"));
        }
        if budget.bands == Some(0) {
            return Err(Error::argument("bands", 0, "at least the diagonal is needed"));
        }
        if budget.dense && (budget.buffers.is_some() || budget.tolerance.is_some()) {
            let reason = "keeps no buffers with dense rows: choose dense, or buffers or tolerance".into();
            return Err(Error::Selector { value: self.name().into(), reason });
        }
        Ok(Self { budget, ..self })
    }

    /// The family.
    pub fn family(&self) -> &'static dyn Family {
        self.family
    }

    /// The name of the family.
    pub fn name(&self) -> &'static str {
        self.family.name()
    }

    /// The chosen resources.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// Whether the family leaves a choice open.
    pub fn takes(&self, knob: Knob) -> bool {
        self.family.knobs().contains(&knob)
    }
}

impl PartialEq for Selector {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name() && self.budget == other.budget
    }
}

impl fmt::Debug for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Selector({self})")
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        self.budget.made().try_for_each(|(knob, value)| write!(f, ":{}{value}", knob.name()))
    }
}

impl FromStr for Selector {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |reason: String| Error::Selector { value: text.into(), reason };
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let family = ALL.iter().find(|family| family.name() == name).ok_or_else(|| {
            let names: Vec<&str> = ALL.iter().map(|family| family.name()).collect();
            bad(match nearest(name, &names) {
                Some(near) => format!("does not exist; did you mean {near:?}?"),
                None => format!("does not exist; choose one of {}", names.join(", ")),
            })
        })?;
        let mut budget = Budget::default();
        for part in parts {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            let count = || {
                value
                    .parse()
                    .map_err(|_| bad(format!("is not possible: {key}={value} is not a whole number")))
            };
            match key {
                "dense" if value.is_empty() => budget.dense = true,
                "buffers" => budget.buffers = Some(count()?),
                "recalls" => budget.recalls = Some(count()?),
                "bands" => budget.bands = Some(count()?),
                "tolerance" => {
                    let read = value
                        .parse()
                        .map_err(|_| bad(format!("is not possible: {key}={value} is not a number")))?;
                    budget.tolerance = Some(read);
                }
                "diagonals" => budget.diagonals = Some(count()?),
                "rank" => budget.rank = Some(count()?),
                _ => {
                    let choices = "dense, buffers=R, recalls=J, bands=G, tolerance=x, diagonals=h and rank=r";
                    return Err(bad(format!("has an unknown option {part:?}; the options are {choices}")));
                }
            }
        }
        Self::plain(*family).with(budget)
    }
}

/// The name that a word was meant for, if one is near enough: few letters wrong, missing, too many or out of order.
pub fn nearest<'a>(word: &str, names: &[&'a str]) -> Option<&'a str> {
    let near = names.iter().map(|name| (distance(word, name), *name)).min()?;
    (near.0 <= 1 + near.1.len() / 5).then_some(near.1)
}

/// Letters to change, add or take away, or neighbours to swap, until two words are the same.
fn distance(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    let mut rows = vec![(0..=to.len()).collect::<Vec<usize>>()];
    for i in 1..=from.len() {
        let mut row = vec![i];
        for j in 1..=to.len() {
            let same = usize::from(from[i - 1] != to[j - 1]);
            let mut least = (rows[i - 1][j] + 1).min(row[j - 1] + 1).min(rows[i - 1][j - 1] + same);
            if i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[from.len()][to.len()]
}

impl From<Selector> for String {
    fn from(selector: Selector) -> Self {
        selector.to_string()
    }
}

impl TryFrom<String> for Selector {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        for text in [
            "optimal",
            "optimal:dense",
            "optimal-prefix:buffers=3",
            "state-space:tolerance=0.001",
            "recall:buffers=2:recalls=3",
            "structured:diagonals=5:rank=4",
        ] {
            let selector: Selector = text.parse().unwrap();
            assert_eq!(selector.to_string(), text);
            let json = serde_json::to_string(&selector).unwrap();
            assert_eq!(serde_json::from_str::<Selector>(&json).unwrap(), selector);
        }
        for selector in super::super::all() {
            assert_eq!(selector.name().parse::<Selector>().unwrap(), selector);
        }
    }

    #[test]
    fn bad_names_and_choices_are_named() {
        for (text, part) in [
            ("best", "choose one of independent, tree,"),
            ("", "choose one of"),
            ("tree:dense", "tree takes no options"),
            ("state-space:dense", "state-space takes only buffers, tolerance"),
            ("optimal:dense:buffers=2", "choose dense, or"),
            ("optimal:buffers=-1", "not a whole number"),
            ("optimal:tolerance=0", "positive"),
            ("optimal:fast", "unknown option"),
            ("optimal:dense=1", "unknown option"),
        ] {
            let message = text.parse::<Selector>().unwrap_err().to_string();
            assert!(message.contains(part), "{text}: {message}");
        }
    }

    #[test]
    fn a_misspelt_name_is_answered_with_the_nearest() {
        let names: Vec<&str> = ALL.iter().map(|family| family.name()).collect();
        for (word, meant) in [
            ("optmal", "optimal"),
            ("tere", "tree"),
            ("banded-invers", "banded-inverse"),
            ("honakeronline", "honaker-online"),
        ] {
            assert_eq!(nearest(word, &names), Some(meant), "{word}");
        }
        for word in ["", "magic", "differential"] {
            assert_eq!(nearest(word, &names), None, "{word}");
        }
        let message = "optmal".parse::<Selector>().unwrap_err().to_string();
        assert_eq!(message, "mechanism \"optmal\" does not exist; did you mean \"optimal\"?");
    }
}
