//! A privacy filter: a rule that holds a budget although every release may depend on what earlier ones showed.
//!
//! Exact composition multiplies privacy loss distributions that are fixed in advance. Where the next mechanism is chosen by
//! looking at earlier releases, the total of *every* path can satisfy (ε, δ) by exact composition while the mixture of paths
//! does not. A filter needs a quantity that only adds up along each path. There are two here, and the budget holds
//! a history if either does; each has a part of δ.
//!
//! With `H_t(P‖Q) = ∫(dP − t dQ)₊`, so that `δ(ε) = H_{e^ε}`, and `G_s` the pair `N(√s, 1)`, `N(0, 1)`:
//!
//! *Gaussian.* A release costs `(s, a)` if `H_t ≤ H_t(G_s) + a` for every `t ≥ 0`. Costs add up: if everything after a
//! release costs at most `(s′, a′)`, whatever the release showed, then with `r` its likelihood ratio
//! `H_t ≤ E_Q[r (H_{t/r}(G_{s′}) + a′)] ≤ H_t(M × G_{s′}) + a′ = E_{G_{s′}}[r H_{t/r}(M)] + a′ ≤ H_t(G_s × G_{s′}) + a + a′`,
//! and `G_s × G_{s′}` is `G_{s+s′}`. By induction from the last release, a history that costs at most `(S, A)` on every path
//! satisfies (ε, δ) if `H_{e^ε}(G_S) + A ≤ δ`. For Gaussian releases `s = μ²` and `a = 0`: nothing is lost.
//!
//! *Rényi.* At one order α, fixed in advance, `E_Q[r^α]` multiplies, so that divergences add up along every path.
//!
//! *Either.* Stop the history where the first rule would be broken, and where the second would: every path that ends with one
//! of the rules intact is a path of one of the two stopped histories. Hence δ of the history is at most the sum of theirs.
//!
//! Only `t ≥ 1` has to be looked at, since both orders of neighbours satisfy the same curve and
//! `H_t(P‖Q) = 1 − t + t H_{1/t}(Q‖P)`.
//!
//! Reference: \[ST22\] and \[KTH23\] for Gaussian filters, \[FZ21\] and \[Lec21\] for Rényi filters, \[RRUV16\] for filters as such,
//! \[MTZ19\] for the order of the two directions of sampled Gaussians.

use super::interval::Interval;
use super::{Phase, PrivacyCurve, check_delta, check_epsilon, gaussian, normal, search, zcdp};
use crate::error::Result;
use rayon::prelude::*;

/// The parts of δ: of the Gaussian rule's curve, of its `a`, and of the Rényi rule.
const PARTS: [f64; 3] = [0.8, 0.05, 0.15];
/// The order of the Rényi rule over the one that is best for Gaussians: sampled steps have heavier tails and want less.
const LOWER_ORDER: f64 = 0.75;
/// Points of a curve before and after the places that decide are refined.
const COARSE: usize = 16;
const FINE: usize = 36;
/// The last point of a curve has a δ of so much of `A`: no release is seen to cost less.
const LAST: f64 = 1e-4;

/// A privacy filter for one budget.
///
/// Guarantee: a history of releases, each chosen with knowledge of all earlier ones, satisfies the budget's (ε, δ) if
/// [`Filter::epsilon`] of the sum of its costs is at most ε on every path.
#[derive(Clone, Debug, PartialEq)]
pub struct Filter {
    epsilon: f64,
    /// `S` and the δ it holds at; `A`.
    gaussian: f64,
    gaussian_delta: f64,
    slack: f64,
    /// α, and the logarithm of the δ that is its part.
    order: u32,
    ln_renyi_delta: Interval,
}

/// The cost of a release, which is taken from a budget. Costs of one filter add up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// The smallest `c` for which the release costs at most `(cS, cA)`.
    pub share: f64,
    /// Rényi divergence at the filter's order; infinite where none is known.
    pub divergence: f64,
}

impl std::ops::Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let up = |a: f64, b: f64| if a == 0.0 || b == 0.0 { a + b } else { (a + b).next_up() };
        Self { share: up(self.share, other.share), divergence: up(self.divergence, other.divergence) }
    }
}

