"""How far one record, or one user, moves what goes to the noise: the same script on neighbours, in clips."""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

#: What a move may be beyond the clip.
TOLERANCE = 1e-9


@dataclass
class Outcome:
    """What a script gave to the noise, as real numbers: (step, place) and a vector; and why it was refused, if it was."""

    given: list = field(default_factory=list)
    refusal: str | None = None


@dataclass
class Script:
    """A script that users write, or what a client does."""

    run: object
    refusal: str | None
    """What it is told, a regular expression; None for one that is right."""
    exposed: bool
    """Whether it exceeds the clip where nothing is checked."""

    @property
    def name(self):
        return self.run.__name__


def collection():
    """A list of scripts, and the decorator that adds to it."""
    scripts = []

    def script(refusal=None, *, exposed=False):
        def add(run):
            scripts.append(Script(run, refusal, exposed))
            return run

        return add

    return scripts, script


def clips_moved(one, other, clip, may):
    """By how many clips the worst step of two outcomes moves, beyond what the unit may there: 1 is the most that is right.

    may(step) says whether the unit takes part in a step; where it does not, nothing may move. A row of noise that is used with two
    inputs, or in one of the outcomes only, is infinitely many.
    """
    vectors, others = dict(one.given), dict(other.given)
    if vectors.keys() != others.keys() or any(len(set(dict(o.given))) != len(o.given) for o in (one, other)):
        return math.inf
    squares = {}
    for place, vector in vectors.items():
        a, b = np.asarray(vector, np.float64).tolist(), np.asarray(others[place], np.float64).tolist()
        moved = sum((Fraction(x) - Fraction(y)) ** 2 for x, y in zip(a, b, strict=True))
        squares[place[0]] = squares.get(place[0], 0) + moved
    over = [math.sqrt(moved) / clip + (0 if may(step) else moved > 0) for step, moved in squares.items()]
    return max(over, default=0.0)
