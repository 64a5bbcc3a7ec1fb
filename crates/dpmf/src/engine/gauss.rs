//! Uniform words to Gaussian numbers, with the same bits on every machine.
//!
//! Box–Muller in single precision from IEEE additions, multiplications and square roots in a fixed order: no
//! fused multiply-add, no table, no call into a mathematics library. Every target computes the same bits,
//! whatever it vectorises.
//!
//! A pair of words `(a, b)` gives the radius `R = √(−2 ln u)`, `u = (a | 1)/2³²`, and the angle from the 32
//! bits of `b`: `(R cos, R sin)`. Where `a < 2¹⁶` the grid of `u` is coarse beside `u` itself, and 64 more
//! bits refine it ([`tail_radius`]): the tail reaches 11.5 σ, and `u` has a relative resolution of 2⁻¹⁵ or
//! better everywhere.

/// Pairs in a group.
pub(crate) const PAIRS: usize = 16;

/// Gaussian numbers in a group, the unit that the field generates.
pub(crate) const GROUP: usize = 2 * PAIRS;

/// Bytes of uniform bits behind a group.
pub(crate) const GROUP_BYTES: usize = 4 * GROUP;

/// Radius words below this one are refined.
pub(crate) const TAIL: u32 = 1 << 16;

const SQRT_HALF: u32 = 0x3f35_04f3;

/// `√(−2 ln u)` for `0 < u < 1`, where `u − 1` is given apart for the sake of its digits when `u ≥ √½`.
///
/// With `u = 2^e (1 + f)`, `√½ ≤ 1 + f < √2`: `ln u = e ln 2 + f − f²/2 + f³ P(f)`. `P` is the minimax
/// polynomial for the relative error of the logarithm, 3.2e-8.
#[inline(always)]
fn radius(u: f32, u_less_one: f32) -> f32 {
    let bits = u.to_bits();
    let exponent = (bits.wrapping_sub(SQRT_HALF) as i32) >> 23;
    let reduced = f32::from_bits(bits.wrapping_sub((exponent as u32) << 23)) - 1.0;
    let f = if exponent == 0 { u_less_one } else { reduced };
    let mut p = 0.087_004_58;
    p = p * f - 0.142_674_85;
    p = p * f + 0.149_147_59;
    p = p * f - 0.165_775_85;
    p = p * f + 0.199_630_65;
    p = p * f - 0.250_013_37;
    p = p * f + 0.333_339_1;
    let f_sq = f * f;
    let logarithm = (f + (f_sq * (f * p) - 0.5 * f_sq)) + exponent as f32 * std::f32::consts::LN_2;
    (-2.0 * logarithm).sqrt()
}

/// The radius of word `a` when no refinement is due.
#[inline(always)]
fn body_radius(a: u32) -> f32 {
    // For u ≥ ½ the word, read as a signed number, is 2³²(u − 1): exact where u itself would round.
    let signed = (a | 1) as i32;
    let scaled = signed as f32 * (1.0 / 4_294_967_296.0);
    let one = f32::from_bits((signed >> 31) as u32 & 1.0_f32.to_bits());
    radius(scaled + one, scaled)
}

/// The radius of a word `a` below [`TAIL`], refined by 64 bits: `u = (2⁶⁴ a + refinement | 1)/2⁹⁶`.
pub(crate) fn tail_radius(a: u32, refinement: u64) -> f32 {
    let fine = (u128::from(a) << 64) | u128::from(refinement) | 1;
    // 2⁻⁹⁶ and all above it are normal numbers, and scaling by a power of two is exact.
    radius(fine as f32 * f32::from_bits((127 - 96) << 23), 0.0)
}

/// Cosine and sine of `2π` times the fraction `(b + ½)/2³²`, turned by an eighth.
///
/// The two top bits choose a quarter turn, the others an angle `x π/4`, `−1 < x < 1`. Minimax polynomials,
/// 3.3e-9 relative for the sine and 3.3e-8 for the cosine.
#[inline(always)]
fn direction(b: u32) -> (f32, f32) {
    let x = ((b << 2) | 2) as i32 as f32 * (1.0 / 2_147_483_648.0);
    let x_sq = x * x;
    let mut s = -3.595_045_2e-5;
    s = s * x_sq + 2.490_001e-3;
    s = s * x_sq - 0.080_745_43;
    s = s * x_sq + std::f32::consts::FRAC_PI_4;
    let sine = (s * x).to_bits();
    let mut c = -3.191_601_6e-4;
    c = c * x_sq + 0.015_850_398;
    c = c * x_sq - 0.308_424_5;
    let cosine = (c * x_sq + 1.0).to_bits();

    // A quarter turn maps (c, s) to (−s, c).
    let quarter = b >> 30;
    let exchange = (sine ^ cosine) & 0_u32.wrapping_sub(quarter & 1);
    let sign_cosine = ((quarter ^ (quarter >> 1)) & 1) << 31;
    let sign_sine = (quarter >> 1) << 31;
    (f32::from_bits(cosine ^ exchange ^ sign_cosine), f32::from_bits(sine ^ exchange ^ sign_sine))
}

/// The pair of a radius and an angle word.
#[inline(always)]
pub(crate) fn scale_direction(radius: f32, b: u32) -> (f32, f32) {
    let (c, s) = direction(b);
    (radius * c, radius * s)
}

