//! Running the program as a user does.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

use assert_cmd::Command;
use serde_json::Value;

pub fn dpmf(arguments: &[&str]) -> std::process::Output {
    // No home: nothing that was planned before is found, and nothing is left behind.
    let mut command = Command::cargo_bin("dpmf").unwrap();
    command.env_remove("HOME").env_remove("XDG_CACHE_HOME").args(arguments).output().unwrap()
}

/// Runs with `--json`; standard output must hold exactly one object.
pub fn json(arguments: &[&str]) -> Value {
    let output = dpmf(&[arguments, &["--json"]].concat());
    // A short training for another test may end with a model that is of no use: status 3, with everything written.
    let no_better = arguments.first() == Some(&"train") && output.status.code() == Some(3);
    assert!(
        output.status.success() || no_better,
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stdout)
    );
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["schema"], 1);
    value
}

pub fn failure(arguments: &[&str]) -> (String, String) {
    let output = dpmf(&[arguments, &["--json"]].concat());
    assert!(!output.status.success(), "{arguments:?} must fail");
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["schema"], 1);
    let text = |key: &str| value["error"][key].as_str().unwrap().to_owned();
    (text("kind"), text("message"))
}

pub fn float(value: &Value) -> f64 {
    value.as_f64().unwrap()
}
