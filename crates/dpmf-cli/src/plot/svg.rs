//! Shapes and text as SVG.

use super::png;
use std::fmt::{self, Display, Write};

/// A colour: red, green, blue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Color(pub u8, pub u8, pub u8);

impl Display for Color {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{:02x}{:02x}{:02x}", self.0, self.1, self.2)
    }
}

/// Of text.
const INK: Color = Color(30, 30, 30);

/// Of axes and of the lines behind curves.
pub(super) const AXIS: Color = Color(110, 110, 110);
pub(super) const GRID: Color = Color(228, 228, 228);

/// Colours of curves that stay apart in print and for colour-blind readers (Okabe and Ito).
pub const COLORS: [Color; 8] = [
    Color(0, 114, 178),
    Color(213, 94, 0),
    Color(0, 158, 115),
    Color(204, 121, 167),
    Color(230, 159, 0),
    Color(86, 180, 233),
    Color(110, 110, 110),
    Color(0, 0, 0),
];

/// The same hues in the same order, light enough for a dark page.
const COLORS_ON_DARK: [Color; 8] = [
    Color(61, 158, 224),
    Color(240, 119, 46),
    Color(34, 191, 147),
    Color(226, 156, 198),
    Color(242, 182, 50),
    Color(158, 216, 255),
    Color(154, 154, 154),
    Color(240, 240, 240),
];

/// What a picture is read on, which decides its colours.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ground {
    /// White of its own, so that it can be read anywhere.
    White,
    /// A page that has [`variables`], for light and for dark.
    Page,
}

impl Ground {
    /// A colour as an attribute's value.
    fn paint(self, color: Color) -> String {
        let curve = || COLORS.iter().position(|known| *known == color);
        match (self, color) {
            (Self::White, _) => color.to_string(),
            (Self::Page, AXIS) => "var(--axis)".into(),
            (Self::Page, GRID) => "var(--grid)".into(),
            (Self::Page, _) => curve().map_or_else(|| color.to_string(), |k| format!("var(--curve-{k})")),
        }
    }
}

/// The variables of a page's style that its pictures take their colours from.
pub fn variables(dark: bool) -> String {
    let (curves, axis, grid) = match dark {
        false => (COLORS, AXIS, GRID),
        true => (COLORS_ON_DARK, Color(150, 150, 150), Color(52, 56, 62)),
    };
    let mut style = format!("--axis:{axis};--grid:{grid};");
    for (k, color) in curves.iter().enumerate() {
        let _ = write!(style, "--curve-{k}:{color};");
    }
    style
}

/// A length or place in pixels, to a tenth.
struct Px(f64);

impl Display for Px {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Adding zero turns −0 into 0.
        write!(f, "{}", (10.0 * self.0).round() / 10.0 + 0.0)
    }
}

/// Width of a line of text, rather more than less: the font is the reader's.
pub(super) fn text_width(text: &str, size: f64) -> f64 {
    0.6 * size * text.chars().count() as f64
}

/// Lines of words no wider than `width`, unless a word is; words that are too wide are broken after a hyphen or colon.
pub(super) fn wrapped(text: &str, size: f64, width: f64) -> Vec<String> {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split(' ') {
        let whole = text_width(word, size) <= width;
        let parts = word.split_inclusive(|c| !whole && matches!(c, '-' | ':'));
        for (k, part) in parts.enumerate() {
            let last = lines.len() - 1;
            let space = if k > 0 || lines[last].is_empty() { "" } else { " " };
            let longer = format!("{}{space}{part}", lines[last]);
            if lines[last].is_empty() || text_width(&longer, size) <= width {
                lines[last] = longer;
            } else {
                lines.push(part.into());
            }
        }
    }
    lines
}

/// Which part of a text is at its place.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// A picture being drawn.
pub(super) struct Svg {
    elements: String,
    ground: Ground,
}

impl Svg {
    pub fn new(ground: Ground) -> Self {
        Self { elements: String::new(), ground }
    }

