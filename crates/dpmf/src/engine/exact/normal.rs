//! Uniform words to Gaussian numbers in double precision, with a bound on the error.
//!
//! Box–Muller: a pair of real numbers `(u, α)`, uniform on the unit interval and on a turn, gives
//! `(R cos α, R sin α)` with `R = √(−2 ln u)`. Their first 64 binary digits each are a radius word `a` and an angle word
//! `b`; here both are taken to go on with the digits `1000…`. Unlike the bits of [`gauss`](crate::engine::gauss), those of
//! the result may differ between machines: all that counts is that they are within [`ERROR`] of the real numbers.
//!
//! # The bound
//!
//! Let `v = 2⁻⁵³`, so that an operation errs by at most `v` of its result. Words within [`EDGE`] of either end of their
//! range are taken out ([`Uniform`] gives them 128 more digits), so the missing digits change `u`, and `1 − u`, by at
//! most `½/2⁵⁰ = 4v` of themselves; with the conversion and the half that is added, by `6v`.
//!
//! *Logarithm.* `u = 2^e m` with `√½ ≤ m < √2`, `f = m − 1` without error, `s = f/(2 + f)`, and
//! `ln m = 2s(1 + p)`, `p = Σ_{k=1}^{10} s^{2k}/(2k + 1) ≤ 0.0101`. The terms left out are below `2⁻⁵⁸` of the sum. `s`
//! errs by `2v`, and `1 + p` by less than `2v`, of itself.
//! - `e = 0`, `u ≥ √½`: `f = u − 1` is converted apart, and is off by `6v` of itself, which `s` sees 1.18-fold:
//!   `7.1v + 2v + 2v + 2v`, that is 14v of the logarithm, 8v of `R ≤ 0.84`, together below `7v`.
//! - `e < 0`: the logarithm is off by `6v` for `u`, and `2.1v` for `ln m`, `|ln m| ≤ 0.35`, and by `4v` of itself for
//!   `e ln 2` and the sum, `|e| ln 2 ≤ 2 |ln u|`. With `y = |ln u| ≥ 0.346`, `R = √(2y)` is off by at most
//!   `√(2y) (½(8.1/y + 4) + 1) v`, which is below `13v` at `y = 0.346` and below `41v` at the largest `y`, `128 ln 2`.
//!
//! *Direction.* The angle within its eighths is off by `3v` of itself, at most `2.4v`. The series are left after the powers
//! 15 and 16, which changes the sine by less than `0.5v` and the cosine by less than `0.02v`; evaluating them costs less
//! than `2v`. Together below `5v`.
//!
//! *Product.* `|z|` is off by at most `41v + 13.33·5v + 13.33v < 122v`. [`ERROR`] is `256v`.

use super::fused::Arithmetic;

/// Pairs in a group.
pub(crate) const PAIRS: usize = 16;

/// Gaussian numbers in a group, the unit that a row generates.
pub(crate) const GROUP: usize = 2 * PAIRS;

/// Bytes of digits behind a group: 64 for each number.
pub(crate) const GROUP_BYTES: usize = 8 * GROUP;

/// Largest difference between a number computed here and the real one.
pub(crate) const ERROR: f64 = 1.0 / (1_u64 << 45) as f64;

/// No number is larger: `√(2·128 ln 2) = 13.33`.
pub(crate) const LARGEST: f64 = 13.34;

/// Radius words closer than this to 0 or to 2⁶⁴ have too few digits beside their size.
pub(crate) const EDGE: u64 = 1 << 50;

const SQRT_HALF: u64 = 0x3fe6_a09e_667f_3bcd;
const EXPONENT_ONE: u64 = 1023 << 52;

/// A uniform number, and the same less one, each to a few units in its last place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Uniform {
    pub(crate) value: f64,
    pub(crate) less_one: f64,
}

impl Uniform {
    /// The number with the digits of `a`, then `1000…`.
    #[inline(always)]
    pub(crate) fn from_word(a: u64) -> Self {
        // For u ≥ ½ the word, read as a signed number, is 2⁶⁴(u − 1): its digits count from the nearer end.
        let signed = (a as i64 as f64 + 0.5) * (1.0 / 18_446_744_073_709_551_616.0);
        let one = f64::from_bits((a as i64 >> 63) as u64 & EXPONENT_ONE);
        Self { value: signed + one, less_one: signed }
    }

