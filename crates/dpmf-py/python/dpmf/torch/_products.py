"""Sums of products, one for each example: bounds of their norms, and their weighted sum, in float64.

What is proved of them is said in _ghost.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: Largest relative error of one operation in float64. Sums of m terms are off by at most m + 1 of it, in any order, for all m that occur.
UNIT = 2.0**-53

#: Numbers that are worked on at once: 32 MB in float64.
SLICE = 1 << 22

#: Numbers of a part of one parameter's sum: 64 MB in float64.
PART = 1 << 23


@dataclass
class Pairs:
    """Σ_t left_t right_tᵀ for each example: one left and right for every product of a layer. left may be places of ones."""

    left: torch.Tensor
    """Numbers of shape (examples, products, rows), or integers of shape (examples, products): the row of each product."""
    right: torch.Tensor
    """Numbers of shape (examples, products, columns)."""

    @property
    def is_lookup(self) -> bool:
        return self.left.dim() == 2

    @property
    def products(self) -> int:
        return self.right.shape[1]


@dataclass
class Rows:
    """The gradient of each example itself, for small parameters: shape (examples, numbers)."""

    values: torch.Tensor


@dataclass
class Norms:
    """For each example, an upper bound of the squared norm, and the square of its reach."""

    square: torch.Tensor
    reach_sq: torch.Tensor


def norms_of_rows(values: torch.Tensor) -> Norms:
    square = values.double().square().sum(1)
    return Norms(square * (1.0 + 4.0 * (values.shape[1] + 16) * UNIT), square * (1.0 + 2.0**-20))


def norms_of_pairs(pairs: Sequence[Pairs], shape: tuple[int, int]) -> Norms:
    """By whichever way takes the least work: rows that were looked up, products with products, or the gradients themselves.

    Sums of κ terms are off by at most 2κ·2⁻⁵³ of what was added up: gradients by as much of the reach, and squares that are sums of
    products by as much of its square.
    """
    rows, columns = shape
    products = sum(pair.products for pair in pairs)
    examples = len(pairs[0].right)
    squares = False
    if all(pair.is_lookup for pair in pairs):
        per_example, terms, one = products * columns, products, _norms_by_row
    elif products * (rows + columns) <= rows * columns or products == 1:
        widest = max(pair.products * columns for pair in pairs)
        squares = True
        per_example, terms, one = 2 * products**2 + widest, products**2 + rows + columns, _norms_by_products
    else:
        per_example, terms, one = rows * columns + products * columns, products, _norms_by_gradients
    square = torch.empty(examples, dtype=torch.float64, device=pairs[0].right.device)
    reach = torch.empty_like(square)
    step = max(1, SLICE // per_example)
    for first in range(0, examples, step):
        block = [Pairs(pair.left[first : first + step], pair.right[first : first + step]) for pair in pairs]
        square[first : first + step], reach[first : first + step] = one(block, rows)
    if not squares:
        return _norms_of_sums(square, reach, terms, rows * columns)
    error, reach = 2.0 * (terms + 16) * UNIT, reach.mul_(1.0 + 2.0**-20)
    square += error * reach.square()
    return Norms(square, reach.square_())


def _norms_of_sums(square: torch.Tensor, reach: torch.Tensor, terms: int, numbers: int) -> Norms:
    """From squared norms of gradients of so many numbers, each a sum of so many terms."""
    reach = reach * (1.0 + 2.0**-20)
    norm = (square * (1.0 + 2.0 * (numbers + 16) * UNIT)).sqrt_()
    return Norms(norm.add_(reach, alpha=2.0 * (terms + 16) * UNIT).square_(), reach.square_())


@dataclass
class Made:
    """Gradients of single examples, of shape (examples, numbers), that were made of products in float64; and their reach."""

    values: torch.Tensor
    reach: torch.Tensor
    products: int

    def norms(self) -> Norms:
        return _norms_of_sums(self.values.square().sum(1), self.reach, self.products, self.values.shape[1])


def is_made(pairs: Sequence[Pairs], shape: tuple[int, int]) -> bool:
    """Whether gradients of single examples take no more memory than what they are made of, as those of adapters of low rank do: then
    they are made once, for norms and sum."""
    rows, columns = shape
    products = sum(pair.products for pair in pairs)
    return 2 * rows * columns <= products * (rows + columns) and not any(pair.is_lookup for pair in pairs)


def make(pairs: Sequence[Pairs], shape: tuple[int, int]) -> Made:
    rows, columns = shape
    examples, device = len(pairs[0].right), pairs[0].right.device
    values = torch.zeros(examples, rows, columns, dtype=torch.float64, device=device)
    reach = torch.zeros(examples, dtype=torch.float64, device=device)
    step = max(1, SLICE // (max(pair.products for pair in pairs) * (rows + columns)))
    for first in range(0, examples, step):
        some = slice(first, first + step)
        for pair in pairs:
            left, right = pair.left[some].double(), pair.right[some].double()
            values[some].baddbmm_(left.transpose(1, 2), right)
            reach[some] += (torch.linalg.vector_norm(left, dim=2) * torch.linalg.vector_norm(right, dim=2)).sum(1)
    return Made(values.view(examples, -1), reach, sum(pair.products for pair in pairs))


def _norms_by_row(pairs: Sequence[Pairs], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds up what goes to one row of an example, then the squares."""
    index = torch.cat([pair.left for pair in pairs], 1)
    right = torch.cat([pair.right for pair in pairs], 1).double()
    examples, products = index.shape
    order = index.argsort(1)
    index = index.gather(1, order)
    place = torch.zeros_like(index)
    place[:, 1:] = (index[:, 1:] != index[:, :-1]).cumsum(1)
    place += torch.arange(examples, device=index.device)[:, None] * products
    sorted_right = right.gather(1, order[:, :, None].expand_as(right))
    sums = torch.zeros(examples * products, right.shape[2], dtype=torch.float64, device=right.device)
    sums.index_add_(0, place.reshape(-1), sorted_right.reshape(-1, right.shape[2]))
    square = sums.square_().sum(1).view(examples, products).sum(1)
    return square, right.square().sum(2).sqrt_().sum(1)


