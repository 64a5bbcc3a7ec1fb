//! What tokens mean.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Where a vocabulary comes from when it is no fixed alphabet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VocabularyFrom {
    /// A share of the users, chosen by hash, who are taken for public and are in none of the sets.
    PublicUsers,
    /// The users trained on. Guarantee: none; ε does not cover what the choice of words tells about them.
    TrainingUsers,
    /// A public list, one word a line with the most frequent first; anything after white space is ignored.
    List(PathBuf),
}

impl VocabularyFrom {
    pub(super) const UNCOVERED: &str = "The vocabulary consists of the training users' most frequent words: ε does not cover what this \
        choice reveals about them. Give a public list of words to avoid this.";
    pub(super) const LISTED: &str =
        "The vocabulary is a given list; it costs no privacy if the list is public.";
}

/// How often words occur.
#[derive(Debug, Default)]
pub(super) struct WordCounts(HashMap<String, u64>);

impl WordCounts {
    /// Counts the words of a text.
    pub(super) fn add(&mut self, tokens: Tokens, text: &str) {
        tokens.split(text, |word| match self.0.get_mut(word) {
            Some(count) => *count += 1,
            None => drop(self.0.insert(word.into(), 1)),
        });
    }

    /// The most frequent words; of equally frequent ones, the first in order of code points.
    pub(super) fn vocabulary(self, tokens: Tokens, size: usize) -> Result<Vocabulary> {
        let mut words: Vec<_> = self.0.into_iter().collect();
        words.sort_unstable_by(|(a, a_count), (b, b_count)| b_count.cmp(a_count).then_with(|| a.cmp(b)));
        words.truncate(size);
        Vocabulary::new(tokens, words.into_iter().map(|(word, _)| word))
    }
}

/// The alphabet of tables: printable ASCII.
pub(super) fn printable() -> impl Iterator<Item = char> {
    ' '..='~'
}

/// How a text falls into tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tokens {
    /// Every character.
    Characters,
    /// Lower-case words and punctuation marks: a run of letters and digits, with single apostrophes inside, is a word
    /// (’ counts as ');
    /// any other character that is not white space stands alone.
    Words,
    /// Text between white space, for text that was tokenised before.
    Separated,
}

/// The symbols a model knows, numbered from zero, with three special ones in front.
///
/// Tokens 0, 1 and 2 are [`BEGIN`](Self::BEGIN), [`END`](Self::END) and [`UNKNOWN`](Self::UNKNOWN); symbols follow in
/// the order given.
///
/// ```
/// use dpmf_train::data::Vocabulary;
///
/// let vocabulary = Vocabulary::characters("abc".chars())?;
/// let mut tokens = Vec::new();
/// vocabulary.encode("cab!", 10, &mut tokens);
/// assert_eq!(tokens, [0, 5, 3, 4, 2, 1]);
/// assert_eq!(vocabulary.decode(&tokens), "cab\u{fffd}");
/// # Ok::<(), dpmf_train::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Vocabulary {
    tokens: Tokens,
    symbols: Vec<String>,
    index: HashMap<String, u16>,
    /// Tokens of single ASCII characters: nearly all look-ups of a character vocabulary.
    ascii: Box<[u16; 128]>,
}

impl Vocabulary {
    /// Token before the first.
    pub const BEGIN: u16 = 0;
    /// Token after the last.
    pub const END: u16 = 1;
    /// Token in place of a symbol the vocabulary has not.
    pub const UNKNOWN: u16 = 2;
    /// Most symbols, special ones included, so that a token fits 16 bits.
    pub const MAX_LEN: usize = 1 << 16;
    const SPECIAL: usize = 3;

    /// A vocabulary of characters.
    ///
    /// # Errors
    /// If a character is given twice, or none, or too many.
    pub fn characters(alphabet: impl IntoIterator<Item = char>) -> Result<Self> {
        Self::new(Tokens::Characters, alphabet.into_iter().map(String::from))
    }

