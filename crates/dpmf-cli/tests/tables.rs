//! Tables as they come: how they are compressed, written and filled, and what is said where they cannot be learned from.
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

mod common;

use common::{dpmf, failure, float, json};
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> String {
    format!("{}/tests/data/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A quick training of a table whose schema is found in private, with all settings given: nothing is rehearsed.
fn arguments<'a>(data: &'a str, out: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let usual = ["train", "--data", data, "--epsilon", "8", "--mechanism", "independent", "--seed", "1"];
    let settings = ["--epochs", "5", "--clients", "100", "--server-lr", "0.5", "--clip", "1"];
    [&usual[..], &settings, &["--out", out.to_str().unwrap()], more].concat()
}

fn trained(data: &str, more: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    json(&arguments(data, &folder.path().join("run"), more))
}

fn refused(data: &str, more: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    failure(&arguments(data, &folder.path().join("run"), more)).1
}

fn written(folder: &tempfile::TempDir, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    path
}

/// Rows of 1500 people with an amount and a class that follows from it.
fn amounts(shown: impl Fn(f64) -> String, class: impl Fn(f64) -> &'static str) -> String {
    let mut table = String::from("user\tamount\tsize\ty\n");
    for person in 0..1500 {
        let amount = f64::from(person * 7919 % 2000) + 0.5;
        writeln!(table, "p{person}\t{}\t{}\t{}", shown(amount), person % 9, class(amount)).unwrap();
    }
    table
}

const WHO: [&str; 4] = ["--user", "who", "--label", "bought"];

/// Polars writes Parquet with zstd. Dates are days, times too; the headline holds for everybody, and says what the schema has cost.
#[test]
fn parquet_as_polars_writes_it() {
    let folder = tempfile::tempdir().unwrap();
    let (data, out) = (fixture("polars.parquet"), folder.path().join("run"));
    let first = json(&arguments(&data, &out, &WHO));
    let schema: Value =
        serde_json::from_slice(&std::fs::read(out.join("schema/schema.json")).unwrap()).unwrap();
    let kinds: Vec<(&str, &str)> = schema["features"]
        .as_array()
        .unwrap()
        .iter()
        .map(|feature| (feature["column"].as_str().unwrap(), feature["kind"].as_str().unwrap()))
        .collect();
    assert_eq!(kinds, [("age", "number"), ("town", "category"), ("day", "date"), ("seen", "date")]);
    assert_eq!(schema["features"][1]["values"], serde_json::json!(["Bonn", "Köln", "Ulm"]));
    assert_eq!(schema["label"]["values"], serde_json::json!(["no", "yes"]));

    let privacy = &first["privacy"];
    let [schema, training, total] = ["schema", "training", "total"].map(|part| float(&privacy[part]));
    assert!(total == 8.0 && training < 8.0 && training > 7.5 && schema > 0.5 && schema < 2.0, "{privacy}");
    assert_eq!(first["statement"]["epsilon"], 8.0);
    let words = first["statement"]["words"].as_str().unwrap();
    assert!(
        words.contains("for every user that is trained on") && words.contains("The schema of the table"),
        "{words}"
    );
    assert!(first["notes"].to_string().contains("were found with noise"), "{}", first["notes"]);
    // The plan's file has it too, and is proved with it.
    let plan = out.join("independent-0/plan.safetensors");
    let inspected = String::from_utf8(dpmf(&["inspect", plan.to_str().unwrap()]).stdout).unwrap();
    assert!(inspected.contains("(8, 1e-6)"), "{inspected}");

    // It goes on from the schema that was found, and predicts.
    let again = json(&["train", "--resume", out.to_str().unwrap()]);
    assert_eq!(again["runs"][0]["test_accuracy"], first["runs"][0]["test_accuracy"]);
    let predicted = json(&["predict", out.to_str().unwrap(), &data]);
    assert_eq!(predicted["predictions"].as_array().unwrap().len(), 2500);
    // Without the key or the schema there is no going on.
    std::fs::remove_file(out.join("independent-0/outcome.json")).unwrap();
    std::fs::remove_file(out.join("schema/schema.json")).unwrap();
    let third = json(&["train", "--resume", out.to_str().unwrap()]);
    assert_eq!(third["runs"][0]["test_accuracy"], first["runs"][0]["test_accuracy"]);
}

#[test]
fn compressed_text_and_standard_input() {
    let plain = trained(&fixture("shop.csv.gz"), &[&WHO[..], &["--exclude", "town"]].concat());
    assert_eq!((&plain["parameters"], &plain["data"]), (&6.into(), &"shop".into()));
    let lines = trained(&fixture("shop.jsonl.zst"), &[&WHO[..], &["--date-parts", "weekday"]].concat());
    assert_eq!(lines["parameters"], 2 * (1 + 3 + 1 + 7 + 1));
    // The same rows through a pipe.
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let piped = |name: &str| {
        let mut command = assert_cmd::Command::cargo_bin("dpmf").unwrap();
        let words = [&WHO[..], &["--exclude", "town", "--json"]].concat();
        command.env_remove("HOME").args(arguments("-", &out.join(name), &words));
        let output = command.write_stdin(std::fs::read(fixture(name)).unwrap()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    assert_eq!(piped("shop.csv.gz")["runs"][0]["test_accuracy"], plain["runs"][0]["test_accuracy"]);
    assert_eq!(piped("shop.jsonl.zst")["parameters"], 2 * 3);
    assert_eq!(piped("polars.parquet")["parameters"], 2 * 4);
}

#[test]
fn a_byte_order_mark_and_classes_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let table = amounts(|amount| amount.to_string(), |amount| if amount > 1000.0 { "yes" } else { "no" });
    let path = written(&folder, "bom.tsv", format!("\u{feff}{table}"));
    let found = trained(path.to_str().unwrap(), &["--label", "y", "--classes", "no,yes"]);
    assert!(float(&found["runs"][0]["test_accuracy"]) > 0.5);
}

#[test]
fn numbers_as_people_write_them() {
    let folder = tempfile::tempdir().unwrap();
    let class = |amount: f64| if amount > 1000.0 { "yes" } else { "no" };
    let shown = |amount: f64| {
        let text = format!("{amount:.2}").replace('.', ",");
        let (head, tail) = text.split_at(text.len().saturating_sub(6));
        if head.is_empty() { format!("€ {tail}") } else { format!("€ {head}.{tail}") }
    };
    let path = written(&folder, "euro.tsv", amounts(shown, class));
    let (data, out) = (path.to_str().unwrap(), folder.path().join("plain"));
    let output = dpmf(&arguments(data, &out, &["--label", "y"]));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("`amount` is left out") && said.contains("--decimal ,"), "{said}");
    let read = trained(data, &["--label", "y", "--decimal", ","]);
    assert_eq!(read["parameters"], 2 * 3);
    assert!(float(&read["runs"][0]["test_accuracy"]) > 0.6);
    // Where public users tell the scales, it is an error with the same way out.
    assert!(refused(data, &["--label", "y", "--public-share", "0.2"]).contains("--decimal ,"));
}

#[test]
fn rows_without_a_label() {
    let folder = tempfile::tempdir().unwrap();
    let class = |amount: f64| match amount {
        amount if amount < 200.0 => "",
        amount if amount > 1000.0 => "yes",
        _ => "no",
    };
    let path = written(&folder, "t.tsv", amounts(|amount| amount.to_string(), class));
    let data = path.to_str().unwrap();
    let message = refused(data, &["--label", "y"]);
    assert!(
        message.contains("the label `y` is missing") && message.contains("--drop-unlabelled"),
        "{message}"
    );
    let found = trained(data, &["--label", "y", "--drop-unlabelled"]);
    // Whoever has no label is a user all the same: how many have none is not told.
    assert_eq!(found["users"], trained(data, &["--label", "y", "--skip-malformed"])["users"]);
}

#[test]
fn lists_are_named() {
    let data = fixture("polars-lists.parquet");
    let message = refused(&data, &WHO);
    assert!(message.contains("column `tags` holds lists") && message.contains("--exclude"), "{message}");
    let folder = tempfile::tempdir().unwrap();
    let line = |i: u32| format!("{{\"user\": {i}, \"tags\": [1, 2], \"y\": \"no\"}}\n");
    let path = written(&folder, "t.jsonl", (0..50).map(line).collect::<String>());
    let message = refused(path.to_str().unwrap(), &["--label", "y"]);
    assert!(message.contains("`tags` must be a string") && message.contains("it is a list"), "{message}");
    let message = refused(&data, &[&WHO[..], &["--exclude", "tag"]].concat());
    assert!(message.contains("no column `tag`"), "{message}");
}

#[test]
fn a_constant_label() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(&folder, "t.tsv", amounts(|amount| amount.to_string(), |_| "no"));
    let data = path.to_str().unwrap();
    for more in [&[][..], &["--public-share", "0.1"]] {
        let message = refused(data, &[&["--label", "y"], more].concat());
        assert!(message.contains("the label `y`") && message.contains("\"no\" in all rows"), "{message}");
        assert!(!message.split(": ").any(|part| part.starts_with("schema is")), "{message}");
    }
}

