//! The field of real Gaussian numbers `Z[t, j]`: each has infinitely many digits, all of them functions of the stream key.
//!
//! Format 2, which fixes every digit. The stream key gives an AES-256 key `K`, and row `t` a key of its own, as in
//! [format 1](crate::engine::field). Under it, coordinates come in groups of 32: group `g` takes the sixteen counter
//! blocks `AES(16g + i ‖ 0)` as 32 little-endian words, 16 radii and then 16 angles; pair `k` gives the coordinates
//! `32g + k` and `32g + 16 + k`. A word holds the first 64 binary digits of a uniform number. Radius and angle of the pair
//! `p = 16g + k` go on with the 128 digits of `AES(p ‖ 1 + 2i)` and of `AES(p ‖ 2 + 2i)`, `i = 0, 1, …`, two words a block.
//! Of 128 first digits of a radius that are all zeros or all ones, the last is turned round. What the digits mean is said
//! in `normal.rs`.
//!
//! Guarantee: were the digits independent, all numbers would be independent and Gaussian but for an event of probability
//! 2⁻¹²⁷ a pair. Telling them from such digits is to tell AES-256 from a random permutation, or to see that it is one: a row
//! of `d` coordinates uses about d/2 blocks of its own key, for an advantage of at most `m (d/2 + 1)²/2¹²⁹` over `m` rows,
//! 2⁻⁵¹ for a million rows of 10⁹ coordinates.

use super::elementary::{Length, Tables};
use super::fixed::Ball;
use super::fused::Separate;
use super::normal::{self, GROUP, GROUP_BYTES, PAIRS, Uniform};
use crate::engine::field::{RowKeys, row_cipher};
use aes::cipher::{Array, BlockCipherEncrypt};
use aes::{Aes256, Block};

/// Version of the map from keys and addresses to digits; a change of any digit is a new version.
pub const EXACT_FIELD_FORMAT: u32 = 2;

const BLOCKS: usize = GROUP_BYTES / 16;

/// Groups encrypted at a time: 256 blocks, eight packets.
const BATCH: usize = 16;

/// The infinite matrix `Z` of independent standard Gaussian numbers, real ones, that belongs to a stream key.
pub struct ExactField {
    keys: RowKeys,
}

/// One row of an [`ExactField`].
pub struct ExactRow {
    cipher: Aes256,
}

impl ExactField {
    /// The field under keys of rows.
    pub(crate) fn under(keys: RowKeys) -> Self {
        Self { keys }
    }

    /// Row `t`. Cost: five blocks and a key schedule, about a tenth of a microsecond.
    pub fn row(&self, t: u64) -> ExactRow {
        ExactRow { cipher: row_cipher(&self.keys, t) }
    }
}

/// Which of a pair's uniform numbers.
#[derive(Clone, Copy)]
enum Part {
    Radius = 1,
    Angle = 2,
}

impl ExactRow {
    /// Writes `Z[t, first], Z[t, first + 1], …` over `out`, each within 2⁻⁴⁵ of the real number.
    ///
    /// Cost: about 3 ns a number on one core with AES and AVX2 instructions.
    pub fn fill(&self, first: u64, out: &mut [f64]) {
        let mut group = first / GROUP as u64;
        let skip = (first % GROUP as u64) as usize;
        let mut rest = out;
        if skip != 0 {
            let head = rest.split_off_mut(..(GROUP - skip).min(rest.len())).unwrap_or_default();
            self.fill_part(group, skip, head);
            group += 1;
        }
        let (whole, tail) = rest.as_chunks_mut();
        self.fill_groups(group, whole);
        if !tail.is_empty() {
            self.fill_part(group + whole.len() as u64, 0, tail);
        }
    }

    fn fill_part(&self, group: u64, skip: usize, out: &mut [f64]) {
        let mut whole = [[0.0; GROUP]];
        self.fill_groups(group, &mut whole);
        out.copy_from_slice(&whole[0][skip..][..out.len()]);
    }

