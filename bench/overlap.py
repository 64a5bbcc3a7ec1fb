"""What a step of noise adds to training where it is made ahead: one core computes, the other draws.

A stand-in for a gradient keeps one core busy for as long as a row takes to draw and a half longer; then optimizer.step() of
dpmf.torch.PrivateOptimizer is timed. The variants take turns in one process, each with its own optimizer, and releases are compared
bit by bit. Printed are medians:

  alone      ahead=0: the noise is made in step(), by all cores, with nothing to hide behind
  back       ahead=1, step after step: nothing to hide behind either; as a ratio to "alone" of the same round, too
  added      a row that is ready: the addition alone
  overlapped ahead=1 beside the stand-in

The visible noise is what "overlapped" takes beyond "added"; that one of both is negative says how much two medians of the same work
differ. Run by scripts/bench overlap, in an environment with PyTorch.

    python bench/overlap.py [--steps 15] [--arithmetic exact]
"""

import argparse
import operator
import statistics
import time

import dpmf
import dpmf.torch
import numpy as np
import torch


def leaves(count, total):
    """Shapes of a model of so many parameters in so many tensors of very different sizes, as transformers have them."""
    sizes = np.array([1 + (index * index) % 97 for index in range(count)], float)
    sizes = np.maximum((sizes / sizes.sum() * total).astype(int), 1)
    sizes[-1] += total - sizes.sum()
    return [(int(size),) for size in sizes]


CASES = {"d = 10⁷": [(10_000_000,)], "392 leaves, 40.4 M": leaves(392, 40_400_000)}


class Variant:
    def __init__(self, shapes, mechanism, arithmetic, ahead):
        self.weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self.optimizer = dpmf.torch.PrivateOptimizer(
            torch.optim.SGD(self.weights, lr=1.0), mechanism, key=dpmf.NoiseKey.from_seed(1), experiment="overlap",
            denominator=1, arithmetic=arithmetic, check=False, ahead=ahead,
        )
        self.wall, self.processor = [], []

    def step(self, before=lambda: None):
        self.optimizer.add_sum({}, 0)
        before()
        began = time.perf_counter(), time.process_time()
        self.optimizer.step()
        self.wall.append(time.perf_counter() - began[0])
        self.processor.append(time.process_time() - began[1])

    def ready(self):
        """Waits for the coming row, so that nothing is drawn while others are timed."""
        run = self.optimizer._noise.run
        if run.ahead and run.next_step < run.steps:
            run.prepare()

    def sample(self):
        return torch.cat([weight.detach()[:1000] for weight in self.weights[:5]])


def busy(seconds):
    """Keeps one core computing."""
    a = torch.randn(256, 256)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        a = torch.tanh(a @ a)


def measure(shapes, steps, arithmetic):
    mechanism = dpmf.make_mechanism(dpmf.Workload.sgd(4 * steps + 8, momentum=0.9), buffers=4).calibrate(4, 1e-5, 1.0)
    variants = {
        "alone": Variant(shapes, mechanism, arithmetic, 0),
        "back": Variant(shapes, mechanism, arithmetic, 1),
        "added": Variant(shapes, mechanism, arithmetic, 1),
        "overlapped": Variant(shapes, mechanism, arithmetic, 1),
    }
    torch.set_num_threads(2)
    for index in range(steps + 2):
        for name, variant in variants.items():
            if name in ("back", "overlapped"):
                # The row of the first step was made in others' time; that of the second is made from here on.
                variant.step()
                variant.wall.pop(), variant.processor.pop()
            # One core computes: the addition is the same work with and without a stand-in before it.
            torch.set_num_threads(1 if name in ("added", "overlapped") else 2)
            row = statistics.median(variants["alone"].processor or [0.0])
            variant.step((lambda: busy(1.5 * row)) if name == "overlapped" else lambda: None)
            variant.ready()
        if index == 1:
            for variant in variants.values():
                variant.wall.clear(), variant.processor.clear()
    for one, other in (("alone", "added"), ("back", "overlapped")):
        sample = variants[one].sample()
        assert torch.equal(sample, variants[other].sample()) and float(sample.std()) > 0
    medians = {name: statistics.median(variant.wall) for name, variant in variants.items()}
    medians["ratio"] = statistics.median(map(operator.truediv, variants["back"].wall, variants["alone"].wall))
    for variant in variants.values():
        variant.optimizer.close()
    return medians


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--arithmetic", default="exact", choices=["exact", "float"])
    parser.add_argument("--case", choices=list(CASES), action="append")
    arguments = parser.parse_args()
    print(f"{'':20} {'alone':>10} {'back':>10} {'to alone':>9} {'added':>10} {'overlapped':>10} {'visible':>10} {'of alone':>9}")
    for case in arguments.case or CASES:
        found = measure(CASES[case], arguments.steps, arguments.arithmetic)
        visible = found["overlapped"] - found["added"]
        columns = [f"{1e3 * found[name]:8.1f}ms" for name in ("alone", "back", "added", "overlapped")]
        columns.insert(2, f"{found['ratio']:9.3f}")
        print(f"{case:20}", *columns, f"{1e3 * visible:8.1f}ms {100 * visible / found['alone']:7.1f} %", flush=True)


if __name__ == "__main__":
    main()
