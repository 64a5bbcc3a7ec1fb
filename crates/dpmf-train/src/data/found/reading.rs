//! What noisy counts say: everything here is computed from releases and public numbers alone.

use dpmf::accounting::gaussian;

use super::super::fields::Field;
use super::survey::{
    CELLS, DATES, FORMATTED, GRID, GROUPS, MISSING, NUMBERS, Wanted, Weights, date_bounds, listed,
    listed_words, named_part, number_bounds, number_cell,
};
use super::templates::{self, Family};

/// Standard deviations of the noise that a run of cells must have more users than to count as seen: among so many cells, chance alone
/// reaches it once in about fifty columns.
const SEEN: f64 = 4.5;
/// The probability that noise alone shows a listed word in any of the columns.
const MISTAKEN: f64 = 0.05;
/// Standard deviations of the noise from which what most users have is read cell by cell; below, templates are compared with it.
const CLEAR: f64 = 12.0;
/// Logarithms of how probable a column is one of known words, of dates, or of numbers as people write them, next to one of numbers.
const USUAL: [f64; 3] = [-1.5, -2.5, -3.5];
/// Logarithm of how much more probable than noise classes must be.
const PROBABLE: f64 = 1.0;
/// Logarithms of how probable a label is before it is looked at: a number, small whole numbers as classes, a group of usual words, other words.
const LABELS: [f64; 4] = [-1.0, -1.4, -1.4, -1.8];
/// Whole numbers with cells of their own in one cell of the grid, at most.
const LARGEST_CELL: f64 = 8.0;
/// Different numbers that a label of classes has at most.
const FEW_NUMBERS: usize = 20;
/// Share of the users that numbers which are revealed must have to be classes.
const MANY_NAMED: f64 = 0.7;
/// Interquartile ranges around the middle that the second look goes over.
pub(super) const REACH: f64 = 3.0;
/// The interquartile range of a normal distribution in standard deviations.
const NORMAL: f64 = 1.349;

/// Counts of one column with noise, in users.
pub(super) struct Counts<'a> {
    cells: &'a [f32],
    words: Vec<(&'a str, f64)>,
    /// One over the weight.
    times: f64,
    /// Part of the weight that a number has in the grid.
    grid: f64,
    /// Cells of numbers that were counted as one.
    width: usize,
    /// Standard deviations above which a listed word counts as seen.
    seen: f64,
    /// Standard deviation of the noise, in users, of all cells but those of the grid of a label.
    pub(super) noise: f64,
    /// All users.
    all: f64,
}

/// What a label most probably is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meant {
    Number,
    Classes,
}

/// Where the numbers of a column lie.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Range {
    pub(super) from: f64,
    pub(super) to: f64,
    /// The middle of the numbers, and their standard deviation if they were normal, as far as cells tell.
    pub(super) middle: f64,
    pub(super) spread: f64,
    /// Users in it, about.
    pub(super) users: f64,
}

impl Range {
    /// The middle and half the length.
    pub(super) fn half(&self) -> (f64, f64) {
        (0.5 * (self.from + self.to), 0.5 * (self.to - self.from))
    }
}

/// What a column was found to be.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Kind {
    Numbers(Range),
    Dates(Range),
    Words(Vec<String>),
    /// Numbers that are written as people write them.
    Formatted,
    /// Nothing could be distinguished from the noise.
    Unseen,
}

/// Classes, or categories, that a column may have.
#[derive(Debug, Clone, Default)]
pub(super) struct Classes {
    pub(super) names: Vec<String>,
    /// Users who have one of them.
    pub(super) users: f64,
    /// Logarithm of how much more probable the counts are with them than without.
    pub(super) evidence: f64,
}

impl Classes {
    /// Whether they are more than noise.
    pub(super) fn is_probable(&self) -> bool {
        self.evidence > PROBABLE
    }
}

/// A release of the survey, read column by column.
pub(super) struct Released<'a> {
    pub(super) wanted: &'a [Wanted],
    pub(super) weights: &'a Weights,
    /// What was released.
    pub(super) values: &'a [f32],
    /// Words behind the cells.
    pub(super) words: &'a [(usize, Box<str>)],
    /// Standard deviation of the noise.
    pub(super) deviation: f64,
    /// Noise that a word which nobody listed must exceed, in standard deviations, and what comes on top in users.
    pub(super) threshold: (f64, f64),
    /// Users who were counted.
    pub(super) users: f64,
    /// Cells of numbers that were counted as one in a feature.
    pub(super) width: usize,
}

