"""A language model of a million parameters for several epochs: DP-SGD and the plans of dpmf, tuned with the same effort.

Run by reproduce/epochs.py with the Python of .torch/venv, on data/cache/quotes.jsonl (scripts/data/quotes). A record is a
quotation, of which the first words count; one of an author says nothing about the others, so this is privacy for a quotation, not for
its author. Words come from other quotations, which are taken for public.

The model predicts a word from the four before it. Per-example gradients are never made: a sum over the words t of outer products
δₜaₜᵀ has the squared norm Σ (δₜ·δₛ)(aₜ·aₛ), and the clipped sum is one product of matrices.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import dpmf
import torch
from fashion import ARMS, CLIP, EXAMPLES, HELD_OUT, Cell, Effort, Results, Settings, drawn, end_last_line, search, split
from networks import clip_factors
from torch import nn

DATA = Path(__file__).parents[1] / "data" / "cache" / "quotes.jsonl"
WORDS, LENGTH, CONTEXT, EMBEDDING, HIDDEN = 4000, 8, 4, 96, 160
PUBLIC, TEST = 20_000, 10_000
#: Words of a batch that are worked on at a time, so that their logits stay in the cache.
PART = 128
START = Settings(8, 50, 0.9, "cooldown:0.5:0.05", None)
START_PULL = 0.01
#: Epochs, budgets, effort.
LEVELS = {"quick": (1, [8.0], Effort(1, 1, 2)), "standard": (3, [4.0], Effort(4, 1, 3)),
          "full": (10, [1.0, 2.0, 4.0, 8.0], Effort(20, 3, 10))}


def read(path: Path) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Contexts and targets of the training quotations, then of the test's; target −1 is none. 0 stands for words that are not in
    the list, 1 for the beginning."""
    if not path.exists():
        raise SystemExit(f"{path} is missing: run scripts/data/quotes, or give --data FILE")
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf8").splitlines()]
    texts.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    lists = (re.findall(r"[a-z']+|[.,;:!?]", text.lower())[:LENGTH] for text in texts)
    lists = [words for words in lists if len(words) == LENGTH][:PUBLIC + TEST + EXAMPLES]
    if len(lists) < PUBLIC + TEST + EXAMPLES:
        raise SystemExit(f"{path} has {len(lists)} quotations of {LENGTH} words, but {PUBLIC + TEST + EXAMPLES} are needed")
    counts = Counter(word for words in lists[:PUBLIC] for word in words)
    number = {word: index for index, (word, _) in enumerate(counts.most_common(WORDS - 2), 2)}
    tokens = torch.tensor([[number.get(word, 0) for word in words] for words in lists[PUBLIC:]])
    padded = torch.cat([torch.ones(len(tokens), CONTEXT, dtype=torch.int64), tokens], 1)
    contexts = padded[:, :-1].unfold(1, CONTEXT, 1).contiguous()
    # A word that is not in the list is nothing to learn.
    targets = torch.where(tokens == 0, -1, tokens)
    return (contexts[TEST:], targets[TEST:]), (contexts[:TEST], targets[:TEST])


class Language:
    """Embedding, hidden layer, softmax."""

    @staticmethod
    def module() -> nn.Module:
        return nn.ModuleList([nn.Embedding(WORDS, EMBEDDING), nn.Linear(CONTEXT * EMBEDDING, HIDDEN), nn.Linear(HIDDEN, WORDS)])

    @staticmethod
    def forward(parameters, contexts):
        table, w1, b1, w2, b2 = parameters
        x = table[contexts].flatten(2)
        h = torch.tanh(x @ w1.t() + b1)
        return h @ w2.t() + b2, h, x

    @classmethod
    def clipped_sum(cls, parameters, contexts, targets, clip: float, out: list[torch.Tensor]) -> None:
        """Writes the sum of the clipped gradients of the mean loss over a quotation's words."""
        for part in out:
            part.zero_()
        for first in range(0, len(contexts), PART):
            cls._add(parameters, contexts[first:first + PART], targets[first:first + PART], clip, out)

    @classmethod
    def _add(cls, parameters, contexts, targets, clip: float, out: list[torch.Tensor]) -> None:
        _, w1, _, w2, _ = parameters
        logits, h, x = cls.forward(parameters, contexts)
        known = targets >= 0
        d2 = torch.softmax(logits, 2)
        d2.scatter_add_(2, targets.clamp(min=0)[..., None], torch.full_like(d2[..., :1], -1.0))
        d2 *= (known / known.sum(1, keepdim=True).clamp(min=1))[..., None]
        d1 = (d2 @ w2) * (1 - h * h)
        dx = (d1 @ w1).view(len(x), LENGTH * CONTEXT, EMBEDDING)
        gram = lambda rows: torch.bmm(rows, rows.transpose(1, 2))
        flat = contexts.reshape(len(x), LENGTH * CONTEXT)
        same = flat[:, :, None] == flat[:, None, :]
        norms_sq = (gram(d2) * (gram(h) + 1)).sum((1, 2)) + (gram(d1) * (gram(x) + 1)).sum((1, 2)) + (gram(dx) * same).sum((1, 2))
        factors = clip_factors(norms_sq.clamp(min=0), clip)[:, None, None]
        d2, d1, dx = (factors * part for part in (d2, d1, dx))
        out[0].index_add_(0, flat.flatten(), dx.flatten(0, 1))
        out[1].addmm_(d1.flatten(0, 1).t(), x.flatten(0, 1))
        out[2].add_(d1.sum((0, 1)))
        out[3].addmm_(d2.flatten(0, 1).t(), h.flatten(0, 1))
        out[4].add_(d2.sum((0, 1)))


