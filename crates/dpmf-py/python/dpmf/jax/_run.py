"""The host's part of a run: its journal, and the rows of noise that leave with the batches."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._checks import check_experiment, statement_of
from .._core import Mechanism, NoiseKey, Plan, PrivacyStatement, PrivateRun, Sampler, _ComingRow, new_run
from .._disk import write_durably
from .._errors import BindingError, FormatError, MismatchError, StepReusedError, UnsupportedError
from .._remedies import remedies
from . import _release as release
from ._data import Batch, Batches, stamps_of
from ._layout import Layout
from ._memory import Memory
from ._release import CorrelatedNoiseState, Device, Noise

#: What to do about what a run refuses.
REMEDIES = {
    "not-sampled": 'make the run from the plan, dpmf.jax.Run(plan, key, parameters), and train on its batches, or plan with sampling="none"',
    "too-many": "call accumulate(…, batch=batch) once a step, with one row for each place of the batch. Add up several losses of an "
    "example, or average over its views, inside of loss",
    "other-step": "take the sum of the batch that was handed out, as it comes",
    "other-order": "train on the batches that the run began with",
    "sampler-in-use": "make dpmf.jax.Batches(plan, key) anew for every run",
}

#: What follows when a row met two sums.
ENDED = (
    "its noise was used twice, and the difference of the two releases reveals the data. This run releases nothing more; delete both "
    "results, and begin a new run in another directory"
)

#: The way that journals say what JAX released.
FORMAT = 2


class _Handed(NamedTuple):
    """Batches that were handed out together, and whose outcome did not come back yet."""

    steps: list[int]
    batch: Batch


class Run:
    """A run of private training: its batches, each with its noise, and the commit of every step.

        run = dpmf.jax.Run(plan, key, parameters)
        optimizer = dpmf.jax.sgd(run, learning_rate=0.5)
        state = optimizer.init(parameters)
        for batch in run.batches(state):
            parameters, state = step(parameters, state, batch)  # update(total, state, parameters, batch=batch)
            run.commit(state)

    plan is a dpmf.Plan, or a Mechanism together with examples, the number of examples. With a Mechanism alone, batches have no indices,
    and you must make sure that the data takes part as the mechanism's statement says; if the mechanism relies on sampling, also pass
    sampler=plan.sampler(key), and give step i the sum over sampler.members(i). size is that of Batches; batches= takes one that you
    have made. A mean divides by the expected batch size, or by denominator, the planned size of a cohort.

    parameters are the float32 parameters that will be trained, placed on their devices. Their leaves, flattened in the order of
    jax.tree.leaves, are the coordinates of the noise. Each device gets the noise of its own shard, bit for bit that of an unsharded
    run. For parameters that do not exist yet (jax.eval_shape), pass shardings, a tree of NamedSharding. Several processes all need the
    same key, and the parameters must be sharded over all of them.

    journal is a directory that makes restarts safe: a row is recorded before it is handed out, and its sum before the next row. After
    a crash, a committed step can be repeated with the same sum only, and a step that was handed out but not committed is burned: its
    update is zero. Without a journal, a run ends with its process. With lost_input="burn", a committed step whose sum differs is given
    up instead of refused. experiment names a run whose noise is the same at every start, for experiments that release nothing; the key
    must be NoiseKey.from_seed(…).

    arithmetic is "exact" or "float", and fixed for a run. With "exact", sums are real numbers on a grid of 2⁻²⁴ to 2⁻²³ of the clip,
    released with ideal noise and correctly rounded. With "float", noise is made and added in single precision, which is faster, but
    the guarantee does not cover the lowest bits of a release.

    ahead is the number of threads that make the next row while the devices work; by default half of the machine's, and none for fewer
    than 32,768 coordinates. It does not change any bit.

    Guarantee: if one example moves the sum by at most the clip, which accumulate ensures, all releases together satisfy the mechanism's
    statement, in exact arithmetic down to the last bit. A row is used with one sum only: the table in docs/how-to/jax.md lists what is
    checked when a step is traced, when it runs, and when it is committed.

    Cost: for each step, 8 bytes per coordinate (4 in float arithmetic) are copied to the devices while the previous step runs. Nothing
    as large as the model is copied back.
    """

    def __init__(
        self,
        plan: Plan | Mechanism,
        key: NoiseKey,
        parameters: Any,
        *,
        examples: int | None = None,
        size: int | None = None,
        batches: Batches | None = None,
        sampler: Sampler | None = None,
        denominator: float | None = None,
        experiment: str | None = None,
        journal: str | os.PathLike[str] | None = None,
        lost_input: Literal["refuse", "burn"] = "refuse",
        shardings: Any = None,
        arithmetic: Literal["exact", "float"] = "exact",
        ahead: int | None = None,
    ) -> None:
        mechanism = plan.mechanism if isinstance(plan, Plan) else plan
        if batches is None and sampler is None and (isinstance(plan, Plan) or examples is not None):
            batches = Batches(plan, key, examples=examples, size=size, journal=journal, experiment=experiment)
        elif examples is not None or size is not None:
            raise ValueError("examples and size describe batches that the run makes itself: remove them, or remove batches and sampler")
        if batches is not None and sampler is not None:
            raise ValueError("batches and sampler both determine who takes part: pass only one of them")
        if batches is not None and batches.mechanism.identity != mechanism.identity:
            raise MismatchError("the batches were made for another mechanism: make both from one plan")
        if sampler is not None:
            mechanism.check_sampling(sampler.sampling)
            mechanism.check_steps(sampler.steps)
        drawn = batches if batches is not None else sampler
        if denominator is None:
            denominator = 1.0 if drawn is None else drawn.expected_batch
        if not denominator > 0:
            raise ValueError(f"denominator is {denominator}, but it must be above zero: it is the planned cohort")
        if lost_input not in ("refuse", "burn"):
            raise ValueError(f"lost_input is {lost_input!r}, but it must be refuse or burn")
        if arithmetic not in ("exact", "float"):
            raise ValueError(f"arithmetic is {arithmetic!r}, but it must be exact or float")
        statement_of(mechanism)
        check_experiment(key, experiment)
        self.mechanism, self.key, self.denominator = mechanism, key, denominator
        #: Who takes part in which step; None where the caller sees to it.
        self.drawn, self.sampler = batches, sampler
        self.journal = None if journal is None else Path(journal)
        self.arithmetic: Literal["exact", "float"] = arithmetic
        self.ahead = ahead
        self._burns = lost_input == "burn"
        self._draws = None if batches is None else batches.draws
        begun = self._read_journal()
        # Words become the name of a run as everywhere in dpmf; the digits then stand for them.
        named = None if experiment is None else self._probe(experiment).run
        #: The name of the run, 32 hexadecimal digits.
        self.name: str = named or (begun["run"] if begun else new_run())
        if jax.process_count() > 1:
            self.name = self._agree(self.name, begun is not None)
        if begun is not None and begun["run"] != self.name:
            raise BindingError(f"the journal at {self.journal} belongs to run {begun['run']}, not to {self.name}: remove experiment")
        probe = self._probe(self.name)
        if drawn is None and mechanism.sampling != "none":
            with remedies(REMEDIES):
                probe.follow("nobody in particular", by_step=False)
        self.layout = Layout.of(parameters, shardings)
        self.layout.check_processes()
        #: By which devices mark their sums: secret, so that nobody can choose sums with equal marks.
        self._salt = np.array(probe.mark_salt(), np.uint32)
        #: None for a run that goes on until it is known at which step.
        self._run: PrivateRun | None = None
        self._split = self._split_of(probe)
        #: What rows in float arithmetic are multiplied by; the thread that ships them must not ask a run that is at work.
        self._scale = np.float32(probe.scale)
        self.device = Device(self.layout, self._split, burns=self._burns)
        #: The coming step, and the first that this process has handed out.
        self._next, self._first = 0, 0
        self._burned: set[int] = set()
        self._handed: _Handed | None = None
        #: What stands for all sums so far; None until there is one, or a state says so.
        self._chain: np.ndarray[Any, Any] | None = None
        self._memory = Memory()
        self._shipping: tuple[int, Future[Any]] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._begin()

    def _probe(self, name: str) -> PrivateRun:
        """A run that releases nothing, for what does not depend on the model."""
        return PrivateRun(self.mechanism, self.key, dimension=1, run=name, arithmetic=self.arithmetic, ahead=0)

    def _split_of(self, probe: PrivateRun) -> tuple[float, int, float] | None:
        if self.arithmetic == "float":
            return None
        unit, shift, grid = probe.split_row()
        if not 2.0**-96 <= grid <= 2.0**96:
            raise UnsupportedError(f'the noise is on a grid of {grid:g}, beyond single precision: use arithmetic="float", or another clip')
        return unit, shift, grid

    def _agree(self, run: str, begun: bool) -> str:
        """One run for all processes, that of the first, and an error unless they have one key and mechanism."""
        same = (
            ("key", self.key.fingerprint),
            ("mechanism", self.mechanism.identity),
            ("arithmetic", self.arithmetic),
            ("batches", "none" if self._draws is None else str(self._draws["run"])),
            ("journal", f"begun: {begun}"),
        )
        for what, value in same:
            digits = np.frombuffer(value.encode().ljust(64), np.uint8).astype(np.int32)
            multihost_utils.assert_equal(digits, f"the processes differ in their {what}: give all of them the same")
        first = multihost_utils.broadcast_one_to_all(np.frombuffer(bytes.fromhex(run), np.uint8).astype(np.int32))
        return np.asarray(first).astype(np.uint8).tobytes().hex()

    @property
    def words(self) -> np.ndarray[Any, Any]:
        """The name of the run as a state has it."""
        return np.frombuffer(bytes.fromhex(self.name), np.uint32)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.mechanism.steps

    @property
    def expected_batch(self) -> float | None:
        """Average number of examples in a batch; None if it is not known."""
        drawn = self.drawn if self.drawn is not None else self.sampler
        return None if drawn is None else drawn.expected_batch

    @property
    def privacy(self) -> PrivacyStatement | None:
        """What is guaranteed."""
        return self.mechanism.privacy if self._run is None else self._run.privacy

    @property
    def specs(self) -> Noise:
        """How the noise of a batch lies on the mesh of the parameters, a tree of PartitionSpec for shard_map."""
        if self.layout.shardings is None:
            raise ValueError("the parameters are on one device, so there is no mesh for shard_map")
        leaves = tuple(sharding.spec for sharding in self.layout.shardings)
        return Noise(jax.sharding.PartitionSpec(), (leaves,) * (2 if self._split else 1))

    # -----------------------------------------------------------------------------------------------------------------
    # Handing out
    # -----------------------------------------------------------------------------------------------------------------

    def batches(self, state: Any = None, *, together: int | None = None) -> Iterator[Batch]:
        """The remaining batches, each with its noise, from an optimizer's state on; without a state, from the first step on.

        Each is for one step, whose state commit() is given before the next one comes. together hands out so many at once, stacked, for
        jax.lax.scan; the last ones may be fewer. Their rows take memory on the devices, and are not made ahead.

        Raises MismatchError or StepReusedError for a state that this run cannot go on from.
        """
        if together is not None and not 1 <= together <= release.DEPTH:
            raise ValueError(f"together is {together}, but it must be between 1 and {release.DEPTH}, the steps that a state remembers")
        self._go_on(state)
        return self._hand_out(together)

    def _go_on(self, state: Any) -> None:
        """Continues the run from a state."""
        found = None if state is None else on_host(state)
        step = 0 if found is None else int(found.step)
        if found is not None:
            self._check_name(found.run.tobytes().hex())
            if found.fault:
                raise MismatchError(f"the update of step {step} was refused, and its state cannot be used: continue with the state before it")
        if self._run is None:
            self._run = self._open(step)
            self._next, self._first, self._burned = step, step, set(self._run.burned)
        due = self._handed.steps[0] if self._handed is not None else self._next
        if step < due:
            raise StepReusedError(self._used(step))
        if step > due:
            remedy = (
                "To continue after a restart, train with dpmf.jax.Run(…, journal=directory)"
                if self.journal is None
                else "Its journal at that step is of another run"
            )
            raise MismatchError(f"the optimizer's state is at step {step}, but the run is at step {due}. {remedy}")
        chain = np.zeros(4, np.uint32) if found is None else found.chain
        if self._chain is not None and not np.array_equal(self._chain, chain):
            raise StepReusedError(self._branched(step))
        self._chain = chain

    def _check_name(self, named: str) -> None:
        if named != self.name:
            raise BindingError(
                "the optimizer's state is of another run: initialise it with an optimizer of this one, or make the run "
                f"with the journal of run {named}"
            )

    @staticmethod
    def _used(step: int) -> str:
        return (
            f"the optimizer's state is at step {step}, but the noise of that step was released already: a "
            "state can be used for one update only, and each update needs the state that the previous one returned"
        )

    @staticmethod
    def _branched(step: int) -> str:
        return (
            f"the optimizer's state is at step {step}, but it comes from another update than the one that was committed: a state can be "
            "used for one update only, and each update needs the state that the previous one returned"
        )

    def _hand_out(self, together: int | None) -> Iterator[Batch]:
        while self._handed is not None or self._next < self.steps:
            if self._handed is None:
                self._handed = self._take(together)
            handed = self._handed
            yield handed.batch
            if self._handed is handed:
                raise MismatchError(
                    f"step {handed.steps[0]} was handed out, but its result did not come back: call run.commit(state) with the state "
                    "that every step returns, before the next batch"
                )

    def _take(self, together: int | None) -> _Handed:
        """Batches of the coming steps with their noise, all of it on record."""
        assert self._run is not None
        if lost := self._run.outstanding:
            raise MismatchError(
                f"the noise of step {lost[0]} was lost on its way to the devices and is not made again: resume from the journal, "
                "where that step is burned, or begin a new run"
            )
        count = min(together or 1, self.steps - self._next)
        steps = list(range(self._next, self._next + count))
        # What may be refused comes before anything is on record.
        drawn = [self._drawn_at(step) for step in steps]
        stacked = together is not None
        taken = [self._take_row(step, stacked=stacked, follows=place == 0) for place, step in enumerate(steps)]
        tickets, rows = [ticket for ticket, _ in taken], [row for _, row in taken]
        placed = rows[0]
        if not isinstance(placed, tuple):
            placed = tuple(self.layout.place(words, stacked=stacked) for words in zip(*rows))
        noise = Noise(np.stack(tickets) if stacked else tickets[0], placed)
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *drawn) if stacked else drawn[0]
        self._next += count
        if not stacked:
            self._ship_ahead()
        return _Handed(steps, batch._replace(noise=noise))

    def _drawn_at(self, step: int) -> Batch:
        if self.drawn is not None:
            return self.drawn.at(step)
        return Batch(np.int32(step), None, None, None)

    def _take_row(self, step: int, *, stacked: bool, follows: bool) -> tuple[np.ndarray[Any, Any], Any]:
        """The ticket of a step, and its row: a tuple on the devices, or a list of words of the host; zeros if it was burned."""
        assert self._run is not None and self._chain is not None
        row, mark, burned = self._zeros(), None, step in self._burned
        if not burned:
            row = self._row(step, stacked)
            taken, mark = self._run.hand_over()
            assert taken == step
        ticket = np.zeros(release.TICKET, np.uint32)
        ticket[release.STEP] = step
        flags = (release.BURNED if burned else 0) | (release.BOUND if follows else 0) | (0 if mark is None else release.REPEATED)
        if self.drawn is not None:
            members, stamps = self.drawn.known(step)
            place, _ = stamps_of(np.full(1, step, np.uint32), np.full(1, self.drawn.origin, np.uint32), np.zeros(1, np.uint32))
            ticket[release.MEMBERS], ticket[release.PLACE], ticket[release.STAMPS] = members, place[0], stamps
            flags |= release.COUNTED | release.STAMPED
        elif self.sampler is not None:
            ticket[release.MEMBERS] = len(self.sampler.members(step))
            flags |= release.COUNTED
        ticket[release.FLAGS] = flags
        ticket[release.RUN], ticket[release.FOLLOWS], ticket[release.SALT] = self.words, self._chain, self._salt
        ticket[release.PAD] = self._pad(step)
        if mark is not None:
            ticket[release.MARK] = mark
        return ticket, row

    def _pad(self, step: int) -> np.ndarray[Any, Any]:
        """The mask of the outcome of a step in a state, because states are saved and passed on."""
        words = hmac.digest(self._salt.tobytes(), b"outcome" + step.to_bytes(8, "little"), "sha256")
        return np.frombuffer(words, np.uint32)[:7]

    def _outcome(self, step: int, found: CorrelatedNoiseState) -> np.ndarray[Any, Any]:
        """The outcome of a step, without its mask."""
        outcome: np.ndarray[Any, Any] = np.array(found.log[step % release.DEPTH])
        outcome[release.MASKED] ^= self._pad(step)
        return outcome

    def _row(self, step: int, stacked: bool) -> Any:
        """The row of the coming step: leaves on the devices if they are under way, or words on the host."""
        assert self._run is not None and self._run.next_step == step
        shipping, self._shipping = self._shipping, None
        if shipping is not None:
            on_devices = shipping[1].result()
            if shipping[0] == step and not stacked:
                return on_devices
        return self._words(self._run.coming_row())

    def _words(self, row: _ComingRow) -> list[np.ndarray[Any, Any]]:
        """A row of noise, in memory that nothing else uses as long as it is in use, since devices may use it as it is."""
        words = [self._memory.take(len(word), word.dtype) for word in self._zeros()]
        if self._split is not None:
            row.ship_split(0, *words)
        else:
            row.ship(0, words[0])
            words[0] *= self._scale
        return words

    def _zeros(self) -> list[np.ndarray[Any, Any]]:
        length = sum(stop - start for start, stop in self.layout.held)
        dtypes: list[Any] = [np.int32, np.uint32] if self._split is not None else [np.float32]
        return [np.zeros(length, dtype) for dtype in dtypes]

    def _ship_ahead(self) -> None:
        """Begins to bring the coming row to the devices, where rows are made ahead."""
        assert self._run is not None
        if not self._run.ahead or self._next >= self.steps or self._next in self._burned:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "dpmf-ship")
        # By as many threads as make it: the devices may be the other cores.
        row = self._run.coming_row(self._run.ahead)

        def ship() -> tuple[Any, ...]:
            return tuple(self.layout.place([word], stacked=False) for word in self._words(row))

        self._shipping = self._next, self._thread.submit(ship)

    # -----------------------------------------------------------------------------------------------------------------
    # Committing
    # -----------------------------------------------------------------------------------------------------------------

    def commit(self, state: Any) -> None:
        """Records the outcome of the steps that were handed out, from the optimizer's state after them.

        It waits for them. What was refused on the devices, where it released nothing, is raised here; the same batch may then be used
        again from the state before it. A state of a step that was committed with another sum ends the run: nothing more is handed out.
        """
        found = on_host(state)
        self._check_name(found.run.tobytes().hex())
        if self._run is None:
            raise MismatchError("nothing was handed out: take the batches of run.batches(state)")
        if self._handed is None:
            self._check_again(found)
            return
        for step in self._handed.steps:
            if step in self._run.outstanding or step in self._burned:
                self._commit(step, found)
            else:
                # On record from an earlier call, which a step after it or an interrupt ended.
                self._check_same(step, found)
        self._chain, self._handed = found.chain, None

    def _check_again(self, found: CorrelatedNoiseState) -> None:
        """A state that is committed again must be the same."""
        assert self._run is not None
        last = int(found.step) - 1
        if last < 0:
            return
        if last >= self._next or self._outcome(last, found)[0] != last + 1:
            raise MismatchError(f"the state is at step {last + 1}, but no step is outstanding: take the batches of run.batches(state)")
        for step in range(max(self._first, last + 1 - release.DEPTH), last + 1):
            if step not in self._burned:
                self._check_same(step, found)

    def _check_same(self, step: int, found: CorrelatedNoiseState) -> None:
        """A step that was committed before must have the same sum, or be refused by the devices."""
        assert self._run is not None
        outcome = self._outcome_at(step, found)
        try:
            if self._refused(step, outcome):
                return
        except BaseException:
            self._run.clear()
            raise
        try:
            self._run.settle(step, outcome[release.MARKED].tolist())
        except StepReusedError as reused:
            self._handed = None
            self._end(step)
            raise StepReusedError(f"step {step} was committed before, with a different sum: {ENDED}") from reused

    def _end(self, step: int) -> None:
        """Later processes hand nothing out either."""
        if self.journal is not None:
            path, _ = self._paths
            write_durably(path, json.dumps({**json.loads(path.read_text()), "ended": step}).encode())

    def _commit(self, step: int, found: CorrelatedNoiseState) -> None:
        assert self._run is not None
        outcome = self._outcome_at(step, found)
        try:
            if self._refused(step, outcome):
                # An interrupt in between leaves a step that is given up by the next call.
                self._burned.add(step)
                if step in self._run.outstanding:
                    self._run.give_up()
            elif step not in self._burned:
                self._contribute(step, outcome)
                self._run.settle(step, outcome[release.MARKED].tolist())
        except BaseException:
            self._run.clear()
            raise

    def _outcome_at(self, step: int, found: CorrelatedNoiseState) -> np.ndarray[Any, Any]:
        """The outcome of a step that was handed out, from a state after it."""
        outcome = self._outcome(step, found)
        if outcome[0] != step + 1:
            raise MismatchError(
                f"the state is at step {int(found.step)}, and holds no outcome of step {step}, which was handed out: commit the state that "
                "update(…, batch=batch) returned for that batch"
            )
        return outcome

    def _refused(self, step: int, outcome: np.ndarray[Any, Any]) -> bool:
        """Raises the reason if nothing was released of a step. Returns whether the step is given up."""
        assert self._run is not None
        fault, not_finite, differing, found = (int(outcome[place]) for place in (1, 9, 10, 11))
        if fault & release.OTHER_RUN:
            raise BindingError("the optimizer's state is of another run: initialise it with an optimizer of this one")
        if fault & release.OTHER_STEP:
            if found < step:
                raise StepReusedError(self._used(found))
            raise MismatchError(f"the optimizer's state is at step {found}, but its batch is of step {step}: a batch is for one step")
        if fault & release.OTHER_BRANCH:
            raise StepReusedError(self._branched(step))
        if fault & release.DIFFERING:
            raise MismatchError(
                f"{differing} arrays of step {step} differ between devices that should hold copies of one sum, and each copy "
                "would be released with the same noise: add up what the devices have, jax.lax.psum(total, axes), before update"
            )
        if fault & release.NOT_FINITE:
            raise ValueError(
                f"{not_finite} numbers of the gradient of step {step} are not finite, and no noise can hide them: clip every example "
                "first, as clipped_sum does"
            )
        if fault & (release.TOO_MANY | release.OTHER_MEMBERS):
            self._contribute(step, outcome)
            raise MismatchError(f"the contributions to step {step} are not those of its batch")
        if fault & release.STUCK:
            raise MismatchError(f"nothing was released in step {step}, because the update of an earlier step was refused")
        if fault & release.OTHER_SUM and not self._burns:
            raise StepReusedError(
                f"step {step} was released before a restart, with other gradients: feed the same batches in the "
                'same order, or give up such steps with lost_input="burn"'
            )
        return fault != 0

    def _contribute(self, step: int, outcome: np.ndarray[Any, Any]) -> None:
        """Counts the contributions of a step against the batch that they are of."""
        assert self._run is not None
        contributions = int(outcome[2].astype(np.int32))
        stamp = [int(word) for word in outcome[3:5]]
        if contributions < 0:
            raise ValueError(f"the sum has {contributions} contributions, but the number cannot be negative")
        members = None
        with remedies(REMEDIES):
            if self.drawn is not None:
                drawn = self.drawn.step_of_stamp(step, contributions, stamp[0])
                if drawn is None:
                    self._run.follow("several steps, or of another dpmf.jax.Batches", by_step=True, **self._sampler)
                else:
                    length, members = self.drawn.known(drawn)
                    self._run.hand_out(drawn, length)
            elif self.sampler is not None:
                self._run.hand_out(step, len(self.sampler.members(step)))
            self._run.contribute(contributions)
        if contributions and members not in (None, stamp[1]):
            raise MismatchError(
                f"the {contributions} contributions to step {step} are not those of its examples, each once: take the sum of a whole "
                "batch, or of all of its parts (batch.split), with accumulate(…, batch=batch)"
            )

    def close(self) -> None:
        """Closes the journal, so that another process can continue. No further batch is handed out."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._run is not None:
            self._run.close()

    # -----------------------------------------------------------------------------------------------------------------
    # The run and its journal
    # -----------------------------------------------------------------------------------------------------------------

    @property
    def _sampler(self) -> dict[str, Any]:
        """The sampler of the run, for run.follow."""
        if self.drawn is not None:
            # Batches name their draws themselves, anew or as the journal does.
            return dict(sampler=self.drawn.sampler, fresh=True)
        return dict(sampler=self.sampler)

    @property
    def _paths(self) -> tuple[Path, Path]:
        """The description of the run, and the journal, of this process."""
        assert self.journal is not None
        index = jax.process_index()
        return self.journal / ("run.json" if index == 0 else f"run-{index}.json"), self.journal / f"process-{index}.journal"

    @property
    def _held(self) -> dict[str, Any]:
        """What this process holds of the model, for the run. Journals of all processes say the same."""
        return dict(
            dimension=sum(map(prod, self.layout.shapes)),
            ranges=[range(*part) for part in self.layout.held],
            arithmetic=self.arithmetic,
            ahead=self.ahead,
            part=True,
        )

    def _prepared(self, run: PrivateRun) -> PrivateRun:
        """The run with what decides its batches, and its denominator."""
        run.denominator = self.denominator
        if self.drawn is not None or self.sampler is not None:
            order = json.dumps(self._draws) if self.sampler is None else f"sampler of run {self.sampler.run}"
            try:
                with remedies(REMEDIES):
                    run.follow(order, by_step=True, **self._sampler)
            except BaseException:
                run.close()
                raise
        return run

    def _begin(self) -> None:
        """Makes the run, or checks that the journal of one that was begun is of this model."""
        if self.journal is None:
            self._run = self._prepared(PrivateRun(self.mechanism, self.key, run=self.name, **self._held))
            return
        if self._burns and jax.process_count() > 1:
            raise UnsupportedError('lost_input="burn" is not possible with several processes, which might decide differently: use "refuse"')
        described = dict(
            run=self.name,
            mechanism=self.mechanism.identity,
            arithmetic=self.arithmetic,
            shapes=[list(shape) for shape in self.layout.shapes],
            shards=[str(sharding.spec) for sharding in self.layout.shardings or ()],
            devices=len(self.layout.devices),
            draws=self._draws,
            format=FORMAT,
        )
        begun = self._read_journal()
        if begun is None:
            self._create(described)
            return
        # The marks of other shards are others.
        for name, value in described.items():
            if name == "draws" and begun.get(name) != value:
                raise BindingError(
                    f"the journal at {self.journal} was begun with batches of {begun.get(name)}, and now they are of {value}: "
                    "examples that already took part could take part again. Continue with batches that were made with journal=that directory"
                )
            if begun.get(name) != value:
                raise BindingError(
                    f"the journal at {self.journal} was begun with the {name} {begun.get(name)}, and now they are "
                    f"{value}: resume with the same model, the same sharding and the same arithmetic"
                )

    def _create(self, described: dict[str, Any]) -> None:
        """Nothing is handed out before the description says that the journal is there, so it is missed when it is lost."""
        assert self.journal is not None
        self.journal.mkdir(parents=True, exist_ok=True)
        path, journal = self._paths
        write_durably(path, json.dumps({**described, "ready": False}).encode())
        journal.unlink(missing_ok=True)  # left by a start that ended here
        self._run = self._prepared(PrivateRun(self.mechanism, self.key, run=self.name, journal=journal, **self._held))
        try:
            write_durably(path, json.dumps({**described, "ready": True}).encode())
        except BaseException:
            self._run.close()
            raise

    def _open(self, step: int) -> PrivateRun:
        """The run of a journal that was begun, from a step on."""
        if not self._paths[1].exists():
            raise self._lost(self._paths[1])
        return self._prepared(PrivateRun.open(self.mechanism, self.key, self._paths[1], at=step, **self._held))

    @staticmethod
    def _lost(journal: Path) -> FormatError:
        return FormatError(
            f"{journal} is missing, and without it a noise row could be released twice: restore it, or begin a new "
            "run in another directory"
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
            known = begun.get("format", 1)
        except (ValueError, KeyError, TypeError, AttributeError) as damage:
            raise FormatError(f"{path} is not the description of a run: {damage!r}") from damage
        if mechanism != self.mechanism.identity:
            raise BindingError(f"the journal at {self.journal} was begun with another mechanism ({mechanism[:16]}…)")
        if not ready:
            return None
        if known != FORMAT:
            raise FormatError(
                f"the journal at {self.journal} was begun by "
                + ("dpmf 0.2 or a pre-release of 0.3" if known == 1 else "a newer version")
                + ", which recorded JAX releases in a different way: finish that run with the version that began it, or begin a new "
                "run in another directory with a new key. What it released stays private"
            )
        if not journal.exists():
            raise self._lost(journal)
        if "ended" in begun:
            raise StepReusedError(f"step {begun['ended']} of the run at {self.journal} was committed twice, with different sums: {ENDED}")
        assert isinstance(run, str)
        return begun


def noise_of(state: Any) -> CorrelatedNoiseState:
    """What an optimizer's state holds of its run."""
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, CorrelatedNoiseState))
    found = [leaf for leaf in leaves if isinstance(leaf, CorrelatedNoiseState)]
    if len(found) != 1:
        raise ValueError(f"the optimizer's state holds {len(found)} states of add_correlated_noise, but one is needed")
    return found[0]


