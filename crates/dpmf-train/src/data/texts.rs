//! Tables with a user and a text in each row.

use std::collections::HashMap;
use std::path::Path;

use super::part::{Split, digest};
use super::rows::{Cell, Fault, STANDARD_INPUT, Table};
use super::vocabulary::{WordCounts, printable};
use super::{Corpus, Options, Part, TextData, Tokens, Vocabulary, VocabularyFrom};
use crate::{Error, Hint, Remark, Result};

/// Thousandths of the authors of quotations, which are public data, that words are taken from.
const QUOTED: u32 = 100;
/// Where `scripts/data/quotes` writes.
pub(super) const QUOTES: &str = "data/cache/quotes.jsonl";
/// Columns where nothing else is said.
const USER: &str = "user";
const TEXT: &str = "text";

/// Any table with a column of users and one of texts; a user is an exact string.
pub(super) fn file(path: &Path, options: &Options) -> Result<TextData> {
    let tokens = options.tokens.unwrap_or(Tokens::Characters);
    let user = options.columns.user.as_deref().unwrap_or(USER);
    let note = if options.columns.rows_are_users {
        ROWS.to_owned()
    } else {
        format!(
            "Each value of the column `{user}` counts as one user; a person with two values counts as two users."
        )
    };
    read("file", name_of(path), path, tokens, &note, options, 0)
}

/// What a privacy statement says where nothing tells whose a row is.
pub(super) const ROWS: &str =
    "Each row counts as one user: the guarantee is for rows, and is weaker for a person with several rows.";

/// Name of the data in a file.
pub(super) fn name_of(path: &Path) -> String {
    if path == Path::new(STANDARD_INPUT) {
        return "standard input".into();
    }
    let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
    let stem = path.file_stem().unwrap_or_default();
    let inner = Path::new(stem).file_stem().unwrap_or_default();
    let compressed = ["gz", "zst", "zstd"].iter().any(|known| extension == *known);
    if compressed { inner } else { stem }.to_string_lossy().into_owned()
}

/// The user of every row: a field, or the row itself with a number for rows that are the same.
///
/// No user's name depends on where other rows are.
pub(super) enum UserKey<'a> {
    Column(&'a str),
    Row(HashMap<String, u64>),
}

impl<'a> UserKey<'a> {
    pub(super) fn new(table: &Table, options: &'a Options) -> Result<Self> {
        if options.columns.rows_are_users {
            return Ok(Self::Row(HashMap::new()));
        }
        let column = options.columns.user.as_deref().unwrap_or(USER);
        table.need(column, Some(Hint::UserColumn))?;
        Ok(Self::Column(column))
    }

    /// The column that names users.
    pub(super) fn column(&self) -> Option<&'a str> {
        match self {
            Self::Column(column) => Some(column),
            Self::Row(_) => None,
        }
    }

    /// The user of a row with these fields, of which the first is that of the column.
    pub(super) fn of(&mut self, cells: &[Cell<'_>]) -> std::result::Result<String, Fault> {
        match self {
            Self::Column(column) => match cells[0].map(str::trim) {
                Some(user) if !user.is_empty() => Ok(user.to_owned()),
                _ => Err(format!("the user (column `{column}`) is empty")),
            },
            Self::Row(seen) => {
                let row = cells.iter().map(|cell| cell.unwrap_or("")).collect::<Vec<_>>().join("\u{1f}");
                let count = seen.entry(row.clone()).or_default();
                *count += 1;
                Ok(format!("{row}\u{1f}{count}"))
            }
        }
    }
}

/// Quotations by author.
pub(super) fn quotes(path: Option<&Path>, options: &Options) -> Result<TextData> {
    let tokens = options.tokens.unwrap_or(Tokens::Words);
    let path = path.unwrap_or(Path::new(QUOTES));
    if !path.exists() {
        return Err(Error::Data {
            path: path.into(),
            message: "this file does not exist; `scripts/data/quotes` downloads it".into(),
        });
    }
    let note = "Each author counts as one user. Authors are told apart by the first two parts of their names, so several authors may \
        count as one user, but one author hardly ever counts as several.";
    read("quotes", "quotes".into(), path, tokens, note, options, QUOTED)
}