/// A place on a privacy curve: no more than δ at ε.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    epsilon: f64,
    delta: f64,
}

impl Filter {
    /// The filter of a budget.
    ///
    /// Errors: ε not positive and finite, δ outside (0, 1), or a budget too small for numbers.
    pub fn new(epsilon: f64, delta: f64) -> Result<Self> {
        check_epsilon(epsilon)?;
        check_delta(delta)?;
        let [gaussian_delta, slack, renyi] = PARTS.map(|part| (part * delta).next_down());
        check_delta(slack)?;
        let mu = gaussian::mu(epsilon, gaussian_delta)?;
        let ln_renyi_delta = Interval::exact(renyi).ln();
        let order = (LOWER_ORDER * best_order(epsilon, renyi)?).round().clamp(2.0, 512.0) as u32;
        Ok(Self {
            epsilon,
            gaussian: Interval::exact(mu).square().lo,
            gaussian_delta,
            slack,
            order,
            ln_renyi_delta,
        })
    }

    /// How much of the budget's ε a total cost has used: above the budget's if, and only if, the filter does not hold it.
    ///
    /// For releases that were fixed in advance it is an ε that they satisfy together at the budget's δ.
    ///
    /// Guarantee: rounded up; 0 for no cost; infinite where neither rule gives a number.
    pub fn epsilon(&self, total: Cost) -> f64 {
        if total == Cost::default() {
            return 0.0;
        }
        let by_gaussian = {
            let mu = (Interval::exact(total.share) * self.gaussian).sqrt().hi;
            let read = match total.share {
                0.0 => 0.0,
                _ => gaussian::epsilon(mu, self.gaussian_delta).unwrap_or(f64::INFINITY),
            };
            // The square root rounds up, and must not decide.
            if total.share <= 1.0 { read.min(self.epsilon) } else { read.max(self.epsilon.next_up()) }
        };
        let order = f64::from(self.order);
        let by_renyi = match total.divergence.is_finite() {
            true => zcdp::epsilon_at_order(order, Interval::exact(total.divergence), self.ln_renyi_delta).hi,
            false => f64::INFINITY,
        };
        by_gaussian.min(by_renyi).max(0.0)
    }

    /// The cost of a mechanism, computed from its privacy curve.
    ///
    /// Guarantee: rounded up.
    /// Cost: microseconds for a Gaussian; some fifty compositions for sampled steps.
    /// Errors: those of the curve.
    pub fn cost(&self, curve: &PrivacyCurve) -> Result<Cost> {
        match curve {
            PrivacyCurve::Gaussian { mu, .. } => Ok(self.gaussian_cost(*mu)),
            PrivacyCurve::Poisson(poisson) => {
                let divergence = poisson
                    .phases()
                    .iter()
                    .fold(0.0, |sum: f64, phase| (sum + divergence(phase, self.order)).next_up());
                let share =
                    self.share_of_curve(|epsilon| curve.delta(epsilon), curve.epsilon(LAST * self.slack)?)?;
                Ok(Cost { share, divergence })
            }
            PrivacyCurve::Allocation { allocation, noise_multiplier } => {
                // Whoever knows every bin sees a Gaussian.
                self.stated_cost(&[], Some(allocation.mu(*noise_multiplier)))
            }
            PrivacyCurve::Reshuffled { reshuffled, noise_multiplier } => {
                let mu = (Interval::exact(reshuffled.longest_sq()).sqrt() / *noise_multiplier).hi;
                self.stated_cost(&[], Some(mu))
            }
        }
    }

