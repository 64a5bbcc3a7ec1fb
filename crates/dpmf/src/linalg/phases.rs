//! Symmetric matrices whose steps are coupled to their neighbours and to those one epoch away.
//!
//! In the order of phases, `0, b, 2b, …, 1, 1 + b, …`, a matrix that couples steps up to `w` apart and steps of one phase is
//! block banded, but for its corners: the last phases of an epoch are coupled with the first of the next. With the first `w`
//! phases kept as separators, the others are eliminated one after another, and the part that is being worked on, the front,
//! has `2w + 1` phases: the one that is eliminated, the `w` after it, and the separators.

use super::double::Double;
use super::lanes::Lanes;

/// How steps are laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Steps.
    pub n: usize,
    /// Phases `b > w`.
    pub phases: usize,
    /// Epochs `K`; the last may be shorter.
    pub epochs: usize,
    /// Distance `w ≥ 1` up to which neighbours are coupled.
    pub reach: usize,
}

impl Layout {
    /// Variables in the front.
    pub fn size(&self) -> usize {
        (2 * self.reach + 1) * self.epochs
    }

    /// Place of step `i` in the front when phase `pivot` is eliminated.
    pub fn place(&self, i: usize, pivot: usize) -> usize {
        let (phase, epoch) = (i % self.phases, i / self.phases);
        let block = if phase < self.reach { self.reach + 1 + phase } else { phase - pivot };
        block * self.epochs + epoch
    }

    /// Places without a step: past the end of the last epoch.
    fn beyond(&self) -> std::ops::Range<usize> {
        self.n..self.phases * self.epochs
    }

    /// The phase whose elimination the rows of a phase are added before.
    pub fn pivot(&self, phase: usize) -> usize {
        phase.max(self.reach)
    }
}

/// Rows `z` of weight `α` or `αt`: the matrix `Σ α z zᵀ` is never formed, which would square its condition number.
pub(crate) struct Rows {
    pub layout: Layout,
    /// Those that are rotated in before a phase is eliminated.
    of_phase: Vec<Vec<Row>>,
}

/// A row by its places in the front, ascending.
struct Row {
    entries: Vec<(u32, f64)>,
    shifted: bool,
}

impl Rows {
    pub fn new(layout: Layout) -> Self {
        Self { layout, of_phase: (layout.reach..layout.phases).map(|_| Vec::new()).collect() }
    }

    /// Adds the square of a row, given by steps, when a phase is eliminated; times `t` if it is shifted.
    pub fn add(&mut self, pivot: usize, row: impl Iterator<Item = (usize, f64)>, shifted: bool) {
        let place = |(i, x): (usize, f64)| (self.layout.place(i, pivot) as u32, x);
        let mut entries: Vec<(u32, f64)> = row.filter(|(_, x)| *x != 0.0).map(place).collect();
        entries.sort_unstable_by_key(|(place, _)| *place);
        if !entries.is_empty() {
            self.of_phase[pivot - self.layout.reach].push(Row { entries, shifted });
        }
    }

    /// Adds ones to the diagonal where there is no step.
    pub fn fill(&mut self) {
        for i in self.layout.beyond() {
            self.add(self.layout.pivot(i % self.layout.phases), std::iter::once((i, 1.0)), false);
        }
    }

