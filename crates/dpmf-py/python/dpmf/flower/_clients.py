"""Which clients are asked in which round of federated training, in a file that outlives the server."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from .._checks import participation_of
from .._core import Mechanism, NoiseKey, Sampler
from .._disk import write_durably
from .._errors import FormatError, MismatchError


class Clients(ABC):
    """What is known about clients, by name: enrolled before the first round, and kept for the run."""

    #: The file in the directory of the run.
    file: ClassVar[str]

    #: Whether the size of a round is a secret, as whatever was drawn.
    secret: ClassVar[bool] = False

    def __init__(self, mechanism: Mechanism, directory: Path, cohort: int | None) -> None:
        self.mechanism, self.path, self.cohort = mechanism, directory / self.file, cohort
        self.separation, self.times = participation_of(mechanism)
        self.run = ""
        self.begun = False

    def open(self, run: str, done: int, released: int) -> None:
        """Reads what was kept of a run, which has done so many rounds, and has released so many."""
        self.run = run
        if not self.path.exists():
            if done > 0 or released > 0:
                raise FormatError(
                    f"{self.path} is missing, and without it clients that took part would be asked again: restore it, or begin a "
                    "new run in another directory"
                )
            return
        try:
            kept = json.loads(self.path.read_text())
            if kept["run"] != run:
                raise FormatError(
                    f"{self.path} belongs to run {kept['run']}, but the journal beside it to {run}: clients that took part would "
                    "be asked again. Restore the file of this run, or begin a new run in another directory"
                )
            self._take(kept, max(done, released), done)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as damage:
            if isinstance(damage, MismatchError):
                raise
            raise FormatError(f"{self.path} is damaged: {damage}") from damage
        self.begun = True

    def _write(self, **content: Any) -> None:
        write_durably(self.path, json.dumps({"run": self.run, **content}, indent=1).encode())

    @property
    @abstractmethod
    def needed(self) -> int:
        """Clients to wait for before a run begins."""

    @abstractmethod
    def lacking(self, found: int, seconds: float) -> str:
        """What to say when fewer enrolled."""

    @abstractmethod
    def begin(self, names: set[str], key: NoiseKey) -> None:
        """Decides and records what is fixed before the first round."""

    @abstractmethod
    def _take(self, kept: dict[str, Any], rounds: int, done: int) -> None:
        """Restores the recorded rounds: at least rounds of them were begun, and done of them are over."""

    def resume(self, key: NoiseKey) -> None:
        """Called before the first round of a start."""

    @abstractmethod
    def wanted(self, done: int) -> set[str]:
        """Clients that the rounds from here on ask; to wait for at a restart."""

    def may_be_asked(self, round: int, connected: set[str]) -> set[str]:
        """Those among whom ask() chooses."""
        return connected

    @abstractmethod
    def ask(self, round: int, connected: set[str]) -> set[str]:
        """Who is asked in a round, zero-based, of those that are connected. On disk before it returns."""

    @property
    @abstractmethod
    def denominator(self) -> float:
        """The denominator of a mean."""


class Cohorts(Clients):
    """Every client is put into one cohort, and the cohorts take turns: once for single participation, K times for epochs:K."""

    file = "cohorts.json"

    def __init__(self, mechanism: Mechanism, directory: Path, cohort: int) -> None:
        super().__init__(mechanism, directory, cohort)
        self.size = cohort
        self.phases = max(self.separation, -(-mechanism.steps // self.times))
        self.cohorts: list[list[str]] = []

    @property
    def needed(self) -> int:
        return self.phases * self.size

    def lacking(self, found: int, seconds: float) -> str:
        steps = self.mechanism.steps
        said = f"{found} clients enrolled within {seconds:g} s, but "
        if self.times == 1:
            return said + (
                f"{steps} rounds with {self.size} clients each need {self.needed}, since a client takes part in one round: plan "
                f"with steps={found // self.size}, or use a smaller cohort"
            )
        return said + (
            f"rounds of {self.size} clients each need {self.needed}, since {self.phases} cohorts take turns: use "
            f"cohort={max(found // self.phases, 1)}, or plan for the clients that are there"
        )

    def begin(self, names: set[str], key: NoiseKey) -> None:
        order = sorted(names)
        random.SystemRandom().shuffle(order)
        self.cohorts = [order[self.size * phase : self.size * (phase + 1)] for phase in range(self.phases)]
        self._write(cohorts=self.cohorts)

    def _take(self, kept: dict[str, Any], rounds: int, done: int) -> None:
        self.cohorts = [list(members) for members in kept["cohorts"]]
        names = [name for members in self.cohorts for name in members]
        if len(self.cohorts) != self.phases or len(set(names)) != len(names) or not _are_names(names):
            raise ValueError(f"it must have {self.phases} cohorts, and each client once")
        if any(len(members) != self.size for members in self.cohorts):
            raise MismatchError(
                f"cohort is {self.size}, but the run in {self.path.parent} has cohorts of {len(self.cohorts[0])}: it is fixed for "
                "a run"
            )

    def wanted(self, done: int) -> set[str]:
        left = range(done, self.mechanism.steps)
        return {name for round in left[: self.phases] for name in self.cohorts[round % self.phases]}

    def ask(self, round: int, connected: set[str]) -> set[str]:
        return connected & set(self.cohorts[round % self.phases])

    @property
    def denominator(self) -> float:
        return float(self.size)


class Ledger(Clients):
    """Every round asks clients that are connected, and that took part long enough ago and not too often.

    A client that was asked counts as having taken part, even if it failed or did not answer in time, because it has seen the
    model. The ledger says who was asked in which round, and is on disk before anyone is.
    """

    file = "ledger.json"

    def __init__(self, mechanism: Mechanism, directory: Path, cohort: int) -> None:
        super().__init__(mechanism, directory, cohort)
        self.size = cohort
        self.rounds: list[list[str]] = []
        #: The rounds of each client that was asked, in order.
        self.taken: dict[str, list[int]] = {}

    @property
    def needed(self) -> int:
        steps = self.mechanism.steps
        return max(self.size * min(self.separation, steps), -(-self.size * steps // self.times))

    def lacking(self, found: int, seconds: float) -> str:
        return (
            f"{found} clients enrolled within {seconds:g} s, but {self.mechanism.steps} rounds with {self.size} clients each need "
            f"{self.needed}, since a client takes part in at most {self.times} rounds, at least {self.separation} apart: use a "
            "smaller cohort, or plan for the clients that are there"
        )

    def begin(self, names: set[str], key: NoiseKey) -> None:
        self._write(participation=self.mechanism.participation, rounds=[])

    def _take(self, kept: dict[str, Any], rounds: int, done: int) -> None:
        if kept["participation"] != self.mechanism.participation:
            raise ValueError(f"it is for {kept['participation']}, but the run is for {self.mechanism.participation}")
        self.rounds = [list(asked) for asked in kept["rounds"]]
        if len(self.rounds) < rounds:
            raise ValueError(
                f"it ends with round {len(self.rounds)}, but the journal says that {rounds} were begun: clients that took part "
                "would be asked again"
            )
        if len(self.rounds) > self.mechanism.steps or len(self.rounds) > rounds + 1:
            raise ValueError(f"it has {len(self.rounds)} rounds, but the journal says that {rounds} were begun")
        for round, asked in enumerate(self.rounds):
            if not _are_names(asked) or len(set(asked)) != len(asked):
                raise ValueError(f"round {round + 1} does not have clients by name, each once")
            for name in asked:
                if not self._may(name, round):
                    raise ValueError(f"client {name!r} took part in round {round + 1} before it was its turn")
                self.taken.setdefault(name, []).append(round)

    def _may(self, name: str, round: int) -> bool:
        before = self.taken.get(name, [])
        return len(before) < self.times and (not before or round - before[-1] >= self.separation)

    def wanted(self, done: int) -> set[str]:
        return set()

    def may_be_asked(self, round: int, connected: set[str]) -> set[str]:
        if round < len(self.rounds):
            return connected & set(self.rounds[round])
        return {name for name in connected if self._may(name, round)}

    def ask(self, round: int, connected: set[str]) -> set[str]:
        allowed = self.may_be_asked(round, connected)
        if round < len(self.rounds):
            return allowed  # asked before a restart: others would take part in its place, beside them
        if not allowed:
            often = sum(len(self.taken.get(name, [])) >= self.times for name in connected)
            raise MismatchError(
                f"nobody may be asked in round {round + 1}: of {len(connected)} clients that are connected, {often} took part "
                f"{self.times} times, and the others less than {self.separation} rounds ago. Nothing was released for it, because "
                "noise alone would only make the model worse: start again when other clients are connected. The guarantee for the rounds so far "
                "holds"
            )
        chosen = random.SystemRandom().sample(sorted(allowed), min(self.size, len(allowed)))
        self.rounds.append(sorted(chosen))
        for name in chosen:
            self.taken.setdefault(name, []).append(round)
        self._write(participation=self.mechanism.participation, rounds=self.rounds)
        return set(chosen)

    @property
    def denominator(self) -> float:
        return float(self.size)


class Drawn(Clients):
    """The sampler of the plan draws who takes part, from all clients that enrolled before the first round.

    Its draws are a function of the run's key, so they are the same after a restart. A client that was drawn and is not connected
    takes no part, and nobody takes its place.
    """

    file = "clients.json"
    secret = True

    def __init__(self, mechanism: Mechanism, directory: Path, clients: int) -> None:
        super().__init__(mechanism, directory, None)
        self.clients = clients
        self.names: list[str] = []
        self.sampler: Sampler | None = None

    @property
    def needed(self) -> int:
        return self.clients

    def lacking(self, found: int, seconds: float) -> str:
        return (
            f"{found} clients enrolled within {seconds:g} s, but {self.clients} are planned: pass clients={found} to draw from those "
            "that are there; no others can then take part"
        )

    def begin(self, names: set[str], key: NoiseKey) -> None:
        self.names = sorted(names)
        self._write(clients=self.names)
        self.resume(key)

    def _take(self, kept: dict[str, Any], rounds: int, done: int) -> None:
        self.names = list(kept["clients"])
        if not self.names or not _are_names(self.names) or self.names != sorted(set(self.names)):
            raise ValueError("it must have the names of all clients in order, each once")

    def resume(self, key: NoiseKey) -> None:
        mechanism = self.mechanism
        self.sampler = Sampler(mechanism.sampling, key, units=len(self.names), steps=mechanism.steps, run=self.run)

    def wanted(self, done: int) -> set[str]:
        return set(self.names)  # not those that were drawn: who is waited for would show who was

    def ask(self, round: int, connected: set[str]) -> set[str]:
        assert self.sampler is not None
        return connected & {self.names[unit] for unit in self.sampler.members(round)}

    @property
    def denominator(self) -> float:
        assert self.sampler is not None
        return self.sampler.expected_batch


def _are_names(names: Iterable[Any]) -> bool:
    return all(isinstance(name, str) for name in names)
