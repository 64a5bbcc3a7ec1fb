//! Diagonals of `(P Pᵀ + tD)⁻¹` and `Rᵀ(R D Rᵀ + t P Pᵀ)⁻¹R`, summed over nodes `t`.

use super::front::{Front, InverseFront};
use super::lanes::Lanes;
use crate::simd::dispatch;

/// Steps between checkpoints: the factor of a block, `N·M` numbers a step, stays in the second-level cache.
const BLOCK: usize = 256;

/// Weight with which a variable enters in the ratio form, where no row concerns it alone.
///
/// It keeps the first rotations from dividing zero by zero, and is far below the last digit of all that follows.
const ENTERING: f64 = 1e-140;

/// The matrix `(P Pᵀ + tD)/ω`, or `(R D Rᵀ + t P Pᵀ)/ω` if `RATIO`, as a sum of weighted rows; one node a lane.
pub(crate) struct Pencil<'a, const N: usize, const M: usize, const RATIO: bool> {
    /// Columns of `P`, from the diagonal down.
    pub left: &'a [[f64; N]],
    /// Columns of `R`, with at most `N − 1` entries; none unless `RATIO`.
    pub right: &'a [[f64; N]],
    /// The diagonal of `D`.
    pub v: &'a [f64],
    /// `1/ω`.
    pub alpha: Lanes<M>,
    /// `t/ω`.
    pub tau: Lanes<M>,
}

impl<const N: usize, const M: usize, const RATIO: bool> Pencil<'_, N, M, RATIO> {
    /// `Σ ω (P Pᵀ + tD)⁻¹` or `Σ ω Rᵀ(R D Rᵀ + t P Pᵀ)⁻¹R`, the sum over lanes, on its diagonal.
    ///
    /// Uses the widest registers there are; the bits are the same with all of them.
    ///
    /// Cost: O(n N²) time a lane; `n + O(n/256)` numbers of memory.
    pub fn diagonal(&self) -> Vec<f64> {
        sweep(self)
    }

    /// Forward once, laying down a checkpoint every [`BLOCK`] steps; then block by block from the last, forward
    /// again to store the factor and backward over it for the inverse. The second forward pass is cheaper than
    /// sending the whole factor through memory.
    #[inline(always)]
    fn sweep(&self) -> Vec<f64> {
        let n = self.v.len();
        let mut front = self.start();
        let mut checkpoints = Vec::with_capacity(n.div_ceil(BLOCK));
        for start in (0..n).step_by(BLOCK) {
            checkpoints.push(front);
            if start + BLOCK < n {
                for i in start..start + BLOCK {
                    self.eliminate(&mut front, i);
                }
            }
        }

        let mut x = vec![0.0; n];
        let mut rows = vec![[Lanes::ZERO; N]; BLOCK.min(n)];
        let mut inverse = InverseFront::<N, M>::empty();
        for (block, mut front) in checkpoints.into_iter().enumerate().rev() {
            let start = block * BLOCK;
            let end = (start + BLOCK).min(n);
            for i in start..end {
                rows[i - start] = self.eliminate(&mut front, i);
            }
            for i in (start..end).rev() {
                let row = &rows[i - start];
                let diagonal = inverse.retreat(row[0], row);
                x[i] = if RATIO { inverse.quadratic(&self.right[i]).sum() } else { diagonal.sum() };
            }
        }
        x
    }

    #[inline(always)]
    fn start(&self) -> Front<N, M> {
        let mut weight = [Lanes::ZERO; N];
        for i in 0..N {
            weight[i] = self.entering(i);
        }
        Front::diagonal(weight)
    }

    #[inline(always)]
    fn entering(&self, i: usize) -> Lanes<M> {
        if RATIO {
            Lanes::splat(ENTERING)
        } else {
            // Past the end any positive weight will do: no row reaches there.
            self.tau * Lanes::splat(if i < self.v.len() { self.v[i] } else { 1.0 })
        }
    }

    /// Eliminates variable `i`: the reciprocal of its pivot in place 0, then the multipliers.
    #[inline(always)]
    fn eliminate(&self, front: &mut Front<N, M>, i: usize) -> [Lanes<M>; N] {
        let inverse = if RATIO {
            front.add(self.tau, splat(&self.left[i]));
            front.add(self.alpha * Lanes::splat(self.v[i]), splat(&self.right[i]))
        } else {
            front.add(self.alpha, splat(&self.left[i]))
        };
        let mut row = front.advance(self.entering(i + N));
        row[0] = inverse;
        row
    }
}

#[inline(always)]
fn sweep_any<const N: usize, const M: usize, const RATIO: bool>(
    pencil: &Pencil<'_, N, M, RATIO>,
) -> Vec<f64> {
    pencil.sweep()
}

dispatch! {
    fn sweep / sweep_portable / sweep_avx2 = sweep_any[const N: usize, const M: usize, const RATIO: bool](
        pencil: &Pencil<'_, N, M, RATIO>
    ) -> Vec<f64>;
}

