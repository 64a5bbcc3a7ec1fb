"""Progress of long work: a callback, or a line on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

#: Work that is done sooner shows nothing.
SECONDS = 2.0

#: Between two lines.
PACE = 0.1


class Listener:
    """A callback or None, and what to do when the work has ended."""

    def __init__(self, callback: Callable[[Any], Any] | None) -> None:
        self.callback = callback

    def close(self) -> None:
        """The work has ended."""


class Line(Listener):
    """One line on standard error, overwritten with each message and removed at the end."""

    def __init__(self) -> None:
        super().__init__(self.tell)
        self.began = time.monotonic()
        self.due = self.began + SECONDS
        self.width = 0

    def tell(self, message: object) -> None:
        """Shows a message, if the last one is old enough."""
        now = time.monotonic()
        if now < self.due:
            return
        self.due = now + PACE
        self._write(f"dpmf: {message}, {now - self.began:.0f} s")

    def close(self) -> None:
        """Removes the line."""
        if self.width:
            self._write("")
            self._write("")

    def _write(self, line: str) -> None:
        # Spaces rather than escape codes, which notebooks do not know.
        print(f"\r{line.ljust(self.width)}", end="", file=sys.stderr, flush=True)
        self.width = len(line)


def listener(progress: Callable[[Any], Any] | bool | None) -> Listener:
    """The callback that was passed; a line for True, or by default if standard error is shown to a user; nothing for False."""
    if progress is None:
        progress = _seen()
    if callable(progress):
        return Listener(progress)
    if not isinstance(progress, bool):
        raise TypeError(f"progress is {progress!r}, but it must be a function, True or False")
    return Line() if progress else Listener(None)


def _seen() -> bool:
    """Whether standard error is a terminal, or the output of a notebook."""
    # What has no standard error, as a program without a console, shows none either.
    return sys.stderr is not None and (sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel"))