/// Whom something is taken from that ε does not cover, for a privacy statement.
pub(super) fn public_users(what: &str, count: usize, share: u32) -> String {
    format!(
        "{what} come from {count} users who are treated as public: {} % of all, chosen by a hash of their names. They are not used for \
         training, validation or test, and ε does not cover them.",
        f64::from(share) / 10.0
    )
}

/// Texts of each user, by the user's name.
type Texts = HashMap<String, Vec<String>>;

/// Reads a table; `label` keys the hashes, and `usual` thousandths of the users are public where nothing is said.
#[allow(clippy::too_many_arguments, reason = "two callers")]
fn read(
    label: &str,
    name: String,
    path: &Path,
    tokens: Tokens,
    note: &str,
    options: &Options,
    usual: u32,
) -> Result<TextData> {
    let table = Table::open(path)?;
    let mut remarks = Vec::new();
    let texts = texts(&table, options, &mut remarks)?;
    let from = match (tokens, &options.vocabulary) {
        (Tokens::Characters, None) => None,
        (_, None) => Some(&VocabularyFrom::PublicUsers),
        (_, given) => given.as_ref(),
    };
    let public = match from {
        Some(VocabularyFrom::PublicUsers) => {
            match options.public_share.unwrap_or(usual) {
                0 => {
                    return Err(table
                    .fault("the words of a vocabulary reveal something about the texts that they are taken from")
                    .with_hint(Hint::PublicWords));
                }
                share => share,
            }
        }
        _ => 0,
    };

    let mut users: Vec<_> = texts
        .iter()
        .map(|(user, texts)| (digest(label, "order", user), Part::of(label, user, public), texts))
        .collect();
    users.sort_unstable_by_key(|&(order, ..)| order);

    let mut notes = vec![note.to_owned()];
    let counted = |part: Part| {
        let mut counts = WordCounts::default();
        for (_, _, texts) in users.iter().filter(|&&(_, of, _)| of == part) {
            for text in texts.iter().take(options.example_limit()) {
                counts.add(tokens, text);
            }
        }
        counts
    };
    let vocabulary = match from {
        None => {
            notes.push(
                "The vocabulary is the printable ASCII characters: fixed, so it costs no privacy.".into(),
            );
            Vocabulary::characters(printable())
        }
        Some(VocabularyFrom::PublicUsers) => {
            let count = users.iter().filter(|&&(_, part, _)| part == Part::Public).count();
            notes.push(public_users("The words of the vocabulary", count, public));
            counted(Part::Public).vocabulary(tokens, options.word_limit())
        }
        Some(VocabularyFrom::TrainingUsers) => {
            notes.push(VocabularyFrom::UNCOVERED.into());
            counted(Part::Train).vocabulary(tokens, options.word_limit())
        }
        Some(VocabularyFrom::List(list)) => {
            notes.push(VocabularyFrom::LISTED.into());
            Vocabulary::from_list(tokens, list, options.word_limit())
        }
    };
    let vocabulary = vocabulary.map_err(|error| match error {
        Error::InvalidArgument { value, .. } => Error::Data {
            path: path.into(),
            message: format!("the vocabulary would have {value}: too few users"),
        },
        other => other,
    })?;

    let (mut beyond, mut cut) = (false, false);
    let mut split = Split::<Corpus>::default();
    for (_, part, texts) in &users {
        let Some(corpus) = split.part_mut(*part) else { continue };
        if corpus.len() >= options.user_limit() {
            continue;
        }
        beyond |= texts.len() > options.example_limit();
        for text in texts.iter().take(options.example_limit()) {
            corpus.push_example(|out| {
                let start = out.len();
                vocabulary.encode(text, options.length(tokens), out);
                cut |= out.len() > start && out.last() != Some(&Vocabulary::END);
            });
        }
        corpus.finish_user();
    }
    // How many is an exact count of private rows.
    for (some, what, hint) in [
        (
            beyond,
            "some texts exceed the largest number of examples for a user and are skipped",
            Hint::ExamplesPerUser,
        ),
        (cut, "some texts are longer than the largest example and are cut", Hint::ExampleLength),
    ] {
        if some {
            remarks.push(Remark::hinted(what, hint));
        }
    }
    filled(&table, users.len(), split.parts().map(|(set, corpus)| (set, corpus.is_empty())))?;
    Ok(TextData { name, vocabulary, split, unit: options.unit(), notes, remarks })
}

