//! NumPy's format of one array, versions 1 to 3.
//!
//! Magic, version, length of the header, the header as a Python dictionary, the entries.

use super::{Fault, MOST_ENTRIES, fault, take};
use faer::Mat;
use std::io::Read;

const MAGIC: &[u8] = b"\x93NUMPY";

/// Longest header: NumPy itself reads no more than 10,000 characters unasked.
const LONGEST_HEADER: u64 = 1 << 16;

/// Reads a matrix of `f8`, `f4` or `i8`, in either byte order, by rows or by columns.
pub(super) fn read(mut reader: impl Read) -> Result<Mat<f64>, Fault> {
    let start = take(&mut reader, 8)?;
    if !start.starts_with(MAGIC) {
        return Err(fault("it is not a NumPy array file"));
    }
    let width = match start[6] {
        1 => 2,
        2 | 3 => 4,
        version => {
            return Err(fault(format!("version {version} of the format is not supported, only 1, 2 and 3")));
        }
    };
    let length =
        take(&mut reader, width)?.iter().rev().fold(0, |length, &byte| length << 8 | u64::from(byte));
    if length > LONGEST_HEADER {
        return Err(fault(format!("its header of {length} bytes is longer than {LONGEST_HEADER}")));
    }
    let text = take(&mut reader, length)?;
    let header = std::str::from_utf8(&text).ok().and_then(Header::parse);
    let header = header.ok_or_else(|| fault("its header does not describe an array of numbers"))?;
    let entry = Entry::parse(header.descr)?;
    let &[rows, columns] = header.shape.as_slice() else {
        return Err(fault(format!("the array has {} dimensions, but 2 are needed", header.shape.len())));
    };
    let entries = rows.checked_mul(columns).filter(|entries| *entries <= MOST_ENTRIES);
    let entries = entries.ok_or_else(|| fault(format!("its {rows} × {columns} entries are too many")))?;
    // An empty side leaves the other unbounded.
    let (rows, columns) = if entries == 0 { (0, 0) } else { (rows as usize, columns as usize) };
    let bytes = take(&mut reader, entries * entry.size() as u64)?;
    if reader.read(&mut [0])? != 0 {
        return Err(fault("bytes follow its last entry"));
    }
    let at = |i: usize, j: usize| if header.by_columns { j * rows + i } else { i * columns + j };
    Ok(Mat::from_fn(rows, columns, |i, j| entry.value(&bytes, at(i, j))))
}

/// How an entry is stored.
#[derive(Clone, Copy)]
struct Entry {
    kind: Kind,
    big_endian: bool,
}

#[derive(Clone, Copy)]
enum Kind {
    F8,
    F4,
    I8,
}

impl Entry {
    fn parse(descr: &str) -> Result<Self, Fault> {
        let (order, kind) = descr.split_at_checked(1).unwrap_or_default();
        let kind = match kind {
            "f8" => Some(Kind::F8),
            "f4" => Some(Kind::F4),
            "i8" => Some(Kind::I8),
            _ => None,
        };
        match (order, kind) {
            ("<", Some(kind)) => Ok(Self { kind, big_endian: false }),
            (">", Some(kind)) => Ok(Self { kind, big_endian: true }),
            _ => Err(fault(format!(
                "entries of type {descr:?} are not supported: use float64, float32 or int64"
            ))),
        }
    }

    fn size(self) -> usize {
        match self.kind {
            Kind::F8 | Kind::I8 => 8,
            Kind::F4 => 4,
        }
    }

    fn value(self, bytes: &[u8], index: usize) -> f64 {
        let size = self.size();
        // The entry in the low bytes, least significant first.
        let mut word = [0; 8];
        word[..size].copy_from_slice(&bytes[index * size..][..size]);
        if self.big_endian {
            word[..size].reverse();
        }
        let word = u64::from_le_bytes(word);
        match self.kind {
            Kind::F8 => f64::from_bits(word),
            Kind::F4 => f64::from(f32::from_bits(word as u32)),
            Kind::I8 => word as i64 as f64,
        }
    }
}

/// `{'descr': '<f8', 'fortran_order': False, 'shape': (2, 2), }`
struct Header<'a> {
    descr: &'a str,
    by_columns: bool,
    shape: Vec<u64>,
}

impl<'a> Header<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut rest = Literal(text);
        let (mut descr, mut by_columns, mut shape) = (None, None, None);
        rest.list("{", "}", |rest| {
            let key = rest.string()?;
            rest.eat(":")?;
            match key {
                "descr" => descr = Some(rest.string()?),
                "fortran_order" => by_columns = Some(rest.boolean()?),
                "shape" => shape = Some(rest.numbers()?),
                _ => return None,
            }
            Some(())
        })?;
        rest.0.trim().is_empty().then_some(())?;
        Some(Self { descr: descr?, by_columns: by_columns?, shape: shape? })
    }
}

/// What is left of a Python literal.
struct Literal<'a>(&'a str);

impl<'a> Literal<'a> {
    fn eat(&mut self, token: &str) -> Option<()> {
        self.0 = self.0.trim_start().strip_prefix(token)?;
        Some(())
    }

    /// Items between brackets, a comma after each or between them.
    fn list(&mut self, open: &str, close: &str, mut item: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.eat(open)?;
        while self.eat(close).is_none() {
            item(self)?;
            if self.eat(",").is_none() {
                return self.eat(close);
            }
        }
        Some(())
    }