    /// The cost of a release that is only known to satisfy some pairs (ε, δ), and perhaps to be a function of a μ-Gaussian
    /// release.
    ///
    /// Guarantee: rounded up.
    /// Errors: μ not positive and finite.
    pub fn stated_cost(&self, pairs: &[[f64; 2]], mu: Option<f64>) -> Result<Cost> {
        let mut points: Vec<Point> = pairs.iter().map(|&[epsilon, delta]| Point { epsilon, delta }).collect();
        let mut cost = Cost { share: f64::INFINITY, divergence: f64::INFINITY };
        if let Some(mu) = mu {
            cost = self.gaussian_cost(mu);
            let end = gaussian::epsilon(mu, LAST * self.slack)?;
            for j in 1..=4 * COARSE {
                let epsilon = end * j as f64 / (4 * COARSE) as f64;
                if epsilon > 0.0 {
                    points.push(Point { epsilon, delta: gaussian::delta(mu, epsilon)? });
                }
            }
        }
        let order = f64::from(self.order);
        for &[epsilon, delta] in pairs {
            if delta == 0.0 {
                // Pure privacy is ε²/2-concentrated, and no divergence exceeds ε.
                let concentrated = (Interval::exact(epsilon).square() * 0.5 * order).hi;
                cost.divergence = cost.divergence.min(concentrated.min(epsilon));
            }
        }
        cost.share = cost.share.min(self.share(&hull(points)).0);
        Ok(cost)
    }

    fn gaussian_cost(&self, mu: f64) -> Cost {
        let square = Interval::exact(mu).square();
        Cost { share: (square / self.gaussian).hi, divergence: (square * 0.5 * f64::from(self.order)).hi }
    }

    /// The share of a curve that can be asked for δ at any ε up to `end`.
    fn share_of_curve(&self, delta: impl Fn(f64) -> Result<f64> + Sync, end: f64) -> Result<f64> {
        if end <= 0.0 {
            return Ok(LAST);
        }
        let at = |epsilon: f64| Ok::<_, crate::Error>(Point { epsilon, delta: delta(epsilon)? });
        let mut points = (0..=COARSE)
            .into_par_iter()
            // Not zero itself, which has no saddle point.
            .map(|j| at(end * (j as f64 / COARSE as f64).max(1e-4)))
            .collect::<Result<Vec<_>>>()?;
        loop {
            let convex = hull(points.clone());
            let (share, place) = self.share(&convex);
            if points.len() >= FINE || place + 1 >= convex.len() {
                return Ok(share);
            }
            // The segment that decides, and the ones beside it.
            let middles: Vec<f64> = (place.saturating_sub(1)..=place + 1)
                .filter(|&j| j + 1 < convex.len())
                .map(|j| 0.5 * (convex[j].epsilon + convex[j + 1].epsilon))
                .collect();
            points.extend(middles.into_par_iter().map(at).collect::<Result<Vec<_>>>()?);
        }
    }

    /// The share of a convex polyline, and the segment that decides it.
    ///
    /// A line `i − αt` above `H` on one segment is below `H(G_s) + a` everywhere if, and only if, `i ≤ Φ(√s − z_α) + a` with
    /// `Φ(−z_α) = α`. Lines may be chosen at will: rounding α costs tightness, and never truth.
    fn share(&self, points: &[Point]) -> (f64, usize) {
        let (Some(first), Some(last)) = (points.first(), points.last()) else {
            return (f64::INFINITY, 0);
        };
        let t = |point: &Point| Interval::exact(point.epsilon).exp();
        let line = |slope: f64, ends: [(Interval, Interval); 2]| {
            let reach = ends.map(|(t, h)| (h + t * slope).hi);
            self.share_of_line(slope, reach[0].max(reach[1]))
        };
        // From the mirror image of the first point, t = e^{−ε}, to the point itself.
        let (near, h) = (t(first), Interval::exact(first.delta));
        let mirror = Interval::exact(1.0) / near;
        let mirrored = Interval::exact(1.0) - mirror + mirror * h;
        let slope = ((1.0 - first.delta) / (1.0 + near.hi)).max(0.0);
        let mut most = (line(slope, [(near, h), (mirror, mirrored)]), 0);
        for (j, pair) in points.windows(2).enumerate() {
            let [a, b] = [t(&pair[0]), t(&pair[1])];
            let slope = ((pair[0].delta - pair[1].delta) / (b.lo - a.hi)).max(0.0);
            let ends = [(a, Interval::exact(pair[0].delta)), (b, Interval::exact(pair[1].delta))];
            let share = line(slope, ends);
            if share > most.0 {
                most = (share, j);
            }
        }
        // Beyond the last point the curve is at most as high as there.
        let beyond = (Interval::exact(last.delta) / self.slack).hi;
        if beyond > most.0 { (beyond, points.len()) } else { most }
    }

