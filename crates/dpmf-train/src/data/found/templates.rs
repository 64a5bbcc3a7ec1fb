//! What noisy counts most probably are of, where noise is too loud to read them cell by cell.
//!
//! A column of numbers is compared with a fixed family of distributions, laid over the grid: normal and log-normal ones of all scales, and
//! log-normal ones with a share of zeros. A whole template has far more users than any of its cells, so it can be told from
//! noise when no cell can; over coarse cells ([`COARSE_CELLS`]) it has more users in each. Columns of one table are often alike: what is probable for most of them is probable for each
//! ([`Family::learned`]). Everything here is computed from a release and public numbers, and the family was fixed before any table was
//! read.

use std::sync::OnceLock;

use dpmf::accounting::gaussian;

use super::reading::{REACH, Range};
use super::survey::{DATES, NUMBERS, date_bounds, merged, number_cell};

/// Least share of the users who have what a template says; the others have nothing.
const LEAST: f64 = 0.5;
/// Points of a distribution that its cells are counted by.
const POINTS: usize = 400;
/// The usual size of numbers in tables, in powers of two, and how much it varies.
const USUAL: (f64, f64) = (4.0, 6.0);
/// How much of what columns have in common is the family's own prior, in columns.
const OWN: f64 = 2.0;
/// Probability that a scale is no larger than the one that is chosen.
const LARGE: f64 = 0.7;
/// How many times as wide or as far off other templates may be that count beside the one that is chosen.
const WIDE: f64 = 3.0;
/// Probability, to begin with, that all columns are alike.
const ALIKE: f64 = 0.3;
/// Rounds in which columns learn from each other.
const ROUNDS: usize = 4;

/// Cells that are counted as one where noise is loud: a number is then known to a factor of eight.
pub(super) const COARSE_CELLS: usize = 3;

/// A distribution of numbers over the grid.
struct Template {
    /// Cells with their shares.
    cells: Vec<(usize, f64)>,
    norm_sq: f64,
    /// Where its numbers lie; of a single user.
    range: Range,
}

/// The templates of numbers, with the logarithm of their prior probabilities.
pub(super) struct Family {
    templates: Vec<Template>,
    prior: Vec<f64>,
    /// Places of the templates, the narrowest first.
    by_spread: Vec<usize>,
}

/// What a column of numbers is, if it is one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Numbers {
    /// Logarithm of how much more probable the counts are if it is one than if there is nothing but noise.
    pub(super) evidence: f64,
    /// Where they lie, most probably.
    pub(super) range: Range,
    /// Probability that they lie about there.
    pub(super) sure: f64,
}

/// Logarithm of how much more probable counts are if `LEAST` to all of the users follow a template, as fits best, than if nobody does.
fn ratio(product: f64, norm_sq: f64, noise: f64, users: f64) -> f64 {
    let of = (product / norm_sq).clamp(LEAST * users, users);
    (of * product - 0.5 * of * of * norm_sq) / (noise * noise)
}

/// The logarithm of a sum of exponentials.
fn log_sum(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let most = values.clone().fold(f64::NEG_INFINITY, f64::max);
    match most.is_finite() {
        true => most + values.map(|value| (value - most).exp()).sum::<f64>().ln(),
        false => most,
    }
}

/// A standard normal quantile.
fn normal(share: f64) -> f64 {
    let tail = |p: f64| gaussian::tail_deviations(p).unwrap_or(0.0);
    if share > 0.5 { tail(1.0 - share) } else { -tail(share) }
}

impl Template {
    /// Of numbers in ascending order, all of the same share, over a grid of which `width` cells are one.
    fn new(points: &[f64], width: usize) -> Self {
        let mut cells: Vec<(usize, f64)> = Vec::new();
        let share = 1.0 / points.len() as f64;
        for point in points {
            let cell = merged(number_cell(*point), width);
            match cells.last_mut() {
                Some((last, shares)) if *last == cell => *shares += share,
                _ => cells.push((cell, share)),
            }
        }
        let norm_sq = cells.iter().map(|(_, share)| share * share).sum();
        let at = |share: f64| points[((share * points.len() as f64) as usize).min(points.len() - 1)];
        let (middle, quarters) = (at(0.5), at(0.75) - at(0.25));
        let (mut from, mut to) = (at(0.005), at(0.995));
        if quarters > 0.0 {
            (from, to) = (from.max(middle - REACH * quarters), to.min(middle + REACH * quarters));
        }
        let (from, to) = if to > from { (from, to) } else { (from - 1.0, from + 1.0) };
        // Tails beyond the range count as its ends.
        let within = || points.iter().map(|point| point.clamp(from, to));
        let mean = within().sum::<f64>() * share;
        let spread = (within().map(|point| (point - mean).powi(2)).sum::<f64>() * share).sqrt();
        Self { cells, norm_sq, range: Range { from, to, middle: mean, spread, users: 1.0 } }
    }

