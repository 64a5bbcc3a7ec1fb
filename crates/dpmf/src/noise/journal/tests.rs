use super::records::{LEAF, TAG};
use super::*;
use crate::disk::Simulated;
use crate::disk::simulated::Event;
use crate::form::{Representation, Tree, tree::Decoder};
use crate::identity::Identity;
use crate::noise::{NoiseKey, RunId};
use std::fs;
use std::path::PathBuf;

const STEPS: usize = 12;
const WIDTH: usize = 30;
pub(super) const PLAN: [u8; 32] = [7; 32];

pub(super) fn stream_of_steps(run: u8, steps: usize, width: usize) -> NoiseStream {
    let tree = Tree::new(steps, Decoder::HonakerOnline).unwrap().rounded().unwrap();
    let key = NoiseKey::from_seed(1).stream(Identity([2; 32]), RunId([run; 16]));
    NoiseStream::assemble(tree.engine(1).unwrap(), None, key, 0..width as u64, 1.0).unwrap()
}

fn stream_of(run: u8) -> NoiseStream {
    stream_of_steps(run, STEPS, WIDTH)
}

fn stream() -> NoiseStream {
    stream_of(3)
}

fn input(step: usize) -> Vec<f32> {
    (0..WIDTH).map(|j| (step * WIDTH + j) as f32 / 16.0).collect()
}

/// Input plus noise of a step, without a journal.
fn expected(step: usize) -> Vec<f32> {
    let mut stream = stream();
    stream.skip_to(step).unwrap();
    let mut row = input(step);
    stream.add_next(&mut row).unwrap();
    row
}

fn release(durable: &mut DurableStream, step: usize) {
    let mut row = input(step);
    assert_eq!(durable.release(&mut row).unwrap(), step);
    assert_eq!(row, expected(step));
}

struct Run {
    folder: tempfile::TempDir,
}

impl Run {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn journal(&self) -> PathBuf {
        self.folder.path().join("journal")
    }

    fn checkpoint(&self) -> PathBuf {
        self.folder.path().join("checkpoint")
    }

    fn create(&self) -> DurableStream {
        DurableStream::create(stream(), self.journal(), PLAN).unwrap()
    }

    fn open(&self) -> Result<DurableStream> {
        DurableStream::open(stream(), self.journal(), PLAN)
    }
}

#[test]
fn a_journalled_step_comes_again_for_the_same_input_only() {
    let run = Run::new();
    let mut durable = run.create();
    (0..4).for_each(|step| release(&mut durable, step));
    drop(durable);

    let mut durable = run.open().unwrap();
    assert_eq!((durable.next_step(), durable.recorded_steps()), (0, 4));
    release(&mut durable, 0);
    let mut other = input(1);
    other[WIDTH - 1] = other[WIDTH - 1].next_up();
    let given = other.clone();
    assert!(matches!(durable.release(&mut other), Err(Error::StepReused { step: 1 })));
    assert_eq!((other, durable.next_step()), (given, 1));
    (1..STEPS).for_each(|step| release(&mut durable, step));
    assert!(matches!(durable.release(&mut input(0)), Err(Error::Exhausted { .. })));
}

#[test]
fn a_burned_step_is_passed_over_for_ever() {
    let run = Run::new();
    let mut durable = run.create();
    (0..4).for_each(|step| release(&mut durable, step));
    durable.checkpoint(run.checkpoint()).unwrap();
    // One that is journalled and was released, two that are new.
    drop(durable);
    let mut durable = run.open().unwrap();
    (0..3).for_each(|step| release(&mut durable, step));
    assert_eq!(durable.burn().unwrap(), 3);
    assert_eq!(durable.burn().unwrap(), 4);
    release(&mut durable, 5);
    assert_eq!(durable.burn().unwrap(), 6);
    release(&mut durable, 7);
    drop(durable);

    let mut durable = run.open().unwrap();
    for step in [0, 1, 2, 5, 7, 8] {
        release(&mut durable, step);
    }
    assert_eq!(durable.burned().collect::<Vec<_>>(), [3, 4, 6]);
    drop(durable);
    // A checkpoint taken before the burn leads past it too.
    let restored = stream().restore(run.checkpoint()).unwrap();
    assert_eq!(restored.next_step(), 4);
    assert_eq!(DurableStream::open(restored, run.journal(), PLAN).unwrap().next_step(), 5);

    let mut durable = run.open().unwrap();
    while durable.next_step() < STEPS {
        durable.burn().unwrap();
    }
    assert!(matches!(durable.burn(), Err(Error::Exhausted { .. })));
}

