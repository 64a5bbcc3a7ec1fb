"""Accuracy on Fashion-MNIST in one pass: Opacus DP-SGD beside the same script with dpmf.opacus.

For both engines and every ε, learning rate and batch size are chosen on 10 000 held-out training images: from 0.2 and 256, in
steps of a factor of two, until no neighbour is better. Then the model is trained on all 60 000 with other seeds and tested. The search itself is not covered by ε, for either.
Run by scripts/bench opacus.
"""

import argparse
import importlib.util
import json
import pathlib
import statistics
import time
import warnings

import dpmf.opacus
import opacus
from torch.utils.data import TensorDataset

ROOT = pathlib.Path(__file__).parents[1]
ENGINES = {"opacus": opacus.PrivacyEngine, "dpmf": dpmf.opacus.PrivacyEngine}


def example():
    spec = importlib.util.spec_from_file_location("fashion_mnist", ROOT / "examples" / "python" / "fashion_mnist.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def climb(score, start=(0.2, 256)):
    """The learning rate and batch size whose neighbours, half and twice as large, are no better."""
    tried, best = {start: score(*start)}, start
    while True:
        lr, batch_size = best
        around = [(2 * lr, batch_size), (lr / 2, batch_size), (lr, 2 * batch_size), (lr, batch_size // 2)]
        tried.update({point: score(*point) for point in around if point not in tried})
        better = max(around, key=tried.get)
        if tried[better] <= tried[best]:
            return best
        best = better


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--data", type=pathlib.Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("ignore", module="opacus")
    script = example()
    directory = arguments.data or script.DATA
    train, test = script.load(directory, "train"), script.load(directory, "t10k")
    part, held_out = TensorDataset(*train[:50_000]), TensorDataset(*train[50_000:])

    def run(engine, epsilon, lr, batch_size, seed, data, judge):
        started = time.perf_counter()
        options = dict(lr=lr, batch_size=batch_size, seed=seed)
        model = script.train(ENGINES[engine](), data, epsilon, **options)
        accuracy, seconds = script.accuracy(model, judge), time.perf_counter() - started
        on = "validation" if judge is held_out else "test"
        line = dict(engine=engine, epsilon=epsilon, **options, on=on, accuracy=accuracy, seconds=seconds)
        print(json.dumps(line), flush=True)
        return accuracy

    table = []
    for epsilon in arguments.epsilon:
        best = {engine: climb(lambda *point: run(engine, epsilon, *point, 0, part, held_out)) for engine in ENGINES}
        scores = {engine: [] for engine in ENGINES}
        for seed in range(1, arguments.seeds + 1):
            for engine in ENGINES:
                scores[engine].append(run(engine, epsilon, *best[engine], seed, train, test))
        for engine, of_seeds in scores.items():
            mean, spread = statistics.mean(of_seeds), statistics.stdev(of_seeds)
            chosen = " | ".join(map(str, best[engine]))
            table.append(f"| {epsilon:g} | {engine} | {chosen} | {100 * mean:.2f} | {100 * spread:.2f} |")
    print("| ε | engine | lr | batch | test accuracy, % | standard deviation |")
    print("| --- | --- | --- | --- | --- | --- |")
    print("\n".join(table))


if __name__ == "__main__":
    main()
