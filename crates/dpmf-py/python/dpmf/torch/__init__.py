"""PyTorch: correlated noise on the clipped, summed gradient, before any torch.optim step.

    cohorts = dpmf.torch.Cohorts(len(dataset), batch_size=256)
    loader = DataLoader(dataset, batch_sampler=cohorts)
    mechanism = dpmf.mechanism(steps=len(cohorts), momentum=0.9, epsilon=3, delta=1e-5, clip=1.0)
    optimizer = dpmf.torch.PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), mechanism, denominator=256
    )
    for inputs, targets in optimizer.batches(loader):
        optimizer.accumulate(model, torch.nn.functional.cross_entropy, inputs, targets)
        optimizer.step()

The guarantee is for every record, and for data that takes part in one step: one pass over disjoint batches, which batches()
checks. For several epochs and for sampled batches, use a plan:

    plan = dpmf.plan(examples=len(dataset), batch=256, epochs=10, momentum=0.9, epsilon=3, delta=1e-5)
    batches = dpmf.torch.SampledBatches(plan.sampler(key), epochs=10)
    loader = DataLoader(dataset, batch_sampler=batches, collate_fn=dpmf.torch.EmptyCollate(dataset))
    optimizer = dpmf.torch.PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), plan.mechanism, key=key
    )
    for epoch in range(10):
        for inputs, targets in optimizer.batches(loader):
            …

dpmf.opacus does the same with the per-sample gradients of Opacus.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from .._requires import require

require("dpmf.torch", "torch")

import torch
from torch.utils.data import DataLoader

from .. import _optimizers
from .._checks import check_unit
from .._core import Mechanism, NoiseKey, PrivacyStatement, _Clip
from .._errors import BindingError, MismatchError
from .._remedies import remedies
from ._data import Batches, Cohorts, EmptyCollate, SampledBatches, UncheckedDataWarning, begin_pass, check_loader, hand_out
from ._ghost import Contributions, Ghost, UncheckedModelWarning
from ._gradients import Batch, PerExample, Seen, add_clipped
from ._masters import Masters
from ._run import FlatRun, check_unscaled, shard

__all__ = [
    "Cohorts",
    "EmptyCollate",
    "PrivateOptimizer",
    "SampledBatches",
    "Seen",
    "UncheckedDataWarning",
    "UncheckedModelWarning",
    "check_loader",
    "shard",
]

# As users know them, in messages too.
for _public in (Cohorts, EmptyCollate, SampledBatches, Seen, UncheckedDataWarning, UncheckedModelWarning):
    _public.__module__ = __name__


#: Bytes of gradients of examples up to which clipping="auto" makes them. A number for all machines, so that a run that is resumed on
#: another goes on in the same way.
MOST_ROWS = 512 << 20

#: What to do about what a run refuses.
REMEDIES = {
    "too-many": "add up several losses before you take the gradient, and pass several views of an example (augmentation) as one "
    "contribution, with views=… of dpmf.torch.PrivateOptimizer.accumulate",
    "no-batch": "take one step for each batch of optimizer.batches(loader), and accumulate each batch as it comes",
    "other-step": "take one step for each batch, as it comes; a new loop over optimizer.batches(loader) begins with the coming step",
    "not-sampled": "take batches from optimizer.batches(loader) with "
    'batch_sampler=dpmf.torch.SampledBatches(plan.sampler(key)), or plan with sampling="none"',
    "sampler-in-use": "make one with plan.sampler(key)",
    "nothing": "call accumulate(…) before step(). The gradients of loss.backward() are not used: they are a mean and not clipped, so "
    "no noise makes them private. Pass a sum of contributions that you clipped yourself to add_sum(…); add_sum({}, 0) releases noise "
    "alone",
    "no-denominator": "pass denominator=… or take batches from optimizer.batches(loader) with SampledBatches",
}


class _Checks:
    """Compares an optimizer with what its mechanism was planned for."""

    def __init__(self, mechanism: Mechanism, optimizer: torch.optim.Optimizer) -> None:
        self.mechanism, self.optimizer = mechanism, optimizer
        #: The learning rate of the first step, for every parameter group.
        self.first: list[float] | None = None
        for steps in _optimizers.of_optimizer(optimizer):
            self._check(steps)

    def _check(self, steps: _optimizers.Steps, first_rate: float | None = None) -> None:
        workload = self.mechanism.workload
        if not steps.linear and workload.momentum in (0.0, None):
            return  # planned for running sums, or for a matrix
        decay = steps.weight_decay if steps.linear else workload.weight_decay
        try:
            self.mechanism.check_optimizer(
                momentum=steps.momentum,
                nesterov=steps.nesterov,
                weight_decay=decay or 0.0,
                coupled=steps.coupled if steps.linear else bool(workload.coupled),
                learning_rates=None if first_rate is None or not steps.linear else [first_rate],
            )
        except MismatchError as other:
            if steps.linear:
                raise
            raise MismatchError(
                f"the optimizer is {steps.name}, planned for as momentum {steps.momentum}{' with nesterov' * steps.nesterov}, but "
                f"the mechanism was planned for {workload.momentum}{' with nesterov' * bool(workload.nesterov)}: plan with "
                "dpmf.plan(…, optimizer=optimizer), or pass check=False. The guarantee would hold, but the noise would not be the "
                "best"
            ) from other

    def step(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuses a step that differs from the plan, before any of its noise is drawn."""
        self.mechanism.check_steps(step + 1)
        rates = [float(group["lr"]) for group in groups]
        does = [_optimizers.of_group(self.optimizer, group) for group in groups]
        planned = self.mechanism.workload.learning_rates
        # Steps that were burned have left no learning rate: the first is what the plan makes of this one.
        factor = 1.0 if planned is None or planned[step] == 0.0 else float(planned[0] / planned[step])
        first = self.first or [rate * factor * self._corrected(one, step) for one, rate in zip(does, rates)]
        for one, rate, first_rate in zip(does, rates, first):
            self._check(one, first_rate)
            try:
                self.mechanism.check_learning_rate(step, rate * self._corrected(one, step), first_rate)
            except MismatchError:
                if one.linear:
                    raise
                # A plan for plain momentum, or for running sums, leaves the correction out.
                self.mechanism.check_learning_rate(step, rate, first_rate)
        self.first = first

    def _corrected(self, steps: _optimizers.Steps, step: int) -> float:
        """The size of a step beside its learning rate, relative to the first, where the plan may count on it."""
        planned = self.mechanism.workload.momentum not in (0.0, None)
        return steps.size(step) / steps.size(0) if planned else 1.0


