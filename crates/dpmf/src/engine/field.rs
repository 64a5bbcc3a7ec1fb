//! The Gaussian field `Z[t, j]`, a pure function of the stream key, the row and the coordinate.
//!
//! Format 1, which fixes every bit. The stream key gives an AES-256 key `K`. Row `t` has a key of its own:
//! the first halves of the four blocks `AES_K(t ‖ i ‖ "row ")`, `i = 0…3`, as in RFC 8452. Under it,
//! coordinates come in groups of 32: group `g` takes the eight counter blocks `AES(8g + i ‖ 0)` as 32
//! little-endian words, 16 radii and then 16 angles, for 16 Box–Muller pairs; pair `k` gives coordinates
//! `32g + k` and `32g + 16 + k`. A pair whose radius word is below 2¹⁶ takes 64 more bits from the block
//! `AES(16g + k ‖ 1)`. All integers are little endian.
//!
//! Guarantee: a row of `d` coordinates uses about d/4 blocks of its own key, so telling all `m` rows from
//! truly random ones has an advantage of at most `m (d/4 + 1)²/2¹²⁹` beyond that of breaking AES-256 itself:
//! 2⁻⁵³ for a million rows of 10⁹ coordinates.

use super::gauss::{self, GROUP, GROUP_BYTES, PAIRS, TAIL};
use aes::cipher::{Array, BlockCipherEncrypt, KeyInit};
use aes::{Aes256, Block};
use zeroize::Zeroizing;

/// Version of the map from keys and addresses to bits; a change of any bit is a new version.
pub const FIELD_FORMAT: u32 = 1;

const BLOCKS: usize = GROUP_BYTES / 16;

/// Groups encrypted at a time: 120 blocks, whole batches for ciphers that take 8 or 30 side by side.
const BATCH: usize = 15;

/// The infinite matrix `Z` of independent standard Gaussian numbers that belongs to a stream key.
pub struct Field {
    keys: RowKeys,
}

/// What the keys of rows are derived with.
pub(crate) struct RowKeys {
    cipher: Aes256,
}

/// One row of a [`Field`].
pub struct Row {
    cipher: Aes256,
}

impl Field {
    /// The field under keys of rows.
    pub(crate) fn under(keys: RowKeys) -> Self {
        Self { keys }
    }

    /// Row `t`. Cost: five blocks and a key schedule, about a tenth of a microsecond.
    pub fn row(&self, t: u64) -> Row {
        Row { cipher: row_cipher(&self.keys, t) }
    }
}

impl RowKeys {
    /// Those under a secret of their own.
    pub(crate) fn of(secret: &[u8; 32]) -> Self {
        Self { cipher: Aes256::new(secret.into()) }
    }
}

/// The cipher of row `t`.
pub(crate) fn row_cipher(keys: &RowKeys, t: u64) -> Aes256 {
    let mut key = Zeroizing::new([0; 32]);
    for (i, part) in key.chunks_exact_mut(8).enumerate() {
        let mut block = Block::default();
        block[..8].copy_from_slice(&t.to_le_bytes());
        block[8..12].copy_from_slice(&(i as u32).to_le_bytes());
        block[12..].copy_from_slice(b"row ");
        keys.cipher.encrypt_block(&mut block);
        part.copy_from_slice(&block[..8]);
    }
    Aes256::new((&*key).into())
}

