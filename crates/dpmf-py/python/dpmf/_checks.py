"""Checks that all adapters make before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._core import Mechanism, NoiseKey, PrivacyStatement
from ._errors import MismatchError

if TYPE_CHECKING:
    from ._core import _Unit


def statement_of(mechanism: Mechanism) -> PrivacyStatement:
    """The privacy statement of a mechanism that is calibrated."""
    if mechanism.privacy is None:
        raise ValueError(
            "the mechanism is not calibrated, so its noise has no scale: use mechanism.calibrate(epsilon, delta, clip)"
        )
    return mechanism.privacy


def check_unit(mechanism: Mechanism, clipped: _Unit, remedy: str = "") -> None:
    """Refuses a statement whose unit is not the one that is clipped."""
    unit = statement_of(mechanism).unit
    if unit != clipped:
        raise MismatchError(
            f"the mechanism's statement is for every {unit}, but here every {clipped} is clipped: plan with "
            f'unit="{clipped}"{remedy}'
        )


def check_experiment(key: NoiseKey | None, experiment: str | None) -> None:
    """Refuses to name a run whose noise is secret: under one name, every start has the same noise."""
    if experiment is not None and (key is None or key.origin != "seeded"):
        raise ValueError(
            f"experiment={experiment!r} repeats the same noise at every start, so the difference between two starts with different data "
            "would reveal the data. Remove experiment, or pass key=NoiseKey.from_seed(…) if nothing is released"
        )


def participation_of(mechanism: Mechanism) -> tuple[int, int]:
    """The minimum distance between two steps of one contributor, and the largest number of steps that it takes part in."""
    return mechanism._participation
