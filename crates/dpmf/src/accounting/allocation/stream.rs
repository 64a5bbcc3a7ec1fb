//! Bins of a stream: where a Gram matrix of all bins would not fit, its rows and what random numbers make of it come from one
//! pass over the steps.

use crate::linalg::exponentials::{ColumnProducts, Exponentials};

/// Blocks of steps that share an upper bound on their columns.
const BLOCKS: usize = 256;

/// Distances that are looked at one by one, before they are taken together.
const NEAR: usize = 64;

/// What is below this counts for nothing in a row of the Gram matrix: far less than rounding.
const NOTHING: f64 = 1e-22;

/// A stream of exponentials, and bins that take turns in it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stream {
    filter: Exponentials,
    bins: usize,
    /// `⟨m_p, m_p⟩`.
    squares: Vec<f64>,
    /// For blocks of bins: numbers that no inner product with another bin exceeds, and how many bins they are for.
    envelopes: Vec<Vec<[f64; 2]>>,
}

impl Stream {
    pub fn new(filter: Exponentials, bins: usize) -> Self {
        let squares = filter.folded_squares(bins);
        let envelopes = envelopes(&filter, bins);
        Self { filter, bins, squares, envelopes }
    }

    pub fn steps(&self) -> usize {
        self.filter.steps()
    }

    pub fn squares(&self) -> &[f64] {
        &self.squares
    }

    /// `⟨m_p, m_q⟩`. Cost: O(n r²).
    pub fn entry(&self, p: usize, q: usize) -> f64 {
        let mut row = vec![0.0; self.bins];
        self.row(p, &mut vec![0.0; self.filter.steps()], &mut row);
        row[q]
    }

    /// `Σ_t ⟨m_p, e_t⟩x_t` for all bins, from numbers of all steps that are lost.
    pub fn project(&self, x: &mut [f64], out: &mut [f64]) {
        self.filter.transposed(x);
        out.fill(0.0);
        for part in x.chunks(self.bins) {
            out.iter_mut().zip(part).for_each(|(out, x)| *out += x);
        }
    }

    /// `⟨m_p, m̄⟩` for all bins.
    pub fn toward(&self) -> Vec<f64> {
        let (mut x, mut out) = (vec![1.0 / self.bins as f64; self.filter.steps()], vec![0.0; self.bins]);
        self.filter.apply(&mut x);
        self.project(&mut x, &mut out);
        out
    }

    /// Row `p` of the Gram matrix. `work` has a number for every step.
    ///
    /// Cost: O(n r), less where the exponentials are short.
    pub fn row(&self, p: usize, work: &mut [f64], out: &mut [f64]) {
        let Exponentials { weights, decays, rows, columns } = &self.filter;
        let (n, r) = (self.filter.steps(), weights.len());
        out.fill(0.0);
        let mut states = [0.0; Exponentials::MOST];
        // What the bin adds to later steps, up to where that is nothing.
        let mut spans: Vec<[usize; 2]> = Vec::new();
        let mut t = p;
        while t < n {
            let start = t;
            loop {
                let own = if t % self.bins == p { columns[t] } else { 0.0 };
                let mut sum = own;
                let mut left = 0.0;
                for k in 0..r {
                    sum += weights[k] * states[k];
                    states[k] = decays[k] * states[k] + own;
                    left += weights[k] * states[k];
                }
                work[t] = rows[t] * rows[t] * sum;
                t += 1;
                if t == n || left < NOTHING {
                    break;
                }
            }
            states = [0.0; Exponentials::MOST];
            spans.push([start, t]);
            // On to the next turn of the bin.
            t += (p + self.bins - t % self.bins) % self.bins;
        }
        // And what all bins before see of that.
        for (index, &[start, end]) in spans.iter().enumerate().rev() {
            let mut t = end;
            let first = if index == 0 { 0 } else { spans[index - 1][1] };
            while t > first {
                t -= 1;
                let own = if t >= start { work[t] } else { 0.0 };
                let mut sum = own;
                let mut left = 0.0;
                for k in 0..r {
                    sum += weights[k] * states[k];
                    states[k] = decays[k] * states[k] + own;
                    left += weights[k] * states[k];
                }
                out[t % self.bins] += columns[t] * sum;
                if t < start && left < NOTHING {
                    states = [0.0; Exponentials::MOST];
                    break;
                }
            }
        }
    }

    /// For blocks of bins, what no inner product with another bin exceeds and how often, then that with itself.
    pub fn envelopes(&self) -> &[Vec<[f64; 2]>] {
        &self.envelopes
    }
}

