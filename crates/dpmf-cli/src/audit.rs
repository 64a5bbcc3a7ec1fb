//! `dpmf audit`.

mod counted;

use crate::memory;
use crate::output;
use crate::plot::{self, figure};
use crate::progress::{Bar, Spinner};
use crate::report::{Report, number, table};
use crate::value_parsers;
use crate::workload::count;
use anyhow::bail;
use counted::Counted;
use dpmf::accounting::{Arithmetic, PrivacyStatement};
use dpmf::audit::{
    AdversaryKind, AuditOptions, CounterExample, Deployed, Informed, MatrixMechanism, Neighbours, Promise,
    SampledAdversary, SampledReport,
};
use dpmf::{Error, Mechanism, Representation, Sampling, accounting, audit, format};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Multiplications that an audit may cost before it is refused.
const MOST_WORK: f64 = 2e13;

/// Releases whose bits are looked at before it is refused.
const MOST_RELEASES: u64 = 100_000_000_000;

/// Multiplications that an audit costs if nothing is said: a minute or two on two cores.
const USUAL_WORK: f64 = 1e12;

/// Games that are played if they are cheap, and those that are needed to show anything.
const USUAL_TRIALS: (u64, u64) = (10_000, 1_000_000);

/// Attack a mechanism and bound its ε from below.
///
/// Plays the adaptive privacy game against a calibrated mechanism, or shows the counter-example: noise that is private
/// for fixed inputs but not for adaptive ones.
///
/// A lower bound above the promised ε refutes the promise (and the command fails); a bound just below it shows that the
/// promise is tight. The first bound uses the Gaussian trade-off, which every matrix mechanism has; the second makes no
/// assumption. If the mechanism relies on sampling, several points of the promised privacy curve are tested with the
/// deployed sampler.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dpmf audit m8.safetensors --trials 1e6\n  dpmf audit counterexample -o counterexample.svg"
)]
pub struct Args {
    /// A calibrated mechanism file, or the word `counterexample`
    target: PathBuf,

    /// Number of games; by default as many as take a minute or two, at most 1e6. The bounds approach the truth with the
    /// square root of this number
    #[arg(long, value_parser = count)]
    trials: Option<usize>,

    /// δ at which ε is bounded; by default that of the mechanism, or 1e-6 for the counter-example
    #[arg(long, value_name = "δ")]
    delta: Option<f64>,

    /// The adversary: worst-column, adaptive or paper, against ideal Gaussian noise; or bits, which examines the grids,
    /// lowest bits and sizes of the released f32 numbers, in both arithmetics
    #[arg(
        long, default_value = "worst-column",
        value_parser = value_parsers::of::<Player>(value_parsers::ADVERSARY), hide_possible_values = true
    )]
    adversary: Player,

    /// For bits: the arithmetic that the command must not refute
    #[arg(
        long, value_name = "exact|float", default_value = "exact",
        value_parser = value_parsers::of::<Arithmetic>(value_parsers::ARITHMETIC), hide_possible_values = true
    )]
    arithmetic: Arithmetic,

    /// For bits: the step to release, counted from 0
    #[arg(long, value_name = "t", value_parser = count, default_value = "0")]
    step: usize,

    /// Dimension of an input; 2 by default, 1000 for the counter-example
    #[arg(long, value_parser = count)]
    dimension: Option<usize>,

    /// Confidence of every bound
    #[arg(long, default_value_t = 0.999)]
    confidence: f64,

    /// Seed of the simulation
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// Noise σ of the counter-example
    #[arg(long, default_value_t = 4.0)]
    noise: f64,

    /// Draw the counter-example to this .svg file
    #[arg(long, short, value_name = "FILE", value_parser = figure::picture)]
    out: Option<PathBuf>,
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    if let Some(path) = &args.out {
        output::check(path)?;
    }
    let trials = args.trials.map_or(USUAL_TRIALS.1, |trials| trials as u64);
    let mut options = AuditOptions { trials, confidence: args.confidence, seed: args.seed };
    if args.target == Path::new("counterexample") {
        return counterexample(args, options);
    }
    if args.out.is_some() {
        bail!("-o draws only the counter-example; for a mechanism, use `dpmf plot privacy`");
    }
    let adversary = match args.adversary {
        Player::Informed(adversary) => adversary,
        Player::Bits => return bits(args, options),
    };
    let mechanism = format::load(&args.target)?;
    promise_of(&mechanism)?;
    let drawn = mechanism.sampling() != Sampling::None;
    let dimension = if drawn { 1 } else { args.dimension.unwrap_or(2) };
    if args.trials.is_none() {
        options.trials = usual_trials(&mechanism, dimension);
    }
    if drawn {
        return sampled(args, &mechanism, options);
    }
    let report = play(&mechanism, adversary, args.delta, dimension, options)?;
    let verdict = if report.refuted() { "REFUTED" } else { "not refuted" };
    let text = format!(
        "{} games, {} adversary, {} steps, confidence {}\n\n{}\n\nThe promise is {verdict}.{}",
        options.trials,
        report.adversary,
        report.steps,
        options.confidence,
        table(
            &["", "μ", &format!("ε at δ = {:e}", report.promise.delta)],
            &[
                vec!["promised".into(), number(report.promise.mu), number(report.promise.epsilon)],
                vec!["at least, Gaussian".into(), number(report.mu_lower), number(report.epsilon_lower)],
                vec!["at least, no assumption".into(), "".into(), number(report.epsilon_assumption_free)],
            ]
        ),
        more(args, options.trials)
    );
    let mut json = serde_json::to_value(&report)?;
    json["refuted"] = report.refuted().into();
    let mut result = Report::new(json, text);
    result.failed = report.refuted();
    Ok(result)
}

