//! What a new user does wrong in the first hour, and all that the program says to it: the whole message, the exit code, and
//! that nothing is left behind.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

#[path = "common/process.rs"]
mod process;

use process::{HANGS, works};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_dpmf");

/// A folder to make mistakes in.
struct Folder(TempDir);

/// What somebody sees.
#[derive(Debug, PartialEq)]
struct Seen {
    code: Option<i32>,
    out: String,
    err: String,
}

impl From<Output> for Seen {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

fn expected(code: i32, err: &str) -> Seen {
    Seen { code: Some(code), out: String::new(), err: err.to_owned() }
}

/// A training that takes some seconds.
const LONG: &[&str] = &[
    "train",
    "--users",
    "2000",
    "--rounds",
    "2000",
    "--clients",
    "1",
    "--mechanism",
    "independent",
    "--hidden",
    "8",
    "--out",
    "run",
];

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.path()).env_remove("HOME").env_remove("XDG_CACHE_HOME").stdin(Stdio::null());
        command
    }

    fn dpmf(&self, words: &[&str]) -> Seen {
        self.command(PROGRAM).args(words).output().unwrap().into()
    }

    /// By a shell, in which the program is `"$0"`.
    fn shell(&self, script: &str) -> Seen {
        self.command("sh").args(["-c", script, PROGRAM]).output().unwrap().into()
    }

    /// Names of all files and folders, sorted.
    fn files(&self) -> Vec<String> {
        let names = fs::read_dir(self.path()).unwrap();
        let mut names: Vec<_> =
            names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Begins a command, presses Ctrl-C once `ready`, and waits for the end.
    fn interrupted(&self, words: &[&str], ready: impl Fn(u32) -> bool) -> Seen {
        let mut command = self.command(PROGRAM);
        let child = command.args(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let clock = Instant::now();
        while !ready(child.id()) {
            assert!(clock.elapsed() < HANGS, "{words:?} does not come to work");
            std::thread::sleep(Duration::from_millis(5));
        }
        let pressed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        assert!(pressed.success());
        child.wait_with_output().unwrap().into()
    }
}

#[test]
fn a_file_that_is_missing_is_named_once() {
    let folder = Folder::new();
    let missing = "No such file or directory (os error 2)\n";
    assert_eq!(
        folder.dpmf(&["verify", "m.safetensors"]),
        expected(1, &format!("error: m.safetensors: {missing}"))
    );
    let train = folder.dpmf(&["train", "--data", "messages.csv", "--out", "run"]);
    assert_eq!(train, expected(1, &format!("error: messages.csv: {missing}")));
    let elsewhere = folder.dpmf(&["factorize", "--steps", "8", "--out", "there/m.safetensors"]);
    let message = "error: there/m.safetensors cannot be written: the folder there does not exist\n";
    assert_eq!(elsewhere, expected(1, message));
    assert!(folder.files().is_empty(), "{:?}", folder.files());
}

#[test]
fn a_file_of_another_kind_is_told_from_a_damaged_one() {
    let folder = Folder::new();
    fs::write(folder.path().join("notes.txt"), "these are notes, and no mechanism").unwrap();
    let message = "error: notes.txt: it is not a complete safetensors file\n";
    assert_eq!(folder.dpmf(&["verify", "notes.txt"]), expected(1, message));
    let verified = folder.dpmf(&["verify", "."]);
    assert_eq!(verified, expected(1, "error: .: Is a directory (os error 21)\n"));
    let data = folder.dpmf(&["train", "--data", "notes.txt", "--out", "run"]);
    let message = "error: data is \"notes.txt\", but it must be names, quotes[:PATH], fashion-mnist[:DIRECTORY], \
                   stackoverflow:PATH, a .csv, .tsv, .jsonl, .ndjson (also .gz or .zst) or .parquet file, or - for standard input\n";
    assert_eq!(data, expected(1, message));
    let matrix = folder.dpmf(&["factorize", "--matrix", "notes.txt"]);
    assert_eq!(matrix, expected(1, "error: notes.txt: the name must end in .npy, .npz or .csv\n"));
    assert_eq!(folder.files(), ["notes.txt"]);
}

#[test]
fn a_full_disk_is_an_error_and_leaves_nothing() {
    let folder = Folder::new();
    let account = "account --noise-multiplier 1 --delta 1e-6";
    let full = "No space left on device (os error 28)\n";
    let message = format!("error: cannot write to standard output: {full}");
    assert_eq!(folder.shell(&format!("\"$0\" {account} > /dev/full")), expected(1, &message));
    assert_eq!(folder.shell(&format!("\"$0\" {account} --json > /dev/full")), expected(1, &message));
    // Who reads no further has seen enough.
    assert_eq!(folder.shell(&format!("\"$0\" {account} | true")).err, "");
    // A disk that takes no byte of a file.
    let out = folder.shell("trap '' XFSZ; ulimit -f 0; \"$0\" factorize --steps 64 --out m.safetensors");
    assert_eq!(out, expected(1, "error: m.safetensors: File too large (os error 27)\n"));
    let train = "train --users 60 --rounds 2 --clients 5 --mechanism independent --out new/run";
    let train = folder.shell(&format!("trap '' XFSZ; ulimit -f 0; \"$0\" {train}"));
    assert_eq!((train.code, train.out.as_str()), (Some(1), ""));
    assert!(train.err.ends_with(": File too large (os error 27)\n"), "{train:?}");
    assert!(folder.files().is_empty(), "{:?}", folder.files());
}

#[test]
fn a_folder_without_permission_is_found_out_before_any_work() {
    let folder = Folder::new();
    let closed = folder.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o555)).unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    // To root everything is permitted: somebody else makes the mistake, with a program that anybody can read.
    let program = folder.path().join("dpmf");
    let root = Command::new("id").arg("-u").output().unwrap().stdout == b"0\n";
    let as_somebody = |words: &str| {
        let words = words.split(' ');
        if root {
            let who = ["--reuid", "65534", "--regid", "65534", "--clear-groups", "./dpmf"];
            folder.command("setpriv").args(who).args(words).output().unwrap().into()
        } else {
            Seen::from(folder.command("./dpmf").args(words).output().unwrap())
        }
    };
    fs::copy(PROGRAM, &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    // A million steps would take minutes: the refusal comes first.
    let denied = "cannot be written: Permission denied (os error 13)\n";
    let factorize = as_somebody("factorize --steps 1e6 --momentum 0.9 --out closed/m.safetensors");
    assert_eq!(factorize, expected(1, &format!("error: closed/m.safetensors {denied}")));
    let train = as_somebody("train --out closed/run");
    assert_eq!(train, expected(1, &format!("error: closed/run {denied}")));
    let key = as_somebody("key new closed/run.key");
    assert_eq!(key, expected(1, "error: closed/run.key: Permission denied (os error 13)\n"));
    assert_eq!(fs::read_dir(&closed).unwrap().count(), 0);
    assert_eq!(folder.files(), ["closed", "dpmf"]);
}

