"""Correlated noise for Flower: a strategy for federated training that is private for every client.

    plan = dpmf.plan(examples=clients, batch=20, epochs=4, momentum=0.9, epsilon=8, delta=1e-6, clip=0.5, unit="user")
    strategy = dpmf.flower.PrivateFedAvg(plan, "run")
    strategy.start(grid, initial_arrays)

and, in the client, clipping_mod among the mods and answer_enrolment(app).

Who takes part in which round is as the mechanism covers: cohorts that take turns, clients that are asked again after enough
rounds, or clients that the plan's sampler draws. The server clips what the clients send, adds the noise through a journal,
divides by the planned cohort and does the step of the optimizer that the mechanism was planned for. All of it lives in one
directory, and a strategy that is started on the same directory goes on where the last one was, whatever stopped it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from ._requires import require

require("dpmf.flower", "flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from . import _sums
from ._checks import check_unit, statement_of
from ._core import DurableStream, Mechanism, NoiseKey, Plan
from ._disk import write_durably
from ._errors import BindingError, FormatError, HaltedError, MismatchError, StepReusedError, UnsupportedError
from ._flower_clients import Clients, Cohorts, Drawn, Ledger

__all__ = ["PrivateFedAvg", "answer_enrolment", "clipping_mod"]

#: The query by which the server learns who a node is.
ENROLMENT = "dpmf_enrolment"

#: Code of the error by which a client declines to take part again.
DECLINED = 8001

_log = logging.getLogger("flwr")

Vector = NDArray[np.float64]


class PrivateFedAvg(Strategy):
    """Federated averaging with correlated noise, for clients that take part in several rounds.

    mechanism is a dpmf.Plan for clients, or a Mechanism, from dpmf.plan with one step a round and unit="user"; directory holds
    the run (mechanism, key, journal, clients, model), and is private but for the mechanism. learning_rate multiplies the planned
    step sizes. arithmetic is "exact", where the sum is released with ideal noise, correctly rounded, or "float", where noise is
    made in single precision: faster, but the lowest bits of a release are outside of the guarantee. It is fixed for a run.

    Who takes part is as the mechanism covers:

    - participation="single" and "epochs:K": clients are put into cohorts before training, which take turns, K times each.
    - "min-separation:B:K": every round asks clients that are connected, none of them within B rounds, nor more than K times.
      To have been asked counts, also for a client that failed or did not answer in time, and across restarts. Clients may join
      later. A round with fewer than cohort asks those that there are; with none it is refused, and nothing released.
    - A plan that counts on sampling: its sampler draws from the clients that enrolled, and all that it draws are asked.

    cohort is the number of clients a round, that of the plan by default, and the denominator of every mean, also when clients drop
    out. Under sampling it is left out: the denominator is the expected number. clients is the number to wait for under sampling,
    that of the plan by default.

    Guarantee: what the clients and the caller see, the model after each round, satisfies mechanism.privacy for every
    client, provided that the names under which nodes enrol are those of different users. What clients report beside
    their model is not covered, and is discarded; the server's log names replies that were ignored, and is not covered either. Under
    sampling it is for those who do not see who is asked, and takes for granted that a client's answer does not depend on whether
    it was asked in other rounds.

    A round whose clients all drop out releases noise alone. After a crash, a round that was journalled is repeated; if
    its clients now send something else, its noise is given up and its step made without a gradient.
    """

    def __init__(
        self,
        mechanism: Mechanism | Plan,
        directory: str | os.PathLike[str],
        *,
        cohort: int | None = None,
        clients: int | None = None,
        learning_rate: float = 1.0,
        arithmetic: Literal["exact", "float"] = "exact",
        enrolment_timeout: float = 600.0,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
    ) -> None:
        plan = mechanism if isinstance(mechanism, Plan) else None
        mechanism = mechanism.mechanism if isinstance(mechanism, Plan) else mechanism
        statement = statement_of(mechanism)
        check_unit(mechanism, "user")
        _sums.check_clip(statement.clip)
        self.mechanism, self.directory = mechanism, Path(directory)
        self.clients = self._participation(plan, cohort, clients)
        self.optimizer = _Optimizer(mechanism, learning_rate)
        self.clip = statement.clip
        self.arithmetic: Literal["exact", "float"] = arithmetic
        self.enrolment_timeout = enrolment_timeout
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self._run: _Run | None = None
        self._names: dict[int, str] = {}
        self._asked: dict[int, str] = {}
        #: Nodes that were told of in the log because they do not say who they are.
        self._silent: set[int] = set()

    def _participation(self, plan: Plan | None, cohort: int | None, clients: int | None) -> Callable[[], Clients]:
        """How to make, at every start, what knows who takes part."""
        mechanism, directory = self.mechanism, self.directory
        if mechanism.sampling != "none":
            if cohort is not None:
                raise ValueError(
                    f"cohort is given, but this mechanism counts on sampling {mechanism.sampling}, which decides how many are asked: "
                    "leave it out, and plan with that batch"
                )
            population = plan.examples if clients is None and plan is not None else clients
            if population is None:
                raise ValueError("clients is missing: say from how many clients the sampler draws")
            if not 1 <= population <= _sums.MOST:
                raise ValueError(f"clients is {population}, but it must be at least 1 and at most {_sums.MOST}")
            return lambda: Drawn(mechanism, directory, population)
        if clients is not None:
            raise ValueError("clients is given, but this mechanism does not count on sampling: leave it out")
        size = plan.batch if cohort is None and plan is not None else cohort
        if size is None:
            raise ValueError("cohort is missing: say how many clients take part in a round")
        if not 1 <= size <= _sums.MOST:
            raise ValueError(f"cohort is {size}, but it must be at least 1 and at most {_sums.MOST}")
        kind = Ledger if mechanism.participation.startswith("min-separation") else Cohorts
        return lambda: kind(mechanism, directory, size)

    def summary(self) -> None:
        """Logs the guarantee."""
        statement = self._open_run.stream.privacy if self._run else self.mechanism.privacy
        for line in str(statement).splitlines():
            _log.info("\t%s", line)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Trains, from the beginning or from where the run in the directory stopped.

        num_rounds counts from the beginning of the run; None means all that were planned. evaluate_fn should look at
        public data: what it returns is not covered by the guarantee.
        """
        rounds = self.mechanism.steps if num_rounds is None else num_rounds
        self.mechanism.check_steps(rounds)
        self._names.clear()
        with _Run(self.mechanism, self.directory, initial_arrays, self.arithmetic, self.clients()) as self._run:
            try:
                self._run.catch_up(self.optimizer)
                self._enrol(grid)
                done = self._run.step
                if done:
                    _log.info("PrivateFedAvg: %d of %d rounds are done; going on", done, rounds)
                result = super().start(
                    grid,
                    self._run.arrays,
                    max(rounds - done, 0),
                    timeout,
                    train_config,
                    evaluate_config,
                    evaluate_fn and (lambda round, arrays: evaluate_fn(round + done, arrays)),
                )
                result.arrays = self._run.arrays
                for name in ("train_metrics_clientapp", "evaluate_metrics_serverapp"):
                    setattr(result, name, {round + done: value for round, value in getattr(result, name).items()})
                return result
            finally:
                self._run = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The model for every client that is asked in the round and is connected, and for no other."""
        del server_round
        run = self._open_run
        deadline = time.monotonic() + self.enrolment_timeout
        self._ask_names(grid)
        # Others may connect who may be asked; of cohorts and draws, those that are missing are missing.
        while isinstance(run.clients, Ledger) and run.step >= len(run.clients.rounds):
            if len(run.clients.may_be_asked(run.step, set(self._names.values()))) >= run.clients.size:
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
            self._ask_names(grid)
        chosen = run.clients.ask(run.step, set(self._names.values()))
        # A node may have passed to another user since it was asked last: those that are chosen say again who they are.
        nodes = [node for node, name in self._names.items() if name in chosen]
        answers = self._query(grid, nodes)
        self._asked = {node: self._names[node] for node in nodes if answers.get(node) == self._names[node]}
        for node in set(nodes) - set(self._asked):
            _log.warning("configure_train: node %d is no longer %r; it is not asked", node, self._names.pop(node))
        if run.clients.secret:
            _log.info("configure_train: round %d asks the clients that were drawn for it", run.step + 1)
        else:
            cohort = int(run.clients.denominator)
            note = "" if len(chosen) >= cohort else "; the mean divides by the planned number all the same"
            _log.info("configure_train: round %d asks %d of %d clients%s", run.step + 1, len(chosen), cohort, note)
        sent = ConfigRecord(dict(config))
        sent["server-round"] = run.step + 1
        sent["dpmf-clip"] = self.clip
        sent["dpmf-step"] = run.step
        sent["dpmf-run"] = run.stream.run
        sent["dpmf-separation"], sent["dpmf-times"] = run.clients.separation, run.clients.times
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: sent})
        return [Message(record, dst_node_id=node, message_type=MessageType.TRAIN) for node in self._asked]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clips, sums, adds the noise of the round, and does the optimizer's step."""
        del server_round
        run = self._open_run
        updates = self._updates(replies)
        noisy = _clipped_sum(updates.values(), self.clip, run.dimension)
        released = True
        try:
            run.stream.release(noisy)
        except StepReusedError:
            run.stream.burn()
            released = False
        noisy /= run.clients.denominator
        run.advance(self.optimizer, noisy if released else None)
        statement = run.stream.privacy
        assert statement is not None
        # How many were asked, not how many replied with something that counts, which depends on their data.
        counted = "" if run.clients.secret else f", {len(self._asked)} of {run.clients.denominator:g} clients"
        _log.info(
            "aggregate_train: round %d of %d%s%s; ε = %.4g at δ = %.2g for every client over the run",
            run.step,
            self.mechanism.steps,
            counted,
            "" if released else ", given up after a restart",
            statement.epsilon,
            statement.delta,
        )
        metrics: dict[str, Any] = dict(epsilon=statement.epsilon, delta=statement.delta)
        if not run.clients.secret:
            metrics["clients"] = len(self._asked)
        metrics["given-up"] = len(run.stream.burned)
        return run.arrays, MetricRecord(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Asks nobody: what clients would report of their data is not covered by the guarantee."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing."""
        return None

    @property
    def _open_run(self) -> _Run:
        if self._run is None:
            raise HaltedError("the run is not open: train with PrivateFedAvg.start(grid, initial_arrays)")
        return self._run

    def _updates(self, replies: Iterable[Message]) -> dict[str, Vector]:
        """At most one update from every client that was asked."""
        run = self._open_run
        updates: dict[str, Vector] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            name = self._asked.get(node)
            if reply.has_error():
                _log.info("aggregate_train: node %d failed: %s", node, reply.error.reason)
            elif name is None or name in updates:
                _log.warning("aggregate_train: node %d was not asked, or has replied before; ignored", node)
            else:
                # Whatever a client sends, it stops nobody else.
                try:
                    if (said := _name(reply)) not in (None, name):
                        raise ValueError(f"it is from {said!r}, but {name!r} was asked")
                    updates[name] = _difference(reply, run.layout, run.model)
                except Exception as fault:
                    _log.warning("aggregate_train: the reply of node %d is ignored: %s", node, fault)
        return updates

    def _enrol(self, grid: Grid) -> None:
        """Waits for the clients, and settles who takes part when if that was not done before."""
        run = self._open_run
        wanted = run.clients.wanted(run.step) if run.clients.begun else set()
        deadline = time.monotonic() + self.enrolment_timeout
        while True:
            self._ask_names(grid)
            found = set(self._names.values())
            complete = wanted <= found if run.clients.begun else len(found) >= run.clients.needed
            if complete or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        if run.clients.begun:
            if not complete:
                _log.warning("PrivateFedAvg: %d clients of the run are not connected", len(wanted - found))
            run.clients.resume(run.key)
            return
        if not complete:
            raise MismatchError(run.clients.lacking(len(found), self.enrolment_timeout))
        run.clients.begin(found, run.key)

    def _query(self, grid: Grid, nodes: Iterable[int]) -> dict[int, str]:
        """What nodes answer when they are asked who they are. One that does not answer, or not with a name, is nobody."""
        queries = [
            Message(RecordDict(), dst_node_id=node, message_type=f"{MessageType.QUERY}.{ENROLMENT}")
            for node in sorted(nodes)
        ]
        answers: dict[int, str] = {}
        for reply in grid.send_and_receive(queries, timeout=self.enrolment_timeout) if queries else ():
            node = reply.metadata.src_node_id
            name = None if reply.has_error() else _name(reply)
            if name is not None:
                answers[node] = name
            elif node not in self._silent:
                self._silent.add(node)
                _log.warning(
                    "PrivateFedAvg: node %d does not say who it is and is not asked; its app needs "
                    "dpmf.flower.answer_enrolment(app)",
                    node,
                )
        return answers

    def _ask_names(self, grid: Grid) -> None:
        """Asks the nodes that are new who they are. Of two nodes with one name, the first counts, while it is connected."""
        connected = set(grid.get_node_ids())
        self._names = {node: name for node, name in self._names.items() if node in connected}
        taken = set(self._names.values())
        for node, name in self._query(grid, connected - set(self._names)).items():
            if name in taken:
                _log.warning("PrivateFedAvg: node %d enrolled as %r, which is taken; it is not asked", node, name)
            else:
                taken.add(name)
                self._names[node] = name


class _Optimizer:
    """The step that a mechanism was planned for."""

    def __init__(self, mechanism: Mechanism, learning_rate: float) -> None:
        workload = mechanism.workload
        rates = workload.learning_rates
        if rates is None or workload.average != "none":
            raise UnsupportedError(
                "PrivateFedAvg does the optimizer's step itself, and serves plans by momentum, weight decay and "
                "schedule, without average and not from a matrix"
            )
        momentum, nesterov, decay = workload.momentum, workload.nesterov, workload.weight_decay
        assert momentum is not None and nesterov is not None and decay is not None
        self.momentum, self.nesterov, self.decay, self.coupled = momentum, nesterov, decay, bool(workload.coupled)
        self.rates = rates * learning_rate
        mechanism.check_optimizer(
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=decay,
            coupled=self.coupled,
            learning_rates=self.rates,
        )

    def advance(self, step: int, model: Vector, velocity: Vector, gradient: Vector) -> None:
        """Moves model and velocity by a step, where they are: new arrays of that size would take longer than the noise."""
        rate = self.rates[step]
        if self.coupled:
            gradient = gradient + self.decay * model
        velocity *= self.momentum
        velocity += gradient
        change = rate * (gradient + self.momentum * velocity if self.nesterov else velocity)
        if self.decay and not self.coupled:
            change += (rate * self.decay) * model
        model -= change


class _Run:
    """A run in its directory: mechanism, key, journal, clients, and the model after the last step."""

    def __init__(
        self,
        mechanism: Mechanism,
        directory: Path,
        initial: ArrayRecord,
        arithmetic: Literal["exact", "float"],
        clients: Clients,
    ) -> None:
        self.mechanism, self.directory, self.clients = mechanism, directory, clients
        self.arithmetic: Literal["exact", "float"] = arithmetic
        self.layout = _layout(initial)
        self.dimension = sum(int(np.prod(shape)) for _, shape in self.layout)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        stored = directory / "mechanism.safetensors"
        if stored.exists() and Mechanism.load(stored) != mechanism:
            raise BindingError(
                f"{directory} holds a run of another mechanism: resume it with dpmf.Mechanism.load({str(stored)!r}), "
                "or begin a new run in another directory"
            )
        mechanism.save(stored)
        self._check_files()
        self.step, self.model = 0, _flatten(initial)
        self.velocity = np.zeros(self.dimension)
        checkpoint = self._load()
        self.stream = self._open_stream(checkpoint)
        try:
            clients.open(self.stream.run, self.step, self.stream.recorded_steps)
        except BaseException:
            self.stream.close()
            raise
        if checkpoint is None:
            self._save()

    def _check_files(self) -> None:
        """Refuses a run that lost a file. They are made in this order, so each shows that those before it were there."""
        made = [("journal", "a noise row could be released twice"), ("state.npz", "the run would begin again")]
        names = [name for name, _ in made] + [self.clients.file]
        for number, (name, harm) in enumerate(made):
            if not (self.directory / name).exists() and any((self.directory / later).exists() for later in names[number:]):
                raise self._missing(self.directory / name, harm)

    @staticmethod
    def _missing(path: Path, harm: str) -> FormatError:
        return FormatError(
            f"{path} is missing, and without it {harm}: restore it, or begin a new run in another directory"
        )

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    @property
    def arrays(self) -> ArrayRecord:
        """The model as the clients get it."""
        return _unflatten(self.model.astype(np.float32), self.layout)

    def advance(self, optimizer: _Optimizer, gradient: Vector | None) -> None:
        """Does a step and keeps it; without a gradient for one that was given up."""
        gradient = np.zeros(self.dimension) if gradient is None else gradient
        optimizer.advance(self.step, self.model, self.velocity, gradient)
        self.step += 1
        self._save()

    def catch_up(self, optimizer: _Optimizer) -> None:
        """Passes the steps that were given up before a restart."""
        while self.step < self.stream.next_step:
            self.advance(optimizer, None)

    def _open_stream(self, checkpoint: bytes | None) -> DurableStream:
        journal, key = self.directory / "journal", self.directory / "noise.key"
        if journal.exists():
            self.key = NoiseKey.read(key)
            return DurableStream.open(
                self.mechanism,
                self.key,
                journal,
                checkpoint=checkpoint,
                dimension=self.dimension,
                arithmetic=self.arithmetic,
            )
        self.key = NoiseKey.read(key) if key.exists() else NoiseKey.create(key)
        return DurableStream.create(
            self.mechanism, self.key, journal, dimension=self.dimension, arithmetic=self.arithmetic
        )

    def _save(self) -> None:
        # Model and stream in one file: a crash leaves both as they were or both as they are.
        file = io.BytesIO()
        np.savez(
            file,
            step=np.int64(self.step),
            layout=np.array(json.dumps(self.layout)),
            model=self.model,
            velocity=self.velocity,
            stream=np.frombuffer(self.stream.checkpoint_bytes(), np.uint8),
        )
        write_durably(self.directory / "state.npz", file.getvalue())

    def _load(self) -> bytes | None:
        path = self.directory / "state.npz"
        if not path.exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as state:
                layout = [(name, tuple(shape)) for name, shape in json.loads(str(state["layout"]))]
                self.step = int(state["step"])
                self.model, self.velocity = state["model"], state["velocity"]
                checkpoint: bytes = state["stream"].tobytes()
        except (ValueError, KeyError, OSError, EOFError) as damage:
            raise FormatError(f"{path} is damaged: {damage}") from damage
        if layout != self.layout:
            raise BindingError(f"{path} holds the arrays {layout}, but the model now has {self.layout}")
        return checkpoint


# ---------------------------------------------------------------------------------------------------------------------
# The client
# ---------------------------------------------------------------------------------------------------------------------


def clipping_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Sends the clipped difference to the model that came, and nothing else; takes part as often as the run said at first.

    The server clips as well, and its guarantee does not rest on this mod. With it, nobody on the way sees more of a
    client than clipped updates, and a client declines to take part more often, or sooner again, than it was told when it first
    took part in the run, whatever the server asks. It keeps the terms of every run, and declines to train without terms.
    """
    if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
        return call_next(message, context)
    config = next((record for record in message.content.config_records.values() if "dpmf-clip" in record), None)
    if config is None:
        reason = "the message has no terms of private training (dpmf-clip and others), and this client sends nothing else"
        return Message(Error(DECLINED, reason), reply_to=message)
    run, step, clip = cast(str, config["dpmf-run"]), cast(int, config["dpmf-step"]), cast(float, config["dpmf-clip"])
    separation, times = cast(int, config.get("dpmf-separation", 1)), cast(int, config.get("dpmf-times", 1))
    # A record for each run, so that a run that comes back after another one finds what it was told.
    before = context.state.config_records.get(f"dpmf {run}")
    last = context.state.config_records.get("dpmf")
    if before is None and last is not None and last["run"] == run:
        before = last  # kept by 0.2
    taken: list[int] = []
    if before is not None:
        taken = list(cast("list[int]", before["steps"]))
        separation, times = cast(int, before["separation"]), cast(int, before["times"])
    # The same round comes again after a crash of the server.
    if step not in taken:
        if len(taken) >= times or any(abs(step - other) < separation for other in taken):
            rounds = ", ".join(str(other + 1) for other in taken)
            often = "once" if times == 1 else f"in {times} rounds at most, {separation} apart at least"
            reason = f"this client took part in round {rounds} and takes part {often}: round {step + 1} is declined"
            return Message(Error(DECLINED, reason), reply_to=message)
        taken.append(step)
    context.state[f"dpmf {run}"] = ConfigRecord(dict(run=run, steps=taken, separation=separation, times=times))
    model = next(iter(message.content.array_records.values()))
    layout, start = _layout(model), _flatten(model)
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    update = _clip(_difference(reply, layout, start), clip)
    key = next(iter(reply.content.array_records))
    marks = {"update": "difference"}
    if (known := context.state.config_records.get("dpmf-name")) is not None:
        marks["name"] = cast(str, known["name"])
    reply.content = RecordDict({key: _unflatten(update, layout), "dpmf": ConfigRecord(dict(marks))})
    return reply


def answer_enrolment(app: ClientApp, name: Callable[[Context], str] | None = None) -> None:
    """Lets a ClientApp tell the server who its user is, under a name that outlives restarts.

    Without name: "participant" in the node's configuration, or else "partition-id", or else the number of the node,
    which is stable where SuperNodes authenticate.
    """

    @app.query(ENROLMENT)
    def enrol(message: Message, context: Context) -> Message:
        if name is not None:
            known = name(context)
        else:
            node = context.node_config
            known = str(node.get("participant", node.get("partition-id", f"node {context.node_id}")))
        context.state["dpmf-name"] = ConfigRecord({"name": known})
        return Message(RecordDict({"dpmf": ConfigRecord({"name": known})}), reply_to=message)


# ---------------------------------------------------------------------------------------------------------------------
# Vectors
# ---------------------------------------------------------------------------------------------------------------------


def _name(reply: Message) -> str | None:
    """Who says to have sent a message."""
    record = reply.content.config_records.get("dpmf")
    name = None if record is None else record.get("name")
    return name if isinstance(name, str) else None


def _layout(arrays: ArrayRecord) -> list[tuple[str, tuple[int, ...]]]:
    for name, array in arrays.items():
        if array.dtype != "float32":
            raise TypeError(
                f"array {name!r} of the model is {array.dtype}, but private training is of float32 parameters: cast "
                "it, and leave out buffers that are not trained"
            )
    return [(name, tuple(array.shape)) for name, array in arrays.items()]


def _flatten(arrays: ArrayRecord) -> Vector:
    return np.concatenate([array.numpy().reshape(-1).astype(np.float64) for array in arrays.values()])


def _unflatten(vector: NDArray[np.float32], layout: list[tuple[str, tuple[int, ...]]]) -> ArrayRecord:
    ends = np.cumsum([int(np.prod(shape)) for _, shape in layout])[:-1]
    pieces = np.split(vector, ends)
    return ArrayRecord({name: Array(piece.reshape(shape)) for (name, shape), piece in zip(layout, pieces)})


def _difference(reply: Message, layout: list[tuple[str, tuple[int, ...]]], model: Vector) -> Vector:
    """What a client subtracts from the model: the gradient that it stands for."""
    records = reply.content.array_records
    if len(records) != 1:
        raise ValueError(f"it has {len(records)} ArrayRecords, but one is needed")
    arrays = next(iter(records.values()))
    if list(arrays) != [name for name, _ in layout]:
        raise ValueError("its arrays are not those of the model")
    # What an Array declares of itself is the client's word: only the numbers that it holds have a shape.
    held = [np.asarray(array.numpy()) for array in arrays.values()]
    for (name, shape), values in zip(layout, held):
        if values.shape != shape or values.dtype.kind != "f":
            raise ValueError(f"its array {name!r} holds {values.dtype} of shape {values.shape}, but the model's has {shape}")
    values = np.concatenate([values.reshape(-1).astype(np.float64) for values in held])
    marked = reply.content.config_records.get("dpmf")
    update = values if marked is not None and marked.get("update") == "difference" else _rounded(model) - values
    if not np.isfinite(update).all():
        raise ValueError("it is not finite")
    return update


def _rounded(model: Vector) -> Vector:
    """The model as the clients got it."""
    return model.astype(np.float32).astype(np.float64)


def _clip(update: Vector, clip: float) -> NDArray[np.float32]:
    """Guarantee: the result has norm at most clip, rounding to float32 included."""
    norm = float(np.sqrt(np.sum(np.square(update))))
    # Rounding adds at most 2^-24 of the norm, and the sum of squares is off by less than 2^-24 of itself.
    factor = min(1.0, clip * (1.0 - 2.0**-22) / norm) if norm > 0 else 1.0
    return (update * factor).astype(np.float32)


def _clipped_sum(updates: Iterable[Vector], clip: float, dimension: int) -> Vector:
    """The sum of updates, each scaled to a norm if it is longer; of at most _sums.MOST.

    Guarantee: that of the module _sums. The same updates have the same sum, in any order.
    """
    spacing, target = _sums.spacing(clip), _sums.target(clip, dimension)
    exact = np.zeros(dimension)
    for update in updates:
        if update.shape != (dimension,):
            raise ValueError(f"an update has shape {update.shape}, but it must have {dimension} numbers")
        norm = float(np.sqrt(np.sum(np.square(update))))
        exact += np.round(update * (min(1.0, target / norm if norm > 0 else 1.0) / spacing))
    return exact * spacing
