//! Exponential, sigmoid, tanh and softmax in single precision, the same bits on every machine.
//!
//! Additions, multiplications, divisions and bit operations alone: no function of the platform's mathematics
//! library, whose last bit differs between machines. NaN passes through all of them, so that a diverged run
//! shows itself.

use super::packet::{self, LANES, Packet, joined};
use dpmf::simd::dispatch;

/// The smaller bound if below it, the larger if above, NaN if NaN.
#[inline(always)]
fn clamped(x: f32, bound: f32) -> f32 {
    let x = if x > bound { bound } else { x };
    if x < -bound { -bound } else { x }
}

/// `(2ⁿ, eʳ − 1)` with `x = n·ln 2 + r` and `|r| ≤ ln 2 / 2`, for `|x| ≤ 87`.
#[inline(always)]
fn split_exponential(x: f32) -> (f32, f32) {
    // Adding 1.5·2²³ rounds to the nearest integer and leaves it in the low bits.
    const SHIFT: f32 = 12_582_912.0;
    // The high part of ln 2 has 12 bits, so that n times it is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x * std::f32::consts::LOG2_E + SHIFT;
    let n = shifted - SHIFT;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    // Taylor to the seventh power: the rest is below 6e-9.
    let series = 1.0 / 720.0 + r * (1.0 / 5040.0);
    let series = 1.0 / 24.0 + r * (1.0 / 120.0 + r * series);
    let series = 0.5 + r * (1.0 / 6.0 + r * series);
    (power, r + r * r * series)
}

/// `eˣ`, with `|x|` cut at 87.
///
/// Guarantee: relative error below 2e-7.
#[inline(always)]
fn exponential(x: f32) -> f32 {
    let (power, rest) = split_exponential(clamped(x, 87.0));
    power + power * rest
}

/// `1 / (1 + e⁻ˣ)`.
///
/// Guarantee: relative error below 3e-7 for `x > −87`.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exponential(-x))
}

/// `tanh x`, as `(e²ˣ − 1) / (e²ˣ + 1)` without cancellation near zero.
///
/// Guarantee: relative error below 5e-7.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    let (power, rest) = split_exponential(clamped(2.0 * x, 40.0));
    let less_one = power * rest + (power - 1.0);
    less_one / (less_one + 2.0)
}

dispatch! {
    /// Puts `tanh` of every element in its place.
    pub(super) fn tanh_all / tanh_all_portable / tanh_all_avx2 =
        tanh_all_any<packet::Baseline | packet::Avx2>(values: &mut [f32]);
}

#[inline(always)]
fn tanh_all_any<P: Packet>(values: &mut [f32]) {
    for value in values {
        *value = tanh(*value);
    }
}

dispatch! {
    /// Multiplies the gradient by the derivative of `tanh` at the point where it had the given values.
    pub(super) fn tanh_backward / tanh_backward_portable / tanh_backward_avx2 =
        tanh_backward_any<packet::Baseline | packet::Avx2>(
            gradient: &mut [f32], values: &[f32]
        );
}

#[inline(always)]
fn tanh_backward_any<P: Packet>(gradient: &mut [f32], values: &[f32]) {
    for (gradient, value) in gradient.iter_mut().zip(values) {
        *gradient *= 1.0 - value * value;
    }
}

dispatch! {
    /// Cross-entropy of one row of logits at its target, which must be below their number, and whether the target
    /// is the first of the largest; the logits become the gradient of `scale` times the cross-entropy.
    pub(super) fn cross_entropy / cross_entropy_portable / cross_entropy_avx2 =
        cross_entropy_any<packet::Baseline | packet::Avx2>(
            logits: &mut [f32], target: usize, scale: f32
        ) -> (f64, bool);
}

