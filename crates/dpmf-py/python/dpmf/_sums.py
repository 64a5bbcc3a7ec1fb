"""Sums in which one contribution counts for at most the clip, as real numbers.

A contribution is scaled in float64 to norm at most `target`, a hair below the clip ζ, and rounded to the grid of `spacing`:
its norm is then at most ζ. Float64 adds MOST contributions on the grid without error, in any order.

Guarantee: replacing one contribution with zero moves the sum by at most ζ, exactly. The sum goes to the noise in float64, as
it is. What is released is rounded after the noise was added, so rounding costs nothing.
"""

from __future__ import annotations

import math

#: Contributions that float64 adds on the grid without error: 2²⁰ of at most 2³³ units each.
MOST = 1 << 20

#: Share of the clip that may be given up for the errors of a sum that was taken elsewhere.
MOST_CHARGED = 0.25


def check_clip(clip: float) -> None:
    """Refuses a clip whose sums leave the range of float32."""
    if not 1e-20 <= clip <= 1e20:
        raise ValueError(f"clip is {clip}, but it must lie between 1e-20 and 1e20")


def spacing(clip: float) -> float:
    """Distance between neighbours on the grid, a power of two: 2⁻³³ζ to 2⁻³²ζ."""
    return math.ldexp(1.0, math.frexp(clip)[1] - 33)


def target(clip: float, dimension: int) -> float:
    """The norm to scale to: rounding to the grid adds at most half a spacing in every coordinate, and the norm, a sum of
    `dimension` squares in float64 in any order, is off by at most 2⁻⁵³ of itself for each of them."""
    return clip * (1.0 - 2.0**-33 * math.sqrt(dimension) - 2.0**-53 * dimension - 2.0**-48)


def charge(contributions: int, dimension: int, unit: float) -> float:
    """Share x of the clip by which to scale down a sum that was taken elsewhere, before it is rounded to the grid, so that
    one contribution moves what comes out by at most ζ. unit is the largest relative error of one operation: 2⁻⁵³ in float64,
    2⁻²⁴ in float32.

    Adding n contributions in any order goes through sums of at most 2, 3, …, n of them, or shorter ones. Each is off by at
    most unit times its norm: (n² + n − 2)/2 · unit · ζ together, and nζ more for one conversion of the result. Two neighbours
    move apart by twice that, y = (n² + 3n)·unit of ζ, and by z for the product with 1 − x and for the grid. With x = y + z
    that is (1 − x)(1 + y) + z ≤ 1 − xy, and xy covers the errors of errors.
    """
    summed = (contributions**2 + 3 * contributions) * unit
    return summed + 2.0**-51 * contributions + 2.0**-32 * math.sqrt(dimension)
