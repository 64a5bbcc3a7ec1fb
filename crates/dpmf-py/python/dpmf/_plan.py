"""`dpmf.plan` and `dpmf.mechanism`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from . import _optimizers
from ._core import _BUFFERS, _PULL, Mechanism, Plan, Progress, Workload, _cache_folder, _make_plan, _planned_steps, make_mechanism

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from ._core import _Accountant, _Adjacency, _Unit

#: The noise decay that training is planned with where nothing is said; dpmf.plan itself counts on none.
NOISE_DECAY = _PULL

#: Model-sized buffers that the noise of a plan may take where nothing is said.
BUFFERS = _BUFFERS


P = ParamSpec("P")
R = TypeVar("R")


def _answers_old_calls(planner: Callable[P, R]) -> Callable[P, R]:
    """Until 0.2, plan(steps=…) made a mechanism by hand; such a call gets an error that names the new function."""

    @functools.wraps(planner)
    def answering(*arguments: P.args, **named: P.kwargs) -> R:
        by_hand = [name for name in _BY_HAND if name in named]
        if "examples" not in named:
            raise ValueError(
                "dpmf.plan needs the size of the data: dpmf.plan(examples=…, batch=…, epochs=…, epsilon=…, delta=…) gives a Plan. A "
                "mechanism for a number of steps, or for a workload, is dpmf.mechanism(steps=…, epsilon=…, delta=…)"
            )
        if named.get("batch") is None or named.get("epochs") is None:
            raise ValueError("examples also needs batch and epochs, which determine the number of steps: pass both")
        if by_hand:
            raise ValueError(
                f"{', '.join(by_hand)} cannot be combined with examples: examples, batch and epochs already determine the run. Remove it, or "
                "make a mechanism of your choice with dpmf.mechanism(steps=…)"
            )
        return planner(*arguments, **named)

    return answering


#: Arguments of mechanism() alone.
_BY_HAND = ("steps", "workload", "mechanism", "tolerance", "dense", "participation", "accountant", "gap")


@_answers_old_calls
def plan(
    *,
    examples: int,
    batch: int,
    epochs: int,
    epsilon: float,
    delta: float,
    clip: float = 1.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    coupled: bool = False,
    schedule: str | Sequence[float] | ArrayLike = "constant",
    learning_rate: float = 1.0,
    average: str | None = None,
    optimizer: Any = None,
    buffers: int | None = None,
    sampling: Literal["auto", "none"] = "auto",
    noise_decay: float = 0.0,
    unit: _Unit = "record",
    adjacency: _Adjacency = "replace-with-zero",
    cache: bool | str | os.PathLike[str] = True,
    progress: Callable[[str], Any] | bool | None = None,
    pull: float | None = None,
) -> Plan:
    """The noise and the sampler with the least error for a training run, calibrated, with their privacy statement.

    Describe the data (examples, batch, epochs), the optimizer (momentum, nesterov, weight_decay, coupled, schedule, average) and the
    guarantee (epsilon, delta, for contributions clipped to norm clip). All mechanisms and samplers are compared, and the Plan has the
    pair with the least error:

    >>> import dpmf
    >>> plan = dpmf.plan(examples=4000, batch=400, epochs=4, epsilon=2, delta=1e-5, cache=False)
    >>> plan.rmse < plan.dp_sgd["rmse"]
    True

    Train with plan.mechanism on the batches of plan.sampler(key): the guarantee holds for that sampler only, and its draws must stay as
    secret as the noise. With sampling="none", the guarantee does not rely on a sampler. buffers is the largest number of model-sized
    arrays that the noise may use, 8 by default. Fits and proofs are cached in the folder cache; True means $XDG_CACHE_HOME/dpmf/plans or
    ~/.cache/dpmf/plans, and False disables the cache. A cached proof is accepted only with the seal of a key that its owner alone can
    read.

    The noise is for the *sum* of the clipped contributions. Divide it by a batch size that was fixed before training, under sampling by
    sampler.expected_batch.

    schedule is text as on the command line ("constant", "cooldown:0.25:0.05", "warmup:100+cosine:0.1"), the learning rates of all steps,
    or a scheduler of torch.optim that is stepped after every step. If yours is stepped after every epoch, pass the learning rates
    themselves. torch.optim.SGD has coupled weight decay: pass coupled=True and the learning rates, which matter with weight decay.

    optimizer replaces all of these but the schedule: an optimizer of torch.optim, or its name ("adamw"). SGD is planned for exactly, Adam
    and all others as running sums. The text "adam:β" plans for the iterates of Adam while its second moment is constant: momentum β with
    the step sizes of a corrected first moment. The guarantee holds for any optimizer.

    noise_decay is the fraction of past noise that later gradients undo at the largest step; with 0, noise is not expected to fade. Noise
    that fades should be distributed differently over the steps: 0.03 has helped small networks, most of all at small epsilon. The
    errors of the plan are then those of fading noise. The guarantee does not depend on it. pull is the old name.

    unit is what the training code clips as one, and therefore what the statement protects: "record" if each example is clipped, as in
    dpmf.torch and dpmf.opacus, or "user" if everything that a user contributes is clipped together, as in dpmf.flower.

    progress is a function that is called on the calling thread with a line of text. If it returns False, planning stops with
    StoppedError; Ctrl-C raises KeyboardInterrupt. By default, work of more than two seconds shows a line on standard error in a terminal
    or notebook; True shows it everywhere, False nowhere.
    """
    if sampling not in ("auto", "none"):
        raise ValueError(f"sampling is {sampling!r}, but it must be auto or none: the plan chooses")
    workload = _workload(
        _planned_steps(examples, batch, epochs),
        optimizer,
        schedule,
        dict(
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            coupled=coupled,
            learning_rate=learning_rate,
            average=average,
        ),
    )
    return _make_plan(
        workload,
        examples=examples,
        batch=batch,
        epochs=epochs,
        epsilon=epsilon,
        delta=delta,
        clip=clip,
        buffers=BUFFERS if buffers is None else buffers,
        trusted=sampling == "auto",
        unit=unit,
        adjacency=adjacency,
        pull=noise_decay if pull is None else pull,
        folder=_folder(cache),
        progress=progress,
    )


def mechanism(
    *,
    epsilon: float,
    delta: float,
    clip: float = 1.0,
    steps: int | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    coupled: bool = False,
    schedule: str | Sequence[float] | ArrayLike = "constant",
    learning_rate: float = 1.0,
    average: str | None = None,
    optimizer: Any = None,
    workload: Workload | None = None,
    mechanism: str = "optimal",
    buffers: int | None = None,
    tolerance: float | None = None,
    dense: bool = False,
    participation: str = "single",
    unit: _Unit = "record",
    adjacency: _Adjacency = "replace-with-zero",
    accountant: _Accountant = "exact",
    gap: float = 1e-6,
    progress: Callable[[Progress], Any] | bool | None = None,
) -> Mechanism:
    """The mechanism with the least loss for a number of steps, without sampling, calibrated, with its privacy statement.

    It is for data that takes part in at most one step (participation="single"), and does not rely on sampling. If you know the size of
    the data, use dpmf.plan, which also compares samplers.

    >>> import dpmf
    >>> mechanism = dpmf.mechanism(steps=2048, momentum=0.95, schedule="cooldown:0.25:0.05", epsilon=8, delta=1e-6)
    >>> mechanism.certificate.ratio_to_bound < 1.0002
    True

    The noise is for the *sum* of the clipped contributions. Divide it by a batch size that was fixed before training. workload replaces
    all arguments about the optimizer. Other arguments are as in dpmf.plan.

    mechanism is a name as for make_mechanism. buffers is the number of model-sized arrays that the noise stream keeps. Without it, the
    stream keeps as few as bring the root loss within tolerance (1e-4 by default) of the lower bound for any mechanism. dense=True keeps
    none and regenerates all earlier noise at every step.

    progress is called with a Progress.
    """
    of_optimizer: dict[str, Any] = dict(
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        coupled=coupled,
        learning_rate=learning_rate,
        average=average,
    )
    if workload is None:
        workload = _workload(steps, optimizer, schedule, of_optimizer)
    else:
        extra = _given({**of_optimizer, "optimizer": optimizer, "steps": steps})
        if extra or not (isinstance(schedule, str) and schedule == "constant"):
            raise ValueError(f"workload is given and already describes the optimizer: remove {extra or 'schedule'}")
    made = make_mechanism(
        workload,
        mechanism,
        buffers=buffers,
        tolerance=tolerance,
        dense=dense,
        gap=gap,
        participation=participation,
        progress=progress,
    )
    return made.calibrate(epsilon, delta, clip, unit=unit, adjacency=adjacency, accountant=accountant)


def _workload(
    steps: int | None, optimizer: Any, schedule: str | Sequence[float] | ArrayLike, of_optimizer: dict[str, Any]
) -> Workload:
    """The iterates of an optimizer, or of SGD as its arguments say."""
    if _optimizers.is_scheduler(schedule):
        schedule = _optimizers.learning_rates(schedule, steps)
    if optimizer is None:
        return Workload.sgd(steps, schedule=schedule, **of_optimizer)
    if extra := _given(of_optimizer):
        raise ValueError(f"optimizer already determines {extra}: remove {extra}")
    return _workload_of(optimizer, steps, schedule)


def _workload_of(optimizer: Any, steps: int | None, schedule: str | Sequence[float] | ArrayLike) -> Workload:
    """The iterates of an optimizer."""
    does, rate = _optimizers.as_one(optimizer)
    rates = Workload.sgd(steps, schedule=schedule).learning_rates
    assert rates is not None
    # Step sizes in full come with a schedule of numbers; a schedule by name is relative.
    scale = rate if isinstance(schedule, str) and does.weight_decay != 0.0 else 1.0
    return Workload.sgd(
        momentum=does.momentum,
        nesterov=does.nesterov,
        weight_decay=does.weight_decay,
        coupled=does.coupled,
        schedule=[float(size) * does.size(step) * scale for step, size in enumerate(rates)],
    )


#: What an optimizer does where nothing is said.
_DEFAULTS: dict[str, Any] = dict(learning_rate=1.0, average=None, optimizer=None, steps=None)


def _given(arguments: dict[str, Any]) -> str:
    """The names of arguments that are not what they are by default."""
    defaults = ((name, value, _DEFAULTS.get(name, 0)) for name, value in arguments.items())
    return ", ".join(name for name, value, default in defaults if value is not default and value != default)


def _folder(cache: bool | str | os.PathLike[str]) -> str | os.PathLike[str] | None:
    """Where fits are kept; None for nowhere."""
    if not isinstance(cache, bool):
        return cache
    return _cache_folder() if cache else None