def _norms_by_products(pairs: Sequence[Pairs], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """‖Σ_t l_t r_tᵀ‖² = Σ_tu (l_t·l_u)(r_t·r_u)."""
    device = pairs[0].right.device
    square = torch.zeros(len(pairs[0].right), dtype=torch.float64, device=device)
    reach = torch.zeros_like(square)
    for number, one in enumerate(pairs):
        lefts, rights = _products(one.left, one.left), _products(one.right, one.right)
        of_each = lefts.diagonal(dim1=1, dim2=2) * rights.diagonal(dim1=1, dim2=2)
        reach += of_each.sqrt_().sum(1)
        square += lefts.mul_(rights).sum((1, 2))
        for other in pairs[:number]:
            crossed = _products(one.left, other.left).mul_(_products(one.right, other.right))
            square += 2.0 * crossed.sum((1, 2))
    return square, reach


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a_t·b_u for all t, u of each example."""
    if a.dim() == 2 and b.dim() == 2:
        return (a[:, :, None] == b[:, None, :]).double()
    if a.dim() == 2:
        return b.gather(2, a[:, None, :].expand(-1, b.shape[1], -1)).transpose(1, 2).double()
    if b.dim() == 2:
        return a.gather(2, b[:, None, :].expand(-1, a.shape[1], -1)).double()
    total = torch.zeros(len(a), a.shape[1], b.shape[1], dtype=torch.float64, device=a.device)
    step = max(1, SLICE // (len(a) * max(a.shape[1], b.shape[1])))
    for first in range(0, a.shape[2], step):
        x = a[:, :, first : first + step].double()
        y = x if b is a else b[:, :, first : first + step].double()
        total.baddbmm_(x, y.transpose(1, 2))
    return total


def _norms_by_gradients(pairs: Sequence[Pairs], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the gradients of some examples, some rows at a time."""
    columns, examples = pairs[0].right.shape[2], len(pairs[0].right)
    rights = [pair.right.double() for pair in pairs]
    lengths = [torch.zeros(pair.right.shape[:2], dtype=torch.float64, device=pair.right.device) for pair in pairs]
    square = torch.zeros(examples, dtype=torch.float64, device=pairs[0].right.device)
    step = max(1, SLICE // (examples * columns))
    for first in range(0, rows, step):
        size = min(step, rows - first)
        made = torch.zeros(examples, size, columns, dtype=torch.float64, device=square.device)
        for pair, right, length in zip(pairs, rights, lengths):
            if pair.is_lookup:
                base = torch.arange(examples, device=square.device)[:, None] * size
                _add_looked_up(made.view(-1, columns), pair.left, base, range(first, first + size), right)
                length += (pair.left >= first) & (pair.left < first + size)
            else:
                left = pair.left[:, :, first : first + size].double()
                made.baddbmm_(left.transpose(1, 2), right)
                length += left.square_().sum(2)
        square += made.square_().sum((1, 2))
    reach = sum((length * right.square().sum(2)).sqrt_().sum(1) for length, right in zip(lengths, rights))
    return square, reach  # type: ignore[return-value]


def _add_looked_up(
    total: torch.Tensor, index: torch.Tensor, base: torch.Tensor | int, some: range, values: torch.Tensor
) -> None:
    """Adds values to those of their rows that are some of all rows."""
    inside = (index >= some.start) & (index < some.stop)
    place = torch.where(inside, index - some.start, torch.zeros_like(index)) + base
    values = values.masked_fill(~inside[..., None], 0.0)
    total.index_add_(0, place.reshape(-1), values.reshape(-1, values.shape[-1]))


#: Takes a part of a parameter's sum: the first row, and numbers of that row and those that follow.
Take = Callable[[int, torch.Tensor], None]


def sum_rows(values: torch.Tensor, weights: torch.Tensor, take: Take, shape: torch.Size) -> None:
    dropped = weights == 0.0
    if weights.device.type != "cpu" or bool(dropped.any()):
        values = values.masked_fill(dropped[:, None], 0.0)
    take(0, (weights @ values.double()).view(shape))


def sum_pairs(pairs: Sequence[Pairs], weights: torch.Tensor, take: Take, rows: int) -> None:
    """Σ_i w_i Σ_t l_t r_tᵀ in float64, some rows at a time. Examples of weight zero may hold anything."""
    columns, device = pairs[0].right.shape[2], weights.device
    all_kept = device.type == "cpu" and bool((weights != 0.0).all())
    step = max(1, PART // columns)
    for first in range(0, rows, step):
        size = min(step, rows - first)
        total = torch.zeros(size, columns, dtype=torch.float64, device=device)
        for pair in pairs:
            by = weights[:, None].expand(-1, pair.products).reshape(-1)
            right = pair.right.reshape(-1, columns)
            left = pair.left.reshape(len(right), -1)[:, 0 if pair.is_lookup else slice(first, first + size)]
            block = max(1, SLICE // (columns + size))
            for begin in range(0, len(right), block):
                some = slice(begin, begin + block)
                y = right[some].double()
                if not all_kept:
                    y = y.masked_fill_((by[some] == 0.0)[:, None], 0.0)
                y *= by[some, None]
                if pair.is_lookup:
                    _add_looked_up(total, left[some], 0, range(first, first + size), y)
                    continue
                x = left[some].double()
                if not all_kept:
                    x = x.masked_fill_((by[some] == 0.0)[:, None], 0.0)
                total.addmm_(x.t(), y)
        take(first, total)
