//! HMAC-SHA-256 (RFC 2104), the one pseudorandom function from which every key here is derived.

use ctutils::CtEq;
use hmac::{KeyInit, Mac};
use sha2::Sha256;
use zeroize::Zeroizing;

/// A running HMAC-SHA-256; its state is wiped when dropped.
pub(crate) struct Hmac(hmac::Hmac<Sha256>);

impl Hmac {
    pub(crate) fn new(key: &[u8; 32]) -> Self {
        // A whole block, padded with zeros as by definition: a key that cannot be refused.
        let mut block = Zeroizing::new([0; 64]);
        block[..key.len()].copy_from_slice(key);
        Self(KeyInit::new((&*block).into()))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> [u8; 32] {
        self.0.finalize().into_bytes().into()
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
    a.ct_eq(b).to_bool()
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