    fn product(&self, counts: &[f64]) -> f64 {
        self.cells.iter().map(|(cell, share)| share * counts[*cell]).sum()
    }
}

impl Family {
    /// The one that was fixed once, over a grid of which `width` cells are one.
    pub(super) fn fixed(width: usize) -> &'static Self {
        static FINE: OnceLock<Family> = OnceLock::new();
        static COARSE: OnceLock<Family> = OnceLock::new();
        if width > 1 {
            COARSE.get_or_init(|| Self::new(COARSE_CELLS))
        } else {
            FINE.get_or_init(|| Self::new(1))
        }
    }

    fn new(width: usize) -> Self {
        let quantiles: Vec<f64> = (0..POINTS).map(|at| normal((at as f64 + 0.5) / POINTS as f64)).collect();
        let (mut templates, mut prior) = (Vec::new(), Vec::new());
        let mut add = |points: &[f64], size: f64, kind: f64| {
            let far = (size - USUAL.0) / USUAL.1;
            templates.push(Template::new(points, width));
            // Heavy tails: unusual sizes are improbable, not impossible.
            prior.push(kind.ln() - (1.0 + far * far).ln());
        };
        for half in -40..=70 {
            let size = 0.5 * f64::from(half);
            for width in [0.15, 0.5, 1.0, 2.0] {
                let positive: Vec<f64> = quantiles.iter().map(|z| (size + width * z).exp2()).collect();
                for zeros in [0.0, 0.3, 0.7, 0.95] {
                    let none = (zeros * POINTS as f64) as usize;
                    let mut points = vec![0.0; none];
                    let others = POINTS - none;
                    points.extend((0..others).map(|at| positive[(2 * at + 1) * POINTS / (2 * others)]));
                    add(&points, size, if zeros == 0.0 { 0.1 } else { 0.04 });
                }
                let negative: Vec<f64> = positive.iter().rev().map(|point| -point).collect();
                add(&negative, size, 0.01);
            }
            for shift in [0.0, -0.5, 0.5, -1.0, 1.0, 2.0] {
                let points: Vec<f64> = quantiles.iter().map(|z| size.exp2() * (z + shift)).collect();
                add(&points, size, if shift == 0.0 { 0.15 } else { 0.02 });
            }
        }
        let total = log_sum(prior.iter().copied());
        prior.iter_mut().for_each(|log| *log -= total);
        let mut by_spread: Vec<usize> = (0..templates.len()).collect();
        by_spread.sort_by(|a, b| templates[*a].range.spread.total_cmp(&templates[*b].range.spread));
        Self { templates, prior, by_spread }
    }

    /// Logarithms of the ratios of all templates, each plus its prior.
    fn weighed(&self, counts: &[f64], noise: f64, users: f64, prior: &[f64]) -> Vec<f64> {
        let of = |(template, prior): (&Template, &f64)| {
            prior + ratio(template.product(counts), template.norm_sq, noise, users)
        };
        self.templates.iter().zip(prior).map(of).collect()
    }

    /// Prior probabilities that some columns of one table have in common, by their counts: those of the family where there are few.
    pub(super) fn learned(&self, columns: &[Vec<f64>], noise: f64, users: f64) -> Vec<f64> {
        let mut prior = self.prior.clone();
        if columns.len() < 2 {
            return prior;
        }
        // Perhaps all columns are alike: then the sum of what they say is loud where each alone is faint.
        let mut alike = self.prior.clone();
        for counts in columns {
            let weighed = self.weighed(counts, noise, users, &vec![0.0; alike.len()]);
            alike.iter_mut().zip(weighed).for_each(|(log, ratio)| *log += ratio);
        }
        let total = log_sum(alike.iter().copied());
        prior.iter_mut().zip(alike).for_each(|(log, alike)| {
            *log = ((1.0 - ALIKE) * log.exp() + ALIKE * (alike - total).exp()).ln();
        });
        for _ in 0..ROUNDS {
            let mut shares: Vec<f64> = self.prior.iter().map(|log| OWN * log.exp()).collect();
            for counts in columns {
                let weighed = self.weighed(counts, noise, users, &prior);
                let total = log_sum(weighed.iter().copied());
                shares.iter_mut().zip(weighed).for_each(|(share, log)| *share += (log - total).exp());
            }
            let total = OWN + columns.len() as f64;
            prior = shares.into_iter().map(|share| (share / total).ln()).collect();
        }
        prior
    }

    /// What the counts of a column say if it is one of numbers.
    pub(super) fn read(&self, counts: &[f64], noise: f64, users: f64, prior: Option<&[f64]>) -> Numbers {
        let weighed = self.weighed(&counts[..NUMBERS], noise, users, prior.unwrap_or(&self.prior));
        let evidence = log_sum(weighed.iter().copied());
        let share = |log: &f64| (log - evidence).exp();
        // A scale that is too large does less harm than one too small: it makes a column faint, the other makes it drown all others.
        let mut left = LARGE;
        let chosen = self.by_spread.iter().find(|at| {
            left -= share(&weighed[**at]);
            left < 0.0
        });
        let range = self.templates[chosen.copied().unwrap_or_default()].range;
        let near = |other: &Range, times: f64| {
            let ratio = other.spread / range.spread;
            (1.0 / times..=times).contains(&ratio)
                && (other.middle - range.middle).abs() <= times * range.spread.max(other.spread)
        };
        let of = |times: f64| {
            let all = self.templates.iter().zip(&weighed);
            all.filter(move |(template, _)| near(&template.range, times))
                .map(|(template, log)| (template.range, share(log)))
        };
        let sure = of(2.0).map(|(_, share)| share).sum();
        // Others that are about as wide say more exactly where it lies.
        let total: f64 = of(WIDE).map(|(_, share)| share).sum();
        let middle = of(WIDE).map(|(other, share)| share * other.middle).sum::<f64>() / total;
        let variance = |other: Range| other.spread.powi(2) + (other.middle - middle).powi(2);
        let spread = (of(WIDE).map(|(other, share)| share * variance(other)).sum::<f64>() / total).sqrt();
        let from = of(WIDE).map(|(other, share)| share * other.from).sum::<f64>() / total;
        let to = of(WIDE).map(|(other, share)| share * other.to).sum::<f64>() / total;
        Numbers { evidence, range: Range { from, to, middle, spread, users }, sure }
    }
}

