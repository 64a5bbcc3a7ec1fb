//! Tree aggregation: noisy sums over the complete nodes of a binary tree, and three ways to read them.
//!
//! `C` has one row a complete node, `1` on the leaves below it. For `n` not a power of two only the nodes
//! that fit exist, so the tree is a forest. Nodes are in postorder, which is the order of time: the nodes
//! completed at step `i = 1 … n` are the next `trailing_zeros(i) + 1` rows, leaf first.

mod engine;
mod full;
mod row_norms;

use super::{Cost, Dense, EncoderColumns, Form, Representation, Rows};
use crate::engine::Engine;
use crate::engine::exact::program::Program;
use crate::error::{Error, Result};
use crate::tensors::Tensors;
use crate::workload::Workload;
use faer::Mat;
use serde::{Deserialize, Serialize};

pub(super) const KIND: &str = "tree";

const OWN: &str = "tree.own";
const BELOW: &str = "tree.below";

/// How prefix sums are estimated from the noisy nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decoder {
    /// The nodes of the binary expansion of `i`, as they are.
    Binary,
    /// The same nodes, each improved by all that is known below it: the best estimate that can be streamed.
    HonakerOnline,
    /// The best linear estimate from all nodes, also later ones: `N = C⁺`.
    HonakerFull,
}

/// How a node's estimate is made: `own · node + below · (left estimate + right estimate)`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Level {
    /// Weight of the node's own noisy sum.
    pub own: f64,
    /// Weight of the estimates of its two children.
    pub below: f64,
}

/// A tree mechanism for `n` steps.
///
/// With `e_k` the estimate of a node at level `k` (leaves 0), the gradient noise of a step is the estimate of
/// the largest node it completes, minus the estimates of the left siblings that merge into it. The encoder row
/// of a node at level `k` is `c_k` on its leaves, `c_k = (1 − below_k) / own_k`, so that `N C = I` holds for
/// any coefficients, also rounded ones; unrounded, `c_k = 1`.
///
/// Reference: \[Honaker15\] §3.2 and §3.4; Proposition C.1 of \[DMRST22\].
#[derive(Clone, Debug, PartialEq)]
pub struct Tree {
    steps: usize,
    decoder: Decoder,
    /// One entry a level, `⌊log₂ n⌋ + 1` of them; empty for [`Decoder::HonakerFull`].
    levels: Vec<Level>,
}

impl Tree {
    /// The tree over `n ≥ 1` steps.
    ///
    /// Errors: no steps, or more than 2⁵².
    pub fn new(steps: usize, decoder: Decoder) -> Result<Self> {
        check_steps(steps)?;
        let mut variance = 1.0;
        let below_root = |_| {
            // V_k = 1 / (1 + 1/(2 V_{k−1})): own sum and children, each weighted by its precision.
            variance = 2.0 * variance / (2.0 * variance + 1.0);
            Level { own: variance, below: 1.0 - variance }
        };
        let leaf = std::iter::once(Level { own: 1.0, below: 0.0 });
        let height = steps.ilog2() as usize;
        let levels = match decoder {
            Decoder::Binary => vec![Level { own: 1.0, below: 0.0 }; height + 1],
            Decoder::HonakerOnline => leaf.chain((0..height).map(below_root)).collect(),
            Decoder::HonakerFull => Vec::new(),
        };
        Ok(Self { steps, decoder, levels })
    }

    /// A streaming tree with given coefficients, leaves first.
    ///
    /// Errors: not one level for each of the `⌊log₂ n⌋ + 1` of the tree, coefficients that are not finite,
    /// `own` or `1 − below` not positive, leaves with something below; [`Decoder::HonakerFull`], which has no
    /// such coefficients.
    pub fn from_levels(steps: usize, decoder: Decoder, levels: Vec<Level>) -> Result<Self> {
        check_steps(steps)?;
        if decoder == Decoder::HonakerFull {
            return Err(Error::argument("decoder", "honaker-full", "it has no coefficients by level"));
        }
        let expected = steps.ilog2() as usize + 1;
        if levels.len() != expected {
            return Err(Error::WrongLength { name: "tree levels", actual: levels.len(), expected });
        }
        for (index, level) in levels.iter().enumerate() {
            if !(level.own > 0.0 && level.own.is_finite()) {
                let rule = "it must be positive and finite";
                return Err(Error::InvalidEntry { name: "own weight", index, value: level.own, rule });
            }
            let rule = match index {
                _ if !(level.below < 1.0 && level.below.is_finite()) => "it must be finite and below 1",
                0 if level.below != 0.0 => "leaves have nothing below",
                _ => continue,
            };
            return Err(Error::InvalidEntry { name: "weight from below", index, value: level.below, rule });
        }
        Ok(Self { steps, decoder, levels })
    }

