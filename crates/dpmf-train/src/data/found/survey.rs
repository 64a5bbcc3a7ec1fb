//! The first look: which cell of a fixed grid a field falls into, and how users are counted in cells.
//!
//! # Sensitivity
//! Every training user is one row: the row of it with the smallest hash. In every column the row adds 1 to one cell, a number by its sign and
//! binary exponent, a date by its four years, a word by itself, a missing field as such. A column `j` has a weight `w_j`, and what is
//! released is `w_j` times its counts with noise, where `Σ w_j² ≤ 1`. So a user who joins, leaves or becomes empty moves what is
//! released by at most `(Σ w_j²)^½ ≤ 1` in the Euclidean norm: the Gaussian mechanism with sensitivity 1. A label of which it is not
//! known whether it is a class or a number adds `w` to one cell too, unless it is a number without a cell of its own: then it adds `0.8 w`
//! to its cell in the grid and `0.6 w` to its name, and `0.8² + 0.6² = 1`. Beside the columns there is one block for all numbers
//! together, to which a user adds `w/k` in a cell for each of `k` columns: the norm of that is at most `w`. Weights are whole
//! numbers of units of `2⁻³²`, rounded down, and the sum of their squares is compared with 1 in integers ([`Weights`]): what holds on
//! paper holds for the sums as they are added up.
//!
//! # Words that nobody listed
//! Cells of words exist only if somebody has the word, so their mere presence tells something. A word is told only if its noisy count
//! exceeds `T = c + s·z`, where `s` is the standard deviation of the noise in users, and words of fewer than `c` users are not
//! looked at. Let a user join. Words that reach `c` with that user are at most one for each of the `k` columns that may have words,
//! and each has the count `c` exactly, since a user adds 1. It is told with probability at most `Φ(−z)`. (A label's name that is a number
//! has 0.6 of the weight, whoever adds it; in users, its noise is larger by as much, and so is its threshold.) All other words are looked
//! at with and without the user and are covered by the Gaussian mechanism. So the release is `(ε, δ(ε) + kΦ(−z))`-private for every ε, and `z` is chosen such that `kΦ(−z) ≤ δ_schema`. Which coordinate of the noise a word gets does not matter: they are independent and
//! alike. The number of coordinates is fixed by the number of users and columns.

use std::collections::{BTreeMap, HashMap};

use super::super::fields::Field;
use crate::{Error, Result};

/// Least and largest binary exponent of a number that is told apart.
const EXPONENTS: (i32, i32) = (-30, 40);
/// Numbers of one sign.
const MAGNITUDES: usize = (EXPONENTS.1 - EXPONENTS.0 + 1) as usize;
/// Cells of numbers: negative ones, zero, positive ones, in the order of the numbers.
pub(super) const NUMBERS: usize = 2 * MAGNITUDES + 1;
/// The first year of dates that are told apart, and how many years a cell has.
const FIRST_YEAR: f64 = 1900.0;
const YEARS: f64 = 4.0;
const YEAR: f64 = 365.2425;
/// Cells of dates: before, 200 years, after.
pub(super) const DATES: usize = 52;
pub(super) const MISSING: usize = NUMBERS + DATES;
pub(super) const FORMATTED: usize = MISSING + 1;
const LISTED: usize = FORMATTED + 1;
/// Coordinates that words which nobody listed may take, at most.
const MOST_WORDS: usize = 1 << 22;
/// Characters of a word that may be a category.
const LONGEST: usize = 100;

/// Words that tables often hold, and small whole numbers, as classes have: their cells are there whether anybody has them or not, so that
/// they need no threshold.
const WORDS: [&str; 62] = [
    "yes", "no", "Yes", "No", "YES", "NO", "y", "n", "Y", "N", "true", "false", "True", "False", "TRUE",
    "FALSE", "t", "f", "T", "F", "male", "female", "Male", "Female", "MALE", "FEMALE", "m", "M", "w", "W",
    "low", "medium", "high", "Low", "Medium", "High", "small", "large", "good", "bad", "other", "Other",
    "unknown", "Unknown", "a", "b", "c", "d", "e", "A", "B", "C", "D", "E", "single", "married", "divorced",
    "widowed", "positive", "negative", "on", "off",
];
/// Words of which a column has all, often, and no others.
pub(super) const GROUPS: [&[&str]; 24] = [
    &["yes", "no"],
    &["Yes", "No"],
    &["YES", "NO"],
    &["y", "n"],
    &["Y", "N"],
    &["true", "false"],
    &["True", "False"],
    &["TRUE", "FALSE"],
    &["t", "f"],
    &["T", "F"],
    &["male", "female"],
    &["Male", "Female"],
    &["MALE", "FEMALE"],
    &["m", "f"],
    &["M", "F"],
    &["m", "w"],
    &["M", "W"],
    &["low", "medium", "high"],
    &["Low", "Medium", "High"],
    &["small", "medium", "large"],
    &["good", "bad"],
    &["single", "married", "divorced"],
    &["positive", "negative"],
    &["on", "off"],
];
/// Whole numbers that classes are called by.
const WHOLE: std::ops::RangeInclusive<i64> = -1..=20;
/// Cells of such numbers.
pub(super) const WHOLE_CELLS: usize = 22;
/// Cells of a column.
pub(super) const CELLS: usize = LISTED + WORDS.len() + WHOLE_CELLS;

