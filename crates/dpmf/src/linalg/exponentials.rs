//! Lower-triangular matrices of a few exponentials, rows and columns scaled, without a matrix: products in one pass, inner products
//! of columns in closed form.

/// `C = diag(a) T diag(β)` with the Toeplitz matrix `T` of `1, Σω_k, Σω_kθ_k, Σω_kθ_k², …` and `ω, θ, a, β ≥ 0`, `θ < 1`.
#[derive(Clone, Debug, PartialEq)]
pub struct Exponentials {
    pub weights: Vec<f64>,
    pub decays: Vec<f64>,
    pub rows: Vec<f64>,
    pub columns: Vec<f64>,
}

/// Runs `$body` with the constant `$r` equal to the number of exponentials, or says that there are too many.
macro_rules! with_order {
    ($order:expr, $r:ident => $body:expr) => {{
        macro_rules! run {
            ($value:literal) => {{
                const $r: usize = $value;
                $body
            }};
        }
        match $order {
            0 | 1 => run!(1),
            2 => run!(2),
            3 => run!(3),
            4 => run!(4),
            5 => run!(5),
            6 => run!(6),
            _ => run!(12),
        }
    }};
}

impl Exponentials {
    /// Most exponentials.
    pub const MOST: usize = 12;

    pub fn steps(&self) -> usize {
        self.rows.len()
    }

    /// Weights and decays in arrays, the rest zero.
    fn head<const R: usize>(&self) -> ([f64; R], [f64; R]) {
        let (mut weights, mut decays) = ([0.0; R], [0.0; R]);
        weights.iter_mut().zip(&self.weights).for_each(|(a, b)| *a = *b);
        decays.iter_mut().zip(&self.decays).for_each(|(a, b)| *a = *b);
        (weights, decays)
    }

    /// `x ← Cᵀx`. Cost: O(n r).
    pub fn transposed(&self, x: &mut [f64]) {
        with_order!(self.weights.len(), R => {
            let (weights, decays) = self.head::<R>();
            let mut states = [0.0; R];
            for ((x, a), b) in x.iter_mut().zip(&self.rows).zip(&self.columns).rev() {
                let own = a * *x;
                let mut sum = own;
                for k in 0..R {
                    sum += weights[k] * states[k];
                    states[k] = decays[k] * states[k] + own;
                }
                *x = b * sum;
            }
        });
    }

    /// `x ← C x`. Cost: O(n r).
    pub fn apply(&self, x: &mut [f64]) {
        with_order!(self.weights.len(), R => {
            let (weights, decays) = self.head::<R>();
            let mut states = [0.0; R];
            for ((x, a), b) in x.iter_mut().zip(&self.rows).zip(&self.columns) {
                let own = b * *x;
                let mut sum = own;
                for k in 0..R {
                    sum += weights[k] * states[k];
                    states[k] = decays[k] * states[k] + own;
                }
                *x = a * sum;
            }
        });
    }

    /// What inner products of columns are made of.
    ///
    /// For `i < j` it is `β_iβ_j Σ_k ω_kθ_k^{j−i−1} V_k(j)` with `V_k(j) = a_j² + θ_k Σ_l ω_l W_kl(j + 1)`, where
    /// `W_kl(t) = Σ_{i ≥ t} (θ_kθ_l)^{i−t} a_i²`. Cost: O(n r²).
    pub fn products(&self) -> ColumnProducts {
        let (n, r) = (self.steps(), self.weights.len());
        let mut w = vec![0.0; r * r];
        let (mut squares, mut values) = (vec![0.0; n], vec![0.0; n * r]);
        for j in (0..n).rev() {
            let own = self.rows[j] * self.rows[j];
            let mut square = own;
            for k in 0..r {
                let sum: f64 = (0..r).map(|l| self.weights[l] * w[k * r + l]).sum();
                square += self.weights[k] * sum;
                values[j * r + k] = own + self.decays[k] * sum;
            }
            squares[j] = square * self.columns[j] * self.columns[j];
            for k in 0..r {
                for l in 0..r {
                    w[k * r + l] = own + self.decays[k] * self.decays[l] * w[k * r + l];
                }
            }
        }
        ColumnProducts { squares, values }
    }

