"""Small scripts that users of dpmf.jax write, right and wrong: one record moves what goes to the noise by at most one clip, or the
script is refused with a sentence. With the checks taken out, many of them exceed it."""

import copy
import functools
import os
import threading

import pytest

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="JAX is not installed: pip install -r tests/python/requirements-frameworks.txt")

import dpmf  # noqa: E402
import dpmf.jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
from neighbours import Moved, Script, exceeding, judge, moved_exactly  # noqa: E402

CLIP, EXAMPLES, FEATURES, STEPS = 0.5, 24, 6, 12
KEY = dpmf.NoiseKey.from_seed(11)
ZEROS = jnp.zeros(FEATURES)
#: Longer than the clip and nearly parallel, so that what counts twice shows.
DATA = np.asarray(2 + np.random.default_rng(0).random((EXAMPLES, FEATURES)), np.float32)
SCRIPTS = []


def script(refusal=None):
    """Adds a script, which is right or is told something."""
    def add(run):
        SCRIPTS.append(Script(run, refusal and f"(?s){refusal}", times=0))
        return run

    return add


def loss(parameters, example):
    """Its gradient is the example, whatever was released before."""
    return parameters @ example


@functools.lru_cache
def mechanism():
    made = dpmf.make_mechanism(dpmf.Workload.sgd(STEPS, momentum=0.9), "banded-toeplitz:bands=3")
    return made.with_sampling("balls-in-bins:3").calibrate(8, 1e-5, CLIP)


class World:
    """A run on some data, of which what goes to the noise is kept."""

    def __init__(self, data):
        self.data, self.given = jnp.asarray(data), {}
        self.batches = self.draw()
        self.noise = self.optimizer()
        self.update = jax.jit(self.noise.update)

    @staticmethod
    def draw(experiment="adversarial"):
        return dpmf.jax.Batches(mechanism(), KEY, examples=EXAMPLES, experiment=experiment)

    def optimizer(self, experiment="adversarial", **options):
        options = {**dict(batches=self.batches, denominator=1.0), **options}
        noise = dpmf.jax.add_correlated_noise(mechanism(), KEY, experiment=experiment, **options)
        (host,) = [cell.cell_contents for cell in noise.update.__closure__ if isinstance(cell.cell_contents, dpmf.jax.Host)]
        released = host._released

        def kept(taken, part, step, sums):
            # Copies of coordinates on several devices are released once, the first that comes.
            if part not in taken.rows:
                place = step, (experiment, part)
                assert place not in self.given, "a row of noise comes twice"
                self.given[place] = sums.copy()
            return released(taken, part, step, sums)

        host._released = kept
        return noise

    def total(self, batch, parameters=ZEROS, **options):
        return dpmf.jax.accumulate(loss, parameters, self.data[batch.indices], clip=CLIP, batch=batch, **options)[0]


def mesh():
    return Mesh(np.array(jax.devices()), ("data",))


def spread(values, *axes):
    return jax.device_put(values, NamedSharding(mesh(), PartitionSpec(*axes)))


@script()
def as_documented(world):
    optimizer = optax.chain(world.noise, optax.sgd(0.1))

    @jax.jit
    def step(parameters, state, batch):
        total, _ = dpmf.jax.accumulate(loss, parameters, world.data[batch.indices], clip=CLIP, batch=batch)
        updates, state = optimizer.update(total, state, parameters)
        return optax.apply_updates(parameters, updates), state

    parameters, state = ZEROS, optimizer.init(ZEROS)
    for batch in world.batches:
        parameters, state = step(parameters, state, batch)


@script("which batch this sum is of.*batch=batch")
def the_mask_is_forgotten(world):
    state = world.noise.init(ZEROS)
    for batch in world.batches:
        total, _ = dpmf.jax.accumulate(loss, ZEROS, world.data[batch.indices], clip=CLIP)
        _, state = world.update(total, state)


@script("examples were handed out for it")
def padding_counts_and_the_batch_is_named_all_the_same(world):
    state = world.noise.init(ZEROS)
    for batch in world.batches:
        total, _ = dpmf.jax.accumulate(loss, ZEROS, world.data[batch.indices], clip=CLIP)
        _, state = world.update(dpmf.jax.Sum.of(total.gradients, total.contributions, batch=batch), state)