class _Noisy:
    """What an optimizer reports about its noise."""

    _noise: FlatRun

    #: Lets torch.amp.GradScaler say that it scaled the gradients, which is refused.
    _step_supports_amp_scaling = True

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
        return self._noise.live().run

    @property
    def coordinates(self) -> range:
        """The coordinates of the flat parameters whose noise is drawn here."""
        return self._noise.coordinates


def _unprotected(losses: torch.Tensor, longer: torch.Tensor) -> torch.Tensor:
    """The sum of losses, and how many examples were longer than the clip."""
    return torch.stack((losses.detach().double().sum().to(longer.device), longer.sum().double()))


class PrivateOptimizer(_Noisy, torch.optim.Optimizer):
    """Adds the noise of a mechanism to the clipped, summed gradient, then lets a torch.optim optimizer step.

    optimizer is any of torch.optim. Its momentum, weight decay and learning rates are compared with the mechanism's workload in
    every step, because the noise is the best only for these. check=False skips this; the guarantee holds either way. For Adam and
    all others but SGD, use dpmf.plan(…, optimizer=optimizer), which plans for running sums.

    The noise of a step covers all parameters that optimizer holds, whether they are trained or not. A parameter that is frozen
    (requires_grad is False) in a step stays where it is and ignores its noise; you may unfreeze it later. Parameters that join
    the optimizer later are refused.

    Parameters in bfloat16 are trained through masters in float32, which replace them in the groups of optimizer. Clipped sums,
    noise and steps act on the masters, and after every step the parameters are set to the rounded masters. If you write into a
    parameter between two steps, its master takes the new values. state_dict() contains the masters.

    denominator is the planned batch size, by which the noisy sum is divided. It is fixed before training, and stays the same if a
    batch is smaller. With 1, the sum is not divided. You may leave it out for SampledBatches and for Cohorts of several epochs;
    it is then their mean size.

    If the guarantee relies on sampling, only batches from batches() are released, with a loader of SampledBatches of the
    mechanism's own sampling, each in the step that it was drawn for.

    key is the secret behind the noise, by default a new one that ends with the process. A run that is to be resumed needs
    a key file and a journal:

        key = dpmf.NoiseKey.create("run.key")           # NoiseKey.read("run.key") to resume
        optimizer = PrivateOptimizer(sgd, mechanism, denominator=256, key=key, journal="run.journal")
        optimizer.load_state_dict(torch.load("run.pt"))  # to resume

    After a crash, steps after the saved state are in the journal: they can be repeated with exactly the same gradients only
    (otherwise StepReusedError is raised), and burn() gives one up.

    experiment names a run whose noise is the same at every start, for experiments that release nothing; the key must be
    NoiseKey.from_seed(…). Without it, every start draws new noise, also from an old key.

    group is the torch.distributed process group, or True for the default one, whose ranks hold the whole model and
    accumulate gradients of disjoint parts of each cohort. Each rank draws the noise of its shard of coordinates only, and
    keeps buffers for it only; the noise is that of one process, bit for bit. Each rank needs the same key and a journal of
    its own. Where there are several ranks, group must be given.

    A step releases what accumulate() has summed since the last step, in memory of its own. The .grad of a backward() is not used,
    and is None after a step.

    arithmetic is "exact" or "float", and fixed for a run. With "exact", the sum is released with ideal noise, correctly rounded.
    With "float", noise is made in single precision, which is faster, but the guarantee does not cover the lowest bits of a
    release.

    ahead is the number of threads that make the noise of the coming step while its gradient is computed: by default half of the
    machine's, none for models of less than 32,768 parameters. 0 makes the noise in step().

    release_on says where the noise is added: on the "host", or on the "device" of each parameter, where sums then stay; by default
    the host for parameters in its memory, and the devices otherwise. Neither argument changes a bit of a release.

    Guarantee: one example, or one user, moves the sum by at most the clip, as real numbers, and the released steps satisfy
    the mechanism's statement, to the bit in exact arithmetic.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mechanism: Mechanism,
        *,
        denominator: float | None = None,
        key: NoiseKey | None = None,
        experiment: str | None = None,
        journal: str | os.PathLike[str] | None = None,
        group: Any = None,
        arithmetic: Literal["exact", "float"] = "exact",
        check: bool = True,
        release_on: Literal["host", "device"] | None = None,
        ahead: int | None = None,
    ) -> None:
        # No super().__init__(): what an optimizer holds is held by the one inside.
        self.optimizer = optimizer
        self.mechanism = mechanism
        self._checks = _Checks(mechanism, optimizer) if check else None
        self._masters = Masters(optimizer)
        try:
            self._noise = FlatRun(
                mechanism,
                optimizer,
                arithmetic=arithmetic,
                key=key,
                experiment=experiment,
                journal=journal,
                group=group,
                release_on=release_on,
                ahead=ahead,
            )
        except BaseException:
            self._masters.remove()
            raise
        for p, master in self._masters.pairs:
            self._noise.numbers[id(p)] = self._noise.numbers[id(master)]
        #: As it was given; the run has it once there is one.
        self._denominator = denominator
        if denominator is not None and self._noise.run is not None:
            self._noise.run.denominator = denominator
        #: The module that was clipped last without gradients of examples.
        self._ghost: Ghost | None = None
        #: Whether it was said that nothing shows who takes part.
        self._warned = False
        # The hooks of torch.optim.Optimizer.
        super().__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimizer inside, with the masters of parameters in bfloat16."""
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
    def denominator(self) -> float | None:
        """What the noisy sum is divided by: fixed with the first step."""
        return self._denominator if self._noise.run is None else self._noise.run.denominator

    @denominator.setter
    def denominator(self, value: float) -> None:
        self._noise.live().denominator = value

    @property
    def clip(self) -> float:
        """The norm to which every contribution is clipped."""
        return self._noise.norm

    def batches(self, loader: DataLoader[Any], *, batches_per_step: int = 1) -> Iterator[Any]:
        """The batches of a DataLoader. Checks that each example takes part in one step only, once in each planned epoch, or as
        the mechanism's sampler draws it.

        batches_per_step batches make one step: pass each to accumulate(), and call step() after the last of them. A step without
        a batch of its own is refused.

        With SampledBatches(…, epochs=K) and Cohorts(…, epochs=K), each call yields one epoch and begins where the run is, also
        after it was resumed. Otherwise a second call is refused, unless it continues an interrupted pass with Cohorts of the same
        order that start where the run is. state_dict() keeps what determines the order.

        Raises MismatchError, which says what to use instead.
        """
        noise = self._noise
        run = noise.live()
        if run.contributions is not None:
            raise ValueError("a cohort was begun by accumulate(): call step() or zero_grad() before new batches")
        if batches_per_step < 1:
            raise ValueError(f"batches_per_step is {batches_per_step}, but it must be at least 1")
        noise.check_ranks(loader.batch_sampler)
        with remedies(REMEDIES):
            batches = begin_pass(run, self.mechanism, loader, batches_per_step)
            noise.follow(batches)
        if run.denominator is None and batches is not None and batches.by_step:
            run.denominator = batches.expected_batch
        return hand_out(run, loader, batches_per_step)

    def accumulate(
        self,
        module: torch.nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        inputs: Any,
        targets: Any = None,
        *,
        grouped: bool = False,
        views: int = 1,
        chunk: int = 64,
        vectorize: bool = True,
        clipping: Literal["per-example", "ghost", "auto"] = "per-example",
    ) -> Seen:
        """Adds the sum of per-example gradients, each clipped to the mechanism's clip, to the next step.

        inputs are the arguments of the module: a tensor, a tuple of positional or a dict of keyword arguments. Inputs and
        targets may be nested; every tensor has one leading axis of examples. loss(outputs, targets) is called on batches
        of one example. May be called several times before a step, each time with other examples of the cohort.

        grouped says that every entry of the leading axis is the batch of one user, with all of the user's examples in
        this cohort along the second axis: the gradient of its loss is clipped as one. A mechanism planned with
        unit="user" needs it.

        views is the number of views of each example, for augmentation, in the order of torch.cat([first views, second views, …]).
        The loss of all views of an example, which loss(outputs, targets) must average, is clipped as one, so an example counts
        once. An example from batches() that comes more often is refused.

        An example whose gradient is not finite counts as zero. chunk examples are differentiated at once with vmap;
        vectorize=False differentiates them one by one, for modules that vmap does not support.

        clipping="ghost" does not compute per-example gradients. The module is called on chunk examples at once; norms and the
        clipped sum follow from the inputs of its layers and the gradients of their outputs. loss is still called on batches of
        one example (vectorize=False: one after the other), so the module must return outputs with an axis of examples, not a
        loss. Sums are computed in float64, and their possible rounding error is charged to the clip: Seen.charged is about 0.001
        % of it, and never more than 0.5 %. In the first step, some examples are compared with their gradients alone. A module
        that mixes examples is refused, and so is a parameter that is used outside its layer.

        clipping="auto" is "per-example" if the gradients of chunk examples take at most 512 MiB, or if grouped or views are
        given; otherwise it is "ghost". Seen.clipping says which.

        Cost: chunk arrays of the size of what is trained; with "ghost" the activations of chunk examples, the gradients of the
        outputs of trained layers, and 160 MB.
        """
        if clipping not in ("per-example", "ghost", "auto"):
            raise ValueError(f'clipping is {clipping!r}, but it must be "per-example", "ghost" or "auto"')
        # What torch.compile made runs the same module, whose layers are looked at.
        module = getattr(module, "_orig_mod", module)
        remedy = ", or pass the examples of each user together to accumulate(…, grouped=True)"
        check_unit(self.mechanism, "user" if grouped else "record", "" if grouped else remedy)
        noise = self._noise
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad and id(p) in noise.numbers}
        if not trained:
            raise ValueError("no parameter of the module is both in the optimizer and requires a gradient")
        for name, p in trained.items():
            noise.check_shape(name, p)
        if views < 1 or (views > 1 and grouped):
            raise ValueError(f"views is {views}, but it must be at least 1, and 1 where examples are grouped by user")
        if clipping == "auto":
            rows = 4 * chunk * sum(p.numel() for p in trained.values())
            clipping = "per-example" if grouped or views > 1 or rows <= MOST_ROWS else "ghost"
        if clipping == "ghost" and (grouped or views > 1):
            raise ValueError(
                f'clipping="ghost" clips every example by itself, but {"grouped is given" if grouped else f"views is {views}"}, and several '
                'entries are one contribution: leave clipping out'
            )
        batch = Batch(inputs, targets)
        if views > 1:
            batch = batch.views(views)
        run = noise.live()
        if run.order is None and self.mechanism.sampling == "none" and not self._warned:
            self._warned = True
            warnings.warn(
                "dpmf cannot check here that each example takes part in one step only, as the guarantee requires: take batches from "
                "optimizer.batches(loader)",
                UncheckedDataWarning,
                stacklevel=2,
            )
        chunks = (batch.chunk(first, chunk) for first in range(0, batch.length, chunk))
        if clipping == "ghost":
            ghost = Ghost(module, trained, sharded=noise.sharded)
            ghost.take_over(self._ghost)
            with ghost.opened():
                ghost.check(batch.parts, loss, vectorize=vectorize, chunk=chunk)
                self._ghost = ghost
                made = (ghost.contributions(parts, loss, vectorize=vectorize) for parts in chunks)
                return self._add_contributions(batch.length, trained, made)
        if noise.sharded and not vectorize:
            raise ValueError("vectorize=False goes through the module itself, whose parameters are cut over ranks: leave it out")
        gradients = PerExample(module, loss, trained, grouped=grouped or views > 1, sharded=noise.sharded)
        per_example = gradients.at_once if vectorize else gradients.one_by_one
        numbers = [noise.numbers[id(p)] for p in trained.values()]

        def add(made: tuple[list[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            rows, losses = made
            longer = add_clipped(*noise.parts(numbers, rows), run.clip, by_torch=noise.on_device)
            return _unprotected(losses, longer)

        return Seen.of(batch.length, self._add(batch.length, map(per_example, chunks), add))

    def _add(self, examples: int, made: Iterable[Any], add: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
        """Counts examples once the first of what is made is there, and adds all of it; nothing of it if that fails."""
        noise, seen, counted = self._noise, [], False
        try:
            for one in made:
                if not counted:
                    # Not before gradients can be had, so that nothing is lost where they cannot.
                    with remedies(REMEDIES):
                        noise.begin_adding(examples)
                    counted = True
                seen.append(add(one))
        except BaseException:
            if counted:
                noise.clear()
            raise
        if not counted:
            with remedies(REMEDIES):
                noise.begin_adding(examples)
        return seen

    def _add_contributions(self, examples: int, trained: Mapping[str, torch.Tensor], made: Iterable[Contributions]) -> Seen:
        """Adds what layers have kept of examples."""
        noise = self._noise
        numbers = {name: noise.numbers[id(p)] for name, p in trained.items()}
        charges = [0.0]

        def add(one: Contributions) -> torch.Tensor:
            charges.append(one.charge())
            longer = one.add(noise.live().clip, lambda name, first, values: noise.add_rows(numbers[name], first, values))
            return _unprotected(one.losses, longer)

        seen = self._add(examples, made, add)
        return Seen.of(examples, seen, "ghost", max(charges))

    def add_sum(self, sums: Mapping[torch.Tensor, torch.Tensor], examples: int) -> None:
        """Adds a sum of contributions that you clipped yourself, for each parameter, to the next step.

        The norm of each contribution, over all parameters together, must be at most the clip, as real numbers, and the sum must
        be theirs. dpmf cannot check this, but the guarantee relies on it. Missing parameters get zero; add_sum({}, 0) is for a
        batch without examples.

        The possible rounding error of the sum is charged: n = examples contributions, added in any order in the type of the
        tensor, move the sum by up to 1 + (n² + 3n)·u clips, so it is scaled down by this factor. u is 2⁻⁵³ for float64, which is
        0.00002 % for 40,000 examples, and 2⁻²⁴ for float32, 0.4 % for 256: sum in float64. A float32 tensor that was summed in
        float64 and then converted is charged like any other: pass the float64 sum itself.

        Raises ValueError for a sum that is longer than so many contributions allow, and if the charge is too large.
        """
        noise = self._noise
        if examples < 0:
            raise ValueError(f"examples is {examples}, but it must be at least 0")
        tensors = []
        unit = 2.0**-53
        for p, tensor in sums.items():
            if id(p) not in noise.numbers:
                raise ValueError(f"a sum is for a parameter of shape {tuple(p.shape)} that is not the optimizer's")
            if tensor.is_sparse:
                raise TypeError("a sum is sparse, and its zeros would show which rows were used: call .to_dense() first")
            if not tensor.is_floating_point():
                raise TypeError(f"a sum is {tensor.dtype}, but it must be of floating point: best float64")
            if tensor.shape != p.shape or not bool(tensor.isfinite().all()):
                raise ValueError(f"a sum for a parameter of shape {tuple(p.shape)} has another shape, or is not finite")
            unit = max(unit, torch.finfo(tensor.dtype).eps / 2)
            tensors.append((noise.numbers[id(p)], tensor.detach().double()))
        charged = _Clip.charge(examples, noise.dimension, unit)
        if charged > _Clip.most_charged:
            raise ValueError(
                f"a sum of {examples} contributions in this precision may be off by {100 * charged:.3g} % of the clip: add "
                f"them up in float64, at most {_Clip.most_contributions} a step"
            )
        norm = math.sqrt(sum(float(tensor.square().sum()) for _, tensor in tensors))
        longest = examples * self.clip * (1.0 + charged)
        if norm > longest:
            raise ValueError(
                f"the sum has norm {norm:.6g}, but that of {examples} contributions of norm at most {self.clip} has at most "
                f"{longest:.6g}: clip every contribution, and pass their number"
            )
        scale = (1.0 - charged) / noise.live().clip.unit
        with remedies(REMEDIES):
            noise.add([(number, (tensor * scale).round_().to(torch.int64)) for number, tensor in tensors], examples)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Adds the next row of noise to what was accumulated, divides by the denominator and steps."""
        if closure is not None:
            raise ValueError("a closure would use the data again within a step: call step() without one")
        check_unscaled(self)
        noise = self._noise
        run = noise.live()
        with remedies(REMEDIES):
            noise.check()
            if self._checks is not None:
                self._checks.step(run.next_step, self.param_groups)
            self._masters.follow()
            noise.release()
        assert run.denominator is not None
        noise.divide(run.denominator)
        noise.fill_gradients()
        try:
            self.optimizer.step()
        finally:
            self._masters.round()
            self.zero_grad()

    def burn(self) -> int:
        """Gives up the next step, whose gradients are lost: its noise is never used. Returns the step."""
        self.zero_grad()
        return self._noise.burn()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets what was accumulated since the last step, and every .grad."""
        self._noise.clear()
        for p in [*self._noise.parameters, *(p for p, _ in self._masters.pairs)]:
            p.grad = None if set_to_none or p.grad is None else torch.zeros_like(p)

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer inside and, under "dpmf", that of the noise, encrypted under the key, and the masters of parameters
        in bfloat16.

        Warns if there is no journal: the state can then be inspected, but not loaded.
        """
        self._call_hooks("state_dict_pre")
        # What was written into parameters since the last step is part of the state.
        self._masters.follow()
        state = dict(self.optimizer.state_dict())
        state["dpmf"] = {
            **self._noise.state_dict(),
            "first_learning_rates": self._checks and self._checks.first,
        }
        if self._masters.pairs:
            state["dpmf"]["masters"] = self._masters.state()
        hooked: dict[str, Any] = self._call_hooks("state_dict_post", state)
        return hooked

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a state, with the journal of its run. The model has the same bits as without the interruption."""
        state = dict(self._call_hooks("load_state_dict_pre", dict(state_dict)))
        ours = state.pop("dpmf", None)
        if ours is None:
            raise BindingError("the state has no entry dpmf: it is not that of a PrivateOptimizer")
        if self.denominator is not None and ours["denominator"] != self.denominator:
            raise MismatchError(
                f"the state has denominator {ours['denominator']}, but this optimizer has {self.denominator}: it is "
                "fixed for a run"
            )
        self._masters.check_state(ours)
        self._noise.load_state_dict(ours)
        self.optimizer.load_state_dict(state)
        self._masters.load_state(ours)
        if self._checks is not None:
            self._checks.first = ours["first_learning_rates"]
        self._call_hooks("load_state_dict_post")

    def _call_hooks(self, when: str, *state: dict[str, Any]) -> Any:
        """Calls the hooks of torch.optim.Optimizer, of which PyTorch 1 has none, and returns the state that they leave."""
        for hook in getattr(self, f"_optimizer_{when}_hooks", {}).values():
            made = hook(self, *state)
            if state and made is not None:
                state = (made,)
        return state[0] if state else None

    def add_param_group(self, param_group: Any) -> None:
        """Refused: the noise covers the parameters that the optimizer had when this was made."""
        raise ValueError("parameters cannot be added to a PrivateOptimizer: pass all of them to the optimizer before")

    def close(self) -> None:
        """Closes the journal, so that another process may open it."""
        self._noise.close()

    def __getstate__(self) -> Any:
        raise TypeError("a PrivateOptimizer cannot be pickled or copied: save its state_dict()")

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.optimizer!r},\n{self.mechanism!r})"
