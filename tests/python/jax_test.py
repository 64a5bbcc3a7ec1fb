"""dpmf.jax against streams drawn directly: jit, scan, shard_map, replays, restarts, and eight devices that use noise of their own
shards. Noise is data: nothing of Python is called while a step runs."""

import functools
import gc
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
from fractions import Fraction

import pytest

# Eight devices on the CPU; to be said before JAX starts.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="JAX is not installed: pip install -r tests/python/requirements-frameworks.txt")

import dpmf  # noqa: E402
import dpmf.jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

STEPS = 6
KEY = dpmf.NoiseKey.from_seed(7)
MECHANISM = dpmf.mechanism(steps=STEPS, momentum=0.9, schedule="cooldown:0.5:0.1", epsilon=8, delta=1e-6, clip=0.5)
SHAPES = {"bias": (8,), "kernel": (16, 8), "stack": (2, 8, 5)}
DIMENSION = sum(int(np.prod(shape)) for shape in SHAPES.values())


def on_grid(values, clip=0.5):
    """Rounded to the unit of released sums."""
    unit = dpmf._core._Clip(clip, 1).unit * 512
    return (np.round(np.asarray(values, np.float64) / unit) * unit).astype(np.float32)


def tree(step):
    """A sum on the grid, with numbers of all sizes."""
    random = np.random.default_rng(step)
    numbers = {name: random.standard_normal(shape) * 10.0 ** random.integers(-6, 4, shape) for name, shape in SHAPES.items()}
    return {name: jnp.asarray(on_grid(leaf)) for name, leaf in numbers.items()}


def summed(gradients, batch=None):
    """A sum as if of one example."""
    return dpmf.jax.Sum.of(gradients, 1, batch=batch)


def flat(values):
    values = values.gradients if isinstance(values, dpmf.jax.Sum) else values
    return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(values)])


def begun(parameters=None, mechanism=MECHANISM, key=KEY, **options):
    """A run without batches of its own, by its name the same at every start."""
    named = {} if "journal" in options or "experiment" in options else dict(experiment="test")
    return dpmf.jax.Run(mechanism, key, tree(0) if parameters is None else parameters, **named, **options)


class Loop:
    """A program that takes steps of a run."""

    def __init__(self, run, make=dpmf.jax.add_correlated_noise, parameters=None, state=None, compiled=True):
        self.run = run
        self.optimizer = make(run)
        self.parameters = tree(0) if parameters is None else parameters
        self.state = self.optimizer.init(self.parameters) if state is None else state
        self.batches = run.batches(self.state)
        apply = lambda total, state, batch: self.optimizer.update(total, state, self.parameters, batch=batch)  # noqa: E731
        self.update = jax.jit(apply) if compiled else apply

    def __call__(self, total, state=None):
        """One step: what it made of a sum, committed."""
        batch = next(self.batches)
        made, after = self.update(total(batch) if callable(total) else total, self.state if state is None else state, batch)
        self.run.commit(after)
        self.state = after
        return made


@functools.lru_cache
def expected_rows(arithmetic="exact"):
    stream = dpmf.NoiseStream(MECHANISM, KEY, run="test", dimension=DIMENSION, arithmetic=arithmetic)
    rows = [flat(tree(step)) for step in range(STEPS)]
    for row in rows:
        stream.add_to(row)
    return rows


def zeros_with_noise(mechanism=MECHANISM, dimension=DIMENSION, run="test", key=KEY):
    return dpmf.NoiseStream(mechanism, key, run=run, dimension=dimension)


@pytest.mark.parametrize("arithmetic, compiled", [("exact", True), ("float", True), ("exact", False)])
def test_noisy_gradients_are_those_of_the_stream(arithmetic, compiled):
    loop = Loop(begun(arithmetic=arithmetic), compiled=compiled)
    for step, row in enumerate(expected_rows(arithmetic)):
        noisy = flat(loop(summed(tree(step))))
        assert noisy.tobytes() == row.tobytes()
        units = noisy.astype(np.float64) / zeros_with_noise().grid
        assert np.array_equal(units, np.round(units)) == (arithmetic == "exact")
    assert dpmf.jax.step_of(loop.state) == STEPS
    assert list(loop.batches) == [] == list(loop.run.batches(loop.state))


def test_sums_beyond_the_grid_are_rounded_to_it_and_large_ones_are_not():
    grid = begun(jnp.zeros(8))._split[2]
    values = np.array([1e-30, -1e-9, 0.3, 1 / 3, 1e6, -3e5, 2.0**-126, 1e30], np.float32)
    expected = on_grid(values)
    assert (expected != values).any() and (expected[4:6] == values[4:6]).all()
    # As large as a sum is taken for, more than a million contributions.
    expected[7] = 2**30 * grid
    zeros_with_noise(dimension=8).add_to(expected)
    assert flat(Loop(begun(jnp.zeros(8)), parameters=jnp.zeros(8))(summed(jnp.asarray(values)))).tobytes() == expected.tobytes()


def test_ties_are_decided_before_the_sum_is_known():
    """Sums that bring every coordinate next to a tie, from both sides, and onto the last number before it."""
    size = 4000
    run = begun(jnp.zeros(size))
    unit, shift, _ = run._split
    loop = Loop(run, parameters=jnp.zeros(size))
    stream = zeros_with_noise(dimension=size)
    for offset in (-2, -1, 0, 1, 3, 0):
        def beside(batch):
            _, rest = (np.asarray(word[0]) for word in batch.noise.rows)
            near = (1 << (shift - 1)) - rest.astype(np.int64) + offset
            # In single precision they have to have room.
            assert (np.abs(near) < 1 << 24).any()
            near = np.where(np.abs(near) < 1 << 24, near, 0)
            beside.sums = (near * unit).astype(np.float32)
            return summed(jnp.asarray(beside.sums))

        noisy = np.asarray(loop(beside))
        expected = beside.sums.copy()
        stream.add_to(expected)
        assert noisy.tobytes() == expected.tobytes()


def test_no_python_is_called_and_the_step_is_exported_for_accelerators():
    for place in (lambda values: values, lambda values: sharded(values, SPECS["leading rows"])):
        parameters = place(tree(0))
        run = begun(parameters)
        optimizer = dpmf.jax.sgd(run, 0.1)
        state, batch = optimizer.init(parameters), next(run.batches())
        step = jax.jit(lambda parameters, state, batch: optimizer.update(summed(parameters), state, parameters, batch=batch))
        text = step.lower(parameters, state, batch).as_text()
        assert "stablehlo.add" in text and "callback" not in text and "py" + "thon" not in text
        exported = jax.export.export(step, platforms=["cpu", "cuda", "tpu"])(parameters, state, batch)
        assert exported.platforms == ("cpu", "cuda", "tpu") and "callback" not in exported.mlir_module()
    # A callback would be seen.
    asks = jax.jit(lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x))
    assert "callback" in asks.lower(jnp.float32(0)).as_text()


def test_a_scan_takes_stacked_rows():
    run = begun()
    noise = dpmf.jax.add_correlated_noise(run)
    gradients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[tree(step) for step in range(STEPS)])

    @jax.jit
    def several(state, gradients, batches):
        def body(state, given):
            noisy, state = noise.update(summed(given[0]), state, batch=given[1])
            return state, noisy

        return jax.lax.scan(body, state, (gradients, batches))

    state, begin = noise.init(tree(0)), 0
    for batches in run.batches(state, together=4):
        count = len(batches.step)
        before = state
        state, noisy = several(state, jax.tree.map(lambda leaf: leaf[begin : begin + count], gradients), batches)
        run.commit(state)
        for step in range(count):
            assert flat(jax.tree.map(lambda leaf: leaf[step], noisy)).tobytes() == expected_rows()[begin + step].tobytes()
        begin += count
    assert begin == STEPS
    # The same chunk once more, of other data, is found.
    other, _ = several(before, jax.tree.map(lambda leaf: leaf[:2], gradients), batches)
    with pytest.raises(dpmf.StepReusedError, match="step 4 was committed before, with a different sum"):
        run.commit(other)
    with pytest.raises(ValueError, match="together is 129"):
        run.batches(state, together=129)