@script("which batch this sum is of.*batch=batch")
def a_mask_of_all(world):
    state = world.noise.init(ZEROS)
    for batch in world.batches:
        everybody = jnp.ones_like(batch.mask)
        total, _ = dpmf.jax.accumulate(loss, ZEROS, world.data[batch.indices], clip=CLIP, mask=everybody)
        _, state = world.update(total, state)


@script("this is a ArrayImpl.*Sum.of")
def gradients_that_were_summed_by_hand(world):
    state = world.noise.init(ZEROS)
    for batch in world.batches:
        _, state = world.noise.update(jnp.sum(world.data[batch.indices], axis=0), state)


@script("drawn for step 0, but this is step 1.*batches.after")
def one_batch_for_all_steps(world):
    batch, state = world.batches.at(0), world.noise.init(ZEROS)
    for _ in range(STEPS):
        _, state = world.update(world.total(batch), state)


@script("examples were handed out for it.*inside of loss")
def two_losses_in_two_sums(world):
    state = world.noise.init(ZEROS)
    for batch in world.batches:
        both = world.total(batch) + world.total(batch)
        _, state = world.update(both, state)


@script("examples were handed out for it")
def two_losses_added_as_trees(world):
    state = world.noise.init(ZEROS)
    for batch in world.batches:
        both = jax.tree.map(jnp.add, world.total(batch), world.total(batch))
        _, state = world.update(both, state)


@script("one row for each place")
def views_one_behind_the_other(world):
    state = world.noise.init(ZEROS)
    for batch in world.batches:
        views = jnp.concatenate([world.data[batch.indices]] * 4)
        _, state = world.update(dpmf.jax.accumulate(loss, ZEROS, views, clip=CLIP, batch=batch)[0], state)


@script("examples were handed out for it")
def views_with_a_batch_to_match(world):
    state = world.noise.init(ZEROS)
    for batch in world.batches:
        longer = batch._replace(indices=np.tile(batch.indices, 2), mask=np.tile(batch.mask, 2))
        _, state = world.update(world.total(longer), state)


@script()
def views_inside_of_the_loss(world):
    def mean_loss(parameters, example):
        return jnp.mean(jnp.stack([loss(parameters, example), loss(parameters, 2 * example)]))

    state = world.noise.init(ZEROS)
    for batch in world.batches:
        total, _ = dpmf.jax.accumulate(mean_loss, ZEROS, world.data[batch.indices], clip=CLIP, batch=batch)
        _, state = world.update(total, state)


@script("drawn for step 2, but this is step 1")
def a_step_is_skipped(world):
    state = world.noise.init(ZEROS)
    for step in (0, 2, 3):
        _, state = world.update(world.total(world.batches.at(step)), state)


@script("drawn for step 1, but this is step 0")
def batches_come_in_another_order(world):
    state = world.noise.init(ZEROS)
    for step in (1, 0, 2):
        _, state = world.update(world.total(world.batches.at(step)), state)


@script("good for one update")
def a_state_is_used_twice(world):
    state = world.noise.init(ZEROS)
    world.update(world.total(world.batches.at(0)), state)
    world.update(world.total(world.batches.at(0)), state)


@script("good for one update")
def a_state_is_copied(world):
    state = world.noise.init(ZEROS)
    saved = copy.deepcopy(state)
    _, state = world.update(world.total(world.batches.at(0)), state)
    world.update(world.total(world.batches.at(1)), saved)


@script("good for one update")
def an_optimizer_is_copied(world):
    copied = copy.copy(world.noise)
    world.update(world.total(world.batches.at(0)), world.noise.init(ZEROS))
    copied.update(world.total(world.batches.at(0)), copied.init(ZEROS))


@script("good for one update")
def two_threads_take_one_state(world):
    state, faults = world.noise.init(ZEROS), []
    totals = [world.total(world.batches.at(0)), jax.tree.map(lambda leaf: leaf, world.total(world.batches.at(0)))]

    def go(total):
        try:
            jax.block_until_ready(world.update(total, state))
        except Exception as fault:
            faults.append(fault)

    threads = [threading.Thread(target=go, args=(total,)) for total in totals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (fault,) = faults
    raise fault


@script()
def a_scan_over_batches(world):
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *world.batches)

    def body(state, batch):
        noisy, state = world.noise.update(world.total(batch), state)
        return state, noisy

    jax.block_until_ready(jax.jit(lambda state, batches: jax.lax.scan(body, state, batches))(world.noise.init(ZEROS), stacked))


