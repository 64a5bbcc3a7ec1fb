//! The default data set: names of packages by the owner of their repository.

use std::io::Read;
use std::path::PathBuf;

use lzma_rust2::XzReader;

use super::{Corpus, Split, TextData, Vocabulary};
use crate::{Error, Result};
use dpmf::accounting::PrivacyUnit;

/// The derived file; `data/PROVENANCE.md` tells where it comes from.
const FILE: &[u8] = include_bytes!("../../data/names.txt.xz");
const HEADER: &str = "dpmf names 1";
/// Characters of the longest name.
const LONGEST: usize = 32;

/// The characters of the default data set: fixed, so the vocabulary costs no privacy.
pub const NAMES_ALPHABET: &str = "abcdefghijklmnopqrstuvwxyz0123456789-_.";

/// The default data set: names of npm packages grouped by the owner of their repository, one character a token.
///
/// A user is one account on a code forge with one to eight names. The file is part of the program.
///
/// Cost: about 0.3 s and 60 MB.
///
/// # Errors
/// Never in an undamaged program; a damaged file is refused by its checksum.
///
/// ```
/// let data = dpmf_train::data::names()?;
/// assert!(data.split.train.len() >= 2048 * 167);
/// let mut first = data.split.test.examples_of(0);
/// println!("{}", data.vocabulary.decode(first.next().unwrap()));
/// # Ok::<(), dpmf_train::Error>(())
/// ```
pub fn names() -> Result<TextData> {
    let mut text = String::new();
    XzReader::new(FILE, false)
        .read_to_string(&mut text)
        .map_err(|source| Error::Io { path: path(), source })?;
    parse(&text)
}

fn path() -> PathBuf {
    PathBuf::from("data/names.txt.xz")
}

/// Reads the text: a header, then for each set its name and number of users, and a line of names for each user.
fn parse(text: &str) -> Result<TextData> {
    let vocabulary = Vocabulary::characters(NAMES_ALPHABET.chars())?;
    let error =
        |line: usize, rule: &str| Error::Data { path: path(), message: format!("line {line}: {rule}") };
    let mut lines = (1..).zip(text.lines());
    if lines.next().is_none_or(|(_, line)| line != HEADER) {
        return Err(error(1, "the header is not `dpmf names 1`"));
    }
    let mut split = Split::<Corpus>::default();
    for (name, corpus) in
        [("validation", &mut split.validation), ("test", &mut split.test), ("train", &mut split.train)]
    {
        let (number, line) =
            lines.next().ok_or_else(|| error(0, "the file ends before all sets were read"))?;
        let users: usize = line
            .strip_prefix(name)
            .and_then(|rest| rest.trim_start().parse().ok())
            .ok_or_else(|| error(number, "a set must begin with its name and number of users"))?;
        for _ in 0..users {
            let (number, line) =
                lines.next().ok_or_else(|| error(0, "the file ends before all users were read"))?;
            for name in line.split(' ') {
                let mut known = name.len() <= LONGEST;
                let kept = corpus.push_example(|tokens| {
                    let start = tokens.len();
                    vocabulary.encode(name, LONGEST + 1, tokens);
                    known &= !tokens[start..].contains(&Vocabulary::UNKNOWN);
                });
                if !known || !kept {
                    return Err(error(number, "names are 1 to 32 characters of the alphabet"));
                }
            }
            corpus.finish_user();
        }
    }
    if let Some((number, _)) = lines.next() {
        return Err(error(number, "there is more than the sets announce"));
    }
    Ok(TextData {
        name: "names".into(),
        vocabulary,
        split,
        unit: PrivacyUnit::User,
        notes: vec![
            "Each account on a code forge counts as one user; a person with several accounts counts as several users.".into(),
            "The vocabulary is a fixed alphabet and costs no privacy.".into(),
        ],
        remarks: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn file_is_the_one_whose_provenance_is_told() {
        let digest: String = Sha256::digest(FILE).iter().map(|byte| format!("{byte:02x}")).collect();
        let provenance = include_str!("../../data/PROVENANCE.md");
        assert!(provenance.contains(&digest), "data/PROVENANCE.md does not name {digest}");
        assert!(FILE.len() <= 8_000_000);
    }

    #[test]
    fn sets_are_large_enough_well_formed_and_share_no_user() {
        let data = names().unwrap();
        assert!(data.split.train.len() >= 2048 * 167, "{}", data.split.train.len());
        assert!(data.split.validation.len() >= 5_000 && data.split.test.len() >= 10_000);
        assert_eq!(data.vocabulary.len(), 3 + 39);

        // The derivation keeps no two owners with the same two or more names, so a user in two sets (or twice in one) would show.
        let mut groups = HashSet::new();
        let mut users = 0;
        for (set, corpus) in data.split.parts() {
            for user in 0..corpus.len() {
                let mut group: Vec<&[u16]> = corpus.examples_of(user).collect();
                for name in &group {
                    assert_eq!((name[0], name[name.len() - 1]), (Vocabulary::BEGIN, Vocabulary::END));
                    assert!(name[1..name.len() - 1].iter().all(|token| (3..42).contains(token)));
                    assert!((3 + 2..=32 + 2).contains(&name.len()));
                }
                group.sort_unstable();
                assert!(group.windows(2).all(|pair| pair[0] != pair[1]), "{set} {user} has a name twice");
                assert!((1..=8).contains(&group.len()));
                if group.len() > 1 {
                    users += 1;
                    assert!(groups.insert(group), "{set} {user} has the names of another user");
                }
            }
        }
        assert!(users > 100_000);
    }

    #[test]
    fn names_come_back() {
        let text = "dpmf names 1\nvalidation 1\na-b\ntest 1\nc_d e.f9\ntrain 2\nabcdefghijklmnopqrstuvwxyz012345\nx y z\n";
        let data = parse(text).unwrap();
        let read = |corpus: &Corpus| -> Vec<Vec<String>> {
            (0..corpus.len())
                .map(|user| corpus.examples_of(user).map(|name| data.vocabulary.decode(name)).collect())
                .collect()
        };
        assert_eq!(read(&data.split.validation), [["a-b"]]);
        assert_eq!(read(&data.split.test), [["c_d", "e.f9"]]);
        assert_eq!(read(&data.split.train), [vec!["abcdefghijklmnopqrstuvwxyz012345"], vec!["x", "y", "z"]]);
    }

    #[test]
    fn malformed_text_is_refused() {
        for (text, message) in [
            ("", "line 1: the header"),
            ("dpmf names 2\n", "line 1: the header"),
            ("dpmf names 1\n", "ends before all sets"),
            ("dpmf names 1\ntest 1\na\n", "line 2: a set must begin"),
            ("dpmf names 1\nvalidation x\n", "line 2: a set must begin"),
            ("dpmf names 1\nvalidation 2\na\n", "ends before all users"),
            ("dpmf names 1\nvalidation 1\n\n", "line 3: names are"),
            ("dpmf names 1\nvalidation 1\na  b\n", "line 3: names are"),
            ("dpmf names 1\nvalidation 1\nA\n", "line 3: names are"),
            ("dpmf names 1\nvalidation 0\ntest 0\ntrain 0\nx\n", "line 5: there is more"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(message), "{text:?}: {error}");
        }
    }
}
