"""Pictures on matplotlib, which is imported only here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ._core import Mechanism


def plot_error(mechanism: Mechanism, ax: Axes | None = None, **line: Any) -> Axes:
    """Draws the expected squared error of every step and returns the axes."""
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ImportError as missing:
            raise ImportError("plot_error draws with matplotlib: pip install matplotlib") from missing
        _, ax = plt.subplots()
    errors = mechanism.per_step_error()
    line.setdefault("label", mechanism.mechanism or mechanism.form)
    ax.plot(np.arange(1, len(errors) + 1), errors, **line)
    ax.set_xlabel("step")
    ax.set_ylabel("expected squared error")
    ax.set_ylim(bottom=0.0)
    ax.legend()
    return ax
