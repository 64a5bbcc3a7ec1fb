//! One body, compiled once for the baseline and once for AVX2, chosen at run time.
//!
//! A body uses IEEE operations in a fixed order, and the compiler never fuses or reorders them, so the choice
//! changes the time and not a bit of the result.

#[cfg(target_arch = "x86_64")]
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

#[cfg(target_arch = "x86_64")]
static BASELINE_ONLY: AtomicBool = AtomicBool::new(false);

/// Whether [`dispatch!`] takes the body compiled for AVX2.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn has_avx2() -> bool {
    std::arch::is_x86_feature_detected!("avx2") && !BASELINE_ONLY.load(Relaxed)
}

/// Takes the baseline from now on, whatever the machine has, or again the best there is: for tests that compare.
pub fn baseline_only(only: bool) {
    #[cfg(target_arch = "x86_64")]
    BASELINE_ONLY.store(only, Relaxed);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = only;
}

/// Declares `name / portable / avx2 = body(arguments)`; `body` must be `#[inline(always)]`.
///
/// The body may have constant parameters, `body[const N: usize]`, or one type parameter, `body<T | U>`, which is `T` in
/// the baseline and `U` where AVX2 is at hand.
#[doc(hidden)]
#[macro_export]
macro_rules! __dispatch {
    (
        $(#[$meta:meta])*
        $visibility:vis fn $name:ident / $portable:ident / $avx2:ident =
            $body:ident $(<$baseline:ty | $wide:ty>)? $([$(const $generic:ident: $kind:ty),+])? (
            $($argument:ident: $type:ty),* $(,)?
        ) $(-> $result:ty)?;
    ) => {
        $(#[$meta])*
        #[inline]
        $visibility fn $name $(<$(const $generic: $kind),+>)? ($($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            if $crate::simd::has_avx2() {
                // SAFETY: the feature was just detected.
                return unsafe { $avx2 $(::<$($generic),+>)? ($($argument),*) };
            }
            $portable $(::<$($generic),+>)? ($($argument),*)
        }

        fn $portable $(<$(const $generic: $kind),+>)? ($($argument: $type),*) $(-> $result)? {
            $body $(::<$baseline>)? $(::<$($generic),+>)? ($($argument),*)
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        fn $avx2 $(<$(const $generic: $kind),+>)? ($($argument: $type),*) $(-> $result)? {
            $body $(::<$wide>)? $(::<$($generic),+>)? ($($argument),*)
        }
    };
}

pub use __dispatch as dispatch;