/// What the counts of a column say if it is one of dates: the evidence, and where they lie.
pub(super) fn dates(counts: &[f64], noise: f64, users: f64) -> (f64, Range) {
    const LENGTHS: [usize; 5] = [1, 2, 3, 6, 12];
    let (mut logs, mut best) = (Vec::new(), (f64::NEG_INFINITY, 0, 1));
    for length in LENGTHS {
        for start in 0..=DATES - length {
            let share = 1.0 / length as f64;
            let product = counts[start..start + length].iter().sum::<f64>() * share;
            let log = ratio(product, share, noise, users);
            if log > best.0 {
                best = (log, start, length);
            }
            logs.push(log);
        }
    }
    let evidence = log_sum(logs.iter().copied()) - (logs.len() as f64).ln();
    let (from, to) = (date_bounds(best.1).0, date_bounds(best.1 + best.2 - 1).1);
    // Evenly spread.
    let range = Range { from, to, middle: 0.5 * (from + to), spread: (to - from) / 12_f64.sqrt(), users };
    (evidence, range)
}

/// What counts say if they are of these cells, each with a share: the better of evenly and unevenly frequent ones.
pub(super) fn together(counts: &[f64], noise: f64, users: f64) -> f64 {
    let of = |shares: &[f64]| {
        let product = counts.iter().zip(shares).map(|(count, share)| count * share).sum();
        ratio(product, shares.iter().map(|share| share * share).sum(), noise, users)
    };
    let even = vec![1.0 / counts.len() as f64; counts.len()];
    if counts.len() != 2 {
        return of(&even);
    }
    let uneven = [0.1, 0.25, 0.5, 0.75, 0.9].map(|share| of(&[share, 1.0 - share]));
    log_sum(uneven.iter().copied()) - (uneven.len() as f64).ln()
}

