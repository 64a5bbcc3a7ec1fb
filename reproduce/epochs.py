"""Fashion-MNIST for several epochs, Opacus' DP-SGD against the plans of dpmf: figure, tables, verdicts.

    python reproduce/epochs.py standard --out reproduction     computes and draws; goes on where it was stopped
    python reproduce/epochs.py --redraw docs/figures/accuracy.json

Computing is done by fashion.py with the Python of .torch/venv, which has PyTorch and Opacus; this file has matplotlib.
add_sections puts everything onto a page. Each verdict is computed from the numbers of the run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
from pathlib import Path

from page import Page, plt

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".torch" / "venv" / "bin" / "python"
# Of middling lightness: readable on white and on black.
#: As `dpmf plot` has them.
COLORS = {"dpmf": "#0072b2", "opacus": "#d55e00"}
NAMES = {"dpmf": "dpmf", "opacus": "Opacus"}
INK, AXIS, GRID = "#1e1e1e", "#6e6e6e", "#e4e4e4"
#: Quantile of Student's t for a 95 % interval, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def compute(level: str, out: Path, jobs: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1",
                   "PYTHONPATH": str(ROOT / "crates" / "dpmf-py" / "python")}
    subprocess.run([PYTHON, "-W", "ignore", ROOT / "reproduce" / "fashion.py", level, "--out", out, "--jobs", str(jobs)],
                   env=environment, check=True)


def lines(path: Path) -> list[dict]:
    found = []
    for line in path.read_text(encoding="utf8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # cut off when a run was stopped
    return found


def mean_and_half(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval."""
    return statistics.mean(values), STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def summarise(rows: list[dict]) -> dict:
    """What the figure and the tables need: accuracies in percent, differences paired by seed."""
    cells = {}
    for row in rows:
        if row["kind"] == "chosen":
            name = (row["network"], row["epochs"], row["epsilon"])
            cells.setdefault(name, {})[row["arm"]] = row
    settings = ("log2_distance", "batches", "momentum", "schedule", "pull")
    summary = {"cells": [], "agreement": {row["network"]: row for row in rows if row["kind"] == "agreement"}}
    for (network, epochs, epsilon), arms in sorted(cells.items(), key=lambda item: (item[0][0] != "perceptron", item[0])):
        if len(arms) < 2:
            continue
        cell = {"network": network, "epochs": epochs, "epsilon": epsilon}
        scores = {}
        for arm, chosen in arms.items():
            runs = {row["seed"]: row for row in rows if row["kind"] == "test" and row["arm"] == arm
                    and (row["network"], row["epochs"], row["epsilon"]) == (network, epochs, epsilon)
                    and all(row[key] == chosen[key] for key in settings)}
            scores[arm] = [100 * runs[seed]["accuracy"] for seed in sorted(runs)]
            mean, half = mean_and_half(scores[arm])
            first = runs[min(runs)]
            cell[arm] = {"accuracy": scores[arm], "mean": mean, "half": half, "learning_rate": chosen["learning_rate"],
                         "noise_multiplier": first["noise_multiplier"], "tuning_runs": chosen.get("tuning_runs"),
                         **{key: chosen[key] for key in settings[1:]}}
            for key in ("opacus_noise_multiplier",):
                if key in chosen:
                    cell[arm][key] = chosen[key]
            for key in ("mechanism", "sampling", "buffers", "rmse", "rmse_dp_sgd"):
                if key in first:
                    cell[arm][key] = first[key]
        differences = [ours - theirs for ours, theirs in zip(scores["dpmf"], scores["opacus"], strict=True)]
        cell["difference"], cell["difference_half"] = mean_and_half(differences)
        summary["cells"].append(cell)
    return summary


