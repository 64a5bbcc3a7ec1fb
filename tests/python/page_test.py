"""The page of `dpmf plan --page` and the reports of trainings, in Debian's Chromium through its WebDriver
(scripts/setup-chromium).

DPMF names the program. While the page is being worked on, DPMF_PAGE may name the address of a server that already runs.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

PROGRAM = os.environ["DPMF"]
KEYS = {"home": "\ue011", "end": "\ue010", "left": "\ue012", "right": "\ue014", "tab": "\ue004", "enter": "\ue007"}
#: What takes longer hangs.
SECONDS = 600
#: Settings whose plans take a moment: 80 steps. What the page opens with has 600.
SMALL = {"examples": "6000", "batch": "300", "epochs": "4"}
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the name that the standard gives to references


class Browser:
    """As much of the WebDriver protocol as this needs."""

    def __init__(self, driver, folder):
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
        flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        flags += ["--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}"]
        wanted = {
            "goog:chromeOptions": {"args": flags, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self.address = f"{driver}/session"
        self.address += "/" + self.call("", capabilities={"alwaysMatch": wanted})["sessionId"]
        self.downloads = folder / "downloads"
        self.devtools("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))

    def call(self, path, method="POST", **body):
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as failure:
            raise AssertionError(f"{path}: {failure.read().decode()}") from None

    def devtools(self, command, **parameters):
        return self.call("/goog/cdp/execute", cmd=command, params=parameters)

    def run(self, script, *arguments):
        return self.call("/execute/sync", script=script, args=arguments)

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def press(self, selector, keys):
        """Moves the focus, then presses keys, by name or letter."""
        self.run("document.querySelector(arguments[0]).focus()", selector)
        self.type(keys)

    def type(self, keys):
        """Presses keys wherever the focus is."""
        strokes = [{"type": way, "value": KEYS.get(key, key)} for key in keys for way in ("keyDown", "keyUp")]
        self.call("/actions", actions=[{"type": "key", "id": "keyboard", "actions": strokes}])

    def click(self, selector):
        element = self.call("/element", using="css selector", value=selector)[ELEMENT]
        self.call(f"/element/{element}/click")

    def wide(self, width, height=900):
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def until(self, script):
        """Waits for a script to return something true, and returns that."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if found := self.run(script):
                return found
            time.sleep(0.02)
        raise AssertionError(f"not within {SECONDS} s: {script}; the page says {self.text('#status')!r}")

    def settled(self):
        """Waits for the answer to what is set now: the headline and both charts."""
        return self.until(
            "return !document.querySelector('.stale') && document.querySelectorAll('figure svg').length == 2"
            " && /^Compared/.test(document.querySelector('#status').textContent)"
            " && document.querySelector('#headline').textContent"
        )

    def answer_to(self, act):
        """Does something and waits for the plan that answers it."""
        self.run(
            "window.arrived = false;"
            "new MutationObserver((_, watch) => { window.arrived = true; watch.disconnect(); })"
            ".observe(document.querySelector('#rows'), { childList: true });"
        )
        act()
        self.until("return window.arrived")
        self.settled()


def ended(process):
    process.terminate()
    process.wait(SECONDS)


def elsewhere(messages, address):
    """Of the browser's log, the addresses that a page asked for outside of its own; and whether it asked for a plan.

    A fresh profile opens pages of the browser itself, which ask for what they like: they are known by their scheme.
    """
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    asked = [p["request"]["url"] for p in sent if not p["documentURL"].startswith(("chrome", "devtools:"))]
    outside = [url for url in asked if not url.startswith((address, "blob:", "data:", "about:"))]
    return outside, any(url.startswith(f"{address}plan?") for url in asked)


def test_requests_are_told_apart():
    home = "http://127.0.0.1:9/token/"

    def request(document, url):
        return {"method": "Network.requestWillBeSent", "params": {"documentURL": document, "request": {"url": url}}}

    own = [request(home, f"{home}plan?epsilon=4"), request(home, "data:,"), {"method": "Page.loadEventFired", "params": {}}]
    browsers = [request("chrome://new-tab-page/", "https://example.org/logo"), request("chrome-untrusted://x/", "chrome://y")]
    assert elsewhere(own + browsers, home) == ([], True)
    assert elsewhere(browsers, home) == ([], False)
    for document in [home, "https://example.org/", "about:blank"]:
        assert elsewhere([request(document, "https://example.org/font")], home) == (["https://example.org/font"], False)
    assert elsewhere([request(home, "http://127.0.0.1:90/token/plan?")], home)[0]


