"""Differentially private training with optimally correlated noise.

>>> import dpmf
>>> mechanism = dpmf.plan(steps=512, momentum=0.95, epsilon=8, delta=1e-6, clip=1.0)
>>> print(mechanism.privacy)  # doctest: +ELLIPSIS
(8, 1e-6)-differential privacy for every record, over 512 steps.
...

`plan` finds the best mechanism for an optimizer, with a certificate that no mechanism is much better; told how much data there is,
it weighs samplers too, and has a `Sampler` to draw the batches. `NoiseStream` makes the noise; `DurableStream` does so across crashes. dpmf.torch, dpmf.opacus, dpmf.jax and dpmf.flower put it into
training loops.
"""

from ._core import (
    Certificate,
    DurableStream,
    Mechanism,
    NoiseKey,
    NoiseStream,
    Optimum,
    Plan,
    PrivacyStatement,
    Progress,
    Sampler,
    Workload,
    __version__,
    account,
    audit,
    calibrate_noise,
    compare,
    compose,
    factorize,
    make_mechanism,
    new_run,
    phases_delta,
    phases_epsilon,
    poisson_delta,
    poisson_epsilon,
    poisson_noise_multiplier,
)
from ._errors import (
    BindingError,
    ConvergenceError,
    Error,
    ExhaustedError,
    FileError,
    FormatError,
    HaltedError,
    LockedError,
    MismatchError,
    NoiseKeyError,
    NumericalError,
    OutOfMemoryError,
    RandomnessError,
    StepReusedError,
    StoppedError,
    UnsupportedError,
)
from ._plan import plan

__all__ = [
    "BindingError",
    "Certificate",
    "ConvergenceError",
    "DurableStream",
    "Error",
    "ExhaustedError",
    "FileError",
    "FormatError",
    "HaltedError",
    "LockedError",
    "Mechanism",
    "MismatchError",
    "NoiseKey",
    "NoiseKeyError",
    "NoiseStream",
    "NumericalError",
    "Optimum",
    "OutOfMemoryError",
    "Plan",
    "PrivacyStatement",
    "Progress",
    "RandomnessError",
    "Sampler",
    "StepReusedError",
    "StoppedError",
    "UnsupportedError",
    "Workload",
    "__version__",
    "account",
    "audit",
    "calibrate_noise",
    "compare",
    "compose",
    "factorize",
    "make_mechanism",
    "new_run",
    "phases_delta",
    "phases_epsilon",
    "plan",
    "poisson_delta",
    "poisson_epsilon",
    "poisson_noise_multiplier",
]
