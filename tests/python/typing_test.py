"""The stubs say what the extension module does, and the package passes mypy --strict."""

import pathlib
import subprocess
import sys

import dpmf
import pytest

pytest.importorskip("mypy")
PACKAGE = pathlib.Path(dpmf.__file__).parent
CONFIG = pathlib.Path(__file__).parents[2] / "crates" / "dpmf-py" / "pyproject.toml"


def run(*arguments):
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_stubs_match_the_module():
    run("mypy.stubtest", "dpmf._core", "--mypy-config-file", str(CONFIG))


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
    files = [str(PACKAGE / name) for name in ("__init__.py", "_errors.py", "_plan.py", "_plot.py")]
    run("mypy", "--config-file", str(CONFIG), *files)