/// Games to play if nothing is said: fewer, the more they cost.
fn usual_trials(mechanism: &Mechanism, dimension: usize) -> u64 {
    let (n, m) = (mechanism.workload().steps(), mechanism.form().noise_rows());
    let game = n as f64 * m as f64 * dimension as f64;
    ((USUAL_WORK / game) as u64).clamp(USUAL_TRIALS.0, USUAL_TRIALS.1)
}

/// What more games would gain, if the number was not set.
fn more(args: &Args, trials: u64) -> String {
    match args.trials {
        None if trials < USUAL_TRIALS.1 => format!(
            "\nThe distance of the bounds from the truth falls with the square root of the number of games: --trials {} halves it \
             and takes four times as long.",
            4 * trials
        ),
        _ => String::new(),
    }
}

/// The adversary of an audit.
#[derive(Clone, Copy)]
pub enum Player {
    Informed(AdversaryKind),
    Bits,
}

impl std::str::FromStr for Player {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text == "bits" { Ok(Player::Bits) } else { Ok(Player::Informed(text.parse()?)) }
    }
}

/// Looks at the bits of what a mechanism file releases, in both arithmetics.
fn bits(args: &Args, options: AuditOptions) -> anyhow::Result<Report> {
    if options.trials > MOST_RELEASES {
        bail!(Error::Unsupported {
            what: format!("{} releases", options.trials),
            hint: "this would take hours; examine at most 1e11",
        });
    }
    let mechanism = format::load(&args.target)?;
    let spinner = Spinner::new("audit");
    let mut rows = Vec::new();
    for arithmetic in [Arithmetic::Float, Arithmetic::Exact] {
        spinner.say(&format!("{} releases in {} arithmetic", options.trials, arithmetic.name()));
        let AuditOptions { trials, confidence, seed } = options;
        rows.push(audit::audit_bits(&mechanism, arithmetic, args.step, trials, confidence, seed)?);
    }
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            vec![
                row.arithmetic.name().into(),
                format!("{:.6}", row.frequency),
                format!("{:.6}", row.other_frequency),
                format!("≥ {}", number(row.delta_lower)),
                if row.refuted() { "REFUTED" } else { "not refuted" }.into(),
            ]
        })
        .collect();
    let (epsilon, delta) = (rows[0].epsilon, rows[0].delta);
    let head = ["arithmetic", "event", "other input", &format!("δ at ε = {epsilon}"), "promise"];
    let text = format!(
        "{} releases of one coordinate each, confidence {}; promised: δ = {delta:e}\n\n{}\n\n{}",
        options.trials,
        options.confidence,
        table(&head, &cells),
        rows.iter()
            .map(|row| format!("{}: {}", row.arithmetic.name(), row.event))
            .collect::<Vec<_>>()
            .join("\n")
    );
    let failed = rows.iter().any(|row| row.arithmetic == args.arithmetic && row.refuted());
    let json = json!({ "adversary": "bits", "arithmetic": args.arithmetic, "rows": rows, "refuted": failed });
    let mut report = Report::new(json, text);
    report.failed = failed;
    Ok(report)
}

