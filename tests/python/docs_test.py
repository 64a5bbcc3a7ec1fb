"""Every code block of the documentation runs, and prints what the page says it prints.

    python tests/python/docs_test.py docs/tutorial.md             # run a page
    python tests/python/docs_test.py --update docs/tutorial.md    # and write what it prints into it

The blocks of a page run in order, in an empty directory. `python` blocks share one namespace, `sh` blocks are for bash, a
block with a title is a file that a later block must use. A `text` block right after another is what that prints, with … for
anything, and with the exception in its last line if it raises one; after `<!-- numbers within 0.05 -->` its numbers may be
off by so much. `<!-- not run: why -->` before a block leaves it out.
"""

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WIDTH = 100
SECONDS = 900
WITHIN = re.compile(r"<!-- numbers within ([\d.]+) -->")
NUMBER = re.compile(r"\d+(?:\.\d+)?")

#: Everything that is shown and not run: page, language, reason.
NOT_RUN = [
    ("explanation/experiments.md", "sh", "takes most of an hour"),
    ("explanation/measured.md", "text", "measured on a quiet machine"),
    ("explanation/measured.md", "text", "measured on a quiet machine"),
    ("explanation/measured.md", "text", "measured on a quiet machine"),
    ("explanation/participation.md", "text", "a drawing"),
    ("how-to/accelerators.md", "sh", "needs an accelerator"),
    ("how-to/flower.md", "sh", "six processes that stay; a_deployment_on_loopback in flower_test.py runs them"),
    ("how-to/flower.md", "toml", "the configuration of the commands below"),
    (
        "how-to/large-models.md",
        "python",
        "some processors without bfloat16 compute it slowly, or not at all; tests/python/torch_masters_test.py runs it",
    ),
    ("how-to/large-models.md", "python", "two lines of a script of Opacus; the tests of dpmf.opacus run them"),
    ("how-to/opacus.md", "diff", "a difference between two scripts; the one it leads to follows"),
    ("how-to/plan.md", "sh", "takes a while; the command's own tests run it"),
    ("how-to/transformers.md", "diff", "a difference between two scripts; the one it leads to follows"),
    ("index.md", "sh", "builds the package; scripts/wheel tests what it builds"),
]


@dataclasses.dataclass
class Block:
    line: int
    """The line of its first fence, from 1."""
    language: str
    title: str | None
    code: str
    reason: str | None
    indent: str = ""
    within: float | None = None
    """How far off the numbers may be, of a block that shows what another prints."""
    shown: "Block | None" = None
    """What it should print."""

    @property
    def runs(self):
        return self.reason is None and self.title is None and self.language in ("python", "sh")


def blocks(text):
    """The fenced blocks of a page, what they print joined to them."""
    found, lines = [], text.splitlines()
    number, before, last = 0, "", None
    while number < len(lines):
        fence = re.match(r"(\s*)(`{3,})\s*([\w+-]*)(.*)", lines[number])
        if not fence:
            before = lines[number] if lines[number].strip() else before
            # What a block prints comes right after it.
            last = last if not lines[number].strip() or WITHIN.search(lines[number]) else None
            number += 1
            continue
        indent, ticks, language, attributes = fence.groups()
        end = next((n for n in range(number + 1, len(lines)) if lines[n].strip() == ticks), None)
        if end is None:
            raise ValueError(f"line {number + 1}: the block has no end")
        reason = re.search(r"<!-- not run: (.+?) -->", before)
        within = WITHIN.search(before)
        title = re.search(r'title="([^"]+)"', attributes)
        block = Block(
            line=number + 1,
            language=language,
            title=title and title[1],
            code="".join(line.removeprefix(indent) + "\n" for line in lines[number + 1 : end]),
            reason=reason and reason[1],
            indent=indent,
            within=within and float(within[1]),
        )
        if language == "text" and last is not None and last.runs and reason is None:
            last.shown, last = block, None
        else:
            found.append(block)
            last = block
        before, number = "", end + 1
    return found


