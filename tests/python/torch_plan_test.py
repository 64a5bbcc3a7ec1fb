"""From a plan through its sampler to a model, with PyTorch."""

import copy
import functools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-torch makes an environment with it")

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
from torch.nn.functional import mse_loss  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

KEY = dpmf.NoiseKey.from_seed(5)
EXAMPLES, STEPS = 240, 12


@pytest.fixture(scope="module")
def plan():
    return dpmf.plan(examples=EXAMPLES, batch=40, epochs=2, epsilon=4, delta=1e-5, cache=False)


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, 3, generator=generator)
    return TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5]]))


@pytest.fixture(scope="module")
def turns():
    """Two parts that take turns, each of them with few examples."""
    made = dpmf.make_mechanism(dpmf.Workload.prefix_sum(STEPS), "banded-toeplitz:bands=2")
    return made.with_sampling("cyclic-poisson:2:0.01").calibrate(4, 1e-5)


def model_of():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def private(model, mechanism, **arguments):
    return dpmf.torch.PrivateOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), mechanism, key=KEY, **arguments)


def loader_of(data, sampler, **arguments):
    batches = dpmf.torch.SampledBatches(sampler, **arguments)
    return DataLoader(data, batch_sampler=batches, collate_fn=dpmf.torch.EmptyCollate(data))


def train(optimizer, model, loader, until=STEPS):
    for inputs, targets in optimizer.batches(loader):
        optimizer.accumulate(model, mse_loss, inputs, targets)
        optimizer.step()
        if optimizer.next_step == until:
            return


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_two_epochs_that_are_killed_and_resumed(plan, data, tmp_path):
    whole, sampler = model_of(), plan.sampler(KEY, run="test")
    optimizer = private(whole, plan.mechanism, experiment="test")
    train(optimizer, whole, loader_of(data, sampler))
    assert optimizer.next_step == plan.steps == sampler.next_step == STEPS
    assert optimizer.denominator == sampler.expected_batch == pytest.approx(40)
    assert optimizer.privacy.epsilon == 4

    model, sampler = model_of(), plan.sampler(KEY, run="test")
    first = private(model, plan.mechanism, experiment="test", journal=tmp_path / "journal")
    batches = loader_of(data, sampler)
    kept = None
    for inputs, targets in first.batches(batches):
        first.accumulate(model, mse_loss, inputs, targets)
        first.step()
        if first.next_step == 7:
            kept = [first.state_dict(), sampler.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}]
        if first.next_step == 9:
            break  # and everything after step 7 is lost but for the journal
    first.close()

    noise, drawing, parameters = kept
    model, sampler = model_of(), plan.sampler(KEY, run="test")
    model.load_state_dict(parameters)
    sampler.load_state_dict(drawing)
    second = private(model, plan.mechanism, journal=tmp_path / "journal")
    second.load_state_dict(noise)
    assert second.denominator == sampler.expected_batch and sampler.next_step == second.next_step == 7
    for wrong, match in [
        (plan.sampler(KEY, run="other", start=7), "the run began with"),
        (plan.sampler(dpmf.NoiseKey.from_seed(6), run="test", start=7), "the run began with"),
    ]:
        with pytest.raises(dpmf.MismatchError, match=match):
            second.batches(loader_of(data, wrong))
    train(second, model, loader_of(data, sampler))
    assert torch.equal(weights(model), weights(whole))


def test_another_sampler_is_refused_before_anything_is_released(plan, turns, data):
    def of(sampling, units=EXAMPLES, steps=STEPS):
        return loader_of(data, dpmf.Sampler(sampling, KEY, units=units, steps=steps, run="test"))

    for mechanism, wrong in [
        (plan.mechanism, ["balls-in-bins:5", "balls-in-bins:12", "cyclic-poisson:1:0.5", "cyclic-poisson:7:0.5"]),
        (turns, ["cyclic-poisson:2:0.02", "cyclic-poisson:1:0.01", "cyclic-poisson:3:0.01", "balls-in-bins:6"]),
    ]:
        model = model_of()
        optimizer, counts = private(model, mechanism), f"relies on sampling {mechanism.sampling}"
        for sampling in wrong:
            with pytest.raises(dpmf.MismatchError, match=f"the sampler is {sampling}, but .*{counts}"):
                optimizer.batches(of(sampling))
        for loader in (DataLoader(data, batch_size=40, shuffle=True), DataLoader(data, batch_sampler=dpmf.torch.Cohorts(240, 40))):
            with pytest.raises(dpmf.MismatchError, match=f"not sampled, but .*{counts}"):
                optimizer.batches(loader)
        with pytest.raises(dpmf.MismatchError, match="240 examples|draws from 200"):
            optimizer.batches(of(mechanism.sampling, units=200))
        with pytest.raises(dpmf.MismatchError, match="the run has 13 steps"):
            optimizer.batches(of(mechanism.sampling, steps=13))
        with pytest.raises(dpmf.MismatchError, match="each of its batches is one step"):
            optimizer.batches(of(mechanism.sampling), batches_per_step=2)
        with pytest.raises(dpmf.MismatchError, match=f"{counts}, and nothing here shows"):
            optimizer.accumulate(model, mse_loss, *data[:8])
        optimizer.add_sum({}, 0)
        with pytest.raises(ValueError, match="the denominator is not known"):
            optimizer.step()
        optimizer.denominator = 40
        with pytest.raises(dpmf.MismatchError, match="nothing here shows"):
            optimizer.step()
        assert optimizer.next_step == 0


