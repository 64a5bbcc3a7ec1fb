//! `dpmf account` and `dpmf calibrate`.

use crate::output;
use crate::progress::Spinner;
use crate::report::{Report, table};
use crate::value_parsers;
use crate::warnings;
use crate::workload::{SolverArgs, WorkloadArgs};
use anyhow::bail;
use dpmf::accounting::pld::{DEFAULT_WIDTH, LEAST_NOISE};
use dpmf::accounting::{
    Account, Accountant, Adjacency, Phase, PrivacyCurve, PrivacyUnit, calibrate, compose,
    poisson_noise_multiplier, zcdp,
};
use dpmf::mechanism::Conditions;
use dpmf::{Mechanism, Sampling, Selector, format};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Compute the ε of a noise multiplier with every accountant.
///
/// Prints ε for a given δ, or δ for a given ε, rounded up. The accountant `exact` uses the exact privacy curve of the
/// Gaussian mechanism; `zcdp` and `rdp` convert from concentrated and Rényi differential privacy (integer orders 2 to
/// 512); `paper` is the closed form in the matrix mechanism's theorem. Several noise multipliers are composed: the
/// result covers all of them together.
///
/// With --sampling or --phase, each step samples its records in secret, as DP-SGD does. The answer then comes from
/// privacy loss distributions and is an interval: its upper end is the guarantee, and its lower end shows how tight
/// that is. With both --epsilon and --delta and no noise multiplier, the smallest sufficient multiplier is found.
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  dpmf account --noise-multiplier 0.341 --delta 1e-6\n  \
    dpmf account --noise-multiplier 1 --sampling cyclic-poisson:1:0.01 --steps 1000 --delta 1e-5\n  \
    dpmf account --epsilon 2 --delta 1e-5 --sampling cyclic-poisson:1:0.01 --steps 1000\n  \
    dpmf account --phase 1:0.01:500 --phase 2:0.02:100 --delta 1e-5"
)]
pub struct Args {
    /// Standard deviation of the noise divided by sensitivity times clip; several are composed
    #[arg(long, value_name = "σ,…", value_delimiter = ',')]
    noise_multiplier: Vec<f64>,

    /// δ of the guarantee
    #[arg(long, value_name = "δ", required_unless_present = "epsilon")]
    delta: Option<f64>,

    /// ε of the guarantee: prints δ, or with --delta the noise multiplier
    #[arg(long, value_name = "ε")]
    epsilon: Option<f64>,

    /// How steps sample records: none, or cyclic-poisson:G:Q, where G groups take turns and each record of the current
    /// group takes part with probability Q (DP-SGD: G = 1)
    #[arg(long, value_name = "SAMPLING", default_value = "none")]
    sampling: Sampling,

    /// Number of steps in the run, for --sampling
    #[arg(long, value_name = "n")]
    steps: Option<u64>,

    /// A phase of n steps with noise multiplier σ and sampling probability Q; several phases are composed
    #[arg(
        long, value_name = "σ:Q:n",
        value_parser = phase, conflicts_with_all = ["noise_multiplier", "sampling", "steps"]
    )]
    phase: Vec<Phase>,

    /// Largest width of the interval for ε
    #[arg(long, value_name = "WIDTH", default_value_t = DEFAULT_WIDTH)]
    width: f64,

    /// Which data sets are neighbours: replace-with-zero, add-or-remove or, without sampling, replace-one
    #[arg(
        long, default_value = "replace-with-zero",
        value_parser = value_parsers::of::<Adjacency>(value_parsers::ADJACENCY), hide_possible_values = true
    )]
    adjacency: Adjacency,
}

/// Reads `σ:Q:n`.
fn phase(text: &str) -> Result<Phase, String> {
    let read = || {
        let mut parts = text.split(':');
        let (noise_multiplier, rate) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let rounds = parts.next()?.parse().ok()?;
        parts.next().is_none().then_some(Phase { noise_multiplier, rate, rounds })
    };
    read().ok_or_else(|| {
        "it must be a noise multiplier, a probability and a number of steps, such as 1.1:0.01:1000".into()
    })
}

