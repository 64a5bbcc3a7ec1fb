//! One round: its loss, and its distribution on a grid, from above and from below.
//!
//! With `z` standard normal under `Q`, `y = z/σ − 1/(2σ²)` and `v = e^y`, the loss is `L = ln(1 − q + qv)`. For dots
//! `ε_0 < ε_1 < …` on the grid and `t = e^ε`, the hockey-stick curve `H(t) = E_Q (e^L − t)₊` is convex, so
//! - the polyline through `(t_i, H(t_i))` lies above it: the cell between two dots gives its `Q`- and its `P`-mass to both
//!   ends, whence `E_Q[(e^L − t_i); cell]/(t_{i+1} − t_i)` at the upper and the rest at the lower one;
//! - a convex polyline below the tangents at the middles of the cells lies below it: `H(t_i) − g_i` with `g_i` the
//!   larger distance to the two tangents at `t_i`, and the lower hull of that.
//!
//! Both are off by O(h²), and either is a pair of discrete measures, `P_i = e^{ε_i} Q_i`, that serves both directions.
//!
//! Reference: \[DGKKM22\] for the first.

use super::Phase;
use super::saddle::Tilt;

/// Unit roundoff.
pub(super) const UNIT: f64 = f64::EPSILON / 2.0;
/// Units in the last place granted to a short formula of elementary functions.
const SLACK: f64 = 16.0 * UNIT;

/// About the most dots of a round.
const MOST_DOTS: f64 = 131_072.0;

/// Nodes and weights of the Gauss–Legendre rules on [−1, 1], positive half.
const FOUR: [(f64, f64); 2] =
    [(0.339_981_043_584_856_3, 0.652_145_154_862_546_1), (0.861_136_311_594_052_6, 0.347_854_845_137_453_9)];
const EIGHT: [(f64, f64); 4] = [
    (0.183_434_642_495_649_8, 0.362_683_783_378_362),
    (0.525_532_409_916_329, 0.313_706_645_877_887_3),
    (0.796_666_477_413_626_7, 0.222_381_034_453_374_48),
    (0.960_289_856_497_536_3, 0.101_228_536_290_376_26),
];

/// `Φ(−x)`.
fn upper_tail(x: f64) -> f64 {
    0.5 * libm::erfc(x * std::f64::consts::FRAC_1_SQRT_2)
}

/// One Poisson-subsampled Gaussian: σ and q.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    pub sigma: f64,
    pub rate: f64,
}

/// A dot: a loss and where it is attained.
#[derive(Clone, Copy)]
struct Node {
    index: i64,
    loss: f64,
    y: f64,
    z: f64,
    /// Bound on the error of `y`.
    y_error: f64,
    /// `qv/t`, negative below the least loss.
    share: f64,
}

/// `∫φ (v/v_0 − 1)` and `∫φ (1 − v/v_1)` over a part of a cell, times `qv_0/t_0` and `qv_1/t_1`, with their errors.
#[derive(Clone, Copy, Default)]
struct Masses {
    up: f64,
    low: f64,
    up_error: f64,
    low_error: f64,
}

/// One direction of a round on the grid `centre + index·h`, tilted: the mass at a dot times `e^{κε − shift}`.
pub(super) struct Atoms {
    pub centre: f64,
    pub index: Vec<i64>,
    /// Above the truth, below the truth.
    pub upper: Vec<f64>,
    pub lower: Vec<f64>,
    pub shift: f64,
    /// Mass at infinite loss, for the upper measure.
    pub infinite: f64,
    /// The most by which the curve of the lower measure may exceed the truth.
    pub excess: f64,
}

impl Round {
    pub fn new(phase: &Phase) -> Self {
        Self { sigma: phase.noise_multiplier, rate: phase.rate }
    }

