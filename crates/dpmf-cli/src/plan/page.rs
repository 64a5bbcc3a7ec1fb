//! The planner behind the page.

use super::RunArgs;
use super::server::{self, Server};
use crate::failure;
use crate::report::{Report, note};
use clap::Parser;
use dpmf::planner::{FitCache, Plan, Planner, Request};
use serde_json::json;
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Points of ε at which curves are drawn: powers of two.
const EPSILONS: std::ops::RangeInclusive<i32> = -2..=4;

/// Most steps of which curves show the error.
const SHOWN: usize = 240;

/// Serves the page until the program ends.
pub fn serve(port: u16, open: bool, cache: FitCache) -> anyhow::Result<Report> {
    let server = Server::bind(port)?;
    note(&format!("the page is at {}\nonly this machine can open it; press Ctrl-C to stop", server.url()));
    // A request that fails is answered so, and leaves the others alone.
    drop(std::panic::take_hook());
    if open && std::io::stderr().is_terminal() {
        let browser = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };
        // Without a browser on this machine, the address is printed.
        let _ = std::process::Command::new(browser)
            .arg(server.url())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn();
    }
    let shared = SharedPlanner(Mutex::new(Memory { planner: Planner::new(cache).quick(), last: None }));
    server.serve(&shared, include_str!("page.html"));
    Ok(Report::new(json!({}), String::new()))
}

/// One planner for plans and curves, so that both know what was fitted.
struct SharedPlanner(Mutex<Memory>);

struct Memory {
    planner: Planner,
    last: Option<(Vec<(String, String)>, Plan)>,
}

/// What an answer took.
struct Cost {
    seconds: f64,
    /// Fits that were not known before.
    fits: usize,
}

/// The fields of the page, read like flags.
#[derive(Parser)]
#[command(name = "plan", no_binary_name = true, disable_help_flag = true)]
struct Fields {
    #[command(flatten)]
    run: RunArgs,
    #[arg(long)]
    epsilon: f64,
    #[arg(long)]
    delta: f64,
    /// Only for [`RunArgs`], some of whose flags are not needed for a page.
    #[arg(long)]
    page: bool,
}

fn read(query: &[(String, String)]) -> Result<Fields, String> {
    let mut words = Vec::new();
    for (name, value) in query {
        match (name.as_str(), value.as_str()) {
            ("nesterov" | "coupled", "true") => words.push(format!("--{name}")),
            ("nesterov" | "coupled", _) => {}
            _ => words.push(format!("--{name}={value}")),
        }
    }
    Fields::try_parse_from(words).map_err(|error| {
        // The first line names the field and what is wrong with it.
        let text = error.to_string();
        let line = text.lines().next().unwrap_or_default();
        line.trim_start_matches("error: ").replace("--", "").to_owned()
    })
}

impl Fields {
    fn request(&self, epsilon: f64) -> Result<Request, String> {
        self.run.request(epsilon, self.delta).map_err(|error| failure::error_chain(&error))
    }
}

fn forward(progress: &dyn Fn(String)) -> impl FnMut(&str) -> ControlFlow<()> + '_ {
    |line: &str| {
        progress(line.to_owned());
        ControlFlow::Continue(())
    }
}

impl SharedPlanner {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn planned<T>(
        &self,
        query: &[(String, String)],
        progress: &dyn Fn(String),
        then: impl FnOnce(&Fields, &Plan, Cost) -> Result<T, String>,
    ) -> Result<T, String> {
        let (clock, fields) = (Instant::now(), read(query)?);
        let request = fields.request(fields.epsilon)?;
        let mut memory = self.memory();
        let Memory { planner, last } = &mut *memory;
        let before = planner.fits();
        if last.as_ref().is_none_or(|(known, _)| known != query) {
            let plan = planner.plan(&request, &mut forward(progress)).map_err(|error| error.to_string())?;
            *last = Some((query.to_vec(), plan));
        }
        match last {
            Some((_, plan)) => {
                let cost = Cost { seconds: clock.elapsed().as_secs_f64(), fits: planner.fits() - before };
                then(&fields, plan, cost)
            }
            None => Err("no plan was made".into()),
        }
    }
}

impl server::Planner for SharedPlanner {
    fn plan(&self, query: &[(String, String)], progress: &dyn Fn(String)) -> Result<String, String> {
        self.planned(query, progress, |fields, plan, cost| {
            let mut json = super::document(&fields.run, plan, cost.seconds);
            json["fits"] = json!(cost.fits);
            json["schema"] = json!(1);
            json["statement"] = json!(plan.chosen().mechanism().privacy().map(ToString::to_string));
            let (chosen, dp_sgd) = (plan.chosen().per_step(), plan.dp_sgd().per_step());
            let stride = chosen.len().div_ceil(SHOWN).max(1);
            let some = |values: &[f64]| values.iter().copied().step_by(stride).collect::<Vec<f64>>();
            json["per_step"] = json!({
                "steps": (0..chosen.len()).step_by(stride).collect::<Vec<usize>>(),
                "chosen": some(&chosen),
                "dp_sgd": some(&dp_sgd),
            });
            json["lines"] = lines(fields, plan);
            Ok(json.to_string())
        })
    }

