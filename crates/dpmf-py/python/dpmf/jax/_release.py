"""A step on the devices of the parameters: what is checked, and how noise that came as data is added to a sum.

All of it is a pure function of the sum, the optimizer's state and the noise of the batch. It asks the host for nothing. A sum that is
not as it should be is not released: its update is zero, the state goes no further, and says why in a log that the run reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from .._errors import UnsupportedError
from ._bits import mix
from ._layout import Layout

#: Steps that a state remembers the outcome of, and so the most that are handed out at once.
DEPTH = 128

#: Words of a ticket, and where they are: the step, flags, what its sum must have, by which its devices mark it, and what its outcome is
#: masked with: who took part is secret where a guarantee relies on sampling, and a mark tells sums apart.
TICKET = 28
STEP, FLAGS, MEMBERS, PLACE, STAMPS = range(5)
RUN, FOLLOWS, MARK, SALT = (slice(5 + 4 * part, 9 + 4 * part) for part in range(4))
PAD = slice(21, 28)

#: The step was burned: it has no noise. It goes on from one state alone. Its sum must have the mark. It has so many members at most,
#: and these.
BURNED, BOUND, REPEATED, COUNTED, STAMPED = (1 << bit for bit in range(5))

#: Why a sum is not released.
OTHER_RUN, OTHER_STEP, OTHER_BRANCH, DIFFERING, NOT_FINITE, TOO_MANY, OTHER_MEMBERS, OTHER_SUM, STUCK = (1 << bit for bit in range(9))

#: Words of an outcome: the step after it, the fault, contributions, stamp, mark, numbers that are not finite, arrays that differ, and
#: the step of the state. Those from contributions to mark are masked.
OUTCOME = 12
MASKED, MARKED = slice(2, 9), slice(5, 9)

#: Most units of the grid that a sum is taken for, in magnitude: what is beyond is pulled back, which brings no two sums further apart.
LARGEST = 2.0**30


#: Parts that long vectors are added up in, and the length from which on this is worth a larger program.
FOLD, WORTH_FOLDING = 8, 1 << 14


class Noise(NamedTuple):
    """The noise of one step as data, for update(…, batch=batch)."""

    ticket: Any
    """What the step must be, uint32."""
    rows: Any
    """The words of the row, one tuple of leaves each, in the shapes and shardings of the parameters."""


class CorrelatedNoiseState(NamedTuple):
    """What the optimizer's state holds: the next step, the run that it belongs to, and the outcome of the last steps."""

    step: Any
    run: Any
    chain: Any
    """It stands for all sums so far, so that states of two branches are told apart."""
    fault: Any
    """Why nothing was released; 0 if there is no fault."""
    log: Any

    @staticmethod
    def begin(run: np.ndarray[Any, Any]) -> CorrelatedNoiseState:
        """The state of a new run."""
        return CorrelatedNoiseState(
            jnp.zeros((), jnp.int32),
            jnp.asarray(run),
            jnp.zeros(4, jnp.uint32),
            jnp.zeros((), jnp.uint32),
            jnp.zeros((DEPTH, OUTCOME), jnp.uint32),
        )


