"""What layers do with their parameters: the products that each example adds to the gradients of a layer's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from ._products import Pairs, Rows

#: Half precision.
HALF = (torch.float16, torch.bfloat16)


@dataclass
class Call:
    """One call of a layer."""

    place: Place
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    #: Examples, and the gradient of the output, once it is known.
    examples: int
    gradient: torch.Tensor | None = None

    def take(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient.detach()

    @property
    def input(self) -> torch.Tensor:
        """The only input of a layer of known kind."""
        found: torch.Tensor = self.inputs[0] if self.inputs else next(iter(self.named.values()))
        return found.detach()

    def folded(self, tensor: torch.Tensor, features: int = 1) -> torch.Tensor:
        """With all axes between the examples and the last ones made one."""
        return tensor.reshape(self.examples, -1, *tensor.shape[tensor.dim() - features :])


#: What each of its own parameters gets from a call.
Pieces = Iterable[tuple[str, "Pairs | Rows"]]


def _summed(tensor: torch.Tensor) -> Rows:
    """Of shape (examples, products, numbers), added up over the products."""
    return Rows(tensor.sum(1, dtype=torch.float64))


def _linear(call: Call) -> Pieces:
    gradient = call.folded(_given(call))
    yield "weight", Pairs(gradient, call.folded(call.input))
    yield "bias", _summed(gradient)


def _transposed_linear(call: Call) -> Pieces:
    gradient = call.folded(_given(call))
    yield "weight", Pairs(call.folded(call.input), gradient)
    yield "bias", _summed(gradient)


def _embedding(call: Call) -> Pieces:
    gradient, index = call.folded(_given(call)), call.input.reshape(call.examples, -1)
    padding = call.place.part.padding_idx
    if padding is not None:
        gradient = gradient.masked_fill((index == padding)[:, :, None], 0.0)
    yield "weight", Pairs(index, gradient)


def _layer_norm(call: Call) -> Pieces:
    part, x = call.place.part, call.input
    normal = functional.layer_norm(single(x), part.normalized_shape, None, None, part.eps)
    return _normalised(call, normal, len(part.normalized_shape))


def _rms_norm(call: Call) -> Pieces:
    part, x = call.place.part, call.input
    return _normalised(call, functional.rms_norm(single(x), part.normalized_shape, None, part.eps), len(part.normalized_shape))


def _normalised(call: Call, normal: torch.Tensor, features: int) -> Pieces:
    gradient = _given(call)
    yield "weight", _summed(call.folded(single(gradient) * normal, features).flatten(2))
    yield "bias", _summed(call.folded(gradient, features).flatten(2))


def _group_norm(call: Call) -> Pieces:
    part, gradient = call.place.part, _given(call)
    normal = functional.group_norm(single(call.input), part.num_groups, None, None, part.eps)

    def by_channel(tensor: torch.Tensor) -> Rows:
        of_each = tensor.reshape(*tensor.shape[:2], -1).sum(2, dtype=torch.float64)
        return Rows(call.folded(of_each).sum(1))

    yield "weight", by_channel(single(gradient) * normal)
    yield "bias", by_channel(gradient)


def _convolution(call: Call) -> Pieces:
    part = call.place.part
    x, gradient = call.input, _given(call)
    kernel, dilation, padding, stride = part.kernel_size, part.dilation, part.padding, part.stride
    if len(kernel) == 1:
        x = x.unsqueeze(2)
        kernel, dilation, padding, stride = (1, *kernel), (1, *dilation), (0, *padding), (1, *stride)
    patches = functional.unfold(x, kernel, dilation=dilation, padding=padding, stride=stride)
    gradient = call.folded(gradient.flatten(2).transpose(1, 2))
    yield "weight", Pairs(gradient, call.folded(patches.transpose(1, 2)))
    yield "bias", _summed(gradient)


def _any(call: Call) -> Pieces:
    """A layer of any kind, differentiated for each example by vmap: its parameters are taken to be small."""
    part = call.place.part
    own = {name: part._parameters[name].detach() for name in call.place.own}

    def one(inputs: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor], gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        def run(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            given = tuple(x.unsqueeze(0) for x in inputs)
            others = {name: x.unsqueeze(0) for name, x in named.items()}
            made: torch.Tensor = torch.func.functional_call(part, parameters, given, others)
            return made

        back = torch.func.vjp(run, own)[1]
        found: dict[str, torch.Tensor] = back(gradient.unsqueeze(0))[0]
        return found

    try:
        found = torch.func.vmap(one)(call.inputs, call.named, _given(call))
    except RuntimeError as failed:
        raise ValueError(
            f"torch's vmap cannot differentiate {call.place.name or type(part).__name__} for all examples at once ({failed}): freeze it, or "
            'pass clipping="per-example"'
        ) from failed
    for name, values in found.items():
        yield name, _summed(values.detach().reshape(call.examples, -1, own[name].numel()))


def _given(call: Call) -> torch.Tensor:
    assert call.gradient is not None
    return call.gradient


def single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _from(part: torch.nn.Module, kind: str) -> bool:
    """Whether it computes what a layer of torch.nn does."""
    layer = getattr(torch.nn, kind, None)
    return layer is not None and isinstance(part, layer) and type(part).forward is layer.forward


def way_of(part: Any, own: Sequence[str], name: str) -> Callable[[Call], Pieces]:
    """How the parameters of a layer get their gradients."""
    if _from(part, "Linear") and set(own) <= {"weight", "bias"}:
        return _linear
    if _from(part, "Embedding"):
        if part.max_norm is not None or part.scale_grad_by_freq:
            raise ValueError(
                f"{name} has max_norm or scale_grad_by_freq, which depend on all examples of a batch: make the embedding without them"
            )
        return _embedding
    if type(part).__name__ == "Conv1D" and hasattr(part, "nf") and part.weight.dim() == 2 and set(own) <= {"weight", "bias"}:
        return _transposed_linear
    for kind, way in (("LayerNorm", _layer_norm), ("RMSNorm", _rms_norm), ("GroupNorm", _group_norm)):
        if _from(part, kind):
            return way
    if (_from(part, "Conv1d") or _from(part, "Conv2d")) and set(own) <= {"weight", "bias"}:
        if part.groups == 1 and part.padding_mode == "zeros" and not isinstance(part.padding, str):
            return _convolution
    if next(part.children(), None) is not None:
        raise ValueError(
            f"parameter {name}.{own[0]} belongs to {type(part).__name__}, which contains other layers, so that no layer shows how it "
            'is used: freeze it with requires_grad_(False), put it into a layer of its own, or pass clipping="per-example"'
        )
    return _any


#: Inputs of a layer have entries for each example, or are the same for all of them, with an axis of length one in their place or
#: without.
OWN, ONE, ALL = "own", "one", "all"


@dataclass
class Place:
    """A layer that is trained."""

    name: str
    part: Any
    #: Its trained parameters, and the names they have in the module.
    own: dict[str, str]
    way: Callable[[Call], Pieces] = field(repr=False)
