//! The privacy statement: a guarantee with its conditions, as data and in words.

use super::{Accountant, Adjacency, Amplification, Calibration, ExtraRelease, Terms};
use crate::error::{Error, Result};
use crate::participation::{Participation, Pattern, Sampling};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The unit of privacy: what is protected as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrivacyUnit {
    /// One record, e.g. one training example.
    Record,
    /// All records of one user, clipped together into one contribution.
    #[default]
    User,
}

impl PrivacyUnit {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            PrivacyUnit::Record => "record",
            PrivacyUnit::User => "user",
        }
    }
}

impl std::str::FromStr for PrivacyUnit {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "record" => Ok(PrivacyUnit::Record),
            "user" => Ok(PrivacyUnit::User),
            _ => Err(Error::argument("privacy unit", text, "it must be record or user")),
        }
    }
}

/// Where the key of the noise comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeyOrigin {
    /// The operating system's random source.
    #[default]
    System,
    /// A number given by the user, for repeatable experiments.
    Seeded,
}

impl KeyOrigin {
    /// The word used in files and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            KeyOrigin::System => "system",
            KeyOrigin::Seeded => "seeded",
        }
    }
}

/// In what numbers noise is made and added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arithmetic {
    /// The ideal noise in real numbers, added to the input and correctly rounded to a grid: what is proved of real
    /// numbers holds for every bit. See [`noise::exact`](crate::noise::exact).
    #[default]
    Exact,
    /// Single precision, at memory speed: the lowest bits of a release are outside of what is proved.
    Float,
}

impl Arithmetic {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Arithmetic::Exact => "exact",
            Arithmetic::Float => "float",
        }
    }
}

impl std::str::FromStr for Arithmetic {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Arithmetic::Exact, Arithmetic::Float]
            .into_iter()
            .find(|arithmetic| arithmetic.name() == text)
            .ok_or_else(|| Error::argument("arithmetic", text, "it must be exact or float"))
    }
}

/// A calibrated mechanism's guarantee, together with everything it depends on.
///
/// It is data, and its sentences are rendered from it: none is ever read.
#[derive(Clone, Debug, PartialEq)]
pub struct PrivacyStatement {
    unit: PrivacyUnit,
    participation: Participation,
    steps: usize,
    key: KeyOrigin,
    arithmetic: Arithmetic,
    calibration: Calibration,
    /// Whether it is of a training, which some of the data was kept out of.
    trained: bool,
}

/// The statement as programs read it.
#[derive(Serialize)]
struct Document<'a> {
    unit: PrivacyUnit,
    participation: Pattern,
    sampling: Sampling,
    steps: usize,
    key: KeyOrigin,
    arithmetic: Arithmetic,
    epsilon: f64,
    delta: f64,
    adjacency: Adjacency,
    accountant: Accountant,
    noise_multiplier: f64,
    sensitivity: f64,
    clip: f64,
    noise_std: f64,
    mu: Option<f64>,
    rho: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    beside: Option<ExtraRelease>,
    covers: &'a [String],
    does_not_cover: &'a [String],
    words: &'a str,
}

impl PrivacyStatement {
    /// A statement about `steps` steps under a participation pattern.
    ///
    /// Errors: no steps; a pattern that does not fit them.
    pub fn new(
        calibration: Calibration,
        unit: PrivacyUnit,
        participation: Participation,
        steps: usize,
        key: KeyOrigin,
    ) -> Result<Self> {
        if steps == 0 {
            return Err(Error::argument("steps", 0, "at least one step is needed"));
        }
        participation.pattern(steps)?;
        let arithmetic = Arithmetic::default();
        Ok(Self { unit, participation, steps, key, arithmetic, calibration, trained: false })
    }

    /// The same statement for noise from a key of another origin.
    pub fn with_key(self, key: KeyOrigin) -> Self {
        Self { key, ..self }
    }

    /// The same statement of a training: it covers those that were trained on, not public or held-out ones.
    pub fn of_training(self) -> Self {
        Self { trained: true, ..self }
    }

    /// The same statement for noise in another arithmetic.
    pub fn with_arithmetic(self, arithmetic: Arithmetic) -> Self {
        Self { arithmetic, ..self }
    }