def test_it_works_within_shard_map_and_cond():
    """Every device has its part of parameters, gradients and noise; sums over devices and the update are in one shard_map."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    whole = NamedSharding(mesh, PartitionSpec("model"))
    parameters = jax.device_put(jnp.zeros((6, 3)), whole)
    run = begun(parameters)
    noise = dpmf.jax.add_correlated_noise(run)
    state, replicated = noise.init(parameters), PartitionSpec()
    batch_specs = dpmf.jax.Batch(replicated, None, None, None, run.specs)

    def part(gradients, state, batch, forget):
        total = dpmf.jax.Sum.of(jax.lax.cond(forget, lambda g: g, lambda g: jax.lax.psum(g, "data"), gradients[0]), 4)
        return noise.update(total, state, batch=batch)

    step = jax.jit(jax.shard_map(
        part, mesh=mesh, in_specs=(PartitionSpec("data", "model"), replicated, batch_specs, replicated),
        out_specs=(PartitionSpec("model"), replicated), check_vma=False))
    gradients = on_grid(np.random.default_rng(0).standard_normal((4, 6, 3)))
    stream = zeros_with_noise(dimension=18)
    for batch in run.batches(state):
        if int(batch.step) == 1:
            # A forgotten psum releases nothing.
            noisy, bad = step(gradients, state, batch, True)
            assert not flat(noisy).any()
            with pytest.raises(dpmf.MismatchError, match="1 arrays of step 1 differ between devices"):
                run.commit(bad)
        noisy, state = step(gradients, state, batch, False)
        run.commit(state)
        expected = gradients.sum(axis=0).reshape(-1)
        stream.add_to(expected)
        assert flat(noisy).tobytes() == expected.tobytes()


# ---------------------------------------------------------------------------------------------------------------------
# Misuse
# ---------------------------------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_come_back_ends_the_loop():
    run = begun()
    noise = dpmf.jax.add_correlated_noise(run)
    state = noise.init(tree(0))
    with pytest.raises(dpmf.MismatchError, match="step 0 was handed out, but its result did not come back: call run.commit"):
        for batch in run.batches(state):
            _, state = noise.update(summed(tree(0)), state, batch=batch)
    # It is the same batch that comes again, and it may still come back.
    again = next(run.batches())
    assert again is batch
    with pytest.raises(dpmf.MismatchError, match="holds no outcome of step 0"):
        run.commit(noise.init(tree(0)))
    run.commit(state)
    with pytest.raises(dpmf.MismatchError, match="no step is outstanding"):
        run.commit(state._replace(step=jnp.int32(4)))
    run.commit(state)


def test_a_step_that_was_used_twice_is_found():
    """At the latest when the second outcome comes back, or a state that was made of it."""
    loop = Loop(begun())
    first, batch = loop.state, next(loop.batches)
    one = loop.update(summed(tree(0)), first, batch)[1]
    other = loop.update(summed(tree(1)), first, batch)[1]
    same = loop.update(summed(tree(0)), first, batch)[1]
    loop.run.commit(one)
    loop.run.commit(same)
    # The next batch goes on from what was committed alone.
    batch = next(loop.batches)
    for state, said in ((other, "another update than the one that was committed"), (first, "used for one update only")):
        noisy, bad = loop.update(summed(tree(1)), state, batch)
        assert not flat(noisy).any()
        with pytest.raises(dpmf.StepReusedError, match=said):
            loop.run.commit(bad)
        with pytest.raises(dpmf.StepReusedError, match=said):
            loop.run.batches(state)
    noisy, state = loop.update(summed(tree(1)), one, batch)
    assert flat(noisy).tobytes() == expected_rows()[1].tobytes()
    loop.run.commit(state)
    with pytest.raises(dpmf.StepReusedError, match="step 1 was committed before, with a different sum"):
        loop.run.commit(loop.update(summed(tree(2)), one, batch)[1])
    with pytest.raises(dpmf.HaltedError, match="used with two sums"):
        next(loop.batches)


def test_a_run_whose_row_met_two_sums_stays_ended(tmp_path):
    loop = Loop(begun(journal=tmp_path, experiment="test"))
    batch = next(loop.batches)
    before = loop.state
    after = loop.update(summed(tree(0)), before, batch)[1]
    loop.run.commit(after)
    with pytest.raises(dpmf.StepReusedError, match="step 0 was committed before"):
        loop.run.commit(loop.update(summed(tree(1)), before, batch)[1])
    loop.run.close()
    with pytest.raises(dpmf.StepReusedError, match="step 0 of the run at .* was committed twice.*releases nothing more"):
        begun(journal=tmp_path)


def chunks(run):
    """A compiled scan over steps that were handed out together."""
    noise = dpmf.jax.add_correlated_noise(run)

    @jax.jit
    def several(state, gradients, batches):
        def body(state, given):
            noisy, state = noise.update(summed(given[0]), state, batch=given[1])
            return state, noisy

        return jax.lax.scan(body, state, (gradients, batches))

    return noise.init(tree(0)), several


def stacked(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def test_steps_that_a_refused_chunk_had_released_are_not_used_with_other_data():
    """What came before the step that was refused was released, and is on record: the chunk may come again with the same sums only."""
    bad = {**tree(2), "bias": tree(2)["bias"].at[0].set(np.nan)}
    for again, fine in (((0, 1, 2), True), ((0, 3, 2), False), ((3, 1, 2), False)):
        run = begun()
        state, several = chunks(run)
        batches = next(run.batches(state, together=3))
        with pytest.raises(ValueError, match="of the gradient of step 2 are not finite"):
            run.commit(several(state, stacked(tree(0), tree(1), bad), batches)[0])
        after, noisy = several(state, stacked(*map(tree, again)), batches)
        if fine:
            run.commit(after)
            for step in range(3):
                assert flat(jax.tree.map(lambda leaf: leaf[step], noisy)).tobytes() == expected_rows()[step].tobytes()
            continue
        with pytest.raises(dpmf.StepReusedError, match="was committed before, with a different sum"):
            run.commit(after)
        # Nothing more is handed out, wherever it would go on from.
        for left in (state, after):
            with pytest.raises(dpmf.StepReusedError):
                next(run.batches(left))


def test_a_chunk_that_was_used_twice_is_found_wherever_it_differs():
    for other in (0, 1, 2):
        run = begun()
        state, several = chunks(run)
        batches = next(run.batches(state, together=3))
        after, _ = several(state, stacked(*map(tree, range(3))), batches)
        run.commit(after)
        run.commit(several(state, stacked(*map(tree, range(3))), batches)[0])
        different = [tree(9 if step == other else step) for step in range(3)]
        with pytest.raises(dpmf.StepReusedError, match=f"step {other} was committed before, with a different sum"):
            run.commit(several(state, stacked(*different), batches)[0])


def test_an_interrupt_between_settling_and_the_next_batch_hides_no_second_sum(monkeypatch):
    """The outcome of a step is on record, but the program does not know yet: another outcome is compared with it."""
    loop = Loop(begun())
    batch = next(loop.batches)
    one = loop.update(summed(tree(0)), loop.state, batch)[1]
    other = loop.update(summed(tree(1)), loop.state, batch)[1]
    with monkeypatch.context() as patch:
        def interrupted(run, step, state, of=dpmf.jax.Run._commit):
            of(run, step, state)
            raise KeyboardInterrupt

        patch.setattr(dpmf.jax.Run, "_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.run.commit(one)
    with pytest.raises(dpmf.StepReusedError, match="step 0 was committed before, with a different sum"):
        loop.run.commit(other)
    for left in (loop.state, one, other):
        with pytest.raises(dpmf.StepReusedError):
            next(loop.run.batches(left))


def test_rows_keep_their_memory_as_long_as_anything_uses_them():
    """Devices use a row where the host wrote it; the next row goes elsewhere while they, or a caller, still do."""
    memory = dpmf.jax._memory.Memory()
    size = 1_000_000
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, y: jnp.sin(y) + 1e-3 * x, x))
    expected = np.asarray(slow(jnp.full(size, 0.5, jnp.float32)))
    row = memory.take(size, np.float32)
    row[:] = 0.5
    place = row.ctypes.data
    on_device = jax.device_put(row)
    assert on_device.unsafe_buffer_pointer() == place
    running = slow(on_device)
    part = np.split(row, [16])[1].reshape(4, -1)
    del row, on_device
    memory.take(size, np.float32)[:] = 7.0
    assert np.array_equal(np.asarray(running), expected)
    running.delete()
    # A piece of it is enough to keep all of it.
    assert memory.take(size, np.float32).ctypes.data != place and part[0, 0] == 0.5
    del part
    # JAX lets go of what it has used when it is called again.
    gc.collect()
    jnp.zeros(1).block_until_ready()
    assert place in {word.ctypes.data for word in [memory.take(size, np.float32) for _ in range(4)]}
    assert len(memory.take(10, np.float32)) == 10


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_batches_that_are_kept_keep_their_rows(arithmetic):
    """Rows come from memory that is used again, and those of a batch that somebody holds stay what they are."""
    loop = Loop(begun(arithmetic=arithmetic, ahead=1))
    kept, rows = [], []
    for step in range(STEPS):
        batch = next(loop.batches)
        made, after = loop.update(summed(tree(step)), loop.state, batch)
        assert flat(made).tobytes() == expected_rows(arithmetic)[step].tobytes()
        loop.run.commit(after)
        loop.state = after
        if step % 2 == 0:
            kept.append(batch)
            rows.append([np.array(leaf) for leaf in jax.tree.leaves(batch.noise.rows)])
    for batch, row in zip(kept, rows):
        assert all(map(np.array_equal, jax.tree.leaves(batch.noise.rows), row))
    loop.run.close()


def test_what_was_refused_goes_no_further():
    """Also where nobody looks: a state after a refusal releases nothing, in the scan that goes on with it."""
    loop = Loop(begun())
    batch = next(loop.batches)
    bad = {**tree(0), "bias": tree(0)["bias"].at[0].set(np.nan)}
    _, stuck = loop.update(summed(bad), loop.state, batch)
    noisy, still = loop.update(summed(tree(0)), stuck, batch)
    assert not flat(noisy).any() and int(still.step) == 0
    with pytest.raises(dpmf.MismatchError, match="the update of an earlier step was refused"):
        loop.run.commit(still)
    with pytest.raises(dpmf.MismatchError, match="was refused, and its state cannot be used"):
        loop.run.batches(stuck)
    noisy, state = loop.update(summed(tree(0)), loop.state, batch)
    loop.run.commit(state)
    assert flat(noisy).tobytes() == expected_rows()[0].tobytes()


@pytest.mark.parametrize("nested", [lambda update: update, jax.jit], ids=["plain", "jit"])
def test_lanes_of_a_vmap_do_not_share_a_row(nested):
    run = begun()
    noise = dpmf.jax.add_correlated_noise(run)
    state, batch = noise.init(tree(0)), next(run.batches())
    # One leaf with lanes is enough.
    lanes = {**tree(0), "stack": jnp.zeros((2, *SHAPES["stack"]))}
    axes = {"bias": None, "kernel": None, "stack": 0}
    update = nested(lambda gradients: noise.update(summed(gradients), state, batch=batch))
    with pytest.raises(dpmf.UnsupportedError, match="in 2 lanes of jax.vmap.*one row of noise"):
        jax.vmap(update, in_axes=(axes,))(lanes)


def test_a_state_of_another_run_or_a_later_step_is_refused():
    loop, other = Loop(begun()), Loop(begun(experiment="other"))
    noisy, bad = loop.update(summed(tree(0)), other.state, next(loop.batches))
    assert not flat(noisy).any()
    for wrong in (bad, other.state):
        with pytest.raises(dpmf.BindingError, match="another run"):
            loop.run.commit(wrong)
    with pytest.raises(dpmf.BindingError, match="another run"):
        loop.run.batches(other.state)
    later = other.state._replace(step=jnp.int32(3))
    with pytest.raises(dpmf.MismatchError, match="at step 3, but the run is at step 0.*journal=directory"):
        other.run.batches(later)
    with pytest.raises(dpmf.MismatchError, match="is at step 3, but its batch is of step 0"):
        other.run.commit(other.update(summed(tree(0)), later, next(other.batches))[1])


def test_mistakes_are_answered_before_anything_runs():
    with pytest.raises(TypeError, match=r"\['kernel'\] is bfloat16.*then cast"):
        begun({"kernel": jnp.zeros(3, jnp.bfloat16)})
    run = begun()
    noise = dpmf.jax.add_correlated_noise(run)
    with pytest.raises(ValueError, match="one run serves one model"):
        noise.init({"kernel": jnp.zeros(3)})
    state, batch = noise.init(tree(0)), next(run.batches())
    with pytest.raises(dpmf.MismatchError, match="was not given its batch.*batch=batch"):
        noise.update(summed(tree(0)), state)
    with pytest.raises(dpmf.MismatchError, match="this batch has no noise: take the batches of run.batches"):
        noise.update(summed(tree(0)), state, batch=batch._replace(noise=None))
    with pytest.raises(ValueError, match="one run serves one model"):
        noise.update(summed({"kernel": jnp.zeros(3)}), state, batch=batch)
    with pytest.raises(TypeError, match=r"that of a dpmf.jax.Run\(plan, key, parameters\), but this is a Mechanism"):
        dpmf.jax.sgd(MECHANISM)
    with pytest.raises(ValueError, match="denominator is 0"):
        begun(denominator=0)
    with pytest.raises(ValueError, match="lost_input is 'ignore'"):
        begun(lost_input="ignore")
    with pytest.raises(ValueError, match="arithmetic is 'double'"):
        begun(arithmetic="double")
    with pytest.raises(ValueError, match="no mesh for shard_map"):
        run.specs  # noqa: B018
    with pytest.raises(ValueError, match="not calibrated"):
        begun(mechanism=dpmf.make_mechanism(dpmf.Workload.prefix_sum(4), "optimal"))
    tiny = dpmf.make_mechanism(dpmf.Workload.prefix_sum(4), "optimal").calibrate(1e9, 1e-6, 1.0)
    with pytest.raises(dpmf.UnsupportedError, match="words of 32 bits.*float arithmetic"):
        begun(mechanism=tiny)


SPECS = {
    "leading rows": {"bias": ("x",), "kernel": ("x",), "stack": (None, "x")},
    "last axes": {"bias": (None,), "kernel": (None, "x"), "stack": (None, None, None)},
    "replicated": {"bias": (), "kernel": (), "stack": ()},
}


def sharded(values, specs):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return {name: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*specs[name]))) for name, leaf in values.items()}


@pytest.mark.parametrize("arithmetic, specs, journalled", [
    ("exact", "leading rows", True), ("exact", "last axes", False), ("exact", "replicated", True), ("float", "last axes", False)])
def test_shards_use_the_bits_of_an_unsharded_run(specs, journalled, arithmetic, tmp_path):
    assert jax.device_count() == 8
    specs = SPECS[specs]
    options = dict(journal=tmp_path / "journal", experiment="test") if journalled else {}
    loop = Loop(begun(sharded(tree(0), specs), arithmetic=arithmetic, **options), parameters=sharded(tree(0), specs))
    for step, row in enumerate(expected_rows(arithmetic)):
        gradient = sharded(tree(step), specs)
        noisy = loop(summed(gradient))
        assert flat(noisy).tobytes() == row.tobytes()
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), noisy, gradient)))
        # Every replica holds the same bits.
        for leaf in jax.tree.leaves(noisy):
            parts = {}
            for shard in leaf.addressable_shards:
                parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
            assert all(len(bits) == 1 for bits in parts.values())
    loop.run.close()


def test_a_device_is_given_the_noise_of_its_own_shard():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    shape = (10, 4)
    layout = dpmf.jax._layout.Layout.of(jnp.zeros(shape), NamedSharding(mesh, PartitionSpec("x")))
    assert layout.devices == (((0, 0, 20),), ((0, 20, 40),)) and layout.held == [(0, 40)]
    layout = dpmf.jax._layout.Layout.of(jnp.zeros(shape), NamedSharding(mesh, PartitionSpec(None, "x")))
    assert layout.devices[1] == tuple((2 * row, 4 * row + 2, 4 * row + 4) for row in range(10))
    numbers = np.arange(40, dtype=np.int32)
    (placed,) = layout.place([numbers], stacked=False)
    assert np.array_equal(placed, numbers.reshape(shape))
    (stacked,) = layout.place([numbers, -numbers], stacked=True)
    assert np.array_equal(stacked, np.stack([numbers, -numbers]).reshape(2, *shape))


def test_rows_of_a_large_model_are_made_and_shipped_ahead():
    """While a step runs, the next row goes to the devices, and what is released has the same bits."""
    size = 100_000
    mesh = Mesh(np.array(jax.devices()), ("x",))
    parameters = jax.device_put(jnp.zeros(size), NamedSharding(mesh, PartitionSpec("x")))
    values = on_grid(np.random.default_rng(0).standard_normal(size))
    run = begun(parameters, ahead=2, experiment="test")
    assert run._run.ahead == 2
    loop = Loop(run, parameters=parameters)
    stream = zeros_with_noise(dimension=size)
    for step in range(STEPS):
        noisy = np.asarray(loop(summed(jax.device_put(values, parameters.sharding))))
        expected = values.copy()
        stream.add_to(expected)
        assert noisy.tobytes() == expected.tobytes()
        if step < STEPS - 1:
            # The row of the step after this one was shipped before anybody asked for it.
            assert run._shipping[0] == step + 1 and len(run._shipping[1].result()) == 2
    run.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dpmf-ship")]


# ---------------------------------------------------------------------------------------------------------------------
# Journals
# ---------------------------------------------------------------------------------------------------------------------


def test_a_journal_lets_a_restart_repeat_and_go_on(tmp_path):
    loop = Loop(begun(journal=tmp_path / "journal", experiment="test"))
    for step in range(4):
        if step == 2:
            saved = jax.device_get(loop.state)
        loop(summed(tree(step)))
    loop.run.close()
    # The process died after step 3; the last saved state is that before step 2.
    loop = Loop(begun(journal=tmp_path / "journal"), state=saved)
    for step in range(2, STEPS):
        assert flat(loop(summed(tree(step)))).tobytes() == expected_rows()[step].tobytes()
    loop.run.close()


def test_a_repeated_step_releases_nothing_of_other_data(tmp_path):
    def again(state, **options):
        return Loop(begun(journal=tmp_path, **options), state=state)

    loop = Loop(begun(journal=tmp_path, experiment="test"))
    loop(summed(tree(0)))
    second = jax.device_get(loop.state)
    loop(summed(tree(1)))
    loop.run.close()

    loop = again(second)
    batch = next(loop.batches)
    noisy, bad = loop.update(summed(tree(40)), second, batch)
    assert not flat(noisy).any()
    with pytest.raises(dpmf.StepReusedError, match='released before a restart, with other gradients.*lost_input="burn"'):
        loop.run.commit(bad)
    noisy, state = loop.update(summed(tree(1)), second, batch)
    loop.run.commit(state)
    assert flat(noisy).tobytes() == expected_rows()[1].tobytes()
    loop.run.close()

    loop = again(second, lost_input="burn")
    assert not flat(loop(summed(tree(40)))).any()
    loop.run.close()

    # Another crash: the burned step stays burned, also for the input it first had.
    loop = again(second)
    assert not flat(loop(summed(tree(1)))).any()
    assert flat(loop(summed(tree(2)))).tobytes() == expected_rows()[2].tobytes()
    loop.run.close()


@pytest.mark.parametrize("together", [None, 3])
def test_a_row_that_was_out_at_a_crash_is_burned(tmp_path, together):
    """Nobody knows what it was used with: its step has no noise any more, and the others come as they would have."""
    loop = Loop(begun(journal=tmp_path, experiment="test"))
    loop(summed(tree(0)))
    saved = jax.device_get(loop.state)
    next(loop.batches if together is None else loop.run.batches(loop.state, together=together))
    loop.run.close()
    loop = Loop(begun(journal=tmp_path), state=saved)
    lost = range(1, 2 if together is None else 4)
    for step in range(1, STEPS):
        noisy = flat(loop(summed(tree(step))))
        assert not noisy.any() if step in lost else noisy.tobytes() == expected_rows()[step].tobytes()
    loop.run.close()


def test_a_row_that_is_lost_on_its_way_to_the_devices_is_not_made_again(tmp_path, monkeypatch):
    loop = Loop(begun(journal=tmp_path, experiment="test"))
    with monkeypatch.context() as patch:
        patch.setattr(dpmf.jax._layout.Layout, "place", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(loop.batches)
    with pytest.raises(dpmf.MismatchError, match="the noise of step 0 was lost on its way to the devices"):
        next(loop.run.batches(loop.state))
    loop.run.close()
    loop = Loop(begun(journal=tmp_path), state=jax.device_get(loop.state))
    assert not flat(loop(summed(tree(0)))).any()
    assert flat(loop(summed(tree(1)))).tobytes() == expected_rows()[1].tobytes()
    loop.run.close()


def test_a_row_is_on_record_before_it_is_handed_out(tmp_path, monkeypatch):
    loop = Loop(begun(journal=tmp_path, experiment="test"))
    length = (tmp_path / "process-0.journal").stat().st_size
    batch = next(loop.batches)
    assert (tmp_path / "process-0.journal").stat().st_size == length + 64
    _, state = loop.update(summed(tree(0)), loop.state, batch)
    loop.run.commit(state)
    assert (tmp_path / "process-0.journal").stat().st_size == length + 128
    loop.run.close()
    with pytest.raises(dpmf.HaltedError, match="closed"):
        next(loop.batches)


def test_a_journal_is_bound_to_mechanism_and_shards(tmp_path):
    loop = Loop(begun(journal=tmp_path, experiment="test"))
    loop(summed(tree(0)))
    loop.run.close()
    with pytest.raises(dpmf.BindingError, match="another mechanism"):
        begun(mechanism=MECHANISM.calibrate(1, 1e-6), journal=tmp_path)
    with pytest.raises(dpmf.BindingError, match="remove experiment"):
        begun(experiment="other", journal=tmp_path)
    with pytest.raises(dpmf.BindingError, match="the same sharding"):
        begun(sharded(tree(0), SPECS["leading rows"]), journal=tmp_path)
    with pytest.raises(dpmf.BindingError, match="arithmetic exact, and now they are float.*the same arithmetic"):
        begun(journal=tmp_path, arithmetic="float")
    described = json.loads((tmp_path / "run.json").read_text())
    for found, said in ((None, "dpmf 0.2 or a pre-release of 0.3, .*finish that run with the version that began it"), (3, "a newer version")):
        (tmp_path / "run.json").write_text(json.dumps({**described, "format": found} if found else
                                                      {name: value for name, value in described.items() if name != "format"}))
        with pytest.raises(dpmf.FormatError, match=said):
            begun(journal=tmp_path)
    with pytest.raises(dpmf.FormatError, match="not the description of a run"):
        (tmp_path / "run.json").write_text("{")
        begun(journal=tmp_path)


def train_a_little(directory):
    loop = Loop(begun(journal=directory))
    for step in range(2):
        loop(summed(tree(step)))
    loop.run.close()
    return loop.state


@pytest.mark.parametrize("lost", ["process-0.journal", "run.json"])
def test_a_run_that_lost_a_file_does_not_begin_again(tmp_path, lost):
    state = train_a_little(tmp_path)
    run = begun(journal=tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(dpmf.FormatError, match=f"{lost} is missing.*new run in another directory"):
        begun(journal=tmp_path)
    if lost == "process-0.journal":
        # It is missed later too.
        with pytest.raises(dpmf.FormatError, match=f"{lost} is missing"):
            run.batches(state)


@pytest.mark.parametrize("at", ["description", "journal"])
def test_a_start_that_was_interrupted_is_made_again(tmp_path, monkeypatch, at):
    """Between the description of a run and its journal, when nothing can have been released."""
    with monkeypatch.context() as patch:
        written = []

        def write(path, data):
            written.append(data)
            if len(written) == (1 if at == "description" else 2):
                if at == "description":
                    path.write_bytes(data)
                raise KeyboardInterrupt
            path.write_bytes(data)

        patch.setattr(dpmf.jax._run, "write_durably", write)
        with pytest.raises(KeyboardInterrupt):
            begun(journal=tmp_path)
    assert int(train_a_little(tmp_path).step) == 2


def test_a_state_ahead_of_its_journal_is_refused(tmp_path):
    run = begun(journal=tmp_path)
    later = dpmf.jax.add_correlated_noise(run).init(tree(0))._replace(step=jnp.int32(3))
    with pytest.raises(dpmf.MismatchError, match="the run is at step 0"):
        run.batches(later)
    run.close()
    with pytest.raises(dpmf.FormatError, match="records 0 steps, but the stream has passed 3"):
        begun(journal=tmp_path).batches(later)


def test_no_two_starts_have_the_same_noise_but_those_of_an_experiment(tmp_path):
    def first(key, **options):
        run = dpmf.jax.Run(MECHANISM, key, tree(0), **options)
        return tuple(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(next(run.batches()).noise.rows))

    key = dpmf.NoiseKey.generate()
    assert first(key) != first(key)
    assert first(KEY) != first(KEY)
    assert first(KEY, experiment="a") == first(KEY, experiment="a")
    for options in (dict(), dict(journal=tmp_path)):
        with pytest.raises(ValueError, match="the same noise at every start.*from_seed"):
            first(key, experiment="a", **options)


@pytest.mark.parametrize("place", [lambda values: values, lambda values: sharded(values, SPECS["leading rows"])],
                         ids=["whole", "sharded"])
def test_what_is_not_finite_is_not_released(place):
    loop = Loop(begun(place(tree(0))), parameters=place(tree(0)))
    batch = next(loop.batches)
    for value in (np.nan, np.inf, -np.inf):
        bad = tree(0)
        bad["kernel"] = bad["kernel"].at[5, 2].set(value)
        noisy, state = loop.update(summed(place(bad)), loop.state, batch)
        assert not flat(noisy).any()
        with pytest.raises(ValueError, match="1 numbers of the gradient of step 0 are not finite"):
            loop.run.commit(state)
    # The step is still there, for a gradient that is.
    noisy, state = loop.update(summed(place(tree(0))), loop.state, batch)
    loop.run.commit(state)
    assert flat(noisy).tobytes() == expected_rows()[0].tobytes()


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------------------


def test_multi_steps_of_optax_is_refused_before_anything_is_released():
    optimizer = optax.MultiSteps(dpmf.jax.sgd(begun()), every_k_schedule=2)
    for start in (optimizer.init, jax.jit(optimizer.init)):
        with pytest.raises(dpmf.UnsupportedError, match=r"calls update for every part of a step.*micro_batch=…\).*multi_steps\(optimizer"):
            start(tree(0))


def test_parts_of_a_step_are_added_up():
    run = begun()
    optimizer = dpmf.jax.multi_steps(dpmf.jax.add_correlated_noise(run), 3)
    update = jax.jit(lambda total, state, batch: optimizer.update(total, state, batch=batch))
    state = optimizer.init(tree(0))
    stream = zeros_with_noise()
    for batch in run.batches(state):
        step = int(batch.step)
        for part in range(3):
            updates, state = update(summed(tree(3 * step + part)), state, batch)
            assert flat(updates).any() == (part == 2)
        run.commit(state)
        expected = on_grid(flat(tree(3 * step)) + flat(tree(3 * step + 1)) + flat(tree(3 * step + 2)))
        stream.add_to(expected)
        assert flat(updates).tobytes() == expected.tobytes()
    assert dpmf.jax.step_of(state) == STEPS


def some_frozen(names=("kernel",)):
    return {name: name in names for name in SHAPES}


def test_leaving_out_parameters_around_the_noise_is_refused():
    """Their sums would go on without noise."""
    for wrapped in (
        optax.masked(dpmf.jax.add_correlated_noise(begun()), some_frozen()),
        optax.multi_transform({True: optax.sgd(0.1), False: dpmf.jax.sgd(begun())}, some_frozen()),
    ):
        with pytest.raises(dpmf.UnsupportedError, match="their sums would be used without noise.*chain it after the noise"):
            wrapped.init(tree(0))


@pytest.mark.parametrize("behind, sign", [
    (lambda: optax.masked(optax.set_to_zero(), some_frozen()), 1),
    (lambda: optax.multi_transform({True: optax.set_to_zero(), False: optax.sgd(1.0)}, some_frozen()), -1)],
    ids=["masked", "multi_transform"])
def test_parameters_are_frozen_behind_the_noise(behind, sign):
    def make(run):
        return optax.with_extra_args_support(optax.chain(dpmf.jax.add_correlated_noise(run), behind()))

    loop = Loop(begun(), make)
    for step, row in enumerate(expected_rows()):
        updates = loop(summed(tree(step)))
        assert not updates["kernel"].any()
        assert flat(updates["bias"]).tobytes() == (sign * row[:8]).tobytes()


def test_pmap_and_a_shard_map_over_other_axes_are_refused():
    run = begun(jnp.zeros(4))
    noise = dpmf.jax.add_correlated_noise(run)
    state, batch = noise.init(jnp.zeros(4)), next(run.batches())
    with pytest.raises(dpmf.UnsupportedError, match="on each of several devices.*call update outside"):
        jax.pmap(lambda gradient: noise.update(summed(gradient), state, batch=batch))(jnp.zeros((8, 4)))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    spread = jax.shard_map(lambda gradient: noise.update(summed(gradient), state, batch=batch)[0], mesh=mesh,
                           in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    with pytest.raises(dpmf.UnsupportedError, match="on each of several devices \\(data\\)"):
        jax.jit(spread)(jnp.zeros(32))


OPTIMIZERS = {
    "plain": dict(),
    "momentum": dict(momentum=0.9, schedule="cooldown:0.5:0.1"),
    "nesterov": dict(momentum=0.8, nesterov=True),
    "decoupled": dict(momentum=0.9, weight_decay=0.05, learning_rate=0.3),
    "coupled": dict(momentum=0.9, weight_decay=0.05, coupled=True, learning_rate=0.3),
}


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_sgd_computes_the_planned_workload(options):
    mechanism = dpmf.mechanism(steps=STEPS, epsilon=8, delta=1e-6, **options)
    parameters = jnp.zeros(DIMENSION)
    run = begun(parameters, mechanism=mechanism, denominator=4.0)
    optimizer = dpmf.jax.sgd(run)
    state = optimizer.init(parameters)
    stream = zeros_with_noise(mechanism)
    noisy, iterates = [], []

    @jax.jit
    def step(parameters, state, gradient, batch):
        updates, state = optimizer.update(summed(gradient), state, parameters, batch=batch)
        return optax.apply_updates(parameters, updates), state

    for batch in run.batches(state):
        gradient = on_grid(flat(tree(int(batch.step))), 1.0)
        parameters, state = step(parameters, state, jnp.asarray(gradient), batch)
        run.commit(state)
        stream.add_to(gradient)
        noisy.append(gradient / 4.0)
        iterates.append(np.asarray(parameters))
    expected = -mechanism.workload.matrix() @ np.stack(noisy)
    assert np.abs(np.stack(iterates) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_sgd_refuses_what_was_not_planned():
    decayed = dpmf.mechanism(steps=STEPS, weight_decay=0.1, epsilon=8, delta=1e-6)
    with pytest.raises(dpmf.MismatchError, match="learning_rate=0.5"):
        dpmf.jax.sgd(begun(mechanism=decayed), learning_rate=0.5)
    matrix = dpmf.mechanism(workload=dpmf.Workload.from_matrix(np.tri(4)), epsilon=8, delta=1e-6)
    with pytest.raises(dpmf.UnsupportedError, match="names no optimizer"):
        dpmf.jax.sgd(begun(mechanism=matrix))


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_clipped_contributions_stay_within_the_norm(scale):
    # All of one sign and nearly equal: the sums of squares whose rounding error adds up.
    random = np.random.default_rng(0)
    leaves = {"a": 1 + 1e-3 * random.random((3, 300_001)), "b": random.standard_normal((3, 7, 9))}
    gradients = {name: jnp.asarray(scale * leaf, jnp.float32) for name, leaf in leaves.items()}
    for clip in (1.0, 0.3):
        for example in range(3):
            one = jax.tree.map(lambda leaf: leaf[example : example + 1], gradients)
            clipped = flat(jax.jit(dpmf.jax.clipped_sum, static_argnums=1)(one, clip)).astype(np.float64)
            norm, had = np.linalg.norm(clipped), np.linalg.norm(flat(one).astype(np.float64))
            assert norm <= min(clip, had) * (1 + 1e-7) and norm <= clip
            # Half a grid point for every coordinate.
            assert norm >= 0.999 * min(clip, had) - 2**-30 * np.sqrt(300_064) * clip


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("count, parts", [(9, 1), (4096, 1), (65_536, 1), (256, 16)])
def test_one_example_moves_the_sum_by_at_most_the_clip(dtype, count, parts):
    """Examples that all pull the same way: float32 would round every partial sum."""
    random = np.random.default_rng(1)
    gradients = jnp.asarray(1 + random.random((count, 5)), dtype)
    others = jnp.asarray(1 + random.random((parts - 1, count, 5)), dtype)
    clipped = jax.jit(lambda values: dpmf.jax.clipped_sum(values, 1.0, parts=parts))

    def total(values):
        added = clipped(values)
        assert added.gradients.dtype == jnp.float32
        for other in others:
            added = added + clipped(other)
        assert int(added.contributions) == count * parts
        return np.asarray(added.gradients, np.float64)

    def moved(index):
        """Squared, as real numbers: what exact arithmetic takes the sums for."""
        rest = total(gradients.at[index].set(0))
        return sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(whole.tolist(), rest.tolist()))

    whole = total(gradients)
    moves = [moved(index) for index in range(0, count, max(count // 16, 1))]
    assert Fraction(0.98) ** 2 < max(moves) <= 1


@pytest.mark.parametrize("count", [300, 65_536])
def test_sums_are_exact(count):
    """The same bits in any order, and close to the sum in float64."""
    random = np.random.default_rng(2)
    gradients = ((0.5 + random.random((count, 7))) * 10.0 ** random.integers(-4, 4, (count, 1))).astype(np.float32)
    sums = [flat(dpmf.jax.clipped_sum(gradients[order], 1.0)) for order in (slice(None), slice(None, None, -1))]
    assert sums[0].tobytes() == sums[1].tobytes()
    norms = np.linalg.norm(gradients.astype(np.float64), axis=1, keepdims=True)
    room = 1 - 2**-13 - count * 2**-22
    expected = (gradients * np.minimum(1, room / norms)).sum(axis=0)
    np.testing.assert_allclose(sums[0], expected, rtol=1e-4)


def test_too_many_to_add_in_float32():
    with pytest.raises(ValueError, match="100 parts of 4096 examples are too many"):
        dpmf.jax.clipped_sum(jnp.zeros((4096, 2)), 1.0, parts=100)
    with pytest.raises(ValueError, match="clip is 0.0*1, but it must lie between 1e-20 and 1e20"):
        dpmf.jax.clipped_sum(jnp.zeros((4, 2)), 1e-30)
    with pytest.raises(ValueError, match="the same number"):
        dpmf.jax.clipped_sum([jnp.zeros((4, 2)), jnp.zeros((3, 2))], 1.0)


def test_contributions_that_are_not_finite_count_as_zero():
    gradients = jnp.asarray([[3.0, 4.0], [np.nan, 1.0], [np.inf, 1.0], [0.0, 0.0], [0.0, 0.5]])
    total = flat(dpmf.jax.clipped_sum(gradients, 1.0))
    assert np.allclose(total, [0.6, 0.8 + 0.5], rtol=2e-4)


VECTORS = json.loads((pathlib.Path(__file__).parents[2] / "golden" / "clip.json").read_text())


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["about"])
def test_clipping_is_that_of_the_core(vector):
    """But for single precision: what is clipped is clipped lower, by a share of 2⁻¹³ and of 2⁻²² for every example, what is not is put
    on a grid of 2⁻³⁰ to 2⁻²⁹ of the clip, and the sum is rounded to float32."""
    contributions = np.array(vector["contributions"], np.uint32).view(np.float32)
    clip, count = vector["clip"], len(contributions)
    total, seen = dpmf.jax.accumulate(lambda p, x: p @ x, jnp.zeros(contributions.shape[1]), contributions, clip=clip)
    expected = np.array(vector["sum"]) * vector["unit"]
    longer = sum(vector["clipped"])
    room = clip * (1.01 * longer * (2**-13 + 2**-22 * count) + 2**-29 * count) + 2**-23 * np.abs(expected)
    assert (np.abs(flat(total) - expected) <= room).all()
    assert float(seen.unprotected_clipped) == pytest.approx(longer / count)
    assert int(total.contributions) == count


def test_the_example_runs():
    example = pathlib.Path(__file__).parents[2] / "examples" / "python" / "jax_training.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


PROCESS = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, numpy as np
rank, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
import dpmf, dpmf.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mechanism = dpmf.mechanism(steps=3, epsilon=8, delta=1e-6)
whole = jnp.zeros(10)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
placed = jax.make_array_from_callback((10,), sharding, lambda index: np.zeros(10, np.float32)[index])
try:
    dpmf.jax.Run(mechanism, dpmf.NoiseKey.generate(), placed)
    print("two keys were taken")
except AssertionError as refused:
    print("refused:", "differ in their key" in str(refused))
key = dpmf.NoiseKey.read(directory + "/key")
try:
    dpmf.jax.Run(mechanism, key, whole, journal=directory + "/journal")
    print("two models were taken")
except dpmf.UnsupportedError as refused:
    print("refused:", "train a model of its own" in str(refused))
run = dpmf.jax.Run(mechanism, key, placed, examples=30, denominator=1.0, journal=directory + "/journal")
print("drawn", run.drawn.run, run.drawn.at(1).indices.tolist())
noise = dpmf.jax.add_correlated_noise(run)
state = noise.init(placed)
update = jax.jit(lambda total, state, batch: noise.update(dpmf.jax.Sum.of(total, batch=batch), state, batch=batch))
for batch in run.batches(state):
    noisy, state = update(placed, state, batch)
    run.commit(state)
np.save(f"{directory}/{rank}.npy", np.asarray(noisy.addressable_shards[0].data))
print("run", run.name)
"""


