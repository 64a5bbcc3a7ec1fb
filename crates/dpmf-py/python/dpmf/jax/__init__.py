"""Correlated noise for JAX: an optax.GradientTransformation that works under jit and on sharded arrays.

    plan = dpmf.plan(examples=len(labels), batch=256, epochs=5, momentum=0.9, epsilon=3, delta=1e-6)
    batches = dpmf.jax.Batches(plan, key)
    optimizer = dpmf.jax.sgd(plan.mechanism, key, learning_rate=0.5, batches=batches)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, batch):
        examples = inputs[batch.indices], labels[batch.indices]
        total, seen = dpmf.jax.accumulate(loss, parameters, *examples, clip=1.0, mask=batch.mask)
        updates, state = optimizer.update(total, state, parameters, step=batch.step)
        return optax.apply_updates(parameters, updates), state

    for batch in batches:
        parameters, state = step(parameters, state, batch)

What is released is made on the host, in a callback. The optimizer's state carries the step, and the new step comes out of the
callback, so steps run in order, and a state that is used twice is refused.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ._requires import require

require("dpmf.jax", "jax", "optax")

import jax
import jax.numpy as jnp
import optax
from jax.experimental import multihost_utils

from ._checks import check_experiment, statement_of
from ._core import DurableStream, Mechanism, NoiseKey, NoiseStream, Sampler, new_run
from ._disk import write_durably
from ._errors import BindingError, FormatError, MismatchError, StepReusedError, UnsupportedError
from ._jax_data import Batch, Batches, CorrelatedNoiseState, step_of
from ._jax_layout import MARKS, Layout, Uploads
from ._jax_sums import Seen, accumulate, clipped_sum

__all__ = [
    "Batch",
    "Batches",
    "CorrelatedNoiseState",
    "Seen",
    "accumulate",
    "adam",
    "adam_steps",
    "add_correlated_noise",
    "clipped_sum",
    "multi_steps",
    "sgd",
    "step_of",
]


def add_correlated_noise(
    mechanism: Mechanism,
    key: NoiseKey,
    *,
    batches: Batches | None = None,
    denominator: float | None = None,
    sampler: Sampler | None = None,
    experiment: str | None = None,
    journal: str | os.PathLike[str] | None = None,
    lost_input: Literal["refuse", "burn"] = "refuse",
    shardings: Any = None,
    arithmetic: Literal["exact", "float"] = "exact",
) -> optax.GradientTransformation:
    """Adds the next row of correlated noise to a sum of clipped gradients, and divides by a fixed denominator.

    The rest of the chain must be the optimizer that the mechanism was planned for; sgd() and adam() make it. The gradients are
    float32; their leaves, flattened in the order of jax.tree.leaves, are the coordinates of the noise. They come from
    accumulate or clipped_sum, which is for the caller to see to; gradients that are not finite are refused.

    batches, a Batches of the same mechanism, says who takes part in which step. Every update then says which batch its sum is of,
    update(total, state, parameters, step=batch.step), and one of another step is refused. A mean divides by
    batches.expected_batch, unless denominator, the planned size of a cohort, is given. Without batches, that the data takes part
    as the mechanism covers is for the caller to see to. A mechanism that counts on sampling needs batches, or at least sampler,
    plan.sampler(key), whose members(i) update number i is given the sum of.

    Every state is good for one update: an update from an old state fails and releases nothing. A failure inside jit
    surfaces as jax.errors.JaxRuntimeError with the message of the dpmf error. It works in jax.lax.scan and jax.lax.cond. What
    would release sums without noise, or noise for parts of a step, is refused: optax.MultiSteps, for which there is
    multi_steps(); optax.masked and optax.multi_transform around it, which come after it in a chain instead; and pmap and
    shard_map around it.

    journal is a directory that makes restarts safe: what was released is synced there first, and after a restart a
    step that was released comes again for the same input only. Without one, a run ends with its process. experiment names a
    run whose noise is the same at every start, for experiments that release nothing; the key must be
    NoiseKey.from_seed(…).
    lost_input="burn" gives up such a step when its input differs (its update is zero) instead of refusing it.

    Where the parameters given to init are sharded over devices, each device draws the noise of its own shard alone, to
    the bit the noise of an unsharded run; shardings, a tree of NamedSharding, says so where init is traced. With several
    processes, all need the same key, and the parameters must be sharded over all of them.

    arithmetic is "exact", where the sums are taken as the real numbers that they are and released with ideal noise, correctly
    rounded; or "float", where noise is made, and added on the device, in single precision: faster, but the lowest bits of a
    release are outside of the guarantee. It is fixed for a run.

    Guarantee: if one example moves the sum by at most the clip, as real numbers, which clipped_sum sees to, what is released
    satisfies the mechanism's statement, to the bit in exact arithmetic.

    Cost: the sums travel from the device to the host, in pieces of 96 kB, and what is released travels back; in float
    arithmetic, noise travels to the device only. A shard of whole leading rows is one stream; others are one stream for every
    run of consecutive coordinates.
    """
    if batches is not None and sampler is not None:
        raise ValueError("batches and sampler are both given, and both say who takes part: leave one out")
    if batches is not None and batches.mechanism.identity != mechanism.identity:
        raise MismatchError("the batches are those of another mechanism: make both from one plan")
    if sampler is not None:
        mechanism.check_sampling(sampler.sampling)
        mechanism.check_steps(sampler.steps)
    elif batches is None and mechanism.sampling != "none":
        raise MismatchError(
            f"the guarantee of this mechanism counts on sampling {mechanism.sampling}, and nothing here shows that the examples "
            'are drawn so: give batches=dpmf.jax.Batches(plan, key) and train on them, or plan with sampling="none"'
        )
    if denominator is None:
        drawn = batches if batches is not None else sampler
        denominator = 1.0 if drawn is None else drawn.expected_batch
    if not denominator > 0:
        raise ValueError(f"denominator is {denominator}, but it must be above zero: it is the planned cohort")
    if lost_input not in ("refuse", "burn"):
        raise ValueError(f"lost_input is {lost_input!r}, but it must be refuse or burn")
    if arithmetic not in ("exact", "float"):
        raise ValueError(f"arithmetic is {arithmetic!r}, but it must be exact or float")
    directory = None if journal is None else Path(journal)
    host = _Host(mechanism, key, experiment, directory, lost_input == "burn", arithmetic, batches)

    def init(params: optax.Params) -> CorrelatedNoiseState:
        _check_surroundings(params)
        host.lay_out(params, shardings)
        return CorrelatedNoiseState(jnp.zeros((), jnp.int32), jnp.asarray(host.run_words))

    def update(
        updates: optax.Updates,
        state: CorrelatedNoiseState,
        params: optax.Params | None = None,
        *,
        step: Any = None,
        **others: Any,
    ) -> tuple[optax.Updates, CorrelatedNoiseState]:
        del params, others
        _check_surroundings(updates)
        if step is None and batches is not None:
            raise MismatchError(
                "nothing says which batch this sum is of, and the guarantee is for every batch in its own step: "
                "optimizer.update(total, state, parameters, step=batch.step)"
            )
        layout = host.lay_out(updates, shardings)
        leaves, tree = jax.tree.flatten(updates)
        marked, exact = host.journal is not None, host.arithmetic == "exact"
        meant = jnp.asarray(-1 if step is None else step, jnp.int32)
        following, *noisy = layout.call(
            host.release, host.uploads, state.step, meant, state.run, leaves, marked=marked, exact=exact
        )
        scaled = [leaf / np.float32(denominator) for leaf in noisy]
        return jax.tree.unflatten(tree, scaled), CorrelatedNoiseState(following, state.run)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_surroundings(tree: Any) -> None:
    """Refuses to be called where sums would go past the noise, or a part of a step would be taken for the whole.

    Traced once, so that it is said before anything is released; what is not recognised here is refused at the second update.
    """
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    if any(isinstance(node, optax.MaskedNode) for node in nodes):
        raise UnsupportedError(
            "optax.masked or optax.multi_transform leaves out some parameters here, and would hand their sums on without noise: "
            "put it behind the noise, optax.chain(dpmf.jax.add_correlated_noise(…), optax.masked(…)), or leave parameters that "
            "are never trained out of the tree"
        )
    frame: Any = sys._getframe(1)
    while frame is not None:
        # Only the frames tell: it hands the parts on as if each were a step.
        if frame.f_code.co_name in ("init", "update") and isinstance(frame.f_locals.get("self"), optax.MultiSteps):
            raise UnsupportedError(
                "optax.MultiSteps updates at every part of a step and throws away what it gets, so that noise would be used "
                "several times: give accumulate(…, micro_batch=…) the whole batch, or take dpmf.jax.multi_steps(optimizer, parts)"
            )
        frame = frame.f_back
    mesh = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()
    if axes := getattr(mesh, "manual_axes", ()):
        raise UnsupportedError(
            f"this is called on each of several devices ({', '.join(axes)}), under pmap or shard_map, and every one of them would "
            "take a noise row of its own for its part: sum over the devices there (jax.lax.psum), and call update outside, under "
            "jit, where it shards by itself"
        )


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

    parts: list[Any] = [add_correlated_noise(mechanism, key, **options)]
    if decay and workload.coupled:
        parts.append(optax.add_decayed_weights(decay))
    if momentum:
        parts.append(optax.trace(momentum, nesterov=nesterov))
    if decay and not workload.coupled:
        parts.append(optax.add_decayed_weights(decay))
    parts.append(optax.scale_by_schedule(schedule))
    return optax.chain(*parts)


def adam_steps(steps: int, *, b1: float = 0.9, schedule: Any = None) -> np.ndarray[Any, Any]:
    """The step sizes of Adam as those of SGD with momentum b1, for plan(momentum=b1, schedule=adam_steps(steps, b1=b1)).

    Adam steps by the mean of gradients m̂_t = (1 − β₁)/(1 − β₁ᵗ)·Σ β₁ᵗ⁻ˢ g_s over √v̂_t, which moves slowly. But for that it is
    heavy-ball momentum with the step sizes (1 − β₁)/(1 − β₁ᵗ). schedule, a number for each step, multiplies them.
    """
    if not 0 <= b1 < 1:
        raise ValueError(f"b1 is {b1}, but it must be at least 0 and below 1")
    rates: np.ndarray[Any, Any] = (1 - b1) / (1 - b1 ** np.arange(1.0, steps + 1))
    if schedule is None:
        return rates
    factors = np.asarray(schedule, np.float64)
    if factors.shape != (steps,):
        raise ValueError(f"schedule has the shape {factors.shape}, but it must be one number for each of {steps} steps")
    return rates * factors


def adam(
    mechanism: Mechanism,
    key: NoiseKey,
    learning_rate: float = 1e-3,
    *,
    b2: float = 0.999,
    eps: float = 1e-8,
    **options: Any,
) -> optax.GradientTransformation:
    """Private Adam, for a mechanism that was planned with momentum=b1 and schedule=adam_steps(steps, b1=b1).

    b1 is the planned momentum. learning_rate multiplies the planned step sizes. The options are those of add_correlated_noise.

    The guarantee is that of the noisy gradients: what Adam makes of them costs nothing. The plan is the best for its first moment;
    that the second is estimated from noisy gradients too is not in it, and eps counts against noise of standard deviation
    mechanism.privacy.noise_std over the denominator.

    Raises MismatchError for a plan with nesterov or weight decay, and UnsupportedError for one from a matrix.
    """
    workload = mechanism.workload
    rates, b1 = workload.learning_rates, workload.momentum
    if rates is None or b1 is None:
        raise UnsupportedError(
            "the mechanism was planned from a matrix, which names no optimizer: chain add_correlated_noise with yours"
        )
    if workload.nesterov or workload.weight_decay:
        raise MismatchError(
            "the mechanism was planned with nesterov or weight decay, which adam() does not have: plan with momentum and "
            "schedule=dpmf.jax.adam_steps(steps), or chain add_correlated_noise with an optimizer of your own"
        )
    table = np.asarray(learning_rate * rates / adam_steps(mechanism.steps, b1=b1), np.float32)

    def schedule(step: Any) -> jax.Array:
        return -jnp.asarray(table)[step]

    return optax.chain(
        add_correlated_noise(mechanism, key, **options),
        optax.scale_by_adam(b1, b2, eps),
        optax.scale_by_schedule(schedule),
    )


class MultiStepsState(NamedTuple):
    """What multi_steps keeps: the number of parts that were added up, their sum, and the optimizer's state."""

    part: jax.Array
    total: Any
    inner: Any


