//! The planner finds the mechanism and the sampler with the least error for a training run.
//!
//! You describe the amount of data, the batch size, the epochs, the optimizer, the budget, the memory for noise, and whether the
//! sampler's draws stay secret. The planner compares
//!
//! - parts that take turns with Poisson sampling, over banded encoders with any number of bands; one band is DP-SGD;
//! - balls in bins, dealt once or drawn anew in every epoch, over encoders of a few exponentials that are made for the budget;
//! - no sampling, with streams of the optimum, whose certified lower bound shows in advance whether they can win.
//!
//! Fits are kept in a [`FitCache`] between calls.
//!
//! ```
//! use dpmf::planner::{Planner, Request};
//! use dpmf::Workload;
//!
//! let request = Request::new(Workload::prefix_sum(40)?, 4000, 400, 4, 2.0, 1e-5)?;
//! let plan = Planner::default().plan(&request, &mut dpmf::planner::silent)?;
//! assert!(plan.chosen().rmse() < plan.dp_sgd().rmse());
//! # Ok::<(), dpmf::Error>(())
//! ```

mod candidate;
mod fit_cache;
mod folder;
mod sealed;

pub use candidate::{Candidate, Row, Unfitted};
pub use fit_cache::FitCache;
pub use folder::cache_folder;

use crate::accounting::allocation::PROOFS;
use crate::accounting::{Phase, PrivacyCurve, check_delta, check_epsilon, check_positive};
use crate::error::{Error, Result};
use crate::factorize::{Options, Progress, Solver};
use crate::family::{Budget, Selector};
use crate::form::Form;
use crate::mechanism::{Conditions, Mechanism};
use crate::participation::{Participation, Sampling};
use crate::problem::{Goal, Problem};
use crate::workload::{Optimizer, Workload};
use std::ops::ControlFlow;

/// The run that a plan is made for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The iterates, `epochs` times the steps of an epoch.
    pub workload: Workload,
    /// Units of privacy: examples, or users.
    pub examples: u64,
    /// Units in a batch, on average.
    pub batch: u64,
    /// Passes over the data.
    pub epochs: usize,
    /// ε of the budget.
    pub epsilon: f64,
    /// δ of the budget.
    pub delta: f64,
    /// Clipping norm.
    pub clip: f64,
    /// Model-sized buffers that noise may take.
    pub buffers: usize,
    /// Whether the guarantee may rely on a sampler.
    pub trusted: bool,
    /// What the guarantee is about.
    pub conditions: Conditions,
    /// Noise decay: the fraction of past noise that later gradients undo at the largest step. Noise moves an iterate, and the next
    /// gradients move it back, so noise fades. Noise that fades should be correlated differently from noise that stays. 0 is for
    /// iterates whose gradients do not react to noise. The guarantee does not depend on it.
    pub pull: f64,
}

/// Default limit on the buffers of the noise.
pub const BUFFERS: usize = 8;

/// A pull that has served training: 0.01 to 0.1 were better than none on small networks, most of all at small ε.
pub const PULL: f64 = 0.03;

/// Steps from which on a plan weighs only what can be fitted in time: mechanisms in bins, and streams where the sampler does not
/// count.
const LONG: usize = 20_000;

impl Request {
    /// A request with a clip of 1, up to eight buffers, a sampler that is trusted, and no pull.
    ///
    /// Errors: those of [`Request::check`].
    pub fn new(
        workload: Workload,
        examples: u64,
        batch: u64,
        epochs: usize,
        epsilon: f64,
        delta: f64,
    ) -> Result<Self> {
        let (clip, buffers, trusted, conditions, pull) = (1.0, BUFFERS, true, Conditions::default(), 0.0);
        let request = Self {
            workload,
            examples,
            batch,
            epochs,
            epsilon,
            delta,
            clip,
            buffers,
            trusted,
            conditions,
            pull,
        };
        request.check()?;
        Ok(request)
    }

    /// Steps that pass over the data once: examples over the batch, rounded, and at least one.
    ///
    /// Errors: no examples, a batch that is empty or larger than the data.
    pub fn steps_per_epoch(examples: u64, batch: u64) -> Result<usize> {
        if examples == 0 {
            return Err(Error::argument("examples", 0, "at least one is needed"));
        }
        if batch == 0 || batch > examples {
            let rule = "it must be at least 1 and not above the number of examples";
            return Err(Error::argument("batch", batch, rule));
        }
        // To the nearest, halves up, without overflow.
        let steps = examples / batch + u64::from(examples % batch >= batch - examples % batch);
        usize::try_from(steps).map_err(|_| Error::argument("examples", examples, "they make too many steps"))
    }

