//! The server behind `dpmf plan --page`: one page and its questions, for this machine and this run only.
//!
//! Who may ask: programs of this machine that know the address, since a secret token is part of it. A web page
//! elsewhere cannot know the token, nor reach the server under a name of its own, since `Host` is checked.

use anyhow::Context as _;
use serde_json::json;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Requests are short: settings of a plan, and a browser's headers.
const HEAD: usize = 8 << 10;
/// One page asks three things at a time, and browsers open connections to spare. As many more are told that there are
/// too many, and those beyond are closed at once.
const CONNECTIONS: usize = 16;
/// Time for the whole head of a request, and for each write of an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// What stands in the page where the nonce of its style and its script goes.
const NONCE: &str = "@NONCE@";

/// What the page asks for; everything is text from the query string.
pub trait Planner: Send + Sync {
    /// The answer to `GET /plan?…`: JSON text, or an error message for the user.
    fn plan(&self, query: &[(String, String)], progress: &dyn Fn(String)) -> Result<String, String>;
    /// `GET /curve?…`: rmse against ε for the same problem.
    fn curve(&self, query: &[(String, String)], progress: &dyn Fn(String)) -> Result<String, String>;
    /// `GET /file?…`: the bytes of plan.safetensors.
    fn file(&self, query: &[(String, String)]) -> Result<Vec<u8>, String>;
}

/// A server that is bound, with its address, but does not answer yet.
pub struct Server {
    listener: TcpListener,
    port: u16,
    token: String,
}

impl Server {
    /// Binds to 127.0.0.1 and draws the token; port 0 takes any free one.
    ///
    /// Errors: the port is taken, or the operating system gave no random bytes.
    pub fn bind(port: u16) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
            .with_context(|| format!("port {port} of 127.0.0.1 cannot be used"))?;
        let port = listener.local_addr()?.port();
        Ok(Self { listener, port, token: secret()? })
    }

    /// The address of the page. It is secret: only requests that know it are answered.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/{}/", self.port, self.token)
    }

    /// Answers until the program ends, each connection in a thread of its own.
    pub fn serve(&self, planner: &dyn Planner, page: &str) {
        let site = Site {
            hosts: ["127.0.0.1", "localhost"].map(|name| format!("{name}:{}", self.port)),
            token: &self.token,
            planner,
            page,
            plan: WorkQueue::default(),
            curve: WorkQueue::default(),
        };
        let open = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for stream in self.listener.incoming() {
                let Ok(stream) = stream else {
                    // Out of file descriptors, most likely: connections that end give some back.
                    std::thread::sleep(Duration::from_millis(50));
                    continue;
                };
                let (site, stream) = (&site, Stream(stream));
                let slot = Slot(&open);
                let others = open.fetch_add(1, Ordering::SeqCst);
                if others >= 2 * CONNECTIONS {
                    continue;
                }
                let begun = std::thread::Builder::new().spawn_scoped(scope, move || {
                    let _slot = slot;
                    // A browser that has left needs no answer.
                    let _ = site.converse(&stream.0, others >= CONNECTIONS);
                });
                // Without a thread the connection is dropped, and with it closed.
                drop(begun);
            }
        });
    }
}

/// A place among the open connections.
struct Slot<'a>(&'a AtomicUsize);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A connection that ends properly when it goes out of scope.
struct Stream(TcpStream);

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// One kind of work, done one piece at a time. One question may wait: a newer one sends it away.
#[derive(Default)]
struct WorkQueue {
    queue: Mutex<Queue>,
    changed: Condvar,
    line: Mutex<Option<String>>,
}

#[derive(Default)]
struct Queue {
    newest: u64,
    busy: bool,
}

impl WorkQueue {
    fn ask(&self, answer: impl FnOnce(&dyn Fn(String)) -> Result<String, String>) -> Answer {
        let mut queue = locked(&self.queue);
        queue.newest += 1;
        let ticket = queue.newest;
        self.changed.notify_all();
        while queue.busy && queue.newest == ticket {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        if queue.newest != ticket {
            return Answer::failure(409, "overtaken", "a newer request replaced this one");
        }
        queue.busy = true;
        drop(queue);
        let answer = guarded(|| answer(&|line| *locked(&self.line) = Some(line)));
        *locked(&self.line) = None;
        locked(&self.queue).busy = false;
        self.changed.notify_all();
        match answer {
            Ok(body) => Answer::new(200, JSON, body),
            Err(failure) => failure,
        }
    }
}

/// A panic leaves nothing half done under these locks: what is behind them is set in one go.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The planner's answer. Should it panic, the terminal has the message, the page a hint to it.
fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, Answer> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(answer) => answer.map_err(|message| Answer::failure(400, "plan", &message)),
        Err(_) => {
            Err(Answer::failure(500, "internal", "the planner failed; see its terminal for the reason"))
        }
    }
}

