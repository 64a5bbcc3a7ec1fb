"""A plan in one line, for the log of a training run."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from ._core import Plan
from ._plan import plan

log = logging.getLogger("dpmf")
log.setLevel(logging.INFO)


def say(line: str) -> None:
    """Writes to the log or, if no logging is configured, to standard error. logging.getLogger("dpmf").setLevel("WARNING") silences both."""
    if log.hasHandlers():
        log.info(line)
    elif log.isEnabledFor(logging.INFO):
        print(f"dpmf: {line}", file=sys.stderr)


def announced(**arguments: Any) -> Plan:
    """Makes the plan and reports it in one line; if planning takes more than two seconds, reports progress too."""
    started = last = time.monotonic()

    def progress(line: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > 2.0:
            last = now
            say(f"planning for {now - started:.0f} s: {line}")

    made = plan(progress=progress, **arguments)
    better = made.dp_sgd["rmse"] / made.rmse
    say(
        f"{made.chosen['selector']} noise, multiplier {made.statement.noise_multiplier:.4g}, sampling {made.sampling}, "
        f"{made.steps} steps in {made.epochs} epoch{'s' * (made.epochs != 1)}: ε = {made.statement.epsilon:.4g} at "
        f"δ = {made.statement.delta:g}, {better:.2f} times less error than DP-SGD"
    )
    return made
