"""One call that plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from . import _optimizers
from ._core import _BUFFERS, _PULL, Mechanism, Plan, Progress, Workload, _cache_folder, _make_plan, _planned_steps, make_mechanism

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from ._core import _Accountant, _Adjacency, _Unit

#: The pull that training is planned with where nothing is said; dpmf.plan itself counts on none.
PULL = _PULL

#: Model-sized buffers that the noise of a plan may take where nothing is said.
BUFFERS = _BUFFERS


@overload
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
    pull: float = 0.0,
    unit: _Unit = "record",
    adjacency: _Adjacency = "replace-with-zero",
    cache: bool | str | os.PathLike[str] = True,
    progress: Callable[[str], Any] | bool | None = None,
) -> Plan: ...
@overload
def plan(
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
) -> Mechanism: ...
def plan(
    *,
    epsilon: float,
    delta: float,
    clip: float = 1.0,
    examples: int | None = None,
    batch: int | None = None,
    epochs: int | None = None,
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
    sampling: Literal["auto", "none"] = "auto",
    pull: float = 0.0,
    unit: _Unit = "record",
    adjacency: _Adjacency = "replace-with-zero",
    accountant: _Accountant = "exact",
    gap: float = 1e-6,
    cache: bool | str | os.PathLike[str] = True,
    progress: Callable[[Any], Any] | bool | None = None,
) -> Plan | Mechanism:
    """The best noise for a run of SGD, calibrated, with its privacy statement.

    Say how much data there is (examples, batch, epochs), what the optimizer does (momentum, nesterov, weight_decay, coupled,
    schedule, average) and what is promised (epsilon, delta, for contributions clipped to norm clip). All mechanisms and
    samplers are weighed, and a Plan has those of least error:

    >>> import dpmf
    >>> plan = dpmf.plan(examples=4000, batch=400, epochs=4, epsilon=2, delta=1e-5, cache=False)
    >>> plan.rmse < plan.dp_sgd["rmse"]
    True

    Train with plan.mechanism on the batches of plan.sampler(key): the guarantee is for that sampler and no other, and its draws
    are as secret as the noise. sampling="none" counts on no sampler. buffers bounds the model-sized arrays that the noise may
    keep, 8 by default. Fits are kept in cache: a folder, or with True $XDG_CACHE_HOME/dpmf/plans or ~/.cache/dpmf/plans; nothing
    read from there is believed.

    Without examples, say steps: then it is the mechanism of least loss for data that takes part in at most one step
    (participation="single") and counts on no sampling, a Mechanism.

    >>> mechanism = dpmf.plan(steps=2048, momentum=0.95, schedule="cooldown:0.25:0.05", epsilon=8, delta=1e-6)
    >>> mechanism.certificate.ratio_to_bound < 1.0002
    True

    Both are for the *sum* of the clipped contributions; divide by a cohort size fixed before training, under sampling by
    sampler.expected_batch.

    schedule is text in the form of the command line ("constant", "cooldown:0.25:0.05", "warmup:100+cosine:0.1"), or the
    learning rates of all steps. torch.optim.SGD has coupled weight decay: give coupled=True, and the learning rates,
    which matter beside weight decay. A workload takes the place of everything about the optimizer.

    optimizer says all of that but the schedule: an optimizer of torch.optim. SGD is planned for as it is, Adam and all others for
    running sums. The text "adam:β" is for the iterates of Adam where its second moment is constant: momentum β with the step sizes
    of a corrected first moment. The guarantee holds for any.

    pull is the share of what noise has moved that training takes back at its largest step, as the gradients at the next iterates
    do; 0 counts on none of it. An error that fades asks for other noise than one that stays: 0.03 has served small networks, most of
    all at small epsilon. The errors of a plan are then those that fade. The guarantee does not depend on it.

    unit is what the training code clips as one, and so what the statement protects: "record" where every example is
    clipped, as by dpmf.torch and dpmf.opacus, or "user" where everything of a user is, as by dpmf.flower.

    With steps, mechanism is a name as for make_mechanism. buffers fixes how many model-sized arrays the noise stream may keep;
    without it, as few as keep the root loss within tolerance (1e-4 by default) of the lower bound for any mechanism.
    dense=True keeps none and draws all earlier noise again at every step.

    progress is called on the calling thread with how far it is: a line of text, or with steps a Progress. Returning False stops with
    StoppedError, Ctrl-C with KeyboardInterrupt. Without it, work of more than two seconds shows a line on standard error where
    that is a terminal or a notebook; True shows it anywhere, False nowhere.
    """
    of_optimizer = dict(
        momentum=(momentum, 0.0),
        nesterov=(nesterov, False),
        weight_decay=(weight_decay, 0.0),
        coupled=(coupled, False),
        learning_rate=(learning_rate, 1.0),
        average=(average, None),
    )
    of_data = dict(batch=(batch, None), epochs=(epochs, None), sampling=(sampling, "auto"), pull=(pull, 0.0), cache=(cache, True))
    of_steps = dict(
        steps=(steps, None),
        workload=(workload, None),
        mechanism=(mechanism, "optimal"),
        tolerance=(tolerance, None),
        dense=(dense, False),
        participation=(participation, "single"),
        accountant=(accountant, "exact"),
        gap=(gap, 1e-6),
    )
    if examples is None and (extra := _given(of_data)):
        raise ValueError(f"{extra} is given without examples: say how much data there is, or plan for steps")
    if examples is not None:
        if batch is None or epochs is None:
            raise ValueError("examples is given without batch and epochs: say both, they decide the number of steps")
        if extra := _given(of_steps):
            raise ValueError(
                f"{extra} is given beside examples, but data, batch and epochs decide that here: leave it out, or plan for "
                "steps with a mechanism of your choice"
            )
        if sampling not in ("auto", "none"):
            raise ValueError(f"sampling is {sampling!r}, but it must be auto or none: the plan chooses")
        steps = _planned_steps(examples, batch, epochs)
    elif workload is not None:
        extra = _given(of_optimizer | dict(optimizer=(optimizer, None), steps=(steps, None)))
        if extra or not (isinstance(schedule, str) and schedule == "constant"):
            raise ValueError(f"workload is given and says what the optimizer does: leave out {extra or 'schedule'}")
    if optimizer is not None:
        if extra := _given(of_optimizer):
            raise ValueError(f"optimizer is given and says what {extra} is: leave that out")
        workload = _workload_of(optimizer, steps, schedule)
    if workload is None:
        workload = Workload.sgd(
            steps,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            coupled=coupled,
            schedule=schedule,
            learning_rate=learning_rate,
            average=average,
        )
    if examples is not None and batch is not None and epochs is not None:
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
            pull=pull,
            folder=_folder(cache),
            progress=progress,
        )
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


def _given(arguments: dict[str, tuple[Any, Any]]) -> str:
    """The names of arguments that are not what they are by default."""
    return ", ".join(name for name, (value, default) in arguments.items() if value is not default and value != default)


def _folder(cache: bool | str | os.PathLike[str]) -> str | os.PathLike[str] | None:
    """Where fits are kept; None for nowhere."""
    if not isinstance(cache, bool):
        return cache
    return _cache_folder() if cache else None