#[inline(always)]
fn cross_entropy_any<P: Packet>(logits: &mut [f32], target: usize, scale: f32) -> (f64, bool) {
    let right = logits[target];
    let mut largest = [f32::NEG_INFINITY; LANES];
    let (packets, rest) = logits.as_chunks::<LANES>();
    for packet in packets {
        for lane in 0..LANES {
            largest[lane] = if packet[lane] > largest[lane] { packet[lane] } else { largest[lane] };
        }
    }
    let largest =
        largest.iter().chain(rest).fold(f32::NEG_INFINITY, |most, &x| if x > most { x } else { most });
    let correct = right == largest && !logits[..target].contains(&largest);

    let mut sums = [0.0; LANES];
    let (packets, rest) = logits.as_chunks_mut::<LANES>();
    for packet in packets {
        for lane in 0..LANES {
            packet[lane] = exponential(packet[lane] - largest);
            sums[lane] += packet[lane];
        }
    }
    for (value, sum) in rest.iter_mut().zip(&mut sums) {
        *value = exponential(*value - largest);
        *sum += *value;
    }
    let sum = joined(&sums);
    let factor = scale / sum;
    for value in logits.iter_mut() {
        *value *= factor;
    }
    logits[target] -= scale;
    (libm::log(f64::from(sum)) + (f64::from(largest) - f64::from(right)), correct)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::initial::Uniform;

    fn points() -> impl Iterator<Item = f32> {
        let small = (-60..=0).flat_map(|power| [2f32.powi(power / 2), -(1.1 * 2f32.powi(power))]);
        (-8600..=8600).map(|step| step as f32 / 100.0).chain(small)
    }

    #[test]
    fn functions_keep_their_relative_error() {
        for x in points() {
            let wide = f64::from(x);
            let relative = |value: f32, exact: f64| {
                if exact == 0.0 { f64::from(value).abs() } else { (f64::from(value) / exact - 1.0).abs() }
            };
            assert!(relative(exponential(x), wide.exp()) < 2e-7, "exp {x}");
            assert!(relative(sigmoid(x), 1.0 / (1.0 + (-wide).exp())) < 3e-7, "sigmoid {x}");
            assert!(relative(tanh(x), wide.tanh()) < 5e-7, "tanh {x}");
        }
    }

    #[test]
    fn ends_of_the_line_are_limits_and_nan_passes_through() {
        assert_eq!((tanh(0.0), tanh(1e30), tanh(f32::NEG_INFINITY)), (0.0, 1.0, -1.0));
        assert_eq!((sigmoid(0.0), sigmoid(1e30)), (0.5, 1.0));
        assert!(sigmoid(f32::NEG_INFINITY) < 1e-37);
        assert!(tanh(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan() && exponential(f32::NAN).is_nan());
    }

    #[test]
    fn cross_entropy_of_equal_logits_is_the_logarithm_of_their_number() {
        for length in [1, 2, 7, 8, 19] {
            let mut logits = vec![3.0; length];
            let (loss, correct) = cross_entropy(&mut logits, 0, 2.0);
            assert!((loss - (length as f64).ln()).abs() < 1e-6);
            assert!(correct);
            for (index, gradient) in logits.iter().enumerate() {
                let expected = 2.0 / length as f32 - if index == 0 { 2.0 } else { 0.0 };
                assert!((gradient - expected).abs() < 1e-6);
            }
        }
        assert!(!cross_entropy(&mut [3.0; 4], 1, 1.0).1, "the first of the largest is the most likely class");
        assert!(cross_entropy(&mut [0.0, 1.0, 1.0], 1, 1.0).1);
        assert!(!cross_entropy(&mut [0.0, f32::NAN], 1, 1.0).1);
        assert!(cross_entropy(&mut [0.0, f32::NAN], 0, 1.0).0.is_nan());
    }

    #[test]
    fn cross_entropy_matches_double_precision() {
        let mut logits = vec![0.0; 37];
        Uniform::new(3).fill(&mut logits, 4.0);
        let exact: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        for target in 0..logits.len() {
            let mut gradient = logits.clone();
            let (loss, _) = cross_entropy(&mut gradient, target, 0.25);
            assert!((loss - (exact.ln() - f64::from(logits[target]))).abs() < 2e-6);
            for (index, value) in gradient.iter().enumerate() {
                let expected = f64::from(logits[index]).exp() / exact - f64::from(index == target);
                assert!((f64::from(*value) - 0.25 * expected).abs() < 1e-7);
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn avx2_and_baseline_agree_bit_by_bit() {
        if !std::arch::is_x86_feature_detected!("avx2") {
            return;
        }
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let values: Vec<f32> = points().collect();
        let (mut one, mut other) = (values.clone(), values.clone());
        tanh_all_portable(&mut one);
        // SAFETY: the feature was detected above.
        unsafe { tanh_all_avx2(&mut other) };
        assert_eq!(bits(&one), bits(&other));
        tanh_backward_portable(&mut one, &values);
        // SAFETY: the feature was detected above.
        unsafe { tanh_backward_avx2(&mut other, &values) };
        assert_eq!(bits(&one), bits(&other));
        for (target, length) in [(0, 5), (3, 40), (8000, 17_000)] {
            let (mut one, mut other) = (values[..length].to_vec(), values[..length].to_vec());
            let first = cross_entropy_portable(&mut one, target, 0.1);
            // SAFETY: the feature was detected above.
            let second = unsafe { cross_entropy_avx2(&mut other, target, 0.1) };
            assert_eq!(first, second);
            assert_eq!(bits(&one), bits(&other));
        }
    }
}
