//! Secrets: the key of a run, and the stream key bound to one run of one mechanism.

use super::hmac::{derive, same};
use crate::accounting::KeyOrigin;
use crate::disk::{Access, DiskPath};
use crate::engine::exact::field::{EXACT_FIELD_FORMAT, ExactField};
use crate::engine::field::{FIELD_FORMAT, Field, RowKeys};
use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::participation::Sampling;
use std::fmt;
use std::io::{ErrorKind, Read};
use std::str::FromStr;
use zeroize::{Zeroize, Zeroizing};

/// The secret from which all noise of a run is derived.
///
/// Whoever holds it can subtract the noise: it cannot be copied, printed or serialised, is wiped when
/// dropped, and lives on disk only in a file that its owner alone may read.
///
/// ```compile_fail
/// fn copy(key: &dpmf::noise::NoiseKey) -> dpmf::noise::NoiseKey { key.clone() }
/// ```
/// ```compile_fail
/// fn show(key: &dpmf::noise::NoiseKey) -> String { format!("{key:?}") }
/// ```
pub struct NoiseKey {
    secret: Zeroizing<[u8; 32]>,
    origin: KeyOrigin,
}

const KEY_FILE_HEADER: &str = "dpmf noise key 1";
const KEY_FILE_LIMIT: u64 = 1024;

impl NoiseKey {
    /// A new key from the operating system.
    ///
    /// Errors: [`Error::Randomness`] when the system has none to give.
    pub fn generate() -> Result<Self> {
        let mut secret = Zeroizing::new([0; 32]);
        random_bytes(&mut *secret)?;
        Ok(Self { secret, origin: KeyOrigin::System })
    }

    /// A key derived from a number, for experiments that must be repeatable.
    ///
    /// Guarantee: none against anyone who can guess `seed`; the key is marked [`KeyOrigin::Seeded`].
    pub fn from_seed(seed: u64) -> Self {
        let secret = derive(&[0; 32], "dpmf 1 seeded key", &[&seed.to_le_bytes()]);
        Self { secret, origin: KeyOrigin::Seeded }
    }

    /// Where the key came from.
    pub fn origin(&self) -> KeyOrigin {
        self.origin
    }

    /// A name for the key that is safe to publish: it tells keys apart and reveals nothing else.
    ///
    /// A seeded key is as guessable from its fingerprint as its seed is.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&derive(&self.secret, "dpmf 1 key fingerprint", &[]))
    }

    /// A mark that identifies some bytes, and that only the key can compute.
    ///
    /// Guarantee: to everybody else it is a random number, independent of all other uses of the key, as long as the bytes are as
    /// unknown as the key or the key is as unknown as it should be.
    pub fn mark(&self, purpose: &str, parts: &[&[u8]]) -> [u8; 32] {
        let secret = derive(&self.secret, "dpmf 1 mark", &[purpose.as_bytes()]);
        *derive(&secret, purpose, parts)
    }

    /// The key of one run of one mechanism.
    ///
    /// Guarantee: streams of two different `(key, mechanism, run)` triples are computationally independent,
    /// so one key used in two runs never yields the same noise for different data.
    pub(crate) fn stream(&self, mechanism: Identity, run: RunId) -> StreamKey {
        let secret = derive(&self.secret, "dpmf 1 stream", &[&mechanism.0, &run.0]);
        StreamKey { secret, origin: self.origin, fingerprint: self.fingerprint(), mechanism, run }
    }

    /// The secret of one purpose of a run's sampler.
    ///
    /// Guarantee: computationally independent of every stream of noise under the same key and run, and of samplers of
    /// other runs or other sampling.
    pub(crate) fn sampling(&self, sampling: Sampling, run: RunId, purpose: &str) -> Zeroizing<[u8; 32]> {
        let (kind, count, rate) = sampling.code();
        let parts =
            [&run.0[..], &[kind], &(count as u64).to_le_bytes(), &rate.to_le_bytes(), purpose.as_bytes()];
        derive(&self.secret, "dpmf 1 sampling", &parts)
    }

    /// Writes the key to a new file that only its owner may read or write, and syncs it to disk.
    ///
    /// Errors: [`Error::Key`] when the file exists; [`Error::Io`]; [`Error::Unsupported`] where the system
    /// has no owner-only files.
    pub fn create_file(&self, place: impl Into<DiskPath>) -> Result<()> {
        let check = self.fingerprint().to_string();
        let mut secret = hex(&*self.secret);
        let text = Zeroizing::new(format!(
            "{KEY_FILE_HEADER}\norigin {}\nsecret {secret}\ncheck {check}\n",
            self.origin.name()
        ));
        secret.zeroize();
        write_owner_only(&place.into(), text.as_bytes())
    }

    /// Reads a key written by [`NoiseKey::create_file`].
    ///
    /// Errors: [`Error::Key`] when anyone but the owner may read or write the file, or when it is not a whole
    /// key file; [`Error::Io`]; [`Error::Unsupported`] where the system has no owner-only files.
    pub fn read_file(place: impl Into<DiskPath>) -> Result<Self> {
        let place = place.into();
        let text = read_owner_only(&place, KEY_FILE_LIMIT)?;
        let bad = |reason: &str| Error::Key { path: place.path().into(), reason: reason.into() };
        let mut lines = text.lines();
        if lines.next() != Some(KEY_FILE_HEADER) {
            return Err(bad("it is not a dpmf noise key of version 1"));
        }
        let mut field = |name: &str| {
            let value = lines.next().and_then(|line| line.strip_prefix(name)?.strip_prefix(' '));
            value.ok_or_else(|| bad("it is truncated or edited"))
        };
        let origin = match field("origin")? {
            "system" => KeyOrigin::System,
            "seeded" => KeyOrigin::Seeded,
            _ => return Err(bad("its origin is neither system nor seeded")),
        };
        let secret = unhex(field("secret")?).ok_or_else(|| bad("its secret is not 64 hexadecimal digits"))?;
        let key = Self { secret, origin };
        if !same(field("check")?.as_bytes(), key.fingerprint().to_string().as_bytes()) {
            return Err(bad("its secret and its check disagree: it is damaged"));
        }
        Ok(key)
    }
}

