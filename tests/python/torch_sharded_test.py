"""Models that are cut over ranks by FSDP2: two processes on loopback, each with its shard of parameters, sums and noise."""

import socket

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-torch makes an environment with it")
fsdp = pytest.importorskip("torch.distributed.fsdp", reason="this PyTorch has no torch.distributed")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this PyTorch has no fully_shard", allow_module_level=True)

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

STEPS, SAVED, WORLD = 6, 3, 2
KEY = dpmf.NoiseKey.from_seed(8)
#: Where sums are released.
PLACES = ("host", "device")

pytestmark = pytest.mark.filterwarnings("ignore::dpmf.torch.UncheckedDataWarning")


def mechanism():
    return dpmf.mechanism(steps=STEPS, momentum=0.9, epsilon=3, delta=1e-6, clip=0.5)


def model_of():
    torch.manual_seed(0)
    # 301 rows over two ranks are 151 and 150, and 3 are 2 and 1.
    return torch.nn.Sequential(torch.nn.Linear(6, 301), torch.nn.Tanh(), torch.nn.Linear(301, 3))


def cohorts():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(STEPS)
    ]


def private(model, **arguments):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return dpmf.torch.PrivateOptimizer(sgd, mechanism(), denominator=8, key=KEY, experiment="cut", **arguments)


def train(optimizer, model, data, mine=slice(None), **how):
    for inputs, targets in data:
        # One example at a time, since vmap rounds otherwise beside others.
        optimizer.accumulate(model, cross_entropy, inputs[mine], targets[mine], chunk=1, **how)
        optimizer.step()


def of_rank(rank, port, directory):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD,))
    plain = model_of()
    with pytest.raises(ValueError, match="DTensors"):
        private(torch.nn.ParameterList([*cut(model_of(), mesh).parameters(), *plain.parameters()]), group=True)
    with pytest.raises(ValueError, match="group=True"):
        private(cut(model_of(), mesh))
    for place in PLACES:
        model = cut(model_of(), mesh)
        optimizer = private(model, group=True, journal=directory / f"{place}-journal-{rank}", release_on=place, ahead=1)
        memory = torch.tensor(optimizer._noise.run.memory)
        train(optimizer, model, cohorts()[:SAVED], slice(rank, None, WORLD))
        state = optimizer.state_dict()
        buffers = [state["state"][index]["momentum_buffer"].full_tensor() for index in range(len(plain.state_dict()))]
        state["state"] = {index: {"momentum_buffer": buffer} for index, buffer in enumerate(buffers)}
        weights = {name: p.full_tensor() for name, p in model.state_dict().items()}
        # A step after the state, before both are killed.
        train(optimizer, model, cohorts()[SAVED : SAVED + 1], slice(rank, None, WORLD))
        after = {name: p.full_tensor() for name, p in model.state_dict().items()}
        torch.save({"model": weights, "optimizer": state, "after": after, "memory": memory}, directory / f"{place}-{rank}.pt")
        torch.distributed.barrier()
    with torch.backends.mkldnn.flags(enabled=False):
        # In bfloat16: cut over the ranks, and whole on each of them.
        for kind, model in (("cut", cut(model_of().bfloat16(), mesh)), ("whole", model_of().bfloat16())):
            optimizer = private(model, group=True, journal=directory / f"half-{kind}-{rank}")
            train(optimizer, model, halves()[:SAVED], slice(rank, None, WORLD))
            state = optimizer.state_dict()
            state["dpmf"]["masters"] = [full(master) for master in state["dpmf"]["masters"]]
            state["state"] = {index: {"momentum_buffer": full(of["momentum_buffer"])} for index, of in state["state"].items()}
            weights = {name: full(p) for name, p in model.state_dict().items()}
            torch.save({"model": weights, "optimizer": state}, directory / f"half-{kind}-{rank}.pt")
    if hasattr(torch, "func"):
        model = cut(model_of(), mesh)
        optimizer = private(model, group=True)
        train(optimizer, model, cohorts()[:SAVED], slice(rank, None, WORLD), clipping="ghost")
        assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
        torch.save({name: p.full_tensor() for name, p in model.state_dict().items()}, directory / f"ghost-{rank}.pt")
    torch.distributed.destroy_process_group()


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def halves():
    return [(inputs.bfloat16(), targets) for inputs, targets in cohorts()]


