"""grad_sample_mode="ghost" of dpmf.opacus: Opacus' way to call ghost clipping, and the sums of dpmf.torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule

from .torch._ghost import Contributions, Ghost

#: Opacus' wrapper of a criterion; object where Opacus has none.
OpacusCriterion: Any = object
with contextlib.suppress(ImportError):  # Opacus before 1.5
    from opacus.utils import fast_gradient_clipping_utils

    OpacusCriterion = fast_gradient_clipping_utils.DPLossFastGradientClipping


class GhostModule(AbstractGradSampleModule):
    """A module whose layers keep, in training, what its trained parameters need for the next backward()."""

    def __init__(self, module: torch.nn.Module, trained: Callable[[torch.nn.Module], dict[str, torch.Tensor]], reduction: str) -> None:
        super().__init__(module, batch_first=True, loss_reduction=reduction)
        self._trained = trained
        self._ghost: Ghost | None = None
        self._open = contextlib.ExitStack()
        #: Whether a forward pass waits for its backward().
        self._waits = False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.forget()
        if not (self.training and torch.is_grad_enabled()):
            return self._module(*inputs, **named)
        ghost = Ghost(self._module, self._trained(self._module))
        ghost.take_over(self._ghost)
        parts = (inputs, named, ())
        examples = _length_of(parts)
        if examples == 0:
            return self._module(*inputs, **named)
        with contextlib.ExitStack() as opening:
            opening.enter_context(ghost.opened())
            ghost.check(parts, _fixed_loss, vectorize=False)
            outputs = ghost.forward(parts, examples)
            self._open = opening.pop_all()
        self._ghost, self._waits = ghost, True
        return outputs

    def forget(self) -> None:
        """Ends the recording that a forward pass began."""
        self._waits = False
        self._open.close()

    def backward(self, losses: torch.Tensor) -> Contributions | None:
        """What examples add to the gradients, by the losses of the last forward pass; None for no examples."""
        if not self._waits:
            if len(losses) == 0:
                return None
            raise ValueError(
                "backward() was called without a forward pass of the module in training: call criterion(model(inputs), targets).backward() once "
                "for each batch, after model.train()"
            )
        ghost = self._ghost
        assert ghost is not None
        try:
            return ghost.finish(losses)
        finally:
            self.forget()

    def remove_hooks(self) -> None:
        """Leaves the module as it was."""
        self.forget()


class GhostCriterion(OpacusCriterion):
    """Opacus' wrapper of a criterion: the losses of all examples, whose backward() clips."""

    def __call__(self, *inputs: Any, shape: Any = None, **named: Any) -> ExampleLosses:
        """shape is that of the logits before tokens and examples became one axis."""
        losses = super().__call__(*inputs, shape=shape, **named).loss_per_sample
        return ExampleLosses(self, losses)


class ExampleLosses:
    """The loss of each example. It can be added, scaled and read like a loss."""

    def __init__(self, criterion: GhostCriterion, losses: torch.Tensor) -> None:
        self.criterion, self.losses = criterion, losses

    def _reduced(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.mean() if self.criterion.loss_reduction == "mean" else losses.sum()

    def detach(self) -> torch.Tensor:
        """The mean, or the sum, of all examples."""
        return self._reduced(self.losses.detach())

    def item(self) -> float:
        """The mean, or the sum, of all examples."""
        return float(self.detach())

    def _with(self, losses: torch.Tensor) -> ExampleLosses:
        return ExampleLosses(self.criterion, losses)

    def __add__(self, other: Any) -> ExampleLosses:
        return self._with(self.losses + (other.losses if isinstance(other, ExampleLosses) else other))

    def __sub__(self, other: Any) -> ExampleLosses:
        return self.__add__(-other)

    def __rsub__(self, other: Any) -> ExampleLosses:
        return (-self).__add__(other)

    def __mul__(self, other: Any) -> ExampleLosses:
        return self._with(self.losses * other)

    def __truediv__(self, other: Any) -> ExampleLosses:
        return self._with(self.losses / other)

    def __neg__(self) -> ExampleLosses:
        return self._with(-self.losses)

    __radd__, __rmul__ = __add__, __mul__

    def __repr__(self) -> str:
        return f"ExampleLosses({self.item():.4f}, of {len(self.losses)} examples)"

    def backward(self) -> None:
        """Clips the gradient of every example and adds it to the coming step."""
        losses = self.losses
        if losses.dim() > 1:
            losses = losses.flatten(1)
            losses = losses.mean(1) if self.criterion.loss_reduction == "mean" else losses.sum(1)
        self.criterion.optimizer.add_contributions(len(losses), self.criterion.module.backward(losses))


def _length_of(parts: Any) -> int:
    lengths = [len(one) for one in torch.utils._pytree.tree_leaves(parts) if isinstance(one, torch.Tensor) and one.dim()]
    if not lengths or any(length != lengths[0] for length in lengths):
        raise ValueError(f"the inputs have leading axes {lengths}, but ghost clipping needs one axis of examples, the same for all inputs")
    return lengths[0]


def _fixed_loss(outputs: Any, _: Any) -> torch.Tensor:
    """Any loss of one example: the comparison in the first step does not depend on which loss it is."""
    generator = torch.Generator().manual_seed(1)
    leaves = [one for one in torch.utils._pytree.tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad]
    return torch.stack([(one * torch.randn(one.shape, generator=generator).to(one)).sum() for one in leaves]).sum()
