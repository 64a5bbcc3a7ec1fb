"""Which device holds which coordinates of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec

from .._errors import UnsupportedError
from ._bits import mix

#: Runs of consecutive coordinates that one device may hold; each has a stream of its own.
MOST_RUNS = 1 << 16

#: Numbers that stand for the gradient of all devices in a journal.
MARKS = 8

#: Arrays that the host is told beside the sums: step, run, contributions and stamp.
TOLD = 4

#: Numbers that one argument of a callback holds: JAX copies arguments of up to 100 KiB at once, and larger ones on threads
#: that may be waiting for the callback.
PIECE = 24_000

#: Calls that may be under way at once, on all devices and lanes.
MOST_UPLOADS = 1 << 10


class Run(NamedTuple):
    """Consecutive coordinates start..stop of the model that lie at begin.. of a device's flat gradient."""

    begin: int
    start: int
    stop: int


class Uploads:
    """The way of large leaves to the host, piece by piece. Every call has a ticket, so that the lanes of a vmap keep apart."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tickets = 0
        #: The pieces of each leaf by their ticket, those of the newest calls only: a call that was aborted leaves them behind.
        self.held: dict[int, dict[int, list[np.ndarray[Any, Any]]]] = {}

    def send(self, leaves: Sequence[jax.Array], depends: Any) -> tuple[jax.Array, list[jax.Array]]:
        """A ticket for the whole pieces of the leaves, and what is left of each of them, flat. depends is on every leaf."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        ticket: jax.Array = jnp.int32(0)
        if any(leaf.size >= PIECE for leaf in leaves):
            ticket = io_callback(self._begin, number, depends)
        rest = []
        for index, leaf in enumerate(leaves):
            flat, count = leaf.reshape(-1), leaf.size // PIECE
            rest.append(flat[count * PIECE :])
            if count:
                rows = flat[: count * PIECE].reshape(count, PIECE)
                ticket = self._loop(rows, index, ticket)
        return ticket, rest

    def _loop(self, rows: jax.Array, index: int, ticket: jax.Array) -> jax.Array:
        def body(row: Any, ticket: jax.Array) -> Any:
            piece = jax.lax.dynamic_index_in_dim(rows, row, keepdims=False)
            return io_callback(self._put, jax.ShapeDtypeStruct((), jnp.int32), ticket, jnp.int32(index), row, piece)

        # Each turn takes the ticket of the one before it, so they come in order.
        sent: jax.Array = jax.lax.fori_loop(0, rows.shape[0], body, ticket)
        return sent

    def _begin(self, _: Any) -> np.int32:
        with self.lock:
            self.tickets = self.tickets % (2**31 - 1) + 1
            self.held[self.tickets] = {}
            while len(self.held) > MOST_UPLOADS:
                del self.held[next(iter(self.held))]
            return np.int32(self.tickets)

    def _put(self, ticket: Any, index: Any, row: Any, piece: Any) -> np.int32:
        pieces = self.held[int(ticket)].setdefault(int(index), [])
        assert len(pieces) == int(row)
        pieces.append(np.array(piece))
        return np.int32(ticket)

    def take(self, ticket: Any, rest: Sequence[Any]) -> np.ndarray[Any, Any]:
        """The leaves of a call one after the other, flat."""
        with self.lock:
            held = self.held.pop(int(ticket), {})
        return np.concatenate([piece for index, left in enumerate(rest) for piece in (*held.get(index, ()), left)])


