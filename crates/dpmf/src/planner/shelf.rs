//! Fits and bounds that were found before, in memory and, if a folder is given, on disk.

use crate::error::Result;
use crate::factorize::Observer;
use crate::family::Selector;
use crate::form::{Form, Representation, StateSpace};
use crate::format;
use crate::identity::Identity;
use crate::mechanism::Mechanism;
use crate::participation::{Participation, Sampling};
use crate::problem::{Goal, Problem};
use crate::workload::Workload;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::path::PathBuf;

/// What has been fitted before. Nothing that is taken from it is believed: forms are measured anew, and bounds are proved.
#[derive(Default)]
pub struct Shelf {
    folder: Option<PathBuf>,
    forms: HashMap<String, Form>,
    bounds: HashMap<String, f64>,
    /// The last forms for bins of each kind, the latest last: starts of fits, and what a fit must not be worse than.
    relatives: HashMap<String, Vec<Form>>,
    /// Fits that were run because no shelf had them.
    pub(super) fits: usize,
}

impl Shelf {
    /// A shelf that is also a folder, made when something is put there. What cannot be read or written is done without.
    pub fn in_folder(folder: PathBuf) -> Self {
        Self { folder: Some(folder), ..Self::default() }
    }

    /// The form that a family fits to a problem, from the shelf if it is there.
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
            let relatives = self.relatives.entry(kind(workload, selector, goal)).or_default();
            relatives.push(form.clone());
            if relatives.len() > RELATIVES {
                relatives.remove(0);
            }
        }
        self.forms.insert(name, form.clone());
        Ok(form)
    }

    /// The last forms of a kind that were fitted here, for as many steps and bins and any budget, the latest last.
    pub(super) fn relatives(&self, workload: &Workload, selector: Selector, goal: Option<Goal>) -> Vec<Form> {
        self.relatives.get(&kind(workload, selector, goal)).cloned().unwrap_or_default()
    }

    /// The certified lower bound of a problem, proved anew if it was on disk.
    ///
    /// Errors: those of the solver.
    pub(super) fn bound(&mut self, problem: &Problem, observe: Observer<'_>) -> Result<f64> {
        let name = name(problem.workload(), problem.participation(), "bound", None)?;
        if let Some(bound) = self.bounds.get(&name) {
            return Ok(*bound);
        }
        let kept = self.read(&name).filter(|mechanism| {
            mechanism.participation() == problem.participation()
                && mechanism.workload().steps() == problem.steps()
        });
        // What is stated holds if what is proved anew is not less.
        let proved = kept.and_then(|mechanism| {
            let stated = mechanism.bound()?.lower_bound;
            (mechanism.recompute_bound().ok().flatten()? >= stated).then_some(stated)
        });
        let bound = match proved {
            Some(bound) => bound,
            None => {
                let independent = Form::StateSpace(StateSpace::independent(problem.steps())?);
                let mechanism = problem.deploy(&independent, observe)?;
                if let Ok(bytes) = format::to_bytes(&mechanism) {
                    self.write(&name, &bytes);
                }
                mechanism.bound().map_or(f64::NAN, |bound| bound.lower_bound)
            }
        };
        self.bounds.insert(name, bound);
        Ok(bound)
    }

    fn read(&self, name: &str) -> Option<Mechanism> {
        let bytes = std::fs::read(self.folder.as_ref()?.join(name)).ok()?;
        format::unpack(&bytes).ok()?.mechanism
    }

    /// A file under another name first, so that nobody reads half of it.
    fn write(&self, name: &str, bytes: &[u8]) {
        let Some(folder) = &self.folder else { return };
        let draft = folder.join(format!("{name}.{}", std::process::id()));
        let written = std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(&draft, bytes))
            .and_then(|()| std::fs::rename(&draft, folder.join(name)));
        if written.is_err() {
            let _ = std::fs::remove_file(draft);
        }
    }
}

/// Forms of a kind that are kept to start from and to compare with.
const RELATIVES: usize = 3;

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
    Ok(format!("{hex}.safetensors"))
}
