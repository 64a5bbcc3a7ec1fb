//! A ledger: a durable record of all releases about the same people.

mod file;
mod release;

use super::filter::{Cost, Filter};
use super::{Adjacency, PrivacyCurve, PrivacyStatement, PrivacyUnit};
use super::{calibrate, check_delta, check_epsilon, statement::epsilon_for_people};
use crate::error::{Error, Result};
pub use file::LedgerFile;
use rayon::prelude::*;
pub use release::Release;
use serde::{Deserialize, Serialize};

/// Releases on one data set, and the (ε, δ) that all of them together must not exceed.
///
/// Releases are taken to be decided one after the other, each with knowledge of what the earlier ones showed, and counted by
/// a privacy [`Filter`]. Releases that are recorded by [`Ledger::record_together`] compose exactly and count as one.
///
/// Guarantee: everything that was recorded satisfies the budget's (ε, δ), however each release, its noise and its sampling
/// depend on the releases before it; a release that the filter does not hold is not recorded.
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
///     noise_multiplier: Some(2.3),
///     sampling: Sampling::None,
///     rounds: 0,
///     guarantee: None,
///     curve: vec![],
///     group: None,
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
    delta: f64,
    epsilon: f64,
    filter: Filter,
    releases: Vec<Release>,
    /// What all groups of releases cost.
    total: Cost,
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

/// Schema 1 is that of version 0.2: no groups, no further pairs.
const SCHEMA: u32 = 2;

/// Releases that count as one: those of one name, or one alone.
fn groups(releases: &[Release]) -> Vec<Vec<&Release>> {
    let mut groups: Vec<Vec<&Release>> = Vec::new();
    for release in releases {
        let of = |group: &&mut Vec<&Release>| release.group.is_some() && group[0].group == release.group;
        match groups.iter_mut().find(of) {
            Some(group) => group.push(release),
            None => groups.push(vec![release]),
        }
    }
    groups
}

impl Ledger {
    /// An account without releases.
    ///
    /// Errors: ε not positive and finite, δ outside (0, 1).
    pub fn new(epsilon: f64, delta: f64, unit: PrivacyUnit, adjacency: Adjacency) -> Result<Self> {
        check_epsilon(epsilon)?;
        check_delta(delta)?;
        let (filter, total) = (Filter::new(epsilon, delta)?, Cost::default());
        Ok(Self { unit, adjacency, epsilon, delta, filter, releases: Vec::new(), total })
    }

    /// The budget's ε.
    pub fn epsilon(&self) -> f64 {
        self.epsilon
    }

    /// The budget's δ.
    pub fn delta(&self) -> f64 {
        self.delta
    }

    /// The unit of privacy of the ledger.
    pub fn unit(&self) -> PrivacyUnit {
        self.unit
    }

    /// Which data sets are neighbours.
    pub fn adjacency(&self) -> Adjacency {
        self.adjacency
    }

    /// The recorded releases, in order.
    pub fn releases(&self) -> &[Release] {
        &self.releases
    }

    /// How many times something was decided: groups of releases count once.
    pub fn decisions(&self) -> usize {
        groups(&self.releases).len()
    }

    /// How much of the budget's ε is used; 0 without any release.
    ///
    /// For a single decision it is ε by exact composition; for several, [`Filter::epsilon`].
    ///
    /// Guarantee: rounded up.
    /// Errors: none for releases that were recorded.
    pub fn spent(&self) -> Result<f64> {
        self.used(&self.releases, self.total)
    }

    /// ε of all releases by exact composition at the budget's δ: what they would cost had all been decided beforehand.
    ///
    /// Version 0.2 counted by it. It does not hold for releases that were decided one after the other.
    ///
    /// Guarantee: rounded up.
    /// Errors: none for releases that were recorded.
    pub fn spent_if_fixed(&self) -> Result<f64> {
        self.exact(&self.releases.iter().collect::<Vec<_>>())
    }

