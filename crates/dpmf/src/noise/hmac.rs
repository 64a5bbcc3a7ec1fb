//! HMAC-SHA-256 (RFC 2104), the one pseudorandom function from which every key here is derived.

use sha2::{Digest, Sha256};
use zeroize::{Zeroize, Zeroizing};

const BLOCK: usize = 64;

/// A running HMAC-SHA-256.
pub(crate) struct Hmac {
    inner: Sha256,
    outer_pad: Zeroizing<[u8; BLOCK]>,
}

impl Hmac {
    pub(crate) fn new(key: &[u8; 32]) -> Self {
        let pad = |byte: u8| {
            let mut pad = Zeroizing::new([byte; BLOCK]);
            pad.iter_mut().zip(key).for_each(|(p, k)| *p ^= k);
            pad
        };
        let mut inner = Sha256::new();
        inner.update(pad(0x36).as_slice());
        Self { inner, outer_pad: pad(0x5c) }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.inner.update(bytes);
    }

    pub(crate) fn finish(self) -> [u8; 32] {
        let mut inner: [u8; 32] = self.inner.finalize().into();
        let mut outer = Sha256::new();
        outer.update(self.outer_pad.as_slice());
        outer.update(inner);
        inner.zeroize();
        outer.finalize().into()
    }
}

/// HMAC of a label and parts, each prefixed by its length so that no two inputs collide by concatenation.
pub(crate) fn derive(key: &[u8; 32], label: &str, parts: &[&[u8]]) -> Zeroizing<[u8; 32]> {
    let mut mac = Hmac::new(key);
    for part in std::iter::once(label.as_bytes()).chain(parts.iter().copied()) {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    Zeroizing::new(mac.finish())
}

/// Equality of two tags in time that does not depend on where they differ.
pub(crate) fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && std::hint::black_box(a.iter().zip(b).fold(0, |acc, (x, y)| acc | (x ^ y))) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
    }

    /// RFC 4231, test cases 1 and 3, whose keys (20 bytes) are padded with zeros by definition.
    #[test]
    fn published_vectors() {
        let cases: [(u8, &[u8], &str); 2] = [
            (0x0b, b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
            (0xaa, &[0xdd; 50], "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
        ];
        for (byte, data, expected) in cases {
            let mut key = [0; 32];
            key[..20].fill(byte);
            let mut mac = Hmac::new(&key);
            let (head, tail) = data.split_at(data.len() / 2);
            mac.update(head);
            mac.update(tail);
            assert_eq!(mac.finish().as_slice(), hex(expected));
        }
    }

    #[test]
    fn parts_do_not_run_together() {
        let key = [7; 32];
        assert_ne!(*derive(&key, "a", &[b"bc", b"d"]), *derive(&key, "a", &[b"b", b"cd"]));
        assert_ne!(*derive(&key, "ab", &[b"c"]), *derive(&key, "a", &[b"bc"]));
        assert_ne!(*derive(&key, "a", &[b""]), *derive(&key, "a", &[]));
    }

    #[test]
    fn equality_sees_every_byte() {
        let a = [5_u8; 32];
        assert!(same(&a, &a));
        assert!(!same(&a, &a[..31]));
        for i in 0..32 {
            let mut b = a;
            b[i] ^= 0x80;
            assert!(!same(&a, &b));
        }
    }
}
