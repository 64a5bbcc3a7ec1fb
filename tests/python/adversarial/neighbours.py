"""User scripts on neighbouring data: by how much does one record move what is released?

Every script is run on two sets of data that differ in one record, with the same noise. A record's gradient is the record itself,
ten times longer than the clip, and zero where the record is absent, so a release moves by what the record counts.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

#: A script keeps its promise if one record moves no release by more than this, in clips; single precision needs the rest.
ONE = 1 + 1e-5


@dataclasses.dataclass(frozen=True)
class Script:
    """A small program that somebody might write."""

    run: Callable[..., Any]
    refusal: str | None = None
    """What it is refused with; None for scripts that are right."""
    times: int = 1
    """Steps in which a record may take part."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the training that it is run with."""
    name: str = ""

    def __str__(self):
        return (self.name or self.run.__name__).replace("_", " ")


@dataclasses.dataclass
class Moved:
    """What one record moved: the largest release in clips, and how many of them."""

    most: float
    steps: int


def moved(released, absent, clip):
    """Compares the releases of two runs, one row a step; what is kept besides (buffers) must be the same."""
    (rows, kept), (others, kept_then) = released, absent
    if any(not np.array_equal(a, b) for a, b in zip(kept, kept_then, strict=True)):
        return Moved(math.inf, 0)
    rows, others = np.asarray(rows, float), np.asarray(others, float)
    assert rows.shape == others.shape, "neighbours take the same number of steps"
    moves = np.linalg.norm(rows - others, axis=1) / clip
    return Moved(float(moves.max(initial=0)), int((moves > 1e-6).sum()))


def judge(script, measure, accepted):
    """Runs a script with all checks: a record counts once, or the script is refused with its sentence."""
    if script.refusal is None:
        found = measure(script)
        # Less than that would be a test of nothing.
        assert 0.9 < found.most <= ONE and found.steps <= script.times, found
    else:
        with pytest.raises(accepted, match=script.refusal):
            found = measure(script)
            pytest.fail(f"it was not refused, and a record moved {found}")


def exceeding(scripts, measure):
    """The scripts in which a record moves a release by more than the clip, or moves too many of them, when nothing is checked."""
    names = []
    for script in scripts:
        try:
            found = measure(script)
        except Exception:  # it cannot even run
            continue
        if found.most > ONE or found.steps > script.times:
            names.append(str(script))
    return names