#[test]
fn a_typo_is_answered_with_the_nearest_word() {
    let folder = Folder::new();
    let command = "error: unrecognized subcommand 'trian'\n\n  tip: a similar subcommand exists: 'train'\n\n\
                   Usage: dpmf [OPTIONS] <COMMAND>\n\nFor more information, try '--help'.\n";
    assert_eq!(folder.dpmf(&["trian"]), expected(2, command));
    let flag = "error: unexpected argument '--mechansim' found\n\n  tip: a similar argument exists: '--mechanism'\n\n\
                Usage: dpmf train --mechanism <NAME,…>\n\nFor more information, try '--help'.\n";
    assert_eq!(folder.dpmf(&["train", "--mechansim", "optimal"]), expected(2, flag));
    let unknown = |given: &str, meant: &str| {
        format!(
            "error: invalid value '{given}' for '--mechanism <NAME,…>': mechanism \"{given}\" does not exist; did you mean \
             \"{meant}\"?\n\nFor more information, try '--help'.\n"
        )
    };
    assert_eq!(folder.dpmf(&["train", "--mechanism", "optmal"]), expected(2, &unknown("optmal", "optimal")));
    assert_eq!(folder.dpmf(&["train", "--mechanism", "planed"]), expected(2, &unknown("planed", "planned")));
    let none = "error: invalid value 'magic' for '--mechanism <NAME,…>': mechanism \"magic\" does not exist; choose one of independent, \
                tree, honaker-online, honaker-full, sqrt-toeplitz, optimal-prefix, structured, optimal, state-space, banded, \
                banded-toeplitz, blt, banded-inverse, recall\n\nFor more information, try '--help'.\n";
    assert_eq!(folder.dpmf(&["train", "--mechanism", "magic"]), expected(2, none));
    let large = "error: invalid value '1e30' for '--steps <STEPS>': it must be at most 9e15\n\nFor more information, try \
                 '--help'.\n";
    assert_eq!(folder.dpmf(&["factorize", "--steps", "1e30"]), expected(2, large));
    let key = "error: the following required arguments were not provided:\n  --key-file <FILE>\n\n  tip: dpmf key new FILE makes a \
               key\n\nUsage: dpmf noise --dimension <d> --key-file <FILE> --out <FILE> <FILE>\n\nFor more information, try \
               '--help'.\n";
    assert_eq!(
        folder.dpmf(&["noise", "m.safetensors", "--dimension", "9", "--out", "z.npy"]),
        expected(2, key)
    );
    assert!(folder.files().is_empty());
}

