//! NumPy's archive of arrays: a zip file, of which exactly one entry, stored or deflated, is read.

use super::{Fault, fault, npy, take};
use faer::Mat;
use flate2::CrcReader;
use flate2::read::DeflateDecoder;
use std::io::{Read, Seek, SeekFrom};

/// Bytes of the record at the end of an archive; a comment of at most 65,535 may follow.
const END: usize = 22;

/// Reads the only array of an archive.
///
/// No more is inflated than the archive states, nor than the array in it needs.
pub(super) fn read(mut file: impl Read + Seek) -> Result<Mat<f64>, Fault> {
    let length = file.seek(SeekFrom::End(0))?;
    let end = end_record(&mut file, length)?;
    let arrays = half(&end, 10);
    if arrays != 1 {
        return Err(fault(format!("it holds {arrays} arrays, but one is needed")));
    }
    let directory = record(&mut file, word(&end, 16).into(), 46, b"PK\x01\x02")?;
    let (flags, method) = (half(&directory, 8), half(&directory, 10));
    let (packed, size) = (word(&directory, 20), word(&directory, 24));
    if flags & 1 != 0 {
        return Err(fault("its array is encrypted"));
    }
    if packed == u32::MAX || size == u32::MAX {
        return Err(fault("its array is larger than 4 GiB: save it as .npy"));
    }
    let local = record(&mut file, word(&directory, 42).into(), 30, b"PK\x03\x04")?;
    file.seek_relative(i64::from(half(&local, 26)) + i64::from(half(&local, 28)))?;
    let packed = file.take(packed.into());
    let mut array = CrcReader::new(match method {
        0 => Box::new(packed) as Box<dyn Read + '_>,
        8 => Box::new(DeflateDecoder::new(packed)),
        _ => {
            return Err(fault(format!(
                "its array is compressed with method {method}, but only deflate is supported"
            )));
        }
    });
    let matrix = npy::read((&mut array).take(size.into()))?;
    if array.crc().sum() != word(&directory, 16) {
        return Err(fault("its array does not match its checksum: it is damaged"));
    }
    Ok(matrix)
}

/// The last record, which says where the directory is.
fn end_record(file: &mut (impl Read + Seek), length: u64) -> Result<Vec<u8>, Fault> {
    let tail = length.min((END + usize::from(u16::MAX)) as u64);
    file.seek(SeekFrom::Start(length - tail))?;
    let bytes = take(file, tail)?;
    let ends_here = |at: &usize| {
        let record = &bytes[*at..];
        record.starts_with(b"PK\x05\x06") && END + usize::from(half(record, 20)) == record.len()
    };
    let at = (0..(bytes.len() + 1).saturating_sub(END)).rev().find(ends_here);
    at.map(|at| bytes[at..].to_vec()).ok_or_else(|| fault("it is not a complete zip archive"))
}

/// A record of fixed size at a place.
fn record(file: &mut (impl Read + Seek), place: u64, size: u64, magic: &[u8]) -> Result<Vec<u8>, Fault> {
    file.seek(SeekFrom::Start(place))?;
    let record = take(file, size)?;
    if record.starts_with(magic) { Ok(record) } else { Err(fault("its directory is damaged")) }
}

fn half(record: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([record[at], record[at + 1]])
}

fn word(record: &[u8], at: usize) -> u32 {
    u32::from(half(record, at)) | u32::from(half(record, at + 2)) << 16
}

#[cfg(test)]
mod tests {
    use super::npy::tests::{file, header};
    use super::*;
    use proptest::prelude::*;
    use std::io::{Cursor, Write};

    fn array() -> Vec<u8> {
        let entries: Vec<u8> = [1.0_f64, 0.5, 0.0, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        file(1, &header("<f8", true, "(2, 2)"), &entries)
    }

    /// An archive of one entry as `numpy.savez` writes it: the local header leaves the sizes to an extra field.
    fn archive(method: u16, content: &[u8], size: u32) -> Vec<u8> {
        let packed = match method {
            8 => {
                let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), Default::default());
                encoder.write_all(content).unwrap();
                encoder.finish().unwrap()
            }
            _ => content.to_vec(),
        };
        let mut crc = flate2::Crc::new();
        crc.update(content);
        let (name, extra) = (b"arr_0.npy", [1, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let halves = |values: &[u16]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let words = |values: &[u32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let local = [
            &b"PK\x03\x04"[..],
            &halves(&[45, 0, method, 0, 0]),
            &words(&[crc.sum(), u32::MAX, u32::MAX]),
            &halves(&[9, 20]),
            name,
            &extra,
            &packed,
        ]
        .concat();
        let directory = [
            &b"PK\x01\x02"[..],
            &halves(&[45, 45, 0, method, 0, 0]),
            &words(&[crc.sum(), packed.len() as u32, size]),
            &halves(&[9, 0, 0, 0, 0, 0, 0, 0, 0]),
            name,
        ]
        .concat();
        let end = [
            &b"PK\x05\x06"[..],
            &halves(&[0, 0, 1, 1]),
            &words(&[directory.len() as u32, local.len() as u32]),
            &halves(&[2]),
            b"hi",
        ]
        .concat();
        [local, directory, end].concat()
    }

    fn refused(bytes: Vec<u8>) -> String {
        match read(Cursor::new(bytes)) {
            Err(Fault::Format(reason)) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn stored_and_deflated_arrays_are_read() {
        for method in [0, 8] {
            let bytes = archive(method, &array(), array().len() as u32);
            let a = read(Cursor::new(bytes)).unwrap();
            assert_eq!([[a[(0, 0)], a[(0, 1)]], [a[(1, 0)], a[(1, 1)]]], [[1.0, 0.0], [0.5, 2.0]]);
        }
    }

    #[test]
    fn what_is_no_archive_of_one_array_is_refused_in_words() {
        let size = array().len() as u32;
        let whole = archive(0, &array(), size);
        let end = whole.len() - END - 2;
        let changed = |at: usize, byte: u8| {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            refused(bytes)
        };
        assert!(refused(Vec::new()).contains("not a complete zip archive"));
        assert!(refused(whole[..whole.len() - 1].to_vec()).contains("not a complete zip archive"));
        assert!(changed(end + 10, 3).contains("holds 3 arrays"));
        assert!(changed(end + 16, 7).contains("directory is damaged"));
        assert!(refused(archive(12, &array(), size)).contains("method 12"));
        assert!(refused(archive(0, &array(), u32::MAX)).contains("larger than 4 GiB"));
        // The last entry, just before the directory.
        let last = end - 55 - 1;
        assert!(changed(last, whole[last] ^ 1).contains("checksum"));
        // More comes out than the archive states: nothing past that is inflated.
        let bomb = archive(8, &[array(), vec![0; 1 << 22]].concat(), size);
        assert!(refused(bomb).contains("checksum"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_matrix_or_an_error(at in 0_usize..400, byte: u8, cut in 0_usize..400) {
            for method in [0, 8] {
                let mut bytes = archive(method, &array(), array().len() as u32);
                let length = bytes.len();
                bytes[at % length] = byte;
                let _ = read(Cursor::new(bytes.clone()));
                bytes.truncate(cut % length);
                let _ = read(Cursor::new(bytes));
            }
        }
    }
}
