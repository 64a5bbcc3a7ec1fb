"""That the fast sums of networks.py are the real thing: one step, and whole epochs, beside Opacus and dpmf.torch themselves.

With the same random numbers both must come to the same parameters, but for rounding in single precision. Everything is
asserted; what was seen is a line of the results.
"""

from __future__ import annotations

import time
import warnings

import dpmf
import dpmf.torch
import opacus
import torch
from fashion import CLIP, DELTA, Cell, Settings, initial, made_plan, run_name, split, train
from networks import NETWORKS
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

#: Of the length of a sum, and of the way that an epoch goes. Rounding alone is 1e-6 and, after 100 steps, some 1e-5.
STEP, EPOCH = 1e-5, 1e-3
SEED = 7


def started(network: type) -> torch.nn.Module:
    torch.manual_seed(SEED)
    return network.module()


def flat(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def one_step(name: str, data: tuple[torch.Tensor, torch.Tensor]) -> dict:
    """The clipped sum of 600 images, and that of Opacus' DPOptimizer before it adds noise."""
    network = NETWORKS[name]
    images, labels = data[0][:600], data[1][:600]
    module = GradSampleModule(started(network), loss_reduction="mean")
    optimizer = DPOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=CLIP,
                            expected_batch_size=600)
    cross_entropy(module(images.view(-1, 1, 28, 28)), labels).backward()
    optimizer.clip_and_accumulate()
    theirs = torch.cat([p.summed_grad.flatten() for p in optimizer.params])

    theta, shapes = initial(network, SEED)
    found = []
    # The second clip shows that a wrong one would be seen.
    for clip in (CLIP, 1.0001 * CLIP):
        ours = torch.empty_like(theta)
        with torch.no_grad():
            network.clipped_sum(split(theta, shapes), network.prepare(images), labels, clip, split(ours, shapes))
        found.append(float((ours - theirs).norm() / theirs.norm()))
    assert found[0] <= STEP < found[1], f"{name}: the clipped sum differs from Opacus' by {found}"
    return {"step_difference": found[0]}


def rates_of(settings: Settings, steps: int) -> list[float]:
    return list(dpmf.Workload.sgd(steps, schedule=settings.schedule).learning_rates * settings.learning_rate)


def end_of_opacus(cell: Cell, settings: Settings, data: TensorDataset) -> tuple[torch.Tensor, float]:
    """Opacus as it is used, with generators that are ours."""
    module = started(NETWORKS[cell.network])
    loader = DataLoader(data, batch_size=len(data) // settings.batches, shuffle=True,
                        generator=torch.Generator().manual_seed(SEED))
    optimizer = torch.optim.SGD(module.parameters(), lr=settings.learning_rate, momentum=settings.momentum)
    module, optimizer, loader = opacus.PrivacyEngine().make_private_with_epsilon(
        module=module, optimizer=optimizer, data_loader=loader, target_epsilon=cell.epsilon, target_delta=DELTA,
        epochs=cell.epochs, max_grad_norm=CLIP, noise_generator=torch.Generator().manual_seed(SEED + 1))
    for rate, (images, labels) in zip(rates_of(settings, settings.batches), loader):
        optimizer.param_groups[0]["lr"] = float(rate)
        optimizer.zero_grad()
        cross_entropy(module(images), labels).backward()
        optimizer.step()
    return flat(module), optimizer.noise_multiplier


def draws_of_opacus(cell: Cell, settings: Settings, examples: int, shapes: list[torch.Size], sigma: float):
    """The random numbers that end_of_opacus uses, in its order."""
    generator, noise = torch.Generator().manual_seed(SEED), torch.Generator().manual_seed(SEED + 1)
    torch.empty((), dtype=torch.int64).random_(generator=generator)  # a DataLoader begins so
    sampler = UniformWithReplacementSampler(num_samples=examples, sample_rate=1 / settings.batches, generator=generator)

    def add_noise(gradient: torch.Tensor) -> None:
        for part in split(gradient, shapes):
            part += torch.normal(0.0, sigma * CLIP, part.shape, generator=noise)

    return (torch.tensor(indices) for indices in sampler), add_noise, examples // settings.batches, {}


def end_of_dpmf(cell: Cell, settings: Settings, data: TensorDataset) -> torch.Tensor:
    """dpmf.torch as it is used, under the key and the name of an experiment."""
    module = started(NETWORKS[cell.network])
    plan = made_plan(cell.epochs, cell.epsilon, settings.batches, settings.momentum, settings.schedule, settings.pull)
    key, run = dpmf.NoiseKey.from_seed(SEED), run_name(cell, settings, SEED, len(data))
    batches = dpmf.torch.SampledBatches(plan.sampler(key, run=run))
    loader = DataLoader(data, batch_sampler=batches, collate_fn=dpmf.torch.EmptyCollate(data))
    inside = torch.optim.SGD(module.parameters(), lr=settings.learning_rate, momentum=settings.momentum)
    # The plan supposes a pull that the optimizer does not have.
    optimizer = dpmf.torch.PrivateOptimizer(inside, plan.mechanism, key=key, experiment=run, check=False)
    rates = iter(rates_of(settings, settings.batches))
    for images, labels in optimizer.batches(loader):
        inside.param_groups[0]["lr"] = float(next(rates))
        for first in range(0, len(images), 100):
            optimizer.accumulate(module, cross_entropy, images[first:first + 100], labels[first:first + 100])
        optimizer.step()
    return flat(module)


def whole_epoch(name: str, arm: str, data: tuple[torch.Tensor, torch.Tensor]) -> dict:
    """One epoch by Opacus or dpmf.torch, and by the fast path with the same random numbers."""
    cell, network = Cell(name, 1, 4.0), NETWORKS[name]
    settings = Settings(8, 100, 0.9, "cooldown:0.5:0.05", None if arm == "opacus" else 0.03)
    begun, shapes = initial(network, SEED)
    real_data = TensorDataset(data[0].view(-1, 1, 28, 28), data[1])
    clock = time.perf_counter()
    draws = None
    if arm == "opacus":
        real, sigma = end_of_opacus(cell, settings, real_data)
        draws = draws_of_opacus(cell, settings, len(data[1]), shapes, sigma)
    else:
        real = end_of_dpmf(cell, settings, real_data)
    seconds = time.perf_counter() - clock
    fast, about = train(cell, settings, arm, SEED, data, data, draws=draws)
    difference = float((fast - real).norm() / (real - begun).norm())
    assert difference <= EPOCH, f"{name}, {arm}: after an epoch the fast path is off by {difference} of the way"
    return {"epoch_difference": difference, "seconds": round(seconds, 1), "fast_seconds": about["seconds"]}


def agree(name: str, data: tuple[torch.Tensor, torch.Tensor], arms: tuple[str, ...]) -> dict:
    """Everything about one network."""
    warnings.filterwarnings("ignore")
    return {**one_step(name, data), "by_arm": {arm: whole_epoch(name, arm, data) for arm in arms}}