class Device:
    """What devices need to know of a run to release its steps: all of it is public but for what comes with the noise."""

    def __init__(self, layout: Layout, split: tuple[float, int, float] | None, *, burns: bool) -> None:
        self.layout = layout
        #: The unit of sums, binary digits between it and the grid, and the grid; None in float arithmetic.
        self.split = split
        #: Whether a step whose sum differs from the one before a restart is given up.
        self.burns = burns
        self.program = self._program()

    def __call__(
        self, leaves: Sequence[Any], contributions: Any, stamp: Any, state: CorrelatedNoiseState, noise: Noise
    ) -> tuple[list[Any], CorrelatedNoiseState]:
        """What is released of a sum, and the state after it."""
        leaves = _alone(*leaves)
        told = [contributions, stamp, noise.ticket, state.step, state.run, state.chain, state.fault, state.log]
        arguments = (*told, *leaves, *(leaf for word in noise.rows for leaf in word))
        found = (self._inside() or self.program)(*arguments)
        step, chain, fault, log, *noisy = found
        return noisy, CorrelatedNoiseState(step, state.run, chain, fault, log)

    def _program(self) -> Callable[..., Any]:
        """Every device releases its own coordinates. It is compiled: one operation at a time, on several devices, it would take
        seconds."""
        shardings = self.layout.shardings
        if shardings is None:
            return jax.jit(lambda *arguments: self._on_device(jnp.uint32(0), (), *arguments))
        specs = [sharding.spec for sharding in shardings]
        words = 2 if self.split else 1
        # That copies agree is checked by their digests; the checker of types cannot know.
        shard = jax.shard_map(
            self._on_shard,
            mesh=shardings[0].mesh,
            in_specs=(*(PartitionSpec() for _ in range(8)), *specs * (1 + words)),
            out_specs=[*(PartitionSpec() for _ in range(4)), *specs],
            check_vma=False,
        )
        return jax.jit(shard)

    def _inside(self) -> Callable[..., Any] | None:
        """Within shard_map over all axes of the mesh every device already has its own part; None outside of it."""
        manual = set(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))
        if not manual:
            return None
        if self.layout.shardings is None or manual != set(self.layout.shardings[0].mesh.axis_names):
            raise UnsupportedError(
                f"this is called on each of several devices ({', '.join(sorted(manual))}), under pmap or shard_map, and the run does "
                "not know them, so each would use the noise for its own part: place the parameters on the mesh of all these axes "
                "(jax.device_put(leaf, NamedSharding(mesh, spec))) before dpmf.jax.Run(…), or sum over the devices there "
                "(jax.lax.psum) and call update outside, under jit"
            )
        return self._on_shard

    def _on_shard(self, *local: Any) -> Any:
        assert self.layout.shardings is not None
        mesh = self.layout.shardings[0].mesh
        device: Any = jnp.int32(0)
        for name in mesh.axis_names:
            device = device * mesh.shape[name] + jax.lax.axis_index(name)
        return self._on_device(device.astype(jnp.uint32), tuple(mesh.axis_names), *local)

    def _on_device(self, device: Any, axes: tuple[str, ...], *local: Any) -> list[Any]:
        told, rest = local[:8], local[8:]
        contributions, stamp, ticket, step, run, chain, fault, log = told
        count = len(rest) // (3 if self.split else 2)
        leaves, rows = rest[:count], [rest[begin : begin + count] for begin in range(count, len(rest), count)]
        if not rest:
            leaves, rows = (), [(), ()]
        salt, flags = ticket[SALT], ticket[FLAGS]
        flat = [leaf.reshape(-1) for leaf in leaves]
        not_finite = sum((added_up(lambda part: (~jnp.isfinite(part)).astype(jnp.int32), leaf) for leaf in flat), jnp.int32(0))
        digests = digests_of(leaves, salt)
        mark = mark_of(digests, device, axes)
        differing = jnp.int32(0)
        if axes:
            not_finite = jax.lax.psum(not_finite, axes)
            beside = jnp.concatenate([jax.lax.bitcast_convert_type(array, jnp.uint32).reshape(-1) for array in told[:7]])
            differing = self._differing([*digests_of([beside], salt), *digests])

        def flag(name: int) -> Any:
            return (flags & name) != 0

        counted = contributions.astype(jnp.uint32)
        others = (stamp[0] != ticket[PLACE] * counted) | ((counted != 0) & (stamp[1] != ticket[STAMPS]))
        found = (
            (OTHER_RUN, jnp.any(run != ticket[RUN])),
            (OTHER_STEP, step.astype(jnp.uint32) != ticket[STEP]),
            (OTHER_BRANCH, flag(BOUND) & jnp.any(chain != ticket[FOLLOWS])),
            (NOT_FINITE, not_finite != 0),
            (TOO_MANY, (contributions < 0) | (flag(COUNTED) & (counted > ticket[MEMBERS]))),
            (OTHER_MEMBERS, flag(STAMPED) & others),
            (OTHER_SUM, flag(REPEATED) & jnp.any(mark != ticket[MARK])),
            (STUCK, fault != 0),
        )
        faults = sum((jnp.where(is_so, jnp.uint32(name), jnp.uint32(0)) for name, is_so in found), jnp.uint32(0))
        # What differs between devices says nothing else that all of them agree on.
        uneven = differing != 0
        faults = jnp.where(uneven, jnp.uint32(DIFFERING), faults)
        burned = flag(BURNED)
        # Of a step that has no noise, only where it stands matters.
        faults = jnp.where(burned, faults & (OTHER_RUN | OTHER_STEP | OTHER_BRANCH | STUCK), faults)
        released = (faults == 0) & ~burned
        goes_on = (faults == 0) | (faults == OTHER_SUM) if self.burns else faults == 0
        mark = jnp.where(released, mark, jnp.uint32(0))
        after = ticket[STEP] + 1
        given = jnp.where(uneven, jnp.uint32(0), jnp.stack([counted, stamp[0], stamp[1], step.astype(jnp.uint32)]))
        numbers = [not_finite.astype(jnp.uint32), differing.astype(jnp.uint32)]
        masked = jnp.concatenate([given[:3], mark]) ^ ticket[PAD]
        outcome = jnp.concatenate([jnp.stack([after, faults]), masked, jnp.stack(numbers), given[3:]])
        log = jax.lax.dynamic_update_index_in_dim(log, outcome, (ticket[STEP] % DEPTH).astype(jnp.int32), 0)
        noisy = [jnp.where(released, self._added(leaf, *words), 0.0) for leaf, *words in zip(leaves, *rows)]
        return [
            jnp.where(goes_on, after.astype(jnp.int32), step),
            jnp.where(goes_on, chained(chain, masked[3:]), chain),
            jnp.where(goes_on, jnp.uint32(0), faults),
            log,
            *noisy,
        ]

    def _added(self, leaf: Any, *words: Any) -> Any:
        """Sum and noise. Exactly: q⌊(g + w)/q⌉, where the host has decided every tie (crates/dpmf/src/engine/exact/engine.rs,
        SplitRow). All operations are exact: on powers of two, and on whole numbers that have room."""
        if self.split is None:
            return leaf + words[0]
        _, shift, grid = self.split
        whole, rest = words
        scaled = jnp.clip(leaf * np.float32(1.0 / grid), -LARGEST, LARGEST)
        near = jnp.round(scaled)
        # In units of the sum, to which it is rounded here, between -2**(shift-1) and as much.
        fraction = jnp.round((scaled - near) * np.float32(2.0**shift)).astype(jnp.int32)
        above = fraction.astype(jnp.uint32) + np.uint32(1 << (shift - 1)) + rest >= np.uint32(1 << shift)
        return (whole + near.astype(jnp.int32) + above.astype(jnp.int32)).astype(jnp.float32) * np.float32(grid)

    def _differing(self, digests: Sequence[jax.Array]) -> jax.Array:
        """How many arrays differ between devices that should have copies; those beyond the leaves, in front, are of all devices."""
        assert self.layout.shardings is not None
        mesh = self.layout.shardings[0].mesh
        front = len(digests) - len(self.layout.shardings)
        specs = [PartitionSpec()] * front + [sharding.spec for sharding in self.layout.shardings]
        groups: dict[tuple[str, ...], list[jax.Array]] = {}
        for spec, digest in zip(specs, digests):
            split = {name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))}
            copied = tuple(name for name in mesh.axis_names if name not in split)
            if copied:
                groups.setdefault(copied, []).append(digest)
        count = jnp.int32(0)
        for copied, several in groups.items():
            words = jnp.stack(several)
            # The largest, and the complement of the smallest: of copies that agree, they are complements.
            most = jax.lax.pmax(jnp.stack([words, ~words]), copied)
            count += jnp.sum(jnp.any(most[0] != ~most[1], axis=1), dtype=jnp.int32)
        most_found: jax.Array = jax.lax.pmax(count, tuple(mesh.axis_names))
        return most_found


