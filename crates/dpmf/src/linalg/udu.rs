//! The factorization behind an autoregressive process: `LᵀD⁻¹L + tI = U Δ Uᵀ`.

use super::banded::LowerBanded;
use super::front::Front;
use super::lanes::Lanes;
use super::{MAX_BANDWIDTH, with_band};
use crate::error::{Error, Result};

/// `K + tI = U Δ Uᵀ` with `K = LᵀD⁻¹L`, `U` unit upper banded and `Δ` diagonal and positive.
///
/// `(K + t)⁻¹` is the covariance of `x_i = −Σ_{k≤w} U_{i−k,i} x_{i−k} + e_i/√δ_i` with white unit `e`.
#[derive(Clone, Debug, PartialEq)]
pub struct Udu {
    bandwidth: usize,
    coefficients: Vec<f64>,
    delta: Vec<f64>,
}

impl Udu {
    /// Factors `LᵀD⁻¹L + tI`, `D = diag(v)`, from the last variable to the first.
    ///
    /// The rows of `L` are rotated into the factor; neither `K` nor any other square is formed, so the accuracy is
    /// that of `[LᵀD^{-1/2}, √t I]`, whose condition number is the root of that of `K + t`.
    ///
    /// Cost: O(n w²) time, `n (w + 1)` numbers.
    ///
    /// Errors: `v` of the wrong length or not positive and finite, `t` not positive and finite, a bandwidth above
    /// [`MAX_BANDWIDTH`], numbers so large or small that their squares leave the range of `f64`.
    pub fn new(l: &LowerBanded, v: &[f64], t: f64) -> Result<Self> {
        check_weights(l.n(), v)?;
        if !(t > 0.0 && t.is_finite()) {
            return Err(Error::argument("node", t, "it must be positive and finite"));
        }
        let udu = with_band!(l.bandwidth(), N => Self::factor::<N>(l, v, t))?;
        let bad = |x: &f64| !x.is_finite();
        if let Some(i) = udu.delta.iter().position(|x| bad(x) || *x <= 0.0) {
            return Err(Error::Numerical {
                what: "UΔUᵀ",
                index: i,
                reason: "a pivot is not positive and finite",
            });
        }
        if let Some(i) = udu.coefficients.iter().position(bad) {
            let index = i / udu.bandwidth;
            return Err(Error::Numerical { what: "UΔUᵀ", index, reason: "a coefficient is not finite" });
        }
        Ok(udu)
    }

    fn factor<const N: usize>(l: &LowerBanded, v: &[f64], t: f64) -> Self {
        let (n, bandwidth) = (l.n(), l.bandwidth());
        let mut coefficients = vec![0.0; n * bandwidth];
        let mut delta = vec![0.0; n];
        let entering = Lanes([t]);
        let mut front = Front::<N, 1>::diagonal([entering; N]);
        for i in (0..n).rev() {
            let row = l.row(i);
            let z = std::array::from_fn(|k| Lanes([row.get(k).copied().unwrap_or(0.0)]));
            front.add(Lanes([1.0 / v[i]]), z);
            let column = front.advance(entering);
            delta[i] = column[0].0[0];
            for k in 0..bandwidth {
                coefficients[i * bandwidth + k] = column[k + 1].0[0];
            }
        }
        Self { bandwidth, coefficients, delta }
    }

    /// Number of rows and columns.
    pub fn n(&self) -> usize {
        self.delta.len()
    }

    /// Number of super-diagonals of `U`, the order of the autoregression.
    pub fn bandwidth(&self) -> usize {
        self.bandwidth
    }

    /// Column `i` of `U` above the diagonal: `coefficients(i)[k − 1]` is `U_{i−k,i}`, zero above row 0.
    pub fn coefficients(&self, i: usize) -> &[f64] {
        &self.coefficients[i * self.bandwidth..][..self.bandwidth]
    }

    /// The diagonal of `Δ`.
    pub fn delta(&self) -> &[f64] {
        &self.delta
    }
}

