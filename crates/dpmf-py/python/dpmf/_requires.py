"""What the adapters need besides NumPy, and messages for packages that are missing or too old."""

from __future__ import annotations

import importlib
import re

#: The oldest versions that the adapters are for, as in the extras of the package.
LEAST = {
    "flwr": "1.41",
    "jax": "0.6.1",
    "matplotlib": "3.6",
    "opacus": "1.4",
    "optax": "0.2",
    "torch": "1.13",
    "transformers": "5.23",
}


def require(who: str, *packages: str) -> None:
    """Raises ImportError, which says what to install, unless all packages are there and new enough."""
    remedy = "pip install " + " ".join(f"'{name}>={LEAST[name]}'" for name in packages)
    for name in packages:
        try:
            version = str(getattr(importlib.import_module(name), "__version__", ""))
        except ModuleNotFoundError as missing:
            # What the package itself does not find is for its own message.
            if missing.name is None or missing.name.split(".")[0] not in packages:
                raise
            raise ImportError(f"{who} needs {name}, which is not installed: {remedy}", name=name) from missing
        if _numbers(version) < _numbers(LEAST[name]):
            raise ImportError(f"{who} needs {name} {LEAST[name]} or newer, but {version} is installed: {remedy}", name=name)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, without suffixes of candidates and builds; an unknown version is later than all others."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else (2**31,)
