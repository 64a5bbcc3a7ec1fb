"""Mixing of bits, the same in numpy and on a device."""

from __future__ import annotations

from typing import Any

import numpy as np


def mix(words: Any) -> Any:
    """A bijection of 32 bits in which every input bit moves every output bit (the finalizer of MurmurHash3)."""
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)