    /// The number with these 192 digits; its first 128 are neither all zeros nor all ones.
    pub(crate) fn from_digits(words: [u64; 3]) -> Self {
        let near_one = words[0] >> 63 == 1;
        let words = if near_one { words.map(|word| !word) } else { words };
        let skip = (0..2).take_while(|&i| words[i] == 0).count();
        let lead = words[skip].leading_zeros();
        let next = words.get(skip + 1).copied().unwrap_or(0);
        let top = words[skip] << lead | if lead == 0 { 0 } else { next >> (64 - lead) };
        let size = (top as f64) * 2.0_f64.powi(-64 - 64 * skip as i32 - lead as i32);
        if near_one {
            Self { value: 1.0 - size, less_one: -size }
        } else {
            Self { value: size, less_one: size }
        }
    }
}

/// `√(−2 ln u)`.
#[inline(always)]
fn radius<A: Arithmetic>(u: Uniform) -> f64 {
    let bits = u.value.to_bits();
    // 1023 + e: at most 1023, since u < √2.
    let exponent = bits.wrapping_sub(SQRT_HALF).wrapping_add(EXPONENT_ONE) >> 52;
    let e = f64::from_bits(exponent | 0x4330_0000_0000_0000) - (4_503_599_627_370_496.0 + 1023.0);
    let reduced = f64::from_bits(bits.wrapping_sub(exponent.wrapping_sub(1023) << 52)) - 1.0;
    let f = if exponent == 1023 { u.less_one } else { reduced };
    let s = f / (2.0 + f);
    let s_sq = s * s;
    let mut p = 1.0 / 21.0;
    p = A::mul_add(p, s_sq, 1.0 / 19.0);
    p = A::mul_add(p, s_sq, 1.0 / 17.0);
    p = A::mul_add(p, s_sq, 1.0 / 15.0);
    p = A::mul_add(p, s_sq, 1.0 / 13.0);
    p = A::mul_add(p, s_sq, 1.0 / 11.0);
    p = A::mul_add(p, s_sq, 1.0 / 9.0);
    p = A::mul_add(p, s_sq, 1.0 / 7.0);
    p = A::mul_add(p, s_sq, 1.0 / 5.0);
    p = A::mul_add(p, s_sq, 1.0 / 3.0);
    let sum = A::mul_add(p, s_sq, 1.0);
    A::mul_add(-4.0 * s, sum, e * (-2.0 * std::f64::consts::LN_2)).sqrt()
}

/// Cosine and sine of the angle of a word: `(π/4)(2q + x)` with the quarter `q` in the two top bits and the others a
/// signed fraction `−1 ≤ x < 1`.
#[inline(always)]
fn direction<A: Arithmetic>(b: u64) -> (f64, f64) {
    let x = ((b << 2) | 2) as i64 as f64 * (std::f64::consts::FRAC_PI_4 / 9_223_372_036_854_775_808.0);
    let y = x * x;
    let mut s = -1.0 / 1_307_674_368_000.0;
    s = A::mul_add(s, y, 1.0 / 6_227_020_800.0);
    s = A::mul_add(s, y, -1.0 / 39_916_800.0);
    s = A::mul_add(s, y, 1.0 / 362_880.0);
    s = A::mul_add(s, y, -1.0 / 5040.0);
    s = A::mul_add(s, y, 1.0 / 120.0);
    s = A::mul_add(s, y, -1.0 / 6.0);
    let sine = A::mul_add(s * y, x, x).to_bits();
    let mut c = 1.0 / 20_922_789_888_000.0;
    c = A::mul_add(c, y, -1.0 / 87_178_291_200.0);
    c = A::mul_add(c, y, 1.0 / 479_001_600.0);
    c = A::mul_add(c, y, -1.0 / 3_628_800.0);
    c = A::mul_add(c, y, 1.0 / 40320.0);
    c = A::mul_add(c, y, -1.0 / 720.0);
    c = A::mul_add(c, y, 1.0 / 24.0);
    c = A::mul_add(c, y, -0.5);
    let cosine = A::mul_add(c, y, 1.0).to_bits();

    // A quarter turn maps (c, s) to (−s, c).
    let quarter = b >> 62;
    let exchange = (sine ^ cosine) & 0_u64.wrapping_sub(quarter & 1);
    let sign_cosine = ((quarter ^ (quarter >> 1)) & 1) << 63;
    let sign_sine = (quarter >> 1) << 63;
    (f64::from_bits(cosine ^ exchange ^ sign_cosine), f64::from_bits(sine ^ exchange ^ sign_sine))
}

