//! The federated StackOverflow data in its published SQLite form.
//!
//! Tables `examples(split_name, client_id, serialized_example_proto)` and `client_metadata(client_id, split_name, num_examples)`,
//! with a serialised `tf.train.Example` in each row, of which the feature `tokens` is read. Preprocessing is that of the
//! paper's experiments: the 10,000 most frequent words, the first 20 of a sentence, the first 256 sentences of a user.
//!
//! The published sets `train` and `heldout` share no user, but `test` holds later sentences of users that are in `train` too. Here
//! the unit of privacy is a user, so such users are left out of the test set.

use std::collections::HashSet;
use std::path::Path;

use rusqlite::{Connection, OpenFlags};

use super::part::{Split, digest};
use super::vocabulary::WordCounts;
use super::{Corpus, Options, TextData, Tokens, Vocabulary, VocabularyFrom};
use crate::{Error, Result};

/// Users of the published sets in the order of a hash, disjoint.
struct Clients {
    train: Vec<String>,
    heldout: Vec<String>,
    test: Vec<String>,
    /// Users of the published test set left out because they are in another.
    shared: usize,
}

/// A database opened for reading.
struct Database<'a> {
    path: &'a Path,
    connection: Connection,
}

/// Reads the three sets.
pub(super) fn read(path: &Path, options: &Options) -> Result<TextData> {
    let database = Database::open(path)?;
    let mut clients = database.clients()?;
    for set in [&mut clients.train, &mut clients.heldout, &mut clients.test] {
        set.truncate(options.user_limit());
    }
    let tokens = Tokens::Separated;
    let (vocabulary, note) = match &options.vocabulary {
        Some(VocabularyFrom::List(list)) => {
            (Vocabulary::from_list(tokens, list, options.word_limit())?, VocabularyFrom::LISTED)
        }
        Some(VocabularyFrom::PublicUsers) => {
            return Err(Error::InvalidArgument {
                name: "vocabulary",
                value: "public users".into(),
                rule: "the sets of this data are fixed and leave no public users; give a list or take the training users'",
            });
        }
        Some(VocabularyFrom::TrainingUsers) | None => {
            let mut counts = WordCounts::default();
            for client in &clients.train {
                database.texts("train", client, options.example_limit(), |text| counts.add(tokens, text))?;
            }
            let vocabulary = counts.vocabulary(tokens, options.word_limit());
            let empty = |_| database.fault("the training users have no words".into());
            (vocabulary.map_err(empty)?, VocabularyFrom::UNCOVERED)
        }
    };
    let corpus = |set: &str, clients: &[String]| -> Result<Corpus> {
        let mut corpus = Corpus::default();
        for client in clients {
            database.texts(set, client, options.example_limit(), |text| {
                corpus.push_example(|out| vocabulary.encode(text, options.length(tokens), out));
            })?;
            corpus.finish_user();
        }
        if corpus.is_empty() {
            return Err(database.fault(format!("no user is left in the set `{set}`")));
        }
        Ok(corpus)
    };
    let split = Split {
        train: corpus("train", &clients.train)?,
        validation: corpus("heldout", &clients.heldout)?,
        test: corpus("test", &clients.test)?,
    };
    let mut notes = vec!["Each account of the site counts as one user.".into(), note.into()];
    if clients.shared > 0 {
        notes.push(format!(
            "{} users of the published test set are left out of it because they are in another set too.",
            clients.shared
        ));
    }
    Ok(TextData {
        name: "stackoverflow".into(),
        vocabulary,
        split,
        unit: dpmf::accounting::PrivacyUnit::User,
        notes,
        remarks: Vec::new(),
    })
}

impl<'a> Database<'a> {
    fn open(path: &'a Path) -> Result<Self> {
        if let Err(source) = std::fs::metadata(path) {
            return Err(Error::Io { path: path.into(), source });
        }
        match Connection::open_with_flags(
            path,
            OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
        ) {
            Ok(connection) => Ok(Self { path, connection }),
            Err(error) => Err(Error::Data { path: path.into(), message: error.to_string() }),
        }
    }

