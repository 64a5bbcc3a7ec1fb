//! One body for machines with and without fused multiply-adds.
//!
//! Fused and separate roundings give other last bits. That is of no account here, where results are rounded to the bits
//! of the real number: an error bound that allows for two roundings allows for one.

/// How `a b + c` is rounded.
pub(crate) trait Arithmetic {
    fn mul_add(a: f64, b: f64, c: f64) -> f64;
}

/// Twice.
pub(crate) struct Separate;

/// Once, which needs an instruction for it.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct Fused;

impl Arithmetic for Separate {
    #[inline(always)]
    fn mul_add(a: f64, b: f64, c: f64) -> f64 {
        a * b + c
    }
}

impl Arithmetic for Fused {
    #[inline(always)]
    fn mul_add(a: f64, b: f64, c: f64) -> f64 {
        a.mul_add(b, c)
    }
}

/// Declares `name / portable / wide = body(arguments)` for a body with an [`Arithmetic`], which must be
/// `#[inline(always)]`: chosen at run time like [`simd::dispatch!`](crate::simd::dispatch).
macro_rules! dispatch_fused {
    (
        $(#[$meta:meta])*
        $visibility:vis fn $name:ident / $portable:ident / $wide:ident = $body:ident (
            $($argument:ident: $type:ty),* $(,)?
        ) $(-> $result:ty)?;
    ) => {
        $(#[$meta])*
        #[inline]
        $visibility fn $name($($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            if $crate::simd::has_avx2() && std::arch::is_x86_feature_detected!("fma") {
                // SAFETY: the features were just detected.
                return unsafe { $wide($($argument),*) };
            }
            $portable($($argument),*)
        }

        fn $portable($($argument: $type),*) $(-> $result)? {
            $body::<$crate::engine::exact::fused::Separate>($($argument),*)
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn $wide($($argument: $type),*) $(-> $result)? {
            $body::<$crate::engine::exact::fused::Fused>($($argument),*)
        }
    };
}

pub(crate) use dispatch_fused;