/// The cell of a number.
pub(super) fn number_cell(value: f64) -> usize {
    let exponent = value.abs().log2().floor();
    if value == 0.0 || exponent < f64::from(EXPONENTS.0) - 1.0 {
        return MAGNITUDES;
    }
    let exponent = exponent.clamp(f64::from(EXPONENTS.0), f64::from(EXPONENTS.1)) as i32;
    let size = (exponent - EXPONENTS.0) as usize;
    if value > 0.0 { MAGNITUDES + 1 + size } else { MAGNITUDES - 1 - size }
}

/// The cell that stands for several neighbours of one sign, `width` of them: coarser cells have more users for the same noise.
pub(super) fn merged(cell: usize, width: usize) -> usize {
    let of = |size: usize| (size / width * width + width / 2).min(MAGNITUDES - 1);
    match cell {
        MAGNITUDES => cell,
        above if above > MAGNITUDES => MAGNITUDES + 1 + of(above - MAGNITUDES - 1),
        below => MAGNITUDES - 1 - of(MAGNITUDES - 1 - below),
    }
}

/// The numbers of a cell, from and to.
pub(super) fn number_bounds(cell: usize) -> (f64, f64) {
    let power = |size: usize| 2.0_f64.powi(EXPONENTS.0 + size as i32);
    match cell {
        MAGNITUDES => (0.0, 0.0),
        above if above > MAGNITUDES => (power(above - MAGNITUDES - 1), power(above - MAGNITUDES)),
        below => (-power(MAGNITUDES - below), -power(MAGNITUDES - below - 1)),
    }
}

/// The cell of a date, counted from that of the first.
pub(super) fn date_cell(days: f64) -> usize {
    let cell = ((1970.0 - FIRST_YEAR) + days / YEAR) / YEARS + 1.0;
    cell.floor().clamp(0.0, (DATES - 1) as f64) as usize
}

/// The days of a cell, from and to.
pub(super) fn date_bounds(cell: usize) -> (f64, f64) {
    let days = |cell: f64| (YEARS * (cell - 1.0) - (1970.0 - FIRST_YEAR)) * YEAR;
    (days(cell as f64), days(cell as f64 + 1.0))
}

/// The listed cell of a word, or of a whole number.
pub(super) fn listed(text: &str) -> Option<usize> {
    if let Some(at) = WORDS.iter().position(|word| *word == text) {
        return Some(LISTED + at);
    }
    let whole: i64 = text.parse().ok()?;
    WHOLE.contains(&whole).then(|| LISTED + WORDS.len() + (whole - WHOLE.start()) as usize)
}

/// What listed cells stand for.
pub(super) fn listed_words() -> impl Iterator<Item = (usize, String)> {
    let words = WORDS.iter().map(|word| (*word).to_owned()).chain(WHOLE.map(|whole| whole.to_string()));
    (LISTED..).zip(words)
}

/// Parts of the weight that a label adds to the grid and to its name, where it is a number without a cell of its own: their squares add
/// up to 1.
pub(super) const GRID: f64 = 0.8;
const NAMED: f64 = 0.6;

/// A part of a weight, rounded down, so that the squares of both parts add up to at most the square of the weight.
fn part_of(units: i64, part: f64) -> i64 {
    (units as f64 * part) as i64
}

/// The part of the weight of a column that a word which nobody listed adds to its cell. It depends on the word alone.
pub(super) fn named_part(wanted: Wanted, word: &str) -> f64 {
    let is_number = || word.parse::<f64>().is_ok_and(f64::is_finite);
    if wanted == Wanted::Label && is_number() { NAMED } else { 1.0 }
}

/// What is to be found of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub(super) enum Wanted {
    /// What kind of feature it is, with its scale or its categories.
    Feature,
    /// What kind of label it is, with its scale or its classes.
    Label,
    /// The classes of a label.
    Classes,
    /// The scale of a label.
    Scale,
}

/// Weights of blocks in whole units, the sum of whose squares is at most 1.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Weights(pub(super) Vec<i64>);

impl Weights {
    /// One over a unit.
    pub(super) const UNITS: f64 = 4_294_967_296.0;

