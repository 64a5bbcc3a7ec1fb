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

    def __init__(self, data, experiment="adversarial"):
        self.data, self.given, self.twice = jnp.asarray(data), {}, 0
        self.turns = self.draw()
        self.begin()

    @staticmethod
    def draw(experiment="adversarial"):
        return dpmf.jax.Batches(mechanism(), KEY, examples=EXAMPLES, experiment=experiment)

    def begin(self, parameters=ZEROS):
        """The run of the script, on parameters as they lie on devices."""
        self.run = self.start(parameters)
        self.noise = dpmf.jax.add_correlated_noise(self.run)
        self.update = jax.jit(lambda total, state, batch: self.noise.update(total, state, batch=batch))
        self.state = self.noise.init(parameters)

    def start(self, parameters=ZEROS, experiment="adversarial", **options):
        options = {**dict(batches=self.turns, denominator=1.0, experiment=experiment), **options}
        run = dpmf.jax.Run(mechanism(), KEY, parameters, **options)
        on_device, unit = run.device._on_device, run._split[0]

        def keep(step, device, released, leaf):
            if not released:
                return
            # Copies of coordinates on several devices are released once, and a batch that is used again alike as well.
            place = int(step), (experiment, run.layout.devices[int(device)])
            sums = np.round(np.asarray(leaf, np.float64) / unit) * unit
            self.twice += place in self.given and not np.array_equal(self.given[place], sums)
            self.given.setdefault(place, sums)

        def kept(device, axes, *local):
            found = on_device(device, axes, *local)
            step, log, leaf = local[2][dpmf.jax._release.STEP], found[3], local[8]
            released = log[step % dpmf.jax._release.DEPTH, 1] == 0
            jax.debug.callback(keep, step, device, released, leaf)
            return found

        run.device._on_device = kept
        return run

    def total(self, batch, parameters=ZEROS, **options):
        return dpmf.jax.accumulate(loss, parameters, self.data[batch.indices], clip=CLIP, batch=batch, **options)[0]

    def take(self, make):
        """All steps, each of the sum that is made of its batch."""
        for batch in self.run.batches(self.state):
            self.step(make(batch), batch)

    def step(self, total, batch, state=None):
        noisy, state = self.update(total, self.state if state is None else state, batch)
        jax.effects_barrier()
        self.run.commit(state)
        self.state = state
        return noisy


def mesh():
    return Mesh(np.array(jax.devices()[:2]), ("data",))


def spread(values, *axes):
    return jax.device_put(values, NamedSharding(mesh(), PartitionSpec(*axes)))


@script()
def as_documented(world):
    optimizer = optax.with_extra_args_support(optax.chain(world.noise, optax.sgd(0.1)))

    @jax.jit
    def step(parameters, state, batch):
        total, _ = dpmf.jax.accumulate(loss, parameters, world.data[batch.indices], clip=CLIP, batch=batch)
        updates, state = optimizer.update(total, state, parameters, batch=batch)
        return optax.apply_updates(parameters, updates), state

    parameters, state = ZEROS, optimizer.init(ZEROS)
    for batch in world.run.batches(state):
        parameters, state = step(parameters, state, batch)
        world.run.commit(state)


@script("does not name its batch.*batch=batch")
def the_mask_is_forgotten(world):
    world.take(lambda batch: dpmf.jax.accumulate(loss, ZEROS, world.data[batch.indices], clip=CLIP)[0])


@script("examples were handed out for it")
def padding_counts_and_the_batch_is_named_all_the_same(world):
    def total(batch):
        total, _ = dpmf.jax.accumulate(loss, ZEROS, world.data[batch.indices], clip=CLIP)
        return dpmf.jax.Sum.of(total.gradients, total.contributions, batch=batch)

    world.take(total)


@script("does not name its batch.*batch=batch")
def a_mask_of_all(world):
    world.take(lambda batch: dpmf.jax.accumulate(
        loss, ZEROS, world.data[batch.indices], clip=CLIP, mask=jnp.ones_like(batch.mask))[0])


@script("this is a ArrayImpl.*Sum.of|this is a DynamicJaxprTracer.*Sum.of")
def gradients_that_were_summed_by_hand(world):
    world.take(lambda batch: jnp.sum(world.data[batch.indices], axis=0))


@script("was not given its batch.*batch=batch")
def the_batch_is_not_given_to_the_update(world):
    for batch in world.run.batches(world.state):
        world.noise.update(world.total(batch), world.state)


@script("this batch has no noise.*run.batches")
def batches_without_a_run(world):
    for batch in world.turns:
        _, world.state = world.update(world.total(batch), world.state, batch)


@script("drawn for step 0, but this is step 1.*as it comes")
def one_batch_for_all_steps(world):
    batch = world.turns.at(0)
    world.take(lambda _: world.total(batch))


@script("at step 1, but its batch is of step 0")
def one_batch_with_its_noise_for_all_steps(world):
    batch, state = next(world.run.batches(world.state)), world.state
    for _ in range(STEPS):
        _, state = world.update(world.total(batch), state, batch)
        jax.effects_barrier()
    world.run.commit(state)


