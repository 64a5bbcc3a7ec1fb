"""Reshuffled bins without correlation: dpmf against PLD-accounting's random allocation, in one run.

With independent noise, bins that are drawn anew in every epoch are random allocation of one step in each epoch. PLD-accounting
composes its privacy loss distributions and gives a bracket of ε; ours is the chain's proof, from above. Consistent is an ε that
is not below the rival's lower bound and not above its upper one by more than a percent. Both are timed.
"""

import argparse
import json
import time

import dpmf
from PLD_accounting import gaussian_allocation_epsilon_range

#: σ in clips, bins, epochs, δ.
CASES = [(0.9, 60, 10, 1e-5), (1.6, 60, 10, 1e-5), (1.2, 50, 20, 1e-5), (0.8, 20, 4, 1e-5), (1.0, 100, 2, 1e-6)]


def ours(sigma, bins, epochs, delta):
    start = time.perf_counter()
    mechanism = dpmf.make_mechanism(dpmf.Workload.prefix_sum(bins * epochs), "independent")
    mechanism = mechanism.with_sampling(f"reshuffled-bins:{bins}")
    # σ is in units of the sensitivity to all steps of a unit.
    epsilon = mechanism.with_noise(sigma / mechanism.sensitivity, delta).privacy.epsilon
    return epsilon, time.perf_counter() - start


def rival(sigma, bins, epochs, delta):
    start = time.perf_counter()
    upper, lower = gaussian_allocation_epsilon_range(
        delta=delta, sigma=sigma, num_steps=bins, num_selected=1, num_epochs=epochs
    )
    return lower, upper, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        epsilon, seconds = ours(*case)
        lower, upper, rival_seconds = rival(*case)
        row = dict(zip(("noise_multiplier", "bins", "epochs", "delta"), case, strict=True))
        row |= {"epsilon": epsilon, "seconds": seconds, "rival_lower": lower, "rival_upper": upper, "rival_seconds": rival_seconds}
        rows.append(row)
        if not arguments.json:
            print(
                f"σ {case[0]:<4} {case[1]:3d} bins {case[2]:2d} epochs δ {case[3]:.0e}   dpmf {epsilon:.4f} in {seconds:5.1f} s   "
                f"PLD-accounting [{lower:.4f}, {upper:.4f}] in {rival_seconds:5.1f} s   ratio {rival_seconds / seconds:.1f}",
                flush=True,
            )
        assert lower <= epsilon <= 1.01 * upper, row
    if arguments.json:
        print(json.dumps({"schema": 1, "rows": rows}))


if __name__ == "__main__":
    main()
