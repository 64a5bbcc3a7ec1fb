//! Axes: where a value lies, and which values are marked.

/// Numbers below count as zero and above its reciprocal as infinite: the ends of an axis, margins included, have a finite
/// ratio.
const LEAST: f64 = 1e-140;

/// A linear or logarithmic axis.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    log: bool,
}

/// A mark on an axis, without a label if it only divides.
#[derive(Debug)]
pub(super) struct Tick {
    /// Where: 0 is the low end of the axis, 1 the high.
    pub place: f64,
    pub label: String,
}

impl Scale {
    /// A linear axis from `low` to `high`, of which either may be the larger.
    pub fn linear(low: f64, high: f64) -> Self {
        Self { low, high, log: false }
    }

    /// An axis that shows all values, on a log axis all positive ones; a linear one begins at 0 if that is near.
    ///
    /// `margin` is the share of the axis left free beyond the values.
    pub fn covering(values: impl Iterator<Item = f64>, log: bool, margin: f64) -> Self {
        let empty = Self { low: 0.1, high: 1.0, log };
        let (low, high) = values
            .filter(|x| empty.shows(*x))
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
        if low > high {
            return empty;
        }
        if log {
            // By logarithms: the ratio of the ends may be no number.
            let margin = 10_f64.powf((high.log10() - low.log10()) * margin).max(1.05);
            return Self { low: low / margin, high: high * margin, log };
        }
        let size = low.abs().max(high.abs());
        if high - low <= (1e-12 * size).max(LEAST) {
            let around = if size <= LEAST { 1.0 } else { 0.1 * size };
            return Self::linear(low - around, high + around);
        }
        let margin = margin * (high - low);
        let low = if low >= 0.0 && low < 0.5 * high { 0.0 } else { low - margin };
        Self::linear(low, high + margin)
    }

    /// Whether a value has a place at all.
    pub fn shows(&self, value: f64) -> bool {
        value.abs() <= LEAST.recip() && (!self.log || value >= LEAST)
    }

    /// Where a value lies: 0 is the low end, 1 the high.
    pub fn place(&self, value: f64) -> f64 {
        if self.log {
            let low = self.low.log10();
            (value.log10() - low) / (self.high.log10() - low)
        } else {
            (value - self.low) / (self.high - self.low)
        }
    }

    /// Round values along the axis, about `wanted` of them with a label.
    pub fn ticks(&self, wanted: usize) -> Vec<Tick> {
        if self.log {
            let (first, last) = (self.low.log10().ceil() as i32, self.high.log10().floor() as i32);
            if last > first {
                return self.decades(first, last, wanted);
            }
            let labels = [1.0, 2.0, 5.0];
            let values: Vec<f64> = (first - 1..=last)
                .flat_map(|exponent| labels.map(|digit| digit * 10_f64.powi(exponent)))
                .filter(|value| (self.low..=self.high).contains(value))
                .collect();
            if values.len() >= 3 {
                return values.into_iter().map(|value| self.tick(value, 0.0)).collect();
            }
        }
        let (low, high) = (self.low.min(self.high), self.low.max(self.high));
        let step = round_step((high - low) / wanted.max(1) as f64);
        let (first, last) = ((low / step).ceil(), (high / step).floor());
        (0..=(last - first) as u32).map(|k| self.tick((first + f64::from(k)) * step, step)).collect()
    }

    /// Powers of ten, every few if there are many, with their multiples between if there are few.
    fn decades(&self, first: i32, last: i32, wanted: usize) -> Vec<Tick> {
        let stride = ((last - first) as usize / wanted.max(1) + 1) as i32;
        let plain = first >= -3 && last <= 4;
        let mut ticks = Vec::new();
        for exponent in first - 1..=last {
            let power = 10_f64.powi(exponent);
            if exponent >= first && exponent.rem_euclid(stride) == 0 {
                let label = match exponent {
                    2.. | ..0 if !plain => format!("10{}", superscript(exponent)),
                    _ => label(power, 0.0, power),
                };
                ticks.push(Tick { place: self.place(power), label });
            }
            if last - first <= 4 {
                let between = (2..10).map(|digit| f64::from(digit) * power);
                let inside = between.filter(|value| (self.low..=self.high).contains(value));
                ticks.extend(inside.map(|value| Tick { place: self.place(value), label: String::new() }));
            }
        }
        ticks
    }

    fn tick(&self, value: f64, step: f64) -> Tick {
        let largest = self.low.abs().max(self.high.abs());
        Tick { place: self.place(value), label: label(value, step, largest) }
    }
}

/// The nearest of 1, 2, 5 times a power of ten.
fn round_step(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    // Nearest in ratio: the limits are geometric means of neighbours.
    power
        * match step / power {
            digit if digit < 2_f64.sqrt() => 1.0,
            digit if digit < 10_f64.sqrt() => 2.0,
            digit if digit < 50_f64.sqrt() => 5.0,
            _ => 10.0,
        }
}