def test_two_processes_are_one_run(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key = dpmf.NoiseKey.create(tmp_path / "key")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    processes = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(rank), str(port), str(tmp_path)], env=environment,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=900) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    lines = [[line for line in out.splitlines() if line.startswith(("refused", "drawn", "run", "two"))] for out, _ in printed]
    assert lines[0] == lines[1]
    *refused, drawn, run = lines[0]
    assert refused == ["refused: True"] * 2 and drawn.startswith("drawn")
    mechanism = dpmf.mechanism(steps=3, epsilon=8, delta=1e-6)
    stream = dpmf.NoiseStream(mechanism, key, run=run.removeprefix("run "), dimension=10)
    stream.skip_to(2)
    both = np.concatenate([np.load(tmp_path / f"{rank}.npy") for rank in range(2)])
    assert both.tobytes() == stream.next_row().tobytes()
    assert sorted(path.name for path in (tmp_path / "journal").iterdir() if path.suffix != ".lock") == [
        "process-0.journal", "process-1.journal", "run-1.json", "run.json"]


def test_a_mechanism_that_counts_on_sampling_needs_its_sampler():
    made = dpmf.make_mechanism(dpmf.Workload.prefix_sum(STEPS), "banded-toeplitz:bands=2")
    mechanism = made.with_sampling("cyclic-poisson:2:0.1").calibrate(4, 1e-5)
    with pytest.raises(dpmf.MismatchError, match=r"relies on sampling cyclic-poisson:2:0.1.*make the run from the plan"):
        begun(mechanism=mechanism)

    def sampler(sampling="cyclic-poisson:2:0.1", steps=STEPS):
        return dpmf.Sampler(sampling, KEY, units=100, steps=steps, run="test")

    for wrong in ("cyclic-poisson:2:0.2", "cyclic-poisson:1:0.1", "balls-in-bins:2"):
        with pytest.raises(dpmf.MismatchError, match=f"the sampler is {wrong}, but"):
            begun(mechanism=mechanism, sampler=sampler(wrong))
    with pytest.raises(dpmf.MismatchError, match="the run has 7 steps"):
        begun(mechanism=mechanism, sampler=sampler(steps=STEPS + 1))
    # Means are over the expected batch, of a sum of nobody too.
    nobody = {"w": jnp.zeros(4, jnp.float32)}
    loop = Loop(begun(nobody, mechanism=mechanism, sampler=sampler()), parameters=nobody)
    updates = loop(dpmf.jax.Sum.of(nobody, 0))
    row = np.zeros(4, np.float32)
    zeros_with_noise(mechanism, 4).add_to(row)
    np.testing.assert_allclose(updates["w"], row / sampler().expected_batch, rtol=1e-6)
    assert loop.run.expected_batch == 5.0
    # No more than its members take part.
    _, bad = loop.update(dpmf.jax.Sum.of(nobody, 99), loop.state, next(loop.batches))
    with pytest.raises(dpmf.MismatchError, match="examples were handed out for it"):
        loop.run.commit(bad)


