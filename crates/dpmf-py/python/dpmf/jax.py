"""Correlated noise for JAX: an optax.GradientTransformation that works under jit and on sharded arrays.

    optimizer = dpmf.jax.sgd(mechanism, key, learning_rate=0.5, denominator=cohort)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, batch):
        gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0))(parameters, batch)
        total = dpmf.jax.clipped_sum(gradients, mechanism.privacy.clip)
        updates, state = optimizer.update(total, state, parameters)
        return optax.apply_updates(parameters, updates), state

The noise is made on the host, in a callback. The optimizer's state carries the step, and the new step comes out of the
callback, so steps run in order, and a state that is used twice is refused.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec

from ._core import DurableStream, Mechanism, NoiseKey, NoiseStream, new_run
from ._disk import write_durably
from ._errors import BindingError, FormatError, MismatchError, StepReusedError, UnsupportedError

__all__ = ["CorrelatedNoiseState", "add_correlated_noise", "clipped_sum", "sgd"]

#: Runs of consecutive coordinates that one device may hold; each has a stream of its own.
MOST_RUNS = 1 << 16

#: Numbers that stand for the gradient of a device in its journal.
MARKS = 8

#: Numbers that clipped_sum adds one after the other, so that the rounding error of a norm is bounded.
BLOCK = 256

#: Share of the clipping norm that covers this rounding error: BLOCK additions at each of at most five levels, and the
#: roundings of squares, root, quotient and product, in units of 2^-24.
CLIP_SLACK = 2.0**-13


class CorrelatedNoiseState(NamedTuple):
    """What the optimizer's state holds: the next step, and the run it belongs to."""

    step: jax.Array
    run: jax.Array


def add_correlated_noise(
    mechanism: Mechanism,
    key: NoiseKey,
    *,
    denominator: float = 1.0,
    run: str | None = None,
    journal: str | os.PathLike[str] | None = None,
    lost_input: str = "refuse",
    shardings: Any = None,
) -> optax.GradientTransformation:
    """Adds the next row of correlated noise to a sum of clipped gradients, and divides by a fixed denominator.

    The rest of the chain must be the optimizer that the mechanism was planned for; sgd() makes it. The gradients are
    float32; their leaves, flattened in the order of jax.tree.leaves, are the coordinates of the noise.

    Every state is good for one update: an update from an old state fails and releases nothing. A failure inside jit
    surfaces as jax.errors.JaxRuntimeError with the message of the dpmf error.

    journal is a directory that makes restarts safe: what was released is synced there first, and after a restart a
    step that was released comes again for the same input only. Without one, a run ends with its process.
    lost_input="burn" gives up such a step when its input differs (its update is zero) instead of refusing it.

    Where the parameters given to init are sharded over devices, each device draws the noise of its own shard alone, to
    the bit the noise of an unsharded run; shardings, a tree of NamedSharding, says so where init is traced.

    Cost: the noise travels from the host to the device. A shard of whole leading rows is one stream; others are one stream
    for every run of consecutive coordinates.
    """
    if not denominator > 0:
        raise ValueError(f"denominator is {denominator}, but it must be above zero: it is the planned cohort")
    if lost_input not in ("refuse", "burn"):
        raise ValueError(f"lost_input is {lost_input!r}, but it must be refuse or burn")
    host = _Host(mechanism, key, run, None if journal is None else Path(journal), lost_input == "burn")

    def init(params: optax.Params) -> CorrelatedNoiseState:
        host.lay_out(params, shardings)
        return CorrelatedNoiseState(jnp.zeros((), jnp.int32), jnp.asarray(host.run_words))

    def update(
        updates: optax.Updates, state: CorrelatedNoiseState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, CorrelatedNoiseState]:
        del params
        layout = host.lay_out(updates, shardings)
        leaves, tree = jax.tree.flatten(updates)
        step, *noisy = layout.call(host.release, state, leaves, marked=host.journal is not None)
        scaled = [leaf / np.float32(denominator) for leaf in noisy]
        return jax.tree.unflatten(tree, scaled), CorrelatedNoiseState(step, state.run)

    return optax.GradientTransformation(init, update)


