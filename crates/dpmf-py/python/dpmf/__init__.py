"""Differentially private training with optimally correlated noise.

>>> import dpmf
>>> mechanism = dpmf.mechanism(steps=512, momentum=0.95, epsilon=8, delta=1e-6, clip=1.0)
>>> print(mechanism.privacy)  # doctest: +ELLIPSIS
(8, 1e-6)-differential privacy for every record, over 512 steps.
...

`plan` compares mechanisms and samplers for the data and the optimizer that you describe; its `Plan` has a `Sampler` that draws the
batches. `mechanism` makes a mechanism without sampling, with a certificate that no other one is much better. `NoiseStream` generates the
noise, and `DurableStream` does so across crashes. dpmf.torch, dpmf.opacus, dpmf.transformers, dpmf.jax and dpmf.flower add it to training
loops.
"""

from ._core import (
    Certificate,
    DurableStream,
    Ledger,
    Mechanism,
    Model,
    NoiseKey,
    NoiseStream,
    Optimum,
    Plan,
    PrivacyStatement,
    PrivateRun,
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
    load_model,
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
    BudgetError,
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
from ._plan import mechanism, plan
from ._table import train_table

__all__ = [
    "BindingError",
    "BudgetError",
    "Certificate",
    "ConvergenceError",
    "DurableStream",
    "Error",
    "ExhaustedError",
    "FileError",
    "FormatError",
    "HaltedError",
    "Ledger",
    "LockedError",
    "Mechanism",
    "MismatchError",
    "Model",
    "NoiseKey",
    "NoiseKeyError",
    "NoiseStream",
    "NumericalError",
    "Optimum",
    "OutOfMemoryError",
    "Plan",
    "PrivacyStatement",
    "PrivateRun",
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
    "load_model",
    "make_mechanism",
    "mechanism",
    "new_run",
    "phases_delta",
    "phases_epsilon",
    "plan",
    "poisson_delta",
    "poisson_epsilon",
    "poisson_noise_multiplier",
    "train_table",
]