    /// A vocabulary of symbols of any kind; `symbols` are as [`Tokens`] makes them (lower-cased words, say).
    ///
    /// # Errors
    /// If a symbol is given twice or is empty, or there are none, or too many.
    pub fn new(tokens: Tokens, symbols: impl IntoIterator<Item = impl Into<String>>) -> Result<Self> {
        let symbols: Vec<String> = symbols.into_iter().map(Into::into).collect();
        if symbols.is_empty() || symbols.len() > Self::MAX_LEN - Self::SPECIAL {
            return Err(Error::InvalidArgument {
                name: "vocabulary",
                value: format!("{} symbols", symbols.len()),
                rule: "it needs at least one symbol and at most 65,533",
            });
        }
        let mut index = HashMap::with_capacity(symbols.len());
        for (token, symbol) in (Self::SPECIAL as u16..=u16::MAX).zip(&symbols) {
            if symbol.is_empty() || index.insert(symbol.clone(), token).is_some() {
                return Err(Error::InvalidArgument {
                    name: "symbol of the vocabulary",
                    value: format!("{symbol:?}"),
                    rule: "symbols must not be empty nor given twice",
                });
            }
        }
        let mut ascii = Box::new([Self::UNKNOWN; 128]);
        let mut buffer = [0; 4];
        for (code, token) in (0..128_u8).zip(ascii.iter_mut()) {
            *token = index.get(&*char::from(code).encode_utf8(&mut buffer)).copied().unwrap_or(Self::UNKNOWN);
        }
        Ok(Self { tokens, symbols, index, ascii })
    }

    /// A vocabulary of the first `size` words of a list, one a line; anything after white space is ignored.
    ///
    /// # Errors
    /// If the file cannot be read, or a word is given twice, or there are none.
    pub fn from_list(tokens: Tokens, path: &Path, size: usize) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })?;
        let words = text.lines().filter_map(|line| line.split_whitespace().next());
        Self::new(tokens, words.take(size))
            .map_err(|error| Error::Data { path: path.into(), message: error.to_string() })
    }

    /// Number of tokens, special ones included: the classes a model tells apart.
    #[allow(clippy::len_without_is_empty)] // a vocabulary is never empty
    pub fn len(&self) -> usize {
        Self::SPECIAL + self.symbols.len()
    }

    /// How a text falls into tokens.
    pub fn tokens(&self) -> Tokens {
        self.tokens
    }

    /// All symbols, in the order of their tokens from 3 on.
    pub fn symbols(&self) -> &[String] {
        &self.symbols
    }

    /// Symbol of a token, unless it is special or out of range.
    pub fn symbol(&self, token: u16) -> Option<&str> {
        self.symbols.get(usize::from(token).checked_sub(Self::SPECIAL)?).map(String::as_str)
    }

    /// Appends the tokens of a text with at most `length` to predict: [`BEGIN`](Self::BEGIN), the first `length`
    /// symbols, and
    /// [`END`](Self::END) if the text has fewer. A text without symbols appends nothing.
    pub fn encode(&self, text: &str, length: usize, out: &mut Vec<u16>) {
        let start = out.len();
        out.push(Self::BEGIN);
        match self.tokens {
            Tokens::Characters => {
                out.extend(text.chars().take(length).map(|character| self.character(character)))
            }
            tokens => tokens.split(text, |symbol| {
                if out.len() - start <= length {
                    out.push(self.index.get(symbol).copied().unwrap_or(Self::UNKNOWN));
                }
            }),
        }
        match out.len() - start - 1 {
            0 => out.truncate(start),
            symbols if symbols < length => out.push(Self::END),
            _ => (),
        }
    }

    /// The text of tokens: special ones vanish but for [`UNKNOWN`](Self::UNKNOWN), which becomes U+FFFD, as do tokens
    /// out of range;
    /// words are joined by spaces.
    pub fn decode(&self, tokens: &[u16]) -> String {
        let mut text = String::new();
        for &token in tokens {
            if token == Self::BEGIN || token == Self::END {
                continue;
            }
            if self.tokens != Tokens::Characters && !text.is_empty() {
                text.push(' ');
            }
            text.push_str(self.symbol(token).unwrap_or("\u{fffd}"));
        }
        text
    }

    fn character(&self, character: char) -> u16 {
        match self.ascii.get(character as usize) {
            Some(&token) => token,
            None => self.index.get(&*character.encode_utf8(&mut [0; 4])).copied().unwrap_or(Self::UNKNOWN),
        }
    }
}

