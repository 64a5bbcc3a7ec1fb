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


def there(library):
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def test_stubs_match_the_module():
    run("mypy.stubtest", "dpmf._core", "--mypy-config-file", str(CONFIG))


@pytest.mark.parametrize(
    "library, files",
    [
        (
            None,
            [
                "__init__.py",
                "_announce.py",
                "_checks.py",
                "_disk.py",
                "_errors.py",
                "_optimizers.py",
                "_plan.py",
                "_plot.py",
                "_progress.py",
                "_remedies.py",
                "_requires.py",
            ],
        ),
        ("optax", ["jax"]),
        ("flwr", ["flower"]),
        ("torch.func", ["torch"]),
        ("opacus", ["opacus.py"]),
        ("transformers", ["transformers.py"]),
    ],
)
def test_the_package_is_typed(library, files):
    assert (PACKAGE / "py.typed").exists()
    if library is not None and not there(library):
        pytest.skip(f"{library} is not installed here: checked in the environment that has it")
    run("mypy", "--config-file", str(CONFIG), *(str(PACKAGE / name) for name in files))


#: Calls that mypy lets pass.
RIGHT = """
import pathlib
import dpmf

mechanism = dpmf.mechanism(steps=8, epsilon=1, delta=1e-5, unit="user", adjacency="add-or-remove", accountant="rdp", progress=False)
key = dpmf.NoiseKey.read(pathlib.Path("key"))
optimum = dpmf.factorize(mechanism.workload, solver="dense", iteration="plain", progress=lambda told: told.stage == "solving")
dpmf.factorize(mechanism.workload, solver=optimum.solver)
stream = dpmf.NoiseStream(mechanism, key, dimension=4, output="iterate", arithmetic="float")
dpmf.NoiseStream(mechanism, key, dimension=4, arithmetic=stream.arithmetic)
mechanism.save("a path")
assert mechanism.privacy is not None
mechanism.with_noise(1.0, 1e-5, unit=mechanism.privacy.unit, accountant=mechanism.privacy.accountant)
"""

#: Calls with a word that is none of the choices, each of which mypy refuses.
WRONG = """
dpmf.mechanism(steps=8, epsilon=1, delta=1e-5, unit="users")
dpmf.mechanism(steps=8, epsilon=1, delta=1e-5, accountant="prv")
dpmf.plan(examples=9, batch=3, epochs=1, epsilon=1, delta=1e-5, sampling="poisson")
dpmf.factorize(mechanism.workload, solver="fast")
dpmf.factorize(mechanism.workload, iteration="newton")
dpmf.factorize(mechanism.workload, progress="yes")
dpmf.NoiseStream(mechanism, key, dimension=4, arithmetic="double")
dpmf.NoiseStream(mechanism, key, dimension=4, output="gradients")
mechanism.calibrate(1.0, 1e-5, adjacency="replace")
dpmf.account(1.0, 1e-5, adjacency="add_or_remove")
dpmf.audit(mechanism, adversary="worst")
mechanism.form == "state_space"
mechanism.save(3)
"""


def test_a_word_that_is_no_choice_is_an_error_of_types(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(RIGHT + WRONG)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--strict-equality", str(program)], capture_output=True, text=True
    )
    refused = {int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line}
    first = len(RIGHT.splitlines()) + 1
    assert refused == {first + number for number in range(1, len(WRONG.splitlines()))}, checked.stdout
