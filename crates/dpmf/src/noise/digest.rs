//! A keyed digest of a sum of whole numbers that any device can compute: two independent universal hashes, in integers.
//!
//! Coordinate `j = 2¹⁴b + i` of block `b` has the key `m_b k_i` in each hash, and
//!
//! ```text
//! H = Σ_b m_b Σ_i k_i S_j   mod p,    p = 2⁶¹ − 1.
//! ```
//!
//! `k_i` and `m_b` are 61 bits each of `AES(i ‖ 0)` and `AES(b ‖ 1)`, the first eight bytes for the first hash and the last for
//! the second. `H` is linear in `S`: the digests of the parts of a sum, on several devices or ranks, add up to that of the whole,
//! however it is cut.
//!
//! Guarantee: two different sums with entries below 2⁶⁰ have the same `H` with probability at most 3/p, since one of their
//! blocks differs, and 2⁻¹¹⁸ for both hashes, if they were chosen without the keys. What a journal keeps is an HMAC of it.

use super::key::StreamKey;
use aes::cipher::{Array, BlockCipherEncrypt, KeyInit};
use aes::{Aes256, Block};
use rayon::prelude::*;
use std::ops::Range;

/// Coordinates of a block.
pub(crate) const BLOCK: usize = 1 << 14;

/// The prime `p`.
const PRIME: u64 = (1 << 61) - 1;

/// Products of 53 and 61 bits that an `i128` adds up: 2¹² of them, with a bit to spare.
const CHUNK: usize = 1 << 12;

/// The two hashes of a sum, or of a part of it.
pub type SumDigest = [u64; 2];

/// The keys of the digests of one run.
pub(crate) struct DigestKeys {
    cipher: Aes256,
    places: Vec<[u64; 2]>,
}

impl DigestKeys {
    pub(crate) fn new(key: &StreamKey) -> Self {
        let cipher = Aes256::new((&*key.purpose("dpmf 1 sum digest", &[])).into());
        let places = (0..BLOCK as u64).map(|i| pair(&cipher, i, 0)).collect();
        Self { cipher, places }
    }

    /// `k_i` of both hashes, for all places of a block.
    pub(crate) fn places(&self) -> &[[u64; 2]] {
        &self.places
    }

    /// `m_b` of both hashes.
    pub(crate) fn block(&self, b: u64) -> [u64; 2] {
        pair(&self.cipher, b, 1)
    }

    /// The digest of sums at some ranges of coordinates, one after the other, on all threads.
    ///
    /// Cost: about a nanosecond a coordinate on one core.
    pub(crate) fn digest(&self, ranges: impl Iterator<Item = Range<u64>>, sums: &[i64]) -> SumDigest {
        let (mut rest, mut jobs) = (sums, Vec::new());
        for range in ranges {
            let mut start = range.start;
            while start < range.end && !rest.is_empty() {
                let end = ((start / BLOCK as u64 + 1) * BLOCK as u64).min(range.end);
                let (part, others) = rest.split_at(rest.len().min((end - start) as usize));
                jobs.push((start, part));
                (rest, start) = (others, end);
            }
        }
        let one = |(start, part): (u64, &[i64])| {
            let keys = &self.places[(start % BLOCK as u64) as usize..];
            let inner = inner(keys, part);
            let outer = self.block(start / BLOCK as u64);
            [multiply(inner[0], outer[0]), multiply(inner[1], outer[1])]
        };
        jobs.into_par_iter().map(one).reduce(|| [0; 2], add)
    }
}

/// The digest of a sum that two parts make up.
pub(crate) fn add(a: SumDigest, b: SumDigest) -> SumDigest {
    std::array::from_fn(|h| (a[h] + b[h]) % PRIME)
}

fn pair(cipher: &Aes256, index: u64, kind: u64) -> [u64; 2] {
    let mut block: Block = Array((u128::from(kind) << 64 | u128::from(index)).to_le_bytes());
    cipher.encrypt_block(&mut block);
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| block[at + byte]));
    [word(0) & PRIME, word(8) & PRIME]
}