    /// The loss at `z`.
    pub fn loss(&self, z: f64) -> f64 {
        let (q, y) = (self.rate, z / self.sigma - 0.5 / (self.sigma * self.sigma));
        if q == 1.0 {
            return y;
        }
        if y > 30.0 {
            return y + libm::log(q) + libm::log1p((1.0 - q) / q * libm::exp(-y));
        }
        let change = q * libm::expm1(y);
        if change.abs() < 0.5 { libm::log1p(change) } else { libm::log(1.0 - q + q * libm::exp(y)) }
    }

    /// The dot `index` of the grid; `z = −∞` at and below the least loss.
    fn node(&self, centre: f64, h: f64, index: f64) -> Node {
        let q = self.rate;
        let loss = centre + index * h;
        let loss_error = 2.0 * UNIT * (loss.abs() + centre.abs());
        let (y, y_error, share);
        if q == 1.0 {
            (y, y_error, share) = (loss, loss_error, 1.0);
        } else if loss > 40.0 {
            share = 1.0 - (1.0 - q) * libm::exp(-loss);
            y = loss - libm::log(q) + libm::log1p((q - 1.0) * libm::exp(-loss));
            y_error = 2.0 * loss_error + SLACK * y.abs();
        } else {
            let t = libm::exp(loss);
            // 1 − q is exact for q ≥ 1/2; below, expm1 keeps small losses.
            let (qv, size) = if q > 0.5 && loss < -0.1 {
                (t - (1.0 - q), t + (1.0 - q))
            } else {
                let change = libm::expm1(loss);
                (change + q, change.abs() + q)
            };
            // Within rounding of the least loss a dot counts as below it; its share is uncertain by as much either way.
            let least = qv <= 64.0 * UNIT * size;
            share = if least { qv.min(0.0) / t } else { qv / t };
            if least {
                (y, y_error) = (f64::NEG_INFINITY, 0.0);
            } else {
                let ratio = libm::expm1(loss) / q;
                y = if ratio.abs() < 0.5 { libm::log1p(ratio) } else { libm::log(qv / q) };
                let size = if ratio.abs() < 0.5 { ratio.abs() * q } else { size };
                y_error = (SLACK * size + t * loss_error) / qv + SLACK * y.abs();
            }
        }
        let z = self.sigma * y + 0.5 / self.sigma;
        Node { index: index.floor() as i64, loss, y, z, y_error, share }
    }

    /// The widest cell that a dot may have beside it, in steps of `h`.
    ///
    /// A cell adds its mass times its width squared to the variance of the loss, so that it may be wider where the
    /// tilted density is low: a little so that cells weigh alike, by more where none matters.
    fn widest(&self, node: &Node, tilt: &Tilt, h: f64) -> f64 {
        if node.share <= 0.0 {
            return f64::INFINITY;
        }
        let (kappa, shift) = tilt.saddle;
        let ln_density =
            -0.5 * node.z * node.z - 0.919 + kappa * node.loss - shift - libm::log(node.share / self.sigma);
        let alike = (libm::log(0.4 / tilt.deviation) - ln_density) / 3.0;
        let ignored = (libm::log(tilt.negligible) - ln_density) / 3.0 - libm::log(h);
        libm::exp(alike.clamp(0.0, 1.1).max(ignored.min(40.0)))
    }

    /// The dots: every grid point where the tilted mass is, fewer where there is little.
    fn nodes(&self, centre: f64, h: f64, tilt: &Tilt, ends: (f64, f64)) -> Vec<Node> {
        // However fine the grid, there are no more dots than a moment's work.
        let least = ((ends.1 - ends.0) / (h * MOST_DOTS)).max(1.0).log2().ceil().exp2();
        let walk = |sign: f64, end: f64| {
            let mut nodes = vec![self.node(centre, h, 0.0)];
            let (mut step, mut place, mut steady) = (least, 0.0, 0);
            while sign * (place * h + centre - end) < 0.0 {
                let here = nodes[nodes.len() - 1];
                let widest = self.widest(&here, tilt, h);
                // Doubled no faster than every fourth cell: the hull levels what jumps.
                if steady >= 4 {
                    (step, steady) = (2.0 * step, 0);
                }
                let before = step;
                let next = loop {
                    let next = self.node(centre, h, place + sign * step);
                    // Nor so wide that the density changes much within: the tangents would fall below zero.
                    let steepness =
                        1.0 + 1.0 / self.sigma + next.z.abs().max((next.z - 1.0 / self.sigma).abs());
                    let narrow = (next.z - here.z).abs() * steepness <= 1.0 && step * h <= tilt.widest;
                    if step <= least || (step <= widest && step <= self.widest(&next, tilt, h) && narrow) {
                        break next;
                    }
                    step /= 2.0;
                };
                place += sign * step;
                steady = if step < before { 0 } else { steady + 1 };
                nodes.push(next);
                if next.share <= 0.0 {
                    break;
                }
            }
            nodes
        };
        let mut nodes = walk(-1.0, ends.0);
        nodes.reverse();
        nodes.extend_from_slice(&walk(1.0, ends.1)[1..]);
        nodes
    }