@pytest.fixture(scope="module")
def address():
    """Where the page is, with the token that the program made."""
    if given := os.environ.get("DPMF_PAGE"):
        yield given
        return
    command = [PROGRAM, "plan", "--page", "--port", "0", "--no-open"]
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/\w+/", said)):
            line = program.stderr.readline()
            assert line, f"no address on standard error: {said!r}"
            said += line
        yield found[0]
    finally:
        ended(program)
        program.stderr.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        for line in driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                break
        page = Browser(f"http://127.0.0.1:{found[1]}", tmp_path_factory.mktemp("browser"))
        yield page
        page.call("", "DELETE")
    finally:
        ended(driver)
        driver.stdout.close()


@pytest.fixture
def settings():
    """What the page opens with."""
    return SMALL


@pytest.fixture
def page(browser, address, settings):
    """The page as it opens, on a desk; afterwards, nothing went wrong in it and nothing went elsewhere."""
    browser.call("/se/log", type="browser")
    browser.call("/se/log", type="performance")
    browser.wide(1280)
    browser.call("/url", url="about:blank")
    browser.call("/url", url=address + ("#" + urllib.parse.urlencode(settings) if settings else ""))
    browser.settled()
    browser.expected = []
    yield browser
    entries = browser.call("/se/log", type="browser")
    said = [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]
    said = [message for message in said if not message.startswith("chrome")]
    said = [message for message in said if not any(words in message for words in browser.expected)]
    assert not said, said
    messages = [json.loads(entry["message"])["message"] for entry in browser.call("/se/log", type="performance")]
    outside, planned = elsewhere(messages, address)
    assert not outside, outside
    assert planned, "the log of requests is empty"


def chosen(page):
    """Mechanism and batches, without the numbers, which differ anyway."""
    return page.text("tr.chosen th code"), page.text("tr.chosen td.words").split(":")[0]


@pytest.mark.parametrize("settings", [None], ids=["as it is"])
def test_opens_with_an_answer(page):
    assert re.search(r"× 0\.\d\d$", page.text("#headline"))
    assert page.run("return document.querySelectorAll('tr.chosen').length") == 1
    assert "DP-SGD" in page.text("tr.rivalrow")
    assert page.run("return document.querySelectorAll('#curve path.curve').length") == 3
    assert page.text("#statement").strip()


def test_another_epsilon_by_keyboard_chooses_another_mechanism(page):
    found = set()
    for key in ["home", "end"]:
        page.answer_to(lambda: page.press("#epsilon-slider", [key]))
        found.add(chosen(page))
    assert len(found) == 2, found
    assert page.run("return document.querySelector('#epsilon').value") == "32"
    page.answer_to(lambda: page.press("#epsilon-slider", ["left"]))
    assert float(page.run("return document.querySelector('#epsilon').value")) < 32


def test_the_chart_is_read_and_used_by_keyboard(page):
    page.press("#curve svg", ["home"])
    first = page.text("#curve .readout")
    page.press("#curve svg", ["right"])
    assert first.startswith("ε = ") and page.text("#curve .readout") != first
    page.answer_to(lambda: page.press("#curve svg", ["enter"]))
    epsilon = page.run("return document.querySelector('#epsilon').value")
    assert page.text("#curve .readout").startswith(f"ε = {epsilon}:") and epsilon != "4"