/// The texts of a column of any table, each as a user of its own, in the tokens of a vocabulary.
///
/// Errors: a file or column that is not there; every malformed row, with its number.
pub fn encoded(path: &Path, column: Option<&str>, vocabulary: &Vocabulary, length: usize) -> Result<Corpus> {
    let table = Table::open(path)?;
    let column = column.unwrap_or(TEXT);
    table.need(column, Some(Hint::TextColumn))?;
    let mut corpus = Corpus::default();
    let malformed = table.each(&[column], |cells| {
        let Some(text) = cells[0] else { return Err(format!("`{column}` is missing")) };
        if corpus.push_example(|out| vocabulary.encode(text, length, out)) {
            corpus.finish_user();
        }
        Ok(())
    })?;
    match malformed.sentence() {
        Some(sentence) => Err(table.fault(sentence)),
        None if corpus.is_empty() => Err(table.fault("it has no texts")),
        None => Ok(corpus),
    }
}

/// Refuses data that leaves a set empty.
pub(super) fn filled(table: &Table, users: usize, sets: [(&str, bool); 3]) -> Result<()> {
    match sets.iter().find(|(_, empty)| *empty) {
        None => Ok(()),
        Some((set, _)) => Err(table
            .fault(format!("none of the {users} users falls into the set for {set}; more users are needed"))),
    }
}