    /// Steps of all epochs.
    ///
    /// Errors: those of [`Request::steps_per_epoch`]; no epochs; more steps than a number of 31 bits counts.
    pub fn steps(examples: u64, batch: u64, epochs: usize) -> Result<usize> {
        let per_epoch = Self::steps_per_epoch(examples, batch)?;
        if epochs == 0 {
            return Err(Error::argument("epochs", 0, "at least one is needed"));
        }
        match per_epoch.checked_mul(epochs) {
            Some(steps) if i32::try_from(steps).is_ok() => Ok(steps),
            _ => Err(Error::Unsupported {
                what: format!("a plan of {epochs} epochs of {per_epoch} steps"),
                hint: "a plan has at most 2147483647 steps: use larger batches",
            }),
        }
    }

    /// Refuses what makes no sense.
    ///
    /// Errors: those of [`Request::steps`]; a workload of another number of steps, or one that is a matrix; ε or clip not
    /// positive and finite, δ outside (0, 1), a pull outside [0, 1).
    pub fn check(&self) -> Result<()> {
        let expected = Self::steps(self.examples, self.batch, self.epochs)?;
        let actual = self.workload.steps();
        if actual != expected {
            return Err(Error::WrongLength { name: "workload", actual, expected });
        }
        if self.workload.recurrence().is_none() {
            return Err(Error::Unsupported {
                what: "a plan for a matrix".into(),
                hint: "plans are for optimizers; factorize the matrix itself",
            });
        }
        check_epsilon(self.epsilon)?;
        check_delta(self.delta)?;
        if !(0.0..1.0).contains(&self.pull) {
            return Err(Error::argument("pull", self.pull, "it must be at least 0 and below 1"));
        }
        // No candidate with a sampler, DP-SGD among them, could be accounted for.
        PrivacyCurve::poisson(
            &[Phase { noise_multiplier: 1.0, rate: 0.5, rounds: 1 }],
            self.conditions.adjacency,
        )?;
        check_positive("clip", self.clip)
    }

    /// The request for iterates that are pulled back: a weight decay that the optimizer does not have stands for it.
    fn pulled(&self) -> Result<Self> {
        let Some((optimizer, rates)) = self.workload.optimizer().filter(|_| self.pull > 0.0) else {
            return Ok(self.clone());
        };
        let largest = rates.iter().fold(0.0_f64, |a, b| a.max(*b));
        if largest <= 0.0 {
            return Ok(self.clone());
        }
        let weight_decay = optimizer.weight_decay + self.pull / largest;
        let workload = Workload::sgd(rates.to_vec(), Optimizer { weight_decay, ..*optimizer })?;
        Ok(Self { workload, ..self.clone() })
    }

    /// Steps of one epoch.
    fn bins(&self) -> usize {
        self.workload.steps() / self.epochs
    }

    /// The participation without sampling.
    fn participation(&self) -> Participation {
        match self.epochs {
            1 => Participation::Single,
            times => Participation::Epochs { times },
        }
    }
}

/// Told in a line what is being weighed; [`ControlFlow::Break`] ends the planning.
pub type Listener<'a> = &'a mut dyn FnMut(&str) -> ControlFlow<()>;

/// A listener that hears nothing.
pub fn silent(_: &str) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// The best mechanism and sampler for a request, and all that was weighed.
#[derive(Clone, Debug)]
pub struct Plan {
    request: Request,
    candidates: Vec<Candidate>,
    unfitted: Vec<Unfitted>,
    chosen: usize,
    dp_sgd: usize,
    lower_bound: Option<f64>,
}

impl Plan {
    /// The request that it was made for.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// The one of least error that keeps to memory and trust.
    pub fn chosen(&self) -> &Candidate {
        &self.candidates[self.chosen]
    }

    /// Everything that was weighed, by error.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// The candidates that could not be compared.
    pub fn unfitted(&self) -> &[Unfitted] {
        &self.unfitted
    }

    /// Everything as rows of a table: what was weighed by error, then what could not be, with reasons.
    pub fn rows(&self) -> Vec<Row> {
        self.candidates.iter().map(Candidate::row).chain(self.unfitted.iter().map(Unfitted::row)).collect()
    }

    /// DP-SGD: independent noise and Poisson sampling.
    pub fn dp_sgd(&self) -> &Candidate {
        &self.candidates[self.dp_sgd]
    }