/// Word `k` of a group, radii first, then angles.
#[inline(always)]
pub(crate) fn word(bits: &[u8; GROUP_BYTES], k: usize) -> u32 {
    u32::from_le_bytes([bits[4 * k], bits[4 * k + 1], bits[4 * k + 2], bits[4 * k + 3]])
}

/// Fills groups from their bits, pair `k` at places `k` and `PAIRS + k`, and returns the least radius word.
///
/// A result below [`TAIL`] means that some pair awaits refinement.
#[inline(always)]
fn transform_any(bits: &[[u8; GROUP_BYTES]], out: &mut [[f32; GROUP]]) -> u32 {
    let mut least = u32::MAX;
    for (bits, out) in bits.iter().zip(out) {
        // Copies, so that the loop below is free of aliases and becomes vectors without a check.
        let a: [u32; PAIRS] = std::array::from_fn(|k| word(bits, k));
        let b: [u32; PAIRS] = std::array::from_fn(|k| word(bits, PAIRS + k));
        let mut z = [0.0; GROUP];
        for k in 0..PAIRS {
            (z[k], z[PAIRS + k]) = scale_direction(body_radius(a[k]), b[k]);
            least = least.min(a[k]);
        }
        *out = z;
    }
    least
}

crate::simd::dispatch! {
    /// [`transform_any`] in the widest vectors of this machine.
    pub(crate) fn transform / transform_portable / transform_avx2 = transform_any(
        bits: &[[u8; GROUP_BYTES]], out: &mut [[f32; GROUP]]
    ) -> u32;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn exact_radius(u: f64) -> f64 {
        // ln_1p keeps the digits of u − 1, which is exact here for u near one.
        (-2.0 * if u > 0.5 { (u - 1.0).ln_1p() } else { u.ln() }).sqrt()
    }

    fn check_radius(a: u32) {
        let exact = exact_radius(f64::from(a | 1) / 4_294_967_296.0);
        let error = (f64::from(body_radius(a)) / exact - 1.0).abs();
        assert!(error < 2.5e-7, "{a:#x}: {error:e}");
    }

    fn check_direction(b: u32) {
        let (c, s) = direction(b);
        let angle = std::f64::consts::FRAC_PI_4
            * (2.0 * f64::from(b >> 30) + f64::from(((b << 2) | 2) as i32) / 2_147_483_648.0);
        let (cosine, sine) = (angle.cos(), angle.sin());
        assert!((f64::from(c) - cosine).abs() < 1.5e-7, "{b:#x}: {c} {cosine}");
        assert!((f64::from(s) - sine).abs() < 1.5e-7, "{b:#x}: {s} {sine}");
    }

    #[test]
    fn radii_and_directions_at_the_edges_of_their_branches() {
        let edges = [0_u32, 1, 1 << 16, 1 << 30, 1 << 31, 3 << 30, 0xb504_f334, 0x5a82_799a];
        for edge in edges {
            for offset in -300_i32..300 {
                let word = edge.wrapping_add_signed(offset);
                check_radius(word);
                check_direction(word);
            }
        }
    }

    #[test]
    fn the_largest_word_keeps_its_digits() {
        // u = 1 − 2⁻³²: R = √(2·2⁻³²), which rounding u to single precision would turn into zero.
        assert!((f64::from(body_radius(u32::MAX)) * 2.0_f64.powf(15.5) - 1.0).abs() < 1e-7);
    }

    #[test]
    fn the_tail_continues_the_body_and_reaches_eleven_sigma() {
        assert!((tail_radius(0, 0) - (2.0 * 96.0 * std::f32::consts::LN_2).sqrt()).abs() < 1e-5);
        assert!(tail_radius(0, 0) > 11.5 && tail_radius(0, u64::MAX) > 6.6);
        let mut last = f32::INFINITY;
        for shift in 0..80 {
            let fine = 1_u128 << shift;
            let r = tail_radius((fine >> 64) as u32, fine as u64);
            let exact = exact_radius((fine | 1) as f64 / 2.0_f64.powi(96));
            assert!((f64::from(r) / exact - 1.0).abs() < 2.5e-7, "{shift}: {r} {exact}");
            assert!(r < last);
            last = r;
        }
        assert!(body_radius(TAIL) < tail_radius(TAIL - 1, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        #[test]
        fn words_give_the_box_muller_pair(a: u32, b: u32, shift in 0_u32..16) {
            check_radius(a >> shift);
            check_direction(b);
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let mut seed = 0x9e37_79b9_u32;
        let bits: Vec<[u8; GROUP_BYTES]> = (0..500)
            .map(|_| {
                std::array::from_fn(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (seed >> 24) as u8
                })
            })
            .collect();
        let mut one_by_one = vec![[0.0_f32; GROUP]; bits.len()];
        let mut least = u32::MAX;
        for (bits, out) in bits.iter().zip(&mut one_by_one) {
            for k in 0..PAIRS {
                // Opaque, so that the compiler cannot vectorise this loop as it does the one under test.
                let (a, b) = std::hint::black_box((word(bits, k), word(bits, PAIRS + k)));
                (out[k], out[PAIRS + k]) = scale_direction(body_radius(a), b);
                least = least.min(a);
            }
        }
        let to_bits =
            |groups: &[[f32; GROUP]]| groups.as_flattened().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for transform in [transform, transform_portable] {
            let mut out = vec![[0.0; GROUP]; bits.len()];
            assert_eq!(transform(&bits, &mut out), least);
            assert_eq!(to_bits(&out), to_bits(&one_by_one));
        }
    }
}
