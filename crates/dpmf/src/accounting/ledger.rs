//! A durable account of everything that was released about one set of people.

use super::{Accountant, Adjacency, PrivacyCurve, PrivacyStatement, PrivacyUnit, Sampled};
use super::{check_delta, check_epsilon, statement::epsilon_for_people};
use crate::disk::{Access, Lock, Place};
use crate::error::{Error, Result};
use crate::participation::Sampling;
use serde::{Deserialize, Serialize};
use std::io::Write;

/// Releases on one data set, and the (ε, δ) that all of them together must not exceed.
///
/// Guarantee: [`Ledger::spent`] is the ε of all recorded releases together at the budget's δ, rounded up, by exact
/// composition; a release that would take it above the budget is not recorded.
///
/// ```
/// use dpmf::accounting::{Adjacency, Ledger, PrivacyUnit, Release};
/// use dpmf::Sampling;
///
/// let mut ledger = Ledger::new(4.0, 1e-6, PrivacyUnit::User, Adjacency::ReplaceWithZero)?;
/// let release = |id: &str| Release {
///     id: id.into(),
///     time: "2026-01-01T00:00:00Z".into(),
///     what: "a model".into(),
///     noise_multiplier: 2.3,
///     sampling: Sampling::None,
///     rounds: 0,
///     guarantee: None,
/// };
/// ledger.record(vec![release("a"), release("b")])?;
/// assert!(ledger.spent()? > 2.0 && ledger.spent()? < 4.0);
/// assert!(ledger.record(vec![release("c"), release("d")]).is_err());
/// # Ok::<(), dpmf::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Document", into = "Document")]
pub struct Ledger {
    unit: PrivacyUnit,
    adjacency: Adjacency,
    epsilon: f64,
    delta: f64,
    releases: Vec<Release>,
}

/// One mechanism that was, or may have been, run to its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Release {
    /// Its name, unlike that of any other.
    pub id: String,
    /// When it was recorded, in words for people.
    pub time: String,
    /// What it is, in words for people.
    pub what: String,
    /// Standard deviation of the noise over sensitivity times clip.
    pub noise_multiplier: f64,
    /// The sampling that its curve counts on.
    pub sampling: Sampling,
    /// Under Poisson sampling, how often one unit may be drawn.
    #[serde(default)]
    pub rounds: u64,
    /// Where the curve is known at one point only, as for balls in bins: ε and δ there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guarantee: Option<[f64; 2]>,
}

/// The ledger as it stands in a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    schema: u32,
    unit: PrivacyUnit,
    adjacency: Adjacency,
    epsilon: f64,
    delta: f64,
    releases: Vec<Release>,
}

const SCHEMA: u32 = 1;

impl Release {
    /// What a privacy statement is about, run to its end.
    pub fn new(
        id: impl Into<String>,
        time: impl Into<String>,
        what: impl Into<String>,
        statement: &PrivacyStatement,
    ) -> Self {
        let calibration = statement.calibration();
        let sampled = &calibration.terms().sampled;
        Self {
            id: id.into(),
            time: time.into(),
            what: what.into(),
            noise_multiplier: calibration.noise_multiplier(),
            sampling: sampled.sampling(),
            rounds: match sampled {
                Sampled::CyclicPoisson { rounds, .. } => *rounds,
                Sampled::None | Sampled::BallsInBins(_) => 0,
            },
            guarantee: matches!(sampled, Sampled::BallsInBins(_))
                .then(|| [calibration.epsilon(), calibration.delta()]),
        }
    }
}

impl Release {
    /// Refuses a stated guarantee outside ε ≥ 0, 0 ≤ δ < 1: a negative one would give budget back.
    fn check(&self) -> Result<()> {
        match self.guarantee {
            Some([epsilon, delta])
                if !(epsilon >= 0.0 && epsilon.is_finite() && (0.0..1.0).contains(&delta)) =>
            {
                let rule =
                    "its guarantee must have a finite ε of at least 0 and a δ of at least 0 and below 1";
                Err(Error::argument("release", self.id.clone(), rule))
            }
            _ => Ok(()),
        }
    }
}

impl Ledger {
    /// An account without releases.
    ///
    /// Errors: ε not positive and finite, δ outside (0, 1).
    pub fn new(epsilon: f64, delta: f64, unit: PrivacyUnit, adjacency: Adjacency) -> Result<Self> {
        check_epsilon(epsilon)?;
        check_delta(delta)?;
        Ok(Self { unit, adjacency, epsilon, delta, releases: Vec::new() })
    }

    /// The budget's ε.
    pub fn epsilon(&self) -> f64 {
        self.epsilon
    }