/// Audits a mechanism under its own sampler.
fn sampled(args: &Args, mechanism: &Mechanism, options: AuditOptions) -> anyhow::Result<Report> {
    let calibration = promise_of(mechanism)?.calibration();
    check_work(mechanism, 1, options)?;
    if args.delta.is_some() || args.dimension.is_some() {
        bail!(
            "--delta and --dimension apply only to mechanisms without sampling; with sampling, the whole curve is tested in one dimension: remove them"
        );
    }
    let (terms, curve) = (calibration.terms(), calibration.curve());
    let points = audit::promised_points(calibration.epsilon(), |epsilon| curve.delta(epsilon))?;
    let steps = mechanism.workload().steps();
    let subject = MatrixMechanism::of(mechanism.form(), calibration.noise_std(), 1)?;
    let model = subject.noise_model()?;
    let neighbours = Neighbours::drawn(steps, terms.adjacency, terms.clip)?;
    let lottery = Deployed::new(mechanism.sampling(), steps)?;
    let player = SampledAdversary::of(mechanism.sampling(), &model, &neighbours)?;
    let bar = Bar::new(format!("audit, {} games", options.trials), options.trials as usize, 0);
    let subject = Counted(&subject, &bar);
    let report = audit::audit_sampled(&subject, &player, &neighbours, &lottery, &points, options)?;
    drop(bar);
    let (json, mut text) = describe(mechanism.sampling(), &report)?;
    text += &more(args, options.trials);
    let mut result = Report::new(json, text);
    result.failed = report.refuted();
    Ok(result)
}

/// An audit under sampling as JSON and as a table.
fn describe(sampling: Sampling, report: &SampledReport) -> serde_json::Result<(Value, String)> {
    let cells: Vec<Vec<String>> = report
        .rows
        .iter()
        .map(|row| {
            let refuted = row.delta_lower > row.promise.delta;
            vec![
                number(row.promise.epsilon),
                format!("{:.3e}", row.promise.delta),
                format!("{:.3e}", row.delta_lower),
                if refuted { "REFUTED" } else { "not refuted" }.into(),
            ]
        })
        .collect();
    let verdict = if report.refuted() { "REFUTED" } else { "not refuted" };
    let text = format!(
        "{} games, sampling {sampling}, {} steps, confidence {} for all rows\n\n{}\n\nThe promise is {verdict}.",
        report.options.trials,
        report.steps,
        report.options.confidence,
        table(&["ε", "δ promised", "δ at least", "point"], &cells)
    );
    let mut json = serde_json::to_value(report)?;
    json["sampling"] = serde_json::to_value(sampling)?;
    json["refuted"] = report.refuted().into();
    Ok((json, text))
}

/// What a mechanism promises.
fn promise_of(mechanism: &Mechanism) -> anyhow::Result<&PrivacyStatement> {
    mechanism.privacy().ok_or_else(|| {
        anyhow::Error::from(Error::Unsupported {
            what: "auditing an uncalibrated mechanism".into(),
            hint: "it has no guarantee yet; run `dpmf calibrate` first",
        })
    })
}

/// Refuses what would take hours.
fn check_work(mechanism: &Mechanism, dimension: usize, options: AuditOptions) -> anyhow::Result<()> {
    let (n, m) = (mechanism.workload().steps(), mechanism.form().noise_rows());
    // Games are played sixteen at a time, or more where they are small.
    memory::check("--dimension", dimension, dimension as f64 * 8.0 * 16.0 * (n + m) as f64)?;
    let work = options.trials as f64 * n as f64 * m as f64 * dimension as f64;
    if work > MOST_WORK {
        bail!(Error::Unsupported {
            what: format!("{} games of {n} steps", options.trials),
            hint: "this would take hours; lower --trials or audit a mechanism with fewer steps",
        });
    }
    Ok(())
}

/// Audits a mechanism.
pub fn play(
    mechanism: &Mechanism,
    adversary: AdversaryKind,
    delta: Option<f64>,
    dimension: usize,
    options: AuditOptions,
) -> anyhow::Result<audit::AuditReport> {
    let calibration = promise_of(mechanism)?.calibration();
    check_work(mechanism, dimension, options)?;
    let mut promise = Promise::try_from(calibration)?;
    if let Some(delta) = delta
        && delta != promise.delta
    {
        let epsilon = accounting::gaussian::epsilon(promise.mu, delta)?;
        promise = Promise { epsilon, delta, ..promise };
    }
    let subject = MatrixMechanism::of(mechanism.form(), calibration.noise_std(), dimension)?;
    let model = subject.noise_model()?;
    let terms = calibration.terms();
    let steps = mechanism.workload().steps();
    let neighbours = Neighbours::new(mechanism.participation(), steps, terms.adjacency, terms.clip)?;
    let player = Informed::of(adversary, &model, &neighbours, dimension);
    let bar = Bar::new(format!("audit, {} games", options.trials), options.trials as usize, 0);
    Ok(audit::audit(&Counted(&subject, &bar), &player, &neighbours, promise, options)?)
}

