"""What optimizers do with gradients, as far as the noise in them is concerned.

Noise on the gradients is private whatever comes after. What comes after decides only how large the noise in the model is, and
so which mechanism is the best.

SGD is linear in the gradients, and planned for as it is. Adam moves by lr·m̂/(√v̂ + ε), where m̂ = m/(1 − β₁ᵗ) and
m = β₁m + (1 − β₁)g: where v̂ varies slowly, these are the steps of momentum β₁ with step sizes lr·(1 − β₁)/(1 − β₁ᵗ), in
coordinates that are scaled one by one. A plan for that, the text "adam:β₁", lets single steps have much noise, which m̂ smooths; but v̂ is
made of single steps. A plan for running sums has 2.8 times less of it at five percent more error, and trained better
(bench/adam.py), so that is what Adam and all others but SGD are planned for.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ._errors import MismatchError


@dataclass(frozen=True)
class Steps:
    """What an optimizer does, in the words of Workload.sgd."""

    name: str
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    coupled: bool = False
    linear: bool = True
    """Whether iterates are linear in the gradients."""

    def size(self, step: int) -> float:
        """The size of a zero-based step, beside the learning rate: a first moment that begins with zero is corrected."""
        if self.linear or self.momentum == 0.0:
            return 1.0
        return (1.0 - self.momentum) / (1.0 - self.momentum ** (step + 1))


#: Optimizers of torch.optim that are planned for as running sums, by their names in lower case.
ADAPTIVE = ("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "nadam", "radam", "rmsprop")


def of_text(text: str) -> Steps:
    """From the name of an optimizer, which means what the optimizer itself does, or from "adam:β₁": the iterates of Adam where its
    second moment is constant."""
    name, colon, moment = text.partition(":")
    if name in ADAPTIVE and not colon:
        return Steps(name, linear=False)
    try:
        momentum = float(moment)
    except ValueError:
        momentum = -1.0
    if name != "adam" or not 0.0 <= momentum < 1.0:
        raise ValueError(
            f"optimizer is {text!r}, but it must be an optimizer of torch.optim, one of {', '.join(ADAPTIVE)}, or \"adam:β\" with a first "
            "moment of decay β from 0 to below 1; describe SGD with momentum, nesterov, weight_decay and coupled"
        )
    return Steps("Adam", momentum, linear=False)


def of_group(optimizer: Any, group: Mapping[str, Any]) -> Steps:
    """One parameter group of an optimizer of torch.optim."""
    name = type(optimizer).__name__
    bases = {base.__name__ for base in type(optimizer).__mro__}
    momentum = float(group.get("momentum", 0.0))
    if "SGD" in bases:
        dampening = float(group.get("dampening", 0.0))
        if dampening != 0.0 and momentum != 0.0:
            raise MismatchError(
                f"the optimizer has dampening {dampening}, which scales every gradient but the first: set dampening=0 and "
                f"multiply the learning rate by {1.0 - dampening}"
            )
        decay = float(group.get("weight_decay", 0.0))
        return Steps(name, momentum, bool(group.get("nesterov", False)), decay, coupled=decay != 0.0)
    if "betas" in group:
        momentum = float(group["betas"][0])
    return Steps(name, momentum, nesterov="NAdam" in bases, linear=False)


def of_optimizer(optimizer: Any) -> list[Steps]:
    """Each parameter group of an optimizer of torch.optim."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, but it must be an optimizer of torch.optim, or the name of one"
        )
    return [of_group(optimizer, group) for group in optimizer.param_groups]


def as_one(optimizer: Any) -> tuple[Steps, float]:
    """What all parameter groups do, and the learning rate, which matters beside weight decay only."""
    if isinstance(optimizer, str):
        return of_text(optimizer), 1.0
    groups = of_optimizer(optimizer)
    first = groups[0]
    if not first.linear:
        return Steps(first.name, linear=False), 1.0
    for name in ("momentum", "nesterov", "weight_decay"):
        if len({getattr(steps, name) for steps in groups}) != 1:
            raise MismatchError(f"the parameter groups differ in {name}, but one mechanism serves all of them: give them the same {name}")
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if first.weight_decay != 0.0 and len(rates) != 1:
        raise MismatchError(
            "the parameter groups differ in lr, and with weight decay one mechanism cannot serve them all: give them the same lr"
        )
    return first, rates.pop()


def is_scheduler(schedule: Any) -> bool:
    """Whether it is a scheduler of torch.optim."""
    return hasattr(schedule, "optimizer") and hasattr(schedule, "step")


def learning_rates(scheduler: Any, steps: int | None) -> list[float]:
    """The learning rates of so many steps, where a scheduler of torch.optim is stepped after each of them, from where it is now.

    Neither it nor its optimizer is touched. Groups may differ by a factor, and the rates are then those of the first.
    """
    name = type(scheduler).__name__
    if steps is None:
        raise ValueError(f"schedule is a {name}, which has no end: pass steps")
    if "metrics" in scheduler.step.__code__.co_varnames:
        raise ValueError(
            f"schedule is a {name}, whose learning rates depend on losses, but a plan needs them in advance: use a scheduler whose rates "
            "are known before training"
        )
    groups = [{**group, "params": []} for group in scheduler.optimizer.param_groups]
    stand_in = SimpleNamespace(param_groups=groups, defaults=scheduler.optimizer.defaults, step=lambda: None)
    other = _over(scheduler, stand_in)
    rows: list[list[float]] = []
    with warnings.catch_warnings():
        # No step of an optimizer comes before those of the scheduler, of which PyTorch warns.
        warnings.simplefilter("ignore")
        for _ in range(steps):
            rows.append([float(group["lr"]) for group in stand_in.param_groups])
            other.step()
    largest = [max(column) for column in zip(*rows)]
    for row in rows:
        for rate, most in zip(row, largest):
            if abs(rate * largest[0] - row[0] * most) > 1e-9 * largest[0] * most:
                raise MismatchError(
                    f"the {name} changes the learning rates of the parameter groups in different ways: one mechanism serves all of "
                    "them, so give all groups the same schedule"
                )
    return [row[0] for row in rows]


def _over(scheduler: Any, optimizer: Any) -> Any:
    """A copy of a scheduler, and of those that it is made of, for another optimizer."""
    other = copy.copy(scheduler)
    other.optimizer = optimizer
    parts = getattr(scheduler, "_schedulers", None)
    if parts is not None:
        other._schedulers = [_over(part, optimizer) for part in parts]
    return other