    /// Half of the cell between two dots, from `from` to `to`.
    fn masses(&self, (low, high): (&Node, &Node), from: &Node, to: &Node) -> Masses {
        if to.z == f64::NEG_INFINITY || to.z == from.z {
            return Masses::default();
        }
        let length = to.z - from.z;
        let size = from.z.abs().max(to.z.abs());
        let stiffness = length * (1.0 + size + 1.0 / self.sigma);
        if stiffness > 1.0 || !length.is_finite() {
            return self.masses_in_closed_form((low, high), from, to);
        }
        let rule: &[(f64, f64)] = if stiffness <= 0.1 { &FOUR } else { &EIGHT };
        let (middle, half) = (0.5 * (from.z + to.z), 0.5 * length);
        let (mut up, mut low_sum) = (0.0, 0.0);
        for &(x, weight) in rule {
            for x in [-x, x] {
                let z = middle + half * x;
                let density = weight * libm::exp(-0.5 * z * z);
                up += density * libm::expm1((z - low.z) / self.sigma);
                low_sum -= density * libm::expm1((z - high.z) / self.sigma);
            }
        }
        let scale = half * 0.398_942_280_401_432_7;
        // Of the rule, of the density, and of the ends, by which v/v_0 − 1 moves.
        let error = 4.0 * SLACK
            + UNIT * (4.0 + 2.0 * size * size)
            + 4.0 * (low.y_error + high.y_error + from.y_error + to.y_error) / (to.y - from.y)
            + size * self.sigma * (from.y_error + to.y_error);
        if error.is_nan() || error >= 1.0 {
            // Ends that rounding cannot tell apart.
            return self.masses_in_closed_form((low, high), from, to);
        }
        let masses =
            Masses { up: low.share * scale * up, low: high.share * scale * low_sum, ..Masses::default() };
        Masses { up_error: masses.up * error, low_error: masses.low * error, ..masses }
    }

    /// The same by the normal distribution function, for cells too wide for a quadrature rule.
    fn masses_in_closed_form(&self, (low, high): (&Node, &Node), from: &Node, to: &Node) -> Masses {
        // Masses of N(0, 1) and N(1/σ, 1), and the size of what was subtracted.
        let between = |a: f64, b: f64| {
            let (x, y) = if a > 0.0 {
                (upper_tail(a), upper_tail(b))
            } else if b < 0.0 {
                (upper_tail(-b), upper_tail(-a))
            } else {
                return (1.0 - upper_tail(-a) - upper_tail(b), 2.0);
            };
            (x - y, (x + y) * (2.0 + a.abs().min(b.abs()).powi(2)))
        };
        let shift = 1.0 / self.sigma;
        let (zero, zero_size) = between(from.z, to.z);
        let (one, one_size) = between(from.z - shift, to.z - shift);
        // N(1/σ, 1) weighs e^y times N(0, 1).
        let (at_low, at_high) = (self.rate * libm::exp(-low.loss), self.rate * libm::exp(-high.loss));
        let moved = |ends: [&Node; 2]| ends.iter().map(|n| n.y_error * self.sigma * 0.4).sum::<f64>();
        let moved_zero = moved([from, to]) * libm::exp(-0.5 * from.z.max(0.0).max(-to.z).powi(2));
        let one_gap = (from.z - shift).max(0.0).max(shift - to.z);
        let moved_one = moved([from, to]) * libm::exp(-0.5 * one_gap * one_gap);
        let error = |one_weight: f64, share: f64| {
            8.0 * SLACK * (one_weight * one_size + (1.0 + share.abs()) * zero_size)
                + one_weight * moved_one
                + share.abs() * moved_zero
        };
        Masses {
            up: (at_low * one - low.share * zero).max(0.0),
            low: (high.share * zero - at_high * one).max(0.0),
            up_error: error(at_low, low.share),
            low_error: error(at_high, high.share),
        }
    }

