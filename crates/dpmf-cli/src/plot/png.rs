//! Rasters of 256 colours as PNG, for pictures with more cells than elements should have.

use super::svg::Color;
use flate2::write::ZlibEncoder;
use flate2::{Compression, Crc};
use std::io::Write;

/// An image whose pixels, by rows, are places in a palette.
pub(super) fn encode(width: usize, palette: &[Color; 256], pixels: &[u8]) -> Vec<u8> {
    let height = pixels.len() / width;
    let mut header = Vec::new();
    header.extend((width as u32).to_be_bytes());
    header.extend((height as u32).to_be_bytes());
    // Eight bits a pixel, from a palette; the one compression, filter and order there are.
    header.extend([8, 3, 0, 0, 0]);
    let colors: Vec<u8> = palette.iter().flat_map(|color| [color.0, color.1, color.2]).collect();
    let mut rows = Vec::with_capacity(pixels.len() + height);
    for row in pixels.chunks_exact(width) {
        rows.push(0);
        rows.extend(row);
    }
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    chunk(&mut file, b"IHDR", &header);
    chunk(&mut file, b"PLTE", &colors);
    chunk(&mut file, b"IDAT", &deflated(&rows));
    chunk(&mut file, b"IEND", &[]);
    file
}

fn chunk(file: &mut Vec<u8>, name: &[u8; 4], content: &[u8]) {
    let mut crc = Crc::new();
    crc.update(name);
    crc.update(content);
    file.extend((content.len() as u32).to_be_bytes());
    file.extend(name);
    file.extend(content);
    file.extend(crc.sum().to_be_bytes());
}

fn deflated(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    // Writing to memory cannot fail.
    let _ = encoder.write_all(bytes);
    encoder.finish().unwrap_or_default()
}

/// RFC 4648.
pub(super) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = (0..3).fold(0_u32, |bits, i| bits << 8 | u32::from(group.get(i).copied().unwrap_or(0)));
        for i in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * i) & 63) as usize];
            text.push(if i <= group.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn published_base64_vectors() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xfb, 0xff, 0xbf]), "+/+/");
    }

    /// The header and palette chunks of a 3 × 2 image, and its pixels behind their filter bytes.
    #[test]
    fn an_image_has_the_chunks_of_the_standard() {
        let palette = std::array::from_fn(|i| Color(i as u8, 0, 255));
        let file = encode(3, &palette, &[1, 2, 3, 4, 5, 6]);
        assert_eq!(&file[..16], b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR");
        assert_eq!(&file[16..29], [0, 0, 0, 3, 0, 0, 0, 2, 8, 3, 0, 0, 0]);
        assert_eq!(&file[37..41], b"PLTE");
        let data = 33 + 12 + 768;
        assert_eq!(&file[data + 4..data + 8], b"IDAT");
        let mut pixels = Vec::new();
        flate2::read::ZlibDecoder::new(&file[data + 8..]).read_to_end(&mut pixels).unwrap();
        assert_eq!(pixels, [0, 1, 2, 3, 0, 4, 5, 6]);
        // The end of every image, with its known checksum.
        assert!(file.ends_with(b"\0\0\0\0IEND\xaeB`\x82"));
    }
}
