//! All mechanisms by name, for tables, training and tests.

use crate::error::{Error, Result};
use crate::factorization::tree::Decoder;
use crate::factorization::{Factorization, Independent, Structured, Toeplitz, Tree};
use crate::factorize::{Observer, Optimum, Options, Solver, Target, optimal};
use crate::mechanism::{Bound, Mechanism};
use crate::participation::Participation;
use crate::workload::Workload;
use faer::Mat;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::cell::OnceCell;

/// A mechanism by its name in every table.
///
/// Those made for the prefix sum serve any other workload by post-processing, `B = A S⁻¹B_S`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Independent noise at every step, as in DP-SGD.
    Independent,
    /// Tree aggregation with the plain binary decoder.
    Tree,
    /// Tree aggregation with Honaker's estimator from below, as in DP-FTRL.
    HonakerOnline,
    /// Tree aggregation with Honaker's estimator from all nodes.
    HonakerFull,
    /// The square root of the prefix sum.
    SqrtToeplitz,
    /// The optimum of the prefix sum.
    OptimalPrefix,
    /// The paper's streaming approximation of the optimum: a few diagonals and a masked low-rank part.
    Structured,
    /// The optimum of the workload.
    Optimal,
    /// The optimum of the workload as a stream of a few states.
    StateSpace,
}

impl Method {
    /// Every mechanism, in the order of the tables.
    pub const ALL: [Method; 9] = [
        Method::Independent,
        Method::Tree,
        Method::HonakerOnline,
        Method::HonakerFull,
        Method::SqrtToeplitz,
        Method::OptimalPrefix,
        Method::Structured,
        Method::Optimal,
        Method::StateSpace,
    ];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Method::Independent => "independent",
            Method::Tree => "tree",
            Method::HonakerOnline => "honaker-online",
            Method::HonakerFull => "honaker-full",
            Method::SqrtToeplitz => "sqrt-toeplitz",
            Method::OptimalPrefix => "optimal-prefix",
            Method::Structured => "structured",
            Method::Optimal => "optimal",
            Method::StateSpace => "state-space",
        }
    }
}

impl std::str::FromStr for Method {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Method::ALL.into_iter().find(|method| method.name() == text);
        found.ok_or_else(|| {
            Error::argument(
                "mechanism",
                text,
                "it must be independent, tree, honaker-online, honaker-full, sqrt-toeplitz, optimal-prefix, \
                 structured, optimal or state-space",
            )
        })
    }
}

/// Builds mechanisms for one workload, solving for each optimum once.
pub struct Catalog {
    workload: Workload,
    solver: Solver,
    options: Options,
    optimum: OnceCell<Optimum>,
    prefix: OnceCell<Optimum>,
    /// The decoder that structured forms are fitted to, O(n³) to make.
    decoder: OnceCell<Mat<f64>>,
}

impl Catalog {
    /// A catalogue for the workload; nothing is solved yet.
    pub fn new(workload: Workload, solver: Solver, options: Options) -> Self {
        let (optimum, prefix, decoder) = (OnceCell::new(), OnceCell::new(), OnceCell::new());
        Self { workload, solver, options, optimum, prefix, decoder }
    }

    /// The workload.
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// The optimum of the workload.
    pub fn optimum(&self, observe: Observer<'_>) -> Result<&Optimum> {
        solved(&self.optimum, || optimal(&self.workload, self.solver, &self.options, observe))
    }

    /// The optimum of the prefix sum with as many steps.
    fn prefix(&self, observe: Observer<'_>) -> Result<&Optimum> {
        if self.workload.is_prefix_sum() {
            return self.optimum(observe);
        }
        let workload = Workload::prefix_sum(self.workload.steps())?;
        solved(&self.prefix, || optimal(&workload, Solver::Auto, &self.options, observe))
    }

    /// A factorization by name, before rounding.
    ///
    /// Errors: those of the solver, and of sizes that do not fit a dense matrix.
    pub fn factorization(&self, method: Method, observe: Observer<'_>) -> Result<Factorization> {
        let n = self.workload.steps();
        Ok(match method {
            Method::Independent => Factorization::Independent(Independent::new(n)),
            Method::Tree => Factorization::Tree(Tree::new(n, Decoder::Binary)?),
            Method::HonakerOnline => Factorization::Tree(Tree::new(n, Decoder::HonakerOnline)?),
            Method::HonakerFull => Factorization::Tree(Tree::new(n, Decoder::HonakerFull)?),
            Method::SqrtToeplitz => Factorization::Toeplitz(Toeplitz::sqrt_prefix_sum(n)?),
            Method::OptimalPrefix => {
                let prefix = Workload::prefix_sum(n)?;
                Factorization::Dense(self.prefix(observe)?.to_dense(&prefix)?.0)
            }
            Method::Structured => {
                let (diagonals, rank) = Structured::default_shape(n);
                self.structured(diagonals, rank, observe)?
            }
            Method::Optimal => Factorization::Dense(self.optimum(observe)?.to_dense(&self.workload)?.0),
            Method::StateSpace => self.state_space(Target::default(), observe)?,
        })
    }

    /// The paper's structured form with `h` diagonals and rank `r`.
    ///
    /// It is fitted to the optimum of the workload, or of the prefix sum if the workload is a matrix, which has
    /// no recurrence to stream.
    pub fn structured(&self, diagonals: usize, rank: usize, observe: Observer<'_>) -> Result<Factorization> {
        let (workload, optimum) = self.streamable(observe)?;
        let recurrence = workload.recurrence().expect("streamable workloads are recurrences");
        let decoder = solved(&self.decoder, || {
            let mut decoder = optimum.to_dense(&workload)?.0.coloring().to_owned();
            (0..decoder.ncols()).for_each(|j| recurrence.apply(decoder.col_as_slice_mut(j)));
            Ok(decoder)
        })?;
        Ok(Factorization::Structured(Structured::fit(decoder.as_ref(), recurrence, diagonals, rank)?))
    }

    /// The optimum as a stream of a few states; of the prefix sum if the workload is a matrix.
    pub fn state_space(&self, target: Target, observe: Observer<'_>) -> Result<Factorization> {
        let (workload, optimum) = self.streamable(observe)?;
        Ok(Factorization::StateSpace(optimum.to_state_space(&workload, target)?))
    }

    /// The workload if it is a recurrence, else the prefix sum, with its optimum.
    fn streamable(&self, observe: Observer<'_>) -> Result<(Cow<'_, Workload>, &Optimum)> {
        if self.workload.recurrence().is_some() {
            return Ok((Cow::Borrowed(&self.workload), self.optimum(observe)?));
        }
        Ok((Cow::Owned(Workload::prefix_sum(self.workload.steps())?), self.prefix(observe)?))
    }

    /// A mechanism by name, as deployed, with the lower bound for its workload.
    pub fn mechanism(&self, method: Method, observe: Observer<'_>) -> Result<Mechanism> {
        let factorization = self.factorization(method, observe)?;
        self.deploy(&factorization, observe)
    }

    /// Any factorization as deployed for the workload, with its lower bound.
    pub fn deploy(&self, factorization: &Factorization, observe: Observer<'_>) -> Result<Mechanism> {
        let bound = Bound::from(self.optimum(observe)?);
        Mechanism::new(self.workload.clone(), factorization, Participation::Single)?.with_bound(bound)
    }
}

fn solved<T>(cell: &OnceCell<T>, solve: impl FnOnce() -> Result<T>) -> Result<&T> {
    if let Some(value) = cell.get() {
        return Ok(value);
    }
    let value = solve()?;
    Ok(cell.get_or_init(|| value))
}