    /// The estimator.
    pub fn decoder(&self) -> Decoder {
        self.decoder
    }

    /// The coefficients by level, leaves first; empty for [`Decoder::HonakerFull`].
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// The same tree with every coefficient on the `f32` grid.
    ///
    /// `own` is rounded and `below` follows from it. For Honaker's coefficients `own ≥ ½`, where `1 − own` is
    /// exact in `f32`: the encoder stays the tree of zeros and ones, to the last bit.
    ///
    /// Errors: [`Decoder::HonakerFull`], where no rounding of `C⁺` keeps `N C = I`; what is deployed there is
    /// [`Tree::to_lower_triangular`].
    pub fn rounded(&self) -> Result<Self> {
        self.check_streaming("rounding the tree's coefficients")?;
        let round = |x: f64| f64::from(x as f32);
        let levels = self.levels.iter().map(|level| {
            let own = round(level.own);
            let below = if level.below == 0.0 { 0.0 } else { round(1.0 - own * level.scale()) };
            Level { own, below }
        });
        Self::from_levels(self.steps, self.decoder, levels.collect())
    }

    /// Row `step` (zero-based) of `B = S N`, as the pairs of node and weight that are not zero, in node order.
    ///
    /// Cost: O(log n) memory, O(1) a pair. [`Decoder::Binary`] has at most `log₂ n + 1` pairs.
    ///
    /// Errors: `step ≥ n`; [`Decoder::HonakerFull`], whose rows use nodes of later steps.
    pub fn prefix_sum_row(&self, step: usize) -> Result<impl Iterator<Item = (usize, f64)>> {
        self.check_streaming("a row of the prefix-sum decoder")?;
        if step >= self.steps {
            return Err(Error::argument("step", step, "it must be below the number of steps"));
        }
        Ok(blocks(step + 1).flat_map(|(end, level)| self.estimate(end, level)))
    }

    /// The square, lower-triangular `N'` with `N' N'ᵀ = C⁺ C⁺ᵀ = (CᵀC)⁻¹`, for [`Decoder::HonakerFull`].
    ///
    /// `N' Z'` with `n` rows of noise has the law of `C⁺ Z` with `m`, and `C' = N'⁻¹` satisfies `C'ᵀC' = CᵀC`:
    /// loss and sensitivity are unchanged, and row `i` needs no noise of later steps.
    ///
    /// Cost: O(n²), the size of the result.
    ///
    /// Errors: any other decoder; more steps than a dense matrix holds.
    ///
    /// Reference: Proposition 2.2 of \[DMRST22\].
    pub fn to_lower_triangular(&self) -> Result<Mat<f64>> {
        if self.decoder != Decoder::HonakerFull {
            return Err(Error::Unsupported {
                what: "a square form of a streaming tree".into(),
                hint: "binary and online trees are deployed as they are",
            });
        }
        crate::linalg::within_dense_limit(self.steps)?;
        Ok(full::lower_triangular(self.steps))
    }

    /// Trees that take nothing from below are plain ones; the full estimator is never stored as a tree.
    pub(super) fn read(n: usize, tensors: &mut Tensors) -> Result<Self> {
        let (_, own) = tensors.take(OWN, &[None])?;
        let (_, below) = tensors.take(BELOW, &[Some(own.len())])?;
        let plain = below.iter().all(|weight| *weight == 0.0);
        let levels = own.into_iter().zip(below).map(|(own, below)| Level { own, below }).collect();
        Self::from_levels(n, if plain { Decoder::Binary } else { Decoder::HonakerOnline }, levels)
    }

    fn check_streaming(&self, what: &str) -> Result<()> {
        if self.decoder == Decoder::HonakerFull {
            let hint = "the full Honaker estimator is deployed through its lower-triangular form";
            return Err(Error::Unsupported { what: what.into(), hint });
        }
        Ok(())
    }

