//! `dpmf train` and `dpmf sweep` as a user runs them.
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

mod common;

use common::{failure, json};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Training that takes longer does not move.
const HANGS: Duration = Duration::from_secs(900);

/// A CSV file of users with a few words each.
fn messages(folder: &Path, users: usize, word: &str) -> PathBuf {
    let path = folder.join("messages.csv");
    let mut text = String::from("user,text\n");
    for user in 0..users {
        for line in 0..1 + user % 3 {
            text += &format!("u{user},{word} {} {}\n", ["sun", "moon", "star"][(user + line) % 3], user % 7);
        }
    }
    fs::write(&path, text).unwrap();
    path
}

const SMALL: [[&str; 2]; 5] =
    [["--rounds", "40"], ["--clients", "10"], ["--embedding", "4"], ["--hidden", "8"], ["--projection", "0"]];

/// A small training, where `more` comes before the usual settings.
fn train(data: &Path, more: &[&str]) -> Vec<String> {
    let usual = SMALL.iter().filter(|pair| !more.contains(&pair[0])).flatten();
    let base = ["train", "--data", data.to_str().unwrap()];
    base.iter().chain(usual).chain(more).map(|argument| (*argument).to_owned()).collect()
}

fn words(arguments: &[impl AsRef<str>]) -> Vec<&str> {
    arguments.iter().map(AsRef::as_ref).collect()
}

fn answer(arguments: &[impl AsRef<str>]) -> Value {
    json(&words(arguments))
}

fn refusal(arguments: &[impl AsRef<str>]) -> String {
    failure(&words(arguments)).1
}

fn program() -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("dpmf"));
    command.env_remove("HOME").env_remove("XDG_CACHE_HOME");
    command
}

fn model(folder: &Path, run: &str) -> Vec<u8> {
    fs::read(folder.join(run).join("model.safetensors")).unwrap()
}

