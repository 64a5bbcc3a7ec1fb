//! Rehearsal: settings of a training from made-up tables of the same shape.
//!
//! The best rate, number of epochs, cohort and clip depend mostly on sizes: users, columns, classes, and the noise of the plan. So
//! the program makes up a few tables ([`Shape`]), trains the same model on them with the plan's noise over a small grid, and takes
//! the settings that close most of the gap between the trivial model and the teacher who made the tables. Nothing of the data is
//! looked at but its sizes: a rehearsal costs no privacy.

mod student;
mod tables;

pub use tables::Shape;

use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::planner::RunPlanner;
use crate::recipe::{MechanismChoice, Privacy, Settings};
use dpmf::Participation;
use dpmf::accounting::calibrate::noise_multiplier;
use dpmf::accounting::{Accountant, Adjacency, Arithmetic};
use dpmf::disk::{self, Access};
use dpmf::noise::{NoiseKey, Output, RunId};
use dpmf::planner::Listener;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::path::Path;
use std::time::Instant;
use student::{Course, closed_gap};
use tables::{MadeUp, TABLES, TableRng};

/// What was said and is not searched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Given {
    /// The server's learning rate.
    pub learning_rate: bool,
    /// The number of epochs or rounds.
    pub length: bool,
    /// Users in a round.
    pub clients: bool,
    /// The clip.
    pub clip: bool,
}

impl Given {
    /// Whether nothing is left to search for.
    pub fn everything(&self) -> bool {
        self.learning_rate && self.length && self.clients && self.clip
    }

    /// Whether rounds and cohorts are as the settings have them.
    fn fixes_rounds(&self, settings: &Settings) -> bool {
        self.length && (self.clients || settings.limits.epochs.is_none())
    }
}

/// What a rehearsal chose, and what it took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rehearsed {
    /// The server's learning rate.
    pub learning_rate: f64,
    /// Passes over the users.
    pub epochs: usize,
    /// Users in a round.
    pub clients: usize,
    /// Norm that a user's contribution is clipped to.
    pub clip: f64,
    /// Settings that were tried.
    pub settings: usize,
    /// Mean over the made-up tables of the way from the trivial model to the teacher, 0 to 1.
    pub closed_gap: f64,
    /// Time that it took when it was done; less where it was found in the cache.
    pub seconds: f64,
}

impl Rehearsed {
    /// Puts what was found into the settings that were rehearsed, where it was not given.
    pub fn apply(&self, settings: &mut Settings, given: Given) {
        let turns = per_epoch(settings.limits.users, self.clients);
        let free = !given.fixes_rounds(settings);
        Turns { epochs: self.epochs, turns, clients: self.clients, free }.apply(settings);
        settings.server_learning_rate = self.learning_rate;
        settings.clip = self.clip;
    }

    /// Takes over the rate of a later rehearsal, which knew more of the table and had all else given.
    pub fn suit(&mut self, later: &Self) {
        self.learning_rate = later.learning_rate;
        self.closed_gap = later.closed_gap;
        self.settings += later.settings;
        self.seconds += later.seconds;
    }

    /// A line for people.
    pub fn describe(&self) -> String {
        let Self { learning_rate, epochs, clients, clip, settings, .. } = self;
        let plural = if *epochs == 1 { "" } else { "s" };
        format!(
            "rehearsed {settings} settings on made-up tables like yours: rate {}, {epochs} epoch{plural}, {clients} in a round, \
             clip {}",
            short(*learning_rate),
            short(*clip)
        )
    }
}

/// A number to three digits.
fn short(x: f64) -> f64 {
    format!("{x:.2e}").parse().unwrap_or(x)
}