# ---------------------------------------------------------------------------------------------------------------------
# Several epochs
# ---------------------------------------------------------------------------------------------------------------------

EXAMPLES, BATCH, EPOCHS = 60, 20, 4


def planned(**options):
    defaults = dict(examples=EXAMPLES, batch=BATCH, epochs=EPOCHS, momentum=0.9, epsilon=8, delta=1e-5, cache=False)
    return dpmf.plan(**{**defaults, **options})


@functools.lru_cache
def made(name, sampling=None, participation="single"):
    """A mechanism of a name, with what it counts on, for the steps of the plans here."""
    workload = dpmf.Workload.sgd(EXAMPLES // BATCH * EPOCHS, momentum=0.9)
    mechanism = dpmf.make_mechanism(workload, name, participation=participation)
    return (mechanism if sampling is None else mechanism.with_sampling(sampling)).calibrate(8, 1e-5)


@functools.lru_cache
def blt_in_bins():
    """As the planner fits it, since bins count on an encoder that is not negative."""
    plan = planned()
    assert plan.chosen["mechanism"] in ("banded-inverse", "blt") and plan.sampling == "balls-in-bins:3"
    return plan.mechanism


#: Every mechanism that is planned for several epochs, under every sampler.
SEVERAL = {
    "blt, balls in bins": lambda: blt_in_bins(),
    "banded-inverse, balls in bins": lambda: made("banded-inverse:bands=2", "balls-in-bins:3"),
    "banded-toeplitz, balls in bins": lambda: made("banded-toeplitz:bands=3", "balls-in-bins:3"),
    "banded-toeplitz, cyclic Poisson": lambda: made("banded-toeplitz:bands=3", "cyclic-poisson:3:0.9"),
    "banded, cyclic Poisson": lambda: made("banded:bands=3", "cyclic-poisson:3:0.9"),
    "independent, Poisson": lambda: made("independent", "cyclic-poisson:1:0.3"),
    "recall, epochs": lambda: made("recall", None, "epochs:4"),
    "blt, min-separation": lambda: made("blt", None, "min-separation:3:2"),
    "banded-toeplitz, epochs": lambda: made("banded-toeplitz:bands=3", None, "epochs:4"),
}


several = pytest.mark.parametrize("make", SEVERAL.values(), ids=SEVERAL)


DATA = np.random.default_rng(3).standard_normal((EXAMPLES, 5)).astype(np.float32)


def loss(parameters, example):
    return jnp.sum(jnp.sin(parameters["w"] * example)) + parameters["b"]


@several
def test_batches_are_those_of_the_sampler_in_one_shape(make):
    mechanism = make()
    batches = dpmf.jax.Batches(mechanism, KEY, examples=EXAMPLES, experiment="test")
    assert len(batches) == mechanism.steps == len(list(batches))
    taken = [[] for _ in range(EXAMPLES)]
    for step, batch in enumerate(batches):
        assert batch.step == step and batch.indices.shape == batch.mask.shape == (batches.size,)
        members = batch.indices[batch.mask]
        assert sorted(set(members.tolist())) == sorted(members.tolist()) == sorted(batches.members(step).tolist())
        for member in members:
            taken[member].append(step)
        if mechanism.sampling != "none":
            drawn = dpmf.Sampler(mechanism.sampling, KEY, units=EXAMPLES, steps=mechanism.steps, run="test")
            assert drawn.members(step).tolist() == members.tolist()
            assert batches.expected_batch == drawn.expected_batch
    if mechanism.sampling == "none":
        separation, times = dpmf._checks.participation_of(mechanism)
        assert all(1 <= len(steps) <= times and all(np.diff(steps) >= separation) for steps in taken)
        assert batches.size == -(-EXAMPLES // max(separation, -(-mechanism.steps // times)))


def test_batches_without_sampling_keep_their_order_for_a_run():
    """The order is a function of the run alone, so that a newer numpy goes on with it."""
    mechanism = made("recall", None, "epochs:4")
    first = dpmf.jax.Batches(mechanism, KEY, examples=EXAMPLES, experiment="test")
    assert first.members(0)[:6].tolist() == [18, 27, 41, 9, 46, 56]
    other = dpmf.jax.Batches(mechanism, KEY, examples=EXAMPLES)
    assert other.members(0).tolist() != dpmf.jax.Batches(mechanism, KEY, examples=EXAMPLES).members(0).tolist()


def test_the_size_of_batches_is_seldom_exceeded_and_does_not_depend_on_the_draws():
    from scipy.stats import binom

    for units, rate in ((60_000, 0.01), (1000, 0.3), (50, 0.02), (10, 1.0), (200, 0.9)):
        size = dpmf.jax._data._seldom_longer(units, rate, 1e12)
        assert binom.sf(size, units, rate) <= 1e-12
        # And not much longer than it has to be.
        assert size == units or binom.sf(0.9 * size - 3, units, rate) > 1e-12
    plan = planned()
    sizes = {dpmf.jax.Batches(plan, dpmf.NoiseKey.generate()).size for _ in range(5)}
    assert len(sizes) == 1


def test_a_batch_beyond_the_size_is_refused_and_nobody_left_out():
    plan = planned()
    whole = dpmf.jax.Batches(plan, KEY, experiment="test")
    longest = max(len(whole.members(step)) for step in range(plan.steps))
    narrow = dpmf.jax.Batches(plan, KEY, experiment="test", size=longest - 1)
    with pytest.raises(dpmf.MismatchError, match=f"has {longest} examples, but size is {longest - 1}.*size={longest}"):
        list(narrow)
    assert len(list(dpmf.jax.Batches(plan, KEY, experiment="test", size=longest))) == plan.steps


def test_mistakes_with_batches_are_answered():
    plan = planned()
    with pytest.raises(ValueError, match="examples is missing"):
        dpmf.jax.Batches(plan.mechanism, KEY)
    with pytest.raises(ValueError, match="the same noise at every start"):
        dpmf.jax.Batches(plan, dpmf.NoiseKey.generate(), experiment="a")
    batches = dpmf.jax.Batches(plan, KEY)
    with pytest.raises(dpmf.MismatchError, match="made for another mechanism"):
        dpmf.jax.Run(planned(epsilon=4), KEY, tree(0), batches=batches)
    with pytest.raises(ValueError, match="both determine who takes part"):
        dpmf.jax.Run(plan, KEY, tree(0), batches=batches, sampler=plan.sampler(KEY))
    with pytest.raises(ValueError, match="describe batches that the run makes itself"):
        dpmf.jax.Run(plan, KEY, tree(0), batches=batches, size=9)
    with pytest.raises(ValueError, match=f"there are {plan.steps} steps"):
        batches.at(plan.steps)
    loop = Loop(dpmf.jax.Run(plan, KEY, tree(0), batches=batches), compiled=False)
    batch = next(loop.batches)
    with pytest.raises(dpmf.MismatchError, match="does not name its batch.*batch=batch"):
        loop.update(summed(tree(0)), loop.state, batch)
    with pytest.raises(dpmf.MismatchError, match=r"this is a dict.*Sum.of\(gradients"):
        loop.update(tree(0), loop.state, batch)
    noisy, bad = loop.update(summed(tree(0), batches.at(1)), loop.state, batch)
    assert not flat(noisy).any()
    with pytest.raises(dpmf.MismatchError, match="drawn for step 1, but this is step 0"):
        loop.run.commit(bad)
    # It was refused before the noise was used.
    everybody = dpmf.jax.Sum.of(tree(0), batch=batches.at(0))
    noisy, state = loop.update(everybody, loop.state, batch)
    loop.run.commit(state)
    assert flat(noisy).any() and dpmf.jax.step_of(state) == 1
    with pytest.raises(ValueError, match="holds 0 states of add_correlated_noise"):
        dpmf.jax.step_of(optax.sgd(0.1).init(tree(0)))


def trainer(mechanism, journal=None, state=None, **options):
    """A run, its optimizer, and a compiled step."""
    named = dict(experiment="test") if journal is None else dict(journal=journal)
    run = dpmf.jax.Run(mechanism, KEY, START, **{**dict(examples=EXAMPLES), **named, **options})
    optimizer = dpmf.jax.sgd(run, 0.1)

    @jax.jit
    def step(parameters, state, batch):
        total, seen = dpmf.jax.accumulate(loss, parameters, jnp.asarray(DATA)[batch.indices], clip=1.0, batch=batch)
        updates, state = optimizer.update(total, state, parameters, batch=batch)
        return optax.apply_updates(parameters, updates), state, seen, total

    return run, optimizer, step


START = {"w": jnp.linspace(-1, 1, 5), "b": jnp.float32(0.5)}


@several
def test_training_is_the_workload_of_noisy_clipped_sums_and_goes_on_after_crashes(make, tmp_path):
    """Killed twice, once with a state that is two steps old, and once before anything was saved."""
    mechanism = make()
    reached, sums, kept = {}, {}, (START, None)
    run, optimizer, step = trainer(mechanism, tmp_path / "journal")
    drawn = [run.drawn.members(number).tolist() for number in range(mechanism.steps)]
    for saves, until in ((None, 3), (2, 4), (None, mechanism.steps)):
        if until > 3:
            # A pure function serves another run of the same journal: all that is of a run comes with its batches.
            run, _, _ = trainer(mechanism, tmp_path / "journal")
        assert [run.drawn.members(number).tolist() for number in range(mechanism.steps)] == drawn
        parameters, state = kept[0], optimizer.init(START) if kept[1] is None else kept[1]
        compiled = []
        for batch in run.batches(state):
            number = int(batch.step)
            parameters, state, seen, total = step(parameters, state, batch)
            run.commit(state)
            compiled.append(step._cache_size())
            bits = flat(parameters).tobytes()
            assert reached.setdefault(number, bits) == bits, "another iterate of the same step"
            sums[number] = flat(total)
            assert int(seen.examples) == len(run.drawn.members(number))
            if number + 1 == saves:
                kept = jax.device_get((parameters, state))
            if number + 1 == until:
                break
        # For numbers that are on no device yet, and for those that are; not for another length.
        assert len(set(compiled[1:])) == 1, "it was compiled again"
        run.close()
    assert sorted(reached) == list(range(mechanism.steps))
    # What was released is the sum with the row of the stream, and the iterates are the workload of that.
    stream = zeros_with_noise(mechanism, 6, run=run.name)
    rows, iterates = [], np.stack([np.frombuffer(reached[number], np.float32) for number in range(mechanism.steps)])
    parameters = START
    for number in range(mechanism.steps):
        exact = np.zeros(6)
        for member in drawn[number]:
            gradient = flat(jax.grad(loss)(parameters, jnp.asarray(DATA[member]))).astype(np.float64) if number < 2 else None
            exact += 0 if gradient is None else gradient * min(1, 1 / np.linalg.norm(gradient))
        if number < 2:
            np.testing.assert_allclose(sums[number], exact, rtol=1e-3, atol=1e-3)
        row = on_grid(sums[number], 1.0)
        stream.add_to(row)
        rows.append(row / run.expected_batch)
        parameters = {"b": jnp.float32(iterates[number][0]), "w": jnp.asarray(iterates[number][1:])}
    expected = flat(START) - 0.1 * mechanism.workload.matrix() @ np.stack(rows)
    np.testing.assert_allclose(iterates, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@several
def test_shards_of_every_mechanism_are_the_bits_of_the_whole(make):
    mechanism = make()
    specs = SPECS["leading rows"]
    run = begun(sharded(tree(0), specs), mechanism=mechanism, examples=EXAMPLES, denominator=1.0)
    loop = Loop(run, parameters=sharded(tree(0), specs))
    stream = zeros_with_noise(mechanism)
    for step in range(mechanism.steps):
        noisy = loop(lambda batch: dpmf.jax.Sum.of(sharded(tree(step), specs), batch=batch._replace(noise=None)))
        row = on_grid(flat(tree(step)), 1.0)
        stream.add_to(row)
        assert flat(noisy).tobytes() == row.tobytes()


def test_a_journal_is_bound_to_its_draws(tmp_path):
    mechanism = made("recall", None, "epochs:4")
    trainer(mechanism, tmp_path)[0].close()
    anew = dpmf.jax.Batches(mechanism, KEY, examples=EXAMPLES)
    with pytest.raises(dpmf.BindingError, match=r"already took part could take part again.*journal=that directory"):
        trainer(mechanism, tmp_path, batches=anew, examples=None)
    with pytest.raises(dpmf.BindingError, match="and now they are of None"):
        trainer(mechanism, tmp_path, examples=None)
    with pytest.raises(dpmf.BindingError, match="now they are of .*took part"):
        trainer(mechanism, tmp_path, examples=EXAMPLES + 1)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(dpmf.FormatError, match="not the description of a run"):
        dpmf.jax.Batches(mechanism, KEY, examples=EXAMPLES, journal=tmp_path)


def test_a_scan_over_batches_is_the_loop_and_goes_on_after_a_restart(tmp_path):
    mechanism = blt_in_bins()
    run, optimizer, step = trainer(mechanism)
    parameters, state = START, optimizer.init(START)
    looped = []
    for batch in run.batches(state):
        parameters, state, _, _ = step(parameters, state, batch)
        run.commit(state)
        looped.append(flat(parameters))

    def scan(directory, kept=None, together=6):
        options = dict(experiment="test") if kept is None else {}
        run, optimizer, step = trainer(mechanism, directory, **options)
        carry = (START, optimizer.init(START)) if kept is None else kept
        body = lambda carry, batch: (step(*carry, batch)[:2],) * 2  # noqa: E731
        several = jax.jit(lambda carry, batches: jax.lax.scan(body, carry, batches))
        for batches in run.batches(carry[1], together=together):
            carry, every = several(carry, batches)
            run.commit(carry[1])
            yield jax.device_get(every)
        run.close()

    halves = list(scan(tmp_path))
    iterates = np.concatenate([np.concatenate([half[0]["b"][:, None], half[0]["w"]], axis=1) for half in halves])
    np.testing.assert_allclose(iterates, looped, rtol=1e-5, atol=1e-6)
    # It died after the last chunk, and what was saved is the state after five steps.
    kept = jax.tree.map(lambda leaf: leaf[4], halves[0])
    (rest,) = scan(tmp_path, kept, together=7)
    assert np.array_equal(rest[0]["w"], iterates[5:, 1:])


def test_accumulate_takes_trees_and_names_and_says_what_it_saw():
    random = np.random.default_rng(5)
    inputs = {"a": random.standard_normal((7, 3)).astype(np.float32), "b": [random.standard_normal((7, 2)).astype(np.float32)]}
    weights, mask = np.arange(1, 8, dtype=np.float32), np.array([1, 1, 0, 1, 1, 1, 0], bool)
    inputs["a"][4] = np.nan
    parameters = {"w": jnp.ones(3), "v": jnp.ones(2)}

    def loss(parameters, inputs, *, weight, power=2):
        return weight * (inputs["a"] @ parameters["w"] + inputs["b"][0] @ parameters["v"]) ** power

    gradients = [flat(jax.grad(loss)(parameters, jax.tree.map(lambda leaf: leaf[i], inputs), weight=weights[i])) for i in range(7)]
    losses = [float(loss(parameters, jax.tree.map(lambda leaf: leaf[i], inputs), weight=weights[i])) for i in range(7)]
    norms = np.linalg.norm(gradients, axis=1)
    kept = mask & np.isfinite(norms)
    expected = sum(g * min(1, 5 / n) if n > 0 else g for g, n, k in zip(gradients, norms, kept) if k)
    sums = {}
    for micro_batch in (None, 1, 2, 3, 7, 9):
        total, seen = jax.jit(lambda w, m: dpmf.jax.accumulate(
            loss, parameters, inputs, clip=5.0, mask=m, weight=w, micro_batch=micro_batch))(weights, mask)
        assert jax.tree.structure(total.gradients) == jax.tree.structure(parameters)
        assert int(total.contributions) == 5 and total.stamp is None
        np.testing.assert_allclose(flat(total), expected, rtol=1e-3)
        assert int(seen.examples) == 5
        # One is not finite: it counts as clipped, and shows in the loss.
        assert float(seen.unprotected_clipped) == pytest.approx(np.mean(~(norms[mask] <= 5)))
        assert np.isnan(float(seen.unprotected_loss))
        sums[micro_batch] = total
    total, seen = dpmf.jax.accumulate(loss, parameters, inputs, clip=5.0, mask=kept, weight=weights, micro_batch=2)
    assert float(seen.unprotected_loss) == pytest.approx(np.mean(np.array(losses)[kept]), rel=1e-5)
    for empty in (None, 2):
        nobody, seen = dpmf.jax.accumulate(loss, parameters, inputs, clip=5.0, mask=0 * mask > 0, weight=weights, micro_batch=empty)
        assert not flat(nobody).any() and int(seen.examples) == 0 and np.isnan(float(seen.unprotected_loss))


def test_micro_batches_without_members_are_not_computed():
    calls = []

    def counted(parameters, example):
        jax.debug.callback(lambda value: calls.append(float(value)), example)
        return parameters * example

    mask = np.arange(64) < 9
    jax.block_until_ready(jax.jit(lambda m: dpmf.jax.accumulate(
        counted, jnp.float32(1), jnp.arange(64.0), clip=1.0, mask=m, micro_batch=4))(mask))
    jax.effects_barrier()
    assert sorted(set(calls)) == list(range(12))


def test_devices_sum_their_parts_and_update_outside():
    """Data in parallel: the sum over devices of clipped sums is that of the whole batch, and one example moves it by at most ζ."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    examples = jnp.asarray(1 + np.random.default_rng(2).random((64, 5)), jnp.float32)

    def part(parameters, examples, mask):
        total, _ = dpmf.jax.accumulate(lambda p, x: p @ x, parameters, examples, clip=1.0, mask=mask, parts=2)
        return jax.lax.psum(total, "data")

    spread = jax.shard_map(part, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data"), PartitionSpec("data")),
                           out_specs=PartitionSpec(), check_vma=False)
    parameters = jax.device_put(jnp.zeros(5), NamedSharding(mesh, PartitionSpec()))
    mechanism = MECHANISM.calibrate(8, 1e-6, 1.0)
    run = begun(parameters, mechanism=mechanism)
    noise = dpmf.jax.add_correlated_noise(run)

    @jax.jit
    def step(parameters, state, batch):
        return noise.update(spread(parameters, examples, jnp.ones(64, bool)), state, batch=batch)

    state = noise.init(parameters)
    noisy, state = step(parameters, state, next(run.batches(state)))
    run.commit(state)
    sums = jax.jit(spread)
    row = flat(sums(parameters, examples, jnp.ones(64, bool)))
    # Rounded to the unit of releases they are no further apart.
    moves = [sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(on_grid(row, 1.0).tolist(), on_grid(flat(rest), 1.0).tolist()))
             for rest in (sums(parameters, examples, jnp.arange(64) != index) for index in range(0, 64, 9))]
    assert Fraction(0.999) ** 2 < max(moves) <= 1
    row = on_grid(row, 1.0)
    zeros_with_noise(mechanism, 5).add_to(row)
    assert np.asarray(noisy).tobytes() == row.tobytes()


def differing(value):
    """A vector whose copies on devices differ, as after a forgotten psum; the compiler takes them for equal."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    part = jax.shard_map(lambda v: v * (1 + jax.lax.axis_index("x")), mesh=mesh, in_specs=PartitionSpec(),
                         out_specs=PartitionSpec(), check_vma=False)
    return part(value)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_copies_that_differ_are_refused_and_nothing_is_released(arithmetic):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    ones = jax.device_put(jnp.ones(5), NamedSharding(mesh, PartitionSpec()))
    loop = Loop(begun(ones, arithmetic=arithmetic), parameters=ones)
    batch = next(loop.batches)
    # The numbers beside the sum are compared as well.
    for total in (summed(jax.jit(differing)(ones)), dpmf.jax.Sum(ones, jax.jit(differing)(jnp.ones((), jnp.int32)))):
        noisy, bad = loop.update(total, loop.state, batch)
        assert not any(np.asarray(shard.data).any() for shard in noisy.addressable_shards)
        with pytest.raises(dpmf.MismatchError, match="1 arrays of step 0 differ between devices"):
            loop.run.commit(bad)
    noisy, state = loop.update(summed(ones), loop.state, batch)
    loop.run.commit(state)
    row = np.ones(5, np.float32)
    dpmf.NoiseStream(MECHANISM, KEY, run="test", dimension=5, arithmetic=arithmetic).add_to(row)
    assert np.asarray(noisy).tobytes() == row.tobytes()


def test_copies_that_are_not_known_of_do_not_meet_the_noise():
    """The parameters are on one device, and so is the noise: a sum in several copies does not come together with it."""
    ones = jnp.ones(5)
    loop = Loop(begun(ones), parameters=ones)
    batch = next(loop.batches)
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(lambda state, batch: loop.optimizer.update(summed(differing(ones)), state, batch=batch))(loop.state, batch)
    # A state that differs between devices is seen at the latest when it is committed.
    with pytest.raises(dpmf.MismatchError, match="state differs between devices"):
        loop.run.commit(loop.state._replace(log=jax.jit(differing)(loop.state.log + 1)))


def test_marks_are_salted_with_a_secret():
    """The name of a run is public: under it alone, data could be chosen whose marks collide."""
    salts = [begun(key=dpmf.NoiseKey.from_seed(seed), experiment=name)._salt.tolist()
             for seed, name in ((1, "a"), (2, "a"), (1, "b"), (1, "a"))]
    assert salts[0] == salts[3] and len({tuple(salt) for salt in salts}) == 3
    gradient = jnp.arange(7.0)
    found = [dpmf.jax._release.mark_of(dpmf.jax._release.digests_of([gradient], np.array(salt, np.uint32)), jnp.uint32(0), ())
             for salt in salts[:2]]
    assert not np.array_equal(*found)


def test_a_state_tells_nothing_about_sums_and_batches():
    """It is kept and passed on. How many took part, who, and the mark of the sum are masked, for every step otherwise."""
    plan = planned()
    loop = Loop(dpmf.jax.Run(plan, KEY, tree(0), experiment="test"))
    sums, logs, chains = tree(0), [], []
    for step in range(3):
        loop(lambda batch: dpmf.jax.Sum.of(sums, batch=batch))
        logs.append(np.asarray(loop.state.log[step]))
        chains.append(np.asarray(loop.state.chain))
    release = dpmf.jax._release
    digests = release.digests_of([jnp.asarray(sums[name]) for name in sorted(sums)], loop.run._salt)
    mark = np.asarray(release.mark_of(digests, jnp.uint32(0), ()))
    for step, log in enumerate(logs):
        opened = loop.run._outcome(step, dpmf.jax._run.on_host(loop.state))
        # The same sum has the same mark, which the run finds under the mask.
        assert opened[release.MARKED].tolist() == mark.tolist()
        assert (int(opened[2]), int(opened[4])) == loop.run.drawn.known(step)
        shown = log[release.MASKED]
        assert not np.isin(shown, opened[release.MASKED]).any()
        assert not any(np.isin(shown, other[release.MASKED]).any() for other in logs[:step])
    # Of another key with the same draws and sums everything is another.
    pads = {begun(key=dpmf.NoiseKey.from_seed(seed))._pad(0).tobytes() for seed in range(3)}
    assert len(pads) == 3 and all(len(np.unique(pad)) == 4 for pad in chains)


def test_sums_add_up_and_batches_fall_into_parts():
    batches = dpmf.jax.Batches(made("recall", None, "epochs:4"), KEY, examples=EXAMPLES)
    batch = batches.at(3)
    totals = [dpmf.jax.accumulate(loss, START, jnp.asarray(DATA)[part.indices], clip=1.0, batch=part, parts=2)[0]
              for part in batch.split(2)]
    whole, _ = dpmf.jax.accumulate(loss, START, jnp.asarray(DATA)[batch.indices], clip=1.0, batch=batch)
    both = totals[0] + totals[1]
    np.testing.assert_allclose(flat(both), flat(whole), rtol=1e-3, atol=1e-3)
    assert int(both.contributions) == int(whole.contributions) == batches.known(3)[0] == 20
    assert both.stamp.tolist() == whole.stamp.tolist() and int(both.stamp[1]) == batches.known(3)[1]
    assert batches.step_of_stamp(0, 20, int(whole.stamp[0])) == 3
    with pytest.raises(ValueError, match="cannot be split into 3 equal parts"):
        batch.split(3)
    with pytest.raises(ValueError, match="pass the number of examples"):
        dpmf.jax.Sum.of(START)
    with pytest.raises(TypeError):
        whole + 1


def test_mistakes_with_accumulate_are_answered():
    def accumulate(*examples, loss=lambda p, *e: p * jnp.sum(e[0]), parameters=jnp.float32(1), **options):
        return dpmf.jax.accumulate(loss, parameters, *examples, **{**dict(clip=1.0), **options})

    with pytest.raises(ValueError, match="there are no examples"):
        accumulate()
    with pytest.raises(ValueError, match="values that all examples share into loss"):
        accumulate(jnp.zeros(3), jnp.float32(2))
    with pytest.raises(ValueError, match="the same number"):
        accumulate(jnp.zeros(3), jnp.zeros(4))
    with pytest.raises(ValueError, match=r"mask is float32\[3\], but it must be bool\[3\]"):
        accumulate(jnp.zeros(3), mask=jnp.ones(3))
    batch = dpmf.jax.Batch(0, np.zeros(3, np.int32), np.ones(3, bool), 1)
    with pytest.raises(ValueError, match="batch and mask both determine"):
        accumulate(jnp.zeros(3), batch=batch, mask=jnp.ones(3, bool))
    with pytest.raises(TypeError, match="batch is a tuple, but it must be one of a dpmf.jax.Batches"):
        accumulate(jnp.zeros(3), batch=tuple(batch))
    with pytest.raises(dpmf.MismatchError, match="there are 6 examples, but the batch has 3 places.*views of one example in loss"):
        accumulate(jnp.zeros(6), batch=batch)
    with pytest.raises(ValueError, match="micro_batch is 0"):
        accumulate(jnp.zeros(3), micro_batch=0)
    with pytest.raises(ValueError, match="nothing to train"):
        accumulate(jnp.zeros(3), parameters={})


@pytest.mark.parametrize("micro_batch", [None, 64, 100])
def test_one_example_moves_an_accumulated_sum_by_at_most_the_clip(micro_batch):
    """Micro-batches need no room for rounding: they are added as whole numbers."""
    examples = jnp.asarray(1 + np.random.default_rng(1).random((1000, 5)), jnp.float32)
    sums = jax.jit(lambda mask: dpmf.jax.accumulate(
        lambda p, x: p @ x, jnp.zeros(5), examples, clip=1.0, mask=mask, micro_batch=micro_batch)[0].gradients)
    whole = np.asarray(sums(np.ones(1000, bool)), np.float64)
    moves = []
    for index in range(0, 1000, 37):
        rest = np.asarray(sums(np.arange(1000) != index), np.float64)
        moves.append(sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(whole.tolist(), rest.tolist())))
    assert Fraction(0.998) ** 2 < max(moves) <= 1


def test_adam_is_that_of_optax_on_noisy_gradients():
    steps, b1 = 12, 0.8
    plan = planned(momentum=b1, schedule=dpmf.jax.adam_steps(steps, b1=b1, schedule=np.linspace(1, 0.1, steps)))
    loop = Loop(dpmf.jax.Run(plan, KEY, tree(0), experiment="test"), lambda run: dpmf.jax.adam(run, 0.05, b2=0.95, eps=1e-3))
    theirs = optax.adam(lambda step: 0.05 * jnp.asarray(np.linspace(1, 0.1, steps), jnp.float32)[step], b1=b1, b2=0.95, eps=1e-3)
    stream = zeros_with_noise(plan.mechanism)
    other = theirs.init(jnp.zeros(DIMENSION))
    for step in range(steps):
        updates = loop(lambda batch: dpmf.jax.Sum.of(tree(step), batch=batch))
        row = on_grid(flat(tree(step)), 1.0)
        stream.add_to(row)
        expected, other = theirs.update(jnp.asarray(row / loop.run.expected_batch), other)
        np.testing.assert_allclose(flat(updates), expected, rtol=1e-4, atol=1e-7)
    with pytest.raises(dpmf.MismatchError, match="planned with nesterov or weight decay"):
        dpmf.jax.adam(begun(mechanism=dpmf.mechanism(steps=4, momentum=0.9, nesterov=True, epsilon=8, delta=1e-6)))
    with pytest.raises(dpmf.UnsupportedError, match="names no optimizer"):
        dpmf.jax.adam(begun(mechanism=dpmf.mechanism(workload=dpmf.Workload.from_matrix(np.tri(4)), epsilon=8, delta=1e-6)))
    with pytest.raises(ValueError, match="one number for each of 4 steps"):
        dpmf.jax.adam_steps(4, schedule=[1.0])


def test_adam_steps_are_the_weights_of_its_mean():
    b1, steps = 0.7, 9
    matrix = dpmf.Workload.sgd(steps, momentum=b1, schedule=dpmf.jax.adam_steps(steps, b1=b1)).matrix()
    means = np.diff(matrix, axis=0, prepend=0)
    assert np.allclose(means.sum(axis=1), 1)
    assert np.allclose(means[5, :6], b1 ** np.arange(5, -1, -1) * (1 - b1) / (1 - b1**6))