    /// The numbers that the noise is made in.
    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// σ, ε, δ and what ties them together.
    pub fn calibration(&self) -> &Calibration {
        &self.calibration
    }

    /// The unit of privacy.
    pub fn unit(&self) -> PrivacyUnit {
        self.unit
    }

    /// How often, and how far apart, one unit takes part.
    pub fn participation(&self) -> Participation {
        self.participation
    }

    /// Number of steps the mechanism was built for.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Origin of the noise key.
    pub fn key(&self) -> KeyOrigin {
        self.key
    }

    /// What (ε, δ) covers, one sentence each.
    pub fn covers(&self) -> Vec<String> {
        let mut lines = vec![
            format!(
                "Everything released over all {} steps together: noisy gradient sums, iterates, and anything computed from them.",
                self.steps
            ),
            "Gradients chosen adaptively: each may depend on every earlier release.".into(),
            "Stopping early, and steps that were given up (burned) after a crash.".into(),
            "Means, if the denominator was fixed before training. This also holds when clients drop out, even if nobody is left and only noise is released.".into(),
        ];
        if let Some(beside) = &self.calibration.terms().beside {
            let alone = beside.epsilon(self.calibration.delta()).map_or("∞".into(), epsilon_for_people);
            lines.push(format!(
                "The schema of the table: its classes, categories and scales were found with noise (μ = {}; with probability {:e} it reveals more). On its own it has ε = {alone}, and it is composed exactly with the steps.",
                plain(beside.mu),
                beside.delta
            ));
        }
        if self.arithmetic == Arithmetic::Exact {
            lines.push("Every bit: each release is the sum with ideal, real-valued Gaussian noise, correctly rounded.".into());
        }
        lines
    }

    /// What (ε, δ) does not cover, or assumes, one sentence each.
    pub fn does_not_cover(&self) -> Vec<String> {
        let key = match self.key {
            KeyOrigin::System => {
                "The key, which must stay secret: anyone who has it can remove the noise. It was drawn from the operating system's random source."
            }
            KeyOrigin::Seeded => {
                "The key, which was derived from a seed: the guarantee holds only if that number is secret and cannot be guessed."
            }
        };
        let arithmetic = match self.arithmetic {
            Arithmetic::Exact => {
                "Rounding errors in the clipped sums, which are taken as exact: code that rounds while it adds up contributions must clip low enough to allow for that. Also the time that a step takes (see SECURITY.md)."
            }
            Arithmetic::Float => {
                "Floating-point arithmetic: the proof is for real-valued Gaussian noise, but here noise is drawn and added in finite precision. The lowest bits of a release are outside the proof and can tell neighbours apart (see SECURITY.md)."
            }
        };
        let mut lines = vec![
            "Hyperparameters, architectures or stopping rules chosen by looking at private data in other runs.".into(),
            "The initial model, the schedule, the cohort size and the denominator, which are all treated as public.".into(),
            key.into(),
            arithmetic.into(),
            format!(
                "Scores and learning curves on held-out {}s, which are computed from their data without noise.",
                self.unit.name()
            ),
        ];
        if self.calibration.terms().sampled != Amplification::None {
            lines.push(
                "The sampler, which must draw as stated, in secret and without looking at the data: against anyone who knows its draws, only the guarantee without amplification holds.".into(),
            );
        }
        if self.calibration.terms().adjacency == Adjacency::AddOrRemove {
            let unit = self.unit.name();
            lines.insert(
                1,
                format!("An assignment to steps that changes for others when a {unit} joins or leaves."),
            );
            lines.insert(
                2,
                format!(
                    "The number of {unit}s, which is treated as public: rates, batch sizes and the number of steps are computed from it."
                ),
            );
        }
        lines
    }
}

impl Serialize for PrivacyStatement {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let c = &self.calibration;
        let &Terms { adjacency, accountant, ref sampled, sensitivity, clip, beside } = c.terms();
        let sampling = sampled.sampling();
        let document = Document {
            unit: self.unit,
            participation: self.participation.pattern(self.steps).map_err(serde::ser::Error::custom)?,
            sampling,
            steps: self.steps,
            key: self.key,
            arithmetic: self.arithmetic,
            epsilon: c.epsilon(),
            delta: c.delta(),
            adjacency,
            accountant,
            noise_multiplier: c.noise_multiplier(),
            sensitivity,
            clip,
            noise_std: c.noise_std(),
            mu: c.mu(),
            rho: c.rho(),
            beside,
            covers: &self.covers(),
            does_not_cover: &self.does_not_cover(),
            words: &self.to_string(),
        };
        document.serialize(serializer)
    }
}

