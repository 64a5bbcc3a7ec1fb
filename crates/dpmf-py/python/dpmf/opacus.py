"""Opacus: its per-sample gradients, our noise and accounting.

    - from opacus import PrivacyEngine
    + from dpmf.opacus import PrivacyEngine

      engine = PrivacyEngine()
      model, optimizer, loader = engine.make_private_with_epsilon(
          module=model, optimizer=optimizer, data_loader=loader,
          target_epsilon=3, target_delta=1e-5, epochs=10, max_grad_norm=1.0,
      )
      for epoch in range(10):
          for inputs, targets in loader:
              …

The engine plans the mechanism and the sampling for your optimizer and all epochs, and reports its choice in one line; engine.plan
has the details. The data loader that it returns draws batches as planned; each loop over it is one epoch.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Literal

from ._requires import require

require("dpmf.opacus", "torch", "opacus")

import opacus
import torch
from opacus.accountants import IAccountant
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from . import _opacus_ghost as _ghosts
from . import torch as _torch
from ._announce import announced
from ._checks import check_experiment, check_unit, participation_of, statement_of
from ._core import Mechanism, NoiseKey, Plan, PrivateRun, Sampler, _planned_steps, new_run, poisson_epsilon
from ._errors import BindingError, MismatchError
from ._plan import NOISE_DECAY
from ._remedies import remedies
from .torch._data import Batches, StepLoader
from .torch._gradients import add_clipped, watch
from .torch._rows import UncheckedModelWarning, check_rows
from .torch._run import FlatRun, check_unscaled

__all__ = ["CorrelatedOptimizer", "MechanismAccountant", "PrivacyEngine", "UncheckedModelWarning"]

#: What to do about what a run refuses.
REMEDIES = {
    **_torch.REMEDIES,
    "no-batch": "train on the data loader that make_private returned, one step for each batch as it comes",
    "other-step": "take one step for each batch, as it comes; a new loop over the data loader begins with the coming step",
    "nothing": "call backward() on the loss of a batch before step()",
    "other-denominator": "leave expected_batch_size as make_private made it",
    "other-order": "resume with the data loader, key and seed that the run began with",
}


class MechanismAccountant(IAccountant):
    """Reports the guarantee of a mechanism, which is for the whole run and holds from the first step on."""

    def __init__(self, mechanism: Mechanism | None = None) -> None:
        self.of: Mechanism | None = mechanism
        #: The run whose steps these are.
        self.noise: FlatRun | None = None

    @property
    def steps(self) -> int:
        """Steps that were released or given up."""
        return 0 if self.noise is None or self.noise.run is None else self.noise.next_step

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Does nothing: the run counts its steps."""

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """ε at δ; 0 before the first step, when nothing was released."""
        if self.steps == 0:
            return 0.0
        if self.of is None:
            raise ValueError("the engine has no mechanism yet: call make_private first")
        statement = statement_of(self.of)
        if delta == statement.delta:
            return statement.epsilon
        # The curve of the mechanism, with whatever sampling it counts on.
        there = self.of.with_noise(
            statement.noise_multiplier,
            delta,
            statement.clip,
            unit=statement.unit,
            adjacency=statement.adjacency,
            accountant=statement.accountant,
        )
        return statement_of(there).epsilon

    def __len__(self) -> int:
        return self.steps

    @classmethod
    def mechanism(cls) -> str:
        """The name that Opacus asks for."""
        return "dpmf"

    def state_dict(self, destination: Any = None) -> Any:
        """Number of steps, and the hash of the mechanism."""
        state: MutableMapping[str, Any] = {} if destination is None else destination
        state["steps"] = self.steps
        state["mechanism"] = self.of and self.of.identity
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuses the state of another mechanism. The number of steps is that of the run."""
        if state_dict.get("mechanism") != (self.of and self.of.identity):
            raise BindingError(
                f"the accountant's state belongs to mechanism {state_dict.get('mechanism')}, but this is "
                f"{self.of and self.of.identity}"
            )


class CorrelatedOptimizer(_torch._Noisy, DPOptimizer):
    """Opacus' DPOptimizer with the noise of a mechanism instead of independent noise.

    The per-sample gradients are those of Opacus' hooks. They are clipped and summed in memory of its own, so that one
    sample moves the sum by at most the mechanism's clip, as real numbers, also under autocast; every .grad is replaced.
    Everything else about key, experiment, journal, arithmetic, check, frozen parameters and state_dict is as in
    dpmf.torch.PrivateOptimizer. expected_batch_size is the denominator. cohorts are those of the data loader: a step for
    which they have handed out no cohort is refused. A mechanism that relies on sampling needs SampledBatches of it.

    clips are those of the parameters, each clipped by itself, in place of one over all; the root of the sum of their squares is
    at most the mechanism's clip.
    """

    expected_batch_size: Any
    param_groups: Any

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mechanism: Mechanism,
        *,
        expected_batch_size: float | None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        key: NoiseKey | None = None,
        experiment: str | None = None,
        journal: str | os.PathLike[str] | None = None,
        arithmetic: Literal["exact", "float"] = "exact",
        check: bool = True,
        cohorts: _torch.Cohorts | _torch.SampledBatches | None = None,
        clips: Sequence[float] | None = None,
        _name: str | None = None,
    ) -> None:
        check_unit(mechanism, "record")
        statement = statement_of(mechanism)
        if isinstance(cohorts, _torch.SampledBatches):
            mechanism.check_sampling(cohorts.drawing.sampling)
        elif mechanism.sampling != "none":
            mechanism.check_sampling("epochs")
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        super().__init__(
            optimizer,
            noise_multiplier=statement.noise_multiplier,
            max_grad_norm=statement.clip,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
        )
        # Privacy would need other noise if these were changed by a scheduler of Opacus, so they are compared at each step.
        self._as_planned = (self.noise_multiplier, self.max_grad_norm)
        self.mechanism = mechanism
        self._checks = _torch._Checks(mechanism, optimizer) if check else None
        self._noise = FlatRun(
            mechanism,
            optimizer,
            arithmetic=arithmetic,
            key=key,
            experiment=experiment,
            journal=journal,
            group=None,
            name=_name,
        )
        #: Whether what examples add comes by backward() of a wrapped criterion, and whether it has since the last step.
        self._by_ghosts = self._added = False
        self._numbers: dict[str, int] = {}
        self._clips = None if clips is None else _checked_clips(clips, statement.clip, self._noise.parameters)
        self._cohorts: Batches | None = cohorts
        #: Whether the cohorts were made for this run, whose state then says where they go on.
        self._own_cohorts = False
        if cohorts is not None:
            self._follow(cohorts)
        # The hooks of torch.optim.Optimizer.
        super().__setstate__({})

    def _follow(self, cohorts: Batches) -> None:
        """Takes the batches of cohorts, every loop over which begins where this run is."""
        cohorts.heard = self._hand_out
        if cohorts.by_step:
            cohorts.place = self._begin_loop
        if self._noise.run is not None:
            with remedies(REMEDIES):
                self._noise.follow(cohorts)

    def _hand_out(self, step: int, members: int | None) -> None:
        self._noise.live().hand_out(step, members)

    def _begin_loop(self) -> int:
        """Forgets a batch that was begun in parts, of which the loop gives all again; returns the step to begin with."""
        self._noise.clear()
        self._step_skip_queue.clear()
        self._is_last_step_skipped = False
        return self.next_step

    def add_contributions(self, examples: int, made: Any) -> None:
        """Clips what examples add to the gradients, with ghost clipping, and adds it to the coming step."""
        noise = self._noise
        if self._added:
            raise ValueError(
                "backward() was called several times since the last step() or zero_grad(), and an example that came twice would count twice: "
                "call zero_grad() before the backward() of each batch, and split large batches with Opacus' BatchMemoryManager"
            )
        if made is not None:
            made.charge()  # refuses before anything is counted
        with remedies(REMEDIES):
            noise.begin_adding(examples)
        self._added = True
        if made is None:
            return
        numbers = self._numbers
        try:
            made.add(noise.live().clip, lambda name, first, values: noise.add_rows(numbers[name], first, values))
        except BaseException:
            noise.clear()
            raise

    @property
    def accumulated_iterations(self) -> int:
        """The number of backward() that wait for a step, as Opacus' own accountants ask for it."""
        found: int = 1 if self._by_ghosts else super().accumulated_iterations
        return found

    def _trained(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The parameters of a module that a step would move, by name."""
        noise = self._noise
        found: dict[str, torch.Tensor] = {
            name: p for name, p in module.named_parameters() if p.requires_grad and id(p) in noise.numbers
        }
        self._numbers = {name: noise.numbers[id(p)] for name, p in found.items()}
        return found

    def clip_and_accumulate(self) -> None:
        """Clips the per-sample gradients of the last backward() and adds them to the coming step."""
        noise = self._noise
        if self._by_ghosts:
            if not self._added:
                raise ValueError(
                    "backward() was not called since the last step() or zero_grad(): call criterion(model(inputs), targets).backward(), with the "
                    "criterion that make_private returned"
                )
            self._added = False
            return
        rows = {}
        for number, p in enumerate(noise.parameters):
            if not p.requires_grad:
                continue
            row = getattr(p, "grad_sample", None)
            if row is None:
                raise ValueError(
                    f"parameter {number} is trained, but has no per-sample gradient: it was frozen when the engine made "
                    "the module private, or the loss does not depend on it. Freeze parameters that are not trained with "
                    "requires_grad_(False); parameters that are trained later must be trainable in make_private"
                )
            if isinstance(row, list):
                raise ValueError(
                    "backward() was called several times since the last zero_grad(), and an example that came twice "
                    "would count twice: call zero_grad() before the backward() of each batch, and split large batches with "
                    "Opacus' BatchMemoryManager"
                )
            if row.shape[1:] != p.shape:
                raise ValueError(
                    f"parameter {number} has shape {tuple(p.shape)}, but Opacus' hooks made gradients of shape {tuple(row.shape[1:])} for "
                    "each sample: they do not know how the module uses it. Train with dpmf.torch, whose accumulate(…) differentiates "
                    "the module itself"
                )
            if getattr(row, "_processed", False):
                raise ValueError("these gradients were released by the last step: call optimizer.zero_grad() between steps")
            rows[number] = row
        count = len(next(iter(rows.values())))
        clips = None if self._clips is None else [self._clips[number] for number in rows]
        with remedies(REMEDIES):
            noise.begin_adding(count)
        try:
            add_clipped(*noise.parts(rows, rows.values()), noise.live().clip, clips, by_torch=noise.on_device)
        except BaseException:
            noise.clear()
            raise
        for row in rows.values():
            row._processed = True

    def add_noise(self) -> None:
        """Adds the next row of noise to the summed gradients and puts them, or their mean, into .grad."""
        if (self.noise_multiplier, self.max_grad_norm) != self._as_planned:
            raise MismatchError(
                "noise_multiplier or max_grad_norm has changed since the mechanism was planned: "
                "schedulers of noise or clip cannot be combined with correlated noise"
            )
        noise = self._noise
        run = noise.live()
        with remedies(REMEDIES):
            # A sum needs no denominator; the run then divides by nothing.
            denominator = run.denominator = 1.0 if self.expected_batch_size is None else float(self.expected_batch_size)
            noise.check()
            if self._checks is not None:
                self._checks.step(run.next_step, self.param_groups)
            noise.release()
        if self.loss_reduction == "mean":
            noise.divide(denominator)
        noise.fill_gradients()

    def pre_step(self, closure: Any = None) -> bool:
        """Clips and adds noise; False if more parts of the batch are to come."""
        if not any(p.requires_grad for p in self._noise.parameters):
            raise ValueError("all parameters are frozen: there is no step to take")
        check_unscaled(self)
        self.clip_and_accumulate()
        self._is_last_step_skipped = self._check_skip_next_step()
        if self._is_last_step_skipped:
            return False
        self.add_noise()
        if self.step_hook:
            self.step_hook(self)
        return True

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Forgets the per-sample gradients and every .grad and, unless the last step was put off, what was accumulated."""
        for p in self._noise.parameters:
            p.grad_sample = None  # type: ignore[attr-defined]
        self._added = False
        if not self._is_last_step_skipped:
            self._noise.clear()
        self.original_optimizer.zero_grad(set_to_none)

    def burn(self) -> int:
        """Gives up the next step, whose gradients are lost: its noise is never used. Returns the step."""
        self._is_last_step_skipped = False
        self.zero_grad()
        return self._noise.burn()

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer inside and, under "dpmf", that of the noise, encrypted under the key."""
        state = dict(self.original_optimizer.state_dict())
        state["dpmf"] = {
            **self._noise.state_dict(),
            "first_learning_rates": self._checks and self._checks.first,
        }
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a state, with the journal of its run. The next loop over the data loader of make_private yields the rest
        of the epoch, and the model has the same bits as without the interruption."""
        state = dict(state_dict)
        ours = state.pop("dpmf", None)
        if ours is None:
            raise BindingError("the state has no entry dpmf: it is not that of a CorrelatedOptimizer")
        self._noise.load_state_dict(ours)
        self._resume_cohorts(ours.get("data"))
        if self.expected_batch_size is not None and self._noise.live().denominator is not None:
            # A run keeps the one that it began with, whatever made its batches then.
            self.expected_batch_size = self._noise.live().denominator
        self.original_optimizer.load_state_dict(state)
        # The optimizer inside has new groups and state; DPOptimizer keeps references to the old.
        self.param_groups = self.original_optimizer.param_groups
        self.state = self.original_optimizer.state
        if self._checks is not None:
            self._checks.first = ours["first_learning_rates"]

    def _resume_cohorts(self, order: Mapping[str, Any] | None) -> None:
        """Continues the batches where the run is, in the order in which it began."""
        cohorts = self._cohorts
        if cohorts is None:
            return
        if isinstance(cohorts, _torch.Cohorts) and self._own_cohorts and order is not None:
            cohorts.seed = order["seed"]
            cohorts.start = self.next_step
        try:
            with remedies(REMEDIES):
                self._noise.follow(cohorts)
        except MismatchError:
            self.close()
            raise
        if self._own_cohorts or cohorts.by_step:
            cohorts.go_to(self.next_step)

    def close(self) -> None:
        """Closes the journal, so that another process may open it."""
        self._noise.close()

    def __getstate__(self) -> Any:
        raise TypeError("a CorrelatedOptimizer cannot be pickled or copied: save its state_dict()")


def _checked_clips(clips: Sequence[float], clip: float, parameters: Sequence[torch.Tensor]) -> list[float]:
    """Clips for all parameters; those that are frozen have none of their own and may be left out."""
    trained = [number for number, p in enumerate(parameters) if p.requires_grad]
    if len(clips) not in (len(parameters), len(trained)):
        raise ValueError(
            f"there are {len(clips)} clips for {len(trained)} parameters that are trained: per-layer clipping needs one for each"
        )
    if not all(0.0 < one < math.inf for one in clips):
        raise ValueError(f"the clips are {list(clips)}, but each must be positive and finite")
    if _joint_clip(clips) > clip:
        raise ValueError(
            f"the clips {list(clips)} allow a norm of {_joint_clip(clips)} together, but the mechanism was planned for {clip}"
        )
    if len(clips) == len(parameters):
        return [float(one) for one in clips]
    # A parameter that is thawed later has no clip, and nothing of it would count.
    given = dict(zip(trained, clips))
    return [float(given.get(number, 0.0)) for number in range(len(parameters))]


def _joint_clip(clips: Sequence[float]) -> float:
    """A norm that contributions within clips have together, rounded up: the sum and its root are off by less than 2⁻⁵⁰."""
    return math.sqrt(math.fsum(one * one for one in clips)) * (1.0 + 2.0**-50)


#: Arguments of Opacus that say how its own accountants compute, which are not asked.
_OF_ACCOUNTANTS = {"alphas", "eps_error", "delta_error", "epsilon_tolerance"}

#: Arguments that have a place of their own.
_OF_ENGINE = (
    "module optimizer data_loader mechanism noise_multiplier max_grad_norm epochs target_epsilon target_delta schedule poisson_sampling "
    "clipping"
).split()

#: What to do instead of arguments of Opacus that do not go with correlated noise.
_INSTEAD = {
    "noise_generator": "the noise always comes from a cryptographic generator with a key: pass PrivacyEngine(key=…)",
    "normalize_clipping": "gradients are clipped to max_grad_norm, and the noise is planned for this norm: divide the learning rate by max_grad_norm instead",
    "total_steps": "pass epochs: the loader determines the steps of each",
}


class PrivacyEngine(opacus.PrivacyEngine):
    """Opacus' engine with correlated noise, planned sampling, and the mechanism's own accounting.

    key, experiment, journal and arithmetic are as in dpmf.torch.PrivateOptimizer. seed fixes the order of data that is not
    sampled. By default it comes from the operating system, and a resumed run takes it from the state. noise_decay is as in
    dpmf.plan, and 0.03 by default, which helps training, most of all at small ε.

    accountant and secure_mode are accepted and change nothing: ε is that of the mechanism, for the whole run, and the noise
    always comes from a cryptographic generator.
    """

    def __init__(
        self,
        *,
        key: NoiseKey | None = None,
        experiment: str | None = None,
        journal: str | os.PathLike[str] | None = None,
        arithmetic: Literal["exact", "float"] = "exact",
        seed: int | None = None,
        noise_decay: float = NOISE_DECAY,
        secure_mode: bool = True,
        accountant: Literal["prv", "rdp", "gdp"] | None = None,
        pull: float | None = None,
    ) -> None:
        if accountant not in (None, "prv", "rdp", "gdp"):
            raise ValueError(
                f"accountant is {accountant!r}, but it must be one that Opacus knows: prv, rdp or gdp. The mechanism's own accounting "
                "replaces it"
            )
        with warnings.catch_warnings():
            # Opacus warns of its own generator of noise, which is not used.
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            super().__init__(accountant="rdp")
        self.accountant = MechanismAccountant()
        self._key, self._experiment, self._journal, self._seed = key, experiment, journal, seed
        # pull is the old name.
        self._arithmetic, self._noise_decay = arithmetic, noise_decay if pull is None else pull
        #: The plan that make_private_with_epsilon made, or that make_private was given.
        self.plan: Plan | None = None

    @property
    def mechanism(self) -> Mechanism | None:
        """The mechanism in use; None before make_private."""
        return self.accountant.of

    def make_private_with_epsilon(
        self,
        *,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int = 1,
        max_grad_norm: float | Sequence[float],
        schedule: Any = "constant",
        poisson_sampling: bool = True,
        clipping: Literal["flat", "per_layer"] = "flat",
        **other: Any,
    ) -> Any:
        """Plans the mechanism and the sampling for the optimizer and all epochs, and applies them.

        schedule describes how the learning rate will change, as in dpmf.plan: text, a scheduler, or the learning rates of all
        steps. Adam and all other optimizers but SGD are planned for as running sums.

        Returns module, optimizer and data loader; with grad_sample_mode="ghost", it returns module, optimizer, criterion and data
        loader, as Opacus does. Then call criterion(model(inputs), targets).backward().

        With poisson_sampling=True, the plan may rely on secret sampling, of the kind with the least error. With False, it relies
        on none: the data is shuffled once and cut into batches, which come in the same order in every epoch.
        """
        clip, _ = _clips_of(max_grad_norm, clipping)
        self._check_unused()
        length, batch_size = self._size_of(data_loader)
        _check_other(other)
        self.plan = announced(
            examples=length,
            batch=_batch_for(length, len(data_loader), batch_size),
            epochs=epochs,
            epsilon=target_epsilon,
            delta=target_delta,
            clip=clip,
            optimizer=optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
            schedule=schedule,
            sampling="auto" if poisson_sampling else "none",
            noise_decay=self._noise_decay,
            unit="record",
        )
        return self._make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            mechanism=self.plan.mechanism,
            epochs=epochs,
            max_grad_norm=max_grad_norm,
            clipping=clipping,
            **other,
        )

    def make_private(
        self,
        *,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        mechanism: Mechanism | Plan | None = None,
        noise_multiplier: float | None = None,
        max_grad_norm: float | Sequence[float] | None = None,
        epochs: int | None = None,
        target_delta: float | None = None,
        schedule: Any = "constant",
        poisson_sampling: bool | None = None,
        clipping: Literal["flat", "per_layer"] = "flat",
        **other: Any,
    ) -> Any:
        """Returns the module with per-sample gradients, the optimizer with correlated noise, and a data loader that fits the mechanism.

        mechanism is a dpmf.Plan, its mechanism, or a mechanism that was saved from it.

        grad_sample_mode="ghost" and criterion are as in make_private_with_epsilon.

        noise_multiplier is the independent noise that each step of DP-SGD would have. With epochs and target_delta, this gives an
        ε, and the plan is for the same ε.
        """
        if mechanism is None and noise_multiplier is None:
            raise ValueError("mechanism is missing: pass mechanism=dpmf.plan(…), or use make_private_with_epsilon, which plans")
        if mechanism is None:
            assert noise_multiplier is not None
            if max_grad_norm is None:
                raise ValueError("max_grad_norm is missing: the noise is proportional to it")
            if epochs is None or target_delta is None:
                raise ValueError(
                    f"noise_multiplier={noise_multiplier} says how much independent noise a step has, but correlated noise is "
                    "planned for a whole run: call make_private_with_epsilon(…, target_epsilon=…, target_delta=…, epochs=…), or add "
                    "epochs=… and target_delta=… here, which plans for the ε that DP-SGD has with this noise_multiplier"
                )
            per_epoch = len(data_loader)
            epsilon, _ = poisson_epsilon(noise_multiplier, 1 / per_epoch, per_epoch * epochs, target_delta)
            return self.make_private_with_epsilon(
                module=module,
                optimizer=optimizer,
                data_loader=data_loader,
                target_epsilon=epsilon,
                target_delta=target_delta,
                epochs=epochs,
                max_grad_norm=max_grad_norm,
                schedule=schedule,
                poisson_sampling=poisson_sampling is not False,
                clipping=clipping,
                **other,
            )
        if noise_multiplier is not None or target_delta is not None:
            raise ValueError(
                "a mechanism has its own noise and delta: remove noise_multiplier and target_delta, or plan again"
            )
        if isinstance(mechanism, Plan):
            self.plan, mechanism = mechanism, mechanism.mechanism
        if poisson_sampling and mechanism.sampling == "none":
            mechanism.check_sampling("poisson")
        if poisson_sampling is False and mechanism.sampling != "none":
            mechanism.check_sampling("epochs")
        return self._make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            mechanism=mechanism,
            epochs=epochs,
            max_grad_norm=max_grad_norm,
            clipping=clipping,
            **other,
        )

    def _make_private(
        self,
        *,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        mechanism: Mechanism,
        epochs: int | None,
        max_grad_norm: float | Sequence[float] | None,
        clipping: Literal["flat", "per_layer"],
        batch_first: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        grad_sample_mode: Literal["hooks", "functorch", "ghost"] = "hooks",
        criterion: Any = None,
        wrap_model: bool = True,
        check: bool = True,
        **other: Any,
    ) -> Any:
        _check_other(other)
        statement = statement_of(mechanism)
        clip, clips = (statement.clip, None) if max_grad_norm is None else _clips_of(max_grad_norm, clipping)
        if max_grad_norm is None and clipping != "flat":
            raise ValueError(f"clipping is {clipping!r} without max_grad_norm: pass one clip for each parameter, or use flat clipping")
        if clip != statement.clip:
            raise ValueError(
                f"max_grad_norm is {clip}, but the mechanism was planned for {statement.clip}: remove it, or plan again"
            )
        if grad_sample_mode not in ("hooks", "functorch", "ghost"):
            raise ValueError(f"grad_sample_mode is {grad_sample_mode!r}, but it must be hooks, functorch or ghost")
        ghost = grad_sample_mode == "ghost"
        if criterion is not None and not ghost:
            raise ValueError('only grad_sample_mode="ghost" wraps a criterion: remove criterion')
        if ghost and (not batch_first or clipping != "flat" or isinstance(module, AbstractGradSampleModule) or not wrap_model):
            raise ValueError(
                'grad_sample_mode="ghost" wraps a module that is not wrapped yet (wrap_model=True), with examples along the first axis '
                '(batch_first=True) and one clip over all parameters (clipping="flat")'
            )
        if ghost and _ghosts.OpacusCriterion is object:
            raise ValueError('grad_sample_mode="ghost" needs Opacus 1.5 or newer: update it, or leave grad_sample_mode out')
        self._check_unused()
        if not wrap_model:
            _hooks_of_opacus()
            if isinstance(module, AbstractGradSampleModule):
                raise ValueError("wrap_model is False, but the module is wrapped in a GradSampleModule: pass the module inside")
        of_module = set(module.parameters())
        if any(p not in of_module for group in optimizer.param_groups for p in group["params"]):
            raise ValueError("the optimizer has parameters that are not the module's")
        check_unit(mechanism, "record")

        ModuleValidator.validate(module, strict=True)
        key, name = self._key_and_name()
        loader, own = self._loader(data_loader, mechanism, epochs, key, name)
        batches: Any = loader.batch_sampler
        # Batches that are made here have the denominator that Opacus gives its own.
        of_opacus = max(len(data_loader.dataset) // batches.per_epoch, 1)  # type: ignore[arg-type]
        private = CorrelatedOptimizer(
            optimizer,
            mechanism,
            expected_batch_size=of_opacus if own else batches.expected_batch,
            loss_reduction=loss_reduction,
            key=key,
            experiment=self._experiment,
            journal=self._journal,
            arithmetic=self._arithmetic,
            check=check,
            cohorts=batches,
            clips=clips,
            _name=name,
        )
        private._own_cohorts = own
        # After all checks: Opacus leaves hooks in the module.
        hooks: Any = module
        if ghost:
            hooks = _ghosts.GhostModule(module, private._trained, loss_reduction)
        elif not isinstance(module, AbstractGradSampleModule):
            hooks = (GradSampleModule if wrap_model else _hooks_of_opacus())(
                module,
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                force_functorch=grad_sample_mode == "functorch",
            )
        if not ghost:
            watch(hooks if wrap_model else module)
            check_rows(hooks if wrap_model else _Hooked(hooks), batch_first=batch_first, mean=loss_reduction == "mean")
        self.accountant.of, self.accountant.noise = mechanism, private._noise
        private.attach_step_hook(self.accountant.get_optimizer_hook_fn(sample_rate=1 / max(len(loader), 1)))
        if ghost:
            private._by_ghosts = True
            criterion = torch.nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion
            return hooks, private, _ghosts.GhostCriterion(hooks, private, criterion, loss_reduction), loader
        return hooks, private, loader

    def _key_and_name(self) -> tuple[NoiseKey | None, str]:
        """The key of the run, unless it lacks one, and its name: that of its journal, where it was begun."""
        check_experiment(self._key, self._experiment)
        begun = self._journal is not None and os.path.exists(self._journal)
        name = PrivateRun.of_journal(self._journal) if begun else new_run()  # type: ignore[arg-type]
        key = NoiseKey.generate() if self._key is None and self._journal is None else self._key
        return key, name if self._experiment is None else self._experiment

    def _check_unused(self) -> None:
        if self.accountant.of is not None:
            raise ValueError("this engine has already made a run private: a new run needs a new engine with a new key")

    def _size_of(self, data_loader: DataLoader[Any]) -> tuple[int, int]:
        """Number of examples and batch size of a loader whose order dpmf may choose."""
        if isinstance(data_loader.batch_sampler, Batches):
            raise MismatchError(
                f"the data loader has {type(data_loader.batch_sampler).__name__}, but the plan decides how to draw: pass a loader "
                "with a batch_size, or make_private(…, mechanism=plan)"
            )
        if isinstance(data_loader.dataset, IterableDataset):
            raise MismatchError(
                "the data set is an IterableDataset, so nothing can be drawn from it: pass a data set with a length"
            )
        if data_loader.batch_size is None:
            raise MismatchError(
                "the data loader has a batch sampler of its own, but the plan decides how to draw: set a batch_size and no sampler"
            )
        sampler = data_loader.sampler
        length = len(data_loader.dataset)  # type: ignore[arg-type]
        everything = type(sampler) is SequentialSampler or (
            type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length
        )
        if not everything:
            raise MismatchError(
                f"the data loader has a {type(sampler).__name__}, but the plan decides how to draw, from all of the data: pass the part to "
                "train on as a torch.utils.data.Subset, with a batch_size and no sampler"
            )
        return length, min(data_loader.batch_size, length)

    def _loader(
        self, data_loader: DataLoader[Any], mechanism: Mechanism, epochs: int | None, key: NoiseKey | None, name: str
    ) -> tuple[DataLoader[Any], bool]:
        """The data as the mechanism counts on it, and whether the batches are made here, drawn by the key and name of the run."""
        batches: Any = data_loader.batch_sampler
        several = mechanism.participation.startswith("epochs:")
        if isinstance(batches, Batches):
            _torch.check_loader(mechanism, data_loader)
            return self._rebuilt(data_loader, batches), False
        if mechanism.sampling == "none" and not several:
            return self._single_pass(data_loader, mechanism, 1 if epochs is None else epochs), True
        length, batch_size = self._size_of(data_loader)
        times = participation_of(mechanism)[1] if several else 1
        if mechanism.sampling.startswith("reshuffled-bins:"):
            # Its participation tells no epochs: a unit may take part in any two steps of neighbouring ones.
            several, times = True, mechanism.steps // int(mechanism.sampling.partition(":")[2])
        if mechanism.sampling == "none":
            per_epoch = mechanism.steps // times
            if per_epoch not in (len(data_loader), round(length / batch_size)):
                raise MismatchError(
                    f"the data loader has {len(data_loader)} batches, but the mechanism was planned for {per_epoch} per epoch: give it that "
                    "batch_size, or plan for this one"
                )
            batches = _torch.Cohorts(length, _batch_for(length, per_epoch, batch_size), epochs=times, seed=self._seed)
        else:
            if key is None:
                raise ValueError("a run with a journal needs its key: PrivacyEngine(key=NoiseKey.create(path), journal=…)")
            sampler = Sampler(mechanism.sampling, key, units=length, steps=mechanism.steps, run=name)
            times = times if several else 1 if epochs is None else epochs
            batches = _torch.SampledBatches(sampler, epochs=times)
            if round(length / sampler.expected_batch) not in (len(data_loader), round(length / batch_size)):
                raise MismatchError(
                    f"the data loader has batches of {batch_size}, but the mechanism draws {sampler.expected_batch:.1f} examples a "
                    "step on average: give it that batch_size, or plan for this one"
                )
        if epochs is not None and epochs != times:
            raise MismatchError(f"epochs is {epochs}, but the mechanism was planned for {times}: plan with epochs={epochs}")
        rebuilt = self._rebuilt(data_loader, batches)
        _torch.check_loader(mechanism, rebuilt)
        return rebuilt, True

    def _single_pass(self, data_loader: DataLoader[Any], mechanism: Mechanism, epochs: int) -> DataLoader[Any]:
        _torch.check_loader(mechanism, data_loader, epochs=epochs)
        if data_loader.batch_size is None:
            raise MismatchError(
                "the data loader has a batch sampler of its own: use dpmf.torch.Cohorts, or a batch_size and no sampler"
            )
        cohorts = _torch.Cohorts(
            len(data_loader.dataset),  # type: ignore[arg-type]
            data_loader.batch_size,
            seed=self._seed,
            drop_last=data_loader.drop_last,
        )
        if len(cohorts) != len(data_loader):
            raise MismatchError(
                f"the data loader has {len(data_loader)} batches, but all of the data makes {len(cohorts)}: pass the "
                "part to train on as a torch.utils.data.Subset, without a sampler"
            )
        return self._rebuilt(data_loader, cohorts)

    @staticmethod
    def _rebuilt(data_loader: DataLoader[Any], batches: Batches) -> DataLoader[Any]:
        if not getattr(data_loader, "in_order", True):
            raise MismatchError("in_order is False, so dpmf cannot tell which batch a step has: remove it from the data loader")
        collate = data_loader.collate_fn
        if batches.by_step and not isinstance(collate, _torch.EmptyCollate):
            collate = _torch.EmptyCollate(data_loader.dataset, collate)
        batches.workers = data_loader.num_workers
        return StepLoader(
            data_loader.dataset,
            batch_sampler=batches,
            num_workers=data_loader.num_workers,
            collate_fn=collate,
            pin_memory=data_loader.pin_memory,
            timeout=data_loader.timeout,
            worker_init_fn=data_loader.worker_init_fn,
            multiprocessing_context=data_loader.multiprocessing_context,
            generator=data_loader.generator,
            prefetch_factor=data_loader.prefetch_factor,
            persistent_workers=data_loader.persistent_workers,
        )


def _clips_of(max_grad_norm: float | Sequence[float], clipping: Literal["flat", "per_layer"]) -> tuple[float, list[float] | None]:
    """The clip over all parameters and, for per-layer clipping, those of each."""
    several = not isinstance(max_grad_norm, (int, float))
    if clipping == "per_layer" and several:
        clips = [float(one) for one in max_grad_norm]  # type: ignore[union-attr]
        return _joint_clip(clips), clips
    if clipping == "flat" and not several:
        return float(max_grad_norm), None  # type: ignore[arg-type]
    if clipping in ("flat", "per_layer"):
        raise ValueError(
            f"clipping is {clipping!r} and max_grad_norm {max_grad_norm}: flat clipping needs one norm for all parameters, and "
            "per_layer a list with one for each"
        )
    raise ValueError(
        f"clipping is {clipping!r}, but noise is planned for a clip that is fixed for the run: use flat or per_layer"
    )


#: What is handled by name, and arguments of Opacus that may be there while they are off.
_KNOWN = {"batch_first", "loss_reduction", "grad_sample_mode", "criterion", "wrap_model", "check"} | _OF_ACCOUNTANTS
_OFF = {"noise_multiplier", "rand_on_empty", *_INSTEAD}


def _check_other(other: Mapping[str, Any]) -> None:
    """Refuses unknown arguments, and those that would change the run; arguments that are off, or only about accountants, change
    nothing."""
    for name, value in other.items():
        if name in _KNOWN:
            continue
        if name not in _OFF:
            near = difflib.get_close_matches(name, [*_KNOWN, *_OFF, *_OF_ENGINE], 1)
            raise ValueError(f"{name} is not an argument of the engine" + (f": did you mean {near[0]}?" if near else ": leave it out"))
        if value is None or value is False:
            continue
        raise ValueError(f"{name} is given, but {_INSTEAD.get(name, 'it has no meaning with correlated noise: remove it')}")


def _batch_for(length: int, per_epoch: int, batch_size: int) -> int:
    """The batch whose plan has as many steps an epoch as Opacus' own loader; where there is none, that of the loader.

    A plan rounds the number of examples over the batch, and Opacus takes the length of the loader.
    """
    for batch in (batch_size, round(length / per_epoch), length // per_epoch, -(-length // per_epoch)):
        if 1 <= batch <= length and _planned_steps(length, batch, 1) == per_epoch:
            return batch
    return batch_size


def _hooks_of_opacus() -> Any:
    """Hooks without a module around, which Opacus has since 1.6."""
    try:
        return importlib.import_module("opacus.grad_sample.grad_sample_module").GradSampleHooks
    except AttributeError:
        raise ValueError(f"wrap_model is False, which needs Opacus 1.6 or newer, and this is {opacus.__version__}") from None


class _Hooked:
    """Hooks and the module that they are on, as one."""

    def __init__(self, hooks: Any) -> None:
        self._hooks = hooks

    def __getattr__(self, name: str) -> Any:
        hooks = vars(self)["_hooks"]
        return getattr(hooks if hasattr(hooks, name) else hooks._module, name)