/// Texts of all users. A blank text adds its user and nothing else: taking a user's data away leaves a user without data.
fn texts(table: &Table, options: &Options, remarks: &mut Vec<Remark>) -> Result<Texts> {
    let column = options.columns.text.as_deref().unwrap_or(TEXT);
    let mut who = UserKey::new(table, options)?;
    table.need(column, Some(Hint::TextOrLabelColumn))?;
    let wanted: Vec<&str> = who.column().into_iter().chain([column]).collect();
    let (mut texts, mut blank) = (Texts::new(), false);
    let malformed = table.each(&wanted, |cells| {
        let Some(text) = cells[wanted.len() - 1] else { return Err(format!("`{column}` is missing")) };
        let texts = texts.entry(who.of(cells)?).or_default();
        if text.trim().is_empty() {
            blank = true;
        } else {
            texts.push(text.into());
        }
        Ok(())
    })?;
    options.judge(table, &malformed, remarks)?;
    if blank {
        remarks.push(String::from("some texts are blank and are skipped").into());
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fmt::Write;
    use std::path::PathBuf;

    use super::*;

    fn write(name: &str, content: impl AsRef<[u8]>) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        std::fs::write(&path, content).unwrap();
        (directory, path)
    }

    /// The texts of each user, in the order of the corpus.
    fn decoded(data: &TextData, corpus: &Corpus) -> Vec<Vec<String>> {
        (0..corpus.len())
            .map(|user| corpus.examples_of(user).map(|tokens| data.vocabulary.decode(tokens)).collect())
            .collect()
    }

    fn table(users: std::ops::Range<u32>) -> String {
        let mut table = String::from("text,user\n");
        for row in 0..3 {
            for user in users.clone() {
                writeln!(table, "\"I am user {user}, row {row}\",user{user}").unwrap();
            }
        }
        table
    }

    #[test]
    fn sets_hold_the_users_their_hash_says_and_share_none() {
        let (_directory, path) = write("t.csv", table(0..300));
        let data = file(&path, &Options::default()).unwrap();
        let mut seen = HashSet::new();
        for ((set, corpus), part) in
            data.split.parts().into_iter().zip([Part::Train, Part::Validation, Part::Test])
        {
            for texts in decoded(&data, corpus) {
                let user = texts[0].split([' ', ',']).nth(3).unwrap().to_owned();
                assert_eq!(texts, [0, 1, 2].map(|row| format!("I am user {user}, row {row}")));
                assert_eq!(Part::of("file", &format!("user{user}"), 0), part, "{set}");
                assert!(seen.insert(user), "a user twice");
            }
        }
        assert_eq!(seen.len(), 300);
        assert_eq!((data.name.as_str(), data.vocabulary.len()), ("t", 3 + 95));
    }

    #[test]
    fn other_users_and_positions_do_not_matter() {
        let (_a, all) = write("t.csv", table(0..300));
        let (_b, fewer) = write("t.csv", table(100..300));
        let read = |path| file(path, &Options::default()).unwrap();
        let (all, fewer) = (read(&all), read(&fewer));
        let kept: Vec<_> = decoded(&all, &all.split.train)
            .into_iter()
            .filter(|texts| texts[0].split([' ', ',']).nth(3).unwrap().parse::<u32>().unwrap() >= 100)
            .collect();
        assert_eq!(kept, decoded(&fewer, &fewer.split.train));
    }

    #[test]
    fn json_and_delimited_tables_read_alike() {
        let mut json = String::from("\n");
        let mut tabs = String::from("user\ttext\n");
        for user in 0..100 {
            writeln!(json, "{{\"user\": {user}, \"text\": \"né {user}\", \"more\": [1]}}").unwrap();
            writeln!(tabs, "{user}\tné {user}").unwrap();
        }
        let (_a, json) = write("t.jsonl", json);
        let (_b, tabs) = write("t.tsv", tabs);
        let [json, tabs] = [json, tabs].map(|path| file(&path, &Options::default()).unwrap());
        assert_eq!(json.split, tabs.split);
        assert!(json.split.train.examples_of(0).next().unwrap().contains(&Vocabulary::UNKNOWN));
    }

    #[test]
    fn words_come_from_public_users_who_are_in_no_set() {
        let (_directory, path) = write("t.csv", table(0..300));
        const PUBLIC: u32 = 100;
        let mut options = Options { tokens: Some(Tokens::Words), ..Options::default() };
        let refused = file(&path, &options).unwrap_err().to_string();
        assert!(refused.ends_with(&Hint::PublicWords.to_string()), "{refused}");
        options.public_share = Some(PUBLIC);
        let data = file(&path, &options).unwrap();
        let public: HashSet<String> = (0..300)
            .filter(|user| Part::of("file", &format!("user{user}"), PUBLIC) == Part::Public)
            .map(|user| user.to_string())
            .collect();
        let sets: usize = data.split.parts().iter().map(|(_, corpus)| corpus.len()).sum();
        assert_eq!(sets + public.len(), 300);
        let numbers: HashSet<String> = (3..data.vocabulary.len() as u16)
            .map(|token| data.vocabulary.symbol(token).unwrap().to_owned())
            .filter(|word| word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_digit()))
            .collect();
        assert_eq!(numbers, public.iter().filter(|user| user.len() > 1).cloned().collect());
        assert!(data.notes[1].contains(&format!("{} users", public.len())), "{:?}", data.notes);

        let limits =
            Options { vocabulary: Some(VocabularyFrom::TrainingUsers), vocabulary_size: Some(4), ..options };
        let data = file(&path, &limits).unwrap();
        assert_eq!(data.vocabulary.len(), 7);
        assert!(data.notes[1].contains("not cover"), "{:?}", data.notes);
    }

    #[test]
    fn word_lists_are_read_in_order() {
        let (_directory, path) = write("t.csv", table(0..300));
        let (_words, list) = write("words.txt", "user 100\nam 7\n\nrow\nlast\n");
        let options = Options {
            tokens: Some(Tokens::Words),
            vocabulary: Some(VocabularyFrom::List(list)),
            vocabulary_size: Some(3),
            ..Options::default()
        };
        let data = file(&path, &options).unwrap();
        assert_eq!(
            (3..6).map(|token| data.vocabulary.symbol(token).unwrap()).collect::<Vec<_>>(),
            ["user", "am", "row"]
        );
        assert_eq!(data.vocabulary.len(), 6);
        assert!(data.split.train.examples_of(0).next().unwrap().starts_with(&[0, 2, 4, 3, 2, 2, 5, 2, 1]));
    }

    #[test]
    fn limits_hold() {
        let (_directory, path) = write("t.csv", table(0..300));
        let options = Options {
            users: Some(7),
            examples_per_user: Some(2),
            example_length: Some(4),
            ..Options::default()
        };
        let data = file(&path, &options).unwrap();
        let whole = file(&path, &Options::default()).unwrap();
        for ((_, corpus), (_, all)) in data.split.parts().into_iter().zip(whole.split.parts()) {
            assert_eq!(corpus.len(), 7);
            for user in 0..7 {
                let examples: Vec<_> = corpus.examples_of(user).collect();
                assert_eq!(examples.len(), 2);
                assert_eq!(*examples[1], all.examples_of(user).nth(1).unwrap()[..5]);
            }
        }
    }

    #[test]
    fn malformed_tables_are_refused_with_their_line() {
        for (name, content, message) in [
            ("t.csv", "", "no column `user`"),
            (
                "t.csv",
                "user,words\na,b\n",
                "there is no column `text` among [\"user\", \"words\"]: name the column of texts",
            ),
            ("t.csv", "user,text\na,b\n\nc\n", "line 4: there are 1 fields, but 2 columns"),
            ("t.csv", "user,text\na,\"b\nb\"\n ,c\n", "line 4: the user (column `user`) is empty"),
            ("t.csv", "user,text\na,b\n", "into the set for validation"),
            ("t.jsonl", "", "no column `user` among []"),
            ("t.jsonl", "{\"user\":\"a\",\"text\":\"b\"}\n{\"user\":\"a\",\n", "line 2: EOF"),
            ("t.jsonl", "{\"user\":\"a\"}\n", "no column `text`"),
            ("t.jsonl", "{\"user\":\"a\"}\n{\"user\":\"a\",\"text\":\"b\"}\n", "line 1: `text` is missing"),
            (
                "t.jsonl",
                "\n{\"text\":\"a\"}\n{\"user\":\"u\",\"text\":\"a\"}\n",
                "line 2: the user (column `user`) is empty",
            ),
            ("t.jsonl", "{\"user\":\"\",\"text\":\"b\"}\n", "line 1: the user (column `user`) is empty"),
            (
                "t.jsonl",
                "{\"user\":[1],\"text\":\"b\"}\n",
                "line 1: `user` must be a string, a number, true or false, but it is a list or a structure",
            ),
            ("t.jsonl", "[]\n{\"user\":\"u\",\"text\":\"a\"}\n", "line 1: it is not a JSON object"),
        ] {
            let (_directory, path) = write(name, content);
            let error = file(&path, &Options::default()).unwrap_err().to_string();
            assert!(error.contains(message) && error.contains(name), "{content:?}: {error}");
        }
        for (name, content, message) in [
            ("t.jsonl", &b"{\"user\":\"a\",\"text\":\"b\"}\n\xff\n"[..], "line 2: it is not UTF-8"),
            ("t.csv", b"user,text\na,\xff\n", "line 2: it is not UTF-8"),
        ] {
            let (_directory, path) = write(name, content);
            let error = file(&path, &Options::default()).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        assert_eq!(file(Path::new("absent.csv"), &Options::default()).unwrap_err().kind(), "io");
        let error = quotes(Some(Path::new("absent.jsonl")), &Options::default()).unwrap_err().to_string();
        assert!(error.contains("scripts/data/quotes"), "{error}");
    }

    /// "One user's data replaced with none" is a neighbour: nobody else moves.
    #[test]
    fn a_user_whose_texts_are_blanked_stays_and_moves_nobody() {
        let content = table(0..300);
        let blanked: String = content
            .lines()
            .map(|line| if line.ends_with(",user7") { "  ,user7\n".into() } else { format!("{line}\n") })
            .collect();
        let (_a, path) = write("t.csv", &content);
        let (_b, neighbour) = write("t.csv", blanked);
        let [whole, without] = [path, neighbour].map(|path| file(&path, &Options::default()).unwrap());
        let mut differences = 0;
        for ((_, whole_part), (_, without_part)) in whole.split.parts().into_iter().zip(without.split.parts())
        {
            let (a, b) = (decoded(&whole, whole_part), decoded(&without, without_part));
            assert_eq!(a.len(), b.len());
            for (with, without) in a.iter().zip(&b).filter(|(a, b)| a != b) {
                assert!(with[0].contains("user 7,") && without.is_empty(), "{with:?} {without:?}");
                differences += 1;
            }
        }
        assert_eq!(differences, 1);
    }
}
