"""Correlated noise for JAX: an optax.GradientTransformation that works under jit and on sharded arrays.

    plan = dpmf.plan(examples=len(labels), batch=256, epochs=5, momentum=0.9, epsilon=3, delta=1e-6)
    batches = dpmf.jax.Batches(plan, key)
    optimizer = dpmf.jax.sgd(plan.mechanism, key, learning_rate=0.5, batches=batches)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, batch):
        examples = inputs[batch.indices], labels[batch.indices]
        total, seen = dpmf.jax.accumulate(loss, parameters, *examples, clip=1.0, batch=batch)
        updates, state = optimizer.update(total, state, parameters)
        return optax.apply_updates(parameters, updates), state

    for batch in batches:
        parameters, state = step(parameters, state, batch)

What is released is made on the host, in a callback. The optimizer's state carries the step, and the new step comes out of the
callback, so steps run in order, and a state that is used twice is refused. The sum carries the number of its contributions and the
step of their batch, which are compared there with those of the run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from .._requires import require

require("dpmf.jax", "jax", "optax")

import jax
import jax.numpy as jnp
import optax

from .._core import Mechanism, NoiseKey, Sampler
from .._errors import MismatchError, UnsupportedError
from ._data import Batch, Batches, CorrelatedNoiseState, step_of
from ._host import Host
from ._sums import Seen, Sum, accumulate, clipped_sum

__all__ = [
    "Batch",
    "Batches",
    "CorrelatedNoiseState",
    "Seen",
    "Sum",
    "accumulate",
    "adam",
    "adam_steps",
    "add_correlated_noise",
    "clipped_sum",
    "multi_steps",
    "sgd",
    "step_of",
]


def add_correlated_noise(
    mechanism: Mechanism,
    key: NoiseKey,
    *,
    batches: Batches | None = None,
    denominator: float | None = None,
    sampler: Sampler | None = None,
    experiment: str | None = None,
    journal: str | os.PathLike[str] | None = None,
    lost_input: Literal["refuse", "burn"] = "refuse",
    shardings: Any = None,
    arithmetic: Literal["exact", "float"] = "exact",
) -> optax.GradientTransformation:
    """Adds the next row of correlated noise to a sum of clipped gradients, and divides by a fixed denominator.

    The rest of the chain must be the optimizer that the mechanism was planned for; sgd() and adam() make it. update takes the Sum
    that accumulate or clipped_sum made. Its gradients are float32; their leaves, flattened in the order of jax.tree.leaves, are the
    coordinates of the noise. Gradients that are not finite are refused, and so are copies of a sum that differ between devices.

    batches, a Batches of the same mechanism, says who takes part in which step. Every sum is then taken of one of them,
    accumulate(…, batch=batch). One of another step, of other batches, or with more contributions than the batch has examples is
    refused: when it is traced, if it is of no batch at all, and otherwise when it is run, before anything is released. A mean divides
    by batches.expected_batch, unless denominator, the planned size of a cohort, is given. Without batches, that the data takes part
    as the mechanism covers is for the caller to see to. A mechanism that counts on sampling needs batches, or at least sampler,
    plan.sampler(key), whose members(i) update number i is given the sum of; it may not have more contributions than these.

    Every state is good for one update: an update from an old state fails and releases nothing. A failure inside jit
    surfaces as jax.errors.JaxRuntimeError with the message of the dpmf error. It works in jax.lax.scan and jax.lax.cond. What
    would release sums without noise, or noise for parts of a step, is refused: optax.MultiSteps, for which there is
    multi_steps(); optax.masked and optax.multi_transform around it, which come after it in a chain instead; and pmap and
    shard_map around it.

    journal is a directory that makes restarts safe: what was released is synced there first, and after a restart a
    step that was released comes again for the same input only. Without one, a run ends with its process. experiment names a
    run whose noise is the same at every start, for experiments that release nothing; the key must be
    NoiseKey.from_seed(…).
    lost_input="burn" gives up such a step when its input differs (its update is zero) instead of refusing it.

    Where the parameters given to init are sharded over devices, each device draws the noise of its own shard alone, to
    the bit the noise of an unsharded run; shardings, a tree of NamedSharding, says so where init is traced. With several
    processes, all need the same key, and the parameters must be sharded over all of them.

    arithmetic is "exact", where the sums are taken as the real numbers that they are and released with ideal noise, correctly
    rounded; or "float", where noise is made, and added on the device, in single precision: faster, but the lowest bits of a
    release are outside of the guarantee. It is fixed for a run.

    Guarantee: if one example moves the sum by at most the clip, as real numbers, which clipped_sum sees to, what is released
    satisfies the mechanism's statement, to the bit in exact arithmetic.

    Cost: the sums travel from the device to the host, in pieces of 96 kB, and what is released travels back; in float
    arithmetic, noise travels to the device only. A shard of whole leading rows is one stream; others are one stream for every
    run of consecutive coordinates.
    """
    if batches is not None and sampler is not None:
        raise ValueError("batches and sampler are both given, and both say who takes part: leave one out")
    if batches is not None and batches.mechanism.identity != mechanism.identity:
        raise MismatchError("the batches are those of another mechanism: make both from one plan")
    if sampler is not None:
        mechanism.check_sampling(sampler.sampling)
        mechanism.check_steps(sampler.steps)
    if denominator is None:
        drawn = batches if batches is not None else sampler
        denominator = 1.0 if drawn is None else drawn.expected_batch
    if not denominator > 0:
        raise ValueError(f"denominator is {denominator}, but it must be above zero: it is the planned cohort")
    if lost_input not in ("refuse", "burn"):
        raise ValueError(f"lost_input is {lost_input!r}, but it must be refuse or burn")
    if arithmetic not in ("exact", "float"):
        raise ValueError(f"arithmetic is {arithmetic!r}, but it must be exact or float")
    directory = None if journal is None else Path(journal)
    host = Host(
        mechanism,
        key,
        denominator=denominator,
        batches=batches,
        sampler=sampler,
        experiment=experiment,
        journal=directory,
        burn=lost_input == "burn",
        arithmetic=arithmetic,
    )

    def init(params: optax.Params) -> CorrelatedNoiseState:
        _check_surroundings(params)
        host.lay_out(params, shardings)
        return CorrelatedNoiseState(jnp.zeros((), jnp.int32), jnp.asarray(host.name_words))

    def update(
        updates: optax.Updates,
        state: CorrelatedNoiseState,
        params: optax.Params | None = None,
        **others: Any,
    ) -> tuple[optax.Updates, CorrelatedNoiseState]:
        del params, others
        _check_surroundings(updates)
        total = _check_sum(updates, batches)
        program = host.lay_out(total.gradients, shardings)
        leaves, tree = jax.tree.flatten(total.gradients)
        stamp = jnp.zeros(2, jnp.uint32) if total.stamp is None else total.stamp
        following, *noisy = program(state.step, state.run, total.contributions, stamp, *leaves)
        scaled = [leaf / np.float32(denominator) for leaf in noisy]
        return jax.tree.unflatten(tree, scaled), CorrelatedNoiseState(following, state.run)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_sum(total: Any, batches: Batches | None) -> Sum:
    """Refuses what does not say how many contributions it has and, where there are batches, of which."""
    if not isinstance(total, Sum):
        raise MismatchError(
            "update takes the sum that accumulate or clipped_sum made, which knows how many contributions it has; this is a "
            f"{type(total).__name__}. If you clipped and summed by other means: dpmf.jax.Sum.of(gradients, contributions, batch=batch)"
        )
    if total.stamp is None and batches is not None:
        raise MismatchError(
            "nothing says which batch this sum is of, and the guarantee is for every batch in its own step: "
            "accumulate(…, batch=batch), which leaves out the padding too"
        )
    counts = [(total.contributions, (), jnp.int32), (total.stamp, (2,), jnp.uint32)]
    for value, shape, dtype in counts:
        if value is not None and (jnp.shape(value) != shape or jnp.result_type(value) != dtype):
            raise MismatchError(
                f"the number of contributions to this sum, or their stamp, is {jnp.result_type(value)}{list(jnp.shape(value))}, so "
                "something scaled or cut it after it was taken: give update what accumulate returned, and put every other "
                "transformation behind the noise"
            )
    return total


def _check_surroundings(tree: Any) -> None:
    """Refuses to be called where sums would go past the noise, or a part of a step would be taken for the whole.

    Traced once, so that it is said before anything is released; what is not recognised here is refused at the second update.
    """
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    if any(isinstance(node, optax.MaskedNode) for node in nodes):
        raise UnsupportedError(
            "optax.masked or optax.multi_transform leaves out some parameters here, and would hand their sums on without noise: "
            "put it behind the noise, optax.chain(dpmf.jax.add_correlated_noise(…), optax.masked(…)), or leave parameters that "
            "are never trained out of the tree"
        )
    frame: Any = sys._getframe(1)
    while frame is not None:
        # Only the frames tell: it hands the parts on as if each were a step.
        if frame.f_code.co_name in ("init", "update") and isinstance(frame.f_locals.get("self"), optax.MultiSteps):
            raise UnsupportedError(
                "optax.MultiSteps updates at every part of a step and throws away what it gets, so that noise would be used "
                "several times: give accumulate(…, micro_batch=…) the whole batch, or take dpmf.jax.multi_steps(optimizer, parts)"
            )
        frame = frame.f_back
    mesh = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()
    if axes := getattr(mesh, "manual_axes", ()):
        raise UnsupportedError(
            f"this is called on each of several devices ({', '.join(axes)}), under pmap or shard_map, and every one of them would "
            "take a noise row of its own for its part: sum over the devices there (jax.lax.psum), and call update outside, under "
            "jit, where it shards by itself"
        )


def sgd(
    mechanism: Mechanism,
    key: NoiseKey,
    learning_rate: float = 1.0,
    **options: Any,
) -> optax.GradientTransformation:
    """Private SGD exactly as the mechanism was planned: its momentum, weight decay and schedule, on noisy gradients.

    learning_rate multiplies the planned step sizes. The options are those of add_correlated_noise.

    Raises MismatchError when learning_rate is not 1 and the mechanism was planned with weight decay, where the plan
    needs the step sizes as they are; UnsupportedError for a mechanism planned from a matrix.
    """
    workload = mechanism.workload
    rates = workload.learning_rates
    if rates is None:
        raise UnsupportedError(
            "the mechanism was planned from a matrix, which names no optimizer: chain add_correlated_noise with yours"
        )
    momentum, nesterov, decay = workload.momentum, workload.nesterov, workload.weight_decay
    assert momentum is not None and nesterov is not None and decay is not None
    rates = rates * learning_rate
    mechanism.check_optimizer(
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=decay,
        coupled=bool(workload.coupled),
        learning_rates=rates,
    )
    table = np.asarray(rates, np.float32)

    def schedule(step: Any) -> jax.Array:
        return -jnp.asarray(table)[step]

    parts: list[Any] = [add_correlated_noise(mechanism, key, **options)]
    if decay and workload.coupled:
        parts.append(optax.add_decayed_weights(decay))
    if momentum:
        parts.append(optax.trace(momentum, nesterov=nesterov))
    if decay and not workload.coupled:
        parts.append(optax.add_decayed_weights(decay))
    parts.append(optax.scale_by_schedule(schedule))
    return optax.chain(*parts)


def adam_steps(steps: int, *, b1: float = 0.9, schedule: Any = None) -> np.ndarray[Any, Any]:
    """The step sizes of Adam as those of SGD with momentum b1, for plan(momentum=b1, schedule=adam_steps(steps, b1=b1)).

    Adam steps by the mean of gradients m̂_t = (1 − β₁)/(1 − β₁ᵗ)·Σ β₁ᵗ⁻ˢ g_s over √v̂_t, which moves slowly. But for that it is
    heavy-ball momentum with the step sizes (1 − β₁)/(1 − β₁ᵗ). schedule, a number for each step, multiplies them.
    """
    if not 0 <= b1 < 1:
        raise ValueError(f"b1 is {b1}, but it must be at least 0 and below 1")
    rates: np.ndarray[Any, Any] = (1 - b1) / (1 - b1 ** np.arange(1.0, steps + 1))
    if schedule is None:
        return rates
    factors = np.asarray(schedule, np.float64)
    if factors.shape != (steps,):
        raise ValueError(f"schedule has the shape {factors.shape}, but it must be one number for each of {steps} steps")
    return rates * factors


def adam(
    mechanism: Mechanism,
    key: NoiseKey,
    learning_rate: float = 1e-3,
    *,
    b2: float = 0.999,
    eps: float = 1e-8,
    **options: Any,
) -> optax.GradientTransformation:
    """Private Adam, for a mechanism that was planned with momentum=b1 and schedule=adam_steps(steps, b1=b1).

    b1 is the planned momentum. learning_rate multiplies the planned step sizes. The options are those of add_correlated_noise.

    The guarantee is that of the noisy gradients: what Adam makes of them costs nothing. The plan is the best for its first moment;
    that the second is estimated from noisy gradients too is not in it, and eps counts against noise of standard deviation
    mechanism.privacy.noise_std over the denominator.

    Raises MismatchError for a plan with nesterov or weight decay, and UnsupportedError for one from a matrix.
    """
    workload = mechanism.workload
    rates, b1 = workload.learning_rates, workload.momentum
    if rates is None or b1 is None:
        raise UnsupportedError(
            "the mechanism was planned from a matrix, which names no optimizer: chain add_correlated_noise with yours"
        )
    if workload.nesterov or workload.weight_decay:
        raise MismatchError(
            "the mechanism was planned with nesterov or weight decay, which adam() does not have: plan with momentum and "
            "schedule=dpmf.jax.adam_steps(steps), or chain add_correlated_noise with an optimizer of your own"
        )
    table = np.asarray(learning_rate * rates / adam_steps(mechanism.steps, b1=b1), np.float32)

    def schedule(step: Any) -> jax.Array:
        return -jnp.asarray(table)[step]

    return optax.chain(
        add_correlated_noise(mechanism, key, **options),
        optax.scale_by_adam(b1, b2, eps),
        optax.scale_by_schedule(schedule),
    )


class MultiStepsState(NamedTuple):
    """What multi_steps keeps: the number of parts that were added up, their Sum, and the optimizer's state."""

    part: jax.Array
    total: Any
    inner: Any