    /// No mechanism that does not count on sampling has an error below it.
    pub fn lower_bound_rmse(&self) -> Option<f64> {
        self.lower_bound
    }
}

/// Makes plans, and remembers fits.
#[derive(Default)]
pub struct Planner {
    cache: FitCache,
    quick: bool,
}

impl Planner {
    /// A planner that keeps fits in a cache.
    pub fn new(cache: FitCache) -> Self {
        Self { cache, quick: false }
    }

    /// A planner for those who wait at a screen: of each kind it fits the form that is likely best, and leaves out the others.
    pub fn quick(self) -> Self {
        Self { quick: true, ..self }
    }

    /// Fits run so far; those found in the cache do not count.
    ///
    /// Most of the time of a plan goes into them.
    pub fn fits(&self) -> usize {
        self.cache.fits
    }

    /// Weighs all mechanisms and samplers.
    ///
    /// Errors: those of [`Request::check`]; [`Error::Interrupted`]. Mechanisms that cannot be made are rows with a reason; it is
    /// an error if none is left.
    pub fn plan(&mut self, request: &Request, listen: Listener<'_>) -> Result<Plan> {
        self.weigh(request, true, listen)
    }

    /// A plan whose choice may rest on an estimate: for curves over many budgets, not for use.
    ///
    /// Errors: those of [`Planner::plan`].
    pub fn survey(&mut self, request: &Request, listen: Listener<'_>) -> Result<Plan> {
        self.weigh(request, false, listen)
    }

    fn weigh(&mut self, request: &Request, proved: bool, listen: Listener<'_>) -> Result<Plan> {
        request.check()?;
        let asked = request;
        let request = &asked.pulled()?;
        let (candidates, unfitted) = (Vec::new(), Vec::new());
        let mut weighing = Weighing { planner: self, request, listen: &mut *listen, candidates, unfitted };
        weighing.poisson()?;
        weighing.bins()?;
        let lower_bound = weighing.unsampled()?;
        let Weighing { mut candidates, mut unfitted, .. } = weighing;
        candidates.sort_by(|a, b| a.rank().total_cmp(&b.rank()));
        let none = || Error::Unsupported {
            what: "a plan within these limits".into(),
            hint: "no mechanism meets both the budget and the limit on buffers",
        };
        // What can be run is proved; estimates are only for those that lose.
        let mut proofs = 0;
        let chosen = loop {
            let best = candidates.iter().position(|c| c.excluded().is_none()).ok_or_else(none)?;
            if candidates[best].is_proved() || !proved {
                break best;
            }
            let candidate = candidates.remove(best);
            let sampling = candidate.mechanism().sampling();
            let selector = candidate.mechanism().family().ok_or_else(none)?;
            proofs += 1;
            // All proofs of a plan share the probability that one of them fails.
            let made = match proofs <= PROOFS {
                true => candidate.proved(request, &mut self.cache.sealed, listen),
                false => Err(Error::Unsupported {
                    what: "one more proof for a plan".into(),
                    hint: "all proofs of a plan share one probability of failure, which is used up",
                }),
            };
            match made {
                Ok(proved) => {
                    let place = candidates.partition_point(|c| c.rank() < proved.rank());
                    candidates.insert(place, proved);
                }
                Err(error) => unfitted.push(Unfitted::new(selector, sampling, error)?),
            }
        };
        let dp_sgd = candidates.iter().position(Candidate::is_dp_sgd).ok_or_else(none)?;
        if asked.pull > 0.0 {
            let served = candidates.into_iter().map(|candidate| candidate.with_workload(&asked.workload));
            candidates = served.collect::<Result<_>>()?;
        }
        Ok(Plan { request: asked.clone(), candidates, unfitted, chosen, dp_sgd, lower_bound })
    }
}

fn report(listen: Listener<'_>, line: &str) -> Result<()> {
    match listen(line).is_break() {
        true => Err(Error::Interrupted { iterations: 0, gap: f64::INFINITY }),
        false => Ok(()),
    }
}

/// A plan in the making.
struct Weighing<'a, 'b> {
    planner: &'a mut Planner,
    request: &'a Request,
    listen: Listener<'b>,
    candidates: Vec<Candidate>,
    unfitted: Vec<Unfitted>,
}