/// The secret of one run of one mechanism, and the public names of what it is bound to.
pub struct StreamKey {
    secret: Zeroizing<[u8; 32]>,
    origin: KeyOrigin,
    fingerprint: Fingerprint,
    mechanism: Identity,
    run: RunId,
}

impl StreamKey {
    /// Where the key of the run came from.
    pub fn origin(&self) -> KeyOrigin {
        self.origin
    }

    /// Fingerprint of the key of the run.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// The mechanism the stream belongs to.
    pub fn mechanism(&self) -> Identity {
        self.mechanism
    }

    /// The run the stream belongs to.
    pub fn run(&self) -> RunId {
        self.run
    }

    /// The keys of the rows of its field, in the given format.
    fn rows(&self, format: u32) -> RowKeys {
        RowKeys::of(&self.purpose("dpmf 1 field", &[&format.to_le_bytes()]))
    }

    /// An independent key for one purpose.
    pub(crate) fn purpose(&self, label: &str, parts: &[&[u8]]) -> Zeroizing<[u8; 32]> {
        derive(&self.secret, label, parts)
    }
}

impl Field {
    /// The field of a stream.
    pub fn new(key: &StreamKey) -> Self {
        Self::under(key.rows(FIELD_FORMAT))
    }
}

impl ExactField {
    /// The field of a stream.
    pub fn new(key: &StreamKey) -> Self {
        Self::under(key.rows(EXACT_FIELD_FORMAT))
    }
}

/// Public name of a key: 128 bits of a keyed hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 16]);