/// What is asked of a noise multiplier.
#[derive(Clone, Copy)]
enum Question {
    Epsilon { delta: f64 },
    Delta { epsilon: f64 },
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let report = answer(args)?;
    let found = |name: &str| report.json()[name].as_f64();
    let epsilon = args.epsilon.or_else(|| found("epsilon_exact")).or_else(|| found("epsilon_pld"));
    let delta = args.delta.or_else(|| found("delta_exact")).or_else(|| found("delta_pld"));
    let warnings = warnings::about(epsilon, delta, None);
    warnings::tell(&warnings);
    Ok(report.warned(warnings))
}

fn answer(args: &Args) -> anyhow::Result<Report> {
    if let Sampling::BallsInBins { .. } | Sampling::ReshuffledBins { .. } = args.sampling {
        bail!(
            "for bins, ε depends on the mechanism and not only on its noise multiplier: use dpmf calibrate or dpmf plan"
        );
    }
    let question = match (args.epsilon, args.delta, args.noise_multiplier.is_empty() && args.phase.is_empty())
    {
        (Some(epsilon), Some(delta), true) => return solve(args, epsilon, delta),
        (Some(_), Some(_), false) => {
            bail!(
                "with a noise multiplier, --epsilon and --delta determine each other: remove one of the two"
            )
        }
        (_, _, true) => {
            bail!(
                "pass --noise-multiplier or --phase, or pass both --epsilon and --delta to find the noise multiplier"
            )
        }
        (Some(epsilon), None, _) => Question::Delta { epsilon },
        (None, Some(delta), _) => Question::Epsilon { delta },
        (None, None, _) => bail!("pass --epsilon or --delta"),
    };
    if !args.phase.is_empty() {
        let what = format!("{} phases", args.phase.len());
        return sampled(&args.phase, args, question, json!({ "phases": phases(&args.phase) }), &what);
    }
    if args.sampling != Sampling::None {
        let [sigma] = args.noise_multiplier[..] else {
            bail!("--sampling takes a single noise multiplier: use --phase for several kinds of steps");
        };
        let phase = Phase { noise_multiplier: sigma, ..drawn(args)? };
        let given = json!({ "noise_multiplier": sigma, "sampling": args.sampling, "steps": args.steps, "rounds": phase.rounds });
        return sampled(
            &[phase],
            args,
            question,
            given,
            &format!("noise multiplier {sigma}, sampling {}", args.sampling),
        );
    }
    if args.steps.is_some() {
        bail!(
            "--steps has an effect only with --sampling; without it, the noise multiplier is for the whole run: remove --steps"
        );
    }
    let sigma = compose(&args.noise_multiplier)?;
    // A single multiplier is itself; composition would round it.
    let sigma = if let [one] = args.noise_multiplier[..] { one } else { sigma };
    gaussian(sigma, args.adjacency, question)
}

/// The rounds of a sampled run: each record's group has its turn in one step of G.
fn drawn(args: &Args) -> anyhow::Result<Phase> {
    let Sampling::CyclicPoisson { bands, rate } = args.sampling else { bail!("--sampling is needed") };
    let Some(steps) = args.steps else { bail!("--steps is needed with --sampling") };
    Ok(Phase { noise_multiplier: 1.0, rate, rounds: steps.div_ceil(bands.max(1) as u64) })
}

fn phases(phases: &[Phase]) -> Value {
    let object =
        |p: &Phase| json!({ "noise_multiplier": p.noise_multiplier, "rate": p.rate, "rounds": p.rounds });
    phases.iter().map(object).collect()
}

