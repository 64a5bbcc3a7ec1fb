"""Private Adam in three forms, with the correlated noise of a plan for running sums.

  plain      the moments of what is released
  corrected  the second moment less the variance of the noise in it, which is known, but not below a share (floor) of that variance
  scaled     gradients are divided by the root of the second moment before they are clipped, and what is released is multiplied by it;
             floor is added to the root, as a share of its mean

A perceptron guesses the next letter of names of npm packages from three letters; an example is one letter of one account. The learning
rate and the floor of each form are the best of the same few by the held-out loss of four seeds, which are not among those reported.
Differences to "plain" are paired by seed: one seed is one model, one draw of batches and one of noise. The scripts of these
forms are for measuring only: clipping here is in floating point.

    python bench/private_adam.py --epsilon 1 4 --seeds 16
"""

import argparse
import json
import lzma
import math
import pathlib
import statistics
import time

import dpmf
import numpy as np
import torch

NAMES = pathlib.Path(__file__).parents[1] / "crates" / "dpmf-train" / "data" / "names.txt.xz"
LETTERS = "\0 abcdefghijklmnopqrstuvwxyz0123456789-_."
CONTEXT, HIDDEN, DELTA, CLIP, BETAS = 3, 48, 1e-5, 1.0, (0.9, 0.99)
#: The 97.5 % point of Student's t, by the number of values.
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262, 12: 2.201, 16: 2.131}
RATES = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)
FORMS = {"plain": (0.0,), "corrected": (0.03, 0.3), "scaled": (0.1, 1.0)}


def letters(count, held_out):
    """Contexts and next letters: one place of each account for training, and of others held out."""
    lines = lzma.open(NAMES, "rt", encoding="utf-8").read().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("train "))
    generator = np.random.default_rng(0)
    rows = []
    for line in lines[begin + 1 : begin + 1 + count + held_out]:
        text = "\0" * CONTEXT + line + " "
        place = int(generator.integers(CONTEXT, len(text)))
        rows.append([LETTERS.index(letter) for letter in text[place - CONTEXT : place + 1]])
    rows = torch.tensor(rows)
    return rows[:count], rows[count:]


class Perceptron:
    """Weights in one vector, and the gradient of each example."""

    def __init__(self, seed):
        width = CONTEXT * len(LETTERS)
        self.shapes = [(HIDDEN, width), (HIDDEN,), (len(LETTERS), HIDDEN), (len(LETTERS),)]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        generator = torch.Generator().manual_seed(seed)
        scales = (1 / math.sqrt(CONTEXT), 0.0, 1 / math.sqrt(HIDDEN), 0.0)
        self.flat = torch.cat([scale * torch.randn(size, generator=generator) for scale, size in zip(scales, self.sizes)])

    def _forward(self, rows):
        inputs = torch.nn.functional.one_hot(rows[:, :CONTEXT], len(LETTERS)).float().flatten(1)
        w1, b1, w2, b2 = (part.view(shape) for part, shape in zip(self.flat.split(self.sizes), self.shapes))
        hidden = torch.tanh(inputs @ w1.T + b1)
        return inputs, hidden, w2, torch.log_softmax(hidden @ w2.T + b2, 1)

    def loss(self, rows):
        return float(torch.nn.functional.nll_loss(self._forward(rows)[-1], rows[:, CONTEXT]))

    def gradients(self, rows):
        inputs, hidden, w2, logs = self._forward(rows)
        errors = logs.exp() - torch.nn.functional.one_hot(rows[:, CONTEXT], len(LETTERS))
        inside = (errors @ w2) * (1 - hidden**2)
        first, second = (torch.einsum("bi,bj->bij", a, b).flatten(1) for a, b in ((inside, inputs), (errors, hidden)))
        return torch.cat([first, inside, second, errors], 1)


def train(form, lr, floor, seed, plan, rows, held_out):
    """The held-out loss of a letter."""
    model, key = Perceptron(seed), dpmf.NoiseKey.from_seed(1000 + seed)
    stream = dpmf.NoiseStream(plan.mechanism, key, dimension=len(model.flat), arithmetic="float")
    sampler = plan.sampler(key, run=stream.run)
    batch = sampler.expected_batch
    # The variance of a step's noise in the mean, at every coordinate the same.
    variances = (plan.statement.noise_std * np.linalg.norm(plan.mechanism.coloring(), axis=1) / batch) ** 2
    beta1, beta2 = BETAS
    first, second = torch.zeros_like(model.flat), torch.zeros_like(model.flat)
    noise_in_second, scale = 0.0, torch.ones_like(model.flat)
    for step in range(plan.steps):
        members = torch.from_numpy(np.array(next(sampler), dtype=np.int64))
        total = torch.zeros_like(model.flat)
        if len(members):
            gradients = model.gradients(rows[members]) / scale
            norms = gradients.norm(dim=1, keepdim=True)
            total = (gradients * (CLIP / norms.clamp(min=CLIP))).sum(0)
        noisy = total + torch.from_numpy(stream.next_row())
        released = scale * noisy / batch
        first = beta1 * first + (1 - beta1) * released
        second = beta2 * second + (1 - beta2) * released**2
        noise_in_second = beta2 * noise_in_second + (1 - beta2) * float(variances[step])
        right1, right2 = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)
        variance = second / right2
        if form == "corrected":
            known = noise_in_second / right2
            variance = (variance - known).clamp(min=floor * known)
        root = variance.sqrt()
        model.flat = model.flat - lr * (first / right1) / (root + 1e-8)
        if form == "scaled":
            # From releases alone, of size one on the whole, so that the clip stays what it was.
            scale = root + floor * root.mean()
            scale = scale / scale.square().mean().sqrt()
    return model.loss(held_out)


def interval(values):
    half = STUDENT.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.mean(values)
    return mean, [mean - half, mean + half]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--examples", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=8)
    settings = parser.parse_args()
    rows, held_out = letters(settings.examples, 4000)
    print(json.dumps(dict(untrained=Perceptron(0).loss(held_out))), flush=True)
    summary = []
    for epsilon in settings.epsilon:
        started = time.perf_counter()
        plan = dpmf.plan(
            examples=len(rows),
            batch=settings.batch,
            epochs=settings.epochs,
            epsilon=epsilon,
            delta=DELTA,
            clip=CLIP,
            optimizer="adam",
            noise_decay=0.03,
        )
        losses = {}
        for form, floors in FORMS.items():
            tried = {
                (lr, floor): statistics.mean(train(form, lr, floor, seed, plan, rows, held_out) for seed in range(100, 104))
                for lr in RATES
                for floor in floors
            }
            lr, floor = min(tried, key=tried.get)
            losses[form] = [train(form, lr, floor, seed, plan, rows, held_out) for seed in range(settings.seeds)]
            row = dict(epsilon=epsilon, form=form, lr=lr, floor=floor, loss=statistics.mean(losses[form]))
            if form != "plain":
                row["less_than_plain"], row["interval"] = interval([a - b for a, b in zip(losses["plain"], losses[form])])
            summary.append(row)
            print(json.dumps({**row, "seconds": time.perf_counter() - started}), flush=True)
    print(json.dumps(dict(schema=1, seeds=settings.seeds, steps=plan.steps, mechanism=plan.mechanism.mechanism, rows=summary)))


if __name__ == "__main__":
    main()
