//! Tables as people have them, and models that can be used: `train`, `predict`, `eval`, `inspect`.
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

mod common;

use common::{dpmf, failure, float, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Three rows for each of 700 people: whether somebody bought, and the rent, follow from age, visits and town.
fn table(folder: &Path) -> PathBuf {
    let mut content = String::from("person;age;town;visits;bought;rent\n");
    let mut state = 7_u64;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    for person in 0..700 {
        for _ in 0..3 {
            let (age, visits) = (20 + draw(60), draw(20));
            let town = ["Bonn", "Köln", "Ulm"][draw(3) as usize];
            let score = age as f64 / 10.0 + visits as f64 / 4.0 + if town == "Ulm" { 2.0 } else { 0.0 };
            let bought = if score + draw(3) as f64 > 8.5 { "yes" } else { "no" };
            let rent = 400.0 + 5.0 * age as f64 + if town == "Köln" { 150.0 } else { 0.0 } + draw(40) as f64;
            writeln!(content, "p{person};{age};{town};{visits};{bought};{rent}").unwrap();
        }
    }
    let path = folder.join("shop.csv");
    std::fs::write(&path, content).unwrap();
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_table_is_learned_and_its_model_predicts_and_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let (data, out) = (table(folder.path()), folder.path().join("run"));
    let common = [
        "--user",
        "person",
        "--features",
        "age,town,visits",
        "--clients",
        "50",
        "--server-lr",
        "0.3",
        "--clip",
        "1",
        "--seed",
        "1",
        "--public-share",
        "0.1",
    ];
    let arguments = |label, out| {
        [&["train", "--data", text(&data), "--label", label, "--out", out][..], &common].concat()
    };
    let trained =
        json(&[&arguments("bought", text(&out))[..], &["--epochs", "3", "--epsilon", "4"]].concat());
    let accuracy = float(&trained["runs"][0]["test_accuracy"]);
    assert!(accuracy > 0.8, "{accuracy}");
    assert!(trained["notes"][0].as_str().unwrap().contains("`person`"));

    // All rows of a person are one contribution; where rows are users, the guarantee is for rows.
    assert_eq!(trained["statement"]["unit"], "user");
    let rows = folder.path().join("rows");
    let by_rows = json(&[
        "train",
        "--data",
        text(&data),
        "--rows-are-users",
        "--public-share",
        "0.1",
        "--label",
        "bought",
        "--features",
        "age,visits",
        "--epochs",
        "1",
        "--clients",
        "200",
        "--server-lr",
        "0.3",
        "--clip",
        "1",
        "--seed",
        "1",
        "--out",
        text(&rows),
    ]);
    assert_eq!(by_rows["statement"]["unit"], "record");

    // Whoever has the model needs neither the data nor the plan.
    let file = out.join("planned-0/model.safetensors");
    let measured = json(&["eval", text(&file), text(&data)]);
    assert_eq!(measured["rows"], 2100);
    assert!((float(&measured["accuracy"]) - accuracy).abs() < 0.06, "{measured}");
    let confusion = &measured["confusion"];
    let right = float(&confusion[0][0]) + float(&confusion[1][1]);
    assert_eq!(right / 2100.0, float(&measured["accuracy"]));
    assert_eq!(measured["model"]["epsilon"], 4.0);

    let predicted = json(&["predict", text(&out), text(&data)]);
    assert_eq!(predicted["classes"], serde_json::json!(["no", "yes"]));
    let lines = std::fs::read_to_string(&data).unwrap();
    let truth = lines.lines().skip(1).map(|line| line.split(';').nth(4).unwrap());
    let found = predicted["predictions"].as_array().unwrap().iter().map(|class| class.as_str().unwrap());
    assert_eq!(truth.zip(found).filter(|(a, b)| a == b).count() as f64, right);

    // Files for other tools; other columns and their order do not matter, nor is a label needed.
    let new = folder.path().join("new.jsonl");
    std::fs::write(&new, "{\"visits\": 19, \"age\": 75, \"town\": \"Ulm\"}\n{\"age\": 20, \"visits\": 0, \"town\": \"Jena\"}\n").unwrap();
    let written = folder.path().join("p.csv");
    let output = dpmf(&["predict", text(&out), text(&new), "--out", text(&written)]);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("`town` has an unknown value in some rows"));
    let rows: Vec<String> = std::fs::read_to_string(&written).unwrap().lines().map(str::to_owned).collect();
    assert_eq!((rows.len(), rows[0].as_str()), (3, "bought,p(no),p(yes)"));
    assert!(rows[1].starts_with("yes,") && rows[2].starts_with("no,"), "{rows:?}");
    let lines = folder.path().join("p.jsonl");
    json(&["predict", text(&out), text(&new), "--out", text(&lines)]);
    let first: serde_json::Value =
        serde_json::from_str(std::fs::read_to_string(&lines).unwrap().lines().next().unwrap()).unwrap();
    assert_eq!(first["bought"], "yes");
    assert!(
        (float(&first["probabilities"]["yes"]) + float(&first["probabilities"]["no"]) - 1.0).abs() < 1e-9
    );

    let inspected = json(&["inspect", text(&file)]);
    assert_eq!(inspected["model"]["kind"], "logistic");
    assert_eq!(inspected["tensors"][0], serde_json::json!({ "name": "layer0.weight", "shape": [2, 5] }));
    assert_eq!(inspected["plan"].as_str().unwrap().len(), 64);
    let words = String::from_utf8(dpmf(&["inspect", text(&file)]).stdout).unwrap();
    assert!(
        words.contains("columns age, town, visits, for `bought`: 2 classes") && words.contains("(4, 1e-6)"),
        "{words}"
    );

    // What does not fit says so.
    let lacking = folder.path().join("lacking.csv");
    std::fs::write(&lacking, "age,visits\n1,2\n").unwrap();
    assert!(failure(&["predict", text(&out), text(&lacking)]).1.contains("no column `town`"));
    assert!(failure(&["sample", text(&out)]).1.contains("dpmf predict"));
    assert!(failure(&["predict", text(&out), text(&new), "--out", "p.xlsx"]).1.contains(".csv or .jsonl"));
    // Where predictions go is looked at before the model is.
    assert!(failure(&["predict", "nothing", "nothing", "--out", "none/p.csv"]).1.contains("does not exist"));
    assert!(failure(&["eval", text(&out), text(&data), "--text", "town"]).1.contains("reads features"));
    let plan = out.join("planned-0/plan.safetensors");
    assert!(failure(&["predict", text(&plan), text(&data)]).1.contains("not a model"));
    assert!(failure(&["predict", text(&data), text(&data)]).1.contains("not a safetensors file"));
}

