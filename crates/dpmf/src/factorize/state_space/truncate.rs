//! How many states are enough.

use super::Tell;
use super::assemble::Assembly;
use super::plant::Plant;
use super::sweep::{FullStep, Sweep};
use crate::error::{Error, Result};
use crate::form::{Representation, StateSpace};

/// How many states to keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    /// As many as given, or fewer when the filter has no more.
    Fixed(usize),
    /// The best of all orders up to the one given: where coefficients are rounded, fewer states may be better.
    AtMost(usize),
    /// As few as keep `√(loss/lower_bound)` of what is deployed within `1 + excess`.
    Tolerance {
        /// Admissible relative excess of the root loss over the bound.
        excess: f64,
        /// A lower bound on the total loss of every factorization of the workload.
        lower_bound: f64,
        /// States not to be exceeded.
        max: usize,
    },
}

/// Relative error of the covariance when the order is fixed: its square, 1e-8, is what the loss sees.
const COVARIANCE_ERROR: f64 = 1e-4;

/// The least that is asked of the covariance for a tolerance.
const COVARIANCE_FLOOR: f64 = 1e-6;

/// Most states that the first attempt at a tolerance tells apart, by what is kept in memory for it; and by how many more the next.
const FIRST_ATTEMPT: usize = 12;
const FIRST_OF_MANY: usize = 8;
const MORE: usize = 4;

/// Steps from which those of many count: a record of 12 states would be some hundred megabytes.
const MANY: usize = 1 << 18;

pub(super) fn optimal(plant: Plant<'_>, v: &[f64], tolerance: f64) -> Result<StateSpace> {
    let sweep = Sweep::new(plant, v, tolerance)?;
    let mut assembly = Assembly::new(sweep.steps(), sweep.states());
    sweep.untruncated(|step| assembly.push(&step))?;
    assembly.finish()
}

/// `energy` is `‖A N‖_F²` of a filter, for the workload that it is to serve.
pub(super) fn truncated(
    plant: Plant<'_>,
    v: &[f64],
    order: Order,
    energy: &dyn Fn(&StateSpace) -> f64,
    tell: Tell<'_>,
) -> Result<StateSpace> {
    match order {
        Order::Fixed(order) => {
            let sweep = Sweep::new(plant, v, COVARIANCE_ERROR)?;
            let order = order.min(sweep.useful_states());
            let mut assembly = Assembly::new(sweep.steps(), order);
            sweep.truncated(order, &mut |share| tell(0, Some(share)), |step| assembly.push(&step))?;
            assembly.finish()?.deployed()
        }
        Order::AtMost(order) => {
            let sweep = Sweep::new(plant, v, COVARIANCE_ERROR)?;
            let record =
                Record::of(&sweep, order.min(sweep.useful_states()), &mut |share| tell(0, Some(share)))?;
            let mut best: Option<(f64, StateSpace)> = None;
            for order in 0..=record.order {
                tell(order, None)?;
                let (loss, filter) = deployed(|| record.replay(order), energy)?;
                if best.as_ref().is_none_or(|(least, _)| loss < *least) {
                    best = Some((loss, filter));
                }
            }
            let (_, filter) = best.expect("the filter without states is one of them");
            Ok(filter)
        }
        Order::Tolerance { excess, lower_bound, max } => {
            if !(excess > 0.0 && excess.is_finite()) {
                return Err(Error::argument("tolerance", excess, "it must be positive and finite"));
            }
            if !(lower_bound > 0.0 && lower_bound.is_finite()) {
                return Err(Error::argument("lower bound", lower_bound, "it must be positive and finite"));
            }
            let mut target = Target { energy, excess, lower_bound, tried: 0, tell };
            // The loss is stationary, an error ε in the covariance costs about ε²/10, but where constraints do not bind.
            let coarse = (0.1 * excess.sqrt()).clamp(COVARIANCE_FLOOR, 1e-2);
            let mut failure = None;
            for tolerance in [coarse, COVARIANCE_FLOOR] {
                match target.reach(&Sweep::new(plant.clone(), v, tolerance)?, max)? {
                    Ok(filter) => return Ok(filter),
                    Err(error) => failure = Some(error),
                }
            }
            Err(failure.expect("both attempts failed"))
        }
    }
}

/// A filter as deployed, with its loss `γ²‖A N‖_F²`: with all columns of norm 1, or with slack if that is better.
///
/// It is made anew for each, so that one is in memory at a time.
fn deployed(
    make: impl Fn() -> Result<StateSpace>,
    energy: &dyn Fn(&StateSpace) -> f64,
) -> Result<(f64, StateSpace)> {
    let loss = |filter: &StateSpace| {
        filter.encoder_column_norms_sq().into_iter().fold(0.0, f64::max) * energy(filter)
    };
    let filter = make()?;
    let slack = filter.slack();
    let full = filter.deployed()?;
    let least = loss(&full);
    let Some(targets) = slack else { return Ok((least, full)) };
    drop(full);
    let slack = make()?.deployed_to(&targets)?;
    match loss(&slack) {
        better if better < least => Ok((better, slack)),
        _ => {
            drop(slack);
            Ok((least, make()?.deployed()?))
        }
    }
}

/// What the deployed filter has to reach.
struct Target<'a> {
    energy: &'a dyn Fn(&StateSpace) -> f64,
    excess: f64,
    lower_bound: f64,
    /// Filters so far.
    tried: usize,
    tell: Tell<'a>,
}

