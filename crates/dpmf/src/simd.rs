//! One body, compiled once for the baseline and once for AVX2, chosen at run time.
//!
//! The body uses IEEE operations in a fixed order, and the compiler never fuses or reorders them, so the
//! choice changes the time and not a bit of the result.

/// Declares `name / portable / avx2 = body(arguments)`; `body` must be `#[inline(always)]`.
macro_rules! dispatch {
    (
        $(#[$meta:meta])*
        $visibility:vis fn $name:ident / $portable:ident / $avx2:ident = $body:ident $([$(const $generic:ident: $kind:ty),+])? (
            $($argument:ident: $type:ty),* $(,)?
        ) $(-> $result:ty)?;
    ) => {
        $(#[$meta])*
        #[inline]
        $visibility fn $name $(<$(const $generic: $kind),+>)? ($($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx2") {
                // SAFETY: the feature was just detected.
                return unsafe { $avx2 $(::<$($generic),+>)? ($($argument),*) };
            }
            $portable $(::<$($generic),+>)? ($($argument),*)
        }

        fn $portable $(<$(const $generic: $kind),+>)? ($($argument: $type),*) $(-> $result)? {
            $body $(::<$($generic),+>)? ($($argument),*)
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        fn $avx2 $(<$(const $generic: $kind),+>)? ($($argument: $type),*) $(-> $result)? {
            $body $(::<$($generic),+>)? ($($argument),*)
        }
    };
}

pub(crate) use dispatch;
