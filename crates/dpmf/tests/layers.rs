//! The modules of the library stand in layers: each uses modules of the layers before its own, and no others, so they form no
//! cycle. The sources themselves are read, but for their tests.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Every module of `lib.rs`, lowest layer first.
const LAYERS: [&[&str]; 13] = [
    &["error", "loss", "simd"],
    &["disk", "linalg", "participation", "tensors"],
    &["accounting", "workload"],
    &["engine"],
    &["clip", "form"],
    &["identity", "sensitivity"],
    &["factorize"],
    &["problem"],
    &["family"],
    &["mechanism"],
    &["comparison", "format", "inspection", "noise"],
    &["planner", "sampler"],
    &["audit", "run"],
];

#[test]
fn modules_use_only_layers_before_their_own() {
    let library = Crate::read(&sources());
    println!("{}", library.picture(&LAYERS));
    assert_eq!(library.violations(&LAYERS), Vec::<String>::new());
}

#[test]
fn an_edge_against_the_order_is_found_wherever_it_stands() {
    let violations = |file: &str, text: &str| {
        let mut sources = sources();
        sources.get_mut(Path::new(file)).expect("the file exists").push_str(text);
        Crate::read(&sources).violations(&LAYERS)
    };
    for (file, text, edge) in [
        ("error.rs", "\nuse crate::factorize::Dual;", "error → factorize"),
        ("error.rs", "\nuse crate::{disk::{self, DiskPath}, error};", "error → disk"),
        ("error.rs", "\nuse crate::Mechanism;", "error → mechanism"),
        ("error.rs", "\nfn f() { super::noise::stream(); }", "error → noise"),
        ("error.rs", "\nmod inner { use super::super::noise::Output; }", "error → noise"),
        ("form/tree/engine.rs", "\nuse super::super::super::factorize::solve;", "form → factorize"),
        ("simd.rs", "\nmacro_rules! m { () => { $crate::linalg::f() } }", "simd → linalg"),
        // A method that a later module gives to a type of an earlier one.
        (
            "participation.rs",
            "\nfn f(p: Participation) { p.sensitivity(&form); }",
            "participation → sensitivity",
        ),
        ("form/mod.rs", "\nfn f() { StateSpace::truncated(r, v, order); }", "form → factorize"),
        // Two modules of one layer are not for each other either.
        ("workload/mod.rs", "\nuse crate::accounting::Curve;", "workload → accounting"),
    ] {
        let found = violations(file, text);
        assert!(found.iter().any(|violation| violation.starts_with(edge)), "{text}: {found:?}");
    }
    for (file, text) in [
        ("error.rs", "\n// use crate::factorize::Dual;"),
        ("error.rs", "\n/* crate::noise /* nested */ crate::run */"),
        ("error.rs", "\nconst TEXT: &str = \"crate::noise \\\" crate::run\";"),
        ("error.rs", "\nconst RAW: &str = r#\"crate::noise \" crate::run\"#;"),
        ("error.rs", "\n#[cfg(test)]\nmod more { use crate::noise::Output; }"),
        ("error.rs", "\n#[cfg(test)]\nuse crate::noise::Output;"),
        ("error.rs", "\nmod inner { use super::Error; }"),
        ("noise/stream.rs", "\nuse crate::form::Form; use super::super::engine::Field;"),
    ] {
        assert_eq!(violations(file, text), Vec::<String>::new(), "{text}");
    }
}

#[test]
fn every_module_has_one_layer() {
    let mut sources = sources();
    sources.get_mut(Path::new("lib.rs")).expect("it is the root").push_str("\npub mod attic;");
    sources.insert("attic.rs".into(), "use crate::error::Error;".into());
    assert_eq!(Crate::read(&sources).violations(&LAYERS), ["attic stands in no layer"]);
    let twice: Vec<&[&str]> = LAYERS.iter().copied().chain([&["error"][..]]).collect();
    assert!(Crate::read(&sources).violations(&twice).contains(&"error stands in two layers".into()));
}

