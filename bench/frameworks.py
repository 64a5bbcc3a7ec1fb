"""A step of noise through PyTorch, JAX and Flower beside those of Opacus, jax-privacy and Flower, alternating in one run.

Every framework is a process of its own (bench/framework_step.py), in the environment that has it, and all but one sleep. Every
round times a copy of the same number of float32 in memory, then one step of each, in turns. Ours have made their row of noise
ahead, as beside a gradient; torch-alone makes it within the step, with nothing to hide behind. Printed are medians, the median and
spread of the paired ratios to the copy and to the rival, and the ratio to the rival of processor time, which other programs on the
machine do not disturb. An environment that is not there is left out, and said so. Run by
scripts/bench python, or alone: python bench/frameworks.py.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import dpmf
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]

#: The environment of each library, and how it is made.
ENVIRONMENTS = {
    "torch": (ROOT / ".torch/venv/bin/python", "scripts/setup-torch"),
    "torch-alone": (ROOT / ".torch/venv/bin/python", "scripts/setup-torch"),
    "opacus": (ROOT / ".torch/venv/bin/python", "scripts/setup-torch"),
    "jax": (pathlib.Path(sys.executable), "scripts/bench"),
    "jax-privacy": (pathlib.Path(sys.executable), "scripts/bench"),
    "flower": (ROOT / ".frameworks/bin/python", "scripts/setup-frameworks"),
    "flower-dp": (ROOT / ".frameworks/bin/python", "scripts/setup-frameworks"),
}
RIVALS = {"torch": "opacus", "torch-alone": "opacus", "jax": "jax-privacy", "flower": "flower-dp"}


def mechanisms():
    """By name: those of the planner for several epochs, and the ones of a single one. All have 40 steps."""
    run = dict(examples=4000, batch=400, epochs=4, epsilon=4, delta=1e-5, momentum=0.9, unit="user")
    workload = dpmf.Workload.sgd(40, momentum=0.9)
    sampled, anyhow = dpmf.plan(**run), dpmf.plan(**run, sampling="none")
    cyclic = next(row for row in sampled.rows if row["sampling"].startswith("cyclic") and row["excluded"] is None)
    banded = dpmf.make_mechanism(workload, cyclic["selector"]).with_sampling(cyclic["sampling"])

    def calibrated(mechanism):
        return mechanism.calibrate(4, 1e-5, 1.0, unit="user")

    return {
        f"{sampled.chosen['selector']}, {sampled.sampling}": sampled.mechanism,
        f"{cyclic['selector']}, {cyclic['sampling']}": calibrated(banded),
        f"{anyhow.chosen['selector']}, epochs:4": anyhow.mechanism,
        "optimal, 4 buffers, single": calibrated(dpmf.make_mechanism(workload, buffers=4)),
        "independent, single": calibrated(dpmf.make_mechanism(workload, "independent")),
    }


class Half:
    """A process that takes a step when it is told to."""

    def __init__(self, framework, file, dimension, arithmetic):
        python, _ = ENVIRONMENTS[framework]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "FLWR_TELEMETRY_ENABLED": "0"}
        self.name = framework
        self.process = subprocess.Popen(
            [python, ROOT / "bench/framework_step.py", framework, str(file), str(dimension), arithmetic],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1, env=environment,
        )
        if self.process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{framework} with {file} did not start:\n{self.process.communicate()[1][-3000:]}")

    def step(self):
        self.process.stdin.write("step\n")
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} failed:\n{self.process.communicate()[1][-3000:]}")
        return tuple(map(float, answer.split()))

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.stderr.close()
        self.process.wait()


def copying(dimension):
    """A timed copy in memory."""
    source, target = np.ones(dimension, np.float32), np.zeros(dimension, np.float32)

    def copy():
        began = time.perf_counter()
        np.copyto(target, source)
        seconds = time.perf_counter() - began
        assert target[-1] == 1
        target[-1] = 0
        return seconds

    copy()
    return copy


def median(times, clock):
    return statistics.median(each[clock] for each in times)


def spread(ratios):
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def run(dimension=10**7, rounds=5, quiet=False, of=""):
    """The rows of the table, of mechanisms whose name has these words in it."""
    missing = {name for name, (python, _) in ENVIRONMENTS.items() if not python.exists()}
    for name in sorted(missing):
        print(f"{name}: left out, since its environment is not there ({ENVIRONMENTS[name][1]} makes it)", file=sys.stderr)
    rows, copy = [], copying(dimension)
    #: By library and number of buffers; kept, since starting one takes longer than its steps.
    rivals = {}

    def rival_of(framework, buffers):
        other = RIVALS[framework]
        # As many buffers as ours, up to the four of bench/noise.py; the others add fresh noise, and know of none.
        named = other, min(buffers, 4) if other == "jax-privacy" else 0
        if other not in missing and named not in rivals:
            rivals[named] = Half(*named, dimension, "float")
        return rivals.get(named)

    if not quiet:
        print(f"A step of noise, d = {dimension}, in ms; ratios are medians of {rounds} rounds [least, most]")
        print(f"{'mechanism':42} {'arithmetic':10} {'through':11} {'ms':>8}  {'to a copy':>22}  {'rival':12} {'ms':>8}  {'to it':18}  of processor time")
    with tempfile.TemporaryDirectory() as folder:
        chosen = {name: mechanism for name, mechanism in mechanisms().items() if of in name}
        for number, (name, mechanism) in enumerate(chosen.items()):
            file = pathlib.Path(folder) / f"{number}.safetensors"
            mechanism.save(file)
            buffers = mechanism.buffers or 0
            for arithmetic in ("exact", "float"):
                ours = [Half(each, file, dimension, arithmetic) for each in RIVALS if each not in missing]
                rival = {half.name: rival_of(half.name, buffers) for half in ours}
                times = {half: [] for half in [*ours, *filter(None, rival.values())]}
                copies = []
                for round_ in range(rounds):
                    copies.append(copy())
                    # Whoever goes first changes.
                    for half in list(times)[:: 1 if round_ % 2 else -1]:
                        times[half].append(half.step())
                for half in ours:
                    half.close()
                    other = rival[half.name]
                    row = {
                        "mechanism": name,
                        "buffers": mechanism.buffers,
                        "recalls": mechanism.recalls,
                        "arithmetic": arithmetic,
                        "framework": half.name,
                        "seconds": median(times[half], 0),
                        "processor_seconds": median(times[half], 1),
                        "copy_seconds": statistics.median(copies),
                        "to_copy": spread([a[0] / b for a, b in zip(times[half], copies)]),
                        "rival": other and other.name,
                        "rival_seconds": other and median(times[other], 0),
                        "to_rival": other and spread([a[0] / b[0] for a, b in zip(times[half], times[other])]),
                        "processor_to_rival": other and median(times[half], 1) / median(times[other], 1),
                    }
                    rows.append(row)
                    if not quiet:
                        show(row)
    for half in rivals.values():
        half.close()
    return rows


def show(row):
    def shown(ratio):
        return f"{ratio['median']:.2f} [{ratio['min']:.2f}, {ratio['max']:.2f}]"

    rival = ""
    if row["rival"]:
        rival = (f"{row['rival']:12} {1e3 * row['rival_seconds']:8.1f}  {shown(row['to_rival']):18}  "
                 f"{row['processor_to_rival']:.2f}")
    print(f"{row['mechanism']:42} {row['arithmetic']:10} {row['framework']:11} {1e3 * row['seconds']:8.1f}  "
          f"{shown(row['to_copy']):>22}  {rival}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dimension", type=lambda text: int(float(text)), default=10**7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mechanism", default="", help="only mechanisms whose name has this in it")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = run(arguments.dimension, arguments.rounds, arguments.json, arguments.mechanism)
    if arguments.json:
        print(json.dumps({"schema": 1, "dimension": arguments.dimension, "frameworks": found}))
