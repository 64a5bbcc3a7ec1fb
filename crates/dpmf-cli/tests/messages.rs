//! The libraries serve programs without a command line: what they say names no flag of this one.

use std::path::{Path, PathBuf};

#[test]
fn libraries_name_no_flags() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for library in ["dpmf", "dpmf-train"] {
        collect(&crates.join(library).join("src"), &mut files);
    }
    assert!(files.len() > 100, "the sources are where they are sought");
    let mut found = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        found.extend(flags(&text).into_iter().map(|line| format!("{}: {line}", file.display())));
    }
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn a_flag_in_a_message_is_seen_and_one_in_a_comment_or_a_test_is_not() {
    assert_eq!(flags("fn f() {\n    fail(\"name it with --user\");\n}"), ["fail(\"name it with --user\");"]);
    assert_eq!(flags("let words = \"cut: see \\\n    --example-length\";").len(), 1);
    assert!(flags("/// As `--user` does.\nlet x = y - -z; // --z\n").is_empty());
    assert!(flags("fn f() {}\n#[cfg(test)]\nmod tests { const A: &str = \"--user\"; }").is_empty());
}

/// Lines with a flag, outside comments and of what stands before the tests of a file. Two signs before a word are no Rust, so they
/// stand in a text.
fn flags(source: &str) -> Vec<String> {
    let code = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let named = |line: &&str| {
        let line = line.split("//").next().unwrap_or_default();
        line.match_indices("--").any(|(at, _)| line[at + 2..].starts_with(|c: char| c.is_ascii_lowercase()))
    };
    code.lines().map(str::trim).filter(named).map(str::to_owned).collect()
}

/// All sources below a folder but those of tests.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("the sources are there") {
        let path = entry.expect("it can be read").path();
        let name = path.file_name().expect("it has a name").to_string_lossy().into_owned();
        if path.is_dir() {
            collect(&path, files);
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            files.push(path);
        }
    }
}