@script("drawn for step 0, but this is step 1")
def a_scan_over_one_batch(world):
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * 4), world.batches.at(0))

    def body(state, batch):
        noisy, state = world.noise.update(world.total(batch), state)
        return state, noisy

    jax.block_until_ready(jax.jit(lambda state, batches: jax.lax.scan(body, state, batches))(world.noise.init(ZEROS), stacked))


@script()
def micro_batches(world):
    state = world.noise.init(ZEROS)
    for batch in world.batches:
        _, state = world.update(world.total(batch, micro_batch=5), state)


@script()
def parts_of_a_step(world):
    optimizer = dpmf.jax.multi_steps(world.noise, 2)
    update, state = jax.jit(optimizer.update), optimizer.init(ZEROS)
    for batch in world.batches:
        for part in halves(batch):
            _, state = update(world.total(part, parts=2), state)


def halves(batch):
    """Two parts of a batch, of one size."""
    more = batch.mask.shape[0] % 2
    return batch._replace(indices=np.pad(batch.indices, (0, more)), mask=np.pad(batch.mask, (0, more))).split(2)


@script("not those of its examples, each once|examples were handed out")
def one_part_of_a_step_twice(world):
    optimizer = dpmf.jax.multi_steps(world.noise, 2)
    update, state = jax.jit(optimizer.update), optimizer.init(ZEROS)
    for batch in world.batches:
        first, _ = halves(batch)
        for part in (first, first):
            _, state = update(world.total(part, parts=2), state)


@script("not those of its examples, each once")
def one_example_in_place_of_all(world):
    state = world.noise.init(ZEROS)
    for batch in world.batches:
        alone = batch._replace(indices=np.full_like(batch.indices, batch.indices[0]))
        _, state = world.update(world.total(alone), state)


@script("several steps, or of another dpmf.jax.Batches|examples were handed out")
def gradients_of_two_batches_in_one_step(world):
    state = world.noise.init(ZEROS)
    for step in range(0, STEPS, 2):
        both = world.total(world.batches.at(step)) + world.total(world.batches.at(step + 1))
        _, state = world.update(both, state)


@script("several steps, or of another dpmf.jax.Batches")
def batches_of_another_sampler(world):
    state = world.noise.init(ZEROS)
    for batch in world.draw("another"):
        _, state = world.update(world.total(batch), state)


@script("draws for run .*Batches.*anew for every optimizer")
def one_sampler_for_two_runs(world):
    second = world.optimizer("second")
    for noise in (world.noise, second):
        noise.update(world.total(world.batches.at(0)), noise.init(ZEROS))


@script("something scaled or cut it")
def a_scale_in_front_of_the_noise(world):
    optimizer = optax.chain(optax.scale(3.0), world.noise)
    state = optimizer.init(ZEROS)
    for batch in world.batches:
        _, state = jax.jit(optimizer.update)(world.total(batch), state)


@script("good for one update|lanes")
def an_ensemble_by_vmap(world):
    state = world.noise.init(ZEROS)
    totals = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), world.total(world.batches.at(0)))
    jax.block_until_ready(jax.vmap(world.noise.update, in_axes=(0, None))(totals, state))


@script()
def examples_that_are_huge_or_not_finite(world):
    world.data = world.data.at[1].multiply(1e30).at[2, 3].set(jnp.nan)
    state = world.noise.init(ZEROS)
    for batch in world.batches:
        _, state = world.update(world.total(batch), state)


@script()
def parameters_in_shards(world):
    parameters = spread(ZEROS, "data")
    state = world.noise.init(parameters)
    for batch in world.batches:
        _, state = world.update(jax.jit(lambda batch: world.total(batch, parameters))(batch), state)