def test_a_late_answer_to_an_older_question_is_ignored(page):
    page.run(
        "const ask = fetch; let first = true; window.fetch = async (path, options) => {"
        "  if (!path.startsWith('plan') || !first) return ask(path, options);"
        "  first = false; window.asked = true; const answer = await ask(path); const body = await answer.text();"
        "  await new Promise(done => { window.release = done; }); return new Response(body, answer); }"
    )
    page.press("#epsilon-slider", ["home"])
    page.until("return window.asked")
    page.answer_to(lambda: page.press("#epsilon-slider", ["end"]))
    shown = page.text("#headline"), page.text("#rows")
    page.until("return Boolean(window.release)")
    # What the page would do with the answer, whose body is here already, it does within these turns.
    page.run(
        "window.turns = 0; window.release();"
        "const turn = () => { window.turns += 1; if (window.turns < 50) setTimeout(turn); }; setTimeout(turn);"
    )
    page.until("return window.turns == 50")
    assert (page.text("#headline"), page.text("#rows")) == shown


def test_wrong_numbers_get_a_message(page):
    before = page.text("#headline")
    for field, value, words in [
        ("batch", "7000", "larger than the data"),
        ("epsilon", "0", "above 0"),
        ("delta", "tiny", "not a number"),
        ("epochs", "1.5", "whole number"),
    ]:
        kept = page.run("return document.getElementById(arguments[0]).value", field)
        set_field(page, field, value)
        page.until("return document.querySelector('#deep').classList.contains('stale')")
        assert words in page.text(f"#{field}-wrong")
        assert page.run("return document.getElementById(arguments[0]).getAttribute('aria-invalid')", field) == "true"
        assert page.text("#headline") == before and "invalid" in page.text("#status")
        page.answer_to(lambda: set_field(page, field, kept))
        assert page.run("return document.querySelector('.wrong:not([hidden])')") is None


def test_what_the_program_refuses_is_said_beside_the_fields(page):
    before = page.text("#headline")
    set_field(page, "examples", "1e15")
    words = page.until("return document.querySelector('#problem:not([hidden])')?.textContent")
    assert len(words) > 10 and page.text("#headline") == before
    page.until("return document.querySelector('#deep').classList.contains('stale')")
    page.expected = ["status of 400"]
    page.answer_to(lambda: set_field(page, "examples", SMALL["examples"]))
    assert page.run("return document.querySelector('#problem').hidden")


def set_field(page, name, value):
    page.run("document.getElementById(arguments[0]).select()", name)
    page.press(f"#{name}", value)


def test_a_distrusted_sampler_changes_the_plan(page):
    page.answer_to(lambda: page.press("#sampling", " "))
    assert "any order" in page.text("#headline")
    assert "Left out" in page.text("#rows")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out(page, width):
    page.wide(width)
    for setting in ["examples=5000&batch=50&epochs=2", "examples=100000000&batch=5000000&delta=1e-12&momentum=0.95"]:
        page.answer_to(lambda: page.run("location.hash = arguments[0]", setting))
        assert page.run("return document.documentElement.scrollWidth") <= width
    page.click("#all")
    for tab in ["cli", "opacus", "jax", "flower"]:
        page.run("document.getElementById(arguments[0]).click()", f"tab-{tab}")
        assert page.run("return document.documentElement.scrollWidth") <= width


def test_tabs_go_by_arrow_keys(page):
    seen = []
    page.press("#tab-cli", ["home"])
    for _ in range(5):
        seen.append(page.run("return document.activeElement.id"))
        assert page.run("return document.activeElement.ariaSelected") == "true"
        assert page.run("return [...document.querySelectorAll('[role=tabpanel]:not([hidden])')].map(p => p.id)") == [
            seen[-1].replace("tab", "panel")
        ]
        page.press(f"#{seen[-1]}", ["right"])
    assert seen == ["tab-cli", "tab-opacus", "tab-jax", "tab-flower", "tab-cli"]


