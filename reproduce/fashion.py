"""Fashion-MNIST for several epochs: Opacus' DP-SGD and the plans of dpmf, tuned with the same effort.

Run by reproduce/epochs.py with the Python of .torch/venv. Every run is a line of results.jsonl in --out; runs that are there are not
made again, so an interrupted grid goes on. Nothing here is released: keys come from seeds and the data is public.

Both arms have the same network, initial parameters for a seed, clipped sums, optimizer and schedules. They differ in which
examples a step has and in the noise that is added to the sum:

opacus  Poisson sampling by Opacus' sampler, independent noise. Its σ is the tight one; what Opacus' accountant gives is noted.
dpmf    dpmf.plan for the optimizer at hand, its sampler, its noise.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import dpmf
import numpy as np
import torch
from networks import NETWORKS
from opacus.accountants.utils import get_noise_multiplier
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

DATA = Path(__file__).parents[1] / "data" / "cache" / "fashion-mnist"
ARMS = ("opacus", "dpmf")
EXAMPLES, HELD_OUT, DELTA, CLIP = 60_000, 10_000, 1e-5, 1.0
#: Batches an epoch: of 600 to 6000 images. The same when 10 000 images are held out, so that plans and σ are.
BATCHES = (100, 50, 25, 10)
MOMENTUM = (0.0, 0.9)
SCHEDULES = ("constant", "cooldown:0.5:0.05")
#: What a plan may suppose that training takes back of a deviation at every step. See Settings.
PULLS = (0.0, 0.01, 0.03, 0.1)


@dataclass(frozen=True)
class Cell:
    network: str
    epochs: int
    epsilon: float


@dataclass(frozen=True)
class Settings:
    """A point of the search.

    The distance is the longest way that an epoch's gradients can go: rate × steps of an epoch. The pull is of plans alone: noise
    moves an iterate, and then the gradients at the next ones take some of that back. A plan for a workload that shrinks by
    the pull at every step counts on that; the optimizer stays as it is, and so does the guarantee, which is for the noise.
    """

    log2_distance: int
    batches: int
    momentum: float
    schedule: str
    pull: float | None

    @property
    def learning_rate(self) -> float:
        return 2.0**self.log2_distance / self.batches * (1 - self.momentum)

    def neighbours(self) -> list[Settings]:
        """In the order in which they are tried."""
        at = BATCHES.index(self.batches)
        around = [replace(self, log2_distance=self.log2_distance + step) for step in (1, -1)]
        around += [replace(self, batches=BATCHES[i]) for i in (at + 1, at - 1) if 0 <= i < len(BATCHES)]
        around += [replace(self, momentum=other) for other in MOMENTUM if other != self.momentum]
        around += [replace(self, schedule=other) for other in SCHEDULES if other != self.schedule]
        if self.pull is not None:
            at = PULLS.index(self.pull)
            around += [replace(self, pull=PULLS[i]) for i in (at - 1, at + 1) if 0 <= i < len(PULLS)]
        return around


#: Where both searches begin; dpmf's with a pull, and both with half the distance an epoch for many epochs.
START = Settings(8, 100, 0.9, "cooldown:0.5:0.05", None)
START_MANY, MANY = replace(START, log2_distance=7), 10
START_PULL = 0.03


@dataclass(frozen=True)
class Effort:
    """The same for both arms."""

    points: int
    #: How many of the points are tried with two more seeds; with one there is nothing left to choose.
    finalists: int
    #: Seeds of the test.
    seeds: int


@dataclass(frozen=True)
class Level:
    """Network and epochs: at which ε, with what effort. Long runs first, so that the processes end together."""

    cells: dict[tuple[str, int], tuple[list[float], Effort]]
    #: Which arms train an epoch by Opacus or dpmf.torch themselves, too.
    agreement: tuple[str, ...] = ARMS


BUDGETS = [0.5, 1.0, 2.0, 4.0, 8.0]
LEVELS = {
    "quick": Level({("perceptron", 5): ([1.0, 8.0], Effort(4, 1, 3))}, ("opacus",)),
    "standard": Level({("perceptron", 20): (BUDGETS, Effort(9, 2, 5)), ("convolutional", 5): ([1.0, 4.0], Effort(5, 1, 3)),
                       ("perceptron", 5): (BUDGETS, Effort(20, 5, 10)), ("perceptron", 1): (BUDGETS, Effort(8, 2, 10))}),
    "full": Level({(network, epochs): (BUDGETS, Effort(40, 5, 10)) for network, epochs in
                   (("perceptron", 50), ("convolutional", 20), ("perceptron", 20), ("convolutional", 5), ("perceptron", 5),
                    ("perceptron", 1))}),
}


@lru_cache(maxsize=None)
def read(part: str, directory: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images scaled to mean 0 and unit deviation, by constants of the public task, and labels."""

    def values(name: str, header: int) -> np.ndarray:
        path = Path(directory) / f"{part}-{name}-ubyte.gz"
        if not path.exists():
            raise SystemExit(f"{path} is missing: run scripts/data/fashion-mnist, or give --data DIRECTORY")
        return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header)

    images = torch.from_numpy(values("images-idx3", 16).reshape(-1, 784).astype(np.float32))
    return (images / 255 - 0.286) / 0.353, torch.from_numpy(values("labels-idx1", 8).astype(np.int64))