#[test]
fn a_table_of_few_people_needs_no_other_settings() {
    let folder = tempfile::tempdir().unwrap();
    let rows: String =
        (0..80).map(|i| format!("p{i},{},{}\n", i % 7, if i % 7 > 3 { "yes" } else { "no" })).collect();
    let data = folder.path().join("few.csv");
    std::fs::write(&data, format!("user,x,y\n{rows}")).unwrap();
    let out = folder.path().join("run");
    let trained = json(&[
        "train",
        "--data",
        text(&data),
        "--label",
        "y",
        "--public-share",
        "0.1",
        "--seed",
        "1",
        "--out",
        text(&out),
    ]);
    let (users, clients) = (trained["users"].as_u64().unwrap(), trained["clients"].as_u64().unwrap());
    assert!(clients <= users && clients >= 1, "{clients} of {users}");
    let rehearsed = &trained["rehearsed"];
    assert_eq!(rehearsed["clients"], trained["clients"]);
    assert_eq!(trained["rounds"].as_u64().unwrap() * clients / users, rehearsed["epochs"].as_u64().unwrap());
    assert!(rehearsed["settings"].as_u64().unwrap() > 20 && float(&rehearsed["learning_rate"]) > 0.0);
    assert!(float(&rehearsed["seconds"]) >= 0.0);
    // What was rehearsed is stated in the report, and so is the trivial model.
    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    for words in ["ehearsed", "cost no privacy", "trivial (the commonest class)", "trivial model"] {
        assert!(page.contains(words), "{words}");
    }
}

