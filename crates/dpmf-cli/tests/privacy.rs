//! Calibration, accounting, audits and figures, as a user runs them.
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

mod common;

use common::{dpmf, failure, float, json};

/// ε of the paper by its own route and exactly; see golden/PROVENANCE.md.
#[test]
fn account_reproduces_the_column_of_the_paper() {
    let golden = [
        ("0.341", 17.648, 18.688, 18.853, 20.303),
        ("0.682", 7.601, 8.100, 8.155, 8.857),
        ("1.364", 3.444, 3.687, 3.693, 4.132),
        ("2.728", 1.606, 1.726, 1.726, 1.995),
        ("5.456", 0.759, 0.820, 0.820, 0.980),
    ];
    for (sigma, exact, zcdp, rdp, paper) in golden {
        let found = json(&["account", "--noise-multiplier", sigma, "--delta", "1e-6"]);
        for (key, expected) in
            [("epsilon_exact", exact), ("epsilon_zcdp", zcdp), ("epsilon_rdp", rdp), ("epsilon_paper", paper)]
        {
            assert!((float(&found[key]) - expected).abs() <= 5.1e-4, "{sigma} {key}: {}", found[key]);
        }
        let sigma: f64 = sigma.parse().unwrap();
        assert!((float(&found["rho"]) - 0.5 / (sigma * sigma)).abs() < 1e-9);
    }
}

#[test]
fn composing_two_mechanisms_adds_their_rho() {
    let rho =
        |sigmas: &str| float(&json(&["account", "--noise-multiplier", sigmas, "--delta", "1e-6"])["rho"]);
    assert!((rho("1.0,2.0") - rho("1.0") - rho("2.0")).abs() < 1e-12);
}

/// From a workload to an audited file: the bound comes close to the promise and not above it.
#[test]
fn calibrate_and_audit_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (plain, calibrated) = (path("m.safetensors"), path("m4.safetensors"));
    json(&["factorize", "--steps", "16", "--momentum", "0.9", "--out", &plain]);
    let (_, message) = failure(&["audit", &plain]);
    assert!(message.contains("calibrate"), "{message}");
    let found = json(&[
        "calibrate",
        &plain,
        "--epsilon",
        "4",
        "--delta",
        "1e-6",
        "--clip",
        "0.5",
        "--out",
        &calibrated,
    ]);
    assert_eq!(float(&found["epsilon"]), 4.0);
    let product = float(&found["noise_multiplier"]) * float(&found["sensitivity"]) * 0.5;
    assert!((float(&found["noise_std"]) - product).abs() < 1e-12 * product);
    assert_eq!(json(&["verify", &calibrated])["ok"], true);

    for adversary in ["worst-column", "adaptive", "paper"] {
        let audit = json(&["audit", &calibrated, "--trials", "4e4", "--adversary", adversary]);
        assert_eq!(audit["refuted"], false);
        let bound = float(&audit["epsilon_lower"]);
        assert!(bound < 4.0, "{adversary}: {bound}");
        assert!(bound > 3.4 || adversary != "worst-column", "{adversary}: {bound}");
    }
    let (_, message) =
        failure(&["calibrate", &plain, "--steps", "4", "--epsilon", "1", "--delta", "1e-6", "--clip", "1"]);
    assert!(message.contains("remove the workload flags"), "{message}");
}

#[test]
fn regret_is_bounded_for_calibrated_prefix_sums() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (plain, calibrated) = (path("m.safetensors"), path("m2.safetensors"));
    json(&["factorize", "--steps", "16", "--out", &plain]);
    json(&["calibrate", &plain, "--epsilon", "2", "--delta", "1e-6", "--clip", "1", "--out", &calibrated]);
    let regret = &json(&["inspect", &calibrated, "--lipschitz", "1", "--distance", "2"])["regret"];
    let parts = ["stability", "travel", "noise"].map(|key| float(&regret[key]));
    assert!((parts.iter().sum::<f64>() - float(&regret["total"])).abs() < 1e-9);
    let (_, message) = failure(&["inspect", &plain, "--lipschitz", "1", "--distance", "2"]);
    assert!(message.contains("calibrate"), "{message}");
}

#[test]
fn the_counterexample_collapses_only_adaptively() {
    let found = json(&["audit", "counterexample", "--trials", "3000", "--dimension", "1000"]);
    let row = &found["row"];
    assert!(float(&row["epsilon_adaptive"]) > 1.5 * float(&row["epsilon_nonadaptive"]), "{row}");
    let success: Vec<f64> =
        found["attacks"].as_array().unwrap().iter().map(|a| float(&a["success"])).collect();
    assert!(success[1] > success[0] + 0.05, "{success:?}");
    assert!(success[1] > success[2] + 0.05, "{success:?}");
}

#[test]
fn bad_privacy_parameters_are_answered_in_words() {
    let cases: &[(&[&str], &str)] = &[
        (&["account", "--noise-multiplier", "1", "--delta", "1"], "delta is 1"),
        (&["account", "--noise-multiplier", "1", "--delta", "nan"], "delta is NaN"),
        (&["account", "--noise-multiplier", "0", "--delta", "1e-6"], "is 0"),
        (&["calibrate", "--steps", "4", "--epsilon", "0", "--delta", "1e-6", "--clip", "1"], "epsilon is 0"),
        (&["calibrate", "--steps", "4", "--epsilon", "-1", "--delta", "1e-6", "--clip", "1"], "epsilon"),
        (&["calibrate", "--steps", "4", "--epsilon", "1", "--delta", "1e-6", "--clip", "0"], "clip is 0"),
        (&["calibrate", "--epsilon", "1", "--delta", "1e-6", "--clip", "1"], "--steps"),
        (&["audit", "counterexample", "--trials", "0"], "trials is 0"),
    ];
    for (arguments, expected) in cases {
        let (_, message) = failure(arguments);
        assert!(message.contains(expected), "{arguments:?}: {message}");
    }
}