/// Upper bounds of the inner products of the bins of a block with all bins, block by block of bins.
///
/// `⟨C e_i, C e_j⟩ = β_iβ_j Σ_k ω_kθ_k^{j−i−1} V_k(j)` falls with the distance but for `β` and `V`, of which each block has a
/// largest.
fn envelopes(filter: &Exponentials, bins: usize) -> Vec<Vec<[f64; 2]>> {
    let (n, r) = (filter.steps(), filter.weights.len());
    let products = filter.products();
    let room = 1.0 + 4.0 * filter.rounding();
    let size = bins.div_ceil(BLOCKS).max(1);
    let count = bins.div_ceil(size);
    let largest = Largest::new(filter, &products, bins, size);
    let mut powers = Vec::new();
    // Distances from one to the next of these, and how many they are.
    let mut groups: Vec<[usize; 2]> = Vec::new();
    let mut d = 1;
    while d < bins {
        let next = if d < NEAR { d + 1 } else { (d + d / 8).min(bins) };
        groups.push([d, next]);
        powers.extend((0..r).map(|k| filter.decays[k].powi(d as i32 - 1)));
        d = next;
    }
    let epochs = n.div_ceil(bins);
    // `β_iβ_j Σ_k ω_kθ_k^{d−1} V_k(j)`.
    let product = |first: &Most, last: &Most, power: &dyn Fn(usize) -> f64| {
        let sum: f64 = (0..r).map(|k| filter.weights[k] * power(k) * last.values[k]).sum();
        first.column * last.column * sum
    };
    let block = |block: usize| {
        let [low, high] = [block * size, ((block + 1) * size).min(bins)];
        let own = (low..high).map(|p| folded(filter, &products, p, bins)).fold(0.0, f64::max);
        let mut out = vec![[own * room, 1.0]];
        for (group, &[d, next]) in groups.iter().enumerate() {
            let power = |k: usize| powers[group * r + k];
            // Bins after this one, then bins before it.
            let later = [low + d, (high + next - 1).min(bins)];
            let earlier = [low.saturating_sub(next - 1), high.saturating_sub(d)];
            for (range, is_later) in [(later, true), (earlier, false)] {
                if range[0] >= range[1] {
                    continue;
                }
                let mut total = 0.0;
                for e in 0..epochs {
                    let mine = largest.of(e, low, high);
                    let other = match d < NEAR {
                        true => largest.of(e, range[0], range[1]),
                        false => largest.epochs[e].clone(),
                    };
                    let (first, last) = if is_later { (&mine, &other) } else { (&other, &mine) };
                    total += product(first, last, &power);
                }
                // Steps of other epochs, by the largest of all.
                for apart in 1..epochs {
                    let pairs = (epochs - apart) as f64;
                    for least in [apart * bins + d, apart * bins - (next - 1)] {
                        let power = |k: usize| filter.decays[k].powi(least as i32 - 1);
                        total += pairs * product(&largest.all, &largest.all, &power);
                    }
                }
                out.push([total * room, (next - d) as f64]);
            }
        }
        out
    };
    (0..count).map(block).collect()
}

fn folded(filter: &Exponentials, products: &ColumnProducts, p: usize, bins: usize) -> f64 {
    let n = filter.steps();
    let mut total = 0.0;
    for j in (p..n).step_by(bins) {
        total += products.squares[j];
        total += 2.0 * (p..j).step_by(bins).map(|i| filter.product(products, i, j)).sum::<f64>();
    }
    total
}

/// The largest `β` and `V` of some steps.
#[derive(Clone)]
struct Most {
    column: f64,
    values: Vec<f64>,
}

/// The same for the blocks of every epoch.
struct Largest {
    blocks: Vec<Vec<Most>>,
    epochs: Vec<Most>,
    all: Most,
    size: usize,
}

impl Largest {
    fn new(filter: &Exponentials, products: &ColumnProducts, bins: usize, size: usize) -> Self {
        let (n, r) = (filter.steps(), filter.weights.len());
        let most = |from: usize, to: usize| {
            let steps = from.min(n)..to.min(n);
            let column = filter.columns[steps.clone()].iter().copied().fold(0.0, f64::max);
            let value = |k: usize| steps.clone().map(|j| products.values[j * r + k]).fold(0.0, f64::max);
            Most { column, values: (0..r).map(value).collect() }
        };
        let epoch = |e: usize| {
            let starts = (0..bins).step_by(size);
            starts.map(|p| most(e * bins + p, e * bins + (p + size).min(bins))).collect()
        };
        let blocks = (0..n.div_ceil(bins)).map(epoch).collect();
        let epochs = (0..n.div_ceil(bins)).map(|e| most(e * bins, (e + 1) * bins)).collect();
        Self { blocks, epochs, all: most(0, n), size }
    }

    /// Of the bins of a range, which is not empty, in one epoch.
    fn of(&self, epoch: usize, from: usize, to: usize) -> Most {
        let blocks = &self.blocks[epoch][from / self.size..=(to - 1) / self.size];
        let mut out = blocks[0].clone();
        for block in &blocks[1..] {
            out.column = out.column.max(block.column);
            out.values.iter_mut().zip(&block.values).for_each(|(a, b)| *a = a.max(*b));
        }
        out
    }
}
