"""Correlated noise for JAX: an optax.GradientTransformation that is a pure function, under jit, scan and shard_map, on any devices.

    plan = dpmf.plan(examples=len(labels), batch=256, epochs=5, momentum=0.9, epsilon=3, delta=1e-6)
    run = dpmf.jax.Run(plan, key, parameters)
    optimizer = dpmf.jax.sgd(run, learning_rate=0.5)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, batch):
        examples = inputs[batch.indices], labels[batch.indices]
        total, seen = dpmf.jax.accumulate(loss, parameters, *examples, clip=1.0, batch=batch)
        updates, state = optimizer.update(total, state, parameters, batch=batch)
        return optax.apply_updates(parameters, updates), state

    for batch in run.batches(state):
        parameters, state = step(parameters, state, batch)
        run.commit(state)

Noise is data, like a batch: the host makes it while the devices compute, and it is on the devices when its step begins. A compiled step
calls no Python. If the devices find an error, they release nothing, and commit() raises it.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from .._requires import require

require("dpmf.jax", "jax", "optax")

import jax
import jax.numpy as jnp
import optax

from .._errors import MismatchError, UnsupportedError
from ._data import Batch, Batches
from ._release import CorrelatedNoiseState, Noise
from ._run import Run, noise_of, step_of
from ._sums import Seen, Sum, accumulate, clipped_sum

__all__ = [
    "Batch",
    "Batches",
    "CorrelatedNoiseState",
    "Noise",
    "Run",
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


def add_correlated_noise(run: Run) -> optax.GradientTransformationExtraArgs:
    """Adds the row of correlated noise that came with a batch to a sum of clipped gradients, and divides by the run's denominator.

    Chain it with the optimizer that the mechanism was planned for; sgd() and adam() do that. update takes the Sum that accumulate or
    clipped_sum returned, and the batch that the run handed out: update(total, state, parameters, batch=batch). It is a pure function,
    which works under jit, in scan and cond, and within shard_map over all axes of the parameters' mesh.

    A sum without a batch is refused when update is traced. A sum is not released if it belongs to another step or to other batches, if
    it has more contributions than the batch has examples, if it is not finite, or if its copies differ between devices. Its update is
    then zero, its state cannot be used, and run.commit(state) raises the reason. Transformations that would release sums without noise,
    or noise for parts of a step, are refused: optax.MultiSteps (use multi_steps()), optax.masked and optax.multi_transform around the
    noise (chain them after it), and vmap and pmap around it.

    Guarantee: that of the run. In exact arithmetic, the coordinates of a sum are rounded to whole multiples of 2⁻²⁴ to 2⁻²³ of the clip;
    accumulate and clipped_sum leave room for that.
    """
    if not isinstance(run, Run):
        raise TypeError(f"the noise is that of a dpmf.jax.Run(plan, key, parameters), but this is a {type(run).__name__}")

    def init(params: optax.Params) -> CorrelatedNoiseState:
        _check_surroundings(params)
        _check_model(run, params, whole=True)
        return CorrelatedNoiseState.begin(run.words)

    def update(
        updates: optax.Updates,
        state: CorrelatedNoiseState,
        params: optax.Params | None = None,
        *,
        batch: Batch | None = None,
        **others: Any,
    ) -> tuple[optax.Updates, CorrelatedNoiseState]:
        del params, others
        _check_surroundings(updates)
        total = _check_sum(updates, run.drawn)
        if batch is None or batch.noise is None:
            missing = "update was not given its batch" if batch is None else "this batch has no noise"
            raise MismatchError(
                f"{missing}: take the batches of run.batches(state), and call update(total, state, parameters, batch=batch)"
            )
        _check_model(run, total.gradients, whole=False)
        leaves, tree = jax.tree.flatten(total.gradients)
        stamp = jnp.zeros(2, jnp.uint32) if total.stamp is None else total.stamp
        noisy, state = run.device(leaves, total.contributions, stamp, state, batch.noise)
        scaled = [leaf / np.float32(run.denominator) for leaf in noisy]
        return jax.tree.unflatten(tree, scaled), state

    return optax.GradientTransformationExtraArgs(init, update)


def _check_model(run: Run, tree: Any, *, whole: bool) -> None:
    """Refuses another model than that of the run; within shard_map, leaves are those of one device."""
    leaves, structure = jax.tree.flatten(tree)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.dtype != jnp.float32:
            raise TypeError(
                f"leaf {jax.tree_util.keystr(path) or '(the whole)'} is {leaf.dtype}, but noise is added to float32: sum and clip in "
                "float32, add the noise, then cast"
            )
    shapes = [tuple(leaf.shape) for leaf in leaves]
    inside = not whole and bool(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))
    expected = run.layout.local_shapes if inside else list(run.layout.shapes)
    if structure != run.layout.structure or shapes != expected:
        raise ValueError(
            f"the tree differs from the parameters of the run, but one run serves one model: its leaves have shapes {shapes}, and those of "
            f"the run have {expected}"
        )


def _check_sum(total: Any, batches: Batches | None) -> Sum:
    """Refuses what does not say how many contributions it has and, where there are batches, of which."""
    if not isinstance(total, Sum):
        raise MismatchError(
            "update takes the sum that accumulate or clipped_sum made, which knows how many contributions it has; this is a "
            f"{type(total).__name__}. If you clipped and summed by other means: dpmf.jax.Sum.of(gradients, contributions, batch=batch)"
        )
    if total.stamp is None and batches is not None:
        raise MismatchError(
            "this sum does not name its batch, and the guarantee covers each batch in its own step only: call "
            "accumulate(…, batch=batch), which also leaves out the padding"
        )
    counts = [(total.contributions, (), jnp.int32), (total.stamp, (2,), jnp.uint32)]
    for value, shape, dtype in counts:
        if value is not None and (jnp.shape(value) != shape or jnp.result_type(value) != dtype):
            raise MismatchError(
                f"the number of contributions to this sum, or their stamp, is {jnp.result_type(value)}{list(jnp.shape(value))}, so "
                "something changed the sum after accumulate returned it: pass the result of accumulate to update as it is, and chain "
                "every other transformation after the noise"
            )
    return total


def _check_surroundings(tree: Any) -> None:
    """Refuses to be called where sums would go past the noise, or a part of a step would be taken for the whole.

    Traced once, so that it is said before anything is released; what is not recognised here is refused at the second update.
    """
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    if any(isinstance(node, optax.MaskedNode) for node in nodes):
        raise UnsupportedError(
            "optax.masked or optax.multi_transform leaves out some parameters here, so their sums would be used without noise: "
            "chain it after the noise, optax.chain(dpmf.jax.add_correlated_noise(…), optax.masked(…)), or remove parameters that "
            "are never trained from the tree"
        )
    frame: Any = sys._getframe(1)
    while frame is not None:
        # Only the frames tell: it hands the parts on as if each were a step.
        if frame.f_code.co_name in ("init", "update") and isinstance(frame.f_locals.get("self"), optax.MultiSteps):
            raise UnsupportedError(
                "optax.MultiSteps calls update for every part of a step and discards some of the results, so the same noise would be "
                "used several times: pass the whole batch to accumulate(…, micro_batch=…), or use dpmf.jax.multi_steps(optimizer, parts)"
            )
        frame = frame.f_back


def sgd(run: Run, learning_rate: float = 1.0) -> optax.GradientTransformationExtraArgs:
    """Private SGD exactly as the mechanism was planned: its momentum, weight decay and schedule, on noisy gradients.

    learning_rate multiplies the planned step sizes. update is that of add_correlated_noise, with batch=batch.

    Raises MismatchError when learning_rate is not 1 and the mechanism was planned with weight decay, where the plan
    needs the step sizes as they are; UnsupportedError for a mechanism planned from a matrix.
    """
    noise = add_correlated_noise(run)
    mechanism, workload = run.mechanism, run.mechanism.workload
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

    parts: list[Any] = [noise]
    if decay and workload.coupled:
        parts.append(optax.add_decayed_weights(decay))
    if momentum:
        parts.append(optax.trace(momentum, nesterov=nesterov))
    if decay and not workload.coupled:
        parts.append(optax.add_decayed_weights(decay))
    parts.append(optax.scale_by_schedule(schedule))
    return optax.with_extra_args_support(optax.chain(*parts))


def adam_steps(steps: int, *, b1: float = 0.9, schedule: Any = None) -> np.ndarray[Any, Any]:
    """The step sizes of Adam as those of SGD with momentum b1, for plan(momentum=b1, schedule=adam_steps(steps, b1=b1)).

    Adam moves by the mean of gradients m̂_t = (1 − β₁)/(1 − β₁ᵗ)·Σ β₁ᵗ⁻ˢ g_s, divided by √v̂_t, which changes slowly. Apart from this
    division, it is heavy-ball momentum with the step sizes (1 − β₁)/(1 − β₁ᵗ). schedule, one number for each step, multiplies them.
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