def multi_steps(optimizer: optax.GradientTransformation, parts: int) -> optax.GradientTransformation:
    """An optimizer that takes so many sums for one step, in place of optax.MultiSteps.

    Its updates are zero but for every parts-th, which is that of the sum of all parts. Take each part with
    accumulate(…, parts=parts), which leaves room for rounding. To differentiate a batch piece by piece,
    accumulate(…, micro_batch=…) is simpler and needs no such room.
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}, but it must be at least 1")
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> MultiStepsState:
        return MultiStepsState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), inner.init(params))

    def update(
        updates: optax.Updates, state: MultiStepsState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, MultiStepsState]:
        total = jax.tree.map(jnp.add, state.total, updates)

        def last(total: Any, inner_state: Any) -> Any:
            made, inner_state = inner.update(total, inner_state, params, **extra)
            return made, inner_state, jax.tree.map(jnp.zeros_like, total)

        def earlier(total: Any, inner_state: Any) -> Any:
            return jax.tree.map(jnp.zeros_like, updates), inner_state, total

        made, inner_state, total = jax.lax.cond(state.part == parts - 1, last, earlier, total, state.inner)
        return made, MultiStepsState((state.part + 1) % parts, total, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


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
        self,
        mechanism: Mechanism,
        key: NoiseKey,
        experiment: str | None,
        journal: Path | None,
        burn: bool,
        arithmetic: Literal["exact", "float"],
        batches: Batches | None = None,
    ) -> None:
        statement_of(mechanism)
        check_experiment(key, experiment)
        self.mechanism, self.key, self.journal, self.burn = mechanism, key, journal, burn
        self.arithmetic: Literal["exact", "float"] = arithmetic
        self.draws = None if batches is None else batches.draws
        self.layout: Layout | None = None
        self.uploads = Uploads()
        self.segments: dict[tuple[int, int], tuple[NoiseStream, _Shared]] = {}
        self.next_step: dict[int, int] = {}
        self.stream: DurableStream | None = None
        self.decisions = _Shared(1)
        self.lock = threading.Lock()
        begun = self._read_journal()
        # Words become the name of a run as everywhere in dpmf; the digits then stand for them.
        named = experiment and self._stream(range(1), experiment).run
        self.run: str = named or (begun["run"] if begun else new_run())
        if jax.process_count() > 1:
            self.run = self._agree(self.run, begun is not None)
        if begun is not None and begun["run"] != self.run:
            raise BindingError(
                f"the journal at {journal} is of run {begun['run']}, not of {self.run}: leave out experiment"
            )

    def _agree(self, run: str, begun: bool) -> str:
        """One run for all processes, that of the first, and an error unless they have one key and mechanism."""
        same = (
            ("key", self.key.fingerprint),
            ("mechanism", self.mechanism.identity),
            ("arithmetic", self.arithmetic),
            ("batches", "none" if self.draws is None else str(self.draws["run"])),
            ("journal", f"begun: {begun}"),
        )
        for what, value in same:
            digits = np.frombuffer(value.encode().ljust(64), np.uint8).astype(np.int32)
            multihost_utils.assert_equal(digits, f"the processes differ in their {what}: give all of them the same")
        first = multihost_utils.broadcast_one_to_all(np.frombuffer(bytes.fromhex(run), np.uint8).astype(np.int32))
        return np.asarray(first).astype(np.uint8).tobytes().hex()

    def _stream(self, coordinates: range, run: str) -> NoiseStream:
        return NoiseStream(self.mechanism, self.key, run=run, coordinates=coordinates, arithmetic=self.arithmetic)

    @property
    def run_words(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(bytes.fromhex(self.run), np.uint32)

    def lay_out(self, tree: Any, shardings: Any) -> Layout:
        if self.layout is None:
            layout = Layout.of(tree, shardings)
            layout.check_processes()
            self.layout = layout
            self.decisions = _Shared(len(self.layout.local))
            self._begin_journal(self.layout)
            return self.layout
        made = Layout.of(tree, None)
        if (made.structure, made.shapes) != (self.layout.structure, self.layout.shapes):
            raise ValueError(
                "the tree differs from that of the first call, but one transformation serves one model: its leaves "
                f"have shapes {list(made.shapes)}, and had {list(self.layout.shapes)}"
            )
        return self.layout

    def release(
        self, device: Any, step: Any, meant: Any, run: Any, not_finite: Any, mark: Any, ticket: Any, *rest: Any
    ) -> tuple[Any, ...]:
        """The next step, whether the gradient is kept, and what is released of the sums of a device, which came under a
        ticket but for the rest of each leaf; in float arithmetic its noise alone. The callback."""
        assert self.layout is not None
        shapes = self.layout.local_shapes
        size = sum(map(prod, shapes))
        # Before anything can be refused, so that nothing stays behind.
        flat = self.uploads.take(ticket, rest) if rest else np.zeros(size, np.float32)
        assert flat.shape == (size,)
        device, step = int(device), int(step)
        named = np.asarray(run).tobytes().hex()
        if named != self.run:
            raise BindingError(
                "the optimizer's state is of another run: initialise it with this transformation, or make the "
                f"transformation with run={named!r} and the journal of that run"
            )
        if step >= self.mechanism.steps:
            self.mechanism.check_steps(step + 1)
        if meant >= 0 and meant != step:
            raise MismatchError(
                f"the batch was drawn for step {int(meant)}, but the optimizer's state is at step {step}, and the guarantee is for "
                "every batch in its own: take one update for each batch, as it comes; to go on elsewhere, take batches.after(state)"
            )
        if not_finite:
            raise ValueError(
                f"{int(not_finite)} numbers of the gradient are not finite, and what is not finite shows through any "
                "noise: clip every example before, as clipped_sum does"
            )
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
                part = slice(begin, begin + stop - start)
                flat[part] = self._released((start, stop), step, flat[part])
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
        if journal.next_step < step:
            raise MismatchError(
                f"the optimizer's state is at step {step}, but its journal at step {journal.next_step}: they are not of "
                "one run"
            )
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

    def _released(self, run: tuple[int, int], step: int, sums: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Sums with a row of noise: those of the first device that asks, for all that hold the run."""
        with self.lock:
            if run not in self.segments:
                assert self.layout is not None
                holders = [device for device in self.layout.local if run in self.layout.ranges(device)]
                self.segments[run] = self._stream(range(*run), self.run), _Shared(len(holders))
            stream, rows = self.segments[run]

        def draw(step: int) -> np.ndarray[Any, Any]:
            stream.skip_to(step)
            noisy: np.ndarray[Any, Any] = sums.copy()
            stream.add_to(noisy)
            return noisy

        row: np.ndarray[Any, Any] = rows.at(step, draw)
        return row

    @property
    def _paths(self) -> tuple[Path, Path]:
        """The description of the run, and the journal, of this process."""
        assert self.journal is not None
        index = jax.process_index()
        return self.journal / ("run.json" if index == 0 else f"run-{index}.json"), self.journal / f"process-{index}.journal"

    def _coordinates(self, layout: Layout) -> range:
        """Those of the journal: beyond the coordinates of the model, over the marks of what was released."""
        begin = sum(map(prod, layout.shapes)) + MARKS * jax.process_index()
        return range(begin, begin + MARKS)

    def _open_journal(self, step: int) -> DurableStream:
        """The journal of this process at a step. What is synced there is the step and a keyed digest of the mark."""
        assert self.layout is not None
        coordinates = self._coordinates(self.layout)
        ahead = self._stream(coordinates, self.run)
        ahead.skip_to(step)
        return DurableStream.open(
            self.mechanism,
            self.key,
            self._paths[1],
            checkpoint=ahead.checkpoint_bytes(),
            coordinates=coordinates,
            arithmetic=self.arithmetic,
        )

    def _read_journal(self) -> dict[str, Any] | None:
        """The description of a run that was begun; None if there is none, or if it ended before it could release."""
        if self.journal is None:
            return None
        path, journal = self._paths
        if not path.exists():
            if journal.exists():
                raise FormatError(
                    f"{path} is missing beside {journal.name}, which belongs to a run: restore it, or begin a new run "
                    "in another directory"
                )
            return None
        try:
            begun: dict[str, Any] = json.loads(path.read_text())
            run, mechanism, ready = begun["run"], begun["mechanism"], begun["ready"]
        except (ValueError, KeyError, TypeError) as damage:
            raise FormatError(f"{path} is not the description of a run: {damage!r}") from damage
        if mechanism != self.mechanism.identity:
            raise BindingError(f"the journal at {self.journal} was begun with another mechanism ({mechanism[:16]}…)")
        if not ready:
            return None
        if not journal.exists():
            raise FormatError(
                f"{journal} is missing, and without it a noise row could be released twice: restore it, or begin a new "
                "run in another directory"
            )
        assert isinstance(run, str)
        return begun

    def _begin_journal(self, layout: Layout) -> None:
        if self.journal is None:
            return
        if self.burn and jax.process_count() > 1:
            raise UnsupportedError('lost_input="burn" needs one decision, and there are several processes: "refuse" it')
        described = dict(
            run=self.run,
            mechanism=self.mechanism.identity,
            arithmetic=self.arithmetic,
            shapes=[list(shape) for shape in layout.shapes],
            shards=[str(sharding.spec) for sharding in layout.shardings or ()],
            devices=len(layout.devices),
            draws=self.draws,
        )
        begun = self._read_journal()
        if begun is None:
            self._create_journal(layout, described)
            return
        # The journals of other shards do not say what these released.
        for name, value in described.items():
            if name == "draws" and begun.get(name) != value:
                raise BindingError(
                    f"the journal at {self.journal} was begun with batches of {begun.get(name)}, and now they are of {value}: "
                    "examples that took part before would come again. Go on with dpmf.jax.Batches(…, journal=that directory)"
                )
            if begun.get(name) != value:
                raise BindingError(
                    f"the journal at {self.journal} was begun with the {name} {begun.get(name)}, and now they are "
                    f"{value}: resume with the same model, the same sharding and the same arithmetic"
                )

    def _create_journal(self, layout: Layout, described: dict[str, Any]) -> None:
        """Nothing is released before the description says that the journal is there, so it is missed when it is lost."""
        assert self.journal is not None
        self.journal.mkdir(parents=True, exist_ok=True)
        path, journal = self._paths
        write_durably(path, json.dumps({**described, "ready": False}).encode())
        journal.unlink(missing_ok=True)  # left by a start that ended here
        coordinates = self._coordinates(layout)
        self.stream = DurableStream.create(
            self.mechanism,
            self.key,
            journal,
            run=self.run,
            coordinates=coordinates,
            arithmetic=self.arithmetic,
        )
        write_durably(path, json.dumps({**described, "ready": True}).encode())
