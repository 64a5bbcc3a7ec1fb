"""torch.distributed: two processes on loopback, each with the noise of its shard only."""

import socket

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-torch makes an environment with it")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

STEPS, WORLD = 5, 2


def mechanism():
    return dpmf.plan(steps=STEPS, momentum=0.9, epsilon=3, delta=1e-6, clip=0.5)


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
    return dpmf.torch.PrivateOptimizer(sgd, mechanism(), denominator=8, run="shards", **arguments)


def noise_alone(optimizer, model):
    """The row that a step adds to a gradient of zero, before division."""
    optimizer._noise.gather([None] * len(list(model.parameters())))
    optimizer._noise.add()
    return optimizer._noise.flat.clone()


def of_rank(rank, port, directory):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    for task in (draw, train_and_resume, disagree):
        (directory / task.__name__).mkdir(exist_ok=True)
        task(rank, dpmf.NoiseKey.read(directory / "key"), directory / task.__name__)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What two ranks left behind; all that they do is done in one pair of processes, which are slow to start."""
    directory = tmp_path_factory.mktemp("ranks")
    dpmf.NoiseKey.create(directory / "key")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(of_rank, args=(port, directory), nprocs=WORLD)
    return directory


def draw(rank, key, directory):
    model = model_of()
    optimizer = private(model, key=key, group=True)
    dimension = sum(p.numel() for p in model.parameters())
    stream = optimizer._noise.stream
    assert optimizer.coordinates == dpmf.torch.shard(dimension) == stream.coordinates
    assert stream.memory == optimizer.mechanism.buffers * 4 * len(optimizer.coordinates)
    rows = torch.stack([noise_alone(optimizer, model) for _ in range(STEPS)])
    np.save(directory / f"rows-{rank}.npy", rows.numpy())


def test_noise_equals_that_of_one_process_bit_for_bit(directory):
    model = model_of()
    alone = private(model, key=dpmf.NoiseKey.read(directory / "key"))
    expected = np.stack([noise_alone(alone, model).numpy() for _ in range(STEPS)])
    assert np.abs(expected).min() > 0.0
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
    alone = private(model, key=dpmf.NoiseKey.read(directory / "key"))
    for inputs, targets in cohorts():
        alone.accumulate(model, cross_entropy, inputs, targets)
        alone.step()
    models = [torch.load(directory / "train_and_resume" / f"model-{rank}.pt") for rank in range(WORLD)]
    for name, expected in model.state_dict().items():
        assert torch.equal(models[0][name], models[1][name]), "the ranks agree"
        # The sums of gradients are taken in another order.
        torch.testing.assert_close(models[0][name], expected, rtol=0, atol=1e-6)


def disagree(rank, key, directory):
    model = model_of()
    with pytest.raises(ValueError, match=r"NoiseKey\.create\(path\)"):
        private(model, group=True)
    with pytest.raises(dpmf.MismatchError, match="the ranks differ in their key: .* in rank 0, .* in rank 1"):
        private(model, key=dpmf.NoiseKey.generate(), group=True)
    smaller = torch.nn.Linear(2, 2 + rank)
    with pytest.raises(dpmf.MismatchError, match="number of parameters: 6 in rank 0, 9 in rank 1"):
        private(smaller, key=key, group=True)
    (directory / f"refused-{rank}").touch()


def test_ranks_that_differ_are_refused(directory):
    assert [(directory / "disagree" / f"refused-{rank}").exists() for rank in range(WORLD)] == [True] * WORLD
