"""What the Python layer costs: a stream step and a factorization from Python beside the same calls in Rust, and then a step through
each framework beside those of others (bench/frameworks.py).

Both alternate in one run, in two processes of which one sleeps while the other works; printed are medians, the median
and spread of the paired ratio, and the ratio of processor time (from /proc), which other programs on the machine do not
disturb. Fails if a median ratio is above 1.1. Run by scripts/bench python.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import time

import dpmf
import frameworks
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rust", default=ROOT / "target/release/examples/overhead", help="the Rust half")
parser.add_argument("--dimension", type=lambda text: int(float(text)), default=10**7)
parser.add_argument("--steps", type=lambda text: int(float(text)), default=10**5)
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--no-frameworks", action="store_true", help="leave out PyTorch, JAX and Flower")
parser.add_argument("--json", action="store_true")
arguments = parser.parse_args()

rust = subprocess.Popen([arguments.rust, str(arguments.dimension), str(arguments.steps)], text=True, bufsize=1,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def in_rust(task):
    rust.stdin.write(task + "\n")
    seconds, result = rust.stdout.readline().split()
    return float(seconds), float(result)


mechanism = dpmf.make_mechanism(dpmf.Workload.sgd(1024, momentum=0.9), buffers=4)
stream = dpmf.NoiseStream(mechanism, dpmf.NoiseKey.from_seed(0), run="bench", dimension=arguments.dimension,
                          unit_noise=True)
values = np.zeros(arguments.dimension, np.float32)
workload = dpmf.Workload.sgd(arguments.steps, momentum=0.9)


def in_python(task):
    began = time.perf_counter()
    result = stream.add_to(values) if task == "noise" else dpmf.factorize(workload).certificate.loss
    return time.perf_counter() - began, result


def processor_time(process):
    """Seconds that all threads of a process have worked."""
    fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


report = {"schema": 1, "dimension": arguments.dimension, "steps": arguments.steps, "rounds": arguments.rounds}
for task in ("noise", "factorize"):
    ours, theirs = [], []
    worked = {"self": 0.0, rust.pid: 0.0}
    for round_ in range(arguments.rounds + 1):
        # Whoever goes first changes, so that neither always finds the machine warm.
        order = [(in_python, ours), (in_rust, theirs)][:: 1 if round_ % 2 else -1]
        results = []
        for run, times in order:
            seconds, result = run(task)
            times.append(seconds)
            results.append(result)
        assert results[0] == results[1], results
        if round_ == 0:
            before = {process: processor_time(process) for process in worked}
    worked = {process: processor_time(process) - before[process] for process in worked}
    # The first round, which pays for fresh pages and new threads, does not count.
    ratios = sorted(a / b for a, b in zip(ours[1:], theirs[1:]))
    report[task] = {
        "python_seconds": statistics.median(ours[1:]),
        "rust_seconds": statistics.median(theirs[1:]),
        "processor_ratio": worked["self"] / worked[rust.pid],
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
    }
rust.stdin.close()
rust.wait()

if not arguments.json:
    for task, name in (("noise", f"stream step, d = {arguments.dimension}"),
                       ("factorize", f"factorization, n = {arguments.steps}")):
        row = report[task]
        low, high = row["ratio_quartiles"]
        print(f"{name}: Python {1e3 * row['python_seconds']:.1f} ms, Rust {1e3 * row['rust_seconds']:.1f} ms, "
              f"ratio {row['ratio']:.3f} (quartiles {low:.3f} to {high:.3f}), of processor time "
              f"{row['processor_ratio']:.3f}")
if not arguments.no_frameworks:
    report["frameworks"] = frameworks.run(arguments.dimension, quiet=arguments.json)
if arguments.json:
    print(json.dumps(report))
slow = [task for task in ("noise", "factorize") if report[task]["ratio"] > 1.1]
if slow:
    raise SystemExit(f"above 1.1 times Rust: {', '.join(slow)}")
