"""PyTorch: correlated noise on the clipped, summed gradient, before any torch.optim step.

    cohorts = dpmf.torch.Cohorts(len(dataset), batch_size=256)
    loader = DataLoader(dataset, batch_sampler=cohorts)
    mechanism = dpmf.plan(steps=len(cohorts), momentum=0.9, epsilon=3, delta=1e-5, clip=1.0)
    optimizer = dpmf.torch.PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), mechanism, denominator=256
    )
    for inputs, targets in loader:
        optimizer.accumulate(model, torch.nn.functional.cross_entropy, inputs, targets)
        optimizer.step()

The guarantee is for data that takes part in one step: one pass over disjoint batches. dpmf.opacus does the same with the
per-sample gradients of Opacus.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

try:
    import torch
except ModuleNotFoundError as missing:
    raise ImportError("dpmf.torch needs PyTorch: pip install 'dpmf[torch]'") from missing
from torch import distributed
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import WeightedRandomSampler

try:
    from torch.func import functional_call, grad, vmap
except ImportError:  # PyTorch 1
    from functorch import grad, vmap
    from torch.nn.utils.stateless import functional_call

from ._core import DurableStream, Mechanism, NoiseKey, NoiseStream, PrivacyStatement, new_run
from ._errors import BindingError, MismatchError

__all__ = ["Cohorts", "PrivateOptimizer", "accumulate_clipped", "check_loader", "shard"]

STATE_VERSION = 1

#: Clipping aims this much below the clip, relatively: more than the rounding of norm, factor and product together.
CLIP_MARGIN = 2.0**-20


def shard(dimension: int, rank: int | None = None, world_size: int | None = None) -> range:
    """The coordinates of one rank, of sizes that differ by at most one.

    Without rank and world_size, those of torch.distributed. The noise of a coordinate depends on its number alone, so
    the shards of any number of ranks are together, bit for bit, what one process draws.

    >>> [dpmf.torch.shard(10, rank, 3) for rank in range(3)]  # doctest: +SKIP
    [range(0, 3), range(3, 6), range(6, 10)]
    """
    if rank is None or world_size is None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ValueError(
                "rank and world_size are not given, and torch.distributed is not initialised: call "
                "torch.distributed.init_process_group first, or give both"
            )
        rank = distributed.get_rank() if rank is None else rank
        world_size = distributed.get_world_size() if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, but it must be at least 0 and below world_size, {world_size}")
    return range(dimension * rank // world_size, dimension * (rank + 1) // world_size)


class Cohorts(BatchSampler):
    """Batches in which every example comes once: shuffled once, cut into cohorts, gone through once.

    A batch_sampler for torch.utils.data.DataLoader. len() is the number of steps to plan for. A second pass is refused:
    with a mechanism for single participation it would void the guarantee.

    seed fixes the order; by default it comes from the operating system. To resume a run, give the seed of the first part
    (cohorts.seed) and start, the number of batches that were used. The last cohort may be smaller; drop_last leaves it
    out. shuffle=False keeps the order of the data.
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
    ) -> None:
        if length < 1 or batch_size < 1:
            raise ValueError(f"length is {length} and batch_size {batch_size}, but both must be at least 1")
        self.length = length
        self.batch_size = batch_size
        self.seed = secrets.randbits(63) if seed is None else seed
        self.drop_last = drop_last
        self.shuffle = shuffle
        if not 0 <= start <= self._cohorts():
            raise ValueError(f"start is {start}, but there are {self._cohorts()} cohorts")
        self.start = start
        self._started = False

    def _cohorts(self) -> int:
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)

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
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(self.length, generator=generator) if self.shuffle else torch.arange(self.length)
        for cohort in range(self.start, self._cohorts()):
            yield order[cohort * self.batch_size : (cohort + 1) * self.batch_size].tolist()