#[inline(always)]
fn splat<const N: usize, const M: usize>(z: &[f64; N]) -> [Lanes<M>; N] {
    let mut out = [Lanes::ZERO; N];
    for k in 0..N {
        out[k] = Lanes::splat(z[k]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use faer::Mat;
    use faer::linalg::solvers::DenseSolveCore;
    use proptest::prelude::*;

    const LANES: usize = 4;

    /// The same sum from dense inverses.
    fn dense<const N: usize>(
        left: &[[f64; N]],
        right: &[[f64; N]],
        v: &[f64],
        nodes: &[(f64, f64)],
    ) -> Vec<f64> {
        let n = v.len();
        let matrix = |columns: &[[f64; N]]| {
            Mat::from_fn(n, n, |i, j| if i >= j && i - j < N { columns[j][i - j] } else { 0.0 })
        };
        let d = Mat::from_fn(n, n, |i, j| if i == j { v[i] } else { 0.0 });
        let p = matrix(left);
        let mut x = vec![0.0; n];
        for &(t, omega) in nodes {
            let z = if right.is_empty() {
                (&p * p.transpose() + t * &d).partial_piv_lu().inverse()
            } else {
                let r = matrix(right);
                let g = &r * &d * r.transpose() + t * &p * p.transpose();
                r.transpose() * g.partial_piv_lu().inverse() * &r
            };
            for i in 0..n {
                x[i] += omega * z[(i, i)];
            }
        }
        x
    }

    fn agree<const N: usize>(
        n: usize,
        entries: &[f64],
        log_v: &[f64],
        log_nodes: &[(f64, f64)],
    ) -> std::result::Result<(), TestCaseError> {
        let column = |j: usize, reach: usize, seed: usize| {
            std::array::from_fn::<f64, N, _>(|k| {
                let x = entries[(seed + 7 * j + k) % entries.len()];
                match k {
                    0 => 0.3 + x.abs(),
                    k if j + k < n && k <= reach => x,
                    _ => 0.0,
                }
            })
        };
        let left: Vec<_> = (0..n).map(|j| column(j, N - 1, 0)).collect();
        let right: Vec<_> = (0..n).map(|j| column(j, N - 2, 3)).collect();
        let v: Vec<f64> = log_v[..n].iter().map(|x| x.exp()).collect();
        let nodes: Vec<_> = log_nodes.iter().map(|(t, w)| (t.exp(), w.exp())).collect();
        let alpha = Lanes(std::array::from_fn::<f64, LANES, _>(|q| 1.0 / nodes[q].1));
        let tau = Lanes(std::array::from_fn::<f64, LANES, _>(|q| nodes[q].0 / nodes[q].1));

        let plain = Pencil::<N, LANES, false> { left: &left, right: &[], v: &v, alpha, tau }.diagonal();
        for (x, exact) in plain.iter().zip(dense(&left, &[], &v, &nodes)) {
            prop_assert!((x / exact - 1.0).abs() < 1e-9, "N = {N}: {x} {exact}");
        }
        let ratio = Pencil::<N, LANES, true> { left: &left, right: &right, v: &v, alpha, tau }.diagonal();
        for (x, exact) in ratio.iter().zip(dense(&left, &right, &v, &nodes)) {
            prop_assert!((x / exact - 1.0).abs() < 1e-9, "N = {N}, ratio: {x} {exact}");
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn every_band_gives_the_dense_inverse(
            n in 1..9_usize,
            entries in prop::collection::vec(-0.5..0.5_f64, 41),
            log_v in prop::collection::vec(-2.0..2.0_f64, 9),
            log_nodes in prop::collection::vec((-3.0..3.0_f64, -2.0..2.0_f64), LANES),
        ) {
            agree::<2>(n, &entries, &log_v, &log_nodes)?;
            agree::<3>(n, &entries, &log_v, &log_nodes)?;
            agree::<4>(n, &entries, &log_v, &log_nodes)?;
            agree::<5>(n, &entries, &log_v, &log_nodes)?;
        }
    }

    #[test]
    fn one_step_by_hand() {
        // ω/(p² + t v), and ω r²/(r² v + t p²).
        let (p, r, v, t, omega) = (2.0, 3.0, 5.0, 0.5, 0.25);
        let (alpha, tau) = (Lanes([1.0 / omega]), Lanes([t / omega]));
        let plain = Pencil::<2, 1, false> { left: &[[p, 0.0]], right: &[], v: &[v], alpha, tau }.diagonal();
        assert!((plain[0] - omega / (p * p + t * v)).abs() < 1e-16);
        let ratio =
            Pencil::<2, 1, true> { left: &[[p, 0.0]], right: &[[r, 0.0]], v: &[v], alpha, tau }.diagonal();
        assert!((ratio[0] - omega * r * r / (r * r * v + t * p * p)).abs() < 1e-16);
    }

    #[test]
    fn registers_do_not_change_a_bit() {
        let n = 3 * BLOCK + 5;
        let left: Vec<[f64; 3]> = (0..n)
            .map(|j| {
                let eta = 1.0 + (j as f64).sin() / 2.0;
                [1.0 / eta, if j + 1 < n { -1.9 / eta } else { 0.0 }, if j + 2 < n { 0.9 / eta } else { 0.0 }]
            })
            .collect();
        let v: Vec<f64> = (0..n).map(|j| 1.0 + (j as f64).cos() / 2.0).collect();
        let (alpha, tau) = (Lanes([0.3, 0.7, 1.1, 2.0]), Lanes([1e-9, 1e-5, 1e-2, 3.0]));
        let pencil = Pencil::<3, 4, false> { left: &left, right: &[], v: &v, alpha, tau };
        assert_eq!(pencil.diagonal(), pencil.sweep());
    }
}
