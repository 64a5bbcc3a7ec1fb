"""dpmf.jax against streams drawn directly: jit, scan, replays, restarts, and two devices that draw their own shards."""

import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
from fractions import Fraction

import pytest

# Two devices on the CPU; to be said before JAX starts.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
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
SHAPES = {"bias": (4,), "kernel": (6, 8), "stack": (2, 4, 5)}
DIMENSION = sum(int(np.prod(shape)) for shape in SHAPES.values())


def tree(step):
    random = np.random.default_rng(step)
    return {name: jnp.asarray(random.standard_normal(shape), jnp.float32) for name, shape in SHAPES.items()}


def summed(gradients, batch=None):
    """A sum as if of one example."""
    return dpmf.jax.Sum.of(gradients, 1, batch=batch)


def flat(values):
    values = values.gradients if isinstance(values, dpmf.jax.Sum) else values
    return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(values)])


def transformation(**options):
    return dpmf.jax.add_correlated_noise(MECHANISM, KEY, **{**dict(experiment="test"), **options})


def expected_rows(steps=STEPS, **options):
    stream = dpmf.NoiseStream(MECHANISM, KEY, run="test", dimension=DIMENSION, **options)
    rows = [flat(tree(step)) for step in range(steps)]
    for row in rows:
        stream.add_to(row)
    return rows


def host_of(noise):
    """What lives outside of jit."""
    cells = [cell.cell_contents for cell in noise.update.__closure__]
    (host,) = [cell for cell in cells if isinstance(cell, dpmf.jax.Host)]
    return host


def failure(call):
    with pytest.raises(Exception) as caught:
        jax.block_until_ready(call())
    return str(caught.value)


@pytest.mark.parametrize("compile", [jax.jit, lambda function: function], ids=["jit", "eager"])
@pytest.mark.parametrize("options", [dict(), dict(arithmetic="exact"), dict(arithmetic="float")], ids=str)
def test_noisy_gradients_are_those_of_the_stream(compile, options):
    noise = transformation(**options)
    update = compile(noise.update)
    state = noise.init(tree(0))
    for step, row in enumerate(expected_rows(**options)):
        noisy, state = update(summed(tree(step)), state)
        assert flat(noisy).tobytes() == row.tobytes()
        units = flat(noisy).astype(np.float64) / dpmf.NoiseStream(MECHANISM, KEY, dimension=1).grid
        assert np.array_equal(units, np.round(units)) == (options.get("arithmetic", "exact") == "exact")
    assert int(state.step) == STEPS


def test_a_scan_draws_the_same_rows():
    noise = transformation()
    gradients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[tree(step) for step in range(STEPS)])

    @jax.jit
    def run(state):
        def body(state, gradient):
            noisy, state = noise.update(summed(gradient), state)
            return state, noisy

        return jax.lax.scan(body, state, gradients)

    state, noisy = run(noise.init(tree(0)))
    for step, row in enumerate(expected_rows()):
        assert flat(jax.tree.map(lambda leaf: leaf[step], noisy)).tobytes() == row.tobytes()


def test_an_old_state_is_refused_and_the_run_goes_on():
    noise = transformation()
    update = jax.jit(noise.update)
    first = noise.init(tree(0))
    _, second = update(summed(tree(0)), first)
    assert "good for one update" in failure(lambda: update(summed(tree(1)), first))
    # A new trace of the same function changes nothing.
    assert "good for one update" in failure(lambda: jax.jit(lambda g, s: noise.update(summed(g), s))(tree(1), first))
    noisy, _ = update(summed(tree(1)), second)
    assert flat(noisy).tobytes() == expected_rows()[1].tobytes()


def test_lanes_of_a_vmap_do_not_share_a_row():
    noise = transformation()
    state = noise.init(tree(0))
    # One leaf with lanes is enough.
    lanes = {**tree(0), "stack": jnp.zeros((2, *SHAPES["stack"]))}
    axes = {"bias": None, "kernel": None, "stack": 0}
    assert "good for one update" in failure(lambda: jax.vmap(lambda g, s: noise.update(summed(g), s), in_axes=(axes, None))(lanes, state))


def test_lanes_with_large_leaves_keep_apart():
    """Their pieces come to the host in turns."""
    size = 3 * dpmf.jax._layout.PIECE + 5
    noise = dpmf.jax.add_correlated_noise(MECHANISM, KEY, experiment="lanes")
    state = noise.init(jnp.zeros(size))
    host = host_of(noise)
    taken = []
    take = host.uploads.take
    host.uploads.take = lambda *arguments: taken.append(take(*arguments)) or taken[-1].copy()
    lanes = jnp.asarray(np.random.default_rng(0).standard_normal((2, size)), jnp.float32)
    assert "good for one update" in failure(lambda: jax.vmap(lambda g, s: noise.update(summed(g), s), in_axes=(0, None))(lanes, state))
    assert [sums.tobytes() for sums in taken] == [np.asarray(lane).tobytes() for lane in lanes]
    assert not host.uploads.held


def test_one_step_too_many_says_so():
    noise = transformation()
    state = noise.init(tree(0))
    for step in range(STEPS):
        _, state = noise.update(summed(tree(step)), state)
    assert f"plan with steps={STEPS + 1}" in failure(lambda: noise.update(summed(tree(0)), state))


def test_a_state_of_another_run_or_a_later_step_is_refused():
    noise, other = transformation(), transformation(experiment="other")
    assert "another run" in failure(lambda: noise.update(summed(tree(0)), other.init(tree(0))))
    later = noise.init(tree(0))._replace(step=jnp.int32(3))
    assert "journal=directory" in failure(lambda: noise.update(summed(tree(0)), later))