#[test]
fn training_answers_as_the_contract_says() {
    let folder = tempfile::tempdir().unwrap();
    let data = messages(folder.path(), 700, "hello");
    let out = folder.path().join("run");
    let out_text = out.to_str().unwrap();
    let answer = answer(&train(
        &data,
        &["--mechanism", "optimal,independent,none", "--repeats", "2", "--out", out_text],
    ));
    assert_eq!((&answer["rounds"], &answer["clients"]), (&Value::from(40), &Value::from(10)));
    assert_eq!(answer["key"], "system");
    assert!(answer["epsilon"].as_f64().unwrap() <= 2.0 && answer["epsilon"].as_f64().unwrap() > 1.99);
    assert_eq!(answer["delta"], 1e-6);
    let runs = answer["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 6);
    let number = |run: &Value, name: &str| run[name].as_f64().unwrap();
    // Without noise nothing is random: "hello" is learned, and noise can only be worse.
    for (seed, run) in [(0, &runs[2]), (1, &runs[5])] {
        assert_eq!((&run["mechanism"], &run["seed"]), (&"none".into(), &seed.into()));
        assert!((0.75..0.95).contains(&number(run, "test_accuracy")), "{run}");
        for noisy in runs.iter().filter(|other| other["seed"] == seed && other["mechanism"] != "none") {
            assert!(number(noisy, "test_loss") > number(run, "test_loss"), "{noisy}");
            assert!(number(noisy, "test_accuracy") < number(run, "test_accuracy"), "{noisy}");
        }
    }
    assert!(runs.iter().all(|run| number(run, "seconds") > 0.0));
    let summary = answer["summary"].as_array().unwrap();
    let names: Vec<&str> = summary.iter().map(|row| row["mechanism"].as_str().unwrap()).collect();
    assert_eq!(names, ["optimal", "independent", "none"]);
    for row in summary {
        let (mean, ci) = (number(row, "test_accuracy_mean"), &row["test_accuracy_ci"]);
        let own: Vec<f64> = runs
            .iter()
            .filter(|run| run["mechanism"] == row["mechanism"])
            .map(|run| number(run, "test_accuracy"))
            .collect();
        assert!((mean - (own[0] + own[1]) / 2.0).abs() < 1e-12, "{row}: {own:?}");
        // Student's t with one degree of freedom: 12.7062 standard errors, and the accuracy ends at 0 and 1.
        let half = 12.7062 * (own[0] - own[1]).abs() / 2.0;
        for (end, exact) in [(&ci[0], mean - half), (&ci[1], mean + half)] {
            let end = end.as_f64().unwrap();
            assert!(
                (end - exact).abs() < 1e-4 || (end - exact.clamp(0.0, 1.0)).abs() < 1e-4,
                "{row}: {exact}"
            );
        }
    }

    // The report stands alone: pictures inside, nothing fetched.
    let report = fs::read_to_string(answer["report"].as_str().unwrap()).unwrap();
    assert!(report.contains("<svg") && report.contains("optimal") && report.contains("validation accuracy"));
    assert!(report.len() < 100_000, "{} bytes", report.len());
    for fetched in ["http", "<script", "<link", "<img", "src="] {
        assert!(!report.contains(fetched), "{fetched}");
    }
    // Each run has its own secret, for its owner alone; without noise it marks the data.
    #[cfg(unix)]
    for run in ["optimal-0", "optimal-1", "independent-0", "none-0"] {
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(fs::metadata(out.join(run).join("key")).unwrap().permissions().mode() & 0o777, 0o600);
    }
    assert_ne!(fs::read(out.join("optimal-0/key")).unwrap(), fs::read(out.join("optimal-1/key")).unwrap());

    // The model writes: the same for a seed, to a length, from a beginning that it knows.
    let sample =
        |more: &[&str]| json(&[&["sample", out_text, "--count", "5", "--length", "12"], more].concat());
    let texts = sample(&[])["texts"].as_array().unwrap().clone();
    assert_eq!((texts.len(), &sample(&[])["model"]["epsilon"]), (5, &Value::from(2.0)));
    assert_eq!(sample(&[])["texts"].as_array().unwrap(), &texts);
    assert_ne!(sample(&["--seed", "1"])["texts"].as_array().unwrap(), &texts);
    let begun = sample(&["--start", "hell", "--run", "none-0"]);
    for text in begun["texts"].as_array().unwrap() {
        let text = text.as_str().unwrap();
        assert!(text.starts_with("hell") && text.chars().count() <= 16, "{text}");
    }
    assert!(refusal(&["sample", out_text, "--run", "other"]).contains("none-1"));
    assert!(refusal(&["sample", out_text, "--start", "\u{2603}"]).contains("does not know"));
    assert!(refusal(&["sample", folder.path().to_str().unwrap()]).contains("holds no run"));

    // The directory is taken; resuming a run that has ended says the same again.
    let again = refusal(&train(&data, &["--out", out_text]));
    assert!(again.contains("--resume"), "{again}");
    let resumed = json(&["train", "--resume", out_text]);
    assert_eq!(resumed["runs"], answer["runs"]);
}

#[test]
fn a_seed_repeats_a_run_to_the_bit_and_other_gradients_get_other_noise() {
    let folder = tempfile::tempdir().unwrap();
    let data = messages(folder.path(), 700, "hello");
    let run = |name: &str, data: &Path, threads: &str, hidden: &str| {
        let out = folder.path().join(name);
        let out_text = out.to_str().unwrap();
        let more = ["--mechanism", "optimal", "--seed", "7", "--hidden", hidden, "--json", "--out", out_text];
        let arguments = train(data, &more);
        let answer = program().args(&arguments).env("RAYON_NUM_THREADS", threads).output().unwrap();
        assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
        let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
        assert_eq!(answer["key"], "seeded");
        assert!(answer["statement"].to_string().contains("seed"), "{}", answer["statement"]);
        let manifest: Value =
            serde_json::from_slice(&fs::read(out.join("optimal-0/run.json")).unwrap()).unwrap();
        (model(&out, "optimal-0"), manifest["run"].as_str().unwrap().to_owned())
    };
    let first = run("a", &data, "1", "8");
    assert_eq!(run("b", &data, "2", "8"), first);
    assert_eq!(run("c", &data, "3", "8"), first);
    let elsewhere = tempfile::tempdir().unwrap();
    let other = messages(elsewhere.path(), 700, "bye");
    assert_ne!(run("d", &other, "2", "8").1, first.1, "another run id, hence other noise");
    assert_ne!(run("e", &data, "2", "9").1, first.1, "another model has other gradients");
}

#[test]
fn a_killed_run_resumes_to_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    let data = messages(folder.path(), 3700, "hello");
    let arguments = |out: &Path| {
        let out = out.to_str().unwrap();
        train(
            &data,
            &["--rounds", "300", "--mechanism", "optimal,honaker-online", "--seed", "3", "--out", out],
        )
    };
    let whole = folder.path().join("whole");
    answer(&arguments(&whole));
    let broken = folder.path().join("broken");
    let started = Instant::now();
    let journal = |run: &str| fs::metadata(broken.join(run).join("journal")).map_or(0, |file| file.len());
    let mut kills = 0;
    // Each time a little further on, in either run, between checkpoints and at them.
    for records in [3, 40, 64, 65, 130, 290] {
        for run in ["optimal-0", "honaker-online-0"] {
            if journal(run) >= 256 + 64 * records {
                continue;
            }
            let mut command = program();
            match broken.join("experiment.json").exists() {
                true => command.args(["train", "--resume", broken.to_str().unwrap()]),
                false => command.args(arguments(&broken)),
            };
            let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            while journal(run) < 256 + 64 * records && child.try_wait().unwrap().is_none() {
                assert!(started.elapsed() < HANGS, "training does not move");
                std::thread::sleep(Duration::from_millis(2));
            }
            child.kill().unwrap();
            // A child that had ended by itself has a code instead.
            kills += usize::from(child.wait().unwrap().code().is_none());
        }
    }
    assert!(kills >= 6, "{kills}");
    json(&["train", "--resume", broken.to_str().unwrap()]);
    for run in ["optimal-0", "honaker-online-0"] {
        assert_eq!(model(&broken, run), model(&whole, run), "{run}");
    }
}