    /// ε of one release alone at the budget's δ.
    ///
    /// Errors: a noise multiplier outside its domain.
    pub fn alone(&self, release: &Release) -> Result<f64> {
        self.exact(&[release])
    }

    /// What releases use of the budget, whose total cost is known.
    ///
    /// The first decision is made before anything is seen. Where it is the only one, exact composition holds; if the filter
    /// does not hold it too, nothing can follow.
    fn used(&self, releases: &[Release], total: Cost) -> Result<f64> {
        let by_filter = self.filter.epsilon(total);
        match &groups(releases)[..] {
            [only] => Ok(by_filter.min(self.exact(only)?)),
            _ => Ok(by_filter),
        }
    }

    fn exact(&self, releases: &[&Release]) -> Result<f64> {
        let up = |sum: f64, x: f64| if sum == 0.0 { x } else { (sum + x).next_up() };
        let (mut epsilon, mut stated) = (0.0, 0.0);
        let mut curves = Vec::new();
        for release in releases {
            match (release.curve(self.adjacency)?, release.guarantee) {
                (Some(curve), _) => curves.push(curve),
                // Known at single points: ε and δ add up.
                (None, Some([alone, share])) => {
                    (epsilon, stated) = (up(epsilon, alone), up(stated, share));
                }
                (None, None) => return Ok(f64::INFINITY),
            }
        }
        if curves.is_empty() {
            return Ok(if stated <= self.delta { epsilon } else { f64::INFINITY });
        }
        let delta = if stated == 0.0 { self.delta } else { (self.delta - stated).next_down() };
        if delta <= 0.0 {
            return Ok(f64::INFINITY);
        }
        Ok(up(epsilon, PrivacyCurve::compose(&curves)?.epsilon(delta)?))
    }

    /// What a group of releases costs: those with a curve are composed.
    fn cost(&self, group: &[&Release]) -> Result<Cost> {
        let mut curves = Vec::new();
        let mut total = Cost::default();
        for release in group {
            match release.curve(self.adjacency)? {
                Some(curve) => curves.push(curve),
                None => {
                    let sigma = release.noise_multiplier;
                    let mu = sigma.map(|sigma| calibrate::mu(sigma, self.adjacency)).transpose()?;
                    total = total + self.filter.stated_cost(&release.pairs(), mu)?;
                }
            }
        }
        if !curves.is_empty() {
            total = total + self.filter.cost(&PrivacyCurve::compose(&curves)?)?;
        }
        Ok(total)
    }