    /// The smallest `c` with `i ≤ Φ(√(cS) − z_α) + cA`.
    fn share_of_line(&self, slope: f64, intercept: f64) -> f64 {
        let intercept = intercept.min(1.0);
        let most = (Interval::exact(1.0) / self.slack).hi.next_up();
        if !(slope > 0.0 && slope < 1.0) {
            return (Interval::exact(intercept) / self.slack).hi.min(most);
        }
        let z = normal::upper_quantile(slope);
        let holds = |c: f64| {
            let mu = (Interval::exact(c) * self.gaussian).sqrt();
            let bound = normal::upper_tail(z - mu) + Interval::exact(c) * self.slack;
            intercept <= bound.lo
        };
        search::first_true(0.0, most, holds)
    }
}

/// The order at which a Gaussian that reaches (ε, δ) by its Rényi divergences does so.
fn best_order(epsilon: f64, delta: f64) -> Result<f64> {
    let rho = zcdp::rho_for(epsilon, delta)?;
    // ρ(α − 1)² = ln(1/(αδ)), whose left side grows with α and whose right side falls.
    let (mut low, mut high) = (1.0_f64, 1e6_f64);
    for _ in 0..60 {
        let order = (low * high).sqrt();
        if rho * (order - 1.0).powi(2) < -libm::log(order * delta) {
            low = order;
        } else {
            high = order;
        }
    }
    Ok(high)
}

/// Rényi divergence of an integer order of all rounds of a phase, in the direction where it is larger.
///
/// `E_Q[r^α] − 1 = Σ_k C(α, k) (1 − q)^{α−k} q^k (e^{k(k−1)/(2σ²)} − 1)`: a sum of positive terms.
///
/// Guarantee: rounded up; infinite where it overflows.
///
/// Reference: Section 3.3 and Theorem 5 of \[MTZ19\].
fn divergence(phase: &Phase, order: u32) -> f64 {
    let (q, over) = (Interval::exact(phase.rate), Interval::exact(1.0) / phase.noise_multiplier);
    let half_square = over.square() * 0.5;
    let alpha = f64::from(order);
    if phase.rate == 1.0 {
        return (half_square * alpha * phase.rounds as f64).hi;
    }
    let rest = Interval::exact(1.0) - q;
    let power = |x: Interval, n: u32| (0..n).fold(Interval::exact(1.0), |product, _| product * x);
    let mut sum = Interval::exact(0.0);
    let mut choose = Interval::exact(1.0);
    for k in 1..=order {
        choose = choose * f64::from(order - k + 1) / f64::from(k);
        let exponent = half_square * f64::from(k) * f64::from(k - 1);
        // e^x − 1 ≤ x e^x, which keeps the digits of a small x.
        let grown = exponent.exp();
        let excess = (grown - 1.0).hi.min((exponent * grown).hi).max(0.0);
        sum = sum + choose * power(rest, order - k) * power(q, k) * Interval::exact(excess);
    }
    let divergence = sum.ln_1p() / (alpha - 1.0) * phase.rounds as f64;
    if divergence.hi.is_nan() { f64::INFINITY } else { divergence.hi }
}