#[test]
fn a_torn_end_is_recognised_and_cut_off() {
    let run = Run::new();
    let mut durable = run.create();
    (0..3).for_each(|step| release(&mut durable, step));
    drop(durable);
    let whole = fs::read(run.journal()).unwrap();
    assert_eq!(whole.len(), HEADER + 3 * RECORD);
    // Every kind of place: at and beside the edges of records, within them.
    let cuts = (HEADER..whole.len()).filter(|n| n % 64 < 2 || n % 64 == 63 || n % 41 == 0);
    for length in cuts {
        fs::write(run.journal(), &whole[..length]).unwrap();
        let mut durable = run.open().unwrap();
        let recorded = (length - HEADER) / RECORD;
        assert_eq!(durable.recorded_steps(), recorded, "{length}");
        // What is left is a sound journal: it can be continued and read again.
        (0..=recorded).for_each(|step| release(&mut durable, step));
        drop(durable);
        assert_eq!(run.open().unwrap().recorded_steps(), recorded + 1, "{length}");
    }
    // A file that grew before its bytes arrived.
    fs::write(run.journal(), [whole.as_slice(), &[0; RECORD]].concat()).unwrap();
    assert_eq!(run.open().unwrap().recorded_steps(), 3);
    assert_eq!(fs::read(run.journal()).unwrap(), whole);
}

#[test]
fn a_journal_shorter_than_its_header_is_damage_and_never_begun_again() {
    let run = Run::new();
    release(&mut run.create(), 0);
    let whole = fs::read(run.journal()).unwrap();
    for length in 0..HEADER {
        fs::write(run.journal(), &whole[..length]).unwrap();
        for refused in [run.open().err(), DurableStream::run_of(run.journal()).err()] {
            let message = refused.unwrap().to_string();
            assert!(message.contains("cannot be resumed") && message.contains("new key"), "{message}");
        }
        assert_eq!(fs::read(run.journal()).unwrap(), &whole[..length], "it is left alone");
        assert!(matches!(DurableStream::create(stream(), run.journal(), PLAN), Err(Error::Io { .. })));
    }
    fs::remove_file(run.journal()).unwrap();
    let message = run.open().err().unwrap().to_string();
    assert!(message.contains("the journal is missing") && message.contains("new key"), "{message}");
}

#[test]
fn a_journal_is_begun_as_a_whole_or_not_at_all() {
    let begin = |disk: &Simulated| DurableStream::create(stream(), disk.at("/journal"), PLAN).map(drop);
    let disk = Simulated::new(0);
    begin(&disk).unwrap();
    let (operations, mut begun) = (disk.operations(), 0);
    for operation in 0..operations {
        for seed in 0..40 {
            let disk = Simulated::new(seed);
            disk.schedule(operation, Event::PowerLoss);
            begin(&disk).unwrap_err();
            disk.restart();
            match disk.at("/journal").exists().unwrap() {
                true => drop(DurableStream::open(stream(), disk.at("/journal"), PLAN).unwrap()),
                false => begin(&disk).unwrap(),
            }
            begun += u64::from(disk.at("/journal").exists().unwrap());
        }
    }
    assert_eq!(begun, 40 * operations);
}

