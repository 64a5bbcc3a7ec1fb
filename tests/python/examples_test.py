"""The examples run as they are written."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "python"


def run(*arguments):
    done = subprocess.run([sys.executable, *arguments], cwd=EXAMPLES, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plan_and_inspect():
    printed = run("plan_and_inspect.py")
    assert "(8, 1e-6)-differential privacy for every record" in printed
    assert float(re.search(r"lower bound for every mechanism: ([\d.]+)", printed)[1]) < 1.0002
    assert float(re.search(r"first two rows: ([+-][\d.]+)", printed)[1]) < -0.1


def test_streaming_counts():
    printed = run("streaming_counts.py", "3")
    rms, expected = map(float, re.search(r"hours: ([\d.]+), expected ([\d.]+)", printed).groups())
    # One draw of noise whose totals are strongly correlated: within a factor of two.
    assert expected / 2 < rms < 2 * expected
    rows = [line.split() for line in printed.splitlines() if "±" in line]
    assert len(rows) == 6
    for _, total, released, _, ours, _, theirs in rows:
        assert abs(float(released) - float(total)) < 5 * float(ours)
    # Fresh noise every hour adds up; ours does not.
    assert float(rows[-1][6]) > 5 * float(rows[-1][4])


def test_trainer_text(tmp_path):
    pytest.importorskip("transformers", reason="Transformers is not installed: scripts/setup-frameworks has it")
    options = ("--accounts", "400", "--epochs", "2", "--batch-size", "40", "--output", str(tmp_path / "model"))
    printed = run("trainer_text.py", *options)
    before, after = map(float, re.search(r"accounts: ([\d.]+) before, ([\d.]+) after", printed).groups())
    assert after < 0.8 * before
    assert "-differential privacy for every record" in (tmp_path / "model" / "privacy.txt").read_text()


def test_lora_text(tmp_path):
    pytest.importorskip("peft", reason="PEFT is not installed: scripts/setup-frameworks has it")
    options = ("--accounts", "800", "--epochs", "2", "--batch-size", "40", "--epsilon", "8", "--output", str(tmp_path))
    printed = run("lora_text.py", *options)
    before, after = map(float, re.search(r"accounts: ([\d.]+) before, ([\d.]+) after", printed).groups())
    assert after < before
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
    assert (tmp_path / "merged" / "model.safetensors").exists()
