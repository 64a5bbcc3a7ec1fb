"""Clipped sums without gradients example by example.

A layer's gradient for one example is a sum of products of what went in (activations) and what came back (gradients of its output).
Norms follow from the products alone, and so does the clipped sum: it is taken from the same numbers, in float64, without a second
backward pass. Memory is that of the activations, of the gradients of the outputs, and of the sum.

Guarantee. What counts for example i is G_i = Σ_t l_t r_tᵀ in real numbers, for the float32 (or bfloat16) numbers l, r that the module
gave: a function of this example alone. Its norm is bounded from above, N_i ≥ ‖G_i‖, by sums in float64 with their rounding errors added.
With the reach A_i = Σ_t ‖l_t‖‖r_t‖, the example is scaled by s_i ≤ min(1, ζ'/N_i, Kζ'/A_i). A sum of m products in float64, in any
order, is off by at most (m + 4)·2⁻⁵³ of Σ_i s_i A_i ≤ nKζ'. So two neighbours, one of which lacks an example, move the sum apart by at most
ζ'(1 + y) and by z for rounding to the grid of the clip, with y = 2(m + 4)nK·2⁻⁵³ and z = 2⁻³²√d; ζ' = ζ(1 − x) with x = y + z + 2⁻⁴⁰ makes
that at most ζ. x is the charge.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._core import _Clip
from .._errors import MismatchError
from ._gradients import REMEMBERS, Kept, check_module, cut_examples
from ._layers import ALL, HALF, ONE, OWN, Call, Place, single, way_of
from ._products import UNIT, Norms, Pairs, is_made, make, norms_of_pairs, norms_of_rows, sum_pairs, sum_rows
from ._random import RandomState, random_numbers_kept, seed_all
from ._rows import EXAMPLES, TOLERANCE, UncheckedModelWarning, undisturbed, warn_unchecked
from ._sharded import whole, without_gathering

__all__ = ["Contributions", "Ghost", "UncheckedModelWarning", "charge"]

#: How much longer the products of an example may be together than their sum: K above. Beyond, an example is scaled down further.
REACH = 2.0**14

#: Share of the clip that may be given up for rounding errors.
MOST_CHARGED = 0.005

#: Relative difference of two gradients that half precision explains.
TOLERANCE_OF_HALF = 0.1

#: Numbers of the outputs of one example from which its loss is computed by itself, on the CPU.
WIDE = 1 << 15


def charge(examples: int, products: int, dimension: int) -> float:
    """Share x of the clip that is given up, so that a sum of so many products in float64 moves by at most the clip."""
    sums = 2.0 * (products + 4) * UNIT * examples * REACH
    return sums + 2.0**-32 * math.sqrt(dimension) + 2.0**-40


class Contributions:
    """What some examples add to the gradients, as pieces of which neither the norms nor the clipped sum needs each by itself."""

    def __init__(self, calls: Sequence[Call], losses: torch.Tensor, shapes: Mapping[str, torch.Size], dimension: int) -> None:
        self.losses, self.shapes, self.dimension = losses, shapes, dimension
        self.examples = len(losses)
        self.pairs: dict[str, list[Pairs]] = {}
        self.rows: dict[str, torch.Tensor] = {}
        for call in calls:
            if call.gradient is None:
                continue  # the loss does not depend on it
            for attribute, piece in call.place.way(call):
                name = call.place.own.get(attribute)
                if name is None:
                    continue
                if isinstance(piece, Pairs):
                    self.pairs.setdefault(name, []).append(piece)
                elif name in self.rows:
                    self.rows[name] = self.rows[name] + piece.values
                else:
                    self.rows[name] = piece.values
            call.gradient = None
        both = self.pairs.keys() & self.rows.keys()
        if both:
            raise ValueError(
                f"parameter {min(both)} is shared by layers of different kinds, whose gradients cannot be added up here: pass "
                'clipping="per-example"'
            )
        #: Products that the sum of one number has at most.
        self.products = self.examples * max([1, *(sum(pair.products for pair in pairs) for pairs in self.pairs.values())])
        small = [name for name, pairs in self.pairs.items() if is_made(pairs, self._matrix(name))]
        self.made = {name: make(self.pairs.pop(name), self._matrix(name)) for name in small}

    def _matrix(self, name: str) -> tuple[int, int]:
        shape = self.shapes[name]
        return shape[0], shape[1:].numel()

    def norms(self) -> Norms:
        """Over all parameters."""
        device = self.losses.device
        total = Norms(*(torch.zeros(self.examples, dtype=torch.float64, device=device) for _ in range(2)))
        found = [norms_of_rows(values) for values in self.rows.values()]
        found += [made.norms() for made in self.made.values()]
        found += [norms_of_pairs(pairs, self._matrix(name)) for name, pairs in self.pairs.items()]
        for one in found:
            total.square += one.square.to(device)
            total.reach_sq += one.reach_sq.to(device)
        # Adding up as many numbers as there are parameters, none of which is negative.
        return Norms(total.square.mul_(1.0 + 2.0**-40), total.reach_sq.mul_(1.0 + 2.0**-40))

    def charge(self) -> float:
        """Share of the clip that is given up for rounding."""
        charged = charge(self.examples, self.products, self.dimension)
        if charged > MOST_CHARGED:
            raise ValueError(
                f"adding up {self.examples} examples of {self.products // self.examples} products at once may be off by "
                f"{100 * charged:.2g} % of the clip: call accumulate(…, chunk={max(1, self.examples // 4)})"
            )
        return charged

    def weights(self, target: float) -> tuple[torch.Tensor, torch.Tensor]:
        """What every example is multiplied by, so that it has at most the norm of the target; and whether it was longer.

        An example that is not finite has weight zero.
        """
        norms = self.norms()
        norm = norms.square.sqrt().mul_(1.0 + 2.0**-40)
        reach = norms.reach_sq.sqrt()
        finite = norm.isfinite() & reach.isfinite()
        scale = torch.minimum(target / norm, REACH * target / reach).clamp_(max=1.0)
        # Zero has every scale.
        scale = torch.where(finite, torch.where(norm > 0.0, scale, torch.ones_like(scale)), torch.zeros_like(scale))
        return scale, (scale < 1.0) | ~finite

    def sum(self, weights: torch.Tensor, take: Callable[[str, int, torch.Tensor], None]) -> None:
        """The sum of all examples, each times its weight: parts of parameters, each with its first row."""
        for name in self.shapes:

            def part(first: int, values: torch.Tensor, name: str = name) -> None:
                take(name, first, values.view(len(values), *self.shapes[name][1:]) if self.shapes[name] else values)

            if name in self.rows or name in self.made:
                values = self.rows[name] if name in self.rows else self.made[name].values
                sum_rows(values, weights.to(values.device), part, self.shapes[name])
            elif name in self.pairs:
                pairs = self.pairs[name]
                sum_pairs(pairs, weights.to(pairs[0].right.device), part, self.shapes[name][0])

    def add(self, clip: _Clip, take: Callable[[str, int, torch.Tensor], None]) -> torch.Tensor:
        """Gives parts of the clipped sum in units of the clip, as integers; returns which examples were longer."""
        target = clip.norm * (1.0 - self.charge())
        scale, longer = self.weights(target)
        # A unit is a power of two: nothing is rounded.
        self.sum(scale / clip.unit, lambda name, first, values: take(name, first, values.round_().to(torch.int64)))
        return longer


class Ghost:
    """A module whose layers keep what goes in and what comes back.

    trained are its parameters by name. Layers are called with parameters that need no gradient, so a parameter that gets one all
    the same is used elsewhere, and refused.
    """

    def __init__(self, module: torch.nn.Module, trained: Mapping[str, torch.Tensor], *, sharded: bool = False) -> None:
        check_module(module, sharded=sharded)
        if not hasattr(torch, "func"):
            raise ValueError('clipping="ghost" needs PyTorch 2.0 or newer: update it, or pass clipping="per-example"')
        self.module, self.sharded = module, sharded
        self.trained = dict(trained)
        self.shapes = {name: p.shape for name, p in trained.items()}
        self.dimension = sum(p.numel() for p in trained.values())
        names = {id(p): name for name, p in trained.items()}
        self.places: list[Place] = []
        for name, part in module.named_modules():
            own = {attribute: names[id(p)] for attribute, p in part._parameters.items() if id(p) in names}
            if own:
                self.places.append(Place(name, part, own, way_of(part, list(own), name or type(part).__name__)))
        #: For each layer, by call, whether its inputs have entries for each example.
        self.shared: dict[str, list[str]] = {}
        #: The same for every form of inputs that was checked, with the number of examples: a module may go other ways for others.
        self.checked: dict[Any, tuple[dict[str, list[str]], int]] = {}
        self._phase = "off"
        self._examples = 0
        #: Whether a layer returned numbers in half precision when its calls were looked at.
        self._makes_half = False
        self._live: dict[str, torch.Tensor] = {}

    @property
    def _is_half(self) -> bool:
        return any(p.dtype in HALF for p in self.module.parameters())

    def take_over(self, before: Ghost | None) -> None:
        """Goes on with what was checked of the same layers."""
        if before is not None and before.module is self.module and before.places == self.places:
            self.checked = before.checked

    # The layers' calls

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Layers are watched while this is open."""
        handles: list[Any] = []
        with contextlib.ExitStack() as closing:
            if any(_is_compiled(part) for part in self.module.modules()):
                closing.enter_context(_eagerly())
            if self.sharded:
                closing.enter_context(without_gathering(self.module))
            closing.enter_context(self._gathered())
            try:
                for place in self.places:
                    watcher = _Watcher(self, place)
                    handles.append(place.part.register_forward_pre_hook(watcher.enter, with_kwargs=True))
                    handles.append(place.part.register_forward_hook(watcher.leave, with_kwargs=True, prepend=True))
                yield
            finally:
                for handle in handles:
                    handle.remove()
                self._phase = "off"

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        """Parameters that lie on one rank each are put together; all of them are put back as they were, whatever happens."""
        before = [(part, dict(part._parameters)) for part in self.module.modules()]
        self._live = dict(self.trained)
        if self.sharded:
            made: dict[int, torch.Tensor] = {}
            names = {id(p): name for name, p in self.trained.items()}
            for part, parameters in before:
                for attribute, p in parameters.items():
                    if p is None:
                        continue
                    if id(p) not in made:
                        made[id(p)] = whole(p)
                        if id(p) in names:
                            self._live[names[id(p)]] = made[id(p)].requires_grad_()
                    part._parameters[attribute] = made[id(p)]  # type: ignore[assignment]
        try:
            yield
        finally:
            for part, parameters in before:
                part._parameters.update(parameters)
            self._live = {}

    def _put_back(self, place: Place) -> None:
        place.part._parameters.update({attribute: self._live[name] for attribute, name in place.own.items()})

    def _run(self, phase: str, parts: Any, examples: int) -> Any:
        """Calls the module."""
        positional, named, _ = parts
        self._phase, self._examples = phase, examples
        self._calls: list[Call] = []
        self._anchors: list[torch.Tensor] = []
        self._counts: dict[str, int] = {}
        with torch.enable_grad():
            return self.module(*positional, **named)

    # Gradients

    def forward(self, parts: Any, examples: int) -> Any:
        """The outputs of the module, whose layers keep what finish() needs."""
        kept = Kept(self.module, values=True)
        outputs = self._run("record", parts, examples)
        kept.check()
        self._phase = "off"
        return outputs

    def contributions(self, parts: Any, loss: Callable[[Any, Any], torch.Tensor], *, vectorize: bool = True) -> Contributions:
        """Of all examples of some parts of a batch, which needs to be opened."""
        examples = _length_of(parts)
        outputs = self.forward(parts, examples)
        with torch.enable_grad():
            losses = losses_of(loss, outputs, parts[2], examples, vectorize=vectorize)
        return self.finish(losses)

    def finish(self, losses: torch.Tensor) -> Contributions:
        """Takes the gradients of losses, one for each example, of the outputs of the last call."""
        calls = self._calls
        if len(losses) != self._examples:
            raise ValueError(f"there are {len(losses)} losses for {self._examples} examples: pass one loss for each example")
        self._phase = "again"
        outside = list(self._live.values())
        if losses.requires_grad:
            try:
                found = torch.autograd.grad(losses.sum(), [*self._anchors, *outside], allow_unused=True)
            finally:
                # A checkpoint may leave a layer before its end.
                for place in self.places:
                    self._put_back(place)
            for name, gradient in zip(self._live, found[len(self._anchors) :]):
                if gradient is not None:
                    raise ValueError(
                        f"parameter {name} is used outside of the call of its layer (by another layer, by the module's own code or by the "
                        'loss), so ghost clipping cannot see what one example adds to its gradient: pass clipping="per-example", or freeze it'
                    )
        self._phase = "off"
        self._anchors, self._calls = [], []
        if calls and losses.requires_grad and all(call.gradient is None for call in calls):
            raise ValueError("these losses do not depend on any trained layer: use the losses of the last forward pass")
        return Contributions(calls, losses.detach(), self.shapes, self.dimension)

    # Checks

    def check(
        self, parts: Any, loss: Callable[[Any, Any], torch.Tensor], *, vectorize: bool = True, chunk: int | None = None
    ) -> None:
        """Finds how layers are called and compares, on some examples in both orders, what is kept of each with its gradient alone; and
        their outputs with those beside all others of the chunk.

        Refuses a module that mixes or remembers its examples; warns where it draws random numbers, so that this cannot be told. Done again
        for more examples at once: a module may mix them only where there are many.
        """
        length = min(_length_of(parts), EXAMPLES)
        if length < 2:
            return  # one example tells nothing of others
        form, together = _form_of(parts), min(_length_of(parts), chunk or _length_of(parts))
        if form in self.checked and self.checked[form][1] >= together:
            self.shared = self.checked[form][0]
            return
        kept = Kept(self.module, values=True)
        some = cut_examples(parts, torch.arange(length))
        if not self._is_half:
            some = torch.utils._pytree.tree_map(lambda leaf: single(leaf) if isinstance(leaf, torch.Tensor) else leaf, some)
        with undisturbed(self.module):
            self.shared = self._find_shared(some, length)
            kept.check()
            # A module may switch on autocast itself, as accelerate lets it.
            tolerance = TOLERANCE_OF_HALF if self._is_half or self._makes_half else TOLERANCE
            orders = torch.arange(length), torch.arange(length).flip(0)
            comparisons = [functools.partial(self._difference, cut_examples(some, order), loss, vectorize) for order in orders]
            if together > length:
                comparisons.append(functools.partial(self._difference_beside, cut_examples(parts, torch.arange(together)), length))
            draws = self._draws(some, loss, vectorize)
            for compare in comparisons:
                difference = compare()
                if difference <= tolerance:
                    continue
                if draws:
                    warn_unchecked("the module draws random numbers")
                    break
                raise MismatchError(
                    "what the layers keep of an example does not make its gradient alone (they differ by "
                    f"{100 * difference:.2g} %): the module sorts, shuffles or mixes the examples of a batch, has them along another "
                    "axis than the first, or uses a layer in a way of its own. Let every output depend on its own example only, or pass "
                    'clipping="per-example", which differentiates each example by itself'
                )
        self.checked[form] = (self.shared, together)

    def _find_shared(self, parts: Any, length: int) -> dict[str, list[str]]:
        """How the inputs of every call change with the number of examples."""
        seen = []
        self._makes_half = False
        for examples in (length, length - 1):
            self._lengths: dict[str, list[int]] = {}
            self._run("trace", cut_examples(parts, torch.arange(examples)), examples)
            seen.append(self._lengths)
        self._phase = "off"
        shared: dict[str, list[str]] = {}
        for name in seen[0].keys() | seen[1].keys():
            first, second = seen[0].get(name, []), seen[1].get(name, [])
            same = len(first) == len(second)
            if same and all(a * (length - 1) == b * length and a % length == 0 or a == b for a, b in zip(first, second)):
                shared[name] = [OWN if a != b else ONE if a == 1 else ALL for a, b in zip(first, second)]
                continue
            raise ValueError(
                f"{name or 'the module'} is called with inputs of leading axes {first} for {length} examples and {second} for "
                f"{length - 1}, which are not one entry for each example: give every layer its examples along the first axis, or "
                'pass clipping="per-example"'
            )
        return shared

    def _difference(self, parts: Any, loss: Callable[[Any, Any], torch.Tensor], vectorize: bool) -> float:
        """The largest relative difference between what is kept of an example and its gradient alone."""
        torch.manual_seed(0)
        made = self.contributions(parts, loss, vectorize=vectorize)
        bounds = made.norms().square.sqrt()
        apart, norms = [], []
        for index in range(made.examples):
            alone = self._alone(cut_examples(parts, torch.tensor([index])), loss)
            norms.append(math.sqrt(sum(float(one.double().square().sum()) for one in alone.values())))
            found = made.pairs.keys() | made.rows.keys() | made.made.keys()
            rest = sum(float(one.double().square().sum()) for name, one in alone.items() if name not in found)
            square = [rest]

            def compare(name: str, first: int, values: torch.Tensor, alone: Any = alone, square: list[float] = square) -> None:
                own = alone[name] if values.dim() == 0 else alone[name][first : first + len(values)]
                square.append(float((values - own.to(values.device)).square().sum()))

            made.sum(torch.nn.functional.one_hot(torch.tensor(index), made.examples).double().to(made.losses.device), compare)
            apart.append(math.sqrt(sum(square)))
            apart[-1] = max(apart[-1], norms[-1] - float(bounds[index]))
        least = 1e-3 * max(norms) + torch.finfo(torch.float32).tiny
        return max((a / max(norm, least) if math.isfinite(norm) else 0.0) for a, norm in zip(apart, norms))

    @torch.no_grad()
    def _difference_beside(self, parts: Any, length: int) -> float:
        """The largest relative difference between the outputs of a few examples and those that they have beside all of these."""
        if not self._is_half:
            parts = torch.utils._pytree.tree_map(lambda leaf: single(leaf) if isinstance(leaf, torch.Tensor) else leaf, parts)
        examples, self._phase = _length_of(parts), "off"

        def outputs_of(some: Any) -> list[Any]:
            torch.manual_seed(0)
            return torch.utils._pytree.tree_leaves(self.module(*some[0], **some[1]))

        beside, differences = outputs_of(parts), [0.0]
        # All of them: what is dropped where there are many, say, are the last ones.
        for first in range(0, examples, length):
            own = torch.arange(first, min(first + length, examples))
            for together, apart in zip(beside, outputs_of(cut_examples(parts, own))):
                if not (isinstance(apart, torch.Tensor) and apart.is_floating_point() and apart.dim() and len(together) == examples):
                    continue
                norms = apart.double().reshape(len(own), -1).norm(dim=1)
                off = (together[own.to(together.device)] - apart).double().reshape(len(own), -1).norm(dim=1)[norms.isfinite()]
                norms = norms[norms.isfinite()]
                if len(norms):
                    least = 1e-3 * norms.max() + torch.finfo(torch.float32).tiny
                    differences.append(float((off / norms.clamp(min=least)).nan_to_num(math.inf).max()))
        return max(differences)

    def _alone(self, parts: Any, loss: Callable[[Any, Any], torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        outputs = self._run("off", parts, 1)
        with torch.enable_grad():
            value = loss(outputs, parts[2][0] if parts[2] else None)
        names = list(self._live)
        if not value.requires_grad:
            return {name: torch.zeros_like(p) for name, p in self._live.items()}
        found = torch.autograd.grad(value.sum(), [self._live[name] for name in names], allow_unused=True)
        return {name: torch.zeros_like(self._live[name]) if one is None else one for name, one in zip(names, found)}

    def _draws(self, parts: Any, loss: Callable[[Any, Any], torch.Tensor], vectorize: bool) -> bool:
        """Whether other random numbers make other losses. The same random numbers must make the same."""
        losses = []
        with random_numbers_kept():
            for seed in (0, 0, 1):
                seed_all(seed)
                outputs = self._run("off", parts, _length_of(parts))
                losses.append(losses_of(loss, outputs, parts[2], _length_of(parts), vectorize=vectorize).detach())
        first, again, anew = losses
        self._phase = "off"
        if not _is_same(first, again):
            raise MismatchError(f"the losses of the same examples were {_told(first)} and then {_told(again)}: {REMEMBERS}")
        return not torch.equal(again, anew)


class _Watcher:
    """The hooks of one layer."""

    def __init__(self, ghost: Ghost, place: Place) -> None:
        self.ghost, self.place = ghost, place
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    @property
    def _label(self) -> str:
        return self.place.name or type(self.place.part).__name__

    def enter(self, part: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        ghost, name = self.ghost, self.place.name
        if ghost._phase == "off":
            return None
        tensors = [*inputs, *named.values()]
        if not tensors or not all(isinstance(one, torch.Tensor) and one.dim() for one in tensors):
            raise ValueError(
                f"{self._label} is trained, but takes {', '.join(type(one).__name__ for one in tensors) or 'nothing'}, and examples can "
                'be separated in tensors only: freeze it, or pass clipping="per-example"'
            )
        if ghost._phase == "trace":
            lengths = {len(one) for one in tensors}
            ghost._lengths.setdefault(name, []).append(lengths.pop() if len(lengths) == 1 else -1)
            return None
        if not torch.is_grad_enabled():
            raise ValueError(
                f"{self._label} is trained, but is called where gradients are switched off, by torch.no_grad() or by a checkpoint "
                "with use_reentrant=True: leave it out, freeze the layer, or pass use_reentrant=False to the checkpoint"
            )
        if ghost._examples > 1:
            shared = self._is_shared()
            if shared != OWN:
                inputs = tuple(self._for_all(one, shared) for one in inputs)
                named = {key: self._for_all(one, shared) for key, one in named.items()}
            elif any(len(one) % ghost._examples for one in tensors):
                raise ValueError(
                    f"{self._label} is given {len(tensors[0])} entries for {ghost._examples} examples: give every layer its examples "
                    'along the first axis, or pass clipping="per-example"'
                )
        self.inputs = (inputs, named)
        part._parameters.update({attribute: ghost._live[name].detach() for attribute, name in self.place.own.items()})
        return inputs, named

    def _is_shared(self) -> str:
        ghost, name = self.ghost, self.place.name
        known = ghost.shared.get(name, [])
        if ghost._phase == "again":
            # Checkpoints call layers again, the last ones first.
            if len(set(known)) != 1:
                raise ValueError(f"{self._label} is called in several ways inside a checkpoint: leave the checkpoint out")
            return known[0]
        count = ghost._counts.get(name, 0)
        ghost._counts[name] = count + 1
        if count >= len(known):
            raise ValueError(
                f"{self._label} is called {count + 1} times, but was called {len(known)} times for the first examples, so its "
                'calls cannot be matched: pass clipping="per-example"'
            )
        return known[count]

    def _for_all(self, tensor: torch.Tensor, shared: str) -> torch.Tensor:
        """One entry for each example of what is the same for all of them."""
        one = tensor if shared == ONE and len(tensor) == 1 and tensor.dim() > 1 else tensor[None]
        return one.expand(self.ghost._examples, *one.shape[1:])

    def leave(self, part: Any, inputs: Any, named: Any, output: Any) -> Any:
        ghost = self.ghost
        if ghost._phase == "trace" and isinstance(output, torch.Tensor):
            ghost._makes_half |= output.dtype in HALF
        if ghost._phase in ("off", "trace"):
            return None
        ghost._put_back(self.place)
        if not isinstance(output, torch.Tensor) or not output.dim() or len(output) % ghost._examples:
            raise ValueError(
                f"{self._label} is trained, but does not return one tensor with an entry for each example: freeze it, or pass "
                'clipping="per-example"'
            )
        if not output.requires_grad:
            anchor = output.detach().requires_grad_()
            if ghost._phase == "record":
                ghost._anchors.append(anchor)
            # What comes after may write into it.
            output = anchor.clone()
        if ghost._phase == "record":
            call = Call(self.place, *self.inputs, ghost._examples)
            ghost._calls.append(call)
            output.register_hook(call.take)
        self.inputs = ((), {})
        return output


def losses_of(
    loss: Callable[[Any, Any], torch.Tensor], outputs: Any, targets: tuple[Any, ...], examples: int, *, vectorize: bool
) -> torch.Tensor:
    """The loss of every example, as a batch of one."""
    leaves, form = torch.utils._pytree.tree_flatten((outputs, targets))
    places = []
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.dim() and len(leaf) == examples:
            places.append(place)
        elif leaf.requires_grad:
            raise ValueError(
                f"the module returns a tensor of shape {tuple(leaf.shape)} for {examples} examples, but each needs an entry of its own along the "
                "first axis: compute the loss in loss(outputs, targets), not in the module, and pass no labels to the module"
            )
    if not places:
        raise ValueError("the module returns no tensor with one entry for each example")

    def one(parts: list[torch.Tensor]) -> torch.Tensor:
        own = list(leaves)
        for place, part in zip(places, parts):
            own[place] = part.unsqueeze(0)
        given, of_example = torch.utils._pytree.tree_unflatten(own, form)
        value = loss(given, of_example[0] if of_example else None)
        return value if value.dim() == 0 else value.sum()

    batched = [leaves[place] for place in places]
    if not vectorize or examples == 1 or _is_wide(batched):
        before = RandomState()
        first = [leaf[0].detach().clone().requires_grad_(leaf.requires_grad) for leaf in batched]
        try:
            found = torch.stack([one(list(parts)) for parts in zip(*(leaf.unbind() for leaf in batched))])
        except RuntimeError as failed:
            if "inplace" not in str(failed).replace("-", ""):
                raise
            # A loss may write into what it is given, but not into parts that were cut together.
            found = torch.stack([one([leaf[index] for leaf in batched]) for index in range(examples)])
        with torch.no_grad(), random_numbers_kept():
            before.restore()
            again = one(first)
        if not _is_same(found[0].detach(), again):
            raise MismatchError(
                f"the loss of an example was {_told(found[:1])}, and is {_told(again)} after others were seen: {REMEMBERS}"
            )
        return found
    try:
        at_once: torch.Tensor = torch.func.vmap(one, randomness="different")(batched)
    except RuntimeError as failed:
        raise ValueError(
            f"torch's vmap cannot compute this loss for all examples at once ({failed}): pass vectorize=False, which calls it for one "
            "after the other"
        ) from failed
    return at_once


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """But for the order of sums on some devices."""
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True)


def _told(losses: torch.Tensor) -> str:
    return ", ".join(f"{float(loss):.6g}" for loss in losses.detach().reshape(-1)[:3])


def _is_wide(batched: Sequence[torch.Tensor]) -> bool:
    """Whether the loss of one example after the other is faster: large outputs, each of which stays in the cache of a processor."""
    return all(leaf.device.type == "cpu" for leaf in batched) and max(leaf[0].numel() for leaf in batched) >= WIDE


def _form_of(parts: Any) -> tuple[str, tuple[int, ...]]:
    """The names and axes of inputs and targets, whatever their sizes."""
    leaves, spec = torch.utils._pytree.tree_flatten(parts)
    return str(spec), tuple(leaf.dim() if isinstance(leaf, torch.Tensor) else -1 for leaf in leaves)


def _length_of(parts: Any) -> int:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(parts) if isinstance(leaf, torch.Tensor)]
    return len(leaves[0])


def _is_compiled(part: torch.nn.Module) -> bool:
    return getattr(part, "_compiled_call_impl", None) is not None or type(part).__name__ == "OptimizedModule"


def _eagerly() -> Any:
    """Without compiled code, which calls no hooks."""
    if not hasattr(torch.compiler, "set_stance"):
        raise ValueError(
            'clipping="ghost" needs PyTorch 2.6 or newer for modules with compiled parts: pass the module that was not compiled'
        )
    return torch.compiler.set_stance("force_eager")
