//! The flags that describe a workload and a solver, shared by the commands.

use crate::matrix::{read_matrix, read_vector};
use crate::memory;
use anyhow::{Context, bail};
use clap::ValueEnum;
use dpmf::factorize::{Iteration, Options, Solver};
use dpmf::{Average, Optimizer, Participation, Problem, Schedule, Workload};
use std::path::PathBuf;

/// What the solver of linear time takes for every step, at the least.
pub const BYTES_A_STEP: f64 = 400.0;

/// What an optimizer does beside momentum; the commands differ in the momentum and schedule they begin with.
#[derive(clap::Args, Clone)]
pub struct OptimizerArgs {
    /// Nesterov momentum: θ ← θ − η(g + βm)
    #[arg(long)]
    pub nesterov: bool,

    /// Weight decay λ, decoupled: θ ← (1 − ηλ)θ − ηm
    #[arg(long, value_name = "λ", default_value_t = 0.0)]
    pub weight_decay: f64,

    /// Weight decay as in PyTorch's SGD: λθ joins the gradient before the momentum
    #[arg(long)]
    pub coupled: bool,

    /// Release averaged iterates: uniform, or ema:α for y ← αy + (1 − α)θ
    #[arg(long, value_name = "none|uniform|ema:α", default_value = "none")]
    pub average: Average,
}

impl OptimizerArgs {
    /// The optimizer with this momentum.
    pub fn with_momentum(&self, momentum: f64) -> Optimizer {
        Optimizer {
            momentum,
            nesterov: self.nesterov,
            weight_decay: self.weight_decay,
            coupled: self.coupled,
            average: self.average,
        }
    }
}

/// What the optimizer computes.
#[derive(clap::Args, Clone)]
#[command(next_help_heading = "Workload")]
pub struct WorkloadArgs {
    /// Number of steps n (2048, 1e6, …)
    #[arg(long, value_parser = count)]
    pub steps: Option<usize>,

    /// Heavy-ball momentum β: m ← βm + g, θ ← θ − ηm
    #[arg(long, value_name = "β", default_value_t = 0.0)]
    pub momentum: f64,

    #[command(flatten)]
    pub optimizer: OptimizerArgs,

    /// Step sizes: constant, cooldown:f:e, decay:f:c, cosine:e, warmup:s or exp:r; join several with + to multiply them
    #[arg(long, default_value = "constant")]
    pub schedule: String,

    /// Read step sizes from a file with one number in each line
    #[arg(long, value_name = "FILE", conflicts_with = "schedule")]
    pub schedule_file: Option<PathBuf>,

    /// Read any lower-triangular workload matrix from a .npy, .npz or .csv file
    #[arg(long, value_name = "FILE", conflicts_with_all =
        ["steps", "momentum", "nesterov", "weight_decay", "coupled", "average", "schedule", "schedule_file"])]
    pub matrix: Option<PathBuf>,

    /// How often a user or record takes part: single, epochs:K or min-separation:B[:K]
    #[arg(long, value_name = "PATTERN", default_value_t)]
    pub participation: Participation,
}

impl WorkloadArgs {
    /// Builds the workload.
    pub fn build(&self) -> anyhow::Result<Workload> {
        if let Some(path) = &self.matrix {
            return Ok(Workload::dense(read_matrix(path)?)?);
        }
        let learning_rates = match &self.schedule_file {
            Some(path) => {
                let rates = read_vector(path)?;
                if let Some(steps) = self.steps
                    && steps != rates.len()
                {
                    bail!(dpmf::Error::WrongLength {
                        name: "schedule file",
                        actual: rates.len(),
                        expected: steps
                    });
                }
                rates
            }
            None => {
                let steps = self.steps.context("no workload: pass --steps, --schedule-file or --matrix")?;
                memory::check("--steps", steps, steps as f64 * BYTES_A_STEP)?;
                self.schedule.parse::<Schedule>()?.values(steps)
            }
        };
        Ok(Workload::sgd(learning_rates, self.optimizer.with_momentum(self.momentum))?)
    }

    /// The problem: the workload under its participation.
    pub fn problem(&self, solver: &SolverArgs) -> anyhow::Result<Problem> {
        Ok(Problem::with_solver(self.build()?, self.participation, solver.solver.into(), solver.options())?)
    }

    /// Whether any flag names a workload.
    pub fn is_given(&self) -> bool {
        self.steps.is_some() || self.matrix.is_some() || self.schedule_file.is_some()
    }