@custom_vmap
def _alone(*values: Any) -> Any:
    """The same values, for which there is no vmap."""
    return values


@_alone.def_vmap
def _(size: int, batched: Any, *values: Any) -> Any:
    raise UnsupportedError(
        f"update is called in {size} lanes of jax.vmap, and all of them would use one row of noise: call it outside of vmap; an ensemble "
        "is one model, whose parameters have an axis for its members"
    )


def chained(chain: Any, mark: Any) -> Any:
    """What stands for all sums, with one more; in numpy or on a device."""
    return mix(chain ^ np.uint32(0x9E3779B9)) + mark


def digests_of(arrays: Sequence[Any], salt: Any) -> list[Any]:
    """128 bits for each array, four words that tell it from others. The salt is a secret of the run: nobody can choose data that
    collide."""
    digests = []
    begin = 0
    for array in arrays:
        bits = jax.lax.bitcast_convert_type(array.reshape(-1), jnp.uint32)
        places = jnp.arange(begin, begin + array.size, dtype=jnp.uint32)
        lanes = [added_up(lambda bits, places, lane=lane: mix(bits ^ mix(places ^ lane)), bits, places) for lane in jnp.asarray(salt)]
        digests.append(jnp.stack(lanes))
        begin += array.size
    return digests


def added_up(make: Callable[..., Any], *vectors: Any) -> Any:
    """The sum over all places of whole numbers that are made of some vectors. Eight parts of long ones are added first, since compilers
    make vectors of that, and not of a sum along an axis: a third of the time."""
    def total(values: Any) -> Any:
        return jnp.sum(values, dtype=values.dtype)

    width = vectors[0].size // FOLD if vectors[0].size >= WORTH_FOLDING else 0
    found = total(make(*(vector[FOLD * width :] for vector in vectors)))
    if width:
        parts = [make(*(vector[width * part : width * (part + 1)] for vector in vectors)) for part in range(FOLD)]
        found = found + total(sum(parts[1:], parts[0]))
    return found


def mark_of(digests: Sequence[Any], device: Any, axes: tuple[str, ...]) -> Any:
    """128 bits that tell the gradients of two attempts at a step apart; of all devices together, so that all come to one decision."""
    words = mix(sum(digests, jnp.zeros(4, jnp.uint32)) ^ mix(device))
    return jax.lax.psum(words, axes) if axes else words
