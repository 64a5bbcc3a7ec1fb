"""Which device holds which coordinates of a model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._errors import UnsupportedError

#: Runs of consecutive coordinates that one device may hold; each has a stream of its own.
MOST_RUNS = 1 << 16


class Run(NamedTuple):
    """Consecutive coordinates start..stop of the model that lie at begin.. of a device's flat gradient."""

    begin: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Where the coordinates of a model live; one device without a mesh."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[NamedSharding, ...] | None
    devices: tuple[tuple[Run, ...], ...]
    device: Any = None
    """Where all of it lies, without a mesh."""

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
            homes = [leaf.devices() for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
            device = next(iter(homes[0])) if homes else jax.local_devices()[0]
            return Layout(structure, shapes, None, ((Run(0, 0, sum(map(prod, shapes))),),), device)
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

    @cached_property
    def held(self) -> list[tuple[int, int]]:
        """The coordinates that the devices of this process hold, in order; those that lie one after the other as one range."""
        joined: list[tuple[int, int]] = []
        for start, stop in sorted({part for device in self.local for part in self.ranges(device)}):
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((start, stop))
        return joined

    def place(self, rows: Sequence[np.ndarray[Any, Any]], *, stacked: bool) -> tuple[jax.Array, ...]:
        """Numbers for the coordinates that are held, as leaves on the devices; those of several steps have an axis more in front."""
        front = (len(rows),) if stacked else ()

        def leaves(runs: Sequence[Run], shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray[Any, Any]]:
            flats = [np.concatenate([row[self._slice(run)] for run in runs] or [row[:0]]) for row in rows]
            if len(runs) == 1:
                flats = [row[self._slice(runs[0])] for row in rows]
            cuts = np.cumsum([prod(shape) for shape in shapes])[:-1]
            pieces = zip(*(np.split(flat, cuts) for flat in flats)) if shapes else ()
            return [(np.stack(several) if stacked else several[0]).reshape(front + shape) for several, shape in zip(pieces, shapes)]

        if self.shardings is None:
            # Bound to the device where there are others: a sum that lies on several does not come together with it.
            device = self.device if jax.device_count() > 1 else None
            return tuple(jax.device_put(leaf, device) for leaf in leaves(self.devices[0], self.shapes))
        devices = list(self.shardings[0].mesh.devices.flat)
        made: dict[tuple[Run, ...], list[np.ndarray[Any, Any]]] = {}
        for index in self.local:
            if self.devices[index] not in made:
                made[self.devices[index]] = leaves(self.devices[index], self.local_shapes)
        placed = []
        for number, (shape, sharding) in enumerate(zip(self.shapes, self.shardings)):
            spec = PartitionSpec(None, *sharding.spec) if stacked else sharding.spec
            local = [jax.device_put(made[self.devices[index]][number], devices[index]) for index in self.local]
            whole = NamedSharding(sharding.mesh, spec)
            placed.append(jax.make_array_from_single_device_arrays(front + shape, whole, local))
        return tuple(placed)

    @cached_property
    def _begins(self) -> tuple[list[int], list[int]]:
        """Where the ranges that are held start, in the model and among what is held."""
        begins = [0]
        for start, stop in self.held:
            begins.append(begins[-1] + stop - start)
        return [start for start, _ in self.held], begins

    def _slice(self, run: Run) -> slice:
        """Where the numbers of a run lie among those that are held."""
        starts, begins = self._begins
        place = bisect_right(starts, run.start) - 1
        begin = begins[place] + run.start - starts[place]
        return slice(begin, begin + run.stop - run.start)


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
