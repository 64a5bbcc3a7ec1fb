//! Labelled images in IDX files.

use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use super::part::{Split, digest};
use super::{Meaning, SampleData, Samples};
use crate::{Error, Result};
use dpmf::accounting::PrivacyUnit;

/// Where the files are sought when no directory is given: the cache of `scripts/data/fashion-mnist`, then Debian's package.
pub(super) const PLACES: [&str; 2] = ["data/cache/fashion-mnist", "/usr/share/datasets/fashion-mnist"];
/// Kinds of clothing.
const CLASSES: u16 = 10;
/// One of so many training images is for validation: 5,000 of 60,000.
const VALIDATION: usize = 12;

/// Reads Fashion-MNIST (or MNIST, in the same form) with at most `limit` images of each set.
pub(super) fn fashion_mnist(directory: Option<&Path>, limit: usize) -> Result<SampleData<u16>> {
    let directory = match directory {
        Some(directory) => directory,
        None => PLACES.map(Path::new).into_iter().find(|place| place.is_dir()).ok_or_else(|| Error::Data {
            path: PLACES[0].into(),
            message: format!(
                "neither this directory nor {} exists; download the files with `scripts/data/fashion-mnist`, or pass their directory",
                PLACES[1]
            ),
        })?,
    };
    let (train, shape) = images(directory, "train")?;
    let (test, test_shape) = images(directory, "t10k")?;
    if shape != test_shape {
        return Err(Error::Data {
            path: directory.into(),
            message: format!("training images have {shape:?} rows and columns, test images {test_shape:?}"),
        });
    }
    // Images have no names but their numbers. The order is a hash's, so the first images for validation are a random sample.
    let mut order: Vec<usize> = (0..train.labels.len()).collect();
    order.sort_by_cached_key(|image| digest("fashion-mnist", "order", &image.to_string()));
    let (validation, training) = order.split_at(order.len() / VALIDATION);
    let chosen = |from: &Images, images: &[usize]| {
        let features = shape.0 * shape.1;
        let mut set = Samples::new(features);
        for &image in images.iter().take(limit) {
            set.push(&from.pixels[image * features..][..features], from.labels[image]);
            set.finish_user();
        }
        set
    };
    let tested: Vec<usize> = (0..test.labels.len()).collect();
    let split = Split {
        train: chosen(&train, training),
        validation: chosen(&train, validation),
        test: chosen(&test, &tested),
    };
    for (set, images) in split.parts() {
        if images.is_empty() {
            return Err(Error::Data {
                path: directory.into(),
                message: format!("there are no images for {set}"),
            });
        }
    }
    let (rows, columns) = shape;
    Ok(SampleData {
        name: "fashion-mnist".into(),
        meaning: Meaning::Pixels { rows, columns, classes: CLASSES.into() },
        split,
        unit: PrivacyUnit::Record,
        notes: vec!["Each image counts as one user: the guarantee is for examples. Pixels are divided by 255, which costs no \
            privacy.".into()],
        remarks: Vec::new(),
    })
}

/// The pixels of some images, row by row in \[0, 1\], and their labels.
struct Images {
    pixels: Vec<f32>,
    labels: Vec<u16>,
}

/// The images of one set, and their rows and columns.
fn images(directory: &Path, set: &str) -> Result<(Images, (usize, usize))> {
    let (path, bytes) = read(directory, &format!("{set}-images"), "idx3-ubyte")?;
    let (sizes, pixels) = idx::<3>(&path, &bytes)?;
    let (label_path, label_bytes) = read(directory, &format!("{set}-labels"), "idx1-ubyte")?;
    let ([count], labels) = idx::<1>(&label_path, &label_bytes)?;
    let fault = |path: &Path, message| Err(Error::Data { path: path.into(), message });
    if count != sizes[0] {
        return fault(&label_path, format!("there are {count} labels, but {} images", sizes[0]));
    }
    if sizes.contains(&0) {
        return fault(&path, format!("the sizes {sizes:?} must not be zero"));
    }
    if let Some(image) = labels.iter().position(|&label| u16::from(label) >= CLASSES) {
        return fault(
            &label_path,
            format!("label {} of image {image} is not below {CLASSES}", labels[image]),
        );
    }
    let images = Images {
        pixels: pixels.iter().map(|&pixel| f32::from(pixel) / 255.0).collect(),
        labels: labels.iter().map(|&label| label.into()).collect(),
    };
    Ok((images, (sizes[1], sizes[2])))
}