@script("examples were handed out for it.*inside of loss")
def two_losses_in_two_sums(world):
    world.take(lambda batch: world.total(batch) + world.total(batch))


@script("examples were handed out for it")
def two_losses_added_as_trees(world):
    world.take(lambda batch: jax.tree.map(jnp.add, world.total(batch), world.total(batch)))


@script("one row for each place")
def views_one_behind_the_other(world):
    def total(batch):
        views = jnp.concatenate([world.data[batch.indices]] * 4)
        return dpmf.jax.accumulate(loss, ZEROS, views, clip=CLIP, batch=batch)[0]

    world.take(total)


@script("examples were handed out for it")
def views_with_a_batch_to_match(world):
    world.take(lambda batch: world.total(
        batch._replace(indices=np.tile(batch.indices, 2), mask=np.tile(batch.mask, 2), noise=None)))


@script()
def views_inside_of_the_loss(world):
    def mean_loss(parameters, example):
        return jnp.mean(jnp.stack([loss(parameters, example), loss(parameters, 2 * example)]))

    world.take(lambda batch: dpmf.jax.accumulate(mean_loss, ZEROS, world.data[batch.indices], clip=CLIP, batch=batch)[0])


@script("drawn for step 2, but this is step 1")
def a_step_is_skipped(world):
    world.take(lambda batch: world.total(world.turns.at([0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1][int(batch.step)])))


@script("drawn for step 1, but this is step 0")
def batches_come_in_another_order(world):
    world.take(lambda batch: world.total(world.turns.at([1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11][int(batch.step)])))


@script("result did not come back: call run.commit")
def the_commit_is_forgotten(world):
    for batch in world.run.batches(world.state):
        _, world.state = world.update(world.total(batch), world.state, batch)


@script()
def a_state_is_used_twice(world):
    """To the same end, which is one release."""
    for batch in world.run.batches(world.state):
        world.update(world.total(batch), world.state, batch)
        world.step(world.total(batch), batch)


@script("another update than the one that was committed")
def training_goes_on_from_a_branch(world):
    batches = world.run.batches(world.state)
    first = next(batches)
    # Nobody takes part, so that it does not show by the data.
    _, branch = world.update(dpmf.jax.Sum.of(ZEROS, 0, batch=first), world.state, first._replace(noise=first.noise))
    world.given.clear()
    world.step(world.total(first), first)
    second = next(batches)
    world.step(world.total(second), second, branch)


@script("used for one update only")
def a_state_is_copied(world):
    saved = copy.deepcopy(world.state)
    batches = world.run.batches(world.state)
    first = next(batches)
    world.step(world.total(first), first)
    second = next(batches)
    world.step(world.total(second), second, saved)


@script("at step 0, but the noise of that step was released")
def an_optimizer_is_copied(world):
    world.take(world.total)
    copied = dpmf.jax.add_correlated_noise(world.run)
    for batch in world.run.batches(copied.init(ZEROS)):
        world.step(world.total(batch), batch)


@script()
def two_threads_take_one_state(world):
    """What both release is the same."""
    for batch in world.run.batches(world.state):
        total, after = world.total(batch), []
        threads = [threading.Thread(target=lambda: after.append(world.update(total, world.state, batch)[1])) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        world.run.commit(after[0])
        world.run.commit(after[1])
        world.state = after[0]


@script()
def a_scan_over_batches(world):
    def body(state, batch):
        noisy, state = world.noise.update(world.total(batch), state, batch=batch)
        return state, noisy

    scan = jax.jit(lambda state, batches: jax.lax.scan(body, state, batches))
    for stacked in world.run.batches(world.state, together=STEPS):
        world.state, _ = scan(world.state, stacked)
        jax.effects_barrier()
        world.run.commit(world.state)


@script("at step 1, but its batch is of step 0")
def a_scan_over_one_batch(world):
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * 4), next(world.run.batches(world.state)))

    def body(state, batch):
        noisy, state = world.noise.update(world.total(batch), state, batch=batch)
        return state, noisy

    state, _ = jax.jit(lambda state, batches: jax.lax.scan(body, state, batches))(world.state, stacked)
    jax.effects_barrier()
    world.run.commit(state)


@script()
def micro_batches(world):
    world.take(lambda batch: world.total(batch, micro_batch=5))


@script()
def parts_of_a_step(world):
    take_parts(world, halves)


def take_parts(world, parts):
    optimizer = dpmf.jax.multi_steps(world.noise, 2)
    update = jax.jit(lambda total, state, batch: optimizer.update(total, state, batch=batch))
    state = optimizer.init(ZEROS)
    for batch in world.run.batches(state):
        for part in parts(batch):
            _, state = update(world.total(part, parts=2), state, batch)
        jax.effects_barrier()
        world.run.commit(state)


def halves(batch):
    """Two parts of a batch, of one size."""
    more = batch.mask.shape[0] % 2
    return batch._replace(indices=np.pad(batch.indices, (0, more)), mask=np.pad(batch.mask, (0, more))).split(2)


