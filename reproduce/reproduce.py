"""Redraws the tables and figures of Denisov et al. (2022) with dpmf, each beside the paper's value or claim.

Run by scripts/reproduce. Everything is computed by the `dpmf` program; this file chooses settings, draws and judges.
Several epochs, against Opacus, are added by epochs.py. Each verdict is computed from the numbers of this run.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import epochs
import text
from page import Page, plt

COLORS = {"none": "#000000", "optimal": "#0072b2", "state-space": "#56b4e9", "optimal-prefix": "#009e73",
          "honaker-full": "#e69f00", "honaker-online": "#d55e00", "independent": "#cc79a7"}
MECHANISMS = ["independent", "honaker-online", "honaker-full", "optimal-prefix", "optimal", "state-space"]
DECAY, COOLDOWN = "decay:0.25:0.15", "cooldown:0.25:0.05"

# Table "loss_values" of the paper: steps -> Honaker online, optimal, structured.
LOSS_VALUES = {256: (74.4, 40.4, 40.4), 512: (116.5, 62.0, 62.2), 1024: (180.8, 94.6, 95.5),
               2048: (278.3, 143.6, 145.8), 4096: (425.6, 217.3, 224.0)}
# The paper's ε at δ = 1e-6 for its noise multipliers.
EPSILON = {0.341: 18.9, 0.682: 8.2, 1.364: 3.7, 2.728: 1.7, 5.456: 0.8}


@dataclass
class Scale:
    """How much of the work a level does."""

    rounds: int
    repeats: int
    noise: list[float]
    client_lr: list[float]
    momentum: list[float]
    sizes: list[int]
    convergence: list[int]
    decay_noise: float = 0.341
    many_clients: int = 167


SIZES = [256, 512, 1024, 2048, 4096]
SCALES = {
    "quick": Scale(128, 1, [0.341, 1.364], [2.0], [0.9], [256, 512], [128]),
    "standard": Scale(2048, 3, [0.341, 1.364, 2.728, 5.456], [2.0], [0.9], SIZES, [512]),
    "full": Scale(2048, 10, [0.341, 0.682, 1.364, 2.728, 5.456], [1.0, 2.0], [0.0, 0.9, 0.95], SIZES, [512, 2048]),
}


def server_rates(sigma: float) -> list[float]:
    """Where tuning starts: three rates, falling with the noise; the sweep goes on beyond them while the best is the last."""
    middle = 2.0 ** round(math.log2(0.35 / sigma))
    return [middle / 2, middle, 2 * middle]


class Dpmf:
    """The program."""

    def __init__(self, program: str, out: Path):
        self.program, self.out = program, out

    def __call__(self, *arguments: object) -> dict:
        command = [self.program, *map(str, arguments), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        answer = json.loads(done.stdout or "{}")
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {answer.get('error', {}).get('message', 'failed')}")
        return answer

    def sweep(self, name: str, scale: Scale, **grid: object) -> list[dict]:
        flags = {"rounds": scale.rounds, "repeats": scale.repeats, "client-lr": scale.client_lr,
                 "momentum": scale.momentum, "widen": True}
        flags.update({key.replace("_", "-"): value for key, value in grid.items()})
        arguments: list[object] = []
        for key, value in flags.items():
            if value is True:
                arguments.append(f"--{key}")
            elif value is not None:
                listed = value if isinstance(value, list) else [value]
                arguments += [f"--{key}", ",".join(map(str, listed))]
        return self("sweep", *arguments, "--out", self.out / "sweeps" / name)["rows"]


def pick(rows: list[dict], **wanted: object) -> dict | None:
    return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)


def interval(row: dict) -> str:
    ci = row["test_accuracy_ci"]
    half = f" ± {(ci[1] - ci[0]) / 2:.4f}" if ci else ""
    return f"{row['test_accuracy_mean']:.4f}{half}"


def loss_tables(page: Page, dpmf: Dpmf, scale: Scale) -> None:
    page.section("Table “loss_values”: √loss of the prefix sum",
                 "Honaker online, the optimum, and the structured approximation, ours and the paper's.")
    rows, within = [], True
    for steps in scale.sizes:
        answer = dpmf("compare", "--steps", steps, "--mechanism", "honaker-online,optimal,structured,state-space",
                      "--buffers", "4")
        ours = {row["mechanism"]: row["sqrt_loss"] for row in answer["rows"]}
        four = next(row for row in answer["rows"] if row["mechanism"] == "state-space" and row["buffers"] == 4)
        paper = LOSS_VALUES[steps]
        rows.append([steps, *(f"{ours[name]:.2f} / {value}" for name, value in
                              zip(("honaker-online", "optimal", "structured"), paper)),
                     f"{four['sqrt_loss']:.2f}"])
        within &= all(abs(ours[name] - value) <= 0.051 for name, value in zip(("honaker-online", "optimal"), paper))
        within &= ours["structured"] <= paper[2] + 0.051
    page.table(["steps", "Honaker online, ours / paper", "optimal", "structured (h, r)", "state space, 4 buffers"], rows)
    page.verdict(within, "Honaker online and the optimum agree with the paper to its last digit, and the structured form "
                         "is no worse than the paper's, at every size")


def mechanisms_table(page: Page, dpmf: Dpmf, scale: Scale) -> None:
    page.section("Table “algs”: four mechanisms for any workload",
                 "√loss over the certified bound of every other mechanism, for three workloads.")
    steps = min(scale.rounds, 2048)
    workloads = {"prefix sum": [], "momentum 0.95": ["--momentum", "0.95"],
                 "momentum 0.95, cooldown": ["--momentum", "0.95", "--schedule", COOLDOWN]}
    ratios = {}
    for name, flags in workloads.items():
        answer = dpmf("compare", "--steps", steps, *flags, "--mechanism", ",".join(MECHANISMS), "--buffers", "4")
        ratios[name] = {row["mechanism"]: row["ratio_to_bound"] for row in answer["rows"]}
    page.table(["mechanism", *workloads], [[name, *(f"{ratios[w][name]:.4f}" for w in workloads)] for name in MECHANISMS])
    order = ["optimal", "optimal-prefix", "honaker-full", "honaker-online", "independent"]
    sorted_ = all(ratios[w][a] <= ratios[w][b] * (1 + 1e-6) for w in workloads for a, b in zip(order, order[1:])
                  if not (b == "independent" or a == "honaker-online"))
    page.verdict(sorted_, "optimal ≤ optimal-prefix ≤ honaker-full ≤ honaker-online in loss, for every workload")


def error_figure(page: Page, dpmf: Dpmf, scale: Scale) -> None:
    page.section("Error of every step")
    steps = min(scale.rounds, 512)
    answer = dpmf("plot", "error", "--steps", steps, "--momentum", "0.95", "-o", dpmf.out / "error-drawn.svg")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for axis, panel in zip(axes, answer["panels"]):
        for series in panel["series"]:
            x, y = zip(*series["points"])
            axis.plot(x, y, label=series["label"], color=COLORS.get(series["label"]), lw=1.2)
        axis.set(title=panel["title"], xlabel="step", ylabel="expected squared error / (σζ)²")
        axis.legend()
    page.figure("error", "Per-step squared error, prefix sum and momentum 0.95 (the paper's first figure).", figure)
    totals = {series["label"]: sum(y for _, y in series["points"]) for series in answer["panels"][1]["series"]}
    page.verdict(totals["optimal"] < totals["optimal-prefix"] < totals["honaker-full"] < totals["honaker-online"],
                 "with momentum 0.95 the total error falls from Honaker online over Honaker full and the optimum of the "
                 "prefix sum to the optimum of momentum itself")


def accuracy(page: Page, dpmf: Dpmf, scale: Scale) -> list[dict]:
    page.section("Test accuracy against ε",
                 f"{scale.rounds} rounds of 100 users, each taking part once; learning rates chosen on validation users, then "
                 f"{scale.repeats} repetition{'s' * (scale.repeats > 1)} scored on test users. “state-space” is the optimum in four model-sized "
                 "buffers, at the settings of “optimal”.")
    rows = []
    for sigma in scale.noise:
        tuned = [name for name in MECHANISMS if name != "state-space"] + ["none"] * (sigma == scale.noise[0])
        rows += dpmf.sweep("accuracy", scale, mechanism=tuned, noise_multiplier=sigma, schedule="constant",
                           server_lr=server_rates(sigma))
        best = pick(rows, mechanism="optimal", noise_multiplier=sigma)
        rows += dpmf.sweep("streams", scale, mechanism="state-space", noise_multiplier=sigma, schedule="constant",
                           buffers=4, **{key: best[key] for key in ("server_lr", "client_lr", "momentum")})
    none = pick(rows, mechanism="none")
    figure, axis = plt.subplots(figsize=(8, 5))
    axis.axhline(none["test_accuracy_mean"], color="black", lw=1, label="no noise")
    for name in MECHANISMS:
        mine = sorted((row for row in rows if row["mechanism"] == name), key=lambda row: row["epsilon"])
        half = [(row["test_accuracy_ci"][1] - row["test_accuracy_ci"][0]) / 2 if row["test_accuracy_ci"] else 0
                for row in mine]
        axis.errorbar([row["epsilon"] for row in mine], [row["test_accuracy_mean"] for row in mine], yerr=half,
                      label=name, color=COLORS[name], marker="o", ms=4, lw=1.4, capsize=2)
    axis.set(xscale="log", xlabel="ε (exact) at δ = 10⁻⁶", ylabel="test accuracy")
    found = sorted({row["epsilon"] for row in rows if row["epsilon"]})
    axis.set_xticks(found, [f"{value:.2f}" for value in found])
    axis.minorticks_off()
    axis.legend()
    page.figure("accuracy", "Test accuracy against ε; bars are 95 % confidence intervals.", figure)
    page.table(["σ", "paper's ε", "exact ε", *MECHANISMS],
               [[sigma, EPSILON[sigma], f"{pick(rows, mechanism='optimal', noise_multiplier=sigma)['epsilon']:.3f}",
                 *(interval(pick(rows, mechanism=name, noise_multiplier=sigma)) for name in MECHANISMS)]
                for sigma in scale.noise])
    page.parts.append(f"<p>Without noise: {interval(none)}.</p>")
    chain = ["optimal", "optimal-prefix", "honaker-full", "honaker-online", "independent"]
    for sigma in scale.noise:
        found = [pick(rows, mechanism=name, noise_multiplier=sigma)["test_accuracy_mean"] for name in chain]
        told = ", ".join(f"{name} {value:.4f}" for name, value in zip(chain, found))
        ordered = all(a >= b for a, b in zip(found, found[1:]))
        page.verdict(None if scale.rounds < 2048 else ordered,
                     f"σ = {sigma}: test accuracy falls in the paper's order, with independent noise last ({told})")
    sigma = 2.728 if 2.728 in scale.noise else scale.noise[0]
    stream = pick(rows, mechanism="state-space", noise_multiplier=sigma)
    settings = {key: stream[key] for key in ("server_lr", "client_lr", "momentum")}
    dense = dpmf.sweep("dense", scale, mechanism="optimal", noise_multiplier=sigma, schedule="constant", dense=True,
                       **settings)[0]
    words = f"σ = {sigma}: the stream of four buffers ({interval(stream)}) and the dense optimum ({interval(dense)}) agree " \
            "within their confidence intervals"
    if stream["test_accuracy_ci"] and dense["test_accuracy_ci"]:
        (low, high), (other_low, other_high) = stream["test_accuracy_ci"], dense["test_accuracy_ci"]
        page.verdict(low <= other_high and other_low <= high, words)
    else:
        page.verdict(None, words)
    diverged = sum(row["diverged"] for row in rows)
    page.parts.append(f"<p>{diverged} of {sum(row['runs'] for row in rows)} repetitions diverged (loss above that of the "
                      "untrained model).</p>")
    return rows


def schedules(page: Page, dpmf: Dpmf, scale: Scale, accuracy_rows: list[dict]) -> None:
    sigma = scale.decay_noise
    names = ["none", "honaker-online", "optimal-prefix", "optimal"]
    # As in the paper: constant steps with each mechanism's best settings, the schedules with settings that all share.
    tuned = dpmf.sweep("schedules", scale, mechanism="optimal", noise_multiplier=sigma, schedule=COOLDOWN,
                       momentum=0.95, server_lr=[rate / 2 for rate in server_rates(sigma)])[0]
    shared = {"momentum": 0.95, "client_lr": tuned["client_lr"], "server_lr": tuned["server_lr"]}
    page.section("Learning-rate decay and cooldown",
                 f"σ = {sigma}: 0.15× over the last quarter, and 1 → 0.05 over the last quarter, the latter also with "
                 f"{scale.many_clients} users a round. Constant steps with each mechanism's own settings; the schedules all with "
                 f"momentum 0.95 and server learning rate {tuned['server_lr']}, tuned for the optimal mechanism with cooldown.")
    rows = [pick(accuracy_rows, mechanism=name, noise_multiplier=None if name == "none" else sigma) for name in names]
    rows += dpmf.sweep("schedules", scale, mechanism=names, noise_multiplier=sigma, schedule=[DECAY, COOLDOWN], **shared)
    many = dpmf.sweep("schedules", scale, mechanism=names, noise_multiplier=sigma, schedule=COOLDOWN,
                      clients=scale.many_clients, **shared)
    labels = ["constant", DECAY, COOLDOWN]
    figure, axis = plt.subplots(figsize=(9, 4.5))
    width = 0.2
    for k, name in enumerate(names):
        found = [pick(rows, mechanism=name, schedule=label) for label in labels] + [pick(many, mechanism=name)]
        half = [(row["test_accuracy_ci"][1] - row["test_accuracy_ci"][0]) / 2 if row["test_accuracy_ci"] else 0
                for row in found]
        axis.bar([x + (k - 1.5) * width for x in range(4)], [row["test_accuracy_mean"] for row in found], width,
                 yerr=half, capsize=2, color=COLORS[name], label="no noise" if name == "none" else name)
    low = min(row["test_accuracy_mean"] for row in rows + many)
    axis.set_ylim(bottom=max(0, low - 0.03))
    axis.set_xticks(range(4), ["constant", "0.15×", "cooldown", f"cooldown, {scale.many_clients} users"])
    axis.set_ylabel("test accuracy")
    axis.legend(ncols=4, loc="upper left", fontsize=9)
    page.figure("schedules", "Test accuracy by schedule; bars are 95 % confidence intervals.", figure)
    groups = ["constant", "0.15×", "cooldown", f"cooldown, {scale.many_clients} users"]
    page.table(["mechanism", *groups],
               [["no noise" if name == "none" else name,
                 *(interval(pick(rows, mechanism=name, schedule=label)) for label in labels),
                 interval(pick(many, mechanism=name))] for name in names])
    online = pick(rows, mechanism="honaker-online", schedule="constant")["test_accuracy_mean"]
    for found, words in ((rows, ""), (many, f" and {scale.many_clients} users a round")):
        free = max(row["test_accuracy_mean"] for row in rows + found if row["mechanism"] == "none")
        best = pick(found, mechanism="optimal", schedule=COOLDOWN)["test_accuracy_mean"]
        share = (best - online) / (free - online) if free > online else float("nan")
        page.verdict(None if scale.rounds < 2048 else share > 2 / 3,
                     f"the optimal mechanism with cooldown{words} closes more than two thirds of the gap between Honaker online "
                     f"with constant steps and no noise: {share:.2f} of it, from {online:.4f} to {best:.4f}, with {free:.4f} "
                     "the best without noise")

    page.section("Momentum and decay inside and outside the mechanism",
                 "Validation accuracy over the last rounds: the optimum of the whole workload against that of the prefix sum, "
                 "with momentum and schedule as post-processing.")
    figure, axis = plt.subplots(figsize=(8, 4.5))
    ends = {}
    for label, dash in ((DECAY, "-"), (COOLDOWN, "--")):
        for name in ("optimal", "optimal-prefix"):
            row = pick(rows, mechanism=name, schedule=label)
            curve = [(x, y) for x, y in row["curve"] if x >= 0.6 * scale.rounds]
            axis.plot(*zip(*curve), dash, color=COLORS[name], label=f"{name}, {label}")
            ends[name, label] = row["validation_accuracy_mean"]
    axis.axvline(0.75 * scale.rounds, color="#888", lw=1)
    axis.set(xlabel="round", ylabel="validation accuracy")
    axis.legend()
    page.figure("inside-outside", "Mean over the repetitions; the line marks the start of the decay.", figure)
    for label in (DECAY, COOLDOWN):
        inside, outside = ends["optimal", label], ends["optimal-prefix", label]
        page.verdict(None if scale.rounds < 2048 else inside >= outside,
                     f"{label}: at the end the mechanism that knows momentum and schedule is ahead "
                     f"({inside:.4f} against {outside:.4f})")


def solvers(page: Page, dpmf: Dpmf, scale: Scale) -> None:
    page.section("Convergence of the three solvers")
    for steps in scale.convergence:
        answer = dpmf("plot", "convergence", "--steps", steps, "-o", dpmf.out / f"convergence-{steps}.svg")
        page.figure(f"convergence-{steps}", f"Relative gap to the optimum against time, n = {steps}.")
        series = {s["label"]: s["points"] for s in answer["panels"][0]["series"]}
        reached = {label: next((x for x, gap in points if gap <= 1e-5), math.inf) for label, points in series.items()}
        rivals = [x for label, x in reached.items() if label.startswith(("Newton", "projected"))]
        for iteration, name in [("plain", "the paper's plain iteration of the fixed point"),
                                ("Anderson", "the fixed point with Anderson's acceleration, which is not the paper's,")]:
            fixed_point = next(x for label, x in reached.items() if label.startswith(f"dense, {iteration}"))
            page.verdict(all(fixed_point < rival for rival in rivals),
                         f"n = {steps}: {name} comes within 1e-5 of the optimum before Newton directions and projected gradients")
        told = (f"{label} {f'{x:.3g} s' if x < math.inf else 'not in a minute'}" for label, x in reached.items())
        page.note(f"To a gap of 1e-5: {'; '.join(told)}.")


def factors(page: Page, dpmf: Dpmf, scale: Scale) -> None:
    page.section("The factors")
    dpmf("plot", "heatmap", "--steps", min(scale.sizes[0], 512), "-o", dpmf.out / "heatmap.svg")
    page.figure("heatmap", "Values of B and C, and where their weight lies.")


def choices(page: Page, scale: Scale, rows: list[dict]) -> None:
    page.section("Hyperparameters",
                 f"Grid: client learning rate {scale.client_lr}, momentum {scale.momentum}, server learning rate in powers of two, "
                 "from three about 0.35/σ outwards until the best has a neighbour on either side; each tried for the whole "
                 "length on validation users. The paper's grid: client [0.5, 1], server [0.25, 0.5, 1, 2], momentum [0, 0.9, 0.95].")
    page.table(["mechanism", "σ", "server lr", "client lr", "momentum", "clip", "tried", "validation accuracy"],
               [[row["mechanism"], row["noise_multiplier"] or "–", row["server_lr"], row["client_lr"], row["momentum"],
                 row["clip"], row["tuned_over"], f"{row['validation_accuracy_mean']:.4f}"] for row in rows])


def paper(page: Page, dpmf: Dpmf, scale: Scale) -> None:
    loss_tables(page, dpmf, scale)
    mechanisms_table(page, dpmf, scale)
    error_figure(page, dpmf, scale)
    solvers(page, dpmf, scale)
    factors(page, dpmf, scale)
    rows = accuracy(page, dpmf, scale)
    schedules(page, dpmf, scale, rows)
    choices(page, scale, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("level", nargs="?", choices=SCALES, default="quick")
    parser.add_argument("--program", required=True)
    parser.add_argument("--out", type=Path, default=Path("reproduction"))
    parser.add_argument("--part", choices=["paper", "epochs", "text"], help="this alone")
    arguments = parser.parse_args()
    scale, out = SCALES[arguments.level], arguments.out
    out.mkdir(parents=True, exist_ok=True)
    dpmf = Dpmf(arguments.program, out)
    page = Page(out, f"Denisov et al. (2022) redone with dpmf: {arguments.level}")
    started = time.monotonic()
    if arguments.part in (None, "paper"):
        paper(page, dpmf, scale)
    if arguments.part in (None, "epochs"):
        epochs.add_sections(page, arguments.level, out / f"fashion-{arguments.level}")
    if arguments.part in (None, "text"):
        text.add_names(page, dpmf, arguments.level)
        text.add_language(page, arguments.level)
    page.parts.append(f"<p>{(time.monotonic() - started) / 60:.0f} minutes.</p>")
    page.write()
    print(out / "index.html")


if __name__ == "__main__":
    main()