impl Weighing<'_, '_> {
    /// Parts that take turns: powers of two as numbers of bands, then numbers around the best.
    fn poisson(&mut self) -> Result<()> {
        /// Numbers of bands that are tried around the best.
        const AROUND: usize = 5;
        let (most, limit) = (self.request.bins(), self.request.buffers.saturating_add(1));
        if self.is_long() {
            self.banded("banded-toeplitz", 1)?;
            let rate = (2.0 * self.request.batch as f64 / self.request.examples as f64).min(1.0);
            return self.left_out("banded-toeplitz:bands=2", Sampling::CyclicPoisson { bands: 2, rate });
        }
        let mut counts: Vec<usize> =
            std::iter::successors(Some(1), |g| Some(2 * g)).take_while(|g| *g < most).collect();
        counts.extend([most, limit.min(most)]);
        counts.sort_unstable();
        counts.dedup();
        let mut errors = Vec::new();
        for bands in counts {
            errors.push((bands, self.banded("banded-toeplitz", bands)?));
        }
        let best = |errors: &[(usize, f64)]| {
            let fits = errors.iter().enumerate().filter(|(_, (bands, _))| *bands <= limit);
            fits.min_by(|a, b| a.1.1.total_cmp(&b.1.1)).map_or(0, |(place, _)| place)
        };
        // The error falls, then rises, with the number of bands: halve the wider gap beside the best.
        for _ in 0..AROUND {
            let place = best(&errors);
            let bands = errors[place].0;
            let below = place.checked_sub(1).map_or(bands, |place| errors[place].0);
            let above = errors.get(place + 1).map_or(bands, |(above, _)| (*above).min(limit));
            let next = match (bands - below, above.max(bands) - bands) {
                (down, up) if up > 1 && up >= down => bands + up / 2,
                (down, _) if down > 1 => bands - down / 2,
                (_, up) if up > 1 => bands + up / 2,
                _ => break,
            };
            let error = self.banded("banded-toeplitz", next)?;
            errors.push((next, error));
            errors.sort_by_key(|(bands, _)| *bands);
        }
        let (bands, _) = errors[best(&errors)];
        // Each entry for itself, where that is affordable.
        if bands > 1 && !self.planner.quick && bands * self.request.workload.steps() <= 1 << 14 {
            self.banded("banded", bands)?;
        }
        Ok(())
    }

    fn is_long(&self) -> bool {
        self.request.workload.steps() > LONG
    }

    /// A row for what is not fitted.
    fn left_out(&mut self, name: &str, sampling: Sampling) -> Result<()> {
        let reason = Error::Unsupported {
            what: format!("{name} over more than {LONG} steps"),
            hint: "it is left out: its fit takes too long, and blt mechanisms in bins have less error",
        };
        self.unfitted.push(Unfitted::new(name.parse()?, sampling, reason)?);
        Ok(())
    }

    /// Takes in what was made, or why it was not; returns the error of its iterates, infinite where there is none.
    fn weighed(&mut self, selector: Selector, sampling: Sampling, made: Result<Candidate>) -> Result<f64> {
        match made {
            Ok(candidate) => {
                let rmse = candidate.rmse();
                self.candidates.push(candidate);
                Ok(rmse)
            }
            Err(error) => {
                self.unfitted.push(Unfitted::new(selector, sampling, error)?);
                Ok(f64::INFINITY)
            }
        }
    }

    /// A banded encoder under cyclic Poisson sampling; returns the error.
    fn banded(&mut self, family: &str, bands: usize) -> Result<f64> {
        let request = self.request;
        let rate = (bands as f64 * request.batch as f64 / request.examples as f64).min(1.0);
        let sampling = Sampling::CyclicPoisson { bands, rate };
        let selector: Selector = match bands {
            1 => "independent".parse()?,
            _ => family.parse::<Selector>()?.with(Budget { bands: Some(bands), ..Budget::default() })?,
        };
        report(self.listen, &format!("{bands} parts that take turns"))?;
        let made = self.banded_candidate(selector, sampling);
        self.weighed(selector, sampling, made)
    }

    fn banded_candidate(&mut self, selector: Selector, sampling: Sampling) -> Result<Candidate> {
        let request = self.request;
        // Columns of one unit do not meet, so that each counts for itself.
        let problem = || Problem::new(request.workload.clone(), Participation::Single);
        let form =
            self.planner.cache.fit(&request.workload, selector, None, problem, &mut observer(self.listen))?;
        let participation = sampling.participation(request.workload.steps())?.unwrap_or_default();
        let mechanism = Mechanism::sampled(request.workload.clone(), &form, participation, sampling)?;
        let sealed = &mut self.planner.cache.sealed;
        Candidate::exact(mechanism.with_family(selector), request, None, sealed)
    }