def on_devices(world, after):
    """Each device takes the sum of its half of a batch, and does something with it."""
    specs = dpmf.jax.Batch(PartitionSpec(), PartitionSpec("data"), PartitionSpec("data"), PartitionSpec())
    part = jax.shard_map(
        lambda batch: after(world.total(batch, parts=2)), mesh=mesh(), in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False
    )
    state = world.noise.init(spread(ZEROS))
    for batch in world.batches:
        one, two = halves(batch)
        whole = batch._replace(indices=np.concatenate([one.indices, two.indices]), mask=np.concatenate([one.mask, two.mask]))
        _, state = world.update(jax.jit(part)(whole), state)


@script()
def devices_add_up_their_parts(world):
    on_devices(world, lambda total: jax.lax.psum(total, "data"))


@script("differ between devices.*psum")
def devices_that_forget_to_add_up(world):
    on_devices(world, lambda total: total)


@script("differ between devices.*psum")
def devices_that_add_up_the_counts_alone(world):
    def after(total):
        counted = jax.lax.psum((total.contributions, total.stamp), "data")
        return dpmf.jax.Sum(total.gradients, *counted)

    on_devices(world, after)


@script("examples were handed out for it")
def devices_that_all_take_the_whole_batch(world):
    everywhere = dpmf.jax.Batch(*[PartitionSpec()] * 4)
    part = jax.shard_map(
        lambda batch: jax.lax.psum(world.total(batch, parts=2), "data"),
        mesh=mesh(), in_specs=(everywhere,), out_specs=PartitionSpec(), check_vma=False,
    )
    state = world.noise.init(spread(ZEROS))
    for batch in world.batches:
        _, state = world.update(jax.jit(part)(batch), state)


@script("drawn for step 1, but this is step 0|drawn for step 2, but this is step 1")
def a_step_is_left_out_where_the_loss_is_high(world):
    state = world.noise.init(ZEROS)
    for batch in world.batches:
        total = world.total(batch)
        if batch.step == 1:
            continue
        _, state = world.update(total, state)


REFUSALS = (dpmf.Error, ValueError, TypeError, jax.errors.JaxRuntimeError)


def outcome_of(chosen, data):
    """What a script gave to the noise, and why it was refused, if it was."""
    world = World(data)
    try:
        chosen.run(world)
        jax.effects_barrier()
    except REFUSALS as refused:
        return world.given, refused
    return world.given, None


def measure(chosen, checked=True):
    """What one record moved at most. A script that is refused raises its refusal, if what it released before is as it should be."""
    (given, refused), turns = outcome_of(chosen, DATA), World.draw()
    found = []
    for record in (0, 7):
        without = DATA.copy()
        without[record] = 0
        absent, _ = outcome_of(chosen, without)
        found.append(moved_exactly(given, absent, CLIP, lambda step: record in turns.members(step)))
    worst = Moved(max(one.most for one in found), max(one.steps for one in found))
    if checked:
        assert worst.most <= 1 + 1e-9 and worst.steps == 0, worst
        if refused is not None:
            raise refused
        assert len({step for step, _ in given}) == STEPS
    return worst


@pytest.mark.parametrize("chosen", SCRIPTS, ids=str)
def test_a_record_counts_once_or_the_script_is_refused(chosen):
    judge(chosen, measure, REFUSALS)


def test_without_the_checks_they_exceed_the_clip(monkeypatch):
    """The power of the test above: what the refusals are for."""
    def kept(count, batch, mask):
        mask = batch.mask if batch is not None and batch.mask.shape == (count,) else mask
        return jnp.ones(count, jnp.bool_) if mask is None else jnp.asarray(mask)

    def any_sum(total, batches):
        total = total if isinstance(total, dpmf.jax.Sum) else dpmf.jax.Sum.of(total, 0)
        return dpmf.jax.Sum(total.gradients, jnp.int32(0), jnp.zeros(2, jnp.uint32))

    monkeypatch.setattr(dpmf.jax._sums, "_kept", kept)
    monkeypatch.setattr(dpmf.jax, "_check_sum", any_sum)
    monkeypatch.setattr(dpmf.jax._host.Host, "_contribute", lambda self, run, *_: run.contribute(0))
    refused = [chosen for chosen in SCRIPTS if chosen.refusal is not None]
    found = exceeding(refused, functools.partial(measure, checked=False))
    print(len(found), "of", len(refused), "exceed:", "; ".join(found))
    assert len(found) >= 15, found
