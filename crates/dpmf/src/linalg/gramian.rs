//! Gramian recursions: what a state still sends out, and what it has taken in.

/// The quadratic form `sᵀY s`: an upper bound on the energy that a state `s` sends into the steps ahead.
///
/// Guarantee: if every step is given as [`Energy::pull_back`] asks, `sᵀY s` is at least the exact energy,
/// in exact arithmetic, for every `s`; rounding is bounded in the order of positive semidefinite matrices
/// and added. A symmetric `E` with `|E_ab| ≤ δ w_a w_b` satisfies `E ≤ r δ diag(w²)`, and
/// `|Y_ab| ≤ √(Y_aa Y_bb)` bounds the sizes of what was summed.
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

    /// Units in the last place that one step may lose, relative to the sizes of what it sums: products of
    /// length `r` twice, and entries of `f` and `h` that carry 4 rounding errors each.
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

    /// Roots of the energies of the unit states, not rounded down.
    pub fn roots(&self) -> &[f64] {
        &self.roots
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

/// A Gramian `G = RᵀR` held by its root `R`, upper triangular, so that what is small in it keeps its digits.
#[derive(Clone, Debug)]
pub(crate) struct Root {
    n: usize,
    /// By rows; below the diagonal zeros.
    r: Vec<f64>,
}

impl Root {
    /// The zero Gramian.
    pub fn new(n: usize) -> Self {
        Self { n, r: vec![0.0; n * n] }
    }

    /// `R`, by rows.
    pub fn rows(&self) -> &[f64] {
        &self.r
    }

    /// `xᵀG x`.
    pub fn quadratic(&self, x: &[f64]) -> f64 {
        let rows = self.r.chunks_exact(self.n.max(1)).enumerate();
        rows.map(|(k, row)| dot(&row[k..], &x[k..])).map(|product| product * product).sum()
    }

    /// `out = G x`.
    pub fn apply(&self, x: &[f64], out: &mut [f64]) {
        out.fill(0.0);
        for (k, row) in self.r.chunks_exact(self.n.max(1)).enumerate() {
            let product = dot(&row[k..], &x[k..]);
            out[k..].iter_mut().zip(&row[k..]).for_each(|(o, r)| *o += product * r);
        }
    }

    /// `R ← R M` for an `M` that is upper triangular but for diagonal blocks of size `block` from row
    /// `from` on.
    ///
    /// `times(k, row)` multiplies row `k`, given whole, by `M` from the right; its first `k` entries are
    /// zeros.
    pub fn transform(&mut self, from: usize, block: usize, mut times: impl FnMut(usize, &mut [f64])) {
        let n = self.n;
        for (k, row) in self.r.chunks_exact_mut(n.max(1)).enumerate() {
            times(k, row);
        }
        // Rotations of rows make the blocks triangular again.
        for start in (from..n).step_by(block.max(1)) {
            let end = (start + block).min(n);
            for column in start..end {
                for row in column + 1..end {
                    let (above, below) = self.r.split_at_mut(row * n);
                    rotate(&mut above[column * n + column..(column + 1) * n], &mut below[column..n]);
                }
            }
        }
    }

    /// `G ← G + x xᵀ`; `x` is used up.
    pub fn append(&mut self, x: &mut [f64]) {
        for (k, row) in self.r.chunks_exact_mut(self.n.max(1)).enumerate() {
            rotate(&mut row[k..], &mut x[k..]);
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Rotates two rows so that the first entry of `y` becomes zero.
#[inline(always)]
fn rotate(x: &mut [f64], y: &mut [f64]) {
    let (a, b) = (x[0], y[0]);
    if b == 0.0 {
        return;
    }
    let norm = (a * a + b * b).sqrt();
    if norm == 0.0 {
        y[0] = 0.0; // squares underflow: nothing to speak of
        return;
    }
    let (c, s) = (a / norm, b / norm);
    x[0] = norm;
    y[0] = 0.0;
    for (x, y) in x[1..].iter_mut().zip(&mut y[1..]) {
        let (a, b) = (*x, *y);
        *x = c * a + s * b;
        *y = c * b - s * a;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use faer::{Mat, MatRef};
    use proptest::array::{uniform2, uniform4};
    use proptest::prelude::*;

    type Steps = Vec<(Vec<f64>, Vec<f64>)>;

    fn steps(order: usize) -> impl Strategy<Value = Steps> {
        let matrix = prop::collection::vec(-0.9..0.9_f64, order * order);
        let row = prop::collection::vec(-1.0..1.0_f64, order);
        prop::collection::vec((matrix, row), 1..30)
    }

    proptest! {
        #[test]
        fn energy_is_a_tight_upper_bound(
            steps in steps(3),
            state in prop::collection::vec(-1.0..1.0_f64, 3),
        ) {
            let mut energy = Energy::new(3);
            for (f, h) in steps.iter().rev() {
                let size: Vec<f64> = f.iter().map(|x| x.abs()).collect();
                energy.pull_back(f, &size, h);
            }
            let (mut s, mut exact) = (state.clone(), 0.0);
            for (f, h) in &steps {
                let out: f64 = h.iter().zip(&s).map(|(h, s)| h * s).sum();
                exact += out * out;
                s = f.chunks(3).map(|row| row.iter().zip(&s).map(|(f, s)| f * s).sum()).collect();
            }
            let bound = energy.of(&state);
            // The direct sum rounds too; the bound is not tighter than its own slack on large cancelling
            // states.
            prop_assert!(bound >= exact * (1.0 - 1e-14), "{bound} below {exact}");
            let size: f64 = (0..3).map(|a| energy.roots[a] * state[a].abs()).sum();
            prop_assert!(bound - exact <= 1e-11 * size * size, "{bound} above {exact}");
        }

        #[test]
        fn energy_is_never_below_the_exact_value(
            steps in prop::collection::vec((uniform4(-90..90_i128), uniform2(-90..90_i128)), 4),
            state in uniform2(-90..90_i128),
        ) {
            // Multiples of 1/128, so that integers hold the exact energy: a state after k steps has a
            // factor 128^{−(k+1)}.
            let real = |x: &i128| *x as f64 / 128.0;
            let mut energy = Energy::new(2);
            for (f, h) in steps.iter().rev() {
                let f: Vec<f64> = f.iter().map(real).collect();
                let h: Vec<f64> = h.iter().map(real).collect();
                let size: Vec<f64> = f.iter().map(|x| x.abs()).collect();
                energy.pull_back(&f, &size, &h);
            }
            let (mut s, mut exact) = (state, 0);
            for (k, (f, h)) in steps.iter().enumerate() {
                let out = h[0] * s[0] + h[1] * s[1];
                exact += (out * out) << (14 * (steps.len() - 1 - k));
                s = [f[0] * s[0] + f[1] * s[1], f[2] * s[0] + f[3] * s[1]];
            }
            let state: Vec<f64> = state.iter().map(real).collect();
            let scale = 2_f64.powi(14 * (steps.len() as i32 + 1));
            prop_assert!((energy.of(&state) * scale) as i128 >= exact);
        }

        #[test]
        fn roots_follow_their_gramian(steps in steps(5)) {
            // Blocks of sizes 1, 2, 2 on the diagonal and anything above them.
            let block = |i: usize| i.div_ceil(2);
            let mut root = Root::new(5);
            let mut gramian = Mat::<f64>::zeros(5, 5);
            for (entries, x) in &steps {
                let upper = |i, j| if block(i) <= block(j) { entries[i * 5 + j] } else { 0.0 };
                let m = Mat::from_fn(5, 5, upper);
                root.transform(1, 2, |_, row| {
                    let product = MatRef::from_row_major_slice(row, 1, 5) * &m;
                    (0..5).for_each(|j| row[j] = product[(0, j)]);
                });
                root.append(&mut x.clone());
                let x = MatRef::from_column_major_slice(x, 5, 1);
                gramian = m.transpose() * &gramian * &m + x * x.transpose();
            }
            let r = MatRef::from_row_major_slice(root.rows(), 5, 5);
            prop_assert!((r.transpose() * r - &gramian).norm_max() < 1e-12 * gramian.norm_max());
            prop_assert!((0..5).all(|i| (0..i).all(|j| r[(i, j)] == 0.0)));

            let x = [1.0, -2.0, 0.5, 3.0, -0.25];
            let mut product = [0.0; 5];
            root.apply(&x, &mut product);
            let expected = &gramian * MatRef::from_column_major_slice(&x, 5, 1);
            let quadratic: f64 = product.iter().zip(&x).map(|(a, b)| a * b).sum();
            prop_assert!((root.quadratic(&x) - quadratic).abs() < 1e-11 * gramian.norm_max());
            for k in 0..5 {
                prop_assert!((product[k] - expected[(k, 0)]).abs() < 1e-11 * gramian.norm_max());
            }
        }
    }

    #[test]
    fn one_state_in_closed_form() {
        // Two steps h = 3, f = 1/2: energy 9(1 + 1/4) s².
        let mut energy = Energy::new(1);
        for _ in 0..2 {
            energy.pull_back(&[0.5], &[0.5], &[3.0]);
        }
        let excess = energy.of(&[2.0]) / 45.0 - 1.0;
        assert!((0.0..1e-13).contains(&excess), "{excess:e}");
    }
}