/// A failed sync leaves a record that reads see and the disk has not. Whoever opens the journal next finds it there, and
/// must not let go what a power loss would take back.
#[test]
fn what_an_earlier_process_failed_to_sync_is_synced_before_anything_rests_on_it() {
    let mut lost = 0;
    for seed in 0..40 {
        let disk = Simulated::new(seed);
        let place = disk.at("/journal");
        let mut durable = DurableStream::create(stream(), &place, PLAN).unwrap();
        disk.schedule(disk.operations() + 1, Event::Fail);
        let mut values = input(0);
        assert!(matches!(durable.release(&mut values), Err(Error::Io { .. })));
        assert_eq!(values, input(0), "nothing left");
        drop(durable);
        // The record is there to be read, and its row is released.
        let mut durable = DurableStream::open(stream(), &place, PLAN).unwrap();
        assert_eq!(durable.recorded_steps(), 1);
        release(&mut durable, 0);
        drop(durable);
        disk.lose_power();
        let mut durable = DurableStream::open(stream(), &place, PLAN).unwrap();
        assert!(matches!(durable.release(&mut input(7)), Err(Error::StepReused { step: 0 })), "{seed}");

        // The power loss takes the record of a trusting reader.
        let disk = Simulated::new(seed);
        let mut durable = DurableStream::create(stream(), disk.at("/journal"), PLAN).unwrap();
        disk.schedule(disk.operations() + 1, Event::Fail);
        durable.release(&mut input(0)).unwrap_err();
        disk.lose_power();
        let durable = DurableStream::open(stream(), disk.at("/journal"), PLAN).unwrap();
        lost += 1 - durable.recorded_steps();
    }
    assert!(lost > 10, "{lost}");
}

#[test]
fn damage_before_the_end_is_refused() {
    let run = Run::new();
    let mut durable = run.create();
    (0..3).for_each(|step| release(&mut durable, step));
    drop(durable);
    let whole = fs::read(run.journal()).unwrap();
    for i in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[i] ^= 16;
        fs::write(run.journal(), &damaged).unwrap();
        let refused = run.open().err();
        assert!(
            matches!(refused, Some(Error::Format { .. } | Error::Binding { .. })),
            "byte {i}: {refused:?}"
        );
        assert_eq!(fs::read(run.journal()).unwrap(), damaged, "byte {i}: a refused journal is left alone");
    }
    // Records taken out, doubled or exchanged.
    let record = |i: usize| &whole[HEADER + i * RECORD..][..RECORD];
    for order in [vec![0, 2], vec![1, 2], vec![0, 0, 1], vec![1, 0, 2], vec![0, 1, 2, 2]] {
        let records: Vec<u8> = order.iter().flat_map(|&i| record(i)).copied().collect();
        fs::write(run.journal(), [&whole[..HEADER], &records].concat()).unwrap();
        assert!(matches!(run.open().err(), Some(Error::Format { .. })), "{order:?}");
    }
}

#[test]
fn the_journal_of_another_stream_is_refused() {
    let run = Run::new();
    drop(run.create());
    let other = DurableStream::open(stream_of(4), run.journal(), PLAN);
    assert!(matches!(other.err(), Some(Error::Binding { what: "run", .. })));
    assert!(matches!(DurableStream::create(stream(), run.journal(), PLAN).err(), Some(Error::Io { .. })));
    let missing = DurableStream::open(stream(), run.folder.path().join("none"), PLAN);
    assert!(matches!(missing.err(), Some(Error::Io { .. })));
}

#[test]
fn a_journal_names_its_run() {
    let run = Run::new();
    let mut durable = run.create();
    release(&mut durable, 0);
    assert_eq!(DurableStream::run_of(run.journal()).unwrap(), RunId([3; 16]));
    assert_eq!(DurableStream::steps_of(run.journal()).unwrap(), Some(1));
    assert_eq!(DurableStream::steps_of(run.folder.path().join("none")).unwrap(), None);
    let whole = fs::read(run.journal()).unwrap();
    for bytes in [&whole[..HEADER - 1], &[0; HEADER]] {
        fs::write(run.checkpoint(), bytes).unwrap();
        assert!(matches!(DurableStream::run_of(run.checkpoint()), Err(Error::Format { .. })));
    }
    assert!(matches!(DurableStream::run_of(run.folder.path().join("none")), Err(Error::Io { .. })));
}

