//! What one field of a table says: nothing, a number, a date, or a word.

use serde::{Deserialize, Serialize};

use super::rows::Cell;

/// How numbers are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decimal {
    /// Digits with a point, as programs write them: `-1234.5`, `1e-3`.
    #[default]
    Plain,
    /// As people write them with a decimal point: `1,234.50`, `$ 3.20`, `12 %`.
    Point,
    /// As people write them with a decimal comma: `1.234,50`, `€ 3,20`, `12 %`.
    Comma,
}

impl Decimal {
    /// Whether numbers are written as programs write them.
    pub fn is_plain(&self) -> bool {
        *self == Self::Plain
    }

    /// A finite number, if the text is one.
    pub(super) fn number(self, text: &str) -> Option<f64> {
        let text = text.trim();
        match self {
            Self::Plain => text.parse().ok().filter(|value: &f64| value.is_finite()),
            Self::Point => Self::Plain.number(text).or_else(|| grouped(text, ',', '.')),
            Self::Comma => grouped(text, '.', ','),
        }
    }

    /// Whether a text is a number that another [`Decimal`] would read.
    fn misses(self, text: &str) -> bool {
        let others = [Self::Point, Self::Comma];
        self.number(text).is_none() && others.into_iter().any(|other| other.number(text).is_some())
    }
}

/// A number with groups of three digits, a currency or a percent sign around it.
fn grouped(text: &str, group: char, point: char) -> Option<f64> {
    const SIGNS: [char; 7] = ['€', '$', '£', '¥', '₹', '%', '‰'];
    let blank = |c: char| c.is_whitespace() || c == '\u{a0}' || c == '\u{202f}';
    let mut text = text.trim_matches(|c| blank(c) || SIGNS.contains(&c));
    let mut negative = false;
    if let Some(rest) = text.strip_prefix(['-', '−', '+']) {
        negative = !text.starts_with('+');
        text = rest.trim_start_matches(|c| blank(c) || SIGNS.contains(&c));
    }
    let (whole, fraction) = text.split_once(point).unwrap_or((text, ""));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let apart = |c: char| c == group || blank(c) || c == '\'' || c == '’';
    let groups: Vec<&str> = whole.split(apart).collect();
    let (first, rest) = groups.split_first()?;
    let fits = rest.is_empty() || (first.len() <= 3 && rest.iter().all(|group| group.len() == 3));
    if !(digits(first) && rest.iter().all(|group| digits(group)) && fits)
        || !(fraction.is_empty() || digits(fraction))
    {
        return None;
    }
    let value: f64 = format!("{}.{fraction}0", groups.concat()).parse().ok()?;
    Some(if negative { -value } else { value })
}

/// Days since 1970-01-01, with the time of day as their fraction, if the text is a date: `2024-05-01`, `2024/05/01`, `01.05.2024`,
/// each with or without a time, as in `2024-05-01T12:30:00Z`. A zone is taken off, so that the days are those of Greenwich.
pub(super) fn date(text: &str) -> Option<f64> {
    let text = text.trim();
    if !(8..=40).contains(&text.len()) || !text.is_ascii() {
        return None;
    }
    let (day, time) = match text.find(['T', 't', ' ']) {
        Some(at) => (&text[..at], text[at + 1..].trim()),
        None => (text, ""),
    };
    let number = |text: &str, longest: usize| -> Option<i64> {
        let digits = !text.is_empty() && text.len() <= longest && text.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| text.parse().ok()).flatten()
    };
    let mark = day.chars().find(|c| ['-', '/', '.'].contains(c))?;
    let parts: Vec<&str> = day.split(mark).collect();
    let [first, month, last] = parts[..] else { return None };
    let (year, last) = match mark {
        '.' => (last, first),
        _ => (first, last),
    };
    if year.len() != 4 {
        return None;
    }
    let (year, month, last) = (number(year, 4)?, number(month, 2)?, number(last, 2)?);
    let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    let length = [31, 28 + i64::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let longest = length.get(usize::try_from(month - 1).ok()?)?;
    if !(1..=*longest).contains(&last) {
        return None;
    }
    let days = days(year, month, last);
    Some(days as f64 + if time.is_empty() { 0.0 } else { time_of_day(time)? })
}

/// Days from 1970-01-01 to a date of the Gregorian calendar, whose years are taken to begin in March.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// A moment so many ticks after 1970-01-01 began, as it is written.
pub(super) fn moment(count: i64, ticks: i64) -> String {
    let seconds = count.div_euclid(ticks);
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // The inverse of `days`.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + 400 * era + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let rest = count.rem_euclid(ticks) as f64 / ticks as f64;
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{:09.6}Z", second as f64 + rest)
}