/// Reads a file that may be compressed and whose name has a hyphen or a full stop before its kind.
fn read(directory: &Path, name: &str, kind: &str) -> Result<(PathBuf, Vec<u8>)> {
    let names = [
        format!("{name}-{kind}"),
        format!("{name}-{kind}.gz"),
        format!("{name}.{kind}"),
        format!("{name}.{kind}.gz"),
    ];
    let path =
        names.iter().map(|name| directory.join(name)).find(|path| path.is_file()).ok_or_else(|| {
            Error::Data {
                path: directory.into(),
                message: format!("there is no file {name}-{kind} or {name}-{kind}.gz"),
            }
        })?;
    let failed = |source| Error::Io { path: path.clone(), source };
    let bytes = std::fs::read(&path).map_err(failed)?;
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok((path, bytes));
    }
    let mut plain = Vec::new();
    match MultiGzDecoder::new(&*bytes).read_to_end(&mut plain) {
        Ok(_) => Ok((path, plain)),
        Err(source) => Err(failed(source)),
    }
}

/// Sizes and bytes of an IDX file of unsigned bytes with `D` dimensions.
fn idx<'a, const D: usize>(path: &Path, bytes: &'a [u8]) -> Result<([usize; D], &'a [u8])> {
    let fault = |message: String| Error::Data { path: path.into(), message };
    let word = |at: usize| -> Option<u32> {
        Some(u32::from_be_bytes(bytes.get(4 * at..4 * at + 4)?.try_into().ok()?))
    };
    let expected = 0x0800 + D as u32;
    match word(0) {
        Some(magic) if magic == expected => (),
        Some(magic) => {
            return Err(fault(format!("it begins with {magic:#010x}, but must with {expected:#010x}")));
        }
        None => return Err(fault(format!("it has {} bytes, too few for a header", bytes.len()))),
    }
    let mut sizes = [0; D];
    for (at, size) in sizes.iter_mut().enumerate() {
        *size = word(at + 1)
            .ok_or_else(|| fault(format!("it has {} bytes, too few for a header", bytes.len())))?
            as usize;
    }
    let body = &bytes[4 + 4 * D..];
    match sizes.iter().try_fold(1_usize, |product, &size| product.checked_mul(size)) {
        Some(length) if length == body.len() => Ok((sizes, body)),
        _ => Err(fault(format!("the header promises {sizes:?} bytes, but {} follow", body.len()))),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;
    use crate::{LabelledExample, Users};

    fn file(sizes: &[u32], body: &[u8]) -> Vec<u8> {
        let mut bytes = (0x0800 + sizes.len() as u32).to_be_bytes().to_vec();
        sizes.iter().for_each(|size| bytes.extend(size.to_be_bytes()));
        bytes.extend_from_slice(body);
        bytes
    }

    /// Images of 2 × 3 pixels that all equal the number of the image; test images count down from 255.
    fn directory(train: u8, test: u8) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| std::fs::write(directory.path().join(name), bytes).unwrap();
        let pixels =
            |numbers: Vec<u8>| numbers.into_iter().flat_map(|number| [number; 6]).collect::<Vec<_>>();
        let labels = |count| (0..count).map(|image| image % 10).collect::<Vec<_>>();
        write("train-images-idx3-ubyte", &file(&[train.into(), 2, 3], &pixels((0..train).collect())));
        write("train-labels.idx1-ubyte", &file(&[train.into()], &labels(train)));
        write(
            "t10k-images-idx3-ubyte",
            &file(&[test.into(), 2, 3], &pixels((0..test).map(|image| 255 - image).collect())),
        );
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(&file(&[test.into()], &labels(test))).unwrap();
        write("t10k-labels-idx1-ubyte.gz", &gzip.finish().unwrap());
        directory
    }

    #[test]
    fn every_image_is_in_one_set_with_its_label() {
        let directory = directory(120, 20);
        let data = fashion_mnist(Some(directory.path()), usize::MAX).unwrap();
        assert_eq!(data.meaning, Meaning::Pixels { rows: 2, columns: 3, classes: 10 });
        let numbers = |images: &Samples<u16>| -> Vec<u8> {
            (0..images.len())
                .map(|image| {
                    let mut examples = Vec::new();
                    images.examples(image, &mut examples);
                    let [LabelledExample { features, label }] = examples[..] else {
                        panic!("one example a user")
                    };
                    let number = (features[0] * 255.0).round() as u8;
                    assert_eq!(features, [f32::from(number) / 255.0; 6]);
                    assert_eq!(label, u16::from(if number > 200 { 255 - number } else { number }) % 10);
                    number
                })
                .collect()
        };
        let Split { train, validation, test } = &data.split;
        let mut known = numbers(validation);
        assert_eq!(known.len(), 10);
        assert!(!known.is_sorted());
        known.extend(numbers(train));
        known.sort_unstable();
        assert_eq!(known, (0..120).collect::<Vec<_>>());
        assert_eq!(numbers(test), (236..=255).rev().collect::<Vec<_>>());

        let few = fashion_mnist(Some(directory.path()), 3).unwrap().split;
        assert_eq!(few.parts().map(|(_, images)| images.users()), [3; 3]);
        assert_eq!(few.train.features(), &train.features()[..18]);
    }

    #[test]
    fn malformed_files_are_refused() {
        let cases: [(&str, Vec<u8>, &str); 9] = [
            ("train-images-idx3-ubyte", vec![], "it has 0 bytes"),
            ("train-images-idx3-ubyte", file(&[120, 2, 3], &[])[..9].to_vec(), "it has 9 bytes"),
            (
                "train-images-idx3-ubyte",
                file(&[120, 6], &[0; 720]),
                "begins with 0x00000802, but must with 0x00000803",
            ),
            (
                "train-images-idx3-ubyte",
                file(&[120, 2, 3], &[0; 719]),
                "promises [120, 2, 3] bytes, but 719 follow",
            ),
            ("train-images-idx3-ubyte", file(&[120, 2, 3], &[0; 721]), "but 721 follow"),
            ("train-images-idx3-ubyte", file(&[u32::MAX, u32::MAX, u32::MAX], &[]), "but 0 follow"),
            ("train-labels.idx1-ubyte", file(&[119], &[0; 119]), "119 labels, but 120 images"),
            ("train-labels.idx1-ubyte", file(&[120], &[10; 120]), "label 10 of image 0 is not below 10"),
            ("t10k-images-idx3-ubyte", file(&[20, 1, 6], &[0; 120]), "training images have (2, 3)"),
        ];
        for (name, bytes, message) in cases {
            let directory = directory(120, 20);
            std::fs::write(directory.path().join(name), bytes).unwrap();
            let error = fashion_mnist(Some(directory.path()), usize::MAX).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        let whole = directory(120, 20);
        let path = whole.path().join("t10k-labels-idx1-ubyte.gz");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 9]).unwrap();
        assert_eq!(fashion_mnist(Some(whole.path()), 9).unwrap_err().kind(), "io");
        std::fs::remove_file(&path).unwrap();
        let error = fashion_mnist(Some(whole.path()), 9).unwrap_err().to_string();
        assert!(error.contains("t10k-labels-idx1-ubyte"), "{error}");
        let few = directory(11, 20);
        let error = fashion_mnist(Some(few.path()), 9).unwrap_err().to_string();
        assert!(error.contains("no images for validation"), "{error}");
    }
}