#[test]
fn a_journal_shorter_than_the_stream_is_refused() {
    let run = Run::new();
    let mut durable = run.create();
    (0..2).for_each(|step| release(&mut durable, step));
    drop(durable);
    let mut ahead = stream();
    ahead.skip_to(3).unwrap();
    assert!(matches!(DurableStream::open(ahead, run.journal(), PLAN).err(), Some(Error::Format { .. })));
    let mut moved = stream();
    moved.skip().unwrap();
    let created = DurableStream::create(moved, run.folder.path().join("second"), PLAN);
    assert!(matches!(created.err(), Some(Error::InvalidArgument { .. })));
}

#[test]
fn two_processes_cannot_share_a_stream() {
    let run = Run::new();
    let durable = run.create();
    match run.open().err() {
        Some(Error::Locked { path }) => assert_eq!(path, run.journal()),
        other => panic!("{other:?}"),
    }
    assert!(matches!(DurableStream::create(stream(), run.journal(), PLAN).err(), Some(Error::Locked { .. })));
    #[cfg(unix)]
    {
        let link = run.folder.path().join("link");
        std::os::unix::fs::symlink(run.journal(), &link).unwrap();
        assert!(matches!(DurableStream::open(stream(), link, PLAN).err(), Some(Error::Locked { .. })));
    }
    drop(durable);
    assert!(run.open().is_ok());
}

/// The lock is the journal's own: no other name of it, and no lock file that somebody removed, lets a second process in.
#[cfg(unix)]
#[test]
fn other_names_and_a_removed_lock_file_let_nobody_in() {
    let locked = |opened: Result<DurableStream>| matches!(opened.err(), Some(Error::Locked { .. }));
    for resumed in [false, true] {
        let run = Run::new();
        let [earlier, later] = ["earlier", "later"].map(|name| run.folder.path().join(name));
        let mut durable = run.create();
        if resumed {
            drop(durable);
            // A name of the file that is about to be replaced.
            fs::hard_link(run.journal(), &earlier).unwrap();
            durable = run.open().unwrap();
            assert!(locked(DurableStream::open(stream(), &earlier, PLAN)));
        }
        fs::hard_link(run.journal(), &later).unwrap();
        assert!(locked(DurableStream::open(stream(), &later, PLAN)));
        fs::remove_file(run.folder.path().join("journal.lock")).unwrap();
        assert!(locked(run.open()));
        release(&mut durable, 0);
        drop(durable);
        assert_eq!(run.open().unwrap().recorded_steps(), 1);
    }
}

#[test]
fn bad_input_is_neither_journalled_nor_released() {
    let run = Run::new();
    let mut durable = run.create();
    let mut values = input(0);
    values[3] = f32::NAN;
    assert!(matches!(durable.release(&mut values), Err(Error::InvalidEntry { index: 3, .. })));
    assert!(matches!(durable.release(&mut [1.0]), Err(Error::WrongLength { .. })));
    assert_eq!((durable.recorded_steps(), durable.next_step()), (0, 0));
    release(&mut durable, 0);
}

#[test]
fn a_failed_append_halts_the_stream_and_releases_nothing() {
    for (operation, event) in [(0, Event::Fail), (0, Event::Full(9)), (1, Event::Fail)] {
        let disk = Simulated::new(5);
        let place = disk.at("/journal");
        let mut durable = DurableStream::create(stream(), &place, PLAN).unwrap();
        release(&mut durable, 0);
        disk.schedule(disk.operations() + operation, event);
        let mut values = input(1);
        assert!(matches!(durable.release(&mut values), Err(Error::Io { .. })), "{event:?}");
        assert_eq!(values, input(1));
        for _ in 0..9 {
            assert!(disk.at("/elsewhere").exists().is_ok());
        }
        assert!(matches!(durable.release(&mut values), Err(Error::Halted { .. })));
        assert!(matches!(durable.burn(), Err(Error::Halted { .. })));
        drop(durable);
        let mut durable = DurableStream::open(stream(), &place, PLAN).unwrap();
        (0..3).for_each(|step| release(&mut durable, step));
    }
}