/// Files by their path under `src`.
type Sources = BTreeMap<PathBuf, String>;

fn sources() -> Sources {
    fn collect(root: &Path, folder: &Path, into: &mut Sources) {
        for entry in std::fs::read_dir(folder).expect("a folder of sources") {
            let path = entry.expect("an entry of it").path();
            if path.is_dir() {
                collect(root, &path, into);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root).expect("it lies under the root").to_owned();
                into.insert(name, std::fs::read_to_string(&path).expect("a text"));
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = Sources::new();
    collect(&root, &root, &mut sources);
    sources
}

/// The modules that `lib.rs` names, and which of them use which, with a place where they do.
struct Crate {
    modules: BTreeSet<String>,
    uses: BTreeMap<(String, String), String>,
}

/// The tokens of a file without tests, and where its module stands.
struct File {
    path: Vec<String>,
    name: PathBuf,
    tokens: Vec<String>,
}

impl File {
    fn module(&self) -> &str {
        &self.path[0]
    }
}

impl Crate {
    fn read(sources: &Sources) -> Self {
        let root = tokens(&sources[Path::new("lib.rs")]);
        let modules: BTreeSet<String> = declared(&root).into_iter().collect();
        let mut names: BTreeMap<String, String> =
            modules.iter().map(|module| (module.clone(), module.clone())).collect();
        names.extend(reexports(&root));

        let mut files = Vec::new();
        for module in &modules {
            visit(sources, vec![module.clone()], &mut files);
        }
        let mut uses = BTreeMap::new();
        let mut note = |from: &File, to: &str, what: &str| {
            if from.module() != to {
                let edge = (from.module().to_owned(), to.to_owned());
                uses.entry(edge).or_insert_with(|| format!("{what} in {}", from.name.display()));
            }
        };
        for file in &files {
            for name in roots_named(file) {
                let to = names.get(&name).unwrap_or_else(|| {
                    panic!("{}: crate::{name} is neither a module nor re-exported", file.name.display())
                });
                note(file, to, &format!("crate::{name}"));
            }
        }
        for Extension { home, of, function, method } in extensions(&files) {
            for file in &files {
                let called = file.tokens.windows(4).any(|w| match method {
                    true => w[0] == "." && w[1] == function && (w[2] == "(" || w[2] == "::"),
                    false => w[0] == of && w[1] == "::" && w[2] == function && w[3] == "(",
                });
                if called {
                    note(file, &home, &format!("{of}::{function}"));
                }
            }
        }
        Self { modules, uses }
    }

    /// What breaks the order, one sentence each.
    fn violations(&self, layers: &[&[&str]]) -> Vec<String> {
        let layer = |module: &str| layers.iter().position(|layer| layer.contains(&module));
        let mut found = Vec::new();
        for module in &self.modules {
            match layers.iter().filter(|layer| layer.contains(&module.as_str())).count() {
                1 => {}
                0 => found.push(format!("{module} stands in no layer")),
                _ => found.push(format!("{module} stands in two layers")),
            }
        }
        for ((from, to), place) in &self.uses {
            if let (Some(own), Some(used)) = (layer(from), layer(to))
                && used >= own
            {
                found.push(format!("{from} → {to}: {place}"));
            }
        }
        found
    }

    fn picture(&self, layers: &[&[&str]]) -> String {
        let mut text = String::new();
        for (number, layer) in layers.iter().enumerate() {
            for module in *layer {
                let used = self.uses.keys().filter(|(from, _)| from == module).map(|(_, to)| to.as_str());
                let used: Vec<&str> = used.collect();
                writeln!(text, "{number:2}  {module:14} {}", used.join(", ")).expect("a text takes text");
            }
        }
        text
    }
}

/// Adds the file of a module and those of the modules that it declares.
fn visit(sources: &Sources, path: Vec<String>, files: &mut Vec<File>) {
    let folder: PathBuf = path.iter().collect();
    let candidates = [folder.with_extension("rs"), folder.join("mod.rs")];
    let name = candidates.into_iter().find(|name| sources.contains_key(name));
    let name = name.unwrap_or_else(|| panic!("{} has no file", path.join("::")));
    let tokens = tokens(&sources[&name]);
    let inner = declared(&tokens);
    files.push(File { path: path.clone(), name, tokens });
    for module in inner {
        visit(sources, [&path[..], &[module]].concat(), files);
    }
}

/// The modules that have a file of their own.
fn declared(tokens: &[String]) -> Vec<String> {
    let declarations = tokens.windows(3).filter(|w| w[0] == "mod" && w[2] == ";");
    declarations.map(|w| w[1].clone()).collect()
}

/// Names that `lib.rs` takes out of its modules, with the module.
fn reexports(tokens: &[String]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (at, _) in tokens.iter().enumerate().filter(|(_, token)| *token == "use") {
        let statement = tokens[at + 1..].iter().take_while(|token| *token != ";");
        let mut words = statement.filter(|token| is_word(token));
        if let Some(module) = words.next() {
            found.extend(words.map(|word| (word.clone(), module.clone())));
        }
    }
    found
}

/// The names at the root of the crate that a file goes through.
fn roots_named(file: &File) -> Vec<String> {
    let (mut found, mut depth, mut inline) = (Vec::new(), 0, Vec::new());
    for (at, token) in file.tokens.iter().enumerate() {
        let before = |back: usize| at.checked_sub(back).map(|at| file.tokens[at].as_str());
        match token.as_str() {
            "{" => {
                depth += 1;
                if before(2) == Some("mod") {
                    inline.push(depth);
                }
            }
            "}" => {
                if inline.last() == Some(&depth) {
                    inline.pop();
                }
                depth -= 1;
            }
            "crate" | "super" if before(1) != Some("::") => {
                follow(&file.tokens, at, Some(file.path.len() + inline.len()), &mut found);
            }
            _ => {}
        }
    }
    found
}

/// Reads a path, or a tree of them, from a module so many levels below the root, and returns where it ends.
fn follow(tokens: &[String], mut at: usize, mut level: Option<usize>, found: &mut Vec<String>) -> usize {
    loop {
        match tokens[at].as_str() {
            "crate" => level = Some(0),
            "super" => level = level.map(|level| level.checked_sub(1).expect("a path within the crate")),
            "self" => {}
            "{" => {
                at += 1;
                while tokens[at] != "}" {
                    at = follow(tokens, at, level, found);
                    at +=
                        tokens[at..].iter().position(|token| token == "," || token == "}").expect("its end");
                    at += usize::from(tokens[at] == ",");
                }
                return at + 1;
            }
            name => {
                if level == Some(0) {
                    found.push(name.to_owned());
                }
                // What comes after a name lies below it.
                level = None;
            }
        }
        if tokens.get(at + 1).is_none_or(|token| token != "::") {
            return at + 1;
        }
        at += 2;
    }
}

/// A function that one module gives to a type of another.
struct Extension {
    home: String,
    of: String,
    function: String,
    method: bool,
}

fn extensions(files: &[File]) -> Vec<Extension> {
    let mut types = BTreeMap::<&str, BTreeSet<&str>>::new();
    for file in files {
        for w in file.tokens.windows(2).filter(|w| w[0] == "struct" || w[0] == "enum") {
            types.entry(&w[1]).or_default().insert(file.module());
        }
    }
    let mut found = Vec::new();
    for file in files {
        for (at, _) in file.tokens.iter().enumerate().filter(|(_, token)| *token == "impl") {
            // Only plain ones: traits are seen by their names, and generics are not used for this.
            let (Some(of), Some("{")) =
                (file.tokens.get(at + 1), file.tokens.get(at + 2).map(String::as_str))
            else {
                continue;
            };
            if types.get(of.as_str()).is_none_or(|homes| homes.contains(file.module())) {
                continue;
            }
            let end = closing(&file.tokens, at + 2);
            let body = &file.tokens[at + 2..end];
            for (at, _) in body.iter().enumerate().filter(|(_, token)| *token == "fn") {
                let open =
                    at + body[at..].iter().position(|token| token == "(").expect("a list of arguments");
                let method = body[open + 1..].iter().find(|token| is_word(token) && *token != "mut");
                found.push(Extension {
                    home: file.module().to_owned(),
                    of: of.clone(),
                    function: body[at + 1].clone(),
                    method: method.is_some_and(|word| word == "self"),
                });
            }
        }
    }
    found
}

/// Where the brace or bracket at a place closes.
fn closing(tokens: &[String], open: usize) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token.as_str() {
            "{" | "[" | "(" => depth += 1,
            "}" | "]" | ")" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    panic!("a brace stays open")
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Words, `::` and single signs, without comments, literals and what is compiled for tests only.
fn tokens(source: &str) -> Vec<String> {
    let all = scan(source);
    let mut kept = Vec::new();
    let mut at = 0;
    while at < all.len() {
        if all[at..].iter().take(7).eq(["#", "[", "cfg", "(", "test", ")", "]"]) {
            at += 7;
            while all[at] == "#" {
                at = closing(&all, at + 1) + 1;
            }
            while all[at] != ";" && all[at] != "{" {
                at += 1;
            }
            if all[at] == "{" {
                at = closing(&all, at);
            }
            at += 1;
            continue;
        }
        kept.push(all[at].clone());
        at += 1;
    }
    kept
}

fn scan(source: &str) -> Vec<String> {
    let text: Vec<char> = source.chars().collect();
    let starts = |at: usize, what: &str| what.chars().enumerate().all(|(k, c)| text.get(at + k) == Some(&c));
    let (mut tokens, mut at) = (Vec::new(), 0);
    while at < text.len() {
        let c = text[at];
        if starts(at, "//") {
            at += text[at..].iter().position(|c| *c == '\n').unwrap_or(text.len() - at);
        } else if starts(at, "/*") {
            let mut depth = 0;
            loop {
                match (starts(at, "/*"), starts(at, "*/")) {
                    (true, _) => (depth, at) = (depth + 1, at + 2),
                    (_, true) => (depth, at) = (depth - 1, at + 2),
                    _ => at += 1,
                }
                if depth == 0 || at >= text.len() {
                    break;
                }
            }
        } else if c.is_alphabetic() || c == '_' {
            let length = text[at..].iter().take_while(|c| c.is_alphanumeric() || **c == '_').count();
            let word: String = text[at..at + length].iter().collect();
            at += length;
            let hashes = text[at..].iter().take_while(|c| **c == '#').count();
            if (word == "r" || word == "br") && text.get(at + hashes) == Some(&'"') {
                let end = format!("\"{}", "#".repeat(hashes));
                at += hashes + 1;
                while at < text.len() && !starts(at, &end) {
                    at += 1;
                }
                at += end.len();
            } else {
                tokens.push(word);
            }
        } else if c == '"' {
            at += 1;
            while at < text.len() && text[at] != '"' {
                at += if text[at] == '\\' { 2 } else { 1 };
            }
            at += 1;
        } else if c == '\'' {
            // A character, or a lifetime, which has no second quote.
            match (text.get(at + 1), text.get(at + 2)) {
                (Some('\\'), _) => {
                    at += 3;
                    at += text[at..].iter().position(|c| *c == '\'').unwrap_or(0) + 1;
                }
                (_, Some('\'')) => at += 3,
                _ => at += 1,
            }
        } else if starts(at, "::") {
            tokens.push("::".into());
            at += 2;
        } else {
            if !c.is_whitespace() {
                tokens.push(c.into());
            }
            at += 1;
        }
    }
    tokens
}
