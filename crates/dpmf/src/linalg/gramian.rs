//! Gramian recursions: the energy that a state still sends out.

/// The quadratic form `sᵀY s`: an upper bound on the energy that a state `s` sends into the steps ahead.
///
/// Guarantee: if every step is given as [`Energy::pull_back`] asks, `sᵀY s` is at least the exact energy, in exact
/// arithmetic, for every `s`; rounding is bounded in the order of positive semidefinite matrices and added. A
/// symmetric `E` with `|E_ab| ≤ δ w_a w_b` satisfies `E ≤ r δ diag(w²)`, and `|Y_ab| ≤ √(Y_aa Y_bb)` bounds the sizes
/// of what was summed.
/// Cost: 3r³ multiply-adds a step.
pub(crate) struct Energy {
    order: usize,
    form: Vec<f64>,
    product: Vec<f64>,
    roots: Vec<f64>,
}

impl Energy {
    /// After the last step: no energy.
    pub fn new(order: usize) -> Self {
        Self {
            order,
            form: vec![0.0; order * order],
            product: vec![0.0; order * order],
            roots: vec![0.0; order],
        }
    }

    /// Units in the last place that one step may lose, relative to the sizes of what it sums: products of length
    /// `r` twice, and entries of `f` and `h` that carry 4 rounding errors each.
    fn slack(&self) -> f64 {
        (2.0 * self.order as f64 + 16.0) * f64::EPSILON
    }

    /// Energy of the state `s`, not rounded down.
    pub fn of(&self, s: &[f64]) -> f64 {
        let r = self.order;
        let mut energy = 0.0;
        let mut size = 0.0;
        for a in 0..r {
            let row = &self.form[a * r..][..r];
            energy += s[a] * row.iter().zip(s).map(|(y, s)| y * s).sum::<f64>();
            size += s[a].abs() * self.roots[a];
        }
        energy + self.slack() * size * size
    }

    /// Before a step that sends out `h s` and moves to `f s`: `Y ← h hᵀ + fᵀY f`, not rounded down.
    ///
    /// `f` and `h` may carry 4 rounding errors an entry, relative to `size` (not below `|f|`) and to `|h|`.
    pub fn pull_back(&mut self, f: &[f64], size: &[f64], h: &[f64]) {
        let r = self.order;
        let Self { form, product, roots, .. } = self;
        product.fill(0.0);
        for a in 0..r {
            let target = &mut product[a * r..][..r];
            for b in 0..r {
                let y = form[a * r + b];
                target.iter_mut().zip(&f[b * r..]).for_each(|(t, f)| *t += y * f);
            }
        }
        // Sizes before the form is overwritten: w_a² = (Σ_b |f_ba| √Y_bb)² + h_a².
        let mut reach = vec![0.0; r];
        for b in 0..r {
            let root = roots[b];
            reach.iter_mut().zip(&size[b * r..]).for_each(|(w, f)| *w += f * root);
        }
        for a in 0..r {
            let target = &mut form[a * r..][..r];
            target.iter_mut().zip(h).for_each(|(t, x)| *t = h[a] * x);
        }
        for b in 0..r {
            let source = &product[b * r..][..r];
            for a in 0..r {
                let x = f[b * r + a];
                form[a * r + a..(a + 1) * r].iter_mut().zip(&source[a..]).for_each(|(t, s)| *t += x * s);
            }
        }
        let slack = r as f64 * self.slack();
        for a in 0..r {
            for b in 0..a {
                self.form[a * r + b] = self.form[b * r + a];
            }
            let diagonal = &mut self.form[a * r + a];
            *diagonal += slack * (reach[a] * reach[a] + h[a] * h[a]);
            self.roots[a] = diagonal.sqrt() * (1.0 + f64::EPSILON);
        }
    }
}
