//! Factorization of a sum of weighted squares of banded rows, without forming the sum.
//!
//! The matrices here are `G = Σ_j α_j z_j z_jᵀ` with `z_j` supported on `j, …, j + w`: for instance
//! `L Lᵀ + tD`, whose rows are the columns of `L` (weight 1) and the unit vectors (weight `t v_j`). Forming `G` would
//! square its condition number. Instead the rows are rotated, one at a time, into a small triangle that moves along
//! the band: square-root-free Givens rotations, one division each, with no subtraction of what was once added.

use super::MAX_BANDWIDTH;
use super::lanes::Lanes;

/// Runs the body for every index `0..N` of a front, written out.
///
/// Loops over a triangle of lanes are too long for the compiler to unroll, and a front that is indexed at run time
/// lives in memory instead of registers: 1.5 times slower at bandwidth 2.
macro_rules! each {
    ($index:ident, $body:block) => {
        each!(@ $index $body 0 1 2 3 4);
    };
    (@ $index:ident $body:block $($value:literal)*) => {
        $({
            let $index: usize = $value;
            if $index < N $body
        })*
    };
}

/// The part of `Σ α z zᵀ` that still concerns the variables `j, …, j + w`, `N = w + 1`, as `Uᵀ diag(weight) U` with
/// `U` unit upper triangular.
#[derive(Clone, Copy)]
pub(crate) struct Front<const N: usize, const M: usize> {
    weight: [Lanes<M>; N],
    /// `unit[r][s]` for `s > r`; the rest is not used.
    unit: [[Lanes<M>; N]; N],
}

impl<const N: usize, const M: usize> Front<N, M> {
    /// The front before any row was added: `diag(weight)`, weights positive.
    #[inline(always)]
    pub fn diagonal(weight: [Lanes<M>; N]) -> Self {
        const { assert!(N >= 2 && N <= MAX_BANDWIDTH + 1, "`each!` writes out this many indices") };
        Self { weight, unit: [[Lanes::ZERO; N]; N] }
    }

    /// Adds `α z zᵀ` and returns the reciprocal of the first pivot.
    ///
    /// In row `r` the rotation in the plane of `√d·u` and `√α·z` takes `d` to `d̄ = d + α z_r²`, `u` to
    /// `(d u + α z_r z)/d̄`, `z` to `z − z_r u` and `α` to `α d/d̄`. Cost: `N − 1` divisions, O(N²) products.
    #[inline(always)]
    #[allow(unused_assignments, reason = "the last of the rotations written out has no successor")]
    pub fn add(&mut self, alpha: Lanes<M>, mut z: [Lanes<M>; N]) -> Lanes<M> {
        let mut first = Lanes::splat(1.0);
        // α = numerator · inverse, multiplied out as late as possible: a pivot then waits for its predecessor's
        // reciprocal, one product and one sum.
        let (mut numerator, mut inverse) = (alpha, first);
        each!(r, {
            let f = z[r];
            let d = self.weight[r];
            let pivot = d + (numerator * (f * f)) * inverse;
            self.weight[r] = pivot;
            if r + 1 < N {
                let alpha = numerator * inverse;
                inverse = pivot.reciprocal();
                numerator = alpha * d;
                let keep = d * inverse;
                let take = (alpha * f) * inverse;
                each!(s, {
                    if s > r {
                        let old = self.unit[r][s];
                        self.unit[r][s] = keep * old + take * z[s];
                        z[s] = z[s] - f * old;
                    }
                });
                if r == 0 {
                    first = inverse;
                }
            }
        });
        first
    }

    /// Eliminates the first variable and lets the next one enter with a weight of its own.
    ///
    /// Returns row 0: the pivot in place 0, the multipliers `U_{j, j+r}` in places `r = 1, …, w`.
    #[inline(always)]
    pub fn advance(&mut self, entering: Lanes<M>) -> [Lanes<M>; N] {
        let mut row = self.unit[0];
        row[0] = self.weight[0];
        each!(r, {
            if r + 1 < N {
                self.weight[r] = self.weight[r + 1];
                each!(s, {
                    if s > r && s + 1 < N {
                        self.unit[r][s] = self.unit[r + 1][s + 1];
                    }
                });
                self.unit[r][N - 1] = Lanes::ZERO;
            }
        });
        self.weight[N - 1] = entering;
        row
    }
}