impl Tokens {
    /// Hands every token of the text to `each`.
    pub fn split(self, text: &str, mut each: impl FnMut(&str)) {
        match self {
            Self::Characters => text.chars().for_each(|character| each(character.encode_utf8(&mut [0; 4]))),
            Self::Separated => text.split_whitespace().for_each(each),
            Self::Words => {
                let text = text.to_lowercase().replace('’', "'");
                let mut rest = text.trim_start();
                while let Some(first) = rest.chars().next() {
                    let end = if first.is_alphanumeric() { word_end(rest) } else { first.len_utf8() };
                    each(&rest[..end]);
                    rest = rest[end..].trim_start();
                }
            }
        }
    }
}

/// End of the word a text begins with.
fn word_end(text: &str) -> usize {
    let mut end = 0;
    for (at, character) in text.char_indices() {
        if character.is_alphanumeric() {
            end = at + character.len_utf8();
        } else if character != '\'' || at > end {
            break;
        }
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(tokens: Tokens, text: &str) -> Vec<String> {
        let mut symbols = Vec::new();
        tokens.split(text, |symbol| symbols.push(symbol.to_owned()));
        symbols
    }

    #[test]
    fn words_are_lower_case_with_apostrophes_inside_and_marks_alone() {
        assert_eq!(
            split(Tokens::Words, " Don’t stop—it's 'Über' no. 42, rock ''n' roll''x "),
            [
                "don't", "stop", "—", "it's", "'", "über", "'", "no", ".", "42", ",", "rock", "'", "'", "n",
                "'", "roll", "'", "'", "x"
            ]
        );
        assert_eq!(split(Tokens::Words, "  \n"), [""; 0]);
        assert_eq!(split(Tokens::Separated, " a  b.c\t<url> "), ["a", "b.c", "<url>"]);
        assert_eq!(split(Tokens::Characters, "né"), ["n", "é"]);
    }

    #[test]
    fn long_texts_lose_their_end_token_and_empty_texts_vanish() {
        let vocabulary = Vocabulary::new(Tokens::Words, ["a", "b"]).unwrap();
        let encode = |text, length| {
            let mut out = vec![9];
            vocabulary.encode(text, length, &mut out);
            out
        };
        assert_eq!(encode("a b", 3), [9, 0, 3, 4, 1]);
        assert_eq!(encode("a b", 2), [9, 0, 3, 4]);
        assert_eq!(encode("a b c", 2), [9, 0, 3, 4]);
        assert_eq!(encode("a B c", 4), [9, 0, 3, 4, 2, 1]);
        assert_eq!(encode("", 4), [9]);
        assert_eq!(encode("a", 0), [9]);
    }

    #[test]
    fn bad_symbols_are_refused() {
        for symbols in [&[][..], &["a", "a"], &["a", ""]] {
            assert!(Vocabulary::new(Tokens::Words, symbols.iter().copied()).is_err(), "{symbols:?}");
        }
        assert!(Vocabulary::new(Tokens::Words, (0..65_533).map(|word| word.to_string())).is_ok());
        let error = Vocabulary::new(Tokens::Words, (0..65_534).map(|word| word.to_string())).unwrap_err();
        assert!(error.to_string().contains("65534 symbols"), "{error}");
    }

    proptest! {
        #[test]
        fn characters_come_back(text in "[a-zé☃]{1,40}") {
            let vocabulary = Vocabulary::characters(('a'..='z').chain(['é', '☃'])).unwrap();
            let mut tokens = Vec::new();
            vocabulary.encode(&text, 50, &mut tokens);
            prop_assert_eq!(tokens.len(), text.chars().count() + 2);
            prop_assert!(tokens.iter().all(|&token| usize::from(token) < vocabulary.len()));
            prop_assert_eq!(vocabulary.decode(&tokens), text);
        }

        #[test]
        fn words_come_back_as_the_same_tokens(text in "\\PC{0,60}") {
            let mut symbols = split(Tokens::Words, &text);
            symbols.sort_unstable();
            symbols.dedup();
            prop_assume!(!symbols.is_empty());
            let vocabulary = Vocabulary::new(Tokens::Words, symbols).unwrap();
            let (mut once, mut twice) = (Vec::new(), Vec::new());
            vocabulary.encode(&text, 100, &mut once);
            prop_assert!(!once.contains(&Vocabulary::UNKNOWN));
            vocabulary.encode(&vocabulary.decode(&once), 100, &mut twice);
            prop_assert_eq!(once, twice);
        }
    }
}
