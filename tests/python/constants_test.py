"""Numbers and places that Rust and Python share stand in Rust alone."""

import ast
import pathlib

import dpmf
from dpmf import _core, _plan


def test_no_module_states_again_what_the_core_says():
    shared = {name.lstrip("_") for name in vars(_core) if name.isupper()}
    assert {"BUFFERS", "PULL"} <= shared
    again = []
    for path in pathlib.Path(dpmf.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Name):
                again += [target.id for target in node.targets if isinstance(target, ast.Name) and target.id in shared]
    assert again == []
    assert (_plan.BUFFERS, _plan.NOISE_DECAY) == (_core._BUFFERS, _core._PULL)


def test_plans_are_kept_where_the_program_keeps_them(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _plan._folder(True) == tmp_path / "dpmf" / "plans"
    assert _plan._folder(False) is None and _plan._folder("here") == "here"
    monkeypatch.setenv("XDG_CACHE_HOME", "not-absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _plan._folder(True) == tmp_path / ".cache" / "dpmf" / "plans"
    monkeypatch.delenv("HOME")
    assert _plan._folder(True) is None
