//! The Gaussian matrix mechanism as the game sees it, and what is public about its noise.

use super::game::{AuditRng, Session, StreamMechanism};
use crate::accounting::check_positive;
use crate::error::{Error, Result};
use crate::form::Representation;
use crate::workload::Workload;
use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, Par, Side};
use rand_distr::{Distribution, StandardNormal};

/// Adds `s N Z` to the stream, `Z` white: the noisy gradients that the matrix mechanism releases.
///
/// The iterates `A(G + sNZ) = AG + sBZ` are an invertible function of these answers, known to everybody, so this
/// game and the one on iterates are the same.
#[derive(Clone, Debug)]
pub struct MatrixMechanism {
    coloring: Mat<f64>,
    noise_std: f64,
    dimension: usize,
}

impl MatrixMechanism {
    /// The mechanism with a dense coloring operator `N`, `steps × noise rows`, and `Z` of standard deviation
    /// `noise_std`.
    ///
    /// Errors: no steps, no coordinates, an entry that is not finite, a deviation not positive and finite.
    pub fn new(coloring: Mat<f64>, noise_std: f64, dimension: usize) -> Result<Self> {
        if coloring.nrows() == 0 {
            return Err(Error::argument("steps", 0, "at least one step is needed"));
        }
        if dimension == 0 {
            return Err(Error::argument("dimension", 0, "at least one coordinate is needed"));
        }
        check_positive("noise standard deviation", noise_std)?;
        for row in 0..coloring.nrows() {
            for column in 0..coloring.ncols() {
                let value = coloring[(row, column)];
                if !value.is_finite() {
                    let rule = "it must be finite";
                    return Err(Error::InvalidMatrixEntry {
                        name: "coloring operator",
                        row,
                        column,
                        value,
                        rule,
                    });
                }
            }
        }
        Ok(Self { coloring, noise_std, dimension })
    }

    /// The mechanism of a form.
    ///
    /// Errors: as [`MatrixMechanism::new`].
    pub fn of(form: &dyn Representation, noise_std: f64, dimension: usize) -> Result<Self> {
        Self::new(form.coloring(), noise_std, dimension)
    }

    /// The mechanism given by a dense decoder `B` of the workload, `N = A⁻¹B`.
    ///
    /// Cost: O(n² · columns of B).
    /// Errors: a decoder with another number of rows; as [`MatrixMechanism::new`].
    pub fn from_decoder(
        workload: &Workload,
        decoder: &Mat<f64>,
        noise_std: f64,
        dimension: usize,
    ) -> Result<Self> {
        let (actual, expected) = (decoder.nrows(), workload.steps());
        if actual != expected {
            return Err(Error::WrongLength { name: "decoder", actual, expected });
        }
        let a = workload.to_dense();
        let mut coloring = decoder.clone();
        for j in 0..coloring.ncols() {
            let column = coloring.col_as_slice_mut(j);
            for i in 0..expected {
                let known: f64 = (0..i).map(|k| a[(i, k)] * column[k]).sum();
                column[i] = (column[i] - known) / a[(i, i)];
            }
        }
        Self::new(coloring, noise_std, dimension)
    }

    /// The coloring operator `N`.
    pub fn coloring(&self) -> &Mat<f64> {
        &self.coloring
    }

    /// What an adversary may know of the noise: all but the draw.
    ///
    /// Errors: as [`NoiseModel::new`].
    pub fn noise_model(&self) -> Result<NoiseModel> {
        NoiseModel::new(&self.coloring, self.noise_std)
    }
}

impl StreamMechanism for MatrixMechanism {
    fn steps(&self) -> usize {
        self.coloring.nrows()
    }

    fn dimension(&self) -> usize {
        self.dimension
    }

    fn start(&self, games: usize, rng: &mut AuditRng) -> Result<Box<dyn Session + '_>> {
        let (n, m) = self.coloring.shape();
        let width = games * self.dimension;
        // Transposed, so that the noise of one step is contiguous.
        let mut white = Mat::<f64>::zeros(width, m);
        for k in 0..m {
            white.col_as_slice_mut(k).fill_with(|| StandardNormal.sample(rng));
        }
        let mut noise = Mat::zeros(width, n);
        // Sequential: the games of other batches fill the other cores.
        matmul(&mut noise, Accum::Replace, &white, self.coloring.transpose(), self.noise_std, Par::Seq);
        Ok(Box::new(Noise { noise, step: 0 }))
    }
}