/// Changes whenever a rehearsal may come out differently: what older versions kept is then not looked at.
const VERSION: u32 = 1;
/// Steps of a training that everybody takes part in.
const STEPS: [usize; 5] = [4, 8, 16, 32, 64];
/// Rounds that pass over the users once, where the epochs are given.
const TURNS: [usize; 3] = [1, 4, 16];
/// Most steps that are searched.
const MOST_STEPS: usize = 256;
/// Users times epochs that a training may take if nothing is said.
const MOST_GRADIENTS: usize = 1 << 26;
/// Rates of the first search.
const RATES: [f64; 7] = [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625];
/// Clips in units of the length of a row, and how much faster a model then learns that has the same pace.
const CLIPS: [f64; 5] = [0.125, 0.25, 0.5, 1.0, 2.0];
/// The clip of the first search.
const FIRST_CLIP: f64 = 0.5;
/// Factors of the best rate in the second search.
const AROUND: [f64; 4] = [0.5, 1.0, 2.0, 4.0];
/// Numbers of a made-up table, times outputs: more rows tell nothing new about settings.
const NUMBERS: usize = 1 << 17;
/// Rows of a made-up table.
const ROWS: std::ops::RangeInclusive<usize> = 300..=8000;
/// Rows for a model with hidden layers, whose gradients take longer.
const HIDDEN_ROWS: usize = 300;

/// How often and how many at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Turns {
    epochs: usize,
    /// Rounds of an epoch.
    turns: usize,
    clients: usize,
    /// Rounds and participation follow from the epochs; otherwise the settings say what they are.
    free: bool,
}

impl Turns {
    /// Those that are weighed.
    fn all(settings: &Settings, given: Given) -> Vec<Self> {
        let users = settings.limits.users;
        let of = |epochs: usize, turns: usize| {
            let clients = users.div_ceil(turns).max(1);
            Self { epochs, turns, clients, free: true }
        };
        let clients = settings.recipe.clients;
        if given.fixes_rounds(settings) {
            let turns = per_epoch(users, clients);
            let epochs = settings.limits.epochs.unwrap_or((settings.rounds / turns).max(1));
            return vec![Self { epochs, turns, clients, free: false }];
        }
        match (given.length, given.clients) {
            (true, _) => {
                let epochs = settings.limits.epochs.unwrap_or(1);
                let fits = |turns: &usize| {
                    *turns == 1
                        || (turns * epochs <= MOST_STEPS
                            && per_epoch(users, users.div_ceil(*turns)) == *turns)
                };
                TURNS.into_iter().filter(fits).map(|turns| of(epochs, turns)).collect()
            }
            (false, true) => {
                let turns = per_epoch(users, clients);
                let fits = |epochs: &usize| *epochs == 1 || epochs * turns <= MOST_STEPS;
                [1, 2, 4, 8, 16, 32, 64]
                    .into_iter()
                    .filter(fits)
                    .map(|epochs| Self { epochs, turns, clients, free: true })
                    .collect()
            }
            (false, false) => {
                let full = STEPS.into_iter().filter(|steps| steps.saturating_mul(users) <= MOST_GRADIENTS);
                let mut all: Vec<Self> = full.map(|steps| of(steps, 1)).collect();
                if all.len() < 3 {
                    all.extend([1, 2, 4].map(|epochs| of(epochs, 16)));
                }
                all
            }
        }
    }

    fn apply(self, settings: &mut Settings) {
        if !self.free {
            return;
        }
        settings.recipe.clients = self.clients;
        settings.limits.epochs = Some(self.epochs);
        settings.rounds = self.epochs * self.turns;
        settings.participation = match self.epochs {
            1 => Participation::Single,
            times => Participation::Epochs { times },
        };
    }
}

/// Rounds that pass over the users once, as the planner counts them.
fn per_epoch(users: usize, clients: usize) -> usize {
    (users as f64 / clients.max(1) as f64).round().max(1.0) as usize
}

/// One setting.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Setting {
    turns: usize,
    rate: f64,
    clip: f64,
}

/// A rehearsal under way.
struct Stage<'a> {
    shape: &'a Shape,
    settings: &'a Settings,
    turns: Vec<Turns>,
    tables: Vec<MadeUp>,
    parameters: usize,
}