def test_mistakes_are_answered_before_anything_runs():
    noise = transformation()
    with pytest.raises(TypeError, match=r"\['kernel'\] is bfloat16.*then cast"):
        noise.init({"kernel": jnp.zeros(3, jnp.bfloat16)})
    noise.init(tree(0))
    with pytest.raises(ValueError, match="one transformation serves one model"):
        noise.init({"kernel": jnp.zeros(3)})
    with pytest.raises(ValueError, match="denominator is 0"):
        transformation(denominator=0)
    with pytest.raises(ValueError, match="lost_input is 'ignore'"):
        transformation(lost_input="ignore")
    with pytest.raises(ValueError, match="arithmetic is 'double'"):
        transformation(arithmetic="double")
    uncalibrated = dpmf.make_mechanism(dpmf.Workload.prefix_sum(4), "optimal")
    with pytest.raises(ValueError, match="not calibrated"):
        dpmf.jax.add_correlated_noise(uncalibrated, KEY)


SPECS = {
    "leading rows": {"bias": ("x",), "kernel": ("x",), "stack": ("x",)},
    "last axes": {"bias": (None,), "kernel": (None, "x"), "stack": (None, None, None)},
    "middle axis": {"bias": ("x",), "kernel": ("x", None), "stack": (None, "x")},
    "replicated": {"bias": (), "kernel": (), "stack": ()},
}


def sharded(values, specs):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return {name: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*specs[name]))) for name, leaf in values.items()}


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("journalled", [False, True], ids=["plain", "journal"])
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_shards_draw_the_bits_of_an_unsharded_run(specs, journalled, arithmetic, tmp_path):
    assert jax.device_count() == 2
    noise = transformation(arithmetic=arithmetic, journal=tmp_path / "journal" if journalled else None)
    update = jax.jit(noise.update)
    state = noise.init(sharded(tree(0), specs))
    for step, row in enumerate(expected_rows(arithmetic=arithmetic)):
        gradient = sharded(tree(step), specs)
        noisy, state = update(summed(gradient), state)
        assert flat(noisy).tobytes() == row.tobytes()
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim),
                                                noisy, gradient)))
        # Every replica holds the same bits.
        for leaf in jax.tree.leaves(noisy):
            parts = {}
            for shard in leaf.addressable_shards:
                parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
            assert all(len(bits) == 1 for bits in parts.values())
    assert "good for one update" in failure(lambda: update(summed(gradient), state._replace(step=state.step - 1)))


def test_a_device_keeps_the_streams_of_its_own_shard_only():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    shape = (10, 4)
    layout = dpmf.jax._layout.Layout.of(
        jnp.zeros(shape), NamedSharding(mesh, PartitionSpec("x"))
    )
    assert layout.devices == (((0, 0, 20),), ((0, 20, 40),))
    layout = dpmf.jax._layout.Layout.of(jnp.zeros(shape), NamedSharding(mesh, PartitionSpec(None, "x")))
    assert layout.devices[1] == tuple((2 * row, 4 * row + 2, 4 * row + 4) for row in range(10))


def test_a_large_model_passes_through_two_devices():
    # A callback that takes a large argument hangs where threads are few: sums are handed over in pieces.
    size = 2_000_000
    mechanism = dpmf.mechanism(steps=4, epsilon=8, delta=1e-6)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    noise = dpmf.jax.add_correlated_noise(mechanism, KEY, experiment="large")
    update = jax.jit(noise.update)
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    gradient = jax.device_put(values, sharding)
    state = noise.init(gradient)
    stream = dpmf.NoiseStream(mechanism, KEY, run="large", dimension=size)
    for _ in range(4):
        noisy, state = update(summed(gradient), state)
        expected = values.copy()
        stream.add_to(expected)
        assert np.asarray(noisy).tobytes() == expected.tobytes()