    /// The factors of the sum, by rotations without square roots: `Uᵀ diag(w) U` with unit upper
    /// triangular `U`.
    ///
    /// A rotation takes `w` to `w̄ = w + α z_r²`, the rest of the row of `U` to `u + (α z_r/w̄) z̄` with `z̄ = z − z_r u`, and `α` to
    /// `α w/w̄`. A place that no row has met yet has `w = 0`.
    ///
    /// Cost: O(n w²K²).
    #[inline(always)]
    pub fn factor<const M: usize>(&self, t: Lanes<M>) -> Factor<M> {
        let Layout { epochs, reach, .. } = self.layout;
        let size = self.layout.size();
        let separators = reach * epochs;
        let per_phase = epochs * size - epochs * (epochs - 1) / 2;
        let mut columns =
            Vec::with_capacity(per_phase * self.of_phase.len() + separators * (separators + 1) / 2);
        let mut weight = vec![Lanes::<M>::ZERO; size];
        let mut unit = vec![Lanes::<M>::ZERO; size * size];
        let mut z = vec![Lanes::<M>::ZERO; size];
        let mut keep = |weight: &[Lanes<M>], unit: &[Lanes<M>], c: usize| {
            columns.push(weight[c].reciprocal());
            columns.extend_from_slice(&unit[c * size + c + 1..(c + 1) * size]);
        };
        for (k, rows) in self.of_phase.iter().enumerate() {
            if k > 0 {
                let next = separators; // as many as the phases that stay
                weight.copy_within(epochs..next + epochs, 0);
                weight[next..next + epochs].fill(Lanes::ZERO);
                for a in 0..next {
                    let (source, target) = ((a + epochs) * size, a * size);
                    unit.copy_within(source + epochs..source + next + epochs, target);
                    unit[target + next..target + next + epochs].fill(Lanes::ZERO);
                    unit.copy_within(source + next + epochs..source + size, target + next + epochs);
                }
                unit[next * size..(next + epochs) * size].fill(Lanes::ZERO);
            }
            for row in rows {
                z.fill(Lanes::ZERO);
                row.entries.iter().for_each(|(place, x)| z[*place as usize] = Lanes::splat(*x));
                let mut alpha = if row.shifted { t } else { Lanes::splat(1.0) };
                for r in row.entries[0].0 as usize..size {
                    let lead = z[r];
                    if lead == Lanes::ZERO {
                        continue;
                    }
                    let scaled = alpha * lead;
                    let sum = weight[r] + scaled * lead;
                    let inverse = Lanes(sum.0.map(|sum| if sum > 0.0 { 1.0 / sum } else { 0.0 }));
                    let share = scaled * inverse;
                    alpha *= weight[r] * inverse;
                    weight[r] = sum;
                    let own = &mut unit[r * size + r + 1..(r + 1) * size];
                    for (u, z) in own.iter_mut().zip(&mut z[r + 1..]) {
                        *z = *z - lead * *u;
                        *u += share * *z;
                    }
                    if alpha == Lanes::ZERO {
                        break;
                    }
                }
            }
            (0..epochs).for_each(|c| keep(&weight, &unit, c));
        }
        (size - separators..size).for_each(|c| keep(&weight, &unit, c));
        Factor { columns }
    }
}

/// A factorization `L diag(d) Lᵀ`.
pub(crate) struct Factor<const M: usize> {
    /// For each pivot the reciprocal of `d` and its column of `L` below the diagonal, one after another.
    columns: Vec<Lanes<M>>,
}

impl<const M: usize> Factor<M> {
    /// Tells, phase by phase from the last to the first, the entries of the inverse within the front: `tell(pivot, Z)` with
    /// `Z` by rows. The last front holds the separators' too.
    ///
    /// Cost: O(n w²K²).
    #[inline(always)]
    pub fn inverse(&self, layout: Layout, mut tell: impl FnMut(usize, &[Lanes<M>])) {
        let Layout { epochs, reach, .. } = layout;
        let size = layout.size();
        let mut z = vec![Lanes::<M>::ZERO; size * size];
        let mut row = vec![Lanes::<M>::ZERO; size];
        let mut end = self.columns.len();
        let mut uneliminate = |z: &mut [Lanes<M>], c: usize| {
            let rest = size - c - 1;
            let (inverse, l) = (self.columns[end - rest - 1], &self.columns[end - rest..end]);
            end -= rest + 1;
            let mut own = inverse;
            for a in 0..rest {
                let from = &z[(c + 1 + a) * size + c + 1..(c + 2 + a) * size];
                let mut sum = Lanes::ZERO;
                for (x, l) in from.iter().zip(l) {
                    sum += *x * *l;
                }
                own += sum * l[a];
                row[a] = Lanes::ZERO - sum;
            }
            z[c * size + c] = own;
            for a in 0..rest {
                z[c * size + c + 1 + a] = row[a];
                z[(c + 1 + a) * size + c] = row[a];
            }
        };
        for c in (size - reach * epochs..size).rev() {
            uneliminate(&mut z, c);
        }
        for pivot in (reach..layout.phases).rev() {
            if pivot + 1 < layout.phases {
                shift_down(&mut z, size, epochs, reach);
            }
            for c in (0..epochs).rev() {
                uneliminate(&mut z, c);
            }
            tell(pivot, &z);
        }
    }
}

