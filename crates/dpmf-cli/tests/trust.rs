//! What a run is bound to, what it states, and what it refuses, as a user meets it.
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

mod common;

use common::{failure, json};
use dpmf_train::Plan;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        let row = |user: usize| format!("u{user},hello {} {}\n", ["sun", "moon", "star"][user % 3], user % 7);
        let rows: String = (0..700).map(row).collect();
        fs::write(folder.path("people.csv"), format!("user,text\n{rows}")).unwrap();
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// The arguments of a small training into `out`.
    fn train(&self, out: &str, more: &[&str]) -> Vec<String> {
        let (data, out) = (self.text("people.csv"), self.text(out));
        let usual =
            ["--rounds", "30", "--clients", "10", "--embedding", "4", "--hidden", "8", "--projection", "0"];
        let all = [&["train", "--data", &data, "--out", &out][..], &usual, more].concat();
        all.into_iter().map(str::to_owned).collect()
    }
}

fn words(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

fn run(arguments: &[String]) -> Value {
    json(&words(arguments))
}

fn refusal(arguments: &[&str]) -> String {
    failure(arguments).1
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut value);
    fs::write(path, serde_json::to_vec(&value).unwrap()).unwrap();
}

#[test]
fn a_run_resumes_with_the_plan_it_began_with_or_not_at_all() {
    let folder = Folder::new();
    run(&folder.train("run", &["--mechanism", "optimal"]));
    let place = folder.path("run/optimal-0");
    fs::remove_file(place.join("outcome.json")).unwrap();
    let (plan, manifest) = (place.join("plan.safetensors"), place.join("run.json"));
    let out = folder.text("run");
    let resume = ["train", "--resume", &out];
    let began = fs::read(&plan).unwrap();
    for (what, other, of) in [
        ("clip", &["--clip", "1000"][..], "optimal-0"),
        ("seed", &["--repeats", "2"], "optimal-1"),
        ("local steps", &["--client-lr", "1"], "optimal-0"),
        ("learning rate", &["--server-lr", "0.3"], "optimal-0"),
        ("drop-outs", &["--dropout", "0.5"], "optimal-0"),
    ] {
        let name = what.replace(' ', "-");
        run(&folder.train(&name, &[&["--mechanism", "optimal"], other].concat()));
        let other = Plan::load(folder.path(&name).join(of).join("plan.safetensors")).unwrap();
        other.save(&plan).unwrap();
        let message = refusal(&resume);
        assert!(message.contains("the plan differs from what the run began with"), "{what}: {message}");
        // Whoever edits the manifest too meets the journal, whose header is sealed by the key.
        let before = fs::read(&manifest).unwrap();
        let hash: String = other.hash().iter().map(|byte| format!("{byte:02x}")).collect();
        edit_json(&manifest, |manifest| manifest["binding"]["plan"] = hash.into());
        let message = refusal(&resume);
        assert!(
            message.contains("belongs to another")
                || message.contains("differs from what the run began with"),
            "{what}: {message}"
        );
        fs::write(&manifest, before).unwrap();
    }
    // A recipe edited in place no longer fits the hash of its file.
    // The header is JSON within JSON, its quotation marks escaped.
    let pattern = br#"\"dropout\":0.0"#;
    let at = began.windows(pattern.len()).position(|part| part == pattern).unwrap();
    let mut edited = began.clone();
    edited[at + pattern.len() - 1] = b'5';
    fs::write(&plan, edited).unwrap();
    assert!(refusal(&resume).contains("edited"));
    fs::write(&plan, &began).unwrap();
    json(&resume);
}

