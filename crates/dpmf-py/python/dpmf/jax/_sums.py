"""Clipping and summing in JAX, where float64 is seldom at hand: sums are taken in whole numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core import _Clip
from .._errors import MismatchError
from ._data import Batch, stamps_of

#: Numbers that are added one after the other in a norm, so that its rounding error is bounded.
BLOCK = 256

#: Share of the clipping norm that covers this rounding error: BLOCK additions at each of at most five levels, and the
#: roundings of squares, root, quotient and product, in units of 2^-24.
CLIP_SLACK = 2.0**-13


#: Binary digits of the unit of released sums above that of the core's clip (crates/dpmf/src/run/handed.rs).
SINGLE_DIGITS = 9


class Seen(NamedTuple):
    """What accumulate saw. ε does not cover it: it is for your eyes, not for release."""

    examples: jax.Array
    """Number of examples in the call, without those that are masked."""
    unprotected_loss: jax.Array
    """Mean of the loss before the step; NaN for no examples."""
    unprotected_clipped: jax.Array
    """Share whose gradient was longer than the clip, or not finite; NaN for no examples."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum:
    """A sum of clipped gradients, which knows how many there are and of which step: what update() takes.

    accumulate and clipped_sum make it; Sum.of() is for one that was clipped and summed by other means. Sums of parts of a batch
    add up, by +, by jax.lax.psum, or as any tree of arrays does.
    """

    gradients: Any
    """A tree like that of the parameters, in float32."""
    contributions: Any
    """The number of examples in it, int32."""
    stamp: Any = None
    """The sum of their stamps, uint32[2], which identify the step and the examples. None if they are not known."""

    @staticmethod
    def of(gradients: Any, contributions: Any = None, *, batch: Batch | None = None) -> Sum:
        """A sum that you clipped and added up by other means, of the given number of examples or of a whole batch.

        You must make sure that one example moves it by at most the clip, and that padding does not count. This must hold for the sum as
        it is released in exact arithmetic, rounded to multiples of 2⁻²⁴ to 2⁻²³ of the clip.
        """
        if contributions is None:
            if batch is None:
                raise ValueError("contributions is missing: pass the number of examples in the sum, or their batch")
            contributions = jnp.sum(jnp.asarray(batch.mask), dtype=jnp.int32)
        contributions = jnp.asarray(contributions, jnp.int32)
        if batch is None:
            return Sum(gradients, contributions)
        step, origin, indices = (jnp.asarray(part).astype(jnp.uint32) for part in (batch.step, batch.origin, batch.indices))
        place, stamps = stamps_of(step, origin, indices)
        members = jnp.sum(jnp.where(jnp.asarray(batch.mask), stamps, 0), dtype=jnp.uint32)
        return Sum(gradients, contributions, jnp.stack([contributions.astype(jnp.uint32) * place, members]))

    def __add__(self, other: Sum) -> Sum:
        if not isinstance(other, Sum):
            return NotImplemented
        added: Sum = jax.tree.map(jnp.add, self, other)
        return added


def clipped_sum(
    gradients: Any, clip: float, *, batch: Batch | None = None, mask: Any = None, parts: int = 1
) -> Sum:
    """The sum of the gradients of single examples, each clipped to a norm, in float32.

    gradients is a tree whose leaves have a leading axis of examples, as from jax.vmap(jax.grad(loss), (None, 0)). batch is the batch of
    these examples; padding is left out. For examples without a batch, pass mask, one boolean for each, which leaves out those that are
    False. parts is the number of sums of this size that are added up in float32 for one step.

    Guarantee: replacing one example with zero moves the sum, or the sum of all parts, by at most clip, rounding included. A gradient that
    is not finite counts as zero.

    To leave room for rounding, gradients are clipped to a little less than clip: less by a share of 2⁻¹³, of 2⁻²² for every example
    (0.1 % for 4096), and of 2⁻²³√d for d coordinates (0.04 % for 10⁷).
    """
    leaves, tree = _leaves(gradients)
    count = leaves[0].shape[0]
    kept = _kept(count, batch, mask)
    grid = _Grid.of(clip, count, sum(math.prod(leaf.shape[1:]) for leaf in leaves), parts)
    whole, _ = grid.whole(leaves, kept)
    return Sum.of(jax.tree.unflatten(tree, grid.sums(whole)), jnp.sum(kept, dtype=jnp.int32), batch=batch)