#[test]
fn what_keeps_a_run_from_being_resumed_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let data = messages(folder.path(), 700, "hello");
    let out = folder.path().join("run");
    answer(&train(&data, &["--mechanism", "optimal", "--out", out.to_str().unwrap()]));
    let run = out.join("optimal-0");
    fs::remove_file(run.join("outcome.json")).unwrap();
    let resume = ["train", "--resume", out.to_str().unwrap()];

    // Other data under the same name.
    messages(folder.path(), 700, "changed");
    let refused = refusal(&resume);
    assert!(refused.contains("training data differs from what the run began with"), "{refused}");
    messages(folder.path(), 700, "hello");

    // A key that others may read, then none.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(run.join("key"), fs::Permissions::from_mode(0o644)).unwrap();
        assert!(refusal(&resume).contains("key"));
        fs::set_permissions(run.join("key"), fs::Permissions::from_mode(0o600)).unwrap();
    }
    fs::rename(run.join("key"), run.join("lost")).unwrap();
    let lost = refusal(&resume);
    assert!(lost.contains("cannot be resumed") && lost.contains("new run"), "{lost}");
    fs::rename(run.join("lost"), run.join("key")).unwrap();
    json(&resume);

    let nothing = refusal(&["train", "--resume", folder.path().to_str().unwrap()]);
    assert!(nothing.contains("holds no run"), "{nothing}");
}

#[test]
fn bad_settings_are_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let data = messages(folder.path(), 700, "hello");
    let out = folder.path().join("run");
    for (more, part) in [
        (vec!["--mechanism", "best"], "mechanism"),
        (vec!["--mechanism", "optimal,optimal"], "twice"),
        (vec!["--server-lr", "0"], "server learning rate"),
        (vec!["--momentum", "1"], "momentum"),
        (vec!["--schedule", "sometimes"], "sometimes"),
        (vec!["--repeats", "0"], "repeats"),
        (vec!["--hidden", "0"], "hidden"),
        (vec!["--model", "mlp"], "lstm"),
        (vec!["--epsilon", "1", "--noise-multiplier", "2"], "noise-multiplier"),
        (vec!["--key-file", "none", "--seed", "2"], "seed"),
        (vec!["--epochs", "2", "--rounds", "8"], "rounds"),
        (vec!["--plan", "plan.safetensors", "--epsilon", "2"], "epsilon"),
        (vec!["--mechanism", "planned"], "--epochs"),
        (vec!["--mechanism", "blt:buffers=2", "--sampling", "balls-in-bins:7"], "remove it"),
        (vec!["--mechanism", "blt:buffers=2", "--sampling", "balls-in-bins:11", "--clients", "55"], "epoch"),
    ] {
        let mut more = more;
        more.extend(["--out", out.to_str().unwrap()]);
        let message = refusal(&train(&data, &more));
        assert!(message.contains(part), "{more:?}: {message}");
        assert!(!out.join("experiment.json").exists(), "{more:?}");
    }
    for (more, part) in [
        (vec!["--clients", "100"], "single pass"),
        (vec!["--epsilon", "-1"], "epsilon"),
        (vec!["--delta", "2"], "delta"),
        (vec!["--clip", "0"], "clip"),
        (vec!["--client-lr", "-1"], "client learning rate"),
        (vec!["--dropout", "1"], "dropout"),
        (vec!["--key-file", "none"], "none"),
    ] {
        let out = folder.path().join(part.replace(' ', "-"));
        let mut more = more;
        more.extend(["--out", out.to_str().unwrap()]);
        let message = refusal(&train(&data, &more));
        assert!(message.contains(part), "{more:?}: {message}");
    }
    let missing = refusal(&train(&folder.path().join("missing.csv"), &[]));
    assert!(missing.contains("missing.csv"), "{missing}");
}

