"""Gradients example by example, and their clipped sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING or hasattr(torch, "func"):
    from torch.func import functional_call, grad_and_value, vmap
else:  # PyTorch 1
    from functorch import grad_and_value, vmap
    from torch.nn.utils.stateless import functional_call

from .._core import _Clip
from ._random import RandomState, random_numbers_kept
from ._sharded import whole, without_gathering

Gradients = tuple[list[torch.Tensor], torch.Tensor]

class NotVectorizedError(ValueError):
    """vmap cannot go through a module; its gradients can still be had one by one."""


WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


class Seen:
    """What accumulate saw. ε does not cover it: it is for your eyes, not for release.

    Numbers are read from the device when they are asked for, which waits for it.
    """

    def __init__(self, examples: int, unprotected_loss: float, unprotected_clipped: float) -> None:
        self.examples: int = examples
        """Number of examples, or of users, in the call."""
        self.clipping: Literal["per-example", "ghost"] = "per-example"
        """How the gradients were clipped; clipping="auto" chooses."""
        self.charged: float = 0.0
        """Share of the clip that was given up for rounding; 0 per example, where sums are exact."""
        self._means: tuple[float, float] | None = (unprotected_loss, unprotected_clipped)
        self._sums: list[torch.Tensor] = []

    @classmethod
    def of(
        cls,
        examples: int,
        sums: list[torch.Tensor],
        clipping: Literal["per-example", "ghost"] = "per-example",
        charged: float = 0.0,
    ) -> Seen:
        """From pairs of the sum of losses and the number that was longer than the clip, on a device."""
        seen = cls(examples, 0.0, 0.0)
        seen._means, seen._sums = None, sums
        seen.clipping, seen.charged = clipping, charged
        return seen

    def _read(self) -> tuple[float, float]:
        if self._means is None:
            count = self.examples or float("nan")
            loss, clipped = (sum(column) for column in zip((0.0, 0.0), *(pair.tolist() for pair in self._sums)))
            self._means, self._sums = (loss / count, clipped / count), []
        return self._means

    @property
    def unprotected_loss(self) -> float:
        """Mean of the loss before the step; NaN for no examples."""
        return self._read()[0]

    @property
    def unprotected_clipped(self) -> float:
        """Share whose gradient was longer than the clip; NaN for no examples."""
        return self._read()[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seen) and (self.examples, *self._read()) == (other.examples, *other._read())

    def __hash__(self) -> int:
        return hash((self.examples, *self._read()))

    def __repr__(self) -> str:
        loss, clipped = self._read()
        return f"Seen(examples={self.examples}, unprotected_loss={loss}, unprotected_clipped={clipped})"


def check_module(module: torch.nn.Module, *, sharded: bool = False) -> None:
    """Refuses modules in which an example has no gradient of its own, or whose gradient says more than its numbers."""
    wrappers = WRAPPERS - {"FSDPModule"} if sharded else WRAPPERS
    for part in module.modules():
        name = type(part).__name__
        if wrappers & {base.__name__ for base in type(part).__mro__}:
            raise ValueError(
                f"the module is wrapped in {name}, which averages gradients that are not clipped: pass the module "
                "inside (module.module), and group=True to PrivateOptimizer, which sums over the ranks itself"
            )
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.training:
            raise ValueError(
                f"{name} mixes the examples of a batch, so that no example has a gradient of its own: use "
                "torch.nn.GroupNorm, or freeze it with .eval()"
            )
        if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.training and part.track_running_stats:
            raise ValueError(
                f"{name} keeps statistics of the data, which would be released without noise: pass "
                "track_running_stats=False, or freeze it with .eval()"
            )
        if getattr(part, "sparse", False) is True:
            raise TypeError(
                f"the gradients of {name} are sparse, and their zeros would show which rows were used: make the "
                "embedding with sparse=False"
            )


class Kept:
    """What a module keeps beside its parameters, buffers and plain tensors, at one moment: a forward pass must leave it alone.

    Statistics of the data (a running mean, a codebook) are in what is saved, and no noise covers them.
    """

    def __init__(self, module: torch.nn.Module, *, values: bool = False) -> None:
        self.module = module
        self.before = {place: (tensor, tensor._version) for place, tensor in self._tensors()}
        self.values = [(tensor, tensor.detach().clone()) for tensor, _ in self.before.values()] if values else []

    def _tensors(self) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
        for name, part in self.module.named_modules():
            for kind in (part._buffers, vars(part)):
                for attribute, value in kind.items():
                    if isinstance(value, torch.Tensor):
                        yield (name, attribute), value

    def check(self) -> None:
        """Refuses what was written since; puts back the values, where they were kept."""
        now = {place: (tensor, tensor._version) for place, tensor in self._tensors()}
        places = [
            place
            for place, (tensor, version) in now.items()
            if place not in self.before or self.before[place][0] is not tensor or self.before[place][1] != version
        ]
        if not places:
            return
        with torch.no_grad():
            for tensor, value in self.values:
                tensor.copy_(value)
        name = ".".join(part for part in places[0] if part)
        raise ValueError(
            f"the forward pass writes to {name}, which the module keeps: statistics of the data would be released without noise, "
            "and would mix the examples of a batch. Leave it out, or freeze it before training"
        )


def watch(module: torch.nn.Module) -> None:
    """Refuses, from now on, a forward pass in training that writes what the module keeps."""
    begun: list[Kept] = []

    def before(*_: Any) -> None:
        if module.training:
            begun.append(Kept(module))

    def after(*_: Any) -> None:
        if begun:
            begun.pop().check()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


class Batch:
    """Inputs and targets with one leading axis of examples: tensors, or tuples, lists and dicts of them."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        if isinstance(inputs, Mapping):
            positional, named = (), dict(inputs)
        else:
            positional, named = (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}
        #: Positional arguments, keyword arguments, targets.
        self.parts = (positional, named, () if targets is None else (targets,))
        leaves: list[torch.Tensor] = []
        _map(leaves.append, self.parts)
        lengths = {len(leaf) if leaf.dim() else None for leaf in leaves}
        if len(lengths) != 1 or None in lengths:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves) or "none"
            raise ValueError(
                f"inputs and targets have shapes {shapes}, but all need one leading axis of the same length: one entry "
                "for every example"
            )
        self.length: int = lengths.pop()  # type: ignore[assignment]

    def views(self, count: int) -> Batch:
        """The same where the leading axis has all first views, then all second ones, and so on: one entry for every example, with
        its views along a second axis."""
        if self.length % count:
            raise ValueError(f"there are {self.length} views, which are not {count} of each example")
        together = Batch.__new__(Batch)
        together.parts = _map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]).transpose(0, 1), self.parts)
        together.length = self.length // count
        return together

    def chunk(self, first: int, size: int) -> Any:
        """The parts of some examples."""
        return _map(lambda leaf: leaf[first : first + size], self.parts)