/// The account of a Gaussian mechanism.
fn gaussian(sigma: f64, adjacency: Adjacency, question: Question) -> anyhow::Result<Report> {
    let row = |accountant: Accountant, value: String| vec![accountant.name().to_owned(), value];
    match question {
        Question::Epsilon { delta } => {
            let account = Account::new(sigma, delta, adjacency)?;
            let rows: Vec<_> = Accountant::ALL.iter().map(|&a| row(a, up(account.epsilon(a)))).collect();
            let text = format!(
                "noise multiplier {sigma}, δ = {delta:e}, {adjacency}: μ = {}, ρ = {}\n\n{}",
                up(account.mu),
                up(account.rho),
                table(&["accountant", "ε"], &rows)
            );
            Ok(Report::new(serde_json::to_value(account)?, text))
        }
        Question::Delta { epsilon } => {
            let mu = calibrate::mu(sigma, adjacency)?;
            let rho = zcdp::rho(mu)?;
            let mut object = json!({
                "noise_multiplier": sigma, "adjacency": adjacency, "epsilon": epsilon, "mu": mu, "rho": rho,
            });
            let mut rows = Vec::new();
            for accountant in Accountant::ALL {
                let delta = accountant.delta(mu, epsilon)?;
                object[format!("delta_{accountant}")] = json!(delta);
                rows.push(row(accountant, up_scientific(delta)));
            }
            let text = format!(
                "noise multiplier {sigma}, ε = {epsilon}, {adjacency}: μ = {}, ρ = {}\n\n{}",
                up(mu),
                up(rho),
                table(&["accountant", "δ"], &rows)
            );
            Ok(Report::new(object, text))
        }
    }
}

/// The account of sampled steps.
fn sampled(
    phases: &[Phase],
    args: &Args,
    question: Question,
    given: Value,
    what: &str,
) -> anyhow::Result<Report> {
    let curve = PrivacyCurve::poisson(phases, args.adjacency)?;
    let mut object = given;
    object["adjacency"] = json!(args.adjacency);
    let rounds: u64 = phases.iter().map(|p| p.rounds).sum();
    let (letter, bracket, at, text) = match question {
        Question::Epsilon { delta } => {
            object["delta"] = json!(delta);
            let mut found = curve.epsilon_bracket(delta, args.width)?;
            if args.epsilon.is_some() {
                // The noise was found by this upper end, which is finer than the bracket.
                found.upper = found.upper.min(curve.epsilon(delta)?);
            }
            let text = format!("ε ≤ {}\n(and not below {})", up(found.upper), down(found.lower));
            ("epsilon", found, format!("δ = {delta:e}"), text)
        }
        Question::Delta { epsilon } => {
            object["epsilon"] = json!(epsilon);
            let found = curve.delta_bracket(epsilon, args.width)?;
            let text = format!(
                "δ ≤ {}\n(and not below {:.4e})",
                up_scientific(found.upper),
                found.lower * (1.0 - 5e-5)
            );
            ("delta", found, format!("ε = {epsilon}"), text)
        }
    };
    if !bracket.upper.is_finite() {
        let noise: Vec<String> = phases.iter().map(|phase| phase.noise_multiplier.to_string()).collect();
        bail!("no finite {letter} can be proved for a noise multiplier of {}", noise.join(", "));
    }
    let mut remarks = Vec::new();
    if bracket.upper > 2.0 * bracket.lower && bracket.upper > 1e-300 {
        remarks.push(format!(
            "{letter} is only known to within a factor of two or more: 64-bit arithmetic cannot resolve numbers this small when sampled steps are composed, and the upper end may be that of the same steps without sampling"
        ));
    }
    if let (Some(asked), Question::Epsilon { .. }, [phase]) = (args.epsilon, question, phases)
        && phase.noise_multiplier <= LEAST_NOISE
        && bracket.upper < 0.999 * asked
    {
        remarks.push(format!(
            "{LEAST_NOISE} is the smallest noise multiplier that is tried with sampling; less noise may be enough for ε = {asked}"
        ));
    }
    object[format!("{letter}_pld")] = json!(bracket.upper);
    object[format!("{letter}_pld_lower")] = json!(bracket.lower);
    for accountant in Accountant::ALL {
        object[format!("{letter}_{accountant}")] = Value::Null;
    }
    object["mu"] = Value::Null;
    object["rho"] = Value::Null;
    let mut text = format!(
        "{what}, {rounds} rounds in which a record can be drawn, {at}, {}:\n\n{text}\n",
        args.adjacency
    );
    if !remarks.is_empty() {
        text += &format!("({})\n", remarks.join(")\n("));
        object["remarks"] = json!(remarks);
    }
    Ok(Report::new(object, text))
}

