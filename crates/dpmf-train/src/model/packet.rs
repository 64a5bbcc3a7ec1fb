//! Eight floats at a time, with and without AVX2, to the same bits.

/// Floats in one packet: the unit of every fixed summation order.
pub(super) const LANES: usize = 8;

/// Eight floats; every operation is the IEEE one in each lane, and none is ever fused with another.
pub(super) trait Packet: Copy {
    fn load(lanes: &[f32; LANES]) -> Self;
    fn splat(value: f32) -> Self;
    fn lanes(self) -> [f32; LANES];
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
}

/// Eight floats for any machine.
#[derive(Clone, Copy)]
pub(super) struct Baseline([f32; LANES]);

impl Packet for Baseline {
    #[inline(always)]
    fn load(lanes: &[f32; LANES]) -> Self {
        Self(*lanes)
    }

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    fn lanes(self) -> [f32; LANES] {
        self.0
    }

    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        Self(std::array::from_fn(|lane| self.0[lane] + other.0[lane]))
    }

    #[inline(always)]
    fn times(self, other: Self) -> Self {
        Self(std::array::from_fn(|lane| self.0[lane] * other.0[lane]))
    }
}

/// Eight floats in one register. Only `dispatch!` names it, inside functions compiled for AVX2.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Avx2(std::arch::x86_64::__m256);

#[cfg(target_arch = "x86_64")]
impl Packet for Avx2 {
    #[inline(always)]
    fn load(lanes: &[f32; LANES]) -> Self {
        // SAFETY: the pointer is that of eight floats; the caller was compiled for AVX2.
        Self(unsafe { std::arch::x86_64::_mm256_loadu_ps(lanes.as_ptr()) })
    }

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: the caller was compiled for AVX2.
        Self(unsafe { std::arch::x86_64::_mm256_set1_ps(value) })
    }

    #[inline(always)]
    fn lanes(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: the pointer is that of eight floats; the caller was compiled for AVX2.
        unsafe { std::arch::x86_64::_mm256_storeu_ps(lanes.as_mut_ptr(), self.0) };
        lanes
    }

    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        // SAFETY: the caller was compiled for AVX2.
        Self(unsafe { std::arch::x86_64::_mm256_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn times(self, other: Self) -> Self {
        // SAFETY: the caller was compiled for AVX2.
        Self(unsafe { std::arch::x86_64::_mm256_mul_ps(self.0, other.0) })
    }
}

/// The eight lanes of a packet added pairwise.
#[inline(always)]
pub(super) fn joined(sums: &[f32; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = *sums;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}