def test_empty_batches_release_noise_over_the_expected_batch(turns, data):
    model = model_of()
    optimizer, sizes = private(model, turns, experiment="test"), []
    sampler = dpmf.Sampler(turns.sampling, KEY, units=EXAMPLES, steps=STEPS, run="test")
    stream = dpmf.NoiseStream(turns, KEY, run="test", dimension=4)
    for inputs, targets in optimizer.batches(loader_of(data, sampler)):
        sizes.append(len(inputs))
        optimizer.accumulate(model, mse_loss, inputs, targets)
        before, noise = weights(model), torch.zeros(4).numpy()
        stream.add_to(noise)
        optimizer.step()
        if not len(inputs):
            mean = torch.from_numpy(noise) / sampler.expected_batch
            assert torch.allclose(before - weights(model), 0.05 * mean, atol=1e-6)
    assert 0 in sizes and any(sizes) and optimizer.denominator == sampler.expected_batch == pytest.approx(1.2)


def test_a_batch_is_for_the_step_that_it_was_drawn_for(plan, data):
    model = model_of()
    optimizer = private(model, plan.mechanism)
    batches = optimizer.batches(loader_of(data, plan.sampler(KEY, run="test")))
    next(batches)  # and not used
    with pytest.raises(dpmf.MismatchError, match="drawn for step 1, but this is step 0.*begins with the coming step"):
        optimizer.accumulate(model, mse_loss, *next(batches))
    assert optimizer.next_step == 0
    optimizer.burn()
    optimizer.accumulate(model, mse_loss, *data[:1])
    optimizer.step()  # of step 1, whose batch is the last that was handed out
    assert optimizer.next_step == 2


def test_several_epochs_that_count_on_no_sampling(data):
    plan = dpmf.plan(examples=EXAMPLES, batch=40, epochs=2, epsilon=4, delta=1e-5, sampling="none", cache=False)
    model = model_of()
    optimizer = private(model, plan.mechanism)
    with pytest.raises(dpmf.MismatchError, match="balls-in-bins:6"):
        dpmf.torch.check_loader(plan.mechanism, DataLoader(data, batch_size=40), epochs=2)
    sampler = dpmf.Sampler("balls-in-bins:6", KEY, units=EXAMPLES, steps=STEPS)
    train(optimizer, model, loader_of(data, sampler))
    assert optimizer.next_step == STEPS and optimizer.denominator == 40


# Epoch by epoch, with every mechanism and sampler


EPOCHS, PER_EPOCH = 3, 6
MADE = {
    "banded, cyclic Poisson": ("banded:bands=2", "cyclic-poisson:2:0.33"),
    "banded Toeplitz, cyclic Poisson": ("banded-toeplitz:bands=3", "cyclic-poisson:3:0.5"),
    "banded, balls in bins": ("banded:bands=2", "balls-in-bins:6"),
    "banded, reshuffled bins": ("banded:bands=2", "reshuffled-bins:6"),
    "banded inverse, balls in bins": ("banded-inverse:bands=2", "balls-in-bins:6"),
    "blt, balls in bins": (None, "balls-in-bins:6"),
    "recall, epochs without sampling": ("recall:buffers=2:recalls=2", "none"),
    "blt, epochs without sampling": ("blt:buffers=2", "none"),
    "dense, epochs without sampling": ("optimal", "none"),
}


@functools.lru_cache(maxsize=None)
def mechanism_of(name):
    kind, sampling = MADE[name]
    if kind is None:
        made = dpmf.plan(examples=EXAMPLES, batch=40, epochs=EPOCHS, epsilon=4, delta=1e-5, momentum=0.9, cache=False)
        assert made.chosen["mechanism"] in ("banded-inverse", "blt") and made.sampling == sampling
        return made.mechanism
    participation = "single" if sampling.startswith("cyclic") else f"epochs:{EPOCHS}"
    workload = dpmf.Workload.sgd(EPOCHS * PER_EPOCH, momentum=0.9)
    made = dpmf.make_mechanism(workload, kind, participation=participation, dense=kind == "optimal")
    return (made if sampling == "none" else made.with_sampling(sampling)).calibrate(4, 1e-5)


def batches_of(mechanism, rank=0, world_size=1):
    """As a script makes them, at the start and to resume."""
    ranks = dict(rank=rank, world_size=world_size)
    if mechanism.sampling == "none":
        return dpmf.torch.Cohorts(EXAMPLES, 40, epochs=EPOCHS, seed=3, **ranks)
    sampler = dpmf.Sampler(mechanism.sampling, KEY, units=EXAMPLES, steps=mechanism.steps, run="test")
    return dpmf.torch.SampledBatches(sampler, epochs=EPOCHS, **ranks)


