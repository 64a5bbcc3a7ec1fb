//! The program as a user runs it.
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

mod common;

use common::{dpmf, failure, float, json};
use serde_json::Value;

/// Golden √loss of the prefix sum; see golden/PROVENANCE.md.
#[test]
fn factorize_reaches_the_golden_optimum_with_every_solver() {
    for solver in ["auto", "linear", "dense"] {
        let found = json(&["factorize", "--steps", "256", "--solver", solver]);
        assert!((float(&found["sqrt_loss"]) - 40.390631).abs() < 3e-5, "{found}");
        assert!(float(&found["gap"]) <= 1e-6);
        assert!(float(&found["lower_bound"]) <= float(&found["loss"]));
        assert_eq!(found["solver"], if solver == "auto" { "linear" } else { solver });
    }
}

/// Golden √loss with momentum; see golden/PROVENANCE.md.
#[test]
fn factorize_takes_momentum() {
    for (beta, expected) in [("0.9", 411.62442), ("0.95", 719.989262)] {
        let found = json(&["factorize", "--steps", "512", "--momentum", beta]);
        assert!((float(&found["sqrt_loss"]) / expected - 1.0).abs() < 6e-7, "{found}");
    }
}

/// Golden bracket of the root loss for four epochs; see golden/PROVENANCE.md.
#[test]
fn every_command_takes_several_epochs() {
    let pattern = serde_json::json!({ "kind": "epochs", "times": 4, "separation": 64 });
    let four = ["--steps", "256", "--participation", "epochs:4"];
    let folder = tempfile::tempdir().unwrap();
    let [made, calibrated] = ["m", "m8"].map(|name| folder.path().join(name).display().to_string());
    let found = json(&[&["factorize", "--out", &made], &four[..]].concat());
    assert_eq!(found["participation"], pattern);
    assert!(float(&found["lower_bound"]).sqrt() <= 83.3911262606185, "{found}");
    assert!(float(&found["sqrt_loss"]) >= 83.3911143918912 && float(&found["gap"]) <= 1e-6, "{found}");
    assert!(float(&found["deployed"]["ratio"]) < 1.00001, "{found}");

    assert_eq!(json(&["verify", &made])["ok"], true);
    json(&["calibrate", &made, "--epsilon", "8", "--delta", "1e-6", "--clip", "1", "--out", &calibrated]);
    assert_eq!(json(&["inspect", &calibrated])["participation"], pattern);

    let table =
        json(&[&["compare", "--mechanism", "independent,tree,optimal,state-space"], &four[..]].concat());
    assert_eq!(table["participation"], pattern);
    let names: Vec<&str> =
        table["rows"].as_array().unwrap().iter().map(|row| row["mechanism"].as_str().unwrap()).collect();
    assert_eq!(names, ["independent", "tree", "optimal"]);
    assert_eq!(table["left_out"].as_object().unwrap().len(), 1, "{table}");
    // Independent noise: sensitivity 2 for four participations, and ‖S‖_F² = n(n + 1)/2.
    let independent = float(&table["rows"][0]["sqrt_loss"]);
    assert!((independent - 2.0 * (256.0 * 257.0_f64 / 2.0).sqrt()).abs() < 1e-6, "{independent}");

    let small = ["--streaming", "--buffers", "2", "--recalls", "3", "--out", &made];
    std::fs::remove_file(&made).unwrap();
    let found = json(&[&["factorize"], &small[..], &four[..]].concat());
    let streaming = &found["streaming"];
    assert_eq!((&streaming["buffers"], &streaming["recalls"]), (&2.into(), &3.into()));
    assert!(float(&streaming["deployed_ratio"]) < 1.003, "{found}");
    assert_eq!(json(&["verify", &made])["ok"], true);
    assert_eq!(json(&["inspect", &made])["recalls"], 3);
}

