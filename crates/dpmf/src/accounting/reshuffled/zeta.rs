//! `max_π E_π' e^{mG(π, π')}`, from above.
//!
//! `E_π' e^{mG(π, π')}` is a product over epochs: the mean over the bins `p` of epoch `e` of `e^{m(X_ap + X_qp + X_cp)}`, where `π` has bin `q`
//! in that epoch, `a` in the one before and `c` in the one after. Neighbours are put into classes by their distance from the
//! border of the epochs, 1, 2, 3–4, 5–8, …, and each entry of a class counts as its largest; the bin itself is what it is. The
//! maximum over chains of classes is then exact.

use super::sample::Sampler;
use crate::accounting::allocation::exp_all;

/// Products of columns with those of other epochs, by classes of the other one.
pub(super) struct Classes {
    bins: usize,
    epochs: usize,
    reach: usize,
    /// Classes, the last of them of those that reach nothing.
    count: usize,
    /// Largest products with a class of the epoch before, and of the epoch after: bins of a class of an epoch.
    before: Vec<f64>,
    after: Vec<f64>,
    /// Cells of bins that are of the same class from either end.
    cells: Vec<(usize, usize)>,
    cell_of: Vec<usize>,
}

impl Classes {
    pub fn new(sampler: &Sampler) -> Self {
        let (b, epochs, w) = (sampler.bins, sampler.epochs, sampler.width);
        let none = (w.max(2) - 1).next_power_of_two().ilog2() as usize + 1;
        // Bins that far from the border reach nobody on the other side.
        let class = |distance: usize| match distance + 1 < w {
            true => (distance + 1).next_power_of_two().ilog2() as usize,
            false => none,
        };
        let count = none + 1;
        let (mut before, mut after) = (vec![0.0_f64; epochs * count * b], vec![0.0_f64; epochs * count * b]);
        for e in 1..epochs {
            for a in (b + 1).saturating_sub(w)..b {
                let s = (e - 1) * b + a;
                for p in 0..(a + w).saturating_sub(b) {
                    let x = sampler.product(s, e * b + p);
                    let place = &mut before[(e * count + class(b - 1 - a)) * b + p];
                    *place = place.max(x);
                    let place = &mut after[((e - 1) * count + class(p)) * b + a];
                    *place = place.max(x);
                }
            }
        }
        let mut cells: Vec<(usize, usize)> = Vec::new();
        let cell_of = (0..b)
            .map(|p| {
                let cell = (class(b - 1 - p), class(p));
                cells.iter().position(|other| *other == cell).unwrap_or_else(|| {
                    cells.push(cell);
                    cells.len() - 1
                })
            })
            .collect();
        Self { bins: b, epochs, reach: w, count, before, after, cells, cell_of }
    }

    /// The logarithm of the bound.
    ///
    /// Cost: O(Kbw) for each of the O(log²w) pairs of classes.
    pub fn log_zeta(&self, sampler: &Sampler, m: f64) -> f64 {
        let Self { bins: b, epochs, reach: w, count, ref cells, ref cell_of, .. } = *self;
        let power = |x: &[f64]| {
            let mut x: Vec<f64> = x.iter().map(|x| m * x).collect();
            exp_all(&mut x);
            x
        };
        let (before, after) = (power(&self.before), power(&self.after));
        let side = 2 * w - 1;
        let mut product = vec![0.0; b];
        // By the class of the bin before and the cell of the bin at hand.
        let mut best = vec![f64::NEG_INFINITY; count * cells.len()];
        best[(count - 1) * cells.len()..].fill(0.0);
        let mut factor = vec![0.0; count * count * cells.len()];
        for e in 0..epochs {
            let mut own = power(&sampler.gram[e * b * side..][..b * side]);
            own.iter_mut().for_each(|x| *x -= 1.0);
            factor.fill(f64::NEG_INFINITY);
            for left in 0..count {
                for right in 0..count {
                    let (l, r) =
                        (&before[(e * count + left) * b..][..b], &after[(e * count + right) * b..][..b]);
                    for p in 0..b {
                        product[p] = l[p] * r[p];
                    }
                    let base: f64 = product.iter().sum();
                    for q in 0..b {
                        let (from, to) = ((q + 1).saturating_sub(w), (q + w).min(b));
                        let own = &own[q * side + w - 1 + from - q..];
                        let raised: f64 = product[from..to].iter().zip(own).map(|(x, own)| x * own).sum();
                        let place = &mut factor[(left * count + right) * cells.len() + cell_of[q]];
                        *place = place.max(base + raised);
                    }
                }
            }
            // A sum of positive terms, each a product of three: rounded up.
            let up = 1.0 + (b + 64) as f64 * f64::EPSILON;
            factor.iter_mut().for_each(|f| *f = (*f * up / b as f64).ln());
            let mut next = vec![f64::NEG_INFINITY; count * cells.len()];
            for (here, &(left, _)) in cells.iter().enumerate() {
                for before in 0..count {
                    let so_far = best[before * cells.len() + here];
                    for (there, &(_, right)) in cells.iter().enumerate() {
                        // Nobody comes after the last epoch.
                        let right = if e + 1 == epochs { count - 1 } else { right };
                        let value = so_far + factor[(before * count + right) * cells.len() + here];
                        let place = &mut next[left * cells.len() + there];
                        *place = place.max(value);
                    }
                }
            }
            best = next;
        }
        best.into_iter().fold(f64::NEG_INFINITY, f64::max)
    }
}
