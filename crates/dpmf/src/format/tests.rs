use super::*;
use crate::factorize::quiet;
use crate::problem::Problem;
use crate::workload::Schedule;
use proptest::prelude::*;
use serde_json::json;

fn example() -> Mechanism {
    let schedule: Schedule = "cooldown:0.5:0.1".parse().unwrap();
    let optimizer = Optimizer { momentum: 0.9, ..Default::default() };
    let workload = Workload::sgd(schedule.values(6), optimizer).unwrap();
    let problem = Problem::new(workload, Participation::default()).unwrap();
    let mechanism = problem.mechanism("optimal:dense".parse().unwrap(), &mut quiet).unwrap();
    mechanism.calibrated(8.0, 1e-6, 2.0, Conditions::default()).unwrap()
}

#[test]
fn bytes_are_reproducible_and_round_trip() {
    let mechanism = example();
    let bytes = to_bytes(&mechanism).unwrap();
    let back = from_bytes(&bytes).unwrap();
    assert_eq!(to_bytes(&back).unwrap(), bytes);
    assert_eq!(back.loss(), mechanism.loss());
    assert_eq!(back.certificate(), mechanism.certificate());
    assert_eq!((back.identity(), back.family()), (mechanism.identity(), mechanism.family()));
    assert_eq!(back.privacy(), mechanism.privacy());

    let recipe = json!({ "rounds": 6, "rate": 0.1 });
    let plan = unpack(&pack(Some(&mechanism), Some(&recipe)).unwrap()).unwrap();
    assert_eq!(
        (plan.recipe.as_ref(), plan.mechanism.unwrap().identity()),
        (Some(&recipe), mechanism.identity())
    );
    let none = pack(None, Some(&recipe)).unwrap();
    assert!(unpack(&none).unwrap().mechanism.is_none());
    assert!(from_bytes(&none).unwrap_err().to_string().contains("without noise"));
}

#[test]
fn files_are_written_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    save(&example(), &path).unwrap();
    assert!(load(&path).is_ok());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    let missing = save(&example(), &folder.path().join("no/such/folder.safetensors")).unwrap_err();
    assert_eq!(missing.kind(), "io");
    std::fs::write(&path, b"not a mechanism").unwrap();
    let error = load(&path).unwrap_err();
    assert!(error.to_string().starts_with(&path.display().to_string()), "{error}");
}

/// The header and tensors of a mechanism.
fn parts(mechanism: &Mechanism) -> (Value, Tensors) {
    let Contents { header, tensors, .. } = tensors::read(&to_bytes(mechanism).unwrap()).unwrap();
    (serde_json::from_str(&header).unwrap(), tensors)
}

/// Rewrites the header and seals it again, as an attacker or a careless tool would.
fn forge(edit: impl Fn(&mut Value)) -> Result<Mechanism> {
    let (mut header, tensors) = parts(&example());
    edit(&mut header);
    from_bytes(&tensors::write(&header.to_string(), &tensors).unwrap())
}

fn refused(edit: impl Fn(&mut Value)) -> String {
    forge(edit).unwrap_err().to_string()
}

#[test]
fn consistent_forgeries_are_refused() {
    assert!(forge(|_| ()).is_ok());
    assert!(refused(|h| h["mechanism"]["sensitivity"] = 0.9.into()).contains("sensitivity is 0.9"));
    assert!(refused(|h| h["mechanism"]["sensitivity"] = Value::Null).contains("bad header"));
    assert!(refused(|h| h["format"] = 3.into()).contains("format 3"));
    assert!(refused(|h| h["mechanism"]["steps"] = 5.into()).contains("does not fit"));
    assert!(refused(|h| h["mechanism"]["steps"] = u64::MAX.into()).contains("does not fit"));
    assert!(
        refused(|h| h["mechanism"]["workload"]["sgd"]["momentum"] = 1.0.into()).contains("momentum is 1")
    );
    assert!(refused(|h| h["mechanism"]["form"] = "tree".into()).contains("tensor tree.own is missing"));
    assert!(refused(|h| h["mechanism"]["form"] = "unknown".into()).contains("does not know the form"));
    assert!(refused(|h| h["mechanism"]["family"] = "best".into()).contains("does not exist"));
    assert!(
        refused(|h| h["mechanism"]["bound"]["lower_bound"] = (-1.0).into()).contains("lower bound is -1")
    );
    assert!(refused(|h| h["mechanism"]["privacy"]["clip"] = 0.0.into()).contains("clip is 0"));
    assert!(refused(|h| h["mechanism"]["privacy"]["epsilon"] = 4.0.into()).contains("epsilon"));
    assert!(refused(|h| h["surprise"] = 1.into()).contains("unknown field"));
}