#[test]
fn a_sweep_tunes_on_validation_reports_on_test_and_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let data = messages(folder.path(), 700, "hello");
    let (config, out) = (folder.path().join("grid.toml"), folder.path().join("sweep"));
    fs::write(
        &config,
        "mechanism = [\"optimal\", \"none\"]\nnoise_multiplier = [1.0, 4.0]\nserver_lr = [0.2, 1.0]\n",
    )
    .unwrap();
    let arguments: Vec<&str> = vec![
        "sweep",
        "--data",
        data.to_str().unwrap(),
        "--config",
        config.to_str().unwrap(),
        "--rounds",
        "30",
        "--clients",
        "10",
        "--embedding",
        "4",
        "--hidden",
        "8",
        "--projection",
        "0",
        "--repeats",
        "2",
        "--out",
        out.to_str().unwrap(),
    ];
    let answer = json(&arguments);
    let rows = answer["rows"].as_array().unwrap();
    // Two noise levels for the private mechanism, one row without noise.
    assert_eq!(rows.len(), 3);
    assert_eq!(answer["tuning_runs"], 6);
    // Two noise levels, each tuned over two rates and repeated twice: 4 private runs at σ = 1 and 4 at σ = 4 compose to one
    // of σ = 1/√(4 + 4/16).
    let sigma = (4.0_f64 + 0.25).sqrt().recip().to_string();
    let alone = json(&["account", "--noise-multiplier", &sigma, "--delta", "1e-6"]);
    assert_eq!(answer["together"]["models"], 8);
    let (all, one) = (&answer["together"]["epsilon"], &alone["epsilon_exact"]);
    assert!((all.as_f64().unwrap() / one.as_f64().unwrap() - 1.0).abs() < 1e-9, "{all} {one}");
    assert!(rows.iter().all(|row| row["runs"] == 2 && row["test_accuracy_ci"].is_array()), "{rows:?}");
    let lines: Vec<Value> = fs::read_to_string(out.join("runs.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 12);
    for line in &lines {
        let tuning = line["purpose"] == "tuning";
        assert_eq!(line["outcome"]["test"].is_null(), tuning, "test users are for reports alone");
    }
    assert_eq!(fs::read_to_string(out.join("summary.csv")).unwrap().lines().count(), 4);

    // The page stands alone, with a row for each setting and what the tuning saw.
    let page = fs::read_to_string(answer["report"].as_str().unwrap()).unwrap();
    assert_eq!(page.matches("<tr role=row><td").count(), 3);
    for part in [
        "ε covers each run on its own, not the tuning",
        "Tuning",
        "Accuracy against noise",
        "prefers-color-scheme:dark",
    ] {
        assert!(page.contains(part), "{part}");
    }
    assert!(
        page.contains(&format!("{:.4}\u{a0}±", rows[0]["test_accuracy_mean"].as_f64().unwrap())),
        "{page}"
    );
    for fetched in ["http", "<script", "<link", "<img", "src="] {
        assert!(!page.contains(fetched), "{fetched}");
    }

    // A torn line is done again; the rest is not.
    let text = fs::read_to_string(out.join("runs.jsonl")).unwrap();
    fs::write(out.join("runs.jsonl"), &text[..text.len() - 40]).unwrap();
    let again = json(&arguments);
    let accuracy = |answer: &Value| -> Vec<f64> {
        answer["rows"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| row["test_accuracy_mean"].as_f64().unwrap())
            .collect()
    };
    assert_eq!(accuracy(&again), accuracy(&answer));
    assert_eq!(fs::read_to_string(out.join("runs.jsonl")).unwrap().lines().count(), 12);

    // Widened until the best rate has one on either side; what was tuned before is not tuned again.
    let widened = json(&[&arguments[..], &["--widen"]].concat());
    let lines = fs::read_to_string(out.join("runs.jsonl")).unwrap();
    for row in widened["rows"].as_array().unwrap() {
        let best = row["server_lr"].as_f64().unwrap();
        let tried: Vec<f64> = lines
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap())
            .filter(|line| {
                line["purpose"] == "tuning" && line["settings"]["recipe"]["mechanism"] == row["mechanism"]
            })
            .map(|line| line["settings"]["server_learning_rate"].as_f64().unwrap())
            .collect();
        assert!(
            tried.iter().any(|rate| *rate < best) && tried.iter().any(|rate| *rate > best),
            "{row}: {tried:?}"
        );
    }
    assert!(widened["tuning_runs"].as_u64().unwrap() > 6, "{widened}");

    fs::write(&config, "mechanisms = [\"optimal\"]\n").unwrap();
    let unknown = refusal(&arguments);
    assert!(unknown.contains("mechanisms"), "{unknown}");
}