/// The block of `G⁻¹` on the variables `j, …, j + w − 1`, as `Uᵀ diag(weight) U`, going backwards over the pivots
/// of `G = U_Gᵀ Δ U_G`.
///
/// Place `N − 1` of the arrays is not used.
#[derive(Clone, Copy)]
pub(crate) struct InverseFront<const N: usize, const M: usize> {
    weight: [Lanes<M>; N],
    unit: [[Lanes<M>; N]; N],
}

impl<const N: usize, const M: usize> InverseFront<N, M> {
    /// The block past the last variable.
    #[inline(always)]
    pub fn empty() -> Self {
        const { assert!(N >= 2 && N <= MAX_BANDWIDTH + 1, "`each!` writes out this many indices") };
        Self { weight: [Lanes::ZERO; N], unit: [[Lanes::ZERO; N]; N] }
    }

    /// Steps from the block on `j + 1, …, j + w` to the one on `j, …, j + w − 1`, given the pivot's reciprocal
    /// `1/δ_j` and the multipliers `l_r = U_{j, j+r}`; returns `(G⁻¹)_jj`.
    ///
    /// With `l` continued to the new variable, `G⁻¹` restricted to `j, …, j + w` is
    /// `Σ_r weight_r (−y_r, U_r)(−y_r, U_r)ᵀ + e eᵀ/δ_j` with `y = U l`: a sum of squares. Dropping the last variable
    /// leaves the last row with its first entry alone; the others are rotated into it, last to first. Cost: `w − 1`
    /// divisions.
    #[inline(always)]
    pub fn retreat(&mut self, inverse_pivot: Lanes<M>, l: &[Lanes<M>; N]) -> Lanes<M> {
        let w = N - 1;
        // Row w concerns variables j and j + w; without the latter it only adds to the weight of j.
        let last = l[w];
        let mut weight = inverse_pivot + self.weight[w - 1] * (last * last);
        let mut carry = [Lanes::ZERO; N];
        let mut next = Self::empty();
        each!(k, {
            if k > 0 && k < w {
                let r = w - 1 - k;
                let mut y = l[r + 1];
                each!(s, {
                    if s > r && s < w {
                        y += self.unit[r][s] * l[s + 1];
                    }
                });
                let g = self.weight[r] * y;
                let total = weight + g * y;
                let inverse = total.reciprocal();
                let keep = weight * inverse;
                let take = g * inverse;
                next.weight[r + 1] = self.weight[r] * keep;
                // The entry of row r is −y; `carry` is kept with that sign outside.
                each!(s, {
                    if s > r && s + 1 < w {
                        next.unit[r + 1][s + 1] = self.unit[r][s] - y * carry[s];
                        carry[s] = keep * carry[s] + take * self.unit[r][s];
                    }
                });
                carry[r] = take;
                weight = total;
            }
        });
        each!(s, {
            if s + 1 < w {
                next.unit[0][s + 1] = Lanes::ZERO - carry[s];
            }
        });
        next.weight[0] = weight;
        *self = next;
        weight
    }

    /// `aᵀ G⁻¹ a` for a vector supported on `j, …, j + w − 1`.
    #[inline(always)]
    pub fn quadratic(&self, a: &[f64; N]) -> Lanes<M> {
        let w = N - 1;
        let mut total = Lanes::ZERO;
        each!(r, {
            if r < w {
                let mut y = Lanes::splat(a[r]);
                each!(s, {
                    if s > r && s < w {
                        y += self.unit[r][s] * Lanes::splat(a[s]);
                    }
                });
                total += self.weight[r] * (y * y);
            }
        });
        total
    }
}