    /// The budget's δ.
    pub fn delta(&self) -> f64 {
        self.delta
    }

    /// Whose data the account is about.
    pub fn unit(&self) -> PrivacyUnit {
        self.unit
    }

    /// Which data sets are neighbours.
    pub fn adjacency(&self) -> Adjacency {
        self.adjacency
    }

    /// What was recorded, in order.
    pub fn releases(&self) -> &[Release] {
        &self.releases
    }

    /// ε of all releases together at the budget's δ; 0 without any.
    ///
    /// Guarantee: rounded up.
    /// Errors: none for releases that were recorded.
    pub fn spent(&self) -> Result<f64> {
        self.together(&self.releases)
    }

    /// ε of one release alone at the budget's δ.
    ///
    /// Errors: a noise multiplier outside its domain.
    pub fn alone(&self, release: &Release) -> Result<f64> {
        self.together(std::slice::from_ref(release))
    }

    fn together(&self, releases: &[Release]) -> Result<f64> {
        if releases.is_empty() {
            return Ok(0.0);
        }
        let curve = |release: &Release| {
            let sampled = match release.sampling {
                Sampling::CyclicPoisson { bands, rate } => {
                    Sampled::CyclicPoisson { bands, rate, rounds: release.rounds }
                }
                Sampling::None | Sampling::BallsInBins { .. } => Sampled::None,
            };
            sampled.curve(release.noise_multiplier, self.adjacency, Accountant::Exact)
        };
        // Known at one point only: ε and δ add up.
        let (points, curves): (Vec<&Release>, Vec<&Release>) =
            releases.iter().partition(|release| matches!(release.sampling, Sampling::BallsInBins { .. }));
        let (mut epsilon, mut delta) = (0.0, self.delta);
        for release in points {
            let Some([alone, share]) = release.guarantee else {
                let rule = "a release by balls in bins must state ε and δ";
                return Err(Error::argument("release", release.id.clone(), rule));
            };
            (epsilon, delta) = ((epsilon + alone).next_up(), (delta - share).next_down());
        }
        if curves.is_empty() {
            return Ok(if delta >= 0.0 { epsilon } else { f64::INFINITY });
        }
        if delta <= 0.0 {
            return Ok(f64::INFINITY);
        }
        let curves = curves.into_iter().map(curve).collect::<Result<Vec<PrivacyCurve>>>()?;
        Ok(epsilon + PrivacyCurve::compose(&curves)?.epsilon(delta)?)
    }

    /// Records releases, all of them or none. One that is known already, by its id, is not counted again.
    ///
    /// Errors: [`Error::Budget`] when all together would exceed the budget; an id that stands for another release; a guarantee
    /// that is none.
    pub fn record(&mut self, releases: Vec<Release>) -> Result<()> {
        let mut all = self.releases.clone();
        for release in releases {
            release.check()?;
            match all.iter().find(|known| known.id == release.id) {
                None => all.push(release),
                Some(known)
                    if (known.noise_multiplier, known.sampling, known.rounds, known.guarantee)
                        == (
                            release.noise_multiplier,
                            release.sampling,
                            release.rounds,
                            release.guarantee,
                        ) => {}
                Some(_) => {
                    return Err(Error::argument(
                        "release",
                        release.id,
                        "its name stands for another release",
                    ));
                }
            }
        }
        let (spent, together) = (self.spent()?, self.together(&all)?);
        if together > self.epsilon {
            let shown = epsilon_for_people;
            return Err(Error::Budget {
                epsilon: shown(self.epsilon),
                delta: self.delta,
                spent: shown(spent),
                together: shown(together),
            });
        }
        self.releases = all;
        Ok(())
    }

    /// Refuses a statement about other units or neighbours than the account's.
    ///
    /// Errors: [`Error::InvalidArgument`].
    pub fn check(&self, statement: &PrivacyStatement) -> Result<()> {
        if statement.unit() != self.unit {
            let rule = "the ledger counts what is released about the other unit of privacy: begin a ledger for this one";
            return Err(Error::argument("privacy unit", statement.unit().name(), rule));
        }
        let adjacency = statement.calibration().terms().adjacency;
        if adjacency != self.adjacency {
            let rule = "the ledger counts by another relation: begin a ledger for this one";
            return Err(Error::argument("adjacency", adjacency, rule));
        }
        Ok(())
    }
}

impl From<Ledger> for Document {
    fn from(ledger: Ledger) -> Self {
        let Ledger { unit, adjacency, epsilon, delta, releases } = ledger;
        Self { schema: SCHEMA, unit, adjacency, epsilon, delta, releases }
    }
}