struct Noise {
    noise: Mat<f64>,
    step: usize,
}

impl Session for Noise {
    fn answer(&mut self, rows: &mut [f64]) -> Result<()> {
        if self.step == self.noise.ncols() {
            return Err(Error::argument("step", self.step, "the mechanism has no noise past its last step"));
        }
        rows.iter_mut().zip(self.noise.col_as_slice(self.step)).for_each(|(x, u)| *x += u);
        self.step += 1;
        Ok(())
    }
}

/// The distribution of a mechanism's noise over the steps: `N(0, s² N Nᵀ)` in every coordinate.
#[derive(Clone, Debug)]
pub struct NoiseModel {
    /// `(s² N Nᵀ)⁻¹`.
    precision: Mat<f64>,
}

impl NoiseModel {
    /// Inverts the covariance, made a little larger where it is singular: a mechanism that repeats noise has a
    /// singular one, and an attack needs only to come close.
    ///
    /// Cost: O(n³) once.
    /// Errors: a covariance so badly scaled that it has no Cholesky factor even then.
    pub fn new(coloring: &Mat<f64>, noise_std: f64) -> Result<Self> {
        let n = coloring.nrows();
        let mut covariance = coloring * coloring.transpose();
        let largest = (0..n).map(|i| covariance[(i, i)]).fold(0.0, f64::max);
        for i in 0..n {
            covariance[(i, i)] += 1e-10 * largest;
        }
        let factor = covariance.llt(Side::Lower).map_err(|_| Error::Numerical {
            what: "inverse covariance of the noise",
            index: 0,
            reason: "the covariance has no Cholesky factor",
        })?;
        let mut precision = Mat::<f64>::identity(n, n);
        faer::linalg::solvers::SolveCore::solve_in_place_with_conj(
            &factor,
            faer::Conj::No,
            precision.as_mut(),
        );
        let scale = 1.0 / (noise_std * noise_std);
        precision.col_iter_mut().for_each(|column| column.iter_mut().for_each(|x| *x *= scale));
        Ok(Self { precision })
    }

    /// Number of steps.
    pub fn steps(&self) -> usize {
        self.precision.nrows()
    }

    /// Column `j` of the precision: the weights by which the answers tell a change of step `j`.
    pub fn weights(&self, step: usize) -> &[f64] {
        self.precision.col_as_slice(step)
    }

    /// μ between two streams that differ at one step by a vector of the given norm:
    /// `distance · √((s²NNᵀ)⁻¹_jj)`. For a square `N` this is `distance · ‖C e_j‖/s`.
    pub fn mu(&self, step: usize, distance: f64) -> f64 {
        distance * self.precision[(step, step)].sqrt()
    }