/// A label that has nothing to do with the columns: the model is no better than the mean, and that is said first.
#[test]
fn a_model_that_is_no_better_than_the_trivial_one_is_written_with_status_3() {
    let folder = tempfile::tempdir().unwrap();
    let noise = |i: u64| (i.wrapping_mul(6_364_136_223_846_793_005) >> 33) % 1000;
    let rows: String = (0..90).map(|i| format!("p{i},{},{}.5\n", noise(i), noise(i + 1000))).collect();
    let data = folder.path().join("noise.csv");
    std::fs::write(&data, format!("user,x,y\n{rows}")).unwrap();
    let out = folder.path().join("run");
    // Given settings that suit no noise: far too large a rate.
    let given = ["--server-lr", "50", "--clip", "5", "--epochs", "2", "--clients", "20", "--epsilon", "0.5"];
    let base = [
        "train",
        "--data",
        text(&data),
        "--label",
        "y",
        "--public-share",
        "0.1",
        "--seed",
        "1",
        "--out",
        text(&out),
    ];
    let output = common::dpmf(&[&base[..], &given[..]].concat());
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.starts_with("The model is no better than always predicting the mean (test RMSE"), "{said}");
    assert!(
        said.contains("Try more data, a larger --epsilon") && said.contains("trivial (the mean)"),
        "{said}"
    );
    assert!(said.contains("Scores are on held-out users; ε does not cover them."), "{said}");
    let results: serde_json::Value =
        serde_json::from_slice(&std::fs::read(out.join("results.json")).unwrap()).unwrap();
    assert!(results["baseline"]["test_rmse"].is_number() && results["rehearsed"].is_null(), "{results}");
    assert!(float(&results["runs"][0]["test_rmse"]) >= float(&results["baseline"]["test_rmse"]));
    assert!(out.join("report.html").exists() && out.join("planned-0/model.safetensors").exists());
}

#[test]
fn help_shows_every_default_of_training() {
    let output = common::dpmf(&["train", "--help"]);
    let help = String::from_utf8_lossy(&output.stdout).into_owned();
    for (flag, default) in [
        ("--server-lr <", "[default: 0.25 for texts and 0.5 for images"),
        ("--client-lr <", "[default: 2 for texts"),
        ("--clip <", "[default: 1;"),
        ("--momentum <", "[default: 0.9, or 0 for a table"),
        ("--epochs <", "[default: 1;"),
    ] {
        let start = help.find(flag).unwrap_or_else(|| panic!("{flag}"));
        let end = help[start..].find("\n      --").map_or(help.len(), |at| start + at);
        let about = help[start..end].split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(about.contains(default), "{about}");
    }
}

#[test]
fn numbers_are_learned_in_their_own_unit() {
    let folder = tempfile::tempdir().unwrap();
    let (data, out) = (table(folder.path()), folder.path().join("run"));
    let trained = json(&[
        "train",
        "--data",
        text(&data),
        "--user",
        "person",
        "--public-share",
        "0.1",
        "--label",
        "rent",
        "--features",
        "age,town",
        "--clients",
        "50",
        "--epochs",
        "4",
        "--server-lr",
        "0.3",
        "--clip",
        "1",
        "--epsilon",
        "4",
        "--seed",
        "2",
        "--out",
        text(&out),
    ]);
    let row = &trained["runs"][0];
    assert!(row["test_accuracy"].is_null() && trained["summary"][0]["test_accuracy_mean"].is_null());
    let rmse = float(&row["test_rmse"]);
    // The spread of the rent is 112, of what age and town do not explain 11.5.
    assert!((11.0..30.0).contains(&rmse), "{rmse}");
    let measured = json(&["eval", text(&out), text(&data)]);
    assert!(
        (float(&measured["rmse"]) / rmse - 1.0).abs() < 0.1 && float(&measured["r2"]) > 0.9,
        "{measured}"
    );
    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains("test RMSE") && !page.contains("validation accuracy"));
    let predicted = json(&["predict", text(&out), text(&data)]);
    assert!((350.0..950.0).contains(&float(&predicted["predictions"][0])));
}