impl<'a> Released<'a> {
    /// Counts of a column.
    pub(super) fn column(&self, column: usize) -> Counts<'a> {
        let weight = self.weights.0[column] as f64 / Weights::UNITS;
        let wanted = self.wanted[column];
        let grid = if wanted == Wanted::Label { GRID } else { 1.0 };
        let first = self.wanted.len() * CELLS + NUMBERS;
        let (times, noise) = (1.0 / weight, self.deviation / weight);
        let cells = &self.values[column * CELLS..][..CELLS];
        let revealed = |(at, (of, word)): (usize, &'a (usize, Box<str>))| {
            let part = named_part(wanted, word);
            let users = f64::from(self.values[first + at]) * times / part;
            let least = self.threshold.1 + self.threshold.0 * noise / part;
            (*of == column && users > least).then_some((&**word, users))
        };
        let words = self.words.iter().enumerate().filter_map(revealed).collect();
        let cells_in_all = (CELLS * self.wanted.len()) as f64;
        let seen = gaussian::tail_deviations(MISTAKEN / cells_in_all).unwrap_or(SEEN);
        let width = if wanted == Wanted::Feature { self.width } else { 1 };
        Counts { cells, words, times, grid, width, seen, noise, all: self.users }
    }

    /// Users that a word which nobody listed needs to be revealed.
    pub(super) fn least(&self, column: usize) -> f64 {
        self.threshold.1 + self.threshold.0 * self.column(column).noise
    }

    /// Where the numbers of all features together lie.
    pub(super) fn together(&self) -> Option<Range> {
        let weight = self.weights.0[self.wanted.len()] as f64 / Weights::UNITS;
        let cells = &self.values[self.wanted.len() * CELLS..][..NUMBERS];
        let counts: Vec<f64> = cells.iter().map(|cell| f64::from(*cell) / weight).collect();
        range(&counts, self.deviation / weight, number_bounds)
    }
}