/// A row of the paper's Table "loss_values": Honaker and optimum to the printed digit, efficient within 1 %.
fn compare_with_the_paper(n: &str, honaker: f64, optimal: f64, efficient: f64) {
    let found = json(&["compare", "--steps", n, "--mechanism", "honaker-online,optimal,structured"]);
    let row = |name: &str| {
        let rows = found["rows"].as_array().unwrap();
        rows.iter().find(|row| row["mechanism"] == name).unwrap().clone()
    };
    let rounded = |row: Value| (float(&row["sqrt_loss"]) * 10.0).round() / 10.0;
    assert_eq!(rounded(row("honaker-online")), honaker);
    assert_eq!(rounded(row("optimal")), optimal);
    let ratio = float(&row("optimal")["ratio_to_bound"]);
    assert!((1.0..1.000001).contains(&ratio), "{ratio}");
    assert!(float(&row("structured")["sqrt_loss"]) <= 1.01 * efficient, "{}", row("structured"));
}

#[test]
fn compare_prints_the_table_of_the_paper() {
    compare_with_the_paper("256", 74.4, 40.4, 40.4);
    compare_with_the_paper("512", 116.5, 62.0, 62.2);
}

#[test]
#[ignore = "a minute; the larger sizes of the table"]
fn compare_prints_the_whole_table_of_the_paper() {
    compare_with_the_paper("1024", 180.8, 94.6, 95.5);
    compare_with_the_paper("2048", 278.3, 143.6, 145.8);
    // The paper's optimum at 4096, 217.3, is not converged; ours is below it.
    compare_with_the_paper("4096", 425.6, 216.9, 224.0);
}

#[test]
fn a_mechanism_file_can_be_inspected_and_verified() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let file = path.to_str().unwrap();
    json(&[
        "factorize",
        "--steps",
        "24",
        "--momentum",
        "0.9",
        "--schedule",
        "cooldown:0.25:0.05",
        "--out",
        file,
    ]);
    let inspected = json(&["inspect", file]);
    assert_eq!(inspected["steps"], 24);
    assert_eq!(inspected["workload"]["optimizer"]["momentum"], 0.9);
    let verified = json(&["verify", file]);
    assert_eq!(verified["ok"], true);
    assert_eq!(inspected["sqrt_loss"], verified["sqrt_loss"]);

    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let (kind, message) = failure(&["verify", file]);
    assert_eq!(kind, "format");
    assert!(message.contains("hash does not match"), "{message}");
}

#[test]
fn workloads_come_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    // The prefix sum for n = 3 as a matrix; golden total loss 4.6078616.
    let matrix = write("s.csv", "1,0,0\n1,1,0\n1,1,1\n");
    let found = json(&["factorize", "--matrix", &matrix]);
    assert!((float(&found["loss"]) - 4.6078616).abs() < 1e-5);
    assert_eq!(found["solver"], "dense");
    let schedule = write("eta.txt", "1\n1\n1\n");
    let found = json(&["factorize", "--schedule-file", &schedule]);
    assert!((float(&found["loss"]) - 4.6078616).abs() < 1e-5);
    let (kind, _) = failure(&["factorize", "--schedule-file", &schedule, "--steps", "4"]);
    assert_eq!(kind, "wrong-length");
    let upper = write("u.csv", "1,1\n0,1\n");
    let (_, message) = failure(&["factorize", "--matrix", &upper]);
    assert!(message.contains("[0, 1] is 1, but a workload must be lower triangular"), "{message}");
}

#[test]
fn bad_input_is_answered_in_words() {
    let cases: &[(&[&str], &str)] = &[
        (&["factorize", "--steps", "0"], "steps is 0"),
        (&["factorize", "--steps", "8", "--momentum", "1"], "momentum is 1"),
        (&["factorize", "--steps", "8", "--momentum", "nan"], "momentum is NaN"),
        (&["factorize", "--steps", "8", "--weight-decay", "1"], "learning rate[0] is 1"),
        (&["factorize", "--steps", "8", "--schedule", "linear"], "schedule is linear"),
        (&["factorize", "--steps", "8", "--gap", "0"], "gap is 0"),
        (&["factorize", "--steps", "8", "--average", "ema:1"], "average decay is 1"),
        (&["factorize"], "--steps"),
        (&["factorize", "--steps", "1.5"], "must be a whole number"),
        (&["factorize", "--steps", "8", "--matrix", "x.npy"], "cannot be used with"),
        (&["compare", "--steps", "8", "--mechanism", "magic"], "mechanism \"magic\" does not exist"),
        (&["inspect", "no-such-file.safetensors"], "no-such-file.safetensors"),
        (&["verify", "Cargo.toml"], "Cargo.toml"),
        (&["nonsense"], "nonsense"),
    ];
    for (arguments, expected) in cases {
        let (_, message) = failure(arguments);
        assert!(message.contains(expected), "{arguments:?}: {message}");
        let output = dpmf(arguments);
        assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(expected), "{arguments:?}");
    }
}