def cut_examples(parts: Any, index: torch.Tensor) -> Any:
    """Some examples of parts of a batch."""
    return _map(lambda leaf: leaf[index.to(leaf.device)], parts)


def _map(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {name: _map(function, value) for name, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(_map(function, value) for value in tree)
    raise TypeError(
        f"inputs or targets hold a {type(tree).__name__}, but each example's share is cut from tensors: bind other "
        "arguments with functools.partial"
    )


class PerExample:
    """Differentiates a loss with respect to some parameters of a module, for each example alone.

    Every entry of the leading axis is one example; with grouped, it is the batch of all examples of one user.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        trained: Mapping[str, torch.Tensor],
        *,
        grouped: bool,
        sharded: bool = False,
    ) -> None:
        check_module(module, sharded=sharded)
        self.module, self.loss, self.grouped = module, loss, grouped
        # Gathered from all ranks, for as long as this lives.
        self.trained = {name: whole(p) for name, p in trained.items()} if sharded else dict(trained)
        self.fixed = {name: whole(p) for name, p in module.named_parameters() if name not in trained}
        self.fixed.update(module.named_buffers())

    def _value(self, call: Callable[..., Any], example: Any) -> torch.Tensor:
        if not self.grouped:
            example = _map(lambda leaf: leaf.unsqueeze(0), example)
        positional, named, targets = example
        value = self.loss(call(positional, named), targets[0] if targets else None)
        # The sum of a scalar fails in the vmap of PyTorch 1.
        return value if value.dim() == 0 else value.sum()

    def at_once(self, parts: Any) -> Gradients:
        """By vmap: for each trained parameter the gradients of all examples, and their losses."""

        def value(parameters: dict[str, torch.Tensor], example: Any) -> torch.Tensor:
            everything = {**parameters, **self.fixed}
            return self._value(lambda args, named: functional_call(self.module, everything, args, named), example)

        parameters = {name: p.detach() for name, p in self.trained.items()}
        try:
            with without_gathering(self.module):
                gradients, losses = vmap(grad_and_value(value), in_dims=(None, 0), randomness="different")(
                    parameters, parts
                )
        except RuntimeError as failed:
            if "inplace" in str(failed).replace("-", ""):
                raise ValueError(
                    f"the forward pass writes into a tensor that the module keeps ({failed}): statistics of the data would be "
                    "released without noise. Leave them out, or freeze them before training"
                ) from failed
            raise NotVectorizedError(
                f"torch's vmap cannot differentiate this module for all examples at once ({failed}): pass "
                "vectorize=False, which is slower, or use dpmf.opacus"
            ) from failed
        return [gradients[name] for name in self.trained], losses

    def one_by_one(self, parts: Any) -> Gradients:
        """The same, for modules that vmap does not know."""
        rows, losses = [], []
        kept = Kept(self.module, values=True)
        leaves: list[torch.Tensor] = []
        _map(leaves.append, parts)
        before = RandomState()

        def value_of(index: int) -> torch.Tensor:
            example = _map(lambda leaf: leaf[index], parts)
            with torch.enable_grad():
                return self._value(lambda args, named: self.module(*args, **named), example)

        for index in range(len(leaves[0])):
            value = value_of(index)
            gradients = torch.autograd.grad(value, list(self.trained.values()), allow_unused=True)
            rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(gradients, self.trained.values())])
            losses.append(value.detach())
            kept.check()
        if losses:
            with random_numbers_kept():
                before.restore()
                again = value_of(0).detach()
            if not torch.isclose(again, losses[0], rtol=1e-5, atol=1e-7, equal_nan=True):
                raise ValueError(
                    f"the loss of an example was {float(losses[0]):.6g}, and is {float(again):.6g} after others were seen: {REMEMBERS}"
                )
        return [torch.stack(of_all) for of_all in zip(*rows)], torch.stack(losses)


#: What is wrong where the same example has another loss later.
REMEMBERS = (
    "the module or the loss remembers examples (a running mean, a list), so that one example would change the gradients of others. Let "
    "the loss depend on its own example alone, and draw random numbers from the generators of torch, NumPy or random"
)

#: Numbers of a slice of contributions: 8 MB in double precision, and as much again for each copy of them.
SLICE = 1 << 20

#: What float32 holds without rounding.
_TO_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)


def clipped_sum(
    rows: Sequence[torch.Tensor], clip: _Clip, norms: Sequence[float] | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The sum of contributions, each scaled to the norm of the clip if it is longer, and which of them were.

    rows has the contributions of all examples to one parameter each. A contribution that is not finite counts as zero.
    The sums are int64, in units of the clip. norms are for each parameter, which is then scaled by itself; the sum of their squares
    is at most that of the clip.

    Guarantee: that of dpmf::clip. With norms, every part is scaled to norm at most its share of the target, in proportion
    to its norm: all parts together to at most the target, which is all that is used of it there.
    Cost: on the CPU rows is read twice; elsewhere it is read twice too, in slices, for which 40 MB are needed.
    """
    sums = [torch.zeros(row.shape[1:], dtype=torch.int64, device=row.device) for row in rows]
    return sums, add_clipped(rows, sums, clip, norms)


def add_clipped(
    rows: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
    clip: _Clip,
    norms: Sequence[float] | None = None,
    *,
    by_torch: bool = False,
) -> torch.Tensor:
    """clipped_sum() added to sums, wherever they lie; by_torch takes the operations of PyTorch in the memory of the host too."""
    for row, own in zip(rows, sums):
        if row.shape[1:] != own.shape:
            raise ValueError(
                f"gradients of examples have shape {tuple(row.shape[1:])}, but their parameter has {tuple(own.shape)}: rows and sums "
                "must be of the same parameters"
            )
    on_host = all(row.device.type == own.device.type == "cpu" and row.dtype in _TO_FLOAT32 for row, own in zip(rows, sums))
    add = add_in_place if on_host and not by_torch else add_by_torch
    if norms is None:
        return add(rows, sums, clip)
    longer = torch.zeros(len(rows[0]), dtype=torch.bool, device=rows[0].device)
    for row, own, norm in zip(rows, sums, norms):
        if norm > 0:
            longer |= add([row], [own], clip, norm / clip.norm).to(longer.device)
    return longer


def add_in_place(
    rows: Sequence[torch.Tensor], sums: Sequence[torch.Tensor], clip: _Clip, share: float = 1.0
) -> torch.Tensor:
    """Adds clipped contributions to sums over the memory of the host; returns which were longer than their target."""
    flat = [row.detach().float().reshape(len(row), row.shape[1:].numel()).contiguous() for row in rows]
    longer = clip.add_rows([row.numpy() for row in flat], [own.view(-1).numpy() for own in sums], share)
    return torch.from_numpy(longer)


def add_by_torch(
    rows: Sequence[torch.Tensor], sums: Sequence[torch.Tensor], clip: _Clip, share: float = 1.0
) -> torch.Tensor:
    """The same on any device: elementwise in float64, which autocast and the reduced precision of matrix products leave alone."""
    device, count = rows[0].device, len(rows[0])
    target = share * clip.target
    norms = torch.zeros(count, dtype=torch.float64, device=device)
    for row in rows:
        for part in _slices(row):
            norms += part.double().square().sum(1).to(device)
    norms.sqrt_()
    finite, longer = norms.isfinite(), norms > target
    scales = torch.where(longer, target / norms, torch.ones_like(norms)) / clip.unit
    scales = torch.where(finite, scales, torch.zeros_like(scales))
    for row, own in zip(rows, sums):
        kept, by = finite.to(row.device)[:, None], scales.to(row.device)[:, None]
        first = 0
        for part in _slices(row):
            # Zero times infinity is not zero.
            whole = part.double().masked_fill(~kept, 0.0).mul_(by).round_().to(torch.int64).sum(0)
            own.view(-1)[first : first + len(whole)] += whole.to(own.device)
            first += len(whole)
    return longer | ~finite


def _slices(row: torch.Tensor) -> Iterator[torch.Tensor]:
    """Contributions to some coordinates each, so that their copies in double precision stay small."""
    flat = row.detach().reshape(len(row), row.shape[1:].numel())
    width = max(SLICE // max(len(row), 1), 1)
    return iter(torch.split(flat, width, 1))
