"""One call that plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ._core import Mechanism, Progress, Workload, make_mechanism

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


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
    workload: Workload | None = None,
    mechanism: str = "optimal",
    buffers: int | None = None,
    tolerance: float | None = None,
    dense: bool = False,
    participation: str = "single",
    unit: str = "record",
    adjacency: str = "replace-with-zero",
    accountant: str = "exact",
    gap: float = 1e-6,
    progress: Callable[[Progress], Any] | None = None,
) -> Mechanism:
    """The best mechanism for a run of SGD, calibrated, with its privacy statement.

    Say what the optimizer does (steps, momentum, nesterov, weight_decay, coupled, schedule, average), what is promised
    (epsilon, delta, for contributions clipped to norm clip), and train with the result:

    >>> import dpmf
    >>> mechanism = dpmf.plan(steps=2048, momentum=0.95, schedule="cooldown:0.25:0.05", epsilon=8, delta=1e-6)
    >>> mechanism.certificate.ratio_to_bound < 1.0002
    True

    The mechanism is for data that takes part in at most one step (participation="single") and for the *sum* of the
    clipped contributions; divide by a cohort size fixed before training.

    schedule is text in the form of the command line ("constant", "cooldown:0.25:0.05", "warmup:100+cosine:0.1"), or the
    learning rates of all steps. torch.optim.SGD has coupled weight decay: give coupled=True, and the learning rates,
    which matter beside weight decay. A workload takes the place of everything about the optimizer.

    unit is what the training code clips as one, and so what the statement protects: "record" where every example is
    clipped, as by dpmf.torch and dpmf.opacus, or "user" where everything of a user is, as by dpmf.flower.

    mechanism is a name as for make_mechanism. buffers fixes how many model-sized arrays the noise stream may keep;
    without it, as few as keep the root loss within tolerance (1e-4 by default) of the lower bound for any mechanism.
    dense=True keeps none and draws all earlier noise again at every step.
    """
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
    else:
        given = dict(
            steps=(steps, None),
            momentum=(momentum, 0.0),
            nesterov=(nesterov, False),
            weight_decay=(weight_decay, 0.0),
            coupled=(coupled, False),
            learning_rate=(learning_rate, 1.0),
            average=(average, None),
        )
        extra = [name for name, (value, default) in given.items() if value != default]
        if extra or not (isinstance(schedule, str) and schedule == "constant"):
            names = ", ".join(extra or ["schedule"])
            raise ValueError(f"workload is given and says what the optimizer does: leave out {names}")
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