impl Target<'_> {
    /// The smallest filter of up to `max` states that reaches the target, or why there is none.
    fn reach(&mut self, sweep: &Sweep<'_>, max: usize) -> Result<Result<StateSpace>> {
        let max = max.min(sweep.useful_states());
        let many = sweep.steps() >= MANY;
        let (first, more) = if many { (FIRST_OF_MANY, MORE) } else { (FIRST_ATTEMPT, FIRST_ATTEMPT) };
        let mut room = first.min(max);
        loop {
            let tried = self.tried;
            let record = Record::of(sweep, room, &mut |share| (self.tell)(tried, Some(share)))?;
            let (least, found) = self.search(&record)?;
            match found {
                Some(filter) => return Ok(Ok(filter)),
                None if room < max => room = (room + more).min(max),
                None => {
                    let reason = match record.lost[room] <= self.excess * self.lower_bound {
                        true => "its coefficients are 32-bit numbers, and rounding is what is left",
                        false => "more states would come closer",
                    };
                    let (excess, target) = (least, self.excess);
                    return Ok(Err(Error::TooFewStates { states: max, excess, target, reason }));
                }
            }
        }
    }

    /// The smallest filter that reaches the target, if any, and the least excess seen.
    fn search(&mut self, record: &Record) -> Result<(f64, Option<StateSpace>)> {
        let max = record.order;
        let mut attempt = |order: usize| -> Result<(f64, StateSpace)> {
            (self.tell)(self.tried, None)?;
            self.tried += 1;
            let (loss, filter) = deployed(|| record.replay(order), self.energy)?;
            Ok(((loss / self.lower_bound).sqrt() - 1.0, filter))
        };
        let guess = |&order: &usize| record.lost[order] <= 2.0 * self.excess * self.lower_bound;
        let mut order = (0..max).find(guess).unwrap_or(max);
        let (mut least, mut failed) = (f64::INFINITY, None);
        // Up after a failure, down after a success, until a success stands above a failure. One filter is
        // in memory at a time; the one found may have to be built twice.
        loop {
            let (excess, filter) = attempt(order)?;
            least = least.min(excess);
            if excess > self.excess {
                if order == max {
                    return Ok((least, None));
                }
                failed = Some(order);
                order += 1;
                continue;
            }
            // Small losses of neighbouring orders stand in the ratio of their estimates, to some tens of
            // per cent.
            let hopeless = |fewer: usize| {
                let (here, there) = (record.lost[order], record.lost[fewer]);
                here > 0.0 && self.excess < 0.1 && excess * there > 2.0 * self.excess * here
            };
            if order == 0 || failed == Some(order - 1) || hopeless(order - 1) {
                return Ok((least, Some(filter)));
            }
            order -= 1;
        }
    }
}

/// The steps of a filter in balanced bases, so that a filter of fewer states is its leading part.
///
/// In f32: what is deployed is rounded to it anyway, and transitions are kept as increments.
struct Record {
    steps: usize,
    order: usize,
    values: Vec<f32>,
    /// Energy that a filter of `r` states loses in the iterates, estimated: what enters the states it
    /// lacks, by their share in the output.
    lost: Vec<f64>,
}

impl Record {
    /// The sweep in bases of `order` states; `tell` hears the share of it that is done.
    fn of(sweep: &Sweep<'_>, order: usize, tell: &mut dyn FnMut(f64) -> Result<()>) -> Result<Self> {
        let steps = sweep.steps();
        let values = Vec::with_capacity(steps * (order + 1) * (order + 1));
        let mut record = Self { steps, order, values, lost: vec![0.0; order + 1] };
        sweep.truncated(order, tell, |step| record.push(&step))?;
        Ok(record)
    }

    fn push(&mut self, step: &FullStep<'_>) {
        self.values.push(step.direct as f32);
        self.values.extend(step.output.iter().chain(step.input).map(|&x| x as f32));
        for (k, row) in step.transition.chunks_exact(self.order.max(1)).enumerate() {
            let energy = step.hankel[k] * step.hankel[k];
            let mut entering = step.input[k] * step.input[k];
            for r in 0..=k {
                self.lost[r] += energy * entering;
                entering += row[r] * row[r];
            }
            self.values
                .extend(row.iter().enumerate().map(|(l, &f)| (f - f64::from(u8::from(k == l))) as f32));
        }
    }

    fn replay(&self, order: usize) -> Result<StateSpace> {
        let mut assembly = Assembly::new(self.steps, order);
        let mut transition = vec![0.0; order * order];
        let (mut output, mut input) = (vec![0.0; order], vec![0.0; order]);
        let copy = |out: &mut [f64], values: &[f32]| {
            out.iter_mut().zip(values).for_each(|(o, &x)| *o = f64::from(x));
        };
        for step in self.values.chunks_exact((self.order + 1) * (self.order + 1)) {
            let (vectors, rows) = step[1..].split_at(2 * self.order);
            copy(&mut output, vectors);
            copy(&mut input, &vectors[self.order..]);
            let rows = rows.chunks_exact(self.order.max(1)).zip(transition.chunks_exact_mut(order.max(1)));
            for (k, (row, out)) in rows.enumerate() {
                copy(out, row);
                out[k] += 1.0;
            }
            assembly.push(&FullStep {
                direct: f64::from(step[0]),
                output: &output,
                input: &input,
                transition: &transition,
                hankel: &[],
            });
        }
        assembly.finish()
    }
}