/// Searches for the settings that are not given. `settings` says all others: mechanism, privacy, optimizer, schedule.
///
/// Everything follows from the arguments, so that asking again gives the same; with a folder, what was found before is read from it.
///
/// Cost: some hundred trainings on tables of at most 8000 rows; two plans.
///
/// Errors: those of the planner; settings that make no workload.
pub fn rehearse(
    shape: &Shape,
    settings: &Settings,
    given: Given,
    planner: &mut RunPlanner,
    folder: Option<&Path>,
    listen: Listener<'_>,
) -> Result<Rehearsed> {
    let name = serde_json::to_string(&(VERSION, shape, settings, given))
        .map_err(|error| Error::plan(error.to_string()))?;
    if let Some(known) = folder.and_then(|folder| read(folder, &name)) {
        return Ok(known);
    }
    let clock = Instant::now();
    let turns = Turns::all(settings, given);
    let numbers = shape.features() * shape.outputs();
    let most = if shape.hidden.is_empty() { *ROWS.end() } else { HIDDEN_ROWS };
    let rows = (NUMBERS / numbers.max(1)).clamp(*ROWS.start(), most).min(shape.users.max(10));
    let tables = (0..TABLES).into_par_iter().map(|index| MadeUp::new(shape, rows, index)).collect();
    let widths: Vec<usize> = shape.hidden.iter().copied().chain([shape.outputs()]).collect();
    let inputs = [shape.features()].into_iter().chain(shape.hidden.iter().copied());
    let parameters = inputs.zip(&widths).map(|(inputs, outputs)| (inputs + 1) * outputs).sum();
    let stage = Stage { shape, settings, turns, tables, parameters };

    let length = shape.length();
    let first_clip = if given.clip { settings.clip } else { short(FIRST_CLIP * length) };
    let rates = if given.learning_rate { vec![settings.server_learning_rate] } else { RATES.to_vec() };
    let mut tried = 0;
    let first: Vec<Setting> = (0..stage.turns.len())
        .flat_map(|turns| rates.iter().map(move |rate| Setting { turns, rate: *rate, clip: first_clip }))
        .collect();
    tell(listen, "rehearsing on made-up tables")?;
    tried += first.len();
    let noises = (0..stage.turns.len()).map(|turns| stage.rule(turns)).collect::<Result<Vec<_>>>()?;
    let gaps = stage.run(&first, &noises, 0..2)?;
    // The best of every number of epochs, and of these the best two.
    let mut best: Vec<(f64, Setting)> = Vec::new();
    for turns in 0..stage.turns.len() {
        let own = gaps.iter().zip(&first).filter(|(_, setting)| setting.turns == turns);
        best.extend(own.max_by(|a, b| a.0.total_cmp(b.0)).map(|(gap, setting)| (*gap, *setting)));
    }
    best.sort_by(|a, b| b.0.total_cmp(&a.0));
    best.truncate(2);

    let mut second = Vec::new();
    let mut noises: Vec<Noise> = (0..stage.turns.len()).map(|_| Noise::default()).collect();
    for (_, setting) in &best {
        tell(listen, "rehearsing with the noise of the plan")?;
        noises[setting.turns] = stage.planned(setting.turns, planner, listen)?;
        let clips: Vec<f64> = match given.clip {
            true => vec![settings.clip],
            false => CLIPS.iter().map(|clip| short(clip * length)).collect(),
        };
        for clip in clips {
            // A smaller clip shortens every step.
            let pace = (first_clip / clip).clamp(0.5, 2.0);
            let rates: Vec<f64> = match given.learning_rate {
                true => vec![settings.server_learning_rate],
                false => AROUND.iter().map(|factor| short(setting.rate * factor * pace)).collect(),
            };
            second.extend(rates.into_iter().map(|rate| Setting { rate, clip, ..*setting }));
        }
    }
    tried += second.len();
    let gaps = stage.run(&second, &noises, 2..4)?;
    let mut order: Vec<usize> = (0..second.len()).collect();
    order.sort_by(|a, b| gaps[*b].total_cmp(&gaps[*a]));
    order.truncate(6);
    // The best few once more, with other noise: the best of many is partly luck.
    let last: Vec<Setting> = order.iter().map(|at| second[*at]).collect();
    let again = stage.run(&last, &noises, 4..10)?;
    let mean = |place: usize| (2.0 * gaps[order[place]] + 6.0 * again[place]) / 8.0;
    let place = (0..last.len()).max_by(|a, b| mean(*a).total_cmp(&mean(*b))).unwrap_or(0);
    let Some(chosen) = last.get(place) else {
        return Err(Error::plan("there is nothing to rehearse".into()));
    };
    let turns = stage.turns[chosen.turns];
    let rehearsed = Rehearsed {
        learning_rate: chosen.rate,
        epochs: turns.epochs,
        clients: turns.clients,
        clip: chosen.clip,
        settings: tried,
        closed_gap: mean(place),
        seconds: clock.elapsed().as_secs_f64(),
    };
    if let Some(folder) = folder {
        write(folder, &name, &rehearsed);
    }
    Ok(rehearsed)
}