    /// A few words for titles and tables.
    pub fn describe(&self) -> String {
        if let Some(path) = &self.matrix {
            return format!("the matrix in {}", path.display());
        }
        let mut words = Vec::new();
        match (self.momentum, self.optimizer.nesterov) {
            (0.0, _) => {}
            (beta, false) => words.push(format!("momentum {beta}")),
            (beta, true) => words.push(format!("Nesterov momentum {beta}")),
        }
        if self.optimizer.weight_decay > 0.0 {
            let form = if self.optimizer.coupled { "coupled " } else { "" };
            words.push(format!("{form}weight decay {}", self.optimizer.weight_decay));
        }
        match &self.schedule_file {
            Some(path) => words.push(format!("step sizes from {}", path.display())),
            None if self.schedule != "constant" => words.push(format!("schedule {}", self.schedule)),
            None => {}
        }
        match self.optimizer.average {
            Average::None => {}
            Average::Uniform => words.push("averaged uniformly".into()),
            Average::Ema(alpha) => words.push(format!("averaged with decay {alpha}")),
        }
        if words.is_empty() { "prefix sum".into() } else { words.join(", ") }
    }
}

/// How the optimum is found.
#[derive(clap::Args, Clone)]
#[command(next_help_heading = "Solver")]
pub struct SolverArgs {
    /// Method that finds the optimum
    #[arg(long, value_enum, default_value_t = SolverName::Auto)]
    pub solver: SolverName,

    /// Update rule of the dual variable
    #[arg(long, value_enum, default_value_t = IterationName::Anderson)]
    pub iteration: IterationName,

    /// Stop at this certified relative gap between loss and lower bound
    #[arg(long, default_value_t = 1e-6)]
    pub gap: f64,

    /// Give up after this many iterations
    #[arg(long, value_parser = count, default_value = "20000")]
    pub max_iterations: usize,
}

impl SolverArgs {
    pub fn options(&self) -> Options {
        Options { gap: self.gap, iteration: self.iteration.into(), max_iterations: self.max_iterations }
    }
}

/// `--solver`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SolverName {
    /// Chosen for the workload
    Auto,
    /// Fixed point, O(n log n) per iteration, for everything but --matrix
    Linear,
    /// Fixed point, O(n³) per iteration
    Dense,
    /// Newton directions (the paper's rival)
    Newton,
    /// Projected gradient descent (the paper's rival)
    Gradient,
}

impl From<SolverName> for Solver {
    fn from(name: SolverName) -> Self {
        match name {
            SolverName::Auto => Solver::Auto,
            SolverName::Linear => Solver::Linear,
            SolverName::Dense => Solver::Dense,
            SolverName::Newton => Solver::Newton,
            SolverName::Gradient => Solver::Gradient,
        }
    }
}

/// `--iteration`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum IterationName {
    /// Accelerated
    Anderson,
    /// v ← v∘x²
    Relaxed,
    /// v ← v∘x, the paper's
    Plain,
}

impl From<IterationName> for Iteration {
    fn from(name: IterationName) -> Self {
        match name {
            IterationName::Anderson => Iteration::Anderson,
            IterationName::Relaxed => Iteration::Relaxed,
            IterationName::Plain => Iteration::Plain,
        }
    }
}

/// A whole number, also written like 1e6.
pub fn count(text: &str) -> Result<usize, String> {
    if let Ok(value) = text.parse()
        && value <= LARGEST_COUNT
    {
        return Ok(value);
    }
    match text.parse::<f64>() {
        Ok(x) if x < 0.0 => Err("it must not be negative".into()),
        Ok(x) if x > LARGEST_COUNT as f64 => Err("it must be at most 9e15".into()),
        Ok(x) if x.fract() != 0.0 || x.is_nan() => Err("it must be a whole number".into()),
        Ok(x) => Ok(x as usize),
        Err(_) => Err("it must be a whole number, such as 2048 or 1e6".into()),
    }
}

/// Far beyond all that can be counted here, and exact as a float.
const LARGEST_COUNT: usize = 9_000_000_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_whole_and_within_bounds() {
        assert_eq!([count("7"), count("1e6"), count("2.5e3")], [Ok(7), Ok(1_000_000), Ok(2500)]);
        let refused = |text: &str| count(text).unwrap_err();
        for text in ["1e30", "inf", "18446744073709551615", "99999999999999999999999"] {
            assert_eq!(refused(text), "it must be at most 9e15", "{text}");
        }
        for text in ["1.5", "NaN"] {
            assert_eq!(refused(text), "it must be a whole number", "{text}");
        }
        assert!(refused("-1").contains("negative"));
        assert!(refused("many").contains("such as 2048 or 1e6"));
    }
}
