"""Clipping and summing in JAX, where float64 is seldom at hand: sums are taken in whole numbers."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _sums

#: Numbers that are added one after the other in a norm, so that its rounding error is bounded.
BLOCK = 256

#: Share of the clipping norm that covers this rounding error: BLOCK additions at each of at most five levels, and the
#: roundings of squares, root, quotient and product, in units of 2^-24.
CLIP_SLACK = 2.0**-13


def clipped_sum(gradients: Any, clip: float, *, parts: int = 1) -> Any:
    """The sum of per-example gradients, each clipped to a norm: what the mechanism takes, in float32.

    gradients is a tree whose leaves have one leading axis of examples, as from jax.vmap(jax.grad(loss), (None, 0)). parts
    is the number of such sums, each of so many examples, that are added up in float32 for one step.

    Guarantee: replacing one example with zero moves the sum, or that of all parts, by at most clip, as real numbers and
    rounding included. A gradient that is not finite counts as zero.

    What is clipped is clipped lower for it, by a share of 2⁻¹³, and of 2⁻²² for every example: 0.1 % for 4096.
    """
    # A contribution has norm at most ζ' = (1 − x)ζ. It is put on a grid of whole numbers hi + 2⁻ᵇ·lo in units of 2ᵉ⁻ᵇ,
    # 2ᵉ ≥ ζ', whose two halves int32 adds exactly. The sum of n, of norm at most nζ', is rounded at most twice on its way to
    # float32, and once more with each further part: two neighbours are at most 2·2⁻²³·nζ' + 2·(p − 1)·2⁻²⁴·pnζ' further
    # apart than the exact sums, which x covers. On a grid so coarse that float32 adds a cohort without error, 2⁻²⁴·nζ wide,
    # there would be no x, but all coordinates of a contribution that are below half of it would be lost.
    _sums.check_clip(clip)
    if parts < 1:
        raise ValueError(f"parts is {parts}, but it must be at least 1")
    leaves, tree = jax.tree.flatten(gradients)
    leaves = [jnp.asarray(leaf, jnp.float32) for leaf in leaves]
    examples = leaves[0].shape[0]
    if any(leaf.shape[0] != examples for leaf in leaves):
        raise ValueError(f"the leaves have {[leaf.shape[0] for leaf in leaves]} examples, but all need the same number")
    dimension = sum(leaf[0].size if examples else 0 for leaf in leaves)
    room = (1.0 + 2.0**-9) * examples * (2.0**-22 + 2.0**-23 * parts * (parts - 1))
    if room > 0.25 or examples > _sums.MOST:
        raise ValueError(
            f"{parts} parts of {examples} examples are too many to add in float32: add fewer, larger parts, of at most "
            f"{_sums.MOST} examples"
        )
    limit = clip * (1.0 - room)
    bits = min(15, 30 - max(examples - 1, 0).bit_length())
    exponent = math.frexp(limit)[1]
    target = np.float32(limit * (1.0 - CLIP_SLACK - 2.0 ** (-2 * bits) * math.sqrt(dimension)))

    # Scaled by its largest entry, a square neither overflows nor vanishes.
    largest = jnp.max(jnp.stack([_largest(leaf) for leaf in leaves]), axis=0)
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    squares = [_sum_squares(leaf / _spread(unit, leaf)) for leaf in leaves]
    norm = jnp.sqrt(_blocked_sum(jnp.stack(squares, axis=1))) * unit
    finite = jnp.isfinite(largest) & jnp.isfinite(norm)
    factor = jnp.where(finite & (norm > 0), jnp.minimum(1.0, target / norm), 0.0)

    def total(leaf: jax.Array) -> jax.Array:
        clipped = jnp.where(_spread(finite, leaf), leaf, 0.0) * _spread(factor, leaf)
        scaled = clipped * np.float32(2.0 ** (bits - exponent))
        high = jnp.round(scaled)
        low = jnp.round((scaled - high) * np.float32(2**bits))
        highs = jnp.sum(high.astype(jnp.int32), axis=0)
        lows = jnp.sum(low.astype(jnp.int32), axis=0)
        carry = lows >> bits
        whole = (highs + carry).astype(jnp.float32) * np.float32(2**bits) + (lows - (carry << bits)).astype(jnp.float32)
        scaled_back: jax.Array = whole * np.float32(2.0 ** (exponent - 2 * bits))
        return scaled_back

    return jax.tree.unflatten(tree, [total(leaf) for leaf in leaves])


def _largest(leaf: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(leaf.reshape(leaf.shape[0], -1)), axis=1, initial=0.0)


def _spread(values: jax.Array, leaf: jax.Array) -> jax.Array:
    return values.reshape(values.shape + (1,) * (leaf.ndim - 1))


def _sum_squares(leaf: jax.Array) -> jax.Array:
    return _blocked_sum(jnp.square(leaf.reshape(leaf.shape[0], -1)))


def _blocked_sum(values: jax.Array) -> jax.Array:
    while values.shape[1] > 1:
        width = -values.shape[1] % BLOCK
        values = jnp.pad(values, ((0, 0), (0, width))).reshape(values.shape[0], -1, BLOCK).sum(axis=2)
        # The compiler may merge sums of sums into one long one, whose error is not that of blocks.
        values = jax.lax.optimization_barrier(values)
    return values.reshape(-1)