def adam(run: Run, learning_rate: float = 1e-3, *, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformationExtraArgs:
    """Private Adam, for a mechanism that was planned with momentum=b1 and schedule=adam_steps(steps, b1=b1).

    b1 is the planned momentum. learning_rate multiplies the planned step sizes. update is that of add_correlated_noise, with
    batch=batch.

    The guarantee is that of the noisy gradients, whatever Adam computes from them. The plan minimises the error in the first moment. It
    does not account for the noise in the second moment: compare eps with mechanism.privacy.noise_std divided by the denominator.

    Raises MismatchError for a plan with nesterov or weight decay, and UnsupportedError for one from a matrix.
    """
    noise = add_correlated_noise(run)
    mechanism, workload = run.mechanism, run.mechanism.workload
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

    steps = optax.chain(noise, optax.scale_by_adam(b1, b2, eps), optax.scale_by_schedule(schedule))
    return optax.with_extra_args_support(steps)


class MultiStepsState(NamedTuple):
    """The state of multi_steps: the number of parts added up so far, their Sum, and the optimizer's state."""

    part: jax.Array
    total: Any
    inner: Any


def multi_steps(optimizer: optax.GradientTransformation, parts: int) -> optax.GradientTransformationExtraArgs:
    """An optimizer that takes several sums for one step, in place of optax.MultiSteps.

    Its updates are zero until the last of parts, whose update is that of the sum of all parts. For each part in batch.split(parts), call
    accumulate(…, batch=part, parts=parts), which leaves room for rounding, and then update(…, batch=part). To differentiate a batch in
    pieces, accumulate(…, micro_batch=…) is simpler and needs no such room.
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