/// Every figure is drawn, says what it shows and names both axes; other kinds of picture are refused before any work.
#[test]
fn figures_are_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let figures: &[&[&str]] = &[
        &["plot", "error", "--steps", "16", "--momentum", "0.9"],
        &["plot", "heatmap", "--steps", "12"],
        &["plot", "convergence", "--steps", "12", "--time-limit", "2"],
        &["plot", "buffers", "--steps", "24", "--most", "4"],
        &["plot", "privacy", "--noise-multiplier", "1"],
    ];
    for arguments in figures {
        let path = folder.path().join(format!("{}.svg", arguments[1]));
        let drawn = json(&[arguments, &["-o", path.to_str().unwrap()][..]].concat());
        assert!(drawn["out"].as_str().unwrap().ends_with(".svg"));
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("<svg") && text.contains("<title>"), "{arguments:?}");
        assert!(text.len() < 60_000, "{arguments:?}: {} bytes", text.len());
        for panel in drawn["panels"].as_array().into_iter().flatten() {
            for label in ["x", "y", "title"] {
                assert!(
                    text.contains(&format!(">{}<", panel[label].as_str().unwrap())),
                    "{arguments:?}: {label}"
                );
            }
        }
    }
    for name in ["x.png", "x.gif", "x"] {
        let (kind, message) = failure(&["plot", "error", "--steps", "1e6", "-o", name]);
        assert_eq!(kind, "usage");
        assert!(message.contains("written as .svg"), "{message}");
    }
    assert!(!dpmf(&["plot", "error", "--steps", "4", "-o", "no/such/folder/x.svg"]).status.success());
}

#[test]
fn budgets_that_promise_little_are_warned_of() {
    let warnings = |arguments: &[&str]| {
        let answer = json(arguments);
        let told = answer["warnings"].as_array().unwrap_or_else(|| panic!("{arguments:?}"));
        told.iter().map(|warning| warning.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert!(warnings(&["account", "--noise-multiplier", "2", "--delta", "1e-6"]).is_empty());
    let loud = warnings(&["account", "--noise-multiplier", "0.01", "--delta", "0.9"]);
    assert_eq!(loud.len(), 2);
    let plan = ["plan", "--examples", "64", "--batch", "16", "--epochs", "1", "--epsilon", "2", "--delta"];
    let [few] = &warnings(&[&plan[..], &["0.1", "--no-cache"]].concat())[..] else { panic!() };
    assert!(few.starts_with("δ = 1e-1 is above 1/64"), "{few}");
    let calibrate = ["calibrate", "--steps", "8", "--epsilon", "1e6", "--delta", "1e-6", "--clip", "1"];
    assert!(warnings(&calibrate)[0].starts_with("ε = 1000000.00 is a weak guarantee"));
    let said = String::from_utf8(dpmf(&calibrate).stderr).unwrap();
    assert_eq!(said.lines().filter(|line| line.starts_with("warning: ε = ")).count(), 1, "{said}");
}

#[test]
fn a_verified_file_says_what_it_promises() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (plain, private) = (at("m.safetensors"), at("m2.safetensors"));
    json(&["factorize", "--steps", "8", "--participation", "epochs:2", "--out", &plain]);
    json(&["calibrate", &plain, "--epsilon", "2", "--delta", "1e-6", "--clip", "1", "--out", &private]);
    let last = |file: &str| {
        let text = String::from_utf8(dpmf(&["verify", file]).stdout).unwrap();
        text.lines().last().unwrap().to_owned()
    };
    assert_eq!(last(&plain), "privacy       not calibrated, so no guarantee yet");
    assert_eq!(
        last(&private),
        "privacy       ε = 2, δ = 1e-6 for every user (replace-with-zero), each taking part in at most 2 steps, any two of them \
         at least 4 apart"
    );
    assert_eq!(json(&["verify", &private])["privacy"]["epsilon"], 2.0);
}

/// A file that says whom it is for keeps saying it, at any other noise.
#[test]
fn calibrating_again_keeps_the_unit_and_the_neighbours() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (first, second) = (path("first.safetensors"), path("second.safetensors"));
    let budget = ["--epsilon", "2", "--delta", "1e-6", "--clip", "1"];
    let made =
        ["calibrate", "--steps", "16", "--unit", "record", "--adjacency", "replace-one", "--out", &first];
    json(&[&made[..], &budget].concat());
    let again =
        json(&["calibrate", &first, "--epsilon", "1", "--delta", "1e-6", "--clip", "1", "--out", &second]);
    assert_eq!(
        (&again["statement"]["unit"], &again["statement"]["adjacency"]),
        (&"record".into(), &"replace-one".into())
    );
    let words = again["statement"]["words"].as_str().unwrap();
    assert!(words.contains("for every record") && !words.contains("user"), "{words}");
    let changed = json(&[&["calibrate", &second, "--unit", "user"][..], &budget].concat());
    assert_eq!(
        (&changed["statement"]["unit"], &changed["statement"]["adjacency"]),
        (&"user".into(), &"replace-one".into())
    );
}
