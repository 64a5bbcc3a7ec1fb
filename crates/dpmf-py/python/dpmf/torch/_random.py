"""The random numbers that models, losses and collators draw: of Python, NumPy and PyTorch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


class RandomState:
    """The states of all generators of the process at one moment."""

    def __init__(self) -> None:
        self.python, self.numpy, self.torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self.cuda: Any = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self.mps: Any = torch.mps.get_rng_state() if _has("mps") else None
        self.xpu: Any = torch.xpu.get_rng_state_all() if _has("xpu") else None

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)
        if self.xpu is not None:
            torch.xpu.set_rng_state_all(self.xpu)


def _has(kind: str) -> bool:
    """Whether PyTorch knows such a device, and there is one."""
    known = getattr(torch.backends, kind, None) or getattr(torch, kind, None)
    return hasattr(torch, kind) and known is not None and hasattr(known, "is_available") and known.is_available()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restores the generators at the end, so that the same numbers are drawn again afterwards."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()