def check(found):
    """Every block runs, is used by one that does, or says why not."""
    for number, block in enumerate(found):
        if block.runs or block.reason is not None:
            continue
        if block.title is None:
            raise ValueError(
                f"line {block.line}: a {block.language or 'nameless'} block is neither run nor the output of one; give it a "
                "title to make it a file, or say <!-- not run: why --> before it"
            )
        name = pathlib.PurePath(block.title).stem
        # By a block that runs, or by a later file, which is used in turn.
        if not any((later.runs or later.title) and name in later.code for later in found[number + 1 :]):
            raise ValueError(f"line {block.line}: no block uses the file {block.title}")


def front_matter(text, name, default):
    head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    value = head and re.search(rf"^{name}: *(.+)$", head[1], re.MULTILINE)
    return value[1].strip() if value else default


def execute(page, directory):
    """Runs the blocks of a page in this process; yields each with what it printed and the traceback if it raised."""
    os.chdir(directory)
    namespace = {"__name__": "__main__"}
    programs = [str(pathlib.Path(sys.executable).parent)]
    if "DPMF" in os.environ:
        (directory / ".bin").mkdir()
        (directory / ".bin" / "dpmf").symlink_to(pathlib.Path(os.environ["DPMF"]).resolve())
        programs.insert(0, str(directory / ".bin"))
    os.environ["PATH"] = os.pathsep.join([*programs, os.environ["PATH"]])
    os.environ["XDG_CACHE_HOME"] = str(directory / ".cache")
    for block in blocks(page.read_text()):
        printed, fault = "", None
        if block.reason is None and block.title is not None:
            path = directory / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code)
        elif block.runs and block.language == "sh":
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", block.code], capture_output=True, text=True)
            printed = done.stdout
            if done.returncode != 0:
                # As a shell shows it: what a command says on failure is on the other stream.
                printed += done.stderr
                fault = f"exit status {done.returncode}\n{done.stderr}"
        elif block.runs:
            captured = io.StringIO()
            try:
                with contextlib.redirect_stdout(captured):
                    # Blank lines before, so that a traceback shows the lines of the page.
                    exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)
            except Exception as raised:
                fault = traceback.format_exc()
                name = type(raised).__qualname__
                module = type(raised).__module__
                words = f"{name if module == 'builtins' else public_name(module, name)}: {raised}"
                captured.write("\n".join(textwrap.wrap(words, WIDTH, break_long_words=False)) + "\n")
            printed = captured.getvalue()
        yield block, printed, fault


def public_name(module, name):
    """The exceptions of dpmf are known by the package."""
    return f"dpmf.{name}" if module.split(".")[0] == "dpmf" else f"{module}.{name}"


def same(shown, printed, within=None):
    """Whether a text is as shown, but for white space, the length of rules, … in it, and numbers that are close."""
    if within is not None:
        pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed))
        close = all(abs(float(a) - float(b)) <= within for a, b in pairs)
        return close and same(NUMBER.sub("#", shown), NUMBER.sub("#", printed))
    shown, rest = (re.sub("─+", "─", " ".join(text.split())) for text in (shown, printed))
    pieces = shown.split("…")
    first, *others = pieces
    if not others:
        return rest == first
    if not rest.startswith(first):
        return False
    rest = rest[len(first) :]
    *middle, last = others
    for piece in middle:
        at = rest.find(piece)
        if at < 0:
            return False
        rest = rest[at + len(piece) :]
    return rest.endswith(last)


def faults(page, directory):
    """What is wrong with a page, in words."""
    text = page.read_text()
    try:
        check(blocks(text))
    except ValueError as wrong:
        return [f"{page}: {wrong}"]
    found = []
    for block, printed, fault in execute(page, directory):
        place = f"{page}:{block.line}"
        if block.shown is None and fault is not None:
            found.append(f"{place} fails\n{fault}")
            break
        if block.shown is not None and not same(block.shown.code, printed, block.shown.within):
            found.append(f"{place} should print\n{block.shown.code}\nand prints\n{printed}\n{fault or ''}")
            if fault is not None:
                break
    return found