#[test]
fn tables_are_readable_text() {
    let output = dpmf(&["compare", "--steps", "16", "--momentum", "0.9"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("momentum 0.9, 16 steps"), "{text}");
    assert!(text.contains("honaker-online"));
}

#[test]
fn shells_complete_commands_flags_and_values() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = String::from_utf8(dpmf(&["completions", shell]).stdout).unwrap();
        for word in ["train", "resume"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
        // The other two shells complete no values.
        let values = !["elvish", "powershell"].contains(&shell);
        assert_eq!(script.contains("anderson"), values, "{shell}");
    }
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("dpmf.bash");
    std::fs::write(&script, dpmf(&["completions", "bash"]).stdout).unwrap();
    let completed = |words: &str| {
        let count = words.split(' ').count() - 1;
        let shell = format!(
            "source {}; COMP_WORDS=({words}); COMP_CWORD={count}; _dpmf dpmf \"${{COMP_WORDS[-1]}}\" \"${{COMP_WORDS[-2]}}\"; \
             echo \"${{COMPREPLY[@]}}\"",
            script.display()
        );
        let output = std::process::Command::new("bash").args(["-c", &shell]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(completed("dpmf tr"), "train");
    assert_eq!(completed("dpmf train --resu"), "--resume");
    assert_eq!(completed("dpmf factorize --solver ne"), "newton");
    assert_eq!(completed("dpmf train --mechanism plan"), "planned");
    assert_eq!(completed("dpmf account --adjacency add"), "add-or-remove");
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("man1");
    let answer = json(&["man", "--out", out.to_str().unwrap()]);
    let pages = answer["pages"].as_array().unwrap();
    assert!(pages.len() > 20, "{}", pages.len());
    let page = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    let train = page("dpmf-train.1");
    for flag in ["resume", "epsilon", "server\\-lr", "hidden"] {
        assert!(train.contains(flag), "{flag}");
    }
    assert!(train.contains("After Ctrl"), "the long help is in the page");
    assert!(page("dpmf-plot-heatmap.1").contains("histogram"));
    assert!(page("dpmf.1").contains("dpmf\\-audit(1)"));
    // Where there is groff, every page renders without a warning.
    if let Ok(groff) = std::process::Command::new("groff").arg("--version").output() {
        assert!(groff.status.success());
        for page in pages {
            let rendered = std::process::Command::new("groff")
                .args(["-man", "-Tutf8", "-K", "utf8", "-wall", page.as_str().unwrap()])
                .output()
                .unwrap();
            let warnings = String::from_utf8_lossy(&rendered.stderr).into_owned();
            assert!(rendered.status.success() && warnings.is_empty(), "{page}: {warnings}");
        }
    }
}

#[test]
fn help_teaches_and_its_short_form_is_short() {
    for (command, lesson) in [
        ("compare", "√loss is the root of the total squared error"),
        ("sample", "one token after another"),
        ("verify", "The hash detects damage, not malice"),
        ("train", "continue a run with --resume DIR"),
        ("audit", "A lower bound above the promised ε refutes the promise"),
    ] {
        let text = |flag: &str| {
            let text = String::from_utf8(dpmf(&[command, flag]).stdout).unwrap();
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert!(text("--help").contains(lesson), "{command}: {}", text("--help"));
        assert!(!text("-h").contains(lesson), "{command}");
    }
}
