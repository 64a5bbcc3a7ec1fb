"""Batches in which every example comes once, or as a sampler draws it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Generator, Tensor, arange, randperm
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import Subset, SubsetRandomSampler, WeightedRandomSampler, default_collate

from ._core import Mechanism, Sampler
from ._errors import MismatchError


class UncheckedDataWarning(UserWarning):
    """Nothing shows that each example takes part in one step."""


class Cohorts(BatchSampler):
    """Batches in which every example comes once: shuffled once, cut into cohorts, gone through once.

    A batch_sampler for torch.utils.data.DataLoader. len() is the number of steps to plan for. A second pass is refused:
    with a mechanism for single participation it would void the guarantee.

    seed fixes the order; by default it comes from the operating system. To resume a run, give the seed of the first part
    (cohorts.seed) and start, the number of batches that were used. The last cohort may be smaller; drop_last leaves it
    out. shuffle=False keeps the order of the data.

    With several ranks, batch_size is that of the whole cohort, of which each rank gets its part; all need one seed.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
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
        self.length = length
        self.batch_size = batch_size
        self.seed = secrets.randbits(63) if seed is None else seed
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.rank, self.world_size = rank, world_size
        if not 0 <= start <= self._cohorts():
            raise ValueError(f"start is {start}, but there are {self._cohorts()} cohorts")
        self.start = start
        self._started = False
        #: The cohort after the last that was handed out.
        self.drawn = start

    def _cohorts(self) -> int:
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)

    @property
    def order(self) -> dict[str, int]:
        """What decides which example is in which cohort."""
        return {"length": self.length, "batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed}

    def __len__(self) -> int:
        """Number of batches from start to the end."""
        return self._cohorts() - self.start

    def __iter__(self) -> Iterator[list[int]]:
        if self._started:
            raise MismatchError(
                "the data was gone through once, and a mechanism for single participation covers no second pass: train "
                "for one epoch, or plan a run with smaller batches to take more steps"
            )
        self._started = True
        generator = Generator().manual_seed(self.seed)
        order = randperm(self.length, generator=generator) if self.shuffle else arange(self.length)
        for cohort in range(self.start, self._cohorts()):
            self.drawn = cohort + 1
            members = order[cohort * self.batch_size : (cohort + 1) * self.batch_size]
            yield members[self.rank :: self.world_size].tolist()


class SampledBatches(BatchSampler):
    """The batches that a dpmf.Sampler draws, of other sizes from step to step, some perhaps empty.

    A batch_sampler for torch.utils.data.DataLoader, which needs collate_fn=dpmf.torch.EmptyCollate(dataset) for empty ones.
    A mean divides by sampler.expected_batch, never by the size of a batch. One pass holds the steps of all epochs. To resume a
    run, give a sampler of the same key and run, and start, the number of steps that were done; by default it is the sampler's
    next_step. A second pass is refused: it would give steps anew.

    With several ranks, each gets its part of every batch; all need one key and run.
    """

    def __init__(self, sampler: Sampler, *, start: int | None = None, rank: int = 0, world_size: int = 1) -> None:
        start = sampler.next_step if start is None else start
        if not 0 <= start <= sampler.steps:
            raise ValueError(f"start is {start}, but there are {sampler.steps} steps")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, but it must be at least 0 and below world_size, {world_size}")
        self.drawing = sampler
        self.start = start
        self.rank, self.world_size = rank, world_size
        self._started = False
        #: The step after the last whose batch was handed out.
        self.drawn = start

    @property
    def order(self) -> dict[str, int | str]:
        """What decides which example is in which batch; nothing in it is secret."""
        state = self.drawing.state_dict()
        return {name: state[name] for name in ("sampling", "run", "key", "units")}

    def __len__(self) -> int:
        """Number of batches from start to the end."""
        return self.drawing.steps - self.start

    def __iter__(self) -> Iterator[list[int]]:
        if self._started:
            raise MismatchError(
                "these steps were drawn once, and the guarantee is for each of them once: go through the batches once, or "
                "plan a run of more steps"
            )
        self._started = True
        for step in range(self.start, self.drawing.steps):
            self.drawn = step + 1
            # The sampler's own place moves on with the batches, so that its state is that of the run.
            members = next(self.drawing) if self.drawing.next_step == step else self.drawing.members(step)
            yield members[self.rank :: self.world_size].tolist()


class EmptyCollate:
    """A collate_fn that makes a batch of no examples too: tensors like those of other batches, of length 0.

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
    raise TypeError(f"a batch holds a {type(batch).__name__}, of which it is not known what none of it looks like")


def check_loader(
    mechanism: Mechanism, loader: DataLoader[Any], *, epochs: int = 1, batches_per_step: int = 1
) -> None:
    """Refuses a DataLoader under which an example could take part more often than the mechanism covers, whose sampler is not
    the one that the guarantee counts on, or that has more batches than the mechanism has steps.

    Raises MismatchError, which says what to use instead.
    """
    sampled = isinstance(loader.batch_sampler, SampledBatches)
    if not sampled:
        mechanism.check_sampling("epochs", epochs=epochs)
    if isinstance(loader.dataset, IterableDataset):
        raise MismatchError(
            "the data set is an IterableDataset, so nothing shows that each example comes once: give a data set with a "
            "length and dpmf.torch.Cohorts as batch_sampler"
        )
    _check_distinct(loader.dataset)
    batches = loader.batch_sampler
    if isinstance(batches, SampledBatches):
        _check_sampled(mechanism, batches, loader, epochs, batches_per_step)
    elif not isinstance(batches, Cohorts):
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
                f"the sampler is a {name}, of which it is not known that each example comes once: give "
                "dpmf.torch.Cohorts as batch_sampler"
            )
    mechanism.check_steps(-(-len(loader) // batches_per_step))


def _check_sampled(
    mechanism: Mechanism, batches: SampledBatches, loader: DataLoader[Any], epochs: int, batches_per_step: int
) -> None:
    """Refuses batches that are drawn in another way, or from other data, than the guarantee is for."""
    sampler, length = batches.drawing, len(loader.dataset)  # type: ignore[arg-type]
    if type(batches) is not SampledBatches:
        raise MismatchError(
            f"the batch sampler is a {type(batches).__name__}, of which it is not known that it hands out what was drawn: give "
            "dpmf.torch.SampledBatches itself"
        )
    mechanism.check_sampling(sampler.sampling)
    if sampler.units != length:
        raise MismatchError(
            f"the sampler draws from {sampler.units} examples, but the data set has {length}: give units={length}"
        )
    if epochs != 1 or batches_per_step != 1:
        raise MismatchError(
            f"epochs is {epochs} and batches_per_step {batches_per_step}, but one pass of SampledBatches holds all epochs, and "
            "every batch of it is one step: leave both out, and split large batches by calling accumulate() several times"
        )
    mechanism.check_steps(sampler.steps)


def _repeats(indices: Any) -> bool:
    return len(set(map(int, indices))) != len(indices)


def _check_distinct(dataset: Any) -> None:
    """Refuses data sets in which examples of another come twice."""
    parts = [dataset.dataset] if isinstance(dataset, Subset) else []
    parts = dataset.datasets if isinstance(dataset, ConcatDataset) else parts
    if (isinstance(dataset, Subset) and _repeats(dataset.indices)) or len({id(part) for part in parts}) != len(parts):
        raise MismatchError(
            f"examples come several times in the {type(dataset).__name__}, but the guarantee is for one step each: give "
            "each of them once"
        )
    for part in parts:
        _check_distinct(part)


class Passes:
    """Which examples a run has been given."""

    def __init__(self) -> None:
        #: What decided that; None while nobody said.
        self.order: Mapping[str, int | str] | str | None = None
        self.known = False
        #: Whether the batches are those of a sampler, each for the step that it was drawn for.
        self.sampled = False
        #: Batches up to the last that was handed out, from the beginning of the run, and how many make a step.
        self.drawn: int | None = None
        self.batches_per_step = 1

    def hand_out(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches, counted."""
        for batch in loader:
            assert self.drawn is not None
            self.drawn += 1
            yield batch

    def check_step(self, step: int) -> None:
        """Refuses a step whose batch was not handed out yet: it would be that of the step before."""
        if self.drawn is not None and self.drawn <= step * self.batches_per_step:
            raise MismatchError(
                f"step {step} has no batch of its own, and that of the step before would take part twice: take one step "
                "for each batch of optimizer.batches(loader)"
            )
        if self.sampled and self.drawn is not None and self.drawn != step + 1:
            raise MismatchError(
                f"the batch was drawn for step {self.drawn - 1}, but this is step {step}, and the guarantee is for every batch "
                "in its own: take one step for each batch, as it comes; to go on elsewhere, give "
                f"dpmf.torch.SampledBatches(sampler, start={step})"
            )

    def check_drawn(self, mechanism: Mechanism) -> None:
        """Refuses a release whose data nobody saw to be sampled, where the guarantee counts on it."""
        if mechanism.sampling != "none" and not self.sampled:
            raise MismatchError(
                f"the guarantee of this mechanism counts on sampling {mechanism.sampling}, and nothing here shows that the "
                "examples were drawn so: take batches from optimizer.batches(loader) with "
                "batch_sampler=dpmf.torch.SampledBatches(plan.sampler(key)), or plan with sampling=\"none\""
            )

    def begin(self, mechanism: Mechanism, loader: DataLoader[Any], step: int, batches_per_step: int) -> None:
        """Refuses a loader whose examples may have taken part before step."""
        check_loader(mechanism, loader, batches_per_step=batches_per_step)
        cohorts = loader.batch_sampler
        if not isinstance(cohorts, (Cohorts, SampledBatches)):
            if self.order is not None or step > 0:
                raise MismatchError(
                    f"the run is at step {step}, and a new pass over the data gives examples that took part before, but "
                    "the guarantee is for one step each: go through the data once. A pass that was interrupted goes on "
                    "with dpmf.torch.Cohorts(…, seed=that of the first part, start=optimizer.next_step)"
                )
            self._go_on("that of the loader", step, batches_per_step)
            return
        if self.order is not None and self.order != cohorts.order:
            raise MismatchError(
                f"the batches are those of {cohorts.order}, but the run began with {self.order}: examples that took part before "
                "would come again"
            )
        if cohorts.start != step * batches_per_step:
            raise MismatchError(
                f"the batches start with number {cohorts.start}, but the run is at step {step}: each has one step of its own, "
                f"so give dpmf.torch.{type(cohorts).__name__}(…, start={step * batches_per_step})"
            )
        self._go_on(cohorts.order, step, batches_per_step)
        self.sampled = isinstance(cohorts, SampledBatches)

    def _go_on(self, order: Mapping[str, int | str] | str, step: int, batches_per_step: int) -> None:
        self.order, self.known = order, True
        self.drawn, self.batches_per_step = step * batches_per_step, batches_per_step