/// Norm of the noise in the mean of a round, in clips, up to which the usual rate of a model that is not rehearsed serves.
const USUAL_NOISE: f64 = 4.0;

/// The rate of a model that is too large to rehearse: the usual one, and less where the noise of a round is longer than
/// `USUAL_NOISE` clips, so that noise moves the model no farther in a round than it does there.
///
/// The noise is that of independent releases without secret sampling, an upper bound of what a planner finds.
///
/// Errors: a budget out of range.
pub fn tempered_rate(settings: &Settings, parameters: usize) -> Result<f64> {
    let clients = settings.recipe.clients;
    let per_epoch = per_epoch(settings.limits.users, clients);
    let epochs = settings.limits.epochs.unwrap_or((settings.rounds / per_epoch).max(1));
    let Some(sigma) = noise_multiplier_of(settings)? else { return Ok(settings.server_learning_rate) };
    let norm = sigma * (epochs as f64 * parameters as f64).sqrt() / clients as f64;
    Ok(settings.server_learning_rate * (USUAL_NOISE / norm).min(1.0))
}

/// The noise multiplier of one release without secret sampling; nothing without noise.
fn noise_multiplier_of(settings: &Settings) -> Result<Option<f64>> {
    Ok(match (settings.recipe.mechanism, settings.privacy) {
        (MechanismChoice::None, _) => None,
        (_, Privacy::Epsilon { epsilon, delta }) => {
            Some(noise_multiplier(epsilon, delta, Adjacency::default(), Accountant::default())?)
        }
        (_, Privacy::NoiseMultiplier { noise_multiplier, .. }) => Some(noise_multiplier),
    })
}

fn tell(listen: Listener<'_>, line: &str) -> Result<()> {
    match listen(line).is_break() {
        true => Err(dpmf::Error::Interrupted { iterations: 0, gap: f64::INFINITY }.into()),
        false => Ok(()),
    }
}

/// What noise adds to the mean of a round, in clips.
#[derive(Default)]
enum Noise {
    #[default]
    Silent,
    /// Independent, of this standard deviation.
    Independent(f64),
    /// That of a plan, times this.
    Planned(Box<Plan>, f64),
}