    /// Writes whole groups, from group `first` on.
    pub(crate) fn fill_groups(&self, first: u64, out: &mut [[f64; GROUP]]) {
        let mut blocks = [Block::default(); BATCH * BLOCKS];
        for (batch, out) in out.chunks_mut(BATCH).enumerate() {
            let group = first + (batch * BATCH) as u64;
            let counter = group * BLOCKS as u64;
            let blocks = &mut blocks[..out.len() * BLOCKS];
            for (block, counter) in blocks.iter_mut().zip(counter..) {
                *block = Array(u128::from(counter).to_le_bytes());
            }
            self.cipher.encrypt_blocks(blocks);
            let (bits, _) = Array::slice_as_flattened(blocks).as_chunks();
            if normal::transform(bits, out) {
                self.lengthen(group, bits, out);
            }
        }
    }

    /// Replaces the pairs whose radius has too few digits: one in eight thousand.
    #[cold]
    fn lengthen(&self, first: u64, bits: &[[u8; GROUP_BYTES]], out: &mut [[f64; GROUP]]) {
        for (i, (bits, out)) in bits.iter().zip(out).enumerate() {
            for k in 0..PAIRS {
                let a = normal::word(bits, k);
                if normal::at_edge(a) {
                    let pair = (first + i as u64) * PAIRS as u64 + k as u64;
                    let [second, third] = self.more(pair, Part::Radius, 0);
                    let u = Uniform::from_digits(off_the_ends([a, second, third]));
                    (out[k], out[PAIRS + k]) = normal::pair::<Separate>(u, normal::word(bits, PAIRS + k));
                }
            }
        }
    }

    /// 128 more digits of a pair.
    fn more(&self, pair: u64, part: Part, index: u64) -> [u64; 2] {
        let high = part as u64 + 2 * index;
        let mut block: Block = Array((u128::from(high) << 64 | u128::from(pair)).to_le_bytes());
        self.cipher.encrypt_block(&mut block);
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
        [word(&block[..8]), word(&block[8..])]
    }

    /// The first words of both numbers of a pair.
    fn first_words(&self, pair: u64) -> (u64, u64) {
        let (group, k) = (pair / PAIRS as u64, (pair % PAIRS as u64) as usize);
        let word = |place: usize| {
            let counter = group * BLOCKS as u64 + (place / 2) as u64;
            let mut block: Block = Array(u128::from(counter).to_le_bytes());
            self.cipher.encrypt_block(&mut block);
            block[8 * (place % 2)..][..8].iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
        };
        (word(k), word(PAIRS + k))
    }

    /// The first `64 count` digits of one of a pair's numbers.
    fn digits(&self, pair: u64, part: Part, first: u64, count: usize) -> Vec<u64> {
        let mut words = vec![first];
        let mut index = 0;
        while words.len() < count.max(3) {
            words.extend(self.more(pair, part, index));
            index += 1;
        }
        words
    }

    /// `Z[t, j]` with the digits of [`Fixed<L>`], but for a few.
    ///
    /// Cost: a microsecond for 128 binary digits.
    pub(crate) fn number<const L: usize>(&self, j: u64) -> Ball<L>
    where
        Tables<L>: Length,
    {
        let (group, place) = (j / GROUP as u64, (j % GROUP as u64) as usize);
        let pair = group * PAIRS as u64 + (place % PAIRS) as u64;
        let (a, b) = self.first_words(pair);
        let radius = radius::<L>(&self.digits(pair, Part::Radius, a, L + 2));
        let (cosine, sine) = direction::<L>(&self.digits(pair, Part::Angle, b, L + 1));
        radius.times(if place < PAIRS { &cosine } else { &sine })
    }
}

/// Keeps a radius within 2⁻¹²⁸ … 1 − 2⁻¹²⁸.
fn off_the_ends([a, b, c]: [u64; 3]) -> [u64; 3] {
    match (a, b) {
        (0, 0) => [a, 1, c],
        (u64::MAX, u64::MAX) => [a, u64::MAX - 1, c],
        _ => [a, b, c],
    }
}

