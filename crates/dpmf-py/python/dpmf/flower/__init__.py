"""Correlated noise for Flower: a strategy for federated training that is private for every client.

    plan = dpmf.plan(examples=clients, batch=20, epochs=4, momentum=0.9, epsilon=8, delta=1e-6, clip=0.5, unit="user")
    strategy = dpmf.flower.PrivateFedAvg(plan, "run")
    strategy.start(grid, initial_arrays)

In the client, add clipping_mod to the mods and call answer_enrolment(app).

The mechanism determines who takes part in which round: cohorts that take turns, clients that are asked again after enough rounds, or
clients that the plan's sampler draws. The server clips the clients' updates, adds the noise through a journal, divides by the planned
cohort and performs the optimizer step that the mechanism was planned for. A run is kept in one directory; a strategy that is started
on the same directory continues where the last one stopped.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from .._requires import require

require("dpmf.flower", "flwr")

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from .._checks import check_unit, statement_of
from .._core import Mechanism, Plan, _Clip
from .._errors import HaltedError, MismatchError
from ._client import ENROLMENT, answer_enrolment, clipping_mod
from ._clients import Clients, Cohorts, Drawn, Ledger
from ._run import Optimizer, Run
from ._vectors import Vector, difference, sender

__all__ = ["PrivateFedAvg", "answer_enrolment", "clipping_mod"]

_log = logging.getLogger("flwr")


class PrivateFedAvg(Strategy):
    """Federated averaging with correlated noise, for clients that take part in several rounds.

    mechanism is a dpmf.Plan, or a Mechanism, with one step for each round and unit="user". directory holds the run (mechanism, key,
    journal, clients, model); all of it but the mechanism is private. learning_rate multiplies the planned step sizes. arithmetic is
    "exact" or "float", and fixed for a run. With "exact", the sum is released with ideal noise, correctly rounded. With "float", noise is
    made in single precision, which is faster, but the guarantee does not cover the lowest bits of a release.

    The mechanism determines who takes part:

    - participation="single" and "epochs:K": clients are put into cohorts before training, which take turns, K times each.
    - "min-separation:B:K": every round asks connected clients, none of them twice within B rounds or more than K times. A client that was
      asked counts as having taken part, even if it failed or did not answer in time, and across restarts. Clients may join later. If
      fewer than cohort clients may be asked, the round asks those; if none may be asked, it is refused and nothing is released.
    - A plan that relies on sampling: its sampler draws from the enrolled clients, and every client that it draws is asked.

    cohort is the number of clients in a round, by default that of the plan, and the denominator of every mean, even when clients drop
    out. Do not pass it under sampling, where the denominator is the expected number. clients is the number of clients to wait for under
    sampling, by default that of the plan.

    Guarantee: the models after all rounds satisfy mechanism.privacy for every client, provided that nodes that enrol under different
    names belong to different users. Metrics that clients report are not covered, and are discarded. The server's log names replies that
    were ignored, and is not covered either. Under sampling, the guarantee is against those who do not see which clients are asked, and
    assumes that a client's answer does not depend on whether it was asked in other rounds.

    A round in which all clients drop out releases noise alone. After a crash, a round in the journal is repeated; if its clients now
    send different updates, its noise is given up and the step is made without a gradient.
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
        _Clip(statement.clip, 1)  # refuses what is out of range
        self.mechanism, self.directory = mechanism, Path(directory)
        self.clients = self._participation(plan, cohort, clients)
        self.optimizer = Optimizer(mechanism, learning_rate)
        self.clip = statement.clip
        self.arithmetic: Literal["exact", "float"] = arithmetic
        self.enrolment_timeout = enrolment_timeout
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self._run: Run | None = None
        self._names: dict[int, str] = {}
        self._asked: dict[int, str] = {}
        #: Nodes that were told of in the log because they do not say who they are.
        self._silent: set[int] = set()

    def _participation(self, plan: Plan | None, cohort: int | None, clients: int | None) -> Callable[[], Clients]:
        """How to make, at every start, the object that decides who takes part."""
        mechanism, directory = self.mechanism, self.directory
        if mechanism.sampling != "none":
            if cohort is not None:
                raise ValueError(
                    f"cohort is given, but this mechanism relies on sampling {mechanism.sampling}, which determines how many "
                    "clients take part: remove it, and plan with that batch size"
                )
            population = plan.examples if clients is None and plan is not None else clients
            if population is None:
                raise ValueError("clients is missing: pass the number of clients that the sampler draws from")
            if not 1 <= population <= _Clip.most_contributions:
                raise ValueError(f"clients is {population}, but it must be at least 1 and at most {_Clip.most_contributions}")
            return lambda: Drawn(mechanism, directory, population)
        if clients is not None:
            raise ValueError("clients is given, but this mechanism does not rely on sampling: remove it")
        size = plan.batch if cohort is None and plan is not None else cohort
        if size is None:
            raise ValueError("cohort is missing: pass the number of clients in a round")
        if not 1 <= size <= _Clip.most_contributions:
            raise ValueError(f"cohort is {size}, but it must be at least 1 and at most {_Clip.most_contributions}")
        kind = Ledger if mechanism.participation.startswith("min-separation") else Cohorts
        return lambda: kind(mechanism, directory, size)

    def summary(self) -> None:
        """Logs the guarantee."""
        statement = self._open_run.private.privacy if self._run else self.mechanism.privacy
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

        num_rounds counts from the beginning of the run; None means all planned rounds. evaluate_fn should use public data,
        because the guarantee does not cover what it returns.
        """
        rounds = self.mechanism.steps if num_rounds is None else num_rounds
        self.mechanism.check_steps(rounds)
        self._names.clear()
        with Run(self.mechanism, self.directory, initial_arrays, self.arithmetic, self.clients()) as self._run:
            try:
                self._run.catch_up(self.optimizer)
                self._enrol(grid)
                done = self._run.step
                if done:
                    _log.info("PrivateFedAvg: %d of %d rounds are done; continuing", done, rounds)
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
        run.hand_out(len(self._asked))
        if run.clients.secret:
            _log.info("configure_train: round %d asks the clients that were drawn for it", run.step + 1)
        else:
            cohort = int(run.clients.denominator)
            note = "" if len(chosen) >= cohort else "; the mean still divides by the planned number"
            _log.info("configure_train: round %d asks %d of %d clients%s", run.step + 1, len(chosen), cohort, note)
        sent = ConfigRecord(dict(config))
        sent["server-round"] = run.step + 1
        sent["dpmf-clip"] = self.clip
        sent["dpmf-step"] = run.step
        sent["dpmf-run"] = run.private.run
        sent["dpmf-separation"], sent["dpmf-times"] = run.clients.separation, run.clients.times
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: sent})
        return [Message(record, dst_node_id=node, message_type=MessageType.TRAIN) for node in self._asked]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clips, sums, adds the noise of the round, and does the optimizer's step."""
        del server_round
        run = self._open_run
        released = run.release(self.optimizer, self._updates(replies).values())
        statement = run.private.privacy
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
        metrics["given-up"] = len(run.private.burned)
        return run.arrays, MetricRecord(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Asks no client, because the guarantee does not cover what clients report about their data."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing."""
        return None

    @property
    def _open_run(self) -> Run:
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
                    if (said := sender(reply)) not in (None, name):
                        raise ValueError(f"it is from {said!r}, but {name!r} was asked")
                    updates[name] = difference(reply, run.layout, run.model)
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
        elif complete:
            run.clients.begin(found, run.key)
        else:
            raise MismatchError(run.clients.lacking(len(found), self.enrolment_timeout))
        run.follow()

    def _query(self, grid: Grid, nodes: Iterable[int]) -> dict[int, str]:
        """The names that nodes answer with. A node that does not answer with a name is left out."""
        queries = [
            Message(RecordDict(), dst_node_id=node, message_type=f"{MessageType.QUERY}.{ENROLMENT}")
            for node in sorted(nodes)
        ]
        answers: dict[int, str] = {}
        for reply in grid.send_and_receive(queries, timeout=self.enrolment_timeout) if queries else ():
            node = reply.metadata.src_node_id
            name = sender(reply)
            if name is not None:
                answers[node] = name
            elif node not in self._silent:
                self._silent.add(node)
                _log.warning(
                    "PrivateFedAvg: node %d does not send a name and is not asked; its app needs "
                    "dpmf.flower.answer_enrolment(app)",
                    node,
                )
        return answers

    def _ask_names(self, grid: Grid) -> None:
        """Asks new nodes for their names. If two nodes have one name, the first counts while it is connected."""
        connected = set(grid.get_node_ids())
        self._names = {node: name for node, name in self._names.items() if node in connected}
        taken = set(self._names.values())
        for node, name in self._query(grid, connected - set(self._names)).items():
            if name in taken:
                _log.warning("PrivateFedAvg: node %d enrolled as %r, which is taken; it is not asked", node, name)
            else:
                taken.add(name)
                self._names[node] = name
