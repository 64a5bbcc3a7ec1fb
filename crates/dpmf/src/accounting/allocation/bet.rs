//! A bound on a mean, by bets against it.

/// Share of the values, one over this, that choose the stake.
const CHOOSING: usize = 8;

/// Stakes that are tried: halves of the largest.
const STAKES: i32 = 16;

/// The least mean at which the wealth `Π_i (1 + λ(m − X_i))` reaches `e^log`: an upper bound of the mean of independent values in
/// `[0, range]` that fails with a probability of at most `e^{−log}`.
///
/// The first eighth of the values chooses λ and is not bet on. Each value counts as `repeats`: with 1 this is a bound, with more
/// it is what as many more values would be expected to give.
///
/// Reference: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", 2024.
pub(crate) fn upper(values: &[f64], range: f64, log: f64, repeats: f64) -> f64 {
    let (first, rest) = values.split_at(values.len() / CHOOSING);
    let [first, rest] = [first, rest].map(Values::new);
    let scale = repeats * rest.count / first.count.max(1.0);
    let of = |stake: f64| (stake, first.upper(stake, log / scale));
    let stakes = (0..STAKES).map(|k| of(0.5_f64.powi(k) / range));
    let best = stakes.min_by(|a, b| a.1.total_cmp(&b.1)).map_or(0.5 / range, |(stake, _)| stake);
    rest.upper(best, log / repeats)
}

/// Values, of which most may be zero.
struct Values {
    positive: Vec<f64>,
    count: f64,
    mean: f64,
}

impl Values {
    fn new(values: &[f64]) -> Self {
        let positive: Vec<f64> = values.iter().copied().filter(|x| *x > 0.0).collect();
        let count = values.len() as f64;
        let mean = positive.iter().sum::<f64>() / count.max(1.0);
        Self { positive, count, mean }
    }

    /// The logarithm of the wealth at a mean, and its derivative.
    fn wealth(&self, stake: f64, mean: f64) -> (f64, f64) {
        let zeros = self.count - self.positive.len() as f64;
        let at_zero = 1.0 + stake * mean;
        let (mut log, mut slope) = (zeros * (stake * mean).ln_1p(), zeros * stake / at_zero);
        // Products of a few factors spare logarithms.
        for chunk in self.positive.chunks(8) {
            let mut product = 1.0;
            for x in chunk {
                // Not below the stake times the mean: no value exceeds the range.
                let factor = (1.0 + stake * (mean - x)).max(stake * mean);
                product *= factor;
                slope += stake / factor;
            }
            log += product.ln();
        }
        (log, slope)
    }

    /// The least mean, a little above it, at which the logarithm of the wealth is as large as asked.
    fn upper(&self, stake: f64, log: f64) -> f64 {
        // The wealth is a concave function of the mean: its tangents lead up to the root and not beyond it.
        let mut mean = self.mean.max(1e-300);
        for _ in 0..100 {
            let (wealth, slope) = self.wealth(stake, mean);
            if wealth >= log {
                return mean;
            }
            mean += (log - wealth) / slope + 1e-9 * mean;
        }
        f64::INFINITY
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::game::rng;
    use rand::RngExt;

    /// Values that are rarely large: 0, 0.01 or 1.
    fn rare(seed: u64, count: usize, rate: f64) -> Vec<f64> {
        let mut rng = rng(seed, 0);
        let value = |u: f64| {
            if u < rate {
                1.0
            } else if u < 0.5 {
                0.01
            } else {
                0.0
            }
        };
        (0..count).map(|_| value(rng.random::<f64>())).collect()
    }

    #[test]
    fn a_bound_fails_no_more_often_than_it_says() {
        // A failure probability of 5 %, where an error of the bound would be seen: 400 runs, at most 20 expected.
        let (rate, runs) = (1e-3, 400);
        let mean = rate + 0.01 * (0.5 - rate);
        let bounds = |shift: f64| {
            let below = |seed: &u64| upper(&rare(*seed, 4000, rate), 1.0, 20.0_f64.ln(), 1.0) - shift < mean;
            (0..runs).filter(below).count()
        };
        // Less than four standard deviations above what is allowed.
        assert!(bounds(0.0) <= 38, "{}", bounds(0.0));
        // The power of it: a bound that is lower by what it usually adds fails half of the time.
        assert!(bounds(2.6e-3) > 38, "{}", bounds(2.6e-3));
    }

    #[test]
    fn bounds_are_near_where_values_are() {
        let values = rare(3, 1 << 16, 1e-3);
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let bound = upper(&values, 1.0, 28.0, 1.0);
        assert!(bound > mean && bound < 1.3 * mean, "{bound} {mean}");
        // Nothing but zeros: log/n of the range, and a little.
        let nothing = upper(&[0.0; 8000], 2.0, 28.0, 1.0);
        assert!(nothing > 2.0 * 28.0 / 7000.0 && nothing < 2.1 * 28.0 / 7000.0, "{nothing}");
        // Values at the top are bounded by the top.
        assert!(upper(&[1.0; 8000], 1.0, 28.0, 1.0) >= 1.0);
        // As many values as there were, counted for more.
        assert!(upper(&values, 1.0, 28.0, 4.0) < bound);
    }
}