/// `√(−2 ln u)` by the digits of `u`, of which there are `64 (L + 2)` or more.
fn radius<const L: usize>(words: &[u64]) -> Ball<L>
where
    Tables<L>: Length,
{
    let mut words = words.to_vec();
    let ends = off_the_ends([words[0], words[1], words[2]]);
    words[..3].copy_from_slice(&ends);
    let tables = Tables::<L>::tables();
    // u = 2^−lead m with ½ ≤ m < 1.
    let skip = words.iter().take_while(|&&word| word == 0).count();
    let bits = words[skip].leading_zeros();
    let lead = 64 * skip as u64 + u64::from(bits);
    let at = |i: usize| words.get(i).copied().unwrap_or(0);
    let mut limbs = [0; L];
    for (i, limb) in limbs[..L - 1].iter_mut().rev().enumerate() {
        let next = at(skip + i + 1);
        *limb = at(skip + i) << bits | if bits == 0 { 0 } else { next >> (64 - bits) };
    }
    let m = Ball::<L>::digits(limbs);
    // Between √½ and √2, or a hair beyond: which side of √½ is decided with 50 digits, and either will do.
    let (m, lead) = if m.middle.approximate() < std::f64::consts::FRAC_1_SQRT_2 {
        (m.times_power_of_two(1), lead + 1)
    } else {
        (m, lead)
    };
    let logarithm = tables.ln_2.times(&Ball::whole(lead)).minus(&tables.logarithm(&m));
    logarithm.times_power_of_two(1).square_root()
}