    /// Balls in bins: no buffer, one, and two.
    fn bins(&mut self) -> Result<()> {
        let request = self.request;
        let bins = request.bins();
        // What may not be chosen is not worth a fit.
        if bins < 2 || !request.trusted {
            return Ok(());
        }
        let sampling = Sampling::BallsInBins { bins };
        // Long runs over many bins take tens of seconds a fit: one has to do.
        let few = self.planner.quick || bins * request.workload.steps() > 1 << 20;
        let names: &[&str] = match (few, request.buffers) {
            (true, 0) => &["banded-inverse:bands=2"],
            (true, 1) => &["blt:buffers=1"],
            (true, _) => &["blt:buffers=2"],
            (false, _) => &["banded-inverse:bands=2", "blt:buffers=1", "blt:buffers=2"],
        };
        for name in names {
            let selector: Selector = name.parse()?;
            report(self.listen, &format!("{bins} bins with {name}"))?;
            let made = self.best_in_bins(selector, sampling);
            self.weighed(selector, sampling, made)?;
        }
        self.reshuffled(bins)
    }

    /// Bins that are drawn anew, with as many exponentials as fit in memory.
    fn reshuffled(&mut self, bins: usize) -> Result<()> {
        /// Steps times bins beyond which a fit takes minutes.
        const MOST: usize = 1 << 18;
        let request = self.request;
        // Once is what dealing once does, too.
        if request.epochs < 2 || self.planner.quick || bins * request.workload.steps() > MOST {
            return Ok(());
        }
        let name = match request.buffers {
            0 => "banded-inverse:bands=2",
            1 => "blt:buffers=1",
            _ => "blt:buffers=2",
        };
        let (selector, sampling) = (name.parse::<Selector>()?, Sampling::ReshuffledBins { bins });
        report(self.listen, &format!("{bins} bins, reshuffled in every epoch, with {name}"))?;
        let made = self.best_in_bins(selector, sampling);
        self.weighed(selector, sampling, made)?;
        Ok(())
    }

    /// The best form for bins: that of a fit, or one that was fitted for another budget and is better. A fit that fails starts
    /// again from that of a neighbouring budget.
    fn best_in_bins(&mut self, selector: Selector, sampling: Sampling) -> Result<Candidate> {
        /// Factors of ε and δ of the neighbours that a fit may start from, the easier ones first.
        const NEIGHBOURS: [(f64, f64); 4] = [(1.0, 10.0), (1.5, 1.0), (2.0, 100.0), (0.7, 1.0)];
        let Request { epsilon, delta, .. } = *self.request;
        let goal = Goal { sampling, epsilon, delta };
        let mut relatives = self.planner.cache.relatives(&self.request.workload, selector, Some(goal));
        let mut made = self.in_bins(selector, goal);
        for (times, share) in NEIGHBOURS {
            match made {
                Ok(_) | Err(Error::Interrupted { .. }) => break,
                Err(_) => {}
            }
            let neighbour = Goal { epsilon: epsilon * times, delta: (delta * share).min(0.1), ..goal };
            report(self.listen, &format!("starting again from a neighbouring budget with {selector}"))?;
            if self.fitted_in_bins(selector, neighbour).is_ok() {
                made = self.in_bins(selector, goal);
            }
        }
        if made.is_err() {
            relatives = self.planner.cache.relatives(&self.request.workload, selector, Some(goal));
        }
        for form in relatives {
            match (self.estimated(selector, sampling, &form), &made) {
                (Ok(other), Ok(own)) if other.rmse() >= own.rmse() => {}
                (Err(_), _) => {}
                (other, _) => made = other,
            }
        }
        made
    }

    fn in_bins(&mut self, selector: Selector, goal: Goal) -> Result<Candidate> {
        let form = self.fitted_in_bins(selector, goal)?;
        self.estimated(selector, goal.sampling, &form)
    }

    fn fitted_in_bins(&mut self, selector: Selector, goal: Goal) -> Result<Form> {
        let workload = &self.request.workload;
        let problem = || Problem::sampled(workload.clone(), goal);
        self.planner.cache.fit(workload, selector, Some(goal), problem, &mut observer(self.listen))
    }