    /// Proportional to the roots of these shares.
    ///
    /// Guarantee: the squares of the weights add up to at most 1, in integers.
    pub(super) fn new(shares: &[f64]) -> Result<Self> {
        let total: f64 = shares.iter().sum();
        let unit = |share: &f64| ((share / total).sqrt() * Self::UNITS * (1.0 - 1e-9)) as i64;
        let weights = Self(shares.iter().map(unit).collect());
        let norm_sq: u128 = weights.0.iter().map(|units| u128::from(units.unsigned_abs()).pow(2)).sum();
        if norm_sq > 1 << 64 {
            return Err(Error::argument(
                "weights of columns",
                shares.len(),
                "their squares must add up to 1",
            ));
        }
        Ok(weights)
    }
}

/// How many users have what, times weights: what noise is added to.
pub(super) struct Survey<'a> {
    wanted: &'a [Wanted],
    weights: &'a Weights,
    /// Cells of numbers that are counted as one in a feature.
    width: usize,
    /// Sums of the cells of all columns and of the block for all numbers, in units.
    pub(super) sum: Vec<i64>,
    words: HashMap<(usize, Box<str>), i64>,
}

impl<'a> Survey<'a> {
    /// For these columns; the last weight is that of all numbers together. Of the numbers of a feature, `width` cells are counted as one.
    pub(super) fn new(wanted: &'a [Wanted], weights: &'a Weights, width: usize) -> Self {
        let sum = vec![0; wanted.len() * CELLS + NUMBERS];
        Self { wanted, weights, width, sum, words: HashMap::new() }
    }

    /// Counts a user by its row.
    pub(super) fn add(&mut self, row: &[Field]) {
        let features = self.wanted.iter().filter(|wanted| **wanted == Wanted::Feature).count().max(1);
        let together = self.weights.0[self.wanted.len()] / features as i64;
        for (column, (field, wanted)) in row.iter().zip(self.wanted).enumerate() {
            let units = self.weights.0[column];
            match wanted {
                Wanted::Feature => {
                    self.count(column, field, units);
                    if let Field::Number(value) = field {
                        self.sum[self.wanted.len() * CELLS + number_cell(*value)] += together;
                    }
                }
                Wanted::Scale if matches!(field, Field::Word(_)) => (),
                Wanted::Scale => self.count(column, field, units),
                Wanted::Classes | Wanted::Label => match field {
                    Field::Number(value) => self.number(column, *value, units),
                    field => self.count(column, field, units),
                },
            }
        }
    }

    /// Adds to the cell of a field.
    fn count(&mut self, column: usize, field: &Field, units: i64) {
        let cell = match field {
            Field::Missing => MISSING,
            Field::Formatted => FORMATTED,
            Field::Number(value) if self.wanted[column] == Wanted::Feature => {
                merged(number_cell(*value), self.width)
            }
            Field::Number(value) => number_cell(*value),
            Field::Date(days) => NUMBERS + date_cell(*days),
            Field::Word(word) => return self.word(column, word, units),
        };
        self.sum[column * CELLS + cell] += units;
    }

    /// Adds to the cells of a label that is a number: to its name, and to the grid if its name is not listed and it may be no class.
    fn number(&mut self, column: usize, value: f64, units: i64) {
        let name = value.to_string();
        if self.wanted[column] == Wanted::Label && listed(&name).is_none() {
            self.sum[column * CELLS + number_cell(value)] += part_of(units, GRID);
        }
        self.word(column, &name, units);
    }

    fn word(&mut self, column: usize, word: &str, units: i64) {
        match listed(word) {
            Some(cell) => self.sum[column * CELLS + cell] += units,
            None if word.chars().count() <= LONGEST => {
                let units = part_of(units, named_part(self.wanted[column], word));
                *self.words.entry((column, word.into())).or_default() += units;
            }
            None => (),
        }
    }

    /// Coordinates for words, and the number of users below which a word is not looked at: fixed by public numbers.
    pub(super) fn room(users: usize, columns: usize) -> (usize, u64) {
        let most = users.saturating_mul(columns).max(1);
        let least = most.div_ceil(MOST_WORDS).max(1);
        (most / least, least as u64)
    }