#[test]
fn what_no_machine_can_hold_is_refused_with_its_flag() {
    let folder = Folder::new();
    for (words, start) in [
        (
            &["bench", "noise", "--dimension", "1e14"][..],
            "error: --dimension is 100000000000000, which needs ",
        ),
        (
            &["audit", "counterexample", "--dimension", "1e12"],
            "error: --dimension is 1000000000000, which needs ",
        ),
        (&["factorize", "--steps", "1e15"], "error: --steps is 1000000000000000, which needs "),
        (&["train", "--rounds", "9e15"], "error: --rounds is 9000000000000000, which needs "),
    ] {
        let seen = folder.dpmf(words);
        assert_eq!((seen.code, seen.out.as_str()), (Some(1), ""), "{seen:?}");
        assert!(seen.err.starts_with(start) && seen.err.ends_with(" is available\n"), "{}", seen.err);
    }
    assert!(folder.files().is_empty());
}

#[test]
fn control_c_ends_a_training_that_can_go_on() {
    let folder = Folder::new();
    let journal = folder.path().join("run/independent-0/journal");
    let grown = |_| fs::metadata(&journal).is_ok_and(|file| file.len() > 2000);
    let seen = folder.interrupted(LONG, grown);
    assert_eq!((seen.code, seen.out.as_str()), (Some(130), ""), "{seen:?}");
    let [_, last] = seen.err.lines().collect::<Vec<_>>()[..] else { panic!("{}", seen.err) };
    let rounds = last.strip_prefix("interrupted after ").unwrap();
    let (rounds, how) = rounds.split_once(' ').unwrap();
    assert!((1..2000).contains(&rounds.parse::<usize>().unwrap()), "{last}");
    assert_eq!(how, "rounds; continue with dpmf train --resume run");
    let resumed = folder.dpmf(&["train", "--resume", "run", "--json"]);
    let answer: Value = serde_json::from_str(&resumed.out).unwrap();
    // A model of so little may be no better than the trivial one.
    assert!(matches!(resumed.code, Some(0 | 3)), "{resumed:?}");
    assert_eq!(answer["rounds"], 2000);
}

#[test]
fn control_c_ends_every_other_command_at_once() {
    let folder = Folder::new();
    let long = ["factorize", "--steps", "1e6", "--momentum", "0.9", "--out", "m.safetensors"];
    assert_eq!(folder.interrupted(&long, works), expected(130, "interrupted\n"));
    let told = folder.interrupted(&[&long[..], &["--json"]].concat(), works);
    let object = "{\"error\":{\"kind\":\"interrupted\",\"message\":\"interrupted\"},\"schema\":1}\n";
    assert_eq!(told, Seen { code: Some(130), out: object.into(), err: String::new() });
    assert!(folder.files().is_empty(), "{:?}", folder.files());

    let sweep = [
        "sweep",
        "--users",
        "3000",
        "--rounds",
        "3000",
        "--clients",
        "1",
        "--mechanism",
        "independent",
        "--out",
        "s",
    ];
    let runs = folder.path().join("s/runs.jsonl");
    let mut stopped = folder.interrupted(&sweep, |_| runs.exists());
    // It is said where the signal comes while a round is under way, which is a matter of chance.
    let announced = "stopping after this round; press Ctrl-C again to stop at once\n";
    stopped.err = stopped.err.strip_prefix(announced).map_or(stopped.err.clone(), String::from);
    assert_eq!(stopped, expected(130, "interrupted; run the same command again to continue the sweep\n"));
}

#[test]
fn lines_of_progress_fit_a_terminal_of_sixty_columns() {
    let folder = Folder::new();
    let words = "train --users 300 --rounds 60 --clients 4 --mechanism independent --out run";
    let typed = format!("stty cols 60 rows 24; exec '{PROGRAM}' {words}");
    let seen: Seen = folder.command("script").args(["-qec", &typed, "/dev/null"]).output().unwrap().into();
    assert!(matches!(seen.code, Some(0 | 3)), "{seen:?}");
    // What is drawn and drawn over: bars, up to the report of the end.
    let drawn = seen.out.split("-differential privacy").next().unwrap();
    let lines: Vec<String> =
        drawn.split(['\r', '\n']).map(without_colours).filter(|line| line.contains("left")).collect();
    assert!(lines.len() > 1, "{}", seen.out);
    for line in lines {
        assert!(line.chars().count() <= 60, "{} columns: {line}", line.chars().count());
    }
}

