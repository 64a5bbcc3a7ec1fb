"""Plan a mechanism, see what it is worth, and look at the noise.

    pip install dpmf && python plan_and_inspect.py
"""

import dpmf
import numpy as np

# What the optimizer does, and what is promised for every record.
mechanism = dpmf.mechanism(
    steps=2048,
    momentum=0.95,
    schedule="cooldown:0.25:0.05",
    epsilon=8,
    delta=1e-6,
    clip=1.0,
)
print(mechanism, "\n")
print(mechanism.privacy, "\n")

# How far from the best that any mechanism could do: a proof, checked anew from its dual variable.
certificate = mechanism.verify()
print(f"error over the lower bound for every mechanism: {certificate.ratio_to_bound:.6f}")

# The same promise by what others do.
for name in ("independent", "honaker-online", "optimal"):
    rival = dpmf.make_mechanism(mechanism.workload, name)
    print(f"{name:>15}: root loss {rival.sqrt_loss:8.1f}, {rival.buffers} model-sized buffers")

# The noise of a model with a million parameters, one row a step. It is correlated: what a row adds, later ones take
# away again, so the iterates stay close to those of training without noise.
stream = dpmf.NoiseStream(mechanism, dpmf.NoiseKey.generate(), dimension=1_000_000)
rows = np.stack([stream.next_row() for _ in range(2)])
print(f"\nscale of the noise {stream.scale:.3f}, state {stream.memory / 1e6:.0f} MB")
print(f"correlation of the first two rows: {np.corrcoef(rows)[0, 1]:+.3f}")
