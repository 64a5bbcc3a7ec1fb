"""Accounting of sampled steps: dpmf against dp-accounting's privacy loss distributions, alternating in one run.

Every point of a fixed random grid (noise multiplier, rate, steps, δ) is answered by the rival from above and from below,
then by ours with a bracket at least as narrow as the rival's was. The brackets must agree, contain the truth where it is
known (without sampling), and ours must take a twentieth of the time. Seconds are of the processor, of all threads.
"""

import argparse
import json
import math
import random
import statistics
import sys
import time

import dpmf
from dp_accounting.pld import privacy_loss_distribution as pld

#: The rival's default.
INTERVAL = 1e-4
#: Beyond this ε its grid of 1e-4 needs gigabytes.
LARGEST_EPSILON = 60.0
BAR = 20.0


def arithmetic(steps):
    """What the rival's δ may be off by, since it composes without tilting: seen where the truth is known, at rate 1."""
    return 1e-14 + 1e-16 * steps



def points(count, seed=1):
    """Noise multiplier, rate, steps and δ, spread evenly on logarithmic scales; every eighth does not sample."""
    generator = random.Random(seed)

    def between(low, high):
        return math.exp(generator.uniform(math.log(low), math.log(high)))

    for index in range(count):
        sigma, rate, steps = between(0.3, 20), between(1e-4, 1), round(between(1, 1e5))
        yield sigma, 1.0 if index % 8 == 0 else rate, steps, between(1e-12, 1e-3)


def timed(call):
    start = time.process_time()
    value = call()
    return time.process_time() - start, value


def rival(sigma, rate, steps, delta, pessimistic):
    """ε by dp-accounting, from one side."""
    one = pld.from_gaussian_mechanism(
        sigma,
        pessimistic_estimate=pessimistic,
        value_discretization_interval=INTERVAL,
        sampling_prob=rate,
        use_connect_dots=pessimistic,  # it has no dots from below
    )
    return one.self_compose(steps).get_epsilon_for_delta(delta)


def compare(sigma, rate, steps, delta, repeats):
    """One point: both brackets, both times; None where the rival has no answer."""
    about = dpmf.poisson_epsilon(sigma, rate, steps, delta, width=1e-2)[1]
    if about > LARGEST_EPSILON or delta < 2 * arithmetic(steps):
        return None
    try:
        above_seconds, above = timed(lambda: rival(sigma, rate, steps, delta, True))
        below_seconds, below = timed(lambda: rival(sigma, rate, steps, delta, False))
    except (ValueError, MemoryError, OverflowError):
        return None
    if not (math.isfinite(above) and math.isfinite(below) and below <= above):
        return None
    # Its bracket is often only rounding wide at a δ that covers everything; there ours needs no more than 1e-6.
    width = max(above - below, 1e-6)
    runs = [timed(lambda: dpmf.poisson_epsilon(sigma, rate, steps, delta, width=width)) for _ in range(repeats)]
    lower, upper = runs[0][1]
    row = {
        "noise_multiplier": sigma, "rate": rate, "steps": steps, "delta": delta,
        "lower": lower, "upper": upper, "rival_lower": below, "rival_upper": above,
        "seconds": statistics.median(seconds for seconds, _ in runs), "rival_seconds": above_seconds + below_seconds,
    }
    row["ratio"] = row["rival_seconds"] / max(row["seconds"], 1e-7)
    error = arithmetic(steps)
    row["consistent"] = (
        dpmf.poisson_epsilon(sigma, rate, steps, delta + error, width=width)[0] <= above + 1e-9
        and below <= dpmf.poisson_epsilon(sigma, rate, steps, delta - error, width=width)[1] + 1e-9
    )
    row["narrow"] = upper - lower <= width * (1 + 1e-9)
    if rate == 1:
        exact = dpmf.account(sigma / math.sqrt(steps), delta)["epsilon_exact"]
        row["exact"] = exact
        row["true"] = lower <= exact * (1 + 1e-12) and exact <= upper * (1 + 1e-12)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=480, help="points to draw; some are beyond the rival")
    parser.add_argument("--least", type=int, default=300, help="points that both must answer")
    parser.add_argument("--seconds", type=float, default=1100, help="stop after this time, if there are enough points")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    start, rows, skipped = time.monotonic(), [], 0
    rival(1.0, 0.1, 2, 1e-5, True)
    for index, point in enumerate(points(arguments.points)):
        if time.monotonic() - start > arguments.seconds and len(rows) >= arguments.least:
            break
        row = compare(*point, arguments.repeats)
        if row is None:
            skipped += 1
            continue
        rows.append(row)
        if not arguments.json and index % 20 == 0:
            print(
                f"σ {row['noise_multiplier']:7.3f}  q {row['rate']:.2e}  n {row['steps']:6d}  δ {row['delta']:.1e}   "
                f"ours [{row['lower']:.6f}, {row['upper']:.6f}] {row['seconds'] * 1e3:8.2f} ms   "
                f"dp-accounting [{row['rival_lower']:.6f}, {row['rival_upper']:.6f}] {row['rival_seconds'] * 1e3:8.1f} ms   "
                f"ratio {row['ratio']:8.1f}",
                flush=True,
            )
    ratios = [row["ratio"] for row in rows]
    summary = {
        "points": len(rows),
        "beyond_rival": skipped,
        "seconds": sum(row["seconds"] for row in rows),
        "rival_seconds": sum(row["rival_seconds"] for row in rows),
        "ratio_median": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_total": sum(row["rival_seconds"] for row in rows) / sum(row["seconds"] for row in rows),
        "inconsistent": sum(not row["consistent"] for row in rows),
        "wider_than_rival": sum(not row["narrow"] for row in rows),
        "untrue": sum(not row.get("true", True) for row in rows),
    }
    if arguments.json:
        print(json.dumps({"schema": 1, **summary, "rows": rows}))
    else:
        print()
        for name, value in summary.items():
            print(f"{name:18s} {value:.4g}" if isinstance(value, float) else f"{name:18s} {value}")
        for row in rows:
            if not (row["consistent"] and row["narrow"] and row.get("true", True)):
                print("MISSED", json.dumps(row))
    assert summary["points"] >= arguments.least, summary
    assert summary["inconsistent"] == summary["wider_than_rival"] == summary["untrue"] == 0, summary
    assert summary["ratio_median"] >= BAR and summary["ratio_total"] >= BAR, summary


if __name__ == "__main__":
    sys.exit(main())
