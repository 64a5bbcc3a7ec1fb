"""Opacus: its per-sample gradients and clipping, our noise and accounting.

    - from opacus import PrivacyEngine
    + from dpmf.opacus import PrivacyEngine

      engine = PrivacyEngine()
      model, optimizer, loader = engine.make_private_with_epsilon(
          module=model, optimizer=optimizer, data_loader=loader,
          target_epsilon=3, target_delta=1e-5, epochs=1, max_grad_norm=1.0,
      )

The engine plans the mechanism from the optimizer that it is given. The data loader that it returns goes once through the
data, in cohorts that are fixed before training; there is no Poisson sampling, and nothing is gained from sampling. A dpmf.Plan
gains from it: give make_private its mechanism, and a loader with dpmf.torch.SampledBatches(plan.sampler(key)).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

try:
    import opacus
except ModuleNotFoundError as missing:
    raise ImportError("dpmf.opacus needs Opacus: pip install 'dpmf[opacus]'") from missing
import torch
from opacus.accountants import IAccountant
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch.utils.data import DataLoader

from . import torch as _torch
from ._checks import check_unit, statement_of
from ._core import Mechanism, NoiseKey
from ._errors import BindingError, MismatchError
from ._plan import plan
from ._torch_gradients import clipped_sum
from ._torch_noise import FlatNoise

__all__ = ["CorrelatedOptimizer", "MechanismAccountant", "PrivacyEngine"]

class MechanismAccountant(IAccountant):
    """Answers with the guarantee of a mechanism, which is for the whole run and holds from its first step on."""

    def __init__(self, mechanism: Mechanism | None = None) -> None:
        self.of: Mechanism | None = mechanism
        self.steps = 0

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Counts a step; both arguments are as planned."""
        self.steps += 1

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
        """Refuses the state of another mechanism."""
        if state_dict.get("mechanism") != (self.of and self.of.identity):
            raise BindingError(
                f"the accountant's state belongs to mechanism {state_dict.get('mechanism')}, but this is "
                f"{self.of and self.of.identity}"
            )
        self.steps = state_dict["steps"]


class CorrelatedOptimizer(_torch._Noisy, DPOptimizer):
    """Opacus' DPOptimizer with the noise of a mechanism in place of independent noise.

    The per-sample gradients are those of Opacus' hooks. They are clipped and summed in memory of its own, so that one
    sample moves the sum by at most the mechanism's clip, as real numbers, also under autocast; every .grad is replaced.
    Everything else about key, experiment, journal, arithmetic, check, frozen parameters and state_dict is as in
    dpmf.torch.PrivateOptimizer. expected_batch_size is the denominator. cohorts are those of the data loader: a step for
    which they have handed out no cohort is refused. A mechanism that counts on sampling needs SampledBatches of it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mechanism: Mechanism,
        *,
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        key: NoiseKey | None = None,
        experiment: str | None = None,
        journal: str | os.PathLike[str] | None = None,
        arithmetic: Literal["exact", "float"] = "exact",
        check: bool = True,
        cohorts: _torch.Cohorts | _torch.SampledBatches | None = None,
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
        self._as_planned = (self.noise_multiplier, self.max_grad_norm, expected_batch_size)
        self.mechanism = mechanism
        self._checks = _torch._Checks(mechanism, optimizer) if check else None
        self._noise = FlatNoise(
            mechanism,
            optimizer,
            arithmetic=arithmetic,
            key=key,
            experiment=experiment,
            journal=journal,
            group=None,
        )
        self._cohorts = cohorts
        # The hooks of torch.optim.Optimizer.
        super().__setstate__({})

    def clip_and_accumulate(self) -> None:
        """Clips the per-sample gradients of the last backward() and adds them to the coming step."""
        noise = self._noise
        rows = {}
        for number, p in enumerate(noise.parameters):
            if not p.requires_grad:
                continue
            row = getattr(p, "grad_sample", None)
            if row is None:
                raise ValueError(
                    f"parameter {number} is trained, but has no per-sample gradient: it was frozen when the engine made "
                    "the module private, or the loss does not depend on it. Freeze with requires_grad_(False) what is "
                    "not trained; what is to be trained later must be trainable in make_private"
                )
            if isinstance(row, list):
                raise ValueError(
                    "there were several backward() since the last zero_grad(), and an example that came twice would "
                    "count twice: call zero_grad() before the backward() of each batch, and split large batches with "
                    "Opacus' BatchMemoryManager"
                )
            if getattr(row, "_processed", False):
                raise ValueError("these gradients were released by the last step: call optimizer.zero_grad() between steps")
            rows[number] = row
        sums, _ = clipped_sum(list(rows.values()), noise.clip, noise.dimension)
        noise.add(zip(rows, sums), len(next(iter(rows.values()))))
        for row in rows.values():
            row._processed = True

    def add_noise(self) -> None:
        """Adds the next row of noise to the summed gradients and puts them, or their mean, into .grad."""
        if (self.noise_multiplier, self.max_grad_norm, self.expected_batch_size) != self._as_planned:
            raise MismatchError(
                "noise_multiplier, max_grad_norm or expected_batch_size has changed since the mechanism was planned: "
                "schedulers of noise and clipping do not go with correlated noise"
            )
        noise = self._noise
        if self._checks is not None:
            self._checks.step(noise.next_step, self.param_groups)
        if self._cohorts is not None and self._cohorts.drawn <= noise.next_step:
            raise MismatchError(
                f"step {noise.next_step} has a batch that the data loader of make_private did not hand out, so nothing "
                "shows that its examples take part once: train on that loader"
            )
        if isinstance(self._cohorts, _torch.SampledBatches) and self._cohorts.drawn != noise.next_step + 1:
            raise MismatchError(
                f"the batch was drawn for step {self._cohorts.drawn - 1}, but this is step {noise.next_step}, and the guarantee "
                "is for every batch in its own: take one step for each batch, as it comes"
            )
        noise.release()
        if self.loss_reduction == "mean":
            noise.flat.div_(self.expected_batch_size)
        noise.hand_out()

    def pre_step(self, closure: Any = None) -> bool:
        """Clips and adds noise; False if more parts of the batch are to come."""
        if not any(p.requires_grad for p in self._noise.parameters):
            raise ValueError("all parameters are frozen: there is no step to take")
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
            p.grad_sample = None
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
        state["dpmf"] = {**self._noise.state_dict(), "first_learning_rates": self._checks and self._checks.first}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a state, beside the journal of its run."""
        state = dict(state_dict)
        ours = state.pop("dpmf", None)
        if ours is None:
            raise BindingError("the state has no entry dpmf: it is not that of a CorrelatedOptimizer")
        self._noise.load_state_dict(ours)
        self.original_optimizer.load_state_dict(state)
        # The optimizer inside has new groups and state; DPOptimizer keeps references to the old.
        self.param_groups = self.original_optimizer.param_groups
        self.state = self.original_optimizer.state
        if self._checks is not None:
            self._checks.first = ours["first_learning_rates"]

    def close(self) -> None:
        """Closes the journal, so that another process may open it."""
        self._noise.close()

    def __getstate__(self) -> Any:
        raise TypeError("a CorrelatedOptimizer is not pickled or copied: keep its state_dict()")