    fn curve(&self, query: &[(String, String)], progress: &dyn Fn(String)) -> Result<String, String> {
        let fields = read(query)?;
        let epsilons: Vec<f64> = EPSILONS.map(|power| 2_f64.powi(power)).collect();
        let (mut planned, mut names, mut dp_sgd, mut bound) = (vec![], vec![], vec![], vec![]);
        for &epsilon in &epsilons {
            let request = fields.request(epsilon)?;
            let labelled = |line: String| progress(format!("curve at ε = {epsilon}: {line}"));
            let plan = self.memory().planner.survey(&request, &mut forward(&labelled));
            let plan = plan.map_err(|error| error.to_string())?;
            // Requests for a plan come first.
            std::thread::sleep(Duration::from_millis(20));
            planned.push(plan.chosen().rmse());
            names.push(plan.chosen().row().selector);
            dp_sgd.push(plan.dp_sgd().rmse());
            bound.push(plan.lower_bound_rmse());
        }
        let json = json!({
            "schema": 1,
            "epsilon": epsilons,
            "series": [
                { "name": "planned", "rmse": planned, "mechanism": names },
                { "name": "DP-SGD", "rmse": dp_sgd },
                { "name": "without sampling (certified bound)", "rmse": bound },
            ],
        });
        Ok(json.to_string())
    }

    fn file(&self, query: &[(String, String)]) -> Result<Vec<u8>, String> {
        self.planned(query, &|_| {}, |_, plan, _| {
            dpmf::format::to_bytes(plan.chosen().mechanism()).map_err(|error| error.to_string())
        })
    }
}

/// What to type to use the plan.
fn lines(fields: &Fields, plan: &Plan) -> serde_json::Value {
    let request = plan.request();
    let RunArgs { momentum, schedule, buffers, sampling, .. } = &fields.run;
    let mut flags = format!(
        "--examples {} --batch {} --epochs {} --epsilon {} --delta {:e}",
        request.examples, request.batch, request.epochs, request.epsilon, request.delta
    );
    if *momentum > 0.0 {
        flags += &format!(" --momentum {momentum}");
    }
    if fields.run.optimizer.nesterov {
        flags += " --nesterov";
    }
    if fields.run.optimizer.weight_decay > 0.0 {
        flags += &format!(" --weight-decay {}", fields.run.optimizer.weight_decay);
    }
    if schedule != "constant" {
        flags += &format!(" --schedule {schedule}");
    }
    if *buffers != dpmf::planner::BUFFERS {
        flags += &format!(" --buffers {buffers}");
    }
    if sampling != "auto" {
        flags += &format!(" --sampling {sampling}");
    }
    let sampled = plan.chosen().mechanism().sampling() != dpmf::Sampling::None;
    let steps = request.workload.steps();
    let sampler = match sampled {
        true => format!(
            "sampler = dpmf.Sampler(mechanism.sampling, key, units={}, steps={steps})\n",
            request.examples
        ),
        false => String::new(),
    };
    let with = |module: &str| {
        format!(
            "import dpmf{module}\n\nmechanism = dpmf.Mechanism.load(\"plan.safetensors\")\n\
             key = dpmf.NoiseKey.generate()\n{sampler}"
        )
    };
    let batches = match sampled {
        true => {
            "batches = dpmf.torch.SampledBatches(sampler)\n\
             loader = DataLoader(data, batch_sampler=batches, collate_fn=dpmf.torch.EmptyCollate(data))\n"
        }
        false => "# a loader that deals every example into the same batch of every epoch\n",
    };
    let members = if sampled { "sampler.members(step)" } else { "the batch of the step" };
    let stream = format!(
        "stream = dpmf.NoiseStream(mechanism, key, dimension=dimension)\n\
         # for every one of {steps} steps: clip and add up the gradients of {members}, then\n\
         stream.add_to(total)\n"
    );
    json!({
        "cli": format!(
            "dpmf plan {flags} --out plan.safetensors\ndpmf verify plan.safetensors\ndpmf key new run.key\n\
             dpmf noise plan.safetensors --dimension 1e6 --key-file run.key --rows 0..1 -o noise.npy"
        ),
        "opacus": format!(
            "{}{batches}sgd = torch.optim.SGD(model.parameters(), lr=0.1{})\n\
             optimizer = dpmf.torch.PrivateOptimizer(sgd, mechanism, key=key)\n\
             for inputs, targets in optimizer.batches(loader):\n    \
             optimizer.accumulate(model, cross_entropy, inputs, targets)\n    optimizer.step()\n",
            with(".torch"),
            if *momentum > 0.0 { format!(", momentum={momentum}") } else { String::new() },
        ),
        "jax": format!("{}{stream}", with("")),
        "flower": format!("{}{stream}", with("")),
    })
}