impl fmt::Display for PrivacyStatement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.calibration;
        let (terms, unit) = (c.terms(), self.unit.name());
        writeln!(
            f,
            "({}, {:e})-differential privacy for every {unit}{}, over {} steps.",
            epsilon_for_people(c.epsilon()),
            c.delta(),
            if self.trained { " that is trained on" } else { "" },
            self.steps
        )?;
        let relation = match terms.adjacency {
            Adjacency::ReplaceWithZero => {
                format!("data sets that differ in one {unit}, whose contributions are replaced with zero")
            }
            Adjacency::AddOrRemove => {
                format!("data sets with and without one {unit}, in which all others keep their steps")
            }
            Adjacency::ReplaceOne => {
                format!(
                    "data sets that differ in one {unit}, whose data is replaced with any other data (twice the sensitivity of removing it)"
                )
            }
        };
        writeln!(f, "Neighbours: {relation} ({}).", terms.adjacency)?;
        writeln!(f, "Participation: each {unit} takes part {}.", self.participation.words(self.steps))?;
        if terms.sampled != Amplification::None {
            writeln!(f, "Sampling: {}.", terms.sampled.sampling().words())?;
        }
        writeln!(
            f,
            "Noise: standard deviation {} = multiplier {:.6} × sensitivity as deployed {:.6} × clipping norm {}.",
            plain(c.noise_std()),
            c.noise_multiplier(),
            terms.sensitivity,
            terms.clip
        )?;
        let accountant = match terms.accountant {
            _ if matches!(terms.sampled, Amplification::CyclicPoisson { .. }) => {
                "privacy loss distributions, rounded up"
            }
            _ if matches!(
                terms.sampled,
                Amplification::BallsInBins(_) | Amplification::ReshuffledBins(_)
            ) =>
            {
                "Monte Carlo with random numbers derived from the mechanism; its bound fails with probability 1e-9"
            }
            Accountant::Exact => "the exact trade-off of the Gaussian mechanism",
            Accountant::Zcdp => "zero-concentrated privacy, converted at the best real order",
            Accountant::Rdp => "Rényi privacy at integer orders from 2 to 512",
            Accountant::Paper => "the closed form of the matrix mechanism's privacy theorem",
        };
        let strength = match (c.mu(), c.rho()) {
            (Some(mu), Some(rho)) => format!("; μ = {}, ρ = {}", plain(mu), plain(rho)),
            _ => String::new(),
        };
        writeln!(f, "Accountant: {accountant}{strength}.")?;
        writeln!(f, "Covered:")?;
        self.covers().iter().try_for_each(|line| writeln!(f, "  - {line}"))?;
        writeln!(f, "Not covered, or assumed:")?;
        self.does_not_cover().iter().try_for_each(|line| writeln!(f, "  - {line}"))
    }
}

/// Six decimals, or an exponent where they would hide the number.
fn plain(x: f64) -> String {
    if (1e-3..1e9).contains(&x) { format!("{x:.6}") } else { format!("{x:.6e}") }
}

