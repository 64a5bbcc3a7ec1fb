//! Pages that open without a network: one style for all, in light and dark, on desks, phones and paper.

use crate::plot::figure::{Panel, escape, in_page, variables};
use crate::report::number;
use std::fmt::Write;

/// A page being written.
pub struct Page {
    title: String,
    body: String,
}

/// Head of a column: its name, and what it counts in.
pub type Column<'a> = (&'a str, &'a str);

impl Page {
    /// Begins with a title and a few words below it.
    pub fn new(title: &str, lead: &str) -> Self {
        let (title, lead) = (escape(title), escape(lead));
        let body = format!("<h1>{title}</h1><p class=lead>{lead}</p>");
        Self { title, body }
    }

    pub fn heading(&mut self, text: &str) {
        self.put(format_args!("<h2>{}</h2>", escape(text)));
    }

    pub fn paragraph(&mut self, text: &str) {
        self.put(format_args!("<p>{}</p>", escape(text)));
    }

    /// Words about what stands above them.
    pub fn note(&mut self, text: &str) {
        self.put(format_args!("<p class=note>{}</p>", escape(text)));
    }

    /// Lines for a shell.
    pub fn commands(&mut self, lines: &[String]) {
        self.put(format_args!("<pre><code>{}</code></pre>", escape(&lines.join("\n"))));
    }

    /// What is promised, in front of everything else: sentences first, then a text of `name: value` lines and lists, as
    /// statements of privacy are.
    pub fn promise(&mut self, sentences: &[String], statement: &str) {
        self.body += "<section class=promise aria-label=privacy>";
        sentences.iter().for_each(|sentence| self.put(format_args!("<p>{}</p>", escape(sentence))));
        let (mut terms, mut lists, mut listed) = (String::new(), String::new(), false);
        for line in statement.lines() {
            let text = escape(line.trim());
            if let Some(item) = line.strip_prefix("  - ") {
                lists += &format!("<li>{}</li>", escape(item));
            } else if let Some(name) = text.strip_suffix(':') {
                lists += if listed { "</ul>" } else { "" };
                lists += &format!("{name}:<ul>");
                listed = true;
            } else if let Some((name, value)) = text.split_once(": ") {
                terms += &format!("<dt>{name}</dt><dd>{value}</dd>");
            }
        }
        if !terms.is_empty() {
            self.put(format_args!("<dl>{terms}</dl>"));
        }
        if listed {
            let summary = "<details><summary>What is covered, and what is not</summary>";
            self.put(format_args!("{summary}{lists}</ul></details>"));
        }
        self.body += "</section>";
    }

    /// A list of sentences.
    pub fn list(&mut self, items: &[String]) {
        self.body += "<ul>";
        items.iter().for_each(|item| self.put(format_args!("<li>{}</li>", escape(item))));
        self.body += "</ul>";
    }

