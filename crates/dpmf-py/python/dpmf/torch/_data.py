"""Batches in which every example comes once, or as a sampler draws it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Generator, Tensor, arange, randperm
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import Subset, SubsetRandomSampler, WeightedRandomSampler, default_collate

from .._core import Mechanism, PrivateRun, Sampler, _planned_steps
from .._errors import MismatchError


#: Batches of which the size is remembered: more than workers draw ahead.
_KEPT = 1 << 14


class UncheckedDataWarning(UserWarning):
    """dpmf cannot check that each example takes part in one step only."""


class Batches(BatchSampler):
    """Batches that belong to steps: which examples a step has does not depend on what was drawn before.

    One pass gives the batches of an epoch and begins where the run is, so that the epochs of a loop follow each other, and an
    epoch that was interrupted goes on.
    """

    steps: int
    """Of all epochs."""
    expected_batch: float
    """Mean number of examples in a step, what a mean divides by."""
    per_epoch: int
    start: int

    def _begin(self, steps: int, per_epoch: int, start: int) -> None:
        self.steps, self.per_epoch, self.start = steps, per_epoch, start
        #: Where the next pass begins, unless a run says.
        self.drawn = start
        #: The step to begin a pass with, of the run that the batches are for.
        self.place: Callable[[], int] | None = None
        #: Hears of every batch that is handed out, its step and the number of its examples.
        self.heard: Callable[[int, int | None], None] | None = None
        #: Whether who takes the batches counts them. Workers draw ahead, so that drawing tells nothing then.
        self.counted = False
        self.workers = 0
        #: How many examples each batch has that was drawn, by its number.
        self.sizes: dict[int, int] = {}
        self._begun = False

    def go_to(self, step: int) -> None:
        """Lets the next pass begin with a step."""
        self.drawn = step
        if not self._begun:
            self.start = step

    def take(self, step: int) -> None:
        """Notes that the batch of a step was handed out."""
        self.drawn = step + 1
        if self.heard is not None:
            self.heard(step, self.sizes.get(step))

    def members(self, step: int) -> list[int]:
        """The examples of a step."""
        raise NotImplementedError

    @property
    def order(self) -> Mapping[str, int | str]:
        """What decides which example is in which batch."""
        raise NotImplementedError

    @property
    def by_step(self) -> bool:
        """Whether each batch belongs to a step, so that the guarantee is for it in that step only."""
        return True

    @property
    def sampler_in_use(self) -> Sampler | None:
        """The sampler that draws them, if one does."""
        return None

    @property
    def batch_size(self) -> float:  # type: ignore[override]
        """The mean: what Opacus' BatchMemoryManager makes a length of."""
        return self.expected_batch

    def _end(self, step: int) -> int:
        return (step // self.per_epoch + 1) * self.per_epoch

    def __len__(self) -> int:
        """Number of batches in an epoch, or in what is left of the one that the run begins with."""
        first = self.drawn < self._end(self.start) or self.per_epoch == self.steps
        return min(self._end(self.start), self.steps) - self.start if first else self.per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        first = self.drawn if self.place is None else self.place()
        if first >= self.steps:
            raise MismatchError(
                f"all {self.steps} steps were drawn, and the guarantee covers each of them once: plan for more epochs"
            )
        if self.workers > 0 and not self.counted:
            raise MismatchError(
                f"num_workers is {self.workers}, but workers draw batches ahead, so dpmf cannot tell which batch a step has if "
                "batches are split: use num_workers=0 with BatchMemoryManager"
            )
        self.go_to(first)
        self._begun = True
        return self._pass(first, self.counted)

    def _pass(self, first: int, counted: bool) -> Iterator[list[int]]:
        for step in range(first, min(self._end(first), self.steps)):
            members = self.members(step)
            self.sizes[step] = len(members)
            self.sizes.pop(step - _KEPT, None)
            if not counted:
                self.take(step)
            yield members

    def counting(self, begin: Callable[[], Iterator[Any]]) -> tuple[int, Iterator[Any]]:
        """The first step of a pass of the loader that has these batches, and the pass; who takes them says so with take()."""
        self.counted = True
        try:
            batches = begin()
        finally:
            self.counted = False
        return self.drawn, batches


class Cohorts(Batches):
    """Batches in which every example comes once: the data is shuffled once and cut into batches.

    A batch_sampler for torch.utils.data.DataLoader. len() is the number of steps to plan for. A second pass is refused, because
    it would void the guarantee of a mechanism for single participation.

    epochs is for a plan without sampling, dpmf.plan(…, epochs=K, sampling="none"): each pass is an epoch and yields the same
    batches in the same order, so every example keeps its place in the epoch. There are as many batches as the plan has steps in
    an epoch, and their sizes differ by at most one.

    seed fixes the order; by default it comes from the operating system. To resume a run, pass the seed of the first part
    (cohorts.seed) and, without epochs, start, the number of batches that were used. The last batch may be smaller; drop_last
    leaves it out. shuffle=False keeps the order of the data.

    With several ranks, batch_size is that of the whole batch, of which each rank gets its part; all ranks need the same seed.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        epochs: int | None = None,
        seed: int | None = None,
        start: int = 0,
        drop_last: bool = False,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if length < 1 or batch_size < 1:
            raise ValueError(f"length is {length} and batch_size {batch_size}, but both must be at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, but it must be at least 0 and below world_size, {world_size}")
        if world_size > 1 and shuffle and seed is None:
            raise ValueError("every rank would shuffle in its own way: give all of them the same seed")
        if epochs is not None and drop_last:
            raise ValueError("drop_last has no meaning with epochs, whose cohorts are all of one size: leave it out")
        self.length = length
        self._batch_size = batch_size
        self.epochs = epochs
        self.seed = secrets.randbits(63) if seed is None else seed
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.rank, self.world_size = rank, world_size
        if epochs is not None:
            steps = _planned_steps(length, batch_size, epochs)
            count = steps // epochs
            self.expected_batch = length / count
        else:
            steps = count = length // batch_size if drop_last else -(-length // batch_size)
            self.expected_batch = batch_size
        if not 0 <= start <= steps:
            raise ValueError(f"start is {start}, but there are {steps} cohorts")
        self._begin(steps, max(count, 1), start)
        self._started = False
        self._shuffled: tuple[int, Tensor] | None = None

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """As it was given."""
        return self._batch_size

    @property
    def order(self) -> dict[str, int]:
        """What decides which example is in which cohort."""
        order = {"length": self.length, "batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed}
        return order if self.epochs is None else {**order, "epochs": self.epochs}

    @property
    def by_step(self) -> bool:
        """Batches of one pass may serve any step: their examples come once."""
        return self.epochs is not None

    def __iter__(self) -> Iterator[list[int]]:
        if self.epochs is not None:
            return super().__iter__()
        self._check_not_started()
        return self._once(self.counted)

    def _check_not_started(self) -> None:
        if self._started:
            raise MismatchError(
                "the data has been used once, and a mechanism for single participation does not cover a second pass: "
                "train for one epoch, plan for several with dpmf.plan(examples=…, batch=…, epochs=…), or use smaller batches"
            )

    def _once(self, counted: bool) -> Iterator[list[int]]:
        # With the first batch, not before: a loader with workers asks for an iterator that it does not use.
        self._check_not_started()
        self._started = True
        yield from self._pass(self.start, counted)

    def members(self, step: int) -> list[int]:
        """The examples of a step, or this rank's part of them."""
        if self._shuffled is None or self._shuffled[0] != self.seed:
            generator = Generator().manual_seed(self.seed)
            order = randperm(self.length, generator=generator) if self.shuffle else arange(self.length)
            self._shuffled = self.seed, order
        order = self._shuffled[1]
        if self.epochs is None:
            members = order[step * self.batch_size : (step + 1) * self.batch_size]
        else:
            cohort = step % self.per_epoch
            bounds = [self.length * place // self.per_epoch for place in (cohort, cohort + 1)]
            members = order[bounds[0] : bounds[1]]
        return members[self.rank :: self.world_size].tolist()


class SampledBatches(Batches):
    """The batches that a dpmf.Sampler draws. They differ in size, and may be empty.

    A batch_sampler for torch.utils.data.DataLoader, which needs collate_fn=dpmf.torch.EmptyCollate(dataset) for empty ones.
    A mean divides by sampler.expected_batch, never by the size of a batch. One pass has the steps of all epochs or, with
    epochs=K, of one epoch; the next pass continues with the next epoch. A resumed run continues where it was, with a sampler of
    the same key and run. After all steps, another pass is refused, because it would repeat steps.

    With several ranks, each gets its part of every batch; all ranks need the same key and run.
    """

    def __init__(
        self, sampler: Sampler, *, epochs: int = 1, start: int | None = None, rank: int = 0, world_size: int = 1
    ) -> None:
        if start is not None and not 0 <= start <= sampler.steps:
            raise ValueError(f"start is {start}, but there are {sampler.steps} steps")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, but it must be at least 0 and below world_size, {world_size}")
        if epochs < 1 or sampler.steps % epochs:
            raise ValueError(f"epochs is {epochs}, but it must divide the {sampler.steps} steps of the sampler")
        self.drawing = sampler
        self.epochs = epochs
        self.rank, self.world_size = rank, world_size
        self.expected_batch = sampler.expected_batch
        self._begin(sampler.steps, sampler.steps // epochs, sampler.next_step if start is None else start)

    @property
    def order(self) -> dict[str, int | str]:
        """What decides which example is in which batch; nothing in it is secret."""
        state = self.drawing.state_dict()
        return {name: state[name] for name in ("sampling", "run", "key", "units")}

    @property
    def sampler_in_use(self) -> Sampler:
        """The sampler."""
        return self.drawing

    def members(self, step: int) -> list[int]:
        """The examples of a step, or this rank's part of them."""
        # The sampler's own place moves on with the batches, so that its state is that of the run.
        members = next(self.drawing) if self.drawing.next_step == step else self.drawing.members(step)
        own: list[int] = members[self.rank :: self.world_size].tolist()
        return own


class StepLoader(DataLoader[Any]):
    """A DataLoader of Batches that counts what is taken from it, so that workers may draw ahead."""

    def __iter__(self) -> Any:
        batches = self.batch_sampler
        assert isinstance(batches, Batches)
        return self._count(batches, *batches.counting(super().__iter__))

    @staticmethod
    def _count(batches: Batches, step: int, taken: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(taken, step):
            batches.take(number)
            yield batch


class EmptyCollate:
    """A collate_fn that also makes empty batches: tensors like those of other batches, of length 0.

    The first example of the data set shows what they look like.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.collate = collate
        self._empty = _emptied(collate([dataset[0]]))

    def __call__(self, examples: list[Any]) -> Any:
        return self.collate(examples) if examples else self._empty


def _emptied(batch: Any) -> Any:
    """A batch of one example without it."""
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, dict):
        return {key: _emptied(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)) and all(isinstance(value, (str, bytes)) for value in batch):
        return type(batch)()
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_emptied, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(_emptied, batch))
    raise TypeError(f"a batch holds a {type(batch).__name__}, and dpmf does not know what an empty one looks like")


def check_loader(
    mechanism: Mechanism, loader: DataLoader[Any], *, epochs: int = 1, batches_per_step: int = 1
) -> None:
    """Refuses a DataLoader if an example could take part more often than the mechanism covers, if its sampler is not the one that
    the guarantee relies on, or if it has more batches than the mechanism has steps.

    Raises MismatchError, which says what to use instead.
    """
    batches = loader.batch_sampler
    by_step = isinstance(batches, Batches) and batches.by_step
    if not by_step:
        mechanism.check_sampling("epochs", epochs=epochs)
    if isinstance(loader.dataset, IterableDataset):
        raise MismatchError(
            "the data set is an IterableDataset, so dpmf cannot tell whether each example comes once: pass a data set with a length, "
            "and dpmf.torch.Cohorts as batch_sampler"
        )
    _check_distinct(loader.dataset)
    if isinstance(batches, Batches) and by_step:
        _check_in_order(mechanism, batches, loader, epochs, batches_per_step)
        return
    if not isinstance(batches, Cohorts):
        # Subclasses may do anything.
        sampler: Any = batches.sampler if type(batches) is BatchSampler else batches or loader.sampler
        name = type(sampler).__name__
        if name in ("UniformWithReplacementSampler", "DistributedUniformWithReplacementSampler"):
            mechanism.check_sampling("poisson")  # the names that Opacus gives to Poisson sampling
        elif type(sampler) is WeightedRandomSampler:
            if sampler.replacement:
                mechanism.check_sampling("with-replacement")
        elif type(sampler) is RandomSampler:
            # More samples than there are examples come from several passes.
            if sampler.replacement or sampler.num_samples > len(loader.dataset):  # type: ignore[arg-type]
                mechanism.check_sampling("with-replacement")
        elif type(sampler) is SubsetRandomSampler:
            if _repeats(sampler.indices):
                mechanism.check_sampling("with-replacement")
        elif type(sampler) is not SequentialSampler:
            raise MismatchError(
                f"the sampler is a {name}, and dpmf cannot tell whether each example comes once: pass dpmf.torch.Cohorts as batch_sampler"
            )
    mechanism.check_steps(-(-len(loader) // batches_per_step))


def _check_in_order(
    mechanism: Mechanism, batches: Batches, loader: DataLoader[Any], epochs: int, batches_per_step: int
) -> None:
    """Refuses batches that are drawn in another way, or from other data, than the guarantee is for."""
    length = len(loader.dataset)  # type: ignore[arg-type]
    if not (type(batches) is Cohorts or type(batches) is SampledBatches):
        raise MismatchError(
            f"the batch sampler is a {type(batches).__name__}, and dpmf cannot tell whether it yields what was drawn: pass "
            "dpmf.torch.SampledBatches itself"
        )
    if isinstance(batches, SampledBatches):
        mechanism.check_sampling(batches.drawing.sampling)
        units = batches.drawing.units
    else:
        if mechanism.sampling != "none":
            mechanism.check_sampling("epochs", epochs=batches.epochs or 1)
        # The participation is that of these bins, whatever put the examples there.
        mechanism.check_sampling(f"balls-in-bins:{batches.per_epoch}")
        units = batches.length
    if units != length:
        raise MismatchError(f"the sampler draws from {units} examples, but the data set has {length}: pass units={length}")
    if epochs != 1 or batches_per_step != 1:
        raise MismatchError(
            f"epochs is {epochs} and batches_per_step {batches_per_step}, but {type(batches).__name__} knows the epochs, and each of "
            "its batches is one step: remove both, and split large batches by calling accumulate() several times"
        )
    mechanism.check_steps(batches.steps)


def _repeats(indices: Any) -> bool:
    return len(set(map(int, indices))) != len(indices)


def _is_compound(entry: Any) -> bool:
    """Whether entries of a list are the same object only if one was put there several times: equal numbers and texts may share one."""
    if isinstance(entry, tuple):
        return any(map(_is_compound, entry))
    return isinstance(entry, (Tensor, np.ndarray, dict, list))


def _check_distinct(dataset: Any) -> None:
    """Refuses data sets that contain an example of another data set twice."""
    if isinstance(dataset, (list, tuple)):
        entries = [id(entry) for entry in dataset if _is_compound(entry)]
        if len(set(entries)) != len(entries):
            raise MismatchError(
                f"entries of the {type(dataset).__name__} are the same object: an example that is included several times counts several "
                "times, but the guarantee is for one step each. Include each of them once"
            )
    parts = [dataset.dataset] if isinstance(dataset, Subset) else []
    parts = dataset.datasets if isinstance(dataset, ConcatDataset) else parts
    if (isinstance(dataset, Subset) and _repeats(dataset.indices)) or len({id(part) for part in parts}) != len(parts):
        raise MismatchError(
            f"the {type(dataset).__name__} contains some examples several times, but the guarantee is for one step each: include each "
            "of them once"
        )
    for part in parts:
        _check_distinct(part)


def _size_of(loader: DataLoader[Any], place: int) -> int | None:
    """Examples in a batch of a loader, by its place in the pass; None where the loader does not make batches."""
    size = loader.batch_size
    if size is None:
        return None
    return min(size, len(loader.sampler) - place * size)  # type: ignore[arg-type]


def name_of(order: Mapping[str, int | str] | str) -> str:
    """What decides who is in which batch, in words."""
    return order if isinstance(order, str) else ", ".join(f"{name} {value}" for name, value in sorted(order.items()))


def begin_pass(run: PrivateRun, mechanism: Mechanism, loader: DataLoader[Any], batches_per_step: int) -> Batches | None:
    """Refuses a loader whose examples may have taken part before; returns its batches, if they say who is in them."""
    check_loader(mechanism, loader, batches_per_step=batches_per_step)
    batches, step = loader.batch_sampler, run.next_step
    if not isinstance(batches, Batches):
        if run.order is not None or step > 0:
            raise MismatchError(
                f"the run is at step {step}, and a new pass over the data would use examples a second time, but the guarantee is for "
                "one step each: go through the data once. To continue an interrupted pass, use dpmf.torch.Cohorts(…, seed=that of the "
                "first part, start=optimizer.next_step)"
            )
        return None
    if batches.by_step:
        batches.go_to(step)  # a batch is a function of its step
    elif batches.start != step * batches_per_step:
        raise MismatchError(
            f"the batches start with number {batches.start}, but the run is at step {step}: each has one step of its own, "
            f"so pass dpmf.torch.{type(batches).__name__}(…, start={step * batches_per_step})"
        )
    return batches


def hand_out(run: PrivateRun, loader: DataLoader[Any], batches_per_step: int) -> Iterator[Any]:
    """The batches of a loader, each reported to the run as it is handed out."""
    batches = loader.batch_sampler
    if isinstance(batches, Batches):
        first, taken = batches.counting(lambda: iter(loader))
    else:
        first, taken = 0, iter(loader)
    for place, batch in enumerate(taken):
        number = first + place
        if isinstance(batches, Batches):
            batches.take(number)
            members = batches.sizes.get(number)
        else:
            members = _size_of(loader, place)
        run.hand_out(number // batches_per_step, members)
        yield batch
