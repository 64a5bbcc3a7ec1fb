//! Fits and bounds that were found before, in memory and, if a folder is given, on disk.

use super::sealed::{Claim, Sealed, write};
use crate::error::Result;
use crate::factorize::Observer;
use crate::family::Selector;
use crate::form::{Form, Representation, StateSpace};
use crate::format;
use crate::identity::Identity;
use crate::mechanism::{Bound, Mechanism};
use crate::participation::{Participation, Sampling};
use crate::problem::{Goal, Problem};
use crate::workload::Workload;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::path::PathBuf;

/// Fits and proofs made before. Forms are measured anew whenever they are taken from it; noise multipliers and
/// bounds are believed if they were proved by this process, or carry the seal of the folder's key.
#[derive(Default)]
pub struct FitCache {
    folder: Option<PathBuf>,
    forms: HashMap<String, Form>,
    pub(super) sealed: Sealed,
    /// The last forms for bins of each kind, the latest last: starts of fits, and what a fit must not be worse than.
    relatives: HashMap<String, Vec<Form>>,
    /// Fits that were run because no cache had them.
    pub(super) fits: usize,
}

impl FitCache {
    /// A cache that is also a folder, made when something is put there. What cannot be read or written is done without.
    pub fn in_folder(folder: PathBuf) -> Self {
        Self { sealed: Sealed::in_folder(folder.clone()), folder: Some(folder), ..Self::default() }
    }

    /// The form that a family fits to a problem, from the cache if it is there.
    ///
    /// Errors: those of the fit.
    pub(super) fn fit(
        &mut self,
        workload: &Workload,
        selector: Selector,
        goal: Option<Goal>,
        problem: impl FnOnce() -> Result<Problem>,
        observe: Observer<'_>,
    ) -> Result<Form> {
        let problem = problem()?;
        let name = name(workload, problem.participation(), &selector.to_string(), goal)?;
        if let Some(form) = self.forms.get(&name) {
            return Ok(form.clone());
        }
        if let Some(mechanism) = self.read(&name)
            && mechanism.form().steps() == workload.steps()
        {
            self.forms.insert(name, mechanism.form().clone());
            return Ok(mechanism.form().clone());
        }
        let problem = match (goal, self.relatives(workload, selector, goal).pop()) {
            (Some(_), Some(form)) => problem.near(form),
            _ => problem,
        };
        self.fits += 1;
        let form = selector.family().fit(&problem, &selector.budget(), observe)?.deployed()?;
        // Kept without its participation: what it is worth is found out whenever it is used.
        let kept = Mechanism::new(workload.clone(), &form, Participation::Single);
        if let Ok(bytes) = kept.and_then(|mechanism| format::to_bytes(&mechanism)) {
            self.write(&name, &bytes);
        }
        if goal.is_some() {
            let kind = kind(workload, selector, goal);
            let mut names = self.index(&kind);
            names.retain(|other| *other != name);
            names.push(name.clone());
            names.drain(..names.len().saturating_sub(RELATIVES));
            self.write(&index(&kind), names.join("\n").as_bytes());
            let relatives = self.relatives.entry(kind).or_default();
            relatives.push(form.clone());
            relatives.drain(..relatives.len().saturating_sub(RELATIVES));
        }
        self.forms.insert(name, form.clone());
        Ok(form)
    }

    /// The last forms of a kind that were fitted, for as many steps and bins and any budget, the latest last.
    pub(super) fn relatives(
        &mut self,
        workload: &Workload,
        selector: Selector,
        goal: Option<Goal>,
    ) -> Vec<Form> {
        let kind = kind(workload, selector, goal);
        if let Some(relatives) = self.relatives.get(&kind) {
            return relatives.clone();
        }
        let forms = self.index(&kind).into_iter().filter_map(|name| Some(self.read(&name)?.form().clone()));
        let relatives: Vec<Form> = forms.filter(|form| form.steps() == workload.steps()).collect();
        self.relatives.insert(kind, relatives.clone());
        relatives
    }

    /// The files of the last forms of a kind.
    fn index(&self, kind: &str) -> Vec<String> {
        let Some(folder) = &self.folder else { return Vec::new() };
        let text = std::fs::read_to_string(folder.join(index(kind))).unwrap_or_default();
        let name = |line: &&str| line.len() < 64 && line.ends_with(SUFFIX) && !line.contains(['/', '\\']);
        text.lines().filter(name).map(str::to_owned).collect()
    }

    /// The certified lower bound of a problem.
    ///
    /// Errors: those of the solver.
    pub(super) fn bound(&mut self, problem: &Problem, observe: Observer<'_>) -> Result<f64> {
        let name = name(problem.workload(), problem.participation(), "bound", None)?;
        let claim = Claim::new("bound", &[name.as_bytes()]);
        if let Some(bound) = self.sealed.get(claim) {
            return Ok(bound);
        }
        let bound = Bound::from(problem.optimum(observe)?).lower_bound;
        self.sealed.put(claim, bound);
        Ok(bound)
    }

    fn read(&self, name: &str) -> Option<Mechanism> {
        let bytes = std::fs::read(self.folder.as_ref()?.join(name)).ok()?;
        format::unpack(&bytes).ok()?.mechanism
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        if let Some(folder) = &self.folder {
            write(folder, name, bytes);
        }
    }
}

/// Forms of a kind that are kept to start from and to compare with.
const RELATIVES: usize = 3;

/// How files of forms end.
const SUFFIX: &str = ".safetensors";

/// The file that lists the last forms of a kind.
fn index(kind: &str) -> String {
    let hash = Sha256::digest(kind.as_bytes());
    let hex: String = hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("{hex}.index")
}

fn kind(workload: &Workload, selector: Selector, goal: Option<Goal>) -> String {
    let sampling = goal.map_or(Sampling::None, |goal| goal.sampling);
    format!("{selector} {sampling} {}", workload.steps())
}

/// A file name for a problem: the workload, the participation, what is fitted, and the budget it is for.
fn name(workload: &Workload, participation: Participation, what: &str, goal: Option<Goal>) -> Result<String> {
    let plain = Form::StateSpace(StateSpace::independent(workload.steps())?);
    let sampling = goal.map_or(Sampling::None, |goal| goal.sampling);
    let identity = Identity::new(workload, &plain, participation, sampling, None);
    let mut hash = Sha256::new();
    for part in ["dpmf shelf", env!("CARGO_PKG_VERSION"), what] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.update(identity.0);
    if let Some(goal) = goal {
        hash.update(goal.epsilon.to_le_bytes());
        hash.update(goal.delta.to_le_bytes());
    }
    let hex: String = hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{hex}{SUFFIX}"))
}