    fn level_scale(&self, level: usize) -> f64 {
        self.levels.get(level).map_or(1.0, Level::scale)
    }

    /// The weights of the estimate of the node at `level` whose leaves end before `end`.
    fn estimate(&self, end: usize, level: usize) -> Estimate {
        let mut weights = vec![0.0; level + 1];
        let (mut lowest, mut factor) = (level, 1.0);
        for k in (0..=level).rev() {
            weights[k] = factor * self.levels[k].own;
            lowest = k;
            factor *= self.levels[k].below;
            if factor == 0.0 {
                break;
            }
        }
        Estimate { start: end - (1 << level), lowest, weights, visit: 1, level: lowest }
    }

    /// Row `i` of `N` for the streaming decoders.
    fn streaming_row(&self, i: usize, out: &mut [f64]) {
        let merged = (i + 1).trailing_zeros() as usize;
        self.estimate(i + 1, merged).for_each(|(node, weight)| out[node] += weight);
        for k in 0..merged {
            self.estimate(i >> k << k, k).for_each(|(node, weight)| out[node] -= weight);
        }
    }
}

impl Level {
    /// `c` with `own · c + below = 1`.
    fn scale(&self) -> f64 {
        (1.0 - self.below) / self.own
    }
}

impl Representation for Tree {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn steps(&self) -> usize {
        self.steps
    }

    fn noise_rows(&self) -> usize {
        nodes_within(self.steps)
    }

    fn coloring_rows(&self) -> Rows<'_> {
        let mut steps = 0..self.steps;
        Box::new(move |out| {
            if let Some(i) = steps.next() {
                match self.decoder {
                    Decoder::HonakerFull => full::row(self.steps, i, out),
                    _ => self.streaming_row(i, out),
                }
            }
        })
    }

    fn encoder(&self) -> Mat<f64> {
        let mut c = Mat::zeros(self.noise_rows(), self.steps);
        for i in 0..self.steps {
            for level in 0..=(i + 1).trailing_zeros() as usize {
                for leaf in i + 1 - (1 << level)..=i {
                    c[(nodes_within(i) + level, leaf)] = self.level_scale(level);
                }
            }
        }
        c
    }

    /// The squared scales of the complete nodes over each leaf, summed; their number when unrounded.
    ///
    /// Guarantee: ≥ the exact value for the stored coefficients; equal to it when every scale is 1.
    fn encoder_column_norms_sq(&self) -> Vec<f64> {
        let height = self.steps.ilog2() as usize;
        // A leaf below a complete node of level k lies below complete nodes of every lower level.
        let mut totals = Vec::with_capacity(height + 1);
        let (mut total, mut exact) = (0.0, true);
        for level in 0..=height {
            let scale = self.level_scale(level);
            total += scale * scale;
            exact &= scale == 1.0;
            if !exact {
                // Division, square, sum and this product lose at most 2.5 ulp.
                total *= 1.0 + 4.0 * f64::EPSILON;
            }
            totals.push(total);
        }
        let mut norms = Vec::with_capacity(self.steps);
        for (end, level) in blocks(self.steps) {
            norms.resize(end, totals[level]);
        }
        norms
    }

    /// Cost: O(log n) for each column.
    fn encoder_columns(&self) -> Box<dyn EncoderColumns + '_> {
        Box::new(Ancestors { tree: self, norms_sq: self.encoder_column_norms_sq() })
    }

    /// Cost: O(n w (log n + w²)) for a streaming decoder and a recurrence, O(n² w) for
    /// [`Decoder::HonakerFull`], O(n² m) for a dense workload.
    fn decoder_row_norms_sq(&self, workload: &Workload) -> Vec<f64> {
        assert_eq!(workload.steps(), self.steps, "the workload and the tree differ in length");
        match (self.decoder, workload.realisation()) {
            (Decoder::HonakerFull, _) => full::row_norms_sq(self.steps, workload),
            (_, Some(optimizer)) => row_norms::row_norms_sq(&self.levels, optimizer),
            (_, None) => {
                let mut rows = self.coloring_rows();
                workload.row_norms_sq_of_product(self.noise_rows(), |_, out| rows(out))
            }
        }
    }

    /// Streaming decoders keep the estimates that still have to merge: at most one a level below the top, and
    /// all of them just before the top completes. [`Decoder::HonakerFull`] keeps nothing and regenerates noise.
    fn cost(&self) -> Cost {
        let merges = (self.noise_rows() - self.steps) as f64;
        let steps = self.steps as f64;
        match self.decoder {
            Decoder::HonakerFull => {
                let terms = |(_, level)| (1_u64 << level) as f64 * (2.0 * (1_u64 << level) as f64 - 1.0);
                Cost::dense(blocks(self.steps).map(terms).sum::<f64>() / steps)
            }
            // The node itself, and one subtraction a merge.
            Decoder::Binary => Cost::stream(self.levels.len() - 1, 1.0 + merges / steps),
            // The leaf; then a merge adds the node and its left child to the estimate and takes the child off.
            Decoder::HonakerOnline => Cost::stream(self.levels.len() - 1, 1.0 + 3.0 * merges / steps),
        }
    }

    fn deployed(&self) -> Result<Form> {
        match self.decoder {
            Decoder::HonakerFull => Dense::from_coloring(self.to_lower_triangular()?)?.deployed(),
            _ => Ok(Form::Tree(self.rounded()?)),
        }
    }

    fn engine(&self, _: usize) -> Result<Box<dyn Engine>> {
        Ok(Box::new(engine::TreeEngine::new(self)?))
    }

    fn program(&self, _: usize) -> Result<Box<dyn Program>> {
        Ok(Box::new(engine::TreeEngine::new(self)?))
    }

    fn write(&self, tensors: &mut Tensors) {
        let levels = self.levels.len();
        tensors.put_f32(OWN, &[levels], self.levels.iter().map(|level| level.own));
        tensors.put_f32(BELOW, &[levels], self.levels.iter().map(|level| level.below));
    }
}