    fn fault(&self, message: String) -> Error {
        Error::Data { path: self.path.into(), message }
    }

    fn failed(&self, error: rusqlite::Error) -> Error {
        self.fault(error.to_string())
    }

    fn clients(&self) -> Result<Clients> {
        let set = |set: &str| -> Result<Vec<String>> {
            let failed = |error| self.failed(error);
            let mut query = self
                .connection
                .prepare("SELECT DISTINCT client_id FROM client_metadata WHERE split_name = ?1")
                .map_err(failed)?;
            let rows = query.query_map([set], |row| row.get::<_, String>(0)).map_err(failed)?;
            let mut clients = rows.collect::<rusqlite::Result<Vec<_>>>().map_err(failed)?;
            clients.sort_by_cached_key(|client| digest("stackoverflow", "order", client));
            Ok(clients)
        };
        let (train, heldout, mut test) = (set("train")?, set("heldout")?, set("test")?);
        let mut seen: HashSet<&str> = train.iter().map(String::as_str).collect();
        if let Some(client) = heldout.iter().find(|client| !seen.insert(client)) {
            return Err(self.fault(format!("user {client:?} is in the sets `train` and `heldout`")));
        }
        let published = test.len();
        test.retain(|client| !seen.contains(client.as_str()));
        let shared = published - test.len();
        Ok(Clients { train, heldout, test, shared })
    }

    /// Hands the first `limit` texts of a user to `each`.
    fn texts(&self, set: &str, client: &str, limit: usize, mut each: impl FnMut(&str)) -> Result<()> {
        let failed = |error| self.failed(error);
        let mut query = self
            .connection
            .prepare_cached(
                "SELECT serialized_example_proto FROM examples WHERE split_name = ?1 AND client_id = ?2 ORDER BY rowid LIMIT ?3",
            )
            .map_err(failed)?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let mut rows = query.query(rusqlite::params![set, client, limit]).map_err(failed)?;
        let mut example = 0;
        while let Some(row) = rows.next().map_err(failed)? {
            let bytes = row.get_ref(0).map_err(failed)?.as_blob().map_err(|error| failed(error.into()))?;
            let text = feature(bytes, b"tokens").ok_or_else(|| {
                self.fault(format!("example {example} of user {client:?} in `{set}` is not a tf.train.Example with a text `tokens`"))
            })?;
            each(text);
            example += 1;
        }
        Ok(())
    }
}

/// Value of a field of a protocol buffer.
enum Field<'a> {
    Bytes(&'a [u8]),
    Other,
}

/// First text of a feature of a serialised `tf.train.Example`, or nothing if it is malformed or has no such feature.
///
/// Field numbers: `Example.features` 1, `Features.feature` 1 (a map: `key` 1, `value` 2), `Feature.bytes_list` 1, `BytesList.value` 1.
fn feature<'a>(example: &'a [u8], name: &[u8]) -> Option<&'a str> {
    let mut found = None;
    each_field(example, |number, features| {
        let (1, Field::Bytes(features)) = (number, features) else { return Some(()) };
        each_field(features, |number, entry| {
            let (1, Field::Bytes(entry)) = (number, entry) else { return Some(()) };
            let (mut key, mut value): (&[u8], &[u8]) = (&[], &[]);
            each_field(entry, |number, field| {
                match (number, field) {
                    (1, Field::Bytes(bytes)) => key = bytes,
                    (2, Field::Bytes(bytes)) => value = bytes,
                    _ => (),
                }
                Some(())
            })?;
            if key == name {
                each_field(value, |number, list| {
                    let (1, Field::Bytes(list)) = (number, list) else { return Some(()) };
                    each_field(list, |number, value| {
                        if let (1, Field::Bytes(value)) = (number, value) {
                            found = found.or(Some(value));
                        }
                        Some(())
                    })
                })?;
            }
            Some(())
        })
    })?;
    std::str::from_utf8(found?).ok()
}