def sgd(
    mechanism: Mechanism,
    key: NoiseKey,
    learning_rate: float = 1.0,
    **options: Any,
) -> optax.GradientTransformation:
    """Private SGD exactly as the mechanism was planned: its momentum, weight decay and schedule, on noisy gradients.

    learning_rate multiplies the planned step sizes. The options are those of add_correlated_noise.

    Raises MismatchError when learning_rate is not 1 and the mechanism was planned with weight decay, where the plan
    needs the step sizes as they are; UnsupportedError for a mechanism planned from a matrix.
    """
    workload = mechanism.workload
    rates = workload.learning_rates
    if rates is None:
        raise UnsupportedError(
            "the mechanism was planned from a matrix, which names no optimizer: chain add_correlated_noise with yours"
        )
    momentum, nesterov, decay = workload.momentum, workload.nesterov, workload.weight_decay
    assert momentum is not None and nesterov is not None and decay is not None
    rates = rates * learning_rate
    mechanism.check_optimizer(
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=decay,
        coupled=bool(workload.coupled),
        learning_rates=rates,
    )
    table = np.asarray(rates, np.float32)

    def schedule(step: Any) -> jax.Array:
        return -jnp.asarray(table)[step]

    parts = [add_correlated_noise(mechanism, key, **options)]
    if decay and workload.coupled:
        parts.append(optax.add_decayed_weights(decay))
    if momentum:
        parts.append(optax.trace(momentum, nesterov=nesterov))
    if decay and not workload.coupled:
        parts.append(optax.add_decayed_weights(decay))
    parts.append(optax.scale_by_schedule(schedule))
    return optax.chain(*parts)


def clipped_sum(gradients: Any, clip: float) -> Any:
    """The sum of per-example gradients, each clipped to a norm: what the mechanism takes.

    gradients is a tree whose leaves have one leading axis of examples, as from jax.vmap(jax.grad(loss), (None, 0)).

    Guarantee: every term has norm at most clip, rounding included; one that is not finite counts as zero.
    """
    if not clip > 0:
        raise ValueError(f"clip is {clip}, but it must be above zero")
    leaves = jax.tree.leaves(gradients)
    # Scaled by its largest entry, a square neither overflows nor vanishes.
    largest = jnp.max(jnp.stack([_largest(leaf) for leaf in leaves]), axis=0)
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    squares = [_sum_squares(leaf / _spread(unit, leaf)) for leaf in leaves]
    norm = jnp.sqrt(_blocked_sum(jnp.stack(squares, axis=1))) * unit
    factor = jnp.minimum(1.0, np.float32(clip * (1.0 - CLIP_SLACK)) / norm)
    finite = jnp.isfinite(largest) & jnp.isfinite(norm)
    factor = jnp.where(finite & (norm > 0), factor, 0.0)

    def total(leaf: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(_spread(finite, leaf), leaf, 0.0) * _spread(factor, leaf), axis=0)

    return jax.tree.map(total, gradients)


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


