"""Parameters in bfloat16, trained through masters in float32.

bfloat16 has 8 binary digits: most steps of an optimizer, and most of the noise, would be lost in rounding. So the optimizer steps
masters in float32. Clipped sums and noise are those of the masters, and a parameter is its master rounded to bfloat16: it follows
from what was released, so rounding it costs no privacy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._errors import BindingError


class Masters:
    """The float32 masters of an optimizer's parameters in bfloat16, which stand in its groups in place of the parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        #: Parameters of the model, each with its master.
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Groups and states as they were.
        self._before: list[tuple[dict[str, Any], list[Any]]] = []
        self._states: dict[Any, Any] = {}
        made: dict[int, torch.Tensor] = {}
        for group in optimizer.param_groups:
            given = list(group["params"])
            if any(getattr(p, "is_dpmf_master", False) for p in given):
                raise BindingError(
                    "this optimizer steps the float32 masters of another PrivateOptimizer, which the model would no longer follow: make a new "
                    "optimizer for every run"
                )
            for p in given:
                if p.dtype == torch.bfloat16 and id(p) not in made:
                    made[id(p)] = torch.nn.Parameter(p.detach().float(), requires_grad=p.requires_grad)
                    made[id(p)].is_dpmf_master = True  # type: ignore[attr-defined]
                    self.pairs.append((p, made[id(p)]))
            self._before.append((group, given))
            group["params"] = [made.get(id(p), p) for p in given]
        for p, master in self.pairs:
            if p in optimizer.state:
                self._states[p] = optimizer.state.pop(p)
                optimizer.state[master] = {name: _widened(value) for name, value in self._states[p].items()}

    def remove(self) -> None:
        """Leaves the optimizer as it was."""
        for group, given in self._before:
            group["params"] = given
        for p, master in self.pairs:
            self.optimizer.state.pop(master, None)
            if p in self._states:
                self.optimizer.state[p] = self._states[p]

    @torch.no_grad()
    def follow(self) -> None:
        """Takes over what was done to the parameters since the last step: numbers that were written into them, and what is frozen.

        A master whose parameter was left alone keeps all of its digits.
        """
        for number, (p, master) in enumerate(self.pairs):
            if p.shape != master.shape:
                raise ValueError(
                    f"parameter {number} in bfloat16 has shape {tuple(p.shape)}, and had {tuple(master.shape)} when the noise was laid out"
                )
            now = p.detach().to(master.device)
            master.copy_(torch.where(now == master.to(now.dtype), master, now.float()))
            master.requires_grad_(p.requires_grad)

    @torch.no_grad()
    def round(self) -> None:
        """Rounds the masters into the parameters."""
        for p, master in self.pairs:
            p.copy_(master)

    def state(self) -> list[torch.Tensor]:
        """The masters, for a checkpoint; none where all parameters are in float32."""
        return [master.detach() for _, master in self.pairs]

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuses a checkpoint whose masters are others than these."""
        saved = [tuple(master.shape) for master in state.get("masters", [])]
        own = [tuple(master.shape) for _, master in self.pairs]
        if saved != own:
            raise BindingError(
                f"the state has {len(saved)} float32 masters of parameters in bfloat16, and this optimizer has {len(own)}"
                f"{', of other shapes' * (len(saved) == len(own))}: resume with a model whose parameters have the types and shapes that they "
                "had when the run began"
            )

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with the masters of a checkpoint, and rounds them into the parameters."""
        for (_, master), saved in zip(self.pairs, state.get("masters", [])):
            master.copy_(saved)
        self.round()


def _widened(value: Any) -> Any:
    """What an optimizer keeps of a parameter, in float32."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value
