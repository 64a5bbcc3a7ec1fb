//! Keys, noise files and the bench, as a user runs them.
#![cfg(unix)] // where files can be owner-only
#![allow(clippy::unwrap_used, reason = "a failed test should panic")]

mod common;

use common::{failure, float, json};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tempfile::TempDir;

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// A new key, a mechanism for 16 steps, and the same calibrated.
    fn with_mechanisms() -> (Self, String, String, String) {
        let folder = Self::new();
        let (key, plain) = (folder.path("run.key"), folder.path("m.safetensors"));
        let calibrated = folder.path("m4.safetensors");
        json(&["key", "new", &key]);
        json(&["factorize", "--steps", "16", "--streaming", "--buffers", "2", "--out", &plain]);
        json(&[
            "calibrate",
            &plain,
            "--epsilon",
            "4",
            "--delta",
            "1e-6",
            "--clip",
            "0.5",
            "--out",
            &calibrated,
        ]);
        (folder, key, plain, calibrated)
    }
}

/// Shape and numbers of a file, whose header must be what `numpy.save` writes, to the byte.
fn read(path: &str) -> ([usize; 2], Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let (header, body) = bytes[10..].split_at(usize::from(u16::from_le_bytes([bytes[8], bytes[9]])));
    assert_eq!((10 + header.len()) % 64, 0, "entries are aligned");
    let header = std::str::from_utf8(header).unwrap().strip_suffix('\n').unwrap().trim_end_matches(' ');
    let start = "{'descr': '<f4', 'fortran_order': False, 'shape': (";
    let shape = header.strip_prefix(start).unwrap().strip_suffix("), }").unwrap();
    let (rows, columns) = shape.split_once(", ").unwrap();
    let shape = [rows.parse().unwrap(), columns.parse().unwrap()];
    let (values, rest) = body.as_chunks();
    assert_eq!((values.len(), rest.len()), (shape[0] * shape[1], 0));
    (shape, values.iter().map(|value| f32::from_le_bytes(*value)).collect())
}

fn mode(path: &str) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn a_key_is_its_owners_alone_and_never_overwritten() {
    let (folder, key, mechanism, _) = Folder::with_mechanisms();
    assert_eq!(mode(&key), 0o600);
    let text = std::fs::read_to_string(&key).unwrap();
    let (kind, message) = failure(&["key", "new", &key]);
    assert_eq!(kind, "key");
    assert!(message.contains("run.key") && message.contains("exist"), "{message}");
    assert_eq!(std::fs::read_to_string(&key).unwrap(), text);

    let another = json(&["key", "new", &folder.path("other.key")]);
    assert!(!text.contains(another["fingerprint"].as_str().unwrap()));

    let noise = || failure(&["noise", &mechanism, "--dimension", "8", "--key-file", &key, "-o", "z.npy"]);
    for loose in [0o640, 0o604, 0o620] {
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(loose)).unwrap();
        let (kind, message) = noise();
        assert_eq!(kind, "key", "{loose:o}");
        assert!(message.contains("run.key") && message.contains("owner"), "{message}");
    }
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::write(&key, text.replace("check ", "check 0")).unwrap();
    assert!(noise().1.contains("damaged"));
    assert!(!Path::new("z.npy").exists(), "a refused key must not leave a file");
}

#[test]
fn numpy_files_hold_the_rows_whatever_the_range() {
    let (folder, key, mechanism, _) = Folder::with_mechanisms();
    let noise = |name: &str, more: &[&str]| {
        let out = folder.path(name);
        let arguments = ["noise", &mechanism, "--dimension", "200", "--key-file", &key, "-o", &out];
        let report = json(&[&arguments, more].concat());
        (report, read(&out))
    };
    let (report, (shape, whole)) = noise("whole.npy", &[]);
    assert_eq!(shape, [16, 200]);
    assert_eq!((float(&report["noise_std"]), &report["calibrated"]), (1.0, &false.into()));
    // A new key each time: so far out that chance does not get there, with rows of standard deviation below 1.5.
    assert!(whole.iter().all(|z| z.is_finite() && z.abs() < 13.0));
    assert_eq!(mode(&folder.path("whole.npy")), 0o600, "noise is as secret as its key");

    let run = report["run"].as_str().unwrap();
    let (_, (shape, part)) = noise("part.npy", &["--run", run, "--rows", "3..7", "--coordinates", "70..131"]);
    assert_eq!(shape, [4, 61]);
    for (i, row) in part.chunks_exact(61).enumerate() {
        assert_eq!(row, &whole[(3 + i) * 200 + 70..][..61], "row {i}");
    }
    let (_, (_, again)) = noise("again.npy", &["--run", run]);
    assert_eq!(again, whole);
    let (_, (_, second)) = noise("second.npy", &[]);
    // On a grid of some hundredths, one number in a hundred or so is the same by chance.
    let same = second.iter().zip(&whole).filter(|(a, b)| a == b).count();
    assert!(same < whole.len() / 20, "a second call must have other noise");
    let arguments =
        ["noise", &mechanism, "--dimension", "8", "--key-file", &key, "-o", "z.npy", "--run", "words"];
    let (_, message) = failure(&arguments);
    assert!(message.contains("run id is words"), "{message}");

    // Prefix sum: the iterate's noise is the sum of the gradient's.
    let (_, (_, iterate)) = noise("iterate.npy", &["--run", run, "--output", "iterate"]);
    let (report, (_, float)) = noise("float.npy", &["--run", run, "--arithmetic", "float"]);
    assert_eq!((&report["arithmetic"], &report["grid"]), (&"float".into(), &serde_json::Value::Null));
    assert!(float.iter().zip(&whole).all(|(a, b)| a != b), "the two arithmetics have noise of their own");
    let mut sum = vec![0.0_f64; 200];
    for (i, (gradient, iterate)) in float.chunks_exact(200).zip(iterate.chunks_exact(200)).enumerate() {
        for ((sum, z), total) in sum.iter_mut().zip(gradient).zip(iterate) {
            *sum += f64::from(*z);
            assert!((*sum - f64::from(*total)).abs() < 1e-5, "row {i}: {sum} {total}");
        }
    }
}