    /// What the numbers of [`Exponentials::products`], and sums of them, may be off by, relative to themselves: every term is
    /// positive, and a product of few numbers and of a power.
    pub fn rounding(&self) -> f64 {
        (16 * self.steps() + 64 * (self.weights.len() + 4)) as f64 * f64::EPSILON
    }

    /// The inner product of two columns.
    pub fn product(&self, products: &ColumnProducts, i: usize, j: usize) -> f64 {
        let (i, j) = (i.min(j), i.max(j));
        if i == j {
            return products.squares[i];
        }
        let distance = (j - i - 1) as i32;
        let r = self.weights.len();
        let term = |k: usize| self.weights[k] * self.decays[k].powi(distance) * products.values[j * r + k];
        self.columns[i] * self.columns[j] * (0..r).map(term).sum::<f64>()
    }

    /// Squared norms of the sums of every `stride`-th column, and of the products for them.
    ///
    /// Cost: O(n r² + n K r) for `K` columns a sum.
    pub fn folded_squares(&self, stride: usize) -> Vec<f64> {
        let (n, products) = (self.steps(), self.products());
        let square = |p: usize| {
            let mut total = 0.0;
            for j in (p..n).step_by(stride) {
                total += products.squares[j];
                // Columns that are further apart meet less and less: in the order of their distance.
                for i in (p..j).step_by(stride) {
                    total += 2.0 * self.product(&products, i, j);
                }
            }
            total
        };
        (0..stride.min(n)).map(square).collect()
    }
}

/// [`Exponentials::products`].
pub struct ColumnProducts {
    /// `‖C e_j‖²`.
    pub squares: Vec<f64>,
    /// `V_k(j)`, `r` a step.
    pub values: Vec<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example(order: usize) -> Exponentials {
        let number = |k: usize, scale: f64| 0.2 + scale * ((k * k + 3 * k) as f64).sin().abs();
        Exponentials {
            weights: (0..order).map(|k| number(k, 0.4)).collect(),
            decays: (0..order).map(|k| number(k + 7, 0.7)).collect(),
            rows: (0..23).map(|t| number(t, 1.0)).collect(),
            columns: (0..23).map(|t| number(t + 5, 1.0)).collect(),
        }
    }

    fn dense(c: &Exponentials) -> Vec<Vec<f64>> {
        let column = |j: usize| {
            let mut x = vec![0.0; c.steps()];
            for (i, x) in x.iter_mut().enumerate().skip(j) {
                let power = |k: usize| c.weights[k] * c.decays[k].powi((i - j) as i32 - 1);
                let series = if i == j { 1.0 } else { (0..c.weights.len()).map(power).sum() };
                *x = c.rows[i] * series * c.columns[j];
            }
            x
        };
        (0..c.steps()).map(column).collect()
    }

    #[test]
    fn everything_is_that_of_the_dense_matrix() {
        for order in [0, 1, 2, 3, 7] {
            let c = example(order);
            let columns = dense(&c);
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let x: Vec<f64> = (0..23).map(|t| f64::from(t).cos()).collect();
            let (mut forward, mut backward) = (x.clone(), x.clone());
            c.apply(&mut forward);
            c.transposed(&mut backward);
            let products = c.products();
            for j in 0..23 {
                let row: f64 = (0..23).map(|i| columns[i][j] * x[i]).sum();
                assert!(
                    (forward[j] - row).abs() < 1e-12 && (backward[j] - dot(&columns[j], &x)).abs() < 1e-12
                );
                for i in 0..23 {
                    let exact = dot(&columns[i], &columns[j]);
                    assert!(
                        (c.product(&products, i, j) - exact).abs() < 1e-13 * (1.0 + exact),
                        "{order} {i} {j}"
                    );
                }
            }
            let sums = c.folded_squares(5);
            for (p, square) in sums.iter().enumerate() {
                let sum: Vec<f64> =
                    (0..23).map(|t| (p..23).step_by(5).map(|j| columns[j][t]).sum()).collect();
                assert!((square - dot(&sum, &sum)).abs() < 1e-12, "{p}");
            }
        }
    }
}
