"""The exceptions of dpmf. Bad arguments are ValueError or TypeError; everything else derives from Error."""

from __future__ import annotations

from typing import Any, ClassVar


class Error(Exception):
    """The base class of all errors of dpmf, except those of bad arguments."""

    kind: ClassVar[str] = "error"
    """The kind of the error, for programs: the same word as in the JSON of the command line."""


class UnsupportedError(Error):
    """The request is well formed, but this combination has no implementation or is too large."""

    kind = "unsupported"


class ConvergenceError(Error):
    """A solver stopped before its certified gap reached the target."""

    kind = "not-converged"
    gap: float
    """The certified gap that was reached."""
    target: float
    """The gap that was asked for."""
    iterations: int
    """Iterations that were made."""
    v: Any
    """The dual variable that was reached, from which the bound follows."""


class NumericalError(Error):
    """A number left the range in which the computation is valid."""

    kind = "numerical"


class StoppedError(Error):
    """The progress callback returned False."""

    kind = "interrupted"
    gap: float
    """The certified gap that was reached."""
    iterations: int
    """Iterations that were made."""


class NoiseKeyError(Error):
    """A key file is missing, damaged, or open to others."""

    kind = "key"


class RandomnessError(Error):
    """The operating system gave no random bytes."""

    kind = "randomness"


class ExhaustedError(Error):
    """All rows of noise have been used, and no row may be used twice."""

    kind = "exhausted"
    steps: int
    """Number of rows in all."""


class HaltedError(Error):
    """A stream stopped for good, because it is no longer known what it has released."""

    kind = "halted"


class StepReusedError(Error):
    """A row of noise was used with one input and is now requested with another."""

    kind = "step-reused"
    step: int
    """The step, zero-based."""


class BindingError(Error):
    """A checkpoint or journal belongs to another stream."""

    kind = "binding"


class LockedError(Error):
    """Another process works on the same stream."""

    kind = "locked"


class BudgetError(Error):
    """A release would exceed the budget of a ledger; nothing was recorded."""

    kind = "budget"


class OutOfMemoryError(Error, MemoryError):
    """The system does not have enough memory."""

    kind = "memory"


class FileError(Error, OSError):
    """A file could not be read or written."""

    kind = "io"


class FormatError(Error):
    """A file is damaged, or is not of the expected kind."""

    kind = "format"


class MismatchError(Error, ValueError):
    """The program does something that its mechanism was not planned for."""

    kind = "mismatch"
    fault: str | None = None
    """A word for programs if a PrivateRun refused something; otherwise None."""


_BY_KIND: dict[str, type[Error]] = {
    exception.kind: exception
    for exception in (
        UnsupportedError,
        ConvergenceError,
        NumericalError,
        StoppedError,
        NoiseKeyError,
        RandomnessError,
        ExhaustedError,
        HaltedError,
        StepReusedError,
        BindingError,
        LockedError,
        BudgetError,
        OutOfMemoryError,
        FileError,
        FormatError,
        MismatchError,
    )
}

# As users know them, in tracebacks too.
for _exception in (Error, *_BY_KIND.values()):
    _exception.__module__ = "dpmf"


def of_kind(kind: str) -> type[Error]:
    """The class of a kind of error; Error itself for one that is new."""
    return _BY_KIND.get(kind, Error)
