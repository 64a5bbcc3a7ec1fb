//! Products of small dense matrices, by rows, for sizes at which a general routine would spend its time on preparations.

use crate::simd::dispatch;

/// A dense matrix by rows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rows {
    pub rows: usize,
    pub columns: usize,
    pub values: Vec<f64>,
}

impl Rows {
    pub fn zeros(rows: usize, columns: usize) -> Self {
        Self { rows, columns, values: vec![0.0; rows * columns] }
    }

    pub fn identity(n: usize) -> Self {
        let mut identity = Self::zeros(n, n);
        (0..n).for_each(|i| identity.values[i * n + i] = 1.0);
        identity
    }

    #[inline(always)]
    pub fn at(&self, i: usize, j: usize) -> f64 {
        self.values[i * self.columns + j]
    }

    #[inline(always)]
    pub fn at_mut(&mut self, i: usize, j: usize) -> &mut f64 {
        &mut self.values[i * self.columns + j]
    }

    pub fn row(&self, i: usize) -> &[f64] {
        &self.values[i * self.columns..][..self.columns]
    }

    pub fn row_mut(&mut self, i: usize) -> &mut [f64] {
        &mut self.values[i * self.columns..][..self.columns]
    }

    pub fn transpose(&self) -> Self {
        let mut out = Self::zeros(self.columns, self.rows);
        for i in 0..self.rows {
            for (j, value) in self.row(i).iter().enumerate() {
                out.values[j * self.rows + i] = *value;
            }
        }
        out
    }

    /// `A B`.
    pub fn times(&self, other: &Self) -> Self {
        let mut out = Self::zeros(self.rows, other.columns);
        out.add_product(1.0, self, other);
        out
    }

    /// `Aᵀ B`.
    pub fn transposed_times(&self, other: &Self) -> Self {
        let mut out = Self::zeros(self.columns, other.columns);
        out.add_transposed_product(1.0, self, other);
        out
    }

    /// `A Bᵀ`.
    pub fn times_transposed(&self, other: &Self) -> Self {
        self.times(&other.transpose())
    }

    /// `self ← self + factor·A B`.
    pub fn add_product(&mut self, factor: f64, a: &Self, b: &Self) {
        debug_assert_eq!((self.rows, a.columns, self.columns), (a.rows, b.rows, b.columns));
        accumulate(&mut self.values, factor, &a.values, &b.values, [a.columns, self.columns]);
    }

    /// `self ← self + factor·Aᵀ B`.
    pub fn add_transposed_product(&mut self, factor: f64, a: &Self, b: &Self) {
        debug_assert_eq!((self.rows, a.rows, self.columns), (a.columns, b.rows, b.columns));
        accumulate_transposed(&mut self.values, factor, &a.values, &b.values, [a.columns, self.columns]);
    }

    /// `self ← self + factor·A Bᵀ`.
    pub fn add_product_transposed(&mut self, factor: f64, a: &Self, b: &Self) {
        self.add_product(factor, a, &b.transpose());
    }

    /// `self ← self + factor·A`.
    pub fn add(&mut self, factor: f64, other: &Self) {
        self.values.iter_mut().zip(&other.values).for_each(|(x, y)| *x += factor * y);
    }
}

#[inline(always)]
fn accumulate_any(out: &mut [f64], factor: f64, a: &[f64], b: &[f64], [inner, columns]: [usize; 2]) {
    if columns == 0 || inner == 0 {
        return;
    }
    for (out, a) in out.chunks_exact_mut(columns).zip(a.chunks_exact(inner)) {
        for (x, b) in a.iter().zip(b.chunks_exact(columns)) {
            let x = factor * x;
            // Half of what is multiplied here is block triangular.
            if x != 0.0 {
                out.iter_mut().zip(b).for_each(|(out, b)| *out += x * b);
            }
        }
    }
}

#[inline(always)]
fn accumulate_transposed_any(
    out: &mut [f64],
    factor: f64,
    a: &[f64],
    b: &[f64],
    [rows, columns]: [usize; 2],
) {
    if columns == 0 || rows == 0 {
        return;
    }
    for (a, b) in a.chunks_exact(rows).zip(b.chunks_exact(columns)) {
        for (x, out) in a.iter().zip(out.chunks_exact_mut(columns)) {
            let x = factor * x;
            if x != 0.0 {
                out.iter_mut().zip(b).for_each(|(out, b)| *out += x * b);
            }
        }
    }
}

dispatch! {
    fn accumulate / accumulate_portable / accumulate_avx2 = accumulate_any(
        out: &mut [f64], factor: f64, a: &[f64], b: &[f64], sizes: [usize; 2]
    );
}
dispatch! {
    fn accumulate_transposed / accumulate_transposed_portable / accumulate_transposed_avx2 =
        accumulate_transposed_any(out: &mut [f64], factor: f64, a: &[f64], b: &[f64], sizes: [usize; 2]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn products_are_those_of_their_entries(
            (m, k, n) in (0..5_usize, 0..5_usize, 0..5_usize),
            entries in prop::collection::vec(prop_oneof![Just(0.0), -1.0..1.0_f64], 50),
        ) {
            let a = Rows { rows: m, columns: k, values: entries[..m * k].to_vec() };
            let b = Rows { rows: k, columns: n, values: entries[25..25 + k * n].to_vec() };
            let product = a.times(&b);
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let exact: f64 = (0..k).map(|l| a.at(i, l) * b.at(l, j)).sum();
                prop_assert!((product.at(i, j) - exact).abs() < 1e-15);
            }
            prop_assert_eq!(&a.transpose().transposed_times(&b), &product);
            prop_assert_eq!(&a.times_transposed(&b.transpose()), &product);
            let mut sum = product.clone();
            sum.add_product(-1.0, &a, &b);
            prop_assert!(sum.values.iter().all(|x| x.abs() < 1e-15));
        }
    }
}