/// Cosine and sine of an angle by its digits: two for the quarter, then a fraction of it.
fn direction<const L: usize>(words: &[u64]) -> (Ball<L>, Ball<L>)
where
    Tables<L>: Length,
{
    let b = words[0];
    // x + 1 = U/2⁶³ + D/2⁶¹ with the other 62 bits, offset, in U, and the digits from the second word on in D.
    let u = (b << 2) ^ (1 << 63);
    let mut limbs = [0; L];
    limbs[L - 1] = u >> 63;
    for (i, limb) in limbs[..L - 1].iter_mut().rev().enumerate() {
        let high = if i == 0 { u << 1 } else { words[i] << 3 };
        *limb = high | words[i + 1] >> 61;
    }
    let x = Ball::<L>::digits(limbs).minus(&Ball::whole(1));
    let tables = Tables::<L>::tables();
    let (c, s) = tables.cosine_and_sine(&x.times(&tables.quarter_pi));
    match b >> 62 {
        0 => (c, s),
        1 => (s.negated(), c),
        2 => (c.negated(), s.negated()),
        _ => (s, c.negated()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::{NoiseKey, RunId};

    fn field() -> ExactField {
        ExactField::new(&NoiseKey::from_seed(1).stream(crate::Identity([2; 32]), RunId([3; 16])))
    }

    /// Distance of an f64 from a ball, at most.
    fn distance<const L: usize>(ball: &Ball<L>, value: f64) -> f64 {
        ball.minus(&Ball::from_f64(value)).size()
    }

    #[test]
    fn the_fast_numbers_are_within_their_bound() {
        let row = field().row(7);
        let mut z = vec![0.0; 20_000];
        row.fill(5, &mut z);
        let worst = z.iter().zip(5..).map(|(z, j)| distance(&row.number::<3>(j), *z)).fold(0.0, f64::max);
        assert!(worst <= normal::ERROR, "{worst:e}");
        // The bound allows for the worst; what is seen is some ten times smaller, and not zero.
        assert!(worst > normal::ERROR / 1000.0, "{worst:e}");
    }

    #[test]
    fn numbers_of_all_lengths_are_one() {
        let row = field().row(3);
        for j in (0..400).chain([1 << 40, (1 << 61) + 7]) {
            let (short, middle, long) = (row.number::<3>(j), row.number::<5>(j), row.number::<9>(j));
            assert!(short.radius < 2.0_f64.powi(-100) && middle.radius < 2.0_f64.powi(-228), "{j}");
            assert!(long.radius < 2.0_f64.powi(-480), "{j} {:e}", long.radius);
            for off in [short.lengthened().minus(&long), middle.lengthened().minus(&long)] {
                assert!(off.middle.approximate().abs() <= off.radius, "{j}");
            }
        }
    }

    /// Radii and directions where the formulas change or end. The words are made up, so that the ends are reached.
    #[test]
    fn the_extremes_are_within_the_bound() {
        let max = u64::MAX;
        let sqrt_half = 0xb504_f333_f9de_6484_u64;
        let mut radii =
            vec![[0, 0, 0], [0, 1, 5], [0, 0, max], [max, max, max], [max, max, 0], [max, max - 1, 3]];
        for edge in
            [normal::EDGE, max - normal::EDGE, 1 << 63, sqrt_half, sqrt_half >> 1, sqrt_half >> 7, 1 << 62]
        {
            radii.extend(
                (0..6).map(|k: u64| [edge.wrapping_add(k).wrapping_sub(3), k.wrapping_mul(max / 5), 17]),
            );
        }
        radii.extend((0..128).map(|shift| {
            let digits = (u128::MAX / 3) >> shift;
            [(digits >> 64) as u64, digits as u64, max / 7]
        }));
        radii.extend((0..128).map(|shift| {
            let digits = !((u128::MAX / 3) >> shift);
            [(digits >> 64) as u64, digits as u64, max / 7]
        }));
        let angles: Vec<u64> = (0..4_u64)
            .flat_map(|quarter| {
                [0, 1, 1 << 61, (1 << 61) - 1, (1 << 62) - 1, 0x1234_5678_9abc_def0 >> 2]
                    .map(|rest| quarter << 62 | rest)
            })
            .collect();
        let mut worst = 0.0_f64;
        for words in &radii {
            let edge = normal::at_edge(words[0]);
            let u = match edge {
                true => Uniform::from_digits(off_the_ends(*words)),
                false => Uniform::from_word(words[0]),
            };
            let exact = radius::<9>(&[&words[..], &[max / 11; 9]].concat());
            for b in &angles {
                let (c, s) = direction::<9>(&[&[*b][..], &[max / 13; 10]].concat());
                let fast =
                    [normal::pair::<Separate>(u, *b), normal::pair::<super::super::fused::Fused>(u, *b)];
                for (x, y) in fast {
                    let off = distance(&exact.times(&c), x).max(distance(&exact.times(&s), y));
                    assert!(off <= normal::ERROR, "{words:x?} {b:x}: {off:e}");
                    worst = worst.max(off);
                }
            }
            assert!(exact.size() < normal::LARGEST);
        }
        assert!(worst > normal::ERROR / 100.0, "{worst:e}");
    }

    #[test]
    fn any_shards_concatenate_to_the_whole_within_the_bound() {
        let row = field().row(11);
        let mut whole = vec![0.0; 700];
        row.fill(1000, &mut whole);
        for (start, length) in [(0, 1), (31, 2), (64, 500), (699, 1), (13, 480)] {
            let mut part = vec![0.0; length];
            row.fill(1000 + start as u64, &mut part);
            assert_eq!(part, whole[start..start + length]);
        }
    }

    /// Format 2. The decimals come from a second implementation of the format in Python: `hmac`, `hashlib`, AES from
    /// `cryptography`, and mpmath with 60 digits.
    #[test]
    fn the_digits_of_format_2_are_pinned() {
        assert_eq!(EXACT_FIELD_FORMAT, 2);
        let row = field().row(0);
        for (j, negative, decimals) in [
            (0, false, "003499474528104063183834094556160466442"),
            (5, true, "680312493848128588096191825230715597893"),
            (16, true, "723018570080218199156845983090485099204"),
            (31, true, "207278232335137356655601743275921007308"),
            (1 << 50, false, "102943661305384458246438053272910543028"),
        ] {
            let number = row.number::<5>(j);
            let size = if negative { number.negated() } else { number };
            let off = size.minus(&Ball::from_decimals(decimals));
            assert!(off.middle.approximate().abs() <= off.radius, "{j}");
        }
    }
}
