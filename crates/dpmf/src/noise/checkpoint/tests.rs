use super::*;
use crate::form::Representation;
use crate::form::{Form, StateSpace, Tree, state_space::Parts, tree::Decoder};
use crate::identity::Identity;
use crate::noise::engine::IterateStage;
use crate::noise::{NoiseKey, RunId};
use crate::workload::{Optimizer, Workload};
use std::fs;
use std::ops::Range;

const STEPS: usize = 20;

fn forms() -> Vec<Form> {
    let parts = Parts {
        direct: vec![1.0; STEPS],
        output: vec![0.5; 3 * STEPS],
        input: vec![0.25; 3 * STEPS],
        increment: vec![-0.125; 6 * STEPS],
    };
    vec![
        Form::Tree(Tree::new(STEPS, Decoder::HonakerOnline).unwrap().rounded().unwrap()),
        Form::StateSpace(StateSpace::from_parts(3, parts).unwrap()),
        Form::StateSpace(StateSpace::independent(STEPS).unwrap()),
    ]
}

fn stages() -> [Option<IterateStage>; 2] {
    let nesterov = Optimizer { momentum: 0.9, nesterov: true, ..Default::default() };
    let workload = Workload::sgd(vec![0.1; STEPS], nesterov).unwrap();
    [None, Some(IterateStage::new(&workload).unwrap())]
}

/// The output that stands for gradient noise in exact arithmetic.
const EXACT: usize = 2;

struct Case {
    seed: u64,
    mechanism: u8,
    run: u8,
    coordinates: Range<u64>,
    scale: f64,
    output: usize,
    form: usize,
}

impl Default for Case {
    fn default() -> Self {
        Self { seed: 1, mechanism: 2, run: 3, coordinates: 37..3000, scale: 1.5, output: 0, form: 0 }
    }
}

impl Case {
    fn stream(&self) -> NoiseStream {
        let key =
            NoiseKey::from_seed(self.seed).stream(Identity([self.mechanism; 32]), RunId([self.run; 16]));
        if self.output == EXACT {
            let program = forms()[self.form].program(1).unwrap();
            return NoiseStream::assemble_exact(
                program,
                key,
                std::slice::from_ref(&self.coordinates),
                self.scale,
                -8,
            )
            .unwrap();
        }
        let engine = forms()[self.form].engine(1).unwrap();
        let stage = stages()[self.output].clone();
        NoiseStream::assemble(engine, stage, key, self.coordinates.clone(), self.scale).unwrap()
    }
}

fn row(stream: &mut NoiseStream) -> Vec<u32> {
    let range = stream.coordinates();
    let mut row = vec![0.0_f32; (range.end - range.start) as usize];
    stream.add_next(&mut row).unwrap();
    row.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_restored_stream_goes_on_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    for form in 0..3 {
        for output in 0..3 {
            let case = Case { form, output, ..Default::default() };
            let path = folder.path().join("checkpoint");
            let mut whole = case.stream();
            for step in 0..STEPS {
                whole.checkpoint(&path).unwrap();
                let mut restored = case.stream().restore(&path).unwrap();
                assert_eq!(restored.next_step(), step);
                assert_eq!(row(&mut restored), row(&mut whole));
            }
            whole.checkpoint(&path).unwrap();
            assert!(matches!(case.stream().restore(&path).unwrap().skip(), Err(Error::Exhausted { .. })));
        }
    }
}

#[test]
fn bytes_in_memory_are_those_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let mut whole = Case::default().stream();
    whole.skip_to(7).unwrap();
    whole.checkpoint(&path).unwrap();
    let bytes = whole.checkpoint_bytes().unwrap();
    assert_eq!(bytes, fs::read(&path).unwrap());
    let mut restored = Case::default().stream().restore_bytes(&bytes).unwrap();
    assert_eq!(restored.next_step(), 7);
    assert_eq!(row(&mut restored), row(&mut whole));
    for refused in [&bytes[..bytes.len() - 1], &[bytes.as_slice(), &[0]].concat(), &[]] {
        assert!(matches!(Case::default().stream().restore_bytes(refused), Err(Error::Format { .. })));
    }
    let other = Case { run: 4, ..Default::default() };
    assert!(matches!(other.stream().restore_bytes(&bytes), Err(Error::Binding { what: "run", .. })));
}