def check_loader(mechanism: Mechanism, loader: DataLoader[Any], *, epochs: int = 1) -> None:
    """Refuses a DataLoader under which an example could take part more often than the mechanism covers, or that has more
    batches than the mechanism has steps.

    Raises MismatchError, which says what to use instead.
    """
    mechanism.check_sampling("epochs", epochs=epochs)
    if isinstance(loader.dataset, IterableDataset):
        raise MismatchError(
            "the data set is an IterableDataset, so nothing shows that each example comes once: give a data set with a "
            "length and dpmf.torch.Cohorts as batch_sampler"
        )
    batches = loader.batch_sampler
    if not isinstance(batches, Cohorts):
        sampler = getattr(batches, "sampler", batches if batches is not None else loader.sampler)
        name = type(sampler).__name__
        if name in ("UniformWithReplacementSampler", "DistributedUniformWithReplacementSampler"):
            mechanism.check_sampling("poisson")  # the names that Opacus gives to Poisson sampling
        elif isinstance(sampler, WeightedRandomSampler):
            if sampler.replacement:
                mechanism.check_sampling("with-replacement")
        elif isinstance(sampler, RandomSampler):
            # More samples than there are examples come from several passes.
            if sampler.replacement or sampler.num_samples > len(loader.dataset):  # type: ignore[arg-type]
                mechanism.check_sampling("with-replacement")
        elif not isinstance(sampler, SequentialSampler):
            raise MismatchError(
                f"the sampler is a {name}, of which it is not known that each example comes once: give "
                "dpmf.torch.Cohorts as batch_sampler"
            )
    mechanism.check_steps(len(loader))