def step_of(state: Any) -> int:
    """The step that an optimizer's state is at: that of the CorrelatedNoiseState within it."""
    return int(_local(noise_of(state).step))


def on_host(state: Any) -> CorrelatedNoiseState:
    """The same in memory of the host. Copies of the log on several devices must be alike: it has a mark of what each released."""
    found = noise_of(state)
    logs = _copies(found.log)
    if any(not np.array_equal(log, logs[0]) for log in logs):
        raise MismatchError(
            "the optimizer's state differs between devices, so they released different sums with the same noise: delete both results, "
            "and begin a new run. Place the parameters on the mesh of all devices before dpmf.jax.Run(…), which finds this before the "
            "release"
        )
    return CorrelatedNoiseState(_local(found.step), _local(found.run), _local(found.chain), _local(found.fault), logs[0])


def _local(leaf: Any) -> np.ndarray[Any, Any]:
    """A number of which every device has a copy."""
    return np.asarray(leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf)


def _copies(leaf: Any) -> list[np.ndarray[Any, Any]]:
    """What each device of this process has of an array; the whole of one that was cut."""
    if not isinstance(leaf, jax.Array) or not leaf.sharding.is_fully_replicated:
        return [np.asarray(leaf)]
    return [np.asarray(shard.data) for shard in leaf.addressable_shards]
