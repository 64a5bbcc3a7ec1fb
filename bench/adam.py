"""Adam and SGD with momentum on Fashion-MNIST, five epochs: correlated noise beside Opacus' own.

The perceptron of examples/python/fashion_mnist.py, batches of 512, clip 1. For every row the learning rate is chosen on 10 000
held-out training images: from a first guess, in steps of a factor of two, until neither neighbour is better. Then the model is
trained on all 60 000 with other seeds and tested. The search itself is not covered by ε, for any row. step_noise is the standard
deviation of the noise that one step adds to a coordinate of the sum, on average, at clip 1: what enters Adam's second moment.

    python bench/adam.py --epsilon 2 --seeds 3
"""

import argparse
import importlib.util
import json
import logging
import pathlib
import statistics
import time
import warnings

import dpmf
import dpmf.opacus
import numpy as np
import opacus
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

ROOT = pathlib.Path(__file__).parents[1]
EPOCHS, BATCH, DELTA, CLIP = 5, 512, 1e-5, 1.0


def adam(model, lr):
    return torch.optim.Adam(model.parameters(), lr=lr)


def momentum(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


#: Engine, optimizer, first guess of the learning rate, and whether the plan is for Adam's iterates at a constant second moment.
ROWS = {
    "dpmf, Adam, effective workload": (dpmf.opacus.PrivacyEngine, adam, 8e-3, True),
    "dpmf, Adam, running sums": (dpmf.opacus.PrivacyEngine, adam, 8e-3, False),
    "dpmf, SGD with momentum": (dpmf.opacus.PrivacyEngine, momentum, 0.1, False),
    "Opacus, Adam": (opacus.PrivacyEngine, adam, 8e-3, False),
    "Opacus, SGD with momentum": (opacus.PrivacyEngine, momentum, 0.1, False),
}


def example():
    spec = importlib.util.spec_from_file_location("fashion_mnist", ROOT / "examples" / "python" / "fashion_mnist.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(script, row, data, epsilon, lr, seed):
    """The model, and the noise of a step."""
    make, optimizer_of, _, effective = ROWS[row]
    torch.manual_seed(seed)
    engine, model = make(), script.perceptron()
    arguments = dict(
        module=model, optimizer=optimizer_of(model, lr), data_loader=DataLoader(data, batch_size=BATCH, shuffle=True)
    )
    budget = dict(target_epsilon=epsilon, target_delta=DELTA, epochs=EPOCHS, max_grad_norm=CLIP)
    if effective:
        plan = dpmf.plan(
            examples=len(data), batch=BATCH, epochs=EPOCHS, epsilon=epsilon, delta=DELTA, clip=CLIP, optimizer="adam:0.9"
        )
        model, optimizer, loader = engine.make_private(mechanism=plan, **arguments)
    else:
        model, optimizer, loader = engine.make_private_with_epsilon(**arguments, **budget)
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    noise = optimizer.noise_multiplier
    if isinstance(optimizer, dpmf.opacus.CorrelatedOptimizer):
        mechanism = optimizer.mechanism
        rows = np.linalg.norm(mechanism.coloring(), axis=1)
        noise = mechanism.privacy.noise_std * float(np.sqrt((rows**2).mean()))
    return model, noise


def climb(score, lr):
    """The learning rate whose neighbours, half and twice as large, are no better."""
    tried = {lr: score(lr)}
    while True:
        best = max(tried, key=tried.get)
        fresh = [point for point in (best / 2, best * 2) if point not in tried]
        if not fresh:
            return best
        tried.update({point: score(point) for point in fresh})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--data", type=pathlib.Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("ignore", module="opacus")
    logging.getLogger("dpmf").setLevel(logging.WARNING)
    script = example()
    directory = arguments.data or script.DATA
    whole, test = script.load(directory, "train"), script.load(directory, "t10k")
    part, held_out = TensorDataset(*whole[:50_000]), TensorDataset(*whole[50_000:])

    def run(row, lr, seed, data, judge):
        started = time.perf_counter()
        model, noise = train(script, row, data, arguments.epsilon, lr, seed)
        accuracy = script.accuracy(model, judge)
        seconds = time.perf_counter() - started
        print(json.dumps(dict(row=row, lr=lr, seed=seed, held_out=judge is held_out, accuracy=accuracy, seconds=seconds)), flush=True)
        return accuracy, noise

    summary = []
    for row in arguments.rows:
        lr = climb(lambda lr, row=row: run(row, lr, 100, part, held_out)[0], ROWS[row][2])
        results = [run(row, lr, seed, whole, test) for seed in range(arguments.seeds)]
        accuracies = [accuracy for accuracy, _ in results]
        summary.append(
            dict(
                row=row,
                lr=lr,
                accuracy=statistics.mean(accuracies),
                spread=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                step_noise=results[0][1],
            )
        )
        print(json.dumps(summary[-1]), flush=True)
    print(json.dumps(dict(schema=1, epsilon=arguments.epsilon, delta=DELTA, epochs=EPOCHS, batch=BATCH, rows=summary)))


if __name__ == "__main__":
    main()