    /// What all groups cost; equal ones are computed once.
    fn total(&self, groups: &[Vec<&Release>]) -> Result<Cost> {
        let alike =
            |a: &[&Release], b: &[&Release]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.alike(b));
        let mut kinds: Vec<(&[&Release], usize)> = Vec::new();
        for group in groups {
            match kinds.iter_mut().find(|(kind, _)| alike(kind, group)) {
                Some((_, count)) => *count += 1,
                None => kinds.push((group, 1)),
            }
        }
        let costs = kinds
            .par_iter()
            .map(|&(kind, count)| Ok((self.cost(kind)?, count)))
            .collect::<Result<Vec<_>>>()?;
        let repeated = costs.into_iter().flat_map(|(cost, count)| std::iter::repeat_n(cost, count));
        Ok(repeated.fold(Cost::default(), |total, cost| total + cost))
    }

    /// Records releases, each decided on its own, all of them or none. One that is known already, by its id, is not counted
    /// again.
    ///
    /// Errors: [`Error::Budget`] when the filter does not hold all; an id that stands for another release; a guarantee that is
    /// none.
    pub fn record(&mut self, releases: Vec<Release>) -> Result<()> {
        self.enter(releases.into_iter().map(|release| Release { group: None, ..release }).collect())
    }

    /// Records releases that were decided together, before any of them was seen: they compose exactly.
    ///
    /// Nothing about one of them, whether it is made or how, may depend on another one of them. A group is recorded at once
    /// and cannot grow later.
    ///
    /// Errors: those of [`Ledger::record`].
    pub fn record_together(&mut self, releases: Vec<Release>) -> Result<()> {
        let new = |release: &&Release| !self.releases.iter().any(|known| known.id == release.id);
        let mut group = releases.iter().find(new).map(|first| first.id.clone());
        if releases.iter().filter(new).count() < 2 {
            group = None;
        }
        self.enter(releases.into_iter().map(|release| Release { group: group.clone(), ..release }).collect())
    }

    fn enter(&mut self, releases: Vec<Release>) -> Result<()> {
        let all = self.joined(releases)?;
        let before = self.spent()?;
        let total = self.total(&groups(&all))?;
        let used = self.used(&all, total)?;
        if used > self.epsilon && all.len() > self.releases.len() {
            let shown = epsilon_for_people;
            return Err(Error::Budget {
                epsilon: shown(self.epsilon),
                delta: self.delta,
                spent: shown(before),
                together: shown(used),
            });
        }
        (self.releases, self.total) = (all, total);
        Ok(())
    }

    /// The releases with others after them, but for those that are known.
    fn joined(&self, releases: Vec<Release>) -> Result<Vec<Release>> {
        let mut all = self.releases.clone();
        for release in releases {
            release.check()?;
            match all.iter().find(|known| known.id == release.id) {
                None => all.push(release),
                Some(known) if known.same(&release) => {}
                Some(_) => {
                    let rule = "the ledger already has a different release of this name";
                    return Err(Error::argument("release", release.id, rule));
                }
            }
        }
        Ok(all)
    }

    /// Refuses a statement about other units or neighbours than the account's.
    ///
    /// Errors: [`Error::InvalidArgument`].
    pub fn check(&self, statement: &PrivacyStatement) -> Result<()> {
        if statement.unit() != self.unit {
            let rule = "the ledger counts releases for the other unit of privacy; create a separate ledger for this unit";
            return Err(Error::argument("privacy unit", statement.unit().name(), rule));
        }
        let adjacency = statement.calibration().terms().adjacency;
        if adjacency != self.adjacency {
            let rule =
                "the ledger uses a different neighbouring relation; create a separate ledger for this one";
            return Err(Error::argument("adjacency", adjacency, rule));
        }
        Ok(())
    }
}

impl From<Ledger> for Document {
    fn from(ledger: Ledger) -> Self {
        let Ledger { unit, adjacency, epsilon, delta, releases, .. } = ledger;
        Self { schema: SCHEMA, unit, adjacency, epsilon, delta, releases }
    }
}

impl TryFrom<Document> for Ledger {
    type Error = Error;

    /// Builds the ledger anew, so that a file can neither hide a release nor hold more than its budget by exact composition.
    ///
    /// A ledger of version 0.2 may hold more than the filter does. It is read, and holds nothing further.
    fn try_from(document: Document) -> Result<Self> {
        if !(1..=SCHEMA).contains(&document.schema) {
            return Err(Error::argument(
                "schema",
                document.schema,
                "this version reads ledgers of schema 1 and 2",
            ));
        }
        let Document { unit, adjacency, epsilon, delta, releases, .. } = document;
        let mut ledger = Self::new(epsilon, delta, unit, adjacency)?;
        ledger.releases = ledger.joined(releases)?;
        let fixed = ledger.spent_if_fixed()?;
        ledger.total = ledger.total(&groups(&ledger.releases))?;
        let spent = ledger.spent()?;
        if fixed.min(spent) > epsilon {
            let shown = epsilon_for_people;
            let (epsilon, spent) = (shown(epsilon), shown(0.0));
            return Err(Error::Budget { epsilon, delta, spent, together: shown(fixed) });
        }
        Ok(ledger)
    }
}

#[cfg(test)]
mod tests;
