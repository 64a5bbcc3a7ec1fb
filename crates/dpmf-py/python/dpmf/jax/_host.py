"""What lives outside of jit: the run, its journal, and the release of each step."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._checks import check_experiment, statement_of
from .._core import Mechanism, NoiseKey, PrivateRun, Sampler, new_run
from .._disk import write_durably
from .._errors import BindingError, FormatError, MismatchError, StepReusedError, UnsupportedError
from .._remedies import remedies
from ._data import Batches
from ._layout import Layout, Uploads

#: What to do about what a run refuses.
REMEDIES = {
    "not-sampled": 'give batches=dpmf.jax.Batches(plan, key) and train on them, or plan with sampling="none"',
    "too-many": "call accumulate(…, batch=batch) once a step, with one row for each place of the batch. Add up several losses of an "
    "example, or average over its views, inside of loss",
    "other-step": "take one update for each batch, as it comes; to go on elsewhere, take batches.after(state)",
    "other-order": "train on the batches that the optimizer was made with, each in its own step",
    "sampler-in-use": "make dpmf.jax.Batches(plan, key) anew for every optimizer",
}


@dataclass
class _Step:
    """A step that was committed, until every device has its part."""

    kept: bool
    """Whether it is released; otherwise it was burned."""
    mark: bytes
    waiting: set[int]
    """Devices that did not ask for it yet."""
    rows: dict[tuple[int, int], tuple[np.ndarray[Any, Any], int]] = field(default_factory=dict)
    """What was released of coordinates that several devices hold, with the number of those that did not ask yet."""


def _no_program(*_: Any) -> Any:
    raise AssertionError("there is no layout yet")


class Host:
    """Everything that lives outside of jit. Which step comes next, and what it may have, is for the run to say."""

    def __init__(
        self,
        mechanism: Mechanism,
        key: NoiseKey,
        *,
        denominator: float,
        batches: Batches | None,
        sampler: Sampler | None,
        experiment: str | None,
        journal: Path | None,
        burn: bool,
        arithmetic: Literal["exact", "float"],
    ) -> None:
        statement_of(mechanism)
        check_experiment(key, experiment)
        self.mechanism, self.key, self.journal, self.burn = mechanism, key, journal, burn
        self.denominator, self.batches, self.sampler = denominator, batches, sampler
        self.arithmetic: Literal["exact", "float"] = arithmetic
        self.draws = None if batches is None else batches.draws
        self.layout: Layout | None = None
        self.program: Callable[..., Any] = _no_program
        self.uploads = Uploads()
        #: None until there is a layout, and of a run that goes on until it is known at which step.
        self.run: PrivateRun | None = None
        #: The coordinates that this process holds: their place among the parts of the run, and how many devices hold them.
        self.parts: dict[tuple[int, int], tuple[int, int]] = {}
        self.steps: dict[int, _Step] = {}
        self.lock = threading.Lock()
        begun = self._read_journal()
        # Words become the name of a run as everywhere in dpmf; the digits then stand for them.
        named = None if experiment is None else self._probe(experiment).run
        self.name: str = named or (begun["run"] if begun else new_run())
        if jax.process_count() > 1:
            self.name = self._agree(self.name, begun is not None)
        if begun is not None and begun["run"] != self.name:
            raise BindingError(
                f"the journal at {journal} is of run {begun['run']}, not of {self.name}: leave out experiment"
            )
        probe = self._probe(self.name)
        if batches is None and sampler is None and mechanism.sampling != "none":
            with remedies(REMEDIES):
                probe.follow("nobody in particular", by_step=False)
        #: By which devices mark their sums: secret, so that nobody can choose sums with equal marks.
        self.salt = np.array(probe.mark_salt(), np.uint32)

    def _probe(self, name: str) -> PrivateRun:
        """A run that releases nothing, for what does not depend on the model."""
        return PrivateRun(self.mechanism, self.key, dimension=1, run=name)

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

    @property
    def name_words(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(bytes.fromhex(self.name), np.uint32)

    def lay_out(self, tree: Any, shardings: Any) -> Callable[..., Any]:
        """What releases a sum of a model, Layout.program: the same for every call."""
        if self.layout is None:
            layout = Layout.of(tree, shardings)
            layout.check_processes()
            holders = Counter(part for device in layout.local for part in sorted(layout.ranges(device)))
            self.parts = {part: (index, count) for index, (part, count) in enumerate(holders.items())}
            self._begin(layout)
            marked, exact = self.journal is not None, self.arithmetic == "exact"
            self.program = layout.program(self.release, self.uploads, self.salt, marked=marked, exact=exact)
            self.layout = layout
            return self.program
        made = Layout.of(tree, None)
        if (made.structure, made.shapes) != (self.layout.structure, self.layout.shapes):
            raise ValueError(
                "the tree differs from that of the first call, but one transformation serves one model: its leaves "
                f"have shapes {list(made.shapes)}, and had {list(self.layout.shapes)}"
            )
        return self.program

    def release(
        self,
        device: Any,
        step: Any,
        run: Any,
        contributions: Any,
        stamp: Any,
        not_finite: Any,
        differing: Any,
        mark: Any,
        ticket: Any,
        *rest: Any,
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
        if named != self.name:
            raise BindingError(
                "the optimizer's state is of another run: initialise it with this transformation, or make the "
                f"transformation with the journal of run {named}"
            )
        if step >= self.mechanism.steps:
            self.mechanism.check_steps(step + 1)
        if differing:
            raise MismatchError(
                f"{int(differing)} arrays of this step differ between devices that should hold copies of one sum, and each copy "
                "would be released with the same noise: add up what the devices have, jax.lax.psum(total, axes), before update"
            )
        if not_finite:
            raise ValueError(
                f"{int(not_finite)} numbers of the gradient are not finite, and what is not finite shows through any "
                "noise: clip every example before, as clipped_sum does"
            )
        numbers = np.array(mark, np.float32)
        with self.lock:
            taken = self.steps.get(step)
            if taken is None or device not in taken.waiting or taken.mark != numbers.tobytes():
                taken = self._commit(step, int(contributions), [int(word) for word in np.asarray(stamp)], numbers)
                self.steps[step] = taken
            taken.waiting.discard(device)
            if not taken.waiting:
                del self.steps[step]
            if taken.kept:
                for begin, start, stop in self.layout.devices[device]:
                    part = slice(begin, begin + stop - start)
                    flat[part] = self._released(taken, (start, stop), step, flat[part])
        pieces = np.split(flat, np.cumsum([prod(shape) for shape in shapes])[:-1]) if shapes else []
        return (np.int32(step + 1), np.bool_(taken.kept), *(piece.reshape(shape) for piece, shape in zip(pieces, shapes)))

    def _commit(self, step: int, contributions: int, stamp: list[int], mark: np.ndarray[Any, Any]) -> _Step:
        """Settles a step for all devices, once and in order. If it is refused, it may be asked for again."""
        assert self.layout is not None
        if self.run is None:
            self.run = self._open(step)
        run, devices = self.run, set(self.layout.local)
        if self.journal is not None and step in run.burned:
            return _Step(False, mark.tobytes(), devices)
        if step < run.next_step:
            raise StepReusedError(
                f"the optimizer's state is at step {step}, but the noise of that step was released already: a "
                "state is good for one update, and each update must take the state of the one before it"
            )
        if step > run.next_step:
            remedy = (
                "To go on after a restart, train with add_correlated_noise(…, journal=directory)"
                if self.journal is None
                else "Its journal at that step is of another run"
            )
            raise MismatchError(f"the optimizer's state is at step {step}, but the run is at step {run.next_step}. {remedy}")
        try:
            with remedies(REMEDIES):
                self._contribute(run, step, contributions, stamp)
                run.commit(mark.tolist())
        except StepReusedError as reused:
            run.clear()
            if not self.burn:
                raise StepReusedError(
                    f"step {step} was released before a restart, with other gradients: feed the same batches in the "
                    'same order, or give up such steps with lost_input="burn" (as those that were released by dpmf 0.2, which '
                    "marked them otherwise)"
                ) from reused
            run.burn()
            return _Step(False, mark.tobytes(), devices)
        except BaseException:
            run.clear()
            raise
        return _Step(True, mark.tobytes(), devices)

    def _contribute(self, run: PrivateRun, step: int, contributions: int, stamp: list[int]) -> None:
        """Counts the contributions of a step against the batch that they are of."""
        if contributions < 0:
            raise ValueError(f"the sum has {contributions} contributions, but there cannot be fewer than none")
        members = None
        if self.batches is not None:
            drawn = self.batches.step_of_stamp(step, contributions, stamp[0])
            if drawn is None:
                run.follow("several steps, or of another dpmf.jax.Batches", by_step=True, **self._sampler)
            else:
                length, members = self.batches.known(drawn)
                run.hand_out(drawn, length)
        elif self.sampler is not None:
            run.hand_out(step, len(self.sampler.members(step)))
        run.contribute(contributions)
        if contributions and members not in (None, stamp[1]):
            raise MismatchError(
                f"the {contributions} contributions to step {step} are not those of its examples, each once: take the sum of a whole "
                "batch, or of all of its parts (batch.split), with accumulate(…, batch=batch)"
            )

    @property
    def _sampler(self) -> dict[str, Any]:
        """The sampler of the run, for run.follow."""
        if self.batches is not None:
            # Batches name their draws themselves, anew or as the journal does.
            return dict(sampler=self.batches.sampler, fresh=True)
        return dict(sampler=self.sampler)

    def _released(
        self, taken: _Step, part: tuple[int, int], step: int, sums: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """Sums with a row of noise. All devices that hold the coordinates have the same sums, and are given the same numbers."""
        assert self.run is not None
        index, holders = self.parts[part]
        row, left = taken.rows.pop(part, (None, holders))
        if row is None:
            row = sums.copy()
            self.run.release_part(index, step, row)
        if left > 1:
            taken.rows[part] = row, left - 1
        return row

    # -----------------------------------------------------------------------------------------------------------------
    # The run and its journal
    # -----------------------------------------------------------------------------------------------------------------

    @property
    def _paths(self) -> tuple[Path, Path]:
        """The description of the run, and the journal, of this process."""
        assert self.journal is not None
        index = jax.process_index()
        return self.journal / ("run.json" if index == 0 else f"run-{index}.json"), self.journal / f"process-{index}.journal"

    def _held(self, dimension: int) -> dict[str, Any]:
        """What this process holds of the model, for the run."""
        return dict(
            dimension=dimension,
            coordinates=[range(*part) for part in self.parts],
            arithmetic=self.arithmetic,
            process=jax.process_index(),
        )

    def _prepared(self, run: PrivateRun) -> PrivateRun:
        """The run with what decides its batches, and its denominator."""
        run.denominator = self.denominator
        if self.batches is not None or self.sampler is not None:
            order = json.dumps(self.draws) if self.sampler is None else f"sampler of run {self.sampler.run}"
            try:
                with remedies(REMEDIES):
                    run.follow(order, by_step=True, **self._sampler)
            except BaseException:
                run.close()
                raise
        return run

    def _begin(self, layout: Layout) -> None:
        """Makes the run, or checks that the journal of one that was begun is of this model."""
        dimension = sum(map(prod, layout.shapes))
        if self.journal is None:
            self.run = self._prepared(PrivateRun(self.mechanism, self.key, run=self.name, **self._held(dimension)))
            return
        if self.burn and jax.process_count() > 1:
            raise UnsupportedError('lost_input="burn" needs one decision, and there are several processes: "refuse" it')
        described = dict(
            run=self.name,
            mechanism=self.mechanism.identity,
            arithmetic=self.arithmetic,
            shapes=[list(shape) for shape in layout.shapes],
            shards=[str(sharding.spec) for sharding in layout.shardings or ()],
            devices=len(layout.devices),
            draws=self.draws,
        )
        begun = self._read_journal()
        if begun is None:
            self._create(dimension, described)
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

    def _create(self, dimension: int, described: dict[str, Any]) -> None:
        """Nothing is released before the description says that the journal is there, so it is missed when it is lost."""
        assert self.journal is not None
        self.journal.mkdir(parents=True, exist_ok=True)
        path, journal = self._paths
        write_durably(path, json.dumps({**described, "ready": False}).encode())
        journal.unlink(missing_ok=True)  # left by a start that ended here
        held = self._held(dimension)
        self.run = self._prepared(PrivateRun(self.mechanism, self.key, run=self.name, journal=journal, **held))
        write_durably(path, json.dumps({**described, "ready": True}).encode())

    def _open(self, step: int) -> PrivateRun:
        """The run of a journal that was begun, from a step on."""
        assert self.layout is not None
        held = self._held(sum(map(prod, self.layout.shapes)))
        return self._prepared(PrivateRun.open(self.mechanism, self.key, self._paths[1], at=step, **held))

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