/// Frequencies of a class, next to those if all were as frequent.
const UNEVEN: [f64; 4] = [0.25, 0.5, 1.0, 2.0];

/// What counts say if each is of its own frequency.
fn apart(counts: &[f64], noise: f64, users: f64) -> f64 {
    let usual = users / counts.len() as f64;
    let of = |count: &f64| {
        let logs = UNEVEN.map(|times| times * usual * (count - 0.5 * times * usual) / (noise * noise));
        log_sum(logs.into_iter()) - (UNEVEN.len() as f64).ln()
    };
    counts.iter().map(of).sum()
}

/// The run of cells that counts most probably are of, and the evidence for runs: of two to ten, all as frequent or each on its own.
pub(super) fn run(counts: &[f64], noise: f64, users: f64) -> (f64, std::ops::Range<usize>) {
    let (mut logs, mut best) = (Vec::new(), (f64::NEG_INFINITY, 0..2));
    for length in 2..=counts.len().min(10) {
        for start in 0..=counts.len() - length {
            // Short runs that begin with 0 or 1 are usual.
            let usual = -(length as f64).ln() - if (1..=2).contains(&start) { 0.0 } else { 3.0 };
            let own = &counts[start..start + length];
            let ways = [together(own, noise, users), apart(own, noise, users)];
            let log = usual + log_sum(ways.into_iter()) - std::f64::consts::LN_2;
            if log > best.0 {
                best = (log, start..start + length);
            }
            logs.push((usual, log));
        }
    }
    let prior = log_sum(logs.iter().map(|(usual, _)| *usual));
    (log_sum(logs.iter().map(|(_, log)| *log)) - prior, best.1)
}

#[cfg(test)]
mod tests {
    use super::super::survey::number_bounds;
    use super::*;