@lru_cache(maxsize=None)
def made_plan(epochs: int, epsilon: float, batches: int, momentum: float, schedule: str, pull: float) -> dpmf.Plan:
    return dpmf.plan(examples=EXAMPLES, batch=EXAMPLES // batches, epochs=epochs, epsilon=epsilon, delta=DELTA, clip=CLIP,
                     momentum=momentum, schedule=schedule, weight_decay=pull, unit="record", adjacency="add-or-remove")


@lru_cache(maxsize=None)
def tight_sigma(epochs: int, epsilon: float, batches: int) -> float:
    return dpmf.poisson_noise_multiplier(epsilon, DELTA, 1 / batches, epochs * batches)


@lru_cache(maxsize=None)
def opacus_sigma(epochs: int, epsilon: float, batches: int) -> float:
    """What make_private_with_epsilon computes, with the accountant of opacus.PrivacyEngine()."""
    return get_noise_multiplier(target_epsilon=epsilon, target_delta=DELTA, sample_rate=1 / batches, epochs=epochs,
                                accountant="prv")


def run_name(cell: Cell, settings: Settings, seed: int, examples: int) -> str:
    """Of its own for every run, and the same when it is made again."""
    return hashlib.sha256(repr((cell, settings, seed, examples)).encode()).hexdigest()[:32]


def drawn(cell: Cell, settings: Settings, seed: int, examples: int, dimension: int, arm: str):
    """Cohorts of all steps, what adds a step's noise to a sum, the expected batch, and what the run's line says of them."""
    about = {}
    if arm == "opacus":
        sigma = tight_sigma(cell.epochs, cell.epsilon, settings.batches)
        about["noise_multiplier"] = sigma
        generator = torch.Generator().manual_seed(1000 + seed)
        sampler = UniformWithReplacementSampler(num_samples=examples, sample_rate=1 / settings.batches, generator=generator,
                                                steps=cell.epochs * settings.batches)
        cohorts = (torch.tensor(indices, dtype=torch.int64) for indices in sampler)

        def add_noise(flat: torch.Tensor) -> None:
            flat += torch.normal(0.0, sigma * CLIP, flat.shape, generator=generator)

        return cohorts, add_noise, examples / settings.batches, about
    plan = made_plan(cell.epochs, cell.epsilon, settings.batches, settings.momentum, settings.schedule, settings.pull)
    about.update({name: plan.chosen[name] for name in ("noise_multiplier", "mechanism", "sampling", "buffers", "rmse")})
    about["rmse_dp_sgd"] = plan.dp_sgd["rmse"]
    key = dpmf.NoiseKey.from_seed(seed)
    run = run_name(cell, settings, seed, examples)
    sampler = plan.sampler(key, units=examples, run=run)
    stream = dpmf.NoiseStream(plan.mechanism, key, run=run, dimension=dimension)
    cohorts = (torch.from_numpy(members) for members in sampler)
    return cohorts, lambda flat: stream.add_to(flat.numpy()), sampler.expected_batch, about


def split(flat: torch.Tensor, shapes: list[torch.Size]) -> list[torch.Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes)]


def initial(network: type, seed: int) -> tuple[torch.Tensor, list[torch.Size]]:
    """The same for both arms."""
    torch.manual_seed(seed)
    start = list(network.module().parameters())
    return torch.cat([p.detach().flatten() for p in start]), [p.shape for p in start]


@torch.no_grad()
def train(cell: Cell, settings: Settings, arm: str, seed: int, data: tuple, judge: tuple,
          draws: tuple | None = None) -> tuple[torch.Tensor, dict]:
    """Parameters, and the line of the run. draws may take the place of drawn(…)."""
    started = time.perf_counter()
    network = NETWORKS[cell.network]
    theta, shapes = initial(network, seed)
    gradient, velocity = torch.empty_like(theta), torch.zeros_like(theta)
    parameters, parts = split(theta, shapes), split(gradient, shapes)
    images, labels = network.prepare(data[0]), data[1]
    cohorts, add_noise, expected, about = draws or drawn(cell, settings, seed, len(labels), len(theta), arm)
    steps = cell.epochs * settings.batches
    rates = dpmf.Workload.sgd(steps, schedule=settings.schedule).learning_rates * settings.learning_rate
    taken = 0
    for rate, members in zip(rates, cohorts):
        network.clipped_sum(parameters, images[members], labels[members], CLIP, parts)
        add_noise(gradient)
        velocity.mul_(settings.momentum).add_(gradient)
        theta.add_(velocity, alpha=-float(rate) / expected)
        taken += 1
    assert taken == steps
    about["accuracy"] = accuracy(network, parameters, judge)
    about["seconds"] = round(time.perf_counter() - started, 2)
    return theta, about


