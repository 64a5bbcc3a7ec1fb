//! Bisection on the floating-point numbers themselves.

/// The smallest `x` in `(lo, hi]` found with `holds(x)`, given that `holds(hi)` and not `holds(lo)`.
///
/// Guarantee: `holds` returned true at the result, or the result is `hi`. A predicate that is monotone but for
/// rounding therefore yields a point where it was checked, not one where it is hoped to hold.
/// Cost: at most 64 evaluations, since the bits are halved, not the numbers.
pub(crate) fn first_true(lo: f64, hi: f64, holds: impl Fn(f64) -> bool) -> f64 {
    let (mut lo, mut hi) = (rank(lo), rank(hi));
    while hi - lo > 1 {
        let middle = lo + (hi - lo) / 2;
        if holds(unrank(middle)) {
            hi = middle;
        } else {
            lo = middle;
        }
    }
    unrank(hi)
}

/// The place of a finite number in the order of all of them; both zeros share one.
fn rank(x: f64) -> i128 {
    let magnitude = i128::from(x.abs().to_bits());
    if x < 0.0 { -magnitude } else { magnitude }
}

fn unrank(rank: i128) -> f64 {
    let magnitude = f64::from_bits(rank.unsigned_abs() as u64);
    if rank < 0 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn finds_the_very_number(threshold in -1e3..1e3_f64) {
            prop_assert_eq!(first_true(-1e4, 1e4, |x| x >= threshold), threshold);
        }

        #[test]
        fn ranks_are_ordered_and_invertible(a in proptest::num::f64::NORMAL, b in proptest::num::f64::NORMAL) {
            prop_assert_eq!(a < b, rank(a) < rank(b));
            prop_assert_eq!(unrank(rank(a)), a);
        }
    }

    #[test]
    fn tiny_thresholds_are_resolved_relatively() {
        let calls = std::cell::Cell::new(0);
        let x = first_true(0.0, 1e4, |x| {
            calls.set(calls.get() + 1);
            x >= 1e-200
        });
        assert_eq!(x, 1e-200);
        assert!(calls.get() <= 64);
    }
}
