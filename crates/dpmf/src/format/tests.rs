use super::*;
use crate::factorize::{Options, Solver, optimal};
use crate::mechanism::Conditions;
use crate::workload::Schedule;
use proptest::prelude::*;
use std::ops::ControlFlow;

fn example() -> Mechanism {
    let schedule: Schedule = "cooldown:0.5:0.1".parse().unwrap();
    let optimizer = Optimizer { momentum: 0.9, ..Default::default() };
    let workload = Workload::sgd(schedule.values(6), optimizer).unwrap();
    let optimum =
        optimal(&workload, Solver::Dense, &Options::default(), &mut |_| ControlFlow::Continue(())).unwrap();
    let (dense, _) = optimum.to_dense(&workload).unwrap();
    Mechanism::new(workload, &Factorization::Dense(dense), Participation::Single)
        .unwrap()
        .with_bound(Bound::from(&optimum))
        .unwrap()
        .calibrated(8.0, 1e-6, 2.0, Conditions::default())
        .unwrap()
}

#[test]
fn bytes_are_reproducible_and_round_trip() {
    let mechanism = example();
    let bytes = to_bytes(&mechanism).unwrap();
    let back = from_bytes(&bytes).unwrap();
    assert_eq!(to_bytes(&back).unwrap(), bytes);
    assert_eq!(back.loss(), mechanism.loss());
    assert_eq!(back.certificate(), mechanism.certificate());
    assert_eq!(hash(&back).unwrap(), hash(&mechanism).unwrap());
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

/// Rewrites the header and seals it again, as an attacker or a careless tool would.
fn forge(edit: impl Fn(&mut serde_json::Value)) -> Result<Mechanism> {
    let (header, tensors) = encode(&example()).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&header).unwrap();
    edit(&mut value);
    from_bytes(&container::write(&value.to_string(), &tensors).unwrap())
}

#[test]
fn consistent_forgeries_are_refused() {
    assert!(forge(|_| ()).is_ok());
    let refused = |edit: &dyn Fn(&mut serde_json::Value)| forge(edit).unwrap_err().to_string();
    assert!(refused(&|h| h["sensitivity"] = 0.9.into()).contains("states a sensitivity of 0.9"));
    assert!(refused(&|h| h["sensitivity"] = serde_json::Value::Null).contains("bad header"));
    assert!(refused(&|h| h["format"] = 2.into()).contains("format 2"));
    assert!(refused(&|h| h["steps"] = 5.into()).contains("does not fit"));
    assert!(refused(&|h| h["steps"] = u64::MAX.into()).contains("does not fit"));
    assert!(refused(&|h| h["workload"]["sgd"]["momentum"] = 1.0.into()).contains("momentum is 1"));
    assert!(refused(&|h| h["factorization"] = "independent".into()).contains("no meaning here"));
    assert!(refused(&|h| h["factorization"] = "unknown".into()).contains("bad header"));
    assert!(refused(&|h| h["bound"]["lower_bound"] = (-1.0).into()).contains("lower bound is -1"));
    assert!(refused(&|h| h["privacy"]["clip"] = 0.0.into()).contains("clip is 0"));
    assert!(refused(&|h| h["privacy"]["epsilon"] = 4.0.into()).contains("epsilon"));
    assert!(refused(&|h| h["privacy"]["sensitivity"] = 0.5.into()).contains("sensitivity"));
    assert!(refused(&|h| h["privacy"]["steps"] = 7.into()).contains("privacy statement has length 7"));
    assert!(refused(&|h| h["surprise"] = 1.into()).contains("unknown field"));
}

#[test]
fn a_smaller_coefficient_is_caught_by_the_recomputed_sensitivity() {
    // Halving N doubles C: the stated sensitivity then understates the true one.
    let (header, mut tensors) = encode(&example()).unwrap();
    let (shape, values) = tensors.take("dense.lower_triangle", &[None]).unwrap();
    tensors.put_f32("dense.lower_triangle", &shape, values.iter().map(|x| x / 2.0));
    let error = from_bytes(&container::write(&header, &tensors).unwrap()).unwrap_err();
    assert!(error.to_string().contains("states a sensitivity"), "{error}");
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
        let (header, mut tensors) = encode(&example()).unwrap();
        tensors.take("dense.lower_triangle", &[None]).unwrap();
        let length = values.len() - short;
        tensors.put_f32("dense.lower_triangle", &[length], values[..length].iter().map(|x| f64::from(*x)));
        // Sealed again, so that validation beyond the hash is what is tested.
        prop_assert!(from_bytes(&container::write(&header, &tensors).unwrap()).is_err() || short == 0);
    }

    #[test]
    fn arbitrary_headers_never_panic(text in "\\PC{0,80}") {
        let (_, tensors) = encode(&example()).unwrap();
        if let Ok(bytes) = container::write(&text, &tensors) {
            prop_assert!(from_bytes(&bytes).is_err());
        }
    }
}
