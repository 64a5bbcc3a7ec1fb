//! Rényi differential privacy on a grid of integer orders: the route by which the paper's ε were computed.

use super::interval::Interval;
use super::{check_delta, check_epsilon, check_positive, search, shown, zcdp};
use crate::error::{Error, Result};
use std::ops::RangeInclusive;

/// The orders of the grid.
pub const ORDERS: RangeInclusive<u32> = 2..=512;

/// Rényi divergence of order α of a μ-Gaussian mechanism, `αμ²/2`.
///
/// Guarantee: rounded up.
/// Errors: `μ` not positive and finite, order not above 1 or not finite.
///
/// Reference: Proposition 7 of \[Mir17\].
pub fn divergence(mu: f64, order: f64) -> Result<f64> {
    check_positive("mu", mu)?;
    if !(order > 1.0 && order.is_finite()) {
        return Err(Error::argument("order", order, "a Rényi order must be finite and above 1"));
    }
    Ok((Interval::exact(mu).square() * order * 0.5).hi)
}

/// Smallest ε that one of the integer orders 2…512 proves for a μ-Gaussian mechanism at δ.
///
/// Guarantee: rounded up; never below the zCDP conversion, which has all real orders.
/// Errors: `μ` not positive and finite, or so large that ε overflows; δ outside (0, 1).
pub fn epsilon(mu: f64, delta: f64) -> Result<f64> {
    check_positive("mu", mu)?;
    check_delta(delta)?;
    let (square, ln_delta) = (Interval::exact(mu).square(), Interval::exact(delta).ln());
    let at = |order: u32| {
        let order = f64::from(order);
        zcdp::epsilon_at_order(order, square * order * 0.5, ln_delta).hi
    };
    let epsilon = ORDERS.map(at).fold(f64::INFINITY, f64::min).max(0.0);
    if epsilon.is_infinite() {
        return Err(Error::argument("mu", shown(mu), "its epsilon is too large to be a number"));
    }
    Ok(epsilon)
}

/// Smallest δ that one of the integer orders 2…512 proves for a μ-Gaussian mechanism at ε.
///
/// Guarantee: rounded up; at most 1 and never zero.
/// Errors: `μ` or ε not positive and finite.
pub fn delta(mu: f64, epsilon: f64) -> Result<f64> {
    check_positive("mu", mu)?;
    check_epsilon(epsilon)?;
    let square = Interval::exact(mu).square();
    let at = |order: u32| {
        let order = f64::from(order);
        zcdp::ln_delta_at_order(order, square * order * 0.5, epsilon).hi
    };
    let ln = ORDERS.map(at).fold(f64::INFINITY, f64::min);
    Ok(Interval::exact(ln).exp().hi.min(1.0))
}

/// Largest μ whose [`epsilon`] at δ is at most the given ε.
///
/// Guarantee: rounded down; `epsilon(result, delta) ≤ epsilon` as evaluated.
/// Errors: ε not positive and finite, δ outside (0, 1); an ε so small that no order of the grid proves it
/// at this δ for any noise.
pub fn mu(epsilon: f64, delta: f64) -> Result<f64> {
    check_epsilon(epsilon)?;
    check_delta(delta)?;
    let holds = |mu: f64| self::epsilon(mu, delta).is_ok_and(|e| e <= epsilon);
    let mut below = super::paper::mu(epsilon, delta)?;
    let mut above = 2.0 * below;
    while holds(above) && above < f64::MAX / 4.0 {
        above *= 2.0;
    }
    // Unlike the other accountants' bounds, the grid's ε does not vanish with μ.
    while !holds(below) {
        below *= 0.5;
        if below < 1e-150 {
            return Err(Error::argument(
                "epsilon",
                epsilon,
                "Rényi orders up to 512 cannot prove so small an epsilon at this delta; use the exact accountant",
            ));
        }
    }
    Ok(-search::first_true(-above, -below, |negative| holds(-negative)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn golden_column_of_the_paper() {
        // golden/PROVENANCE.md, ε of the Gaussian mechanism by integer Rényi orders; the paper
        // prints 18.9, 8.2, 3.7, 1.7, 0.8.
        let rows = [(0.341, 18.853), (0.682, 8.155), (1.364, 3.693), (2.728, 1.726), (5.456, 0.820)];
        for (sigma, expected) in rows {
            let epsilon = epsilon(1.0 / sigma, 1e-6).unwrap();
            assert!((epsilon - expected).abs() < 6e-4, "{sigma}: {epsilon}");
        }
    }

    #[test]
    fn both_ends_of_the_grid_are_used() {
        // dp-accounting 0.6.0, RdpAccountant(orders=range(2, 513)): the best orders are 512 and 2.
        for (sigma, expected) in [(200.0, 0.01927311767481263), (0.1, 112.42921619684437)] {
            let epsilon = epsilon(1.0 / sigma, 1e-6).unwrap();
            assert!((epsilon / expected - 1.0).abs() < 1e-12, "{sigma}: {epsilon}");
        }
    }

    proptest! {
        #[test]
        fn the_grid_never_beats_all_real_orders(ln_mu in -7.0..3.0_f64, exponent in -300.0..-0.3_f64) {
            let (m, d) = (ln_mu.exp(), 10f64.powf(exponent));
            let e = epsilon(m, d).unwrap();
            prop_assert!(zcdp::epsilon(zcdp::rho(m).unwrap(), d).unwrap() <= e);
            prop_assert!(delta(m, e.max(1e-9)).unwrap() <= d * (1.0 + 1e-6));
            if let Ok(back) = mu(e.max(1e-9), d) {
                prop_assert!(epsilon(back, d).unwrap() <= e.max(1e-9));
                prop_assert!(back >= m * (1.0 - 1e-12));
            }
        }
    }

    #[test]
    fn bad_input_is_named() {
        assert!(divergence(1.0, 1.0).unwrap_err().to_string().starts_with("order is 1,"));
        assert!((divergence(2.0, 3.0).unwrap() - 6.0).abs() < 1e-14);
        assert!(epsilon(-1.0, 1e-6).unwrap_err().to_string().starts_with("mu is -1,"));
        assert!(epsilon(1.0, f64::NAN).unwrap_err().to_string().starts_with("delta is NaN,"));
        assert!(mu(1e-3, 1e-300).unwrap_err().to_string().contains("cannot prove"));
    }
}