/// Refuses weights that are not as many as `n`, positive and finite.
pub(crate) fn check_weights(n: usize, v: &[f64]) -> Result<()> {
    if v.len() != n {
        return Err(Error::WrongLength { name: "v", actual: v.len(), expected: n });
    }
    match v.iter().position(|&x| !(x > 0.0 && x.is_finite())) {
        None => Ok(()),
        Some(index) => Err(Error::InvalidEntry {
            name: "v",
            index,
            value: v[index],
            rule: "it must be positive and finite",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use faer::Mat;
    use proptest::prelude::*;

    #[test]
    fn prefix_sum_of_two_by_hand() {
        // L = (1; −1 1), D = diag(2, 3): K + 1 = (1/2 + 1/3 + 1, −1/3; −1/3, 1/3 + 1).
        let l = LowerBanded::from_fn(2, 1, |_, k| if k == 0 { 1.0 } else { -1.0 });
        let udu = Udu::new(&l, &[2.0, 3.0], 1.0).unwrap();
        assert!((udu.delta()[1] - 4.0 / 3.0).abs() < 1e-15);
        assert!((udu.coefficients(1)[0] + 0.25).abs() < 1e-15);
        assert!((udu.delta()[0] - (11.0 / 6.0 - 1.0 / 12.0)).abs() < 1e-15);
        assert_eq!(udu.coefficients(0), [0.0]);
    }

    proptest! {
        #[test]
        fn the_factors_multiply_back(
            n in 1..12_usize,
            bandwidth in 0..=MAX_BANDWIDTH,
            entries in prop::collection::vec(-1.0..1.0_f64, 60),
            log_v in prop::collection::vec(-6.0..6.0_f64, 12),
            log_t in -8.0..8.0_f64,
        ) {
            let l = LowerBanded::from_fn(n, bandwidth, |i, k| {
                let x = entries[5 * i + k];
                if k == 0 { 0.05 + x.abs() } else { x }
            });
            let v: Vec<f64> = log_v[..n].iter().map(|x| x.exp()).collect();
            let t = log_t.exp();
            let udu = Udu::new(&l, &v, t).unwrap();
            prop_assert_eq!((udu.n(), udu.bandwidth()), (n, bandwidth));
            let u = Mat::from_fn(n, n, |i, j| match j.checked_sub(i) {
                Some(0) => 1.0,
                Some(k) if k <= bandwidth => udu.coefficients(j)[k - 1],
                _ => 0.0,
            });
            let dense = l.to_dense();
            let scale = t + (0..n)
                .map(|i| (0..n).map(|j| dense[(i, j)].powi(2) / v[i]).sum::<f64>())
                .fold(0.0, f64::max);
            for i in 0..n {
                for j in 0..n {
                    let product: f64 = (0..n).map(|k| u[(i, k)] * udu.delta()[k] * u[(j, k)]).sum();
                    let shift = if i == j { t } else { 0.0 };
                    let exact: f64 =
                        shift + (0..n).map(|k| dense[(k, i)] * dense[(k, j)] / v[k]).sum::<f64>();
                    prop_assert!((product - exact).abs() < 1e-13 * scale, "{i} {j} {product} {exact}");
                }
            }
        }
    }

    #[test]
    fn pivots_keep_their_digits_when_the_node_is_tiny() {
        // K + t at t → 0: the product of the pivots is det K = ∏ L_ii²/v_i, and the last pivots alone are O(1).
        let n = 200;
        let momentum = crate::workload::Optimizer { momentum: 0.99, ..Default::default() };
        let eta = "cooldown:0.25:0.05".parse::<crate::Schedule>().unwrap().values(n);
        let workload = crate::Workload::sgd(eta, momentum).unwrap();
        let l = &workload.recurrence().unwrap().left;
        let udu = Udu::new(l, &vec![1.0; n], 1e-30).unwrap();
        let log_det: f64 = udu.delta().iter().map(|x| x.ln()).sum();
        let exact: f64 = (0..n).map(|i| 2.0 * l.row(i)[0].ln()).sum();
        assert!((log_det - exact).abs() < 1e-10, "{log_det} {exact}");
    }

    #[test]
    fn bad_input_is_refused() {
        let l = LowerBanded::from_fn(2, 1, |_, k| if k == 0 { 1.0 } else { -1.0 });
        assert!(Udu::new(&l, &[1.0], 1.0).unwrap_err().to_string().contains("length 1"));
        assert!(Udu::new(&l, &[1.0, 0.0], 1.0).unwrap_err().to_string().contains("v[1] is 0"));
        assert!(Udu::new(&l, &[1.0, f64::NAN], 1.0).unwrap_err().to_string().contains("v[1] is NaN"));
        assert!(Udu::new(&l, &[1.0, 1.0], 0.0).unwrap_err().to_string().contains("node is 0"));
        assert!(Udu::new(&l, &[1e-320, 1.0], 1.0).unwrap_err().to_string().contains("UΔUᵀ"));
        let wide = LowerBanded::from_fn(9, MAX_BANDWIDTH + 1, |_, _| 1.0);
        assert_eq!(Udu::new(&wide, &[1.0; 9], 1.0).unwrap_err().kind(), "unsupported");
    }
}