impl Stage<'_> {
    /// The noise of so many participations without correlation or secret sampling: an upper bound of what a planner finds, and at
    /// once at hand.
    fn rule(&self, turns: usize) -> Result<Noise> {
        let Turns { epochs, clients, .. } = self.turns[turns];
        let Some(sigma) = noise_multiplier_of(self.settings)? else { return Ok(Noise::Silent) };
        Ok(Noise::Independent(sigma * (epochs as f64).sqrt() / clients as f64))
    }

    /// The noise of the plan.
    fn planned(&self, turns: usize, planner: &mut RunPlanner, listen: Listener<'_>) -> Result<Noise> {
        let mut settings = self.settings.clone();
        self.turns[turns].apply(&mut settings);
        let plan = planner.plan(&settings, listen)?;
        Ok(match plan.mechanism().and_then(|mechanism| mechanism.privacy()) {
            None => Noise::Silent,
            Some(statement) => {
                let calibration = statement.calibration();
                let scale = calibration.noise_std() / calibration.terms().clip;
                let clients = self.turns[turns].clients as f64;
                Noise::Planned(Box::new(plan), scale / clients)
            }
        })
    }

    /// Rows of noise for a table, one for each round: the same for all settings of as many rounds.
    fn noise(&self, noise: &Noise, rounds: usize, table: usize, draw: usize) -> Result<Vec<Vec<f32>>> {
        let label = draw * TABLES + table;
        match noise {
            Noise::Silent => Ok(Vec::new()),
            Noise::Independent(std) => {
                let mut random = TableRng::new(0x6e6f_6973, label as u64);
                let row = |_| (0..self.parameters).map(|_| (std * random.normal()) as f32).collect();
                Ok((0..rounds).map(row).collect())
            }
            Noise::Planned(plan, scale) => {
                let Some(mechanism) = plan.mechanism() else { return Ok(Vec::new()) };
                let (key, run) = (NoiseKey::from_seed(0), RunId::from_label(&format!("rehearsal {label}")));
                let coordinates = 0..self.parameters as u64;
                let mut stream =
                    mechanism.unit_stream(&key, run, coordinates, Output::Gradient, Arithmetic::Float)?;
                let mut rows = Vec::with_capacity(rounds);
                for _ in 0..rounds {
                    let mut row = vec![0.0_f32; self.parameters];
                    stream.add_next(&mut row)?;
                    row.iter_mut().for_each(|x| *x *= *scale as f32);
                    rows.push(row);
                }
                Ok(rows)
            }
        }
    }

    /// Mean closed gap of every setting over the tables and some draws of noise.
    fn run(&self, settings: &[Setting], noises: &[Noise], draws: std::ops::Range<usize>) -> Result<Vec<f64>> {
        let used: Vec<usize> =
            (0..self.turns.len()).filter(|turns| settings.iter().any(|s| s.turns == *turns)).collect();
        let jobs: Vec<(usize, usize, usize)> = used
            .iter()
            .flat_map(|turns| draws.clone().map(move |draw| (*turns, draw)))
            .flat_map(|(turns, draw)| (0..TABLES).map(move |table| (turns, table, draw)))
            .collect();
        let scored: Vec<Vec<(usize, f64)>> = jobs
            .par_iter()
            .map(|&(turns, table, draw)| {
                let mut base = self.settings.clone();
                self.turns[turns].apply(&mut base);
                let noise = self.noise(&noises[turns], base.rounds, table, draw)?;
                let mut gaps = Vec::new();
                for (at, setting) in settings.iter().enumerate().filter(|(_, s)| s.turns == turns) {
                    base.server_learning_rate = setting.rate;
                    let workload = &base.workload()?;
                    let (turns, clip) = (self.turns[turns].turns, setting.clip);
                    let course = Course { workload, turns, clip, noise: &noise };
                    gaps.push((at, closed_gap(self.shape, &self.tables[table], &course)));
                }
                Ok(gaps)
            })
            .collect::<Result<_>>()?;
        let mut sums = vec![0.0; settings.len()];
        scored.into_iter().flatten().for_each(|(at, gap)| sums[at] += gap);
        let count = (draws.len() * TABLES) as f64;
        Ok(sums.into_iter().map(|sum| sum / count).collect())
    }
}

/// What is kept of a rehearsal: its name in full, since a file's name is only a hash of it.
#[derive(Serialize, Deserialize)]
struct Kept {
    asked: String,
    found: Rehearsed,
}

fn file(name: &str) -> String {
    let hash: String = Sha256::digest(name).iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("rehearsal-{hash}.json")
}

fn read(folder: &Path, name: &str) -> Option<Rehearsed> {
    let kept: Kept = serde_json::from_slice(&std::fs::read(folder.join(file(name))).ok()?).ok()?;
    let sound = |found: &Rehearsed| {
        found.learning_rate > 0.0 && found.clip > 0.0 && found.epochs > 0 && found.clients > 0
    };
    (kept.asked == name && sound(&kept.found)).then_some(kept.found)
}

/// Keeps what was found. What cannot be written is found again next time.
fn write(folder: &Path, name: &str, found: &Rehearsed) {
    let kept = Kept { asked: name.to_owned(), found: found.clone() };
    let Ok(bytes) = serde_json::to_vec(&kept) else { return };
    if std::fs::create_dir_all(folder).is_ok() {
        let _ = disk::replace(folder.join(file(name)), Access::Everyone, |out| out.write_all(&bytes));
    }
}

#[cfg(test)]
mod tests;