def draw(summary: dict):
    """Accuracy against ε, a panel for every number of epochs of the perceptron."""
    cells = [cell for cell in summary["cells"] if cell["network"] == "perceptron"]
    panels = sorted({cell["epochs"] for cell in cells})
    with plt.rc_context({"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
                         "axes.edgecolor": AXIS, "font.size": 10, "axes.titlesize": 10, "axes.titlelocation": "left",
                         "axes.spines.top": False, "axes.spines.right": False, "grid.color": GRID}):
        figure, axes = plt.subplots(1, len(panels), figsize=(0.6 + 2.7 * len(panels), 3.3), sharey=True, squeeze=False)
        for axis, epochs in zip(axes[0], panels):
            mine = sorted((cell for cell in cells if cell["epochs"] == epochs), key=lambda cell: cell["epsilon"])
            budgets = [cell["epsilon"] for cell in mine]
            for arm in ("opacus", "dpmf"):
                means = [cell[arm]["mean"] for cell in mine]
                axis.errorbar(budgets, means, yerr=[cell[arm]["half"] for cell in mine], color=COLORS[arm], marker="o",
                              ms=4.5, lw=1.4, capsize=2, elinewidth=1)
                above = arm == "dpmf"
                axis.annotate(NAMES[arm], (budgets[-1], means[-1]), xytext=(0, 9 if above else -30),
                              textcoords="offset points", ha="right", va="bottom" if above else "top", color=COLORS[arm],
                              weight="bold")
            axis.set(xscale="log", title=f"{epochs} epoch{'s' * (epochs > 1)}")
            axis.set_xticks(budgets, [f"{value:g}" for value in budgets])
            axis.minorticks_off()
            axis.margins(x=0.08, y=0.12)
        axes[0][0].set_ylabel("test accuracy, %")
        figure.supxlabel("ε at δ = 10⁻⁵", fontsize=10, color=INK)
        figure.tight_layout(pad=0.6)
    return figure


def save(figure, path: Path) -> None:
    figure.savefig(path, bbox_inches="tight", facecolor="white", metadata={"Date": None})
    plt.close(figure)


def signed(mean: float, half: float) -> str:
    return f"{mean:+.2f} ± {half:.2f}".replace("-", "−")


def table(summary: dict, network: str) -> tuple[list[str], list[list[str]]]:
    head = ["epochs", "ε", "Opacus, %", "dpmf, %", "difference, points"]
    rows = [[str(cell["epochs"]), f"{cell['epsilon']:g}", *(f"{cell[arm]['mean']:.2f} ± {cell[arm]['half']:.2f}" for arm in
             ("opacus", "dpmf")), signed(cell["difference"], cell["difference_half"])]
            for cell in summary["cells"] if cell["network"] == network]
    return head, rows


def choices(summary: dict) -> tuple[list[str], list[list[str]]]:
    head = ["network", "epochs", "ε", "arm", "batch", "learning rate", "momentum", "schedule", "pull", "noise", "sampling", "σ",
            "σ of Opacus' accountant", "error over DP-SGD's", "tuning runs"]
    rows = []
    for cell in summary["cells"]:
        for arm in ("opacus", "dpmf"):
            of = cell[arm]
            rate = f"{of['rmse'] / of['rmse_dp_sgd']:.2f}" if "rmse" in of else "–"
            theirs = f"{of['opacus_noise_multiplier']:.3f}" if "opacus_noise_multiplier" in of else "–"
            rows.append([cell["network"], cell["epochs"], f"{cell['epsilon']:g}", NAMES[arm], 60_000 // of["batches"],
                         f"{of['learning_rate']:.3g}", of["momentum"], of["schedule"],
                         "–" if of["pull"] is None else of["pull"], of.get("mechanism", "independent"),
                         of.get("sampling", "Poisson"), f"{of['noise_multiplier']:.3f}", theirs, rate, of["tuning_runs"]])
    return head, rows