def test_everything_is_reached_by_the_tab_key_and_has_a_name(page):
    page.run("document.querySelector('#more').open = true; document.activeElement.blur()")
    reached = set()
    for _ in range(60):
        page.type(["tab"])
        reached.add(page.run("return document.activeElement.id || document.activeElement.textContent"))
    wanted = page.run("return [...document.querySelectorAll('form input, form select')].map(f => f.id)")
    more = [] if page.run("return document.querySelector('#all').hidden") else ["all"]
    assert reached >= {*wanted, *more, "save", "tab-cli"}, set(wanted) - reached
    tree = page.devtools("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "slider", "textbox", "checkbox", "switch", "combobox", "tab")
    controls = [node for node in tree if not node["ignored"] and node["role"]["value"] in roles]
    assert len(controls) > 20 and all(node["name"]["value"] for node in controls)


def test_a_reload_keeps_what_was_set(page):
    page.answer_to(lambda: set_field(page, "epochs", "5"))
    before = page.text("#headline")
    page.call("/refresh")
    assert page.settled() == before
    assert page.run("return document.querySelector('#epochs').value") == "5"


def test_the_saved_file_verifies(page):
    page.click("#save")
    file = page.downloads / "plan.safetensors"
    end = time.monotonic() + SECONDS
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert file.exists(), page.text("#status")
    done = subprocess.run([PROGRAM, "verify", str(file), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_another_budget_costs_one_question_and_few_fits(page):
    """A preset has at most 2000 steps, so that an answer to the slider is a few fits away; scripts/bench page has the seconds."""
    page.run(
        "window.fits = []; const ask = fetch; window.fetch = async (path, options) => {"
        "  const answer = await ask(path, options);"
        "  if (path.startsWith('plan')) window.fits.push((await answer.clone().json()).fits);"
        "  return answer; }"
    )
    for preset in (1, 3):
        page.answer_to(lambda: page.click(f"#presets button:nth-child({preset})"))
        assert int(re.match(r"[\d,]+", page.text("#pace"))[0].replace(",", "")) <= 2000
        page.run("window.fits = []")
        for moves in (1, 2):
            page.answer_to(lambda: page.press("#epsilon-slider", ["left"]))
            fits = page.run("return window.fits")
            assert len(fits) == moves and max(fits) <= 3, fits


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Addresses of the reports of a small training and a small sweep."""
    folder = tmp_path_factory.mktemp("reports")
    data = folder / "messages.csv"
    lines = [f"u{user},hello {['sun', 'moon', 'star'][user % 3]} {user % 7}" for user in range(700)]
    data.write_text("user,text\n" + "\n".join(lines) + "\n")
    small = ["--data", data, "--rounds", "40", "--clients", "10", "--embedding", "4", "--hidden", "8", "--projection", "0"]
    train = ["train", *small, "--mechanism", "optimal,honaker-online,independent,none", "--repeats", "2"]
    sweep = ["sweep", *small, "--mechanism", "optimal,none", "--epsilon", "2,8", "--server-lr", "0.2,0.5,1", "--repeats", "2"]
    found = {}
    for name, command in [("train", train), ("sweep", sweep)]:
        command = [PROGRAM, *map(str, command), "--out", str(folder / name), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        found[name] = f"file://{json.loads(done.stdout)['report']}"
    return found


OVERLAPS = """
const found = [];
for (const svg of document.querySelectorAll('svg')) {
  const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
  texts.forEach(([one, a], k) => texts.slice(0, k).forEach(([other, b]) => {
    // Boxes of letters have some air above and below.
    const air = 0.2 * Math.min(a.height, b.height);
    if (a.left < b.right && b.left < a.right && a.top + air < b.bottom && b.top + air < a.bottom) found.push([one, other]);
  }));
}
return found;
"""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["train", "sweep"])
def test_reports_fit_their_screens_in_light_and_dark(browser, reports, name, width):
    browser.wide(width)
    grounds = []
    for scheme in ["light", "dark"]:
        browser.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.call("/url", url=reports[name])
        browser.run("document.querySelectorAll('details').forEach(part => { part.open = true; })")
        assert browser.run("return document.scrollingElement.scrollWidth") <= width
        assert browser.run("return document.querySelectorAll('svg').length") >= 4
        cut = "return [...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert browser.run(cut) == 0
        letters = (
            "return Math.min(...[...document.querySelectorAll('svg text')].map(text =>"
            " parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a || Infinity))"
        )
        assert browser.run(letters) >= 9.5
        assert browser.run(OVERLAPS) == []
        grounds.append(browser.run("return getComputedStyle(document.body).backgroundColor"))
    browser.devtools("Emulation.setEmulatedMedia", features=[])
    assert grounds[0] == "rgb(255, 255, 255)" and grounds[1] != grounds[0]
