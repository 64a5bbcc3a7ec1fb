"""Batches of a plan as indices, all of one shape, so that a compiled step serves every one of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._checks import check_experiment, participation_of
from .._core import Mechanism, NoiseKey, Plan, Sampler, new_run
from .._errors import FormatError, MismatchError
from ._bits import mix

#: A batch is longer than its size by default in at most one of so many runs, whatever the data.
RUNS = 1e12


class Batch(NamedTuple):
    """The examples of one step, for accumulate(…, batch=batch): a tree of arrays that you can pass to a compiled function."""

    step: Any
    """The step that the batch is for, counted from 0."""
    indices: Any
    """The numbers of the examples, padded with 0 to the size of all batches."""
    mask: Any
    """True for examples, False for padding."""
    origin: Any
    """A number that identifies the Batches that made this batch."""
    noise: Any = None
    """The noise of the step, for update(…, batch=batch). Only the batches of a Run have it."""

    def split(self, parts: int) -> list[Batch]:
        """Splits the batch into parts of equal size, for multi_steps."""
        size = self.mask.shape[0]
        if parts < 1 or size % parts:
            raise ValueError(
                f"a batch of {size} places cannot be split into {parts} equal parts: pass a multiple of {parts} as Batches(…, size=…)"
            )
        width = size // parts
        cut = [slice(width * part, width * (part + 1)) for part in range(parts)]
        return [self._replace(indices=self.indices[part], mask=self.mask[part]) for part in cut]


def stamps_of(step: Any, origin: Any, indices: Any) -> tuple[Any, Any]:
    """32 bits that stand for a step of some batches, and 32 for each example in it, in numpy or on a device.

    A sum has those of all of its contributions added up, so that they tell whose it is, however it was put together.
    """
    place = mix(step ^ mix(origin))
    return place, mix(indices ^ mix(place))


class Batches:
    """The batches of a plan, one for each step: indices that are padded to one size, and a mask.

        batches = dpmf.jax.Batches(plan, key)
        batches.at(3).indices

    A Run makes its own batches from a plan, and hands them out with their noise. They belong to one run. accumulate(…, batch=batch) sums
    over a batch and leaves out the padding.

    plan is a dpmf.Plan, or a Mechanism together with examples, the number of examples. If the plan relies on sampling, its sampler draws
    the members, which are as secret as the noise. Otherwise, the examples are shuffled once and cut into fixed batches that take turns,
    as often and as far apart as the mechanism allows.

    Batches differ in length, so a mean divides by expected_batch. All batches are padded to size. The default does not depend on the
    draws; one run in 10¹² has a longer batch. A longer batch is refused before it is handed out, so no example is left out: continue
    the run from there with a larger size.

    To continue after a restart, pass journal, the directory of the run, which remembers the draws. experiment names draws that are the
    same at every start, for a key from a seed.
    """

    def __init__(
        self,
        plan: Plan | Mechanism,
        key: NoiseKey,
        *,
        examples: int | None = None,
        size: int | None = None,
        journal: str | os.PathLike[str] | None = None,
        experiment: str | None = None,
    ) -> None:
        check_experiment(key, experiment)
        if isinstance(plan, Plan):
            mechanism, examples = plan.mechanism, plan.examples if examples is None else examples
        else:
            mechanism = plan
        if examples is None:
            raise ValueError("examples is missing: pass the number of examples, which a mechanism does not contain")
        if not 1 <= examples < 2**31:
            raise ValueError(f"examples is {examples}, but it must be at least 1 and below 2^31")
        self.mechanism, self.examples, self.steps = mechanism, examples, mechanism.steps
        begun = None if journal is None else _draws_of(Path(journal))
        # Sampler turns the words of an experiment into the name of a run, as everywhere.
        named = experiment and Sampler("balls-in-bins:1", key, units=1, steps=1, run=experiment).run
        self.run: str = named or begun or _one_for_all(new_run())
        #: What draws the members; None where they are shuffled once.
        self.sampler: Sampler | None = None
        #: How many examples a step has, and their stamps added up.
        self._known: dict[int, tuple[int, int]] = {}
        if mechanism.sampling == "none":
            separation, times = participation_of(mechanism)
            #: Batches that take turns.
            self._phases = max(separation, -(-mechanism.steps // times))
            # Raw words are the same in every version of numpy, and a stable sort makes one order of them.
            words = np.random.PCG64(int(self.run, 16)).random_raw(examples)
            self._order = np.argsort(words, kind="stable")
            self.expected_batch = examples / self._phases
            least = -(-examples // self._phases)
        else:
            self.sampler = Sampler(mechanism.sampling, key, units=examples, steps=mechanism.steps, run=self.run)
            self.expected_batch = self.sampler.expected_batch
            least = _seldom_longer(examples, self.expected_batch / examples, RUNS * mechanism.steps)
        if size is not None and size < 1:
            raise ValueError(f"size is {size}, but it must be at least 1")
        self.size = least if size is None else size

    @property
    def draws(self) -> dict[str, Any]:
        """What determines which example is in which batch. It holds no secrets."""
        return {"run": self.run, "sampling": self.mechanism.sampling, "units": self.examples}

    def members(self, step: int) -> np.ndarray[Any, Any]:
        """The examples of a step, without padding."""
        if not 0 <= step < self.steps:
            raise ValueError(f"step is {step}, but there are {self.steps} steps")
        if self.sampler is not None:
            return self.sampler.members(step)
        return self._order[step % self._phases :: self._phases]

    def at(self, step: int) -> Batch:
        """The batch of a step."""
        members = self.members(step)
        if len(members) > self.size:
            raise MismatchError(
                f"the batch of step {step} has {len(members)} examples, but size is {self.size}, and all that were drawn must "
                f"take part: continue from this step with Batches(…, size={len(members)}) or more"
            )
        indices = np.zeros(self.size, np.int32)
        indices[: len(members)] = members
        self._remember(step, members)
        return Batch(np.int32(step), indices, np.arange(self.size) < len(members), self.origin)

    @property
    def origin(self) -> np.uint32:
        """A number that identifies these batches."""
        return np.uint32(int(self.run[:8], 16))

    def known(self, step: int) -> tuple[int, int]:
        """How many examples a step has, and their stamps added up."""
        if step not in self._known:
            self._remember(step, self.members(step))
        return self._known[step]

    def _remember(self, step: int, members: np.ndarray[Any, Any]) -> None:
        origin = np.full(1, self.origin, np.uint32)
        _, stamps = stamps_of(np.full(1, step, np.uint32), origin, members.astype(np.uint32))
        self._known[step] = len(members), int(np.sum(stamps, dtype=np.uint32))

    def step_of_stamp(self, step: int, contributions: int, stamp: int) -> int | None:
        """The step of these batches that a sum is of, by the stamps of its contributions: step, if it may be that one. None if it
        is of several, or of other batches."""
        steps = np.arange(self.steps, dtype=np.uint32)
        places, _ = stamps_of(steps, np.full(self.steps, self.origin, np.uint32), steps)
        found = np.flatnonzero(places * np.uint32(contributions % 2**32) == np.uint32(stamp))
        if not len(found):
            return None
        return step if step in found else int(found[0])

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.steps):
            yield self.at(step)

    def __len__(self) -> int:
        """Number of steps."""
        return self.steps


def _draws_of(journal: Path) -> str | None:
    """The run whose draws a journal was begun with; None if it was not begun."""
    index = jax.process_index()
    path = journal / ("run.json" if index == 0 else f"run-{index}.json")
    if not path.exists():
        return None
    try:
        begun = json.loads(path.read_text())
        if not begun["ready"]:
            return None
        draws = begun.get("draws")
        return None if draws is None else str(draws["run"])
    except (ValueError, KeyError, TypeError, AttributeError) as damage:
        raise FormatError(f"{path} is not the description of a run: {damage!r}") from damage


def _one_for_all(run: str) -> str:
    """The run of the first process."""
    if jax.process_count() == 1:
        return run
    words = np.frombuffer(bytes.fromhex(run), np.uint8).astype(np.int32)
    return np.asarray(multihost_utils.broadcast_one_to_all(words)).astype(np.uint8).tobytes().hex()


def _seldom_longer(units: int, rate: float, seldom: float) -> int:
    """A length that a sum of units independent draws, of that rate on average, exceeds with probability at most 1 / seldom.

    By Chernoff's bound, P(X ≥ k) ≤ exp(−N·KL(k/N ‖ p)).
    """
    if rate >= 1.0:
        return units

    def bound(length: int) -> float:
        share = length / units
        rest = (1 - share) * math.log((1 - share) / (1 - rate)) if share < 1 else 0.0
        return units * (share * math.log(share / rate) + rest)

    low, high = math.ceil(units * rate), units
    while low < high:
        middle = (low + high) // 2
        if bound(middle + 1) >= math.log(seldom) if middle < units else True:
            high = middle
        else:
            low = middle + 1
    return low