def test_the_whole_of_a_sum_is_handed_over():
    """Leaves that end within, at and beyond a piece; the last numbers of each count as the first do."""
    piece = dpmf.jax._layout.PIECE
    assert 4 * piece <= 100 * 1024
    shapes = [(), (3,), (piece,), (2, piece // 2 + 1), (0, 4), (piece + 1,)]
    random = np.random.default_rng(1)
    leaves = [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]
    noise = dpmf.jax.add_correlated_noise(MECHANISM, KEY, experiment="pieces")
    noisy, _ = jax.jit(noise.update)(summed(leaves), noise.init(leaves))
    expected = flat(leaves)
    dpmf.NoiseStream(MECHANISM, KEY, run="pieces", dimension=expected.size).add_to(expected)
    assert flat(noisy).tobytes() == expected.tobytes()


def test_a_journal_lets_a_restart_repeat_and_go_on(tmp_path):
    rows = expected_rows()
    before = transformation(journal=tmp_path / "journal")
    state = before.init(tree(0))
    for step in range(4):
        if step == 2:
            saved = state
        _, state = before.update(summed(tree(step)), state)
    close(before)
    # The process died after step 3; the last saved state is that before step 2.
    after = transformation(journal=tmp_path / "journal", experiment=None)
    after.init(tree(0))
    state = saved
    for step in range(2, STEPS):
        noisy, state = jax.jit(after.update)(summed(tree(step)), state)
        assert flat(noisy).tobytes() == rows[step].tobytes()


def close(noise):
    """Lets go of the journal locks, as the end of a process does."""
    host_of(noise).run.close()


def test_a_journal_refuses_other_data_or_burns(tmp_path):
    journal = tmp_path / "journal"
    before = transformation(journal=journal)
    start = before.init(tree(0))
    _, second = before.update(summed(tree(0)), start)
    before.update(summed(tree(1)), second)
    close(before)

    refusing = transformation(journal=journal)
    refusing.init(tree(0))
    assert 'lost_input="burn"' in failure(lambda: refusing.update(summed(tree(40)), second))
    noisy, _ = refusing.update(summed(tree(1)), second)
    assert flat(noisy).tobytes() == expected_rows()[1].tobytes()
    close(refusing)

    burning = transformation(journal=journal, lost_input="burn")
    burning.init(tree(0))
    nothing, third = burning.update(summed(tree(40)), second)
    assert not flat(nothing).any()
    close(burning)

    # Another crash: the burned step stays burned, also for the input it first had.
    again = transformation(journal=journal)
    again.init(tree(0))
    nothing, third = again.update(summed(tree(1)), second)
    assert not flat(nothing).any()
    noisy, _ = again.update(summed(tree(2)), third)
    assert flat(noisy).tobytes() == expected_rows()[2].tobytes()
    close(again)


def test_a_journal_is_bound_to_mechanism_and_shards(tmp_path):
    noise = transformation(journal=tmp_path)
    noise.update(summed(tree(0)), noise.init(tree(0)))
    close(noise)
    with pytest.raises(dpmf.BindingError, match="another mechanism"):
        dpmf.jax.add_correlated_noise(MECHANISM.calibrate(1, 1e-6), KEY, journal=tmp_path)
    with pytest.raises(dpmf.BindingError, match="leave out experiment"):
        dpmf.jax.add_correlated_noise(MECHANISM, KEY, experiment="other", journal=tmp_path)
    with pytest.raises(dpmf.BindingError, match="the same sharding"):
        transformation(journal=tmp_path, experiment=None).init(sharded(tree(0), SPECS["leading rows"]))
    with pytest.raises(dpmf.BindingError, match="arithmetic exact, and now they are float.*the same arithmetic"):
        transformation(journal=tmp_path, experiment=None, arithmetic="float").init(tree(0))
    with pytest.raises(dpmf.FormatError, match="not the description of a run"):
        (tmp_path / "run.json").write_text("{")
        transformation(journal=tmp_path)


def begin(directory, steps=2):
    noise = dpmf.jax.add_correlated_noise(MECHANISM, KEY, journal=directory)
    state = noise.init(tree(0))
    for step in range(steps):
        noisy, state = noise.update(summed(tree(step)), state)
    close(noise)
    return state


@pytest.mark.parametrize("lost", ["process-0.journal", "run.json"])
def test_a_run_that_lost_a_file_does_not_begin_again(tmp_path, lost):
    begin(tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(dpmf.FormatError, match=f"{lost} is missing.*new run in another directory"):
        dpmf.jax.add_correlated_noise(MECHANISM, KEY, journal=tmp_path)


def test_a_journal_that_is_lost_later_is_missed_too(tmp_path):
    begin(tmp_path)
    noise = dpmf.jax.add_correlated_noise(MECHANISM, KEY, journal=tmp_path)
    (tmp_path / "process-0.journal").unlink()
    with pytest.raises(dpmf.FormatError, match="process-0.journal is missing"):
        noise.init(tree(0))


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

        patch.setattr(dpmf.jax._host, "write_durably", write)
        noise = dpmf.jax.add_correlated_noise(MECHANISM, KEY, journal=tmp_path)
        with pytest.raises(KeyboardInterrupt):
            noise.init(tree(0))
        if at == "journal":
            close(noise)
    assert int(begin(tmp_path).step) == 2


def test_a_state_ahead_of_its_journal_is_refused(tmp_path):
    noise = transformation(journal=tmp_path)
    later = noise.init(tree(0))._replace(step=jnp.int32(3))
    assert "the run is at step 0" in failure(lambda: noise.update(summed(tree(0)), later))


def test_no_two_starts_have_the_same_noise_but_those_of_an_experiment(tmp_path):
    def first(key, **options):
        noise = dpmf.jax.add_correlated_noise(MECHANISM, key, **options)
        return flat(noise.update(summed(tree(0)), noise.init(tree(0)))[0]).tobytes()

    key = dpmf.NoiseKey.generate()
    assert first(key) != first(key)
    assert first(KEY) != first(KEY)
    assert first(KEY, experiment="a") == first(KEY, experiment="a")
    for options in (dict(), dict(journal=tmp_path)):
        with pytest.raises(ValueError, match="the same at every start.*from_seed"):
            first(key, experiment="a", **options)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("compile", [jax.jit, lambda function: function], ids=["jit", "eager"])
@pytest.mark.parametrize("place", [lambda values: values, lambda values: sharded(values, SPECS["leading rows"])],
                         ids=["whole", "sharded"])
def test_what_is_not_finite_is_refused_before_it_is_released(value, compile, place):
    noise = transformation()
    update = compile(noise.update)
    state = noise.init(place(tree(0)))
    bad = tree(0)
    bad["kernel"] = bad["kernel"].at[5, 2].set(value)
    assert "1 numbers of the gradient are not finite" in failure(lambda: update(summed(place(bad)), state))
    # The step is still there, for a gradient that is.
    noisy, _ = update(summed(place(tree(0))), state)
    assert flat(noisy).tobytes() == expected_rows()[0].tobytes()


def test_multi_steps_of_optax_is_refused_before_anything_is_released():
    optimizer = optax.MultiSteps(dpmf.jax.sgd(MECHANISM, KEY), every_k_schedule=2)
    for start in (optimizer.init, jax.jit(optimizer.init)):
        with pytest.raises(dpmf.UnsupportedError, match=r"updates at every part.*micro_batch=…\).*multi_steps\(optimizer"):
            start(tree(0))


@pytest.mark.parametrize("compile", [jax.jit, lambda function: function], ids=["jit", "eager"])
def test_parts_of_a_step_are_added_up(compile):
    optimizer = dpmf.jax.multi_steps(transformation(), 3)
    update = compile(optimizer.update)
    state = optimizer.init(tree(0))
    stream = dpmf.NoiseStream(MECHANISM, KEY, run="test", dimension=DIMENSION)
    for step in range(STEPS):
        for part in range(3):
            updates, state = update(summed(tree(3 * step + part)), state)
            assert flat(updates).any() == (part == 2)
        expected = flat(tree(3 * step)) + flat(tree(3 * step + 1)) + flat(tree(3 * step + 2))
        stream.add_to(expected)
        assert flat(updates).tobytes() == expected.tobytes()
    assert dpmf.jax.step_of(state) == STEPS


def some_frozen(names=("kernel",)):
    return {name: name in names for name in SHAPES}


def test_leaving_out_parameters_around_the_noise_is_refused():
    """Their sums would go on without noise."""
    for wrapped in (
        optax.masked(transformation(), some_frozen()),
        optax.multi_transform({True: optax.sgd(0.1), False: dpmf.jax.sgd(MECHANISM, KEY)}, some_frozen()),
    ):
        with pytest.raises(dpmf.UnsupportedError, match="hand their sums on without noise.*behind the noise"):
            wrapped.init(tree(0))


def test_parameters_are_frozen_behind_the_noise_and_thawed_later():
    rows = expected_rows()
    frozen = optax.chain(transformation(), optax.masked(optax.set_to_zero(), some_frozen()))
    other = {True: optax.set_to_zero(), False: optax.sgd(1.0)}
    labelled = optax.chain(transformation(), optax.multi_transform(other, some_frozen()))

    for optimizer, sign in ((frozen, 1), (labelled, -1)):
        state = optimizer.init(tree(0))
        for step, row in enumerate(rows):
            updates, state = jax.jit(optimizer.update)(summed(tree(step)), state, tree(0))
            assert not updates["kernel"].any()
            assert flat(updates["bias"]).tobytes() == (sign * row[:4]).tobytes()
    # Thawed after three steps: from then on the row of the stream, as if it had never been frozen.
    noise = transformation()
    state = noise.init(tree(0))

    @jax.jit
    def update(gradient, state):
        cold = state.step < 3
        updates, state = noise.update(summed(gradient), state)
        return {**updates, "kernel": jnp.where(cold, 0.0, updates["kernel"])}, state

    for step, row in enumerate(rows):
        updates, state = update(tree(step), state)
        assert flat(updates["kernel"]).tobytes() == (row[4:52] if step >= 3 else np.zeros(48, np.float32)).tobytes()


def test_pmap_and_shard_map_around_it_are_refused():
    noise = transformation()
    state = noise.init(jnp.zeros(4))
    with pytest.raises(dpmf.UnsupportedError, match="on each of several devices.*call update outside"):
        jax.pmap(lambda gradient: noise.update(summed(gradient), state))(jnp.zeros((2, 4)))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    spread = jax.shard_map(lambda gradient: noise.update(summed(gradient), state)[0], mesh=mesh, in_specs=PartitionSpec("data"),
                           out_specs=PartitionSpec("data"))
    with pytest.raises(dpmf.UnsupportedError, match="on each of several devices \\(data\\)"):
        jax.jit(spread)(jnp.zeros(8))
    # Nothing was released.
    noisy, _ = noise.update(summed(jnp.zeros(4)), state)
    row = np.zeros(4, np.float32)
    dpmf.NoiseStream(MECHANISM, KEY, run="test", dimension=4).add_to(row)
    assert np.asarray(noisy).tobytes() == row.tobytes()


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
    optimizer = dpmf.jax.sgd(mechanism, KEY, experiment="test", denominator=4.0)
    parameters = jnp.zeros(DIMENSION)
    state = optimizer.init(parameters)
    stream = dpmf.NoiseStream(mechanism, KEY, run="test", dimension=DIMENSION)
    noisy, iterates = [], []
    for step in range(STEPS):
        gradient = flat(tree(step))
        updates, state = jax.jit(optimizer.update)(summed(jnp.asarray(gradient)), state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        stream.add_to(gradient)
        noisy.append(gradient / 4.0)
        iterates.append(np.asarray(parameters))
    expected = -mechanism.workload.matrix() @ np.stack(noisy)
    assert np.abs(np.stack(iterates) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_sgd_refuses_what_was_not_planned():
    decayed = dpmf.mechanism(steps=STEPS, weight_decay=0.1, epsilon=8, delta=1e-6)
    with pytest.raises(dpmf.MismatchError, match="learning_rate=0.5"):
        dpmf.jax.sgd(decayed, KEY, learning_rate=0.5)
    matrix = dpmf.mechanism(workload=dpmf.Workload.from_matrix(np.tri(4)), epsilon=8, delta=1e-6)
    with pytest.raises(dpmf.UnsupportedError, match="names no optimizer"):
        dpmf.jax.sgd(matrix, KEY)


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
    dpmf.jax.add_correlated_noise(mechanism, dpmf.NoiseKey.generate())
    print("two keys were taken")
except AssertionError as refused:
    print("refused:", "differ in their key" in str(refused))
key = dpmf.NoiseKey.read(directory + "/key")
noise = dpmf.jax.add_correlated_noise(mechanism, key, journal=directory + "/journal")
try:
    noise.init(whole)
    print("two models were taken")
except dpmf.UnsupportedError as refused:
    print("refused:", "train a model of its own" in str(refused))
batches = dpmf.jax.Batches(mechanism, key, examples=30)
print("drawn", batches.run, batches.at(1).indices.tolist())
noise = dpmf.jax.add_correlated_noise(mechanism, key, batches=batches, denominator=1.0, journal=directory + "/journal")
state = noise.init(placed)
update = jax.jit(noise.update)
for batch in batches:
    noisy, state = update(dpmf.jax.Sum.of(placed, batch=batch), state)
np.save(f"{directory}/{rank}.npy", np.asarray(noisy.addressable_shards[0].data))
print("run", np.asarray(state.run.addressable_shards[0].data).tobytes().hex())
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
    lines = [[line for line in out.splitlines() if line.startswith(("refused", "drawn", "run"))] for out, _ in printed]
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
    with pytest.raises(dpmf.MismatchError, match="counts on sampling cyclic-poisson:2:0.1.*give batches="):
        dpmf.jax.sgd(mechanism, KEY)

    def sampler(sampling="cyclic-poisson:2:0.1", steps=STEPS):
        return dpmf.Sampler(sampling, KEY, units=100, steps=steps, run="test")

    for wrong in ("cyclic-poisson:2:0.2", "cyclic-poisson:1:0.1", "balls-in-bins:2"):
        with pytest.raises(dpmf.MismatchError, match=f"the sampler is {wrong}, but"):
            dpmf.jax.add_correlated_noise(mechanism, KEY, sampler=sampler(wrong))
    with pytest.raises(dpmf.MismatchError, match="7 steps are wanted"):
        dpmf.jax.add_correlated_noise(mechanism, KEY, sampler=sampler(steps=STEPS + 1))
    # Means are over the expected batch, of a sum of nobody too.
    noisy = dpmf.jax.add_correlated_noise(mechanism, KEY, sampler=sampler(), experiment="test")
    nobody = {"w": jnp.zeros(4, jnp.float32)}
    updates, _ = noisy.update(dpmf.jax.Sum.of(nobody, 0), noisy.init(nobody))
    row = np.zeros(4, np.float32)
    dpmf.NoiseStream(mechanism, KEY, run="test", dimension=4).add_to(row)
    np.testing.assert_allclose(updates["w"], row / sampler().expected_batch, rtol=1e-6)
    assert sampler().expected_batch == 5.0


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
    with pytest.raises(ValueError, match="the same at every start"):
        dpmf.jax.Batches(plan, dpmf.NoiseKey.generate(), experiment="a")
    batches = dpmf.jax.Batches(plan, KEY)
    with pytest.raises(dpmf.MismatchError, match="those of another mechanism"):
        dpmf.jax.sgd(planned(epsilon=4).mechanism, KEY, batches=batches)
    with pytest.raises(ValueError, match="both say who takes part"):
        dpmf.jax.sgd(plan.mechanism, KEY, batches=batches, sampler=plan.sampler(KEY))
    with pytest.raises(ValueError, match=f"there are {plan.steps} steps"):
        batches.at(plan.steps)
    noise = dpmf.jax.add_correlated_noise(plan.mechanism, KEY, batches=batches)
    state = noise.init(tree(0))
    with pytest.raises(dpmf.MismatchError, match="which batch this sum is of.*batch=batch"):
        noise.update(summed(tree(0)), state)
    with pytest.raises(dpmf.MismatchError, match=r"this is a dict.*Sum.of\(gradients"):
        noise.update(tree(0), state)
    assert "drawn for step 1, but this is step 0" in failure(
        lambda: jax.jit(noise.update)(summed(tree(0), batches.at(1)), state))
    # It was refused before the noise was used.
    _, state = noise.update(summed(tree(0), batches.at(0)), state)
    assert dpmf.jax.step_of(state) == 1
    with pytest.raises(ValueError, match="holds 0 of add_correlated_noise"):
        dpmf.jax.step_of(optax.sgd(0.1).init(tree(0)))


def trainer(mechanism, journal=None, *, batches=None, **options):
    """An optimizer of a run, a compiled step, and its batches."""
    named = dict(experiment="test") if journal is None else dict(journal=journal)
    if batches is None:
        batches = dpmf.jax.Batches(mechanism, KEY, examples=EXAMPLES, **named)
    optimizer = dpmf.jax.sgd(mechanism, KEY, 0.1, batches=batches, **named)

    @jax.jit
    def step(parameters, state, batch):
        total, seen = dpmf.jax.accumulate(loss, parameters, jnp.asarray(DATA)[batch.indices], clip=1.0, batch=batch, **options)
        updates, state = optimizer.update(total, state, parameters)
        return optax.apply_updates(parameters, updates), state, seen

    return optimizer, step, batches


START = {"w": jnp.linspace(-1, 1, 5), "b": jnp.float32(0.5)}


@several
def test_training_is_the_workload_of_noisy_clipped_sums(make):
    mechanism = make()
    optimizer, step, batches = trainer(mechanism)
    parameters, state = START, optimizer.init(START)
    stream = dpmf.NoiseStream(mechanism, KEY, run="test", dimension=6)
    rows, iterates = [], []
    for batch in batches:
        row = np.zeros(6)
        for member in batches.members(int(batch.step)):
            gradient = flat(jax.grad(loss)(parameters, jnp.asarray(DATA[member]))).astype(np.float64)
            row += gradient * min(1, 1 / np.linalg.norm(gradient))
        row = row.astype(np.float32)
        stream.add_to(row)
        rows.append(row / batches.expected_batch)
        parameters, state, seen = step(parameters, state, batch)
        assert int(seen.examples) == len(batches.members(int(batch.step)))
        iterates.append(flat(parameters))
    expected = flat(START) - 0.1 * mechanism.workload.matrix() @ np.stack(rows)
    np.testing.assert_allclose(np.stack(iterates), expected, atol=2e-3 * np.abs(expected).max())
    assert step._cache_size() == 1, "it was compiled again"


@several
def test_a_run_that_is_interrupted_goes_on_to_the_same_bits(make, tmp_path):
    """Killed twice, once with a state that is two steps old, and once before anything was saved."""
    mechanism = make()
    optimizer, step, batches = trainer(mechanism, tmp_path / "journal")
    parameters, state = START, optimizer.init(START)
    kept = parameters, state
    drawn = [batches.members(number).tolist() for number in range(mechanism.steps)]
    reached = {}

    def go(optimizer, step, batches, parameters, state, saves, until):
        kept = None
        for batch in batches.after(state):
            if batch.step == until:
                break
            parameters, state, _ = step(parameters, state, batch)
            bits = flat(parameters).tobytes()
            assert reached.setdefault(int(batch.step), bits) == bits, "another iterate of the same step"
            if batch.step + 1 == saves:
                kept = jax.device_get((parameters, state))
        close_chain(optimizer)
        return kept

    assert go(optimizer, step, batches, parameters, state, None, 3) is None
    for saves, until in ((3, 5), (None, mechanism.steps)):
        optimizer, step, batches = trainer(mechanism, tmp_path / "journal")
        optimizer.init(START)
        assert [batches.members(number).tolist() for number in range(mechanism.steps)] == drawn
        kept = go(optimizer, step, batches, *kept, saves, until)
    assert sorted(reached) == list(range(mechanism.steps))
    # An unbroken run with the same noise and draws ends there too.
    runs = json.loads((tmp_path / "journal" / "run.json").read_text())
    stream = dpmf.NoiseStream(mechanism, KEY, run=runs["run"], dimension=6)
    parameters, velocity = START, np.zeros(6, np.float32)
    sums = jax.jit(lambda p, b: dpmf.jax.accumulate(loss, p, jnp.asarray(DATA)[b.indices], clip=1.0, batch=b))
    for number in range(mechanism.steps):
        total, _ = sums(parameters, batches.at(number))
        row = flat(total)
        stream.add_to(row)
        velocity = np.float32(0.9) * velocity + row / np.float32(batches.expected_batch)
        values = flat(parameters) + -np.float32(0.1) * velocity
        np.testing.assert_allclose(values, np.frombuffer(reached[number], np.float32), rtol=1e-5, atol=1e-6)
        values = np.frombuffer(reached[number], np.float32)
        parameters = {"b": jnp.float32(values[0]), "w": jnp.asarray(values[1:])}


def close_chain(optimizer):
    """Lets go of the journal of a chain whose first member is the noise."""
    cells = [cell.cell_contents for cell in optimizer.update.__closure__]
    (updates,) = [cell for cell in cells if isinstance(cell, tuple) and cell and callable(cell[0])]
    members = [cell.cell_contents for cell in updates[0].__closure__]
    (host,) = [cell for cell in members if isinstance(cell, dpmf.jax.Host)]
    host.run.close()


@several
@pytest.mark.parametrize("specs", [SPECS["leading rows"], SPECS["last axes"]], ids=["rows", "last axes"])
def test_shards_of_every_mechanism_are_the_bits_of_the_whole(make, specs):
    mechanism = make()
    batches = dpmf.jax.Batches(mechanism, KEY, examples=EXAMPLES)
    noise = dpmf.jax.add_correlated_noise(mechanism, KEY, experiment="test", denominator=1.0, batches=batches)
    update = jax.jit(noise.update)
    state = noise.init(sharded(tree(0), specs))
    stream = dpmf.NoiseStream(mechanism, KEY, run="test", dimension=DIMENSION)
    for step in range(mechanism.steps):
        noisy, state = update(dpmf.jax.Sum.of(sharded(tree(step), specs), batch=batches.at(step)), state)
        row = flat(tree(step))
        stream.add_to(row)
        assert flat(noisy).tobytes() == row.tobytes()


def test_a_journal_is_bound_to_its_draws(tmp_path):
    mechanism = made("recall", None, "epochs:4")
    optimizer, step, batches = trainer(mechanism, tmp_path)
    step(START, optimizer.init(START), batches.at(0))
    close_chain(optimizer)
    anew = dpmf.jax.Batches(mechanism, KEY, examples=EXAMPLES)
    with pytest.raises(dpmf.BindingError, match=r"took part before would come again.*journal=that directory"):
        trainer(mechanism, tmp_path, batches=anew)[0].init(START)
    with pytest.raises(dpmf.BindingError, match="and now they are of None"):
        dpmf.jax.sgd(mechanism, KEY, journal=tmp_path).init(START)
    more = dpmf.jax.Batches(mechanism, KEY, examples=EXAMPLES + 1, journal=tmp_path)
    with pytest.raises(dpmf.BindingError, match="already took part would come up again"):
        trainer(mechanism, tmp_path, batches=more)[0].init(START)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(dpmf.FormatError, match="not the description of a run"):
        dpmf.jax.Batches(mechanism, KEY, examples=EXAMPLES, journal=tmp_path)


def test_a_scan_over_batches_is_the_loop():
    optimizer, step, batches = trainer(blt_in_bins())
    parameters, state = START, optimizer.init(START)
    for batch in batches:
        parameters, state, _ = step(parameters, state, batch)
    looped = flat(parameters)

    optimizer, step, batches = trainer(blt_in_bins())
    parameters, state = START, optimizer.init(START)

    @jax.jit
    def several_steps(parameters, state, chunk):
        def body(carry, batch):
            parameters, state, seen = step(*carry, batch)
            return (parameters, state), seen

        return jax.lax.scan(body, (parameters, state), chunk)

    for start in (0, 6):
        chunk = jax.tree.map(lambda *leaves: np.stack(leaves), *[batches.at(start + i) for i in range(6)])
        before = parameters, state
        (parameters, state), seen = several_steps(parameters, state, chunk)
        assert seen.unprotected_loss.shape == (6,)
        # The same chunk with the same state again is refused, inside of the scan.
        assert "good for one update" in failure(lambda: several_steps(*before, chunk))
    np.testing.assert_allclose(flat(parameters), looped, rtol=1e-5, atol=1e-6)


def test_a_journalled_scan_goes_on_after_a_restart(tmp_path):
    mechanism = made("recall", None, "epochs:4")

    def run(state=None, parameters=START, until=12):
        optimizer, step, batches = trainer(mechanism, tmp_path)
        fresh = optimizer.init(START)
        state = fresh if state is None else state
        chunk = jax.tree.map(lambda *leaves: np.stack(leaves),
                             *[batches.at(i) for i in range(dpmf.jax.step_of(state), until)])
        scan = jax.jit(lambda p, s, c: jax.lax.scan(lambda carry, batch: (step(*carry, batch)[:2],) * 2, (p, s), c)[1])
        iterates = jax.device_get(scan(parameters, state, chunk))
        close_chain(optimizer)
        return iterates

    first = run(until=8)
    # The scan died after it had released eight steps; what was saved is the state after five.
    parameters, state = jax.tree.map(lambda leaf: leaf[4], first)
    second = run(state, parameters)
    for name in START:
        assert np.array_equal(second[0][name][:3], first[0][name][5:8])


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
    mesh = Mesh(np.array(jax.devices()), ("data",))
    examples = jnp.asarray(1 + np.random.default_rng(2).random((64, 5)), jnp.float32)

    def part(parameters, examples, mask):
        total, _ = dpmf.jax.accumulate(lambda p, x: p @ x, parameters, examples, clip=1.0, mask=mask, parts=2)
        return jax.lax.psum(total, "data")

    spread = jax.shard_map(part, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data"), PartitionSpec("data")),
                           out_specs=PartitionSpec(), check_vma=False)
    noise = transformation()

    @jax.jit
    def step(parameters, state):
        return noise.update(spread(parameters, examples, jnp.ones(64, bool)), state)

    noisy, _ = step(jnp.zeros(5), noise.init(jnp.zeros(5)))
    sums = jax.jit(spread)
    row = flat(sums(jnp.zeros(5), examples, jnp.ones(64, bool)))
    moves = [sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(row.tolist(), flat(rest).tolist()))
             for rest in (sums(jnp.zeros(5), examples, jnp.arange(64) != index) for index in range(0, 64, 9))]
    assert Fraction(0.999) ** 2 < max(moves) <= 1
    dpmf.NoiseStream(MECHANISM, KEY, run="test", dimension=5).add_to(row)
    assert np.asarray(noisy).tobytes() == row.tobytes()


def differing(value):
    """A vector whose copies on two devices differ, as after a forgotten psum; the compiler takes them for equal."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    part = jax.shard_map(lambda v: v * (1 + jax.lax.axis_index("x")), mesh=mesh, in_specs=PartitionSpec(),
                         out_specs=PartitionSpec(), check_vma=False)
    return part(value)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("journalled", [False, True], ids=["plain", "journal"])
def test_copies_that_differ_are_refused_and_nothing_is_released(arithmetic, journalled, tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    noise = transformation(arithmetic=arithmetic, journal=tmp_path if journalled else None)
    update = jax.jit(noise.update)
    ones = jax.device_put(jnp.ones(5), NamedSharding(mesh, PartitionSpec()))
    state = noise.init(ones)
    assert "1 arrays of this step differ between devices" in failure(lambda: update(summed(jax.jit(differing)(ones)), state))
    # The numbers beside the sum are compared as well.
    counted = dpmf.jax.Sum(ones, jax.jit(differing)(jnp.ones((), jnp.int32)))
    assert "1 arrays of this step differ between devices" in failure(lambda: update(counted, state))
    noisy, _ = update(summed(ones), state)
    row = np.ones(5, np.float32)
    dpmf.NoiseStream(MECHANISM, KEY, run="test", dimension=5, arithmetic=arithmetic).add_to(row)
    assert np.asarray(noisy).tobytes() == row.tobytes()


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_one_value_is_released_where_copies_are_not_known_of(arithmetic):
    """The parameters are on one device, and the sum comes in two copies: all devices get what was released of one."""
    noise = transformation(arithmetic=arithmetic)
    state = noise.init(jnp.ones(5))
    noisy, _ = jax.jit(lambda ones, state: noise.update(summed(differing(ones)), state))(jnp.ones(5), state)
    copies = {np.asarray(shard.data).tobytes() for shard in noisy.addressable_shards}
    assert len(copies) == 1


def test_marks_are_salted_with_a_secret():
    """The name of a run is public: under it alone, data could be chosen whose marks collide."""
    salts = [host_of(dpmf.jax.add_correlated_noise(MECHANISM, dpmf.NoiseKey.from_seed(seed), experiment=name)).salt.tolist()
             for seed, name in ((1, "a"), (2, "a"), (1, "b"), (1, "a"))]
    assert salts[0] == salts[3] and len({tuple(salt) for salt in salts}) == 3
    gradient = jnp.arange(7.0)
    marks = [dpmf.jax._layout._mark(dpmf.jax._layout._digests([gradient], np.array(salt, np.uint32)), jnp.int32(0), ())
             for salt in salts[:2]]
    assert not np.array_equal(*marks)


def test_a_journal_of_0_2_goes_on(tmp_path):
    """It has a stream beyond the model, over marks that were salted otherwise: what it released comes again for nobody."""
    path = tmp_path / "process-0.journal"
    coordinates = range(DIMENSION, DIMENSION + 8)
    with dpmf.DurableStream.create(MECHANISM, KEY, path, run="test", coordinates=coordinates) as before:
        run = before.run
        for step in range(2):
            before.release(np.full(8, 100 + step, np.float32))
    shapes = [list(SHAPES[name]) for name in sorted(SHAPES)]
    described = dict(run=run, mechanism=MECHANISM.identity, arithmetic="exact", shapes=shapes, shards=[], devices=1, draws=None)
    (tmp_path / "run.json").write_text(json.dumps({**described, "ready": True}))

    def resumed(step, **options):
        noise = transformation(journal=tmp_path, **options)
        return noise, noise.init(tree(0))._replace(step=jnp.int32(step))

    noise, state = resumed(1)
    assert "dpmf 0.2, which marked them otherwise" in failure(lambda: noise.update(summed(tree(1)), state))
    close(noise)
    noise, state = resumed(1, lost_input="burn")
    nothing, state = noise.update(summed(tree(1)), state)
    assert not flat(nothing).any()
    noisy, _ = noise.update(summed(tree(2)), state)
    assert flat(noisy).tobytes() == expected_rows()[2].tobytes()
    close(noise)


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
    with pytest.raises(ValueError, match="does not fall into 3 parts"):
        batch.split(3)
    with pytest.raises(ValueError, match="say how many examples"):
        dpmf.jax.Sum.of(START)
    with pytest.raises(TypeError):
        whole + 1


def test_mistakes_with_accumulate_are_answered():
    def accumulate(*examples, loss=lambda p, *e: p * jnp.sum(e[0]), parameters=jnp.float32(1), **options):
        return dpmf.jax.accumulate(loss, parameters, *examples, **{**dict(clip=1.0), **options})

    with pytest.raises(ValueError, match="there are no examples"):
        accumulate()
    with pytest.raises(ValueError, match="belongs into loss"):
        accumulate(jnp.zeros(3), jnp.float32(2))
    with pytest.raises(ValueError, match="the same number"):
        accumulate(jnp.zeros(3), jnp.zeros(4))
    with pytest.raises(ValueError, match=r"mask is float32\[3\], but it must be bool\[3\]"):
        accumulate(jnp.zeros(3), mask=jnp.ones(3))
    batch = dpmf.jax.Batch(0, np.zeros(3, np.int32), np.ones(3, bool), 1)
    with pytest.raises(ValueError, match="batch and mask both say"):
        accumulate(jnp.zeros(3), batch=batch, mask=jnp.ones(3, bool))
    with pytest.raises(TypeError, match="batch is a tuple, but it must be one of a dpmf.jax.Batches"):
        accumulate(jnp.zeros(3), batch=tuple(batch))
    with pytest.raises(dpmf.MismatchError, match="there are 6 examples, but the batch has 3 places.*belong into loss"):
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
    batches = dpmf.jax.Batches(plan, KEY, experiment="test")
    ours = dpmf.jax.adam(plan.mechanism, KEY, 0.05, b2=0.95, eps=1e-3, batches=batches, experiment="test")
    theirs = optax.adam(lambda step: 0.05 * jnp.asarray(np.linspace(1, 0.1, steps), jnp.float32)[step], b1=b1, b2=0.95, eps=1e-3)
    stream = dpmf.NoiseStream(plan.mechanism, KEY, run="test", dimension=DIMENSION)
    state, other = ours.init(tree(0)), theirs.init(jnp.zeros(DIMENSION))
    for step in range(steps):
        updates, state = jax.jit(ours.update)(dpmf.jax.Sum.of(tree(step), batch=batches.at(step)), state)
        row = flat(tree(step))
        stream.add_to(row)
        expected, other = theirs.update(jnp.asarray(row / batches.expected_batch), other)
        np.testing.assert_allclose(flat(updates), expected, rtol=1e-4, atol=1e-7)
    with pytest.raises(dpmf.MismatchError, match="planned with nesterov or weight decay"):
        dpmf.jax.adam(dpmf.mechanism(steps=4, momentum=0.9, nesterov=True, epsilon=8, delta=1e-6), KEY)
    with pytest.raises(dpmf.UnsupportedError, match="names no optimizer"):
        dpmf.jax.adam(dpmf.mechanism(workload=dpmf.Workload.from_matrix(np.tri(4)), epsilon=8, delta=1e-6), KEY)
    with pytest.raises(ValueError, match="one number for each of 4 steps"):
        dpmf.jax.adam_steps(4, schedule=[1.0])


def test_adam_steps_are_the_weights_of_its_mean():
    b1, steps = 0.7, 9
    matrix = dpmf.Workload.sgd(steps, momentum=b1, schedule=dpmf.jax.adam_steps(steps, b1=b1)).matrix()
    means = np.diff(matrix, axis=0, prepend=0)
    assert np.allclose(means.sum(axis=1), 1)
    assert np.allclose(means[5, :6], b1 ** np.arange(5, -1, -1) * (1 - b1) / (1 - b1**6))
