"""What an adapter says where its framework is missing, too old or broken."""

import pathlib
import re
import subprocess
import sys

import pytest
from dpmf._requires import LEAST

#: Every adapter, what it needs, and how it is asked for.
ADAPTERS = {
    "dpmf.torch": (["torch"], "import dpmf.torch"),
    "dpmf.opacus": (["torch", "opacus"], "import dpmf.opacus"),
    "dpmf.transformers": (["torch", "transformers"], "import dpmf.transformers"),
    "dpmf.jax": (["jax", "optax"], "import dpmf.jax"),
    "dpmf.flower": (["flwr"], "import dpmf.flower"),
    "plot_error": (["matplotlib"], "import dpmf; dpmf.make_mechanism(dpmf.Workload.prefix_sum(4), 'tree').plot_error()"),
}

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = ROOT / "crates" / "dpmf-py" / "pyproject.toml"

CASES = [(who, name) for who, (needs, _) in ADAPTERS.items() for name in needs]


def last_line(who, preparation):
    """How a program with other modules than there are ends."""
    done = subprocess.run([sys.executable, "-c", f"{preparation}\n{ADAPTERS[who][1]}"], capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def present(name, version):
    return f"import sys, types; sys.modules[{name!r}] = types.ModuleType({name!r}); sys.modules[{name!r}].__version__ = {version!r}\n"


def remedy(who):
    return "pip install " + " ".join(f"'{name}>={LEAST[name]}'" for name in ADAPTERS[who][0])


@pytest.mark.parametrize("who, absent", CASES)
def test_what_is_missing_is_named_with_what_to_install(who, absent):
    others = "".join(present(name, LEAST[name]) for name in ADAPTERS[who][0] if name != absent)
    said = last_line(who, f"{others}import sys; sys.modules[{absent!r}] = None")
    assert said == f"ImportError: {who} needs {absent}, which is not installed: {remedy(who)}"


@pytest.mark.parametrize("who, old", CASES)
def test_what_is_too_old_is_named_with_what_to_install(who, old):
    others = "".join(present(name, LEAST[name]) for name in ADAPTERS[who][0] if name != old)
    said = last_line(who, others + present(old, "0.1.9+cpu"))
    assert said == f"ImportError: {who} needs {old} {LEAST[old]} or newer, but 0.1.9+cpu is installed: {remedy(who)}"


def test_a_framework_that_is_broken_speaks_for_itself(tmp_path):
    (tmp_path / "jax.py").write_text("import a_module_of_jax")
    said = last_line("dpmf.jax", f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    assert said == "ModuleNotFoundError: No module named 'a_module_of_jax'"


def test_the_oldest_versions_are_those_of_the_extras():
    extras = PROJECT.read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert dict(re.findall(r'"(\w+)>=([\d.]+)', extras)) == LEAST


def test_the_documentation_says_what_is_tested():
    pins = {}
    for file in sorted(pathlib.Path(__file__).parent.glob("requirements*.txt")):
        for name, version in re.findall(r"^([\w-]+)(?:\[\w+\])?==([\d.]+)", file.read_text(), re.MULTILINE):
            pins.setdefault(name, set()).add(version)
    # Debian's is not from an index of packages.
    pins["torch"] |= set(re.findall(r"^version=([\d.]+)\+", (ROOT / "scripts" / "setup-torch").read_text(), re.MULTILINE))
    least = {**LEAST, "numpy": re.search(r'"numpy>=([\d.]+)"', PROJECT.read_text())[1]}
    names = {"PyTorch": "torch", "Flower": "flwr"}
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d., ]+) \|$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    told = {names.get(name, name.lower()): (oldest, set(tested.split(", "))) for name, oldest, tested in rows}
    assert told == {name: (oldest, pins[name]) for name, oldest in least.items()}