    /// Rows under a head. On a phone every row is a card of its own, with the names of the columns in it.
    pub fn table(&mut self, head: &[Column<'_>], rows: &[Vec<String>]) {
        // A browser takes the roles from what it lays out as blocks.
        self.body += "<div class=wide><table class=cards role=table><thead><tr role=row>";
        for (name, unit) in head {
            self.put(format_args!("<th scope=col role=columnheader>{}", escape(name)));
            if !unit.is_empty() {
                self.put(format_args!("<small>{}</small>", escape(unit)));
            }
        }
        self.body += "</thead><tbody>";
        for row in rows {
            self.body += "<tr role=row>";
            for ((name, unit), cell) in head.iter().zip(row) {
                let unit = if unit.is_empty() { String::new() } else { format!(", {unit}") };
                let name = escape(&format!("{name}{unit}"));
                self.put(format_args!("<td role=cell data-name=\"{name}\">{}</td>", escape(cell)));
            }
        }
        self.body += "</tbody></table></div>";
    }

    /// Names and what they stand for.
    pub fn pairs(&mut self, pairs: &[(&str, String)]) {
        self.body += "<table><tbody>";
        for (name, value) in pairs {
            self.put(format_args!("<tr><th scope=row>{}<td>{}", escape(name), escape(value)));
        }
        self.body += "</tbody></table>";
    }

    /// Pictures beside each other where there is room, each with words and its numbers.
    pub fn figures(&mut self, figures: &[(Panel, &str)]) {
        self.body += "<div class=figures>";
        for (panel, words) in figures {
            let (title, words) = (escape(&panel.title), escape(words));
            self.put(format_args!("<figure><figcaption><strong>{title}</strong>{words}</figcaption>"));
            self.body += &in_page(panel);
            self.numbers(panel);
            self.body += "</figure>";
        }
        self.body += "</div>";
    }

    /// What a panel shows, as a table of a few of its points.
    fn numbers(&mut self, panel: &Panel) {
        const MOST: usize = 16;
        let mut places: Vec<f64> = panel.named().flat_map(|s| &s.points).map(|point| point.0).collect();
        places.sort_by(f64::total_cmp);
        places.dedup();
        let count = places.len().min(MOST);
        let chosen = (0..count).map(|k| places[k * (places.len() - 1) / (count - 1).max(1)]);
        let (x, y) = (escape(&panel.x_label), escape(&panel.y_label));
        self.put(format_args!(
            "<details><summary>Numbers</summary><div class=scroll tabindex=0 role=region aria-label=\"{}: numbers\">\
             <table><caption>{y}</caption><thead><tr><th scope=col>{x}",
            escape(&panel.title)
        ));
        panel.named().for_each(|s| self.put(format_args!("<th scope=col>{}", escape(&s.label))));
        self.body += "</thead><tbody>";
        for place in chosen {
            self.put(format_args!("<tr><td>{place}"));
            for series in panel.named() {
                let point = series.points.iter().find(|point| point.0 == place);
                self.put(format_args!("<td>{}", point.map_or("–".into(), |point| number(point.1))));
            }
        }
        self.body += "</tbody></table></div></details>";
    }

    /// The whole page.
    pub fn finish(self) -> String {
        let (light, dark) = (variables(false), variables(true));
        format!(
            "<!doctype html><html lang=en><head><meta charset=utf-8>\
             <meta name=viewport content=\"width=device-width,initial-scale=1\"><title>{}</title>\
             <style>:root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{STYLE}</style></head>\
             <body><main>{}</main></body></html>\n",
            self.title, self.body
        )
    }

    fn put(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.body.write_fmt(element);
    }
}

const STYLE: &str = include_str!("style.css");

/// A path as a word of a shell.
pub fn word(path: &std::path::Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+,:@".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::figure::{COLORS, Mark, Series};

    /// Six curves of many rounds, none of them smooth.
    fn panel(rounds: u32) -> Panel {
        let series = (0..6).map(|k| Series {
            label: format!("mechanism-{k}"),
            points: (0..rounds).map(|i| (f64::from(i), f64::from(k * 900 + i * 7919 % 1000) + 0.5)).collect(),
            mark: Mark::Line,
            color: COLORS[k as usize],
        });
        let (x_label, y_label) = ("round".into(), "error < 1".into());
        Panel { title: "a & b".into(), x_label, y_label, x_log: false, y_log: true, series: series.collect() }
    }

    #[test]
    fn a_page_of_many_rounds_is_small_and_fetches_nothing() {
        let mut page = Page::new("title", "lead");
        page.figures(&[0; 4].map(|_| (panel(10_000), "words")));
        let text = page.finish();
        assert!(text.len() < 200_000, "{} bytes", text.len());
        assert_eq!(text.matches("<polyline").count(), 24);
        for fetched in ["http", "<script", "<link", "<img", "src=", "url(", "@import"] {
            assert!(!text.contains(fetched), "{fetched}");
        }
        for kept in
            ["prefers-color-scheme:dark", "@media print", "@media (max-width", "a &amp; b", "error &lt; 1"]
        {
            assert!(text.contains(kept), "{kept}");
        }
    }

    #[test]
    fn numbers_begin_and_end_with_the_curves() {
        let mut page = Page::new("title", "lead");
        page.numbers(&panel(1000));
        assert_eq!(page.body.matches("<tr>").count(), 17);
        assert!(
            page.body.contains("<tr><td>0<td>0.50000") && page.body.contains("<tr><td>999<td>81.500"),
            "{}",
            page.body
        );
        let mut none = Page::new("title", "lead");
        none.numbers(&panel(0));
        assert_eq!(none.body.matches("<tr>").count(), 1);
    }

    #[test]
    fn a_statement_becomes_terms_and_lists() {
        let mut page = Page::new("title", "lead");
        page.promise(
            &["One & all.".into()],
            "headline\nNoise: 2 = 1 × 2.\nCovered:\n  - a < b\nNot covered:\n  - c\n",
        );
        for part in [
            "<p>One &amp; all.</p>",
            "<dt>Noise</dt><dd>2 = 1 × 2.</dd>",
            "Covered:<ul><li>a &lt; b</li></ul>",
            "Not covered:<ul><li>c</li></ul>",
        ] {
            assert!(page.body.contains(part), "{part}: {}", page.body);
        }
    }

    #[test]
    fn paths_are_words_of_a_shell() {
        assert_eq!(word("runs/a-1".as_ref()), "runs/a-1");
        assert_eq!(word("it's a run".as_ref()), "'it'\\''s a run'");
    }
}