#[test]
fn models_of_the_same_users_are_stated_together() {
    let folder = Folder::new();
    // One's own data is trained on once, unless more is asked for.
    let one = run(&folder.train("one", &[]));
    assert_eq!((one["runs"].as_array().unwrap().len(), &one["together"]), (1, &Value::Null));

    let three = run(&folder.train("three", &["--mechanism", "optimal,independent,none", "--repeats", "2"]));
    let together = &three["together"];
    assert_eq!((&together["models"], &together["epsilon_alone"]), (&4.into(), &2.0.into()));
    // Four Gaussian mechanisms have twice the μ of one: between √4 and 4 times nothing but that ε.
    let epsilon = together["epsilon"].as_f64().unwrap();
    let sigma = three["noise_multiplier"].as_f64().unwrap() / 2.0;
    let twice = json(&["account", "--noise-multiplier", &sigma.to_string(), "--delta", "1e-6"]);
    assert!((epsilon - twice["epsilon_exact"].as_f64().unwrap()).abs() < 1e-9, "{epsilon}");
    let report = fs::read_to_string(three["report"].as_str().unwrap()).unwrap();
    assert!(report.contains("all 4 together"), "the report says it");
    let again = Command::new(assert_cmd::cargo::cargo_bin!("dpmf"))
        .args(["train", "--resume", &folder.text("three")])
        .output()
        .unwrap();
    let text = String::from_utf8(again.stdout).unwrap();
    assert!(text.contains("Each model alone ε = 2; all 4 together"), "{text}");
    // A person may read who is who.
    assert!(text.contains("Each value of the column `user` counts as one user"), "{text}");
}

#[test]
fn whose_words_are_public_is_said_beside_the_statement() {
    let folder = Folder::new();
    let arguments = folder.train("words", &["--tokens", "words", "--public-share", "0.1"]);
    let output = Command::new(assert_cmd::cargo::cargo_bin!("dpmf")).args(&arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("who are treated as public") && text.contains("ε does not cover them"), "{text}");
    let answer = json(&["train", "--resume", &folder.text("words")]);
    assert!(answer["notes"].to_string().contains("treated as public"), "{answer}");
}

#[test]
fn an_experiment_keeps_its_seed_to_its_owner_and_its_runs_inside() {
    let folder = Folder::new();
    run(&folder.train("run", &["--seed", "7"]));
    let experiment = folder.path("run/experiment.json");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(fs::metadata(&experiment).unwrap().permissions().mode() & 0o777, 0o600);
    }
    for name in [folder.text("elsewhere"), "../elsewhere".into(), "a/b".into(), "..".into(), String::new()] {
        edit_json(&experiment, |experiment| experiment["runs"][0] = name.clone().into());
        let message = refusal(&["train", "--resume", &folder.text("run")]);
        assert!(message.contains("has no directory with that name"), "{name}: {message}");
    }
    assert!(!folder.path("elsewhere").exists());
}

#[test]
fn one_process_works_in_a_directory_at_a_time() {
    let folder = Folder::new();
    run(&folder.train("run", &[]));
    let lock = fs::File::options().write(true).open(folder.path("run/lock")).unwrap();
    lock.lock().unwrap();
    assert!(refusal(&["train", "--resume", &folder.text("run")]).contains("locked"));
    drop(lock);
    json(&["train", "--resume", &folder.text("run")]);

    fs::create_dir(folder.path("busy")).unwrap();
    let lock = fs::File::create(folder.path("busy/lock")).unwrap();
    lock.lock().unwrap();
    assert!(refusal(&words(&folder.train("busy", &[]))).contains("locked"));
    assert!(!folder.path("busy/experiment.json").exists());
}