/// Hands the number and value of every field of a message to `each`; nothing if the message is malformed.
fn each_field<'a>(mut message: &'a [u8], mut each: impl FnMut(u64, Field<'a>) -> Option<()>) -> Option<()> {
    while !message.is_empty() {
        let tag = varint(&mut message)?;
        let field = match tag & 7 {
            0 => {
                varint(&mut message)?;
                Field::Other
            }
            1 => {
                message = message.get(8..)?;
                Field::Other
            }
            2 => {
                let length = usize::try_from(varint(&mut message)?).ok()?;
                let (bytes, rest) = message.split_at_checked(length)?;
                message = rest;
                Field::Bytes(bytes)
            }
            5 => {
                message = message.get(4..)?;
                Field::Other
            }
            _ => return None,
        };
        each(tag >> 3, field)?;
    }
    Some(())
}

/// Takes a number of seven bits a byte, least significant first.
fn varint(message: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = message.split_first()?;
        *message = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes_field(number: u8, value: &[u8]) -> Vec<u8> {
        let mut out = vec![number << 3 | 2];
        let mut length = value.len();
        while length >= 0x80 {
            out.push(length as u8 | 0x80);
            length >>= 7;
        }
        out.push(length as u8);
        out.extend_from_slice(value);
        out
    }

    /// A serialised example with the features of the published data.
    fn example(text: &str) -> Vec<u8> {
        let entry = |name: &str, value: Vec<u8>| {
            bytes_field(1, &[bytes_field(1, name.as_bytes()), bytes_field(2, &value)].concat())
        };
        let list = |text: &str| bytes_field(1, &bytes_field(1, text.as_bytes()));
        let features = [
            entry("creation_date", list("2011-02-03 04:05:06.78 UTC")),
            entry("score", bytes_field(3, &[1 << 3, 0xac, 0x02])),
            entry("title", list("a title with tokens")),
            entry("tokens", list(text)),
            entry("type", list("question")),
        ];
        bytes_field(1, &features.concat())
    }

    fn database(rows: &[(&str, &str, Vec<u8>)]) -> (tempfile::TempDir, std::path::PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("stackoverflow.sqlite");
        let connection = Connection::open(&path).unwrap();
        connection
            .execute_batch(
                "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL);
                 CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id);
                 CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, num_examples INTEGER NOT NULL);",
            )
            .unwrap();
        for (set, client, example) in rows {
            connection
                .execute("INSERT INTO examples VALUES (?1, ?2, ?3)", rusqlite::params![set, client, example])
                .unwrap();
        }
        connection
            .execute_batch("INSERT INTO client_metadata SELECT client_id, split_name, count(*) FROM examples GROUP BY 1, 2")
            .unwrap();
        (directory, path)
    }

    fn rows() -> Vec<(&'static str, &'static str, Vec<u8>)> {
        vec![
            ("train", "7", example("how do i sort a list ?")),
            ("train", "9", example("a list")),
            ("train", "7", example("sort a sort")),
            ("heldout", "10", example("how ? unseen")),
            ("test", "7", example("later text of a training user")),
            ("test", "11", example("a b c d e f g h i j k l m n o p q r s t u v")),
        ]
    }

    fn decoded(data: &TextData, corpus: &Corpus) -> Vec<Vec<String>> {
        (0..corpus.len())
            .map(|user| corpus.examples_of(user).map(|tokens| data.vocabulary.decode(tokens)).collect())
            .collect()
    }

    #[test]
    fn published_form_is_read_with_disjoint_users() {
        let (_directory, path) = database(&rows());
        let data = read(&path, &Options::default()).unwrap();
        let mut train = decoded(&data, &data.split.train);
        train.sort();
        assert_eq!(train, [vec!["a list"], vec!["how do i sort a list ?", "sort a sort"]]);
        assert_eq!(decoded(&data, &data.split.validation), [["how ? \u{fffd}"]]);
        // Nine words of the training users, most frequent first; user 7 is in no test set.
        assert_eq!(
            (3..6).map(|token| data.vocabulary.symbol(token).unwrap()).collect::<Vec<_>>(),
            ["a", "sort", "list"]
        );
        assert_eq!(data.vocabulary.len(), 3 + 7);
        assert_eq!(data.split.test.len(), 1);
        assert!(data.notes.iter().any(|note| note.starts_with("1 users")), "{:?}", data.notes);
        assert!(data.notes.iter().any(|note| note.contains("not cover")), "{:?}", data.notes);
        // Twenty words to predict: the sentence of 22 is cut and has no end.
        let long = data.split.test.examples_of(0).next().unwrap();
        assert_eq!((long.len(), long[0], long[20]), (21, Vocabulary::BEGIN, Vocabulary::UNKNOWN));
    }

    #[test]
    fn limits_and_lists_hold() {
        let (directory, path) = database(&rows());
        let list = directory.path().join("words");
        std::fs::write(&list, "list 100\na 99\nhow 3\n").unwrap();
        let options = Options {
            users: Some(1),
            examples_per_user: Some(1),
            vocabulary: Some(VocabularyFrom::List(list)),
            vocabulary_size: Some(2),
            example_length: Some(2),
            ..Options::default()
        };
        let data = read(&path, &options).unwrap();
        assert_eq!(
            (data.vocabulary.len(), data.split.train.len(), data.split.train.example_count()),
            (5, 1, 1)
        );
        assert!(data.split.train.examples_of(0).next().unwrap().len() <= 3);
        assert!(!data.notes.iter().any(|note| note.contains("not cover")));
    }

    #[test]
    fn malformed_databases_are_refused() {
        let refused = |rows: &[(&str, &str, Vec<u8>)], message: &str| {
            let (_directory, path) = database(rows);
            let error = read(&path, &Options::default()).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        };
        let with = |row| [rows(), vec![row]].concat();
        refused(&[], "no words");
        refused(&rows()[..3], "set `heldout`");
        refused(&rows()[..5], "set `test`");
        refused(&with(("heldout", "9", example("x"))), "user \"9\" is in the sets");
        refused(&with(("train", "9", example("x")[1..].to_vec())), "example 1 of user \"9\" in `train`");
        refused(&with(("train", "9", vec![])), "example 1 of user \"9\"");

        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.sqlite");
        assert_eq!(read(&path, &Options::default()).unwrap_err().kind(), "io");
        std::fs::write(&path, "no database, but long enough for one".repeat(100)).unwrap();
        assert!(read(&path, &Options::default()).unwrap_err().to_string().contains("not a database"));
        std::fs::write(&path, "").unwrap();
        assert!(read(&path, &Options::default()).unwrap_err().to_string().contains("no such table"));
    }

    #[test]
    fn text_of_any_length_is_found() {
        for length in [0, 1, 127, 128, 20_000] {
            let text = "x".repeat(length);
            assert_eq!(feature(&example(&text), b"tokens"), Some(&*text));
        }
        assert_eq!(feature(&example("x"), b"type"), Some("question"));
        assert_eq!(feature(&example("x"), b"score"), None);
        assert_eq!(feature(&example("x"), b"absent"), None);
    }

    proptest! {
        #[test]
        fn cut_and_random_messages_never_panic(cut in 0_usize..150, bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let whole = example("some text");
            if cut < whole.len() && cut > 0 {
                prop_assert_eq!(feature(&whole[..cut], b"tokens"), None);
            }
            let _ = feature(&bytes, b"tokens");
        }
    }
}