    /// The first of the steps from `from` on at which a change shows most, up to rounding.
    pub fn worst_step(&self, from: usize) -> usize {
        let largest = (from..self.steps()).map(|j| self.precision[(j, j)]).fold(0.0, f64::max);
        (from..self.steps()).find(|&j| self.precision[(j, j)] >= largest * (1.0 - 1e-6)).unwrap_or(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::game::rng;
    use crate::form::tree::{Decoder, Tree};

    fn lower(rows: &[&[f64]]) -> Mat<f64> {
        Mat::from_fn(rows.len(), rows.len(), |i, j| rows[i].get(j).copied().unwrap_or(0.0))
    }

    #[test]
    fn decoder_and_coloring_are_one_mechanism() {
        // A = [1; 1 1; 1 1 1], N = [1; −½ 1; 0 −½ 1]: B = A N.
        let n = lower(&[&[1.0], &[-0.5, 1.0], &[0.0, -0.5, 1.0]]);
        let workload = Workload::prefix_sum(3).unwrap();
        let b = workload.to_dense() * &n;
        let mechanism = MatrixMechanism::from_decoder(&workload, &b, 2.0, 1).unwrap();
        assert!((mechanism.coloring() - &n).norm_max() < 1e-15);
        let dense = Workload::dense(workload.to_dense()).unwrap();
        let same = MatrixMechanism::from_decoder(&dense, &b, 2.0, 1).unwrap();
        assert!((same.coloring() - &n).norm_max() < 1e-15);
    }

    #[test]
    fn a_form_plays_with_its_own_coloring() {
        // A tree over two steps has three nodes, one more than the answers can tell.
        let tree = Tree::new(2, Decoder::Binary).unwrap();
        let mechanism = MatrixMechanism::of(&tree, 1.0, 1).unwrap();
        assert_eq!(mechanism.coloring().shape(), (2, 3));
        // N = [1 0 0; −1 0 1] and NNᵀ = [1 −1; −1 2], of determinant 1: its inverse is [2 1; 1 1].
        let model = mechanism.noise_model().unwrap();
        for (w, expected) in model.weights(0).iter().zip([2.0, 1.0]) {
            assert!((w - expected).abs() < 1e-6, "{w}");
        }
    }

    #[test]
    fn precision_is_the_gram_matrix_of_the_encoder() {
        // C = N⁻¹ = [1; ½ 1; ¼ ½ 1]: squared column norms 21/16, 5/4, 1.
        let n = lower(&[&[1.0], &[-0.5, 1.0], &[0.0, -0.5, 1.0]]);
        let model = NoiseModel::new(&n, 2.0).unwrap();
        for (j, norm_sq) in [21.0 / 16.0, 1.25, 1.0_f64].into_iter().enumerate() {
            assert!((model.mu(j, 3.0) - 3.0 * norm_sq.sqrt() / 2.0).abs() < 1e-8, "{j}");
        }
        assert_eq!((model.worst_step(0), model.worst_step(1)), (0, 1));
        // CᵀC e_0 = (21/16, 5/8, 1/4).
        for (w, expected) in model.weights(0).iter().zip([21.0 / 16.0, 0.625, 0.25]) {
            assert!((w * 4.0 - expected).abs() < 1e-8);
        }
    }

    #[test]
    fn noise_has_the_covariance_it_claims() {
        // α = 1e-4 by a normal bound on sample covariances of 2·10⁵ draws, s = 1.5.
        let n = lower(&[&[1.0], &[-0.5, 2.0]]);
        let mechanism = MatrixMechanism::new(n, 1.5, 2).unwrap();
        let games = 100_000;
        let mut session = mechanism.start(games, &mut rng(5, 0)).unwrap();
        let mut steps = vec![vec![0.0; 2 * games]; 2];
        steps.iter_mut().for_each(|rows| session.answer(rows).unwrap());
        assert!(
            session.answer(&mut steps[0].clone()).unwrap_err().to_string().contains("past its last step")
        );
        let moment = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>() / a.len() as f64;
        for (i, j, expected) in [(0, 0, 1.0), (0, 1, -0.5), (1, 1, 4.25)] {
            let expected = expected * 2.25;
            let deviation = (moment(&steps[i], &steps[j]) - expected).abs();
            // Var(xy) ≤ 2 · 4.25² · 2.25² for these entries.
            let bound = 4.0 * (2.0_f64).sqrt() * 4.25 * 2.25 / (2.0 * games as f64).sqrt();
            assert!(deviation < bound, "{i},{j}: off by {deviation}");
        }
        // The two coordinates of a game are independent.
        let (even, odd): (Vec<f64>, Vec<f64>) = steps[0].chunks_exact(2).map(|c| (c[0], c[1])).unzip();
        assert!(moment(&even, &odd).abs() < 4.0 * 2.25 / (games as f64).sqrt());
    }

    #[test]
    fn repeated_noise_is_found_in_the_model() {
        // Two equal rows of N: a change at either is as good as visible.
        let n = Mat::from_fn(3, 2, |i, j| f64::from(i.min(1) == j));
        let model = NoiseModel::new(&n, 1.0).unwrap();
        assert!(model.worst_step(0) == 1 && model.mu(1, 1.0) > 1e4 && model.mu(0, 1.0) < 1.001);
    }

    #[test]
    fn bad_input_is_named() {
        let identity = Mat::<f64>::identity(2, 2);
        let message = |result: Result<MatrixMechanism>| result.unwrap_err().to_string();
        assert!(
            message(MatrixMechanism::new(identity.clone(), 0.0, 1))
                .starts_with("noise standard deviation is 0")
        );
        assert!(message(MatrixMechanism::new(identity.clone(), 1.0, 0)).starts_with("dimension is 0"));
        assert!(message(MatrixMechanism::new(Mat::new(), 1.0, 1)).starts_with("steps is 0"));
        let mut nan = identity.clone();
        nan[(1, 0)] = f64::NAN;
        assert!(message(MatrixMechanism::new(nan, 1.0, 1)).contains("coloring operator[1, 0] is NaN"));
        let workload = Workload::prefix_sum(3).unwrap();
        assert!(
            message(MatrixMechanism::from_decoder(&workload, &identity, 1.0, 1))
                .contains("decoder has length 2")
        );
    }
}