    fn string(&mut self) -> Option<&'a str> {
        let quote = ['\'', '"'].into_iter().find(|quote| self.0.trim_start().starts_with(*quote))?;
        let (string, rest) = self.0.trim_start()[1..].split_once(quote)?;
        self.0 = rest;
        Some(string)
    }

    fn boolean(&mut self) -> Option<bool> {
        self.eat("True").map(|()| true).or_else(|| self.eat("False").map(|()| false))
    }

    fn numbers(&mut self) -> Option<Vec<u64>> {
        let mut numbers = Vec::new();
        self.list("(", ")", |rest| {
            let text = rest.0.trim_start();
            let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
            numbers.push(text[..end].parse().ok()?);
            // Python 2 marked long integers.
            rest.0 = text[end..].strip_prefix('L').unwrap_or(&text[end..]);
            Some(())
        })?;
        Some(numbers)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An array as `numpy.save` writes it, in the given version.
    pub fn file(version: u8, header: &str, entries: &[u8]) -> Vec<u8> {
        let mut file = [MAGIC, &[version, 0]].concat();
        let length = header.len() as u32;
        file.extend(&length.to_le_bytes()[..if version == 1 { 2 } else { 4 }]);
        file.extend(header.as_bytes());
        file.extend(entries);
        file
    }

    pub fn header(descr: &str, by_columns: bool, shape: &str) -> String {
        let by_columns = if by_columns { "True" } else { "False" };
        format!("{{'descr': '{descr}', 'fortran_order': {by_columns}, 'shape': {shape}, }}      \n")
    }

    fn entries(matrix: &Mat<f64>) -> Vec<Vec<f64>> {
        (0..matrix.nrows()).map(|i| (0..matrix.ncols()).map(|j| matrix[(i, j)]).collect()).collect()
    }

    fn refused(bytes: &[u8]) -> String {
        match read(bytes) {
            Err(Fault::Format(reason)) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_version_type_and_order_is_read() {
        let expected = [[1.0, -2.0, 3.0], [4.0, 5.0, 6.0]];
        for version in [1, 2, 3] {
            for by_columns in [false, true] {
                let values: Vec<f64> = match by_columns {
                    false => expected.iter().flatten().copied().collect(),
                    true => (0..3).flat_map(|j| expected.map(|row| row[j])).collect(),
                };
                let stored = |each: &dyn Fn(f64) -> Vec<u8>| -> Vec<u8> {
                    values.iter().flat_map(|value| each(*value)).collect()
                };
                for (descr, bytes) in [
                    ("<f8", stored(&|x| x.to_le_bytes().into())),
                    (">f8", stored(&|x| x.to_be_bytes().into())),
                    ("<f4", stored(&|x| (x as f32).to_le_bytes().into())),
                    (">f4", stored(&|x| (x as f32).to_be_bytes().into())),
                    ("<i8", stored(&|x| (x as i64).to_le_bytes().into())),
                    (">i8", stored(&|x| (x as i64).to_be_bytes().into())),
                ] {
                    let read = read(&*file(version, &header(descr, by_columns, "(2, 3)"), &bytes)).unwrap();
                    assert_eq!(entries(&read), expected, "{version} {descr} {by_columns}");
                }
            }
        }
        let old = "{\"shape\": (1L, 1L), \"fortran_order\": False, \"descr\": \"<f8\"}";
        assert_eq!(entries(&read(&*file(1, old, &7.5_f64.to_le_bytes())).unwrap()), [[7.5]]);
    }

    #[test]
    fn what_is_no_matrix_is_refused_in_words() {
        let whole = file(1, &header("<f8", false, "(1, 2)"), &[0; 16]);
        let with = |descr: &str, shape: &str| refused(&file(2, &header(descr, false, shape), &[0; 16]));
        assert!(refused(b"PK\x03\x04 and so on").contains("not a NumPy array file"));
        assert!(refused(&file(9, "", &[])).contains("version 9"));
        assert!(refused(&whole[..whole.len() - 1]).contains("16 bytes should follow, but 15 do"));
        assert!(refused(&[&whole[..], &[0]].concat()).contains("bytes follow"));
        assert!(with("<f8", "(2,)").contains("1 dimensions"));
        assert!(with("<f8", "()").contains("0 dimensions"));
        assert!(with("<c16", "(1, 1)").contains("\"<c16\""));
        assert!(with("|O", "(1, 1)").contains("\"|O\""));
        assert!(with("", "(1, 1)").contains("\"\""));
        assert!(with("é8", "(1, 1)").contains("é8"));
        assert!(with("<f8", "(1 1)").contains("header"));
        assert!(with("<f8", "(99999999999999999999, 1)").contains("header"));
        // Neither is allocated for before its bytes are there.
        assert!(with("<f8", "(4294967296, 4294967296)").contains("too many"));
        assert!(with("<f8", "(32768, 32768)").contains("truncated"));
        assert_eq!(
            read(&*file(1, &header("<f8", false, "(0, 18446744073709551615)"), &[])).unwrap().ncols(),
            0
        );
        let structured = "{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1, 1), }";
        assert!(refused(&file(1, structured, &[0; 8])).contains("array of numbers"));
        let mut endless = file(2, "", &[]);
        endless[8..12].fill(0xff);
        assert!(refused(&endless).contains("longer than"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_matrix_or_an_error(
            at in 0_usize..200, byte: u8, cut in 0_usize..200, tail in proptest::collection::vec(any::<u8>(), 0..64)
        ) {
            let mut bytes = file(1, &header("<f8", false, "(2, 2)"), &[1; 32]);
            let length = bytes.len();
            bytes[at % length] = byte;
            bytes.truncate(length - cut.saturating_sub(100).min(length));
            let _ = read(&*bytes);
            let _ = read(&*[&bytes[..8], &tail].concat());
            let _ = read(&*file(1, &String::from_utf8_lossy(&tail), &tail));
        }
    }
}
