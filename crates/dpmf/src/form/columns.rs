//! Columns of an encoder, computed side by side, with what rounding hides of their norms.

use rayon::prelude::*;

/// Columns that are computed side by side.
pub(super) const LANES: usize = 8;

/// One number of each of them.
pub(super) type Lanes = [f64; LANES];

/// Columns `first, first + 1, …` of a computed encoder `Ĉ`, from row `first` on, and for each a bound on
/// `‖e_j − N ĉ_j‖²`. Columns past the last are zero.
pub(super) struct Verified {
    pub z: Vec<Lanes>,
    pub residual_sq: Lanes,
}

/// Squared column norms of `C = N⁻¹`, from computed columns.
///
/// With `N Ĉ = I − R`, `C = Ĉ + C R`, so `‖C‖(1 − ‖R‖) ≤ ‖Ĉ‖` and `‖C e_j − ĉ_j‖ ≤ ‖C‖‖R e_j‖`.
///
/// Guarantee: ≥ the exact values if the residuals are bounds; infinite where `R` is not small, and nothing is known.
pub(super) fn verified_norms_sq(n: usize, columns: impl Fn(usize) -> Verified + Sync) -> Vec<f64> {
    let measure = |first: usize| {
        let Verified { z, residual_sq } = columns(first);
        let norms_sq = z.iter().fold([0.0; LANES], |sum, z| std::array::from_fn(|l| sum[l] + z[l] * z[l]));
        (norms_sq, residual_sq)
    };
    let starts: Vec<usize> = (0..n).step_by(LANES).collect();
    let measured: Vec<(Lanes, Lanes)> = starts.into_par_iter().map(measure).collect();
    // Sums of up to n² squares, all positive.
    let room = 1.0 + (2 * n + 16) as f64 * f64::EPSILON;
    let total = |part: fn(&(Lanes, Lanes)) -> &Lanes| {
        (measured.iter().flat_map(part).sum::<f64>() * room).sqrt() * room
    };
    let (size, residual) = (total(|m| &m.0), total(|m| &m.1));
    let size = if residual < 0.5 { size / (1.0 - residual) * room } else { f64::INFINITY };
    let norm_sq = |(norm_sq, residual_sq): (&f64, &f64)| {
        let norm = (norm_sq.sqrt() + size * residual_sq.sqrt()) * room;
        if norm.is_nan() { f64::INFINITY } else { norm * norm * room }
    };
    let norms = measured.iter().flat_map(|(norms, residuals)| norms.iter().zip(residuals).map(norm_sq));
    norms.take(n).collect()
}