    /// Counts of so many numbers with noise of this deviation, from a fixed seed.
    fn noisy(numbers: impl Iterator<Item = f64>, noise: f64, seed: u64) -> Vec<f64> {
        let mut counts = vec![0.0; NUMBERS];
        numbers.for_each(|number| counts[number_cell(number)] += 1.0);
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut uniform = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
        };
        let mut draw = || normal(uniform());
        counts.iter_mut().for_each(|count| *count += noise * draw());
        counts
    }

    /// Where the numbers of a column lie, as it is found under many noises: how often the centre is near and the scale within a factor,
    /// of which a larger one does less harm.
    fn found(numbers: &[f64], noise: f64) -> usize {
        let count = numbers.len() as f64;
        let mean = numbers.iter().sum::<f64>() / count;
        let spread = (numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count).sqrt();
        (0..40)
            .filter(|seed| {
                let counts = noisy(numbers.iter().copied(), noise, seed + 1);
                let Range { middle, spread: scale, .. } =
                    Family::fixed(1).read(&counts, noise, count, None).range;
                (0.4..6.0).contains(&(scale / spread)) && (middle - mean).abs() < 1.5 * scale.max(spread)
            })
            .count()
    }

    #[test]
    fn scales_are_found_where_no_cell_can_be_told_from_noise() {
        let points = |of: &dyn Fn(f64) -> f64| -> Vec<f64> {
            (0..300).map(|at| of(normal((f64::from(at) + 0.5) / 300.0))).collect()
        };
        // In each of 141 cells the noise is a fifteenth of the users.
        let kinds = [
            points(&|z| z),
            points(&|z| 0.05 * z),
            points(&|z| 45.0 + 14.0 * z),            // ages
            points(&|z| 30_000.0 * (0.7 * z).exp()), // incomes
        ];
        let right = |noise| kinds.iter().map(|numbers| found(numbers, noise)).collect::<Vec<_>>();
        let (clear, loud) = (right(20.0), right(400.0));
        // Three in four of all, and more than half of each kind.
        assert!(clear.iter().sum::<usize>() >= 120 && clear.iter().all(|right| *right > 20), "{clear:?}");
        // Power: in louder noise they are not.
        assert!(loud.iter().all(|right| *right < 24), "{loud:?}");
    }

    /// Numbers around zero are spread over many cells, and the noise of each counts.
    #[test]
    fn coarse_cells_tell_scales_that_fine_ones_do_not() {
        let points: Vec<f64> = (0..300).map(|at| 700.0 * normal((f64::from(at) + 0.5) / 300.0)).collect();
        let noise = 45.0;
        let right = |width: usize| {
            let near = |seed: &u64| {
                let mut counts = vec![0.0; NUMBERS];
                let cells: Vec<f64> = noisy(std::iter::empty(), noise, seed + 1);
                for (cell, noise) in cells.iter().enumerate() {
                    // Cells that are merged into others are empty and have noise that nobody looks at.
                    counts[cell] += noise;
                }
                points.iter().for_each(|point| counts[merged(number_cell(*point), width)] += 1.0);
                let Range { spread, .. } = Family::fixed(width).read(&counts, noise, 300.0, None).range;
                (0.25..6.0).contains(&(spread / 700.0))
            };
            (0..60).filter(near).count()
        };
        let (coarse, fine) = (right(COARSE_CELLS), right(1));
        assert!(coarse >= 40 && coarse > fine + 8, "{coarse} {fine} of 60");
    }

    #[test]
    fn a_column_that_is_nearly_always_zero_drowns_no_other() {
        let numbers: Vec<f64> =
            (0..300).map(|at| if at % 30 == 0 { f64::from(at % 7) } else { 0.0 }).collect();
        let scales: Vec<f64> = (0..40)
            .map(|seed| {
                let counts = noisy(numbers.iter().copied(), 40.0, seed + 1);
                Family::fixed(1).read(&counts, 40.0, 300.0, None).range.spread
            })
            .collect();
        // Its largest number is 6, and the middle is 0: no value is far out.
        assert!(scales.iter().filter(|scale| **scale > 0.75).count() >= 32, "{scales:?}");
    }

    #[test]
    fn columns_that_are_alike_help_each_other() {
        let numbers: Vec<f64> = (0..300).map(|at| f64::from(at % 17)).collect();
        let (noise, users) = (90.0, 300.0);
        let columns: Vec<Vec<f64>> =
            (0..30).map(|seed| noisy(numbers.iter().copied(), noise, seed + 1)).collect();
        let family = Family::fixed(1);
        let prior = family.learned(&columns, noise, users);
        let right = |prior: Option<&[f64]>| {
            let near = |counts: &&Vec<f64>| {
                let range = family.read(counts, noise, users, prior).range;
                (2.0..12.0).contains(&range.spread) && (2.0..16.0).contains(&range.middle)
            };
            columns.iter().filter(near).count()
        };
        assert!(right(Some(&prior)) >= 28 && right(None) < 26, "{} {}", right(Some(&prior)), right(None));
    }

    #[test]
    fn runs_and_pairs_of_classes_are_found() {
        let counts = [0.0, 110.0, 90.0, 130.0, -60.0, 40.0, 0.0, 30.0, -50.0, 10.0, 20.0];
        let (evidence, best) = run(&counts, 45.0, 330.0);
        assert!(evidence > 3.0 && best == (1..4), "{evidence} {best:?}");
        // Of classes of unequal frequency too: the rare ones at the ends are not lost.
        let (evidence, best) = run(&[5.0, 30.0, 90.0, 160.0, 40.0, 2.0, -6.0, 4.0], 8.0, 325.0);
        assert!(evidence > 10.0 && best == (1..5), "{evidence} {best:?}");
        assert!(run(&[10.0, -40.0, 30.0, 20.0, 50.0, -10.0], 45.0, 330.0).0 < 0.0);
        assert!(together(&[230.0, 70.0], 45.0, 300.0) > 8.0 && together(&[30.0, -10.0], 45.0, 300.0) < -2.0);
        let mut days = vec![0.0; DATES];
        days[31] = 200.0;
        days[32] = 90.0;
        let (evidence, range) = dates(&days, 40.0, 300.0);
        assert!(evidence > 5.0 && range.from < 19_000.0 && range.to > 19_000.0, "{evidence} {range:?}");
    }

    #[test]
    fn ranges_of_templates_hold_most_of_their_numbers() {
        for template in &Family::fixed(1).templates {
            let Range { from, to, middle, spread, .. } = template.range;
            assert!(from < to && from <= middle && middle <= to && spread > 0.0 && spread <= to - from);
            let inside = |(cell, _): &&(usize, f64)| {
                let (low, high) = number_bounds(*cell);
                high >= from && low <= to
            };
            let share: f64 = template.cells.iter().filter(inside).map(|(_, share)| share).sum();
            assert!(share > 0.6, "{:?} {share}", template.range);
        }
    }
}