const JSON: &str = "application/json";

/// Status, headers and body.
struct Answer {
    status: u16,
    kind: &'static str,
    policy: String,
    body: Vec<u8>,
}

impl Answer {
    fn new(status: u16, kind: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self { status, kind, policy: "default-src 'none'".into(), body: body.into() }
    }

    fn failure(status: u16, kind: &str, message: &str) -> Self {
        let body = json!({ "schema": 1, "error": { "kind": kind, "message": message } });
        Self::new(status, JSON, body.to_string())
    }

    /// The page with a nonce of its own: no other style or script runs, and nothing is loaded from anywhere.
    fn page(page: &str) -> Self {
        let Ok(nonce) = secret() else {
            return Self::failure(500, "internal", "the operating system gave no random bytes");
        };
        let mut answer = Self::new(200, "text/html; charset=utf-8", page.replace(NONCE, &nonce));
        answer.policy = format!(
            "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; \
             connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        );
        answer
    }

    fn write(&self, mut stream: &TcpStream) -> std::io::Result<()> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            409 => "Conflict",
            431 => "Request Header Fields Too Large",
            503 => "Service Unavailable",
            _ => "Internal Server Error",
        };
        let allow = if self.status == 405 { "Allow: GET\r\n" } else { "" };
        let head = format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\nContent-Security-Policy: {}\r\n\
             X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nCache-Control: no-store\r\n\
             Cross-Origin-Resource-Policy: same-origin\r\n{allow}Connection: close\r\n\r\n",
            self.status,
            self.kind,
            self.body.len(),
            self.policy,
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(&self.body)?;
        stream.flush()
    }
}

/// Everything that answers rest on.
struct Site<'a> {
    hosts: [String; 2],
    token: &'a str,
    planner: &'a dyn Planner,
    page: &'a str,
    plan: WorkQueue,
    curve: WorkQueue,
}

impl Site<'_> {
    fn converse(&self, stream: &TcpStream, full: bool) -> std::io::Result<()> {
        stream.set_write_timeout(Some(PATIENCE))?;
        let answer = match head(stream) {
            Ok(_) if full => Answer::failure(503, "busy", "too many connections at once"),
            Ok(head) => self.answer(&head).unwrap_or_else(|refusal| refusal),
            Err(Some(refusal)) => refusal,
            Err(None) => return Ok(()),
        };
        answer.write(stream)
    }

    fn answer(&self, head: &str) -> Result<Answer, Answer> {
        let malformed = || Answer::failure(400, "request", "this is not an HTTP/1.1 request");
        let mut lines = head.split("\r\n");
        let mut words = lines.next().unwrap_or_default().split(' ');
        let (Some(method), Some(target), Some("HTTP/1.1"), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(malformed());
        };
        let mut host = None;
        for line in lines {
            let (name, value) = line.split_once(':').ok_or_else(malformed)?;
            if name.eq_ignore_ascii_case("host") && host.replace(value.trim()).is_some() {
                return Err(malformed());
            }
        }
        // Another name that resolves to this machine would let a page from there read the answers.
        if !self.hosts.iter().any(|known| host.is_some_and(|host| host.eq_ignore_ascii_case(known))) {
            return Err(Answer::failure(
                403,
                "request",
                "the host is not 127.0.0.1 or localhost with this port",
            ));
        }
        if method != "GET" {
            return Err(Answer::failure(405, "request", "only GET is supported"));
        }
        let nothing = || Answer::failure(404, "request", "there is nothing at this address");
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let (token, path) =
            path.strip_prefix('/').and_then(|path| path.split_once('/')).ok_or_else(nothing)?;
        if !same(token, self.token) {
            return Err(nothing());
        }
        let query = || parse(query).ok_or_else(malformed);
        match path {
            "" => Ok(Answer::page(self.page)),
            "plan" => query().map(|query| self.plan.ask(|progress| self.planner.plan(&query, progress))),
            "curve" => query().map(|query| self.curve.ask(|progress| self.planner.curve(&query, progress))),
            "file" => guarded({
                let query = query()?;
                move || self.planner.file(&query)
            })
            .map(|bytes| Answer::new(200, "application/octet-stream", bytes)),
            "progress" => {
                let line = locked(&self.plan.line).clone().or_else(|| locked(&self.curve.line).clone());
                Ok(Answer::new(200, JSON, json!({ "line": line }).to_string()))
            }
            _ => Err(nothing()),
        }
    }
}

