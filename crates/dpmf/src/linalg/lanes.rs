//! The same recurrence at several nodes at once: one node a SIMD lane.

use std::ops::{Add, AddAssign, Mul, MulAssign, Sub};

/// `M` numbers that go through the same operations.
///
/// Fused multiply-adds only where they are asked for: every lane carries the bits that scalar code on any processor
/// would.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Lanes<const M: usize>(pub [f64; M]);

impl<const M: usize> Lanes<M> {
    pub const ZERO: Self = Self([0.0; M]);

    #[inline(always)]
    pub fn splat(x: f64) -> Self {
        Self([x; M])
    }

    #[inline(always)]
    pub fn reciprocal(self) -> Self {
        let mut out = self.0;
        for lane in &mut out {
            *lane = 1.0 / *lane;
        }
        Self(out)
    }

    /// `self · factor + term`, rounded once.
    #[inline(always)]
    pub fn fused(self, factor: Self, term: Self) -> Self {
        let mut out = self.0;
        for i in 0..M {
            out[i] = out[i].mul_add(factor.0[i], term.0[i]);
        }
        Self(out)
    }

    /// The lanes in `keep`, and zero elsewhere.
    #[inline(always)]
    pub fn keep(self, keep: [bool; M]) -> Self {
        let mut out = self.0;
        for i in 0..M {
            out[i] = if keep[i] { out[i] } else { 0.0 };
        }
        Self(out)
    }

    /// The sum over lanes, in a fixed order: halves onto each other.
    #[inline(always)]
    pub fn sum(self) -> f64 {
        let mut lanes = self.0;
        let mut half = M / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
            half /= 2;
        }
        lanes[0]
    }
}

macro_rules! lanewise {
    ($($operation:ident $method:ident $op:tt),*) => {$(
        impl<const M: usize> $operation for Lanes<M> {
            type Output = Self;

            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                let mut out = self.0;
                for i in 0..M {
                    out[i] $op other.0[i];
                }
                Self(out)
            }
        }
    )*};
}
lanewise!(Add add +=, Sub sub -=, Mul mul *=);

impl<const M: usize> AddAssign for Lanes<M> {
    #[inline(always)]
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl<const M: usize> MulAssign for Lanes<M> {
    #[inline(always)]
    fn mul_assign(&mut self, other: Self) {
        *self = *self * other;
    }
}