/// A number with the digits that tell steps apart; `step` 0 if it has one digit.
fn label(value: f64, step: f64, largest: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let size = if step > 0.0 { largest } else { value.abs() };
    let unit = if step > 0.0 { step } else { value.abs() };
    let exponent = exponent_of(size);
    let plain = (-3..5).contains(&exponent);
    let scale = if plain { 0 } else { exponent };
    let decimals = (scale - exponent_of(unit)).max(0) as usize;
    let digits = format!("{:.decimals$}", value / 10_f64.powi(scale)).replace('-', "−");
    match (plain, digits.as_str()) {
        (true, _) => digits,
        (false, "1") => format!("10{}", superscript(scale)),
        (false, _) => format!("{digits}×10{}", superscript(scale)),
    }
}

/// `⌊log₁₀ x⌋`, of numbers a rounding error below a power of ten too.
fn exponent_of(x: f64) -> i32 {
    (x.log10() + 1e-9).floor() as i32
}

fn superscript(exponent: i32) -> String {
    const DIGITS: [char; 10] = ['⁰', '¹', '²', '³', '⁴', '⁵', '⁶', '⁷', '⁸', '⁹'];
    let digit = |c: char| c.to_digit(10).map_or('⁻', |digit| DIGITS[digit as usize]);
    exponent.to_string().chars().map(digit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn labels(scale: Scale, wanted: usize) -> Vec<String> {
        let ticks = scale.ticks(wanted).into_iter();
        ticks.map(|tick| tick.label).filter(|label| !label.is_empty()).collect()
    }

    fn linear(low: f64, high: f64) -> Scale {
        Scale::linear(low, high)
    }

    fn log(low: f64, high: f64) -> Scale {
        Scale { low, high, log: true }
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(labels(linear(0.0, 512.0), 6), ["0", "100", "200", "300", "400", "500"]);
        assert_eq!(labels(linear(-0.3, 0.9), 6), ["−0.2", "0", "0.2", "0.4", "0.6", "0.8"]);
        assert_eq!(labels(linear(0.0, 1e6), 5), ["0", "0.2×10⁶", "0.4×10⁶", "0.6×10⁶", "0.8×10⁶", "1.0×10⁶"]);
        assert_eq!(labels(linear(3.0, 0.0), 3), ["0", "1", "2", "3"]);
        assert_eq!(labels(linear(10.0, 11.0), 5), ["10.0", "10.2", "10.4", "10.6", "10.8", "11.0"]);
        assert_eq!(labels(log(5e-8, 2.0), 8), ["10⁻⁷", "10⁻⁶", "10⁻⁵", "10⁻⁴", "10⁻³", "10⁻²", "10⁻¹", "1"]);
        assert_eq!(labels(log(0.9, 2e4), 8), ["1", "10", "100", "1000", "10000"]);
        assert_eq!(labels(log(0.9, 2e5), 8), ["1", "10", "10²", "10³", "10⁴", "10⁵"]);
        assert_eq!(labels(log(1.5, 30.0), 8), ["2", "5", "10", "20"]);
        assert_eq!(labels(log(3.1, 4.3), 5), ["3.2", "3.4", "3.6", "3.8", "4.0", "4.2"]);
        assert_eq!(labels(log(1e-12, 1e12), 6), ["10⁻¹⁰", "10⁻⁵", "1", "10⁵", "10¹⁰"]);
    }

    #[test]
    fn an_axis_shows_what_it_covers() {
        let of = |values: &[f64], log| Scale::covering(values.iter().copied(), log, 0.0);
        let axis = of(&[3.0, f64::NAN, 1.0, f64::INFINITY], false);
        assert_eq!((axis.low, axis.high), (0.0, 3.0));
        let axis = of(&[90.0, 100.0], false);
        assert_eq!((axis.place(90.0), axis.place(100.0)), (0.0, 1.0));
        let axis = of(&[-1.0, 0.0, 1e-3, 10.0], true);
        assert!(axis.place(1e-3) >= 0.0 && axis.place(10.0) <= 1.0 && !axis.shows(-1.0));
        assert_eq!(of(&[7.0], false).place(7.0), 0.5);
        assert!(!of(&[], false).ticks(5).is_empty());
        let widest = Scale::covering([LEAST, 1.0 / LEAST].into_iter(), true, 0.04);
        assert!(widest.place(1.0 / LEAST) <= 1.0 && !widest.ticks(6).is_empty());
    }

    proptest! {
        /// Whatever the numbers: marks on the axis, not many, no two alike.
        #[test]
        fn ticks_lie_on_the_axis_and_differ(a in proptest::num::f64::ANY, b in proptest::num::f64::ANY, log: bool) {
            let scale = Scale::covering([a, b].into_iter(), log, 0.04);
            let ticks = scale.ticks(6);
            prop_assert!(ticks.len() <= 60);
            prop_assert!(ticks.iter().all(|tick| (-1e-9..=1.0 + 1e-9).contains(&tick.place)), "{ticks:?}");
            let labels = labels(scale, 6);
            let mut distinct = labels.clone();
            distinct.sort();
            distinct.dedup();
            prop_assert_eq!(distinct.len(), labels.len(), "{:?}", labels);
            for value in [a, b] {
                prop_assert!(!scale.shows(value) || (-1e-9..=1.0 + 1e-9).contains(&scale.place(value)));
            }
        }
    }
}