@script("not those of its examples, each once|examples were handed out")
def one_part_of_a_step_twice(world):
    take_parts(world, lambda batch: halves(batch)[:1] * 2)


@script("not those of its examples, each once")
def one_example_in_place_of_all(world):
    world.take(lambda batch: world.total(batch._replace(indices=np.full_like(batch.indices, batch.indices[0]), noise=None)))


@script("several steps, or of another dpmf.jax.Batches|examples were handed out")
def gradients_of_two_batches_in_one_step(world):
    world.take(lambda batch: world.total(batch) + world.total(world.turns.at((int(batch.step) + 1) % STEPS)))


@script("several steps, or of another dpmf.jax.Batches")
def batches_of_another_sampler(world):
    others = world.draw("another")
    world.take(lambda batch: world.total(others.at(int(batch.step))))


@script("draws for run .*Batches.*anew for every run")
def one_sampler_for_two_runs(world):
    world.start(experiment="second")


@script("something changed the sum after")
def a_scale_in_front_of_the_noise(world):
    optimizer = optax.with_extra_args_support(optax.chain(optax.scale(3.0), world.noise))
    state = optimizer.init(ZEROS)
    for batch in world.run.batches(state):
        _, state = optimizer.update(world.total(batch), state, batch=batch)
        world.run.commit(state)


@script("lanes of jax.vmap")
def an_ensemble_by_vmap(world):
    batch = next(world.run.batches(world.state))
    totals = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), world.total(batch))
    jax.vmap(lambda total: world.noise.update(total, world.state, batch=batch))(totals)


@script()
def examples_that_are_huge_or_not_finite(world):
    world.data = world.data.at[1].multiply(1e30).at[2, 3].set(jnp.nan)
    world.take(world.total)


@script()
def parameters_in_shards(world):
    parameters = spread(ZEROS, "data")
    world.begin(parameters)
    total = jax.jit(lambda batch: world.total(batch, parameters))
    world.take(lambda batch: total(batch._replace(noise=None)))


def on_devices(world, after):
    """Each device takes the sum of its half of a batch, and does something with it."""
    specs = dpmf.jax.Batch(PartitionSpec(), PartitionSpec("data"), PartitionSpec("data"), PartitionSpec())
    part = jax.jit(jax.shard_map(
        lambda batch: after(world.total(batch, parts=2)), mesh=mesh(), in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False
    ))
    world.begin(spread(ZEROS))

    def total(batch):
        one, two = halves(batch)
        whole = one._replace(indices=np.concatenate([one.indices, two.indices]), mask=np.concatenate([one.mask, two.mask]), noise=None)
        return part(whole)

    world.take(total)


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
    part = jax.jit(jax.shard_map(
        lambda batch: jax.lax.psum(world.total(batch, parts=2), "data"),
        mesh=mesh(), in_specs=(everywhere,), out_specs=PartitionSpec(), check_vma=False,
    ))
    world.begin(spread(ZEROS))
    world.take(lambda batch: part(batch._replace(noise=None)))


@script("result did not come back")
def a_step_is_left_out_where_the_loss_is_high(world):
    for batch in world.run.batches(world.state):
        if batch.step == 1:
            continue
        world.step(world.total(batch), batch)


REFUSALS = (dpmf.Error, ValueError, TypeError, jax.errors.JaxRuntimeError)


def outcome_of(chosen, data):
    """What a script gave to the noise, and why it was refused, if it was."""
    world = World(data)
    try:
        chosen.run(world)
        jax.effects_barrier()
    except REFUSALS as refused:
        jax.effects_barrier()
        return world, refused
    return world, None


def measure(chosen, checked=True):
    """What one record moved at most. A script that is refused raises its refusal, if what it released before is as it should be."""
    (world, refused), turns = outcome_of(chosen, DATA), World.draw()
    given, found = world.given, []
    for record in (0, 7):
        without = DATA.copy()
        without[record] = 0
        absent, _ = outcome_of(chosen, without)
        found.append(moved_exactly(given, absent.given, CLIP, lambda step: record in turns.members(step)))
    worst = Moved(max(one.most for one in found), max(one.steps for one in found))
    if checked:
        assert worst.most <= 1 + 1e-9 and worst.steps == 0 and not world.twice, worst
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
    monkeypatch.setattr(dpmf.jax.Run, "_contribute", lambda self, step, outcome: self._run.contribute(0))
    monkeypatch.setattr(dpmf.jax._release.Device, "_differing", lambda self, digests: jnp.int32(0))
    monkeypatch.setattr(dpmf.jax._run, "_copies", lambda leaf: [np.asarray(leaf)])
    for name in ("COUNTED", "STAMPED", "BOUND"):
        monkeypatch.setattr(dpmf.jax._release, name, 0)
    refused = [chosen for chosen in SCRIPTS if chosen.refusal is not None]
    found = exceeding(refused, functools.partial(measure, checked=False))
    print(len(found), "of", len(refused), "exceed:", "; ".join(found))
    assert len(found) >= 15, found