def accumulate(
    loss: Callable[..., Any],
    parameters: Any,
    *examples: Any,
    clip: float,
    batch: Batch | None = None,
    mask: Any = None,
    micro_batch: int | None = None,
    parts: int = 1,
    **named: Any,
) -> tuple[Sum, Seen]:
    """The sum of the clipped gradients of all examples, and the loss and share of clipped examples (Seen).

    loss(parameters, *example, **named example) is the loss of one example, a number. examples and named are trees whose leaves have a
    leading axis of examples; values that all examples share belong in loss (functools.partial). batch is the batch, and examples are
    those of batch.indices, one for each place; padding is left out. For examples without a batch, pass mask, one boolean for each,
    which leaves out those that are False.

    micro_batch examples are differentiated at a time, by default all of them; micro-batches of padding are skipped. They are added up
    without rounding errors, so they count as one part. parts and the guarantee are those of clipped_sum. Pass the sum to update(), and
    keep Seen to yourself, since ε does not cover it.

    Cost: micro_batch model-sized arrays.
    """
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"micro_batch is {micro_batch}, but it must be at least 1")
    given = [jnp.asarray(leaf) for leaf in jax.tree.leaves((examples, named))]
    if not given:
        raise ValueError("there are no examples: call accumulate(loss, parameters, inputs, labels, clip=…)")
    if any(leaf.ndim == 0 for leaf in given):
        raise ValueError("an input is a single number, without an axis for the examples: put values that all examples share into loss")
    count = _count(given)
    mask = _kept(count, batch, mask)
    trained = jax.tree.leaves(parameters)
    if not trained:
        raise ValueError("parameters has no leaves, so there is nothing to train")
    grid = _Grid.of(clip, count, sum(int(np.prod(np.shape(leaf))) for leaf in trained), parts)

    def one(parameters: Any, example: Any) -> Any:
        arguments, keywords = example
        return loss(parameters, *arguments, **keywords)

    def part(chunk: Any) -> Any:
        example, kept = chunk
        losses, gradients = jax.vmap(jax.value_and_grad(one), in_axes=(None, 0))(parameters, example)
        whole, clipped = grid.whole(_leaves(gradients)[0], kept)
        return whole, jnp.sum(jnp.where(kept, losses, 0.0)), jnp.sum(kept & clipped, dtype=jnp.int32)

    size = count if micro_batch is None else min(micro_batch, count)
    if size == count:
        whole, total_loss, clipped = part(((examples, named), mask))
    else:
        # A number of chunks that does not depend on the mask, so that one compiled function serves every batch.
        width = -count % size

        def cut(leaf: jax.Array) -> jax.Array:
            return leaf.reshape(-1, size, *leaf.shape[1:])

        chunks = jax.tree.map(lambda leaf: cut(_padded(jnp.asarray(leaf), width)), (examples, named))
        masks = cut(jnp.pad(mask, (0, width)))
        nothing = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(part, jax.tree.map(lambda leaf: leaf[0], (chunks, masks))),
        )

        def body(carry: Any, chunk: Any) -> Any:
            found = jax.lax.cond(jnp.any(chunk[1]), part, lambda _: nothing, chunk)
            return jax.tree.map(jnp.add, carry, found), None

        (whole, total_loss, clipped), _ = jax.lax.scan(body, nothing, (chunks, masks))
    kept = jnp.sum(mask, dtype=jnp.int32)
    # 0 / 0 is the NaN of no examples.
    seen = Seen(kept, total_loss / kept, clipped / kept)
    total = jax.tree.unflatten(jax.tree.structure(parameters), grid.sums(whole))
    return Sum.of(total, kept, batch=batch), seen


def _kept(count: int, batch: Batch | None, mask: Any) -> jax.Array:
    """Which examples count."""
    if batch is not None:
        if not isinstance(batch, Batch):
            raise TypeError(f"batch is a {type(batch).__name__}, but it must be one of a dpmf.jax.Batches")
        if mask is not None:
            raise ValueError("batch and mask both determine which examples count: remove mask, since a batch has its own")
        if (places := jnp.shape(batch.mask)[0]) != count:
            raise MismatchError(
                f"there are {count} examples, but the batch has {places} places: take inputs[batch.indices], as they are, one row for "
                "each place. Average over several views of one example in loss"
            )
        mask = batch.mask
    if mask is None:
        mask = jnp.ones(count, jnp.bool_)
    kept: jax.Array = jnp.asarray(mask)
    if kept.dtype != jnp.bool_ or kept.shape != (count,):
        raise ValueError(f"mask is {kept.dtype}{list(kept.shape)}, but it must be bool[{count}], one for each example")
    return kept