    fn estimated(&mut self, selector: Selector, sampling: Sampling, form: &Form) -> Result<Candidate> {
        let request = self.request;
        let meant = sampling.participation(request.workload.steps())?;
        let participation = meant.unwrap_or_else(|| request.participation());
        let mechanism = Mechanism::sampled(request.workload.clone(), form, participation, sampling)?;
        Candidate::estimated(mechanism.with_family(selector), request, &mut self.planner.cache.sealed)
    }

    /// No sampling: the certified bound, and the streams of the optimum where they may win.
    fn unsampled(&mut self) -> Result<Option<f64>> {
        let request = self.request;
        let (n, participation) = (request.workload.steps(), request.participation());
        report(self.listen, "the certified bound without sampling")?;
        if self.is_long() {
            return self.long_unsampled();
        }
        // A bound within a thousandth of the best tells as much, in a fraction of the time.
        let options = Options { gap: 1e-3, ..Options::default() };
        let problem =
            Problem::with_solver(request.workload.clone(), participation, Solver::default(), options)?;
        let bound = match self.planner.cache.bound(&problem, &mut observer(self.listen)) {
            Ok(bound) => Some(bound),
            Err(error) => {
                self.unfitted.push(Unfitted::new("optimal".parse()?, Sampling::None, error)?);
                None
            }
        };
        let independent: Selector = "independent".parse()?;
        let form = independent.family().fit(&problem, &independent.budget(), &mut observer(self.listen))?;
        let plain = Mechanism::new(request.workload.clone(), &form, participation)?.with_family(independent);
        let plain = Candidate::exact(plain, request, bound, &mut self.planner.cache.sealed)?;
        let sigma = plain.noise_multiplier();
        let least = bound.map(|bound| sigma * (bound / n as f64).sqrt());
        self.candidates.push(plain);
        let best = self.candidates.iter().filter(|c| c.excluded().is_none()).map(Candidate::rmse);
        let best = best.fold(f64::INFINITY, f64::min);
        let buffers = request.buffers;
        let streams: Vec<String> = match participation {
            Participation::Single => {
                vec![format!("state-space:buffers={}", buffers.min(4)), "banded-inverse:bands=2".into()]
            }
            _ => {
                let recalls = (request.epochs - 1).min(3);
                vec![
                    format!("recall:buffers={}:recalls={recalls}", buffers.min(2)),
                    "banded-inverse:bands=2".into(),
                ]
            }
        };
        // The streams come within a percent or two of the bound.
        if least.is_none_or(|least| 1.01 * least < best) {
            for name in streams {
                let selector: Selector = name.parse()?;
                report(self.listen, &format!("no sampling with {name}"))?;
                let made = self.stream(selector, participation, bound);
                self.weighed(selector, Sampling::None, made)?;
            }
        }
        Ok(least)
    }

    /// The same for long runs: a stream where nothing else may be chosen.
    fn long_unsampled(&mut self) -> Result<Option<f64>> {
        let (request, participation) = (self.request, self.request.participation());
        let name = match participation {
            Participation::Single => format!("state-space:buffers={}", request.buffers.min(4)),
            _ => format!("recall:buffers={}:recalls=1", request.buffers.min(2)),
        };
        self.left_out("optimal", Sampling::None)?;
        if request.trusted {
            self.left_out(&name, Sampling::None)?;
        } else {
            let selector: Selector = name.parse()?;
            report(self.listen, &format!("no sampling with {name}"))?;
            let made = self.stream(selector, participation, None);
            self.weighed(selector, Sampling::None, made)?;
        }
        Ok(None)
    }

    fn stream(
        &mut self,
        selector: Selector,
        participation: Participation,
        bound: Option<f64>,
    ) -> Result<Candidate> {
        let workload = &self.request.workload;
        let problem = || Problem::new(workload.clone(), participation);
        let form = self.planner.cache.fit(workload, selector, None, problem, &mut observer(self.listen))?;
        let mechanism = Mechanism::new(workload.clone(), &form, participation)?;
        Candidate::exact(mechanism.with_family(selector), self.request, bound, &mut self.planner.cache.sealed)
    }
}

/// Reports the steps of a solver to a listener, a few times a second.
pub fn observer<'a>(listen: Listener<'a>) -> impl FnMut(&Progress) -> ControlFlow<()> + 'a {
    let mut last_report = std::time::Instant::now();
    move |progress: &Progress| {
        if last_report.elapsed().as_millis() < 300 {
            return ControlFlow::Continue(());
        }
        last_report = std::time::Instant::now();
        listen(&format!("fitting, step {}", progress.iteration))
    }
}

#[cfg(test)]
mod neighbours;
#[cfg(test)]
mod tests;
