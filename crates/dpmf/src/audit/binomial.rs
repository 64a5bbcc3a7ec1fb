//! Exact confidence limits for a probability, from a count.

/// Clopper–Pearson upper limit: the largest `p` that does not make `successes` or fewer out of `trials` rarer
/// than `tail`.
///
/// Guarantee: covers the true probability with confidence at least `1 − tail`; rounded up.
/// Cost: O(√trials) for each of about 50 evaluations of a binomial tail.
///
/// Reference: \[CP34\].
pub fn upper_limit(successes: u64, trials: u64, tail: f64) -> f64 {
    debug_assert!(successes <= trials && tail > 0.0 && tail < 1.0);
    if successes >= trials {
        return 1.0;
    }
    // ln Γ of a count errs by up to 1e-16 of a number near 1e10; a slightly smaller tail covers that.
    let target = (tail * (1.0 - 1e-5)).ln();
    let (mut lo, mut hi) = (successes as f64 / trials as f64, 1.0);
    // ln P(X ≤ k) falls from about ln ½ to −∞; hi always lies on the far side, so it is the safe answer.
    while hi - lo > 1e-12 * hi {
        let middle = 0.5 * (lo + hi);
        if middle <= lo || middle >= hi {
            break;
        }
        if ln_lower_tail(successes, trials, middle) > target {
            lo = middle;
        } else {
            hi = middle;
        }
    }
    hi
}

/// `ln P(X ≤ k)` for `X` binomial with `p > k/n`, summed from the largest term down.
fn ln_lower_tail(k: u64, n: u64, p: f64) -> f64 {
    if p >= 1.0 {
        return f64::NEG_INFINITY;
    }
    let (count, size) = (k as f64, n as f64);
    let ln_choose = libm::lgamma(size + 1.0) - libm::lgamma(count + 1.0) - libm::lgamma(size - count + 1.0);
    let ln_first = ln_choose + count * p.ln() + (size - count) * libm::log1p(-p);
    let odds = (1.0 - p) / p;
    let (mut term, mut sum) = (1.0, 1.0);
    let mut i = count;
    while i > 0.0 {
        term *= i * odds / (size - i + 1.0);
        sum += term;
        if term < 1e-17 * sum {
            break;
        }
        i -= 1.0;
    }
    ln_first + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn closed_forms() {
        // No success: (1 − p)ⁿ = tail. All but one of one and two trials: 1 − p = tail, 1 − p² = tail.
        assert!((upper_limit(0, 1, 0.05) - 0.95).abs() < 1e-5);
        assert!((upper_limit(0, 100, 0.001) - (1.0 - 0.001_f64.powf(0.01))).abs() < 1e-6);
        assert!((upper_limit(1, 2, 0.05) - 0.95_f64.sqrt()).abs() < 1e-6);
        assert_eq!(upper_limit(3, 3, 0.05), 1.0);
    }

    #[test]
    fn published_values() {
        // scipy 1.17: beta.ppf(1 − tail, k + 1, n − k).
        for (k, n, tail, expected) in SCIPY {
            let limit = upper_limit(k, n, tail);
            assert!(
                limit >= expected * (1.0 - 1e-12) && limit < expected * (1.0 + 1e-5),
                "{k}/{n}: {limit} {expected}"
            );
        }
    }

    const SCIPY: [(u64, u64, f64, f64); 6] = [
        (0, 500000, 0.0005, 1.52016893722335e-05),
        (7, 500000, 0.0005, 4.1307509698433e-05),
        (226000, 500000, 0.0005, 0.454317719024501),
        (167000, 500123, 0.0005, 0.33611572755266),
        (499990, 500000, 0.0005, 0.999994601899775),
        (50, 1000, 0.025, 0.0653904879154936),
    ];

    proptest! {
        #[test]
        fn the_limit_solves_the_tail(n in 1_u64..200, fraction in 0.0..1.0_f64, tail in 1e-6..0.4_f64) {
            let k = (n as f64 * fraction) as u64;
            prop_assume!(k < n);
            let p = upper_limit(k, n, tail);
            // Brute force over all outcomes: C(n, i) pⁱ (1 − p)ⁿ⁻ⁱ with the coefficient built up in logarithms.
            let (mut ln_choose, mut sum) = (0.0, 0.0);
            for i in 0..=k {
                sum += (ln_choose + i as f64 * p.ln() + (n - i) as f64 * (1.0 - p).ln()).exp();
                ln_choose += ((n - i) as f64 / (i + 1) as f64).ln();
            }
            prop_assert!((sum / tail - 1.0).abs() < 1e-3, "{sum} {tail}");
            prop_assert!(sum <= tail * (1.0 + 1e-9));
        }
    }
}
