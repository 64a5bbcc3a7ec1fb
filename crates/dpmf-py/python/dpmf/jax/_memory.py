"""Memory of the host for rows of noise, which devices may use as it is."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

#: Bytes between places where an array may begin: those of a page, and a multiple of what JAX asks for.
PAGE = 4096

#: Arrays that are kept for the next rows: the two words of two rows.
MOST = 4


class Memory:
    """Memory for rows, which serves another row once nothing uses the one before.

    Pages that the system gives anew cost more time than a row takes to write, and it takes back those of every large array. JAX uses an
    array that begins on a page without a copy on a CPU; it then holds on to the array as long as any array of JAX, or computation under
    way, does. On other devices it does so until the copy has arrived.
    """

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self, length: int, dtype: Any) -> np.ndarray[Any, Any]:
        """An array of numbers that are still to be written, all of them."""
        size = length * np.dtype(dtype).itemsize
        try:
            memory = self._free.pop()
        except IndexError:
            memory = _pages(size)
        if len(memory) != size:
            memory = _pages(size)
        # Not a view of another array: its own views keep this one, and not what it is a view of.
        array = np.frombuffer(memory, dtype)
        back: Any = weakref.finalize(array, _give_back, self._free, memory)
        back.atexit = False
        return array


def _pages(size: int) -> memoryview:
    whole = np.empty(size + PAGE, np.uint8)
    begin = -whole.ctypes.data % PAGE
    return whole.data[begin : begin + size]


def _give_back(free: list[memoryview], memory: memoryview) -> None:
    if len(free) < MOST:
        free.append(memory)
