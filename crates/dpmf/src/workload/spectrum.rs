//! Bounds on the spectrum of a weighted workload.

use super::Recurrence;
use crate::error::Result;
use crate::linalg::banded::LowerBanded;
use crate::linalg::front::InverseFront;
use crate::linalg::lanes::Lanes;
use crate::linalg::{MAX_BANDWIDTH, with_band};

/// What bounds the spectrum of `A D Aᵀ`, `A = P⁻¹R`, for every `D`.
#[derive(Clone, Debug)]
pub(crate) struct Spectrum {
    column_norms_sq: Vec<f64>,
    /// `|P|`.
    left: LowerBanded,
    /// The comparison matrix of `R`: its diagonal, and minus the sizes of the rest.
    right: Option<LowerBanded>,
}

impl Spectrum {
    /// Cost: O(n w²).
    ///
    /// Errors: a bandwidth above [`MAX_BANDWIDTH`].
    pub fn new(recurrence: &Recurrence) -> Result<Self> {
        let compare = |r: &LowerBanded| {
            LowerBanded::from_fn(r.n(), r.bandwidth(), |i, k| {
                let size = r.row(i)[k].abs();
                if k == 0 { size } else { -size }
            })
        };
        Ok(Self {
            column_norms_sq: column_norms_sq(recurrence)?,
            left: recurrence.left.map(f64::abs),
            right: recurrence.right.as_ref().map(compare),
        })
    }

    /// An interval that holds the spectrum of `A D Aᵀ`, `D = diag(v)`, and so that of `D^{1/2}AᵀAD^{1/2}`.
    ///
    /// Above by the trace, `Σ v_j ‖A e_j‖²`. Below by the largest row sum of `|G||G|ᵀ` with `G = D^{-1/2}R⁻¹P`, the
    /// root of the inverse; `|R⁻¹| ≤ ⟨R⟩⁻¹`, the inverse of the comparison matrix, entry by entry. Without `R` the
    /// entries `(i, j)` of `|G||G|ᵀ` are at most the geometric mean of its diagonal there, so the bound is off by
    /// `2w + 1` at most. Cost: O(n w).
    pub fn bounds(&self, v: &[f64]) -> (f64, f64) {
        let trace: f64 = self.column_norms_sq.iter().zip(v).map(|(a, v)| a * v).sum();
        let root: Vec<f64> = v.iter().map(|v| 1.0 / v.sqrt()).collect();
        let mut sums = root.clone();
        if let Some(right) = &self.right {
            right.solve_transposed(&mut sums);
        }
        self.left.multiply_transposed(&mut sums);
        self.left.multiply(&mut sums);
        if let Some(right) = &self.right {
            right.solve(&mut sums);
        }
        let largest = sums.iter().zip(&root).map(|(s, r)| s * r).fold(0.0, f64::max);
        // Room for rounding: sums of positive terms, except inside the column norms of a wide band.
        (0.999 / largest, trace / 0.9)
    }
}

/// Bandwidth of the array algorithm for `A = P⁻¹R`: that of `P`, and one more than that of `R`, whose columns must fit
/// in the block of the inverse that is kept.
pub(crate) fn array_bandwidth(recurrence: &Recurrence) -> usize {
    recurrence.right.as_ref().map_or(0, |r| r.bandwidth() + 1).max(recurrence.left.bandwidth())
}

/// Squared column norms of `A = P⁻¹R`: the diagonal of `Rᵀ(PPᵀ)⁻¹R`, a sum of squares at every step.
pub(crate) fn column_norms_sq(recurrence: &Recurrence) -> Result<Vec<f64>> {
    with_band!(array_bandwidth(recurrence), N => {
        let n = recurrence.left.n();
        let mut norms = vec![0.0; n];
        let mut inverse = InverseFront::<N, 1>::empty();
        for j in (0..n).rev() {
            let column = recurrence.left.column::<N>(j);
            let l = column.map(|p| Lanes([p / column[0]]));
            norms[j] = inverse.retreat(Lanes([1.0 / (column[0] * column[0])]), &l).0[0];
            if let Some(right) = &recurrence.right {
                norms[j] = inverse.quadratic(&right.column::<N>(j)).0[0];
            }
        }
        norms
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Average, Optimizer, Workload};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_interval_holds_every_eigenvalue(
            momentum in prop_oneof![Just(0.0), Just(0.5), Just(0.99)],
            nesterov in any::<bool>(),
            average in prop_oneof![Just(Average::None), Just(Average::Uniform), Just(Average::Ema(0.9))],
            steps in prop::collection::vec((0.05..1.0_f64, -4.0..4.0_f64), 1..20),
        ) {
            let (eta, log_v): (Vec<f64>, Vec<f64>) = steps.into_iter().unzip();
            let v: Vec<f64> = log_v.into_iter().map(f64::exp).collect();
            let optimizer =
                Optimizer { momentum, nesterov: nesterov && momentum > 0.0, average, ..Default::default() };
            let workload = Workload::sgd(eta, optimizer).unwrap();
            let spectrum = Spectrum::new(workload.recurrence().unwrap()).unwrap();
            let (min, max) = spectrum.bounds(&v);
            let mut a = workload.to_dense();
            for j in 0..v.len() {
                let exact = a.col(j).squared_norm_l2();
                prop_assert!((spectrum.column_norms_sq[j] / exact - 1.0).abs() < 1e-11);
                a.col_mut(j).iter_mut().for_each(|x| *x *= v[j].sqrt());
            }
            let values = a.singular_values().unwrap();
            let (largest, smallest) = (values[0], values[v.len() - 1]);
            prop_assert!(smallest * smallest >= min && largest * largest <= max);
            // Not so loose that nodes are wasted: each factor e costs Q/40 or so.
            prop_assert!(largest * largest > 0.01 * max);
            prop_assert!(smallest * smallest < 100.0 * min, "{} {min}", smallest * smallest);
        }
    }

    #[test]
    fn column_norms_keep_their_digits_in_long_averages() {
        // Three slow poles: a recursion on the Gramian itself, instead of its factor, is off by 1e-6 here.
        let n = 1000;
        let optimizer = Optimizer { momentum: 0.95, average: Average::Ema(0.99), ..Default::default() };
        let eta = "cooldown:0.25:0.05".parse::<crate::Schedule>().unwrap().values(n);
        let workload = Workload::sgd(eta, optimizer).unwrap();
        let norms = column_norms_sq(workload.recurrence().unwrap()).unwrap();
        for j in [0, 1, n / 3, n - 2, n - 1] {
            let mut column = vec![0.0; n];
            column[j] = 1.0;
            workload.apply(&mut column);
            let exact: f64 = column.iter().map(|a| a * a).sum();
            assert!((norms[j] / exact - 1.0).abs() < 1e-9, "column {j}: {:e}", norms[j] / exact - 1.0);
        }
    }
}
