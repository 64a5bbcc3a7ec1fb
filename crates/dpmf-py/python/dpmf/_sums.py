"""Sums in which one contribution counts for at most the clip, rounding included.

A contribution is clipped to the norm ζ' = s·ζ, a shade below the clip ζ: it is scaled in float64 to norm at most `target`
and rounded to the grid of `spacing`, on which float64 adds MOST contributions without error, in any order. The exact sum S
is pulled back to norm at most R = bound·ζ', should it be longer, and becomes the float32 array G = fl(S).

Guarantee: replacing one contribution with zero moves G by at most ζ. Pulling back to a ball brings no two points further
apart, and fl moves a point by at most 2⁻²⁴ of its norm, so G moves by at most ζ' + 2·2⁻²⁴·R = (1 − x)(1 + x)ζ for
s = 1 − x and x = 2⁻²³·bound; the x²ζ that is left covers float64.
"""

from __future__ import annotations

import math

#: Contributions that float64 adds on the grid without error.
MOST = 1 << 20


def check_clip(clip: float) -> None:
    """Refuses a clip whose sums leave the range of float32."""
    if not 1e-20 <= clip <= 1e20:
        raise ValueError(f"clip is {clip}, but it must lie between 1e-20 and 1e20")


def spacing(limit: float) -> float:
    """Distance between neighbours on the grid, a power of two: 2⁻³³ζ' to 2⁻³²ζ'."""
    return math.ldexp(1.0, math.frexp(limit)[1] - 33)


def target(limit: float, dimension: int) -> float:
    """The norm to scale to: rounding to the grid adds at most half a spacing in every coordinate, and the norm, a sum of
    `dimension` squares in float64 in any order, is off by at most 2⁻⁵³ of itself for each of them."""
    return limit * (1.0 - 2.0**-33 * math.sqrt(dimension) - 2.0**-53 * dimension - 2.0**-48)


def bound(cohort: float) -> int:
    """R/ζ' for a planned cohort: a power of two, from 2¹² on, where the shade is 0.05 %."""
    return min(max(1 << 12, 1 << max(math.ceil(math.log2(cohort)), 0)), MOST)


def limit(clip: float, bound: int) -> float:
    """ζ'."""
    return clip * (1.0 - 2.0**-23 * bound)
