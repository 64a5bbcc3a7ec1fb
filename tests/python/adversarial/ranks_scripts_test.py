"""Scripts on two and four ranks: a record counts once over all of them, or the script is refused in every rank."""

import datetime
import json
import socket

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/setup-frameworks makes an environment with it")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import dpmf  # noqa: E402
import dpmf.torch  # noqa: E402
import torch.multiprocessing  # noqa: E402
from neighbours import ONE, moved  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torch_scripts_test import BATCH, CLIP, DIMENSION, RECORDS, Unchecked, mechanism, records, total  # noqa: E402
from watching import watch  # noqa: E402

KEY = dpmf.NoiseKey.from_seed(5)


class Training:
    """A training that ranks share, and what it released."""

    def __init__(self, data, rank, world, checked=True):
        self.data, self.rank, self.world, self.checked = data, rank, world, checked
        self.model = torch.nn.Linear(DIMENSION, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        sgd = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = dpmf.torch.PrivateOptimizer(
            sgd, mechanism(), denominator=1, key=KEY, experiment="ranks", group=True
        )
        noise = self.optimizer._noise
        if checked:
            watch(self.optimizer, quiet=True)
        else:
            noise.run = Unchecked(noise.run, quiet=True)
            noise.check = noise.check_ranks = lambda *_: None
        self.rows, deliver = [], noise.fill_gradients

        def delivered():
            self.rows.append(noise.flat.numpy().copy())
            deliver()

        noise.fill_gradients = delivered

    def cohorts(self, **options):
        return DataLoader(self.data, batch_sampler=dpmf.torch.Cohorts(RECORDS, BATCH, **{"seed": 3, **options}))

    def train(self, loader):
        for (inputs,) in self.optimizer.batches(loader):
            self.optimizer.accumulate(self.model, total, inputs)
            self.optimizer.step()


def shared(run):
    run.train(run.cohorts(rank=run.rank, world_size=run.world))


def rank_forgotten(run):
    run.train(run.cohorts())


def first_rank_everywhere(run):
    run.train(run.cohorts(rank=0, world_size=run.world))


def plain_loader(run):
    run.train(DataLoader(run.data, batch_size=BATCH))


def shuffled_by_each(run):
    generator = torch.Generator().manual_seed(run.rank)
    run.train(DataLoader(run.data, batch_size=BATCH, shuffle=True, generator=generator))


def other_seeds(run):
    run.train(run.cohorts(seed=run.rank, rank=run.rank, world_size=run.world))


def burned_by_one(run):
    if run.rank == 0:
        run.optimizer.burn()
    loader = run.cohorts(rank=run.rank, world_size=run.world, start=int(run.rank == 0))
    for (inputs,) in run.optimizer.batches(loader):
        run.optimizer.accumulate(run.model, total, inputs)
        run.optimizer.step()
        break


def one_has_nothing(run):
    for (inputs,) in run.optimizer.batches(run.cohorts(rank=run.rank, world_size=run.world)):
        if run.rank:
            run.optimizer.accumulate(run.model, total, inputs)
        run.optimizer.step()


#: Scripts, and what they are refused with.
SCRIPTS = {
    shared: None,
    rank_forgotten: "would count in several ranks",
    first_rank_everywhere: "would count in several ranks",
    plain_loader: "would count in several ranks",
    shuffled_by_each: "would count in several ranks",
    other_seeds: "different orders",
    burned_by_one: "the ranks are at different steps",
    one_has_nothing: "rank 0 has nothing to release",
}


def of_rank(rank, world, port, directory):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=datetime.timedelta(minutes=5)
    )
    results = {}
    for script in SCRIPTS:
        for checked in (True, False):
            if not checked and script in (burned_by_one, one_has_nothing):
                continue  # the ranks would wait for each other
            try:
                runs = [Training(records(absent), rank, world, checked) for absent in (None, *range(0, RECORDS, 5))]
                for run in runs:
                    script(run)
                moves = [moved((runs[0].rows, []), (run.rows, []), CLIP) for run in runs[1:]]
                worst = max(moves, key=lambda one: (one.most, one.steps))
                results[f"{script.__name__} {checked}"] = [worst.most, worst.steps]
            except dpmf.MismatchError as refused:
                results[f"{script.__name__} {checked}"] = str(refused)
            torch.distributed.barrier()
    (directory / f"{world}-{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    """What the ranks found: all that they do is done in one set of processes, which are slow to start."""
    directory, world = tmp_path_factory.mktemp("ranks"), request.param
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(of_rank, args=(world, port, directory), nprocs=world)
    return [json.loads((directory / f"{world}-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__.replace("_", " "))
def test_a_record_counts_once_or_the_script_is_refused(results, script):
    for of_one in results:
        found = of_one[f"{script.__name__} True"]
        if SCRIPTS[script] is None:
            assert 0.9 < found[0] <= ONE and found[1] == 1
        else:
            assert isinstance(found, str) and SCRIPTS[script] in found


def test_without_the_checks_they_exceed_the_clip(results):
    found = {name: result for name, result in results[0].items() if name.endswith("False") and not isinstance(result, str)}
    exceeding = [name for name, (most, steps) in found.items() if most > ONE or steps > 1]
    assert len(exceeding) >= 4, found
    assert np.isclose(found["rank_forgotten False"][0], len(results))