@torch.no_grad()
def accuracy(network: type, parameters: list[torch.Tensor], judge: tuple) -> float:
    images, labels = network.prepare(judge[0]), judge[1]
    right = sum(int((network.forward(parameters, images[i:i + 1000])[0].argmax(1) == labels[i:i + 1000]).sum())
                for i in range(0, len(labels), 1000))
    return right / len(labels)


class Results:
    """Lines of a file. Each process appends whole ones, and knows those of its own cells and arms."""

    def __init__(self, path: Path):
        self.path, self.known = path, {}
        for line in path.read_text(encoding="utf8").splitlines() if path.exists() else []:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off when a run was stopped
            self.known[self.name(row)] = row

    @staticmethod
    def name(row: dict) -> tuple:
        return tuple(row.get(key) for key in ("kind", "network", "epochs", "epsilon", "arm", "log2_distance", "batches",
                                              "momentum", "schedule", "pull", "seed"))

    def once(self, row: dict, more) -> dict:
        """The line that begins with row; what else it has is computed if it is not there."""
        name = self.name(row)
        if name not in self.known:
            self.known[name] = {**row, **more()}
            with open(self.path, "ab", buffering=0) as file:
                file.write((json.dumps(self.known[name]) + "\n").encode())
        return self.known[name]


def end_last_line(path: Path) -> None:
    """A line that was cut off must not swallow the next."""
    if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        with open(path, "ab") as file:
            file.write(b"\n")


def search(score, start: Settings, effort: Effort) -> Settings:
    """Tries as many points as it is told, each a neighbour of the best that has one left; the finalists with two more seeds."""
    found = {start: score(start, 0)}
    while len(found) < effort.points:
        for best in sorted(found, key=found.get, reverse=True):
            new = [point for point in best.neighbours() if point not in found]
            if new:
                found[new[0]] = score(new[0], 0)
                break
    last = sorted(found, key=found.get, reverse=True)[:effort.finalists]
    if len(last) == 1:
        return last[0]
    return max(last, key=lambda point: found[point] + score(point, 1) + score(point, 2))


def explore(task: tuple[Cell, str, Effort, str, str]) -> str:
    """Tunes one arm for one cell on held-out images, then trains on all and tests."""
    cell, arm, effort, path, directory = task
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    results = Results(Path(path))
    images, labels = read("train", directory)
    cut = len(labels) - HELD_OUT
    part, held_out, everything = (images[:cut], labels[:cut]), (images[cut:], labels[cut:]), (images, labels)
    test = read("t10k", directory)
    head = {**asdict(cell), "arm": arm}

    def run(kind: str, settings: Settings, seed: int, data: tuple, judge: tuple) -> float:
        row = {"kind": kind, **head, **asdict(settings), "seed": seed}
        return results.once(row, lambda: train(cell, settings, arm, seed, data, judge)[1])["accuracy"]

    start = START if cell.epochs < MANY else START_MANY
    if arm == "dpmf":
        start = replace(start, pull=START_PULL)
    tried = set()

    def score(settings: Settings, number: int) -> float:
        # Other seeds than those of the test, so that no test run is at settings that were lucky with its seed.
        tried.add((settings, number))
        return run("tune", settings, 100 + number, part, held_out)

    chosen = search(score, start, effort)
    scores = [run("test", chosen, seed, everything, test) for seed in range(effort.seeds)]
    about = {"learning_rate": chosen.learning_rate, "tuning_runs": len(tried)}
    if arm == "opacus":
        about["opacus_noise_multiplier"] = opacus_sigma(cell.epochs, cell.epsilon, chosen.batches)
    results.once({"kind": "chosen", **head, **asdict(chosen)}, lambda: about)
    return f"{cell.network}, {cell.epochs} epochs, ε = {cell.epsilon:g}, {arm}: {100 * statistics.mean(scores):.2f} % with {chosen}"


def agreement(task: tuple[str, str, tuple[str, ...]]) -> dict:
    """See agreement.py, which needs this module."""
    from agreement import agree

    network, directory, arms = task
    torch.set_num_threads(1)
    return agree(network, read("train", directory), arms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", choices=LEVELS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", help="cells of this network, or of network:epochs, alone")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, level = arguments.out / "results.jsonl", LEVELS[arguments.level]
    end_last_line(path)
    results = Results(path)
    cells = {key: value for key, value in level.cells.items() if arguments.only in (None, key[0], f"{key[0]}:{key[1]}")}
    networks = sorted({network for network, _ in cells})
    tasks = [(Cell(network, epochs, epsilon), arm, effort, str(path), str(arguments.data))
             for (network, epochs), (budgets, effort) in cells.items() for epsilon in budgets for arm in ARMS]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        # First: what does not agree must not be measured.
        for network in networks:
            row = {"kind": "agreement", "network": network}
            results.once(row, lambda: pool.apply(agreement, ((network, str(arguments.data), level.agreement),)))
        for done, line in enumerate(pool.imap_unordered(explore, tasks), 1):
            print(f"{done} of {len(tasks)}: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