/// The scales of the complete nodes over a leaf.
struct Ancestors<'a> {
    tree: &'a Tree,
    norms_sq: Vec<f64>,
}

impl EncoderColumns for Ancestors<'_> {
    fn write(&self, steps: &[usize], out: &mut [f64]) -> Vec<f64> {
        let rows = self.tree.noise_rows();
        for (&j, column) in steps.iter().zip(out.chunks_exact_mut(rows)) {
            for level in 0..=self.tree.steps.ilog2() as usize {
                let end = ((j >> level) + 1) << level;
                if end > self.tree.steps {
                    break;
                }
                column[nodes_within(end - 1) + level] = self.tree.level_scale(level);
            }
        }
        // A difference and a quotient in every scale.
        steps.iter().map(|&j| 2.0 * f64::EPSILON * self.norms_sq[j].sqrt()).collect()
    }
}

/// The weights of one estimate on the nodes of its subtree, in postorder.
struct Estimate {
    start: usize,
    /// Nodes below this level have no weight.
    lowest: usize,
    weights: Vec<f64>,
    /// The next node is over the `visit`-th (one-based) node of level `lowest`, at `level`.
    visit: usize,
    level: usize,
}

impl Iterator for Estimate {
    type Item = (usize, f64);

    fn next(&mut self) -> Option<Self::Item> {
        if self.visit > 1 << (self.weights.len() - 1 - self.lowest) {
            return None;
        }
        let end = self.start + (self.visit << self.lowest);
        let item = (nodes_within(end - 1) + self.level, self.weights[self.level]);
        if self.level < self.lowest + self.visit.trailing_zeros() as usize {
            self.level += 1;
        } else {
            self.visit += 1;
            self.level = self.lowest;
        }
        Some(item)
    }
}

/// Number of complete nodes over the first `steps` leaves, which is the index of the next leaf.
fn nodes_within(steps: usize) -> usize {
    2 * steps - steps.count_ones() as usize
}

/// The largest complete nodes over `0..steps`, left to right, as (end of leaves, level).
fn blocks(steps: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..usize::BITS as usize)
        .rev()
        .filter(move |&level| steps >> level & 1 == 1)
        .map(move |level| (steps >> level << level, level))
}

fn check_steps(steps: usize) -> Result<()> {
    if steps == 0 {
        return Err(Error::argument("steps", 0, "at least one step is needed"));
    }
    if steps as u64 > 1 << 52 {
        return Err(Error::argument("steps", steps, "a tree holds at most 2^52 steps"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