    /// The sums with those of words behind them, and the words in that order.
    pub(super) fn finish(self, users: usize) -> (Vec<i64>, Vec<(usize, Box<str>)>) {
        let (room, least) = Self::room(users, self.wanted.len());
        let mut words: BTreeMap<(usize, Box<str>), i64> = self.words.into_iter().collect();
        words.retain(|(column, word), units| {
            let each = part_of(self.weights.0[*column], named_part(self.wanted[*column], word));
            *units >= each.saturating_mul(least as i64)
        });
        let mut sum = self.sum;
        sum.extend(words.values().take(room));
        sum.resize(self.wanted.len() * CELLS + NUMBERS + room, 0);
        (sum, words.into_keys().take(room).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_hold_their_numbers_and_dates() {
        for value in [1.0, 0.75, -3.0, 1e-9, 1e12, -1e12, 2000.0, -0.001, 3.5e5] {
            let (from, to) = number_bounds(number_cell(value));
            let within = from <= value && value <= to;
            assert!(within || value.abs() > 2.0_f64.powi(41) * 0.999, "{value}: {from} {to}");
        }
        assert_eq!((number_cell(0.0), number_bounds(number_cell(0.0))), (MAGNITUDES, (0.0, 0.0)));
        let order: Vec<usize> = [-1e30, -5.0, -0.1, 0.0, 0.1, 5.0, 1e30].map(number_cell).into();
        assert!(order.windows(2).all(|pair| pair[0] < pair[1]), "{order:?}");
        assert_eq!((order[0], order[6]), (0, NUMBERS - 1));
        for days in [-20_000.0, 0.0, 19_844.5, 40_000.0] {
            let (from, to) = date_bounds(date_cell(days));
            assert!(from <= days && days < to, "{days}: {from} {to}");
        }
        assert_eq!((date_cell(-1e9), date_cell(1e9)), (0, DATES - 1));
    }

    #[test]
    fn neighbours_are_merged_by_sign() {
        for width in [1, 2, 3, 5] {
            let of: Vec<usize> = (0..NUMBERS).map(|cell| merged(cell, width)).collect();
            assert!(of.windows(2).all(|pair| pair[0] <= pair[1]) && of[MAGNITUDES] == MAGNITUDES);
            assert!(of[..MAGNITUDES].iter().all(|cell| *cell < MAGNITUDES));
            assert!(of[MAGNITUDES + 1..].iter().all(|cell| *cell > MAGNITUDES));
            let mut all = of.clone();
            all.dedup();
            assert_eq!(all.len(), 2 * MAGNITUDES.div_ceil(width) + 1);
            assert!(all.iter().all(|cell| merged(*cell, width) == *cell));
        }
    }

    /// One user more moves the sums by a norm of at most 1, whatever the row; a user that counted twice would not.
    #[test]
    fn a_user_moves_the_sums_by_at_most_one() {
        let wanted = [Wanted::Feature, Wanted::Feature, Wanted::Feature, Wanted::Label];
        let weights = Weights::new(&[1.0, 1.0, 1.0, 2.0, 0.5]).unwrap();
        let norm = |rows: &[&[Field]]| {
            let mut survey = Survey::new(&wanted, &weights, 1);
            rows.iter().for_each(|row| survey.add(row));
            let (sum, _) = survey.finish(10);
            sum.iter().map(|units| u128::from(units.unsigned_abs()).pow(2)).sum::<u128>()
        };
        let one = 1_u128 << 64;
        let number = [Field::Number(3.0), Field::Number(3.5), Field::Number(2.5), Field::Number(1.0)];
        let fraction = [Field::Number(3.0), Field::Number(3.5), Field::Number(2.5), Field::Number(1.5)];
        let word = || Field::Word("Bonn".into());
        let words = [word(), word(), word(), word()];
        let mixed = [Field::Date(3.0), Field::Missing, Field::Formatted, Field::Missing];
        for row in [&number[..], &fraction, &words, &mixed] {
            let norm_sq = norm(&[row]);
            assert!(norm_sq <= one && norm_sq > one / 2, "{norm_sq}");
            assert!(norm(&[row, row]) > one);
        }
        // The bound is nearly reached, so it is not an accident of small weights.
        assert!(norm(&[&number]) as f64 > 0.99 * one as f64);
        assert!(norm(&[&fraction]) as f64 > 0.99 * one as f64);
    }

    #[test]
    fn both_parts_of_a_number_stay_within_its_weight() {
        for units in (0..3000).chain((1_i64 << 32) - 3000..=1 << 32) {
            let sq = |part: f64| u128::from(part_of(units, part).unsigned_abs()).pow(2);
            assert!(sq(GRID) + sq(NAMED) <= u128::from(units.unsigned_abs()).pow(2), "{units}");
        }
        // Power: two parts that are as large as they look in print would not.
        let sq = |part: f64| u128::from(part_of(1 << 32, part).unsigned_abs()).pow(2);
        assert!(2 * sq(0.7072) > 1 << 64);
    }

    #[test]
    fn the_room_for_words_follows_from_public_numbers() {
        assert_eq!(Survey::room(100, 5), (500, 1));
        let (room, least) = Survey::room(10_000_000, 50);
        assert!(room <= MOST_WORDS && least == 120, "{room} {least}");
    }
}