/// The share of a day that a time with an optional zone is, in Greenwich.
fn time_of_day(text: &str) -> Option<f64> {
    let (clock, zone) = match text.find(['Z', 'z', '+', '-']) {
        Some(at) => (text[..at].trim(), text[at..].trim()),
        None => (text, ""),
    };
    let minutes = |text: &str| -> Option<f64> {
        let (hours, minutes) = match text.split_once(':') {
            Some(parts) => parts,
            None if text.len() == 4 => text.split_at(2),
            None => (text, "0"),
        };
        let two = |text: &str, below: u32| text.parse().ok().filter(|n: &u32| *n < below && text.len() <= 2);
        Some(f64::from(two(hours, 25)? * 60 + two(minutes, 60)?))
    };
    let offset = match zone.chars().next() {
        None | Some('Z' | 'z') if zone.len() <= 1 => 0.0,
        Some('+') => minutes(&zone[1..])?,
        Some('-') => -minutes(&zone[1..])?,
        _ => return None,
    };
    let mut parts = clock.splitn(3, ':');
    let (hours, rest) = (parts.next()?, parts.next()?);
    let seconds: f64 = parts.next().map_or(Some(0.0), |text| text.parse().ok())?;
    if !(0.0..61.0).contains(&seconds) {
        return None;
    }
    Some((minutes(&format!("{hours}:{rest}"))? - offset) / 1440.0 + seconds / 86_400.0)
}

/// Whether a field says that there is nothing.
pub(super) fn is_missing(cell: Cell<'_>) -> bool {
    let text = cell.unwrap_or("").trim();
    text.is_empty()
        || ["na", "n/a", "<na>", "nan", "null", "none"].contains(&text.to_ascii_lowercase().as_str())
}

/// What a field says.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Field {
    Missing,
    Number(f64),
    /// Days since 1970-01-01.
    Date(f64),
    /// A number that is written as another [`Decimal`] would.
    Formatted,
    Word(Box<str>),
}

impl Field {
    pub(super) fn read(cell: Cell<'_>, decimal: Decimal) -> Self {
        if is_missing(cell) {
            return Self::Missing;
        }
        let text = cell.unwrap_or("").trim();
        if let Some(number) = decimal.number(text) {
            return Self::Number(number);
        }
        if let Some(days) = date(text) {
            return Self::Date(days);
        }
        match decimal.misses(text) {
            true => Self::Formatted,
            false => Self::Word(text.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_people_write_them() {
        for (text, plain, point, comma) in [
            ("12.5", Some(12.5), Some(12.5), None),
            (" -3 ", Some(-3.0), Some(-3.0), Some(-3.0)),
            ("1,234.50", None, Some(1234.5), None),
            ("1.234,50", None, None, Some(1234.5)),
            ("1.234", Some(1.234), Some(1.234), Some(1234.0)),
            ("€ 3,20", None, None, Some(3.2)),
            ("-$1,000", None, Some(-1000.0), Some(-1.0)),
            ("12 %", None, Some(12.0), Some(12.0)),
            ("1 234 567", None, Some(1_234_567.0), Some(1_234_567.0)),
            ("12,34.5", None, None, None),
            ("Bonn", None, None, None),
            ("€", None, None, None),
            ("inf", None, None, None),
        ] {
            let read = [Decimal::Plain, Decimal::Point, Decimal::Comma].map(|decimal| decimal.number(text));
            assert_eq!(read, [plain, point, comma], "{text:?}");
        }
        assert_eq!(Field::read(Some("€ 3,20"), Decimal::Plain), Field::Formatted);
        assert_eq!(Field::read(Some("€ 3,20"), Decimal::Comma), Field::Number(3.2));
        assert_eq!(Field::read(Some("a,b"), Decimal::Plain), Field::Word("a,b".into()));
        assert_eq!(Field::read(Some(" NA"), Decimal::Plain), Field::Missing);
    }

    #[test]
    fn moments_are_written_and_read() {
        assert_eq!(moment(0, 1000), "1970-01-01T00:00:00.000000Z");
        // Python: datetime(2024, 2, 29, 23, 59, 58, 250000, tzinfo=utc).timestamp()
        assert_eq!(moment(1_709_251_198_250_000, 1_000_000), "2024-02-29T23:59:58.250000Z");
        assert_eq!(moment(-1, 1), "1969-12-31T23:59:59.000000Z");
        for days in [-25_568, -1, 0, 59, 60, 19_782, 30_000] {
            assert_eq!(date(&moment(days * 86_400, 1)), Some(days as f64));
        }
    }

    #[test]
    fn dates_are_days() {
        // Python: (date(y, m, d) - date(1970, 1, 1)).days
        for (text, days) in [
            ("1970-01-01", Some(0.0)),
            ("2024-02-29", Some(19_782.0)),
            ("1899-12-31", Some(-25_568.0)),
            ("2000/03/01", Some(11_017.0)),
            ("01.03.2000", Some(11_017.0)),
            ("2024-05-01T12:00:00Z", Some(19_844.5)),
            ("2024-05-01 12:00", Some(19_844.5)),
            ("2024-05-01T12:00:00.000 +06:00", Some(19_844.25)),
            ("2024-05-01T12:00:00-0600", Some(19_844.75)),
            ("2023-02-29", None),
            ("2023-13-01", None),
            ("05/01/2024", None),
            ("1.5.2024x", None),
            ("2024-05-01T25:70", None),
            ("12.5", None),
            ("2024-05", None),
        ] {
            assert_eq!(date(text), days, "{text:?}");
        }
    }
}
