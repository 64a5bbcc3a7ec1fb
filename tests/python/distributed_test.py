"""torch.distributed: two processes on loopback, each with the noise of its shard only."""

import copy
import json
import socket

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-torch makes an environment with it")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

pytest.importorskip("opacus", reason="Opacus is not installed: scripts/setup-torch makes an environment with it")

import dpmf  # noqa: E402
import dpmf.opacus  # noqa: E402
import dpmf.torch  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from watching import watch  # noqa: E402

STEPS, WORLD = 5, 2
KEY = dpmf.NoiseKey.from_seed(8)

pytestmark = pytest.mark.filterwarnings("ignore::dpmf.torch.UncheckedDataWarning")


def mechanism():
    return dpmf.mechanism(steps=STEPS, momentum=0.9, epsilon=3, delta=1e-6, clip=0.5)


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def cohorts():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(STEPS)
    ]


def private(model, directory=None, rank=None, **arguments):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if directory is not None:
        arguments["journal"] = directory / f"journal-{rank}"
    return dpmf.torch.PrivateOptimizer(sgd, mechanism(), denominator=8, experiment="shards", **arguments)


def noise_alone(optimizer):
    """The row that a step adds to a gradient of zero, before division."""
    optimizer.denominator = 8
    optimizer.add_sum({}, 0)
    optimizer._noise.check()
    optimizer._noise.release()
    return optimizer._noise.flat.clone()