#[test]
fn the_checkpoint_of_another_stream_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    Case::default().stream().checkpoint(&path).unwrap();
    let base = Case::default;
    let others = [
        (Case { seed: 2, ..base() }, "key"),
        (Case { mechanism: 3, ..base() }, "mechanism"),
        (Case { run: 4, ..base() }, "run"),
        (Case { coordinates: 37..3001, ..base() }, "range of coordinates"),
        (Case { scale: 1.6, ..base() }, "scale"),
        (Case { output: 1, ..base() }, "output"),
        (Case { output: EXACT, ..base() }, "arithmetic"),
        (Case { form: 1, ..base() }, "number of buffers"),
    ];
    for (case, expected) in others {
        match case.stream().restore(&path).err() {
            Some(Error::Binding { what, .. }) => assert_eq!(what, expected),
            other => panic!("{expected}: {other:?}"),
        }
    }
}

#[test]
fn every_damaged_byte_and_every_cut_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let case = Case { coordinates: 60..70, ..Default::default() };
    let mut stream = case.stream();
    stream.skip_to(5).unwrap();
    stream.checkpoint(&path).unwrap();
    let whole = fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        case.stream().restore(&path).is_err()
    };
    assert!(!refused(&whole));
    for i in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[i] ^= 4;
        assert!(refused(&damaged), "byte {i}");
        assert!(refused(&whole[..i]), "cut at {i}");
    }
    assert!(refused(&[whole.as_slice(), &[0]].concat()));
    assert!(matches!(case.stream().restore(folder.path().join("none")), Err(Error::Io { .. })));
}

#[test]
fn neither_key_nor_state_is_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let mut stream = Case::default().stream();
    stream.skip_to(7).unwrap();
    stream.checkpoint(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let mut found = 0;
    let visit = |state: &[u8]| {
        let numbers = state.chunks_exact(4).filter(|x| **x != [0; 4]);
        found += numbers.filter(|x| bytes.windows(4).any(|window| window == *x)).count();
    };
    stream.visit_state(false, visit).unwrap();
    assert!(found < 3, "{found} numbers of the state are in the file");
}

/// Format 2: the header in the order of the format; the tag, which covers the ciphertext, from a second
/// implementation of format and stream in Python (`hmac`, AES from `cryptography`, `numpy.float32`).
#[test]
fn the_bytes_of_format_2_are_pinned() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let case = Case { coordinates: 60..70, ..Default::default() };
    let mut stream = case.stream();
    stream.skip_to(5).unwrap();
    stream.checkpoint(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let mut header = b"DPMFCKPT".to_vec();
    header.extend([2, 0, 0, 0, 1, 0, 0, 0]);
    header.extend([2; 32]);
    header.extend([3; 16]);
    header.extend(NoiseKey::from_seed(1).fingerprint().0);
    [60_u64, 70, 20].iter().for_each(|number| header.extend(number.to_le_bytes()));
    [0_u32, 4, 1.5_f32.to_bits()].iter().for_each(|word| header.extend(word.to_le_bytes()));
    header.extend(i32::MIN.to_le_bytes());
    header.extend(5_u64.to_le_bytes());
    assert_eq!(&bytes[..SHORT], header);
    assert_eq!(bytes.len(), SHORT + 4 * 10 * 4 + TAG);
    let tag: String = bytes[bytes.len() - TAG..].iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(tag, "b7d149f5f57bab974b30300372f5e660e5eaaec897d11da30b471a788de7f22b");
}

/// Format 3 is format 2 with two fields more in the header, and one row more in the state, which is one step further.
#[test]
fn format_3_has_the_row_of_its_step() {
    let case = Case { coordinates: 60..70, ..Default::default() };
    let mut stream = case.stream();
    stream.skip_to(5).unwrap();
    let plain = stream.checkpoint_bytes().unwrap();
    stream.prepare().unwrap();
    let ahead = stream.checkpoint_bytes().unwrap();
    assert_eq!((plain[8], ahead[8]), (2, 3));
    assert_eq!(plain[12..SHORT], ahead[12..SHORT]);
    assert_eq!(ahead[SHORT..SHORT + 8], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(ahead.len(), plain.len() + HEADER - SHORT + 10 * 4);
    let next = |bytes: &[u8]| {
        let mut row = vec![0.0_f32; 10];
        case.stream().restore_bytes(bytes).unwrap().add_next(&mut row).unwrap();
        row
    };
    assert_eq!(next(&plain), next(&ahead));
    for at in 0..ahead.len() {
        let mut damaged = ahead.clone();
        damaged[at] ^= 4;
        assert!(case.stream().restore_bytes(&damaged).is_err(), "byte {at}");
        assert!(case.stream().restore_bytes(&ahead[..at]).is_err(), "cut at {at}");
    }
}