/// The smallest understatement of a number is seen, and no sentence can be put into a file.
#[test]
fn nothing_in_a_file_is_believed() {
    let honest = example();
    let least = honest.participation().sensitivity(honest.form()).unwrap().gamma;
    assert!(forge(|h| h["mechanism"]["sensitivity"] = least.into()).is_ok());
    assert!(refused(|h| h["mechanism"]["sensitivity"] = least.next_down().into()).contains("sensitivity"));
    let statement = honest.privacy().unwrap().calibration();
    let sigma = statement.noise_multiplier() * (1.0 - 1e-10);
    assert!(
        refused(|h| h["mechanism"]["privacy"]["noise_multiplier"] = sigma.into())
            .contains("not enough to prove it")
    );
    assert!(
        refused(|h| h["mechanism"]["privacy"]["epsilon"] = (8.0 * (1.0 - 1e-10)).into()).contains("epsilon")
    );

    for words in ["participation", "covers", "does_not_cover", "words"] {
        let message = refused(|h| h["mechanism"]["privacy"][words] = "takes part in every step".into());
        assert!(message.contains("unknown field"), "{message}");
    }
    let everything = json!({ "kind": "every-step" });
    assert!(refused(|h| h["mechanism"]["participation"] = everything.clone()).contains("unknown variant"));
    // A pattern that exists is not covered by the sensitivity of another.
    let epochs = json!({ "kind": "epochs", "times": 2 });
    assert!(refused(|h| h["mechanism"]["participation"] = epochs.clone()).contains("sensitivity"));
    let bins = json!({ "kind": "balls-in-bins", "bins": 2 });
    assert!(refused(|h| h["mechanism"]["sampling"] = bins.clone()).contains("sampling balls-in-bins:2"));
}

#[test]
fn files_of_version_0_1_are_answered_by_what_to_do() {
    let text = r#"{"format":1,"steps":2,"privacy":{"words":"perfect privacy"}}"#;
    let mut bytes = tensors::write(text, &Tensors::default()).unwrap();
    // Their hash was of another layout.
    let at = bytes.windows(6).position(|part| part == b"sha256").unwrap() + 12;
    bytes[at] = if bytes[at] == b'0' { b'1' } else { b'0' };
    let error = from_bytes(&bytes).unwrap_err().to_string();
    assert!(error.contains("format 1") && error.contains("dpmf factorize"), "{error}");
}

#[test]
fn a_smaller_coefficient_is_caught_by_the_recomputed_sensitivity() {
    // Halving N doubles C: the stated sensitivity then understates the true one.
    let (header, mut tensors) = parts(&example());
    let (shape, values) = tensors.take("dense.lower_triangle", &[None]).unwrap();
    tensors.put_f32("dense.lower_triangle", &shape, values.iter().map(|x| x / 2.0));
    let error = from_bytes(&tensors::write(&header.to_string(), &tensors).unwrap()).unwrap_err();
    assert!(error.to_string().contains("sensitivity"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn damaged_bytes_are_an_error(position in any::<prop::sample::Index>(), bit in 0..8_u32, cut in any::<bool>()) {
        let mut bytes = to_bytes(&example()).unwrap();
        let position = position.index(bytes.len());
        if cut {
            bytes.truncate(position);
        } else {
            bytes[position] ^= 1 << bit;
        }
        prop_assert!(from_bytes(&bytes).is_err());
    }

    #[test]
    fn arbitrary_tensors_never_panic(values in prop::collection::vec(any::<f32>(), 21), short in 0..3_usize) {
        let (header, mut tensors) = parts(&example());
        tensors.take("dense.lower_triangle", &[None]).unwrap();
        let length = values.len() - short;
        tensors.put_f32("dense.lower_triangle", &[length], values[..length].iter().map(|x| f64::from(*x)));
        // Sealed again, so that validation beyond the hash is what is tested.
        prop_assert!(from_bytes(&tensors::write(&header.to_string(), &tensors).unwrap()).is_err() || short == 0);
    }

    #[test]
    fn arbitrary_headers_never_panic(text in "\\PC{0,80}") {
        let (_, tensors) = parts(&example());
        if let Ok(bytes) = tensors::write(&text, &tensors) {
            prop_assert!(from_bytes(&bytes).is_err());
        }
    }
}

/// The dual point of several participations travels with the file, and is held against the participation.
#[test]
fn directions_round_trip_and_fit_their_participation() {
    let problem =
        Problem::new(Workload::prefix_sum(12).unwrap(), Participation::Epochs { times: 3 }).unwrap();
    let mechanism = problem.mechanism("optimal".parse().unwrap(), &mut quiet).unwrap();
    let bytes = to_bytes(&mechanism).unwrap();
    let back = from_bytes(&bytes).unwrap();
    assert_eq!(back.bound(), mechanism.bound());
    let (stated, proved) = (back.bound().unwrap().lower_bound, back.recompute_bound().unwrap().unwrap());
    assert!(stated <= proved && stated > proved * (1.0 - 1e-11), "{stated} {proved}");

    let rebound = |participation: &str, separation: usize| {
        let dual = &mechanism.bound().unwrap().dual;
        let dual = match separation {
            4 => dual.clone(),
            b => Dual::new(12, b, vec![1.0; b], [[1.0, 0.0].repeat(b), [0.6, 0.8].repeat(12 - b)].concat())
                .unwrap(),
        };
        let participation: Participation = participation.parse().unwrap();
        let plain = Mechanism::new(problem.workload().clone(), mechanism.form(), participation).unwrap();
        plain.with_bound(Bound { dual, lower_bound: 1.0, iterations: 1 }).map(|_| ())
    };
    for (participation, separation) in [
        ("epochs:3", 4),
        ("epochs:3", 8),
        ("min-separation:3", 4),
        ("min-separation:4:3", 4),
        ("epochs:6", 8),
    ] {
        assert!(rebound(participation, separation).is_ok(), "{participation} {separation}");
    }
    for (participation, separation) in [
        ("single", 4),
        ("epochs:2", 4),
        ("epochs:4", 4),
        ("epochs:3", 6),
        ("min-separation:5", 4),
        ("min-separation:4:2", 4),
    ] {
        let error = rebound(participation, separation).unwrap_err().to_string();
        assert!(error.contains("separation of the dual point"), "{participation} {separation}: {error}");
    }
}