@dataclass(frozen=True)
class _Grid:
    """Whole numbers that stand for contributions: dpmf._Clip where there is no double precision.

    A contribution has norm at most ζ' = (1 − x)ζ. It is put on a grid of whole numbers hi + 2⁻ᵇ·lo in units of 2ᵉ⁻ᵇ, 2ᵉ ≥ ζ',
    whose two halves int32 adds exactly. The sum of n, of norm at most nζ', is rounded at most twice on its way to float32, and
    once more with each further part: two neighbours are at most 2·2⁻²³·nζ' + 2·(p − 1)·2⁻²⁴·pnζ' further apart than the exact
    sums, which x covers. A release takes it in units s of 2⁻²⁴ζ to 2⁻²³ζ (SplitRow of the core), which brings them s√d further apart at
    most, and ζ' has room for that. On a grid so coarse that float32 adds a cohort without error, 2⁻²⁴·nζ wide, there would be no x, but
    all coordinates of a contribution that are below half of it would be lost.
    """

    bits: int
    exponent: int
    target: np.float32

    @staticmethod
    def of(clip: float, examples: int, dimension: int, parts: int) -> _Grid:
        unit = _Clip(clip, max(dimension, 1)).unit * 2.0**SINGLE_DIGITS  # refuses what is out of range
        if parts < 1:
            raise ValueError(f"parts is {parts}, but it must be at least 1")
        room = (1.0 + 2.0**-9) * examples * (2.0**-22 + 2.0**-23 * parts * (parts - 1))
        if room > 0.25 or examples > _Clip.most_contributions:
            raise ValueError(
                f"{parts} parts of {examples} examples are too many to add in float32: add fewer, larger parts, of at most "
                f"{_Clip.most_contributions} examples"
            )
        limit = clip * (1.0 - room)
        bits = min(15, 30 - max(examples - 1, 0).bit_length())
        target = limit * (1.0 - CLIP_SLACK - 2.0 ** (-2 * bits) * math.sqrt(dimension)) - unit * math.sqrt(dimension)
        if not target > 0.5 * clip:
            raise ValueError(f"{dimension} coordinates of {examples} examples are too many for sums in float32: add fewer examples at once")
        return _Grid(bits, math.frexp(limit)[1], np.float32(target))

    def whole(self, leaves: list[jax.Array], mask: Any) -> tuple[list[tuple[jax.Array, jax.Array]], jax.Array]:
        """The exact sum of contributions, clipped, as two whole numbers for each coordinate; and which of them were clipped."""
        # Scaled by its largest entry, a square neither overflows nor vanishes; nor does what is scaled to the target. Devices
        # multiply by a reciprocal, and take one below 2⁻¹²⁶ for zero.
        largest = jnp.max(jnp.stack([_largest(leaf) for leaf in leaves]), axis=0)
        unit = jnp.where((largest > 0) & jnp.isfinite(largest), jnp.minimum(largest, np.float32(2.0**125)), 1.0)
        squares = [_sum_squares(leaf / _spread(unit, leaf)) for leaf in leaves]
        ratio = jnp.sqrt(_blocked_sum(jnp.stack(squares, axis=1)))
        short = ratio * unit <= self.target
        # The ratio is at least one, but for a contribution of zeros: one that vanished all the same does not pass for short.
        finite = jnp.isfinite(largest) & jnp.isfinite(ratio) & ((ratio > 0.5) | (largest <= 0))
        counted = finite if mask is None else finite & jnp.asarray(mask)
        factor = self.target / jnp.where(ratio > 0, ratio, 1.0)

        def halves(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
            scaled_down = leaf / _spread(unit, leaf) * _spread(factor, leaf)
            clipped = jnp.where(_spread(counted, leaf), jnp.where(_spread(short, leaf), leaf, scaled_down), 0.0)
            scaled = clipped * np.float32(2.0 ** (self.bits - self.exponent))
            high = jnp.round(scaled)
            low = jnp.round((scaled - high) * np.float32(2**self.bits))
            return jnp.sum(high.astype(jnp.int32), axis=0), jnp.sum(low.astype(jnp.int32), axis=0)

        return [halves(leaf) for leaf in leaves], ~(short & finite)

    def sums(self, whole: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        """What the whole numbers stand for, in float32."""

        def number(highs: jax.Array, lows: jax.Array) -> jax.Array:
            carry = lows >> self.bits
            high = (highs + carry).astype(jnp.float32) * np.float32(2**self.bits)
            low = (lows - (carry << self.bits)).astype(jnp.float32)
            back: jax.Array = (high + low) * np.float32(2.0 ** (self.exponent - 2 * self.bits))
            return back

        return [number(highs, lows) for highs, lows in whole]


def _leaves(gradients: Any) -> tuple[list[jax.Array], Any]:
    """The leaves in float32, all of the same number of examples."""
    leaves, tree = jax.tree.flatten(gradients)
    leaves = [jnp.asarray(leaf, jnp.float32) for leaf in leaves]
    _count(leaves)
    return leaves, tree


def _count(leaves: list[jax.Array]) -> int:
    """The number of examples, the same for all leaves."""
    counts = [leaf.shape[0] for leaf in leaves]
    if any(count != counts[0] for count in counts):
        raise ValueError(f"the leaves have {counts} examples, but all need the same number")
    return int(counts[0])


def _padded(leaf: jax.Array, width: int) -> jax.Array:
    """More examples, all of them like the first, so that no loss meets what it does not know."""
    return jnp.concatenate([leaf, jnp.broadcast_to(leaf[:1], (width, *leaf.shape[1:]))])


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