fn inner(keys: &[[u64; 2]], sums: &[i64]) -> SumDigest {
    let mut total = [0; 2];
    for (keys, sums) in keys.chunks(CHUNK).zip(sums.chunks(CHUNK)) {
        let mut partial = [0_i128; 2];
        for (key, sum) in keys.iter().zip(sums) {
            partial[0] += i128::from(key[0]) * i128::from(*sum);
            partial[1] += i128::from(key[1]) * i128::from(*sum);
        }
        let reduced = partial.map(|partial| partial.rem_euclid(i128::from(PRIME)) as u64);
        total = add(total, reduced);
    }
    total
}

fn multiply(a: u64, b: u64) -> u64 {
    (u128::from(a) * u128::from(b) % u128::from(PRIME)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Identity;
    use crate::noise::{NoiseKey, RunId};

    fn keys(seed: u64) -> DigestKeys {
        DigestKeys::new(&NoiseKey::from_seed(seed).stream(Identity([1; 32]), RunId([2; 16])))
    }

    fn sums(count: usize) -> Vec<i64> {
        let step = |j: usize| (j as i64).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64) >> 10;
        (0..count).map(step).collect()
    }

    #[test]
    fn it_is_the_sum_of_its_definition() {
        let (keys, sums) = (keys(1), sums(40_000));
        let first = 16_300_u64;
        let expected: [u64; 2] = std::array::from_fn(|h| {
            let term = |(j, sum): (u64, &i64)| {
                let key = multiply(keys.block(j / BLOCK as u64)[h], keys.places()[j as usize % BLOCK][h]);
                (i128::from(key) * i128::from(*sum)).rem_euclid(i128::from(PRIME))
            };
            ((first..).zip(&sums).map(term).sum::<i128>() % i128::from(PRIME)) as u64
        });
        assert_eq!(keys.digest(std::iter::once(first..first + 40_000), &sums), expected);
        // The largest sums do not overflow.
        let (most, one) = ([1_i64 << 53; BLOCK], [1_i64; BLOCK]);
        let whole = keys.digest(std::iter::once(0..BLOCK as u64), &most);
        let unit = keys.digest(std::iter::once(0..BLOCK as u64), &one);
        assert_eq!(whole, unit.map(|h| multiply(h, 1 << 53)));
    }

    #[test]
    fn parts_add_up_however_they_are_cut() {
        let (keys, sums) = (keys(1), sums(50_000));
        let whole = keys.digest(std::iter::once(7..50_007), &sums);
        for cut in [1, 9_000, 16_377, 16_378, 49_999] {
            let parts = [(7..7 + cut as u64, &sums[..cut]), (7 + cut as u64..50_007, &sums[cut..])];
            let [a, b] = parts.map(|(range, part)| keys.digest(std::iter::once(range), part));
            assert_eq!(add(a, b), whole, "{cut}");
        }
        let odd = [7..20_000, 20_000..50_007];
        assert_eq!(keys.digest(odd.into_iter(), &sums), whole);
    }

    #[test]
    fn sums_keys_and_places_are_told_apart() {
        let sums = sums(20_000);
        let digest = |keys: &DigestKeys, first: u64, sums: &[i64]| {
            keys.digest(std::iter::once(first..first + sums.len() as u64), sums)
        };
        let whole = digest(&keys(1), 0, &sums);
        assert_ne!(digest(&keys(2), 0, &sums), whole);
        assert_ne!(digest(&keys(1), 1, &sums), whole);
        for (place, by) in [(0, 1), (19_999, 1 << 52), (16_384, -1)] {
            let mut other = sums.clone();
            other[place] ^= by;
            let found = digest(&keys(1), 0, &other);
            assert!(found[0] != whole[0] && found[1] != whole[1], "{place}");
        }
    }
}