    /// The whole picture. In a page it is as wide as its place there.
    pub fn finish(self, size: (f64, f64), title: &str) -> String {
        let (width, height) = (Px(size.0.ceil()), Px(size.1.ceil()));
        let (title, elements) = (escape(title), self.elements);
        match self.ground {
            Ground::White => format!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
                 viewBox=\"0 0 {width} {height}\" role=\"img\" font-family=\"system-ui,'DejaVu Sans',Helvetica,Arial,sans-serif\" \
                 fill=\"{INK}\"><title>{title}</title><rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>{elements}</svg>\n"
            ),
            Ground::Page => format!(
                "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" fill=\"currentColor\"><title>{title}</title>{elements}</svg>"
            ),
        }
    }

    pub fn rectangle(&mut self, corner: (f64, f64), size: (f64, f64), fill: Color) {
        let fill = self.ground.paint(fill);
        self.put(format_args!(
            "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{fill}\"/>",
            Px(corner.0),
            Px(corner.1),
            Px(size.0),
            Px(size.1)
        ));
    }

    /// Straight lines between pairs of points, as one element.
    pub fn segments(&mut self, segments: &[[(f64, f64); 2]], color: Color) {
        let mut path = String::new();
        for [from, to] in segments {
            let _ = write!(path, "M{} {}L{} {}", Px(from.0), Px(from.1), Px(to.0), Px(to.1));
        }
        let color = self.ground.paint(color);
        self.put(format_args!("<path d=\"{path}\" fill=\"none\" stroke=\"{color}\"/>"));
    }

    /// A curve through points, as one element.
    pub fn curve(&mut self, points: &[(f64, f64)], color: Color, dashes: &str) {
        let mut places = String::new();
        for (x, y) in points {
            let _ = write!(places, "{},{} ", Px(*x), Px(*y));
        }
        let dashes =
            if dashes.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dashes}\"") };
        let color = self.ground.paint(color);
        self.put(format_args!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" stroke-linejoin=\"round\"{dashes}/>",
            places.trim_end()
        ));
    }

    pub fn dot(&mut self, (x, y): (f64, f64), color: Color) {
        let (x, y, color) = (Px(x), Px(y), self.ground.paint(color));
        self.put(format_args!("<circle cx=\"{x}\" cy=\"{y}\" r=\"4\" fill=\"{color}\"/>"));
    }

    /// Text whose middle line passes through the place.
    pub fn text(&mut self, (x, y): (f64, f64), size: f64, anchor: Anchor, content: &str) {
        let (x, y) = (Px(x), Px(y + 0.35 * size));
        let (anchor, content) = (anchor.attribute(), escape(content));
        self.put(format_args!("<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\"{anchor}>{content}</text>"));
    }

    /// Text that runs upwards, centred at the place.
    pub fn upright_text(&mut self, (x, y): (f64, f64), size: f64, content: &str) {
        let (x, y, content) = (Px(x + 0.35 * size), Px(y), escape(content));
        self.put(format_args!(
            "<text transform=\"translate({x} {y}) rotate(-90)\" font-size=\"{size}\" text-anchor=\"middle\">{content}</text>"
        ));
    }

    /// A raster stretched over a rectangle, every pixel of it sharp.
    pub fn raster(&mut self, corner: (f64, f64), size: (f64, f64), png: &[u8]) {
        self.put(format_args!(
            "<image x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" preserveAspectRatio=\"none\" \
             style=\"image-rendering:pixelated\" href=\"data:image/png;base64,{}\"/>",
            Px(corner.0),
            Px(corner.1),
            Px(size.0),
            Px(size.1),
            png::base64(png)
        ));
    }

    fn put(&mut self, element: fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.elements.write_fmt(element);
    }
}

impl Anchor {
    fn attribute(self) -> &'static str {
        match self {
            Self::Start => "",
            Self::Middle => " text-anchor=\"middle\"",
            Self::End => " text-anchor=\"end\"",
        }
    }
}

/// Text for XML and HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_have_one_decimal_and_text_is_escaped() {
        let mut svg = Svg::new(Ground::White);
        svg.curve(&[(1.0, -0.04), (2.25, 3.149)], Color(0, 114, 178), "");
        svg.text((0.0, 0.0), 10.0, Anchor::Start, "a < b & c");
        let text = svg.finish((10.2, 5.0), "<x>");
        assert!(text.contains("points=\"1,0 2.3,3.1\"") && text.contains("stroke=\"#0072b2\""), "{text}");
        assert!(
            text.contains(">a &lt; b &amp; c</text>") && text.contains("<title>&lt;x&gt;</title>"),
            "{text}"
        );
        assert!(text.contains("viewBox=\"0 0 11 5\""), "{text}");
    }

    #[test]
    fn words_are_wrapped_and_none_is_lost() {
        assert_eq!(wrapped("one two three", 10.0, 48.0), ["one two", "three"]);
        assert_eq!(wrapped("unbreakable", 10.0, 12.0), ["unbreakable"]);
        assert_eq!(wrapped("", 10.0, 12.0), [""]);
        assert_eq!(wrapped("a state-space:buffers=4", 10.0, 80.0), ["a state-", "space:", "buffers=4"]);
    }

    #[test]
    fn a_page_names_every_colour_in_light_and_in_dark() {
        let mut svg = Svg::new(Ground::Page);
        COLORS.iter().for_each(|color| svg.dot((0.0, 0.0), *color));
        svg.segments(&[[(0.0, 0.0), (1.0, 1.0)]], GRID);
        let text = svg.finish((9.0, 9.0), "x");
        assert!(!text.contains('#') && !text.contains("http"), "{text}");
        let names: Vec<&str> = text.split("var(").skip(1).filter_map(|rest| rest.split(')').next()).collect();
        assert_eq!(names.len(), 9);
        for name in names {
            assert!(
                [false, true].iter().all(|dark| variables(*dark).contains(&format!("{name}:#"))),
                "{name}"
            );
        }
    }
}