/// The lower convex hull, in `t = e^ε`, of places on a curve: of the lines that are known, those that say something.
fn hull(mut points: Vec<Point>) -> Vec<Point> {
    points.retain(|p| p.epsilon <= 600.0);
    points.sort_by(|a, b| a.epsilon.total_cmp(&b.epsilon));
    let mut kept: Vec<Point> = Vec::with_capacity(points.len());
    for point in points {
        if let Some(last) = kept.last()
            && (point.delta >= last.delta || point.epsilon == last.epsilon)
        {
            if point.delta < last.delta {
                kept.pop();
            } else {
                continue;
            }
        }
        while let [.., a, b] = kept[..] {
            // Steps of t over t at the middle point.
            let (before, after) =
                (-libm::expm1(a.epsilon - b.epsilon), libm::expm1(point.epsilon - b.epsilon));
            if (a.delta - b.delta) * after > (b.delta - point.delta) * before {
                break;
            }
            kept.pop();
        }
        kept.push(point);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounting::{Accountant, Adjacency};
    use proptest::prelude::*;

    const DELTA: f64 = 1e-6;

    fn poisson(noise_multiplier: f64, rate: f64, rounds: u64) -> PrivacyCurve {
        PrivacyCurve::poisson(&[Phase { noise_multiplier, rate, rounds }], Adjacency::AddOrRemove).unwrap()
    }

    #[test]
    fn gaussians_cost_their_squares() {
        let filter = Filter::new(2.0, DELTA).unwrap();
        let mu = gaussian::mu(2.0, filter.gaussian_delta).unwrap();
        let cost = filter.cost(&PrivacyCurve::gaussian(mu, Accountant::Exact).unwrap()).unwrap();
        assert!((cost.share - 1.0).abs() < 1e-12, "{cost:?}");
        let tenth =
            filter.cost(&PrivacyCurve::gaussian(mu / 10f64.sqrt(), Accountant::Exact).unwrap()).unwrap();
        assert!((tenth.share - 0.1).abs() < 1e-12, "{tenth:?}");
        let nine = (0..9).fold(Cost::default(), |sum, _| sum + tenth);
        assert!(filter.epsilon(nine) < 2.0 && filter.epsilon(nine + tenth + tenth) > 2.0);
        assert_eq!(filter.epsilon(Cost::default()), 0.0);
        // What part of δ is kept for other things costs about a percent of ε.
        let exact = gaussian::epsilon(mu, DELTA).unwrap();
        assert!(exact > 0.985 * 2.0, "{exact}");
    }

    #[test]
    fn a_share_dominates_the_whole_curve_and_hardly_less_does() {
        for (curve, epsilon) in
            [(poisson(1.0, 0.01, 1000), 4.0), (poisson(4.0, 0.1, 200), 2.0), (poisson(0.6, 0.02, 1), 6.0)]
        {
            let filter = Filter::new(epsilon, DELTA).unwrap();
            let share = filter.cost(&curve).unwrap().share;
            // From below, so that the accountant's own rounding is not counted.
            let lower = |e: f64| (e, curve.delta_bracket(e, 1e-3).unwrap().lower);
            let seen: Vec<(f64, f64)> = (1..60).map(|j| lower(f64::from(j) * 0.2)).collect();
            let excess = |share: f64| {
                let mu = (share * filter.gaussian).sqrt();
                let allowed = |e: f64| gaussian::delta(mu, e).unwrap() + share * filter.slack;
                seen.iter().map(|(e, delta)| delta / allowed(*e)).fold(0.0, f64::max)
            };
            assert!(excess(share) <= 1.0, "{curve:?}: {share}");
            assert!(excess(0.96 * share) > 1.0, "{curve:?}: {share} is too much");
        }
    }

    #[test]
    fn pure_privacy_costs_the_gaussian_through_its_corner() {
        for epsilon in [0.05, 0.5, 1.0, 3.0] {
            let filter = Filter::new(8.0, DELTA).unwrap();
            let cost = filter.stated_cost(&[[epsilon, 0.0]], None).unwrap();
            let mu = 2.0 * normal::upper_quantile(1.0 / (1.0 + libm::exp(epsilon))).lo;
            let share = mu * mu / filter.gaussian;
            assert!((cost.share / share - 1.0).abs() < 1e-3, "{epsilon}: {cost:?} {share}");
            assert!(cost.divergence <= epsilon);
        }
        // A δ takes its part of A, and leaves no Rényi divergence.
        let filter = Filter::new(8.0, DELTA).unwrap();
        let cost = filter.stated_cost(&[[0.1, 0.5 * filter.slack]], None).unwrap();
        assert!(cost.share >= 0.5 && cost.share < 0.6 && cost.divergence.is_infinite(), "{cost:?}");
        assert_eq!(filter.stated_cost(&[], None).unwrap().share, f64::INFINITY);
    }

    #[test]
    fn divergences_are_those_of_the_integral() {
        for (sigma, rate, order) in [(1.0, 0.01, 8), (0.7, 0.2, 3), (4.0, 0.5, 32), (20.0, 1e-3, 2)] {
            let phase = Phase { noise_multiplier: sigma, rate, rounds: 1 };
            let found = divergence(&phase, order);
            // E_Q (1 − q + q e^{z/σ − 1/(2σ²)})^α, less one, by the trapezoid rule.
            let step = 1e-3;
            let sum: f64 = (-12_000..80_000)
                .map(|j| f64::from(j) * step)
                .map(|z| {
                    let ratio = libm::log1p(rate * libm::expm1(z / sigma - 0.5 / (sigma * sigma)));
                    let density = libm::exp(-0.5 * z * z) / std::f64::consts::TAU.sqrt();
                    libm::expm1(f64::from(order) * ratio) * density * step
                })
                .sum();
            let expected = libm::log1p(sum) / f64::from(order - 1);
            assert!(found >= expected * (1.0 - 1e-7), "{sigma} {rate} {order}: {found} {expected}");
            assert!(found <= expected * (1.0 + 1e-2), "{sigma} {rate} {order}: {found} {expected}");
        }
        let whole = Phase { noise_multiplier: 2.0, rate: 1.0, rounds: 3 };
        assert!((divergence(&whole, 4) - 1.5).abs() < 1e-12);
    }

    #[test]
    fn bad_budgets_are_named() {
        assert!(Filter::new(0.0, 1e-6).unwrap_err().to_string().starts_with("epsilon is 0"));
        assert!(Filter::new(1.0, 1.0).unwrap_err().to_string().starts_with("delta is 1"));
        for (epsilon, delta) in [(1e-6, 1e-300), (500.0, 0.9), (1e-3, 0.5)] {
            let filter = Filter::new(epsilon, delta).unwrap();
            assert!(filter.order >= 2 && filter.gaussian > 0.0, "{filter:?}");
        }
    }

    proptest! {
        #[test]
        fn spent_is_within_the_budget_just_where_a_rule_is(share in 1e-6..3.0_f64, divergence in 1e-6..20.0_f64) {
            let filter = Filter::new(3.0, DELTA).unwrap();
            let order = f64::from(filter.order);
            let bound =
                zcdp::epsilon_at_order(order, Interval::exact(divergence), filter.ln_renyi_delta).hi;
            let holds = share <= 1.0 || bound <= 3.0;
            prop_assert_eq!(filter.epsilon(Cost { share, divergence }) <= 3.0, holds);
        }

        #[test]
        fn hulls_are_convex_and_below(points in prop::collection::vec((0.0..20.0_f64, 0.0..1.0_f64), 1..40)) {
            let points: Vec<Point> =
                points.into_iter().map(|(epsilon, delta)| Point { epsilon, delta }).collect();
            let kept = hull(points.clone());
            prop_assert!(!kept.is_empty());
            for pair in kept.windows(2) {
                prop_assert!(pair[0].epsilon < pair[1].epsilon && pair[0].delta > pair[1].delta);
            }
            for p in &points {
                // The polyline, in t, is nowhere above a point.
                let next = kept.iter().position(|k| k.epsilon >= p.epsilon).unwrap_or(kept.len());
                let height = match next {
                    0 => continue,
                    n if n == kept.len() => kept[n - 1].delta,
                    n => {
                        let (a, b) = (kept[n - 1], kept[n]);
                        let part = (p.epsilon.exp() - a.epsilon.exp()) / (b.epsilon.exp() - a.epsilon.exp());
                        a.delta + part * (b.delta - a.delta)
                    }
                };
                prop_assert!(height <= p.delta + 1e-9, "{p:?} {height}");
            }
        }
    }
}