    /// The distribution of the loss on the grid of width `h`, tilted.
    ///
    /// Guarantee: the upper measure is above the polyline through the dots, the lower one below a polyline under the
    /// tangents, whatever the rounding; `infinite` and `excess` are rounded up.
    /// Without `with_lower` the lower measure is zero.
    pub fn atoms(&self, h: f64, tilt: &Tilt, tail: f64, with_lower: bool) -> Atoms {
        let reach = (-2.0 * libm::log((2.0 * tail).min(0.5))).sqrt();
        let centre = self.loss(0.0);
        let ends = (self.loss(-reach), self.loss(reach + 1.0 / self.sigma));
        let nodes = self.nodes(centre, h, tilt, ends);
        let count = nodes.len();
        let scale = |node: &Node| libm::exp(tilt.kappa * node.loss - tilt.shift);
        let scale_error = |node: &Node| SLACK * (1.0 + (tilt.kappa * node.loss).abs() + tilt.shift.abs());

        let (mut mass, mut error) = (vec![0.0; count], vec![0.0; count]);
        // Distance of the lower polyline from the curve, over t.
        let mut gap = vec![0.0_f64; count];
        for i in 0..count - 1 {
            let (low, high) = (nodes[i], nodes[i + 1]);
            let middle = self.node(centre, h, 0.5 * (low.index + high.index) as f64);
            // The curve is a line before the first dot and zero, but for what is left out, after the last. With these as
            // tangents neither mass nor mean is lost at an end; only where all mass of the first cell is near its dot
            // is the tangent at the middle better.
            let middle = if i == 0 {
                let width = (high.index - low.index) as f64 * h;
                let left = self.masses((&low, &high), &low, &middle).up;
                let whole = self.masses((&low, &high), &low, &high).low;
                let weight = if tilt.remove { 1.0 } else { 1e4 };
                if weight * left < (1.0 + tilt.kappa.abs()) * width * whole { middle } else { low }
            } else if i + 2 == count {
                high
            } else {
                middle
            };
            let left = self.masses((&low, &high), &low, &middle);
            let right = self.masses((&low, &high), &middle, &high);
            let width = (high.index - low.index) as f64 * h;
            let (over_up, over_low) = (1.0 / libm::expm1(width), -1.0 / libm::expm1(-width));
            mass[i + 1] += (left.up + right.up) * over_up;
            error[i + 1] += (left.up_error + right.up_error) * over_up;
            mass[i] += (left.low + right.low) * over_low;
            error[i] += (left.low_error + right.low_error) * over_low;
            gap[i] = gap[i].max(left.up + left.up_error);
            gap[i + 1] = gap[i + 1].max(right.low + right.low_error);
        }
        let (first, last) = (&nodes[0], &nodes[count - 1]);
        let inflated = |x: f64| x * (1.0 + 1e-12);
        // All below the first dot moves up to it, all above the last goes to infinity but for what the dot can hold.
        let (below, above) = (inflated(upper_tail(-first.z)), inflated(upper_tail(last.z)));
        let infinite =
            if tilt.remove { inflated(self.rate * upper_tail(last.z - 1.0 / self.sigma)) } else { below };

        let mut upper = Vec::with_capacity(count);
        let mut lower = Vec::with_capacity(count);
        for (i, node) in nodes.iter().enumerate() {
            let mut mass_here = mass[i] + error[i];
            if i == 0 {
                mass_here += below;
            }
            if i + 1 == count {
                mass_here += above;
            }
            upper.push(mass_here * scale(node) * (1.0 + scale_error(node)));

            if !with_lower {
                lower.push(0.0);
                continue;
            }
            let mut signed = mass[i] - error[i];
            let mut size = mass[i];
            let mut bend = |x: f64| {
                signed += x;
                size += x.abs();
            };
            if i + 1 < count {
                let width = (nodes[i + 1].index - node.index) as f64 * h;
                bend(gap[i + 1] / libm::expm1(-width));
                bend(gap[i] / libm::expm1(width));
            }
            if i > 0 {
                let width = (node.index - nodes[i - 1].index) as f64 * h;
                bend(-gap[i] / libm::expm1(-width));
                bend(-gap[i - 1] / libm::expm1(width));
            }
            lower.push((signed - SLACK * size) * scale(node));
        }
        let mut excess = if tilt.remove { gap[count - 1] * libm::exp(last.loss) } else { gap[0] };
        excess += swept(&nodes, &mut lower, tilt, h);
        for (mass, node) in lower.iter_mut().zip(&nodes) {
            *mass *= 1.0 - scale_error(node) - 1e-13;
        }
        let mut index: Vec<i64> = nodes.iter().map(|n| n.index).collect();
        let mut centre = centre;
        if !tilt.remove {
            // The other direction has the opposite loss.
            centre = -centre;
            index.iter_mut().for_each(|i| *i = -*i);
        }
        Atoms { centre, index, upper, lower, shift: tilt.shift, infinite, excess: inflated(excess) }
    }
}