/// The head of a request, without its empty line; `Err(None)` where nothing was asked.
fn head(mut stream: &TcpStream) -> Result<String, Option<Answer>> {
    let end = Instant::now() + PATIENCE;
    let mut bytes = Vec::with_capacity(1 << 10);
    let mut chunk = [0; 1 << 10];
    loop {
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let read = stream.set_read_timeout(Some(left)).and_then(|()| stream.read(&mut chunk));
        match read {
            Ok(0) => return Err(None),
            Ok(count) => bytes.extend_from_slice(&chunk[..count]),
            Err(cause) if cause.kind() == ErrorKind::Interrupted => continue,
            // A connection that a browser opened to spare says nothing, and gets no answer.
            Err(_) if bytes.is_empty() => return Err(None),
            Err(_) => return Err(Some(Answer::failure(408, "request", "the request took too long"))),
        }
        if let Some(length) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            bytes.truncate(length);
            let head = String::from_utf8(bytes);
            return head.map_err(|_| Some(Answer::failure(400, "request", "the request is not text")));
        }
        if bytes.len() > HEAD {
            return Err(Some(Answer::failure(431, "request", "the request is longer than 8 KiB")));
        }
        if Instant::now() >= end {
            return Err(Some(Answer::failure(408, "request", "the request took too long")));
        }
    }
}

/// The fields of a query string; `None` if an escape is broken or the text is not UTF-8.
fn parse(query: &str) -> Option<Vec<(String, String)>> {
    let fields = query.split('&').filter(|field| !field.is_empty()).map(|field| {
        let (name, value) = field.split_once('=').unwrap_or((field, ""));
        Some((decoded(name)?, decoded(value)?))
    });
    fields.collect()
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut plain = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        plain.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || char::from(bytes.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(plain).ok()
}

/// Whether two texts are equal, in a time that depends on their lengths only.
fn same(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).fold(0, |sum, (x, y)| sum | (x ^ y)) == 0
}