impl Counts<'_> {
    fn users(&self, cell: usize) -> f64 {
        let part = if cell < NUMBERS { self.grid } else { 1.0 };
        f64::from(self.cells[cell]) * self.times / part
    }

    /// Standard deviation of the noise in a cell of the grid, in users.
    fn grid_noise(&self) -> f64 {
        self.noise / self.grid
    }

    /// Users whose field is missing.
    pub(super) fn missing(&self) -> f64 {
        self.users(MISSING)
    }

    /// The numbers of the column.
    pub(super) fn numbers(&self) -> Option<Range> {
        range(&self.numbers_by_cell(), self.grid_noise(), number_bounds)
    }

    fn dates(&self) -> Option<Range> {
        let counts: Vec<f64> = (NUMBERS..NUMBERS + DATES).map(|cell| self.users(cell)).collect();
        range(&counts, self.noise, date_bounds)
    }

    /// The words that are revealed, with their users.
    pub(super) fn revealed(&self) -> Vec<(String, f64)> {
        let listed = listed_words().map(|(cell, word)| (word, self.users(cell)));
        let listed = listed.filter(|(_, users)| *users > self.seen * self.noise);
        let mut words: Vec<(String, f64)> = listed.collect();
        words.extend(self.words.iter().map(|(word, users)| ((*word).to_owned(), *users)));
        words.sort_by(|a, b| a.0.cmp(&b.0));
        words
    }

    /// Users whose label is a small whole number, and the numbers that most probably are the classes, with those between them and all that
    /// are seen.
    pub(super) fn whole(&self) -> Classes {
        let cells: Vec<(String, f64)> = listed_words()
            .filter(|(_, word)| word.parse::<i64>().is_ok())
            .map(|(cell, word)| (word, self.users(cell)))
            .collect();
        let counts: Vec<f64> = cells.iter().map(|(_, users)| *users).collect();
        let seen = |users: &f64| *users > self.seen * self.noise;
        let (evidence, run) = templates::run(&counts, self.noise, self.all);
        let mut between = match (counts.iter().position(seen), counts.iter().rposition(seen)) {
            (Some(first), Some(last)) => first..last + 1,
            _ => 0..0,
        };
        if evidence > PROBABLE {
            between = match between.is_empty() {
                true => run,
                false => between.start.min(run.start)..between.end.max(run.end),
            };
        }
        let names = cells[between].iter().map(|(word, _)| word.clone()).collect();
        Classes { names, users: counts.iter().sum(), evidence }
    }

    /// The words of the group that the users most probably have one of.
    pub(super) fn group(&self) -> Classes {
        let many = (GROUPS.len() as f64).ln();
        let of = |words: &[&str]| {
            let counts: Vec<f64> =
                words.iter().filter_map(|word| listed(word)).map(|cell| self.users(cell)).collect();
            let evidence = templates::together(&counts, self.noise, self.all) - many;
            let names = words.iter().map(|word| (*word).to_owned()).collect();
            Classes { names, users: counts.iter().sum(), evidence }
        };
        let groups = GROUPS.iter().map(|words| of(words));
        groups.reduce(|best, one| if one.evidence > best.evidence { one } else { best }).unwrap_or_default()
    }

    /// Whether a label is a number or one of several classes, most probably, where `revealed` are the words that are revealed.
    ///
    /// Numbers with cells of their own are no evidence for either: a label of which half are others is a number, and so is one that
    /// has too many names, or too few users with each of them.
    pub(super) fn meant(&self, revealed: &[(String, f64)], whole: &Classes, group: &Classes) -> Meant {
        let grid = self.numbers_by_cell();
        let numbers = Family::fixed(1).read(&grid, self.grid_noise(), self.all, None);
        let either = |a: f64, b: f64| a.max(b) + (-(a - b).abs()).exp().ln_1p() - std::f64::consts::LN_2;
        let of = |(word, users): &(String, f64)| match listed(word) {
            None => 0.5 * (users / self.noise).powi(2),
            Some(_) => 0.0,
        };
        let named: f64 = revealed.iter().map(of).sum();
        let names: Vec<&(String, f64)> = revealed
            .iter()
            .filter(|(word, _)| listed(word).is_none() && word.parse::<f64>().is_ok())
            .collect();
        let counted: f64 = names.iter().map(|(_, users)| users).sum();
        if !names.is_empty() && revealed.len() <= FEW_NUMBERS && counted + whole.users > MANY_NAMED * self.all
        {
            return Meant::Classes;
        }
        let [number, few, usual, other] = LABELS;
        let number = number + numbers.evidence + either(0.0, whole.evidence);
        let classes = [few + whole.evidence, usual + group.evidence, other + named];
        match classes.into_iter().all(|evidence| number > evidence) {
            true => Meant::Number,
            false => Meant::Classes,
        }
    }

    /// The counts of numbers, by cell.
    pub(super) fn numbers_by_cell(&self) -> Vec<f64> {
        (0..NUMBERS).map(|cell| self.users(cell)).collect()
    }

    /// Where the numbers of the column lie if it is one of numbers, as far as that is known.
    pub(super) fn scale(&self) -> Range {
        let (mut counts, mut noise) = (self.numbers_by_cell(), self.grid_noise());
        // A label may have numbers in cells of their own, whose noise comes on top.
        if self.grid < 1.0 && self.whole().is_probable() {
            for (cell, word) in listed_words() {
                if let Ok(value) = word.parse::<f64>() {
                    counts[number_cell(value)] += self.users(cell);
                }
            }
            noise = noise.hypot(self.noise * LARGEST_CELL.sqrt());
        }
        match range(&counts, noise, number_bounds) {
            Some(range) if range.users > CLEAR * noise && range.spread > 0.0 => range,
            _ => Family::fixed(1).read(&counts, noise, self.all, None).range,
        }
    }

    /// What most users have, if it stands out of the noise so far that cells can be read one by one. Cells that were merged are not.
    ///
    /// Numbers of which more than half are zero are not read in this way: the few others say how large they are, and a scale that is too
    /// small would put all of them far out.
    pub(super) fn clear_kind(&self) -> Option<Kind> {
        let most = self.most().into_iter().fold(0.0, f64::max);
        let kind = (self.width == 1 && most > CLEAR * self.noise).then(|| self.kind());
        kind.filter(|kind| !matches!(kind, Kind::Numbers(range) if range.spread <= 0.0))
    }

    /// What the column most probably is, by templates; `prior` is what its columns of numbers have in common. Nothing if that is not at
    /// all sure and `known` says where to look otherwise. `columns` is how many are read in this way.
    pub(super) fn probable_kind(
        &self,
        prior: &[f64],
        declared_number: bool,
        known: bool,
        columns: usize,
    ) -> Kind {
        let (noise, all) = (self.noise, self.all);
        let numbers = Family::fixed(self.width).read(&self.numbers_by_cell(), noise, all, Some(prior));
        let days: Vec<f64> = (NUMBERS..NUMBERS + DATES).map(|cell| self.users(cell)).collect();
        let (dated, dates) = templates::dates(&days, noise, all);
        let revealed = self.revealed();
        let group = self.group();
        let square: f64 = revealed.iter().map(|(_, users)| users * users).sum();
        // Each word that is revealed was one of many.
        let named = 0.5 * square / (noise * noise) - revealed.len() as f64 * 4.0;
        let (words, values) = match named > group.evidence {
            true => (named, revealed.into_iter().map(|(word, _)| word).collect()),
            false => (group.evidence, group.names),
        };
        let formatted = templates::together(&[self.users(FORMATTED)], noise, all);
        // Of many columns, noise makes some look like what few are.
        let many = (columns.max(1) as f64).ln();
        let others = [
            (words, Kind::Words(values)),
            (dated - many, Kind::Dates(dates)),
            (formatted - many, Kind::Formatted),
        ];
        let others = others.into_iter().zip(USUAL).map(|((evidence, kind), usual)| (evidence + usual, kind));
        let other = others.fold((0.0, Kind::Unseen), |best, one| if one.0 > best.0 { one } else { best });
        match other {
            (evidence, kind) if !declared_number && evidence > numbers.evidence => match kind {
                Kind::Unseen if !known => Kind::Numbers(numbers.range),
                kind => kind,
            },
            _ if known && numbers.sure < 0.5 => Kind::Unseen,
            _ => Kind::Numbers(numbers.range),
        }
    }

    /// How many users have words, numbers, dates, and numbers as people write them.
    fn most(&self) -> [f64; 4] {
        let named = self.revealed().iter().map(|(_, users)| users).sum();
        let of = |range: Option<Range>| range.map_or(0.0, |range| range.users);
        [named, of(self.numbers()), of(self.dates()), self.users(FORMATTED)]
    }

    /// What most users have.
    fn kind(&self) -> Kind {
        let [named, numbers, dates, formatted] = self.most();
        let most = named.max(numbers).max(dates).max(formatted);
        match (self.numbers(), self.dates()) {
            _ if most == formatted => Kind::Formatted,
            _ if most == named => Kind::Words(self.revealed().into_iter().map(|(word, _)| word).collect()),
            (Some(range), _) if most == range.users => Kind::Numbers(range),
            (_, Some(range)) => Kind::Dates(range),
            _ => Kind::Unseen,
        }
    }
}