#[test]
fn a_sweep_of_numbers_chooses_the_smaller_error() {
    let folder = tempfile::tempdir().unwrap();
    let (data, out) = (table(folder.path()), folder.path().join("sweep"));
    let swept = json(&[
        "sweep",
        "--data",
        text(&data),
        "--user",
        "person",
        "--public-share",
        "0.1",
        "--label",
        "rent",
        "--features",
        "age,town",
        "--mechanism",
        "none",
        "--server-lr",
        "0.001,0.3",
        "--clients",
        "50",
        "--repeats",
        "2",
        "--out",
        text(&out),
    ]);
    let row = &swept["rows"][0];
    assert_eq!(row["server_lr"], 0.3, "the small rate leaves the rent nearly unlearned: {row}");
    assert!(row["test_accuracy_mean"].is_null());
    // After ten rounds: less than half of the rent's spread, 112, which the small rate leaves as it is.
    assert!((11.0..56.0).contains(&float(&row["test_rmse_mean"])), "{row}");
    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains("test RMSE") && !page.contains("accuracy"));
}

#[test]
fn malformed_rows_stop_a_training_with_a_sentence_each_or_are_left_out_aloud() {
    let folder = tempfile::tempdir().unwrap();
    let data = table(folder.path());
    let mut lines: Vec<String> = std::fs::read_to_string(&data).unwrap().lines().map(str::to_owned).collect();
    lines[4] = "p1;young;Bonn;3;no;500".into();
    lines[8] = "p2;30;Bonn".into();
    std::fs::write(&data, lines.join("\n")).unwrap();
    let out = folder.path().join("run");
    let arguments = [
        "train",
        "--data",
        text(&data),
        "--user",
        "person",
        "--label",
        "bought",
        "--public-share",
        "0.1",
        "--clients",
        "50",
        "--epochs",
        "2",
        "--server-lr",
        "0.1",
        "--clip",
        "1",
        "--seed",
        "1",
        "--out",
        text(&out),
    ];
    let (kind, message) = failure(&arguments);
    assert_eq!(kind, "data");
    assert!(
        message.ends_with(
            "2 rows are malformed:\n  line 5: `age` is \"young\", which is not a number\n  line 9: there are 3 fields, but 6 columns"
        ),
        "{message}"
    );
    assert!(!out.exists());
    let output = dpmf(&[&arguments[..], &["--skip-malformed"]].concat());
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("left out: some rows are malformed"));
}

#[test]
fn a_training_with_a_schema_goes_on_from_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    table(folder.path());
    let schema = r#"{"features": [{"column": "age", "kind": "number", "center": 50, "scale": 17}],
        "label": {"column": "rent", "kind": "number", "center": 700, "scale": 110}}"#;
    std::fs::write(folder.path().join("schema.json"), schema).unwrap();
    let run = |place: &Path, words: &[&str]| {
        let mut command = assert_cmd::Command::cargo_bin("dpmf").unwrap();
        let output =
            command.current_dir(place).env_remove("HOME").args(words).arg("--json").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let begun = [
        "train",
        "--data",
        "shop.csv",
        "--user",
        "person",
        "--label",
        "rent",
        "--schema",
        "schema.json",
        "--clients",
        "50",
        "--epochs",
        "2",
        "--server-lr",
        "0.3",
        "--clip",
        "1",
        "--seed",
        "3",
        "--out",
        "run",
    ];
    let first = run(folder.path(), &begun);
    assert!(first["notes"][1].as_str().unwrap().contains("given schema"));
    let elsewhere = tempfile::tempdir().unwrap();
    let again = run(elsewhere.path(), &["train", "--resume", text(&folder.path().join("run"))]);
    assert_eq!(again["runs"][0]["test_rmse"], first["runs"][0]["test_rmse"]);
}