/// The settings of a training for several epochs.
fn epochs<'a>(data: &'a Path, out: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let small = ["--clients", "50", "--embedding", "4", "--hidden", "8", "--projection", "0"];
    let base = ["train", "--data", data.to_str().unwrap(), "--out", out.to_str().unwrap()];
    [&base[..], &small, more].concat()
}

#[test]
fn epochs_are_planned_and_a_plan_file_trains() {
    let folder = tempfile::tempdir().unwrap();
    let data = messages(folder.path(), 700, "hello");
    let out = folder.path().join("run");
    let planned = json(&epochs(&data, &out, &["--epochs", "4", "--epsilon", "3"]));
    let users = planned["users"].as_u64().unwrap();
    let steps = (users as f64 / 50.0).round() as u64;
    assert_eq!(planned["rounds"], 4 * steps);
    assert_eq!(planned["epsilon"], 3.0);
    // On somebody's own data one model is trained, with the planner's choice.
    let runs = planned["runs"].as_array().unwrap();
    assert_eq!((runs.len(), &runs[0]["asked"]), (1, &Value::from("planned")));
    let sampling = runs[0]["sampling"].as_str().unwrap();
    let (kind, bins) = sampling.split_once(':').unwrap();
    assert!(["balls-in-bins", "reshuffled-bins"].contains(&kind) && bins == steps.to_string(), "{sampling}");
    assert_eq!(planned["participation"]["times"], 4);
    let statement = planned["statement"].to_string();
    assert!(statement.contains(kind), "{statement}");
    // Its plan is a mechanism file like any other.
    let file = out.join("planned-0/plan.safetensors");
    json(&["verify", file.to_str().unwrap()]);

    let plan = folder.path().join("plan.safetensors");
    let (users, plan_text) = (users.to_string(), plan.to_str().unwrap());
    let budget =
        ["--epochs", "4", "--epsilon", "3", "--delta", "1e-6", "--momentum", "0.9", "--unit", "user"];
    // Without noise decay, which a training supposes: another plan.
    let alone = json(
        &[&["plan", "--examples", &users, "--batch", "50"], &budget[..], &["--out", plan_text]].concat(),
    );
    let by_file = json(
        &[
            &["train", "--data", data.to_str().unwrap(), "--plan", plan_text],
            &epochs(&data, &folder.path().join("file"), &[])[3..5],
            &["--hidden", "8"],
        ]
        .concat(),
    );
    assert_eq!(by_file["rounds"], planned["rounds"]);
    assert_eq!(by_file["runs"][0]["sampling"], alone["chosen"]["sampling"]);
    assert_eq!(by_file["epsilon"], 3.0);
    // A plan for records does not serve users.
    let records =
        [&["plan", "--examples", &users, "--batch", "50"], &budget[..8], &["--out", plan_text]].concat();
    json(&records);
    let refused = refusal(&["train", "--data", data.to_str().unwrap(), "--plan", plan_text]);
    assert!(refused.contains("for every record") && refused.contains("for every user"), "{refused}");
}