/// The pair of a uniform number and an angle word.
#[inline(always)]
pub(crate) fn pair<A: Arithmetic>(u: Uniform, b: u64) -> (f64, f64) {
    let (r, (c, s)) = (radius::<A>(u), direction::<A>(b));
    (r * c, r * s)
}

/// Whether a radius word needs more digits.
#[inline(always)]
pub(crate) fn at_edge(a: u64) -> bool {
    a.wrapping_add(EDGE) < 2 * EDGE
}

/// Word `k` of a group, radii first, then angles.
#[inline(always)]
pub(crate) fn word(bits: &[u8; GROUP_BYTES], k: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&bits[8 * k..8 * k + 8]);
    u64::from_le_bytes(bytes)
}

/// Fills groups from their bits, pair `k` at places `k` and `PAIRS + k`, and returns whether any pair is
/// [at the edge](at_edge).
#[inline(always)]
fn transform_any<A: Arithmetic>(bits: &[[u8; GROUP_BYTES]], out: &mut [[f64; GROUP]]) -> bool {
    let mut least = u32::MAX;
    for (bits, out) in bits.iter().zip(out) {
        // Copies, so that the loop below is free of aliases and becomes vectors without a check.
        let a: [u64; PAIRS] = std::array::from_fn(|k| word(bits, k));
        let b: [u64; PAIRS] = std::array::from_fn(|k| word(bits, PAIRS + k));
        let mut z = [0.0; GROUP];
        for k in 0..PAIRS {
            (z[k], z[PAIRS + k]) = pair::<A>(Uniform::from_word(a[k]), b[k]);
            least = least.min((a[k].wrapping_add(EDGE) >> 32) as u32);
        }
        *out = z;
    }
    u64::from(least) < (2 * EDGE) >> 32
}

super::fused::dispatch_fused! {
    /// [`transform_any`] in the widest vectors of this machine.
    pub(crate) fn transform / transform_portable / transform_wide = transform_any(
        bits: &[[u8; GROUP_BYTES]], out: &mut [[f64; GROUP]]
    ) -> bool;
}

#[cfg(test)]
mod tests {
    use super::super::fused::{Fused, Separate};
    use super::*;

    #[test]
    fn words_split_at_the_edges() {
        for (a, edge) in [
            (0, true),
            (EDGE - 1, true),
            (EDGE, false),
            (1 << 63, false),
            (u64::MAX - EDGE, false),
            (u64::MAX - EDGE + 1, true),
            (u64::MAX, true),
        ] {
            assert_eq!(at_edge(a), edge, "{a:#x}");
            let mut bits = [0x55; GROUP_BYTES];
            bits[8 * 5..8 * 6].copy_from_slice(&a.to_le_bytes());
            let mut out = [[0.0; GROUP]];
            assert_eq!(transform(&[bits], &mut out), edge, "{a:#x}");
        }
    }

    #[test]
    fn the_vector_code_computes_the_pairs() {
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 56) as u8
        };
        let bits: Vec<[u8; GROUP_BYTES]> = (0..300).map(|_| std::array::from_fn(|_| next())).collect();
        let mut out = vec![[0.0; GROUP]; bits.len()];
        let mut portable = out.clone();
        transform(&bits, &mut out);
        transform_portable(&bits, &mut portable);
        for ((bits, out), portable) in bits.iter().zip(&out).zip(&portable) {
            for k in 0..PAIRS {
                let (u, b) = (Uniform::from_word(word(bits, k)), word(bits, PAIRS + k));
                let (c, s) = pair::<Separate>(u, b);
                assert_eq!((portable[k], portable[PAIRS + k]), (c, s));
                let fused = pair::<Fused>(u, b);
                for (x, y) in [(out[k], c), (out[PAIRS + k], s), (fused.0, c), (fused.1, s)] {
                    assert!((x - y).abs() < ERROR / 4.0, "{x} {y}");
                }
            }
        }
    }
}
