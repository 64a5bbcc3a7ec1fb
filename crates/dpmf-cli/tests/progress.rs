//! Progress, as it is seen at a terminal and in a log.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

mod common;

use common::json;
use nix::pty::{Winsize, openpty};
use std::fs::{self, File};
use std::io::Read;
use std::process::{Command, Stdio};

/// What a command draws on standard error while it works, at a terminal of a width: without the lines that stay.
fn drawn(columns: u16, arguments: &[&str]) -> Vec<String> {
    let size = Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let terminal = openpty(Some(&size), None).unwrap();
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("dpmf"));
    command
        .env_remove("HOME")
        .env_remove("XDG_CACHE_HOME")
        .env_remove("NO_COLOR")
        .env("TERM", "xterm-256color");
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::from(terminal.slave));
    let mut child = command.spawn().unwrap();
    // The command holds the terminal's other end: reading ends when the child does.
    drop(command);
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    let mut screen = File::from(terminal.master);
    while let Ok(count @ 1..) = screen.read(&mut buffer) {
        bytes.extend_from_slice(&buffer[..count]);
    }
    assert!(child.wait().unwrap().success(), "{arguments:?}: {}", String::from_utf8_lossy(&bytes));
    let text = without_escapes(&String::from_utf8(bytes).unwrap());
    let stays = |line: &str| line.rsplit('\r').find(|part| !part.is_empty()).unwrap_or_default().to_owned();
    let mut pieces: Vec<String> = Vec::new();
    for line in text.split_inclusive('\n') {
        let last = if line.ends_with('\n') { stays(line.trim_end()) } else { String::new() };
        let parts = line.trim_end().split('\r').map(str::trim_end).filter(|part| !part.is_empty());
        pieces.extend(parts.filter(|part| *part != last).map(str::to_owned));
    }
    pieces
}

/// Text without sequences that move the cursor or change colours.
fn without_escapes(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c != '\u{1b}' {
            plain.push(c);
        } else if rest.next() == Some('[') {
            rest.by_ref().find(char::is_ascii_alphabetic);
        }
    }
    plain
}

#[test]
fn a_line_of_progress_fits_a_narrow_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (data, file) = (path("messages.csv"), path("m.safetensors"));
    let lines: String = (0..600).map(|user| format!("u{user},hello sun and moon {}\n", user % 7)).collect();
    fs::write(&data, format!("user,text\n{lines}")).unwrap();
    json(&[
        "calibrate",
        "--steps",
        "64",
        "--mechanism",
        "tree",
        "--epsilon",
        "2",
        "--delta",
        "1e-6",
        "--clip",
        "1",
        "--out",
        &file,
    ]);
    for columns in [60, 40] {
        let out = path(&format!("run-{columns}"));
        let train = [
            "train",
            "--data",
            &data,
            "--rounds",
            "40",
            "--clients",
            "10",
            "--mechanism",
            "honaker-online",
            "--out",
            &out,
        ];
        let commands: [(&str, &[&str]); 4] = [
            ("honaker-online", &train),
            ("gap", &["factorize", "--steps", "192", "--solver", "dense", "--momentum", "0.9"]),
            (
                "plan",
                &[
                    "plan",
                    "--examples",
                    "2000",
                    "--batch",
                    "200",
                    "--epochs",
                    "2",
                    "--epsilon",
                    "4",
                    "--delta",
                    "1e-5",
                    "--sampling",
                    "none",
                ],
            ),
            ("audit", &["audit", &file, "--trials", "20000"]),
        ];
        for (word, arguments) in commands {
            let drawn = drawn(columns, arguments);
            let widest = drawn.iter().max_by_key(|line| line.chars().count()).unwrap();
            assert!(widest.chars().count() <= usize::from(columns), "{arguments:?}: {widest:?}");
            // A bar leaves few columns of forty for words.
            let word = if columns == 40 { &word[..2] } else { word };
            assert!(drawn.iter().any(|line| line.contains(word)), "{arguments:?}: {drawn:?}");
        }
    }
}

#[test]
fn a_log_hears_nothing_of_short_work() {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("dpmf"));
    command.env_remove("HOME").args(["factorize", "--steps", "256", "--solver", "dense"]);
    let output = command.output().unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