/// Four decimals, rounded up; a number too small for them with four digits of its own.
fn up(x: f64) -> String {
    match x > 0.0 && x < 1e-3 {
        true => up_scientific(x),
        false => format!("{:.4}", (x * 1e4).ceil() / 1e4),
    }
}

/// Likewise, rounded down.
fn down(x: f64) -> String {
    match x > 0.0 && x < 1e-3 {
        true => format!("{:.4e}", x * (1.0 - 5e-5)),
        false => format!("{:.4}", (x * 1e4).floor() / 1e4),
    }
}

/// Four decimals of the leading digit and a power of ten, not below the number.
fn up_scientific(x: f64) -> String {
    let text = format!("{x:.4e}");
    match text.parse::<f64>() {
        Ok(shown) if shown < x => format!("{:.4e}", x * (1.0 + 5e-5)),
        _ => text,
    }
}

/// The least noise multiplier for (ε, δ).
fn solve(args: &Args, epsilon: f64, delta: f64) -> anyhow::Result<Report> {
    if args.sampling == Sampling::None {
        let sigma = calibrate::noise_multiplier(epsilon, delta, args.adjacency, Accountant::Exact)?;
        return gaussian(sigma, args.adjacency, Question::Epsilon { delta });
    }
    let phase = drawn(args)?;
    PrivacyCurve::poisson(&[phase], args.adjacency)?;
    let sigma = poisson_noise_multiplier(epsilon, delta, phase.rate, phase.rounds)?;
    let phase = Phase { noise_multiplier: sigma, ..phase };
    let given = json!({
        "noise_multiplier": sigma, "sampling": args.sampling, "steps": args.steps, "rounds": phase.rounds, "epsilon": epsilon,
    });
    sampled(
        &[phase],
        args,
        Question::Epsilon { delta },
        given,
        &format!("noise multiplier {sigma}, sampling {}", args.sampling),
    )
}

/// Find the noise that gives (ε, δ).
///
/// Takes a mechanism from a file or makes one for a workload, finds the noise for (ε, δ), and writes the calibrated
/// mechanism with its privacy statement. The sensitivity is computed from the deployed coefficients.
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  dpmf calibrate m.safetensors --epsilon 8 --delta 1e-6 --clip 1 --out m8.safetensors\n  \
    dpmf calibrate --steps 2048 --momentum 0.95 --epsilon 2 --delta 1e-6 --clip 1 --out m.safetensors"
)]
pub struct CalibrateArgs {
    /// A mechanism file; without it, a mechanism is made for the workload
    file: Option<PathBuf>,

    #[command(flatten)]
    workload: WorkloadArgs,

    #[command(flatten)]
    solver: SolverArgs,