/// ε for people: four decimals, rounded up, without trailing zeros.
pub fn epsilon_for_people(epsilon: f64) -> String {
    if epsilon.is_infinite() {
        return "∞".into();
    }
    // A target such as 0.1 is not a round number in binary; it should still print as itself.
    let scaled = epsilon * 1e4;
    let nearest = scaled.round();
    let digits = if (scaled - nearest).abs() < 1e-8 * scaled { nearest } else { scaled.ceil() };
    if digits > 1e15 { format!("{epsilon:e}") } else { format!("{}", digits / 1e4) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statement(adjacency: Adjacency, key: KeyOrigin) -> PrivacyStatement {
        let sampled = Amplification::default();
        let terms = Terms {
            adjacency,
            accountant: Accountant::Exact,
            sampled,
            sensitivity: 1.5,
            clip: 0.3,
            beside: None,
        };
        let calibration = terms.calibrate_noise(8.0, 1e-6).unwrap();
        PrivacyStatement::new(calibration, PrivacyUnit::User, Participation::default(), 2048, key).unwrap()
    }

    #[test]
    fn words_say_what_the_numbers_mean() {
        let text = statement(Adjacency::ReplaceWithZero, KeyOrigin::System).to_string();
        for part in [
            "(8, 1e-6)-differential privacy for every user, over 2048 steps.",
            "data sets that differ in one user, whose contributions are replaced with zero",
            "each user takes part in at most one step",
            "sensitivity as deployed 1.5",
            "clipping norm 0.3",
            "exact trade-off of the Gaussian",
            "Hyperparameters",
            "denominator was fixed before training",
            "Stopping early",
            "chosen adaptively",
            "Every bit",
            "taken as exact",
            "drawn from the operating system",
        ] {
            assert!(text.contains(part), "{part:?} is missing from\n{text}");
        }
        assert!(!text.contains("Floating-point"));
        let float =
            statement(Adjacency::ReplaceWithZero, KeyOrigin::System).with_arithmetic(Arithmetic::Float);
        let text = float.to_string();
        assert!(text.contains("Floating-point arithmetic") && !text.contains("Every bit"), "{text}");
        let seeded = statement(Adjacency::ReplaceOne, KeyOrigin::Seeded).to_string();
        assert!(seeded.contains("only if that number is secret") && !seeded.contains("operating system"));
        assert!(seeded.contains("twice the sensitivity"));
        let trained = statement(Adjacency::ReplaceOne, KeyOrigin::System).of_training().to_string();
        assert!(trained.contains("for every user that is trained on, over 2048 steps."), "{trained}");
        assert!(trained.contains("Scores and learning curves on held-out users"), "{trained}");
        let added = statement(Adjacency::AddOrRemove, KeyOrigin::System).to_string();
        assert!(added.contains("An assignment to steps that changes for others when a user joins"));
        assert!(added.contains("The number of users, which is treated as public"));
    }

    #[test]
    fn json_is_flat() {
        let statement = statement(Adjacency::ReplaceWithZero, KeyOrigin::Seeded);
        let json = serde_json::to_value(&statement).unwrap();
        for (name, value) in [
            ("unit", "user"),
            ("key", "seeded"),
            ("adjacency", "replace-with-zero"),
            ("accountant", "exact"),
            ("arithmetic", "exact"),
        ] {
            assert_eq!(json[name], value);
        }
        let single = serde_json::json!({ "kind": "single", "times": 1, "separation": null });
        assert_eq!(json["participation"], single);
        assert_eq!(
            (&json["epsilon"], &json["noise_std"]),
            (&8.0.into(), &statement.calibration().noise_std().into())
        );
        assert_eq!(json["does_not_cover"].as_array().unwrap().len(), 5);
        assert_eq!(json["words"], statement.to_string());
    }

    #[test]
    fn epsilon_is_printed_rounded_up() {
        for (epsilon, text) in
            [(8.0, "8"), (0.1, "0.1"), (1.00001, "1.0001"), (17.648, "17.648"), (0.99990001, "1")]
        {
            assert_eq!(epsilon_for_people(epsilon), text);
        }
    }

    #[test]
    fn a_pattern_must_fit_the_steps() {
        let calibration = statement(Adjacency::ReplaceWithZero, KeyOrigin::System).calibration().clone();
        let new = |participation: Participation, steps| {
            PrivacyStatement::new(
                calibration.clone(),
                PrivacyUnit::Record,
                participation,
                steps,
                KeyOrigin::System,
            )
        };
        assert!(new(Participation::default(), 0).unwrap_err().to_string().starts_with("steps is 0"));
        assert!(
            new(Participation::Epochs { times: 4 }, 3).unwrap_err().to_string().starts_with("epochs is 4")
        );
        let words = new(Participation::Epochs { times: 4 }, 10).unwrap().to_string();
        assert!(
            words.contains("each record takes part in at most 4 steps, any two of them at least 3 apart"),
            "{words}"
        );
    }
}