class PrivacyEngine(opacus.PrivacyEngine):
    """Opacus' engine with correlated noise, single participation and the mechanism's own accounting.

    key, experiment, journal and arithmetic are as in dpmf.torch.PrivateOptimizer. seed fixes the order of the data, so that a run can
    be resumed within its pass; by default it comes from the operating system, and is in data_loader.batch_sampler.seed.

    secure_mode is accepted and changes nothing: the noise always comes from a cryptographic generator. accountant is
    refused, since a mechanism has its own.
    """

    def __init__(
        self,
        *,
        key: NoiseKey | None = None,
        experiment: str | None = None,
        journal: str | os.PathLike[str] | None = None,
        arithmetic: Literal["exact", "float"] = "exact",
        seed: int | None = None,
        secure_mode: bool = True,
        accountant: str | None = None,
    ) -> None:
        if accountant is not None:
            raise ValueError(
                f"accountant is {accountant!r}, but ε is that of a mechanism for the whole run, which has its own "
                "accounting: leave it out, or plan with dpmf.plan(…, accountant=…) and give the mechanism to make_private"
            )
        with warnings.catch_warnings():
            # Opacus warns of its own generator of noise, which is not used.
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            super().__init__(accountant="rdp")
        self.accountant = MechanismAccountant()
        self._key, self._experiment, self._journal, self._seed = key, experiment, journal, seed
        self._arithmetic = arithmetic

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
        max_grad_norm: float,
        schedule: Any = "constant",
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = False,
        **other: Any,
    ) -> tuple[GradSampleModule, CorrelatedOptimizer, DataLoader[Any]]:
        """Plans the best mechanism for the optimizer, one step for every batch, and puts it to work.

        schedule says how the learning rate will change, as in dpmf.plan: text, or the learning rates of all steps.
        """
        if not isinstance(optimizer, torch.optim.SGD):
            raise MismatchError(
                f"the optimizer is {type(optimizer).__name__}, for which no mechanism is the best: use torch.optim.SGD, "
                "or plan by hand with dpmf.plan and give the mechanism to make_private(…, check=False)"
            )
        groups = optimizer.param_groups
        for name in ("lr", "momentum", "nesterov", "weight_decay", "dampening"):
            if len({group[name] for group in groups}) != 1:
                raise MismatchError(f"the parameter groups differ in {name}: one mechanism is planned for all of them")
        group = groups[0]
        mechanism = plan(
            steps=len(data_loader),
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            weight_decay=group["weight_decay"],
            coupled=group["weight_decay"] != 0.0,
            schedule=schedule,
            # Step sizes in full come with a schedule of numbers; a schedule by name is relative.
            learning_rate=float(group["lr"]) if isinstance(schedule, str) else 1.0,
            epsilon=target_epsilon,
            delta=target_delta,
            clip=max_grad_norm,
            unit="record",
        )
        return self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            mechanism=mechanism,
            epochs=epochs,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            **other,
        )

    def make_private(
        self,
        *,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        mechanism: Mechanism | None = None,
        epochs: int = 1,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = False,
        clipping: str = "flat",
        grad_sample_mode: str = "hooks",
        check: bool = True,
        **other: Any,
    ) -> tuple[GradSampleModule, CorrelatedOptimizer, DataLoader[Any]]:
        """The module with per-sample gradients, the optimizer with correlated noise, and the data in fixed cohorts."""
        given = [name for name in ("noise_multiplier", "max_grad_norm") if name in other]
        if mechanism is None or given:
            listed = " and ".join(given) or "no mechanism"
            raise ValueError(
                f"{listed} is given, but clip and noise are those of a mechanism: give mechanism=dpmf.plan(…), or use "
                "make_private_with_epsilon, which plans"
            )
        if other:
            raise ValueError(f"{', '.join(other)} has no meaning with correlated noise: leave it out")
        if poisson_sampling:
            mechanism.check_sampling("poisson")
        if clipping != "flat":
            raise ValueError(f"clipping is {clipping!r}, but the mechanism's clip is one norm over all parameters: flat")
        if grad_sample_mode not in ("hooks", "functorch"):
            raise ValueError(f"grad_sample_mode is {grad_sample_mode!r}, but it must be hooks or functorch")
        _torch.check_loader(mechanism, data_loader, epochs=epochs)
        if self.accountant.of is not None:
            raise ValueError("this engine has made a run private already: a new run needs a new engine, with a new key")
        of_module = set(module.parameters())
        if any(p not in of_module for group in optimizer.param_groups for p in group["params"]):
            raise ValueError("the optimizer has parameters that are not the module's")

        ModuleValidator.validate(module, strict=True)
        loader = self._single_pass(data_loader)
        batches: Any = loader.batch_sampler
        sampled = isinstance(batches, _torch.SampledBatches)
        if sampled and loader.num_workers > 0:
            raise MismatchError(
                f"num_workers is {loader.num_workers}, and workers draw batches ahead, so that nothing shows which one a step has: "
                "give num_workers=0"
            )
        private = CorrelatedOptimizer(
            optimizer,
            mechanism,
            expected_batch_size=batches.drawing.expected_batch if sampled else batches.batch_size,
            loss_reduction=loss_reduction,
            key=self._key,
            experiment=self._experiment,
            journal=self._journal,
            arithmetic=self._arithmetic,
            check=check,
            cohorts=batches,
        )
        # After all checks: Opacus leaves hooks in the module.
        if not isinstance(module, AbstractGradSampleModule):
            module = GradSampleModule(
                module,
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                force_functorch=grad_sample_mode == "functorch",
            )
        self.accountant.of = mechanism
        private.attach_step_hook(self.accountant.get_optimizer_hook_fn(sample_rate=1 / max(len(loader), 1)))
        return module, private, loader

    def _single_pass(self, data_loader: DataLoader[Any]) -> DataLoader[Any]:
        if isinstance(data_loader.batch_sampler, (_torch.Cohorts, _torch.SampledBatches)):
            return data_loader
        if data_loader.batch_size is None:
            raise MismatchError(
                "the data loader has a batch sampler of its own: give dpmf.torch.Cohorts, or a batch_size and no sampler"
            )
        cohorts = _torch.Cohorts(
            len(data_loader.dataset),  # type: ignore[arg-type]
            data_loader.batch_size,
            seed=self._seed,
            drop_last=data_loader.drop_last,
        )
        if len(cohorts) != len(data_loader):
            raise MismatchError(
                f"the data loader has {len(data_loader)} batches, but all of the data makes {len(cohorts)}: give the "
                "part to train on as a torch.utils.data.Subset, without a sampler"
            )
        return DataLoader(
            data_loader.dataset,
            batch_sampler=cohorts,
            num_workers=data_loader.num_workers,
            collate_fn=data_loader.collate_fn,
            pin_memory=data_loader.pin_memory,
            timeout=data_loader.timeout,
            worker_init_fn=data_loader.worker_init_fn,
            multiprocessing_context=data_loader.multiprocessing_context,
            generator=data_loader.generator,
            prefetch_factor=data_loader.prefetch_factor,
            persistent_workers=data_loader.persistent_workers,
        )