# ---------------------------------------------------------------------------------------------------------------------
# Which device holds which coordinates
# ---------------------------------------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """Consecutive coordinates start..stop of the model that lie at begin.. of a device's flat gradient."""

    begin: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Layout:
    """Where the coordinates of a model live; one device without a mesh."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[NamedSharding, ...] | None
    devices: tuple[tuple[_Run, ...], ...]

    @staticmethod
    def of(tree: Any, shardings: Any) -> _Layout:
        leaves, structure = jax.tree.flatten(tree)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if leaf.dtype != jnp.float32:
                raise TypeError(
                    f"leaf {jax.tree_util.keystr(path) or '(the whole)'} is {leaf.dtype}, but noise is added to "
                    "float32: sum and clip in float32, add the noise, then cast"
                )
        shapes = tuple(tuple(leaf.shape) for leaf in leaves)
        named = _named_shardings(leaves, structure, shardings)
        if named is None:
            return _Layout(structure, shapes, None, ((_Run(0, 0, sum(map(prod, shapes))),),))
        devices = tuple(tuple(_runs(shapes, named, device)) for device in named[0].mesh.devices.flat)
        return _Layout(structure, shapes, named, devices)

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

    def call(
        self, release: Callable[..., Any], state: CorrelatedNoiseState, leaves: Sequence[jax.Array], marked: bool
    ) -> Any:
        """Noisy leaves behind the next step. Every device asks the host for the noise of its own coordinates.

        Gradients stay where they are: a callback that is handed large arrays may wait for threads that wait for it.
        """

        def on_device(device: Any, step: jax.Array, run: jax.Array, *local: jax.Array) -> Any:
            shapes = [jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)]
            shapes += [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in local]
            # Without a journal the host has no use for it, but what depends on every leaf makes the lanes of a vmap ask
            # one after the other, where a call without it would serve them all with one row.
            mark = _mark(local, run, device, axes) if marked else _touch(local)
            following, kept, *noise = io_callback(release, shapes, device, step, run, mark)
            return [following, *(jnp.where(kept, leaf + row, 0.0) for leaf, row in zip(local, noise))]

        axes: tuple[str, ...] = ()
        if self.shardings is None:
            return on_device(jnp.int32(0), state.step, state.run, *leaves)
        mesh = self.shardings[0].mesh
        axes = tuple(mesh.axis_names)
        specs = [sharding.spec for sharding in self.shardings]

        def on_shard(step: jax.Array, run: jax.Array, *local: jax.Array) -> Any:
            device: Any = jnp.int32(0)
            for name in mesh.axis_names:
                device = device * mesh.shape[name] + jax.lax.axis_index(name)
            return on_device(device, step, run, *local)

        # The replicas of a step agree by the way they are made, which the checker cannot know.
        shard = jax.shard_map(
            on_shard,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), *specs),
            out_specs=[PartitionSpec(), *specs],
            check_vma=False,
        )
        return shard(state.step, state.run, *leaves)


def _mark(leaves: Sequence[jax.Array], run: jax.Array, device: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """128 bits that tell the gradients of two attempts at a step apart, as MARKS numbers below 2^16; of all devices
    together, so that all come to one decision.

    Salted with the name of the run, which is drawn after the data: nobody can choose data that collide.
    """
    salt = run ^ _mix(device.astype(jnp.uint32))
    words = jnp.zeros(4, jnp.uint32)
    begin = 0
    for leaf in leaves:
        bits = jax.lax.bitcast_convert_type(leaf.reshape(-1), jnp.uint32)
        places = jnp.arange(begin, begin + leaf.size, dtype=jnp.uint32)
        words += jnp.stack([jnp.sum(_mix(bits ^ _mix(places ^ salt[lane])), dtype=jnp.uint32) for lane in range(4)])
        begin += leaf.size
    if axes:
        words = jax.lax.psum(words, axes)
    return jnp.concatenate([words >> 16, words & 0xFFFF]).astype(jnp.float32)


def _touch(leaves: Sequence[jax.Array]) -> jax.Array:
    """One number of every leaf."""
    return jnp.concatenate([jnp.zeros(1), *(leaf.reshape(-1)[:1] for leaf in leaves)])


def _mix(words: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which every input bit moves every output bit (the finalizer of MurmurHash3)."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def _named_shardings(leaves: Sequence[Any], structure: Any, given: Any) -> tuple[NamedSharding, ...] | None:
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


def _runs(shapes: Sequence[tuple[int, ...]], shardings: Sequence[NamedSharding], device: Any) -> Iterator[_Run]:
    """The runs of one device. Two devices have the same run or none in common, since runs stay within a leaf unless
    every leaf is whole everywhere."""
    if all(sharding.is_fully_replicated for sharding in shardings):
        yield _Run(0, 0, sum(map(prod, shapes)))
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
                yield _Run(begin, start, stop)
            begin += stop - start
        offset += prod(shape)


# ---------------------------------------------------------------------------------------------------------------------
# The host
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class _Shared:
    """What is made once a step for all devices that ask, each of which asks once."""

    askers: int
    made: dict[int, tuple[Any, int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def at(self, step: int, make: Callable[[int], Any]) -> Any:
        with self.lock:
            # Devices need not be at the same step.
            value, left = self.made.pop(step, (None, 0))
            if left == 0:
                value, left = make(step), self.askers
            if left > 1:
                self.made[step] = value, left - 1
            return value


class _Host:
    """Everything that lives outside of jit."""

    def __init__(
        self, mechanism: Mechanism, key: NoiseKey, run: str | None, journal: Path | None, burn: bool
    ) -> None:
        if mechanism.privacy is None:
            raise ValueError(
                "the mechanism is not calibrated, so its noise has no scale: use "
                "mechanism.calibrate(epsilon, delta, clip)"
            )
        self.mechanism, self.key, self.journal, self.burn = mechanism, key, journal, burn
        self.layout: _Layout | None = None
        self.segments: dict[tuple[int, int], tuple[NoiseStream, _Shared]] = {}
        self.next_step: dict[int, int] = {}
        self.stream: DurableStream | None = None
        self.decisions = _Shared(1)
        self.lock = threading.Lock()
        begun = self._read_journal()
        if run is None:
            run = begun["run"] if begun else new_run()
        # Words become the name of a run as everywhere in dpmf; the digits then stand for them.
        self.run = NoiseStream(mechanism, key, run=run, dimension=1).run
        if begun is not None and begun["run"] != self.run:
            raise BindingError(f"the journal at {journal} is of run {begun['run']}, not of {run}: leave out run")

    @property
    def run_words(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(bytes.fromhex(self.run), np.uint32)

    def lay_out(self, tree: Any, shardings: Any) -> _Layout:
        if self.layout is None:
            self.layout = _Layout.of(tree, shardings)
            self.decisions = _Shared(len(self.layout.local))
            self._begin_journal(self.layout)
            return self.layout
        made = _Layout.of(tree, None)
        if (made.structure, made.shapes) != (self.layout.structure, self.layout.shapes):
            raise ValueError(
                "the tree differs from that of the first call, but one transformation serves one model: its leaves "
                f"have shapes {list(made.shapes)}, and had {list(self.layout.shapes)}"
            )
        return self.layout

    def release(self, device: Any, step: Any, run: Any, mark: Any) -> tuple[Any, ...]:
        """The next step, whether the gradient is kept, and the noise of the coordinates of a device; the callback."""
        assert self.layout is not None
        device, step = int(device), int(step)
        named = np.asarray(run).tobytes().hex()
        if named != self.run:
            raise BindingError(
                "the optimizer's state is of another run: initialise it with this transformation, or make the "
                f"transformation with run={named!r} and the journal of that run"
            )
        if step >= self.mechanism.steps:
            self.mechanism.check_steps(step + 1)
        shapes = self.layout.local_shapes
        flat = np.zeros(sum(map(prod, shapes)), np.float32)
        self._take(device, step)
        try:
            kept = self._decide(step, np.array(mark, np.float32))
        except BaseException:
            # Nothing left: the step may be asked for again, with what it was journalled with.
            with self.lock:
                self.next_step[device] = step
            raise
        if kept:
            for begin, start, stop in self.layout.devices[device]:
                flat[begin : begin + stop - start] = self._row((start, stop), step)
        pieces = np.split(flat, np.cumsum([prod(shape) for shape in shapes])[:-1]) if shapes else []
        return (np.int32(step + 1), np.bool_(kept), *(piece.reshape(shape) for piece, shape in zip(pieces, shapes)))

    def _take(self, device: int, step: int) -> None:
        """Takes a step for a device, once and in order."""
        with self.lock:
            expected = self.next_step.get(device, 0 if self.journal is None else step)
            if step < expected:
                raise StepReusedError(
                    f"the optimizer's state is at step {step}, but the noise of that step was released already: a "
                    "state is good for one update, and each update must take the state of the one before it"
                )
            if step > expected:
                raise MismatchError(
                    f"the optimizer's state is at step {step}, but this stream is at step {expected}. To go on after a "
                    "restart, train with add_correlated_noise(…, journal=directory)"
                )
            self.next_step[device] = step + 1

    def _decide(self, step: int, mark: np.ndarray[Any, Any]) -> bool:
        """Whether a step is released, after it is in the journal; False if it was burned."""
        if self.journal is None:
            return True
        with self.lock:
            if self.stream is None:
                self.stream = self._open_journal(step)
            stream = self.stream
        return bool(self.decisions.at(step, lambda step: self._record(stream, step, mark)))

    def _record(self, journal: DurableStream, step: int, mark: np.ndarray[Any, Any]) -> bool:
        if journal.next_step > step:
            # It was burned before a restart.
            return False
        try:
            journal.release(mark)
        except StepReusedError as reused:
            if not self.burn:
                raise StepReusedError(
                    f"step {step} was released before a restart, with other gradients: feed the same batches in the "
                    'same order, or give up such steps with lost_input="burn"'
                ) from reused
            journal.burn()
            return False
        return True

    def _row(self, run: tuple[int, int], step: int) -> np.ndarray[Any, Any]:
        with self.lock:
            if run not in self.segments:
                assert self.layout is not None
                holders = [device for device in self.layout.local if run in self.layout.ranges(device)]
                stream = NoiseStream(self.mechanism, self.key, run=self.run, coordinates=range(*run))
                self.segments[run] = stream, _Shared(len(holders))
            stream, rows = self.segments[run]

        def draw(step: int) -> np.ndarray[Any, Any]:
            stream.skip_to(step)
            return stream.next_row()

        row: np.ndarray[Any, Any] = rows.at(step, draw)
        return row

    def _open_journal(self, step: int) -> DurableStream:
        """The journal of this process at a step: a stream beyond the coordinates of the model, over the marks of what
        was released. What is synced there is the step and a keyed digest of the mark."""
        assert self.layout is not None and self.journal is not None
        begin = sum(map(prod, self.layout.shapes)) + MARKS * jax.process_index()
        coordinates = range(begin, begin + MARKS)
        path = self.journal / f"process-{jax.process_index()}.journal"
        if step == 0 and not path.exists():
            return DurableStream.create(self.mechanism, self.key, path, run=self.run, coordinates=coordinates)
        ahead = NoiseStream(self.mechanism, self.key, run=self.run, coordinates=coordinates)
        ahead.skip_to(step)
        checkpoint = ahead.checkpoint_bytes()
        return DurableStream.open(self.mechanism, self.key, path, checkpoint=checkpoint, coordinates=coordinates)

    def _read_journal(self) -> dict[str, Any] | None:
        if self.journal is None or not (self.journal / "run.json").exists():
            return None
        path = self.journal / "run.json"
        try:
            begun: dict[str, Any] = json.loads(path.read_text())
            run, mechanism = begun["run"], begun["mechanism"]
        except (ValueError, KeyError, TypeError) as damage:
            raise FormatError(f"{path} is not the description of a run: {damage!r}") from damage
        if mechanism != self.mechanism.hash:
            raise BindingError(f"the journal at {self.journal} was begun with another mechanism ({mechanism[:16]}…)")
        assert isinstance(run, str)
        return begun

    def _begin_journal(self, layout: _Layout) -> None:
        if self.journal is None:
            return
        if self.burn and jax.process_count() > 1:
            raise UnsupportedError('lost_input="burn" needs one decision, and there are several processes: "refuse" it')
        described = dict(
            run=self.run,
            mechanism=self.mechanism.hash,
            shapes=[list(shape) for shape in layout.shapes],
            shards=[str(sharding.spec) for sharding in layout.shardings or ()],
            devices=len(layout.devices),
        )
        begun = self._read_journal()
        if begun is None:
            self.journal.mkdir(parents=True, exist_ok=True)
            write_durably(self.journal / "run.json", json.dumps(described).encode())
            return
        # The journals of other shards do not say what these released.
        for name, value in described.items():
            if begun.get(name) != value:
                raise BindingError(
                    f"the journal at {self.journal} was begun with the {name} {begun.get(name)}, and now they are "
                    f"{value}: resume with the same model and the same sharding"
                )