fn counterexample(args: &Args, options: AuditOptions) -> anyhow::Result<Report> {
    use audit::counterexample::sufficient_eta;
    let (delta, dimension) = (args.delta.unwrap_or(1e-6), args.dimension.unwrap_or(1000));
    memory::check("--dimension", dimension, dimension as f64 * 64.0)?;
    let spinner = Spinner::new("counter-example");
    let at = |dimension: usize| CounterExample::new(dimension, args.noise, sufficient_eta(dimension));
    let mechanism = at(dimension)?;
    spinner.say("bounding ε");
    let row = mechanism.row(delta)?;
    let dimensions = [100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000];
    let rows = dimensions.into_iter().map(|d| at(d)?.row(delta)).collect::<dpmf::Result<Vec<_>>>()?;
    // d draws a game: a million games in a thousand dimensions would take long and show no more.
    let trials = options.trials.min((100_000_000 / dimension.max(1) as u64).max(1));
    spinner.say(&format!("playing {trials} games three times"));
    let attacks = mechanism.simulate(delta, AuditOptions { trials, ..options })?;
    let cells: Vec<Vec<String>> = attacks
        .iter()
        .map(|attack| {
            let limit = match (attack.mechanism, attack.adversary) {
                ("gaussian", _) => row.epsilon_gaussian,
                (_, "fixed") => row.epsilon_nonadaptive,
                _ => f64::NAN,
            };
            let promised =
                if limit.is_nan() { "none holds".into() } else { format!("≤ {}", number(limit)) };
            vec![
                format!("{} against {}", attack.adversary, attack.mechanism),
                format!("{:.4}", attack.success),
                promised,
                format!("≥ {}", number(attack.epsilon_lower)),
            ]
        })
        .collect();
    let text = format!(
        "σ = {}, d = {dimension}, thin direction η = {:.4}, δ = {delta:e}\n\n{}\n\n\
         Fixed inputs: ε ≤ {} is proved. Adaptive inputs: ε ≥ {} at least, {} times the Gaussian mechanism's {}.",
        args.noise,
        row.eta,
        table(&["adversary", "bit named rightly", "proved ε", "measured ε"], &cells),
        number(row.epsilon_nonadaptive),
        number(row.epsilon_adaptive),
        number(row.epsilon_adaptive / row.epsilon_gaussian),
        number(row.epsilon_gaussian),
    );
    if let Some(path) = &args.out {
        let series =
            |label: &str, index: usize, mark, pick: fn(&audit::CounterExampleRow) -> f64| figure::Series {
                label: label.into(),
                points: rows.iter().map(|row| (row.dimension as f64, pick(row))).collect(),
                mark,
                color: figure::COLORS[index],
            };
        use figure::Mark::{Line, LineAndPoints, Points};
        let panel = figure::Panel {
            title: format!("adaptive inputs break non-Gaussian noise, σ = {}", args.noise),
            x_label: "dimension d".into(),
            y_label: format!("ε at δ = {delta:e}"),
            x_log: true,
            y_log: true,
            series: vec![
                series("counter-example, adaptive inputs (at least)", 1, LineAndPoints, |row| {
                    row.epsilon_adaptive
                }),
                series("Gaussian mechanism, both", 2, Line, |row| row.epsilon_gaussian),
                series("counter-example, fixed inputs (at most)", 0, Points, |row| row.epsilon_nonadaptive),
            ],
        };
        plot::figure::draw(&[panel], path)?;
    }
    let json =
        json!({ "row": row, "attacks": attacks, "dimensions": rows, "trials": trials, "out": args.out });
    Ok(Report::new(json, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dpmf::audit::{CurvePoint, audit_sampled_form};
    use dpmf::form::StateSpace;

    /// The table by itself, against a promise that is kept at one point and not at the other.
    #[test]
    fn an_audit_under_sampling_is_told_point_by_point() {
        let form = StateSpace::independent(4).unwrap();
        let sampling: Sampling = "cyclic-poisson:2:0.5".parse().unwrap();
        let promise = [CurvePoint { epsilon: 3.0, delta: 0.5 }, CurvePoint { epsilon: 0.5, delta: 1e-3 }];
        let options = AuditOptions { trials: 20_000, ..Default::default() };
        let report =
            audit_sampled_form(&form, 1.0, sampling, Default::default(), 1.0, &promise, options).unwrap();
        let (json, text) = describe(sampling, &report).unwrap();
        assert_eq!((&json["refuted"], &json["sampling"]["kind"]), (&true.into(), &"cyclic-poisson".into()));
        assert_eq!(json["rows"][1]["epsilon"], 0.5);
        assert!(text.contains("not refuted") && text.contains("The promise is REFUTED"), "{text}");
    }
}