def by_epochs(data, mechanism, model, optimizer, loader, until=None, keep=None):
    """From wherever the run is to its end; state is kept after step keep, and the run ends after step until."""
    while optimizer.next_step < mechanism.steps:
        for inputs, targets in optimizer.batches(loader):
            for part in (slice(0, 9), slice(9, None)):  # in parts, as memory allows
                optimizer.accumulate(model, mse_loss, inputs[part], targets[part])
            optimizer.step()
            if optimizer.next_step == keep:
                kept = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
            if optimizer.next_step == until:
                return kept
    return None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", MADE)
def test_epochs_that_are_killed_and_resumed(name, workers, data, tmp_path):
    mechanism = mechanism_of(name)

    def begin(**arguments):
        model = model_of()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = dpmf.torch.PrivateOptimizer(sgd, mechanism, key=KEY, **arguments)
        collate = dpmf.torch.EmptyCollate(data)
        loader = DataLoader(data, batch_sampler=batches_of(mechanism), collate_fn=collate, num_workers=workers)
        return model, optimizer, loader

    whole, optimizer, loader = begin(experiment="test")
    assert len(loader) == PER_EPOCH
    by_epochs(data, mechanism, whole, optimizer, loader)
    assert optimizer.next_step == EPOCHS * PER_EPOCH and optimizer.denominator == loader.batch_sampler.expected_batch
    with pytest.raises(dpmf.MismatchError, match="all 18 steps were drawn"):
        next(optimizer.batches(loader))

    model, first, loader = begin(experiment="test", journal=tmp_path / "journal")
    kept, parameters = by_epochs(data, mechanism, model, first, loader, until=11, keep=8)
    first.close()

    model, second, loader = begin(journal=tmp_path / "journal")
    model.load_state_dict(parameters)
    second.load_state_dict(kept)
    assert second.next_step == 8
    by_epochs(data, mechanism, model, second, loader)
    assert torch.equal(weights(model), weights(whole))


def test_fixed_cohorts_of_several_epochs(data):
    cohorts = dpmf.torch.Cohorts(EXAMPLES, 37, epochs=3, seed=4)
    assert (len(cohorts), cohorts.steps, cohorts.per_epoch) == (6, 18, 6) and cohorts.expected_batch == 40
    epochs = [list(cohorts) for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[2] and {len(members) for members in epochs[0]} == {40}
    assert sorted(sum(epochs[0], [])) == list(range(EXAMPLES)) != sum(epochs[0], [])
    with pytest.raises(dpmf.MismatchError, match="all 18 steps"):
        iter(cohorts)
    uneven = [len(members) for members in dpmf.torch.Cohorts(100, 13, epochs=2)]
    assert len(uneven) == 8 and set(uneven) == {12, 13} and sum(uneven) == 100
    parts = [list(dpmf.torch.Cohorts(EXAMPLES, 37, epochs=3, seed=4, rank=rank, world_size=2)) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*parts)] == [sorted(members) for members in epochs[0]]
    with pytest.raises(ValueError, match="drop_last"):
        dpmf.torch.Cohorts(100, 13, epochs=2, drop_last=True)


def test_fixed_cohorts_are_not_sampled(plan, data):
    """They count for the participation of a mechanism, never for a sampling that its guarantee counts on."""
    model = model_of()
    for epochs in (1, 2):
        loader = DataLoader(data, batch_sampler=dpmf.torch.Cohorts(EXAMPLES, 40, epochs=epochs))
        with pytest.raises(dpmf.MismatchError, match="relies on sampling (balls-in|reshuffled)-bins:6"):
            private(model, plan.mechanism).batches(loader)
    single = dpmf.mechanism(steps=STEPS, epsilon=4, delta=1e-5)
    with pytest.raises(dpmf.MismatchError, match="takes part in at most one step"):
        private(model, single).batches(loader)
    # Epochs of another length bring an example back sooner than is covered.
    unsampled = dpmf.plan(examples=EXAMPLES, batch=40, epochs=2, epsilon=4, delta=1e-5, sampling="none", cache=False)
    with pytest.raises(dpmf.MismatchError, match="balls-in-bins:3"):
        private(model, unsampled.mechanism).batches(DataLoader(data, batch_sampler=dpmf.torch.Cohorts(EXAMPLES, 80, epochs=4)))
    with pytest.raises(dpmf.MismatchError, match="the run has 18 steps"):
        private(model, unsampled.mechanism).batches(DataLoader(data, batch_sampler=dpmf.torch.Cohorts(EXAMPLES, 40, epochs=3)))
    optimizer = private(model, unsampled.mechanism)
    batches = optimizer.batches(DataLoader(data, batch_sampler=dpmf.torch.Cohorts(EXAMPLES, 40, epochs=2)))
    next(batches)
    with pytest.raises(dpmf.MismatchError, match="drawn for step 1, but this is step 0"):
        optimizer.accumulate(model, mse_loss, *next(batches))