def run_apart(page, directory, seconds=SECONDS):
    """The faults of a page, run in a process of its own, with whatever that starts, and a time limit."""
    report = directory.with_name(directory.name + ".json")
    directory.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, __file__, "--report", report, "--directory", directory, page],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return [f"{page} took more than {seconds} s"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return json.loads(report.read_text()) if report.exists() else [f"{page} ended early\n{said}"]


def update(page, directory):
    """Writes what the blocks print into a page, where it differs from what is shown."""
    lines = page.read_text().splitlines()
    for block, printed, fault in reversed(list(execute(page, directory))):
        if block.shown is None:
            if fault is not None:
                print(f"{page}:{block.line} fails\n{fault}", file=sys.stderr)
        elif not same(block.shown.code, printed, block.shown.within):
            shown, length = block.shown, block.shown.code.count("\n")
            new = [(shown.indent + line).rstrip() for line in printed.rstrip().splitlines()]
            lines[shown.line : shown.line + length] = new
    page.write_text("\n".join(lines) + "\n")


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["--report"]:
        report, directory, page = (pathlib.Path(argument) for argument in arguments[1::2][:2] + arguments[-1:])
        found = faults(page, directory)
        report.write_text(json.dumps(found))
        # Frameworks leave threads behind that may not end.
        os._exit(0)
    for name in [argument for argument in arguments if argument != "--update"]:
        page, directory = pathlib.Path(name).resolve(), pathlib.Path(tempfile.mkdtemp())
        try:
            if "--update" in arguments:
                update(page, directory)
            else:
                found = faults(page, directory)
                print("\n".join(found) or f"{page}: all blocks run")
        finally:
            os.chdir(ROOT)
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
    sys.exit()

import pytest  # noqa: E402 (a page runs without it)

PAGES = sorted(DOCS.rglob("*.md"))
ENVIRONMENTS = ("core", "frameworks", "torch")


def environment_of(page):
    return front_matter(page.read_text(), "environment", "core")


def environments_here():
    """The one that is named, or else those whose packages are here."""
    if named := os.environ.get("DOCS_ENVIRONMENT"):
        return {named}
    packages = {"torch": "torch", "frameworks": "flwr"}
    found = {name for name, package in packages.items() if importlib.util.find_spec(package) is not None}
    return found or {"core"}


HERE = [page for page in PAGES if environment_of(page) in environments_here()]


@pytest.mark.parametrize("page", HERE, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_blocks_of_a_page_run(page, tmp_path):
    assert "DPMF" in os.environ, "set DPMF to the program, as scripts/test does"
    found = run_apart(page, tmp_path / "page")
    assert not found, "\n".join(found)


def test_every_page_belongs_to_an_environment():
    assert {environment_of(page) for page in PAGES} == set(ENVIRONMENTS)
    assert environments_here() <= set(ENVIRONMENTS)


def test_nothing_is_left_out_in_silence():
    left_out = [
        (str(page.relative_to(DOCS)), block.language, block.reason)
        for page in PAGES
        for block in blocks(page.read_text())
        if block.reason is not None
    ]
    assert sorted(left_out) == sorted(NOT_RUN)


@pytest.mark.parametrize(
    "text, fault",
    [
        ("```python\nraise ValueError('no')\n```\n", "ValueError: no"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "should print"),
        ("```python\nprint(1)\n```\n```text\n1\nValueError: no\n```\n", "should print"),
        ("```python\nprint(0.71, 3)\n```\n<!-- numbers within 0.1 -->\n```text\n0.6 3\n```\n", "should print"),
        ("```python\nprint(0.71)\n```\n<!-- numbers within 0.1 -->\n```text\n0.7 3\n```\n", "should print"),
        ("```sh\necho a; false; echo b\n```\n", "exit status 1"),
        ("```sh\necho hello\n```\n```text\nhello …you\n```\n", "should print"),
        ("```python\nundefined\n```\n```text\nNameError: name 'defined'…\n```\n", "should print"),
        ("```toml\na = 1\n```\n", "neither run"),
        ("```text\na result\n```\n", "neither run"),
        ('```python title="unused.py"\n1 / 0\n```\n', "no block uses"),
        ('```python title="used.py"\n1 / 0\n```\n```sh\npython used.py\n```\n', "ZeroDivisionError"),
        ("```python\nx = 1\n```\nand\n```python\nassert x == 2\n```\n", "AssertionError"),
        ("- a list\n\n    ```python\n    1 / 0\n    ```\n", "ZeroDivisionError"),
        ("```python\nimport time\ntime.sleep(60)\n```\n", "took more than"),
        ("```python\n", "no end"),
    ],
)
def test_a_broken_block_fails(text, fault, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    found = run_apart(page, tmp_path / "directory", seconds=2 if fault == "took more than" else SECONDS)
    assert len(found) == 1 and fault in found[0], found


def test_a_sound_page_passes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        '---\nenvironment: torch\n---\n```python\nx = 2\nprint(x,\n 3.14159)\n```\n\n```text\n2 3.14…\n```\n'
        '```python title="file.py"\nprint(5)\n```\n```sh\npython file.py\n```\n```text\n5\n```\n'
        "```python\nprint(0.69, 'b')\n```\n<!-- numbers within 0.1 -->\n```text\n0.7 b\n```\n"
        "```python\nprint(x)\n1 / 0\n```\n```text\n2\nZeroDivisionError: division by zero\n```\n"
        "<!-- not run: no such language -->\n```cobol\nSTOP RUN.\n```\n"
    )
    assert environment_of(page) == "torch"
    assert run_apart(page, tmp_path / "directory") == []


@pytest.mark.parametrize("path", ["README.md", "crates/dpmf-py/README.md"])
def test_the_python_of_the_readmes_runs(path, tmp_path):
    text = (ROOT / path).read_text()
    found = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    # Indented blocks, as far as the last line that belongs to them.
    found += [textwrap.dedent(block) for block in re.findall(r"(?<=\n\n)(    import dpmf\n(?:(?:    .*)?\n)+)", text)]
    assert found, f"{path} has no Python"
    for code in found:
        given = "import numpy\ngradient = numpy.zeros(1000, numpy.float32)\n"
        subprocess.run([sys.executable, "-c", given + code], cwd=tmp_path, check=True, timeout=SECONDS)


def links(text):
    """Relative links of a page, with text or pictures, in Markdown or HTML; what is shown as code is none."""
    text = re.sub(r"^```.*?^```|^(?: {4}|\t).*?$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\]\(([^)\s]+)(?: [^)]*)?\)", text) + re.findall(r"""(?:href|src)=["']([^"']+)["']""", text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(text):
    """Anchors of the headings, as GitHub and MkDocs make them, and those that are written out."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = set(re.findall(r"^#+ .*\{ *#([\w-]+) *\}\s*$", text, re.MULTILINE))
    for line in re.findall(r"^#+ (.*?)(?:\{.*\})?\s*$", text, re.MULTILINE):
        words = re.sub(r"[^\w -]", "", line.lower()).strip()
        found |= {words.replace(" ", "-"), re.sub(r"[\s-]+", "-", words)}
    return found


def broken_links(page):
    for link in links(page.read_text()):
        target, _, anchor = link.partition("#")
        target = page.parent / target if target else page
        if not target.exists():
            yield link
        # Anchors of the reference are those of names; the builder of the site checks them.
        elif anchor and target.suffix == ".md" and "\n::: " not in target.read_text() and anchor not in anchors(target.read_text()):
            yield link


LINKED = sorted({*ROOT.glob("*.md"), *ROOT.glob("crates/*/README.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob(".github/**/*.md"), *PAGES})


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page):
    assert not list(broken_links(page))


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# A page\n\n## Two *words*\n\n## Named { #short }\n")
    page = tmp_path / "page.md"
    sound = "[a](there.md) [b](there.md#two-words) ![c](there.md) [d](there.md#short) [e](#top) `[f](no.md)` [g](https://no)"
    page.write_text(f"# Top\n\n{sound}\n\n```text\n[h](no.md)\n```\n")
    assert list(broken_links(page)) == []
    broken = ["no.md", "there.md#three", "#bottom", "no.svg"]
    page.write_text(f"# Top\n\n{sound} [i](no.md) [j](there.md#three) [k](#bottom) <img src='no.svg'>\n")
    assert list(broken_links(page)) == broken


def commands(program, *path):
    """The commands of the program, with theirs."""
    said = subprocess.run([program, *path, "--help"], capture_output=True, text=True, check=True).stdout
    listed = re.search(r"^Commands:\n(.*?)(?:\n\n|\Z)", said, re.DOTALL | re.MULTILINE)
    names = re.findall(r"^  ([a-z]+) ", listed[1], re.MULTILINE) if listed else []
    yield " ".join(["dpmf", *path])
    for name in names:
        if name != "help":
            yield from commands(program, *path, name)


def test_every_command_is_in_the_reference():
    shown = re.findall(r"^(dpmf.*) --help$", (DOCS / "reference" / "cli.md").read_text(), re.MULTILINE)
    assert shown == list(commands(os.environ["DPMF"]))


def test_every_figure_is_shown_with_its_command():
    text = "".join(page.read_text() for page in PAGES)
    for figure in sorted((DOCS / "figures").iterdir()):
        assert figure.stat().st_size < 300_000
        assert f"figures/{figure.name}" in text
        # Measured ones are drawn from numbers that are kept beside them.
        if figure.with_suffix(".json").exists():
            assert figure.with_suffix(".svg").exists()
            command = f"epochs.py --redraw docs/figures/{re.escape(figure.stem)}.json<"
        else:
            command = rf"dpmf (plot|audit) [^<]*-o docs/figures/{re.escape(figure.name)}<"
        assert re.search(command, text), figure.name


def test_the_oldest_rust_is_the_one_that_is_tested():
    oldest = re.search(r'^rust-version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
    tested = re.search(r'^channel = "(.*)"', (ROOT / "rust-toolchain.toml").read_text(), re.MULTILINE)[1]
    assert tested == oldest or tested.startswith(f"{oldest}.")


def test_one_version_stands_everywhere():
    manifest = (ROOT / "Cargo.toml").read_text()
    version = re.search(r'^version = "(.*)"', manifest, re.MULTILINE)[1]
    assert re.findall(r'^dpmf.* version = "(.*?)"', manifest, re.MULTILINE) == [version, version]
    for lock in ("Cargo.lock", "fuzz/Cargo.lock"):
        locked = re.findall(r'^name = "dpmf[a-z-]*"\nversion = "(.*)"', (ROOT / lock).read_text(), re.MULTILINE)
        assert set(locked) - {"0.0.0"} == {version}, lock
    assert re.search(r"^version: (.*)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == version
    assert re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


def test_every_form_and_its_tensors_are_on_the_page_of_the_file():
    page = (DOCS / "reference" / "mechanism-file.md").read_text()
    shown = {name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}
    # A row may abbreviate: `blt.weights`, `.decays`.
    ends = {name.rpartition(".")[2] for name in shown} | ({"left", "right"} if "`.recurrence.…`" in page else set())
    kinds = 0
    for source in sorted((ROOT / "crates" / "dpmf" / "src" / "form").rglob("*.rs")):
        text = source.read_text()
        for kind in re.findall(r'^pub\(super\) const KIND: &str = "(.*)";', text, re.MULTILINE):
            kinds += 1
            assert f'`"{kind}"`' in page, kind
        for tensor in re.findall(r'^const [A-Z_]+: &str = "([a-z_]+(?:\.[a-z_]+)+)";', text, re.MULTILINE):
            assert tensor.rpartition(".")[2] in ends and any(name.split(".")[0] == tensor.split(".")[0] for name in shown), tensor
    assert kinds >= 8


def test_the_reference_is_whole():
    import inspect

    import dpmf

    listed = re.findall(r"^::: dpmf\.(\w+)$", (DOCS / "reference" / "dpmf.md").read_text(), re.MULTILINE)
    assert sorted([*listed, "__version__"]) == sorted(dpmf.__all__)
    for name in listed:
        thing = getattr(dpmf, name)
        members = vars(thing).items() if inspect.isclass(thing) else ()
        undocumented = [member for member, value in members if member[0] != "_" and callable(value) and not inspect.getdoc(value)]
        assert inspect.getdoc(thing) and not undocumented, (name, undocumented)