#[test]
fn a_ledger_counts_what_is_released_and_refuses_what_is_too_much() {
    let folder = Folder::new();
    let ledger = folder.text("people.ledger");
    let empty = json(&["ledger", "new", &ledger, "--epsilon", "3", "--delta", "1e-6"]);
    assert_eq!((&empty["epsilon_spent"], &empty["unit"]), (&0.0.into(), &"user".into()));
    assert!(
        refusal(&["ledger", "new", &ledger, "--epsilon", "9", "--delta", "1e-6"])
            .contains("never overwritten")
    );

    run(&folder.train("first", &["--ledger", &ledger]));
    let spent = json(&["ledger", "show", &ledger]);
    let epsilon = spent["epsilon_spent"].as_f64().unwrap();
    assert!(epsilon <= 2.0 && epsilon > 2.0 - 1e-9, "{epsilon}");
    // Resuming is no second release.
    json(&["train", "--resume", &folder.text("first")]);
    assert_eq!(json(&["ledger", "show", &ledger])["releases"].as_array().unwrap().len(), 1);

    // Two more would make 3.70, and nothing of the run is left behind.
    let (kind, message) =
        failure(&words(&folder.train("second", &["--ledger", &ledger, "--mechanism", "optimal,tree"])));
    assert_eq!(kind, "budget");
    assert!(message.contains("ε = 2 is spent") && message.contains("the total to ε = 3.70"), "{message}");
    assert!(!folder.path("second").exists());
    // Without noise nothing is released privately, and one that fits is recorded.
    run(&folder.train("none", &["--ledger", &ledger, "--mechanism", "none"]));
    run(&folder.train("third", &["--ledger", &ledger, "--epsilon", "1"]));
    let spent = json(&["ledger", "show", &ledger])["epsilon_spent"].as_f64().unwrap();
    assert!(spent > 2.0 && spent < 3.0, "{spent}");

    // A mechanism that was run elsewhere; the same name does not count twice.
    let mechanism = folder.text("m.safetensors");
    let make = [
        "calibrate",
        "--steps",
        "16",
        "--epsilon",
        "0.5",
        "--delta",
        "1e-6",
        "--clip",
        "1",
        "--out",
        &mechanism,
    ];
    json(&make);
    let add = ["ledger", "add", &ledger, &mechanism, "--id", "survey", "--what", "a survey"];
    let added = json(&add);
    assert_eq!(json(&add)["epsilon_spent"], added["epsilon_spent"]);
    assert_eq!(added["releases"][2]["what"], "a survey");
    let record = [&make[..], &["--unit", "record"]].concat();
    json(&record);
    assert!(refusal(&["ledger", "add", &ledger, &mechanism]).contains("other unit of privacy"));
    assert!(refusal(&["ledger", "show", &mechanism]).contains("not a valid ledger"));
}

#[test]
fn a_ledger_takes_groups_and_releases_by_other_means() {
    let folder = Folder::new();
    let (ledger, mechanism) = (folder.text("people.ledger"), folder.text("m.safetensors"));
    json(&["ledger", "new", &ledger, "--epsilon", "3", "--delta", "1e-6"]);
    let target = ["--epsilon", "2", "--delta", "1e-6", "--clip", "1"];
    json(&[&["calibrate", "--steps", "16", "--out", &mechanism], &target[..]].concat());
    let add = ["ledger", "add", &ledger, &mechanism, &mechanism];
    let together = json(&[&add[..], &["--together", "--id", "both"]].concat());
    // Decided together they compose exactly.
    assert_eq!(
        (&together["decisions"], &together["epsilon_spent"]),
        (&1.into(), &together["epsilon_if_fixed"])
    );
    assert_eq!(together["releases"][1]["id"], "both/2");
    assert_eq!(together["releases"][1]["group"], together["releases"][0]["group"]);

    let counts = ["ledger", "add", &ledger, "--epsilon", "0.01", "--delta", "0", "--id", "counts"];
    let after = json(&counts);
    assert_eq!(after["decisions"], 2);
    assert_eq!(after["releases"][2]["guarantee"], serde_json::json!([0.01, 0.0]));
    assert!(after["epsilon_spent"].as_f64().unwrap() > after["epsilon_if_fixed"].as_f64().unwrap());
    let shown = common::dpmf(&["ledger", "show", &ledger]);
    let text = String::from_utf8_lossy(&shown.stdout);
    assert!(text.contains("Decided one after another"), "{text}");

    // Alone, one of the two would still fit; not both.
    assert_eq!(failure(&add).0, "budget");
    for bad in [
        &["ledger", "add", &ledger][..],
        &["ledger", "add", &ledger, "--epsilon", "1"],
        &["ledger", "add", &ledger, &mechanism, "--epsilon", "1", "--delta", "0"],
        &["ledger", "add", &ledger, "--epsilon", "-1", "--delta", "0"],
    ] {
        refusal(bad);
    }
    assert_eq!(json(&["ledger", "show", &ledger])["releases"].as_array().unwrap().len(), 3);
}