def of_rank(rank, port, directory):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    for task in (draw, train_and_resume, release_exactly, disagree, forget_the_group, train_by_epochs, share_batches):
        (directory / task.__name__).mkdir(exist_ok=True)
        task(rank, KEY, directory / task.__name__)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What two ranks left behind; all that they do is done in one pair of processes, which are slow to start."""
    directory = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(of_rank, args=(port, directory), nprocs=WORLD)
    return directory


def draw(rank, key, directory):
    model = model_of()
    optimizer = private(model, key=key, group=True)
    dimension = sum(p.numel() for p in model.parameters())
    assert optimizer.coordinates == dpmf.torch.shard(dimension) == optimizer._noise.run.coordinates
    stream = dpmf.NoiseStream(mechanism(), key, coordinates=optimizer.coordinates)
    # Whole packets of 64 coordinates, also at the edges of a shard.
    packets = -(-optimizer.coordinates.stop // 64) - optimizer.coordinates.start // 64
    assert stream.memory == optimizer.mechanism.buffers * 8 * 64 * packets
    rows = torch.stack([noise_alone(optimizer) for _ in range(STEPS)])
    np.save(directory / f"rows-{rank}.npy", rows.numpy())


def test_noise_equals_that_of_one_process_bit_for_bit(directory):
    model = model_of()
    alone = private(model, key=KEY)
    expected = np.stack([noise_alone(alone).numpy() for _ in range(STEPS)])
    assert np.count_nonzero(expected) > 0.9 * expected.size
    for rank in range(WORLD):
        got = np.load(directory / "draw" / f"rows-{rank}.npy")
        # As bits, where also zeros have signs.
        assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


def train_half(optimizer, model, rank, data):
    for inputs, targets in data:
        mine = slice(rank, None, WORLD)
        optimizer.accumulate(model, cross_entropy, inputs[mine], targets[mine])
        optimizer.step()


def train_and_resume(rank, key, directory):
    """Three steps, then the rest by new optimizers from the saved state."""
    model = model_of()
    optimizer = private(model, directory, rank, key=key, group=True)
    train_half(optimizer, model, rank, cohorts()[:3])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    optimizer.close()
    again = model_of()
    again.load_state_dict(state["model"])
    resumed = private(again, directory, rank, key=key, group=True)
    resumed.load_state_dict(state["optimizer"])
    train_half(resumed, again, rank, cohorts()[3:])
    torch.save(again.state_dict(), directory / f"model-{rank}.pt")


def test_training_on_two_ranks_is_training_on_one(directory):
    model = model_of()
    alone = private(model, key=KEY)
    for inputs, targets in cohorts():
        alone.accumulate(model, cross_entropy, inputs, targets)
        alone.step()
    models = [torch.load(directory / "train_and_resume" / f"model-{rank}.pt") for rank in range(WORLD)]
    for name, expected in model.state_dict().items():
        assert torch.equal(models[0][name], models[1][name]), "the ranks agree"
        # vmap over other examples at once rounds gradients otherwise; their sums are exact.
        torch.testing.assert_close(models[0][name], expected, rtol=0, atol=1e-6)


def releases(optimizer, model, mine):
    """The sums of all steps, and what is released of them, for gradients that are computed one by one, and so do not depend
    on what is beside them."""
    run = watch(optimizer)
    released = []
    for inputs, targets in cohorts():
        optimizer.accumulate(model, cross_entropy, inputs[mine], targets[mine], vectorize=False)
        optimizer._noise.release()
        released.append(optimizer._noise.flat.numpy().copy())
    return np.stack(run.sums), np.stack(released)


def release_exactly(rank, key, directory):
    model = model_of()
    for arithmetic in ("exact", "float"):
        optimizer = private(model, key=key, group=True, arithmetic=arithmetic)
        # Unequal parts, so that no order of addition is like another.
        mine = slice(3) if rank == 0 else slice(3, None)
        sums, released = releases(optimizer, model, mine)
        np.savez(directory / f"{arithmetic}-{rank}.npz", sums=sums, released=released)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_releases_of_two_ranks_equal_those_of_one_process_bit_for_bit(directory, arithmetic):
    model = model_of()
    alone = private(model, key=KEY, arithmetic=arithmetic)
    sums, expected = releases(alone, model, slice(None))
    got = [np.load(directory / "release_exactly" / f"{arithmetic}-{rank}.npz") for rank in range(WORLD)]
    assert np.array_equal(np.concatenate([one["sums"] for one in got], axis=1), sums)
    for one in got:
        assert np.array_equal(one["released"].view(np.uint32), expected.view(np.uint32))
    if arithmetic == "exact":
        grid = dpmf.NoiseStream(alone.mechanism, KEY, dimension=1).grid
        units = expected.astype(np.float64) / grid
        assert np.array_equal(units, np.round(units))


def disagree(rank, key, directory):
    model = model_of()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"NoiseKey\.create\(path\)"):
        dpmf.torch.PrivateOptimizer(sgd, mechanism(), denominator=8, group=True)
    with pytest.raises(dpmf.MismatchError, match="the ranks differ in their key: .* in rank 0, .* in rank 1"):
        private(model, key=dpmf.NoiseKey.from_seed(rank), group=True)
    smaller = torch.nn.Linear(2, 2 + rank)
    with pytest.raises(dpmf.MismatchError, match="number of parameters: 6 in rank 0, 9 in rank 1"):
        private(smaller, key=key, group=True)
    with pytest.raises(dpmf.MismatchError, match="arithmetic: exact in rank 0, float in rank 1"):
        private(model, key=key, group=True, arithmetic=("exact", "float")[rank])
    (directory / f"refused-{rank}").touch()


def test_ranks_that_differ_are_refused(directory):
    assert [(directory / "disagree" / f"refused-{rank}").exists() for rank in range(WORLD)] == [True] * WORLD


def forget_the_group(rank, key, directory):
    """Stock code of DistributedDataParallel: no rank trains a model of its own with noise of its own."""
    model = model_of()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(dpmf.MismatchError, match="one of 2 ranks.*group=True"):
        dpmf.torch.PrivateOptimizer(sgd, mechanism(), denominator=8)
    inputs, targets = cohorts()[0]
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel.*module\.module"):
        private(model, key=key, group=True).accumulate(wrapped, cross_entropy, inputs, targets)
    data = torch.utils.data.TensorDataset(inputs, targets)
    with pytest.raises(dpmf.MismatchError, match="one of 2 ranks"):
        dpmf.opacus.PrivacyEngine().make_private_with_epsilon(
            module=wrapped,
            optimizer=sgd,
            data_loader=torch.utils.data.DataLoader(data, batch_size=4),
            target_epsilon=2,
            target_delta=1e-5,
            max_grad_norm=1.0,
        )
    # Each of them alone, where that is meant.
    groups = [torch.distributed.new_group([one]) for one in range(WORLD)]
    own = private(model_of(), key=dpmf.NoiseKey.from_seed(rank), group=groups[rank])
    assert own.coordinates == range(sum(p.numel() for p in model.parameters()))
    (directory / f"refused-{rank}").touch()


def test_ranks_that_do_not_know_of_each_other_are_refused(directory):
    assert [(directory / "forget_the_group" / f"refused-{rank}").exists() for rank in range(WORLD)] == [True] * WORLD


EXAMPLES, EPOCHS, PER_EPOCH = 60, 2, 6
MADE = {
    "banded": "cyclic-poisson:2:0.3",
    "banded-toeplitz:bands=3": "cyclic-poisson:3:0.5",
    "banded:bands=2": "balls-in-bins:6",
    "banded-inverse:bands=2": "balls-in-bins:6",
    "planned": "reshuffled-bins:6 or balls-in-bins:6",
    "recall:buffers=2:recalls=2": "none",
    "blt:buffers=2": "none",
}


def several_epochs(name):
    sampling = MADE[name]
    if name == "planned":
        plan = dpmf.plan(examples=EXAMPLES, batch=10, epochs=EPOCHS, epsilon=4, delta=1e-5, momentum=0.9, cache=False)
        assert plan.chosen["mechanism"] in ("banded-inverse", "blt") and plan.sampling in sampling.split(" or ")
        return plan.mechanism
    kind = "banded:bands=2" if name == "banded" else name
    participation = "single" if sampling.startswith("cyclic") else f"epochs:{EPOCHS}"
    made = dpmf.make_mechanism(dpmf.Workload.sgd(EPOCHS * PER_EPOCH, momentum=0.9), kind, participation=participation)
    return (made if sampling == "none" else made.with_sampling(sampling)).calibrate(4, 1e-5)


def epochs_of(name, directory=None, rank=0, world_size=1):
    """A run that is resumed in the middle of its second epoch where there is a directory for its journal."""
    mechanism, stop = several_epochs(name), None if directory is None else PER_EPOCH + 2
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(EXAMPLES, 6, generator=generator), torch.randint(3, (EXAMPLES,), generator=generator)
    )
    kept = None
    while True:
        model, ranks = model_of(), dict(rank=rank, world_size=world_size)
        if mechanism.sampling == "none":
            batches = dpmf.torch.Cohorts(EXAMPLES, 10, epochs=EPOCHS, seed=3, **ranks)
        else:
            sampler = dpmf.Sampler(mechanism.sampling, KEY, units=EXAMPLES, steps=mechanism.steps, run="epochs")
            batches = dpmf.torch.SampledBatches(sampler, epochs=EPOCHS, **ranks)
        loader = torch.utils.data.DataLoader(data, batch_sampler=batches, collate_fn=dpmf.torch.EmptyCollate(data))
        optimizer = dpmf.torch.PrivateOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            mechanism,
            key=KEY,
            experiment="epochs",
            journal=directory and directory / f"journal-{name}-{rank}",
            group=True if world_size > 1 else None,
        )
        if kept is not None:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        while optimizer.next_step < mechanism.steps and (kept is not None or optimizer.next_step != stop):
            for inputs, targets in optimizer.batches(loader):
                # One by one: gradients that do not depend on what is beside them.
                optimizer.accumulate(model, cross_entropy, inputs, targets, vectorize=False)
                optimizer.step()
                if optimizer.next_step == stop and kept is None:
                    break
        if optimizer.next_step == mechanism.steps:
            return model.state_dict()
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.close()


def train_by_epochs(rank, key, directory):
    for name in MADE:
        torch.save(epochs_of(name, directory, rank, WORLD), directory / f"{name}-{rank}.pt")


@pytest.mark.parametrize("name", MADE)
def test_several_epochs_on_two_ranks_have_the_bits_of_one(directory, name):
    expected = epochs_of(name)
    assert any(not torch.equal(value, start) for value, start in zip(expected.values(), model_of().state_dict().values()))
    for rank in range(WORLD):
        got = torch.load(directory / "train_by_epochs" / f"{name}-{rank}.pt")
        assert all(torch.equal(got[key], value) for key, value in expected.items())


def test_ranks_that_meet_after_the_optimizer_was_made(monkeypatch):
    model = model_of()
    optimizer = private(model, key=KEY)
    optimizer.add_sum({}, 0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(dpmf.MismatchError, match="one of 2 ranks"):
        optimizer.step()
    assert optimizer.next_step == 0


def refused(act):
    try:
        act()
    except dpmf.MismatchError as error:
        return str(error)
    return "not refused"


def share_batches(rank, key, directory):
    """Loaders by which an example would count in several ranks, or in several steps."""
    data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.zeros(40, dtype=torch.long))
    ranks = dict(rank=rank, world_size=WORLD)

    def sampler(name):
        return dpmf.Sampler(f"balls-in-bins:{STEPS}", key, units=40, steps=STEPS, run=f"{name:032x}")

    said = {}
    for name, loader in {
        "no rank": dict(batch_sampler=dpmf.torch.Cohorts(40, 8, seed=1)),
        "rank 0 on both": dict(batch_sampler=dpmf.torch.Cohorts(40, 8, seed=1, rank=0, world_size=WORLD)),
        "of three": dict(batch_sampler=dpmf.torch.Cohorts(40, 8, seed=1, rank=rank, world_size=3)),
        "a plain loader": dict(batch_size=8, shuffle=True),
        "other seeds": dict(batch_sampler=dpmf.torch.Cohorts(40, 8, seed=rank, **ranks)),
        "other runs": dict(batch_sampler=dpmf.torch.SampledBatches(sampler(rank + 1), **ranks)),
        "right": dict(batch_sampler=dpmf.torch.Cohorts(40, 8, seed=1, **ranks)),
    }.items():
        model = model_of()
        optimizer = private(model, key=key, group=True)

        def train(optimizer=optimizer, model=model, loader=loader):
            for inputs, targets in optimizer.batches(torch.utils.data.DataLoader(data, **loader)):
                optimizer.accumulate(model, cross_entropy, inputs, targets)
                optimizer.step()

        said[name] = refused(train)
    torch.manual_seed(rank)
    other = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    said["other weights"] = refused(lambda: private(other, key=key, group=True))
    turned = torch.nn.Linear(*((6, 7) if rank else (7, 6)), bias=False)
    said["other shapes"] = refused(lambda: private(turned, key=key, group=True))
    (directory / f"said-{rank}.json").write_text(json.dumps(said))


def test_ranks_that_share_examples_are_refused(directory):
    said = [json.loads((directory / "share_batches" / f"said-{rank}.json").read_text()) for rank in range(WORLD)]
    assert said[0] == said[1], "the ranks end alike, so that none waits for another"
    for name, sentence in {
        "no rank": "rank 0 of 2 has batches for rank 0 of 1",
        "rank 0 on both": "rank 1 of 2 has batches for rank 0 of 2",
        "of three": "rank 0 of 2 has batches for rank 0 of 3",
        "a plain loader": "rank 0 of 2 has batches for rank None of None",
        "other seeds": "batches of different orders",
        "other runs": "batches of different orders",
        "other weights": "the ranks differ in their values of parameters",
        "other shapes": "the ranks differ in their shape of parameter 0: (6, 7) in rank 0, (7, 6) in rank 1",
        "right": "not refused",
    }.items():
        assert sentence in said[0][name], name