#[test]
fn thirty_rows() {
    let folder = tempfile::tempdir().unwrap();
    let table: String = (0..30).map(|i| format!("{},{},{}\n", i, i * i, i % 4)).collect();
    let path = written(&folder, "few.csv", format!("a,b,y\n{table}"));
    let (data, out) = (path.to_str().unwrap(), folder.path().join("run"));
    let words = ["train", "--data", data, "--rows-are-users", "--label", "y", "--epsilon", "1", "--out"];
    let message = failure(&[&words[..], &[out.to_str().unwrap()]].concat()).1;
    assert!(message.contains("records to train on are too few to find classes and scales"), "{message}");
    assert!(message.contains("--schema FILE") && message.contains("--public-share"), "{message}");
    assert!(!out.exists(), "nothing was begun");
}

#[test]
fn ten_thousand_columns() {
    const COLUMNS: usize = 10_000;
    let folder = tempfile::tempdir().unwrap();
    let mut table = (0..COLUMNS).map(|column| format!("c{column},")).collect::<String>() + "y\n";
    for row in 0..200_usize {
        for column in 0..COLUMNS {
            table.push(char::from(b'0' + ((row * 31 + column * 17) % 10) as u8));
            table.push(',');
        }
        table += if row % 2 == 0 { "yes\n" } else { "no\n" };
    }
    let path = written(&folder, "wide.csv", table);
    let data = path.to_str().unwrap();
    let found = trained(data, &["--rows-are-users", "--label", "y"]);
    assert_eq!(found["parameters"], 2 * (COLUMNS + 1));
    let message = refused(data, &["--rows-are-users", "--label", "z"]);
    assert!(
        message.contains("no column `z`") && message.contains("and 9971 more") && message.len() < 1000,
        "{message}"
    );
}