impl TryFrom<Document> for Ledger {
    type Error = Error;

    /// Builds the ledger anew, so that a file can neither hide a release nor hold more than its budget.
    fn try_from(document: Document) -> Result<Self> {
        if document.schema != SCHEMA {
            return Err(Error::argument("schema", document.schema, "this version reads ledgers of schema 1"));
        }
        let Document { unit, adjacency, epsilon, delta, releases, .. } = document;
        let mut ledger = Self::new(epsilon, delta, unit, adjacency)?;
        ledger.record(releases)?;
        Ok(ledger)
    }
}

/// A ledger on disk, held by one process at a time.
pub struct LedgerFile {
    place: Place,
    ledger: Ledger,
    _lock: Lock,
}

impl LedgerFile {
    /// Begins a ledger in a new file.
    ///
    /// Errors: a file that exists; [`Error::Io`]; [`Error::Locked`].
    pub fn create(place: impl Into<Place>, ledger: Ledger) -> Result<Self> {
        let place = place.into();
        let lock = place.lock_beside()?;
        if place.exists()? {
            let rule = "it exists, and an account is never begun anew";
            return Err(Error::argument("ledger", place.path().display(), rule));
        }
        let file = Self { place, ledger, _lock: lock };
        file.save(&file.ledger)?;
        Ok(file)
    }

    /// Opens a ledger.
    ///
    /// Errors: [`Error::Io`]; [`Error::Locked`]; [`Error::Format`] for what is no whole ledger.
    pub fn open(place: impl Into<Place>) -> Result<Self> {
        let place = place.into();
        let lock = place.lock_beside()?;
        Ok(Self { ledger: Self::read(&place)?, place, _lock: lock })
    }

    /// Reads a ledger without holding it.
    ///
    /// Errors: [`Error::Io`]; [`Error::Format`].
    pub fn read(place: impl Into<Place>) -> Result<Ledger> {
        let place = place.into();
        serde_json::from_slice(&place.read()?).map_err(|error| Error::Format {
            path: place.path().into(),
            reason: format!("it is no ledger: {error}"),
        })
    }

    /// The ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// [`Ledger::record`], on disk before it returns: call it before the first release.
    ///
    /// Errors: those of it, with nothing recorded; [`Error::Io`], after which the releases may or may not be in the
    /// file: nothing is released on their account, and recording them again counts them once.
    pub fn record(&mut self, releases: Vec<Release>) -> Result<()> {
        let mut ledger = self.ledger.clone();
        ledger.record(releases)?;
        self.save(&ledger)?;
        self.ledger = ledger;
        Ok(())
    }

