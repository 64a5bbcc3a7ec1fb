//! Symmetric matrices whose steps are coupled to their neighbours and to those one epoch away.
//!
//! In the order of phases, `0, b, 2b, …, 1, 1 + b, …`, a matrix that couples steps up to `w` apart and steps of one phase is
//! block banded, but for its corners: the last phases of an epoch are coupled with the first of the next. With the first `w`
//! phases kept as separators, the others are eliminated one after another, and the part that is being worked on, the front,
//! has `2w + 1` phases: the one that is eliminated, the `w` after it, and the separators.

use super::double::Double;
use super::lanes::Lanes;
use std::ops::{Add, Mul, Sub};

/// Numbers that an elimination can be run in.
pub(crate) trait Scalar: Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> {
    /// What the entries of a matrix are given in.
    type Entry: Copy;
    const ZERO: Self;
    fn splat(entry: Self::Entry) -> Self;
    fn reciprocal(self) -> Self;
}

impl<const M: usize> Scalar for Lanes<M> {
    type Entry = f64;
    const ZERO: Self = Lanes::ZERO;

    #[inline(always)]
    fn splat(entry: f64) -> Self {
        Lanes::splat(entry)
    }

    #[inline(always)]
    fn reciprocal(self) -> Self {
        Lanes::reciprocal(self)
    }
}

impl<const M: usize> Scalar for Double<M> {
    type Entry = Double<1>;
    const ZERO: Self = Double::ZERO;

    #[inline(always)]
    fn splat(entry: Double<1>) -> Self {
        entry.splat()
    }

    #[inline(always)]
    fn reciprocal(self) -> Self {
        Double::reciprocal(self)
    }
}

/// How steps are laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Steps.
    pub n: usize,
    /// Phases `b`.
    pub phases: usize,
    /// Epochs `K`; the last may be shorter.
    pub epochs: usize,
    /// Distance `w ≥ 1` up to which neighbours are coupled, or `b` if that is less: then all phases are separators.
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

    /// The phase whose elimination the rows of a phase are added before.
    pub fn pivot(&self, phase: usize) -> usize {
        phase.max(self.reach)
    }
}

/// A term `constant + shifted·t` of an entry of the matrix, by its place in the front, the first not before the second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Term<E> {
    places: (u32, u32),
    constant: E,
    shifted: E,
}

/// The matrix `M + tN` as a sum of terms, in the order of elimination.
pub(crate) struct Terms<E> {
    pub layout: Layout,
    /// Those of the phases `w, w + 1, …`; where all are separators, those of all.
    of_phase: Vec<Vec<Term<E>>>,
}

impl<E: Copy> Terms<E> {
    pub fn new(layout: Layout) -> Self {
        Self { layout, of_phase: vec![Vec::new(); (layout.phases - layout.reach).max(1)] }
    }

    /// Adds to the entries `(i, j)` and `(j, i)`, once if they are the same, when a phase is eliminated.
    pub fn add(&mut self, pivot: usize, (i, j): (usize, usize), constant: E, shifted: E) {
        let (a, b) = (self.layout.place(i, pivot), self.layout.place(j, pivot));
        let places = (a.max(b) as u32, a.min(b) as u32);
        self.of_phase[pivot - self.layout.reach].push(Term { places, constant, shifted });
    }

    /// Adds `unit` to the diagonal of places without a step: those past the end of the last epoch.
    pub fn fill(&mut self, unit: E, zero: E) {
        for i in self.layout.n..self.layout.phases * self.layout.epochs {
            self.add(self.layout.pivot(i % self.layout.phases), (i, i), unit, zero);
        }
    }
}

/// An `LDLᵀ` factorization, kept for the inverse.
pub(crate) struct Factor<S> {
    /// For each pivot the reciprocal of `d` and its column of `L` below the diagonal, one after another.
    columns: Vec<S>,
}

impl<E: Copy> Terms<E> {
    /// Factors `M + tN`, telling every pivot.
    ///
    /// Cost: O(n w²K²).
    #[inline(always)]
    pub fn factor<S: Scalar<Entry = E>>(&self, t: S, keep: bool, mut pivot: impl FnMut(S)) -> Factor<S> {
        let Layout { phases, epochs, reach, .. } = self.layout;
        let size = self.layout.size();
        let mut front = vec![S::ZERO; size * size];
        let mut column = vec![S::ZERO; size];
        let per_phase = epochs * size - epochs * (epochs - 1) / 2;
        let separators = reach * epochs;
        let kept = if keep { per_phase * self.of_phase.len() + separators * (separators + 1) / 2 } else { 0 };
        let mut columns = Vec::with_capacity(kept);
        let mut eliminate = |front: &mut [S], c: usize| {
            let d = front[c * size + c];
            pivot(d);
            let inverse = d.reciprocal();
            for r in c + 1..size {
                column[r] = front[r * size + c];
            }
            if keep {
                columns.push(inverse);
                columns.extend(column[c + 1..].iter().map(|x| *x * inverse));
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
                front[at] = front[at] + S::splat(term.constant) + S::splat(term.shifted) * t;
            }
            if phases > reach {
                (0..epochs).for_each(|c| eliminate(&mut front, c));
            }
        }
        for c in size - separators..size {
            eliminate(&mut front, c);
        }
        Factor { columns }
    }
}

/// Moves the front on by a phase: the lower triangle of all but the first phase, and nothing for the one that enters.
#[inline(always)]
fn shift_up<S: Scalar>(front: &mut [S], size: usize, epochs: usize, reach: usize) {
    let next = reach * epochs;
    for a in 0..next {
        for b in 0..=a {
            front[a * size + b] = front[(a + epochs) * size + b + epochs];
        }
    }
    front[next * size..(next + epochs) * size].fill(S::ZERO);
    for a in next + epochs..size {
        let row = &mut front[a * size..][..size];
        row.copy_within(epochs..next + epochs, 0);
        row[next..next + epochs].fill(S::ZERO);
    }
}

impl<S: Scalar> Factor<S> {
    /// Tells, phase by phase from the last to the first, where not all are separators, the entries of the inverse within the front: `tell(pivot, Z)` with
    /// `Z` by rows. The last front holds the separators' too.
    ///
    /// Cost: O(n w²K²).
    #[inline(always)]
    pub fn inverse(&self, layout: Layout, mut tell: impl FnMut(usize, &[S])) {
        let Layout { epochs, reach, .. } = layout;
        let size = layout.size();
        let mut z = vec![S::ZERO; size * size];
        let mut row = vec![S::ZERO; size];
        let mut end = self.columns.len();
        let mut uneliminate = |z: &mut [S], c: usize| {
            let rest = size - c - 1;
            let (inverse, l) = (self.columns[end - rest - 1], &self.columns[end - rest..end]);
            end -= rest + 1;
            let mut own = inverse;
            for a in 0..rest {
                let from = &z[(c + 1 + a) * size + c + 1..(c + 2 + a) * size];
                let mut sum = S::ZERO;
                for (x, l) in from.iter().zip(l) {
                    sum = sum + *x * *l;
                }
                own = own + sum * l[a];
                row[a] = S::ZERO - sum;
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

/// The reverse of [`shift_up`], for a full symmetric matrix; what is in the first phase's place is overwritten next.
#[inline(always)]
fn shift_down<S: Scalar>(z: &mut [S], size: usize, epochs: usize, reach: usize) {
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