/// By default the classes and scales are found in private: everybody is covered, and the budget is that of both.
#[test]
fn a_table_whose_people_are_all_private_is_learned() {
    let folder = tempfile::tempdir().unwrap();
    let (data, out) = (table(folder.path()), folder.path().join("run"));
    let ledger = folder.path().join("people.ledger");
    json(&["ledger", "new", text(&ledger), "--epsilon", "4", "--delta", "1e-6"]);
    let words = ["train", "--data", text(&data), "--user", "person", "--label", "bought", "--seed", "1"];
    let settings = ["--epochs", "3", "--clients", "50", "--server-lr", "0.3", "--clip", "1"];
    let words = [&words[..], &settings, &["--exclude", "rent", "--epsilon", "4", "--out"]].concat();
    let trained = json(&[&words[..], &[text(&out), "--ledger", text(&ledger)]].concat());
    let accuracy = float(&trained["runs"][0]["test_accuracy"]);
    assert!(accuracy > 0.75, "{accuracy}");
    let notes = trained["notes"].to_string();
    assert!(notes.contains("were found with noise") && !notes.contains("public"), "{notes}");
    let privacy = &trained["privacy"];
    let [schema, training, total] = ["schema", "training", "total"].map(|part| float(&privacy[part]));
    assert!(total == 4.0 && (0.2..1.2).contains(&schema) && (3.5..4.0).contains(&training), "{privacy}");
    // Their sum would be more than both together.
    assert!(schema + training > 4.05, "{privacy}");
    // A budget of exactly this ε holds it, and nothing more.
    let spent = float(&json(&["ledger", "show", text(&ledger)])["epsilon_spent"]);
    assert!((3.9..=4.0).contains(&spent), "{spent}");
    let again =
        failure(&[&words[..], &[text(&folder.path().join("more")), "--ledger", text(&ledger)]].concat());
    assert!(again.1.contains("budget"), "{again:?}");
    // The words that only a few people have are in no file of the model.
    let model = std::fs::read(out.join("planned-0/model.safetensors")).unwrap();
    assert!(String::from_utf8_lossy(&model).contains("The schema of the table"));
}

/// Nobody is taken for public unless the owner of the data says so, and the statement says whom it covers.
#[test]
fn public_users_are_opt_in_and_the_headline_says_whom_it_covers() {
    let folder = tempfile::tempdir().unwrap();
    let (data, out) = (table(folder.path()), folder.path().join("run"));
    let base = ["train", "--data", text(&data), "--user", "person", "--label", "bought", "--out", text(&out)];
    let (_, message) = failure(&[&base[..], &["--public-share", "0.7"]].concat());
    assert!(message.contains("between 0.001 and 0.5"), "{message}");
    assert!(!out.exists(), "nothing was begun");

    let settings = ["--clients", "50", "--epochs", "1", "--server-lr", "0.3", "--clip", "1", "--seed", "1"];
    let trained = json(&[&base[..], &["--public-share", "0.2"], &settings].concat());
    let notes = trained["notes"].to_string();
    assert!(notes.contains("20 % of all") && notes.contains("ε does not cover them"), "{notes}");
    // In what is printed, in the report and in the file of the model.
    let words = trained["statement"]["words"].as_str().unwrap().to_owned();
    let report = std::fs::read_to_string(trained["report"].as_str().unwrap()).unwrap();
    let model = dpmf_train::SavedModel::load(out.join("planned-0/model.safetensors")).unwrap();
    for place in [&words, &report, model.statement()] {
        assert!(place.contains("for every user that is trained on"), "{place}");
        assert!(place.contains("Scores and learning curves on held-out users"), "{place}");
    }
    // Where rows are the unit, nothing is said of users.
    let rows = folder.path().join("rows");
    let by_rows = ["train", "--data", text(&data), "--rows-are-users", "--label", "bought"];
    let by_rows =
        [&by_rows[..], &["--features", "age,visits", "--schema-from-training", "--out", text(&rows)]];
    let by_rows = json(&[&by_rows.concat()[..], &settings].concat());
    let words = by_rows["statement"]["words"].as_str().unwrap();
    assert!(words.contains("for every record that is trained on") && !words.contains("user"), "{words}");
}
