"""Two small networks, and the sum of their clipped per-example gradients without a gradient for every example.

The gradient of a linear layer for one example is an outer product δaᵀ, so its squared norm is ‖δ‖²‖a‖² and a sum of scaled
gradients is one product of matrices. A convolution is a linear layer over its patches; its gradients, which are small, are
made. Both are the numbers that Opacus' hooks give, some twenty times sooner; reproduce/fashion.py compares them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import conv_transpose2d, unfold


def clip_factors(norms_sq: torch.Tensor, clip: float) -> torch.Tensor:
    """As Opacus' DPOptimizer has them."""
    return (clip / (norms_sq.sqrt() + 1e-6)).clamp(max=1.0)


def output_error(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Gradient of every example's cross entropy in its logits."""
    error = torch.softmax(logits, 1)
    error[torch.arange(len(labels)), labels] -= 1
    return error


def squares(rows: torch.Tensor) -> torch.Tensor:
    return rows.flatten(1).square().sum(1)


class Perceptron:
    """784-64-10, tanh: 50 890 parameters."""

    @staticmethod
    def module() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10))

    @staticmethod
    def prepare(images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).contiguous()

    @staticmethod
    def forward(parameters: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w1, b1, w2, b2 = parameters
        h = torch.tanh(torch.addmm(b1, x, w1.t()))
        return torch.addmm(b2, h, w2.t()), h

    @classmethod
    def clipped_sum(cls, parameters, x, labels, clip: float, out: list[torch.Tensor]) -> None:
        """Writes the sum of the clipped gradients into out, laid out as the parameters."""
        _, _, w2, _ = parameters
        logits, h = cls.forward(parameters, x)
        d2 = output_error(logits, labels)
        d1 = (d2 @ w2) * (1 - h * h)
        factors = clip_factors(squares(d2) * (squares(h) + 1) + squares(d1) * (squares(x) + 1), clip)[:, None]
        d1 *= factors
        d2 *= factors
        torch.mm(d1.t(), x, out=out[0])
        torch.sum(d1, 0, out=out[1])
        torch.mm(d2.t(), h, out=out[2])
        torch.sum(d2, 0, out=out[3])


class Convolutional:
    """Two convolutions with strides, two linear layers, tanh: 24 506 parameters."""

    @staticmethod
    def module() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 12, 5, stride=2), nn.Tanh(), nn.Conv2d(12, 24, 4, stride=2), nn.Tanh(),
            nn.Flatten(), nn.Linear(600, 32), nn.Tanh(), nn.Linear(32, 10),
        )

    @staticmethod
    def prepare(images: torch.Tensor) -> torch.Tensor:
        return images.view(-1, 1, 28, 28).contiguous()

    @staticmethod
    def forward(parameters: list[torch.Tensor], x: torch.Tensor):
        k1, c1, k2, c2, w3, b3, w4, b4 = parameters
        patches1 = unfold(x, 5, stride=2)  # n × 25 × 144
        h1 = torch.tanh(k1.view(12, 25) @ patches1 + c1[:, None])
        patches2 = unfold(h1.view(-1, 12, 12, 12), 4, stride=2)  # n × 192 × 25
        h2 = torch.tanh(k2.view(24, 192) @ patches2 + c2[:, None])
        flat = h2.reshape(-1, 600)
        h3 = torch.tanh(torch.addmm(b3, flat, w3.t()))
        return torch.addmm(b4, h3, w4.t()), (patches1, h1, patches2, h2, flat, h3)

    @classmethod
    def clipped_sum(cls, parameters, x, labels, clip: float, out: list[torch.Tensor]) -> None:
        for part in out:
            part.zero_()
        # Parts of a batch: the gradients of the second convolution are 18 KB for every example.
        for first in range(0, len(x), 256):
            cls._add(parameters, x[first:first + 256], labels[first:first + 256], clip, out)

    @classmethod
    def _add(cls, parameters, x, labels, clip: float, out: list[torch.Tensor]) -> None:
        _, _, k2, _, w3, _, w4, _ = parameters
        logits, (patches1, h1, patches2, h2, flat, h3) = cls.forward(parameters, x)
        d4 = output_error(logits, labels)
        d3 = (d4 @ w4) * (1 - h3 * h3)
        d2 = (d3 @ w3).view_as(h2) * (1 - h2 * h2)
        back = conv_transpose2d(d2.view(-1, 24, 5, 5), k2, stride=2).view_as(h1)
        d1 = back * (1 - h1 * h1)
        g2, g1 = torch.bmm(d2, patches2.transpose(1, 2)), torch.bmm(d1, patches1.transpose(1, 2))
        e2, e1 = d2.sum(2), d1.sum(2)
        norms_sq = squares(d4) * (squares(h3) + 1) + squares(d3) * (squares(flat) + 1)
        factors = clip_factors(norms_sq + squares(g2) + squares(e2) + squares(g1) + squares(e1), clip)
        out[0].view(-1).add_(factors @ g1.flatten(1))
        out[1].add_(factors @ e1)
        out[2].view(-1).add_(factors @ g2.flatten(1))
        out[3].add_(factors @ e2)
        d3 *= factors[:, None]
        d4 *= factors[:, None]
        out[4].addmm_(d3.t(), flat)
        out[5].add_(d3.sum(0))
        out[6].addmm_(d4.t(), h3)
        out[7].add_(d4.sum(0))


NETWORKS = {"perceptron": Perceptron, "convolutional": Convolutional}