def accumulate_clipped(
    module: torch.nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    clip: float,
    chunk: int = 64,
    vectorize: bool = True,
) -> int:
    """Adds the sum of the per-example gradients, each clipped to norm clip, to the .grad of the module's parameters.

    loss(outputs, targets) is called on batches of one example. Returns the number of examples. An example whose gradient
    is not finite counts as zero. chunk examples are differentiated at once with vmap; vectorize=False goes through them
    one by one, for modules that vmap does not know.

    Guarantee: after rounding, the norm of every example's contribution is at most clip.
    Cost: chunk model-sized arrays.
    """
    for part in module.modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.training:
            raise ValueError(
                f"{type(part).__name__} mixes the examples of a batch, so that no example has a gradient of its own: use "
                "torch.nn.GroupNorm, or freeze it with .eval()"
            )
    if not clip > 0.0:
        raise ValueError(f"clip is {clip}, but it must be positive")
    if len(inputs) != len(targets):
        raise ValueError(f"there are {len(inputs)} inputs, but {len(targets)} targets: one target for every input")
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("no parameter of the module requires a gradient")
    for name, p in trained.items():
        _check_dtype(p, name)
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    detached = {name: p.detach() for name, p in trained.items()}
    fixed = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    fixed.update((name, buffer) for name, buffer in module.named_buffers())

    def loss_of_one(parameters: dict[str, torch.Tensor], one: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value = loss(functional_call(module, {**parameters, **fixed}, (one.unsqueeze(0),)), target.unsqueeze(0))
        # The sum of a scalar fails in the vmap of PyTorch 1.
        return value if value.dim() == 0 else value.sum()

    def one_by_one(
        _: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        parts = []
        for one, target in zip(inputs, targets):
            value = loss(module(one.unsqueeze(0)), target.unsqueeze(0)).sum()
            gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
            parts.append([torch.zeros_like(p) if g is None else g for g, p in zip(gradients, trained.values())])
        return {name: torch.stack(of_all) for name, of_all in zip(trained, zip(*parts))}

    def at_once(
        parameters: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        try:
            return vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")(parameters, inputs, targets)
        except RuntimeError as failed:
            raise ValueError(
                f"torch's vmap cannot differentiate this module for all examples at once ({failed}): give vectorize=False, "
                "which is slower, or use dpmf.opacus"
            ) from failed

    per_example = at_once if vectorize else one_by_one
    for first in range(0, len(inputs), chunk):
        gradients = per_example(detached, inputs[first : first + chunk], targets[first : first + chunk])
        rows = [g.detach().reshape(len(g), -1) for g in gradients.values()]
        norms = torch.stack([row.double().square().sum(1) for row in rows]).sum(0).sqrt()
        factors = (clip * (1.0 - CLIP_MARGIN) / norms).clamp(max=1.0).float()
        finite = norms.isfinite()
        for (name, p), row in zip(trained.items(), rows):
            # Zero times infinity is not zero.
            kept = row if bool(finite.all()) else torch.where(finite[:, None], row, torch.zeros_like(row))
            weights = torch.where(finite, factors, torch.zeros_like(factors))
            assert p.grad is not None
            p.grad += (weights @ kept).view_as(p)
    return len(inputs)


def _check_dtype(p: torch.Tensor, name: str) -> None:
    if p.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"parameter {name} is {p.dtype}, and half precision cannot hold the noise: keep the parameters in float32 "
            "(model.float()) and compute in half precision under torch.autocast"
        )
    if p.dtype != torch.float32:
        raise TypeError(f"parameter {name} is {p.dtype}, but the noise is float32: convert the model with model.float()")


def _check_optimizer(mechanism: Mechanism, group: Mapping[str, Any], first_rate: float | None = None) -> None:
    """One parameter group of torch.optim.SGD, and its first learning rate, which matters beside weight decay."""
    dampening = group.get("dampening", 0.0)
    if dampening != 0.0 and group["momentum"] != 0.0:
        raise MismatchError(
            f"the optimizer has dampening {dampening}, which scales every gradient but the first: set dampening=0 and "
            f"multiply the learning rate by {1.0 - dampening}"
        )
    mechanism.check_optimizer(
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        weight_decay=group["weight_decay"],
        coupled=group["weight_decay"] != 0.0,
        learning_rates=None if first_rate is None else [first_rate],
    )


class _Checks:
    """What an optimizer does, against what its mechanism was planned for."""

    def __init__(self, mechanism: Mechanism, optimizer: torch.optim.Optimizer) -> None:
        self.mechanism = mechanism
        #: The learning rate of the first step, for every parameter group.
        self.first: list[float] | None = None
        if not isinstance(optimizer, torch.optim.SGD):
            name = type(optimizer).__name__
            raise MismatchError(
                f"the optimizer is {name}, whose steps are not linear in the gradients, so that no mechanism is the best "
                "for it. The guarantee holds with any optimizer: plan with the momentum closest to it and give "
                f"check=False to train with {name}"
            )
        for group in optimizer.param_groups:
            _check_optimizer(mechanism, group)

    def step(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuses a step that differs from the plan, before any of its noise is drawn."""
        self.mechanism.check_steps(step + 1)
        rates = [float(group["lr"]) for group in groups]
        planned = self.mechanism.workload.learning_rates
        # Steps that were burned have left no learning rate: the first is what the plan makes of this one.
        factor = 1.0 if planned is None else float(planned[0] / planned[step])
        first = self.first or [rate * factor for rate in rates]
        for group, rate, first_rate in zip(groups, rates, first):
            _check_optimizer(self.mechanism, group, first_rate)
            self.mechanism.check_learning_rate(step, rate, first_rate)
        self.first = first


class _FlatNoise:
    """The noise of a mechanism over the flat view of a list of parameters, in one process or a shard of it in each of
    several."""

    def __init__(
        self,
        mechanism: Mechanism,
        parameters: Sequence[torch.Tensor],
        *,
        key: NoiseKey | None,
        run: str | None,
        journal: str | os.PathLike[str] | None,
        group: Any,
    ) -> None:
        if mechanism.privacy is None:
            raise ValueError(
                "the mechanism is not calibrated, so its noise has no scale: use mechanism.calibrate(epsilon, delta, clip)"
            )
        self.mechanism = mechanism
        self.parameters = list(parameters)
        if not self.parameters:
            raise ValueError("the optimizer has no parameter that requires a gradient")
        for number, p in enumerate(self.parameters):
            _check_dtype(p, str(number))
        if len({id(p) for p in self.parameters}) != len(self.parameters):
            raise ValueError("a parameter comes twice in the optimizer: its gradient would be released twice")
        self.dimension = sum(p.numel() for p in self.parameters)
        self.group = group
        self.rank, self.world_size = 0, 1
        if group is not None:
            self.group = None if group is True else group
            self.rank = distributed.get_rank(self.group)
            self.world_size = distributed.get_world_size(self.group)
            key, run = self._agree(key, run)
        if key is None:
            if journal is not None:
                raise ValueError(
                    "a journal is for a run that is resumed, which needs its key: give key=NoiseKey.create(path), and "
                    "NoiseKey.read(path) to resume"
                )
            key = NoiseKey.generate()
        self.key = key
        self.coordinates = shard(self.dimension, self.rank, self.world_size)
        self.journal = journal
        self.stream: NoiseStream | DurableStream | None
        if journal is None:
            self.stream = NoiseStream(mechanism, key, run=run, coordinates=self.coordinates)
        elif os.path.exists(journal):
            # Goes on only with the state that belongs to it.
            self.stream = None
        else:
            self.stream = DurableStream.create(mechanism, key, journal, run=run, coordinates=self.coordinates)
        self.flat = torch.zeros(self.dimension, dtype=torch.float32)
        self.views = []
        offset = 0
        for p in self.parameters:
            self.views.append(self.flat[offset : offset + p.numel()].view(p.shape))
            offset += p.numel()

    def _agree(self, key: NoiseKey | None, run: str | None) -> tuple[NoiseKey, str]:
        """One run for all ranks, and an error unless they have one key, mechanism and model."""
        if key is None:
            raise ValueError(
                "every rank needs the same key: make it once with NoiseKey.create(path) and give "
                "key=NoiseKey.read(path) in every rank"
            )
        mine = (key.fingerprint, self.mechanism.hash, self.dimension, run or new_run())
        all_ranks: list[Any] = [None] * self.world_size
        distributed.all_gather_object(all_ranks, mine, group=self.group)
        for what, index in (("key", 0), ("mechanism", 1), ("number of parameters", 2)):
            if len({values[index] for values in all_ranks}) != 1:
                listed = ", ".join(f"{values[index]} in rank {rank}" for rank, values in enumerate(all_ranks))
                raise MismatchError(f"the ranks differ in their {what}: {listed}; give all of them the same")
        return key, all_ranks[0][3]

    @property
    def next_step(self) -> int:
        return self._live().next_step

    @property
    def privacy(self) -> PrivacyStatement | None:
        return self._live().privacy

    def _live(self) -> NoiseStream | DurableStream:
        if self.stream is None:
            raise ValueError(
                f"journal {os.fspath(self.journal or '')} belongs to a run that was begun: go on with it by "
                "load_state_dict(…), or give the path of a new journal for a new run"
            )
        return self.stream

    def gather(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copies gradients into the flat view, zero where there is none: also those coordinates must have noise."""
        for number, (view, tensor) in enumerate(zip(self.views, tensors)):
            if tensor is None:
                view.zero_()
                continue
            if tensor.is_sparse:
                raise TypeError(
                    f"the gradient of parameter {number} is sparse, and its zeros would show which rows were used: make "
                    "the embedding with sparse=False"
                )
            view.copy_(tensor.detach().view(view.shape))

    def add(self) -> int:
        """Sums the flat view over the ranks and adds one row of noise to it; returns the step.

        Every rank sums its shard, adds noise to it and passes it on: as much communication as an all-reduce, in which
        the journal of each rank still sees all of the data that its noise covers.
        """
        stream = self._live()
        self.mechanism.check_steps(stream.next_step + 1)
        if self.world_size > 1:
            self._exchange(lambda part, owner: distributed.reduce(part, owner, group=self.group, async_op=True))
        mine = self.flat[self.coordinates.start : self.coordinates.stop].numpy()
        step = stream.release(mine) if isinstance(stream, DurableStream) else stream.add_to(mine)
        if self.world_size > 1:
            self._exchange(lambda part, owner: distributed.broadcast(part, owner, group=self.group, async_op=True))
        return step

    def _exchange(self, start: Callable[[torch.Tensor, int], Any]) -> None:
        pending = []
        for rank in range(self.world_size):
            part = shard(self.dimension, rank, self.world_size)
            if len(part):
                owner = rank if self.group is None else distributed.get_global_rank(self.group, rank)
                pending.append(start(self.flat[part.start : part.stop], owner))
        for work in pending:
            work.wait()

    def burn(self) -> int:
        stream = self._live()
        return stream.burn() if isinstance(stream, DurableStream) else stream.skip()

    def state_dict(self) -> dict[str, Any]:
        stream = self._live()
        state = {
            "version": STATE_VERSION,
            "step": stream.next_step,
            "run": stream.run,
            "mechanism": self.mechanism.hash,
            "coordinates": [self.coordinates.start, self.coordinates.stop],
        }
        if isinstance(stream, DurableStream):
            state["noise"] = torch.frombuffer(bytearray(stream.checkpoint_bytes()), dtype=torch.uint8)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["version"] != STATE_VERSION:
            raise BindingError(f"the state has version {state['version']}, but this is version {STATE_VERSION}")
        if state["mechanism"] != self.mechanism.hash:
            raise BindingError(
                f"the state belongs to mechanism {state['mechanism'][:16]}…, but this is {self.mechanism.hash[:16]}…: keep "
                "the mechanism of a run with mechanism.save(path) and resume with Mechanism.load(path)"
            )
        if list(state["coordinates"]) != [self.coordinates.start, self.coordinates.stop]:
            first, last = state["coordinates"]
            raise BindingError(
                f"the state is for coordinates {first}..{last}, but this is {self.coordinates.start}.."
                f"{self.coordinates.stop}: resume with the same model, number of ranks and rank"
            )
        if self.journal is None or "noise" not in state:
            raise ValueError(
                "a run is resumed from its journal, which shows that no noise is released twice: train with "
                "key=NoiseKey.create(path) and journal=path, and resume with key=NoiseKey.read(path) and the same journal"
            )
        if self.stream is not None:
            # A journal that this object has just begun, or goes on with, is not the one that the state was kept beside.
            raise ValueError(
                f"journal {os.fspath(self.journal)} was begun or resumed by this optimizer, at step "
                f"{self.stream.next_step}; a state is loaded once, beside the journal of its run"
            )
        noise = state["noise"].numpy().tobytes()
        self.stream = DurableStream.open(
            self.mechanism, self.key, self.journal, checkpoint=noise, coordinates=self.coordinates
        )
        if (self.stream.run, self.stream.next_step) != (state["run"], state["step"]):
            found = (self.stream.run, self.stream.next_step)
            self.stream.close()
            self.stream = None
            raise BindingError(
                f"the state is at step {state['step']} of run {state['run']}, but its noise is at step {found[1]} of run "
                f"{found[0]}: the state was altered"
            )

    def close(self) -> None:
        if isinstance(self.stream, DurableStream):
            self.stream.close()


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


class _Noisy:
    """What an optimizer tells of its noise."""

    _noise: _FlatNoise

    @property
    def privacy(self) -> PrivacyStatement | None:
        """The privacy statement, with the origin of the key in use."""
        return self._noise.privacy

    @property
    def next_step(self) -> int:
        """The step that step() takes next, zero-based; equal to mechanism.steps at the end."""
        return self._noise.next_step

    @property
    def run(self) -> str:
        """The name of the run, 32 hexadecimal digits."""
        return self._noise._live().run


class PrivateOptimizer(_Noisy, torch.optim.Optimizer):
    """Adds the noise of a mechanism to the clipped, summed gradient, then lets a torch.optim optimizer step.

    optimizer is any of torch.optim. Its momentum, weight decay and learning rates are checked against the mechanism's
    workload at every step: the guarantee holds without, but not the optimality. check=False leaves that out, for
    optimizers that no mechanism is planned for, such as Adam.

    denominator is the planned size of a cohort, by which the noisy sum is divided; it is fixed before training and stays
    when a cohort is smaller. 1 leaves the sum.

    key is the secret behind the noise, by default a new one that ends with the process. A run that is to be resumed needs
    a key file and a journal:

        key = dpmf.NoiseKey.create("run.key")           # NoiseKey.read("run.key") to resume
        optimizer = PrivateOptimizer(sgd, mechanism, denominator=256, key=key, journal="run.journal")
        optimizer.load_state_dict(torch.load("run.pt"))  # to resume

    After a crash, steps beyond the state are in the journal: they come again for the very same gradients only
    (StepReusedError otherwise), and burn() gives one up.

    group is the torch.distributed process group, or True for the default one, whose ranks hold the whole model and
    accumulate gradients of disjoint parts of each cohort. Each rank draws the noise of its shard of coordinates only, and
    keeps buffers for it only; the noise is that of one process, bit for bit. Each rank needs the same key and a journal of
    its own.

    A step consumes the gradients: .grad is None after it, so that no gradient is released twice.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mechanism: Mechanism,
        *,
        denominator: float,
        key: NoiseKey | None = None,
        run: str | None = None,
        journal: str | os.PathLike[str] | None = None,
        group: Any = None,
        check: bool = True,
    ) -> None:
        # No super().__init__(): what an optimizer holds is held by the one inside.
        if not denominator > 0:
            raise ValueError(f"denominator is {denominator}, but it must be positive: the planned size of a cohort")
        self.optimizer = optimizer
        self.mechanism = mechanism
        self.denominator = denominator
        self._checks = _Checks(mechanism, optimizer) if check else None
        self._noise = _FlatNoise(mechanism, _trained(optimizer), key=key, run=run, journal=journal, group=group)
        self._clipped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimizer inside."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the optimizer inside."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the optimizer inside."""
        return self.optimizer.defaults

    @property
    def clip(self) -> float:
        """The norm to which every contribution is clipped."""
        privacy = self.mechanism.privacy
        assert privacy is not None
        return privacy.clip

    @property
    def coordinates(self) -> range:
        """The coordinates of the flat parameters whose noise is drawn here."""
        return self._noise.coordinates

    def accumulate(
        self,
        module: torch.nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        chunk: int = 64,
        vectorize: bool = True,
    ) -> int:
        """Adds the sum of per-example gradients, each clipped to the mechanism's clip; see accumulate_clipped.

        May be called several times before a step, each time with other examples of the cohort.
        """
        count = accumulate_clipped(
            module, loss, inputs, targets, clip=self.clip, chunk=chunk, vectorize=vectorize
        )
        self._clipped = True
        return count

    @torch.no_grad()
    def step(self, closure: Any = None, *, clipped: bool = False) -> None:
        """Adds the next row of noise to the gradients, divides by the denominator and steps.

        The gradients are those of accumulate(). If they come from elsewhere and are a sum of contributions each clipped to
        norm clip, say so with clipped=True.
        """
        if closure is not None:
            raise ValueError("a closure would look at the data again within a step: call step() without one")
        parameters = self._noise.parameters
        if all(p.grad is None for p in parameters):
            raise ValueError(
                "there is no gradient: call accumulate(…) before step(). For a cohort without examples, "
                "zero_grad(set_to_none=False) and step(clipped=True) release noise alone"
            )
        if not (self._clipped or clipped):
            raise ValueError(
                "these gradients did not come from accumulate(): those of loss.backward() are a mean and not clipped, and "
                "no noise makes them private. Use accumulate(…); if they are a sum of contributions, each clipped to norm "
                f"{self.clip}, give step(clipped=True)"
            )
        if len(_trained(self.optimizer)) != len(parameters):
            raise ValueError(
                "the set of trained parameters has changed since this optimizer was made, and with it the noise: make "
                "all parameters trainable or frozen before"
            )
        noise = self._noise
        if self._checks is not None:
            self._checks.step(noise.next_step, self.param_groups)
        noise.gather([p.grad for p in parameters])
        noise.add()
        noise.flat.div_(self.denominator)
        for p, view in zip(parameters, noise.views):
            p.grad = view.to(p.device)
        try:
            self.optimizer.step()
        finally:
            self._clear()

    def burn(self) -> int:
        """Gives up the next step, whose gradients are lost: its noise is never used. Returns the step."""
        self._clear()
        return self._noise.burn()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards the gradients accumulated since the last step."""
        self._clear()
        if not set_to_none:
            for p in self._noise.parameters:
                p.grad = torch.zeros_like(p)

    def _clear(self) -> None:
        self._clipped = False
        for p in self._noise.parameters:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer inside and, under "dpmf", that of the noise, encrypted under the key."""
        state = dict(self.optimizer.state_dict())
        state["dpmf"] = {
            **self._noise.state_dict(),
            "denominator": self.denominator,
            "first_learning_rates": self._checks and self._checks.first,
        }
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a state, beside the journal of its run. The steps after are, bit for bit, those of a run that was
        never interrupted."""
        state = dict(state_dict)
        ours = state.pop("dpmf", None)
        if ours is None:
            raise BindingError("the state has no entry dpmf: it is not that of a PrivateOptimizer")
        if ours["denominator"] != self.denominator:
            raise MismatchError(
                f"the state has denominator {ours['denominator']}, but this optimizer has {self.denominator}: it is fixed "
                "for a run"
            )
        self._noise.load_state_dict(ours)
        self.optimizer.load_state_dict(state)
        if self._checks is not None:
            self._checks.first = ours["first_learning_rates"]

    def add_param_group(self, param_group: Any) -> None:
        """Refused: the noise covers the parameters that the optimizer had when this was made."""
        raise ValueError("parameters cannot be added to a PrivateOptimizer: give all of them to the optimizer before")

    def close(self) -> None:
        """Closes the journal, so that another process may open it."""
        self._noise.close()

    def __getstate__(self) -> Any:
        raise TypeError("a PrivateOptimizer is not pickled or copied: keep its state_dict()")

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.optimizer!r},\n{self.mechanism!r})"