def initial(seed: int) -> tuple[torch.Tensor, list[torch.Size]]:
    torch.manual_seed(seed)
    start = list(Language.module().parameters())
    return torch.cat([p.detach().flatten() for p in start]), [p.shape for p in start]


def check(data: tuple) -> float:
    """The clipped sum against autograd, example by example, in double precision: the distance over the length. A wrong clip is
    seen. In single precision norms are off by some 1e-4, since they are sums in which terms cancel."""
    contexts, targets = (part[:6] for part in data)
    theta, shapes = initial(1)
    theta = theta.double()
    expected = torch.zeros_like(theta)
    for context, target in zip(contexts, targets):
        point = theta.clone().requires_grad_()
        logits = Language.forward(split(point, shapes), context[None])[0][0]
        loss = nn.functional.cross_entropy(logits, target, ignore_index=-1)
        (gradient,) = torch.autograd.grad(loss, point)
        expected += gradient * min(1.0, 0.3 / (float(gradient.norm()) + 1e-6))
    found = []
    for clip in (0.3, 0.3003):
        ours = torch.empty_like(theta)
        with torch.no_grad():
            Language.clipped_sum(split(theta, shapes), contexts, targets, clip, split(ours, shapes))
        found.append(float((ours - expected).norm() / expected.norm()))
    assert found[0] < 1e-9 < 1e-4 < found[1], found
    return found[0]


@torch.no_grad()
def score(parameters: list[torch.Tensor], judge: tuple) -> dict:
    """Share of words that are guessed, and perplexity."""
    right = count = 0
    loss = 0.0
    for first in range(0, len(judge[0]), 250):
        contexts, targets = (part[first:first + 250] for part in judge)
        logits, known = Language.forward(parameters, contexts)[0], targets >= 0
        loss += float(nn.functional.cross_entropy(logits[known], targets[known], reduction="sum"))
        right += int((logits.argmax(2) == targets)[known].sum())
        count += int(known.sum())
    return {"accuracy": right / count, "perplexity": math.exp(loss / count)}


@torch.no_grad()
def train(cell: Cell, settings: Settings, arm: str, seed: int, data: tuple, judge: tuple) -> dict:
    started = time.perf_counter()
    theta, shapes = initial(seed)
    gradient, velocity = torch.empty_like(theta), torch.zeros_like(theta)
    parameters, parts = split(theta, shapes), split(gradient, shapes)
    cohorts, add_noise, expected, about = drawn(cell, settings, seed, len(data[0]), len(theta), arm)
    rates = dpmf.Workload.sgd(cell.epochs * settings.batches, schedule=settings.schedule).learning_rates * settings.learning_rate
    for rate, members in zip(rates, cohorts, strict=True):
        Language.clipped_sum(parameters, data[0][members], data[1][members], CLIP, parts)
        add_noise(gradient)
        velocity.mul_(settings.momentum).add_(gradient)
        theta.add_(velocity, alpha=-float(rate) / expected)
    return {**about, **score(parameters, judge), "parameters": len(theta), "seconds": round(time.perf_counter() - started, 2)}


def explore(task: tuple[Cell, str, Effort, str, str]) -> str:
    cell, arm, effort, path, directory = task
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    results = Results(Path(path))
    everything, test = read(Path(directory))
    part, held_out = (tuple(side[rows] for side in everything) for rows in (slice(HELD_OUT, None), slice(HELD_OUT)))
    head = {**asdict(cell), "arm": arm}

    def run(kind: str, settings: Settings, seed: int, data: tuple, judge: tuple) -> float:
        row = {"kind": kind, **head, **asdict(settings), "seed": seed}
        return results.once(row, lambda: train(cell, settings, arm, seed, data, judge))["accuracy"]

    start = replace(START, pull=START_PULL if arm == "dpmf" else None)
    tried = set()

    def tune(settings: Settings, number: int) -> float:
        tried.add((settings, number))
        return run("tune", settings, 100 + number, part, held_out)

    chosen = search(tune, start, effort)
    scores = [run("test", chosen, seed, everything, test) for seed in range(effort.seeds)]
    results.once({"kind": "chosen", **head, **asdict(chosen)},
                 lambda: {"learning_rate": chosen.learning_rate, "tuning_runs": len(tried)})
    return f"{cell.epochs} epochs, ε = {cell.epsilon:g}, {arm}: {[round(100 * x, 2) for x in scores]} % with {chosen}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", choices=LEVELS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, (epochs, budgets, effort) = arguments.out / "results.jsonl", LEVELS[arguments.level]
    end_last_line(path)
    results = Results(path)
    results.once({"kind": "agreement", "network": "language"}, lambda: {"step_difference": check(read(arguments.data)[0])})
    tasks = [(Cell("language", epochs, epsilon), arm, effort, str(path), str(arguments.data)) for epsilon in budgets for arm in ARMS]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for done, line in enumerate(pool.imap_unordered(explore, tasks), 1):
            print(f"{done} of {len(tasks)}: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