/// The run of cells with the most users beyond what noise would give, narrowed to some ranges around the middle.
fn range(counts: &[f64], noise: f64, bounds: fn(usize) -> (f64, f64)) -> Option<Range> {
    // The sum of a run, less one deviation for each of its cells, is largest where users are: Kadane's scan.
    let (mut best, mut sum, mut start, mut run) = (0.0, 0.0, 0, 0..0);
    for (cell, count) in counts.iter().enumerate() {
        if sum <= 0.0 {
            (sum, start) = (0.0, cell);
        }
        sum += count - noise;
        if sum > best {
            (best, run) = (sum, start..cell + 1);
        }
    }
    if best < SEEN * noise {
        return None;
    }
    let users: f64 = counts[run.clone()].iter().map(|count| count.max(0.0)).sum();
    let quantile = |share: f64| {
        let mut left = share * users;
        for cell in run.clone() {
            let (here, (from, to)) = (counts[cell].max(0.0), bounds(cell));
            if left <= here {
                return from + (to - from) * if here > 0.0 { left / here } else { 0.5 };
            }
            left -= here;
        }
        bounds(run.end - 1).1
    };
    let (middle, quarters) = (quantile(0.5), quantile(0.75) - quantile(0.25));
    let (first, last) = (bounds(run.start).0, bounds(run.end - 1).1);
    let from = first.max(middle - REACH * quarters);
    let to = last.min(middle + REACH * quarters);
    // All of them may be zero.
    let (from, to) = if to > from { (from, to) } else { (from - 1.0, from + 1.0) };
    Some(Range { from, to, middle, spread: quarters / NORMAL, users })
}

