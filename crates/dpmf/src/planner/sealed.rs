//! Numbers that took long to prove, kept on disk under a seal.
//!
//! A cache folder is no place for proofs that anybody may write: a noise multiplier that is too small would pass for a guarantee.
//! So a number counts only with a seal, a keyed hash (HMAC-SHA-256) of the number and of the complete statement that it belongs
//! to: the mechanism with all its coefficients, the sampling, ε, δ, the conditions and the version. The key comes from the
//! operating system and lies in the folder in a file that its owner alone may read. What has no seal, or a wrong one, is proved
//! anew.

use super::Request;
use crate::mechanism::Mechanism;
use crate::noise::NoiseKey;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Raised whenever a proof, a bound or an estimate would come out differently.
const EDITION: u32 = 1;

/// The file of the key.
const KEY: &str = "seal.key";

const PURPOSE: &str = "number of a plan";

/// A hash of all that a number depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Claim([u8; 32]);

impl Claim {
    /// `what` about some parts, each hashed after its length.
    pub fn new(what: &str, parts: &[&[u8]]) -> Self {
        let mut hash = Sha256::new();
        let edition = EDITION.to_le_bytes();
        let head = [env!("CARGO_PKG_VERSION").as_bytes(), &edition, what.as_bytes()];
        for part in head.iter().chain(parts) {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hash.finalize().into())
    }

    /// The noise multiplier of a mechanism for the budget of a request.
    pub fn noise(what: &str, mechanism: &Mechanism, request: &Request) -> Self {
        let conditions = format!("{:?}", request.conditions);
        let numbers = [mechanism.sensitivity(), request.epsilon, request.delta].map(f64::to_le_bytes);
        let sampling = mechanism.sampling().to_string();
        let parts = [&mechanism.identity().0[..], sampling.as_bytes(), conditions.as_bytes()];
        Self::new(what, &[&parts[..], &numbers.each_ref().map(|x| &x[..])].concat())
    }

    fn file(&self) -> String {
        let hex: String = self.0.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        format!("{hex}.sealed")
    }
}

/// Numbers in memory and, where a folder with a key is there, on disk.
#[derive(Default)]
pub(super) struct Sealed {
    numbers: HashMap<Claim, f64>,
    folder: Option<PathBuf>,
    /// The key, once it was looked for; nothing where there is no trustworthy one.
    key: Option<Option<NoiseKey>>,
}

impl Sealed {
    pub fn in_folder(folder: PathBuf) -> Self {
        Self { folder: Some(folder), ..Self::default() }
    }

    /// A number that was kept, if its seal is whole.
    pub fn get(&mut self, claim: Claim) -> Option<f64> {
        if let Some(number) = self.numbers.get(&claim) {
            return Some(*number);
        }
        let bytes = std::fs::read(self.folder.as_ref()?.join(claim.file())).ok()?;
        let (number, seal) = bytes.split_first_chunk::<8>()?;
        if seal.is_empty() || seal != self.seal(claim, number)? {
            return None;
        }
        let number = f64::from_le_bytes(*number);
        self.numbers.insert(claim, number);
        Some(number)
    }

    /// Keeps a number; what cannot be written is done without.
    pub fn put(&mut self, claim: Claim, number: f64) {
        self.numbers.insert(claim, number);
        let bytes = number.to_le_bytes();
        let (Some(seal), Some(folder)) = (self.seal(claim, &bytes), &self.folder) else { return };
        write(folder, &claim.file(), &[&bytes[..], &seal].concat());
    }

    fn seal(&mut self, claim: Claim, number: &[u8; 8]) -> Option<[u8; 32]> {
        let folder = self.folder.as_ref()?;
        let key = self.key.get_or_insert_with(|| key_in(folder));
        Some(key.as_ref()?.mark(PURPOSE, &[&claim.0, number]))
    }
}

/// Writes the file under another name first, so that no reader sees half of it.
pub(super) fn write(folder: &Path, name: &str, bytes: &[u8]) {
    let draft = folder.join(format!("{name}.{}", std::process::id()));
    let written = made(folder)
        .and_then(|()| std::fs::write(&draft, bytes))
        .and_then(|()| std::fs::rename(&draft, folder.join(name)));
    if written.is_err() {
        let _ = std::fs::remove_file(draft);
    }
}

/// The folder, which only its owner may enter where it is new.
fn made(folder: &Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// The key of a folder, made where there is none. Nothing where others may write there, or could have put it there.
fn key_in(folder: &Path) -> Option<NoiseKey> {
    made(folder).ok()?;
    let path = folder.join(KEY);
    if !path.exists() {
        // Of two that make one at the same time, the second takes that of the first.
        let _ = NoiseKey::generate().ok()?.create_file(path.as_path());
    }
    owned(folder, &path).then(|| NoiseKey::read_file(path.as_path()).ok())?
}

#[cfg(unix)]
fn owned(folder: &Path, key: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let [Ok(folder), Ok(key)] = [folder, key].map(std::fs::symlink_metadata) else { return false };
    folder.mode() & 0o022 == 0 && folder.is_dir() && key.is_file() && key.uid() == folder.uid()
}

#[cfg(not(unix))]
fn owned(_: &Path, _: &Path) -> bool {
    false
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_number_counts_only_with_its_seal() {
        let folder = tempfile::tempdir().unwrap();
        let plans = folder.path().join("plans");
        let open = || Sealed::in_folder(plans.clone());
        let [claim, other] = [b"a", b"b"].map(|part| Claim::new("test", &[part]));
        assert_eq!(open().get(claim), None);
        open().put(claim, 2.5);
        assert_eq!((open().get(claim), open().get(other)), (Some(2.5), None));
        // A number of another statement, even with its own seal.
        std::fs::copy(plans.join(claim.file()), plans.join(other.file())).unwrap();
        assert_eq!(open().get(other), None);
        // A bit of the number, a bit of the seal, a part, nothing.
        let whole = std::fs::read(plans.join(claim.file())).unwrap();
        for damage in [0, 7, 8, 39] {
            let mut bytes = whole.clone();
            bytes[damage] ^= 1;
            std::fs::write(plans.join(claim.file()), bytes).unwrap();
            assert_eq!(open().get(claim), None, "{damage}");
        }
        for length in [0, 7, 8, 39] {
            std::fs::write(plans.join(claim.file()), &whole[..length]).unwrap();
            assert_eq!(open().get(claim), None, "{length}");
        }
        std::fs::write(plans.join(claim.file()), &whole).unwrap();
        assert_eq!(open().get(claim), Some(2.5));
    }

    #[test]
    fn a_key_that_others_may_have_made_or_read_seals_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (plans, claim) = (folder.path().join("plans"), Claim::new("test", &[]));
        let open = || Sealed::in_folder(plans.clone());
        open().put(claim, 1.0);
        let mode = |path: &Path, mode: u32| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        assert_eq!(plans.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let key = plans.join(KEY);
        assert_eq!(key.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        mode(&key, 0o644);
        assert_eq!(open().get(claim), None);
        mode(&key, 0o600);
        assert_eq!(open().get(claim), Some(1.0));
        mode(&plans, 0o777);
        assert_eq!(open().get(claim), None);
        mode(&plans, 0o700);
        // Another key, and a damaged one.
        std::fs::remove_file(&key).unwrap();
        assert_eq!(open().get(claim), None);
        std::fs::write(&key, b"no key").unwrap();
        assert_eq!(open().get(claim), None);
    }
}