    fn save(&self, ledger: &Ledger) -> Result<()> {
        let text = serde_json::to_vec_pretty(ledger)
            .map_err(|error| Error::Format { path: self.place.path().into(), reason: error.to_string() })?;
        self.place.replace(Access::Everyone, |file| file.write_all(&text)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::simulated::{Simulated, Trials, schedule};
    use std::collections::BTreeSet;

    fn release(id: &str, noise_multiplier: f64) -> Release {
        let (time, what) = ("2026-01-01T00:00:00Z".into(), "a model".into());
        Release {
            id: id.into(),
            time,
            what,
            noise_multiplier,
            sampling: Sampling::None,
            rounds: 0,
            guarantee: None,
        }
    }

    fn ledger(epsilon: f64) -> Ledger {
        Ledger::new(epsilon, 1e-6, PrivacyUnit::User, Adjacency::ReplaceWithZero).unwrap()
    }

    /// The noise of (2, 1e-6).
    fn sigma() -> f64 {
        super::super::calibrate::noise_multiplier(2.0, 1e-6, Adjacency::ReplaceWithZero, Accountant::Exact)
            .unwrap()
    }

    #[test]
    fn a_guarantee_that_gives_budget_back_is_refused() {
        for guarantee in [
            [-50.0, 1e-7],
            [1.0, -1e-6],
            [f64::NAN, 1e-7],
            [f64::INFINITY, 1e-7],
            [1.0, 1.0],
            [1.0, f64::NAN],
        ] {
            let mut ledger = ledger(3.68);
            let sampling = Sampling::BallsInBins { bins: 10 };
            let bad = Release { sampling, guarantee: Some(guarantee), ..release("bad", 1.0) };
            assert!(
                matches!(ledger.record(vec![bad.clone()]), Err(Error::InvalidArgument { .. })),
                "{guarantee:?}"
            );
            assert_eq!(ledger.spent().unwrap(), 0.0);
            let document = Document { releases: vec![bad], ..ledger.into() };
            assert!(Ledger::try_from(document).is_err(), "{guarantee:?}");
        }
    }

    #[test]
    fn releases_compose_exactly_and_a_budget_holds() {
        let mut ledger = ledger(3.68);
        assert_eq!(ledger.spent().unwrap(), 0.0);
        for id in ["a", "b", "c"] {
            ledger.record(vec![release(id, sigma())]).unwrap();
        }
        let spent = ledger.spent().unwrap();
        assert!((spent - 3.67).abs() < 6e-3 && spent <= 3.68, "{spent}");
        let before = ledger.clone();
        let error = ledger.record(vec![release("d", sigma())]).unwrap_err();
        assert_eq!(error.kind(), "budget");
        assert!(error.to_string().contains("ε = 3.68"), "{error}");
        assert_eq!(ledger, before);
        // All or none: the small one alone would have fitted.
        assert!(ledger.record(vec![release("e", 100.0), release("f", sigma())]).is_err());
        assert_eq!(ledger, before);
    }

    #[test]
    fn a_known_release_is_counted_once_and_a_name_is_for_one() {
        let mut ledger = ledger(2.0);
        ledger.record(vec![release("a", sigma())]).unwrap();
        ledger.record(vec![release("a", sigma())]).unwrap();
        assert_eq!(ledger.releases().len(), 1);
        assert!(ledger.record(vec![release("a", 2.0 * sigma())]).is_err());
    }

    #[test]
    fn files_keep_the_account_and_refuse_one_beyond_its_budget() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.json");
        let mut file = LedgerFile::create(&path, ledger(3.0)).unwrap();
        assert!(matches!(LedgerFile::open(&path), Err(Error::Locked { .. })));
        file.record(vec![release("a", sigma())]).unwrap();
        assert!(file.record(vec![release("b", 0.5)]).is_err());
        drop(file);
        assert!(
            LedgerFile::create(&path, ledger(9.0)).err().unwrap().to_string().contains("never begun anew")
        );
        let file = LedgerFile::open(&path).unwrap();
        assert_eq!(file.ledger().releases(), [release("a", sigma())]);
        drop(file);
        // Whoever lowers the budget below what is spent, or noise below what it holds for, is told.
        let text = std::fs::read_to_string(&path).unwrap();
        for (from, to) in
            [("\"epsilon\": 3.0", "\"epsilon\": 1.0"), ("\"schema\": 1", "\"schema\": 2"), ("system", "x")]
        {
            std::fs::write(&path, text.replace(from, to)).unwrap();
            assert_eq!(LedgerFile::open(&path).is_ok(), from == "system", "{from}");
        }
    }

    /// Begins a ledger, records three releases one after the other, each made only when it is recorded, and starts over
    /// after every failure; `made` is what left the program, the answer what the file holds in the end.
    fn session(disk: &Simulated, made: &mut BTreeSet<String>) -> Result<Ledger> {
        let place = disk.at("/people.ledger");
        let mut file = match place.exists()? {
            true => LedgerFile::open(&place)?,
            false => LedgerFile::create(&place, ledger(3.68))?,
        };
        for id in ["a", "b", "c"] {
            file.record(vec![release(id, sigma())])?;
            made.insert(id.into());
        }
        let refused = file.record(vec![release("d", sigma())]).unwrap_err();
        if refused.kind() == "budget" { LedgerFile::read(&place) } else { Err(refused) }
    }

    fn trials(schedules: u64) -> Trials {
        let undisturbed = Simulated::new(0);
        session(&undisturbed, &mut BTreeSet::new()).unwrap();
        let mut trials = Trials::default();
        for index in 0..schedules {
            let disk = schedule(index, undisturbed.operations());
            let mut made = BTreeSet::new();
            trials.run(&disk, |trials| {
                let kept = session(&disk, &mut made).map_err(|error| error.to_string())?;
                let known: BTreeSet<String> = kept.releases().iter().map(|r| r.id.clone()).collect();
                if known != made || kept.releases().len() != 3 {
                    trials.wrong.push(format!("{made:?} was released, {known:?} is recorded"));
                }
                Ok(())
            });
        }
        trials
    }

    #[test]
    fn what_is_released_is_recorded_whatever_the_disk_does() {
        let trials = trials(400);
        assert!(trials.lost.is_empty() && trials.wrong.is_empty(), "{trials}");
        assert!(trials.resumed > 100, "{trials}");
    }

    #[test]
    #[ignore = "two thousand schedules: scripts/slow"]
    fn two_thousand_fault_schedules_of_a_ledger() {
        let trials = trials(2000);
        println!("ledger: {trials}");
        assert!(trials.lost.is_empty() && trials.wrong.is_empty(), "{trials}");
    }
}