/// Centre and scale where only the first look is there.
pub(super) fn rough(range: &Range) -> (f64, f64) {
    let least = 1e-3 * (range.to - range.from);
    (range.middle, clamped(range.spread.max(least)))
}

/// What a user adds to the sums of the second look, each at most 1 in the Euclidean norm: how far along the range its number is, and the
/// square of it.
pub(super) fn moments(field: &Field, range: &Range) -> [f64; 2] {
    let value = match field {
        Field::Number(value) | Field::Date(value) => *value,
        _ => return [0.0, 0.0],
    };
    let (middle, half) = range.half();
    let along = ((value - middle) / half).clamp(-1.0, 1.0);
    let root = std::f64::consts::FRAC_1_SQRT_2;
    [along * root, (2.0 * along * along - 1.0) * root]
}

/// Centre and scale by noisy moments over a range, with the deviation of their noise and the users who have a number.
pub(super) fn scaled(sums: [f64; 2], noise: f64, users: f64, range: &Range) -> (f64, f64) {
    let root = std::f64::consts::SQRT_2;
    let users = users.max(1.0);
    let (middle, half) = range.half();
    let mean = (sums[0] * root / users).clamp(-1.0, 1.0);
    let square = (0.5 * (sums[1] * root / users + 1.0)).clamp(0.0, 1.0);
    // A variance that noise hides is taken for as large as it may be.
    let hidden = noise * root / users;
    let variance = (square - mean * mean).max(hidden.min(1.0)).max(1e-12);
    (middle + half * mean, clamped(half * variance.sqrt()))
}

/// A range around a centre for a third look.
pub(super) fn closer(center: f64, scale: f64, range: &Range) -> Range {
    let (from, to) = (range.from.max(center - 4.0 * scale), range.to.min(center + 4.0 * scale));
    match to > from {
        true => Range { from, to, ..*range },
        false => *range,
    }
}

fn clamped(scale: f64) -> f64 {
    scale.clamp(2.0_f64.powi(-40), 2.0_f64.powi(45))
}

#[cfg(test)]
mod tests {
    use super::super::survey::number_cell;
    use super::*;

    #[test]
    fn a_range_is_where_the_users_are() {
        let mut counts = vec![0.0; NUMBERS];
        for value in [20.0, 30.0, 40.0, 50.0, 60.0, 70.0] {
            counts[number_cell(value)] += 100.0;
        }
        let found = range(&counts, 10.0, number_bounds).unwrap();
        assert!((16.0..=32.0).contains(&found.from) && (64.0..=128.0).contains(&found.to), "{found:?}");
        assert_eq!(found.users, 600.0);
        assert_eq!(range(&counts, 200.0, number_bounds), None);
        assert_eq!(range(&vec![0.0; NUMBERS], 1.0, number_bounds), None);
        // Nothing but zeros has a range all the same.
        let mut zeros = vec![0.0; NUMBERS];
        zeros[number_cell(0.0)] = 100.0;
        let found = range(&zeros, 1.0, number_bounds).unwrap();
        assert!(found.from < 0.0 && found.to > 0.0);
    }

    #[test]
    fn moments_give_back_centre_and_scale() {
        let range = Range { from: 0.0, to: 100.0, middle: 50.0, spread: 6.0, users: 1000.0 };
        let sums = (0..1000).fold([0.0, 0.0], |sums: [f64; 2], i| {
            let add = moments(&Field::Number(40.0 + f64::from(i % 21)), &range);
            assert!(add[0] * add[0] + add[1] * add[1] <= 1.0);
            [sums[0] + add[0], sums[1] + add[1]]
        });
        let (center, scale) = scaled(sums, 0.0, 1000.0, &range);
        let expected = (0..1000).map(|i| f64::from(i % 21) - 9.9).map(|x| x * x).sum::<f64>() / 1000.0;
        assert!(
            (center - 50.0).abs() < 0.2 && (scale / expected.sqrt() - 1.0).abs() < 0.01,
            "{center} {scale}"
        );
        // What noise hides is not taken for nothing.
        assert!(scaled(sums, 100.0, 1000.0, &range).1 >= 50.0 * 0.14_f64.sqrt());
        assert_eq!(moments(&Field::Missing, &range), [0.0, 0.0]);
    }
}
