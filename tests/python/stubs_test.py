"""The docstrings of the stub, which editors show, are those of the extension module, which help() shows.

    python tests/python/stubs_test.py --update    # write them into the stub
"""

import ast
import inspect
import pathlib
import sys

import dpmf
from dpmf import _core

STUB = pathlib.Path(dpmf.__file__).parent / "_core.pyi"


def documented(tree):
    """Every class, function, method and property of a stub that has a docstring at run time, with its name there."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node, (node.name,)
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                # What Python itself calls is documented by Python.
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("__"):
                    yield member, (node.name, member.name)


def at_run_time(name):
    thing = _core
    for part in name:
        thing = inspect.getattr_static(thing, part)
    # A static method has the docstring of its class until it is looked up.
    thing = thing.__func__ if isinstance(thing, staticmethod) else thing
    return inspect.cleandoc(thing.__doc__) if thing.__doc__ else None


def update(text):
    """The stub with the docstrings of the module."""
    lines = text.splitlines()
    for node, name in sorted(documented(ast.parse(text)), key=lambda found: -found[0].lineno):
        indent = " " * (node.col_offset + 4)
        said = at_run_time(name)
        quotes = 'r"""' if "\\" in said else '"""'
        inside = [f"{indent}{line}".rstrip() for line in f'{quotes}{said}'.splitlines()]
        inside = [*inside, f'{indent}"""'] if len(inside) > 1 else [f'{inside[0]}"""']
        first = node.body[0]
        if ast.get_docstring(node) is not None:
            lines[first.lineno - 1 : first.end_lineno] = inside
        elif isinstance(node, ast.ClassDef):
            at = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))]) - 1
            lines[at:at] = [*inside, ""]
        else:
            last = lines[first.lineno - 1]
            assert last.endswith(": ..."), f"{'.'.join(name)} has a body"
            lines[first.lineno - 1 : first.lineno] = [last.removesuffix(" ..."), *inside]
    return "\n".join(lines) + "\n"


def test_the_stub_has_the_docstrings_of_the_module():
    differing = [
        ".".join(name)
        for node, name in documented(ast.parse(STUB.read_text(encoding="utf-8")))
        if ast.get_docstring(node) != at_run_time(name)
    ]
    assert not differing, f"{', '.join(differing)}: python tests/python/stubs_test.py --update"


def test_everything_public_has_a_docstring():
    names = [name for _, name in documented(ast.parse(STUB.read_text(encoding="utf-8")))]
    assert len(names) > 100
    assert [".".join(name) for name in names if not at_run_time(name)] == []
    for name in dpmf.__all__:
        thing = getattr(dpmf, name)
        assert isinstance(thing, str) or inspect.getdoc(thing), name


def test_an_update_changes_nothing_that_is_right():
    text = STUB.read_text(encoding="utf-8")
    assert update(text) == text
    wrong = text.replace("Number of steps.", "Number of epochs.", 1)
    assert wrong != text and update(wrong) == text


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(__doc__)
    STUB.write_text(update(STUB.read_text(encoding="utf-8")), encoding="utf-8")