/// 128 random bits in hexadecimal.
fn secret() -> anyhow::Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).context("the operating system gave no random bytes")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, mpsc};

    const PAGE: &str = "<style nonce=\"@NONCE@\"></style><script nonce=\"@NONCE@\"></script>";

    /// Repeats the query; `wait` holds a plan back until `go` is given.
    #[derive(Default)]
    struct Echo {
        go: Mutex<bool>,
        given: Condvar,
        begun: Mutex<Option<mpsc::Sender<()>>>,
    }

    impl Echo {
        fn held(&self) {
            if let Some(begun) = &*self.begun.lock().unwrap() {
                begun.send(()).unwrap();
            }
            let _open = self.given.wait_while(self.go.lock().unwrap(), |go| !*go).unwrap();
        }

        fn release(&self) {
            *self.go.lock().unwrap() = true;
            self.given.notify_all();
        }
    }

    impl Planner for Echo {
        fn plan(&self, query: &[(String, String)], progress: &dyn Fn(String)) -> Result<String, String> {
            progress("half way".into());
            match query.first().map(|(name, _)| name.as_str()) {
                Some("wait") => self.held(),
                Some("panic") => panic!("as asked"),
                Some("batch") => return Err(format!("batch {} is larger than the data", query[0].1)),
                _ => {}
            }
            Ok(json!({ "query": query }).to_string())
        }

        fn curve(&self, query: &[(String, String)], _: &dyn Fn(String)) -> Result<String, String> {
            Ok(json!({ "curve": query }).to_string())
        }

        fn file(&self, query: &[(String, String)]) -> Result<Vec<u8>, String> {
            if query.is_empty() { Err("no settings".into()) } else { Ok(vec![0, 255, 13, 10]) }
        }
    }

    struct Site {
        port: u16,
        token: String,
        planner: Arc<Echo>,
    }

    impl Site {
        fn new() -> Self {
            let server = Server::bind(0).unwrap();
            assert!(server.listener.local_addr().unwrap().ip().is_loopback());
            let (port, token) = (server.port, server.token.clone());
            assert_eq!(server.url(), format!("http://127.0.0.1:{port}/{token}/"));
            let planner = Arc::new(Echo::default());
            let theirs = planner.clone();
            std::thread::spawn(move || server.serve(&*theirs, PAGE));
            Self { port, token, planner }
        }

        fn connect(&self) -> TcpStream {
            let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
            stream
        }

        /// Status, head and body of the answer to raw bytes.
        fn send(&self, request: &[u8]) -> (u16, String, Vec<u8>) {
            let mut stream = self.connect();
            stream.write_all(request).unwrap();
            read(stream)
        }

        fn get(&self, path: &str) -> (u16, String, Vec<u8>) {
            let Self { port, token, .. } = self;
            self.send(format!("GET /{token}/{path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n").as_bytes())
        }

        fn json(&self, path: &str) -> (u16, serde_json::Value) {
            let (status, _, body) = self.get(path);
            (status, serde_json::from_slice(&body).unwrap())
        }
    }

    fn read(mut stream: TcpStream) -> (u16, String, Vec<u8>) {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let at = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        let body = bytes.split_off(at + 4);
        let head = String::from_utf8(bytes).unwrap();
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())));
        (head[9..12].parse().unwrap(), head, body)
    }

    #[test]
    fn the_page_comes_with_a_policy_of_its_own() {
        let site = Site::new();
        let (status, head, body) = site.get("");
        let body = String::from_utf8(body).unwrap();
        let nonce = body.split('"').nth(1).unwrap();
        assert_eq!((status, nonce.len()), (200, 32));
        assert_eq!(body, PAGE.replace(NONCE, nonce));
        for line in [
            &format!("default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "),
            "connect-src 'self'",
            "X-Content-Type-Options: nosniff\r\n",
            "Referrer-Policy: no-referrer\r\n",
            "Cache-Control: no-store\r\n",
        ] {
            assert!(head.contains(line), "{line} is not in {head}");
        }
        assert_ne!(String::from_utf8(site.get("").2).unwrap(), body, "a nonce is used once");
        assert_ne!(Site::new().token, site.token);
    }

    #[test]
    fn the_page_needs_nothing_from_elsewhere() {
        let page = include_str!("page.html");
        assert!(page.len() < 100_000);
        assert_eq!(page.matches(NONCE).count(), 2, "one style, one script");
        assert_eq!(page.matches("<script").count() + page.matches("<style").count(), 2);
        // The name of a vocabulary is no address: nothing is loaded from it.
        let links = page.replace("http://www.w3.org/2000/svg", "");
        assert!(
            ["http:", "https:", "src=", " style=", "@import", "url("]
                .iter()
                .all(|word| !links.contains(word))
        );
    }

    #[test]
    fn questions_reach_the_planner_decoded() {
        let site = Site::new();
        let (status, answer) = site.json("plan?a=1e-5&schedule=cosine%3A0&b=x+y%C3%A9&c&=&");
        let query = json!([["a", "1e-5"], ["schedule", "cosine:0"], ["b", "x yé"], ["c", ""], ["", ""]]);
        assert_eq!((status, answer), (200, json!({ "query": query })));
        assert_eq!(site.json("curve?a=1"), (200, json!({ "curve": [["a", "1"]] })));
        assert_eq!(site.get("file?a=1").2, [0, 255, 13, 10]);
        assert_eq!(site.json("progress"), (200, json!({ "line": null })));
        for query in ["a=%", "a=%4", "a=%zz", "a=%+1", "a=%ff"] {
            assert_eq!(site.json(&format!("plan?{query}")).0, 400, "{query}");
        }
    }

    #[test]
    fn failures_have_words() {
        let site = Site::new();
        let error =
            |kind: &str, message: &str| json!({ "schema": 1, "error": { "kind": kind, "message": message } });
        let large = "batch 9 is larger than the data";
        assert_eq!(site.json("plan?batch=9"), (400, error("plan", large)));
        assert_eq!(site.json("file"), (400, error("plan", "no settings")));
        let (status, answer) = site.json("plan?panic");
        assert_eq!((status, &answer["error"]["kind"]), (500, &json!("internal")));
        assert_eq!(site.json("progress").1["line"], json!(null));
        assert_eq!(site.json("plan").0, 200, "it goes on after a panic");
    }

    #[test]
    fn strangers_get_nothing() {
        let site = Site::new();
        let Site { port, token, .. } = &site;
        let ask = |target: &str, headers: &str| {
            site.send(format!("GET {target} HTTP/1.1\r\n{headers}\r\n").as_bytes()).0
        };
        let (page, here) = (format!("/{token}/"), format!("Host: 127.0.0.1:{port}\r\n"));
        assert_eq!(ask(&page, &here), 200);
        assert_eq!(ask(&page, &format!("hOST:LocalHost:{port} \r\nAccept: */*\r\n")), 200);
        for host in ["evil.example", "127.0.0.1", "127.0.0.1:1", &format!("evil.example:{port}"), "", "[::1]"]
        {
            assert_eq!(ask(&page, &format!("Host: {host}\r\n")), 403, "{host}");
        }
        assert_eq!(ask(&page, ""), 403);
        assert_eq!(ask(&page, &format!("{here}{here}")), 400);
        let longer = format!("/{token}0/");
        let other = format!("/{}/", "0".repeat(32));
        for target in
            ["/", "/plan", "//", &page[..page.len() - 1], &page[..8], &longer, &other, &format!("{page}x")]
        {
            assert_eq!(ask(target, &here), 404, "{target}");
        }
        assert_eq!(ask(&format!("http://127.0.0.1:{port}{page}"), &here), 404);
    }

    #[test]
    fn requests_are_bounded() {
        let site = Site::new();
        let Site { port, token, .. } = &site;
        let rest = format!("/{token}/ HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n");
        for method in ["POST", "HEAD", "OPTIONS", "get"] {
            let (status, head, _) = site.send(format!("{method} {rest}").as_bytes());
            assert_eq!((status, head.contains("Allow: GET")), (405, true), "{method}");
        }
        for request in [
            "\r\n\r\n",
            "GET\r\n\r\n",
            "GET / HTTP/1.0\r\n\r\n",
            "GET  / HTTP/1.1\r\n\r\n",
            "\u{16}\u{3}\r\n\r\n",
        ] {
            assert_eq!(site.send(request.as_bytes()).0, 400, "{request:?}");
        }
        assert_eq!(site.send(b"GET /\xff HTTP/1.1\r\n\r\n").0, 400);
        assert_eq!(site.send(&vec![b'a'; HEAD + 1]).0, 431);
        assert_eq!(site.send(b"GET / HT").0, 408);
    }

    #[test]
    fn too_many_connections_are_told_so() {
        let site = Site::new();
        let idle: Vec<_> = (0..CONNECTIONS).map(|_| site.connect()).collect();
        assert_eq!(site.json("progress").0, 503);
        drop(idle);
        // Forever, if connections that ended still counted.
        while site.json("progress").0 != 200 {}
    }

    #[test]
    fn the_newest_question_overtakes_those_that_wait() {
        let site = Site::new();
        let (begun, first) = mpsc::channel();
        *site.planner.begun.lock().unwrap() = Some(begun);
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| site.json("plan?wait"));
            first.recv().unwrap();
            assert_eq!(site.json("progress").1, json!({ "line": "half way" }));
            assert_eq!(site.json("curve?a=3").0, 200, "other work does not wait");
            // The two arrive in any order: the later one sends the earlier one away before the first is done.
            let (sent, answers) = mpsc::channel();
            for query in ["1", "2"] {
                let (site, sent) = (&site, sent.clone());
                scope.spawn(move || sent.send((query, site.json(&format!("plan?a={query}")))).unwrap());
            }
            let (gone, (status, _)) = answers.recv().unwrap();
            assert_eq!(status, 409);
            site.planner.release();
            assert_eq!(slow.join().unwrap().0, 200);
            let (stayed, answer) = answers.recv().unwrap();
            assert_ne!(stayed, gone);
            assert_eq!(answer, (200, json!({ "query": [["a", stayed]] })));
        });
    }

    #[test]
    fn the_newest_question_is_the_one_that_waits() {
        let work = WorkQueue::default();
        let (begun, first) = mpsc::channel();
        let (go, held) = mpsc::channel::<()>();
        let asked = |count: u64| {
            while locked(&work.queue).newest < count {
                std::thread::yield_now();
            }
        };
        let words = |text: &'static str| move |_: &dyn Fn(String)| Ok(text.to_owned());
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| {
                work.ask(move |_| {
                    begun.send(()).unwrap();
                    held.recv().unwrap();
                    Ok("slow".into())
                })
            });
            first.recv().unwrap();
            let older = scope.spawn(|| work.ask(words("older")));
            asked(2);
            let newer = scope.spawn(|| work.ask(words("newer")));
            assert_eq!(older.join().unwrap().status, 409);
            go.send(()).unwrap();
            assert_eq!(slow.join().unwrap().body, b"slow");
            assert_eq!(newer.join().unwrap().body, b"newer");
        });
    }
}