#[test]
fn the_digest_sees_step_length_place_and_every_value() {
    let run = Run::new();
    let journal = run.create().journal.records;
    let values: Vec<f32> = (0..LEAF + 300).map(|i| i as f32).collect();
    let base = journal.digest(1, &values);
    assert_eq!(base, journal.digest(1, &values));
    assert_ne!(base, journal.digest(2, &values));
    assert_ne!(base, journal.digest(1, &values[..values.len() - 1]));
    for i in [0, 255, 256, LEAF - 1, LEAF, LEAF + 299] {
        let mut other = values.clone();
        other[i] = -1.0;
        assert_ne!(base, journal.digest(1, &other), "{i}");
    }
    let mut exchanged = values.clone();
    exchanged.swap(3, LEAF + 3);
    assert_ne!(base, journal.digest(1, &exchanged));
    // Another key gives another digest of the same values: the journal says nothing about them.
    let folder = tempfile::tempdir().unwrap();
    let other =
        DurableStream::create(stream_of(9), folder.path().join("journal"), PLAN).unwrap().journal.records;
    assert_ne!(base, other.digest(1, &values));
}

#[test]
fn a_journal_opens_for_its_own_plan_alone() {
    let run = Run::new();
    release(&mut run.create(), 0);
    match DurableStream::open(stream(), run.journal(), [8; 32]).err() {
        Some(Error::Binding { what: "plan", expected, found, .. }) => {
            assert_eq!((expected, found), ("08".repeat(32), "07".repeat(32)));
        }
        other => panic!("{other:?}"),
    }
    // An edited header is not believed either.
    let mut bytes = fs::read(run.journal()).unwrap();
    bytes[120..152].fill(8);
    fs::write(run.journal(), &bytes).unwrap();
    let error = DurableStream::open(stream(), run.journal(), [8; 32]).err().unwrap().to_string();
    assert!(error.contains("does not match its tag"), "{error}");
    bytes[8] = 1;
    fs::write(run.journal(), &bytes).unwrap();
    let error = run.open().err().unwrap().to_string();
    assert!(error.contains("by version 0.1"), "{error}");
}

/// The bytes in the order of the format; the last tag, which covers all before it, from a second implementation in
/// Python (`hmac`, `hashlib`).
#[test]
fn the_bytes_of_format_3_are_pinned() {
    let run = Run::new();
    let mut durable = run.create();
    release(&mut durable, 0);
    durable.burn().unwrap();
    let bytes = fs::read(run.journal()).unwrap();
    let mut header = b"DPMFJRNL".to_vec();
    header.extend([3, 0, 0, 0, 1, 0, 0, 0]);
    header.extend([2; 32]);
    header.extend([3; 16]);
    header.extend(NoiseKey::from_seed(1).fingerprint().0);
    [0_u64, 30, 12].iter().for_each(|number| header.extend(number.to_le_bytes()));
    [0_u32, 3, 1.0_f32.to_bits()].iter().for_each(|word| header.extend(word.to_le_bytes()));
    header.extend(i32::MIN.to_le_bytes());
    header.extend(PLAN);
    header.resize(HEADER - TAG, 0);
    assert_eq!(&bytes[..HEADER - TAG], header);
    let records = &bytes[HEADER..];
    assert_eq!(&records[..16], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(&records[RECORD..RECORD + 16], [2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(&records[RECORD + 16..RECORD + 48], [0; 32]);
    let tag: String = bytes[bytes.len() - TAG..].iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(tag, "7a8d8efa4a3eca57ae912704e0ed7cf3");
}
