"""Private running totals of events over time, without any machine learning.

A service counts sign-ups every hour and publishes the total so far. Every person signs up once, so the running total is
the prefix sum of hourly counts to which each person adds 1 in one hour. The optimal mechanism for prefix sums releases
all totals of 30 days with an error that hardly grows with time; fresh noise every hour would add up.

    pip install dpmf && python streaming_counts.py
"""

import sys

import dpmf
import numpy as np

HOURS = 30 * 24
# Without a seed the noise is from the operating system, as it should be outside of demonstrations.
key = dpmf.NoiseKey.from_seed(int(sys.argv[1])) if len(sys.argv) > 1 else dpmf.NoiseKey.generate()

random = np.random.default_rng(1)
day = 1 + np.sin(2 * np.pi * np.arange(HOURS) / 24)
counts = random.poisson(5 * day)

workload = dpmf.Workload.prefix_sum(HOURS)
mechanism = dpmf.mechanism(workload=workload, epsilon=1, delta=1e-6, clip=1.0)
fresh = dpmf.mechanism(workload=workload, mechanism="independent", epsilon=1, delta=1e-6, clip=1.0)
print(f"({mechanism.privacy.epsilon:g}, {mechanism.privacy.delta:g})-differential privacy for every person\n")


def expected_error(made):
    """Standard deviation of every released total."""
    return made.privacy.noise_multiplier * made.privacy.clip * np.sqrt(made.per_step_error())


# One coordinate, since there is one counter. A dashboard with many counters takes a larger dimension, where a person who is
# in several of them must be clipped.
stream = dpmf.NoiseStream(mechanism, key, dimension=1)
total, released, errors = 0, 0.0, []
print("  day    true total    released    expected error    with fresh noise")
for hour, count in enumerate(counts):
    total += count
    noisy = np.array([count], np.float64)
    stream.add_to(noisy)
    released += float(noisy[0])  # a sum of releases, and so as private as they are
    errors.append(released - total)
    if (hour + 1) % 120 == 0:
        ours, theirs = expected_error(mechanism)[hour], expected_error(fresh)[hour]
        print(f"{(hour + 1) // 24:>5} {total:>13} {released:>11.1f} {'±':>9} {ours:>7.1f} {'±':>11} {theirs:>7.1f}")

rms, expected = np.sqrt(np.mean(np.square(errors))), np.sqrt(np.mean(np.square(expected_error(mechanism))))
print(f"\nroot mean squared error over {HOURS} hours: {rms:.1f}, expected {expected:.1f}")
print(f"certified: no mechanism of this kind can expect less than {expected / mechanism.certificate.ratio_to_bound:.1f}")