/// The last iterate of a calibrated mechanism has standard deviation σζ times `final_sqrt_loss`. The variance of
/// 2¹⁶ numbers is known to 0.55 %; five of that is the margin, and a scale of 1.05 would miss it by far.
#[test]
fn calibrated_noise_has_the_promised_scale() {
    let (folder, key, _, mechanism) = Folder::with_mechanisms();
    let statement = json(&["inspect", &mechanism]);
    let out = folder.path("z.npy");
    let arguments = ["noise", &mechanism, "--dimension", "65536", "--key-file", &key, "-o", &out];
    let report = json(&[&arguments[..], &["--rows", "15..16", "--output", "iterate"]].concat());
    assert_eq!(report["calibrated"], true);
    let (_, row) = read(&out);
    let variance = row.iter().map(|z| f64::from(*z).powi(2)).sum::<f64>() / row.len() as f64;
    let unit = float(&statement["final_sqrt_loss"]) / float(&statement["sensitivity"]);
    let ratio = variance / (float(&report["noise_std"]) * unit).powi(2);
    assert!((ratio - 1.0).abs() < 0.028, "{ratio}");
}

#[test]
fn what_cannot_be_drawn_is_refused_in_words() {
    let (folder, key, mechanism, _) = Folder::with_mechanisms();
    let out = folder.path("z.npy");
    let cases: &[(&[&str], &str)] = &[
        (&["--dimension", "0"], "coordinates is 0..0"),
        (&["--dimension", "8", "--rows", "3..3"], "rows is 3..3"),
        (&["--dimension", "8", "--rows", "9..3"], "rows is 9..3"),
        (&["--dimension", "8", "--rows", "0..17"], "rows is 0..17"),
        (&["--dimension", "8", "--rows", "0-17"], "not a range"),
        (&["--dimension", "8", "--coordinates", "4..9"], "coordinates is 4..9"),
        (&["--dimension", "-8"], "-8"),
        (&["--dimension", "8", "--output", "loss"], "loss"),
    ];
    for (more, expected) in cases {
        let (_, message) =
            failure(&[&["noise", &mechanism, "--key-file", &key, "-o", &out][..], more].concat());
        assert!(message.contains(expected), "{more:?}: {message}");
        assert!(!Path::new(&out).exists(), "{more:?}");
    }
    let (_, message) =
        failure(&["noise", &mechanism, "--dimension", "8", "--key-file", "no.key", "-o", &out]);
    assert!(message.contains("no.key"), "{message}");
}

#[test]
fn the_bench_times_engines_and_files() {
    let found =
        json(&["bench", "noise", "--dimension", "1e4", "--steps", "16", "--rounds", "2", "--threads", "1"]);
    assert_eq!((&found["threads"], &found["dimension"]), (&1.into(), &10_000.into()));
    let names: Vec<_> =
        found["rows"].as_array().unwrap().iter().map(|row| row["mechanism"].as_str()).collect();
    assert_eq!(names[..3], [Some("independent"), Some("honaker-online"), Some("structured")]);
    for row in found["rows"].as_array().unwrap() {
        assert!(float(&row["ratio_to_bound"]) >= 1.0 && float(&row["seconds"]) > 0.0, "{row}");
        // Seven standard deviations of the mean of 10⁴ squares.
        assert!((float(&row["variance_ratio"]) - 1.0).abs() < 0.1, "{row}");
    }
    let (_folder, _, mechanism, _) = Folder::with_mechanisms();
    let found = json(&["bench", "noise", &mechanism, "--dimension", "1e4", "--rounds", "2"]);
    let row = &found["rows"][0];
    assert_eq!(
        (row["mechanism"].as_str(), &row["buffers"], &row["steps"]),
        (Some("m"), &2.into(), &16.into())
    );

    for (arguments, expected) in [
        (["--threads", "0"], "threads is 0"),
        (["--rounds", "0"], "rounds is 0"),
        (["--dimension", "0"], "dimension is 0"),
        (["--mechanism", "magic"], "mechanism \"magic\" does not exist"),
    ] {
        let (_, message) = failure(&[&["bench", "noise"][..], &arguments].concat());
        assert!(message.contains(expected), "{arguments:?}: {message}");
    }
}
