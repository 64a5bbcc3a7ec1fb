"""The stubs say what the extension module does, and the package passes mypy --strict."""

import importlib.util
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


@pytest.mark.parametrize(
    "library, files",
    [
        (None, ["__init__.py", "_checks.py", "_disk.py", "_errors.py", "_optimizers.py", "_plan.py", "_plot.py", "_sums.py"]),
        ("optax", ["jax.py", "_jax_data.py", "_jax_layout.py", "_jax_sums.py"]),
        ("flwr", ["flower.py", "_flower_clients.py"]),
    ],
)
def test_the_package_is_typed(library, files):
    assert (PACKAGE / "py.typed").exists()
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed here: checked in the environment that has it")
    run("mypy", "--config-file", str(CONFIG), *(str(PACKAGE / name) for name in files))
