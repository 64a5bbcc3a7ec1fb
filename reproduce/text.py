"""Text: package names by owner, who come back after a while; and a language model of a million parameters.

add_names runs `dpmf sweep`; add_language computes with language.py, in the Python of .torch/venv, as epochs.py does for images.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

from epochs import NAMES, PYTHON, ROOT, lines, mean_and_half, signed
from page import Page

QUOTES = ROOT / "data" / "cache" / "quotes.jsonl"


@dataclass
class Names:
    """How much of the work a level does."""

    users: int
    rounds: int
    clients: int
    separation: str
    epsilon: list[float]
    repeats: int


LEVELS = {"quick": Names(3000, 40, 60, "min-separation:20:3", [2.0], 2),
          "standard": Names(20_000, 256, 200, "min-separation:50:4", [2.0], 3),
          "full": Names(100_000, 2048, 300, "min-separation:250:8", [0.5, 1.0, 2.0, 4.0, 8.0], 10)}
RECALL = "recall:buffers=2:recalls=1"


def add_names(page: Page, dpmf, level: str) -> None:
    """dpmf: the program, as reproduce.py has it."""
    scale = LEVELS[level]
    page.section("Package names by owner, under a separation",
                 f"{scale.users} owners, {scale.rounds} rounds of {scale.clients}, {scale.separation}: nobody comes back before that many rounds, "
                 "nor more often, as devices that check in are held to; no sampling is counted on, except for DP-SGD, which is what could be done if "
                 "the server could draw in secret. Rates tuned on validation owners, widened until the best is inside; test owners, "
                 f"{scale.repeats} repetitions, ± a 95 % interval.")
    rows = []
    for epsilon in scale.epsilon:
        middle = 0.25 if epsilon >= 2 else 0.125
        answer = dpmf("sweep", "--users", scale.users, "--rounds", scale.rounds, "--clients", scale.clients, "--participation",
                      scale.separation, "--mechanism", f"{RECALL},honaker-online,independent,dp-sgd,none", "--epsilon", epsilon,
                      "--server-lr", f"{middle / 2},{middle},{2 * middle}", "--widen", "--repeats", scale.repeats, "--schedule",
                      "cooldown:0.25:0.05", "--out", page.out / "sweeps" / "names")
        rows += answer["rows"]
    told = []
    for row in rows:
        low, high = row["test_accuracy_ci"] or [float("nan")] * 2
        told.append([row["mechanism"], "–" if row["epsilon"] is None else f"{row['epsilon']:g}",
                     "–" if row["noise_multiplier"] is None else f"{row['noise_multiplier']:.3f}",
                     f"{row['test_accuracy_mean']:.4f} ± {(high - low) / 2:.4f}", row["server_lr"], row["tuned_over"]])
    page.table(["mechanism", "ε", "σ", "test accuracy", "server rate", "rates tried"], told)
    for epsilon in scale.epsilon:
        of = {row["mechanism"]: row["test_accuracy_mean"] for row in rows if row["epsilon"] in (epsilon, None)}
        best = max(("honaker-online", "independent"), key=of.get)
        page.verdict(None if level == "quick" else of["recall"] > of[best],
                     f"ε = {epsilon:g}: two buffers and one recall ({of['recall']:.4f}) are ahead of the best other that counts on no sampling, "
                     f"{best} ({of[best]:.4f}); DP-SGD with secret sampling has {of['dp-sgd']:.4f}")


def add_language(page: Page, level: str, jobs: int = os.cpu_count() or 1) -> None:
    page.section("A language model of 1.1 million parameters",
                 "Four words to the next, trained on the first eight words of 60 000 quotations; a quotation is protected, not its author. "
                 "4000 words from 20 000 other quotations, taken for public. δ = 10⁻⁵, clip 1. Same effort of tuning for both on 10 000 held-out "
                 "quotations, then other seeds on all, scored on 10 000 for the test.")
    for needed, how in ((PYTHON, "scripts/setup-torch makes .torch/venv on Debian 12"), (QUOTES, "scripts/data/quotes fetches them")):
        if not needed.exists():
            page.verdict(None, f"{needed.relative_to(ROOT)} is missing: {how}")
            return
    out = page.out / f"language-{level}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1",
                   "PYTHONPATH": str(ROOT / "crates" / "dpmf-py" / "python")}
    subprocess.run([PYTHON, "-W", "ignore", ROOT / "reproduce" / "language.py", level, "--out", out, "--jobs", str(jobs)],
                   env=environment, check=True)
    rows = lines(out / "results.jsonl")
    chosen = {(row["epochs"], row["epsilon"], row["arm"]): row for row in rows if row["kind"] == "chosen"}
    told = []
    for epochs, epsilon in sorted({key[:2] for key in chosen}):
        tests = {}
        for arm in NAMES:
            settings = {key: chosen[epochs, epsilon, arm][key] for key in ("log2_distance", "batches", "momentum", "schedule", "pull")}
            of = [row for row in rows if row["kind"] == "test" and (row["epochs"], row["epsilon"], row["arm"]) == (epochs, epsilon, arm)
                  and all(row[key] == value for key, value in settings.items())]
            tests[arm] = sorted(of, key=lambda row: row["seed"])
        difference = [100 * (a["accuracy"] - b["accuracy"]) for a, b in zip(tests["dpmf"], tests["opacus"], strict=True)]
        mean, half = mean_and_half(difference)
        cells = [f"{100 * statistics.mean(row['accuracy'] for row in tests[arm]):.2f} % / "
                 f"{statistics.mean(row['perplexity'] for row in tests[arm]):.0f}" for arm in ("opacus", "dpmf")]
        first = tests["dpmf"][0]
        told.append([epochs, f"{epsilon:g}", *cells, signed(mean, half), f"{first['mechanism']}, {first['sampling']}"])
        page.verdict(None if level == "quick" else mean > 0,
                     f"{first['parameters']} parameters, {epochs} epochs, ε = {epsilon:g}: dpmf guesses more of the next words than DP-SGD, by "
                     f"{signed(mean, half)} points")
    page.table(["epochs", "ε", "DP-SGD: words guessed / perplexity", "dpmf", "difference, points", "chosen by dpmf"], told)
    page.write()
