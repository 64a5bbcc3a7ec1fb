"""Correlated noise: dpmf against numpy, jax and jax-privacy, alternating in one run.

Every round times ours, then each rival, and the paired ratios are printed as median and spread. Ours is the program's
own `bench noise`, which checks the variance of everything it draws; what a rival draws is checked here. The rivals
write into memory that exists already where they can: numpy by `out=`, jax-privacy by donating its state.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import buffered_toeplitz

BUFFERS = 4


class Table:
    """Rows of the report: a ratio in every round, a bar, a verdict."""

    def __init__(self, quiet):
        self.quiet = quiet
        self.rows = []

    def add(self, what, ours, rival, rival_name, *, at_least=None, at_most=None):
        """Pairs the seconds of each round; the ratio is rival over ours for `at_least`, ours over rival for
        `at_most`."""
        ratios = [b / a if at_least else a / b for a, b in zip(ours, rival, strict=True)]
        median = statistics.median(ratios)
        row = {
            "what": what,
            "seconds": statistics.median(ours),
            "rival": rival_name,
            "rival_seconds": statistics.median(rival),
            "ratio_median": median,
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "bar": f"≥ {at_least}" if at_least else f"≤ {at_most}",
            "ok": median >= at_least if at_least else median <= at_most,
        }
        self.rows.append(row)
        if not self.quiet:
            print(
                f"{what:44s} {row['seconds'] * 1e3:9.2f} ms   {rival_name} {row['rival_seconds'] * 1e3:9.2f} ms   "
                f"ratio {median:7.3f}  [{min(ratios):.3f}, {max(ratios):.3f}]   bar {row['bar']:7s} "
                f"{'ok' if row['ok'] else 'MISSED'}",
                flush=True,
            )


def bench(program, *arguments):
    """One run of `dpmf bench noise`."""
    run = subprocess.run(
        [program, "bench", "noise", *map(str, arguments), "--json"], check=True, capture_output=True, text=True
    )
    return json.loads(run.stdout)


def field(program, dimension, threads, rounds=5):
    """Seconds to draw a row of white noise."""
    found = bench(program, "--dimension", dimension, "--mechanism", "none", "--threads", threads, "--rounds", rounds)
    assert found["threads"] == threads, found
    check_ratio(found["field_variance_ratio"], dimension)
    return found["field_seconds"]


def state_space(program, dimension, file, rounds=5):
    """The row of the table for a mechanism file."""
    (row,) = bench(program, file, "--dimension", dimension, "--rounds", rounds)["rows"]
    assert row["buffers"] == BUFFERS, row
    check_ratio(row["variance_ratio"], dimension)
    return row


def check_ratio(ratio, count):
    """A mean square over its expectation, within seven standard deviations."""
    assert abs(ratio - 1) < 7 * math.sqrt(2 / count) + 1e-5, ratio


def timed(call):
    start = time.perf_counter()
    value = call()
    return time.perf_counter() - start, value


def mean_square(values):
    """In double precision, piece by piece."""
    return sum(float(np.dot(p, p)) for p in (np.asarray(q, np.float64) for q in np.array_split(values, 64))) / values.size


def numpy_field(dimension):
    """A timed draw by numpy, on the one thread that it has."""
    generator = np.random.default_rng(0)
    out = np.empty(dimension, np.float32)

    def draw():
        seconds, _ = timed(lambda: generator.standard_normal(dtype=np.float32, out=out))
        return seconds

    draw()
    check_ratio(mean_square(out), dimension)
    return draw


def jax_field(dimension):
    """A timed draw by jax, compiled."""
    normal = jax.jit(lambda key: jax.random.normal(key, (dimension,), jnp.float32))
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def draw():
        return timed(lambda: normal(next(keys)).block_until_ready())

    check_ratio(mean_square(np.asarray(draw()[1])), dimension)
    return lambda: draw()[0]


class Privatizer:
    """jax-privacy's noise with as many buffers as ours, compiled.

    Its best case: gradient and state are donated, and buffers are kept in single precision (with
    `inverse_as_streaming_matrix` under x64, as its documentation has it, they would be doubles).
    """

    def __init__(self, dimension, steps=1024):
        with jax.enable_x64(True):
            blt = buffered_toeplitz.optimize(n=steps, min_buffers=BUFFERS, max_buffers=BUFFERS)
            assert len(blt.buf_decay) == BUFFERS
            first = 2
            expected = float((np.linalg.inv(np.asarray(blt.materialize(first)))[-1] ** 2).sum())
            # What inverse_as_streaming_matrix builds, from the same parameters rounded.
            single = buffered_toeplitz.StreamingMatrixBuilder(
                output_scale=np.asarray(blt.output_scale, np.float32), buf_decay=np.asarray(blt.buf_decay, np.float32)
            )
        privatizer = noise_addition.matrix_factorization_privatizer(
            single.build_inverse(), stddev=1.0, prng_key=jax.random.key(0)
        )
        self.state = privatizer.init(jnp.zeros(dimension, jnp.float32))
        self.update = jax.jit(privatizer.update, donate_argnums=(0, 1))
        self.gradient = jnp.zeros(dimension, jnp.float32)
        for _ in range(first - 1):
            self.step()
        self.gradient = jnp.zeros(dimension, jnp.float32)
        self.step()
        check_ratio(mean_square(np.asarray(self.gradient)) / expected, dimension)

    def step(self):
        """Seconds of one step: draw, correlate, add."""

        def run():
            self.gradient, self.state = jax.block_until_ready(self.update(self.gradient, self.state))

        return timed(run)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", default="target/release/dpmf")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=["field", "step", "scaling", "table"], nargs="+")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    parts = arguments.part or ["field", "step", "scaling", "table"]
    program, rounds = arguments.program, range(arguments.rounds)
    threads = len(os.sched_getaffinity(0))
    table = Table(arguments.json)
    ten = 10**7

    if "field" in parts:
        rivals = {"numpy": numpy_field(ten), "jax.random.normal": jax_field(ten)}
        times = {name: [] for name in ["ours", "one thread", *rivals]}
        for _ in rounds:
            times["ours"].append(field(program, ten, threads))
            times["one thread"].append(field(program, ten, 1))
            for name, draw in rivals.items():
                times[name].append(draw())
        for name, bar in [("numpy", 4), ("jax.random.normal", 8), ("one thread", 1.8)]:
            table.add(f"field, d = 10⁷, {threads} threads", times["ours"], times[name], name, at_least=bar)

    with tempfile.TemporaryDirectory() as folder:

        def mechanism(steps):
            file = os.path.join(folder, f"n{steps}.safetensors")
            if not os.path.exists(file):
                command = [program, "factorize", "--steps", str(steps), "--streaming", "--buffers", str(BUFFERS)]
                subprocess.run([*command, "--out", file, "--json"], check=True, capture_output=True)
            return file

        if "step" in parts:
            for exponent in [7, 8]:
                dimension, label = 10**exponent, f"d = 10{'⁰¹²³⁴⁵⁶⁷⁸⁹'[exponent]}"
                rival = Privatizer(dimension)
                ours, copies, exact, theirs = [], [], [], []
                for _ in rounds:
                    row = state_space(program, dimension, mechanism(1024))
                    ours.append(row["seconds"])
                    copies.append(row["copy_seconds"])
                    exact.append(row["exact_seconds"])
                    theirs.append(rival.step())
                del rival
                table.add(f"step, {BUFFERS} buffers, {label}", ours, copies, "copy", at_most=3)
                table.add(f"step, {BUFFERS} buffers, {label}", ours, theirs, "jax-privacy", at_least=8)
                table.add(f"exact step, {BUFFERS} buffers, {label}", exact, ours, "float step", at_most=4)
                table.add(f"exact step, {BUFFERS} buffers, {label}", exact, theirs, "jax-privacy", at_least=1)

        if "scaling" in parts:
            short, long = [], []
            for _ in rounds:
                short.append(state_space(program, ten, mechanism(10**3), rounds=11)["seconds"])
                long.append(state_space(program, ten, mechanism(10**6), rounds=11)["seconds"])
            table.add("step, n = 10⁶ against n = 10³", long, short, "n = 10³", at_most=1.1)
            small, large = [], []
            for _ in rounds:
                small.append(100 * state_space(program, 10**6, mechanism(1024), rounds=51)["seconds"])
                large.append(state_space(program, 10**8, mechanism(1024))["seconds"])
            table.add("step, d = 10⁸ against 100 × d = 10⁶", large, small, "d = 10⁶", at_most=1.5)

    found = bench(program, "--dimension", ten) if "table" in parts else None
    if found and not arguments.json:
        print(f"\n{'mechanism':16s} {'buffers':>7s} {'loss ratio':>10s} {'step ms':>8s} {'copy ms':>8s} {'ratio':>6s}")
        for row in found["rows"]:
            print(
                f"{row['mechanism']:16s} {row['buffers']:7d} {row['ratio_to_bound']:10.5f} {row['seconds'] * 1e3:8.2f} "
                f"{row['copy_seconds'] * 1e3:8.2f} {row['ratio_to_copy']:6.2f}"
            )
    if arguments.json:
        print(json.dumps({"schema": 1, "noise": table.rows, "engines": found and found["rows"]}))


if __name__ == "__main__":
    main()