/// Makes a polyline convex by leaving out the dots above its hull: their negative mass goes to the dots on either side,
/// mean and mass preserved. Returns by how much this raised the curve, which happens at the end of large losses only.
fn swept(nodes: &[Node], mass: &mut [f64], tilt: &Tilt, h: f64) -> f64 {
    let count = nodes.len();
    let (mut before, mut after): (Vec<usize>, Vec<usize>) =
        ((0..count).map(|i| i.wrapping_sub(1)).collect(), (1..=count).collect());
    let mut raised = 0.0;
    let mut waiting: Vec<usize> = (0..count).filter(|&i| mass[i] < 0.0).collect();
    while let Some(i) = waiting.pop() {
        let debt = std::mem::take(&mut mass[i]);
        if debt >= 0.0 {
            mass[i] = debt;
            continue;
        }
        let (left, right) = (before[i], after[i]);
        let distance = |a: usize, b: usize| (nodes[b].index - nodes[a].index) as f64 * h;
        let tilted = |x: f64| libm::exp((tilt.kappa * x).min(700.0));
        let untilted = || libm::exp(tilt.shift - tilt.kappa * nodes[i].loss);
        match (left < count, right < count) {
            (true, true) => {
                let (a, b) = (distance(left, i), distance(i, right));
                let to_right = -libm::expm1(-a) / (libm::exp(b) - libm::exp(-a));
                mass[left] += debt * (1.0 - to_right) * tilted(-a);
                mass[right] += debt * to_right * tilted(b);
                after[left] = right;
                before[right] = left;
                waiting.extend([left, right]);
            }
            (false, true) => {
                let b = distance(i, right);
                mass[right] += debt * tilted(b);
                before[right] = left;
                waiting.push(right);
                if !tilt.remove {
                    raised -= debt * untilted() * -libm::expm1(-b);
                }
            }
            (true, false) => {
                let a = distance(left, i);
                mass[left] += debt * libm::exp(a) * tilted(-a);
                after[left] = right;
                waiting.push(left);
                if tilt.remove {
                    raised -= debt * untilted() * libm::exp(nodes[i].loss) * -libm::expm1(-a);
                }
            }
            (false, false) => {}
        }
    }
    raised
}
