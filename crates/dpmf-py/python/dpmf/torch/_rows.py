"""Whether the per-sample gradients of Opacus' hooks are those of each example alone.

Hooks see activations by their place in the batch. A module that sorts, shuffles or mixes its examples puts parts of one example
into the rows of others, each of which is clipped by itself: one example then counts for several clips.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .._errors import MismatchError
from ._gradients import Kept

#: Examples that are compared, in both orders.
EXAMPLES = 6

#: Relative difference of two gradients that single precision explains.
TOLERANCE = 1e-3


class UncheckedModelWarning(UserWarning):
    """It could not be checked that each row of per-sample gradients is that of one example."""


def warn_unchecked(reason: str) -> None:
    warnings.warn(
        f"it could not be checked that each per-sample gradient is that of one example alone ({reason}); if the module sorts, "
        "shuffles or mixes the examples of a batch, the guarantee does not hold",
        UncheckedModelWarning,
        stacklevel=3,
    )


def check_rows(module: Any, *, batch_first: bool, mean: bool) -> None:
    """Compares, at the first forward pass in training, some rows of a GradSampleModule with the gradients of examples alone.

    Refuses a module whose rows differ; warns where it cannot be told, because the module draws random numbers, or takes no batch of
    one example.
    """
    handles: list[Any] = []

    def before(_: Any, inputs: tuple[Any, ...], named: dict[str, Any] | None = None) -> None:
        if not (module.training and torch.is_grad_enabled() and module.hooks_enabled):
            return
        probe = _Probe(module, inputs, named or {}, 0 if batch_first else 1, mean)
        if probe.length < 2:
            return  # one example tells nothing of others
        handles.pop().remove()
        probe.check()

    try:
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
    except TypeError:  # PyTorch 1
        handles.append(module.register_forward_pre_hook(before))


class _Probe:
    def __init__(self, module: Any, inputs: tuple[Any, ...], named: dict[str, Any], axis: int, mean: bool) -> None:
        self.module, self.inputs, self.axis, self.mean = module, (inputs, named), axis, mean
        leaves: list[torch.Tensor] = []
        _each(self.inputs, leaves.append)
        lengths = [leaf.shape[axis] for leaf in leaves if leaf.dim() > axis]
        self.whole = lengths[0] if lengths else 0
        self.length = min(self.whole, EXAMPLES)

    def check(self) -> None:
        kept = Kept(self.module, values=True)
        try:
            with undisturbed(self.module):
                difference = max(self._difference(range(self.length)), self._difference(range(self.length)[::-1]))
        except MismatchError:
            raise
        except Exception as failed:  # the module's own
            kept.check()
            warn_unchecked(f"{type(failed).__name__}: {failed}")
            return
        kept.check()
        if difference > TOLERANCE:
            raise MismatchError(
                "the per-sample gradients of Opacus' hooks are not those of each example alone (they differ by "
                f"{100 * difference:.2g} %): the module sorts, shuffles or mixes the examples of a batch, so that parts of one "
                "example would be clipped with others. Let every output depend on its own example only, or use dpmf.torch, which "
                "differentiates each example by itself"
            )

    def _difference(self, order: Sequence[int]) -> float:
        """The largest relative difference between a row and the gradient of its example alone."""
        rows = self._rows(order, 0)
        again = self._rows(order, 1)
        if self._apart(rows, again) > TOLERANCE:
            warn_unchecked("the module draws random numbers")
            return 0.0
        return self._apart(rows, [self._alone(order, place) for place in range(len(order))])

    @staticmethod
    def _apart(rows: list[torch.Tensor], others: list[torch.Tensor]) -> float:
        longest = max(float(other.norm()) for other in others)
        least = 1e-3 * longest + torch.finfo(torch.float32).tiny
        return max(float((row - other).norm()) / max(float(other.norm()), least) for row, other in zip(rows, others))

    def _rows(self, order: Sequence[int], seed: int) -> list[torch.Tensor]:
        """Per-sample gradients, each flat, of some examples together."""
        for p in self.module.parameters():
            p.grad_sample = p.grad = None
        torch.manual_seed(seed)
        outputs = self._run(order)
        #: Which outputs are of examples; none where there is only a loss of all of them.
        self.of_examples = [place for place, output in enumerate(outputs) if output.dim()]
        self.several = bool(self.of_examples)
        outputs = self._chosen(outputs)
        parts = [(weight * output).sum() for weight, output in zip(self._weights(outputs, len(order)), outputs)]
        (torch.stack(parts).sum() / (len(order) if self.mean and self.several else 1)).backward()
        samples = [p.grad_sample for p in self.module.parameters() if getattr(p, "grad_sample", None) is not None]
        rows = [torch.cat([sample[place].reshape(-1) for sample in samples]) for place in range(len(order))]
        self.trained = [p for p in self.module.parameters() if getattr(p, "grad_sample", None) is not None]
        return rows

    def _alone(self, order: Sequence[int], place: int) -> torch.Tensor:
        """The gradient of the same weights of one example, without any other."""
        self.module.disable_hooks()
        try:
            torch.manual_seed(0)
            outputs = self._chosen(self._run(order[place : place + 1]))
            weights = self._weights(outputs, len(order), place)
            total = torch.stack([(weight * output).sum() for weight, output in zip(weights, outputs)]).sum()
            gradients = torch.autograd.grad(total, self.trained, allow_unused=True)
        finally:
            self.module.enable_hooks()
        flat = [torch.zeros_like(p) if one is None else one for one, p in zip(gradients, self.trained)]
        return torch.cat([one.reshape(-1) for one in flat])

    def _run(self, order: Sequence[int]) -> list[torch.Tensor]:
        """The outputs that have a gradient."""
        chosen = torch.tensor(list(order))

        def cut(leaf: torch.Tensor) -> torch.Tensor:
            leaf = leaf.float() if leaf.dtype in (torch.float16, torch.bfloat16) else leaf
            if leaf.dim() <= self.axis or leaf.shape[self.axis] != self.whole:
                return leaf
            return leaf.detach().index_select(self.axis, chosen.to(leaf.device))

        positional, named = _each(self.inputs, cut)
        leaves: list[torch.Tensor] = []
        _each(self.module._module(*positional, **named), leaves.append)
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        if not leaves:
            raise ValueError("no output has a gradient")
        return leaves

    def _chosen(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of examples or, if there are none, the losses."""
        return [outputs[place] for place in self.of_examples] if self.several else outputs

    def _weights(self, outputs: list[torch.Tensor], length: int, place: int | None = None) -> list[torch.Tensor]:
        """Weights of the outputs of so many examples, or of one of them; the same at every call."""
        if not self.several:
            return [torch.ones_like(output) for output in outputs]
        generator = torch.Generator().manual_seed(length)
        weights = []
        for output in outputs:
            if place is not None:
                drawn = torch.randn(length, output.numel(), generator=generator)[place]
                weights.append(drawn.reshape(output.shape).to(output))
                continue
            axis = self.axis if output.dim() > self.axis and output.shape[self.axis] == length else 0
            rest = [size for at, size in enumerate(output.shape) if at != axis]
            drawn = torch.randn(length, output.numel() // length, generator=generator)
            weights.append(drawn.reshape(length, *rest).movedim(0, axis).to(output))
        return weights


def _each(tree: Any, act: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return act(tree)
    if isinstance(tree, dict) or hasattr(tree, "items"):
        return {name: _each(value, act) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return tuple(_each(value, act) for value in tree)
    return tree


@contextlib.contextmanager
def undisturbed(module: Any) -> Iterator[None]:
    """Without autocast and dropout; leaves gradients, per-sample gradients and random numbers as they were."""
    before = [(p, p.grad, getattr(p, "grad_sample", None)) for p in module.parameters()]
    dropouts = [part for part in module.modules() if isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.training]
    for part in dropouts:
        part.eval()
    try:
        with torch.random.fork_rng(), contextlib.ExitStack() as without:
            for device in {p.device.type for p in module.parameters()}:
                without.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        for part in dropouts:
            part.train()
        for p, gradient, sample in before:
            p.grad, p.grad_sample = gradient, sample