/// Moves the front back by a phase, all of a symmetric matrix but its last; what is in the first phase's place is overwritten next.
#[inline(always)]
fn shift_down<const M: usize>(z: &mut [Lanes<M>], size: usize, epochs: usize, reach: usize) {
    let next = reach * epochs;
    for a in (0..next).rev() {
        let (source, target) = (a * size, (a + epochs) * size);
        z.copy_within(source..source + next, target + epochs);
        z.copy_within(source + next + epochs..source + size, target + next + epochs);
    }
    for a in next + epochs..size {
        z.copy_within(a * size..a * size + next, a * size + epochs);
    }
}

/// A term `constant + shifted·t` of an entry of a matrix, by its place in the front, the first not before the second.
#[derive(Clone, Copy, Debug)]
struct Term {
    places: (u32, u32),
    constant: Double<1>,
    shifted: Double<1>,
}

/// The matrix `M + tN` as a sum of terms, in the order of elimination, in double-double numbers.
pub(crate) struct Terms {
    layout: Layout,
    /// Those of the phases `w, w + 1, …`.
    of_phase: Vec<Vec<Term>>,
}

impl Terms {
    pub fn new(layout: Layout) -> Self {
        Self { layout, of_phase: vec![Vec::new(); layout.phases - layout.reach] }
    }

    /// Adds to the entries `(i, j)` and `(j, i)`, once if they are the same, when a phase is eliminated.
    pub fn add(&mut self, pivot: usize, (i, j): (usize, usize), constant: Double<1>, shifted: Double<1>) {
        let (a, b) = (self.layout.place(i, pivot), self.layout.place(j, pivot));
        let places = (a.max(b) as u32, a.min(b) as u32);
        self.of_phase[pivot - self.layout.reach].push(Term { places, constant, shifted });
    }

    /// Adds ones to the diagonal where there is no step: past the end of the last epoch.
    pub fn fill(&mut self) {
        for i in self.layout.beyond() {
            self.add(self.layout.pivot(i % self.layout.phases), (i, i), Double::ONE, Double::ZERO);
        }
    }

    /// Eliminates the steps of `M + tN`, telling every pivot.
    ///
    /// Cost: O(n w²K²).
    #[inline(always)]
    pub fn eliminate<const M: usize>(&self, t: Double<M>, mut pivot: impl FnMut(Double<M>)) {
        let Layout { epochs, reach, .. } = self.layout;
        let size = self.layout.size();
        let mut front = vec![Double::<M>::ZERO; size * size];
        let mut column = vec![Double::<M>::ZERO; size];
        let mut eliminate = |front: &mut [Double<M>], c: usize| {
            let d = front[c * size + c];
            pivot(d);
            let inverse = d.reciprocal();
            for r in c + 1..size {
                column[r] = front[r * size + c];
            }
            for r in c + 1..size {
                let l = column[r] * inverse;
                let row = &mut front[r * size + c + 1..r * size + r + 1];
                row.iter_mut().zip(&column[c + 1..]).for_each(|(x, y)| *x = *x - l * *y);
            }
        };
        for (k, terms) in self.of_phase.iter().enumerate() {
            if k > 0 {
                shift_up(&mut front, size, epochs, reach);
            }
            for term in terms {
                let at = term.places.0 as usize * size + term.places.1 as usize;
                front[at] = front[at] + term.constant.splat() + term.shifted.splat() * t;
            }
            (0..epochs).for_each(|c| eliminate(&mut front, c));
        }
        for c in size - reach * epochs..size {
            eliminate(&mut front, c);
        }
    }
}

/// Moves the front on by a phase: the lower triangle of all but the first phase, and nothing for the one that enters.
#[inline(always)]
fn shift_up<const M: usize>(front: &mut [Double<M>], size: usize, epochs: usize, reach: usize) {
    let next = reach * epochs;
    for a in 0..next {
        let (source, target) = ((a + epochs) * size, a * size);
        front.copy_within(source + epochs..=source + epochs + a, target);
    }
    front[next * size..(next + epochs) * size].fill(Double::ZERO);
    for a in next + epochs..size {
        let row = &mut front[a * size..][..size];
        row.copy_within(epochs..next + epochs, 0);
        row[next..next + epochs].fill(Double::ZERO);
    }
}