def cut(model, mesh):
    for part in model:
        if isinstance(part, torch.nn.Linear):
            fsdp.fully_shard(part, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shards")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(of_rank, args=(port, directory), nprocs=WORLD)
    return directory


def bits(weights):
    return np.concatenate([weights[name].numpy().reshape(-1) for name in sorted(weights)]).view(np.uint32)


@pytest.mark.parametrize("place", PLACES)
def test_shards_are_one_process_bit_for_bit_with_half_of_its_state(directory, place):
    model = model_of()
    alone = private(model, ahead=1)
    train(alone, model, cohorts()[:SAVED])
    saved = [torch.load(directory / f"{place}-{rank}.pt", weights_only=False) for rank in range(WORLD)]
    expected = bits(model.state_dict())
    train(alone, model, cohorts()[SAVED : SAVED + 1])
    after = bits(model.state_dict())
    for one in saved:
        assert np.array_equal(bits(one["model"]), expected)
        assert np.array_equal(bits(one["after"]), after) and not np.array_equal(expected, after)
    # Whole packets of 64 coordinates at both ends of each of four parameters.
    packets = 8 * 64 * (mechanism().buffers + 1)
    whole = alone._noise.run.memory
    assert all(int(one["memory"]) <= whole / 2 + 8 * packets for one in saved)


@pytest.mark.skipif(not hasattr(torch, "func"), reason="ghost clipping needs PyTorch 2.0")
def test_ghost_clipping_of_shards_is_that_of_one_process_bit_for_bit(directory):
    model = model_of()
    train(private(model), model, cohorts()[:SAVED], clipping="ghost")
    expected = bits(model.state_dict())
    assert not np.array_equal(expected, bits(model_of().state_dict()))
    for rank in range(WORLD):
        assert np.array_equal(bits(torch.load(directory / f"ghost-{rank}.pt", weights_only=False)), expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rank", range(WORLD))
def test_a_run_on_two_ranks_goes_on_on_one(directory, tmp_path, place, rank):
    """From the state of any rank, beside its journal, which has one step more."""
    model = model_of()
    alone = private(model)
    train(alone, model, cohorts())
    saved = torch.load(directory / f"{place}-{rank}.pt", weights_only=False)
    journal = tmp_path / "journal"
    journal.write_bytes((directory / f"{place}-journal-{rank}").read_bytes())
    again = model_of()
    again.load_state_dict(saved["model"])
    resumed = private(again, journal=journal, ahead=1)
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.next_step == SAVED and resumed._noise.run.recorded_steps == SAVED + 1
    inputs, targets = cohorts()[0]
    resumed.accumulate(again, cross_entropy, inputs, targets)
    with pytest.raises(dpmf.StepReusedError):
        resumed.step()
    resumed.zero_grad()
    train(resumed, again, cohorts()[SAVED:])
    assert np.array_equal(bits(again.state_dict()), bits(model.state_dict()))
    resumed.close()


@pytest.mark.parametrize("kind", ["cut", "whole"])
@pytest.mark.parametrize("rank", range(WORLD))
def test_ranks_in_bfloat16_are_one_process_bit_for_bit(directory, tmp_path, kind, rank):
    """Their masters are cut as their parameters are; a run goes on from them on one rank."""
    with torch.backends.mkldnn.flags(enabled=False):
        model = model_of().bfloat16()
        alone = private(model)
        train(alone, model, halves()[:SAVED])
        saved = torch.load(directory / f"half-{kind}-{rank}.pt", weights_only=False)
        masters = [master.detach().clone() for _, master in alone._masters.pairs]
        assert len(masters) == 4 and all(map(torch.equal, saved["optimizer"]["dpmf"]["masters"], masters))
        assert all(torch.equal(saved["model"][name], p) for name, p in model.state_dict().items())
        if kind == "whole":
            return  # shards of coordinates go on with as many ranks
        train(alone, model, halves()[SAVED:])
        again = model_of().bfloat16()
        journal = tmp_path / "journal"
        journal.write_bytes((directory / f"half-{kind}-{rank}").read_bytes())
        resumed = private(again, journal=journal)
        resumed.load_state_dict(saved["optimizer"])
        train(resumed, again, halves()[SAVED:])
        assert all(map(torch.equal, again.parameters(), model.parameters()))
        resumed.close()
