"""Pictures on matplotlib, which is imported only here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._requires import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ._core import Mechanism


def plot_error(mechanism: Mechanism, ax: Axes | None = None, **line: Any) -> Axes:
    """Draws the standard deviation of every iterate's error and returns the axes."""
    if ax is None:
        require("plot_error", "matplotlib")
        import matplotlib.pyplot as plt

        _, ax = plt.subplots()
    errors = np.sqrt(mechanism.per_step_error())
    line.setdefault("label", mechanism.mechanism or mechanism.form)
    curve: Any = ax.plot(np.arange(1, len(errors) + 1), errors, **line)[0]
    ax.set_xlabel("step")
    ax.set_ylabel("standard deviation of the error\n(noise multiplier × clip)")
    if ax.get_yscale() == "linear":
        # From 0 on, without fixing the limits, which would cut whatever is drawn later.
        ax.update_datalim([(1.0, 0.0)])
        curve.sticky_edges.y.append(0.0)
        ax.autoscale_view()
    ax.legend()
    return ax
