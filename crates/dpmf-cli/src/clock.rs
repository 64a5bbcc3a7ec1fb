//! The time in UTC, for names and records.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Now, such as `2026-01-31T09:05:00Z`.
pub fn now() -> String {
    let [year, month, day, hour, minute, second] = parts();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Now, for the name of a file, such as `20260131-090500`.
pub fn compact() -> String {
    let [year, month, day, hour, minute, second] = parts();
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

fn parts() -> [i64; 6] {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs() as i64;
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    [year, month, day, rest / 3600, rest / 60 % 60, rest % 60]
}

/// The date of a day counted from 1970, in the Gregorian calendar, whose pattern repeats every 400 years.
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468; // from the first of March of the year 0
    let (era, day) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153; // from March
    let date = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (year + era * 400 + next, month, date)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(-1), (1969, 12, 31));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(11_017), (2000, 3, 1));
        assert_eq!(civil(20_454), (2026, 1, 1));
    }
}