@dataclass(frozen=True)
class Layout:
    """Where the coordinates of a model live; one device without a mesh."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[NamedSharding, ...] | None
    devices: tuple[tuple[Run, ...], ...]

    @staticmethod
    def of(tree: Any, shardings: Any) -> Layout:
        leaves, structure = jax.tree.flatten(tree)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if leaf.dtype != jnp.float32:
                raise TypeError(
                    f"leaf {jax.tree_util.keystr(path) or '(the whole)'} is {leaf.dtype}, but noise is added to "
                    "float32: sum and clip in float32, add the noise, then cast"
                )
        shapes = tuple(tuple(leaf.shape) for leaf in leaves)
        named = named_shardings(leaves, structure, shardings)
        if named is None:
            return Layout(structure, shapes, None, ((Run(0, 0, sum(map(prod, shapes))),),))
        devices = tuple(tuple(runs_of(shapes, named, device)) for device in named[0].mesh.devices.flat)
        return Layout(structure, shapes, named, devices)

    def check_processes(self) -> None:
        """Refuses a model that is not of all processes: each would train its own."""
        mesh = self.shardings and self.shardings[0].mesh.devices.flat
        processes = {device.process_index for device in mesh or jax.local_devices()}
        if len(processes) != jax.process_count():
            raise UnsupportedError(
                f"there are {jax.process_count()} processes, but the parameters lie in {len(processes)}: each process "
                "would train a model of its own, under the same noise. Place the parameters on a mesh of all devices, "
                "jax.device_put(leaf, NamedSharding(mesh, spec))"
            )

    @property
    def local_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the leaves on one device."""
        if self.shardings is None:
            return list(self.shapes)
        return [tuple(sharding.shard_shape(shape)) for sharding, shape in zip(self.shardings, self.shapes)]

    @cached_property
    def local(self) -> list[int]:
        """The devices of this process; others make their own noise."""
        if self.shardings is None:
            return [0]
        devices = self.shardings[0].mesh.devices.flat
        return [i for i, device in enumerate(devices) if device.process_index == jax.process_index()]

    def ranges(self, device: int) -> set[tuple[int, int]]:
        """The runs of a device, without where they lie."""
        return {(run.start, run.stop) for run in self.devices[device]}

    def program(
        self, release: Callable[..., Any], uploads: Uploads, salt: np.ndarray[Any, Any], *, marked: bool, exact: bool
    ) -> Callable[..., Any]:
        """A function that makes noisy leaves behind the next step. Every device asks the host for its own coordinates.

        Its arguments are what the host is told beside the sums, TOLD arrays of which every device has a copy, and the leaves. Exact: a
        device hands its sums over and takes what is released. Otherwise the gradients stay where they are, and noise is added to
        them in float32. It is compiled: one operation at a time, on several devices, it would take seconds.
        """
        # Without a mesh the compiler may hold copies of a leaf that differ, on devices that are not known here: one is released.
        handed = exact or (self.shardings is None and jax.device_count() > 1)

        def on_device(device: Any, *local: jax.Array) -> Any:
            told, leaves = local[:TOLD], local[TOLD:]
            shapes = [jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)]
            shapes += [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
            # It depends on every leaf, so that the lanes of a vmap ask one after the other, where a call without it would
            # serve them all with one row.
            not_finite = sum(jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for leaf in leaves)
            differing, mark = jnp.int32(0), jnp.zeros(MARKS)
            if axes:
                not_finite = jax.lax.psum(not_finite, axes)
            if axes or marked:
                digests = _digests(leaves, salt)
                mark = _mark(digests, device, axes)
            if axes:
                differing = self._differing([*_digests(told, salt), *digests])
            ticket, rest = uploads.send(leaves, not_finite) if handed else (jnp.int32(0), [])
            following, kept, *rows = io_callback(
                release, shapes, device, *told, not_finite, differing, mark, ticket, *rest
            )
            noisy = rows if handed else [leaf + row for leaf, row in zip(leaves, rows)]
            return [following, *(jnp.where(kept, leaf, 0.0) for leaf in noisy)]

        axes: tuple[str, ...] = ()
        if self.shardings is None:
            return jax.jit(lambda *local: on_device(jnp.int32(0), *local))
        mesh = self.shardings[0].mesh
        axes = tuple(mesh.axis_names)
        specs = [sharding.spec for sharding in self.shardings]

        def on_shard(*local: jax.Array) -> Any:
            device: Any = jnp.int32(0)
            for name in mesh.axis_names:
                device = device * mesh.shape[name] + jax.lax.axis_index(name)
            return on_device(device, *local)

        # That replicas agree is checked by their digests; the checker of types cannot know.
        shard = jax.shard_map(
            on_shard,
            mesh=mesh,
            in_specs=(*(PartitionSpec() for _ in range(TOLD)), *specs),
            out_specs=[PartitionSpec(), *specs],
            check_vma=False,
        )
        return jax.jit(shard)

    def _differing(self, digests: Sequence[jax.Array]) -> jax.Array:
        """How many arrays differ between devices that should have copies; those beyond the leaves, in front, are of all devices."""
        assert self.shardings is not None
        mesh = self.shardings[0].mesh
        front = len(digests) - len(self.shardings)
        specs = [PartitionSpec()] * front + [sharding.spec for sharding in self.shardings]
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


def _digests(arrays: Sequence[jax.Array], salt: np.ndarray[Any, Any]) -> list[jax.Array]:
    """128 bits for each array, four words that tell it from others. The salt is a secret of the run: nobody can choose data that
    collide."""
    digests = []
    begin = 0
    for array in arrays:
        bits = jax.lax.bitcast_convert_type(array.reshape(-1), jnp.uint32)
        places = jnp.arange(begin, begin + array.size, dtype=jnp.uint32)
        digests.append(jnp.stack([jnp.sum(mix(bits ^ mix(places ^ lane)), dtype=jnp.uint32) for lane in salt]))
        begin += array.size
    return digests


def _mark(digests: Sequence[jax.Array], device: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """128 bits that tell the gradients of two attempts at a step apart, as MARKS numbers below 2^16; of all devices
    together, so that all come to one decision."""
    words = mix(sum(digests, jnp.zeros(4, jnp.uint32)) ^ mix(device.astype(jnp.uint32)))
    if axes:
        words = jax.lax.psum(words, axes)
    return jnp.concatenate([words >> 16, words & 0xFFFF]).astype(jnp.float32)


def named_shardings(leaves: Sequence[Any], structure: Any, given: Any) -> tuple[NamedSharding, ...] | None:
    if given is not None:
        found = tuple(structure.flatten_up_to(given))
    else:
        concrete = all(isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if not concrete or all(len(leaf.sharding.device_set) == 1 for leaf in leaves):
            return None
        found = tuple(leaf.sharding for leaf in leaves)
    for sharding in found:
        if not isinstance(sharding, NamedSharding) or sharding.mesh != found[0].mesh:
            raise UnsupportedError(
                f"a leaf has the sharding {sharding}, but all leaves must have a NamedSharding on one mesh: place the "
                "parameters with jax.device_put(leaf, NamedSharding(mesh, spec))"
            )
    return found


def runs_of(shapes: Sequence[tuple[int, ...]], shardings: Sequence[NamedSharding], device: Any) -> Iterator[Run]:
    """The runs of one device. Two devices have the same run or none in common, since runs stay within a leaf unless
    every leaf is whole everywhere."""
    if all(sharding.is_fully_replicated for sharding in shardings):
        yield Run(0, 0, sum(map(prod, shapes)))
        return
    begin, offset, count = 0, 0, 0
    for shape, sharding in zip(shapes, shardings):
        index = sharding.devices_indices_map(shape)[device]
        bounds = [piece.indices(length)[:2] for piece, length in zip(index, shape)]
        # Trailing axes that are whole form one run with the axis before them.
        whole = len(shape)
        while whole > 0 and bounds[whole - 1] == (0, shape[whole - 1]):
            whole -= 1
        inner = prod(shape[whole:])
        low, high = bounds[whole - 1] if whole > 0 else (0, 1)
        outer = [range(*pair) for pair in bounds[: max(whole - 1, 0)]]
        count += prod(map(len, outer))
        if count > MOST_RUNS:
            raise UnsupportedError(
                f"a shard falls into more than {MOST_RUNS} runs of consecutive coordinates, each with a stream: shard "
                "the leading axes of the parameters rather than the last"
            )
        for place in product(*outer):
            row = 0
            for position, length in zip(place, shape):
                row = row * length + position
            if whole > 0:
                row *= shape[whole - 1]
            start, stop = offset + (row + low) * inner, offset + (row + high) * inner
            if stop > start:
                yield Run(begin, start, stop)
            begin += stop - start
        offset += prod(shape)
