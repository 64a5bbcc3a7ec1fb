"""What to do when a run refuses something, in the words of each framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ._errors import MismatchError


@contextmanager
def remedies(words: Mapping[str, str]) -> Iterator[None]:
    """Adds the remedy for a fault (MismatchError.fault) to what a PrivateRun says of it."""
    try:
        yield
    except MismatchError as refused:
        fault = refused.fault
        if fault is None or fault not in words:
            raise
        told = MismatchError(f"{refused}: {words[fault]}")
        told.fault = fault
        raise told from None