def verdicts(summary: dict, judged: bool) -> list[tuple[bool | None, str]]:
    """judged: whether the level is large enough to say."""
    said = []
    for epochs in (5, 20):
        cells = [cell for cell in summary["cells"] if (cell["network"], cell["epochs"]) == ("perceptron", epochs)]
        if not cells:
            continue
        told = "; ".join(f"ε = {cell['epsilon']:g}: {signed(cell['difference'], cell['difference_half'])}" for cell in cells)
        said.append((all(cell["difference"] >= 0 for cell in cells) if judged else None,
                     f"perceptron, {epochs} epochs: the mean accuracy of dpmf is at least that of Opacus at every ε (points: {told})"))
        said.append((all(cell["difference"] > -cell["difference_half"] for cell in cells) if judged else None,
                     f"perceptron, {epochs} epochs: dpmf is never significantly worse than Opacus (95 %)"))
        large = [cell for cell in cells if cell["epsilon"] >= 2]
        if not large:
            continue
        margin = min(cell["difference"] for cell in large)
        said.append((all(cell["difference"] > cell["difference_half"] for cell in large) if judged else None,
                     f"perceptron, {epochs} epochs, ε ≥ 2: dpmf is significantly better (95 %), by at least {margin:.2f} points"))
    small = [cell for cell in summary["cells"] if cell["network"] == "convolutional"]
    if small:
        told = "; ".join(f"{cell['epochs']} epochs, ε = {cell['epsilon']:g}: {signed(cell['difference'], cell['difference_half'])}"
                         for cell in small)
        said.append((all(cell["difference"] >= 0 for cell in small) if judged else None,
                     f"convolutional network: the mean accuracy of dpmf is at least that of Opacus (points: {told})"))
    return said


def add_sections(page: Page, level: str, out: Path, jobs: int = os.cpu_count() or 1) -> None:
    """Computes what is missing in out, and adds figure, tables and verdicts."""
    if not PYTHON.exists():
        page.section("Several epochs of Fashion-MNIST: Opacus' DP-SGD and dpmf")
        page.verdict(None, "there is no PyTorch with Opacus here: scripts/setup-torch makes .torch/venv on Debian 12")
        return
    compute(level, out, jobs)
    summary = summarise(lines(out / "results.jsonl"))
    (page.out / "accuracy.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf8")
    page.section("Several epochs of Fashion-MNIST: Opacus' DP-SGD and dpmf",
                 "δ = 10⁻⁵ for a record that is added or removed, clip 1. For every number of epochs, ε and arm: the same number of "
                 "tuning runs, over learning rate, batch, momentum and schedule, on 10 000 held-out images; then the chosen settings with "
                 "other seeds on all 60 000, scored on the 10 000 test images. ± is a 95 % interval over the seeds; differences are "
                 "paired by seed, with the same initial parameters. Opacus' arm has the tight σ, which is no larger than its own. The "
                 "search is not covered by ε, for either.")
    save(draw(summary), page.out / "epochs-accuracy.svg")
    page.figure("epochs-accuracy", "Perceptron (784-64-10, tanh): test accuracy against ε; bars are 95 % intervals.")
    for network in ("perceptron", "convolutional"):
        head, rows = table(summary, network)
        if rows:
            page.parts.append(f"<p>{network.capitalize()}:</p>")
            page.table(head, rows)
    for network, row in summary["agreement"].items():
        told = "; ".join(f"an epoch by {'Opacus' if arm == 'opacus' else 'dpmf.torch'} itself ends "
                         f"{epoch['epoch_difference']:.1e} of its way from the fast one" for arm, epoch in row["by_arm"].items())
        page.verdict(True, f"{network}: the sum of a step is Opacus' but for {row['step_difference']:.1e} of its length"
                           + (f"; {told}" if told else ""))
    for holds, words in verdicts(summary, judged=level != "quick"):
        page.verdict(holds, words)
    page.parts.append("<p>What was chosen:</p>")
    page.table(*choices(summary))
    page.write()


def markdown(head: list[str], rows: list[list]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", nargs="?", choices=["quick", "standard", "full"], default="quick")
    parser.add_argument("--out", type=Path, default=Path("reproduction"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--redraw", type=Path, help="draw a summary again, beside it, and print its tables")
    arguments = parser.parse_args()
    if arguments.redraw:
        summary = json.loads(arguments.redraw.read_text(encoding="utf8"))
        save(draw(summary), arguments.redraw.with_suffix(".svg"))
        for network in ("perceptron", "convolutional"):
            print(markdown(*table(summary, network)), end="\n\n")
        print(markdown(*choices(summary)), end="\n\n")
        for holds, words in verdicts(summary, judged=True):
            print({True: "holds", False: "does not hold", None: "open"}[holds] + ": " + words)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    page = Page(arguments.out, f"Several epochs with dpmf: {arguments.level}")
    add_sections(page, arguments.level, arguments.out / f"fashion-{arguments.level}", arguments.jobs)
    print(arguments.out / "index.html")


if __name__ == "__main__":
    main()
