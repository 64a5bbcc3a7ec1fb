"""Models whose parameters are cut over ranks: what each rank holds of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DTensor: Any = None
Shard: Any = None
try:
    from torch.distributed import tensor as _tensor

    DTensor, Shard = _tensor.DTensor, _tensor.Shard
except (ImportError, AttributeError):  # PyTorch before 2.5 has no FSDP2
    pass


def is_sharded(p: torch.Tensor) -> bool:
    """Whether a parameter is a DTensor."""
    return DTensor is not None and isinstance(p, DTensor)


def whole(p: Any) -> torch.Tensor:
    """All of a parameter, on this rank."""
    found: torch.Tensor = p.detach().full_tensor() if is_sharded(p) else p.detach()
    return found


def local(p: Any) -> torch.Tensor:
    """What this rank holds of a parameter."""
    found: torch.Tensor = p.detach().to_local() if is_sharded(p) else p.detach()
    return found


def check_sharded(parameters: Sequence[Any], grouped: bool) -> None:
    """Refuses parameters that are cut in other ways than fully_shard does."""
    meshes = []
    for number, p in enumerate(parameters):
        if not is_sharded(p):
            raise ValueError(
                f"parameter {number} is a plain tensor, but others are DTensors: shard all of them, calling fully_shard(model) last"
            )
        if p.device_mesh.ndim != 1 or not isinstance(p.placements[0], Shard) or p.placements[0].dim != 0:
            raise ValueError(
                f"parameter {number} has placements {p.placements} on a mesh of {p.device_mesh.ndim} dimensions, but noise is laid "
                "out for shards along the first dimension, on a mesh of one: use fully_shard(model) without others"
            )
        meshes.append(p.device_mesh)
    if any(mesh != meshes[0] for mesh in meshes):
        raise ValueError("the parameters lie on different meshes: shard all of them on one")
    if not grouped:
        raise ValueError("the parameters are cut over several ranks: pass group=True, and one key for all ranks")


@dataclass(frozen=True)
class Cut:
    """The rows of a parameter that one rank holds."""

    number: int
    first: int
    last: int
    #: Where they begin in the model, and among the sums of all ranks, rank after rank.
    coordinate: int
    place: int
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        return torch.Size(self.shape).numel()


def cuts_of(parameters: Sequence[torch.Tensor], world_size: int) -> list[list[Cut]]:
    """What every rank holds."""
    cuts: list[list[Cut]] = []
    place = 0
    for rank in range(world_size):
        own, coordinate = [], 0
        for number, p in enumerate(parameters):
            rows, width = p.shape[0], p.shape[1:].numel()
            each = -(-rows // world_size)
            first, last = min(rank * each, rows), min((rank + 1) * each, rows)
            cut = Cut(number, first, last, coordinate + first * width, place, (last - first, *p.shape[1:]))
            own.append(cut)
            place += cut.length
            coordinate += p.numel()
        cuts.append(own)
    return cuts


def check_held(parameters: Sequence[torch.Tensor], cuts: Sequence[Cut]) -> None:
    """Refuses shards of other rows than fully_shard gives."""
    for p, cut in zip(parameters, cuts):
        if tuple(local(p).shape) != cut.shape:
            raise ValueError(
                f"this rank holds {tuple(local(p).shape)} of parameter {cut.number}, of shape {tuple(p.shape)}, where rows {cut.first} to "
                f"{cut.last} were expected: shard with fully_shard(model), evenly along the first dimension"
            )


def as_shard(values: torch.Tensor, p: Any) -> torch.Tensor:
    """Values of this rank's rows, as a gradient of the parameter."""
    made: torch.Tensor = DTensor.from_local(
        values, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return made


@contextlib.contextmanager
def without_gathering(module: torch.nn.Module) -> Iterator[None]:
    """Calls of the module leave its parameters alone: FSDP2 would gather them itself, where they have been given."""
    removed: list[tuple[Any, dict[Any, Any]]] = []
    for part in module.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            of_fsdp = [key for key, hook in hooks.items() if type(getattr(hook, "__self__", None)).__name__ == "FSDPState"]
            if of_fsdp:
                removed.append((hooks, dict(hooks)))
                for key in of_fsdp:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, before in removed:
            hooks.clear()
            hooks.update(before)