impl Row {
    /// Writes `Z[t, first], Z[t, first + 1], …` over `out`.
    ///
    /// Guarantee: a number depends on the key and its address alone, not on where a range begins or ends.
    /// Cost: about 2 ns a number on one core with AES and AVX2 instructions; a range that begins or ends
    /// inside a group of 32 costs the whole group.
    pub fn fill(&self, first: u64, out: &mut [f32]) {
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

    fn fill_part(&self, group: u64, skip: usize, out: &mut [f32]) {
        let mut whole = [[0.0; GROUP]];
        self.fill_groups(group, &mut whole);
        out.copy_from_slice(&whole[0][skip..][..out.len()]);
    }

    /// Writes whole groups, from group `first` on.
    pub(crate) fn fill_groups(&self, first: u64, out: &mut [[f32; GROUP]]) {
        for (batch, out) in out.chunks_mut(BATCH).enumerate() {
            let group = first + (batch * BATCH) as u64;
            let counter = group * BLOCKS as u64;
            let mut blocks: [Block; BATCH * BLOCKS] =
                std::array::from_fn(|i| Array(u128::from(counter + i as u64).to_le_bytes()));
            let blocks = &mut blocks[..out.len() * BLOCKS];
            self.cipher.encrypt_blocks(blocks);
            let (bits, _) = Array::slice_as_flattened(blocks).as_chunks();
            if gauss::transform(bits, out) < TAIL {
                self.refine(group, bits, out);
            }
        }
    }

    /// Replaces the pairs whose radius word is below [`TAIL`]: one in 65 536.
    #[cold]
    fn refine(&self, first: u64, bits: &[[u8; GROUP_BYTES]], out: &mut [[f32; GROUP]]) {
        for (i, (bits, out)) in bits.iter().zip(out).enumerate() {
            for k in 0..PAIRS {
                let a = gauss::word(bits, k);
                if a < TAIL {
                    let counter = (first + i as u64) * PAIRS as u64 + k as u64;
                    let radius = gauss::tail_radius(a, self.refinement(counter));
                    (out[k], out[PAIRS + k]) = gauss::scale_direction(radius, gauss::word(bits, PAIRS + k));
                }
            }
        }
    }

    /// The 64 extra bits of a pair, by its number within the row.
    fn refinement(&self, pair: u64) -> u64 {
        let mut block: Block = Array((1 << 64 | u128::from(pair)).to_le_bytes());
        self.cipher.encrypt_block(&mut block);
        let (low, _) = block.split_at(8);
        low.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::{NoiseKey, RunId};
    use proptest::prelude::*;
    use sha2::{Digest, Sha256};

    fn field() -> Field {
        Field::new(&NoiseKey::from_seed(1).stream(crate::Identity([2; 32]), RunId([3; 16])))
    }

    fn one(t: u64, j: u64) -> u32 {
        let mut z = [0.0];
        field().row(t).fill(j, &mut z);
        z[0].to_bits()
    }

    /// Format 1. The numbers come from a second implementation of the format in Python: `hmac`, `hashlib`,
    /// AES from `cryptography`, arithmetic on `numpy.float32`, one coordinate at a time.
    #[test]
    fn the_bits_of_format_1_are_pinned() {
        assert_eq!(FIELD_FORMAT, 1);
        assert_eq!(NoiseKey::from_seed(1).fingerprint().to_string(), "595940567496dca4e619a257e027a86b");
        let addresses = [0, 5, 16, 31];
        for (t, group, pinned) in [
            (0, 0, [0xbe74_ae75, 0x3e89_49f9, 0x3fa9_118e, 0x3ea0_72ed]),
            (7, 3125, [0x3e1f_c13a, 0x3f91_5b64, 0xbf94_8fef, 0x3eb9_1ea8]),
            (1 << 40, 1 << 50, [0xbe18_5ce8, 0x3fa8_a71e, 0xbc1a_6e33, 0xbf44_df63]),
        ] {
            assert_eq!(addresses.map(|k| one(t, 32 * group + k)), pinned, "row {t}, group {group}");
        }
        // The first three refined pairs of row 0.
        for (group, k, pinned) in [
            (178, 1, [0x4096_48d4, 0x3fba_b5d5]),
            (948, 10, [0x40a4_5ec1, 0xbf6f_523f]),
            (6518, 1, [0x4089_bc1f, 0xc008_f8b1]),
        ] {
            assert_eq!([k, k + 16].map(|k| one(0, 32 * group + k)), pinned, "group {group}");
        }
        let mut z = vec![0.0; 400 * GROUP];
        field().row(0).fill(0, &mut z);
        let bytes: Vec<u8> = z.iter().flat_map(|z| z.to_le_bytes()).collect();
        let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, "6361368e9b09a617b4fa6c4fa145779c822050d7e6236853ebdfc6164ca94734");
    }

    proptest! {
        #[test]
        fn any_shards_concatenate_to_the_whole(
            t: u64,
            first in prop_oneof![0_u64..200, (1_u64 << 62)..(1 << 62) + 200],
            cuts in prop::collection::vec(0_usize..5000, 0..6),
        ) {
            let row = field().row(t);
            let mut whole = vec![0.0; 5000];
            row.fill(first, &mut whole);
            let mut cuts = cuts;
            cuts.extend([0, whole.len()]);
            cuts.sort_unstable();
            for pair in cuts.windows(2) {
                let mut part = vec![f32::NAN; pair[1] - pair[0]];
                row.fill(first + pair[0] as u64, &mut part);
                let expected = &whole[pair[0]..pair[1]];
                prop_assert!(part.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
        }
    }

    #[test]
    fn another_key_mechanism_run_or_row_gives_another_field() {
        let sample = |key: u64, mechanism: u8, run: u8, t: u64| {
            let stream = NoiseKey::from_seed(key).stream(crate::Identity([mechanism; 32]), RunId([run; 16]));
            let mut z = [0.0; 64];
            Field::new(&stream).row(t).fill(0, &mut z);
            z
        };
        let base = sample(1, 2, 3, 4);
        assert_eq!(base, sample(1, 2, 3, 4));
        for other in [sample(2, 2, 3, 4), sample(1, 3, 3, 4), sample(1, 2, 4, 4), sample(1, 2, 3, 5)] {
            assert!(base.iter().zip(&other).all(|(a, b)| a != b));
        }
    }

    /// Given `a < 16`, `exp(−R²/2)·2²⁸` is uniform. Kolmogorov–Smirnov, α = 1e-6; the power checks leave the
    /// refinement out and stretch the radius by 1 %.
    #[test]
    fn the_refined_tail_has_the_exact_law() {
        let row = field().row(0);
        let n = 1_u32 << 16;
        let distance = |mask: u64, scale: f64| {
            let mut uniforms: Vec<f64> = (0..n)
                .map(|i| {
                    let radius =
                        f64::from(gauss::tail_radius(i % 16, row.refinement(i.into()) & mask)) * scale;
                    (-0.5 * radius * radius).exp() * 2.0_f64.powi(28)
                })
                .collect();
            uniforms.sort_by(f64::total_cmp);
            let steps = uniforms.iter().zip(0_u32..);
            let ks = steps.map(|(u, i)| {
                let (below, above) = (f64::from(i) / f64::from(n), f64::from(i + 1) / f64::from(n));
                (u - below).abs().max((above - u).abs())
            });
            ks.fold(0.0, f64::max) * f64::from(n).sqrt()
        };
        let critical = (-0.5 * (1e-6_f64 / 2.0).ln()).sqrt();
        assert!(distance(u64::MAX, 1.0) < critical, "{}", distance(u64::MAX, 1.0));
        assert!(distance(0, 1.0) > critical, "no power");
        assert!(distance(u64::MAX, 1.01) > critical, "no power");
    }
}