impl Fingerprint {
    fn of(digest: &[u8; 32]) -> Self {
        let mut name = [0; 16];
        name.copy_from_slice(&digest[..16]);
        Self(name)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

/// Public name of a run; no two runs under one key may share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RunId(pub [u8; 16]);

impl RunId {
    /// A new name from the operating system.
    ///
    /// Errors: [`Error::Randomness`].
    pub fn generate() -> Result<Self> {
        let mut id = [0; 16];
        random_bytes(&mut id)?;
        Ok(Self(id))
    }

    /// A name derived from words, for experiments that must be repeatable.
    pub fn from_label(label: &str) -> Self {
        Self(Fingerprint::of(&derive(&[0; 32], "dpmf 1 run label", &[label.as_bytes()])).0)
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl FromStr for RunId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let id =
            unhex(text).ok_or_else(|| Error::argument("run id", text, "it must be 32 hexadecimal digits"))?;
        Ok(Self(*id))
    }
}

fn random_bytes(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|cause| Error::Randomness { reason: cause.to_string() })
}

fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or('?');
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

fn unhex<const N: usize>(text: &str) -> Option<Zeroizing<[u8; N]>> {
    let text = text.as_bytes();
    let nibble = |digit: u8| Some(char::from(digit).to_digit(16)? as u8);
    let mut bytes = Zeroizing::new([0; N]);
    if text.len() != 2 * N {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
    }
    Some(bytes)
}

const NO_KEY_FILES: &str = "this system has no files that only their owner can read; keep the key in memory for the length of the run";

fn no_key_files(place: &DiskPath) -> Error {
    Error::Unsupported { what: place.path().display().to_string(), hint: NO_KEY_FILES }
}

/// Not by [`DiskPath::replace`], which would let two processes each believe that theirs is the key at this place. A crash
/// may leave a part of it, which is no key.
fn write_owner_only(place: &DiskPath, bytes: &[u8]) -> Result<()> {
    let mut file = place.create_new(Access::Owner).map_err(|error| match error {
        Error::Io { path, source } if source.kind() == ErrorKind::AlreadyExists => {
            Error::Key { path, reason: "it already exists, and a key is never overwritten".into() }
        }
        other => other,
    })?;
    let written = match file.metadata() {
        Ok(metadata) if metadata.mode.is_none() => Err(no_key_files(place)),
        metadata => metadata.and_then(|_| file.append(bytes)).and_then(|()| file.sync()),
    };
    if written.is_err() {
        // The error that counts is the first one.
        let _ = place.remove();
    }
    written?;
    place.sync_entry()
}

fn read_owner_only(place: &DiskPath, limit: u64) -> Result<Zeroizing<String>> {
    let bad = |reason: String| Error::Key { path: place.path().into(), reason };
    let file = place.open()?;
    // Asked of the open file, not of the path: nobody can exchange one for the other in between.
    let metadata = file.metadata()?;
    if !metadata.regular {
        return Err(bad("it is not a regular file".into()));
    }
    let mode = metadata.mode.ok_or_else(|| no_key_files(place))?;
    if mode & 0o077 != 0 {
        return Err(bad(format!(
            "its permissions are {mode:04o}, but only its owner may have access to a key. Run chmod 600 if you are sure that nobody \
             has read it; otherwise treat it as disclosed"
        )));
    }
    let mut text = Zeroizing::new(String::with_capacity(limit as usize + 1));
    file.take(limit + 1).read_to_string(&mut text).map_err(|cause| match cause.kind() {
        ErrorKind::InvalidData => bad("it is not text".into()),
        _ => Error::Io { path: place.path().into(), source: cause },
    })?;
    if text.len() as u64 > limit {
        return Err(bad("it is too long for a key".into()));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream_secret(key: &NoiseKey, mechanism: u8, run: &str) -> Vec<u8> {
        key.stream(Identity([mechanism; 32]), RunId::from_label(run)).purpose("test", &[]).to_vec()
    }

    #[test]
    fn generated_keys_and_runs_differ() {
        let (a, b) = (NoiseKey::generate().unwrap(), NoiseKey::generate().unwrap());
        assert_ne!(a.fingerprint(), b.fingerprint());
        assert_eq!(a.origin(), KeyOrigin::System);
        assert_ne!(RunId::generate().unwrap(), RunId::generate().unwrap());
    }

    #[test]
    fn a_stream_is_bound_to_key_mechanism_and_run() {
        let key = NoiseKey::from_seed(1);
        let base = stream_secret(&key, 0, "a");
        assert_eq!(base, stream_secret(&NoiseKey::from_seed(1), 0, "a"));
        assert_ne!(base, stream_secret(&NoiseKey::from_seed(2), 0, "a"));
        assert_ne!(base, stream_secret(&key, 1, "a"));
        assert_ne!(base, stream_secret(&key, 0, "b"));
    }

    #[test]
    fn sampling_is_bound_to_key_run_and_kind_and_is_no_stream() {
        let secret = |seed, sampling: &str, run: &str, purpose| {
            let key = NoiseKey::from_seed(seed);
            key.sampling(sampling.parse().unwrap(), RunId::from_label(run), purpose).to_vec()
        };
        let all = [
            secret(1, "cyclic-poisson:2:0.5", "a", "parts"),
            secret(2, "cyclic-poisson:2:0.5", "a", "parts"),
            secret(1, "cyclic-poisson:3:0.5", "a", "parts"),
            secret(1, "cyclic-poisson:2:0.25", "a", "parts"),
            secret(1, "balls-in-bins:2", "a", "parts"),
            secret(1, "cyclic-poisson:2:0.5", "b", "parts"),
            secret(1, "cyclic-poisson:2:0.5", "a", "coins"),
            stream_secret(&NoiseKey::from_seed(1), 0, "a"),
        ];
        for (i, secret) in all.iter().enumerate() {
            assert!(!all[..i].contains(secret), "{i}");
        }
    }

    #[test]
    fn purposes_and_their_parts_give_different_keys() {
        let stream = NoiseKey::from_seed(1).stream(Identity([0; 32]), RunId([0; 16]));
        assert_ne!(*stream.purpose("a", &[]), *stream.purpose("b", &[]));
        assert_ne!(*stream.purpose("a", &[b"x"]), *stream.purpose("a", &[b"y"]));
    }

    #[test]
    fn run_ids_print_and_parse() {
        let run = RunId::from_label("first");
        assert_eq!(run.to_string().parse::<RunId>().unwrap(), run);
        assert_eq!(run.to_string().len(), 32);
        for bad in ["", "zz", "00112233445566778899aabbccddeef", "0011223344556677889900112233445g"] {
            assert!(matches!(bad.parse::<RunId>(), Err(Error::InvalidArgument { .. })));
        }
    }

    #[cfg(unix)]
    mod files {
        use super::*;
        use std::fs;
        use std::os::unix::fs::PermissionsExt;

        fn reason(result: Result<NoiseKey>) -> String {
            match result {
                Err(Error::Key { reason, .. }) => reason,
                Err(other) => panic!("{other}"),
                Ok(_) => panic!("the key was accepted"),
            }
        }

        #[test]
        fn a_file_round_trip_keeps_the_key_and_its_origin() {
            let folder = tempfile::tempdir().unwrap();
            for (name, key) in [("a", NoiseKey::generate().unwrap()), ("b", NoiseKey::from_seed(9))] {
                let path = folder.path().join(name);
                key.create_file(&path).unwrap();
                assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
                let read = NoiseKey::read_file(&path).unwrap();
                assert_eq!((read.fingerprint(), read.origin()), (key.fingerprint(), key.origin()));
                assert_eq!(stream_secret(&read, 3, "run"), stream_secret(&key, 3, "run"));
            }
        }

        #[test]
        fn an_existing_file_is_never_overwritten() {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("key");
            NoiseKey::from_seed(1).create_file(&path).unwrap();
            let before = fs::read(&path).unwrap();
            assert!(matches!(NoiseKey::from_seed(2).create_file(&path), Err(Error::Key { .. })));
            assert_eq!(fs::read(&path).unwrap(), before);
        }

        #[test]
        fn looser_permissions_are_refused() {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("key");
            NoiseKey::from_seed(1).create_file(&path).unwrap();
            for mode in [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o660, 0o666] {
                fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
                assert!(reason(NoiseKey::read_file(&path)).contains("owner"), "{mode:o}");
            }
            fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
            assert!(NoiseKey::read_file(&path).is_ok());
            assert!(matches!(NoiseKey::read_file(folder.path().join("none")), Err(Error::Io { .. })));
            assert!(reason(NoiseKey::read_file(folder.path())).contains("regular"));
        }

        #[test]
        fn every_damaged_byte_and_every_cut_is_noticed() {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("key");
            NoiseKey::from_seed(1).create_file(&path).unwrap();
            let whole = fs::read(&path).unwrap();
            let accepted = |bytes: &[u8]| {
                fs::write(&path, bytes).unwrap();
                NoiseKey::read_file(&path).is_ok_and(|key| key.origin() == KeyOrigin::Seeded)
            };
            assert!(accepted(&whole));
            for i in 0..whole.len() - 1 {
                let mut damaged = whole.clone();
                damaged[i] ^= 1;
                assert!(!accepted(&damaged), "byte {i}");
                assert!(!accepted(&whole[..i]), "cut at {i}");
            }
            assert!(!accepted(&[b'a'; 4096]));
        }
    }
}