    /// The mechanism to make
    #[arg(
        long, value_name = "NAME", default_value = "optimal", conflicts_with = "file",
        value_parser = value_parsers::mechanism::<Selector>(), hide_possible_values = true
    )]
    mechanism: Selector,

    /// ε of the guarantee
    #[arg(
        long,
        value_name = "ε",
        conflicts_with = "noise_multiplier",
        required_unless_present = "noise_multiplier"
    )]
    epsilon: Option<f64>,

    /// Use this noise multiplier and state the ε that it gives
    #[arg(long, value_name = "σ")]
    noise_multiplier: Option<f64>,

    /// δ of the guarantee
    #[arg(long, value_name = "δ")]
    delta: f64,

    /// Norm ζ that each contribution is clipped to
    #[arg(long, value_name = "ζ")]
    clip: f64,

    /// Unit of privacy: user or record [default: that of the file, or user]
    #[arg(
        long,
        value_parser = value_parsers::of::<PrivacyUnit>(value_parsers::UNIT), hide_possible_values = true
    )]
    unit: Option<PrivacyUnit>,

    /// Which data sets are neighbours: replace-with-zero, add-or-remove or replace-one [default: that of the file, or
    /// replace-with-zero]
    #[arg(
        long,
        value_parser = value_parsers::of::<Adjacency>(value_parsers::ADJACENCY), hide_possible_values = true
    )]
    adjacency: Option<Adjacency>,

    /// How ε is computed from the noise: exact, zcdp, rdp or paper [default: that of the file, or exact]
    #[arg(
        long,
        value_parser = value_parsers::of::<Accountant>(value_parsers::ACCOUNTANT), hide_possible_values = true
    )]
    accountant: Option<Accountant>,

    /// Write the calibrated mechanism to this file
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub fn calibrate(args: &CalibrateArgs) -> anyhow::Result<Report> {
    if let Some(path) = &args.out {
        output::check(path)?;
    }
    let mechanism = load_or_make(args)?;
    // A plan knows whom it is for: another noise level changes nothing about that.
    let known = mechanism.privacy().map(|statement| {
        let terms = statement.calibration().terms();
        Conditions {
            unit: statement.unit(),
            adjacency: terms.adjacency,
            accountant: terms.accountant,
            beside: terms.beside,
        }
    });
    let known = known.unwrap_or_default();
    let conditions = Conditions {
        unit: args.unit.unwrap_or(known.unit),
        adjacency: args.adjacency.unwrap_or(known.adjacency),
        accountant: args.accountant.unwrap_or(known.accountant),
        beside: known.beside,
    };
    let mechanism = match (args.epsilon, args.noise_multiplier) {
        (Some(epsilon), _) => mechanism.calibrated(epsilon, args.delta, args.clip, conditions)?,
        (None, Some(sigma)) => mechanism.with_noise(sigma, args.delta, args.clip, conditions)?,
        (None, None) => bail!("pass --epsilon or --noise-multiplier"),
    };
    if let Some(path) = &args.out {
        output::save_mechanism(&mechanism, path)?;
    }
    let Some(statement) = mechanism.privacy() else { bail!("the mechanism was not calibrated") };
    let json = json!({
        "steps": mechanism.workload().steps(),
        "noise_multiplier": statement.calibration().noise_multiplier(),
        "noise_std": statement.calibration().noise_std(),
        "sensitivity": mechanism.sensitivity(),
        "epsilon": statement.calibration().epsilon(),
        "delta": statement.calibration().delta(),
        "sqrt_loss": mechanism.loss().sqrt_total(),
        "ratio_to_bound": mechanism.certificate().map(|c| c.ratio_to_bound()),
        "statement": statement,
        "out": args.out.as_ref().map_or(Value::Null, |path| json!(path)),
    });
    let mut text = statement.to_string();
    if let Some(path) = &args.out {
        text += &format!("\nwritten to {}\n", path.display());
    }
    let (epsilon, delta) = (statement.calibration().epsilon(), statement.calibration().delta());
    let warnings = warnings::about(Some(epsilon), Some(delta), None);
    warnings::tell(&warnings);
    Ok(Report::new(json, text).warned(warnings))
}

fn load_or_make(args: &CalibrateArgs) -> anyhow::Result<Mechanism> {
    if let Some(path) = &args.file {
        if args.workload.is_given() {
            bail!("a mechanism file already has a workload: remove the workload flags");
        }
        return Ok(format::load(path)?);
    }
    let spinner = Spinner::new("calibrate").towards(args.solver.gap);
    let problem = args.workload.problem(&args.solver)?;
    Ok(problem.mechanism(args.mechanism, &mut |progress| spinner.observe(progress))?)
}