#[test]
fn killed_runs_of_several_epochs_resume_to_the_same_models() {
    let folder = tempfile::tempdir().unwrap();
    let data = messages(folder.path(), 700, "hello");
    let more = ["--epochs", "3", "--mechanism", "planned,dp-sgd,recall:buffers=2:recalls=1", "--seed", "3"];
    let runs = ["planned-0", "dp-sgd-0", "recall-buffers-2-recalls-1-0"];
    let (whole, broken) = (folder.path().join("whole"), folder.path().join("broken"));
    json(&epochs(&data, &whole, &more));
    let journal = |run: &str| fs::metadata(broken.join(run).join("journal")).map_or(0, |file| file.len());
    let started = Instant::now();
    let mut kills = 0;
    for run in runs {
        for records in [2, 15, 33] {
            let mut command = program();
            match broken.join("experiment.json").exists() {
                true => command.args(["train", "--resume", broken.to_str().unwrap()]),
                false => command.args(epochs(&data, &broken, &more)),
            };
            let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            while journal(run) < 256 + 64 * records && child.try_wait().unwrap().is_none() {
                assert!(started.elapsed() < HANGS, "training does not move");
                std::thread::sleep(Duration::from_millis(2));
            }
            child.kill().unwrap();
            // A child that had ended by itself has a code instead.
            kills += usize::from(child.wait().unwrap().code().is_none());
        }
    }
    assert!(kills >= 6, "{kills}");
    json(&["train", "--resume", broken.to_str().unwrap()]);
    for run in runs {
        assert_eq!(model(&broken, run), model(&whole, run), "{run}");
    }
    assert_ne!(model(&whole, runs[0]), model(&whole, runs[1]));
}

#[test]
fn a_sweep_over_epochs_plans_each_budget_once() {
    let folder = tempfile::tempdir().unwrap();
    let data = messages(folder.path(), 700, "hello");
    let out = folder.path().join("sweep");
    let arguments = [
        &["sweep", "--data", data.to_str().unwrap(), "--out", out.to_str().unwrap(), "--clients", "50"][..],
        &["--embedding", "4", "--hidden", "8", "--projection", "0", "--epochs", "3", "--repeats", "1"],
        &["--mechanism", "planned,dp-sgd", "--epsilon", "1,4", "--server-lr", "0.2,0.5"],
    ]
    .concat();
    let answer = json(&arguments);
    let rows = answer["rows"].as_array().unwrap();
    let of = |mechanism: &str, epsilon: f64| {
        rows.iter().find(|row| row["mechanism"] == mechanism && row["epsilon"] == epsilon).unwrap()
    };
    for epsilon in [1.0, 4.0] {
        assert!(of("planned", epsilon)["sampling"].as_str().unwrap().contains("bins:"));
        assert!(of("dp-sgd", epsilon)["sampling"].as_str().unwrap().starts_with("cyclic-poisson:1:"));
    }
    assert_eq!((rows.len(), &answer["tuning_runs"]), (4, &Value::from(8)));
    // Amplification runs are added up: 3 of each budget and mechanism.
    let together = &answer["together"];
    assert_eq!(together["models"], 12);
    assert!((together["epsilon"].as_f64().unwrap() - 30.0).abs() < 1e-6, "{together}");
    assert!((together["delta"].as_f64().unwrap() / 12e-6 - 1.0).abs() < 1e-9, "{together}");
    assert_eq!(json(&arguments)["rows"], answer["rows"]);
}