def multi_steps(optimizer: optax.GradientTransformation, parts: int) -> optax.GradientTransformation:
    """An optimizer that takes so many sums for one step, in place of optax.MultiSteps.

    Its updates are zero but for every parts-th, which is that of the sum of all parts. Take each part with
    accumulate(…, batch=part, parts=parts), part one of batch.split(parts), which leaves room for rounding. To differentiate a batch piece by piece,
    accumulate(…, micro_batch=…) is simpler and needs no such room.
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}, but it must be at least 1")
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> MultiStepsState:
        nothing = Sum(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32))
        return MultiStepsState(jnp.zeros((), jnp.int32), nothing, inner.init(params))

    def update(
        updates: optax.Updates, state: MultiStepsState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, MultiStepsState]:
        part = _check_sum(updates, None)
        stamped = part if part.stamp is not None else Sum(part.gradients, part.contributions, jnp.zeros(2, jnp.uint32))
        total = state.total + stamped

        def last(total: Sum, inner_state: Any) -> Any:
            whole = total if part.stamp is not None else Sum(total.gradients, total.contributions)
            made, inner_state = inner.update(whole, inner_state, params, **extra)
            return made, inner_state, jax.tree.map(jnp.zeros_like, total)

        def earlier(total: Sum, inner_state: Any) -> Any:
            return jax.tree.map(jnp.zeros_like, total.gradients), inner_state, total

        made, inner_state, total = jax.lax.cond(state.part == parts - 1, last, earlier, total, state.inner)
        return made, MultiStepsState((state.part + 1) % parts, total, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