/// The text without what terminals take for commands.
fn without_colours(line: &str) -> String {
    let mut rest = line.chars();
    let mut text = String::new();
    while let Some(c) = rest.next() {
        if c == '\x1b' {
            rest.by_ref().find(char::is_ascii_alphabetic);
        } else {
            text.push(c);
        }
    }
    text.trim_end().to_owned()
}

#[test]
fn a_device_or_a_folder_is_not_replaced() {
    let folder = Folder::new();
    std::os::unix::fs::symlink("/dev/null", folder.path().join("link.svg")).unwrap();
    std::os::unix::fs::symlink("nothing", folder.path().join("nowhere.svg")).unwrap();
    fs::create_dir(folder.path().join("folder.svg")).unwrap();
    let rule = "is not a regular file, and only regular files are replaced\n";
    let device = folder.dpmf(&["factorize", "--steps", "64", "--out", "/dev/null"]);
    assert_eq!(device, expected(1, &format!("error: /dev/null {rule}")));
    for name in ["link.svg", "folder.svg"] {
        let plot = folder.dpmf(&["plot", "error", "--steps", "16", "-o", name]);
        assert_eq!(plot, expected(1, &format!("error: {name} {rule}")));
    }
    let nowhere = folder.dpmf(&["plot", "error", "--steps", "16", "-o", "nowhere.svg"]);
    let message = "error: nowhere.svg is a link to a missing file, and links are not replaced\n";
    assert_eq!(nowhere, expected(1, message));
    let train = folder.dpmf(&["train", "--out", "/dev/null"]);
    assert_eq!(train, expected(1, "error: /dev/null cannot be created: /dev/null is not a folder\n"));
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    assert_eq!(folder.files(), ["folder.svg", "link.svg", "nowhere.svg"]);
}

#[test]
fn a_run_goes_on_from_another_working_directory() {
    let folder = Folder::new();
    let rows: String = (0..400).map(|user| format!("user{user},text number {user}\n")).collect();
    fs::write(folder.path().join("messages.csv"), format!("user,text\n{rows}")).unwrap();
    assert_eq!(folder.dpmf(&["key", "new", "run.key"]).code, Some(0));
    fs::create_dir(folder.path().join("elsewhere")).unwrap();
    let words = [
        "train",
        "--data",
        "messages.csv",
        "--key-file",
        "run.key",
        "--mechanism",
        "independent",
        "--rounds",
        "300",
        "--clients",
        "1",
        "--hidden",
        "8",
        "--out",
        "run",
    ];
    let journal = folder.path().join("run/independent-0/journal");
    let stopped = folder.interrupted(&words, |_| fs::metadata(&journal).is_ok_and(|file| file.len() > 1000));
    assert_eq!(stopped.code, Some(130), "{stopped:?}");
    let mut elsewhere = folder.command(PROGRAM);
    elsewhere.current_dir(folder.path().join("elsewhere")).args(["train", "--resume", "../run", "--json"]);
    let seen: Seen = elsewhere.output().unwrap().into();
    assert!(matches!(seen.code, Some(0 | 3)), "{seen:?}");
    assert_eq!(serde_json::from_str::<Value>(&seen.out).unwrap()["rounds"], 300);
}

#[test]
fn flags_that_contradict_each_other_are_named() {
    let folder = Folder::new();
    let words = ["train", "--resume", "run", "--epsilon", "1", "--data", "names", "--burn"];
    let message = "error: --resume keeps the original settings: remove --data, --epsilon\n\nUsage: dpmf train \
                   [OPTIONS]\n\nFor more information, try '--help'.\n";
    assert_eq!(folder.dpmf(&words), expected(2, message));
    let told = folder.dpmf(&[&words[..], &["--json"]].concat());
    let object: Value = serde_json::from_str(&told.out).unwrap();
    assert_eq!((told.code, &object["error"]["kind"]), (Some(2), &"usage".into()));
    let both = folder.dpmf(&[
        "calibrate",
        "m",
        "--epsilon",
        "1",
        "--noise-multiplier",
        "1",
        "--delta",
        "1e-6",
        "--clip",
        "1",
    ]);
    let message = "error: the argument '--epsilon <ε>' cannot be used with '--noise-multiplier <σ>'\n\nUsage: dpmf calibrate \
                   --delta <δ> --clip <ζ> --epsilon <ε> <FILE>\n\nFor more information, try '--help'.\n";
    assert_eq!(both, expected(2, message));
    assert!(folder.files().is_empty());
}