#[test]
fn all_rounds_that_come_out_differently_are_burned_in_one_start() {
    let folder = tempfile::tempdir().unwrap();
    let data = messages(folder.path(), 700, "hello");
    let out = folder.path().join("run");
    let arguments =
        train(&data, &["--mechanism", "independent", "--seed", "3", "--out", out.to_str().unwrap()]);
    let mut child = program().args(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let run = out.join("independent-0");
    while fs::metadata(run.join("journal")).map_or(0, |file| file.len()) < 256 + 64 * 5 {
        assert!(child.try_wait().unwrap().is_none(), "the training ended before it was killed");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // Another model than the one whose gradients were released: no round comes out the same.
    let checkpoint = run.join("server-00000000.safetensors");
    let mut bytes = fs::read(&checkpoint).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&7.5_f32.to_le_bytes());
    fs::write(&checkpoint, bytes).unwrap();
    let message = refusal(&["train", "--resume", out.to_str().unwrap()]);
    assert!(message.contains("pass --burn to give up all rounds of this kind"), "{message}");
    let resumed = program().args(["train", "--burn", "--resume", out.to_str().unwrap()]).output().unwrap();
    assert!(resumed.status.success(), "{resumed:?}");
    let told = String::from_utf8(resumed.stderr).unwrap();
    let burned: Vec<&str> =
        told.lines().filter(|line| line.contains(" given up: its noise is never used")).collect();
    assert!(burned.len() >= 5, "{told}");
    for (round, line) in burned.iter().enumerate() {
        assert_eq!(*line, format!("round {round} given up: its noise is never used"));
    }
}

#[test]
fn a_start_that_fails_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let data = messages(folder.path(), 700, "hello");
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(at("short.key"), b"key").unwrap();
    fs::write(at("torn.ledger"), b"{").unwrap();
    json(&["ledger", "new", &at("small.ledger"), "--epsilon", "1", "--delta", "1e-6"]);
    fs::create_dir(at("there")).unwrap();
    for (flags, part) in [
        (["--key-file", &at("short.key")], "short.key"),
        (["--key-file", &at("missing.key")], "missing.key"),
        (["--ledger", &at("torn.ledger")], "torn.ledger"),
        (["--ledger", &at("missing.ledger")], "missing.ledger"),
        (["--ledger", &at("small.ledger")], "Nothing was recorded or released"),
    ] {
        for out in [at("new/run"), at("there")] {
            let message = refusal(&train(
                &data,
                &[&flags[..], &["--mechanism", "independent", "--out", &out]].concat(),
            ));
            assert!(message.contains(part), "{message}");
            assert!(!folder.path().join("new").exists());
            let left: Vec<_> =
                fs::read_dir(at("there")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert!(left.is_empty() || left == ["lock"], "{left:?}");
        }
    }
    answer(&train(&data, &["--mechanism", "independent", "--out", &at("there")]));
}

#[test]
fn rows_of_other_seeds_and_grids_in_a_directory_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let data = messages(folder.path(), 700, "hello");
    let out = folder.path().join("sweep");
    let sweep = |more: &[&str]| {
        let (data, out) = (data.to_str().unwrap(), out.to_str().unwrap());
        let usual =
            ["sweep", "--data", data, "--rounds", "20", "--clients", "10", "--hidden", "8", "--repeats", "1"];
        json(&[&usual[..], &["--out", out], more].concat())
    };
    let first = sweep(&["--mechanism", "independent"]);
    assert_eq!(first["rows"][0]["schedule"], "cooldown:0.25:0.05", "the default of train");
    let runs = || fs::read_to_string(out.join("runs.jsonl")).unwrap().lines().count();
    let summary = || fs::read_to_string(out.join("summary.csv")).unwrap();
    assert_eq!((runs(), summary().lines().count()), (1, 2));
    // Another seed is other noise, hence another run, and other numbers.
    let second = sweep(&["--mechanism", "independent", "--seed", "1"]);
    assert_eq!((runs(), summary().lines().count()), (2, 3));
    let loss = |answer: &Value| answer["rows"][0]["test_loss_mean"].as_f64().unwrap();
    assert_ne!(loss(&first), loss(&second));
    let third = sweep(&["--mechanism", "none"]);
    assert_eq!(third["rows"].as_array().unwrap().len(), 1);
    assert_eq!((runs(), summary().lines().count()), (3, 4));
    // The first again: its row is there once.
    assert_eq!(loss(&sweep(&["--mechanism", "independent"])), loss(&first));
    assert_eq!((runs(), summary().lines().count()), (3, 4));
    let seeds: Vec<String> =
        summary().lines().map(|line| line.rsplit(',').next().unwrap().to_owned()).collect();
    assert_eq!(seeds, ["seed", "1", "0", "0"]);
    // What is no sweep is not written over.
    fs::write(out.join("runs.jsonl"), "notes\nof mine\n").unwrap();
    let words =
        ["sweep", "--data", data.to_str().unwrap(), "--mechanism", "none", "--out", out.to_str().unwrap()];
    assert!(failure(&words).1.contains("this version did not write"));
    assert_eq!(fs::read_to_string(out.join("runs.jsonl")).unwrap(), "notes\nof mine\n");
}
